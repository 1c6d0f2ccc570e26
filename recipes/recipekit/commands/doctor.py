"""Check the hosts of a run before it costs anything: print one table for each host, then every
problem with its fix.

    recipekit doctor                                # this machine, one rank for each GPU, or 2
    recipekit doctor --recipe mine.py --out runs/x --tp 2    # a run; flags of the recipe may follow
    python -m launch --hostfile HOSTS --doctor --recipe mine.py    # all hosts of a run

The doctor checks:
  - each host: versions, devices, shared memory (with GPUs), network adapters, requirements for
    compiling ops, clocks, logins
  - the run: run folder, space for checkpoints, NVMe folder, master port
  - connections between all ranks: plain sockets first, then two seconds of all-reduce and
    point-to-point messages

A launcher starts the doctor once for each rank, as it starts a recipe. Without a launcher, the
doctor itself starts the ranks of this machine. The report names each rank that is missing, silent
or slow. Every wait for a rank has a time limit.

Exit codes: 0 healthy; 1 problems, the same on every rank; 2 wrong command line.
`python tools/doctor.py` is the same command.
"""

import argparse
import contextlib
import importlib.util
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..doctor import fabric
from ..doctor.rendezvous import Chair, Line, Member, echo, meet, reach
from ..doctor.report import Report
from ..doctor.subject import Slot, Subject, examine_host, left_mark, local_gpus, read_subject, room
from ..dslint import check
from ..hosts import findings, gpus, op_cache
from ..hosts.findings import Findings, Row
from ..hosts.torch_builds import gpus_in_use
from ..runtime.stopping import start_launcher_watch
from ..spec.command import recipe_of
from ..spec.help_page import CommandFormatter
from ..spec.packages import pins, require_packages
from ..spec.paths import path_of
from ..spec.ranks import take_rank
from ..spec.refusal import Refusal, exit_refused
from ..spec.shipped import recipe_path
from ..spec.utf8 import use_utf8

LOOK = 180.0  # seconds in which a host has to report about itself
CONNECT = 5.0  # seconds in which a rank has to connect to another
PREPARE = 1800.0  # seconds for imports, compiles and counting
JOIN = 600.0  # seconds for connecting all ranks: a large NCCL job takes minutes
MEASURE = 120.0  # seconds in which the two seconds of measuring have to be over
SUSPECT = 1.5  # a rank slower than so many times the others' seconds is measured once more


# The command line


def read_arguments(
    words: list[str], prog: str
) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog, description=__doc__, formatter_class=CommandFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--recipe",
        type=recipe_path,
        metavar="FILE",
        help=(
            "Recipe file of the run to check. Flags that are not listed here are passed to the"
            " recipe."
        ),
    )
    parser.add_argument(
        "--out",
        type=path_of,
        metavar="FOLDER",
        help="Run folder to check. (default: the recipe's own run folder; without --recipe: runs)",
    )
    parser.add_argument(
        "--world",
        type=int,
        metavar="N",
        help=(
            "Number of ranks of the run, which the layout and the memory depend on. (default:"
            " number of ranks checked)"
        ),
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help=(
            "Ranks to start on this machine, without a launcher. (default: one for each GPU, or 2)"
        ),
    )
    parser.add_argument(
        "--master_port",
        "--master-port",
        type=int,
        metavar="PORT",
        help="Master port of the run. (default: $MASTER_PORT, or 29500)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="Seconds to wait for missing ranks. (default: 60)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=(
            "Skip the checks that import torch: compiling ops, counting memory, measuring"
            " all-reduce."
        ),
    )
    # number of an open socket: this process is a rank's torch part
    parser.add_argument("--torch-part", "--torch_part", type=int, help=argparse.SUPPRESS)
    # the deepspeed launcher adds it
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    arguments, flags = parser.parse_known_args(words)
    arguments.words = words
    arguments.flags = flags[1:] if flags[:1] == ["--"] else flags
    if arguments.flags and not arguments.recipe:
        parser.error(f"unknown: {' '.join(arguments.flags)}. Flags of a recipe need --recipe FILE")
    for name in ("world", "ranks", "master_port"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if arguments.ranks and os.environ.get("WORLD_SIZE", str(arguments.ranks)) != str(
        arguments.ranks
    ):
        parser.error(
            f"--ranks {arguments.ranks}: the launcher has started {os.environ['WORLD_SIZE']} ranks"
        )
    return parser, arguments


def same_command(words: list[str]) -> list[str]:
    """Return the argv that starts the doctor once more, as another process, whose `environment`
    finds this package.
    """
    return [sys.executable, "-P", "-m", "recipekit", "doctor", *words]


def environment() -> dict[str, str]:
    """Return the variables of this process, with the folder of this package on Python's path: in a
    clone it need not be installed.
    """
    kit = str(Path(__file__).resolve().parents[2])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [kit, os.environ.get("PYTHONPATH", "")]))
    }


