"""A run exports the model's small files unchanged, except for values that the training decides."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from built_models import build_model
from recipekit.data.processors import byte_tokenizer
from recipekit.model import small_files
from recipekit.model.build import BuiltModel
from recipekit.model.empty import config_of
from recipekit.model.small_files import SmallFiles, collect_small_files, origin_of, updated_config
from recipekit.runtime import small_files as of_run
from recipekit.runtime.small_files import end_tokens
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from special_tokens import BEGIN, END, TURN, number
from tiny_models import ds_config, tiny_config
from transformers import AutoTokenizer, GenerationConfig


def build(config: dict[str, Any], adapt: Any = None) -> BuiltModel:
    return build_model(
        Recipe(model="none", init="random", adapt=adapt),
        config,
        None,
        ds_config(0),
        torch.device("cpu"),
    )


def carried(
    folder: Path,
    built: BuiltModel,
    config: dict[str, Any],
    tokenizer: str = "",
    ends: tuple[int, ...] = (),
    processor: Any = None,
) -> SmallFiles:
    """Collect the small files of a run from random weights; `config` is the config.json in
    `folder`.
    """
    (folder / "config.json").write_text(json.dumps(config))
    origin = origin_of(str(folder), "random", tokenizer, reads_text=True)
    return collect_small_files(
        built, config, processor or byte_tokenizer(), torch.bfloat16, origin, ends
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model folder with the byte-level tokenizer."""
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


GENERATION: dict[str, dict[str, Any]] = {
    "instruct model": {
        "eos_token_id": [256, 260],
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
    },
    "no end token": {
        "max_new_tokens": 7,
        "repetition_penalty": 1.05,
        "transformers_version": "4.40.0",
    },
    "suppressed tokens": {"eos_token_id": 3, "suppress_tokens": [1, 2], "bad_words_ids": [[5, 6]]},
    "key that no class knows": {"eos_token_id": 9, "served_by": {"name": "x", "values": [1, None]}},
}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("own", GENERATION.values(), ids=GENERATION)
def test_the_models_generation_config_is_carried(folder, kind, own):
    content = json.dumps(own, indent=3).encode()
    (folder / "generation_config.json").write_bytes(content)
    config = tiny_config(kind) | {"eos_token_id": 1}
    found = carried(folder, build(config), config)
    if "eos_token_id" in own:
        assert found.contents["generation_config.json"] == content and found.notes == ()
    else:  # documents end with the tokenizer's end token, which the file does not contain
        assert json.loads(found.contents["generation_config.json"]) == own | {
            "eos_token_id": number(END)
        }
        assert len(found.notes) == 1 and END in found.notes[0]


@pytest.mark.parametrize(
    ("eos", "wanted"),
    [
        (number(END), [number(END), number(TURN)]),
        ([number(TURN)], [number(TURN), number(END)]),
        ([3, number(TURN), number(END)], [3, number(TURN), number(END)]),
        (None, [number(END), number(TURN)]),
    ],
    ids=["base model", "end of turn only", "both and another", "none"],
)
def test_end_tokens_of_answers_are_added_and_none_is_removed(folder, eos, wanted):
    own = {"eos_token_id": eos, "top_k": 20, "_from_model_config": True}
    (folder / "generation_config.json").write_text(json.dumps(own))
    config = tiny_config("llama")
    found = carried(folder, build(config), config, ends=end_tokens(byte_tokenizer()))
    made = json.loads(found.contents["generation_config.json"])
    assert made["eos_token_id"] == wanted and made["top_k"] == 20
    added = [one for one in wanted if one not in (eos if isinstance(eos, list) else [eos])]
    assert len(found.notes) == bool(added) and all(f"({one})" in found.notes[0] for one in added)
    assert ("_from_model_config" in made) == (not added)


@pytest.mark.parametrize(
    ("template", "special", "wanted"),
    [
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}<turn_end>\n{% endfor %}",
            True,
            ["<turn_end>"],
        ),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}" + END + "{% endfor %}", True, []),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n### \n{% endfor %}", True, []),
        ("{% for m in messages %}{{ raise_exception('no') }}{% endfor %}", True, []),
        ("", True, []),
    ],
    ids=["own token", "the tokenizer's", "text", "refuses", "no template"],
)
def test_the_end_token_of_an_answer_is_found_in_the_template(template, special, wanted):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_tokens(["<turn_end>"], special_tokens=special)
    assert end_tokens(tokenizer) == (
        number(END),
        *(tokenizer.convert_tokens_to_ids(token) for token in wanted),
    )


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (
            "{{ m.content }}<turn_end>{% if loop.last %}<text_end>{% endif %}",
            ["<turn_end>", "<text_end>"],
        ),
        (
            (
                "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}<call_end>{% else"
                " %}<turn_end>{% endfor %}"
            ),
            ["<turn_end>", "<call_end>"],
        ),
    ],
    ids=["behind the last answer", "behind a tool call"],
)
def test_every_end_of_an_answer_is_found_in_the_template(source, wanted):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>" + source + "{% endfor %}"
    tokenizer.add_tokens(["<turn_end>", "<text_end>", "<call_end>"], special_tokens=True)
    assert tokenizer.convert_ids_to_tokens(list(end_tokens(tokenizer))) == [END, *wanted]


