"""What can be wrong with a host before a run starts: each check yields `Row`s (what is there) and `Problem`s. Imports nothing heavy."""

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from .architecture import is_local
from .ds_config import file_system
from .recipe import Recipe
from .refusal import Problem

CPU_BUFFERS = 66 << 20  # bytes of /dev/shm that DeepSpeed's collectives on a CPU take for each rank (DeepSpeed 0.19.8, csrc/cpu/comm/shm.cpp)
NCCL_BUFFERS = 1 << 30  # bytes of /dev/shm that NCCL's guide asks a container for
SLOWEST_DRIVE = 0.1  # GB/s; below it is a network folder or a spinning disk, and a step waits for minutes
PROBE = 1 << 20  # bytes written to find out whether a folder can be written


class Row(NamedTuple):
    """One line of the table: what was looked at, and what was found."""

    check: str
    value: str


Findings = Iterator[Row | Problem]


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if os.path.exists(folder))  # not .exists(), which raises without permission


def amount(size: float) -> str:
    """Bytes, as a person reads them."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def check_versions(requirements: Path) -> Findings:
    """The installed packages against the pins of a requirements file."""
    yield Row("python", platform.python_version())
    pins = [line.split("==") for line in requirements.read_text().splitlines() if "==" in line]
    matching = 0
    for name, pinned in pins:
        try:
            found = version(name).split("+")[0]  # torch's own suffix: 2.13.0+cpu
        except PackageNotFoundError:
            found = "not installed"
        matching += found == pinned
        if found != pinned:
            yield Problem(f"{name} {found}", f"{requirements.name} pins {pinned}", f"pip install {name}=={pinned}")
    yield Row("packages", f"{matching} of {len(pins)} as {requirements.name} pins them")


class Gpu(NamedTuple):
    """An NVIDIA GPU; `number` as nvidia-smi counts."""

    number: int
    uuid: str
    name: str
    total: int  # bytes
    used: int  # bytes
    driver: str


def gpus() -> list[Gpu]:
    """The NVIDIA GPUs that a rank started here may use, in the order of its local ranks: those of CUDA_VISIBLE_DEVICES where it is set.

    Raises OSError if nvidia-smi is there and does not answer.
    """
    if not (program := shutil.which("nvidia-smi")):
        return []
    query = [program, "--query-gpu=index,uuid,name,memory.total,memory.used,driver_version", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        fields = [[word.strip() for word in line.split(",")] for line in told.splitlines()]
        found = [Gpu(int(number), uuid, name, int(total) << 20, int(used) << 20, driver) for number, uuid, name, total, used, driver in fields]
    except (subprocess.SubprocessError, ValueError) as error:
        raise OSError(" ".join(str(error).split())) from None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or "MIG-" in visible:  # parts of GPUs, which this query does not list
        return found
    chosen = []
    for word in map(str.strip, visible.split(",")):
        match = [gpu for gpu in found if word == str(gpu.number) or (word.startswith("GPU-") and gpu.uuid.startswith(word))]
        if len(match) != 1:
            break  # as CUDA does: what follows a device that is none is not seen
        chosen += match
    return chosen


def check_devices(local_world: int) -> Findings:
    """The GPUs, enough for the ranks of this host and free, and room in /dev/shm for the collectives between these ranks."""
    cores = os.cpu_count() or 1
    try:
        found = gpus()
    except OSError as error:
        found = []
        yield Problem("nvidia-smi", f"does not answer as it should ({error})", "look at dmesg and the driver; a GPU may have fallen off the bus")
    kinds = ", ".join(sorted({f"{gpu.name} {amount(gpu.total)}" for gpu in found}))
    yield Row("devices", f"{len(found)} x {kinds}, driver {found[0].driver}, {cores} CPU cores" if found else f"{cores} CPU cores, no NVIDIA GPU")
    if found and local_world > len(found):
        chosen = " that CUDA_VISIBLE_DEVICES names" if "CUDA_VISIBLE_DEVICES" in os.environ else ""
        yield Problem(f"{local_world} ranks", f"this host has {len(found)} GPUs{chosen}", f"start {len(found)} ranks or fewer on it")
    for gpu in found[:local_world]:
        if gpu.used > gpu.total // 10:
            held = f"another process holds {amount(gpu.used)} of {amount(gpu.total)}"
            yield Problem(f"GPU {gpu.number} ({gpu.name})", held, "end it (nvidia-smi shows it), or leave this GPU out")
    needed, who = (NCCL_BUFFERS, "NCCL takes") if found else (CPU_BUFFERS * local_world, f"DeepSpeed's CPU collectives of {local_world} ranks take")
    yield from check_shared_memory(Path("/dev/shm"), needed, who)


def check_shared_memory(folder: Path, needed: int, who: str) -> Findings:
    """Room of `needed` bytes; `who` begins the sentence that says what for."""
    if not folder.is_dir():
        yield Problem(str(folder), "is not there, and the ranks of a host talk through it", f"mount -t tmpfs tmpfs {folder}")
        return
    use = shutil.disk_usage(folder)
    yield Row("shared memory", f"{amount(use.free)} of {amount(use.total)} free")
    if use.free < needed:
        fix = "start the container with --shm-size=1g (Kubernetes: an emptyDir with medium: Memory), or remove what is left over in it"
        yield Problem(f"{folder}: {amount(use.free)} of {amount(use.total)} free", f"{who} {amount(needed)}", fix)


def extensions() -> Path:
    """Where the recipes keep compiled ops."""
    repository = Path(__file__).resolve().parents[2]
    default = repository / ".cache" if (repository / "ds_configs").is_dir() else Path.home() / ".cache"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", default / "torch_extensions"))


def check_toolchain(ops: list[str]) -> Findings:
    """What compiling DeepSpeed's `ops` needs, and locks that an earlier compile has left."""
    cache = extensions()
    compiled = [op for op in ops if any(cache.glob(f"**/{op}.so"))]
    missing = [op for op in ops if op not in compiled]
    compiler = os.environ.get("CXX", "c++")
    if missing and not shutil.which(compiler):
        yield Problem(f"compiler {compiler}", f"is not there to compile {', '.join(missing)}", "install one (Debian: apt-get install g++), or set CXX")
    elif "async_io" in missing and not _links_libaio(compiler):
        yield Problem(
            "libaio", "async_io, which NVMe offload needs, does not compile without it", "install libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora)"
        )
    elif "async_io" in compiled and not _loads("libaio.so.1"):
        yield Problem("libaio", "async_io, which NVMe offload needs, does not load without it", "install libaio1 (Debian, Ubuntu) or libaio (Fedora)")
    for lock in sorted(cache.glob("**/lock")):
        if not _open_somewhere(lock):
            rule = "left by a compile that was killed (no process of this host has it open); every later compile waits for it for ever"
            yield Problem(f"{lock}, {_age(lock)} old", rule, f"rm -f {lock}")


