"""States optimizers as their papers do: one process, whole tensors, one after the other. Nothing is shared with recipekit/optim, which is judged by this."""

import math
from typing import Any

import torch


class Plain(torch.optim.Optimizer):
    """Calls `rule(weights, gradient, state, group)` for each whole tensor; `state["t"]` counts its steps from 1."""

    rule: Any

    def __init__(self, groups: list[dict[str, Any]], **numbers: Any):
        super().__init__(groups, numbers)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    state = self.state[weights]
                    state["t"] = state.get("t", 0) + 1
                    self.rule(weights, weights.grad, state, group)


class Lamb(Plain):
    """Algorithm 2 of You et al., "Large Batch Optimization for Deep Learning" (arXiv 1904.00962v5), with phi(z) = z."""

    def rule(self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        state["m"] = beta1 * state.get("m", torch.zeros_like(x)) + (1 - beta1) * g
        state["v"] = beta2 * state.get("v", torch.zeros_like(x)) + (1 - beta2) * g * g
        m, v = state["m"], state["v"]
        if group.get("bias_correction", True):
            m, v = m / (1 - beta1 ** state["t"]), v / (1 - beta2 ** state["t"])
        r = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * x
        weights_norm, update_norm = math.sqrt(float((x.double() ** 2).sum())), math.sqrt(float((r.double() ** 2).sum()))
        x -= group["lr"] * (weights_norm / update_norm if weights_norm and update_norm else 1.0) * r


class Lion(Plain):
    """Algorithm 2 of Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675)."""

    def rule(self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        m = state.get("m", torch.zeros_like(x))
        c = beta1 * m + (1 - beta1) * g
        state["m"] = beta2 * m + (1 - beta2) * g
        x -= group["lr"] * (c.sign() + group["weight_decay"] * x)


class Adafactor(Plain):
    """Algorithm 4 of Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (arXiv 1804.04235), with what
    torch.optim.Adafactor states in its place: means for sums, lr for the constant 0.01 and as the factor of the decay, eps[0] as a
    floor of the mean and of the root.
    """

    def rule(self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        t, lr, (eps1, eps2) = state["t"], group["lr"], group.get("eps", (None, 1e-3))
        eps1 = torch.finfo(x.dtype).eps if eps1 is None else eps1
        beta2 = 1 - t ** group.get("beta2_decay", -0.8)
        alpha = max(eps2, math.sqrt(float((x.double() ** 2).mean()))) * min(lr, 1 / math.sqrt(t))
        x -= lr * group["weight_decay"] * x
        means = {"v": g * g} if x.dim() < 2 else {"r": (g * g).mean(-1, keepdim=True), "c": (g * g).mean(-2, keepdim=True)}
        for name, mean in means.items():
            state[name] = beta2 * state.get(name, torch.zeros_like(mean)) + (1 - beta2) * mean
        v = state["v"] if x.dim() < 2 else state["r"] * state["c"] / state["r"].mean(-2, keepdim=True).clamp(min=eps1)
        u = g / v.sqrt().clamp(min=eps1)
        x -= alpha / max(1.0, math.sqrt(float((u.double() ** 2).mean())) / group.get("d", 1.0)) * u


class Muon(Plain):
    """Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), as torch.optim.Muon averages, in fp32; AdamW for what is no matrix.

    A group says in `matrix` what it holds, and in `adjust` whether rates are Jordan's or those of Liu et al. (arXiv 2502.16982).
    """

    def rule(self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        x *= 1 - group["lr"] * group["weight_decay"]
        if not group["matrix"]:
            beta1, beta2 = group["betas"]
            state["m"] = beta1 * state.get("m", torch.zeros_like(x)) + (1 - beta1) * g
            state["v"] = beta2 * state.get("v", torch.zeros_like(x)) + (1 - beta2) * g * g
            m, v = state["m"] / (1 - beta1 ** state["t"]), state["v"] / (1 - beta2 ** state["t"])
            x -= group["lr"] * m / (v.sqrt() + group["eps"])
            return
        mu, (rows, columns) = group["momentum"], x.shape
        state["m"] = mu * state.get("m", torch.zeros_like(x)) + (1 - mu) * g
        u = mu * state["m"] + (1 - mu) * g
        u = u / max(float(u.norm()), 1e-7)
        for _ in range(5):
            u = 3.4445 * u - 4.7750 * u @ u.T @ u + 2.0315 * u @ u.T @ u @ u.T @ u
        x -= group["lr"] * (0.2 * math.sqrt(max(rows, columns)) if group["adjust"] else math.sqrt(max(1, rows / columns))) * u
