"""Measure the loss of a language model's head: from full logits, in chunks as in the recipes, and
with torch's function.

    python tools/bench/bench_loss.py --page tools/bench/bench_loss.md
    # a trial of a few seconds
    python tools/bench/bench_loss.py --tokens 256 --vocabulary 1000 --rounds 1

Each row is a separate process with one thread. It computes head, loss and backward pass in fp32,
from random hidden states and weights, with the gradients of both. The time is the shortest of the
rounds. The peak is the largest memory of the process, minus its memory before.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WAYS = {
    "whole": "full logits",
    "chunked": "**ours:** in chunks",
    "torch": "`F.linear_cross_entropy`",
}


def arguments_of(argv: list[str]) -> argparse.Namespace:
    from recipekit.spec.paths import path_of

    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[512, 1024, 2048, 4096],
        metavar="N",
        help="Tokens per micro-batch. (default: 512 1024 2048 4096)",
    )
    parser.add_argument(
        "--vocabulary",
        type=int,
        nargs="+",
        default=[32_000, 151_936],
        metavar="N",
        help="Vocabulary sizes. (default: 32000 151936)",
    )
    parser.add_argument(
        "--width", type=int, default=64, metavar="N", help="Hidden size. (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=2,
        metavar="N",
        help="Timed repetitions of each row, after a short warm-up. (default: %(default)s)",
    )
    parser.add_argument(
        "--page",
        type=path_of,
        metavar="FILE.md",
        help="Markdown file to write. (default: print the page)",
    )
    # WAY,TOKENS,VOCABULARY: measures it in this process
    parser.add_argument("--row", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def measure(way: str, tokens: int, vocabulary: int, width: int, rounds: int) -> dict[str, float]:
    """Compute a loss and its gradients; return the seconds, the bytes that autograd keeps, and
    the peak of memory.
    """
    import torch

    loss = loss_called(way)
    loss(*inputs(8, 100, width)).backward()
    hidden, weight, labels = inputs(tokens, vocabulary, width)
    kept: dict[int, int] = {}

    def pack(value: Any) -> Any:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    seconds, before, found = [], memory("VmRSS"), torch.zeros(())
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    for _ in range(rounds):
        hidden.grad = weight.grad = None
        begun = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            found = loss(hidden, weight, labels)
        found.backward()
        seconds.append(time.perf_counter() - begun)

    own = weight.nbytes + hidden.nbytes + labels.nbytes
    return {
        "seconds": min(seconds),
        "kept": sum(kept.values()) - own,
        "peak": memory("VmHWM") - before,
        "loss": found.item(),
    }


def loss_called(way: str) -> Callable[[Any, Any, Any], Any]:
    """Return the summed loss of a way, from (hidden states, weight of the head, labels)."""
    from recipekit.kernels.cross_entropy import Head, token_losses
    from torch.nn import functional

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        if way == "torch":
            fused = functional.linear_cross_entropy  # type: ignore[attr-defined]
            return fused(hidden, weight, labels, reduction="sum")
        if way == "chunked":
            return token_losses(hidden, Head(weight), labels).sum()
        logits = functional.linear(hidden, weight).float()
        return functional.cross_entropy(logits, labels, reduction="sum")

    return loss


def inputs(tokens: int, vocabulary: int, width: int) -> tuple[Any, Any, Any]:
    """Make random hidden states (tokens, width), a weight (vocabulary, width) and labels
    (tokens,).
    """
    import torch

    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, width), torch.randn(vocabulary, width) / 8
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(vocabulary, (tokens,))


def memory(name: str) -> int:
    """Reads a number of bytes that the kernel keeps of this process."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def measured(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures every row, each in a process of its own."""
    rows = []
    for vocabulary in arguments.vocabulary:
        for tokens in arguments.tokens:
            for way in WAYS:
                row = f"{way},{tokens},{vocabulary}"
                print(row, file=sys.stderr)
                argv = [
                    sys.executable,
                    __file__,
                    "--row",
                    row,
                    "--width",
                    str(arguments.width),
                    "--rounds",
                    str(arguments.rounds),
                ]
                done = subprocess.run(
                    argv,
                    capture_output=True,
                    text=True,
                    check=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
                rows.append(
                    {"way": way, "tokens": tokens, "vocabulary": vocabulary}
                    | json.loads(done.stdout.splitlines()[-1])
                )
    return rows


def page(rows: list[dict[str, Any]], command: str, width: int) -> str:
    """Writes the page: a line for each row, with ratios to whole logits."""
    whole = {(row["tokens"], row["vocabulary"]): row for row in rows if row["way"] == "whole"}
    lines = [
        "# How fast is the chunked loss, and how much memory does it save?",
        "",
        f"Written by `python tools/bench/bench_loss.py{command}`",
        (
            f"on {datetime.date.today()}: one thread of a CPU, no accelerator. On GPUs this was not"
            " measured."
        ),
        (
            f"Python {platform.python_version()}, torch {version('torch')}, deepspeed"
            f" {version('deepspeed')}, transformers {version('transformers')}."
        ),
        "",
        (
            "Each table row gives the time and the memory of one forward and backward pass of the"
            " loss, in fp32."
        ),
        (
            f"The hidden states have only width {width}, so that logits take a larger share of"
            " memory than in any real model."
        ),
        (
            '"Kept" is the memory that autograd keeps between the forward and the backward pass,'
            " without the inputs."
        ),
        '"Peak" is the most memory that was in use at a time, in addition to the inputs.',
        "",
        "| tokens | vocabulary | loss | ms | of full | kept, MB | peak, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = row["seconds"] / whole[row["tokens"], row["vocabulary"]]["seconds"]
        cells = [
            f"{row['tokens']:,}",
            f"{row['vocabulary']:,}",
            WAYS[row["way"]],
            f"{1e3 * row['seconds']:,.0f}",
            f"{ratio:.2f}",
        ]
        cells += [f"{row['kept'] / 1e6:,.2f}", f"{row['peak'] / 1e6:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(argv: list[str]) -> int:
    arguments = arguments_of(argv)
    if arguments.row:
        way, tokens, vocabulary = arguments.row.split(",")
        print(
            json.dumps(
                measure(way, int(tokens), int(vocabulary), arguments.width, arguments.rounds)
            )
        )
        return 0
    text = page(measured(arguments), "".join(f" {word}" for word in argv), arguments.width)
    if arguments.page:
        arguments.page.write_text(text)
    else:
        print(text)
    return 0


sys.path.insert(0, str(ROOT / "recipes"))

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
