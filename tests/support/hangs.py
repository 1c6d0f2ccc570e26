"""A recipe in which one rank hangs, for the tests of the finder of hangs.

HANG_AS lists the faults with their steps, such as "evaluation:4,save:6". HANG_ON is the rank, and
HANG_FOR the seconds. A fault is recorded in the file `hung_FAULT`, and happens only once, even if
the job starts again.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from llama_nano_zero2 import RECIPE
from recipekit import run

RANK, ON = os.environ.get("RANK", "0"), os.environ.get("HANG_ON", "1")
FAULTS = dict(each.split(":") for each in os.environ.get("HANG_AS", "").split(",") if each)
SECONDS = float(os.environ.get("HANG_FOR", "600"))
step = 0  # the step that is trained


def is_due(fault: str, now: int | None = None) -> bool:
    """Return True if this rank has the fault in this step, and mark it as done."""
    now = step if now is None else now
    mark = Path(f"hung_{fault}")
    if RANK != ON or FAULTS.get(fault) != str(now) or mark.exists():
        return False
    mark.write_text(str(time.time()))
    return True


def hang() -> None:
    time.sleep(SECONDS)


def skip_a_collective() -> None:
    import torch.distributed as dist

    real = dist.all_reduce

    class Done:
        def wait(self) -> bool:
            return True

    def skipping(*_: Any, **__: Any) -> Any:
        dist.all_reduce = real
        return Done()

    dist.all_reduce = skipping


def compile_slowly() -> None:
    import torch

    def backend(graph: Any, _: Any) -> Any:
        hang()
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(1))


def ask_a_server() -> None:
    from recipekit.data.remote import RetryPolicy

    until = time.monotonic() + SECONDS

    def attempt() -> None:
        if time.monotonic() < until:
            raise ConnectionResetError("down on purpose")

    RetryPolicy(2 * SECONDS, lambda _: None)("a server", attempt)


def slow_steps(steps: Any) -> Any:
    """Yield the steps of a stream. The thread that reads them has the fault."""
    for number, each in enumerate(steps, start=1):
        if is_due("data", number):
            hang()
        if is_due("server", number):
            ask_a_server()
        yield each


def plant_faults() -> None:
    """Plant the faults: wrappers around the step and the save, a hook of a module, slow data."""
    import recipekit.checkpoints.save as checkpoints
    import recipekit.data.prefetch as stream
    import recipekit.train as train

    plain, read, saving = train.train_step, stream.Stream._read, checkpoints.Saver.save
    stream.Stream._read = lambda self, steps: read(self, slow_steps(steps))  # type: ignore

    def train_step(engine: Any, *arguments: Any, **named: Any) -> Any:
        global step
        if not step:
            down = [each for name, each in engine.module.named_modules() if "down_proj" in name]
            down[-1].register_forward_pre_hook(hook)
        step += 1
        Path(f"step_of_{RANK}").write_text(str(step))
        if is_due("collective"):
            skip_a_collective()
        if is_due("compile"):
            compile_slowly()
        return plain(engine, *arguments, **named)

    def save(saver: Any, *arguments: Any, **named: Any) -> None:
        if is_due("save"):
            hang()
        saving(saver, *arguments, **named)

    def hook(module: Any, _: Any) -> None:
        if (module.training and is_due("forward")) or (
            not module.training and is_due("evaluation")
        ):
            hang()

    train.train_step = train_step
    checkpoints.Saver.save = save  # type: ignore


if __name__ == "__main__":
    Path(f"pid_{RANK}").write_text(str(os.getpid()))
    module: Any = sys.modules["recipekit.run"]
    defaults = module._single_process_defaults

    def with_faults() -> None:
        defaults()
        plant_faults()

    module._single_process_defaults = with_faults
    run(RECIPE)
