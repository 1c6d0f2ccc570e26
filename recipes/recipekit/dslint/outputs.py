"""Paths in a JSON that DeepSpeed writes to: swap files, monitors, profiles."""

from pathlib import Path
from typing import Any

from ..spec.paths import local_path
from ..spec.refusal import Problem, Refusal
from .schema import at

BLOCKS = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
SWAP = tuple(f"{block}.nvme_path" for block in BLOCKS)
KEYS = (*SWAP, "tensorboard.output_path", "csv_monitor.output_path", "flops_profiler.output_file")


def check_outputs(config: dict[str, Any]) -> list[Problem]:
    """Refuse paths that are written to and are not on this machine."""
    problems: list[Problem] = []
    for key in KEYS:
        try:
            _path_at(config, key)
        except Refusal as refusal:
            problems += refusal.problems
    return problems


def expand_outputs(config: dict[str, Any], out: Path) -> None:
    """Replace the paths in a checked `config` by what they mean.

    A relative `nvme_path` is a folder of `out`.
    """
    for key in KEYS:
        if (path := _path_at(config, key)) is not None:
            block, _, name = key.rpartition(".")
            at(config, block)[name] = str((out / path).resolve() if key in SWAP else path)


def _path_at(config: dict[str, Any], key: str) -> Path | None:
    text = at(config, key)
    if not isinstance(text, str) or not text.strip():
        return None  # other values are refused by type
    return local_path(f"{key} = {text}", text)
