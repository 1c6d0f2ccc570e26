"""Small tmpfs disks that can be filled, emptied and enlarged."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

SUDO = [] if os.geteuid() == 0 else ["sudo", "-n"]


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """Mount a disk of this size, such as 64k or 20m, at the folder `place`."""
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [*SUDO, "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True
    )
    try:
        yield place
    finally:
        # -l is needed because a process may still have a file open there.
        subprocess.run([*SUDO, "umount", "-l", str(place)], check=True)


def resize(place: Path, size: str) -> None:
    subprocess.run([*SUDO, "mount", "-o", f"remount,size={size}", str(place)], check=True)


def fill(place: Path) -> Path:
    """Fill a disk to the last page, and return the file that frees it when removed."""
    ballast = place / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as stream:
        while stream.write(bytes(1 << 16)):
            pass
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as stream:
        while stream.write(bytes(4096)):
            pass
    return ballast


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder read-only with a second, read-only mount on top of it.

    This works even if processes have open files in the folder.
    """
    subprocess.run([*SUDO, "mount", "--bind", str(folder), str(folder)], check=True)
    subprocess.run([*SUDO, "mount", "-o", "remount,bind,ro", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run([*SUDO, "umount", "-l", str(folder)], check=True)
