"""Element-wise Lion in plain torch, because DeepSpeed's Lion for devices is a CUDA op."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .param_spans import local_tensor

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT


class Lion(torch.optim.Optimizer):
    """Lion: Algorithm 2 of Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv
    2302.06675).

    For each weight x with gradient g, at every step:

        x = x - lr (sign(beta1 m + (1 - beta1) g) + weight_decay x)
        m = beta2 m + (1 - beta2) g
    """

    def __init__(
        self,
        params: "ParamsT",
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step with every parameter that has a gradient."""
        assert closure is None, "no engine gives one"
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for parameter in (
                parameter for parameter in group["params"] if parameter.grad is not None
            ):
                state = self.state[parameter]
                if not state:
                    state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter)}
                state["step"] += 1
                weights, gradient, moment = (
                    local_tensor(parameter),
                    local_tensor(parameter.grad),
                    local_tensor(state["exp_avg"]),
                )
                sign = moment.lerp(gradient, 1 - beta1).sign_()
                weights.mul_(1 - lr * group["weight_decay"]).sub_(sign, alpha=lr)
                moment.lerp_(gradient, 1 - beta2)


OPTIMIZER = Lion
