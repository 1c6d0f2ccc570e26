"""Lookup of a task's code by name."""

from importlib import import_module

from ..spec.task import Task


def load_task(name: str) -> Task:
    """Return `TASK` from this folder's file `name`, which is a key of `task_specs.TASKS`."""
    return import_module(f".{name}", __package__).TASK


def with_hyperparameters(task: Task, values: object) -> Task:
    """Return the task with hyperparameters taken from the attributes of `values` (a recipe)."""
    return (
        task.with_hyperparameters(**{name: getattr(values, name) for name in task.hyperparameters})
        if task.with_hyperparameters
        else task
    )
