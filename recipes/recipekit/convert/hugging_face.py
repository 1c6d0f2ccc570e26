"""Converts whole checkpoints from and to Hugging Face files.

No model is built and no process group made; memory holds a few chunks, whatever the model's size.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..architectures import safetensors_files
from ..architectures.small_files import ADAPTER, CARD, is_of_adapter, small_files, with_dtype
from ..checkpoints.reshape import complete, copy_small
from ..checkpoints.state import SavedState
from ..checkpoints.step_folder import open_step
from ..parallel.blueprint import Blueprint, Layout
from ..spec.refusal import refuse
from ..spec.whole_file import fsync
from ..storage import create
from ..storage.copying import (
    Copy,
    Effort,
    cast,
    chunks,
    copies,
    partial_digests,
    run,
    share_work,
    unit_of,
)
from ..storage.journal import Journal
from ..storage.tensor_files import TORCH, TensorFiles, open_checkpoint, open_published
from .published import published_as, shapes_of


def to_hf(
    source: Path,
    out: Path,
    dtype: str | None = None,
    effort: Effort | None = None,
    check: bool = False,
    card: str = "",
) -> None:
    """Write Hugging Face files: safetensors, config, tokenizer.

    `dtype` None: the dtypes of the model's own files.

    A model that was read from files gets the file names, keys and order of those files again; a
    LoRA run gives its adapter. With `check` the output is read again and compared with the source.
    `card` is the text of the model card.
    """
    effort = effort or Effort()
    step = open_step(source)
    blueprint, contents = published_as(step, dtype)
    journal = Journal(out, {"source": step.fingerprint, "files": contents})
    entries = _create_files(journal, blueprint, contents)
    journal.note("", None)

    with ExitStack() as stack:
        read = open_checkpoint(step.folder, step.blueprint, step.layout)
        written = open_published(journal.folder, blueprint, entries, writable=True)
        stack.callback(read.close)
        stack.callback(written.close)
        todo = copies(blueprint, read, written)
        digests, _ = run(todo, read, effort, written, journal)
        digests.pop("", None)
        step.check(digests)
        if check:
            share_work(lambda copy: _compare(copy, read, written, effort), todo, effort.workers)

    adapter = any(file.startswith("adapter_model") for file in contents)
    small = step.small_files.items()
    copy_small(
        {name: path for name, path in small if not adapter or is_of_adapter(name)}, journal.folder
    )
    if dtype is not None:
        _write_dtype(journal.folder / "config.json", dtype)
    if card:
        (journal.folder / CARD).write_text(card, encoding="utf-8")
    for path in journal.folder.rglob("*"):
        fsync(path)
    journal.finish()


def _create_files(
    journal: Journal, blueprint: Blueprint, contents: dict[str, dict[str, str]]
) -> dict[str, safetensors_files.Entry]:
    """Create the safetensors files and their index; return key -> entry.

    A conversion that resumes has the files already.
    """
    shapes = shapes_of(blueprint)
    entries: dict[str, dict[str, safetensors_files.Entry]] = {}
    for file, keys in contents.items():
        if not journal.resumed:
            safetensors_files.create(
                journal.folder, file, {key: (own, shapes[key]) for key, own in keys.items()}
            )
        entries[file] = safetensors_files.read_header(journal.folder, file)
    if len(entries) > 1 or safetensors_files.INDEX in blueprint.files:
        safetensors_files.write_index(journal.folder, entries)
    return {key: entry for own in entries.values() for key, entry in own.items()}


def _write_dtype(config: Path, dtype: str) -> None:
    """Set the dtype in a config.json, if the model has one."""
    if not config.exists():
        return
    own = with_dtype(json.loads(config.read_text()), dtype)
    if "torch_dtype" not in own:
        own = {"dtype": dtype} | own
    config.write_text(json.dumps(own, indent=2) + "\n")


def _compare(copy: Copy, read: TensorFiles, written: TensorFiles, effort: Effort) -> None:
    """Raises `Refusal` if a tensor in the output differs from the source's after the cast."""
    for start, stop in chunks(copy.tensor.numel, unit_of(copy, read, written), effort.chunk):
        wanted = cast(
            read.read(copy.tensor, copy.role, start, stop),
            read.dtype_of(copy.tensor, copy.role),
            written.dtype_of(copy.tensor, "weight"),
        )
        if not np.array_equal(wanted, written.read(copy.tensor, "weight", start, stop)):
            raise refuse(
                f"{written.folder}: {copy.tensor.name}",
                "differs from what was written",
                "check the disk, and convert again",
            )


