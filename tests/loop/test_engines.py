"""PyTorch's DDP and FSDP2 as engines.

They must train like DeepSpeed, write the same files, and print the same messages.
"""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from job import NANO, Job, checkpoints, command_line, deepspeed, metrics, reproducible_values
from parity import (
    Case,
    accumulating,
    compare,
    compare_bf16,
    each,
    recipe_for,
    reference,
    train_in_layout,
)
from recipekit.architectures.small_files import CARD_FILE
from recipekit.dslint.baseline import check_precision
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from shipped_jsons import strategy
from short_runs import BASE, GPT2, train
from torch_engines import TORCH, exported, plain_in_bf16, run_engine

slow = pytest.mark.slow
FP32 = {"precision": "fp32"}


CASES = [
    Case("ddp dp2", 2, "ddp"),
    Case("fsdp2 dp2, tied", 2, "fsdp2", model="tied"),
    Case("fsdp2 dp4, tied", 4, "fsdp2", model="tied", slow=True),
    Case("ddp dp1", 1, "ddp", slow=True),
    Case("fsdp2 dp1", 1, "fsdp2", slow=True),
    Case("fsdp2 dp2", 2, "fsdp2", slow=True),
    Case("ddp dp4, tied", 4, "ddp", model="tied", slow=True),
    Case("ddp dp4, one micro-batch", 4, "ddp", {"micro_batch": 2}, slow=True),
    Case("fsdp2 dp2, one micro-batch", 2, "fsdp2", {"micro_batch": 4}, slow=True),
    Case("ddp dp2, checkpointing", 2, "ddp", {"activation_checkpointing": True}, slow=True),
    Case("fsdp2 dp2, checkpointing", 2, "fsdp2", {"activation_checkpointing": True}, slow=True),
    Case("ddp dp2, experts", 2, "ddp", model="moe", slow=True),
    Case("fsdp2 dp2, experts", 2, "fsdp2", model="moe", slow=True),
    Case("ddp dp2, strong clipping", 2, "ddp", numbers={"gradient_clipping": 0.1}, slow=True),
    Case("fsdp2 dp2, no clipping", 2, "fsdp2", numbers={"gradient_clipping": 0.0}, slow=True),
    Case("chats ddp dp2", 2, "ddp", corpus="chats", slow=True),
    Case("chats fsdp2 dp2", 2, "fsdp2", corpus="chats", slow=True),
]


@each(CASES)
def test_engine_trains_like_plain_pytorch(pools, tmp_path, case):
    more = {"tokenizer": "bytes"} if case.corpus else {}
    out = run_engine(
        pools,
        tmp_path / "run",
        case.file,
        case.world,
        case.model,
        **case.layout,
        **case.both,
        **more,
    )
    compare(out, reference(case.model, **case.both))


@slow
@pytest.mark.parametrize("engine", TORCH)
def test_engine_trains_like_plain_pytorch_in_bf16(pools, tmp_path, monkeypatch, engine):
    """Every loss is within 3 x the noise of the reference.

    The noise is the largest difference between single-process runs that differ only in how they
    split the batch.
    """
    monkeypatch.setattr(
        parity,
        "reference",
        lambda model, micro_batch, bf16: plain_in_bf16(engine, micro_batch),
    )
    compare_bf16(run_engine(pools, tmp_path / "run", engine, 2, precision="bf16"), engine)


def with_a_scale_that_overflows(recipe: Recipe, config: dict[str, Any], out: str) -> int:
    """Run the real loop on a rank; the first gradients are too large for fp16."""
    scaler = torch.amp.GradScaler
    torch.amp.GradScaler = functools.partial(scaler, init_scale=2.0**21)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return train_in_layout(recipe, config, out)
    finally:
        torch.amp.GradScaler = scaler


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=slow)])
def test_fp16_scales_the_loss_and_resumes_with_the_scale(pools, tmp_path, engine):
    """Each step whose gradient overflows is skipped on every rank and halves the scale.

    A resume continues with the saved scale.
    """
    for name, stop_at in (("run", 0), ("stopped", 3), ("stopped", 0)):
        recipe = recipe_for(
            "untied", **accumulating(2), engine=engine, precision="fp16", lr=1e-3, stop_at=stop_at
        )
        assert pools.run(
            2, with_a_scale_that_overflows, recipe=recipe, config={}, out=str(tmp_path / name)
        ) == [0, 0]
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("run", "stopped")]
    assert losses[0] == losses[1]
    saved = torch.load(
        tmp_path / "run/checkpoints/step_00000010/mp_rank_00_model_states.pt", weights_only=False
    )
    assert 0 < saved["skipped_steps"] < 8 and saved["global_steps"] == 10
    assert saved["loss_scale"]["scale"] == 2.0**21 / 2 ** saved["skipped_steps"]


