"""What happens before the first step leaves nothing behind, and what it tells of the device is exact."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from job import metrics
from pool import environment
from recipekit.architecture import SHIPPED
from recipekit.mesh import Mesh
from recipekit.model import empty_model
from recipekit.recipe import Recipe
from recipekit.setup import PEAK_FLOPS, flops_per_token, ideal_step_seconds
from test_resume import BASE, train
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM


def shared_memory_names() -> list[str]:
    """Runs on every rank of a pool, after its start: the names that DeepSpeed's CPU collectives left, of this job's port."""
    return [path.name for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_*")]


def test_no_shared_memory_outlives_its_processes(pools: Any) -> None:
    assert pools.run(2, shared_memory_names) == [[], []]


def published(model: str) -> dict[str, Any]:
    return json.loads((SHIPPED / f"{model.replace('/', '--')}.json").read_text())


@pytest.mark.parametrize(
    ("model", "met", "attention"),  # parameters that a token meets, and 12 * layers * heads * head_dim
    [
        ("openai-community/gpt2", 124_439_808, 12 * 12 * 12 * 64),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248 - 128_256 * 4096, 12 * 32 * 32 * 128),
        ("Qwen/Qwen3-0.6B", 596_049_920, 12 * 28 * 16 * 128),  # heads * head_dim is twice its hidden_size
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704 - 32_000 * 4096 - 45_097_156_608 * 6 // 8, 12 * 32 * 32 * 128),
    ],
)
def test_flops_of_a_token(model: str, met: int, attention: int) -> None:
    whole = empty_model(Recipe(model=model), published(model))
    assert [flops_per_token(whole, seq_len) for seq_len in (1024, 8192)] == [6 * met + attention * 1024, 6 * met + attention * 8192]


@pytest.mark.parametrize(
    "shape",
    [
        {"model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 256},
        {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256, "tie_word_embeddings": True},
    ],
    ids=lambda shape: shape["model_type"],
)
def test_flops_of_a_token_are_those_that_torch_counts(shape: dict[str, Any]) -> None:
    size = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 500}
    config = AutoConfig.for_model(**shape, **size, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 96, dtype=torch.int64)).logits.sum().backward()
    expected = flops_per_token(model, 96)
    assert expected is not None and counter.get_total_flops() == pytest.approx(expected * 2 * 96, rel=0.01)  # which counts no norms


def test_flops_of_other_attention_are_not_told() -> None:
    recipe = Recipe(model="Qwen/Qwen3-0.6B")
    sliding = published(recipe.model) | {"layer_types": ["sliding_attention"] * 28, "sliding_window": 64}
    assert flops_per_token(empty_model(recipe, sliding), 1024) is None


def test_the_ideal_step_is_told_of_a_known_device_only() -> None:
    recipe = Recipe(model="openai-community/gpt2", seq_len=1024, global_batch=64)
    config = published(recipe.model)
    step = 64 * 1024 * (6 * 124_439_808 + 12 * 12 * 768 * 1024)
    assert ideal_step_seconds(recipe, config, Mesh(dp=4, tp=2), "NVIDIA H200") == step / (8 * 989e12)
    assert [ideal_step_seconds(recipe, config, Mesh(), name) for name in ("x86_64", "NVIDIA A100-SXM4-40GB MIG 1g.5gb")] == [None, None]
    assert ideal_step_seconds(Recipe(model=recipe.model, adapt=lambda model: model), config, Mesh(), "NVIDIA H200") is None


def train_on_known(recipe: Recipe, argv: list[str], peak: float) -> tuple[int | str, str]:
    """Runs on every rank of a pool as if the peak of its device were known."""
    with mock.patch.dict(PEAK_FLOPS, {platform.machine(): peak}):
        return train(recipe, argv)


def test_metrics_hold_the_utilization_where_the_peak_is_known(pools: Any, tmp_path: Path) -> None:
    recipe = replace(BASE, eval_every=0, warmup_steps=0)
    for out, start, more in ((tmp_path / "known", train_on_known, {"peak": 1e12}), (tmp_path / "unknown", train, {})):
        assert [code for code, _ in pools.run(2, start, recipe=recipe, argv=["--out", str(out), "--steps", "2"], **more)] == [0, 0]
    config = json.loads((tmp_path / "known" / "run.json").read_text())["model_config"]
    with mock.patch.dict(PEAK_FLOPS, {platform.machine(): 1e12}):
        ideal = ideal_step_seconds(recipe, config, Mesh(dp=2), platform.machine())
    assert ideal is not None and [line["mfu"] for line in metrics(tmp_path / "known")] == [ideal / line["step_s"] for line in metrics(tmp_path / "known")]
    assert not any("mfu" in line for line in metrics(tmp_path / "unknown"))


def test_collectives_outwait_the_patience_with_a_server(ops: Callable[[str], None]) -> None:
    """Rank 0 asks a server for up to `retry_s` seconds, while the others wait for it in a collective."""
    ops("comm")
    argv = ["--tiny", "--retry_s", "7200"]
    code = (
        "import sys, torch; from pathlib import Path; from recipekit.recipe import Recipe, parse; from recipekit.plan import make_plan\n"
        "from recipekit.run import _single_process_defaults; _single_process_defaults()\n"
        "from recipekit.setup import start\n"
        "start(make_plan(parse(Recipe(model='meta-llama/Llama-3.2-1B'), Path('x.py'), sys.argv[1:])))\n"
        "print(torch.distributed.group.WORLD._get_backend(torch.device('cpu')).options._timeout.total_seconds())\n"
        "torch.distributed.destroy_process_group()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) >= 7200 + 600


def questions_to_the_cpu() -> int:
    import cpuinfo
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from recipekit.setup import load_op

    load_op("CPUAdamBuilder", "CPU Adam", print)
    for _ in range(2):
        DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(8))])
    return cpuinfo.get_cpu_info.cache_info().misses


def test_py_cpuinfo_is_asked_once(pools: Any, ops: Callable[[str], None]) -> None:
    """It takes a second, and the ranks of a host load an op one by one."""
    ops("cpu_adam")
    assert pools.run(2, questions_to_the_cpu) == [1, 1]
