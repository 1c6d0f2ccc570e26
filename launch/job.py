"""One start of a job.

It connects to each host, follows all ranks to their end, and finds out why they ended.
"""

import contextlib
import json
import os
import queue
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .addresses import is_loopback
from .connection import REPOSITORY, Connection
from .errors import START_AGAIN, LaunchError
from .hosts import Host
from .rank import STOPS
from .screen import SCREEN

HELLO = 120.0  # seconds within which every host must answer
SETTLE = 2.0  # seconds that other ranks may still print their errors after one has failed
# The same limit if every failed rank only lost a peer. The rank that failed first may not have
# printed its error yet.
SETTLE_LOST = 15.0
SETTLE_STOP = 60.0  # the same limit if a rank ended because of a stop signal
STOP_CODES = {128 + number: number.name for number in STOPS}
LAST_LINES = ". The last lines of"  # precedes the name of a log file, whose last lines follow
# Last words of a rank after a different rank has failed. They come from
# recipekit/runtime/failure.py (exit code 75 or 1), gloo, sockets, torch's stores and NCCL.
OUR_WORDS = ("ended, because rank ", "failed after rank ", ": lost rank")
LOST_PEER = (
    *(
        "onnection closed by peer",
        "onnection reset by peer",
        "Broken pipe",
        "remote process exited",
        "Socket Timeout",
        "onnection refused",
    ),
    *(
        "onnection closed by remote peer",
        "DistNetworkError",
        "DistStoreError",
        "recvValue failed",
        "Timed out waiting",
    ),
    *(
        "DistBackendError",
        "NCCL error",
        "ncclRemoteError",
        "ncclSystemError",
        "NCCL operations have failed or timed out",
    ),
    *OUR_WORDS,
)
# torch's NCCL watchdog prints this line in C++, followed by many more lines
ABORTED = ("Watchdog caught collective", "atchdog thread terminated with exception")


@dataclass(frozen=True)
class Job:
    """The ranks to run and their hosts.

    `connect` is the prefix of a host's command: [], ssh with its flags, or srun with its flags.
    """

    hosts: tuple[Host, ...]
    spawn: str
    words: tuple[str, ...]  # script and arguments
    python: str
    folder: str
    environment: dict[str, str] = field(repr=False)  # contains secrets
    where: str = "local"
    ssh_config: str = ""
    master_addr: str = ""
    master_port: int = 0  # 0: a free port on the first host
    node: int | None = None  # only this host: on Kubernetes every host starts its own part
    spares: tuple[Host, ...] = ()  # hosts of the hostfile that the job does not use
    bind_cores: bool = False  # pin each rank to CPU cores close to its GPU
    # True if launch is itself a task of srun. Its own steps must then share the cores and GPUs of
    # the outer step, because otherwise they would wait forever.
    overlap: bool = False
    typed: tuple[str, ...] = ()  # the command line of launch, if typing it again continues the run
    mark: str = field(default_factory=lambda: secrets.token_hex(8))  # marks this job's processes

    def connection(self, host: Host) -> list[str]:
        """Return the argv that starts a host's agent.

        The argv contains nothing about the job, because the agent reads the job's specification
        from stdin.
        """
        agent = [self.python, "-m", "launch.host"]
        if self.where == "hostfile":
            return [
                *self._reach(host),
                f"cd {shlex.quote(str(REPOSITORY))} && exec {shlex.join(agent)}",
            ]
        return [*self._reach(host), *agent]

    def by_hand(self, host: Host) -> list[str]:
        """Return a command with which the user can check that a host answers."""
        return (
            [*self._reach(host), "hostname"]
            if self.where in ("hostfile", "slurm")
            else [self.python, "--version"]
        )

    def _reach(self, host: Host) -> list[str]:
        """Return the prefix of a command on a host.

        The prefix is ssh or srun with flags, or [] on this machine.
        """
        if self.where == "hostfile":
            flags = [
                "-T",
                *(
                    f"-o{option}"
                    for option in (
                        "BatchMode=yes",
                        "ConnectTimeout=20",
                        "ServerAliveInterval=15",
                        "ServerAliveCountMax=4",
                    )
                ),
            ]
            return [
                "ssh",
                *(["-F", self.ssh_config] if self.ssh_config else []),
                *flags,
                "--",
                host.name,
            ]
        if self.where == "slurm":
            # one task, which may use every core of its node
            flags = [
                "--nodes=1",
                "--ntasks=1",
                f"--nodelist={host.name}",
                f"--chdir={REPOSITORY}",
                "--export=ALL",
                "--kill-on-bad-exit=0",
                "--cpu-bind=none",
            ]
            return ["srun", *flags, *(["--overlap"] if self.overlap else [])]
        return []

    def _for_rank_0(self) -> dict[str, str]:
        """Return the variables for rank 0.

        They contain the terminal width for the progress line, and the command that continues the
        run.
        """
        columns = {"LAUNCH_TERMINAL": str(width)} if (width := SCREEN.columns()) else {}
        return columns | ({"LAUNCH_COMMAND": json.dumps(self.typed)} if self.typed else {})

    def specification(self, node: int, logs: Path) -> dict[str, Any]:
        """Return the specification that an agent reads from its stdin."""
        return {
            "slots": [host.slots for host in self.hosts],
            "node": node,
            "mark": f"{self.mark}.{node}",
            "others": [
                host.address or host.name for index, host in enumerate(self.hosts) if index != node
            ],
            "spawn": self.spawn,
            "bind_cores": self.bind_cores,
            "words": self.words,
            "python": self.python,
            "folder": self.folder,
            "environment": self.environment,
            "master_port": self.master_port,
            "logs": str(logs),
            "for_rank_0": self._for_rank_0(),
        }


