"""The files, keys and tensor dtypes in a Hugging Face folder, and its small files.

The tests need no ranks.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recipekit.architectures import safetensors_files
from recipekit.checkpoints.step_folder import LayoutChange, open_step, target_layout
from recipekit.convert import hugging_face
from recipekit.convert.hugging_face import FolderChanges, from_hf, to_hf
from recipekit.convert.published import plan_published_files, published_shapes, unused_file_keys
from recipekit.parallel.blueprint import Blueprint, Layout, PublishedTensor, Tensor
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import Mesh
from recipekit.storage import manifest
from safetensors.torch import load_file, save_file

BASE = "base_model.model.model.layers.0.self_attn.q_proj"
TENSORS = (
    Tensor("embed", (20, 7), 0, None, "ends"),  # 140 elements
    Tensor("norm", (5,), 1, None, "0"),
    Tensor("mask", (3, 2), None, None, "0", buffer="bool"),
    Tensor("head", (6, 10), 0, None, "last"),
)


def step_of(blueprint: Blueprint, dtype: str = "float32") -> Any:
    return SimpleNamespace(blueprint=blueprint, state={"export_dtype": dtype})


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (10**6, {"model.safetensors": "embed norm mask head"}),
        # 280 and 10 bytes.
        (
            290,
            {
                "model-00001-of-00002.safetensors": "embed norm",
                "model-00002-of-00002.safetensors": "mask head",
            },
        ),
        (
            289,
            {
                "model-00001-of-00002.safetensors": "embed",
                "model-00002-of-00002.safetensors": "norm mask head",
            },
        ),
        # 10, 6 and 120 bytes.
        (
            136,
            {
                "model-00001-of-00002.safetensors": "embed",
                "model-00002-of-00002.safetensors": "norm mask head",
            },
        ),
        (
            135,
            {
                f"model-0000{n}-of-00003.safetensors": keys
                for n, keys in ((1, "embed"), (2, "norm mask"), (3, "head"))
            },
        ),
    ],
)
def test_a_file_has_at_most_the_bytes_of_a_shard(
    monkeypatch: pytest.MonkeyPatch, most: int, expected: dict[str, str]
) -> None:
    monkeypatch.setattr(safetensors_files, "SHARD_BYTES", most)
    blueprint, contents = plan_published_files(
        step_of(Blueprint(TENSORS, {"tied": ("embed", "last")}, 1, True)), "bfloat16"
    )
    assert {file: " ".join(keys) for file, keys in contents.items()} == expected
    dtypes = {key: dtype for keys in contents.values() for key, dtype in keys.items()}
    assert dtypes == {"embed": "BF16", "norm": "BF16", "mask": "BOOL", "head": "BF16"}
    assert blueprint.published == {
        name: PublishedTensor(((name,),)) for name in dtypes
    } and blueprint.aliases == {"tied": ("embed", "last")}


def test_the_dtype_is_that_of_the_runs_exports_unless_another_is_asked() -> None:
    step = step_of(Blueprint(TENSORS[:1], {}, 1, True), "float16")
    assert [
        plan_published_files(step, dtype)[1]["model.safetensors"]["embed"]
        for dtype in (None, "float32", "bfloat16")
    ] == ["F16", "F32", "BF16"]
    with pytest.raises(ConfigError, match="dtype = int3: is not a supported dtype"):
        plan_published_files(step, "int3")


@pytest.mark.parametrize(
    ("dtype", "weight"), [(None, ("F64", "BF16")), ("float16", ("F16", "F16"))]
)
def test_published_files_keep_their_keys_and_the_dtypes_of_what_is_no_weight(
    dtype: str | None, weight: tuple[str, str]
) -> None:
    """Keys that the model lacks are omitted, and so are files that contain no other keys."""
    own = {
        "a": {"embed": "F64", "inv_freq": "F32"},
        "b": {"mask": "U8", "head": "BF16", "norm": "F8_E4M3"},
        "c": {"pooler": "F32"},
    }
    published = {name: PublishedTensor(((name,),)) for name in ("embed", "mask", "head", "norm")}
    blueprint = Blueprint(TENSORS, {}, 1, True, published, own)
    _, contents = plan_published_files(step_of(blueprint), dtype)
    assert contents == {
        "a": {"embed": weight[0]},
        "b": {"mask": "U8", "head": weight[1], "norm": "F8_E4M3"},
    }
    assert unused_file_keys(blueprint) == ["inv_freq", "pooler"]


def adapter_tensors() -> tuple[Tensor, ...]:
    names = (
        f"{BASE}.base_layer.weight",
        f"{BASE}.lora_A.default.weight",
        f"{BASE}.lora_B.default.weight",
    )
    shapes, groups = ((6, 6), (2, 6), (6, 2)), (None, 0, 0)
    return tuple(
        Tensor(name, shape, group, None, "0")
        for name, shape, group in zip(names, shapes, groups, strict=True)
    )


def test_an_adapter_is_one_file_with_pefts_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two keys of a tied module refer to one tensor: the first key is its own, and the second an
    alias.
    """
    monkeypatch.setattr(safetensors_files, "SHARD_BYTES", 1)
    head = Tensor("head.modules_to_save.default.weight", (4, 6), 0, None, "last")
    keys = {
        "A": f"{BASE}.lora_A.default.weight",
        "head": head.name,
        "B": f"{BASE}.lora_B.default.weight",
        "embed": head.name,
    }
    whole = Blueprint(
        (*adapter_tensors(), head), {"tied": (head.name, "ends")}, 1, True, adapter=keys
    )
    blueprint, contents = plan_published_files(step_of(whole), None)
    assert contents == {"adapter_model.safetensors": dict.fromkeys(keys, "F32")}
    assert [tensor.name for tensor in blueprint.tensors] == [keys["A"], keys["B"], head.name]
    assert {name: stored.parts for name, stored in blueprint.published.items()} == {
        keys[key]: ((key,),) for key in ("A", "B", "head")
    }
    assert blueprint.aliases == {"embed": (head.name, "every")}


