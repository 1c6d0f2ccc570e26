"""Description of a model as its checkpoints see it: its tensors, and how a layout shards them.

This module is arithmetic only. Nothing here imports torch, so a tool can quickly plan for any
cluster.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from ..spec.mesh import Mesh
from ..spec.optimizer_specs import ADAFACTOR_STATES, state_sizes
from .param_groups import DEFAULT_GROUPS, ParamGroup, order_groups

# maximum number of elements in an optimizer group of sharded experts (DeepSpeed 0.19.8,
# moe/utils.py)
MAX_EXPERT_GROUP_NUMEL = 178_956_971


@dataclass(frozen=True)
class Tensor:
    """A parameter, or a buffer that checkpoints store.

    `group` is the number of the tensor's optimizer group, or None for a frozen parameter or a
    buffer.

    `cut` = (dim, blocks) means that dimension dim consists of `blocks` equal blocks, and tensor
    parallelism shards each block. For example, a fused gate and up projection has two blocks. If
    `cut` is None, every tensor-parallel rank stores the full tensor.

    `place` is "first", "last" or "ends" (both) of the pipeline stages, "every", or the number of
    the tensor's layer.

    `dtype` is "float32" for a parameter that stays in fp32 in a bf16 model. If it is empty, a
    parameter has the layout's dtype.
    """

    name: str
    shape: tuple[int, ...]
    group: int | None
    cut: tuple[int, int] | None = None
    place: str = "every"
    buffer: str = ""  # dtype of a buffer, empty for a parameter
    # each tensor rank's index ranges of dim, if a different program did the sharding
    ranges: tuple[tuple[tuple[int, int], ...], ...] = ()
    expert: bool = False  # dimension 0 counts experts, which expert parallelism can shard
    fresh: bool = False  # DeepSpeed recreates this tensor when experts are sharded
    dtype: str = ""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class PublishedTensor:
    """Location of a parameter in published files.

    The location is one key, one key per expert (the values are stacked), or several parts joined
    along `dim`.
    """

    parts: tuple[tuple[str, ...], ...]  # for each part the keys of its experts
    stacked: bool = False
    dim: int = 0


@dataclass(frozen=True)
class MoEBlock:
    """A module with experts that expert parallelism can shard.

    `renamed` maps each tensor next to the experts to its name in DeepSpeed's module, in DeepSpeed's
    order. `aliases` contains further names of these tensors.
    """

    name: str
    renamed: dict[str, str]
    aliases: dict[str, str]


@dataclass(frozen=True)
class Blueprint:
    """A model without its layout.

    - `tensors` contains the parameters in the model's order, and then the buffers.
    - `aliases` contains further names of tied parameters, with their places.
    - `num_layers` is 0 without a pipeline plan.
    - `published` contains each tensor's location if the model was read from files.
    - `files` maps each file that was read to its keys and their dtypes (as safetensors names them).
    - `blocks` contains the modules with experts. It is empty if DeepSpeed cannot shard them or if
      the model has no experts.
    - `groups` contains the optimizer groups, by number.
    - `adapter` maps the keys in an adapter's file to tensors. It is {} for other models, and for
      step folders older than this field.
    """

    tensors: tuple[Tensor, ...]
    aliases: dict[str, tuple[str, str]]  # alias -> (name, place of the alias)
    num_layers: int
    can_tp: bool
    published: dict[str, PublishedTensor] = dataclasses.field(default_factory=dict)
    # file -> {key: dtype}
    files: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    blocks: tuple[MoEBlock, ...] = ()
    groups: tuple[ParamGroup, ...] = DEFAULT_GROUPS
    adapter: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def num_experts(self) -> int:
        """Return the number of shardable experts in a block, or 0 without shardable experts."""
        return next((tensor.shape[0] for tensor in self.tensors if tensor.expert), 0)

    @property
    def trained(self) -> dict[str, ParamGroup]:
        """Return the group of each trained parameter."""
        return {
            tensor.name: self.groups[tensor.group]
            for tensor in self.tensors
            if tensor.group is not None
        }

    def states_of(self, tensor: Tensor, layout: "Layout") -> tuple[str, ...]:
        """Return the states that the optimizer stores for a trained tensor, in fp32.

        All tensors in a group have the same states, except with Adafactor.
        """
        assert tensor.group is not None, f"{tensor.name} is not trained"
        if layout.uses_adafactor:
            return tuple(state_sizes(tensor.shape, tensor.numel))
        return (
            layout.states
            if layout.of_matrices is None or not self.groups[tensor.group].matrix
            else layout.of_matrices
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(saved: dict[str, Any]) -> "Blueprint":
        tensors = tuple(
            Tensor(
                **(
                    item
                    | {
                        "shape": tuple(item["shape"]),
                        "cut": tuple(item["cut"]) if item["cut"] else None,
                        "ranges": (),
                    }
                )
            )
            for item in saved["tensors"]
        )
        stored = {
            name: PublishedTensor(
                tuple(tuple(keys) for keys in item["parts"]), item["stacked"], item["dim"]
            )
            for name, item in saved["published"].items()
        }
        # missing in files that were written before experts were converted
        blocks = tuple(MoEBlock(**item) for item in saved.get("blocks", ()))
        # missing in files that were written before lr_scale existed
        groups = tuple(ParamGroup(**item) for item in saved.get("groups", ())) or DEFAULT_GROUPS
        aliases = {alias: tuple(of) for alias, of in saved["aliases"].items()}
        return Blueprint(
            **(
                saved
                | {
                    "tensors": tensors,
                    "published": stored,
                    "aliases": aliases,
                    "blocks": blocks,
                    "groups": groups,
                }
            )
        )


@dataclass(frozen=True)
class Layout:
    """The sharding and storage of a model in one job.

    `optimizer` is DeepSpeed's optimizer class, or "torch" if DeepSpeed uses the plain optimizer
    (see `default_optimizer`).
    """

    mesh: Mesh
    zero_stage: int
    optimizer: str
    dtype: str  # of the trained copy of the weights: float32, bfloat16 or float16
    bounds: tuple[int, ...] = ()  # first layer of each pipeline stage, then the number of layers
    schedule: str = "1f1b"
    sub_group_size: int = 1_000_000_000
    int_step: bool = False  # DeepSpeed's own Adams count steps in a Python int
    swapped: bool = False  # the optimizer's states are in swap files (NVMe)
    swap_bytes: int = 1 << 20  # size of the smallest flat tensor that is swapped
    swap_align: int = 1024  # bytes; file sizes are multiples of it
    # DeepSpeed's number (ds_id) for the model's first parameter. The swap files are named after
    # these numbers.
    swap_first: int = 0
    algorithm: str = "Adam"  # the optimizer's name in spec/optimizer_specs.py
    # a trained weight's states: fp32 tensors of its shape, or FACTORS
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    # states of a matrix, if they differ from `states`
    of_matrices: tuple[str, ...] | None = None
    scalars: tuple[str, ...] = ("step",)  # single numbers, the same for all weights in a group

    @property
    def partitions(self) -> int:
        """Return the number of ZeRO partitions of a parameter.

        ZeRO treats sequence-parallel ranks as data-parallel ranks.
        """
        return self.mesh.dp * self.mesh.sp

    @property
    def states_text(self) -> str:
        """Return a text that lists the optimizer's states."""
        return (", ".join(self.states) or "no states") + (
            f", of matrices {', '.join(self.of_matrices)}" if self.of_matrices is not None else ""
        )

    @property
    def uses_adafactor(self) -> bool:
        """Return True if the states are Adafactor's, which parallel/adafactor_state_map.py maps."""
        return self.states == ADAFACTOR_STATES

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(saved: dict[str, Any]) -> "Layout":
        """Read a layout. Without an optimizer name it is from a time when there was only Adam."""
        made: dict[str, Any] = {
            name: tuple(saved[name])
            for name in ("bounds", "states", "of_matrices", "scalars")
            if saved.get(name) is not None
        }
        made["mesh"] = Mesh(**saved["mesh"])
        return Layout(**(saved | made))

    def __str__(self) -> str:
        kept = f"{self.dtype}, {self.optimizer}" + (
            f" of {self.algorithm}" if self.algorithm != "Adam" else ""
        )
        return f"{self.mesh}, ZeRO-{self.zero_stage}, {kept}" + (
            f", {self.schedule} {list(self.bounds)}" if self.bounds else ""
        )


