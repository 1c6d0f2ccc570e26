"""Rules for the values and shapes in a model's files, tested on a few small tensors."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from published_models import FILE, TIED, config_json, folder_of, save_model
from recipekit.architectures.safetensors_files import INDEX_FILE
from recipekit.model import untied_head, weights
from recipekit.model.empty import empty_model
from recipekit.model.untied_head import config_of_files
from recipekit.model.weights import Weights, open_weights
from recipekit.parallel.blueprint import PublishedTensor
from recipekit.spec.errors import ConfigError
from safetensors.torch import load_file, save_file

NAN, INF = float("nan"), float("inf")


def stored(*keys: str) -> PublishedTensor:
    return PublishedTensor(tuple((key,) for key in keys))


# Compared values
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compared", "shape"),
    [(12, (7, 4)), (3, (2, 4)), (5, (11,)), (40, (3, 2, 5)), (1, (1,)), (4, (4, 0))],
)
def test_a_difference_in_any_value_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compared: int, shape: tuple[int, ...]
) -> None:
    """The block size does not matter. Different dtypes are compared in the more precise one."""
    monkeypatch.setattr(weights, "COMPARE_BLOCK_VALUES", compared)
    value = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    tensors = {"a": value, "same": value.clone(), "bf16": value.bfloat16()}
    for place in range(value.numel()):
        tensors[f"b{place}"] = value.clone()
        tensors[f"b{place}"].view(-1)[place] += 1e-3
    save_file(tensors, tmp_path / "a.safetensors")
    files = Weights([tmp_path / "a.safetensors"])
    for key in tensors:
        assert (
            files.same_values(stored("a"), stored(key))
            == files.same_values(stored(key), stored("a"))
            == (not key.startswith("b") or key == "bf16")
        ), key


@pytest.mark.parametrize(
    ("compared", "shape", "rows"),
    [(12, (7, 4), 3), (3, (2, 4), 1), (59, (7, 2, 5), 5), (4, (9,), 4)],
)
def test_no_more_values_are_read_at_a_time_than_are_compared(
    monkeypatch: pytest.MonkeyPatch, compared: int, shape: tuple[int, ...], rows: int
) -> None:
    class Slice:
        def get_shape(self) -> tuple[int, ...]:
            return shape

        def __getitem__(self, place: slice) -> torch.Tensor:
            read.append((place.start, place.stop))
            return torch.ones(1)

    read, files = list[tuple[int, int]](), Weights([])
    monkeypatch.setattr(weights, "COMPARE_BLOCK_VALUES", compared)
    monkeypatch.setattr(files, "_slice", lambda key: Slice())
    assert files.same_values(stored("a"), stored("b"))
    assert read == [(start, start + rows) for start in range(0, shape[0], rows) for _ in range(2)]


def test_a_value_lost_in_bf16_is_a_difference(tmp_path: Path) -> None:
    save_file(
        {
            "a": torch.tensor([[1.001]]),
            "b": torch.tensor([[1.001]]).bfloat16(),
            "c": torch.tensor([[1.001]]).bfloat16().float(),
        },
        tmp_path / FILE,
    )
    files = Weights([tmp_path / FILE])
    assert (
        not files.same_values(stored("a"), stored("b"))
        and not files.same_values(stored("b"), stored("a"))
        and files.same_values(stored("b"), stored("c"))
    )


def test_shapes_of_stacked_and_joined_keys(tmp_path: Path) -> None:
    save_file(
        {
            "a0": torch.ones(2, 3),
            "a1": torch.ones(2, 3),
            "b0": torch.ones(5, 3),
            "b1": torch.ones(5, 3),
            "c0": torch.ones(2, 4),
        },
        tmp_path / FILE,
    )
    files = Weights([tmp_path / FILE])
    assert files.shape_of(stored("b0")) == [5, 3]
    assert files.shape_of(PublishedTensor((("a0", "a1"),), stacked=True)) == [2, 2, 3]
    assert files.shape_of(PublishedTensor((("a0", "a1"), ("b0", "b1")), stacked=True, dim=1)) == [
        2,
        7,
        3,
    ]
    assert files.shape_of(PublishedTensor((("a0",), ("c0",)), stacked=True, dim=2)) == [1, 2, 7]


def test_a_copy_is_read_from_the_file_of_its_original(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}, tmp_path / "1.safetensors")
    save_file({"c": torch.tensor([4.0, 5.0]).half()}, tmp_path / "2.safetensors")
    files = Weights([tmp_path / "1.safetensors", tmp_path / "2.safetensors"])
    files.copies["d"] = "c"
    assert files.contents() == {
        "1.safetensors": {"a": "F32", "b": "F32"},
        "2.safetensors": {"c": "F16", "d": "F16"},
    }
    files.stored = {"x": stored("d"), "y": stored("a")}
    assert (
        files.full_tensor("x").tolist() == [4, 5]
        and files.shape("x") == [2]
        and files.same_values(stored("c"), stored("d"))
    )
    assert files._read("d", 0, [(1, 2)]).tolist() == [5] and files._read(
        "a", 0, [(1, 2), (0, 1)]
    ).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("values", "dtype", "found"),
    [
        ([1.0, NAN], "float32", "p contains a NaN in its files"),
        ([INF, NAN], "float16", "p contains a NaN in its files"),
        ([1.0, INF], "bfloat16", "p contains an infinite value in its files"),
        ([-INF, 1.0], "float32", "p contains an infinite value in its files"),
        ([1.0, 70000.0], "float16", "p holds 7e+04 in its files, which is infinite in float16"),
        (
            [-81234.0, 70000.0],
            "float16",
            "p holds 8.12e+04 in its files, which is infinite in float16",
        ),
        ([-70000.0, 3.0], "float16", "p holds 7e+04 in its files, which is infinite in float16"),
        (
            [3e38, -3.4e38],
            "bfloat16",
            "p holds 3.4e+38 in its files, which is infinite in bfloat16",
        ),
        ([70000.0], "bfloat16", ""),
        ([65504.0, -65504.0], "float16", ""),
        ([], "float16", ""),
        ([3.0], "int64", ""),
    ],
)
def test_values_that_are_not_finite_are_noted(values: list[float], dtype: str, found: str) -> None:
    files, value = Weights([], "X"), torch.tensor(values)
    if dtype == "bfloat16" and 3e38 in values:
        value = value.double() * 1.001
    files.check_finite("p", value, value.to(getattr(torch, dtype)))
    fix = (
        "use a strategy in bf16 or fp32"
        if "which is" in found
        else "use files that were saved before the run diverged or the values were cast"
    )
    assert [(one.where, one.rule, one.fix) for one in files.not_finite] == (
        [("model = X", found, fix)] if found else []
    )


# Missing parameters
# -------------------------------------------------------------------------------------------------


def opened(folder: Path, **more: Any) -> Weights:
    return open_weights("X", empty_model(config_json(str(folder)), "eager", "X"), **more)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(weights, "weights_folder", lambda name, revision: tmp_path)
    save_model(tmp_path, "llama")
    return tmp_path


def change(folder: Path, remove: tuple[str, ...] = (), **more: Any) -> None:
    tensors = load_file(folder / FILE)
    save_file(
        {key: value.clone() for key, value in tensors.items() if key not in remove} | more,
        folder / FILE,
        metadata={"format": "pt"},
    )


def test_only_parameters_that_transformers_allows_to_be_missing_are_drawn(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    change(folder, remove=("model.norm.weight", "model.layers.1.mlp.up_proj.weight"))
    monkeypatch.setattr(
        LlamaForCausalLM, "_keys_to_ignore_on_load_missing", ["^never", r"norm\.w", r"self_attn"]
    )
    with pytest.raises(
        ConfigError,
        match=r"^model = X: its files lack 1 of 39 parameters, first"
        r" model\.layers\.1\.mlp\.up_proj\.weight\. Give the files that match this "
        r"config\.json and transformers version$",
    ):
        opened(folder)
    change(folder, (), **{"model.layers.1.mlp.up_proj.weight": torch.ones(128, 64)})
    assert (
        opened(folder).sampled == {"model.norm.weight"}
        and "model.norm.weight" not in opened(folder).stored
    )


def test_a_head_that_the_files_tie_is_read_from_the_embedding(folder: Path) -> None:
    """The embedding is read as the head only if the files have no head and the run unties it."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    config = config_json(str(folder))
    own = load_file(folder / FILE)[head]
    for removed, file_ties, ties, copies in (
        ((head,), True, False, {head: embedding}),
        ((), True, False, {}),
        ((head,), True, True, {}),
        ((), False, False, {}),
    ):
        save_model(folder, "llama")
        change(folder, remove=removed)
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": file_ties}))
        read = open_weights("X", empty_model(config | {"tie_word_embeddings": ties}, "eager", "X"))
        assert read.copies == copies and (
            ties
            or torch.equal(
                read.full_tensor(head), load_file(folder / FILE)[embedding] if removed else own
            )
        )
    change(folder, remove=(embedding, head))
    (folder / "config.json").write_text(json.dumps(config | TIED))
    with pytest.raises(
        ConfigError, match=r"its files lack 2 of 39 parameters, first model\.embed_tokens\.weight"
    ):
        open_weights("X", empty_model(config | {"tie_word_embeddings": False}, "eager", "X"))


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (("a",), "model = X: 1 tensor of its files is not used: a"),
        (("a", "b"), "model = X: 2 tensors of its files are not used: a, b"),
        (("a", "b", "c"), "model = X: 3 tensors of its files are not used: a, b, c"),
        (("a", "b", "c", "d"), "model = X: 4 tensors of its files are not used: a, b, c, ..."),
        ((), ""),
    ],
)
def test_up_to_three_unused_keys_are_named(folder: Path, extra: tuple[str, ...], said: str) -> None:
    change(folder, (), **{key: torch.ones(1) for key in extra})
    assert opened(folder).note == said


