"""Run one rank of a recipe for bench_gpu.py: over gloo, without a measure, or with a profile.

    python tools/bench/gpu_run.py --gloo RECIPE.py FLAGS          # ranks of one GPU, over gloo
    python tools/bench/gpu_run.py --without blocks RECIPE.py FLAGS     # a measure without a flag
    python tools/bench/gpu_run.py --profile FILE.json --at 4 RECIPE.py FLAGS

A profile has the milliseconds of the kernels of one step by kind, and the milliseconds without a
kernel. On a CPU, the operations of torch replace the kernels.
"""

import argparse
import ctypes
import json
import os
import re
import runpy
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from recipekit.spec.atomic_write import write_atomic

# A kernel is of the first kind whose pattern occurs in its name.
KERNEL_KINDS = (
    ("communication", r"nccl|c10d|gloo"),
    ("attention", r"flash|fmha|attention|attn"),
    ("matrix products", r"gemm|nvjet|xmma|cublas|cutlass|splitK|aten::(mm|bmm|addmm)$"),
    ("optimizer", r"multi_tensor|foreach|[Aa]dam"),
    ("compiled", r"^triton_|^graph_"),
    ("copies", r"[Mm]emcpy|[Mm]emset|copy_|CatArray|aten::(_to_copy|cat|fill_|zero_)$"),
    ("reductions", r"reduce_kernel|softmax|aten::(sum|mean|norm|linalg_vector_norm)$"),
    ("elementwise", r"elementwise|vectorized|unrolled|aten::(mul|add|sub|div|silu|pow)_?$"),
)
OTHER = "other"
SHARING_NCCL = (2, 30, 0)  # the first NCCL with NCCL_MULTI_RANK_GPU_ENABLE
OLD_BLOCK_LOGITS = 1 << 24  # logits in a block of the chunked loss until 2026-11-29


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel. Times are in microseconds from any origin."""

    name: str
    start: float
    stop: float


def kernel_kind(kernel: str) -> str:
    """Return the kind of a kernel, from its name."""
    return next((kind for kind, pattern in KERNEL_KINDS if re.search(pattern, kernel)), OTHER)


def kernel_times(kernels: Iterable[Kernel], wall: float) -> dict[str, Any]:
    """Sum a step's kernels by kind.

    `wall` is the seconds of the step. Return {"wall_ms", "idle_ms", "kinds": [{"kind", "ms",
    "longest"}]}, with the longest kind first. "longest" is the kernel with the largest sum.
    Kernels that overlap count once in the busy time, but fully in their kinds.
    """
    by_kind: defaultdict[str, float] = defaultdict(float)
    by_name: defaultdict[str, float] = defaultdict(float)
    busy, end = 0.0, 0.0
    for kernel in sorted(kernels, key=lambda each: each.start):
        took = kernel.stop - kernel.start
        by_kind[kernel_kind(kernel.name)] += took / 1000
        by_name[kernel.name] += took / 1000
        busy += max(0.0, kernel.stop - max(kernel.start, end)) / 1000
        end = max(end, kernel.stop)
    longest = {
        kind: max((name for name in by_name if kernel_kind(name) == kind), key=lambda n: by_name[n])
        for kind in by_kind
    }
    kinds = [
        {"kind": kind, "ms": round(ms, 2), "longest": longest[kind][:60]}
        for kind, ms in sorted(by_kind.items(), key=lambda item: -item[1])
    ]
    idle = max(0.0, 1000 * wall - busy)
    return {"wall_ms": round(1000 * wall, 2), "idle_ms": round(idle, 2), "kinds": kinds}


def profile_step(step: Callable[..., Any], at: int, file: Path) -> Callable[..., Any]:
    """Return `step`, whose call number `at` is profiled; its times are written to `file`."""
    import torch

    calls = 0

    def stepping(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != at:
            return step(*arguments, **named)
        cuda = torch.cuda.is_available()
        activity = torch.profiler.ProfilerActivity
        _wait(cuda)
        with torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU]) as found:
            began = time.perf_counter()
            result = step(*arguments, **named)
            _wait(cuda)
            wall = time.perf_counter() - began
        write_atomic(file, json.dumps(kernel_times(_kernels(found, cuda), wall)))
        return result

    return stepping


def _wait(cuda: bool) -> None:
    import torch

    if cuda:
        torch.cuda.synchronize()


def _kernels(profiler: Any, cuda: bool) -> Iterable[Kernel]:
    """Yield the kernels of a profile, or on a CPU each operation's own time."""
    import torch

    if cuda:
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:  # pyright: ignore[reportPrivateImportUsage]
                yield Kernel(event.name, event.time_range.start, event.time_range.end)
        return
    at = 0.0
    for entry in profiler.key_averages():
        yield Kernel(entry.key, at, at + entry.self_cpu_time_total)
        at += entry.self_cpu_time_total


def leave_out(measure: str) -> None:
    """Undo a measure that has no flag, for this process.

    The measures are "blocks", the size of the chunked loss's blocks, and "sum", the fp32 sums
    without a copy.
    """
    if measure == "blocks":
        from recipekit.kernels import blocks, cross_entropy

        for module in (blocks, cross_entropy):
            mock.patch.object(module, "BLOCK_LOGITS", OLD_BLOCK_LOGITS).start()
    else:
        from recipekit.engine import deepspeed_engine

        idle = lambda engine: None  # noqa: E731
        mock.patch.object(deepspeed_engine, "sum_without_copies", idle).start()


def loaded_nccl() -> tuple[int, int, int] | None:
    """Return the version of the NCCL library that this process uses, or None without NCCL.

    `torch.cuda.nccl.version()` is the version that torch was built with, even if another library is
    preloaded.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        # torch has loaded the library, and RTLD_NOLOAD finds it under its name.
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return None
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return nccl_version(number.value)


def nccl_version(number: int) -> tuple[int, int, int]:
    """Return (major, minor, patch) of the number that ncclGetVersion returns from NCCL 2.9 on."""
    return number // 10_000, number // 100 % 100, number % 100


def shares_gpu(nccl: tuple[int, int, int] | None) -> bool:
    """Return True if several ranks may use NCCL on one GPU.

    This needs NCCL 2.30 and the variable NCCL_MULTI_RANK_GPU_ENABLE=1.
    """
    asked = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return asked and nccl is not None and nccl >= SHARING_NCCL


def use_gloo() -> None:
    """Let the ranks communicate over gloo, even for tensors on a GPU.

    NCCL before 2.30 rejects two ranks on one GPU.
    """
    from recipekit.runtime.stopping import start_launcher_watch

    start_launcher_watch()
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    accelerator._communication_backend_name = "gloo"
    import torch

    # DeepSpeed would bind the group to the GPU. torch would then split the group, which needs NCCL.
    torch.distributed.init_process_group("gloo")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--without", nargs=1, action="extend", default=[], metavar="MEASURE")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--at", type=int, default=4)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(argv)
    # recipekit sets this variable too late, if torch is imported before the recipe.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if arguments.gloo:
        use_gloo()
    for measure in arguments.without:
        leave_out(measure)
    if arguments.profile:
        from recipekit import train

        changed = profile_step(train.train_step, arguments.at, arguments.profile)
        mock.patch.object(train, "train_step", changed).start()
    sys.argv = arguments.command
    runpy.run_path(arguments.command[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
