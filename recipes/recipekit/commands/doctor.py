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
from ..doctor.rendezvous import (
    Coordinator,
    JsonConnection,
    Member,
    join_rendezvous,
    measure_round_trips,
    start_echo_server,
)
from ..doctor.report import Report
from ..doctor.target import (
    DoctorTarget,
    RankInfo,
    examine_host,
    free_space,
    local_gpu_numbers,
    resolve_target,
    shared_marker,
)
from ..dslint import check
from ..hosts import findings, gpus, op_cache
from ..hosts.findings import Findings, ReportRow
from ..hosts.torch_builds import gpus_in_use
from ..runtime.stopping import start_launcher_watch
from ..spec.command import recipe_of
from ..spec.errors import ConfigError, exit_with_error
from ..spec.help_page import CommandFormatter
from ..spec.packages import pinned_requirements, require_packages
from ..spec.paths import path_argument
from ..spec.ranks import take_rank
from ..spec.shipped import recipe_path
from ..spec.utf8 import use_utf8

HOST_REPORT_SECONDS = 180.0  # seconds within which a host must report about itself
CONNECT_SECONDS = 5.0  # seconds within which a rank must connect to a different rank
PREPARE_SECONDS = 1800.0  # seconds for imports, compiles and counting
JOIN_SECONDS = 600.0  # seconds for connecting all ranks: a large NCCL job takes minutes
MEASURE_SECONDS = 120.0  # seconds within which the two-second measurement must end
REMEASURE_RATIO = 1.5  # if a rank exceeds the others' seconds by this factor, it is measured again


# The command line


def read_arguments(
    argv: list[str], prog: str
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
        type=path_argument,
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
    # The value is the number of an open socket. With this flag, the process is the torch part of a
    # rank.
    parser.add_argument("--torch-part", "--torch_part", type=int, help=argparse.SUPPRESS)
    # The deepspeed launcher adds this flag.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    arguments, flags = parser.parse_known_args(argv)
    arguments.words = argv
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


def doctor_command(argv: list[str]) -> list[str]:
    """Return the argv that starts the doctor again in a separate process.

    The process finds this package through `doctor_environment`.
    """
    return [sys.executable, "-P", "-m", "recipekit", "doctor", *argv]


def doctor_environment() -> dict[str, str]:
    """Return this process's environment, with this package's folder added to Python's path.

    In a clone, the package therefore need not be installed.
    """
    kit = str(Path(__file__).resolve().parents[2])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [kit, os.environ.get("PYTHONPATH", "")]))
    }


def target_of(arguments: argparse.Namespace, rank_info: RankInfo) -> DoctorTarget:
    return resolve_target(
        arguments.recipe, arguments.flags, arguments.out, arguments.world, rank_info
    )


# One rank


class TorchProcess:
    """A separate process of this rank that runs torch and is killed if it hangs or dies."""

    def __init__(self, argv: list[str]) -> None:
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            doctor_command(["--torch-part", str(theirs.fileno()), *argv]),
            env=doctor_environment() | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # so that its compilers end together with the process
        )
        theirs.close()
        self._line = JsonConnection(ours)

    def ask(self, request: object, seconds: float) -> dict[str, Any]:
        """Send a request and return the answer, or {"error": reason} if there is no answer."""
        try:
            if request is not None:
                self._line.send(request)
            return self._line.receive(seconds)
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


