"""Every signal and every lost launcher must end all ranks in time.

The ranks end after the step in progress, and no process remains.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from recipekit.runtime.stopping import Grace, Stopper, grace_of

# Maximum wait in seconds. The tests themselves assert the promised times.
LIMIT = 20.0

# A rank without torch. It runs steps of 20 ms until a stop is requested, and then writes a
# "checkpoint" for 0.3 s.
RANK = """
import ctypes, multiprocessing, os, signal, sys, time
from pathlib import Path
from recipekit.runtime.stopping import Grace, Stopper, grace_of, quiet_interrupts, \
start_launcher_watch

folder, grace = Path(sys.argv[1]), Grace(float(sys.argv[2]))
name = "rank" + os.environ.get("RANK", "")

def report(what, text=""):
    (folder / f"{name}.tmp").write_text(str(text))
    (folder / f"{name}.tmp").rename(folder / f"{name}.{what}")

def block_in_c():
    reader, writer = os.pipe()
    ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), 1)

def train(save_seconds=0.3, next_within=None):
    with Stopper(grace) as stopper:
        report("pid", os.getpid())
        while not stopper.requested:
            time.sleep(0.02)
            stopper.boundary()
        stopper.boundary(next_within)
        time.sleep(save_seconds)
        report("saved", stopper.requested)
    sys.exit(stopper.exit_code)

start_launcher_watch()
quiet_interrupts()
"""

# A program that starts two ranks as `deepspeed.launcher.launch` does.
LAUNCHER = """
import os, subprocess, sys
for process in [subprocess.Popen([sys.executable, *sys.argv[1:]], \
env=os.environ | {"RANK": str(rank)}) for rank in range(2)]:
    process.wait()
"""

# A program that starts the launcher as the `deepspeed` command does.
RUNNER = """
import subprocess, sys
subprocess.Popen([sys.executable, *sys.argv[1:]]).wait()
"""


class Job:
    """A folder with the scripts of one test, and the processes that they start."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def write(self, name: str, text: str) -> Path:
        (self.folder / name).write_text(text)
        return self.folder / name

    def start(self, *words: object, ranked: bool = False) -> subprocess.Popen[str]:
        environment = {
            key: value for key, value in os.environ.items() if key not in {"RANK", "LOCAL_RANK"}
        } | ({"RANK": "0"} if ranked else {})
        process = subprocess.Popen(
            [str(word) for word in words],
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def start_rank(self, body: str, grace: float = 10) -> subprocess.Popen[str]:
        """Start one rank without a launcher, and wait until it is ready for signals."""
        process = self.start(sys.executable, self.write("rank.py", RANK + body), self.folder, grace)
        self.wait_for(lambda: (self.folder / "rank.pid").exists())
        return process

    def start_tree(self, body: str, runner: str = "deepspeed") -> tuple[int, int, list[int]]:
        """Start a runner, and return the pids of runner, launcher and ranks."""
        rank, launcher = self.write("rank.py", RANK + body), self.write("launcher.py", LAUNCHER)
        process = self.start(
            sys.executable, self.write(runner, RUNNER), launcher, rank, self.folder, 10
        )
        self.wait_for(lambda: len(self.pids()) == 2)
        time.sleep(1)  # gives the watcher time to look at least once
        [launch] = psutil.Process(process.pid).children()
        return process.pid, launch.pid, self.pids()

    def pids(self) -> list[int]:
        return [int(path.read_text()) for path in self.folder.glob("*.pid")]

    def saved(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("*.saved"))]

    @staticmethod
    def wait_for(true: Callable[[], bool], seconds: float = LIMIT) -> float:
        """Wait for a condition; return the seconds until the condition was true."""
        began = time.monotonic()
        while not true():
            assert time.monotonic() - began < seconds, "it did not come true in time"
            time.sleep(0.02)
        return time.monotonic() - began


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    pids = {
        pid
        for process in job.started
        if process.poll() is None
        for pid in [
            process.pid,
            *(child.pid for child in psutil.Process(process.pid).children(recursive=True)),
        ]
    }
    for pid in pids | set(job.pids()):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    for process in job.started:
        process.communicate(timeout=LIMIT)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
        (signal.SIGHUP, 129),
        (signal.SIGUSR1, 138),  # from schedulers: #SBATCH --signal=USR1@60, qsub -notify
        (signal.SIGUSR2, 140),  # sent by LSF before its run limit, and by qsub -notify
        (signal.SIGXCPU, 152),  # at limits of CPU time
    ],
)
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(
    job: Job, number: int, code: int
) -> None:
    rank = job.start_rank("train()")
    rank.send_signal(number)
    assert rank.communicate(timeout=LIMIT)[1] == ""
    assert rank.returncode == code
    assert job.saved() == [signal.Signals(number).name]


