"""The headers of a model's files against its config.json, for families whose tensors have
well-known names.

A plan compares them without torch, in a fraction of a second. Other families, and all other
tensors, are compared when the model is built without weights (model/weights.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..spec.refusal import Refusal, refuse
from .safetensors_files import Entry

# keys of config.json
NEXT_TOKEN_LAYERS = re.compile(r"num_nextn_predict_layers|(num_)?mtp_(num_)?(hidden_)?layers")


@dataclass(frozen=True)
class Family:
    """Names of tensors in a family's files, with the keys of config.json whose values are their
    dimensions.
    """

    base: str  # prefix of all names, which some files leave out
    layers: str  # list of layers
    num_layers: str  # key of config.json
    # name, a layer's without its number -> products of keys, as in "heads*head_dim"
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
    """Raise `Refusal` if the files of the model `name` have another number of layers, or other
    shapes, than config.json.

    A dimension is compared if config.json states all its keys.
    """
    if (family := FAMILIES.get(model_config.get("model_type", ""))) is None:
        return
    layer = re.compile(rf"{re.escape(family.layers)}\.(\d+)\.")
    own = {key: key.removeprefix(family.base) for key in entries}
    numbers = {int(found[1]) for short in own.values() if (found := layer.match(short))}
    _check_layers(model_config, family, max(numbers, default=-1) + 1, name)

    stated = _dimensions(model_config)
    for key, short in own.items():
        products = family.shapes.get(layer.sub(f"{family.layers}.", short, count=1), ())
        sizes = [_product(words, stated) for words in products]
        due = [size for size in sizes if size is not None]
        shape = entries[key].shape
        if due and len(due) == len(sizes) and list(shape) != due:
            raise other_shape(name, key, list(shape), due)


def _dimensions(model_config: dict[str, Any]) -> dict[str, int]:
    """Return the positive whole numbers of a config.json, with the numbers that a family derives
    from others.

    The constructor of the model refuses other values by their key.
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


def _check_layers(model_config: dict[str, Any], family: Family, held: int, name: str) -> None:
    count = model_config.get(family.num_layers)
    further = any(NEXT_TOKEN_LAYERS.fullmatch(key) and value for key, value in model_config.items())
    if type(count) is not int or count < 1 or held in (0, count) or (further and held > count):
        return
    place = f"{family.base}{family.layers}"
    if held > count:
        raise more_layers(name, place, held, count, family.num_layers)
    rule = f"its files contain {held} layers in {place}, but its config.json specifies {count}"
    raise refuse(
        f"model = {name}",
        rule,
        f'write "{family.num_layers}": {held} in its config.json, or give the files of all {count}'
        " layers",
    )


def more_layers(name: str, place: str, held: int, count: int, key: str) -> Refusal:
    """Return the refusal of files with more layers in `place` than config.json states under `key`,
    "" if it is not known.
    """
    known = (
        f'write "{key}": {held} in its config.json' if key else "use the config.json of these files"
    )
    numbers = f"{count} to {held - 1}" if held - count > 1 else f"{count}"
    rule = f"its files contain {held} layers in {place}, but its config.json specifies {count}"
    return refuse(
        f"model = {name}",
        rule,
        f"{known}. To train the shorter model, delete {place}.{numbers} from the files",
    )


def other_shape(name: str, key: str, held: list[int], due: list[int], more: str = "") -> Refusal:
    """Return the refusal of a tensor that has another shape than config.json gives it; `more` ends
    the fix.
    """
    rule = f"{key} is {held} in its files but {due} in its config.json"
    return refuse(f"model = {name}", rule, f"use files and a config.json of the same model{more}")
