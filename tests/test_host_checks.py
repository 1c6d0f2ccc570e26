"""recipekit/host_checks.py: which GPUs are looked at. The other checks are in test_doctor.py, as a user meets them."""

import os
from pathlib import Path

import pytest
from recipekit import host_checks
from recipekit.refusal import Problem

# As nvidia-smi of driver 550 prints it: index, uuid, name, memory.total, memory.used, driver_version
TOLD = "".join(f"{number}, GPU-{number}{number}aa-bb, NVIDIA H200, 143771, {used}, 550.1\n" for number, used in enumerate((9, 80000, 9, 9)))


@pytest.fixture(autouse=True)
def four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of four GPUs, the second of which is in use."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<END\n{TOLD}END\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        (None, [0, 1, 2, 3]),
        ("3,1", [3, 1]),
        ("GPU-22aa,0", [2, 0]),
        ("", []),
        ("-1", []),
        ("0,9,1", [0]),
        ("GPU-", []),
        (" 2 , 3 ", [2, 3]),
        ("MIG-5", [0, 1, 2, 3]),
    ],
)
def test_only_visible_gpus_count(visible: str | None, numbers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.number for gpu in host_checks.gpus()] == numbers


def test_a_gpu_that_is_left_out_is_not_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(visible: str, ranks: int) -> list[str]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return [str(found) for found in host_checks.check_devices(ranks) if isinstance(found, Problem) and "/dev/shm" not in str(found)]

    assert told("2,3", 2) == []
    assert [problem.partition(":")[0] for problem in told("2,1", 2)] == ["GPU 1 (NVIDIA H200)"]
    assert told("2,3", 4) == ["4 ranks: this host has 2 GPUs that CUDA_VISIBLE_DEVICES names; start 2 ranks or fewer on it"]
