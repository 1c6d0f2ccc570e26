"""tools/doctor.py finds real faults, one at a time, and reports no other problem.

On a healthy machine it reports no problem.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
from job import NANO, Job, command_line, in_mounts
from pool import ROOT, environment, free_port
from recipekit.hosts.gpus import check_shared_memory
from recipekit.hosts.transformers_release import OLDEST_RELEASE, pinned_release
from recipekit.spec.errors import Problem

pytestmark = pytest.mark.processes
DOCTOR = ROOT / "tools" / "doctor.py"
HARD = 300.0  # maximum seconds that a doctor may take with any fault
NOBODY = 65534


class Ranks:
    """Doctor processes started as a launcher starts them, by default each on a separate host.

    `prefix[rank]` is inserted before a rank's command.
    """

    def __init__(
        self,
        folder: Path,
        world: int,
        words: tuple[Any, ...],
        prefix: dict[int, list[str]],
        absent: set[int],
        variables: dict[str, str],
    ):
        place = {
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        self.logs = {
            rank: folder / f"rank{rank}.log" for rank in range(world) if rank not in absent
        }
        self.processes = {}
        for rank, log in self.logs.items():
            with log.open("w") as output:
                self.processes[rank] = subprocess.Popen(
                    [*prefix.get(rank, []), sys.executable, str(DOCTOR), *map(str, words)],
                    cwd=folder,
                    env=quiet() | place | {"RANK": str(rank)} | variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )

    def wait(self, seconds: float = HARD) -> tuple[list[int], str]:
        """Return all ranks' exit codes by rank and their output, rank 0 first."""
        try:
            codes = [process.wait(seconds) for process in self.processes.values()]
        finally:
            for process in self.processes.values():
                if process.poll() is None:
                    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                        one.kill()
                    process.wait()
        text = "\n".join(log.read_text() for log in self.logs.values())
        assert "Traceback" not in text, text
        return codes, text


PINS = len([line for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line])
# Tests may also run with another supported release of transformers.
MATCHING = PINS - (version("transformers") != pinned_release())


def quiet() -> dict[str, str]:
    """Return the tests' environment without any login."""
    found = {
        name: value
        for name, value in environment().items()
        if name
        not in (
            "WANDB_API_KEY",
            "HF_TOKEN",
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "MASTER_PORT",
        )
    }
    return found | {"NETRC": os.devnull + "/none"}


def doctor(
    folder: Path, *words: Any, prefix: list[str] | None = None, **variables: str
) -> tuple[int, str]:
    """Run the doctor on one machine; return its exit code and output."""
    done = subprocess.run(
        [
            *(prefix or []),
            sys.executable,
            str(DOCTOR),
            "--master_port",
            str(free_port()),
            *map(str, words),
        ],
        cwd=folder,
        env=quiet() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HARD,
        check=False,
    )
    assert "Traceback" not in done.stdout, done.stdout
    return done.returncode, done.stdout


def only_problem(text: str) -> str:
    """Return the only reported problem."""
    found = re.findall(r"^  \d+\. (.*)$", text, re.M)
    assert len(found) == 1 and "1 problem\n" in text, text
    assert len(found[0].split(". ")) >= 2, f"value: rule. Fix: {found[0]}"
    return found[0]


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix != ".log"}


def test_a_healthy_machine(tmp_path: Path, ops: Callable[[str], None]) -> None:
    """Everything is measured, and no files remain."""
    before = listing(tmp_path)
    code, text = doctor(tmp_path, "--recipe", NANO, "--out", "run")
    assert code == 0 and text.endswith("ok: no problem found\n"), text
    assert "problems" not in text
    for told in (
        f"{MATCHING} of {PINS} as requirements.txt pins them",
        "2 of 2 work",
        "2 links",
        "GB/s",
        "2 checkpoints of ",
        "W&B  offline",
        "ops  the ops of the recipe are compiled",
    ):
        assert told in re.sub(" {2,}", "  ", text), text
    assert listing(tmp_path) == before


def test_two_healthy_hosts(tmp_path: Path) -> None:
    codes, text = Ranks(tmp_path, 2, ("--quick", "--out", "shared/run"), {}, set(), {}).wait()
    assert (
        codes == [0, 0]
        and "2 ranks on 2 hosts" in text
        and "ok: no problem found" in text
        and "clocks  within 0.0" in re.sub(" {2,}", "  ", text)
    ), text
    assert listing(tmp_path) == set()


