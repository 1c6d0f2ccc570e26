"""A step's line in metrics.jsonl, and the counts that are summed over the ranks for this line."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..data.stream_state import DomainState, StreamState
from ..model.flops import attended_keys
from ..spec.task import MicroBatch
from .prepare import TrainingRun
from .run_metadata import peak_memory

# names of a step's extra counts
PEAK_MEMORY, UNITS_AND_KEYS = "peak memory", "units and keys"


@dataclass(frozen=True)
class StepTimes:
    """The duration of a step and the part of it spent waiting for data, in seconds."""

    step: float
    data_wait: float


def extra_counts_of_rank(run: TrainingRun, batches: list[MicroBatch]) -> dict[str, list[int]]:
    """Return this rank's extra counts, which are summed over all ranks for `metrics_of`.

    Each rank has a separate slot for the peak memory of its previous steps. The other counts are
    the number of units in `batches` and the number of keys that their queries attend to.
    """
    peaks = [0] * run.plan.mesh.world
    peaks[run.plan.command.rank] = peak_memory(run.engine.device)
    numbers = {PEAK_MEMORY: peaks}
    if run.flops and run.peak_flops:
        numbers[UNITS_AND_KEYS] = _flops_counts(run, batches)
    return numbers | run.rank_clock.counts()


def _flops_counts(run: TrainingRun, batches: list[MicroBatch]) -> list[int]:
    """Return the counts that determine a step's FLOPs.

    The first count is the number of units (tokens or samples), including padding. The numbers of
    keys that the queries attend to follow.
    """
    assert run.flops is not None
    name = next(iter(run.task.spec.inputs))
    units = sum(
        batch[name].numel() if run.task.spec.reads_tokens else len(batch[name]) for batch in batches
    )
    return [units, *attended_keys(batches, run.flops.per_key, run.flops.bidirectional)]


def metrics_of(
    run: TrainingRun,
    step: int,
    result: Mapping[str, Any],
    data_state: StreamState,
    times: StepTimes,
    lr: float | None,
) -> dict[str, Any]:
    """Return the metrics of one step. After the run's last step this is a collective.

    `result` is the result of `train_step`, and `lr` is the learning rate that was passed to it.
    """
    recipe = run.plan.recipe
    run.epochs.report(data_state, run.tracker.say)
    last = step == run.plan.last_step or bool(result["stop"])
    unit = run.task.spec.unit  # metrics of the other unit are absent
    metrics = {
        "step": step,
        "time": time.time(),
        "loss": result["loss"],
        "grad_norm": result["grad_norm"],
        "lr": run.engine.optimizer.param_groups[0]["lr"] if lr is None else lr,
        unit: run.state["tokens"],
        # data, forward, backward and update, without an evaluation or save that follows
        "step_s": times.step,
        f"{unit}_per_s": result["tokens"] / times.step,
        "data_wait_s": times.data_wait,
        **run.epochs.completed_epochs(data_state),
        "peak_mem_bytes": max_peak_memory(
            run.engine.device, result["extra"][PEAK_MEMORY], exact=last
        ),
    }
    if recipe.batch_ramp:
        metrics |= {"global_batch": recipe.ramp.rows(step), f"step_{unit}": result["tokens"]}
    metrics |= run.rank_clock.metrics(result["extra"])
    metrics |= metrics_of_watch(run, result, times) | result["means"]
    if run.step_metrics.by_domain is not None:
        metrics |= metrics_by_domain(run.step_metrics.by_domain, data_state["domains"], unit)
    metrics |= metrics_of_rows(run, data_state["domains"])
    if run.flops and run.peak_flops:
        metrics["mfu"] = model_flops_utilization(run, result["extra"], times.step)
    return metrics


def metrics_of_watch(
    run: TrainingRun, result: Mapping[str, Any], times: StepTimes
) -> dict[str, Any]:
    """Return the metrics that show whether a run is healthy.

    They are the goodput and, if they apply, the highest loss of a rank, the number of steps that
    changed no weight, and the fp16 loss scale.
    """
    metrics: dict[str, Any] = {"goodput": run.watch.goodput.add(times.step)}
    if len(result["losses_of_ranks"]) > 1 and run.plan.mesh.dp * run.plan.mesh.sp > 1:
        metrics["loss_max"] = max(result["losses_of_ranks"])
    if skipped := run.state.get("skipped"):
        metrics["skipped"] = skipped
    if (scale := run.engine.current_loss_scale()) is not None:
        metrics["loss_scale"] = scale
    return metrics


def metrics_by_domain(
    sums: torch.Tensor, domains: Mapping[str, DomainState], unit: str
) -> dict[str, Any]:
    """Return each corpus's mean loss in this step and its number of units in the whole run.

    `sums`: (2, domains), the loss and count of each corpus.
    """
    metrics: dict[str, Any] = {}
    for domain, loss, counted in zip(domains, *sums.tolist(), strict=True):
        if counted:
            metrics[f"loss/{domain}"] = loss / counted
        metrics[f"{unit}/{domain}"] = domains[domain]["tokens"]
    return metrics


def metrics_of_rows(run: TrainingRun, domains: Mapping[str, DomainState]) -> dict[str, Any]:
    """Return how many rows the run has skipped: bad rows, empty rows and discarded chats."""
    metrics: dict[str, Any] = {}
    if run.plan.recipe.bad_rows == "skip":
        bad = sum(domain["bad"] for domain in domains.values())
        metrics["bad_rows"] = run.state.get("unusable", 0) + bad
    if empty := sum(domain.get("empty", 0) for domain in domains.values()):
        metrics["empty_rows"] = empty
    if run.task.spec.chats:
        metrics |= chats_lost([domain.get("lost", []) for domain in domains.values()])
    return metrics


def model_flops_utilization(
    run: TrainingRun, extra: Mapping[str, list[int]], step_seconds: float
) -> float:
    """Return a step's FLOPs divided by the peak FLOPs of all devices in the same time."""
    assert run.flops is not None and run.peak_flops is not None
    mesh = run.plan.mesh
    # Ranks in the same tensor-parallel and pipeline groups count the same rows.
    units, *keys = (number // (mesh.tp * mesh.pp) for number in extra[UNITS_AND_KEYS])
    return run.flops.of_step(units, keys) / (run.peak_flops * mesh.world * step_seconds)


def chats_lost(of_domains: list[list[int]]) -> dict[str, Any]:
    """Return the metrics of discarded chats.

    They are the number of affected rows and the fraction of the answer text that the template
    drops.
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


def max_peak_memory(device: torch.device, before: list[int], exact: bool) -> int:
    """Return the highest peak device memory among the ranks.

    For this rank, the peak covers the run until now. For the other ranks it covers the time before
    the step (`before`). With `exact`, the peak covers all ranks until now (a collective), for a
    run's last line.
    """
    own = peak_memory(device)
    if exact:
        everyone = torch.tensor(own, dtype=torch.int64, device=device)
        dist.all_reduce(everyone, op=dist.ReduceOp.MAX)
        return int(everyone)
    return max(own, *before)
