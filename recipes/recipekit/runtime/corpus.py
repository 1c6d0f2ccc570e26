"""A run's data, checked before anything large is allocated and opened at the checkpoint's state."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..data.batching import DataRank
from ..data.held_out import eval_rows, eval_samples
from ..data.hub_cache import hub_commits
from ..data.prefetch import Stream
from ..data.processors import num_embeddings
from ..data.request import Request, request_from_recipe
from ..data.samples import open_rows, read_samples
from ..data.stream import Corpus, check_global_batch, open_corpus, read_documents
from ..data.stream_state import StreamMismatch, StreamState, naming_changes
from ..parallel.sequence import local_sequence_chunk
from ..plan import RunPlan
from ..spec.errors import ConfigError, Say
from ..spec.hub import commit_of
from ..spec.run_folder import day_of_run, files_of_run
from ..spec.schedules import LeaveOut, format_ramp
from ..spec.task import IGNORE, MicroBatch, Task
from ..tasks.find import load_task
from .rank_consistency import shared_problems


def request_of_plan(plan: RunPlan) -> Request:
    """Return the data request of a run."""
    return replace(
        request_from_recipe(plan.recipe),
        tiny=plan.command.tiny,
        day=plan.day,
        documents=load_task(plan.recipe.task).documents,
    )


def first_start_date(resume_from: Path | None) -> str:
    """Return the ISO date of the run's first start (a collective).

    The date comes from run.json; without run.json, it is today's date on rank 0. Call this function
    only once per start, because a start may last beyond midnight.
    """
    found = [day_of_run(resume_from) or date.today().isoformat()]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]


def check_data(plan: RunPlan, task: Task, processor: object, say: Say) -> Corpus:
    """Open the data before anything large is allocated (a collective).

    The stream reads the opened data later. Raises `ConfigError`, on all ranks, with the problems of
    every rank that cannot open the data.
    """
    corpus, refusal = None, None
    if task.spec.reads_tokens:
        check_tokens(processor, say)
    try:
        corpus = corpus_opener(request_of_plan(plan), task, processor)(say)
    except ConfigError as error:
        refusal = error
    if problems := shared_problems(refusal):
        raise ConfigError(problems)
    assert corpus is not None, "a refusal of this rank is among the problems"
    return corpus


def check_tokens(processor: Any, say: Say) -> None:
    """Report a tokenizer that has more tokens than the model has embeddings."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if (fewer := num_embeddings(tokenizer)) < len(tokenizer):
        say(
            f"tokenizer: {len(tokenizer)} tokens, but the model has embeddings for {fewer}. Data"
            " with other tokens are refused"
        )


def corpus_opener(request: Request, task: Task, processor: Any) -> Callable[..., Corpus]:
    """Return a function of (say, a stream's state or None) that opens each corpus once.

    The function raises `ConfigError` if a corpus cannot be opened or does not fit the tokenizer.
    """
    if task.samples:
        return partial(open_rows, request, task.samples, processor)
    return partial(open_corpus, request, processor)


def commits_of(model: str, revision: str, tokenizer: str, corpus: dict[str, str]) -> dict[str, Any]:
    """Return the repositories that a run reads from the hub, with their commits.

    `corpus` contains the fingerprints of the run's data sets.
    """
    found: dict[str, Any] = {"model": commit_of(model, revision)}
    if tokenizer not in ("", "bytes", model):
        found["tokenizer"] = commit_of(tokenizer)
    found["datasets"] = hub_commits(corpus)
    return {name: value for name, value in found.items() if value}


@dataclass(frozen=True)
class DataSource:
    """A run's data, with the task and the processor that convert the data to micro-batches.

    `opened` contains a new run's data, which its start has already opened. `left_out` contains the
    batches that rewinds have left out.
    """

    plan: RunPlan
    task: Task
    processor: Any
    documents: bool = False  # True if the run's attention reads document bounds
    opened: Corpus | None = None
    left_out: LeaveOut = field(default_factory=LeaveOut)


def open_data(source: DataSource, dp_rank: int, state: StreamState | None, say: Say) -> Stream:
    """Open the training data at `state`.

    With `--resume PATH` the data may differ from the checkpoint's data. In that case they are
    opened at the beginning. The checkpoint must not be after a batch that only one of the runs
    leaves out.
    """
    plan, task, processor = source.plan, source.task, source.processor
    request, rank = request_of_plan(plan), DataRank(plan.mesh.dp, dp_rank)
    check_global_batch(request.ramp, request.micro_batch, rank.dp)

    def stream_at(state: StreamState | None, request: Request) -> Stream:
        corpus = source.opened
        # Converting epochs to steps may have changed the recipe since the data were opened.
        if corpus is None or state is not None or corpus.request != request:
            corpus = corpus_opener(request, task, processor)(say, state)
        if task.samples:
            samples = task.samples
            return read_samples(corpus, processor, samples, rank=rank, state=state, say=say)
        documents = source.documents
        return read_documents(corpus, processor, rank=rank, state=state, documents=documents)

    try:
        with naming_changes(files_of_run(plan.resume_from)):
            left_out = plan.recipe.left_out.with_entries(source.left_out.table)
            return stream_at(state, replace(request, leave_out=format_ramp(left_out.table)))
    except StreamMismatch as error:
        others = [each for each in error.problems if not each.where.startswith("leave_out = ")]
        if plan.recipe.resume == "auto" or not others:
            raise
        stream = stream_at(None, request)
        say(
            "the data differ from the checkpoint's and are read from the beginning:"
            f" {'; '.join(problem.where for problem in error.problems)}"
        )
        return stream


def open_held_out(
    source: DataSource, coords: dict[str, int], state: StreamState, say: Say
) -> list[MicroBatch]:
    """Return this rank's micro-batches of an evaluation, or [] if the run has no evaluations.

    `state` is the current state of the open stream.
    """
    task, processor = source.task, source.processor
    recipe, mesh = source.plan.recipe, source.plan.mesh
    if not recipe.eval_every:
        return []
    request = request_of_plan(source.plan)
    found = (
        partial(eval_samples, request, processor, task.samples)
        if task.samples
        else partial(eval_rows, request, processor, documents=source.documents)
    )
    held_out = [
        local_sequence_chunk(batch, mesh.sp, coords["sp"])
        for batch in found(rank=DataRank(mesh.dp, coords["dp"]), state=state, say=say)
    ]
    # DualPipeV's schedule needs two micro-batches per stage.
    if recipe.pipeline_schedule == "dualpipev" and mesh.pp > 1 and held_out:
        if task.samples:
            fill = task.samples.collate(processor, [None] * recipe.micro_batch, None)
        else:
            fill = held_out[-1] | {"labels": torch.full_like(held_out[-1]["labels"], IGNORE)}
        held_out += [fill] * max(0, 2 * mesh.pp - len(held_out))
    return held_out
