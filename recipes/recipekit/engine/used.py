"""The comparison of the parameters that ranks use, and of their order, in the first step after a
start.

If ranks differ, the step is refused with the names of the parameters. Otherwise the ranks would
hang or train with wrong gradients.

Ranks that sum gradients need the same gradients in the same order. If a rank lacks some, the
buckets of ZeRO-1, -2 and -3 have other sizes (DeepSpeed 0.19.8: gloo aborts, NCCL waits or adds up
wrong tensors). If gradients come in another order, ZeRO-2 and ZeRO-1 with overlap_comm add up wrong
tensors without a warning, because a bucket is filled in the order in which gradients come
(stage_1_and_2.py). FSDP2 and ZeRO-3 then wait for each other. DDP follows the same rule. Only
ZeRO-0 sums in the order of the model. Ranks are therefore compared before any sum:

    before each backward pass       the parameters that the loss reaches, read off its graph, in the
                                    order of their gradients
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

from ..parallel import expert
from ..parallel.groups import waiting_group
from ..spec.engine import Engine
from ..spec.mesh import Mesh
from ..spec.refusal import Problem, Refusal, refuse

SHOWN = 4  # of the names, and of the ranks, that a problem lists
FIX = (
    "let each micro-batch of each rank run every trained module in the same order. If a rank has no"
    " input for a module, give the module a blank input. Or add 0 x the sum of its output where"
    " that output would have been used, never at the end"
)


@dataclass
class Comparison:
    """Holds what this rank has used in a step, until it is compared."""

    module: nn.Module
    mesh: Mesh
    step: int
    # id of a trained parameter -> its name, or that of the block of experts which may go without it
    names: dict[int, str]
    # modules that all ranks have to run in the same order, and what comes after them
    places: tuple[str, ...]
    ordered: bool = True  # gradients must come in the same order on all ranks
    micro_batch: int = 0
    running: bool = True  # a forward pass; a backward pass may run modules again
    # micro-batch, not yet compared -> names, in the order of gradients
    used: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def note(self, micro_batch: int, outputs: Any) -> None:
        """Takes note of the trained parameters that a backward pass from the outputs of a
        micro-batch would reach.
        """
        names = self.names | _gathered(self.module, self.names) | _inputs(self.module)
        found = [names[leaf] for leaf in reached(tree_leaves(outputs)) if leaf in names]
        before = self.used.get(micro_batch, ())
        self.used[micro_batch] = tuple(
            dict.fromkeys([*before, *(found if self.ordered else sorted(found))])
        )

    def compare(self) -> None:
        """Raise `Refusal` on all ranks if ranks that sum gradients have other ones or another order
        (a collective).
        """
        own = hashlib.blake2b(repr(sorted(self.used.items())).encode(), digest_size=8).digest()
        everyone = [torch.empty(1, dtype=torch.int64) for _ in range(self.mesh.world)]
        dist.all_gather(
            everyone, torch.tensor([int.from_bytes(own, signed=True)]), group=waiting_group()
        )
        told = {(self._held(rank), int(hashed)) for rank, hashed in enumerate(everyone)}
        if len(told) > len({held for held, _ in told}):
            raise self._differ()
        self.used.clear()

    def meet(self, place: int) -> None:
        """Raises `Refusal`, on all ranks, unless all are at the same place of their forward pass (a
        collective).
        """
        ends = torch.tensor([place, -place])
        dist.all_reduce(ends, dist.ReduceOp.MIN, group=waiting_group())
        if ends[0] == -ends[1]:
            return
        at: list[Any] = [None] * self.mesh.world
        dist.all_gather_object(at, place, group=waiting_group())
        goes_on = [
            f"{_ranks([rank for rank, other in enumerate(at) if other == where])} with"
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
        raise refuse(
            f"{_listed(names or [first])} in micro-batch {self.micro_batch + 1} of step"
            f" {self.step}",
            rule,
            FIX,
        )

    def _held(self, rank: int) -> tuple[int, ...]:
        """Says which parameters a rank holds: its stage, and its piece of what is cut."""
        return tuple(self.mesh.coords(rank)[axis] for axis in ("pp", "tp"))

    def _differ(self) -> Refusal:
        """Return the refusal of the first micro-batch in which ranks differ (a collective).

        It has a problem for each group of parameters that the same ranks lack. If no rank lacks a
        parameter, it has a problem for each order that differs from the first rank's order.
        """
        everyone: list[Any] = [None] * self.mesh.world
        dist.all_gather_object(everyone, self.used, group=waiting_group())
        problems: list[Problem] = []
        for number in sorted(self.used):
            used = [of_rank[number] for of_rank in everyone]
            found = [
                (
                    names,
                    f"a gradient on {_ranks(have)}, none on {_ranks(lack)}, which have to sum it",
                )
                for (have, lack), names in self._lacking(used).items()
            ]
            for names, rule in found or self._reordered(used):
                where = _listed([expert.own_name(self.module, name) for name in names])
                problems.append(
                    Problem(f"{where} in micro-batch {number + 1} of step {self.step}", rule, FIX)
                )
            if problems:
                break
        return Refusal(problems)

    def _reordered(self, used: list[tuple[str, ...]]) -> list[tuple[list[str], str]]:
        """Return (names, rule) for each order of gradients that differs from the order of the first
        rank with the same parameters.
        """
        ranks_of: dict[tuple[int, ...], dict[tuple[str, ...], list[int]]] = {}
        for rank, names in enumerate(used):
            ranks_of.setdefault(self._held(rank), {}).setdefault(names, []).append(rank)
        found = []
        for orders in ranks_of.values():
            (first, of_first), *others = orders.items()
            for other, of_other in others:
                moved = _moved(first, other)
                both = ((first, of_first), (other, of_other))
                places = " and ".join(
                    f"{self._place(order, moved[0])} on {_ranks(ranks)}" for order, ranks in both
                )
                rule = (
                    f"the backward pass computes this gradient {places}, and ranks sum gradients in"
                    " the order in which they come"
                )
                found.append((moved, rule))
        return found

    def _place(self, order: Sequence[str], name: str) -> str:
        """Return the place of a parameter in an order of gradients."""
        at = order.index(name)
        return f"after {expert.own_name(self.module, order[at - 1])}" if at else "first"

    def _lacking(
        self, used: list[tuple[str, ...]]
    ) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]]:
        """Maps (ranks that used them, ranks that did not) to names, `used` being those of each
        rank.
        """
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
        sets = [frozenset(names) for names in used]
        for name, held in sorted(
            {(name, self._held(rank)) for rank, names in enumerate(sets) for name in names}
        ):
            peers = [rank for rank in range(len(sets)) if self._held(rank) == held]
            have, lack = (
                tuple(rank for rank in peers if (name in sets[rank]) == there)
                for there in (True, False)
            )
            if lack:
                found.setdefault((have, lack), []).append(name)
        return found


@contextlib.contextmanager
def compared(engine: Engine, mesh: Mesh, step: int, on: bool) -> Iterator[None]:
    """Refuse a step within the `with` if ranks that sum gradients have other ones or another order.

    Does nothing if `on` is false, or if no ranks sum gradients.
    """
    if not on or mesh.dp * mesh.sp == 1:
        yield
        return
    watched: Any = engine
    comparison, places = _begin(watched, mesh, step)
    with contextlib.ExitStack() as undo:
        for place, module in enumerate(places):
            hook = module.register_forward_pre_hook(
                lambda *_, place=place: comparison.meet(place) if comparison.running else None,
                prepend=True,
            )
            undo.callback(hook.remove)
        (_watch_pipeline if mesh.pp > 1 else _watch_backward)(watched, comparison, undo)
        yield


def _begin(watched: Any, mesh: Mesh, step: int) -> tuple[Comparison, list[nn.Module]]:
    """Finds what is compared, and the modules before which the ranks meet.

    Of a block whose experts are modules, DeepSpeed's ZeRO-1 and -2 need the gradient of each;
    elsewhere one may get no tokens.
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
    # experts that ep divides are left out: each rank has others, and meets the others before their
    # block
    trained = {
        name: value
        for name, value in watched.module.named_parameters()
        if value.requires_grad and expert.group_of(value) is None
    }
    names = {
        id(parameter): name if stage in (1, 2) else block_of(name) or name
        for name, parameter in trained.items()
    }
    ordered = stage > 0 or not hasattr(watched, "zero_optimization_stage")
    return Comparison(watched.module, mesh, step, names, (*places, "the loss"), ordered), [
        modules[name] for name in places
    ]


