"""recipekit/hosts/gpus.py and checks.py: the GPUs of a host, and what prevents a rank from using
them.

test_doctor.py covers the other checks from the user's point of view.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from driver_versions import CLOSED, OPEN
from job import NANO
from pool import ROOT, environment
from recipekit.doctor.target import RankInfo, resolve_target
from recipekit.hosts import checks, gpus
from recipekit.hosts.gpus import check_gpu_of_rank, check_torch_sees_gpus
from recipekit.hosts.ports import check_master_port, free_port, launcher_port
from recipekit.spec.errors import Problem

# nvidia-smi's output with driver 550: index, uuid, name, memory.total, memory.used, driver_version.
TOLD = "".join(
    f"{number}, GPU-{number}{number}aa-bb, NVIDIA H200, 143771, {used}, 550.1\n"
    for number, used in enumerate((9, 80000, 9, 9))
)


@pytest.fixture(autouse=True)
def four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with four GPUs; the second GPU is in use."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<END\n{TOLD}END\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        (None, [0, 1, 2, 3]),
        ("3,1", [3, 1]),
        ("GPU-22aa,0", [2, 0]),
        ("", []),
        ("-1", []),
        ("0,9,1", [0]),
        ("GPU-", []),
        (" 2 , 3 ", [2, 3]),
        ("MIG-5", [0, 1, 2, 3]),
    ],
)
def test_only_visible_gpus_count(
    visible: str | None, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.device_index for gpu in gpus.visible_gpus()] == numbers


def test_a_gpu_that_is_left_out_is_not_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(visible: str, ranks: int) -> list[str]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return [
            str(found)
            for found in gpus.check_devices(ranks)
            if isinstance(found, Problem) and "/dev/shm" not in str(found)
        ]

    assert told("2,3", 2) == []
    assert [problem.partition(":")[0] for problem in told("2,1", 2)] == ["GPU 1 (NVIDIA H200)"]
    assert told("2,3", 4) == [
        "4 ranks: this host has 2 GPUs that CUDA_VISIBLE_DEVICES names. Start 2 ranks or fewer"
        " on it"
    ]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that contains /dev and the driver's files for a host with two GPUs.

    No environment variable selects a device.
    """
    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    import torch

    if torch.accelerator.is_available():
        pytest.skip("needs a torch that sees no accelerator")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / "dev" / name).touch()
    gpu = tmp_path / "driver" / "gpus" / "0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 120\n")
    (tmp_path / "driver" / "version").write_text(CLOSED)
    return tmp_path


def unseen(host: Path) -> list[Problem]:
    return check_torch_sees_gpus(host / "dev", host / "driver" / "version")


def test_gpus_that_torch_does_not_see(host: Path) -> None:
    """The host has GPUs, but pip has installed the CPU build of torch."""
    import torch

    (problem,) = unseen(host)
    assert (
        problem.where == f"torch {torch.__version__}"
        f" ({f'CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'})"
    )
    assert problem.rule == "sees none of the 2 GPUs of this host (NVIDIA H200), driver 550.54.15"
    assert (
        problem.fix.startswith("install the build for this driver: make setup TORCH=cu126")
        and 'set CUDA_VISIBLE_DEVICES=""' in problem.fix
    )
    (host / "driver" / "version").write_text(OPEN)
    assert torch.version.cuda or "TORCH=cu130." in unseen(host)[0].fix
    (host / "driver" / "version").unlink()
    assert "whose driver is not loaded" in unseen(host)[0].rule


