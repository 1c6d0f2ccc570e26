"""Converts whole checkpoints: from one layout to another, and from and to Hugging Face files.

No model is built and no process group made; memory holds a few chunks, whatever the model's size.
"""

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..architectures import safetensors_files
from ..architectures.small_files import ADAPTER, CARD, is_of_adapter, small_files, with_dtype
from ..parallel.blueprint import Blueprint, Layout
from ..refusal import refuse
from ..whole_file import fsync
from . import create, errors, manifest
from .copying import Copy, Effort, cast, chunks, copies, partial_digests, run, share_work, unit_of
from .journal import Journal
from .published import published_as, shapes_of
from .state import SavedState
from .step_folder import open_step
from .tensor_files import TORCH, TensorFiles, open_checkpoint, open_published


def reshape(source: Path, out: Path, layout: Layout, blueprint: Blueprint | None = None, effort: Effort | None = None) -> None:
    """Writes the step folder `out`: `source` (a step or run folder) in another layout, bit for bit, complete or not at all.

    `blueprint`: describes the model that will load `out`, whose plans may differ from the source's.
    """
    effort = effort or Effort()
    step = open_step(source)
    errors.check(step.folder, layout, step.blueprint, blueprint or step.blueprint)
    if not any(tensor.group is not None for tensor in step.blueprint.tensors):
        rule = "was saved at ZeRO-0 by another program, so its optimizer states have no names"
        raise refuse(str(step.folder), rule, "convert only its weights, with recipekit convert to-hf and then from-hf")
    journal = Journal(out, {"source": step.fingerprint, "layout": layout.to_json()})
    now = blueprint or step.blueprint
    with ExitStack() as stack:
        read = open_checkpoint(step.folder, step.blueprint, step.layout)
        stack.callback(read.close)
        if not journal.resumed:
            create.create(journal.folder, now, layout, create.read_carried(step.folder, step.blueprint, step.layout).regrouped(step.blueprint, now))
            journal.note("", None)
        written = open_checkpoint(journal.folder, now, layout, writable=True)
        stack.callback(written.close)
        digests, facts = run(copies(step.blueprint, read, written), read, effort, written, journal, hashed=True)
    digests.pop("", None)
    step.check(digests)
    ranks = len(manifest.listed_files(step.folder, "rng_rank_*.pt"))
    for rank in range(layout.mesh.world):
        if ranks:
            shutil.copyfile(step.folder / f"rng_rank_{rank % ranks}.pt", journal.folder / f"rng_rank_{rank}.pt")
    for path in manifest.listed_files(step.folder, errors.FILES):
        shutil.copyfile(path, journal.folder / path.name)
    _copy_small(step.small_files, journal.folder / "hf_files")
    kept = replace(now, published=step.blueprint.published, files=step.blueprint.files)
    _complete(journal, {**step.state, "layout": layout.to_json()}, kept, digests, facts)


def _complete(journal: Journal, state: SavedState, blueprint: Blueprint, tensors: dict[str, Any], facts: dict[str, manifest.Facts]) -> None:
    """Writes a step folder's files besides tensors, the manifest last, and gives the folder its name."""
    (journal.folder / manifest.STATE).write_text(json.dumps(state, indent=1))
    (journal.folder / manifest.BLUEPRINT).write_text(json.dumps(blueprint.to_json()))
    for path in journal.folder.rglob("*"):
        if path.is_file() and path.name != "journal.jsonl" and (name := str(path.relative_to(journal.folder))) not in facts:
            facts[name] = manifest.facts(path)
    manifest.write(journal.folder, state["step"], facts, tensors)
    journal.finish()


def to_hf(source: Path, out: Path, dtype: str | None = None, effort: Effort | None = None, check: bool = False, card: str = "") -> None:
    """Writes Hugging Face files: safetensors, config, tokenizer. `dtype` None: the dtypes of the model's own files.

    A model that was read from files gets the file names, keys and order of those files again; a LoRA run gives its adapter.
    With `check` the output is read again and compared with the source. `card` is the text of the model card.
    """
    effort = effort or Effort()
    step = open_step(source)
    blueprint, contents = published_as(step, dtype)
    plan = {"source": step.fingerprint, "files": contents}
    journal = Journal(out, plan)
    shapes = shapes_of(blueprint)
    entries: dict[str, dict[str, safetensors_files.Entry]] = {}
    for file, keys in contents.items():
        if not journal.resumed:
            safetensors_files.create(journal.folder, file, {key: (own, shapes[key]) for key, own in keys.items()})
        entries[file] = safetensors_files.read_header(journal.folder, file)
    if len(entries) > 1 or safetensors_files.INDEX in step.blueprint.files:
        safetensors_files.write_index(journal.folder, entries)
    journal.note("", None)
    found = {key: entry for own in entries.values() for key, entry in own.items()}
    with ExitStack() as stack:
        read = open_checkpoint(step.folder, step.blueprint, step.layout)
        written = open_published(journal.folder, blueprint, found, writable=True)
        stack.callback(read.close)
        stack.callback(written.close)
        todo = copies(blueprint, read, written)
        digests, _ = run(todo, read, effort, written, journal)
        digests.pop("", None)
        step.check(digests)
        if check:
            share_work(lambda copy: _compare(copy, read, written, effort), todo, effort.workers)
    adapter = any(file.startswith("adapter_model") for file in contents)
    _copy_small({name: path for name, path in step.small_files.items() if not adapter or is_of_adapter(name)}, journal.folder)
    if dtype is not None and (config := journal.folder / "config.json").exists():
        own = with_dtype(json.loads(config.read_text()), dtype)
        config.write_text(json.dumps({"dtype": dtype} | own if "torch_dtype" not in own else own, indent=2) + "\n")
    if card:
        (journal.folder / CARD).write_text(card, encoding="utf-8")
    for path in journal.folder.rglob("*"):
        fsync(path)
    journal.finish()


