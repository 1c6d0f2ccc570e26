"""Safetensors files are read as the library reads them. Files with invalid headers are rejected."""

import json
from pathlib import Path

import pytest
import torch
from recipekit.architectures import safetensors_files
from recipekit.spec.errors import ConfigError
from safetensors.torch import load_file, save_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(
        {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)},
        tmp_path / "one.safetensors",
        metadata={"format": "pt"},
    )
    save_file(
        {"c": torch.tensor([7], dtype=torch.int64), "empty": torch.empty(0, 4)},
        tmp_path / "two.safetensors",
    )
    weight_map = {
        "a": "one.safetensors",
        "b": "one.safetensors",
        "c": "two.safetensors",
        "empty": "two.safetensors",
    }
    (tmp_path / safetensors_files.INDEX_FILE).write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return tmp_path


def test_every_tensor_lies_where_the_library_finds_it(folder: Path) -> None:
    found = safetensors_files.tensor_entries(folder)
    assert {key: (entry.file, entry.dtype, entry.shape) for key, entry in found.items()} == {
        "a": ("one.safetensors", "F32", (2, 3)),
        "b": ("one.safetensors", "BF16", (3,)),
        "c": ("two.safetensors", "I64", (1,)),
        "empty": ("two.safetensors", "F32", (0, 4)),
    }
    content = (folder / "one.safetensors").read_bytes()
    assert content[found["a"].offset :][:24] == torch.arange(6.0).numpy().tobytes()


def test_an_empty_file_is_one_that_the_library_reads(tmp_path: Path) -> None:
    found = safetensors_files.create_zero_file(
        tmp_path, "made.safetensors", {"x": ("BF16", (3,)), "y": ("F32", (2, 2)), "z": ("I64", ())}
    )
    with (tmp_path / "made.safetensors").open("r+b") as file:
        file.seek(found["y"].offset)
        file.write(torch.full((2, 2), 2.5).numpy().tobytes())
    loaded = load_file(tmp_path / "made.safetensors")
    assert (
        loaded["y"].tolist() == [[2.5, 2.5], [2.5, 2.5]]
        and loaded["x"].tolist() == [0, 0, 0]
        and loaded["z"].shape == ()
    )


def test_an_index_that_leaves_the_folder_is_refused(folder: Path) -> None:
    save_file({"a": torch.ones(2)}, folder.parent / "outside.safetensors")
    for name in (
        "../outside.safetensors",
        str(folder.parent / "outside.safetensors"),
        "sub/one.safetensors",
        "one.bin",
    ):
        (folder / safetensors_files.INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ConfigError, match="is not a file of this folder"):
            safetensors_files.tensor_entries(folder)


def rewritten(path: Path, change: object) -> None:
    """Replace a file's header with a changed header of the same length."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)  # type: ignore[operator]
    text = json.dumps(header).encode().ljust(length)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["a"].update(data_offsets=[0, 25]),
        lambda header: header["a"].update(data_offsets=[4, 28]),
        lambda header: header["a"].update(shape=[2, 4]),
        lambda header: header["b"].update(data_offsets=header["a"]["data_offsets"]),
        lambda header: header["a"].pop("dtype"),
        lambda header: header["a"].update(dtype="F99"),
        lambda header: header.pop("b"),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(folder: Path, change: object) -> None:
    rewritten(folder / "one.safetensors", change)
    with pytest.raises(ConfigError, match=r"one\.safetensors"):
        safetensors_files.tensor_entries(folder)


@pytest.mark.parametrize("size", [0, 7, 8, 60, -1])
def test_a_truncated_file_is_refused(folder: Path, size: int) -> None:
    content = (folder / "one.safetensors").read_bytes()
    (folder / "one.safetensors").write_bytes(content[:size])
    with pytest.raises(ConfigError, match=r"one\.safetensors"):
        safetensors_files.tensor_entries(folder)


def test_a_header_larger_than_the_file_is_not_read(folder: Path) -> None:
    (folder / "one.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        safetensors_files.tensor_entries(folder)


def test_what_the_index_and_the_files_disagree_on_is_named(folder: Path) -> None:
    index = json.loads((folder / safetensors_files.INDEX_FILE).read_text())
    (folder / safetensors_files.INDEX_FILE).write_text(
        json.dumps({"weight_map": index["weight_map"] | {"d": "two.safetensors"}})
    )
    with pytest.raises(ConfigError, match="lacks 1 of the tensors that its index names, first d"):
        safetensors_files.tensor_entries(folder)
    (folder / safetensors_files.INDEX_FILE).write_text(json.dumps(index))
    (folder / "two.safetensors").unlink()
    with pytest.raises(ConfigError, match="is missing, but the index names it"):
        safetensors_files.tensor_entries(folder)
