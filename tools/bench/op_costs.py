"""Counts bytes and FLOPs of every operation that torch runs, on tensors that need no memory
(FakeTensorMode).

Eager PyTorch fuses nothing: an operation reads its inputs from the device's memory and writes its
outputs there. So its bytes are those of all tensors that it reads and writes; a view moves none.
FLOPs are torch's own formulas (torch.utils.flop_counter), a multiply-add as two; what has no
formula counts as none, which is right for all but matrix products, attention and convolutions.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

FORWARD, RECOMPUTATION, BACKWARD, OPTIMIZER = "forward", "recomputation", "backward", "optimizer"
ALLOCATE = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
}
OVERWRITE = {"copy_", "fill_", "zero_"}  # do not read what they write to
# read of their first tensor only what they return or are asked for
LOOK_UP = {"embedding", "gather", "index", "index_select", "nll_loss_forward"}
# change of their first tensor only what their index names
TOUCH = {"scatter_", "scatter_add_", "index_put_", "index_add_"}
NOT_READ = {"nll_loss_backward": 1}  # place of a tensor that only gives its shape
# namespaces whose operations have a formula, or no FLOPs that count
SCALAR_FREE = ("aten", "prim", "profiler")

Formula = Callable[[tuple[Any, ...], dict[str, Any], Any], float]  # (args, kwargs, result) -> FLOPs


@dataclass(frozen=True)
class Operation:
    """Describes one operation: `shapes` of the tensors that it takes, `bytes` that it reads and
    writes, `where`: names of files and functions that called it.

    `reads`, `writes`: (number of a storage, bytes of it), which add up to `bytes`.
    """

    name: str
    stage: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    flops: float
    where: frozenset[str]
    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()


def _cpu_attention(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    return sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)


def _cpu_attention_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    return sdpa_backward_flop_count(args[0].shape, args[1].shape, args[2].shape, args[3].shape)


CPU_FORMULAS: dict[str, Formula] = {  # torch 2.13's counter knows the CUDA kernels only
    "aten._scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _cpu_attention_backward,
}


class Costs(TorchDispatchMode):
    """Lists the operations that run while it is on.

    `stage` is forward, backward or optimizer, as set from outside; a forward that a backward runs
    is recomputation.

    `formulas` add FLOPs by the operation's name. Raises ValueError for an operation of another
    library that has none.
    """

    def __init__(self, formulas: Mapping[str, Formula] | None = None) -> None:
        super().__init__()
        self.formulas, self.stage, self.found = (
            {**CPU_FORMULAS, **(formulas or {})},
            FORWARD,
            list[Operation](),
        )
        # of the storages: an address comes again when a storage has gone
        self._numbers: dict[int, int] = {}
        self._next = count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        flops = self._flops(func, args, kwargs, result)
        taken = {_storage(value) for value in tree_leaves((args, kwargs)) if torch.is_tensor(value)}
        for home in {
            _storage(value) for value in tree_leaves(result) if torch.is_tensor(value)
        } - taken:
            self._numbers[home] = next(self._next)
        reads, writes = traffic_of(func, args, kwargs, result)
        moved = sum(reads.values()) + sum(writes.values())
        if moved or flops:
            where = callers()
            stage = (
                RECOMPUTATION if self.stage == BACKWARD and "recompute_fn" in where else self.stage
            )
            shapes = tuple(
                tuple(value.shape)
                for value in tree_leaves((args, kwargs))
                if torch.is_tensor(value)
            )
            self.found.append(
                Operation(
                    name_of(func),
                    stage,
                    shapes,
                    moved,
                    flops,
                    where,
                    self._numbered(reads),
                    self._numbered(writes),
                )
            )
        return result

    def _numbered(self, traffic: dict[int, int]) -> tuple[tuple[int, int], ...]:
        for home in traffic:
            if home not in self._numbers:  # it was there before
                self._numbers[home] = next(self._next)
        return tuple((self._numbers[home], size) for home, size in traffic.items())

    def _flops(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        if formula := self.formulas.get(name_of(func)):
            return formula(args, kwargs, result)
        if func._overloadpacket in flop_registry:
            return flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)
        if func.namespace not in SCALAR_FREE:
            raise ValueError(f"{name_of(func)} has no formula for its FLOPs")
        return 0.0


def name_of(func: Any) -> str:
    return f"{func.namespace}.{func._schema.name.split('::')[1]}"


def bytes_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Counts the bytes that an operation reads and writes: of each tensor once, an expanded one as
    large as it is in memory.
    """
    return sum(sum(traffic.values()) for traffic in traffic_of(func, args, kwargs, result))


def traffic_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[dict[int, int], dict[int, int]]:
    """Count the bytes that an operation (reads, writes), by the address of the storage."""
    name = name_of(func).partition(".")[2]
    given = _given(func, args, kwargs)
    made = [value for value in tree_leaves(result) if torch.is_tensor(value)]
    homes = {_storage(tensor) for tensor, _ in given}

    # An allocation, a view and a question, such as for the device, move no bytes.
    views = bool(made) and all(_storage(tensor) in homes for tensor in made)
    changes = any(changed for _, changed in given)
    if name in ALLOCATE or (not changes and (views or not made)):
        return Counter[int](), Counter[int]()
    if name in TOUCH:
        return _traffic_of_touch(given)

    reads, writes = Counter[int](), Counter[int]()
    for number, (tensor, changed) in enumerate(given):
        size = size_of(tensor)
        if name in LOOK_UP and number == 0:
            size = min(size, _size_asked_for(tensor, made, given))
        if NOT_READ.get(name) == number:
            size = 0

        if not (changed and name in OVERWRITE):
            reads[_storage(tensor)] += size
        if changed:
            writes[_storage(tensor)] += size
    for tensor in made:
        if _storage(tensor) not in homes:
            writes[_storage(tensor)] += size_of(tensor)
    return reads, writes


