"""Runs can stop and resume anywhere, bit for bit, from the newest complete checkpoint.

Otherwise an error must state the reason.
"""

import dataclasses
import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from job import checkpoints, metrics, reproducible_values
from recipekit.architectures.lookup import SHIPPED
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import read_metrics, run_identity
from recipekit.storage.manifest import find_faults
from shipped_jsons import strategy
from short_runs import BASE, GPT2, TYPED, train
from wandb_file import read_history

slow = pytest.mark.slow


@pytest.fixture
def go(pools: Any) -> Callable[..., str]:
    """Return a function that runs the recipe on two ranks and returns rank 0's output.

    Every rank must have the same result: exit code 0, or a config error if `refused` is set.
    """

    def go(
        out: Path, *argv: object, recipe: Recipe = BASE, world: int = 2, refused: bool = False
    ) -> str:
        results = pools.run(world, train, recipe=recipe, argv=["--out", str(out), *map(str, argv)])
        assert len({result for result, _ in results}) == 1, results
        result, printed = results[0]
        assert isinstance(result, str) == refused and (refused or result == 0), results
        return result if refused else printed

    return go


@pytest.fixture(scope="module")
def half(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that stopped at step 4 of 6, with checkpoints for steps 2 and 4.

    Copy the folder before changing it.
    """
    out = tmp_path_factory.mktemp("half") / "run"
    results = pools.run(
        2, train, recipe=BASE, argv=["--out", str(out), "--stop_at", "4", "--save_every", "2"]
    )
    assert [result for result, _ in results] == [0, 0], results
    return out


@pytest.fixture
def run(half: Path, tmp_path: Path) -> Path:
    """Return a copy of `half` that a test may damage."""
    shutil.copytree(half, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def unbroken(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the metrics of the same run without a stop."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    pools.run(2, train, recipe=BASE, argv=["--out", str(out)])
    return reproducible_values(metrics(out))


LAYOUTS = [
    pytest.param({"ds_config": "zero0.json"}, id="zero0"),
    pytest.param({"ds_config": "zero1.json"}, id="zero1", marks=slow),
    pytest.param({"ds_config": "zero2.json"}, id="zero2", marks=slow),
    pytest.param({"ds_config": "zero3.json"}, id="zero3", marks=slow),
    pytest.param({"ds_config": "zero1.json", "tp": 2}, id="zero1 tp2", marks=slow),
    pytest.param({"ds_config": "zero2.json", "model": GPT2}, id="zero2 dropout", marks=slow),
    pytest.param(
        {"ds_config": "zero3.json", "model": GPT2, "activation_checkpointing": True},
        id="zero3 dropout, recomputed",
        marks=slow,
    ),
    pytest.param({"ds_config": "zero0.json", "model": GPT2}, id="zero0 dropout", marks=slow),
    pytest.param({"ds_config": "zero3.json", "tp": 2}, id="zero3 tp2", marks=slow),
    pytest.param({"ds_config": strategy("zero1")}, id="zero1 fp32", marks=slow),
    pytest.param({"ds_config": "zero2_cpu.json"}, id="zero2 optimizer on the CPU", marks=slow),
    pytest.param({"ds_config": "zero3_nvme.json"}, id="zero3 on NVMe", marks=slow),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_is_the_unbroken_run_bit_for_bit(
    go: Callable[..., str], ops: Callable[[str], None], tmp_path: Path, layout: dict[str, Any]
) -> None:
    """With NVMe, matrices are in swap files, but vectors are too small to be swapped.

    Without our patch, DeepSpeed 0.19.8 restores only the files.
    """
    for op in {"zero2_cpu.json": ["cpu_adam"], "zero3_nvme.json": ["cpu_adam", "async_io"]}.get(
        str(layout["ds_config"]), []
    ):
        ops(op)
    check_resume(go, tmp_path, dataclasses.replace(BASE, **layout, export=True))


@slow
@pytest.mark.parametrize("bf16", [True, False])
def test_a_run_on_several_hosts_is_resumed_bit_for_bit(
    go: Callable[..., str], tmp_path: Path, bf16: bool
) -> None:
    """A host's weight copies (hpZ) are rebuilt from the checkpoint.

    The four ranks act as two hosts.
    """
    check_resume(
        go,
        tmp_path,
        dataclasses.replace(BASE, ds_config=strategy("zero3_hosts", bf16), export=True),
        world=4,
    )


def check_resume(go: Callable[..., str], tmp_path: Path, recipe: Recipe, world: int = 2) -> None:
    go(tmp_path / "unbroken", recipe=recipe, world=world)
    go(tmp_path / "stopped", "--stop_at", 3, recipe=recipe, world=world)
    assert [line["step"] for line in metrics(tmp_path / "stopped")] == [1, 2, 3]
    printed = go(tmp_path / "stopped", recipe=recipe, world=world)
    assert f"resumed from {tmp_path}/stopped/checkpoints/step_00000003" in printed
    assert reproducible_values(metrics(tmp_path / "stopped")) == reproducible_values(
        metrics(tmp_path / "unbroken")
    )
    assert [line["step"] for line in metrics(tmp_path / "stopped") if "eval_loss" in line] == [
        2,
        4,
        6,
    ]
    weights = [
        (tmp_path / name / "hf" / "model.safetensors").read_bytes()
        for name in ("stopped", "unbroken")
    ]
    assert weights[0] == weights[1]


@slow
def test_wandb_holds_what_metrics_jsonl_holds_after_a_resume_that_went_back(
    go: Callable[..., str], tmp_path: Path
) -> None:
    """Steps 4 and 5 are recorded, then lost with their checkpoint, and run again."""
    out = tmp_path / "run"
    recipe = dataclasses.replace(BASE, wandb=True)
    go(out, "--stop_at", 5, "--save_every", 3, recipe=recipe)
    (out / "checkpoints" / "step_00000005" / "state.json").unlink()
    go(out, recipe=recipe)
    assert [line["step"] for line in metrics(out)] == [1, 2, 3, 4, 5, 6]
    assert read_history(out) == metrics(out)
    assert len(list(out.glob("wandb/offline-run-*"))) == 2


def first_file(step: Path, pattern: str) -> Path:
    return sorted(step.glob(pattern))[0]


def flip_a_bit(step: Path) -> Path:
    file = first_file(step, "*zero_pp_rank_1*_optim_states.pt")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file


def lose_a_file(step: Path) -> Path:
    file = first_file(step, "rng_rank_1.pt")
    file.unlink()
    return file


def truncate_a_file(step: Path) -> Path:
    file = first_file(step, "mp_rank_00_model_states.pt")
    file.write_bytes(file.read_bytes()[:-1])
    return file


def spoil_the_manifest(step: Path) -> Path:
    (step / "manifest.json").write_text((step / "manifest.json").read_text()[:-20])
    return step / "manifest.json"


def lose_the_manifest(step: Path) -> Path:
    (step / "manifest.json").unlink()
    return step / "manifest.json"


@pytest.mark.parametrize(
    "damage", [flip_a_bit, lose_a_file, truncate_a_file, spoil_the_manifest, lose_the_manifest]
)
def test_damage_is_found_and_its_file_named(run: Path, damage: Callable[[Path], Path]) -> None:
    step = run / "checkpoints" / "step_00000004"
    assert find_faults(step) == []
    file = damage(step)
    assert [fault.split(" ")[0] for fault in find_faults(step)] == [file.name]


def test_the_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    go: Callable[..., str], run: Path, unbroken: list[dict[str, Any]]
) -> None:
    file = flip_a_bit(run / "checkpoints" / "step_00000004")
    printed = go(run)
    assert f"step_00000004 is damaged, passed over: {file.name} has changed" in printed
    assert f"resumed from {run}/checkpoints/step_00000002" in printed
    assert reproducible_values(metrics(run)) == unbroken


def test_without_a_whole_checkpoint_the_run_is_refused_and_kept(
    go: Callable[..., str], run: Path
) -> None:
    """A start from scratch would delete the run's records."""
    before = (run / "metrics.jsonl").read_bytes()
    for step in (2, 4):
        flip_a_bit(run / "checkpoints" / f"step_{step:08d}")
    refusal = go(run, refused=True)
    assert "contains no complete checkpoint" in refusal and "--resume never" in refusal
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_from_the_beginning(
    go: Callable[..., str], run: Path, unbroken: list
) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints" / ".staging" / "step_00000002").mkdir(parents=True)
    go(run)
    assert reproducible_values(metrics(run)) == unbroken
    assert checkpoints(run) == [6]


@pytest.mark.parametrize("keep", [pytest.param(1, marks=slow), 2])
def test_pruning_after_a_step_back_never_leaves_only_damaged_checkpoints(
    go: Callable[..., str], run: Path, keep: int
) -> None:
    flip_a_bit(run / "checkpoints" / "step_00000004")
    go(run, "--stop_at", 3, "--save_every", 1, "--keep", keep)
    assert checkpoints(run) == [2, 3][-keep:]
    assert "resumed from" in (printed := go(run, "--stop_at", 5)) and "step_00000003" in printed
    assert "damaged" not in printed
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5]