def test_files_beside_the_index_are_not_read(folder: Path) -> None:
    """transformers does not read them either."""
    (folder / FILE).rename(folder / "model-00001-of-00001.safetensors")
    keys = list(load_file(folder / "model-00001-of-00001.safetensors"))
    (folder / INDEX_FILE).write_text(
        json.dumps({"weight_map": dict.fromkeys(keys, "model-00001-of-00001.safetensors")})
    )
    save_file({"other": torch.ones(1)}, folder / "consolidated.safetensors")
    assert opened(folder).note == "" and list(opened(folder).files) == [
        "model-00001-of-00001.safetensors"
    ]


# Heads that differ from the embedding
# ----------------------------------------------------------------------------------------


def test_heads_of_one_model_are_compared_again_for_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is cached within a process.

    The cache key contains the config, the name, the class, and every file with its modification
    time.
    """
    folder, asked = tmp_path / "model", []
    folder_of(folder, "llama", **TIED)
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    shards = {
        "model-00001-of-00002.safetensors": ["lm_head.weight"],
        "model-00002-of-00002.safetensors": [key for key in tensors if key != "lm_head.weight"],
    }
    for file, keys in shards.items():
        save_file({key: tensors[key] for key in keys}, folder / file, metadata={"format": "pt"})
    (folder / INDEX_FILE).write_text(
        json.dumps({"weight_map": {key: file for file, keys in shards.items() for key in keys}})
    )
    monkeypatch.setattr(
        untied_head, "_untied_if_different", lambda *words: (asked.append(words), (words[0], ""))[1]
    )
    monkeypatch.setattr(untied_head, "weights_folder", lambda name, revision: folder)
    config = config_json(str(folder))
    config_of_files(config, "org/name", "AutoModelForCausalLM")
    stamps = [f"{file}:{(folder / file).stat().st_mtime_ns}" for file in shards]
    assert asked == [(config, "org/name", "AutoModelForCausalLM", str(folder), *stamps)]


def test_what_needs_no_comparison_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Untied configs, and files with only one tensor of the vocabulary's size, are not compared."""
    monkeypatch.setattr(untied_head, "_untied_if_different", lambda *words: ({}, "compared"))
    folder = folder_of(tmp_path, "llama", **TIED)
    config = config_json(folder)
    assert config_of_files(config, folder, "AutoModelForCausalLM")[1] == "compared"
    untied = config | {"tie_word_embeddings": False}
    assert config_of_files(untied, folder, "AutoModelForCausalLM") == (untied, "")
    change(tmp_path, remove=("lm_head.weight",), other=torch.ones(1, 264), third=torch.ones(()))
    assert config_of_files(config, folder, "AutoModelForCausalLM") == (config, "")
    change(tmp_path, other=torch.ones(264))
    assert config_of_files(config, folder, "AutoModelForCausalLM")[1] == "compared"


