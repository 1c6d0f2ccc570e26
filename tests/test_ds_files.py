"""Reading and planning DeepSpeed's files, apart from whole conversions."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from recipekit import ds_files
from recipekit.refusal import Refusal


def test_threads_may_read_at_once(tmp_path: Path):
    """torch keeps what may be read in one set for the whole process."""
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.save({"at": fragment_address(numel=7, start=1)}, tmp_path / "one.pt")
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda number: ds_files.read_pickle(tmp_path / "one.pt", fake=number % 2 == 0), range(400)):
            assert (found["at"].numel, found["at"].start) == (7, 1)


class Getattr:
    """Is pickled as a call of getattr."""

    def __init__(self, *arguments: object):
        self.arguments = arguments

    def __reduce__(self) -> tuple:
        return getattr, self.arguments


def test_a_stage_is_read_as_every_python_writes_it(tmp_path: Path):
    """Python 3.11.2, Debian 12's, writes a member of an enum as a call of getattr, which is allowed for nothing else."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    for number, content in enumerate((ZeroStageEnum.gradients, Getattr(ZeroStageEnum, "gradients"))):
        torch.save({"stage": content}, tmp_path / f"{number}.pt")
        assert ds_files.read_pickle(tmp_path / f"{number}.pt")["stage"].values == (2,)
    for hostile in (Getattr(LossScaler, "__init__"), Getattr(ZeroStageEnum, "__class__")):
        torch.save({"stage": hostile}, tmp_path / "hostile.pt")
        with pytest.raises(Refusal, match="cannot be read safely"):
            ds_files.read_pickle(tmp_path / "hostile.pt")


def test_a_planned_file_is_one_of_torch_save(tmp_path: Path):
    with torch.device("meta"):
        tied = torch.empty(3, 5, dtype=torch.bfloat16)
        content = {"tied": tied, "alias": tied, "column": torch.empty(4, 6)[:, 2], "state": {0: {"step": torch.tensor(0.0)}}, "plain": torch.Size([2])}
    ds_files._write(tmp_path / "planned.pt", content, step=3.0)
    found = torch.load(tmp_path / "planned.pt", weights_only=True)
    assert found["tied"].data_ptr() == found["alias"].data_ptr() and found["tied"].dtype == torch.bfloat16 and found["tied"].shape == (3, 5)
    assert found["column"].stride() == (6,) and found["column"].storage_offset() == 2 and not found["column"].any()
    assert found["state"][0]["step"] == 3.0 and found["plain"] == torch.Size([2])
    offset = ds_files.OpenedFile(tmp_path / "planned.pt").offset(("column",))
    with (tmp_path / "planned.pt").open("r+b") as file:
        file.seek(offset)
        file.write(b"\x00\x00\x80\x3f")  # 1.0
    assert torch.load(tmp_path / "planned.pt", weights_only=True)["column"].tolist() == [1.0, 0.0, 0.0, 0.0]
