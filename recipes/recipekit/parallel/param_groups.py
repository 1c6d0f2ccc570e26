"""Which optimizer group a parameter is in: whether it decays, at which learning rate, and whether it is a matrix to its optimizer."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..refusal import Problem, Refusal
from ..tasks.facts import Plans


@dataclass(frozen=True, order=True)
class Group:
    """Describes parameters that an optimizer treats alike.

    `matrix`: the optimizer has a rule of its own for matrices (`matrices` of its row in optim/facts.py), and these are such.
    `lr_scale` is what the learning rate of a step is multiplied with.
    """

    matrix: bool = False
    decays: bool = True
    lr_scale: float = 1.0

    @property
    def name(self) -> str:
        """Names the group in optimizers and checkpoints."""
        kind = ("whole matrices" if self.decays else "whole matrices without decay") if self.matrix else "matrices" if self.decays else "vectors"
        return kind if self.lr_scale == 1 else f"{kind}, lr x {self.lr_scale:g}"

    @property
    def entries(self) -> dict[str, Any]:
        """Lists what an optimizer's group has of it besides its numbers; of the first two groups the name only, as it always was."""
        return ({"lr_scale": self.lr_scale} if self.lr_scale != 1 else {}) | ({"matrix": True} if self.matrix else {}) | {"name": self.name}


FIRST = (Group(), Group(decays=False))  # numbers 0 and 1 in every checkpoint, "matrices" and "vectors"


def numbered(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Puts groups in the order of their numbers, which depends on nothing but them."""
    return (*FIRST, *sorted(set(groups) - set(FIRST)))


def group_of(name: str, dims: int, plans: Plans) -> Group:
    """Returns the group of a trained parameter. Matrices decay; vectors (norms, biases) and what `no_decay` names do not."""
    matrix = dims == 2 and _named(name, plans.matrices)
    return Group(
        matrix, dims >= 2 and not _named(name, plans.no_decay), next((scale for pattern, scale in plans.lr_scale.items() if _named(name, [pattern])), 1.0)
    )


def check_named(trained: Iterable[str], plans: Plans) -> None:
    """Raises `Refusal` for names in `lr_scale` that none of the trained parameters has."""
    names = list(trained)
    void = [pattern for pattern in plans.lr_scale if not any(_named(name, [pattern]) for name in names)]
    fix = f"write a name, or a pattern with *, as in {names[0] if names else 'model.embed_tokens.weight'}"
    if void:
        raise Refusal([Problem(f"lr_scale of {pattern!r}", "names no parameter that is trained", fix) for pattern in void])


def _named(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
