"""A dry run's prediction of activations equals the memory that autograd saves, term by term."""

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from job import metrics
from pool import ROOT, environment
from recipekit.architectures.lookup import model_config
from recipekit.kernels.compiled import compile_layers
from recipekit.model.empty import enable_recompute
from recipekit.plan import resolve_run
from recipekit.planner.activations import LayerShape, activation_terms, layer_bytes, layer_shape
from recipekit.spec.command import parse
from recipekit.spec.memory_terms import ACCELERATOR, BACKWARD, total_bytes
from recipekit.spec.recipe import Recipe
from short_runs import BASE
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS, WITHIN = 192, 0.05
SIZE: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 416,
    "vocab_size": 64,
    "head_dim": 16,
    "use_cache": False,
}


def saved(
    kind: str,
    layers: int,
    dtype: torch.dtype,
    checkpointed: bool = False,
    every: int = 1,
    compiled: str = "",
) -> list[tuple[tuple[int, ...], int]]:
    """Run a real forward pass; return (shape, bytes) of each storage that autograd keeps.

    Weights, tokens and rotary angles are excluded.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type=kind, num_hidden_layers=layers, **SIZE)
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=dtype
    ).train()
    if checkpointed:
        enable_recompute(model, every)
    if compiled:
        compile_layers([model], compiled == "layers")
    known = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, tuple[tuple[int, ...], int]] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # cos and sin are shared by all layers.
        turning = tensor.shape[-3:] == (1, TOKENS, SIZE["head_dim"])
        if storage._cdata not in known and tensor.is_floating_point() and not turning:
            kept[storage._cdata] = (tuple(tensor.shape), storage.nbytes())
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64)).logits.sum()
    return list(kept.values())


def bytes_of(found: list[tuple[tuple[int, ...], int]], last: int | None = None) -> int:
    return sum(size for shape, size in found if last is None or shape[-1] == last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("kind", "compiled"),
    [
        *((kind, "") for kind in ("llama", "qwen3", "qwen2", "mistral")),
        *(
            pytest.param(kind, part, marks=pytest.mark.slow)
            for kind in ("llama", "qwen3", "qwen2", "mistral")
            for part in ("parts", "layers")
        ),
    ],
)
def test_a_layer_keeps_what_is_predicted(kind: str, compiled: str, dtype: torch.dtype):
    one, three = (saved(kind, layers, dtype, compiled=compiled) for layers in (1, 3))
    shape = layer_shape(SIZE | {"model_type": kind}, compiled=compiled)
    assert shape is not None
    terms = layer_bytes(shape, dtype.itemsize)
    a_layer = (bytes_of(three) - bytes_of(one)) / 2 / TOKENS
    assert sum(terms.values()) == pytest.approx(a_layer, rel=WITHIN)
    inner = (
        (bytes_of(three, SIZE["intermediate_size"]) - bytes_of(one, SIZE["intermediate_size"]))
        / 2
        / TOKENS
    )
    assert terms["MLP"] == pytest.approx(inner, rel=WITHIN)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    "compiled", ["", *(pytest.param(part, marks=pytest.mark.slow) for part in ("parts", "layers"))]
)
def test_a_recomputed_layer_keeps_its_input(compiled: str, every: int):
    shape = layer_shape(SIZE | {"model_type": "llama"}, compiled=compiled)
    assert shape is not None
    kept = bytes_of(
        saved("llama", 4, torch.bfloat16, checkpointed=True, every=every, compiled=compiled)
    )
    terms = activation_terms(shape, TOKENS, 2, 4, every)
    predicted = sum(
        term.size for term in terms if not term.bound and not term.what.startswith("a recomputed")
    )
    assert predicted == pytest.approx(kept, rel=WITHIN)


@pytest.mark.parametrize(
    ("layers", "every", "recomputed"),
    [(5, 2, 3), (5, 3, 2), (7, 4, 2), (6, 4, 2), (5, 1, 5), (5, 9, 1), (5, 0, 0)],
)
def test_layers_that_every_does_not_divide(layers: int, every: int, recomputed: int):
    """The first layer and every `every`-th layer after it are recomputed; others keep all."""
    shape = layer_shape(SIZE | {"model_type": "qwen3"})
    assert shape is not None
    terms = {term.what: term.size for term in activation_terms(shape, 7, 2, layers, every)}
    one = sum(layer_bytes(shape, 2).values())
    assert (
        sum(size for what, size in terms.items() if what.startswith("inputs of"))
        == recomputed * 7 * 2 * SIZE["hidden_size"]
    )
    assert (
        sum(size for what, size in terms.items() if what.startswith("all that"))
        == (layers - recomputed) * 7 * one
    )
    assert len([number for number in range(layers) if every and number % every == 0]) == recomputed
    again = {what: size for what, size in terms.items() if what.startswith("a recomputed layer's")}
    assert sum(again.values()) == (7 * one if recomputed else 0)


@pytest.mark.parametrize(
    ("compiled", "norms", "mlp"), [("", 4 + 2, 4), ("parts", 2, 4), ("layers", 2, 3)]
)
@pytest.mark.parametrize("divided", [False, True])
def test_the_bytes_of_a_layer_by_hand(compiled: str, norms: int, mlp: int, divided: bool):
    """The case is in bf16. Queries, keys, the residual stream and the MLP have different sizes."""
    shape = LayerShape(
        hidden=30,
        queries=24,
        keys=6,
        heads=5,
        inner=77,
        normed=True,
        compiled=compiled,
        sequence_sharded=divided,
    )
    assert layer_bytes(shape, 2) == {
        "norms": 2 * (norms * 30 + 2 * 30) + norms * (24 + 6),
        "attention": 2 * (2 * 24 + 2 * 6) + 4 * 5 + (2 * 24 if divided else 0),
        "MLP": mlp * 2 * 77,
    }
    plain = replace(shape, normed=False)
    assert layer_bytes(plain, 2)["norms"] == 2 * (norms * 30 + 2 * 30)
    last = {term.what: term.size for term in activation_terms(shape, 3, 2, 4, 0)}[
        "the last norm and its result"
    ]
    assert last == 3 * (4 if compiled else 8) * 30
    config = {
        "model_type": "qwen3",
        "hidden_size": 96,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 10,
        "intermediate_size": 88,
    }
    assert layer_shape(config, tp=2, sp=1) == LayerShape(96, 60, 20, 6, 44, True, "", False)
    assert layer_shape(
        config | {"head_dim": None, "model_type": "llama"}, tp=4, compiled="parts"
    ) == LayerShape(96, 24, 8, 3, 22, False, "parts", False)


@pytest.mark.parametrize("budget", [0.0, 0.25, 0.99])
def test_a_layer_within_a_budget_by_hand(budget: float):
    """Each layer keeps its input exactly. The rest, 100 tokens x 2 B, is an upper bound."""
    shape = layer_shape(SIZE | {"model_type": "llama"}, compiled="layers")
    assert shape is not None
    rest = 100 * (sum(layer_bytes(shape, 2).values()) - 2 * SIZE["hidden_size"])
    terms = activation_terms(shape, 100, 2, 3, 0, budget)
    inputs, kept, recomputed = (
        [term for term in terms if term.what.startswith(what)]
        for what in ("inputs of 3 layers: ", "other activations of", "recomputed activations of a")
    )
    assert [term.size for term in inputs] == [3 * 100 * 2 * SIZE["hidden_size"]]
    assert [term.size for term in kept] == ([3 * int(budget * rest)] if budget else [])
    assert [term.size for term in recomputed] == [rest - int(budget * rest)]
    assert not inputs[0].bound and all(term.bound for term in kept + recomputed)
    assert all(term.moments == (BACKWARD,) for term in recomputed)


def test_long_rows_of_the_recipe_by_hand():
    """Llama 3.1 8B with 131,072 tokens on 8 ranks has the numbers in the recipe's docstring."""
    config = model_config("meta-llama/Llama-3.1-8B")
    assert config is not None
    shape = layer_shape(config, sp=8)
    assert shape is not None
    terms = {term.what: term.size for term in activation_terms(shape, 16384, 2, 32, 1)}
    assert (
        terms["inputs of 32 layers that are recomputed: layers x tokens x 4096 x 2 B"]
        == 32 * 16384 * 4096 * 2
    )
    assert terms["a recomputed layer's norms"] == 16384 * 2 * (4 + 2 + 2) * 4096
    assert terms["a recomputed layer's attention"] == 16384 * (3 * 2 * 4096 + 2 * 2 * 1024 + 4 * 32)
    assert terms["a recomputed layer's MLP"] == 16384 * 4 * 2 * 14336
    assert total_bytes(activation_terms(shape, 16384, 2, 32, 1), ACCELERATOR) == total_bytes(
        activation_terms(shape, 16384, 2, 32, 1), ACCELERATOR, BACKWARD
    )


