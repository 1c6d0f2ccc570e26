"""Tiny copies of models. A tiny copy is small, but has the model's class and structure.

Other tests cover the places where a config.json is looked up.
"""

import json
import re

import pytest
from recipekit.architectures.families import default_config, tiny_config
from recipekit.architectures.lookup import SHIPPED, fitting_task, model_config
from recipekit.architectures.shrink import BYTE_VOCAB, shrink
from recipekit.spec.errors import ConfigError
from recipekit.spec.task_specs import TASKS
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SHIPPED_SHAPES = {
    path.stem: json.loads(path.read_text()) for path in sorted(SHIPPED.glob("*.json"))
}
SHAPES = {
    name: config for name, config in SHIPPED_SHAPES.items() if fitting_task(config) == "pretrain"
} | {
    "mixtral": dict(
        model_type="mixtral",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=32000,
        sliding_window=4096,
        tie_word_embeddings=False,
        rope_parameters=ROPE,
    ),
    "gemma2": dict(
        model_type="gemma2",
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        vocab_size=256000,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
        rope_parameters=ROPE,
        layer_types=["sliding_attention", "full_attention"] * 13,
    ),
    "gemma3": dict(
        model_type="gemma3_text",
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=262144,
        sliding_window=512,
        tie_word_embeddings=True,
        layer_types=[
            *(["sliding_attention"] * 5 + ["full_attention"]) * 4,
            *["sliding_attention"] * 2,
        ],
    ),
    "qwen3_moe": dict(
        model_type="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        tie_word_embeddings=False,
        rope_parameters=ROPE,
    ),
}
every_shape = pytest.mark.parametrize("kind", SHAPES)


def numbers(config: dict) -> tuple[int, int, int]:
    """Return the hidden size and the numbers of query heads and key-value heads."""
    queries = config.get("num_attention_heads") or config["n_head"]
    return (
        config.get("hidden_size") or config["n_embd"],
        queries,
        config.get("num_key_value_heads") or queries,
    )


@every_shape
def test_tiny_model_keeps_its_traits(kind):
    config = SHAPES[kind]
    tiny = shrink(config, BYTE_VOCAB)
    same = (
        "model_type",
        "architectures",
        "tie_word_embeddings",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "hidden_act",
        "activation_function",
    )
    assert {key: tiny.get(key) for key in same} == {key: config.get(key) for key in same}
    hidden, queries, key_values = numbers(config)
    tiny_hidden, tiny_queries, tiny_key_values = numbers(tiny)
    assert tiny_queries / tiny_key_values == min(queries / key_values, 8)  # 405B has a ratio of 16
    if config.get("head_dim"):
        assert (tiny["head_dim"] * tiny_queries == tiny_hidden) == (
            config["head_dim"] * queries == hidden
        )
    assert tiny.keys() - config.keys() <= {"bos_token_id", "eos_token_id", "pad_token_id"}
    for key in ("num_local_experts", "num_experts"):
        assert (tiny.get(key) == 4) == bool(config.get(key))
    if config.get("sliding_window"):
        assert 0 < tiny["sliding_window"] <= 128  # shorter than a tiny row
    assert set(tiny.get("layer_types") or ()) == set(config.get("layer_types") or ())
    assert (tiny.get("rope_parameters") or ROPE)["rope_type"] == (
        config.get("rope_parameters") or ROPE
    )["rope_type"]


@every_shape
def test_tiny_model_is_small_and_tensor_parallelism_can_cut_it(kind):
    import torch
    import transformers

    tiny = shrink(SHAPES[kind], BYTE_VOCAB)
    hidden, queries, key_values = numbers(tiny)
    cut = [
        queries,
        tiny["vocab_size"],
        tiny.get("intermediate_size") or hidden * 4,
        *([key_values] if key_values > 1 else []),
    ]
    assert not any(number % 4 for number in cut)
    options = dict(tiny)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    )
    assert type(model).__name__ in (SHAPES[kind].get("architectures") or [type(model).__name__])
    assert 50_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_100_000
    logits = model(input_ids=torch.arange(256).view(2, 128), use_cache=False).logits
    assert logits.shape == (2, 128, BYTE_VOCAB) and logits.isfinite().all()


