"""Columns of a row: the columns that a task reads, and the config error for a missing column."""

from collections.abc import Collection, Iterable

from ..spec.task_specs import TASKS
from .chat_rows import TOOLS_COLUMN, match_chat_form
from .rows import SKIP_FIX


def columns_to_read(task: str, columns: tuple[str, ...], names: Collection[str]) -> tuple[str, ...]:
    """Return the columns that a task reads from rows with the column names `names`.

    The columns depend on `names` because chats have several formats and pairs may have tools.
    """
    if TASKS[task].pairs and TOOLS_COLUMN in names and TOOLS_COLUMN not in columns:
        return (*columns, TOOLS_COLUMN)
    form = match_chat_form(names, columns[0]) if TASKS[task].chats else None
    return tuple(form.present(names)) if form else columns


def missing_column(
    task: str, columns: tuple[str, ...], names: Iterable[str]
) -> tuple[str, str] | None:
    """Return the rule and fix of a config error if a task's column is not in `names`.

    Otherwise return None.
    """
    facts, names = TASKS[task], list(names)
    if facts.chats and match_chat_form(names, columns[0]):
        return None
    for flag, column in zip(
        facts.columns[len(facts.columns) - len(columns) :], columns, strict=True
    ):
        if column not in names:
            without = (
                f", or --{flag} '' if both answers begin with it"
                if flag == facts.optional_column
                else ""
            )
            fix = (
                f"name the column with --{flag}{without}. If only this row differs, correct it or"
                f" {SKIP_FIX}"
            )
            if "text_field" in facts.columns and (form := match_chat_form(names)):
                fix = (
                    f"use --task sft, which reads such rows ({form.name}), or name a text column"
                    f" with --{flag}"
                )
            return f"has no column {column!r}, only {', '.join(map(repr, names))}", fix
    return None