@pytest.mark.parametrize(
    ("number", "own"),
    [
        (signal.SIGHUP, "signal.signal(signal.SIGHUP, signal.SIG_IGN)"),  # nohup
        (signal.SIGUSR1, "import faulthandler; faulthandler.register(signal.SIGUSR1)"),
        (signal.SIGUSR2, "signal.signal(signal.SIGUSR2, lambda *_: None)"),
    ],
)
def test_what_a_program_does_at_a_signal_of_its_own_stays(job: Job, number: int, own: str) -> None:
    rank = job.start_rank(f"{own}\ntrain()")
    rank.send_signal(number)
    time.sleep(1)
    assert rank.poll() is None
    rank.send_signal(signal.SIGTERM)
    assert rank.wait(LIMIT) == 143


def test_the_signals_of_launchers_do_not_interrupt_the_checkpoint(job: Job) -> None:
    rank = job.start_rank("train(save_seconds=1)")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
        rank.send_signal(number)
        time.sleep(0.1)
    rank.wait(LIMIT)
    assert rank.returncode == 130
    assert job.saved() == ["SIGINT"]


def test_the_third_ctrl_c_ends_the_rank_at_once(job: Job) -> None:
    rank = job.start_rank("train(save_seconds=30)", grace=60)
    for _ in range(3):
        assert rank.poll() is None
        rank.send_signal(signal.SIGINT)
        time.sleep(1.2)
    assert (
        rank.communicate(timeout=LIMIT)[1]
        == "rank 0: third Ctrl-C: ended at once, without a checkpoint\n"
    )
    assert rank.returncode == 130
    assert job.saved() == []


def test_a_rank_blocked_in_a_collective_ends_after_the_grace_with_its_stacks(job: Job) -> None:
    rank = job.start_rank(
        "with Stopper(grace):\n    report('pid', os.getpid())\n    block_in_c()", grace=1.5
    )
    began = time.monotonic()
    rank.send_signal(signal.SIGTERM)
    said = rank.communicate(timeout=LIMIT)[1]
    assert 1.5 < time.monotonic() - began < LIMIT
    assert rank.returncode == 143
    assert said.startswith(
        "rank 0: stuck: no step boundary within 1.5 s after SIGTERM. Stacks of all threads:\n"
    )
    assert "in block_in_c" in said


@pytest.mark.parametrize(
    ("grace", "slowest", "seconds"),
    [
        (Grace(), 0, 300),  # the first step of a start may include compilation
        (Grace(), 0.2, 25),
        (Grace(), 8, 25),
        (Grace(), 40, 120),
        (Grace(scheduler_grace=600), 40, 120),
        (Grace(scheduler_grace=300), 150, 295),
        (Grace(scheduler_grace=300), 0, 295),
        (Grace(scheduler_grace=30), 0.2, 25),
        (Grace(scheduler_grace=20), 0.2, 15),
        (Grace(scheduler_grace=6), 0.2, 3),
        (Grace(seconds=4), 40, 4),
        (Grace(seconds=900, scheduler_grace=300), 40, 900),
    ],
)
def test_the_grace_follows_the_slowest_step_and_the_scheduler(
    grace: Grace, slowest: float, seconds: float
) -> None:
    assert grace.after(slowest) == seconds


