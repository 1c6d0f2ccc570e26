"""Batch ramps: every layout uses each step's rows in the table, like plain PyTorch."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job import metrics, reproducible_values
from parity import (
    NUMBERS,
    STEPS,
    Case,
    accumulating,
    compare,
    each,
    pinned,
    recipe_for,
    reference,
    train_in_layout,
)
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from safetensors.torch import load_file
from shipped_jsons import strategy
from torch_engines import TORCH, run_engine

slow = pytest.mark.slow
RAMP = {"batch_ramp": "4:16, 7:24"}
ROWS = [8, 8, 8, 16, 16, 16, 24, 24, 24, 24]  # computed by hand
WSD = {"schedule": "wsd", "decay_steps": 4, "min_lr": 1e-4}
LR = [
    1.5e-4,
    3e-4,
    3e-4,
    3e-4,
    3e-4,
    3e-4,
    2e-4,
    3e-4 - 2e-4 * 0.5**0.5,
    3e-4 - 2e-4 * 0.75**0.5,
    1e-4,
]
CASES = [
    # The first step of four micro-batches follows three steps of two. DeepSpeed by itself would end
    # the step after two micro-batches.
    Case("zero2 dp2", 2, "zero2"),
    Case("zero1 pp2", 2, "zero1", {"pp": 2}, slow=True),
    Case("zero0 dp2, one micro-batch at first", 2, "zero0", {"micro_batch": 4}, slow=True),
    Case("zero1 dp4", 4, "zero1", slow=True),
    Case(
        "zero2 optimizer on the CPU, one micro-batch at first",
        2,
        "zero2_cpu",
        {"micro_batch": 4},
        slow=True,
    ),
    Case("zero3 dp2", 2, "zero3", slow=True),
    Case("zero3 sp2", 2, "zero3", {"sp": 2}, slow=True),
    Case("zero1 tp2 pp2", 4, "zero1", {"tp": 2, "pp": 2}, slow=True),
    Case(
        "zero1 pp2 dp2 dualpipev",
        4,
        "zero1",
        {"pp": 2, "pipeline_schedule": "dualpipev", "micro_batch": 1},
        slow=True,
    ),
    Case("ddp dp2", 2, "ddp", slow=True),
    Case("fsdp2 dp2", 2, "fsdp2", slow=True),
]


def train(pools: Any, out: Path, world: int, file: str, **changes: Any) -> None:
    if file in TORCH:
        run_engine(pools, out, file, world, **changes)
        return
    recipe = recipe_for("untied", **accumulating(world, **changes))
    assert (
        pools.run(world, train_in_layout, recipe=recipe, config=strategy(file), out=str(out))
        == [0] * world
    )


@each(CASES)
def test_a_ramp_trains_like_plain_pytorch(pools: Any, ops: Any, tmp_path: Path, case: Case) -> None:
    """Compare the weights, the losses over each step's tokens, and an evaluation after the last
    change.
    """
    if case.file == "zero2_cpu":
        ops("cpu_adam")
    train(pools, tmp_path / "run", case.world, case.file, **case.layout, **RAMP, **WSD)
    compare(tmp_path / "run", reference("untied", **RAMP, **WSD))
    lines = metrics(tmp_path / "run")
    assert [line["global_batch"] for line in lines] == ROWS
    assert [line["step_tokens"] for line in lines] == [
        line["tokens"] - before
        for line, before in zip(lines, [0, *(line["tokens"] for line in lines)], strict=False)
    ]
    assert all(
        0.9 * NUMBERS["seq_len"] * rows < line["step_tokens"] < NUMBERS["seq_len"] * rows
        for line, rows in zip(lines, ROWS, strict=True)
    )
    assert [line["lr"] for line in lines] == pytest.approx(LR, rel=1e-12)


@pytest.fixture(scope="module")
def unbroken(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ramp") / "unbroken"
    train(pools, out, 2, "zero2", **RAMP)
    return out


@pytest.fixture(scope="module")
def half(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that stopped after step 5, among the steps of 16 rows."""
    out = tmp_path_factory.mktemp("ramp") / "half"
    train(pools, out, 2, "zero2", stop_at=5, **RAMP)
    return out


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(2, {}, marks=slow),
        (1, {}),
        pytest.param(4, {"micro_batch": 1}, marks=slow),
        pytest.param(4, {"micro_batch": 2}, marks=slow),
    ],
)
def test_a_resume_in_the_middle_of_a_ramp_is_exact(
    pools: Any, half: Path, unbroken: Path, tmp_path: Path, world: int, layout: dict[str, Any]
) -> None:
    """On the same number of ranks the resume is the same bit for bit.

    On other numbers of ranks the steps have the same rows, and losses and weights are within the
    tolerance.
    """
    out = shutil.copytree(half, tmp_path / "run")
    train(pools, out, world, "zero2", **layout, **RAMP)
    went_on, whole = metrics(out), metrics(unbroken)
    assert [line["global_batch"] for line in went_on] == ROWS
    if world == 2:
        assert reproducible_values(went_on) == reproducible_values(whole)
    assert [line["tokens"] for line in went_on] == [line["tokens"] for line in whole]
    for key in ("loss", "grad_norm", "lr"):
        assert [line[key] for line in went_on] == pytest.approx(
            [line[key] for line in whole], rel=1e-5
        )
    states = [
        json.loads((run / "checkpoints" / f"step_{STEPS:08d}" / "state.json").read_text())["data"]
        for run in (out, unbroken)
    ]
    assert states[0] == states[1] and states[0]["identity"]["batch_ramp"] == [[4, 16], [7, 24]]
    weights = [load_file(run / "hf" / "model.safetensors") for run in (out, unbroken)]
    assert (
        max((weights[0][name] - weights[1][name]).abs().max().item() for name in weights[1]) <= 1e-5
    )


