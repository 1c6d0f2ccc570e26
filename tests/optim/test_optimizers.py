"""Every optimizer that a JSON can name is trained, saved, resumed and converted.

All others are rejected before a run starts. The rows of `spec/optimizer_specs.py` are compared with
the optimizers themselves: the names and sizes of their states.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from job import metrics, reproducible_values
from lint_command import lint
from optimizer_round_trips import RECIPE, check_round_trip, config_of, kept, tensors
from recipekit.checkpoints.reshape import reshape
from recipekit.checkpoints.step_folder import LayoutChange, open_step, target_layout
from recipekit.checkpoints.verify import verify
from recipekit.dslint.schema import schema
from recipekit.optim import factory
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.optimizer_specs import (
    OPTIMIZERS,
)
from recipekit.spec.recipe import Recipe
from shipped_jsons import strategy
from short_runs import train

slow = pytest.mark.slow
TRAIN = {  # options that every rank uses in training, including options that add a state
    "AdamW": {"torch_adam": True, "amsgrad": True},
    "Adam": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "NAdam": {"decoupled_weight_decay": True},
    "RAdam": {},
    "Adamax": {},
    "Adadelta": {},
    "ASGD": {},
    "Rprop": {},
    "Lamb": {},
    "Adafactor": {},
    "Lion": {},
    "Adagrad": {"lr_decay": 0.01, "initial_accumulator_value": 0.1},
    "Muon": {"momentum": 0.9},
    # The resume from step 2 is within the warm-up.
    "AdEMAMix": {"betas": [0.9, 0.95, 0.99], "alpha": 8.0, "alpha_beta3_warmup_steps": 3},
    "OneBitAdam": {"freeze_step": 3},
}
WITHOUT_ZERO = ("OneBitAdam",)  # tests/optim/test_one_bit.py has more tests
# optimizer -> DeepSpeed's op for it with offload
OFFLOADED = {"Lion": "cpu_lion", "Adagrad": "cpu_adagrad"}
REFUSED = {  # optimizer -> reason
    "MuAdam": "requires the package mup",
    "MuAdamW": "requires the package mup",
    "MuSGD": "requires the package mup",
}


def test_every_name_of_the_schema_has_a_row_and_a_test() -> None:
    assert set(OPTIMIZERS) == set(schema()["optimizers"]) == {*TRAIN, *REFUSED}


def test_each_file_of_an_optimizer_has_a_row() -> None:
    files = {
        path.stem
        for path in Path(factory.__file__).parent.glob("*.py")
        if "\nOPTIMIZER = " in path.read_text()
    }
    assert files == {spec.module for spec in OPTIMIZERS.values() if spec.module}
    for name, spec in OPTIMIZERS.items():
        if spec.module:
            assert issubclass(factory.own_optimizer_class(name), torch.optim.Optimizer)


# Training
# --------------------------------------------------------------------------------------------------


QUICK = {("RMSprop", 3, False)}
TRAINED = [
    (name, stage, bf16)
    for name in TRAIN
    for stage in (range(1) if name in WITHOUT_ZERO else range(4))
    for bf16 in (False, True)
    if (stage, bf16) != (2, False)
]


@pytest.mark.parametrize(
    ("name", "stage", "bf16"),
    [
        pytest.param(
            *case,
            marks=() if case in QUICK else slow,
            id=f"{case[0]} zero{case[1]} {'bf16' if case[2] else 'fp32'}",
        )
        for case in TRAINED
    ],
)
def test_an_optimizer_goes_on_bit_for_bit(
    pools: Any, tmp_path: Path, name: str, stage: int, bf16: bool
) -> None:
    params = TRAIN[name] | ({"torch_adam": True} if name == "Adam" and stage == 0 else {})
    check_round_trip(pools, tmp_path, config_of(f"zero{stage}", name, params, bf16))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "RMSprop" else slow)
        for name in TRAIN
        if name not in WITHOUT_ZERO
    ],
)
def test_an_optimizer_goes_through_another_layout_and_back(
    pools: Any, tmp_path: Path, name: str
) -> None:
    check_round_trip(pools, tmp_path, config_of("zero2", name, TRAIN[name]), convert_to="zero3")


WAY: list[dict[str, int]] = [
    {"dp": 4, "zero": 3},
    {"dp": 1, "tp": 2, "zero": 2},
    {"dp": 2, "tp": 2, "pp": 2, "zero": 1},
    {"dp": 2, "tp": 1, "pp": 1, "zero": 0},
    {"dp": 3, "tp": 2, "zero": 3},
    {"dp": 2, "tp": 1, "zero": 2},
]


@slow
@pytest.mark.parametrize("name", ["Adafactor", "Lamb", "Lion", "Adagrad", "Muon", "AdEMAMix"])
def test_ours_go_through_every_kind_of_layout_and_back(
    pools: Any, tmp_path: Path, name: str
) -> None:
    """A conversion from ZeRO-2 to other layouts and back is the same bit for bit.

    Two tensor ranks and two stages also resume from the intermediate layouts.
    """
    recipe, config = (
        dataclasses.replace(RECIPE, model="meta-llama/Llama-3.2-1B"),
        config_of("zero2", name, TRAIN[name]),
    )
    recipe = dataclasses.replace(recipe, ds_config=config)
    results = pools.run(
        2, kept, recipe=recipe, argv=["--out", str(tmp_path / "whole"), "--save_every", "2"]
    )
    assert [code for code, _ in results] == [0, 0], results
    second = tmp_path / "whole" / "checkpoints" / "step_00000002"
    if name == "Adafactor":
        trained = [
            tensor for tensor in open_step(second).blueprint.tensors if tensor.group is not None
        ]
        lines = sum(
            prod(tensor.shape[:-1]) + prod(tensor.shape) // tensor.shape[-2]
            for tensor in trained
            if len(tensor.shape) > 1
        )
        vectors = sum(tensor.numel for tensor in trained if len(tensor.shape) == 1)
        most = 4 * (lines + -(-vectors // 4) * 2)
        assert all(found["bytes"] <= most for _, found in results), (
            "more than rows, columns and half of the vectors, padded to 2"
        )
    was, source = open_step(second), second
    for number, asked in enumerate(WAY):
        now = open_step(source)
        reshape(
            source,
            tmp_path / str(number),
            target_layout(was.blueprint, now.layout, LayoutChange(**asked)),
        )
        source = tmp_path / str(number)
        assert tensors(source) == tensors(second) and not verify(source)
    assert open_step(source).layout == was.layout
    losses = [line["loss"] for line in metrics(tmp_path / "whole")]
    one = dataclasses.replace(recipe, ds_config=config_of("zero1", name, TRAIN[name]))
    for folder, there, degrees, start in (
        ("tp", tmp_path / "1", ["--tp", "2"], recipe),
        ("pp", tmp_path / "2", ["--pp", "2"], one),
        ("back", source, [], recipe),
    ):
        shutil.copytree(tmp_path / "whole", tmp_path / folder)
        shutil.rmtree(own := tmp_path / folder / "checkpoints" / "step_00000002")
        shutil.copytree(there, own)
        results = pools.run(
            2,
            kept,
            recipe=start,
            argv=["--out", str(tmp_path / folder), "--resume", str(own), *degrees],
        )
        assert [code for code, _ in results] == [0, 0], results
        assert [line["loss"] for line in metrics(tmp_path / folder)] == pytest.approx(
            losses, rel=1e-5
        )
    assert reproducible_values(metrics(tmp_path / "back")) == reproducible_values(
        metrics(tmp_path / "whole")
    )
    assert tensors(tmp_path / "back" / "checkpoints" / "step_00000004") == tensors(
        tmp_path / "whole" / "checkpoints" / "step_00000004"
    )


@slow
@pytest.mark.parametrize("file", ["zero2_cpu", "zero3_cpu"])
@pytest.mark.parametrize(
    "name", ["Lion", "Adagrad", "RMSprop", "SGD", "Lamb", "Adafactor", "Muon", "AdEMAMix"]
)
def test_an_offloaded_optimizer_goes_on_bit_for_bit(
    pools: Any, ops: Callable[[str], None], tmp_path: Path, name: str, file: str
) -> None:
    if name in OFFLOADED:
        ops(OFFLOADED[name])
    keys = OPTIMIZERS[name].params or {}
    required = {key: TRAIN[name][key] for key, node in keys.items() if node.get("required")}
    check_round_trip(
        pools,
        tmp_path,
        config_of(file, name, required),
        convert_to="zero3_cpu" if file == "zero2_cpu" else "",
    )


# Config errors
# --------------------------------------------------------------------------------------------------


def planned(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], folder: Path, *argv: str
) -> str:
    """Return the config error of a start (or a dry run) on two ranks, or ""."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    try:
        resolve_run(
            parse(
                dataclasses.replace(RECIPE, ds_config=config),
                Path("optimizers.py"),
                ["--tiny", "--out", str(folder / "run"), *argv],
            )
        )
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", REFUSED)
def test_lint_dry_run_and_start_refuse_for_the_same_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, stage: int
) -> None:
    config = config_of(f"zero{stage}", name, {})
    started = planned(monkeypatch, config, tmp_path)
    assert REFUSED[name] in started, started
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ConfigError) as refused:
        argv = ["--tiny", "--dry_run", "--world", "2", "--out", str(tmp_path / "run")]
        resolve_run(
            parse(dataclasses.replace(RECIPE, ds_config=config), Path("optimizers.py"), argv)
        )
    assert str(refused.value) == started
    (tmp_path / "ds.json").write_text(json.dumps(config))
    code, said = lint(
        str(tmp_path / "ds.json"), "--recipe", "recipes/llama_nano_zero2.py", "--world", "2"
    )
    assert code == 1 and all(
        problem.where in said and problem.rule in said
        for problem in refused.value.problems
        if problem.where.startswith("optimizer.")
    ), said


