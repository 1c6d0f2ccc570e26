"""Rank and world size of this process, from the variables that its launcher set.

This module imports nothing heavy.
"""

import contextlib
import hashlib
import os
import re
import socket
import subprocess
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError, Problem, config_error
from .starters import RANK_ONLY, SRUN, STARTERS, Starter

# Slurm reserves step numbers from this one upward for the batch script, salloc's shell and others.
FIRST_RESERVED_STEP = 0xFFFFFF00
# This range is below Linux's ephemeral ports and below 29500.
FIRST_PORT, NUM_PORTS = 20000, 9000
LAUNCH_FIX = (
    "python -m launch recipes/NAME.py (launch/README.md), which starts the ranks of all hosts"
)
LAUNCHER_COUNT_VARIABLES = ("CROSS_SIZE", "GROUP_WORLD_SIZE")  # set by deepspeed and torchrun
RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
RANK_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")


@dataclass(frozen=True)
class ProcessRank:
    """Rank and world size of a process that a scheduler started.

    `address` is "" if the scheduler's variables do not contain rank 0's address.
    """

    starter: Starter
    rank: int
    world: int
    local_rank: int | None
    local_ranks: int | None
    address: str


def take_rank(variables: MutableMapping[str, str], joined: bool = False) -> list[str]:
    """Set RANK, WORLD_SIZE and related variables for a process of srun or mpirun.

    Return a line that reports the rank, or [] if no variable was set. Variables that a launcher or
    the user has set are kept. Blank variables are removed, as if they were not set. `joined` is
    True if the process is already in its process group.

    Raise `ConfigError` if the variables contradict each other, or if this process would train
    without the others.
    """
    for name in (*RANK_VARIABLES, *RENDEZVOUS_VARIABLES):
        if name in variables and not variables[name].strip():
            del variables[name]
    place = process_rank_of(variables)
    if "RANK" in variables or place is None:
        if (
            problems := check_launcher_variables(variables, joined)
            or check_launchers(variables, place)
            or check_smaller_job(variables, place)
        ):
            raise ConfigError(problems)
        return []
    if problems := check_numbers(variables):
        raise ConfigError(problems)
    _check_process_rank(place, variables)

    numbers = _rank_variables(place, variables)
    variables.update(numbers)
    if place.local_ranks:
        variables.setdefault("LOCAL_WORLD_SIZE", str(place.local_ranks))
    return [
        f"{place.starter.name}: rank and world come from its variables. {place.world} ranks meet at"
        f" {numbers['MASTER_ADDR']}:{numbers['MASTER_PORT']}"
    ]


def _check_process_rank(place: ProcessRank, variables: Mapping[str, str]) -> None:
    """Raise `ConfigError` for a different job's world size, or for the terminal of srun --pty."""
    where = f"{place.starter.name}, rank {place.rank} of {place.world}"
    given = variables.get("WORLD_SIZE", str(place.world))
    if given != str(place.world):
        raise config_error(where, f"contradicts WORLD_SIZE = {given}", "unset WORLD_SIZE")
    if _has_terminal(variables):
        fix = f"start the terminal with srun --pty --ntasks=1, or use {LAUNCH_FIX}"
        raise config_error(
            where, "srun --pty gives a terminal to one of its tasks and ends the others", fix
        )


