"""Starts a job until it is done: after a crash from the newest complete checkpoint, but not for ever."""

import contextlib
import os
import queue
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import run_folder
from .hosts import scontrol
from .job import Job, Outcome, Start, cannot_make, new_logs, signals_to
from .refused import Refused

SAME_STEP = 3  # failures at one step after which another start would only fail again
LONGEST_PAUSE = 60.0  # seconds


def run(job: Job, max_restarts: int, say: Any) -> int:
    """Runs the job with at most `max_restarts` further starts; returns its exit code. Raises `Refused` if the first start cannot begin."""
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()  # signals that come while no start is running; may be used inside a signal handler
    with signals_to(lambda number, _: asked.put(signal.Signals(number).name)):
        return _run(job, max_restarts, say, asked)


def _run(job: Job, max_restarts: int, say: Any, asked: "queue.SimpleQueue[str]") -> int:
    out = Path(job.folder) / run_folder.out_of(job.words)
    logs_of_all = out.parent / f"{out.name}.logs"
    since = first_start(logs_of_all)
    began, began_at = time.time(), run_folder.last_step(out)
    failures: list[int] = []  # the step of each failed start
    failed_at: list[int] = []  # the same, for starts whose ranks had begun
    starts, goes_on = 0, False
    while True:
        starts += 1
        if (words := run_folder.next_words(job.words, out, since)) != job.words and not goes_on:
            say("this start continues the run: --resume auto")
            job, goes_on = replace(job, words=words), True
        try:
            logs = new_logs(logs_of_all)
            say(f"start {starts}: output of each rank in {shown(logs)}")
            outcome = judged(Start(job, logs, say, asked).run(), out, began)
        except Refused as refused:  # an earlier start was possible, so a host is away for a moment
            if starts == 1:
                raise
            outcome = Outcome("away", 1, str(refused))
        if outcome.kind == "done":
            break
        if outcome.text:
            say(outcome.text)
        if outcome.kind == "refused":
            break
        if outcome.reason:
            stopped(outcome, out, say)
            break
        step = run_folder.last_step(out)
        failures.append(step)
        failed_at += [step] if outcome.kind == "failed" else []
        if len(failed_at) >= SAME_STEP and len(set(failed_at[-SAME_STEP:])) == 1:
            say(f"not started again: {SAME_STEP} starts in a row have failed at step {step + 1}")
            break
        if starts > max_restarts:
            if max_restarts:
                say(f"not started again: --max_restarts {max_restarts} are used up")
            break
        same = next((number for number, other in enumerate(reversed(failures)) if other != step), len(failures))  # failures at this step
        pause = min(LONGEST_PAUSE, 2.0 ** (same - 1))
        say(f"restart {starts} of {max_restarts} in {pause:g} s, from {run_folder.newest_checkpoint(out) or 'the beginning: no checkpoint is complete yet'}")
        with contextlib.suppress(queue.Empty):
            name = asked.get(timeout=pause)
            outcome = Outcome("stopped", 128 + signal.Signals[name], "", name)
            stopped(outcome, out, say)
            break
    if starts > 1:
        say(goodput(out, began_at, time.time() - began, starts))
    return outcome.code


def stopped(outcome: Outcome, out: Path, say: Any) -> None:
    """Prints how a job ended that was asked to stop; such a job is not started again here."""
    what = f"stopped by {outcome.reason}" if outcome.kind == "stopped" else f"not started again: {outcome.reason} had asked for a stop"
    say(f"{what}; the newest complete checkpoint is {run_folder.newest_checkpoint(out) or 'none'}")
    requeue(outcome.reason, say)


def first_start(logs: Path) -> float:
    """Returns when this job began, by the clock of its run folder's disk (seconds since 1970); a requeued Slurm job began with its first start."""
    note = logs / f".began_{os.environ.get('SLURM_JOB_ID', 'here')}"
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" or not note.exists():
        try:
            logs.mkdir(parents=True, exist_ok=True)
            note.touch()
        except OSError as error:
            raise cannot_make(logs, error) from None
    return note.stat().st_mtime


def judged(outcome: Outcome, out: Path, since: float) -> Outcome:
    """Turns an end with 0 into a failure unless the run folder confirms the end: a killed launcher ends with 0, and a rank may."""
    goal = run_folder.goal(out) if run_folder.written(out) >= since else None  # None: not a recipe, or nothing to do
    step = run_folder.last_step(out)
    if outcome.kind != "done" or goal is None:
        return outcome
    if step < goal:
        return replace(outcome, kind="failed", code=1, text=f"all ranks ended with 0, but the run in {shown(out)} is at step {step} of {goal}")
    if run_folder.newest_checkpoint(out) < f"step_{goal:08d}":
        return replace(outcome, kind="failed", code=1, text=f"all ranks ended with 0, but the run in {shown(out)} has no complete checkpoint of step {goal}")
    return outcome


def requeue(reason: str, say: Any) -> None:
    """Put a preempted Slurm job back into the queue. Ctrl-C (SIGINT) and `scancel` are a person's wish, and stop the job for good."""
    if reason in ("SIGINT", "SIGHUP") or "SLURM_JOB_ID" not in os.environ:
        return
    job = os.environ["SLURM_JOB_ID"]
    try:
        state = re.search(r"\bJobState=(\S+)", scontrol("show", "job", "--oneliner", job))
        if state and state[1] != "RUNNING":  # Slurm 22.05 requeues a job that is being cancelled, too
            say(f"job {job} is {state[1]}, so it is not put back into the queue")
            return
        scontrol("requeue", job)
        say(f"job {job} is back in the queue")
    except Refused as refused:
        say(f"job {job} could not be put back into the queue: {'; '.join(refused.problems)}")


def goodput(out: Path, began_at: int, wall: float, starts: int) -> str:
    """Says which part of the wall time went into steps that the run has kept."""
    kept = [line for line in run_folder.metrics(out) if line["step"] > began_at]
    useful = sum(line["step_s"] for line in kept)
    return f"goodput {100 * useful / max(wall, 1e-9):.1f} %: {useful:,.1f} s in {len(kept)} steps that count, of {wall:,.0f} s in {starts} starts"


def shown(path: Path) -> str:
    """Returns a path as short as it can be typed here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
