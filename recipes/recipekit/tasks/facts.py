"""What can be said of each task without torch: a row that --help, the checks, the data and the model read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Facts:
    """Describes a task. A row of a micro-batch has one document or more of the data set."""

    about: str  # for --help and the pages
    chats: bool  # the data set holds chats, not texts
    auto_class: str  # of transformers, which makes the model of a config.json
    inputs: tuple[str, ...]  # tensors of a micro-batch that the model takes, and that travel between the stages of a pipeline
    constants: Mapping[str, Any] = field(default_factory=dict)  # further arguments of every forward pass


TASKS = {
    "pretrain": Facts(
        about="loss on every token",
        chats=False,
        auto_class="AutoModelForCausalLM",
        inputs=("input_ids", "position_ids"),
        constants={"use_cache": False},
    ),
    "sft": Facts(
        about="chats, loss on the answers only",
        chats=True,
        auto_class="AutoModelForCausalLM",
        inputs=("input_ids", "position_ids"),
        constants={"use_cache": False},
    ),
}
