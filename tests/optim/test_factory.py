"""LAMB, Adafactor, Lion, Adagrad, Muon and AdEMAMix must match their papers, for any sharding of
the weights.

Ten steps must equal the steps of tests/support/papers.py, which does not shard.
"""

import dataclasses
import functools
import itertools
import os
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import papers
import parity
import pytest
import torch
from job import metrics, reproducible_values
from parity import STEPS, Case, accumulating, compare, compare_bf16, each, pinned, recipe_for
from recipekit.checkpoints.step_folder import open_step
from recipekit.optim import muon as muon_module
from recipekit.optim import param_spans
from recipekit.optim.adafactor import Adafactor, split_into_boxes
from recipekit.optim.adagrad import Adagrad
from recipekit.optim.lamb import Lamb
from recipekit.optim.lion import Lion
from recipekit.optim.muon import NewtonSchulz
from recipekit.optim.param_spans import ParamSpans, TensorSpan, find_param_spans
from recipekit.parallel.blueprint import (
    Layout,
    Tensor,
    flat_groups,
    optimizer_groups,
    tensors_on_rank,
)
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import Mesh
from recipekit.spec.recipe import Recipe
from reference import TEXT, Trained, train_plain
from shipped_jsons import strategy
from torch_engines import TORCH, exported, plain_in_bf16

slow = pytest.mark.slow


def lamb(groups: list[dict[str, Any]], recipe: Recipe) -> torch.optim.Optimizer:
    return papers.Lamb(groups, lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps)


def lion(groups: list[dict[str, Any]], recipe: Recipe) -> torch.optim.Optimizer:
    return papers.Lion(groups, lr=recipe.lr, betas=(recipe.beta1, recipe.beta2))


def adagrad(groups: list[dict[str, Any]], recipe: Recipe) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(groups, lr=recipe.lr, eps=recipe.eps)


def adafactor(groups: list[dict[str, Any]], recipe: Recipe) -> torch.optim.Optimizer:
    return papers.Adafactor(groups, lr=recipe.lr)


def muon(groups: list[dict[str, Any]], recipe: Recipe) -> torch.optim.Optimizer:
    return papers.Muon(
        groups,
        lr=recipe.lr,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
        momentum=0.95,
        adjust=True,
    )


def ademamix(groups: list[dict[str, Any]], recipe: Recipe) -> torch.optim.Optimizer:
    return papers.AdEMAMix(groups, lr=recipe.lr, eps=recipe.eps, **OPTIONS["AdEMAMix"])


PLAIN = {
    "Lamb": lamb,
    "Lion": lion,
    "Adagrad": adagrad,
    "Adafactor": adafactor,
    "Muon": muon,
    "AdEMAMix": ademamix,
}
NUMBERS: dict[str, dict[str, Any]] = {  # hyperparameters at which the loss falls
    "Lamb": {"lr": 1e-2},
    "Lion": {"lr": 1e-4},
    "Adagrad": {"lr": 1e-3},
    "Adafactor": {"lr": 1e-2},
    "Muon": {"lr": 1e-3},
    "AdEMAMix": {"lr": 3e-4},
}
# Options of the JSON.
OPTIONS: dict[str, dict[str, Any]] = {
    "Muon": {"ns_dtype": "fp32", "adjust_lr_fn": "match_rms_adamw"},
    # The warm-up ends within the ten steps.
    "AdEMAMix": {"betas": [0.9, 0.95, 0.99], "alpha": 5.0, "alpha_beta3_warmup_steps": 6},
}
# At a rate of 1e-2, LAMB amplifies bf16 rounding too much. The difference exceeds the noise from
# splitting a batch in four ways, even with equally precise master weights.
HALF = NUMBERS | {"Lamb": {"lr": 2e-3}}


def frozen(model: Any) -> Any:
    """Freeze the embedding and the first layer."""
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name or ".layers.0." in name:
            parameter.requires_grad_(False)
    return model


