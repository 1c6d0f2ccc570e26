"""Rows longer than the positions in config.json: one line, with the range of RoPE scaling."""

from typing import Any

import pytest
from recipekit.architectures.positions import beyond_positions

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LINE = (
    "seq_len: rows of 2048 tokens exceed max_position_embeddings = 128 in the model's config.json"
)
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "none": ({}, [f"{LINE}: the model was not trained on later positions"]),
    "null": ({"rope_scaling": None}, [f"{LINE}: the model was not trained on later positions"]),
    "default": (
        {"rope_parameters": {"rope_type": "default"}},
        [f"{LINE}: the model was not trained on later positions"],
    ),
    "yarn": ({"rope_scaling": YARN}, [f"{LINE}; yarn scaling by 4.0 reaches 512 from 128"]),
    "old key": (
        {"rope_scaling": {"type": "linear", "factor": 2}},
        [f"{LINE}; linear scaling by 2 reaches 256 from 128"],
    ),
    "by type of layer": (
        {
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default"},
            }
        },
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


def test_keys_beside_the_text_config_count_where_it_lacks_them() -> None:
    reached = [f"{LINE}; yarn scaling by 4.0 reaches 512 from 128"]
    assert (
        beyond_positions(
            {"max_position_embeddings": 128, "rope_scaling": YARN, "text_config": {}}, 2048
        )
        == reached
    )
    assert (
        beyond_positions(
            {
                "rope_scaling": YARN,
                "text_config": {"max_position_embeddings": 128, "model_type": "x"},
            },
            2048,
        )
        == reached
    )
    assert (
        beyond_positions(
            {"max_position_embeddings": 128, "rope_scaling": YARN, "text_config": None}, 2048
        )
        == reached
    )


FACTORS: dict[str, tuple[dict[str, Any], list[str]]] = {
    **{
        kind: ({"rope_type": kind, "factor": 2.5}, [f"{kind} scaling by 2.5 reaches 320 from 128"])
        for kind in ("linear", "dynamic", "yarn", "longrope", "llama3")
    },
    "older key": ({"type": "su", "factor": 3}, ["su scaling by 3 reaches 384 from 128"]),
    "both keys": (
        {"type": "su", "rope_type": "longrope", "factor": 3},
        ["longrope scaling by 3 reaches 384 from 128"],
    ),
    "own original": (
        {"rope_type": "yarn", "factor": 8.5, "original_max_position_embeddings": 33},
        ["yarn scaling by 8.5 reaches 280 from 33"],
    ),
    "two types": (
        {
            "full": {"rope_type": "linear", "factor": 3},
            "theta": 7.0,
            "local": {"rope_type": "yarn", "factor": 2},
        },
        [
            "linear scaling of full by 3 reaches 384 from 128, yarn scaling of local by 2 reaches"
            " 256 from 128"
        ],
    ),
    "no factor": ({"rope_type": "yarn"}, []),
    "a factor that is no number": ({"rope_type": "yarn", "factor": "4"}, []),
    "no type": ({"factor": 4.0}, []),
    "a type that is no word": ({"rope_type": 3, "factor": 4.0}, []),
    "default with a factor": ({"rope_type": "default", "factor": 4.0}, []),
}


@pytest.mark.parametrize("case", FACTORS)
def test_a_scaling_is_said_with_its_factor_and_reach(case: str) -> None:
    rope, said = FACTORS[case]
    wanted = [
        (
            f"{LINE}; {''.join(said)}"
            if said
            else f"{LINE}: the model was not trained on later positions"
        )
    ]
    for key, other in (
        ("rope_scaling", {"rope_parameters": {"rope_type": "linear", "factor": 9}}),
        ("rope_parameters", {"rope_scaling": None}),
        ("rope_scaling", {}),
    ):
        assert beyond_positions({"max_position_embeddings": 128, key: rope} | other, 2048) == wanted


def test_the_original_positions_of_the_config_count_behind_those_of_the_scaling() -> None:
    config = {
        "max_position_embeddings": 128,
        "original_max_position_embeddings": 40,
        "rope_scaling": {"rope_type": "longrope", "factor": 2},
    }
    assert beyond_positions(config, 2048) == [f"{LINE}; longrope scaling by 2 reaches 80 from 40"]
    config["rope_scaling"] = {
        "rope_type": "longrope",
        "factor": 2,
        "original_max_position_embeddings": 30,
    }
    assert beyond_positions(config, 2048) == [f"{LINE}; longrope scaling by 2 reaches 60 from 30"]


def test_one_row_longer_than_the_positions_is_said() -> None:
    for most in (128, True, 128.0, "128", None):
        assert len(beyond_positions({"max_position_embeddings": most}, 129)) == (
            most is not True and type(most) is int
        )
    assert (
        beyond_positions({}, 129) == beyond_positions({"max_position_embeddings": 128}, 128) == []
    )
