"""Saves checkpoints: a step folder is complete and verified, or it does not count."""

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
from ..parallel.groups import waiting_group
from ..spec.engine import Engine
from ..spec.refusal import START_AGAIN, Problem, Refusal, Say, refuse
from ..spec.run_folder import LATEST
from ..spec.step_names import free_name, step_folders, step_name, step_of
from ..spec.whole_file import fsync, write_whole
from ..storage import copying, manifest, tensor_files
from ..storage.digest import add
from ..storage.manifest import BLUEPRINT, STATE
from ..storage.places import expected_bytes
from .attempts import Attempts
from .retention import Retention, remove_old
from .room import LIMIT, Demand, Room, bytes_of, lacking, oldest_first, remove_oldest
from .state import State

AT_END = (1.0, 3.0, 6.0)  # seconds between the tries to save the last step


@dataclass
class Saver:
    """Writes the checkpoints of a run into `folder`.

    Every rank writes, hashes and flushes its own files in a staging folder and leaves a note that
    lists them; when all notes are there the first rank writes the manifest, renames the folder and
    moves `latest`. So a kill at any moment leaves `latest` on a complete checkpoint. With
    `in_background` only the copy of the states to host memory delays training: a thread of each
    rank does the rest, without collectives. Steps that `retention` does not keep are removed after
    a save.
    """

    engine: Engine
    folder: Path
    blueprint: Blueprint
    layout: Layout
    retention: Retention
    in_background: bool
    write_hf_files: Callable[[Path], None]
    say: Say = print
    # brings the record of the steps to the disk, on rank 0
    flush_metrics: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.said: set[str] = set()
        self.thread: threading.Thread | None = None
        # this rank's part of a save in the background is written, or has failed
        self.written = threading.Event()
        self.error: str = ""  # why this rank's part of the save has failed
        self.room = Room(self.folder, expected_bytes(self.blueprint, self.layout))
        self.attempts = Attempts()

    def save(self, state: State, regular: bool = True) -> None:
        """Save the step state["step"] (a collective); return when the save is complete, in the
        background when the states are copied.

        `state` (JSON) is the same on every rank. If any rank fails, every rank notes it in
        `attempts`, and the run continues. Raises `Refusal` with the exit code START_AGAIN on every
        rank if a `regular` save fails and the regular save before it has failed as well.
        """
        self.wait()
        self.attempts.begin(state["step"], regular)
        step = self.folder / ".staging" / step_name(state["step"])
        failures = partial(_failures_as, self, f"checkpoint of step {state['step']}")
        if dist.get_rank() == 0:
            with failures():
                self._begin(step, state)
        if self._failed():
            return
        content: list[tuple[Any, Path]] = []
        with failures():
            content = self.engine.save_states(step, self.blueprint, self.layout, self.in_background)
        if self._failed():
            return
        generators = generator_states()

        def finish() -> None:
            with failures():
                self._write_own(step, content, generators, state)

        if not self.in_background:
            finish()
            if self._failed():  # else every rank's note is there
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
            except BaseException as error:  # every error belongs to the thread that waits
                self.error = (
                    f"checkpoint of step {state['step']}: rank {dist.get_rank()}: {error!r}"
                )
            failed = bool(self.error)
            self.written.set()
            if dist.get_rank() == 0 and not failed:
                with failures():
                    self._commit(step, state)

        self.written.clear()
        self.thread = threading.Thread(target=finish_and_commit, name="checkpoint", daemon=True)
        self.thread.start()

    def save_last(self, state: State) -> None:
        """Save the last step of this start (a collective); return when the checkpoint is complete.

        A failed save is tried again after AT_END seconds. Then `Refusal` with the exit code
        START_AGAIN is raised.
        """
        for pause in (*AT_END, 0):
            self.save(state, regular=False)
            self.wait()
            if not self.attempts.error:
                return
            time.sleep(pause)
        raise self.attempts.ending()

    def wait(self) -> None:
        """Wait until the save in the background, if any, is complete or has failed (a collective).

        Raises as `save` does.
        """
        if self.thread is not None:
            self.written.wait()
            # before the join: the first rank's thread waits for the notes of ranks that may have
            # failed or died
            failed = self._failed()
            self.thread.join()
            self.thread = None
            if failed:
                self.error = ""  # of the first rank's thread, whose staging folder has been removed
            elif not self._failed():
                self._say(self.attempts.succeed())

    @property
    def broken(self) -> bool:
        """Return True if this rank's part of the save in the background has failed: every rank
        should `wait`.
        """
        return self.thread is not None and bool(self.error)

    def close(self) -> None:
        """Lets the save in the background end after an error of a single rank; of several,
        `failure.Peers` ends each at once.

        Python aborts where it ends beside a thread that writes.
        """
        if self.thread is not None and dist.get_world_size() == 1:
            self.thread.join()

    def check_room(self, demand: Demand, resumed: bool) -> None:
        """Look for the space that the checkpoints and the export of this start need (a collective).

        Rank 0 reports it if the oldest checkpoints go first. Raises `Refusal` on every rank if too
        little can be freed.
        """
        found = [""]
        if dist.get_rank() == 0:
            # left by a save that was killed
            shutil.rmtree(self.folder / ".staging", ignore_errors=True)
            found = [lacking(self.room, self.retention, demand)]
            if not found[0] and (line := oldest_first(self.room, self.retention, demand)):
                self.say(line)
                self.room = replace(self.room, oldest_first=True)
        dist.broadcast_object_list(found, group=waiting_group())
        if found[0]:
            problem = Problem(
                f"checkpoint in {self.folder}", found[0], "free space or choose another --out"
            )
            raise Refusal([problem], START_AGAIN if resumed else 1)

    def _failed(self) -> bool:
        """Return True on every rank if a rank has failed (a collective), and note it.

        Raises as `save` does.
        """
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, self.error, group=waiting_group())
        self.error = ""
        if not (failures := [error for error in errors if error]):
            return False
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / ".staging", ignore_errors=True)
        if LIMIT in failures[0]:  # no later save can be better
            fix = (
                "the checkpoints before it are intact. Raise the limit (ulimit -f unlimited), then"
                " start again"
            )
            raise refuse(f"checkpoint in {self.folder}", failures[0], fix)
        self._say(self.attempts.fail(f"checkpoint in {self.folder}: {failures[0]}"))
        return True

    def _say(self, line: str) -> None:
        if line and dist.get_rank() == 0:
            self.say(line)

    def _begin(self, step: Path, state: State) -> None:
        """Make the staging folder of a step, and room for its files (rank 0)."""
        self.flush_metrics()
        if step.parent.exists():
            shutil.rmtree(step.parent)
        step.mkdir(parents=True)
        self._make_room(state["step"])

    def _make_room(self, step: int) -> None:
        """Remove the oldest checkpoints if the room is short; note an error if it is too short for
        the next one.
        """
        for line in remove_oldest(self.room, self.retention):
            self.say_once(line)
        if self.room.one > self.room.free:
            self.error = f"checkpoint of step {step} {self.room.missing()}"

    def _write_own(
        self, step: Path, content: list[tuple[Any, Path]], generators: dict[str, Any], state: State
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
            (step / STATE).write_text(
                json.dumps({**state, "layout": self.layout.to_json()}, indent=1)
            )
            (step / BLUEPRINT).write_text(json.dumps(self.blueprint.to_json()))
            (step / "hf_files").mkdir()
            self.write_hf_files(step / "hf_files")
            names += [
                step / STATE,
                step / BLUEPRINT,
                *(path for path in (step / "hf_files").rglob("*") if path.is_file()),
            ]
        files = {str(path.relative_to(step)): manifest.facts(path) for path in names}
        opened = tensor_files.open_checkpoint(step, self.blueprint, self.layout)
        tensors = copying.partial_digests(self.blueprint, opened, frozenset(files))
        opened.close()
        note = step.parent / f"rank_{rank}.json"
        note.with_suffix(".tmp").write_text(json.dumps({"files": files, "tensors": tensors}))
        os.rename(note.with_suffix(".tmp"), note)

    def _commit(self, step: Path, state: State) -> None:
        files: dict[str, Any] = {}
        tensors: dict[str, list[Any]] = {}
        for rank in range(self.layout.mesh.world):
            path = step.parent / f"rank_{rank}.json"
            while not path.exists():  # in the background only: another rank is still writing
                if not step.exists():
                    return  # the other rank has failed, and `_failed` has removed the folder
                time.sleep(0.02)
            note = json.loads(path.read_text())
            files |= note["files"]
            for key, (shape, dtype, part) in note["tensors"].items():
                tensors[key] = [shape, dtype, add(part, tensors[key][2] if key in tensors else 0)]
        manifest.write(
            step,
            state["step"],
            files,
            {
                key: [shape, dtype, f"{total:016x}"]
                for key, (shape, dtype, total) in tensors.items()
            },
        )
        # put there by somebody else while the run trained
        if os.path.lexists(target := self.folder / step.name):
            os.rename(target, aside := free_name(self.folder, step.name))
            self.say_once(f"{target} was not saved by this run: it is now {aside.name}")
        os.rename(step, target)
        # with the small files
        self.room = replace(self.room, one=max(self.room.one, bytes_of(target)))
        self._tidy(step.name)

    def _tidy(self, name: str) -> None:
        """Point `latest` to the new checkpoint and remove old ones.

        The checkpoint is complete, so a failure is only reported.
        """
        point_latest(self.folder, name, self.say_once)
        shutil.rmtree(self.folder / ".staging", ignore_errors=True)
        for line in remove_old(self.folder, self.retention):
            self.say_once(line)

    def say_once(self, line: str) -> None:
        """Report a line, the first time only: the next save would repeat it.

        The reader of the output may have gone.
        """
        if line not in self.said:
            self.said.add(line)
            with contextlib.suppress(OSError):
                self.say(line)


@contextlib.contextmanager
def _failures_as(saver: Saver, what: str) -> Any:
    """Keep an error of the disk or a library for `_failed`, which notes it on every rank: a rank
    that raised alone would leave the others waiting.
    """
    try:
        yield
    except (OSError, RuntimeError, Refusal) as error:
        saver.error = (
            f"{what}: rank {dist.get_rank()}: {str(error).strip().splitlines()[0]}"
            f" ({saver.room.missing()})"
        )


def point_latest(folder: Path, name: str, say: Say) -> None:
    """Make `latest`, which stock DeepSpeed loads, name a step folder; a crash leaves the old name
    or the new one.

    Nothing here reads `latest`, so a failure is only reported.
    """
    try:
        fsync(folder)  # the step folder is on the disk before it is named
        write_whole(folder / LATEST, name)
    except OSError as error:
        say(
            f"{folder / LATEST} cannot be written: {error.strerror}. The checkpoints are complete,"
            " and the run continues"
        )


def put_aside_later(folder: Path, step: int, say: Say) -> None:
    """Renames the step folders after `step`: the run goes another way from here, and no later start
    may go on from those folders.
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
                raise refuse(
                    str(later),
                    rule,
                    f"move it out of {folder}, or choose another folder with --out",
                ) from None
            say(
                f"{later} is after step {step}: it is now {aside.name}, remove it if you do not"
                " need it"
            )


def generator_states() -> dict[str, Any]:
    """Returns the states of this rank's random generators, in types that `weights_only` loads."""
    numpy: Any = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    generators = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy}
    return generators | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})
