"""Shapes of a model's expert shards under DeepSpeed 0.19.8 (module_inject/auto_ep_layer.py).

This module is arithmetic only. Nothing here imports torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .blueprint import Blueprint, MoEBlock, Tensor

# (experts, 2 x width, D) and (experts, D, width)
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


@dataclass(frozen=True)
class ExpertTensorSource:
    """Source of one tensor of the sharded model.

    The tensor is the full model's tensor `source` under a different name. For a rank's experts,
    `rows` selects the rows start..stop of each expert (None: all rows). Tensors that are parts of
    the same experts differ in `index`.
    """

    source: Tensor
    rows: tuple[int, int] | None = None
    index: int = 0


def shard_experts(blueprint: Blueprint, ep: int) -> tuple[Blueprint, dict[str, ExpertTensorSource]]:
    """Return an expert-parallel rank's blueprint and the source of each new tensor.

    The tensors have DeepSpeed's names and follow the order of DeepSpeed's optimizer: the router and
    experts that DeepSpeed creates for a block come after all other tensors.
    """
    if ep == 1:
        return blueprint, {}
    named = {tensor.name: tensor for tensor in blueprint.tensors}
    names = {own: name for block in blueprint.blocks for own, name in block.renamed.items()}
    parts = {name: ExpertTensorSource(named[own]) for own, name in names.items()}
    kept, new = [tensor for tensor in blueprint.tensors if not tensor.expert], []
    for block in blueprint.blocks:
        routers = [
            own for own, name in block.renamed.items() if name.startswith(f"{block.name}.router.")
        ]
        kept = [tensor for tensor in kept if tensor.name not in routers]
        new += [replace(named[own], name=names[own], fresh=True) for own in routers]
        for tensor, part in _expert_tensors(block, named, ep):
            new.append(tensor)
            parts[tensor.name] = part
    tensors = (
        *(replace(tensor, name=names.get(tensor.name, tensor.name)) for tensor in kept),
        *new,
    )
    aliases = blueprint.aliases | {
        alias: (name, "every")
        for block in blueprint.blocks
        for alias, name in block.aliases.items()
    }
    return replace(blueprint, tensors=tensors, aliases=aliases), parts


def _expert_tensors(
    block: MoEBlock, named: dict[str, Tensor], ep: int
) -> Iterator[tuple[Tensor, ExpertTensorSource]]:
    """Yield the tensors of a rank's experts, each with its source.

    w1 is the gate projection, w3 the up projection and w2 the down projection.
    """
    gate_up, down = named[f"{block.name}.{GATE_UP}"], named[f"{block.name}.{DOWN}"]
    width = gate_up.shape[1] // 2
    for own, of, rows, number in (
        ("w1", gate_up, (0, width), 0),
        ("w2", down, None, 0),
        ("w3", gate_up, (width, 2 * width), 1),
    ):
        height = rows[1] - rows[0] if rows else of.shape[1]
        yield (
            replace(
                of,
                name=f"{block.name}.experts.{own}",
                shape=(of.shape[0] // ep, height, of.shape[2]),
            ),
            ExpertTensorSource(of, rows, number),
        )
