"""Every key in a model's files is used, known to be unneeded, reported in one line, or an error."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from built_models import build_model
from published_models import FILE, Tensors, save_model
from recipekit.architectures.lookup import with_labels
from recipekit.model import initial_values
from recipekit.model.empty import empty_model
from recipekit.model.weights import Weights, open_weights
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from recipekit.spec.task_specs import TASKS
from safetensors.torch import load_file, save_file
from tiny_models import ds_config


def read(folder: Path, task: str = "pretrain") -> Weights:
    """Open the files for the model that config.json describes."""
    config = json.loads((folder / "config.json").read_text())
    return open_weights(
        str(folder), empty_model(config, "eager", str(folder), auto_class=TASKS[task].auto_class)
    )


def values_of(folder: Path, dtype: str = "") -> tuple[dict[str, torch.Tensor], list[str]]:
    """Build the model; return its values and the rule of each error about non-finite values."""
    config = json.loads((folder / "config.json").read_text())
    strategy = ds_config(0) | ({dtype: {"enabled": True}} if dtype else {})
    built = build_model(Recipe(model=str(folder)), config, None, strategy, torch.device("cpu"))
    assert built.weights is not None
    assert all(problem.where == f"model = {folder}" for problem in built.weights.not_finite)
    return built.model.state_dict(), [problem.rule for problem in built.weights.not_finite]


def more(*names: str, shape: tuple[int, ...] = (4,)) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: torch.ones(shape) for name in names}


@pytest.mark.parametrize(
    ("kind", "task", "extra", "line"),
    [
        (
            "llama",
            "pretrain",
            ("v_head.summary.weight",),
            "^model = .*: 1 tensor of its files is not used: v_head.summary.weight$",
        ),
        (
            "gpt2",
            "pretrain",
            ("transformer.h.0.attn.q_norm.weight", "second.weight"),
            "2 tensors of its files are not used: second.weight,"
            " transformer.h.0.attn.q_norm.weight$",
        ),
        (
            "bert",
            "masked_lm",
            (
                "bert.pooler.dense.bias",
                "bert.pooler.dense.weight",
                "cls.seq_relationship.bias",
                "cls.seq_relationship.weight",
            ),
            "4 tensors of its files are not used: bert.pooler.dense.bias,"
            " bert.pooler.dense.weight, cls.seq_relationship.bias, ...$",
        ),
        (
            "llama",
            "pretrain",
            ("model.layers.0.self_attn.q_proj.bias",),
            "not used: model.layers.0.self_attn.q_proj.bias",
        ),
    ],
)
def test_tensors_that_nothing_takes_are_named_in_one_line(tmp_path, kind, task, extra, line):
    save_model(tmp_path, kind, task, more(*extra))
    assert re.search(line, read(tmp_path, task).note)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("llama", more("model.layers.0.self_attn.rotary_emb.inv_freq")),
        (
            "gpt2",
            lambda tensors: (
                tensors
                | {
                    "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8),
                    "h.1.attn.masked_bias": torch.tensor(-1e4),
                }
            ),
        ),
        (
            "gpt_neox",
            lambda tensors: tensors | {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8)},
        ),
        pytest.param(
            "qwen3_next", more("mtp.layers.0.weight", "mtp.fc.weight"), marks=pytest.mark.slow
        ),
        (
            "deepseek_v3",
            more("model.layers.61.embed_tokens.weight", "model.layers.61.eh_proj.weight"),
        ),
    ],
)
def test_tensors_that_every_model_computes_or_transformers_ignores_are_not_named(
    tmp_path, kind, extra
):
    save_model(tmp_path, kind, tensors=extra)
    assert read(tmp_path).note == ""


@pytest.mark.parametrize("shape", [(24,), (1, 8), (8, 1, 1)])
def test_a_bias_of_attention_of_another_shape_is_no_mask_and_is_named(tmp_path, shape):
    save_model(tmp_path, "llama", tensors=more("model.layers.0.self_attn.bias", shape=shape))
    assert read(tmp_path).note.endswith(
        "1 tensor of its files is not used: model.layers.0.self_attn.bias"
    )


def further_layers(tensors: Tensors, place: str, last: int) -> Tensors:
    """Add two copies of a list's last layer, as in a deeper model's files."""
    return tensors | {
        name.replace(f"{place}.{last}.", f"{place}.{last + 1 + add}."): value.clone()
        for add in range(2)
        for name, value in tensors.items()
    }


@pytest.mark.parametrize(
    ("kind", "task", "place", "listed", "key"),
    [
        ("llama", "pretrain", "model.layers", "model.layers", "num_hidden_layers"),
        ("gpt2", "pretrain", "transformer.h", "transformer.h", "n_layer"),
        ("opt", "pretrain", "model.decoder.layers", "model.decoder.layers", "num_hidden_layers"),
        ("bert", "masked_lm", "bert.encoder.layer", "bert.encoder.layer", "num_hidden_layers"),
        ("vit", "image_classification", "vit.layers", "vit.encoder.layer", "num_hidden_layers"),
        ("qwen3_moe", "pretrain", "model.layers", "model.layers", "num_hidden_layers"),
    ],
)
def test_layers_that_config_json_does_not_have_are_refused(
    tmp_path, kind, task, place, listed, key
):
    """`listed` is the name of the list `place` in the files."""
    save_model(tmp_path, kind, task)
    tensors = load_file(tmp_path / FILE)
    layers = 1 + max(
        int(name.removeprefix(f"{listed}.").split(".")[0])
        for name in tensors
        if name.startswith(f"{listed}.")
    )
    save_file(
        further_layers(tensors, listed, layers - 1), tmp_path / FILE, metadata={"format": "pt"}
    )
    expected = (
        rf"its files contain {layers + 2} layers in {place}, but its config.json specifies"
        rf' {layers}. Write "{key}": {layers + 2} in its config.json'
    )
    with pytest.raises(ConfigError, match=expected):
        read(tmp_path, task)


def test_names_without_the_base_model_have_layers_too(tmp_path):
    """openai-community/gpt2 is published like this: h.0 instead of transformer.h.0."""
    save_model(
        tmp_path,
        "gpt2",
        tensors=lambda tensors: {
            name.removeprefix("transformer."): value
            for name, value in further_layers(tensors, "transformer.h", 3).items()
        },
    )
    with pytest.raises(
        ConfigError,
        match=r"its files contain 6 layers in transformer\.h, but its config.json specifies 4",
    ):
        read(tmp_path)


def test_experts_that_config_json_does_not_have_are_refused(tmp_path):
    save_model(tmp_path, "mixtral")
    experts = json.loads((tmp_path / "config.json").read_text())["num_local_experts"]
    (tmp_path / "config.json").write_text(
        json.dumps(
            json.loads((tmp_path / "config.json").read_text()) | {"num_local_experts": experts // 2}
        )
    )
    with pytest.raises(
        ConfigError,
        match=rf"\[{experts}, .* in its files but \[{experts // 2}, .* in its config.json",
    ):
        read(tmp_path)


def test_layers_that_predict_further_tokens_are_named(tmp_path):
    """transformers recognises such layers by their numbers in the published model.

    This model has a different number of layers.
    """
    save_model(tmp_path, "glm4_moe", tensors=lambda tensors: tensors, num_nextn_predict_layers=1)
    layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    tensors = load_file(tmp_path / FILE)
    save_file(
        tensors | {f"model.layers.{layers}.eh_proj.weight": torch.ones(4)},
        tmp_path / FILE,
        metadata={"format": "pt"},
    )
    assert read(tmp_path).note.endswith(
        f"1 tensor of its files is not used: model.layers.{layers}.eh_proj.weight"
    )
    save_file(
        tensors | {f"model.layers.{layers + 1}.eh_proj.weight": torch.ones(4)},
        tmp_path / FILE,
        metadata={"format": "pt"},
    )
    with pytest.raises(ConfigError, match=f"its files contain {layers + 2} layers"):
        read(tmp_path)


WRAPPED: dict[str, Callable[[str], str]] = {
    "_orig_mod.": lambda name: f"_orig_mod.{name}",
    "module.": lambda name: f"module.{name}",
    "base_model.model.": lambda name: f"base_model.model.{name}",
    "_fsdp_wrapped_module._fsdp_wrapped_module.": lambda name: (
        f"_fsdp_wrapped_module._fsdp_wrapped_module.{name}"
    ),
    "student.net.": lambda name: f"student.net.{name}",
    "_checkpoint_wrapped_module.": (
        lambda name: name.replace("layers.0.", "layers.0._checkpoint_wrapped_module.").replace(
            "layers.1.", "layers.1._checkpoint_wrapped_module."
        )
    ),
    "_orig_mod. and module.": lambda name: f"module.{name}".replace("mlp.", "_orig_mod.mlp."),
}


@pytest.mark.parametrize("prefix", WRAPPED)
def test_a_prefix_of_all_names_is_named(tmp_path, prefix):
    save_model(
        tmp_path,
        "llama",
        tensors=lambda tensors: {WRAPPED[prefix](name): value for name, value in tensors.items()},
    )
    with pytest.raises(ConfigError) as refused:
        read(tmp_path)
    (problem,) = refused.value.problems
    assert f"names of tensors in its files have {prefix} in them" in problem.rule
    code = problem.fix.partition("safetensors.torch: ")[2]
    exec(code, {"save_file": save_file, "load_file": load_file, "FILE": tmp_path / FILE})
    assert read(tmp_path).note == ""


def test_an_adapter_that_was_not_merged_is_named(tmp_path):
    save_model(
        tmp_path,
        "llama",
        tensors=lambda tensors: {
            f"base_model.model.{name}": value
            for name, value in more("model.layers.0.mlp.up_proj.lora_A.weight")(tensors).items()
        },
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"have base_model\.model\. in them.*\. Merge the adapter with peft's merge_and_unload"
        ),
    ):
        read(tmp_path)


def test_a_base_model_twice_is_read_as_transformers_reads_it(tmp_path):
    save_model(
        tmp_path,
        "llama",
        tensors=lambda tensors: {f"model.{name}": value for name, value in tensors.items()},
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32
    ).state_dict()
    ours, _ = values_of(tmp_path)
    assert read(tmp_path).note == "" and all(
        torch.equal(value, theirs[name]) for name, value in ours.items()
    )


@pytest.mark.parametrize(
    ("kind", "name", "value", "found"),
    [
        ("llama", "model.embed_tokens.weight", float("nan"), "a NaN"),
        ("llama", "model.norm.weight", float("inf"), "an infinite value"),
        ("gpt2", "transformer.h.1.mlp.c_fc.bias", float("nan"), "a NaN"),
        (
            "qwen3_moe",
            "model.layers.1.mlp.experts.3.down_proj.weight",
            float("-inf"),
            "an infinite value",
        ),
    ],
)
def test_values_that_are_no_numbers_are_noted(tmp_path, kind, name, value, found):
    def spoiled(tensors: Tensors) -> Tensors:
        tensors[name].view(-1)[-1] = value
        return tensors

    save_model(tmp_path, kind, tensors=spoiled)
    (rule,) = values_of(tmp_path)[1]
    assert rule.endswith(f"contains {found} in its files")


@pytest.mark.parametrize("inner", ["convolution.weight", "normalization.running_var"])
@pytest.mark.parametrize("labels", [0, 3])
def test_values_are_checked_beside_a_new_head_and_in_buffers(tmp_path, monkeypatch, inner, labels):
    """A model without lists of layers has its weights and the random head in one block."""
    monkeypatch.setattr(initial_values, "parts", lambda model: iter([(model, True)]))
    name, task = f"resnet.embedder.embedder.{inner}", "image_classification"

    def spoiled(tensors: Tensors) -> Tensors:
        tensors[name].view(-1)[-1] = float("nan")
        return tensors

    save_model(tmp_path, "resnet", task, spoiled)
    config = with_labels(json.loads((tmp_path / "config.json").read_text()), labels)
    recipe = Recipe(model=str(tmp_path), task=task, num_labels=labels)
    built = build_model(recipe, config, None, ds_config(0), torch.device("cpu"))
    assert built.weights is not None and bool(built.weights.sampled) == bool(labels)
    assert [problem.rule for problem in built.weights.not_finite] == [
        f"{name} contains a NaN in its files"
    ]


def test_values_that_the_training_dtype_does_not_hold_are_noted(tmp_path):
    save_model(
        tmp_path,
        "llama",
        tensors=lambda tensors: tensors | {"model.norm.weight": tensors["model.norm.weight"] * 1e5},
    )
    assert values_of(tmp_path, "fp16")[1] == [
        "model.norm.weight holds 1e+05 in its files, which is infinite in float16"
    ]
    assert values_of(tmp_path, "bf16")[1] == []
