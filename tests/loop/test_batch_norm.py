"""ResNet, whose pictures are normalised together: any layout trains like one process that takes the
same micro-batches one after the other.

Its running statistics move once a step, by the mean over all micro-batches and ranks: here from
their definition.
"""

import functools
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_images
import torch
import transformers
from recipekit.architectures.families import default_config
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import numbers, read_metrics
from reference import Trained, num_labels, train_plain
from test_images import PICTURES, TASK, convert, exported, plan_of, train_images
from test_parity import STEPS, Case, compare, each, strategy
from torch import nn
from torch.nn.functional import batch_norm

BATCH = {"micro_batch": 4, "global_batch": 16}
MOMENTUM = 0.1  # of ResNet's norms


@functools.cache
def small() -> str:
    """A folder with a ResNet of two stages, whose last norms see 64 values a channel of a
    micro-batch: of few values rounding is amplified.

    In four stages, whose last ones see 16 and 4 values, plain PyTorch differs from itself by 6e-3
    after ten steps, with and without oneDNN.
    """
    config = default_config("resnet", TASK).to_dict() | {
        "depths": [2, 2],
        "hidden_sizes": [64, 128],
        "embedding_size": 64,
    }
    folder = Path(tempfile.mkdtemp(prefix="resnet_"))
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return str(folder)


def recipe_for(**changes: Any) -> Recipe:
    return replace(test_images.recipe_for("resnet", **(BATCH | changes)), model=small())


