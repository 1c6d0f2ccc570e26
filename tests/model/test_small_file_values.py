"""Selection of and changes to a run's small files, value by value."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recipekit.data.processors import byte_tokenizer
from recipekit.model import small_files
from recipekit.model.empty import empty_model
from recipekit.model.small_files import (
    Origin,
    SmallFiles,
    collect_small_files,
    origin_of,
    token_ids_in,
    updated_config,
    with_special_tokens,
)
from special_tokens import END, number
from tiny_models import tiny_config
from transformers import AutoConfig, AutoModelForMaskedLM

# key -> (value, its remainder with special tokens only). 3 is a special token, and 7 is not.
IDS: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(
        (
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "decoder_start_token_id",
            "forced_bos_token_id",
            "forced_eos_token_id",
        ),
        (7, None),
    ),
    "suppress_tokens": ([7, 3], [3]),
    "begin_suppress_tokens": ([3, 7, 7], [3]),
    "bad_words_ids": ([[3], [3, 7]], None),
    "force_words_ids": ([[[3, 3], [7]]], None),
    "sequence_bias": ({"(3, 7)": -1.5, "(3,)": 1.0}, None),
    "forced_decoder_ids": ([[3, 7]], None),
}


@pytest.mark.parametrize("key", IDS)
def test_a_value_with_ids_of_another_vocabulary_is_left_out(key: str) -> None:
    value, kept = IDS[key]
    own = {"top_k": 7, key: value, "max_length": 7}
    wanted = {"top_k": 7, "max_length": 7} | ({key: kept} if kept else {})
    assert with_special_tokens(own, {3, 9}) == (wanted, [f"{key} {value}"])
    assert with_special_tokens(own, {3, 7}) == (own, [])


def test_ids_are_collected_from_every_form() -> None:
    assert token_ids_in(None) == token_ids_in(1.5) == token_ids_in([]) == token_ids_in("12") == []
    assert token_ids_in(7) == [7] and token_ids_in([4, [5, [6, 1.5]], None]) == [4, 5, 6]
    assert token_ids_in({"(31, 4)": 2, "(5,)": 3, "6": 1, "none": 2}) == [31, 4, 5, 6]


@pytest.mark.parametrize(
    ("own", "before", "now", "wanted"),
    [
        *(
            ({}, {key: 1}, {key: 2}, {})
            for key in (
                "dtype",
                "use_cache",
                "_name_or_path",
                "transformers_version",
                "architectures",
            )
        ),
        *(({}, {}, {f"_attn_implementation{more}": "sdpa"}, {}) for more in ("", "_internal")),
        ({"own": 1}, {"a": 1}, {"a": 1}, {"own": 1}),
        ({"a": 5}, {"a": 1}, {"a": 1}, {"a": 5}),  # the config class renames the key
        ({"a": 5}, {"a": 1}, {"a": 2}, {"a": 2}),
        ({}, {}, {"a": None}, {"a": None}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 2}}, {"a": {"y": 3}}, {"a": {"x": 1, "y": 3}}),
        (
            {"a": {"x": {"z": 1}}},
            {"a": {"x": {"z": 1}}},
            {"a": {"x": {"z": 1, "w": 2}}},
            {"a": {"x": {"z": 1, "w": 2}}},
        ),
        ({"a": {"x": 1}}, {"a": None}, {"a": {"y": 3}}, {"a": {"y": 3}}),
        ({"a": None}, {"a": {"x": 1}}, {"a": {"x": 1, "y": 3}}, {"a": {"x": 1, "y": 3}}),
        ({"a": {"x": 1}}, {"a": {"x": 1}}, {"a": 4}, {"a": 4}),
    ],
)
def test_a_config_takes_what_changed_and_nothing_of_the_construction(
    own: Any, before: Any, now: Any, wanted: Any
) -> None:
    given = json.dumps(own)
    assert small_files._with_changed_values(own, before, now) == wanted and json.dumps(own) == given


def test_a_config_states_its_dtype_once_and_uses_its_cache() -> None:
    own = tiny_config("llama")
    plain = {
        key: value for key, value in own.items() if key not in ("dtype", "torch_dtype", "use_cache")
    }
    config = AutoConfig.for_model(**plain)
    config.num_attention_heads += 2
    wanted = plain | {"num_attention_heads": config.num_attention_heads, "dtype": "float16"}
    assert updated_config(plain, config, "float16") == wanted
    older = {key: value for key, value in wanted.items() if key != "dtype"} | {
        "torch_dtype": "float16"
    }
    assert updated_config(plain | {"torch_dtype": "float32"}, config, "float16") == older
    for given, made in ((False, True), (True, True)):
        assert updated_config(plain | {"use_cache": given}, config, "float16") == wanted | {
            "use_cache": made
        }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model folder with the byte-level tokenizer."""
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_the_folders_of_the_small_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(
        small_files, "weights_folder", lambda model, revision: tmp_path / f"weights of {model}"
    )
    own, other, link = str(folder), tmp_path / "other", tmp_path / "link"
    byte_tokenizer().save_pretrained(other)
    link.symlink_to(folder)
    cases: dict[tuple[str, str, str, bool], Origin] = {
        (own, "random", "", True): Origin(folder, folder, True),
        (own, "random", own, True): Origin(folder, folder, True),
        (own, "random", str(link), True): Origin(folder, folder, True),
        (own, "random", str(other), True): Origin(folder, other, False),
        (own, "random", "bytes", True): Origin(folder, None, False),
        (own, "random", "org/name", True): Origin(folder, None, False),
        (own, "random", "", False): Origin(folder, None, True),
        (own, "random", str(other), False): Origin(folder, None, True),
        (own, "pretrained", "bytes", True): Origin(tmp_path / f"weights of {own}", None, False),
        ("none", "random", str(other), True): Origin(None, other, False),
        ("none", "random", "bytes", True): Origin(None, None, False),
    }
    for case, wanted in cases.items():
        found = origin_of(*case)
        assert found == wanted and found.carries_tokenizer == (
            wanted.own_tokenizer and wanted.tokenizer is not None
        ), case
    assert Origin() == Origin(None, None, True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    byte_tokenizer().save_pretrained(tmp_path / "bytes")
    assert origin_of(own, "random", "bytes", True) == Origin(folder, None, False), (
        "the word, not a folder of that name"
    )
    assert origin_of(own, "random", "~/other", True) == Origin(folder, other, False)
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "a.gguf").write_bytes(b"GGUF")
    assert origin_of(own, "random", str(tmp_path / "gguf"), True) == Origin(folder, None, False)

    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    (snapshot / "tokenizer_config.json").write_text("{}")  # a tokenizer without a model
    assert origin_of(own, "random", "org/name", True) == Origin(folder, snapshot, False)
    for path in folder.glob("*token*"):
        path.unlink()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert origin_of(own, "random", "", True) == Origin(folder, None, True)


