"""The data of a run: looked at before anything large is made, and opened where the checkpoint left
it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..data.held_out import eval_rows, eval_samples
from ..data.hub_cache import hub_commits
from ..data.lanes import DataRank
from ..data.prefetch import Stream
from ..data.processors import num_embeddings
from ..data.request import Request, request_of
from ..data.sameness import OtherData, StreamState, naming_changes
from ..data.samples import open_rows, open_samples
from ..data.stream import Corpus, open_corpus, open_stream
from ..parallel.sequence import own_part
from ..plan import Plan
from ..spec.hub import commit_of
from ..spec.recipe import Recipe
from ..spec.refusal import Refusal, Say
from ..spec.run_folder import day_of_run, files_of_run
from ..spec.task import IGNORE, MicroBatch, Task
from .agree import shared_problems


def request_of_plan(plan: Plan) -> Request:
    """Return the data request of a run."""
    return replace(request_of(plan.recipe), tiny=plan.command.tiny, day=plan.day)


def first_day(resume_from: Path | None) -> str:
    """Return the ISO date of the run's first start: the date in run.json, or else today's date on
    rank 0 (a collective).

    Call it once a start, because a start may last beyond midnight.
    """
    found = [day_of_run(resume_from) or date.today().isoformat()]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]


def check_data(recipe: Recipe, task: Task, processor: Any, say: Say) -> None:
    """Opens the data once, before anything large is made (a collective).

    Raises `Refusal`, on all ranks, with what any of them cannot open.
    """
    refusal = None
    if task.facts.of_tokens:
        check_tokens(processor, say)
    try:
        opener(request_of(recipe), task, processor)(say)
    except Refusal as error:
        refusal = error
    if problems := shared_problems(refusal):
        raise Refusal(problems)


def check_tokens(processor: Any, say: Say) -> None:
    """Report a tokenizer with more tokens than the model has embeddings."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if (fewer := num_embeddings(tokenizer)) < len(tokenizer):
        say(
            f"tokenizer: {len(tokenizer)} tokens, but the model has embeddings for {fewer}. Data"
            " with other tokens are refused"
        )


def opener(request: Request, task: Task, processor: Any) -> Callable[[Say], Corpus]:
    """Return a function that opens each corpus once.

    It raises `Refusal` if one cannot be opened or does not fit the tokenizer.
    """
    if task.samples:
        return partial(open_rows, request, task.samples, processor)
    return partial(open_corpus, request, processor)


def commits_of(model: str, revision: str, tokenizer: str, corpus: dict[str, str]) -> dict[str, Any]:
    """Return what a run reads from the hub, with the commits; `corpus` are the fingerprints of its
    data sets.
    """
    found: dict[str, Any] = {"model": commit_of(model, revision)}
    if tokenizer not in ("", "bytes", model):
        found["tokenizer"] = commit_of(tokenizer)
    found["datasets"] = hub_commits(corpus)
    return {name: value for name, value in found.items() if value}


@dataclass(frozen=True)
class DataSource:
    """The data of a run, with the task and the processor that make micro-batches of it."""

    plan: Plan
    task: Task
    processor: Any
    documents: bool = False  # whether the attention of the run reads the bounds of documents


def open_data(source: DataSource, dp_rank: int, state: StreamState | None, say: Say) -> Stream:
    """Open the training data at `state`, or at its beginning if the data differ from the
    checkpoint's, which `--resume PATH` accepts.
    """
    plan, task, processor = source.plan, source.task, source.processor
    request = request_of_plan(plan)
    opened = (
        partial(open_samples, request, processor, task.samples)
        if task.samples
        else partial(open_stream, request, processor, documents=source.documents)
    )
    opened = partial(opened, rank=DataRank(plan.mesh.dp, dp_rank), say=say)
    try:
        with naming_changes(files_of_run(plan.resume_from)):
            return opened(state=state)
    except OtherData as refusal:
        if plan.recipe.resume == "auto":
            raise
        stream = opened()
        say(
            "the data differ from the checkpoint's and are read from the beginning:"
            f" {'; '.join(problem.where for problem in refusal.problems)}"
        )
        return stream


def open_held_out(
    source: DataSource, coords: dict[str, int], state: StreamState, say: Say
) -> list[MicroBatch]:
    """Return this rank's micro-batches of an evaluation, an empty list without evaluations; `state`
    is the state of the open stream.
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
        own_part(batch, mesh.sp, coords["sp"])
        for batch in found(rank=DataRank(mesh.dp, coords["dp"]), state=state, say=say)
    ]
    # its schedule needs two micro-batches a stage
    if recipe.pipeline_schedule == "dualpipev" and mesh.pp > 1 and held_out:
        if task.samples:
            fill = task.samples.collate(processor, [None] * recipe.micro_batch, None)
        else:
            fill = held_out[-1] | {"labels": torch.full_like(held_out[-1]["labels"], IGNORE)}
        held_out += [fill] * max(0, 2 * mesh.pp - len(held_out))
    return held_out
