"""Checks of the accounts that a run uses: W&B and the Hugging Face Hub."""

import importlib.util
import os
import threading
import urllib.error
import urllib.request

from ..spec.errors import Problem
from .findings import Findings, ReportRow

# A variable of transformers' Trainer (4.x reads it; 5.22 has only --report_to).
WANDB_DISABLED_VARIABLE = "WANDB_DISABLED"
ON, OFF = ("1", "on", "yes", "true"), ("", "0", "off", "no", "false")


def wandb_disabled() -> bool:
    """Return True if the user has disabled W&B with Trainer's variable."""
    return os.environ.get(WANDB_DISABLED_VARIABLE, "").lower() in ON


def check_wandb_disabled(wanted: bool, typed: frozenset[str]) -> list[Problem]:
    """Return a problem if WANDB_DISABLED is neither true nor false, or contradicts --wandb."""
    value = os.environ.get(WANDB_DISABLED_VARIABLE, "")
    if wanted and value.lower() not in ON + OFF:
        return [
            Problem(
                f"{WANDB_DISABLED_VARIABLE} = {value}",
                "must be true or false",
                "write true to record nothing in W&B, or unset it",
            )
        ]
    if wanted and "wandb" in typed and wandb_disabled():
        return [
            Problem(
                f"--wandb with {WANDB_DISABLED_VARIABLE} = {value}",
                "cannot be combined",
                f"leave out --wandb, or unset {WANDB_DISABLED_VARIABLE}",
            )
        ]
    return []


def check_wandb_installed(wanted: bool, typed: frozenset[str]) -> list[Problem]:
    """Return a problem if the user requested W&B but its package is missing.

    `wanted` is True if the recipe records with W&B. If no flag or variable requests W&B, the run
    continues without the package.
    """
    mode = os.environ.get("WANDB_MODE", "")
    wished = (
        "--wandb"
        if "wandb" in typed
        else f"WANDB_MODE = {mode}"
        if mode in ("online", "shared")
        else ""
    )
    if not wanted or not wished or wandb_disabled() or importlib.util.find_spec("wandb"):
        return []
    return [
        Problem(
            wished,
            "the package wandb is not installed",
            "run: pip install -r requirements.txt, or leave it out, because metrics.jsonl contains"
            " the same metrics",
        )
    ]


def check_wandb_login(wanted: bool) -> Findings:
    """Check that the user is logged in to W&B if the run should be recorded online."""
    mode = os.environ.get("WANDB_MODE", "")
    if not wanted or wandb_disabled() or mode not in ("", "online", "shared"):
        yield ReportRow("W&B", "off" if not wanted or wandb_disabled() else mode)
        return
    try:
        import wandb
        from wandb.sdk.lib import wbauth
    except ImportError:
        return  # `check_package_versions` reports the missing package
    try:
        host = wandb.setup().settings.base_url
        known = (
            wbauth.authenticate_session(
                host=host, source="doctor", prompt=False, update_session=False
            )
            is not None
        )
    except (wandb.Error, ValueError) as error:  # the error text may contain part of the key
        yield Problem(
            "W&B login",
            f"cannot be used ({type(error).__name__})",
            "run: wandb login --relogin, or set WANDB_API_KEY",
        )
        return
    yield ReportRow("W&B", "logged in" if known else "not logged in: the run is recorded offline")
    if mode and not known:
        yield Problem(
            f"WANDB_MODE = {mode}",
            "this host is not logged in to W&B",
            "run: wandb login, or set WANDB_API_KEY, or WANDB_MODE=offline",
        )


def check_hub_access(model: str | None, patience: float = 10.0) -> Findings:
    """Ask the Hub whether this host may download `model`.

    If `model` is None, the run downloads no model.
    """
    try:
        from huggingface_hub import constants, get_token
    except ImportError:
        return  # `check_package_versions` reports the missing package
    token = get_token()
    if model is None or constants.HF_HUB_OFFLINE:
        yield ReportRow("Hugging Face", f"{'' if token else 'not '}logged in, no model to download")
        return
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(
        f"{constants.ENDPOINT}/api/models/{model}/auth-check", headers=headers
    )
    answer: list[str] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(request, timeout=patience):
                answer.append("")
        except urllib.error.HTTPError as error:
            answer.append(error.headers.get("X-Error-Code") or str(error.code))
        except (OSError, ValueError) as error:
            answer.append(f"unreachable: {getattr(error, 'reason', error)}")

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(patience)  # an unresponsive name server outlasts every request timeout
    found = answer[0] if answer else f"unreachable: no answer within {patience:.0f} s"
    page = f"https://huggingface.co/{model}"
    yield ReportRow(
        "Hugging Face",
        f"{'' if token else 'not '}logged in, {model}"
        f" {'may be read' if not found else 'may not be read'}",
    )
    if found.startswith("unreachable"):
        yield Problem(
            f"model = {model}",
            f"is not on this host, and the hub is {found}",
            f"download it on a machine with network access: hf download {model}",
        )
    elif found == "GatedRepo":
        fix = f"ask for access at {page}, then `hf auth login`"
        yield Problem(
            f"model = {model}",
            "is gated, and this host is not logged in with an account that may read it",
            fix,
        )
    elif found:
        yield Problem(
            f"model = {model}",
            f"does not exist at {page}, or is private ({found})",
            "check the name. If it is right, run: hf auth login",
        )