@dataclass(frozen=True)
class Outcome:
    """The end of one start.

    `kind` is one of: done, stopped, refused (a further start would fail the same way), failed, or
    away (a host did not come back).
    """

    kind: str
    code: int
    text: str = ""
    reason: str = ""  # name of the stop signal, if there was one, for every `kind`


@contextlib.contextmanager
def signals_to(handler: Any) -> Iterator[None]:
    """Send stop signals to `handler`, which accepts the arguments of a signal.signal handler."""
    before = {number: signal.signal(number, handler) for number in STOPS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class Start:
    """One start, followed event by event.

    `asked` contains the stop signals that arrived before the start. `learn` is called with the run
    folder that rank 0 reports. Every host must answer within `patience` seconds.
    """

    def __init__(
        self,
        job: Job,
        logs: Path,
        say: Any,
        asked: "queue.SimpleQueue[str] | None" = None,
        learn: Callable[[Path], None] = lambda _: None,
        patience: float = HELLO,
    ):
        self.job, self.logs, self.say, self.learn, self.patience = job, logs, say, learn, patience
        self.asked = asked or queue.SimpleQueue()
        # safe to use inside a signal handler
        self.events: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.nodes = [job.node] if job.node is not None else list(range(len(job.hosts)))
        self.connections: dict[int, Connection] = {}
        # (priority as a cause, lowest first; seconds; description; last lines; exit code)
        self.failures: list[tuple[int, float, str, list[str], int]] = []
        # the failure that was printed as soon as it was found
        self.shown: tuple[int, float, str, list[str], int] | None = None
        self.codes: dict[int, int | None] = {}  # rank -> exit code
        self.told = ""  # name of the stop signal, or ""
        self.presses = 0
        self.killed = False
        self.kill_at: float | None = None
        self.began = time.monotonic()

    def run(self) -> Outcome:
        """Run from the first connection until no process is left on any host.

        Raises `LaunchError` if a host cannot start its part.
        """
        with signals_to(self.on_signal):
            while not self.asked.empty():
                self.events.put((-1, self.asked.get()))
            try:
                for node in self.nodes:
                    connection = Connection(
                        node, self.job.connection(self.job.hosts[node]), self.events
                    )
                    self.connections[node] = connection
                    connection.send(spec=self.job.specification(node, self.logs))
                hellos = self.greet()
                if self.told:
                    return Outcome("stopped", 128 + signal.Signals[self.told], "", self.told)
                first = hellos.get(0, {})
                address = (
                    self.job.master_addr
                    or self.job.hosts[0].address
                    or first.get("address")
                    or "127.0.0.1"
                )
                if (
                    len(self.job.hosts) > 1
                    and self.job.where == "hostfile"
                    and is_loopback(address)
                ):
                    raise LaunchError(
                        f"{self.job.hosts[0].name}: was reached at {address}, which the other hosts"
                        " cannot reach. Set --master_addr to an address that all hosts can reach"
                    )
                port = self.job.master_port or first["port"]
                self.began = time.monotonic()
                for connection in self.connections.values():
                    connection.send(start={"master_addr": address, "master_port": port})
                self.follow()
                return self.outcome()
            finally:
                SCREEN.draw("")
                for connection in self.connections.values():
                    connection.close()

    def on_signal(self, number: int, _: Any) -> None:
        self.events.put((-1, signal.Signals(number).name))

    def greet(self) -> dict[int, dict[str, Any]]:
        """Collect each host's hello message.

        Raises `LaunchError` that lists all hosts that did not answer or cannot start their part.
        """
        hellos: dict[int, dict[str, Any]] = {}
        problems: list[str] = []
        deadline = time.monotonic() + self.patience
        silent = set(self.nodes)
        while silent and not self.told:
            try:
                node, message = self.events.get(
                    timeout=max(0.01, min(5.0, deadline - time.monotonic()))
                )
            except queue.Empty:
                names = self.named(silent)
                if time.monotonic() < deadline:
                    self.say(f"waiting for {names}")
                    continue
                problems += [
                    f"{names}: no answer in {self.patience:.3g} s. Try by hand:"
                    f" {shlex.join(self.job.by_hand(self.job.hosts[min(silent)]))}"
                ]
                break
            if node < 0:
                self.told = message
            elif message is None:
                silent.discard(node)
                self.connections[node].open = False
                problems.append(self.unreachable(node))
            elif "hello" in message:
                silent.discard(node)
                hellos[node] = message["hello"]
                problems += [
                    f"{self.job.hosts[node].name}: {problem}"
                    for problem in message["hello"]["problems"]
                ]
        problems += self.without_gpus({node: hello["gpus"] for node, hello in hellos.items()})
        if problems:
            raise LaunchError(*problems)
        return hellos

    def named(self, silent: set[int]) -> str:
        """Return the names of the hosts that have not answered, with one host's last error line.

        For example, srun reports that other steps of the job occupy the cores.
        """
        names = ", ".join(self.job.hosts[node].name for node in sorted(silent))
        last = next(
            (errors[-1] for node in sorted(silent) if (errors := self.connections[node].errors)),
            "",
        )
        return names + (f" ({last})" if last else "")

    def unreachable(self, node: int) -> str:
        """Return the problem of a host whose connection ended before its hello message."""
        told = (
            "; ".join(line for line in self.connections[node].errors[-3:] if line)
            or f"the connection ended with {self.connections[node].process.poll()}"
        )
        return (
            f"{self.job.hosts[node].name}: cannot be reached, or has no Python at"
            f" {self.job.python}: {told}"
        )

    def without_gpus(self, gpus: dict[int, int]) -> list[str]:
        """Return an error for each host without a visible GPU if other hosts have visible GPUs.

        This happens after a reboot, until the driver is loaded.
        """
        most = max(gpus, key=lambda node: gpus[node], default=0)
        if self.job.spawn == "once" or not gpus.get(most):
            return []
        names = {node: self.job.hosts[node].name for node in gpus}
        fix = "Load its driver (nvidia-smi shows whether it is), or leave the host out"
        return [
            f"{names[node]}: no GPU is visible, but {names[most]} has {gpus[most]}. {fix}"
            for node in gpus
            if not gpus[node]
        ]

    def follow(self) -> None:
        """Follow every host to its end.

        Stop signals are passed on. All ranks are ended once one rank has failed.
        """
        while any(connection.open for connection in self.connections.values()):
            with contextlib.suppress(queue.Empty):
                node, message = self.events.get(timeout=0.2)
                if node < 0:
                    self.ask_to_stop(message)
                elif message is None:
                    self.hung_up(node)
                else:
                    self.heard(node, message)
            if self.kill_at is not None and time.monotonic() > self.kill_at:
                self.kill_at = None
                self.kill()

    def ask_to_stop(self, name: str) -> None:
        self.presses += name == "SIGINT"
        if self.presses == 3:
            self.say("third Ctrl-C: all ranks are ended at once, without a checkpoint")
            return self.kill()
        if not self.told:
            self.told = name
            self.say(
                f"{name}: asking all ranks for a checkpoint"
                + ("; twice more ends them at once" if name == "SIGINT" else "")
            )
            for connection in self.connections.values():
                connection.send(stop=name)
        return None

    def kill(self) -> None:
        self.killed = True
        for connection in self.connections.values():
            connection.send(kill=True)

    def hung_up(self, node: int) -> None:
        connection = self.connections[node]
        if connection.open:
            connection.open = False
            told = "; ".join(line for line in connection.errors[-3:] if line)
            self.fail(
                1,
                f"the connection to {self.job.hosts[node].name} was"
                f" lost{f' ({told})' if told else ''}",
                [],
                START_AGAIN,
            )

    def heard(self, node: int, message: dict[str, Any]) -> None:
        host = self.job.hosts[node].name
        if "out" in message:
            SCREEN.write(message["out"])
        elif "line" in message:
            SCREEN.draw(message["line"])
        elif "told" in message and not self.told:
            self.say(f"{host}: {message['told']}: asking all ranks for a checkpoint")
            self.told = message["told"]
            for connection in self.connections.values():
                connection.send(stop=self.told)
        elif "run_folder" in message:
            if node == self.nodes[0]:  # every host reports the same folder
                self.learn(Path(message["run_folder"]))
        elif "ended" in message:
            self.rank_ended(node, **message["ended"])
        elif "launcher" in message:
            ended = message["launcher"]
            if ended["ranks"]:
                self.fail(
                    0,
                    f"the launcher on {host} {how(ended['code'])} and left {ended['ranks']} ranks",
                    [],
                    START_AGAIN,
                )
            elif ended["code"] and not self.told:
                self.fail(
                    6,
                    f"the launcher on {host} {how(ended['code'])}{LAST_LINES} {ended['log']}",
                    ended["tail"],
                    exit_code(ended["code"]),
                )
        elif "done" in message:
            self.connections[node].open = False
            if message["done"] and self.kill_at is not None:
                self.kill_at = min(self.kill_at, time.monotonic())

    def rank_ended(
        self, node: int, rank: int, code: int | None, tail: list[str], error: str, log: str
    ) -> None:
        self.codes[rank] = code
        if code == 0:
            return
        name = f"rank {rank}" if self.job.spawn != "once" else "the script"
        what = f"{name} on {self.job.hosts[node].name} {how(code)}"
        if error.startswith("refused") and (rank == 0 or self.job.spawn == "once"):
            what += f". Its message is above, and in {log}"
        else:
            what += f"{f': {error}' if error else ''}{LAST_LINES} {log}"
        if self.told and (code in STOP_CODES or code in (-15, -2, -1)):
            return
        # a CUDA error comes from this rank itself, not from a lost peer
        aborted = [
            line
            for line in [error, *tail]
            if any(word in line for word in ABORTED) and "CUDA error" not in line
        ]
        lost = bool(aborted) or any(
            word in line for line in [error, *tail[-8:]] for word in LOST_PEER
        )
        if code in STOP_CODES:
            telling = 5
        elif code in (-15, -2, -1):
            # Either the rank's launcher ended it because a different rank had failed, or no other
            # failure is known.
            telling = 4
        elif lost:
            # A peer of the rank that failed first. Peers are often reported before that rank.
            telling = 3
        else:
            telling = 1 if code is not None and code < 0 else 2
        cut = lost and not any(word in line for line in [error, *tail[-8:]] for word in OUR_WORDS)
        self.fail(telling, what, tail, START_AGAIN if cut else exit_code(code))

    def fail(self, telling: int, what: str, tail: list[str], code: int) -> None:
        if self.killed:
            return  # this launcher ended it
        failure = (telling, time.monotonic() - self.began, what, tail, code)
        self.failures.append(failure)
        if telling <= 2 and not self.shown:
            self.shown = failure
            self.say(told(failure))
        settle = {3: SETTLE_LOST, 4: SETTLE_LOST, 5: SETTLE_STOP}.get(telling, SETTLE)
        if self.kill_at is None or time.monotonic() + settle < self.kill_at:
            self.kill_at = time.monotonic() + settle

    def outcome(self) -> Outcome:
        if not self.failures:
            ranks = (
                sum(self.job.hosts[node].slots for node in self.nodes)
                if self.job.spawn != "once"
                else len(self.nodes)
            )
            if len(self.codes) == ranks and all(code == 0 for code in self.codes.values()):
                return Outcome("done", 0, "", self.told)  # a stop in the last step changed nothing
            if self.told:
                return Outcome("stopped", 128 + signal.Signals[self.told], "", self.told)
            return Outcome(
                "failed",
                1,
                f"only {len(self.codes)} of {ranks} ranks were ever seen. See {self.logs}",
            )
        first = min(self.failures, key=lambda failure: failure[:2])
        _, _, what, tail, code = first
        if code in STOP_CODES:
            return Outcome(
                "stopped", code, what.partition(". The last lines of ")[0], STOP_CODES[code]
            )
        told_why = code == 2 or (
            code != START_AGAIN and any(line.startswith("refused") for line in tail)
        )
        return Outcome(
            "refused" if told_why and not self.told else "failed",
            code,
            "" if first is self.shown else told(first),
            self.told,
        )


def told(failure: tuple[int, float, str, list[str], int]) -> str:
    """Return the text that is printed for a failure."""
    _, seconds, what, tail, _ = failure
    tail = tail if LAST_LINES in what else []
    return "\n".join(
        [
            f"after {seconds:.0f} s {what}:" if tail else f"after {seconds:.0f} s {what}",
            *("    " + line for line in tail),
        ]
    )


def exit_code(code: int | None) -> int:
    """Return launch's exit code, given the exit code of a process.

    A signal or an unknown code counts as a fault from outside.
    """
    if code is None or code < 0:
        return START_AGAIN
    return code if code in STOP_CODES or code in (2, START_AGAIN) else 1


def how(code: int | None) -> str:
    """Return how a process ended, for example "ended with 1" or "was ended by SIGKILL"."""
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended with {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = (
        " (by somebody, or by the kernel because memory ran out)" if code == -signal.SIGKILL else ""
    )
    return f"was ended by {name}{hint}"


def new_logs(parent: Path) -> Path:
    """Create a new folder for the next start's output. Raises `LaunchError` if this fails."""
    while True:
        taken = [
            int(path.name.removeprefix("start_"))
            for path in parent.glob("start_*")
            if path.name.removeprefix("start_").isdigit()
        ]
        logs = parent / f"start_{max(taken, default=0) + 1:03d}"
        try:
            os.makedirs(logs)
            return logs
        except FileExistsError:
            continue  # a different host of the job created it first
        except OSError as error:
            raise cannot_make(parent, error) from None


def cannot_make(folder: Path, error: OSError) -> LaunchError:
    return LaunchError(
        f"{folder} cannot be created: {error.strerror}. Choose another run folder with --out, or"
        " start from another folder"
    )