def by_definition(model: nn.Module) -> Callable[[], None]:
    """Takes over the norms of a plain model: each micro-batch is normalised by its mean and
    variance, the running ones move when the step is done.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    seen: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {norm: [] for norm in norms}

    def compute(norm: Any, x: torch.Tensor) -> torch.Tensor:
        # torch takes no bf16 weights beside statistics in fp32
        own = norm.weight.float(), norm.bias.float()
        if not norm.training:
            return batch_norm(x, norm.running_mean, norm.running_var, *own, False, 0.0, norm.eps)
        values = x.detach().double().transpose(0, 1).flatten(1)  # (C, B H W)
        seen[norm].append((values.mean(1), values.var(1)))
        return batch_norm(x, None, None, *own, True, 0.0, norm.eps)

    def move() -> None:
        for norm, pairs in seen.items():
            for running, values in zip(
                (norm.running_mean, norm.running_var), zip(*pairs, strict=True), strict=True
            ):
                running += MOMENTUM * (torch.stack(values).mean(0) - running)
            norm.num_batches_tracked += 1
            pairs.clear()

    for norm in norms:
        norm.forward = functools.partial(compute, norm)
    return move


NORMED = replace(PICTURES, watch=by_definition)


def in_other_order(
    loss: Any, model: Any, batch: dict[str, torch.Tensor], shift: int
) -> torch.Tensor:
    """Computes a micro-batch's loss with its rows in another order: the same mean and variance,
    summed in another order.
    """
    return loss(model, {name: values.roll(shift, 0) for name, values in batch.items()})


@functools.cache
def reference(bf16: bool = False, shift: int = 0, **changes: Any) -> Trained:
    os.environ.pop("WORLD_SIZE", None)
    plan = plan_of(
        replace(recipe_for(**changes), ds_config=strategy("zero0", bf16), out="/nonexistent")
    )
    plain = (
        replace(NORMED, loss=functools.partial(in_other_order, NORMED.loss, shift=shift))
        if shift
        else NORMED
    )
    return train_plain(plan.recipe, plan.model_config, STEPS, bf16, plain)


PP2 = {"pp": 2}
CASES = [
    Case("zero0 dp2", 2, "zero0"),
    Case("zero1 dp4", 4, "zero1", slow=True),
    Case("zero2 dp2, checkpointing", 2, "zero2", {"activation_checkpointing": True}, slow=True),
    Case("zero3 dp2", 2, "zero3", slow=True),
    Case("zero1 pp2", 2, "zero1", PP2),
    Case("zero1 pp4", 4, "zero1", {"pp": 4}, slow=True),
    Case(
        "zero0 pp2 dp2, checkpointing",
        4,
        "zero0",
        PP2 | {"activation_checkpointing": True},
        slow=True,
    ),
    Case("zero1 pp2, dualpipev", 2, "zero1", PP2 | {"pipeline_schedule": "dualpipev"}, slow=True),
    Case("ddp dp2", 2, "", {"engine": "ddp", "precision": "fp32"}, slow=True),
    Case("fsdp2 dp4", 4, "", {"engine": "fsdp2", "precision": "fp32", "micro_batch": 4}, slow=True),
]


@each(CASES)
def test_resnet_trains_like_plain_pytorch(pools, tmp_path, case):
    """Losses, norms, every weight, every running statistic, and the share of held-out pictures that
    are right.
    """
    config = strategy(case.file) if case.file else {}
    codes = pools.run(
        case.world,
        train_images,
        recipe=recipe_for(**case.layout, **case.numbers),
        config=config,
        out=str(tmp_path / "run"),
    )
    assert codes == [0] * case.world
    expected = reference(**case.numbers)
    compare(tmp_path / "run", expected)
    assert any(name.endswith("running_var") for name in exported(tmp_path / "run" / "hf"))
    last = read_metrics(tmp_path / "run")[-1]
    assert [last["eval_accuracy"], last["eval_top5_accuracy"]] == pytest.approx(expected.right)


@pytest.mark.slow
def test_resnet_trains_like_plain_pytorch_in_bf16(pools, tmp_path):
    """In two stages: losses and running statistics within 3 x the largest difference between
    single-process runs that only order rows otherwise.
    """
    assert pools.run(
        2,
        train_images,
        recipe=recipe_for(**PP2, eval_every=0),
        config=strategy("zero1", bf16=True),
        out=str(tmp_path / "run"),
    ) == [0, 0]
    plain = [
        reference(bf16=True, shift=shift, eval_every=0) for shift in range(BATCH["micro_batch"])
    ]
    losses, got = (
        [line["loss"] for line in read_metrics(tmp_path / "run")],
        exported(tmp_path / "run" / "hf"),
    )
    noise, worst = furthest([torch.tensor(one.losses) for one in plain], torch.tensor(losses))
    print(f"losses: worst difference {worst:.1e}, noise of the reference {noise:.1e}")
    assert 0 < noise < 0.05 and worst <= 3 * noise
    names = [name for name in got if "running" in name]
    apart = {name: furthest([one.weights[name] for one in plain], got[name]) for name in names}
    print(
        f"statistics: worst difference {max(worst for _, worst in apart.values()):.1e}, noise"
        f" {max(noise for noise, _ in apart.values()):.1e}"
    )
    assert len(names) == 2 * 14
    noise = max(noise for noise, _ in apart.values())
    assert 0 < noise < 0.05 and max(worst for _, worst in apart.values()) <= 3 * noise


def furthest(references: list[torch.Tensor], got: torch.Tensor) -> tuple[float, float]:
    """Returns (largest difference between references, largest difference from their mean), relative
    to the largest value where that is above 1.
    """
    values = torch.stack(references).double()
    scale = max(1.0, values.abs().max().item())
    return (values.amax(0) - values.amin(0)).max().item() / scale, (
        got.double() - values.mean(0)
    ).abs().max().item() / scale


@pytest.mark.slow
def test_a_resume_is_bit_for_bit_and_the_export_is_judged_by_plain_transformers(pools, tmp_path):
    """Stopped after step 5, in two stages of two data-parallel ranks; SGD with momentum, which
    recipes of ResNet use.
    """
    config = strategy("zero1_sgd")
    for out, stops in (("whole", (0,)), ("parts", (5, 0))):
        for stop_at in stops:
            codes = pools.run(
                4,
                train_images,
                recipe=recipe_for(pp=2, lr=0.01, stop_at=stop_at),
                config=config,
                out=str(tmp_path / out),
            )
            assert codes == [0] * 4
    assert (
        numbers(read_metrics(tmp_path / "whole")) == numbers(read_metrics(tmp_path / "parts")) != []
    )
    whole, parts = exported(tmp_path / "whole" / "hf"), exported(tmp_path / "parts" / "hf")
    assert whole.keys() == parts.keys() and all(
        torch.equal(whole[name], parts[name]) for name in whole
    )

    model = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path / "whole" / "hf"
    ).eval()
    plan = plan_of(replace(recipe_for(), ds_config=strategy("zero0"), out="/nonexistent"))
    batches = PICTURES.held_out(plan.recipe, plan.model_config)
    with torch.no_grad():
        loss = sum(PICTURES.loss(model, batch).item() for batch in batches) / num_labels(batches)
        shares = [
            sum(counts) / num_labels(batches)
            for counts in zip(*(PICTURES.right(model, batch) for batch in batches), strict=True)
        ]
    last = read_metrics(tmp_path / "whole")[-1]
    assert last["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert [last["eval_accuracy"], last["eval_top5_accuracy"]] == pytest.approx(shares)


@pytest.mark.slow
def test_a_run_goes_through_every_layout_and_its_files_are_the_same_bits(pools, tmp_path):
    """ZeRO-2 dp 2 -> ZeRO-3 dp 4 -> Hugging Face -> pp 2 -> Hugging Face, statistics and their
    counts too; then the run goes on in two stages, like plain PyTorch.
    """
    run = tmp_path / "run"
    assert pools.run(
        2, train_images, recipe=recipe_for(stop_at=5), config=strategy("zero2"), out=str(run)
    ) == [0, 0]
    convert("to-hf", run, tmp_path / "first", "--verify")
    convert("reshape", run, tmp_path / "four", "--tp", 1, "--pp", 1, "--dp", 4, "--zero", 3)
    convert("to-hf", tmp_path / "four", tmp_path / "second")
    convert(
        "from-hf",
        tmp_path / "second",
        tmp_path / "cut",
        "--zero",
        1,
        "--tp",
        1,
        "--pp",
        2,
        "--dp",
        1,
    )
    convert("to-hf", tmp_path / "cut", tmp_path / "third")
    first, second, third = (exported(tmp_path / name) for name in ("first", "second", "third"))
    assert (
        first.keys() == second.keys() == third.keys()
        and sum(name.endswith("num_batches_tracked") for name in first) == 14
    )
    assert all(
        torch.equal(first[name], second[name]) and torch.equal(first[name], third[name])
        for name in first
    )
    assert pools.run(
        2, train_images, recipe=recipe_for(pp=2), config=strategy("zero1"), out=str(run)
    ) == [0, 0]
    compare(run, reference())


def test_a_skipped_step_moves_no_statistics(pools, tmp_path):
    """DDP in fp16 with a scale that overflows: the norms have counted the steps that changed the
    weights, and no others.
    """
    recipe = recipe_for(engine="ddp", precision="fp16")
    assert pools.run(
        2, train_images_that_overflow, recipe=recipe, config={}, out=str(tmp_path / "run")
    ) == [0, 0]
    saved = torch.load(
        tmp_path / "run/checkpoints/step_00000010/mp_rank_00_model_states.pt", weights_only=False
    )
    assert 0 < saved["skipped_steps"] < STEPS
    counted = [
        value.item()
        for name, value in exported(tmp_path / "run" / "hf").items()
        if name.endswith("num_batches_tracked")
    ]
    assert len(counted) == 14 and set(counted) == {STEPS - saved["skipped_steps"]}


def train_images_that_overflow(recipe: Recipe, config: dict[str, Any], out: str) -> int:
    """Runs on every rank: the real loop, whose first gradients are too large for fp16."""
    scaler = torch.amp.GradScaler
    torch.amp.GradScaler = functools.partial(scaler, init_scale=2.0**24)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return train_images(recipe, config, out)
    finally:
        torch.amp.GradScaler = scaler
