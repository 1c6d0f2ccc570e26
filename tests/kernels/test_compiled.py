"""Compiled code returns the same results as the model's own code.

The tests cover complete layers, norms and rotary embeddings, and the loss, alone and in every
layout.
"""

import contextlib
import copy
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo
import torch._inductor.config as inductor
import torch.distributed as dist
from job import NANO, metrics
from parity import Case, accumulating, compare, each, recipe_for, reference, train_in_layout
from peft_models import add_lora
from pool import environment
from recipekit.kernels.compiled import compile_layers, fused, is_norm, set_fusion
from recipekit.kernels.cross_entropy import Head, token_losses, token_losses_and_argmax
from recipekit.model.empty import enable_recompute
from recipekit.spec.recipe import Recipe
from shipped_jsons import strategy
from torch._inductor.graph import GraphLowering
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

SIZE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ON = {"compile": "on"}


def models(kind: str, dtype: torch.dtype) -> list[Any]:
    """Return the same model twice."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type=kind, **SIZE, **({"head_dim": 16} if kind != "gpt2" else {})
    )
    plain = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=dtype
    ).train()
    return [plain, copy.deepcopy(plain)]


def loss_and_gradients(model: Any, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    return loss.detach(), [parameter.grad.float() for parameter in model.parameters()]


KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma2")
SAME = [
    (kind, whole, dtype)
    for kind in KINDS
    for whole in (False, True)
    for dtype in (torch.float32, torch.bfloat16)
]
QUICK = [("qwen3", False, torch.float32), ("llama", True, torch.float32)]
WITHIN = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize(
    ("kind", "whole", "dtype"),
    [
        pytest.param(
            *case,
            marks=() if case in QUICK else pytest.mark.slow,
            id=f"{case[0]} {'layers' if case[1] else 'parts'} {case[2]}",
        )
        for case in SAME
    ],
)
def test_the_same_loss_and_gradients(kind: str, whole: bool, dtype: torch.dtype):
    """Differences are relative to the norm of each gradient.

    In bf16 a compiled kernel rounds once where plain code rounds several times.
    """
    within = WITHIN[dtype]
    plain, compiled = models(kind, dtype)
    norms = sum(is_norm(module) for module in compiled.modules())
    assert norms > 2 and compile_layers([compiled], whole) == (
        (2, 1, 0) if whole else (0, norms, 2)
    )
    rows = torch.randint(0, 64, (2, 48))
    (expected, theirs), (loss, ours) = (
        loss_and_gradients(model, rows) for model in (plain, compiled)
    )
    assert loss.item() == pytest.approx(expected.item(), rel=within)
    for got, wanted in zip(ours, theirs, strict=True):
        assert (got - wanted).norm() <= within * wanted.norm()


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
def test_the_same_losses_in_blocks(dtype: torch.dtype):
    """Each block has labels, and some labels are ignored. The most likely tokens also agree."""
    torch.manual_seed(0)
    weight, hidden = torch.randn(1000, 16, dtype=dtype), torch.randn(48, 16, dtype=dtype)
    labels = torch.randint(0, 1000, (48,)).masked_fill_(torch.rand(48) < 0.2, -100)
    found = []
    try:
        for on in (False, True):
            set_fusion(on)
            inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            losses = token_losses(inputs[0], Head(inputs[1]), labels, block=48 * 300)
            (losses * torch.linspace(0.5, 2, 48)).sum().backward()
            likeliest = token_losses_and_argmax(inputs[0], Head(inputs[1]), labels, block=48 * 300)[
                1
            ]
            found.append(
                [losses.detach(), *(tensor.grad.float() for tensor in inputs), likeliest.float()]
            )
    finally:
        set_fusion(False)
    for plain, compiled in zip(*found, strict=True):
        assert (compiled - plain).norm() <= WITHIN[dtype] * plain.norm()


@pytest.mark.parametrize("deterministic", [True, False])
def test_every_compilation_is_deterministic(monkeypatch: pytest.MonkeyPatch, deterministic: bool):
    """torch resets this value of its configuration after each compiled frame."""
    seen: list[bool] = []
    lower = GraphLowering.run

    def look(graph: Any, *inputs: Any) -> Any:
        seen.append(inductor.deterministic)
        return lower(graph, *inputs)

    monkeypatch.setattr(GraphLowering, "run", look)
    try:
        set_fusion(True, deterministic)
        with inductor.patch(force_disable_caches=True):
            for factor in (2.0, 3.0):
                scaled = fused(lambda value, factor=factor: value * factor + 1)
                assert scaled(torch.ones(3)).tolist() == [factor + 1] * 3
    finally:
        set_fusion(False)
        torch._dynamo.reset()
    assert seen == [deterministic] * 2


def test_ddp_does_not_split_compiled_layers(monkeypatch: pytest.MonkeyPatch):
    """torch would split each layer's graph at DDP's buckets, which are smaller than a layer."""
    graphs: list[Any] = []

    def count(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    size = SIZE | {"hidden_size": 256, "intermediate_size": 512}
    config = AutoConfig.for_model(model_type="llama", **size)
    rows = torch.randint(0, 64, (1, 16))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {}
    try:
        for name, split in (("plain", False), ("ddp", False), ("ddp, split", True)):
            torch._dynamo.reset()
            graphs.clear()
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            assert compile_layers([model.train()], True) == (2, 1, 0)
            set_fusion(True)
            if name != "plain":
                model = DistributedDataParallel(model, bucket_cap_mb=1)
            with dynamo.patch(optimize_ddp=True) if split else contextlib.nullcontext():
                model(input_ids=rows, labels=rows).loss.backward()
            found[name] = len(graphs)
    finally:
        set_fusion(False)
        dist.destroy_process_group()
        torch._dynamo.reset()
    assert found["plain"] == found["ddp"] < found["ddp, split"], found


@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_nth_compiled_layer_is_recomputed(monkeypatch: pytest.MonkeyPatch, every: int):
    """A layer's compiled code runs again in the backward pass only if the layer is recomputed."""
    number: dict[int, int] = {}  # address of a layer's weight -> its number
    runs = [0] * 5

    def counting(graph: Any, _: object) -> Any:
        def run(*inputs: Any) -> Any:
            found = {number[key] for value in inputs if (key := value.data_ptr()) in number}
            for layer in found:
                runs[layer] += 1
            return graph.forward(*inputs)

        return run

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type="llama", **SIZE | {"num_hidden_layers": len(runs)})
    plain: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    compiled = copy.deepcopy(plain)
    enable_recompute(compiled, every)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting))
    assert compile_layers([compiled], True) == (len(runs), 1, 0)
    number |= {
        layer.mlp.up_proj.weight.data_ptr(): place
        for place, layer in enumerate(compiled.model.layers)
    }

    rows = torch.randint(0, 64, (2, 48))
    try:
        (expected, theirs), (loss, ours) = (
            loss_and_gradients(model, rows) for model in (plain, compiled)
        )
    finally:
        torch._dynamo.reset()
    assert runs == [2 if place % every == 0 else 1 for place in range(len(runs))]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for got, wanted in zip(ours, theirs, strict=True):
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()


