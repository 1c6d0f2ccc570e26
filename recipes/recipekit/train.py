"""The training loop: read this file first.

Weights change in `train_step`. The workarounds around DeepSpeed's step are in optim/repairs.py.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NotRequired, TypedDict

import torch
import torch.distributed as dist

from .checkpoints.state import TrainState
from .data.stream_state import StreamState, merge_states, roll_batch_hash
from .engine import unused_parameters
from .kernels.documents import as_attention_mask
from .parallel import pipeline, plans, timeline
from .parallel.sequence import local_sequence_chunk
from .plan import RunPlan
from .runtime import ending, reference_logprobs, replay
from .runtime.continuation import continue_command
from .runtime.corpus import first_start_date
from .runtime.ending import Ending
from .runtime.engine import TrainingModel, load_model, restore_checkpoint
from .runtime.failure import Peers
from .runtime.metrics import StepTimes, extra_counts_of_rank, metrics_of
from .runtime.prepare import (
    TrainingRun,
    find_checkpoint,
    join_ranks,
    prepare_training,
    watch_for_hangs,
)
from .runtime.rank_consistency import (
    check_same_compilation,
    check_same_tokens,
    shared_problems,
)
from .runtime.rewind import Rewind, rewind, rewind_or_stop
from .runtime.step_metrics import StepCounters, StepMetrics, StepTotals, start_all_reduce
from .spec.engine import Engine
from .spec.errors import ConfigError, Say
from .spec.mesh import Mesh
from .spec.run_folder import EXPORT
from .spec.schedules import lr_at
from .spec.task import MicroBatch, Task
from .tasks.find import load_task, with_hyperparameters
from .track.tracking import WANDB_ARTIFACT, NoTracker
from .watch.alerts import ERROR, RESTART, Alert
from .watch.blame import BadValue
from .watch.monitor import REWIND, STOP

# Number of steps between two checks that a data-parallel rank's peers received the same tokens.
CHECK_TOKENS_EVERY = 10
FAILED_SAVES = "failed saves"  # key in the extra counts; 1 if a background save has failed


class StepResult(TypedDict):
    """A step's results over the global batch, equal on every rank."""

    loss: float
    grad_norm: float
    tokens: int  # labels or samples: the divisor of the loss
    stop: str | None  # a stop reason from any rank
    means: dict[str, float]  # further metrics that the task reports at each step
    extra: dict[str, list[int]]  # sums of the extra counts over the ranks
    losses_of_ranks: list[float]  # mean loss of each rank's own labels; [] under a pipeline
    bad_value: NotRequired[BadValue | None]  # the first one of a step that was computed again


def train_step(
    engine: Engine,
    task: Task,
    batches: list[MicroBatch],
    lr: float | None,
    counters: StepCounters,
    step_metrics: StepMetrics | None = None,
) -> StepResult:
    """Take one optimizer step (a collective operation).

    The loss is the mean over the task's units in the global batch (tokens with a label, or
    samples). It does not depend on how the batch is divided into micro-batches and ranks. If `lr`
    is None, the JSON's scheduler sets the learning rate. `counters` are summed over the ranks, and
    `step_metrics` receives the step's other sums.
    """
    mesh = counters.mesh
    step_metrics = step_metrics or StepMetrics()
    num_measures = len(task.measures) if task.reports_each_step else None
    sums = step_metrics.start_step(num_measures, mesh.world, engine.device)
    set_learning_rate(engine, lr)

    # This sum is computed during the first forward pass.
    num_labels = sum(int(task.count(batch).sum()) for batch in batches)
    totals = counters.start_sum(num_labels, engine.device)
    engine.accumulate(len(batches))
    task.before_step(engine, batches)

    if mesh.pp > 1:
        mean_loss = pipeline_step(engine, task, batches, totals, sums)
    else:
        weight: torch.Tensor | None = None
        summing: dist.Work | None = None
        for batch in batches:
            batch = to_device(batch, engine.device)
            loss = summed_loss(task, task.forward(engine, batch), batch, step_metrics)
            sums[0] += loss.detach()

            # Undo the engine's mean over micro-batches and ranks, and divide by the number of
            # labels instead.
            if weight is None:
                totals.wait()
                weight = len(batches) * mesh.dp * mesh.sp / totals.labels.clamp(min=1)

            # The sum over the ranks is computed during the last backward pass.
            if engine.is_gradient_accumulation_boundary():
                step_metrics.note_own_loss(sums[0], num_labels)
                summing = start_all_reduce(sums)

            # On the step's last micro-batch, the engine changes the weights.
            engine.backward(loss * weight)
            engine.step()

        assert summing is not None, "an optimizer step has at least one micro-batch"
        summing.wait()
        mean_loss = sums[0] / totals.labels_over_ranks.clamp(min=1)

    task.after_step(engine)
    step_metrics.reduce()
    return step_result_of(engine, task, mean_loss, step_metrics, totals)


