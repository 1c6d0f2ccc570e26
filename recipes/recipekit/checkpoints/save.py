"""Checkpoint saving: a step folder counts only after it is complete and verified."""

import contextlib
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..parallel.blueprint import Blueprint, Layout
from ..parallel.groups import long_wait_group
from ..spec.atomic_write import fsync, write_atomic
from ..spec.engine import Engine
from ..spec.errors import START_AGAIN, ConfigError, Problem, Say, config_error
from ..spec.run_folder import LATEST
from ..spec.step_names import free_name, step_folders, step_name, step_of
from ..storage import copying, manifest, tensor_files
from ..storage.digest import add_digests
from ..storage.file_map import expected_bytes
from ..storage.manifest import BLUEPRINT_FILE, STATE_FILE
from .attempts import SaveAttempts
from .disk_space import (
    FILE_SIZE_LIMIT_TEXT,
    DiskSpace,
    SpaceDemand,
    find_shortage,
    folder_bytes,
    oldest_first_notice,
    remove_oldest,
)
from .retention import Retention, remove_old
from .state import TrainState

STAGING = ".staging"  # folder below the checkpoints in which a save is written
LAST_SAVE_PAUSES = (1.0, 3.0, 6.0)  # seconds between the attempts to save the last step


@dataclass
class Saver:
    """The writer of a run's checkpoints in `folder`.

    Every rank writes, hashes and flushes its files in a staging folder, and then writes a note that
    lists these files. When all notes exist, the first rank writes the manifest, renames the folder
    and updates `latest`. So if the run is killed at any time, `latest` names a complete checkpoint.

    With `in_background`, only the copying of states to host memory delays training. A thread on
    each rank does the remaining work without collective operations. After a save, steps that
    `retention` does not keep are removed.
    """

    engine: Engine
    folder: Path
    blueprint: Blueprint
    layout: Layout
    retention: Retention
    in_background: bool
    write_hf_files: Callable[[Path], None]
    say: Say = print
    # flushes the log of the steps to disk; called on rank 0
    flush_metrics: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.reported: set[str] = set()
        self.thread: threading.Thread | None = None
        # set when this rank's part of a background save is written or has failed
        self.write_finished = threading.Event()
        self.error: str = ""  # why this rank's part of the save failed, or ""
        self.room = DiskSpace(self.folder, expected_bytes(self.blueprint, self.layout))
        self.attempts = SaveAttempts()

    def save(self, state: TrainState, regular: bool = True) -> None:
        """Save the step state["step"].

        This is a collective operation, and `state` (JSON) must be the same on every rank. Return
        when the save is complete. A background save returns when the states are copied. If any rank
        fails, every rank records the failure in `attempts`, and the run continues. Raise
        `ConfigError` with the exit code START_AGAIN on every rank if a `regular` save and the
        previous regular save have both failed.
        """
        self.wait()
        self.attempts.start(state["step"], regular)
        step = self.folder / STAGING / step_name(state["step"])
        failures = partial(_collect_errors, self, f"checkpoint of step {state['step']}")
        if dist.get_rank() == 0:
            with failures():
                self._create_staging(step, state)
        if self._failed():
            return
        content: list[tuple[Any, Path]] = []
        with failures():
            content = self.engine.save_states(step, self.blueprint, self.layout, self.in_background)
        if self._failed():
            return
        generators = rng_states()

        def finish() -> None:
            with failures():
                self._write_local(step, content, generators, state)

        if not self.in_background:
            finish()
            if self._failed():  # otherwise every rank's note exists
                return
            if dist.get_rank() == 0:
                with failures():
                    self._commit(step, state)
            if not self._failed():
                self._say(self.attempts.succeed())
            return

        def finish_and_commit() -> None:
            try:
                finish()
            except BaseException as error:  # errors are raised in the waiting thread
                self.error = (
                    f"checkpoint of step {state['step']}: rank {dist.get_rank()}: {error!r}"
                )
            failed = bool(self.error)
            self.write_finished.set()
            if dist.get_rank() == 0 and not failed:
                with failures():
                    self._commit(step, state)

        self.write_finished.clear()
        self.thread = threading.Thread(target=finish_and_commit, name="checkpoint", daemon=True)
        self.thread.start()

    def save_last(self, state: TrainState) -> None:
        """Save the last step of this start; return when the checkpoint is complete.

        This is a collective operation. A failed save is retried after each of LAST_SAVE_PAUSES
        seconds. After the last attempt, raise `ConfigError` with the exit code START_AGAIN.
        """
        for pause in (*LAST_SAVE_PAUSES, 0):
            self.save(state, regular=False)
            self.wait()
            if not self.attempts.error:
                return
            time.sleep(pause)
        raise self.attempts.final_error()

    def wait(self) -> None:
        """Wait until the background save, if any, is complete or has failed.

        This is a collective operation. Raise the same errors as `save`.
        """
        if self.thread is not None:
            self.write_finished.wait()
            # Check for failures before the join, because the first rank's thread waits for the
            # notes of ranks that may have failed or died.
            failed = self._failed()
            self.thread.join()
            self.thread = None
            if failed:
                self.error = ""  # an error of rank 0's thread, whose staging folder is removed
            elif not self._failed():
                self._say(self.attempts.succeed())

    @property
    def broken(self) -> bool:
        """True if this rank's part of the background save failed; every rank should then `wait`."""
        return self.thread is not None and bool(self.error)

    def close(self) -> None:
        """After an error in a single-rank job, wait until the background save ends.

        This wait is needed because Python aborts if it exits while a thread writes. In a job with
        several ranks, `failure.Peers` ends each rank at once.
        """
        if self.thread is not None and dist.get_world_size() == 1:
            self.thread.join()

    def check_room(self, demand: SpaceDemand, resumed: bool) -> None:
        """Check the disk space for this start's checkpoints and export.

        This is a collective operation. Rank 0 reports if the oldest checkpoints will be removed
        first. Raise `ConfigError` on every rank if not enough space can be freed.
        """
        found = [""]
        if dist.get_rank() == 0:
            # remains of a save that was killed
            shutil.rmtree(self.folder / STAGING, ignore_errors=True)
            found = [find_shortage(self.room, self.retention, demand)]
            if not found[0] and (line := oldest_first_notice(self.room, self.retention, demand)):
                self.say(line)
                self.room = replace(self.room, oldest_first=True)
        dist.broadcast_object_list(found, group=long_wait_group())
        if found[0]:
            problem = Problem(
                f"checkpoint in {self.folder}", found[0], "free space or choose another --out"
            )
            raise ConfigError([problem], START_AGAIN if resumed else 1)

    def _failed(self) -> bool:
        """Return True on every rank if any rank has failed, and record the failure.

        This is a collective operation. Raise the same errors as `save`.
        """
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, self.error, group=long_wait_group())
        self.error = ""
        if not (failures := [error for error in errors if error]):
            return False
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / STAGING, ignore_errors=True)
        if FILE_SIZE_LIMIT_TEXT in failures[0]:  # no later save can succeed
            fix = (
                "the checkpoints before it are intact. Raise the limit (ulimit -f unlimited), then"
                " start again"
            )
            raise config_error(f"checkpoint in {self.folder}", failures[0], fix)
        self._say(self.attempts.fail(f"checkpoint in {self.folder}: {failures[0]}"))
        return True

    def _say(self, line: str) -> None:
        if line and dist.get_rank() == 0:
            self.say(line)

    def _create_staging(self, step: Path, state: TrainState) -> None:
        """Create a step's staging folder and free space for its files; called on rank 0."""
        self.flush_metrics()
        if step.parent.exists():
            shutil.rmtree(step.parent)
        step.mkdir(parents=True)
        self._make_room(state["step"])

    def _make_room(self, step: int) -> None:
        """Remove the oldest checkpoints if space is insufficient, and record any remaining
        shortage.
        """
        for line in remove_oldest(self.room, self.retention):
            self.say_once(line)
        if self.room.one > self.room.free_bytes:
            self.error = f"checkpoint of step {step} {self.room.shortage()}"

    def _write_local(
        self,
        step: Path,
        content: list[tuple[Any, Path]],
        generators: dict[str, Any],
        state: TrainState,
    ) -> None:
        rank, names = dist.get_rank(), []
        for value, path in content:
            if value is not None:
                torch.save(value, path)
            names.append(path)
        names.append(step / f"rng_rank_{rank}.pt")
        torch.save(generators, names[-1])
        names += [
            path
            for path in (step / "offloaded_tensors" / f"rank{rank:02d}").rglob("*")
            if path.is_file()
        ]
        if rank == 0:
            (step / STATE_FILE).write_text(
                json.dumps({**state, "layout": self.layout.to_json()}, indent=1)
            )
            (step / BLUEPRINT_FILE).write_text(json.dumps(self.blueprint.to_json()))
            (step / "hf_files").mkdir()
            self.write_hf_files(step / "hf_files")
            names += [
                step / STATE_FILE,
                step / BLUEPRINT_FILE,
                *(path for path in (step / "hf_files").rglob("*") if path.is_file()),
            ]
        files = {str(path.relative_to(step)): manifest.file_entry(path) for path in names}
        opened = tensor_files.open_checkpoint(step, self.blueprint, self.layout)
        tensors = copying.partial_digests(self.blueprint, opened, frozenset(files))
        opened.close()
        note = step.parent / f"rank_{rank}.json"
        note.with_suffix(".tmp").write_text(json.dumps({"files": files, "tensors": tensors}))
        os.rename(note.with_suffix(".tmp"), note)

    def _commit(self, step: Path, state: TrainState) -> None:
        files: dict[str, Any] = {}
        tensors: dict[str, list[Any]] = {}
        for rank in range(self.layout.mesh.world):
            path = step.parent / f"rank_{rank}.json"
            while not path.exists():  # only in the background: a different rank is still writing
                if not step.exists():
                    return  # a rank has failed, and `_failed` has removed the folder
                time.sleep(0.02)
            note = json.loads(path.read_text())
            files |= note["files"]
            for key, (shape, dtype, part) in note["tensors"].items():
                tensors[key] = [
                    shape,
                    dtype,
                    add_digests(part, tensors[key][2] if key in tensors else 0),
                ]
        manifest.write_manifest(
            step,
            state["step"],
            files,
            {
                key: [shape, dtype, f"{total:016x}"]
                for key, (shape, dtype, total) in tensors.items()
            },
        )
        # a folder with this name was created while the run trained
        if os.path.lexists(target := self.folder / step.name):
            os.rename(target, aside := free_name(self.folder, step.name))
            self.say_once(f"{target} was not saved by this run: it is now {aside.name}")
        os.rename(step, target)
        # this size includes the small files
        self.room = replace(self.room, one=max(self.room.one, folder_bytes(target)))
        self._clean_up(step.name)

    def _clean_up(self, name: str) -> None:
        """Update `latest` to the new checkpoint and remove old checkpoints.

        The new checkpoint is already complete, so a failure is only reported.
        """
        point_latest(self.folder, name, self.say_once)
        shutil.rmtree(self.folder / STAGING, ignore_errors=True)
        for line in remove_old(self.folder, self.retention):
            self.say_once(line)

    def say_once(self, line: str) -> None:
        """Report a line only the first time, because the next save would repeat it.

        OSError is ignored because the program that reads the output may have ended.
        """
        if line not in self.reported:
            self.reported.add(line)
            with contextlib.suppress(OSError):
                self.say(line)


