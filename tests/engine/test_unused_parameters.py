"""Modules that some ranks do not use, or use in a different order.

In the first step, the error must name the module on every rank, before gradients are summed.
"""

import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import set_z3_leaf_module
from parity import accumulating, recipe_for, train_in_layout
from recipekit.engine import unused_parameters
from recipekit.engine.unused_parameters import compare_parameters, reached_leaves
from recipekit.kernels.compiled import CompilerCounts
from recipekit.model.empty import leaf_modules
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import Mesh
from recipekit.spec.run_folder import read_metrics
from shipped_jsons import strategy
from tiny_models import ds_config

MLP, LAYER = "layers.1.mlp", "layers.1"
# Seconds from the start of the run, which include building the model and its engine.
WITHIN = 60.0


def make_absent(module: Any) -> None:
    """Make the model skip a module, so that the module is never called."""
    module.__class__ = type(
        "Absent", (type(module),), {"__call__": lambda self, hidden, *args, **named: hidden * 0}
    )


def make_blank(module: Any, cut: bool) -> None:
    """Make the model skip a module, but add 0 x the module's output for a blank input at the same
    place.

    With `cut` the blank input has no gradient.
    """
    plain = type(module)

    def blank(self, hidden, *args, **named):
        return (
            hidden * 0
            + 0.0
            * plain.__call__(
                self, torch.zeros_like(hidden) if cut else hidden * 0, *args, **named
            ).sum()
        )

    module.__class__ = type("Blank", (plain,), {"__call__": blank})


