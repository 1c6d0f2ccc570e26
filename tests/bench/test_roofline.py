"""The roofline: bytes computed by hand, FLOPs compared with the planner's formula, and the page."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from pool import ROOT

sys.path.insert(0, str(ROOT / "tools" / "bench"))

import bench_gpu
import roofline
from op_costs import BACKWARD, FORWARD, RECOMPUTATION, Costs, Operation, bytes_of, fused
from recipekit.kernels.blocks import columns_per_block
from recipekit.model.flops import model_flops
from recipekit.plan import RunPlan
from recipekit.spec.devices import DEVICES, Device
from recipekit.spec.errors import ConfigError
from torch._subclasses.fake_tensor import FakeTensorMode

DEVICE = Device(flops=1000.0, memory=1, bandwidth=100.0)


def counted(run: Any) -> list[tuple[str, int, float]]:
    with FakeTensorMode(), Costs() as costs:
        run()
    return [(operation.name, operation.bytes, operation.flops) for operation in costs.found]


def test_bytes_and_flops_of_two_operations():
    def run() -> None:
        left, right = torch.empty(4, 8), torch.empty(16, 8)
        (left @ right.t()).relu()

    assert counted(run) == [
        ("aten.mm", 4 * (4 * 8 + 8 * 16 + 4 * 16), 2.0 * 4 * 8 * 16),
        ("aten.relu", 4 * 2 * 64, 0.0),
    ]


@pytest.mark.parametrize(
    ("run", "moved"),
    [
        (lambda a, b, ids: a.view(4, 8).transpose(0, 1)[2:], []),
        (lambda a, b, ids: a.add_(b), [3 * 128]),
        (lambda a, b, ids: a.copy_(b), [2 * 128]),
        (lambda a, b, ids: a.zero_(), [128]),
        (lambda a, b, ids: a + a, [2 * 128]),  # the tensor is read only once
        # An expanded tensor counts with its size in memory.
        (lambda a, b, ids: a.view(1, 32).expand(3, 32) + 1.0, [128 + 3 * 128]),
        (lambda a, b, ids: a.bfloat16(), [128 + 64]),
        # Two of the eight rows.
        (lambda a, b, ids: torch.nn.functional.embedding(ids, b.view(8, 4)), [16 + 2 * 32]),
        (lambda a, b, ids: torch.nn.functional.embedding(ids, b.view(8, 4)).device, [16 + 2 * 32]),
        (lambda a, b, ids: b.scatter_(0, ids, 1.0), [16 + 2 * 8]),
    ],
)
def test_bytes_of_operations(run: Any, moved: list[int]):
    make = lambda: run(torch.empty(32), torch.empty(32), torch.zeros(2, dtype=torch.int64))  # noqa: E731
    assert [size for name, size, _ in counted(make) if name != "aten.zeros"] == moved


def test_an_unknown_librarys_operation_is_an_error():
    @torch.library.custom_op("roofline_test::mystery", mutates_args={})
    def mystery(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with pytest.raises(ValueError, match=r"roofline_test.mystery has no formula"):
        counted(lambda: mystery.register_fake(torch.empty_like) and mystery(torch.empty(3)))
    assert bytes_of(torch.ops.aten.relu.default, (torch.empty(3),), {}, torch.empty(3)) == 24


def of_one_kernel(run: Any) -> list[tuple[str, str, int]]:
    """Return the name, stage and bytes of `run`'s operations if all except matrix products are
    fused.

    `run` receives the mode, and sets the mode's stage when the backward pass begins.
    """
    with FakeTensorMode(), Costs() as costs:
        run(costs)
    runs = ["" if operation.name == "aten.mm" else "elements" for operation in costs.found]
    return [
        (operation.name, operation.stage, operation.bytes)
        for _, operation in fused(costs.found, runs)
    ]


def test_a_run_reads_once_and_writes_what_is_read_later():
    def run(costs: Any) -> None:
        rows, weight, gain = torch.empty(8, 16), torch.empty(16, 4), torch.empty(16)
        # Without fusion these are 6 operations.
        normed = rows * (rows * rows).mean(1, keepdim=True).add(1e-6).rsqrt() * gain
        ((normed @ weight).relu() + 1.0) @ weight.t()

    moved = (
        4 * (8 * 16 + 16 + 8 * 16),
        4 * (8 * 16 + 16 * 4 + 8 * 4),
        4 * (8 * 4 + 8 * 4),
        4 * (8 * 4 + 16 * 4 + 8 * 16),
    )
    assert of_one_kernel(run) == [
        (name, FORWARD, size)
        for name, size in zip(("fused", "aten.mm", "fused", "aten.mm"), moved, strict=True)
    ]


def powers(one: torch.Tensor, two: torch.Tensor, three: torch.Tensor) -> torch.Tensor:
    return torch.stack([one.sin(), one.cos(), one.exp(), one.sqrt()])  # four tensors from one


def mixed(one: torch.Tensor, two: torch.Tensor, three: torch.Tensor) -> torch.Tensor:
    return one * two + three


@pytest.mark.parametrize(("forward", "tensors"), [(powers, 1), (mixed, 2)])
def test_what_only_the_backward_reads_is_written_or_made_again(forward: Any, tensors: int):
    """Four tensors are recomputed from their common input.

    A tensor that depends on three inputs is written and read.
    """

    def run(costs: Any) -> None:
        made = forward(*(torch.empty(10) for _ in range(3)))
        costs.stage = BACKWARD
        made * 2.0

    assert of_one_kernel(run) == [
        ("fused", FORWARD, 4 * 10 * (1 if forward is powers else 3)),
        ("fused", BACKWARD, 4 * 10 * tensors),
    ]


@pytest.mark.parametrize(
    ("stage", "copies", "bytes_each"),
    [(1, True, 18), (1, False, 10), (2, True, 34), (2, False, 26)],
)
def test_gradient_sums_move_the_bytes_of_deepspeed(stage: int, copies: bool, bytes_each: int):
    def run() -> None:
        weight = torch.nn.Parameter(torch.empty(100, dtype=torch.bfloat16))
        weight.grad = torch.empty_like(weight)
        roofline.add_gradients([weight], stage, copies)

    assert sum(moved for _, moved, _ in counted(run)) == 100 * bytes_each


# Models
# --------------------------------------------------------------------------------------------------


def plan_of(recipe: str, *flags: str, layers: int = 2) -> RunPlan:
    """Return a recipe's plan with its real width, but with fewer layers."""
    case = roofline.Case("", f"recipes/{recipe}.py", "", ("--seq_len", "512", *flags))
    plan = roofline.plan_of(case, ROOT)
    assert plan.model_config is not None
    return replace(
        plan,
        model_config=plan.model_config
        | {
            "num_hidden_layers": layers,
            "layer_types": ["full_attention"] * layers,
        },
    )


