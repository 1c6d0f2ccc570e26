"""`python -m launch` on two hosts, each with a real sshd.

The losses must equal the losses on one machine, secrets must stay secret, and no process may
remain.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from job import MARK, NANO, Job, contention, metrics, reproducible_values, steps_done
from pool import FOLDERS, ROOT
from two_hosts import NAMES, TwoHosts, two_hosts_or_skip
from words import BYTES, arbitrary_words

GONE = 10.0  # seconds after which no process may remain on either host
FLAGS = (
    "--tiny",
    "--schedule",
    "constant",
    "--warmup_steps",
    "0",
    "--eval_every",
    "0",
    "--no-export",
    "--out",
    "run",
)
SECRETS = {
    "HF_TOKEN": "hf_fakeFAKEfake0001",
    "WANDB_API_KEY": "fake" * 10,
    "AWS_SECRET_ACCESS_KEY": "aws/fake+0003",
}
REACHED = {
    "no_proxy": "*",
    "https_proxy": "http://proxy.corp:3128",
    "AWS_ENDPOINT_URL": "https://s3.corp",
    "NCCL_IB_GID_INDEX": "3",
}
LAUNCH = [sys.executable, "-m", "launch"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with two_hosts_or_skip() as made:
        yield made


@pytest.fixture
def start(tmp_path: Path, hosts: TwoHosts) -> Iterator[Callable[..., Job]]:
    """Return a function that starts `python -m launch` on the first host."""
    jobs: list[Job] = []

    def start(*words: object, names: Sequence[str] = NAMES, **variables: str) -> Job:
        where = [
            "--hostfile",
            str(hosts.hostfile(names=names)),
            "--ssh_config",
            str(hosts.config),
            "--env",
            MARK,
        ]
        path = os.pathsep.join([str(ROOT), str(ROOT / "recipes"), *map(str, FOLDERS)])
        jobs.append(
            Job(
                tmp_path,
                hosts.on(0, [*LAUNCH, *where, *map(str, words)]),
                PYTHONPATH=path,
                **variables,
            )
        )
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


@pytest.fixture(scope="module")
def one_machine(
    tmp_path_factory: pytest.TempPathFactory, ops: Callable[[str], None], hosts: TwoHosts
) -> Path:
    """Return the run folder of four ranks on one machine, started with the `deepspeed` launcher."""
    folder = tmp_path_factory.mktemp("one")
    job = Job(
        folder,
        [*LAUNCH, "--gpus", "4", str(NANO), *FLAGS, "--steps", "3", "--no-wandb"],
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "recipes")]),
    )
    try:
        assert job.wait(240) == 0, job.output[-8000:]
    finally:
        job.close()
    return folder / "run"


class Listing:
    """A thread that collects the command lines of all processes until it is closed."""

    def __enter__(self) -> "Listing":
        self.seen: set[str] = set()
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._look)
        self.thread.start()
        return self

    def _look(self) -> None:
        while not self.closing.wait(0.1):
            for entry in Path("/proc").iterdir():
                with contextlib.suppress(OSError):
                    if entry.name.isdigit():
                        self.seen.add(
                            (entry / "cmdline")
                            .read_bytes()
                            .replace(b"\0", b" ")
                            .decode(errors="replace")
                        )

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.thread.join()


@pytest.mark.slow
def test_two_hosts_train_as_one_machine_and_nobody_sees_a_secret(
    start: Callable[..., Job], hosts: TwoHosts, one_machine: Path, tmp_path: Path
) -> None:
    with Listing() as listing:
        job = start(NANO, *FLAGS, "--steps", "3", **SECRETS, **REACHED)
        job.wait_for(lambda: len(hosts.ranks(1)) == 2 or job.process.poll() is not None, 180)
        variables = {rank: process.environ() for rank, process in hosts.ranks(1).items()}
        assert job.wait(240) == 0, job.output[-8000:]
    assert sorted(variables) == [2, 3]
    # A rank on the second host has the variables that a run needs, including the secrets.
    for own in variables.values():
        assert {name: own.get(name) for name in (*SECRETS, *REACHED)} == SECRETS | REACHED
        assert (
            own["WANDB_MODE"] == "offline"
            and own["OMP_NUM_THREADS"] == "1"
            and own["MASTER_ADDR"] == hosts.addresses[0]
        )
    assert reproducible_values(metrics(tmp_path / "run")) == reproducible_values(
        metrics(one_machine)
    )
    assert any("launch.host" in line for line in listing.seen), "else nothing was listed"
    files = [
        path
        for path in (
            *tmp_path.rglob("*"),
            *hosts.folder.rglob("*"),
            *Path("/tmp").glob("launch_*/*"),
        )
        if path.is_file()
    ]
    assert len([path for path in files if path.parent.name == "start_001"]) == 4 + 2 and any(
        path.suffix == ".wandb" for path in files
    )
    for name, value in SECRETS.items():
        assert not [line for line in listing.seen if value in line], name
        assert not [path for path in files if value.encode() in path.read_bytes()], name
        assert f"{name} (secret)" in job.output
    assert not hosts.processes(0) and not hosts.processes(1)


@pytest.mark.slow
@pytest.mark.parametrize("spawn", ["torchrun", "deepspeed"])
def test_a_killed_remote_rank_ends_both_hosts(
    start: Callable[..., Job], hosts: TwoHosts, one_machine: Path, tmp_path: Path, spawn: str
) -> None:
    """Up to the kill, the losses must equal the losses on one machine."""
    run = tmp_path / "run"
    job = start("--spawn", spawn, NANO, *FLAGS, "--steps", "100000", "--no-wandb")
    job.wait_for(lambda: steps_done(run) > 3 or job.process.poll() is not None, 240)
    assert job.process.poll() is None, job.output[-8000:]
    hosts.ranks(1)[3].kill()
    began = time.monotonic()
    job.wait_for(
        lambda: (
            job.process.poll() is not None and not hosts.processes(0) and not hosts.processes(1)
        ),
        60,
    )
    seconds, busy = time.monotonic() - began, contention()
    print(f"gone after {seconds:.1f} s, contention {busy:.1f}")
    assert seconds < GONE * busy
    assert job.process.returncode == 75  # a lost rank: start the job again
    assert "rank 3 on worker-2 was ended by SIGKILL" in job.output, job.output[-4000:]
    assert reproducible_values(metrics(run)[:3]) == reproducible_values(metrics(one_machine))


@pytest.mark.slow
def test_a_lost_coordinator_ends_both_hosts_with_a_checkpoint(
    start: Callable[..., Job], hosts: TwoHosts, ops: Callable[[str], None], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start(NANO, *FLAGS, "--steps", "100000", "--no-wandb")
    job.wait_for(lambda: steps_done(run) > 1 or job.process.poll() is not None, 240)
    assert job.process.poll() is None, job.output[-8000:]
    job.process.kill()
    job.wait_for(lambda: not hosts.processes(0) and not hosts.processes(1), 90)
    steps = steps_done(run)
    assert (run / "checkpoints" / "latest").read_text() == f"step_{steps:08d}"


@pytest.mark.slow
@pytest.mark.parametrize("spawn", ["torchrun", "deepspeed"])
def test_hosts_with_addresses_of_ipv6_train(
    start: Callable[..., Job], hosts: TwoHosts, one_machine: Path, tmp_path: Path, spawn: str
) -> None:
    job = start(
        "--spawn", spawn, NANO, *FLAGS, "--steps", "3", "--no-wandb", names=hosts.addresses_6
    )
    assert job.wait(240) == 0, job.output[-8000:]
    assert reproducible_values(metrics(tmp_path / "run")) == reproducible_values(
        metrics(one_machine)
    )


@pytest.mark.slow
def test_a_host_that_is_away_for_three_minutes_costs_one_restart(
    start: Callable[..., Job], hosts: TwoHosts, one_machine: Path, tmp_path: Path
) -> None:
    """The host has lost its network and its processes. The steps must equal the steps on one
    machine.
    """
    run = tmp_path / "run"
    flags = ["--steps", "100000", "--save_every", "2", "--no-wandb", "--stop_at", "12"]
    job = start("--max_restarts", "3", NANO, *FLAGS, *flags)
    job.wait_for(lambda: steps_done(run) > 4 or job.process.poll() is not None, 240)
    assert job.process.poll() is None, job.output[-8000:]
    hosts.cable(1, "down")
    hosts.power_off(1)
    try:
        job.wait_for(
            lambda: "waiting for hosts" in job.output or job.process.poll() is not None, 240
        )
        time.sleep(180)
    finally:
        hosts.power_on(1)
        hosts.cable(1, "up")
    assert job.wait(300) == 0, job.output[-8000:]
    assert (
        "worker-2: cannot be reached" in job.output and job.output.count("launch: restart ") == 1
    ), job.output[-8000:]
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 13)) and reproducible_values(
        lines[:3]
    ) == reproducible_values(metrics(one_machine))


@pytest.mark.slow
def test_a_host_that_never_comes_back_is_named(
    start: Callable[..., Job], hosts: TwoHosts, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start(
        "--max_restarts", "3", "--wait_hosts", "10", NANO, *FLAGS, "--steps", "100000", "--no-wandb"
    )
    job.wait_for(lambda: steps_done(run) > 1 or job.process.poll() is not None, 240)
    hosts.power_off(1)
    try:
        assert job.wait(240) == 75, job.output[-8000:]
    finally:
        hosts.power_on(1)
    assert (
        "not started again: --wait_hosts 10 s are over, and still worker-2: cannot be reached"
        in job.output
    )


# A recipe that is killed on worker-1 after its fourth step, and names this host in an alert.
NAMED = """
import json, os, pathlib, platform, runpy, signal, sys, threading, time
import recipekit
out, recipe = pathlib.Path(sys.argv[sys.argv.index("--out") + 1]), os.environ["TEST_RECIPE"]