@functools.cache
def reference(
    optimizer: str, model: str, micro_batch: int = 1, bf16: bool = False, **changes: Any
) -> Trained:
    """Train on one process with the paper's optimizer."""
    os.environ.pop("WORLD_SIZE", None)
    recipe = dataclasses.replace(
        recipe_for(
            model,
            micro_batch=micro_batch,
            attention="sdpa",
            **(HALF if bf16 else NUMBERS)[optimizer] | changes,
        ),
        ds_config=strategy("zero0", bf16),
        out="/nonexistent",
    )
    plan = resolve_run(parse(recipe, Path("ours.py"), ["--tiny", *pinned(recipe)]))
    assert plan.model_config is not None
    return train_plain(
        plan.recipe,
        plan.model_config,
        STEPS,
        bf16,
        dataclasses.replace(TEXT, optimizer=PLAIN[optimizer]),
    )


def train_in_layout(recipe: Recipe, optimizer: str, file: str, bf16: bool, out: str) -> int:
    """Run the real loop on a rank of a pool.

    `file` is the name of a JSON, or of a PyTorch engine that uses the JSON's optimizer.
    """
    import sys

    from recipekit.train import main

    config = strategy({"zero3_small": "zero3"}.get(file, "zero0" if file in TORCH else file), bf16)
    if file == "zero3_small":
        config["zero_optimization"]["sub_group_size"] = 10_000
    config |= {"optimizer": {"type": optimizer, "params": OPTIONS.get(optimizer, {})}}
    engine = ["--engine", file, "--precision", "bf16" if bf16 else "fp32"] if file in TORCH else []
    recipe = dataclasses.replace(recipe, ds_config=config, out=out)
    command = parse(recipe, Path("ours.py"), ["--tiny", *pinned(recipe), *engine])
    sys.argv = ["ours.py"]
    return main(resolve_run(command))


def run(pools: Any, out: Path, optimizer: str, case: Case, bf16: bool = False) -> None:
    numbers = (HALF if bf16 else NUMBERS)[optimizer]
    recipe = recipe_for(
        case.model, **accumulating(case.world, **case.layout), **numbers | case.both
    )
    codes = pools.run(
        case.world,
        train_in_layout,
        recipe=recipe,
        optimizer=optimizer,
        file=case.file,
        bf16=bf16,
        out=str(out),
    )
    assert codes == [0] * case.world, codes


TP2, PP2 = {"tp": 2}, {"pp": 2}
# In this case, the boundary between two ranks splits a matrix. Without tied weights, it would be
# between two layers.
CUT = "zero1 dp2, tied"
CASES = [
    dataclasses.replace(case, slow=case.name not in (CUT, "zero3 tp2"))
    for case in (
        *(
            Case(f"zero{stage} dp{world}", world, f"zero{stage}")
            for stage in range(4)
            for world in (1, 2, 4)
        ),
        *(Case(f"zero{stage} tp2", 2, f"zero{stage}", TP2) for stage in range(4)),
        *(Case(f"zero{stage} tp2 dp2", 4, f"zero{stage}", TP2) for stage in range(4)),
        Case("zero1 pp2, tied", 2, "zero1", PP2, model="tied"),
        Case("zero0 pp2, tied", 2, "zero0", PP2, model="tied"),
        Case("zero0 pp2", 2, "zero0", PP2),
        Case("zero1 pp2 dp2", 4, "zero1", PP2),
        Case("zero1 pp2 tp2, tied", 4, "zero1", TP2 | PP2, model="tied"),
        Case("zero2 sp2", 2, "zero2", {"sp": 2}),
        Case(CUT, 2, "zero1", model="tied"),
        Case("zero3 dp2, gpt2", 2, "zero3", model="gpt2"),
        Case("zero1 tp2, qwen3", 2, "zero1", TP2, model="qwen3"),
        Case("zero2 dp4, frozen", 4, "zero2", numbers={"adapt": frozen}),
        Case("zero3 dp2, frozen", 2, "zero3", numbers={"adapt": frozen}),
        Case("zero3 dp2, small sub-groups", 2, "zero3_small"),
        Case("zero2 optimizer on the CPU", 2, "zero2_cpu"),
        Case("zero3 optimizer and parameters on the CPU", 2, "zero3_cpu"),
        Case("ddp dp2", 2, "ddp"),
        Case("fsdp2 dp2", 2, "fsdp2"),
        Case("fsdp2 dp4, tied", 4, "fsdp2", model="tied"),
    )
]


