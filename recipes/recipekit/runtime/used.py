"""Compares which parameters the ranks use in the first step after a start: ranks that differ are refused by name, not left to hang.

Ranks that sum gradients must have the same ones: where one of them lacks some, the buckets of ZeRO-1, -2 and -3 are of
other sizes (DeepSpeed 0.19.8: gloo aborts, NCCL waits or adds up other tensors). So they are compared before any sum begins:

    before each backward pass       the parameters that the loss reaches, read off its graph
    before the sum of a pipeline    those that the outputs of the stages reached
    before each module's forward    the module itself, where a forward pass waits for other ranks: ZeRO-3, FSDP2, sp, ep
"""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.schedule import ReduceTiedGrads
from deepspeed.utils import z3_leaf_module
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from ..engine import Engine
from ..mesh import Mesh
from ..parallel import expert
from ..parallel.groups import waiting_group
from ..refusal import Problem, Refusal, refuse

SHOWN = 4  # of the names, and of the ranks, that a problem lists
FIX = "let each micro-batch of each rank run every trained module: where a rank has nothing for one, call it on a blank input and add 0 x the sum of its output"


@dataclass
class Comparison:
    """Holds what this rank has used in a step, until it is compared."""

    module: nn.Module
    mesh: Mesh
    step: int
    names: dict[int, str]  # id of a trained parameter -> its name, or that of the block of experts which may go without it
    places: tuple[str, ...]  # modules that all ranks have to run in the same order, and what comes after them
    micro_batch: int = 0
    running: bool = True  # a forward pass; a backward pass may run modules again
    used: dict[int, frozenset[str]] = field(default_factory=dict)  # of each micro-batch that has not been compared

    def note(self, micro_batch: int, outputs: Any) -> None:
        """Takes note of the trained parameters that a backward pass from the outputs of a micro-batch would reach."""
        names = self.names | _gathered(self.module, self.names)
        found = frozenset(names[leaf] for leaf in reached(tree_leaves(outputs)) if leaf in names)
        self.used[micro_batch] = self.used.get(micro_batch, frozenset()) | found

    def compare(self) -> None:
        """Raises `Refusal`, on all ranks, if ranks that sum gradients have used other parameters (a collective)."""
        own = hashlib.blake2b(repr([(number, sorted(names)) for number, names in sorted(self.used.items())]).encode(), digest_size=8).digest()
        everyone = [torch.empty(1, dtype=torch.int64) for _ in range(self.mesh.world)]
        dist.all_gather(everyone, torch.tensor([int.from_bytes(own, signed=True)]), group=waiting_group())
        told = {(self._held(rank), int(hashed)) for rank, hashed in enumerate(everyone)}
        if len(told) > len({held for held, _ in told}):
            raise self._differ()
        self.used.clear()

    def meet(self, place: int) -> None:
        """Raises `Refusal`, on all ranks, unless all are at the same place of their forward pass (a collective)."""
        ends = torch.tensor([place, -place])
        dist.all_reduce(ends, dist.ReduceOp.MIN, group=waiting_group())
        if ends[0] == -ends[1]:
            return
        at: list[Any] = [None] * self.mesh.world
        dist.all_gather_object(at, place, group=waiting_group())
        goes_on = [f"{_ranks([rank for rank, other in enumerate(at) if other == where])} with {self.places[where]}" for where in sorted(set(at))]
        first = self.places[min(at)]
        names = [name for name in dict.fromkeys(self.names.values()) if f"{name}.".startswith(f"{first}.")]
        rule = f"not every rank runs it here, where they go on, {', '.join(goes_on)}; each would wait for the others"
        raise refuse(f"{_listed(names or [first])} in micro-batch {self.micro_batch + 1} of step {self.step}", rule, FIX)

    def _held(self, rank: int) -> tuple[int, ...]:
        """Says which parameters a rank holds: its stage, and its piece of what is cut."""
        return tuple(self.mesh.coords(rank)[axis] for axis in ("pp", "tp"))

    def _differ(self) -> Refusal:
        """Makes the refusal of what not all ranks have used (a collective): one problem for all that the same ranks lack in the first such micro-batch."""
        everyone: list[Any] = [None] * self.mesh.world
        dist.all_gather_object(everyone, self.used, group=waiting_group())
        number, lacking = next((number, found) for number in sorted(self.used) if (found := self._lacking([used[number] for used in everyone])))
        problems = []
        for (have, lack), names in lacking.items():
            where = f"{_listed([expert.own_name(self.module, name) for name in names])} in micro-batch {number + 1} of step {self.step}"
            problems.append(Problem(where, f"a gradient on {_ranks(have)}, none on {_ranks(lack)}, which have to sum it", FIX))
        return Refusal(problems)

    def _lacking(self, used: list[frozenset[str]]) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]]:
        """Maps (ranks that used them, ranks that did not) to names, `used` being those of each rank."""
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
        for name, held in sorted({(name, self._held(rank)) for rank, names in enumerate(used) for name in names}):
            peers = [rank for rank in range(len(used)) if self._held(rank) == held]
            have, lack = (tuple(rank for rank in peers if (name in used[rank]) == there) for there in (True, False))
            if lack:
                found.setdefault((have, lack), []).append(name)
        return found


