"""A module that some ranks do not use is named in the first step, on every rank, before a sum of gradients or a gather of weights hangs on it."""

import time
from dataclasses import dataclass, field, replace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import set_z3_leaf_module
from recipekit.mesh import Mesh
from recipekit.model.empty import leaf_modules
from recipekit.refusal import Refusal
from recipekit.run_folder import read_metrics
from recipekit.runtime.used import compared
from test_model import ds_config
from test_parity import accumulating, recipe_for, strategy, train_in_layout

MLP, LAYER = "layers.1.mlp", "layers.1"
WITHIN = 30.0  # seconds from the start of the run, so that the model and its engine are made in them, too


def make_absent(module: Any) -> None:
    """Makes the model go on without a module of it, whose own call is never reached."""
    module.__class__ = type("Absent", (type(module),), {"__call__": lambda self, hidden, *args, **named: hidden * 0})


def train_without(tower: str, without: list[int], recipe: Any, config: dict[str, Any], out: str) -> tuple[int, str, float]:
    """Runs on every rank: the real loop, in which the ranks of the data-parallel coordinates `without` do not run the `tower`.

    Returns (exit code, the refusal, seconds).
    """
    from recipekit import train

    load = train.load_model

    def load_and_skip(*given: Any) -> Any:
        loaded = load(*given)
        coords = loaded.plan.mesh.coords(dist.get_rank())
        if coords["dp"] * loaded.plan.mesh.sp + coords["sp"] in without:
            for name, module in loaded.engine.module.named_modules():
                if name.endswith(tower):
                    make_absent(module)
        return loaded

    began, train.load_model = time.monotonic(), load_and_skip
    try:
        return train_in_layout(recipe, config, out), "", time.monotonic() - began
    except Refusal as refusal:
        return refusal.exit_code, str(refusal), time.monotonic() - began
    finally:
        train.load_model = load


@dataclass(frozen=True)
class Layout:
    """A layout of the run, with (ranks that use the module, ranks that do not) of each group that sums its gradients."""

    name: str
    world: int
    file: str
    fields: dict[str, Any] = field(default_factory=dict)
    pairs: tuple[tuple[int, int], ...] = ((0, 1),)
    slow: bool = True


def each(*layouts: Layout) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("layout", [pytest.param(layout, id=layout.name, marks=pytest.mark.slow if layout.slow else ()) for layout in layouts])


def run(pools: Any, layout: Layout, out: Any, tower: str, without: list[int], model: str = "untied") -> list[tuple[int, str, float]]:
    engine = {"engine": layout.file, "precision": "fp32"} if layout.file in ("ddp", "fsdp2") else {}
    recipe = replace(recipe_for(model, **accumulating(layout.world, **layout.fields), **engine), stop_at=2, eval_every=0)
    config = {} if engine else strategy(layout.file)
    return pools.run(layout.world, train_without, tower=tower, without=without, recipe=recipe, config=config, out=str(out))


LAYOUTS = (
    Layout("zero0 dp2", 2, "zero0"),
    Layout("zero1 dp2", 2, "zero1"),
    Layout("zero2 dp2", 2, "zero2", slow=False),
    Layout("zero3 dp2", 2, "zero3", slow=False),
    Layout("zero1 pp2 dp2", 4, "zero1", {"pp": 2}, slow=False),
    Layout("zero1 pp2 dp2, there and back", 4, "zero1", {"pp": 2, "pipeline_schedule": "dualpipev"}, pairs=((2, 3),)),
    Layout("ddp dp2", 2, "ddp"),
    Layout("fsdp2 dp2", 2, "fsdp2"),
    Layout("zero1 sp2", 2, "zero1", {"sp": 2}),
    Layout("zero1 tp2 dp2", 4, "zero1", {"tp": 2}, pairs=((0, 2), (1, 3))),
)


@each(*LAYOUTS)
def test_a_module_that_one_rank_does_not_use_is_named_on_every_rank_and_one_that_none_uses_trains(pools, tmp_path, layout):
    results = run(pools, layout, tmp_path / "none", MLP, [0, 1])
    assert [(code, text) for code, text, _ in results] == [(0, "")] * layout.world
    assert [line["step"] for line in read_metrics(tmp_path / "none")] == [1, 2]
    texts = {tower: refused(pools, layout, tmp_path / tower, tower) for tower in ((MLP, LAYER) if layout.file == "fsdp2" else (MLP,))}
    met = texts.get(LAYER, texts[MLP] if layout.file == "zero3" or "sp" in layout.fields else "")  # these wait for each other in the forward pass
    for tower, text in texts.items():
        named = text.partition(" in micro-batch 1 of step 1: ")[0]
        assert f"model.{tower}." in named and "model.layers.2" not in named and ("self_attn" in named) == (tower == LAYER)
        if text is not met:
            assert text.count("a gradient on") == len(layout.pairs)
            assert all(f"a gradient on rank {with_it}, none on rank {without}, which have to sum it" in text for with_it, without in layout.pairs)
    assert not met or "where they go on, rank 0 with model.layers.1" in met
    assert not met or ", rank 1 with model.layers.2" in met


def refused(pools: Any, layout: Layout, out: Any, tower: str) -> str:
    """Returns the refusal, the same on every rank, of a run in which one rank goes on without a module."""
    results = run(pools, layout, out, tower, [1])
    text = results[0][1]
    print(f"{max(seconds for _, _, seconds in results):.1f} s: {text}")
    assert [(code, told) for code, told, _ in results] == [(1, text)] * layout.world
    assert max(seconds for _, _, seconds in results) < WITHIN
    assert "let each micro-batch of each rank run every trained module" in text
    return text


class Experts(torch.nn.Module):
    """Two experts, each a module of its own, and what chooses between them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(4, 2)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])

    def forward(self, hidden: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.experts[chosen](hidden) * self.gate(hidden).softmax(-1)[:, chosen, None]


def train_with_an_expert_of_its_own(stage: int) -> list[float] | str:
    """Returns the losses of two steps (under ZeRO-3 of the backward pass of one) in which rank 0's tokens go to the first expert and rank 1's to the second, or the refusal."""
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("block", Experts())
    model.forward = model.block.forward
    (block,) = leaf_modules(model)
    set_z3_leaf_module(block, True)
    engine: Any = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=ds_config(stage, 2), dist_init_required=False)[0]
    losses, rank = [], dist.get_rank()
    try:
        for step in (1, 2):
            with compared(engine, Mesh(dp=2), step, on=step == 1):
                loss = engine(torch.ones(2, 4) * (rank + 1), rank).square().mean()
                engine.backward(loss)
            losses.append(loss.item())
            if stage == 3:  # DeepSpeed 0.19.8 records a stream for the gradients of unused experts, which a CPU has none of (stage3.py, zero_grad)
                break
            engine.step()
    except Refusal as refusal:
        return str(refusal)
    return losses


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_an_expert_without_tokens_is_named_where_deepspeed_needs_its_gradient(pools, stage):
    """ZeRO-3 gathers and sums the block as one, ZeRO-0 takes zeros for what is missing."""
    results = pools.run(2, train_with_an_expert_of_its_own, timeout=60, stage=stage)
    if stage in (1, 2):
        for expert, (mine, other) in enumerate(((0, 1), (1, 0))):
            names = f"block.experts.{expert}.bias, block.experts.{expert}.weight in micro-batch 1 of step 1"
            assert all(f"{names}: a gradient on rank {mine}, none on rank {other}" in text for text in results), results
    else:
        assert all(isinstance(losses, list) and (stage == 3 or losses[1] < losses[0]) for losses in results), results
