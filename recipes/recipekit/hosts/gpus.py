"""Finds the GPUs of a host that a rank may use, and what keeps the rank from using them.

Imports torch only inside the checks that need it.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from ..spec.refusal import Problem, sentences
from . import torch_builds
from .build_facts import DRIVER, driver
from .findings import Findings, Row, amount

NCCL_BUFFERS = 1 << 30  # bytes of /dev/shm that NCCL's guide asks a container for


class Gpu(NamedTuple):
    """Describes an NVIDIA GPU; `number` as nvidia-smi counts."""

    number: int
    uuid: str
    name: str
    total: int  # bytes
    used: int  # bytes
    driver: str


def gpus() -> list[Gpu]:
    """Lists the NVIDIA GPUs that a rank started here may use, in the order of its local ranks:
    those of CUDA_VISIBLE_DEVICES where it is set.

    Raises OSError if nvidia-smi is there and does not answer.
    """
    if not (program := shutil.which("nvidia-smi")):
        return []
    query = [
        program,
        "--query-gpu=index,uuid,name,memory.total,memory.used,driver_version",
        "--format=csv,noheader,nounits",
    ]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        fields = [[word.strip() for word in line.split(",")] for line in told.splitlines()]
        found = [
            Gpu(int(number), uuid, name, int(total) << 20, int(used) << 20, driver)
            for number, uuid, name, total, used, driver in fields
        ]
    except (subprocess.SubprocessError, ValueError) as error:
        raise OSError(" ".join(str(error).split())) from None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or "MIG-" in visible:  # parts of GPUs, which this query does not list
        return found
    chosen = []
    for word in map(str.strip, visible.split(",")):
        match = [
            gpu
            for gpu in found
            if word == str(gpu.number) or (word.startswith("GPU-") and gpu.uuid.startswith(word))
        ]
        if len(match) != 1:
            break  # as CUDA does: devices after one that does not exist are not seen
        chosen += match
    return chosen


def check_devices(local_world: int) -> Findings:
    """Checks that this host has a free GPU for each of its ranks, and room in /dev/shm for the
    messages between them.
    """
    cores = os.cpu_count() or 1
    try:
        found = gpus()
    except OSError as error:
        found = []
        yield Problem(
            "nvidia-smi",
            f"does not respond correctly ({error})",
            "check dmesg and the driver, because a GPU may have fallen off the bus",
        )
    kinds = ", ".join(sorted({f"{gpu.name} {amount(gpu.total)}" for gpu in found}))
    yield Row(
        "devices",
        (
            f"{len(found)} x {kinds}, driver {found[0].driver}, {cores} CPU cores"
            if found
            else f"{cores} CPU cores, no NVIDIA GPU"
        ),
    )
    if found and local_world > len(found):
        chosen = " that CUDA_VISIBLE_DEVICES names" if "CUDA_VISIBLE_DEVICES" in os.environ else ""
        yield Problem(
            f"{local_world} ranks",
            f"this host has {len(found)} GPUs{chosen}",
            f"start {len(found)} ranks or fewer on it",
        )
    for gpu in found[:local_world]:
        if gpu.used > gpu.total // 10:
            held = f"another process holds {amount(gpu.used)} of {amount(gpu.total)}"
            yield Problem(
                f"GPU {gpu.number} ({gpu.name})",
                held,
                "end that process (nvidia-smi lists it), or leave this GPU out",
            )
    if found:  # ranks on a CPU take none
        yield from check_shared_memory(Path("/dev/shm"))


# first words of CUDA_VISIBLE_DEVICES with which users and containers choose the CPU
NO_GPU = ("", "-1", "none", "void")


def check_gpus_seen(devices: Path = Path("/dev"), told: Path = DRIVER) -> list[Problem]:
    """Refuses GPUs of this host that torch does not see: the run would silently train on the CPU. A
    wish for the CPU is honoured.
    """
    there = [path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    # the first word decides whether CUDA sees any
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    if not there or os.environ.get("DS_ACCELERATOR") == "cpu" or visible in NO_GPU:
        return []
    if visible == "NoDevFiles":
        fix = (
            "request GPUs with sbatch --gpus-per-node=N. To train on the CPU set"
            ' CUDA_VISIBLE_DEVICES=""'
        )
        return [
            Problem(
                "CUDA_VISIBLE_DEVICES = NoDevFiles",
                "Slurm gave this job none of the GPUs of its host",
                fix,
            )
        ]
    import torch

    if torch.accelerator.is_available():
        return []
    where = (
        f"torch {torch.__version__}"
        f" ({f'CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'})"
    )
    to_train_without = 'to train on the CPU set CUDA_VISIBLE_DEVICES=""'
    if (version := driver(told)) is None:
        rule = f"sees none of the {len(there)} GPUs of this host, whose driver is not loaded"
        return [
            Problem(
                where, rule, sentences("load it (nvidia-smi, modprobe nvidia)", to_train_without)
            )
        ]
    models = torch_builds.gpu_models(told.with_name("gpus"))
    rule = (
        f"sees none of the {len(there)} GPUs of this host{f' ({models[0]})' if models else ''},"
        f" driver {version}"
    )
    return [
        Problem(
            where,
            rule,
            sentences(torch_builds.advice(version, models, torch.version.cuda), to_train_without),
        )
    ]


def check_ordinal(local_rank: int) -> list[Problem]:
    """Refuses a rank without a GPU of its own on this host.

    DeepSpeed 0.19.8 takes LOCAL_RANK for the number of the GPU (comm/torch.py, engine.py,
    zero.Init).
    """
    if not torch_builds.gpus_in_use():
        return []
    import torch

    count, variables = torch.cuda.device_count(), os.environ
    # set by torchrun and `python -m launch`; by deepspeed; by srun that started each rank: 8(x2)
    # means 8 on each of 2 hosts
    by_slurm = (
        variables.get("SLURM_STEP_TASKS_PER_NODE", "")
        if variables.get("SLURM_LOCALID") == str(local_rank)
        else ""
    )
    told = (
        variables.get("LOCAL_WORLD_SIZE")
        or variables.get("LOCAL_SIZE")
        or by_slurm.partition("(")[0]
    )
    ranks = max(local_rank + 1, int(told) if told.isdigit() else 0)
    if ranks <= count:
        return []
    seen = (
        f"{ranks} ranks on this host, and rank {local_rank} of it sees {count}"
        f" GPU{'s' if count > 1 else ''}"
    )
    fix = (
        "let every rank see all GPUs: leave out srun's --gpus-per-task and --gpu-bind (give"
        " --gpus-per-node), and set no CUDA_VISIBLE_DEVICES for single ranks"
    )
    return [
        Problem(
            seen,
            "each rank uses the GPU with its own number, and must also see the other GPUs for"
            " direct copies",
            f"{fix}, or start {count} on each host",
        )
    ]


def check_shared_memory(folder: Path, needed: int = NCCL_BUFFERS) -> Findings:
    """Checks that `folder` has `needed` bytes of room for the messages between the GPUs of a
    host.
    """
    if not folder.is_dir():
        yield Problem(
            str(folder),
            "does not exist, but the ranks of a host communicate through it",
            f"run: mount -t tmpfs tmpfs {folder}",
        )
        return
    use = shutil.disk_usage(folder)
    yield Row("shared memory", f"{amount(use.free)} of {amount(use.total)} free")
    if use.free < needed:
        fix = (
            "start the container with --shm-size=1g (Kubernetes: an emptyDir with medium: Memory),"
            " or remove leftover files in it"
        )
        yield Problem(
            f"{folder}: {amount(use.free)} of {amount(use.total)} free",
            f"NCCL requires {amount(needed)}",
            fix,
        )
