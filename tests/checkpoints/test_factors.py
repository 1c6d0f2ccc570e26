"""Adafactor's rows and columns lie where parallel/factors.py says in every layout, and go from one
into another bit for bit.

No ranks.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recipekit.parallel.blueprint import (
    Blueprint,
    Layout,
    Tensor,
    default_optimizer,
    held,
    stage_bounds,
)
from recipekit.parallel.factors import elements_of, state_of
from recipekit.spec.mesh import Mesh
from recipekit.spec.optimizer_specs import FACTORS
from recipekit.storage import create
from recipekit.storage.copying import Effort, copies, partial_digests, run
from recipekit.storage.tensor_files import open_checkpoint

TENSORS = (
    Tensor("embed", (20, 7), 0, (0, 1), "ends"),
    Tensor("fused", (6, 10), 0, (0, 2), "0"),
    Tensor("columns", (9, 4), 0, (1, 1), "0"),
    Tensor("bias", (8,), 1, (0, 1), "0"),
    Tensor("kernel", (4, 3, 3, 2), 0, None, "1"),
    Tensor("experts", (3, 4, 6), 1, (0, 1), "1"),  # in a group with vectors
    Tensor("rows", (2, 5, 6), 1, (1, 1), "1"),  # of which tensor ranks have 3 and 2
    Tensor("norm", (5,), 1, None, "last"),
    Tensor("frozen", (7, 6), None, (0, 1), "1"),
)
BLUEPRINT = Blueprint(TENSORS, {}, 2, True)
CARRIED = create.Carried(
    {0: {"lr": 0.1, "name": "matrices"}, 1: {"lr": 0.1, "name": "vectors"}},
    {"step": 3.0},
    {
        "global_steps": 3,
        "skipped_steps": 0,
        "global_samples": 0,
        "lr_scheduler": None,
        "ds_config": {},
    },
)
WAY: list[dict[str, int]] = [
    {"dp": 2, "zero": 2},
    {"dp": 4, "zero": 3},
    {"tp": 2, "zero": 2},
    {"dp": 2, "tp": 2, "pp": 2, "zero": 1},
    {"dp": 3, "tp": 3, "zero": 3},
    {"dp": 5, "zero": 1},
    {"tp": 2, "zero": 0},
    {"dp": 2, "pp": 2, "zero": 0},
    {"dp": 16, "zero": 2},
    {"zero": 0},
]


def layout(zero: int, dtype: str = "float32", **degrees: int) -> Layout:
    mesh = Mesh(**degrees)
    bounds = stage_bounds(BLUEPRINT, mesh.pp) if mesh.pp > 1 else ()
    return Layout(
        mesh,
        zero,
        default_optimizer(zero, dtype),
        dtype,
        bounds,
        algorithm="Adafactor",
        states=FACTORS,
    )


def digests(folder: Path, own: Layout) -> Any:
    opened = open_checkpoint(folder, BLUEPRINT, own)
    found, _ = run(copies(BLUEPRINT, opened, None), opened, Effort())
    parts = partial_digests(BLUEPRINT, opened, frozenset(path.name for path in folder.iterdir()))
    opened.close()
    assert {key: f"{total:016x}" for key, (_, _, total) in parts.items()} == {
        key: total for key, (_, _, total) in found.items()
    }
    return found


@pytest.mark.parametrize(
    ("dtype", "chunk"), [("float32", 0), ("bfloat16", 0), ("bfloat16", 7), ("float32", 40)]
)
def test_rows_and_columns_keep_every_bit_from_layout_to_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, chunk: int
) -> None:
    """A weight cut by rows has cut rows and common columns, and the reverse; what is common is read
    once and written to all.

    Whatever the elements that are moved at a time: fewer than a row has, or some rows (0: all at
    once).
    """
    if chunk:
        monkeypatch.setattr(Effort, "chunk", property(lambda effort: chunk))
        monkeypatch.setattr(partial_digests, "__defaults__", (chunk,))
    own, source, generator = layout(0, dtype), tmp_path / "drawn", np.random.default_rng(0)
    source.mkdir()
    create.create(source, BLUEPRINT, own, CARRIED)
    opened = open_checkpoint(source, BLUEPRINT, own, writable=True)
    shapes = {}
    for tensor in TENSORS:
        for role in opened.roles(tensor):
            state = state_of(tensor, role)
            if opened.dtype_of(tensor, role) == "float32":
                opened.write(
                    state, role, 0, generator.integers(1, 2**32, state.numel, dtype=np.uint32)
                )
            shapes[tensor.name, role] = state.shape
    opened.close()
    assert (shapes["kernel", "row_var"], shapes["kernel", "col_var"]) == (
        (4, 3, 3),
        (4, 3, 2),
    ) and ("kernel", "variance") not in shapes
    assert shapes["norm", "variance"] == (5,) and ("norm", "row_var") not in shapes
    drawn = {
        key: value for key, value in digests(source, own).items() if not key.endswith("|weight")
    }
    for number, asked in enumerate(WAY):
        now, folder = layout(dtype=dtype, **asked), tmp_path / str(number)
        folder.mkdir()
        create.create(folder, BLUEPRINT, now, create.read_carried(source, BLUEPRINT, own))
        read, written = (
            open_checkpoint(source, BLUEPRINT, own),
            open_checkpoint(folder, BLUEPRINT, now, writable=True),
        )
        run(copies(BLUEPRINT, read, written), read, Effort(), written)
        read.close()
        written.close()
        assert {
            key: value for key, value in digests(folder, now).items() if not key.endswith("|weight")
        } == drawn, asked
        check_copies(folder, now)
        source, own = folder, now
    assert create.read_carried(source, BLUEPRINT, own).scalars == {"step": 3.0}


def check_copies(folder: Path, own: Layout) -> None:
    """Every rank that shares rows or columns with others has the same bits of them."""
    opened = open_checkpoint(folder, BLUEPRINT, own)
    files = frozenset(path.name for path in folder.iterdir())
    for tensor in TENSORS:
        for role in ({*opened.roles(tensor)} & {*FACTORS}) - {"variance"}:
            state, found = state_of(tensor, role), {}
            for shard in opened.shards[tensor.name, role]:
                alone = dataclasses.replace(
                    opened, shards=opened.shards | {(tensor.name, role): [shard]}
                )
                found.setdefault(shard.tp_rank if shard.dim is not None else 0, []).append(
                    alone.read(state, role, 0, state.numel, files)
                )
            assert all(
                np.array_equal(copies[0], copy) for copies in found.values() for copy in copies
            )
    opened.close()


def test_a_rank_keeps_rows_and_columns_of_what_it_has_a_part_of() -> None:
    """Counted by hand."""
    tensors = [
        tensor
        for tensor in held(BLUEPRINT, layout(2, dp=2), 0)
        if tensor.name in ("embed", "columns", "kernel", "norm", "frozen")
    ]
    # 140 + 36 + 72 = 248 elements of matrices: 124 each, so the border cuts the embedding; of 5 of
    # the norm 4 are on the first rank
    assert elements_of(tensors, layout(2, dp=2), 0) == {0: 27 + 4, 1: 27 + 13 + (36 + 24) + 1}
    # ZeRO-3: a part of everything on both; without ZeRO all of it
    assert elements_of(tensors, layout(3, dp=2), 0) == {0: 27 + 13 + 60 + 3, 1: 27 + 13 + 60 + 2}
    assert elements_of(tensors, layout(0, dp=2), 0) == {0: 27 + 13 + 60 + 5}
    # two tensor ranks: the embedding's rows are cut, and the columns of `columns`
    assert elements_of(tensors, layout(0, tp=2), 1) == {0: (10 + 7) + (9 + 2) + 60 + 5}
