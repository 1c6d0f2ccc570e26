"""Environment variables that torch reads on import: ours are added, and the user's are kept."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from job import NANO
from pool import environment, free_port
from recipekit.runtime import environment as runtime_environment
from recipekit.runtime.environment import (
    LAUNCH_ORDER,
    allocator_settings,
    order_launches,
    set_torch_variables,
)
from recipekit.spec.cores import usable_cores

NO_LIMIT = float("inf")
SEGMENTS, ROUND, CACHE = (
    "expandable_segments:True",
    "pinned_max_round_threshold_mb:16",
    "pinned_max_cached_size_mb:16",
)
NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("before", "name", "value"),
    [
        ({}, NEW, f"{ROUND},{CACHE},{SEGMENTS}"),
        ({NEW: "a:b"}, NEW, f"a:b,{ROUND},{CACHE},{SEGMENTS}"),
        (
            {NEW: "pinned_max_round_threshold_mb:1"},
            NEW,
            f"pinned_max_round_threshold_mb:1,{CACHE},{SEGMENTS}",
        ),
        (
            {NEW: "expandable_segments:False , a:b"},
            NEW,
            f"expandable_segments:False,a:b,{ROUND},{CACHE}",
        ),
        ({NEW: "backend:cudaMallocAsync"}, NEW, f"backend:cudaMallocAsync,{ROUND},{CACHE}"),
        (
            {NEW: "roundup_power2_divisions:[256:1,>:8],a:b"},
            NEW,
            f"roundup_power2_divisions:[256:1,>:8],a:b,{ROUND},{CACHE},{SEGMENTS}",
        ),
        ({OLD: "a:b"}, OLD, f"a:b,{ROUND},{CACHE},{SEGMENTS}"),
        ({OLD: ""}, OLD, f"{ROUND},{CACHE},{SEGMENTS}"),
        (
            {NEW: f"a:b,{SEGMENTS}", OLD: "expandable_segments:False"},
            OLD,
            f"a:b,expandable_segments:False,{ROUND},{CACHE}",
        ),
    ],
    ids=str,
)
def test_what_the_user_told_the_allocator_stays(
    before: dict[str, str], name: str, value: str
) -> None:
    assert allocator_settings(before, exact_pins=True) == (name, value)


def test_without_pinned_memory_nothing_is_said_of_it() -> None:
    assert allocator_settings({}, exact_pins=False) == (NEW, SEGMENTS)


def started(tmp_path: Path, ds_config: str, before: str = "", **variables: str) -> str:
    """Start a run without its training; return the output.

    The output contains torch's allocator settings and threads, as torch has read them.
    """
    code = (
        f"import sys, types; {before}\nfrom recipekit import run; from recipekit.spec.recipe import"
        " Recipe\n"
        "def main(plan, peers):\n    import torch\n    print(*plan.notes, sep='\\n')\n"
        "    print('torch has', torch._C._accelerator_getAllocatorSettings(),"
        " torch.get_num_threads())\n    return 0\n"
        # `run` is tested, but nothing is trained.
        "sys.modules['recipekit.train'] = types.SimpleNamespace(main=main)\n"
        f"run(Recipe(model='meta-llama/Llama-3.2-1B', ds_config='{ds_config}.json'), ['--tiny',"
        " '--out', sys.argv[1]])\n"
    )
    env = {
        key: value for key, value in environment().items() if key != "OMP_NUM_THREADS"
    } | variables
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("ds_config", "before", "pinned"),
    [("zero3_cpu", "", f"{ROUND},{CACHE},"), ("zero2", "import torch", "")],
)
def test_torch_has_read_what_was_set(
    tmp_path: Path, ds_config: str, before: str, pinned: str
) -> None:
    """torch reads the old variable name last.

    The settings also apply if the recipe file has already imported torch, because torch reads its
    allocator settings only when they are needed.
    """
    place = {
        "LOCAL_SIZE": "2",
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    said = started(
        tmp_path, ds_config, before, PYTORCH_CUDA_ALLOC_CONF="backend:native", **place
    ).splitlines()
    cores = usable_cores()
    assert (
        f"threads: {max(1, cores // 2)} for each rank, {cores} cores for 2 ranks (OMP_NUM_THREADS)"
        in said
    )
    settings, threads = said[-1].removeprefix("torch has ").split()
    assert (settings, threads) == (f"backend:native,{pinned}{SEGMENTS}", str(max(1, cores // 2)))


def told(
    variables: dict[str, str],
    ranks: int,
    config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    own: int = 64,
    limit: float = NO_LIMIT,
) -> tuple[str | None, list[str]]:
    """Return (threads, messages about threads) on a host with 64 cores.

    The rank may use `own` cores, and all ranks together may keep `limit` cores busy.
    """
    monkeypatch.setattr(runtime_environment, "cpu_limit", lambda: limit)
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda process: set(range(own if process == 0 else 64))
    )
    lines = set_torch_variables(variables, config, ranks)
    return variables.get("OMP_NUM_THREADS"), [line for line in lines if line.startswith("threads")]


def test_threads_that_somebody_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert told({}, 8, {}, monkeypatch)[0] == "8"
    assert told({}, 100, {}, monkeypatch)[0] == "1"
    assert told({}, 1, {}, monkeypatch) == (None, [])  # torch uses every core by default
    assert told({"OMP_NUM_THREADS": "3"}, 8, OFFLOAD, monkeypatch) == ("3", [])
    by_torchrun = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
    assert told(dict(by_torchrun), 8, {}, monkeypatch) == ("1", [])
    line = (
        "threads: 1 for each rank, set by torchrun. The CPU optimizer could use 8: start with"
        " OMP_NUM_THREADS=8"
    )
    assert told(dict(by_torchrun), 8, OFFLOAD, monkeypatch) == ("1", [line])


def test_cores_that_a_rank_is_bound_to_are_not_divided_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`srun --cpus-per-task 8` binds them."""
    # By default, torch uses all of these cores.
    assert told({}, 8, {}, monkeypatch, own=8) == (None, [])
    by_torchrun = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
    line = (
        "threads: 1 for each rank, set by torchrun. The CPU optimizer could use 8: start with"
        " OMP_NUM_THREADS=8"
    )
    assert told(by_torchrun, 8, OFFLOAD, monkeypatch, own=8) == ("1", [line])
    # A job's cores, which its ranks share.
    shared = ["threads: 4 for each rank, 32 cores for 8 ranks (OMP_NUM_THREADS)"]
    assert told({}, 8, {}, monkeypatch, own=32) == ("4", shared)


