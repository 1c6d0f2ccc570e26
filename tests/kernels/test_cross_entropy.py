"""Each token's chunked loss equals its loss from full logits, which are never allocated."""

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks_in_threads import Ranks
from recipekit.kernels import cross_entropy as kernel
from recipekit.kernels.blocks import BLOCK_LOGITS, CPU_BLOCK_LOGITS, MIN_COLUMNS, columns_per_block
from recipekit.kernels.cross_entropy import Head, VocabShard, token_losses, token_losses_and_argmax
from recipekit.spec.task import IGNORE
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WIDTH, VOCABULARY = 24, 1009  # a prime number, so that the last block is narrower than the others


def cap(logits: torch.Tensor) -> torch.Tensor:
    return torch.tanh(logits * 0.5 / 3.0) * 3.0


def example(
    tokens: int = 50,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    vocabulary: int = VOCABULARY,
) -> dict[str, Any]:
    """Return random arguments for a head and a loss; every third token has no label."""
    draw = torch.Generator().manual_seed(tokens)
    labels = torch.randint(vocabulary, (tokens,), generator=draw)
    labels[1::3] = IGNORE
    return {
        "hidden": torch.randn(tokens, WIDTH, generator=draw).to(dtype).requires_grad_(),
        "weight": (torch.randn(vocabulary, WIDTH, generator=draw) / 2).to(dtype).requires_grad_(),
        "bias": torch.randn(vocabulary, generator=draw).to(dtype).requires_grad_()
        if bias
        else None,
        "labels": labels,
    }


def losses_of(
    hidden: Any,
    weight: Any,
    bias: Any,
    labels: Any,
    chain: Any = None,
    part: Any = None,
    block: Any = None,
) -> torch.Tensor:
    return token_losses(hidden, Head(weight, bias, chain, part), labels, block)