def keeps_fp32(layout: Layout) -> bool:
    """Return True if bf16 training in this layout may keep parameters in fp32.

    model/fp32_parameters.py decides for a run, with the reasons.
    """
    return layout.dtype == "bfloat16" and layout.zero_stage < 3 and layout.mesh.ep == 1


def blueprint_in(layout: Layout, blueprint: Blueprint) -> Blueprint:
    """Return a checkpoint's blueprint for a different layout, which may not keep fp32 parameters.

    Their groups are then merged into the groups with the same rules.
    """
    if keeps_fp32(layout) or not any(tensor.dtype for tensor in blueprint.tensors):
        return blueprint
    trained = {
        name: dataclasses.replace(group, fp32=False) for name, group in blueprint.trained.items()
    }
    groups = order_groups(trained.values())
    tensors = tuple(
        dataclasses.replace(
            tensor,
            dtype="",
            group=groups.index(trained[tensor.name]) if tensor.name in trained else None,
        )
        for tensor in blueprint.tensors
    )
    return dataclasses.replace(blueprint, tensors=tensors, groups=groups)


def weight_dtype(tensor: Tensor, layout: Layout) -> str:
    """Return the dtype of a parameter or buffer in a layout."""
    return tensor.buffer or tensor.dtype or layout.dtype


