"""How `python -m launch` handles a start that ended.

The tests cover each rank's log file, the first rank that failed, restarts, and the cases in which
launch gives up.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from job import NANO, Job, contention, metrics
from pool import ROOT, environment, import_path
from recipekit.spec import errors

sys.path.insert(0, str(ROOT))

from launch import errors as launch_errors
from launch import restart, run_folder
from launch.errors import LaunchError
from launch.host import Agent
from launch.hosts import Host
from launch.job import Job as LaunchJob
from launch.job import Outcome, Start, new_logs

# A rank without torch that replaces a recipe and writes the same files as a recipe.
FAILS = """
import json, os, pathlib, time
rank, out = int(os.environ["RANK"]), pathlib.Path("runs/fails")
print("rank", rank, "says so")
if rank == 0:
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "step_s": 0.1}) + "\\n" \
for step in (1, 2, 3)))
    time.sleep(60)
time.sleep(0.5)
raise ValueError("the fourth batch is broken")
"""
STOPS = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
    signal.signal(number, lambda number, _: sys.exit(128 + number))
open(f"ready_{os.environ['RANK']}", "w")
time.sleep(600)
"""
DIES = """
import os, signal, time
if os.environ["LOCAL_RANK"] == "1":
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(600)
"""


@pytest.fixture
def launch(tmp_path: Path, ops: Callable[[str], None]) -> Iterator[Callable[..., Job]]:
    """Return a function that starts a script on two ranks in tmp_path."""
    jobs: list[Job] = []

    def launch(name: str, script: str, *flags: str, words: Sequence[str] = ()) -> Job:
        (tmp_path / name).write_text(script)
        path = import_path(ROOT, ROOT / "recipes")
        jobs.append(
            Job(
                tmp_path,
                [sys.executable, "-m", "launch", "--gpus", "2", *flags, name, *words],
                PYTHONPATH=path,
            )
        )
        return jobs[-1]

    yield launch
    for job in jobs:
        job.close()


@pytest.mark.slow
def test_the_same_failure_three_times_is_the_last(
    launch: Callable[..., Job], tmp_path: Path
) -> None:
    job = launch("fails.py", FAILS, "--max_restarts", "10")
    assert job.wait(240) == 1, job.output
    told = [line.removeprefix("launch: ") for line in job.output.splitlines()]
    named = [
        line
        for line in told
        if "rank 1 on localhost ended with 1: ValueError: the fourth batch is broken" in line
    ]
    assert len(named) == 3, job.output
    assert "    ValueError: the fourth batch is broken" in told, "the last lines of the rank"
    pauses = [line.split(" s, ")[0] for line in told if line.startswith("restart")]
    assert pauses == ["restart 1 of 10 in 1", "restart 2 of 10 in 2"]
    assert "not started again: 3 starts in a row have failed at step 4" in told
    for rank in (0, 1):
        assert (
            (tmp_path / "runs" / "fails.logs" / "start_003" / f"rank_{rank}.log")
            .read_text()
            .startswith(f"rank {rank} says so\n")
        )
    assert not job.processes()


def test_a_crash_is_named_by_its_signal(launch: Callable[..., Job]) -> None:
    job = launch("dies.py", DIES, "--spawn", "torchrun")
    assert job.wait(120) == 75, job.output
    assert (
        "rank 1 on localhost was ended by SIGSEGV: Fatal Python error: Segmentation fault"
        in job.output
    )
    assert not job.processes()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGUSR1,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR2, marks=pytest.mark.slow),
        pytest.param(signal.SIGXCPU, marks=pytest.mark.slow),
    ],
)
def test_a_stop_is_passed_on_and_is_no_crash(
    launch: Callable[..., Job], tmp_path: Path, number: signal.Signals
) -> None:
    job = launch("stops.py", STOPS, "--max_restarts", "10")
    job.wait_for(
        lambda: len(list(tmp_path.glob("ready_*"))) == 2 or job.process.poll() is not None, 120
    )
    job.process.send_signal(number)
    began = time.monotonic()
    assert job.wait(60) == 128 + number, job.output
    job.wait_gone(30)
    assert time.monotonic() - began < 10 * contention()
    assert f"stopped by {number.name}" in job.output and "restart" not in job.output


