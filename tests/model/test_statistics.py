"""A step's BatchNorm statistics over all micro-batches and ranks.

The ranks are threads. The reference is computed without torch's BatchNorm.
"""

from typing import Any

import pytest
import torch
from ranks_in_threads import Ranks
from recipekit.model.batch_norm import (
    STEP_NORM_CLASSES,
    check_norms,
    norms_of,
    replace_norms,
    update_running_stats,
)
from recipekit.spec.errors import ConfigError
from torch import nn

EPS, MOMENTUM = 0.1, 0.3
FORMS: list[tuple[type[nn.Module], tuple[int, ...]]] = [
    (nn.BatchNorm1d, (4, 3)),
    (nn.BatchNorm1d, (4, 3, 5)),
    (nn.BatchNorm2d, (4, 3, 5, 2)),
]


def data(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + torch.arange(
        3.0
    ).view(1, 3, *[1] * (len(shape) - 2))


def model_of(kind: Any, momentum: float | None = MOMENTUM, **more: Any) -> Any:
    torch.manual_seed(0)
    norm = kind(3, eps=EPS, momentum=momentum, **more)
    norm.running_mean.copy_(torch.tensor([1.0, 2.0, 3.0]))
    norm.running_var.copy_(torch.tensor([4.0, 5.0, 6.0]))
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(torch.tensor([0.5, 2.0, -1.0]))
            norm.bias.copy_(torch.tensor([0.1, 0.2, 0.3]))
    return nn.Sequential(norm)


@pytest.mark.parametrize(("kind", "shape"), FORMS)
@pytest.mark.parametrize("affine", [True, False])
def test_a_micro_batch_is_normalised_as_torch_does_it(
    kind: Any, shape: tuple[int, ...], affine: bool
) -> None:
    ours, theirs = model_of(kind, affine=affine), model_of(kind, affine=affine)
    replace_norms(ours)
    assert type(ours[0]) is STEP_NORM_CLASSES[kind] and norms_of(ours) == [ours[0]]
    before = ours[0].running_mean.clone(), ours[0].running_var.clone()
    for training in (True, False):
        ours.train(training)
        theirs.train(training)
        x = [data(shape, 1).requires_grad_() for _ in range(2)]
        out = ours(x[0]), theirs(x[1])
        assert torch.equal(*out)
        for one in out:
            (one * torch.linspace(0, 1, one.numel()).view_as(one)).sum().backward()
        assert torch.equal(x[0].grad, x[1].grad)  # type: ignore[arg-type]
        theirs = model_of(kind, affine=affine)
    assert torch.equal(ours[0].running_mean, before[0]) and torch.equal(
        ours[0].running_var, before[1]
    ), "they move after the step"


@pytest.mark.parametrize("momentum", [MOMENTUM, None])
def test_statistics_move_once_by_the_mean_over_micro_batches_and_ranks(
    monkeypatch: pytest.MonkeyPatch, momentum: float | None
) -> None:
    """The ranks run one micro-batch and two micro-batches. One of the three steps is skipped."""

    def batches(rank: int, step: int) -> list[torch.Tensor]:
        return [data((4, 3, 5), 100 * step + 10 * rank + number) for number in range(1 + rank)]

    def case(rank: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        model = model_of(nn.BatchNorm1d, momentum)
        replace_norms(model)
        for step in range(3):
            for x in batches(rank, step):
                model(x)
            with torch.no_grad():
                model.eval()(data((4, 3, 5), 999))
            model.train()
            update_running_stats(norms_of(model), (0, 1), changed=step != 1)
            assert model[0].sums is None
        return model[0].running_mean, model[0].running_var, int(model[0].num_batches_tracked)

    found = Ranks(2, monkeypatch).run(case)
    mean, var = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    for count, step in enumerate((0, 2), 1):
        every = [x for rank in range(2) for x in batches(rank, step)]
        means = torch.stack([x.transpose(0, 1).flatten(1).mean(1) for x in every]).mean(0)
        variances = torch.stack([x.transpose(0, 1).flatten(1).var(1) for x in every]).mean(0)
        share = MOMENTUM if momentum else 1 / count
        mean, var = mean.lerp(means, share), var.lerp(variances, share)
    for own_mean, own_var, tracked in found:
        assert (
            torch.allclose(own_mean, mean, rtol=1e-5)
            and torch.allclose(own_var, var, rtol=1e-5)
            and tracked == 2
        )


def test_on_one_rank_nobody_is_asked_and_a_norm_of_another_stage_stays() -> None:
    model = nn.Sequential(*model_of(nn.BatchNorm2d), nn.Identity(), *model_of(nn.BatchNorm2d))
    replace_norms(model)
    model[0](data((4, 3, 5, 2), 1))
    update_running_stats(norms_of(model), None)
    assert int(model[0].num_batches_tracked) == 1 and int(model[2].num_batches_tracked) == 0
    assert (
        model[2].running_mean.tolist() == [1.0, 2.0, 3.0]
        and model[2].running_var.tolist() == [4.0, 5.0, 6.0] != model[0].running_var.tolist()
    )


def test_what_is_computed_again_counts_once() -> None:
    from torch.utils.checkpoint import checkpoint

    model = model_of(nn.BatchNorm1d)
    replace_norms(model)
    checkpoint(model, data((4, 3), 1).requires_grad_(), use_reentrant=False).sum().backward()
    assert (
        float(model[0].sums[-1]) == 1.0
        and model[0].sums.shape == (7,)
        and model[0].sums.dtype == torch.float64
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_two_bytes_are_beside_statistics_of_four(dtype: torch.dtype) -> None:
    model = model_of(nn.BatchNorm1d)
    replace_norms(model)
    expected = model.eval()(data((4, 3), 1))
    model[0].weight.data, model[0].bias.data = (
        model[0].weight.data.to(dtype),
        model[0].bias.data.to(dtype),
    )
    assert (
        torch.allclose(model(data((4, 3), 1)), expected, atol=1e-2)
        and model[0].running_mean.dtype == torch.float32
    )


def test_one_value_a_channel_and_other_norms_are_refused() -> None:
    model = model_of(nn.BatchNorm1d)
    replace_norms(model)
    with pytest.raises(ConfigError, match=r"micro_batch = 1: BatchNorm receives \(1, 3\)"):
        model(torch.ones(1, 3))
    assert model(torch.ones(1, 3, 2)).shape == (1, 3, 2) and model.eval()(
        torch.ones(1, 3)
    ).shape == (1, 3)
    for other, says in (
        (nn.BatchNorm3d(2), "0 is a BatchNorm3d, whose statistics"),
        (nn.BatchNorm1d(2, track_running_stats=False), "without running statistics"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_norms(nn.Sequential(other))
