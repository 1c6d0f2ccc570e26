"""What happens once before the first step, and all that the loop then works with."""

import contextlib
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from ..checkpoints import load, save
from ..checkpoints.retention import Retention
from ..checkpoints.room import Demand
from ..checkpoints.state import State
from ..data.prefetch import Stream
from ..data.sameness import StreamState
from ..kernels.attention import VARLEN
from ..kernels.deterministic import check_in_force
from ..model.flops import Flops
from ..plan import Plan
from ..spec.devices import DEVICES
from ..spec.engine import Engine
from ..spec.recipe import seconds_of
from ..spec.refusal import START_AGAIN, Refusal, Say, refuse
from ..spec.run_folder import CHECKPOINTS, put_aside, way_on
from ..spec.step_names import step_folders
from ..spec.task import MicroBatch, Task
from ..track.summary import PLANNED
from ..track.tracking import NoTracker, Tracker, WandbRun, open_tracker
from .agree import check_same_data, check_same_out, shared_problems
from .corpus import DataSource, commits_of, open_data, open_held_out
from .ending import begin
from .engine import Loaded
from .epochs import Epochs
from .facts import planned_memory, run_facts, step_flops, write_facts
from .failure import Peers
from .first_row import say_first_row
from .start import start
from .stopping import Stopper, grace_of
from .sums import Sums


@dataclass(frozen=True)
class Ready:
    """All that the loop works with, on one rank.

    `flops` are the model's, `peak` those of a device in a second; without both there is no `mfu`.
    """

    plan: Plan
    task: Task
    engine: Engine
    stream: Stream
    held_out: list[MicroBatch]
    state: State  # of the last step; the loop keeps it up to date
    saver: save.Saver
    tracker: Tracker | NoTracker
    stopper: Stopper
    epochs: Epochs
    sums: Sums = field(default_factory=Sums)
    flops: Flops | None = None
    peak: float | None = None


def join(plan: Plan, peers: Peers | None, say: Say) -> torch.device:
    """Says what is about to run, joins the other ranks, and returns this rank's device (a
    collective).
    """
    recipe, mesh = plan.recipe, plan.mesh
    for note in plan.notes:
        say(note)
    rows = (
        f"{recipe.global_batch} rows a step = {mesh.dp} data-parallel x {recipe.micro_batch}"
        f" micro_batch x {plan.accumulation} accumulation"
    )
    rows += "".join(f", {more} from step {first} on" for first, more in recipe.ramp.table[1:])
    strategy = (
        f"{recipe.engine} in {recipe.precision}"
        if recipe.engine != "deepspeed"
        else plan.ds_path or "strategy of the recipe"
    )
    say(
        f"{plan.command.name} on {mesh.world} rank{'s' if mesh.world > 1 else ''} ({mesh}),"
        f" {strategy}, {rows}"
    )
    device = start(plan, peers)
    if recipe.deterministic:
        say(
            "deterministic, on every rank:"
            f" {', '.join(f'{name} {value}' for name, value in check_in_force().items())}"
        )
    return device


def find_checkpoint(plan: Plan, say: Say) -> Path | None:
    """Finds the step folder to go on from, the same on every rank; the ranks share its verification
    (a collective).

    Without one, a run that is in OUT is put aside if the user asked for a new one.
    """
    check_same_out(plan.out)
    found: list[Any] = [None, False]
    if plan.resume_from is not None:
        # none: it was stopped before its first save
        found = [
            load.newest(plan.resume_from, say),
            bool(step_folders(plan.resume_from / CHECKPOINTS)),
        ]
        dist.broadcast_object_list(found)
        if found[0] is None and (found[1] or plan.recipe.resume != "auto"):
            raise refuse(
                f"resume from {plan.resume_from}",
                "contains no complete checkpoint",
                "give another folder, or start a new run with --resume never",
            )
    if (
        plan.command.rank == 0
        and found[0] is None
        and plan.recipe.resume == "never"
        and plan.out.exists()
    ):
        put_aside(plan.out)
    dist.barrier()
    return found[0]


def prepare(loaded: Loaded, peers: Peers | None, say: Say) -> Ready:
    """Open the data and the run folder of a loaded model (a collective).

    Raises `Refusal`, on all ranks, if one of them cannot.
    """
    plan, coords = loaded.plan, loaded.groups.coords
    source = DataSource(
        plan, loaded.task, loaded.processor, documents=VARLEN in loaded.built.attention
    )
    data_state = cast("StreamState | None", loaded.state["data"])
    stream = open_data(source, coords["dp"], data_state, say)
    # Python aborts where it ends beside a thread that reads; `peers` is the first to see an
    # exception, as in the loop
    with contextlib.ExitStack() as refused:
        refused.callback(stream.close)
        refused.enter_context(peers or contextlib.nullcontext())
        check_stream(stream, loaded, say)
        held_out = open_held_out(source, coords, stream.state, say)
        facts = facts_of(loaded, stream)
        saver = open_saver(loaded, say)
        stopper = Stopper(grace_of(seconds_of(plan.recipe.grace), os.environ))

        tracker, unwritable = open_run_folder(loaded, facts, stream, saver, stopper, say)
        refused.callback(tracker.close)
        if problems := shared_problems(unwritable):
            raise Refusal(problems, START_AGAIN if loaded.state["step"] else 1)
        saver.say, saver.flush_metrics = tracker.say, tracker.flush
        if peers:
            peers.way_on = partial(way_on, plan.recipe.resume, plan.out)
            peers.last_words = partial(tracker.finish, 1)
        flops, peak = speed_limits(loaded, facts["host"]["device"], say)
        refused.pop_all()
    return Ready(
        plan=plan,
        task=loaded.task,
        engine=loaded.engine,
        stream=stream,
        held_out=held_out,
        state=loaded.state,
        saver=saver,
        tracker=tracker,
        stopper=stopper,
        epochs=loaded.epochs,
        sums=loaded.sums,
        flops=flops,
        peak=peak,
    )