def fail():
    begun = time.time()
    lines = out / "metrics.jsonl"
    while not lines.exists() or lines.stat().st_mtime < begun or len(lines.open().readlines()) < 4:
        time.sleep(0.02)
    alert = {"time": time.time(), "step": 4, "kind": "hang", "level": "error", "text": "stuck"}
    with open(out / "alerts.jsonl", "a") as file:
        file.write(json.dumps(alert | {"rank": 1, "host": platform.node()}) + "\\n")
    os.kill(os.getpid(), signal.SIGKILL)

if platform.node() == "worker-1" and os.environ["RANK"] == "0":
    threading.Thread(target=fail, daemon=True).start()
runpy.run_path(recipe, run_name="__main__")
"""


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_host_that_alerts_name_twice(
    start: Callable[..., Job], hosts: TwoHosts, ops: Callable[[str], None], tmp_path: Path
) -> None:
    (tmp_path / "named.py").write_text(NAMED)
    flags = [*FLAGS, "--save_every", "2", "--steps", "200", "--no-wandb"]
    recipe = {"TEST_RECIPE": str(NANO)}
    job = start(
        "--max_restarts", "4", "--nodes", "1", "--env", *recipe, "named.py", *flags, **recipe
    )
    assert job.wait(240) == 0, job.output[-8000:]
    assert "2 alerts have named worker-1: worker-2 replaces it" in job.output, job.output
    assert job.output.count("launch: restart ") == 2

    there = [*LAUNCH, "--gpus", "2", str(NANO), *FLAGS[:-1], "plain", *flags[len(FLAGS) :]]
    plain = Job(tmp_path, there, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "recipes")]))
    try:
        assert plain.wait(240) == 0, plain.output[-8000:]
    finally:
        plain.close()
    assert reproducible_values(metrics(tmp_path / "run")) == reproducible_values(
        metrics(tmp_path / "plain")
    )


TWICE = """
import os, sys, time
from pathlib import Path
first = not Path("ready_2").exists()
Path(f"ready_{os.environ['RANK']}").touch()
time.sleep(600 if first else 0)
"""
RESTART = """
import sys
from pathlib import Path
from launch import hosts, restart
from launch.__main__ import say
from launch.job import Job
machines = tuple(hosts.read_hostfile(Path(sys.argv[1])))
job = Job(machines, "once", ("twice.py",), sys.executable, sys.argv[3], {}, where="hostfile", \
ssh_config=sys.argv[2])
sys.exit(restart.run(job, 1, say, float(sys.argv[4])))
"""


@pytest.mark.parametrize(("wait", "code"), [(60, 0), pytest.param(3, 75, marks=pytest.mark.slow)])
def test_a_restart_waits_until_a_host_answers_again(
    hosts: TwoHosts, tmp_path: Path, wait: int, code: int
) -> None:
    """After a reboot, the host's sshd answers once the wait has been reported, or it never answers.

    Each host runs one script, without torch.
    """
    (tmp_path / "twice.py").write_text(TWICE)
    words = [
        sys.executable,
        "-c",
        RESTART,
        str(hosts.hostfile()),
        str(hosts.config),
        str(tmp_path),
        str(wait),
    ]
    job = Job(tmp_path, hosts.on(0, words), PYTHONPATH=str(ROOT))
    try:
        job.wait_for(
            lambda: len(list(tmp_path.glob("ready_*"))) == 2 or job.process.poll() is not None, 60
        )
        hosts.power_off(1)
        job.wait_for(
            lambda: "waiting for hosts" in job.output or job.process.poll() is not None, 60
        )
        if code == 0:
            hosts.power_on(1)
        assert job.wait(60) == code, job.output
    finally:
        if hosts.sshd[1].poll() is not None:
            hosts.power_on(1)
        job.close()
    assert job.output.count("launch: restart ") == 1 and job.output.count("launch: start ") == 2, (
        job.output
    )
    assert (
        job.output.count("worker-2: cannot be reached") == (1 if code == 0 else 2)
        and "worker-1: " not in job.output
    )


DUMP = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", \
"NCCL_STRANGE")
with open(f"dump_{os.environ['RANK']}.json", "w") as file:
    json.dump([sys.argv[1:], {name: os.environ.get(name) for name in names}], file)
"""


