"""How a start of a run ends: its exit code, the closing block with the numbers of the run, its
picture.
"""

import contextlib
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..plan import Plan
from ..spec.refusal import START_AGAIN, Refusal, Say, sentences
from ..spec.run_folder import EXPORT, MERGE, facts_of_run, read_metrics, way_on, without_base
from ..spec.task_specs import TASKS
from ..spec.whole_file import write_whole
from ..track.loss_picture import PICTURE, draw_losses
from ..track.summary import SUMMARY, Lines, block_of, page_of
from ..track.tracking import NoTracker, Tracker
from .stopping import REASONS


@dataclass(frozen=True)
class Ending:
    """The exit code, and the last line: how the run has ended and how it continues."""

    code: int
    text: str


def onward(plan: Plan) -> str:
    """Return how to continue the run, as the end of a line: with the command itself if it is
    known.
    """
    said = way_on(plan.recipe.resume, plan.out)
    return (
        said
        if said.startswith("no checkpoint") or not plan.again
        else f"continue with: {plan.again}"
    )


def way_to_sample(task: str, folder: Path) -> str:
    """Return the command that generates from a model, as the end of a line; "" for a task whose
    models do not.
    """
    generates = TASKS[task].auto_class == TASKS["pretrain"].auto_class
    return f". Sample it with: recipekit sample {shlex.quote(str(folder))}" if generates else ""


def finished(plan: Plan, step: int) -> Ending:
    """Return the ending after the last step of this start: of the run, or the step of --stop_at."""
    if step < plan.recipe.steps:
        return Ending(0, sentences(f"stopped at step {step} of {plan.recipe.steps}", onward(plan)))
    text = f"finished all {step} steps"
    if without_base(plan.out / EXPORT):
        command = f"{MERGE} {shlex.quote(str(plan.out))} NEW_FOLDER"
        text += (
            f". {plan.out / EXPORT} has an adapter whose randomly initialised base model is not"
            f" saved. Write the merged model with {command}"
        )
    elif (plan.out / EXPORT).is_dir():
        text += f". The model is in {plan.out / EXPORT}{way_to_sample(plan.recipe.task, plan.out)}"
    return Ending(0, text)


def stopped(plan: Plan, reason: str, step: int, problems: Sequence[object] = ()) -> Ending:
    """Return the ending by a signal, a launcher that has gone, or by `problems` of the data of the
    next step.
    """
    text = (
        f"stopped by {reason} after step {step} of {plan.recipe.steps}. Its checkpoint is complete"
    )
    if reason == "bad data":
        return Ending(
            REASONS[reason],
            ". ".join(
                [text, *(f"Step {step + 1} cannot be made: {problem}" for problem in problems)]
            ),
        )
    return Ending(REASONS[reason], sentences(text, onward(plan)))


def diverged(plan: Plan, step: int, loss: float, grad_norm: float, saved: int) -> Ending:
    """Return the ending by a loss or a gradient that is not finite."""
    kept = (
        f"the last good checkpoint is step {saved}"
        if saved
        else "no checkpoint was written before it"
    )
    text = (
        f"stopped: step {step} has loss {loss} and grad_norm {grad_norm}. This step is not saved,"
        f" {kept}"
    )
    ways = f"--resume {plan.out}, or a new --out" if saved else "a new --out"
    return Ending(1, f"{text}. The same command would repeat it: try a lower --lr with {ways}")


def refused(plan: Plan, refusal: Refusal, step: int) -> Ending:
    """Return the ending by a refusal after the first step of the run."""
    what = "failed" if refusal.exit_code == START_AGAIN else "refused"
    return Ending(
        refusal.exit_code,
        sentences(f"{what} after step {step} of {plan.recipe.steps}, as said above", onward(plan)),
    )


def begin(out: Path, step: int, steps: int) -> None:
    """Rewrite the summary of a run that continues, remove the summary of a run that begins.

    Raises OSError.
    """
    if step == 0:
        for name in (SUMMARY, PICTURE):
            (out / name).unlink(missing_ok=True)
        return
    lines, facts = read_metrics(out), facts_of_run(out)
    if lines and facts:
        day = time.strftime("%Y-%m-%d %H:%M")
        text = (
            f"in progress since {day}, from step {step} of {steps}. If no process trains it, the"
            " same command continues it"
        )
        write_whole(out / SUMMARY, page_of(lines, facts, out, text))


def close(plan: Plan, tracker: Tracker | NoTracker, ending: Ending) -> None:
    """Draw OUT/loss.png, end the record, write OUT/summary.md, and print the block; on rank 0,
    after the last checkpoint.
    """
    if plan.command.rank:
        return
    lines, facts = read_metrics(plan.out), facts_of_run(plan.out)
    picture = draw_picture(plan.out, lines, facts, tracker.say)
    complete = ending.code == 0 and bool(lines) and lines[-1]["step"] >= plan.recipe.steps
    export = plan.out / EXPORT if plan.recipe.wandb_artifact and complete else None
    tracker.finish(ending.code, picture, export)  # what W&B has to say comes above the block
    print_block(plan.out, lines, facts, ending, tracker.say)


def close_refused(plan: Plan, tracker: Tracker | NoTracker, refusal: Refusal, step: int) -> None:
    """Write OUT/summary.md and print the block of a run that a refusal ends; without a picture,
    because the other ranks do not wait.
    """
    print_block(
        plan.out,
        read_metrics(plan.out),
        facts_of_run(plan.out),
        refused(plan, refusal, step),
        tracker.say,
    )


def draw_picture(out: Path, lines: Lines, facts: Mapping[str, Any], say: Say) -> Path | None:
    """Draw OUT/loss.png and return its path.

    The run is complete without it, so no failure changes how the run ends.
    """
    if not lines or not facts:
        return None
    title = (
        f"{facts['recipe']['name']}, {facts['mesh']['name']}, step {lines[-1]['step']} of"
        f" {facts['recipe']['steps']}"
    )
    try:
        draw_losses(lines, title, out / PICTURE)
    except Exception as error:  # libraries of drawing raise errors of any kind
        what = str(error).partition("\n")[0]
        say(
            f"{out / PICTURE}: cannot be drawn ({type(error).__name__}: {what}). The run is"
            " complete without it."
        )
        return None
    return out / PICTURE


def print_block(
    out: Path, lines: Lines, facts: Mapping[str, Any], ending: Ending, say: Say
) -> None:
    """Write OUT/summary.md, and print the same to stdout, whose reader may have gone."""
    text = ending.text
    if lines and facts:
        text = block_of(lines, facts, out, ending.text)
        try:
            write_whole(out / SUMMARY, page_of(lines, facts, out, ending.text))
        except OSError as error:
            say(
                f"{out / SUMMARY}: cannot be written ({error.strerror}). metrics.jsonl holds its"
                " numbers."
            )
    with contextlib.suppress(OSError):
        print(text, flush=True)
