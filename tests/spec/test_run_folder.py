"""The run folder next to folders that a run reads, and the folders of finished runs."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from pool import ROOT
from recipekit.plan import RunPlan, resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import (
    DATA_FILES,
    RUN_JSON,
    files_of_run,
    move_run_aside,
    read_metrics,
    read_rewinds,
    read_run_json,
    run_identity,
    write_rewinds,
)

import launch.run_folder as launch

RECIPE = Recipe(
    model="recipekit/llama-nano", tokenizer="bytes", init="random", steps=60, seq_len=64
)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def planned(*argv: object) -> RunPlan:
    return resolve_run(parse(RECIPE, Path("mine.py"), [str(word) for word in argv]))


def problems(*argv: object) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        planned(*argv)
    return [str(problem) for problem in refused.value.problems]


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    config = (ROOT / "recipes/recipekit/architectures/recipekit--llama-nano.json").read_text()
    (folder / "config.json").write_text(config)
    return folder


def texts(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"text": "some words of a document"}) + "\n")
    return file


@pytest.mark.parametrize(
    ("out", "relation"), [("m", "is"), ("m/run", "is inside"), (".", "contains"), ("link", "is")]
)
def test_out_is_not_mixed_with_the_model(tmp_path: Path, out: str, relation: str) -> None:
    folder = model(tmp_path / "m")
    (tmp_path / "link").symlink_to(folder)
    (found,) = problems("--model", "./m", "--out", out)
    assert (
        found
        == f"out = {out}: {relation} the folder of --model ./m. Set --out to a separate folder"
    )
    assert planned("--model", "./m", "--out", "m2").out == Path("m2"), (
        "a name that only begins alike"
    )


@pytest.mark.parametrize(
    ("dataset", "out"),
    [
        ("data", "data"),
        ("data", "data/runs/mine"),
        ("data", "."),
        ("data/a.jsonl", "data"),
        ("data/*.jsonl", "data"),
        ("other/b.jsonl, data", "data/x"),
        ("one=data@3; two=other@1", "other"),
    ],
)
def test_out_is_not_mixed_with_the_data(tmp_path: Path, dataset: str, out: str) -> None:
    texts(tmp_path / "data" / "a.jsonl")
    texts(tmp_path / "other" / "b.jsonl")
    found = problems("--dataset", dataset, "--out", out)
    assert all(
        "the data of --dataset" in line and line.endswith("Set --out to a separate folder")
        for line in found
    ), found
    assert planned("--dataset", dataset, "--out", "runs/mine").out == Path("runs/mine")


def test_the_default_run_folder_inside_the_data_is_refused_too(tmp_path: Path) -> None:
    texts(tmp_path / "a.jsonl")
    assert problems("--dataset", ".") == [
        "out = runs/mine: is inside the data of --dataset . Set --out to a separate folder"
    ]


@pytest.mark.parametrize(("out", "relation"), [(ROOT, "is"), (ROOT.parent, "contains")])
def test_out_is_not_the_repository(out: Path, relation: str) -> None:
    assert problems("--out", out) == [
        f"out = {out}: {relation} the repository. Set --out to a separate folder"
    ]
    assert planned("--out", ROOT / "runs" / "mine").out == ROOT / "runs" / "mine"


def test_only_a_run_is_put_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "work"
    texts(folder / "mine.txt")
    move_run_aside(folder)
    assert os.listdir(folder) == ["mine.txt"] and capsys.readouterr().out == ""
    (folder / RUN_JSON).write_text("{}")
    move_run_aside(folder)
    assert sorted(os.listdir(tmp_path / "work.1")) == ["mine.txt", RUN_JSON] and not folder.exists()
    (tmp_path / "cut" / "checkpoints").mkdir(parents=True)  # its run.json is lost
    move_run_aside(tmp_path / "cut")
    assert (tmp_path / "cut.1" / "checkpoints").is_dir()


def with_manifest(step: Path) -> Path:
    step.mkdir(parents=True)
    (step / "manifest.json").write_text(json.dumps({"step": 4}))
    return step


@pytest.mark.parametrize(
    ("there", "newest"),
    [
        (["checkpoints/step_00000004"], "checkpoints/step_00000004"),
        (["checkpoints/step_00000004", "checkpoints/step_100000000"], "checkpoints/step_100000000"),
        (
            ["checkpoints/step_00000004", "checkpoints/step_00000005_best"],
            "checkpoints/step_00000004",
        ),
        (["step_00000004"], "step_00000004"),  # copied into the run folder itself
    ],
)
def test_checkpoints_without_a_run_json_are_never_started_over(
    tmp_path: Path, there: list[str], newest: str
) -> None:
    for name in there:
        with_manifest(Path("runs/mine", name))
    (found,) = problems()
    assert (
        found == f"out = runs/mine: has checkpoints, such as {Path(newest).name}, but no run.json."
        f" Continue with --resume runs/mine/{newest}, put them aside with --resume never, or"
        " choose another folder with --out"
    )
    assert planned("--resume", f"runs/mine/{newest}").resume_from == Path("runs/mine", newest)
    assert planned("--resume", "never").resume_from is None
    assert planned("--out", "runs/other").resume_from is None


def test_broken_checkpoints_without_a_run_json_are_not_started_over_either() -> None:
    Path("runs/mine/checkpoints/step_00000004").mkdir(parents=True)
    (found,) = problems()
    assert (
        "has checkpoints, such as step_00000004, but no run.json. Put them aside with --resume"
        " never" in found
    )


@pytest.mark.parametrize(
    "name",
    [
        "step_before_change",
        "step_00000004_best",
        "aside_step_00000004.1",
        "step_4",
        ".staging/step_00000004",
    ],
)
def test_what_is_no_checkpoint_stops_no_start(name: str) -> None:
    with_manifest(Path("runs/mine/checkpoints", name))
    assert planned().resume_from is None


@pytest.mark.parametrize("name", ["step_00000004", "step_00000002_best", "latest", "archive"])
def test_a_checkpoint_of_the_run_is_gone_back_to_under_any_name(tmp_path: Path, name: str) -> None:
    """The checkpoint may itself be a link in the folder, or a link may point to it."""
    run = finished(Path("runs/mine"), 9)
    checkpoints = run / "checkpoints"
    if name in ("latest", "archive"):
        target = with_manifest(
            tmp_path / "away" / "one" if name == "archive" else checkpoints / "step_00000004"
        )
        (checkpoints / name).symlink_to(target.absolute())
    else:
        with_manifest(checkpoints / name)
    assert (
        planned("--resume", checkpoints / name, "--stop_at", 20).resume_from == checkpoints / name
    )


def test_the_step_of_a_checkpoint_is_in_its_manifest() -> None:
    """The name that a user gave the checkpoint does not count.

    A different command's finished run is rejected.
    """
    run = finished(Path("runs/mine"), 9)
    step = with_manifest(run / "checkpoints" / "step_99999999_best")
    assert (
        planned("--resume", step, "--out", "runs/other", "--steps", 5, "--seed", 7).resume_from
        == step
    )
    (found,) = problems("--resume", step, "--out", "runs/other", "--steps", 4, "--seed", 7)
    assert "the checkpoint is at step 4, but this command ends at step 4" in found


def finished(run: Path, step: int, *argv: object) -> Path:
    """Write this command's run folder after `step`: run.json and an empty step folder."""
    plan = planned(*argv, "--out", run)
    recipe: dict[str, Any] = {"tiny": False}
    (run / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    (run / RUN_JSON).write_text(
        json.dumps({"recipe": recipe, "identity": run_identity(plan.recipe, plan.model_config)})
    )
    return run


@pytest.mark.parametrize(
    "other",
    [
        ["--task", "sft"],
        ["--dataset", "data/a.jsonl"],
        ["--seed", "3"],
        ["--text_field", "words"],
        ["--lr", "1e-5"],
    ],
    ids=lambda words: words[0],
)
def test_a_run_of_another_command_is_never_finished(tmp_path: Path, other: list[str]) -> None:
    texts(tmp_path / "data" / "a.jsonl")
    run = finished(Path("runs/first"), 60, *other)
    (found,) = problems("--resume", run, "--out", "runs/second", "--steps", 2)
    name = other[0].removeprefix("--")
    now = getattr(RECIPE, name)
    assert found.startswith(
        "resume = runs/first: the checkpoint is at step 60, but this command ends at step 2. "
    )
    assert (
        f"The run has {name} = {getattr(planned(*other, '--out', 'x').recipe, name)}, and this"
        f" command has {now}. " in found
    )
    convert = "--model NEW_FOLDER after recipekit convert to-hf runs/first NEW_FOLDER"
    assert found.endswith(f"Use --steps 61 or more, or start from its weights with {convert}")
    (run / "hf").mkdir()
    assert problems("--resume", run, "--out", "runs/second", "--steps", 2)[0].endswith(
        "with --model runs/first/hf"
    )
    assert planned("--resume", run, "--out", "runs/second", "--steps", 61).resume_from == run
    step = run / "checkpoints" / "step_00000060"
    (step / "manifest.json").write_text("{}")
    assert "is at step 60" in problems("--resume", step, "--out", "runs/second", "--steps", 60)[0]


@pytest.mark.parametrize("task", ["pretrain", "image_classification"])
def test_a_run_from_before_recompute_every_is_resumed(tmp_path: Path, task: str) -> None:
    """An older run.json contains checkpoint_every, which is not part of the identity.

    Recomputation may therefore change.
    """
    model = (
        ["--model", "google/vit-large-patch16-224", "--dataset", "builtin"]
        if task == "image_classification"
        else []
    )
    run = finished(Path("runs/first"), 40, "--task", task, *model)
    saved = json.loads((run / RUN_JSON).read_text())
    recipe = {"tiny": False, "task": task, "activation_checkpointing": True, "checkpoint_every": 2}
    (run / RUN_JSON).write_text(json.dumps(saved | {"recipe": recipe}))
    (run / "checkpoints" / "step_00000040" / "manifest.json").write_text("{}")
    for flags in (
        [],
        ["--recompute_every", 2],
        ["--recompute_every", 0],
        ["--activation_checkpointing"],
    ):
        assert planned("--task", task, *model, "--out", run, *flags).resume_from == run
    assert "checkpoint_every" not in run_identity(
        RECIPE, None
    ) and "recompute_every" not in run_identity(RECIPE, None)


def test_a_finished_run_of_the_same_command_is_no_mistake(tmp_path: Path) -> None:
    run = finished(Path("runs/first"), 60)
    assert planned("--resume", run, "--out", "runs/second").resume_from == run
    assert planned("--resume", run, "--out", "runs/second", "--steps", 2).resume_from == run, (
        "only the number of steps differs"
    )


DAMAGED = [
    "",
    "\0" * 300,
    '{"identity": {"model": "reci',
    "null",
    "[]",
    "7",
    '{"identity": 5}',
    '{"recipe": {"steps": 60}}',
    '{"identity": {}, "recipe": 3}',
]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_run_json_does_not_block_a_checkpoint(tmp_path: Path, content: str) -> None:
    run = finished(tmp_path / "runs" / "mine", 40)
    step = run / "checkpoints" / "step_00000040"
    (step / "manifest.json").write_text("{}")
    (run / "checkpoints" / "step_00000050").mkdir()  # not complete
    (run / RUN_JSON).write_text(content)

    (said,) = problems("--out", run)
    assert (
        said.startswith(f"{run / RUN_JSON}: is damaged")
        and "newest complete checkpoint is step_00000040" in said
    )
    (command,) = re.findall(r"--resume \S+$", said)
    assert planned("--out", run, *command.split()).resume_from == run

    assert planned("--out", run, "--resume", step).resume_from == step
    assert planned("--out", tmp_path / "new", "--resume", step).resume_from == step
    assert planned("--out", tmp_path / "new", "--resume", run).resume_from == run
    assert read_run_json(run).get("identity") in (None, {}) and launch.next_words(
        ("mine.py",), run, 1e12
    ) == ("mine.py",)
    assert launch.goal(run) in (None, 60)


def test_a_damaged_run_json_without_a_checkpoint_names_the_two_ways_on(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step_00000040").mkdir(parents=True)
    (tmp_path / "run" / RUN_JSON).touch()
    (said,) = problems("--out", tmp_path / "run")
    assert "no complete checkpoint" in said and "--out NEW" in said and "--resume never" in said


@pytest.mark.parametrize("content", [*DAMAGED, '{"files": 3}'], ids=range(len(DAMAGED) + 1))
def test_damaged_digests_of_data_files_count_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / DATA_FILES).write_text(content)
    assert all(isinstance(files, dict) for files in files_of_run(tmp_path).values())
    assert content == DAMAGED[6] or "files" not in files_of_run(tmp_path)


LINES = [json.dumps({"step": step, "step_s": 1.0}).encode() + b"\n" for step in (1, 2, 3)]


@pytest.mark.parametrize(
    "damage",
    [
        b"\0" * 40 + b"\n",
        b"\0" * 40,
        b"\xff\xfe{\n",
        b"5\n",
        b"{}\n",
        b'{"step"\n',
        b'{"step": "2"',
    ],
)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_damaged_line_of_metrics_hides_no_other_line(
    tmp_path: Path, damage: bytes, place: int
) -> None:
    """A power loss can leave NUL bytes."""
    lines = [*LINES[:place], damage, *LINES[place:]]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    torn = not damage.endswith(b"\n") and place < 3  # the line merges with the next one
    steps = [step for step in (1, 2, 3) if not (torn and step == place + 1)]
    assert (
        [line["step"] for line in read_metrics(tmp_path)]
        == steps
        == [line["step"] for line in launch.metrics(tmp_path)]
    )
    assert launch.last_step(tmp_path) == 3


def test_the_rewinds_of_a_run_are_read_again(tmp_path: Path) -> None:
    assert read_rewinds(tmp_path) is None
    write_rewinds(tmp_path, [[41, 55], [41, 60]])
    assert read_rewinds(tmp_path) == [[41, 55], [41, 60]]
    (tmp_path / "rewinds.json").write_text("[[41")
    assert read_rewinds(tmp_path) is None
    write_rewinds(tmp_path, [])
    assert not (tmp_path / "rewinds.json").exists()
    write_rewinds(tmp_path, [])