def losses_and_argmax(
    hidden: Any,
    weight: Any,
    bias: Any,
    labels: Any,
    chain: Any = None,
    part: Any = None,
    block: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return token_losses_and_argmax(hidden, Head(weight, bias, chain, part), labels, block)


def whole(hidden: Any, weight: Any, bias: Any, labels: Any, chain: Any = None) -> torch.Tensor:
    """Return the losses from full logits, as a task computes them."""
    logits = linear(hidden, weight, bias)
    return cross_entropy(
        (chain(logits) if chain else logits).float(), labels, ignore_index=IGNORE, reduction="none"
    )


def gradients(losses: torch.Tensor, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the gradients of a sum with a different weight for each token, as in a mixture."""
    weights = torch.linspace(0.5, 2.0, losses.numel()).view_as(losses)
    wanted = {
        name: value
        for name, value in given.items()
        if name != "labels" and value is not None and value.requires_grad
    }
    return dict(
        zip(
            wanted,
            torch.autograd.grad((losses * weights).sum(), list(wanted.values())),
            strict=True,
        )
    )


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the norm of the expected values."""
    return float(
        (found.detach().double() - expected.detach().double()).norm()
        / expected.detach().double().norm()
    )


def furthest(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    return float(
        (found.detach().double() - expected.detach().double()).abs().max()
        / expected.detach().double().abs().max()
    )


@pytest.mark.parametrize("chain", [None, cap], ids=["", "soft cap and scale"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("tokens", "block"),
    [(1, MIN_COLUMNS), (2, 2 * MIN_COLUMNS), (50, 50 * MIN_COLUMNS), (50, CPU_BLOCK_LOGITS)],
)
def test_losses_and_gradients_are_those_of_whole_logits(tokens, block, bias, chain):
    """The results agree for several blocks, and for one block whose logits are kept."""
    given = example(tokens, bias=bias)
    losses, expected = losses_of(**given, chain=chain, block=block), whole(**given, chain=chain)
    assert losses.dtype == torch.float32 and losses.shape == (tokens,)
    assert furthest(losses, expected) < 1e-6
    theirs = gradients(expected, given)
    for name, found in gradients(losses, given).items():
        assert found.dtype == given[name].dtype and furthest(found, theirs[name]) < 1e-6, name


@pytest.mark.parametrize(
    ("dtype", "block"),
    [
        (torch.float32, 50 * MIN_COLUMNS),
        (torch.bfloat16, 50 * MIN_COLUMNS),
        (torch.float32, CPU_BLOCK_LOGITS),
    ],
    ids=str,
)
def test_the_likeliest_tokens_are_those_of_argmax(dtype, block):
    """If logits are equal, which is frequent in bf16, the first logit wins, even across blocks.

    Losses and gradients do not change.
    """
    given = example(dtype=dtype, bias=True)
    # This token is equally likely in each block, and is often the most likely token.
    given["weight"].data[MIN_COLUMNS + 3 :: MIN_COLUMNS] = given["weight"].data[3]
    given["bias"].data[3::MIN_COLUMNS] = 8.0
    losses, tokens = losses_and_argmax(**given, chain=cap, block=block)
    logits = cap(torch.nn.functional.linear(given["hidden"], given["weight"], given["bias"]))
    assert (
        torch.equal(tokens, logits.argmax(-1))
        and tokens.dtype == torch.int64
        and (tokens == 3).any()
        and (tokens != 3).any()
    )
    plain = losses_of(**given, chain=cap, block=block)
    assert torch.equal(losses, plain)
    theirs = gradients(plain, given)
    assert all(torch.equal(found, theirs[name]) for name, found in gradients(losses, given).items())


@pytest.mark.parametrize("chain", [None, cap], ids=["", "soft cap and scale"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision_the_losses_are_the_same_and_the_gradients_nearly_as_exact(dtype, chain):
    """The logits are rounded like the output of a linear layer.

    The input's gradient is a sum over blocks, and each block is rounded once.
    """
    given = example(dtype=dtype, bias=True)
    losses, expected = (
        losses_of(**given, chain=chain, block=MIN_COLUMNS * 50),
        whole(**given, chain=chain),
    )
    assert losses.dtype == torch.float32 and furthest(losses, expected) < 1e-6
    exact = {
        name: value if name == "labels" else value.detach().float().requires_grad_()
        for name, value in given.items()
    }
    truth = gradients(whole(**exact, chain=chain), exact)
    theirs, ours = gradients(expected, given), gradients(losses, given)
    for name, found in ours.items():
        assert found.dtype == dtype
        assert off(found, truth[name]) <= (1.25 if name == "hidden" else 1.01) * off(
            theirs[name], truth[name]
        ), name


def test_under_autocast_it_computes_in_its_dtype_and_the_gradients_have_that_of_the_weights():
    given = example(bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        losses, expected = losses_of(**given, block=MIN_COLUMNS * 50), whole(**given)
    assert furthest(losses, expected) < 1e-6
    assert furthest(losses, whole(**given)) > 1e-4  # fp32 would be noticed
    theirs = gradients(expected, given)
    for name, found in gradients(losses, given).items():
        assert found.dtype == torch.float32 and furthest(found, theirs[name]) < 1e-2, name


@pytest.mark.parametrize("chain", [None, cap], ids=["", "soft cap and scale"])
def test_gradients_are_those_of_differences_in_fp64(chain):
    given = example(4, torch.float64, bias=True, vocabulary=70)
    labels = given.pop("labels")
    assert torch.autograd.gradcheck(
        lambda *inputs: losses_of(*inputs, labels, chain=chain, block=MIN_COLUMNS * 4),
        tuple(given.values()),
    )


def test_tokens_without_a_label_have_no_loss_and_no_gradient():
    given = example()
    given["labels"][:] = IGNORE
    losses = losses_of(**given)
    assert not losses.any() and not any(
        gradient.any() for gradient in gradients(losses, given).values()
    )


def test_a_block_of_words_that_cannot_be_counts_nothing():
    """A bias of -inf masks the tokens that only pad a vocabulary."""
    hidden, weight, labels = torch.randn(6, 4), torch.randn(40, 4), torch.arange(6)
    # The first blocks contain only masked tokens.
    bias = torch.zeros(40).index_fill_(0, torch.arange(20, 40), -torch.inf).roll(20)
    losses = losses_of(hidden, weight, bias, labels + 20, block=6 * 8)
    torch.testing.assert_close(
        losses, cross_entropy(hidden @ weight.t() + bias, labels + 20, reduction="none")
    )


def test_a_label_that_is_no_column_gives_an_infinite_loss():
    given = example()
    given["labels"][4] = VOCABULARY
    losses = losses_of(**given)
    assert losses.isinf().nonzero().tolist() == [[4]]


def test_losses_have_the_shape_of_the_labels():
    given = example(48)
    rows = losses_of(
        given["hidden"].view(4, 12, WIDTH), given["weight"], None, given["labels"].view(4, 12)
    )
    assert torch.equal(rows, losses_of(**given).view(4, 12))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(frozen):
    given = example()
    given[frozen] = given[frozen].detach()
    theirs = gradients(whole(**given), given)
    (name,) = theirs
    assert (
        frozen not in theirs
        and furthest(gradients(losses_of(**given), given)[name], theirs[name]) < 1e-6
    )


class Largest(TorchDispatchMode):
    """A mode that watches every operation in a forward and backward pass.

    `numel` is the size of the largest tensor that an operation returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max(
            [
                self.numel,
                *(value.numel() for value in tree_leaves(result) if torch.is_tensor(value)),
            ]
        )
        return result


@pytest.mark.parametrize("chain", [None, cap], ids=["", "soft cap and scale"])
def test_no_tensor_of_all_logits_is_ever_there(chain):
    tokens, vocabulary = 4096, 8192
    given = example(tokens, vocabulary=vocabulary)
    found = {}
    for name, compute in (("blocks", losses_of), ("whole", whole)):
        if name == "whole" and chain:
            continue
        with Largest() as largest:
            gradients(compute(**given, chain=chain), given)
        found[name] = largest.numel
    assert found["blocks"] < tokens * vocabulary / 4 and found["blocks"] == max(
        CPU_BLOCK_LOGITS, vocabulary * WIDTH
    )
    # The mode detects large tensors.
    assert found.get("whole", tokens * vocabulary) == tokens * vocabulary


@contextlib.contextmanager
def saved_bytes(told: list[int]):
    """Count the bytes that autograd keeps for the backward pass; each storage counts once."""
    kept: dict[int, int] = {}

    def pack(value: torch.Tensor) -> torch.Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        yield
    told.append(sum(kept.values()))


def test_it_keeps_its_input_and_little_more():
    given, told = example(4096, torch.bfloat16), []
    with saved_bytes(told):
        losses_of(**given)
    weights = given["weight"].nbytes
    assert (
        told[0] - weights
        <= 1.2 * (given["hidden"].nbytes + given["labels"].nbytes) + 4 * CPU_BLOCK_LOGITS
    )
    # Plus one number for each token.
    assert told[0] - weights == given["hidden"].nbytes + given["labels"].nbytes + 4 * 4096


def test_blocks_are_as_wide_as_their_bytes_allow():
    assert columns_per_block(4096, 151_936) == BLOCK_LOGITS // 4096 == 16_384
    assert columns_per_block(4096, 151_936, CPU_BLOCK_LOGITS) == 256
    assert columns_per_block(1, 151_936) == 151_936 and columns_per_block(0, 10) == 10
    assert columns_per_block(10**9, 151_936) == MIN_COLUMNS


# Tensor parallelism
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", [None, cap], ids=["", "soft cap and scale"])
@pytest.mark.parametrize(
    "block", [50 * MIN_COLUMNS, CPU_BLOCK_LOGITS], ids=["several blocks", "one block"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_three_ranks_it_is_the_loss_of_whole_logits(monkeypatch, dtype, block, chain):
    """Every rank has labels in its columns, including its first and last column.

    Equal logits, which are frequent in bf16, occur on several ranks.
    """
    given, bounds = example(bias=True, dtype=dtype), [0, 337, 673, 1009]
    given["labels"][:12:2] = torch.tensor([0, 336, 337, 672, 673, 1008])
    held = [
        int(((given["labels"] >= low) & (given["labels"] < high)).sum())
        for low, high in itertools.pairwise(bounds)
    ]
    assert min(held) > 5
    expected, one = losses_and_argmax(**given, chain=chain, block=50 * MIN_COLUMNS)
    theirs = gradients(expected, given)

    def case(rank: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        own = slice(bounds[rank], bounds[rank + 1])
        mine = {name: given[name].detach()[own].requires_grad_() for name in ("weight", "bias")}
        mine |= {"hidden": given["hidden"].detach().requires_grad_(), "labels": given["labels"]}
        part: Any = VocabShard(bounds[rank], (0, 1, 2))
        losses, tokens = losses_and_argmax(**mine, chain=chain, part=part, block=block)
        return losses, tokens, gradients(losses, mine)

    found = Ranks(3, monkeypatch).run(case)
    within = 1e-6 if dtype == torch.float32 else 1e-2
    for losses, tokens, own in found:
        assert (
            losses.dtype == torch.float32
            and furthest(losses, expected) < 1e-6
            and torch.equal(tokens, one)
        )
        assert furthest(own["hidden"], theirs["hidden"]) < within
    for name in ("weight", "bias"):
        assert furthest(torch.cat([own[name] for _, _, own in found]), theirs[name]) < within, name


@pytest.mark.parametrize(
    ("device", "own", "expected"),
    [
        ("cpu", None, CPU_BLOCK_LOGITS),
        ("cuda", None, BLOCK_LOGITS),
        ("xpu", None, BLOCK_LOGITS),
        ("cuda", 777, 777),
    ],
)
def test_a_block_is_as_large_as_the_device_wants_it(monkeypatch, device, own, expected):
    asked = []
    monkeypatch.setattr(
        kernel,
        "columns_per_block",
        lambda rows, columns, block: asked.append((rows, columns, block)) or columns,
    )
    monkeypatch.setattr(kernel, "_from_full_logits", lambda *given: "computed")
    hidden, weight = (
        SimpleNamespace(device=SimpleNamespace(type=device), dtype=torch.float32),
        torch.empty(1009, 0),
    )
    assert (
        kernel._losses_and_argmax(hidden, Head(weight), torch.zeros(5, 3), own, False) == "computed"
    )  # type: ignore[arg-type]
    assert asked == [(15, 1009, expected)]
