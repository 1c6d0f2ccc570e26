"""Small, randomly initialised copies of models, and example inputs for these copies.

`model/probes.py` runs these copies to test capabilities.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..architectures.families import tiny_copy
from ..architectures.shrink import shrink
from ..spec.errors import ConfigError
from ..spec.task_specs import TaskSpec
from .empty import config_of, construct

PROBE_VOCAB = 264  # vocabulary of a small copy
INITIAL_RANGE = 0.1  # of its weights: large enough to make differences between logits visible
PROBE_ROWS, PROBE_TOKENS = 2, 32  # size of a copy's input

ProbeResult = TypeVar("ProbeResult")


def once_per_config(probe: Callable[..., ProbeResult]) -> Callable[..., ProbeResult]:
    """Return a function of (config.json, words) that caches the results of `probe` in this process.

    Errors are not cached.
    """
    found: dict[tuple[str, ...], ProbeResult] = {}

    @functools.wraps(probe)
    def ask(model_config: dict[str, Any], *words: str) -> ProbeResult:
        key = json.dumps(model_config, sort_keys=True), *words
        if key not in found:
            found[key] = probe(model_config, *words)
        return found[key]

    return ask


def small_config(model_config: dict[str, Any], facts: TaskSpec, name: str = "") -> dict[str, Any]:
    """Return the config.json for a small copy.

    Raise `ConfigError` or the error from transformers if there is no such config.
    """
    if facts.reads_tokens:
        tiny = tiny_copy(config_of(model_config, name), PROBE_VOCAB, facts.tiny)
    else:
        tiny = shrink(model_config, limits=facts.tiny)
    if facts.labels:
        # Example inputs never contain this padding token.
        tiny = tiny | {"num_labels": facts.labels, "pad_token_id": 0}
    if facts.reads_tokens and tiny.get("initializer_range"):
        tiny = tiny | {"initializer_range": INITIAL_RANGE}
    return tiny


def small_copy(
    model_config: dict[str, Any], facts: TaskSpec, name: str = "", attention: str = "eager"
) -> PreTrainedModel:
    """Construct a small, randomly initialised model with the same parts.

    Raise `ConfigError` or the error from transformers if the model cannot be constructed.
    """
    tiny = small_config(model_config, facts, name)
    return construct(config_of(tiny, name), attention, name, facts.auto_class)


def _example_images(config: PreTrainedConfig) -> torch.Tensor:
    tower = getattr(config, "vision_config", config)
    size = getattr(tower, "image_size", 32)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.randn(PROBE_ROWS, getattr(tower, "num_channels", 3), height, width)


# Micro-batch tensor -> function that returns an example for a small copy with the given config.
EXAMPLE_INPUTS: dict[str, Callable[[PreTrainedConfig], torch.Tensor]] = {
    "input_ids": lambda config: tokens(PROBE_ROWS, PROBE_TOKENS),
    "position_ids": lambda config: torch.arange(PROBE_TOKENS).expand(PROBE_ROWS, -1),
    "pixel_values": _example_images,
}


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, PROBE_VOCAB - 1, (rows, length))


def arguments_of(config: PreTrainedConfig, facts: TaskSpec) -> dict[str, Any]:
    """Return random inputs for a small copy with that config."""
    return {name: EXAMPLE_INPUTS[name](config) for name in facts.inputs} | dict(facts.constants)


def logits_of(model: PreTrainedModel, facts: TaskSpec) -> torch.Tensor:
    """Return a small copy's output for random inputs."""
    return model(**arguments_of(model.config, facts)).logits


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Sample with a separate seeded CPU generator, without changing torch's global generator."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def in_words(error: Exception, one_line: bool = False) -> str:
    """Return why a small copy cannot be constructed or does not run, as part of a message."""
    if isinstance(error, ConfigError):
        return error.problems[0].rule
    text = " ".join(str(error).split()) if one_line else str(error)
    return f"{type(error).__name__}: {text[:200]}"
