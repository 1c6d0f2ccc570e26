"""The training loop: read this first.

Weights change in `train_step`; what we mend in DeepSpeed around the step is optim/repairs.py.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from .runtime.engine import load_model
from .runtime.failure import Peers
from .runtime.metrics import metrics_of, numbers_of_rank
from .runtime.prepare import Ready, find_checkpoint, join, prepare
from .runtime.stopping import REASONS
from .runtime.sums import Sums
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


class StepResult(TypedDict):
    """What a step tells, over the global batch: the same on every rank."""

    loss: float
    grad_norm: float
    tokens: int  # of the count that the loss is divided by
    stop: str | None  # a reason that a rank passed
    means: dict[str, float]  # what the task tells of each step besides
    more: list[int]  # the sums of what the ranks passed


def train_step(
    engine: Engine,
    task: Task,
    batches: list[MicroBatch],
    lr: float | None,
    stop: str | None,
    mesh: Mesh,
    sums: Sums | None = None,
    more: Sequence[int] = (),
) -> StepResult:
    """Takes one optimizer step (a collective).

    The loss is the mean over what the task counts in the global batch (tokens with a label),
    however that is split into micro-batches and ranks. `lr` None leaves it to the JSON's scheduler;
    `stop` is one of stopping.REASONS; `sums` is filled with what adds up besides; `more` is summed
    over the ranks, too.
    """
    sums = sums or Sums()
    sums.clear()
    for group in engine.optimizer.param_groups if lr is not None else []:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    counted = sum(int(task.count(batch).sum()) for batch in batches)
    totals = torch.tensor(
        [counted, *(reason == stop for reason in REASONS), *more],
        dtype=torch.int64,
        device=engine.device,
    )
    counting: Any = dist.all_reduce(totals, async_op=True)  # during the first forward
    peers = mesh.tp * mesh.pp  # ranks that count the same tokens
    weight: torch.Tensor | None = None
    summing: Any = None
    engine.accumulate(len(batches))
    task.before(engine, batches)
    # of the losses, then of the measures
    added = torch.zeros(
        1 + len(task.measures) * task.each_step, dtype=torch.float64, device=engine.device
    )
    sums.measured = added[1:] if task.each_step else None
    if mesh.pp > 1:
        counting.wait()
        # undoes DeepSpeed's mean over micro-batches and ranks
        weight = len(batches) * mesh.dp / (totals[0] // peers).clamp(min=1)
        # forwards, backwards and the step, as the schedule orders them
        mean_loss = engine.train_batch(for_stages(engine, task, batches, weight))
        if task.each_step:  # only the last stage has seen an output
            dist.all_reduce(added.mul_(mesh.pp))
    else:
        for batch in batches:
            batch = to_device(batch, engine.device)
            loss = summed_loss(task, task.forward(engine, batch), batch, sums)
            added[0] += loss.detach()
            if weight is None:
                counting.wait()
                weight = len(batches) * mesh.dp * mesh.sp / (totals[0] // peers).clamp(min=1)
            if engine.is_gradient_accumulation_boundary():
                summing = dist.all_reduce(added, async_op=True)  # during the last backward
            engine.backward(loss * weight)
            engine.step()
        summing.wait()  # an optimizer step has at least one micro-batch
        mean_loss = added[0] / totals[0].clamp(min=1)
    task.after(engine)
    sums.reduce()
    counted, *told = totals.tolist()
    return {
        "loss": mean_loss.item(),
        "grad_norm": float(engine.get_global_grad_norm()),
        "tokens": counted // peers,
        "stop": next((reason for reason, ranks in zip(REASONS, told, strict=False) if ranks), None),
        "means": (
            means_of(task, mean_loss.item(), (added[1:] / totals[0].clamp(min=1)).tolist())
            if task.each_step
            else {}
        ),
        "more": told[len(REASONS) :],
    }


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
    """Trains as planned; returns the exit code: 0 done, 1 the loss or a gradient was not finite,
    143 or 130 stopped.

    With `peers`, the failure of one rank ends all from the moment when they have met.
    """
    recipe = plan.recipe
    say: Say = print if plan.command.rank == 0 else lambda _: None
    device = join(plan, peers, say)
    # now: a launcher may end before its ranks
    again = continue_command(
        recipe.stop_at, recipe.resume, recipe.out, plan.command.typed, plan.out
    )
    plan = replace(plan, day=first_day(plan.resume_from), again=again)
    task = with_numbers(task_called(recipe.task), recipe)
    source = find_checkpoint(plan, say)
    at_start = (
        partial(references.fill, source=source, evaluate=evaluate, say=say) if task.score else None
    )
    loaded = load_model(plan, task, source, device, pipeline_loss, say, at_start)
    plan, recipe = loaded.plan, loaded.plan.recipe  # with the steps of its epochs
    exports = recipe.export and plan.last_step == recipe.steps
    if (step := loaded.state["step"]) >= plan.last_step:
        if loaded.merge_finished(say):
            return 0
        at = f", and --stop_at is {recipe.stop_at}" if recipe.stop_at else ""
        run = plan.out if recipe.resume == "auto" else recipe.resume
        say(f"nothing to do: the run in {run} has finished {step} of {recipe.steps} steps{at}")
        if exports and not (plan.out / EXPORT).exists():  # it was ended before it could write them
            loaded.export(say)
            ending.close(plan, NoTracker(), ending.finished(plan, step))
            if recipe.wandb_artifact:
                say(
                    "W&B: this start has no step, so it uploads no artifact. Upload it with: wandb"
                    f" artifact put --type model {plan.out / EXPORT}"
                )
        return 0
    ready = prepare(loaded, peers, say)
    # `peers` is the first to see an exception: closing the stream or the tracker may wait for a
    # server, and a save for other ranks
    closed = contextlib.closing
    with (
        ready.stopper,
        closed(ready.stream),
        closed(ready.saver),
        closed(ready.tracker),
        peers or contextlib.nullcontext(),
    ):
        try:
            early = loop(ready)
            if early is None and exports:
                ready.stopper.boundary(next_within=3600)
                with ready.tracker.doing("exporting"):
                    loaded.export(ready.tracker.say)
        except Refusal as refusal:
            if plan.command.rank == 0:
                refusal.afterwards = partial(
                    ending.close_refused, plan, ready.tracker, refusal, ready.state["step"]
                )
            raise
        ended = early or ending.finished(plan, ready.state["step"])
        if recipe.wandb_artifact:
            ready.stopper.boundary(next_within=WANDB_ARTIFACT)
        ending.close(plan, ready.tracker, ended)
        ready.engine.destroy()
    return ended.code


def loop(ready: Ready) -> Ending | None:
    """Step from `ready.state["step"]` to the last step, saving and evaluating on the way; return
    how the run ended if it ended before.
    """
    plan, engine, stream, state, tracker, stopper = (
        ready.plan,
        ready.engine,
        ready.stream,
        ready.state,
        ready.tracker,
        ready.stopper,
    )
    recipe, mesh, last = plan.recipe, plan.mesh, plan.last_step
    sp_rank = mesh.coords(plan.command.rank)["sp"]
    own_schedule = "scheduler" not in plan.ds_config
    # the step of a pipeline that OUT/schedule.png shows: the first ones warm up
    drawn = min(state["step"] + 3, last)
    first = state["step"] + 1
    seen = 0  # a hash of all tokens that this rank was given

    for step in range(first, last + 1):
        begun = time.perf_counter()
        batches, data_state = next(stream)
        # found one step early, so that all ranks stop together; a rank that is told to stop waits
        # for no more data, and saves after this step
        broken = stream.error_ahead(lambda: stopper.requested) if step < last else None
        data_wait = time.perf_counter() - begun
        seen = roll(seen, batches)
        batches = [own_part(batch, mesh.sp, sp_rank) for batch in batches]
        lr = lr_at(recipe, step) if own_schedule else None
        more = [*numbers_of_rank(ready, batches), int(ready.saver.broken)]
        with (
            plans.fitting(recipe.model, mesh, step == first),
            used.compared(engine, mesh, step, on=step == first),
            timeline.record(engine, on=step == drawn) as spans,
        ):
            result = train_step(
                engine,
                ready.task,
                batches,
                lr,
                "bad data" if broken else stopper.requested,
                mesh,
                ready.sums,
                more,
            )
        failed_saves = result["more"].pop()  # in the background, on any rank
        seconds = time.perf_counter() - begun
        stopper.step_took(seconds)

        # fp16 skips steps whose gradient overflows and lowers its loss scale, so only its loss has
        # to be finite
        if not (
            math.isfinite(result["loss"])
            and (math.isfinite(result["grad_norm"]) or plan.precision == "fp16")
        ):
            ready.saver.wait()
            return ending.diverged(
                plan, step, result["loss"], result["grad_norm"], ready.saver.attempts.saved
            )

        state["step"], state["tokens"] = step, state["tokens"] + result["tokens"]
        if ready.task.samples:
            state["unusable"] = state.get("unusable", 0) + recipe.ramp.rows(step) - result["tokens"]
        metrics = metrics_of(ready, step, result, data_state, seconds, data_wait, lr)
        if ready.held_out and (step % recipe.eval_every == 0 or step == recipe.steps):
            stopper.boundary(next_within=3600)
            begun = time.perf_counter()
            with tracker.doing("evaluating"):
                metrics |= evaluate(engine, ready.task, ready.held_out, mesh, ready.sums)
            metrics["eval_s"] = time.perf_counter() - begun
        loss = metrics.get("eval_loss", math.nan)
        state["eval_loss"] = loss if math.isfinite(loss) else None
        tracker.log(metrics)
        timeline.report(engine, spans, plan.command.name, step, plan.out, tracker.say)
        stopper.boundary()
        if step % PEERS_EVERY == 0 or step == last:
            check_peers(mesh, seen, step, engine.device)
        if failed_saves:
            ready.saver.wait()
        regular = recipe.saves_at(step)
        if result["stop"] or step == last or regular or ready.saver.attempts.due(step):
            save_step(ready, data_state, regular, at_end=bool(result["stop"]) or step == last)
        # at the last step nothing is left to stop but the export, which a kill leaves to the next
        # start
        if result["stop"] and step < last:
            return stop_early(ready, result["stop"], broken)
    return None


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
