"""Rows longer than the positions that config.json states: one line, with the reach of a scaling."""

from typing import Any

import pytest
from recipekit.architectures.positions import beyond_positions

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LINE = "seq_len: rows of 2048 tokens exceed max_position_embeddings = 128 in the model's config.json"
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "none": ({}, [f"{LINE}: the model was not trained on later positions"]),
    "null": ({"rope_scaling": None}, [f"{LINE}: the model was not trained on later positions"]),
    "default": ({"rope_parameters": {"rope_type": "default"}}, [f"{LINE}: the model was not trained on later positions"]),
    "yarn": ({"rope_scaling": YARN}, [f"{LINE}; yarn scaling by 4.0 reaches 512 from 128"]),
    "old key": ({"rope_scaling": {"type": "linear", "factor": 2}}, [f"{LINE}; linear scaling by 2 reaches 256 from 128"]),
    "by type of layer": (
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}},
        [f"{LINE}; yarn scaling of full_attention by 4.0 reaches 512 from 128"],
    ),
    "inside": ({"max_position_embeddings": 2048}, []),
    "no positions": ({"max_position_embeddings": None}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_behind_the_last_position_are_said(case: str) -> None:
    more, said = CASES[case]
    config = {"max_position_embeddings": 128} | more
    assert beyond_positions(config, 2048) == said
    assert beyond_positions({"text_config": config}, 2048) == said
    assert beyond_positions({"max_position_embeddings": 4096, "text_config": config}, 2048) == said
    assert beyond_positions(config, 128) == []