@slow
@pytest.mark.parametrize("engine", TORCH)
def test_fp16_trains_like_fp32(pools, tmp_path, engine):
    losses = [
        [
            line["loss"]
            for line in metrics(
                run_engine(pools, tmp_path / precision, engine, 2, precision=precision, lr=1e-3)
            )
        ]
        for precision in ("fp16", "fp32")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)


def test_a_precision_is_refused_where_another_fits():
    assert "Use --precision bf16" in str(check_precision("ddp", "fp16", "NVIDIA H100", True)[0])
    assert "Tesla V100 does not support bf16. Use --precision fp16" in str(
        check_precision("fsdp2", "bf16", "Tesla V100", False)[0]
    )
    assert not check_precision("ddp", "bf16", "NVIDIA H100", True) + check_precision(
        "ddp", "fp16", "Tesla V100", False
    )
    assert not check_precision("deepspeed", "bf16", "Tesla V100", False)


@pytest.fixture
def go(pools: Any) -> Callable[..., str]:
    """Return a function that runs a recipe on two ranks (or `world`) and returns rank 0's output.

    The function checks that every rank exits with 0.
    """

    def go(out: Path, *argv: object, recipe: Recipe, world: int = 2) -> str:
        results = pools.run(world, train, recipe=recipe, argv=["--out", str(out), *map(str, argv)])
        assert [result for result, _ in results] == [0] * world, results
        return results[0][1]

    return go


RESUMED = [
    pytest.param({"engine": "fsdp2", "model": GPT2}, 2, id="fsdp2 dropout"),
    pytest.param({"engine": "ddp", "model": GPT2}, 2, id="ddp dropout", marks=slow),
    pytest.param({"engine": "fsdp2"}, 2, id="fsdp2", marks=slow),
    pytest.param({"engine": "ddp", "precision": "fp32"}, 4, id="ddp fp32 dp4", marks=slow),
    pytest.param({"engine": "ddp"}, 4, id="ddp dp4", marks=slow),
    # 1 / 3 cannot be represented exactly in fp32.
    pytest.param(
        {"engine": "ddp", "precision": "fp32", "global_batch": 6}, 3, id="ddp fp32 dp3", marks=slow
    ),
    pytest.param(
        {"engine": "fsdp2", "model": GPT2, "activation_checkpointing": True},
        4,
        id="fsdp2 dp4 dropout, recomputed",
        marks=slow,
    ),
]


@pytest.mark.parametrize(("fields", "world"), RESUMED)
def test_a_resumed_run_is_the_unbroken_run_bit_for_bit(go, tmp_path, fields, world):
    """The run evaluates after steps 2, 4 and 6 and stops after step 4.

    FSDP2 gathers its root module at the end of an evaluation.
    """
    recipe = dataclasses.replace(
        BASE, **{"ds_config": Recipe.ds_config, "global_batch": 8, "export": True} | fields
    )
    go(tmp_path / "unbroken", recipe=recipe, world=world)
    go(tmp_path / "stopped", "--stop_at", 4, recipe=recipe, world=world)
    assert f"resumed from {tmp_path}/stopped/checkpoints/step_00000004" in go(
        tmp_path / "stopped", recipe=recipe, world=world
    )
    assert reproducible_values(metrics(tmp_path / "stopped")) == reproducible_values(
        metrics(tmp_path / "unbroken")
    )
    weights = [
        (tmp_path / name / "hf" / "model.safetensors").read_bytes()
        for name in ("stopped", "unbroken")
    ]
    assert weights[0] == weights[1]


def command_of(engine: str, out: Path) -> list[str]:
    flags = (
        "--tiny",
        "--steps",
        40,
        "--save_every",
        4,
        "--eval_every",
        0,
        "--no-wandb",
        "--no-export",
        "--engine",
        engine,
        "--out",
        out,
    )
    return deepspeed(NANO, *flags)


def kill_rank_1(job: Job, run: Path) -> int:
    """Kill rank 1 with kill -9 once a checkpoint exists; return the last checkpoint's step."""
    try:
        job.wait_for(lambda: checkpoints(run) or job.process.poll() is not None, 90)
        ranks = {
            process.environ()["RANK"]: process
            for process in job.processes()
            if str(NANO) in command_line(process) and "RANK" in process.environ()
        }
        ranks["1"].kill()
        assert job.wait(90) != 0
    finally:
        job.close()
    return max(checkpoints(run))


