"""The shape of a model before any of it exists: its config.json as a dict, whether recipes can train it, and a tiny copy that keeps its traits."""

import functools
import json
import os
import re
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .recipe import Recipe
from .refusal import Problem, Refusal, refuse

SHIPPED = Path(__file__).parent / "architectures"


def model_config(recipe: Recipe) -> dict[str, Any] | None:
    """The model's config.json: from its folder, the shipped architectures, or the local hub cache; None if none has it.

    Raises `Refusal` for a folder without a readable config.json, and for a model that recipes cannot train.
    """
    folder = Path(recipe.model)
    if folder.is_dir():
        return read_config(folder / "config.json", recipe.model)
    if recipe.model.startswith((".", "/", "~")):
        raise refuse(f"model = {recipe.model}", "is no folder on this machine", "give a folder that holds config.json, or a hub id ORG/NAME")
    cached = sorted(_hub_cache(recipe.model).glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime)
    if cached:
        return read_config(cached[-1], recipe.model)
    shipped = SHIPPED / (recipe.model.replace("/", "--") + ".json")
    return read_config(shipped, recipe.model) if shipped.exists() else None


# Families among the causal language models of transformers that attend both ways, and the key of config.json with which they look back only.
READS_AHEAD = {
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "reformer", "rembert"),
            *("roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
        ),
        "is_decoder",
    ),
    "xlm": "causal",
    "cpmant": "",
    "xlnet": "",
}
OTHERS = "use a causal language model of recipes/SUPPORT.md"


def read_config(path: Path, model: str) -> dict[str, Any]:
    """A config.json, of the model that the user names `model`. Raises `Refusal` if it cannot be read, or is of a model that recipes cannot train."""
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _no_config(path.parent, model) from None
    except OSError as error:
        raise refuse(str(path), f"cannot be read: {error.strerror}", "make it readable for this user") from None
    except ValueError as error:  # of JSON, or of UTF-8
        raise refuse(str(path), f"is not JSON: {error}", "download the model again") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise refuse(str(path), "names no model_type", "give the config.json of a transformers model")
    if problems := _untrainable(config, f"model = {model}"):
        raise Refusal(problems)
    return config


def _no_config(folder: Path, model: str) -> Refusal:
    if not folder.is_dir():
        return refuse(f"model = {model}", "is no folder on this machine", "give a folder that holds config.json")
    if gguf := sorted(folder.glob("*.gguf")):
        rule = f"the folder holds {gguf[0].name}, and GGUF is a format for inference, and no config.json"
        return refuse(f"model = {model}", rule, "use the safetensors files of the model that it was made from")
    if (folder / "adapter_config.json").exists():
        return refuse(f"model = {model}", "the folder holds an adapter, and no config.json", "give the base model, or merge the adapter into it and save that")
    return refuse(f"model = {model}", "the folder holds no config.json", "give the folder that save_pretrained wrote")


def _untrainable(config: dict[str, Any], where: str) -> list[Problem]:
    """Why recipes cannot train a model, as far as its config.json tells."""
    kind, problems, types = config["model_type"], [], causal_types()
    auto_map = config["auto_map"] if isinstance(config.get("auto_map"), dict) else {}
    own = str(auto_map.get("AutoModelForCausalLM") or next(iter(auto_map.values()), ""))  # the class that replaces one of transformers
    same = auto_map.get("AutoModelForCausalLM") is None or own.rpartition(".")[2].lower() == types.get(kind, "").lower()
    masked = any(str(name).endswith("ForMaskedLM") for name in config.get("architectures") or ())
    switch = READS_AHEAD.get(kind)
    if own and (kind not in types or not same):
        rule = f"its auto_map names code of the model's own ({own}), which recipes never run"
        problems.append(Problem(where, rule, f"{OTHERS}, whose class is in transformers itself"))
    elif config.get("is_encoder_decoder"):
        problems.append(Problem(where, f"a {kind} is an encoder-decoder, and recipes train decoders alone", OTHERS))
    elif (kind not in types and masked) or (switch is not None and not config.get(switch)):
        fix = f'{OTHERS}; a {kind} that looks back only says "{switch}": true in its config.json' if switch else OTHERS
        problems.append(Problem(where, f"a {kind} reads the tokens that it should predict", fix))
    elif kind not in types:
        problems.append(Problem(where, f"a {kind} is no causal language model that transformers {version('transformers')} knows", OTHERS))
    text = config.get("text_config")
    for block in (config, text if isinstance(text, dict) else {}):
        if quantised := block.get("quantization_config") or block.get("compression_config"):
            method = (quantised.get("quant_method") or "bitsandbytes") if isinstance(quantised, dict) else quantised  # that one left its name out at first
            fix = "use the unquantised model; if the weights in its files are whole, delete the block"
            problems.append(Problem(where, f"is quantised: its config.json has a quantization_config of {method}", fix))
    return problems


