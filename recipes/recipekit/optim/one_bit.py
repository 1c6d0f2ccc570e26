"""1-bit Adam: after a warm-up the ranks send each other the signs of their momenta in place of
gradients.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..spec.optimizer_specs import AT_ONCE, error_sizes
from .borders import square_sum

FLOOR = 0.01  # least second moment of an element that has one, of the mean of its tensor


@dataclass
class Errors:
    """Holds what a rank has still to send, in fp32: `worker` (all elements), of its own momentum;
    `server` (elements / ranks), of the mean of all ranks' of which it has a part.
    """

    worker: torch.Tensor
    server: torch.Tensor


class OneBitAdam(torch.optim.Optimizer):
    """Updates weights by Algorithm 1 of Tang et al., "1-bit Adam: Communication Efficient
    Large-Scale Training with Adam's Convergence Speed" (ICML 2021, arXiv 2102.02888).

    Steps 1 to freeze_step are AdamW's, with gradients that the engine has averaged. From then on v
    is kept as it is, free of its bias: v / (1 - beta2^t) of the last such step; and gradients stay
    those of each rank. Of a weight x with gradient g_i on rank i of n:

        on every rank:
        z_i = beta1 m + (1 - beta1) g_i + e_i        c_i = C[z_i]        e_i = z_i - c_i

        on the rank that has this part:
        z = (c_1 + ... + c_n) / n + e                  m = C[z]            e = z - m

        on every rank:
        x = x - lr ((m / (1 - beta1^t)) / (sqrt(v) + eps) + weight_decay x)

    C[z] is the sign of each element, one bit, times the root mean square of the tensor's, so that
    |C[z]| = |z|; of the second, of the part of a tensor that a rank has. Parts are equal, of all
    tensors in a row. A weight whose v is 0, which no gradient has reached before, as that of a
    position beyond every row, has no scale: it only decays from there on, and counts in no root
    mean square.

    Beyond the paper, v is at least FLOOR of its tensor's mean when it is frozen: an element that
    gradients reach seldom, as the row of a rare token, is sent the tensor's scale in every step,
    and divided by its own small v the weight would run away.

    `ranks`: the group of the data-parallel ranks. The engine asks `compresses` before a step
    whether it is to leave its gradients as they are; then `norm`, () fp64, is that of m afterwards.
    Errors belong to a rank and to a number of ranks.
    """

    def __init__(
        self,
        params: Any,
        freeze_step: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "freeze_step": freeze_step,
            },
        )
        self.ranks: Any = None
        self.errors: Errors | None = None
        self.norm: torch.Tensor | None = None

    @property
    def compresses(self) -> bool:
        """Says whether the next step is one of signs."""
        # all have taken the same steps
        taken = float(next(iter(self.state.values()))["step"]) if self.state else 0.0
        return self.errors is not None or taken >= self.param_groups[0]["freeze_step"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes a step (a collective). A parameter without a gradient has one of zeros."""
        assert closure is None, "no engine gives one"
        compresses = self.compresses
        if compresses and self.errors is None:
            self._freeze()
        if compresses:
            self._exchange()
        for group in self.param_groups:
            for parameter in group["params"]:
                if not compresses:
                    self._average(parameter, group)
                self._move(parameter, group, compresses)

    def _average(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """Updates the moments by a gradient that all ranks have."""
        if not (state := self.state[parameter]):
            state |= {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        state["exp_avg"].lerp_(gradient, 1 - group["betas"][0])
        state["exp_avg_sq"].mul_(group["betas"][1]).addcmul_(
            gradient, gradient, value=1 - group["betas"][1]
        )

    def _move(self, parameter: torch.Tensor, group: dict[str, Any], frozen: bool) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        state["step"] += 1
        taken = float(state["step"])
        root = (
            state["exp_avg_sq"].sqrt()
            if frozen
            else state["exp_avg_sq"].div(1 - beta2**taken).sqrt_()
        )
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(
            torch.div(state["exp_avg"], root.add_(group["eps"]), out=root),
            alpha=-group["lr"] / (1 - beta1**taken),
        )

    def _freeze(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                squares = self.state[parameter]["exp_avg_sq"].div_(
                    1 - group["betas"][1] ** float(self.state[parameter]["step"])
                )
                least = FLOOR * squares.sum() / (squares != 0).sum().clamp(min=1)
                squares.copy_(torch.where(squares != 0, squares.clamp(min=least), 0.0))
        self.errors = self.new_errors()

    def new_errors(self) -> Errors:
        """Makes errors of zeros for the ranks of `ranks`."""
        tensors = [parameter for group in self.param_groups for parameter in group["params"]]
        sizes = error_sizes(
            sum(tensor.numel() for tensor in tensors), dist.get_world_size(self.ranks)
        )
        return Errors(*(torch.zeros(numel, device=tensors[0].device) for numel in sizes))

    def _spans(self) -> list["Span"]:
        found, at = [], 0
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = (
                    self.state[parameter],
                    None if parameter.grad is None else parameter.grad.reshape(-1),
                )
                live = state["exp_avg_sq"].view(-1) != 0
                found.append(
                    Span(
                        at,
                        at + parameter.numel(),
                        state["exp_avg"].view(-1),
                        live,
                        gradient,
                        group["betas"][0],
                    )
                )
                at += parameter.numel()
        return found

    def _exchange(self) -> None:
        """Make the momentum of all ranks from each rank's own (a collective): two exchanges of a
        bit for each element.
        """
        assert self.errors is not None
        worker, server, spans = self.errors.worker, self.errors.server, self._spans()
        for span in spans:
            own = worker[span.start : span.stop].add_(span.moment, alpha=span.beta1)
            if span.gradient is not None:
                own.add_(span.gradient, alpha=1 - span.beta1)
            own.mul_(span.live)

        signs, scales = compress(worker, spans, 0)
        received = torch.empty_like(signs)
        scales_of = scales.new_empty(dist.get_world_size(self.ranks), len(spans))
        dist.all_to_all_single(received, signs, group=self.ranks)
        dist.all_gather(list(scales_of), scales, group=self.ranks)

        first = dist.get_rank(self.ranks) * len(server)
        add_mean(server, spans, first, received, scales_of)
        signs, scales = compress(server, spans, first)
        dist.all_gather(list(received.view(len(scales_of), -1)), signs, group=self.ranks)
        dist.all_gather(list(scales_of), scales, group=self.ranks)
        self.norm = put_momenta(spans, len(server), received, scales_of)


@dataclass(frozen=True)
class Span:
    """Describes a tensor in the row of all: its elements start..stop there, its momentum, which
    elements have a scale (bool), and this rank's gradient, all flat.
    """

    start: int
    stop: int
    moment: torch.Tensor
    live: torch.Tensor
    gradient: torch.Tensor | None
    beta1: float

    def lives(self, start: int, stop: int) -> torch.Tensor:
        """Returns `live` of elements start..stop of the row."""
        return self.live[start - self.start : stop - self.start]


def overlaps(spans: list[Span], start: int, stop: int) -> Iterator[tuple[int, Span, int, int]]:
    """Yields (number, tensor, start, stop) of what of each tensor lies in elements start..stop of
    the row.
    """
    for number, span in enumerate(spans):
        if max(span.start, start) < min(span.stop, stop):
            yield number, span, max(span.start, start), min(span.stop, stop)


def pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Divides a range into ranges of at most AT_ONCE elements."""
    for begin in range(start, stop, AT_ONCE):
        yield begin, min(begin + AT_ONCE, stop)


def compress(
    values: torch.Tensor, spans: list[Span], first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what is sent of `values` (N,), the elements of the row from `first` on: signs (N /
    8,) uint8, and scales (tensors,).

    Subtracts it from them.
    """
    signs, scales = pack(values), values.new_zeros(len(spans))
    for number, span, start, stop in overlaps(spans, first, first + len(values)):
        scales[number] = (
            square_sum(values[start - first : stop - first])
            / span.lives(start, stop).sum().clamp(min=1)
        ).sqrt()
        for begin, end in pieces(start, stop):
            sent = signed(signs, begin - first, end - first, scales[number])
            values[begin - first : end - first].sub_(sent.mul_(span.lives(begin, end)))
    return signs, scales


def add_mean(
    server: torch.Tensor,
    spans: list[Span],
    first: int,
    received: torch.Tensor,
    scales_of: torch.Tensor,
) -> None:
    """Add the mean of all ranks' momenta to `server` (N,), the elements of the row from `first` on.

    `received` (ranks * N / 8,) are each rank's signs of these elements, `scales_of` (ranks,
    tensors) the scales.
    """
    world, part = len(scales_of), len(server)
    for number, span, start, stop in overlaps(spans, first, first + part):
        for begin, end in pieces(start, stop):
            total = server.new_zeros(end - begin)
            for rank in range(world):
                at = rank * part + begin - first
                total += signed(received, at, at + end - begin, scales_of[rank, number])
            server[begin - first : end - first].add_(total.div_(world).mul_(span.lives(begin, end)))


def put_momenta(
    spans: list[Span], part: int, received: torch.Tensor, scales_of: torch.Tensor
) -> torch.Tensor:
    """Set the momenta to the signs of the whole row with the scales of each rank's `part` elements;
    return their norm, () fp64.
    """
    norm = torch.zeros((), dtype=torch.float64, device=received.device)
    for rank in range(len(scales_of)):
        for number, span, start, stop in overlaps(spans, rank * part, (rank + 1) * part):
            for begin, end in pieces(start, stop):
                mean = signed(received, begin, end, scales_of[rank, number])
                mean.mul_(span.lives(begin, end))
                span.moment[begin - span.start : end - span.start] = mean
                norm += square_sum(mean)
    return norm.sqrt_()


@functools.cache
def _powers(device: torch.device) -> torch.Tensor:
    return 2 ** torch.arange(8, dtype=torch.uint8, device=device)


def pack(values: torch.Tensor) -> torch.Tensor:
    """Returns a bit for each of N values, N a multiple of 8, as (N / 8,) uint8: the lowest bit of a
    byte is the first one's; set: not negative.
    """
    found = [
        ((piece >= 0).view(-1, 8) * _powers(values.device)).sum(1, dtype=torch.uint8)
        for piece in values.split(AT_ONCE)
    ]
    return torch.cat(found)


def signed(signs: torch.Tensor, start: int, stop: int, scale: torch.Tensor) -> torch.Tensor:
    """Returns `scale` with the signs of elements start..stop of what `pack` packed, (stop -
    start,).
    """
    whole = (signs[start // 8 : -(-stop // 8)].unsqueeze(1) & _powers(signs.device)).view(-1) != 0
    return torch.where(whole[start % 8 : start % 8 + stop - start], scale, -scale)