@pytest.mark.parametrize(
    ("text", "granted"),
    [
        ("600", 600.0),
        ("0.5", 0.5),
        ("", None),
        ("0", None),
        ("-3", None),
        ("nan", None),
        ("soon", None),
    ],
)
def test_the_granted_seconds_come_from_the_environment(text: str, granted: float | None) -> None:
    assert grace_of(None, {"LAUNCH_GRACE": text}) == Grace(None, granted)
    assert grace_of(7.0, {"LAUNCH_GRACE": text}) == Grace(7.0, granted)


SLOW = """
with Stopper(Grace(min_seconds=0.5, first_step_seconds=first)) as stopper:
    for step in range(1, 10):
        stop, began = stopper.requested, time.monotonic()
        if step == asked:
            report("pid", os.getpid())
        time.sleep(1.5)
        stopper.record_step_time(time.monotonic() - began)
        stopper.boundary()
        if stop:
            break
    report("saved", f"{stopper.requested} {step}")
sys.exit(stopper.exit_code)
"""


@pytest.mark.parametrize(("asked", "first"), [(1, 20), (2, 0.6)])
def test_a_step_longer_than_the_least_grace_ends_with_its_checkpoint(
    job: Job, asked: int, first: float
) -> None:
    """The signal arrives in the first step or in a later one.

    The ranks agree on a stop at the beginning of a step, so one more step follows.
    """
    rank = job.start_rank(f"asked, first = {asked}, {first}{SLOW}")
    rank.send_signal(signal.SIGTERM)
    assert rank.communicate(timeout=LIMIT) == (None, "")
    assert (rank.returncode, job.saved()) == (143, [f"SIGTERM {asked + 1}"])


def test_a_stuck_rank_ends_before_the_scheduler_kills_it(job: Job) -> None:
    rank = job.start_rank(
        "with Stopper(grace_of(None, {'LAUNCH_GRACE': '3'})):\n    report('pid', os.getpid())\n   "
        " block_in_c()"
    )
    began = time.monotonic()
    rank.send_signal(signal.SIGTERM)
    assert (
        "stuck: no step boundary within 1.5 s after SIGTERM" in rank.communicate(timeout=LIMIT)[1]
    )
    assert 1.5 < time.monotonic() - began < LIMIT


def test_boundaries_do_not_rescue_a_hung_checkpoint(job: Job) -> None:
    rank = job.start_rank("train(save_seconds=30)", grace=1)
    rank.send_signal(signal.SIGTERM)
    assert "stuck" in rank.communicate(timeout=LIMIT)[1]
    assert rank.returncode == 143


def test_an_announced_checkpoint_may_outlast_the_grace(job: Job) -> None:
    rank = job.start_rank("train(save_seconds=3, next_within=20)", grace=1)
    rank.send_signal(signal.SIGTERM)
    assert rank.wait(LIMIT) == 143
    assert job.saved() == ["SIGTERM"]


def test_what_another_rank_was_told_is_passed_on(job: Job) -> None:
    rank = job.start_rank(
        "with Stopper(grace) as stopper:\n    report('pid', os.getpid())\n   "
        " stopper.request('SIGINT')\n    stopper.request('SIGTERM')\nsys.exit(stopper.exit_code)"
    )
    assert rank.wait(LIMIT) == 130


def test_outside_the_stopper_signals_act_as_before(job: Job) -> None:
    rank = job.start_rank(
        "with Stopper(grace):\n    pass\nreport('pid', os.getpid())\ntime.sleep(30)"
    )
    rank.send_signal(signal.SIGTERM)
    assert rank.wait(LIMIT) == -signal.SIGTERM


@pytest.mark.parametrize("wait", ["block_in_c()", "time.sleep(30)", "[i for i in iter(int, 1)]"])
def test_ctrl_c_during_start_up_is_one_line(job: Job, wait: str) -> None:
    rank = job.start_rank(f"report('pid', os.getpid())\n{wait}")
    rank.send_signal(signal.SIGINT)
    assert rank.communicate(timeout=LIMIT)[1] == "rank 0: interrupted before training began\n"
    assert rank.returncode == 130


