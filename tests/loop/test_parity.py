"""Every layout must have the same losses, gradient norms and final weights as plain PyTorch.

The reference is tests/support/reference.py.
"""

import contextlib
import copy
import json
from typing import Any

import pytest
import torch
from parity import (
    TP2,
    Case,
    accumulating,
    compare,
    compare_bf16,
    each,
    recipe_for,
    reference,
    train_and_compare,
    train_in_layout,
)
from recipekit.architectures.lookup import SHIPPED
from recipekit.data.batching import DataRank
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import request_from_recipe
from recipekit.data.stream import open_stream
from recipekit.parallel.sequence import local_sequence_chunk
from recipekit.spec.run_folder import read_metrics, reproducible_values
from shipped_jsons import strategy

CASES = [
    Case("zero0 dp1", 1, "zero0"),
    Case("zero0 dp2", 2, "zero0"),
    Case("zero0 dp4", 4, "zero0", slow=True),
    Case("zero1 dp1", 1, "zero1", slow=True),
    Case("zero1 dp2", 2, "zero1"),
    Case("zero1 dp4", 4, "zero1", slow=True),
    Case("zero2 dp1", 1, "zero2", slow=True),
    Case("zero2 dp2", 2, "zero2"),
    Case("zero2 dp4", 4, "zero2", slow=True),
    Case("zero3 dp1", 1, "zero3", slow=True),
    Case("zero3 dp2", 2, "zero3"),
    Case("zero3 dp4", 4, "zero3", slow=True),
    Case("zero0 tp2", 2, "zero0", TP2),
    Case("zero1 tp2", 2, "zero1", TP2),
    Case("zero2 tp2", 2, "zero2", TP2, slow=True),
    Case("zero3 tp2", 2, "zero3", TP2, slow=True),
    Case("zero0 tp2 dp2", 4, "zero0", TP2, slow=True),
    Case("zero1 tp2 dp2", 4, "zero1", TP2, slow=True),
    Case("zero3 tp2 dp2", 4, "zero3", TP2, slow=True),
    Case("zero2 optimizer on the CPU", 2, "zero2_cpu", slow=True),
    Case("zero3 optimizer and parameters on the CPU", 2, "zero3_cpu", slow=True),
    Case("zero3 on NVMe", 2, "zero3_nvme"),
    Case("zero3 on two hosts of two ranks", 4, "zero3_hosts", slow=True),
    Case("micro_batch 1", 2, "zero1", {"micro_batch": 1}, slow=True),
    Case("micro_batch 4, no accumulation", 2, "zero2", {"micro_batch": 4}, slow=True),
    Case(
        "activation checkpointing zero0", 2, "zero0", {"activation_checkpointing": True}, slow=True
    ),
    Case(
        "activation checkpointing zero3", 2, "zero3", {"activation_checkpointing": True}, slow=True
    ),
    Case(
        "activation checkpointing zero3 tp2",
        2,
        "zero3",
        {"activation_checkpointing": True, "tp": 2},
        slow=True,
    ),
    Case("no clipping", 2, "zero2", numbers={"gradient_clipping": 0.0}, slow=True),
    Case("strong clipping", 4, "zero1", TP2, {"gradient_clipping": 0.1}, slow=True),
    # The limit must not raise a norm that is below it. Adam ignores a constant factor, but not a
    # factor that changes with the norm.
    Case("a limit above every norm", 1, "zero0", numbers={"gradient_clipping": 1e4}),
    Case(
        "a linear schedule that ends above zero",
        1,
        "zero0",
        numbers={"schedule": "linear", "min_lr": 1e-4, "warmup_steps": 3},
        slow=True,
    ),
    # The activation has parameters that are not in the tensor plan. Every rank computes with its
    # own shard of these parameters. The derivative of the activation jumps at -1e-6, so rounding
    # changes the gradient of an element there. Perturbing the weights by 1e-7 changed the norm by
    # up to 4e-5, and by 6e-8 without the jump.
    Case(
        "a parameter that the plan does not name",
        2,
        "zero0",
        TP2,
        model="apertus",
        norm_rel=1e-4,
    ),
]


@each(CASES)
def test_layout_trains_like_plain_pytorch(pools, ops, tmp_path, case):
    for op in {
        "zero2_cpu": ["cpu_adam"],
        "zero3_cpu": ["cpu_adam"],
        "zero3_nvme": ["cpu_adam", "async_io"],
    }.get(case.file, []):
        ops(op)
    train_and_compare(pools, tmp_path / "run", case)


