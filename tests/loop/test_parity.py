"""Any layout, same training: losses, gradient norms and final weights are those of plain PyTorch
(tests/support/reference.py).
"""

import contextlib
import copy
import functools
import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recipekit.architectures.families import default_config
from recipekit.architectures.lookup import SHIPPED
from recipekit.data.lanes import DataRank
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import request_of
from recipekit.data.stream import open_stream
from recipekit.parallel.sequence import own_part
from recipekit.plan import make_plan
from recipekit.spec.command import parse
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import numbers, read_metrics, unit_of
from reference import Trained, train_plain

STEPS = 10
MODELS = {
    "untied": "meta-llama/Llama-3.1-8B",
    "tied": "meta-llama/Llama-3.2-1B",
    "qwen3": "Qwen/Qwen3-0.6B",
    "moe": "Qwen/Qwen3-30B-A3B",
    "gpt2": "openai-community/gpt2",
}
NUMBERS = dict(
    lr=3e-4,
    eps=1e-6,
    steps=STEPS,
    seq_len=64,
    global_batch=8,
    warmup_steps=2,
    weight_decay=0.1,
    eval_every=STEPS,
    eval_rows=8,
    wandb=False,
    seed=3,
)


def strategy(file: str, bf16: bool = False) -> dict[str, Any]:
    """A shipped JSON; in fp32 without its bf16 block and what depends on it."""
    config = json.loads((Path(__file__).parents[2] / "ds_configs" / f"{file}.json").read_text())
    for block in ("offload_param", "offload_optimizer"):
        if "buffer_size" in (offload := config["zero_optimization"].get(block, {})):
            # DeepSpeed pins buffer_count such buffers and a warm worker never gives them back
            offload["buffer_size"] = 1_000_000
    if "zero_hpz_partition_size" in (zero := config["zero_optimization"]):
        # four ranks are two hosts, and each allocates such a bucket
        zero |= {"zero_hpz_partition_size": 2, "reduce_bucket_size": 1_000_000}
    if not bf16:
        config["bf16"] = {"enabled": False}
        config.pop("data_types", None)
    return config


@functools.cache
def without_dropout(model: str) -> str:
    """A folder with the model's config, its dropout switched off: two runs with dropout are not
    comparable.
    """
    config = json.loads((SHIPPED / f"{model.replace('/', '--')}.json").read_text())
    folder = Path(tempfile.mkdtemp(prefix="parity_"))
    (folder / "config.json").write_text(
        json.dumps(config | {key: 0.0 for key in config if key.endswith("pdrop")})
    )
    return str(folder)


@functools.cache
def family(model_type: str) -> str:
    """A folder with the default config of a family."""
    folder = Path(tempfile.mkdtemp(prefix="parity_"))
    (folder / "config.json").write_text(json.dumps(default_config(model_type).to_dict()))
    return str(folder)


def recipe_for(model: str, **changes: Any) -> Recipe:
    """`model` is a key of MODELS, or the model type of a family."""
    name = (
        family(model)
        if model not in MODELS
        else without_dropout(MODELS[model])
        if model == "gpt2"
        else MODELS[model]
    )
    if model in ("gemma2", "hy_v4"):
        changes["attention"] = "eager"  # soft caps, streams of tokens: in no other
    return Recipe(model=name, ds_config={}, **(NUMBERS | {"micro_batch": 1} | changes))


