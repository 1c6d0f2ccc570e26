"""Startup of the ranks: process groups, devices and compiled ops."""

import contextlib
import logging
import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any, cast

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from ..compat.deepspeed import silence_memory_logs, skip_shm_op_build
from ..compat.torch import keep_flash_for_documents, own_keys_per_restart
from ..dslint.baseline import check_precision
from ..dslint.check import check_device
from ..hosts.ops import prepare_ops
from ..hosts.torch_builds import gpus_in_use
from ..kernels import deterministic
from ..kernels.varlen import activate_kernels
from ..parallel.groups import collective_timeout, long_wait_group
from ..plan import RunPlan
from ..spec.command import RunCommand
from ..spec.errors import ConfigError
from ..spec.hub import shorten_retries
from .failure import Peers

MISSING_RANKS_DELAY = 10.0  # seconds in which the ranks usually meet


def initialize_distributed(plan: RunPlan, peers: Peers | None = None) -> torch.device:
    """Prepare this process as a rank and return its device (a collective).

    This compiles missing ops, joins the process group, starts to watch the other ranks and sets the
    seed.
    """
    quiet_library_logs()
    if plan.recipe.deterministic:
        deterministic.enable_determinism()
    activate_kernels(plan.recipe.attention)
    device = torch.device("cuda", plan.command.local_rank) if gpus_in_use() else torch.device("cpu")
    accelerator = cast("Any", get_accelerator())
    problems = check_device(plan.ds_config, device.type, bool(accelerator.is_fp16_supported()))
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        problems += check_precision(
            plan.recipe.engine, plan.recipe.precision, torch.cuda.get_device_name(device), has_bf16
        )
    if problems:
        raise ConfigError(problems)
    prepare_ops(plan.ds_config, print if plan.command.local_rank == 0 else lambda _: None)
    skip_shm_op_build()
    with report_missing_ranks(plan.command), own_keys_per_restart():
        deepspeed.init_distributed(timeout=collective_timeout(plan.recipe.retry_s), verbose=False)
    if peers:
        peers.watch(long_wait_group())
    torch.manual_seed(plan.recipe.seed)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        keep_flash_for_documents()
    return device


@contextlib.contextmanager
def report_missing_ranks(command: RunCommand, after: float = MISSING_RANKS_DELAY) -> Iterator[None]:
    """Print which ranks are missing if the `with` block takes longer than `after` seconds.

    The first rank of each host prints.
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


def quiet_library_logs() -> None:
    """Hide the libraries' info messages, but not their warnings and errors."""
    logger.setLevel(logging.WARNING)
    shorten_retries()
    silence_memory_logs()
    # DeepSpeed 0.19.8 calls collectives by names that torch 2.13 deprecates. Without this filter
    # the warning repeats on every call.
    warnings.filterwarnings(
        "ignore",
        message=r".*is deprecated\. Please use `torch\.distributed",
        category=FutureWarning,
    )
