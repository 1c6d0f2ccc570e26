"""Element-wise AdEMAMix in plain torch, because neither DeepSpeed nor torch has it."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .param_spans import local_tensor

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT


class AdEMAMix(torch.optim.Optimizer):
    """AdEMAMix: Algorithm 1 of Pagliardini, Ablin and Grangier, "The AdEMAMix Optimizer: Better,
    Faster, Older" (arXiv 2409.03137).

    For each weight x with gradient g, at step t = 1, 2, ...:

        m1 = beta1 m1 + (1 - beta1) g
        m2 = beta3(t) m2 + (1 - beta3(t)) g
        v = beta2 v + (1 - beta2) g^2
        m = m1 / (1 - beta1^t) + alpha(t) m2
        x = x - lr (m / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay x)

    `betas` are beta1, beta2 and the final beta3. alpha(t) and beta3(t) reach their final values at
    step `alpha_beta3_warmup_steps`. If it is 0, they have these values from the first step on. The
    bias of m2 is not corrected.
    """

    def __init__(
        self,
        params: "ParamsT",
        alpha_beta3_warmup_steps: int,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        alpha: float = 5.0,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "alpha": alpha,
                "alpha_beta3_warmup_steps": alpha_beta3_warmup_steps,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step with every parameter that has a gradient."""
        assert closure is None, "no engine gives one"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)

    def _move(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """Update the states and the weights of one parameter."""
        assert parameter.grad is not None
        state, (beta1, beta2, beta3), lr = self.state[parameter], group["betas"], group["lr"]
        if not state:
            state |= {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_slow": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        state["step"] += 1
        taken, warmup = float(state["step"]), group["alpha_beta3_warmup_steps"]

        weights, gradient = local_tensor(parameter), local_tensor(parameter.grad)
        fast = local_tensor(state["exp_avg"]).lerp_(gradient, 1 - beta1)
        slow = local_tensor(state["exp_avg_slow"]).lerp_(
            gradient, 1 - beta3_at(taken, warmup, beta1, beta3)
        )
        squares = local_tensor(state["exp_avg_sq"]).mul_(beta2)
        squares.addcmul_(gradient, gradient, value=1 - beta2)

        root = squares.div(1 - beta2**taken).sqrt_().add_(group["eps"])
        weights.mul_(1 - lr * group["weight_decay"])
        # The two terms are added one after the other, so that their sum needs no further tensor.
        weights.addcdiv_(fast, root, value=-lr / (1 - beta1**taken))
        weights.addcdiv_(slow, root, value=-lr * alpha_at(taken, warmup, group["alpha"]))


def alpha_at(step: float, warmup: int, alpha: float) -> float:
    """Return the weight of the slow average in step 1, 2, ...

    It rises linearly from 0 to `alpha` at step `warmup` (section 3 of the paper).
    """
    return alpha * min(1.0, step / warmup) if warmup else alpha


def beta3_at(step: float, warmup: int, beta1: float, beta3: float) -> float:
    """Return the decay of the slow average in step 1, 2, ...

    It rises from `beta1` to `beta3` at step `warmup`, so that 1 / ln(decay), and with it the
    half-life ln(0.5) / ln(decay), changes linearly. It never exceeds `beta3` (section 3 and
    appendix A.1 of the paper).
    """
    if step >= warmup:
        return beta3
    share = step / warmup
    inverse = (1 - share) * _inverse_log(beta1) + share * _inverse_log(beta3)
    return min(math.exp(1 / inverse), beta3) if inverse else 0.0


def _inverse_log(decay: float) -> float:
    """Return 1 / ln(decay), which is 0 in the limit of an average that remembers nothing."""
    return 1 / math.log(decay) if decay > 0 else 0.0


OPTIMIZER = AdEMAMix
