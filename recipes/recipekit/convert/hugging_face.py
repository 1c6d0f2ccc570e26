"""Conversion of full checkpoints from and to Hugging Face files.

No model is built and no process group is created. Only a few chunks of tensors are in memory at a
time, independent of the model's size.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..architectures import safetensors_files
from ..architectures.small_files import (
    ADAPTER_FILE,
    CARD_FILE,
    is_adapter_file,
    small_files,
    with_dtype,
)
from ..checkpoints.reshape import copy_small_files, finish_step_folder
from ..checkpoints.state import SavedState
from ..checkpoints.step_folder import open_step
from ..parallel.blueprint import Blueprint, Layout
from ..spec.atomic_write import fsync
from ..spec.errors import config_error
from ..storage import step_files
from ..storage.copying import (
    Copy,
    Effort,
    cast,
    chunk_ranges,
    largest_split_row,
    partial_digests,
    plan_copies,
    run_copies,
    threaded_map,
)
from ..storage.journal import Journal
from ..storage.tensor_files import TORCH_DTYPE_NAMES, TensorFiles, open_checkpoint, open_model_files
from .published import plan_published_files, published_shapes


def to_hf(
    source: Path,
    out: Path,
    dtype: str | None = None,
    effort: Effort | None = None,
    verify: bool = False,
    card: str = "",
) -> None:
    """Write Hugging Face files: safetensors, config, tokenizer.

    If `dtype` is None, the dtypes of the model's original files are used. A model that was read
    from files keeps the names, keys and order of those files. For a LoRA run, only the adapter is
    written. With `verify`, the output is read again and compared with the source. `card` is the
    text of the model card.
    """
    effort = effort or Effort()
    step = open_step(source)
    blueprint, contents = plan_published_files(step, dtype)
    journal = Journal(out, {"source": step.fingerprint, "files": contents})
    entries = _create_files(journal, blueprint, contents)
    journal.note("", None)

    with ExitStack() as stack:
        read = open_checkpoint(step.folder, step.blueprint, step.layout)
        written = open_model_files(journal.folder, blueprint, entries, writable=True)
        stack.callback(read.close)
        stack.callback(written.close)
        todo = plan_copies(blueprint, read, written)
        digests, _ = run_copies(todo, read, effort, written, journal)
        digests.pop("", None)
        step.check_digests(digests)
        if verify:
            threaded_map(
                lambda copy: _verify_copy(copy, read, written, effort), todo, effort.workers
            )

    adapter = any(file.startswith("adapter_model") for file in contents)
    small = step.small_files.items()
    copy_small_files(
        {name: path for name, path in small if not adapter or is_adapter_file(name)}, journal.folder
    )
    if dtype is not None:
        _write_dtype(journal.folder / "config.json", dtype)
    if card:
        (journal.folder / CARD_FILE).write_text(card, encoding="utf-8")
    for path in journal.folder.rglob("*"):
        fsync(path)
    journal.finish()


def _create_files(
    journal: Journal, blueprint: Blueprint, contents: dict[str, dict[str, str]]
) -> dict[str, safetensors_files.Entry]:
    """Create the safetensors files and their index; return key -> entry.

    If the conversion resumes, the files already exist.
    """
    shapes = published_shapes(blueprint)
    entries: dict[str, dict[str, safetensors_files.Entry]] = {}
    for file, keys in contents.items():
        if not journal.resumed:
            safetensors_files.create_zero_file(
                journal.folder, file, {key: (own, shapes[key]) for key, own in keys.items()}
            )
        entries[file] = safetensors_files.read_header(journal.folder, file)
    if len(entries) > 1 or safetensors_files.INDEX_FILE in blueprint.files:
        safetensors_files.write_index(journal.folder, entries)
    return {key: entry for own in entries.values() for key, entry in own.items()}


def _write_dtype(config: Path, dtype: str) -> None:
    """Set the dtype in a config.json file if that file exists."""
    if not config.exists():
        return
    own = with_dtype(json.loads(config.read_text()), dtype)
    if "torch_dtype" not in own:
        own = {"dtype": dtype} | own
    config.write_text(json.dumps(own, indent=2) + "\n")


def _verify_copy(copy: Copy, reader: TensorFiles, writer: TensorFiles, effort: Effort) -> None:
    """Raise `ConfigError` if an output tensor differs from the converted source tensor."""
    for start, stop in chunk_ranges(
        copy.tensor.numel, largest_split_row(copy, reader, writer), effort.chunk
    ):
        wanted = cast(
            reader.read(copy.tensor, copy.role, start, stop),
            reader.dtype_of(copy.tensor, copy.role),
            writer.dtype_of(copy.tensor, "weight"),
        )
        if not np.array_equal(wanted, writer.read(copy.tensor, "weight", start, stop)):
            raise config_error(
                f"{writer.folder}: {copy.tensor.name}",
                "differs from what was written",
                "check the disk, and convert again",
            )


@dataclass(frozen=True)
class FolderChanges:
    """The differences between a model and the folder from which the model is read.

    `config` is the model's config.json, or None if the folder's config.json applies. `copies` maps
    keys that are missing in the files to the keys to read instead.
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
    """Write a step folder for step 0 from a model's files.

    The weights become the masters, and the moments are set to zero.
    """
    effort = effort or Effort()
    changes = changes or FolderChanges()
    entries = safetensors_files.tensor_entries(folder)
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
        read = open_model_files(folder, blueprint, entries)
        stack.callback(read.close)
        if not journal.resumed:
            step_files.create_step_files(
                journal.folder, blueprint, layout, _initial_training_state(blueprint)
            )
            journal.note("", None)
        written = open_checkpoint(journal.folder, blueprint, layout, writable=True)
        stack.callback(written.close)
        todo = plan_copies(blueprint, read, written)
        _, facts = run_copies(todo, read, effort, written, journal, hashed=True)
        digests = _tensor_digests(journal.folder, blueprint, written, effort)

    _copy_small_files(folder, journal.folder / "hf_files", changes.config)
    state: SavedState = {
        "step": 0,
        "tokens": 0,
        "data": None,
        "layout": layout.to_json(),
        "export_dtype": _most_common_dtype(blueprint),
    }
    finish_step_folder(journal, state, blueprint, digests, facts)


def _copy_small_files(folder: Path, out: Path, config: dict[str, Any] | None) -> None:
    """Copy a model's config and tokenizer files.

    If `config` differs from the folder's config.json, write `config` instead.
    """
    copy_small_files(
        {name: folder / name for name in small_files(folder) if name != ADAPTER_FILE}, out
    )
    if config is not None and config != json.loads((folder / "config.json").read_bytes()):
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _initial_training_state(blueprint: Blueprint) -> step_files.CommonState:
    """Return the counts and optimizer values for a checkpoint at step 0."""
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
    return step_files.CommonState(groups, {}, counts)


def _tensor_digests(
    folder: Path, blueprint: Blueprint, files: TensorFiles, effort: Effort
) -> dict[str, Any]:
    """Read all tensors in a new step folder and return {"tensor|role": [shape, dtype, digest]}."""
    everything = frozenset(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.suffix in (".pt", ".swp")
    )
    digests = partial_digests(blueprint, files, everything, effort.chunk)
    return {key: [shape, own, f"{total:016x}"] for key, (shape, own, total) in digests.items()}


def _most_common_dtype(blueprint: Blueprint) -> str:
    """Return the most common dtype of tensors in the model's files; in a tie, return the first."""
    dtypes = [own for keys in blueprint.files.values() for own in keys.values()]
    return TORCH_DTYPE_NAMES[max(dtypes, key=dtypes.count)]
