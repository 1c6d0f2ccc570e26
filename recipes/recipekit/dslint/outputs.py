"""Paths in a JSON that DeepSpeed writes to: swap files, monitors, profiles."""

from pathlib import Path
from typing import Any

from ..spec.errors import ConfigError, Problem
from ..spec.paths import local_path
from .schema import value_at

OFFLOAD_BLOCKS = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
SWAP_PATH_KEYS = tuple(f"{block}.nvme_path" for block in OFFLOAD_BLOCKS)
OUTPUT_PATH_KEYS = (
    *SWAP_PATH_KEYS,
    "tensorboard.output_path",
    "csv_monitor.output_path",
    "flops_profiler.output_file",
)


def check_outputs(config: dict[str, Any]) -> list[Problem]:
    """Report output paths that are not located on this machine."""
    problems: list[Problem] = []
    for key in OUTPUT_PATH_KEYS:
        try:
            _path_at(config, key)
        except ConfigError as error:
            problems += error.problems
    return problems


def expand_outputs(config: dict[str, Any], out: Path) -> None:
    """Replace the output paths in a checked `config` with resolved paths.

    A relative `nvme_path` is resolved to a folder in `out`.
    """
    for key in OUTPUT_PATH_KEYS:
        if (path := _path_at(config, key)) is not None:
            block, _, name = key.rpartition(".")
            value_at(config, block)[name] = str(
                (out / path).resolve() if key in SWAP_PATH_KEYS else path
            )


def _path_at(config: dict[str, Any], key: str) -> Path | None:
    text = value_at(config, key)
    if not isinstance(text, str) or not text.strip():
        return None  # the type check reports other values
    return local_path(f"{key} = {text}", text)
