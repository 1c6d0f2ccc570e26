"""Expert parallelism: DeepSpeed's AutoEP gives each rank some experts of every layer, and the
tokens travel.

AutoEP (0.19.8) takes the filled model apart inside `deepspeed.initialize` and names what it makes
in its own way; here those names and parts become the model's again.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import AutoEPConfig, validate_autoep_post_detection
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.module_inject.auto_ep_presets.base import MoELayerSpec
from deepspeed.module_inject.auto_ep_presets.registry import PRESET_MODELS
from deepspeed.utils import groups as ds_groups
from deepspeed.utils import logger
from torch import nn
from transformers import PreTrainedModel

from ..spec.refusal import Refusal, refuse
from .blueprint import Block
from .divided import DOWN, GATE_UP

FUSED = {GATE_UP, DOWN}  # the layout that `published` restores


def check(model: PreTrainedModel, ep: int) -> list[MoELayerSpec]:
    """Returns what AutoEP finds of each block.

    Raises `Refusal` for a model that AutoEP does not take apart whole, or whose experts are not
    laid out as `published` gives them back.
    """
    names = [name for name, _ in model.named_parameters()]
    blocks = {name.rpartition(".experts.")[0] for name in names if ".experts." in name}
    kind = type(model).__name__
    if not blocks:
        raise refuse(f"ep = {ep} with {kind}", "this model has no experts", "use --ep 1")
    for block in sorted(blocks):
        own = {
            name.removeprefix(f"{block}.") for name in names if name.startswith(f"{block}.experts.")
        }
        shapes = {
            name: tuple(
                getattr(
                    parameter := model.get_parameter(f"{block}.{name}"), "ds_shape", parameter.shape
                )
            )
            for name in own
        }
        if own != FUSED or shapes["experts.gate_up_proj"][1] != 2 * shapes["experts.down_proj"][2]:
            raise refuse(
                f"ep = {ep} with {kind}",
                f"the experts of {block} are not laid out as those of Qwen3-MoE"
                f" ({', '.join(sorted(own))})",
                "use --ep 1",
            )
    config = AutoEPConfig(enabled=True, autoep_size=ep)
    try:
        found = AutoEP(model, config).ep_parser()
        validate_autoep_post_detection(config, found)
    except ValueError as error:
        said = (
            "several of its presets fit, none is made for this type"
            if "ambiguous" in str(error)
            else str(error).split(". ")[0]
        )
        raise refuse(
            f"ep = {ep} with {kind}",
            f"DeepSpeed's AutoEP does not take it apart: {said}",
            f"use --ep 1. AutoEP supports {_known_types()}",
        ) from error
    if missed := sorted(blocks - {spec.moe_module_name for spec in found}):
        raise refuse(
            f"ep = {ep} with {kind}",
            f"DeepSpeed's AutoEP finds no experts in {missed[0]}",
            f"use --ep 1. AutoEP supports {_known_types()}",
        )
    return found


def blocks_of(model: PreTrainedModel) -> tuple[Block, ...]:
    """Describes the blocks whose experts AutoEP can divide, for checkpoints; none if `check`
    refuses the model.
    """
    # AutoEP warns of what it would not do, and nobody asked it to divide
    before, logger.disabled = logger.disabled, True
    try:
        return tuple(_block(model, spec) for spec in check(model, 1))
    except Refusal:
        return ()
    finally:
        logger.disabled = before


def _block(model: PreTrainedModel, spec: MoELayerSpec) -> Block:
    """Names the tensors beside a block's experts as `AutoEPMoELayer.__init__` does."""
    block, router, bias = spec.moe_module_name, spec.router_name, "e_score_correction_bias"
    where = (
        router if spec.e_score_correction_bias_path is None else spec.e_score_correction_bias_path
    )
    places = {
        f"{router}.weight": "router.gate.weight",
        f"{router}.bias": "router.gate.bias",
        ".".join(filter(None, (where, bias))): f"router.{bias}",
    }
    tensors = [
        name.removeprefix(f"{block}.")
        for name in model.state_dict()
        if name.startswith(f"{block}.")
    ]
    for own, theirs in (
        (spec.shared_experts_name, "shared_experts"),
        (spec.shared_experts_gate_name, "shared_experts_gate"),
    ):
        places |= {
            name: f"{theirs}{name.removeprefix(own)}"
            for name in tensors
            if own and name.startswith(f"{own}.")
        }
    renamed = {
        f"{block}.{own}": f"{block}.{theirs}" for own, theirs in places.items() if own in tensors
    }
    alias = spec.router_logits_capture_layer_name or router
    free = (
        spec.router_logits_capture_target == "router"
        and "." not in alias
        and alias not in ("router", "experts", "shared_experts")
    )
    aliases = {
        name.replace(f"{block}.router.", f"{block}.{alias}."): name
        for name in renamed.values()
        if free and name.startswith(f"{block}.router.")
    }
    return Block(block, renamed, aliases)


def _known_types() -> str:
    return ", ".join(
        sorted(name for preset in PRESET_MODELS.values() for name in preset.hf_model_types)
    )


def group_of(parameter: torch.nn.Parameter) -> Any:
    """The ranks that hold the other experts of a parameter; None for one that every rank holds."""
    if getattr(parameter, "ds_zero_placement_family", "") != "autoep_expert":
        return None
    return ds_groups._get_expert_parallel_group(parameter.group_name)  # pyright: ignore[reportAttributeAccessIssue]


def whole(parameter: torch.nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """All experts of a parameter of which this rank holds some (a collective); any other parameter
    as it is.
    """
    group = group_of(parameter)
    if group is None:
        return local
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local.contiguous(), group=group)
    return torch.cat(parts)


def own_name(model: nn.Module, name: str) -> str:
    """The name that a parameter or buffer of the model had before AutoEP renamed it."""
    for layer, module in model.named_modules():
        if isinstance(module, AutoEPMoELayer) and name.startswith(f"{layer}."):
            preset = PRESET_MODELS[module.model_family]
            own = {
                "router.gate": preset.router_pattern,
                "router": preset.router_pattern,
                "shared_experts_gate": preset.shared_experts_gate_pattern,
            }
            for theirs, ours in (own | {"shared_experts": preset.shared_experts_pattern}).items():
                if name.startswith(f"{layer}.{theirs}."):
                    return f"{layer}.{ours}.{name.removeprefix(f'{layer}.{theirs}.')}"
    return name


def published(
    model: nn.Module, tensors: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the model as AutoEP left it -> under the names and in the layout that the
    model had before.
    """
    blocks = {
        f"{name}." for name, module in model.named_modules() if isinstance(module, AutoEPMoELayer)
    }
    halves: dict[str, torch.Tensor] = {}
    for name, value in tensors:
        block = next((block for block in blocks if name.startswith(f"{block}experts.")), None)
        if block is None:
            yield own_name(model, name), value
        elif name == f"{block}experts.w2":
            yield f"{block}experts.down_proj", value
        else:  # w1 is the gate, w3 what it is multiplied with
            halves[name.rpartition(".")[2]] = value
            if len(halves) == 2:
                yield (
                    f"{block}experts.gate_up_proj",
                    torch.cat([halves.pop("w1"), halves.pop("w3")], dim=1),
                )