def _rank_variables(place: ProcessRank, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which this process joins the others.

    Raise `ConfigError` if the rank on this host or the host of rank 0 is unknown.
    """
    where = f"{place.starter.name}, rank {place.rank} of {place.world}"
    local_rank = variables.get("LOCAL_RANK") or place.local_rank
    if local_rank is None:
        fix = f"set LOCAL_RANK for each process, or use {LAUNCH_FIX}"
        raise config_error(where, "its variables do not give the rank on this host", fix)
    address = variables.get("MASTER_ADDR") or place.address
    if not address:
        fix = (
            f"set MASTER_ADDR to the first host and MASTER_PORT for all ranks, or use {LAUNCH_FIX}"
        )
        raise config_error(where, "its variables do not give the host of rank 0", fix)
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": variables.get("MASTER_PORT")
        or str(_rendezvous_port(place.starter, variables)),
    }


def process_rank_of(variables: Mapping[str, str]) -> ProcessRank | None:
    """Return the rank and world size of a process that is one of several.

    Return None if the process is the only one, or if no scheduler started it. Raise `ConfigError`
    if a variable shows that there are several processes but no variable contains their number.
    """
    known = False
    for starter in STARTERS:
        numbers = [
            variables.get(name, "") for name in (starter.rank, _world_name(starter, variables))
        ]
        if starter.local_rank and starter.local_rank not in variables and starter.name == "mpiexec":
            continue  # the variable belongs to a different mpiexec
        if not all(number.isdecimal() for number in numbers) or (
            starter is SRUN and not _is_step(variables)
        ):
            continue
        known = True
        rank, world = map(int, numbers)
        if world > 1:
            return (
                _srun_process_rank(rank, world, variables)
                if starter is SRUN
                else _mpi_process_rank(starter, rank, world, variables)
            )
    if (
        not known
        and (name := next((name for name in RANK_ONLY if name in variables), ""))
        and "RANK" not in variables
    ):
        fix = (
            "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process, or"
            f" use {LAUNCH_FIX}"
        )
        raise config_error(
            f"{name} = {variables[name]}",
            "this process is one of several, and no variable gives their number",
            fix,
        )
    return None


def check_launcher_variables(variables: Mapping[str, str], joined: bool) -> list[Problem]:
    """Return problems for launcher variables that are contradictory or left over from a past job.

    With such variables, the run would wait for ranks that nobody starts.
    """
    if wrong := check_numbers(variables):
        return wrong
    numbers = {name: variables[name] for name in RANK_VARIABLES if variables.get(name, "")}
    world, rank = int(numbers.get("WORLD_SIZE", "1")), int(numbers.get("RANK", "0"))
    if world > 1 and "RANK" not in numbers:
        fix = (
            f"unset WORLD_SIZE to train on 1 rank (a dry run takes --world {world}), or start the"
            f" ranks with {LAUNCH_FIX}"
        )
        return [
            Problem(
                f"WORLD_SIZE = {world}", "RANK is not set, so no launcher has set WORLD_SIZE", fix
            )
        ]
    if rank >= world:
        rule = (
            f"must be below WORLD_SIZE = {world}"
            if "WORLD_SIZE" in numbers
            else "WORLD_SIZE is not set"
        )
        return [
            Problem(
                f"RANK = {rank}", rule, "unset RANK to train on 1 rank, or let a launcher set both"
            )
        ]
    missing = [name for name in RENDEZVOUS_VARIABLES if not variables.get(name)]
    if world > 1 and missing and not joined:
        rule = f"{' and '.join(missing)} must be set, or the ranks cannot meet"
        fix = f"unset RANK and WORLD_SIZE to train on 1 rank, or use {LAUNCH_FIX}"
        return [Problem(f"RANK = {rank}, WORLD_SIZE = {world}", rule, fix)]
    return []


def check_numbers(variables: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each launcher variable that is out of range or not a number."""
    numbers = {name: variables[name] for name in RANK_VARIABLES if variables.get(name, "")}
    return [
        Problem(
            f"{name} = {text[:20]}{'...' if len(text) > 20 else ''}",
            "must be a number, as a launcher sets it",
            f"unset {name}",
        )
        for name, text in numbers.items()
        if not text.isdecimal() or len(text) > 9 or (text == "0" and name in RANK_VARIABLES[::3])
    ]


def check_smaller_job(variables: Mapping[str, str], place: ProcessRank | None) -> list[Problem]:
    """Return a problem for an srun or mpirun process whose RANK belongs to a smaller job.

    Otherwise each process would train separately.
    """
    world = int(variables.get("WORLD_SIZE", "1"))
    if (
        place is None
        or world >= place.world
        or any(name in variables for name in LAUNCHER_COUNT_VARIABLES)
    ):
        return []
    name, world_name = place.starter.name, _world_name(place.starter, variables)
    left_over = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in variables]
    rule = (
        f"{name} has started {place.world} processes, and this RANK is one of {world}: each would"
        " start a separate run"
    )
    return [
        Problem(
            f"RANK = {variables['RANK']}",
            rule,
            f"unset {' '.join(left_over)}. For separate runs unset {world_name}",
        )
    ]


def check_launchers(variables: Mapping[str, str], place: ProcessRank | None) -> list[Problem]:
    """Return a problem if srun or mpirun started several launchers, which start separate runs.

    LAUNCHER_COUNT_VARIABLES contain the number of launchers that have found each other.
    """
    launchers = next(filter(None, map(variables.get, LAUNCHER_COUNT_VARIABLES)), None)
    if place is None or launchers != "1" or _has_terminal(variables):
        return []
    name, count = place.starter.name, place.world
    rule = f"has started {count} launchers, and each would start a separate run"
    fix = (
        f"start one launcher with {name} -n 1, start the recipe itself with {name} -n RANKS, or use"
        f" {LAUNCH_FIX}"
    )
    return [
        Problem(
            name, rule, f"{fix}. For separate runs unset {_world_name(place.starter, variables)}"
        )
    ]


