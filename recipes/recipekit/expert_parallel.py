"""Expert parallelism: DeepSpeed's AutoEP gives each rank some experts of every layer, and the tokens travel.

AutoEP (0.19.8) takes the filled model apart inside `deepspeed.initialize` and names what it makes in its own way; here
those names and parts become the model's again.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.utils import groups as ds_groups

from .refusal import refuse

FUSED = {"experts.gate_up_proj", "experts.down_proj"}  # (experts, 2 x width, D) and (experts, D, width): the layout that `published` restores


def check(model: Any, ep: int) -> None:
    """Raises `Refusal` for a model whose experts are none, or not laid out as `published` gives them back."""
    names = [name for name, _ in model.named_parameters()]
    blocks = {name.rpartition(".experts.")[0] for name in names if ".experts." in name}
    kind = type(model).__name__
    if not blocks:
        raise refuse(f"ep = {ep} with {kind}", "this model has no experts", "use --ep 1")
    for block in blocks:
        own = {name.removeprefix(f"{block}.") for name in names if name.startswith(f"{block}.experts.")}
        shapes = {name: tuple(model.get_parameter(f"{block}.{name}").shape) for name in own}
        if own != FUSED or shapes["experts.gate_up_proj"][1] != 2 * shapes["experts.down_proj"][2] or not hasattr(model.get_submodule(block), "gate"):
            raise refuse(f"ep = {ep} with {kind}", f"the experts of {block} are not laid out as those of Qwen3-MoE ({', '.join(sorted(own))})", "use --ep 1")


def group_of(parameter: torch.nn.Parameter) -> Any:
    """The ranks that hold the other experts of a parameter; None for one that every rank holds."""
    if getattr(parameter, "ds_zero_placement_family", "") != "autoep_expert":
        return None
    return ds_groups._get_expert_parallel_group(parameter.group_name)  # pyright: ignore[reportAttributeAccessIssue]


def whole(parameter: torch.nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """All experts of a parameter of which this rank holds some (a collective); any other parameter as it is."""
    group = group_of(parameter)
    if group is None:
        return local
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local.contiguous(), group=group)
    return torch.cat(parts)


def published(model: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the model as AutoEP left it -> under the names and in the layout that the model had before."""
    layers = {f"{name}." for name, module in model.named_modules() if isinstance(module, AutoEPMoELayer)}
    halves: dict[str, torch.Tensor] = {}
    for name, value in tensors:
        layer = next((layer for layer in layers if name.startswith(layer)), None)
        own = name.removeprefix(layer) if layer else name
        if layer is None or not own.startswith(("experts.", "router.")):
            yield name, value
        elif own == "router.gate.weight":
            yield f"{layer}gate.weight", value
        elif own == "experts.w2":
            yield f"{layer}experts.down_proj", value
        else:  # w1 is the gate, w3 what it is multiplied with
            halves[own] = value
            if len(halves) == 2:
                yield f"{layer}experts.gate_up_proj", torch.cat([halves.pop("experts.w1"), halves.pop("experts.w3")], dim=1)