@functools.cache
def causal_types() -> dict[str, str]:
    """model_type -> class of every causal language model of the installed transformers, read from its source: to import it takes seconds."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None, "make setup installs transformers"
    source = (Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py").read_text()
    table = re.search(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict\((.*?)^\)", source, re.DOTALL | re.MULTILINE)
    assert table is not None, "transformers 5.22.2 has it"
    return dict(re.findall(r'\(\s*"([^"]+)",\s*"([^"]+)",?\s*\)', table[1]))


# What the families call the same number, the commonest name first.
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "num_decoder_layers", "num_blocks")
HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "decoder_attention_heads", "num_decoder_attention_heads", "attention_heads")
KEY_VALUES = ("num_key_value_heads", "num_kv_heads")
HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model", "emb_dim")
HEAD_DIM = ("head_dim", "dim_head", "d_head", "kv_channels", "attention_head_size")

# How the numbers of a tiny model fall: pattern of the key -> the largest value, or the sort that `_proportions` knows. First match wins.
EXPERTS = r"(moe_)?num(_local)?_experts|n_routed_experts"
RULES = {
    # Experts: four, of which two serve a token, in two groups.
    EXPERTS: 4,
    r"num_experts_per_tok(en)?|moe_k|moe_top_?k|top_k_experts|n_group|num_expert_group|zero_expert_num": 2,
    r"topk_group": 1,
    r"moe_.*intermediate_size|shared_(expert_)?intermediate_size|expert_ffn_hidden_size": 64,
    # What a token sees: less than a tiny row, so that it matters.
    r"(.*_)?window(_size)?|local_attention|.*chunk_size": 32,
    r".*chunk_length": 16,
    r"index_topk|indexer_budget|compress_rates": 8,
    r"(index_)?block_size|indexer_compress_ratio": 4,
    r"index_topk_blocks|num_random_blocks": 1,
    # Low ranks, the indexer, state spaces.
    r"q_lora_rank|index_head_dim|router_hidden_size": 32,
    r".*_(low)?rank|laurel_rank|hidden_size_per_layer_input|(.*_)?state(_size)?|linear_head_dim": 16,
    r"index_n_heads|linear_num_heads": 4,
    r"o_groups|n_groups|mamba_n_?groups": 2,
    r"rel_extent": 64,
    # Positions and vocabularies.
    r"original_max_position_embeddings": 512,
    r".*max.*_positions?(_embeddings)?|n_positions|n_ctx|max_seq_len|model_max_length|context_length": 2048,
    r".*vocab_size.*": "vocabulary",
    # Every how many layers a kind returns, and the layers of other stacks than the decoder.
    r".*_(interval|pattern|period|every_n_layers|step)": 4,
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
    r"(.*_)?intermediate_size.*|(.*_)?ffn_(dim|hidden_size)|n_inner|d_inner|dff|dim_ff|feed_forward_size": "intermediate",
    r".*(_size|_dim|_width|_d_ssm|_channels?)|n_embe?d|d_model": "hidden",
}

# Families to which a token id cannot be None: they count positions from it, or their config class is strict about it.
ROBERTAS = ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod")
NEEDS_ID = {
    "pad_token_id": (*ROBERTAS, "emu3_text_model", "modernbert-decoder", "prophetnet", "reformer", "xlm"),
    "bos_token_id": ("cwm", "emu3_text_model", "mllama_text_model", "modernbert-decoder"),
    "eos_token_id": ("emu3_text_model", "modernbert-decoder"),
}


def shrink(config: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """A few hundred thousand parameters of the same class, which tp 2 and 4 can cut: numbers fall, structural traits stay.

    Kept: tied embeddings, the ratio of query to key-value heads (up to 8), a head_dim that is not hidden_size / heads,
    windows, every kind of layer, experts, low ranks, soft caps, rotary type. Raises `Refusal` for a config that names its
    layers or its width in a way not known here.
    """
    count = _count_layers(config)
    if unknown := [names[0] for value, names in ((count, LAYERS), (_name(config, HIDDEN), HIDDEN)) if not value]:
        rule = f"cannot shrink a {config['model_type']}: its config.json has no {', '.join(unknown)}"
        raise refuse("--tiny", rule, "make a small model of that class, save it with save_pretrained, and give the folder with --model, without --tiny")
    kept = _kept_layers(config)
    proportions = _proportions(config, vocab_size)
    tiny = {key: _fall(key, _cut(key, value, kept, count), proportions) for key, value in config.items()}
    tiny |= {key: value for key, value in _derived(config, tiny).items() if key in config}
    tiny["vocab_size"] = vocab_size
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        tiny[key] = 1 if config["model_type"] in NEEDS_ID[key] else None  # those of the real vocabulary
    return tiny


def _derived(config: dict[str, Any], tiny: dict[str, Any]) -> dict[str, Any]:
    """The values that repeat others of a tiny config in another form."""
    derived: dict[str, Any] = {}
    if config.get("qk_nope_head_dim"):  # latent attention: a head is made of two parts
        derived |= {"qk_head_dim": tiny["qk_nope_head_dim"] + tiny["qk_rope_head_dim"], "head_dim": tiny["qk_rope_head_dim"]}
    if config.get("num_layers_per_stack"):  # hrm_text runs its stacks several times, and counts every run of a layer
        derived["num_hidden_layers"] = config["num_hidden_layers"] // config["num_layers_per_stack"] * tiny["num_layers_per_stack"]
    if config.get("attention_types"):  # gpt_neo: its attention_layers as a list of [kinds, how often]
        derived["attention_types"] = [[[kind], 1] for kind in tiny["attention_layers"]]
    return derived


def _count_layers(config: dict[str, Any]) -> int:
    """The number of layers; 0 if the config has it in a way not known here."""
    layers = _name(config, LAYERS)
    return config[layers] if layers else len(config.get("layers_block_type") or ())


def _name(config: dict[str, Any], names: tuple[str, ...]) -> str:
    return next((name for name in names if config.get(name)), "")


def _proportions(config: dict[str, Any], vocab_size: int) -> dict[str, Callable[[int], int]]:
    """How a number of each sort falls. 1 stays 1: a single head or group is a trait too."""
    heads, key_values, hidden, head_dim = (_name(config, names) for names in (HEADS, KEY_VALUES, HIDDEN, HEAD_DIM))
    queries = config[heads] if heads else 4
    keys = config[key_values] if key_values else queries
    tiny_queries = 4 * min(queries // keys, 8) if keys > 1 else 4
    tiny_dim = 16 if tiny_queries <= 8 else 8 if tiny_queries <= 16 else 4
    dim = config[head_dim] if head_dim else config[hidden] // queries
    latent = config.get("qk_nope_head_dim")
    wide = latent or dim * queries == config[hidden]
    tiny_hidden = tiny_dim * tiny_queries // (1 if wide else 2)
    linear_heads = min((config[f"linear_num_{part}_heads"] for part in ("key", "value") if config.get(f"linear_num_{part}_heads")), default=1)
    linear_dim = min((config[f"linear_{part}_head_dim"] for part in ("key", "value") if config.get(f"linear_{part}_head_dim")), default=1)
    state_heads = next((value for key, value in config.items() if re.fullmatch(r"mamba_n_heads|mamba_num_heads|n_mamba_heads", key)), 1)

    mlp = config | (config.get("ffn_config") or {})
    mixture = any(re.fullmatch(EXPERTS, key) and (number or 0) > 1 for key, number in mlp.items())
    expert_sized = mixture and not config.get("moe_intermediate_size")  # every expert is so wide as intermediate_size says

    def scale(tiny: int, real: int) -> Callable[[int], int]:
        return lambda value: value if value == 1 else max(2, value * tiny // real // 2 * 2)

    def cap(most: int) -> Callable[[int], int]:
        return lambda value: min(value, most)

    return {
        "vocabulary": lambda value: vocab_size if value > 256 else value,
        "heads": scale(tiny_queries, queries),
        "key-value heads": scale(4 if keys > 1 else 1, keys),
        "head_dim": cap(16) if latent else scale(tiny_dim, dim),
        "linear heads": scale(4, linear_heads),
        "linear head_dim": scale(16, linear_dim),
        "state heads": cap(4),
        "state head_dim": scale(tiny_hidden * state_heads, config[hidden] * min(state_heads, 4)),
        "hidden": lambda value: value if value <= 32 else scale(tiny_hidden, config[hidden])(value),  # a kernel or a patch stays
        "intermediate": cap(tiny_hidden if expert_sized else 2 * tiny_hidden),
    }


def _fall(key: str, value: Any, proportions: dict[str, Callable[[int], int]], outer: str = "") -> Any:
    """The value with the numbers in it as small as RULES say of its key; of the key around it if none speaks of it."""
    if isinstance(value, dict):
        if _count_layers(value) and _name(value, HIDDEN):  # of a tower beside the language model
            return shrink(value, proportions["vocabulary"](1 << 20))
        return {inner: _fall(str(inner), its, proportions, key) for inner, its in value.items()}
    if key in ("long_factor", "short_factor"):  # of longrope: one for each pair of a head's rotated dimensions
        return value[: proportions["head_dim"](2 * len(value)) // 2]
    if isinstance(value, list):
        return [_fall(key, its, proportions, outer) for its in value]
    if type(value) is not int or value <= 0:
        return value
    rule = next((rule for name in (key, outer) for pattern, rule in RULES.items() if re.fullmatch(pattern, name)), None)
    if rule is None:
        return value
    return min(value, rule) if isinstance(rule, int) else proportions[rule](value)


# Counts of the layers at the beginning or at the end that are of another kind, and lists that name layers by their number.
FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers")
LAST = ("num_kv_shared_layers",)
NUMBERED = r".*(_layers|_idxs|_indices|_ids)"


def _kept_layers(config: dict[str, Any]) -> list[int]:
    """The numbers of four layers, of up to eight if there are more kinds: one of each kind, and the others as frequent as before."""
    count = _count_layers(config)
    kinds = [repr([_of_layer(key, value, layer, count) for key, value in config.items()]) for layer in range(count)]
    kept = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:8]
    if "hybrid" in (config.get("layers_block_type") or ()):  # zamba: all layers of this kind share one block, so two of them
        kept += [layer for layer, kind in enumerate(config["layers_block_type"]) if kind == "hybrid"][1:2]
    while len(kept) < min(4, count):
        taken = [kinds[layer] for layer in kept]
        left = [layer for layer in range(count) if layer not in kept]
        kept.append(max(left, key=lambda layer: kinds.count(kinds[layer]) / (taken.count(kinds[layer]) + 1)))
    return sorted(kept)


def _of_layer(key: str, value: Any, layer: int, count: int) -> Any:
    """What a key says of one of the `count` layers alone; None if it says the same of all."""
    if not value:
        return None
    if key in FIRST:
        return layer < value
    if key in LAST:
        return layer >= count - value
    if key == "moe_layer_end_index":
        return layer <= value % count  # -1 is the last
    if key == "per_layer_config":
        return {int(number): own for number, own in value.items()}.get(layer)
    if _names_layers(key, value, count):
        return layer in value
    listed = isinstance(value, list) or key == "hybrid_override_pattern"  # a letter for each layer
    return value[layer] if listed and len(value) == count else None


def _cut(key: str, value: Any, kept: list[int], count: int) -> Any:
    """The value for a model that has only the `kept` layers of `count`."""
    if key in LAYERS and value == count:
        return len(kept)
    says = [_of_layer(key, value, layer, count) for layer in kept]
    if key == "per_layer_config" and value:
        return {str(layer): own for layer, own in enumerate(says) if own}
    if all(say is None for say in says):
        return value
    if isinstance(value, int):
        return sum(says) - (key == "moe_layer_end_index")
    if isinstance(value, str):
        return "".join(says)
    return [layer for layer, named in enumerate(says) if named] if _names_layers(key, value, count) else says


def _names_layers(key: str, value: Any, count: int) -> bool:
    numbers = isinstance(value, list) and bool(re.fullmatch(NUMBERED, key)) and all(type(number) is int for number in value)
    return numbers and value == sorted({*value} & {*range(count)})


# Default configs of transformers 5.22.2 from which no model can be built and run, and what they lack.
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
QWEN4_INDEXER = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048, "indexer_compress_ratio": 64}
LACKING = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 500000.0}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": QWEN4_INDEXER},
    "qwen4_exp_text": QWEN4_INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
}


def default_config(model_type: str) -> Any:
    """The default config of a model type's language model, a `PreTrainedConfig`; that of the whole if the model is built from it alone."""
    from transformers import CONFIG_MAPPING

    return _language_config(CONFIG_MAPPING[model_type](**LACKING.get(model_type, {})))


