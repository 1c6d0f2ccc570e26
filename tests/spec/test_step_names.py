"""One rule decides which names are checkpoints, for runs, tools and the launcher."""

import os
from pathlib import Path

import pytest
from recipekit.spec.step_names import free_name, newest_complete, step_folders, step_name, step_of

from launch import run_folder

STEPS = {
    "step_00000000": 0,
    "step_00000007": 7,
    "step_99999999": 99999999,
    "step_100000000": 10**8,
    "step_1234567890123": 1234567890123,
}
OTHERS = [
    *(
        "step_00000002_best",
        "step_before_change",
        "step_2",
        "step_0000007",
        "step_000000007",
        "step_",
        "step_00000002.1",
        "step_00000002 ",
    ),
    *(
        "Step_00000002",
        "aside_step_00000002.1",
        "xstep_00000002",
        "step_00000002\n",
        "step_٠٠٠٠٠٠٠٢",
        "step_-0000002",
        "step_+0000002",
        "step_0x000002",
    ),
    *(
        "checkpoint-500",
        "latest",
        ".staging",
        "step-00000002",
        "global_step00000002",
        "step_00000002~",
        "._step_00000002",
        "",
    ),
]


@pytest.mark.parametrize("reader", [step_of, run_folder.step_of], ids=["recipes", "launch"])
def test_a_checkpoint_is_step_and_eight_digits_or_more(reader) -> None:
    assert {name: reader(name) for name in STEPS} == STEPS
    assert [name for name in OTHERS if reader(name) is not None] == []
    assert [step_name(number) for number in STEPS.values()] == list(STEPS)


def test_step_folders_are_ordered_by_number_and_nothing_else_is_listed(tmp_path: Path) -> None:
    assert (
        step_folders(tmp_path / "nothing") == [] and newest_complete(tmp_path / "nothing") is None
    )
    for name in (*STEPS, *OTHERS[:-1], "step_00000009"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000011").write_text("a file")
    (tmp_path / "step_00000012").symlink_to(tmp_path / "step_00000009")
    (tmp_path / "step_00000013").symlink_to(tmp_path / "away")  # the archive is not mounted
    names = [
        "step_00000000",
        "step_00000007",
        "step_00000009",
        "step_00000012",
        "step_00000013",
        "step_99999999",
        "step_100000000",
        "step_1234567890123",
    ]
    assert [path.name for path in step_folders(tmp_path)] == names
    assert newest_complete(tmp_path) is None
    for name in ("step_00000009", "step_before_change", "step_00000002_best"):
        (tmp_path / name / "manifest.json").write_text("{}")
    assert newest_complete(tmp_path) == tmp_path / "step_00000012"


@pytest.mark.parametrize(
    ("complete", "newest"),
    [
        (["step_00000004", "step_100000000"], "step_100000000"),  # by number, not by text
        (["step_00000004", "step_00000005_best", "step_before"], "step_00000004"),
        (["step_before"], ""),
        ([], ""),
    ],
)
@pytest.mark.parametrize("latest", ["text", "link", "empty", "none"])
def test_the_launcher_finds_the_newest_checkpoint_whatever_latest_is(
    tmp_path: Path, complete: list[str], newest: str, latest: str
) -> None:
    for name in ("step_00000003", "step_200000000"):  # without a manifest
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for name in complete:
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "manifest.json").write_text("{}")
    if latest == "link":
        (tmp_path / "checkpoints" / "latest").symlink_to("step_00000003")
    elif latest != "none":
        (tmp_path / "checkpoints" / "latest").write_text(
            "step_00000003" if latest == "text" else ""
        )
    assert run_folder.newest_checkpoint(tmp_path) == newest
    found = newest_complete(tmp_path / "checkpoints")
    assert (found.name if found else "") == newest


def test_nothing_is_overwritten_by_what_is_put_aside(tmp_path: Path) -> None:
    assert free_name(tmp_path, "step_00000001").name == "aside_step_00000001.1"
    (tmp_path / "aside_step_00000001.1").symlink_to(tmp_path / "away")
    os.mkdir(tmp_path / "aside_step_00000001.2")
    assert free_name(tmp_path, "step_00000001").name == "aside_step_00000001.3"