def test_end_tokens_by_task_and_tokenizer():
    """The tokenizer's end token comes first and occurs only once. An unusable template adds no
    token.
    """
    tokenizer = byte_tokenizer()
    assert (
        end_tokens(tokenizer)
        == end_tokens(tokenizer, "sft")
        == end_tokens(tokenizer, "preference")
        == (number(END), number(TURN))
    )
    assert end_tokens(tokenizer, "pretrain") == (number(END),)
    tokenizer.chat_template = {"one": tokenizer.chat_template, "two": ""}
    assert end_tokens(tokenizer) == (number(END),)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = TURN
    assert end_tokens(tokenizer) == (number(TURN),)
    tokenizer.eos_token = None
    assert end_tokens(tokenizer) == (number(TURN),) and end_tokens(tokenizer, "preference") == (
        number(TURN),
    )


@pytest.mark.parametrize(
    ("task", "ends", "reads_text"),
    [
        ("sft", 2, True),
        ("preference", 2, True),
        ("pretrain", 0, True),
        ("reward", 0, True),
        ("masked_lm", 0, True),
        ("image_classification", 0, False),
    ],
)
def test_small_files_of_a_run_are_gathered_with_the_ends_of_its_answers(
    monkeypatch, task, ends, reads_text
):
    given: list[Any] = []
    monkeypatch.setattr(of_run, "origin_of", lambda *words: words)
    monkeypatch.setattr(of_run, "export_dtype", lambda plan, config: torch.float16)
    monkeypatch.setattr(
        of_run,
        "collect_small_files",
        lambda *words: given.append(words) or SmallFiles({}, ("n1", "n2")),
    )
    recipe = Recipe(model="m", init="random", tokenizer="t", task=task)
    built: Any = SimpleNamespace(model_plan=SimpleNamespace(model_config={"a": 1}))
    for processor in (byte_tokenizer(), SimpleNamespace(tokenizer=byte_tokenizer())):
        said: list[str] = []
        of_run.small_files_of(SimpleNamespace(recipe=recipe), built, processor, said.append)  # type: ignore[arg-type]
        expected = (number(END), number(TURN))[:ends]
        assert given.pop() == (
            built,
            {"a": 1},
            processor,
            torch.float16,
            ("m", "random", "t", reads_text, ""),
            expected,
        ) and said == ["n1", "n2"]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_derived_generation_config_generates_with_a_cache(folder, kind):
    """Training disables the cache, but generation needs it.

    The exported model must not inherit the training setting.
    """
    found = carried(folder, build(tiny_config(kind)), tiny_config(kind))
    found.write(folder.parent / "hf")
    assert "use_cache" not in json.loads(found.contents["generation_config.json"])
    assert GenerationConfig.from_pretrained(folder.parent / "hf").use_cache in (None, True)


def test_a_generation_config_without_its_tokenizer_keeps_no_token_ids(folder):
    """A trial with --tiny has a byte vocabulary.

    Sampling parameters are kept, and a message lists the ids that were removed.
    """
    own = {
        "eos_token_id": [151645, 97],
        "bos_token_id": number(BEGIN),
        "pad_token_id": 151643,
        "suppress_tokens": [97, 98],
        "top_p": 0.8,
    }
    (folder / "generation_config.json").write_text(json.dumps(own))
    config = tiny_config("llama")
    found = carried(folder, build(config), config, tokenizer="bytes")
    made = json.loads(found.contents["generation_config.json"])
    assert made == {"bos_token_id": number(BEGIN), "top_p": 0.8, "eos_token_id": number(END)}
    assert (
        "eos_token_id [151645, 97], pad_token_id 151643, suppress_tokens [97, 98]" in found.notes[0]
    )
    assert END in found.notes[1]