@pytest.mark.slow
def test_a_rank_waits_for_the_others_as_long_as_rank_0_does(tmp_path: Path) -> None:
    """The third rank never starts. The second rank's own timeout is shorter than --patience."""
    code = (
        "import sys; from recipekit.commands import doctor; doctor.HOST_REPORT_SECONDS = 4.0;"
        " sys.exit(doctor.main(sys.argv[3:]))"
    )
    codes, text = Ranks(
        tmp_path, 3, ("--quick", "--patience", "20"), {1: [sys.executable, "-c", code]}, {2}, {}
    ).wait()
    assert (
        codes == [1, 1]
        and "stopped answering" not in text
        and "did not come within 20 s" in only_problem(text)
    ), text


def test_flags_of_the_recipe_may_follow_two_hyphens(tmp_path: Path) -> None:
    words = [
        sys.executable,
        str(DOCTOR),
        "--quick",
        "--ranks",
        "1",
        "--recipe",
        str(NANO),
        "--out",
        "run",
        "--",
        "--tiny",
    ]
    done = subprocess.run(
        words, cwd=tmp_path, env=quiet(), capture_output=True, text=True, timeout=HARD, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_out_is_not_the_same_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    other = in_mounts(f"mount -t tmpfs tmpfs {tmp_path / 'run'}")
    codes, text = Ranks(tmp_path, 2, ("--quick", "--out", "run"), {1: other}, set(), {}).wait()
    told = only_problem(text)
    assert (
        codes == [1, 1]
        and "out = run" in told
        and "is not the folder that rank 0 writes to" in told
        and "--out" in told
    )
    assert told.startswith(f"{socket.gethostname()} (rank 1): ")


def test_missing_libaio(tmp_path: Path) -> None:
    there = Path("/usr/include/libaio.h").exists()
    hidden = in_mounts("mount --bind /dev/null /usr/include/libaio.h") if there else []
    code, text = doctor(
        tmp_path, "--quick", *NVME, prefix=hidden, TORCH_EXTENSIONS_DIR=str(tmp_path / "ops")
    )
    told = only_problem(text)
    assert code == 1 and told.startswith("libaio: async_io") and "Install libaio-dev" in told
    if not there:
        pytest.skip(
            "needs Debian's libaio-dev to show that it is found when it is there"
            " (tests/system_packages.sh)"
        )
    code, text = doctor(tmp_path, "--quick", *NVME, TORCH_EXTENSIONS_DIR=str(tmp_path / "ops"))
    assert code == 0, text


NVME = ("--recipe", NANO, "--deepspeed_config", "zero3_nvme.json", "--out", "run")


@pytest.mark.slow
def test_wrong_version(tmp_path: Path) -> None:
    info = tmp_path / "site" / "transformers-5.21.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.21.0\n")
    code, text = doctor(
        tmp_path,
        "--quick",
        PYTHONPATH=f"{tmp_path / 'site'}{os.pathsep}{environment()['PYTHONPATH']}",
    )
    assert code == 1
    assert (
        only_problem(text)
        == f"transformers 5.21.0: must be {OLDEST_RELEASE} or newer. Run: pip install"
        f" transformers=={pinned_release()}"
    )


