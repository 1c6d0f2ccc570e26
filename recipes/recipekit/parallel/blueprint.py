"""A model as its checkpoints see it: which tensors it has, and which rank of a layout holds which
part of them.

Arithmetic only: nothing here imports torch, so a tool can plan for any cluster in no time.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from ..spec.mesh import Mesh
from ..spec.optimizer_specs import FACTORS, state_sizes
from .param_groups import FIRST, Group

# elements of an optimizer group of divided experts (DeepSpeed 0.19.8, moe/utils.py)
MOST_EXPERTS = 178_956_971


@dataclass(frozen=True)
class Tensor:
    """A parameter, or a buffer that checkpoints keep.

    `group` is the number of its optimizer group, None for a frozen parameter or a buffer. `cut` =
    (dim, blocks): tensor parallelism divides each of `blocks` equal blocks of dimension dim over
    the tensor ranks (a fused gate and up projection has two);
    None: every tensor rank has it whole. `place`: "first", "last" or "ends" (both) of the pipeline
    stages, "every", or the number of the layer it belongs to.
    """

    name: str
    shape: tuple[int, ...]
    group: int | None
    cut: tuple[int, int] | None = None
    place: str = "every"
    buffer: str = ""  # its dtype; empty for a parameter
    # of each tensor rank the indices of dim, where another program did the cutting
    ranges: tuple[tuple[tuple[int, int], ...], ...] = ()
    expert: bool = False  # dimension 0 counts experts, which expert parallelism can divide
    fresh: bool = False  # DeepSpeed makes it anew where experts are divided

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Stored:
    """Where published files hold a parameter: under one key, or stacked from a key for each expert
    and joined from several parts along `dim`.
    """

    parts: tuple[tuple[str, ...], ...]  # of each part the keys of its experts
    stacked: bool = False
    dim: int = 0


@dataclass(frozen=True)
class Block:
    """A module with experts that expert parallelism can divide.

    `renamed`: a tensor beside them -> its name in the module that DeepSpeed makes of it, in the
    order there; `aliases`: further names of those.
    """

    name: str
    renamed: dict[str, str]
    aliases: dict[str, str]


@dataclass(frozen=True)
class Blueprint:
    """A model without its layout. `tensors` in the order of the model's parameters, then buffers.

    `aliases`: further names of tied parameters, with their places. `num_layers` 0: no pipeline
    plan. `published`: of a model read from files, where those hold each tensor, and each file's
    keys with their dtypes (as safetensors names them). `blocks`: where its experts are; none if it
    has none, or DeepSpeed does not divide them. `groups`: what the numbers of optimizer groups
    mean. `adapter`: key in an adapter's file -> tensor; {} for other models, and for step folders
    older than this field.
    """

    tensors: tuple[Tensor, ...]
    aliases: dict[str, tuple[str, str]]  # alias -> (name, place of the alias)
    num_layers: int
    can_tp: bool
    published: dict[str, Stored] = dataclasses.field(default_factory=dict)
    # file -> {key: dtype}
    files: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    blocks: tuple[Block, ...] = ()
    groups: tuple[Group, ...] = FIRST
    adapter: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def num_experts(self) -> int:
        """The experts of a block, 0 if the model has none that can be divided."""
        return next((tensor.shape[0] for tensor in self.tensors if tensor.expert), 0)

    @property
    def trained(self) -> dict[str, Group]:
        """The group of each trained parameter."""
        return {
            tensor.name: self.groups[tensor.group]
            for tensor in self.tensors
            if tensor.group is not None
        }

    def states_of(self, tensor: Tensor, layout: "Layout") -> tuple[str, ...]:
        """The states that the optimizer keeps for a trained tensor, in fp32.

        Those of a group are the same, but for Adafactor's.
        """
        assert tensor.group is not None, f"{tensor.name} is not trained"
        if layout.factored:
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
            name: Stored(tuple(tuple(keys) for keys in item["parts"]), item["stacked"], item["dim"])
            for name, item in saved["published"].items()
        }
        # none before experts were converted
        blocks = tuple(Block(**item) for item in saved.get("blocks", ()))
        # there were no others before learning rates had scales
        groups = tuple(Group(**item) for item in saved.get("groups", ())) or FIRST
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
    """How a job holds a model.

    `optimizer` is DeepSpeed's class, "torch" where it leaves the plain one (see
    `default_optimizer`).
    """

    mesh: Mesh
    zero_stage: int
    optimizer: str
    dtype: str  # of the training copy of the weights: float32, bfloat16 or float16
    bounds: tuple[int, ...] = ()  # first layer of each pipeline stage, and the number of layers
    schedule: str = "1f1b"
    sub_group_size: int = 1_000_000_000
    int_step: bool = False  # DeepSpeed's own Adams count their steps in a Python int
    swapped: bool = False  # the optimizer's states lie in swap files (NVMe)
    swap_bytes: int = 1 << 20  # of the smallest flat tensor that does
    swap_align: int = 1024  # bytes; the files' sizes are multiples of it
    # DeepSpeed's number (ds_id) of the model's first parameter; the files are named after such
    # numbers
    swap_first: int = 0
    algorithm: str = "Adam"  # of the optimizer, as spec/optimizer_specs.py names it
    # what it keeps for a trained weight: fp32 tensors of its shape, or FACTORS
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    # what it keeps for its matrices in place of these; None: the same
    of_matrices: tuple[str, ...] | None = None
    scalars: tuple[str, ...] = ("step",)  # and single numbers, the same for all weights of a group

    @property
    def partitions(self) -> int:
        """Ranks that ZeRO divides a parameter over; sequence ranks are data ranks to it."""
        return self.mesh.dp * self.mesh.sp

    @property
    def kept(self) -> str:
        """What the optimizer keeps, in words."""
        return (", ".join(self.states) or "no states") + (
            f", of matrices {', '.join(self.of_matrices)}" if self.of_matrices is not None else ""
        )

    @property
    def factored(self) -> bool:
        """The states are those of Adafactor, which parallel/factors.py places."""
        return self.states == FACTORS

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(saved: dict[str, Any]) -> "Layout":
        """Reads a layout; one that names no optimizer was saved when there was Adam only."""
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


def default_optimizer(zero_stage: int, dtype: str) -> str:
    """The class that DeepSpeed 0.19.8 takes with the shipped JSONs (fp32 gradient accumulation)."""
    if zero_stage == 0:
        return "torch" if dtype == "float32" else "FP16_UnfusedOptimizer"
    if zero_stage == 3:
        return "DeepSpeedZeroOptimizer_Stage3"
    return "BF16_Optimizer" if zero_stage == 1 and dtype == "bfloat16" else "DeepSpeedZeroOptimizer"


# Pipeline
# --------------------------------------------------------------------------------------------------


def balance(costs: list[int], before: int, after: int, num_stages: int) -> tuple[int, ...]:
    """Bounds of `num_stages` runs of at least one layer whose largest cost is least, `before` on
    the first, `after` on the last.
    """
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # (stages, layers) -> (largest cost, where its last stage begins)
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
    """The bounds of the stages: the least possible largest number of parameters, every stage with
    at least one layer.
    """
    cost = dict.fromkeys(("first", "last", "ends", *map(str, range(blueprint.num_layers))), 0)
    for tensor in blueprint.tensors:
        if not tensor.buffer and tensor.place in cost:
            cost[tensor.place] += tensor.numel
    layers = [cost[str(number)] for number in range(blueprint.num_layers)]
    return balance(layers, cost["first"] + cost["ends"], cost["last"] + cost["ends"], num_stages)


def stages_of(pp_rank: int, pp: int, schedule: str) -> list[int]:
    """The stages that a pipeline rank holds: one, or under DualPipeV one on the way out and one on
    the way back.
    """
    return [pp_rank, 2 * pp - 1 - pp_rank] if schedule == "dualpipev" and pp > 1 else [pp_rank]


def on_stage(place: str, stage: int, bounds: tuple[int, ...]) -> bool:
    """Whether a stage holds what belongs to `place`."""
    last = len(bounds) - 2
    if place.isdecimal():
        return bounds[stage] <= int(place) < bounds[stage + 1]
    return (
        place == "every"
        or (stage == 0 and place in ("first", "ends"))
        or (stage == last and place in ("last", "ends"))
    )


def of_stage(blueprint: Blueprint, layout: Layout, stage: int) -> list[Tensor]:
    """The tensors of one pipeline stage, of the whole model without a pipeline."""
    if layout.mesh.pp == 1:
        return list(blueprint.tensors)
    return [tensor for tensor in blueprint.tensors if on_stage(tensor.place, stage, layout.bounds)]


def describe(blueprint: Blueprint, bounds: tuple[int, ...]) -> str:
    """One line that shows the split: layers and millions of parameters of each stage."""
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


def held(blueprint: Blueprint, layout: Layout, pp_rank: int) -> list[Tensor]:
    """The tensors of a pipeline rank in the order in which its optimizer sees them."""
    found: dict[str, Tensor] = {}
    for stage in stages_of(pp_rank, layout.mesh.pp, layout.schedule):
        for tensor in of_stage(blueprint, layout, stage):
            found.setdefault(tensor.name, tensor)
    return list(found.values())


def state_keys(blueprint: Blueprint, layout: Layout, stage: int) -> dict[str, Tensor]:
    """The keys of a stage's `state_dict()`: names and aliases -> tensor."""
    tensors = {tensor.name: tensor for tensor in of_stage(blueprint, layout, stage)}
    further = {
        alias: tensors[name]
        for alias, (name, place) in blueprint.aliases.items()
        if name in tensors and (layout.mesh.pp == 1 or on_stage(place, stage, layout.bounds))
    }
    return tensors | further