def step_result_of(
    engine: Engine,
    task: Task,
    mean_loss: torch.Tensor,
    step_metrics: StepMetrics,
    totals: StepTotals,
) -> StepResult:
    """Return a finished step's results as plain numbers. This call waits for the device."""
    counts, mesh = totals.unpack(), totals.counters.mesh
    means: dict[str, float] = {}
    if task.reports_each_step and step_metrics.measures is not None:
        measured = step_metrics.measures / totals.labels_over_ranks.clamp(min=1)
        means = reported_means(task, mean_loss.item(), measured.tolist())
    losses = step_metrics.take_losses_of_ranks()
    return {
        "loss": mean_loss.item(),
        "grad_norm": float(engine.get_global_grad_norm()),
        "tokens": counts.labels,
        "stop": counts.stop,
        "means": means,
        "extra": counts.extra,
        "losses_of_ranks": losses if mesh.pp == 1 else [],
    }


def set_learning_rate(engine: Engine, lr: float | None) -> None:
    """Set each optimizer group's learning rate to the group's multiple of `lr`.

    If `lr` is None, DeepSpeed sets the rates.
    """
    for group in engine.optimizer.param_groups if lr is not None else []:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def pipeline_step(
    engine: Engine,
    task: Task,
    batches: list[MicroBatch],
    totals: StepTotals,
    sums: torch.Tensor,
) -> torch.Tensor:
    """Run a full step in the order of the pipeline's schedule (a collective operation).

    The step includes all forward and backward passes and the weight update. Return the mean loss,
    ().
    """
    mesh = totals.counters.mesh
    totals.wait()
    # Undo DeepSpeed's mean over micro-batches and ranks, and divide by the number of labels
    # instead.
    weight = len(batches) * mesh.dp / totals.labels.clamp(min=1)
    mean_loss = engine.train_batch(pipeline_inputs(engine, task, batches, weight))

    # Only the last stage's ranks have seen an output, but all ranks count labels.
    if task.reports_each_step:
        dist.all_reduce(sums.mul_(mesh.pp))
    return mean_loss


def summed_loss(
    task: Task, output: torch.Tensor, batch: MicroBatch, step_metrics: StepMetrics
) -> torch.Tensor:
    """Return the task's loss, (), summed over a micro-batch, and update `step_metrics`."""
    if step_metrics.measures is not None:
        step_metrics.measures += task.measure(output, batch)
    if step_metrics.row_logprobs is not None and task.row_logprobs is not None:
        step_metrics.row_logprobs.append(task.row_logprobs(output, batch))
    if step_metrics.by_domain is None or "domain" not in batch:
        return task.loss(output, batch, False)
    rows = task.loss(output, batch, True)  # (B,)
    step_metrics.by_domain.index_add_(
        1, batch["domain"], torch.stack([rows.detach(), task.count(batch)]).double()
    )
    return rows.sum()


def reported_means(task: Task, loss: float, measures: list[float]) -> dict[str, float]:
    """Return the task's metrics, except the mean loss.

    The result contains the means of the task's measures, and values derived from all means.
    """
    means = dict(zip(task.measures, measures, strict=True))
    return means | task.report({"loss": loss} | means)


