"""A check in a start's first step that all ranks use the same parameters in the same order.

If the ranks differ, the step ends with a config error that names the parameters. Without this
check, the ranks would hang or train with wrong gradients.

Ranks that sum gradients must produce the same gradients in the same order. If a rank lacks some
gradients, the buckets in ZeRO-1, -2 and -3 have different sizes. With DeepSpeed 0.19.8, gloo then
aborts, and NCCL hangs or sums the wrong tensors.

A bucket is filled in the order in which the gradients arrive (stage_1_and_2.py). If this order
differs between ranks, ZeRO-2 and ZeRO-1 with overlap_comm therefore sum the wrong tensors without a
warning. FSDP2 and ZeRO-3 then hang, and DDP also requires the same order. Only ZeRO-0 sums in the
order of the model.

The ranks are therefore compared before any sum:

    before each backward pass       the parameters that the loss reaches, read from its graph, in
                                    the order of their gradients
    before the sum of a pipeline    the parameters that the outputs of the stages reached
    before each module's forward    the module itself, where a forward pass waits for other ranks:
                                    ZeRO-3, FSDP2, sp, ep
"""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.schedule import ReduceTiedGrads
from deepspeed.utils import z3_leaf_module
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from ..compat.deepspeed import PipelineEngine, backward_replaced, instructions_replaced
from ..kernels.compiled import COMPILER_FIX, compiler_counts, failed_ranks
from ..parallel import expert
from ..parallel.groups import long_wait_group
from ..spec.engine import Engine
from ..spec.errors import ConfigError, Problem, config_error
from ..spec.mesh import Mesh

MAX_LISTED = 4  # maximum number of names, and of ranks, in a problem
UNUSED_PARAMETER_FIX = (
    "let each micro-batch of each rank run every trained module in the same order. If a rank has no"
    " input for a module, give the module a blank input. Or add 0 x the sum of its output where"
    " that output would have been used, never at the end"
)