@pytest.mark.parametrize(
    ("limit", "ranks", "own", "threads"),
    [
        (16.0, 8, 64, "2"),
        (1.5, 1, 64, "1"),
        (0.5, 4, 64, "1"),
        (16.0, 8, 8, "2"),
        (64.0, 1, 64, None),
        (100.0, 8, 64, "8"),
    ],
)
def test_a_cpu_limit_decides_the_threads(
    limit: float, ranks: int, own: int, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's ranks share the limit, even if each rank is bound to cores (8 of 64).

    The threads of a single rank are limited as well.
    """
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    cores = f"a CPU limit of {limit:g} cores" if limit < 64 else f"{own} cores"
    line = (
        f"threads: {threads} for each rank, {cores} for {ranks} rank{'s' if ranks > 1 else ''}"
        " (OMP_NUM_THREADS)"
    )
    assert told({}, ranks, {}, monkeypatch, own, limit) == (threads, [line] if threads else [])
    assert told({"OMP_NUM_THREADS": "3"}, ranks, {}, monkeypatch, own, limit) == ("3", [])


HINTS = """
import os, sys
from recipekit.runtime.environment import hint_at_ranks
print(hint_at_ranks(os.environ, 6))
"""
STARTS = """
import os, subprocess, sys
words = [sys.executable, next(word for word in sys.argv[1:] if word.endswith(".py"))]
if "deepspeed" in sys.argv[0]:
    words = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *words]
subprocess.run(words, env=os.environ | {"WORLD_SIZE": "1"})
"""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["deepspeed", "mine.py"],
            "['1 rank on 6 cores, and no GPU: deepspeed --num_gpus 6 mine.py starts 6 ranks']",
        ),
        (
            ["deepspeed", "--master_port", "1", "mine.py"],
            "['1 rank on 6 cores, and no GPU: deepspeed --num_gpus 6 mine.py starts 6 ranks']",
        ),
        (
            ["torchrun", "mine.py"],
            "['1 rank on 6 cores, and no GPU: torchrun --nproc_per_node 6 mine.py starts 6 ranks']",
        ),
        (["deepspeed", "--num_gpus=1", "mine.py"], "[]"),
        (["torchrun", "--nproc-per-node", "1", "mine.py"], "[]"),
        (["other", "mine.py"], "[]"),
    ],
    ids=" ".join,
)
def test_a_launcher_that_starts_one_rank_without_being_asked_is_named(
    words: list[str], line: str, tmp_path: Path
) -> None:
    """The programs have the launchers' names and process trees.

    `test_a_launcher_without_a_number` starts real launchers.
    """
    (tmp_path / words[0]).write_text(STARTS)
    (tmp_path / "mine.py").write_text(HINTS)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"{line}\n"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_launcher_without_a_number(launcher: str, tmp_path: Path) -> None:
    cores = usable_cores()
    words = [
        str(Path(sys.executable).with_name(launcher)),
        str(NANO),
        "--tiny",
        "--steps",
        "1",
        "--eval_every",
        "0",
        "--no-wandb",
        "--no-export",
    ]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert (
        f"1 rank on {cores} cores, and no GPU: {launcher} --" in done.stdout
        and f"{NANO} starts {cores} ranks" in done.stdout
    ), done.stdout


@pytest.mark.parametrize(
    ("world", "before", "after"),
    [(1, {}, {}), (2, {}, {LAUNCH_ORDER: "1"}), (8, {LAUNCH_ORDER: "0"}, {LAUNCH_ORDER: "0"})],
)
def test_communicators_of_the_same_ranks_are_launched_in_one_order(
    world: int, before: dict[str, str], after: dict[str, str]
) -> None:
    variables = dict(before)
    order_launches(variables, world)
    assert variables == after
