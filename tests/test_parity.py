"""Any layout, same training: losses, gradient norms and final weights are those of plain PyTorch (tests/reference.py)."""

import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from recipekit.architecture import SHIPPED, default_config
from recipekit.plan import make_plan
from recipekit.recipe import Recipe, parse
from reference import Trained, train_plain

STEPS = 10
MODELS = {
    "untied": "meta-llama/Llama-3.1-8B",
    "tied": "meta-llama/Llama-3.2-1B",
    "qwen3": "Qwen/Qwen3-0.6B",
    "moe": "Qwen/Qwen3-30B-A3B",
    "gpt2": "openai-community/gpt2",
}
NUMBERS = dict(lr=3e-4, eps=1e-6, steps=STEPS, seq_len=64, global_batch=8, warmup_steps=2, weight_decay=0.1, eval_every=STEPS, eval_rows=8, wandb=False, seed=3)


def strategy(file: str, bf16: bool = False) -> dict[str, Any]:
    """A shipped JSON; in fp32 without its bf16 block and what depends on it."""
    config = json.loads((Path(__file__).parents[1] / "ds_configs" / f"{file}.json").read_text())
    for block in ("offload_param", "offload_optimizer"):
        if "buffer_size" in (offload := config["zero_optimization"].get(block, {})):
            offload["buffer_size"] = 1_000_000  # DeepSpeed pins buffer_count such buffers and a warm worker never gives them back
    if not bf16:
        config["bf16"] = {"enabled": False}
        config.pop("data_types", None)
    return config


@functools.cache
def without_dropout(model: str) -> str:
    """A folder with the model's config, its dropout switched off: two runs with dropout are not comparable."""
    config = json.loads((SHIPPED / f"{model.replace('/', '--')}.json").read_text())
    folder = Path(tempfile.mkdtemp(prefix="parity_"))
    (folder / "config.json").write_text(json.dumps(config | {key: 0.0 for key in config if key.endswith("pdrop")}))
    return str(folder)


@functools.cache
def family(model_type: str) -> str:
    """A folder with the default config of a family."""
    folder = Path(tempfile.mkdtemp(prefix="parity_"))
    (folder / "config.json").write_text(json.dumps(default_config(model_type).to_dict()))
    return str(folder)


def recipe_for(model: str, **changes: Any) -> Recipe:
    """`model` is a key of MODELS, or the model type of a family."""
    name = family(model) if model not in MODELS else without_dropout(MODELS[model]) if model == "gpt2" else MODELS[model]
    if model == "gemma2":
        changes["attention"] = "eager"  # its soft caps are in no other
    return Recipe(model=name, ds_config={}, **(NUMBERS | {"micro_batch": 1} | changes))