def make_late(module: Any, norm: Any) -> None:
    """Make the model skip a module, and add 0 x the module's output after a later module."""
    plain, later, given = type(module), type(norm), {}

    def leave_out(self: Any, hidden: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        given["now"] = args, named
        return hidden * 0

    def call(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        args, named = given["now"]
        return (
            later.__call__(self, hidden)
            + 0.0 * plain.__call__(module, torch.zeros_like(hidden), *args, **named).sum()
        )

    module.__class__ = type("Absent", (plain,), {"__call__": leave_out})
    norm.__class__ = type("Late", (later,), {"__call__": call})


def train_without(
    tower: str,
    without: list[int],
    recipe: Any,
    config: dict[str, Any],
    out: str,
    how: str = "absent",
) -> tuple[int, str, float]:
    """Run the real loop on a rank; the data-parallel ranks in `without` do not use the `tower`
    module.

    Return (exit code, config error, seconds). `how` is one of:

    - "absent": the tower is skipped.
    - "blank": the tower runs on a blank input at its usual place.
    - "cut": like "blank", but the input has no gradient.
    - "late": the tower runs at the end.
    """
    from recipekit import train

    load = train.load_model

    def load_and_skip(*given: Any) -> Any:
        loaded = load(*given)
        coords = loaded.plan.mesh.coords(dist.get_rank())
        if coords["dp"] * loaded.plan.mesh.sp + coords["sp"] in without:
            modules = dict(loaded.engine.module.named_modules())
            for name, module in modules.items():
                if name.endswith(tower) and how == "late":
                    make_late(module, modules[name.partition("layers.")[0] + "norm"])
                elif name.endswith(tower):
                    make_absent(module) if how == "absent" else make_blank(module, how == "cut")
        return loaded

    began, train.load_model = time.monotonic(), load_and_skip
    try:
        return train_in_layout(recipe, config, out), "", time.monotonic() - began
    except ConfigError as error:
        return error.exit_code, str(error), time.monotonic() - began
    finally:
        train.load_model = load


@dataclass(frozen=True)
class Layout:
    """A layout of the run.

    `pairs` contains (rank that uses the module, rank that does not) for each group that sums its
    gradients.
    """

    name: str
    world: int
    file: str
    fields: dict[str, Any] = field(default_factory=dict)
    pairs: tuple[tuple[int, int], ...] = ((0, 1),)
    slow: bool = True


def each(*layouts: Layout) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "layout",
        [
            pytest.param(layout, id=layout.name, marks=pytest.mark.slow if layout.slow else ())
            for layout in layouts
        ],
    )


def run(
    pools: Any,
    layout: Layout,
    out: Any,
    tower: str,
    without: list[int],
    model: str = "untied",
    how: str = "absent",
) -> list[tuple[int, str, float]]:
    engine = {"engine": layout.file, "precision": "fp32"} if layout.file in ("ddp", "fsdp2") else {}
    recipe = replace(
        recipe_for(model, **accumulating(layout.world, **layout.fields), **engine),
        stop_at=2,
        eval_every=0,
    )
    config = {} if engine else strategy(layout.file)
    return pools.run(
        layout.world,
        train_without,
        tower=tower,
        without=without,
        recipe=recipe,
        config=config,
        out=str(out),
        how=how,
    )


LAYOUTS = (
    Layout("zero0 dp2", 2, "zero0"),
    Layout("zero1 dp2", 2, "zero1"),
    Layout("zero2 dp2", 2, "zero2", slow=False),
    Layout("zero3 dp2", 2, "zero3", slow=False),
    Layout("zero1 pp2 dp2", 4, "zero1", {"pp": 2}, slow=False),
    Layout(
        "zero1 pp2 dp2, there and back",
        4,
        "zero1",
        {"pp": 2, "pipeline_schedule": "dualpipev"},
        pairs=((2, 3),),
    ),
    Layout("ddp dp2", 2, "ddp"),
    Layout("fsdp2 dp2", 2, "fsdp2"),
    Layout("zero1 sp2", 2, "zero1", {"sp": 2}),
    Layout("zero1 tp2 dp2", 4, "zero1", {"tp": 2}, pairs=((0, 2), (1, 3))),
)


@each(*LAYOUTS)
def test_a_module_that_one_rank_does_not_use_is_named_on_every_rank_and_one_that_none_uses_trains(
    pools, tmp_path, layout
):
    results = run(pools, layout, tmp_path / "none", MLP, [0, 1])
    assert [(code, text) for code, text, _ in results] == [(0, "")] * layout.world
    assert [line["step"] for line in read_metrics(tmp_path / "none")] == [1, 2]
    texts = {
        tower: refused(pools, layout, tmp_path / tower, tower)
        for tower in ((MLP, LAYER) if layout.file == "fsdp2" else (MLP,))
    }
    # These ranks wait for each other in the forward pass.
    met = texts.get(LAYER, texts[MLP] if layout.file == "zero3" or "sp" in layout.fields else "")
    for tower, text in texts.items():
        named = text.partition(" in micro-batch 1 of step 1: ")[0]
        assert (
            f"model.{tower}." in named
            and "model.layers.2" not in named
            and ("self_attn" in named) == (tower == LAYER)
        )
        if text is not met:
            assert text.count("a gradient on") == len(layout.pairs)
            assert all(
                f"a gradient on rank {with_it}, none on rank {without}, which have to sum it"
                in text
                for with_it, without in layout.pairs
            )
    assert not met or "where they go on, rank 0 with model.layers.1" in met
    assert not met or ", rank 1 with model.layers.2" in met


def refused(pools: Any, layout: Layout, out: Any, tower: str) -> str:
    """Return the config error of a run in which one rank skips a module.

    The error must be the same on every rank.
    """
    results = run(pools, layout, out, tower, [1])
    text = results[0][1]
    print(f"{max(seconds for _, _, seconds in results):.1f} s: {text}")
    assert [(code, told) for code, told, _ in results] == [(1, text)] * layout.world
    assert max(seconds for _, _, seconds in results) < WITHIN
    assert "Let each micro-batch of each rank run every trained module" in text
    return text


@each(*(replace(layout, slow=layout.file != "zero2") for layout in LAYOUTS if layout.world == 2))
def test_a_module_that_one_rank_brings_in_last_is_refused_everywhere_and_in_its_place_it_trains(
    pools, tmp_path, layout
):
    """Both ranks have the same parameters and gradients, and only their order differs."""
    tower = LAYER if layout.file == "fsdp2" else MLP  # it shards complete layers
    assert [
        (code, text)
        for code, text, _ in run(pools, layout, tmp_path / "blank", tower, [1], how="blank")
    ] == [(0, "")] * 2
    results = run(pools, layout, tmp_path / "late", tower, [1], how="late")
    if layout.file == "zero0":  # gradients are summed in the model's order
        assert [(code, text) for code, text, _ in results] == [(0, "")] * 2
        return
    text = results[0][1]
    assert [(code, told) for code, told, _ in results] == [(1, text)] * 2 and max(
        seconds for _, _, seconds in results
    ) < WITHIN
    assert (
        f"model.{tower}." in text.partition(" in micro-batch 1 of step 1: ")[0]
        and "where that output would have been used, never at the end" in text
    )
    # These ranks meet before each module.
    if layout.file not in ("zero3", "fsdp2") and "sp" not in layout.fields:
        assert (
            "the backward pass computes this gradient after model." in text
            and "on rank 0 and after lm_head.weight on rank 1" in text
        )


@pytest.mark.slow
def test_a_blank_input_without_a_gradient_is_refused_under_fsdp2(pools, tmp_path):
    """Ranks that sum a layer's gradients at different times must be rejected.

    A rank without a gradient for the layer's input would sum the gradients at the end of the
    backward pass. The other rank would sum them in the usual order.
    """
    layout = Layout("fsdp2 dp2", 2, "fsdp2")
    results = run(pools, layout, tmp_path / "cut", LAYER, [1], how="cut")
    text = results[0][1]
    assert [(code, told) for code, told, _ in results] == [(1, text)] * 2
    assert text.startswith(
        f"the input of model.{LAYER} in micro-batch 1 of step 1: a gradient on rank 0, none on rank"
        " 1, which have to sum it"
    ), text


class Towers(torch.nn.Module):
    """Three layers; a rank may use the second layer in other ways that give the same gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(8, 8) for _ in "abc")

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        if how == "used":
            return self.c(self.a(x) + self.b(x))
        if how == "in place":
            return self.c(self.a(x) + 0.0 * self.b(torch.zeros_like(x)))
        if how == "at the end":
            return self.c(self.a(x)) + 0.0 * self.b(x).sum()
        if how == "the other way round":
            second = self.b(x)
            return self.c(self.a(x) + second)
        assert how == "bias alone at the end"
        return (
            self.c(self.a(x) + torch.nn.functional.linear(x, self.b.weight))
            + 0.0 * self.b.bias.sum()
        )


def towers() -> Towers:
    torch.manual_seed(0)
    return Towers()


def rows_of(rank: int, number: int) -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * number + rank))


def train_towers(
    stage: int, hows: list[str], overlap: bool = False, axis: str = "dp"
) -> list[float] | str:
    """Return the losses of two steps, or the config error.

    `hows` says how rank 1 uses the model, with one word for each micro-batch.
    """
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": len(hows),
        "steps_per_print": 10**9,
    }
    config["zero_optimization"] = {"stage": stage} | ({"overlap_comm": True} if overlap else {})
    config |= {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    engine: Any = deepspeed.initialize(
        model=(model := towers()),
        model_parameters=list(model.parameters()),
        config=config,
        dist_init_required=False,
    )[0]
    losses, rank = [], dist.get_rank()
    try:
        for step in range(2):
            with compare_parameters(engine, Mesh(**{axis: 2}), step + 1, on=step == 0):
                for number, how in enumerate(hows):
                    loss = (
                        engine(rows_of(rank, step * len(hows) + number), how if rank else "used")
                        .square()
                        .mean()
                    )
                    engine.backward(loss)
                    engine.step()
                    losses.append(loss.item())
    except ConfigError as error:
        return str(error)
    return losses


def plain_towers(hows: list[str]) -> list[list[float]]:
    """Return the losses of both ranks, computed with plain PyTorch."""
    model, losses = towers(), [[], []]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for number, how in enumerate(hows):
            for rank in range(2):
                loss = (
                    model(rows_of(rank, step * len(hows) + number), how if rank else "used")
                    .square()
                    .mean()
                )
                (loss / 2 / len(hows)).backward()
                losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


OTHER_ORDERS = {
    "at the end": (
        ["at the end"],
        "c.bias, c.weight in micro-batch 1|b.bias, b.weight in micro-batch 1",
    ),
    "the other way round": (
        ["the other way round"],
        "a.bias, a.weight in micro-batch 1|b.bias, b.weight in micro-batch 1",
    ),
    "the last micro-batch": (
        ["in place", "the other way round"],
        "a.bias, a.weight in micro-batch 2|b.bias, b.weight in micro-batch 2",
    ),
    "bias alone at the end": (["bias alone at the end"], "b.bias in micro-batch 1"),
}


ALONE = "bias alone at the end"  # under ZeRO-3 this way would read a weight outside its module


def test_ranks_that_only_share_sequences_are_compared(pools):
    """Sequence-parallel ranks sum gradients like data-parallel ranks."""
    results = pools.run(2, train_towers, timeout=60, stage=1, hows=[ALONE], axis="sp")
    assert (
        isinstance(results[0], str)
        and results[0] == results[1]
        and "b.bias in micro-batch 1 of step 1: not every rank runs it here" in results[0]
    ), results


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        (ALONE, 1),
        (ALONE, 2),
        *(
            pytest.param(name, stage, marks=pytest.mark.slow)
            for name in OTHER_ORDERS
            if name != ALONE
            for stage in (1, 2, 3)
        ),
    ],
)
def test_the_same_gradients_in_another_order_are_refused(pools, name, stage):
    hows, named = OTHER_ORDERS[name]
    results = pools.run(2, train_towers, timeout=60, stage=stage, hows=hows)
    assert isinstance(results[0], str) and results[0] == results[1], results
    # ZeRO-3 meets before each module's forward pass.
    waits = stage == 3 and "not every rank runs it here" in results[0]
    assert waits or any(results[0].startswith(f"{one} of step 1: ") for one in named.split("|")), (
        results[0]
    )


@pytest.mark.parametrize(
    ("stage", "overlap"),
    [(0, False), (1, True), (2, False), pytest.param(3, False, marks=pytest.mark.slow)],
)
def test_equal_orders_train_as_plain_pytorch_does(pools, stage, overlap):
    hows = ["in place", "used"]
    results = pools.run(2, train_towers, timeout=60, stage=stage, hows=hows, overlap=overlap)
    for got, expected in zip(results, plain_towers(hows), strict=True):
        assert got == pytest.approx(expected, rel=1e-5)


class Scaled(torch.autograd.Function):
    """An autograd function in Python, whose nodes autograd numbers separately."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum(0)


class Graphs(torch.nn.Module):
    """Layers that graphs of several kinds use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.scalar = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, ids: torch.Tensor, kind: str) -> torch.Tensor:
        x = self.embed(ids)
        if kind == "tied":
            return self.norm(self.first(x)) @ self.embed.weight.T
        if kind == "shared":
            return self.first(self.second(self.first(x)))
        if kind == "checkpointed":
            return self.second(
                torch.utils.checkpoint.checkpoint(
                    lambda x: self.norm(self.first(x)), x, use_reentrant=False
                )
            )
        if kind == "python":
            return self.norm(Scaled.apply(self.first(x), self.scale)) * self.scalar.exp()
        if kind == "loop":
            return sum((self.second(x[:, :size]).sum() for size in (1, 2, 3)), self.first(x).sum())
        assert kind == "late"
        return (
            self.norm(self.second(x))
            + 0.0 * self.first(x).sum()
            + torch.nn.functional.dropout(x, 0.5)
        )


@pytest.mark.parametrize("kind", ["tied", "shared", "checkpointed", "python", "loop", "late"])
def test_the_order_of_gradients_is_read_off_the_graph(kind):
    """The order is compared with the order in which autograd produces the gradients."""
    model, came = Graphs(), []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    loss = model(torch.arange(8).view(2, 4), kind).sum()
    read = [names[leaf] for leaf in reached_leaves([loss])]
    loss.backward()
    assert read == came and len(read) > 2


def test_a_graph_is_read_from_the_tensors_with_a_gradient_alone():
    model = Graphs()
    loss = model(torch.arange(8).view(2, 4), "tied").sum()
    assert reached_leaves([None, 3, torch.ones(2), "x"]) == [] and reached_leaves(
        [torch.ones(2), loss, 3]
    ) == reached_leaves([loss])


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        (
            ["abcd", "acdb", "xy", "xy"],
            [
                "b in micro-batch 2 of step 7: the backward pass computes this gradient after a on"
                " rank 0 and after d on rank 1"
            ],
        ),
        (
            ["abcd", "abcd", "xyz", "zxy"],
            [
                "z in micro-batch 2 of step 7: the backward pass computes this gradient after y on"
                " rank 2 and first on rank 3"
            ],
        ),
        # Missing gradients are reported before differences in order.
        (
            ["ab", "a", "xy", "yx"],
            [
                "b in micro-batch 2 of step 7: a gradient on rank 0, none on rank 1, which have to"
                " sum it"
            ],
        ),
        (
            ["ab", "b", "x", "xyz"],
            [
                "a in micro-batch 2 of step 7: a gradient on rank 0, none on rank 1",
                "y, z in micro-batch 2 of step 7: a gradient on rank 3",
            ],
        ),
    ],
    ids=[
        "order of the first stage",
        "order of the last stage",
        "lacking and order",
        "lacking on both stages",
    ],
)
def test_the_first_difference_is_named_of_the_ranks_of_a_stage(monkeypatch, orders, said):
    """Ranks in other stages have different parameters, so they are not compared.

    The first micro-batch is the same on all ranks.
    """
    everyone = [{0: ("s", "t"), 1: tuple(order), 2: tuple(reversed(order))} for order in orders]
    mesh = Mesh(dp=2, pp=2)
    assert [mesh.coords(rank)["pp"] for rank in range(4)] == [0, 0, 1, 1]
    comparison = unused_parameters.ParameterComparison(towers(), mesh, 7, {}, (), used=everyone[0])

    def compare(failures: tuple[int, ...]) -> list[str]:
        counts = [CompilerCounts(graphs=4, breaks=0, failed=failed) for failed in failures]
        gathered = list(zip(everyone, counts, strict=True))
        monkeypatch.setattr(
            dist,
            "all_gather_object",
            lambda found, _, group: found.__setitem__(slice(None), gathered),
        )
        problems = comparison._difference_error().problems
        return [f"{problem.where}: {problem.rule}" for problem in problems]

    monkeypatch.setattr(unused_parameters, "long_wait_group", lambda: None)
    found = compare((1, 1, 1, 1))  # a failure on all ranks is no difference
    assert len(found) == len(said) and all(
        one.startswith(start) for one, start in zip(found, said, strict=True)
    ), found
    failed = (
        "torch.compile on ranks 1, 3: failed there (4 graphs, 0 graph breaks, 2 failures), so"
        " gradients arrive in another order"
    )
    reordered = "computes this gradient" in said[0]
    assert compare((0, 2, 0, 1)) == ([failed] if reordered else found)


@pytest.mark.parametrize(
    ("stage", "ordered"), [(0, False), (1, True), (2, True), (3, True), (None, True)]
)
def test_orders_are_compared_unless_gradients_are_summed_in_the_models_order(stage, ordered):
    """ZeRO-0 sums gradients in the model's order.

    DDP and FSDP2, which have no ZeRO stage, follow the order of the backward pass.
    """
    model = towers()
    engine = (
        SimpleNamespace(module=model)
        if stage is None
        else SimpleNamespace(module=model, zero_optimization_stage=lambda: stage)
    )
    comparison, places = unused_parameters._start_comparison(engine, Mesh(dp=2), 1)
    assert comparison.ordered == ordered and len(places) == (3 if stage == 3 else 0)
    came = {}
    for number, how in enumerate(["used", "the other way round"]):
        comparison.note(number, model(rows_of(0, 0), how).sum())
        came[how] = comparison.used[number]
    assert (came["used"] != came["the other way round"]) == ordered and set(came["used"]) == set(
        came["the other way round"]
    )


class Experts(torch.nn.Module):
    """Two experts in separate modules, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(4, 2)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])

    def forward(self, hidden: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.experts[chosen](hidden) * self.gate(hidden).softmax(-1)[:, chosen, None]


def train_with_an_expert_of_its_own(stage: int) -> list[float] | str:
    """Return the losses of two steps, or the config error.

    Rank 0's tokens use the first expert and rank 1's tokens the second. Under ZeRO-3 only one
    backward pass is run.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("block", Experts())
    model.forward = model.block.forward
    (block,) = leaf_modules(model)
    set_z3_leaf_module(block, True)
    engine: Any = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=ds_config(stage, 2),
        dist_init_required=False,
    )[0]
    losses, rank = [], dist.get_rank()
    try:
        for step in (1, 2):
            with compare_parameters(engine, Mesh(dp=2), step, on=step == 1):
                loss = engine(torch.ones(2, 4) * (rank + 1), rank).square().mean()
                engine.backward(loss)
            losses.append(loss.item())
            # DeepSpeed 0.19.8 records a stream for the gradients of unused experts, but a CPU has
            # no streams (stage3.py, zero_grad).
            if stage == 3:
                break
            engine.step()
    except ConfigError as error:
        return str(error)
    return losses


@pytest.mark.parametrize(
    "stage",
    [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow), 3],
)
def test_an_expert_without_tokens_is_named_where_deepspeed_needs_its_gradient(pools, stage):
    """ZeRO-3 gathers and sums the block as a unit. ZeRO-0 treats missing gradients as zeros."""
    results = pools.run(2, train_with_an_expert_of_its_own, timeout=60, stage=stage)
    if stage in (1, 2):
        for expert, (mine, other) in enumerate(((0, 1), (1, 0))):
            names = (
                f"block.experts.{expert}.bias, block.experts.{expert}.weight in micro-batch 1 of"
                " step 1"
            )
            assert all(
                f"{names}: a gradient on rank {mine}, none on rank {other}" in text
                for text in results
            ), results
    else:
        assert all(
            isinstance(losses, list) and (stage == 3 or losses[1] < losses[0]) for losses in results
        ), results