def products(traced: roofline.Traced, *stages: str) -> float:
    """Return the FLOPs of the matrix products with weights."""
    pairs = zip(traced.operations, traced.kinds, strict=True)
    return sum(
        operation.flops
        for operation, kind in pairs
        if kind in (roofline.LINEAR, roofline.LOSS) and operation.stage in stages
    )


@pytest.mark.parametrize("way", roofline.WAYS, ids=lambda way: way.title)
@pytest.mark.parametrize("recipe", ["qwen3_0_6b_zero2", "llama3_1_8b_zero3"])
def test_products_have_the_flops_of_the_formula(recipe: str, way: roofline.Way):
    """The formula does not use the model's code. It is 6 FLOPs for each parameter that a token
    uses.
    """
    plan = plan_of(recipe, "--no-activation_checkpointing")
    traced = roofline.trace(plan, way)
    flops = model_flops(roofline.made(plan, roofline.WAYS[0]))
    assert flops is not None and plan.model_config is not None
    # The chunked loss computes its logits twice, unless one block contains all of them.
    vocab_size = plan.model_config["vocab_size"]
    twice = way.loss == "chunked" and columns_per_block(traced.tokens, vocab_size) < vocab_size
    head = 2 * plan.model_config["hidden_size"] * vocab_size * traced.tokens * twice
    assert products(traced, FORWARD, BACKWARD) - head == pytest.approx(
        flops.per_unit * traced.tokens, rel=0.01
    )
    assert not products(traced, RECOMPUTATION)


