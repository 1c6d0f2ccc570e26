"""A run of six steps on the ranks of a pool."""

import contextlib
import io
import sys
from pathlib import Path

from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe

BASE = Recipe(
    model="meta-llama/Llama-3.2-1B",
    ds_config="zero1.json",
    seq_len=64,
    micro_batch=1,
    global_batch=4,
    lr=3e-3,
    steps=6,
    warmup_steps=2,
    eval_every=2,
    eval_rows=4,
    keep=0,
    wandb=False,
    export=False,
)


# Numbers that --tiny must not change.
TYPED = ("micro_batch", "global_batch", "seq_len", "eval_rows")


class Printed(io.StringIO):
    def fileno(self) -> int:
        return 2  # DeepSpeed silences this descriptor while it looks for libaio


def train(recipe: Recipe, argv: list[str]) -> tuple[int | str, str]:
    """Train on a rank of a pool in the same way as `run` does.

    Return (exit code or config error, the rank's output).
    """
    from recipekit.train import main

    sys.argv = [
        "resume.py",
        "--tiny",
        *[word for name in TYPED for word in (f"--{name}", str(getattr(recipe, name)))],
        *argv,
    ]
    with contextlib.redirect_stdout(Printed()) as printed, contextlib.redirect_stderr(printed):
        try:
            result: int | str = main(resolve_run(parse(recipe, Path(sys.argv[0]), sys.argv[1:])))
        except ConfigError as error:
            result = str(error)
    return result, printed.getvalue()


GPT2 = "openai-community/gpt2"  # its config has dropout 0.1
