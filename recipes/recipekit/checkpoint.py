"""Saving and finding checkpoints: a step folder is complete and verified, or it does not count."""

import contextlib
import hashlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .refusal import refuse

MANIFEST = "manifest.json"


def save(engine: Any, folder: Path, state: dict[str, Any], keep: int) -> None:
    """Writes `folder/step_XXXXXXXX` of state["step"] and then points `folder/latest` at it (a collective).

    Everything is written to a staging folder, hashed into a manifest, flushed to the disk and renamed, so a kill at any
    moment leaves `latest` on a complete checkpoint. `state` (JSON) is the same on every rank. The oldest steps beyond
    `keep` (0: none) are removed afterwards. No later step may be in `folder` (see `put_aside_later`).
    """
    tag = f"step_{state['step']:08d}"
    staging = folder / ".staging"
    if dist.get_rank() == 0:
        shutil.rmtree(staging, ignore_errors=True)
        (staging / tag).mkdir(parents=True)
    dist.barrier()
    engine.save_checkpoint(str(staging), tag=tag, save_latest=False)
    torch.save(_generators(), staging / tag / f"rng_rank_{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (staging / tag / "state.json").write_text(json.dumps(state, indent=1))
        files = sorted(path for path in (staging / tag).rglob("*") if path.is_file())
        manifest = {str(path.relative_to(staging / tag)): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files}
        (staging / tag / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in [*files, staging / tag / MANIFEST, staging / tag]:
            _fsync(path)
        shutil.rmtree(folder / tag, ignore_errors=True)  # a broken one of the same step, if any
        os.rename(staging / tag, folder / tag)
        (folder / "latest.tmp").write_text(tag)
        _fsync(folder / "latest.tmp")
        os.rename(folder / "latest.tmp", folder / "latest")
        _fsync(folder)
        shutil.rmtree(staging, ignore_errors=True)
        for old in sorted(folder.glob("step_*"))[:-keep] if keep else []:
            shutil.rmtree(old)
    dist.barrier()


def newest(path: Path, say: Any) -> Path | None:
    """The newest complete and verified step folder of a run (or `path` itself if it is a step folder); None if none is.

    Calls `say` with one line for each folder that is passed over.
    """
    steps = [path] if path.name.startswith("step_") else sorted(path.glob("checkpoints/step_*"), reverse=True)
    for step in steps:
        fault = verify(step)
        if fault is None:
            return step
        say(f"checkpoint {step} is damaged, passed over: {fault}")
    return None


def put_aside_later(folder: Path, step: int, say: Any) -> None:
    """Renames the step folders after `step`: the run goes another way from here, and no later start may go on from them."""
    for later in sorted(folder.glob("step_*")):
        if later.name > f"step_{step:08d}":
            number = 1
            while (aside := folder / f"aside_{later.name}.{number}").exists():
                number += 1
            os.rename(later, aside)
            say(f"{later} lies after step {step}: it is now {aside.name}, remove it if you do not need it")


def verify(step: Path) -> str | None:
    """None if every file of a step folder is as it was written, else what is wrong, with the file named."""
    if not (step / MANIFEST).is_file():
        return f"{MANIFEST} is missing: the save was not finished"
    try:
        manifest = json.loads((step / MANIFEST).read_text())
    except ValueError:  # not JSON, or not text
        return f"{MANIFEST} is not what was written"
    for name, facts in manifest.items():
        if not (step / name).is_file():
            return f"{name} is missing"
        if (size := (step / name).stat().st_size) != facts["bytes"]:
            return f"{name} has {size} bytes instead of {facts['bytes']}"
        if _sha256(step / name) != facts["sha256"]:
            return f"{name} was changed: its sha256 is another"
    return None


def load(engine: Any, step: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """Loads a verified step folder into the engine and this rank's random generators; returns its state (a collective).

    The optimizer's numbers (betas, eps, weight decay, clipping) stay those of this start. Raises `Refusal` if the folder
    was written by another layout than `layout`.
    """
    state = json.loads((step / "state.json").read_text())
    if state["layout"] != layout:
        differ = ", ".join(f"{key} {state['layout'].get(key)} -> {layout[key]}" for key in layout if state["layout"].get(key) != layout[key])
        raise refuse(f"resume from {step}", f"was written by another layout ({differ})", "start with the same ranks, degrees and ZeRO stage")
    optimizer = engine.optimizer
    asked = [{key: group[key] for key in ("betas", "eps", "weight_decay") if key in group} for group in optimizer.param_groups]
    clipping = getattr(optimizer, "clip_grad", None)
    with contextlib.redirect_stdout(None):  # DeepSpeed 0.19.8 leaves a print in its bf16 optimizer
        path, _ = engine.load_checkpoint(str(step.parent), tag=step.name)
    assert path is not None, f"DeepSpeed did not load {step}"
    for group, wanted in zip(optimizer.param_groups, asked, strict=True):
        group.update(wanted)  # DeepSpeed puts the saved ones there, though the user may have changed them (--resume PATH)
    if clipping is not None:
        optimizer.clip_grad = clipping
    _restore_generators(torch.load(step / f"rng_rank_{dist.get_rank()}.pt", weights_only=True))
    return state


def _generators() -> dict[str, Any]:
    """The states of this rank's random generators, in types that `weights_only` loads."""
    numpy: Any = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    generators = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy}
    return generators | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _restore_generators(generators: dict[str, Any]) -> None:
    torch.set_rng_state(generators["torch"])
    random.setstate(generators["python"])
    np.random.set_state(generators["numpy"])
    if "cuda" in generators:
        torch.cuda.set_rng_state(generators["cuda"])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
