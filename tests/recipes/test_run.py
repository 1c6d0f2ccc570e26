"""One run from its command line to its exit code.

The run is started with python or torchrun. The tests cover its schedule, and the events that end it
early.
"""

import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job import BIN, NANO, Job, checkpoints, deepspeed, metrics, reproducible_values, steps_done
from pool import free_port
from recipekit.spec.recipe import Recipe
from recipekit.spec.schedules import lr_at
from recipekit.storage.manifest import find_faults
from shipped_jsons import strategy
from short_runs import BASE, train
from wandb_file import read_exit_codes

slow = pytest.mark.slow


@pytest.fixture
def launch(tmp_path: Path, ops: Callable[[str], None]) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def launch(*argv: object, **variables: str) -> Job:
        jobs.append(Job(tmp_path, [str(word) for word in argv], **variables))
        return jobs[-1]

    yield launch
    for job in jobs:
        job.close()


def learning_rates(**numbers: Any) -> list[float]:
    recipe = Recipe(**numbers)
    return [lr_at(recipe, step) for step in range(1, recipe.steps + 1)]


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    assert learning_rates(lr=8.0, steps=6, warmup_steps=4, schedule="constant") == [
        2.0,
        4.0,
        6.0,
        8.0,
        8.0,
        8.0,
    ]


def test_linear_falls_to_min_lr_at_the_last_step() -> None:
    assert learning_rates(lr=10.0, min_lr=2.0, steps=6, warmup_steps=2, schedule="linear") == [
        5.0,
        10.0,
        8.0,
        6.0,
        4.0,
        2.0,
    ]


def test_cosine_is_half_way_in_the_middle() -> None:
    rates = learning_rates(lr=10.0, min_lr=2.0, steps=10, warmup_steps=2, schedule="cosine")
    assert rates[:2] == [5.0, 10.0]
    assert rates[5] == pytest.approx(6.0, abs=1e-12) and rates[-1] == 2.0
    assert rates[3] == pytest.approx(2.0 + 8.0 * (1 + math.sqrt(0.5)) / 2, abs=1e-12)
    assert rates[1:] == sorted(rates[1:], reverse=True)


def test_without_warm_up_the_first_step_has_already_come_down() -> None:
    assert learning_rates(lr=4.0, steps=4, schedule="linear") == [3.0, 2.0, 1.0, 0.0]
    assert learning_rates(lr=4.0, steps=1, schedule="cosine") == [0.0]


def test_wsd_stays_at_the_peak_and_falls_by_the_root_of_the_decay_that_is_done() -> None:
    rates = learning_rates(
        lr=8.0, min_lr=2.0, steps=10, warmup_steps=2, decay_steps=4, schedule="wsd"
    )
    # 1 - sqrt of 1/4, 2/4, 3/4 and 4/4.
    assert rates[:7] == [4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 5.0] and rates[-1] == 2.0
    assert rates[7:9] == pytest.approx(
        [8.0 - 6.0 * math.sqrt(0.5), 8.0 - 6.0 * math.sqrt(0.75)], abs=1e-12
    )
    longer = learning_rates(
        lr=8.0, min_lr=2.0, steps=90, warmup_steps=2, decay_steps=4, schedule="wsd"
    )
    assert longer[:6] == rates[:6] and longer[-4:] == rates[-4:] and set(longer[6:-4]) == {8.0}
    assert learning_rates(lr=4.0, steps=2, decay_steps=1, warmup_steps=1, schedule="wsd") == [
        4.0,
        0.0,
    ]
    assert learning_rates(lr=4.0, steps=4, decay_steps=4, schedule="wsd") == [
        2.0,
        4.0 * (1 - math.sqrt(0.5)),
        4.0 * (1 - math.sqrt(0.75)),
        0.0,
    ]


