"""Work that our optimizers do in chunks to save memory.

With chunks of a few elements on several ranks, every bit must equal the result without chunks.
"""

import itertools
from collections.abc import Callable
from math import prod
from typing import Any

import papers
import pytest
import torch
from ranks_in_threads import Ranks
from recipekit.optim import adafactor, muon, one_bit, param_spans
from recipekit.optim.adafactor import Adafactor
from recipekit.optim.lamb import Lamb
from recipekit.optim.muon import NewtonSchulz
from recipekit.optim.one_bit import OneBitAdam
from recipekit.optim.param_spans import ParamSpans, TensorSpan

# No shape is the transpose of a different one. On three ranks the boundaries are within tensors.
SHAPES = ((7, 5), (11,), (3, 4, 3), (6, 9), (2,), (5, 8))
GROUPS = ((0, 1, 2), (3, 4, 5))
RANKS, STEPS = 3, 4
Optimizer = Callable[[list[dict[str, Any]]], Any]


def eighths(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return random multiples of 1/8, whose squares have exact sums in any order."""
    return torch.randint(-20, 21, shape, generator=torch.Generator().manual_seed(seed)).float() / 8


def gradient(number: int, step: int, rank: int = 0) -> torch.Tensor:
    return eighths(SHAPES[number], 1000 * rank + 100 * step + number + 1)


def start(number: int) -> torch.Tensor:
    return eighths(SHAPES[number], -number - 1)


def flat_runs(rank: int) -> list[tuple[torch.Tensor, list[TensorSpan]]]:
    """Return, for each group, the flat part that a rank updates under ZeRO-1, and the part's
    tensors.

    The last part is padded.
    """
    found = []
    for group in GROUPS:
        total = sum(prod(SHAPES[number]) for number in group)
        size = -(-total // (2 * RANKS)) * 2
        low, high, at, parts = rank * size, (rank + 1) * size, 0, []
        values = torch.zeros(size)
        for number in group:
            numel = prod(SHAPES[number])
            first, last = max(at, low), min(at + numel, high)
            if first < last:
                values[first - low : last - low] = start(number).flatten()[first - at : last - at]
                parts.append(TensorSpan(first - low, last - low, SHAPES[number], first - at))
            else:
                parts.append(TensorSpan(0, 0, SHAPES[number]))
            at += numel
        found.append((values, parts))
    return found


def divided(ranks: Ranks, kind: Optimizer) -> list[torch.Tensor]:
    """Run steps on three ranks, each with a part of every group; return the full tensors."""

    def case(rank: int) -> list[torch.Tensor]:
        runs = flat_runs(rank)
        parameters = [torch.nn.Parameter(values) for values, _ in runs]
        optimizer = kind(
            [{"params": [parameters[0]]}, {"params": [parameters[1]], "weight_decay": 0.25}]
        )
        optimizer.borders = ParamSpans(
            {parameter: parts for parameter, (_, parts) in zip(parameters, runs, strict=True)},
            partitions=(0, 1, 2),
        )
        for step in range(STEPS):
            for parameter, group, (_, parts) in zip(parameters, GROUPS, runs, strict=True):
                parameter.grad = torch.zeros_like(parameter)
                for number, part in zip(group, parts, strict=True):
                    parameter.grad[part.start : part.stop] = gradient(number, step).flatten()[
                        part.offset : part.offset + part.stop - part.start
                    ]
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    found = ranks.run(case)
    whole = [torch.cat(parts) for parts in zip(*found, strict=True)]
    return [
        piece.view(SHAPES[number])
        for group, flat in zip(GROUPS, whole, strict=True)
        for number, piece in zip(group, flat.split(sizes(group, flat)), strict=False)
    ]


def sizes(group: tuple[int, ...], flat: torch.Tensor) -> list[int]:
    numels = [prod(SHAPES[number]) for number in group]
    return [*numels, len(flat) - sum(numels)]


def together(kind: Optimizer) -> list[torch.Tensor]:
    """Run the same steps in one process, tensor by tensor."""
    weights = [torch.nn.Parameter(start(number)) for number in range(len(SHAPES))]
    optimizer = kind([{"params": weights[:3]}, {"params": weights[3:], "weight_decay": 0.25}])
    for step in range(STEPS):
        for number, value in enumerate(weights):
            value.grad = gradient(number, step)
        optimizer.step()
    return [value.detach() for value in weights]


def lamb(groups: list[dict[str, Any]]) -> Lamb:
    return Lamb(groups, lr=0.1, betas=(0.5, 0.75), eps=0.01)


def factors(groups: list[dict[str, Any]]) -> Adafactor:
    return Adafactor(groups, lr=0.1, beta2_decay=-0.6, eps=(0.02, 0.03), d=0.7)


@pytest.mark.parametrize("most", [3, 16])
@pytest.mark.parametrize("kind", [lamb, factors])
def test_sums_and_updates_in_pieces_are_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, kind: Optimizer, most: int
) -> None:
    """The results in one process and on three ranks are compared with the reference and with each
    other.
    """
    ranks = Ranks(RANKS, monkeypatch)
    whole, parts = together(kind), divided(ranks, kind)
    monkeypatch.setattr(param_spans, "CHUNK_NUMEL", most)
    monkeypatch.setattr(adafactor, "CHUNK_NUMEL", most)
    monkeypatch.setattr(adafactor.split_into_boxes, "__defaults__", (most,))
    for cut, uncut in ((together(kind), whole), (divided(ranks, kind), parts)):
        assert all(torch.equal(one, other) for one, other in zip(cut, uncut, strict=True))
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [lamb, factors])
def test_three_ranks_with_parts_of_tensors_are_the_paper(
    monkeypatch: pytest.MonkeyPatch, kind: Optimizer
) -> None:
    def paper(groups: list[dict[str, Any]]) -> Any:
        groups = [{"weight_decay": 0.0} | group for group in groups]
        if kind is lamb:
            return papers.Lamb(groups, lr=0.1, betas=(0.5, 0.75), eps=0.01)
        return papers.Adafactor(groups, lr=0.1, beta2_decay=-0.6, eps=(0.02, 0.03), d=0.7)

    for one, other in zip(divided(Ranks(RANKS, monkeypatch), kind), together(paper), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


# Muon
# --------------------------------------------------------------------------------------------------

# Values that differ from torch's defaults.
OWN: dict[str, Any] = {
    "momentum": 0.8,
    "ns_coefficients": (3.0, -3.5, 1.5),
    "ns_steps": 3,
    "ns_eps": 0.5,
}
MATRICES = (0, 3, 5)


def matrices(ranks: Ranks, **numbers: Any) -> tuple[list[torch.Tensor], int]:
    """Run Muon steps on three ranks that have parts of three matrices.

    Return the full matrices, and the size of the largest all-reduce.
    """
    numels = [prod(SHAPES[number]) for number in MATRICES]
    size = -(-sum(numels) // RANKS)

    def case(rank: int) -> torch.Tensor:
        whole = torch.cat(
            [start(number).flatten() for number in MATRICES]
            + [torch.zeros(size * RANKS - sum(numels))]
        )
        parameter, parts, at = (
            torch.nn.Parameter(whole[rank * size : (rank + 1) * size].clone()),
            [],
            0,
        )
        for number, numel in zip(MATRICES, numels, strict=True):
            first, last = max(at, rank * size), min(at + numel, (rank + 1) * size)
            low = rank * size
            parts.append(
                TensorSpan(first - low, last - low, SHAPES[number], first - at)
                if first < last
                else TensorSpan(0, 0, SHAPES[number])
            )
            at += numel
        optimizer = NewtonSchulz(
            [{"params": [parameter], "matrix": True}],
            lr=0.1,
            weight_decay=0.25,
            ns_dtype="fp32",
            **OWN | numbers,
        )
        optimizer.borders = ParamSpans({parameter: parts}, partitions=(0, 1, 2))
        for step in range(STEPS):
            flat = torch.cat(
                [gradient(number, step).flatten() for number in MATRICES]
                + [torch.zeros(size * RANKS - sum(numels))]
            )
            parameter.grad = flat[rank * size : (rank + 1) * size].clone()
            optimizer.step()
        return parameter.detach()

    before = len(ranks.sizes)
    flat = torch.cat(ranks.run(case))
    found = [
        piece.view(SHAPES[number])
        for number, piece in zip(
            MATRICES, flat.split([*numels, len(flat) - sum(numels)]), strict=False
        )
    ]
    return found, max(ranks.sizes[before:])


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_matrices_gathered_a_few_at_a_time_are_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, adjust: str
) -> None:
    ranks = Ranks(RANKS, monkeypatch)
    uncut, most = matrices(ranks, adjust_lr_fn=adjust)
    assert most == sum(prod(SHAPES[number]) for number in MATRICES)
    for gathered, largest in ((1, 54), (88, 54), (89, 89), (128, 89), (129, 129)):
        monkeypatch.setattr(muon, "MUON_GATHER_NUMEL", gathered)
        cut, most = matrices(ranks, adjust_lr_fn=adjust)
        assert most == largest and all(
            torch.equal(one, other) for one, other in zip(cut, uncut, strict=True)
        )
    # The reference is the polynomial's definition, computed in one process.
    for number, found in zip(MATRICES, uncut, strict=True):
        weights, momentum = start(number).double(), torch.zeros(SHAPES[number], dtype=torch.float64)
        rows, columns = SHAPES[number]
        for step in range(STEPS):
            g = gradient(number, step).double()
            momentum = 0.8 * momentum + 0.2 * g
            u = 0.8 * momentum + 0.2 * g
            x = u / u.norm().clamp(min=0.5)
            for _ in range(3):
                a = x @ x.T
                x = 3.0 * x + (-3.5 * a + 1.5 * a @ a) @ x
            factor = (
                0.2 * max(rows, columns) ** 0.5
                if adjust == "match_rms_adamw"
                else max(1.0, rows / columns) ** 0.5
            )
            weights = weights * (1 - 0.1 * 0.25) - 0.1 * factor * x
        assert torch.allclose(found.double(), weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "numbers",
    [{"ns_eps": 50.0}, {"ns_steps": 2}, {"ns_coefficients": (3.0, -3.5, 1.5)}, {"momentum": 0.5}],
    ids=str,
)
@pytest.mark.parametrize("shape", [(7, 5), (5, 7)])
def test_muon_takes_other_numbers_than_torchs(
    numbers: dict[str, Any], shape: tuple[int, int]
) -> None:
    """Each value is tested separately. The eps is larger than the norm."""
    theirs = {{"ns_eps": "eps"}.get(name, name): value for name, value in numbers.items()}
    found = []
    for kind, more in ((NewtonSchulz, numbers), (torch.optim.Muon, theirs), (NewtonSchulz, {})):
        weights = torch.nn.Parameter(eighths(shape, 1))
        group = {"params": [weights]} | ({"matrix": True} if kind is NewtonSchulz else {})
        optimizer: Any = kind([group], lr=0.05, weight_decay=0.3, **more)
        for step in range(2):
            weights.grad = eighths(shape, 10 + step)
            optimizer.step()
        found.append(weights.detach())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


# Compression to signs
# --------------------------------------------------------------------------------------------------

FREEZE, SIGNED = 2, 7
DEAD = 3  # a tensor whose first row receives no gradient before the freeze


def signs(ranks: Ranks) -> list[tuple[list[torch.Tensor], list[float], list[torch.Tensor]]]:
    """Run steps of 1-bit Adam; return each rank's weights, norms and error-feedback buffers."""

    def case(rank: int) -> tuple[list[torch.Tensor], list[float], list[torch.Tensor]]:
        weights = [torch.nn.Parameter(start(number)) for number in range(len(SHAPES))]
        groups = [{"params": weights[:3]}, {"params": weights[3:], "weight_decay": 0.25}]
        optimizer = OneBitAdam(groups, freeze_step=FREEZE, lr=0.1, betas=(0.5, 0.75), eps=0.05)
        norms = []
        for step in range(SIGNED):
            signed = optimizer.compresses
            assert signed == (step >= FREEZE)
            for number, value in enumerate(weights):
                own = [one_gradient(number, step, each) for each in range(RANKS)]
                value.grad = own[rank] if signed else sum(own[1:], own[0]) / RANKS
            optimizer.step()
            if optimizer.norm is not None:
                norms.append(float(optimizer.norm))
        assert optimizer.errors is not None
        return (
            [value.detach() for value in weights],
            norms,
            [optimizer.errors.worker, optimizer.errors.server],
        )

    return ranks.run(case)


def one_gradient(number: int, step: int, rank: int) -> torch.Tensor:
    """Return a gradient that is larger on higher ranks, and zero for a part of one tensor."""
    found = gradient(number, step, rank) * (1 + rank)
    if number == DEAD and step < FREEZE:
        found[0] = 0
    return found


def test_signs_in_pieces_are_the_same_bits_and_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of elements is not divisible by three ranks.

    In one tensor, some elements have no scale.
    """
    ranks = Ranks(RANKS, monkeypatch)
    uncut = signs(ranks)
    for most in (8, 24):
        for module in (one_bit, param_spans):
            monkeypatch.setattr(module, "CHUNK_NUMEL", most)
        for one, other in zip(signs(ranks), uncut, strict=True):
            # Sums of rounded numbers in another order.
            assert one[1] == pytest.approx(other[1], rel=1e-14)
            assert all(
                torch.equal(a, b) for a, b in zip(one[0] + one[2], other[0] + other[2], strict=True)
            )
    weights = [torch.nn.Parameter(start(number)) for number in range(len(SHAPES))]
    groups = [
        {"params": weights[:3], "weight_decay": 0.0, "lr": 0.1},
        {"params": weights[3:], "weight_decay": 0.25, "lr": 0.1},
    ]
    paper = papers.OneBitAdam(groups, RANKS, FREEZE, (0.5, 0.75), 0.05)
    norms = [
        paper.step(
            [
                [one_gradient(number, step, rank) for number in range(len(SHAPES))]
                for rank in range(RANKS)
            ]
        )
        for step in range(SIGNED)
    ]
    for rank, (found, own, errors) in enumerate(uncut):
        assert own == pytest.approx(norms[FREEZE:], rel=1e-5)
        assert all(
            torch.allclose(one, other, rtol=1e-4, atol=1e-5)
            for one, other in zip(found, weights, strict=True)
        )
        numel, part = len(paper.m), len(errors[1])
        assert part % 8 == 0 and len(errors[0]) == RANKS * part and not errors[0][numel:].any()
        assert torch.allclose(errors[0][:numel], paper.worker_errors[rank], rtol=1e-4, atol=1e-4)
        served = paper.server_error[rank * part : (rank + 1) * part]
        assert torch.allclose(errors[1][: len(served)], served, rtol=1e-4, atol=1e-4)


def test_a_sign_of_any_piece_is_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    values = eighths((96,), 3)
    whole = one_bit.pack_signs(values)
    monkeypatch.setattr(one_bit, "CHUNK_NUMEL", 16)
    assert torch.equal(one_bit.pack_signs(values), whole)
    assert (
        list(one_bit.chunk_range(3, 40)) == [(3, 19), (19, 35), (35, 40)]
        and list(one_bit.chunk_range(5, 5)) == []
    )
    for first, last in itertools.combinations(range(0, 97, 7), 2):
        assert torch.equal(
            one_bit.unpack_signs(whole, first, last, torch.tensor(0.25)),
            torch.where(values[first:last] >= 0, 0.25, -0.25),
        )
