"""Plans for a recipe with a tiny model, and the config errors of its planning."""

from pathlib import Path

import pytest
from recipekit.plan import RunPlan, resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe

RECIPE = Recipe(
    model="./base",
    tokenizer="bytes",
    dataset="docs.jsonl",
    seq_len=64,
    global_batch=4,
    steps=2,
    eval_every=0,
    ds_config="zero2.json",
)


def planned(*words: str) -> RunPlan:
    return resolve_run(parse(RECIPE, Path("mine.py"), [*words]))


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        planned(*words)
    (problem,) = refusal.value.problems
    return str(problem)