UNEQUAL = [
    Case("chats zero0 dp2", 2, "zero0", corpus="chats"),
    Case("chats zero2 dp2", 2, "zero2", corpus="chats", slow=True),
    Case("chats zero1 tp2 dp2", 4, "zero1", TP2, corpus="chats", slow=True),
    Case("chats zero1 sp2", 2, "zero1", {"sp": 2}, corpus="chats"),
    Case("chats zero1 pp2 dp2", 4, "zero1", {"pp": 2}, corpus="chats"),
    Case("document borders zero2 dp2", 2, "zero2", corpus="borders", slow=True),
    Case("document borders zero3 dp2", 2, "zero3", corpus="borders", slow=True),
]


@each(UNEQUAL)
def test_ranks_with_other_numbers_of_labels_train_like_plain_pytorch(pools, tmp_path, case):
    """A token has the same weight on every rank.

    The loss is divided by the number of labels in the global batch, not by the number on one rank.
    """
    recipe = recipe_for(
        case.model, **accumulating(case.world, **case.layout), **case.both, tokenizer="bytes"
    )
    dp, counts = case.world // recipe.tp // recipe.pp // recipe.sp, []
    for dp_rank in range(dp):
        with contextlib.closing(
            open_stream(request_from_recipe(recipe), byte_tokenizer(), rank=DataRank(dp, dp_rank))
        ) as stream:
            batches, _ = next(stream)
        counts += [
            sum(
                int((local_sequence_chunk(batch, recipe.sp, sp_rank)["labels"] != -100).sum())
                for batch in batches
            )
            for sp_rank in range(recipe.sp)
        ]
    assert len(counts) > 1 and len(set(counts)) > 1, "the case must be able to fail"
    train_and_compare(pools, tmp_path / "run", case)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["zero1", "zero3"])
@pytest.mark.parametrize(
    ("model", "tp"), [("tied", 1), ("tied", 2), ("qwen3", 1), ("qwen3", 2), ("gpt2", 1)]
)
def test_model_trains_like_plain_pytorch(pools, tmp_path, model, tp, file):
    recipe = recipe_for(model, **accumulating(2, tp=tp))
    pools.run(2, train_in_layout, recipe=recipe, config=strategy(file), out=str(tmp_path / "run"))
    compare(tmp_path / "run", reference(model))


BF16_CASES = [
    Case("zero0", 2, "zero0"),
    Case("zero1", 2, "zero1", slow=True),
    Case("zero2", 2, "zero2", slow=True),
    Case("zero3", 2, "zero3"),
    Case("zero1 tp2", 2, "zero1", TP2, slow=True),
    Case("zero3 tp2", 2, "zero3", TP2, slow=True),
    Case("zero3_cpu", 2, "zero3_cpu", slow=True),
]


@each(BF16_CASES)
def test_layout_trains_like_plain_pytorch_in_bf16(pools, ops, tmp_path, case):
    """Every loss is within 3 x the noise of the reference.

    The noise is the largest difference between single-process runs that differ only in how they
    split the batch.
    """
    if case.file == "zero3_cpu":
        ops("cpu_adam")
    recipe = recipe_for(case.model, **accumulating(case.world, **case.layout))
    pools.run(
        case.world,
        train_in_layout,
        recipe=recipe,
        config=strategy(case.file, bf16=True),
        out=str(tmp_path / "run"),
    )
    compare_bf16(tmp_path / "run", case.name)


def waiting(config: dict[str, Any]) -> dict[str, Any]:
    """Return a shipped JSON without the settings that avoid waits for device or network."""
    config = copy.deepcopy(config)
    del config["timers"]
    config["bf16"].pop("immediate_grad_update", None)
    if config["zero_optimization"]["stage"] == 2:
        config["zero_optimization"]["overlap_comm"] = False
    return config


