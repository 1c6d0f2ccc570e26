"""Completes the variables that torch reads when it is imported: how it allocates memory, how many
threads a rank computes with.

What the user set stays. Imports nothing heavy: it has to come before torch.
"""

import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from ..hosts.torch_builds import installed
from ..planner.pinned import ROUNDED_UP_TO, pins, pins_exactly
from ..spec.cores import cpu_limit, whole_cores
from .stopping import command_line, parent

NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
THREADS = "OMP_NUM_THREADS"
# Launcher, its flag for the number of ranks, and all flags that decide that number, with _ instead
# of -
LAUNCHERS = (
    (
        "deepspeed",
        "--num_gpus",
        ("__num_gpus", "__num_accelerators", "__include", "_i", "__hostfile", "_H"),
    ),
    ("torchrun", "--nproc_per_node", ("__nproc_per_node", "__nnodes")),
)


def complete(
    variables: MutableMapping[str, str], ds_config: dict[str, Any], ranks: int
) -> list[str]:
    """Sets what a run with this JSON needs, on a host with so many ranks, and the user left open;
    returns a line about each thing that was decided.
    """
    # torch 2.11 ends with an error at an unknown key
    name, variables[name] = allocator_settings(variables, pins(ds_config) and pins_exactly())
    lines = [f"allocator: {variables[name]} ({name})"] if installed() else []
    own, limit = len(os.sched_getaffinity(0)), cpu_limit()
    # srun, or numactl, may have bound the rank: then its cores are its own, but all ranks share
    # what a cgroup allows
    sharing = 1 if own * ranks <= len(os.sched_getaffinity(os.getppid())) else ranks
    share, allowed = own // sharing, whole_cores(limit) // ranks
    count = max(1, min(share, allowed))
    if THREADS not in variables and (sharing > 1 or count < own):
        variables[THREADS] = str(count)
        if "torch" in sys.modules:  # a recipe's file has imported it, and it has read the variable
            sys.modules["torch"].set_num_threads(count)
        cores = f"{own} cores" if share <= allowed else f"a CPU limit of {limit:g} cores"
        lines.append(
            f"threads: {count} for each rank, {cores} for {ranks} rank{'s' if ranks > 1 else ''}"
            f" ({THREADS})"
        )
    elif (
        variables.get(THREADS) == "1"
        and "TORCHELASTIC_RUN_ID" in variables
        and count > 1
        and on_host(ds_config)
    ):
        lines.append(
            f"threads: 1 for each rank, set by torchrun. The CPU optimizer could use {count}: start"
            f" with {THREADS}={count}"
        )
    return lines + hint_at_ranks(variables, min(own, whole_cores(limit)))


def hint_at_ranks(variables: Mapping[str, str], cores: int) -> list[str]:
    """Return a line if a launcher has started one rank on several cores without a GPU, and nobody
    has typed a number of ranks.
    """
    gpus = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    if cores < 2 or variables.get("WORLD_SIZE") != "1" or "LAUNCH_LOGS" in variables or gpus:
        return []
    commands = [command_line(pid) for pid in (os.getppid(), parent(os.getppid())) if pid]
    for launcher, flag, counts in LAUNCHERS:
        typed = [
            word.partition("=")[0].replace("-", "_")
            for words in commands
            if launcher in map(os.path.basename, words[:2])
            for word in words
        ]
        if typed and not {*typed} & {*counts}:
            return [
                f"1 rank on {cores} cores, and no GPU: {launcher} {flag} {cores} {sys.argv[0]}"
                f" starts {cores} ranks"
            ]
    return []


def allocator_settings(variables: Mapping[str, str], exact_pins: bool) -> tuple[str, str]:
    """Returns (variable, value) for torch's allocators: our settings, under the user's own of both
    variables, which stay.

    Memory grows in expandable segments, so that tensors of other sizes fit into what was freed;
    with `exact_pins` page-locked blocks are not rounded up. torch 2.13 reads the old name last, and
    its CUDA allocator (CUDAAllocatorConfig.h) reads the new one only where the old one is not set,
    so with both set all goes into the old one.
    """
    said: dict[str, str] = {}
    for variable in (NEW, OLD):
        for item in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", variables.get(variable, "")):
            said[item.partition(":")[0].strip()] = item.strip()
    ours = {
        key: f"{key}:{ROUNDED_UP_TO >> 20}"
        for key in ("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb")
        if exact_pins
    }
    # CUDA's own allocator has no segments
    if said.get("backend", "backend:native") == "backend:native":
        ours |= {"expandable_segments": "expandable_segments:True"}
    return OLD if OLD in variables else NEW, ",".join(
        [*said.values(), *(item for key, item in ours.items() if key not in said)]
    )


def on_host(ds_config: dict[str, Any]) -> bool:
    """Returns True if the optimizer computes on the CPU."""
    return (ds_config.get("zero_optimization", {}).get("offload_optimizer") or {}).get(
        "device", "none"
    ) != "none"
