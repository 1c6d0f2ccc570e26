"""The folder of DeepSpeed's compiled ops, and a lock for compiling them.

The module determines which ops this host can use, and lets only one process at a time compile. It
imports no heavy package.

An op is compiled for its host's instruction set (`-march=native`) and against one version of
Python, torch and DeepSpeed. Each kind of host therefore has a separate folder, even in a checkout
that several hosts share.
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

from ..dslint.swap import file_system_type
from ..spec.errors import ConfigError, Problem, Say, config_error
from .locks import lock_file

EXTENSIONS_DIR_VARIABLE = "TORCH_EXTENSIONS_DIR"  # the variable with which torch finds compiled ops
REPO_ROOT = Path(__file__).resolve().parents[3]
# Seconds: a compile on a different host counts as dead if its folder has not changed for this long.
STALE_COMPILE_SECONDS = 600.0
# File systems to which other hosts may also write.
NETWORK_FILE_SYSTEMS = {
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
def host_kind(cpus: Path = Path("/proc/cpuinfo")) -> str:
    """Return this host's kind. Hosts of the same kind can use each other's compiled ops."""
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


def default_op_folders() -> list[Path]:
    """List the default folders for ops, first in the checkout, then in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return [
        *(
            [REPO_ROOT / ".cache" / "torch_extensions"]
            if (REPO_ROOT / "ds_configs").is_dir()
            else []
        ),
        cache / "torch_extensions",
    ]


def find_op_folder(parts: tuple[str, ...] = ()) -> Path:
    """Return the folder of compiled ops.

    The result is TORCH_EXTENSIONS_DIR if it is set. Otherwise it is the default folder that
    contains `parts`, or else the first writable default folder.
    """
    places = [place / host_kind() for place in default_op_folders()]
    chosen = os.environ.get(EXTENSIONS_DIR_VARIABLE)
    if chosen and Path(chosen) not in places:
        return Path(chosen)
    holding = [
        place for place in places if parts and all(is_loadable(place, part) for part in parts)
    ]
    return [*holding, *filter(is_writable, places), *places][0]


def is_writable(place: Path) -> bool:
    """Return True if this user can create files in `place`.

    If `place` does not exist, the check applies to its nearest existing parent.
    """
    there = next(
        above for above in (place.absolute(), *place.absolute().parents) if os.path.exists(above)
    )
    return os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)


def is_compiled(place: Path, part: str) -> bool:
    """Return True if a host of this kind has compiled `part` in `place`.

    `part` is an op, or a library that an op needs.
    """
    return (place / part / f"{part}.so").exists() and _compiled_on(place, part) == host_kind()


def is_loadable(place: Path, part: str) -> bool:
    """Return True if `part` can be loaded without compiling.

    A host of this kind must have compiled the part (`is_compiled`). Otherwise the part must be
    complete, and this user must be unable to compile a better one in its folder.
    """
    log = place / part / ".ninja_log"  # lists only files that were completed
    whole = (
        (place / part / f"{part}.so").exists()
        and log.exists()
        and f"\t{part}.so\t" in log.read_text(errors="replace")
    )
    return is_compiled(place, part) or (
        whole and not _compiled_on(place, part) and not can_compile_in(place, part)
    )


def mark_compiled(place: Path, part: str) -> None:
    """Record that a host of this kind has finished compiling `part`."""
    (place / part / "kind").write_text(host_kind())


def _compiled_on(place: Path, part: str) -> str:
    try:
        return (place / part / "kind").read_text()
    except OSError:
        return ""


def can_compile_in(place: Path, part: str) -> bool:
    """Return True if this user can compile `part` in `place`."""
    return is_writable(place) and is_writable(place / part)