def accumulating(world: int, **layout: Any) -> dict[str, Any]:
    """The layout with a micro-batch that leaves just enough of them to accumulate: two, or two for
    each pipeline stage.
    """
    model_parallel = layout.get("tp", 1) * layout.get("sp", 1) * (pp := layout.get("pp", 1))
    return {
        "micro_batch": max(1, NUMBERS["global_batch"] * model_parallel // world // (2 * pp))
    } | layout


def train_in_layout(recipe: Recipe, config: dict[str, Any], out: str) -> int:
    """Runs on every rank of a pool: the real loop, as `run` starts it."""
    from recipekit.train import main

    recipe = replace(recipe, ds_config=config, out=out)
    command = parse(recipe, Path("parity.py"), ["--tiny", *pinned(recipe)])
    sys.argv = ["parity.py"]
    return main(make_plan(command))


def pinned(recipe: Recipe) -> list[str]:
    """--tiny must not change the numbers of this test, so they are typed."""
    names = (
        "dataset",
        "micro_batch",
        "global_batch",
        "seq_len",
        "eval_rows",
        "warmup_steps",
        "tp",
        "pp",
        "sp",
        "ep",
    )
    names += ("dataset",) if recipe.dataset != "builtin" else ()
    return [word for name in names for word in (f"--{name}", str(getattr(recipe, name)))]


@functools.cache
def reference(model: str, micro_batch: int = 1, bf16: bool = False, **changes: Any) -> Trained:
    recipe = recipe_for(model, micro_batch=micro_batch, **changes)
    if recipe.attention == "auto":
        recipe = replace(recipe, attention="sdpa")  # transformers' own
    os.environ.pop("WORLD_SIZE", None)
    plan = make_plan(
        parse(
            Recipe(
                **(vars(recipe) | {"ds_config": strategy("zero0", bf16), "out": "/nonexistent"})
            ),
            Path("parity.py"),
            ["--tiny", *pinned(recipe)],
        )
    )
    assert plan.model_config is not None
    return train_plain(plan.recipe, plan.model_config, STEPS, bf16)


def compare(out: Path, expected: Trained, check_weights: bool = True) -> None:
    """The tolerances of a layout in fp32: 1e-5 relative for losses and norms, 1e-5 absolute for
    every weight.
    """
    from safetensors.torch import load_file

    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == pytest.approx(expected.losses, rel=1e-5)
    assert [line["grad_norm"] for line in lines] == pytest.approx(expected.grad_norms, rel=1e-5)
    assert [line["lr"] for line in lines] == pytest.approx(expected.lrs, rel=1e-9)
    assert [line[unit_of(line)] for line in lines] == expected.tokens
    if expected.eval_loss is not None:
        assert lines[-1]["eval_loss"] == pytest.approx(expected.eval_loss, rel=1e-5)
    if check_weights:
        got = {
            name: value
            for file in (out / "hf").glob("*.safetensors")
            for name, value in load_file(file).items()
        }
        assert got.keys() == expected.weights.keys()
        for name, value in expected.weights.items():
            worst = (got[name] - value).abs().max().item()
            assert worst <= 1e-5, f"{name} differs by {worst}"


@dataclass(frozen=True)
class Case:
    """A layout that trains like plain PyTorch; `layout` are fields of its recipe alone, `numbers`
    those that the reference has too.
    """

    name: str
    world: int
    file: str
    layout: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    model: str = "untied"
    corpus: str = ""  # of `corpus`, or the builtin one
    slow: bool = False

    @property
    def both(self) -> dict[str, Any]:
        """The fields of the recipe that the reference has too."""
        return self.numbers | (
            {"dataset": corpus(self.corpus), "task": TASKS[self.corpus]} if self.corpus else {}
        )


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(case, id=case.name, marks=pytest.mark.slow if case.slow else ())
            for case in cases
        ],
    )


