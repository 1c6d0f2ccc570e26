"""Rules for the keys in a model's files, tested on the keys alone.

The rules decide which parameter a key belongs to, which keys are unused, and which are errors.
"""

import functools
import json
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recipekit.architectures import families
from recipekit.model import file_keys
from recipekit.model.empty import empty_model
from recipekit.model.file_keys import (
    Affix,
    find_stored,
    foreign_affix,
    refuse_affix,
    tied_names,
    ties_embeddings,
    untied_names,
    unused_keys,
)
from recipekit.parallel.blueprint import PublishedTensor
from recipekit.spec.errors import ConfigError
from torch import nn
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
)


@functools.cache
def model_of(kind: str, task: str = "pretrain", auto_class: str = "AutoModelForCausalLM") -> Any:
    """Return a tiny model on the meta device, which callers must not change."""
    return empty_model(families.tiny_config(kind, 264, task), "eager", "X", auto_class=auto_class)


# Keys of parameters
# -------------------------------------------------------------------------------------------------

EXPERTS = [
    f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
    for layer in (1, 0)
    for expert in (10, 9, 0)
    for part in ("up", "gate")
]


def converter(*operations: Any) -> WeightConverter:
    sources = [f"mlp.experts.*.{part}.weight" for part in ("gate", "up")]
    return WeightConverter(
        source_patterns=sources, target_patterns="mlp.experts.both", operations=list(operations)
    )


@pytest.mark.parametrize("dim", [1, 2])
def test_experts_are_joined_in_the_order_of_the_sources_and_of_their_numbers(
    monkeypatch: pytest.MonkeyPatch, dim: int
) -> None:
    monkeypatch.setattr(
        file_keys,
        "get_model_conversion_mapping",
        lambda model: [converter(MergeModulelist(dim=0), Concatenate(dim=dim))],
    )
    found = find_stored(model_of("llama"), [*EXPERTS, "model.norm.weight", "other.weight"])
    for layer in (0, 1):
        parts = tuple(
            tuple(
                f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight" for expert in (0, 9, 10)
            )
            for part in ("gate", "up")
        )
        assert found[f"model.layers.{layer}.mlp.experts.both"] == PublishedTensor(
            parts, stacked=True, dim=dim
        )
    assert found["model.norm.weight"] == PublishedTensor((("model.norm.weight",),)) and found[
        "other.weight"
    ] == PublishedTensor((("other.weight",),))
    assert len(found) == 4


def test_one_matrix_of_each_expert_is_stacked_in_the_first_dimension(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        file_keys, "get_model_conversion_mapping", lambda model: [converter(MergeModulelist(dim=0))]
    )
    (stored,) = find_stored(
        model_of("llama"),
        ["model.layers.0.mlp.experts.1.up.weight", "model.layers.0.mlp.experts.0.up.weight"],
    ).values()
    assert stored == PublishedTensor(
        (("model.layers.0.mlp.experts.0.up.weight", "model.layers.0.mlp.experts.1.up.weight"),),
        stacked=True,
        dim=0,
    )


@pytest.mark.parametrize(
    ("operations", "named"),
    [
        ((MergeModulelist(dim=1),), "MergeModulelist"),
        ((MergeModulelist(dim=1), Concatenate(dim=1)), "MergeModulelist, Concatenate"),
        ((Concatenate(dim=0),), "Concatenate"),
        ((MergeModulelist(dim=0), Transpose(0, 1)), "MergeModulelist, Transpose"),
        (
            (MergeModulelist(dim=0), Concatenate(dim=1), Transpose(0, 1)),
            "MergeModulelist, Concatenate, Transpose",
        ),
    ],
)
def test_another_form_of_the_files_is_refused_with_its_operations(
    monkeypatch: pytest.MonkeyPatch, operations: Any, named: str
) -> None:
    monkeypatch.setattr(
        file_keys, "get_model_conversion_mapping", lambda model: [converter(*operations)]
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"^model = X: its files hold model\.layers\.1\.mlp\.experts\.both in a form that needs"
            rf" {named}\. Load and save it once"
        ),
    ):
        find_stored(model_of("llama"), EXPERTS)


def test_a_renaming_that_takes_the_new_name_is_no_conversion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A key that already is a parameter's name is kept, even if a conversion rule matches it."""
    renaming = WeightRenaming(source_patterns=r"model\.(old_)?norm", target_patterns="model.norm")
    monkeypatch.setattr(file_keys, "get_model_conversion_mapping", lambda model: [renaming])
    assert find_stored(model_of("llama"), ["model.old_norm.weight"]) == {
        "model.norm.weight": PublishedTensor((("model.old_norm.weight",),))
    }
    taken = WeightConverter(
        source_patterns="model.norm.weight",
        target_patterns="other",
        operations=[MergeModulelist(dim=0)],
    )
    monkeypatch.setattr(file_keys, "get_model_conversion_mapping", lambda model: [taken])
    assert find_stored(model_of("llama"), ["model.norm.weight"]) == {
        "model.norm.weight": PublishedTensor((("model.norm.weight",),))
    }


