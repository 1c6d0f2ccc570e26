"""Count the files and functions of recipekit and the recipe that a start enters before step 1, the
files of one step, and the calls of each choice.

    # llama_nano_zero2 --tiny on one rank
    python tests/support/trace_start.py
    # also print the names of the files and functions
    python tests/support/trace_start.py recipes/NAME.py --list

The recipe runs in this process, under `sys.setprofile`, for two steps without evaluation, export
and W&B. The code of a module, of a class body or of a comprehension does not count as a function.
Files of `kernels` are not counted in a step.
"""

import argparse
import contextlib
import runpy
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
STEP = ("recipekit/train.py", "train_step")
CHOICES = {  # decision -> the functions that make it: (file of recipekit, name)
    "attention": (("model/attention.py", "choose_attention"),),
    "loss path": (("model/loss_path.py", "choose_loss_path"),),
    "tp and pp plans": (("parallel/plans.py", "resolve_plans"),),
    "blueprint": (("model/describe.py", "draft_blueprint"),),
    "memory terms": (("planner/memory.py", "rank_terms"),),
    "full empty model": (("model/empty.py", "empty_model"),),
    "models built, small copies included": (("model/empty.py", "construct"),),
    "data opened": (("data/stream.py", "open_corpus"),),
}
FLAGS = (
    "--tiny",
    "--steps",
    "2",
    "--warmup_steps",
    "0",
    "--save_every",
    "0",
    "--eval_every",
    "0",
    "--no-export",
    "--no-wandb",
)


class Trace:
    """The functions that a start enters before the first step, and those in the second step."""

    def __init__(self) -> None:
        self.before: Counter[tuple[str, str]] = Counter()
        self.in_step: set[tuple[str, str]] = set()
        self.num_steps = 0
        self.thread = 0  # the thread that is running a step; 0 if no thread is
        self._names: dict[CodeType, tuple[str, str] | None] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code not in self._names:
            self._names[code] = named(code)
        if (name := self._names[code]) is None:
            return
        if name == STEP:
            self.num_steps += event == "call"
            self.thread = threading.get_ident() if event == "call" else 0
        if event == "return":
            return
        if self.num_steps == 0:
            self.before[name] += 1
        elif self.num_steps == 2 and self.thread == threading.get_ident():
            self.in_step.add(name)


def named(code: CodeType) -> tuple[str, str] | None:
    """Return (file, function) for a code object, relative to recipes/; None for code that is not a
    function there.
    """
    path = Path(code.co_filename)
    inner = code.co_qualname.rpartition(".")[2]
    # CO_NEWLOCALS: the code is not a module's
    if not path.is_relative_to(RECIPES) or inner.startswith("<") or not code.co_flags & 0x02:
        return None
    return path.relative_to(RECIPES).as_posix(), code.co_qualname


def traced(recipe: Path, out: Path) -> Trace:
    """Run a recipe in this process, and return the trace."""
    trace = Trace()
    sys.argv = [str(recipe), *FLAGS, "--out", str(out)]
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        with contextlib.suppress(SystemExit):
            runpy.run_path(str(recipe), run_name="__main__")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return trace


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", nargs="?", type=Path, default=RECIPES / "llama_nano_zero2.py")
    parser.add_argument("--list", action="store_true", help="name the files and functions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = traced(arguments.recipe.resolve(), Path(folder) / "run")
    if trace.num_steps != 2:
        print(
            f"{arguments.recipe}: ran {trace.num_steps} steps instead of 2; its messages are above",
            file=sys.stderr,
        )
        return 1
    files = sorted({file for file, _ in trace.before})
    step = sorted({file for file, _ in trace.in_step if "/kernels/" not in file})
    print(f"before step 1: {len(files)} files, {len(trace.before)} functions")
    print(f"one step: {len(step)} files, {len(trace.in_step)} functions")
    for choice, functions in CHOICES.items():
        calls = sum(
            count
            for (file, name), count in trace.before.items()
            if (file.removeprefix("recipekit/"), name) in functions
        )
        print(f"{choice}: {calls} calls")
    if arguments.list:
        print(
            *(
                f"before {file}:"
                f" {' '.join(sorted(name for other, name in trace.before if other == file))}"
                for file in files
            ),
            sep="\n",
        )
        print(
            *(
                f"step {file}:"
                f" {' '.join(sorted(name for other, name in trace.in_step if other == file))}"
                for file in step
            ),
            sep="\n",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