TP2 = {"tp": 2}
TASKS = {"chats": "sft", "borders": "pretrain"}
CASES = [
    Case("zero0 dp1", 1, "zero0"),
    Case("zero0 dp2", 2, "zero0"),
    Case("zero0 dp4", 4, "zero0", slow=True),
    Case("zero1 dp1", 1, "zero1", slow=True),
    Case("zero1 dp2", 2, "zero1"),
    Case("zero1 dp4", 4, "zero1", slow=True),
    Case("zero2 dp1", 1, "zero2", slow=True),
    Case("zero2 dp2", 2, "zero2"),
    Case("zero2 dp4", 4, "zero2", slow=True),
    Case("zero3 dp1", 1, "zero3", slow=True),
    Case("zero3 dp2", 2, "zero3"),
    Case("zero3 dp4", 4, "zero3", slow=True),
    Case("zero0 tp2", 2, "zero0", TP2),
    Case("zero1 tp2", 2, "zero1", TP2),
    Case("zero2 tp2", 2, "zero2", TP2, slow=True),
    Case("zero3 tp2", 2, "zero3", TP2, slow=True),
    Case("zero0 tp2 dp2", 4, "zero0", TP2, slow=True),
    Case("zero1 tp2 dp2", 4, "zero1", TP2, slow=True),
    Case("zero3 tp2 dp2", 4, "zero3", TP2, slow=True),
    Case("zero2 optimizer on the CPU", 2, "zero2_cpu", slow=True),
    Case("zero3 optimizer and parameters on the CPU", 2, "zero3_cpu", slow=True),
    Case("zero3 on NVMe", 2, "zero3_nvme"),
    Case("zero3 on two hosts of two ranks", 4, "zero3_hosts", slow=True),
    Case("micro_batch 1", 2, "zero1", {"micro_batch": 1}, slow=True),
    Case("micro_batch 4, no accumulation", 2, "zero2", {"micro_batch": 4}, slow=True),
    Case(
        "activation checkpointing zero0", 2, "zero0", {"activation_checkpointing": True}, slow=True
    ),
    Case(
        "activation checkpointing zero3", 2, "zero3", {"activation_checkpointing": True}, slow=True
    ),
    Case(
        "activation checkpointing zero3 tp2",
        2,
        "zero3",
        {"activation_checkpointing": True, "tp": 2},
        slow=True,
    ),
    Case("no clipping", 2, "zero2", numbers={"gradient_clipping": 0.0}, slow=True),
    Case("strong clipping", 4, "zero1", TP2, {"gradient_clipping": 0.1}, slow=True),
    # a norm below the limit is not raised to it; Adam, which does not see a constant factor, sees
    # one that changes with the norm
    Case("a limit above every norm", 1, "zero0", numbers={"gradient_clipping": 1e4}),
    Case(
        "a linear schedule that ends above zero",
        1,
        "zero0",
        numbers={"schedule": "linear", "min_lr": 1e-4, "warmup_steps": 3},
        slow=True,
    ),
    # its activation has parameters that the tensor plan does not name and every rank computes with
    # its own part of
    Case("a parameter that the plan does not name", 2, "zero0", TP2, model="apertus"),
]


@each(CASES)
def test_layout_trains_like_plain_pytorch(pools, ops, tmp_path, case):
    for op in {
        "zero2_cpu": ["cpu_adam"],
        "zero3_cpu": ["cpu_adam"],
        "zero3_nvme": ["cpu_adam", "async_io"],
    }.get(case.file, []):
        ops(op)
    train_and_compare(pools, tmp_path / "run", case)


def train_and_compare(pools: Any, out: Path, case: Case) -> None:
    recipe = recipe_for(case.model, **accumulating(case.world, **case.layout), **case.both)
    codes = pools.run(
        case.world, train_in_layout, recipe=recipe, config=strategy(case.file), out=str(out)
    )
    assert codes == [0] * case.world
    compare(out, reference(case.model, **case.both))


@functools.cache
def corpus(kind: str) -> str:
    """Chats whose answers have 1 to 40 letters, or documents of 5 to 60 letters, so that every row
    and every rank has another number of labels.
    """
    draw = random.Random(kind)

    def text(longest):
        return "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(1, longest)))

    rows = [
        {
            "messages": [
                {"role": "user", "content": text(8)},
                {"role": "assistant", "content": f"{text(39)}."},
            ]
        }
        for _ in range(3000)
    ]
    rows = rows if kind == "chats" else [{"text": f"start{text(55)}"} for _ in range(3000)]
    file = Path(tempfile.mkdtemp(prefix="parity_")) / f"{kind}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


UNEQUAL = [
    Case("chats zero0 dp2", 2, "zero0", corpus="chats"),
    Case("chats zero2 dp2", 2, "zero2", corpus="chats", slow=True),
    Case("chats zero1 tp2 dp2", 4, "zero1", TP2, corpus="chats", slow=True),
    Case("chats zero1 sp2", 2, "zero1", {"sp": 2}, corpus="chats"),
    Case("chats zero1 pp2 dp2", 4, "zero1", {"pp": 2}, corpus="chats"),
    Case("document borders zero2 dp2", 2, "zero2", corpus="borders", slow=True),
    Case("document borders zero3 dp2", 2, "zero3", corpus="borders", slow=True),
]


