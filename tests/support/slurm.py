"""A real Slurm cluster of two nodes on one machine: munged, slurmctld and two slurmd, with all
their files in one folder.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from pool import free_port

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
ReturnToService=2
MailProg=/bin/true
SchedulerParameters=batch_sched_delay=1,sched_interval=2
MinJobAge=600
KillWait=30
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return the reason why this machine cannot run Slurm; "" if it can."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    lacking = [
        package
        for package in ("slurmctld", "slurmd", "slurm-client", "munge")
        if not shutil.which({"slurm-client": "sbatch"}.get(package, package), path=path)
    ]
    if lacking:
        return f"needs Debian's {', '.join(lacking)} (tests/system_packages.sh)"
    return "needs root, as which the daemons start jobs" if os.geteuid() else ""


class Slurm:
    """The Slurm daemons: `slurm.run("sbatch", ...)` returns a command's output."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm_"))
        self.daemons: list[subprocess.Popen[bytes]] = []

    def make(self) -> None:
        # munged rejects a socket below a folder that other users may write to.
        os.chmod(self.folder, 0o755)
        ports = {"control": free_port(), "first": free_port(), "second": free_port()}
        (self.folder / "slurm.conf").write_text(
            CONFIG.format(folder=self.folder, host=socket.gethostname(), **ports)
        )
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("pid", "log", "seed")]
        self._start(
            "munged",
            "--foreground",
            "--force",
            f"--socket={self.folder}/munge.socket",
            f"--key-file={key}",
            *files,
        )
        self._until(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._start("slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            self._start("slurmd", "-D", "-N", node)
        self._until(
            lambda: self.run("sinfo", "-h", "-o", "%D %t").split() == ["2", "idle"], "the nodes"
        )

    def _start(self, name: str, *flags: str) -> None:
        program = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
        assert program
        with (self.folder / f"{name}_{len(self.daemons)}.out").open("wb") as log:
            self.daemons.append(
                subprocess.Popen(
                    [program, *flags],
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _until(self, true: object, what: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not true():  # type: ignore[operator]
            logs = "\n".join(
                path.read_text(errors="replace")[-2000:]
                for path in [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
            )
            assert time.monotonic() < deadline, f"{what} did not come up:\n{logs}"
            time.sleep(0.2)

    def environment(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *argv: str, folder: Path | None = None, **variables: str) -> str:
        done = subprocess.run(
            argv,
            cwd=folder,
            env=self.environment() | variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout + done.stderr

    def job(self, number: str) -> dict[str, str]:
        """Return the fields that scontrol prints for a job."""
        return dict(
            word.split("=", 1)
            for word in self.run("scontrol", "show", "job", "--oneliner", number).split()
            if "=" in word
        )

    def close(self) -> None:
        if self.daemons:
            self.run("scancel", "--full", "-u", "root")
            deadline = time.monotonic() + 20
            while self.run("squeue", "-h").strip() and time.monotonic() < deadline:
                time.sleep(0.5)
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder)


@contextmanager
def slurm_or_skip() -> Iterator[Slurm]:
    """Start Slurm, and stop it at the end of the block, even after an error."""
    if why := missing():
        pytest.skip(why)
    with closing(Slurm()) as slurm:
        slurm.make()
        yield slurm
