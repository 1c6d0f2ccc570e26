"""The loss of each token, made of blocks of logits, is that of whole logits; no tensor of all
logits is ever there.
"""

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks_in_threads import Ranks
from recipekit.kernels import cross_entropy as kernel
from recipekit.kernels.blocks import BLOCK, CPU_BLOCK, NARROWEST, columns_at_once
from recipekit.kernels.cross_entropy import Head, Part, losses_and_tokens, token_losses
from recipekit.spec.task import IGNORE
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WIDTH, VOCABULARY = 24, 1009  # a prime: every block but the last is of another width than the last


def cap(logits: torch.Tensor) -> torch.Tensor:
    return torch.tanh(logits * 0.5 / 3.0) * 3.0


def example(
    tokens: int = 50,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    vocabulary: int = VOCABULARY,
) -> dict[str, Any]:
    """Draws what a head and a loss take; every third token has no label."""
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
    return losses_and_tokens(hidden, Head(weight, bias, chain, part), labels, block)


def whole(hidden: Any, weight: Any, bias: Any, labels: Any, chain: Any = None) -> torch.Tensor:
    """Computes the same of whole logits, as a task does."""
    logits = linear(hidden, weight, bias)
    return cross_entropy(
        (chain(logits) if chain else logits).float(), labels, ignore_index=IGNORE, reduction="none"
    )


