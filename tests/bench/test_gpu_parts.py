"""The parts of a step: their shapes, and a complete run in tiny shapes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool import ROOT

sys.path.insert(0, str(ROOT / "tools" / "bench"))

import bench_gpu
import gpu_parts


def test_shapes_are_of_the_rows():
    small = gpu_parts.shape_of("1b", "1b", 2048, 8, False)
    assert (small.tokens, small.width, small.inner, small.head_dim) == (16384, 2048, 5504, 128)
    large = gpu_parts.shape_of("8b_lora", "8b", 4096, 2, False)
    assert (large.tokens, large.width, large.heads, large.kv_heads) == (8192, 4096, 32, 8)
    for shape in (small, large):
        run = bench_gpu.BY_NAME[shape.row].measure.keywords["run"]  # type: ignore[attr-defined]
        assert run.shape[:2] == (shape.seq_len, shape.rows)


def test_documents_fill_the_rows():
    shape = gpu_parts.shape_of("1b", "1b", 2048, 8, False)
    bounds = gpu_parts.document_bounds(shape)
    assert bounds[0] == 0 and bounds[-1] == shape.tokens and bounds == sorted(set(bounds))
    assert set(range(0, shape.tokens + 1, shape.seq_len)) <= set(bounds)


def broken() -> Iterator[tuple[str, float, str]]:
    yield "works", 1.5, "2 TB/s"
    raise RuntimeError("no kernel | here\nand more")


def test_a_part_that_fails_has_a_reason_and_stops_no_other():
    assert [tuple(vars(each).values()) for each in gpu_parts.timed("x", broken)] == [
        ("x", "works", "1.500", "2 TB/s"),
        ("x", "", "not timed", "RuntimeError: no kernel / here"),
    ]


def test_every_part_runs_in_tiny_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """On a CPU only the kernels of GPUs are not timed."""
    assert gpu_parts.main(["--tiny", "--json", str(tmp_path / "parts.json")]) == 0
    found = json.loads((tmp_path / "parts.json").read_text())
    missing = {each["part"] for each in found if each["ms"] == gpu_parts.NOT_TIMED}
    assert all("cuDNN" in part or "FlashAttention 4" in part or "fp8" in part for part in missing)
    names = [name for name, _ in gpu_parts.parts(True)]
    assert list(dict.fromkeys(each["part"] for each in found)) == names
    assert len(capsys.readouterr().out.splitlines()) == len(names)
