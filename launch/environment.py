"""The environment variables that reach the ranks, and the variables that must stay secret.

ssh, `--where slurm`, slurm.sbatch and Kubernetes share one list: NAMES and the patterns in
FAMILIES. Listed variables that are not passed on are reported by name. All other variables come
from the login on each host, so paths or displays of this machine are not passed on. sbatch itself
supports no patterns, so slurm.sbatch lists the known variables of each family.
"""

import fnmatch
import re

NAMES = (
    *(
        "http_proxy",
        "https_proxy",
        "ftp_proxy",
        "all_proxy",
        "no_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "FTP_PROXY",
        "ALL_PROXY",
        "NO_PROXY",
    ),
    *(
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
        "WEBSOCKET_CLIENT_CA_BUNDLE",
    ),
    *(
        "SCRATCH",
        "WORK",
        "XDG_CACHE_HOME",
        "LD_LIBRARY_PATH",
        "TOKENIZERS_PARALLELISM",
        "DO_NOT_TRACK",
    ),
    "LAUNCH_GRACE",  # seconds between the scheduler's signal and its kill
)
FAMILIES = (
    *(
        "WANDB_*",
        "HF_*",
        "HUGGINGFACE_*",
        "HUGGING_FACE_*",
        "TRANSFORMERS_*",
        "DATASETS_*",
        "AWS_*",
        "MLFLOW_*",
    ),
    *("NCCL_*", "GLOO_*", "UCX_*", "UCC_*", "FI_*", "MV2_*", "RDMAV_*"),
    *(
        "PYTHON*",
        "OMP_*",
        "MKL_*",
        "TORCH*",
        "PYTORCH_*",
        "TRITON_*",
        "CUDA_*",
        "DS_*",
        "DEEPSPEED_*",
        "ACCELERATE_*",
    ),
)
# Each host has its own devices. WANDB_SERVICE is the socket of a process on this machine.
OF_ONE_HOST = ("CUDA_VISIBLE_DEVICES", "WANDB_SERVICE")
# Secrets that recipes read. They are sent over the same encrypted stdin as all other variables.
# Their values are never printed or written.
SECRETS = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
)
SECRET = re.compile(
    r"(^|_)(TOKENS?|SECRETS?|PASSWORDS?|PASSWD|PASS|PASSPHRASE|CREDENTIALS?|AUTH|APIKEYS?|KEYS?)\d*(_|$)"
)
# The path of a file that contains a secret is not a secret.
PLACE = re.compile(r"_(PATH|FILE|DIR|HOME)$")
SWITCH = re.compile(r"[01]?|true|false|yes|no|on|off", re.IGNORECASE)
# Matches https://TOKEN@host, https://user:pass/word@host and user:password@proxy:3128, but not
# https://host:443/a@b.
USER = re.compile(r"://(?:[^/\s]*@|[^/\s:]*:(?!\d+/)\S*@)|^[^/\s@]+:(?!//)[^\s@]+@")
# These patterns match ?key=VALUE in an address, `x-api-key: VALUE` in a list of headers, and a hub
# token or an AWS id in a path.
PARAMETER = re.compile(
    r"(?:TOKEN|SECRET|PASSWORD|PASSWD|PWD|PASSPHRASE|CREDENTIAL|KEY|AUTH|SIG|SIGNATURE)=[^\s&;,]",
    re.IGNORECASE,
)
HEADER = re.compile(
    r"\b(?:AUTHORIZATION|TOKEN|(?:X-)?API-?KEY)[\"']?\s*:\s*\S|\bBEARER\s", re.IGNORECASE
)
SHAPE = re.compile(r"\bhf_[A-Za-z0-9]{20,}|\bAKIA[A-Z0-9]{16}\b")


def is_listed(name: str) -> bool:
    """Return True for a variable that a run may need on every host."""
    return name in NAMES or any(fnmatch.fnmatchcase(name, pattern) for pattern in FAMILIES)


def holds_secret(value: str) -> bool:
    """Return True for a value, such as an address, that contains a user, password, key or token."""
    return any(pattern.search(value) for pattern in (USER, PARAMETER, HEADER, SHAPE))


def shown(word: str) -> str:
    """Return a word of a command line in a form that may be printed.

    An address with a key or password is shortened to its scheme.
    """
    return re.sub(r"://\S*", "://...", word) if "://" in word and holds_secret(word) else word


def is_secret(name: str, value: str) -> bool:
    """Return True for a variable whose value must not be shown.

    Either its name indicates a secret, or its value contains a key or password.
    """
    return name in SECRETS or _is_called_secret(name, value) or holds_secret(value)


def _is_called_secret(name: str, value: str) -> bool:
    """Return True for a variable whose name indicates a secret.

    Paths and switches, such as HF_HUB_DISABLE_IMPLICIT_TOKEN=1, are not secret.
    """
    return (
        bool(SECRET.search(name.upper()))
        and not PLACE.search(name.upper())
        and not SWITCH.fullmatch(value)
    )


def needed(variables: dict[str, str], more: list[str]) -> dict[str, str]:
    """Select the variables that a run needs on every host, without secrets.

    `more` lists names that the user added.
    """
    return {
        name: value
        for name, value in sorted(variables.items())
        if name not in OF_ONE_HOST
        and not is_secret(name, value)
        and (name in more or is_listed(name))
    }


def secrets(variables: dict[str, str], more: list[str]) -> dict[str, str]:
    """Select the secrets to pass on.

    They are the secrets that recipes read, the secrets that the user named, and listed addresses
    that contain a password.
    """
    return {
        name: value
        for name, value in sorted(variables.items())
        if name in SECRETS
        or (name in more and is_secret(name, value))
        or (
            is_listed(name)
            and name not in OF_ONE_HOST
            and is_secret(name, value)
            and not _is_called_secret(name, value)
        )
    }


def left_behind(variables: dict[str, str], passed: dict[str, str], way: str) -> list[str]:
    """Return a line about the listed variables that are not `passed`, or [] if all are passed.

    `way` explains how a secret can reach the hosts.
    """
    names = [name for name in sorted(variables) if is_listed(name) and name not in passed]
    secret = [name for name in names if is_secret(name, variables[name])]
    others = [name for name in names if name not in secret]
    parts = [f"{', '.join(secret)} (secret: {way})"] if secret else []
    parts += [f"{', '.join(others)} (of this machine)"] if others else []
    return [f"variables that stay here: {'; '.join(parts)}"] if parts else []
