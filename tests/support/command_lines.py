"""A recipe, and the config errors of its command line."""

import dataclasses
from pathlib import Path

import pytest
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe

RECIPE = Recipe(model="meta-llama/Llama-3.2-1B", tp=4, warmup_steps=10)
FILE = Path("/somewhere/mine.py")
PLAIN = {item.name: item for item in dataclasses.fields(Recipe) if "help" in item.metadata}


def refused(argv: list[str]) -> ConfigError:
    return refused_of(RECIPE, argv)


def refused_of(recipe: Recipe, argv: list[str]) -> ConfigError:
    with pytest.raises(ConfigError) as refusal:
        parse(recipe, FILE, argv)
    return refusal.value
