"""Muon on full matrices, for any sharding over ranks, with AdamW for all other parameters."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod, sqrt
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from ..spec.optimizer_specs import MUON_GATHER_NUMEL
from .param_spans import ParamSpans, TensorSpan, local_tensor

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

NEWTON_SCHULZ_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class MatrixShard:
    """This rank's shard of a matrix: weights, gradient and momentum, each (stop - start,)."""

    span: TensorSpan
    weights: torch.Tensor
    gradient: torch.Tensor
    momentum: torch.Tensor

    @property
    def numel(self) -> int:
        """Return the number of elements in the full matrix."""
        return prod(self.span.full_shape)


class NewtonSchulz(torch.optim.Optimizer):
    """Muon as in torch.optim.Muon (Jordan et al., "Muon: An optimizer for hidden layers", 2024),
    with torch.optim.AdamW for parameters that are not matrices.

    For each matrix x of shape A x B with gradient g, at every step, where NS is `orthogonalize`:

        m = momentum m + (1 - momentum) g
        u = NS(momentum m + (1 - momentum) g), without `nesterov` NS(m)
        x = x - lr weight_decay x - lr f u

    f is sqrt(max(1, A / B)) if `adjust_lr_fn` is None or "original". For "match_rms_adamw" it is
    0.2 sqrt(max(A, B)) (Liu et al., arXiv 2502.16982), which suits AdamW's learning rates. Groups
    with an entry `matrix` contain the matrices. `betas` and `eps` apply to the other groups.

    All-reduces over the ranks in `borders` assemble full matrices from shards. At most
    `MUON_GATHER_NUMEL` elements, or one matrix, are gathered at a time. Each rank of a partition
    orthogonalizes some of these matrices. Every rank then keeps its shards of all of them.

    This class's name does not contain "muon", because DeepSpeed 0.19.8 itself orthogonalizes the
    gradients of an optimizer with such a name (zero/stage_1_and_2.py, _is_muon_group).
    """

    def __init__(
        self,
        params: "ParamsT",
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
        self.polynomial = tuple(ns_coefficients), ns_steps, ns_eps, NEWTON_SCHULZ_DTYPES[ns_dtype]
        self.borders = ParamSpans()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step with every parameter that has a gradient (a collective operation)."""
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
                self._muon_step(group, trained)
            elif trained:
                self._adamw_step(group, trained)

    def _adamw_step(self, group: dict[str, Any], trained: list[torch.Tensor]) -> None:
        states, (beta1, beta2) = [self.state[parameter] for parameter in trained], group["betas"]
        gradients = [
            local_tensor(parameter.grad) for parameter in trained if parameter.grad is not None
        ]
        moments, squares = (
            [local_tensor(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq")
        )
        numbers = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        adamw(
            [local_tensor(parameter) for parameter in trained],
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

    def _muon_step(self, group: dict[str, Any], trained: list[torch.Tensor]) -> None:
        pieces: list[MatrixShard] = []
        for parameter in trained:
            state, gradient = self.state[parameter], local_tensor(parameter.grad).reshape(-1)  # type: ignore[arg-type]
            state["step"] += 1
            weights, momentum = (
                local_tensor(parameter).view(-1),
                local_tensor(state["momentum_buffer"]).view(-1),
            )
            momentum.lerp_(gradient, 1 - group["momentum"])
            for part in self.borders.spans_of(parameter):
                own = slice(part.start, part.stop)
                pieces.append(MatrixShard(part, weights[own], gradient[own], momentum[own]))
        for some in _gather_batches(pieces):
            self._update(group, some)

    def _update(self, group: dict[str, Any], shards: list[MatrixShard]) -> None:
        """Update this rank's shards of some matrices (a collective operation)."""
        flat = torch.zeros(
            sum(piece.numel for piece in shards),
            device=self.borders.device or shards[0].weights.device,
        )
        split = flat.split([piece.numel for piece in shards])
        # (A, B) each
        wholes = [
            whole.view(piece.span.full_shape) for piece, whole in zip(shards, split, strict=True)
        ]
        for piece, whole in zip(shards, wholes, strict=True):
            piece.span.write_into(
                (
                    piece.gradient.lerp(piece.momentum, group["momentum"])
                    if group["nesterov"]
                    else piece.momentum
                ),
                whole,
            )
        self.borders.gather_full(flat, wholes, [piece.span for piece in shards])
        ranks, rank = (
            (dist.get_world_size(self.borders.partitions), dist.get_rank(self.borders.partitions))
            if self.borders.partitions
            else (1, 0)
        )
        for number, whole in enumerate(wholes):
            if number % ranks == rank:
                whole.copy_(orthogonalize(whole, *self.polynomial))
            else:
                whole.zero_()
        if ranks > 1:
            dist.all_reduce(flat, group=self.borders.partitions)
        for piece, whole in zip(shards, wholes, strict=True):
            rate = group["lr"] * _lr_factor(piece.span.full_shape, group["adjust_lr_fn"])
            piece.weights.mul_(1 - group["lr"] * group["weight_decay"]).sub_(
                piece.span.read_from(whole).to(piece.weights.device), alpha=rate
            )


def orthogonalize(
    matrix: torch.Tensor,
    coefficients: tuple[float, ...],
    steps: int,
    eps: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the matrix, (A, B) in `dtype`, with its singular values brought close to 1.

    The function uses torch.optim.Muon's quintic Newton-Schulz iteration.
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


def _lr_factor(shape: tuple[int, ...], adjust: str | None) -> float:
    """Return a matrix's learning-rate factor, which makes updates equally large for all shapes."""
    return (
        0.2 * sqrt(max(shape))
        if adjust == "match_rms_adamw"
        else sqrt(max(1.0, shape[0] / shape[1]))
    )


def _gather_batches(shards: list[MatrixShard]) -> Iterator[list[MatrixShard]]:
    """Yield batches of matrix shards whose full matrices can be gathered together.

    Together the full matrices have at most `MUON_GATHER_NUMEL` elements. A batch with a single
    matrix may exceed this limit.
    """
    some: list[MatrixShard] = []
    for piece in shards:
        if some and sum(each.numel for each in [*some, piece]) > MUON_GATHER_NUMEL:
            yield some
            some = []
        some.append(piece)
    yield some


OPTIMIZER = NewtonSchulz