def pipeline_loss(
    task: Task, step_metrics: StepMetrics, output: torch.Tensor, target: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Return the loss on the last stage.

    DeepSpeed averages this loss over micro-batches and data-parallel ranks.
    """
    weight, *tensors = target
    batch = dict(zip((*task.targets, "domain"), tensors, strict=False))
    return summed_loss(task, output, batch, step_metrics) * weight


def pipeline_inputs(
    engine: Engine, task: Task, batches: list[MicroBatch], weight: torch.Tensor
) -> Iterator[Any]:
    """Pass local inputs to the stages, and return the micro-batches for the schedule.

    Local inputs are tensors that are not sent from stage to stage.
    """
    more = [
        to_device(
            {name: batch[name] for name in batch if name not in task.spec.inputs}, engine.device
        )
        for batch in batches
    ]
    pipeline.set_stage_inputs(
        engine.module,
        lambda last: [task.stage_kwargs(batch, last) for batch in more],
        engine.device,
    )
    return pipeline_batches(task, batches, weight, engine.device)


def pipeline_batches(
    task: Task, batches: list[MicroBatch], weight: torch.Tensor, device: torch.device
) -> Iterator[Any]:
    """For each micro-batch, yield (inputs of the first stage, inputs of the loss) on the device.

    When the schedule needs a micro-batch, it is copied asynchronously. DeepSpeed 0.19.8 would clone
    it on the host, outside pinned memory, and wait for each copy (pipe/engine.py,
    _exec_load_micro_batch).
    """
    for batch in batches:
        batch = to_device(batch, device)
        targets = [batch[name] for name in (*task.targets, "domain") if name in batch]
        yield tuple(task.inputs_of(batch).values()), (weight, *targets)


@torch.no_grad()
def evaluate(
    engine: Engine, task: Task, batches: list[MicroBatch], mesh: Mesh, step_metrics: StepMetrics
) -> dict[str, float]:
    """Return eval_loss, the mean loss over held-out rows, and the task's metrics as eval_NAME.

    This is a collective operation, and its results are the same on every rank and in every layout.
    Under a pipeline, `step_metrics` must be the object with which the last stage's loss was
    created.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=engine.device)
    totals[1] = sum(int(task.count(batch).sum()) for batch in batches)
    measured = step_metrics.measures = torch.zeros(
        len(task.measures), dtype=torch.float64, device=engine.device
    )
    if mesh.pp > 1:
        dist.all_reduce(totals)
        counted = totals[1].clamp(min=1) / (mesh.tp * mesh.pp)
        # Do not use the num_micro_batches argument of eval_batch, with which DeepSpeed 0.19.8
        # confuses DualPipeV's buffers and hangs (dualpipev.py, _phase1_buffer).
        of_a_step, engine.micro_batches = engine.micro_batches, len(batches)
        loss = engine.eval_batch(
            pipeline_inputs(engine, task, batches, len(batches) * mesh.dp / counted)
        )
        engine.micro_batches = of_a_step
        dist.all_reduce(measured)
        measured /= counted * mesh.tp  # only the last stage has seen an output
    else:
        engine.eval()
        for batch in batches:
            batch = to_device(batch, engine.device)
            totals[0] += summed_loss(task, task.forward(engine, batch), batch, step_metrics)
        engine.train()
        dist.all_reduce(totals)
        dist.all_reduce(measured)
        loss = totals[0] / totals[1].clamp(min=1)
        measured /= totals[1].clamp(min=1)
    step_metrics.measures = None
    means = {"loss": loss.item()} | reported_means(task, loss.item(), measured.tolist())
    return {f"eval_{name}": value for name, value in means.items()}


