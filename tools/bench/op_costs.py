"""The bytes and FLOPs of every operation that torch runs, on tensors without memory
(FakeTensorMode).

Eager PyTorch does not fuse operations: each operation reads its inputs from the device's memory and
writes its outputs there. An operation's bytes are therefore the bytes of all tensors that it reads
and writes, and a view moves no bytes. FLOPs come from torch's own formulas
(torch.utils.flop_counter), which count a multiply-add as two. An operation without a formula counts
as zero, which is correct for all operations except matrix products, attention and convolutions.
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
OVERWRITE = {"copy_", "fill_", "zero_"}  # operations that do not read the tensor that they change
# Operations that read only the selected elements of their first tensor.
LOOK_UP = {"embedding", "gather", "index", "index_select", "nll_loss_forward"}
# Operations that change only the indexed elements of their first tensor.
TOUCH = {"scatter_", "scatter_add_", "index_put_", "index_add_"}
NOT_READ = {"nll_loss_backward": 1}  # position of a tensor whose values are not read
# Namespaces whose operations have a formula, or FLOPs that are not counted.
SCALAR_FREE = ("aten", "prim", "profiler")

Formula = Callable[[tuple[Any, ...], dict[str, Any], Any], float]  # (args, kwargs, result) -> FLOPs


@dataclass(frozen=True)
class Operation:
    """One operation that ran."""

    name: str
    stage: str
    shapes: tuple[tuple[int, ...], ...]  # of the tensors that it takes
    bytes: int  # that it reads and writes
    flops: float
    where: frozenset[str]  # names of the files and functions on the stack
    reads: tuple[tuple[int, int], ...] = ()  # (number of a storage, bytes of it)
    writes: tuple[tuple[int, int], ...] = ()  # `reads` and `writes` add up to `bytes`


def _cpu_attention(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    return sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)


def _cpu_attention_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    return sdpa_backward_flop_count(args[0].shape, args[1].shape, args[2].shape, args[3].shape)


CPU_FORMULAS: dict[str, Formula] = {  # torch 2.13's counter knows only the CUDA kernels
    "aten._scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _cpu_attention_backward,
}


class Costs(TorchDispatchMode):
    """The operations that run while this mode is active.

    The caller sets `stage` to forward, backward or optimizer. A forward pass inside a backward pass
    is recomputation. `formulas` adds FLOP formulas by operation name. An operation from a different
    library without a formula raises ValueError.
    """

    def __init__(self, formulas: Mapping[str, Formula] | None = None) -> None:
        super().__init__()
        self.formulas, self.stage, self.found = (
            {**CPU_FORMULAS, **(formulas or {})},
            FORWARD,
            list[Operation](),
        )
        # Storages are numbered, because an address is reused after a storage is freed.
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
            if home not in self._numbers:  # made before the mode was on
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
    """Count the bytes that an operation reads and writes; each tensor counts once.

    An expanded tensor counts with its size in memory.
    """
    return sum(sum(traffic.values()) for traffic in traffic_of(func, args, kwargs, result))


def traffic_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[dict[int, int], dict[int, int]]:
    """Count the bytes that an operation (reads, writes), by storage address."""
    name = name_of(func).partition(".")[2]
    given = _given(func, args, kwargs)
    made = [value for value in tree_leaves(result) if torch.is_tensor(value)]
    homes = {_storage(tensor) for tensor, _ in given}

    # Allocations, views and queries, such as for the device, move no bytes.
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
    """Count the bytes of a table that a lookup selects."""
    asked = [value.numel() for value in made] + [other.numel() for other, _ in given[1:2]]
    return max(asked) * table.element_size()


def _traffic_of_touch(
    given: list[tuple[torch.Tensor, bool]],
) -> tuple[dict[int, int], dict[int, int]]:
    """Count the bytes of an operation that changes only the indexed elements."""
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
    """Count the bytes of a tensor's elements, without an expanded tensor's repetitions."""
    return tensor.element_size() * prod(
        size
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if stride != 0 or size == 0
    )


def _given(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[torch.Tensor, bool]]:
    """Return an operation's input tensors, each once, and whether the operation writes to them."""
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
    """Return the names of the files and functions on the stack, without folders."""
    found, frame = set(), sys._getframe(2)
    while frame is not None:
        found |= {frame.f_code.co_filename.rpartition("/")[2], frame.f_code.co_name}
        frame = frame.f_back
    return frozenset(found)


Value = tuple[int, int]  # a storage's contents: (number of the storage, how often it was written)


@dataclass
class _Unit:
    """A kernel: either consecutive operations that a compiler fuses, or one operation."""

    operation: Operation  # the first
    place: int
    run: str
    reads: dict[Value, int] = field(default_factory=dict)  # bytes, without `made`
    made: dict[Value, int] = field(default_factory=dict)  # bytes


def fused(operations: Sequence[Operation], runs: Sequence[str]) -> list[tuple[int, Operation]]:
    """Count the bytes again, as if consecutive operations of one run were fused into one kernel.

    Return (index of a run's first operation, the operation). `runs` contains a name for each
    operation, or "" for an operation that is not fused.

    A run reads each input once, and writes only values that are read later. A value may be computed
    in the forward pass and read only in the backward pass. In this case the cheaper way is counted:
    write and read the value, or recompute it from the inputs of the first run.
    """
    units = _units(operations, runs)
    kept, later = _written_values(units)

    recomputed, more = defaultdict[int, set[Value]](set), Counter[int]()
    for (made_by, number), values in later.items():
        absent = [value for value in values if value not in kept]
        recomputed[number].update(absent)

        # Compare the bytes for writing and reading the values with the bytes for reading the inputs
        # again.
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
    """Group consecutive operations of one run and stage, with the values that groups exchange."""
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
    """Return the values that must be written and the values that the backward pass could recompute.

    A value must be written if a different unit reads it. The recomputable values are keyed by
    (number of the unit that computes the value, number of the unit that reads it).
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