@contextlib.contextmanager
def lock_op_folder(place: Path, part: str, say: Say) -> Iterator[None]:
    """Lock the folder of `part` against other processes that would compile the part.

    torch 2.13 marks a compile with a plain file (FileBaton). A killed process leaves this file
    behind, and every later process waits forever. The kernel releases our lock when the owner's
    process ends, so the lock's owner may remove such a file. This is safe only on the same host,
    because on a shared file system, locks may not extend to other hosts.

    Raise `ConfigError` if the folder cannot be written or locked, or if different kinds of hosts
    have compiled in it. Raise it also for a mark that a dead compile on a different host left
    behind.
    """
    where, fix = (
        f"the folder of compiled ops {place}",
        f"set {EXTENSIONS_DIR_VARIABLE} to a folder on a local disk",
    )
    with _open_lock_file(place, part) as file:
        try:
            lock_file(file, where, fix)
        except BlockingIOError:
            say(f"waiting for another process that compiles DeepSpeed's {part}")
            lock_file(file, where, fix, wait=True)
        if (made_by := _compiled_on(place, part)) and _processor_of_kind(
            made_by
        ) != _processor_of_kind(host_kind()):
            raise config_error(
                str(place / part),
                "was compiled for a different processor than this host's",
                f"unset {EXTENSIONS_DIR_VARIABLE}, or set it to another folder",
            )
        _clear_stale_lock(place, part, file, say)
        file.truncate(0)
        file.write(_host_id())
        file.flush()
        yield


def _processor_of_kind(kind: str) -> str:
    return kind.partition("_py")[0]


def _open_lock_file(place: Path, part: str) -> IO[str]:
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not can_compile_in(place, part):
            raise PermissionError(0, "it belongs to another user")
        return (place / f"{part}.flock").open("a+")
    except OSError as error:
        raise ConfigError(
            [unwritable_folder_problem(place, error.strerror or str(error))]
        ) from None


def unwritable_folder_problem(place: Path, why: str) -> Problem:
    return Problem(
        f"the folder of compiled ops {place}",
        f"cannot be written: {why}",
        f"set {EXTENSIONS_DIR_VARIABLE} to a folder that you can write to and that has free space",
    )


def check_op_folder(place: Path) -> list[Problem]:
    """Find problems that would prevent this process from compiling in `place`.

    Nothing is changed.
    """
    there = next(
        above for above in (place.absolute(), *place.absolute().parents) if os.path.exists(above)
    )
    if not is_writable(place):
        return [
            unwritable_folder_problem(
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
            lock_file(
                file,
                f"the folder of compiled ops {place}",
                f"set {EXTENSIONS_DIR_VARIABLE} to a folder on a local disk",
            )
    except ConfigError as refusal:
        return refusal.problems
    except OSError as error:
        return [unwritable_folder_problem(place, error.strerror or str(error))]
    return []


def _clear_stale_lock(place: Path, part: str, file: IO[str], say: Say) -> None:
    """Remove a mark left by a killed compile on this host, and wait for a compile elsewhere."""
    left, told = place / part / "lock", False
    file.seek(0)
    owner = file.read()
    while left.exists():
        if _is_of_this_host(owner, place):
            left.unlink(missing_ok=True)
            return
        who = owner.split()[0] if owner else "another host"
        if (quiet := _seconds_since_change(place / part)) > STALE_COMPILE_SECONDS:
            rule = (
                f"is left over from a compile on {who}, and nothing has changed beside it for"
                f" {quiet / 60:.0f} min"
            )
            raise config_error(
                str(left), rule, f"run: rm -f {left}, unless it still compiles there"
            )
        if not told:
            say(f"waiting for {who}, which compiles DeepSpeed's {part}")
        told = True
        time.sleep(0.2)


def leftover_locks(place: Path) -> Iterator[tuple[Path, str]]:
    """Yield (torch's mark, host name) for each compile that may have been killed.

    The host name is "" for this host.
    """
    for left in sorted(place.glob("*/lock")):
        note = place / f"{left.parent.name}.flock"
        owner = note.read_text() if note.exists() else ""
        if _is_of_this_host(owner, place):
            yield left, ""
        elif _seconds_since_change(left.parent) > STALE_COMPILE_SECONDS:
            yield left, owner.split()[0] if owner else "another host"


def _host_id() -> str:
    """Return an id for this host, made of its name and its boot id.

    A container changes the host name, and a reboot changes the boot id.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"


def _is_of_this_host(owner: str, place: Path) -> bool:
    """Return True if this host ran the compile.

    A compile without a recorded owner is attributed to this host, unless other hosts write to the
    file system.
    """
    return (
        bool(set(owner.split()) & set(_host_id().split()))
        if owner
        else file_system_type(place) not in NETWORK_FILE_SYSTEMS
    )


def _seconds_since_change(place: Path) -> float:
    """Return the number of seconds since a folder last changed."""
    times = [place.stat().st_mtime]
    for path in place.iterdir():
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return time.time() - max(times)
