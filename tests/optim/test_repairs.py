"""Workarounds for DeepSpeed around the optimizer step, on a fake engine.

The tests cover norm limits, ranks with equal weights, and a step's micro-batches.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from parity import accumulating, recipe_for, train_in_layout
from ranks_in_threads import Ranks
from recipekit.compat.deepspeed import after_step, before_step, undo_hidden_step
from recipekit.engine import deepspeed_engine
from recipekit.optim import repairs
from recipekit.optim.one_bit import OneBitAdam
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import read_metrics, reproducible_values
from shipped_jsons import strategy
from torch import nn

NORM = 13.0  # norm of the gradients below


def engine_of(clipping: float, **more: Any) -> Any:
    module = nn.Module()
    for name, gradient in (("a", [3.0, 4.0]), ("b", [0.0, -12.0]), ("none", None)):
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = None if gradient is None else torch.tensor(gradient)
        module.register_parameter(name, parameter)
    said: list[str] = []
    made = {
        "module": module,
        "device": torch.device("cpu"),
        "mpu": None,
        "gradient_clipping": lambda: clipping,
        "said": said,
    }
    made |= {
        "optimizer": torch.optim.SGD(module.parameters(), lr=1.0),
        "_take_model_step": lambda *given: said.append(f"step {given}"),
        "_global_grad_norm": None,
    }
    return SimpleNamespace(**made | more)


@pytest.mark.parametrize(
    ("clipping", "factor"), [(0.0, 1.0), (100.0, 1.0), (13.0, 1.0), (6.5, 0.5), (1.0, 1 / 13)]
)
def test_gradients_are_scaled_to_the_limit_and_never_up(clipping: float, factor: float) -> None:
    """Gradients are scaled only if the norm exceeds the limit; 0 means no limit.

    The reported norm is the norm before clipping.
    """
    engine = engine_of(clipping)
    repairs.keep_grad_norm(engine)
    engine._take_model_step("given")
    assert float(engine._global_grad_norm) == pytest.approx(NORM, rel=1e-12) and engine.said == [
        "step ('given',)"
    ]
    assert engine.clip_fp32_gradients() is None
    assert engine.module.a.grad.tolist() == pytest.approx([3 * factor, 4 * factor], rel=1e-6)
    assert (
        engine.module.b.grad.tolist() == pytest.approx([0, -12 * factor], rel=1e-6)
        and engine.module.none.grad is None
    )
    if factor == 1.0 and clipping != 13.0:
        assert engine.module.a.grad.tolist() == [3.0, 4.0]


def test_an_optimizer_of_deepspeeds_clips_itself() -> None:
    engine = engine_of(1.0, optimizer=object())
    step = engine._take_model_step
    repairs.keep_grad_norm(engine)
    assert engine._take_model_step is step


def test_what_watches_acts_before_the_step_and_what_follows_after_it() -> None:
    """Before a step the last added hook runs first; after the step it runs last.

    Hooks after the step receive a flag that is True if the weights changed.
    """
    engine = engine_of(0.0, was_step_applied=lambda: "applied")
    for number in (1, 2):
        before_step(engine, lambda number=number: engine.said.append(f"before {number}"))
        after_step(
            engine, lambda applied, number=number: engine.said.append(f"after {number}: {applied}")
        )
    engine._take_model_step(7)
    assert engine.said == [
        "before 2",
        "before 1",
        "step (7,)",
        "after 1: applied",
        "after 2: applied",
    ]


def test_the_norm_counts_each_weight_once_over_the_tensor_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each weight counts once.

    - A sharded weight counts on each of two ranks.
    - A weight that both ranks have counts on the first rank.
    - A copy from a different stage counts on no rank.
    - An expert counts once over the ranks that have the other experts.
    """
    # Two pairs of tensor-parallel ranks. Experts are sharded over ranks 0 and 2, and over ranks 1
    # and 3.
    ranks = Ranks(4, monkeypatch)
    monkeypatch.setattr(
        repairs.expert,
        "expert_parallel_group",
        lambda parameter: (rank() % 2, rank() % 2 + 2) if hasattr(parameter, "expert") else None,
    )

    def rank() -> int:
        return ranks._get_rank()

    def case(own: int) -> float:
        engine = engine_of(0.0)
        tensor = own % 2
        pair = (own - tensor, own - tensor + 1)
        engine.mpu = SimpleNamespace(
            get_tensor_model_parallel_rank=lambda: tensor, get_model_parallel_group=lambda: pair
        )
        # Squared norms of 25 and 100.
        engine.module.a.model_parallel, engine.module.a.grad = (
            True,
            torch.tensor([3.0, 4.0]) * (1 + tensor),
        )
        for name, mark, values in (
            ("copy", "ds_pipe_replicated", [100.0]),
            ("expert", "expert", [2.0 if own < 2 else 3.0]),
        ):
            parameter = nn.Parameter(torch.zeros(1))
            parameter.grad = torch.tensor(values)
            setattr(parameter, mark, True)
            engine.module.register_parameter(name, parameter)
        return float(repairs.grad_norm(engine)) ** 2

    assert ranks.run(case) == pytest.approx([25 + 100 + 144 + 4 + 9] * 4)


@pytest.mark.parametrize(
    ("before", "after", "size"), [(2, 3, 24), (3, 1, 8), (4, 4, 32), (1, 6, 48)]
)
def test_a_step_takes_another_number_of_micro_batches(before: int, after: int, size: int) -> None:
    config = SimpleNamespace(
        train_batch_size=8 * before, gradient_accumulation_steps=before, gradient_clipping=0.5
    )
    engine: Any = SimpleNamespace(
        basic_optimizer=None,
        _config=config,
        micro_steps=5,
        micro_batches=before,
        train_batch_size=lambda: config.train_batch_size,
        gradient_accumulation_steps=lambda: config.gradient_accumulation_steps,
    )
    repairs.accumulate(engine, after)
    assert (config.train_batch_size, config.gradient_accumulation_steps, engine.micro_batches) == (
        size,
        after,
        after,
    )
    assert engine.micro_steps == (5 if before == after else 0) and config.gradient_clipping == 0.5


