"""Muon of whole matrices, however they are divided over ranks, with AdamW for all that is no
matrix.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from ..spec.optimizer_specs import GATHERED
from .borders import Borders, Part, local

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Piece:
    """Is what this rank has of a matrix: of its weights, its gradient and its momentum, (stop -
    start,) each.
    """

    part: Part
    weights: torch.Tensor
    gradient: torch.Tensor
    momentum: torch.Tensor

    @property
    def numel(self) -> int:
        """Counts the elements of the whole matrix."""
        return prod(self.part.sizes)


class NewtonSchulz(torch.optim.Optimizer):
    """Updates matrices as torch.optim.Muon does (Jordan et al., "Muon: An optimizer for hidden
    layers", 2024), the rest as torch.optim.AdamW.

    Of each matrix x with gradient g, once a step, where NS is `orthogonal` and A x B is the shape
    of x:

        m = momentum m + (1 - momentum) g
        u = NS(momentum m + (1 - momentum) g), without `nesterov` NS(m)
        x = x - lr weight_decay x - lr f u

    f is sqrt(max(1, A / B)) for `adjust_lr_fn` None or "original", and 0.2 sqrt(max(A, B)) for
    "match_rms_adamw" (Liu et al., arXiv 2502.16982), at which a rate of AdamW's fits. Groups with
    `matrix` hold the matrices; `betas` and `eps` are of the others.

    Ranks add up what they hold of a matrix, as `borders` says, at most `GATHERED` elements or one
    matrix at a time; of these each rank of a partition orthogonalises some, and keeps of all what
    it holds. The name of this class has no "muon" in it: DeepSpeed 0.19.8 itself orthogonalises the
    gradients of an optimizer whose name has (zero/stage_1_and_2.py, _is_muon_group).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr_fn: str | None = None,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        ns_eps: float = 1e-7,
        ns_dtype: str = "bf16",
    ):
        numbers = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
        }
        super().__init__(params, numbers | {"adjust_lr_fn": adjust_lr_fn})
        self.polynomial = tuple(ns_coefficients), ns_steps, ns_eps, DTYPES[ns_dtype]
        self.borders = Borders()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes a step with every parameter that has a gradient (a collective)."""
        assert closure is None, "no engine gives one"
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in trained:
                if not self.state[parameter]:
                    kept = (
                        ("momentum_buffer",) if group.get("matrix") else ("exp_avg", "exp_avg_sq")
                    )
                    self.state[parameter] |= {"step": torch.tensor(0.0)} | {
                        name: torch.zeros_like(parameter) for name in kept
                    }
            if trained and group.get("matrix"):
                self._matrices(group, trained)
            elif trained:
                self._others(group, trained)

    def _others(self, group: dict[str, Any], trained: list[torch.Tensor]) -> None:
        states, (beta1, beta2) = [self.state[parameter] for parameter in trained], group["betas"]
        gradients = [local(parameter.grad) for parameter in trained if parameter.grad is not None]
        moments, squares = (
            [local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq")
        )
        numbers = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        adamw(
            [local(parameter) for parameter in trained],
            gradients,
            moments,
            squares,
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            maximize=False,
            **numbers,
        )

    def _matrices(self, group: dict[str, Any], trained: list[torch.Tensor]) -> None:
        pieces: list[Piece] = []
        for parameter in trained:
            state, gradient = self.state[parameter], local(parameter.grad).reshape(-1)  # type: ignore[arg-type]
            state["step"] += 1
            weights, momentum = local(parameter).view(-1), local(state["momentum_buffer"]).view(-1)
            momentum.lerp_(gradient, 1 - group["momentum"])
            for part in self.borders.of(parameter):
                own = slice(part.start, part.stop)
                pieces.append(Piece(part, weights[own], gradient[own], momentum[own]))
        for some in _at_a_time(pieces):
            self._update(group, some)

    def _update(self, group: dict[str, Any], pieces: list[Piece]) -> None:
        """Updates what this rank has of some matrices (a collective)."""
        flat = torch.zeros(
            sum(piece.numel for piece in pieces),
            device=self.borders.device or pieces[0].weights.device,
        )
        split = flat.split([piece.numel for piece in pieces])
        # (A, B) each
        wholes = [whole.view(piece.part.sizes) for piece, whole in zip(pieces, split, strict=True)]
        for piece, whole in zip(pieces, wholes, strict=True):
            piece.part.put(
                (
                    piece.gradient.lerp(piece.momentum, group["momentum"])
                    if group["nesterov"]
                    else piece.momentum
                ),
                whole,
            )
        self.borders.join(flat, wholes, [piece.part for piece in pieces])
        ranks, rank = (
            (dist.get_world_size(self.borders.partitions), dist.get_rank(self.borders.partitions))
            if self.borders.partitions
            else (1, 0)
        )
        for number, whole in enumerate(wholes):
            if number % ranks == rank:
                whole.copy_(orthogonal(whole, *self.polynomial))
            else:
                whole.zero_()
        if ranks > 1:
            dist.all_reduce(flat, group=self.borders.partitions)
        for piece, whole in zip(pieces, wholes, strict=True):
            rate = group["lr"] * _factor(piece.part.sizes, group["adjust_lr_fn"])
            piece.weights.mul_(1 - group["lr"] * group["weight_decay"]).sub_(
                piece.part.take(whole).to(piece.weights.device), alpha=rate
            )


def orthogonal(
    matrix: torch.Tensor,
    coefficients: tuple[float, ...],
    steps: int,
    eps: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Brings the singular values of a matrix (A, B) near 1 by the quintic Newton-Schulz iteration
    of torch.optim.Muon; returns (A, B) of `dtype`.
    """
    a, b, c = coefficients
    # (A, B), A <= B
    wide = (
        matrix.to(dtype, copy=True)
        if matrix.shape[0] <= matrix.shape[1]
        else matrix.T.to(dtype, copy=True)
    )
    wide.div_(wide.norm().clamp(min=eps))
    for _ in range(steps):
        gram = wide @ wide.T  # (A, A)
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


def _factor(shape: tuple[int, ...], adjust: str | None) -> float:
    """Returns what the learning rate of a matrix is multiplied with, so that its update is as large
    as that of any other shape.
    """
    return (
        0.2 * sqrt(max(shape))
        if adjust == "match_rms_adamw"
        else sqrt(max(1.0, shape[0] / shape[1]))
    )


def _at_a_time(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Yields runs of at most `GATHERED` elements of whole matrices; one matrix may have more."""
    some: list[Piece] = []
    for piece in pieces:
        if some and sum(each.numel for each in [*some, piece]) > GATHERED:
            yield some
            some = []
        some.append(piece)
    yield some
