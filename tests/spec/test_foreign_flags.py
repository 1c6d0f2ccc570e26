"""Flags and fields that users know from other programs, or misspell."""

import ast
import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.foreign_flags import (
    ADVICE,
    COMMAND_ONLY,
    WITHOUT_EQUIVALENT,
    as_fields,
    foreign_flag_advice,
    nearest_name,
)
from recipekit.spec.recipe import Recipe

FILE = Path("mine.py")
FIELDS = {item.name for item in dataclasses.fields(Recipe)}
FLAGS = {item.name for item in dataclasses.fields(Recipe) if "help" in item.metadata} | {
    *COMMAND_ONLY,
    "deepspeed_config",
    "local_rank",
}


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        parse(Recipe(model="x"), FILE, list(words))
    assert refusal.value.exit_code == 2
    (problem,) = refusal.value.problems
    return str(problem)


def names_of(module: str, name: str) -> set[str]:
    """Return a library class's fields from its source, because imports take seconds."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    (body,) = [
        node.body
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return {
        node.target.id
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if not node.target.id.startswith("_")
    }


@pytest.mark.parametrize(
    ("module", "name", "some", "least"),
    [
        (
            "transformers.training_args",
            "TrainingArguments",
            {"logging_steps", "warmup_steps", "hub_token"},
            100,
        ),
        ("peft.tuners.lora.config", "LoraConfig", {"r", "lora_alpha", "use_dora"}, 25),
        ("trl.trainer.sft_config", "SFTConfig", {"packing", "max_length"}, 15),
        ("trl.trainer.dpo_config", "DPOConfig", {"beta", "precompute_ref_log_probs"}, 15),
        ("trl.trainer.reward_config", "RewardConfig", {"center_rewards_coefficient"}, 5),
        ("trl.trainer.model_config", "ModelConfig", {"model_name_or_path", "lora_r"}, 15),
    ],
)
def test_every_name_of_another_program_has_an_answer(
    module: str, name: str, some: set[str], least: int
) -> None:
    names = names_of(module, name)
    assert some <= names and len(names) >= least
    assert names - FLAGS - ADVICE.keys() - WITHOUT_EQUIVALENT == set()


def test_advice_names_flags_that_exist_and_none_twice() -> None:
    assert not ADVICE.keys() & WITHOUT_EQUIVALENT
    assert ADVICE.keys() & FLAGS == {"deepspeed_config"}  # a flag without a field of the same name
    told = {
        word.strip(",;:.)").removeprefix("--").removeprefix("no-")
        for text in ADVICE.values()
        for word in text.split()
        if word.startswith("--")
    }
    assert told <= FLAGS and len(told) > 25


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        (
            "--lora_r 8",
            (
                "Set it in LoraConfig in the recipe's file, in adapt() as in"
                " recipes/qwen3_0_6b_lora_zero3.py"
            ),
        ),
        (
            "--lora_rank 8",
            (
                "Set it in LoraConfig in the recipe's file, in adapt() as in"
                " recipes/qwen3_0_6b_lora_zero3.py"
            ),
        ),
        (
            "--lora-target-linear true",
            (
                "Set it in LoraConfig in the recipe's file, in adapt() as in"
                " recipes/qwen3_0_6b_lora_zero3.py"
            ),
        ),
        ("--logging_steps 10", "Leave it out: OUT/metrics.jsonl has every step"),
        ("--logging-first-step", "Leave it out: OUT/metrics.jsonl has every step"),
        (
            "--packing false",
            "Leave it out: rows are always packed, and documents never attend to each other",
        ),
        (
            "--sample_packing=true",
            "Leave it out: rows are always packed, and documents never attend to each other",
        ),
        ("--model_name_or_path ./base", "Use --model"),
        ("--base_model ./base", "Use --model"),
        ("--sequence_len 2048", "Use --seq_len"),
        ("--warmup_ratio 0.1", "Use --warmup_steps"),
        ("--load_in_4bit", "Leave it out: recipes have no such setting"),
        ("--deepspeed x.json", "Use --deepspeed_config"),
        (
            "--checkpoint_every 100",
            (
                "To save checkpoints use --save_every N. To recompute every N-th layer use"
                " --recompute_every N"
            ),
        ),
        (
            "--checkpoint-every=2",
            (
                "To save checkpoints use --save_every N. To recompute every N-th layer use"
                " --recompute_every N"
            ),
        ),
        ("--recompute_num_layers 2", "Use --recompute_every N to recompute every N-th layer"),
        ("--lr_scale x", "It is a field: set lr_scale=... in the recipe's file"),
        ("--no-train", "List the flags with: python mine.py --help"),
        ("--verbose", "List the flags with: python mine.py --help"),
        ("--freeze_vision true", "List the flags with: python mine.py --help"),
        ("--no-wandbb", "Did you mean --no-wandb?"),
    ],
)
def test_a_flag_of_another_program_is_answered_by_the_flag_to_use(typed: str, fix: str) -> None:
    assert refused(*typed.split()) == f"{typed}: is not a flag of this command. {fix}"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *(
            ("lerning_rate", ""),
            ("lora_r", ""),
            ("packing", ""),
            ("no_train", ""),
            ("mp", ""),
            ("xx", ""),
            ("lr_", "lr"),
            ("sqe_len", "seq_len"),
        ),
        *(
            ("warmup_stpes", "warmup_steps"),
            ("sav", "save_every"),
            ("keep", "keep"),
            ("keep_bets", "keep_best"),
            ("messages", "messages_field"),
        ),
        *(
            ("activation_checkpoint", "activation_checkpointing"),
            ("gradient", "gradient_clipping"),
            ("modle", "model"),
            ("a", ""),
        ),
    ],
)
def test_only_a_close_name_is_suggested(typed: str, meant: str) -> None:
    names = ["save_every", *sorted(FLAGS - {"save_every", "save_in_background", "model_revision"})]
    assert nearest_name(typed, names) == meant


def test_advice_for_flags_is_advice_for_fields() -> None:
    assert as_fields(foreign_flag_advice("learning_rate")) == "use lr"
    assert as_fields(foreign_flag_advice("report_to")) == "use wandb or wandb=False"
    assert (
        as_fields(foreign_flag_advice("checkpoint_every"))
        == "to save checkpoints use save_every=N. To recompute every N-th layer use"
        " recompute_every=N"
    )
    assert (
        as_fields(foreign_flag_advice("zero_stage"))
        == "the JSON sets the ZeRO stage: use ds_config zero3.json"
    )
    assert not [text for text in ADVICE.values() if "--" in as_fields(text)]
    assert (
        json.dumps(sorted(FIELDS & ADVICE.keys()))
        == '["adapt", "ds_config", "lr_scale", "matrices", "no_decay", "pp_plan", "tp_local",'
        ' "tp_plan"]'
    )