@each(CASES)
def test_lamb_is_the_papers_in_every_layout(pools: Any, tmp_path: Path, case: Case) -> None:
    run(pools, tmp_path / "run", "Lamb", case)
    compare(tmp_path / "run", reference("Lamb", case.model, **case.both))
    check_borders(tmp_path / "run", of_a_matrix=case.name == CUT)


@each(CASES)
def test_adafactor_is_the_papers_in_every_layout(pools: Any, tmp_path: Path, case: Case) -> None:
    run(pools, tmp_path / "run", "Adafactor", case)
    compare(tmp_path / "run", reference("Adafactor", case.model, **case.both))
    check_borders(tmp_path / "run", of_a_matrix=case.name == CUT)


@each(
    [dataclasses.replace(case, slow=case.name not in ("zero2 dp2", "zero3 tp2")) for case in CASES]
)
def test_muon_is_the_papers_in_every_layout(pools: Any, tmp_path: Path, case: Case) -> None:
    """Full matrices are orthogonalised, in fp32 in this test.

    AdamW trains embeddings (tied or untied), the head and all vectors.
    """
    run(pools, tmp_path / "run", "Muon", case)
    compare(tmp_path / "run", reference("Muon", case.model, **case.both))
    step = check_borders(tmp_path / "run")
    trained = {tensor.name: tensor for tensor in step.blueprint.tensors if tensor.group is not None}
    matrices = {
        name
        for name, tensor in trained.items()
        if step.blueprint.states_of(tensor, step.layout) == ("momentum_buffer",)
    }
    assert (
        matrices
        == {
            name
            for name, tensor in trained.items()
            if len(tensor.shape) == 2 and (".layers." in name or ".h." in name)
        }
        != set()
    )


def check_borders(out: Path, of_a_matrix: bool = False) -> Any:
    """Return the last step of a run.

    Check that a partition boundary splits a tensor, and that some ranks have no part of a tensor.
    """
    step = open_step(out)
    if step.layout.zero_stage in (1, 2) and step.layout.partitions > 1:
        made = optimizer_groups(tensors_on_rank(step.blueprint, step.layout, 0), step.layout, 0)
        holders = [
            (len(tensor.shape), len(pieces))
            for group, (_, _, extents) in zip(made, flat_groups(made, step.layout), strict=True)
            for (tensor, _), pieces in zip(group, extents, strict=True)
        ]
        assert any(ranks > 1 and (dims > 1 or not of_a_matrix) for dims, ranks in holders), (
            "no border of a partition cuts a tensor"
        )
        assert any(ranks < step.layout.partitions for _, ranks in holders), (
            "no tensor is on some ranks only"
        )
    return step


BF16 = [
    Case("zero0 dp2", 2, "zero0"),
    Case("zero1 dp2", 2, "zero1"),
    Case("zero2 dp2", 2, "zero2"),
    Case("zero3 dp2", 2, "zero3"),
    Case("zero1 tp2", 2, "zero1", TP2),
    Case("zero3 tp2", 2, "zero3", TP2),
    Case("zero1 pp2", 2, "zero1", PP2),
    Case("ddp", 2, "ddp"),
    Case("fsdp2", 2, "fsdp2"),
]


@slow
@pytest.mark.parametrize("optimizer", PLAIN)
@each(BF16)
def test_ours_are_the_papers_in_bf16(
    pools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case, optimizer: str
) -> None:
    """Every loss is within 3 x the noise of the reference.

    The noise is the largest difference between single-process runs that differ only in how they
    split the batch.
    """
    run(pools, tmp_path / "run", optimizer, case, bf16=True)
    plain = functools.partial(reference, optimizer)
    if case.file in TORCH:

        def plain(model, micro_batch, bf16):
            return plain_in_bf16(case.file, micro_batch, PLAIN[optimizer], **HALF[optimizer])

    monkeypatch.setattr(parity, "reference", plain)
    compare_bf16(tmp_path / "run", f"{optimizer} {case.name}")


ELEMENTWISE = [
    Case("zero2 dp2", 2, "zero2"),
    *(
        dataclasses.replace(case, slow=True)
        for case in (
            *(Case(f"zero{stage} dp2", 2, f"zero{stage}") for stage in (0, 1, 3)),
            Case("zero3 dp4", 4, "zero3"),
            Case("zero2 tp2", 2, "zero2", TP2),
            Case("zero1 pp2, tied", 2, "zero1", PP2, model="tied"),
            Case("zero1 ep2", 2, "zero1", {"ep": 2}, model="moe"),
            Case("ddp dp2", 2, "ddp"),
            Case("fsdp2 dp2", 2, "fsdp2"),
        )
    ),
]


