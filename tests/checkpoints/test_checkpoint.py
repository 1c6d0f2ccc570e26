"""Checkpoints with damage, hostile files, full disks and dead ranks.

Errors name the fault, no code from a file is executed, and good checkpoints remain.
"""

import dataclasses
import errno
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import small_disk
from job import NANO, Job, checkpoints, contention, deepspeed, metrics, steps_done
from recipekit.checkpoints import step_folder
from recipekit.checkpoints.reshape import reshape
from recipekit.checkpoints.verify import verify
from recipekit.convert.hugging_face import to_hf
from recipekit.spec.errors import ConfigError
from recipekit.storage import manifest
from recipekit.storage.manifest import find_faults
from short_runs import BASE, train

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a ZeRO-1 run of two ranks with steps 1 and 2. Copy it before changing it."""
    return saved_by(pools, tmp_path_factory.mktemp("saved") / "run")


def saved_by(pools: Any, out: Path, **layout: Any) -> Path:
    recipe = dataclasses.replace(BASE, eval_every=0, **layout)
    results = pools.run(
        2, train, recipe=recipe, argv=["--out", str(out), "--stop_at", "2", "--save_every", "1"]
    )
    assert [result for result, _ in results] == [0, 0], results
    return out


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of `saved` that a test may damage."""
    return shutil.copytree(saved, tmp_path / "run")


def step_of(run: Path, number: int = 2) -> Path:
    return run / "checkpoints" / f"step_{number:08d}"


def files_of(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("*") if path.is_file())


def names(found: list[str]) -> list[str]:
    """Return the file that each fault's message begins with."""
    return [fault.split(" ")[0] for fault in found]


# Damage
# --------------------------------------------------------------------------------------------------


def flipped(run: Path, number: int) -> list[tuple[str, list[str], str, list[str]]]:
    """Flip one random bit at a time, in each file in turn, on a rank of a pool.

    Return (file, faults, the checkpoint that a resume uses, messages) for each bit.
    """
    from recipekit.checkpoints.load import newest_verified
    from torch.distributed import barrier, get_rank

    step, chance, found = step_of(run), random.Random(0), []
    files = files_of(step)
    for turn in range(number):
        file, said = files[turn % len(files)], []
        at, bit = chance.randrange(file.stat().st_size), 1 << chance.randrange(8)
        if get_rank() == 0:
            flip(file, at, bit)
        barrier()
        taken = newest_verified(run, said.append)
        if get_rank() == 0:
            found.append(
                (str(file.relative_to(step)), verify(step), taken.name if taken else "", said)
            )
            flip(file, at, bit)
        barrier()
    return found


def flip(file: Path, at: int, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        (byte,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ bit]))


@slow
def test_each_of_200_flipped_bits_is_found_and_the_checkpoint_before_is_taken(
    pools: Any, run: Path
) -> None:
    found = pools.run(2, flipped, run=run, number=200)[0]
    assert len(found) == 200
    for file, verified, taken, said in found:
        assert names(verified) == [file]
        assert taken == "step_00000001"
        assert len(said) == 1 and f"step_00000002 is damaged, passed over: {file} " in said[0]
    assert {Path(file).suffix for file, *_ in found} >= {".pt", ".json"} and "manifest.json" in {
        file for file, *_ in found
    }
    assert verify(step_of(run)) == [], "every bit was put back"


