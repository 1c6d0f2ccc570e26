"""A dry run reports a task in the task's units: tokens and a vocabulary, or samples and labels."""

from pathlib import Path
from typing import Any

import pytest
from recipekit.kernels.blocks import columns_per_block
from recipekit.model.empty import empty_model
from recipekit.parallel.blueprint import Blueprint, Layout, Tensor
from recipekit.plan import resolve_run
from recipekit.planner.dry_run import batch_arithmetic, schedule_lines
from recipekit.planner.memory import CHUNKED_LOGIT_BYTES, LOGIT_BYTES, rank_terms
from recipekit.planner.resolve import count_logits
from recipekit.spec.command import parse
from recipekit.spec.memory_terms import MemoryRequest
from recipekit.spec.mesh import Mesh
from recipekit.spec.recipe import Recipe
from recipekit.spec.task_specs import TASKS

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
PICTURES = TASKS["image_classification"]


def test_the_arithmetic_of_a_step_and_of_the_schedule() -> None:
    assert batch_arithmetic(TASKS["sft"], 64, 256) == (
        "64 rows x 256 tokens = 16,384 tokens",
        "0.000 billion tokens",
    )
    assert batch_arithmetic(TASKS["sft"], 64 * 2000, 256)[1] == "0.033 billion tokens"
    assert batch_arithmetic(PICTURES, 4096, 1024) == ("4,096 samples", "0.004 million samples")


SCHEDULES: list[tuple[dict[str, Any], str]] = [
    ({}, "begins at 0.001, falls as a cosine to 0.0 at step 40"),
    (
        {"schedule": "linear", "warmup_steps": 5, "min_lr": 1e-4},
        "rises to 0.001 at step 5, falls linearly to 0.0001 at step 40",
    ),
    ({"schedule": "constant", "warmup_steps": 5}, "rises to 0.001 at step 5, stays there"),
    (
        {"schedule": "wsd", "warmup_steps": 5, "decay_steps": 4},
        "rises to 0.001 at step 5, stays there until step 36, falls by 1 - sqrt to 0.0 at step 40",
    ),
]


@pytest.mark.parametrize(("numbers", "said"), SCHEDULES)
def test_a_dry_run_says_each_batch_and_what_the_learning_rate_does(
    numbers: dict[str, Any], said: str
) -> None:
    recipe = Recipe(
        model="meta-llama/Llama-3.2-1B",
        seq_len=128,
        micro_batch=2,
        global_batch=8,
        batch_ramp="11:16,31:40",
        steps=40,
        lr=1e-3,
        **numbers,
    )
    plan = resolve_run(parse(recipe, Path("mine.py"), ["--dry_run", "--world", "2"]))
    assert schedule_lines(plan) == [
        (
            "batch    8 rows x 128 tokens = 1,024 tokens a step = 2 data-parallel x 2 micro_batch x"
            " 2 accumulation"
        ),
        (
            "ramp     from step 11 on 16 rows x 128 tokens = 2,048 tokens a step = 2 data-parallel"
            " x 2 micro_batch x 4 accumulation"
        ),
        (
            "ramp     from step 31 on 40 rows x 128 tokens = 5,120 tokens a step = 2 data-parallel"
            " x 2 micro_batch x 10 accumulation"
        ),
        "schedule 40 steps = 0.000 billion tokens",  # 102,400: 10 x 1,024 + 20 x 2,048 + 10 x 5,120
        f"lr       {said}",
    ]
    assert recipe.ramp.total(40) * 128 == 102_400


def test_the_logits_of_a_row() -> None:
    llama = empty_model({"model_type": "llama", "vocab_size": 500, **SMALL})
    assert count_logits(llama, TASKS["pretrain"], 128) == (128, 500)
    vit = empty_model(
        {"model_type": "vit", "image_size": 32, "patch_size": 8, "num_labels": 37, **SMALL},
        auto_class=PICTURES.auto_class,
    )
    assert count_logits(vit, PICTURES, 1024) == (1, 37)


@pytest.mark.parametrize(("places", "classes"), [(128, 500), (1, 37)])
def test_their_bytes_are_a_term_of_the_last_stage(places: int, classes: int) -> None:
    blueprint = Blueprint((Tensor("a.weight", (8, 8), 0, None, "every"),), {}, 0, True)
    load = MemoryRequest(micro_batch=4, seq_len=places, accumulation=2, vocabulary=classes)
    terms = rank_terms(
        blueprint, Layout(Mesh(), 0, "torch", "float32"), {"zero_optimization": {"stage": 0}}, load
    )
    assert [term.size for term in terms if term.what == "logits and their gradient"] == [
        4 * places * classes * LOGIT_BYTES
    ]


@pytest.mark.parametrize(
    ("rows", "tp", "what", "size"),
    [
        # blocks of 16,384 rows x 4096 columns
        (8, 1, "a block of logits", CHUNKED_LOGIT_BYTES * 2**26),
        # 2048 rows x 32,768 columns
        (1, 1, "a block of logits", CHUNKED_LOGIT_BYTES * 2**26),
        # One block contains all logits, which the loss then stores. A shard is never stored.
        (0.25, 1, "logits and their gradient", LOGIT_BYTES * 512 * 128_256),
        (0.25, 2, "a block of logits", CHUNKED_LOGIT_BYTES * 512 * 128_256),
    ],
)
def test_a_loss_in_chunks_holds_a_block_of_logits(
    rows: float, tp: int, what: str, size: int
) -> None:
    blueprint = Blueprint((Tensor("a.weight", (8, 8), 0, None, "every"),), {}, 0, True)
    places = int(rows * 2048)
    load = MemoryRequest(
        micro_batch=1, seq_len=places, accumulation=2, vocabulary=128_256, chunked=True
    )
    layout = Layout(Mesh(tp=tp), 0, "torch", "float32")
    terms = rank_terms(blueprint, layout, {"zero_optimization": {"stage": 0}}, load)
    assert [(term.what, term.size) for term in terms if term.moments == ("loss",)] == [(what, size)]
    if what == "a block of logits":  # the number that the kernel uses on an accelerator
        assert size == CHUNKED_LOGIT_BYTES * places * columns_per_block(places, 128_256)
