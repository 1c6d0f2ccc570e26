"""LAMB, whose trust ratio is that of whole tensors, however they are divided over ranks."""

from typing import Any

import torch

from .borders import Borders, Part, local, square_sum


class Lamb(torch.optim.Optimizer):
    """Updates weights by Algorithm 2 of You et al., "Large Batch Optimization for Deep Learning"
    (ICLR 2020, arXiv 1904.00962), with phi(z) = z.

    Of each tensor x with gradient g, at its step t = 1, 2, ...:

        m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
        r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
        u = r + weight_decay x             x = x - lr |x| / |u| u

    The decay is inside of the norm |u|. The trust ratio |x| / |u| is not clamped, and is 1 where
    one of the norms is 0; it is taken of every tensor, norms and biases too, whose weight_decay is
    0. `bias_correction` False leaves the two divisors of m and v out, as the authors' code does.
    Norms are those of the whole tensor, added up in fp64: in the step of each group one all-reduce
    over the ranks that `borders` names, and another over the tensor ranks for what those divide.
    """

    def __init__(
        self,
        params: Any,
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
        self.borders = Borders()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes a step with every parameter that has a gradient (a collective)."""
        assert closure is None, "no engine gives one"
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                self._update(group, trained)

    def _update(self, group: dict[str, Any], trained: list[torch.Tensor]) -> None:
        parts: list[Part] = []
        # of each part the weights and their direction
        pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in trained:
            weights, direction = (
                local(parameter).view(-1),
                self._direction(parameter, group).view(-1),
            )
            for part in self.borders.of(parameter):
                parts.append(part)
                pieces.append((weights[part.start : part.stop], direction[part.start : part.stop]))
        # (tensors, 2)
        sums = torch.stack(
            [
                torch.stack([square_sum(weights), square_sum(direction)])
                for weights, direction in pieces
            ]
        )
        cut = [
            slice(number, number + 1) for number, part in enumerate(parts) if part.cut is not None
        ]
        weights_norms, norms = self.borders.add_up(sums, cut).sqrt().unbind(1)
        ratios = torch.where((weights_norms > 0) & (norms > 0), weights_norms / norms, 1.0).float()
        for (weights, direction), ratio in zip(pieces, ratios, strict=True):
            weights.sub_(direction.mul_(ratio), alpha=group["lr"])

    def _direction(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Updates the moments; returns u, of the shape of what this rank has of the parameter."""
        state = self.state[parameter]
        if not state:
            state |= {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        state["step"] += 1
        (beta1, beta2), step, gradient = group["betas"], float(state["step"]), local(parameter.grad)  # type: ignore[arg-type]
        moment, squares = local(state["exp_avg"]), local(state["exp_avg_sq"])
        moment.lerp_(gradient, 1 - beta1)
        squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first, second = (
            (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
        )
        root = (squares / second).sqrt_().add_(group["eps"])
        return (
            torch.div(moment, root, out=root)
            .div_(first)
            .add_(local(parameter), alpha=group["weight_decay"])
        )