@each(ELEMENTWISE)
def test_adagrad_is_torchs_in_every_layout(pools: Any, tmp_path: Path, case: Case) -> None:
    run(pools, tmp_path / "run", "Adagrad", case)
    compare(tmp_path / "run", reference("Adagrad", case.model))


@each(ELEMENTWISE)
def test_lion_is_the_papers_in_every_layout(pools: Any, tmp_path: Path, case: Case) -> None:
    """Only the signs of sums near zero can differ.

    At most one in 10,000 weights may differ, by at most 2 lr per step.
    """
    run(pools, tmp_path / "run", "Lion", case)
    expected = reference("Lion", case.model)
    compare(tmp_path / "run", expected, check_weights=False)
    found = exported(tmp_path / "run")
    assert found.keys() == expected.weights.keys()
    apart = torch.cat(
        [(found[name] - value).abs().flatten() for name, value in expected.weights.items()]
    )
    flipped = int((apart > 1e-5).sum())
    print(f"{case.name}: {flipped} of {apart.numel()} weights differ, by {apart.max():.1e}")
    assert flipped <= apart.numel() / 10_000
    assert apart.max() <= 2 * sum(expected.lrs) + 1e-5


@each(
    [
        dataclasses.replace(case, slow=case.name not in ("zero2 dp2", "zero2 tp2"))
        for case in (*ELEMENTWISE, Case("zero2 optimizer on the CPU", 2, "zero2_cpu"))
    ]
)
def test_ademamix_is_the_papers_in_every_layout(pools: Any, tmp_path: Path, case: Case) -> None:
    run(pools, tmp_path / "run", "AdEMAMix", case)
    expected, found = reference("AdEMAMix", case.model), exported(tmp_path / "run")
    losses = [line["loss"] for line in metrics(tmp_path / "run")]
    loss = max(abs(a / b - 1) for a, b in zip(losses, expected.losses, strict=True))
    weight = max(
        float((found[name] - value).abs().max()) for name, value in expected.weights.items()
    )
    print(f"{case.name}: losses differ by {loss:.1e} (relative), weights by {weight:.1e}")
    compare(tmp_path / "run", expected)


WAYS = [(("zero3", 4), ("fsdp2", 2), ("zero1", 2)), (("ddp", 2), ("zero2", 4), ("fsdp2", 2))]