def test_tied_and_separated_names(tmp_path: Path) -> None:
    config = families.tiny_config("llama", 264)
    tied, untied = (empty_model(config | {"tie_word_embeddings": on}) for on in (True, False))
    names = {"lm_head.weight": "model.embed_tokens.weight"}
    assert tied_names(tied) == names and tied_names(untied) == {}
    for on, model, wanted in (
        (True, untied, names),
        (True, tied, {}),
        (False, untied, {}),
        (False, tied, {}),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": on}))
        assert untied_names(model, tmp_path / "config.json") == wanted
    assert untied_names(untied, tmp_path / "no.json") == {}
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    untied._tied_weights_keys = None  # type: ignore[assignment]
    assert untied_names(untied, tmp_path / "config.json") == {}


def test_a_config_ties_if_one_of_its_parts_does() -> None:
    part = SimpleNamespace(tie_word_embeddings=True)
    for config, wanted in (
        (None, False),
        (SimpleNamespace(), False),
        (part, True),
        (SimpleNamespace(tie_word_embeddings=False, sub_configs={"text": 1}, text=part), True),
        (
            SimpleNamespace(tie_word_embeddings=False, sub_configs={"a": 1, "text": 1}, text=part),
            True,
        ),
        (
            SimpleNamespace(
                tie_word_embeddings=False,
                sub_configs={"text": 1},
                text=SimpleNamespace(tie_word_embeddings=False),
                other=part,
            ),
            False,
        ),
    ):
        assert ties_embeddings(config) is wanted  # type: ignore[arg-type]


# Unused keys
# --------------------------------------------------------------------------------------------------


def unused(
    keys: dict[str, list[int]],
    kind: str = "llama",
    found: Any = None,
    unread: Any = frozenset(),
    **which: str,
) -> list[str]:
    model = model_of(kind, **which)
    return unused_keys(
        model,
        list(keys),
        find_stored(model, list(keys)) if found is None else found,
        set(unread),
        lambda key: keys[key],
    )


COMPUTED: dict[str, list[int]] = {
    **{
        key: [4]
        for key in (
            "rotary_emb.inv_freq",
            "model.rotary_emb.inv_freq",
            "model.layers.0.self_attn.rotary_emb.inv_freq",
        )
    },
    **{key: [1, 4] for key in ("position_ids", "bert.embeddings.position_ids")},
    **{
        key: []
        for key in (
            "attn.masked_bias",
            "h.0.attn.masked_bias",
            "h.0.attention.masked_bias",
            "h.0.self_attn.masked_bias",
        )
    },
    **{
        key: [1, 1, 8, 8]
        for key in ("attn.bias", "h.0.attn.bias", "h.0.attention.bias", "h.0.self_attn.bias")
    },
}
NAMED: dict[str, list[int]] = {
    **{
        key: [4]
        for key in (
            "xrotary_emb.inv_freq",
            "inv_freq",
            "rotary_emb.inv_freq.x",
            "my_position_ids",
            "position_ids.weight",
        )
    },
    **{
        key: []
        for key in (
            "h.0.mlp.masked_bias",
            "h.0.xattn.masked_bias",
            "h.0.attn.masked_bias.x",
            "h.0.attn.xmasked_bias",
        )
    },
    **{key: [1, 1, 8, 8] for key in ("h.0.mlp.bias", "h.0.xattn.bias", "bias", "h.0.attn.bias.x")},
    **{
        f"h.{number}.attn.bias": shape
        for number, shape in enumerate(([1, 2, 8, 8], [2, 1, 8, 8], [1], [8, 1, 1], [8]), start=1)
    },
}


def test_only_computed_tensors_are_ignored() -> None:
    assert unused(COMPUTED | NAMED) == list(NAMED)


def test_a_computed_buffer_of_the_model_is_ignored_and_a_stored_one_is_not() -> None:
    """BERT computes the buffer token_type_ids."""
    keys = {"bert.embeddings.token_type_ids": [1, 4], "bert.embeddings.token_types": [1, 4]}
    assert unused(keys, "bert", task="masked_lm", auto_class="AutoModelForMaskedLM") == [
        "bert.embeddings.token_types"
    ]


def test_a_key_is_used_by_the_parameter_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"norm.weight": [64], "lm_head.weight": [264, 64], "b.weight": [1]}
    assert unused(keys) == ["b.weight"]
    assert unused(keys, unread={"lm_head.weight"}) == ["lm_head.weight", "b.weight"]
    experts = {"a.0.weight": [1], "a.1.weight": [1], "c.weight": [1]}
    assert (
        unused(
            experts,
            found={
                "lm_head.weight": PublishedTensor((("a.0.weight", "a.1.weight"), ("c.weight",)))
            },
        )
        == []
    )
    monkeypatch.setattr(
        model_of("llama"), "_keys_to_ignore_on_load_unexpected", [r"^never", r"lm_head", r"b\.w"]
    )
    assert unused(keys | {"an.b.weights": [1], "x.never": [1]}, unread={"lm_head.weight"}) == [
        "x.never"
    ]


