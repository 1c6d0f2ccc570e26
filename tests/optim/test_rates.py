"""Parameter groups with separate learning rates.

Each weight changes as in plain PyTorch, and the groups stay separate in saves and resumes.
"""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from built_models import build_model
from job import metrics, reproducible_values
from optimizer_round_trips import RECIPE, check_round_trip, config_of
from parity import STEPS, Case, accumulating, compare, each, pinned, recipe_for
from recipekit.architectures.families import tiny_config
from recipekit.checkpoints.step_folder import LayoutChange, open_step, target_layout
from recipekit.convert.hugging_face import from_hf
from recipekit.model.describe import draft_blueprint, published_blueprint
from recipekit.model.empty import empty_model
from recipekit.optim.groups import parameter_groups
from recipekit.parallel.blueprint import Blueprint, Layout, stage_bounds
from recipekit.parallel.param_groups import DEFAULT_GROUPS, param_group_of
from recipekit.parallel.pipeline import check_stages
from recipekit.parallel.plans import published_plans
from recipekit.plan import resolve_run
from recipekit.planner.resolve import resolve_here
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import Mesh
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import find_resume, run_identity
from recipekit.spec.task_specs import Plans
from reference import TEXT, Trained, train_plain
from shipped_jsons import strategy
from short_runs import train
from tiny_models import save_tiny
from torch_engines import TORCH

SCALES = {"*.embed_tokens.weight": 0.5, "model.layers.0.*": 2.0, "model.norm.weight": 0.1}


def scale(name: str, layer_decay: float = 1.0) -> float:
    """Return a parameter's learning-rate scale in a Llama with four layers.

    Three layers follow layer 0. All four layers and the head follow the embedding.
    """
    behind = (
        5 if "embed_tokens" in name else 4 - int(name.split(".")[2]) if ".layers." in name else 0
    )
    return (
        next((factor for pattern, factor in SCALES.items() if fnmatchcase(name, pattern)), 1.0)
        * layer_decay**behind
    )


@functools.cache
def reference(model: str, layer_decay: float = 1.0) -> Trained:
    os.environ.pop("WORLD_SIZE", None)
    recipe = dataclasses.replace(
        recipe_for(model, attention="sdpa"), ds_config=strategy("zero0"), out="/nonexistent"
    )
    plan = resolve_run(parse(recipe, Path("groups.py"), ["--tiny", *pinned(recipe)]))
    assert plan.model_config is not None
    return train_plain(
        plan.recipe,
        plan.model_config,
        STEPS,
        plain=dataclasses.replace(TEXT, scale=functools.partial(scale, layer_decay=layer_decay)),
    )


def train_in_layout(recipe: Recipe, file: str, out: str) -> int:
    """Run the real loop on a rank of a pool."""
    from recipekit.train import main

    recipe = dataclasses.replace(recipe, ds_config={} if file in TORCH else strategy(file), out=out)
    engine = ["--engine", file, "--precision", "fp32"] if file in TORCH else []
    sys.argv = ["groups.py"]
    return main(resolve_run(parse(recipe, Path("groups.py"), ["--tiny", *pinned(recipe), *engine])))


CASES = [
    Case("zero2 dp2", 2, "zero2"),
    *(
        dataclasses.replace(case, slow=True)
        for case in (
            Case("zero2 dp2, layers", 2, "zero2", numbers={"layer_decay": 0.5}),
            Case("zero3 tp2, layers", 2, "zero3", {"tp": 2}, numbers={"layer_decay": 0.75}),
            Case("fsdp2, layers", 2, "fsdp2", numbers={"layer_decay": 0.5}),
            Case("zero0 tp2", 2, "zero0", {"tp": 2}),
            Case("zero3 dp4", 4, "zero3"),
            Case("ddp", 2, "ddp"),
            Case("fsdp2", 2, "fsdp2"),
        )
    ),
]