@slow
@pytest.mark.parametrize("optimizer", ["Lamb", "Adagrad", "Adafactor", "Muon", "AdEMAMix"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_run_goes_on_under_another_engine(
    pools: Any, tmp_path: Path, way: Any, optimizer: str
) -> None:
    for (file, world), stop_at in zip(way, (4, 7, 0), strict=True):
        run(pools, tmp_path / "run", optimizer, Case("", world, file, {"stop_at": stop_at}))
    compare(tmp_path / "run", reference(optimizer, "untied"))


@slow
@pytest.mark.parametrize("optimizer", PLAIN)
@pytest.mark.parametrize("file", TORCH)
def test_a_resumed_run_of_torch_is_the_unbroken_run_bit_for_bit(
    pools: Any, tmp_path: Path, file: str, optimizer: str
) -> None:
    for name, stops in (("unbroken", (0,)), ("stopped", (4, 0))):
        for stop_at in stops:
            run(pools, tmp_path / name, optimizer, Case("", 2, file, {"stop_at": stop_at}))
    assert reproducible_values(metrics(tmp_path / "stopped")) == reproducible_values(
        metrics(tmp_path / "unbroken")
    )
    weights = [exported(tmp_path / name) for name in ("stopped", "unbroken")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


# Tests without ranks
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias_correction", [True, False])
def test_a_trust_ratio_is_one_where_a_norm_is_zero(bias_correction: bool) -> None:
    """The trust ratio is 1 for weights that start at zero, and for a tensor whose update is zero.

    Weight decay is added before the norm is computed.
    """
    generator = torch.Generator().manual_seed(0)
    start = [
        torch.zeros(7, 5),
        torch.randn(7, 5, generator=generator),
        torch.randn(5, generator=generator),
    ]
    gradients = [
        [
            torch.randn(7, 5, generator=generator),
            torch.randn(7, 5, generator=generator),
            torch.zeros(5),
        ]
        for _ in range(3)
    ]
    found = []
    for kind in (Lamb, papers.Lamb):
        weights = [torch.nn.Parameter(value.clone()) for value in start]
        groups = [
            {"params": weights[:2], "weight_decay": 0.1},
            {"params": weights[2:], "weight_decay": 0.0},
        ]
        optimizer = kind(
            groups, lr=0.1, betas=(0.9, 0.999), eps=1e-6, bias_correction=bias_correction
        )
        for step in gradients:
            for value, gradient in zip(weights, step, strict=True):
                value.grad = gradient.clone()
            optimizer.step()
        found.append(weights)
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[0][2], start[2]) and found[0][0].abs().max() > 0


def test_lion_decays_as_the_paper_does() -> None:
    """The numbers are large enough to show the effect. One of the two groups has weight decay."""
    generator = torch.Generator().manual_seed(0)
    start, found = [torch.randn(7, 5, generator=generator), torch.randn(5, generator=generator)], []
    gradients = [
        [torch.randn(value.shape, generator=generator) for value in start] for _ in range(3)
    ]
    for kind in (Lion, papers.Lion):
        weights = [torch.nn.Parameter(value.clone()) for value in start]
        optimizer = kind(
            [
                {"params": weights[:1], "weight_decay": 0.5},
                {"params": weights[1:], "weight_decay": 0.0},
            ],
            lr=0.1,
            betas=(0.9, 0.99),
        )
        for step in gradients:
            for value, gradient in zip(weights, step, strict=True):
                value.grad = gradient.clone()
            optimizer.step()
        found.append(weights)
    assert all(
        torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
        for ours, theirs in zip(*found, strict=True)
    )


@pytest.mark.parametrize(
    "numbers",
    [{}, {"eps": (1e-3, 1e-2), "d": 1.5, "beta2_decay": -0.5}, {"maximize": True}],
    ids=str,
)
def test_adafactor_is_torchs_and_the_papers(numbers: dict[str, Any]) -> None:
    """The parameters are matrices, vectors, a convolution and a scalar, in several groups.

    Some updates are clipped.
    """
    generator = torch.Generator().manual_seed(0)
    start = [
        0.1 * torch.randn(shape, generator=generator)
        for shape in ((7, 5), (1, 6), (3, 4, 3, 2), (5,), ())
    ]
    gradients = [
        [size * torch.randn(value.shape, generator=generator) for value in start]
        for size in (1e-2, 1.0, 1e-2, 1e-9)
    ]
    found = []
    for kind in (
        Adafactor,
        torch.optim.Adafactor,
        *(() if "maximize" in numbers else (papers.Adafactor,)),
    ):
        weights = [torch.nn.Parameter(value.clone()) for value in start]
        optimizer = kind(
            [
                {"params": weights[:3], "weight_decay": 0.1},
                {"params": weights[3:], "weight_decay": 0.0},
            ],
            lr=0.1,
            **numbers,
        )
        for step in gradients:
            for value, gradient in zip(weights, step, strict=True):
                value.grad = gradient.clone()
            optimizer.step()
        found.append(weights)
    for theirs in found[1:]:
        assert all(
            torch.allclose(ours, value, rtol=1e-6, atol=1e-7)
            for ours, value in zip(found[0], theirs, strict=True)
        )


def test_adafactor_keeps_a_flat_parameter_tensor_by_tensor() -> None:
    """The flat tensor contains vectors, matrices, a convolution and padding, as in a ZeRO group of
    one rank.

    Adafactor keeps exactly the states that these tensors need.
    """
    generator = torch.Generator().manual_seed(0)
    start = [
        torch.randn(shape, generator=generator)
        for shape in ((5,), (7, 5), (3, 4, 3, 2), (2,), (4, 6))
    ]
    gradients = [
        [torch.randn(value.shape, generator=generator) for value in start] for _ in range(3)
    ]
    weights = [torch.nn.Parameter(value.clone()) for value in start]
    flat, parts, at = (
        torch.nn.Parameter(torch.cat([*(value.flatten() for value in start), torch.zeros(3)])),
        [],
        0,
    )
    for value in start:
        parts.append(TensorSpan(at, at + value.numel(), tuple(value.shape)))
        at += value.numel()
    ours, theirs = (
        Adafactor([flat], lr=0.1, weight_decay=0.1),
        torch.optim.Adafactor(weights, lr=0.1, weight_decay=0.1),
    )
    ours.borders = ParamSpans({flat: parts})
    for step in gradients:
        flat.grad = torch.cat([*(gradient.flatten() for gradient in step), torch.ones(3)])
        for value, gradient in zip(weights, step, strict=True):
            value.grad = gradient
        ours.step()
        theirs.step()
    assert torch.allclose(
        flat,
        torch.cat([*(value.flatten() for value in weights), torch.zeros(3)]),
        rtol=1e-6,
        atol=1e-7,
    )
    rows, columns = 7 + 3 * 4 * 3 + 4, 5 + 3 * 4 * 2 + 6
    assert {name: value.numel() for name, value in ours.state[flat].items()} == {
        "step": 1,
        "row_var": rows,
        "col_var": columns,
        "variance": 7,
    }


@pytest.mark.parametrize("shape", [(11,), (4, 6), (3, 4, 5), (1, 7, 3), (2, 1, 4)], ids=str)
def test_boxes_make_any_part_of_a_tensor(shape: tuple[int, ...]) -> None:
    """The boxes cover every range of elements in order, for any box size.

    The elements of a partial row are in separate boxes.
    """
    elements = torch.arange(prod(shape)).view(shape)
    for start, stop, most in itertools.product(
        range(prod(shape) + 1), range(prod(shape) + 1), (1, 3, 7, 1000)
    ):
        found = (
            [elements[box].flatten() for box in split_into_boxes(shape, start, stop, most)]
            if start <= stop
            else []
        )
        assert all(1 <= len(piece) <= most for piece in found)
        assert torch.cat([elements.new_empty(0), *found]).tolist() == list(range(start, stop))


@pytest.mark.parametrize("foreach", [None, False, True])
def test_adagrad_takes_torchs_options(foreach: bool | None) -> None:
    """The results must be the same bit for bit, with several groups."""
    generator = torch.Generator().manual_seed(0)
    start, found = [torch.randn(7, 5, generator=generator), torch.randn(5, generator=generator)], []
    gradients = [
        [torch.randn(value.shape, generator=generator) for value in start] for _ in range(3)
    ]
    numbers: dict[str, Any] = {
        "lr": 0.1,
        "lr_decay": 0.1,
        "initial_accumulator_value": 0.5,
        "eps": 1e-6,
        "maximize": True,
        "foreach": foreach,
    }
    for kind in (Adagrad, torch.optim.Adagrad):
        weights = [torch.nn.Parameter(value.clone()) for value in start]
        optimizer = kind(
            [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:]}], **numbers
        )
        for step in gradients:
            for value, gradient in zip(weights, step, strict=True):
                value.grad = gradient.clone()
            optimizer.step()
        found.append(weights)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6), (24, 2)])
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs(shape: tuple[int, int], adjust: Any, nesterov: bool) -> None:
    """Muon equals torch's Muon on one process with weight decay, in bf16 as in torch's iteration.

    In fp32, Muon equals papers.Muon.
    """
    generator = torch.Generator().manual_seed(0)
    start, gradients = (
        torch.randn(shape, generator=generator),
        [torch.randn(shape, generator=generator) for _ in range(3)],
    )
    numbers: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}

    def moved(optimizer: Any, weights: torch.nn.Parameter) -> torch.Tensor:
        for gradient in gradients:
            weights.grad = gradient.clone()
            optimizer.step()
        return weights.detach()

    def of(kind: Any, **more: Any) -> torch.Tensor:
        weights = torch.nn.Parameter(start.clone())
        return moved(
            kind(
                [
                    (
                        {"params": [weights]}
                        if kind is torch.optim.Muon
                        else {"params": [weights], "matrix": True}
                    )
                ],
                **numbers | more,
            ),
            weights,
        )

    theirs = of(torch.optim.Muon, nesterov=nesterov, adjust_lr_fn=adjust)
    assert torch.equal(of(NewtonSchulz, nesterov=nesterov, adjust_lr_fn=adjust), theirs)
    if nesterov:
        exact = of(NewtonSchulz, adjust_lr_fn=adjust, ns_dtype="fp32")
        assert torch.allclose(
            exact, of(papers.Muon, adjust=adjust == "match_rms_adamw"), rtol=1e-5, atol=1e-6
        )
        assert not torch.equal(exact, theirs)


