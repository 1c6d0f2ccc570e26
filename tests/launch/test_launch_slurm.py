"""`sbatch launch/slurm.sbatch` on a real Slurm of two nodes.

The tests cover equal losses, a checkpoint at SIGTERM, and a requeue that continues exactly at that
checkpoint.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from job import NANO, Job, contention, metrics, reproducible_values, steps_done
from pool import ROOT, import_path
from slurm import Slurm, slurm_or_skip
from words import arbitrary_words

sys.path.insert(0, str(ROOT))

from launch.__main__ import main
from launch.hosts import Host
from launch.job import Job as LaunchJob
from launch.slurm import asks_for_gpus

FLAGS = (
    "--tiny",
    "--schedule",
    "constant",
    "--warmup_steps",
    "0",
    "--eval_every",
    "0",
    "--no-export",
    "--no-wandb",
    "--steps",
    "100000",
)
SECRETS = {
    "HF_TOKEN": "hf_fakeFAKEfake0001",
    "WANDB_API_KEY": "fake" * 10,
    "AWS_SECRET_ACCESS_KEY": "aws/fake+0003",
}

# A progress line for output that is not a terminal. After the first steps it contains every field.
PROGRESS = re.compile(
    r"step (?P<step>\d+)/\d+  \d+%(  epoch \d+\.\d\d)?  loss \d+\.\d{4}  lr \d\.\d\de-\d\d  [\d,]+"
    r" tokens/s  \d+\.\d GiB(?P<left>  ETA \d.*  at .*\d\d)?$",
    re.MULTILINE,
)

REACHED = {  # as in a company network
    "no_proxy": "localhost,10.0.0.0/8",
    "https_proxy": "http://proxy.corp:3128",
    "REQUESTS_CA_BUNDLE": "/etc/corp/ca.pem",
    "AWS_ENDPOINT_URL": "https://s3.corp",
    "NCCL_IB_GID_INDEX": "3",
    "WANDB_RUN_GROUP": "a group, of mine",
    "SCRATCH": "/scratch/me",
}


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_or_skip() as made:
        yield made


def submit(
    slurm: Slurm,
    output: Path,
    *words: str,
    nodes: int = 2,
    batch: str = "launch/slurm.sbatch",
    folder: Path = ROOT,
) -> str:
    """Submit a job and return its number."""
    command = ["sbatch", "--parsable", f"--nodes={nodes}", f"--output={output}", batch, *words]
    answer = slurm.run(*command, folder=folder, **SECRETS, **REACHED)
    assert answer.strip().isdigit(), answer
    return answer.strip()


def wait_for(true: Callable[[], object], seconds: float, tell: Callable[[], object]) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, tell()
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["TERM", "USR1", "USR2"])
def test_a_job_trains_stops_and_goes_on_as_one_run(
    slurm: Slurm, ops: Callable[[str], None], tmp_path: Path, signal: str
) -> None:
    """The job survives a preemption (SIGTERM or the user's signal) and a requeue, and stops at
    SIGINT.

    Its steps equal the steps of an uninterrupted run on one machine.
    """
    run, output = tmp_path / "run", tmp_path / "job.log"
    job = submit(slurm, output, "--gpus", "2", str(NANO), *FLAGS, "--out", str(run))
    tell = lambda: f"{slurm.job(job)}\n{output.read_text() if output.exists() else ''}"  # noqa: E731
    wait_for(lambda: steps_done(run) > 3, 240, tell)
    slurm.run("scancel", f"--signal={signal}", job)
    wait_for(lambda: slurm.job(job).get("Restarts") == "1", 120, tell)
    first = steps_done(run)
    assert (run / "checkpoints" / "latest").read_text() == f"step_{first:08d}", tell()
    wait_for(lambda: steps_done(run) > first + 3, 240, tell)
    slurm.run("scancel", "--signal=INT", job)
    wait_for(
        lambda: slurm.job(job)["JobState"] not in ("RUNNING", "COMPLETING", "PENDING"), 120, tell
    )
    assert slurm.job(job)["ExitCode"] == "130:0" and slurm.job(job)["Restarts"] == "1", tell()
    lines = metrics(run)
    steps = [int(line["step"]) for line in PROGRESS.finditer(output.read_text())]
    assert {1, first, first + 1, len(lines)} <= set(steps) and steps == sorted(steps), tell()
    assert (run / "checkpoints" / "latest").read_text() == f"step_{len(lines):08d}"
    assert f"resumed from {run}/checkpoints/step_{first:08d}" in output.read_text(), tell()
    assert json.loads((run / "run.json").read_text())["mesh"]["world"] == 4

    for path in [*tmp_path.rglob("*"), *slurm.folder.rglob("*")]:
        if path.is_file():
            content = path.read_bytes()
            assert not [name for name, value in SECRETS.items() if value.encode() in content], path

    whole = Job(
        tmp_path,
        [
            sys.executable,
            "-m",
            "launch",
            "--gpus",
            "4",
            str(NANO),
            *FLAGS,
            "--stop_at",
            str(len(lines)),
        ],
        PYTHONPATH=python_path(),
    )
    try:
        assert whole.wait(300) == 0, whole.output[-8000:]
    finally:
        whole.close()
    assert reproducible_values(
        metrics(tmp_path / "runs" / f"{NANO.stem}_tiny")
    ) == reproducible_values(lines)


def python_path() -> str:
    return import_path(ROOT, ROOT / "recipes")


DUMP = (
    "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open(sys.argv[1] +"
    " os.environ['RANK'], 'w'))"
)


def test_words_reach_the_script_on_both_nodes_as_typed(slurm: Slurm, tmp_path: Path) -> None:
    """The job is submitted from a different folder, through a link, with a relative script path."""
    (tmp_path / "dump.py").write_text(DUMP)
    words = [str(tmp_path / "dump_"), *arbitrary_words()]
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "launch.py").write_text("raise SystemExit('another launch')")
    (folder / "my.sbatch").symlink_to(ROOT / "launch" / "slurm.sbatch")
    job = submit(
        slurm,
        tmp_path / "job.log",
        "--gpus",
        "2",
        "--once",
        "../dump.py",
        *words,
        batch="./my.sbatch",
        folder=folder,
    )
    wait_for(
        lambda: (
            slurm.job(job)["JobState"] not in ("RUNNING", "COMPLETING", "PENDING", "CONFIGURING")
        ),
        60,
        lambda: slurm.job(job),
    )
    assert slurm.job(job)["JobState"] == "COMPLETED", (tmp_path / "job.log").read_text()
    for rank in (0, 2):
        got, variables = json.loads((tmp_path / f"dump_{rank}").read_text())
        assert got == words
        assert variables["WORLD_SIZE"] == "4" and not variables.keys() & SECRETS.keys()
        assert {name: variables.get(name) for name in REACHED} == REACHED


BATCHES = [  # the submitted file, its working directory, and the job's final state
    (str(ROOT / "launch" / "slurm.sbatch"), "", "COMPLETED"),
    ("copy of it.sbatch", str(ROOT), "COMPLETED"),
    ("copy of it.sbatch", "", "FAILED"),
]


def test_sbatch_finds_the_repository_from_any_folder(slurm: Slurm, tmp_path: Path) -> None:
    """The script uses its own path, or the folder of a user's copy, whose path contains spaces."""
    (tmp_path / "dump.py").write_text(DUMP)
    (tmp_path / "copy of it.sbatch").write_bytes((ROOT / "launch" / "slurm.sbatch").read_bytes())
    jobs = []
    for number, (batch, folder, _) in enumerate(BATCHES):
        words = [
            "--gpus",
            "1",
            "--once",
            str(tmp_path / "dump.py"),
            str(tmp_path / f"dump_{number}_"),
        ]
        output = tmp_path / f"{number}.log"
        jobs.append(
            submit(
                slurm,
                output,
                *words,
                nodes=1,
                batch=str(tmp_path / batch),
                folder=Path(folder or tmp_path),
            )
        )
    for number, (job, (_, _, state)) in enumerate(zip(jobs, BATCHES, strict=True)):
        wait_for(
            lambda job=job: slurm.job(job)["JobState"] in ("COMPLETED", "FAILED"),
            60,
            lambda job=job: slurm.job(job),
        )
        said = (tmp_path / f"{number}.log").read_text()
        assert slurm.job(job)["JobState"] == state, said
        assert (tmp_path / f"dump_{number}_0").exists() == (state == "COMPLETED")
        if state == "FAILED":
            assert (
                said.startswith("refused: ") and "must be in the repository of the recipes" in said
            )


STARTS = [
    ["srun", "--ntasks=1", "--nodes=1"],
    ["salloc", "--quiet", "--nodes=2", "--ntasks=2", "srun", "--ntasks=1", "--nodes=1"],
    ["salloc", "--quiet", "--nodes=2", "--exclusive", "srun", "--ntasks=1", "--nodes=1", "--exact"],
]


@pytest.mark.parametrize("words", STARTS, ids=" ".join)
def test_launch_in_a_task_of_srun_does_not_wait_for_that_task(
    slurm: Slurm, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "dump.py").write_text(DUMP)
    command = [
        *words,
        sys.executable,
        "-u",
        "-m",
        "launch",
        "--gpus",
        "1",
        "--once",
        "dump.py",
        "dump_",
    ]
    began = time.monotonic()
    said = slurm.run(*command, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert "exit code 0" in said and "waiting for" not in said, said
    nodes = 2 if "--nodes=2" in words else 1
    assert (
        len(list(tmp_path.glob("dump_*"))) == nodes and time.monotonic() - began < 10 * contention()
    )


def test_launch_in_several_tasks_of_srun_is_refused_at_once(slurm: Slurm) -> None:
    said = slurm.run("srun", "--ntasks=2", sys.executable, "-m", "launch", str(NANO), folder=ROOT)
    assert "srun: has started launch 2 times. Start launch without srun" in said


def test_the_command_to_try_by_hand_is_whole() -> None:
    """The command is shown if a host does not answer in time."""
    host = Host("n1", 2)

    def by_hand(where):
        return LaunchJob(
            (host,), "deepspeed", ("x.py",), "/a b/python", "/", {}, where=where
        ).by_hand(host)

    assert by_hand("slurm")[0] == "srun" and by_hand("slurm")[-2:] == [
        "--cpu-bind=none",
        "hostname",
    ]
    assert by_hand("hostfile")[0] == "ssh" and by_hand("hostfile")[-3:] == ["--", "n1", "hostname"]
    assert by_hand("local") == by_hand("k8s") == ["/a b/python", "--version"]


MEETS = str(ROOT / "tests" / "support" / "meets.py")


def srun(slurm: Slurm, *words: str) -> str:
    return slurm.run(
        "srun",
        *words,
        folder=ROOT,
        PYTHONPATH=python_path(),
        HF_HUB_OFFLINE="1",
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
    )


def test_tasks_of_srun_are_the_ranks_of_one_run(slurm: Slurm) -> None:
    """Two nodes run two tasks and one task, and the nodes' names are not in DNS.

    A single task in a job of three tasks runs alone.
    """
    came = json.loads(srun(slurm, "--nodes=2", "--ntasks=3", "--quiet", sys.executable, MEETS))
    assert came == [[0, 3, 0, 2], [1, 3, 1, 2], [2, 3, 0, 1]]
    refused = srun(
        slurm,
        "--nodes=2",
        "--ntasks=4",
        "--distribution=cyclic",
        sys.executable,
        str(NANO),
        "--tiny",
    )
    assert (
        "the ranks of a host must be neighbours. Start it with srun --distribution=block" in refused
        and "Traceback" not in refused
    )
    alone = (
        "import os; from recipekit.spec.ranks import take_rank; print(take_rank(os.environ),"
        " os.environ.get('WORLD_SIZE'))"
    )
    nested = shlex.join(
        ["srun", "--ntasks=1", "--nodes=1", "--overlap", "--quiet", sys.executable, "-c", alone]
    )
    batch = [
        "salloc",
        "--quiet",
        "--ntasks=3",
        "--nodes=2",
        "sh",
        "-c",
        f"{shlex.join([sys.executable, '-c', alone])}; {nested}",
    ]
    assert slurm.run(*batch, PYTHONPATH=python_path()).splitlines() == ["[] None"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("--ntasks=2",), ("--ntasks=2", "--nodes=2")], ids=["one node", "two nodes"]
)
def test_srun_of_a_recipe_trains_one_run_and_saves_at_a_signal(
    slurm: Slurm, ops: Callable[[str], None], tmp_path: Path, words: tuple[str, ...]
) -> None:
    """SIGUSR1 is sent to the entire step, as with `#SBATCH --signal=USR1@60`.

    The same command must resume from the saved step.
    """
    run, output = tmp_path / "run", tmp_path / "job.log"
    recipe = shlex.join(["srun", *words, sys.executable, str(NANO), *FLAGS, "--out", str(run)])
    given = {
        "PYTHONPATH": python_path(),
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }

    def start(more: str) -> str:
        return slurm.run(
            "sbatch",
            "--parsable",
            *words,
            f"--output={output}",
            f"--wrap={recipe} {more}",
            folder=tmp_path,
            **given,
        ).strip()

    job = start("")
    tell = lambda: f"{slurm.job(job)}\n{output.read_text() if output.exists() else ''}"  # noqa: E731
    wait_for(lambda: steps_done(run) > 3, 240, tell)
    slurm.run("scancel", "--signal=USR1", job)
    wait_for(lambda: slurm.job(job)["JobState"] not in ("RUNNING", "COMPLETING"), 120, tell)
    done = steps_done(run)
    assert (run / "checkpoints" / "latest").read_text() == f"step_{done:08d}", tell()
    assert slurm.job(job)["ExitCode"] == "138:0" and "on 2 ranks (dp2)" in output.read_text(), (
        tell()
    )
    printed = list(PROGRESS.finditer(output.read_text()))
    assert (int(printed[0]["step"]), int(printed[-1]["step"])) == (1, done), tell()
    assert not printed[0]["left"] and printed[-1]["left"], tell()
    job = start(f"--stop_at {done + 2}")
    wait_for(lambda: slurm.job(job)["JobState"] == "COMPLETED", 240, tell)
    assert (
        f"resumed from {run}/checkpoints/step_{done:08d}" in output.read_text()
        and steps_done(run) == done + 2
    ), tell()


STOPS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


def test_a_cancelled_job_stays_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    """`scontrol requeue` also accepts a job that is being cancelled.

    Without a check, the job would therefore be put back into the queue.
    """
    (tmp_path / "stops.py").write_text(STOPS)
    ready, output = tmp_path / "ready", tmp_path / "job.log"
    job = submit(
        slurm,
        output,
        "--gpus",
        "1",
        "--spawn",
        "torchrun",
        str(tmp_path / "stops.py"),
        str(ready),
        nodes=1,
    )
    tell = lambda: f"{slurm.job(job)}\n{output.read_text() if output.exists() else ''}"  # noqa: E731
    wait_for(ready.exists, 120, tell)
    slurm.run("scancel", job)
    wait_for(lambda: slurm.job(job)["JobState"] not in ("RUNNING", "COMPLETING"), 60, tell)
    assert slurm.job(job)["JobState"] == "CANCELLED" and slurm.job(job)["Restarts"] == "0", tell()
    assert (
        "stopped by SIGTERM" in output.read_text()
        and "not put back into the queue" in output.read_text()
    ), tell()


ENDLESS = "# a recipe as launch sees it: from recipekit import run\nimport time\ntime.sleep(600)\n"
LOST_ONCE = """
import os, pathlib, signal, sys
mark = pathlib.Path(sys.argv[1])
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_chain_without_a_step_ends_and_a_lost_rank_is_started_again(
    slurm: Slurm, tmp_path: Path
) -> None:
    """Two jobs run at the same time.

    The first job's time limit is shorter than its warning time, so Slurm stops each start at once.
    """
    (tmp_path / "endless.py").write_text(ENDLESS)
    (tmp_path / "lost.py").write_text(LOST_ONCE)
    jobs = {}
    for name, limit, words in (("endless", 4, []), ("lost", 60, [str(tmp_path / "mark")])):
        command = [
            "sbatch",
            "--parsable",
            "--nodes=1",
            f"--time={limit}",
            f"--output={tmp_path}/{name}.log",
        ]
        command += ["launch/slurm.sbatch", "--gpus", "1", "--spawn", "torchrun"]
        jobs[name] = slurm.run(
            *command,
            str(tmp_path / f"{name}.py"),
            *words,
            "--out",
            str(tmp_path / name),
            folder=ROOT,
        ).strip()

    def tell():
        return "\n".join(
            f"{slurm.job(job)}\n{(tmp_path / name).with_suffix('.log').read_text()}"
            for name, job in jobs.items()
        )

    wait_for(
        lambda: (
            {slurm.job(job)["JobState"] for job in jobs.values()}
            <= {"FAILED", "COMPLETED", "TIMEOUT"}
        ),
        300,
        tell,
    )

    endless, lost = (slurm.job(job) for job in jobs.values())
    assert (endless["JobState"], endless["Restarts"], endless["ExitCode"]) == (
        "FAILED",
        "3",
        "1:0",
    ), tell()
    assert (lost["JobState"], lost["Restarts"]) == ("COMPLETED", "1"), tell()
    said = (tmp_path / "endless.log").read_text()
    assert (
        said.count(
            "time limit 4 min: is shorter than twice the warning time of 300 s, which leaves no"
            " time for"
        )
        == 4
    )
    assert (
        said.count(
            "is not put back into the queue: 3 starts by the scheduler have added no checkpoint"
        )
        == 1
    )
    assert "was ended by SIGKILL" in (tmp_path / "lost.log").read_text()


NAMES_ITS_NODE = """
# a recipe as launch sees it: from recipekit import run
import json, os, pathlib, signal, sys, time
out, node = pathlib.Path(sys.argv[-1]), os.environ["SLURMD_NODENAME"]
out.mkdir(exist_ok=True)
nodes = out / "nodes"
with nodes.open("a") as file:
    file.write(node + "\\n")
if nodes.read_text().split()[0] == node:
    alert = {"time": time.time(), "step": 1, "kind": "device", "level": "error", "host": node}
    with (out / "alerts.jsonl").open("a") as file:
        file.write(json.dumps(alert) + "\\n")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_requeued_job_does_not_use_a_node_that_alerts_name_twice(
    slurm: Slurm, tmp_path: Path
) -> None:
    (tmp_path / "names.py").write_text(NAMES_ITS_NODE)
    words = ["--gpus", "1", "--spawn", "torchrun", str(tmp_path / "names.py")]
    out, output = tmp_path / "run", tmp_path / "job.log"
    job = submit(slurm, output, *words, "--out", str(out), nodes=1)
    tell = lambda: f"{slurm.job(job)}\n{output.read_text() if output.exists() else ''}"  # noqa: E731
    wait_for(lambda: slurm.job(job)["JobState"] in ("COMPLETED", "FAILED"), 300, tell)
    state = slurm.job(job)
    first, second, third = (out / "nodes").read_text().split()
    assert first == second != third, tell()
    assert (state["JobState"], state["Restarts"], state["ExcNodeList"]) == ("COMPLETED", "2", first)
    assert f"job {job} will not use {first}, because alerts have named it" in output.read_text()


def test_a_login_node_passes_on_the_warning_time_and_reports_a_short_limit(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    words = [
        "--where",
        "slurm",
        "--sbatch=--signal=B:USR1@120",
        "--sbatch=--time=3",
        "--dry-run",
        str(NANO),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "launch", *words],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert (
        "time limit 3 min: is shorter than twice the warning time of 120 s, which leaves 60 s for"
        in done.stdout
    )
    assert "LAUNCH_GRACE" in done.stdout.partition("--export=")[2].split()[0].split(",")


def test_a_login_node_submits_names_and_no_values(tmp_path: Path) -> None:
    """Outside a job, `--where slurm` prints sbatch's command line, without values."""
    variables = (
        {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        | SECRETS
        | {"WANDB_PROJECT": "mine"}
    )
    words = [
        "--where",
        "slurm",
        "--nodes",
        "2",
        "--gpus",
        "8",
        "--sbatch=--partition=gpu",
        "--dry-run",
        str(NANO),
        "--tiny",
        "$(id)",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "launch", *words],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert (
        "sbatch --nodes=2" in done.stdout
        and "--gpus-per-node=8" in done.stdout
        and "--partition=gpu" in done.stdout
        and "'$(id)'" in done.stdout
    )
    assert "--dry-run" not in done.stdout, "what is printed would train nothing"
    (exported,) = [word for word in done.stdout.split() if word.startswith("--export=")]
    assert "WANDB_PROJECT" in exported and not any(
        name in exported or value in done.stdout for name, value in SECRETS.items()
    )


GPU_REQUESTS = [
    ([], False),
    (["--partition=gpus"], False),
    (["--account=progress"], False),
    (["--comment=--gpus"], False),
    (["--reservation", "8gpus_week"], False),
    (["-Aprogress", "-p", "gres"], False),
    (["--gres=nvme:100"], False),
    (["--gres", "craynetwork:1,bandwidth:lustre"], False),
    (["--gres-flags=enforce-binding"], False),
    (["--gpu-bind=none", "--gpu-freq=high"], False),
    (["--tres-per-node=license/matlab:1"], False),
    (["--gpus-per-node=4"], True),
    (["--gpus", "16"], True),
    (["-G16"], True),
    (["--partition=gpu", "-G", "16"], True),
    (["--gres=gpu:a100:8"], True),
    (["--gres", "nvme:100,gpu:8"], True),
    (["--gres=gpu"], True),
    (["--tres-per-node=gres/gpu:8"], True),
    (["--gpus-per-no=8"], True),  # sbatch accepts prefixes of option names
]


@pytest.mark.parametrize(
    ("flags", "asks"), GPU_REQUESTS, ids=[" ".join(flags) for flags, _ in GPU_REQUESTS]
)
def test_the_name_of_a_flag_decides_whether_gpus_are_requested(
    flags: list[str], asks: bool
) -> None:
    assert asks_for_gpus(flags) == asks


def test_flags_of_sbatch_after_a_space_or_an_equals_sign_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["--where", "slurm", "--gpus", "8", "--dry-run", str(NANO)]) == 0, (
        "no flag for sbatch at all"
    )
    assert "--gpus-per-node=8" in capsys.readouterr().out
    shown = []
    for given in (
        ["--sbatch", "--partition=gpus", "--sbatch", "-t", "--sbatch", "10"],
        ["--sbatch=--partition=gpus", "--sbatch=-t", "--sbatch=10"],
    ):
        assert (
            main(["--where", "slurm", "--gpus", "8", *given, "--dry-run", str(NANO), "--tiny"]) == 0
        )
        shown.append(shlex.split(capsys.readouterr().out))
        sbatch = shown[-1][shown[-1].index("sbatch") :]
        assert sbatch[3:7] == ["--partition=gpus", "-t", "10", "--gpus-per-node=8"]
        assert sbatch[-2:] == [str(NANO), "--tiny"], "the job gets the recipe and its flags"
    for given in (["--sbatch", "-p", "gpus"], ["--sbatch=--partition", "gpus"]):
        assert main(["--where", "slurm", *given, str(NANO)]) == 1
        assert "gpus: the file does not exist. If it is the value of -" in capsys.readouterr().err