def main(plan: RunPlan, peers: Peers | None = None) -> int:
    """Train as planned and return the exit code.

    Exit codes: 0 success, 1 a loss or gradient that is not finite, or bad data in the next step. A
    signal gives 128 plus its number, such as 143 or 130, and a lost launcher gives 143. With
    `peers`, one rank's failure ends all ranks once they have met.
    """
    say: Say = print if plan.command.rank == 0 else lambda _: None
    device = join_ranks(plan, peers, say)
    # Determine the command now, because a launcher may end before its ranks.
    again = resume_command_of(plan)
    plan = replace(plan, day=first_start_date(plan.resume_from), resume_command=again)
    task = with_hyperparameters(load_task(plan.recipe.task), plan.recipe)
    source = find_checkpoint(plan, say)

    # The reference model is the model from which the run starts, so its log-probabilities must be
    # computed before a checkpoint is restored.
    loaded = load_model(plan, task, source, device, pipeline_loss, say)
    if task.row_logprobs:
        reference_logprobs.run_reference_pass(loaded, source, evaluate, say)
    loaded = restore_checkpoint(loaded, source, say)

    if loaded.state["step"] >= loaded.plan.last_step:
        finish_without_steps(loaded, say)
        return 0

    ready = prepare_training(loaded, peers, say)
    watch_for_hangs(ready, peers)
    # `peers` must receive an exception first, because closing the stream or the tracker may wait
    # for a server, and closing the saver may wait for other ranks.
    closed = contextlib.closing
    with (
        ready.stopper,
        contextlib.ExitStack() as streams,
        closed(ready.saver),
        closed(ready.tracker),
        closed(ready.watch),
        closed(ready.rank_clock),
        peers or contextlib.nullcontext(),
    ):
        streams.callback(lambda: ready.stream.close())  # a rewind opens another stream
        ended = train_and_export(loaded, ready)
        while isinstance(ended, Rewind):
            ready = rewind(loaded, ready, ended)
            ended = train_and_export(loaded, ready)
        if ready.plan.recipe.wandb_artifact:
            ready.stopper.boundary(next_within=WANDB_ARTIFACT)
        ready.watch.hang.close()
        ending.close_run(ready.plan, ready.tracker, ended)
        ready.engine.destroy()
    return ended.code


def resume_command_of(plan: RunPlan) -> str:
    """Return the command that resumes this run."""
    recipe = plan.recipe
    return continue_command(recipe.stop_at, recipe.resume, recipe.out, plan.command.typed, plan.out)


def exports_at_end(plan: RunPlan) -> bool:
    """Return True if this start reaches the run's last step, after which the run exports."""
    return plan.recipe.export and plan.last_step == plan.recipe.steps


def finish_without_steps(loaded: TrainingModel, say: Say) -> None:
    """Report that no steps are left.

    If an earlier start ended before it could write the export, write it now (a collective
    operation).
    """
    plan, recipe, step = loaded.plan, loaded.plan.recipe, loaded.state["step"]
    if loaded.merge_finished(say):
        return

    at = f", and --stop_at is {recipe.stop_at}" if recipe.stop_at else ""
    run = plan.out if recipe.resume == "auto" else recipe.resume
    say(f"nothing to do: the run in {run} has finished {step} of {recipe.steps} steps{at}")

    if exports_at_end(plan) and not (plan.out / EXPORT).exists():
        loaded.export(say)
        ending.close_run(plan, NoTracker(), ending.finished(plan, step))
        if recipe.wandb_artifact:
            say(
                "W&B: this start has no step, so it uploads no artifact. Upload it with: wandb"
                f" artifact put --type model {plan.out / EXPORT}"
            )


def train_and_export(loaded: TrainingModel, run: TrainingRun) -> Ending | Rewind:
    """Take all steps and export the model. Return how the run ended, or where it goes back to."""
    plan = run.plan
    try:
        early = loop(run)
        if early is None and exports_at_end(plan):
            run.stopper.boundary(next_within=3600)
            with run.tracker.doing("exporting"):
                loaded.export(run.tracker.say)
    except ConfigError as error:
        if plan.command.rank == 0:
            error.afterwards = partial(
                ending.close_refused_run, plan, run.tracker, error, run.state["step"]
            )
        raise
    return early or ending.finished(plan, run.state["step"])