def test_going_back_by_hand_leaves_the_later_checkpoints_behind(
    go: Callable[..., str], run: Path, unbroken: list[dict[str, Any]]
) -> None:
    """`--resume STEP` starts a new branch.

    A later start must not continue from a later step on the old branch.
    """
    printed = go(run, "--resume", run / "checkpoints" / "step_00000002", "--stop_at", 3)
    assert f"resumed from {run}/checkpoints/step_00000002" in printed
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]
    assert checkpoints(run) == [2, 3]
    assert "step_00000003" in go(run)
    assert reproducible_values(metrics(run)) == unbroken


def test_save_every_and_keep(go: Callable[..., str], tmp_path: Path) -> None:
    for keep, left in ((0, [2, 4, 5]), (2, [4, 5])):
        go(tmp_path / str(keep), "--save_every", 2, "--steps", 5, "--keep", keep)
        assert checkpoints(tmp_path / str(keep)) == left
        assert (tmp_path / str(keep) / "checkpoints" / "latest").read_text() == "step_00000005"
        assert {path.name for path in (tmp_path / str(keep) / "checkpoints").iterdir()} == {
            "latest",
            *(f"step_{step:08d}" for step in left),
        }


def test_every_kth_step_and_the_best_are_kept_in_addition(
    go: Callable[..., str], tmp_path: Path
) -> None:
    """Steps 2 and 4 are evaluated, so the newest step, 5, cannot be the best.

    Step 3 is saved only because of --keep_every.
    """
    go(tmp_path, "--save_every", 2, "--keep", 1, "--keep_every", 3, "--keep_best", "--stop_at", 5)
    losses = {line["step"]: line["eval_loss"] for line in metrics(tmp_path) if "eval_loss" in line}
    best = min(losses, key=lambda step: losses[step])
    assert checkpoints(tmp_path) == sorted({best, 3, 5}) and sorted(losses) == [2, 4]
    states = [
        json.loads((tmp_path / "checkpoints" / f"step_{step:08d}" / "state.json").read_text())
        for step in (best, 3, 5)
    ]
    assert [state["eval_loss"] for state in states] == [losses[best], None, None]