def accumulating(world: int, **layout: Any) -> dict[str, Any]:
    """The layout with a micro-batch that leaves just enough of them to accumulate: two, or two for each pipeline stage."""
    model_parallel = layout.get("tp", 1) * layout.get("sp", 1) * (pp := layout.get("pp", 1))
    return {"micro_batch": max(1, NUMBERS["global_batch"] * model_parallel // world // (2 * pp))} | layout


def train_in_layout(recipe: Recipe, config: dict[str, Any], out: str) -> int:
    """Runs on every rank of a pool: the real loop, as `run` starts it."""
    from dataclasses import replace

    from recipekit.train import main

    recipe = replace(recipe, ds_config=config, out=out)
    command = parse(recipe, Path("parity.py"), ["--tiny", *pinned(recipe)])
    sys.argv = ["parity.py"]
    return main(make_plan(command))


def pinned(recipe: Recipe) -> list[str]:
    """--tiny must not change the numbers of this test, so they are typed."""
    names = ("dataset", "micro_batch", "global_batch", "seq_len", "eval_rows", "warmup_steps", "tp", "pp", "sp", "ep")
    names += ("dataset",) if recipe.dataset != "builtin" else ()
    return [word for name in names for word in (f"--{name}", str(getattr(recipe, name)))]


@functools.cache
def reference(model: str, micro_batch: int = 1, bf16: bool = False, **changes: Any) -> Trained:
    recipe = recipe_for(model, micro_batch=micro_batch, **changes)
    os.environ.pop("WORLD_SIZE", None)
    plan = make_plan(
        parse(Recipe(**(vars(recipe) | {"ds_config": strategy("zero0", bf16), "out": "/nonexistent"})), Path("parity.py"), ["--tiny", *pinned(recipe)])
    )
    assert plan.model_config is not None
    return train_plain(plan.recipe, plan.model_config, STEPS, bf16)


def compare(out: Path, expected: Trained, check_weights: bool = True) -> None:
    """The tolerances of a layout in fp32: 1e-5 relative for losses and norms, 1e-5 absolute for every weight."""
    from safetensors.torch import load_file

    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == pytest.approx(expected.losses, rel=1e-5)
    assert [line["grad_norm"] for line in lines] == pytest.approx(expected.grad_norms, rel=1e-5)
    if expected.eval_loss is not None:
        assert lines[-1]["eval_loss"] == pytest.approx(expected.eval_loss, rel=1e-5)
    if check_weights:
        got = {name: value for file in (out / "hf").glob("*.safetensors") for name, value in load_file(file).items()}
        assert got.keys() == expected.weights.keys()
        for name, value in expected.weights.items():
            worst = (got[name] - value).abs().max().item()
            assert worst <= 1e-5, f"{name} differs by {worst}"


CASES = [
    *((f"zero{stage} dp{dp}", dp, f"zero{stage}", {}, {}) for stage in range(4) for dp in (1, 2, 4)),
    *((f"zero{stage} tp2", 2, f"zero{stage}", {"tp": 2}, {}) for stage in range(4)),
    *((f"zero{stage} tp2 dp2", 4, f"zero{stage}", {"tp": 2}, {}) for stage in (0, 1, 3)),
    ("zero2 optimizer on the CPU", 2, "zero2_cpu", {}, {}),
    ("zero3 optimizer and parameters on the CPU", 2, "zero3_cpu", {}, {}),
    ("zero3 on NVMe", 2, "zero3_nvme", {}, {}),
    ("micro_batch 1", 2, "zero1", {"micro_batch": 1}, {}),
    ("micro_batch 4, no accumulation", 2, "zero2", {"micro_batch": 4}, {}),
    ("activation checkpointing zero0", 2, "zero0", {"activation_checkpointing": True}, {}),
    ("activation checkpointing zero3", 2, "zero3", {"activation_checkpointing": True}, {}),
    ("activation checkpointing zero3 tp2", 2, "zero3", {"activation_checkpointing": True, "tp": 2}, {}),
    ("no clipping", 2, "zero2", {}, {"gradient_clipping": 0.0}),
    ("strong clipping", 4, "zero1", {"tp": 2}, {"gradient_clipping": 0.1}),
]


QUICK = {  # the others are slow tests
    *("zero0 dp1", "zero0 dp2", "zero1 dp2", "zero2 dp2", "zero3 dp2", "zero1 dp4", "zero0 tp2", "zero1 tp2", "zero3 tp2", "zero1 tp2 dp2", "zero3 tp2 dp2"),
    *("zero2 optimizer on the CPU", "zero3 optimizer and parameters on the CPU", "zero3 on NVMe", "micro_batch 1", "activation checkpointing zero3 tp2"),
    "strong clipping",
}


@pytest.mark.parametrize(
    ("world", "file", "layout", "numbers"), [pytest.param(*case[1:], id=case[0], marks=() if case[0] in QUICK else pytest.mark.slow) for case in CASES]
)
def test_layout_trains_like_plain_pytorch(pools, ops, tmp_path, world, file, layout, numbers):
    for op in {"zero2_cpu": ["cpu_adam"], "zero3_cpu": ["cpu_adam"], "zero3_nvme": ["cpu_adam", "async_io"]}.get(file, []):
        ops(op)
    recipe = recipe_for("untied", **accumulating(world, **layout), **numbers)
    codes = pools.run(world, train_in_layout, recipe=recipe, config=strategy(file), out=str(tmp_path / "run"))
    assert codes == [0] * world
    compare(tmp_path / "run", reference("untied", **numbers))


@pytest.mark.parametrize("file", [pytest.param("zero1", marks=pytest.mark.slow), "zero3"])
@pytest.mark.parametrize(("model", "tp"), [("tied", 1), ("tied", 2), pytest.param("qwen3", 1, marks=pytest.mark.slow), ("qwen3", 2), ("gpt2", 1)])
def test_model_trains_like_plain_pytorch(pools, tmp_path, model, tp, file):
    recipe = recipe_for(model, **accumulating(2, tp=tp))
    pools.run(2, train_in_layout, recipe=recipe, config=strategy(file), out=str(tmp_path / "run"))
    compare(tmp_path / "run", reference(model))


BF16_CASES = [("zero0", 1), ("zero1", 1), ("zero2", 1), ("zero3", 1), ("zero1", 2), ("zero3", 2), ("zero3_cpu", 1)]
QUICK_BF16 = [("zero2", 1), ("zero3", 1), ("zero1", 2)]


@pytest.mark.parametrize(("file", "tp"), [pytest.param(*case, marks=() if case in QUICK_BF16 else pytest.mark.slow) for case in BF16_CASES])
def test_layout_trains_like_plain_pytorch_in_bf16(pools, tmp_path, file, tp):
    """Every loss within 3 x the largest difference between single-process runs that only split the batch differently."""
    pools.run(2, train_in_layout, recipe=recipe_for("untied", **accumulating(2, tp=tp)), config=strategy(file, bf16=True), out=str(tmp_path / "run"))
    compare_bf16(tmp_path / "run", f"{file} tp{tp}")


def compare_bf16(out: Path, layout: str) -> None:
    plain = [reference("untied", micro_batch=micro_batch, bf16=True).losses for micro_batch in (8, 4, 2, 1)]
    noise = max(max(step) - min(step) for step in zip(*plain, strict=True))
    losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    middle = [sum(step) / len(step) for step in zip(*plain, strict=True)]
    worst = max(abs(mine - theirs) for mine, theirs in zip(losses, middle, strict=True))
    print(f"{layout}: worst difference {worst:.1e}, noise of the reference {noise:.1e}")
    assert 0 < noise < 0.05
    assert worst <= 3 * noise


def adam_steps(steps: int, weight_decay: float) -> tuple[float, float, float]:
    """Largest differences of the weights after `steps` on the same gradients: CPU Adam from torch's AdamW, and each from fp64."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    generator = torch.Generator().manual_seed(0)
    start = torch.randn(100_003, generator=generator)  # no multiple of the vector width
    mine, theirs, exact = (torch.nn.Parameter(start.clone().to(dtype)) for dtype in (torch.float32, torch.float32, torch.float64))
    numbers = dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-6, weight_decay=weight_decay)
    optimizers = [DeepSpeedCPUAdam([mine], adamw_mode=True, **numbers), torch.optim.AdamW([theirs], **numbers), torch.optim.AdamW([exact], **numbers)]
    for _ in range(steps):
        gradient = torch.randn(start.shape, generator=generator)
        for parameter in (mine, theirs, exact):
            parameter.grad = gradient.to(parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()
    mine, theirs, exact = mine.detach(), theirs.detach(), exact.detach()
    return tuple((a.double() - b).abs().max().item() for a, b in ((mine, theirs), (mine, exact), (theirs, exact)))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_cpu_adam_is_adamw(pools, ops, weight_decay):
    """DeepSpeed's CPU Adam after 100 steps is as near to AdamW in fp64 as torch's fp32 AdamW is; without decay the two agree to one rounding."""
    ops("cpu_adam")
    apart, mine, theirs = pools.run(1, adam_steps, steps=100, weight_decay=weight_decay)[0]
    print(f"weight decay {weight_decay}: CPU Adam to torch {apart:.1e}, to fp64 {mine:.1e}; torch to fp64 {theirs:.1e}")
    assert mine <= 1.2 * theirs
    assert weight_decay or apart < 5e-7  # one unit in the last place of weights up to 4.5


def test_every_shipped_architecture_is_a_known_model():
    from transformers import AutoConfig

    for file in SHIPPED.glob("*.json"):
        config = json.loads(file.read_text())
        AutoConfig.for_model(config.pop("model_type"), **config)
