"""`run(RECIPE)`: the one way every recipe starts. Light until it is certain that the run can
start.
"""

import contextlib
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from .hosts import op_cache
from .hosts.accounts import wandb_disabled
from .hosts.locks import lock
from .hosts.ports import free_port, has_joined
from .runtime import environment
from .spec.command import Command, parse
from .spec.devices import device_called
from .spec.packages import check_packages
from .spec.ranks import take_rank
from .spec.recipe import Recipe
from .spec.refusal import START_AGAIN, Problem, Refusal, exit_refused, refuse
from .spec.run_folder import CHECKPOINTS, unwritable
from .spec.utf8 import use_utf8
from .spec.whole_file import FAILING

if TYPE_CHECKING:
    from .plan import Plan


def run(recipe: Recipe, argv: list[str] | None = None) -> None:
    """Reads the command line, refuses what cannot work, trains, and exits: 0 done, 1 refused or
    failed, 2 usage, 75 start again, 143 stopped by a signal after a checkpoint (128 + the number of
    another signal, so 130 by Ctrl-C).
    """
    from .runtime.stopping import ignore_stops, quiet_interrupts, start_launcher_watch

    quiet_interrupts()
    from .runtime.failure import Peers

    code, patience, clean, peers = 0, 60.0, False, Peers()
    try:
        notes = (*use_utf8(), *take_rank(os.environ, has_joined()))
        start_launcher_watch()
        command = parse(recipe, Path(sys.argv[0]), argv)
        check_packages()
        plan = _plan(command)
        if command.dry_run:
            _dry_run(plan)
            return
        if command.show_row:
            from .runtime.first_row import show_row

            show_row(plan)
            return
        _report(plan.out)
        held = _lock(plan.out) if command.rank == 0 else None
        # before the import of torch
        notes = (
            *notes,
            *plan.notes,
            *environment.complete(os.environ, plan.ds_config, command.local_ranks or 1),
        )
        plan = replace(plan, notes=notes)
        from .hosts.checks import check_start

        if problems := check_start(plan):
            raise Refusal(problems)
        if plan.recipe.wandb and wandb_disabled():
            plan = replace(
                plan,
                recipe=replace(plan.recipe, wandb=False),
                notes=(*notes, "W&B is off, because WANDB_DISABLED is set"),
            )
        _single_process_defaults()
        from .train import main

        patience = 3.0  # from here on a refusal can be one rank's alone
        with peers:
            code = main(plan, peers)
        clean = True
        if held:
            held.close()
    except Refusal as refusal:
        exit_refused(refusal, patience)
    finally:
        ignore_stops()  # launchers repeat signals; this rank is ending already
        if "torch.distributed" in sys.modules:
            import torch.distributed as dist

            # after an exception the call may wait for peers that wait for this rank (NCCL)
            if dist.is_initialized() and (clean or dist.get_world_size() == 1):
                peers.leave()
                dist.destroy_process_group()  # without this call a rank aborts at exit now and then
    sys.exit(code)


def _plan(command: Command) -> "Plan":
    """Return the plan of a command.

    Raises `Refusal` with every problem; imports nothing heavy, and takes about a second.
    """
    from .plan import make_plan

    problems: list[Problem] = []
    try:
        if command.device:
            device_called(command.device)
    except Refusal as refusal:
        problems += refusal.problems
    try:
        plan = make_plan(command)
    except Refusal as refusal:
        raise Refusal(problems + refusal.problems) from None
    if problems:
        raise Refusal(problems)
    return plan


def _dry_run(plan: "Plan") -> None:
    """Check the inputs of a plan, count its data if they are few, and print it."""
    from .planner.show import show
    from .runtime.epochs import counted
    from .runtime.inputs import check_inputs

    lines = list[str]()
    check_inputs(plan, lines.append)
    plan = counted(plan)
    show(replace(plan, notes=(*plan.notes, *lines)))


def _report(out: Path) -> None:
    """Report the run folder to `python -m launch`, once for each host: a restart looks there for
    the newest checkpoint.
    """
    if "LAUNCH_PIPE" not in os.environ or os.environ.get("LOCAL_RANK") != "0":
        return
    report = json.dumps({"run_folder": os.path.abspath(out), "pid": os.getpid()})
    with contextlib.suppress(OSError):  # the pipe of a job that has ended
        pipe = os.open(os.environ["LAUNCH_PIPE"], os.O_WRONLY | os.O_NONBLOCK)
        os.write(pipe, f"{report}\n".encode())
        os.close(pipe)


def _lock(out: Path) -> IO[str]:
    """Hold `out` for this job until the process ends. Raises `Refusal` if another job holds it.

    The exit code is START_AGAIN if the disk of a run with checkpoints fails: a restart may find it
    well.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = open(out.parent / f".{out.name}.lock", "w")  # noqa: SIM115 (held until the run ends)
        if out.exists():
            # fails where the run would: no folder, no permission, a read-only disk
            tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        again = error.errno in FAILING and (out / CHECKPOINTS).is_dir()
        raise Refusal([unwritable(out, error)], START_AGAIN if again else 1) from None
    try:
        lock(file, f"out = {out}", "choose a folder on another disk with --out")
    except BlockingIOError:
        raise refuse(
            f"out = {out}",
            "another job is running in this folder",
            "wait for it, stop it, or set --out to another folder",
        ) from None
    return file


def _single_process_defaults() -> None:
    """Sets the variables that a launcher would have set (without them DeepSpeed looks for mpi4py)
    and the folder of compiled ops.
    """
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(free_port())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    if not torch.accelerator.is_available():
        # else DeepSpeed warns that it found no other
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault(op_cache.VARIABLE, str(op_cache.folder()))
