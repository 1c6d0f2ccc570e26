"""Additional content of DeepSpeed's files for sharded experts.

It consists of entries that describe how experts are placed, and of one file per expert. The format
is taken from DeepSpeed 0.19.8: runtime/engine.py (`_save_moe_checkpoint`), zero/stage3.py,
checkpoint/autoep_affine.py.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

from ..parallel.blueprint import Tensor, flat_tensors, num_partitions
from .file_map import ModelParallelRank, expert_file
from .torch_files import FileTensor


def model_entries(holder: ModelParallelRank, rank: int) -> dict[str, Any]:
    """Return a model file's entries that describe how experts are placed.

    Return {} if experts are unsharded. `rank` is the data-parallel rank that writes the file.
    """
    if not holder.parts:
        return {}
    layers = [
        _expert_layer_entry(holder, number, rank) for number in range(len(holder.blueprint.blocks))
    ]
    info = {
        "universal_checkpoint_version": 0.4,
        "expert_parameter_patterns": [r".*\.experts\.w[123]$"],
        "ds_autoep_layers": layers,
    }
    return {
        "num_experts": [layer["num_experts"] for layer in layers],
        "ds_autoep_layers": layers,
        "universal_checkpoint_info": info,
    }


def _expert_layer_entry(holder: ModelParallelRank, number: int, rank: int) -> dict[str, Any]:
    ep, partitions, block = (
        holder.layout.mesh.ep,
        holder.layout.partitions,
        holder.blueprint.blocks[number].name,
    )
    own = [
        tensor for tensor in holder.blueprint.tensors if tensor.name.startswith(f"{block}.experts.")
    ]
    count, zero3 = own[0].shape[0], holder.layout.zero_stage == 3
    ranks = [
        {"rank": other, "experts": list(range(other * count, (other + 1) * count))}
        for other in range(ep)
    ]
    return {
        "moe_layer_id": number,
        "module_path": block,
        "num_experts": ep * count,
        "num_local_experts": count,
        "ep_size": ep,
        "expert_placement": {
            "version": 1,
            "num_experts": ep * count,
            "ep_size": ep,
            "ranks": ranks,
        },
        "affine_maps": {
            "version": 1,
            "params": {tensor.name: _affine_map(tensor, ep) for tensor in own},
        },
        "expert_key_prefix": f"{block}.experts",
        "checkpoint_format": "zero3_partitioned" if zero3 else "per_expert_files",
        "checkpoint_format_version": 1 if zero3 else None,
        "ep_group_name": f"ep_size_{ep}",
        "ep_rank": rank % ep,
        "expert_data_parallel_rank": rank // ep,
        "expert_data_parallel_world_size": partitions // ep,
        "global_expert_start": rank % ep * count,
        "global_expert_end": (rank % ep + 1) * count,
    }


def _affine_map(tensor: Tensor, ep: int) -> dict[str, Any]:
    """Return DeepSpeed's description of a tensor whose experts are stored consecutively on each
    rank.
    """
    shape, numel = list(tensor.shape), prod(tensor.shape)
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    ranks = {}
    for rank in range(ep):
        piece = {
            "shape": shape,
            "source": [rank * numel, strides],
            "dest": [0, strides],
            "locations": [rank],
        }
        ranks[rank] = {"shard_shape": shape, "pieces": [piece]}
    return {"logical_shape": [ep * shape[0], *shape[1:]], "ranks": ranks}


def files_of_experts(holder: ModelParallelRank) -> Iterator[tuple[str, dict[str, FileTensor]]]:
    """Yield (name, content) for each expert's weight file.

    Yield nothing for unsharded experts, and nothing under ZeRO-3.
    """
    if not holder.parts or holder.layout.zero_stage == 3:
        return
    for number, block in enumerate(holder.blueprint.blocks):
        own = [
            tensor
            for tensor in holder.blueprint.tensors
            if tensor.name.startswith(f"{block.name}.experts.")
        ]
        for expert in range(holder.layout.mesh.ep * own[0].shape[0]):
            yield (
                expert_file(number, expert),
                {
                    f"{tensor.name}.{expert}": FileTensor(tensor.shape[1:], holder.layout.dtype)
                    for tensor in own
                },
            )


def optimizer_entries(holder: ModelParallelRank, rank: int) -> dict[str, Any]:
    """Return the optimizer-file entry that lists the ranks that partition each ZeRO-3 sub-group.

    DeepSpeed loads a sub-group only on these ranks.
    """
    if not holder.parts:
        return {}
    layout, found = holder.layout, []
    for number, group in enumerate(flat_tensors(holder.groups, layout)):
        expert, ep = group[0][0].expert, len(holder.ep_ranks(group[0][0]))
        found.append(
            {
                "sub_group": number,
                "partition_count": num_partitions(group, layout),
                "partition_rank": rank // ep,
                "partition_ranks": list(range(rank % ep, layout.partitions, ep)),
                "families": ["autoep_expert" if expert else "replicated"],
                "group_names": [f"ep_size_{ep}" if expert else "replicated"],
            }
        )
    return {"ds_zero_partition_groups": found}


def group_entries(holder: ModelParallelRank, tensor: Tensor) -> dict[str, Any]:
    """Return DeepSpeed's entries for an optimizer group that begins with `tensor`.

    Return {} unless the group contains sharded experts (moe/utils.py).
    """
    return (
        {"name": f"ep_size_{holder.layout.mesh.ep}", "moe": True}
        if holder.parts and tensor.expert
        else {}
    )