def test_a_forked_worker_dies_of_sigterm_and_does_not_stop_its_parent(job: Job) -> None:
    """`datasets` and torch terminate their worker processes with SIGTERM."""
    body = """
with Stopper(grace) as stopper:
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    time.sleep(0.3)
    worker.terminate()
    worker.join(5)
    code = worker.exitcode
    worker.kill()
    report("pid", os.getpid())
    time.sleep(1)
    sys.exit(f"worker {code}, parent {stopper.requested}")
"""
    rank = job.start_rank(body)
    assert rank.communicate(timeout=LIMIT)[1] == "worker -15, parent None\n"


@pytest.mark.parametrize("who", ["launcher", "deepspeed"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_save_and_go_when_their_launcher_has_gone(job: Job, who: str, number: int) -> None:
    runner, launcher, ranks = job.start_tree("train()")
    os.kill({"launcher": launcher, "deepspeed": runner}[who], number)
    assert job.wait_for(lambda: not any(map(alive, ranks))) < 5
    assert job.saved() == ["launcher gone"] * 2
    job.wait_for(lambda: not alive(launcher), 5)  # as an orphan, it ends after its ranks


@pytest.mark.parametrize("who", ["launcher", "deepspeed"])
def test_ranks_go_at_once_when_their_launcher_goes_during_start_up(job: Job, who: str) -> None:
    runner, launcher, ranks = job.start_tree("report('pid', os.getpid())\nblock_in_c()")
    gone = {"launcher": launcher, "deepspeed": runner}[who]
    os.kill(gone, signal.SIGKILL)
    assert job.wait_for(lambda: not any(map(alive, ranks))) < 2
    said = job.started[0].communicate(timeout=LIMIT)[1]
    assert sorted(said.splitlines()) == [
        f"rank {rank}: the launcher (pid {gone}) has gone: ended" for rank in (0, 1)
    ]


def test_signals_after_the_launcher_has_gone_are_harmless(job: Job) -> None:
    _, launcher, ranks = job.start_tree("train(save_seconds=2)")
    os.kill(launcher, signal.SIGKILL)
    time.sleep(1)
    for pid in ranks:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    job.wait_for(lambda: not any(map(alive, ranks)), 6)
    assert job.saved() == ["launcher gone"] * 2


def test_an_unrelated_ancestor_may_go(job: Job) -> None:
    runner, launcher, ranks = job.start_tree("train()", runner="submit.py")
    os.kill(runner, signal.SIGKILL)
    time.sleep(2)
    assert all(map(alive, [launcher, *ranks]))
    assert job.saved() == []


def test_a_shell_that_set_the_rank_by_hand_may_go(job: Job) -> None:
    rank = job.write("rank.py", RANK + "train()")
    shell = job.start(
        "sh",
        "-c",
        f"'{sys.executable}' '{rank}' '{job.folder}' 10 2>/dev/null & sleep 1.5; exit 0",
        ranked=True,
    )
    job.wait_for(lambda: (job.folder / "rank0.pid").exists())
    assert shell.wait(LIMIT) == 0
    time.sleep(1.5)
    assert all(map(alive, job.pids())) and job.saved() == []


def test_plain_python_has_no_launcher_to_lose(job: Job) -> None:
    rank = job.write("rank.py", RANK + "train()")
    starter = job.start(
        sys.executable,
        "-c",
        f"import subprocess, time; subprocess.Popen([{sys.executable!r}, {str(rank)!r},"
        f" {str(job.folder)!r}, '10'], stderr=-3); time.sleep(1.5)",
    )
    job.wait_for(lambda: (job.folder / "rank.pid").exists())
    assert starter.wait(LIMIT) == 0
    time.sleep(1.5)
    assert all(map(alive, job.pids())) and job.saved() == []


def test_the_first_reason_stays() -> None:
    stopper = Stopper(Grace(5))
    assert (stopper.requested, stopper.exit_code) == (None, 0)
    stopper.request("SIGINT")
    stopper.request("SIGTERM")
    assert (stopper.requested, stopper.exit_code) == ("SIGINT", 130)
