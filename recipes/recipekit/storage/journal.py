"""Keeps a note beside a conversion's output, so that the conversion can go on after a kill."""

import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..spec.refusal import refuse
from ..spec.whole_file import fsync


def journal_file(out: Path) -> Path:
    """Returns the file in which an unfinished conversion to `out` notes what is done."""
    return out.with_name(f".{out.name}.part") / "journal.jsonl"


class Journal:
    """Holds the unfinished output of a conversion: a hidden folder beside `out`, which becomes
    `out` when it is complete.

    Finished work is noted there, so that the same conversion, started again, goes on where it was
    killed. After a crash of the machine, or an error of the disk, the conversion begins anew, since
    written bytes may not have reached the disk.
    """

    def __init__(self, out: Path, plan: dict[str, Any]):
        if out.exists():
            raise refuse(
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
            with suppress(ValueError):  # the last line may be torn
                for line in lines[1:]:
                    self.done |= json.loads(line)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            self._file.write_text(head + "\n")

    def note(self, key: str, value: Any) -> None:
        with self._lock, self._file.open("a") as file:
            file.write(json.dumps({key: value}) + "\n")

    def forget(self) -> None:
        """Forgets the notes: the same conversion, started again, begins anew."""
        self._file.unlink()

    def finish(self) -> None:
        self._file.unlink()
        fsync(self.folder)
        os.rename(self.folder, self.out)
        fsync(self.out.parent)