def _size_asked_for(
    table: torch.Tensor, made: list[torch.Tensor], given: list[tuple[torch.Tensor, bool]]
) -> int:
    """Count the bytes of a table that a look-up returns or is asked for."""
    asked = [value.numel() for value in made] + [other.numel() for other, _ in given[1:2]]
    return max(asked) * table.element_size()


def _traffic_of_touch(
    given: list[tuple[torch.Tensor, bool]],
) -> tuple[dict[int, int], dict[int, int]]:
    """Count the bytes of an operation that changes only what its index names."""
    reads, writes = Counter[int](), Counter[int]()
    rest = [tensor for tensor, changed in given if not changed]
    target = given[0][0]
    touched = max(tensor.numel() for tensor in rest) * target.element_size() if rest else 0

    for tensor in rest:
        reads[_storage(tensor)] += size_of(tensor)
    reads[_storage(target)] += touched
    writes[_storage(target)] += touched
    return reads, writes


def size_of(tensor: torch.Tensor) -> int:
    """Counts the bytes of the elements that lie in different places."""
    return tensor.element_size() * prod(
        size
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if stride != 0 or size == 0
    )


def _given(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[torch.Tensor, bool]]:
    """Lists the tensors that an operation takes, each once, and whether it writes to them."""
    found: dict[int, tuple[torch.Tensor, bool]] = {}
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        changed = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tree_leaves(value):
            if torch.is_tensor(tensor):
                found[id(tensor)] = (tensor, changed or found.get(id(tensor), (tensor, False))[1])
    return list(found.values())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def callers() -> frozenset[str]:
    """Names the files and functions on the stack, without folders."""
    found, frame = set(), sys._getframe(2)
    while frame is not None:
        found |= {frame.f_code.co_filename.rpartition("/")[2], frame.f_code.co_name}
        frame = frame.f_back
    return frozenset(found)


Value = tuple[int, int]  # content of a storage: (number of the storage, how often it was written)


@dataclass
class _Unit:
    """A kernel: consecutive operations that a compiler fuses, or one operation."""

    operation: Operation  # the first
    place: int
    run: str
    reads: dict[Value, int] = field(default_factory=dict)  # bytes; not what the unit itself made
    made: dict[Value, int] = field(default_factory=dict)  # bytes


def fused(operations: Sequence[Operation], runs: Sequence[str]) -> list[tuple[int, Operation]]:
    """Count the bytes again, as if consecutive operations of one run were one kernel; return
    (place of a run's first operation, the operation).

    `runs`: for each operation a name, "" for one that stays by itself. A run reads once what it has
    not made, and writes what is read later. If a run of the forward pass has made a value for a run
    of the backward pass alone, the cheaper is counted: the value is written and read, or computed
    again from what the first run read.
    """
    units = _units(operations, runs)
    kept, later = _written_values(units)

    recomputed, more = defaultdict[int, set[Value]](set), Counter[int]()
    for (made_by, number), values in later.items():
        absent = [value for value in values if value not in kept]
        recomputed[number].update(absent)

        # The bytes of writing and reading the values, against reading the inputs again.
        saved = 2 * sum(units[number].reads[value] for value in absent)
        again = sum(
            size for value, size in units[made_by].reads.items() if value not in units[number].reads
        )
        more[number] += min(saved, again)

    found = []
    for number, unit in enumerate(units):
        if not unit.run:
            found.append((unit.place, unit.operation))
            continue
        moved = sum(size for value, size in unit.reads.items() if value not in recomputed[number])
        moved += sum(size for value, size in unit.made.items() if value in kept) + more[number]
        found.append(
            (unit.place, Operation("fused", unit.operation.stage, (), moved, 0.0, frozenset()))
        )
    return found


def _units(operations: Sequence[Operation], runs: Sequence[str]) -> list[_Unit]:
    """Group consecutive operations of one run and stage, with the values that they exchange."""
    units, writes = list[_Unit](), Counter[int]()
    for place, (operation, run) in enumerate(zip(operations, runs, strict=True)):
        last = units[-1] if units else None
        if last is None or not run or (last.run, last.operation.stage) != (run, operation.stage):
            units.append(last := _Unit(operation, place, run))

        for number, size in operation.reads:
            if (value := (number, writes[number])) not in last.made:
                last.reads[value] = max(size, last.reads.get(value, 0))
        for number, size in operation.writes:
            writes[number] += 1
            last.made[number, writes[number]] = size
    return units


def _written_values(
    units: Sequence[_Unit],
) -> tuple[set[Value], dict[tuple[int, int], list[Value]]]:
    """Return the values that must be written, because another unit reads them, and the values that
    the backward pass could compute again, by (number of the maker, number of the reader).
    """
    maker = {value: number for number, unit in enumerate(units) for value in unit.made}
    kept, later = set[Value](), defaultdict[tuple[int, int], list[Value]](list)
    for number, unit in enumerate(units):
        for value in unit.reads:
            if (made_by := maker.get(value)) is None:
                continue
            before = units[made_by]
            in_backward = unit.operation.stage == BACKWARD
            if unit.run and before.run and in_backward and before.operation.stage != BACKWARD:
                later[made_by, number].append(value)
            else:
                kept.add(value)
    return kept, later
