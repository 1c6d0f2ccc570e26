"""What the start says: how many parameters are trained, and how the JSON differs from the shipped one."""

import contextlib
import io
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from recipekit.command import parse
from recipekit.plan import make_plan
from recipekit.recipe import Recipe
from recipekit.runtime.facts import short
from recipekit.shipped import STRATEGIES
from recipekit.strategy import json_file
from test_adapters import wrapped
from test_parity import accumulating, recipe_for, strategy, train_in_layout

slow = pytest.mark.slow
LORA = partial(wrapped, fields={"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})


def lines_of_start(recipe: Recipe, config: dict[str, Any], out: str) -> list[str]:
    """Run on every rank of a pool: the real loop; return the lines that the rank prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert train_in_layout(recipe, config, out) == 0
    return said.getvalue().splitlines()


@pytest.mark.parametrize(
    ("file", "world", "changes", "expected"),
    [
        ("zero3", 2, {}, "trainable 625.8 k of 625.8 k parameters, on each rank at most 312.9 k of 312.9 k"),
        pytest.param("zero2", 2, {}, "trainable 625.8 k of 625.8 k parameters", marks=slow),
        pytest.param("zero2", 2, {"tp": 2}, "trainable 625.8 k of 625.8 k parameters, on each rank at most 313.5 k of 313.5 k", marks=slow),
        pytest.param("zero1", 2, {"pp": 2}, "trainable 625.8 k of 625.8 k parameters, on each rank at most 313.0 k of 313.0 k", marks=slow),
        pytest.param("fsdp2", 2, {"engine": "fsdp2"}, "trainable 625.8 k of 625.8 k parameters, on each rank at most 312.9 k of 312.9 k", marks=slow),
        pytest.param("zero2", 2, {"adapt": LORA}, "trainable 37.9 k of 663.7 k parameters", marks=slow),
    ],
)
def test_the_start_says_what_is_trained_and_what_a_rank_holds(
    pools: Any, tmp_path: Path, file: str, world: int, changes: dict[str, Any], expected: str
) -> None:
    own = {"precision": "fp32"} if file == "fsdp2" else {}
    recipe = replace(recipe_for("untied", **accumulating(world), **own, **changes), steps=1, warmup_steps=0, eval_every=0, export=False)
    said = pools.run(world, lines_of_start, recipe=recipe, config={} if file == "fsdp2" else strategy(file), out=str(tmp_path / "run"))
    (line,) = [line for line in said[0] if line.startswith("model ")]
    assert re.fullmatch(rf"model \S+: {expected}; built in [\d.]+ s", line), line
    assert not [line for line in said[1] if line.startswith("model ")]


@pytest.mark.parametrize(("count", "text"), [(7, "7"), (999, "999"), (85_120, "85.1 k"), (312_000, "312.0 k"), (4_194_304, "4.2 M"), (1_235_814_400, "1.24 B")])
def test_a_count_has_two_or_three_digits(count: int, text: str) -> None:
    assert short(count) == text


def notes_of(folder: Path, name: str, config: dict[str, Any]) -> list[str]:
    (folder / name).write_text(json.dumps(config))
    flags = ["--tiny", "--dry_run", "--out", str(folder / "run"), "--deepspeed_config", str(folder / name)]
    plan = make_plan(parse(Recipe(model="Qwen/Qwen3-0.6B"), Path("mine.py"), flags))
    return [note for note in plan.notes if "differs from the shipped" in note]


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("zero2.json", {}, ""),
        ("mine.json", {"gradient_clipping": 0.5}, ""),
        ("zero2.json", {"gradient_clipping": 0.5}, 'gradient_clipping = 0.5 instead of "auto"'),
        ("zero2.json", {"zero_optimization.overlap_comm": None}, "without zero_optimization.overlap_comm = true"),
        ("zero3.json", {"zero_optimization.reduce_bucket_size": 1000}, 'zero_optimization.reduce_bucket_size = 1000 instead of "auto"'),
        ("zero1_sgd.json", {"wall_clock_breakdown": True}, "with wall_clock_breakdown = true"),
    ],
)
def test_a_json_says_how_it_differs_from_the_shipped_one(tmp_path: Path, name: str, change: dict[str, Any], expected: str) -> None:
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
        assert json_file.differences(*json_file.load(file.name, Path("/nowhere"))) == []  # type: ignore[arg-type]