def built_of(model: Any, architecture: str) -> Any:
    """Return a fake of a built model with the fields that `gather` reads."""
    model_plan = SimpleNamespace(architecture=architecture)
    return SimpleNamespace(models=[model], model_plan=model_plan)


def contents_of(origin: Origin, ends: tuple[int, ...] = (), **changes: Any) -> SmallFiles:
    config = tiny_config("llama") | changes
    built: Any = built_of(empty_model(config), "LlamaForCausalLM")
    return collect_small_files(built, config, byte_tokenizer(), torch.float16, origin, ends)


def test_a_derived_generation_config_names_the_tokenizers_end_token(folder: Path) -> None:
    """Only additional end tokens are reported."""
    plain = contents_of(Origin(folder, folder), eos_token_id=None)
    assert (
        json.loads(plain.contents["generation_config.json"])["eos_token_id"] == number(END)
        and plain.notes == ()
    )
    assert (
        json.loads(
            contents_of(Origin(folder, folder), eos_token_id=5).contents["generation_config.json"]
        )["eos_token_id"]
        == 5
    )
    added = contents_of(Origin(folder, folder), ends=(97,), eos_token_id=5)
    assert json.loads(added.contents["generation_config.json"])["eos_token_id"] == [5, 97]
    assert added.notes == (
        "generation_config.json: exports also stop at ¤ (97), which ends an answer in training",
    )
    added = contents_of(Origin(folder, folder), ends=(97, number(END), 97), eos_token_id=None)
    assert json.loads(added.contents["generation_config.json"])["eos_token_id"] == [97, number(END)]
    assert added.notes == (
        "generation_config.json: exports also stop at ¤ (97), which ends an answer in training",
    )


def test_a_changed_generation_config_is_no_longer_a_derived_one(folder: Path) -> None:
    own = {"eos_token_id": 5, "_from_model_config": True, "_original_object_hash": 123, "top_k": 9}
    (folder / "generation_config.json").write_text(json.dumps(own))
    found = json.loads(
        contents_of(Origin(folder, folder), ends=(97,)).contents["generation_config.json"]
    )
    assert found == {"eos_token_id": [5, 97], "top_k": 9}


def test_a_model_that_does_not_generate_has_a_generation_config_only_if_its_folder_has_one(
    folder: Path,
) -> None:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 264,
    }
    config = {"model_type": "bert", **sizes}
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(**config))
    built: Any = built_of(model, "BertForMaskedLM")
    assert (
        "generation_config.json"
        not in collect_small_files(
            built, config, byte_tokenizer(), torch.float32, Origin(folder, folder), ()
        ).contents
    )
    (folder / "generation_config.json").write_text('{"eos_token_id": 5,  "a": 1}')
    found = collect_small_files(
        built, config, byte_tokenizer(), torch.float32, Origin(folder, folder), ()
    ).contents
    assert found["generation_config.json"] == b'{"eos_token_id": 5,  "a": 1}'
    assert json.loads(found["config.json"]) == config | {
        "dtype": "float32",
        "architectures": ["BertForMaskedLM"],
    }


