"""What a dry run says of a task is what the task counts: tokens and a vocabulary, or samples and labels."""

from typing import Any

import pytest
from recipekit.mesh import Mesh
from recipekit.model.empty import empty_model
from recipekit.parallel.blueprint import Blueprint, Layout, Tensor
from recipekit.planner.memory import LOGIT_BYTES, Load, rank_terms
from recipekit.planner.show import arithmetic, outputs
from recipekit.tasks.facts import TASKS

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
PICTURES = TASKS["image_classification"]


def test_the_arithmetic_of_a_step_and_of_the_schedule() -> None:
    assert arithmetic(TASKS["sft"], 64, 256) == ("64 rows x 256 tokens = 16,384 tokens", "0.000 billion tokens")
    assert arithmetic(TASKS["sft"], 64 * 2000, 256)[1] == "0.033 billion tokens"
    assert arithmetic(PICTURES, 4096, 1024) == ("4,096 samples", "0.004 million samples")


def test_the_logits_of_a_row() -> None:
    llama = empty_model({"model_type": "llama", "vocab_size": 500, **SMALL})
    assert outputs(llama, TASKS["pretrain"], 128) == (128, 500)
    vit = empty_model({"model_type": "vit", "image_size": 32, "patch_size": 8, "num_labels": 37, **SMALL}, auto_class=PICTURES.auto_class)
    assert outputs(vit, PICTURES, 1024) == (1, 37)


@pytest.mark.parametrize(("places", "classes"), [(128, 500), (1, 37)])
def test_their_bytes_are_a_term_of_the_last_stage(places: int, classes: int) -> None:
    blueprint = Blueprint((Tensor("a.weight", (8, 8), 0, None, "every"),), {}, 0, True)
    load = Load(micro_batch=4, seq_len=places, accumulation=2, vocabulary=classes)
    terms = rank_terms(blueprint, Layout(Mesh(), 0, "torch", "float32"), {"zero_optimization": {"stage": 0}}, load)
    assert [term.size for term in terms if term.what == "logits and their gradient"] == [4 * places * classes * LOGIT_BYTES]


def test_a_loss_in_chunks_holds_a_block_of_logits() -> None:
    blueprint = Blueprint((Tensor("a.weight", (8, 8), 0, None, "every"),), {}, 0, True)
    load = Load(micro_batch=4, seq_len=2048, accumulation=2, vocabulary=128_256, chunked=True)
    terms = rank_terms(blueprint, Layout(Mesh(), 0, "torch", "float32"), {"zero_optimization": {"stage": 0}}, load)
    assert [term.size for term in terms if term.when == ("loss",)] == [8 * 2**24]  # 8192 x 2048 logits