@contextlib.contextmanager
def compared(engine: Engine, mesh: Mesh, step: int, on: bool) -> Iterator[None]:
    """Refuses a step, taken within the `with`, in which ranks that sum gradients use other parameters; does nothing when not `on`, or without such ranks."""
    if not on or mesh.dp * mesh.sp == 1:
        yield
        return
    watched: Any = engine
    comparison, places = _begin(watched, mesh, step)
    with contextlib.ExitStack() as undo:
        for place, module in enumerate(places):
            hook = module.register_forward_pre_hook(lambda *_, place=place: comparison.meet(place) if comparison.running else None, prepend=True)
            undo.callback(hook.remove)
        (_watch_pipeline if mesh.pp > 1 else _watch_backward)(watched, comparison, undo)
        yield


def _begin(watched: Any, mesh: Mesh, step: int) -> tuple[Comparison, list[nn.Module]]:
    """Finds what is compared, and the modules before which the ranks meet.

    Of a block whose experts are modules, DeepSpeed's ZeRO-1 and -2 need the gradient of each; elsewhere one may get no tokens.
    """
    stage = watched.zero_optimization_stage() if hasattr(watched, "zero_optimization_stage") else 0
    modules: dict[str, nn.Module] = dict(watched.module.named_modules())
    blocks = [name for name, module in modules.items() if z3_leaf_module(module)]
    block_of = lambda name: next((block for block in blocks if name.startswith(f"{block}.")), None)  # noqa: E731
    places = [name for name, module in modules.items() if isinstance(module, FSDPModule)]
    if stage == 3 or mesh.sp * mesh.ep > 1:
        own = [name for name, module in modules.items() if any(stage == 3 or value.requires_grad for value in module.parameters(recurse=False))]
        places = [name for name in modules if name in blocks or (name in own and block_of(name) is None)]
    # experts that ep divides are left out: each rank has others, and meets the others before their block
    trained = {name: value for name, value in watched.module.named_parameters() if value.requires_grad and expert.group_of(value) is None}
    names = {id(parameter): name if stage in (1, 2) else block_of(name) or name for name, parameter in trained.items()}
    return Comparison(watched.module, mesh, step, names, (*places, "the loss")), [modules[name] for name in places]


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
    """Compares what the outputs of all micro-batches reached when the schedule is through with them, before any gradient is summed."""
    done: Counter[int] = Counter()  # micro-batches of each of the rank's stages: both schedules take them in order
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


def reached(outputs: Iterable[Any]) -> set[int]:
    """Finds the ids of the leaves whose gradient a backward pass from some tensors would compute."""
    waiting = [output.grad_fn for output in outputs if torch.is_tensor(output) and output.grad_fn is not None]
    seen, leaves = set(waiting), set[int]()
    while waiting:
        node: Any = waiting.pop()
        if type(node).__name__ == "AccumulateGrad":
            leaves.add(id(node.variable))
        ahead = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= ahead
        waiting.extend(ahead)
    return leaves


def _gathered(module: nn.Module, names: dict[int, str]) -> dict[int, str]:
    """Maps the ids of the whole parameters that FSDP2 (torch 2.13) computes with to the names of those that it keeps."""
    groups = [group for inner in module.modules() if isinstance(inner, FSDPModule) for group in inner._get_fsdp_state()._fsdp_param_groups]
    kept = [held for group in groups for held in group.fsdp_params if id(held.sharded_param) in names and hasattr(held, "_unsharded_param")]
    return {id(held._unsharded_param): names[id(held.sharded_param)] for held in kept}


def _listed(words: list[str]) -> str:
    return ", ".join(words[:SHOWN]) + (f" and {len(words) - SHOWN} more" if len(words) > SHOWN else "")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed([str(rank) for rank in ranks])}"
