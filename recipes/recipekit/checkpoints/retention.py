"""Old checkpoints: which step folders a run keeps, and how the others are removed."""

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
from ..storage.manifest import MANIFEST, STATE

# prefix of a step folder that is being removed: a kill leaves a folder that no start takes for a
# checkpoint
REMOVED = ".removed_"


@dataclass(frozen=True)
class Retention:
    """The step folders to keep: the `newest` (0: all), every `every`-th step (0: none), and the one
    with the lowest eval_loss.
    """

    newest: int
    every: int = 0
    best: bool = False


def remove_old(folder: Path, retention: Retention) -> list[str]:
    """Remove the checkpoints in `folder` that `retention` does not keep; return a line for each
    that could not be removed as a whole.

    Only real folders count whose manifest states the step in their name. A link is never followed,
    and files that the manifest does not list stay.
    """
    if not retention.newest:
        return []
    found = own_steps(folder)
    stays = kept(found, retention)
    return remove(folder, {step: listed for step, listed in found.items() if step not in stays})


def remove(folder: Path, steps: dict[Path, dict[str, Any]]) -> list[str]:
    """Remove step folders (and their manifests); return a line for each that could not be removed
    as a whole.
    """
    lines = [line for step, listed in steps.items() for line in _remove(step, listed)]
    for removed in sorted(folder.glob(f"{REMOVED}*")):  # those of a start that was killed as well
        if not removed.is_symlink() and step_of(removed.name.removeprefix(REMOVED)) is not None:
            lines += _remove_folder(removed)
    return lines


def own_steps(folder: Path) -> dict[Path, dict[str, Any]]:
    """Map the complete step folders in `folder` to their manifests, the oldest step first."""
    found = {}
    for step in step_folders(folder):
        with suppress(ValueError, OSError):
            if not step.is_symlink() and (listed := manifest.read(step))["step"] == step_of(
                step.name
            ):
                found[step] = listed
    return found


def kept(found: dict[Path, dict[str, Any]], retention: Retention) -> set[Path]:
    kept = {*list(found)[-retention.newest :]}
    if retention.every:
        kept |= {step for step, listed in found.items() if listed["step"] % retention.every == 0}
    if retention.best:
        losses = {step: _eval_loss(step) for step in found}
        kept |= {
            *sorted(
                (step for step in found if losses[step] < math.inf), key=lambda step: losses[step]
            )[:1]
        }
    return kept


def _eval_loss(step: Path) -> float:
    """Return the eval_loss of a step folder; infinity without an evaluation at this step, and if
    the loss is not finite.
    """
    try:
        loss = json.loads((step / STATE).read_text()).get("eval_loss")
    except (OSError, ValueError, AttributeError):
        return math.inf
    return float(loss) if type(loss) in (int, float) and math.isfinite(loss) else math.inf


def _remove(step: Path, listed: dict[str, Any]) -> list[str]:
    """Remove a step folder, or, if it has files that its manifest does not list, only the listed
    files.
    """
    try:
        if not (extra := manifest.unlisted(step, listed)):
            os.rename(step, step.with_name(f"{REMOVED}{step.name}"))
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
