"""Finds the code of a task by its name."""

from importlib import import_module

from ..task import Task


def task_called(name: str) -> Task:
    """Returns `TASK` of the file of that name in this folder, a key of `facts.TASKS`."""
    return import_module(f".{name}", __package__).TASK
