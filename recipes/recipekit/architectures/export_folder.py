"""The Hugging Face files in a folder that a user names: of a run, of another program, or an adapter
with its base model.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..spec.hub import commit_of, hub_is_away, is_hub_id
from ..spec.refusal import Refusal, refuse
from ..spec.run_folder import CHECKPOINTS, EXPORT, FACTS, MERGE, MERGED, facts_of_run, without_base
from ..spec.step_names import MANIFEST, is_step_folder, newest_complete
from ..spec.task_specs import TASKS
from .lookup import CAUSAL, fitting_task, unfit
from .safetensors_files import open_folder
from .small_files import ADAPTER, CONFIG, read_json


@dataclass(frozen=True)
class Export:
    """A folder of Hugging Face files, and the task of the run that wrote it; "" if that is not
    known.
    """

    folder: Path
    task: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_adapter(self) -> bool:
        return (self.folder / ADAPTER).is_file()


def find_export(path: Path) -> Export:
    """Return the Hugging Face files in a run folder, or in the folder itself.

    Raise `Refusal` if there are none.
    """
    if not path.is_dir():
        raise _no_folder(path)
    if is_step_folder(path):
        raise refuse(str(path), "is a checkpoint, which transformers cannot load", _way(path))
    if path.name == CHECKPOINTS and (path.parent / FACTS).exists():
        path = path.parent
    is_run = (path / FACTS).exists() or (path / CHECKPOINTS).is_dir()

    if _has_files(path):
        return Export(path, _task_of_run(path.parent) if (path.parent / FACTS).exists() else "")
    if not is_run:
        raise refuse(str(path), f"contains no {CONFIG}, {ADAPTER} or {FACTS}", _inside(path))
    task = _task_of_run(path)
    _check_task(task, str(path))
    if not _has_files(path / EXPORT):
        raise _no_export(path)
    merged = without_base(path / EXPORT) and (path / MERGED / CONFIG).is_file()
    return Export(path / MERGED if merged else path / EXPORT, task, tuple(_notes(path)))


def _has_files(folder: Path) -> bool:
    """Return True if a folder has a model or an adapter."""
    return any((folder / name).is_file() for name in (CONFIG, ADAPTER))


def _no_folder(path: Path) -> Refusal:
    """Return the refusal of a path that is no folder."""
    fix = "give a run folder, such as runs/NAME, or a folder of Hugging Face files"
    if path.exists():
        return refuse(str(path), "is a file, not a folder", fix)
    if is_hub_id(str(path)) and "/" in str(path):
        fix += f". A model of the hub is downloaded with hf download {path} --local-dir FOLDER"
    return refuse(str(path), "the folder does not exist", fix)


def _no_export(run: Path) -> Refusal:
    """Return the refusal of a run without exported files."""
    state = "the run is still training" if is_running(run) else "the run has not written one"
    if (newest := newest_complete(run / CHECKPOINTS)) is None:
        fix = "wait for its first checkpoint (--save_every N), or run its command again"
        return refuse(str(run), f"has no {EXPORT}/ and no complete checkpoint: {state}", fix)
    rule = f"has no {EXPORT}/: {state}. Its newest checkpoint is {newest.name}"
    return refuse(str(run), rule, _way(run))


def is_running(run: Path) -> bool:
    """Return True if a job trains in a run folder. The lock file is not changed."""
    with contextlib.suppress(OSError), open(run.parent / f".{run.name}.lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _way(source: Path) -> str:
    out = f"{os.path.normpath(source)}_hf"
    return (
        f"write the files with recipekit convert to-hf {source} {out}, then recipekit sample {out}"
    )


def _inside(path: Path) -> str:
    """Return the fix for a folder without a model: the first folder inside that is one."""
    folders = sorted(inside for inside in path.iterdir() if inside.is_dir())
    near = [inside for inside in folders if (inside / FACTS).is_file() or _has_files(inside)]
    return (
        f"give one of its folders, such as {near[0]}"
        if near
        else "give a run folder, such as runs/NAME"
    )


def _task_of_run(run: Path) -> str:
    return str(facts_of_run(run).get("recipe", {}).get("task", ""))


def _notes(run: Path) -> Iterator[str]:
    """Yield a line if a run has a newer checkpoint than its export."""
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


def _check_task(task: str, where: str) -> None:
    """Raise `Refusal` for a task whose models generate no text."""
    if task in TASKS and TASKS[task].auto_class != CAUSAL:
        tasks = " or ".join(name for name, facts in TASKS.items() if facts.auto_class == CAUSAL)
        raise refuse(
            where,
            f"a model of the task {task} cannot generate text",
            f"give a run of the task {tasks}",
        )


# The model of a folder
# ----------------------------------------------------------------------------------------------


def base_of(folder: Path) -> tuple[str, str]:
    """Return (folder or hub id, revision) of an adapter's base model.

    Raise `Refusal` if it cannot be found.
    """
    config = read_json(folder / ADAPTER)
    base, revision = config.get("base_model_name_or_path"), config.get("revision") or ""
    where, fix = (
        str(folder / ADAPTER),
        "write its folder or hub id there as base_model_name_or_path",
    )
    if without_base(folder):
        run = folder.parent if folder.name == EXPORT else "RUN"
        way = (
            f"write the merged model with {MERGE} {run} NEW_FOLDER, then run recipekit sample"
            f" NEW_FOLDER. If you have the base model, {fix}"
        )
        raise refuse(
            where,
            "names no base model, because its run started from randomly initialised weights",
            way,
        )
    if not isinstance(base, str) or not base.strip():
        raise refuse(where, "names no base model", fix)
    if not Path(base).is_dir() and (Path(base).is_absolute() or not is_hub_id(base)):
        raise refuse(
            where,
            f"the base model {base} does not exist on this machine",
            f"copy it there, or {fix}",
        )
    if not Path(base).is_dir() and hub_is_away() and commit_of(base, revision) is None:
        at = f" --revision {revision}" if revision else ""
        rule = f"the base model {base} is not in the cache, and the hub cannot be reached"
        raise refuse(
            where, rule, f"run hf download {base}{at} on a machine with network access, or {fix}"
        )
    return base, revision


def check_files(folder: Path) -> None:
    """Raise `Refusal` if a folder's config.json is of no model that generates text, or if its
    weights are not whole.
    """
    config = read_json(folder / CONFIG)
    if not isinstance(config.get("model_type"), str):
        raise refuse(
            str(folder / CONFIG),
            "has no model_type",
            "use a folder with the files of a Hugging Face model",
        )
    _check_task(fitting_task(config), str(folder))
    if problem := unfit(config, "pretrain"):
        rule, fix = problem
        raise refuse(str(folder), rule, fix)
    open_folder(folder)
