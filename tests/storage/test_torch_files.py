"""Files written by torch.save, read and written without torch, and read with torch."""

import pickle
import struct
import zipfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from recipekit.checkpoints.deepspeed_io import read_pickle, replace_stand_ins
from recipekit.spec.errors import ConfigError
from recipekit.storage import step_files, tensor_files, torch_files
from recipekit.storage.torch_files import FileTensor, Size

READERS = pytest.mark.parametrize(
    "read", [read_pickle, torch_files.read_torch_file], ids=["torch", "without torch"]
)


def test_threads_may_read_at_once(tmp_path: Path):
    """torch stores the allowed types in one set that the entire process shares."""
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.save({"at": fragment_address(numel=7, start=1)}, tmp_path / "one.pt")
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(
            lambda number: (read_pickle, torch_files.read_torch_file)[number % 2](
                tmp_path / "one.pt"
            ),
            range(400),
        ):
            assert (found["at"].numel, found["at"].start) == (7, 1)


class Call:
    """An object that is pickled as a call."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __reduce__(self) -> tuple:
        return self.arguments[0], self.arguments[1:]


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


class Getattr:
    """An object that is pickled as a call of getattr."""

    def __init__(self, *arguments: object):
        self.arguments = arguments

    def __reduce__(self) -> tuple:
        return getattr, self.arguments


@READERS
def test_a_stage_is_read_as_every_python_writes_it(tmp_path: Path, read: Callable[[Path], Any]):
    """On Debian 12, Python 3.11.2 writes an enum member as a call of getattr.

    getattr is not allowed for any other purpose.
    """
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    for number, content in enumerate(
        (ZeroStageEnum.gradients, Getattr(ZeroStageEnum, "gradients"))
    ):
        torch.save({"stage": content}, tmp_path / f"{number}.pt")
        assert read(tmp_path / f"{number}.pt")["stage"].values == (2,)
    for hostile in (Getattr(LossScaler, "__init__"), Getattr(ZeroStageEnum, "__class__")):
        torch.save({"stage": hostile}, tmp_path / "hostile.pt")
        with pytest.raises(ConfigError, match="cannot be read safely"):
            read(tmp_path / "hostile.pt")


def test_a_planned_file_is_one_of_torch_save(tmp_path: Path):
    tied = FileTensor((3, 5), "bfloat16")
    content = {
        "tied": tied,
        "alias": tied,
        "column": FileTensor((4,)),
        "state": {0: {"step": FileTensor((), value=3.0)}},
        "plain": Size([2]),
        "none": FileTensor((0,)),
    }
    content |= {dtype: FileTensor((2, 3), dtype) for dtype in torch_files.ELEMENT_BYTES}
    torch_files.write_torch_file(
        tmp_path / "planned.pt",
        content | {"stage": torch_files.ZeroStage(2), "at": torch_files.Fragment(numel=7, start=1)},
    )
    found = read_pickle(tmp_path / "planned.pt")
    assert (
        found["tied"].data_ptr() == found["alias"].data_ptr()
        and found["tied"].dtype == torch.bfloat16
        and found["tied"].shape == (3, 5)
    )
    assert (
        found["tied"].is_contiguous() and not found["column"].any() and found["none"].shape == (0,)
    )
    assert (
        found["state"][0]["step"] == 3.0
        and found["plain"] == torch.Size([2])
        and type(found["plain"]) is torch.Size
    )
    for dtype in torch_files.ELEMENT_BYTES:
        assert found[dtype].dtype == getattr(torch, dtype) and found[dtype].shape == (2, 3)
    assert found["stage"].values == (2,) and (found["at"].numel, found["at"].start) == (7, 1)
    opened = tensor_files.TorchFileIndex(tmp_path / "planned.pt")
    assert all(tensor.start % 64 == 0 for tensor in opened.tensors.values())
    with (tmp_path / "planned.pt").open("r+b") as file:
        file.seek(opened.offset(("column",)))
        file.write(b"\x00\x00\x80\x3f")  # 1.0
    assert torch.load(tmp_path / "planned.pt", weights_only=False)["column"].tolist() == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]
    assert torch.load(tmp_path / "planned.pt", weights_only=False, mmap=True)[
        "column"
    ].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_tensors_of_torch_save_are_found_where_they_lie(tmp_path: Path):
    """The tensors have every dtype. They are views of one storage, parameters, and scalars."""
    whole = torch.arange(24.0).view(4, 6)
    content = {
        str(dtype): torch.arange(3).to(getattr(torch, dtype)) for dtype in torch_files.ELEMENT_BYTES
    } | {
        "column": whole[:, 2],
        "rows": whole[1:3],
    }
    content |= {
        "parameter": torch.nn.Parameter(whole.clone()),
        "steps": [torch.tensor(7.5), torch.tensor(9)],
        "dtype": torch.bfloat16,
    }
    content["named"] = torch.arange(5.0)
    content["named"].of = "an attribute, as ZeRO-3 leaves them on its tensors"
    torch.save(content, tmp_path / "one.pt")
    found, bits = (
        torch_files.read_torch_file(tmp_path / "one.pt"),
        (tmp_path / "one.pt").read_bytes(),
    )
    for name, tensor in content.items():
        if torch.is_tensor(tensor):
            assert (found[name].shape, f"torch.{found[name].dtype}") == (
                tuple(tensor.shape),
                str(tensor.dtype),
            )
            wanted = (
                tensor.detach().clone().view(torch.uint8).numpy().tobytes()
                if name != "column"
                else b""
            )
            assert (found[name].start < 0) == (name == "column")
            assert bits[found[name].start :][: len(wanted)] == wanted, name
    with pytest.raises(ConfigError, match="column: is not stored in row-major order"):
        tensor_files.TorchFileIndex(tmp_path / "one.pt").offset(("column",))
    assert [step.value for step in found["steps"]] == [7.5, 9] and found[
        "dtype"
    ] == "torch.bfloat16"
    assert set(torch_files.find_tensors(found)) == {
        (name,) for name, tensor in content.items() if torch.is_tensor(tensor)
    } | {("steps", 0), ("steps", 1)}


@pytest.mark.slow
def test_files_beyond_four_gigabytes(tmp_path: Path):
    """Sizes and offsets need more than 32 bits. The files are sparse."""
    content = {
        "large": FileTensor((5 * 2**28,)),
        "after": FileTensor((3,)),
        "many": [FileTensor((1,), "int8") for _ in range(70_000)],
        "last": FileTensor((), value=2.5),
    }
    torch_files.write_torch_file(tmp_path / "large.pt", content)
    assert (tmp_path / "large.pt").stat().st_size > 5 * 2**30
    found = torch_files.read_torch_file(tmp_path / "large.pt")
    with (tmp_path / "large.pt").open("r+b") as file:
        file.seek(found["after"].start)
        file.write(struct.pack("<3f", 1, 2, 3))
    loaded = torch.load(tmp_path / "large.pt", mmap=True)
    assert (
        loaded["large"].shape == (5 * 2**28,)
        and loaded["large"][-1] == 0
        and loaded["after"].tolist() == [1.0, 2.0, 3.0]
    )
    assert loaded["last"] == 2.5 == found["last"].value and len(loaded["many"]) == 70_000


def short(path: Path) -> None:
    """Rewrite the file with only half of its first tensor."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(
                name, content[: len(content) // 2] if name.endswith("data/0") else content
            )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:500]), "File is not a zip file"),
        (lambda path: path.write_bytes(b""), "File is not a zip file"),
        (
            lambda path: path.write_bytes(
                path.read_bytes().replace(b"FloatStorage", b"LongsStorage")
            ),
            "Bad CRC-32",
        ),
        (short, "has 6 bytes for 3 elements of float32"),
        (
            lambda path: torch.save({"path": Path("a")}, path),
            "it names pathlib.PosixPath, which is not a known object of a checkpoint",
        ),
        (
            lambda path: torch.save(
                {
                    "tensor": Call(
                        torch._utils._rebuild_tensor_v2,
                        torch.TypedStorage(
                            wrap_storage=torch.UntypedStorage(16),
                            dtype=torch.float32,
                            _internal=True,
                        ),
                        0,
                        (200,),
                        (1,),
                        False,
                        None,
                    )
                },
                path,
            ),
            "goes beyond",
        ),
        (lambda path: torch.save(endless(), path), "recursion"),
    ],
)
def test_a_damaged_file_gets_one_message(tmp_path: Path, change: Callable[[Path], Any], says: str):
    torch.save({"one": torch.arange(3.0)}, tmp_path / "one.pt")
    change(tmp_path / "one.pt")
    with pytest.raises(ConfigError, match=rf"one\.pt: cannot be read safely: .*{says}"):
        torch_files.read_torch_file(tmp_path / "one.pt")