@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
def test_a_recipe_writes_the_key_of_untested_optimizers_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """If a JSON forbids the key, the error states this.

    For LAMB and Adafactor, lint does not recommend the key to other scripts, because the optimizers
    would be different algorithms there.
    """
    config = config_of("zero2", name, {})
    assert planned(monkeypatch, config, tmp_path) == ""
    assert "forbids this optimizer" in planned(
        monkeypatch, config | {"zero_allow_untested_optimizer": False}, tmp_path
    )
    for other in ("Lamb", "Adafactor"):
        (tmp_path / "ds.json").write_text(json.dumps(config_of("zero2", other, {})))
        _, said = lint(str(tmp_path / "ds.json"), "--json-only", "--world", "2")
        assert "another algorithm" in said and "zero_allow_untested_optimizer" not in said


UNREAD = [
    ("Lamb", {"max_coeff": 10.0}, {}, "optimizer.params.max_coeff = 10.0: clamps the trust ratio"),
    ("Lamb", {"min_coeff": 0.01}, {}, "optimizer.params.min_coeff = 0.01: clamps the trust ratio"),
    (
        "Lamb",
        {"eps_inside_sqrt": True},
        {},
        "optimizer.params.eps_inside_sqrt = true: is an option of DeepSpeed's LAMB",
    ),
    (
        "Lamb",
        {},
        {"round_robin_gradients": True},
        "zero_optimization.round_robin_gradients = true: moves tensor boundaries",
    ),
    (
        "Lamb",
        {},
        {"parameter_alignment": True},
        "zero_optimization.parameter_alignment = true: moves tensor boundaries",
    ),
    (
        "Adafactor",
        {"foreach": True},
        {},
        "optimizer.params.foreach = true: is an option of torch's Adafactor",
    ),
    (
        "Adafactor",
        {},
        {"round_robin_gradients": True},
        "zero_optimization.round_robin_gradients = true: moves tensor boundaries",
    ),
    (
        "Muon",
        {"torch_adam": True},
        {},
        "optimizer.params.torch_adam = true: is an option of DeepSpeed's Muon",
    ),
    (
        "Muon",
        {"muon_lr": 0.02},
        {},
        (
            "optimizer.params.muon_lr = 0.02: is an option of DeepSpeed's Muon, but a recipe's Muon"
            " has one rate"
        ),
    ),
    (
        "Muon",
        {"adam_w_mode": False},
        {},
        "optimizer.params.adam_w_mode = false: is an option of DeepSpeed's Muon",
    ),
    (
        "Muon",
        {},
        {"round_robin_gradients": True},
        "zero_optimization.round_robin_gradients = true: moves tensor boundaries",
    ),
    (
        "Lion",
        {"set_grad_none": True},
        {},
        "optimizer.params.set_grad_none = true: is an option of DeepSpeed's CUDA Lion",
    ),
    (
        "Adagrad",
        {"fused": True},
        {},
        "optimizer.params.fused = true: is an option of torch's Adagrad",
    ),
]


