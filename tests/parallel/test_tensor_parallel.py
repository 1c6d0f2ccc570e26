"""A step's collectives under tensor parallelism.

Comparisons with plain PyTorch are in test_parity.py and test_pipeline.py.
"""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from pool import ROOT, environment
from recipekit.architectures.lookup import SHIPPED

LAYERS = 2


def sums_of_a_pass(checkpointed: bool) -> tuple[list[int], list[int]]:
    """Return the number of elements in each all-reduce of a forward and a backward pass."""
    from unittest import mock

    import torch.distributed as dist
    from built_models import build_model
    from recipekit.parallel.groups import ProcessGroups
    from recipekit.spec.mesh import Mesh
    from recipekit.spec.recipe import Recipe

    config = json.loads((SHIPPED / "meta-llama--Llama-3.2-1B.json").read_text())
    config |= {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    recipe = Recipe(init="random", tp=2, activation_checkpointing=checkpointed)
    groups = ProcessGroups(Mesh(tp=2), "cpu")
    model = build_model(
        recipe,
        config | {"vocab_size": 64},
        groups,
        {"zero_optimization": {"stage": 0}},
        torch.device("cpu"),
    ).model
    sizes: list[int] = []
    plain = dist.all_reduce

    def counting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    ids = torch.arange(10).view(2, 5)
    with mock.patch.object(dist, "all_reduce", counting):
        # The first pass also checks, for each unsharded parameter, whether its gradient is partial.
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        sizes.clear()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        forward = list(sizes)
        loss.backward()
    return forward, sizes[len(forward) :]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_layer_sums_two_activations_and_two_gradients(pools: Any, checkpointed: bool) -> None:
    activation = 2 * 5 * 32
    for forward, backward in pools.run(2, sums_of_a_pass, checkpointed=checkpointed):
        assert forward == [activation] * 2 * LAYERS, "after attention and after the MLP"
        # q, k and v share one input activation, and gate and up share a second one. Without sharing
        # there would be five sums per layer. Recomputation repeats the sum after attention and ends
        # before the sum after the MLP.
        again = LAYERS if checkpointed else 0
        assert backward == [activation] * (2 * LAYERS + again)


def pass_of(family: str, tp: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a model, and the scaled gradient of its embedded tokens.

    Biases and factors of single heads, initially zeros, are set to 0.1.
    The model is unsharded, or sharded over a pool's ranks.
    """
    from built_models import build_model
    from recipekit.architectures.families import tiny_config
    from recipekit.parallel.groups import ProcessGroups
    from recipekit.spec.mesh import Mesh
    from recipekit.spec.recipe import Recipe

    groups = ProcessGroups(Mesh(tp=tp), "cpu") if tp > 1 else None
    recipe = Recipe(init="random", tp=tp, attention="eager")
    model = build_model(
        recipe,
        tiny_config(family, 64),
        groups,
        {"zero_optimization": {"stage": 0}},
        torch.device("cpu"),
    ).model.eval()
    biases = [
        parameter
        for name, parameter in model.named_parameters()
        if name.endswith(("_proj.bias", "c_fc.bias", "self_attn.A"))
    ]
    assert biases or family not in ("starcoder2", "doge")
    with torch.no_grad():
        for parameter in biases:
            parameter += 0.1

    embedded: list[torch.Tensor] = []
    model.get_input_embeddings().register_forward_hook(
        lambda _, args, output: (output.retain_grad(), embedded.append(output))[1]
    )
    logits = model(input_ids=torch.arange(10).view(2, 5), use_cache=False).logits
    logits.square().mean().backward()
    gradient = embedded[0].grad
    assert gradient is not None
    return logits.detach(), gradient / gradient.abs().max()


@pytest.mark.parametrize("family", ["starcoder2", "doge", "gemma3n_text", "inkling_text"])
def test_cut_layers_compute_what_whole_ones_do(pools: Any, family: str) -> None:
    """If a bias follows a sum over ranks, the bias must be added only once.

    The published plans of the other models are corrected. Doge computes a number for each head from
    all heads, Gemma 3n a mean over a sharded gate, and some of Inkling's experts share an input.
    """
    whole = pass_of(family, 1)
    for sharded in pools.run(2, pass_of, family=family, tp=2):
        torch.testing.assert_close(sharded, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_bench_prints_its_page() -> None:
    command = [
        sys.executable,
        str(ROOT / "tools" / "bench" / "bench_tensor_parallel.py"),
        "--pairs",
        "1",
        "--steps-per-block",
        "1",
        "--seq_len",
        "32",
    ]
    ran = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("\n| ") == 4, ran.stdout
    assert "a trial, not a measurement" in ran.stdout
