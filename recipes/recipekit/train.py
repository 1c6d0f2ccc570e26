"""The training loop: read this first.

Weights change in `train_step`; what we mend in DeepSpeed around the step is optim/repairs.py.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from .checkpoints.state import State
from .data.sameness import StreamState, merge_states, roll
from .engine import used
from .kernels.documents import for_layers
from .parallel import pipeline, plans, timeline
from .parallel.sequence import own_part
from .plan import Plan
from .runtime import ending, references
from .runtime.agree import check_peers, shared_problems
from .runtime.continuation import continue_command
from .runtime.corpus import first_day
from .runtime.ending import Ending
from .runtime.engine import Loaded, load_model, restore
from .runtime.failure import Peers
from .runtime.metrics import StepTimes, metrics_of, numbers_of_rank
from .runtime.prepare import Ready, find_checkpoint, join, prepare
from .runtime.sums import StepCounters, StepTotals, Sums, start_all_reduce
from .spec.engine import Engine
from .spec.mesh import Mesh
from .spec.refusal import Refusal, Say
from .spec.run_folder import EXPORT
from .spec.schedules import lr_at
from .spec.task import MicroBatch, Task
from .tasks.find import task_called, with_numbers
from .track.tracking import WANDB_ARTIFACT, NoTracker

# steps between two proofs that the peers of a data-parallel rank were given the same tokens
PEERS_EVERY = 10
FAILED_SAVES = "failed saves"  # of the extra counts: 1 if a save in the background has failed


class StepResult(TypedDict):
    """The results of a step over the global batch, equal on every rank."""

    loss: float
    grad_norm: float
    tokens: int  # labels, or samples: the count that the loss is divided by
    stop: str | None  # a reason of any rank
    means: dict[str, float]  # further numbers that the task reports of each step
    extra: dict[str, list[int]]  # the sums of the ranks' extra counts


def train_step(
    engine: Engine,
    task: Task,
    batches: list[MicroBatch],
    lr: float | None,
    counters: StepCounters,
    sums: Sums | None = None,
) -> StepResult:
    """Take one optimizer step (a collective).

    The loss is the mean over what the task counts in the global batch (tokens with a label),
    however the batch is split into micro-batches and ranks. `lr` None leaves the learning rate to
    the JSON's scheduler. `counters` are summed over the ranks, and `sums` is filled with what adds
    up in addition to the loss.
    """
    mesh = counters.mesh
    sums = sums or Sums()
    num_measures = len(task.measures) if task.each_step else None
    loss_and_measures = sums.start_step(num_measures, engine.device)
    set_learning_rate(engine, lr)

    # This sum runs during the first forward pass.
    num_labels = sum(int(task.count(batch).sum()) for batch in batches)
    totals = counters.start_sum(num_labels, engine.device)
    engine.accumulate(len(batches))
    task.before(engine, batches)

    if mesh.pp > 1:
        mean_loss = pipeline_step(engine, task, batches, totals, loss_and_measures)
    else:
        weight: torch.Tensor | None = None
        summing: dist.Work | None = None
        for batch in batches:
            batch = to_device(batch, engine.device)
            loss = summed_loss(task, task.forward(engine, batch), batch, sums)
            loss_and_measures[0] += loss.detach()

            # Undo the engine's mean over micro-batches and ranks, and divide by the labels instead.
            if weight is None:
                totals.wait()
                weight = len(batches) * mesh.dp * mesh.sp / totals.labels.clamp(min=1)

            # The sum over the ranks runs during the last backward pass.
            if engine.is_gradient_accumulation_boundary():
                summing = start_all_reduce(loss_and_measures)

            # With the last micro-batch of the step, the engine changes the weights.
            engine.backward(loss * weight)
            engine.step()

        assert summing is not None, "an optimizer step has at least one micro-batch"
        summing.wait()
        mean_loss = loss_and_measures[0] / totals.labels_over_ranks.clamp(min=1)

    task.after(engine)
    sums.reduce()
    return results_of(engine, task, mean_loss, loss_and_measures, totals)


def results_of(
    engine: Engine,
    task: Task,
    mean_loss: torch.Tensor,
    loss_and_measures: torch.Tensor,
    totals: StepTotals,
) -> StepResult:
    """Return the results of a finished step as plain numbers; the device is waited for."""
    counts = totals.unpack()
    means: dict[str, float] = {}
    if task.each_step:
        measured = loss_and_measures[1:] / totals.labels_over_ranks.clamp(min=1)
        means = means_of(task, mean_loss.item(), measured.tolist())
    return {
        "loss": mean_loss.item(),
        "grad_norm": float(engine.get_global_grad_norm()),
        "tokens": counts.labels,
        "stop": counts.stop,
        "means": means,
        "extra": counts.extra,
    }


def set_learning_rate(engine: Engine, lr: float | None) -> None:
    """Give each optimizer group its multiple of `lr`; None leaves the rates to DeepSpeed."""
    for group in engine.optimizer.param_groups if lr is not None else []:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def pipeline_step(
    engine: Engine,
    task: Task,
    batches: list[MicroBatch],
    totals: StepTotals,
    loss_and_measures: torch.Tensor,
) -> torch.Tensor:
    """Run all forwards, all backwards and the change of the weights in the order of the pipeline's
    schedule; return the mean loss, () (a collective).
    """
    mesh = totals.counters.mesh
    totals.wait()
    # Undo DeepSpeed's mean over micro-batches and ranks, and divide by the labels instead.
    weight = len(batches) * mesh.dp / totals.labels.clamp(min=1)
    mean_loss = engine.train_batch(for_stages(engine, task, batches, weight))

    # Only the ranks of the last stage have seen an output, but all ranks count labels.
    if task.each_step:
        dist.all_reduce(loss_and_measures.mul_(mesh.pp))
    return mean_loss


def summed_loss(task: Task, output: torch.Tensor, batch: MicroBatch, sums: Sums) -> torch.Tensor:
    """Computes the task's loss, (), summed over a micro-batch, and adds to `sums` what these
    keep.
    """
    if sums.measured is not None:
        sums.measured += task.measure(output, batch)
    if sums.scores is not None and task.score is not None:
        sums.scores.append(task.score(output, batch))
    if sums.by_domain is None or "domain" not in batch:
        return task.loss(output, batch, False)
    rows = task.loss(output, batch, True)  # (B,)
    sums.by_domain.index_add_(
        1, batch["domain"], torch.stack([rows.detach(), task.count(batch)]).double()
    )
    return rows.sum()


def means_of(task: Task, loss: float, measured: list[float]) -> dict[str, float]:
    """Names what a task tells besides the mean loss: the means of its measures, and what follows
    from all of these.
    """
    means = dict(zip(task.measures, measured, strict=True))
    return means | task.report({"loss": loss} | means)


def pipeline_loss(
    task: Task, sums: Sums, output: torch.Tensor, target: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Computes the loss on the last stage; DeepSpeed takes its mean over micro-batches and
    data-parallel ranks.
    """
    weight, *tensors = target
    batch = dict(zip((*task.targets, "domain"), tensors, strict=False))
    return summed_loss(task, output, batch, sums) * weight