# Tensor parallelism
# -----------------------------------------------------------------------------------------------


def runs(tensor: Tensor, tp: int, tp_rank: int) -> list[tuple[int, int]]:
    """[(start, stop), ...]: which indices of the cut dimension a tensor rank keeps, in order.

    As `torch.chunk` divides each block.
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
    width = sum(stop - start for start, stop in runs(tensor, tp, tp_rank))
    return tuple(width if dim == tensor.cut[0] else size for dim, size in enumerate(tensor.shape))


# ZeRO
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extent:
    """Elements start..stop of a rank's shard lie in partition `rank` of flat tensor `index`, from
    `offset` (elements) on.
    """

    rank: int
    index: int
    offset: int
    start: int
    stop: int


def groups_of(
    tensors: list[Tensor], layout: Layout, tp_rank: int
) -> list[list[tuple[Tensor, int]]]:
    """The optimizer groups of a rank that has these tensors (`held`): [(tensor, elements of its
    shard), ...] in the order of the flat buffers.

    DeepSpeed leaves out what is frozen or has no element here; groups that would be empty are not
    made. Divided experts are split off each group, into groups of at most `MOST_EXPERTS` elements
    (moe/utils.py).
    """
    groups: dict[tuple[bool, int, int], list[tuple[Tensor, int]]] = {}
    # of the experts of each group: how many are full, and the elements of the last
    parts, sizes = Counter(), Counter()
    for tensor in tensors:
        numel = prod(local_shape(tensor, layout.mesh.tp, tp_rank))
        if tensor.group is None or not numel:
            continue
        divided = tensor.expert and layout.mesh.ep > 1
        if divided and sizes[tensor.group] and sizes[tensor.group] + numel > MOST_EXPERTS:
            parts[tensor.group] += 1
            sizes[tensor.group] = 0
        sizes[tensor.group] += numel * divided
        groups.setdefault((divided, tensor.group, parts[tensor.group] * divided), []).append(
            (tensor, numel)
        )
    return [groups[key] for key in sorted(groups)]


def holders_of(group: list[tuple[Tensor, int]], layout: Layout) -> int:
    """The ranks that ZeRO divides a group over: of divided experts those that hold the same
    ones.
    """
    return layout.partitions // (layout.mesh.ep if group[0][0].expert else 1)


def flat_groups(
    groups: list[list[tuple[Tensor, int]]], layout: Layout
) -> list[tuple[int, int, list[list[Extent]]]]:
    """The flat fp32 tensors that ZeRO makes of a rank's groups: (group, elements of one partition,
    extents of each tensor).

    ZeRO-1 and -2 concatenate a group and cut it into equal parts (stage_1_and_2.py,
    bf16_optimizer.py: the whole padded to a multiple of 2 x partitions). ZeRO-3 cuts each tensor
    into equal parts and concatenates those (stage3.py), in sub-groups.
    """
    flats: list[tuple[int, int, list[list[Extent]]]] = []
    for number, group in enumerate(groups):
        ranks = holders_of(group, layout)
        if layout.zero_stage < 3:
            total = sum(numel for _, numel in group)
            size = -(-total // (2 * ranks)) * 2
            extents, offset = [], 0
            for _, numel in group:
                extents.append(list(_cut(offset, numel, size, len(flats))))
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
    """The tensors of each flat tensor of `flat_groups`, in order."""
    if layout.zero_stage < 3:
        return groups
    return [sub_group for group in groups for sub_group in _zero3_groups(group, layout)]


def _cut(offset: int, numel: int, size: int, index: int) -> Iterator[Extent]:
    start = 0
    while start < numel:
        rank, inside = divmod(offset + start, size)
        stop = min(numel, start + size - inside)
        yield Extent(rank, index, inside, start, stop)
        start = stop


def _zero3_groups(
    group: list[tuple[Tensor, int]], layout: Layout
) -> Iterator[list[tuple[Tensor, int]]]:
    """The sub-groups of a group.

    What DeepSpeed made anew was not partitioned when the model was built, but by its optimizer,
    over a process group of the same ranks, and stage3.py's `_get_trainable_parameter_groups` tells
    the groups apart.
    """
    for fresh in (False, True):
        if own := [item for item in group if item[0].fresh == fresh]:
            yield from _sub_groups(own, holders_of(group, layout), layout.sub_group_size)


def _sub_groups(
    group: list[tuple[Tensor, int]], ranks: int, most: int
) -> Iterator[list[tuple[Tensor, int]]]:
    """As stage3.py's `_create_fp16_sub_groups`: whole tensors until their partitions reach `most`
    elements.
    """
    if sum(-(-numel // ranks) for _, numel in group) <= most:
        yield group
        return
    sub_group, size = [], 0
    for item in group:
        sub_group.append(item)
        size += -(-item[1] // ranks)
        if size >= most or item is group[-1]:
            yield sub_group
            sub_group, size = [], 0