@dataclass
class ParameterComparison:
    """The parameters that this rank has used in a step and has not yet compared."""

    module: nn.Module
    mesh: Mesh
    step: int
    # Id of a trained parameter -> its name, or the name of the expert block that may skip it.
    names: dict[int, str]
    # Modules that all ranks must run in the same order, followed by the loss.
    places: tuple[str, ...]
    ordered: bool = True  # gradients must arrive in the same order on all ranks
    micro_batch: int = 0
    running: bool = True  # True during a forward pass; a backward pass may run modules again
    # Micro-batch that has not been compared yet -> names, in the order of gradients.
    used: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def note(self, micro_batch: int, outputs: object) -> None:
        """Record the trained parameters that a backward pass from these outputs would reach.

        The outputs belong to `micro_batch`.
        """
        names = self.names | _unsharded_names(self.module, self.names) | _input_names(self.module)
        found = [names[leaf] for leaf in reached_leaves(tree_leaves(outputs)) if leaf in names]
        before = self.used.get(micro_batch, ())
        self.used[micro_batch] = tuple(
            dict.fromkeys([*before, *(found if self.ordered else sorted(found))])
        )

    def compare(self) -> None:
        """Raise `ConfigError` on all ranks if ranks that sum gradients differ (a collective).

        Ranks differ if the names or the order of their gradients differ.
        """
        own = hashlib.blake2b(repr(sorted(self.used.items())).encode(), digest_size=8).digest()
        everyone = [torch.empty(1, dtype=torch.int64) for _ in range(self.mesh.world)]
        dist.all_gather(
            everyone, torch.tensor([int.from_bytes(own, signed=True)]), group=long_wait_group()
        )
        told = {(self._shard_coords(rank), int(hashed)) for rank, hashed in enumerate(everyone)}
        if len(told) > len({held for held, _ in told}):
            raise self._difference_error()
        self.used.clear()

    def check_same_place(self, place: int) -> None:
        """Raise `ConfigError` on all ranks unless all have reached the same place in their forward.

        This is a collective operation.
        """
        ends = torch.tensor([place, -place])
        dist.all_reduce(ends, dist.ReduceOp.MIN, group=long_wait_group())
        if ends[0] == -ends[1]:
            return
        at: list[Any] = [None] * self.mesh.world
        dist.all_gather_object(at, place, group=long_wait_group())
        goes_on = [
            f"{_join_ranks([rank for rank, other in enumerate(at) if other == where])} with"
            f" {self.places[where]}"
            for where in sorted(set(at))
        ]
        first = self.places[min(at)]
        names = [
            name
            for name in dict.fromkeys(self.names.values())
            if f"{name}.".startswith(f"{first}.")
        ]
        rule = (
            f"not every rank runs it here, where they go on, {', '.join(goes_on)}. Each would wait"
            " for the others"
        )
        raise config_error(
            f"{_join_names(names or [first])} in micro-batch {self.micro_batch + 1} of step"
            f" {self.step}",
            rule,
            UNUSED_PARAMETER_FIX,
        )

    def _shard_coords(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates that determine a rank's parameters: its stage and shard."""
        return tuple(self.mesh.coords(rank)[axis] for axis in ("pp", "tp"))

    def _difference_error(self) -> ConfigError:
        """Return the config error for the first micro-batch in which ranks differ (a collective).

        The error contains one problem for each group of parameters that the same ranks lack. If no
        rank lacks a parameter, it contains one problem for each order that differs from the first
        rank's. If the compiler failed on some ranks, their layers ran in eager code, whose
        gradients have another order, and the error names these ranks instead.
        """
        gathered: list[Any] = [None] * self.mesh.world
        own = (self.used, compiler_counts())
        dist.all_gather_object(gathered, own, group=long_wait_group())
        everyone, counts = ([pair[at] for pair in gathered] for at in (0, 1))
        problems: list[Problem] = []
        for number in sorted(self.used):
            used = [of_rank[number] for of_rank in everyone]
            found = [
                (
                    names,
                    (
                        f"a gradient on {_join_ranks(have)}, none on {_join_ranks(lack)}, which"
                        " have to sum it"
                    ),
                )
                for (have, lack), names in self._missing_by_ranks(used).items()
            ]
            reordered = [] if found else self._reordered(used)
            if reordered and (failed := failed_ranks(counts)):
                rule = f"failed there ({counts[failed[0]]}), so gradients arrive in another order"
                return config_error(f"torch.compile on {_join_ranks(failed)}", rule, COMPILER_FIX)
            for names, rule in found or reordered:
                where = _join_names(
                    [expert.name_before_auto_ep(self.module, name) for name in names]
                )
                problems.append(
                    Problem(
                        f"{where} in micro-batch {number + 1} of step {self.step}",
                        rule,
                        UNUSED_PARAMETER_FIX,
                    )
                )
            if problems:
                break
        return ConfigError(problems)

    def _reordered(self, used: list[tuple[str, ...]]) -> list[tuple[list[str], str]]:
        """Return (names, rule) for each gradient order that differs from the first rank's.

        Only ranks that use the same parameters are compared.
        """
        ranks_of: dict[tuple[int, ...], dict[tuple[str, ...], list[int]]] = {}
        for rank, names in enumerate(used):
            ranks_of.setdefault(self._shard_coords(rank), {}).setdefault(names, []).append(rank)
        found = []
        for orders in ranks_of.values():
            (first, of_first), *others = orders.items()
            for other, of_other in others:
                moved = _reordered_names(first, other)
                both = ((first, of_first), (other, of_other))
                places = " and ".join(
                    f"{self._place(order, moved[0])} on {_join_ranks(ranks)}"
                    for order, ranks in both
                )
                rule = (
                    f"the backward pass computes this gradient {places}, and ranks sum gradients in"
                    " the order in which they come"
                )
                found.append((moved, rule))
        return found

    def _place(self, order: Sequence[str], name: str) -> str:
        """Return a parameter's position in an order of gradients."""
        at = order.index(name)
        return f"after {expert.name_before_auto_ep(self.module, order[at - 1])}" if at else "first"

    def _missing_by_ranks(
        self, used: list[tuple[str, ...]]
    ) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]]:
        """Return (ranks that used the parameters, ranks that did not) -> names.

        `used` lists the names used by each rank.
        """
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
        sets = [frozenset(names) for names in used]
        for name, held in sorted(
            {(name, self._shard_coords(rank)) for rank, names in enumerate(sets) for name in names}
        ):
            peers = [rank for rank in range(len(sets)) if self._shard_coords(rank) == held]
            have, lack = (
                tuple(rank for rank in peers if (name in sets[rank]) == there)
                for there in (True, False)
            )
            if lack:
                found.setdefault((have, lack), []).append(name)
        return found