def test_full_disk(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    full = in_mounts(
        f"mount -t tmpfs -o size=2m tmpfs {tmp_path / 'run'}\nhead -c 2m /dev/zero >"
        f" {tmp_path / 'run'}/filler"
    )
    code, text = doctor(tmp_path, "--quick", "--out", "run", prefix=full)
    told = only_problem(text)
    assert (
        code == 1
        and "out = run" in told
        and "is full (No space left on device, 0 MiB free)" in told
        and "Free space" in told
    )


@pytest.mark.slow
def test_disk_too_small_for_the_checkpoints(tmp_path: Path, ops: Callable[[str], None]) -> None:
    (tmp_path / "run").mkdir()
    small = in_mounts(f"mount -t tmpfs -o size=100m tmpfs {tmp_path / 'run'}")
    code, text = doctor(tmp_path, "--recipe", NANO, "--out", "run", "--ranks", "1", prefix=small)
    told = only_problem(text)
    assert (
        code == 1
        and "out = run: 100 MiB free: the run writes 129 MiB: 2 checkpoints of 60 MiB and"
        " Hugging Face files of 9 MiB"
        in told
    ), told


def test_unwritable_out(tmp_path: Path) -> None:
    """The process is root without the right to override file permissions, so it acts as an ordinary
    user.
    """
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root and util-linux's setpriv to give up rights")
    user = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    folder = tmp_path / "others"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    folder.chmod(0o755)
    for out in (folder, folder / "deeper" / "run"):
        code, text = doctor(tmp_path, "--quick", "--out", out, prefix=user)
        told = only_problem(text)
        assert (
            code == 1
            and f"out = {out}: {folder} cannot be written: Permission denied" in told
            and "--out" in told
        )
    (folder / "run").mkdir()
    folder.chmod(0o700)
    code, text = doctor(tmp_path, "--quick", "--out", folder / "run", prefix=user)
    assert code == 1 and "cannot be written: Permission denied" in only_problem(text)


def test_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = doctor(tmp_path, "--quick", "--master_port", port)
    told = only_problem(text)
    assert (
        code == 1
        and told.startswith(f"master port {port}: is in use on ")
        and "Choose another with --master_port " in told
    )


@pytest.mark.slow
def test_a_host_that_never_comes(tmp_path: Path) -> None:
    began = time.monotonic()
    # Enough time for the other hosts to start.
    codes, text = Ranks(tmp_path, 3, ("--quick", "--patience", "15"), {}, {2}, {}).wait()
    told = only_problem(text)
    assert codes == [1, 1] and told.startswith(
        "rank 2 (host 2 of the job, counted from 0): did not come within 15 s"
    ), told
    assert time.monotonic() - began < 180


@pytest.mark.slow
def test_a_rank_whose_master_is_nowhere(tmp_path: Path) -> None:
    """192.0.2.1 is reserved for documentation (RFC 5737), so no host answers."""
    codes, text = Ranks(
        tmp_path, 2, ("--quick", "--patience", "3"), {}, {0}, {"MASTER_ADDR": "192.0.2.1"}
    ).wait(60)
    assert codes == [1]
    assert re.search(
        r"rank 0 at 192\.0\.2\.1, ports \d+ to \d+: cannot be reached from rank 1 on \S+ \(.+\)\."
        r" Check the address",
        text,
    ), text


@pytest.fixture
def star() -> Iterator[list[list[str]]]:
    """Yield commands that run on each of three hosts.

    The first host reaches both other hosts. The other hosts cannot reach each other, because the
    first host forwards no packets.
    """
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip(
            "needs root and Debian's iproute2 to make hosts of network namespaces"
            " (tests/system_packages.sh)"
        )
    names = [f"doctor{os.getpid()}{number}" for number in range(3)]
    ip = lambda *words: subprocess.run(["ip", *words], check=True, capture_output=True)  # noqa: E731
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "address", "add", "10.77.0.1/32", "dev", "lo")
        for number in (1, 2):
            ip(
                "-n",
                names[0],
                "link",
                "add",
                f"to{number}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                names[number],
            )
            ip("-n", names[0], "address", "add", f"10.77.{number}.1/24", "dev", f"to{number}")
            ip("-n", names[number], "address", "add", f"10.77.{number}.2/24", "dev", "eth0")
            ip("-n", names[0], "link", "set", f"to{number}", "up")
            ip("-n", names[number], "link", "set", "eth0", "up")
            ip("-n", names[number], "route", "add", "default", "via", f"10.77.{number}.1")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.mark.slow
def test_hosts_that_do_not_reach_each_other(tmp_path: Path, star: list[list[str]]) -> None:
    began = time.monotonic()
    codes, text = Ranks(
        tmp_path, 3, ("--quick",), dict(enumerate(star)), set(), {"MASTER_ADDR": "10.77.0.1"}
    ).wait()
    told = only_problem(text)
    name = socket.gethostname()
    assert codes == [1, 1, 1] and "4 of 6 work" in text
    assert told.startswith(
        f"rank 2 on {name} (rank 2) from rank 1 on {name} (rank 1): cannot be reached: timed out"
    ), told
    assert time.monotonic() - began < 180


@pytest.mark.slow
def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3, ("--quick", "--patience", "6"), {}, {2}, {})
    time.sleep(3)
    ranks.processes[1].kill()  # rank 0 is still waiting for rank 2
    codes, text = ranks.wait()
    assert codes == [1, -signal.SIGKILL]
    assert re.search(r"rank 1.*: (ended while|did not come)", text) and re.search(
        r"rank 2.*did not come", text
    ), text


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(
            pytest.param(number, marks=pytest.mark.slow)
            for number in (signal.SIGTERM, signal.SIGKILL)
        ),
    ],
)
def test_a_stopped_doctor_leaves_nothing(tmp_path: Path, number: int) -> None:
    """The signal is Ctrl-C in the terminal, which all ranks receive, or is sent to the command
    only.
    """
    argv = [sys.executable, str(DOCTOR), "--out", "run", "--master_port", free_port()]
    job = Job(tmp_path / "job", list(map(str, argv)))
    job.wait_for(
        lambda: (
            len([process for process in job.processes() if "--torch-part" in command_line(process)])
            == 2
        ),
        HARD,
    )
    if number == signal.SIGINT:
        os.killpg(job.process.pid, number)
    else:
        job.process.send_signal(number)
    job.wait_gone(30)
    assert (
        job.process.returncode
        == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    ), job.output
    assert "Traceback" not in job.output, job.output
    assert listing(tmp_path / "job") == set()
    job.close()


