"""Turns processes into ranks that can talk: groups, devices, compiled ops, room in memory."""

import contextlib
import importlib
import logging
import os
import platform
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer
from deepspeed.utils import logger

from ..dslint.baseline import check_precision
from ..dslint.check import check_device
from ..hosts.checks import free_memory
from ..hosts.ops import prepare_ops
from ..hosts.torch_builds import gpus_in_use
from ..kernels import deterministic
from ..parallel.groups import time_limit, waiting_group
from ..plan import Plan
from ..planner.show import rank_plan
from ..planner.terms import ACCELERATOR, HOST, NVME, too_much
from ..spec.command import Command
from ..spec.devices import gib
from ..spec.hub import shorten_retries
from ..spec.refusal import Refusal
from .agree import shared_problems
from .failure import Peers

WAIT = 10.0  # seconds in which the ranks usually meet


def start(plan: Plan, peers: Peers | None = None) -> torch.device:
    """Compiles what is missing, joins the process group, watches the other ranks, seeds, and
    returns this rank's device (a collective).
    """
    quiet()
    if plan.recipe.deterministic:
        deterministic.switch_on()
    device = torch.device("cuda", plan.command.local_rank) if gpus_in_use() else torch.device("cpu")
    accelerator = cast("Any", get_accelerator())
    problems = check_device(plan.ds_config, device.type, bool(accelerator.is_fp16_supported()))
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        problems += check_precision(
            plan.recipe.engine, plan.recipe.precision, torch.cuda.get_device_name(device), has_bf16
        )
    if problems:
        raise Refusal(problems)
    prepare_ops(plan.ds_config, print if plan.command.local_rank == 0 else lambda _: None)
    do_without_shm_op()
    with named_wait(plan.command):
        deepspeed.init_distributed(timeout=time_limit(plan.recipe.retry_s), verbose=False)
    if peers:
        peers.watch(waiting_group())
    lacking = None
    try:
        check_memory(plan, device)
    except Refusal as refusal:
        lacking = refusal
    # one host's problem stops all ranks, which would wait for that host
    problems = shared_problems(lacking)
    # one of each problem: the ranks saw slightly different amounts of free memory
    if once := {(problem.where.partition(" = ")[0], problem.rule): problem for problem in problems}:
        raise Refusal(list(once.values()))
    torch.manual_seed(plan.recipe.seed)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def named_wait(command: Command, after: float = WAIT) -> Iterator[None]:
    """Print, on the first rank of each host, which ranks are missing if the `with` takes longer
    than `after` seconds.
    """
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    others = "the other ranks" if command.rank == 0 else "rank 0 and the other ranks"
    text = f"rank {command.rank} of {command.world} waits for {others}, which meet at {where}"
    text += ". If nobody starts them, unset RANK and WORLD_SIZE"
    timer = threading.Timer(after, print, (text,), {"flush": True})
    timer.daemon = True
    if command.local_rank == 0 and command.world > 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def do_without_shm_op() -> None:
    """Keeps `init_distributed` from building an op that no run here calls.

    DeepSpeed 0.19.8 builds and opens the op on every CPU (comm/torch.py, build_shm_op), for
    `inference_all_reduce` alone. That costs half a minute of compiling and 66 MiB a rank in
    /dev/shm, which are never given back (csrc/cpu/comm/shm.cpp); if they are not there, the rank
    ends with a SIGBUS. Without the op `inference_all_reduce` is torch's `all_reduce`.
    """
    # deepspeed.comm's own attribute `torch` is torch
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None


def check_memory(plan: Plan, device: torch.device) -> None:
    """Raises `Refusal` if the states of this rank, or of all ranks of its host, certainly exceed
    the free memory; called before anything large is made.
    """
    if plan.model_config is None:
        return
    stage, rank = plan.mesh.coords(plan.command.rank)["pp"], plan.command.rank
    terms, problems = rank_plan(plan, stage), []
    first, ranks = rank - plan.command.local_rank, plan.command.local_ranks or 1
    alike = sum(
        plan.mesh.coords(other)["pp"] == stage
        for other in range(max(0, first), min(first + ranks, plan.mesh.world))
    )
    if device.type == "cuda":
        if plan.command.rank == 0 and (
            pinned := sum(term.pinned for term in terms if not term.bound)
        ):
            print(f"offload pins {gib(pinned)} of host memory on each rank, rounding included")
        problems += too_much(
            terms,
            ACCELERATOR,
            torch.cuda.mem_get_info(device)[0],
            on=f"{torch.cuda.get_device_name(device)} that is free",
        )
    else:
        # a bucket takes only the pages that are written: the kernel gives no others
        terms = [
            replace(term, place=HOST, pinned=0, bound=term.bound or "bucket" in term.what)
            for term in terms
            if term.place != NVME
        ]
    if (free := free_memory()) is not None:
        problems += too_much(terms, HOST, free, max(1, alike), on=f"{platform.node()} that is free")
    if problems:
        raise Refusal(problems)


def quiet() -> None:
    """Leaves warnings and errors of the libraries visible, not their information lines."""
    logger.setLevel(logging.WARNING)
    shorten_retries()
    # DeepSpeed 0.19.8 prints six lines for each group (bf16_optimizer.py, see_memory_usage with
    # force), and resets the device's peak memory while it does
    bf16_optimizer.see_memory_usage = lambda *_, **__: None
    # DeepSpeed 0.19.8 calls collectives by the names that torch 2.13 renames; the warning repeats
    # for each
    warnings.filterwarnings(
        "ignore",
        message=r".*is deprecated\. Please use `torch\.distributed",
        category=FutureWarning,
    )
