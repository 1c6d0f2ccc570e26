"""One-time preparation before the first step, and the values that the training loop uses."""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from ..checkpoints import load, save
from ..checkpoints.disk_space import SpaceDemand, find_shortage, folder_bytes
from ..checkpoints.retention import Retention
from ..checkpoints.state import TrainState
from ..data.prefetch import Stream
from ..data.stream_state import StreamState
from ..kernels.attention import VARLEN
from ..kernels.deterministic import check_active_settings
from ..model.flops import Flops
from ..model.model_plan import UNCOMPILED, planned_memory
from ..plan import RunPlan
from ..spec.devices import DEVICES
from ..spec.engine import Engine
from ..spec.errors import START_AGAIN, ConfigError, Say, config_error
from ..spec.recipe import seconds_of
from ..spec.run_folder import (
    CHECKPOINTS,
    EARLIER_VERSIONS,
    continue_advice,
    move_run_aside,
    read_metrics,
    write_rewinds,
)
from ..spec.schedules import LeaveOut
from ..spec.step_names import step_folders
from ..spec.task import MicroBatch, Task
from ..track.summary import PLANNED_MEMORY
from ..track.tracking import NoTracker, Tracker, WandbRun, open_tracker
from ..watch.alerts import Alert, AlertLog, NoAlerts
from ..watch.hang import HangWatch
from ..watch.machine import DiskReading, DiskWatch, NoStorage, StaleCheckpoint, Storage
from ..watch.monitor import Monitor, NoMonitor, Watch
from ..watch.throughput import goodput_so_far
from .audit import Audit
from .corpus import DataSource, commits_of, open_data, open_held_out
from .ending import rewrite_summary
from .engine import TrainingModel
from .epochs import Epochs
from .failure import Peers
from .first_row import say_first_row
from .rank_consistency import check_same_data, check_same_run_folder, shared_problems
from .rank_times import NoRankClock, RankClock
from .run_metadata import (
    changed_versions,
    collect_run_metadata,
    earlier_versions,
    write_run_metadata,
)
from .start import initialize_distributed
from .step_metrics import StepMetrics
from .stopping import Stopper, grace_of, write_stderr


@dataclass(frozen=True)
class TrainingRun:
    """The values that the training loop uses on one rank.

    `flops` are the model's FLOPs per step, and `peak_flops` are a device's FLOPs per second. If
    either value is unknown, `mfu` is not reported.
    """

    plan: RunPlan
    task: Task
    engine: Engine
    stream: Stream
    held_out: list[MicroBatch]
    state: TrainState  # state after the last step; the loop updates it
    saver: save.Saver
    tracker: Tracker | NoTracker
    watch: Watch
    audit: Audit
    rank_clock: RankClock | NoRankClock
    stopper: Stopper
    epochs: Epochs
    step_metrics: StepMetrics = field(default_factory=StepMetrics)
    flops: Flops | None = None
    peak_flops: float | None = None


def join_ranks(plan: RunPlan, peers: Peers | None, say: Say) -> torch.device:
    """Log a run's plan, join the other ranks and return this rank's device (a collective)."""
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
    device = initialize_distributed(plan, peers)
    if recipe.deterministic:
        say(
            "deterministic, on every rank:"
            f" {', '.join(f'{name} {value}' for name, value in check_active_settings().items())}"
        )
    return device


