"""Parameters that transformers keeps in fp32 in a bf16 model: routers, attention sinks and others.

transformers lists them for each architecture and keeps them when it loads a model. DeepSpeed keeps
only buffers.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..compat.transformers import fp32_name_pattern
from ..dslint.numbers import is_block_enabled
from ..spec.optimizer_specs import GRADIENT, optimizer_spec_of

BF16, FP16 = "bf16", "fp16"


@dataclass(frozen=True)
class Fp32Parameters:
    """The parameters of a half-precision run that stay in fp32.

    `grouped` is True if the engine needs separate optimizer groups for them. `note` is a line for
    the user if transformers would keep parameters that the run does not keep.
    """

    names: frozenset[str] = frozenset()
    grouped: bool = False
    note: str = ""


NO_FP32_PARAMETERS = Fp32Parameters()


@dataclass(frozen=True)
class Fp32Request:
    """The settings of a run that decide whether parameters stay in fp32."""

    engine: str
    precision: str
    ep: int
    adapted: bool
    ds_config: dict[str, Any]


def choose_fp32_parameters(model: PreTrainedModel, request: Fp32Request) -> Fp32Parameters:
    """Return the parameters of an unsharded model that a run keeps in fp32.

    In fp32 there is nothing to keep.
    """
    if request.precision not in (BF16, FP16):
        return NO_FP32_PARAMETERS
    names = fp32_names(model)
    if not names:
        return NO_FP32_PARAMETERS
    if reason := _why_not(request):
        return fp32_not_kept(len(names), request.precision, reason)
    return Fp32Parameters(names, grouped=request.engine == "deepspeed")


def fp32_not_kept(count: int, precision: str, reason: str) -> Fp32Parameters:
    """Return the choice to train `count` such parameters in `precision`, with its reason."""
    return Fp32Parameters(
        note=f"{count} parameters that transformers keeps in fp32 are {precision} here, because"
        f" {reason}"
    )


def fp32_names(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the parameters that transformers keeps in fp32 in a bf16 model."""
    pattern = fp32_name_pattern(model)
    if pattern is None:
        return frozenset()
    return frozenset(name for name, _ in model.named_parameters() if pattern.search(name))


def _why_not(request: Fp32Request) -> str:
    """Return the reason why a run does not keep parameters in fp32, or "" if it does."""
    if request.adapted:
        return "an adapter wraps their modules"
    if request.ep > 1:
        return "expert parallelism creates the routers in one dtype"
    if request.precision == FP16:
        return "only bf16 runs keep them"
    if request.engine != "deepspeed":
        return ""
    if optimizer_spec_of(request.ds_config).acts_on == GRADIENT:
        return "the optimizer sends signs of one dtype"
    zero = request.ds_config.get("zero_optimization", {})
    if zero.get("stage", 0) == 3:
        return "ZeRO-3 partitions parameters of one dtype"
    if zero.get("offload_optimizer", {}).get("device", "none") != "none":
        return "an offloaded optimizer has buffers of one dtype"
    return "" if is_block_enabled(request.ds_config, BF16) else "the JSON has no bf16 block"
