"""recipes/METRICS.md compared with a real run: the page lists every key with the right meaning."""

import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job import metrics
from metrics_page import OF_FP16, OF_MASKS, OF_PAIRS, OF_PICTURES, PAGE, page
from recipekit.spec.recipe import Recipe

ON_GPUS_ONLY = {"mfu"}
OF_SAMPLES = {"samples/NAME", "step_samples"}  # test_step_metrics.py
# test_chat_rows.py has runs that write these keys.
OF_CHATS = {"rows_read", "rows_cut", "rows_without_target", "answers_dropped"}


def text(words: int, seed: int) -> str:
    return " ".join(
        random.Random(seed).choices(
            ["gradient", "rank", "row", "of", "the", "a", "sum", "is", "token"], k=words
        )
    )


def test_every_key_has_a_unit_and_a_meaning_and_no_table_is_wider_than_a_screen() -> None:
    assert all(unit.strip() and len(meaning) > 20 for unit, meaning in page().values())
    assert max(len(line) for line in PAGE.read_text().splitlines()) <= 120


def test_a_run_writes_the_keys_of_the_page_as_they_are_defined(pools: Any, tmp_path: Path) -> None:
    """The run has a mixture, a bad row, an empty row, a ramp and evaluations.

    It writes all keys except the keys for GPUs and for other tasks.
    """
    # These imports load torch, which the test above does not need.
    from recipekit.spec.schedules import lr_at
    from short_runs import BASE, train

    recipe = replace(
        BASE,
        ds_config="zero2.json",
        seq_len=128,
        micro_batch=2,
        global_batch=4,
        batch_ramp="2:8",
        steps=3,
        warmup_steps=1,
        eval_every=2,
    )
    for number, name in enumerate(("code", "docs")):
        rows = [json.dumps({"text": text(60, 100 * number + row)}) for row in range(400)]
        (tmp_path / f"{name}.jsonl").write_text(
            "\n".join([*rows[:5], "nonsense", '{"text": null}', *rows[5:]]) + "\n"
        )
    mixture = f"code={tmp_path}/code.jsonl@70; docs={tmp_path}/docs.jsonl@30"
    argv = [
        "--dataset",
        mixture,
        "--bad_rows",
        "skip",
        "--token_cache",
        "off",
        "--out",
        str(tmp_path / "run"),
    ]
    results = pools.run(2, train, recipe=recipe, argv=argv)
    assert [code for code, _ in results] == [0, 0], results
    lines = metrics(tmp_path / "run")
    written = {re.sub("/.*", "/NAME", key) for line in lines for key in line}
    others = OF_PICTURES | OF_SAMPLES | OF_MASKS | OF_PAIRS | OF_CHATS | OF_FP16
    assert written | ON_GPUS_ONLY | others == page().keys() and not written & others

    before, read = 0, 0
    for number, line in enumerate(lines, 1):
        new, all_tokens = (
            line["tokens"] - before,
            sum(line[f"tokens/{name}"] for name in ("code", "docs")),
        )
        assert line["step"] == number and line["lr"] == pytest.approx(
            lr_at(recipe, number), rel=1e-12
        )
        assert line["global_batch"] == [4, 8, 8][number - 1] and line["step_tokens"] == new
        # Labelled tokens, then all tokens, then row positions.
        assert 0 < new < all_tokens - read <= line["global_batch"] * recipe.seq_len
        assert line["tokens_per_s"] * line["step_s"] == pytest.approx(new, rel=1e-9)
        assert 0 <= line["data_wait_s"] <= line["step_s"] < 60 and line["bad_rows"] in (0, 1, 2)
        assert 50e6 < line["peak_mem_bytes"] < 100e9 and line["grad_norm"] > 0
        assert (
            min(line["loss/code"], line["loss/docs"])
            <= line["loss"]
            <= max(line["loss/code"], line["loss/docs"])
        )
        before, read = line["tokens"], all_tokens
    assert ["eval_loss" in line for line in lines] == [False, True, True] and lines[-1][
        "bad_rows"
    ] > 0
    assert lines[-1]["empty_rows"] in (1, 2)


SLOW = 2.0  # additional seconds of an evaluation and a save


def train_slowly(recipe: Recipe, argv: list[str]) -> tuple[int | str, str]:
    """Run on a rank of a pool, with evaluations and saves that each sleep for SLOW seconds."""
    from recipekit import train as loop  # these imports load torch
    from recipekit.checkpoints.save import Saver
    from short_runs import train

    def slowly(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *values, **named: (time.sleep(SLOW), call(*values, **named))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "evaluate", slowly(loop.evaluate))
        patch.setattr(Saver, "save", slowly(Saver.save))
        return train(recipe, argv)


def test_the_time_of_a_step_excludes_its_evaluation_and_its_save(
    pools: Any, tmp_path: Path
) -> None:
    from short_runs import BASE

    recipe = replace(
        BASE, ds_config="zero2.json", steps=4, warmup_steps=1, eval_every=1, save_every=1
    )
    results = pools.run(1, train_slowly, recipe=recipe, argv=["--out", str(tmp_path / "run")])
    assert [code for code, _ in results] == [0], results
    lines = metrics(tmp_path / "run")
    assert (
        min(line["eval_s"] for line in lines) >= SLOW
        and min(line["save_stall_s"] for line in lines[:-1]) >= SLOW
    )
    assert min(line["step_s"] for line in lines) < SLOW
