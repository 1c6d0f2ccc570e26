"""All probes of a model share one small copy, which is constructed only once and never changed."""

from typing import Any

import pytest
import torch
from recipekit.architectures.families import default_config, tiny_config
from recipekit.kernels.attention import VARLEN
from recipekit.kernels.documents import as_attention_mask, cu_seqlens_of
from recipekit.model import probes
from recipekit.model.empty import CAUSAL_AUTO_CLASS
from recipekit.model.probes import Capabilities, probe
from recipekit.model.small import seeded, small_copy
from recipekit.spec.errors import ConfigError
from recipekit.spec.task_specs import TASKS

PRETRAIN, MASKED = TASKS["pretrain"], TASKS["masked_lm"]
PLAN = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
QUESTIONS = {
    "reads_ahead": lambda seen: seen.reads_ahead("sdpa"),
    "unfit": lambda seen: seen.unfit_for_varlen,
    "operations": lambda seen: [str(operation) for operation in seen.operations],
    "partial_gradients": lambda seen: seen.partial_gradients(PLAN),
}


@pytest.fixture
def constructed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the attention of each small copy when it is constructed."""
    attentions: list[str] = []

    def counted(config: Any, facts: Any, name: str, attention: str) -> Any:
        attentions.append(attention)
        return small_copy(config, facts, name, attention)

    monkeypatch.setattr(probes, "small_copy", counted)
    return attentions


def test_all_questions_about_a_decoder_construct_one_small_copy(constructed: list[str]) -> None:
    """In any order, the probes give the same results, and the copy stays unchanged."""
    config, found = tiny_config("apertus", 264), []
    for names in (list(QUESTIONS), list(reversed(QUESTIONS))):
        seen = Capabilities(config, PRETRAIN, "")
        before = {key: value.clone() for key, value in seen.duplicate().state_dict().items()}
        found.append({name: QUESTIONS[name](seen) for name in names})
        after = seen.made["eager"]
        assert seen.made.keys() == {"eager"} and after.config._attn_implementation == "eager"
        assert all(torch.equal(before[key], value) for key, value in after.state_dict().items())
        assert not any(module._forward_hooks for module in after.modules())
        assert "forward" not in vars(after)
    assert found[0] == found[1] and constructed == ["eager", "eager"]
    assert found[0]["reads_ahead"] is False and found[0]["unfit"] == ""


def test_all_questions_about_an_encoder_construct_one_small_copy(constructed: list[str]) -> None:
    seen = Capabilities(default_config("modernbert", "masked_lm").to_dict(), MASKED, "")
    assert [seen.leak_reason(attention) for attention in (VARLEN, "sdpa", "eager")] == ["", "", ""]
    assert seen.reads_both_ways and seen.operations == () and constructed == ["eager"]


@pytest.mark.parametrize("attention", ["sdpa", VARLEN])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
def test_a_duplicate_computes_like_a_copy_constructed_with_its_attention(
    kind: str, attention: str
) -> None:
    seen = Capabilities(tiny_config(kind, 264), PRETRAIN, "")
    with seeded(0):
        expected = small_copy(seen.config, PRETRAIN, "", attention)
    positions = torch.arange(8).repeat(1, 2)  # (1, T), two documents
    arguments = {"input_ids": torch.arange(3, 19).unsqueeze(0), "position_ids": positions}
    if attention == VARLEN:
        arguments["attention_mask"] = as_attention_mask(
            cu_seqlens_of(positions), torch.device("cpu")
        )
    models = [model.eval() for model in (seen.duplicate(attention), expected)]
    assert torch.equal(*(model(**arguments).logits for model in models))
    assert seen.made.keys() == {"eager"}


def test_a_class_that_looks_its_attention_up_once_is_constructed_again() -> None:
    seen = Capabilities(tiny_config("falcon", 264), PRETRAIN, "")
    assert seen.duplicate("sdpa").config._attn_implementation == "sdpa"
    assert seen.made.keys() == {"eager", "sdpa"}


def test_a_copy_that_is_not_small_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "MOST_KEPT", 1)
    seen = Capabilities(tiny_config("llama", 264), PRETRAIN, "")
    assert seen.reads_ahead("sdpa") is False and not seen.made


def test_what_is_found_is_kept_for_all_tasks_with_the_same_small_copy() -> None:
    config = tiny_config("llama", 264)
    assert probe(config, CAUSAL_AUTO_CLASS, "m") is probe(dict(config), CAUSAL_AUTO_CLASS, "m")
    others = [
        probe(config, TASKS["reward"].auto_class, "m"),
        probe(config, CAUSAL_AUTO_CLASS, "other"),
    ]
    assert probe(config, CAUSAL_AUTO_CLASS, "m") not in others
    for facts in TASKS.values():
        first = probe(config, facts.auto_class, "m").facts
        assert (first.labels, first.tiny) == (facts.labels, facts.tiny)
        assert (first.inputs, first.constants) == (facts.inputs, facts.constants)


def test_a_class_without_an_attention_is_refused_as_when_it_is_constructed() -> None:
    seen = Capabilities(tiny_config("bloom", 264), PRETRAIN, "")
    with pytest.raises(ConfigError, match="attention = sdpa: a bloom cannot use it here"):
        seen.reads_ahead("sdpa")
    assert seen.reads_ahead("eager") is False
