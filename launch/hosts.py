"""The place where launch runs, and the job's hosts with their numbers of ranks."""

import codecs
import contextlib
import ipaddress
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .errors import LaunchError

# Safe as one word after `ssh`: never a flag, and without characters that a shell interprets
NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")
DEVICE = re.compile(r"[0-9]+|(?:GPU|MIG)-[0-9A-Za-z/-]+")
SLOTS = re.compile(r"slots=([1-9][0-9]{0,3})", re.ASCII)


# Programs that start processes -> the variable that contains the number of processes
STARTED_BY = (
    ("mpirun", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec", "PMI_SIZE"),
    ("flux run", "FLUX_JOB_SIZE"),
    ("srun", "SLURM_STEP_NUM_TASKS"),
)
ANSWER = 60.0  # seconds within which scontrol must answer
RESERVED_STEPS = 0xFFFFFF00  # step ids from here on do not come from srun (slurm.h)


@dataclass(frozen=True)
class Host:
    """One machine of the job.

    The other hosts reach this machine at `address`. "" means that the machine reports its address
    itself.
    """

    name: str
    slots: int  # ranks
    address: str = ""


def detect(variables: dict[str, str], hostfile: str | None) -> str:
    """Return the place where launch runs: local, hostfile, slurm or k8s."""
    if "SLURM_JOB_ID" in variables:
        return "slurm"
    if "KUBERNETES_SERVICE_HOST" in variables and "JOB_COMPLETION_INDEX" in variables:
        return "k8s"
    return "hostfile" if hostfile else "local"


def check_alone(variables: dict[str, str]) -> None:
    """Raise `LaunchError` if srun or mpirun has started launch several times.

    Otherwise each process would start its own run. A batch script is one process for any number of
    tasks. The same applies to the terminal of `srun --pty`.
    """
    for name, variable in STARTED_BY:
        count = variables.get(variable, "")
        if count.isdecimal() and int(count) > 1 and "SLURM_PTY_PORT" not in variables:
            fix = (
                f"Start launch without {name}, because launch starts the ranks of all hosts itself,"
                " or start the recipe without launch"
            )
            raise LaunchError(f"{name}: has started launch {count} times. {fix}")


def in_step(variables: dict[str, str]) -> bool:
    """Return True for a task that srun started.

    The batch script and the shell of salloc have reserved step ids.
    """
    step = variables.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < RESERVED_STEPS


def read_hostfile(path: Path, most: int | None = None, gpus: int | None = None) -> list[Host]:
    """Read the hosts of a DeepSpeed hostfile (`NAME slots=N`, `#` starts a comment).

    The file must have at least `most` hosts. `gpus` replaces the slots. Raises `LaunchError` with
    the number of every wrong line.
    """
    try:
        text = decoded(path.read_bytes())
    except OSError as error:
        raise LaunchError(
            f"--hostfile {path}: {error.strerror}. Give a file in the format of"
            " launch/hostfile.example"
        ) from None
    hosts: list[Host] = []
    lines: dict[str, int] = {}
    problems = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = SLOTS.fullmatch(words[1]) if len(words) == 2 else None
        name = same_name(words[0])
        if slots is None or not name or name in lines:
            wrong = _wrong_line(words, name, lines.get(name))
            problems.append(f"{path}, line {number}: {line.strip()!r}: {wrong}")
        else:
            lines[name] = number
            hosts.append(Host(words[0], gpus or int(slots[1])))

    if not hosts and not problems:
        problems.append(
            f"--hostfile {path}: contains no host. Write lines in the format of"
            " launch/hostfile.example"
        )
    if most and most > len(hosts) and not problems:
        problems.append(
            f"--nodes {most}: {path} has {len(hosts)} hosts. Use --nodes {len(hosts)} or add hosts"
        )
    if problems:
        raise LaunchError(*problems)
    return hosts


def _wrong_line(words: list[str], name: str, before: int | None) -> str:
    """Return the rule that a line in a hostfile breaks, with its fix.

    `name` is "" if the first word is not a host name. `before` is the number of an earlier line
    with the same host.
    """
    if ":" in words[0] and not name:
        return (
            f"{words[0]!r} is not an IPv6 address. Write it without brackets, zone and port, for"
            " example: fd00::1 slots=8"
        )
    if not name:
        return (
            f"{words[0]!r} is not a host name or an address. Write letters, digits, dots and"
            " hyphens, for example: worker-1 slots=8"
        )
    if before is not None and len(words) == 2 and SLOTS.fullmatch(words[1]):
        return f"the host is already on line {before}. List it once, with all its slots"
    return f"must have the form NAME slots=NUMBER. Write for example: {words[0]} slots=8"


def decoded(data: bytes) -> str:
    """Decode a text file.

    Windows editors and shells write a byte order mark, or UTF-16. Concatenated files may contain
    several marks.
    """
    for mark, encoding in ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")):
        if data.startswith(mark):
            return data.decode(encoding, "replace").replace("\ufeff", "")
    return data.decode(errors="replace").replace("\ufeff", "")


def same_name(word: str) -> str:
    """Return a host name in lower case, or an IPv6 address in its shortest form.

    The result is "" for anything else.
    """
    if NAME.fullmatch(word):
        return word.lower()
    with contextlib.suppress(ValueError):
        return "" if "%" in word else str(ipaddress.IPv6Address(word))
    return ""


def devices(variables: dict[str, str]) -> int:
    """Count the GPUs that a process started here would see."""
    if "CUDA_VISIBLE_DEVICES" in variables:
        return len(visible_devices(variables["CUDA_VISIBLE_DEVICES"]))
    return len(
        [
            path
            for path in Path("/dev").glob("nvidia*")
            if path.name.removeprefix("nvidia").isdigit()
        ]
    )


def visible_devices(listed: str) -> list[str]:
    """Return the devices that CUDA reads from CUDA_VISIBLE_DEVICES.

    They are all words before the first word that is not a device, such as -1, NoDevFiles (from
    Slurm) and none or void (from containers).
    """
    found = []
    for word in map(str.strip, listed.split(",")):
        if not DEVICE.fullmatch(word):
            break
        found.append(word)
    return found


def slurm_hosts(variables: dict[str, str], gpus: int | None) -> list[Host]:
    """List the nodes of this process's Slurm allocation, with the addresses that Slurm itself uses.

    Raises `LaunchError` if Slurm does not answer or if a node's name is not a host name.
    """
    names = scontrol("show", "hostnames", variables.get("SLURM_JOB_NODELIST", "")).split()
    if strange := [name for name in names if not NAME.fullmatch(name)]:
        raise LaunchError(
            f"SLURM_JOB_NODELIST: {strange[0]!r} is not a host name. Start the job with sbatch"
        )
    found = {}
    for line in scontrol("show", "node", "--oneliner", ",".join(names)).splitlines():
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        found[words.get("NodeName", "")] = words.get("NodeAddr", "")
    slots = gpus or int(variables.get("SLURM_GPUS_ON_NODE") or 0) or devices(variables) or 1
    return [Host(name, slots, found.get(name) or name) for name in names]


def scontrol(*words: str) -> str:
    """Return the output of scontrol. Raises `LaunchError` if the command fails."""
    asked = f"scontrol {' '.join(words)}"
    try:
        return subprocess.run(
            ["scontrol", *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=ANSWER,
            env=os.environ | {"LC_ALL": "C"},
        ).stdout
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"--where slurm: {asked} did not answer in {error.timeout:g} s. Check slurmctld with"
            " `scontrol ping`"
        ) from None
    except subprocess.CalledProcessError as error:
        raise LaunchError(
            f"--where slurm: {asked} failed: {error.stderr.strip()}. Start the job with sbatch"
        ) from None
    except OSError as error:
        raise LaunchError(
            f"--where slurm: scontrol cannot be started: {error.strerror}. Start the job on a"
            " machine of the cluster"
        ) from None
