"""The packages whose FlashAttention kernels torch's own attention can use, checked by metadata.

`--attention flash3` and `--attention flash4` replace the kernels below torch's `varlen_attn`
(torch.nn.attention.activate_flash_attention_impl). torch calls private functions of these packages,
so only certain releases fit. This module imports neither torch nor the packages.
"""

import importlib.util
import re
from importlib.metadata import PackageNotFoundError, version

from ..spec.errors import Problem
from ..spec.recipe import FLASH_KERNELS

# Each list was compared with torch 2.13's sources.
TORCH_SERIES = "2.13"
# torch 2.13 expects two results of _flash_attn_fwd (_fa4.py). From b22 on, there are four or five.
OLDEST_BETA, NEWEST_BETA = 10, 16
FIT_OF_FLASH4 = f"4.0.0b{OLDEST_BETA} to 4.0.0b{NEWEST_BETA}"
USE_VARLEN = "use --attention varlen, which needs no other package"


def check_flash_attention(attention: str, gpus: bool) -> list[Problem]:
    """Return a problem if a requested FlashAttention release cannot run on this host, else [].

    `gpus` is True if the run uses GPUs. Their compute capability is checked later, with torch
    (model/device.py).
    """
    if attention not in FLASH_KERNELS:
        return []
    where = f"attention = {attention}"
    if not gpus:
        return [Problem(where, "requires an NVIDIA GPU, and this run uses the CPU", USE_VARLEN)]
    torch_release = installed("torch")
    if not torch_release.startswith(f"{TORCH_SERIES}."):
        rule = f"requires torch {TORCH_SERIES}, and torch {torch_release} is installed"
        if attention == "flash4" and torch_release.startswith("2.11."):
            rule += ", whose backward pass refuses the windows that varlen_attn passes"
        return [Problem(where, rule, USE_VARLEN)]
    rule, fix = _misfit_of_flash4() if attention == "flash4" else _misfit_of_flash3()
    return [Problem(where, rule, fix)] if rule else []


def installed(package: str) -> str:
    """Return the installed version of a package, such as 2.13.0, or ""."""
    try:
        return version(package).split("+")[0]
    except PackageNotFoundError:
        return ""


def _misfit_of_flash4() -> tuple[str, str]:
    """Return (why the installed flash-attn-4 does not fit, the fix), or two empty texts."""
    found = installed("flash-attn-4")
    beta = re.fullmatch(r"4\.0\.0b(\d+)", found)
    if beta and OLDEST_BETA <= int(beta[1]) <= NEWEST_BETA:
        return "", ""
    return (
        f"requires flash-attn-4 {FIT_OF_FLASH4} with torch {TORCH_SERIES}, and"
        f" {found or 'no release'} is installed",
        f"run: pip install flash-attn-4==4.0.0b{NEWEST_BETA}, or {USE_VARLEN}",
    )


def _misfit_of_flash3() -> tuple[str, str]:
    """Return (why the installed FlashAttention 3 does not fit, the fix), or two empty texts.

    No package index has FlashAttention 3 with a backward pass, so its release is not pinned.
    """
    build = "build the folder hopper of FlashAttention's sources"
    if (found := installed("fa3-fwd")) and not installed("flash-attn-3"):
        rule = f"requires a backward pass, and fa3-fwd {found} computes only the forward pass"
        return rule, f"{build}, or {USE_VARLEN}"
    if importlib.util.find_spec("flash_attn_interface") is None:
        return (
            "requires FlashAttention 3, and its module flash_attn_interface is not installed",
            f"{build}, or {USE_VARLEN}",
        )
    return "", ""