def job(folder: Path) -> LaunchJob:
    return LaunchJob(
        (Host("localhost", 2),), "deepspeed", ("x.py",), sys.executable, str(folder), {}
    )


CRASH = "after 3 s rank 1 ended with 1"
STOPPED = [
    ("", {0: 0, 1: 0}, [], ("done", 0, "")),
    ("SIGTERM", {0: 143, 1: 143}, [], ("stopped", 143, "SIGTERM")),
    ("SIGTERM", {0: 0, 1: 0}, [], ("done", 0, "SIGTERM")),  # the signal came in the last step
    ("SIGTERM", {0: 0}, [], ("stopped", 143, "SIGTERM")),
    # The rank failed while it saved.
    ("SIGTERM", {0: 143, 1: 1}, [(2, 3.0, "rank 1 ended with 1", [], 1)], ("failed", 1, "SIGTERM")),
    ("SIGINT", {0: 130, 1: 2}, [(2, 3.0, "rank 1 ended with 2", [], 2)], ("failed", 2, "SIGINT")),
    ("", {0: 143, 1: 1}, [(2, 3.0, "rank 1 ended with 1", [], 1)], ("failed", 1, "")),
]


@pytest.mark.parametrize(("told", "codes", "failures", "end"), STOPPED)
def test_how_a_start_that_was_asked_to_stop_has_ended(
    tmp_path: Path, told: str, codes: dict[int, int], failures: list[Any], end: tuple[str, int, str]
) -> None:
    start = Start(job(tmp_path), tmp_path, print)
    start.told, start.codes, start.failures = told, codes, failures
    outcome = start.outcome()
    assert (outcome.kind, outcome.code, outcome.reason) == end


ENDED = [
    # Rank 0's exit code and last line -> the start's kind and exit code.
    (-9, "", ("failed", 75)),
    (-11, "", ("failed", 75)),
    (None, "", ("failed", 75)),
    (1, "ValueError: broken", ("failed", 1)),
    (1, "RuntimeError: CUDA error: an illegal memory access", ("failed", 1)),
    (1, "RuntimeError: Connection closed by peer [10.0.0.2]:5521", ("failed", 75)),
    (1, "torch.distributed.DistBackendError: NCCL error: remote process exited", ("failed", 75)),
    (75, "rank 0: ended, because rank 1 on b failed: it ended without a message", ("failed", 75)),
    (1, "rank 0: ended, because rank 1 on b failed: ValueError: broken", ("failed", 1)),
    (1, "rank 0: failed after rank 1: RuntimeError: Broken pipe", ("failed", 1)),
    (75, "stopped: checkpoint step_00000010 cannot be written", ("failed", 75)),
    (75, "refused: 1 problem", ("failed", 75)),
    (1, "refused: 1 problem", ("refused", 1)),
    (2, "refused: 1 problem", ("refused", 2)),
    (143, "", ("stopped", 143)),
]


@pytest.mark.parametrize(("code", "line", "end"), ENDED)
def test_the_exit_code_tells_whether_another_start_helps(
    tmp_path: Path, code: int | None, line: str, end: tuple[str, int]
) -> None:
    start = Start(job(tmp_path), tmp_path, lambda _: None)
    start.rank_ended(0, 0, code, [line], line, "rank_0.log")
    outcome = start.outcome()
    assert (outcome.kind, outcome.code) == end


def test_the_exit_code_is_the_recipes() -> None:
    assert launch_errors.START_AGAIN == errors.START_AGAIN == 75