def subject_of(arguments: argparse.Namespace, slot: Slot) -> Subject:
    return read_subject(arguments.recipe, arguments.flags, arguments.out, arguments.world, slot)


# One rank


class TorchPart:
    """Runs torch in a process of this rank: if that process hangs or dies, it is ended."""

    def __init__(self, words: list[str]) -> None:
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            same_command(["--torch-part", str(theirs.fileno()), *words]),
            env=environment() | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # so that its compilers end with the process
        )
        theirs.close()
        self._line = Line(ours)

    def ask(self, order: Any, seconds: float) -> dict[str, Any]:
        """Sends an order; returns the answer, or {"error": why} if there is none."""
        try:
            if order is not None:
                self._line.send(order)
            return self._line.read(seconds)
        except TimeoutError:
            return {"error": f"did not answer within {seconds:.0f} s"}
        except (OSError, ValueError):
            self._process.wait(10)
            self._errors.seek(0)
            last = [line for line in self._errors.read().splitlines() if line.strip()][-1:] or [
                "no message"
            ]
            return {"error": f"ended with exit code {self._process.returncode}: {last[0][:300]}"}

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._line.connection.close()
        self._errors.close()


def rank_main(arguments: argparse.Namespace, slot: Slot) -> int:
    """Examines one rank; returns the exit code, which is the same on all ranks."""
    start_launcher_watch()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind
    subject = subject_of(arguments, slot)
    master_port = arguments.master_port or slot.port
    if slot.rank == 0 and slot.world > 1:
        print(
            f"doctor: waiting for {slot.world - 1} more ranks, at most {arguments.patience:.0f} s",
            flush=True,
        )
    meeting = meet(slot.rank, slot.world, slot.address, slot.port, arguments.patience)
    with contextlib.closing(meeting), echo() as listener:
        if isinstance(meeting, Chair):
            with left_mark(subject.out, meeting.id) as mark:
                meeting.tell(mark)
                report = Report(
                    slot.local_world,
                    meeting.gather(
                        look(subject, slot, mark, master_port, listener, None),
                        LOOK,
                        "the state of its host",
                    ),
                )
            return conduct(arguments, slot, subject, meeting, report)
        # rank 0 may still wait for other ranks
        mark = meeting.hear(LOOK + 1.5 * arguments.patience)
        meeting.gather(look(subject, slot, mark, master_port, listener, meeting))
        addresses = meeting.hear(2 * LOOK)
        meeting.gather(reach(to_reach(slot, addresses, meeting), CONNECT))
        if not arguments.quick:
            with contextlib.closing(TorchPart(arguments.words)) as torch_part:
                meeting.gather(torch_part.ask(None, PREPARE))
                while (order := meeting.hear(2 * PREPARE)) is not None:
                    meeting.gather(torch_part.ask(order, order["seconds"]))
                return meeting.hear(2 * MEASURE)
        return meeting.hear(2 * LOOK)


def look(
    subject: Subject,
    slot: Slot,
    mark: str | None,
    master_port: int,
    listener: socket.socket,
    member: Member | None,
) -> dict[str, Any]:
    """Collects the report of a rank about itself; the first rank of a host reports about the host
    too.
    """
    seen: dict[str, Any] = {
        "node": slot.rank - slot.local_rank,
        "name": socket.gethostname(),
        "address": member.own_address if member else "",
        "port": listener.getsockname()[1],
    }
    if slot.local_rank == 0:
        seen |= {
            "findings": findings.to_json(examine_host(subject, slot, mark, master_port, pins())),
            "room": room(subject),
            "ranks": slot.local_world,
        }
        seen |= {"fabric": fabric.facts(local_gpus()[: slot.local_world])}
    return seen


def to_reach(
    slot: Slot, addresses: dict[str, Any], member: Member | None
) -> dict[int, tuple[str, int]]:
    """Maps each rank to the address of its echo.

    Ranks on rank 0's host are reached at rank 0's address.
    """
    here = addresses[str(slot.rank)][0]
    places = {}
    for rank, (node, address, port) in addresses.items():
        if int(rank) != slot.rank:
            host = (
                "127.0.0.1"
                if node == here
                else member.chair_address
                if member and node == 0
                else address
            )
            places[int(rank)] = (host, port)
    return places


# Rank 0


