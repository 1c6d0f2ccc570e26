"""What we mend in DeepSpeed around the step, on an engine of plain numbers: limits of the norm,
ranks that hold the same, the micro-batches of a step.
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks_in_threads import Ranks
from recipekit.optim import repairs
from recipekit.optim.one_bit import OneBitAdam
from torch import nn

NORM = 13.0  # of the gradients below


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
    """Without a limit, with one that the norm does not reach, and with one that it exceeds; the
    norm is that before.
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
    """What is added later acts earlier before a step, and later after it; a follower hears whether
    the weights changed.
    """
    engine = engine_of(0.0, was_step_applied=lambda: "applied")
    for number in (1, 2):
        repairs.before_step(engine, lambda number=number: engine.said.append(f"before {number}"))
        repairs.after_step(
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
    """A cut weight on each of two ranks, one that both hold on the first, a copy of another stage's
    on none, an expert over the ranks that hold the others.
    """
    # two pairs of tensor ranks; experts lie on ranks 0 and 2, 1 and 3
    ranks = Ranks(4, monkeypatch)
    monkeypatch.setattr(
        repairs.expert,
        "group_of",
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
        # 25 and 100
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
    """Neither summed nor clipped, in either of DeepSpeed's two places; and both before it does."""
    monkeypatch.setattr(OneBitAdam, "compresses", compresses)
    optimizer = OneBitAdam([nn.Parameter(torch.zeros(1))], freeze_step=1)
    wrapper: Any = object.__new__(repairs.FP16_UnfusedOptimizer) if half else optimizer
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
    """DeepSpeed's own optimizer of mixed precision has taken one of zeros, which decayed the
    masters.
    """
    wrapper: Any = object.__new__(repairs.FP16_UnfusedOptimizer)
    masters, weights = (
        [[torch.ones(2), torch.ones(3)]],
        [[torch.tensor([5.0, 6.0]).bfloat16(), torch.full((3,), 7.0).bfloat16()]],
    )
    wrapper.fp32_groups, wrapper.fp16_groups = masters, weights
    basic = SimpleNamespace(state={"a": {"step": 1}})
    repairs.undo_hidden_step(SimpleNamespace(optimizer=wrapper, basic_optimizer=basic))  # type: ignore[arg-type]
    assert (
        basic.state == {}
        and masters[0][0].tolist() == [5.0, 6.0]
        and masters[0][1].tolist() == [7.0] * 3
    )
    basic.state["a"] = 1
    repairs.undo_hidden_step(SimpleNamespace(optimizer=object(), basic_optimizer=basic))  # type: ignore[arg-type]
    assert basic.state == {"a": 1}
