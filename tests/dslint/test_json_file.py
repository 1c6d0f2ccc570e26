"""Reading a DeepSpeed JSON: only strict JSON is accepted. File names are looked up."""

import json
from pathlib import Path

import pytest
from broken_jsons import UNREADABLE
from pool import ROOT
from recipekit.dslint import json_file
from recipekit.spec.errors import ConfigError


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_file_that_is_not_strict_json_is_refused(case: str, tmp_path: Path) -> None:
    content, *expected = UNREADABLE[case]
    (tmp_path / "broken.json").write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        json_file.load_ds_config("broken.json", tmp_path)
    assert all(part in str(refused.value) for part in expected), str(refused.value)


def test_a_missing_file_is_refused_with_the_places_and_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        json_file.load_ds_config("zero33.json", tmp_path)
    assert str(tmp_path / "zero33.json") in str(
        refused.value
    ) and "Did you mean zero3.json?" in str(refused.value)


def test_a_name_is_looked_up_as_typed_then_beside_the_recipe_then_in_ds_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, here = tmp_path / "beside", tmp_path / "here"
    for folder in (beside, here):
        folder.mkdir()
    monkeypatch.chdir(here)
    assert json_file.load_ds_config("zero3.json", beside)[1] == ROOT / "ds_configs" / "zero3.json"
    (beside / "zero3.json").write_text("{}")
    assert json_file.load_ds_config("zero3.json", beside) == ({}, beside / "zero3.json")
    (here / "zero3.json").write_text('{"bf16": {"enabled": true}}')
    assert json_file.load_ds_config("zero3.json", beside) == (
        {"bf16": {"enabled": True}},
        Path("zero3.json"),
    )
    assert json_file.load_ds_config({"bf16": {}}, beside) == ({"bf16": {}}, None)


MARKED = {  # a file's text -> whether it is valid
    "{}": True,
    "\r\n{\r\n}\r\n": True,
    '{"zero_optimization": {"stage": 1}, "wandb": {"enabled": false, "project": "\ufeff"}}': True,
    "\ufeff{}": False,
    "": False,
}


@pytest.mark.parametrize("text", MARKED)
def test_a_byte_order_mark_at_the_start_is_no_part_of_the_text(text: str, tmp_path: Path) -> None:
    """Windows' Notepad writes such a mark. A second mark, or a mark in a string, is part of the
    text.
    """
    file = tmp_path / "ds.json"
    file.write_text(text, encoding="utf-8-sig", newline="")
    if MARKED[text]:
        assert json_file.load_ds_config(str(file), tmp_path) == (json.loads(text), file)
        return
    with pytest.raises(ConfigError) as refused:
        json_file.load_ds_config(str(file), tmp_path)
    assert "line 1, column 1" in str(refused.value)