def poison(model: Any) -> Any:
    """Make a gradient or the head's input non-finite on rank 1 from the third step on.

    Each step has two micro-batches.
    """
    kind, seen = os.environ["POISON"], 0

    def hook(module: Any, inputs: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen >= 5 and kind == "gradient":
            inputs[0].register_hook(lambda gradient: gradient * math.nan)
        return (inputs[0] * math.inf,) if seen >= 5 and kind == "loss" else inputs

    if os.environ["RANK"] == "1":
        model.get_output_embeddings().register_forward_pre_hook(hook)
    return model


def poisoned(recipe: Recipe, argv: list[str], kind: str) -> tuple[int | str, str]:
    os.environ["POISON"] = kind
    return train(recipe, argv)


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        pytest.param("gradient", "zero1", marks=slow),
        ("gradient", "zero2"),
        pytest.param("gradient", "zero3", marks=slow),
        ("gradient", "zero0"),
        ("gradient", strategy("zero0")),
        ("loss", "zero2"),
        pytest.param("loss", "zero0", marks=slow),
        pytest.param("loss", "zero3", marks=slow),
        pytest.param("gradient", "zero1 tp2", marks=slow),
        pytest.param("gradient", strategy("zero2"), marks=slow),
        pytest.param("gradient", strategy("zero3"), marks=slow),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else f"zero{value['zero_optimization']['stage']} fp32"
    ),
)
def test_what_is_not_finite_on_one_rank_stops_all(
    pools: Any, tmp_path: Path, kind: str, file: str | dict
) -> None:
    name, _, tp = file.partition(" tp") if isinstance(file, str) else (file, "", "")
    recipe = replace(
        BASE,
        ds_config=f"{name}.json" if isinstance(name, str) else name,
        tp=int(tp or 1),
        global_batch=2 if tp else 4,
        eval_every=0,
    )
    argv = ["--out", str(tmp_path / "run"), "--save_every", "1"]
    results = pools.run(2, poisoned, recipe=replace(recipe, adapt=poison), argv=argv, kind=kind)
    assert [code for code, _ in results] == [1, 1], results
    printed = results[0][1]
    assert (
        "stopped: step 3 has loss " in printed
        and "This step is not saved, the last good checkpoint is step 2" in printed
    )
    assert steps_done(tmp_path / "run") == 2
    assert checkpoints(tmp_path / "run") == [1, 2]
    assert find_faults(tmp_path / "run" / "checkpoints" / "step_00000002") == []
    if (kind, file) == ("gradient", "zero2"):  # the run resumes from the good step
        run, unbroken = tmp_path / "run", tmp_path / "unbroken"
        for argv in (["--out", str(run), "--resume", str(run)], ["--out", str(unbroken)]):
            results = pools.run(2, train, recipe=recipe, argv=argv)
            assert [code for code, _ in results] == [0, 0], results
        assert reproducible_values(metrics(tmp_path / "run")) == reproducible_values(
            metrics(tmp_path / "unbroken")
        )