def check_stream(stream: Stream, loaded: Loaded, say: Say) -> None:
    """Raise `Refusal` on every rank if the ranks read other data, or if the first step cannot be
    read; report the first row (a collective).
    """
    check_same_data(stream)
    if problems := shared_problems(stream.error_ahead()):
        raise Refusal(problems)
    say_first_row(stream, loaded.processor, loaded.task.facts, say)


def facts_of(loaded: Loaded, stream: Stream) -> dict[str, Any]:
    """Return the facts of the run for run.json."""
    plan, recipe = loaded.plan, loaded.plan.recipe
    corpus = stream.state["identity"]["corpus"]
    commits = commits_of(recipe.model, recipe.model_revision, recipe.tokenizer, corpus)
    return {**run_facts(plan, loaded.model_config, loaded.built, commits), "date": plan.day}


def open_run_folder(
    loaded: Loaded,
    facts: dict[str, Any],
    stream: Stream,
    saver: save.Saver,
    stopper: Stopper,
    say: Say,
) -> tuple[Tracker | NoTracker, Refusal | None]:
    """Write run.json and open the record of the run on rank 0; return (this rank's tracker, why the
    folder cannot be written).

    The refusal is for `shared_problems`: the other ranks would wait for this one.
    """
    plan, recipe, step = loaded.plan, loaded.plan.recipe, loaded.state["step"]
    rank0 = plan.command.rank == 0
    tracker: Tracker | NoTracker = NoTracker()
    try:
        if rank0:
            save.put_aside_later(saver.folder, step, say)
            facts[PLANNED] = planned_memory(plan)
            write_facts(plan, facts, stream.files)
        wandb = WandbRun(
            name=f"{plan.command.name}_{plan.mesh}",
            config=facts,
            project=recipe.project,
            artifact=recipe.wandb_artifact,
            stopping=lambda: stopper.requested is not None,
        )
        tracker = open_tracker(
            run_dir=plan.out,
            is_main=rank0,
            start_step=step,
            last_step=plan.last_step,
            wandb=wandb if recipe.wandb else None,
        )
        if rank0:
            begin(plan.out, step, recipe.steps)
    except OSError as error:
        return tracker, refuse(
            f"out = {plan.out}",
            f"cannot be written: {error.strerror}",
            "free space or choose another --out",
        )
    return tracker, None


def open_saver(loaded: Loaded, say: Say = print) -> save.Saver:
    """Returns what writes the run's checkpoints.

    Raises `Refusal` on every rank if the disk has no room for one (a collective).
    """
    recipe, folder = loaded.plan.recipe, loaded.plan.out / CHECKPOINTS
    retention = Retention(recipe.keep, recipe.keep_every, recipe.keep_best)
    saver = save.Saver(
        loaded.engine,
        folder,
        loaded.blueprint,
        loaded.layout,
        retention,
        recipe.save_in_background,
        loaded.save_small_files,
        say,
    )
    saver.attempts.saved = loaded.state["step"]
    saver.check_room(demand_of(loaded), resumed=loaded.state["step"] > 0)
    return saver


def demand_of(loaded: Loaded) -> Demand:
    """Return the steps that this start will save, and the bytes of the export if it writes one."""
    recipe, first, last = loaded.plan.recipe, loaded.state["step"] + 1, loaded.plan.last_step
    steps = [step for step in range(first, last + 1) if step == last or recipe.saves_at(step)]
    if not recipe.export or last < recipe.steps:
        return Demand(steps)
    whole = recipe.adapt is None or recipe.merge
    numel = sum(
        tensor.numel for tensor in loaded.blueprint.tensors if whole or tensor.group is not None
    )
    return Demand(steps, numel * loaded.dtype.itemsize)


def speed_limits(loaded: Loaded, device: str, say: Say) -> tuple[Flops | None, float | None]:
    """(what a step of the model computes, what the `device` can compute in a second): of each None
    where it is not known.
    """
    recipe = loaded.plan.recipe
    peak = DEVICES[device].flops if device in DEVICES else None
    if peak is None and loaded.engine.device.type != "cpu":
        say(
            f"peak unknown: {device} is not in recipekit/spec/devices.py, so metrics.jsonl has"
            " no mfu"
        )
    flops = (
        step_flops(
            loaded.model_config,
            loaded.built.attention,
            recipe.model,
            loaded.task.facts,
            recipe.adapt,
        )
        if peak
        else None
    )
    if peak and flops is None:
        say(
            "mfu unknown: a layer of this model mixes tokens in a way that recipekit/model/flops.py"
            " does not count"
        )
    return flops, peak
