"""The data of a run: one global stream, the same on any number of ranks."""

from .evaluation import eval_rows
from .stream import OtherData, Stream, merge_states, open_stream, roll

__all__ = ["OtherData", "Stream", "eval_rows", "merge_states", "open_stream", "roll"]
