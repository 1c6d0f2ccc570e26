"""Divides a model's experts over expert-parallel ranks on paper, as DeepSpeed 0.19.8 does it
(module_inject/auto_ep_layer.py).

Arithmetic only: nothing here imports torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .blueprint import Block, Blueprint, Tensor

# (experts, 2 x width, D) and (experts, D, width)
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


@dataclass(frozen=True)
class Part:
    """Says what a tensor of the divided model is: the tensor `of` of the whole model under another
    name, or, of the experts that a rank holds, the `rows` start..stop of each (None: all).

    Parts of the same experts differ in `number`.
    """

    of: Tensor
    rows: tuple[int, int] | None = None
    number: int = 0


def divide(blueprint: Blueprint, ep: int) -> tuple[Blueprint, dict[str, Part]]:
    """Describes the model of an expert-parallel rank, under DeepSpeed's names, and what each of its
    new tensors is of the whole.

    The order is that of DeepSpeed's optimizer: what a block gets anew, its router and experts,
    follows all others.
    """
    if ep == 1:
        return blueprint, {}
    named = {tensor.name: tensor for tensor in blueprint.tensors}
    names = {own: name for block in blueprint.blocks for own, name in block.renamed.items()}
    parts = {name: Part(named[own]) for own, name in names.items()}
    kept, new = [tensor for tensor in blueprint.tensors if not tensor.expert], []
    for block in blueprint.blocks:
        routers = [
            own for own, name in block.renamed.items() if name.startswith(f"{block.name}.router.")
        ]
        kept = [tensor for tensor in kept if tensor.name not in routers]
        new += [replace(named[own], name=names[own], fresh=True) for own in routers]
        for tensor, part in _experts(block, named, ep):
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


def _experts(block: Block, named: dict[str, Tensor], ep: int) -> Iterator[tuple[Tensor, Part]]:
    """Yields the tensors of a rank's experts: w1 is the gate, w3 what it is multiplied with, w2 the
    projection down.
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
            Part(of, rows, number),
        )
