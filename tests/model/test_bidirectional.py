"""Attention implementations that separate packed documents in bidirectional models.

A model without such an implementation must be rejected.
"""

import pytest
import torch
from recipekit.architectures.families import default_config
from recipekit.kernels.attention import VARLEN
from recipekit.model.attention import choose_attention
from recipekit.model.device import Activations
from recipekit.model.empty import MASKED_AUTO_CLASS
from recipekit.model.probes import probe
from recipekit.spec.errors import ConfigError
from recipekit.spec.task_specs import TASKS

CPU = torch.device("cpu")


def chosen(
    kind: str,
    wanted: str = "auto",
    rows: tuple[int, int] = (1, 64),
    device: torch.device = CPU,
    **changes,
) -> tuple[str, str]:
    config = default_config(kind, "masked_lm").to_dict() | changes
    return choose_attention(
        wanted, config, "mine", TASKS["masked_lm"], Activations(torch.float32, device, rows)
    )


def test_each_family_takes_the_best_attention_that_is_right():
    assert chosen("modernbert") == ("both_ways_varlen", "") and chosen("eurobert") == (
        "both_ways_varlen",
        "",
    )
    attention, note = chosen("bert")
    assert (
        attention == "both_ways_sdpa"
        and note
        == "attention sdpa with a mask of packed documents, not varlen: it has attention dropout"
        " of 0.1"
    )
    assert chosen("bert", attention_probs_dropout_prob=0.0) == ("both_ways_varlen", "")
    attention, note = chosen("mpnet")  # MPNet implements its attention itself
    assert attention == "both_ways_eager" and "not varlen" in note
    assert chosen("modernbert", "sdpa") == ("both_ways_sdpa", "")
    attention, note = chosen("modernbert", device=torch.device("cuda"))
    assert (
        attention == "both_ways_sdpa"
        and "FlashAttention computes in bf16 or fp16, not in float32" in note
    )


@pytest.mark.parametrize("attention", [VARLEN, "sdpa", "eager"])
@pytest.mark.parametrize("kind", ["roberta", "modernbert", "bert"])
def test_documents_are_read_as_if_each_were_alone(kind, attention):
    """Positions restart in each document, and RoBERTa's positions start after its padding index.

    Sliding windows extend to both sides.
    """
    config = default_config(kind, "masked_lm").to_dict()
    seen = probe(config | {"attention_probs_dropout_prob": 0.0}, MASKED_AUTO_CLASS, "mine")
    assert seen.leak_reason(attention) == ""


@pytest.mark.parametrize(
    ("kind", "wanted", "changes", "says"),
    [
        (
            "deberta",
            "auto",
            {},
            (
                "attention = auto: does not keep the documents of a row apart in this deberta"
                " .*eager: the logits of a tiny copy's documents"
            ),
        ),
        ("fnet", "auto", {}, "does not keep the documents of a row apart in this fnet"),
        (
            "bert",
            "varlen",
            {},
            (
                "attention = varlen: does not keep .* apart in this bert .varlen: it has attention"
                " dropout of 0.1.. Leave it out"
            ),
        ),
        (
            "modernbert",
            "flash_attention_2",
            {},
            "cannot separate packed documents in a bidirectional model. Use --attention varlen",
        ),
    ],
)
def test_what_is_refused(kind, wanted, changes, says):
    with pytest.raises(ConfigError, match=says):
        chosen(kind, wanted, **changes)


def test_a_mask_that_leaves_no_room_is_refused():
    with pytest.raises(
        ConfigError,
        match=(
            r"It is not varlen, which makes none: it has attention dropout of 0.1\. Use a smaller"
            r" --seq_len"
        ),
    ):
        chosen("bert", rows=(64, 65536))


def test_causal_tasks_take_what_they_took():
    """An encoder that attends only backwards is a causal model, so bidirectional attention is not
    used.
    """
    config = default_config("bert").to_dict() | {
        "is_decoder": True,
        "attention_probs_dropout_prob": 0.0,
    }
    for name in ("pretrain", "sft"):
        assert choose_attention(
            "auto", config, "mine", TASKS[name], Activations(torch.float32, CPU)
        )[0] in (
            "varlen",
            "sdpa",
        )
        assert choose_attention(
            "sdpa", config, "mine", TASKS[name], Activations(torch.float32, CPU)
        ) == (
            "sdpa",
            "",
        )
