"""Which optimizer group a parameter is in: whether it decays, at which learning rate, and whether
it is a matrix to its optimizer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..spec.refusal import Problem, Refusal
from ..spec.task_specs import Plans


@dataclass(frozen=True, order=True)
class Group:
    """Describes parameters that an optimizer treats alike.

    `matrix`: the optimizer has a rule of its own for matrices (`matrices` of its row in
    spec/optimizer_specs.py), and these are such. `lr_scale` is what the learning rate of a step is
    multiplied with.
    """

    matrix: bool = False
    decays: bool = True
    lr_scale: float = 1.0

    @property
    def name(self) -> str:
        """Names the group in optimizers and checkpoints."""
        kind = (
            ("whole matrices" if self.decays else "whole matrices without decay")
            if self.matrix
            else "matrices"
            if self.decays
            else "vectors"
        )
        return kind if self.lr_scale == 1 else f"{kind}, lr x {self.lr_scale}"

    @property
    def entries(self) -> dict[str, Any]:
        """Lists what an optimizer's group has of it besides its numbers; of the first two groups
        the name only, as it always was.
        """
        return (
            ({"lr_scale": self.lr_scale} if self.lr_scale != 1 else {})
            | ({"matrix": True} if self.matrix else {})
            | {"name": self.name}
        )


# numbers 0 and 1 in every checkpoint, "matrices" and "vectors"
FIRST = (Group(), Group(decays=False))


def numbered(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Puts groups in the order of their numbers, which depends on nothing but them."""
    return (*FIRST, *sorted(set(groups) - set(FIRST)))


def layer_scale(place: str, num_layers: int, layer_decay: float) -> float:
    """Returns the factor of the learning rate at a place of a blueprint: 1 behind the layers,
    layer_decay in the last of them, and so on to what is before them.

    As Bao et al. fine-tune ("BEiT", arXiv 2106.08254). What is at no place of a pipeline has the
    whole rate.
    """
    if place.isdecimal():
        return layer_decay ** (num_layers - int(place))
    return layer_decay ** (num_layers + 1) if place in ("first", "ends") else 1.0


def group_of(
    name: str, dims: int, plans: Plans, matrix: bool = False, of_layer: float = 1.0
) -> Group:
    """Returns the group of a trained parameter.

    Matrices decay; vectors (norms, biases) and what `no_decay` names do not.

    `of_layer`: the factor of its layer's learning rate, besides the one that `lr_scale` names.
    """
    scale = next(
        (scale for pattern, scale in plans.lr_scale.items() if _named(name, [pattern])), 1.0
    )
    return Group(matrix, dims >= 2 and not _named(name, plans.no_decay), float(scale) * of_layer)


def check_named(found: Mapping[str, Group], plans: Plans, by_recipe: tuple[str, ...] = ()) -> None:
    """Raises `Refusal` for names in `lr_scale` that none of the trained parameters has, for names
    `by_recipe` of matrices that none of those is, and for an optimizer with a rule of its own for
    matrices that finds none.
    """
    near = (
        f"write a name, or a pattern with *, as in {next(iter(found), 'model.embed_tokens.weight')}"
    )
    problems = [
        Problem(f"lr_scale of {pattern!r}", "does not match any trained parameter", near)
        for pattern in plans.lr_scale
        if not any(_named(name, [pattern]) for name in found)
    ]
    problems += [
        Problem(
            f"matrices = {pattern!r}",
            "must match a trained weight of two dimensions that is not an embedding, a head or a"
            " convolution",
            "leave it out",
        )
        for pattern in by_recipe
        if plans.matrices
        and not any(group.matrix and _named(name, [pattern]) for name, group in found.items())
    ]
    if plans.matrices and not by_recipe and not any(group.matrix for group in found.values()):
        rule = (
            f"finds no weight of two dimensions in the layers ({', '.join(plans.matrices)}) that is"
            " trained, and would be AdamW"
        )
        problems.append(
            Problem(
                "optimizer.type", rule, "use AdamW, or name its matrices in the recipe's `matrices`"
            )
        )
    if problems:
        raise Refusal(problems)


def _named(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