# Types that transformers 5.22.2 registers as causal language models, but that cannot be built and
# trained alone.
CANNOT = {
    "blt": "four stacks whose widths depend on one another, and no layers or width of its own",
    "gemma4_assistant": (
        "a draft model that reads its target's keys and values; its default config is refused by"
        " Gemma4TextConfig"
    ),
    "gemma4_unified_assistant": (
        "a draft model that reads its target's keys and values: Gemma4UnifiedTextAttention,"
        " shared_kv_states['sliding_attention']"
    ),
    "musicgen": (
        "AutoModelForCausalLM gives MusicgenConfig to MusicgenForCausalLM, which wants the"
        " MusicgenDecoderConfig in it"
    ),
    "musicgen_melody": (
        "AutoModelForCausalLM gives MusicgenMelodyConfig to a class that wants the"
        " MusicgenMelodyDecoderConfig in it"
    ),
}
QUICK = set(list(CAUSAL)[::4])  # the other types are slow tests, two minutes in total


def marks(name: str) -> list[pytest.MarkDecorator]:
    cannot = [pytest.mark.xfail(reason=CANNOT[name], strict=True)] if name in CANNOT else []
    return cannot + ([] if name in QUICK else [pytest.mark.slow])


every_type = pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=marks(name)) for name in CAUSAL]
)


def build(config):
    """Build the model in float32, with PyTorch's attention if the model's class supports it."""
    from transformers import AutoModelForCausalLM

    config.use_cache = False
    config._attn_implementation = "sdpa"
    try:
        return AutoModelForCausalLM.from_config(config, dtype="float32")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
    config._attn_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, dtype="float32")


def parts(model) -> set[str]:
    """Return the classes of the modules, and the parameter names without the layer number."""
    return {type(module).__name__ for module in model.modules()} | {
        re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in model.named_parameters()
    }


@every_type
def test_every_type_has_a_tiny_model_of_the_same_parts_that_trains(model_type):
    import torch
    from transformers import AutoConfig

    tiny = tiny_config(model_type, BYTE_VOCAB)
    torch.manual_seed(0)
    model = build(AutoConfig.for_model(**tiny))
    with torch.device("meta"):
        assert parts(model) == parts(build(default_config(model_type)))
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_500_000
    numbers = tiny | (tiny.get("text_config") or {})
    cut = [
        number
        for key, number in numbers.items()
        if re.fullmatch(r".*(heads|head_dim|intermediate_size|ffn_dim|_rank)|vocab_size", key)
        and number
    ]
    assert numbers["vocab_size"] == BYTE_VOCAB
    assert all(
        each == 1 or each % 2 == 0
        for number in cut
        for each in (number if isinstance(number, list) else [number])
    )

    ids = torch.randint(3, BYTE_VOCAB, (2, 48))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        logits = model(input_ids=ids).logits  # (2, 48, BYTE_VOCAB)
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()))
        losses[-1].backward()
        assert all(
            parameter.grad.isfinite().all()
            for parameter in model.parameters()
            if parameter.grad is not None
        )
        optimizer.step()
    assert losses[0].isfinite() and losses[1].isfinite() and losses[0] != losses[1]


def test_every_type_with_a_pipeline_plan_has_a_tiny_model():
    classes = {
        name: [CONFIG_MAPPING[name], *CONFIG_MAPPING[name].sub_configs.values()] for name in CAUSAL
    }
    planned = {
        name
        for name, configs in classes.items()
        if any(getattr(config, "base_model_pp_plan", None) for config in configs)
    }
    assert len(planned) >= 88  # the number in transformers 5.22.2
    assert not planned & CANNOT.keys()


