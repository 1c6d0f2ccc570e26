"""Byte-by-byte comparison of a step folder with its manifest."""

import json
from contextlib import suppress
from pathlib import Path

from ..storage import manifest
from ..storage.copying import Effort, plan_copies, run_copies, threaded_map
from ..storage.tensor_files import open_checkpoint
from .step_folder import open_step


def verify(folder: Path, effort: Effort | None = None) -> list[str]:
    """Return every fault in a step folder's files and in the digests of its tensors.

    Return [] if the folder is intact.
    """
    effort = effort or Effort()
    names = []
    with suppress(ValueError):
        names = sorted(manifest.read_manifest(folder)["files"])
    found = list(
        dict.fromkeys(
            fault
            for own in threaded_map(
                lambda name: manifest.find_faults(folder, [name]), names, effort.workers
            )
            for fault in own
        )
    )
    if found or not names:
        return found or manifest.find_faults(folder)
    if json.loads((folder / manifest.BLUEPRINT_FILE).read_text()) is None:
        return []
    step = open_step(folder)
    read = open_checkpoint(step.folder, step.blueprint, step.layout)
    digests, _ = run_copies(plan_copies(step.blueprint, read, None), read, effort)
    read.close()
    return [
        f"{key.replace('|', ' (')}) has a different digest than when it was saved"
        for key in step.tensors
        if digests.get(key, [0, 0, ""])[2] != step.tensors[key][2]
    ]