def rank_main(arguments: argparse.Namespace, rank_info: RankInfo) -> int:
    """Examine one rank and return the exit code, which is the same on all ranks."""
    start_launcher_watch()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left behind
    subject = target_of(arguments, rank_info)
    master_port = arguments.master_port or rank_info.port
    if rank_info.rank == 0 and rank_info.world > 1:
        print(
            f"doctor: waiting for {rank_info.world - 1} more ranks, at most"
            f" {arguments.patience:.0f} s",
            flush=True,
        )
    meeting = join_rendezvous(
        rank_info.rank, rank_info.world, rank_info.address, rank_info.port, arguments.patience
    )
    with contextlib.closing(meeting), start_echo_server() as listener:
        if isinstance(meeting, Coordinator):
            with shared_marker(subject.out, meeting.id) as mark:
                meeting.broadcast(mark)
                report = Report(
                    rank_info.local_world,
                    meeting.gather(
                        collect_rank_report(subject, rank_info, mark, master_port, listener, None),
                        HOST_REPORT_SECONDS,
                        "the state of its host",
                    ),
                )
            return run_joint_checks(arguments, rank_info, subject, meeting, report)
        # Rank 0 may still be waiting for other ranks.
        mark = meeting.receive(HOST_REPORT_SECONDS + 1.5 * arguments.patience)
        meeting.gather(
            collect_rank_report(subject, rank_info, mark, master_port, listener, meeting)
        )
        addresses = meeting.receive(2 * HOST_REPORT_SECONDS)
        meeting.gather(
            measure_round_trips(echo_addresses(rank_info, addresses, meeting), CONNECT_SECONDS)
        )
        if not arguments.quick:
            with contextlib.closing(TorchProcess(arguments.words)) as torch_part:
                meeting.gather(torch_part.ask(None, PREPARE_SECONDS))
                while (order := meeting.receive(2 * PREPARE_SECONDS)) is not None:
                    meeting.gather(torch_part.ask(order, order["seconds"]))
                return meeting.receive(2 * MEASURE_SECONDS)
        return meeting.receive(2 * HOST_REPORT_SECONDS)


def collect_rank_report(
    target: DoctorTarget,
    rank_info: RankInfo,
    marker: str | None,
    master_port: int,
    listener: socket.socket,
    member: Member | None,
) -> dict[str, Any]:
    """Collect a rank's report about itself. The host's first rank also reports about the host."""
    seen: dict[str, Any] = {
        "node": rank_info.rank - rank_info.local_rank,
        "name": socket.gethostname(),
        "address": member.own_address if member else "",
        "port": listener.getsockname()[1],
    }
    if rank_info.local_rank == 0:
        seen |= {
            "findings": findings.to_json(
                examine_host(target, rank_info, marker, master_port, pinned_requirements())
            ),
            "room": free_space(target),
            "ranks": rank_info.local_world,
        }
        seen |= {"fabric": fabric.collect_links(local_gpu_numbers()[: rank_info.local_world])}
    return seen


def echo_addresses(
    rank_info: RankInfo, addresses: dict[str, Any], member: Member | None
) -> dict[int, tuple[str, int]]:
    """Return the address of each other rank's echo server.

    Ranks on rank 0's host are reached at rank 0's address.
    """
    here = addresses[str(rank_info.rank)][0]
    places = {}
    for rank, (node, address, port) in addresses.items():
        if int(rank) != rank_info.rank:
            host = (
                "127.0.0.1"
                if node == here
                else member.coordinator_address
                if member and node == 0
                else address
            )
            places[int(rank)] = (host, port)
    return places


# Rank 0


def run_joint_checks(
    arguments: argparse.Namespace,
    rank_info: RankInfo,
    target: DoctorTarget,
    coordinator: Coordinator,
    report: Report,
) -> int:
    """Lead all ranks through the joint checks, print the report and send them the exit code."""
    report.add_clocks(coordinator.measure_clocks())
    addresses = {
        str(rank): (seen["node"], seen["address"], seen["port"])
        for rank, seen in report.seen.items()
    }
    coordinator.broadcast(addresses)
    report.add_connections(
        coordinator.gather(
            measure_round_trips(echo_addresses(rank_info, addresses, None), CONNECT_SECONDS),
            CONNECT_SECONDS * rank_info.world / 32 + 60,
            "whom it reaches",
        )
    )

    if arguments.quick:
        report.add(ReportRow("all-reduce", "not measured (--quick)"), [0])
    else:
        print(f"doctor: starting torch on {len(report.seen)} ranks", flush=True)
        with contextlib.closing(TorchProcess(arguments.words)) as torch_part:
            run_torch_checks(torch_part, rank_info, target, coordinator, report)

    report.add_missing_ranks(coordinator.lost)
    print(report, flush=True)
    code = 1 if report.problems else 0
    coordinator.broadcast(code)
    return code