@pytest.mark.parametrize(("heads", "sp", "held"), [(8, 8, 1), (8, 2, 4), (2, 4, 1), (6, 4, 3)])
def test_key_value_heads_of_a_rank(heads: int, sp: int, held: int):
    """parallel/sequence.py repeats heads until each rank has at least one head."""
    config = {
        "model_type": "llama",
        "hidden_size": 96,
        "num_attention_heads": 24,
        "num_key_value_heads": heads,
        "head_dim": 4,
        "intermediate_size": 8,
    }
    shape = layer_shape(config, sp=sp)
    assert shape is not None and shape.keys / sp == held * 4


def dry_run(recipe: str, *flags: str) -> str:
    made = subprocess.run(
        [sys.executable, str(ROOT / "recipes" / f"{recipe}.py"), "--dry_run", *flags],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


def test_a_dry_run_tells_the_terms():
    """The terms are 2 + 0.25 + 0.5 + 0.157 + 0.875 GiB."""
    told = dry_run(
        "llama3_1_8b_zero3",
        "--world",
        "8",
        "--activation_checkpointing",
        "--seq_len",
        "8192",
        "--micro_batch",
        "1",
    )
    assert re.search(
        r"^memory   predicted activations of a micro-batch: 3.78 GiB, at most \d+\.\d+ GiB with the"
        r" states above$",
        told,
        re.MULTILINE,
    )
    assert re.search(
        r"^ +2.00 GiB  inputs of 32 layers that are recomputed: layers x tokens x 4096 x 2 B$",
        told,
        re.MULTILINE,
    )
    assert re.search(
        r"^ +896.00 MiB  a recomputed layer's MLP \(while gradients arrive\)$", told, re.MULTILINE
    )


def test_other_layers_are_not_predicted():
    assert (
        layer_shape({"model_type": "gpt2"}) is None
        and layer_shape({"model_type": "mixtral"}) is None
    )


# A run with long rows
# -------------------------------------------------------------------------------------------------


def train_and_count(recipe: Recipe, argv: list[str]) -> tuple[int, list[int], list[dict[str, Any]]]:
    """Run the real loop on a rank of a pool.

    Return (exit code, bytes that autograd saved in each step, the planner's terms).
    """
    from recipekit import train as loop

    step, counts, predicted = loop.train_step, [], []

    def counting(engine: Any, *arguments: Any, **more: Any) -> Any:
        turning, kept, sizes = engine.module.config.head_dim, [], {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            # ZeRO-3 gathers weights into new storages each time.
            known = {parameter.untyped_storage()._cdata for parameter in engine.module.parameters()}
            angles = tensor.dim() >= 3 and not tensor.requires_grad and tensor.shape[-1] == turning
            if storage._cdata not in known and tensor.is_floating_point() and not angles:
                sizes[storage._cdata] = storage.nbytes()
                kept.append(tensor)  # otherwise its address may be reused
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = step(engine, *arguments, **more)
        counts.append(sum(sizes.values()))
        return result

    made = loop.prepare_training

    def preparing(loaded: Any, *arguments: Any) -> Any:
        predicted.extend(
            {"what": term.what, "size": term.size, "bound": term.bound}
            for term in loaded.model_plan.activations
        )
        return made(loaded, *arguments)

    with (
        mock.patch.object(loop, "train_step", counting),
        mock.patch.object(loop, "prepare_training", preparing),
    ):
        sys.argv = ["long_rows.py", *argv]
        return loop.main(resolve_run(parse(recipe, Path(sys.argv[0]), argv))), counts, predicted


@pytest.mark.slow
def test_rows_of_65536_tokens_on_two_ranks_train_with_the_bytes_of_the_sum(
    pools: Any, tmp_path: Path
):
    """The model has two layers of width 64.

    A dense mask would take more than 4.3 GB, and full logits 69 MB for each copy.
    """
    config = SIZE | {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "head_dim": 8,
        "intermediate_size": 208,
        "vocab_size": 264,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    draw = random.Random(0)
    texts = [
        "".join(draw.choice("abcdefgh ") for _ in range(length))
        for length in [9_000, 20_000, 2_000, 500] * 30
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    recipe = replace(
        BASE,
        model=str(tmp_path / "model"),
        init="random",
        tokenizer="bytes",
        dataset=str(tmp_path / "rows.jsonl"),
    )
    recipe = replace(
        recipe,
        ds_config="zero3.json",
        sp=2,
        seq_len=65_536,
        global_batch=1,
        eval_every=0,
        warmup_steps=0,
    )
    ended = pools.run(
        2,
        train_and_count,
        timeout=600,
        recipe=recipe,
        argv=["--out", str(tmp_path / "run"), "--steps", "2"],
    )
    for code, counts, predicted in ended:
        assert code == 0
        told = sum(term["size"] for term in predicted if not term["bound"])
        assert told and [count / told for count in counts] == [pytest.approx(1, rel=WITHIN)] * 2
    losses = [line["loss"] for line in metrics(tmp_path / "run")]
    assert len(losses) == 2 and losses[1] < losses[0]