def complete(job: Job) -> None:
    try:
        assert job.wait(150) == 0, job.output
    finally:
        job.close()


@slow
@pytest.mark.parametrize("engine", TORCH)
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, engine):
    """The same command resumes the run."""
    killed, unbroken = tmp_path / "killed", tmp_path / "unbroken"
    assert 0 < kill_rank_1(Job(tmp_path, command_of(engine, killed)), killed) < 40
    complete(Job(tmp_path, command_of(engine, killed)))
    complete(Job(tmp_path, command_of(engine, unbroken)))
    assert reproducible_values(metrics(killed)) == reproducible_values(metrics(unbroken))


WAYS = [
    pytest.param(
        ("zero3", 4), ("fsdp2", 2), ("ddp", 4), id="zero3 dp4, fsdp2 dp2, ddp dp4", marks=slow
    ),
    pytest.param(("ddp", 2), ("zero3", 2), ("fsdp2", 2), id="ddp, zero3, fsdp2", marks=slow),
    pytest.param(("fsdp2", 2), ("ddp", 2), ("zero3", 4), id="fsdp2, ddp, zero3 dp4", marks=slow),
    pytest.param(("fsdp2", 4), ("zero0", 2), ("ddp", 2), id="fsdp2 dp4, zero0, ddp", marks=slow),
    pytest.param(
        ("ddp", 4), ("zero1", 2), ("fsdp2", 4), id="ddp dp4, zero1, fsdp2 dp4", marks=slow
    ),
]


@pytest.mark.parametrize(("first", "second", "third"), WAYS)
def test_a_run_goes_on_under_another_engine(pools, tmp_path, first, second, third):
    """A run resumes from its checkpoints under three engines and on a different number of ranks.

    All ten steps must equal the steps of plain PyTorch.
    """
    for (engine, world), stop_at in zip((first, second, third), (4, 7, 0), strict=True):
        run_engine(pools, tmp_path / "run", engine, world, stop_at=stop_at)
    compare(tmp_path / "run", reference("untied"))


@slow
@pytest.mark.parametrize("model", ["untied", "tied"])
def test_every_engine_exports_the_same_bits(pools, tmp_path, model):
    """All engines export the same checkpoint. Only the model card differs, because it states the
    engine.
    """
    out = run_engine(pools, tmp_path / "zero3", "zero3", 2, model)
    for engine in TORCH:
        shutil.copytree(out, tmp_path / engine)
        shutil.rmtree(tmp_path / engine / "hf")
        run_engine(pools, tmp_path / engine, engine, 2, model)
        assert all((tmp_path / name / "hf" / CARD_FILE).is_file() for name in ("zero3", engine))
        files = [
            sorted(file for file in (tmp_path / name / "hf").iterdir() if file.name != CARD_FILE)
            for name in ("zero3", engine)
        ]
        assert [file.name for file in files[0]] == [file.name for file in files[1]]
        assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]


def train_with_a_spare(recipe: Recipe, config: dict[str, Any], out: str) -> int:
    """Run the real loop on a rank with a model that contains an unused matrix."""
    from recipekit.planner import resolve

    empty_model = resolve.empty_model

    def with_a_spare(*arguments: Any, **named: Any) -> Any:
        model: Any = empty_model(*arguments, **named)
        model.register_parameter("spare", torch.nn.Parameter(torch.ones(5, 5, device="meta")))
        model.made["spare"] = torch.ones(5, 5)
        return model

    resolve.empty_model = with_a_spare
    try:
        return train_in_layout(recipe, config, out)
    finally:
        resolve.empty_model = empty_model


@slow
def test_a_parameter_that_no_rank_uses_decays_as_under_zero(pools, tmp_path):
    found = {}
    for engine in ("zero0", *TORCH):
        own = {"engine": engine, "precision": "fp32"} if engine in TORCH else {}
        recipe = recipe_for("untied", **accumulating(2), **own)
        config = {} if own else strategy(engine)
        assert pools.run(
            2, train_with_a_spare, recipe=recipe, config=config, out=str(tmp_path / engine)
        ) == [0, 0]
        found[engine] = exported(tmp_path / engine)["spare"]
    assert (found["zero0"] < 1).all()
    assert torch.equal(found["ddp"], found["zero0"]) and torch.equal(found["fsdp2"], found["zero0"])


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )


