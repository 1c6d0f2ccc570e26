"""An optimizer's states after a resume and after a conversion to a different layout."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from job import metrics, reproducible_values
from recipekit.checkpoints.reshape import reshape
from recipekit.checkpoints.step_folder import LayoutChange, open_step, target_layout
from recipekit.spec.optimizer_specs import ADAFACTOR_STATES, optimizer_spec_of, optimizer_states
from recipekit.spec.recipe import Recipe
from recipekit.storage import manifest
from recipekit.storage.step_files import read_common_state
from shipped_jsons import strategy
from short_runs import BASE, train

RECIPE = dataclasses.replace(BASE, steps=4, warmup_steps=1, lr=1e-3, eval_every=0)


def config_of(file: str, name: str, params: dict[str, Any], bf16: bool = False) -> dict[str, Any]:
    """Return a shipped JSON with a different optimizer; in bf16, ZeRO-0 requires torch's Adam."""
    return strategy(file, bf16) | {"optimizer": {"type": name, "params": params}}


def kept(recipe: Recipe, argv: list[str]) -> tuple[int | str, dict[str, Any]]:
    """Run the loop on a rank.

    Return the optimizer's tensor states and scalars, and the states' actual and planned bytes.
    """
    import recipekit.train as loop
    from recipekit.planner.resolve import resolve_here

    found: dict[str, Any] = {"states": set(), "scalars": set()}
    train_step, load_model = loop.train_step, loop.load_model

    def planning(plan: Any, *rest: Any) -> Any:
        found["planned"] = sum(
            term.size
            for term in resolve_here(plan)[0].terms[0]
            if term.what.startswith("optimizer states")
        )
        return load_model(plan, *rest)

    def watching(engine: Any, *rest: Any) -> Any:
        result = train_step(engine, *rest)
        found["bytes"] = 0
        for weight, states in engine.basic_optimizer.state.items():
            for name, value in states.items():
                whole = torch.is_tensor(value) and value.dim() > 0
                assert not whole or value.shape == weight.shape or name in ADAFACTOR_STATES, (
                    f"{name} has the shape {value.shape}"
                )
                found["states" if whole else "scalars"].add(name)
                assert not whole or value.element_size() == 4, f"{name} is not fp32"
                found["bytes"] += value.untyped_storage().nbytes() if whole else 0
        return result

    loop.train_step, loop.load_model = watching, planning
    try:
        return train(recipe, argv)[0], found
    finally:
        loop.train_step, loop.load_model = train_step, load_model


def tensors(step: Path) -> dict[str, Any]:
    return manifest.read_manifest(step)["tensors"]


def check_round_trip(
    pools: Any, folder: Path, config: dict[str, Any], convert_to: str = "", recipe: Recipe = RECIPE
) -> None:
    """Train four steps on two ranks, and check that a resume from step 2 is bit for bit the same.

    With `convert_to`, the check also covers a conversion to a different layout and back.
    """
    recipe = dataclasses.replace(recipe, ds_config=config)
    results = pools.run(
        2, kept, recipe=recipe, argv=["--out", str(folder / "whole"), "--save_every", "2"]
    )
    assert [code for code, _ in results] == [0, 0], results
    for _, found in results:
        assert (found["states"], found["scalars"]) == (
            {*optimizer_states(config), *optimizer_states(config, matrix=True)},
            set(optimizer_spec_of(config).scalars),
        )
        assert found["bytes"] == found["planned"] or optimizer_states(config) == ADAFACTOR_STATES, (
            found
        )
    assert max(found["bytes"] for _, found in results) == results[0][1]["planned"], (
        "of Adafactor's the plan has those of the fullest rank"
    )
    second, last = (folder / "whole" / "checkpoints" / f"step_{number:08d}" for number in (2, 4))
    if convert_to:
        step, there, back = open_step(second), folder / "there", folder / "back"
        reshape(
            second,
            there,
            target_layout(step.blueprint, step.layout, LayoutChange(dp=4, zero=int(convert_to[4]))),
        )
        reshape(
            there,
            back,
            target_layout(
                step.blueprint,
                step.layout,
                LayoutChange(dp=2, zero=step.layout.zero_stage),
            ),
        )
        assert tensors(second) == tensors(there) == tensors(back)
        assert (
            len(
                {
                    json.dumps(
                        read_common_state(
                            each, open_step(each).blueprint, open_step(each).layout
                        ).scalars
                    )
                    for each in (second, there, back)
                }
            )
            == 1
        )
        other = dataclasses.replace(
            recipe, ds_config=strategy(convert_to) | {"optimizer": config["optimizer"]}
        )
        shutil.copytree(folder / "whole", folder / "four")
        results = pools.run(
            4,
            kept,
            recipe=other,
            argv=[
                "--out",
                str(folder / "four"),
                "--resume",
                str(folder / "four/checkpoints/step_00000002"),
            ],
        )
        assert [code for code, _ in results] == [0] * 4, results
        losses, expected = (
            [line["loss"] for line in metrics(folder / name)] for name in ("four", "whole")
        )
        assert losses == pytest.approx(expected, rel=1e-5)
        shutil.rmtree(second)
        shutil.copytree(back, second)
    shutil.copytree(folder / "whole", folder / "resumed")
    argv = [
        "--out",
        str(folder / "resumed"),
        "--resume",
        str(folder / "resumed/checkpoints/step_00000002"),
    ]
    results = pools.run(2, kept, recipe=recipe, argv=argv)
    assert [code for code, _ in results] == [0, 0], results
    assert reproducible_values(metrics(folder / "resumed")) == reproducible_values(
        metrics(folder / "whole")
    )
    assert tensors(folder / "resumed" / "checkpoints" / last.name) == tensors(last)
