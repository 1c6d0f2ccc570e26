"""Optimizers written as in their papers: one process, full tensors, and one tensor after the other.

They share no code with recipekit/optim, because they are the reference for it.
"""

import math
from typing import Any

import torch


class Plain(torch.optim.Optimizer):
    """An optimizer that calls `rule(weights, gradient, state, group)` for each full tensor.

    `state["t"]` is the number of the tensor's current step, starting at 1.
    """

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
    """Algorithm 2 of You et al., "Large Batch Optimization for Deep Learning" (arXiv 1904.00962v5),
    with phi(z) = z.
    """

    def rule(
        self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        beta1, beta2 = group["betas"]
        state["m"] = beta1 * state.get("m", torch.zeros_like(x)) + (1 - beta1) * g
        state["v"] = beta2 * state.get("v", torch.zeros_like(x)) + (1 - beta2) * g * g
        m, v = state["m"], state["v"]
        if group.get("bias_correction", True):
            m, v = m / (1 - beta1 ** state["t"]), v / (1 - beta2 ** state["t"])
        r = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * x
        weights_norm, update_norm = (
            math.sqrt(float((x.double() ** 2).sum())),
            math.sqrt(float((r.double() ** 2).sum())),
        )
        x -= group["lr"] * (weights_norm / update_norm if weights_norm and update_norm else 1.0) * r


class Lion(Plain):
    """Algorithm 2 of Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv
    2302.06675).
    """

    def rule(
        self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        beta1, beta2 = group["betas"]
        m = state.get("m", torch.zeros_like(x))
        c = beta1 * m + (1 - beta1) * g
        state["m"] = beta2 * m + (1 - beta2) * g
        x -= group["lr"] * (c.sign() + group["weight_decay"] * x)


class AdEMAMix(Plain):
    """Algorithm 1 of Pagliardini et al., "The AdEMAMix Optimizer: Better, Faster, Older" (arXiv
    2409.03137), with the schedulers of alpha and beta3 as the paper prints them.

    They need a warm-up of at least one step and betas above 0.
    """

    def rule(
        self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        t, warmup = state["t"], group["alpha_beta3_warmup_steps"]
        beta1, beta2, beta3 = group["betas"]
        alpha = min(t * group["alpha"] / warmup, group["alpha"])
        first, last = math.log(beta1), math.log(beta3)
        decay = math.exp(first * last / ((1 - t / warmup) * last + t / warmup * first))
        decay = min(decay, beta3)
        state["m1"] = beta1 * state.get("m1", torch.zeros_like(x)) + (1 - beta1) * g
        state["m2"] = decay * state.get("m2", torch.zeros_like(x)) + (1 - decay) * g
        state["v"] = beta2 * state.get("v", torch.zeros_like(x)) + (1 - beta2) * g * g
        m1, v = state["m1"] / (1 - beta1**t), state["v"] / (1 - beta2**t)
        u = (m1 + alpha * state["m2"]) / (v.sqrt() + group["eps"])
        x -= group["lr"] * (u + group["weight_decay"] * x)


class Adafactor(Plain):
    """Algorithm 4 of Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory
    Cost" (arXiv 1804.04235), with the changes in torch.optim.Adafactor.

    torch uses means instead of sums. Its lr replaces the paper's constant 0.01 and also multiplies
    the weight decay. eps[0] is a lower bound for the mean and for the root.
    """

    def rule(
        self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        t, lr, (eps1, eps2) = state["t"], group["lr"], group.get("eps", (None, 1e-3))
        eps1 = torch.finfo(x.dtype).eps if eps1 is None else eps1
        beta2 = 1 - t ** group.get("beta2_decay", -0.8)
        alpha = max(eps2, math.sqrt(float((x.double() ** 2).mean()))) * min(lr, 1 / math.sqrt(t))
        x -= lr * group["weight_decay"] * x
        means = (
            {"v": g * g}
            if x.dim() < 2
            else {"r": (g * g).mean(-1, keepdim=True), "c": (g * g).mean(-2, keepdim=True)}
        )
        for name, mean in means.items():
            state[name] = beta2 * state.get(name, torch.zeros_like(mean)) + (1 - beta2) * mean
        v = (
            state["v"]
            if x.dim() < 2
            else state["r"] * state["c"] / state["r"].mean(-2, keepdim=True).clamp(min=eps1)
        )
        u = g / v.sqrt().clamp(min=eps1)
        x -= alpha / max(1.0, math.sqrt(float((u.double() ** 2).mean())) / group.get("d", 1.0)) * u


class Muon(Plain):
    """Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), in fp32.

    Averages are computed as in torch.optim.Muon. A group's `matrix` flag is True if its parameters
    are matrices; the other groups use AdamW. `adjust` chooses between Jordan's learning rates and
    the rates of Liu et al. (arXiv 2502.16982).
    """

    def rule(
        self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
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
        x -= (
            group["lr"]
            * (
                0.2 * math.sqrt(max(rows, columns))
                if group["adjust"]
                else math.sqrt(max(1, rows / columns))
            )
            * u
        )


class OneBitAdam:
    """Algorithm 1 of Tang et al., "1-bit Adam" (arXiv 2102.02888), with all workers in one process
    and AdamW up to `freeze_step`.

    `step` takes the gradients of each worker. The second compression covers the part that each
    worker serves: all tensors are concatenated, and padded so that each worker's signs fill whole
    bytes. Elements whose v is zero at the freeze are excluded.

    A flipped sign moves a weight by as much as a step does. Sums and products are therefore rounded
    here exactly as torch's optimizers round them.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        workers: int,
        freeze_step: int,
        betas: tuple[float, float],
        eps: float,
    ):
        self.groups, self.workers, self.freeze_step, self.betas, self.eps = (
            groups,
            workers,
            freeze_step,
            betas,
            eps,
        )
        self.tensors = [(weights, group) for group in groups for weights in group["params"]]
        sizes = [weights.numel() for weights, _ in self.tensors]
        part = -(-sum(sizes) // (8 * workers)) * 8
        self.whose = torch.arange(sum(sizes)) // part  # the worker that serves each element
        # the tensor of each element
        self.which = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        self.m, self.v, self.t = torch.zeros(sum(sizes)), torch.zeros(sum(sizes)), 0
        self.worker_errors, self.server_error = (
            [torch.zeros(sum(sizes)) for _ in range(workers)],
            torch.zeros(sum(sizes)),
        )

    def signs(self, z: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        """Return each element's sign times the root mean square of the elements with the same
        number in `of`.
        """
        live = self.v > 0
        squares, counts = (
            torch.zeros(int(of.max()) + 1, dtype=torch.float64).index_add_(
                0, of[live], values[live]
            )
            for values in (z.double() ** 2, torch.ones_like(z, dtype=torch.float64))
        )
        roots = (squares / counts.clamp(min=1)).sqrt().float()[of]
        return torch.where(live, torch.where(z < 0, -roots, roots), 0.0)

    def freeze(self) -> None:
        """Remove the bias of v and raise its small values, although the paper does not raise them.

        No positive v may be less than a hundredth of the mean of the positive values in its tensor.
        """
        self.v /= 1 - self.betas[1] ** self.freeze_step
        for own in self.v.split([weights.numel() for weights, _ in self.tensors]):
            least = 0.01 * own.sum() / max(1, int((own > 0).sum()))
            own.copy_(torch.where(own > 0, own.clamp(min=least), 0.0))

    @torch.no_grad()
    def step(self, gradients: list[list[torch.Tensor]], most: float = 0.0) -> float:
        """Take a step; before the freeze, gradients are clipped to the norm `most`.

        Return the gradient's norm before the freeze, and the momentum's norm after it.
        """
        self.t += 1
        (beta1, beta2), own = (
            self.betas,
            [torch.cat([value.flatten() for value in each]) for each in gradients],
        )
        if self.t <= self.freeze_step:
            g = torch.stack(own).mean(0)
            norm = math.sqrt(float((g.double() ** 2).sum()))
            if most and norm > most:
                g = g * (most / norm)
            self.m = beta1 * self.m + (1 - beta1) * g
            self.v = beta2 * self.v + (1 - beta2) * g * g
        else:
            if self.t == self.freeze_step + 1:
                self.freeze()
            sent = []
            for number, g in enumerate(own):
                z = self.worker_errors[number].add(self.m, alpha=beta1).add(g, alpha=1 - beta1)
                sent.append(self.signs(z := torch.where(self.v > 0, z, 0.0), self.which))
                self.worker_errors[number] = z - sent[-1]
            z = self.server_error + sum(sent) / self.workers
            self.m = self.signs(z, self.which * self.workers + self.whose)
            self.server_error = z - self.m
            norm = math.sqrt(float((self.m.double() ** 2).sum()))
        v = self.v / (1 - beta2**self.t) if self.t <= self.freeze_step else self.v
        u, at = self.m / (v.sqrt() + self.eps), 0
        for weights, group in self.tensors:
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            weights.add_(
                u[at : at + weights.numel()].view_as(weights),
                alpha=-group["lr"] / (1 - beta1**self.t),
            )
            at += weights.numel()
        return norm
