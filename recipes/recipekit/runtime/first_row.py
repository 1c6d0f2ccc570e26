"""A run's first row in readable form, for --show_row and for the start of a run on chats."""

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from ..data.batching import DataRank
from ..data.prefetch import Stream
from ..data.preview import LEARNED_END, LEARNED_START, first_document
from ..data.stream import open_stream
from ..model.weights import fetch_config
from ..plan import RunPlan
from ..spec.errors import Say, config_error
from ..spec.task_specs import PACKED, TaskSpec
from ..tasks.find import load_task
from .corpus import request_of_plan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_ROW_CHARS = 1000  # characters of a row that a start shows


def show_row(plan: RunPlan) -> None:
    """Print the first document that the run would train on.

    Raises `ConfigError` for a task whose rows are not packed text.
    """
    recipe = plan.recipe
    if recipe.task_spec.rows != PACKED:
        raise config_error(
            "--show_row",
            f"cannot be combined with task {recipe.task}, whose rows are not text",
            "leave it out",
        )
    if plan.command.rank:
        return
    request = replace(request_of_plan(plan), token_cache="off")
    model_config = plan.model_config or fetch_config(
        recipe.model, recipe.task, recipe.labels, [], recipe.model_revision
    )
    tokenizer = load_task(recipe.task).processor(request, model_config)
    with contextlib.closing(
        open_stream(request, tokenizer, rank=DataRank(plan.mesh.dp, 0), say=print)
    ) as stream:
        text = first_document(tokenizer, next(stream)[0][0], recipe.task_spec.labels_in_place)
        print(f"{row_heading(recipe.task_spec)}\n{text}")


def say_first_row(
    stream: Stream, tokenizer: "PreTrainedTokenizerBase", task_spec: TaskSpec, say: Say
) -> None:
    """Log the first chat that a new run trains on, as rendered, with the trained parts marked."""
    if not task_spec.chats or stream.state["step"] or not (batches := stream.first_ahead()):
        return
    text = first_document(tokenizer, batches[0], task_spec.labels_in_place)
    rest = (
        f"... ({len(text) - SHOWN_ROW_CHARS:,} more characters; --show_row prints all)"
        if len(text) > SHOWN_ROW_CHARS
        else ""
    )
    say(f"{row_heading(task_spec)}\n{text[:SHOWN_ROW_CHARS]}{rest}")


def row_heading(task_spec: TaskSpec) -> str:
    """Return the heading line that is printed above the row."""
    return (
        f"first {'chat' if task_spec.chats else 'document'};"
        f" {'masked' if task_spec.masked else 'learned'}: the text between {LEARNED_START} and"
        f" {LEARNED_END}"
    )