def test_ids_without_an_embedding_leave_a_generation_config(folder):
    """The tokenizer has these special tokens, but the model's vocabulary ends before them."""
    config = tiny_config("llama") | {"vocab_size": number(TURN)}
    assert number(END) < number(TURN)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [number(END), number(TURN)], "pad_token_id": number(TURN)})
    )
    found = carried(folder, build(config), config, tokenizer="bytes")
    assert json.loads(found.contents["generation_config.json"]) == {"eos_token_id": [number(END)]}
    assert (
        f"eos_token_id [{number(END)}, {number(TURN)}], pad_token_id {number(TURN)}"
        in found.notes[0]
    )


def test_a_damaged_generation_config_is_refused(folder):
    config = tiny_config("llama")
    built = build(config)
    for content in ("{", "[]", "\xff"):
        (folder / "generation_config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(ConfigError, match=r"generation_config\.json: is not"):
            carried(folder, built, config)


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "keys that no class knows": (
        "llama",
        {"served_by": {"a": [1, None]}, "auto_flag": False, "transformers_version": "4.31.0"},
    ),
    "names of an older transformers": (
        "llama",
        {"rope_theta": 500000.0, "rope_scaling": None, "torch_dtype": "float16"},
    ),
    "no dtype, written as null": ("llama", {"torch_dtype": None, "dtype": None}),
    "a default value": (
        "qwen3",
        {"attention_dropout": 0.0, "use_sliding_window": False, "torch_dtype": "bfloat16"},
    ),
    "task parameters": (
        "gpt2",
        {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}},
    ),
}


@pytest.mark.parametrize(("kind", "own"), CONFIGS.values(), ids=CONFIGS)
def test_config_json_keeps_every_key(folder, kind, own):
    config = {
        key: value
        for key, value in tiny_config(kind).items()
        if key not in ("dtype", "torch_dtype", "rope_parameters")
    } | own
    made = json.loads(carried(folder, build(config), config).contents["config.json"])
    dtype = "torch_dtype" if own.get("torch_dtype") else "dtype"
    assert made == {
        key: value for key, value in config.items() if key != "torch_dtype" or value
    } | {dtype: "bfloat16"}


def resized(model: Any) -> Any:
    model.config.vocab_size = 272
    model.config.tie_word_embeddings = not model.config.tie_word_embeddings
    return model


def test_config_json_has_what_was_changed_after_it_was_read(folder):
    config = tiny_config("llama") | {
        "use_cache": False,
        "text_notes": {"dtype": "float32", "vocab_size": 264},
    }
    made = json.loads(carried(folder, build(config, adapt=resized), config).contents["config.json"])
    assert made["vocab_size"] == 272 and made["tie_word_embeddings"] == (
        not config.get("tie_word_embeddings", False)
    )
    assert made["use_cache"] is True and made["text_notes"] == {
        "dtype": "bfloat16",
        "vocab_size": 264,
    }


def test_a_nested_config_keeps_its_keys_beside_a_changed_value():
    text, vision = (
        {"model_type": kind, "served_by": {"a": 1}}
        for kind in ("gemma3_text", "siglip_vision_model")
    )
    own = {
        "model_type": "gemma3",
        "text_config": text | {"hidden_size": 32},
        "vision_config": vision,
    }
    config: Any = config_of(own)
    config.text_config.hidden_size, config.vision_config.image_size = 48, 42
    found = updated_config(own, config, "bfloat16")
    assert found["text_config"] == own["text_config"] | {"hidden_size": 48}
    assert found["vision_config"] == own["vision_config"] | {"image_size": 42}


def test_the_models_own_tokenizer_is_carried_byte_for_byte(folder):
    """The copy includes unknown keys and files, several templates, and the processors' files.

    Weights, records and licenses are not copied.
    """
    own = json.loads((folder / "tokenizer_config.json").read_text()) | {
        "served_by": "x",
        "add_prefix_space": False,
    }
    kept = {
        "tokenizer_config.json": json.dumps(own),
        "special_tokens_map.json": '{"eos_token": {"content": "<|endoftext|>", "note": 1}}',
        "added_tokens.json": '{"<|reserved_2|>": 263}',
        "vocab.json": "{}",
        "merges.txt": "#version: 0.2",
        "tokenizer.model": "sentencepiece",
        "additional_chat_templates/tool_use.jinja": "{{ tools }}",
        "additional_chat_templates/rag.jinja": "{{ documents }}",
        "preprocessor_config.json": '{"image_mean": [0.5], "patch": 7}',
        "processor_config.json": '{"processor_class": "X"}',
    }
    others = [
        "model.safetensors.index.json",
        "pytorch_model.bin.index.json",
        "model.safetensors.index.fp16.json",
        "trainer_state.json",
        "run.json",
        "all_results.json",
        "adapter_config.json",
        "LICENSE.txt",
        "README.md",
        "a.py",
    ]
    for name, content in [*kept.items(), *((name, "{}") for name in others)]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    config = tiny_config("llama")
    found = carried(folder, build(config), config, processor=AutoTokenizer.from_pretrained(folder))
    found.write(folder.parent / "hf")
    there = {
        path.relative_to(folder.parent / "hf").as_posix()
        for path in (folder.parent / "hf").rglob("*")
        if path.is_file()
    }
    assert there == {
        *kept,
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    }
    for name in (*kept, "tokenizer.json", "chat_template.jinja"):
        assert (folder.parent / "hf" / name).read_bytes() == (folder / name).read_bytes(), name
    again = AutoTokenizer.from_pretrained(folder.parent / "hf")
    assert sorted(again.chat_template) == ["default", "rag", "tool_use"]
    found.write(folder.parent / "adapter", of_adapter=True)
    beside = {path.name for path in (folder.parent / "adapter").iterdir()}
    assert {"tokenizer.json", "vocab.json", "additional_chat_templates"} <= beside and not {
        "config.json",
        "generation_config.json",
    } & beside


