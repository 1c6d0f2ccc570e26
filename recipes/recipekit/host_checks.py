"""What can be wrong with a host before a run starts: each check yields `Row`s (what is there) and `Problem`s. Imports nothing heavy."""

import contextlib
import errno
import fcntl
import importlib.util
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
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any, NamedTuple

from . import op_cache, torch_builds
from .architecture import is_local
from .build_facts import DRIVER, driver
from .ds_config import file_system
from .locks import no_locks
from .ops import check_ops
from .plan import Plan
from .recipe import Recipe
from .refusal import Problem

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
        elif lost := [module for module in _modules(name) if importlib.util.find_spec(module) is None]:
            matching -= 1
            yield Problem(f"{name} {found}", f"is recorded as installed, but {lost[0]} is gone", f"pip install --force-reinstall --no-deps {name}=={pinned}")
    yield Row("packages", f"{matching} of {len(pins)} as {requirements.name} pins them")


def _modules(name: str) -> list[str]:
    """What an installed package is imported as."""
    return (distribution(name).read_text("top_level.txt") or name.replace("-", "_")).split()


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
    """The GPUs, enough for the ranks of this host and free, and room in /dev/shm for the messages between them."""
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
    if found:  # ranks on a CPU take none
        yield from check_shared_memory(Path("/dev/shm"))


def check_start(plan: Plan) -> list[Problem]:
    """What keeps a rank from starting on this host, in seconds: GPUs that torch does not see, too few of them, ops that cannot be compiled, W&B."""
    return [
        *check_gpus_seen(),
        *check_ordinal(plan.command.local_rank),
        *check_master_port(plan.command.rank),
        *check_ops(plan.ds_config),
        *check_wandb_installed(plan.recipe, plan.command.typed),
    ]


def check_gpus_seen(devices: Path = Path("/dev"), told: Path = DRIVER) -> list[Problem]:
    """GPUs of this host that torch does not see, so that a run would train on the CPU without a word; a wish for the CPU is honoured."""
    there = [path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not there or os.environ.get("DS_ACCELERATOR") == "cpu" or (visible is not None and visible.strip() in ("", "-1")):
        return []
    import torch

    if torch.accelerator.is_available():
        return []
    where = f"torch {torch.__version__} ({f'CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'})"
    to_train_without = 'to train on the CPU set CUDA_VISIBLE_DEVICES=""'
    if (version := driver(told)) is None:
        rule = f"sees none of the {len(there)} GPUs of this host, whose driver is not loaded"
        return [Problem(where, rule, f"load it (nvidia-smi, modprobe nvidia); {to_train_without}")]
    models = torch_builds.gpu_models(told.with_name("gpus"))
    rule = f"sees none of the {len(there)} GPUs of this host{f' ({models[0]})' if models else ''}, driver {version}"
    return [Problem(where, rule, f"{torch_builds.advice(version, models, torch.version.cuda)}; {to_train_without}")]


def check_ordinal(local_rank: int) -> list[Problem]:
    """Ranks for which this host has no GPU of their own. DeepSpeed 0.19.8 takes LOCAL_RANK for the number of the GPU (comm/torch.py, engine.py, zero.Init)."""
    if not torch_builds.gpus_in_use():
        return []
    import torch

    count, variables = torch.cuda.device_count(), os.environ
    # torchrun and `python -m launch`; deepspeed; srun, where it started each rank itself: 8(x2) is 8 on each of 2 hosts
    by_slurm = variables.get("SLURM_STEP_TASKS_PER_NODE", "") if variables.get("SLURM_LOCALID") == str(local_rank) else ""
    told = variables.get("LOCAL_WORLD_SIZE") or variables.get("LOCAL_SIZE") or by_slurm.partition("(")[0]
    ranks = max(local_rank + 1, int(told) if told.isdigit() else 0)
    if ranks <= count:
        return []
    seen = f"{ranks} ranks on this host, and rank {local_rank} of it sees {count} GPU{'s' if count > 1 else ''}"
    fix = (
        "let every rank see all GPUs: leave out srun's --gpus-per-task and --gpu-bind (give --gpus-per-node), and set no CUDA_VISIBLE_DEVICES for single ranks"
    )
    return [Problem(seen, "each rank takes the GPU of its number, and needs the others in sight for direct copies", f"{fix}; or start {count} on each host")]


def check_shared_memory(folder: Path, needed: int = NCCL_BUFFERS) -> Findings:
    """Room of `needed` bytes for what the GPUs of a host tell each other through it."""
    if not folder.is_dir():
        yield Problem(str(folder), "is not there, and the ranks of a host talk through it", f"mount -t tmpfs tmpfs {folder}")
        return
    use = shutil.disk_usage(folder)
    yield Row("shared memory", f"{amount(use.free)} of {amount(use.total)} free")
    if use.free < needed:
        fix = "start the container with --shm-size=1g (Kubernetes: an emptyDir with medium: Memory), or remove what is left over in it"
        yield Problem(f"{folder}: {amount(use.free)} of {amount(use.total)} free", f"NCCL takes {amount(needed)}", fix)


def check_toolchain(config: dict[str, Any] | None) -> Findings:
    """What compiling the ops that a JSON needs takes, and marks that a killed compile has left."""
    yield from check_ops(config) if config else []
    for left, who in op_cache.left_over(op_cache.folder()):
        if who or not _open_somewhere(left):
            why = f"on {who} that was killed (nothing has changed beside it since)" if who else "that was killed (no process of this host has it open)"
            yield Problem(f"{left}, {_age(left)} old", f"left by a compile {why}; every later compile waits for it for ever", f"rm -f {left}")


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
                yield no_locks(where, error, "choose a folder on another disk with --out")
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


def check_wandb_installed(recipe: Recipe, typed: frozenset[str]) -> list[Problem]:
    """A wish for W&B without its package; without a wish a run does without it."""
    mode = os.environ.get("WANDB_MODE", "")
    wished = "--wandb" if "wandb" in typed else f"WANDB_MODE = {mode}" if mode in ("online", "shared") else ""
    if not recipe.wandb or not wished or importlib.util.find_spec("wandb"):
        return []
    return [Problem(wished, "the package wandb is not installed", "pip install -r requirements.txt, or leave it out: metrics.jsonl holds the same")]


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
            f"master port {port}",
            f"{why} on {socket.gethostname()}",
            f"choose another with --master_port (`ss -ltnp 'sport = :{port}'` shows who has it)",
        )


