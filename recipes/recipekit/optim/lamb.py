"""LAMB with trust ratios over full tensors, for any sharding over ranks."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .param_spans import ParamSpans, TensorSpan, local_tensor, sum_of_squares

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT


class Lamb(torch.optim.Optimizer):
    """LAMB: Algorithm 2 of You et al., "Large Batch Optimization for Deep Learning" (ICLR 2020,
    arXiv 1904.00962), with phi(z) = z.

    For each tensor x with gradient g, at its step t = 1, 2, ...:

        m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
        r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
        u = r + weight_decay x             x = x - lr |x| / |u| u

    The norm |u| includes the decay. The trust ratio |x| / |u| is not clamped. It is 1 if either
    norm is 0. Every tensor has a trust ratio, including norms and biases, whose weight_decay is 0.
    If `bias_correction` is False, the divisors of m and v are omitted, as in the authors' code.

    Norms are computed over full tensors, in fp64. Each group's step requires one all-reduce over
    the ranks in `borders`. For tensors that tensor parallelism splits, it requires a second one
    over the tensor-parallel ranks.
    """

    def __init__(
        self,
        params: "ParamsT",
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "bias_correction": bias_correction,
            },
        )
        self.borders = ParamSpans()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step with every parameter that has a gradient (a collective operation)."""
        assert closure is None, "no engine gives one"
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                self._update(group, trained)

    def _update(self, group: dict[str, Any], trained: list[torch.Tensor]) -> None:
        parts: list[TensorSpan] = []
        # Weights and update direction of each shard.
        pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in trained:
            weights, direction = (
                local_tensor(parameter).view(-1),
                self._direction(parameter, group).view(-1),
            )
            for part in self.borders.spans_of(parameter):
                parts.append(part)
                pieces.append((weights[part.start : part.stop], direction[part.start : part.stop]))
        # (tensors, 2)
        sums = torch.stack(
            [
                torch.stack([sum_of_squares(weights), sum_of_squares(direction)])
                for weights, direction in pieces
            ]
        )
        cut = [
            slice(number, number + 1)
            for number, part in enumerate(parts)
            if part.split_dim is not None
        ]
        weights_norms, norms = self.borders.all_reduce_sums(sums, cut).sqrt().unbind(1)
        ratios = torch.where((weights_norms > 0) & (norms > 0), weights_norms / norms, 1.0).float()
        for (weights, direction), ratio in zip(pieces, ratios, strict=True):
            weights.sub_(direction.mul_(ratio), alpha=group["lr"])

    def _direction(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Update the moments and return u, in the shape of this rank's shard of the parameter."""
        state = self.state[parameter]
        if not state:
            state |= {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        state["step"] += 1
        (beta1, beta2), step, gradient = (
            group["betas"],
            float(state["step"]),
            local_tensor(parameter.grad),  # type: ignore[arg-type]
        )
        moment, squares = local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"])
        moment.lerp_(gradient, 1 - beta1)
        squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first, second = (
            (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
        )
        root = (squares / second).sqrt_().add_(group["eps"])
        return (
            torch.div(moment, root, out=root)
            .div_(first)
            .add_(local_tensor(parameter), alpha=group["weight_decay"])
        )


OPTIMIZER = Lamb
