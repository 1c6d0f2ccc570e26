"""The Hugging Face files in a folder that a user names.

The folder contains a run, a different program's model, or an adapter with its base model.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..spec.errors import ConfigError, config_error
from ..spec.hub import commit_of, hub_is_unreachable, is_hub_id
from ..spec.run_folder import (
    CHECKPOINTS,
    EXPORT,
    MERGE,
    MERGED,
    RUN_JSON,
    has_random_base,
    read_run_json,
)
from ..spec.step_names import MANIFEST, is_step_folder, newest_complete
from ..spec.task_specs import TASKS
from .lookup import CAUSAL_LM_CLASS, fitting_task, task_mismatch
from .safetensors_files import tensor_entries
from .small_files import ADAPTER_FILE, CONFIG_FILE, read_json


@dataclass(frozen=True)
class Export:
    """A folder with Hugging Face files, and the task of the run that wrote it ("" if unknown)."""

    folder: Path
    task: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_adapter(self) -> bool:
        return (self.folder / ADAPTER_FILE).is_file()


def find_export(path: Path) -> Export:
    """Return the Hugging Face files in a run folder or in the given folder itself.

    Raises `ConfigError` if there are no such files.
    """
    if not path.is_dir():
        raise _no_folder(path)
    if is_step_folder(path):
        raise config_error(
            str(path), "is a checkpoint, which transformers cannot load", _convert_hint(path)
        )
    if path.name == CHECKPOINTS and (path.parent / RUN_JSON).exists():
        path = path.parent
    is_run = (path / RUN_JSON).exists() or (path / CHECKPOINTS).is_dir()

    if _has_files(path):
        return Export(path, _task_of_run(path.parent) if (path.parent / RUN_JSON).exists() else "")
    if not is_run:
        raise config_error(
            str(path),
            f"contains no {CONFIG_FILE}, {ADAPTER_FILE} or {RUN_JSON}",
            _subfolder_hint(path),
        )
    task = _task_of_run(path)
    _check_generates_text(task, str(path))
    if not _has_files(path / EXPORT):
        raise _no_export(path)
    merged = has_random_base(path / EXPORT) and (path / MERGED / CONFIG_FILE).is_file()
    return Export(
        path / MERGED if merged else path / EXPORT, task, tuple(_stale_export_notes(path))
    )


def _has_files(folder: Path) -> bool:
    """Return True if a folder contains a model or an adapter."""
    return any((folder / name).is_file() for name in (CONFIG_FILE, ADAPTER_FILE))


def _no_folder(path: Path) -> ConfigError:
    """Return the error for a path that is not a folder."""
    fix = "give a run folder, such as runs/NAME, or a folder of Hugging Face files"
    if path.exists():
        return config_error(str(path), "is a file, not a folder", fix)
    if is_hub_id(str(path)) and "/" in str(path):
        fix += f". A model of the hub is downloaded with hf download {path} --local-dir FOLDER"
    return config_error(str(path), "the folder does not exist", fix)


def _no_export(run: Path) -> ConfigError:
    """Return the error for a run that has no exported files."""
    state = "the run is still training" if is_running(run) else "the run has not written one"
    if (newest := newest_complete(run / CHECKPOINTS)) is None:
        fix = "wait for its first checkpoint (--save_every N), or run its command again"
        return config_error(str(run), f"has no {EXPORT}/ and no complete checkpoint: {state}", fix)
    rule = f"has no {EXPORT}/: {state}. Its newest checkpoint is {newest.name}"
    return config_error(str(run), rule, _convert_hint(run))


def is_running(run: Path) -> bool:
    """Return True if a job is training in a run folder. The lock file is not changed."""
    with contextlib.suppress(OSError), open(run.parent / f".{run.name}.lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _convert_hint(source: Path) -> str:
    out = f"{os.path.normpath(source)}_hf"
    return (
        f"write the files with recipekit convert to-hf {source} {out}, then recipekit sample {out}"
    )


def _subfolder_hint(path: Path) -> str:
    """Return the fix for a folder without a model: its first subfolder with a run or a model."""
    folders = sorted(inside for inside in path.iterdir() if inside.is_dir())
    near = [inside for inside in folders if (inside / RUN_JSON).is_file() or _has_files(inside)]
    return (
        f"give one of its folders, such as {near[0]}"
        if near
        else "give a run folder, such as runs/NAME"
    )


def _task_of_run(run: Path) -> str:
    return str(read_run_json(run).get("recipe", {}).get("task", ""))


def _stale_export_notes(run: Path) -> Iterator[str]:
    """Yield a line if a run's newest checkpoint is newer than its export."""
    newest = newest_complete(run / CHECKPOINTS)
    if newest is None:
        return
    written = (run / EXPORT).stat().st_mtime
    if (newest / MANIFEST).stat().st_mtime > written:
        state = "the run is training, and " if is_running(run) else ""
        yield (
            f"{run / EXPORT}: {state}checkpoint {newest.name} is newer. Write it with recipekit"
            f" convert to-hf {run} NEW"
        )


def _check_generates_text(task: str, where: str) -> None:
    """Raise `ConfigError` for a task whose models do not generate text."""
    if task in TASKS and TASKS[task].auto_class != CAUSAL_LM_CLASS:
        tasks = " or ".join(
            name for name, facts in TASKS.items() if facts.auto_class == CAUSAL_LM_CLASS
        )
        raise config_error(
            where,
            f"a model of the task {task} cannot generate text",
            f"give a run of the task {tasks}",
        )


# The model of a folder
# ----------------------------------------------------------------------------------------------


def base_of(folder: Path) -> tuple[str, str]:
    """Return (folder or hub id, revision) of an adapter's base model.

    Raises `ConfigError` if the base model cannot be found.
    """
    config = read_json(folder / ADAPTER_FILE)
    base, revision = config.get("base_model_name_or_path"), config.get("revision") or ""
    where, fix = (
        str(folder / ADAPTER_FILE),
        "write its folder or hub id there as base_model_name_or_path",
    )
    if has_random_base(folder):
        run = folder.parent if folder.name == EXPORT else "RUN"
        way = (
            f"write the merged model with {MERGE} {run} NEW_FOLDER, then run recipekit sample"
            f" NEW_FOLDER. If you have the base model, {fix}"
        )
        raise config_error(
            where,
            "names no base model, because its run started from randomly initialised weights",
            way,
        )
    if not isinstance(base, str) or not base.strip():
        raise config_error(where, "names no base model", fix)
    if not Path(base).is_dir() and (Path(base).is_absolute() or not is_hub_id(base)):
        raise config_error(
            where,
            f"the base model {base} does not exist on this machine",
            f"copy it there, or {fix}",
        )
    if not Path(base).is_dir() and hub_is_unreachable() and commit_of(base, revision) is None:
        at = f" --revision {revision}" if revision else ""
        rule = f"the base model {base} is not in the cache, and the hub cannot be reached"
        raise config_error(
            where, rule, f"run hf download {base}{at} on a machine with network access, or {fix}"
        )
    return base, revision


def check_files(folder: Path) -> None:
    """Raise `ConfigError` if a folder's model generates no text or its weights are incomplete."""
    config = read_json(folder / CONFIG_FILE)
    if not isinstance(config.get("model_type"), str):
        raise config_error(
            str(folder / CONFIG_FILE),
            "has no model_type",
            "use a folder with the files of a Hugging Face model",
        )
    _check_generates_text(fitting_task(config), str(folder))
    if problem := task_mismatch(config, "pretrain"):
        rule, fix = problem
        raise config_error(str(folder), rule, fix)
    tensor_entries(folder)