class Starts:
    """A fake of `Start`, whose starts end one after the other with the given results."""

    def __init__(self, ends: list[Outcome | LaunchError]):
        self.ends, self.said = ends, list[str]()

    def __call__(self, *_: Any) -> "Starts":
        return self

    def run(self) -> Outcome:
        end = self.ends.pop(0)
        if isinstance(end, LaunchError):
            raise end
        return end


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Return a function that runs a job whose starts end in the given ways.

    The function returns the exit code and the messages.
    """

    def run(
        *ends: Outcome | LaunchError,
        max_restarts: int = 10,
        wait_hosts: float = 600,
        look: float = 0.05,
    ) -> tuple[int, str]:
        starts = Starts(list(ends))
        monkeypatch.setattr(restart, "Start", starts)
        monkeypatch.setattr(restart, "LONGEST_LOOK", look)
        for name in ("SLURM_JOB_ID", "JOB_COMPLETION_INDEX"):
            monkeypatch.delenv(name, raising=False)
        code = restart.run(job(tmp_path), max_restarts, starts.said.append, wait_hosts)
        assert not starts.ends, "further starts"
        return code, "\n".join(starts.said)

    return run


AWAY = LaunchError("worker-2: cannot be reached", "worker-3: cannot be reached")


def test_waiting_for_a_host_costs_no_restart(
    run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, said = run(Outcome("failed", 1, CRASH), AWAY, AWAY, Outcome("done", 0), max_restarts=1)
    assert code == 0 and said.count("worker-2: cannot be reached; worker-3: cannot be reached") == 1
    assert (
        "waiting for hosts, at most 600 s more (--wait_hosts): worker-2" in said
        and said.count("restart ") == 1
    )
    assert len(list((tmp_path / "runs" / "x.logs").glob("start_*"))) == 2
    with pytest.raises(LaunchError):  # the first start does not wait, because the name may be wrong
        run(AWAY)


def test_waiting_and_crashes_are_counted_apart(run: Callable[..., tuple[int, str]]) -> None:
    """Three waits between two crashes at one step are not a third failure at that step."""
    code, said = run(
        Outcome("failed", 1, CRASH),
        AWAY,
        AWAY,
        Outcome("failed", 1, CRASH),
        AWAY,
        Outcome("done", 0),
        max_restarts=2,
    )
    assert code == 0 and "restart 1 of 2 in 1 s" in said and "restart 2 of 2 in 2 s" in said


def test_a_host_that_never_comes_back_ends_the_job_with_its_name(
    run: Callable[..., tuple[int, str]],
) -> None:
    began = time.monotonic()
    code, said = run(Outcome("failed", 1, CRASH), AWAY, AWAY, AWAY, wait_hosts=0.5, look=0.3)
    assert code == 75 and 0.5 <= time.monotonic() - began - 1 < 10
    assert (
        "not started again: --wait_hosts 0.5 s are over, and still worker-2: cannot be reached;"
        " worker-3" in said
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_restart_waits_for_hosts_stops_the_job(
    run: Callable[..., tuple[int, str]], number: int
) -> None:
    threading.Timer(1.5, os.kill, (os.getpid(), number)).start()
    code, said = run(Outcome("failed", 1, CRASH), AWAY, look=60)
    assert code == 128 + number and f"stopped by {signal.Signals(number).name}" in said


LOST = Outcome("failed", 75, "after 3 s rank 1 was ended by SIGKILL")


@pytest.mark.parametrize(
    ("ends", "max_restarts", "code"),
    [
        ([LOST], 0, 75),
        ([LOST, LOST], 1, 75),
        ([LOST] * 3, 5, 1),  # three consecutive starts failed at the same step
        ([LOST, Outcome("refused", 1, "refused")], 3, 1),
        ([Outcome("failed", 1, CRASH)], 0, 1),
        ([LOST, Outcome("failed", 1, CRASH)], 1, 1),
        ([LOST, Outcome("done", 0)], 1, 0),
    ],
)
def test_a_job_ends_with_75_where_another_start_may_help(
    run: Callable[..., tuple[int, str]],
    ends: list[Outcome | LaunchError],
    max_restarts: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restart, "LONGEST_PAUSE", 0.05)
    assert run(*ends, max_restarts=max_restarts)[0] == code


def test_nothing_is_started_again_after_a_signal(run: Callable[..., tuple[int, str]]) -> None:
    code, said = run(Outcome("failed", 1, CRASH, "SIGTERM"))
    assert code == 1 and CRASH in said and "not started again: SIGTERM had asked for a stop" in said


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR2, 140)]
)
def test_a_signal_in_the_pause_before_a_restart_stops_the_job(
    run: Callable[..., tuple[int, str]], number: int, code: int
) -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    ended, said = run(Outcome("failed", 1, CRASH))
    assert (
        ended == code
        and f"stopped by {signal.Signals(number).name}. The newest complete checkpoint is none"
        in said
    )


def test_a_signal_between_two_starts_is_not_lost(tmp_path: Path) -> None:
    """The signal arrives after one start has ended and before the next start begins."""
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    asked.put("SIGTERM")
    outcome = Start(job(tmp_path), tmp_path, print, asked).run()
    assert (outcome.kind, outcome.reason) == ("stopped", "SIGTERM")


def test_hosts_that_start_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    """The pods of a job share the disk."""
    with ThreadPoolExecutor(8) as pods:
        made = list(pods.map(new_logs, [tmp_path / "run.logs"] * 80))
    assert len(set(made)) == 80 and all(logs.is_dir() for logs in made)


def folder(out: Path, steps: int, done: int, newest: str) -> Path:
    (out / "checkpoints").mkdir(parents=True)
    (out / "run.json").write_text(json.dumps({"recipe": {"steps": steps, "stop_at": 0}}))
    (out / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "step_s": 0.5}) + "\n" for step in range(1, done + 1))
        + '{"step"'
    )
    if newest:
        (out / "checkpoints" / newest).mkdir()
        (out / "checkpoints" / newest / "manifest.json").write_text("{}")
    return out


ENDS = [
    (10, 10, "step_00000010", "done"),
    (10, 7, "step_00000005", "failed"),
    (10, 7, "step_00000010", "failed"),
    (10, 10, "step_00000005", "failed"),
]


@pytest.mark.parametrize(("steps", "done", "newest", "kind"), ENDS)
def test_an_end_with_0_counts_only_if_the_run_folder_says_so(
    tmp_path: Path, steps: int, done: int, newest: str, kind: str
) -> None:
    """A launcher exits with 0 even when it is killed."""
    out = folder(tmp_path / "run", steps, done, newest)
    assert restart.judged(Outcome("done", 0), out, since=0).kind == kind
    assert restart.judged(Outcome("done", 0), out, since=time.time() + 60).kind == "done", (
        "a start that wrote no run.json had nothing to do"
    )
    assert restart.judged(Outcome("stopped", 143), out, since=0).kind == "stopped"


@pytest.mark.parametrize(
    ("resume", "saved", "begun", "goes_on"),
    [
        ("never", True, True, True),
        ("never", False, True, True),  # there is no run to lose and no other folder to move aside
        ("never", True, False, False),  # the start ended before it moved the old run aside
        ("runs/other", True, True, True),
        ("runs/other", False, True, False),  # it must still start from that run
        ("runs/other", False, False, False),
    ],
)
def test_a_typed_resume_is_for_the_first_start(
    tmp_path: Path, resume: str, saved: bool, begun: bool, goes_on: bool
) -> None:
    """The next start continues from files that this job wrote. Files of an earlier job do not
    count.
    """
    out, words = (
        folder(tmp_path / "run", 10, 7, "step_00000005"),
        ("recipes/x.py", "--resume", resume),
    )
    (out / "run.json").write_text(
        json.dumps({"recipe": {"steps": 10, "stop_at": 0, "resume": resume}})
    )
    since = time.time() - 60
    for path, ours in (
        (out / "run.json", begun),
        (out / "checkpoints" / "step_00000005" / "manifest.json", begun and saved),
    ):
        os.utime(path, (since + (30 if ours else -30),) * 2)
    assert run_folder.next_words(words, out, since) == (
        *words,
        *(("--resume", "auto") if goes_on else ()),
    )


def test_a_script_that_is_no_recipe_keeps_its_words(tmp_path: Path) -> None:
    assert run_folder.next_words(("x.py", "--resume", "never"), tmp_path, since=1.0) == (
        "x.py",
        "--resume",
        "never",
    )


def test_a_requeued_slurm_job_began_with_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    note, first = restart.first_start(tmp_path)
    time.sleep(0.05)
    _, again = restart.first_start(tmp_path)
    assert again > first, "another job 7, of another cluster or year"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    time.sleep(0.05)
    assert restart.first_start(tmp_path) == (note, again)
    monkeypatch.delenv("SLURM_JOB_ID")
    assert restart.first_start(tmp_path)[1] > again


def test_goodput_counts_the_steps_that_were_kept(tmp_path: Path) -> None:
    """The steps are counted in the folder that rank 0 reported. The job started there at step 4."""
    out, said = tmp_path / "elsewhere" / "run", list[str]()
    progress = restart.Progress(job(tmp_path), said.append)
    progress.learn(folder(out, 10, 4, ""))
    (out / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "step_s": 0.5}) + "\n" for step in range(1, 11))
    )
    progress.learn(out)
    assert progress.goodput(wall=6.0, starts=2).startswith(
        "goodput 50.0 %: 3.0 s in 6 steps that count, of 6 s"
    )
    assert said == [
        f"the run folder is {out}; the output of each rank stays in {tmp_path}/runs/x.logs"
    ]


def test_a_requeued_slurm_job_knows_the_reported_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A requeue is a new process with the same command line.

    Its --resume never would otherwise move the run aside.
    """
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    out = tmp_path / "scratch of 7\udcff" / "run"  # a byte that is not valid text
    first = restart.Progress(job(tmp_path), print)
    first.learn(out)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    requeued = restart.Progress(job(tmp_path), print)
    assert requeued.out == out and abs(requeued.since - first.since) < 1e-3
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert restart.Progress(job(tmp_path), print).out == tmp_path / "runs" / "x", "another job"


