"""Lines that a start prints: trained parameters, JSON keys, data epochs, and the first row."""

import contextlib
import io
import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parity import accumulating, recipe_for, train_in_layout
from peft_models import wrapped
from recipekit.data.epoch_counts import EpochCounts
from recipekit.dslint import json_file
from recipekit.plan import resolve_run
from recipekit.runtime.epochs import Epochs, warn_few_steps, with_counted_data
from recipekit.runtime.first_row import show_row
from recipekit.runtime.run_metadata import short_count
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import read_metrics
from recipekit.spec.shipped import STRATEGIES
from shipped_jsons import strategy

slow = pytest.mark.slow
LORA = partial(wrapped, fields={"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})


def lines_of_start(recipe: Recipe, config: dict[str, Any], out: str) -> list[str]:
    """Run the real loop on a rank of a pool; return the lines that the rank prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert train_in_layout(recipe, config, out) == 0
    return said.getvalue().splitlines()


@pytest.mark.parametrize(
    ("file", "world", "changes", "expected"),
    [
        (
            "zero3",
            2,
            {},
            "trainable 625.8 k of 625.8 k parameters, on each rank at most 312.9 k of 312.9 k",
        ),
        pytest.param("zero2", 2, {}, "trainable 625.8 k of 625.8 k parameters", marks=slow),
        pytest.param(
            "zero2",
            2,
            {"tp": 2},
            "trainable 625.8 k of 625.8 k parameters, on each rank at most 313.5 k of 313.5 k",
            marks=slow,
        ),
        pytest.param(
            "zero1",
            2,
            {"pp": 2},
            "trainable 625.8 k of 625.8 k parameters, on each rank at most 313.0 k of 313.0 k",
            marks=slow,
        ),
        pytest.param(
            "fsdp2",
            2,
            {"engine": "fsdp2"},
            "trainable 625.8 k of 625.8 k parameters, on each rank at most 312.9 k of 312.9 k",
            marks=slow,
        ),
        pytest.param(
            "zero2", 2, {"adapt": LORA}, "trainable 37.9 k of 663.7 k parameters", marks=slow
        ),
    ],
)
def test_the_start_says_what_is_trained_and_what_a_rank_holds(
    pools: Any, tmp_path: Path, file: str, world: int, changes: dict[str, Any], expected: str
) -> None:
    own = {"precision": "fp32"} if file == "fsdp2" else {}
    recipe = replace(
        recipe_for("untied", **accumulating(world), **own, **changes),
        steps=1,
        warmup_steps=0,
        eval_every=0,
        export=False,
    )
    said = pools.run(
        world,
        lines_of_start,
        recipe=recipe,
        config={} if file == "fsdp2" else strategy(file),
        out=str(tmp_path / "run"),
    )
    # The closing block also contains a line "model".
    (line,) = [line for line in said[0] if line.startswith("model ") and "built in" in line]
    assert re.fullmatch(rf"model \S+: {expected}; built in [\d.]+ s", line), line
    assert not [line for line in said[1] if line.startswith("model ")]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (7, "7"),
        (999, "999"),
        (85_120, "85.1 k"),
        (312_000, "312.0 k"),
        (4_194_304, "4.2 M"),
        (1_235_814_400, "1.24 B"),
    ],
)
def test_a_count_has_two_or_three_digits(count: int, text: str) -> None:
    assert short_count(count) == text


def notes_of(folder: Path, name: str, config: dict[str, Any]) -> list[str]:
    (folder / name).write_text(json.dumps(config))
    flags = [
        "--tiny",
        "--dry_run",
        "--out",
        str(folder / "run"),
        "--deepspeed_config",
        str(folder / name),
    ]
    plan = resolve_run(parse(Recipe(model="Qwen/Qwen3-0.6B"), Path("mine.py"), flags))
    return [note for note in plan.notes if "differs from the shipped" in note]


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("zero2.json", {}, ""),
        ("mine.json", {"gradient_clipping": 0.5}, ""),
        ("zero2.json", {"gradient_clipping": 0.5}, 'gradient_clipping = 0.5 instead of "auto"'),
        (
            "zero2.json",
            {"zero_optimization.overlap_comm": None},
            "without zero_optimization.overlap_comm = true",
        ),
        (
            "zero3.json",
            {"zero_optimization.reduce_bucket_size": 1000},
            'zero_optimization.reduce_bucket_size = 1000 instead of "auto"',
        ),
        ("zero1_sgd.json", {"wall_clock_breakdown": True}, "with wall_clock_breakdown = true"),
    ],
)
def test_a_json_says_how_it_differs_from_the_shipped_one(
    tmp_path: Path, name: str, change: dict[str, Any], expected: str
) -> None:
    config = json.loads((STRATEGIES / (name if name != "mine.json" else "zero2.json")).read_text())
    for path, value in change.items():
        *blocks, key = path.split(".")
        block = config
        for part in blocks:
            block = block[part]
        if value is None:
            del block[key]
        else:
            block[key] = value
    line = f"{tmp_path / name} differs from the shipped {name}: {expected}"
    assert notes_of(tmp_path, name, config) == ([line] if expected else [])


def test_the_shipped_file_differs_from_itself_in_nothing() -> None:
    for file in STRATEGIES.glob("*.json"):
        assert (
            json_file.describe_differences(*json_file.load_ds_config(file.name, Path("/nowhere")))
            == []
        )  # type: ignore[arg-type]


# Epochs
# --------------------------------------------------------------------------------------------------


def started(recipe: Recipe, flags: list[str], out: str) -> list[str]:
    """Run a trial with these flags on a rank of a pool; return the lines that the rank prints."""
    from recipekit.train import main

    sys.argv = ["mine.py"]
    given = [
        "--tiny",
        "--micro_batch",
        "1",
        "--global_batch",
        "4",
        "--seq_len",
        "64",
        "--no-wandb",
        "--no-export",
        *flags,
        "--out",
        out,
    ]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(resolve_run(parse(recipe, Path("mine.py"), given))) == 0
    return said.getvalue().splitlines()


def documents(file: Path, count: int) -> Path:
    """Write rows, of them every third null."""
    rows = ({"text": None if number % 3 == 0 else f"fox {number} " * 12} for number in range(count))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_run_of_two_epochs_says_and_logs_them(pools: Any, tmp_path: Path) -> None:
    """The run stops after a step, and the same command resumes it.

    A larger number of epochs is a config error, as is a larger number of steps.
    """
    data, out = str(documents(tmp_path / "rows.jsonl", 30)), str(tmp_path / "run")
    recipe = Recipe(
        model="Qwen/Qwen3-0.6B",
        ds_config=strategy("zero2"),
        warmup_steps=100,
        eval_every=0,
        token_cache=str(tmp_path / "tokens"),
    )
    flags = ["--dataset", data, "--epochs", "2"]
    said = pools.run(2, started, recipe=recipe, flags=[*flags, "--stop_at", "2"], out=out)[0]
    (data_line,) = [line for line in said if line.startswith("data: ")]
    (epochs_line,) = [line for line in said if line.startswith("epochs: ")]
    (steps,) = re.findall(r"epochs: 2 = (\d+) steps", epochs_line)
    assert re.fullmatch(
        r"data: \d+ documents, [\d,]+ tokens, \d+ rows of 64, 10 rows skipped \(10 empty\); one"
        r" epoch is [\d.]+ steps",
        data_line,
    ), data_line
    assert (
        f"warmup_steps: 100 of the recipe lowered to {int(steps) // 10} for {steps} steps" in said
    )
    assert len(list((tmp_path / "tokens").rglob("*.arrow"))) == 1, "the tokens are made once"

    said = pools.run(2, started, recipe=recipe, flags=flags, out=out)[0]
    assert f"resumed from {out}/checkpoints/step_00000002" in said
    lines = read_metrics(Path(out))
    assert [line["step"] for line in lines] == list(range(1, int(steps) + 1))
    epochs = [line["epoch"] for line in lines]
    assert epochs == sorted(epochs) and epochs[-1] >= 2 > epochs[-2]
    facts = json.loads((Path(out) / "run.json").read_text())
    assert (
        facts["recipe"]["epochs"],
        facts["recipe"]["steps"],
        facts["identity"]["epochs"],
        facts["identity"]["steps"],
    ) == (2, int(steps), 2, 0)

    given = [
        "--tiny",
        "--micro_batch",
        "1",
        "--global_batch",
        "4",
        "--seq_len",
        "64",
        "--dataset",
        data,
        "--out",
        out,
    ]
    for more, rule in (
        (["--epochs", "3"], "epochs = 3.0: the run in .* has 2.0. Resume with --epochs 2.0"),
        (["--steps", "9"], r"steps = 9: the run in .* has 0. Resume with --epochs 2.0"),
        (["--epochs", "2", "--warmup_steps", "7"], "warmup_steps = 7: the run in .* has"),
    ):
        with pytest.raises(ConfigError, match=rule):
            resolve_run(parse(recipe, Path("mine.py"), [*given, *more]))
    assert resolve_run(
        parse(recipe, Path("mine.py"), [*given, "--epochs", "2"])
    ).resume_from == Path(out)
    assert resolve_run(
        parse(recipe, Path("mine.py"), [*given, "--epochs", "3", "--resume", out])
    ).resume_from == Path(out)


def refused(flags: list[str], **fields: Any) -> str:
    with pytest.raises(ConfigError) as problem:
        resolve_run(
            parse(
                Recipe(model="Qwen/Qwen3-0.6B", **fields),
                Path("mine.py"),
                ["--tiny", "--dry_run", *flags],
            )
        )
    return str(problem.value)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            ["--epochs", "2", "--steps", "3"],
            (
                "--epochs 2 with --steps 3: cannot be combined: a run is limited by steps or by"
                " epochs. Use only one of them"
            ),
        ),
        (
            ["--epochs", "2", "--dataset", "org/data"],
            (
                "epochs = 2: only local data can be counted before step 1, and --dataset org/data"
                " is streamed"
            ),
        ),
        (
            ["--epochs", "1", "--dataset", "https://x.org/a.jsonl"],
            "epochs = 1: only local data can be counted before step 1",
        ),
        (
            ["--epochs", "0.5", "--dataset", "a={data}@1; b={data}@2"],
            "epochs = 0.5: cannot be combined with a mixture of 2 corpora: its weights set",
        ),
        (["--epochs", "-1", "--dataset", "{data}"], "epochs = -1.0: must not be negative"),
        (["--epochs", "nan", "--dataset", "{data}"], "epochs = nan: must be a finite number"),
        (["--num_train_epochs", "3"], "Use --epochs"),
    ],
)
def test_epochs_that_cannot_be_counted_are_refused(
    tmp_path: Path, flags: list[str], expected: str
) -> None:
    data = documents(tmp_path / "rows.jsonl", 9)
    assert expected in refused([flag.replace("{data}", str(data)) for flag in flags])


def planned(flags: list[str], **fields: Any) -> Any:
    return with_counted_data(
        resolve_run(
            parse(
                Recipe(model="Qwen/Qwen3-0.6B", **fields),
                Path("mine.py"),
                ["--tiny", "--dry_run", *flags],
            )
        )
    )


def test_a_dry_run_counts_small_local_data_and_keeps_nothing(tmp_path: Path) -> None:
    data, tokens = str(documents(tmp_path / "rows.jsonl", 30)), tmp_path / "tokens"
    flags = [
        "--dataset",
        data,
        "--seq_len",
        "64",
        "--global_batch",
        "4",
        "--token_cache",
        str(tokens),
    ]
    plan = planned([*flags, "--epochs", "3"], warmup_steps=100)
    assert plan.recipe.steps == 20 and plan.recipe.warmup_steps == 2
    line = (
        "data: 20 documents, 1,628 tokens, 26 rows of 64, 10 rows skipped (10 empty); one epoch is"
        " 6.5 steps"
    )
    assert plan.notes[-2:] == (
        line,
        "epochs: 3 = 20 steps. The last step takes 2 of its rows from the next epoch",
    )
    assert planned([*flags, "--epochs", "2"]).notes[-1] == "epochs: 2 = 13 steps"
    assert planned([*flags, "--steps", "20"]).notes[-1] == f"{line}, this run is 3.1 epochs"
    assert not tokens.exists()


@pytest.mark.parametrize(
    ("flags", "fields", "steps", "line"),
    [
        (
            ["--steps", "3"],
            {"epochs": 2.0},
            3,
            (
                "epochs: 2 of the recipe left out, because --tiny uses built-in data. The run has 3"
                " steps"
            ),
        ),
        (
            [],
            {"epochs": 2.0, "steps": 7},
            7,
            (
                "epochs: 2 of the recipe left out, because --tiny uses built-in data. The run has 7"
                " steps"
            ),
        ),
        (
            ["--steps", "3", "--dataset", "{data}"],
            {"epochs": 2.0},
            3,
            "epochs: 2 of the recipe left out, because --steps 3 is typed. The run has 3 steps",
        ),
        (
            ["--dataset", "{data}", "--seq_len", "64", "--global_batch", "4"],
            {"epochs": 1.5},
            10,
            "epochs: 1.5 = 10 steps",
        ),
        (
            ["--dataset", "{data}", "--seq_len", "64", "--global_batch", "4", "--epochs", "0"],
            {"epochs": 1.5, "steps": 5},
            5,
            "this run is 0.77 epochs",
        ),
    ],
)
def test_steps_and_epochs_of_the_file_and_of_the_command(
    tmp_path: Path, flags: list[str], fields: dict[str, Any], steps: int, line: str
) -> None:
    data = documents(tmp_path / "rows.jsonl", 30)
    plan = planned([flag.replace("{data}", str(data)) for flag in flags], **fields)
    assert plan.recipe.steps == steps and any(line in note for note in plan.notes), plan.notes


def test_numbers_of_the_schedule_are_checked_once_the_steps_are_known(tmp_path: Path) -> None:
    data = str(documents(tmp_path / "rows.jsonl", 30))
    flags = ["--dataset", data, "--seq_len", "64", "--global_batch", "4", "--epochs", "2"]
    for typed, rule in (
        (
            ["--warmup_steps", "13"],
            "warmup_steps = 13: the warm-up must be shorter than the schedule of 13 steps",
        ),
        (["--stop_at", "14"], "stop_at = 14: is after the last step, 13"),
        (["--batch_ramp", "40:8"], "step 40 is after the last step, 13"),
        (["--leave_out", "40:8"], "step 40 is after the last step, 13"),
    ):
        with pytest.raises(ConfigError, match=rule):
            planned([*flags, *typed])


def test_a_row_that_cannot_be_read_is_named_before_step_1(tmp_path: Path) -> None:
    data = documents(tmp_path / "rows.jsonl", 30)
    data.write_text(data.read_text() + "no JSON\n")
    line = (
        f"data: not counted, because the run will stop at this problem: {data}, row 31: is not JSON"
    )
    assert any(note.startswith(line) for note in planned(["--dataset", str(data)]).notes)
    assert any(
        "11 rows skipped (10 empty, 1 unreadable)" in note
        for note in planned(["--dataset", str(data), "--bad_rows", "skip"]).notes
    )
    with pytest.raises(ConfigError, match="row 31: is not JSON"):
        planned(["--dataset", str(data), "--epochs", "1"])


ROWS = {
    "sft": (
        {
            "messages": [
                {"role": "user", "content": "how?"},
                {"role": "assistant", "content": "so, ä"},
            ]
        },
        ">>>so, ä<|im_end|>\n<<<",
    ),
    "pretrain": ({"text": "some text"}, "s>>>ome text<|endoftext|><<<"),
    "masked_lm": ({"text": "some text to hide, and some more of it"}, "<<<"),
}


@pytest.mark.parametrize("task", ROWS)
def test_show_row_prints_a_document_with_its_learned_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str
) -> None:
    row, expected = ROWS[task]
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 3)
    model = "answerdotai/ModernBERT-large" if task == "masked_lm" else "Qwen/Qwen3-0.6B"
    flags = [
        "--tiny",
        "--show_row",
        "--task",
        task,
        "--dataset",
        str(tmp_path / "rows.jsonl"),
        "--seq_len",
        "128",
    ]
    command = parse(Recipe(model=model), Path("mine.py"), flags)
    assert command.show_row
    show_row(resolve_run(command))
    printed = capsys.readouterr().out
    assert expected in printed and printed.count(">>>") == printed.count("<<<") >= 2, (
        "the heading names both"
    )


@pytest.mark.parametrize("task", ["image_classification", "preference", "reward"])
def test_show_row_of_a_task_without_packed_text_is_refused(task: str) -> None:
    model = "microsoft/resnet-50" if task == "image_classification" else "Qwen/Qwen3-0.6B"
    with pytest.raises(
        ConfigError,
        match=(
            rf"--show_row: cannot be combined with task {task}, whose rows are not text\. Leave"
            r" it out"
        ),
    ):
        show_row(
            resolve_run(
                parse(
                    Recipe(model=model), Path("mine.py"), ["--tiny", "--show_row", "--task", task]
                )
            )
        )


def state_of(**domains: tuple[int, int, float]) -> Any:
    """Return a stream's state: corpus -> (tokens read, current block's epoch, weight)."""
    return {
        "domains": {
            name.strip("_"): {
                "given": {"tokens": tokens},
                "tokens": 5,
                "place": {"epoch": epoch},
                "weight": weight,
            }
            for name, (tokens, epoch, weight) in domains.items()
        }
    }


@pytest.mark.parametrize(
    ("tokens", "state", "expected"),
    [
        ({"": 100}, state_of(_=(250, 2, 1.0)), {"epoch": 2.5}),
        ({"": 100}, state_of(_=(200, 1, 1.0)), {"epoch": 2.0}),
        ({}, state_of(_=(250, 2, 1.0)), {}),
        ({"": 100}, state_of(_=(50, 2, 1.0)), {}),  # from a version that did not count tokens
        (
            {"a": 100, "b": 10},
            state_of(a=(50, 0, 70.0), b=(25, 2, 30.0)),
            {"epoch": 0.5, "epoch/a": 0.5, "epoch/b": 2.5},
        ),
        ({"b": 10}, state_of(a=(50, 0, 70.0), b=(25, 2, 30.0)), {"epoch/b": 2.5}),
        ({"b": 10}, state_of(a=(0, 0, 0.0), b=(25, 2, 30.0)), {"epoch": 2.5, "epoch/b": 2.5}),
    ],
)
def test_the_metric_epoch_is_absent_while_it_is_not_known(
    tokens: dict[str, int], state: Any, expected: dict[str, float]
) -> None:
    assert Epochs(SimpleNamespace(), tokens).completed_epochs(state) == expected  # type: ignore[arg-type]


def test_a_stream_is_described_once_its_first_epoch_is_complete() -> None:
    plan = resolve_run(
        parse(
            Recipe(model="Qwen/Qwen3-0.6B", dataset="org/data"),
            Path("mine.py"),
            ["--tiny", "--dataset", "org/data", "--steps", "30"],
        )
    )
    epochs, said = Epochs(plan, {}), list[str]()
    state = state_of(_=(900, 1, 1.0))
    epochs.report(state, said.append)
    assert said == []
    state["domains"][""]["epoch"] = {
        "documents": 12,
        "tokens": 850,
        "rows": 10,
        "empty": 2,
        "bad": 0,
    }
    epochs.report(state, said.append)
    epochs.report(state, said.append)
    line = (
        "data: 12 documents, 850 tokens, 10 rows of 128, 2 rows skipped (2 empty); one epoch is 2.5"
        " steps, this run is about 12 epochs"
    )
    assert said == [f"{line}, counted in its first epoch"]
    assert epochs.completed_epochs(state)["epoch"] == 900 / 850


LESS_ROWS = "--seq_len (now 128; a document has 40 tokens on average)"


@pytest.mark.parametrize(
    ("fields", "epoch", "said"),
    [
        (
            {},
            EpochCounts(30, 1200, 10),
            (
                "3 optimizer steps, of 4 rows each. For more steps on the same data, lower"
                f" --global_batch (now 4) or {LESS_ROWS}."
            ),
        ),
        (
            {"global_batch": 16},
            EpochCounts(10, 640, 5),
            (
                "1 optimizer step, of 16 rows each. For more steps on the same data, lower"
                " --global_batch (now 16)."
            ),
        ),
        (
            {"task": "image_classification"},
            EpochCounts(8, 8, 8),
            (
                "2 optimizer steps, of 4 rows each. For more steps on the same data, lower"
                " --global_batch (now 4)."
            ),
        ),
        ({}, EpochCounts(120, 4800, 37), ""),  # 9.25 steps: ten with the partial one
        # With one row per step, the data have no more steps.
        ({"global_batch": 1}, EpochCounts(10, 640, 5), ""),
        ({"dataset": "builtin"}, EpochCounts(30, 1200, 10), ""),
    ],
)
def test_few_steps_in_an_epoch_are_named_with_the_ways_to_more(
    fields: dict[str, Any], epoch: EpochCounts, said: str
) -> None:
    """200 short chats with a large global batch are only one step.

    The model hardly changes, although the run seems to work.
    """
    recipe = replace(
        Recipe(model="Qwen/Qwen3-0.6B", dataset="docs.jsonl", seq_len=128, global_batch=4), **fields
    )
    plan: Any = SimpleNamespace(recipe=recipe, command=SimpleNamespace(tiny=False))
    assert warn_few_steps(plan, {"": epoch}) == ([f"data: an epoch is only {said}"] if said else [])
    plan.command.tiny = True
    assert warn_few_steps(plan, {"": epoch}) == [] == warn_few_steps(plan, {})
