"""Columns of a row: those that a task reads, and the refusal if one is missing."""

from collections.abc import Collection, Iterable

from ..spec.task_specs import TASKS
from .chat_rows import TOOLS, form_of
from .rows import SKIP


def columns_read(task: str, columns: tuple[str, ...], names: Collection[str]) -> tuple[str, ...]:
    """List the columns that a task reads of rows with columns of these names: chats have several
    forms, and pairs may have tools.
    """
    if TASKS[task].pairs and TOOLS in names and TOOLS not in columns:
        return (*columns, TOOLS)
    form = form_of(names, columns[0]) if TASKS[task].chats else None
    return tuple(form.present(names)) if form else columns


def absent_column(
    task: str, columns: tuple[str, ...], names: Iterable[str]
) -> tuple[str, str] | None:
    """Finds a column of the task that is not among `names`: rule and fix of a refusal; None if all
    are there.
    """
    facts, names = TASKS[task], list(names)
    if facts.chats and form_of(names, columns[0]):
        return None
    for flag, column in zip(
        facts.columns[len(facts.columns) - len(columns) :], columns, strict=True
    ):
        if column not in names:
            without = (
                f", or --{flag} '' if both answers begin with it" if flag == facts.optional else ""
            )
            fix = (
                f"name the column with --{flag}{without}. If only this row differs, correct it or"
                f" {SKIP}"
            )
            if "text_field" in facts.columns and (form := form_of(names)):
                fix = (
                    f"use --task sft, which reads such rows ({form.name}), or name a text column"
                    f" with --{flag}"
                )
            return f"has no column {column!r}, only {', '.join(map(repr, names))}", fix
    return None
