"""Rank and world of this process, by the variables of the program that started it.

Imports nothing heavy.
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

from .refusal import Problem, Refusal, refuse
from .starters import RANK_ONLY, SRUN, STARTERS, Starter

# steps of Slurm from here on are the batch script, the shell of salloc, and the like
RESERVED = 0xFFFFFF00
# below the ports that Linux gives to connections, and below 29500
FIRST_PORT, NUM_PORTS = 20000, 9000
LAUNCH = "python -m launch recipes/NAME.py (launch/README.md), which starts the ranks of all hosts"
LAUNCHERS = ("CROSS_SIZE", "GROUP_WORLD_SIZE")  # of deepspeed and of torchrun
MEETING = ("MASTER_ADDR", "MASTER_PORT")
NUMBERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")


@dataclass(frozen=True)
class Place:
    """Rank and world of a process that a scheduler started; `address` is "" if its variables do not
    give it.
    """

    starter: Starter
    rank: int
    world: int
    local_rank: int | None
    local_ranks: int | None
    address: str


def take_rank(variables: MutableMapping[str, str], joined: bool = False) -> list[str]:
    """Set RANK, WORLD_SIZE and what belongs to them for a process of srun or mpirun; return a line
    about it.

    Variables that a launcher or the user has set stay; blank ones are removed, as if they were not
    set. `joined`: the process has its process group already. Raises `Refusal` if the variables
    contradict each other, or if this process would train without the others.
    """
    for name in (*NUMBERS, *MEETING):
        if name in variables and not variables[name].strip():
            del variables[name]
    place = place_of(variables)
    if "RANK" in variables or place is None:
        if (
            problems := check_given(variables, joined)
            or check_launchers(variables, place)
            or check_alone(variables, place)
        ):
            raise Refusal(problems)
        return []
    if problems := check_numbers(variables):
        raise Refusal(problems)
    _check_task(place, variables)

    numbers = _numbers_of(place, variables)
    variables.update(numbers)
    if place.local_ranks:
        variables.setdefault("LOCAL_WORLD_SIZE", str(place.local_ranks))
    return [
        f"{place.starter.name}: rank and world come from its variables. {place.world} ranks meet at"
        f" {numbers['MASTER_ADDR']}:{numbers['MASTER_PORT']}"
    ]


def _check_task(place: Place, variables: Mapping[str, str]) -> None:
    """Raise `Refusal` if a task has the world of another job, or a terminal of its own."""
    where = f"{place.starter.name}, rank {place.rank} of {place.world}"
    given = variables.get("WORLD_SIZE", str(place.world))
    if given != str(place.world):
        raise refuse(where, f"contradicts WORLD_SIZE = {given}", "unset WORLD_SIZE")
    if _has_terminal(variables):
        fix = f"start the terminal with srun --pty --ntasks=1, or use {LAUNCH}"
        raise refuse(
            where, "srun --pty gives a terminal to one of its tasks and ends the others", fix
        )


def _numbers_of(place: Place, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which this process joins the others.

    Raises `Refusal` if the rank on this host or the host of rank 0 is not known.
    """
    where = f"{place.starter.name}, rank {place.rank} of {place.world}"
    local_rank = variables.get("LOCAL_RANK") or place.local_rank
    if local_rank is None:
        fix = f"set LOCAL_RANK for each process, or use {LAUNCH}"
        raise refuse(where, "its variables do not give the rank on this host", fix)
    address = variables.get("MASTER_ADDR") or place.address
    if not address:
        fix = f"set MASTER_ADDR to the first host and MASTER_PORT for all ranks, or use {LAUNCH}"
        raise refuse(where, "its variables do not give the host of rank 0", fix)
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": variables.get("MASTER_PORT") or str(_port(place.starter, variables)),
    }


def place_of(variables: Mapping[str, str]) -> Place | None:
    """Return rank and world of a process that is one of several; None if it is the only one, or if
    no scheduler started it.

    Raises `Refusal` if a variable says that there are several processes, and none says how many.
    """
    known = False
    for starter in STARTERS:
        numbers = [
            variables.get(name, "") for name in (starter.rank, _world_name(starter, variables))
        ]
        if starter.local_rank and starter.local_rank not in variables and starter.name == "mpiexec":
            continue  # the other mpiexec
        if not all(number.isdecimal() for number in numbers) or (
            starter is SRUN and not _is_step(variables)
        ):
            continue
        known = True
        rank, world = map(int, numbers)
        if world > 1:
            return (
                _of_srun(rank, world, variables)
                if starter is SRUN
                else _of_other(starter, rank, world, variables)
            )
    if (
        not known
        and (name := next((name for name in RANK_ONLY if name in variables), ""))
        and "RANK" not in variables
    ):
        fix = (
            "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process, or"
            f" use {LAUNCH}"
        )
        raise refuse(
            f"{name} = {variables[name]}",
            "this process is one of several, and no variable gives their number",
            fix,
        )
    return None


