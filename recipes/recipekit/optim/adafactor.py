"""Adafactor, whose factors are the rows and columns of whole tensors, however those are divided
over ranks.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..spec.optimizer_specs import AT_ONCE, state_sizes
from .borders import Borders, Part, local, square_sum


class Adafactor(torch.optim.Optimizer):
    """Updates weights as torch.optim.Adafactor (2.13) does: Shazeer and Stern, "Adafactor: Adaptive
    Learning Rates with Sublinear Memory Cost" (arXiv 1804.04235), Algorithm 4, with torch's lr and
    eps.

    Of each tensor x of n elements with gradient g, at its step t = 1, 2, ..., where eps = (eps1,
    eps2), eps1 None stands for that of fp32, and rms(z) = |z| / sqrt(n):

        b = t^beta2_decay        a = max(eps2, rms(x)) min(lr, 1 / sqrt(t))
        x = x - lr weight_decay x
        R = (1 - b) R + b mean(g^2, dim=-1)        C = (1 - b) C + b mean(g^2, dim=-2)
        V = R C / max(mean(R), eps1)
        u = g / max(sqrt(V), eps1)        x = x - a u / max(1, rms(u) / d)

    A tensor of less than two dimensions keeps V = (1 - b) V + b g^2 itself; one of more has an R, a
    C and a mean of R for each index of the others. Each rank keeps R and C of every tensor of which
    it has a part, of whole rows and columns, but for what tensor parallelism divides. Sums are
    added up in fp64: two all-reduces a step and group over the ranks that `borders` names, and two
    over the tensor ranks for what those divide. Updates are computed twice, not kept: a step takes
    AT_ONCE elements at a time.

    The states of a parameter are flat: `row_var` and `col_var` of its tensors one after the other,
    `variance` of its parts of the others.
    """

    def __init__(
        self,
        params: Any,
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
        self.borders = Borders()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes a step with every parameter that has a gradient (a collective)."""
        assert closure is None, "no engine gives one"
        for group in self.param_groups:
            held = [
                own
                for parameter in group["params"]
                if parameter.grad is not None
                for own in self._held(parameter)
            ]
            if held:
                self._update(group, held)

    def new_states(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Makes the states of a parameter: zeros, in fp32."""
        sizes = Counter[str]()
        for part in self.borders.of(parameter):
            sizes.update(_sizes(parameter, part))
        flat = local(parameter)
        made = {name: flat.new_zeros(size) for name, size in sizes.items()}
        if "variance" in made and isinstance(parameter, DTensor):
            made["variance"] = torch.zeros_like(parameter)
        return {"step": torch.tensor(0.0)} | made

    def _held(self, parameter: torch.Tensor) -> Iterator["Held"]:
        """Counts a step of a parameter; yields what this rank has of each of its tensors."""
        state = self.state[parameter]
        if not state:
            state |= self.new_states(parameter)
        state["step"] += 1
        assert parameter.grad is not None
        weights, gradient = local(parameter).view(-1), local(parameter.grad).reshape(-1)
        at = Counter[str]()
        for part in self.borders.of(parameter):
            own = {}
            for name, size in _sizes(parameter, part).items():
                own[name] = local(state[name]).view(-1)[at[name] : at[name] + size]
                at[name] += size
            yield Held(
                part,
                float(state["step"]),
                weights[part.start : part.stop],
                gradient[part.start : part.stop],
                own,
            )

    def _update(self, group: dict[str, Any], held: list["Held"]) -> None:
        self._move(group["beta2_decay"], held)
        eps1, eps2 = group["eps"]
        eps1 = torch.finfo(torch.float32).eps if eps1 is None else eps1
        # (tensors, 2) fp64
        squares = torch.stack(
            [torch.stack([square_sum(own.weights), own.update_squares(eps1)]) for own in held]
        )
        cut = [
            slice(number, number + 1) for number, own in enumerate(held) if own.part.cut is not None
        ]
        # (tensors, 1)
        numels = torch.tensor([[prod(own.part.sizes)] for own in held], device=squares.device)
        weights_rms, rms = (self.borders.add_up(squares, cut) / numels).sqrt().unbind(1)
        steps = torch.tensor([own.step for own in held], dtype=torch.float64, device=squares.device)
        rates = (
            weights_rms.clamp(min=eps2)
            * steps.rsqrt().clamp(max=group["lr"])
            / (rms / group["d"]).clamp(min=1.0)
        )
        for own, rate in zip(held, rates.float(), strict=True):
            own.weights.mul_(1 - group["lr"] * group["weight_decay"])
            for place, update in own.updates(eps1):
                own.weights[place].add_(update.mul_(rate), alpha=1.0 if group["maximize"] else -1.0)

    def _move(self, beta2_decay: float, held: list["Held"]) -> None:
        """Moves the factors towards the means of this step's squares, and the variances towards the
        squares (a collective).
        """
        lines, cut, at = [], [], 0
        for own in held:
            for dim, line in zip((-1, -2), own.line_sums(), strict=False):
                # each tensor rank has a part of every line
                if own.part.cut == len(own.part.shape) + dim:
                    cut.append(slice(at, at + line.numel()))
                lines.append(line)
                at += line.numel()
        sums = iter(
            self.borders.add_up(torch.cat(lines), cut).split([line.numel() for line in lines])
            if lines
            else ()
        )
        for own in held:
            if own.factored:
                own.move_factors(own.step**beta2_decay, next(sums), next(sums))
            elif own.states:
                own.states["variance"].lerp_(own.gradient.square(), own.step**beta2_decay)


@dataclass(frozen=True)
class Held:
    """Is what a rank has of a tensor in a step: the elements of `part`, flat, and their states.

    The last two dimensions make matrices.
    """

    part: Part
    step: float
    weights: torch.Tensor
    gradient: torch.Tensor
    states: dict[str, torch.Tensor]  # none where the part has no element

    @property
    def factored(self) -> bool:
        return len(self.part.shape) > 1

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Returns (matrices, rows, columns) of the tensor."""
        *others, rows, columns = self.part.shape
        return prod(others), rows, columns

    def line_sums(self) -> list[torch.Tensor]:
        """Returns the sums of the squares of this part in every row (matrices x rows,) and column
        (matrices x columns,), fp64; [] of a vector.
        """
        if not self.factored:
            return []
        matrices, rows, columns = self.matrices
        of_rows = self.gradient.new_zeros(matrices, rows, dtype=torch.float64)
        of_columns = self.gradient.new_zeros(matrices, columns, dtype=torch.float64)
        for place, box in self._boxes():
            squares = self.gradient[place].double().square_().view(_size(box))
            of_rows[box[0], box[1]] += squares.sum(-1)
            of_columns[box[0], box[2]] += squares.sum(-2)
        return [of_rows.view(-1), of_columns.view(-1)]

    def move_factors(self, weight: float, of_rows: torch.Tensor, of_columns: torch.Tensor) -> None:
        """Takes the sums of the whole tensor."""
        if self.states:
            *_, rows, columns = self.part.sizes
            self.states["row_var"].lerp_((of_rows / columns).float(), weight)
            self.states["col_var"].lerp_((of_columns / rows).float(), weight)

    def update_squares(self, eps1: float) -> torch.Tensor:
        """Returns the sum of the squares of this part's update before it is clipped, () fp64."""
        total = torch.zeros((), dtype=torch.float64, device=self.weights.device)
        for _, update in self.updates(eps1):
            total += square_sum(update)
        return total

    def updates(self, eps1: float) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields the update before it is clipped, piece by piece: (elements of this part, their
        update).
        """
        if not self.states:
            return
        if not self.factored:
            for start in range(0, len(self.weights), AT_ONCE):
                place = slice(start, start + AT_ONCE)
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
        # both have the same mean
        whole = of_columns if self.part.cut == len(self.part.shape) - 2 else of_rows
        means = whole.double().mean(-1).float().clamp_(min=eps1)  # (matrices,)
        for place, (matrix, row, column) in self._boxes():
            variances = of_rows[matrix, row, None] * of_columns[matrix, None, column]
            variances.div_(means[matrix, None, None]).clamp_(min=eps1 * eps1)
            yield place, variances.rsqrt_().view(-1).mul_(self.gradient[place])

    def _boxes(self) -> Iterator[tuple[slice, tuple[slice, ...]]]:
        """Yields boxes that make this part: (its elements, their matrices, rows and columns)."""
        at = 0
        for box in boxes(self.matrices, self.part.first, self.part.first + len(self.weights)):
            numel = prod(_size(box))
            yield slice(at, at + numel), box
            at += numel


def boxes(
    shape: tuple[int, ...], start: int, stop: int, most: int = AT_ONCE
) -> Iterator[tuple[slice, ...]]:
    """Cuts elements start..stop of a row-major tensor into boxes of at most `most` elements, in
    order: a range of each dimension.
    """
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # what lies whole between them
    if start < min(stop, first * inner):
        number = start // inner
        for box in boxes(
            shape[1:], start - number * inner, min(stop - number * inner, inner), most
        ):
            yield slice(number, number + 1), *box
    together = most // inner
    for number in range(first, last, max(1, together)):
        if together:
            yield (
                slice(number, min(number + together, last)),
                *(slice(0, size) for size in shape[1:]),
            )
        else:
            for box in boxes(shape[1:], 0, inner, most):
                yield slice(number, number + 1), *box
    if max(start, last * inner) < stop and last >= first:
        for box in boxes(shape[1:], 0, stop - last * inner, most):
            yield slice(last, last + 1), *box


def _size(box: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(own.stop - own.start for own in box)


def _sizes(parameter: torch.Tensor, part: Part) -> dict[str, int]:
    """Returns the elements of each state that a rank keeps for its part of a tensor; {} for no
    part.

    FSDP2 has every rank keep what one keeps.
    """
    return (
        state_sizes(part.shape, part.stop - part.start)
        if part.start < part.stop or isinstance(parameter, DTensor)
        else {}
    )
