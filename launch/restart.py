"""Repeated starts of a job until it is done.

After a crash, the job continues from the newest complete checkpoint. The number of restarts is
limited.
"""

import contextlib
import os
import queue
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import run_folder
from .errors import START_AGAIN, LaunchError
from .job import HELLO, Job, Outcome, Start, cannot_make, new_logs, signals_to
from .requeue import JobEnd, hand_back
from .spares import NamedHosts, with_spares

SAME_STEP = 3  # failures at the same step after which a further start would only fail again
LONGEST_PAUSE = 60.0  # seconds
WAIT_HOSTS = 600.0  # seconds that a restart waits for unreachable hosts
LONGEST_LOOK, SHORTEST_ANSWER, SHOW_AGAIN = 10.0, 5.0, 60.0  # seconds


class Progress:
    """The run folder of a job, and the run's step when the job began.

    The folder is guessed from the command line until rank 0 reports it. A requeued Slurm job is a
    new process. It reads the folder that the first start reported from a file in the log folder.
    """

    def __init__(self, job: Job, say: Any):
        guess = Path(os.path.abspath(Path(job.folder, run_folder.out_of(job.words))))
        self.logs, self.say = guess.parent / f"{guess.name}.logs", say
        self.note, self.since = first_start(self.logs)
        self.out = Path(os.fsdecode(self.note.read_bytes()) or guess)
        self.began_at = run_folder.last_step(self.out)  # a step
        self.named = NamedHosts()

    def learn(self, out: Path) -> None:
        """Record the run folder that rank 0 has reported."""
        if out == self.out:
            return
        self.out, self.began_at = out, run_folder.last_step(out)
        self.say(
            f"the run folder is {shown(out)}; the output of each rank stays in {shown(self.logs)}"
        )
        with contextlib.suppress(OSError):  # only a requeued Slurm job reads this file
            self.note.write_bytes(os.fsencode(out))
            os.utime(self.note, (self.since, self.since))

    def goodput(self, wall: float, starts: int) -> str:
        """Return the fraction of the wall time that was spent on steps that the run has kept."""
        kept = [line for line in run_folder.metrics(self.out) if line["step"] > self.began_at]
        useful = sum(line["step_s"] for line in kept)
        return (
            f"goodput {100 * useful / max(wall, 1e-9):.1f} %: {useful:,.1f} s in {len(kept)} steps"
            f" that count, of {wall:,.0f} s in {starts} starts"
        )


def run(job: Job, max_restarts: int, say: Any, wait_hosts: float = WAIT_HOSTS) -> int:
    """Run the job with at most `max_restarts` restarts, and return its exit code.

    A restart waits up to `wait_hosts` seconds for unreachable hosts. Raises `LaunchError` if the
    first start cannot begin.
    """
    # Stop signals that arrive while no start is running. The queue is safe to use inside a signal
    # handler.
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    with signals_to(lambda number, _: asked.put(signal.Signals(number).name)):
        return _run(job, max_restarts, say, asked, wait_hosts)


def _run(
    job: Job, max_restarts: int, say: Any, asked: "queue.SimpleQueue[str]", wait_hosts: float
) -> int:
    progress, began = Progress(job, say), time.monotonic()
    failures: list[int] = []  # the step of each failed start
    starts = 0
    while True:
        starts += 1
        job = _continued(job, progress)
        outcome = _one_start(job, starts, progress, asked, wait_hosts)
        if outcome.text and outcome.kind != "done":
            say(outcome.text)
        if outcome.kind in ("done", "refused", "away"):
            break
        if outcome.reason:
            stopped(outcome, progress.out, say)
            break

        failures.append(run_folder.last_step(progress.out))
        if why := would_fail_again(progress, failures):
            say(f"not started again: {why}")
            outcome = replace(outcome, code=1)
            break
        if starts > max_restarts:
            if max_restarts:
                say(f"not started again: --max_restarts {max_restarts} are used up")
            break

        job, pause = with_spares(job, progress.named, say), pause_after(failures)
        say(f"restart {starts} of {max_restarts} in {pause:g} s, from {origin(progress.out)}")
        if stop := asked_to_stop(asked, pause):
            outcome = stop
            stopped(outcome, progress.out, say)
            break

    if starts > 1:
        say(progress.goodput(time.monotonic() - began, starts))
    checkpoint = newest_of_recipe(job.words, progress.out)
    end = JobEnd(outcome.code, outcome.reason, checkpoint, progress.named.to_leave_out(job))
    return hand_back(end, progress.logs, say)


def _continued(job: Job, progress: Progress) -> Job:
    """Return the job for the next start, which continues the run if this job has saved anything."""
    if job.words[-2:] == run_folder.CONTINUES:
        return job
    words = run_folder.next_words(job.words, progress.out, progress.since)
    if words != job.words:
        progress.say("this start continues the run: --resume auto")
    return replace(job, words=words)


def newest_of_recipe(words: tuple[str, ...], out: Path) -> str | None:
    """Return a run's newest complete checkpoint, or None for a script that is not a recipe."""
    return run_folder.newest_checkpoint(out) if run_folder.is_recipe(words) else None