# Layers of a deeper model
# ----------------------------------------------------------------------------------------------


class Lists(nn.Module):
    """A model with lists of layers, and with a sequence of named modules."""

    base_model_prefix = "model"

    def __init__(self, base: str = "model", **config: Any):
        super().__init__()
        holder = nn.Module()
        holder.layers = nn.ModuleList(nn.Identity() for _ in range(3))
        holder.convs = nn.Sequential(*(nn.Identity() for _ in range(2)))
        holder.named = nn.Sequential(OrderedDict({"0": nn.Identity(), "end": nn.Identity()}))
        if base:
            self.add_module(base, holder)
        else:
            self.layers, self.convs, self.named = holder.layers, holder.convs, holder.named
        self.config: Any = SimpleNamespace(to_dict=lambda: config, _name_or_path="X")


def refused(*keys: str, base: str = "model", **config: Any) -> str:
    """Return the config error's rule and fix, or "" without an error."""
    try:
        file_keys._check_extra_layers(
            Lists(base, **config), {f"stored.{number}": key for number, key in enumerate(keys)}
        )  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error).removeprefix("model = X: its files hold ")
    return ""


OF_FILES = "Use the config.json of these files"


@pytest.mark.parametrize(
    ("keys", "config", "said"),
    [
        (
            [
                "model.layers.2.w",
                "model.layers.extra",
                "model.layers.w.5",
                "model.named.7.w",
                "other.layers.7.w",
                "7.w",
                "layers",
            ],
            {},
            "",
        ),
        (
            ["model.layers.3.w"],
            {},
            f"4 layers in model.layers, but its config.json specifies 3. {OF_FILES}. To"
            " train the shorter model, delete model.layers.3 from the files",
        ),
        (
            ["model.layers.4.w", "model.layers.3.w"],
            {},
            f"5 layers in model.layers, but its config.json specifies 3. {OF_FILES}. "
            "To train the shorter model, delete model.layers.3 to 4 from the files",
        ),
        (["layers.3"], {}, "4 layers in model.layers, but its config.json specifies 3"),
        (["model.convs.2.w"], {}, "3 layers in model.convs, but its config.json specifies 2"),
        (
            ["model.convs.5.w", "model.layers.3.w"],
            {},
            "6 layers in model.convs, but its config.json specifies 2",
        ),
        (
            ["model.layers.3.w"],
            {"a": 3, "n_layers": 3, "layer_b": 3},
            '4 layers in model.layers, but its config.json specifies 3. Write "n_layers":'
            " 4 in its config.json. ",
        ),
        (
            ["model.layers.3.w"],
            {"layers": 4, "text_config": {"x": [3], "num_layer": 3}},
            'specifies 3. Write "num_layer": 4 in its config.json. ',
        ),
        (["model.layers.3.w"], {"layers": True, "layers2": 3.0}, OF_FILES),
    ],
)
def test_keys_of_further_layers_are_refused_with_their_number(
    keys: list[str], config: dict[str, Any], said: str
) -> None:
    found = refused(*keys, **config)
    assert said in found and bool(said) == bool(found)


def test_layers_are_found_with_and_without_the_base_models_name() -> None:
    for key in ("layers.3.w", "model.layers.3.w"):
        assert refused(key, base="").startswith(
            "model = X: its files contain 4 layers in layers, "
        ) and refused(key).startswith("model = X: its files contain 4 layers in model.layers, ")
    assert refused("model.layers.3.w", base="other") == ""


