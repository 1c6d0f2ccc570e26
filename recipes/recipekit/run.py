"""`run(RECIPE)`: the one way every recipe starts. Light until it is certain that the run can start."""

import fcntl
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import IO

from .recipe import Recipe, parse
from .refusal import Refusal, exit_refused, refuse

REPOSITORY = Path(__file__).resolve().parents[2]


def run(recipe: Recipe, argv: list[str] | None = None) -> None:
    """Reads the command line, refuses what cannot work, trains, and exits: 0 done, 1 refused or failed, 2 usage,
    143 stopped by a signal after a checkpoint (130 by Ctrl-C)."""
    from .stopping import quiet_interrupts, start_launcher_watch

    quiet_interrupts()
    start_launcher_watch()
    code, patience = 0, 60.0
    try:
        command = parse(recipe, Path(sys.argv[0]), argv)
        from .plan import make_plan  # imports nothing heavy; a refusal takes about a second

        plan = make_plan(command)
        if command.dry_run:
            from .dry_run import show

            show(plan)
            return
        lock = _lock(plan.out) if command.rank == 0 else None
        _single_process_defaults()
        from .train import main

        patience = 3.0  # from here on a refusal can be one rank's alone
        code = main(plan)
        if lock:
            lock.close()
    except Refusal as refusal:
        exit_refused(refusal, patience)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # launchers repeat them; the rank is on its way out
        if "torch.distributed" in sys.modules:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()  # without it a rank aborts at exit now and then
    sys.exit(code)


def _lock(out: Path) -> IO[str]:
    """Holds `out` for this job until the process ends. Raises `Refusal` if another job holds it."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = open(out.parent / f".{out.name}.lock", "w")  # noqa: SIM115 (held until the run ends)
        if out.exists():
            tempfile.TemporaryFile(dir=out).close()  # fails as the run would: no folder, no permission, a read-only disk
    except OSError as error:
        raise refuse(f"out = {out}", f"cannot be written: {error.strerror}", "choose a folder of yours with --out") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise refuse(f"out = {out}", "another job is running in this folder", "wait for it, stop it, or choose another folder with --out") from None
    return file


def _single_process_defaults() -> None:
    """What a launcher would have set; without it DeepSpeed looks for mpi4py. Compiled ops stay in the repository."""
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no other
    if (REPOSITORY / "ds_configs").is_dir():
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(REPOSITORY / ".cache" / "torch_extensions"))