def test_what_is_no_matrix_moves_as_torchs_adamw() -> None:
    generator = torch.Generator().manual_seed(0)
    start, found = [torch.randn(7, 5, generator=generator), torch.randn(5, generator=generator)], []
    gradients = [
        [torch.randn(value.shape, generator=generator) for value in start] for _ in range(3)
    ]
    for kind in (NewtonSchulz, torch.optim.AdamW):
        weights = [torch.nn.Parameter(value.clone()) for value in start]
        optimizer = kind(
            [{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0}],
            lr=0.1,
            betas=(0.9, 0.95),
            eps=1e-6,
            weight_decay=0.1,
        )
        for step in gradients:
            for value, gradient in zip(weights, step, strict=True):
                value.grad = gradient.clone()
            optimizer.step()
        found.append(weights)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("cut", [(0, 1), (1, 1), (0, 2)])
def test_parts_of_a_matrix_make_it_whole(cut: tuple[int, int]) -> None:
    """The boundaries between three data-parallel and two tensor-parallel ranks are within rows."""
    tensor, whole = Tensor("w", (8, 6), 0, cut=cut), torch.arange(48.0).view(8, 6)
    layout, added = (
        Layout(Mesh(dp=3, tp=2), 2, "DeepSpeedZeroOptimizer", "float32"),
        torch.zeros(8, 6),
    )
    for tp_rank in range(2):
        for rank in range(3):
            [[part]] = param_spans._spans_per_parameter(
                optimizer_groups([tensor], layout, tp_rank), layout, rank, tp_rank
            )
            own = part.read_from(whole)
            assert len(own) == part.stop - part.start == 8
            mine = torch.zeros(8, 6)
            part.write_into(own, mine)
            added += mine
    assert torch.equal(added, whole)