def _watch_backward(watched: Any, comparison: Comparison, undo: contextlib.ExitStack) -> None:
    """Compares what the loss of each micro-batch reaches before its backward pass."""
    plain = watched.backward

    def backward(loss: torch.Tensor) -> Any:
        comparison.meet(len(comparison.places) - 1)
        comparison.note(comparison.micro_batch, loss)
        comparison.compare()
        comparison.running = False
        result = plain(loss)
        comparison.running, comparison.micro_batch = True, comparison.micro_batch + 1
        return result

    watched.backward = backward
    undo.callback(vars(watched).pop, "backward")


def _watch_pipeline(watched: Any, comparison: Comparison, undo: contextlib.ExitStack) -> None:
    """Compares what the outputs of all micro-batches reached when the schedule is through with
    them, before any gradient is summed.
    """
    # micro-batches of each of the rank's stages: both schedules take them in order
    done: Counter[int] = Counter()
    plain = watched._INSTRUCTION_MAP

    def note(net: Any, inputs: Any, output: Any) -> None:
        phase = getattr(net, "active_phase", 0)
        comparison.note(done[phase], output)
        done[phase] += 1

    def reduce(pipeline: Any) -> None:
        comparison.compare()
        plain[ReduceTiedGrads](pipeline)

    undo.callback(watched.module.register_forward_hook(note).remove)
    watched._INSTRUCTION_MAP = plain | {ReduceTiedGrads: reduce}
    undo.callback(vars(watched).pop, "_INSTRUCTION_MAP", None)  # the class's own shows again