def conduct(
    arguments: argparse.Namespace, slot: Slot, subject: Subject, meeting: Chair, report: Report
) -> int:
    """Lead all ranks through the joint checks, print the report, and send the ranks the exit
    code.
    """
    report.clocks(meeting.clocks())
    addresses = {
        str(rank): (seen["node"], seen["address"], seen["port"])
        for rank, seen in report.seen.items()
    }
    meeting.tell(addresses)
    report.reached(
        meeting.gather(
            reach(to_reach(slot, addresses, None), CONNECT),
            CONNECT * slot.world / 32 + 60,
            "whom it reaches",
        )
    )

    if arguments.quick:
        report.add(Row("all-reduce", "not measured (--quick)"), [0])
    else:
        print(f"doctor: starting torch on {len(report.seen)} ranks", flush=True)
        with contextlib.closing(TorchPart(arguments.words)) as torch_part:
            conduct_torch(torch_part, slot, subject, meeting, report)

    report.absent(meeting.lost)
    print(report, flush=True)
    code = 1 if report.problems else 0
    meeting.tell(code)
    return code


def conduct_torch(
    torch_part: TorchPart, slot: Slot, subject: Subject, meeting: Chair, report: Report
) -> None:
    """Lead the torch parts of all ranks: each prepares alone, then all measure together."""
    ready = meeting.gather(torch_part.ask(None, PREPARE), PREPARE, "its torch and ops")
    report.prepared(ready, subject.out)
    if (
        report.connected
        and _well(ready, meeting)
        and not any(told["unfit"] for told in ready.values())
    ):
        print(
            "doctor: connecting the ranks, then two seconds of all-reduce and messages",
            flush=True,
        )
        seconds = JOIN if any(told["gpus"] for told in ready.values()) else MEASURE
        order = {"port": _torch_port(slot), "seconds": seconds}
        joined = _together(order, torch_part, meeting, "its process group")
        report.measured(_measured(joined, torch_part, meeting, report), joined)
    else:
        report.add(Row("all-reduce", "not measured: see the problems"), [0])
    meeting.tell(None)


def _together(
    order: dict[str, Any], torch_part: TorchPart, meeting: Chair, about: str
) -> dict[int, dict[str, Any]]:
    """Send an order to the torch parts of all ranks; return each rank's answer."""
    meeting.tell(order)
    return meeting.gather(torch_part.ask(order, order["seconds"]), order["seconds"] + 30, about)


def _well(found: dict[int, dict[str, Any]], meeting: Chair) -> bool:
    """Return True if no rank is lost and none has reported an error."""
    return not meeting.lost and not any("error" in told for told in found.values())


def _measured(
    joined: dict[int, dict[str, Any]], torch_part: TorchPart, meeting: Chair, report: Report
) -> dict[int, dict[str, Any]]:
    """Return the measurements of the ranks that have joined, or the errors with which they did
    not join.
    """
    if not _well(joined, meeting):
        return joined
    order = {"seconds": MEASURE}
    found = _together(order, torch_part, meeting, "its measurements")

    # The better of two measurements counts: a busy machine is slow once, a slow machine twice.
    if _well(found, meeting) and report.slow(found, SUSPECT):
        second = _together(order, torch_part, meeting, "its measurements")
        found = {
            rank: min(told, found[rank], key=lambda told: told.get("work", -1.0))
            for rank, told in second.items()
        }
    return found