@pytest.mark.parametrize(
    ("name", "params", "zero", "said"),
    UNREAD,
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_ours_do_not_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, params: Any, zero: Any, said: str
) -> None:
    config = config_of("zero2", name, params)
    config["zero_optimization"] |= zero
    assert said in planned(monkeypatch, config, tmp_path).replace("\n", " ")
    config["optimizer"]["params"] = {key: False for key in params if params[key] is True}
    assert (
        planned(monkeypatch, config_of("zero2", name, config["optimizer"]["params"]), tmp_path)
        == ""
    )


@pytest.mark.parametrize("name", ["Lamb", "Muon"])
def test_what_needs_whole_tensors_is_refused_where_experts_are_divided(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    said = planned(
        monkeypatch,
        config_of("zero2", name, {}),
        tmp_path,
        "--model",
        "Qwen/Qwen3-30B-A3B",
        "--ep",
        "2",
    )
    assert (
        f'optimizer.type = "{name}": requires sums over full tensors, but DeepSpeed splits the'
        " weights of sharded experts" in said
    ), said


def test_deepspeeds_own_adam_without_zero_is_refused_in_bf16(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """DeepSpeed's Adam has one flat tensor of master weights, so it could train but not save."""
    assert 'Add "optimizer.params.torch_adam": true' in planned(
        monkeypatch, config_of("zero0", "AdamW", {}, bf16=True), tmp_path
    )
    assert planned(monkeypatch, config_of("zero0", "AdamW", {}), tmp_path) == ""


def test_the_states_of_another_optimizer_are_refused(pools: Any, tmp_path: Path) -> None:
    """Adam's moments cannot replace momentum.

    The same algorithm resumes even if its name is spelled differently.
    """
    recipe = dataclasses.replace(RECIPE, ds_config=config_of("zero2", "SGD", {"momentum": 0.9}))
    assert [
        code
        for code, _ in pools.run(
            2, kept, recipe=recipe, argv=["--out", str(tmp_path / "run"), "--stop_at", "2"]
        )
    ] == [0, 0]
    for name, params, says in (
        ("Adamax", {}, "Adamax (exp_avg, exp_inf)"),
        ("SGD", {}, "SGD (no states)"),
        ("Adafactor", {}, "Adafactor (row_var, col_var, variance)"),
        ("Muon", {}, "Muon (exp_avg, exp_avg_sq, of matrices momentum_buffer)"),
    ):
        other = dataclasses.replace(recipe, ds_config=config_of("zero2", name, params))
        (code, _), _ = pools.run(
            2,
            kept,
            recipe=other,
            argv=["--out", str(tmp_path / "run"), "--resume", str(tmp_path / "run")],
        )
        assert (
            isinstance(code, str)
            and "optimizer states of SGD (momentum_buffer)" in code
            and says in code
            and "to-hf" in code
        ), code
        assert len(metrics(tmp_path / "run")) == 2
    assert pools.run(2, kept, recipe=recipe, argv=["--out", str(tmp_path / "run")])[0][0] == 0
    assert len(metrics(tmp_path / "run")) == 4


# Random JSON values
# ---------------------------------------------------------------------------------------------

unit = st.floats(0, 0.999)


def betas(length: int) -> st.SearchStrategy[Any]:
    """Return decays, including some that are too large."""
    return st.lists(st.one_of(unit, st.just(1.0)), min_size=length, max_size=length)


OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "etas": st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.2]), min_size=2, max_size=2),
    "step_sizes": st.just([1e-6, 1.0]),
    "freeze_step": st.sampled_from([1, 2, 0]),
    "alpha_beta3_warmup_steps": st.sampled_from([0, 1, 2, -1]),
    "torch_adam": st.just(True),  # DeepSpeed's Adam has other options
    "momentum": st.sampled_from([0, 0.5, -1.0]),
    "dampening": st.sampled_from([0, 0.1]),
    "rho": st.sampled_from([0.5, 1.5]),
    "alpha": st.sampled_from([0.5, -1.0]),
    "t0": st.sampled_from([1.0, 1e6]),
    "lambd": unit,
    "momentum_decay": st.sampled_from([0.004, -1.0]),
    "adjust_lr_fn": st.sampled_from(["original", "match_rms_adamw"]),
    "ns_coefficients": st.just([3.4445, -4.7750, 2.0315]),
    "ns_steps": st.sampled_from([5, 0]),
    "ns_eps": st.just(1e-7),
    "ns_dtype": st.sampled_from(["bf16", "fp32"]),
    "eps": st.sampled_from([1e-8, -1.0]),
    "lr": st.sampled_from([1e-3, -1.0]),
    "weight_decay": st.sampled_from([0.1, 0.0, -1.0]),
}