def reached(outputs: Iterable[Any]) -> list[int]:
    """Return the ids of the leaves that a backward pass reaches, in the order in which their
    gradients come.

    The ids of FSDP2's groups of parameters are among them, at the places where FSDP2 sums their
    gradients. Autograd runs the ready node with the highest sequence number first, and nodes are
    numbered as the forward pass makes them. So the gradient of a leaf is complete after the lowest
    number among the nodes that use it.
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
                # of FSDP2, which sums its gradients at this node
                if (group := getattr(function, "param_group", None)) is not None:
                    last[id(group)] = (-function._sequence_nr(), 0)
    return sorted(last, key=lambda leaf: last[leaf])


def _moved(first: Sequence[str], other: Sequence[str]) -> list[str]:
    """Return a small set of names without which two orders of the same names are equal."""
    same = SequenceMatcher(None, first, other, autojunk=False).get_matching_blocks()
    kept = {name for block in same for name in first[block.a : block.a + block.size]}
    return [name for name in other if name not in kept]


def _gathered(module: nn.Module, names: dict[int, str]) -> dict[int, str]:
    """Maps the ids of the whole parameters that FSDP2 (torch 2.13) computes with to the names of
    those that it keeps.
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


def _inputs(module: nn.Module) -> dict[int, str]:
    """Map the id of each group of parameters of FSDP2 (torch 2.13) to a name of its module's input.

    FSDP2 sums the gradients of a module after the gradient of its input. If the input has no
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


def _listed(words: list[str]) -> str:
    return ", ".join(words[:SHOWN]) + (
        f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed([str(rank) for rank in ranks])}"