@each(CASES)
def test_each_weight_moves_at_its_own_rate(pools: Any, tmp_path: Path, case: Case) -> None:
    """The reported rate is the recipe's rate, no matter which group comes first."""
    recipe = recipe_for(
        case.model, **accumulating(case.world, **case.layout), lr_scale=SCALES, **case.both
    )
    codes = pools.run(
        case.world, train_in_layout, recipe=recipe, file=case.file, out=str(tmp_path / "run")
    )
    assert codes == [0] * case.world, codes
    compare(tmp_path / "run", reference(case.model, **case.both))
    blueprint = open_step(tmp_path / "run").blueprint
    assert {
        tensor.name: blueprint.groups[tensor.group].lr_scale
        for tensor in blueprint.tensors
        if tensor.group is not None
    } == {
        tensor.name: pytest.approx(scale(tensor.name, **case.both))
        for tensor in blueprint.tensors
        if not tensor.buffer
    }


@pytest.mark.slow
@pytest.mark.parametrize("convert_to", ["", "zero3"])
def test_groups_go_on_bit_for_bit_and_through_another_layout(
    pools: Any, tmp_path: Path, convert_to: str
) -> None:
    recipe = dataclasses.replace(RECIPE, lr_scale={"*.embed_tokens.weight": 0.5, "*norm.weight": 2})
    check_round_trip(
        pools, tmp_path, config_of("zero2", "AdamW", {"torch_adam": True}), convert_to, recipe
    )


@pytest.mark.slow
def test_a_run_of_other_groups_starts_from_converted_files(pools: Any, tmp_path: Path) -> None:
    """from-hf writes two groups and Adam's states.

    Before the first step both may change; in this test, to Muon's states and a learning-rate scale.
    """
    save_tiny(tmp_path / "model", "llama")
    config = config_of("zero2", "Muon", {})
    recipe = dataclasses.replace(
        RECIPE,
        model=str(tmp_path / "model"),
        ds_config=config,
        tokenizer="bytes",
        lr_scale={"*.embed_tokens.weight": 0.5},
    )
    blueprint = published_blueprint(tmp_path / "model")
    layout = target_layout(
        blueprint, Layout(Mesh(), 0, "torch", "float32"), LayoutChange(dp=2, tp=1, pp=1, zero=2)
    )
    from_hf(tmp_path / "model", tmp_path / "start", blueprint, layout)
    argv = ["--init", "pretrained", "--tokenizer", "bytes", "--stop_at", "3"]
    for name, more in (("direct", []), ("converted", ["--resume", str(tmp_path / "start")])):
        results = pools.run(
            2, train, recipe=recipe, argv=["--out", str(tmp_path / name), *argv, *more]
        )
        assert [code for code, _ in results] == [0] * 2, results
    assert reproducible_values(metrics(tmp_path / "converted")) == reproducible_values(
        metrics(tmp_path / "direct")
    )


