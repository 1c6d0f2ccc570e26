"""Tiny copies of a model's config.json, with the same structural traits and small numbers."""

import re
from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

from ..spec.errors import config_error

# Vocabulary of the byte-level tokenizer (data/processors.py): 256 bytes and 8 special tokens. The
# total is divisible by 2, 3, 4, 6 and 8, so tp can shard it.
BYTE_VOCAB = 264
# Different families' names for the same number, the most common name first.
NUM_LAYERS_KEYS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_blocks",
)
NUM_HEADS_KEYS = (
    "num_attention_heads",
    "num_heads",
    "n_head",
    "n_heads",
    "decoder_attention_heads",
    "num_decoder_attention_heads",
    "attention_heads",
)
NUM_KV_HEADS_KEYS = ("num_key_value_heads", "num_kv_heads")
HIDDEN_SIZE_KEYS = ("hidden_size", "n_embd", "n_embed", "d_model", "emb_dim", "dim")
HEAD_DIM_KEYS = ("head_dim", "dim_head", "d_head", "kv_channels", "attention_head_size")
# For an image model whose stages get wider: each stage's layers, and the width of each stage or of
# the first stage.
STAGE_DEPTHS_KEY, STAGE_WIDTH_KEYS = "depths", ("hidden_sizes", "embed_dim")
# How a tiny model's numbers shrink: pattern of the key -> the largest value, or a kind of number
# that `_proportions` knows. The first match wins.
EXPERT_COUNT_KEYS = r"(moe_)?num(_local)?_experts|n_routed_experts"
SHRINK_RULES = {
    # Experts: four in two groups, with two experts per token.
    EXPERT_COUNT_KEYS: 4,
    r"num_experts_per_tok(en)?|moe_k|moe_top_?k|top_k_experts": 2,
    r"n_group|num_expert_group|zero_expert_num": 2,
    r"topk_group": 1,
    r"moe_.*intermediate_size|shared_(expert_)?intermediate_size|expert_ffn_hidden_size": 64,
    # Attention ranges: shorter than a tiny row, so that they have an effect.
    r"(.*_)?window(_size)?|local_attention|.*chunk_size": 32,
    r".*chunk_length": 16,
    r"index_topk|indexer_budget|compress_rates": 8,
    r"(index_)?block_size|indexer_compress_ratio": 4,
    r"index_topk_blocks|num_random_blocks": 1,
    # Low ranks, the indexer, state spaces.
    r"q_lora_rank|index_head_dim|router_hidden_size": 32,
    r".*_(low)?rank|laurel_rank|hidden_size_per_layer_input": 16,
    r"(.*_)?state(_size)?|linear_head_dim": 16,
    r"index_n_heads|linear_num_heads": 4,
    r"o_groups|n_groups|mamba_n_?groups": 2,
    r"rel_extent": 64,
    # Positions and vocabularies.
    r"original_max_position_embeddings": 512,
    r".*max.*_positions?(_embeddings)?|n_positions|n_ctx": 2048,
    r"max_seq_len|model_max_length|context_length": 2048,
    r".*vocab_size.*": "vocabulary",
    # Intervals at which a kind of layer recurs, and layer counts of stacks other than the decoder.
    r".*_(interval|pattern|period|every_n_layers|step)": 4,
    r"n_layers_per_\w+_block": 2,
    r".*_layer_offset|encoder_layers|num_encoder_layers|num_layers_per_stack": 2,
    # Widths.
    r"image_size|crop_size": 56,
    r".*_multiple_of": 16,
    r"linear_num_(key|value)_heads": "linear heads",
    r"linear_(key|value)_head_dim": "linear head_dim",
    r"mamba_n_heads|mamba_num_heads|n_mamba_heads": "state heads",
    r"mamba_d_head|mamba_head_?dim": "state head_dim",
    r"(.*_)?(num_.*key_value|kv|kv_n)_heads.*": "key-value heads",
    r"(.*_)?(n|num|attention)_heads.*|num_query_groups|n_head": "heads",
    r"(.*_)?head_dim|rotary_dim|dim_head|d_head|kv_channels|attention_head_size": "head_dim",
    r"(.*_)?intermediate_size.*|(.*_)?ffn_(dim|hidden_size)|n_inner|d_inner": "intermediate",
    r"dff|dim_ff|feed_forward_size|hidden_dim": "intermediate",
    r".*(_size|_dim|_width|_d_ssm|_channels?)|n_embe?d|d_model|dim": "hidden",
}
# Families in which a token id cannot be None, because they count positions from it or because their
# config class checks it strictly.
ROBERTAS = (
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
REQUIRED_TOKEN_IDS = {
    "pad_token_id": (
        *ROBERTAS,
        "emu3_text_model",
        "esm",
        "ibert",
        "modernbert-decoder",
        "nomic_bert",
        "prophetnet",
        "reformer",
        "xlm",
    ),
    "bos_token_id": ("cwm", "emu3_text_model", "mllama_text_model", "modernbert-decoder"),
    "eos_token_id": ("emu3_text_model", "modernbert-decoder"),
    "cls_token_id": ("modernbert-decoder",),
    "sep_token_id": ("modernbert-decoder",),
}


def shrink(
    config: dict[str, Any], vocab_size: int = 0, limits: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the config of a model of the same class with a few hundred thousand parameters.

    Its numbers shrink, its structural traits stay, and tp 2 and 4 can shard it. The traits are:

    - tied embeddings, and the ratio of query to key-value heads (up to 8)
    - a head_dim that is not hidden_size / heads
    - windows, every kind of layer, experts, low ranks, soft caps, the rotary type

    If `vocab_size` is 0, the model reads no tokens. `limits` contains a task's limits for further
    numbers (tasks.facts.Facts.tiny); its num_labels is used as given. Raises `ConfigError` if the
    config's keys for the number of layers or the width are unknown here.
    """
    if limits and not vocab_size:
        return _shrink_images(config, limits)
    config = _merge_block_pairs(config)
    count = _count_layers(config)
    if unknown := [
        names[0]
        for value, names in (
            (count, NUM_LAYERS_KEYS),
            (_first_key(config, HIDDEN_SIZE_KEYS), HIDDEN_SIZE_KEYS),
        )
        if not value
    ]:
        rule = (
            f"cannot shrink a {config['model_type']}: its config.json has no {', '.join(unknown)}"
        )
        raise config_error(
            "--tiny",
            rule,
            "make a small model of that class, save it with save_pretrained, and give the folder"
            " with --model, without --tiny",
        )
    kept = _select_layers(config)
    proportions = _proportions(config, vocab_size)
    tiny = {
        key: _shrink_value(key, _restrict_to_layers(key, value, kept, count), proportions)
        for key, value in config.items()
    }
    tiny |= {key: value for key, value in _derived_values(config, tiny).items() if key in config}
    if tiny.get("per_layer_config"):
        tiny["per_layer_config"] = _derived_per_layer(config, tiny, kept)
    if vocab_size:
        tiny["vocab_size"] = vocab_size
        for key, types in REQUIRED_TOKEN_IDS.items():
            if tiny.get(key) or key in ("bos_token_id", "eos_token_id", "pad_token_id"):
                # the token ids refer to the original vocabulary
                tiny[key] = 1 if config["model_type"] in types else None
    return _limit_labels(tiny, limits or {})


TOWER = "vision_config"  # the part that reads images, in a two-part model's config
# Defaults in such classes, for example CLIP and SigLIP, for numbers that config.json omits.
TOWER_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}
# keys that name removed layers; only other models with this backbone read them
BACKBONE_KEYS = ("stage_names", "out_features", "out_indices")
LABEL_KEYS = ("num_labels", "id2label", "label2id")


def _shrink_images(config: dict[str, Any], limits: Mapping[str, int]) -> dict[str, Any]:
    """Return the tiny config of an image model.

    If the model has two parts, the image tower shrinks. If it has stages, each stage shrinks.
    """
    # Perceiver's layers are as wide as its latents, but its queries and inputs are not.
    if "d_latents" in config:
        rule = (
            f"cannot shrink a {config['model_type']}: the widths of its latents are not known here"
        )
        raise config_error(
            "--tiny",
            rule,
            "make a small model of that class, save it with save_pretrained, and give the folder"
            " with --model, without --tiny",
        )
    config = {key: value for key, value in config.items() if key not in BACKBONE_KEYS}
    sizes = {key: number for key, number in limits.items() if key not in LABEL_KEYS}
    if isinstance(config.get(TOWER), dict):
        tiny = config | {TOWER: _shrink_images(TOWER_DEFAULTS | config[TOWER], sizes)}
    else:
        tiny = _shrink_stages(config) if config.get(STAGE_DEPTHS_KEY) else shrink(config)
        tiny |= {
            key: _clamp(config.get(key, number), number)
            for key, number in sizes.items()
            if key in config or key == "image_size"
        }
        # Swin does not run if its window is larger than its last stage's input. Here both have
        # width 2.
        if config.get(STAGE_DEPTHS_KEY) and config.get("window_size"):
            tiny |= {
                "window_size": 2,
                "patch_size": max(
                    1, sizes["image_size"] // (2 << (len(tiny[STAGE_DEPTHS_KEY]) - 1))
                ),
            }
    return _limit_labels(tiny, limits)


def _limit_labels(tiny: dict[str, Any], limits: Mapping[str, int]) -> dict[str, Any]:
    """Return a small config with the number of labels that the task's limits allow."""
    if not (labels := limits.get("num_labels")):
        return tiny
    others = {key: value for key, value in tiny.items() if key not in LABEL_KEYS}
    return others | {"num_labels": labels}


def _clamp(value: int | list[int], number: int) -> Any:
    """Limit a number, or each number of a list (height and width)."""
    return [min(each, number) for each in value] if isinstance(value, list) else min(value, number)


def _shrink_stages(config: dict[str, Any]) -> dict[str, Any]:
    """Keep at most two layers per stage, and the ratio of the stages' widths and heads."""
    heads, width = (
        config.get("num_heads"),
        next((config[name] for name in STAGE_WIDTH_KEYS if config.get(name)), None),
    )
    if width is None:
        rule = (
            f"cannot shrink a {config['model_type']}: its config.json has no"
            f" {' or '.join(STAGE_WIDTH_KEYS)}"
        )
        raise config_error(
            "--tiny",
            rule,
            "make a small model of that class, save it with save_pretrained, and give the folder"
            " with --model, without --tiny",
        )
    first = width[0] if isinstance(width, list) else width
    fewer = (2, heads[0]) if isinstance(heads, list) and heads[0] > 2 else (1, 1)

    def scaled(value: int | list[Any], by: tuple[int, int]) -> Any:
        return (
            [scaled(each, by) for each in value]
            if isinstance(value, list)
            else max(1, value * by[0] // by[1])
        )

    tiny = config | {STAGE_DEPTHS_KEY: [min(depth, 2) for depth in config[STAGE_DEPTHS_KEY]]}
    tiny |= {
        key: scaled(config[key], (16, first))
        for key in ("hidden_sizes", "embed_dim", "embedding_size", "hidden_size")
        if config.get(key)
    }
    return tiny | ({"num_heads": scaled(heads, fewer)} if heads else {})


def _derived_values(config: dict[str, Any], tiny: dict[str, Any]) -> dict[str, Any]:
    """Return the values that repeat a tiny config's other values in a different form."""
    derived: dict[str, Any] = _yarn_positions(config, tiny)
    if config.get("qk_nope_head_dim"):  # latent attention: a head has two parts
        parts = ("qk_nope_head_dim", "qk_rope_head_dim")
        both = sum(tiny[part] for part in parts)
        is_sum = config.get("head_dim") == sum(config[part] for part in parts)
        derived |= {"qk_head_dim": both, "head_dim": both if is_sum else tiny[parts[1]]}
    # Dory runs the layers between its first and its last layers several times.
    if config.get("n_recurrent_layers"):
        first, repeated, last = SECTION_KEYS
        derived[repeated] = tiny["num_hidden_layers"] - tiny[first] - tiny[last]
    # Inkling 2 runs some of its blocks of layers several times.
    if config.get("loop_layer_index_start"):
        block = "n_layers_per_attn_res_block"
        ends = (tiny[f"loop_layer_index_{end}"] for end in ("start", "end"))
        derived[block] = gcd(*ends, tiny[block])
    # hrm_text runs its stacks several times and counts every run of a layer.
    if config.get("num_layers_per_stack"):
        derived["num_hidden_layers"] = (
            config["num_hidden_layers"]
            // config["num_layers_per_stack"]
            * tiny["num_layers_per_stack"]
        )
    # gpt_neo: its attention_layers as a list of [kinds, number of repetitions]
    if config.get("attention_types"):
        derived["attention_types"] = [[[kind], 1] for kind in tiny["attention_layers"]]
    return derived


def _yarn_positions(config: dict[str, Any], tiny: dict[str, Any]) -> dict[str, int]:
    """Return the positions of a tiny config that YaRN reaches, if the published config names them.

    They are YaRN's factor times the positions before YaRN. transformers warns about other numbers.
    """
    most, original = "max_position_embeddings", "original_max_position_embeddings"
    for key in ("rope_scaling", "rope_parameters"):
        published, small = config.get(key) or {}, tiny.get(key) or {}
        # Some models have a separate scaling for each type of layer.
        kinds = [kind for kind, own in published.items() if isinstance(own, dict)]
        for rope, own in ((published, small), *((published[kind], small[kind]) for kind in kinds)):
            factor = rope.get("factor") or 0
            is_yarn = "yarn" in (rope.get("rope_type"), rope.get("type"))
            if is_yarn and config.get(most) == factor * (rope.get(original) or 0):
                return {most: int(factor * own[original])}
    return {}


def _derived_per_layer(
    config: dict[str, Any], tiny: dict[str, Any], kept: list[int]
) -> dict[str, Any]:
    """Return the tiny numbers of single layers, for example of sliding layers with wider heads.

    `kept` lists the layers of the full model. A number that a layer lacks is the model's number.
    """
    full = {int(layer): own for layer, own in config["per_layer_config"].items()}
    return {
        layer: own
        | {
            key: value
            for key, value in _derived_values(config | full[kept[int(layer)]], tiny | own).items()
            if key in config and value != (tiny | own)[key]
        }
        for layer, own in tiny["per_layer_config"].items()
    }


def _merge_block_pairs(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config that counts layers, if it counts an attention and its MLP as two blocks.

    Dory's config.json does so. Its class reads both forms.
    """
    blocks = config.get("layer_types") or []
    if not blocks or {*blocks[1::2]} != {"mlp"} or "mlp" in blocks[::2]:
        return config
    counts = {
        key: config[key] // 2
        for key in (*NUM_LAYERS_KEYS, *SECTION_KEYS)
        if isinstance(config.get(key), int)
    }
    return config | counts | {"layer_types": blocks[::2]}


def _count_layers(config: dict[str, Any]) -> int:
    """Return the number of layers, or 0 if the config's key for this number is unknown here."""
    layers = _first_key(config, NUM_LAYERS_KEYS)
    return config[layers] if layers else len(config.get("layers_block_type") or ())


def _first_key(config: dict[str, Any], names: tuple[str, ...]) -> str:
    return next((name for name in names if config.get(name)), "")


def _proportions(config: dict[str, Any], vocab_size: int) -> dict[str, Callable[[int], int]]:
    """Return, for each kind of number, a function that scales the number down.

    1 stays 1, because a single head or group is also a trait.
    """
    heads, key_values, head_dim = (
        _first_key(config, names) for names in (NUM_HEADS_KEYS, NUM_KV_HEADS_KEYS, HEAD_DIM_KEYS)
    )
    hidden = config[_first_key(config, HIDDEN_SIZE_KEYS)]
    queries = config[heads] if heads else 4
    keys = config[key_values] if key_values else queries
    dim = config[head_dim] if head_dim else hidden // queries
    latent = config.get("qk_nope_head_dim")

    tiny_queries = 4 * min(queries // keys, 8) if keys > 1 else 4
    tiny_dim = 16 if tiny_queries <= 8 else 8 if tiny_queries <= 16 else 4
    wide = latent or dim * queries == hidden
    tiny_hidden = tiny_dim * tiny_queries // (1 if wide else 2)
    linear_heads, linear_dim = _linear_attention(config)
    state_heads = _state_heads(config)

    return {
        "vocabulary": lambda value: vocab_size if value > 256 else value,
        "heads": _scale(tiny_queries, queries),
        "key-value heads": _scale(4 if keys > 1 else 1, keys),
        "head_dim": _cap(16) if latent else _scale(tiny_dim, dim),
        "linear heads": _scale(4, linear_heads),
        "linear head_dim": _scale(16, linear_dim),
        "state heads": _cap(4),
        "state head_dim": _scale(tiny_hidden * state_heads, hidden * min(state_heads, 4)),
        # the size of a kernel or a patch does not change
        "hidden": lambda value: value if value <= 32 else _scale(tiny_hidden, hidden)(value),
        "intermediate": _cap(tiny_hidden if _is_expert_sized(config) else 2 * tiny_hidden),
    }


def _scale(tiny: int, real: int) -> Callable[[int], int]:
    """Return a function that scales a number in the ratio `tiny` / `real`. The result is even."""
    return lambda value: value if value == 1 else max(2, value * tiny // real // 2 * 2)


def _cap(most: int) -> Callable[[int], int]:
    return lambda value: min(value, most)


def _linear_attention(config: dict[str, Any]) -> tuple[int, int]:
    """Return the fewest heads and the smallest head_dim of linear attention, or 1 without it."""
    heads = [config.get(f"linear_num_{part}_heads") for part in ("key", "value")]
    dims = [config.get(f"linear_{part}_head_dim") for part in ("key", "value")]
    return min(filter(None, heads), default=1), min(filter(None, dims), default=1)


def _state_heads(config: dict[str, Any]) -> int:
    """Return the number of heads of a state space, or 1 without a state space."""
    names = r"mamba_n_heads|mamba_num_heads|n_mamba_heads"
    return next((value for key, value in config.items() if re.fullmatch(names, key)), 1)


def _is_expert_sized(config: dict[str, Any]) -> bool:
    """Return True if intermediate_size is the width of every expert."""
    mlp = config | (config.get("ffn_config") or {})
    mixture = any(
        re.fullmatch(EXPERT_COUNT_KEYS, key) and (number or 0) > 1 for key, number in mlp.items()
    )
    return mixture and not config.get("moe_intermediate_size")


def _shrink_value(
    key: str, value: Any, proportions: dict[str, Callable[[int], int]], outer: str = ""
) -> Any:
    """Shrink the numbers in a value by the rule in SHRINK_RULES for its key.

    If no rule matches, the rule for the enclosing key applies.
    """
    if isinstance(value, dict):
        if _count_layers(value) and _first_key(
            value, HIDDEN_SIZE_KEYS
        ):  # a tower next to the language model
            return shrink(value, proportions["vocabulary"](1 << 20))
        return {
            inner: _shrink_value(str(inner), its, proportions, key) for inner, its in value.items()
        }
    # longrope: one factor for each pair of rotated dimensions in a head
    if key in ("long_factor", "short_factor"):
        return value[: proportions["head_dim"](2 * len(value)) // 2]
    if isinstance(value, list):
        return [_shrink_value(key, its, proportions, outer) for its in value]
    if type(value) is not int or value <= 0:
        return value
    rule = next(
        (
            rule
            for name in (key, outer)
            for pattern, rule in SHRINK_RULES.items()
            if re.fullmatch(pattern, name)
        ),
        None,
    )
    if rule is None:
        return value
    return min(value, rule) if isinstance(rule, int) else proportions[rule](value)


# Counts of layers before, in and after a part that runs several times.
SECTION_KEYS = ("n_input_layers", "n_recurrent_layers", "n_output_layers")
# Counts of first or last layers that are of a different kind, and keys whose lists contain layer
# numbers.
LEADING_LAYER_COUNTS = (
    "first_k_dense_replace",
    "num_dense_layers",
    "moe_layer_start_index",
    "max_window_layers",
    # the layers before a part that runs several times, and the layers up to its end
    "n_input_layers",
    "loop_layer_index_start",
    "loop_layer_index_end",
)
TRAILING_LAYER_COUNTS = ("num_kv_shared_layers", "n_output_layers")
LAYER_INDEX_LISTS = r".*(_layers|_idxs|_indices|_ids)"


def _select_layers(config: dict[str, Any]) -> list[int]:
    """Return the numbers of four layers, or of up to eight if there are more kinds.

    There is one layer of each kind. The other layers preserve the frequencies of the kinds.
    """
    count = _count_layers(config)
    kinds = [
        repr([_layer_value(key, value, layer, count) for key, value in config.items()])
        for layer in range(count)
    ]
    kept = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:8]
    # zamba: all layers of this kind share one block, so two layers are needed
    if "hybrid" in (config.get("layers_block_type") or ()):
        kept += [
            layer for layer, kind in enumerate(config["layers_block_type"]) if kind == "hybrid"
        ][1:2]
    while len(kept) < min(4, count):
        taken = [kinds[layer] for layer in kept]
        left = [layer for layer in range(count) if layer not in kept]
        kept.append(
            max(left, key=lambda layer: kinds.count(kinds[layer]) / (taken.count(kinds[layer]) + 1))
        )
    return sorted(kept)


def _layer_value(key: str, value: Any, layer: int, count: int) -> Any:
    """Return the part of a key's value about one of `count` layers, or None if all are alike."""
    if not value:
        return None
    if key in LEADING_LAYER_COUNTS:
        return layer < value
    if key in TRAILING_LAYER_COUNTS:
        return layer >= count - value
    if key == "moe_layer_end_index":
        return layer <= value % count  # -1 is the last layer
    if key == "per_layer_config":
        return {int(number): own for number, own in value.items()}.get(layer)
    if _is_layer_index_list(key, value, count):
        return layer in value
    listed = isinstance(value, list) or key == "hybrid_override_pattern"  # one letter per layer
    return value[layer] if listed and len(value) == count else None


def _restrict_to_layers(key: str, value: object, layers: list[int], count: int) -> Any:
    """Reduce a value about `count` layers to the given `layers`."""
    if key in NUM_LAYERS_KEYS and value == count:
        return len(layers)
    says = [_layer_value(key, value, layer, count) for layer in layers]
    if key == "per_layer_config" and value:
        return {str(layer): own for layer, own in enumerate(says) if own}
    if all(say is None for say in says):
        return value
    if isinstance(value, int):
        return sum(says) - (key == "moe_layer_end_index")
    if isinstance(value, str):
        return "".join(says)
    return (
        [layer for layer, named in enumerate(says) if named]
        if _is_layer_index_list(key, value, count)
        else says
    )


def _is_layer_index_list(key: str, value: object, count: int) -> bool:
    return (
        isinstance(value, list)
        and bool(re.fullmatch(LAYER_INDEX_LISTS, key))
        and all(type(number) is int for number in value)
        and value == sorted({*value} & {*range(count)})
    )