def _copy_small(paths: dict[str, Path], folder: Path) -> None:
    """Copy a model's small files (name -> file) into `folder`."""
    for name, path in paths.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)


def _compare(copy: Copy, read: TensorFiles, written: TensorFiles, effort: Effort) -> None:
    """Raises `Refusal` if a tensor in the output differs from the source's after the cast."""
    for start, stop in chunks(copy.tensor.numel, unit_of(copy, read, written), effort.chunk):
        wanted = cast(read.read(copy.tensor, copy.role, start, stop), read.dtype_of(copy.tensor, copy.role), written.dtype_of(copy.tensor, "weight"))
        if not np.array_equal(wanted, written.read(copy.tensor, "weight", start, stop)):
            raise refuse(f"{written.folder}: {copy.tensor.name}", "differs from what was written", "check the disk, and convert again")


def from_hf(
    folder: Path,
    out: Path,
    blueprint: Blueprint,
    layout: Layout,
    effort: Effort | None = None,
    config: dict[str, Any] | None = None,
    originals: Mapping[str, str] | None = None,
) -> None:
    """Write a step folder of step 0 from a model's files: the weights as masters, and zeros as moments.

    `config` becomes its config.json if the model's own file differs. `originals` maps keys that the files lack to the keys
    to read instead.
    """
    effort = effort or Effort()
    entries = safetensors_files.open_folder(folder)
    entries |= {key: entries[held] for key, held in (originals or {}).items()}
    journal = Journal(
        out, {"source": str(folder.resolve()), "layout": layout.to_json(), "files": {file: (folder / file).stat().st_mtime_ns for file in blueprint.files}}
    )
    groups = {number: {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "name": group.name} for number, group in enumerate(blueprint.groups)}
    carried = create.Carried(groups, {}, {"global_steps": 0, "skipped_steps": 0, "global_samples": 0, "lr_scheduler": None, "ds_config": {}})
    with ExitStack() as stack:
        read = open_published(folder, blueprint, entries)
        stack.callback(read.close)
        if not journal.resumed:
            create.create(journal.folder, blueprint, layout, carried)
            journal.note("", None)
        written = open_checkpoint(journal.folder, blueprint, layout, writable=True)
        stack.callback(written.close)
        _, facts = run(copies(blueprint, read, written), read, effort, written, journal, hashed=True)
        everything = frozenset(str(path.relative_to(journal.folder)) for path in journal.folder.rglob("*") if path.suffix in (".pt", ".swp"))
        digests = partial_digests(blueprint, written, everything, effort.chunk)
    _copy_small({name: folder / name for name in small_files(folder) if name != ADAPTER}, journal.folder / "hf_files")
    if config is not None and config != json.loads((folder / "config.json").read_bytes()):
        (journal.folder / "hf_files" / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    dtype = TORCH[
        max((own for keys in blueprint.files.values() for own in keys.values()), key=[own for keys in blueprint.files.values() for own in keys.values()].count)
    ]
    state: SavedState = {"step": 0, "tokens": 0, "data": None, "layout": layout.to_json(), "export_dtype": dtype}
    _complete(journal, state, blueprint, {key: [shape, own, f"{total:016x}"] for key, (shape, own, total) in digests.items()}, facts)


def verify(folder: Path, effort: Effort | None = None) -> list[str]:
    """Lists every fault of a step folder, in its files and in each tensor's digest; [] if the folder is what was saved."""
    effort = effort or Effort()
    names = []
    with suppress(ValueError):
        names = sorted(manifest.read(folder)["files"])
    found = list(dict.fromkeys(fault for own in share_work(lambda name: manifest.faults(folder, [name]), names, effort.workers) for fault in own))
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