def gradients(losses: torch.Tensor, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Computes the gradients of a sum in which every token has another weight, as rows of a mixture
    might.
    """
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
    """Measures the norm of the difference as a share of that of the expected numbers."""
    return float(
        (found.detach().double() - expected.detach().double()).norm()
        / expected.detach().double().norm()
    )


def furthest(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Measures the largest difference as a share of the largest expected number."""
    return float(
        (found.detach().double() - expected.detach().double()).abs().max()
        / expected.detach().double().abs().max()
    )


@pytest.mark.parametrize("chain", [None, cap], ids=["", "soft cap and scale"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("tokens", "block"), [(1, NARROWEST), (2, 2 * NARROWEST), (50, 50 * NARROWEST), (50, CPU_BLOCK)]
)
def test_losses_and_gradients_are_those_of_whole_logits(tokens, block, bias, chain):
    """In several blocks, and in one, whose logits are kept."""
    given = example(tokens, bias=bias)
    losses, expected = losses_of(**given, chain=chain, block=block), whole(**given, chain=chain)
    assert losses.dtype == torch.float32 and losses.shape == (tokens,)
    assert furthest(losses, expected) < 1e-6
    theirs = gradients(expected, given)
    for name, found in gradients(losses, given).items():
        assert found.dtype == given[name].dtype and furthest(found, theirs[name]) < 1e-6, name


@pytest.mark.parametrize(
    ("dtype", "block"),
    [(torch.float32, 50 * NARROWEST), (torch.bfloat16, 50 * NARROWEST), (torch.float32, CPU_BLOCK)],
    ids=str,
)
def test_the_likeliest_tokens_are_those_of_argmax(dtype, block):
    """The first of equal logits, which bf16 has, also across blocks; losses and gradients are not
    touched.
    """
    given = example(dtype=dtype, bias=True)
    # a token that is as likely in each block, and often the likeliest
    given["weight"].data[NARROWEST + 3 :: NARROWEST] = given["weight"].data[3]
    given["bias"].data[3::NARROWEST] = 8.0
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
    """The logits are rounded as a linear layer rounds them.

    The input's gradient is a sum over blocks, each rounded once.
    """
    given = example(dtype=dtype, bias=True)
    losses, expected = (
        losses_of(**given, chain=chain, block=NARROWEST * 50),
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
        losses, expected = losses_of(**given, block=NARROWEST * 50), whole(**given)
    assert furthest(losses, expected) < 1e-6
    assert furthest(losses, whole(**given)) > 1e-4  # fp32 would be seen
    theirs = gradients(expected, given)
    for name, found in gradients(losses, given).items():
        assert found.dtype == torch.float32 and furthest(found, theirs[name]) < 1e-2, name


@pytest.mark.parametrize("chain", [None, cap], ids=["", "soft cap and scale"])
def test_gradients_are_those_of_differences_in_fp64(chain):
    given = example(4, torch.float64, bias=True, vocabulary=70)
    labels = given.pop("labels")
    assert torch.autograd.gradcheck(
        lambda *inputs: losses_of(*inputs, labels, chain=chain, block=NARROWEST * 4),
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
    """A bias of -inf hides the words that fill up a vocabulary."""
    hidden, weight, labels = torch.randn(6, 4), torch.randn(40, 4), torch.arange(6)
    # the first blocks
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
    """Watches every operation of a forward and its backward; `numel` is that of the largest tensor
    that one returned.
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
        CPU_BLOCK, vocabulary * WIDTH
    )
    # the watch sees what is large
    assert found.get("whole", tokens * vocabulary) == tokens * vocabulary


@contextlib.contextmanager
def saved_bytes(told: list[int]):
    """Counts the bytes that autograd keeps for the backward pass, each memory once."""
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
        told[0] - weights <= 1.2 * (given["hidden"].nbytes + given["labels"].nbytes) + 4 * CPU_BLOCK
    )
    # and a number for each token
    assert told[0] - weights == given["hidden"].nbytes + given["labels"].nbytes + 4 * 4096


def test_blocks_are_as_wide_as_their_bytes_allow():
    assert columns_at_once(4096, 151_936) == BLOCK // 4096 == 4096
    assert columns_at_once(1, 151_936) == 151_936 and columns_at_once(0, 10) == 10
    assert columns_at_once(10**9, 151_936) == NARROWEST


# Over tensor ranks
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", [None, cap], ids=["", "soft cap and scale"])
@pytest.mark.parametrize("block", [50 * NARROWEST, CPU_BLOCK], ids=["several blocks", "one block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_three_ranks_it_is_the_loss_of_whole_logits(monkeypatch, dtype, block, chain):
    """With labels in the columns of every rank, the first and the last ones of each among them;
    equal logits, which bf16 has, lie on several ranks.
    """
    given, bounds = example(bias=True, dtype=dtype), [0, 337, 673, 1009]
    given["labels"][:12:2] = torch.tensor([0, 336, 337, 672, 673, 1008])
    held = [
        int(((given["labels"] >= low) & (given["labels"] < high)).sum())
        for low, high in itertools.pairwise(bounds)
    ]
    assert min(held) > 5
    expected, one = losses_and_argmax(**given, chain=chain, block=50 * NARROWEST)
    theirs = gradients(expected, given)

    def case(rank: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        own = slice(bounds[rank], bounds[rank + 1])
        mine = {name: given[name].detach()[own].requires_grad_() for name in ("weight", "bias")}
        mine |= {"hidden": given["hidden"].detach().requires_grad_(), "labels": given["labels"]}
        part: Any = Part(bounds[rank], (0, 1, 2))
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
    [("cpu", None, CPU_BLOCK), ("cuda", None, BLOCK), ("xpu", None, BLOCK), ("cuda", 777, 777)],
)
def test_a_block_is_as_large_as_the_device_wants_it(monkeypatch, device, own, expected):
    asked = []
    monkeypatch.setattr(
        kernel,
        "columns_at_once",
        lambda rows, columns, block: asked.append((rows, columns, block)) or columns,
    )
    monkeypatch.setattr(kernel, "_of_whole_logits", lambda *given: "computed")
    hidden, weight = (
        SimpleNamespace(device=SimpleNamespace(type=device), dtype=torch.float32),
        torch.empty(1009, 0),
    )
    assert kernel._computed(hidden, Head(weight), torch.zeros(5, 3), own, False) == "computed"  # type: ignore[arg-type]
    assert asked == [(15, 1009, expected)]
