"""Completes the variables that torch reads when it is imported: how it allocates memory, how many threads a rank computes with.

What the user set stays. Imports nothing heavy: it has to come before torch.
"""

import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

from ..hosts.torch_builds import installed
from ..planner.pinned import ROUNDED_UP_TO, pins, pins_exactly

NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
THREADS = "OMP_NUM_THREADS"


def complete(variables: MutableMapping[str, str], ds_config: dict[str, Any], ranks: int) -> list[str]:
    """Sets what a run with this JSON needs, on a host with so many ranks, and the user left open; returns a line about each thing that was decided."""
    name, variables[name] = allocator_settings(variables, pins(ds_config) and pins_exactly())  # torch 2.11 ends with an error at an unknown key
    lines = [f"allocator: {variables[name]} ({name})"] if installed() else []
    cores = len(os.sched_getaffinity(0))
    if cores * ranks <= len(os.sched_getaffinity(os.getppid())):  # srun, or numactl, has bound the rank: its cores are its own
        ranks = 1
    count = max(1, cores // ranks)
    if THREADS not in variables and ranks > 1:
        variables[THREADS] = str(count)
        if "torch" in sys.modules:  # a recipe's file has imported it, and it has read the variable
            sys.modules["torch"].set_num_threads(count)
        lines.append(f"threads: {count} for each rank, {cores} cores for {ranks} ranks ({THREADS})")
    elif variables.get(THREADS) == "1" and "TORCHELASTIC_RUN_ID" in variables and count > 1 and on_host(ds_config):
        lines.append(f"threads: 1 for each rank, which torchrun sets; the optimizer on the CPU could use {count}: start with {THREADS}={count}")
    return lines


def allocator_settings(variables: Mapping[str, str], exact_pins: bool) -> tuple[str, str]:
    """Returns (variable, value) for torch's allocators: our settings, under the user's own of both variables, which stay.

    Memory grows in expandable segments, so that tensors of other sizes fit into what was freed; with `exact_pins` page-locked
    blocks are not rounded up. torch 2.13 reads the old name last, and its CUDA allocator (CUDAAllocatorConfig.h) reads the
    new one only where the old one is not set, so with both set all goes into the old one.
    """
    said: dict[str, str] = {}
    for variable in (NEW, OLD):
        for item in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", variables.get(variable, "")):
            said[item.partition(":")[0].strip()] = item.strip()
    ours = {key: f"{key}:{ROUNDED_UP_TO >> 20}" for key in ("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb") if exact_pins}
    if said.get("backend", "backend:native") == "backend:native":  # CUDA's own allocator has no segments
        ours |= {"expandable_segments": "expandable_segments:True"}
    return OLD if OLD in variables else NEW, ",".join([*said.values(), *(item for key, item in ours.items() if key not in said)])


def on_host(ds_config: dict[str, Any]) -> bool:
    """Returns True if the optimizer computes on the CPU."""
    return (ds_config.get("zero_optimization", {}).get("offload_optimizer") or {}).get("device", "none") != "none"
