"""Attention over packed documents, computed from its definition, and the test cases for it."""

import itertools
import math

import torch
from recipekit.kernels.varlen import (
    MAX_FP32_TOKENS,
    MAX_PADDED_TOKENS,
    WINDOW_BLOCK_QUERIES,
    Scoring,
    varlen,
)

# The rows contain one-token documents, documents that are padded together, and documents of equal
# length, adjacent and separated. They also contain a single document, a document longer than a
# block of queries, and padding at the end of a row.
LENGTHS = [
    5,
    1,
    7,
    MAX_PADDED_TOKENS,
    MAX_PADDED_TOKENS + 1,
    MAX_PADDED_TOKENS + 8,
    MAX_PADDED_TOKENS + 8,
    MAX_PADDED_TOKENS + 1,
    MAX_FP32_TOKENS + 1,
    WINDOW_BLOCK_QUERIES + 44,
    9,
]


WINDOWS, WAYS = (
    [0, 8, WINDOW_BLOCK_QUERIES, WINDOW_BLOCK_QUERIES + 20],
    [True, False],
)  # also used for the cases on a GPU


def by_definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    scale: float,
    window: int,
    causal: bool = True,
) -> torch.Tensor:
    """Return softmax attention from each document's full scores, (tokens, heads, d) in fp64."""
    outputs = []
    groups = query.shape[1] // key.shape[1]
    for q, k, v in zip(
        *(tensor.double().split(lengths) for tensor in (query, key, value)), strict=True
    ):
        k, v = (tensor.repeat_interleave(groups, 1) for tensor in (k, v))
        place = torch.arange(len(q))
        distance = place[:, None] - place[None, :]
        distance = distance if causal else distance.abs()
        hidden = (distance < 0) | (distance >= (window or math.inf))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        outputs.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)
        )
    return torch.cat(outputs)


def drawn(
    lengths: list[int], heads: tuple[int, int], dtype: torch.dtype, d: int = 16, device: str = "cpu"
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return random (query, key, value) with gradients, and the document bounds."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(sum(lengths), count, d, generator=generator).to(device, dtype).requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    ]
    return tensors, torch.tensor(
        [0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device
    )


def computes_on_a_gpu() -> None:
    """Compare bf16 on CUDA with fp64, on a machine with a GPU (tests/loop/test_gpu.py).

    With deterministic algorithms, two runs must return the same bits.
    """
    torch.use_deterministic_algorithms(True)
    for window, causal, (heads, d) in itertools.product(
        WINDOWS, WAYS, (((4, 4), 64), ((8, 2), 128))
    ):
        found = []
        for _ in range(2):
            inputs, documents = drawn(LENGTHS, heads, torch.bfloat16, d, "cuda")
            output = varlen(*inputs, documents, max(LENGTHS), Scoring(d**-0.5, window, causal))
            output.float().square().sum().backward()
            found.append([output.detach(), *(tensor.grad for tensor in inputs)])
        assert all(map(torch.equal, *found))
        exact = [
            tensor.detach().double().requires_grad_()
            for tensor in drawn(LENGTHS, heads, torch.bfloat16, d)[0]
        ]
        expected = by_definition(*exact, LENGTHS, d**-0.5, window, causal)
        expected.square().sum().backward()
        for got, wanted in zip(
            found[0], [expected.detach(), *(tensor.grad for tensor in exact)], strict=True
        ):
            assert (got.cpu().double() - wanted).abs().max() <= 0.05 * wanted.abs().max()