def run_torch_checks(
    torch_process: TorchProcess,
    rank_info: RankInfo,
    target: DoctorTarget,
    coordinator: Coordinator,
    report: Report,
) -> None:
    """Lead all ranks' torch processes: each process prepares alone, then all measure together."""
    ready = coordinator.gather(
        torch_process.ask(None, PREPARE_SECONDS), PREPARE_SECONDS, "its torch and ops"
    )
    report.add_preparation(ready, target.out)
    if (
        report.connected
        and _all_ranks_ok(ready, coordinator)
        and not any(told["unfit"] for told in ready.values())
    ):
        print(
            "doctor: connecting the ranks, then two seconds of all-reduce and messages",
            flush=True,
        )
        seconds = JOIN_SECONDS if any(told["gpus"] for told in ready.values()) else MEASURE_SECONDS
        order = {"port": _torch_port(rank_info), "seconds": seconds}
        joined = _ask_all_ranks(order, torch_process, coordinator, "its process group")
        report.add_measurements(_measure_ranks(joined, torch_process, coordinator, report), joined)
    else:
        report.add(ReportRow("all-reduce", "not measured: see the problems"), [0])
    coordinator.broadcast(None)


def _ask_all_ranks(
    request: dict[str, Any], torch_process: TorchProcess, coordinator: Coordinator, description: str
) -> dict[int, dict[str, Any]]:
    """Send a request to all ranks' torch processes and return each rank's answer."""
    coordinator.broadcast(request)
    return coordinator.gather(
        torch_process.ask(request, request["seconds"]), request["seconds"] + 30, description
    )


def _all_ranks_ok(replies: dict[int, dict[str, Any]], coordinator: Coordinator) -> bool:
    """Return True if no rank is lost and no rank has reported an error."""
    return not coordinator.lost and not any("error" in told for told in replies.values())


def _measure_ranks(
    joined: dict[int, dict[str, Any]],
    torch_process: TorchProcess,
    coordinator: Coordinator,
    report: Report,
) -> dict[int, dict[str, Any]]:
    """Return the measurements of all ranks, or the joining results if not all ranks joined."""
    if not _all_ranks_ok(joined, coordinator):
        return joined
    order = {"seconds": MEASURE_SECONDS}
    found = _ask_all_ranks(order, torch_process, coordinator, "its measurements")

    # The better of two measurements counts. A busy machine is slow only once, a slow machine twice.
    if _all_ranks_ok(found, coordinator) and report.find_slow_ranks(found, REMEASURE_RATIO):
        second = _ask_all_ranks(order, torch_process, coordinator, "its measurements")
        found = {
            rank: min(told, found[rank], key=lambda told: told.get("work", -1.0))
            for rank, told in second.items()
        }
    return found


