"""Small files in a model's folder: which files are listed, and their JSON.

Some of the files belong to a tokenizer or an adapter.
"""

import json
from pathlib import Path

import pytest
from recipekit.architectures import small_files as files
from recipekit.spec.errors import ConfigError

TOKENIZER = {
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    *(
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/rag.jinja",
        "spiece.model",
        "sentencepiece.bpe.model",
    ),
    *("tekken.json", "bpe.codes", "qwen.tiktoken", "source.spm", "own.model", "dict.codes"),
}
PROCESSORS = {
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "my_own_processor_config.json",
}
OTHER_SMALL = {
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "labels.txt",
    "own.jinja",
    "processor_config.txt",
    "xprocessor_config.json",
}
NOT_SMALL = {
    *("model.safetensors", "pytorch_model.bin", "a.py", "model.Q4_K_M.gguf", "json"),
    *(
        "model.safetensors.index.json",
        "pytorch_model.bin.index.json",
        "model.safetensors.index.fp16.json",
        "trainer_state.json",
        "run.json",
    ),
    *(
        "all_results.json",
        "train_results.json",
        "eval_results.json",
        "test_results.json",
        "predict_results.txt",
        "all_results_old.json",
    ),
    *(
        "LICENSE.txt",
        "license.json",
        "licence.txt",
        "Licence-de.txt",
        "NOTICE.txt",
        "README.txt",
        "USE_POLICY.txt",
        "requirements.txt",
    ),
}


@pytest.mark.parametrize("name", sorted(TOKENIZER | PROCESSORS | OTHER_SMALL | NOT_SMALL))
def test_the_kind_of_a_file_follows_from_its_name(name: str) -> None:
    assert files.is_small_file(Path("/models", name)) == (name not in NOT_SMALL)
    assert bool(files.TOKENIZER_FILES.fullmatch(name)) == (name in TOKENIZER)
    assert bool(files.PROCESSOR_FILES.fullmatch(name)) == (name in PROCESSORS)
    assert files.is_adapter_file(name) == (name in TOKENIZER | PROCESSORS | {"adapter_config.json"})


def test_words_inside_a_name_make_no_record_of_training() -> None:
    for name in (
        "my_trainer_state.json",
        "run.json.txt",
        "small_results.json",
        "the_license.txt",
        "indexed.json",
    ):
        assert files.is_small_file(Path(name)), name


def test_folders_and_files_in_folders_are_not_listed(tmp_path: Path) -> None:
    """Named chat templates are listed. Code is listed only if a config has an auto_map."""
    for name in (
        "onnx/config.json",
        "additional_chat_templates/b.jinja",
        "additional_chat_templates/a.txt",
        "z.json",
        "a.txt",
        "b.model",
        "own.py",
        "model.bin",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "vocab.json").write_text('{"auto_map": 3}')  # a token, not a key of a config
    listed = ["a.txt", "additional_chat_templates/b.jinja", "b.model", "vocab.json", "z.json"]
    assert files.small_files(tmp_path) == listed
    (tmp_path / "own_config.json").write_text('{"auto_map": {}}')
    assert files.small_files(tmp_path) == sorted([*listed, "own.py", "own_config.json"])


def test_a_file_that_holds_no_json_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^X: is not JSON: .*\. Download the model again, or delete the file$"
    ):
        files.parse_json(b"{", "X")
    for content in (b"[]", b"3", b"null", b'"a"'):
        with pytest.raises(
            ConfigError,
            match=r"^X: is not a JSON object\. Download the model again, or delete the file$",
        ):
            files.parse_json(content, "X")
    (tmp_path / "a.json").write_text('{"a": [1]}')
    assert files.read_json(tmp_path / "a.json") == {"a": [1]}
    with pytest.raises(
        ConfigError,
        match=(
            r"b\.json: cannot be read: No such file or directory\. Give this user permission to"
            r" read it"
        ),
    ):
        files.read_json(tmp_path / "b.json")


def test_the_dtype_is_written_where_one_is_stated() -> None:
    own = {
        "dtype": "float16",
        "a": {"torch_dtype": "float32", "dtype": None, "b": {"dtype": "auto", "c": 1}},
        "torch_dtype": None,
        "d": ["dtype"],
        "e": None,
    }
    wanted = {
        "dtype": "bfloat16",
        "a": {"torch_dtype": "bfloat16", "b": {"dtype": "bfloat16", "c": 1}},
        "d": ["dtype"],
        "e": None,
    }
    before = json.dumps(own)
    assert files.with_dtype(own, "bfloat16") == wanted and json.dumps(own) == before
    for same in ({"c": 1}, {"dtype": {"c": 1}}):
        assert files.with_dtype(same, "float32") == same
    assert files.with_dtype({"torch_dtype": "float16", "dtype": "float16"}, "float32") == {
        "torch_dtype": "float32",
        "dtype": "float32",
    }
