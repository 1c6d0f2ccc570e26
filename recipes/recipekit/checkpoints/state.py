"""Types of a run's state except the tensors and random generators.

Each step folder stores this state as JSON.
"""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict


class TrainState(TypedDict):
    """A run's progress.

    `data` is the data stream's state; it is None before the first step.
    """

    step: int  # optimizer steps taken
    tokens: int  # number of tokens with a label in all global batches so far
    data: Mapping[str, Any] | None
    # for tasks whose rows are samples: number of dealt rows that were unusable and became fill-up
    # rows
    unusable: NotRequired[int]
    # evaluation loss at this step, if the loss is finite
    eval_loss: NotRequired[float | None]
    # number of steps so far that changed no weight
    skipped: NotRequired[int]
    # [step, batches] for each rewind: global batches that the stream leaves out before a step
    left_out: NotRequired[list[list[int]]]
    # windows of the monitor (watch/monitor.py)
    watch: NotRequired[Mapping[str, Any]]
    # dtype of Hugging Face files made from this state: torch's name without "torch."
    export_dtype: str


class SavedState(TrainState):
    """A state as stored in a step folder, with the layout of that folder."""

    layout: dict[str, Any]
