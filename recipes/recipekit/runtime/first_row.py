"""The first row of a run as a person reads it: at the start of a run on chats, and for
--show_row.
"""

import contextlib
from dataclasses import replace
from typing import Any

from ..data.lanes import DataRank
from ..data.prefetch import Stream
from ..data.shown_row import BEGIN, END, first_document
from ..data.stream import open_stream
from ..model.weights import fetch_config
from ..plan import Plan
from ..spec.refusal import Say, refuse
from ..spec.task_specs import PACKED, Facts
from ..tasks.find import task_called
from .corpus import request_of_plan

LONGEST = 1000  # characters of a row that a start shows


def show_row(plan: Plan) -> None:
    """Print the first document that the run would train on.

    Raises `Refusal` for a task whose rows are no packed text.
    """
    recipe = plan.recipe
    if recipe.facts.rows != PACKED:
        raise refuse(
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
    tokenizer = task_called(recipe.task).processor(request, model_config)
    with contextlib.closing(
        open_stream(request, tokenizer, rank=DataRank(plan.mesh.dp, 0), say=print)
    ) as stream:
        text = first_document(tokenizer, next(stream)[0][0], recipe.facts.masked)
        print(f"{heading(recipe.facts)}\n{text}")


def say_first_row(stream: Stream, tokenizer: Any, facts: Facts, say: Say) -> None:
    """Say how the first chat that a new run trains on is rendered, and what of it is learned."""
    if not facts.chats or stream.state["step"] or not (batches := stream.first_ahead()):
        return
    text = first_document(tokenizer, batches[0], facts.masked)
    rest = (
        f"... ({len(text) - LONGEST:,} more characters; --show_row prints all)"
        if len(text) > LONGEST
        else ""
    )
    say(f"{heading(facts)}\n{text[:LONGEST]}{rest}")


def heading(facts: Facts) -> str:
    """Return the line above the row."""
    return (
        f"first {'chat' if facts.chats else 'document'}; {'masked' if facts.masked else 'learned'}:"
        f" the text between {BEGIN} and {END}"
    )