def check_given(variables: Mapping[str, str], joined: bool) -> list[Problem]:
    """Refuse variables of a launcher that contradict each other or are left over: the run would
    wait for ranks that nobody starts.
    """
    if wrong := check_numbers(variables):
        return wrong
    numbers = {name: variables[name] for name in NUMBERS if variables.get(name, "")}
    world, rank = int(numbers.get("WORLD_SIZE", "1")), int(numbers.get("RANK", "0"))
    if world > 1 and "RANK" not in numbers:
        fix = (
            f"unset WORLD_SIZE to train on 1 rank (a dry run takes --world {world}), or start the"
            f" ranks with {LAUNCH}"
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
    missing = [name for name in MEETING if not variables.get(name)]
    if world > 1 and missing and not joined:
        rule = f"{' and '.join(missing)} must be set, or the ranks cannot meet"
        fix = f"unset RANK and WORLD_SIZE to train on 1 rank, or use {LAUNCH}"
        return [Problem(f"RANK = {rank}, WORLD_SIZE = {world}", rule, fix)]
    return []


def check_numbers(variables: Mapping[str, str]) -> list[Problem]:
    """Refuse variables of a launcher that are no numbers, or of no number that a job can have."""
    numbers = {name: variables[name] for name in NUMBERS if variables.get(name, "")}
    return [
        Problem(
            f"{name} = {text[:20]}{'...' if len(text) > 20 else ''}",
            "must be a number, as a launcher sets it",
            f"unset {name}",
        )
        for name, text in numbers.items()
        if not text.isdecimal() or len(text) > 9 or (text == "0" and name in NUMBERS[::3])
    ]


def check_alone(variables: Mapping[str, str], place: Place | None) -> list[Problem]:
    """Refuse a process of srun or mpirun with the RANK of a smaller job: each process would train
    by itself.
    """
    world = int(variables.get("WORLD_SIZE", "1"))
    if place is None or world >= place.world or any(name in variables for name in LAUNCHERS):
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


def check_launchers(variables: Mapping[str, str], place: Place | None) -> list[Problem]:
    """Refuse several launchers under srun or mpirun, each of which starts a run of its own.

    LAUNCHERS hold the number of launchers that have found each other.
    """
    launchers = next(filter(None, map(variables.get, LAUNCHERS)), None)
    if place is None or launchers != "1" or _has_terminal(variables):
        return []
    name, count = place.starter.name, place.world
    rule = f"has started {count} launchers, and each would start a separate run"
    fix = (
        f"start one launcher with {name} -n 1, start the recipe itself with {name} -n RANKS, or use"
        f" {LAUNCH}"
    )
    return [
        Problem(
            name, rule, f"{fix}. For separate runs unset {_world_name(place.starter, variables)}"
        )
    ]


def _world_name(starter: Starter, variables: Mapping[str, str]) -> str:
    return "SLURM_NTASKS" if starter is SRUN and starter.world not in variables else starter.world


def _is_step(variables: Mapping[str, str]) -> bool:
    """Return True for a task of srun. A batch script is one process, whatever SLURM_NTASKS is."""
    step = variables.get("SLURM_STEP_ID", "")
    if step.isdecimal():
        return int(step) < RESERVED
    return variables.get("SLURM_PROCID") != "0"


def _has_terminal(variables: Mapping[str, str]) -> bool:
    return "SLURM_PTY_PORT" in variables and variables.get(SRUN.world, "1") != "1"


def _of_srun(rank: int, world: int, variables: Mapping[str, str]) -> Place:
    """Return the place of a task of srun.

    Raises `Refusal` if the tasks of a host do not have neighbouring ranks.
    """
    tasks = _expanded(
        variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE", "")
    )
    host, local_rank = (
        _number(variables.get("SLURM_NODEID", "0")),
        _number(variables.get("SLURM_LOCALID")),
    )
    if sum(tasks) != world or host is None or host >= len(tasks):
        return Place(SRUN, rank, world, local_rank, None, "")
    first = sum(tasks[:host])
    # all ranks of this host, so that its first one refuses with the others
    here = variables.get("SLURM_GTIDS", "")
    neighbours = not here or here == ",".join(map(str, range(first, first + tasks[host])))
    if not neighbours or (local_rank is not None and first + local_rank != rank):
        fix = "start it with srun --distribution=block"
        raise refuse(f"srun, rank {rank}", "the ranks of a host must be neighbours", fix)
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    address = "127.0.0.1" if len(tasks) == 1 else _first_address(nodes)
    return Place(SRUN, rank, world, local_rank, tasks[host], address)


def _of_other(starter: Starter, rank: int, world: int, variables: Mapping[str, str]) -> Place:
    """Return the place of a process of mpirun and the like, whose variables give no address: "" for
    several hosts.
    """
    local_rank = _number(variables.get(starter.local_rank))
    local_ranks = _number(variables.get(starter.local_ranks))
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
        raise refuse(
            f"{starter.name}, rank {rank} of {world}",
            rule,
            "start it with --map-by slot, and as many ranks on each host",
        )
    return Place(
        starter, rank, world, local_rank, local_ranks, "127.0.0.1" if local_ranks == world else ""
    )


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _expanded(tasks: str) -> list[int]:
    """Return the number of tasks on each host: 2(x2),1 means 2, 2 and 1; [] if the text has another
    form.
    """
    found: list[int] = []
    for part in tasks.split(","):
        if not (match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)):
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _first_address(nodes: str) -> str:
    """Return the first host of Slurm's list, such as n[01-04,7],m1: its name, or the address in
    Slurm if the name has none.
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


def _port(starter: Starter, variables: Mapping[str, str]) -> int:
    """Return the port on which the ranks of a job meet: every rank computes the same, and another
    job of the host another.
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
    """Return the process that started all ranks of this host: the nearest ancestor without the
    variable of the rank.
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