def test_another_tokenizer_leaves_its_own_files(folder):
    """The files of the model's own tokenizer are not copied.

    The new tokenizer's unknown keys, and the files that its class does not write, are copied.
    """
    other = folder.parent / "other"
    made = byte_tokenizer()
    made.chat_template = "{{ messages }}"
    made.save_pretrained(other)
    own = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(own | {"served_by": "other"}))
    (other / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    (other / "vocab.txt").write_text("other")
    (other / "generation_config.json").write_text('{"eos_token_id": 7}')
    (folder / "vocab.json").write_text("the model's")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": number(TURN), "top_k": 3})
    )
    config = tiny_config("llama") | {"transformers_version": "4.30.0"}
    found = carried(
        folder,
        build(config),
        config,
        tokenizer=str(other),
        processor=AutoTokenizer.from_pretrained(other),
    )
    assert (
        found.contents["chat_template.jinja"] == b"{{ messages }}"
        and found.contents["vocab.txt"] == b"other"
    )
    assert "vocab.json" not in found.contents and "special_tokens_map.json" in found.contents
    assert json.loads(found.contents["tokenizer_config.json"])["served_by"] == "other"
    assert json.loads(found.contents["generation_config.json"]) == {
        "eos_token_id": number(TURN),
        "top_k": 3,
    }


@pytest.mark.parametrize(
    ("made", "own", "wanted"),
    [
        ({"a": 1, "b": 2}, {"b": 3, "c": 4}, {"a": 1, "b": 2, "c": 4}),  # the class's values win
        ({"a": 1}, {"a": 2, "chat_template": "old"}, {"a": 1}),
        (
            {"a": 1, "chat_template": "new"},
            {"chat_template": "old"},
            {"a": 1, "chat_template": "new"},
        ),
        ({"model": {}, "a": 1}, {"a": 2, "c": 4}, {"model": {}, "a": 1}),  # tokenizer.json
        ({"a": 1}, None, {"a": 1}),
    ],
)
def test_what_a_tokenizer_writes_is_kept_and_only_keys_that_it_lacks_are_added(made, own, wanted):
    found = small_files._with_own_keys(
        json.dumps(made).encode(), None if own is None else json.dumps(own).encode()
    )
    assert json.loads(found) == wanted


def test_files_of_a_model_in_the_hub_cache_are_found(folder, tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (snapshot / "config.json").write_text("{}")
    assert origin_of("org/name", "random", "", reads_text=True).model == snapshot
    assert origin_of("org/name", "random", "org/name", reads_text=True).carries_tokenizer
    assert origin_of("none", "random", "org/name", reads_text=True).tokenizer == snapshot
    assert origin_of("none", "random", "", reads_text=True).model is None


def test_code_is_carried_where_an_auto_map_names_it(folder):
    (folder / "modeling_own.py").write_text("raise SystemExit")
    config = tiny_config("llama")
    built = build(config)
    assert "modeling_own.py" not in carried(folder, built, config).contents
    with_code = config | {"auto_map": {"AutoModelForCausalLM": "modeling_own.LlamaForCausalLM"}}
    found = carried(folder, built, with_code)
    assert found.contents["modeling_own.py"] == b"raise SystemExit"
    assert json.loads(found.contents["config.json"])["auto_map"] == with_code["auto_map"]


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "preprocessor_config.json", "processor_config.json"]
)
def test_code_is_carried_that_another_file_than_config_json_names(folder, name):
    (folder / "own.py").write_text("raise SystemExit")
    held = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(
        json.dumps(held | {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}})
    )
    config = tiny_config("llama")
    assert carried(folder, build(config), config).contents["own.py"] == b"raise SystemExit"
