"""Each rank's contents, computed without ranks.

Shards are as in transformers, and partitions as in DeepSpeed.
"""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recipekit.architectures.families import tiny_config
from recipekit.model.describe import draft_blueprint
from recipekit.model.empty import empty_model
from recipekit.parallel import tensor as tensor_parallel
from recipekit.parallel.blueprint import (
    Blueprint,
    Layout,
    Tensor,
    flat_groups,
    flat_tensors,
    optimizer_groups,
    shard_ranges,
    stage_bounds,
    tensors_on_rank,
)
from recipekit.parallel.plans import published_plans
from recipekit.spec.mesh import Mesh

FAMILIES = (
    "llama",
    "phi3",
    "qwen3_moe",
    "mixtral",
    "gemma2",
    "olmo2",
    "deepseek_v3",
    "glm4",
    "qwen3",
)


def cut_by_transformers(
    families: tuple[str, ...],
) -> dict[str, dict[str, tuple[int, list[tuple[int, int]]]]]:
    """Return family -> parameter -> (dim, ranges) of this rank, as transformers shards the model.

    The model uses transformers' tensor parallelism. This function runs on a rank of a pool.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())), mesh_dim_names=("tp",))
    found = {}
    for family in families:
        model = empty_model(tiny_config(family, 264), "eager")
        cuts = tensor_parallel.apply_tensor_parallel(model, mesh, published_plans(model))
        found[family] = {
            name: tensor_parallel.local_shard_ranges(cut, mesh)
            for name, cut in cuts.items()
            if cut.sharded
        }
    return found


@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_cuts_are_those_that_transformers_makes(pools, tp):
    ranks = pools.run(tp, cut_by_transformers, families=FAMILIES)
    for family in FAMILIES:
        tensors = {
            tensor.name: tensor
            for tensor in draft_blueprint(empty_model(tiny_config(family, 264), "eager")).tensors
        }
        assert {name for name, tensor in tensors.items() if tensor.cut} == set(ranks[0][family])
        for rank, found in enumerate(ranks):
            for name, (dim, own) in found[family].items():
                assert tensors[name].cut is not None and tensors[name].cut[0] == dim
                assert shard_ranges(tensors[name], tp, rank) == own, (family, name, rank)


def model(sizes: list[int], layers: int) -> Blueprint:
    tensors = [
        Tensor(f"t{number}", (size,), number % 2, place=str(number % layers))
        for number, size in enumerate(sizes)
    ]
    return Blueprint(tuple(tensors), {}, layers, False)


@given(
    st.lists(st.integers(1, 40), min_size=4, max_size=12),
    st.integers(1, 6),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([5, 30, 10**9]),
)
def test_every_element_lies_in_exactly_one_place(sizes, dp, zero, sub_group_size):
    blueprint = model(sizes, 1)
    layout = Layout(Mesh(dp=dp), zero, "", "float32", sub_group_size=sub_group_size)
    groups = optimizer_groups(tensors_on_rank(blueprint, layout, 0), layout, 0)
    seen: dict[tuple[int, int, int], str] = {}
    for (_, size, extents), tensors in zip(
        flat_groups(groups, layout), flat_tensors(groups, layout), strict=True
    ):
        for (tensor, numel), pieces in zip(tensors, extents, strict=True):
            assert [piece.start for piece in pieces] == [
                0,
                *(piece.stop for piece in pieces[:-1]),
            ] and pieces[-1].stop == numel
            for piece in pieces:
                for element in range(piece.stop - piece.start):
                    assert piece.offset + element < size and piece.rank < dp
                    assert (
                        seen.setdefault(
                            (piece.rank, piece.index, piece.offset + element), tensor.name
                        )
                        == tensor.name
                    )
    assert len(seen) == sum(sizes)


def test_a_blueprint_survives_json():
    whole = draft_blueprint(empty_model(tiny_config("qwen3_moe", 264), "eager"))
    assert Blueprint.from_json(json.loads(json.dumps(whole.to_json()))) == whole
    layout = Layout(Mesh(dp=2, pp=2), 1, "BF16_Optimizer", "bfloat16", stage_bounds(whole, 2))
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_buffers_and_ties_are_in_it():
    whole = empty_model(tiny_config("gemma2", 264), "eager")
    blueprint = draft_blueprint(whole)
    assert [tensor.name for tensor in blueprint.tensors if not tensor.buffer] == [
        name for name, _ in whole.named_parameters()
    ]
    assert blueprint.aliases == {"lm_head.weight": ("model.embed_tokens.weight", "last")}
    assert {tensor.name for tensor in blueprint.tensors} | set(blueprint.aliases) == set(
        whole.state_dict()
    )
    assert (
        next(tensor for tensor in blueprint.tensors if "embed_tokens" in tensor.name).place
        == "ends"
    )
    assert (
        torch.Size(blueprint.tensors[0].shape)
        == whole.get_parameter(blueprint.tensors[0].name).shape
    )


@given(st.integers(1, 20), st.integers(1, 2), st.integers(1, 5))
def test_an_uneven_block_is_cut_as_torch_chunks_it(block, blocks, tp):
    tensor, numbers = (
        Tensor("t", (block * blocks,), 0, cut=(0, blocks)),
        torch.arange(block * blocks).view(blocks, block),
    )
    for tp_rank in range(tp):
        own = [
            chunks[tp_rank].tolist() for row in numbers if len(chunks := row.chunk(tp)) > tp_rank
        ]
        assert [
            list(range(start, stop)) for start, stop in shard_ranges(tensor, tp, tp_rank)
        ] == own


@given(st.lists(st.integers(1, 40), min_size=2, max_size=8), st.integers(1, 6))
def test_a_partition_has_an_even_number_of_elements(sizes, dp):
    """DeepSpeed pads a group to a multiple of 2 x partitions, and then splits the group.

    Source: nccl_start_alignment_factor in stage_1_and_2.py.
    """
    blueprint, layout = model(sizes, 1), Layout(Mesh(dp=dp), 1, "", "float32")
    groups = optimizer_groups(tensors_on_rank(blueprint, layout, 0), layout, 0)
    for group, (_, size, _) in zip(groups, flat_groups(groups, layout), strict=True):
        total = sum(numel for _, numel in group)
        assert size % 2 == 0 and total <= size * dp < total + 2 * dp
