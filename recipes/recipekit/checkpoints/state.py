"""What a run has to remember besides tensors and random generators; kept as JSON in each step folder."""

from collections.abc import Mapping
from typing import Any, TypedDict


class State(TypedDict):
    """Where a run stands. `data` is the state of the data stream, None before the first step."""

    step: int  # optimizer steps taken
    tokens: int  # with a label, over the whole global batch
    data: Mapping[str, Any] | None
    export_dtype: str  # of the Hugging Face files that are made of it, as torch names it without "torch."


class SavedState(State):
    """A state as it lies in a step folder, with the layout that wrote the folder."""

    layout: dict[str, Any]
