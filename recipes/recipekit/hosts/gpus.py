"""The host's GPUs that a rank may use, and checks that the rank can use them.

This module imports torch only inside the checks that need it.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from ..spec.errors import Problem, sentences
from . import torch_builds
from .build_info import DRIVER_VERSION_FILE, nvidia_driver_version
from .findings import Findings, ReportRow, format_bytes

NCCL_SHM_BYTES = 1 << 30  # bytes of /dev/shm that NCCL's guide requires in a container


class Gpu(NamedTuple):
    """An NVIDIA GPU. `device_index` is its index in nvidia-smi."""

    device_index: int
    uuid: str
    name: str
    total_bytes: int  # bytes
    used_bytes: int  # bytes
    driver: str


def visible_gpus() -> list[Gpu]:
    """List the NVIDIA GPUs that a rank started here may use, in the order of local ranks.

    If CUDA_VISIBLE_DEVICES is set, the list contains only its GPUs. Raise OSError if nvidia-smi
    exists but does not respond.
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
    if visible is None or "MIG-" in visible:  # MIG partitions, which this query does not list
        return found
    chosen = []
    for word in map(str.strip, visible.split(",")):
        match = [
            gpu
            for gpu in found
            if word == str(gpu.device_index)
            or (word.startswith("GPU-") and gpu.uuid.startswith(word))
        ]
        if len(match) != 1:
            break  # like CUDA, ignore all devices after one that does not exist
        chosen += match
    return chosen


def check_devices(local_world: int) -> Findings:
    """Check that this host has a free GPU for each of its ranks.

    Also check that /dev/shm has enough space for messages between the ranks.
    """
    cores = os.cpu_count() or 1
    try:
        found = visible_gpus()
    except OSError as error:
        found = []
        yield Problem(
            "nvidia-smi",
            f"does not respond correctly ({error})",
            "check dmesg and the driver, because a GPU may have fallen off the bus",
        )
    kinds = ", ".join(sorted({f"{gpu.name} {format_bytes(gpu.total_bytes)}" for gpu in found}))
    yield ReportRow(
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
        if gpu.used_bytes > gpu.total_bytes // 10:
            held = (
                f"another process holds {format_bytes(gpu.used_bytes)} of"
                f" {format_bytes(gpu.total_bytes)}"
            )
            yield Problem(
                f"GPU {gpu.device_index} ({gpu.name})",
                held,
                "end that process (nvidia-smi lists it), or leave this GPU out",
            )
    if found:  # ranks on a CPU do not use /dev/shm
        yield from check_shared_memory(Path("/dev/shm"))


# First entries of CUDA_VISIBLE_DEVICES with which users and containers select the CPU.
CPU_ONLY_VALUES = ("", "-1", "none", "void")


def check_torch_sees_gpus(
    devices: Path = Path("/dev"), version_file: Path = DRIVER_VERSION_FILE
) -> list[Problem]:
    """Return a problem if torch does not see this host's GPUs.

    Otherwise the run would silently train on the CPU. An explicit request for the CPU is accepted.
    """
    there = [path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    # The first entry decides whether CUDA sees any device.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    if not there or os.environ.get("DS_ACCELERATOR") == "cpu" or visible in CPU_ONLY_VALUES:
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
    if (version := nvidia_driver_version(version_file)) is None:
        rule = f"sees none of the {len(there)} GPUs of this host, whose driver is not loaded"
        return [
            Problem(
                where, rule, sentences("load it (nvidia-smi, modprobe nvidia)", to_train_without)
            )
        ]
    models = torch_builds.gpu_models(version_file.with_name("gpus"))
    rule = (
        f"sees none of the {len(there)} GPUs of this host{f' ({models[0]})' if models else ''},"
        f" driver {version}"
    )
    return [
        Problem(
            where,
            rule,
            sentences(
                torch_builds.torch_build_advice(version, models, torch.version.cuda),
                to_train_without,
            ),
        )
    ]


def check_gpu_of_rank(local_rank: int) -> list[Problem]:
    """Return a problem if this rank does not have a separate GPU on this host.

    DeepSpeed 0.19.8 uses LOCAL_RANK as the GPU number (comm/torch.py, engine.py, zero.Init).
    """
    if not torch_builds.gpus_in_use():
        return []
    import torch

    count, variables = torch.cuda.device_count(), os.environ
    # The number of ranks comes from torchrun and `python -m launch`, from deepspeed, or from srun
    # if it started each rank. srun's 8(x2) means 8 ranks on each of 2 hosts.
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


def check_shared_memory(folder: Path, required: int = NCCL_SHM_BYTES) -> Findings:
    """Check that `folder` has `required` free bytes, for messages between a host's GPUs."""
    if not folder.is_dir():
        yield Problem(
            str(folder),
            "does not exist, but the ranks of a host communicate through it",
            f"run: mount -t tmpfs tmpfs {folder}",
        )
        return
    use = shutil.disk_usage(folder)
    yield ReportRow("shared memory", f"{format_bytes(use.free)} of {format_bytes(use.total)} free")
    if use.free < required:
        fix = (
            "start the container with --shm-size=1g (Kubernetes: an emptyDir with medium: Memory),"
            " or remove leftover files in it"
        )
        yield Problem(
            f"{folder}: {format_bytes(use.free)} of {format_bytes(use.total)} free",
            f"NCCL requires {format_bytes(required)}",
            fix,
        )
