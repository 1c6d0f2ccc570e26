"""Rewinds: a run goes back to a checkpoint before a spike and leaves out the batches around it.

As in PaLM (arXiv 2204.02311, section 5.1), the batches from the checkpoint to some steps past the
spike are left out. The process stays alive. Afterwards the run equals one that was started with
these batches in --leave_out.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from ..checkpoints import load, save
from ..checkpoints.attempts import SaveAttempts
from ..checkpoints.state import TrainState
from ..plan import RunPlan
from ..spec.errors import ConfigError, config_error
from ..spec.run_folder import CHECKPOINTS, read_metrics, write_rewinds
from ..spec.schedules import format_ramp
from ..spec.step_names import step_folders, step_of
from ..storage.manifest import STATE_FILE
from ..watch.alerts import Alert
from ..watch.monitor import REWIND, STOP
from ..watch.outliers import Outliers
from . import ending
from .ending import Ending
from .engine import TrainingModel
from .prepare import TrainingRun, open_stream_at_state, source_of
from .rank_consistency import check_same_data, shared_problems

PAST_SPIKE = 50  # steps after the spike whose batches are also left out
MAX_REWINDS = 3  # to one checkpoint


@dataclass(frozen=True)
class Rewind:
    """The checkpoint to which a run goes back, and all batches that rewinds have left out."""

    folder: Path
    step: int  # of the checkpoint
    left_out: list[list[int]]  # [step, batches], as in the state


def rewind_or_stop(run: TrainingRun, alert: Alert) -> Rewind | Ending:
    """Return how the run continues after an alert, which is reported here (a collective).

    The run ends if it has no checkpoint before the alert's cause, or if rewinds to this checkpoint
    did not help.
    """
    # An alarm is raised in the last of several steps with a spike.
    first = alert.step - (Outliers.RUN - 1 if alert.kind == "spike" else 0)
    run.stopper.boundary(next_within=3600)  # verifying a large checkpoint takes longer than a step
    run.saver.wait()
    folder = newest_before(run, first)
    if folder is None:
        return _stop(run, alert, f"There is no complete checkpoint before step {first}")

    state: TrainState = json.loads((folder / STATE_FILE).read_text())
    to = Rewind(folder, state["step"], entries_after(run.plan, run.state, state, alert.step))
    begins, batches = to.left_out[-1]
    if sum(entry[0] == begins for entry in to.left_out) > MAX_REWINDS:
        return _stop(run, alert, f"{MAX_REWINDS} rewinds to step {to.step} did not help")

    text = (
        f"{alert.text}. The run goes back to step {to.step} and leaves out {batches} global batches"
    )
    typed = format_ramp(run.plan.recipe.left_out.with_entries(to.left_out).table)
    run.watch.alerts.report(replace(alert, text=text, answer=REWIND, leave_out=typed))
    return to


def _stop(run: TrainingRun, alert: Alert, reason: str) -> Ending:
    """Report the alert as one that ends the run, and return the ending."""
    text = f"{alert.text}. {reason}"
    run.watch.alerts.report(replace(alert, text=text, answer=STOP))
    if alert.kind == "nonfinite":
        return ending.diverged(run.plan, text, run.saver.attempts.saved)
    return ending.stopped_by_alert(run.plan, alert.step, text, run.saver.attempts.saved)


def newest_before(run: TrainingRun, first: int) -> Path | None:
    """Return the newest complete and verified step folder before step `first` (a collective)."""
    found: list[Any] = [
        [folder for folder in step_folders(run.saver.folder) if (step_of(folder.name) or 0) < first]
    ]
    dist.broadcast_object_list(found)
    for folder in reversed(found[0]):
        if load.newest_verified(folder, run.tracker.say):
            return folder
    return None


def entries_after(plan: RunPlan, now: TrainState, saved: TrainState, spike: int) -> list[list[int]]:
    """Return what rewinds have left out after a rewind from `spike`; the new entry is the last.

    `saved` is the state of the checkpoint, and `now` is the state before the rewind. The batches
    that the run took, or passed over, from the checkpoint to PAST_SPIKE steps past the spike are
    left out. Steps after the end of the run would have taken no batch, so they are not counted.
    """
    position = cast(Mapping[str, Any], saved["data"])["step"]  # in the stream
    steps = min(spike + PAST_SPIKE, plan.recipe.steps) - saved["step"]
    before = now.get("left_out", [])
    all_entries = plan.recipe.left_out.with_entries(before).table
    # Entries of the first step stay and are passed over before the new one.
    passed = sum(
        batches for first, batches in all_entries if position + 1 < first <= position + steps
    )
    kept = [[*entry] for entry in before if entry[0] <= position + 1]
    return [*kept, [position + 1, steps + passed]]


def rewind(loaded: TrainingModel, run: TrainingRun, to: Rewind) -> TrainingRun:
    """Go back to a checkpoint inside the running process (a collective). Return the new run.

    The engine, the random generators, the state and the windows of the monitor are restored from
    the checkpoint. Later checkpoints are renamed, and later lines of metrics.jsonl are removed.
    Raises `ConfigError` on all ranks if a file cannot be changed or the data have changed.
    """
    run.stopper.boundary(next_within=3600)
    run.stream.close()
    with run.tracker.doing("rewinding"):
        if problems := shared_problems(_forget_later_steps(run, to)):
            raise ConfigError(problems)

        converted = run.plan.out / CHECKPOINTS / ".converted"
        state = load.load_checkpoint(
            loaded.engine, to.folder, loaded.blueprint, loaded.layout, converted, run.tracker.say
        )
        state["export_dtype"], state["left_out"] = run.state["export_dtype"], to.left_out
        # Other objects refer to this dictionary, so it must stay the same object.
        progress = cast("dict[str, Any]", run.state)
        progress.clear()
        progress.update(state)

        stream = open_stream_at_state(loaded, source_of(loaded), run.tracker.say)
        check_same_data(stream)
        run.saver.attempts = SaveAttempts(saved=to.step)
        run.watch.go_back(state.get("watch"), read_metrics(run.plan.out))
    run.stopper.boundary()
    return replace(run, stream=stream)


def _forget_later_steps(run: TrainingRun, to: Rewind) -> ConfigError | None:
    """Rename the later checkpoints and remove the later lines of metrics.jsonl, on rank 0.

    The order matters if the run is killed in between. If the later checkpoints still exist, the run
    resumes from one of them and meets the spike again. Only after they are gone may the file of the
    rewinds name the batches that they were trained on.
    """
    if run.plan.command.rank != 0:
        return None
    try:
        save.set_aside_later_steps(run.saver.folder, to.step, run.tracker.say)
        write_rewinds(run.plan.out, to.left_out)
        run.tracker.go_back(to.step)
    except ConfigError as error:
        return error
    except OSError as error:
        where, rule = f"out = {run.plan.out}", f"cannot be written: {error.strerror}"
        return config_error(where, rule, "free space, then start again")
    return None
