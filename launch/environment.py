"""Chooses the environment variables that travel to the other hosts, and those that nobody may see."""

import fnmatch
import re

# What a run needs. Everything else comes from the login on each host, so that a path or a display of this machine does not travel.
NEEDED = (
    *("WANDB_*", "HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "DATASETS_*", "TOKENIZERS_PARALLELISM", "XDG_CACHE_HOME"),
    *("NCCL_*", "GLOO_*", "UCX_*", "UCC_*", "FI_*", "MV2_*", "MLFLOW_*", "RDMAV_*"),
    *("PYTHON*", "OMP_*", "MKL_*", "TORCH*", "PYTORCH_*", "TRITON_*", "CUDA_*", "DS_*", "DEEPSPEED_*", "LD_LIBRARY_PATH", "ACCELERATE_*"),
)
OF_ONE_HOST = ("CUDA_VISIBLE_DEVICES",)  # each host sets these for its own devices
# Secrets that recipes read. They travel on the same encrypted stdin as the rest, and their values are never printed or written.
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
SECRET = re.compile(r"(^|_)(TOKENS?|SECRETS?|PASSWORDS?|PASSWD|PASS|PASSPHRASE|CREDENTIALS?|AUTH|APIKEYS?|KEYS?)\d*(_|$)")
PASSWORD = re.compile(r"://[^/]*:[^/]*@")  # a password in an address
PLACE = re.compile(r"_(PATH|FILE|DIR|HOME)$")  # the path of a file that holds a secret is no secret


def is_secret(name: str, value: str) -> bool:
    """Returns True for a variable with a secret's name, unless it is known to be harmless, and for an address with a password."""
    called = bool(SECRET.search(name.upper())) and not PLACE.search(name.upper())
    return name in SECRETS or called or bool(PASSWORD.search(value))


def needed(variables: dict[str, str], more: list[str]) -> dict[str, str]:
    """Selects the variables that a run needs on every host, without secrets; `more`: names that the user added."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name not in OF_ONE_HOST and not is_secret(name, value) and (name in more or any(fnmatch.fnmatchcase(name, pattern) for pattern in NEEDED))
    }


def secrets(variables: dict[str, str], more: list[str]) -> dict[str, str]:
    """Selects the secrets that are set and that recipes read or the user named."""
    return {name: value for name, value in sorted(variables.items()) if name in SECRETS or (name in more and is_secret(name, value))}