@pytest.mark.parametrize("compresses", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_gradients_are_left_to_an_optimizer_that_sends_signs(
    monkeypatch: pytest.MonkeyPatch, compresses: bool, half: bool
) -> None:
    """Once signs are sent, DeepSpeed must neither sum nor clip the gradients, in either of its two
    places.

    Before that, it does both.
    """
    monkeypatch.setattr(OneBitAdam, "compresses", compresses)
    optimizer = OneBitAdam([nn.Parameter(torch.zeros(1))], freeze_step=1)
    wrapper: Any = object.__new__(FP16_UnfusedOptimizer) if half else optimizer
    wrapper.clip_grad = 0.5
    config = SimpleNamespace(gradient_clipping=0.5)
    engine: Any = SimpleNamespace(
        basic_optimizer=optimizer,
        optimizer=wrapper,
        _config=config,
        gradient_accumulation_steps=lambda: 2,
    )
    repairs.accumulate(engine, 2)
    assert engine.enable_backward_allreduce is not compresses
    assert config.gradient_clipping == (0.0 if compresses else 0.5)
    assert wrapper.clip_grad == (0.0 if compresses and half else 0.5)


@pytest.mark.parametrize(
    ("applied", "norm", "told"), [(True, 2.5, 2.5), (False, 2.5, 1.0), (True, None, 1.0)]
)
def test_the_norm_of_a_step_of_signs_is_the_momentums(
    applied: bool, norm: Any, told: float
) -> None:
    optimizer = OneBitAdam([nn.Parameter(torch.zeros(1))], freeze_step=1)
    optimizer.norm = norm
    engine: Any = SimpleNamespace(
        basic_optimizer=optimizer,
        _global_grad_norm=1.0,
        _take_model_step=lambda: None,
        was_step_applied=lambda: applied,
    )
    repairs.keep_momentum_norm(engine)
    engine._take_model_step()
    assert engine._global_grad_norm == told and math.isfinite(told)


def test_the_first_step_is_the_first() -> None:
    """DeepSpeed's mixed-precision optimizer has already run a step with zero gradients.

    That step has decayed the master weights.
    """
    wrapper: Any = object.__new__(FP16_UnfusedOptimizer)
    masters, weights = (
        [[torch.ones(2), torch.ones(3)]],
        [[torch.tensor([5.0, 6.0]).bfloat16(), torch.full((3,), 7.0).bfloat16()]],
    )
    wrapper.fp32_groups, wrapper.fp16_groups = masters, weights
    basic = SimpleNamespace(state={"a": {"step": 1}})
    undo_hidden_step(SimpleNamespace(optimizer=wrapper, basic_optimizer=basic))  # type: ignore[arg-type]
    assert (
        basic.state == {}
        and masters[0][0].tolist() == [5.0, 6.0]
        and masters[0][1].tolist() == [7.0] * 3
    )
    basic.state["a"] = 1
    undo_hidden_step(SimpleNamespace(optimizer=object(), basic_optimizer=basic))  # type: ignore[arg-type]
    assert basic.state == {"a": 1}


def train_with_sums(
    recipe: Recipe, config: dict[str, Any], outs: dict[bool, str]
) -> list[tuple[int, Any]]:
    """Run the real loop twice on a rank of a pool, with and without DeepSpeed's fp32 copy.

    Return the exit code and the replaced function of each run.
    """
    found = []
    for direct, out in outs.items():
        with pytest.MonkeyPatch.context() as patch:
            seen: list[Any] = []

            def apply(engine: Any, direct: bool = direct, seen: list[Any] = seen) -> None:
                if direct:
                    repairs.sum_without_copies(engine)
                seen += [name for name in SUMS if name in vars(engine.optimizer)]

            patch.setattr(deepspeed_engine, "sum_without_copies", apply)
            found.append((train_in_layout(recipe, config, out), seen))
    return found


SUMS = ("_update_hp_grad", "_add_to_grad_partition_buffer")


@pytest.mark.slow
@pytest.mark.parametrize(("file", "replaced"), [("zero1", SUMS[0]), ("zero2", SUMS[1])])
def test_sums_without_copies_keep_every_bit(
    pools: Any, tmp_path: Path, file: str, replaced: str
) -> None:
    """The test runs 20 steps in bf16, the precision of the files, with two micro-batches a step.

    It compares the numbers of every step and the digests of all tensors in the checkpoint.
    """
    config = strategy(file, bf16=True)
    if file == "zero2":
        # Several buckets, and parameters that are larger than a bucket.
        config["zero_optimization"]["reduce_bucket_size"] = 20_000
    recipe = recipe_for("untied", **accumulating(2), steps=20, eval_every=20)
    outs = {direct: str(tmp_path / str(direct)) for direct in (False, True)}
    codes = pools.run(2, train_with_sums, recipe=recipe, config=config, outs=outs)
    assert codes == [[(0, []), (0, [replaced])]] * 2

    ends = []
    for out in outs.values():
        (step,) = Path(out, "checkpoints").glob("step_*")
        tensors = json.loads((step / "manifest.json").read_text())["tensors"]
        ends.append((reproducible_values(read_metrics(Path(out))), tensors))
    assert len(ends[0][0]) == 20 and ends[0][1]
    assert ends[0] == ends[1]