@dataclass(frozen=True)
class FolderChanges:
    """The differences between a model and the folder that it is read from.

    `config` is the model's config.json, None if it is the folder's. `copies` maps keys that the
    files lack to the keys to read instead.
    """

    config: dict[str, Any] | None = None
    copies: Mapping[str, str] = field(default_factory=dict)


def from_hf(
    folder: Path,
    out: Path,
    blueprint: Blueprint,
    layout: Layout,
    effort: Effort | None = None,
    changes: FolderChanges | None = None,
) -> None:
    """Write a step folder of step 0 from a model's files: the weights as masters, and zeros as
    moments.
    """
    effort = effort or Effort()
    changes = changes or FolderChanges()
    entries = safetensors_files.open_folder(folder)
    entries |= {key: entries[held] for key, held in changes.copies.items()}
    journal = Journal(
        out,
        {
            "source": str(folder.resolve()),
            "layout": layout.to_json(),
            "files": {file: (folder / file).stat().st_mtime_ns for file in blueprint.files},
        },
    )
    with ExitStack() as stack:
        read = open_published(folder, blueprint, entries)
        stack.callback(read.close)
        if not journal.resumed:
            create.create(journal.folder, blueprint, layout, _before_training(blueprint))
            journal.note("", None)
        written = open_checkpoint(journal.folder, blueprint, layout, writable=True)
        stack.callback(written.close)
        todo = copies(blueprint, read, written)
        _, facts = run(todo, read, effort, written, journal, hashed=True)
        digests = _digests_of(journal.folder, blueprint, written, effort)

    _copy_small_files(folder, journal.folder / "hf_files", changes.config)
    state: SavedState = {
        "step": 0,
        "tokens": 0,
        "data": None,
        "layout": layout.to_json(),
        "export_dtype": _most_common_dtype(blueprint),
    }
    complete(journal, state, blueprint, digests, facts)


def _copy_small_files(folder: Path, out: Path, config: dict[str, Any] | None) -> None:
    """Copy a model's config and tokenizer files; write `config` if it differs from config.json."""
    copy_small({name: folder / name for name in small_files(folder) if name != ADAPTER}, out)
    if config is not None and config != json.loads((folder / "config.json").read_bytes()):
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _before_training(blueprint: Blueprint) -> create.Carried:
    """Return the counts and the optimizer's numbers of a checkpoint of step 0."""
    groups = {
        number: {
            "lr": 0.0,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "name": group.name,
        }
        for number, group in enumerate(blueprint.groups)
    }
    counts = {
        "global_steps": 0,
        "skipped_steps": 0,
        "global_samples": 0,
        "lr_scheduler": None,
        "ds_config": {},
    }
    return create.Carried(groups, {}, counts)


def _digests_of(
    folder: Path, blueprint: Blueprint, written: TensorFiles, effort: Effort
) -> dict[str, Any]:
    """Read all tensors of a new step folder and return {"tensor|role": [shape, dtype, digest]}."""
    everything = frozenset(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.suffix in (".pt", ".swp")
    )
    digests = partial_digests(blueprint, written, everything, effort.chunk)
    return {key: [shape, own, f"{total:016x}"] for key, (shape, own, total) in digests.items()}


def _most_common_dtype(blueprint: Blueprint) -> str:
    """Return the dtype of most tensors in the model's files, the first of equals."""
    dtypes = [own for keys in blueprint.files.values() for own in keys.values()]
    return TORCH[max(dtypes, key=dtypes.count)]