def test_another_model_of_the_class_stays_as_it_is():
    plain, compiled = models("llama", torch.float32)
    own = type(plain.model.norm).forward
    compile_layers([compiled], False)
    assert "forward" in vars(compiled.model.norm) and "forward" in vars(
        compiled.model.layers[0].self_attn
    )
    assert type(plain.model.norm).forward is own and not any(
        "forward" in vars(module) for module in plain.modules()
    )


def test_a_compiler_that_is_missing_is_told_before_the_start(tmp_path: Path):
    flags = ["--tiny", "--compile", "on", "--no-wandb", "--out", str(tmp_path / "run")]
    ran = subprocess.run(
        [sys.executable, str(NANO), *flags],
        env=environment() | {"CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    assert (
        "no-such-compiler: not found for torch.compile" in ran.stderr
        and "or use --compile off" in ran.stderr
    ), ran.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("asked", [True, False])
def test_a_compiler_that_fails(asked: bool):
    """If compilation was requested, the run ends; otherwise it continues without compilation."""
    program = f"""
import torch
from recipekit.kernels import compiled
compiled.set_fusion(True, asked={asked})
x = torch.ones(8, requires_grad=True)
made = compiled.fused(lambda x: (x.sin() * 2).cos())(x)
made.sum().backward()
assert torch.equal(made, (torch.ones(8).sin() * 2).cos()) and x.grad is not None
"""
    fresh = environment() | {"CXX": "false", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=fresh, capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == int(asked), ran.stderr
    assert ("InductorError" if asked else "WON'T CONVERT") in ran.stderr, ran.stderr[-2000:]


@pytest.mark.slow
def test_a_compiled_run_goes_on_bit_for_bit(tmp_path: Path):
    lines = []
    for name, stops in (("whole", ["0"]), ("parts", ["2", "0"])):
        for stop in stops:
            flags = [
                "--tiny",
                "--steps",
                "4",
                "--compile",
                "on",
                "--stop_at",
                stop,
                "--no-wandb",
                "--out",
                str(tmp_path / name),
            ]
            ran = subprocess.run(
                [sys.executable, str(NANO), *flags],
                env=environment(),
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert ran.returncode == 0, ran.stderr
            assert (
                "compile: 4 layers as a whole, 1 norms outside of them, the loss in chunks, at"
                " first use" in ran.stdout
            ), ran.stdout
        lines.append([(line["loss"], line["grad_norm"]) for line in metrics(tmp_path / name)])
    assert lines[0] == lines[1] and len(lines[0]) == 4


LAYOUTS = [
    Case("zero0 dp2", 2, "zero0", ON, slow=True),
    Case("zero2 dp2", 2, "zero2", ON, slow=True),
    Case("zero2 dp2, recomputed", 2, "zero2", ON | {"activation_checkpointing": True}, slow=True),
    Case("zero2 dp2, every second layer", 2, "zero2", ON | {"recompute_every": 2}, slow=True),
    Case("zero3 dp2, every second layer", 2, "zero3", ON | {"recompute_every": 2}, slow=True),
    Case("zero3 dp2", 2, "zero3", ON, slow=True),
    Case("zero3 dp2, recomputed", 2, "zero3", ON | {"activation_checkpointing": True}, slow=True),
    Case("zero1 tp2", 2, "zero1", ON | {"tp": 2}, slow=True),
    Case("zero3 tp2", 2, "zero3", ON | {"tp": 2}, model="qwen3", slow=True),
    Case("zero1 pp2", 2, "zero1", ON | {"pp": 2}, slow=True),
    Case(
        "zero1 pp2, recomputed",
        2,
        "zero1",
        ON | {"pp": 2, "activation_checkpointing": True},
        slow=True,
    ),
    Case(
        "zero3 dp2, recomputed, a norm at the end",
        2,
        "zero3",
        ON | {"activation_checkpointing": True},
        model="gemma2",
        slow=True,
    ),
    Case(
        "zero1 pp2, both ways",
        2,
        "zero1",
        ON | {"pp": 2, "pipeline_schedule": "dualpipev"},
        slow=True,
    ),
    Case("zero3 sp2", 2, "zero3", ON | {"sp": 2}, slow=True),
    Case("zero1 ep2", 2, "zero1", ON | {"ep": 2}, model="moe", slow=True),
    Case("ddp dp2", 2, "", ON | {"engine": "ddp", "precision": "fp32"}, slow=True),
    Case("fsdp2 dp2", 2, "", ON | {"engine": "fsdp2", "precision": "fp32"}, slow=True),
]


def train_compiled(recipe: Recipe, config: dict[str, Any], out: str) -> int:
    """Run the real loop on a rank of a pool, and check that code was compiled."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    code = train_in_layout(recipe, config, out)
    assert counters["stats"]["unique_graphs"] > 1, counters
    return code


@each(LAYOUTS)
def test_a_layout_trains_like_plain_pytorch(pools: Any, tmp_path: Path, case: Case):
    recipe = recipe_for(case.model, **accumulating(case.world, **case.layout))
    config = strategy(case.file) if case.file else {}
    assert (
        pools.run(
            case.world, train_compiled, recipe=recipe, config=config, out=str(tmp_path / "run")
        )
        == [0] * case.world
    )
    compare(tmp_path / "run", reference(case.model))


def train_full_layers(recipe: Recipe, config: dict[str, Any], out: str) -> tuple[int, int]:
    """Return the exit code of `train_compiled`, and the number of graph breaks."""
    from torch._dynamo.utils import counters

    code = train_compiled(recipe, config, out)
    return code, sum(counters["graph_break"].values())


@pytest.mark.slow
def test_an_adapter_is_compiled_in_full_layers(pools: Any, tmp_path: Path):
    """The adapter's modules are compiled with the layers that contain them, in one graph.

    The losses equal the losses without compilation, also if the layers are recomputed.
    """
    lines = []
    for way, recomputed in (("off", False), ("on", False), ("on", True)):
        changes = {"compile": way, "adapt": add_lora, "activation_checkpointing": recomputed}
        recipe, out = recipe_for("untied", **accumulating(2), **changes), tmp_path / str(len(lines))
        case = train_full_layers if way == "on" else train_in_layout
        given = {"recipe": recipe, "config": strategy("zero2"), "out": str(out), "timeout": 400}
        assert pools.run(2, case, **given) == ([(0, 0)] * 2 if way == "on" else [0, 0])
        stored = json.loads((out / "run.json").read_text())["model_plan"]
        assert stored["compile"]["scope"] == ("layers" if way == "on" else "off")
        lines.append([(line["loss"], line["grad_norm"]) for line in metrics(out)])
    plain, *compiled = lines
    for run in compiled:
        for ours, theirs in zip(run, plain, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_what_has_nothing_to_compile_is_refused(tmp_path: Path):
    flags = [
        "--tiny",
        "--steps",
        "1",
        "--compile",
        "on",
        "--loss",
        "whole",
        "--no-wandb",
        "--out",
        str(tmp_path / "run"),
    ]
    command = [sys.executable, str(NANO.with_name("gpt2_124m_zero0.py")), *flags]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert ran.returncode == 1 and "Traceback" not in ran.stderr, ran.stderr
    assert (
        "compile = on: GPT2LMHeadModel has no layers that it can compile. Leave it out"
        in ran.stderr
    ), ran.stderr
