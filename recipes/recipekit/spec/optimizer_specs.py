"""Knows of every optimizer that a JSON can name what it keeps, and where it stays what it is.

Light: no torch.

A row was measured on CPU ranks with DeepSpeed 0.19.8 and torch 2.13
(tests/optim/test_optimizers.py); what `read` names was read in their sources only. Rules, the dry
run, save, load and the converter ask these rows, and no other place names a state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

ELEMENT, TENSOR, GRADIENT = "element", "tensor", "gradient"
# elements of which ours take sums at a time, and of an update those that Adafactor computes
AT_ONCE = 1 << 22
EVERYWHERE = "on CUDA"  # the same code of torch runs there


@dataclass(frozen=True)
class Facts:
    """Describes an optimizer.

    Each state is an fp32 tensor of the weight's shape, but for FACTORS, each scalar one fp32 number
    of a weight.

    `matrices`: what it keeps for the weights that it takes for matrices, in place of `states`;
    None: it has one rule for all weights. `added`: option of optimizer.params -> the states that it
    adds where it is set. `scalars` follow from the count of steps and the group's numbers, so all
    weights of a group have the same. `acts_on`: an update of ELEMENT reads one element of gradient
    and states, so flat partitions change nothing; that of TENSOR needs the whole weight; that of
    GRADIENT takes those of each rank before they are added up, and a rank keeps errors of its own
    besides. `host`: the row of DeepSpeed's own implementation for optimizers that are offloaded to
    the host. `ours`: a class of optim/ours.py computes it, not DeepSpeed or torch. `lacks`: why it
    is refused. `tested`: DeepSpeed takes it under ZeRO without zero_allow_untested_optimizer.
    `copies`: the most tensors of a group's size that torch's step, or ours, makes beside the
    states.
    """

    states: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ("step",)
    matrices: tuple[str, ...] | None = None
    added: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    acts_on: str = ELEMENT
    family: str = ""  # the algorithm's name in checkpoints, where it is not the row's
    host: "Facts | None" = None
    ours: bool = False
    lacks: str = ""
    tested: bool = False
    copies: int = 0
    read: str = EVERYWHERE


MOMENTS = ("exp_avg", "exp_avg_sq")
# a number for each row and column of a tensor, or for each element of a vector
FACTORS = ("row_var", "col_var", "variance")
ADAM = Facts(
    MOMENTS,
    added={"amsgrad": ("max_exp_avg_sq",)},
    family="Adam",
    host=Facts(MOMENTS, family="Adam"),
    tested=True,
    copies=1,
)
MU = Facts(MOMENTS, lacks="requires the package mup, which is not pinned here", read="everywhere")
FACTS: dict[str, Facts] = {
    "AdamW": ADAM,
    "Adam": ADAM,
    "SGD": Facts(scalars=(), added={"momentum": ("momentum_buffer",)}, copies=1),
    "RMSprop": Facts(
        ("square_avg",),
        added={"momentum": ("momentum_buffer",), "centered": ("grad_avg",)},
        copies=2,
    ),
    "NAdam": Facts(MOMENTS, ("step", "mu_product"), copies=2),
    "RAdam": Facts(MOMENTS, copies=1),
    "Adamax": Facts(("exp_avg", "exp_inf"), copies=1),
    "Adadelta": Facts(("square_avg", "acc_delta"), copies=3),
    "ASGD": Facts(("ax",), ("step", "eta", "mu"), copies=1),
    "Rprop": Facts(("prev", "step_size"), copies=2),
    "Adagrad": Facts(("sum",), host=Facts(("exp_avg_sq",), tested=True), ours=True, copies=2),
    # the host's second moment stays zero, but is kept
    "Lion": Facts(("exp_avg",), host=Facts(MOMENTS, tested=True), ours=True, copies=1),
    "Lamb": Facts(MOMENTS, acts_on=TENSOR, ours=True, copies=2),
    "Adafactor": Facts(FACTORS, acts_on=TENSOR, ours=True, copies=5),
    "Muon": Facts(MOMENTS, matrices=("momentum_buffer",), acts_on=TENSOR, ours=True, copies=1),
    "OneBitAdam": Facts(MOMENTS, acts_on=GRADIENT, ours=True, copies=1),
    **dict.fromkeys(("MuAdam", "MuAdamW", "MuSGD"), MU),
}
# elements of whole matrices that a step of Muon's gathers at a time, or those of the largest
GATHERED = 1 << 26
SWAPPED = ("Adam",)  # families whose states DeepSpeed's swap files were tried with


def state_sizes(shape: tuple[int, ...], numel: int) -> dict[str, int]:
    """Returns the elements of each state of FACTORS that is kept for `numel` elements, at least
    one, of a tensor.
    """
    if len(shape) < 2:
        return {"variance": numel}
    return {"row_var": prod(shape[:-1]), "col_var": prod(shape) // shape[-2]}


def facts_of(ds_config: Mapping[str, Any]) -> Facts:
    """Returns the row of the optimizer that a checked JSON names, of its implementation for the
    host if it is offloaded; AdamW's if it names none.
    """
    block = ds_config.get("optimizer") or {}
    row = FACTS[spelled(block.get("type", "AdamW"))]
    offloaded = (ds_config.get("zero_optimization", {}).get("offload_optimizer") or {}).get(
        "device", "none"
    ) != "none"
    plain = block.get("params", {}).get("torch_adam", False)
    return row.host if row.host is not None and offloaded and not plain else row


def spelled(kind: str) -> str:
    """Returns an optimizer's name as the table spells it; DeepSpeed takes its own in any case."""
    return next(name for name in FACTS if name == kind or name.lower() == kind.lower())


def family_of(ds_config: Mapping[str, Any]) -> str:
    """Names the algorithm whose states a checkpoint holds; the same states of another algorithm
    mean something else.
    """
    return facts_of(ds_config).family or spelled(
        (ds_config.get("optimizer") or {}).get("type", "AdamW")
    )


def states_of(ds_config: Mapping[str, Any], matrix: bool = False) -> tuple[str, ...]:
    """Names the states that the optimizer of a checked JSON keeps for weights, in fp32.

    `matrix`: of one that it takes for a matrix.
    """
    row, params = facts_of(ds_config), (ds_config.get("optimizer") or {}).get("params", {})
    if matrix and row.matrices is not None:
        return row.matrices
    return (
        *row.states,
        *(name for option, names in row.added.items() if params.get(option) for name in names),
    )


def error_sizes(numel: int, ranks: int) -> tuple[int, int]:
    """Returns the elements of the two errors that a rank keeps beside states for `numel` weights,
    once an optimizer of GRADIENT sends signs.
    """
    part = -(-numel // (8 * ranks)) * 8  # whole bytes of signs
    return part * ranks, part


def by_matrix(ds_config: Mapping[str, Any]) -> bool:
    """Says whether the optimizer of a checked JSON has a rule of its own for matrices."""
    return facts_of(ds_config).matrices is not None
