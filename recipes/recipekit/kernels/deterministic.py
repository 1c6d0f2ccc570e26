"""Switches on, and reads back on every rank, the settings with which a run on the same GPUs gives
the same bits (`--deterministic`).

A CPU does not need them: the same number of threads adds in the same order anyway. They are set
there, too, so that the command means the same everywhere.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

from ..spec.refusal import Problem, Refusal, refuse

# Variable -> the values that suffice; the first is set if the user's environment has none.
VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),  # cuBLAS: no workspace that two streams share
    "NCCL_ALGO": ("Ring",),  # one order of summation, whatever the tuner thinks of a message's size
    "NCCL_NVLS_ENABLE": ("0",),  # no sums inside the switch
    "FLASH_ATTENTION_DETERMINISTIC": ("1",),  # --attention flash_attention_2: transformers reads it
}


def check_environment(environment: Mapping[str, str]) -> list[Problem]:
    """Refuses variables whose value, set by the user, allows another order of summation."""
    return [
        Problem(
            f"{name}={environment[name]}",
            "contradicts --deterministic",
            f"unset it, or set it to {' or '.join(values)}",
        )
        for name, values in VARIABLES.items()
        if environment.get(name, values[0]) not in values
    ]


def switch_on() -> None:
    """Sets everything, before this process uses CUDA. Raises `Refusal` if that is too late, or if
    the environment contradicts it.
    """
    import torch

    if problems := check_environment(os.environ):
        raise Refusal(problems)
    if torch.cuda.is_initialized():
        raise refuse(
            "--deterministic",
            "CUDA was used before the run started, so cuBLAS has already allocated its workspace",
            "do not use CUDA while the recipe is imported",
        )
    for name, values in VARIABLES.items():
        os.environ.setdefault(name, values[0])
    torch.use_deterministic_algorithms(True)
    # If this were True, torch would fill every torch.empty with NaN: one more write for each
    # buffer, and NaN in the padding of ZeRO's partitions, which nothing ever sets.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)


def in_force() -> dict[str, Any]:
    """Reads the value of each setting in this process, from the place where it takes effect."""
    import torch

    return {name: os.environ.get(name) for name in VARIABLES} | {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,  # pyright: ignore[reportAttributeAccessIssue]
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
    }


def check_in_force() -> dict[str, Any]:
    """Returns the settings of this rank.

    Raises `Refusal` with those that something has changed back since `switch_on`.
    """
    wanted = {
        "deterministic_algorithms": (True,),
        "fill_uninitialized_memory": (False,),
        "cudnn_deterministic": (True,),
        "cudnn_benchmark": (False,),
        "cudnn_attention": (False,),
    }
    found = in_force()
    if wrong := [
        f"{name}={found[name]}"
        for name, values in (VARIABLES | wanted).items()
        if found[name] not in values
    ]:
        where = f"--deterministic on rank {os.environ.get('RANK', '0')}"
        raise refuse(
            where,
            f"the settings have changed since the start: {', '.join(wrong)}",
            f"remove that from the code that the recipe imports or runs in adapt ({sys.argv[0]})",
        )
    return found
