"""Expert parallelism with DeepSpeed's AutoEP: each rank stores some of the experts of every layer.

Tokens are sent to the ranks of their experts. AutoEP (0.19.8) restructures the initialized model
inside `deepspeed.initialize` and uses its own names. This module restores the model's names and
layout.
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
from torch import nn
from transformers import PreTrainedModel

from ..compat.deepspeed import let_auto_ep_read_outputs, without_log
from ..spec.errors import ConfigError, config_error
from .blueprint import MoEBlock
from .expert_sharding import DOWN, GATE_UP

FUSED_EXPERT_PARAMS = {GATE_UP, DOWN}  # the layout that `restore_expert_layout` restores


def check_expert_parallel(model: PreTrainedModel, ep: int) -> list[MoELayerSpec]:
    """Return AutoEP's spec of each block with experts.

    Raises `ConfigError` for a model that AutoEP cannot fully convert, or whose experts do not have
    the layout that `restore_expert_layout` restores.
    """
    names = [name for name, _ in model.named_parameters()]
    blocks = {name.rpartition(".experts.")[0] for name in names if ".experts." in name}
    kind = type(model).__name__
    if not blocks:
        raise config_error(f"ep = {ep} with {kind}", "this model has no experts", "use --ep 1")
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
        if (
            own != FUSED_EXPERT_PARAMS
            or shapes["experts.gate_up_proj"][1] != 2 * shapes["experts.down_proj"][2]
        ):
            raise config_error(
                f"ep = {ep} with {kind}",
                f"the experts of {block} are not laid out as those of Qwen3-MoE"
                f" ({', '.join(sorted(own))})",
                "use --ep 1",
            )
    config = AutoEPConfig(enabled=True, autoep_size=ep)
    let_auto_ep_read_outputs()
    try:
        found = AutoEP(model, config).ep_parser()
        validate_autoep_post_detection(config, found)
    except ValueError as error:
        said = (
            "several of its presets fit, none is made for this type"
            if "ambiguous" in str(error)
            else str(error).split(". ")[0]
        )
        raise config_error(
            f"ep = {ep} with {kind}",
            f"DeepSpeed's AutoEP does not take it apart: {said}",
            f"use --ep 1. AutoEP supports {_known_types()}",
        ) from error
    if missed := sorted(blocks - {spec.moe_module_name for spec in found}):
        raise config_error(
            f"ep = {ep} with {kind}",
            f"DeepSpeed's AutoEP finds no experts in {missed[0]}",
            f"use --ep 1. AutoEP supports {_known_types()}",
        )
    return found


def moe_blocks(model: PreTrainedModel) -> tuple[MoEBlock, ...]:
    """Describe, for checkpoints, the blocks whose experts AutoEP can shard.

    The result is () if `check_expert_parallel` rejects the model.
    """
    with without_log():
        try:
            return tuple(_moe_block(model, spec) for spec in check_expert_parallel(model, 1))
        except ConfigError:
            return ()


def _moe_block(model: PreTrainedModel, spec: MoELayerSpec) -> MoEBlock:
    """Name the tensors next to a block's experts in the same way as `AutoEPMoELayer.__init__`."""
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
    return MoEBlock(block, renamed, aliases)


def _known_types() -> str:
    return ", ".join(
        sorted(name for preset in PRESET_MODELS.values() for name in preset.hf_model_types)
    )


def expert_parallel_group(parameter: torch.nn.Parameter) -> Any:
    """Return the group of ranks that store a parameter's other experts.

    The result is None if the parameter is unsharded.
    """
    if getattr(parameter, "ds_zero_placement_family", "") != "autoep_expert":
        return None
    return ds_groups._get_expert_parallel_group(parameter.group_name)  # pyright: ignore[reportAttributeAccessIssue]


def gather_experts(parameter: torch.nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """Return all experts of a sharded parameter, or any other parameter unchanged (a collective).

    Communication is needed only for a parameter with sharded experts.
    """
    group = expert_parallel_group(parameter)
    if group is None:
        return local
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local.contiguous(), group=group)
    return torch.cat(parts)


def name_before_auto_ep(model: nn.Module, name: str) -> str:
    """Return the name that a parameter or buffer of the model had before AutoEP renamed it."""
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


def restore_expert_layout(
    model: nn.Module, tensors: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield AutoEP's (name, tensor) pairs with the model's original names and layout."""
    blocks = {
        f"{name}." for name, module in model.named_modules() if isinstance(module, AutoEPMoELayer)
    }
    halves: dict[str, torch.Tensor] = {}
    for name, value in tensors:
        block = next((block for block in blocks if name.startswith(f"{block}experts.")), None)
        if block is None:
            yield name_before_auto_ep(model, name), value
        elif name == f"{block}experts.w2":
            yield f"{block}experts.down_proj", value
        else:  # w1 is the gate projection, w3 the up projection
            halves[name.rpartition(".")[2]] = value
            if len(halves) == 2:
                yield (
                    f"{block}experts.gate_up_proj",
                    torch.cat([halves.pop("w1"), halves.pop("w3")], dim=1),
                )
