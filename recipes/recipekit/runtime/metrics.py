"""The line of metrics.jsonl that a step leaves, and what the ranks have to add up for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..data.sameness import DomainState, StreamState
from ..model.flops import keys_seen
from ..spec.task import MicroBatch
from .facts import peak_memory
from .prepare import Ready

# names of the extra counts of a step
PEAKS, UNITS_AND_KEYS = "peak memory", "units and keys"


@dataclass(frozen=True)
class StepTimes:
    """The seconds of a step, and the part of them in which it waited for data."""

    step: float
    data_wait: float


def numbers_of_rank(ready: Ready, batches: list[MicroBatch]) -> dict[str, list[int]]:
    """Return the extra counts that this rank adds to a step's sums over all ranks, for
    `metrics_of`.

    Each rank's peak memory of the steps before has its own place; then come the keys that the
    queries of `batches` see.
    """
    peaks = [0] * ready.plan.mesh.world
    peaks[ready.plan.command.rank] = peak_memory(ready.engine.device)
    numbers = {PEAKS: peaks}
    if ready.flops and ready.peak:
        numbers[UNITS_AND_KEYS] = _flops_of(ready, batches)
    return numbers


def _flops_of(ready: Ready, batches: list[MicroBatch]) -> list[int]:
    """What the FLOPs of a step depend on: its units, tokens or samples, those that only fill up
    included; then the keys that the queries see.
    """
    assert ready.flops is not None
    name = next(iter(ready.task.facts.inputs))
    units = sum(
        batch[name].numel() if ready.task.facts.of_tokens else len(batch[name]) for batch in batches
    )
    return [units, *keys_seen(batches, ready.flops.per_key, ready.flops.both_ways)]


def metrics_of(
    ready: Ready,
    step: int,
    result: Mapping[str, Any],
    data_state: StreamState,
    times: StepTimes,
    lr: float | None,
) -> dict[str, Any]:
    """Return the metrics of one step; a collective after the last step.

    `result` is the result of `train_step`, and `lr` the learning rate that it was given.
    """
    recipe = ready.plan.recipe
    ready.epochs.report(data_state, ready.tracker.say)
    last = step == ready.plan.last_step or bool(result["stop"])
    unit = ready.task.facts.unit  # the keys of the other unit are absent
    metrics = {
        "step": step,
        "loss": result["loss"],
        "grad_norm": result["grad_norm"],
        "lr": ready.engine.optimizer.param_groups[0]["lr"] if lr is None else lr,
        unit: ready.state["tokens"],
        # data, forward, backward and update; an evaluation and a save come after it
        "step_s": times.step,
        f"{unit}_per_s": result["tokens"] / times.step,
        "data_wait_s": times.data_wait,
        **ready.epochs.complete(data_state),
        "peak_mem_bytes": largest_peak(ready.engine.device, result["extra"][PEAKS], exact=last),
    }
    if recipe.batch_ramp:
        metrics |= {"global_batch": recipe.ramp.rows(step), f"step_{unit}": result["tokens"]}
    metrics |= result["means"]
    if ready.sums.by_domain is not None:
        metrics |= metrics_by_domain(ready.sums.by_domain, data_state["domains"], unit)
    metrics |= metrics_of_rows(ready, data_state["domains"])
    if ready.flops and ready.peak:
        metrics["mfu"] = model_flops_utilization(ready, result["extra"], times.step)
    return metrics


def metrics_by_domain(
    sums: torch.Tensor, domains: Mapping[str, DomainState], unit: str
) -> dict[str, Any]:
    """Return the mean loss of each corpus in this step, and its units in the whole run.

    `sums`: (2, domains), loss and count of each corpus.
    """
    metrics: dict[str, Any] = {}
    for domain, loss, counted in zip(domains, *sums.tolist(), strict=True):
        if counted:
            metrics[f"loss/{domain}"] = loss / counted
        metrics[f"{unit}/{domain}"] = domains[domain]["tokens"]
    return metrics


def metrics_of_rows(ready: Ready, domains: Mapping[str, DomainState]) -> dict[str, Any]:
    """Return how many rows the run has left out: bad rows, empty rows and lost chats."""
    metrics: dict[str, Any] = {}
    if ready.plan.recipe.bad_rows == "skip":
        bad = sum(domain["bad"] for domain in domains.values())
        metrics["bad_rows"] = ready.state.get("unusable", 0) + bad
    if empty := sum(domain.get("empty", 0) for domain in domains.values()):
        metrics["empty_rows"] = empty
    if ready.task.facts.chats:
        metrics |= chats_lost([domain.get("lost", []) for domain in domains.values()])
    return metrics


def model_flops_utilization(
    ready: Ready, extra: Mapping[str, list[int]], step_seconds: float
) -> float:
    """Return the FLOPs of a step relative to what the devices could compute in its time."""
    assert ready.flops is not None and ready.peak is not None
    mesh = ready.plan.mesh
    # The tensor-parallel and pipeline ranks count the same rows.
    units, *keys = (number // (mesh.tp * mesh.pp) for number in extra[UNITS_AND_KEYS])
    return ready.flops.of_step(units, keys) / (ready.peak * mesh.world * step_seconds)


def chats_lost(of_domains: list[list[int]]) -> dict[str, Any]:
    """Return the metrics of lost chats: numbers of rows, and the share of the answers' text that
    the template drops.
    """
    rows, cut, barren, said, dropped = (
        sum(column) for column in zip([0] * 5, *filter(None, of_domains), strict=True)
    )
    return {
        "rows_read": rows,
        "rows_cut": cut,
        "rows_without_target": barren,
        "answers_dropped": dropped / max(1, said),
    }


def largest_peak(device: torch.device, before: list[int], exact: bool) -> int:
    """The most that any rank has taken of its device: this rank until now, the others until the
    step began (`before`).

    `exact`: until now for all (a collective), for the last line of a run.
    """
    own = peak_memory(device)
    if exact:
        everyone = torch.tensor(own, dtype=torch.int64, device=device)
        dist.all_reduce(everyone, op=dist.ReduceOp.MAX)
        return int(everyone)
    return max(own, *before)