def find_checkpoint(plan: RunPlan, say: Say) -> Path | None:
    """Return the step folder to resume from, which is the same on every rank (a collective).

    The ranks share the work of verifying the folder. If there is no step folder and the user asked
    for a new run, an existing run in OUT is moved aside.
    """
    check_same_run_folder(plan.out)
    found: list[Any] = [None, False]
    if plan.resume_from is not None:
        # a run that stopped before its first save has no folders
        found = [
            load.newest_verified(plan.resume_from, say),
            bool(step_folders(plan.resume_from / CHECKPOINTS)),
        ]
        dist.broadcast_object_list(found)
        if found[0] is None and (found[1] or plan.recipe.resume != "auto"):
            raise config_error(
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
        move_run_aside(plan.out)
    dist.barrier()
    return found[0]


def prepare_training(loaded: TrainingModel, peers: Peers | None, say: Say) -> TrainingRun:
    """Open the data and the run folder of a loaded model (a collective).

    Raises `ConfigError`, on all ranks, if any rank cannot open them.
    """
    plan, coords = loaded.plan, loaded.groups.coords
    source = source_of(loaded)
    stream = open_stream_at_state(loaded, source, say)
    # Python aborts if it exits while a different thread is reading. As in the loop, `peers` must be
    # the first to see an exception.
    with contextlib.ExitStack() as refused:
        refused.callback(stream.close)
        refused.enter_context(peers or contextlib.nullcontext())
        check_stream(stream, loaded, say)
        held_out = open_held_out(source, coords, stream.state, say)
        facts = metadata_of_run(loaded, stream)
        saver = open_saver(loaded, say)
        stopper = Stopper(grace_of(seconds_of(plan.recipe.grace), os.environ))

        tracker, unwritable = open_run_folder(loaded, facts, stream, saver, stopper, say)
        refused.callback(tracker.close)
        if problems := shared_problems(unwritable):
            raise ConfigError(problems, START_AGAIN if loaded.state["step"] else 1)
        connect_tracker(
            tracker, saver, peers, partial(continue_advice, plan.recipe.resume, plan.out)
        )
        watch = watch_of(loaded, saver, tracker)
        refused.callback(watch.close)
        rank_clock = open_rank_clock(loaded, peers)
        refused.callback(rank_clock.close)
        flops, peak = speed_limits(loaded, facts["host"]["device"], say)
        refused.pop_all()
    return TrainingRun(
        plan=plan,
        task=loaded.task,
        engine=loaded.engine,
        stream=stream,
        held_out=held_out,
        state=loaded.state,
        saver=saver,
        tracker=tracker,
        watch=watch,
        audit=open_audit(loaded, tracker.say),
        rank_clock=rank_clock,
        stopper=stopper,
        epochs=loaded.epochs,
        step_metrics=loaded.step_metrics,
        flops=flops,
        peak_flops=peak,
    )


def source_of(loaded: TrainingModel) -> DataSource:
    """Return the data of a run, without the batches that rewinds have left out."""
    return DataSource(
        loaded.plan,
        loaded.task,
        loaded.processor,
        documents=VARLEN in loaded.model_plan.attention,
        opened=loaded.opened,
        left_out=LeaveOut().with_entries(loaded.state.get("left_out", [])),
    )


def open_stream_at_state(loaded: TrainingModel, source: DataSource, say: Say) -> Stream:
    """Open the training data where the run's state is.

    With `--resume PATH` and other data, rewinds of the earlier run are forgotten.
    """
    state = cast("StreamState | None", loaded.state["data"])
    stream = open_data(source, loaded.groups.coords["dp"], state, say)
    if not stream.state["step"]:
        loaded.state.pop("left_out", None)
    return stream


def connect_tracker(
    tracker: Tracker | NoTracker,
    saver: save.Saver,
    peers: Peers | None,
    resume_hint: Callable[[], str],
) -> None:
    """Let the saver and the failure handling use the tracker, which opens after them."""
    saver.say, saver.flush_metrics = tracker.say, tracker.flush
    if peers:
        peers.resume_hint = resume_hint
        peers.last_words = partial(tracker.finish, 1)


def check_stream(stream: Stream, loaded: TrainingModel, say: Say) -> None:
    """Check that all ranks read the same data and can read the first step (a collective).

    Also log the first row. Raises `ConfigError` on every rank.
    """
    check_same_data(stream)
    if problems := shared_problems(stream.error_ahead()):
        raise ConfigError(problems)
    say_first_row(stream, loaded.processor, loaded.task.spec, say)


def metadata_of_run(loaded: TrainingModel, stream: Stream) -> dict[str, Any]:
    """Return the facts about the run that run.json records."""
    plan, recipe = loaded.plan, loaded.plan.recipe
    corpus = stream.state["identity"]["corpus"]
    commits = commits_of(recipe.model, recipe.model_revision, recipe.tokenizer, corpus)
    return {**collect_run_metadata(plan, loaded.built, commits), "date": plan.day}


def open_run_folder(
    loaded: TrainingModel,
    facts: dict[str, Any],
    stream: Stream,
    saver: save.Saver,
    stopper: Stopper,
    say: Say,
) -> tuple[Tracker | NoTracker, ConfigError | None]:
    """Write run.json and open the tracker on rank 0. Return (this rank's tracker, error or None).

    The `ConfigError` explains why the folder cannot be written. It is returned for
    `shared_problems` instead of raised, because the other ranks would wait for this rank.
    """
    plan, recipe, step = loaded.plan, loaded.plan.recipe, loaded.state["step"]
    rank0 = plan.command.rank == 0
    tracker: Tracker | NoTracker = NoTracker()
    try:
        if rank0:
            save.set_aside_later_steps(saver.folder, step, say)
            facts[PLANNED_MEMORY] = planned_memory(loaded.model_plan)
            entries = earlier_versions(plan.out, step, facts["versions"])
            facts[EARLIER_VERSIONS] = entries
            if note := changed_versions(entries, facts["versions"], step):
                say(note)
            write_run_metadata(plan, facts, stream.files)
            write_rewinds(plan.out, loaded.state.get("left_out", []))
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
            rewrite_summary(plan.out, step, recipe.steps)
    except OSError as error:
        return tracker, config_error(
            f"out = {plan.out}",
            f"cannot be written: {error.strerror}",
            "free space or choose another --out",
        )
    return tracker, None


def watch_of(loaded: TrainingModel, saver: save.Saver, tracker: Tracker | NoTracker) -> Watch:
    """Return the watch of a run that saves checkpoints."""
    disk = partial(read_disk, loaded, saver)
    return open_watch(loaded.plan, loaded.engine, loaded.state, tracker, disk)


def open_watch(
    plan: RunPlan,
    engine: Engine,
    state: TrainState,
    tracker: Tracker | NoTracker,
    disk: Callable[[int], DiskReading | None],
) -> Watch:
    """Return the watch of the run. It continues from the `state` of a checkpoint.

    Only rank 0 reports alerts, but every rank counts the steps that change no weight. `disk` reads
    the disk of the checkpoints after a step.
    """
    recipe = plan.recipe

    def count_skipped(applied: bool) -> None:
        if not applied:
            state["skipped"] = state.get("skipped", 0) + 1

    engine.after_step(count_skipped)
    goodput = goodput_so_far(read_metrics(plan.out), time.time())
    if not recipe.watch:
        return Watch(NoMonitor(), NoAlerts(), goodput)
    alerts: AlertLog | NoAlerts = NoAlerts()
    storage: Storage | NoStorage = NoStorage()
    if plan.command.rank == 0:
        alerts = AlertLog(plan.out, tracker.say, tracker.alert, recipe.on_alert)
        stale = StaleCheckpoint(recipe.save_every)
        storage = Storage(stale, DiskWatch(disk, plan.last_step), alerts.report)
    monitor = Monitor(recipe.on_spike, alerts.report, recipe.on_nonfinite)
    monitor.restore(state.get("watch"))
    return Watch(monitor, alerts, goodput, storage)


def open_rank_clock(loaded: TrainingModel, peers: Peers | None) -> RankClock | NoRankClock:
    """Return the clock that tells slow ranks from waiting ones."""
    plan, device = loaded.plan, loaded.engine.device
    if not plan.recipe.watch or plan.mesh.world == 1 or device.type != "cpu":
        return NoRankClock()
    return RankClock(plan.mesh, plan.command.rank, peers.ranks.hosts if peers else (), device)


def open_audit(loaded: TrainingModel, say: Say) -> Audit:
    """Return the search for silent corruption. With --no-watch, it is never due."""
    recipe, scope = loaded.plan.recipe, loaded.model_plan.compile.scope
    every = recipe.audit_every if recipe.watch else 0
    return Audit(every, loaded.engine, loaded.groups, scope != UNCOMPILED, say)


def read_disk(loaded: TrainingModel, saver: save.Saver, step: int) -> DiskReading | None:
    """Return the state of the checkpoints' disk after a step, or None while a save is under way.

    Raises `OSError`.
    """

    def saving() -> bool:
        staging = saver.folder / save.STAGING
        return staging.exists() and any(staging.iterdir())

    if saving():
        return None
    room, demand = saver.room, demand_of(loaded, step + 1)
    reading = DiskReading(
        free=room.free_bytes,
        own=folder_bytes(saver.folder),
        shortage=find_shortage(room, saver.retention, demand),
    )
    return None if saving() else reading


def watch_for_hangs(run: TrainingRun, peers: Peers | None) -> None:
    """Start to watch this rank for hangs. If rank 0 is stopped, another rank reports."""
    plan = run.plan
    run.stopper.pace.start(run.state["step"])
    if not plan.recipe.watch or peers is None:
        return

    def report(alert: Alert) -> None:
        alerts = run.watch.alerts
        if isinstance(alerts, NoAlerts):
            alerts = AlertLog(plan.out, write_stderr, lambda *_: None, plan.recipe.on_alert)
        alerts.report(alert)

    pace, hang_s = run.stopper.pace, plan.recipe.hang_s
    run.watch.hang = HangWatch(peers.ranks, pace, plan.out, report, peers.end_hung, hang_s)


def open_saver(loaded: TrainingModel, say: Say = print) -> save.Saver:
    """Return the saver for the run's checkpoints.

    Raises `ConfigError` on every rank if the disk has no room for a checkpoint (a collective).
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
    demand = demand_of(loaded, loaded.state["step"] + 1)
    saver.check_room(demand, resumed=loaded.state["step"] > 0)
    return saver


def demand_of(loaded: TrainingModel, first: int) -> SpaceDemand:
    """Return the steps that this start saves from `first` on, and its export's size in bytes.

    Without an export, the size is 0.
    """
    recipe, last = loaded.plan.recipe, loaded.plan.last_step
    steps = [step for step in range(first, last + 1) if step == last or recipe.saves_at(step)]
    if not recipe.export or last < recipe.steps:
        return SpaceDemand(steps)
    whole = recipe.adapt is None or recipe.merge
    numel = sum(
        tensor.numel for tensor in loaded.blueprint.tensors if whole or tensor.group is not None
    )
    return SpaceDemand(steps, numel * loaded.dtype.itemsize)


def speed_limits(loaded: TrainingModel, device: str, say: Say) -> tuple[Flops | None, float | None]:
    """Return (FLOPs of a step, peak FLOPs per second of the `device`). Unknown values are None."""
    peak = DEVICES[device].flops if device in DEVICES else None
    if peak is None and loaded.engine.device.type != "cpu":
        say(
            f"peak unknown: {device} is not in recipekit/spec/devices.py, so metrics.jsonl has"
            " no mfu"
        )
    flops = loaded.model_plan.flops
    if peak and flops is None:
        say(
            "mfu unknown: a layer of this model mixes tokens in a way that recipekit/model/flops.py"
            " does not count"
        )
    return flops, peak
