"""Adafactor with factors over full tensors' rows and columns, for any sharding over ranks."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from ..spec.optimizer_specs import CHUNK_NUMEL, state_sizes
from .param_spans import ParamSpans, TensorSpan, local_tensor, sum_of_squares

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT


class Adafactor(torch.optim.Optimizer):
    """Adafactor as in torch.optim.Adafactor (2.13): Shazeer and Stern, "Adafactor: Adaptive
    Learning Rates with Sublinear Memory Cost" (arXiv 1804.04235), Algorithm 4, with torch's lr and
    eps.

    For each tensor x of n elements with gradient g, at its step t = 1, 2, ..., with eps = (eps1,
    eps2) and rms(z) = |z| / sqrt(n):

        b = t^beta2_decay        a = max(eps2, rms(x)) min(lr, 1 / sqrt(t))
        x = x - lr weight_decay x
        R = (1 - b) R + b mean(g^2, dim=-1)        C = (1 - b) C + b mean(g^2, dim=-2)
        V = R C / max(mean(R), eps1)
        u = g / max(sqrt(V), eps1)        x = x - a u / max(1, rms(u) / d)

    If eps1 is None, it is fp32's machine epsilon. A tensor with fewer than two dimensions has no
    factors; its state is V = (1 - b) V + b g^2. A tensor with more than two dimensions has an R, a
    C and a mean of R for each index of the leading dimensions.

    A rank that stores a shard of a tensor also stores the tensor's R and C. They cover full rows
    and columns, except along a dimension that tensor parallelism splits. Sums are accumulated in
    fp64. Each step of a group requires two all-reduces over the ranks in `borders`. For tensors
    that tensor parallelism splits, it requires two more over the tensor-parallel ranks. Updates are
    not stored. Instead they are computed twice, CHUNK_NUMEL elements at a time.

    A parameter's states are flat. `row_var` and `col_var` concatenate the factors of its tensors,
    and `variance` concatenates the shards of the tensors without factors.
    """

    def __init__(
        self,
        params: "ParamsT",
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
    ):
        assert not foreach, "the rules refuse it"
        numbers = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
        }
        super().__init__(params, numbers | {"maximize": maximize})
        self.borders = ParamSpans()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step with every parameter that has a gradient (a collective operation)."""
        assert closure is None, "no engine gives one"
        for group in self.param_groups:
            held = [
                own
                for parameter in group["params"]
                if parameter.grad is not None
                for own in self._local_shards(parameter)
            ]
            if held:
                self._update(group, held)

    def new_states(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Create a parameter's states: zeros, in fp32."""
        sizes = Counter[str]()
        for part in self.borders.spans_of(parameter):
            sizes.update(_local_state_sizes(parameter, part))
        flat = local_tensor(parameter)
        made = {name: flat.new_zeros(size) for name, size in sizes.items()}
        if "variance" in made and isinstance(parameter, DTensor):
            made["variance"] = torch.zeros_like(parameter)
        return {"step": torch.tensor(0.0)} | made

    def _local_shards(self, parameter: torch.Tensor) -> Iterator["AdafactorShard"]:
        """Increment a parameter's step count, and yield this rank's shards of its tensors."""
        state = self.state[parameter]
        if not state:
            state |= self.new_states(parameter)
        state["step"] += 1
        assert parameter.grad is not None
        weights, gradient = (
            local_tensor(parameter).view(-1),
            local_tensor(parameter.grad).reshape(-1),
        )
        at = Counter[str]()
        for part in self.borders.spans_of(parameter):
            own = {}
            for name, size in _local_state_sizes(parameter, part).items():
                own[name] = local_tensor(state[name]).view(-1)[at[name] : at[name] + size]
                at[name] += size
            yield AdafactorShard(
                part,
                float(state["step"]),
                weights[part.start : part.stop],
                gradient[part.start : part.stop],
                own,
            )

    def _update(self, group: dict[str, Any], shards: list["AdafactorShard"]) -> None:
        self._update_factors(group["beta2_decay"], shards)
        eps1, eps2 = group["eps"]
        eps1 = torch.finfo(torch.float32).eps if eps1 is None else eps1
        # (tensors, 2) fp64
        squares = torch.stack(
            [torch.stack([sum_of_squares(own.weights), own.update_squares(eps1)]) for own in shards]
        )
        cut = [
            slice(number, number + 1)
            for number, own in enumerate(shards)
            if own.span.split_dim is not None
        ]
        # (tensors, 1)
        numels = torch.tensor(
            [[prod(own.span.full_shape)] for own in shards], device=squares.device
        )
        weights_rms, rms = (self.borders.all_reduce_sums(squares, cut) / numels).sqrt().unbind(1)
        steps = torch.tensor(
            [own.step for own in shards], dtype=torch.float64, device=squares.device
        )
        rates = (
            weights_rms.clamp(min=eps2)
            * steps.rsqrt().clamp(max=group["lr"])
            / (rms / group["d"]).clamp(min=1.0)
        )
        for own, rate in zip(shards, rates.float(), strict=True):
            own.weights.mul_(1 - group["lr"] * group["weight_decay"])
            for place, update in own.updates(eps1):
                own.weights[place].add_(update.mul_(rate), alpha=1.0 if group["maximize"] else -1.0)

    def _update_factors(self, beta2_decay: float, shards: list["AdafactorShard"]) -> None:
        """Update the factors and variances with this step's squares (a collective operation).

        The factors move towards the means of the squares, and the variances towards the squares.
        """
        lines, cut, at = [], [], 0
        for own in shards:
            for dim, line in zip((-1, -2), own.line_sums(), strict=False):
                # Each tensor-parallel rank stores a shard of every row or column.
                if own.span.split_dim == len(own.span.shape) + dim:
                    cut.append(slice(at, at + line.numel()))
                lines.append(line)
                at += line.numel()
        sums = iter(
            self.borders.all_reduce_sums(torch.cat(lines), cut).split(
                [line.numel() for line in lines]
            )
            if lines
            else ()
        )
        for own in shards:
            if own.factored:
                own.update_factors(own.step**beta2_decay, next(sums), next(sums))
            elif own.states:
                own.states["variance"].lerp_(own.gradient.square(), own.step**beta2_decay)


@dataclass(frozen=True)
class AdafactorShard:
    """A rank's shard of a tensor during a step: the flat elements of `span` and their states.

    The last two dimensions of the tensor form matrices.
    """

    span: TensorSpan
    step: float
    weights: torch.Tensor
    gradient: torch.Tensor
    states: dict[str, torch.Tensor]  # {} if the shard is empty

    @property
    def factored(self) -> bool:
        return len(self.span.shape) > 1

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Return (matrices, rows, columns) of the tensor."""
        *others, rows, columns = self.span.shape
        return prod(others), rows, columns

    def line_sums(self) -> list[torch.Tensor]:
        """Return the fp64 sums of squares in this shard, for every row and for every column.

        The sums are (matrices x rows,) and (matrices x columns,). Return [] for a vector.
        """
        if not self.factored:
            return []
        matrices, rows, columns = self.matrices
        of_rows = self.gradient.new_zeros(matrices, rows, dtype=torch.float64)
        of_columns = self.gradient.new_zeros(matrices, columns, dtype=torch.float64)
        for place, box in self._boxes():
            squares = self.gradient[place].double().square_().view(_box_shape(box))
            of_rows[box[0], box[1]] += squares.sum(-1)
            of_columns[box[0], box[2]] += squares.sum(-2)
        return [of_rows.view(-1), of_columns.view(-1)]

    def update_factors(
        self, weight: float, of_rows: torch.Tensor, of_columns: torch.Tensor
    ) -> None:
        """Update the factors with the sums over the full tensor."""
        if self.states:
            *_, rows, columns = self.span.full_shape
            self.states["row_var"].lerp_((of_rows / columns).float(), weight)
            self.states["col_var"].lerp_((of_columns / rows).float(), weight)

    def update_squares(self, eps1: float) -> torch.Tensor:
        """Return the sum of squares of this shard's update before clipping, () fp64."""
        total = torch.zeros((), dtype=torch.float64, device=self.weights.device)
        for _, update in self.updates(eps1):
            total += sum_of_squares(update)
        return total

    def updates(self, eps1: float) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the update before clipping in chunks: (elements of this shard, their update)."""
        if not self.states:
            return
        if not self.factored:
            for start in range(0, len(self.weights), CHUNK_NUMEL):
                place = slice(start, start + CHUNK_NUMEL)
                yield (
                    place,
                    self.states["variance"][place]
                    .clamp(min=eps1 * eps1)
                    .rsqrt_()
                    .mul_(self.gradient[place]),
                )
            return
        matrices, rows, columns = self.matrices
        of_rows, of_columns = (
            self.states["row_var"].view(matrices, rows),
            self.states["col_var"].view(matrices, columns),
        )
        # Both have the same mean. Use the one that is not split over tensor-parallel ranks.
        whole = of_columns if self.span.split_dim == len(self.span.shape) - 2 else of_rows
        means = whole.double().mean(-1).float().clamp_(min=eps1)  # (matrices,)
        for place, (matrix, row, column) in self._boxes():
            variances = of_rows[matrix, row, None] * of_columns[matrix, None, column]
            variances.div_(means[matrix, None, None]).clamp_(min=eps1 * eps1)
            yield place, variances.rsqrt_().view(-1).mul_(self.gradient[place])

    def _boxes(self) -> Iterator[tuple[slice, tuple[slice, ...]]]:
        """Yield boxes that make up this shard: (its elements, their matrices, rows and columns)."""
        at = 0
        for box in split_into_boxes(
            self.matrices, self.span.offset, self.span.offset + len(self.weights)
        ):
            numel = prod(_box_shape(box))
            yield slice(at, at + numel), box
            at += numel


def split_into_boxes(
    shape: tuple[int, ...], start: int, stop: int, max_elements: int = CHUNK_NUMEL
) -> Iterator[tuple[slice, ...]]:
    """Split elements start..stop of a row-major tensor into boxes, in order.

    A box consists of a range for each dimension. It contains at most `max_elements` elements.
    """
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # full slices between start and stop
    if start < min(stop, first * inner):
        number = start // inner
        for box in split_into_boxes(
            shape[1:], start - number * inner, min(stop - number * inner, inner), max_elements
        ):
            yield slice(number, number + 1), *box
    together = max_elements // inner
    for number in range(first, last, max(1, together)):
        if together:
            yield (
                slice(number, min(number + together, last)),
                *(slice(0, size) for size in shape[1:]),
            )
        else:
            for box in split_into_boxes(shape[1:], 0, inner, max_elements):
                yield slice(number, number + 1), *box
    if max(start, last * inner) < stop and last >= first:
        for box in split_into_boxes(shape[1:], 0, stop - last * inner, max_elements):
            yield slice(last, last + 1), *box


def _box_shape(box: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(own.stop - own.start for own in box)


def _local_state_sizes(parameter: torch.Tensor, part: TensorSpan) -> dict[str, int]:
    """Return the number of elements in each state that a rank stores for its shard of a tensor.

    Return {} for an empty shard. FSDP2 is an exception, because even a rank without elements stores
    the states there.
    """
    return (
        state_sizes(part.shape, part.stop - part.start)
        if part.start < part.stop or isinstance(parameter, DTensor)
        else {}
    )


OPTIMIZER = Adafactor