def test_a_script_once_on_each_host_gets_words_and_variables_as_typed(
    start: Callable[..., Job], hosts: TwoHosts, tmp_path: Path
) -> None:
    (tmp_path / "dump.py").write_text(DUMP)
    words = [*arbitrary_words(), BYTES]
    job = start("--once", "dump.py", *words, NCCL_STRANGE="a 'b'\n$(id) \"")
    assert job.wait(90) == 0, job.output
    dumps = [json.loads((tmp_path / f"dump_{rank}.json").read_text()) for rank in (0, 2)]
    assert [dump[0] for dump in dumps] == [words, words]
    own = [dump[1] for dump in dumps]
    port = own[0]["MASTER_PORT"]
    assert own == [
        {
            "RANK": rank,
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": hosts.addresses[0],
            "MASTER_PORT": port,
        }
        | {"NCCL_STRANGE": "a 'b'\n$(id) \""}
        for rank in ("0", "2")
    ]
    assert not (tmp_path / "here").exists()


def test_hosts_may_have_addresses_of_ipv6(
    start: Callable[..., Job], hosts: TwoHosts, tmp_path: Path
) -> None:
    """The hosts' names resolve to 127.0.1.1, so gloo receives the interface's name."""
    dump = (
        "import json, os, sys; json.dump([os.environ[name] for name in sys.argv[1:]],"
        " open(f\"dump_{os.environ['RANK']}.json\", 'w'))"
    )
    (tmp_path / "dump.py").write_text(dump)
    job = start(
        "--once",
        "dump.py",
        "MASTER_ADDR",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        names=hosts.addresses_6,
    )
    assert job.wait(90) == 0, job.output
    for rank in (0, 2):
        assert json.loads((tmp_path / f"dump_{rank}.json").read_text()) == [
            hosts.addresses_6[0],
            "eth0",
            "=eth0",
        ]