def for_stages(
    engine: Engine, task: Task, batches: list[MicroBatch], weight: torch.Tensor
) -> Iterator[Any]:
    """Hands the stages what does not travel between them, and returns the micro-batches that the
    schedule asks for.
    """
    more = [
        to_device(
            {name: batch[name] for name in batch if name not in task.facts.inputs}, engine.device
        )
        for batch in batches
    ]
    pipeline.hand_over(
        engine.module, lambda last: [task.handed(batch, last) for batch in more], engine.device
    )
    return pipeline_batches(task, batches, weight, engine.device)


def pipeline_batches(
    task: Task, batches: list[MicroBatch], weight: torch.Tensor, device: torch.device
) -> Iterator[Any]:
    """Cuts each micro-batch into (what the first stage takes, what the loss takes), on the device.

    A micro-batch goes there when the schedule asks for it, without waiting. DeepSpeed 0.19.8 would
    clone it on the host, out of pinned memory, and wait for each copy (pipe/engine.py,
    _exec_load_micro_batch).
    """
    for batch in batches:
        batch = to_device(batch, device)
        targets = [batch[name] for name in (*task.targets, "domain") if name in batch]
        yield tuple(task.inputs_of(batch).values()), (weight, *targets)


@torch.no_grad()
def evaluate(
    engine: Engine, task: Task, batches: list[MicroBatch], mesh: Mesh, sums: Sums
) -> dict[str, float]:
    """Computes eval_loss, the mean loss of the held-out rows, and eval_NAME of what the task tells
    besides, the same on every rank and in every layout.

    A collective. Under a pipeline `sums` must be those that the loss of the last stage was made
    with.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=engine.device)
    totals[1] = sum(int(task.count(batch).sum()) for batch in batches)
    measured = sums.measured = torch.zeros(
        len(task.measures), dtype=torch.float64, device=engine.device
    )
    if mesh.pp > 1:
        dist.all_reduce(totals)
        counted = totals[1].clamp(min=1) / (mesh.tp * mesh.pp)
        # not eval_batch's own num_micro_batches: with it DeepSpeed 0.19.8 mixes up DualPipeV's
        # buffers and hangs (dualpipev.py, _phase1_buffer)
        of_a_step, engine.micro_batches = engine.micro_batches, len(batches)
        loss = engine.eval_batch(
            for_stages(engine, task, batches, len(batches) * mesh.dp / counted)
        )
        engine.micro_batches = of_a_step
        dist.all_reduce(measured)
        measured /= counted * mesh.tp  # only the last stage has seen an output
    else:
        engine.eval()
        for batch in batches:
            batch = to_device(batch, engine.device)
            totals[0] += summed_loss(task, task.forward(engine, batch), batch, sums)
        engine.train()
        dist.all_reduce(totals)
        dist.all_reduce(measured)
        loss = totals[0] / totals[1].clamp(min=1)
        measured /= totals[1].clamp(min=1)
    sums.measured = None
    means = {"loss": loss.item()} | means_of(task, loss.item(), measured.tolist())
    return {f"eval_{name}": value for name, value in means.items()}


def main(plan: Plan, peers: Peers | None = None) -> int:
    """Train as planned; return the exit code: 0 done, 1 the loss or a gradient was not finite, 143
    or 130 stopped.

    With `peers`, the failure of one rank ends all ranks from the moment when they have met.
    """
    say: Say = print if plan.command.rank == 0 else lambda _: None
    device = join(plan, peers, say)
    # Now, because a launcher may end before its ranks.
    again = command_to_continue(plan)
    plan = replace(plan, day=first_day(plan.resume_from), again=again)
    task = with_numbers(task_called(plan.recipe.task), plan.recipe)
    source = find_checkpoint(plan, say)

    # The reference model is the model that the run starts from, so it is asked before a checkpoint
    # is restored.
    loaded = load_model(plan, task, source, device, pipeline_loss, say)
    if task.score:
        references.fill(loaded, source, evaluate, say)
    loaded = restore(loaded, source, say)

    if loaded.state["step"] >= loaded.plan.last_step:
        finish_without_steps(loaded, say)
        return 0

    ready = prepare(loaded, peers, say)
    # `peers` is the first to see an exception: closing the stream or the tracker may wait for a
    # server, and a save for other ranks.
    closed = contextlib.closing
    with (
        ready.stopper,
        closed(ready.stream),
        closed(ready.saver),
        closed(ready.tracker),
        peers or contextlib.nullcontext(),
    ):
        ended = train_and_export(loaded, ready)
        if ready.plan.recipe.wandb_artifact:
            ready.stopper.boundary(next_within=WANDB_ARTIFACT)
        ending.close(ready.plan, ready.tracker, ended)
        ready.engine.destroy()
    return ended.code


def command_to_continue(plan: Plan) -> str:
    """Return the command that continues this run."""
    recipe = plan.recipe
    return continue_command(recipe.stop_at, recipe.resume, recipe.out, plan.command.typed, plan.out)


def exports_at_end(plan: Plan) -> bool:
    """Return True if the last step of this start is the last step of the run, which exports."""
    return plan.recipe.export and plan.last_step == plan.recipe.steps


def finish_without_steps(loaded: Loaded, say: Say) -> None:
    """Report that no step is left to take; write the export if an earlier start was ended before it
    could write it (a collective).
    """
    plan, recipe, step = loaded.plan, loaded.plan.recipe, loaded.state["step"]
    if loaded.merge_finished(say):
        return

    at = f", and --stop_at is {recipe.stop_at}" if recipe.stop_at else ""
    run = plan.out if recipe.resume == "auto" else recipe.resume
    say(f"nothing to do: the run in {run} has finished {step} of {recipe.steps} steps{at}")

    if exports_at_end(plan) and not (plan.out / EXPORT).exists():
        loaded.export(say)
        ending.close(plan, NoTracker(), ending.finished(plan, step))
        if recipe.wandb_artifact:
            say(
                "W&B: this start has no step, so it uploads no artifact. Upload it with: wandb"
                f" artifact put --type model {plan.out / EXPORT}"
            )


def train_and_export(loaded: Loaded, ready: Ready) -> Ending:
    """Take all steps and export the model; return how the run ended."""
    plan = ready.plan
    try:
        early = loop(ready)
        if early is None and exports_at_end(plan):
            ready.stopper.boundary(next_within=3600)
            with ready.tracker.doing("exporting"):
                loaded.export(ready.tracker.say)
    except Refusal as refusal:
        if plan.command.rank == 0:
            refusal.afterwards = partial(
                ending.close_refused, plan, ready.tracker, refusal, ready.state["step"]
            )
        raise
    return early or ending.finished(plan, ready.state["step"])


def loop(ready: Ready) -> Ending | None:
    """Step from `ready.state["step"]` to the last step, saving and evaluating on the way; return
    how the run ended if it ended before.
    """
    plan, engine = ready.plan, ready.engine
    recipe, mesh = plan.recipe, plan.mesh
    first, last = ready.state["step"] + 1, plan.last_step
    seen = 0  # a hash of all tokens that this rank was given

    for step in range(first, last + 1):
        begun = time.perf_counter()
        data = next_data(ready, step)
        seen = roll(seen, data.batches)
        batches = own_parts(plan, data.batches)
        lr = lr_at(recipe, step) if "scheduler" not in plan.ds_config else None
        counters = counters_of(ready, batches, data)

        with watched(ready, step, first) as spans:
            result = train_step(engine, ready.task, batches, lr, counters, ready.sums)
        times = StepTimes(time.perf_counter() - begun, data.wait)
        ready.stopper.step_took(times.step)

        if not is_finite(result, plan.precision):
            return stop_diverged(ready, step, result)

        note_step(ready, step, result)
        metrics = metrics_of(ready, step, result, data.state, times, lr)
        evaluate_and_log(ready, step, metrics)
        timeline.report(engine, spans, plan.command.name, step, plan.out, ready.tracker.say)
        ready.stopper.boundary()

        if step % PEERS_EVERY == 0 or step == last:
            check_peers(mesh, seen, step, engine.device)
        save_if_due(ready, step, result, data.state)

        # After the last step only the export is left to stop, and the next start repeats it after a
        # kill.
        if result["stop"] and step < last:
            return stop_early(ready, result["stop"], data.broken)
    return None


@contextlib.contextmanager
def watched(ready: Ready, step: int, first: int) -> Iterator[list[timeline.Span]]:
    """Check in the first step of a start that the plans fit and that the ranks use the same
    parameters, and time one step of a pipeline.
    """
    plan, engine = ready.plan, ready.engine
    # OUT/schedule.png shows this step: the first steps warm up.
    drawn = min(first + 2, plan.last_step)
    with (
        plans.fitting(plan.recipe.model, plan.mesh, step == first),
        used.compared(engine, plan.mesh, step, on=step == first),
        timeline.record(engine, on=step == drawn) as spans,
    ):
        yield spans


@dataclass(frozen=True)
class StepData:
    """The data of one step for one data-parallel rank."""

    batches: list[MicroBatch]  # whole rows, also under sequence parallelism
    state: StreamState  # after these rows
    broken: BaseException | None  # why the stream has no further step
    wait: float  # seconds


def next_data(ready: Ready, step: int) -> StepData:
    """Read the micro-batches of a step, and look for the error of the step after it.

    The error is found one step early, so that all ranks stop together. A rank that was asked to
    stop does not wait for more data, and saves after this step.
    """
    begun = time.perf_counter()
    batches, state = next(ready.stream)
    broken = None
    if step < ready.plan.last_step:
        broken = ready.stream.error_ahead(lambda: ready.stopper.requested)
    return StepData(batches, state, broken, time.perf_counter() - begun)


def own_parts(plan: Plan, batches: list[MicroBatch]) -> list[MicroBatch]:
    """Return this rank's parts of the micro-batches under sequence parallelism."""
    sp_rank = plan.mesh.coords(plan.command.rank)["sp"]
    return [own_part(batch, plan.mesh.sp, sp_rank) for batch in batches]


