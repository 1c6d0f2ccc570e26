"""The agent on each host of a job.

It starts the ranks, watches them, and ends every process that they started.

    python -m launch.host      started by `python -m launch`: over ssh, srun, or on the same machine

Commands arrive as lines of JSON on stdin. Reports are written as lines of JSON to stdout:

    in    the specification
          {"start": {"master_addr", "master_port"}}
          {"stop": "SIGTERM"}; the end of stdin is a stop
          {"kill": true}
    out   {"hello": ...}
          {"out": text of rank 0}; {"line": its progress line}
          {"told": signal}; {"run_folder": path}
          {"ended": ...} for each rank; {"launcher": exit code}
          {"done": processes killed}

The agent supports only Linux. It reads exit codes from the process table, because the ranks are
children of their launcher, not of the agent.
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

LEFT = 5.0  # seconds that helper processes (compilers, W&B's service) may outlive the ranks
TRACEBACK_BEGINS = "Traceback (most recent call last):"
# number of lines shown of a failed rank: without and with its last traceback
TAIL, TRACEBACK = 25, 200
NO_GPUS_FROM_SLURM = "NoDevFiles"  # a recipe rejects this value on a host with GPUs
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class Agent:
    """The agent that runs one host's part of one start."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.commands = b""
        self.reports = b""  # the incomplete last line read from the pipe
        self.spec: dict[str, Any] = {}
        self.launcher: subprocess.Popen[bytes] | None = None
        self.launcher_ended: int | None = None
        self.running: dict[int, tuple[int, int]] = {}  # pid -> (rank, pidfd)
        self.reported: dict[int, int | None] = {}  # rank -> exit code
        # ranks whose launcher collected their exit code before this process read it
        self.unknown: list[int] = []
        self.shown_rank: int | None = None  # the rank whose output goes to the console
        self.stopping = ""
        self.killing = False
        self.console: Any = None  # log file of rank 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    # messages

    def tell(self, **message: Any) -> None:
        # If nobody reads stdout any more, stdin has also ended, which stops the ranks.
        with contextlib.suppress(OSError):
            data = json.dumps(message).encode() + b"\n"
            while data:
                data = data[os.write(1, data) :]

    def hear(self) -> list[dict[str, Any]]:
        """Read the commands that have arrived. The end of stdin counts as a "stop" command."""
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
        """Send the hello message.

        The message contains every problem that would keep this host's ranks from starting.
        """
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
        if not address or is_loopback(address):  # this host connected to itself
            address = next((own for name in spec["others"] if (own := own_address(name))), address)
        self.tell(
            hello={"problems": problems, "address": address, "port": free_port(), "gpus": found}
        )

    def environment(
        self, meeting: spawn.Meeting, folder: str, visible: list[str]
    ) -> dict[str, str]:
        """Build the environment of this host's launcher, which all its ranks inherit.

        `visible` lists the devices of the ranks.
        """
        slots = meeting.slots[meeting.node]
        variables = os.environ | self.spec["environment"]
        variables |= {
            MARK: self.spec["mark"],
            "LAUNCH_LOGS": str(Path(self.spec["logs"]).absolute()),
            "LAUNCH_PIPE": f"{folder}/pipe",
            "LAUNCH_LOCAL_WORLD_SIZE": str(slots),
        }
        variables |= self.spec["for_rank_0"]  # for rank 0's progress line and last line
        if locale.getencoding().lower() != "utf-8":
            # torch 2.13 cannot be imported if the locale's encoding is ASCII, and launchers import
            # torch.
            variables["PYTHONUTF8"] = "1"
        # compiled ops need ninja
        variables["PATH"] = os.pathsep.join(
            [str(Path(self.spec["python"]).parent), variables.get("PATH", os.defpath)]
        )
        self.add_cores(variables, slots, visible)
        self.add_interface(variables, meeting)
        if self.spec["spawn"] == "once":
            variables |= place_of_once(meeting)
        return variables

    def add_cores(self, variables: dict[str, str], slots: int, visible: list[str]) -> None:
        """With --bind_cores, add each rank's cores and a number of threads that fits them."""
        allowed, limit = os.sched_getaffinity(0), cores.whole_cores(cores.cpu_limit())
        threads = min(len(allowed), limit) // slots
        if self.spec["bind_cores"]:
            # The GPUs are looked up in this order. CUDA's default order starts with the fastest
            # GPU.
            variables.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
            dealt = cores.deal(visible, allowed, devices({}))
            variables["LAUNCH_CORES"] = ";".join(",".join(map(str, own)) for own in dealt)
            threads = min(limit // slots, *map(len, dealt))
        # Without this variable, each rank would start threads for all cores under deepspeed, but
        # only one thread under torchrun.
        variables.setdefault("OMP_NUM_THREADS", str(max(1, threads)))

    def add_interface(self, variables: dict[str, str], meeting: spawn.Meeting) -> None:
        """Add the network interface that leads to the other hosts, unless the user chose one.

        Without this variable, gloo uses the address of this host's name in /etc/hosts. This address
        is often 127.0.1.1, which no other host can reach. NCCL may choose the bridge of a virtual
        machine or container.
        """
        ways = (
            interface_to(host)
            for host in (meeting.master_addr, *self.spec["others"])
            if len(meeting.slots) > 1
        )
        if name := next(filter(None, ways), ""):
            variables.setdefault("GLOO_SOCKET_IFNAME", name)
            # The = requests an exact match of the name instead of a prefix.
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
        # A process that loses its parent becomes a child of this process.
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
            # Only this process reacts to stop signals, because launchers would kill ranks that are
            # saving. rank.py unblocks the signals for the rank.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
            # If this process dies, its launcher must also end, so that the ranks notice.
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
        """Create the pipe through which the ranks report, and watch it."""
        self.folder = tempfile.mkdtemp(prefix="launch_")
        os.mkfifo(f"{self.folder}/pipe")
        # Open the pipe for writing as well, so that a read never returns end of file.
        self.pipe = os.open(f"{self.folder}/pipe", os.O_RDWR | os.O_NONBLOCK)
        self.selector.register(self.pipe, selectors.EVENT_READ, "pipe")

    def log(self, rank: int) -> Path:
        return Path(self.spec["logs"]) / f"rank_{rank}.log"

    def meet_ranks(self) -> None:
        """Watch ranks that have just started, and forward rank 0's run folder and progress line.

        Programs that a rank starts inherit the name of the pipe. A report therefore counts only if
        a rank itself wrote it.
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
        """Report the end of a rank with its exit code.

        The code is read while the rank is a zombie, before its launcher collects it.
        """
        rank, watched = self.running.pop(pid)
        code = exit_code(pid)
        self.selector.unregister(watched)
        os.close(watched)
        if code is None:
            adopted = self.reap().get(pid)
            code = code_from(self.launcher_log, pid) if adopted is None else adopted
        self.reported[rank] = code
        self.show()  # report the rank's output before its end
        if code is None:
            self.unknown.append(rank)
        else:
            self.report(rank, code)

    def report_unknown(self) -> None:
        """Report ranks whose exit code was lost, once their launcher has ended.

        A launcher exits with 0 only if all its ranks exited with 0.
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
        """Collect the exit codes of child processes that have ended, including adopted ones."""
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
        """Ask every rank to save a checkpoint and end.

        If no rank has started, kill the launcher.
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
        """Forward rank 0's new output."""
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
        """Run until every process on this host has ended."""
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
                    self.kill()  # processes forked since the last kill
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
        """Watch for commands and for stop signals."""
        self.selector.register(0, selectors.EVENT_READ, "commands")
        self.woken, self.waker = socket.socketpair()
        self.woken.setblocking(False)
        self.waker.setblocking(False)
        for number in STOPS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        self.selector.register(self.woken, selectors.EVENT_READ, "signals")

    def react(self, event: Any) -> None:
        """Handle a selector event: commands, signals, the pipe, or the pid of an ended rank."""
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
        """Forward rank 0's new output, and report the launcher once it has ended."""
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
    """Return the CUDA device of each rank on this host, or -1 for the CPU."""
    visible = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES", ""))[:slots]
    if "CUDA_VISIBLE_DEVICES" in os.environ and not visible:
        unseen = os.environ["CUDA_VISIBLE_DEVICES"].strip()
        # The user wants the CPU, or Slurm assigned no GPU to the job.
        visible = [unseen if unseen == NO_GPUS_FROM_SLURM else "-1"] * slots
    return visible if len(visible) == slots else [str(index) for index in range(slots)]


def place_of_once(meeting: spawn.Meeting) -> dict[str, str]:
    """Return the environment variables for a script that runs once on this host."""
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
    """Return the last lines of a file, each shortened to 1,000 characters.

    If a Python traceback starts earlier, the result contains more lines, beginning with its start.
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
    """Return the last Python exception in a file, or the first line of a config error.

    The result is "" if the file contains neither.
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