class Pictures:
    """A processor that does not read text."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "preprocessor_config.json").write_text('{"made": 1}')
        Path(folder, "nested").mkdir()
        Path(folder, "nested", "a.json").write_text("{}")


def test_files_of_a_model_that_reads_no_text_are_carried_with_its_tokenizer(folder: Path) -> None:
    """The run's image processor replaces the model's image processor.

    A processor_config.json that contains an image processor is also updated.
    """
    for name in ("preprocessor_config.json", "adapter_config.json", "generation_config.json"):
        (folder / name).write_text('{"a": 1}')
    for processor, wanted in (
        ({"processor_class": "X"}, {"processor_class": "X"}),
        ({"b": 2, "image_processor": {"c": 3}}, {"b": 2, "image_processor": {"made": 1}}),
    ):
        (folder / "processor_config.json").write_text(json.dumps(processor))
        found, notes = small_files._collect_contents(Origin(folder), Pictures(), reads_text=False)
        assert json.loads(found["processor_config.json"]) == wanted and notes == []
        assert (
            found["preprocessor_config.json"] == b'{"made": 1}' and found["nested/a.json"] == b"{}"
        )
        assert found["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
        assert not {"config.json", "generation_config.json", "adapter_config.json"} & found.keys()
    (folder / "processor_config.json").write_text('{"image_processor": {"c": 3}}')
    carried, _ = small_files._collect_contents(
        Origin(folder, None, False), byte_tokenizer(), reads_text=True
    )
    assert (
        carried["processor_config.json"] == b'{"image_processor": {"c": 3}}'
        and carried["preprocessor_config.json"] == b'{"a": 1}'
    )


def test_another_tokenizers_files_state_the_version_that_wrote_them(folder: Path) -> None:
    import transformers

    for origin, version in (
        (Origin(folder, folder, True), "4.30.0"),
        (Origin(folder, folder, False), transformers.__version__),
        (Origin(folder), transformers.__version__),
    ):
        config = json.loads(
            contents_of(origin, transformers_version="4.30.0").contents["config.json"]
        )
        assert (
            config["transformers_version"] == version
            and config["dtype"] == "float16"
            and config["architectures"] == ["LlamaForCausalLM"]
        )


def test_a_run_without_text_keeps_the_version_of_the_config(folder: Path) -> None:
    config = tiny_config("llama") | {"transformers_version": "4.30.0"}
    built: Any = built_of(empty_model(config), "LlamaForCausalLM")
    for origin in (Origin(folder), Origin()):
        contents = collect_small_files(
            built, config, Pictures(), torch.float32, origin, ()
        ).contents
        assert (
            json.loads(contents["config.json"])["transformers_version"] == "4.30.0"
            and contents["preprocessor_config.json"] == b'{"made": 1}'
        )


def test_a_tokenizer_may_be_inside_a_processor() -> None:
    tokenizer = byte_tokenizer()
    assert (
        small_files._tokenizer_of(tokenizer) is tokenizer
        and small_files._tokenizer_of(SimpleNamespace(tokenizer=tokenizer)) is tokenizer
    )
    assert small_files._tokenizer_of(Pictures()) is None


def test_a_file_above_the_limit_is_left_out_with_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {name: b"x" * size for name, size in (("vocab.txt", 6000), ("merges.txt", 6001))}
    for name, held in content.items():
        (folder / name).write_bytes(held)
    assert small_files.files.MAX_SMALL_FILE_BYTES == 2**27
    monkeypatch.setattr(small_files.files, "MAX_SMALL_FILE_BYTES", 6000)
    contents, notes = dict[str, bytes](), list[str]()
    small_files._add_files(folder, lambda name: name in content, contents, notes)
    assert contents == {"vocab.txt": content["vocab.txt"]}
    assert notes == [
        f"{folder / 'merges.txt'}: 6,001 bytes are too large for a config or tokenizer file."
        " Exports leave it out"
    ]


def test_an_adapter_is_exported_with_its_card_and_the_tokenizers_files(tmp_path: Path) -> None:
    names = (
        "config.json",
        "adapter_config.json",
        "additional_chat_templates/a.jinja",
        "tokenizer.json",
        "preprocessor_config.json",
        "README.md",
        "labels.txt",
        "own.py",
    )
    small = SmallFiles({name: name.encode() for name in names})
    for of_adapter, wanted in ((False, set(names)), (True, {*names[1:6]})):
        small.write(tmp_path / str(of_adapter), of_adapter)
        found = {
            path.relative_to(tmp_path / str(of_adapter)).as_posix(): path.read_bytes()
            for path in (tmp_path / str(of_adapter)).rglob("*")
            if path.is_file()
        }
        assert found == {name: name.encode() for name in wanted}


@pytest.mark.parametrize(
    ("made", "own"),
    [(b"\xff", b'{"a": 1}'), (b'{"b": 2}', b"{"), (b"[1]", b'{"a": 1}'), (b'{"b": 2}', b"[1]")],
)
def test_a_tokenizers_file_that_is_no_json_object_stays(made: bytes, own: bytes) -> None:
    assert small_files._with_own_keys(made, own) == made