COMPUTED = [  # `out` of a recipe, and its folder
    ("os.environ['SCRATCH'] + '/run'", "scratch/run"),
    ("f'{os.getcwd()}/{1 + 1}/run'", "2/run"),
    ("str(Path('there') / 'run')", "there/run"),
]


@pytest.mark.parametrize(("out", "expected"), COMPUTED)
def test_rank_0_reports_the_run_folder_that_its_recipe_computes(
    tmp_path: Path, out: str, expected: str
) -> None:
    """The rank writes the folder to launch's pipe.

    The start then fails, because its folder cannot be locked.
    """
    text = NANO.read_text().replace("Recipe(\n", f"Recipe(\n    out={out},\n", 1)
    (tmp_path / "mine.py").write_text(f"import os\nfrom pathlib import Path\n{text}")
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    place = {
        "LAUNCH_PIPE": str(tmp_path / "pipe"),
        "SCRATCH": str(tmp_path / "scratch"),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    (tmp_path / expected).with_name(".run.lock").mkdir(parents=True)
    words = [sys.executable, "mine.py", "--tiny", "--no-wandb"]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=environment() | place,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1 and "cannot be written: Is a directory" in done.stderr, done.stderr
    agent = Agent()
    agent.pipe, agent.running = pipe, {}
    heard: list[dict[str, Any]] = []
    agent.tell = lambda **message: heard.append(message)  # type: ignore[method-assign]
    report = os.read(pipe, 1 << 16)
    os.write(pipe, report)
    agent.meet_ranks()
    assert heard == [], "a program that no rank has become reports nothing"
    agent.running = {json.loads(report)["pid"]: (0, 0)}
    for half in (report[:20], report[20:]):
        os.write(pipe, half)
        agent.meet_ranks()
    assert heard == [{"run_folder": str(tmp_path / expected)}]
    os.close(pipe)


TAKEN = """
import os, pathlib, selectors, subprocess, sys
from launch.host import Agent
agent, told = Agent(), []
agent.tell = lambda **message: told.append(message["ended"]["code"])
agent.spec, agent.launcher_log = {"logs": "."}, pathlib.Path("launcher.log")
agent.launcher_log.touch()
rank = subprocess.Popen([sys.executable, "-c", "pass"])
agent.running = {rank.pid: (0, os.pidfd_open(rank.pid))}
agent.selector.register(agent.running[rank.pid][1], selectors.EVENT_READ, rank.pid)
rank.wait()
agent.rank_ended(rank.pid)
agent.report_unknown()
assert told == [] and agent.reported == {0: None}, told
agent.launcher_ended = int(sys.argv[1])
agent.report_unknown()
agent.report_unknown()
print(told)
"""


@pytest.mark.parametrize(
    ("launcher_ended", "reported"), [("0", "[0]"), ("1", "[None]"), ("-9", "[None]")]
)
def test_a_rank_whose_exit_code_the_launcher_took_first_ended_as_the_launcher_did(
    tmp_path: Path, launcher_ended: str, reported: str
) -> None:
    """torchrun logs no message about a rank that succeeded.

    torchrun may also read the exit code before the agent does. In this case the job has not failed.
    """
    words = [sys.executable, "-c", TAKEN, launcher_ended]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == reported, done.stderr


FAILS_ONCE = """
import signal
def adapt(model):
    def die(*_):
        calls.append(1)
        if len(calls) == 13 and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    calls = []
    model.register_forward_pre_hook(die)
    return model
"""


@pytest.mark.slow
@pytest.mark.parametrize(("out", "expected"), COMPUTED)
def test_a_restart_goes_on_in_a_folder_that_the_recipe_computes(
    launch: Callable[..., Job], tmp_path: Path, out: str, expected: str
) -> None:
    """A restart must find the recipe's computed folder, whatever value --resume has."""
    text = NANO.read_text().replace("Recipe(\n", f"Recipe(\n    out={out},\n    adapt=adapt,\n", 1)
    assert "import Recipe, run\n" in text
    text = (
        "import os\nfrom pathlib import Path\nos.environ.setdefault('SCRATCH',"
        " os.path.abspath('scratch'))\n" + text
    )
    text = text.replace("import Recipe, run\n", f"import Recipe, run\n{FAILS_ONCE}\n", 1)
    flags = [
        "--tiny",
        "--steps",
        "8",
        "--save_every",
        "2",
        "--eval_every",
        "0",
        "--no-wandb",
        "--no-export",
        "--resume",
        "never",
    ]
    job = launch("mine.py", text, "--max_restarts", "2", words=flags)
    assert job.wait(300) == 0, job.output[-8000:]
    assert (
        "restart 1 of 2 in 1 s, from step_0000000" in job.output
        and "the run folder is " in job.output
    )
    assert [path.parent for path in tmp_path.rglob("run.json")] == [tmp_path / expected], (
        "one run, nothing was put aside"
    )
    assert [line["step"] for line in metrics(tmp_path / expected)] == list(range(1, 9))


def drill(*flags: str, limit: float) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "drill" / "drill_launch.py"), *flags],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_eight_kills_end_as_the_unbroken_run(ops: Callable[[str], None]) -> None:
    """The drill kills ranks, their launcher and the agent.

    `python tools/drill/drill_launch.py` by itself makes fifty kills, in half an hour.
    """
    said = drill("--kills", "8", limit=1200)
    assert "8 kills (" in said and "goodput" in said