def test_a_finished_run_says_so(go: Callable[..., str], run: Path) -> None:
    go(run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert f"nothing to do: the run in {run} has finished 6 of 6 steps" in go(run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_never_puts_the_run_aside_and_overwrites_nothing(go: Callable[..., str], run: Path) -> None:
    files = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for number in (1, 2):
        printed = go(run, "--resume", "never", "--stop_at", number)
        assert f"the run that was in {run} is now in {run}.{number}" in printed
        assert [line["step"] for line in metrics(run)] == list(range(1, number + 1))
    aside = run.with_name("run.1")
    assert {
        path.relative_to(aside): path.read_bytes() for path in aside.rglob("*") if path.is_file()
    } == files
    assert len(metrics(run.with_name("run.2"))) == 1


CHANGES = {
    "lr": "0.001",
    "seed": "5",
    "steps": "9",
    "model": "Qwen/Qwen3-0.6B",
    "weight_decay": "0.3",
    "global_batch": "8",
    "seq_len": "32",
}


def planned(monkeypatch: pytest.MonkeyPatch, out: Path, *argv: object) -> Any:
    monkeypatch.setenv("WORLD_SIZE", "2")
    typed = [
        word
        for name in TYPED
        if f"--{name}" not in argv
        for word in (f"--{name}", getattr(BASE, name))
    ]
    return resolve_run(
        parse(
            BASE, Path("resume.py"), [str(word) for word in ("--tiny", "--out", out, *typed, *argv)]
        )
    )


def test_a_changed_run_is_refused_with_every_difference_and_the_ways_on(
    half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(
            monkeypatch,
            half,
            *[word for name, value in CHANGES.items() for word in (f"--{name}", value)],
        )
    said = str(refused.value)
    for name, value in CHANGES.items():
        assert f"{name} = {value}: the run in {half} has {getattr(BASE, name)}" in said
    assert len(refused.value.problems) == len(CHANGES)
    for way in ("--out NEW", f"--resume {half}", "--resume never"):
        assert said.count(way) == 1 and way in said.splitlines()[0]
    with pytest.raises(ConfigError) as refused:
        # This lowers the recipe's warm-up, which the user did not give as a flag.
        planned(monkeypatch, half, "--steps", 1)
    (problem,) = refused.value.problems
    assert problem.where == "steps = 1" and problem.fix.startswith(
        f"resume with --steps {BASE.steps}, start a new run"
    )


def test_a_changed_ramp_is_refused_unless_a_path_accepts_it(
    half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(monkeypatch, half, "--batch_ramp", "5:8")
    (problem,) = refused.value.problems
    assert (
        problem.where == "batch_ramp = 5:8"
        and problem.rule == f"the run in {half} has nothing"
        and f"--resume {half}" in problem.fix
    )
    assert planned(
        monkeypatch, half, "--batch_ramp", "5:8", "--resume", half
    ).recipe.ramp.table == ((1, 4), (5, 8))
    spaced = [
        run_identity(dataclasses.replace(BASE, batch_ramp=table), None)
        for table in ("3:8,5:16", " 3 : 8, 5:16")
    ]
    assert spaced[0] == spaced[1] and spaced[0]["batch_ramp"] == "3:8, 5:16"


def test_batches_are_left_out_from_a_step_after_the_checkpoint(
    go: Callable[..., str], half: Path, tmp_path: Path
) -> None:
    """The checkpoint is of step 4, so a run may leave out batches from step 5 on."""
    go(tmp_path / "whole", "--leave_out", "5:2")
    go(tmp_path / "run", "--leave_out", "5:2", "--resume", half)
    whole = reproducible_values(metrics(tmp_path / "whole"))
    assert reproducible_values(metrics(tmp_path / "run")) == whole[4:]
    said = go(tmp_path / "other", "--leave_out", "4:2", "--resume", half, refused=True)
    assert said.startswith("leave_out = [[4, 2]]: the saved data stream has []")
    said = go(half, "--leave_out", "5:2", refused=True)
    assert said.startswith(f"leave_out = 5:2: the run in {half} has nothing")


def test_a_trial_is_told_from_the_run_itself(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--tiny` changes many numbers, but the error lists their differences only once.

    The error also lists the flags to resume with only once.
    """
    (tmp_path / "half").mkdir()
    saved = json.loads((half / "run.json").read_text())
    for tiny, says in (
        (False, r"--tiny: the run in .* was started without it. Omit it to resume"),
        (True, rf"seed = 5: the run in .* has {BASE.seed}"),
    ):
        (tmp_path / "half" / "run.json").write_text(
            json.dumps(saved | {"recipe": saved["recipe"] | {"tiny": tiny}})
        )
        with pytest.raises(ConfigError, match=says) as refused:
            planned(monkeypatch, tmp_path / "half", "--seed", 5, "--global_batch", 8)
    assert (
        f"Resume with --seed {BASE.seed} --global_batch {BASE.global_batch}, start a new run"
        in str(refused.value)
    )


def test_what_may_change_is_accepted(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = (
        "--micro_batch",
        2,
        "--save_every",
        1,
        "--keep",
        5,
        "--stop_at",
        5,
        "--deepspeed_config",
        "zero3.json",
        "--eval_every",
        1,
        "--no-export",
    )
    assert planned(monkeypatch, half, *free).resume_from == half
    assert planned(monkeypatch, half, "--tp", 2).resume_from == half


def test_a_run_from_before_recompute_every_goes_on(
    go: Callable[..., str], run: Path, unbroken: list[dict[str, Any]]
) -> None:
    """An older run's run.json contains checkpoint_every.

    The command now uses --recompute_every 2.
    """
    facts = json.loads((run / "run.json").read_text())
    facts["recipe"]["checkpoint_every"] = facts["recipe"].pop("recompute_every") or 1
    (run / "run.json").write_text(json.dumps(facts))
    assert f"resumed from {run}/checkpoints/step_00000004" in go(run, "--recompute_every", 2)
    for found, expected in zip(reproducible_values(metrics(run)), unbroken, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    recipe = json.loads((run / "run.json").read_text())["recipe"]
    assert recipe["recompute_every"] == 2 and "checkpoint_every" not in recipe


def test_a_resume_names_the_choices_about_the_model_that_have_changed(
    go: Callable[..., str], run: Path
) -> None:
    """Runs from before run.json stored these choices must resume without such lines."""
    said = go(run, "--attention", "eager", "--loss", "whole", "--stop_at", 5)
    assert "resume: attention was varlen and is now eager" in said
    assert "resume: the loss was computed in chunks and is now computed from full logits" in said

    facts = json.loads((run / "run.json").read_text())
    assert facts.pop("model_plan")["attention"] == "eager"
    (run / "run.json").write_text(json.dumps(facts))
    said = go(run)
    assert f"resumed from {run}/checkpoints/step_00000005" in said and "resume: " not in said
    assert json.loads((run / "run.json").read_text())["model_plan"]["attention"] == "varlen"


def test_a_path_accepts_the_differences(
    go: Callable[..., str], run: Path, unbroken: list[dict[str, Any]]
) -> None:
    """The resume changes the schedule and the optimizer, effective from the next step."""
    go(run, "--resume", run, "--steps", 8, "--lr", 1e-3, "--stop_at", 5, "--schedule", "constant")
    lines = metrics(run)
    assert reproducible_values(lines[:4]) == unbroken[:4]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[4]["lr"] == 1e-3
    assert lines[4]["loss"] == unbroken[4]["loss"], "step 5 starts from the same weights and rows"
    # A start with the same changes then resumes without a path.
    go(run, "--steps", 8, "--lr", 1e-3, "--schedule", "constant", "--stop_at", 6)


def engine_numbers(recipe: Recipe, argv: list[str]) -> dict[str, Any]:
    """Return the optimizer's settings after a resume's first step."""
    import recipekit.train as loop

    seen: dict[str, Any] = {}
    train_step = loop.train_step

    def watching(engine: Any, *rest: Any) -> Any:
        result = train_step(engine, *rest)
        groups = engine.optimizer.param_groups
        seen.update(
            {"lr": groups[0]["lr"], "betas": tuple(groups[0]["betas"]), "eps": groups[0]["eps"]}
        )
        seen.update(
            {
                "weight_decay": [group["weight_decay"] for group in groups],
                "clip": getattr(engine.optimizer, "clip_grad", None),
            }
        )
        return result

    loop.train_step = watching
    try:
        result, printed = train(recipe, argv)
    finally:
        loop.train_step = train_step
    assert result == 0, (result, printed)
    return seen


@pytest.mark.parametrize(
    "file", ["zero1", pytest.param("zero0", marks=slow), pytest.param("zero3", marks=slow)]
)
def test_accepted_optimizer_numbers_reach_the_optimizer(
    go: Callable[..., str], pools: Any, tmp_path: Path, file: str
) -> None:
    """DeepSpeed itself would restore the saved settings."""
    recipe = dataclasses.replace(BASE, ds_config=f"{file}.json", schedule="constant")
    go(tmp_path / "run", "--stop_at", 2, recipe=recipe)
    flags = [
        "--weight_decay",
        "0.25",
        "--beta1",
        "0.8",
        "--beta2",
        "0.9",
        "--eps",
        "1e-5",
        "--gradient_clipping",
        "0.5",
        "--lr",
        "0.002",
    ]
    for seen in pools.run(
        2,
        engine_numbers,
        recipe=recipe,
        argv=[
            "--out",
            str(tmp_path / "run"),
            "--resume",
            str(tmp_path / "run"),
            "--stop_at",
            "3",
            *flags,
        ],
    ):
        assert seen["lr"] == 0.002 and seen["betas"] == (0.8, 0.9) and seen["eps"] == 1e-5
        assert set(seen["weight_decay"]) == {0.25, 0.0}
        assert seen["clip"] == 0.5


def test_a_path_in_another_folder_starts_a_new_run_from_it(
    go: Callable[..., str], half: Path, tmp_path: Path, unbroken: list[dict[str, Any]]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in half.rglob("*")}
    go(tmp_path / "new", "--resume", half / "checkpoints" / "step_00000002")
    assert reproducible_values(metrics(tmp_path / "new")) == unbroken[2:]
    assert {path: path.stat().st_mtime_ns for path in half.rglob("*")} == before


@pytest.mark.parametrize(
    "flag",
    [
        ("--seed", 9),
        pytest.param(("--seq_len", 32), marks=slow),
        pytest.param(("--global_batch", 8), marks=slow),
    ],
    ids=lambda flag: flag[0],
)
def test_a_path_accepts_other_data(
    go: Callable[..., str], half: Path, tmp_path: Path, flag: tuple[str, int]
) -> None:
    """The saved position belongs to a different stream.

    The new stream is therefore read from its beginning, and the log states this.
    """
    recipe = dataclasses.replace(BASE, **{flag[0].removeprefix("--"): flag[1]})
    printed = go(tmp_path / "new", "--resume", half, recipe=recipe)
    assert "read from the beginning" in printed
    assert [line["step"] for line in metrics(tmp_path / "new")] == [5, 6]


@pytest.mark.parametrize(
    ("argv", "world", "told"),
    [
        (["--deepspeed_config", "zero3.json"], 2, "to dp2, ZeRO-3"),
        pytest.param(["--tp", "2"], 2, "to dp1_tp2, ZeRO-1", marks=slow),
        pytest.param([], 1, "to dp1, ZeRO-1", marks=slow),
    ],
)
def test_another_layout_goes_on_with_the_same_tokens(
    go: Callable[..., str],
    run: Path,
    unbroken: list[dict[str, Any]],
    argv: list,
    world: int,
    told: str,
) -> None:
    """The losses differ only by bf16 rounding.

    test_convert.py tests more layouts, in fp32.
    """
    printed = go(run, *argv, world=world)
    assert (
        f"converting {run}/checkpoints/step_00000004 from dp2, ZeRO-1" in printed
        and told in printed
    )
    lines = metrics(run)
    assert [line["tokens"] for line in lines] == [line["tokens"] for line in unbroken]
    assert [line["loss"] for line in lines] == pytest.approx(
        [line["loss"] for line in unbroken], rel=1e-3
    )
    assert not (run / "checkpoints" / ".converted").exists()


def test_another_model_is_refused_even_with_a_path(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="is from another model"):
        planned(monkeypatch, tmp_path / "new", "--resume", half, "--model", "Qwen/Qwen3-0.6B")


@pytest.mark.parametrize(
    "model", ["Qwen/Qwen3-0.6B", "someone/unknown"], ids=["shipped", "not shipped"]
)
def test_a_hub_model_that_the_run_has_downloaded_is_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """At the first start the config is the shipped one or unknown.

    Later the hub's config.json, which has more keys, is in the cache.
    """
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    out = tmp_path / "run"
    recipe = dataclasses.replace(BASE, model=model, out=str(out))
    first = resolve_run(parse(recipe, Path("resume.py"), []))
    out.mkdir()
    (out / "run.json").write_text(
        json.dumps({"identity": run_identity(first.recipe, first.model_config)})
    )
    (out / "checkpoints").mkdir()
    snapshot = (
        tmp_path / "home" / "hub" / f"models--{model.replace('/', '--')}" / "snapshots" / "abc"
    )
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    shipped = json.loads((SHIPPED / "Qwen--Qwen3-0.6B.json").read_text())
    (snapshot / "config.json").write_text(json.dumps(shipped | {"transformers_version": "4.51.0"}))
    for resume in ("auto", str(out)):
        second = resolve_run(parse(recipe, Path("resume.py"), ["--resume", resume]))
        assert second.model_config != first.model_config and second.resume_from == out


def test_a_model_folder_that_holds_another_model_now_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((SHIPPED / "Qwen--Qwen3-0.6B.json").read_text())
    out, folder = tmp_path / "run", tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    recipe = dataclasses.replace(
        BASE, model=str(folder), init="random", out=str(out), tokenizer="bytes"
    )
    first = resolve_run(parse(recipe, Path("resume.py"), []))
    (out / "checkpoints").mkdir(parents=True)
    (out / "run.json").write_text(
        json.dumps({"identity": run_identity(first.recipe, first.model_config)})
    )
    assert resolve_run(parse(recipe, Path("resume.py"), [])).resume_from == out
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1234.5}))
    for resume, said in (("auto", "model_config = "), (str(out), "is from another model")):
        with pytest.raises(ConfigError, match=said):
            resolve_run(parse(recipe, Path("resume.py"), ["--resume", resume]))


def test_with_batch_norm_the_micro_batch_is_part_of_the_run(tmp_path: Path) -> None:
    """BatchNorm normalises a micro-batch's rows together. For other models the micro-batch may
    change.
    """
    out = tmp_path / "run"
    recipe = dataclasses.replace(
        BASE, out=str(out), init="random", tokenizer="bytes", micro_batch=2, global_batch=8
    )
    first = resolve_run(parse(recipe, Path("resume.py"), []))
    (out / "checkpoints").mkdir(parents=True)
    for has_norms in (False, True):
        (out / "run.json").write_text(
            json.dumps({"identity": run_identity(first.recipe, first.model_config, has_norms)})
        )
        assert resolve_run(parse(recipe, Path("resume.py"), [])).resume_from == out
        for resume in ("auto", str(out)):
            again = parse(recipe, Path("resume.py"), ["--micro_batch", "4", "--resume", resume])
            if has_norms:
                said = (
                    r"micro_batch = 4: the (run|checkpoint) in .* has 2, which its BatchNorm took"
                    r" its statistics of. Resume with --micro_batch 2"
                )
                with pytest.raises(ConfigError, match=said):
                    resolve_run(again)
            else:
                assert resolve_run(again).resume_from == out


def test_a_path_that_is_no_run_is_refused(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="must be a run folder or one of its step folders"):
        planned(monkeypatch, tmp_path / "new", "--resume", tmp_path)
    other = shutil.copytree(half, tmp_path / "other")
    with pytest.raises(ConfigError, match="already contains a different run"):
        planned(monkeypatch, other, "--resume", half)


def test_a_run_that_ended_before_its_first_checkpoint_begins_again_from_the_other(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart after an early crash uses this command.

    A run that has a checkpoint must never be overwritten.
    """
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    (tmp_path / "new" / "run.json").write_text(json.dumps({"recipe": {"resume": str(half)}}))
    assert planned(monkeypatch, tmp_path / "new", "--resume", half).resume_from == half
    with pytest.raises(ConfigError, match="already contains a different run"):
        planned(monkeypatch, tmp_path / "new", "--resume", half / "checkpoints" / "step_00000002")
    (tmp_path / "new" / "checkpoints" / "step_00000001").mkdir()
    with pytest.raises(ConfigError, match="already contains a different run"):
        planned(monkeypatch, tmp_path / "new", "--resume", half)


def test_a_torn_run_json_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "run.json").write_text((run / "run.json").read_text()[:100])
    with pytest.raises(ConfigError, match=r"run\.json"):
        planned(monkeypatch, run)


def test_every_random_generator_is_restored(pools: Any, tmp_path: Path) -> None:
    results = pools.run(1, draws_after_resume, recipe=BASE, out=str(tmp_path / "run"))
    assert results[0][0] == results[0][1]


def draws_after_resume(recipe: Recipe, out: str) -> tuple[list[float], list[float]]:
    """Return random numbers after the save of step 2, and after a resume from that step."""
    import random

    import numpy as np

    def draws() -> list[float]:
        return [torch.rand(()).item(), random.random(), float(np.random.rand())]

    train(recipe, ["--out", out, "--stop_at", "1"])
    random.seed(1234)
    np.random.seed(1234)
    from recipekit.checkpoints import load as load_module

    load = load_module.load_checkpoint
    seen: list[list[float]] = []

    def loading(*arguments: Any) -> Any:
        state = load(*arguments)
        saved = torch.get_rng_state(), random.getstate(), np.random.get_state()
        seen.append(draws())
        torch.set_rng_state(saved[0])
        random.setstate(saved[1])
        np.random.set_state(saved[2])
        return state

    train(recipe, ["--out", out, "--stop_at", "2"])
    after = draws()
    load_module.load_checkpoint = loading
    try:
        random.seed(99)
        np.random.seed(99)
        train(recipe, ["--out", out, "--stop_at", "3"])
    finally:
        load_module.load_checkpoint = load
    return after, seen[0]


def test_a_second_job_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    from recipekit.run import _lock_run_folder

    (tmp_path / "run").mkdir()
    first = _lock_run_folder(tmp_path / "run")
    with pytest.raises(ConfigError, match="another job is running in this folder"):
        _lock_run_folder(tmp_path / "run")
    fcntl.flock(first, fcntl.LOCK_UN)
    _lock_run_folder(tmp_path / "run").close()


def test_the_saved_state_is_that_of_its_own_step(half: Path) -> None:
    """A checkpoint's tokens and data position belong to the step in its name.

    By then, the prefetch thread has already read more data.
    """
    for step in (2, 4):
        state = json.loads((half / "checkpoints" / f"step_{step:08d}" / "state.json").read_text())
        assert state["step"] == step
        assert state["tokens"] == metrics(half)[step - 1]["tokens"]


def test_only_whole_lines_of_the_metrics_are_read(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]
