"""Requeueing of an unfinished job, with a limit on repeated starts without progress.

Slurm: the job is requeued after a warning signal and after a fault from outside (exit code 75).
Kubernetes: the exit code decides (podFailurePolicy in k8s.yaml).
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .allocation import Allocation, allocation
from .errors import START_AGAIN, LaunchError
from .hosts import scontrol

# After this many scheduler starts without a new checkpoint, the next start would not produce one
# either.
WITHOUT_STEP = 3
EXCLUDE = 15.0  # seconds within which a requeued job becomes pending
A_PERSON = ("SIGINT", "SIGHUP")  # Ctrl-C and a closed terminal end the job for good


@dataclass(frozen=True)
class Chain:
    """The starts of one job by its scheduler.

    `note` is a file that records the newest checkpoint at the end of each start, one line per
    start.
    """

    note: Path
    first: bool  # True on the job's first start, when an old note belongs to a different job

    def without_step(self, checkpoint: str) -> int:
        """Record the newest checkpoint at the end of this start.

        Return how many consecutive starts have added no checkpoint, not counting the first start.
        """
        try:
            before = (
                [] if self.first or not self.note.exists() else self.note.read_text().splitlines()
            )
            lines = [*before, checkpoint or "none"]
            self.note.write_text("".join(f"{line}\n" for line in lines))
        except OSError:
            return 0  # a disk that fails now may work at the next start
        same = next(
            (number for number, line in enumerate(reversed(lines)) if line != lines[-1]), len(lines)
        )
        return same - 1


@dataclass(frozen=True)
class JobEnd:
    """The end of a job on this machine.

    `reason` is the signal that requested a stop. `checkpoint` is the newest checkpoint. It is ""
    before the first checkpoint, and None for a script that writes no checkpoints. `left_out` are
    the hosts that a requeued job must not use.
    """

    code: int
    reason: str
    checkpoint: str | None
    left_out: Sequence[str] = ()


def hand_back(end: JobEnd, logs: Path, say: Callable[[str], None]) -> int:
    """Return launch's exit code for a job that has ended.

    A Slurm job is requeued if a further start can help.
    """
    code, reason, checkpoint = end.code, end.reason, end.checkpoint
    slurm_job = os.environ.get("SLURM_JOB_ID", "")
    if code == 0 or reason in A_PERSON or not (reason or code == START_AGAIN):
        return code
    if slurm_job:
        chain = Chain(
            logs / f".chain_{slurm_job}", os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
        )
        return _into_queue(slurm_job, end, _starts_without_step(chain, code, checkpoint), say)
    if code == START_AGAIN and "JOB_COMPLETION_INDEX" in os.environ:
        pod = f"{os.environ.get('LAUNCH_JOB_ID', 'pod')}_{os.environ['JOB_COMPLETION_INDEX']}"
        chain = Chain(logs / f".chain_{pod}", False)
        if _starts_without_step(chain, code, checkpoint) >= WITHOUT_STEP:
            chain.note.unlink(missing_ok=True)  # a different Job may use this folder
            say(f"exit code 1 instead of {START_AGAIN}: {_no_step()}")
            return 1
    return code


def exclude(job: str, nodes: str) -> None:
    """Exclude nodes from a job's next start.

    Slurm accepts the change once the job is pending. Raises `LaunchError` after EXCLUDE seconds.
    """
    deadline = time.monotonic() + EXCLUDE
    while True:
        try:
            scontrol("update", f"JobId={job}", f"ExcNodeList={nodes}")
            return
        except LaunchError:
            if time.monotonic() > deadline:
                raise
        time.sleep(1.0)


def nodes_of(listed: str) -> list[str]:
    """Return the names in a list of Slurm nodes, such as node[1-3]. Raises `LaunchError`."""
    return scontrol("show", "hostnames", listed).split() if listed else []


def _starts_without_step(chain: Chain, code: int, checkpoint: str | None) -> int:
    if checkpoint is None and code != START_AGAIN:
        return 0  # The progress of a script is unknown if it was only asked to stop.
    return chain.without_step(checkpoint or "")


def _no_step() -> str:
    return (
        f"{WITHOUT_STEP} starts by the scheduler have added no checkpoint. Look for the reason"
        " above, and start the job by hand"
    )


def _into_queue(job: str, end: JobEnd, without_step: int, say: Callable[[str], None]) -> int:
    """Requeue a Slurm job, with two exceptions.

    The job is not requeued if somebody is cancelling it, or if the last requeues brought no new
    checkpoint. Hosts that are left out are excluded from its next start.
    """
    code = end.code
    try:
        told: Allocation = allocation(job)
        if not told.batch:
            return code  # started by salloc or srun: the terminal belongs to the user
        if told.state != "RUNNING":  # Slurm 22.05 would also requeue a job that is being cancelled
            say(f"job {job} is {told.state}, so it is not put back into the queue")
            return code
        if without_step >= WITHOUT_STEP:
            say(f"job {job} is not put back into the queue: {_no_step()}")
            return 1
        new = sorted({*end.left_out} - {*nodes_of(told.excluded)})
        if new:
            # Slurm ends the processes of a requeued job, but `scontrol update` must still run. It
            # inherits the ignored signal.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        scontrol("requeue", job)
        say(f"job {job} is back in the queue")
        if new:
            exclude(job, ",".join(filter(None, (told.excluded, *new))))
            say(
                f"job {job} will not use {', '.join(new)}, because alerts have named it. To use it"
                f" again: scontrol update JobId={job} ExcNodeList={told.excluded}"
            )
    except LaunchError as error:
        say(f"job {job} could not be put back into the queue: {'; '.join(error.problems)}")
    return code
