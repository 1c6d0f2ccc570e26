"""Reference log-probabilities, computed once in the run's own layout and cached for later starts.

The model is evaluated before a checkpoint is loaded. Therefore even a resumed run evaluates the
weights that the run started from.

The results are stored next to the cached tokens, in one file per start model. A row's key is
computed from its tokens, so runs with different layouts, seeds and epochs find the same rows.
Results in a file never change.
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

from ..checkpoints.state import TrainState
from ..data.chat_spans import ChatTemplate
from ..data.pairs import PairProcessor, ReferenceLogprobs, pair_keys
from ..data.prefetch import Stream
from ..data.stream_state import StreamState
from ..data.tokenizer_identity import hash_tokenizer
from ..hosts.locks import lock_file
from ..model.adapter import adapter_config_of
from ..plan import RunPlan
from ..spec.atomic_write import atomic_path
from ..spec.errors import ConfigError, Say
from ..spec.paths import local_path, write_with_umask
from ..spec.task import MicroBatch
from ..storage.manifest import STATE_FILE
from .corpus import DataSource, open_data, open_held_out
from .engine import TrainingModel
from .rank_consistency import check_same_data, shared_problems

LOG = logging.getLogger(__name__)
REFERENCE_FORMAT = 1  # version of the file format
SHARE_EVERY = 32  # steps between two exchanges of new results among the ranks
WRITE_EVERY, REPORT_EVERY = 60.0, 10.0  # seconds


@dataclass
class ReferenceFile:
    """The reference file of a start model, and its results in memory.

    `covered` lists the streams that are complete. It maps a stream's identity to [the number of
    steps before the first covered step, the last covered step].
    """

    path: Path | None  # None: nothing is stored
    references: ReferenceLogprobs
    covered: dict[str, list[int]] = field(default_factory=dict)

    def read(self) -> None:
        """Add the contents of the file if it exists. A damaged file counts as missing."""
        if self.path is None or not self.path.exists():
            return
        try:
            with safe_open(self.path, framework="numpy") as opened:
                keys, values, covered = (
                    opened.get_tensor("keys"),
                    opened.get_tensor("values"),
                    json.loads(opened.metadata()["covered"]),
                )
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            LOG.warning("%s cannot be read and is written again: %s", self.path, error)
            return
        own, self.references.table = (
            self.references.table,
            (np.empty(0, np.uint64), np.empty((0, 2), np.float32)),
        )
        self.references.add(keys.view(np.uint64), values)
        self.references.add(*own)  # for equal keys the results in the file win
        for identity, (first, last) in covered.items():
            self.cover(identity, first, last)

    def write(self) -> None:
        """Write the file, including the results that other runs have added to it since it was read.

        If the process is killed, the file contains either its old or its new content.
        """
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(f"{self.path}.lock", "w") as held:
                lock_file(held, str(self.path), "use --token_cache off", wait=True)
                self.read()
                keys, values = self.references.table
                tensors, metadata = (
                    {"keys": keys.view(np.int64), "values": values},
                    {"covered": json.dumps(self.covered)},
                )
                with atomic_path(self.path) as made:
                    write_with_umask(made, lambda path: save_file(tensors, path, metadata=metadata))
        except (OSError, SafetensorError, ConfigError) as error:  # SafetensorError: a full disk
            LOG.warning("the reference log-probabilities are not kept: %s", error)
            self.path = None

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


def run_reference_pass(
    loaded: TrainingModel, source: Path | None, evaluate: Callable[..., Any], say: Say
) -> None:
    """Compute the reference log-probabilities that the run still needs (a collective).

    The run needs the held-out rows and all scheduled rows after the step folder `source`. The
    processor receives the results. The engine must contain the start weights. `evaluate` runs
    micro-batches through the engine, as an evaluation does. Raises `ConfigError`, on all ranks, for
    a row that cannot be used.
    """
    plan, pairs = loaded.plan, cast(PairProcessor, loaded.processor)
    state: TrainState = json.loads((source / STATE_FILE).read_text()) if source else loaded.state
    kept = ReferenceFile(
        reference_file_of(loaded) if plan.command.rank == 0 else None, pairs.references
    )
    kept.read()
    broadcast_references(kept)

    reader = ReferencePass(loaded, kept, evaluate, say)
    data = DataSource(plan, loaded.task, pairs, opened=loaded.opened)
    coords = loaded.groups.coords
    stream = open_data(data, coords["dp"], cast("StreamState | None", state["data"]), say)
    with contextlib.closing(stream):
        check_same_data(stream)
        identity = stream_identity(plan, pairs, stream)
        if held_out := open_held_out(data, coords, stream.state, say):
            reader.process_step(held_out)
        new = read_steps(reader, stream, identity, plan.recipe.steps - state["step"])
    reader.share_logprobs("all rows")

    if reader.num_evaluated or new:
        kept.write()
    broadcast_references(kept)
    pairs.references.complete = True
    if reader.num_evaluated:
        where = f", kept in {kept.path}" if kept.path else ""
        say(
            f"reference log-probabilities: {len(pairs.references.table[0]):,} pairs in"
            f" {reader.seconds:.1f} s{where}"
        )


def stream_identity(plan: RunPlan, pairs: PairProcessor, stream: Stream) -> str:
    """Return a digest of everything that decides which rows a stream's steps contain."""
    recipe = plan.recipe
    is_dated = pairs.tokenizer.chat_template and ChatTemplate(pairs.tokenizer).is_dated
    stated = (
        stream.state["identity"],
        hash_tokenizer(pairs.tokenizer, plan.recipe.task),  # not in the state of an older run
        *filter(None, [recipe.batch_ramp, recipe.leave_out, plan.day if is_dated else ""]),
    )
    text = json.dumps(stated, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_steps(reader: "ReferencePass", stream: Stream, identity: str, num_steps: int) -> bool:
    """Compute the references for a stream's next steps (a collective).

    Return False, without reading the stream, if the file already covers these steps.
    """
    first = stream.state["step"]  # 0 if the data differ from the checkpoint's data
    if reader.reference_file.covers(identity, first, first + num_steps):
        return False

    for step in range(1, num_steps + 1):
        error = stream.error_ahead()
        reader.process_step(None if error else next(stream)[0], error)
        if step % SHARE_EVERY == 0:
            reader.share_logprobs(f"{step} of {num_steps} steps")
    reader.reference_file.cover(identity, first, first + num_steps)
    return True


@dataclass
class ReferencePass:
    """Evaluation of pairs whose log-probabilities are unknown. All ranks make the same calls."""

    loaded: TrainingModel
    reference_file: ReferenceFile
    evaluate: Callable[..., Any]
    say: Say
    num_evaluated: int = 0  # micro-batches evaluated on this rank
    # results that the other ranks do not have yet
    new_logprobs: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    started_at: float = field(default_factory=time.perf_counter)
    reported_at: float = field(default_factory=time.perf_counter)
    written_at: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started_at

    def process_step(
        self, batches: list[MicroBatch] | None, error: BaseException | None = None
    ) -> None:
        """Evaluate a step's micro-batches if any rank has an unknown pair (a collective).

        If there is an `error`, `batches` is None.
        """
        loaded, references = self.loaded, self.reference_file.references
        keys = (
            np.concatenate([pair_keys(batch) for batch in batches])
            if batches
            else np.empty(0, np.uint64)
        )
        unknown = int((~references(keys)[1] & (keys != 0)).any())
        flags = torch.tensor(
            [unknown, error is not None], dtype=torch.int64, device=loaded.engine.device
        )
        dist.all_reduce(flags)
        if flags[1]:
            raise ConfigError(shared_problems(error))
        if not flags[0]:
            return
        assert batches is not None
        loaded.step_metrics.row_logprobs = scores = []
        self.evaluate(loaded.engine, loaded.task, batches, loaded.plan.mesh, loaded.step_metrics)
        loaded.step_metrics.row_logprobs = None
        self.num_evaluated += len(batches)
        if scores and loaded.groups.coords["tp"] == 0:  # in a pipeline, the last stage has them
            self.new_logprobs.append((keys, torch.cat(scores).float().cpu().numpy()))

    def share_logprobs(self, where: str) -> None:
        """Share new results among all ranks (a collective).

        From time to time, also report progress and write the file.
        """
        everyone: list[Any] = [None] * self.loaded.plan.mesh.world
        dist.all_gather_object(everyone, self.new_logprobs)
        for keys, values in (found for own in everyone for found in own):
            self.reference_file.references.add(keys[keys != 0], values[keys != 0])
        self.new_logprobs = []
        now = time.perf_counter()
        if now - self.reported_at > REPORT_EVERY:
            self.say(f"reference log-probabilities: {where}, {self.seconds:.0f} s")
            self.reported_at = now
        if now - self.written_at > WRITE_EVERY:
            self.reference_file.write()
            self.written_at = now


def broadcast_references(reference_file: ReferenceFile) -> None:
    """Send rank 0's references to every rank (a collective)."""
    held: list[Any] = [(reference_file.references.table, reference_file.covered)]
    dist.broadcast_object_list(held)
    reference_file.references.table, reference_file.covered = held[0]


def reference_file_of(loaded: TrainingModel) -> Path | None:
    """Return the path of a start model's reference file, or None if nothing is stored.

    The file name is a digest of the weights, the config, the precision and the adapter.
    """
    recipe, built = loaded.plan.recipe, loaded.built
    adapter = adapter_config_of(built.model)
    # How such an `adapt` function changes the weights is unknown.
    if recipe.token_cache == "off" or (recipe.adapt is not None and adapter is None):
        return None
    base = (
        Path(datasets_config.HF_DATASETS_CACHE) / "recipekit"
        if recipe.token_cache == "auto"
        else local_path(f"--token_cache {recipe.token_cache}", recipe.token_cache)
    )
    seed = recipe.seed if adapter or built.weights is None else None
    stated = [
        REFERENCE_FORMAT,
        loaded.model_config,
        loaded.plan.precision,
        seed,
        built.weights.fingerprint() if built.weights else "",
        adapter,
    ]
    text = json.dumps(stated, sort_keys=True)
    return (
        base
        / "references"
        / f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.safetensors"
    )