def _links_libaio(compiler: str) -> bool:
    program = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }"
    command = [compiler, "-x", "c++", "-", "-o", os.devnull, "-laio"]
    return subprocess.run(command, input=program, capture_output=True, text=True, timeout=60, check=False).returncode == 0


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _open_somewhere(path: Path) -> bool:
    """True if a process of this host has the file open, as torch 2.13 keeps its lock while it compiles (FileBaton)."""
    wanted = path.stat()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.path.samestat(link.stat(), wanted):
                return True
    return False


def _age(path: Path) -> str:
    minutes = max(0.0, time.time() - path.stat().st_mtime) / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"


def check_out(out: Path, mark: str | None) -> Findings:
    """The run folder can be written and locked, and is the one in which rank 0 has left `mark`."""
    there = existing(out)
    where = f"out = {out}"
    if os.path.isfile(out):
        yield Problem(where, "is a file", "choose a folder with --out")
        return
    try:
        with tempfile.TemporaryFile(dir=there, prefix=".doctor_") as file:
            file.write(bytes(PROBE))
            file.flush()
            os.fsync(file.fileno())
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                yield Problem(where, f"its file system has no file locks ({error.strerror})", "mount it with them (Lustre: -o flock), or choose another folder")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = amount(shutil.disk_usage(there).free)
            yield Problem(where, f"{there} is full ({error.strerror}, {free} free)", "free space, or choose a folder on another disk with --out")
        else:
            yield Problem(where, f"{there} cannot be written: {error.strerror}", "choose a folder of yours with --out")
    yield Row("out", f"{out.absolute()} ({file_system(there) or 'unknown file system'}, {amount(shutil.disk_usage(there).free)} free)")
    if mark and not os.path.exists(there / mark):
        yield Problem(where, f"{there} is not the folder that rank 0 writes to: its mark {mark} is not in it", "give a folder that all hosts share with --out")


