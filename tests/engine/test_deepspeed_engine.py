"""ZeRO-3 with full compiled layers: losses, saved bytes and gathered weights of real ranks."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from job import metrics
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.recipe import Recipe
from shipped_jsons import put, strategy
from short_runs import BASE
from torch.multiprocessing.reductions import StorageWeakRef

WITHIN = 0.05  # relative, between saved and planned bytes
TOKENS = 512
LAYERS, HIDDEN, INNER, HEAD_DIM, WORDS = 4, 64, 208, 8, 264
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "vocab_size": WORDS,
    "use_cache": False,
}
OF_A_LAYER = 2 * HIDDEN + HIDDEN * (2 * HEAD_DIM * (8 + 2) + 3 * INNER)
LEAVES = {"compile": "on", "activation_budget": 0.0}


def train_and_watch(recipe: Recipe, argv: list[str]) -> dict[str, list[Any]]:
    """Run the real loop on a rank of a pool, and look at its layers in each forward pass.

    Return for each step the bytes that autograd saved in layers, and the largest number of
    elements in gathered layers. Also return the full matrices of layers that were alive after each
    forward pass, the planned bytes and the number of leaf modules.
    """
    import torch._dynamo
    from deepspeed.utils import get_z3_leaf_modules
    from recipekit import train as loop

    torch._dynamo.reset()
    step, made = loop.train_step, loop.prepare_training
    found: dict[str, list[Any]] = {"saved": [], "alive": [], "gathered": [], "planned": []}

    def watched(engine: Any, *arguments: Any, **more: Any) -> Any:
        sizes: dict[int, int] = {}
        kept: list[torch.Tensor] = []
        used: list[StorageWeakRef] = []
        alive, gathered, inside = [], [], []
        layers = engine.module.model.layers

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if not inside:
                return tensor
            storage = tensor.untyped_storage()
            known = {parameter.untyped_storage()._cdata for parameter in engine.module.parameters()}
            angles = tensor.numel() == TOKENS * HEAD_DIM  # cosines and sines, shared by all layers
            if storage._cdata not in known and tensor.is_floating_point() and not angles:
                sizes[storage._cdata] = storage.nbytes()
                kept.append(tensor)  # otherwise its address may be reused
            return tensor

        def before_layer(layer: Any, *_: Any) -> None:
            inside.append(layer)
            own = [parameter for parameter in layer.parameters() if parameter.dim() > 1]
            used.extend(StorageWeakRef(weight.data.untyped_storage()) for weight in own)
            whole = [at for at in layers.parameters() if at.data.numel() == at.ds_numel]
            gathered.append(sum(weight.ds_numel for weight in whole))

        def after_model(*_: Any) -> None:
            alive.append(sum(not weight.expired() for weight in used))
            used.clear()

        hooks = [layer.register_forward_pre_hook(before_layer) for layer in layers]
        hooks += [layer.register_forward_hook(lambda *_: inside.clear()) for layer in layers]
        hooks.append(engine.module.register_forward_hook(after_model))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = step(engine, *arguments, **more)
        for hook in hooks:
            hook.remove()
        found["saved"].append(sum(sizes.values()))
        found["alive"] += alive
        found["gathered"].append(max(gathered))
        found["leaves"] = [len(get_z3_leaf_modules(engine.module))]
        return result

    def preparing(loaded: Any, *arguments: Any) -> Any:
        terms = loaded.model_plan.activations
        found["planned"] = [sum(term.size for term in terms if not term.bound and not term.moments)]
        return made(loaded, *arguments)

    with (
        mock.patch.object(loop, "train_step", watched),
        mock.patch.object(loop, "prepare_training", preparing),
    ):
        sys.argv = ["leaves.py", *argv]
        found["code"] = [loop.main(resolve_run(parse(recipe, Path(sys.argv[0]), argv)))]
    return found


def recipe_of(folder: Path, world: int, changes: dict[str, Any]) -> Recipe:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    config = put(strategy("zero3"), "zero_optimization.stage3_max_reuse_distance", 0)
    config = put(config, "zero_optimization.stage3_param_persistence_threshold", 0)
    config = put(config, "zero_optimization.stage3_prefetch_bucket_size", 0)
    numbers = {
        "seq_len": TOKENS,
        "global_batch": world,
        "eval_every": 0,
        "warmup_steps": 0,
        "steps": 3,
    }
    recipe = replace(BASE, model=str(folder / "model"), init="random", tokenizer="bytes")
    return replace(recipe, ds_config=config, **(numbers | changes))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_full_layers_train_like_zero3_without_them(pools: Any, tmp_path: Path, world: int) -> None:
    """The budget is 0, so each layer keeps only its input. The run is in fp32.

    Without prefetching, only the running layer is gathered.
    """
    losses = {}
    for name, changes in (("plain", {"compile": "off"}), ("leaves", LEAVES)):
        recipe = recipe_of(tmp_path, world, changes)
        found = pools.run(
            world, train_and_watch, timeout=600, recipe=recipe, argv=["--out", str(tmp_path / name)]
        )
        lines = metrics(tmp_path / name)
        losses[name] = [(line["loss"], line["grad_norm"]) for line in lines]
        for rank in found:
            assert rank["code"] == [0]
            assert rank["leaves"] == [LAYERS if name == "leaves" else 0]
            ratios = [saved / rank["planned"][0] for saved in rank["saved"]]
            assert ratios == [pytest.approx(1, rel=WITHIN)] * 3
            if name == "leaves":
                assert rank["gathered"] == [OF_A_LAYER] * 3
                # A single rank's partitions are full weights, which are never freed.
                assert set(rank["alive"]) == ({0} if world == 2 else {7 * LAYERS})
    assert len(losses["plain"]) == 3
    for ours, theirs in zip(losses["leaves"], losses["plain"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_a_budget_keeps_less_and_computes_the_same(pools: Any, tmp_path: Path) -> None:
    """A budget between 0 and 1 saves bytes between the two, and losses agree in all digits."""
    saved, losses = [], []
    for budget in (1.0, 0.5, 0.0):
        out = tmp_path / f"budget_{budget}"
        recipe = recipe_of(tmp_path, 1, {"compile": "on", "activation_budget": budget})
        (found,) = pools.run(
            1, train_and_watch, timeout=600, recipe=recipe, argv=["--out", str(out)]
        )
        assert found["code"] == [0] and len(set(found["saved"])) == 1
        saved.append(found["saved"][0])
        losses.append([(line["loss"], line["grad_norm"]) for line in metrics(out)])
    full, half, least = saved
    assert least < half <= least + 0.5 * (full - least) * (1 + WITHIN)
    assert losses[0] == losses[1] == losses[2]