@slow
def test_ddp_trains_an_adapter_as_zero_does_and_resumes(pools, tmp_path):
    changes = {"adapt": with_lora, "lr": 1e-2, "warmup_steps": 0}
    for engine in ("zero0", "ddp"):
        run_engine(pools, tmp_path / engine, engine, 2, stop_at=5, **changes)
        run_engine(pools, tmp_path / engine, engine, 2, **changes)
    lines = [metrics(tmp_path / engine) for engine in ("zero0", "ddp")]
    assert [line["loss"] for line in lines[1]] == pytest.approx(
        [line["loss"] for line in lines[0]], rel=1e-5
    )
    assert lines[0][-1]["loss"] < lines[0][0]["loss"]
    theirs, ours = (exported(tmp_path / engine) for engine in ("zero0", "ddp"))
    assert theirs.keys() == ours.keys() and all(
        (ours[name] - value).abs().max() <= 1e-5 for name, value in theirs.items()
    )


REFUSED = [
    (
        ["--engine", "ddp", "--deepspeed_config", "zero1.json"],
        (
            "--deepspeed_config zero1.json: applies only to DeepSpeed, and torch's DDP does not"
            " read it"
        ),
    ),
    (["--precision", "fp32"], "--precision fp32: applies only to the engines ddp and fsdp2"),
    (
        ["--engine", "fsdp2", "--tp", "2"],
        "tp = 2 with engine = fsdp2: torch's FSDP2 supports only data parallelism. Use --tp 1",
    ),
    (["--engine", "fsdp2", "--pp", "2"], "pp = 2 with engine = fsdp2"),
    (["--engine", "ddp", "--sp", "2"], "sp = 2 with engine = ddp"),
    (
        ["--engine", "ddp", "--save_in_background"],
        (
            "save_in_background with engine = ddp: requires DeepSpeed, because torch's engines"
            " gather the states"
        ),
    ),
    (["--engine", "fsdp"], "--engine fsdp: is not known. Use --engine deepspeed or ddp or fsdp2"),
]


@pytest.mark.parametrize(("argv", "said"), REFUSED, ids=[" ".join(argv) for argv, _ in REFUSED])
def test_what_an_engine_does_not_read_is_refused(monkeypatch, argv, said):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError) as refusal:
        resolve_run(parse(recipe_for("untied"), Path("engines.py"), ["--tiny", *argv]))
    assert said in str(refusal.value).replace("\n", " ")


STATED = [
    (
        {"engine": "ddp", "ds_config": "zero3.json"},
        "--deepspeed_config zero3.json: applies only to DeepSpeed",
        "fsdp2",
        "The recipe's JSON (zero3.json) is not used",
    ),
    (
        {"precision": "fp32"},
        "--precision fp32: applies only to the engines ddp and fsdp2",
        "deepspeed",
        "The recipe's precision (fp32) is not used",
    ),
]


@pytest.mark.parametrize(("fields", "said", "typed", "note"), STATED, ids=["a JSON", "a precision"])
def test_what_a_recipe_states_is_not_ignored_in_silence(fields, said, typed, note):
    recipe = dataclasses.replace(recipe_for("untied"), **fields)
    with pytest.raises(ConfigError) as refusal:
        resolve_run(parse(recipe, Path("engines.py"), ["--tiny"]))
    assert said in str(refusal.value).replace("\n", " ")
    assert any(
        note in told
        for told in resolve_run(
            parse(recipe, Path("engines.py"), ["--tiny", "--engine", typed])
        ).notes
    )


def test_an_adapter_is_refused_under_fsdp2():
    with pytest.raises(ConfigError, match="adapt with engine = fsdp2: FSDP2 shards each layer"):
        resolve_run(
            parse(
                recipe_for("untied", engine="fsdp2", adapt=with_lora),
                Path("engines.py"),
                ["--tiny"],
            )
        )


def test_an_engine_typed_over_a_json_says_that_the_json_is_not_used():
    plan = resolve_run(
        parse(
            dataclasses.replace(recipe_for("untied"), ds_config="zero3.json"),
            Path("engines.py"),
            ["--tiny", "--engine", "fsdp2"],
        )
    )
    assert "engine: torch's FSDP2 in bf16. The recipe's JSON (zero3.json) is not used" in plan.notes
    assert (
        plan.ds_path is None
        and plan.ds_config["zero_optimization"] == {"stage": 0}
        and json.dumps(plan.ds_config)
    )