@pytest.mark.parametrize(
    "attributes", ["(None, {'place': 'os\\nmkdir'})", "{'place': 'os.mkdir'}", "{'__class__': 1}"]
)
@pytest.mark.parametrize(
    "of",
    [
        "cdeepspeed.utils.tensor_fragment\nfragment_address\n",
        "cdeepspeed.utils.tensor_fragment\nfragment_address\n)\x81",
        "c__builtin__\ngetattr\n",
    ],
)
def test_a_file_changes_nothing_of_ours(tmp_path: Path, of: str, attributes: str):
    """The opcode that sets attributes could also change classes and functions.

    Such a change would affect all data that is later written with them.
    """
    state = pickle.dumps(eval(attributes), 2)[2:-1]
    with zipfile.ZipFile(tmp_path / "two.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + of.encode("latin-1") + state + b"b.")
        archive.writestr("archive/version", "3\n")
    with pytest.raises(ConfigError, match="it gives attributes to"):
        torch_files.read_torch_file(tmp_path / "two.pt")
    assert (
        torch_files.Fragment.place == "deepspeed.utils.tensor_fragment.fragment_address"
        and torch_files.zero_stage_member.__module__ == "recipekit.storage.torch_files"
    )


def test_a_stand_in_is_made_of_its_own_class_whatever_a_file_says():
    hostile = torch_files.Fragment(numel=7)
    hostile.place, hostile.values = "os.mkdir", ()
    assert type(replace_stand_ins(hostile)).__name__ == "fragment_address"


def test_nothing_else_is_written(tmp_path: Path):
    with pytest.raises(pickle.PicklingError, match="is not allowed in a checkpoint"):
        torch_files.write_torch_file(tmp_path / "one.pt", {"function": replace_stand_ins})


def test_what_is_carried_comes_back_as_it_was(tmp_path: Path):
    """Schedulers store such values; for example, milestones are a Counter."""
    content = {
        "milestones": Counter({30: 1, 80: 2}),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "complex": 1 + 2j,
        "set": {1},
        "lr": torch.tensor(0.5),
    }
    torch.save(content, tmp_path / "one.pt")
    torch_files.write_torch_file(
        tmp_path / "two.pt",
        step_files._unwrap_scalars(torch_files.read_torch_file(tmp_path / "one.pt")),
    )
    assert torch.load(tmp_path / "two.pt", weights_only=False) == content | {"lr": 0.5}