@pytest.mark.slow
def test_slow_host(tmp_path: Path) -> None:
    """One of two hosts gets only a thirtieth of the CPU time, by SIGSTOP and SIGCONT."""
    ranks = Ranks(tmp_path, 2, (), {}, set(), {})
    over = threading.Event()

    def pulse() -> None:
        while not over.is_set() and "two seconds of all-reduce" not in ranks.logs[0].read_text():
            time.sleep(0.05)
        slow = psutil.Process(ranks.processes[1].pid)
        while not over.is_set() and ranks.processes[1].poll() is None:
            with contextlib.suppress(psutil.Error):
                tree = [slow, *slow.children(recursive=True)]
                for send, seconds in (
                    (psutil.Process.suspend, 0.29),
                    (psutil.Process.resume, 0.01),
                ):
                    for process in tree:
                        with contextlib.suppress(psutil.Error):
                            send(process)
                    time.sleep(seconds)

    pulsing = threading.Thread(target=pulse)
    pulsing.start()
    try:
        codes, text = ranks.wait()
    finally:
        over.set()
        pulsing.join()
    told = only_problem(text)
    print(told)
    assert codes == [1, 1] and told.startswith(
        f"rank 1 on {socket.gethostname()} (rank 1): is slow: it needs "
    ), told


def test_too_little_shared_memory(tmp_path: Path) -> None:
    """Ranks on a CPU need no shared memory, as a run in test_ops shows. Ranks on GPUs need it."""
    code, text = doctor(
        tmp_path, "--quick", prefix=in_mounts("mount -t tmpfs -o size=64k tmpfs /dev/shm")
    )
    assert code == 0, text
    found = [
        str(item)
        for item in check_shared_memory(tmp_path, required=1 << 60)
        if isinstance(item, Problem)
    ]
    assert (
        len(found) == 1
        and found[0].startswith(f"{tmp_path}: ")
        and "free: NCCL requires 1073741824.0 GiB. Start the container with --shm-size=1g"
        in found[0]
    ), found


def test_stale_extension_lock(tmp_path: Path) -> None:
    lock = tmp_path / "ops" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w"):  # as torch does while it compiles
        code, text = doctor(tmp_path, "--quick", TORCH_EXTENSIONS_DIR=str(tmp_path / "ops"))
        assert code == 0, text
    os.utime(lock, (time.time() - 3 * 3600,) * 2)
    code, text = doctor(tmp_path, "--quick", TORCH_EXTENSIONS_DIR=str(tmp_path / "ops"))
    told = only_problem(text)
    assert (
        code == 1
        and told.startswith(f"{lock}, 3 h old: is left over from a compile that was killed")
        and told.endswith(f". Run: rm -f {lock}")
    ), told
    assert lock.exists(), "a doctor changes nothing"


@pytest.mark.slow
def test_not_logged_in(tmp_path: Path) -> None:
    code, text = doctor(tmp_path, "--quick", WANDB_MODE="online")
    told = only_problem(text)
    assert code == 1 and told.startswith(
        "WANDB_MODE = online: this host is not logged in to W&B. Run: wandb login"
    ), told
    code, text = doctor(tmp_path, "--quick", WANDB_MODE="online", WANDB_API_KEY="0123456789" * 4)
    assert code == 0 and "logged in" in text and "0123456789" not in text, text


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (200, "", None),
        (403, "GatedRepo", "is gated, and this host is not logged in"),
        (0, "", "the hub is unreachable"),
    ],
)
def test_a_model_that_may_not_be_downloaded(
    tmp_path: Path, status: int, code: str, says: str | None
) -> None:
    """The server answers as the hub does; with status 0 there is no server."""
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        port = hub.server_port
        if status:
            threading.Thread(target=hub.serve_forever, daemon=True).start()
        else:
            hub.server_close()
        words = (
            "--quick",
            "--recipe",
            NANO,
            "--model",
            "some-org/some-model",
            "--init",
            "pretrained",
            "--out",
            "run",
        )
        exit_code, text = doctor(
            tmp_path,
            *words,
            HF_ENDPOINT=f"http://127.0.0.1:{port}",
            HF_HUB_OFFLINE="0",
            HF_HOME=str(tmp_path / "hub"),
        )
        if status:
            hub.shutdown()
    assert asked == (["/api/models/some-org/some-model/auth-check"] if status else [])
    if says is None:
        assert exit_code == 0 and "some-org/some-model may be read" in text, text
    else:
        assert (
            exit_code == 1
            and f"model = some-org/some-model: {says}"
            in text.replace("is not on this host, and ", "")
            and only_problem(text)
        )


