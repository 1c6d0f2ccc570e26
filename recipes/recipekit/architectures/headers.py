"""Check of a model's file headers against its config.json, based on well-known tensor names.

A plan compares the headers without torch, in a fraction of a second. All other families and tensors
are compared when the model is built without weights (model/weights.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..spec.errors import ConfigError, config_error
from .safetensors_files import Entry

# keys of config.json
NEXT_TOKEN_LAYERS = re.compile(r"num_nextn_predict_layers|(num_)?mtp_(num_)?(hidden_)?layers")


@dataclass(frozen=True)
class Family:
    """The tensor names in a family's files, with the keys in config.json for their dimensions."""

    base: str  # prefix of all names, which some files omit
    layers: str  # list of layers
    num_layers: str  # key of config.json
    # name (a layer's name without its number) -> products of keys, as in "heads*head_dim"
    shapes: Mapping[str, tuple[str, ...]]


LIKE_LLAMA = Family(
    base="model.",
    layers="layers",
    num_layers="num_hidden_layers",
    shapes={
        "embed_tokens.weight": ("vocab_size", "hidden_size"),
        "norm.weight": ("hidden_size",),
        "layers.input_layernorm.weight": ("hidden_size",),
        "layers.self_attn.q_proj.weight": ("num_attention_heads*head_dim", "hidden_size"),
        "layers.self_attn.k_proj.weight": ("num_key_value_heads*head_dim", "hidden_size"),
        "layers.self_attn.v_proj.weight": ("num_key_value_heads*head_dim", "hidden_size"),
        "layers.mlp.gate_proj.weight": ("intermediate_size", "hidden_size"),
        "layers.mlp.down_proj.weight": ("hidden_size", "intermediate_size"),
    },
)
GPT2 = Family(
    base="transformer.",
    layers="h",
    num_layers="n_layer",
    shapes={
        "wte.weight": ("vocab_size", "n_embd"),
        "wpe.weight": ("n_positions", "n_embd"),
        "h.ln_1.weight": ("n_embd",),
        "h.mlp.c_fc.weight": ("n_embd", "n_inner"),
    },
)
BERT = Family(
    base="bert.",
    layers="encoder.layer",
    num_layers="num_hidden_layers",
    shapes={
        "embeddings.word_embeddings.weight": ("vocab_size", "hidden_size"),
        "embeddings.position_embeddings.weight": ("max_position_embeddings", "hidden_size"),
        "embeddings.token_type_embeddings.weight": ("type_vocab_size", "hidden_size"),
        "encoder.layer.attention.self.query.weight": ("hidden_size", "hidden_size"),
        "encoder.layer.intermediate.dense.weight": ("intermediate_size", "hidden_size"),
    },
)
FAMILIES = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "smollm3", "granite", "helium"),
        LIKE_LLAMA,
    ),
    "gpt2": GPT2,
    "bert": BERT,
}
# families without head_dim in config.json: hidden_size / heads
HEAD_DIM_OF_HIDDEN = ("granite", "llama", "mistral", "qwen2", "smollm3")


def check_headers(model_config: dict[str, Any], entries: Mapping[str, Entry], name: str) -> None:
    """Raise `ConfigError` if the files of the model `name` contradict its config.json.

    The check compares the number of layers and the shapes. A dimension is compared only if
    config.json contains all of its keys.
    """
    if (family := FAMILIES.get(model_config.get("model_type", ""))) is None:
        return
    layer = re.compile(rf"{re.escape(family.layers)}\.(\d+)\.")
    own = {key: key.removeprefix(family.base) for key in entries}
    numbers = {int(found[1]) for short in own.values() if (found := layer.match(short))}
    _check_layer_count(model_config, family, max(numbers, default=-1) + 1, name)

    stated = _dimensions(model_config)
    for key, short in own.items():
        products = family.shapes.get(layer.sub(f"{family.layers}.", short, count=1), ())
        sizes = [_product(words, stated) for words in products]
        due = [size for size in sizes if size is not None]
        shape = entries[key].shape
        if due and len(due) == len(sizes) and list(shape) != due:
            raise shape_mismatch_error(name, key, list(shape), due)


def _dimensions(model_config: dict[str, Any]) -> dict[str, int]:
    """Return the positive integers in a config.json, and numbers that a family derives from them.

    The model's constructor rejects other values and names their key.
    """
    stated = {key: value for key, value in model_config.items() if type(value) is int and value > 0}
    kind = model_config.get("model_type")
    if (
        kind in HEAD_DIM_OF_HIDDEN
        and model_config.get("head_dim") is None
        and stated.get("num_attention_heads")
    ):
        stated["head_dim"] = stated.get("hidden_size", 0) // stated["num_attention_heads"]
    if kind == "gpt2" and "n_embd" in stated:
        stated.setdefault("n_inner", 4 * stated["n_embd"])
    return stated


def _product(words: str, stated: Mapping[str, int]) -> int | None:
    value = 1
    for word in words.split("*"):
        if word not in stated:
            return None
        value *= stated[word]
    return value


def _check_layer_count(
    model_config: dict[str, Any], family: Family, num_in_files: int, name: str
) -> None:
    count = model_config.get(family.num_layers)
    further = any(NEXT_TOKEN_LAYERS.fullmatch(key) and value for key, value in model_config.items())
    if (
        type(count) is not int
        or count < 1
        or num_in_files in (0, count)
        or (further and num_in_files > count)
    ):
        return
    place = f"{family.base}{family.layers}"
    if num_in_files > count:
        raise too_many_layers_error(name, place, num_in_files, count, family.num_layers)
    rule = (
        f"its files contain {num_in_files} layers in {place}, but its config.json specifies {count}"
    )
    raise config_error(
        f"model = {name}",
        rule,
        f'write "{family.num_layers}": {num_in_files} in its config.json, or give the files of all'
        f" {count} layers",
    )


def too_many_layers_error(
    name: str, place: str, num_in_files: int, count: int, key: str
) -> ConfigError:
    """Return the error for files that contain more layers in `place` than config.json states.

    `key` is the key of the number in config.json, or "" if unknown.
    """
    known = (
        f'write "{key}": {num_in_files} in its config.json'
        if key
        else "use the config.json of these files"
    )
    numbers = f"{count} to {num_in_files - 1}" if num_in_files - count > 1 else f"{count}"
    rule = (
        f"its files contain {num_in_files} layers in {place}, but its config.json specifies {count}"
    )
    return config_error(
        f"model = {name}",
        rule,
        f"{known}. To train the shorter model, delete {place}.{numbers} from the files",
    )


def shape_mismatch_error(
    name: str, key: str, file_shape: list[int], config_shape: list[int], more: str = ""
) -> ConfigError:
    """Return the error for a tensor whose shape in the files differs from config.json.

    `more` is appended to the fix.
    """
    rule = f"{key} is {file_shape} in its files but {config_shape} in its config.json"
    return config_error(
        f"model = {name}", rule, f"use files and a config.json of the same model{more}"
    )