def counters_of(ready: Ready, batches: list[MicroBatch], data: StepData) -> StepCounters:
    """Return the counts that this rank adds to a step's sums."""
    extra = numbers_of_rank(ready, batches) | {FAILED_SAVES: [int(ready.saver.broken)]}
    stop = "bad data" if data.broken else ready.stopper.requested
    return StepCounters(ready.plan.mesh, stop, extra)


def is_finite(result: StepResult, precision: str) -> bool:
    """Return True if the run can continue after a step with this loss and gradient norm.

    fp16 skips steps whose gradient overflows and lowers its loss scale, so only its loss has to be
    finite.
    """
    return math.isfinite(result["loss"]) and (
        math.isfinite(result["grad_norm"]) or precision == "fp16"
    )


def note_step(ready: Ready, step: int, result: StepResult) -> None:
    """Count a finished step in the state that checkpoints keep."""
    state = ready.state
    state["step"], state["tokens"] = step, state["tokens"] + result["tokens"]
    if ready.task.samples:
        rows = ready.plan.recipe.ramp.rows(step)
        state["unusable"] = state.get("unusable", 0) + rows - result["tokens"]


def evaluate_and_log(ready: Ready, step: int, metrics: dict[str, Any]) -> None:
    """Log the metrics of a step, with an evaluation of the held-out rows if one is due (a
    collective).
    """
    recipe = ready.plan.recipe
    if ready.held_out and (step % recipe.eval_every == 0 or step == recipe.steps):
        ready.stopper.boundary(next_within=3600)
        begun = time.perf_counter()
        with ready.tracker.doing("evaluating"):
            metrics |= evaluate(
                ready.engine, ready.task, ready.held_out, ready.plan.mesh, ready.sums
            )
        metrics["eval_s"] = time.perf_counter() - begun

    loss = metrics.get("eval_loss", math.nan)
    ready.state["eval_loss"] = loss if math.isfinite(loss) else None
    ready.tracker.log(metrics)


