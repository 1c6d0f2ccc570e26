"""Disks that are too small for the export, or for the checkpoints that --keep requests."""

import dataclasses
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disks import resize, small_disk
from job import checkpoints
from recipekit.run import _lock_run_folder
from recipekit.spec.errors import ConfigError
from short_runs import BASE, train

slow = pytest.mark.slow


def add_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=256, target_modules="all-linear", task_type="CAUSAL_LM")
    )


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="zero1"),
        pytest.param({"pp": 2}, id="pp2"),
        pytest.param({"adapt": add_lora}, id="adapter", marks=slow),
        pytest.param({"adapt": add_lora, "merge": True}, id="merged", marks=slow),
    ],
)
def test_an_export_that_does_not_fit_is_written_by_the_same_command_later(
    pools: Any, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """The checkpoints are on a different disk.

    Every rank must report a one-line error, and no part of the export may remain.
    """
    recipe = dataclasses.replace(
        BASE,
        model="recipekit/llama-nano",
        eval_every=0,
        steps=1,
        warmup_steps=0,
        export=True,
        **layout,
    )
    with small_disk(tmp_path / "run", "700k") as out:
        (tmp_path / "checkpoints").mkdir()
        (out / "checkpoints").symlink_to(tmp_path / "checkpoints")
        told = {
            result for result, _ in pools.run(2, train, recipe=recipe, argv=["--out", str(out)])
        }
        assert len(told) == 1, told
        said = str(told.pop())
        assert said.startswith(f"export to {out}/hf: rank ") and "o space left on device" in said, (
            said
        )
        assert said.endswith(
            "The checkpoints are complete. Free space, then the same command writes the export"
        )
        assert checkpoints(out) == [1] and not list(out.glob("*hf*"))
        assert not list(out.glob("*.tmp"))

        resize(out, "50m")
        for result, printed in pools.run(2, train, recipe=recipe, argv=["--out", str(out)])[:1]:
            assert result == 0 and "nothing to do" in printed
        assert list((out / "hf").glob("*.safetensors")) and not list(out.glob(".hf*"))


@pytest.mark.parametrize(("begun", "code"), [(True, 75), (False, 1)])
def test_a_start_on_a_disk_without_files_left_is_made_again_for_a_run_with_checkpoints(
    tmp_path: Path, begun: bool, code: int
) -> None:
    """The disk has space for four files and folders."""
    with small_disk(tmp_path / "disk", "1m,nr_inodes=5") as disk:
        (disk / "run").mkdir()
        (disk / "run" / ("checkpoints" if begun else "notes")).mkdir()
        (disk / "more").touch()
        with pytest.raises(
            ConfigError, match="cannot be written: No space left on device"
        ) as refused:
            _lock_run_folder(disk / "run")
        assert refused.value.exit_code == code


def train_without_copies(recipe: Any, argv: list[str]) -> tuple[Any, str, list[int]]:
    """Train on two ranks; the second rank's disk is full when swap files are copied into step 2.

    This function runs on a rank of a pool.
    """
    from torch.distributed import get_rank

    copytree = shutil.copytree

    def failing(source: Any, target: Any, *arguments: Any, **more: Any) -> Any:
        if "step_00000002" in str(target) and get_rank() == 1:
            raise shutil.Error([(str(source), str(target), os.strerror(errno.ENOSPC))])
        return copytree(source, target, *arguments, **more)

    shutil.copytree = failing
    try:
        return *train(recipe, argv), checkpoints(Path(argv[1]))
    finally:
        shutil.copytree = copytree


@slow
def test_swap_files_that_cannot_be_copied_leave_no_rank_waiting(
    pools: Any, ops: Callable[[str], None], tmp_path: Path
) -> None:
    for op in ("cpu_adam", "async_io"):
        ops(op)
    recipe = dataclasses.replace(BASE, ds_config="zero3_nvme.json", eval_every=0, steps=4)
    results = pools.run(
        2,
        train_without_copies,
        recipe=recipe,
        argv=["--out", str(tmp_path / "run"), "--save_every", "2"],
    )
    assert [(result, there) for result, _, there in results] == [(0, [3, 4])] * 2, results
    assert (
        "checkpoint of step 2: rank 1: " in results[0][1] and "saving works again" in results[0][1]
    )


def test_a_start_that_cannot_write_the_files_of_its_run_is_refused(
    pools: Any, tmp_path: Path
) -> None:
    """Every rank must report a one-line error, and the run's files must be complete."""
    recipe = dataclasses.replace(BASE, eval_every=0, steps=2, warmup_steps=0)
    with small_disk(tmp_path / "run", "64k") as out:
        (tmp_path / "checkpoints").mkdir()
        (out / "checkpoints").symlink_to(tmp_path / "checkpoints")
        told = {
            result for result, _ in pools.run(2, train, recipe=recipe, argv=["--out", str(out)])
        }
        assert told == {
            f"out = {out}: cannot be written: No space left on device. Free space or choose another"
            " --out"
        }
        assert not list(out.glob("*.tmp"))