def _torch_port(slot: Slot) -> int:
    """Returns the master port, or a free port if another program has that one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        for port in (slot.port, 0):
            with contextlib.suppress(OSError), socket.create_server(("", port)) as free:
                return free.getsockname()[1]
    return slot.port


# The part that needs torch


def torch_main(arguments: argparse.Namespace, slot: Slot) -> None:
    """Reports to the rank that started this process what torch sees, compiles and counts, and then
    measures on its order.
    """
    start_launcher_watch()
    line = Line(socket.socket(fileno=arguments.torch_part))
    subject = subject_of(arguments, slot)
    unfit = [*gpus.check_gpus_seen(), *gpus.check_ordinal(slot.local_rank)]
    told: dict[str, Any] = {
        "findings": findings.to_json(itertools.chain(unfit, prepare(subject, slot))),
        "unfit": bool(unfit),
        "gpus": gpus_in_use(),
    }
    if slot.rank == 0 and subject.plan and subject.plan.model_config:
        from ..doctor.needs import count_needs

        try:
            told["needs"] = count_needs(subject.plan, on_gpu=bool(gpus_in_use()))
        except Refusal as refusal:  # a model without a pipeline plan, say
            told["findings"] += findings.to_json(iter(refusal.problems))
    line.send(told)
    os.environ["MASTER_PORT"] = str(line.read(2 * PREPARE)["port"])
    from ..doctor.speed import join, measure

    line.send(join())
    while line.read(2 * PREPARE):  # the rank ends this process
        line.send(measure())


def prepare(subject: Subject, slot: Slot) -> Findings:
    """Reports what torch sees on this rank; on the first rank of a host compiles the ops that the
    recipe needs.
    """
    import torch

    if slot.local_rank == 0:
        cuda = (
            f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} devices"
            if gpus_in_use()
            else "CPU"
        )
        yield Row("torch", f"{torch.__version__}, {cuda}{peers()}")
    if subject.plan is None:
        return
    from ..run import _single_process_defaults

    _single_process_defaults()
    from ..hosts.ops import prepare_ops
    from ..runtime.start import quiet

    quiet()
    yield from check.check_device(subject.plan.ds_config, "cuda" if gpus_in_use() else "cpu")
    if slot.local_rank == 0:
        try:
            prepare_ops(subject.plan.ds_config, print)
            yield Row("ops", f"the ops of the recipe are compiled in {op_cache.folder()}")
        except Refusal as refusal:
            yield from refusal.problems


def peers() -> str:
    """Says whether the GPUs of this host reach each other's memory directly."""
    import torch

    count = torch.cuda.device_count() if gpus_in_use() else 0
    if count < 2:
        return ""
    pairs = list(itertools.permutations(range(count), 2))
    return (
        f", direct access between {sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)}"
        f" of {len(pairs)} pairs"
    )


# The whole


def local_main(arguments: argparse.Namespace) -> int:
    """Starts all ranks on this machine; returns their exit code."""
    try:
        count = arguments.ranks or len(gpus.gpus()) or 2
    except OSError:
        count = 2  # `check_devices` reports the fault
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    asked = arguments.master_port or int(os.environ.get("MASTER_PORT", "29500"))
    place = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return start_ranks(
        0,
        count,
        place,
        [*([] if arguments.master_port else ["--master_port", str(asked)]), *arguments.words],
    )


def start_ranks(first: int, count: int, place: dict[str, str], words: list[str]) -> int:
    """Starts the ranks of this host, from rank `first` on; returns their exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no rank is left behind
    ranks = [
        subprocess.Popen(
            same_command(words),
            env=environment() | place | {"RANK": str(first + index), "LOCAL_RANK": str(index)},
        )
        for index in range(count)
    ]
    try:
        return ranks[0].wait()
    except KeyboardInterrupt:
        return 130
    finally:
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            if process.poll() is None:
                process.terminate()
        for process in ranks:
            process.wait()


def main(argv: list[str] | None = None, prog: str = "recipekit doctor") -> int:
    """Examine this rank, or start the ranks of this machine; return the exit code."""
    parser, arguments = read_arguments(sys.argv[1:] if argv is None else argv, prog)
    # problems found by another Python would be of no use
    if importlib.util.find_spec("torch") is None:
        require_packages()
    place = os.environ
    try:
        lines = [*use_utf8(), *take_rank(place)]
        if arguments.recipe and "RANK" not in place:
            recipe_of(arguments.recipe)  # before ranks are started and links are measured
    except Refusal as refusal:
        exit_refused(refusal)
    if lines and arguments.torch_part is None and place.get("RANK", "0") == "0":
        print("\n".join(lines), flush=True)
    if "RANK" not in place:
        return local_main(arguments)
    # `python -m launch --doctor` starts one process on each host
    if place.get("LAUNCH_ONCE") == "1":
        return start_ranks(
            int(place["RANK"]),
            int(place["LOCAL_WORLD_SIZE"]),
            {"LAUNCH_ONCE": "0"},
            arguments.words,
        )
    try:
        slot = Slot(
            rank=int(place["RANK"]),
            world=int(place["WORLD_SIZE"]),
            local_rank=int(place.get("LOCAL_RANK", arguments.local_rank or 0)),
            local_world=int(place.get("LOCAL_WORLD_SIZE") or place.get("LOCAL_SIZE") or 1),
            address=place["MASTER_ADDR"],
            port=int(place["MASTER_PORT"]),
        )
    except (KeyError, ValueError) as error:
        parser.error(f"the launcher set RANK, but {error} is not a number or missing")
    try:
        if arguments.torch_part is not None:
            torch_main(arguments, slot)
            return 0
        return rank_main(arguments, slot)
    except Refusal as refusal:
        if slot.local_rank == 0 or refusal.exit_code != 2:
            print(
                "\n".join(f"doctor, rank {slot.rank}: {problem}" for problem in refusal.problems),
                file=sys.stderr,
                flush=True,
            )
        return refusal.exit_code
    except KeyboardInterrupt:
        return 130