def save_if_due(ready: Ready, step: int, result: StepResult, data_state: StreamState) -> None:
    """Save a finished step if the run ends with it or a save is due (a collective)."""
    # A save in the background has failed on any rank.
    if any(result["extra"][FAILED_SAVES]):
        ready.saver.wait()

    regular = ready.plan.recipe.saves_at(step)
    at_end = bool(result["stop"]) or step == ready.plan.last_step
    if at_end or regular or ready.saver.attempts.due(step):
        save_step(ready, data_state, regular, at_end)


def save_step(ready: Ready, data_state: StreamState, regular: bool, at_end: bool) -> None:
    """Save the step that was just taken (a collective); wait until it is complete if the run ends
    with it.
    """
    ready.stopper.boundary(next_within=3600)  # writing a large model takes longer than a step
    begun = time.perf_counter()
    everyone: list[Any] = [None] * ready.plan.mesh.world
    dist.all_gather_object(everyone, data_state)
    state: State = {**ready.state, "data": merge_states(everyone)}
    with ready.tracker.doing("saving"):
        if at_end:
            ready.saver.save_last(state)
        else:
            ready.saver.save(state, regular)
    ready.tracker.amend({"save_stall_s": time.perf_counter() - begun})
    ready.stopper.boundary()


def stop_diverged(ready: Ready, step: int, result: StepResult) -> Ending:
    """End a run whose loss or gradient is not finite, after the save that is under way."""
    ready.saver.wait()
    return ending.diverged(
        ready.plan, step, result["loss"], result["grad_norm"], ready.saver.attempts.saved
    )


def stop_early(ready: Ready, reason: str, broken: BaseException | None) -> Ending:
    """End a run before its last step, for a reason that all ranks know (a collective).

    `broken` is why this rank's data ends, if it does.
    """
    ready.stopper.request(reason)  # on the ranks that were not told themselves
    ready.stopper.boundary(next_within=60)
    # not `requested`: a rank keeps its own first reason
    problems = shared_problems(broken) if reason == "bad data" else []
    return ending.stopped(ready.plan, reason, ready.state["step"], problems)


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    moved = {
        name: tensor.to(device, non_blocking=True).contiguous() for name, tensor in batch.items()
    }
    return moved | (
        {"documents": for_layers(batch["documents"], device)} if "documents" in batch else {}
    )