@contextlib.contextmanager
def compare_parameters(engine: Engine, mesh: Mesh, step: int, on: bool) -> Iterator[None]:
    """Raise `ConfigError` in the `with` block if ranks that sum gradients differ.

    Ranks differ if the names or the order of their gradients differ. If `on` is False, or if no
    ranks sum gradients, nothing is checked.
    """
    if not on or mesh.dp * mesh.sp == 1:
        yield
        return
    watched: Any = engine
    comparison, places = _start_comparison(watched, mesh, step)
    with contextlib.ExitStack() as undo:
        for place, module in enumerate(places):
            hook = module.register_forward_pre_hook(
                lambda *_, place=place: (
                    comparison.check_same_place(place) if comparison.running else None
                ),
                prepend=True,
            )
            undo.callback(hook.remove)
        (_watch_pipeline if mesh.pp > 1 else _watch_backward)(watched, comparison, undo)
        yield


def _start_comparison(
    watched: Any, mesh: Mesh, step: int
) -> tuple[ParameterComparison, list[nn.Module]]:
    """Return the comparison for a step, and the modules before which the ranks meet.

    If the experts in a block are separate modules, DeepSpeed's ZeRO-1 and -2 require every expert's
    gradient. Otherwise an expert may receive no tokens.
    """
    stage = watched.zero_optimization_stage() if hasattr(watched, "zero_optimization_stage") else 0
    modules: dict[str, nn.Module] = dict(watched.module.named_modules())
    blocks = [name for name, module in modules.items() if z3_leaf_module(module)]
    block_of = lambda name: next((block for block in blocks if name.startswith(f"{block}.")), None)  # noqa: E731
    places = [name for name, module in modules.items() if isinstance(module, FSDPModule)]
    if stage == 3 or mesh.sp * mesh.ep > 1:
        own = [
            name
            for name, module in modules.items()
            if any(stage == 3 or value.requires_grad for value in module.parameters(recurse=False))
        ]
        places = [
            name for name in modules if name in blocks or (name in own and block_of(name) is None)
        ]
    # Leave out experts that ep distributes, because each rank has different ones. The ranks meet
    # before the experts' block.
    trained = {
        name: value
        for name, value in watched.module.named_parameters()
        if value.requires_grad and expert.expert_parallel_group(value) is None
    }
    names = {
        id(parameter): name if stage in (1, 2) else block_of(name) or name
        for name, parameter in trained.items()
    }
    ordered = stage > 0 or not hasattr(watched, "zero_optimization_stage")
    return ParameterComparison(watched.module, mesh, step, names, (*places, "the loss"), ordered), [
        modules[name] for name in places
    ]


def _watch_backward(
    watched: Engine, comparison: ParameterComparison, undo: contextlib.ExitStack
) -> None:
    """Compare the parameters that each micro-batch's loss reaches, before its backward pass."""
    plain = watched.backward

    def backward(loss: torch.Tensor) -> Any:
        comparison.check_same_place(len(comparison.places) - 1)
        comparison.note(comparison.micro_batch, loss)
        comparison.compare()
        comparison.running = False
        result = plain(loss)
        comparison.running, comparison.micro_batch = True, comparison.micro_batch + 1
        return result

    undo.enter_context(backward_replaced(watched, backward))


