"""StepBatchNorm equals torch's BatchNorm for one micro-batch, and counts every micro-batch once."""

from functools import partial
from typing import Any

import pytest
import torch
from recipekit.model.batch_norm import (
    StepBatchNorm1d,
    StepBatchNorm2d,
    check_norms,
    norms_of,
    replace_norms,
    update_running_stats,
)
from recipekit.spec.errors import ConfigError
from torch import nn
from torch.utils.checkpoint import checkpoint


def pair(**numbers: Any) -> tuple[nn.Module, nn.Module]:
    """Return (torch's norm layers, our norm layers) after a convolution, with the same random
    parameters.
    """
    models = [
        nn.Sequential(
            nn.Conv2d(3, 5, 3),
            nn.BatchNorm2d(5, **numbers),
            nn.Flatten(),
            nn.BatchNorm1d(5 * 36, **numbers),
        )
        for _ in range(2)
    ]
    for parameter in models[0].parameters():
        nn.init.normal_(parameter, 0.5)
    models[1].load_state_dict(models[0].state_dict())
    replace_norms(models[1])
    return models[0], models[1]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_of_a_step_with_one_micro_batch_everything_is_torchs(momentum):
    """Outputs, gradients and statistics are the same, in training and in evaluation.

    If `momentum` is None, the statistics are the mean over all steps.
    """
    torch.manual_seed(0)
    plain, ours = pair(momentum=momentum)
    assert [type(norm) for norm in norms_of(ours)] == [
        StepBatchNorm2d,
        StepBatchNorm1d,
    ] and not norms_of(plain)
    for x in torch.randn(3, 4, 3, 8, 8):
        outputs = [model(x) for model in (plain, ours)]
        for output in outputs:
            output.square().sum().backward()
        update_running_stats(norms_of(ours), None)
        assert torch.equal(*outputs)
    assert all(
        torch.equal(one.grad, other.grad)
        for one, other in zip(plain.parameters(), ours.parameters(), strict=True)
    )
    before, after = plain.state_dict(), ours.state_dict()
    assert before.keys() == after.keys()
    assert all(
        value.dtype == after[name].dtype
        and torch.allclose(value, after[name], rtol=1e-6, atol=1e-7)
        for name, value in before.items()
    )
    ours.load_state_dict(before)
    assert torch.equal(plain.eval()(x), ours.eval()(x)) and all(
        norm.sums is None for norm in norms_of(ours)
    )


def test_a_step_of_several_micro_batches_moves_by_their_mean():
    torch.manual_seed(0)
    _, model = pair()
    batches = torch.randn(3, 4, 3, 8, 8)
    for x in batches:
        model(x)
    seen = [model[0](x).transpose(0, 1).flatten(1) for x in batches]
    update_running_stats(norms_of(model), None)
    assert torch.allclose(
        model[1].running_mean,
        0.1 * torch.stack([values.mean(1) for values in seen]).mean(0),
        atol=1e-6,
    )
    assert torch.allclose(
        model[1].running_var,
        0.9 + 0.1 * torch.stack([values.var(1) for values in seen]).mean(0),
        atol=1e-6,
    )
    assert model[1].num_batches_tracked == 1
    update_running_stats(norms_of(model), None)
    assert model[1].num_batches_tracked == 1, "it saw nothing"


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_is_counted_once(reentrant):
    torch.manual_seed(0)
    _, model = pair()
    x = torch.randn(4, 3, 8, 8, requires_grad=True)
    once = model(x)
    sums = [norm.sums.clone() for norm in norms_of(model)]
    update_running_stats(norms_of(model), None)
    again: Any = checkpoint(model, x, use_reentrant=reentrant)
    again.sum().backward()
    assert torch.equal(once, again) and all(
        torch.equal(norm.sums, seen) for norm, seen in zip(norms_of(model), sums, strict=True)
    )


def test_bf16_weights_beside_statistics_in_fp32():
    """On a CPU, torch's BatchNorm rejects this combination. The output equals the rounded fp32
    output.
    """
    torch.manual_seed(0)
    _, model = pair()
    x = torch.randn(4, 3, 8, 8, dtype=torch.bfloat16)
    statistics = dict(model.named_buffers())
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    output = model(x)
    output.sum().backward()
    update_running_stats(norms_of(model), None)
    assert output.dtype == torch.bfloat16 and all(
        parameter.grad.dtype == torch.bfloat16 for parameter in model.parameters()
    )
    assert (
        all(value.dtype == torch.float32 for name, value in statistics.items() if "running" in name)
        and statistics["1.running_mean"].abs().max() > 0
    )
    inner = model[0](x).float()
    expected = partial(
        nn.functional.batch_norm,
        inner,
        None,
        None,
        model[1].weight.float(),
        model[1].bias.float(),
        True,
    )()
    assert torch.equal(model[1](model[0](x)), expected.bfloat16())


def test_what_it_cannot_compute_is_refused():
    _, model = pair()
    with pytest.raises(
        ConfigError,
        match=(
            r"micro_batch = 1: BatchNorm receives \(1, 180\), and one value per channel has no"
            r" variance\. Use --micro_batch 2"
        ),
    ):
        model(torch.randn(1, 3, 8, 8))
    with pytest.raises(
        ConfigError, match="0 is a SyncBatchNorm, whose statistics are not known here"
    ):
        check_norms(nn.Sequential(nn.SyncBatchNorm(3)))
    with pytest.raises(ConfigError, match="0 is a BatchNorm2d without running statistics"):
        replace_norms(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)))
    with pytest.raises(ConfigError, match="0 is a BatchNorm3d"):
        replace_norms(nn.Sequential(nn.BatchNorm3d(3)))
