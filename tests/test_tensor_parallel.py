"""What a step under tensor parallelism asks of its group. That it trains like plain PyTorch is in test_parity.py and test_pipeline.py."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from pool import ROOT, environment
from recipekit.architecture import SHIPPED

LAYERS = 2


def sums_of_a_pass(checkpointed: bool) -> tuple[list[int], list[int]]:
    """The elements of each all-reduce in a forward and in a backward pass."""
    from unittest import mock

    import torch.distributed as dist
    from recipekit.groups import Groups
    from recipekit.mesh import Mesh
    from recipekit.model import build_model
    from recipekit.recipe import Recipe

    config = json.loads((SHIPPED / "meta-llama--Llama-3.2-1B.json").read_text())
    config |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    recipe = Recipe(init="random", tp=2, activation_checkpointing=checkpointed)
    groups = Groups(Mesh(tp=2), "cpu")
    model = build_model(recipe, config | {"vocab_size": 64}, groups, {"zero_optimization": {"stage": 0}}, torch.device("cpu")).model
    sizes: list[int] = []
    plain = dist.all_reduce

    def counting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    ids = torch.arange(10).view(2, 5)
    with mock.patch.object(dist, "all_reduce", counting):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()  # the first also asks of each whole parameter whether its gradient is a part
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
        # q, k and v read one activation, gate and up another: without sharing it would be five sums a layer
        again = LAYERS if checkpointed else 0  # the sum after attention; recomputing ends before the one after the MLP
        assert backward == [activation] * (2 * LAYERS + again)


@pytest.mark.slow
def test_the_bench_prints_its_page() -> None:
    command = [sys.executable, str(ROOT / "tools" / "bench_tensor_parallel.py"), "--pairs", "1", "--steps-per-block", "1", "--seq_len", "32"]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("\n| ") == 4, ran.stdout
    assert "a trial, not a measurement" in ran.stdout