def test_an_adapter_leaves_tied_weights_of_its_base_out() -> None:
    keys = {"A": f"{BASE}.lora_A.default.weight", "B": f"{BASE}.lora_B.default.weight"}
    whole = Blueprint(
        adapter_tensors(), {"tied": (f"{BASE}.base_layer.weight", "last")}, 1, True, adapter=keys
    )
    blueprint, contents = plan_published_files(step_of(whole), None)
    assert (
        contents == {"adapter_model.safetensors": dict.fromkeys(keys, "F32")}
        and blueprint.aliases == {}
    )
    assert published_shapes(blueprint) == {"A": (2, 6), "B": (6, 2)}


def test_keys_of_an_adapter_saved_before_they_were_recorded() -> None:
    """A frozen weight is omitted, no matter which weights are next to it."""
    further = (
        Tensor(f"{BASE}.lora_magnitude_vector.default.weight", (6,), 1, None, "0"),
        Tensor("base_model.model.head.modules_to_save.default.weight", (4, 6), 0, None, "last"),
        Tensor("base_model.model.norm.bias", (6,), 1, None, "last"),
    )
    _, contents = plan_published_files(
        step_of(Blueprint((*adapter_tensors(), *further), {}, 1, True)), None
    )
    assert list(contents["adapter_model.safetensors"]) == [
        *(f"{BASE}.lora_A.weight", f"{BASE}.lora_B.weight", f"{BASE}.lora_magnitude_vector"),
        *("base_model.model.head.weight", "base_model.model.norm.bias"),
    ]


# From a model's folder and back
# ------------------------------------------------------------------------------------


def model_in(folder: Path, **config: Any) -> Path:
    """Write a model of two tensors in two files, together with small files."""
    folder.mkdir()
    save_file({"wte": torch.arange(12.0).view(3, 4)}, folder / "model-00001-of-00002.safetensors")
    save_file(
        {"head": torch.arange(12.0).view(3, 4) + 1}, folder / "model-00002-of-00002.safetensors"
    )
    index = {
        "metadata": {},
        "weight_map": {
            "wte": "model-00001-of-00002.safetensors",
            "head": "model-00002-of-00002.safetensors",
        },
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": "x"} | config))
    (folder / "additional_chat_templates").mkdir()
    for name in (
        "tokenizer.json",
        "generation_config.json",
        "adapter_config.json",
        "additional_chat_templates/rag.jinja",
        "notes.md",
    ):
        (folder / name).write_text("{}")
    return folder


def kept(folder: Path, out: Path, config: dict[str, Any] | None = None) -> Path:
    """Convert `model_in`'s model to a step folder in which the head's key is `lm_head`."""
    tensors = (Tensor("wte", (3, 4), 0, None, "first"), Tensor("lm_head", (3, 4), 0, None, "last"))
    files = {
        "model-00001-of-00002.safetensors": {"wte": "F32"},
        "model-00002-of-00002.safetensors": {"lm_head": "F32"},
    }
    blueprint = Blueprint(
        tensors,
        {},
        0,
        False,
        {name: PublishedTensor(((name,),)) for name in ("wte", "lm_head")},
        files,
    )
    layout = target_layout(
        blueprint, Layout(Mesh(), 0, "torch", "float32"), LayoutChange(dp=2, zero=1)
    )
    from_hf(folder, out, blueprint, layout, changes=FolderChanges(config, {"lm_head": "head"}))
    return out


def small(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith("model")
    }


SMALL = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "additional_chat_templates/rag.jinja",
}


