"""Runs on each host of a job: starts the ranks, watches them, and ends every process that they
started.

    python -m launch.host      started by `python -m launch`: over ssh, srun, or on the same machine

Commands come as lines of JSON on stdin, reports leave as lines of JSON on stdout:

    in    the specification
          {"start": {"master_addr", "master_port"}}
          {"stop": "SIGTERM"}; the end of stdin is a stop
          {"kill": true}
    out   {"hello": ...}
          {"out": text of rank 0}; {"line": its progress line}
          {"told": signal}; {"run_folder": path}
          {"ended": ...} for each rank; {"launcher": exit code}
          {"done": processes killed}

Linux only: exit states are read from the process table, because the ranks are children of their
launcher, not of this process.
"""

import codecs
import contextlib
import ctypes
import json
import locale
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import cores, spawn
from .addresses import free_port, interface_to, is_free, is_loopback, own_address
from .hosts import devices, visible_devices
from .processes import MARK, code_from, descendants, end_leftovers, exit_code
from .rank import STOPS

LEFT = 5.0  # seconds that helpers of the ranks (compilers, W&B's service) may outlive the ranks
TRACEBACK_BEGINS = "Traceback (most recent call last):"
# lines of a failed rank that are shown: without, and with its last traceback
TAIL, TRACEBACK = 25, 200
NO_GPUS_FROM_SLURM = "NoDevFiles"  # a recipe refuses it on a host with GPUs
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class Agent:
    """Carries out one host's part of one start."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.commands = b""
        self.reports = b""  # the beginning of a line in the pipe
        self.spec: dict[str, Any] = {}
        self.launcher: subprocess.Popen[bytes] | None = None
        self.launcher_ended: int | None = None
        self.running: dict[int, tuple[int, int]] = {}  # pid -> (rank, pidfd)
        self.reported: dict[int, int | None] = {}  # rank -> exit code
        # ranks whose exit code their launcher took before this process looked
        self.unknown: list[int] = []
        self.shown_rank: int | None = None  # whose output goes to the console
        self.stopping = ""
        self.killing = False
        self.console: Any = None  # rank 0's file
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    # messages

    def tell(self, **message: Any) -> None:
        # nobody listens any more, which the end of stdin says too
        with contextlib.suppress(OSError):
            data = json.dumps(message).encode() + b"\n"
            while data:
                data = data[os.write(1, data) :]

    def hear(self) -> list[dict[str, Any]]:
        """Reads the commands that have come; {"stop"} at the end of stdin."""
        chunk = os.read(0, 1 << 16)
        if not chunk:
            self.selector.unregister(0)
            return [{"stop": "SIGTERM"}]
        *lines, self.commands = (self.commands + chunk).split(b"\n")
        return [json.loads(line) for line in lines if line.strip()]

    def obey(self, message: dict[str, Any]) -> None:
        if "spec" in message:
            self.prepare(message["spec"])
        elif "start" in message:
            self.start(**message["start"])
        elif "stop" in message:
            self.stop(message["stop"])
        elif "kill" in message:
            self.kill()

    # before the start

    def prepare(self, spec: dict[str, Any]) -> None:
        """Says hello, with everything that would keep the ranks of this host from starting."""
        self.spec, problems = spec, []
        end_leftovers(spec["mark"])
        try:
            os.chdir(spec["folder"])
        except OSError as error:
            problems.append(
                f"the folder {spec['folder']}: {error.strerror}. Every host needs the same files at"
                " the same path"
            )
        if not problems and not Path(spec["words"][0]).is_file():
            problems.append(
                f"{spec['words'][0]} is not here. Every host needs the same files at the same path"
            )
        try:
            Path(spec["logs"]).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problems.append(
                f"{spec['logs']} cannot be made: {error.strerror}. Choose another run folder with"
                " --out"
            )
        if spec["node"] == 0 and (port := spec["master_port"]) and not is_free(port):
            problems.append(
                f"master port {port}: is in use. Choose another: --master_port {free_port()}"
            )
        found, slots = devices(dict(os.environ)), spec["slots"][spec["node"]]
        if 0 < found < slots:
            problems.append(
                f"{slots} ranks, but {found} GPUs are visible. Use --gpus {found}, or correct"
                " slots= in the hostfile"
            )
        over_ssh = os.environ.get("SSH_CONNECTION", "").split()
        address = over_ssh[2] if len(over_ssh) == 4 else ""
        if not address or is_loopback(address):  # the connection comes from this host itself
            address = next((own for name in spec["others"] if (own := own_address(name))), address)
        self.tell(
            hello={"problems": problems, "address": address, "port": free_port(), "gpus": found}
        )

    def environment(
        self, meeting: spawn.Meeting, folder: str, visible: list[str]
    ) -> dict[str, str]:
        """Build the environment of this host's launcher, and so of every rank; `visible` are the
        devices of the ranks.
        """
        slots = meeting.slots[meeting.node]
        variables = os.environ | self.spec["environment"]
        variables |= {
            MARK: self.spec["mark"],
            "LAUNCH_LOGS": str(Path(self.spec["logs"]).absolute()),
            "LAUNCH_PIPE": f"{folder}/pipe",
            "LAUNCH_LOCAL_WORLD_SIZE": str(slots),
        }
        variables |= self.spec["for_rank_0"]  # what its progress line and its last line need
        if locale.getencoding().lower() != "utf-8":
            # torch 2.13 cannot be imported where text is ASCII, and launchers import it
            variables["PYTHONUTF8"] = "1"
        # ninja, for compiled ops
        variables["PATH"] = os.pathsep.join(
            [str(Path(self.spec["python"]).parent), variables.get("PATH", os.defpath)]
        )
        self.add_cores(variables, slots, visible)
        self.add_interface(variables, meeting)
        if self.spec["spawn"] == "once":
            variables |= place_of_once(meeting)
        return variables

    def add_cores(self, variables: dict[str, str], slots: int, visible: list[str]) -> None:
        """Add the cores of each rank with --bind_cores, and the threads that fit them."""
        allowed, limit = os.sched_getaffinity(0), cores.whole_cores(cores.cpu_limit())
        threads = min(len(allowed), limit) // slots
        if self.spec["bind_cores"]:
            # the order in which the GPUs are looked up; CUDA's own begins with the fastest
            variables.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
            dealt = cores.deal(visible, allowed, devices({}))
            variables["LAUNCH_CORES"] = ";".join(",".join(map(str, own)) for own in dealt)
            threads = min(limit // slots, *map(len, dealt))
        # else deepspeed's launcher leaves all cores to each rank, and torchrun one
        variables.setdefault("OMP_NUM_THREADS", str(max(1, threads)))

    def add_interface(self, variables: dict[str, str], meeting: spawn.Meeting) -> None:
        """Add the network interface that leads to the other hosts, unless the user chose one.

        Otherwise gloo takes the address of this host's name in /etc/hosts, often 127.0.1.1, which
        no other host reaches, and NCCL may take a bridge of virtual machines or containers.
        """
        ways = (
            interface_to(host)
            for host in (meeting.master_addr, *self.spec["others"])
            if len(meeting.slots) > 1
        )
        if name := next(filter(None, ways), ""):
            variables.setdefault("GLOO_SOCKET_IFNAME", name)
            # The = says that the name is whole.
            variables.setdefault("NCCL_SOCKET_IFNAME", f"={name}")

    # the run

    def start(self, master_addr: str, master_port: int) -> None:
        self.open_pipe()
        meeting = spawn.Meeting(
            tuple(self.spec["slots"]), self.spec["node"], master_addr, master_port
        )
        slots = meeting.slots[meeting.node]
        visible = devices_of_ranks(slots)
        words = spawn.command(
            self.spec["spawn"], self.spec["python"], meeting, visible, self.spec["words"]
        )
        # a process that loses its parent becomes a child of this process
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

        self.launcher_log = Path(self.spec["logs"]) / f"launcher_{meeting.node}.log"
        for stale in [
            self.launcher_log,
            *(self.log(rank) for rank in range(meeting.first_rank, meeting.first_rank + slots)),
        ]:
            stale.unlink(missing_ok=True)
        self.shown_rank = (
            meeting.first_rank if self.spec["spawn"] == "once" or meeting.node == 0 else None
        )
        prctl = ctypes.CDLL(None).prctl

        def in_child() -> None:
            # only this process reacts: launchers would kill ranks that are saving (rank.py
            # unblocks)
            signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
            # without this process the ranks must notice that their launcher has gone
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

        with self.launcher_log.open("wb") as log:
            self.launcher = subprocess.Popen(
                words,
                env=self.environment(meeting, self.folder, visible),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=in_child,
            )

    def open_pipe(self) -> None:
        """Make the pipe through which the ranks report, and watch it."""
        self.folder = tempfile.mkdtemp(prefix="launch_")
        os.mkfifo(f"{self.folder}/pipe")
        # open for writing too, so that reading never meets its end
        self.pipe = os.open(f"{self.folder}/pipe", os.O_RDWR | os.O_NONBLOCK)
        self.selector.register(self.pipe, selectors.EVENT_READ, "pipe")

    def log(self, rank: int) -> Path:
        return Path(self.spec["logs"]) / f"rank_{rank}.log"

    def meet_ranks(self) -> None:
        """Watch ranks that have just started, and pass on the run folder and the progress line that
        they report.

        Programs that a rank starts inherit the name of the pipe: a report counts only if it comes
        from a rank itself.
        """
        with contextlib.suppress(BlockingIOError):
            *lines, self.reports = (self.reports + os.read(self.pipe, 1 << 16)).split(b"\n")
            for report in map(json.loads, lines):
                if passed_on := report.keys() & {"run_folder", "line"}:
                    if report["pid"] in self.running:
                        self.tell(**{name: report[name] for name in passed_on})
                    continue
                with contextlib.suppress(ProcessLookupError):
                    watched = os.pidfd_open(report["pid"])
                    self.running[report["pid"]] = (report["rank"], watched)
                    self.selector.register(watched, selectors.EVENT_READ, report["pid"])
                    if self.stopping:
                        os.kill(report["pid"], signal.Signals[self.stopping])

    def rank_ended(self, pid: int) -> None:
        """Reports a rank with its exit code, which is read while the rank is a zombie, before its
        launcher looks.
        """
        rank, watched = self.running.pop(pid)
        code = exit_code(pid)
        self.selector.unregister(watched)
        os.close(watched)
        if code is None:
            adopted = self.reap().get(pid)
            code = code_from(self.launcher_log, pid) if adopted is None else adopted
        self.reported[rank] = code
        self.show()  # what it has printed comes before its end
        if code is None:
            self.unknown.append(rank)
        else:
            self.report(rank, code)

    def report_unknown(self) -> None:
        """Report ranks whose exit code was lost, once their launcher has ended: it ends with 0 only
        if all of its ranks did.
        """
        while self.unknown and self.launcher_ended is not None:
            self.report(self.unknown.pop(), 0 if self.launcher_ended == 0 else None)

    def report(self, rank: int, code: int | None) -> None:
        tail = last_lines(self.log(rank)) if code else []
        self.tell(
            ended={
                "rank": rank,
                "code": code,
                "tail": tail,
                "error": named_error(self.log(rank)) if code else "",
                "log": str(self.log(rank)),
            }
        )

    def reap(self) -> dict[int, int]:
        """Collects the exit codes of this process's children that have ended, inherited ones
        included.
        """
        codes = {}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return codes
            if pid == 0:
                return codes
            codes[pid] = os.waitstatus_to_exitcode(status)
            if self.launcher and pid == self.launcher.pid:
                self.launcher_ended = self.launcher.returncode = codes[pid]

    def stop(self, reason: str) -> None:
        """Asks every rank to save a checkpoint and end; ranks that have not begun yet end with the
        launcher.
        """
        if not self.stopping:
            self.stopping = reason
            for pid in list(self.running):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.Signals[reason])
            if not self.running and self.launcher and not self.reported:
                self.kill()

    def kill(self) -> None:
        self.killing = True
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def show(self) -> None:
        """Passes on what rank 0 has printed since the last time."""
        if self.shown_rank is None:
            return
        if self.console is None:
            try:
                self.console = self.log(self.shown_rank).open("rb")
            except FileNotFoundError:
                return
        while text := self.decoder.decode(self.console.read(1 << 16)):
            self.tell(out=text)

    def run(self) -> int:
        """Run until every process of this host has ended."""
        self.listen()
        over_since: float | None = None
        killed = 0
        while True:
            for key, _ in self.selector.select(0.1):
                self.react(key.data)
            if self.launcher is None:
                if self.stopping or self.killing:
                    return 0
                continue

            self.follow_launcher()
            if self.launcher_ended is None or self.running:
                if self.killing:
                    self.kill()  # processes forked meanwhile
                continue

            over_since = over_since or time.monotonic()
            left = descendants(os.getpid())
            if left and (self.killing or time.monotonic() - over_since > LEFT):
                killed = max(killed, len(left))
                self.kill()
            elif not left:
                self.show()
                os.unlink(f"{self.folder}/pipe")
                os.rmdir(self.folder)
                self.tell(done=killed)
                return 0

    def listen(self) -> None:
        """Watch for commands, and for signals that ask for a stop."""
        self.selector.register(0, selectors.EVENT_READ, "commands")
        self.woken, self.waker = socket.socketpair()
        self.woken.setblocking(False)
        self.waker.setblocking(False)
        for number in STOPS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        self.selector.register(self.woken, selectors.EVENT_READ, "signals")

    def react(self, event: Any) -> None:
        """React to what the selector reports: commands, signals, the pipe, or a rank's pid."""
        if event == "commands":
            for message in self.hear():
                self.obey(message)
        elif event == "signals":
            for number in self.woken.recv(64):
                name = signal.Signals(number).name
                self.tell(told=name)
                self.stop(name)
        elif event == "pipe":
            self.meet_ranks()
        else:
            self.rank_ended(event)

    def follow_launcher(self) -> None:
        """Pass on new output of rank 0, and report the launcher once it has ended."""
        self.show()
        before = self.launcher_ended
        self.reap()
        self.report_unknown()
        if before is None and self.launcher_ended is not None:
            self.meet_ranks()
            self.tell(
                launcher={
                    "code": self.launcher_ended,
                    "tail": last_lines(self.launcher_log),
                    "ranks": len(self.running),
                    "log": str(self.launcher_log),
                }
            )


