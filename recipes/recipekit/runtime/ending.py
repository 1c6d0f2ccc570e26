"""The end of a run's start: its exit code, closing block and loss plot."""

import contextlib
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..plan import RunPlan
from ..spec.atomic_write import write_atomic
from ..spec.errors import START_AGAIN, ConfigError, Say, sentences
from ..spec.run_folder import (
    EXPORT,
    MERGE,
    continue_advice,
    has_random_base,
    read_metrics,
    read_run_json,
)
from ..spec.task_specs import TASKS
from ..track.loss_plot import LOSS_PLOT, plot_losses
from ..track.summary import SUMMARY, MetricsLines, summary_block, summary_page
from ..track.tracking import NoTracker, Tracker
from .stopping import STOP_REASONS


@dataclass(frozen=True)
class Ending:
    """The exit code and the last log line, which explains how the run ended and can continue."""

    code: int
    text: str


def continue_hint(plan: RunPlan) -> str:
    """Return the last words of a log line, which explain how to continue the run.

    They include the command itself if it is known.
    """
    said = continue_advice(plan.recipe.resume, plan.out)
    return (
        said
        if said.startswith("no checkpoint") or not plan.resume_command
        else f"continue with: {plan.resume_command}"
    )


def sample_hint(task: str, folder: Path) -> str:
    """Return the last words of a log line: the command that samples from a model.

    The result is "" for a task whose models do not generate.
    """
    generates = TASKS[task].auto_class == TASKS["pretrain"].auto_class
    return f". Sample it with: recipekit sample {shlex.quote(str(folder))}" if generates else ""


def finished(plan: RunPlan, step: int) -> Ending:
    """Return the ending of a start that completed the run's last step or the step in --stop_at."""
    if step < plan.recipe.steps:
        return Ending(
            0, sentences(f"stopped at step {step} of {plan.recipe.steps}", continue_hint(plan))
        )
    text = f"finished all {step} steps"
    if has_random_base(plan.out / EXPORT):
        command = f"{MERGE} {shlex.quote(str(plan.out))} NEW_FOLDER"
        text += (
            f". {plan.out / EXPORT} has an adapter whose randomly initialised base model is not"
            f" saved. Write the merged model with {command}"
        )
    elif (plan.out / EXPORT).is_dir():
        text += f". The model is in {plan.out / EXPORT}{sample_hint(plan.recipe.task, plan.out)}"
    return Ending(0, text)


def stopped(plan: RunPlan, reason: str, step: int, problems: Sequence[object] = ()) -> Ending:
    """Return the ending after a signal, a lost launcher, or `problems` in the next step's data."""
    text = (
        f"stopped by {reason} after step {step} of {plan.recipe.steps}. Its checkpoint is complete"
    )
    if reason == "bad data":
        return Ending(
            STOP_REASONS[reason],
            ". ".join(
                [text, *(f"Step {step + 1} cannot be made: {problem}" for problem in problems)]
            ),
        )
    return Ending(STOP_REASONS[reason], sentences(text, continue_hint(plan)))


def diverged(plan: RunPlan, text: str, saved: int) -> Ending:
    """Return the ending after a loss or gradient norm became non-finite, which `text` states."""
    ways = f"--resume {plan.out}, or a new --out" if saved else "a new --out"
    may_skip = plan.recipe.watch and plan.recipe.on_nonfinite != "skip"
    skip = "use --on_nonfinite skip to pass over the step, or" if may_skip else "try"
    return Ending(
        1,
        f"stopped: {text}. {not_saved(saved)}. The same command would repeat it: {skip} a lower"
        f" --lr with {ways}",
    )


def stopped_by_alert(plan: RunPlan, step: int, text: str, saved: int) -> Ending:
    """Return the ending of a run that --on_spike ended at `step`."""
    ways = f"--resume {plan.out}, or a new --out" if saved else "a new --out"
    return Ending(
        1,
        f"stopped by --on_spike {plan.recipe.on_spike}: {text}. {not_saved(saved)}. The same"
        " command would repeat it: use --on_spike alert to train through it, or a lower --lr with"
        f" {ways}",
    )


def corrupted(plan: RunPlan, step: int, text: str, clean: int) -> Ending:
    """Return the ending of a run in which an audit before `step` has found corruption.

    `clean` is the last step after which an audit has found none, or 0.
    """
    since = f"The audit after step {clean} has found none" if clean else "It is the first audit"
    return Ending(
        START_AGAIN,
        sentences(
            f"stopped by an audit before step {step}: {text}. Nothing is saved. {since}, so a"
            f" checkpoint after step {clean} may contain the fault: --resume"
            f" {plan.out}/checkpoints/STEP selects an earlier one",
            continue_hint(plan),
        ),
    )


