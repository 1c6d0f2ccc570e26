"""Audits find flipped bits and modules that compute something else on one rank."""

import json
import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recipekit.runtime.audit import bit_sum
from recipekit.spec.errors import START_AGAIN
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import read_metrics
from short_runs import BASE, train

AUDITED = replace(BASE, steps=8, eval_every=0, save_every=2, audit_every=3)
slow = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_digest_changes_with_any_bit(dtype: torch.dtype) -> None:
    tensors = [torch.arange(size).to(dtype) for size in (1, 3, 8, 37)]
    before = bit_sum(tensors)
    for tensor in tensors:
        data = tensor.view(torch.uint8)
        for index in range(len(data)):
            for bit in range(8):
                data[index] ^= 1 << bit
                assert bit_sum(tensors) != before
                data[index] ^= 1 << bit
    assert bit_sum(tensors) == before
    assert bit_sum(tensors[::-1]) != before
    assert bit_sum([tensors[3][1:]]) == bit_sum([tensors[3][1:].clone()])


def flip(tensor: torch.Tensor, source: random.Random) -> tuple[torch.Tensor, int, int]:
    """Flip one bit of a tensor in place. Return its bytes, the index of the byte, and the bit."""
    data = tensor.detach().view(-1).view(torch.uint8)
    index, bit = source.randrange(len(data)), 1 << source.randrange(8)
    data[index] ^= bit
    return data, index, bit


def audits_with_flips(recipe: Recipe, argv: list[str], what: str, flips: int) -> list[Any]:
    """Train on a rank of a pool, and audit `flips` times with a bit flipped on the last rank.

    The bit belongs to the weights or to the states (`what`). Return the findings of each audit.
    """
    from recipekit import train as loop
    from recipekit.runtime.audit import replicated_weights, states_of_rank

    log, found = loop.evaluate_and_log, list[Any]()

    def audit_in_step_4(run: Any, step: int, metrics: dict[str, Any]) -> None:
        log(run, step, metrics)
        if step != 4:
            return
        source, last = random.Random(0), run.plan.mesh.world - 1
        of = {"weights": replicated_weights, "states": states_of_rank}[what]
        tensors = [tensor for tensor in of(run.engine) if tensor.numel()]
        for _ in range(flips):
            run.audit.end_of_step(run.audit.every)
            if run.plan.command.rank == last:
                flipped = flip(source.choice(tensors), source)
            forward = lambda batches: loop.evaluate(  # noqa: E731
                run.engine, run.task, batches, run.plan.mesh, run.step_metrics
            )
            found.append(run.audit.run(5, run.held_out[:1], forward))
            if run.plan.command.rank == last:
                data, index, bit = flipped
                data[index] ^= bit

    loop.evaluate_and_log = audit_in_step_4
    try:
        code, printed = train(recipe, argv)
        assert code == 0, printed
    finally:
        loop.evaluate_and_log = log
    return found


@pytest.mark.parametrize(
    ("world", "json", "what"),
    [
        (2, "zero2.json", "weights"),
        (2, "zero3.json", "states"),
        *(
            pytest.param(world, f"zero{stage}.json", what, marks=slow)
            for world in (2, 4)
            for stage in (0, 1, 2)
            for what in ("weights", "states")
        ),
    ],
)
def test_every_flipped_bit_is_found_at_the_next_audit(
    pools: Any, tmp_path: Path, world: int, json: str, what: str, request: Any
) -> None:
    flips = 100 if request.node.get_closest_marker("slow") else 8
    recipe = replace(AUDITED, steps=5, eval_every=2, ds_config=json, out=str(tmp_path / "run"))
    results = pools.run(
        world, audits_with_flips, recipe=recipe, argv=[], what=what, flips=flips, timeout=300
    )
    assert all(result == results[0] for result in results), "all ranks come to the same result"
    assert len(results[0]) == flips
    words = {"weights": "the weights of rank", "states": "the master weights or optimizer states"}
    for findings in results[0]:
        assert words[what] in findings[0].text and findings[0].rank == world - 1


