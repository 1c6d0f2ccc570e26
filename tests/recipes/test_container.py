"""Recipes on a machine that resembles a container.

The machine has no git, no entry in /etc/passwd, a read-only HOME, no UTF-8 locale, and 64 MB of
/dev/shm. Each condition is a mount, because the tests run as root, which ignores file modes.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from job import in_mounts, metrics
from pool import ROOT, environment

DOCTOR = ROOT / "tools" / "doctor.py"
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))
OF_TASKS = (
    "llama_nano_zero2",
    "qwen3_0_6b_sft_zero2",
    "qwen3_0_6b_dpo_zero3",
    "qwen3_0_6b_reward_zero2",
    "bert_large_mlm_zero1",
    "resnet50_imagenet_zero1",
)
CONDITIONS = {
    # Hides /usr/bin/git for this command only.
    "no git": (
        "mkdir up work; mount -t overlay none -o"
        " lowerdir=/usr/bin,upperdir=$PWD/up,workdir=$PWD/work /usr/bin; rm /usr/bin/git"
    ),
    # This also replaces nsswitch.conf, because systemd's module knows root without a file.
    "no passwd": (
        "touch passwd; mount --bind passwd /etc/passwd; echo passwd: files > nss; mount --bind nss"
        " /etc/nsswitch.conf; unset USER LOGNAME"
    ),
    "read-only HOME": "mkdir home; mount -t tmpfs -o ro none home; export HOME=$PWD/home",
    "no UTF-8": "export LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0; unset LANG",
    "64 MB of shm": "mount -t tmpfs -o size=64m none /dev/shm",
}
ALL = tuple(CONDITIONS)
FLAGS = ("--tiny", "--steps", "1", "--warmup_steps", "0", "--eval_every", "0", "--out", "run")


def inside(
    folder: Path, conditions: tuple[str, ...], *words: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program under the given conditions, with the caches in their default folders."""
    lines = [
        "cd /mnt; mount -t tmpfs none /mnt; cd /mnt",
        *(CONDITIONS[name] for name in conditions),
        f"cd {folder}",
    ]
    mounts = in_mounts("\n".join(lines))
    ours = ("HF_DATASETS_CACHE", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR", "WANDB_MODE")
    clean = {name: value for name, value in environment().items() if name not in ours} | variables
    done = subprocess.run(
        [*mounts, sys.executable, *map(str, words)],
        cwd=folder,
        env=clean,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done


def train(recipe: str, folder: Path, *conditions: str) -> str:
    """Train one step; return the output."""
    done = inside(folder, conditions, ROOT / "recipes" / f"{recipe}.py", *FLAGS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(metrics(folder / "run")) == 1 and list((folder / "run" / "hf").glob("*.safetensors"))
    assert (json.loads((folder / "run" / "run.json").read_text())["git_commit"] is None) == (
        "no git" in conditions
    )
    assert ("This program reads and writes UTF-8 all the same" in done.stdout) == (
        "no UTF-8" in conditions
    )
    return done.stdout


def test_a_recipe_trains_in_a_container(ops: Callable[[str], None], tmp_path: Path) -> None:
    """The run must write its checkpoint, its W&B files and its export."""
    train("llama_nano_zero2", tmp_path, *ALL)
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "conditions",
    [*((name,) for name in ALL), ALL],
    ids=lambda names: names[0] if len(names) == 1 else "all",
)
@pytest.mark.parametrize("recipe", OF_TASKS)
def test_a_recipe_of_each_task_trains_under_each_condition(
    ops: Callable[[str], None], tmp_path: Path, recipe: str, conditions: tuple[str, ...]
) -> None:
    """The doctor must find no problem on the same machine."""
    train(recipe, tmp_path, *conditions)
    doctor = inside(
        tmp_path,
        conditions,
        DOCTOR,
        "--recipe",
        ROOT / "recipes" / f"{recipe}.py",
        "--tiny",
        "--ranks",
        1,
        "--quick",
        "--out",
        "other",
    )
    assert doctor.returncode == 0 and "ok: no problem found" in doctor.stdout, (
        doctor.stdout + doctor.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_in_a_container(
    ops: Callable[[str], None], tmp_path: Path, recipe: str
) -> None:
    train(recipe, tmp_path, *ALL)


@pytest.mark.slow
@pytest.mark.parametrize("spawn", ["deepspeed", "torchrun"])
def test_launch_starts_two_ranks_in_a_container(
    ops: Callable[[str], None], tmp_path: Path, spawn: str
) -> None:
    words = [
        "-m",
        "launch",
        "--gpus",
        2,
        "--spawn",
        spawn,
        ROOT / "recipes" / "qwen3_0_6b_sft_zero2.py",
        *FLAGS,
    ]
    done = inside(tmp_path, ALL, *words, PYTHONPATH=f"{ROOT}:{ROOT / 'recipes'}")
    assert done.returncode == 0 and len(metrics(tmp_path / "run")) == 1, done.stdout + done.stderr