def _world_name(starter: Starter, variables: Mapping[str, str]) -> str:
    return "SLURM_NTASKS" if starter is SRUN and starter.world not in variables else starter.world


def _is_step(variables: Mapping[str, str]) -> bool:
    """Return True for an srun task.

    A batch script is a single process, even if SLURM_NTASKS is larger than 1.
    """
    step = variables.get("SLURM_STEP_ID", "")
    if step.isdecimal():
        return int(step) < FIRST_RESERVED_STEP
    return variables.get("SLURM_PROCID") != "0"


def _has_terminal(variables: Mapping[str, str]) -> bool:
    return "SLURM_PTY_PORT" in variables and variables.get(SRUN.world, "1") != "1"


def _srun_process_rank(rank: int, world: int, variables: Mapping[str, str]) -> ProcessRank:
    """Return the rank of an srun task.

    Raise `ConfigError` if the tasks on a host do not have consecutive ranks.
    """
    tasks = _tasks_per_host(
        variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE", "")
    )
    host, local_rank = (
        _parse_number(variables.get("SLURM_NODEID", "0")),
        _parse_number(variables.get("SLURM_LOCALID")),
    )
    if sum(tasks) != world or host is None or host >= len(tasks):
        return ProcessRank(SRUN, rank, world, local_rank, None, "")
    first = sum(tasks[:host])
    # Check all ranks on this host, so that the host's first rank also raises the error.
    here = variables.get("SLURM_GTIDS", "")
    neighbours = not here or here == ",".join(map(str, range(first, first + tasks[host])))
    if not neighbours or (local_rank is not None and first + local_rank != rank):
        fix = "start it with srun --distribution=block"
        raise config_error(f"srun, rank {rank}", "the ranks of a host must be neighbours", fix)
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    address = "127.0.0.1" if len(tasks) == 1 else _first_address(nodes)
    return ProcessRank(SRUN, rank, world, local_rank, tasks[host], address)


def _mpi_process_rank(
    starter: Starter, rank: int, world: int, variables: Mapping[str, str]
) -> ProcessRank:
    """Return the rank of a process started by mpirun or a similar program.

    The variables of these programs contain no address. If the job has several hosts, the address is
    "".
    """
    local_rank = _parse_number(variables.get(starter.local_rank))
    local_ranks = _parse_number(variables.get(starter.local_ranks))
    if starter.hosts and variables.get(starter.hosts) == "1":
        local_ranks = world
    if (
        None not in (local_rank, local_ranks)
        and local_ranks != world
        and rank % (local_ranks or 1) != local_rank
    ):
        rule = (
            "the ranks of a host must be neighbours, as many on each host. This is rank"
            f" {local_rank} of {local_ranks} here"
        )
        raise config_error(
            f"{starter.name}, rank {rank} of {world}",
            rule,
            "start it with --map-by slot, and as many ranks on each host",
        )
    return ProcessRank(
        starter, rank, world, local_rank, local_ranks, "127.0.0.1" if local_ranks == world else ""
    )


def _parse_number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _tasks_per_host(tasks: str) -> list[int]:
    """Return the number of tasks on each host, or [] if the text has a different format.

    For example, 2(x2),1 means 2, 2 and 1.
    """
    found: list[int] = []
    for part in tasks.split(","):
        if not (match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)):
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _first_address(nodes: str) -> str:
    """Return the first host in a Slurm list such as n[01-04,7],m1.

    The result is the host's name, or the address from Slurm if the name cannot be resolved.
    """
    if not (first := re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)):
        return ""
    name = re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", first[0])
    with contextlib.suppress(OSError):
        socket.getaddrinfo(name, None)
        return name
    try:
        words = ["scontrol", "show", "node", "--oneliner", name]
        told = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return name
    return found[1] if (found := re.search(r"\bNodeAddr=(\S+)", told)) else name


def _rendezvous_port(starter: Starter, variables: Mapping[str, str]) -> int:
    """Return the port on which a job's ranks meet.

    Every rank computes the same port. Different jobs on a host compute different ports.
    """
    job = (
        f"{variables.get('SLURM_JOB_ID')}.{variables.get('SLURM_STEP_ID')}"
        if starter is SRUN
        else variables.get(starter.job, "")
    )
    return (
        FIRST_PORT
        + int(hashlib.sha256((job or _common_parent(starter)).encode()).hexdigest(), 16) % NUM_PORTS
    )


def _common_parent(starter: Starter) -> str:
    """Return the process that started all ranks of this host.

    This is the nearest ancestor without the rank variable.
    """
    process = os.getppid()
    while process > 1:
        try:
            entries = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            if not any(entry.startswith(f"{starter.rank}=".encode()) for entry in entries):
                break
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return str(process)
