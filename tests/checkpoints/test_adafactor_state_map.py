"""Adafactor's row and column states are stored as parallel/adafactor_state_map.py defines.

Conversions between all layouts preserve every bit. The tests need no ranks.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recipekit.parallel.adafactor_state_map import state_numel_by_rank, state_tensor
from recipekit.parallel.blueprint import (
    Blueprint,
    Layout,
    Tensor,
    default_optimizer,
    stage_bounds,
    tensors_on_rank,
)
from recipekit.spec.mesh import Mesh
from recipekit.spec.optimizer_specs import ADAFACTOR_STATES
from recipekit.storage import step_files
from recipekit.storage.copying import Effort, partial_digests, plan_copies, run_copies
from recipekit.storage.tensor_files import open_checkpoint

TENSORS = (
    Tensor("embed", (20, 7), 0, (0, 1), "ends"),
    Tensor("fused", (6, 10), 0, (0, 2), "0"),
    Tensor("columns", (9, 4), 0, (1, 1), "0"),
    Tensor("bias", (8,), 1, (0, 1), "0"),
    Tensor("kernel", (4, 3, 3, 2), 0, None, "1"),
    Tensor("experts", (3, 4, 6), 1, (0, 1), "1"),  # in a group with vectors
    Tensor("rows", (2, 5, 6), 1, (1, 1), "1"),  # the tensor ranks have 3 and 2 rows
    Tensor("norm", (5,), 1, None, "last"),
    Tensor("frozen", (7, 6), None, (0, 1), "1"),
)
BLUEPRINT = Blueprint(TENSORS, {}, 2, True)
CARRIED = step_files.CommonState(
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
        states=ADAFACTOR_STATES,
    )


def digests(folder: Path, own: Layout) -> Any:
    opened = open_checkpoint(folder, BLUEPRINT, own)
    found, _ = run_copies(plan_copies(BLUEPRINT, opened, None), opened, Effort())
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
    """A weight sharded by rows has sharded row states and common column states, and vice versa.

    Common states are read once and written to all shards. The number of elements copied at a time
    must not matter: it is less than a row, or several rows (0: all elements).
    """
    if chunk:
        monkeypatch.setattr(Effort, "chunk", property(lambda effort: chunk))
        monkeypatch.setattr(partial_digests, "__defaults__", (chunk,))
    own, source, generator = layout(0, dtype), tmp_path / "drawn", np.random.default_rng(0)
    source.mkdir()
    step_files.create_step_files(source, BLUEPRINT, own, CARRIED)
    opened = open_checkpoint(source, BLUEPRINT, own, writable=True)
    shapes = {}
    for tensor in TENSORS:
        for role in opened.roles(tensor):
            state = state_tensor(tensor, role)
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
        step_files.create_step_files(
            folder, BLUEPRINT, now, step_files.read_common_state(source, BLUEPRINT, own)
        )
        read, written = (
            open_checkpoint(source, BLUEPRINT, own),
            open_checkpoint(folder, BLUEPRINT, now, writable=True),
        )
        run_copies(plan_copies(BLUEPRINT, read, written), read, Effort(), written)
        read.close()
        written.close()
        assert {
            key: value for key, value in digests(folder, now).items() if not key.endswith("|weight")
        } == drawn, asked
        check_copies(folder, now)
        source, own = folder, now
    assert step_files.read_common_state(source, BLUEPRINT, own).scalars == {"step": 3.0}


def check_copies(folder: Path, own: Layout) -> None:
    """Check that all ranks that share row or column states have the same bits."""
    opened = open_checkpoint(folder, BLUEPRINT, own)
    files = frozenset(path.name for path in folder.iterdir())
    for tensor in TENSORS:
        for role in ({*opened.roles(tensor)} & {*ADAFACTOR_STATES}) - {"variance"}:
            state, found = state_tensor(tensor, role), {}
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
    """The numbers are computed by hand."""
    tensors = [
        tensor
        for tensor in tensors_on_rank(BLUEPRINT, layout(2, dp=2), 0)
        if tensor.name in ("embed", "columns", "kernel", "norm", "frozen")
    ]
    # The matrices have 140 + 36 + 72 = 248 elements, so each rank gets 124 and the boundary splits
    # the embedding. The first rank has 4 of the norm's 5 elements.
    assert state_numel_by_rank(tensors, layout(2, dp=2), 0) == {
        0: 27 + 4,
        1: 27 + 13 + (36 + 24) + 1,
    }
    # Under ZeRO-3 both ranks have a part of every tensor. Without ZeRO both ranks have every full
    # tensor.
    assert state_numel_by_rank(tensors, layout(3, dp=2), 0) == {
        0: 27 + 13 + 60 + 3,
        1: 27 + 13 + 60 + 2,
    }
    assert state_numel_by_rank(tensors, layout(0, dp=2), 0) == {0: 27 + 13 + 60 + 5}
    # Two tensor ranks: the embedding is sharded by rows, and `columns` by columns.
    assert state_numel_by_rank(tensors, layout(0, tp=2), 1) == {0: (10 + 7) + (9 + 2) + 60 + 5}