def test_a_folder_comes_back_with_its_small_files(tmp_path: Path) -> None:
    step = kept(model_in(tmp_path / "model", own={"a": [1]}), tmp_path / "step")
    assert small(step / "hf_files") == SMALL
    to_hf(step, tmp_path / "back")
    assert small(tmp_path / "back") == SMALL
    assert (tmp_path / "back" / "config.json").read_bytes() == (
        tmp_path / "model" / "config.json"
    ).read_bytes()
    assert torch.equal(
        load_file(tmp_path / "back" / "model-00002-of-00002.safetensors")["lm_head"],
        torch.arange(12.0).view(3, 4) + 1,
    )
    assert torch.equal(
        load_file(tmp_path / "back" / "model-00001-of-00002.safetensors")["wte"],
        torch.arange(12.0).view(3, 4),
    )


def test_a_config_that_differs_from_the_files_is_kept(tmp_path: Path) -> None:
    """An equal config keeps its original text."""
    same, other = {"model_type": "x"}, {"model_type": "x", "tie_word_embeddings": False}
    for number, (config, written) in enumerate([(None, same), (same, same), (other, other)]):
        folder = model_in(tmp_path / f"model{number}")
        step = kept(folder, tmp_path / f"step{number}", config=config)
        content = (step / "hf_files" / "config.json").read_bytes()
        assert json.loads(content) == written and (
            content == (folder / "config.json").read_bytes()
        ) == (written == same)
        assert open_step(step).model_config == written


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"dtype": "float16"}),
        ({"dtype": "float32"}, {"dtype": "float16"}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "float16"}),
        ({"torch_dtype": None, "dtype": None}, {"dtype": "float16"}),
        (
            {"text_config": {"torch_dtype": "float32", "dtype": None}},
            {"dtype": "float16", "text_config": {"torch_dtype": "float16"}},
        ),
    ],
)
def test_config_json_states_the_dtype_that_was_asked(
    tmp_path: Path, own: dict[str, Any], expected: dict[str, Any]
) -> None:
    step = kept(model_in(tmp_path / "model", **own), tmp_path / "step")
    to_hf(step, tmp_path / "back", dtype="float16")
    assert (
        json.loads((tmp_path / "back" / "config.json").read_text())
        == {"model_type": "x"} | expected
    )
    assert (
        load_file(tmp_path / "back" / "model-00001-of-00002.safetensors")["wte"].dtype
        == torch.float16
    )
    to_hf(step, tmp_path / "as_it_is")
    assert (
        json.loads((tmp_path / "as_it_is" / "config.json").read_text()) == {"model_type": "x"} | own
    )


def test_an_adapter_leaves_the_base_models_small_files_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a run's export, an adapter has its config and the tokenizer's and processor's files."""
    folder = model_in(tmp_path / "model")
    (folder / "preprocessor_config.json").write_text("{}")
    (folder / "params.json").write_text("{}")
    step = open_step(kept(folder, tmp_path / "step"))
    adapter = replace(step.blueprint, adapter={"x.lora_A.weight": "wte"}, files={}, published={})
    listed = manifest.read_manifest(step.folder)  # unlisted files would be ignored
    (step.folder / "hf_files" / "adapter_config.json").write_text("{}")
    listed["files"]["hf_files/adapter_config.json"] = manifest.file_entry(
        step.folder / "hf_files" / "adapter_config.json"
    )
    manifest.write_manifest(step.folder, listed["step"], listed["files"], listed["tensors"])
    monkeypatch.setattr(hugging_face, "open_step", lambda _: replace(step, blueprint=adapter))
    to_hf(step.folder, tmp_path / "back")
    files = {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "preprocessor_config.json",
        "additional_chat_templates/rag.jinja",
    }
    assert {
        path.relative_to(tmp_path / "back").as_posix()
        for path in (tmp_path / "back").rglob("*")
        if path.is_file()
    } == files
    assert load_file(tmp_path / "back" / "adapter_model.safetensors").keys() == {"x.lora_A.weight"}