def fused_steps(steps: int) -> tuple[float, float, float]:
    """Return the largest differences between torch's fused AdamW, its plain AdamW, and fp64.

    The result is (fused to plain, fused to fp64, plain to fp64), after `steps` with the same
    gradients.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(100_003, generator=generator)
    fused, plain, exact = (
        torch.nn.Parameter(start.clone().to(dtype))
        for dtype in (torch.float32, torch.float32, torch.float64)
    )
    numbers = dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    optimizers = [
        torch.optim.AdamW([weights], **numbers, fused=weights is fused)
        for weights in (fused, plain, exact)
    ]
    for _ in range(steps):
        gradient = torch.randn(start.shape, generator=generator)
        for weights in (fused, plain, exact):
            weights.grad = gradient.to(weights.dtype)
        for optimizer in optimizers:
            optimizer.step()
    apart, mine, theirs = (
        (a.double() - b).abs().max().item()
        for a, b in ((fused, plain), (fused, exact), (plain, exact))
    )
    return apart, mine, theirs


def test_a_fused_adamw_is_as_near_to_adamw_as_the_plain_one():
    """The two optimizers round differently, even on a CPU.

    After a step, one in a thousand weights differs in its last place.
    """
    apart, mine, theirs = fused_steps(100)
    print(f"fused AdamW to plain {apart:.1e}, to fp64 {mine:.1e}; plain to fp64 {theirs:.1e}")
    assert 0 < apart < 1e-6 and mine <= 1.2 * theirs


@pytest.mark.parametrize(
    ("file", "model", "layout"),
    [
        pytest.param("zero0", "untied", {}, marks=pytest.mark.slow),
        ("zero1", "untied", {}),
        pytest.param("zero2", "untied", {}, marks=pytest.mark.slow),
        pytest.param("zero3", "untied", {}, marks=pytest.mark.slow),
        pytest.param("zero1", "tied", {"pp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_settings_that_spare_hosts_a_wait_change_no_bit(pools, tmp_path, file, model, layout):
    """The test runs in bf16, the precision of the files.

    It compares the numbers of every step and the digests of all tensors in the checkpoint.
    """
    config = strategy(file, bf16=True)
    if file == "zero2":
        # Several buckets, so that communication can overlap.
        config["zero_optimization"]["reduce_bucket_size"] = 20_000
    assert waiting(config) != config
    recipe = recipe_for(model, **accumulating(2, **layout), steps=4, eval_every=4)
    seen = []
    for name, given in (("run", config), ("waiting", waiting(config))):
        codes = pools.run(2, train_in_layout, recipe=recipe, config=given, out=str(tmp_path / name))
        assert codes == [0, 0]
        (step,) = (tmp_path / name / "checkpoints").glob("step_*")
        seen.append(
            (
                reproducible_values(read_metrics(tmp_path / name)),
                json.loads((step / "manifest.json").read_text())["tensors"],
            )
        )
    assert seen[0] == seen[1] and len(seen[0][0]) == 4 and seen[0][1]


def adam_steps(steps: int, weight_decay: float) -> tuple[float, float, float]:
    """Return the largest differences between CPU Adam, torch's AdamW, and fp64.

    The result is (CPU Adam to torch, CPU Adam to fp64, torch to fp64), after `steps` with the same
    gradients.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    generator = torch.Generator().manual_seed(0)
    start = torch.randn(100_003, generator=generator)  # not a multiple of the vector width
    mine, theirs, exact = (
        torch.nn.Parameter(start.clone().to(dtype))
        for dtype in (torch.float32, torch.float32, torch.float64)
    )
    numbers = dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-6, weight_decay=weight_decay)
    optimizers = [
        DeepSpeedCPUAdam([mine], adamw_mode=True, **numbers),
        torch.optim.AdamW([theirs], **numbers),
        torch.optim.AdamW([exact], **numbers),
    ]
    for _ in range(steps):
        gradient = torch.randn(start.shape, generator=generator)
        for parameter in (mine, theirs, exact):
            parameter.grad = gradient.to(parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()
    mine, theirs, exact = mine.detach(), theirs.detach(), exact.detach()
    return tuple(
        (a.double() - b).abs().max().item()
        for a, b in ((mine, theirs), (mine, exact), (theirs, exact))
    )


@pytest.mark.slow
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_cpu_adam_is_adamw(pools, ops, weight_decay):
    """After 100 steps, DeepSpeed's CPU Adam is as close to fp64 AdamW as torch's fp32 AdamW is.

    Without weight decay the two agree except for one rounding.
    """
    ops("cpu_adam")
    apart, mine, theirs = pools.run(1, adam_steps, steps=100, weight_decay=weight_decay)[0]
    print(
        f"weight decay {weight_decay}: CPU Adam to torch {apart:.1e}, to fp64 {mine:.1e}; torch to"
        f" fp64 {theirs:.1e}"
    )
    assert mine <= 1.2 * theirs
    assert weight_decay or apart < 5e-7  # one unit in the last place for weights up to 4.5


def test_every_shipped_architecture_is_a_known_model():
    from transformers import AutoConfig

    for file in SHIPPED.glob("*.json"):
        config = json.loads(file.read_text())
        AutoConfig.for_model(config.pop("model_type"), **config)