def _language_config(whole: Any) -> Any:
    """The config of the language model in a `PreTrainedConfig`; that of the whole if the model is built from it alone."""
    text = whole.get_text_config(decoder=True)
    return text if text.model_type in causal_types() and text.model_type != whole.model_type else whole


def tiny_config(model_type: str, vocab_size: int) -> dict[str, Any]:
    """The config.json of a tiny model of a type that transformers knows, without the hub."""
    return tiny_copy(default_config(model_type), vocab_size)


def tiny_copy(config: Any, vocab_size: int) -> dict[str, Any]:
    """The config.json of a tiny copy of the language model in a `PreTrainedConfig`. Raises `Refusal` as `shrink` does."""
    config = _language_config(config)
    text = config.get_text_config(decoder=True)
    if text is config or "text_config" not in config.sub_configs:
        return shrink(config.to_dict(), vocab_size)
    return config.to_dict() | {"text_config": shrink(text.to_dict(), vocab_size)}  # the only part of it that the class takes


def is_local(recipe: Recipe) -> bool:
    """True if the model's files lie on this machine: a folder, or the local hub cache."""
    return Path(recipe.model).is_dir() or any(_hub_cache(recipe.model).glob("snapshots/*/config.json"))


def local_tokenizer(recipe: Recipe) -> Path | None:
    """The folder, or the .gguf file, that holds the tokenizer; None where it is made in code or comes from the hub.

    Raises `Refusal` for a folder that does not exist or holds none.
    """
    flag, name = ("--tokenizer", recipe.tokenizer) if recipe.tokenizer else ("--model", recipe.model)
    folder = Path(name).expanduser()
    if name == "bytes":
        return None
    if not folder.exists() and not is_hub_id(name):
        raise refuse(f"{flag} {name}", "there is no such folder, and it is not a hub id (ORG/NAME)", "check the path")
    if not folder.is_dir():
        return None
    if any(file for pattern in ("tokenizer*", "*.model", "vocab.*") for file in folder.glob(pattern)):
        return folder
    if gguf := sorted(folder.glob("*.gguf")):
        return gguf[0]
    raise refuse(f"{flag} {folder}", "the folder holds no tokenizer (tokenizer.json, ...)", "use --tokenizer with a hub id, a folder, or bytes")


def is_hub_id(name: str) -> bool:
    return not name.startswith((".", "/", "~")) and name.count("/") <= 1 and " " not in name


def _hub_cache(model: str) -> Path:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / ("models--" + model.replace("/", "--"))