def check_master_port(rank: int) -> list[Problem]:
    """The port that a launcher has named for rank 0, if another program has it; without a launcher a free one is taken."""
    if rank or "MASTER_PORT" not in os.environ:
        return []
    if not (port := os.environ["MASTER_PORT"]).isdigit():
        return [Problem(f"MASTER_PORT = {port}", "is no port", "write a number, or leave it out without a launcher")]
    fix = f"choose another, {_free_port(int(port))} say: --master_port of the launcher, or MASTER_PORT (`ss -ltnp 'sport = :{port}'` shows who has it)"
    return [replace(found, fix=fix) for found in check_port(int(port)) if isinstance(found, Problem)]


def _free_port(above: int) -> int:
    """The first port above that nothing has."""
    for port in range(above + 1, min(above + 1000, 1 << 16)):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    return above


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this host, or the container that this process runs in, can still give to processes; None: not known."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text())
    free = [int(found[1]) * 1024] if found else []
    groups = root / "sys/fs/cgroup"
    for limit, used, files in (
        (groups / "memory.max", groups / "memory.current", groups / "memory.stat"),
        (groups / "memory/memory.limit_in_bytes", groups / "memory/memory.usage_in_bytes", groups / "memory/memory.stat"),  # version 1
    ):
        with contextlib.suppress(OSError, ValueError):  # no such limit: "max", or no file
            kept = re.search(r"^(?:total_)?inactive_file (\d+)$", files.read_text(), re.M)  # given back when it is needed
            free.append(int(limit.read_text()) - int(used.read_text()) + (int(kept[1]) if kept else 0))
    return min(free, default=None)


def to_json(findings: Findings) -> list[Any]:
    """Rows as two, problems as three strings."""
    return json.loads(json.dumps([list(item) if isinstance(item, Row) else [item.where, item.rule, item.fix] for item in findings]))


def from_json(items: list[Any]) -> list[Row | Problem]:
    return [Row(*item) if len(item) == 2 else Problem(*item) for item in items]
