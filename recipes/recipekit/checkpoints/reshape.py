"""Rewrites a step folder in another layout.

No model is built, and memory holds a few chunks, whatever the model's size.
"""

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..parallel.blueprint import Blueprint, Layout
from ..spec.refusal import refuse
from ..storage import create, errors, manifest
from ..storage.copying import Effort, copies, run
from ..storage.journal import Journal
from ..storage.tensor_files import open_checkpoint
from .state import SavedState
from .step_folder import Step, open_step


def reshape(
    source: Path,
    out: Path,
    layout: Layout,
    blueprint: Blueprint | None = None,
    effort: Effort | None = None,
) -> None:
    """Write the step folder `out`: `source` (a step or run folder) in another layout, bit for bit,
    complete or not at all.

    `blueprint`: describes the model that will load `out`, whose plans may differ from the source's.
    """
    effort = effort or Effort()
    step = open_step(source)
    now = blueprint or step.blueprint
    errors.check(step.folder, layout, step.blueprint, now)
    if not any(tensor.group is not None for tensor in step.blueprint.tensors):
        rule = "was saved at ZeRO-0 by another program, so its optimizer states have no names"
        raise refuse(
            str(step.folder),
            rule,
            "convert only its weights, with recipekit convert to-hf and then from-hf",
        )

    journal = Journal(out, {"source": step.fingerprint, "layout": layout.to_json()})
    digests, facts = _copy_tensors(step, journal, layout, now, effort)
    digests.pop("", None)
    step.check(digests)
    _copy_other_files(step, journal.folder, layout)
    kept = replace(now, published=step.blueprint.published, files=step.blueprint.files)
    complete(journal, {**step.state, "layout": layout.to_json()}, kept, digests, facts)


def _copy_tensors(
    step: Step, journal: Journal, layout: Layout, now: Blueprint, effort: Effort
) -> tuple[dict[str, Any], dict[str, manifest.Facts]]:
    """Create the files of a layout, unless the conversion resumes, and fill them; return digests
    and facts as `run` does.
    """
    with ExitStack() as stack:
        read = open_checkpoint(step.folder, step.blueprint, step.layout)
        stack.callback(read.close)
        if not journal.resumed:
            carried = create.read_carried(step.folder, step.blueprint, step.layout)
            regrouped = carried.regrouped(step.blueprint, now)
            create.create(journal.folder, now, layout, regrouped)
            journal.note("", None)
        written = open_checkpoint(journal.folder, now, layout, writable=True)
        stack.callback(written.close)
        todo = copies(step.blueprint, read, written)
        return run(todo, read, effort, written, journal, hashed=True)


def _copy_other_files(step: Step, folder: Path, layout: Layout) -> None:
    """Copy the files without tensors of the model: generators, compression errors, small files.

    New ranks take turns at the saved states of the random generators.
    """
    ranks = len(manifest.listed_files(step.folder, "rng_rank_*.pt"))
    for rank in range(layout.mesh.world if ranks else 0):
        shutil.copyfile(step.folder / f"rng_rank_{rank % ranks}.pt", folder / f"rng_rank_{rank}.pt")
    for path in manifest.listed_files(step.folder, errors.FILES):
        shutil.copyfile(path, folder / path.name)
    copy_small(step.small_files, folder / "hf_files")


def complete(
    journal: Journal,
    state: SavedState,
    blueprint: Blueprint,
    tensors: dict[str, Any],
    facts: dict[str, manifest.Facts],
) -> None:
    """Writes a step folder's files besides tensors, the manifest last, and gives the folder its
    name.
    """
    (journal.folder / manifest.STATE).write_text(json.dumps(state, indent=1))
    (journal.folder / manifest.BLUEPRINT).write_text(json.dumps(blueprint.to_json()))
    for path in journal.folder.rglob("*"):
        if (
            path.is_file()
            and path.name != "journal.jsonl"
            and (name := str(path.relative_to(journal.folder))) not in facts
        ):
            facts[name] = manifest.facts(path)
    manifest.write(journal.folder, state["step"], facts, tensors)
    journal.finish()


def copy_small(paths: dict[str, Path], folder: Path) -> None:
    """Copy a model's small files (name -> file) into `folder`."""
    for name, path in paths.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
