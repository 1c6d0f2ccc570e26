"""Conversion of a step folder to a different layout.

No model is built. Only a few chunks of tensors are in memory at a time, independent of the model's
size.
"""

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..parallel.blueprint import Blueprint, Layout, blueprint_in
from ..spec.errors import config_error
from ..storage import error_feedback, manifest, step_files
from ..storage.copying import Effort, plan_copies, run_copies
from ..storage.journal import Journal
from ..storage.tensor_files import open_checkpoint
from .state import SavedState
from .step_folder import StepFolder, open_step


def reshape(
    source: Path,
    out: Path,
    layout: Layout,
    blueprint: Blueprint | None = None,
    effort: Effort | None = None,
) -> None:
    """Write `source` (a step or run folder) to `out` in a different layout, bit for bit.

    `out` is either complete or not created at all. `blueprint` describes the model that will load
    `out`. Its plans may differ from the plans in the source. Without it, the source's blueprint is
    used, with the parameters in fp32 that the layout can keep.
    """
    effort = effort or Effort()
    step = open_step(source)
    now = blueprint or blueprint_in(layout, step.blueprint)
    error_feedback.check_saved_errors(step.folder, layout, step.blueprint, now)
    if not any(tensor.group is not None for tensor in step.blueprint.tensors):
        rule = "was saved at ZeRO-0 by another program, so its optimizer states have no names"
        raise config_error(
            str(step.folder),
            rule,
            "convert only its weights, with recipekit convert to-hf and then from-hf",
        )

    journal = Journal(out, {"source": step.fingerprint, "layout": layout.to_json()})
    digests, facts = _copy_tensors(step, journal, layout, now, effort)
    digests.pop("", None)
    step.check_digests(digests)
    _copy_other_files(step, journal.folder, layout)
    kept = replace(now, published=step.blueprint.published, files=step.blueprint.files)
    finish_step_folder(journal, {**step.state, "layout": layout.to_json()}, kept, digests, facts)


def _copy_tensors(
    step: StepFolder, journal: Journal, layout: Layout, now: Blueprint, effort: Effort
) -> tuple[dict[str, Any], dict[str, manifest.FileEntry]]:
    """Create a layout's files and fill them.

    If the conversion resumes, the files already exist and are not created again. Return digests and
    file entries as `run_copies` does.
    """
    with ExitStack() as stack:
        read = open_checkpoint(step.folder, step.blueprint, step.layout)
        stack.callback(read.close)
        if not journal.resumed:
            carried = step_files.read_common_state(step.folder, step.blueprint, step.layout)
            regrouped = carried.remap_groups(step.blueprint, now)
            step_files.create_step_files(journal.folder, now, layout, regrouped)
            journal.note("", None)
        written = open_checkpoint(journal.folder, now, layout, writable=True)
        stack.callback(written.close)
        todo = plan_copies(step.blueprint, read, written)
        return run_copies(todo, read, effort, written, journal, hashed=True)


def _copy_other_files(step: StepFolder, folder: Path, layout: Layout) -> None:
    """Copy the files that contain no model tensors.

    They contain random-generator states, error-feedback buffers and small files. The random
    generators' saved states are assigned to the new ranks in turn.
    """
    ranks = len(manifest.listed_files(step.folder, "rng_rank_*.pt"))
    for rank in range(layout.mesh.world if ranks else 0):
        shutil.copyfile(step.folder / f"rng_rank_{rank % ranks}.pt", folder / f"rng_rank_{rank}.pt")
    for path in manifest.listed_files(step.folder, error_feedback.ERROR_FILE_PATTERN):
        shutil.copyfile(path, folder / path.name)
    copy_small_files(step.small_files, folder / "hf_files")


def finish_step_folder(
    journal: Journal,
    state: SavedState,
    blueprint: Blueprint,
    tensors: dict[str, Any],
    file_entries: dict[str, manifest.FileEntry],
) -> None:
    """Write a step folder's remaining files, the manifest last, and rename the folder."""
    (journal.folder / manifest.STATE_FILE).write_text(json.dumps(state, indent=1))
    (journal.folder / manifest.BLUEPRINT_FILE).write_text(json.dumps(blueprint.to_json()))
    for path in journal.folder.rglob("*"):
        if (
            path.is_file()
            and path.name != "journal.jsonl"
            and (name := str(path.relative_to(journal.folder))) not in file_entries
        ):
            file_entries[name] = manifest.file_entry(path)
    manifest.write_manifest(journal.folder, state["step"], file_entries, tensors)
    journal.finish()


def copy_small_files(paths: dict[str, Path], folder: Path) -> None:
    """Copy a model's small files (name -> file) into `folder`."""
    for name, path in paths.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
