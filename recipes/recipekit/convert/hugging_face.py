"""Converts whole checkpoints from and to Hugging Face files.

No model is built and no process group made; memory holds a few chunks, whatever the model's size.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
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
    """Writes Hugging Face files: safetensors, config, tokenizer.

    `dtype` None: the dtypes of the model's own files.

    A model that was read from files gets the file names, keys and order of those files again; a
    LoRA run gives its adapter. With `check` the output is read again and compared with the source.
    `card` is the text of the model card.
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
            safetensors_files.create(
                journal.folder, file, {key: (own, shapes[key]) for key, own in keys.items()}
            )
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
    copy_small(
        {
            name: path
            for name, path in step.small_files.items()
            if not adapter or is_of_adapter(name)
        },
        journal.folder,
    )
    if dtype is not None and (config := journal.folder / "config.json").exists():
        own = with_dtype(json.loads(config.read_text()), dtype)
        config.write_text(
            json.dumps({"dtype": dtype} | own if "torch_dtype" not in own else own, indent=2) + "\n"
        )
    if card:
        (journal.folder / CARD).write_text(card, encoding="utf-8")
    for path in journal.folder.rglob("*"):
        fsync(path)
    journal.finish()


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


def from_hf(
    folder: Path,
    out: Path,
    blueprint: Blueprint,
    layout: Layout,
    effort: Effort | None = None,
    config: dict[str, Any] | None = None,
    originals: Mapping[str, str] | None = None,
) -> None:
    """Write a step folder of step 0 from a model's files: the weights as masters, and zeros as
    moments.

    `config` becomes its config.json if the model's own file differs. `originals` maps keys that the
    files lack to the keys to read instead.
    """
    effort = effort or Effort()
    entries = safetensors_files.open_folder(folder)
    entries |= {key: entries[held] for key, held in (originals or {}).items()}
    journal = Journal(
        out,
        {
            "source": str(folder.resolve()),
            "layout": layout.to_json(),
            "files": {file: (folder / file).stat().st_mtime_ns for file in blueprint.files},
        },
    )
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
    carried = create.Carried(
        groups,
        {},
        {
            "global_steps": 0,
            "skipped_steps": 0,
            "global_samples": 0,
            "lr_scheduler": None,
            "ds_config": {},
        },
    )
    with ExitStack() as stack:
        read = open_published(folder, blueprint, entries)
        stack.callback(read.close)
        if not journal.resumed:
            create.create(journal.folder, blueprint, layout, carried)
            journal.note("", None)
        written = open_checkpoint(journal.folder, blueprint, layout, writable=True)
        stack.callback(written.close)
        _, facts = run(
            copies(blueprint, read, written), read, effort, written, journal, hashed=True
        )
        everything = frozenset(
            str(path.relative_to(journal.folder))
            for path in journal.folder.rglob("*")
            if path.suffix in (".pt", ".swp")
        )
        digests = partial_digests(blueprint, written, everything, effort.chunk)
    copy_small(
        {name: folder / name for name in small_files(folder) if name != ADAPTER},
        journal.folder / "hf_files",
    )
    if config is not None and config != json.loads((folder / "config.json").read_bytes()):
        (journal.folder / "hf_files" / "config.json").write_text(
            json.dumps(config, indent=2) + "\n"
        )
    dtype = TORCH[
        max(
            (own for keys in blueprint.files.values() for own in keys.values()),
            key=[own for keys in blueprint.files.values() for own in keys.values()].count,
        )
    ]
    state: SavedState = {
        "step": 0,
        "tokens": 0,
        "data": None,
        "layout": layout.to_json(),
        "export_dtype": dtype,
    }
    complete(
        journal,
        state,
        blueprint,
        {key: [shape, own, f"{total:016x}"] for key, (shape, own, total) in digests.items()},
        facts,
    )