@each(UNEQUAL)
def test_ranks_with_other_numbers_of_labels_train_like_plain_pytorch(pools, tmp_path, case):
    """A token weighs the same on whatever rank it lies: the loss is divided by the labels of the
    global batch, not by a rank's own.
    """
    recipe = recipe_for(
        case.model, **accumulating(case.world, **case.layout), **case.both, tokenizer="bytes"
    )
    dp, counts = case.world // recipe.tp // recipe.pp // recipe.sp, []
    for dp_rank in range(dp):
        with contextlib.closing(
            open_stream(request_of(recipe), byte_tokenizer(), rank=DataRank(dp, dp_rank))
        ) as stream:
            batches, _ = next(stream)
        counts += [
            sum(
                int((own_part(batch, recipe.sp, sp_rank)["labels"] != -100).sum())
                for batch in batches
            )
            for sp_rank in range(recipe.sp)
        ]
    assert len(counts) > 1 and len(set(counts)) > 1, "the case must be able to fail"
    train_and_compare(pools, tmp_path / "run", case)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["zero1", "zero3"])
@pytest.mark.parametrize(
    ("model", "tp"), [("tied", 1), ("tied", 2), ("qwen3", 1), ("qwen3", 2), ("gpt2", 1)]
)
def test_model_trains_like_plain_pytorch(pools, tmp_path, model, tp, file):
    recipe = recipe_for(model, **accumulating(2, tp=tp))
    pools.run(2, train_in_layout, recipe=recipe, config=strategy(file), out=str(tmp_path / "run"))
    compare(tmp_path / "run", reference(model))


BF16_CASES = [
    Case("zero0", 2, "zero0"),
    Case("zero1", 2, "zero1", slow=True),
    Case("zero2", 2, "zero2", slow=True),
    Case("zero3", 2, "zero3"),
    Case("zero1 tp2", 2, "zero1", TP2, slow=True),
    Case("zero3 tp2", 2, "zero3", TP2, slow=True),
    Case("zero3_cpu", 2, "zero3_cpu", slow=True),
]


@each(BF16_CASES)
def test_layout_trains_like_plain_pytorch_in_bf16(pools, ops, tmp_path, case):
    """Every loss within 3 x the largest difference between single-process runs that only split the
    batch differently.
    """
    if case.file == "zero3_cpu":
        ops("cpu_adam")
    recipe = recipe_for(case.model, **accumulating(case.world, **case.layout))
    pools.run(
        case.world,
        train_in_layout,
        recipe=recipe,
        config=strategy(case.file, bf16=True),
        out=str(tmp_path / "run"),
    )
    compare_bf16(tmp_path / "run", case.name)


def waiting(config: dict[str, Any]) -> dict[str, Any]:
    """A shipped JSON without what spares the host a wait for the device, or the device a wait for
    the network.
    """
    config = copy.deepcopy(config)
    del config["timers"]
    config["bf16"].pop("immediate_grad_update", None)
    if config["zero_optimization"]["stage"] == 2:
        config["zero_optimization"]["overlap_comm"] = False
    return config


