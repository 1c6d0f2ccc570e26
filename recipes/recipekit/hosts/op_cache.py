"""Finds DeepSpeed's compiled ops, decides which of them this host can use, and lets one process at
a time compile.

Imports nothing heavy.

An op is compiled for the instruction set of its host (`-march=native`) and against one Python,
torch and DeepSpeed. So each kind of host has a folder of its own, also in a checkout that several
hosts share.
"""

import contextlib
import functools
import hashlib
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from ..dslint.swap import file_system
from ..spec.refusal import Problem, Refusal, Say, refuse
from .locks import lock

VARIABLE = "TORCH_EXTENSIONS_DIR"  # torch's: the folder in which ops are compiled
REPOSITORY = Path(__file__).resolve().parents[3]
# seconds: a compile on another host counts as dead if its folder has not changed for so long
QUIET = 600.0
# file systems that other hosts write, too
SHARED = {
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb3",
    "afs",
    "9p",
    "virtiofs",
    "glusterfs",
}


@functools.cache
def kind(cpus: Path = Path("/proc/cpuinfo")) -> str:
    """Names the kind of this host; hosts of one kind can use each other's compiled ops."""
    with cpus.open() as lines:
        instructions = next(
            (line.partition(":")[2] for line in lines if re.match(r"flags|Features", line)), ""
        )
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    digest = hashlib.sha256(
        f"{' '.join(sorted(instructions.split()))} {libc}".encode()
    ).hexdigest()[:8]
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    packages = f"torch{_version('torch')}_deepspeed{_version('deepspeed')}"
    return f"{platform.machine()}_{digest}_{python}_{packages}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def defaults() -> list[Path]:
    """Lists the folders of ops if nobody chose one: in the checkout, then in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return [
        *(
            [REPOSITORY / ".cache" / "torch_extensions"]
            if (REPOSITORY / "ds_configs").is_dir()
            else []
        ),
        cache / "torch_extensions",
    ]


def folder(parts: tuple[str, ...] = ()) -> Path:
    """Returns the folder of compiled ops: TORCH_EXTENSIONS_DIR, else the default that has `parts`,
    else the first default that can be written.
    """
    places = [place / kind() for place in defaults()]
    chosen = os.environ.get(VARIABLE)
    if chosen and Path(chosen) not in places:
        return Path(chosen)
    holding = [place for place in places if parts and all(usable(place, part) for part in parts)]
    return [*holding, *filter(writable, places), *places][0]


def writable(place: Path) -> bool:
    """Returns True if this user can make files in `place` or, where that does not exist, in the
    nearest folder above it.
    """
    there = next(
        above for above in (place.absolute(), *place.absolute().parents) if os.path.exists(above)
    )
    return os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)


def ready(place: Path, part: str) -> bool:
    """Returns True if a host of this kind has compiled `part` (an op, or a library that an op
    needs) in `place`.
    """
    return (place / part / f"{part}.so").exists() and _made_by(place, part) == kind()


def usable(place: Path, part: str) -> bool:
    """Returns True if `part` can be loaded as it is: it is `ready`, or whole and in a folder where
    this user could not compile a better one.
    """
    log = place / part / ".ninja_log"  # lists only files that were completed
    whole = (
        (place / part / f"{part}.so").exists()
        and log.exists()
        and f"\t{part}.so\t" in log.read_text(errors="replace")
    )
    return ready(place, part) or (whole and not _made_by(place, part) and not ours(place, part))


def mark(place: Path, part: str) -> None:
    """Notes that a host of this kind has compiled `part` to its end."""
    (place / part / "kind").write_text(kind())


def _made_by(place: Path, part: str) -> str:
    try:
        return (place / part / "kind").read_text()
    except OSError:
        return ""


def ours(place: Path, part: str) -> bool:
    """Returns True if this user can compile `part` in `place`."""
    return writable(place) and writable(place / part)


@contextlib.contextmanager
def held(place: Path, part: str, say: Say) -> Iterator[None]:
    """Holds the folder of `part` against all other processes that would compile the same part.

    torch 2.13 marks a compile with a plain file (FileBaton). A killed process leaves that file
    behind, and every later process waits for ever. The kernel drops our lock with its process, so
    whoever holds the lock may remove such a file, but only one of this host: on a shared file
    system locks may not reach from host to host.

    Raises `Refusal` if the folder cannot be written or locked, if unlike hosts have compiled in it,
    and for a mark that a dead compile on another host has left.
    """
    where, fix = (
        f"the folder of compiled ops {place}",
        f"set {VARIABLE} to a folder on a local disk",
    )
    with _opened(place, part) as file:
        try:
            lock(file, where, fix)
        except BlockingIOError:
            say(f"waiting for another process that compiles DeepSpeed's {part}")
            lock(file, where, fix, wait=True)
        if (made_by := _made_by(place, part)) and _processor(made_by) != _processor(kind()):
            raise refuse(
                str(place / part),
                "was compiled for a different processor than this host's",
                f"unset {VARIABLE}, or set it to another folder",
            )
        _clear(place, part, file, say)
        file.truncate(0)
        file.write(_host())
        file.flush()
        yield


def _processor(kind: str) -> str:
    return kind.partition("_py")[0]


def _opened(place: Path, part: str) -> IO[str]:
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not ours(place, part):
            raise PermissionError(0, "it belongs to another user")
        return (place / f"{part}.flock").open("a+")
    except OSError as error:
        raise Refusal([cannot_write(place, error.strerror or str(error))]) from None


def cannot_write(place: Path, why: str) -> Problem:
    return Problem(
        f"the folder of compiled ops {place}",
        f"cannot be written: {why}",
        f"set {VARIABLE} to a folder that you can write to and that has free space",
    )


def check(place: Path) -> list[Problem]:
    """Finds what would keep this process from compiling in `place`; changes nothing."""
    there = next(
        above for above in (place.absolute(), *place.absolute().parents) if os.path.exists(above)
    )
    if not writable(place):
        return [
            cannot_write(
                place,
                (
                    f"{there} belongs to another user"
                    if os.path.isdir(there)
                    else f"{there} is a file"
                ),
            )
        ]
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            lock(
                file,
                f"the folder of compiled ops {place}",
                f"set {VARIABLE} to a folder on a local disk",
            )
    except Refusal as refusal:
        return refusal.problems
    except OSError as error:
        return [cannot_write(place, error.strerror or str(error))]
    return []


def _clear(place: Path, part: str, file: IO[str], say: Say) -> None:
    """Removes the mark of a killed compile on this host; waits for a compile on another host."""
    left, told = place / part / "lock", False
    file.seek(0)
    owner = file.read()
    while left.exists():
        if _of_this_host(owner, place):
            left.unlink(missing_ok=True)
            return
        who = owner.split()[0] if owner else "another host"
        if (quiet := _quiet(place / part)) > QUIET:
            rule = (
                f"is left over from a compile on {who}, and nothing has changed beside it for"
                f" {quiet / 60:.0f} min"
            )
            raise refuse(str(left), rule, f"run: rm -f {left}, unless it still compiles there")
        if not told:
            say(f"waiting for {who}, which compiles DeepSpeed's {part}")
        told = True
        time.sleep(0.2)


def left_over(place: Path) -> Iterator[tuple[Path, str]]:
    """Yields (torch's mark of a compile, its host or "" for this one) of compiles that may have
    been killed.
    """
    for left in sorted(place.glob("*/lock")):
        note = place / f"{left.parent.name}.flock"
        owner = note.read_text() if note.exists() else ""
        if _of_this_host(owner, place):
            yield left, ""
        elif _quiet(left.parent) > QUIET:
            yield left, owner.split()[0] if owner else "another host"


def _host() -> str:
    """Identifies this host by its name and its kernel's start: containers change the name, a
    restart the start.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"


def _of_this_host(owner: str, place: Path) -> bool:
    """Returns True if this host ran the compile.

    A compile without an owner counts as ours unless other hosts write to this file system.
    """
    return (
        bool(set(owner.split()) & set(_host().split()))
        if owner
        else file_system(place) not in SHARED
    )


def _quiet(place: Path) -> float:
    """Returns the seconds since the last change in a folder."""
    times = [place.stat().st_mtime]
    for path in place.iterdir():
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return time.time() - max(times)