def default_optimizer(zero_stage: int, dtype: str) -> str:
    """Return DeepSpeed 0.19.8's optimizer class for the shipped JSONs.

    The shipped JSONs accumulate gradients in fp32.
    """
    if zero_stage == 0:
        return "torch" if dtype == "float32" else "FP16_UnfusedOptimizer"
    if zero_stage == 3:
        return "DeepSpeedZeroOptimizer_Stage3"
    return "BF16_Optimizer" if zero_stage == 1 and dtype == "bfloat16" else "DeepSpeedZeroOptimizer"


# Pipeline
# --------------------------------------------------------------------------------------------------


def balance_stages(costs: list[int], before: int, after: int, num_stages: int) -> tuple[int, ...]:
    """Return the bounds of `num_stages` stages that minimize the largest cost of any stage.

    Each stage has at least one layer. `before` is an extra cost of the first stage, and `after` is
    an extra cost of the last stage.
    """
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # (stages, layers) -> (largest cost, first layer of the last stage)
    best: dict[tuple[int, int], tuple[float, int]] = {}
    for stages in range(1, num_stages + 1):
        for end in range(stages, len(costs) - (num_stages - stages) + 1):
            starts = range(stages - 1, end) if stages > 1 else (0,)
            best[stages, end] = min(
                (
                    max(
                        best[stages - 1, start][0] if stages > 1 else 0,
                        sums[end]
                        - sums[start]
                        + (before if stages == 1 else 0)
                        + (after if stages == num_stages else 0),
                    ),
                    start,
                )
                for start in starts
            )
    bounds = [len(costs)]
    for stages in range(num_stages, 0, -1):
        bounds.append(best[stages, bounds[-1]][1])
    return tuple(reversed(bounds))


def stage_bounds(blueprint: Blueprint, num_stages: int) -> tuple[int, ...]:
    """Return stage bounds that minimize the largest number of parameters on any stage.

    Every stage has at least one layer.
    """
    cost = dict.fromkeys(("first", "last", "ends", *map(str, range(blueprint.num_layers))), 0)
    for tensor in blueprint.tensors:
        if not tensor.buffer and tensor.place in cost:
            cost[tensor.place] += tensor.numel
    layers = [cost[str(number)] for number in range(blueprint.num_layers)]
    return balance_stages(
        layers, cost["first"] + cost["ends"], cost["last"] + cost["ends"], num_stages
    )


def stages_of_rank(pp_rank: int, pp: int, schedule: str) -> list[int]:
    """Return the stages of a pipeline rank: one stage, or two under DualPipeV.

    DualPipeV gives each rank one stage on the way out and one on the way back.
    """
    return [pp_rank, 2 * pp - 1 - pp_rank] if schedule == "dualpipev" and pp > 1 else [pp_rank]


def on_stage(place: str, stage: int, bounds: tuple[int, ...]) -> bool:
    """Return True if a stage stores the tensors with this `place`."""
    last = len(bounds) - 2
    if place.isdecimal():
        return bounds[stage] <= int(place) < bounds[stage + 1]
    return (
        place == "every"
        or (stage == 0 and place in ("first", "ends"))
        or (stage == last and place in ("last", "ends"))
    )


