"""Audits: search for silent corruption in weights, optimizer states and computed blocks."""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ..parallel.groups import ProcessGroups, long_wait_group
from ..spec.engine import Engine
from ..spec.errors import Say
from ..spec.task import MicroBatch
from ..watch.replicas import AuditFinding, AuditReport, judge

WORD = 8  # bytes of int64


class Audit:
    """Compares this rank with itself and with its replicas after every `every` steps (0: never).

    `end_of_step` digests the weights and the states. Before the next step, `run` digests them
    again, sends one micro-batch of the first replica through all replicas, and compares.
    """

    def __init__(self, every: int, engine: Engine, groups: ProcessGroups, compiled: bool, say: Say):
        self.every, self.engine, self.groups, self.say = every, engine, groups, say
        self.compiled = compiled  # the layers of the model are compiled
        self.last_clean = 0  # the last step after which an audit has found no difference
        self._digests: tuple[int | None, int] | None = None
        self._compares_outputs: bool | None = None  # unknown before the first audit

    def end_of_step(self, step: int) -> None:
        """Note a finished step whose weights and states are due for an audit."""
        due = self.every > 0 and step % self.every == 0
        self._digests = self._own_digests() if due else None

    def run(
        self, step: int, batches: list[MicroBatch], forward: Callable[[list[MicroBatch]], Any]
    ) -> list[AuditFinding]:
        """Return the differences before a step, if an audit is due (a collective operation).

        `forward` sends micro-batches through the model without a backward pass. The result is the
        same on every rank.
        """
        if self._digests is None:
            return []
        (weights_before, states_before), self._digests = self._digests, None
        weights, states = self._own_digests()
        outputs = self._outputs(batches, forward) if self.groups.mesh.dp > 1 else {}
        coords = self.groups.coords
        report = AuditReport(
            rank=self.groups.rank,
            host=platform.node(),
            place=(coords["tp"], coords["pp"]),
            data_place=(coords["sp"],),
            weights_before=weights_before,
            weights=weights,
            states_kept=states == states_before,
            outputs=outputs,
        )
        reports: list[Any] = [None] * self.groups.mesh.world
        dist.all_gather_object(reports, report, group=long_wait_group())
        findings = judge(reports)
        if not findings:
            self.last_clean = step - 1
        hosts = {report.rank: report.host for report in reports}
        return [replace(found, host=hosts.get(found.rank)) for found in findings]

    def _own_digests(self) -> tuple[int | None, int]:
        """Return (digest of the replicated weights, digest of this rank's states)."""
        replicated = replicated_weights(self.engine)
        weights = bit_sum(replicated) if replicated else None
        return weights, bit_sum(states_of_rank(self.engine))

    def _outputs(
        self, batches: list[MicroBatch], forward: Callable[[list[MicroBatch]], Any]
    ) -> dict[str, int]:
        """Return the digests of the block outputs for the first replica's micro-batches.

        A pipeline needs all micro-batches of a step. Otherwise one is enough.
        """
        if self._compares_outputs is False:
            return {}
        held: list[Any] = [batches if self.groups.mesh.pp > 1 else batches[:1]]
        # The batch is sent as an object, because packed batches have different shapes on the ranks.
        group = cast("dist.ProcessGroup | None", self.groups.dp_group)
        dist.broadcast_object_list(held, self.groups.dp_ranks[0], group=group)

        def once() -> dict[str, int]:
            # Compiled layers run uncompiled, because compiled code ignores new hooks.
            eager = torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()
            with eager, record_outputs(self.engine.module) as found:
                forward(held[0])
            return found

        outputs = once()
        if self._compares_outputs is None:
            self._compares_outputs = self._repeats(outputs, once)
        return outputs if self._compares_outputs else {}

    def _repeats(self, outputs: dict[str, int], once: Callable[[], dict[str, int]]) -> bool:
        """Return True if every rank computes the same bits twice (a collective operation)."""
        same: list[Any] = [None] * self.groups.mesh.world
        dist.all_gather_object(same, once() == outputs, group=long_wait_group())
        if not all(same):
            self.say(
                "audit: this model's kernels do not compute the same bits twice, so block outputs"
                " are not compared. --deterministic selects kernels that do"
            )
        return all(same)


@contextmanager
def record_outputs(module: nn.Module) -> Iterator[dict[str, int]]:
    """Record a digest of the outputs of each layer and of the modules beside the layers.

    A layer that runs several times has the digest of all its outputs.
    """
    found: dict[str, int] = {}

    def record(name: str, output: object) -> None:
        # The logits of a loss in blocks refuse all other operations.
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            found[name] = wrapped(found.get(name, 0) * 3 + bit_sum(tensors))

    handles = [
        block.register_forward_hook(lambda _, __, output, name=name: record(name, output))
        for name, block in module.named_modules()
        if is_block(name, block)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def is_block(name: str, module: nn.Module) -> bool:
    """Return True for an element of a list of layers, an embedding, and a norm after the layers."""
    last = name.rpartition(".")[2]
    return last.isdigit() or isinstance(module, nn.Embedding) or last in ("norm", "ln_f")


def bit_sum(tensors: list[torch.Tensor]) -> int:
    """Return the sum of the bits of tensors as int64 words, modulo 2^64.

    Any single changed bit changes the sum, and so does an exchange of two tensors.
    """
    total = 0
    for tensor in tensors:
        total = wrapped(total * 3 + int(word_sum(tensor)))
    return total


def word_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's int64 words, (). The last bytes count as one word."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(data) // WORD * WORD
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    if whole and data.storage_offset() % WORD == 0:
        total += data[:whole].view(torch.int64).sum()
    elif whole:
        total += data[:whole].clone().view(torch.int64).sum()
    rest = data[whole:]
    scale = 256 ** torch.arange(len(rest), device=data.device)
    return total + (rest.to(torch.int64) * scale).sum()


def wrapped(number: int) -> int:
    """Return an integer modulo 2^64."""
    return number % 2**64


def replicated_weights(engine: Engine) -> list[torch.Tensor]:
    """Return the parameters that every data-parallel replica of this rank stores whole.

    ZeRO-3 and FSDP2 divide the parameters, and experts belong to one rank of their group.
    """
    if any(hasattr(p, "ds_id") or isinstance(p, DTensor) for p in engine.module.parameters()):
        return []
    return [p for p in engine.module.parameters() if getattr(p, "allreduce", True)]


def states_of_rank(engine: Engine) -> list[torch.Tensor]:
    """Return this rank's master weights and the states of its optimizer.

    States on NVMe are not in memory and therefore not part of the result.
    """
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    # Between two steps, the groups of ZeRO-3 are empty, and only the states have the masters.
    masters = dict.fromkeys([p for group in inner.param_groups for p in group["params"]])
    masters |= dict.fromkeys(key for key in inner.state if isinstance(key, torch.Tensor))
    states = [
        value
        for master in masters
        for value in inner.state.get(master, {}).values()
        if isinstance(value, torch.Tensor)
    ]
    return [local_part(tensor) for tensor in (*masters, *states)]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
