"""Compares a step folder with its manifest, byte for byte."""

import json
from contextlib import suppress
from pathlib import Path

from ..storage import manifest
from ..storage.copying import Effort, copies, run, share_work
from ..storage.tensor_files import open_checkpoint
from .step_folder import open_step


def verify(folder: Path, effort: Effort | None = None) -> list[str]:
    """Lists every fault of a step folder, in its files and in each tensor's digest; [] if the
    folder is what was saved.
    """
    effort = effort or Effort()
    names = []
    with suppress(ValueError):
        names = sorted(manifest.read(folder)["files"])
    found = list(
        dict.fromkeys(
            fault
            for own in share_work(
                lambda name: manifest.faults(folder, [name]), names, effort.workers
            )
            for fault in own
        )
    )
    if found or not names:
        return found or manifest.faults(folder)
    if json.loads((folder / manifest.BLUEPRINT).read_text()) is None:
        return []
    step = open_step(folder)
    read = open_checkpoint(step.folder, step.blueprint, step.layout)
    digests, _ = run(copies(step.blueprint, read, None), read, effort)
    read.close()
    return [
        f"{key.replace('|', ' (')}) has a different digest than when it was saved"
        for key in step.tensors
        if digests.get(key, [0, 0, ""])[2] != step.tensors[key][2]
    ]
