"""What the start of a run says of the rows that it will train on: computed once, in the run's own
layout, and kept for every later start.

The model is asked before a checkpoint is loaded, so on a resume, too, it has the weights that the
run began with. The numbers lie beside the cached tokens, in a file for each start; a row's key is
made of its tokens, so that other layouts, seeds and epochs find them again. What a file holds is
never changed.
"""

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from datasets import config as datasets_config
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..checkpoints.state import State
from ..data.chat_spans import ChatTemplate
from ..data.pairs import Pairs, References, keys_of
from ..data.prefetch import Stream
from ..data.sameness import StreamState
from ..data.tokenizer_identity import identity_of
from ..hosts.locks import lock
from ..model.adapter import config_of
from ..plan import Plan
from ..spec.paths import local_path, write_with_umask
from ..spec.refusal import Refusal, Say
from ..spec.task import MicroBatch
from ..spec.whole_file import replacing
from ..storage.manifest import STATE
from .agree import check_same_data, shared_problems
from .corpus import DataSource, open_data, open_held_out
from .engine import Loaded

LOG = logging.getLogger(__name__)
FORMAT = 1  # of the files
TOGETHER = 32  # steps after which the ranks share what they have found
SAVE_EVERY, TELL_EVERY = 60.0, 10.0  # seconds


@dataclass
class Kept:
    """Holds the file of a start: its numbers, and of which streams it has all: identity -> [steps
    before the first one, the last one].
    """

    file: Path | None  # None: nothing is kept
    references: References
    covered: dict[str, list[int]] = field(default_factory=dict)

    def read(self) -> None:
        """Adds what the file holds, if there is one; a damaged one counts as none."""
        if self.file is None or not self.file.exists():
            return
        try:
            with safe_open(self.file, framework="numpy") as opened:
                keys, values, covered = (
                    opened.get_tensor("keys"),
                    opened.get_tensor("values"),
                    json.loads(opened.metadata()["covered"]),
                )
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            LOG.warning("%s cannot be read and is written again: %s", self.file, error)
            return
        own, self.references.table = (
            self.references.table,
            (np.empty(0, np.uint64), np.empty((0, 2), np.float32)),
        )
        self.references.add(keys.view(np.uint64), values)
        self.references.add(*own)  # those of the file stay
        for identity, (first, last) in covered.items():
            self.cover(identity, first, last)

    def write(self) -> None:
        """Writes the file, with what others have added to it meanwhile: a kill leaves the old one
        or the new one.
        """
        if self.file is None:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with open(f"{self.file}.lock", "w") as held:
                lock(held, str(self.file), "use --token_cache off", wait=True)
                self.read()
                keys, values = self.references.table
                tensors, metadata = (
                    {"keys": keys.view(np.int64), "values": values},
                    {"covered": json.dumps(self.covered)},
                )
                with replacing(self.file) as made:
                    write_with_umask(made, lambda path: save_file(tensors, path, metadata=metadata))
        except (OSError, SafetensorError, Refusal) as error:  # a full disk is a SafetensorError
            LOG.warning("the reference log-probabilities are not kept: %s", error)
            self.file = None

    def covers(self, identity: str, first: int, last: int) -> bool:
        begun, ended = self.covered.get(identity, [first + 1, first])
        return first >= last or (begun <= first and last <= ended)

    def cover(self, identity: str, first: int, last: int) -> None:
        begun, ended = self.covered.get(identity, [first, last])
        self.covered[identity] = (
            [first, last]
            if first > ended or begun > last
            else [min(begun, first), max(ended, last)]
        )


def fill(loaded: Loaded, source: Path | None, evaluate: Callable[..., Any], say: Say) -> None:
    """Fill the references of the processor for all rows of the schedule after the step folder
    `source`, and for the held-out rows (a collective).

    The engine must have the weights of the start; `evaluate` reads micro-batches with it, as an
    evaluation does. Raises `Refusal`, on all ranks, for a row that cannot be used.
    """
    plan, pairs = loaded.plan, cast(Pairs, loaded.processor)
    state: State = json.loads((source / STATE).read_text()) if source else loaded.state
    kept = Kept(file_of(loaded) if plan.command.rank == 0 else None, pairs.references)
    kept.read()
    share(kept)

    reader = Reader(loaded, kept, evaluate, say)
    data, coords = DataSource(plan, loaded.task, pairs), loaded.groups.coords
    stream = open_data(data, coords["dp"], cast("StreamState | None", state["data"]), say)
    with contextlib.closing(stream):
        check_same_data(stream)
        identity = stream_identity(plan, pairs, stream)
        if held_out := open_held_out(data, coords, stream.state, say):
            reader.take(held_out)
        new = read_steps(reader, stream, identity, plan.recipe.steps - state["step"])
    reader.together("all rows")

    if reader.asked or new:
        kept.write()
    share(kept)
    pairs.references.complete = True
    if reader.asked:
        where = f", kept in {kept.file}" if kept.file else ""
        say(
            f"reference log-probabilities: {len(pairs.references.table[0]):,} pairs in"
            f" {reader.seconds:.1f} s{where}"
        )