@contextlib.contextmanager
def _collect_errors(saver: Saver, what: str) -> Any:
    """Store a disk or library error for `_failed`, which records it on every rank.

    If only one rank raised an error, the other ranks would wait forever.
    """
    try:
        yield
    except (OSError, RuntimeError, ConfigError) as error:
        saver.error = (
            f"{what}: rank {dist.get_rank()}: {str(error).strip().splitlines()[0]}"
            f" ({saver.room.shortage()})"
        )


def point_latest(folder: Path, name: str, say: Say) -> None:
    """Make `latest`, which stock DeepSpeed loads, name a step folder.

    After a crash, `latest` contains either the old name or the new name. This project does not read
    `latest`, so a failure is only reported.
    """
    try:
        fsync(folder)  # the step folder is on the disk before it is named
        write_atomic(folder / LATEST, name)
    except OSError as error:
        say(
            f"{folder / LATEST} cannot be written: {error.strerror}. The checkpoints are complete,"
            " and the run continues"
        )


def set_aside_later_steps(folder: Path, step: int, say: Say) -> None:
    """Rename the step folders after `step`.

    The run continues differently from this step on, so no later start may resume from those
    folders.
    """
    here = step_name(step)
    if (folder / here).is_dir() and not (
        (folder / LATEST).is_file() and (folder / LATEST).read_bytes() == here.encode()
    ):
        point_latest(folder, here, say)
    for later in step_folders(folder):
        if (step_of(later.name) or 0) > step:
            aside = free_name(folder, later.name)
            try:
                os.rename(later, aside)
            except OSError as error:
                rule = (
                    f"is after step {step}, and cannot be renamed to {aside.name}: {error.strerror}"
                )
                raise config_error(
                    str(later),
                    rule,
                    f"move it out of {folder}, or choose another folder with --out",
                ) from None
            say(
                f"{later} is after step {step}: it is now {aside.name}, remove it if you do not"
                " need it"
            )


def rng_states() -> dict[str, Any]:
    """Return the states of this rank's random generators, as types that `weights_only` can load."""
    numpy = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    generators = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy}
    return generators | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})
