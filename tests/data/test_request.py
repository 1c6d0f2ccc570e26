"""A request must have the values of its recipe, and the same defaults as recipes."""

import json
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import rows
from recipekit.data.columns import columns_to_read, missing_column
from recipekit.data.request import Request, Sizes, request_from_recipe
from recipekit.runtime import corpus
from recipekit.spec.recipe import Recipe


def test_values_and_defaults_are_those_of_the_recipe():
    assert request_from_recipe(Recipe(model="x")) == Request(model="x")
    changed: dict[str, Any] = {
        "dataset": "a.jsonl",
        "task": "sft",
        "bad_rows": "skip",
        "seed": 7,
        "seq_len": 12,
        "micro_batch": 3,
        "global_batch": 6,
        "eval_rows": 5,
    }
    request = request_from_recipe(Recipe(model="x", **changed))
    assert request == Request(model="x", **changed) and asdict(request).items() >= changed.items()
    assert request.skip and request.columns == ("messages",)
    assert (
        not Request().skip
        and Request(text_field="body").columns == ("body",)
        and not Request().names
    )
    pictures = Request(task="image_classification", image_field="picture")
    assert (
        pictures.as_rows
        and pictures.columns == ("picture", "label")
        and pictures.names == ("image", "label")
    )


def test_tokens_of_a_block_lie_between_the_limits():
    sizes = Sizes(block_rows=10, block_tokens=(1000, 5000))
    assert [sizes.tokens_of_block(seq_len) for seq_len in (1, 100, 200, 499)] == [
        1000,
        3200,
        6400,
        15968,
    ]
    assert [
        replace(sizes, block_rows=100).tokens_of_block(seq_len) for seq_len in (10, 20, 100)
    ] == [1000, 2000, 5000]


PAIR_COLUMNS = ("prompt", "chosen", "rejected")


@pytest.mark.parametrize(
    "task, columns, names, expected",
    [
        ("preference", PAIR_COLUMNS, ["tools", "rejected", "x"], (*PAIR_COLUMNS, "tools")),
        ("reward", PAIR_COLUMNS[1:], ["rejected", "chosen", "tools"], (*PAIR_COLUMNS[1:], "tools")),
        ("preference", PAIR_COLUMNS, ["system", *PAIR_COLUMNS], PAIR_COLUMNS),
        (
            "preference",
            ("tools", "chosen", "rejected"),
            ["tools", "chosen", "rejected"],
            ("tools", "chosen", "rejected"),
        ),
        ("sft", ("messages",), ["tools", "id", "messages"], ("messages", "tools")),
        (
            "sft",
            ("messages",),
            ["output", "instruction", "tools", "history"],
            ("instruction", "output", "history"),
        ),
        ("sft", ("talk",), ["messages", "talk", "system"], ("talk", "system")),
        ("sft", ("messages",), ["text"], ("messages",)),
        ("pretrain", ("text",), ["messages", "text", "tools"], ("text",)),
    ],
)
def test_columns_that_a_task_reads(task, columns, names, expected):
    assert columns_to_read(task, columns, names) == expected


@dataclass(frozen=True)
class MissingColumn:
    """A task's columns, a row's columns, and the beginnings of the rule and the fix."""

    task: str
    columns: tuple[str, ...]
    names: list[str]
    rule: str | None
    fix: str | None


@pytest.mark.parametrize(
    "task, columns, names, rule, fix",
    rows(
        MissingColumn(
            task="sft", columns=("messages",), names=["prompt", "completion"], rule=None, fix=None
        ),
        MissingColumn(
            task="sft",
            columns=("talk",),
            names=["messages"],
            rule="has no column 'talk', only 'messages'",
            fix="name the column with --messages_field. If only this row differs, correct it",
        ),
        MissingColumn(
            task="pretrain",
            columns=("text",),
            names=["conversations"],
            rule="has no column 'text'",
            fix=(
                "use --task sft, which reads such rows (ShareGPT (conversations)), or name a text"
                " column"
            ),
        ),
        MissingColumn(
            task="masked_lm",
            columns=("text",),
            names=["prompt", "completion"],
            rule="has no column 'text'",
            fix="use --task sft, which reads such rows (prompts and completions), or",
        ),
        MissingColumn(
            task="pretrain",
            columns=("text",),
            names=["prompt"],
            rule="has no column 'text', only 'prompt'",
            fix="name the column with --text_field. If only this row differs, correct it",
        ),
        MissingColumn(
            task="reward",
            columns=PAIR_COLUMNS,
            names=["messages", "prompt", "chosen"],
            rule="has no column 'rejected'",
            fix="name the column with --rejected_field. If only this row differs, correct it",
        ),
        MissingColumn(
            task="reward",
            columns=PAIR_COLUMNS,
            names=["chosen", "rejected"],
            rule="has no column 'prompt'",
            fix="name the column with --prompt_field, or --prompt_field '' if both",
        ),
    ),
)
def test_a_missing_column_is_named_with_what_reads_such_rows(task, columns, names, rule, fix):
    found = missing_column(task, columns, iter(names))
    assert (found is None) == (rule is None)
    assert not found or (found[0].startswith(rule) and found[1].startswith(fix))


def test_day_of_a_run_is_the_day_of_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"date": "2026-03-04"}))
    monkeypatch.setattr(corpus, "date", SimpleNamespace(today=lambda: date(2031, 5, 6)))
    assert (
        corpus.first_start_date(tmp_path),
        corpus.first_start_date(None),
        corpus.first_start_date(tmp_path / "x" / "y" / "z"),
    ) == ("2026-03-04", "2031-05-06", "2031-05-06")
    for tiny in (False, True):
        plan: Any = SimpleNamespace(
            recipe=Recipe(model="x", seed=7), command=SimpleNamespace(tiny=tiny), day="2026-03-04"
        )
        assert corpus.request_of_plan(plan) == Request(
            model="x", seed=7, tiny=tiny, day="2026-03-04"
        )