def stop_after_two_steps(model: Any) -> Any:
    """Send SIGTERM to rank 1 during the second step, so that the third step is the last.

    Each step has two micro-batches.
    """
    seen = 0

    def hook(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # gives the listening thread time to receive it

    if os.environ["RANK"] == "1":
        model.get_output_embeddings().register_forward_hook(hook)
    return model


@pytest.mark.parametrize(("steps", "code"), [(4, 143), (3, 0)])
def test_a_stop_before_the_end_is_a_stop_and_at_the_last_step_the_end(
    pools: Any, tmp_path: Path, steps: int, code: int
) -> None:
    recipe = replace(BASE, adapt=stop_after_two_steps, eval_every=0, export=True)
    results = pools.run(
        2, train, recipe=recipe, argv=["--out", str(tmp_path / "run"), "--steps", str(steps)]
    )
    assert [result for result, _ in results] == [code, code], results
    assert checkpoints(tmp_path / "run") == [3]
    assert (tmp_path / "run" / "hf" / "config.json").exists() == (code == 0)


@pytest.mark.slow
def test_python_without_a_launcher_is_one_rank(launch: Callable[..., Job], tmp_path: Path) -> None:
    job = launch(sys.executable, NANO, "--tiny", "--steps", 2)
    assert job.wait(120) == 0, job.output[-8000:]
    job.wait_gone(20)
    assert [line["step"] for line in metrics(tmp_path / "runs" / "llama_nano_zero2_tiny")] == [1, 2]
    facts = json.loads((tmp_path / "runs" / "llama_nano_zero2_tiny" / "run.json").read_text())
    assert facts["mesh"]["world"] == 1
    assert list((tmp_path / "runs" / "llama_nano_zero2_tiny" / "hf").glob("*.safetensors"))


@pytest.mark.slow
def test_torchrun_starts_a_recipe(launch: Callable[..., Job], tmp_path: Path) -> None:
    job = launch(
        BIN / "torchrun",
        "--nproc_per_node",
        2,
        "--master_port",
        free_port(),
        NANO,
        "--tiny",
        "--steps",
        2,
        "--out",
        "run",
        "--no-wandb",
    )
    assert job.wait(120) == 0, job.output[-8000:]
    job.wait_gone(20)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["mesh"]["world"] == 2


@pytest.mark.slow
def test_torchrun_stops_on_sigterm_with_a_checkpoint(
    launch: Callable[..., Job], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = (NANO, "--tiny", "--steps", 100000, "--eval_every", 0, "--out", "run", "--no-wandb")
    job = launch(BIN / "torchrun", "--nproc_per_node", 2, "--master_port", free_port(), *words)
    job.wait_for(lambda: steps_done(run) > 2 or job.process.poll() is not None, 90)
    job.process.terminate()
    job.wait_gone(60)
    assert checkpoints(run) == [steps_done(run)]


def test_dry_run_prints_layout_batch_json_and_memory(
    launch: Callable[..., Job], tmp_path: Path
) -> None:
    words = (
        "--dry_run",
        "--world",
        8,
        "--tp",
        2,
        "--global_batch",
        64,
        "--deepspeed_config",
        "zero3.json",
        "--show",
        "json",
    )
    job = launch(sys.executable, NANO, *words)
    assert job.wait(60) == 0, job.output
    assert "layout   8 ranks: dp4_tp2" in job.output
    assert (
        "64 rows x 256 tokens = 16,384 tokens a step = 4 data-parallel x 4 micro_batch x 4"
        " accumulation" in job.output
    )
    text = job.output[job.output.index("{\n") : job.output.rindex("\n}\n") + 2]
    resolved = json.loads(text)
    assert resolved["train_batch_size"] == 64 and resolved["zero_optimization"]["stage"] == 3
    assert "auto" not in text
    assert "memory   accelerator, each rank: " in job.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "code", "told"),
    [
        (["--stepz", "3"], 2, "Did you mean --steps?"),
        (["--world", "8"], 2, "requires --dry_run"),
        (["--tiny", "--out", __file__ + "/run"], 1, "run: cannot be written: "),
        (["--tiny", "--tp", "2"], 1, "does not divide the 1 rank"),
        (["--help"], 0, "more flags, by subject: python "),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_needs_no_torch_takes_a_second_and_imports_none(
    tmp_path: Path, flags: list[str], code: int, told: str
) -> None:
    job = Job(tmp_path, [sys.executable, "-X", "importtime", str(NANO), *flags])
    try:
        assert job.wait(30) == code, job.output
    finally:
        job.close()
    assert job.output.count(told) == 1 and "Traceback" not in job.output
    imported = {
        line.rpartition("|")[2].strip()
        for line in job.output.splitlines()
        if line.startswith("import time:")
    }
    assert "recipekit.spec.recipe" in imported and not imported & {
        "torch",
        "transformers",
        "deepspeed",
        "datasets",
        "numpy",
        "wandb",
    }


@slow
def test_ctrl_c_under_deepspeed_ends_with_the_way_on(
    tmp_path: Path, ops: Callable[[str], None]
) -> None:
    """DeepSpeed's launcher ends every process below it, including W&B's processes.

    The prompt returns before the ranks have saved.
    """
    run = tmp_path / "run"
    job = Job(
        tmp_path,
        deepspeed(NANO, "--tiny", "--steps", 10**6, "--eval_every", 0, "--out", run),
        terminal=True,
    )
    try:
        job.wait_for(
            lambda: (
                (steps_done(run) > 2 and list(run.glob("wandb/*/*.wandb")))
                or job.process.poll() is not None
            ),
            600,
        )
        job.press_ctrl_c()
        job.wait_gone(300)
        job.wait_for(lambda: "stopped by SIGINT" in job.output, 10)
    finally:
        job.close()
    [step] = checkpoints(run)
    assert step == steps_done(run)
    # Skip the lines that DeepSpeed and the step print.
    *_, last = [
        line.strip()
        for line in job.output.splitlines()
        if line.strip() and not re.match(r"\S*\[20|\w+ \d+/", line)
    ]
    told = (
        f"stopped by SIGINT after step {step} of 1000000. Its checkpoint is complete. Continue"
        " with: deepspeed --num_gpus 2 "
    )
    assert last.startswith(told) and last.endswith(
        f"{NANO} --tiny --steps 1000000 --eval_every 0 --out {run}"
    ), job.output[-3000:]
    assert "stopped recording" not in job.output
    assert read_exit_codes(run)[-1:] == [130]
