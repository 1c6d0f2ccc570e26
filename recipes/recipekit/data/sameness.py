"""What a stream of data is known by: its state, its identity, its files, and a hash of the tokens
given out.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NotRequired, TypedDict

import numpy as np

from ..spec.phases import Ramp
from ..spec.refusal import Problem, Refusal
from ..spec.task import MicroBatch

NAMED_FILES = 5  # changed files that a refusal names
SAMPLED = 1 << 16  # floats of a tensor that are hashed


OTHER_TOKENIZER = Problem(
    "--tokenizer",
    "must match the tokenizer of the saved run: the vocabulary, special tokens or chat template"
    " differ",
    "restore the old files, or start a new run with --out NEW",
)


class Given(TypedDict):
    """How much a stream has given of a corpus: `rows` and their `tokens` (or samples), and
    `documents` up to the end of the block in use.
    """

    documents: int
    tokens: int
    rows: int
    # of an epoch: rows of the data without text, and broken ones, which are left out
    empty: NotRequired[int]
    bad: NotRequired[int]


class DomainState(TypedDict):
    """How far a corpus of a stream has been used."""

    place: dict[str, Any]  # of the block in use, as `blocks.Place`, without zeros
    used: int  # rows of that block
    weight: float  # in the mixture
    tokens: int  # given since the weights last changed
    bad: int  # broken rows left out
    empty: NotRequired[int]  # empty rows left out
    given: NotRequired[Given]  # since the first step; absent from the states of older versions
    epoch: NotRequired[Given]  # once the first epoch is complete: what it has given
    # chats: rows read, cut, and without target; characters of answers, and dropped ones
    lost: NotRequired[list[int]]


class StreamState(TypedDict):
    """Where a stream stands after a step, the same on all ranks; kept as JSON in a step folder."""

    identity: dict[str, Any]  # what the order depends on
    step: int
    domains: dict[str, DomainState]


Files = dict[str, dict[str, str]]  # domain -> file -> digest


class OtherData(Refusal):
    """A refusal of a state of another stream than the opened stream, which reads `files`."""

    def __init__(self, problems: list[Problem], files: Files):
        super().__init__(problems)
        self.files = files

    def naming_changes(self, before: Files) -> "OtherData":
        """Return the refusal with the files that differ from those `before`, if there are some."""
        changed = changed_files(before, self.files)
        if not changed:
            return self
        problem = Problem(
            "--dataset",
            f"the files differ from those the saved run read: {first_of(changed)}",
            "restore the old files, or start a new run with --out NEW",
        )
        problems = [
            problem if other.where.startswith("corpus = ") else other for other in self.problems
        ]
        return OtherData(problems, self.files)


@contextlib.contextmanager
def naming_changes(before: Files) -> Iterator[None]:
    """Name the files that differ from those `before` in an `OtherData` that is raised inside."""
    try:
        yield
    except OtherData as refusal:
        raise refusal.naming_changes(before) from None


def check_identity(saved: dict, now: dict, files: Files) -> None:
    """Raise `OtherData` if two streams differ in what their order depends on; `files` are those of
    the stream of `now`.
    """
    saved, now = {"batch_ramp": []} | saved, {"batch_ramp": []} | now
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
        raise OtherData(problems, files)


def at_step(identity: dict[str, Any], ramp: Ramp, step: int) -> dict[str, Any]:
    """Returns the identity of a stream that has come to step `step`: with what has changed of its
    global batch, and not with what will.
    """
    return identity | ({"batch_ramp": changes} if (changes := ramp.changes(step)) else {})


def first_of(changed: list[str]) -> str:
    """Joins the first few of `changed_files`, for a message."""
    return ", ".join(changed[:NAMED_FILES]) + (
        f" and {len(changed) - NAMED_FILES} more" if len(changed) > NAMED_FILES else ""
    )


def changed_files(before: Files, now: Files) -> list[str]:
    """Lists each file that differs between two runs, with what happened to it."""
    found = []
    for domain in before.keys() & now.keys():
        old, new = before[domain], now[domain]
        found += [f"{name} has changed" for name in old if name in new and new[name] != old[name]]
        found += [f"{name} is gone" for name in old if name not in new]
        found += [f"{name} is new" for name in new if name not in old]
    return found


def roll(seen: int, batches: list[MicroBatch]) -> int:
    """Hashes all tensors handed out so far into 64 bits; `seen` is the hash before these batches (0
    at first).

    Of floats, which pictures have millions of, it takes about `SAMPLED` of a tensor.
    """
    for batch in batches:
        # which the positions tell
        for name in sorted(batch.keys() - {"documents", "document_starts"}):
            values = np.ascontiguousarray(batch[name].numpy()).ravel()
            values = values[:: len(values) // SAMPLED | 1] if values.dtype.kind == "f" else values
            values = values.view(f"u{values.itemsize}").astype(np.uint64, copy=False)
            mixed = (values + np.arange(1, len(values) + 1, dtype=np.uint64)) * np.uint64(
                0xBF58476D1CE4E5B9
            )
            seen = (seen * 0x94D049BB133111EB + int((mixed ^ (mixed >> np.uint64(31))).sum())) % (
                1 << 64
            )
    return seen


def merge_states(states: list[StreamState]) -> StreamState:
    """Returns the state that all ranks have after the same step.

    Raises RuntimeError if their states differ.
    """
    for state in states:
        if state != states[0]:
            raise RuntimeError(f"ranks read different data: {states[0]} and {state}")
    return states[0]
