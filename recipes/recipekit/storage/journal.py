"""The journal of a conversion, with which a killed conversion can resume."""

import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..spec.atomic_write import fsync
from ..spec.errors import config_error


def journal_file(out: Path) -> Path:
    """Return the file that records the progress of an unfinished conversion to `out`."""
    return out.with_name(f".{out.name}.part") / "journal.jsonl"


class Journal:
    """The unfinished output of a conversion: a hidden folder next to `out`.

    The folder is renamed to `out` when it is complete. Finished work is recorded in the folder, so
    that the same conversion resumes where it was killed. After a machine crash or a disk error, the
    conversion starts from scratch, because written bytes may not have reached the disk.
    """

    def __init__(self, out: Path, plan: dict[str, Any]):
        if out.exists():
            raise config_error(
                str(out),
                "already exists and is not overwritten",
                "choose another folder, or remove it",
            )
        self.out, self._file, self._lock = out, journal_file(out), threading.Lock()
        self.folder = self._file.parent
        boot = Path("/proc/sys/kernel/random/boot_id")
        head = json.dumps(
            plan | {"boot": boot.read_text() if boot.exists() else ""}, sort_keys=True
        )
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self.done: dict[str, Any] = {}
        self.resumed = len(lines) > 1 and lines[0] == head
        if self.resumed:
            with suppress(ValueError):  # the last line may be incomplete
                for line in lines[1:]:
                    self.done |= json.loads(line)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            self._file.write_text(head + "\n")

    def note(self, key: str, value: object) -> None:
        with self._lock, self._file.open("a") as file:
            file.write(json.dumps({key: value}) + "\n")

    def forget(self) -> None:
        """Remove the records, so that the same conversion starts from scratch."""
        self._file.unlink()

    def finish(self) -> None:
        self._file.unlink()
        fsync(self.folder)
        os.rename(self.folder, self.out)
        fsync(self.out.parent)