@pytest.mark.slow
def test_rates_may_change_with_resume_path(pools: Any, tmp_path: Path) -> None:
    """Different groups have the same states, so a rate of 1 under a different name changes no
    values.
    """
    recipe = dataclasses.replace(
        RECIPE, ds_config=config_of("zero2", "AdamW", {"torch_adam": True})
    )
    run, again = tmp_path / "run", {"*.layers.0.*": 1.0 + 1e-12, "*norm*": 1.0 - 1e-12}
    assert [
        code
        for code, _ in pools.run(
            2, train, recipe=recipe, argv=["--out", str(run), "--save_every", "2"]
        )
    ] == [0, 0]
    shutil.copytree(run, tmp_path / "other")
    argv = [
        "--out",
        str(tmp_path / "other"),
        "--resume",
        str(tmp_path / "other/checkpoints/step_00000002"),
    ]
    assert [
        code
        for code, _ in pools.run(
            2, train, recipe=dataclasses.replace(recipe, lr_scale=again), argv=argv
        )
    ] == [0, 0]
    losses = [[line["loss"] for line in metrics(folder)] for folder in (run, tmp_path / "other")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and len(losses[1]) == RECIPE.steps
    step = open_step(tmp_path / "other")
    assert len(set(step.blueprint.trained.values())) == 4, (
        "matrices and vectors of layer 0, matrices of the rest, other norms"
    )


# Tests without ranks
# --------------------------------------------------------------------------------------------------


def test_without_scales_groups_are_what_they_were() -> None:
    """Optimizers and files have the same two names and values as before groups were introduced.

    Files from that time, which store no groups, are still readable.
    """
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(2, 2, bias=False)}
    )
    assert [
        {key: value for key, value in group.items() if key != "params"}
        for group in parameter_groups(model)
    ] == [
        {"name": "matrices"},
        {"weight_decay": 0.0, "name": "vectors"},
    ]
    blueprint, layout = (
        Blueprint((), {}, 0, False),
        Layout(Mesh(), 2, "DeepSpeedZeroOptimizer", "float32"),
    )
    assert blueprint.groups == DEFAULT_GROUPS
    old = json.loads(json.dumps(blueprint.to_json())), json.loads(json.dumps(layout.to_json()))
    del old[0]["groups"], old[1]["of_matrices"]
    assert (Blueprint.from_json(old[0]), Layout.from_json(old[1])) == (blueprint, layout)


def test_groups_of_scales_come_after_the_first_two() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(2, 2)})
    plans = Plans(lr_scale={"a.*": 0.5, "*": 2.0}, no_decay=("a.weight",))
    groups = parameter_groups(
        model,
        {
            name: param_group_of(name, parameter.dim(), plans)
            for name, parameter in model.named_parameters()
        },
    )
    assert [
        (group["name"], group["lr_scale"], group.get("weight_decay"), len(group["params"]))
        for group in groups
    ] == [
        ("vectors, lr x 0.5", 0.5, 0.0, 2),
        ("vectors, lr x 2.0", 2.0, 0.0, 1),
        ("matrices, lr x 2.0", 2.0, None, 1),
    ]


def planned(folder: Path, *argv: str, **changes: Any) -> Any:
    os.environ.pop("WORLD_SIZE", None)
    return resolve_run(
        parse(
            dataclasses.replace(RECIPE, **changes),
            Path("groups.py"),
            ["--tiny", "--out", str(folder / "run"), *argv],
        )
    )


def test_what_a_scale_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"lr_scale of '\*\.wte\.\*': does not match any trained parameter\. Write a name, or a"
            r" pattern with \*"
        ),
    ):
        plan = planned(tmp_path, lr_scale={"*.wte.*": 0.5})
        build_model(plan.recipe, plan.model_config, None, plan.ds_config, torch.device("cpu"))
    with pytest.raises(ConfigError, match="lr_scale of 'a' = 0: must be a positive number"):
        planned(tmp_path, lr_scale={"a": 0})
    scheduled = strategy("zero2") | {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    }
    with pytest.raises(ConfigError, match="the JSON's scheduler block sets the rates"):
        planned(tmp_path, lr_scale={"*": 0.5}, ds_config=scheduled, warmup_steps=0)

    for value in (0, -0.5, 1.5):
        with pytest.raises(
            ConfigError, match=rf"layer_decay = {value}: must be above 0 and at most 1"
        ):
            planned(tmp_path, layer_decay=value)
    with pytest.raises(
        ConfigError,
        match=(
            r"layer_decay = 0\.5: scales the rate of the recipe's schedule, but the JSON's"
            r" scheduler block"
        ),
    ):
        planned(tmp_path, layer_decay=0.5, ds_config=scheduled, warmup_steps=0)
    unknown = Plans(layer_decay=0.5, pp={"nowhere": "split"})
    with pytest.raises(
        ConfigError,
        match=(
            r"layer_decay = 0\.5: requires a list of layers, but LlamaForCausalLM has no known"
            r" list\. Leave out --layer_decay, or add a pp_plan to the recipe"
        ),
    ):
        draft_blueprint(empty_model(tiny_config("llama", 264)), unknown)


