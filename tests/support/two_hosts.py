"""Two hosts on one machine: network namespaces connected by a virtual cable (veth). Each has a real
sshd, a host name and a hosts file.

They share the file system, as the hosts of a cluster share the folder of the runs.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

NAMES = ("worker-1", "worker-2")


def missing() -> str:
    """Return the reason why this machine cannot run two hosts; "" if it can."""
    lacking = [
        f"{package} ({program})"
        for program, package in (
            ("ip", "iproute2"),
            ("sshd", "openssh-server"),
            ("ssh-keygen", "openssh-client"),
        )
        if not shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
    ]
    if lacking:
        return f"needs Debian's {', '.join(lacking)} (tests/system_packages.sh)"
    if (
        os.geteuid()
        or subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode
    ):
        return "needs the right to make network namespaces (root)"
    return ""


class TwoHosts:
    """The pair of hosts: `hosts.on(0, argv)` is the argv that runs a command on the first host."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hosts_"))
        self.spaces = [f"rk{os.getpid()}{letter}" for letter in "ab"]
        self.addresses = [f"10.86.{os.getpid() % 250}.{index + 1}" for index in range(2)]
        # IPv6 addresses, which are lost when the cable is unplugged
        self.addresses_6 = [f"fd86::{index + 1}" for index in range(2)]
        self.sshd: list[subprocess.Popen[bytes]] = []

    def make(self) -> None:
        key = self.folder / "key"
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd separates its privileges there
        table = "".join(
            f"{address} {name}\n" for address, name in zip(self.addresses, NAMES, strict=True)
        )
        for space, name in zip(self.spaces, NAMES, strict=True):
            run("ip", "netns", "add", space)
            self.file_of(space).mkdir(parents=True)
            # This follows Debian's installation: a host maps its own name to an address that no
            # other host can reach.
            (self.file_of(space) / "hosts").write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {name}\n{table}"
            )
            run("ip", "-n", space, "link", "set", "lo", "up")
        cables = [f"ve{os.getpid()}{letter}" for letter in "ab"]
        run(
            "ip",
            "-n",
            self.spaces[0],
            "link",
            "add",
            cables[0],
            "type",
            "veth",
            "peer",
            "name",
            cables[1],
            "netns",
            self.spaces[1],
        )
        for space, cable, address, address_6 in zip(
            self.spaces, cables, self.addresses, self.addresses_6, strict=True
        ):
            run("ip", "-n", space, "link", "set", cable, "name", "eth0")
            run("ip", "-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            run(
                "ip", "-n", space, "-6", "address", "add", f"{address_6}/64", "dev", "eth0", "nodad"
            )
            run("ip", "-n", space, "link", "set", "eth0", "up")
        for index in range(2):
            config = self.folder / f"sshd_{index}"
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{config}_key")
            config.write_text(
                f"Port 22\nHostKey {config}_key\nAuthorizedKeysFile {key}.pub\nPidFile"
                f" {config}.pid\nStrictModes no\nUsePAM no\nPermitRootLogin prohibit-password\n"
            )
            self.sshd.append(self.start_sshd(index))
        (self.folder / "ssh_config").write_text(
            f"Host *\n IdentityFile {key}\n IdentitiesOnly yes\n UserKnownHostsFile"
            f" {self.folder}/known_hosts\n StrictHostKeyChecking accept-new\n LogLevel ERROR\n"
        )
        deadline = time.monotonic() + 30
        for name in NAMES:
            while subprocess.run(
                self.on(0, ["ssh", "-F", str(self.config), name, "true"]),
                capture_output=True,
                check=False,
            ).returncode:
                assert time.monotonic() < deadline, (self.folder / "sshd_0.log").read_text() + (
                    self.folder / "sshd_1.log"
                ).read_text()
                time.sleep(0.2)

    def start_sshd(self, host: int) -> subprocess.Popen[bytes]:
        config = self.folder / f"sshd_{host}"
        inside = [
            "unshare",
            "--uts",
            "sh",
            "-c",
            f"hostname {NAMES[host]}; exec /usr/sbin/sshd -D -e -f {config}",
        ]
        with Path(f"{config}.log").open("ab") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.spaces[host], *inside], stdout=log, stderr=log
            )

    def power_off(self, host: int) -> None:
        """End every process on a host, including sshd and its connections, as a reboot does."""
        for pid in map(int, run("ip", "netns", "pids", self.spaces[host]).split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.sshd[host].wait()

    def power_on(self, host: int) -> None:
        self.sshd[host] = self.start_sshd(host)

    def cable(self, host: int, state: str) -> None:
        """Unplug a host's cable (`down`), or plug it in again (`up`)."""
        run("ip", "-n", self.spaces[host], "link", "set", "eth0", state)

    @staticmethod
    def file_of(space: str) -> Path:
        return Path("/etc/netns") / space

    @property
    def config(self) -> Path:
        return self.folder / "ssh_config"

    def hostfile(self, slots: int = 2, names: Sequence[str] = NAMES) -> Path:
        path = self.folder / "hostfile"
        path.write_text("".join(f"{name} slots={slots}\n" for name in names))
        return path

    def on(self, host: int, argv: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.spaces[host], *argv]

    def processes(self, host: int) -> list[psutil.Process]:
        """Return the processes on a host, except its sshd and sshd's connections."""
        found = []
        for pid in map(int, run("ip", "netns", "pids", self.spaces[host]).split()):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.name() != "sshd" and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self, host: int) -> dict[int, psutil.Process]:
        """Return RANK -> process for a launcher's Python processes that already run a script."""
        found = {}
        for process in self.processes(host):
            with contextlib.suppress(psutil.Error):
                words, variables = process.cmdline(), process.environ()
                if "RANK" in variables and any(
                    word.endswith(".py") and "/recipes/" in f"/{word}" for word in words[1:3]
                ):
                    found[int(variables["RANK"])] = process
        return found

    def close(self) -> None:
        for index, space in enumerate(self.spaces):
            if self.file_of(space).exists():
                for process in self.processes(index):
                    process.kill()
        for process in self.sshd:
            process.kill()
            process.wait()
        for space in self.spaces:
            if self.file_of(space).exists():
                run("ip", "netns", "delete", space)
                shutil.rmtree(self.file_of(space))
        shutil.rmtree(self.folder)


def run(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout


@contextlib.contextmanager
def two_hosts_or_skip() -> Iterator[TwoHosts]:
    """Start two connected hosts, and take them down at the end of the block, even after an
    error.
    """
    if why := missing():
        pytest.skip(why)
    with contextlib.closing(TwoHosts()) as hosts:
        hosts.make()
        yield hosts