@st.composite
def blocks(draw: st.DrawFn) -> dict[str, Any]:
    """Generate an optimizer block with any name, and options inside and outside their ranges."""
    name = draw(st.sampled_from(sorted({*TRAIN, *REFUSED})))
    variants = schema()["optimizers"][name]
    takes = variants.get("torch", variants.get("device", {}))
    pairs = {key: betas(takes[key]["length"]) for key in ("betas",) if key in takes}
    params = {
        key: draw((OPTIONS | pairs).get(key, st.booleans()))
        for key in sorted(takes)
        if key == "torch_adam" or takes[key].get("required") or draw(st.booleans())
    }
    return {"type": name, "params": params}


def try_blocks(recipes: list[Recipe], folder: str) -> list[str]:
    """Run recipes on a rank; return "trained" (and saved twice) or the config error for each
    recipe.
    """
    ended = []
    for number, recipe in enumerate(recipes):
        result, _ = train(recipe, ["--out", f"{folder}/{number}", "--stop_at", "1"])
        if result == 0:
            result, _ = train(recipe, ["--out", f"{folder}/{number}"])
        ended.append("trained" if result == 0 else str(result))
    return ended


def check_drawn(pools: Any, folder: Path, drawn: list[tuple[dict[str, Any], int, bool]]) -> int:
    """Check that each block trains and is saved, or is rejected with an error about the optimizer.

    Return the number of blocks that trained.
    """
    recipes = [
        dataclasses.replace(
            RECIPE, steps=2, ds_config=strategy(f"zero{stage}", bf16) | {"optimizer": block}
        )
        for block, stage, bf16 in drawn
    ]
    ended = pools.run(1, try_blocks, recipes=recipes, folder=str(folder), timeout=300)[0]
    for (block, stage, bf16), end in zip(drawn, ended, strict=True):
        problems = end.splitlines()
        assert end == "trained" or all("optimizer" in line for line in problems), (
            f"{block} at ZeRO-{stage}, {'bf16' if bf16 else 'fp32'}: {end}"
        )
    return ended.count("trained")


DRAWN = st.tuples(blocks(), st.integers(0, 3), st.booleans())


@settings(
    max_examples=1,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),
    derandomize=True,
)
@given(drawn=st.lists(DRAWN, min_size=4, max_size=4))
def test_no_block_trains_and_then_cannot_be_saved(
    pools: Any, tmp_path_factory: pytest.TempPathFactory, drawn: list[Any]
) -> None:
    assert check_drawn(pools, tmp_path_factory.mktemp("drawn"), drawn), "not all may be refused"


@slow
def test_no_block_of_many_trains_and_then_cannot_be_saved(
    pools: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    trained = []

    @settings(
        max_examples=4,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(drawn=st.lists(DRAWN, min_size=20, max_size=20))
    def run(drawn: list[Any]) -> None:
        trained.append(check_drawn(pools, tmp_path_factory.mktemp("drawn"), drawn))

    run()
    # A list may contain only rejected blocks, because hypothesis repeats examples.
    assert sum(trained), "not all may be refused"