def devices_of_ranks(slots: int) -> list[str]:
    """Return the CUDA device of each rank of this host; -1 on the CPU."""
    visible = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES", ""))[:slots]
    if "CUDA_VISIBLE_DEVICES" in os.environ and not visible:
        unseen = os.environ["CUDA_VISIBLE_DEVICES"].strip()
        # the user wants the CPU, or Slurm gave the job no GPU
        visible = [unseen if unseen == NO_GPUS_FROM_SLURM else "-1"] * slots
    return visible if len(visible) == slots else [str(index) for index in range(slots)]


def place_of_once(meeting: spawn.Meeting) -> dict[str, str]:
    """Return the variables of a script that runs once on this host."""
    place = {
        "RANK": meeting.first_rank,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": meeting.slots[meeting.node],
        "WORLD_SIZE": sum(meeting.slots),
        "MASTER_ADDR": meeting.master_addr,
        "MASTER_PORT": meeting.master_port,
        "LAUNCH_ONCE": 1,
    }
    return {name: str(value) for name, value in place.items()}


def last_lines(log: Path, most: int = TAIL) -> list[str]:
    """Returns the last lines of a file, each cut to a readable length; more lines if a Python
    traceback began before them.
    """
    lines = _end(log).splitlines()
    traceback = max(
        (index for index, line in enumerate(lines) if line.endswith(TRACEBACK_BEGINS)),
        default=len(lines),
    )
    return [
        line[:1000]
        for line in lines[max(0, len(lines) - TRACEBACK, min(traceback, len(lines) - most)) :]
    ]


def named_error(log: Path) -> str:
    """Returns the last Python exception in a file, or the first line of a refusal; "" if there is
    neither.
    """
    lines = _end(log).splitlines()
    if told := [line for line in lines if line.startswith("refused")]:
        return told[-1]
    starts = [index for index, line in enumerate(lines) if line.endswith(TRACEBACK_BEGINS)]
    for line in lines[starts[-1] + 1 :] if starts else []:
        bare = line.partition("]: ")[2] if line.startswith("[rank") else line
        if bare and not bare[0].isspace():
            return bare[:300]
    fatal = [
        line
        for line in lines
        if "Watchdog caught collective" in line or line.startswith("Fatal Python error")
    ]
    return fatal[0][:300] if fatal else ""


def _end(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(Agent().run())