def tensors_of_stage(blueprint: Blueprint, layout: Layout, stage: int) -> list[Tensor]:
    """Return the tensors of one pipeline stage, or of the full model if there is no pipeline."""
    if layout.mesh.pp == 1:
        return list(blueprint.tensors)
    return [tensor for tensor in blueprint.tensors if on_stage(tensor.place, stage, layout.bounds)]


def describe_stages(blueprint: Blueprint, bounds: tuple[int, ...]) -> str:
    """Return one line that shows each stage's layers and its parameters in millions."""
    texts = []
    for stage, (start, stop) in enumerate(itertools.pairwise(bounds)):
        numel = sum(
            tensor.numel
            for tensor in blueprint.tensors
            if not tensor.buffer and on_stage(tensor.place, stage, bounds)
        )
        texts.append(
            f"stage {stage} layers {start if stop - start == 1 else f'{start}-{stop - 1}'}"
            f" ({numel / 1e6:.1f} M)"
        )
    return ", ".join(texts)


def tensors_on_rank(blueprint: Blueprint, layout: Layout, pp_rank: int) -> list[Tensor]:
    """Return a pipeline rank's tensors in the order of its optimizer."""
    found: dict[str, Tensor] = {}
    for stage in stages_of_rank(pp_rank, layout.mesh.pp, layout.schedule):
        for tensor in tensors_of_stage(blueprint, layout, stage):
            found.setdefault(tensor.name, tensor)
    return list(found.values())


def state_keys(blueprint: Blueprint, layout: Layout, stage: int) -> dict[str, Tensor]:
    """Return the keys of a stage's `state_dict()`: names and aliases -> tensor."""
    tensors = {tensor.name: tensor for tensor in tensors_of_stage(blueprint, layout, stage)}
    further = {
        alias: tensors[name]
        for alias, (name, place) in blueprint.aliases.items()
        if name in tensors and (layout.mesh.pp == 1 or on_stage(place, stage, layout.bounds))
    }
    return tensors | further


# Tensor parallelism
# -----------------------------------------------------------------------------------------------