@pytest.mark.parametrize(
    ("task", "model", "argv", "before", "within", "behind"),
    [
        (
            "masked_lm",
            "google-bert/bert-large-uncased",
            [],
            "bert.embeddings.LayerNorm.weight",
            "bert.encoder.layer.{}.",
            "cls.predictions.transform.dense.weight",
        ),
        (
            "image_classification",
            "google/vit-large-patch16-224",
            ["--num_labels", "5"],
            "vit.embeddings.cls_token",
            "vit.layers.{}.",
            "classifier.weight",
        ),
        (
            "pretrain",
            "meta-llama/Llama-3.2-1B",
            [],
            "model.embed_tokens.weight",
            "model.layers.{}.",
            "model.norm.weight",
        ),
    ],
)
def test_layers_move_the_less_the_nearer_they_are_to_the_input(
    tmp_path: Path, task: str, model: str, argv: list[str], before: str, within: str, behind: str
) -> None:
    plan = planned(tmp_path, *argv, task=task, model=model, layer_decay=0.5)
    found = resolve_here(plan)[0].blueprint
    scales = {name: group.lr_scale for name, group in found.trained.items()}
    assert (scales[before], scales[behind]) == (0.5 ** (found.num_layers + 1), 1.0)
    for number in range(found.num_layers):
        own = {factor for name, factor in scales.items() if name.startswith(within.format(number))}
        assert own == {0.5 ** (found.num_layers - number)}


def test_stages_of_a_pipeline_without_a_group_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stage without an optimizer group is rejected, because stages would wait for each other's
    norms.

    The cases are scales for parameters of only one stage, and Muon in a stage without embedding and
    head.
    """
    model = empty_model(tiny_config("llama", 264))  # four layers
    for plans, stages, lacks in (
        (
            Plans(lr_scale={"model.layers.0.*": 2.0}),
            2,
            "leaves stage 1 without the optimizer group 'vectors, lr x 2.0'",
        ),
        (Plans(lr_scale={"*.mlp.*": 2.0}), 4, ""),
        (Plans(layer_decay=0.5), 2, "leaves stage 0 without the optimizer group"),
        (Plans(matrices=("*.layers.*",)), 2, ""),
        (
            Plans(matrices=("*.layers.*",)),
            4,
            "leaves stage 1 without the optimizer group 'matrices'",
        ),
    ):
        blueprint = draft_blueprint(model, dataclasses.replace(plans, pp=published_plans(model).pp))
        with pytest.raises(ConfigError, match=lacks) if lacks else contextlib.nullcontext():
            check_stages(blueprint, stage_bounds(blueprint, stages))
    monkeypatch.setenv("WORLD_SIZE", "2")
    argv = ["--tiny", "--pp", "2", "--out", str(tmp_path / "run")]
    plan = resolve_run(
        parse(
            dataclasses.replace(RECIPE, lr_scale={"model.layers.0.*": 2.0}), Path("groups.py"), argv
        )
    )
    with pytest.raises(ConfigError, match="2 pipeline stages: leaves stage 1 without"):
        resolve_here(plan)


def test_a_run_goes_on_with_its_own_scales_only(tmp_path: Path) -> None:
    plan = planned(tmp_path, lr_scale={"*norm*": 0.5})
    (tmp_path / "run").mkdir()
    saved = {"identity": run_identity(plan.recipe, plan.model_config), "recipe": {"tiny": True}}
    (tmp_path / "run" / "run.json").write_text(json.dumps(saved))
    assert find_resume(plan.recipe, tmp_path / "run", plan.model_config, True) == tmp_path / "run"
    with pytest.raises(
        ConfigError,
        match=r"lr_scale = nothing: the run in .* has {'\*norm\*': 0.5}\. Start a new run",
    ):
        planned(tmp_path)
