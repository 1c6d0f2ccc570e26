"""`run(RECIPE)`, the entry point of every recipe.

Heavy imports are delayed until it is certain that the run can start.
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
from .hosts.locks import lock_file
from .hosts.ports import free_port, has_joined
from .hosts.transformers_release import require_supported_release
from .runtime import environment
from .spec.atomic_write import DISK_ERRORS
from .spec.command import RunCommand, parse
from .spec.devices import find_device
from .spec.errors import START_AGAIN, ConfigError, Problem, config_error, exit_with_error
from .spec.packages import check_packages
from .spec.ranks import take_rank
from .spec.recipe import Recipe
from .spec.run_folder import CHECKPOINTS, unwritable
from .spec.utf8 import use_utf8

if TYPE_CHECKING:
    from .plan import RunPlan


def run(recipe: Recipe, argv: list[str] | None = None) -> None:
    """Parse the command line, check the plan, train, and exit.

    Exit codes: 0 success, 1 config error or failure, 2 usage error, 75 start again. If a signal
    ends the run after a checkpoint, the code is 128 plus the signal number: 143 for SIGTERM, 130
    for Ctrl-C.
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
        plan = _plan_command(command)
        if command.dry_run:
            _dry_run(plan)
            return
        if command.show_row:
            from .runtime.first_row import show_row

            show_row(plan)
            return
        _report_run_folder(plan.out)
        held = _lock_run_folder(plan.out) if command.rank == 0 else None
        # These variables must be set before torch is imported.
        notes = (
            *notes,
            *plan.notes,
            *environment.set_torch_variables(os.environ, plan.ds_config, command.local_ranks or 1),
            *environment.order_launches(os.environ, plan.mesh.world),
        )
        environment.record_collectives(os.environ, plan.recipe.watch)
        plan = replace(plan, notes=notes)
        from .hosts.checks import check_start

        if problems := check_start(plan):
            raise ConfigError(problems)
        if plan.recipe.wandb and wandb_disabled():
            plan = replace(
                plan,
                recipe=replace(plan.recipe, wandb=False),
                notes=(*notes, "W&B is off, because WANDB_DISABLED is set"),
            )
        _single_process_defaults()
        from .train import main

        patience = 3.0  # from here on, a config error may occur on only one rank
        with peers:
            code = main(plan, peers)
        clean = True
        if held:
            held.close()
    except ConfigError as error:
        exit_with_error(error, patience)
    finally:
        ignore_stops()  # launchers repeat signals, and this rank is already exiting
        if "torch.distributed" in sys.modules:
            import torch.distributed as dist

            # After an exception, this call may wait for peers that are waiting for this rank
            # (NCCL).
            if dist.is_initialized() and (clean or dist.get_world_size() == 1):
                peers.leave()
                dist.destroy_process_group()  # otherwise a rank occasionally aborts at exit
    sys.exit(code)


def _plan_command(command: RunCommand) -> "RunPlan":
    """Return the plan for a command.

    Raise a `ConfigError` that lists every problem. Planning imports nothing heavy and takes about a
    second.
    """
    from .plan import resolve_run

    untested = require_supported_release()
    problems: list[Problem] = []
    try:
        if command.device:
            find_device(command.device)
    except ConfigError as error:
        problems += error.problems
    try:
        plan = resolve_run(command)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    return replace(plan, notes=(*untested, *plan.notes))


def _dry_run(plan: "RunPlan") -> None:
    """Check the plan's inputs, count its data if there are few rows, and print the plan."""
    from .planner.dry_run import print_dry_run
    from .runtime.epochs import with_counted_data
    from .runtime.inputs import check_inputs

    lines = list[str]()
    check_inputs(plan, lines.append)
    plan = with_counted_data(plan)
    print_dry_run(replace(plan, notes=(*plan.notes, *lines)))


def _report_run_folder(out: Path) -> None:
    """Report the run folder to `python -m launch`, once per host.

    After a restart, the launcher looks for the newest checkpoint in this folder.
    """
    if "LAUNCH_PIPE" not in os.environ or os.environ.get("LOCAL_RANK") != "0":
        return
    report = json.dumps({"run_folder": os.path.abspath(out), "pid": os.getpid()})
    with contextlib.suppress(OSError):  # the pipe may belong to a job that has already ended
        pipe = os.open(os.environ["LAUNCH_PIPE"], os.O_WRONLY | os.O_NONBLOCK)
        os.write(pipe, f"{report}\n".encode())
        os.close(pipe)


def _lock_run_folder(out: Path) -> IO[str]:
    """Lock `out` for this job until the process ends.

    Raise `ConfigError` if a different job has locked the folder. If the disk of a run with
    checkpoints fails, the exit code is START_AGAIN, because the disk may work again after a
    restart.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = open(out.parent / f".{out.name}.lock", "w")  # noqa: SIM115 (held until the run ends)
        if out.exists():
            # This fails for the same reasons as the run: no folder, no permission, or a read-only
            # disk.
            tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        again = error.errno in DISK_ERRORS and (out / CHECKPOINTS).is_dir()
        raise ConfigError([unwritable(out, error)], START_AGAIN if again else 1) from None
    try:
        lock_file(file, f"out = {out}", "choose a folder on another disk with --out")
    except BlockingIOError:
        raise config_error(
            f"out = {out}",
            "another job is running in this folder",
            "wait for it, stop it, or set --out to another folder",
        ) from None
    return file


def _single_process_defaults() -> None:
    """Set the variables that a launcher would have set, and the folder for compiled ops.

    If these variables were missing, DeepSpeed would look for mpi4py.
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
        # Without this setting, DeepSpeed warns that it found no other accelerator.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault(op_cache.EXTENSIONS_DIR_VARIABLE, str(op_cache.find_op_folder()))
