"""Environment variables of a run: allocators, threads per rank, order of NCCL, flight recorder.

torch reads the first two at import, and NCCL reads its variable at the first collective. The user's
settings are not changed. This module imports nothing heavy, because it must run before torch is
imported.
"""

import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from ..compat.torch import pins_exactly
from ..hosts.torch_builds import torch_platform_version
from ..planner.pinned import PINNED_ROUNDING_LIMIT, uses_pinned_memory
from ..spec.cores import cpu_limit, integer_cores
from .stopping import command_line, parent_pid

ALLOC_CONF, CUDA_ALLOC_CONF = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
OMP_NUM_THREADS = "OMP_NUM_THREADS"
RECORDER_SIZE = "TORCH_FR_BUFFER_SIZE"  # entries of torch's flight recorder
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"  # since NCCL 2.26; its default is 0
# Maps each launcher to its flag for the number of ranks and to all flags that decide that number
# (with _ instead of -).
LAUNCHER_RANK_FLAGS = (
    (
        "deepspeed",
        "--num_gpus",
        ("__num_gpus", "__num_accelerators", "__include", "_i", "__hostfile", "_H"),
    ),
    ("torchrun", "--nproc_per_node", ("__nproc_per_node", "__nnodes")),
)


def set_torch_variables(
    variables: MutableMapping[str, str], ds_config: dict[str, Any], ranks: int
) -> list[str]:
    """Set the variables that a run with this JSON needs, unless the user has set them.

    `ranks` is the number of ranks on this host. Return one line about each decision.
    """
    # torch 2.11 fails on an unknown key
    name, variables[name] = allocator_settings(
        variables, uses_pinned_memory(ds_config) and pins_exactly()
    )
    lines = [f"allocator: {variables[name]} ({name})"] if torch_platform_version() else []
    own, limit = len(os.sched_getaffinity(0)), cpu_limit()
    # srun or numactl may have bound each rank to separate cores. All ranks still share a cgroup's
    # limit.
    sharing = 1 if own * ranks <= len(os.sched_getaffinity(os.getppid())) else ranks
    share, allowed = own // sharing, integer_cores(limit) // ranks
    count = max(1, min(share, allowed))
    if OMP_NUM_THREADS not in variables and (sharing > 1 or count < own):
        variables[OMP_NUM_THREADS] = str(count)
        if "torch" in sys.modules:  # a recipe file imported torch, which read the variable
            sys.modules["torch"].set_num_threads(count)
        cores = f"{own} cores" if share <= allowed else f"a CPU limit of {limit:g} cores"
        lines.append(
            f"threads: {count} for each rank, {cores} for {ranks} rank{'s' if ranks > 1 else ''}"
            f" ({OMP_NUM_THREADS})"
        )
    elif (
        variables.get(OMP_NUM_THREADS) == "1"
        and "TORCHELASTIC_RUN_ID" in variables
        and count > 1
        and optimizer_on_cpu(ds_config)
    ):
        lines.append(
            f"threads: 1 for each rank, set by torchrun. The CPU optimizer could use {count}: start"
            f" with {OMP_NUM_THREADS}={count}"
        )
    return lines + hint_at_ranks(variables, min(own, integer_cores(limit)))


def order_launches(variables: MutableMapping[str, str], world: int) -> list[str]:
    """Make NCCL order the collectives of different communicators, unless the user decides.

    Return a line about it. Every run on several ranks has at least two communicators of the same
    ranks: torch's world and the data-parallel or model-parallel group. Without an order, two
    collectives in flight may wait for each other's GPU resources forever. ZeRO-3 prefetches weights
    during the all-to-all of --sp or the sums of --tp, for example. With the variable, NCCL uses the
    host's order, which is the same on all ranks (NCCL's guide, environment variables).
    """
    if world == 1:
        return []
    order = variables.setdefault(LAUNCH_ORDER, "1")
    return [f"NCCL: {LAUNCH_ORDER}={order}"] if torch_platform_version() else []


def record_collectives(variables: MutableMapping[str, str], watch: bool) -> None:
    """Make torch record its latest collectives if a run is watched (watch/recorder.py).

    The user's setting is kept. The default of gloo is to record nothing.
    """
    if watch:
        variables.setdefault(RECORDER_SIZE, "500")


def hint_at_ranks(variables: Mapping[str, str], cores: int) -> list[str]:
    """Return a hint if a launcher started only one rank on a machine with several cores and no GPU.

    There is no hint if the user set the number of ranks.
    """
    gpus = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    if cores < 2 or variables.get("WORLD_SIZE") != "1" or "LAUNCH_LOGS" in variables or gpus:
        return []
    commands = [command_line(pid) for pid in (os.getppid(), parent_pid(os.getppid())) if pid]
    for launcher, flag, counts in LAUNCHER_RANK_FLAGS:
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
    """Return (variable, value) for torch's allocators: the user's settings plus our defaults.

    The user's settings in both variables take precedence. Memory grows in expandable segments, so
    that tensors of other sizes fit into freed memory. With `exact_pins`, page-locked blocks are not
    rounded up.

    torch 2.13 reads the old variable last, and its CUDA allocator (CUDAAllocatorConfig.h) reads the
    new variable only if the old one is not set. If both are set, all settings are therefore merged
    into the old variable.
    """
    said: dict[str, str] = {}
    for variable in (ALLOC_CONF, CUDA_ALLOC_CONF):
        for item in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", variables.get(variable, "")):
            said[item.partition(":")[0].strip()] = item.strip()
    ours = {
        key: f"{key}:{PINNED_ROUNDING_LIMIT >> 20}"
        for key in ("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb")
        if exact_pins
    }
    # CUDA's own allocator has no segments.
    if said.get("backend", "backend:native") == "backend:native":
        ours |= {"expandable_segments": "expandable_segments:True"}
    return CUDA_ALLOC_CONF if CUDA_ALLOC_CONF in variables else ALLOC_CONF, ",".join(
        [*said.values(), *(item for key, item in ours.items() if key not in said)]
    )


def optimizer_on_cpu(ds_config: dict[str, Any]) -> bool:
    """Return True if the optimizer step runs on the CPU."""
    return (ds_config.get("zero_optimization", {}).get("offload_optimizer") or {}).get(
        "device", "none"
    ) != "none"