def _one_start(
    job: Job,
    number: int,
    progress: Progress,
    asked: "queue.SimpleQueue[str]",
    wait_hosts: float,
) -> Outcome:
    """Start the job for the `number`-th time, and return how the start ended.

    A restart waits for hosts.
    """
    logs = new_logs(progress.logs)
    progress.say(f"start {number}: output of each rank in {shown(logs)}")

    def begin(patience: float) -> Outcome:
        return Start(job, logs, progress.say, asked, progress.learn, patience).run()

    outcome = begin(HELLO) if number == 1 else after_wait(begin, wait_hosts, progress.say, asked)
    progress.named.count(job, run_folder.alerts(progress.out, progress.since))
    return judged(outcome, progress.out, progress.since)


def would_fail_again(progress: Progress, failures: list[int]) -> str:
    """Return why a further start would only fail again, or "".

    `failures` contains the step of each failed start.
    """
    if is_stuck(failures):
        return f"{SAME_STEP} starts in a row have failed at step {failures[-1] + 1}"
    if alert := run_folder.own_stop(progress.out, progress.since):
        return f"the run stopped itself. {alert}"
    return ""


def is_stuck(failures: list[int]) -> bool:
    """Return True if the last SAME_STEP starts have failed at the same step."""
    return len(failures) >= SAME_STEP and len(set(failures[-SAME_STEP:])) == 1


def origin(out: Path) -> str:
    """Return the checkpoint from which the next start continues, as text to print."""
    newest = run_folder.newest_checkpoint(out)
    return newest or "the beginning: no checkpoint is complete yet"


def pause_after(failures: list[int]) -> float:
    """Return the seconds before the next start. They double with each failure at the same step."""
    step = failures[-1]
    same = next(
        (number for number, other in enumerate(reversed(failures)) if other != step),
        len(failures),
    )
    return min(LONGEST_PAUSE, 2.0 ** (same - 1))


def after_wait(
    begin: Callable[[float], Outcome], wait: float, say: Any, asked: "queue.SimpleQueue[str]"
) -> Outcome:
    """Begin a start, and wait up to `wait` seconds until every host can take part.

    The argument of `begin` is the number of seconds within which the hosts must answer. `begin`
    raises `LaunchError` while a host is unreachable.
    """
    deadline, shown_at, pause = time.monotonic() + wait, 0.0, min(1.0, LONGEST_LOOK)
    while True:
        try:
            return begin(min(HELLO, max(SHORTEST_ANSWER, deadline - time.monotonic())))
        except LaunchError as error:
            why, now = "; ".join(error.problems), time.monotonic()
        if now >= deadline:
            return Outcome(
                "away",
                START_AGAIN,
                f"not started again: --wait_hosts {wait:g} s are over, and still {why}",
            )
        if now - shown_at > SHOW_AGAIN:
            say(f"waiting for hosts, at most {deadline - now:.0f} s more (--wait_hosts): {why}")
            shown_at = now
        if stop := asked_to_stop(asked, min(pause, deadline - now)):
            return stop
        pause = min(2 * pause, LONGEST_LOOK)


def asked_to_stop(asked: "queue.SimpleQueue[str]", pause: float) -> Outcome | None:
    """Wait for `pause` seconds.

    If a stop signal arrives in this time, return the job's outcome at once.
    """
    with contextlib.suppress(queue.Empty):
        name = asked.get(timeout=pause)
        return Outcome("stopped", 128 + signal.Signals[name], "", name)
    return None


def stopped(outcome: Outcome, out: Path, say: Any) -> None:
    """Print the end of a job that was asked to stop. Such a job is not started again here."""
    what = (
        f"stopped by {outcome.reason}"
        if outcome.kind == "stopped"
        else f"not started again: {outcome.reason} had asked for a stop"
    )
    say(f"{what}. The newest complete checkpoint is {run_folder.newest_checkpoint(out) or 'none'}")


def first_start(logs: Path) -> tuple[Path, float]:
    """Return a file of this job in the log folder, and the time when the job began.

    The time is in seconds since 1970, by the clock of the disk with the logs. A requeued Slurm job
    began with its first start.
    """
    note = logs / f".began_{os.environ.get('SLURM_JOB_ID', 'here')}"
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" or not note.exists():
        try:
            logs.mkdir(parents=True, exist_ok=True)
            note.write_text("")
            note.touch()
        except OSError as error:
            raise cannot_make(logs, error) from None
    return note, note.stat().st_mtime


def judged(outcome: Outcome, out: Path, since: float) -> Outcome:
    """Convert exit code 0 to a failure unless the run folder confirms that the run is complete.

    A killed launcher exits with 0, and a rank may do the same.
    """
    # None: not a recipe, or no step was left to train
    goal = run_folder.goal(out) if run_folder.written(out) >= since else None
    step = run_folder.last_step(out)
    if outcome.kind != "done" or goal is None:
        return outcome
    if step < goal:
        return replace(
            outcome,
            kind="failed",
            code=START_AGAIN,
            text=f"all ranks ended with 0, but the run in {shown(out)} is at step {step} of {goal}",
        )
    if (run_folder.step_of(run_folder.newest_checkpoint(out)) or 0) < goal:
        return replace(
            outcome,
            kind="failed",
            code=START_AGAIN,
            text=(
                f"all ranks ended with 0, but the run in {shown(out)} has no complete checkpoint of"
                f" step {goal}"
            ),
        )
    return outcome


def shown(path: Path) -> str:
    """Return the shortest form of a path that can be typed in the current folder."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