def _torch_port(rank_info: RankInfo) -> int:
    """Return the master port, or a free port if a different program uses the master port."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        for port in (rank_info.port, 0):
            with contextlib.suppress(OSError), socket.create_server(("", port)) as free:
                return free.getsockname()[1]
    return rank_info.port


# The part that needs torch


def torch_main(arguments: argparse.Namespace, rank_info: RankInfo) -> None:
    """Report to this process's rank and then measure on its request.

    The report contains the visible GPUs, the compiled ops and the required bytes.
    """
    start_launcher_watch()
    line = JsonConnection(socket.socket(fileno=arguments.torch_part))
    subject = target_of(arguments, rank_info)
    unfit = [*gpus.check_torch_sees_gpus(), *gpus.check_gpu_of_rank(rank_info.local_rank)]
    told: dict[str, Any] = {
        "findings": findings.to_json(itertools.chain(unfit, prepare_torch(subject, rank_info))),
        "unfit": bool(unfit),
        "gpus": gpus_in_use(),
    }
    if rank_info.rank == 0 and subject.plan and subject.plan.model_config:
        from ..doctor.needs import count_required_bytes

        try:
            told["needs"] = count_required_bytes(subject.plan, on_gpu=bool(gpus_in_use()))
        except ConfigError as error:  # for example a model without a pipeline plan
            told["findings"] += findings.to_json(iter(error.problems))
    line.send(told)
    os.environ["MASTER_PORT"] = str(line.receive(2 * PREPARE_SECONDS)["port"])
    from ..doctor.speed import join_process_group, measure_speed

    line.send(join_process_group())
    while line.receive(2 * PREPARE_SECONDS):  # the rank ends this process
        line.send(measure_speed())


def prepare_torch(target: DoctorTarget, rank_info: RankInfo) -> Findings:
    """Report this rank's torch version and devices.

    On a host's first rank, also compile the recipe's ops.
    """
    import torch

    if rank_info.local_rank == 0:
        cuda = (
            f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} devices"
            if gpus_in_use()
            else "CPU"
        )
        yield ReportRow("torch", f"{torch.__version__}, {cuda}{describe_peer_access()}")
    if target.plan is None:
        return
    from ..run import _single_process_defaults

    _single_process_defaults()
    from ..hosts.ops import prepare_ops
    from ..runtime.start import quiet_library_logs

    quiet_library_logs()
    yield from check.check_device(target.plan.ds_config, "cuda" if gpus_in_use() else "cpu")
    if rank_info.local_rank == 0:
        try:
            prepare_ops(target.plan.ds_config, print)
            yield ReportRow(
                "ops", f"the ops of the recipe are compiled in {op_cache.find_op_folder()}"
            )
        except ConfigError as error:
            yield from error.problems


def describe_peer_access() -> str:
    """Return how many GPU pairs on this host can access each other's memory directly."""
    import torch

    count = torch.cuda.device_count() if gpus_in_use() else 0
    if count < 2:
        return ""
    pairs = list(itertools.permutations(range(count), 2))
    return (
        f", direct access between {sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)}"
        f" of {len(pairs)} pairs"
    )


# The complete check


def local_main(arguments: argparse.Namespace) -> int:
    """Start all ranks on this machine and return their exit code."""
    try:
        count = arguments.ranks or len(gpus.visible_gpus()) or 2
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


def start_ranks(first: int, count: int, variables: dict[str, str], argv: list[str]) -> int:
    """Start the ranks of this host, beginning with rank `first`, and return their exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no rank is left behind
    ranks = [
        subprocess.Popen(
            doctor_command(argv),
            env=doctor_environment()
            | variables
            | {
                "RANK": str(first + index),
                "LOCAL_RANK": str(index),
            },
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
    """Examine this rank, or start the ranks of this machine, and return the exit code."""
    parser, arguments = read_arguments(sys.argv[1:] if argv is None else argv, prog)
    # The problems that a different Python finds would be of no use.
    if importlib.util.find_spec("torch") is None:
        require_packages()
    place = os.environ
    try:
        lines = [*use_utf8(), *take_rank(place)]
        if arguments.recipe and "RANK" not in place:
            recipe_of(arguments.recipe)  # before ranks start and links are measured
    except ConfigError as refusal:
        exit_with_error(refusal)
    if lines and arguments.torch_part is None and place.get("RANK", "0") == "0":
        print("\n".join(lines), flush=True)
    if "RANK" not in place:
        return local_main(arguments)
    # `python -m launch --doctor` starts one process on each host.
    if place.get("LAUNCH_ONCE") == "1":
        return start_ranks(
            int(place["RANK"]),
            int(place["LOCAL_WORLD_SIZE"]),
            {"LAUNCH_ONCE": "0"},
            arguments.words,
        )
    try:
        slot = RankInfo(
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
    except ConfigError as refusal:
        if slot.local_rank == 0 or refusal.exit_code != 2:
            print(
                "\n".join(f"doctor, rank {slot.rank}: {problem}" for problem in refusal.problems),
                file=sys.stderr,
                flush=True,
            )
        return refusal.exit_code
    except KeyboardInterrupt:
        return 130
