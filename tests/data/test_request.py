"""A request has the values of its recipe, and the defaults of all recipes."""

from dataclasses import asdict, replace
from typing import Any

from recipekit.data.request import Request, Sizes, request_of
from recipekit.recipe import Recipe


def test_values_and_defaults_are_those_of_the_recipe():
    assert request_of(Recipe(model="x")) == Request(model="x")
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
    request = request_of(Recipe(model="x", **changed))
    assert request == Request(model="x", **changed) and asdict(request).items() >= changed.items()
    assert request.skip and request.columns == ("messages",)
    assert not Request().skip and Request(text_field="body").columns == ("body",) and not Request().names
    pictures = Request(task="image_classification", image_field="picture")
    assert pictures.as_rows and pictures.columns == ("picture", "label") and pictures.names == ("image", "label")


def test_tokens_of_a_block_lie_between_the_limits():
    sizes = Sizes(block_rows=10, block_tokens=(1000, 5000))
    assert [sizes.tokens_of_block(seq_len) for seq_len in (1, 100, 200, 499)] == [1000, 3200, 6400, 15968]
    assert [replace(sizes, block_rows=100).tokens_of_block(seq_len) for seq_len in (10, 20, 100)] == [1000, 2000, 5000]
