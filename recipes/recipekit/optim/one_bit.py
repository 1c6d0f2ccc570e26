"""1-bit Adam: after a warm-up, ranks exchange the signs of their momenta, not gradients."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..spec.optimizer_specs import CHUNK_NUMEL, error_sizes
from .param_spans import sum_of_squares

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

VARIANCE_FLOOR = 0.01  # lower bound on a nonzero second moment, relative to its tensor's mean


@dataclass
class ErrorFeedback:
    """Compression errors that a rank must still send, in fp32.

    `worker` (all elements) is the error in the rank's own momentum. `server` (elements / ranks) is
    the error in this rank's part of the mean momentum over all ranks.
    """

    worker: torch.Tensor
    server: torch.Tensor


class OneBitAdam(torch.optim.Optimizer):
    """1-bit Adam: Algorithm 1 of Tang et al., "1-bit Adam: Communication Efficient Large-Scale
    Training with Adam's Convergence Speed" (ICML 2021, arXiv 2102.02888).

    Steps 1 to freeze_step are AdamW steps with gradients that the engine has averaged. After these
    steps, v is frozen at its last bias-corrected value, v / (1 - beta2^t), and gradients are no
    longer averaged. For a weight x with gradient g_i on rank i of n:

        on every rank:
        z_i = beta1 m + (1 - beta1) g_i + e_i        c_i = C[z_i]        e_i = z_i - c_i

        on the rank that has this part:
        z = (c_1 + ... + c_n) / n + e                  m = C[z]            e = z - m

        on every rank:
        x = x - lr ((m / (1 - beta1^t)) / (sqrt(v) + eps) + weight_decay x)

    C[z] is the sign of each element, one bit, times its tensor's root mean square. Therefore
    |C[z]| = |z|. In the second C, the root mean square covers only the part of the tensor on that
    rank. The tensors are concatenated, and every rank stores an equal part of the result.

    If v is 0, no gradient has reached the weight so far. An example is the embedding of a position
    beyond the length of every sample. Such a weight has no scale. From then on it only decays, and
    it is excluded from every root mean square.

    Unlike in the paper, v is raised to at least VARIANCE_FLOOR times its tensor's mean when it is
    frozen. Elements that seldom receive gradients, such as a rare token's embedding, receive the
    tensor's scale in every step. Such weights would diverge if they were divided by their own small
    v.

    `ranks` is the group of the data-parallel ranks. If `compresses` is True before a step, the
    engine must not average its gradients. After such a step, `norm`, () fp64, is the norm of m. The
    errors belong to a specific rank and are valid only for the same number of ranks.
    """

    def __init__(
        self,
        params: "ParamsT",
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
        self.ranks: dist.ProcessGroup | None = None
        self.errors: ErrorFeedback | None = None
        self.norm: torch.Tensor | None = None

    @property
    def compresses(self) -> bool:
        """Return True if the next step exchanges signs."""
        # All parameters have taken the same number of steps.
        taken = float(next(iter(self.state.values()))["step"]) if self.state else 0.0
        return self.errors is not None or taken >= self.param_groups[0]["freeze_step"]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step (a collective operation). A missing gradient counts as zeros."""
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
        """Update the moments with a gradient that is equal on all ranks."""
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
                least = VARIANCE_FLOOR * squares.sum() / (squares != 0).sum().clamp(min=1)
                squares.copy_(torch.where(squares != 0, squares.clamp(min=least), 0.0))
        self.errors = self.new_errors()

    def new_errors(self) -> ErrorFeedback:
        """Create error buffers, filled with zeros, for the ranks in `ranks`."""
        tensors = [parameter for group in self.param_groups for parameter in group["params"]]
        sizes = error_sizes(
            sum(tensor.numel() for tensor in tensors), dist.get_world_size(self.ranks)
        )
        return ErrorFeedback(*(torch.zeros(numel, device=tensors[0].device) for numel in sizes))

    def _spans(self) -> list["MomentumSpan"]:
        found, at = [], 0
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = (
                    self.state[parameter],
                    None if parameter.grad is None else parameter.grad.reshape(-1),
                )
                live = state["exp_avg_sq"].view(-1) != 0
                found.append(
                    MomentumSpan(
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
        """Compute the momentum over all ranks from each rank's own momentum (a collective).

        This requires two exchanges of one bit per element.
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
        self.norm = set_momenta(spans, len(server), received, scales_of)


@dataclass(frozen=True)
class MomentumSpan:
    """A tensor in the concatenation of all tensors, where it occupies elements start..stop.

    The momentum, the mask of elements with a scale (bool), and this rank's gradient are flat.
    """

    start: int
    stop: int
    moment: torch.Tensor
    live: torch.Tensor
    gradient: torch.Tensor | None
    beta1: float

    def live_in(self, start: int, stop: int) -> torch.Tensor:
        """Return `live` for elements start..stop of the concatenation."""
        return self.live[start - self.start : stop - self.start]


def overlaps(
    spans: list[MomentumSpan], start: int, stop: int
) -> Iterator[tuple[int, MomentumSpan, int, int]]:
    """Yield (number, tensor, start, stop) for each tensor's overlap with elements start..stop.

    The elements are counted in the concatenation.
    """
    for number, span in enumerate(spans):
        if max(span.start, start) < min(span.stop, stop):
            yield number, span, max(span.start, start), min(span.stop, stop)


def chunk_range(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Split a range into ranges of at most CHUNK_NUMEL elements."""
    for begin in range(start, stop, CHUNK_NUMEL):
        yield begin, min(begin + CHUNK_NUMEL, stop)


def compress(
    values: torch.Tensor, spans: list[MomentumSpan], first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compress `values` (N,) into signs (N / 8,) uint8 and scales (tensors,).

    `values` are the concatenation's elements starting at `first`. The compressed values are
    subtracted from `values` in place.
    """
    signs, scales = pack_signs(values), values.new_zeros(len(spans))
    for number, span, start, stop in overlaps(spans, first, first + len(values)):
        scales[number] = (
            sum_of_squares(values[start - first : stop - first])
            / span.live_in(start, stop).sum().clamp(min=1)
        ).sqrt()
        for begin, end in chunk_range(start, stop):
            sent = unpack_signs(signs, begin - first, end - first, scales[number])
            values[begin - first : end - first].sub_(sent.mul_(span.live_in(begin, end)))
    return signs, scales


def add_mean(
    server: torch.Tensor,
    spans: list[MomentumSpan],
    first: int,
    received: torch.Tensor,
    scales_of: torch.Tensor,
) -> None:
    """Add the mean of all ranks' momenta to `server` (N,), elements of the concatenation.

    The elements start at `first`. `received` (ranks * N / 8,) contains each rank's signs for these
    elements, and `scales_of` (ranks, tensors) contains the ranks' scales.
    """
    world, part = len(scales_of), len(server)
    for number, span, start, stop in overlaps(spans, first, first + part):
        for begin, end in chunk_range(start, stop):
            total = server.new_zeros(end - begin)
            for rank in range(world):
                at = rank * part + begin - first
                total += unpack_signs(received, at, at + end - begin, scales_of[rank, number])
            server[begin - first : end - first].add_(
                total.div_(world).mul_(span.live_in(begin, end))
            )


def set_momenta(
    spans: list[MomentumSpan], part: int, received: torch.Tensor, scales_of: torch.Tensor
) -> torch.Tensor:
    """Set the momenta to the received signs times their scales; return their norm, () fp64.

    The norm covers all momenta. `received` contains the signs of all elements. Each rank has its
    own scales for its `part` elements.
    """
    norm = torch.zeros((), dtype=torch.float64, device=received.device)
    for rank in range(len(scales_of)):
        for number, span, start, stop in overlaps(spans, rank * part, (rank + 1) * part):
            for begin, end in chunk_range(start, stop):
                mean = unpack_signs(received, begin, end, scales_of[rank, number])
                mean.mul_(span.live_in(begin, end))
                span.moment[begin - span.start : end - span.start] = mean
                norm += sum_of_squares(mean)
    return norm.sqrt_()


@functools.cache
def _powers(device: torch.device) -> torch.Tensor:
    return 2 ** torch.arange(8, dtype=torch.uint8, device=device)


def pack_signs(values: torch.Tensor) -> torch.Tensor:
    """Pack the signs of N values into bits, (N / 8,) uint8; N must be a multiple of 8.

    A byte's lowest bit belongs to its first value. A set bit means not negative.
    """
    found = [
        ((piece >= 0).view(-1, 8) * _powers(values.device)).sum(1, dtype=torch.uint8)
        for piece in values.split(CHUNK_NUMEL)
    ]
    return torch.cat(found)


def unpack_signs(signs: torch.Tensor, start: int, stop: int, scale: torch.Tensor) -> torch.Tensor:
    """Return `scale` with the signs of elements start..stop from `pack_signs`, (stop - start,)."""
    whole = (signs[start // 8 : -(-stop // 8)].unsqueeze(1) & _powers(signs.device)).view(-1) != 0
    return torch.where(whole[start % 8 : start % 8 + stop - start], scale, -scale)


OPTIMIZER = OneBitAdam
