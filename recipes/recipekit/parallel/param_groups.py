"""Optimizer parameter groups, which differ in weight decay, learning rate and matrix rule."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..spec.errors import ConfigError, Problem
from ..spec.task_specs import Plans


@dataclass(frozen=True, order=True)
class ParamGroup:
    """Parameters that an optimizer treats in the same way.

    `matrix` is True if this is a group of matrices and the optimizer has a separate rule for
    matrices (`matrices` in the optimizer's row of spec/optimizer_specs.py). `lr_scale` multiplies
    the learning rate of each step. `fp32` is True for parameters that stay in fp32 in a bf16 model
    (model/fp32_parameters.py), because DeepSpeed's flat tensors have one dtype.
    """

    matrix: bool = False
    decays: bool = True
    lr_scale: float = 1.0
    fp32: bool = False

    @property
    def name(self) -> str:
        """Return the group's name in optimizers and checkpoints."""
        kind = (
            ("whole matrices" if self.decays else "whole matrices without decay")
            if self.matrix
            else "matrices"
            if self.decays
            else "vectors"
        )
        kind = f"{kind}, fp32" if self.fp32 else kind
        return kind if self.lr_scale == 1 else f"{kind}, lr x {self.lr_scale}"

    @property
    def entries(self) -> dict[str, Any]:
        """Return this group's entries in an optimizer, in addition to the optimizer's numbers.

        The first two groups have only a name, as in older checkpoints.
        """
        return (
            ({"lr_scale": self.lr_scale} if self.lr_scale != 1 else {})
            | ({"matrix": True} if self.matrix else {})
            | {"name": self.name}
        )


# groups number 0 and 1 in every checkpoint: "matrices" and "vectors"
DEFAULT_GROUPS = (ParamGroup(), ParamGroup(decays=False))


def order_groups(groups: Iterable[ParamGroup]) -> tuple[ParamGroup, ...]:
    """Return groups ordered by their numbers. The order depends only on the groups.

    Groups in fp32 are last, because DeepSpeed reads the training dtype from the first group.
    """
    others = set(groups) - set(DEFAULT_GROUPS)
    return (*DEFAULT_GROUPS, *sorted(others, key=lambda group: (group.fp32, group)))


def layer_lr_scale(place: str, num_layers: int, layer_decay: float) -> float:
    """Return the learning-rate factor of a place in a blueprint.

    The factor is 1 after the layers and layer_decay in the last layer. Each earlier layer adds one
    power of layer_decay. The part before the first layer adds one more power (Bao et al., "BEiT",
    arXiv 2106.08254). Tensors without a place in the pipeline have the full learning rate.
    """
    if place.isdecimal():
        return layer_decay ** (num_layers - int(place))
    return layer_decay ** (num_layers + 1) if place in ("first", "ends") else 1.0


def param_group_of(
    name: str, dims: int, plans: Plans, matrix: bool = False, layer_factor: float = 1.0
) -> ParamGroup:
    """Return the group of a trained parameter.

    Matrices decay. Vectors (norms, biases) and parameters named in `no_decay` do not decay.
    `layer_factor` is the layer's learning-rate factor, which is multiplied by the factor from
    `lr_scale`.
    """
    scale = next(
        (scale for pattern, scale in plans.lr_scale.items() if _matches_any(name, [pattern])), 1.0
    )
    return ParamGroup(
        matrix, dims >= 2 and not _matches_any(name, plans.no_decay), float(scale) * layer_factor
    )


def check_group_names(
    groups: Mapping[str, ParamGroup], plans: Plans, recipe_patterns: tuple[str, ...] = ()
) -> None:
    """Raise `ConfigError` for names that match no trained parameter or matrix.

    The check covers names in `lr_scale`, and `recipe_patterns` that match no matrix. It also covers
    a model without matrices whose optimizer has a separate rule for matrices.
    """
    near = (
        "write a name, or a pattern with *, as in"
        f" {next(iter(groups), 'model.embed_tokens.weight')}"
    )
    problems = [
        Problem(f"lr_scale of {pattern!r}", "does not match any trained parameter", near)
        for pattern in plans.lr_scale
        if not any(_matches_any(name, [pattern]) for name in groups)
    ]
    problems += [
        Problem(
            f"matrices = {pattern!r}",
            "must match a trained weight of two dimensions that is not an embedding, a head or a"
            " convolution",
            "leave it out",
        )
        for pattern in recipe_patterns
        if plans.matrices
        and not any(
            group.matrix and _matches_any(name, [pattern]) for name, group in groups.items()
        )
    ]
    if (
        plans.matrices
        and not recipe_patterns
        and not any(group.matrix for group in groups.values())
    ):
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
        raise ConfigError(problems)


def _matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
