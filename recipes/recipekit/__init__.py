"""The shared code of the recipes: `Recipe` says what to train, `run` trains it."""

from .recipe import Recipe
from .run import run

__all__ = ["Recipe", "run"]