def test_nvme_path_in_memory(tmp_path: Path) -> None:
    config = json.loads((ROOT / "ds_configs" / "zero3_nvme.json").read_text())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for block in ("offload_optimizer", "offload_param"):
            config["zero_optimization"][block]["nvme_path"] = folder
        (tmp_path / "mine.json").write_text(json.dumps(config))
        code, text = doctor(
            tmp_path,
            "--quick",
            "--recipe",
            NANO,
            "--deepspeed_config",
            tmp_path / "mine.json",
            "--out",
            "run",
        )
    assert (
        code == 1
        and text.count(
            f"{folder} is in memory (tmpfs), so offloading there frees no memory. Use a folder on a"
            " local drive"
        )
        == 2
    ), text
    others = [
        problem for problem in re.findall(r"^  \d+\. (.*)$", text, re.M) if folder not in problem
    ]
    # There is one problem for each of the two keys, and the machine may also lack libaio.
    assert all(problem.startswith("libaio: ") for problem in others), text


def test_clock_skew(tmp_path: Path) -> None:
    if not shutil.which("faketime"):
        pytest.skip("needs Debian's faketime (tests/system_packages.sh)")
    codes, text = Ranks(
        tmp_path, 2, ("--quick",), {1: ["faketime", "-f", "+90s"]}, set(), {}
    ).wait()
    told = only_problem(text)
    name = socket.gethostname()
    assert codes == [1, 1] and re.match(
        rf"{name} \(rank 1\): clock: (89\.9|90\.[0-2]) s ahead of {name} \(rank 0\)\. ",
        told.replace(": more", ". More"),
    ), told


def test_a_wrong_command_line_exits_2(tmp_path: Path) -> None:
    for words in (("--world", "0"), ("--tiny",), ("--recipe", NANO, "--stepz", "3")):
        code, text = doctor(tmp_path, "--quick", *words)
        assert code == 2, text


def test_a_recipe_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text('open("prompts.txt")')
    code, text = doctor(tmp_path, "--quick", "--recipe", "reads.py")
    assert code == 1 and only_problem(text).startswith(
        "--recipe reads.py: cannot be imported: FileNotFoundError"
    ), text


def test_a_recipe_that_cannot_run_is_told_with_the_rest(tmp_path: Path) -> None:
    code, text = doctor(tmp_path, "--quick", "--recipe", NANO, "--tp", "3", WANDB_MODE="online")
    assert (
        code == 1
        and "2 problems" in text
        and "does not divide the 2 ranks" in text
        and "WANDB_MODE = online" in text
    ), text


def test_a_recipe_that_is_none_is_refused_before_links_are_measured(tmp_path: Path) -> None:
    """The error is one line, and no rank is started."""
    (tmp_path / "broken.py").write_text("RECIPE = (")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "folder.py").mkdir()
    told = {
        "nope.py": "the file does not exist on this host. Give a file of recipes/",
        "llama_nano_zero3.py": (
            f"the file does not exist on this host. Did you mean {os.path.relpath(NANO, tmp_path)}?"
        ),
        "folder.py": "is a folder",
        "broken.py": "cannot be imported: SyntaxError",
        "empty.py": "sets no RECIPE = Recipe(...)",
    }
    for name, why in told.items():
        words = [sys.executable, str(DOCTOR), "--recipe", name]
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env=quiet(),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (done.returncode, done.stdout) == (
            1,
            "",
        ) and "Traceback" not in done.stderr, done.stderr
        first, line = done.stderr.splitlines()
        assert first == "refused: 1 problem" and line.startswith(f"  1. --recipe {name}: {why}")


def test_the_doctor_refuses_variables_that_a_start_refuses(tmp_path: Path) -> None:
    env = quiet() | {"RANK": "3", "WORLD_SIZE": "2"}
    said = [
        subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        for words in ([str(NANO), "--tiny"], [str(DOCTOR), "--recipe", str(NANO), "--tiny"])
    ]
    assert (
        said[0].stderr == said[1].stderr
        and said[0].stderr.startswith("refused: 1 problem")
        and [done.returncode for done in said] == [1, 1]
    )
