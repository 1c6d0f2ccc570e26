"""The file of reference log-probabilities: entries are kept, and several runs add to the file.

A damaged file is computed again.
"""

import json
from pathlib import Path

import numpy as np
import torch
from recipekit.data.pairs import ReferenceLogprobs
from recipekit.model.weights import Weights
from recipekit.runtime.reference_logprobs import ReferenceFile
from safetensors.torch import save_file


def kept(file: Path, **numbers: float) -> ReferenceFile:
    """Return the reference file of a run that has computed the pairs with these keys."""
    references = ReferenceLogprobs()
    keys = np.array([int(key[1:]) for key in numbers], dtype=np.uint64)
    references.add(
        keys,
        np.array([[value, -value] for value in numbers.values()], dtype=np.float32).reshape(-1, 2),
    )
    return ReferenceFile(file, references)


def held(one: ReferenceFile) -> dict[int, float]:
    keys, values = one.references.table
    return dict(zip(keys.tolist(), values[:, 0].tolist(), strict=True))


def read(file: Path) -> ReferenceFile:
    found = kept(file)
    found.read()
    return found


LARGE = 2**64 - 5


def test_what_a_file_holds_stays_and_what_others_found_is_added(tmp_path):
    file = tmp_path / "folder" / "numbers.safetensors"
    assert held(read(file)) == {}
    one, other = kept(file, k1=-1.0, k3=-3.0), kept(file, k3=-3.5, k2=-2.0, **{f"k{LARGE}": -9.0})
    one.cover("a", 0, 10)
    one.write()
    other.cover("b", 4, 6)
    other.write()
    everything = {1: -1.0, 2: -2.0, 3: -3.0, LARGE: -9.0}
    assert held(other) == held(read(file)) == everything, (
        "the run goes on with the numbers of the file"
    )
    assert read(file).covered == {"a": [0, 10], "b": [4, 6]}
    values, there = read(file).references(np.array([3, 7, LARGE, 1], dtype=np.uint64))
    assert (
        there.tolist() == [True, False, True, True]
        and values[there].tolist() == [[-3.0, 3.0], [-9.0, 9.0], [-1.0, 1.0]]
        and np.isnan(values[1]).all()
    )
    assert {path.name for path in file.parent.iterdir()} == {file.name, f"{file.name}.lock"}


def test_a_damaged_file_is_made_again(tmp_path, caplog):
    file = tmp_path / "numbers.safetensors"
    kept(file, k1=-1.0).write()
    whole = file.read_bytes()
    for damaged in (whole[:-3], b"", b"nonsense"):
        file.write_bytes(damaged)
        again = read(file)
        assert held(again) == {} and "cannot be read and is written again" in caplog.text
        caplog.clear()
    kept(file, k2=-2.0).write()
    assert held(read(file)) == {2: -2.0}


def test_without_room_for_it_a_run_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    one = kept(tmp_path / "file" / "numbers.safetensors", k1=-1.0)
    one.write()
    assert one.path is None and held(one) == {1: -1.0} and "are not kept" in caplog.text


def test_steps_are_covered_as_far_as_they_were_asked(tmp_path):
    one = kept(tmp_path / "numbers.safetensors")
    assert not one.covers("a", 0, 10) and one.covers("a", 10, 10)
    one.cover("a", 4, 10)
    assert (
        one.covers("a", 4, 10)
        and one.covers("a", 6, 8)
        and not one.covers("a", 0, 10)
        and not one.covers("b", 4, 10)
    )
    one.cover("a", 10, 20)
    assert one.covers("a", 4, 20)
    one.cover("a", 30, 40)
    assert one.covers("a", 30, 40) and not one.covers("a", 4, 40), "steps 21 to 30 were not"
    assert json.loads(json.dumps(one.covered)) == one.covered


def test_other_weights_have_another_mark(tmp_path):
    """The fingerprint does not depend on the files, and covers both ends of each tensor."""
    tensors = {
        "matrix": torch.randn(50, 40),
        "vector": torch.randn(7),
        "number": torch.tensor(3.0),
        "half": torch.randn(4, 4).bfloat16(),
    }

    def mark(parts: list[dict[str, torch.Tensor]], name: str) -> str:
        files = [tmp_path / f"{name}{number}.safetensors" for number in range(len(parts))]
        for file, part in zip(files, parts, strict=True):
            save_file(part, file)
        return Weights(files).fingerprint()

    whole = mark([tensors], "whole")
    assert whole == mark([{name: tensors[name]} for name in reversed(tensors)], "parts")
    others = []
    for name, place in (
        ("matrix", (0, 5)),
        ("matrix", (49, 39)),
        ("vector", (0,)),
        ("vector", (6,)),
        ("half", (3, 3)),
    ):
        changed = tensors[name].clone()
        changed[place] += 1
        others.append(mark([tensors | {name: changed}], "other"))
    others += [
        mark([tensors | {"vector": tensors["vector"].double()}], "other"),
        mark([tensors | {"matrix": tensors["matrix"].view(40, 50)}], "other"),
    ]
    assert len({whole, *others}) == len(others) + 1
