"""Where DeepSpeed's compiled ops lie, which of them this host can use, and which process compiles one. Imports nothing heavy.

An op is compiled for the instruction set of its host (`-march=native`) and against one Python, torch and DeepSpeed. So each
kind of host has a folder of its own, also in a checkout that several hosts share.
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

from ..refusal import Problem, Refusal, Say, refuse
from ..strategy.swap import file_system
from .locks import lock

VARIABLE = "TORCH_EXTENSIONS_DIR"  # of torch: where ops are compiled
REPOSITORY = Path(__file__).resolve().parents[3]
QUIET = 600.0  # seconds without a change in its folder after which a compile on another host is taken for dead
SHARED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs", "9p", "virtiofs", "glusterfs"}  # file systems that other hosts write, too


@functools.cache
def kind(cpus: Path = Path("/proc/cpuinfo")) -> str:
    """The name of what two hosts must have in common to use each other's compiled ops."""
    with cpus.open() as lines:
        instructions = next((line.partition(":")[2] for line in lines if re.match(r"flags|Features", line)), "")
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    digest = hashlib.sha256(f"{' '.join(sorted(instructions.split()))} {libc}".encode()).hexdigest()[:8]
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return f"{platform.machine()}_{digest}_{python}_torch{_version('torch')}_deepspeed{_version('deepspeed')}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def defaults() -> list[Path]:
    """Where ops lie that no one chose a folder for: in the checkout, then in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return [*([REPOSITORY / ".cache" / "torch_extensions"] if (REPOSITORY / "ds_configs").is_dir() else []), cache / "torch_extensions"]


def folder(parts: tuple[str, ...] = ()) -> Path:
    """The folder of compiled ops: TORCH_EXTENSIONS_DIR, else the default that has `parts`, else the first one that can be written."""
    places = [place / kind() for place in defaults()]
    chosen = os.environ.get(VARIABLE)
    if chosen and Path(chosen) not in places:
        return Path(chosen)
    holding = [place for place in places if parts and all(usable(place, part) for part in parts)]
    return [*holding, *filter(writable, places), *places][0]


def writable(place: Path) -> bool:
    """Whether this user can make files there; what is missing of the path counts as the folder above it."""
    there = next(above for above in (place.absolute(), *place.absolute().parents) if os.path.exists(above))
    return os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)


def ready(place: Path, part: str) -> bool:
    """Whether `part` (an op, or a library that an op needs) was compiled there by a host of this kind."""
    return (place / part / f"{part}.so").exists() and _made_by(place, part) == kind()


def usable(place: Path, part: str) -> bool:
    """Whether `part` can be loaded as it is: `ready`, or whole and in a folder that is not ours, so that nothing better can be had."""
    log = place / part / ".ninja_log"  # holds only what was made to its end
    whole = (place / part / f"{part}.so").exists() and log.exists() and f"\t{part}.so\t" in log.read_text(errors="replace")
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
    """Whether this user can compile `part` there."""
    return writable(place) and writable(place / part)


@contextlib.contextmanager
def held(place: Path, part: str, say: Say) -> Iterator[None]:
    """Holds the folder of `part` against all other processes that compile it.

    torch 2.13 marks a compile with a plain file (FileBaton); a process that is killed meanwhile leaves it, and every later
    one waits for ever. The kernel drops our lock with its process, so whoever holds it may remove such a file, but only one
    of this host: on a file system that is shared, locks may not reach from host to host.

    Raises `Refusal` where the folder cannot be written or locked, where it holds what unlike hosts compiled, and for a mark
    that a dead compile on another host has left.
    """
    where, fix = f"the folder of compiled ops {place}", f"set {VARIABLE} to a folder on a local disk"
    with _opened(place, part) as file:
        try:
            lock(file, where, fix)
        except BlockingIOError:
            say(f"waiting for another process that compiles DeepSpeed's {part}")
            lock(file, where, fix, wait=True)
        if (made_by := _made_by(place, part)) and _processor(made_by) != _processor(kind()):
            raise refuse(str(place / part), "was compiled for other processors than those of this host", f"unset {VARIABLE}, or set it to another folder")
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
            raise PermissionError(0, "it is not yours")
        return (place / f"{part}.flock").open("a+")
    except OSError as error:
        raise Refusal([cannot_write(place, error.strerror or str(error))]) from None


def cannot_write(place: Path, why: str) -> Problem:
    return Problem(f"the folder of compiled ops {place}", f"cannot be written: {why}", f"set {VARIABLE} to a folder of yours with room")


def check(place: Path) -> list[Problem]:
    """What would keep this process from compiling there. Changes nothing."""
    there = next(above for above in (place.absolute(), *place.absolute().parents) if os.path.exists(above))
    if not writable(place):
        return [cannot_write(place, f"{there} is not yours" if os.path.isdir(there) else f"{there} is a file")]
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            lock(file, f"the folder of compiled ops {place}", f"set {VARIABLE} to a folder on a local disk")
    except Refusal as refusal:
        return refusal.problems
    except OSError as error:
        return [cannot_write(place, error.strerror or str(error))]
    return []


def _clear(place: Path, part: str, file: IO[str], say: Say) -> None:
    """Removes the mark of a killed compile of this host; waits for a compile of another one."""
    left, told = place / part / "lock", False
    file.seek(0)
    owner = file.read()
    while left.exists():
        if _of_this_host(owner, place):
            left.unlink(missing_ok=True)
            return
        who = owner.split()[0] if owner else "another host"
        if (quiet := _quiet(place / part)) > QUIET:
            rule = f"was left by a compile on {who}, and nothing has changed beside it for {quiet / 60:.0f} min"
            raise refuse(str(left), rule, f"rm -f {left}, unless it still compiles there")
        if not told:
            say(f"waiting for {who}, which compiles DeepSpeed's {part}")
        told = True
        time.sleep(0.2)


def left_over(place: Path) -> Iterator[tuple[Path, str]]:
    """(the file by which torch marks a compile, its host or "" for this one) of those that may have been killed."""
    for left in sorted(place.glob("*/lock")):
        note = place / f"{left.parent.name}.flock"
        owner = note.read_text() if note.exists() else ""
        if _of_this_host(owner, place):
            yield left, ""
        elif _quiet(left.parent) > QUIET:
            yield left, owner.split()[0] if owner else "another host"


def _host() -> str:
    """This host by its name and by its kernel's start: containers change the one, a restart the other."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"


def _of_this_host(owner: str, place: Path) -> bool:
    """Whether a compile was this host's; one that nobody has signed is, unless other hosts write to this file system."""
    return bool(set(owner.split()) & set(_host().split())) if owner else file_system(place) not in SHARED


def _quiet(place: Path) -> float:
    """Seconds since the last change in a folder."""
    times = [place.stat().st_mtime]
    for path in place.iterdir():
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return time.time() - max(times)