def test_every_truncated_or_missing_file_is_named(run: Path) -> None:
    step = step_of(run)
    for file in files_of(step):
        content, name = file.read_bytes(), str(file.relative_to(step))
        for size in {0, 1, len(content) // 2, len(content) - 1}:
            os.truncate(file, size)
            assert names(find_faults(step)) == names(verify(step)) == [name]
            file.write_bytes(content)
        file.unlink()
        assert names(find_faults(step)) == names(verify(step)) == [name]
        file.write_bytes(content)
    assert find_faults(step) == []


def test_a_file_with_bytes_after_its_end_is_named(tmp_path: Path) -> None:
    """Additional bytes are found without comparing contents.

    Tools that read all files anyway skip that comparison.
    """
    (tmp_path / "one.pt").write_bytes(b"one")
    manifest.write_manifest(tmp_path, 1, {"one.pt": manifest.file_entry(tmp_path / "one.pt")}, {})
    assert find_faults(tmp_path, ()) == []
    (tmp_path / "one.pt").write_bytes(b"one more")
    assert find_faults(tmp_path, ()) == ["one.pt has 8 bytes instead of 3"]


def test_extra_files_are_named_and_read_by_nothing(run: Path, tmp_path: Path) -> None:
    """Some of the files match the file patterns of DeepSpeed, a conversion or an export."""
    step = step_of(run)
    to_hf(step, tmp_path / "hf")
    reshape(step, tmp_path / "reshaped", step_folder.open_step(step).layout)
    extra = [
        ".nfs0001",
        "errors_rank_0.pt",
        "hf_files/more.json",
        "mp_rank_07_model_states.pt",
        "rng_rank_7.pt",
        "sub/more.pt",
    ]
    (step / "sub").mkdir()
    for name in extra:
        (step / name).write_bytes(b"{}")
    (step / "away").symlink_to(tmp_path)
    assert find_faults(step) == verify(step) == []
    assert (
        manifest.unlisted_files(step, manifest.read_manifest(step))
        == list(step_folder.open_step(step).unlisted_files)
        == sorted([*extra, "away"])
    )
    to_hf(step, tmp_path / "hf2")
    reshape(step, tmp_path / "reshaped2", step_folder.open_step(step).layout)
    for out in ("hf", "reshaped"):
        assert {path.name: path.read_bytes() for path in files_of(tmp_path / f"{out}2")} == {
            path.name: path.read_bytes() for path in files_of(tmp_path / out)
        }


def test_swapped_and_stale_files_are_named(run: Path) -> None:
    step = step_of(run)
    first, second = step / "rng_rank_0.pt", step / "rng_rank_1.pt"
    swap(first, second)
    assert names(find_faults(step)) == names(verify(step)) == [first.name, second.name]
    swap(first, second)

    swap(step / "rng_rank_0.pt", step_of(run, 1) / "state.json")
    assert names(find_faults(step)) == ["rng_rank_0.pt"] and names(
        find_faults(step_of(run, 1))
    ) == ["state.json"]
    swap(step / "rng_rank_0.pt", step_of(run, 1) / "state.json")

    stale = step_of(run, 1).rename(step_of(run, 7))
    assert names(find_faults(stale)) == names(verify(stale)) == ["manifest.json"]
    assert find_faults(step) == []


def swap(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def resumable(runs: list[Path]) -> list[tuple[str, list[str]]]:
    """Return each run's messages and the checkpoint that a resume uses.

    This function runs on a rank of a pool.
    """
    from recipekit.checkpoints.load import newest_verified

    found = []
    for run in runs:
        said: list[str] = []
        taken = newest_verified(run, said.append)
        found.append((taken.name if taken else "", said))
    return found


def test_a_resume_takes_the_checkpoint_before_whatever_the_damage(
    pools: Any, saved: Path, tmp_path: Path
) -> None:
    damages: dict[str, Callable[[Path], Any]] = {
        "mp_rank_00_model_states.pt": lambda step: os.truncate(
            step / "mp_rank_00_model_states.pt", 0
        ),
        "state.json": lambda step: (step / "state.json").unlink(),
        "rng_rank_": lambda step: swap(step / "rng_rank_0.pt", step / "rng_rank_1.pt"),
        "manifest.json": lambda step: shutil.copy(
            step_of(step.parents[1], 1) / "manifest.json", step / "manifest.json"
        ),
    }
    runs = [shutil.copytree(saved, tmp_path / str(number)) for number in range(len(damages))]
    for run, damage in zip(runs, damages.values(), strict=True):
        damage(step_of(run))
    for taken, file, run in zip(pools.run(2, resumable, runs=runs)[0], damages, runs, strict=True):
        assert taken[0] == "step_00000001"
        # Either of two swapped files may be found first.
        assert taken[1][0].startswith(f"checkpoint {step_of(run)} is damaged, passed over: {file}")


def stray_files_of(kind: str) -> list[str]:
    """Return names of files that match DeepSpeed's patterns but are in no manifest."""
    return {
        "zero1": ["mp_rank_07_model_states.pt"],
        "pipeline": ["layer_00-copy-model_states.pt", "mp_rank_07_model_states.pt"],
    }[kind]


@pytest.mark.parametrize(("kind", "layout"), [("zero1", {}), ("pipeline", {"pp": 2})])
def test_a_resume_names_a_stray_file_and_reads_none(
    pools: Any, saved: Path, tmp_path: Path, kind: str, layout: dict[str, Any]
) -> None:
    run = (
        saved_by(pools, tmp_path / "run", **layout)
        if layout
        else shutil.copytree(saved, tmp_path / "run")
    )
    for name in (*stray_files_of(kind), "state.json.AbCdEf"):
        (step_of(run) / name).write_bytes(b"no pickle")
    recipe = dataclasses.replace(BASE, eval_every=0, **layout)
    result, printed = pools.run(
        2, train, recipe=recipe, argv=["--out", str(run), "--stop_at", "3"]
    )[0]
    assert result == 0 and f"resumed from {step_of(run)}" in printed
    count = len(stray_files_of(kind))
    assert (
        f"{step_of(run)}: {stray_files_of(kind)[0]} (and {count} more) is not part of the"
        " checkpoint, and is ignored\n" in printed
    )
    assert "damaged" not in printed and checkpoints(run) == [1, 2, 3]


@pytest.mark.parametrize(
    "content",
    [None, "", "step_00000009", "a link", "a folder"],
    ids=["missing", "empty", "names a folder that is gone", "a link", "a folder"],
)
def test_a_resume_does_not_depend_on_latest(pools: Any, run: Path, content: str | None) -> None:
    latest = run / "checkpoints" / "latest"
    latest.unlink()
    if content == "a link":
        latest.symlink_to("step_00000001")
    elif content == "a folder":
        (latest / "mine").mkdir(parents=True)
    elif content is not None:
        latest.write_text(content)
    recipe = dataclasses.replace(BASE, eval_every=0)
    for result, printed in pools.run(
        2, train, recipe=recipe, argv=["--out", str(run), "--stop_at", "3"]
    )[:1]:
        assert result == 0 and f"resumed from {step_of(run)}" in printed
        assert (
            f"{latest} cannot be written: Is a directory. The checkpoints are complete" in printed
        ) == (content == "a folder")
    assert (
        latest.is_dir()
        if content == "a folder"
        else latest.read_text() == "step_00000003" and not latest.is_symlink()
    )
    assert checkpoints(run) == [1, 2, 3]


def test_going_back_by_hand_moves_latest_before_anything_else(saved: Path, tmp_path: Path) -> None:
    """After a kill in between, `latest` points to a checkpoint that exists."""
    from recipekit.checkpoints.save import set_aside_later_steps

    run = shutil.copytree(saved, tmp_path / "run")
    seen: list[str] = []
    set_aside_later_steps(
        run / "checkpoints", 1, lambda _: seen.append((run / "checkpoints" / "latest").read_text())
    )
    assert seen == ["step_00000001"] and checkpoints(run) == [1]


# Hostile files
# --------------------------------------------------------------------------------------------------


class Evil:
    """An object whose unpickling creates a folder."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def poison(file: Path, marker: Path, bare: bool) -> None:
    """Replace a file with a pickle that runs code, either in torch's format or as a bare pickle.

    The new file is listed in the manifest.
    """
    if bare:
        file.write_bytes(pickle.dumps({"module": Evil(marker)}))
    else:
        torch.save({"module": Evil(marker), "optimizer_state_dict": Evil(marker)}, file)
    step = file.parent
    listed = manifest.read_manifest(step)
    manifest.write_manifest(
        step,
        listed["step"],
        listed["files"] | {file.name: manifest.file_entry(file)},
        listed["tensors"],
    )
    assert find_faults(step) == []


def test_the_poison_works(tmp_path: Path) -> None:
    """Loading these files must run their code; otherwise the tests below would prove nothing."""
    content = io.BytesIO()
    torch.save(Evil(tmp_path / "zipped"), content)
    content.seek(0)
    torch.load(content, weights_only=False)
    pickle.loads(pickle.dumps(Evil(tmp_path / "bare")))
    assert (tmp_path / "zipped").exists() and (tmp_path / "bare").exists()


@pytest.mark.parametrize("bare", [False, True], ids=["torch.save", "bare pickle"])
def test_no_tool_runs_what_a_file_contains(saved: Path, tmp_path: Path, bare: bool) -> None:
    marker = tmp_path / "marker"
    files = [path for path in files_of(step_of(saved)) if path.suffix == ".pt"]
    assert len(files) == 5
    works: dict[str, Callable[[Path], Any]] = {
        "verify": verify,
        "to-hf": lambda step: to_hf(step, tmp_path / "out"),
        "reshape": lambda step: reshape(step, tmp_path / "out", step_folder.open_step(step).layout),
    }
    # The 16-bit weights are copies, and only a resume needs the random number generators' states.
    readers = {"bf16": set(works), "mp": {"reshape"}, "rng": set()}
    for file in files:
        step = shutil.copytree(step_of(saved), tmp_path / "step", dirs_exist_ok=True)
        poison(step / file.name, marker, bare)
        for name, work in works.items():
            if name in readers[file.name.partition("_")[0]]:
                with pytest.raises(ConfigError, match=f"{file.name}: cannot be read safely"):
                    work(step)
                assert not (tmp_path / "out").exists()
            else:
                work(step)
                shutil.rmtree(tmp_path / "out", ignore_errors=True)
            assert not marker.exists()


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ({}, "mp_rank_*"),
        ({}, "*optim_states.pt"),
        ({}, "rng_*"),
        ({"pp": 2, "micro_batch": 1}, "layer_*"),
        pytest.param(
            {"ds_config": "zero3.json"}, "zero_pp_rank_?_mp_rank_00_model_states.pt", marks=slow
        ),
        pytest.param({"ds_config": "zero0.json"}, "mp_rank_*", marks=slow),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else " ".join(map(str, value.values())) or "zero1"
    ),
)
def test_a_resume_runs_nothing_that_a_file_contains(
    pools: Any, saved: Path, tmp_path: Path, layout: dict[str, Any], kind: str
) -> None:
    """All files of a kind are replaced, so that each rank reads one."""
    run = (
        saved_by(pools, tmp_path / "run", **layout)
        if layout
        else shutil.copytree(saved, tmp_path / "run")
    )
    files = sorted(step_of(run).glob(kind))
    assert files
    for number, file in enumerate(files):
        poison(file, tmp_path / "marker", bare=number % 2 == 1)
    recipe = dataclasses.replace(BASE, eval_every=0, **layout)
    for result, _ in pools.run(2, train, recipe=recipe, argv=["--out", str(run), "--stop_at", "3"]):
        assert isinstance(result, str) and any(
            f"{file}: cannot be read safely" in result for file in files
        ), result
    assert not (tmp_path / "marker").exists()
    assert checkpoints(run) == [1, 2]


@pytest.mark.parametrize("name", ["../outside.pt", "/etc/hostname"])
def test_a_manifest_that_leaves_its_folder_is_refused(run: Path, name: str) -> None:
    (run / "checkpoints" / "outside.pt").write_bytes(b"x")
    step = step_of(run)
    listed = manifest.read_manifest(step)
    manifest.write_manifest(
        step, 2, listed["files"] | {name: manifest.file_entry(step / name)}, listed["tensors"]
    )
    assert names(find_faults(step)) == names(verify(step)) == [name]


@pytest.mark.parametrize(
    "content",
    [[], {"files": []}, {"files": {"state.json": 3}}, {"files": {"state.json": {}}}, "x", None],
)
def test_a_manifest_of_another_form_is_no_manifest(run: Path, content: Any) -> None:
    """A manifest with the wrong structure is an error even if its sha256 is correct."""
    step = step_of(run)
    if isinstance(content, dict):
        manifest.write_manifest(step, 2, {}, {})
        full = json.loads((step / "manifest.json").read_text()) | content
        full.pop("sha256")
        content = full | {"sha256": manifest._manifest_sha256(full)}
    (step / "manifest.json").write_text(json.dumps(content))
    assert find_faults(step) == verify(step) == ["manifest.json differs from what was written"]


# Full disks and failed writes
# ------------------------------------------------------------------------------------


def train_with(
    recipe: Any,
    argv: list[str],
    rank: int,
    failing: str = "",
    free: int | None = None,
    late: bool = False,
    slow: float = 0.0,
    code: int = errno.ENOSPC,
) -> tuple[Any, str, list[int]]:
    """Run `train` with a failing disk on `rank`; return the results and the checkpoints at the end.

    - Writes to step folders that match `failing` raise the error `code`.
    - `free` is the number of free bytes. With `late`, it applies only during training.
    - `slow` slows down hashing.

    This function runs on a rank of a pool.
    """
    from recipekit.checkpoints import save as save_module
    from recipekit.checkpoints.save import Saver
    from torch.distributed import get_rank

    save, usage, hashing, look = (
        torch.save,
        shutil.disk_usage,
        manifest.file_entry,
        Saver.check_room,
    )
    pauses, save_module.LAST_SAVE_PAUSES = save_module.LAST_SAVE_PAUSES, (0.1, 0.1)

    def failing_save(content: Any, path: Any, *rest: Any) -> None:
        if failing and re.search(failing, str(path)):
            Path(path).write_bytes(b"the beginning of it")
            raise OSError(code, os.strerror(code), str(path))
        save(content, path, *rest)

    def slow_facts(path: Path) -> Any:
        time.sleep(slow)
        return hashing(path)

    if get_rank() == rank:
        torch.save, manifest.file_entry = failing_save, slow_facts
        if free is not None:
            shutil.disk_usage = lambda path: usage(path)._replace(free=free)
    if late:
        Saver.check_room = lambda self, *_, **__: None
    try:
        result = train(recipe, argv)
    finally:
        torch.save, shutil.disk_usage, manifest.file_entry, Saver.check_room = (
            save,
            usage,
            hashing,
            look,
        )
        save_module.LAST_SAVE_PAUSES = pauses
    return *result, checkpoints(Path(argv[1]))


@pytest.mark.parametrize(
    ("rank", "flag", "code"),
    [
        (1, "", errno.ENOSPC),
        (1, "--save_in_background", errno.EIO),
        pytest.param(0, "", errno.EDQUOT, marks=slow),
        pytest.param(0, "--save_in_background", errno.ESTALE, marks=slow),
        pytest.param(1, "", errno.EROFS, marks=slow),
    ],
)
def test_a_save_that_fails_on_one_rank_is_tried_again_by_all(
    pools: Any, tmp_path: Path, rank: int, flag: str, code: int
) -> None:
    """The disk fails in steps 2 and 3. With a background save this is known one step later."""
    out, recipe = tmp_path / "run", dataclasses.replace(BASE, eval_every=0, steps=6)
    argv = ["--out", str(out), "--save_every", "2", *([flag] if flag else [])]
    results = pools.run(
        2, train_with, recipe=recipe, argv=argv, rank=rank, failing="step_0000000[23]", code=code
    )
    assert [result for result, *_ in results] == [0, 0], results
    printed = results[0][1]
    assert (
        printed.count(f"checkpoint of step 2: rank {rank}: [Errno {code}] {os.strerror(code)}") == 1
    )
    assert printed.count("The run continues and tries again at the next steps") == 1
    assert (
        printed.count("saving works again") == 1 and results[1][1].count("saving works again") == 0
    )
    assert checkpoints(out) == [4, 6] and all(
        find_faults(step_of(out, number)) == [] for number in (4, 6)
    )
    assert {path.name for path in (out / "checkpoints").iterdir()} == {
        "latest",
        "step_00000004",
        "step_00000006",
    }
    assert [line["step"] for line in metrics(out)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("rank", "flag", "failing", "steps"),
    [
        (
            1,
            "",
            "step_0000000[2345]",
            "the saves of steps 2 and 4 have failed: checkpoint of step 4",
        ),
        (0, "--save_in_background", "step_0000000[6]", "checkpoint of step 6"),
        pytest.param(
            1,
            "--save_in_background",
            "step_0000000[2345]",
            "the saves of steps 2 and 4 have failed: checkpoint of step 4",
            marks=slow,
        ),
        pytest.param(1, "", "step_0000000[6]", "checkpoint of step 6", marks=slow),
        pytest.param(
            0,
            "",
            "step_",
            "the saves of steps 2 and 4 have failed: checkpoint of step 4",
            marks=slow,
        ),
    ],
)
def test_two_regular_saves_that_fail_end_the_run_on_all_ranks(
    pools: Any, tmp_path: Path, rank: int, flag: str, failing: str, steps: str
) -> None:
    """A failure of the last save also ends the run.

    The earlier checkpoints must be intact, and the run must resume from them.
    """
    out, recipe = tmp_path / "run", dataclasses.replace(BASE, eval_every=0, steps=6)
    argv = ["--out", str(out), "--save_every", "2", *([flag] if flag else [])]
    results = pools.run(2, train_with, recipe=recipe, argv=argv, rank=rank, failing=failing)
    told = {result for result, *_ in results}
    assert len(told) == 1, told
    said = told.pop()
    assert f"{steps}: rank {rank}: [Errno 28] No space left on device" in said
    assert " (needs " in said and " are free). The checkpoints before it are intact" in said
    older = [2, 4] if "6" in failing else []
    assert checkpoints(out) == older and all(
        find_faults(step_of(out, number)) == [] for number in older
    )
    assert {path.name for path in (out / "checkpoints").iterdir()} == {
        *(["latest"] if older else []),
        *(f"step_{number:08d}" for number in older),
    }
    for result, printed in pools.run(2, train, recipe=recipe, argv=argv)[:1]:
        assert (result == 0 and not older) or f"resumed from {step_of(out, 4)}" in printed
    assert checkpoints(out) == [2, 4, 6]
    assert [line["step"] for line in metrics(out)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("flag", ["--no-save_in_background", "--save_in_background"])
def test_too_little_space_is_told_before_anything_is_written(
    pools: Any, run: Path, flag: str
) -> None:
    before = {path: path.stat().st_mtime_ns for path in (run / "checkpoints").rglob("*")}
    recipe = dataclasses.replace(BASE, eval_every=0)
    argv = ["--out", str(run), "--stop_at", "3", flag]
    told = {
        result
        for result, *_ in pools.run(
            2, train_with, recipe=recipe, argv=argv, rank=0, free=1234, late=True
        )
    }
    assert len(told) == 1, told
    needed = int(
        told.pop()
        .partition("step 3 needs ")[2]
        .partition(" bytes, 1,234 are free. The checkpoints before it are intact")[0]
        .replace(",", "")
    )
    written = sum(path.stat().st_size for path in step_of(run).glob("*states.pt"))
    assert 0.9 * written < needed <= written
    assert {path: path.stat().st_mtime_ns for path in (run / "checkpoints").rglob("*")} | {
        run / "checkpoints": 0
    } == before | {run / "checkpoints": 0}


def test_too_little_space_for_one_checkpoint_is_told_before_the_first_step(
    pools: Any, tmp_path: Path
) -> None:
    recipe = dataclasses.replace(BASE, eval_every=0)
    argv = ["--out", str(tmp_path / "run"), "--stop_at", "2"]
    told = {
        result
        for result, *_ in pools.run(2, train_with, recipe=recipe, argv=argv, rank=0, free=1234)
    }
    assert len(told) == 1
    said = told.pop()
    assert (
        f"checkpoint in {tmp_path / 'run' / 'checkpoints'}: each needs " in said
        and said.endswith(" bytes, 1,234 are free. Free space or choose another --out")
    )
    assert not (tmp_path / "run").exists(), "nothing was begun"


def room_with_a_left_over(folder: str, needed: int) -> str:
    """Check the disk space after a killed save has left files that use half of it.

    Return the error message, or "". This function runs on a rank of a pool.
    """
    from recipekit.checkpoints.disk_space import DiskSpace, SpaceDemand
    from recipekit.checkpoints.retention import Retention
    from recipekit.checkpoints.save import Saver
    from torch.distributed import barrier, get_rank

    usage, left = shutil.disk_usage, Path(folder) / ".staging" / "step_00000002" / "half"
    if get_rank() == 0:
        left.parent.mkdir(parents=True)
        left.touch()
    barrier()
    saver = object.__new__(Saver)
    saver.folder, saver.retention, saver.room = (
        Path(folder),
        Retention(1),
        DiskSpace(Path(folder), needed),
    )
    shutil.disk_usage = lambda path: usage(path)._replace(
        free=needed // 2 if left.exists() else needed
    )
    try:
        saver.check_room(SpaceDemand([1]), resumed=False)
    except ConfigError as error:
        return str(error)
    finally:
        shutil.disk_usage = usage
    return ""


def test_what_a_killed_save_has_left_takes_no_room(pools: Any, tmp_path: Path) -> None:
    """A killed save's files do not count as used space, because otherwise a restart would be
    rejected.
    """
    assert pools.run(2, room_with_a_left_over, folder=str(tmp_path), needed=1000) == ["", ""]
    assert not (tmp_path / ".staging").exists()


@slow
def test_a_limit_of_files_is_not_taken_for_a_full_disk(
    tmp_path: Path, ops: Callable[[str], None]
) -> None:
    """With `ulimit -f` torch.save fails as on a full disk, although gigabytes are free."""
    run = [
        sys.executable,
        str(NANO),
        "--tiny",
        "--steps",
        "1",
        "--eval_every",
        "0",
        "--no-wandb",
        "--out",
        str(tmp_path / "run"),
    ]
    # In blocks of 512 bytes.
    job = Job(tmp_path, ["sh", "-c", 'ulimit -f 1000 && exec "$@"', "sh", *run])
    try:
        assert job.wait(600) == 1
    finally:
        job.close()
    assert (
        " (no file may become larger than 512,000 bytes). The checkpoints before it are intact."
        " Raise the limit (ulimit -f unlimited)" in job.output
    )
    assert "Traceback" not in job.output and "are free" not in job.output
    assert checkpoints(tmp_path / "run") == []


def test_the_last_good_checkpoint_is_complete_when_a_loss_is_not_finite(
    pools: Any, tmp_path: Path
) -> None:
    """The disk is slow, and the save runs in the background."""
    recipe = dataclasses.replace(BASE, eval_every=0, lr=1e30, warmup_steps=0)
    argv = [
        "--out",
        str(tmp_path / "run"),
        "--save_every",
        "1",
        "--save_in_background",
        "--keep",
        "0",
    ]
    code, printed, there = pools.run(2, train_with, recipe=recipe, argv=argv, rank=0, slow=0.2)[0]
    assert code == 1 and there and f"the last good checkpoint is step {max(there)}" in printed
    assert there == [line["step"] for line in metrics(tmp_path / "run")]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a disk that is filled by two checkpoints of the smallest recipe."""
    with small_disk(tmp_path / "disk", "20m") as place:
        yield place


@pytest.fixture
def launch(tmp_path: Path, ops: Callable[[str], None]) -> Iterator[Callable[..., Job]]:
    """Return a function that starts the smallest recipe on two ranks, with extra code before its
    `run`.

    The processes are ended after the test.
    """
    jobs: list[Job] = []

    def launch(lines: str, *flags: object) -> Job:
        (tmp_path / "drill.py").write_text(
            NANO.read_text().replace("if __name__", f"{lines}\n\nif __name__")
        )
        jobs.append(
            Job(
                tmp_path,
                deepspeed(
                    Path("drill.py"),
                    "--tiny",
                    "--eval_every",
                    0,
                    "--no-wandb",
                    "--save_every",
                    1,
                    "--keep",
                    0,
                    *flags,
                ),
            )
        )
        return jobs[-1]

    yield launch
    for job in jobs:
        job.close()


@slow
def test_a_disk_of_20_mb_is_refused_before_the_first_step(
    ops: Callable[[str], None], disk: Path, tmp_path: Path
) -> None:
    """The data thread must have ended by then.

    Otherwise Python terminates a thread inside a library with "terminate called" and exit code 134.
    """
    told = (
        "import atexit, threading\n\natexit.register(lambda: print('threads:', *[thread.name for"
        " thread in threading.enumerate()]))"
    )
    (tmp_path / "drill.py").write_text(
        NANO.read_text().replace("if __name__", f"{told}\n\nif __name__")
    )
    job = Job(
        tmp_path,
        [sys.executable, "drill.py", "--out", "disk/run", "--eval_every", "0", "--no-wandb"],
    )
    try:
        assert job.wait(150) == 1, job.output[-8000:]
    finally:
        job.close()
    assert re.search("threads: MainThread", job.output) and not re.search(
        "threads:.* data", job.output
    ), job.output
    assert (
        "step 1/" not in job.output
        and "Traceback" not in job.output
        and not (disk / "run").exists()
    )
    assert re.search(
        r"1\. checkpoint in disk/run/checkpoints: each needs [\d,]+ bytes, [\d,]+ are free\. Free"
        r" space or choose another --out\n",
        job.output,
    ), job.output


# This simulates other processes that have filled the disk in the meantime.
UNCHECKED = (
    "from recipekit.checkpoints.save import Saver\n\nSaver._make_room = lambda self, step: None"
)


@pytest.mark.parametrize(
    ("lines", "flag"),
    [
        pytest.param(UNCHECKED, "--no-save_in_background", id="while it writes", marks=slow),
        pytest.param(UNCHECKED, "--save_in_background", id="in the background", marks=slow),
        pytest.param("", "--no-save_in_background", id="before it writes", marks=slow),
    ],
)
def test_a_full_disk_ends_the_run_with_one_message_and_the_older_checkpoints(
    launch: Callable[..., Job], disk: Path, lines: str, flag: str
) -> None:
    job = launch(lines, "--out", "disk/run", "--steps", 6, flag)
    assert job.wait(150) == 75, job.output[-8000:]
    job.wait_gone(60)
    print(job.output)
    assert job.output.count("failed: 1 problem") == 1 and "Traceback" not in job.output, job.output
    (told,) = [
        line for line in job.output.splitlines() if "The checkpoints before it are intact" in line
    ]
    assert "the saves of steps 3 and 4 have failed: " in told
    assert re.search(r"needs [\d,]+ bytes, [\d,]+ are free[.)]", told)
    assert job.output.count("The run continues and tries again at the next steps") == 1
    assert checkpoints(disk / "run") == [1, 2]
    assert (disk / "run" / "checkpoints" / "latest").read_text() == "step_00000002"
    assert verify(step_of(disk / "run", 1)) == verify(step_of(disk / "run", 2)) == []


# Dead ranks
# --------------------------------------------------------------------------------------------------

STUCK = """
import os
import time

from recipekit.checkpoints.save import Saver

write = Saver._write_local


def stuck(self, step, *rest):
    if os.environ["RANK"] == "1" and step.name == "step_00000003":
        time.sleep(1000)
    write(self, step, *rest)


Saver._write_local = stuck
"""


@slow
def test_a_rank_does_not_wait_for_the_part_of_a_dead_peer(
    launch: Callable[..., Job], tmp_path: Path
) -> None:
    """Rank 1 is killed during a background write, while rank 0 waits for the end of the save."""
    job = launch(STUCK, "--out", "run", "--steps", 3, "--save_in_background")
    job.wait_for(lambda: steps_done(tmp_path / "run") == 3 or job.process.poll() is not None, 150)
    time.sleep(1)
    rank = job.rank(1)
    assert (tmp_path / "run" / "checkpoints" / ".staging" / "rank_0.json").exists()
    rank.send_signal(signal.SIGKILL)
    seconds, busy = job.wait_gone(60), contention()
    print(f"gone after {seconds:.1f} s, contention {busy:.1f}")
    assert seconds < 10 * busy, job.output[-8000:]
    assert checkpoints(tmp_path / "run") == [1, 2] and verify(step_of(tmp_path / "run")) == []
