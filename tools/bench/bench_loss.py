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
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from harness import (
    flags,
    fold,
    own_memory,
    parser_of,
    reset_peak,
    say,
    shown_versions,
    today,
    versions_of,
)
from recipekit.spec.paths import path_argument

WAYS = {
    "whole": "full logits",
    "chunked": "**ours:** in chunks",
    "torch": "`F.linear_cross_entropy`",
}


def arguments_of(argv: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
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
        type=path_argument,
        metavar="FILE.md",
        help="Markdown file to write. (default: print the page)",
    )
    # WAY,TOKENS,VOCABULARY: measure this row in this process.
    parser.add_argument("--row", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def measure(way: str, tokens: int, vocabulary: int, width: int, rounds: int) -> dict[str, float]:
    """Compute a loss and its gradients.

    Return the seconds, the bytes that autograd keeps, and the peak memory.
    """
    import torch

    loss = loss_called(way)
    loss(*inputs(8, 100, width)).backward()
    hidden, weight, labels = inputs(tokens, vocabulary, width)
    kept: dict[int, int] = {}

    def pack(value: Any) -> Any:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    seconds, before, found = [], reset_peak(), torch.zeros(())
    for _ in range(rounds):
        hidden.grad = weight.grad = None
        began = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            found = loss(hidden, weight, labels)
        found.backward()
        seconds.append(time.perf_counter() - began)

    own = weight.nbytes + hidden.nbytes + labels.nbytes
    return {
        "seconds": min(seconds),
        "kept": sum(kept.values()) - own,
        "peak": own_memory("VmHWM") - before,
        "loss": found.item(),
    }


def loss_called(way: str) -> Callable[[Any, Any, Any], Any]:
    """Return the summed loss of one implementation, from (hidden states, head weight, labels)."""
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
    """Create random hidden states (tokens, width), a weight (vocabulary, width) and labels
    (tokens,).
    """
    import torch

    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, width), torch.randn(vocabulary, width) / 8
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(vocabulary, (tokens,))


def measured(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every row in a separate process."""
    rows = []
    for vocabulary in arguments.vocabulary:
        for tokens in arguments.tokens:
            for way in WAYS:
                row = f"{way},{tokens},{vocabulary}"
                say(row)
                own = {"row": row, "width": arguments.width, "rounds": arguments.rounds}
                done = subprocess.run(
                    [sys.executable, __file__, *flags(own)],
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
    """Write the page: one line for each row, with ratios to full logits."""
    whole = {(row["tokens"], row["vocabulary"]): row for row in rows if row["way"] == "whole"}
    lines = []
    for row in rows:
        ratio = row["seconds"] / whole[row["tokens"], row["vocabulary"]]["seconds"]
        cells = [
            f"{row['tokens']:,}",
            f"{row['vocabulary']:,}",
            WAYS[row["way"]],
            f"{1e3 * row['seconds']:,.0f}",
            f"{ratio:.2f}",
            f"{row['kept'] / 1e6:,.2f}",
            f"{row['peak'] / 1e6:,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")

    return fold(f"""# How fast is the chunked loss, and how much memory does it save?

Written by `python tools/bench/bench_loss.py{command}`
on {today()}: one thread of a CPU, no accelerator. On GPUs this was not measured.
{shown_versions(versions_of("torch", "deepspeed", "transformers"))}.

Each table row gives the time and the memory of one forward and backward pass of the loss, in fp32.
The hidden states have only width {width}, so that logits take a larger share of memory than in any
    real model.
"Kept" is the memory that autograd keeps between the forward and the backward pass, without the
    inputs.
"Peak" is the most memory that was in use at a time, in addition to the inputs.

| tokens | vocabulary | loss | ms | of full | kept, MB | peak, MB |
|---|---|---|---|---|---|---|
{chr(10).join(lines)}
""")


def main(argv: list[str]) -> int:
    arguments = arguments_of(argv)
    if arguments.row:
        way, tokens, vocabulary = arguments.row.split(",")
        found = measure(way, int(tokens), int(vocabulary), arguments.width, arguments.rounds)
        print(json.dumps(found))
        return 0
    text = page(measured(arguments), "".join(f" {word}" for word in argv), arguments.width)
    if arguments.page:
        arguments.page.write_text(text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
