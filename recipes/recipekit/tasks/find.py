"""Finds the code of a task by its name."""

from importlib import import_module
from typing import Any

from ..spec.task import Task


def task_called(name: str) -> Task:
    """Returns `TASK` of the file of that name in this folder, a key of `facts.TASKS`."""
    return import_module(f".{name}", __package__).TASK


def with_numbers(task: Task, values: Any) -> Task:
    """Gives the loss of a task its numbers, attributes of `values` (a recipe)."""
    return (
        task.tuned(**{name: getattr(values, name) for name in task.numbers}) if task.tuned else task
    )