def test_few_matrices_are_whole_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon_module, "MUON_GATHER_NUMEL", 100)
    nothing = torch.empty(0)
    pieces = [
        muon_module.MatrixShard(
            param_spans.TensorSpan(0, 0, shape=shape), nothing, nothing, nothing
        )
        for shape in ((5, 10), (5, 10), (20, 10), (1, 1))
    ]
    assert [
        [piece.span.shape for piece in some] for some in muon_module._gather_batches(pieces)
    ] == [
        [(5, 10), (5, 10)],
        [(20, 10)],
        [(1, 1)],
    ]


def test_tensor_ranks_that_end_sub_groups_elsewhere_are_refused() -> None:
    """Two ranks have three rows.

    The first rank's two rows fill a sub-group, but the second rank's row does not.
    """
    tensors = [Tensor(f"w{number}", (3, 4), 0, cut=(0, 1)) for number in range(3)]
    layout = Layout(Mesh(tp=2), 3, "DeepSpeedZeroOptimizer_Stage3", "float32", sub_group_size=8)
    groups: Any = SimpleNamespace(coords={"tp": 0, "dp": 0, "sp": 0, "pp": 0})
    with pytest.raises(
        ConfigError, match="sub_group_size = 8: ends sub-groups at different tensors"
    ):
        find_param_spans(tensors, layout, groups, None, torch.device("cpu"))


def test_an_engine_of_torch_takes_the_jsons_optimizer_if_it_is_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for kind, expected, said in (
        ("Lamb", "Lamb", "is not used, except its optimizer Lamb"),
        ("SGD", "AdamW", "is not used"),
    ):
        recipe = recipe_for("untied", **accumulating(2))
        recipe = dataclasses.replace(
            recipe, ds_config=strategy("zero2") | {"optimizer": {"type": kind, "params": {}}}
        )
        plan = resolve_run(
            parse(recipe, Path("ours.py"), ["--tiny", *pinned(recipe), "--engine", "fsdp2"])
        )
        assert plan.ds_config["optimizer"]["type"] == expected and any(
            note.endswith(said) for note in plan.notes
        )
