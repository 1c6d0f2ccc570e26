"""Retention of old checkpoints: which step folders a run keeps, and how the others are removed."""

import json
import math
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..spec.step_names import free_name, step_folders, step_of
from ..storage import manifest
from ..storage.manifest import MANIFEST, STATE_FILE

# Prefix of a step folder that is being removed. If the run is killed, no later start treats such a
# folder as a checkpoint.
REMOVED_PREFIX = ".removed_"


@dataclass(frozen=True)
class Retention:
    """The step folders to keep.

    They are the `newest` ones (0: all), every `every`-th step (0: none) and, with `best`, the step
    with the lowest eval_loss.
    """

    newest: int
    every: int = 0
    best: bool = False


def remove_old(folder: Path, retention: Retention) -> list[str]:
    """Remove the checkpoints in `folder` that `retention` does not keep.

    Return a line for each checkpoint that could not be removed completely. A folder counts as a
    checkpoint only if it is not a link and its manifest matches the step in its name. A link is
    never followed, and files that the manifest does not list are not removed.
    """
    if not retention.newest:
        return []
    found = complete_steps(folder)
    stays = steps_to_keep(found, retention)
    return remove_steps(
        folder, {step: listed for step, listed in found.items() if step not in stays}
    )


def remove_steps(folder: Path, steps: dict[Path, dict[str, Any]]) -> list[str]:
    """Remove step folders and their manifests; return a line for each incomplete removal."""
    lines = [line for step, listed in steps.items() for line in _remove_step(step, listed)]
    for removed in sorted(folder.glob(f"{REMOVED_PREFIX}*")):  # also the folders of a killed start
        if (
            not removed.is_symlink()
            and step_of(removed.name.removeprefix(REMOVED_PREFIX)) is not None
        ):
            lines += _remove_folder(removed)
    return lines


def complete_steps(folder: Path) -> dict[Path, dict[str, Any]]:
    """Return the complete step folders in `folder` with their manifests, oldest step first."""
    found = {}
    for step in step_folders(folder):
        with suppress(ValueError, OSError):
            if not step.is_symlink() and (listed := manifest.read_manifest(step))[
                "step"
            ] == step_of(step.name):
                found[step] = listed
    return found


def steps_to_keep(complete: dict[Path, dict[str, Any]], retention: Retention) -> set[Path]:
    kept = {*list(complete)[-retention.newest :]}
    if retention.every:
        kept |= {step for step, listed in complete.items() if listed["step"] % retention.every == 0}
    if retention.best:
        losses = {step: _eval_loss(step) for step in complete}
        kept |= {
            *sorted(
                (step for step in complete if losses[step] < math.inf),
                key=lambda step: losses[step],
            )[:1]
        }
    return kept


def _eval_loss(step: Path) -> float:
    """Return a step folder's eval_loss.

    Return infinity if there was no evaluation at this step, or if the loss is not finite.
    """
    try:
        loss = json.loads((step / STATE_FILE).read_text()).get("eval_loss")
    except (OSError, ValueError, AttributeError):
        return math.inf
    return float(loss) if type(loss) in (int, float) and math.isfinite(loss) else math.inf


def _remove_step(step: Path, listed: dict[str, Any]) -> list[str]:
    """Remove a step folder.

    If it contains files that its manifest does not list, remove only the listed files.
    """
    try:
        if not (extra := manifest.unlisted_files(step, listed)):
            os.rename(step, step.with_name(f"{REMOVED_PREFIX}{step.name}"))
            return []
        aside = free_name(step.parent, step.name)
        os.rename(step, aside)
        for name in (*listed["files"], MANIFEST):
            (aside / name).unlink(missing_ok=True)
        for inner in sorted(
            (path for path in aside.rglob("*") if path.is_dir() and not path.is_symlink()),
            reverse=True,
        ):
            with suppress(OSError):  # not empty: it holds unlisted files
                inner.rmdir()
    except OSError as error:
        return [_not_removed(step, error)]
    more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
    return [f"{step} is removed. {extra[0]}{more}, not part of the checkpoint, is kept in {aside}"]


def _remove_folder(path: Path) -> list[str]:
    try:
        shutil.rmtree(path)
    except OSError as error:
        return [_not_removed(path, error)]
    return []


def _not_removed(path: Path, error: OSError) -> str:
    return (
        f"{path} cannot be removed: {error.strerror or error}. The run continues, remove it by hand"
    )
