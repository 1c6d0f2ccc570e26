"""Settings that make runs on the same GPUs bit-identical (`--deterministic`).

The settings are applied at the start and read back on every rank. A CPU does not need them, because
a fixed number of threads always sums in the same order. They are nevertheless applied on a CPU, so
that the flag has the same meaning everywhere.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

from ..compat.torch import set_deterministic
from ..spec.errors import ConfigError, Problem, config_error

# Variable -> accepted values. The first value is set if the user's environment contains none.
DETERMINISM_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),  # cuBLAS: no workspace shared by two streams
    "NCCL_ALGO": ("Ring",),  # a fixed order of summation, independent of the tuner's choice
    "NCCL_NVLS_ENABLE": ("0",),  # no summation inside the switch
    "FLASH_ATTENTION_DETERMINISTIC": ("1",),  # read by transformers for flash_attention_2
}


def check_environment(environment: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each variable whose value permits a different order of summation."""
    return [
        Problem(
            f"{name}={environment[name]}",
            "contradicts --deterministic",
            f"unset it, or set it to {' or '.join(values)}",
        )
        for name, values in DETERMINISM_VARIABLES.items()
        if environment.get(name, values[0]) not in values
    ]


def enable_determinism() -> None:
    """Apply all settings. Must be called before the process uses CUDA.

    Raise `ConfigError` if CUDA is already in use, or if the environment contradicts the settings.
    """
    import torch

    if problems := check_environment(os.environ):
        raise ConfigError(problems)
    if torch.cuda.is_initialized():
        raise config_error(
            "--deterministic",
            "CUDA was used before the run started, so cuBLAS has already allocated its workspace",
            "do not use CUDA while the recipe is imported",
        )
    for name, values in DETERMINISM_VARIABLES.items():
        os.environ.setdefault(name, values[0])
    torch.use_deterministic_algorithms(True)
    set_deterministic()
    torch.backends.cuda.enable_cudnn_sdp(False)


def active_settings() -> dict[str, Any]:
    """Return each setting's value in this process, read from the place where it takes effect."""
    import torch

    return {name: os.environ.get(name) for name in DETERMINISM_VARIABLES} | {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,  # pyright: ignore[reportAttributeAccessIssue]
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
    }


def check_active_settings() -> dict[str, Any]:
    """Return this rank's settings.

    Raise `ConfigError` if a setting was changed after `enable_determinism`.
    """
    wanted = {
        "deterministic_algorithms": (True,),
        "fill_uninitialized_memory": (False,),
        "cudnn_deterministic": (True,),
        "cudnn_benchmark": (False,),
        "cudnn_attention": (False,),
    }
    found = active_settings()
    if wrong := [
        f"{name}={found[name]}"
        for name, values in (DETERMINISM_VARIABLES | wanted).items()
        if found[name] not in values
    ]:
        where = f"--deterministic on rank {os.environ.get('RANK', '0')}"
        raise config_error(
            where,
            f"the settings have changed since the start: {', '.join(wrong)}",
            f"remove that from the code that the recipe imports or runs in adapt ({sys.argv[0]})",
        )
    return found