def loop(run: TrainingRun) -> Ending | Rewind | None:
    """Train from `run.state["step"]` to the last step, with evaluations and saves.

    If the run ended early, return how it ended. If it goes back to a checkpoint, return which.
    Otherwise return None.
    """
    plan, engine = run.plan, run.engine
    first, last = run.state["step"] + 1, plan.last_step
    seen = 0  # a hash of all tokens that this rank has received

    for step in range(first, last + 1):
        begun = time.perf_counter()
        data = read_step_data(run, step)
        seen = roll_batch_hash(seen, data.batches)
        batches = local_batches(plan, data.batches)
        lr = step_lr(plan, step)
        counters = step_counters(run, batches, data)

        if corrupt := end_if_corrupt(run, step, batches):
            return corrupt
        take = partial(train_step, engine, run.task, batches, lr, counters, run.step_metrics)
        result, spans = take_step(run, step, first, take)
        times = step_times(run, begun, data)

        if faulty := end_if_faulty(run, step, result, times):
            return faulty

        count_step(run, step, result)
        metrics = metrics_of(run, step, result, data.state, times, lr)
        evaluate_and_log(run, step, metrics)
        timeline.report_bubble(engine, spans, plan.command.name, step, plan.out, run.tracker.say)
        run.stopper.boundary()

        if step % CHECK_TOKENS_EVERY == 0 or step == last:
            check_same_tokens(plan.mesh, seen, step, engine.device)
        save_if_due(run, step, result, data.state)

        # After the last step, a stop could only interrupt the export, which the next start would
        # then have to repeat.
        if result["stop"] and step < last:
            return stop_early(run, result["stop"], data.error)
    return None


@contextlib.contextmanager
def check_and_time_step(
    run: TrainingRun, step: int, first: int
) -> Iterator[list[timeline.InstructionSpan]]:
    """Check the first step of a start, and record the schedule of one pipeline step.

    The first step shows whether the plans fit, whether all ranks use the same parameters, and
    whether they have compiled the same code.
    """
    plan, engine = run.plan, run.engine
    # OUT/schedule.png shows a later step, because the first steps are a warm-up.
    drawn = min(first + 2, plan.last_step)
    with (
        plans.explain_plan_errors(plan.recipe.model, plan.mesh, step == first),
        unused_parameters.compare_parameters(engine, plan.mesh, step, on=step == first),
        timeline.record_schedule(engine, enabled=step == drawn) as spans,
    ):
        yield spans
    if step == first:
        check_same_compilation(plan.mesh, run.tracker.say)


@dataclass(frozen=True)
class StepData:
    """One step's data for one data-parallel rank."""

    batches: list[MicroBatch]  # full rows, even under sequence parallelism
    state: StreamState  # the stream's state after these rows
    error: BaseException | None  # the reason why the stream has no next step
    wait: float  # seconds spent waiting for data


def read_step_data(run: TrainingRun, step: int) -> StepData:
    """Read a step's micro-batches, and check the next step for an error.

    An error is detected one step early, so that all ranks stop together. If this rank was asked to
    stop, it does not wait for more data, and it saves after this step.
    """
    run.rank_clock.start_step()
    begun = time.perf_counter()
    batches, state = next(run.stream)
    broken = None
    if step < run.plan.last_step:
        broken = run.stream.error_ahead(lambda: run.stopper.requested)
    return StepData(batches, state, broken, time.perf_counter() - begun)


def step_lr(plan: RunPlan, step: int) -> float | None:
    """Return the learning rate of a step, or None if the JSON's scheduler sets it."""
    return None if "scheduler" in plan.ds_config else lr_at(plan.recipe, step)


def local_batches(plan: RunPlan, batches: list[MicroBatch]) -> list[MicroBatch]:
    """Return this rank's parts of the micro-batches under sequence parallelism."""
    sp_rank = plan.mesh.coords(plan.command.rank)["sp"]
    return [local_sequence_chunk(batch, plan.mesh.sp, sp_rank) for batch in batches]


def step_times(run: TrainingRun, begun: float, data: StepData) -> StepTimes:
    """Return the times of a step that began at `begun`, and note them for the finders of faults."""
    times = StepTimes(time.perf_counter() - begun, data.wait)
    run.stopper.record_step_time(times.step)
    run.rank_clock.end_step(times.step, times.data_wait)
    return times


def step_counters(run: TrainingRun, batches: list[MicroBatch], data: StepData) -> StepCounters:
    """Return the counts that this rank contributes to a step's sums."""
    extra = extra_counts_of_rank(run, batches) | {FAILED_SAVES: [int(run.saver.broken)]}
    stop = "bad data" if data.error else run.stopper.requested
    return StepCounters(run.plan.mesh, stop, extra)