def test_the_doctor_examines_both_hosts(
    start: Callable[..., Job], hosts: TwoHosts, tmp_path: Path
) -> None:
    """The four ranks, two on each host, can reach each other.

    A fault on the second host is reported for that host only.
    """
    job = start("--doctor", "--quick", "--out", str(tmp_path / "run"))
    assert job.wait(150) == 0, job.output
    assert "4 ranks on 2 hosts" in job.output and "ok: no problem found" in job.output
    assert not hosts.processes(0) and not hosts.processes(1)


def test_hosts_that_cannot_start_are_all_named(
    start: Callable[..., Job], hosts: TwoHosts, tmp_path: Path
) -> None:
    (hosts.folder / "hostfile").write_text("worker-1 slots=2\nworker-9 slots=2\n")
    job = Job(
        tmp_path,
        hosts.on(
            0,
            [
                *LAUNCH,
                "--hostfile",
                str(hosts.folder / "hostfile"),
                "--ssh_config",
                str(hosts.config),
                "--python",
                "/nowhere/python",
                str(NANO),
            ],
        ),
        PYTHONPATH=str(ROOT),
    )
    assert job.wait(60) == 1
    assert "worker-1: cannot be reached, or has no Python at /nowhere/python" in job.output
    assert "worker-9: cannot be reached" in job.output and "Traceback" not in job.output
    job.close()