@pytest.mark.parametrize(
    ("layers", "says", "kept"),
    [
        (8, {"layer_types": ["a", "a", "a", "b"] * 2}, {"layer_types": ["a", "a", "a", "b"]}),
        (8, {"layer_types": ["a", "b"] * 4}, {"layer_types": ["a", "b", "a", "b"]}),
        (6, {"layer_types": [*"aaaaab"]}, {"layer_types": [*"aaab"]}),
        (
            6,
            {"layer_types": [*"aaabaa"], "mlp_layer_types": [*"ddssss"]},
            {"layer_types": [*"aaba"], "mlp_layer_types": [*"dsss"]},
        ),
        (9, {"first_k_dense_replace": 3}, {"first_k_dense_replace": 1}),
        (
            9,
            {"moe_layer_start_index": 1, "moe_layer_end_index": 7},
            {"moe_layer_start_index": 1, "moe_layer_end_index": 2},
        ),
        (
            8,
            {"layer_types": ["a", "b"] * 4, "num_kv_shared_layers": 4},
            {"layer_types": ["a", "b", "a", "b"], "num_kv_shared_layers": 2},
        ),
        (8, {"cross_attention_layers": [3, 7]}, {"cross_attention_layers": [3]}),
        (8, {"no_rope_layers": [1, 1, 1, 0] * 2}, {"no_rope_layers": [1, 1, 1, 0]}),
        (
            6,
            {"per_layer_config": {"05": {"head_dim": 128}}, "head_dim": 64},
            {"per_layer_config": {"3": {"head_dim": 32}}, "head_dim": 16},
        ),
        (6, {"hybrid_override_pattern": "MMM-*-"}, {"hybrid_override_pattern": "MM-*"}),
        (
            9,
            {"n_input_layers": 2, "n_recurrent_layers": 5, "n_output_layers": 2},
            {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
        ),
        (
            16,  # an attention and its MLP are counted as two blocks
            {"layer_types": ["a", "mlp", "b", "mlp"] * 4, "n_layer": 16},
            {"layer_types": ["a", "b", "a", "b"], "n_layer": 4},
        ),
        (
            24,
            {
                "loop_layer_index_start": 6,
                "loop_layer_index_end": 18,
                "n_layers_per_attn_res_block": 6,
            },
            {
                "loop_layer_index_start": 1,
                "loop_layer_index_end": 3,
                "n_layers_per_attn_res_block": 1,
            },
        ),
        (
            6,  # the head of layer 5 has two parts, and its width is their sum
            {
                "per_layer_config": {"5": {"qk_nope_head_dim": 192}},
                "head_dim": 256,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
            },
            {
                "per_layer_config": {"3": {"qk_nope_head_dim": 16, "head_dim": 32}},
                "head_dim": 16,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 16,
            },
        ),
    ],
)
def test_one_layer_of_each_kind_stays_and_the_lists_of_layers_agree(layers, says, kept):
    tiny = shrink(
        {
            "model_type": "any",
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "hidden_size": 256,
            "vocab_size": 1000,
        }
        | says,
        BYTE_VOCAB,
    )
    assert tiny["num_hidden_layers"] == 4
    assert {key: tiny[key] for key in says} == kept


def test_the_factors_of_longrope_are_as_many_as_the_pairs_of_a_tiny_head():
    # Phi-3 has 96 dimensions per head.
    factors = {"rope_type": "longrope", "long_factor": [1.0] * 48, "short_factor": [2.0] * 48}
    config = {
        "model_type": "phi3",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_size": 3072,
        "rope_scaling": factors,
    }
    assert shrink(config, BYTE_VOCAB)["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": [1.0] * 8,
        "short_factor": [2.0] * 8,
    }


@pytest.mark.parametrize(
    ("factor", "original", "reached"), [(8.0, 8192, 4096), (40, 4096, 20480), (8.0, 4096, 2048)]
)
def test_yarn_reaches_the_positions_of_a_tiny_config_as_in_the_published_one(
    factor, original, reached
):
    """transformers warns if YaRN's factor is not the ratio of the two numbers of positions.

    In the last case, the ratio of the published config is not its factor. It stays so.
    """
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    most = 8 * 8192 if factor == 8.0 else 163840
    config = SHAPES["mixtral"] | {"max_position_embeddings": most, "rope_parameters": yarn}
    tiny = shrink(config, BYTE_VOCAB)
    assert tiny["max_position_embeddings"] == reached
    assert tiny["rope_parameters"] == yarn | {"original_max_position_embeddings": 512}
    old = {"factor": factor, "original_max_position_embeddings": original, "type": "yarn"}
    for other in (
        {"rope_parameters": None, "rope_scaling": old},
        {"rope_parameters": {"sliding_attention": ROPE, "full_attention": yarn}},
    ):
        assert shrink(config | other, BYTE_VOCAB)["max_position_embeddings"] == reached


# Image classifiers that must have tiny copies. recipes/SUPPORT.md states the results of the others.
IMAGES = ("vit", "deit", "beit", "dinov2", "swin", "convnext", "resnet", "siglip", "clip")
OF_IMAGES = TASKS["image_classification"].tiny
VIT_L = {
    "architectures": ["ViTForImageClassification"],
    "model_type": "vit",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "hidden_act": "gelu",
    "qkv_bias": True,
    "layer_norm_eps": 1e-12,
    "id2label": {str(label): f"LABEL_{label}" for label in range(1000)},
    "label2id": {f"LABEL_{label}": label for label in range(1000)},
}


def classifier(tiny: dict):
    import transformers

    return transformers.AutoModelForImageClassification.from_config(
        transformers.AutoConfig.for_model(**tiny)
    )


@pytest.mark.parametrize("model_type", IMAGES)
def test_every_image_family_has_a_tiny_classifier_of_the_same_parts_that_trains(model_type):
    import torch

    whole = default_config(model_type, "image_classification")
    tiny = tiny_config(model_type, task="image_classification")
    torch.manual_seed(0)
    model = classifier(tiny)
    with torch.device("meta"):
        assert parts(model) == parts(type(model)(whole)), "no kind of layer is gone"
    assert type(model).__name__ == whole.architectures[0]
    assert 20_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    of_images = tiny.get("vision_config", tiny)
    assert of_images["image_size"] == 32 and of_images.get("patch_size", 1) <= 8
    # (B, C, H, W)
    images, labels = (
        torch.rand(4, of_images.get("num_channels", 3), 32, 32),
        torch.tensor([0, 3, 7, 9]),
    )
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    for _ in range(2):
        logits = model(pixel_values=images).logits
        assert logits.shape == (4, 10)
        losses.append(torch.nn.functional.cross_entropy(logits, labels))
        losses[-1].backward()
        assert all(
            parameter.grad.isfinite().all()
            for parameter in model.parameters()
            if parameter.grad is not None
        )
        optimizer.step()
    assert losses[0].isfinite() and losses[1].isfinite() and losses[0] != losses[1]


def test_the_numbers_of_a_tiny_vit_are_small_and_tp_can_cut_it():
    tiny = shrink(VIT_L, limits=OF_IMAGES)
    kept = {
        key: value
        for key, value in VIT_L.items()
        if not isinstance(value, int | dict) or isinstance(value, bool)
    }
    assert {key: tiny[key] for key in kept} == kept
    assert {key: tiny[key] for key in tiny.keys() - kept} == {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
        "num_channels": 3,
        "num_labels": 10,
    }
    small = shrink(VIT_L | {"image_size": [28, 28], "patch_size": 4}, limits=OF_IMAGES)
    assert small["image_size"] == [28, 28] and small["patch_size"] == 4, (
        "what is small already stays"
    )


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_tower_that_leaves_its_numbers_to_its_class_is_shrunk_too(kind):
    """CLIP and SigLIP are published like this."""
    tower = {"model_type": f"{kind}_vision_model"}
    tiny = shrink({"model_type": kind, "vision_config": tower, "text_config": {}}, limits=OF_IMAGES)
    assert (
        tiny["vision_config"].items()
        >= (
            tower | {"hidden_size": 64, "num_hidden_layers": 4, "image_size": 32, "patch_size": 8}
        ).items()
    )
    assert sum(parameter.numel() for parameter in classifier(tiny).parameters()) < 300_000


def test_an_image_model_that_names_no_width_is_refused():
    with pytest.raises(
        ConfigError, match=r"cannot shrink a odd: its config\.json has no hidden_sizes or embed_dim"
    ):
        shrink({"model_type": "odd", "depths": [2, 2], "width": 3}, limits=OF_IMAGES)
    with pytest.raises(
        ConfigError,
        match=r"cannot shrink a odd: its config\.json has no num_hidden_layers, hidden_size",
    ):
        shrink({"model_type": "odd", "width": 3}, limits=OF_IMAGES)


def test_shrinking_does_not_change_its_argument():
    before = json.dumps(SHAPES["gemma2"])
    shrink(SHAPES["gemma2"], BYTE_VOCAB)
    assert json.dumps(SHAPES["gemma2"]) == before
    before = json.dumps(VIT_L)
    shrink(VIT_L, limits=OF_IMAGES)
    assert json.dumps(VIT_L) == before


def test_an_unknown_way_of_naming_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"cannot shrink a clever: its config\.json has no num_hidden_layers, hidden_size",
    ):
        shrink({"model_type": "clever", "width": 2048, "n_heads": 16, "depth": 24}, BYTE_VOCAB)


def test_config_comes_from_the_folder_the_cache_or_the_shipped_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert model_config("Qwen/Qwen3-0.6B") == SHAPES["Qwen--Qwen3-0.6B"]
    assert model_config("nobody/nothing") is None
    snapshot = tmp_path / "hf" / "hub" / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "qwen3", "from": "cache"}')
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    assert model_config("Qwen/Qwen3-0.6B") == {"model_type": "qwen3", "from": "cache"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text('{"model_type": "qwen3", "from": "folder"}')
    assert model_config(str(tmp_path / "mine")) == {"model_type": "qwen3", "from": "folder"}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (None, "contains no config.json"),
        ("{", "is not JSON"),
        ("[]", "has no model_type"),
        ('{"hidden_size": 3}', "has no model_type"),
    ],
)
def test_an_unusable_config_is_refused(tmp_path, text, rule):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rule):
        model_config(str(tmp_path))


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder on this machine"):
        model_config(str(tmp_path / "nothing"))