def take_step(
    run: TrainingRun, step: int, first: int, take: Callable[[], StepResult]
) -> tuple[StepResult, list[timeline.InstructionSpan]]:
    """Take a step with `take()`, and compute it again if its loss or gradient is not finite.

    Return its result and the spans of a pipeline's schedule. `first` is the first step of this
    start. A step that has changed the weights is not computed again.
    """
    run.engine.most_norm = run.watch.monitor.limit_norm()
    watched = run.plan.recipe.watch
    start = replay.StepStart.record(run.engine, run.state) if watched else None
    with check_and_time_step(run, step, first) as spans:
        result = take()
    if start and not (is_finite(result, run.plan.precision) or start.taken):
        result = take_again(run, step, start, take, result)
    return result, spans


def take_again(
    run: TrainingRun,
    step: int,
    start: replay.StepStart,
    take: Callable[[], StepResult],
    result: StepResult,
) -> StepResult:
    """Return the second result of a step, whose first result was bad (a collective operation)."""
    good = partial(is_finite, precision=run.plan.precision)
    again, first = replay.compute_again(start, take, good)
    if not good(again):
        return {**again, "bad_value": first}

    places = replay.where_ranks_are(run.engine.device)
    losses = result["losses_of_ranks"]
    ranks = {rank: places[rank] for rank, own in enumerate(losses) if not math.isfinite(own)}
    run.watch.monitor.recovered(step, result["loss"], result["grad_norm"], ranks)
    return again


def end_if_faulty(
    run: TrainingRun, step: int, result: StepResult, times: StepTimes
) -> Ending | Rewind | None:
    """Do what --on_nonfinite and --on_spike say. With --no-watch, end a run that is not finite.

    Slow ranks are only reported. All ranks come to the same result. If the run continues, return
    None.
    """
    if not is_finite(result, run.plan.precision):
        alert = run.watch.monitor.not_finite(
            step, result["loss"], result["grad_norm"], result.get("bad_value")
        )
        if alert and alert.answer == REWIND:
            return rewind_or_stop(run, alert)
        stops = alert is None or alert.answer == STOP
        return stop_diverged(run, step, result, alert) if stops else None
    units_per_s = result["tokens"] / times.step
    if alert := run.watch.monitor.look(step, result["loss"], result["grad_norm"], units_per_s):
        return stop_by_alert(run, alert)
    for alert in run.rank_clock.look(step, result["extra"]):
        run.watch.alerts.report(alert)
    return None


def end_if_corrupt(run: TrainingRun, step: int, batches: list[MicroBatch]) -> Ending | None:
    """Run the audit that may be due before a step, and end the run if it finds corruption.

    This is a collective operation, and all ranks come to the same result. The run ends without a
    save.
    """

    def forward(micro_batches: list[MicroBatch]) -> None:
        run.stopper.boundary(next_within=3600)
        evaluate(run.engine, run.task, micro_batches, run.plan.mesh, run.step_metrics)
        run.stopper.boundary()

    findings = run.audit.run(step, batches, forward)
    if not findings:
        return None
    run.saver.wait()
    for found in findings:
        alert = Alert(
            time.time(),
            step,
            "corrupt",
            ERROR,
            found.text,
            rank=found.rank,
            host=found.host,
            module=found.module,
            answer=RESTART,
        )
        run.watch.alerts.report(alert)
    text = "; ".join(found.text for found in findings)
    return ending.corrupted(run.plan, step, text, run.audit.last_clean)


def is_finite(result: StepResult, precision: str) -> bool:
    """Return True if the run can continue after a step with this loss and gradient norm.

    In fp16, a step whose gradient overflows is skipped and the loss scale is lowered. Therefore
    only the loss must be finite.
    """
    return math.isfinite(result["loss"]) and (
        math.isfinite(result["grad_norm"]) or precision == "fp16"
    )


