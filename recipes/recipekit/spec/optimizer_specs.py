"""Table of the optimizers that a JSON can name, with their states and supported layouts.

This module does not import torch. The rows were measured on CPU ranks with DeepSpeed 0.19.8 and
torch 2.13 (tests/optim/test_optimizers.py). The devices in a row's `read` were not measured; for
them, only the source code was read. Rules, the dry run, save, load and the converter use these
rows, and no other code names a state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

ELEMENT, TENSOR, GRADIENT = "element", "tensor", "gradient"
# The number of elements that our optimizers sum at a time. Adafactor also computes an update in
# chunks of this size.
CHUNK_NUMEL = 1 << 22
EVERYWHERE = "on CUDA"  # torch runs the same code there


@dataclass(frozen=True)
class OptimizerSpec:
    """Properties of an optimizer.

    Each state is an fp32 tensor with the weight's shape, except ADAFACTOR_STATES. Each scalar is
    one fp32 number per weight.

    - `matrix_states`: replaces `states` for weights that are treated as matrices. None: one rule
      applies to all weights.
    - `optional_states`: optimizer.params option -> the states that it adds if it is set.
    - `scalars`: depend only on the step count and the group's settings, so all weights in a group
      share their values.
    - `acts_on`: ELEMENT: an update reads one element of the gradient and the states, so flat
      partitions do not change the result. TENSOR: an update needs the full weight. GRADIENT: the
      optimizer reads each rank's gradients before they are summed, and each rank also keeps its own
      error-feedback buffers.
    - `host`: the row for DeepSpeed's host implementation, used if the optimizer is offloaded.
    - `module`: the file in `optim` whose `OPTIMIZER` implements the optimizer. "": DeepSpeed or
      torch implements it.
    - `params`: the keys of optimizer.params, in the format of dslint/schema.json, for an optimizer
      that neither DeepSpeed nor torch provides.
    - `step_percents`: optimizer.params key -> its "auto" value as a percentage of the run's steps.
    - `unsupported_reason`: why the optimizer is rejected.
    - `tested`: DeepSpeed accepts the optimizer under ZeRO without zero_allow_untested_optimizer.
    - `temporary_copies`: the most group-sized tensors that a torch step, or our step, creates in
      addition to the states.
    """

    states: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ("step",)
    matrix_states: tuple[str, ...] | None = None
    optional_states: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    acts_on: str = ELEMENT
    family: str = ""  # the algorithm's name in checkpoints, if it differs from the row's name
    host: "OptimizerSpec | None" = None
    module: str = ""
    params: Mapping[str, Mapping[str, Any]] | None = None
    step_percents: Mapping[str, int] = field(default_factory=dict)
    unsupported_reason: str = ""
    tested: bool = False
    temporary_copies: int = 0
    read: str = EVERYWHERE

    @property
    def is_own_class(self) -> bool:
        """Return True if a class in `optim` implements the optimizer."""
        return bool(self.module)


# optimizer.params keys that our optimizers share with torch's AdamW
ADAMW_PARAMS: dict[str, dict[str, Any]] = {
    "betas": {"type": ["array"], "default": [0.9, 0.999], "items": "number", "length": 2},
    "eps": {"type": ["number"], "default": 1e-08, "min": 0},
    "lr": {"type": ["number"], "default": 0.001, "min": 0},
    "weight_decay": {"type": ["number"], "default": 0.01, "min": 0},
}
ADAM_STATES = ("exp_avg", "exp_avg_sq")
# Each contains one number per row or column of a tensor, or per element of a vector.
ADAFACTOR_STATES = ("row_var", "col_var", "variance")
ADAM = OptimizerSpec(
    ADAM_STATES,
    optional_states={"amsgrad": ("max_exp_avg_sq",)},
    family="Adam",
    host=OptimizerSpec(ADAM_STATES, family="Adam"),
    tested=True,
    temporary_copies=1,
)
MU = OptimizerSpec(
    ADAM_STATES,
    unsupported_reason="requires the package mup, which is not pinned here",
    read="everywhere",
)
OPTIMIZERS: dict[str, OptimizerSpec] = {
    "AdamW": ADAM,
    "Adam": ADAM,
    "SGD": OptimizerSpec(
        scalars=(), optional_states={"momentum": ("momentum_buffer",)}, temporary_copies=1
    ),
    "RMSprop": OptimizerSpec(
        ("square_avg",),
        optional_states={"momentum": ("momentum_buffer",), "centered": ("grad_avg",)},
        temporary_copies=2,
    ),
    "NAdam": OptimizerSpec(ADAM_STATES, ("step", "mu_product"), temporary_copies=2),
    "RAdam": OptimizerSpec(ADAM_STATES, temporary_copies=1),
    "Adamax": OptimizerSpec(("exp_avg", "exp_inf"), temporary_copies=1),
    "Adadelta": OptimizerSpec(("square_avg", "acc_delta"), temporary_copies=3),
    "ASGD": OptimizerSpec(("ax",), ("step", "eta", "mu"), temporary_copies=1),
    "Rprop": OptimizerSpec(("prev", "step_size"), temporary_copies=2),
    "Adagrad": OptimizerSpec(
        ("sum",),
        host=OptimizerSpec(("exp_avg_sq",), tested=True),
        module="adagrad",
        temporary_copies=2,
    ),
    # The host implementation's second moment stays zero, but it is stored.
    "Lion": OptimizerSpec(
        ("exp_avg",),
        host=OptimizerSpec(ADAM_STATES, tested=True),
        module="lion",
        temporary_copies=1,
    ),
    "Lamb": OptimizerSpec(ADAM_STATES, acts_on=TENSOR, module="lamb", temporary_copies=2),
    "Adafactor": OptimizerSpec(
        ADAFACTOR_STATES, acts_on=TENSOR, module="adafactor", temporary_copies=5
    ),
    "Muon": OptimizerSpec(
        ADAM_STATES,
        matrix_states=("momentum_buffer",),
        acts_on=TENSOR,
        module="muon",
        temporary_copies=1,
    ),
    "AdEMAMix": OptimizerSpec(
        ("exp_avg", "exp_avg_slow", "exp_avg_sq"),
        module="ademamix",
        params={
            "alpha": {"type": ["number"], "default": 5.0, "min": 0},
            "alpha_beta3_warmup_steps": {"type": ["integer"], "min": 0, "required": True},
            "betas": ADAMW_PARAMS["betas"] | {"default": [0.9, 0.999, 0.9999], "length": 3},
            "eps": ADAMW_PARAMS["eps"],
            "lr": ADAMW_PARAMS["lr"],
            "weight_decay": ADAMW_PARAMS["weight_decay"],
        },
        step_percents={"alpha_beta3_warmup_steps": 100},
        temporary_copies=1,
    ),
    "OneBitAdam": OptimizerSpec(  # DeepSpeed has removed its own implementation
        ADAM_STATES,
        acts_on=GRADIENT,
        module="one_bit",
        params={
            "betas": ADAMW_PARAMS["betas"],
            "eps": ADAMW_PARAMS["eps"],
            "freeze_step": {"type": ["integer"], "min": 1, "required": True},
            "lr": ADAMW_PARAMS["lr"],
            "weight_decay": ADAMW_PARAMS["weight_decay"],
        },
        step_percents={"freeze_step": 15},
        temporary_copies=1,
    ),
    **dict.fromkeys(("MuAdam", "MuAdamW", "MuSGD"), MU),
}
# Number of full-matrix elements that a Muon step gathers at a time. A larger matrix is gathered
# alone.
MUON_GATHER_NUMEL = 1 << 26
SWAPPABLE_FAMILIES = ("Adam",)  # families whose DeepSpeed swap files were tested


def state_sizes(shape: tuple[int, ...], numel: int) -> dict[str, int]:
    """Return the size in elements of each state in ADAFACTOR_STATES.

    `numel` is the number of elements that a rank keeps of the tensor with `shape`, at least 1.
    """
    if len(shape) < 2:
        return {"variance": numel}
    return {"row_var": prod(shape[:-1]), "col_var": prod(shape) // shape[-2]}


def optimizer_spec_of(ds_config: Mapping[str, Any]) -> OptimizerSpec:
    """Return the row for a checked JSON's optimizer, or AdamW's row if the JSON names none.

    For an offloaded optimizer, return the row for DeepSpeed's host implementation.
    """
    block = ds_config.get("optimizer") or {}
    row = OPTIMIZERS[canonical_name(block.get("type", "AdamW"))]
    offloaded = (ds_config.get("zero_optimization", {}).get("offload_optimizer") or {}).get(
        "device", "none"
    ) != "none"
    plain = block.get("params", {}).get("torch_adam", False)
    return row.host if row.host is not None and offloaded and not plain else row


def canonical_name(kind: str) -> str:
    """Return an optimizer's name as spelled in the table.

    Case is ignored, as in DeepSpeed for its own optimizers.
    """
    return next(name for name in OPTIMIZERS if name == kind or name.lower() == kind.lower())


def optimizer_family(ds_config: Mapping[str, Any]) -> str:
    """Return the name of the algorithm whose states a checkpoint contains.

    States with the same names have a different meaning in a different algorithm.
    """
    return optimizer_spec_of(ds_config).family or canonical_name(
        (ds_config.get("optimizer") or {}).get("type", "AdamW")
    )


def optimizer_states(ds_config: Mapping[str, Any], matrix: bool = False) -> tuple[str, ...]:
    """Return the names of the fp32 states that a checked JSON's optimizer keeps for a weight.

    `matrix` selects the states of a weight that the optimizer treats as a matrix.
    """
    row, params = optimizer_spec_of(ds_config), (ds_config.get("optimizer") or {}).get("params", {})
    if matrix and row.matrix_states is not None:
        return row.matrix_states
    return (
        *row.states,
        *(
            name
            for option, names in row.optional_states.items()
            if params.get(option)
            for name in names
        ),
    )


def error_sizes(numel: int, ranks: int) -> tuple[int, int]:
    """Return the sizes in elements of a rank's two error-feedback tensors for `numel` weights.

    A GRADIENT optimizer adds these tensors to its states once it starts to send signs.
    """
    part = -(-numel // (8 * ranks)) * 8  # padded to whole bytes of signs
    return part * ranks, part


def has_matrix_rule(ds_config: Mapping[str, Any]) -> bool:
    """Return True if a checked JSON's optimizer has a separate rule for matrices."""
    return optimizer_spec_of(ds_config).matrix_states is not None