@pytest.mark.parametrize(
    ("name", "value", "problems"),
    [
        ("DS_ACCELERATOR", "cpu", 0),
        ("CUDA_VISIBLE_DEVICES", "", 0),
        ("CUDA_VISIBLE_DEVICES", "-1", 0),
        ("CUDA_VISIBLE_DEVICES", " none", 0),
        ("CUDA_VISIBLE_DEVICES", "void", 0),
        ("CUDA_VISIBLE_DEVICES", "-1,-1", 0),  # set by `python -m launch`, one word per rank
        ("CUDA_VISIBLE_DEVICES", "NoDevFiles,NoDevFiles", 1),
        ("CUDA_VISIBLE_DEVICES", "NoDevFiles", 1),
        ("CUDA_VISIBLE_DEVICES", "0", 1),
        ("DS_ACCELERATOR", "cuda", 1),
    ],
)
def test_a_wish_for_the_cpu_is_honoured(
    host: Path, name: str, value: str, problems: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert len(unseen(host)) == problems


def test_a_job_to_which_slurm_gave_no_gpu_is_refused(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fix is not advice about drivers."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    (problem,) = unseen(host)
    assert problem.where == "CUDA_VISIBLE_DEVICES = NoDevFiles" and "--gpus-per-node" in problem.fix


def test_a_host_without_gpus_is_fine(host: Path) -> None:
    for path in (host / "dev").glob("nvidia?"):
        path.unlink()
    assert unseen(host) == []


def test_a_run_on_such_a_host_is_refused(host: Path) -> None:
    """The user gets exit code 1 and one problem within seconds."""
    code = (
        "import runpy, sys; from pathlib import Path; from recipekit.hosts import gpus as"
        f" h\nh.check_torch_sees_gpus.__defaults__ = (Path({str(host / 'dev')!r}),"
        f" Path({str(host / 'driver' / 'version')!r}))\nsys.argv = sys.argv[1:];"
        " runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    env = {
        name: value
        for name, value in environment().items()
        if name not in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR")
    }
    words = [sys.executable, "-c", code, str(NANO), "--tiny", "--out", "run"]
    done = subprocess.run(
        words, cwd=host, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert (
        done.returncode == 1
        and "refused: 1 problem\n" in done.stderr
        and "TORCH=cu126" in done.stderr
        and "Traceback" not in done.stderr
    ), done.stderr


@pytest.mark.parametrize(
    ("local_rank", "count", "variables", "ranks"),
    [
        (0, 1, {}, None),
        (7, 8, {"LOCAL_WORLD_SIZE": "8"}, None),
        (3, 1, {}, 4),  # srun --gpus-per-task=1, with LOCAL_RANK set from SLURM_LOCALID
        # The first rank fails together with the others.
        (0, 1, {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 8),
        # torchrun in one task.
        (
            0,
            8,
            {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "LOCAL_WORLD_SIZE": "8"},
            None,
        ),
        (3, 8, {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "16"}, None),
        (0, 1, {"LOCAL_SIZE": "2"}, 2),  # deepspeed --num_gpus 2
    ],
)
def test_every_rank_needs_a_gpu_of_its_own_in_sight(
    local_rank: int,
    count: int,
    variables: dict[str, str],
    ranks: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("recipekit.hosts.torch_builds.gpus_in_use", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    problems = check_gpu_of_rank(local_rank)
    if ranks is None:
        assert problems == []
    else:
        (problem,) = problems
        assert (
            problem.where.startswith(f"{ranks} ranks on this host")
            and f"sees {count} GPU" in problem.where
        )
        assert (
            "leave out srun's --gpus-per-task and --gpu-bind" in problem.fix
            and f"or start {count} on each host" in problem.fix
        )


def test_memory_that_a_container_may_take(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemAvailable:    3000 kB\n")
    assert checks.free_memory(tmp_path) == 3000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for limit, free in (("max\n", 3000 * 1024), ("900000\n", 900_000 - 500_000 + 100_000)):
        for name, text in (
            ("memory.max", limit),
            ("memory.current", "500000\n"),
            ("memory.stat", "anon 5\ninactive_file 100000\n"),
        ):
            (group / name).write_text(text)
        assert checks.free_memory(tmp_path) == free
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\n")
    (group / "memory.max").write_text("max\n")
    assert checks.free_memory(tmp_path) is None


def test_a_taken_port_is_refused_before_anything_heavy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`deepspeed` sets such a port for every run.

    Only rank 0 opens the port. torchrun itself keeps its port open.
    """
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        place = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CROSS_SIZE": "1",
        }
        command = [sys.executable, str(NANO), "--tiny", "--out", "run"]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment() | place,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        (told,) = re.findall(r"^  1\. (.*)$", done.stderr, re.M)
        assert re.fullmatch(
            rf"master port {port}: is in use on \S+\. Choose another: deepspeed --master_port"
            r" \d+ .*",
            told,
        )
        assert (
            done.returncode == 1
            and "Traceback" not in done.stderr
            and not (tmp_path / "run").exists()
        ), done.stderr
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert check_master_port(1) == [] and len(check_master_port(0)) == 1
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        assert check_master_port(0) == []
    monkeypatch.setenv("MASTER_PORT", "x")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert [str(problem).split(":")[0] for problem in check_master_port(0)] == ["MASTER_PORT = x"]


STARTED_BY = {
    "deepspeed --master_port": {"CROSS_SIZE": "1", "GROUP_WORLD_SIZE": ""},
    "torchrun --master_port": {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "False"},
    "python -m launch --master_port": {"CROSS_SIZE": "2", "LAUNCH_LOGS": "runs/x/logs"},
    "MASTER_PORT": {"SLURM_PROCID": "0"},
}


@pytest.mark.parametrize("flag", STARTED_BY)
def test_another_port_is_named_as_the_launcher_takes_it(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """deepspeed and torchrun overwrite MASTER_PORT, and srun has no flag for it.

    The suggested port must therefore be free and be named as the launcher accepts it.
    """
    for name in ("CROSS_SIZE", "GROUP_WORLD_SIZE", "LAUNCH_LOGS", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in STARTED_BY[flag].items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        (problem,) = check_master_port(0)
    found = re.fullmatch(rf"choose another: {flag}[ =](\d+) \(`ss .*\)", problem.fix)
    assert found, problem.fix
    socket.create_server(("", int(found[1]))).close()


def test_the_quickstart_takes_a_free_port() -> None:
    """MASTER_PORT is used if the port is free.

    The chosen port can be opened for any value. If it differs from MASTER_PORT, a line explains
    why.
    """
    with socket.create_server(("", 0)) as taken:
        used, free = taken.getsockname()[1], free_port()
        assert launcher_port({"MASTER_PORT": str(free)}) == (
            free,
            f"master port {free}, from MASTER_PORT",
        )
        for wanted in (str(used), "0", "99999", "x", "29577.5", "-1"):
            port, note = launcher_port({"MASTER_PORT": wanted})
            assert (
                note
                == f"master port {port}, because MASTER_PORT = {wanted} is in use or is not a valid"
                " port"
            )
            socket.create_server(("", port)).close()
        for variables in ({}, {"MASTER_PORT": " "}):
            port, note = launcher_port(variables)
            assert note == "" and port != used
            socket.create_server(("", port)).close()


JOINED = """
import os, socket, sys, tempfile
import torch.distributed as dist
from recipekit.hosts.ports import check_master_port, free_port

def problems():
    return len(check_master_port(0))

dist.init_process_group("gloo")  # over the master port, which its store now holds
found = [problems()]
dist.destroy_process_group()
with socket.create_server(("", 0)) as taken:
    os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
    found.append(problems())
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, \
world_size=1)
    found.append(problems())
    dist.destroy_process_group()
    found.append(problems())
print(found)
"""


def test_the_master_port_is_not_checked_once_a_process_has_joined_its_group() -> None:
    """A program may call `init_process_group` before `run(RECIPE)`.

    In that case rank 0 already uses the port, or needs no port.
    """
    place = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    done = subprocess.run(
        [sys.executable, "-c", JOINED],
        env=environment() | place,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[0, 1, 0, 1]\n"), done.stdout + done.stderr


def test_a_package_whose_folder_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package without its folder is reported, although its metadata says that it is installed."""
    for name, top in (("whole-one", "whole"), ("lost-one", "lost\n"), ("bare-one", None)):
        (tmp_path / f"{name.replace('-', '_')}-1.0.dist-info").mkdir()
        (tmp_path / f"{name.replace('-', '_')}-1.0.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        if top:
            (tmp_path / f"{name.replace('-', '_')}-1.0.dist-info" / "top_level.txt").write_text(top)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = list(
        checks.check_package_versions(["whole-one==1.0", "lost-one==1.0", "bare-one==1.0"])
    )
    assert [str(problem) for problem in found if isinstance(problem, Problem)] == [
        (
            "lost-one 1.0: is recorded as installed, but its file lost is missing. Run: pip install"
            " --force-reinstall --no-deps lost-one==1.0"
        ),
        (
            "bare-one 1.0: is recorded as installed, but its file bare_one is missing. Run: pip"
            " install --force-reinstall --no-deps bare-one==1.0"
        ),
    ]
    assert "1 of 3" in str(found[-1])


def test_the_subject_of_a_recipe_of_pictures_is_planned_by_its_task() -> None:
    """A start needs no tokenizer for this task, and neither does the plan.

    A flag that belongs to a different task is reported in addition to the host's problems.
    """
    recipe, slot = (
        ROOT / "recipes" / "vit_l16_imagenet_zero2.py",
        RankInfo(0, 2, 0, 2, "127.0.0.1", 29500),
    )
    found = resolve_target(recipe, ["--init", "random"], None, 2, slot)
    assert (
        found.problems == []
        and found.plan is not None
        and found.plan.recipe.task == "image_classification"
    )
    found = resolve_target(recipe, ["--tiny", "--seq_len", "64"], None, 2, slot)
    assert found.plan is None and [problem.where for problem in found.problems] == ["--seq_len 64"]