def count_step(run: TrainingRun, step: int, result: StepResult) -> None:
    """Count a finished step in the state that checkpoints store, and note it for an audit."""
    run.audit.end_of_step(step)
    state = run.state
    state["step"], state["tokens"] = step, state["tokens"] + result["tokens"]
    state["watch"] = run.watch.monitor.to_state()
    run.stopper.pace.last_step = step
    if run.task.samples:
        rows = run.plan.recipe.ramp.rows(step)
        state["unusable"] = state.get("unusable", 0) + rows - result["tokens"]


def evaluate_and_log(run: TrainingRun, step: int, metrics: dict[str, Any]) -> None:
    """Log a step's metrics, including an evaluation if one is due (a collective operation).

    The evaluation uses the held-out rows.
    """
    recipe = run.plan.recipe
    if run.held_out and (step % recipe.eval_every == 0 or step == recipe.steps):
        run.stopper.boundary(next_within=3600)
        begun = time.perf_counter()
        with run.tracker.doing("evaluating"):
            metrics |= evaluate(run.engine, run.task, run.held_out, run.plan.mesh, run.step_metrics)
        metrics["eval_s"] = time.perf_counter() - begun

    loss = metrics.get("eval_loss", math.nan)
    run.state["eval_loss"] = loss if math.isfinite(loss) else None
    run.tracker.log(metrics)


def save_if_due(run: TrainingRun, step: int, result: StepResult, data_state: StreamState) -> None:
    """Save a finished step if the run ends with it or if a save is due (a collective operation)."""
    # This is True if a background save has failed on any rank.
    if any(result["extra"][FAILED_SAVES]):
        run.saver.wait()

    regular = run.plan.recipe.saves_at(step)
    at_end = bool(result["stop"]) or step == run.plan.last_step
    if at_end or regular or run.saver.attempts.due(step):
        save_step(run, data_state, regular, at_end)
    run.watch.storage.look(step, run.saver.attempts.saved)


def save_step(run: TrainingRun, data_state: StreamState, regular: bool, at_end: bool) -> None:
    """Save the step that was just taken (a collective operation).

    If the run ends with this step, wait until the save has completed.
    """
    run.stopper.boundary(next_within=3600)  # writing a large model takes longer than a step
    begun = time.perf_counter()
    everyone: list[Any] = [None] * run.plan.mesh.world
    dist.all_gather_object(everyone, data_state)
    state: TrainState = {**run.state, "data": merge_states(everyone)}
    with run.tracker.doing("saving"):
        if at_end:
            run.saver.save_last(state)
        else:
            run.saver.save(state, regular)
    run.tracker.amend({"save_stall_s": time.perf_counter() - begun})
    run.stopper.boundary()


def stop_diverged(run: TrainingRun, step: int, result: StepResult, alert: Alert | None) -> Ending:
    """End a run whose loss or gradient is not finite, after the current save has completed."""
    run.stopper.boundary(next_within=3600)
    run.saver.wait()
    text = f"step {step} has loss {result['loss']} and grad_norm {result['grad_norm']}"
    return ending.diverged(run.plan, alert.text if alert else text, run.saver.attempts.saved)


def stop_by_alert(run: TrainingRun, alert: Alert) -> Ending | Rewind:
    """End or rewind a run because of an alert, without saving the step, after the current save."""
    if alert.answer == REWIND:
        return rewind_or_stop(run, alert)
    run.stopper.boundary(next_within=3600)
    run.saver.wait()
    return ending.stopped_by_alert(run.plan, alert.step, alert.text, run.saver.attempts.saved)


def stop_early(run: TrainingRun, reason: str, error: BaseException | None) -> Ending:
    """End a run before its last step, for a reason known to all ranks (a collective operation).

    `error` is the reason why this rank's data ended, if it did.
    """
    run.stopper.request(reason)  # for ranks that did not receive the request
    run.stopper.boundary(next_within=60)
    # Do not use `requested`, because each rank keeps its own first reason.
    problems = shared_problems(error) if reason == "bad data" else []
    return ending.stopped(run.plan, reason, run.state["step"], problems)


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    moved = {
        name: tensor.to(device, non_blocking=True).contiguous() for name, tensor in batch.items()
    }
    return moved | (
        {"documents": as_attention_mask(batch["documents"], device)} if "documents" in batch else {}
    )