@pytest.mark.parametrize("shape", [(264, 63), (264,)])
def test_a_head_of_another_shape_is_not_compared(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """A head with a wrong shape is rejected later, when the model is built."""
    folder = folder_of(tmp_path, "llama", **TIED)
    change(tmp_path, remove=("lm_head.weight",), **{"lm_head.weight": torch.ones(shape)})
    assert config_of_files(config_json(folder), folder, "AutoModelForCausalLM") == (
        config_json(folder),
        "",
    )


def compared(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], always: bool = False
) -> tuple[dict[str, Any], str]:
    """Compare three tied tensors in a model whose config has sub-configs; two of the tensors
    differ.
    """
    tied = {"head_a": "embed", "head_b": "embed", "head_c": "embed"}
    files = SimpleNamespace(
        where=["x"], shape_of=lambda one: [1], same_values=lambda one, other: one == stored("a")
    )
    monkeypatch.setattr(
        untied_head,
        "empty_model",
        lambda config, attention, name, auto_class: (config, attention, name, auto_class),
    )
    monkeypatch.setattr(
        untied_head, "open_files", lambda name, folder: files if folder == Path("F") else None
    )
    monkeypatch.setattr(
        untied_head,
        "find_stored",
        lambda model, keys: {
            "embed": stored("e"),
            "head_a": stored("a"),
            "head_b": stored("b"),
            "head_c": stored("c"),
        },
    )
    monkeypatch.setattr(
        untied_head,
        "tied_names",
        lambda model: (
            tied
            if model == (config, "eager", "N", "A")
            else dict(itertools.islice(tied.items(), 2 * always))
        ),
    )
    return untied_head._untied_if_different(config, "N", "A", "F", str(always))


def test_every_part_that_states_the_tie_is_untied(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "model_type": "t",
        "tie_word_embeddings": True,
        "a": {"tie_word_embeddings": True, "x": 1},
        "b": {"y": 2},
        "c": 3,
        "d": {"tie_word_embeddings": False},
    }
    changed, note = compared(monkeypatch, config)
    assert changed == config | {
        "tie_word_embeddings": False,
        "a": {"tie_word_embeddings": False, "x": 1},
    }
    assert (
        note == "model = N: head_b differs from embed in its files, so the two are not tied, as in"
        ' transformers. The run has "tie_word_embeddings": false'
    )
    assert compared(monkeypatch, {"model_type": "t", "a": {}})[0] == {
        "model_type": "t",
        "a": {},
        "tie_word_embeddings": False,
    }


def test_a_head_that_a_model_always_ties_must_not_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"^model = N: head_b and embed differ in its files, and a t always ties them\. Delete"
            r" head_b from its files$"
        ),
    ):
        compared(monkeypatch, {"model_type": "t", "tie_word_embeddings": True}, always=True)
