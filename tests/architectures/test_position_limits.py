"""Rows longer than a model's positions are rejected where the model itself would fail."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pool import ROOT
from recipekit.architectures.families import tiny_config
from recipekit.model.empty import config_of, construct
from recipekit.plan import ENCODER_TYPES, PADDING_OFFSET_TYPES, POSITION_KEYS, resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe

LIMITED: dict[str, dict[str, Any]] = {
    **{
        key: {"n_embd": 16, "n_layer": 1, "n_head": 2}
        for key in ("gpt2", "gpt_bigcode", "openai-gpt")
    },
    **{
        key: {"n_embd": 16, "n_layer": 1, "n_head": 4, "rotary_dim": 4}
        for key in ("gptj", "codegen")
    },
    "ctrl": {"n_embd": 16, "n_layer": 1, "n_head": 2, "dff": 16},
    "gpt_neo": {
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "attention_types": [[["global"], 1]],
    },
    "opt": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "ffn_dim": 16,
        "word_embed_proj_dim": 16,
    },
    "biogpt": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    },
    "mpt": {"d_model": 16, "n_layers": 1, "n_heads": 2},
}


@pytest.mark.parametrize("kind", POSITION_KEYS)
def test_a_row_longer_than_the_positions_of_a_model_is_refused(tmp_path: Path, kind: str) -> None:
    """The longest row that fits runs in the model, and a row with one more token fails."""
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=264, **{POSITION_KEYS[kind]: 32}, **LIMITED[kind]
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    row = torch.randint(0, 264, (1, 33))  # (B, T)
    with torch.no_grad():
        model(input_ids=row[:, :32], position_ids=torch.arange(32)[None])
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=row, position_ids=torch.arange(33)[None])
    config.save_pretrained(tmp_path / "model")
    recipe = Recipe(
        model=str(tmp_path / "model"),
        init="random",
        tokenizer="bytes",
        dataset="builtin",
        ds_config="zero1.json",
    )

    def plan(seq_len: int) -> None:
        flags = [
            "--dry_run",
            "--seq_len",
            str(seq_len),
            "--global_batch",
            "4",
            "--micro_batch",
            "1",
            "--out",
            str(tmp_path / "run"),
        ]
        resolve_run(parse(recipe, ROOT / "recipes" / "x.py", flags))

    plan(32)
    with pytest.raises(ConfigError) as refusal:
        plan(33)
    assert [str(problem) for problem in refusal.value.problems] == [
        f"seq_len = 33: must not exceed the 32 positions of a {kind} ({POSITION_KEYS[kind]} in its"
        " config.json). Use --seq_len 32 or less"
    ]


@pytest.mark.parametrize("kind", ENCODER_TYPES)
def test_a_row_longer_than_the_positions_of_an_encoder_is_refused(
    tmp_path: Path, kind: str
) -> None:
    """If positions start after the padding index, fewer positions are available."""
    before = 2 if kind in PADDING_OFFSET_TYPES else 0
    config = tiny_config(kind, 264, "masked_lm") | {"max_position_embeddings": 32 + before}
    model = construct(config_of(config), "eager", "", "AutoModelForMaskedLM").eval()
    row = torch.randint(3, 264, (1, 33))  # (B, T)
    with torch.no_grad():
        model(input_ids=row[:, :32], position_ids=torch.arange(32)[None])
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=row, position_ids=torch.arange(33)[None])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    recipe = Recipe(
        model=str(tmp_path / "model"),
        task="masked_lm",
        init="random",
        tokenizer="bytes",
        dataset="builtin",
        ds_config="zero1.json",
    )

    def plan(seq_len: int) -> None:
        flags = [
            "--dry_run",
            "--seq_len",
            str(seq_len),
            "--global_batch",
            "4",
            "--micro_batch",
            "1",
            "--out",
            str(tmp_path / "run"),
        ]
        resolve_run(parse(recipe, ROOT / "recipes" / "x.py", flags))

    plan(32)
    with pytest.raises(
        ConfigError,
        match=(
            rf"seq_len = 33: must not exceed the 32 positions of a {kind} .max_position_embeddings"
            r" in its config.json.\. Use --seq_len 32 or less"
        ),
    ):
        plan(33)