@pytest.mark.parametrize(
    "config",
    [
        *(
            {key: 2}
            for key in (
                "num_nextn_predict_layers",
                "mtp_layers",
                "num_mtp_layers",
                "mtp_num_layers",
                "mtp_num_hidden_layers",
                "num_mtp_hidden_layers",
            )
        ),
        {"num_nextn_predict_layers": 1, "text_config": {"mtp_num_layers": 2}},
        {"mtp_layers": 2, "num_mtp_layers": None, "text_config": None},
    ],
)
def test_layers_that_predict_further_tokens_may_follow(config: dict[str, Any]) -> None:
    assert refused("model.layers.4.w", **config) == "" and refused(
        "model.layers.5.w", **config
    ).startswith("model = X: its files contain 6 layers in ")
    other: dict[str, Any] = {
        f"x{key}": value for key, value in config.items() if isinstance(value, int)
    } | {
        "num_nextn_predict_layers": None,
        "mtp_num_layers": True,
        "mtp_layersx": 2,
    }
    assert refused("model.layers.3.w", **other).startswith(
        "model = X: its files contain 4 layers in "
    )


# Prefixes and wrappers
# --------------------------------------------------------------------------------------------------


def test_an_affix_is_taken_out_of_a_name() -> None:
    affix = Affix("a.b.", ("_orig_mod", "module"))
    assert (
        str(affix) == "a.b. and _orig_mod. and module."
        and str(Affix("a.")) == "a."
        and str(Affix(wrappers=("x",))) == "x."
    )
    for key, wanted in {
        "a.b.x.weight": "x.weight",
        "x.a.b.weight": "x.a.b.weight",
        "module.x._orig_mod._orig_mod.weight": "x.weight",
        "a.b.module.module.x.module.y": "x.y",
        "my_module.x.modules.y": "my_module.x.modules.y",
    }.items():
        assert affix.without(key) == wanted


NAMES = list(model_of("llama").state_dict())


def affix_of(keys: list[str]) -> Affix | None:
    return foreign_affix(model_of("llama"), keys, NAMES)


@pytest.mark.parametrize("prefix", ["policy.", "a.b.", "a.b.c.d.e.f."])
def test_a_prefix_of_any_words_is_found(prefix: str) -> None:
    assert affix_of([prefix + name for name in NAMES]) == Affix(prefix)
    assert affix_of([prefix + name for name in NAMES[: len(NAMES) // 2 + 1]]) == Affix(prefix)
    assert affix_of([prefix + name for name in NAMES[: len(NAMES) // 2]]) is None, (
        "most of the parameters have to be found"
    )
    assert affix_of([*NAMES, *(prefix + name for name in NAMES)]) is None, "nothing is gained"


def test_a_longer_prefix_or_one_of_few_names_is_not_looked_for() -> None:
    assert affix_of([f"a.b.c.d.e.f.g.{name}" for name in NAMES]) is None
    assert affix_of([f"{model}.{name}" for model in ("one", "two") for name in NAMES]) == Affix(
        "one."
    )
    assert (
        affix_of([f"{model}.{name}" for model in ("one", "two", "three") for name in NAMES]) is None
    )
    assert affix_of(["x", "y"]) is None


@pytest.mark.parametrize(
    "word",
    [
        "_orig_mod",
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
        "_forward_module",
        "module",
    ],
)
def test_a_wrapper_in_every_layer_is_found(word: str) -> None:
    inside = [
        name.replace(".mlp.", f".{word}.mlp.").replace(".self_attn.", f".{word}.self_attn.")
        for name in NAMES
    ]
    assert inside != NAMES and affix_of(inside) == Affix(wrappers=(word,))
    other = "module" if word == "_orig_mod" else "_orig_mod"
    both = [name.replace("model.", f"model.{other}.") for name in inside]
    assert affix_of(both) == Affix(
        wrappers=tuple(one for one in file_keys.WRAPPER_NAMES if one in (word, other))
    )


def test_the_refusal_of_an_affix_counts_the_names_and_renames_them() -> None:
    model = model_of("llama")
    said = str(refuse_affix(model, ["a.x", "a.y", "z"], Affix("a.")))
    assert said.startswith(
        "model = X: 2 of the 3 names of tensors in its files have a. in them, which the names of a"
        " llama's parameters do not. Rename them"
    )
    assert (
        "save_file({key.removeprefix('a.'): value for key, value in load_file(FILE).items()}, FILE,"
        " {'format': 'pt'})" in said
    )
    words = str(refuse_affix(model, ["x.module.y", "z"], Affix(wrappers=("_orig_mod", "module"))))
    assert (
        "1 of the 2 names" in words
        and "{key.replace('_orig_mod.', '').replace('module.', ''): value" in words
    )
    adapter = str(refuse_affix(model, ["a.x.lora_A.weight", "z"], Affix("a.")))
    assert adapter.endswith(
        ". Merge the adapter with peft's merge_and_unload(), and save that with save_pretrained"
    )


def test_a_form_that_is_refused_is_no_affix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        file_keys, "get_model_conversion_mapping", lambda model: [converter(MergeModulelist(dim=1))]
    )
    assert affix_of([f"a.{name}" for name in [*NAMES, *EXPERTS]]) is None