@slow
def test_the_rest_of_a_ramp_may_change(
    pools: Any, half: Path, unbroken: Path, tmp_path: Path
) -> None:
    """With --resume PATH the rows continue after the checkpoint.

    A run without a ramp can get a ramp. It continues as if it had the ramp from the beginning.
    """
    out = tmp_path / "other"
    train(pools, out, 2, "zero2", resume=str(half), batch_ramp="4:16, 6:32")
    lines = metrics(out)
    assert [line["global_batch"] for line in lines] == [32] * 5
    assert (
        lines[0]["tokens"] - metrics(half)[4]["tokens"]
        == lines[0]["step_tokens"]
        > 0.9 * 32 * NUMBERS["seq_len"]
    )
    plain = recipe_for("untied", **accumulating(2))
    assert pools.run(
        2,
        train_in_layout,
        recipe=replace(plain, stop_at=3),
        config=strategy("zero2"),
        out=str(tmp_path / "plain"),
    ) == [0, 0]
    train(pools, tmp_path / "run", 2, "zero2", resume=str(tmp_path / "plain"), **RAMP)
    assert (
        reproducible_values(metrics(tmp_path / "run")) == reproducible_values(metrics(unbroken))[3:]
    )


@slow
def test_a_wsd_run_is_prolonged_in_its_stable_phase(pools: Any, tmp_path: Path) -> None:
    """The run resumes from the step before its decay.

    It must equal, bit for bit, a run that had the larger number of steps from the beginning.
    """
    short, long = tmp_path / "short", tmp_path / "long"
    wsd = {"schedule": "wsd", "decay_steps": 2, "min_lr": 1e-4, "eval_every": 0}
    train(pools, long, 1, "zero2", steps=9, **wsd)
    train(pools, short, 1, "zero2", steps=6, save_every=4, keep=0, **wsd)
    peak, root = 3e-4, 3e-4 - 2e-4 * 0.5**0.5
    assert [line["lr"] for line in metrics(short)] == pytest.approx(
        [peak / 2, peak, peak, peak, root, 1e-4], rel=1e-12
    )
    assert [line["lr"] for line in metrics(long)] == pytest.approx(
        [peak / 2, *[peak] * 6, root, 1e-4], rel=1e-12
    )
    assert reproducible_values(metrics(short))[:4] == reproducible_values(metrics(long))[:4]
    longer = replace(
        recipe_for("untied", **accumulating(1), steps=9, **wsd),
        ds_config=strategy("zero2"),
        out=str(short),
    )
    with pytest.raises(
        ConfigError,
        match=(
            rf"steps = 9: the run in {short} has 6\. Resume with --steps 6, start a new run"
            rf" .*--resume {short}"
        ),
    ):
        resolve_run(parse(longer, Path("parity.py"), ["--tiny", *pinned(longer)]))
    train(
        pools,
        short,
        1,
        "zero2",
        steps=9,
        resume=str(short / "checkpoints" / "step_00000004"),
        **wsd,
    )
    assert reproducible_values(metrics(short)) == reproducible_values(metrics(long))