def check_drive(folder: Path) -> Findings:
    """How fast the NVMe folder writes and reads, past the page cache where the file system allows it."""
    there = existing(folder)
    block = mmap.mmap(-1, 16 << 20)  # aligned, as O_DIRECT wants it
    block.write(os.urandom(1 << 20) * 16)
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".doctor_") as file:
            try:
                descriptor, past_cache = os.open(file.name, os.O_RDWR | os.O_DIRECT), True
            except OSError:
                descriptor, past_cache = os.open(file.name, os.O_RDWR), False
            begun = time.perf_counter()
            for _ in range(16):
                os.write(descriptor, block)
            os.fsync(descriptor)
            written = time.perf_counter()
            os.lseek(descriptor, 0, os.SEEK_SET)
            while os.readv(descriptor, [block]):
                pass
            read = time.perf_counter()
            os.close(descriptor)
    except OSError as error:
        yield Problem(f"nvme_path = {folder}", f"{there} cannot be written: {error.strerror}", "write the folder of a local drive with room")
        return
    writes, reads = (16 * len(block) / seconds / 1e9 for seconds in (written - begun, read - written))
    cached = "" if past_cache else ", through the page cache"
    yield Row("NVMe", f"{there} ({file_system(there)}): writes {writes:.2f} GB/s, reads {reads:.2f} GB/s{cached}, {amount(shutil.disk_usage(there).free)} free")
    if min(writes, reads) < SLOWEST_DRIVE:
        rule = f"writes {writes:.2f} GB/s and reads {reads:.2f} GB/s: below {SLOWEST_DRIVE} GB/s every step waits for it"
        yield Problem(f"nvme_path = {folder}", rule, "write the folder of a local NVMe drive")


def check_wandb(recipe: Recipe | None) -> Findings:
    """A login, where W&B is to record online."""
    mode = os.environ.get("WANDB_MODE", "")
    if (recipe and not recipe.wandb) or mode not in ("", "online", "shared"):
        yield Row("W&B", mode or "off")
        return
    try:
        import wandb
        from wandb.sdk.lib import wbauth
    except ImportError:
        return  # `check_versions` tells
    try:
        host = wandb.setup().settings.base_url
        known = wbauth.authenticate_session(host=host, source="doctor", prompt=False, update_session=False) is not None
    except (wandb.Error, ValueError) as error:  # its text may hold a part of the key
        yield Problem("W&B login", f"cannot be used ({type(error).__name__})", "wandb login --relogin, or set WANDB_API_KEY")
        return
    yield Row("W&B", "logged in" if known else "not logged in: records offline")
    if mode and not known:
        yield Problem(f"WANDB_MODE = {mode}", "this host is not logged in to W&B", "wandb login, or set WANDB_API_KEY, or WANDB_MODE=offline")


def check_hub(recipe: Recipe | None, patience: float = 10.0) -> Findings:
    """The right to download the model, where it is not on this host."""
    try:
        from huggingface_hub import constants, get_token
    except ImportError:
        return  # `check_versions` tells
    token = get_token()
    if recipe is None or recipe.init == "random" or is_local(recipe) or constants.HF_HUB_OFFLINE:
        yield Row("Hugging Face", f"{'' if token else 'not '}logged in, no model to download")
        return
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{constants.ENDPOINT}/api/models/{recipe.model}/auth-check", headers=headers)
    answer: list[str] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(request, timeout=patience):
                answer.append("")
        except urllib.error.HTTPError as error:
            answer.append(error.headers.get("X-Error-Code") or str(error.code))
        except (OSError, ValueError) as error:
            answer.append(f"unreachable: {getattr(error, 'reason', error)}")

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(patience)  # a name server that is silent takes longer than any timeout
    found = answer[0] if answer else f"unreachable: no answer within {patience:.0f} s"
    page = f"https://huggingface.co/{recipe.model}"
    yield Row("Hugging Face", f"{'' if token else 'not '}logged in, {recipe.model} {'may be read' if not found else 'may not be read'}")
    if found.startswith("unreachable"):
        yield Problem(
            f"model = {recipe.model}", f"is not on this host, and the hub is {found}", f"download it where there is a network: hf download {recipe.model}"
        )
    elif found == "GatedRepo":
        fix = f"ask for access at {page}, then `hf auth login`"
        yield Problem(f"model = {recipe.model}", "is gated, and this host is not logged in with an account that may read it", fix)
    elif found:
        yield Problem(f"model = {recipe.model}", f"does not exist at {page}, or is private ({found})", "check the name; if it is right, `hf auth login`")


def check_port(port: int) -> Findings:
    """The master port, on which rank 0 lets the others join; torchrun itself holds it already."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield Row("master port", f"{port}, held by torchrun")
        return
    try:
        with socket.create_server(("", port)):
            yield Row("master port", f"{port} is free")
    except (OSError, OverflowError) as error:
        why = "is in use" if getattr(error, "errno", 0) == errno.EADDRINUSE else f"cannot be used ({error})"
        yield Problem(
            f"master port {port}", f"{why} on {socket.gethostname()}", f"choose another with --master_port (`ss -ltnp 'sport = :{port}'` shows who has it)"
        )


def free_memory() -> int:
    """Bytes that this host can still give to processes."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) * 1024 if found else 0


def to_json(findings: Findings) -> list[Any]:
    """Rows as two, problems as three strings."""
    return json.loads(json.dumps([list(item) if isinstance(item, Row) else [item.where, item.rule, item.fix] for item in findings]))


def from_json(items: list[Any]) -> list[Row | Problem]:
    return [Row(*item) if len(item) == 2 else Problem(*item) for item in items]
