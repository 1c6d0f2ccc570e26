"""A small copy of a model with random weights, and what a forward pass of it takes: what can be
seen by running is seen on it.
"""

import functools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..architectures.families import tiny_copy
from ..architectures.shrink import shrink
from ..parallel.partial import partial_gradients
from ..spec.refusal import Refusal, refuse
from ..spec.task_specs import Facts, Plans
from .config_errors import WRONG_VALUE
from .empty import config_of, construct

VOCABULARY = 264  # of a small copy
ROWS, TOKENS = 2, 32  # of its input

Found = TypeVar("Found")


def once_a_config(look: Callable[..., Found]) -> Callable[..., Found]:
    """Keeps what a function of (config.json, words) has found in this process: a dry run and a
    start ask more than once.
    """
    found: dict[tuple[str, ...], Found] = {}

    @functools.wraps(look)
    def ask(model_config: dict[str, Any], *words: str) -> Found:
        key = json.dumps(model_config, sort_keys=True), *words
        if key not in found:
            found[key] = look(model_config, *words)
        return found[key]

    return ask


def _pictures(config: PreTrainedConfig) -> torch.Tensor:
    tower: Any = getattr(config, "vision_config", config)
    size = getattr(tower, "image_size", 32)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.randn(ROWS, getattr(tower, "num_channels", 3), height, width)


# tensor of a micro-batch -> one for a small copy with that config
EXAMPLES: dict[str, Callable[[PreTrainedConfig], torch.Tensor]] = {
    "input_ids": lambda config: torch.randint(3, VOCABULARY - 1, (ROWS, TOKENS)),
    "position_ids": lambda config: torch.arange(TOKENS).expand(ROWS, -1),
    "pixel_values": _pictures,
}


def small_copy(model_config: dict[str, Any], facts: Facts, name: str = "") -> PreTrainedModel:
    """Makes a small model of the same parts, its weights drawn.

    Raises what transformers does, or `Refusal`, if there is none.
    """
    tiny = (
        shrink(model_config, most=facts.tiny)
        if facts.tiny
        else tiny_copy(config_of(model_config, name), VOCABULARY)
    )
    if facts.labels:
        tiny = tiny | {"num_labels": facts.labels, "pad_token_id": 0}  # which EXAMPLES do not hold
    return construct(config_of(tiny, name), "eager", name, facts.auto_class)


def logits_of(model: nn.Module, facts: Facts) -> torch.Tensor:
    """Computes the output of a small copy for drawn inputs."""
    config: Any = model.config
    return model(
        **{name: EXAMPLES[name](config) for name in facts.inputs}, **facts.constants
    ).logits


def summed_gradients(
    model_config: dict[str, Any], facts: Facts, plans: Plans, name: str = ""
) -> frozenset[str]:
    """Names the whole parameters whose gradients tensor parallelism has to sum; see
    `parallel.partial`.

    Raises `Refusal` if that cannot be found out.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        try:
            return partial_gradients(
                small_copy(model_config, facts, name),
                plans.tp,
                lambda model: logits_of(model, facts),
            )
        except WRONG_VALUE as error:
            if isinstance(error, Refusal):
                raise
            rule = (
                f"no small copy of a {model_config['model_type']} runs, which shows what tensor"
                " parallelism has to sum"
            )
            raise refuse(
                f"tp > 1 with {name}",
                f"{rule} ({type(error).__name__}: {str(error)[:200]})",
                "use --tp 1",
            ) from error