def stream_identity(plan: Plan, pairs: Pairs, stream: Stream) -> str:
    """Return a digest of everything that decides which rows the steps of a stream have."""
    is_dated = pairs.tokenizer.chat_template and ChatTemplate(pairs.tokenizer).is_dated
    stated = (
        stream.state["identity"],
        identity_of(pairs.tokenizer, plan.recipe.task),  # the state of an older run has none
        *filter(None, [plan.recipe.batch_ramp, plan.day if is_dated else ""]),
    )
    text = json.dumps(stated, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_steps(reader: "Reader", stream: Stream, identity: str, num_steps: int) -> bool:
    """Read the references of the next steps of a stream; return False, without reading, if the file
    has all of them (a collective).
    """
    first = stream.state["step"]  # 0 for other data than the checkpoint's
    if reader.kept.covers(identity, first, first + num_steps):
        return False

    for step in range(1, num_steps + 1):
        error = stream.error_ahead()
        reader.take(None if error else next(stream)[0], error)
        if step % TOGETHER == 0:
            reader.together(f"{step} of {num_steps} steps")
    reader.kept.cover(identity, first, first + num_steps)
    return True


@dataclass
class Reader:
    """Asks the model of the pairs that are not known yet. Every rank calls it in the same order."""

    loaded: Loaded
    kept: Kept
    evaluate: Callable[..., Any]
    say: Say
    asked: int = 0  # micro-batches of this rank
    # that the other ranks do not have
    found: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)
    told: float = field(default_factory=time.perf_counter)
    saved: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begun

    def take(self, batches: list[MicroBatch] | None, error: BaseException | None = None) -> None:
        """Asks of the micro-batches of a step, if a rank has one with a pair that is not known (a
        collective).

        None: there is an `error` in their place.
        """
        loaded, references = self.loaded, self.kept.references
        keys = (
            np.concatenate([keys_of(batch) for batch in batches])
            if batches
            else np.empty(0, np.uint64)
        )
        unknown = int((~references(keys)[1] & (keys != 0)).any())
        flags = torch.tensor(
            [unknown, error is not None], dtype=torch.int64, device=loaded.engine.device
        )
        dist.all_reduce(flags)
        if flags[1]:
            raise Refusal(shared_problems(error))
        if not flags[0]:
            return
        assert batches is not None
        loaded.sums.scores = scores = []
        self.evaluate(loaded.engine, loaded.task, batches, loaded.plan.mesh, loaded.sums)
        loaded.sums.scores = None
        self.asked += len(batches)
        if scores and loaded.groups.coords["tp"] == 0:  # of a pipeline the last stage has them
            self.found.append((keys, torch.cat(scores).float().cpu().numpy()))

    def together(self, where: str) -> None:
        """Gives every rank what the others have found (a collective), tells it now and then, and
        keeps it.
        """
        everyone: list[Any] = [None] * self.loaded.plan.mesh.world
        dist.all_gather_object(everyone, self.found)
        for keys, values in (found for own in everyone for found in own):
            self.kept.references.add(keys[keys != 0], values[keys != 0])
        self.found = []
        now = time.perf_counter()
        if now - self.told > TELL_EVERY:
            self.say(f"reference log-probabilities: {where}, {self.seconds:.0f} s")
            self.told = now
        if now - self.saved > SAVE_EVERY:
            self.kept.write()
            self.saved = now


def share(kept: Kept) -> None:
    """Gives every rank what rank 0 holds (a collective)."""
    held: list[Any] = [(kept.references.table, kept.covered)]
    dist.broadcast_object_list(held)
    kept.references.table, kept.covered = held[0]


def file_of(loaded: Loaded) -> Path | None:
    """Names the file of the start of a run, by the weights, the config, the precision and the
    adapter; None where none is kept.
    """
    recipe, built = loaded.plan.recipe, loaded.built
    adapter = config_of(built.model)
    # what such an `adapt` has done to the weights is not known
    if recipe.token_cache == "off" or (recipe.adapt is not None and adapter is None):
        return None
    base = (
        Path(datasets_config.HF_DATASETS_CACHE) / "recipekit"
        if recipe.token_cache == "auto"
        else local_path(f"--token_cache {recipe.token_cache}", recipe.token_cache)
    )
    seed = recipe.seed if adapter or built.weights is None else None
    stated = [
        FORMAT,
        loaded.model_config,
        loaded.plan.precision,
        seed,
        built.weights.mark() if built.weights else "",
        adapter,
    ]
    text = json.dumps(stated, sort_keys=True)
    return (
        base
        / "references"
        / f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.safetensors"
    )
