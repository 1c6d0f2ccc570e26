"""ResNet, whose BatchNorm normalises images together.

Every layout must train like one process that runs the same micro-batches one after the other. The
running statistics change once per step, by the mean over all micro-batches and ranks. The reference
here computes the statistics from this definition.
"""

import functools
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import image_runs
import pytest
import torch
import transformers
from convert_command import convert
from image_runs import PICTURES, TASK, exported, plan_of, train_images
from parity import STEPS, Case, compare, each
from recipekit.architectures.families import default_config
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import read_metrics, reproducible_values
from reference import Trained, num_labels, train_plain
from shipped_jsons import strategy
from torch import nn
from torch.nn.functional import batch_norm

BATCH = {"micro_batch": 4, "global_batch": 16}
MOMENTUM = 0.1  # default of ResNet's norms


@functools.cache
def small() -> str:
    """Return a folder with the config of a ResNet with two stages.

    Its last norms average 64 values per channel of a micro-batch, because averages of few values
    amplify rounding. With four stages the last norms would average 16 and 4 values. Plain PyTorch
    would then differ from itself by 6e-3 after ten steps, with and without oneDNN.
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
    return replace(image_runs.recipe_for("resnet", **(BATCH | changes)), model=small())


def by_definition(model: nn.Module) -> Callable[[], None]:
    """Replace the forward passes of a plain model's norms; return the function that updates their
    statistics.

    Each micro-batch is normalised with its own mean and variance. The returned function updates the
    running statistics after a step.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    seen: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {norm: [] for norm in norms}

    def compute(norm: Any, x: torch.Tensor) -> torch.Tensor:
        # torch rejects bf16 weights together with fp32 statistics.
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
    """Compute a micro-batch's loss with its rows in a different order.

    The mean and variance are the same, but their terms are added in a different order.
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
    """Compare losses, norms, weights, running statistics, and the accuracy on held-out images."""
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
    """A pipeline's losses and running statistics are within 3 x the noise of the reference.

    The noise is the largest difference between single-process runs that differ only in the order of
    rows.
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
    """Return (largest difference between references, largest difference from their mean).

    Both differences are relative to the largest value if that value is above 1.
    """
    values = torch.stack(references).double()
    scale = max(1.0, values.abs().max().item())
    return (values.amax(0) - values.amin(0)).max().item() / scale, (
        got.double() - values.mean(0)
    ).abs().max().item() / scale


@pytest.mark.slow
def test_a_resume_is_bit_for_bit_and_the_export_is_judged_by_plain_transformers(pools, tmp_path):
    """The run has two stages of two data-parallel ranks, and stops after step 5.

    It uses SGD with momentum, as published ResNet recipes do.
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
        reproducible_values(read_metrics(tmp_path / "whole"))
        == reproducible_values(read_metrics(tmp_path / "parts"))
        != []
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
    """The chain is ZeRO-2 dp 2 -> ZeRO-3 dp 4 -> Hugging Face -> pp 2 -> Hugging Face.

    The running statistics and their counters are also converted. Then the run resumes in two
    stages, and trains like plain PyTorch.
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
    """The test uses DDP in fp16 with a loss scale that overflows.

    The norm layers count only the steps that changed the weights.
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
    """Run the real loop on a rank; the first gradients are too large for fp16."""
    scaler = torch.amp.GradScaler
    torch.amp.GradScaler = functools.partial(scaler, init_scale=2.0**24)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return train_images(recipe, config, out)
    finally:
        torch.amp.GradScaler = scaler
