"""The state and identity of a data stream, digests of its files, and a hash of its tensors."""

import contextlib
from collections.abc import Iterator
from typing import Any, NotRequired, TypedDict

import numpy as np

from ..spec.errors import ConfigError, Problem
from ..spec.schedules import LeaveOut, Ramp
from ..spec.task import MicroBatch

MAX_NAMED_FILES = 5  # maximum number of changed files listed in a config error
HASHED_FLOATS = 1 << 16  # approximate maximum number of floats that are hashed per tensor


OTHER_TOKENIZER = Problem(
    "--tokenizer",
    "must match the tokenizer of the saved run: the vocabulary, special tokens or chat template"
    " differ",
    "restore the old files, or start a new run with --out NEW",
)


class DeliveredCounts(TypedDict):
    """Counts of a corpus in a stream: dealt `rows`, their `tokens` (or samples), and `documents`.

    `documents` counts the documents up to the end of the current block.
    """

    documents: int
    tokens: int
    rows: int
    # only in the counts of an epoch: empty rows and broken rows, which are skipped
    empty: NotRequired[int]
    bad: NotRequired[int]


class DomainState(TypedDict):
    """A stream's progress in one corpus."""

    place: dict[str, Any]  # start of the current block: a `blocks.StreamPosition` without zeros
    used: int  # rows used in that block
    weight: float  # weight in the mixture
    tokens: int  # tokens dealt since the weights last changed
    bad: int  # broken rows skipped
    empty: NotRequired[int]  # empty rows skipped
    given: NotRequired[DeliveredCounts]  # since the first step; absent in older versions' states
    epoch: NotRequired[DeliveredCounts]  # counts of the first epoch, after that epoch is complete
    # for chats: rows read, truncated, and without target; characters in answers, and dropped
    # characters
    lost: NotRequired[list[int]]


class StreamState(TypedDict):
    """A stream's state after a step, equal on all ranks; stored as JSON in a step folder."""

    identity: dict[str, Any]  # the values that determine the order of the rows
    step: int
    domains: dict[str, DomainState]


DigestsByDomain = dict[str, dict[str, str]]  # domain -> file -> digest


class StreamMismatch(ConfigError):
    """The config error for a state that belongs to a different stream than the open one.

    `files` contains the files that the open stream reads.
    """

    def __init__(self, problems: list[Problem], files: DigestsByDomain):
        super().__init__(problems)
        self.files = files

    def naming_changes(self, before: DigestsByDomain) -> "StreamMismatch":
        """Return the error, extended by the files that differ from `before`, if any."""
        changed = changed_files(before, self.files)
        if not changed:
            return self
        problem = Problem(
            "--dataset",
            f"the files differ from those the saved run read: {join_first_changes(changed)}",
            "restore the old files, or start a new run with --out NEW",
        )
        problems = [
            problem if other.where.startswith("corpus = ") else other for other in self.problems
        ]
        return StreamMismatch(problems, self.files)


@contextlib.contextmanager
def naming_changes(before: DigestsByDomain) -> Iterator[None]:
    """If a `StreamMismatch` is raised inside, add the files that differ from `before` to it."""
    try:
        yield
    except StreamMismatch as error:
        raise error.naming_changes(before) from None


def check_identity(saved: dict, now: dict, files: DigestsByDomain) -> None:
    """Raise `StreamMismatch` if two streams differ in a value that determines the order.

    `files` contains the files of the stream whose identity is `now`.
    """
    unset: dict[str, Any] = {"batch_ramp": [], "leave_out": []}
    saved, now = unset | saved, unset | now
    fix = "use the value of the saved run, or start a new run with --out NEW"
    problems = [
        Problem(f"{key} = {now.get(key)}", f"the saved data stream has {was}", fix)
        for key, was in saved.items()
        if now.get(key) != was
    ]
    problems = [
        OTHER_TOKENIZER if problem.where.startswith("tokenizer = ") else problem
        for problem in problems
    ]
    if problems:
        raise StreamMismatch(problems, files)


def identity_at_step(
    identity: dict[str, Any], ramp: Ramp, leave_out: LeaveOut, step: int
) -> dict[str, Any]:
    """Return a stream's identity at step `step`.

    The identity includes only those changes of the global batch, and those batches left out, that
    the stream has reached by this step.
    """
    reached = {"batch_ramp": ramp.changes(step), "leave_out": leave_out.entries(step)}
    return identity | {name: entries for name, entries in reached.items() if entries}


def join_first_changes(changed: list[str]) -> str:
    """Join the first few results of `changed_files` for a message."""
    return ", ".join(changed[:MAX_NAMED_FILES]) + (
        f" and {len(changed) - MAX_NAMED_FILES} more" if len(changed) > MAX_NAMED_FILES else ""
    )


def changed_files(before: DigestsByDomain, now: DigestsByDomain) -> list[str]:
    """Return each file that differs between two runs, with the type of change."""
    found = []
    for domain in before.keys() & now.keys():
        old, new = before[domain], now[domain]
        found += [f"{name} has changed" for name in old if name in new and new[name] != old[name]]
        found += [f"{name} is gone" for name in old if name not in new]
        found += [f"{name} is new" for name in new if name not in old]
    return found


def roll_batch_hash(seen: int, batches: list[MicroBatch]) -> int:
    """Return a 64-bit hash of all tensors returned so far.

    `seen` is the hash before these batches, initially 0. Image tensors have millions of floats, so
    only about `HASHED_FLOATS` floats are hashed per tensor.
    """
    for batch in batches:
        # these two follow from the positions
        for name in sorted(batch.keys() - {"documents", "document_starts"}):
            values = np.ascontiguousarray(batch[name].numpy()).ravel()
            values = (
                values[:: len(values) // HASHED_FLOATS | 1] if values.dtype.kind == "f" else values
            )
            values = values.view(f"u{values.itemsize}").astype(np.uint64, copy=False)
            mixed = (values + np.arange(1, len(values) + 1, dtype=np.uint64)) * np.uint64(
                0xBF58476D1CE4E5B9
            )
            seen = (seen * 0x94D049BB133111EB + int((mixed ^ (mixed >> np.uint64(31))).sum())) % (
                1 << 64
            )
    return seen


def merge_states(states: list[StreamState]) -> StreamState:
    """Return the state that all ranks share after the same step.

    Raise RuntimeError if the ranks' states differ.
    """
    for state in states:
        if state != states[0]:
            raise RuntimeError(f"ranks read different data: {states[0]} and {state}")
    return states[0]
