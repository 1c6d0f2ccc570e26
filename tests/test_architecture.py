"""The tiny copy of a model: small, of the same class, with the same structure; and where a config.json is looked up."""

import json

import pytest
from recipekit.architecture import SHIPPED, model_config, shrink
from recipekit.plan import BYTE_VOCAB
from recipekit.recipe import Recipe
from recipekit.refusal import Refusal

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SHAPES = {path.stem: json.loads(path.read_text()) for path in sorted(SHIPPED.glob("*.json"))} | {
    "mixtral": dict(
        model_type="mixtral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        num_local_experts=8, num_experts_per_tok=2, vocab_size=32000, sliding_window=4096, tie_word_embeddings=False, rope_parameters=ROPE,
    ),
    "gemma2": dict(
        model_type="gemma2", hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
        vocab_size=256000, sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, tie_word_embeddings=True, rope_parameters=ROPE,
        layer_types=["sliding_attention", "full_attention"] * 13,
    ),
    "gemma3": dict(
        model_type="gemma3_text", hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
        vocab_size=262144, sliding_window=512, tie_word_embeddings=True, layer_types=[*(["sliding_attention"] * 5 + ["full_attention"]) * 4, *["sliding_attention"] * 2],
    ),
    "qwen3_moe": dict(
        model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, vocab_size=151936, tie_word_embeddings=False, rope_parameters=ROPE,
    ),
}  # fmt: skip
every_shape = pytest.mark.parametrize("kind", SHAPES)


def numbers(config: dict) -> tuple[int, int, int]:
    """Hidden size, query heads, key-value heads."""
    queries = config.get("num_attention_heads") or config["n_head"]
    return config.get("hidden_size") or config["n_embd"], queries, config.get("num_key_value_heads") or queries


@every_shape
def test_tiny_model_keeps_its_traits(kind):
    config = SHAPES[kind]
    tiny = shrink(config, BYTE_VOCAB)
    same = ("model_type", "architectures", "tie_word_embeddings", "attn_logit_softcapping", "final_logit_softcapping", "hidden_act", "activation_function")
    assert {key: tiny.get(key) for key in same} == {key: config.get(key) for key in same}
    hidden, queries, key_values = numbers(config)
    tiny_hidden, tiny_queries, tiny_key_values = numbers(tiny)
    assert tiny_queries / tiny_key_values == queries / key_values
    if config.get("head_dim"):
        assert (tiny["head_dim"] * tiny_queries == tiny_hidden) == (config["head_dim"] * queries == hidden)
    assert tiny.keys() - config.keys() <= {"bos_token_id", "eos_token_id", "pad_token_id"}
    for key in ("num_local_experts", "num_experts"):
        assert (tiny.get(key) == 4) == bool(config.get(key))
    if config.get("sliding_window"):
        assert 0 < tiny["sliding_window"] <= 128  # shorter than a tiny row, so that it matters
    assert set(tiny.get("layer_types") or ()) == set(config.get("layer_types") or ())
    assert (tiny.get("rope_parameters") or ROPE)["rope_type"] == (config.get("rope_parameters") or ROPE)["rope_type"]


@every_shape
def test_tiny_model_is_small_and_tensor_parallelism_can_cut_it(kind):
    import torch
    import transformers

    tiny = shrink(SHAPES[kind], BYTE_VOCAB)
    hidden, queries, key_values = numbers(tiny)
    cut = [queries, tiny["vocab_size"], tiny.get("intermediate_size") or hidden * 4, *([key_values] if key_values > 1 else [])]
    assert not any(number % 4 for number in cut)
    options = dict(tiny)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(options.pop("model_type"), **options))
    assert type(model).__name__ in (SHAPES[kind].get("architectures") or [type(model).__name__])
    assert 50_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_100_000
    logits = model(input_ids=torch.arange(256).view(2, 128), use_cache=False).logits
    assert logits.shape == (2, 128, BYTE_VOCAB) and logits.isfinite().all()


def test_shrinking_does_not_change_its_argument():
    before = json.dumps(SHAPES["gemma2"])
    shrink(SHAPES["gemma2"], BYTE_VOCAB)
    assert json.dumps(SHAPES["gemma2"]) == before


def test_an_unknown_way_of_naming_is_refused():
    with pytest.raises(Refusal, match=r"cannot shrink a mpt: its config\.json has no n_layer, n_head, n_embd"):
        shrink({"model_type": "mpt", "d_model": 2048, "n_heads": 16, "n_layers": 24}, BYTE_VOCAB)


def test_config_comes_from_the_folder_the_cache_or_the_shipped_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    recipe = Recipe(model="Qwen/Qwen3-0.6B")
    assert model_config(recipe) == SHAPES["Qwen--Qwen3-0.6B"]
    assert model_config(Recipe(model="nobody/nothing")) is None
    snapshot = tmp_path / "hf" / "hub" / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "qwen3", "from": "cache"}')
    assert model_config(recipe) == {"model_type": "qwen3", "from": "cache"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text('{"model_type": "qwen3", "from": "folder"}')
    assert model_config(Recipe(model=str(tmp_path / "mine"))) == {"model_type": "qwen3", "from": "folder"}


@pytest.mark.parametrize(
    ("text", "rule"),
    [(None, "holds no config.json"), ("{", "is not JSON"), ("[]", "names no model_type"), ('{"hidden_size": 3}', "names no model_type")],
)
def test_an_unusable_config_is_refused(tmp_path, text, rule):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(Refusal, match=rule):
        model_config(Recipe(model=str(tmp_path)))


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(Refusal, match="is no folder on this machine"):
        model_config(Recipe(model=str(tmp_path / "nothing")))
