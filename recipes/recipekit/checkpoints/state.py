"""Types what a run remembers besides tensors and random generators; each step folder keeps it as
JSON.
"""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict


class State(TypedDict):
    """Holds how far a run has come.

    `data` is the state of the data stream, None before the first step.
    """

    step: int  # optimizer steps taken
    tokens: int  # tokens with a label, over the whole global batch
    data: Mapping[str, Any] | None
    # of a task whose rows are samples: rows that were dealt, and then only filled up
    unusable: NotRequired[int]
    # of the evaluation at this step, if there was one with a finite loss
    eval_loss: NotRequired[float | None]
    # dtype of the Hugging Face files made of this state, as torch names it without "torch."
    export_dtype: str


class SavedState(State):
    """Holds a state as a step folder keeps it, with the layout that wrote the folder."""

    layout: dict[str, Any]