def _watch_pipeline(
    watched: PipelineEngine, comparison: ParameterComparison, undo: contextlib.ExitStack
) -> None:
    """Compare the parameters that the outputs of all micro-batches have reached.

    The comparison takes place at the end of the schedule, before any gradient is summed.
    """
    # Micro-batches completed in each of the rank's stages. Both schedules process them in order.
    done: Counter[int] = Counter()
    plain = watched._INSTRUCTION_MAP

    def note(net: nn.Module, inputs: object, output: object) -> None:
        phase = getattr(net, "active_phase", 0)
        comparison.note(done[phase], output)
        done[phase] += 1

    def reduce(pipeline: object) -> None:
        comparison.compare()
        plain[ReduceTiedGrads](pipeline)

    undo.callback(watched.module.register_forward_hook(note).remove)
    undo.enter_context(instructions_replaced(watched, {ReduceTiedGrads: reduce}))


def reached_leaves(outputs: Iterable[Any]) -> list[int]:
    """Return the ids of the leaves that a backward pass reaches, in the order of their gradients.

    The result also contains the ids of FSDP2's parameter groups, at the positions where FSDP2 sums
    the groups' gradients. Autograd runs the ready node with the highest sequence number first, and
    nodes are numbered in the order of the forward pass. A leaf's gradient is therefore complete
    after the lowest-numbered node that uses the leaf.
    """
    waiting: list[Any] = [
        output.grad_fn
        for output in outputs
        if torch.is_tensor(output) and output.grad_fn is not None
    ]
    seen, last = set(waiting), dict[int, tuple[int, int]]()
    while waiting:
        node = waiting.pop()
        for place, (function, _) in enumerate(node.next_functions):
            if function is None:
                continue
            if type(function).__name__ == "AccumulateGrad":
                leaf, at = id(function.variable), (-node._sequence_nr(), place)
                last[leaf] = max(last.get(leaf, at), at)
            elif function not in seen:
                seen.add(function)
                waiting.append(function)
                # This is an FSDP2 node, which sums its group's gradients here.
                if (group := getattr(function, "param_group", None)) is not None:
                    last[id(group)] = (-function._sequence_nr(), 0)
    return sorted(last, key=lambda leaf: last[leaf])


def _reordered_names(first: Sequence[str], other: Sequence[str]) -> list[str]:
    """Return a small set of names whose removal makes two orders of the same names equal."""
    same = SequenceMatcher(None, first, other, autojunk=False).get_matching_blocks()
    kept = {name for block in same for name in first[block.a : block.a + block.size]}
    return [name for name in other if name not in kept]


def _unsharded_names(module: nn.Module, names: dict[int, str]) -> dict[int, str]:
    """Map the ids of FSDP2's unsharded parameters (torch 2.13) to names.

    FSDP2 computes with unsharded parameters, which have the same names as the sharded ones.
    """
    groups = [
        group
        for inner in module.modules()
        if isinstance(inner, FSDPModule)
        for group in inner._get_fsdp_state()._fsdp_param_groups
    ]
    kept = [
        held
        for group in groups
        for held in group.fsdp_params
        if id(held.sharded_param) in names and hasattr(held, "_unsharded_param")
    ]
    return {id(held._unsharded_param): names[id(held.sharded_param)] for held in kept}


def _input_names(module: nn.Module) -> dict[int, str]:
    """Map each FSDP2 parameter group's id (torch 2.13) to a name for its module's input.

    FSDP2 sums a module's gradients after the gradient of the module's input. If the input has no
    gradient, FSDP2 sums them at the end, while the other ranks wait.
    """
    fsdp = [
        (name, inner) for name, inner in module.named_modules() if isinstance(inner, FSDPModule)
    ]
    return {
        id(group): f"the input of {name or 'the model'}"
        for name, inner in fsdp
        for group in inner._get_fsdp_state()._fsdp_param_groups
    }


def _join_names(names: list[str]) -> str:
    return ", ".join(names[:MAX_LISTED]) + (
        f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    )


def _join_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_join_names([str(rank) for rank in ranks])}"