def test_checkpointing_computes_layers_again():
    plan = plan_of("qwen3_0_6b_zero2", "--activation_checkpointing")
    assert plan.model_config is not None
    shape = plan.model_config
    traced = roofline.trace(plan, roofline.WAYS[0])
    pairs = list(zip(traced.operations, traced.kinds, strict=True))
    forward = sum(
        operation.flops
        for operation, kind in pairs
        if kind == roofline.LINEAR and operation.stage == FORWARD
    )
    # A layer's last product is not recomputed, because its result is not needed.
    last = 2 * 2 * shape["hidden_size"] * shape["intermediate_size"] * traced.tokens
    assert products(traced, RECOMPUTATION) == forward - last > 0


# Printed text
# --------------------------------------------------------------------------------------------------


def operation(name: str, moved: int, flops: float) -> Operation:
    return Operation(name, FORWARD, (), moved, flops, frozenset())


def test_the_longer_of_bytes_and_flops_is_an_operations_time():
    traced = roofline.Traced(
        [operation("aten.mm", 100, 5000.0), operation("aten.mul", 300, 0.0)],
        [roofline.LINEAR, roofline.ELEMENTS],
        16,
        2000.0,
    )
    assert traced.best(DEVICE) == 5.0 + 3.0
    assert roofline.summed(traced, DEVICE)[roofline.LINEAR] == (100, 5000.0, 5.0)
    assert roofline.holding_back(traced, DEVICE)[0] == (f"aten.mul of {roofline.ELEMENTS}", 3.0)
    text = roofline.table({"before": traced}, DEVICE)
    assert "at most 2 tokens/s, MFU 25.0%**. If bytes took no time: 40.0%." in text
    assert f"Main limit: {roofline.ELEMENTS}, 38% of the time" in " ".join(text.split())


def test_every_device_has_a_bandwidth_of_its_kind():
    assert all(2e11 < device.bandwidth < 1e13 for device in DEVICES.values())
    assert DEVICES["NVIDIA H100 80GB HBM3"].bandwidth == 3.35e12


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--sp", "2", "--world", "2", "--dry_run"), "--sp 2"),
        (("--tp", "2", "--world", "2", "--dry_run"), "--tp 2"),
    ],
)
def test_what_is_not_traced_is_refused(flags: tuple[str, ...], says: str):
    with pytest.raises(ConfigError, match=says):
        plan_of("llama3_1_8b_zero3", *flags)


def test_documents_of_a_row_begin_with_it():
    batch = roofline.documents(3, 3000, 100)
    places = batch["position_ids"]
    assert places.shape == (3, 3000) and not places[:, 0].any()
    steps = places.diff(dim=1)
    assert set(steps[steps != 1].tolist()) <= set((-places[:, :-1][steps != 1]).tolist()), (
        "a step is one on, or back to zero"
    )
    assert (steps != 1).any(1).all() and torch.equal(
        places, roofline.documents(3, 3000, 100)["position_ids"]
    )


def test_the_cases_are_rows_of_the_gpu_bench():
    for case, name in zip(roofline.cases(), ("1b", "3b_4096", "8b_lora"), strict=True):
        run = bench_gpu.BY_NAME[name].measure.keywords["run"]  # type: ignore[attr-defined]
        assert (case.recipe, case.model) == (run.recipe, run.model)
        assert case.flags[:6] == tuple(
            bench_gpu.flags(
                dict(zip(("seq_len", "micro_batch", "global_batch"), run.shape, strict=True))
            )
        )
        assert list(case.flags[6:]) == list(run.flags)


def test_the_written_page_is_of_this_tool():
    text = (ROOT / "tools" / "bench" / "roofline.md").read_text()
    assert roofline.WORDS in text and all(f"## {case.title}\n" in text for case in roofline.cases())
    assert "not measured" in text and max(map(len, text.splitlines())) <= 120
