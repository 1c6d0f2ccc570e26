"""The line of metrics.jsonl that a step leaves, and what the ranks have to add up for it."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..data.sameness import StreamState
from ..model.flops import keys_seen
from ..spec.task import MicroBatch
from .facts import peak_memory
from .prepare import Ready


def numbers_of_rank(ready: Ready, batches: list[MicroBatch]) -> list[int]:
    """What this rank adds to the sum that a step makes over all ranks, for `metrics_of`.

    Each rank's peak memory of the steps before, in a place of its own; then the keys that the
    queries of `batches` see.
    """
    peaks = [0] * ready.plan.mesh.world
    peaks[ready.plan.command.rank] = peak_memory(ready.engine.device)
    return [*peaks, *(_flops_of(ready, batches) if ready.flops and ready.peak else [])]


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
    seconds: float,
    data_wait: float,
    lr: float | None,
) -> dict[str, Any]:
    """The metrics of one step, of which `result` is what `train_step` returned, and `lr` what it
    was given; a collective after the last step.
    """
    recipe, mesh = ready.plan.recipe, ready.plan.mesh
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
        "step_s": seconds,
        f"{unit}_per_s": result["tokens"] / seconds,
        "data_wait_s": data_wait,
        **ready.epochs.complete(data_state),
        "peak_mem_bytes": largest_peak(
            ready.engine.device, result["more"][: mesh.world], exact=last
        ),
    }
    if recipe.batch_ramp:
        metrics |= {"global_batch": recipe.ramp.rows(step), f"step_{unit}": result["tokens"]}
    metrics |= result["means"]
    if ready.sums.by_domain is not None:
        for domain, loss, counted in zip(
            data_state["domains"], *ready.sums.by_domain.tolist(), strict=True
        ):
            metrics |= {f"loss/{domain}": loss / counted} if counted else {}
            metrics[f"{unit}/{domain}"] = data_state["domains"][domain]["tokens"]
    if recipe.bad_rows == "skip":
        metrics["bad_rows"] = ready.state.get("unusable", 0) + sum(
            domain["bad"] for domain in data_state["domains"].values()
        )
    if empty := sum(domain.get("empty", 0) for domain in data_state["domains"].values()):
        metrics["empty_rows"] = empty
    if ready.task.facts.chats:
        metrics |= chats_lost([domain.get("lost", []) for domain in data_state["domains"].values()])
    if ready.flops and ready.peak:
        units, *keys = (number // (mesh.tp * mesh.pp) for number in result["more"][mesh.world :])
        metrics["mfu"] = ready.flops.of_step(units, keys) / (ready.peak * mesh.world * seconds)
    return metrics


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