def shard_ranges(tensor: Tensor, tp: int, tp_rank: int) -> list[tuple[int, int]]:
    """Return [(start, stop), ...]: a tensor rank's index ranges of the sharded dim, in order.

    Each block is split as `torch.chunk` would split it.
    """
    assert tensor.cut is not None
    if tensor.ranges:
        return list(tensor.ranges[tp_rank])
    dim, blocks = tensor.cut
    block = tensor.shape[dim] // blocks
    size = -(-block // tp)
    start, stop = min(tp_rank * size, block), min((tp_rank + 1) * size, block)
    return (
        [(number * block + start, number * block + stop) for number in range(blocks)]
        if start < stop
        else []
    )


def local_shape(tensor: Tensor, tp: int, tp_rank: int) -> tuple[int, ...]:
    if tensor.cut is None or tp == 1:
        return tensor.shape
    width = sum(stop - start for start, stop in shard_ranges(tensor, tp, tp_rank))
    return tuple(width if dim == tensor.cut[0] else size for dim, size in enumerate(tensor.shape))


# ZeRO
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extent:
    """Location of elements start..stop of a rank's shard.

    The elements are in partition `rank` of flat tensor `index`, beginning at `offset` (in
    elements).
    """

    rank: int
    index: int
    offset: int
    start: int
    stop: int


def optimizer_groups(
    tensors: list[Tensor], layout: Layout, tp_rank: int
) -> list[list[tuple[Tensor, int]]]:
    """Return the optimizer groups of a rank with the given tensors (from `tensors_on_rank`).

    Each group is [(tensor, elements of its shard), ...] in the order of the flat buffers. DeepSpeed
    omits frozen tensors, tensors without elements on the rank, and empty groups. DeepSpeed also
    moves sharded experts from each group into separate groups of at most `MAX_EXPERT_GROUP_NUMEL`
    elements (moe/utils.py).
    """
    groups: dict[tuple[bool, int, int], list[tuple[Tensor, int]]] = {}
    # for each group's experts: the number of full groups, and the number of elements in the last
    # group
    parts, sizes = Counter(), Counter()
    for tensor in tensors:
        numel = prod(local_shape(tensor, layout.mesh.tp, tp_rank))
        if tensor.group is None or not numel:
            continue
        divided = tensor.expert and layout.mesh.ep > 1
        if divided and sizes[tensor.group] and sizes[tensor.group] + numel > MAX_EXPERT_GROUP_NUMEL:
            parts[tensor.group] += 1
            sizes[tensor.group] = 0
        sizes[tensor.group] += numel * divided
        groups.setdefault((divided, tensor.group, parts[tensor.group] * divided), []).append(
            (tensor, numel)
        )
    return [groups[key] for key in sorted(groups)]


def num_partitions(group: list[tuple[Tensor, int]], layout: Layout) -> int:
    """Return the number of ranks over which ZeRO partitions a group.

    For sharded experts these are the ranks that store the same experts.
    """
    return layout.partitions // (layout.mesh.ep if group[0][0].expert else 1)


def flat_groups(
    groups: list[list[tuple[Tensor, int]]], layout: Layout
) -> list[tuple[int, int, list[list[Extent]]]]:
    """Return ZeRO's flat fp32 tensors: (group, elements of one partition, extents of each tensor).

    ZeRO-1 and -2 concatenate the tensors of a group and split the result into equal parts. The
    total is padded to a multiple of 2 x partitions (stage_1_and_2.py, bf16_optimizer.py). ZeRO-3
    splits each tensor into equal parts and concatenates the parts in sub-groups (stage3.py).
    """
    flats: list[tuple[int, int, list[list[Extent]]]] = []
    for number, group in enumerate(groups):
        ranks = num_partitions(group, layout)
        if layout.zero_stage < 3:
            total = sum(numel for _, numel in group)
            size = -(-total // (2 * ranks)) * 2
            extents, offset = [], 0
            for _, numel in group:
                extents.append(list(_partition_extents(offset, numel, size, len(flats))))
                offset += numel
            flats.append((number, size, extents))
            continue
        for sub_group in _zero3_groups(group, layout):
            extents, offset = [], 0
            for _, numel in sub_group:
                part = -(-numel // ranks)
                pieces = [
                    (rank, rank * part, min((rank + 1) * part, numel)) for rank in range(ranks)
                ]
                extents.append(
                    [
                        Extent(rank, len(flats), offset, start, stop)
                        for rank, start, stop in pieces
                        if start < stop
                    ]
                )
                offset += part
            flats.append((number, offset, extents))
    return flats


def flat_tensors(
    groups: list[list[tuple[Tensor, int]]], layout: Layout
) -> list[list[tuple[Tensor, int]]]:
    """Return the tensors that each flat tensor from `flat_groups` contains, in order."""
    if layout.zero_stage < 3:
        return groups
    return [sub_group for group in groups for sub_group in _zero3_groups(group, layout)]


def _partition_extents(offset: int, numel: int, size: int, index: int) -> Iterator[Extent]:
    start = 0
    while start < numel:
        rank, inside = divmod(offset + start, size)
        stop = min(numel, start + size - inside)
        yield Extent(rank, index, inside, start, stop)
        start = stop


def _zero3_groups(
    group: list[tuple[Tensor, int]], layout: Layout
) -> Iterator[list[tuple[Tensor, int]]]:
    """Yield the sub-groups of a group.

    Tensors that DeepSpeed created itself were not partitioned when the model was built. DeepSpeed's
    optimizer partitions these tensors over a different process group of the same ranks. stage3.py's
    `_get_trainable_parameter_groups` therefore separates the two kinds.
    """
    for fresh in (False, True):
        if own := [item for item in group if item[0].fresh == fresh]:
            yield from _sub_groups(own, num_partitions(group, layout), layout.sub_group_size)


def _sub_groups(
    group: list[tuple[Tensor, int]], ranks: int, max_numel: int
) -> Iterator[list[tuple[Tensor, int]]]:
    """Yield groups of full tensors whose partitions reach `max_numel` elements.

    This follows `_create_fp16_sub_groups` in stage3.py.
    """
    if sum(-(-numel // ranks) for _, numel in group) <= max_numel:
        yield group
        return
    sub_group, size = [], 0
    for item in group:
        sub_group.append(item)
        size += -(-item[1] // ranks)
        if size >= max_numel or item is group[-1]:
            yield sub_group
            sub_group, size = [], 0