def not_saved(saved: int) -> str:
    """Return the words about the checkpoint before a step that is not saved.

    `saved` is the step of the newest checkpoint, or 0.
    """
    kept = (
        f"the last good checkpoint is step {saved}"
        if saved
        else "no checkpoint was written before it"
    )
    return f"This step is not saved, {kept}"


def refused(plan: RunPlan, refusal: ConfigError, step: int) -> Ending:
    """Return the ending after a config error that occurred later than the run's first step."""
    what = "failed" if refusal.exit_code == START_AGAIN else "refused"
    return Ending(
        refusal.exit_code,
        sentences(
            f"{what} after step {step} of {plan.recipe.steps}, as said above", continue_hint(plan)
        ),
    )


def rewrite_summary(out: Path, step: int, steps: int) -> None:
    """Rewrite a resumed run's summary, or remove the summary if the run starts from step 0.

    Raises OSError.
    """
    if step == 0:
        for name in (SUMMARY, LOSS_PLOT):
            (out / name).unlink(missing_ok=True)
        return
    lines, facts = read_metrics(out), read_run_json(out)
    if lines and facts:
        day = time.strftime("%Y-%m-%d %H:%M")
        text = (
            f"in progress since {day}, from step {step} of {steps}. If no process trains it, the"
            " same command continues it"
        )
        write_atomic(out / SUMMARY, summary_page(lines, facts, out, text))


def close_run(plan: RunPlan, tracker: Tracker | NoTracker, ending: Ending) -> None:
    """Draw OUT/loss.png, close the tracker, write OUT/summary.md and print the closing block.

    Only rank 0 does this, after the last checkpoint.
    """
    if plan.command.rank:
        return
    lines, facts = read_metrics(plan.out), read_run_json(plan.out)
    picture = draw_loss_plot(plan.out, lines, facts, tracker.say)
    complete = ending.code == 0 and bool(lines) and lines[-1]["step"] >= plan.recipe.steps
    export = plan.out / EXPORT if plan.recipe.wandb_artifact and complete else None
    tracker.finish(ending.code, picture, export)  # print W&B's messages above the block
    print_block(plan.out, lines, facts, ending, tracker.say)


def close_refused_run(
    plan: RunPlan, tracker: Tracker | NoTracker, refusal: ConfigError, step: int
) -> None:
    """Write OUT/summary.md and print the closing block of a run that a config error ends.

    No plot is drawn, because the other ranks do not wait for it.
    """
    print_block(
        plan.out,
        read_metrics(plan.out),
        read_run_json(plan.out),
        refused(plan, refusal, step),
        tracker.say,
    )


def draw_loss_plot(
    out: Path, lines: MetricsLines, facts: Mapping[str, Any], say: Say
) -> Path | None:
    """Draw OUT/loss.png and return its path.

    The run is complete without the plot, so the run's ending does not change if drawing fails.
    """
    if not lines or not facts:
        return None
    title = (
        f"{facts['recipe']['name']}, {facts['mesh']['name']}, step {lines[-1]['step']} of"
        f" {facts['recipe']['steps']}"
    )
    try:
        plot_losses(lines, title, out / LOSS_PLOT)
    except Exception as error:  # plotting libraries raise errors of any kind
        what = str(error).partition("\n")[0]
        say(
            f"{out / LOSS_PLOT}: cannot be drawn ({type(error).__name__}: {what}). The run is"
            " complete without it."
        )
        return None
    return out / LOSS_PLOT


def print_block(
    out: Path, lines: MetricsLines, facts: Mapping[str, Any], ending: Ending, say: Say
) -> None:
    """Write OUT/summary.md and print the same text to stdout.

    The reader of stdout may already be gone.
    """
    text = ending.text
    if lines and facts:
        text = summary_block(lines, facts, out, ending.text)
        try:
            write_atomic(out / SUMMARY, summary_page(lines, facts, out, ending.text))
        except OSError as error:
            say(
                f"{out / SUMMARY}: cannot be written ({error.strerror}). metrics.jsonl holds its"
                " numbers."
            )
    with contextlib.suppress(OSError):
        print(text, flush=True)
