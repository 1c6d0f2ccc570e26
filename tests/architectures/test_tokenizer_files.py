"""Tokenizer files that are empty, truncated or of a different kind.

They are rejected by name before any file is loaded.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from recipekit.architectures import small_files
from recipekit.architectures.lookup import local_tokenizer
from recipekit.data.processors import byte_tokenizer, load_tokenizer
from recipekit.spec.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


BROKEN: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "empty": (
        "tokenizer.json",
        lambda file: file.write_text(""),
        "is empty (0 bytes). Download the tokenizer again",
    ),
    "blank": ("tokenizer.json", lambda file: file.write_text(" \n"), "is empty (2 bytes)"),
    "cut": ("tokenizer.json", cut, "is not JSON: "),
    "another object": (
        "tokenizer.json",
        lambda file: file.write_text('{"error": "Not found"}'),
        "contains no tokenizer: its key model is missing",
    ),
    "a page": (
        "tokenizer.json",
        lambda file: file.write_text("<html>Sign in</html>"),
        "is not JSON: ",
    ),
    "config empty": (
        "tokenizer_config.json",
        lambda file: file.write_text(""),
        "is empty (0 bytes)",
    ),
    "config a list": (
        "tokenizer_config.json",
        lambda file: file.write_text("[]"),
        "is not a JSON object",
    ),
    "map cut": (
        "special_tokens_map.json",
        lambda file: file.write_text('{"eos_token": "<'),
        "is not JSON: ",
    ),
    "model empty": ("tokenizer.model", lambda file: file.write_text(""), "is empty (0 bytes)"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named(folder: Path, name: str) -> None:
    file, break_it, rule = BROKEN[name]
    break_it(folder / file)
    for flags in ((str(folder), ""), ("org/model", str(folder))):
        with pytest.raises(ConfigError) as refused:
            local_tokenizer(*flags)
        assert str(refused.value).startswith(f"{folder / file}: {rule}")


def test_a_large_file_is_judged_by_its_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_files, "MAX_PARSED_BYTES", 1000)
    assert local_tokenizer(str(folder)) == folder
    cut(folder / "tokenizer.json")
    with pytest.raises(
        ConfigError,
        match=(
            r"tokenizer.json: is truncated, or is not a JSON object\. Download the tokenizer again"
        ),
    ):
        local_tokenizer(str(folder))


def test_files_that_a_library_alone_can_judge_are_refused_when_loaded(folder: Path) -> None:
    whole = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(
        json.dumps(whole | {"model": whole["model"] | {"type": "Nope"}})
    )
    with pytest.raises(
        ConfigError, match=r"its tokenizer's files cannot be read: .*\. Download them again"
    ):
        load_tokenizer(str(folder))
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": 5}')
    with pytest.raises(
        ConfigError,
        match=r"its tokenizer's files cannot be read: AttributeError: .*\. Download them again",
    ):
        load_tokenizer(str(folder))


def test_whole_files_are_taken(folder: Path) -> None:
    assert local_tokenizer(str(folder)) == folder and load_tokenizer(str(folder))("x")["input_ids"]