def train_with_wrong_block(
    recipe: Recipe, argv: list[str], name: str = "", rank: int = 1
) -> tuple[Any, str, list[str]]:
    """Train on a rank of a pool. From step 5 on, a module computes one wrong element on one rank.

    Return the exit code, the output, and the texts of the alerts.
    """
    from recipekit import train as loop

    read, planted = loop.read_step_data, [False]

    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output.view(-1)[7] *= 1.0625
        return output

    def plant(run: Any, step: int) -> Any:
        mine = run.plan.command.rank == rank and name and step >= 5
        for module_name, module in run.engine.module.named_modules() if mine else ():
            if module_name.endswith(name) and not planted[0]:
                planted[0] = True
                module.register_forward_hook(spoil)
        return read(run, step)

    loop.read_step_data = plant
    try:
        code, printed = train(recipe, argv)
    finally:
        loop.read_step_data = read
    alerts = Path(recipe.out) / "alerts.jsonl"
    lines = alerts.read_text().splitlines() if alerts.exists() else []
    return code, printed, lines


def test_a_module_that_is_wrong_on_one_rank_ends_the_run_and_a_restart_equals_a_clean_run(
    pools: Any, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    recipe = replace(AUDITED, ds_config="zero2.json", out=str(out))
    name = "layers.1.mlp.down_proj"
    results = pools.run(2, train_with_wrong_block, recipe=recipe, argv=[], name=name)
    assert [code for code, _, _ in results] == [START_AGAIN] * 2
    _, printed, lines = results[0]
    (alert,) = map(json.loads, lines)
    assert (alert["kind"], alert["level"], alert["step"]) == ("corrupt", "error", 7)
    assert (alert["module"], alert["answer"]) == ("model.layers.1", "restart")
    assert "ranks 0, 1 compute different outputs of model.layers.1" in printed
    assert "The audit after step 3 has found none" in printed
    assert max(os.listdir(out / "checkpoints")) != "step_00000008"

    # The launcher starts it again. The fault is gone, and the run continues from step 6.
    again = pools.run(2, train_with_wrong_block, recipe=recipe, argv=[])
    assert [code for code, _, _ in again] == [0, 0] and read_metrics(out)[-1]["step"] == 8


CLEAN = {
    "zero3 dp2": (2, {"ds_config": "zero3.json"}, []),
    "zero1 pp2 dp2": (4, {"ds_config": "zero1.json"}, ["--pp", "2"]),
    "zero1 tp2 dp2": (4, {"ds_config": "zero1.json"}, ["--tp", "2"]),
    "zero2 sp2 dp2": (4, {"ds_config": "zero2.json"}, ["--sp", "2"]),
    "ddp bf16 dp2": (2, {"engine": "ddp", "precision": "bf16", "ds_config": {}}, []),
    "fsdp2 bf16 dp2": (2, {"engine": "fsdp2", "precision": "bf16", "ds_config": {}}, []),
    "zero0 one rank": (1, {"ds_config": "zero0.json"}, []),
}


@slow
@pytest.mark.parametrize("case", CLEAN)
def test_audits_find_nothing_in_a_clean_run_and_change_nothing(
    pools: Any, tmp_path: Path, case: str
) -> None:
    world, fields, argv = CLEAN[case]
    ends = {}
    for every in (0, 1):
        out = tmp_path / f"every_{every}"
        recipe = replace(AUDITED, steps=5, audit_every=every, out=str(out), **fields)
        results = pools.run(world, train_with_wrong_block, recipe=recipe, argv=argv)
        assert [(code, lines) for code, _, lines in results] == [(0, [])] * world, results[0][1]
        ends[every] = [(line["loss"], line["grad_norm"]) for line in read_metrics(out)]
    assert ends[0] == ends[1]


@slow
def test_a_thousand_clean_steps_have_no_finding(pools: Any, tmp_path: Path) -> None:
    recipe = replace(AUDITED, steps=1000, save_every=0, audit_every=1, out=str(tmp_path / "run"))
    results = pools.run(2, train_with_wrong_block, recipe=recipe, argv=[], timeout=900)
    texts = Counter(line for _, _, lines in results for line in lines)
    assert [code for code, _, _ in results] == [0, 0] and not any(
        json.loads(line)["kind"] == "corrupt" for line in texts
    )