@pytest.mark.slow
def test_stock_deepspeed_over_pdsh_reaches_both_hosts(
    hosts: TwoHosts, one_machine: Path, tmp_path: Path
) -> None:
    """launch/README.md describes this method, which does not use our launcher.

    It forwards fewer variables, so the ranks read the variables from a file.
    """
    if not shutil.which("pdsh"):
        pytest.skip("needs Debian's pdsh (tests/system_packages.sh)")
    deepspeed = Path(sys.executable).with_name("deepspeed")
    home = tmp_path / "home"
    home.mkdir()
    kept = ("DS_ACCELERATOR", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "TORCH_EXTENSIONS_DIR", "PATH")
    # Its name resolves to 127.0.1.1 on a host.
    lines = [f"{name}={os.environ[name]}\n" for name in kept] + ["GLOO_SOCKET_IFNAME=eth0\n"]
    (home / ".deepspeed_env").write_text("".join(lines))
    words = [
        "--hostfile",
        str(hosts.hostfile()),
        "--no_ssh_check",
        "--master_addr",
        hosts.addresses[0],
        str(NANO),
        *FLAGS,
        "--steps",
        "3",
        "--no-wandb",
    ]
    job = Job(
        tmp_path,
        hosts.on(0, [str(deepspeed), *words]),
        HOME=str(home),
        PDSH_SSH_ARGS_APPEND=f"-F {hosts.config}",
        DLTS_HOSTFILE="/nowhere",
    )
    try:
        assert job.wait(240) == 0, job.output[-8000:]
    finally:
        job.close()
        for host in (0, 1):
            for process in hosts.processes(host):
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
    assert reproducible_values(metrics(tmp_path / "run")) == reproducible_values(
        metrics(one_machine)
    )


def test_launch_loads_the_standard_library_only() -> None:
    code = (
        "import sys, launch.__main__; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    loaded = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout.split()
    assert {name for name in loaded if not name.startswith("_")} - {"launch"} <= set(
        sys.stdlib_module_names
    )