def fused_steps(steps: int) -> tuple[float, float, float]:
    """Largest differences of the weights after `steps` on the same gradients: torch's fused AdamW
    from its plain one, and each from fp64.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(100_003, generator=generator)
    fused, plain, exact = (
        torch.nn.Parameter(start.clone().to(dtype))
        for dtype in (torch.float32, torch.float32, torch.float64)
    )
    numbers = dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    optimizers = [
        torch.optim.AdamW([weights], **numbers, fused=weights is fused)
        for weights in (fused, plain, exact)
    ]
    for _ in range(steps):
        gradient = torch.randn(start.shape, generator=generator)
        for weights in (fused, plain, exact):
            weights.grad = gradient.to(weights.dtype)
        for optimizer in optimizers:
            optimizer.step()
    apart, mine, theirs = (
        (a.double() - b).abs().max().item()
        for a, b in ((fused, plain), (fused, exact), (plain, exact))
    )
    return apart, mine, theirs


def test_a_fused_adamw_is_as_near_to_adamw_as_the_plain_one():
    """They round otherwise, on a CPU too: one of a thousand weights differs after a step, in its
    last place.
    """
    apart, mine, theirs = fused_steps(100)
    print(f"fused AdamW to plain {apart:.1e}, to fp64 {mine:.1e}; plain to fp64 {theirs:.1e}")
    assert 0 < apart < 1e-6 and mine <= 1.2 * theirs


@pytest.mark.parametrize(
    ("file", "model", "layout"),
    [
        pytest.param("zero0", "untied", {}, marks=pytest.mark.slow),
        ("zero1", "untied", {}),
        pytest.param("zero2", "untied", {}, marks=pytest.mark.slow),
        pytest.param("zero3", "untied", {}, marks=pytest.mark.slow),
        pytest.param("zero1", "tied", {"pp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_settings_that_spare_hosts_a_wait_change_no_bit(pools, tmp_path, file, model, layout):
    """In bf16, as the files are: numbers of every step, and the digests of all tensors of the
    checkpoint.
    """
    config = strategy(file, bf16=True)
    if file == "zero2":
        # several buckets, so that there is something to overlap
        config["zero_optimization"]["reduce_bucket_size"] = 20_000
    assert waiting(config) != config
    recipe = recipe_for(model, **accumulating(2, **layout), steps=4, eval_every=4)
    seen = []
    for name, given in (("run", config), ("waiting", waiting(config))):
        codes = pools.run(2, train_in_layout, recipe=recipe, config=given, out=str(tmp_path / name))
        assert codes == [0, 0]
        (step,) = (tmp_path / name / "checkpoints").glob("step_*")
        seen.append(
            (
                numbers(read_metrics(tmp_path / name)),
                json.loads((step / "manifest.json").read_text())["tensors"],
            )
        )
    assert seen[0] == seen[1] and len(seen[0][0]) == 4 and seen[0][1]


def compare_bf16(out: Path, layout: str) -> None:
    plain = [
        reference("untied", micro_batch=micro_batch, bf16=True).losses
        for micro_batch in (8, 4, 2, 1)
    ]
    noise = max(max(step) - min(step) for step in zip(*plain, strict=True))
    losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    middle = [sum(step) / len(step) for step in zip(*plain, strict=True)]
    worst = max(abs(mine - theirs) for mine, theirs in zip(losses, middle, strict=True))
    print(f"{layout}: worst difference {worst:.1e}, noise of the reference {noise:.1e}")
    assert 0 < noise < 0.05
    assert worst <= 3 * noise


def adam_steps(steps: int, weight_decay: float) -> tuple[float, float, float]:
    """Largest differences of the weights after `steps` on the same gradients: CPU Adam from torch's
    AdamW, and each from fp64.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    generator = torch.Generator().manual_seed(0)
    start = torch.randn(100_003, generator=generator)  # no multiple of the vector width
    mine, theirs, exact = (
        torch.nn.Parameter(start.clone().to(dtype))
        for dtype in (torch.float32, torch.float32, torch.float64)
    )
    numbers = dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-6, weight_decay=weight_decay)
    optimizers = [
        DeepSpeedCPUAdam([mine], adamw_mode=True, **numbers),
        torch.optim.AdamW([theirs], **numbers),
        torch.optim.AdamW([exact], **numbers),
    ]
    for _ in range(steps):
        gradient = torch.randn(start.shape, generator=generator)
        for parameter in (mine, theirs, exact):
            parameter.grad = gradient.to(parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()
    mine, theirs, exact = mine.detach(), theirs.detach(), exact.detach()
    return tuple(
        (a.double() - b).abs().max().item()
        for a, b in ((mine, theirs), (mine, exact), (theirs, exact))
    )


@pytest.mark.slow
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_cpu_adam_is_adamw(pools, ops, weight_decay):
    """DeepSpeed's CPU Adam after 100 steps is as near to AdamW in fp64 as torch's fp32 AdamW is;
    without decay the two agree to one rounding.
    """
    ops("cpu_adam")
    apart, mine, theirs = pools.run(1, adam_steps, steps=100, weight_decay=weight_decay)[0]
    print(
        f"weight decay {weight_decay}: CPU Adam to torch {apart:.1e}, to fp64 {mine:.1e}; torch to"
        f" fp64 {theirs:.1e}"
    )
    assert mine <= 1.2 * theirs
    assert weight_decay or apart < 5e-7  # one unit in the last place of weights up to 4.5


def test_every_shipped_architecture_is_a_known_model():
    from transformers import AutoConfig

    for file in SHIPPED.glob("*.json"):
        config = json.loads(file.read_text())
        AutoConfig.for_model(config.pop("model_type"), **config)
