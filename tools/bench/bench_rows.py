"""Measure the memory of attention and loss on long rows, before and after: bytes saved by autograd,
peak of the process.

    # needs five minutes on two cores, and 10 GiB of memory
    python tools/bench/bench_rows.py > tools/bench/bench_rows.md

"Before" is a dense mask and a loss from full logits, for rows that fit in --most GiB. "After" is
attention by documents and a chunked loss. The model has one narrow layer and a vocabulary of
151,936. It runs forward and backward over one row of two documents, on the CPU.
"""

import os
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from harness import fold, own_memory, parser_of, reset_peak, say, today
from recipekit.kernels import attention  # noqa: F401 (gives transformers the attention "varlen")
from recipekit.model.chunked_loss import enable_chunked_loss
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY, WIDTH = 151_936, 64
TOKENS = (2048, 4096, 8192, 16384, 32768)
BEFORE, AFTER = ("sdpa", "whole"), ("varlen", "chunked")


@dataclass(frozen=True)
class Kept:
    """The memory that attention and loss need for one row, in bytes."""

    saved: int  # by autograd for the backward pass, without weights
    largest: int  # of these tensors
    peak: int  # the largest growth of the process
    seconds: float


def model_of(way: tuple[str, str], vocabulary: int) -> Any:
    """Return a model of one layer in fp32, with this attention and loss."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
    }
    config = AutoConfig.for_model(
        "llama", vocab_size=vocabulary, max_position_embeddings=1 << 20, use_cache=False, **shape
    )
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=way[0])
    if way[1] == "chunked":
        enable_chunked_loss(model, ())
    return model.train()


def measure(way: tuple[str, str], tokens: int, vocabulary: int = VOCABULARY) -> Kept:
    """Run one row of two documents forward and backward."""
    model = model_of(way, vocabulary)
    ids = torch.randint(vocabulary, (1, tokens))
    places = torch.cat([torch.arange(tokens // 2), torch.arange(tokens - tokens // 2)]).unsqueeze(0)
    labels = ids.roll(-1, 1)
    known = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    start, began = reset_peak(), time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if way[1] == "chunked":
            loss = model(input_ids=ids, position_ids=places, losses_of=labels).logits.sum()
        else:
            logits = model(input_ids=ids, position_ids=places).logits
            loss = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
            del logits
    loss.backward()
    return Kept(
        sum(sizes.values()),
        max(sizes.values()),
        own_memory("VmHWM") - start,
        time.perf_counter() - began,
    )


def fits(tokens: int, most: float) -> bool:
    """Return True if a row with a dense mask and full logits fits into `most` GiB.

    A logit takes 13 bytes, and a pair of tokens takes 9 bytes.
    """
    return 13 * tokens * VOCABULARY + 9 * tokens**2 <= most * 2**30


def page(found: list[tuple[int, Kept | None, Kept]], most: float) -> str:
    mib = lambda size: f"{size / 2**20:,.0f}"  # noqa: E731
    lines = [
        f"| {tokens:,} |"
        f" {f'{mib(before.saved)} | {mib(before.peak)}' if before else 'too much | too much'} |"
        f" {mib(after.saved)} | {mib(after.peak)} | {after.saved / tokens:,.0f} |"
        for tokens, before, after in found
    ]
    versions = ", ".join(
        f"{name} {version(name).partition('+')[0]}" for name in ("torch", "transformers")
    )
    return fold(f"""# How much memory do attention and loss need for long rows?

Written by `python tools/bench/bench_rows.py` on {today()}:
{os.cpu_count()} CPU cores, {versions}.
The table compares two ways of training on long rows (sequences), with sizes in MiB. "Before" uses a
    dense mask and computes the loss from full logits, if they fit into {most:g} GiB. "After" uses
    attention by documents and computes the loss in chunks.

| tokens of a row | before: saved | peak | after: saved | peak | after: saved bytes a token |
|---|---|---|---|---|---|
{chr(10).join(lines)}

{WORDS}""")


WORDS = fold(f"""- **Model:** one layer of width {WIDTH}, a vocabulary of {VOCABULARY:,}, fp32.
  One row of two documents goes forward and backward on the CPU.
- **Saved:** the tensors that autograd keeps for the backward pass, without weights. Each storage
  counts once.
- **Peak:** the largest growth of the process during the forward and backward pass. It includes the
  gradients of the embedding and the head, {2 * 4 * VOCABULARY * WIDTH / 2**20:.0f} MiB.
- **Result:** with attention by documents and the loss in chunks ("after"), the saved memory grows
  linearly: every length saves the same bytes a token.
""")


def main(argv: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=list(TOKENS),
        metavar="N",
        help=f"Row lengths in tokens. (default: {' '.join(map(str, TOKENS))})",
    )
    parser.add_argument(
        "--most",
        type=float,
        default=10.0,
        metavar="GIB",
        help=(
            'Memory limit of "before" in GiB. Longer rows are measured only "after". (default:'
            " %(default)g)"
        ),
    )
    arguments = parser.parse_args(argv)
    found = []
    for tokens in arguments.tokens:
        before = measure(BEFORE, tokens) if fits(tokens, arguments.most) else None
        after = measure(AFTER, tokens)
        found.append((tokens, before, after))
        say(f"{tokens}: {before} {after}")
    print(page(found, arguments.most))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
