"""Attributes of torch that we replace, tested on torch's modules."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo
import torch._functorch.config as functorch
import torch._inductor.config as inductor
import torch.distributed as dist
import torch_2_11
from pool import environment
from recipekit.compat import torch as compat
from recipekit.engine import torch_engine
from recipekit.kernels import varlen
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import varlen as torch_varlen
from torch.nn.attention.varlen import varlen_attn
from torch.nn.parallel import DistributedDataParallel


def test_a_module_has_another_forward_and_keeps_its_hooks() -> None:
    linear, other = nn.Linear(2, 2), nn.Linear(2, 2)
    seen: list[float] = []
    linear.register_forward_hook(lambda module, inputs, output: seen.append(output.item()))
    compat.set_forward(linear, lambda x: x.sum())
    assert linear(torch.ones(2)).item() == 2.0 and seen == [2.0]
    assert type(linear) is nn.Linear and other(torch.ones(2)).shape == (2,)

    with compat.forward_replaced(linear, lambda x: x.sum() * 10):
        assert linear(torch.ones(2)).item() == 20.0
    assert linear(torch.ones(2)).item() == 2.0
    with compat.forward_replaced(other, lambda x: x):
        assert other(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
    assert other(torch.ones(2)).shape == (2,) and "forward" not in vars(other)


def test_a_tensor_takes_the_place_of_a_parameter() -> None:
    linear = nn.Linear(2, 1, bias=False)
    own, other = linear.weight, torch.full((1, 2), 3.0)
    with pytest.raises(TypeError):
        linear.weight = other  # type: ignore[assignment]
    compat.set_parameters(linear, {"weight": other})
    assert linear(torch.ones(2)).item() == 6.0
    compat.set_parameters(linear, {"weight": own})
    assert dict(linear.named_parameters()) == {"weight": own}


def test_a_buffer_takes_the_name_of_a_parameter() -> None:
    linear = nn.Linear(2, 1)
    compat.remove_parameter(linear, "bias")
    linear.register_buffer("bias", torch.zeros(0))
    assert [name for name, _ in linear.named_parameters()] == ["weight"]


def test_a_buffer_has_another_value_and_stays_out_of_the_state() -> None:
    module = nn.Module()
    module.register_buffer("a", torch.zeros(1, device="meta"), persistent=False)
    compat.set_buffer(module, "a", torch.ones(1))
    assert module.a.item() == 1.0 and module.state_dict() == {}


def test_a_parameter_takes_over_the_marks_of_another() -> None:
    source, target = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))
    source.ds_pipe_replicated = True  # type: ignore[attr-defined]
    compat.copy_marks(source, target)
    assert vars(target) == {"ds_pipe_replicated": True} and target.item() == 0.0


def test_ddp_sums_only_when_it_is_told() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(2, 1))
        summed: list[int] = []

        def count(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            summed.append(1)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model.register_comm_hook(None, count)  # type: ignore[arg-type]
        for on, sums in ((False, 0), (True, 1), (False, 1)):
            compat.set_gradient_sync(model, on)
            model(torch.ones(1, 2)).sum().backward()
            assert len(summed) == sums
    finally:
        dist.destroy_process_group()


def test_a_norm_without_statistics_adds_nothing_to_a_state() -> None:
    norm, state = nn.BatchNorm1d(2), dict[str, Any]()
    compat.stop_tracking(norm)
    norm._load_from_state_dict(state, "", {}, False, [], [], [])
    assert state == {}


def test_parameters_are_made_on_meta_and_buffers_are_not() -> None:
    with compat.parameters_on_meta() as small:
        norm = nn.BatchNorm1d(2)
        norm.scale = nn.Parameter(torch.full((2,), 3.0))
    assert norm.weight.is_meta and not norm.running_mean.is_meta  # type: ignore[union-attr]
    assert norm.scale.is_meta and small[id(norm), "scale"].tolist() == [3.0, 3.0]
    assert not nn.BatchNorm1d(2).weight.is_meta


def test_deterministic_settings_are_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Any = torch.utils.deterministic
    monkeypatch.setattr(settings, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    compat.set_deterministic()
    assert not settings.fill_uninitialized_memory
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark


def test_the_compiler_has_its_settings() -> None:
    settings: list[tuple[Any, str]] = [
        (dynamo, "suppress_errors"),
        (functorch, "force_non_lazy_backward_lowering"),
        (inductor, "compile_threads"),
        (dynamo, "optimize_ddp"),
    ]
    with contextlib.ExitStack() as undo:  # pytest's monkeypatch would remove a setting permanently
        for module, name in settings:
            undo.enter_context(
                module.patch(name, {"compile_threads": 4, "optimize_ddp": True}.get(name, False))
            )
        for asked in (False, True):
            compat.set_compiler(asked)
            found = [getattr(module, name) for module, name in settings]
            assert found == [not asked, not asked, 1, False]


def test_documents_keep_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        compat.keep_flash_for_documents()  # the pinned torch has no choice
        assert torch.backends.cuda.cudnn_sdp_enabled()
        monkeypatch.setattr(torch_varlen, "_select_backend", None, raising=False)  # a later torch
        compat.keep_flash_for_documents()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def test_the_compiler_has_a_budget() -> None:
    """With a budget, packed attention counts as work that is worth keeping, not as free."""
    from recipekit.kernels.compiled import set_budget
    from torch.utils.flop_counter import FlopCounterMode, flop_registry

    operation = torch.ops.recipekit.attention_by_document
    query, key = torch.randn(6, 4, 8), torch.randn(6, 2, 8)
    documents = torch.tensor([0, 2, 6], dtype=torch.int32)
    before = dict(flop_registry)
    with functorch.patch(activation_memory_budget=1.0):
        try:
            set_budget(0.25, seq_len=6)
            assert functorch.activation_memory_budget == 0.25
            with FlopCounterMode(display=False) as counter:
                operation(query, key, key, documents, 1.0, 0)
            assert counter.get_total_flops() == 2 * query.numel() * 6
            assert torch.ops.torch_attn._varlen_attn in flop_registry
            set_budget(1.0, seq_len=6)
            assert functorch.activation_memory_budget == 1.0
        finally:
            flop_registry.clear()
            flop_registry.update(before)


def test_an_exact_allocator_is_found_in_the_headers_of_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The pinned torch has the setting.

    A torch without the setting, or without headers, must be recognised.
    """
    assert compat.pins_exactly()
    monkeypatch.setattr(
        compat,
        "find_spec",
        lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]),
    )
    assert not compat.pins_exactly()
    header = tmp_path / "include" / "c10" / "core" / "AllocatorConfig.h"
    header.parent.mkdir(parents=True)
    header.write_text("size_t max_split_size_;")
    assert not compat.pins_exactly()
    header.write_text("static size_t pinned_max_round_threshold() {")
    assert compat.pins_exactly()


def test_our_calls_fit_the_signatures_of_torch_2_11(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pinned torch is asked by name; torch 2.11 gets no argument that it does not have."""
    assert compat.takes_argument(varlen_attn, "enable_gqa")
    assert compat.keep_own_buffers(DistributedDataParallel) == {"forward_sync_buffers": False}
    assert not compat.takes_argument(torch_2_11.varlen_attn, "enable_gqa")
    assert compat.takes_argument(lambda **named: named, "enable_gqa")

    monkeypatch.setattr(varlen, "varlen_attn", torch_2_11.varlen_attn)
    monkeypatch.setattr(varlen, "NAMES_GQA", False)
    query, key = (SimpleNamespace(is_cuda=True, shape=(8, heads, 16)) for heads in (4, 2))
    bounds, rule = torch.tensor([0, 8]), varlen.Scoring(0.25)
    found: Any = varlen.varlen(query, key, key, bounds, 8, rule)  # type: ignore[arg-type]
    assert found[1] == {"scale": 0.25, "window_size": (-1, 0)}

    monkeypatch.setattr(torch_engine, "DistributedDataParallel", torch_2_11.DistributedDataParallel)
    groups: Any = SimpleNamespace(dp_group=None)
    wrapped: Any = torch_engine._wrap_ddp(nn.Linear(2, 2), groups, torch.device("cpu"))
    assert wrapped.broadcast_buffers is False and wrapped.find_unused_parameters is True


def test_fsdp2_of_torch_2_11_cannot_reduce_unused_parameters() -> None:
    asked: list[bool] = []
    newer: Any = SimpleNamespace(set_reduce_scatter_unused_params=asked.append)
    assert compat.reduce_unused_parameters(newer) and asked == [True]
    older: Any = SimpleNamespace()
    assert not compat.reduce_unused_parameters(older)
    assert hasattr(FSDPModule, "set_reduce_scatter_unused_params"), "the pinned torch has it"


def test_collectives_are_replaced_and_put_back():
    from recipekit.compat.torch import BLOCKING_CALLS, collectives_replaced
    from torch._C._distributed_c10d import Work

    before = [getattr(torch.distributed, name) for name in BLOCKING_CALLS]
    wait, called = Work.wait, []
    with collectives_replaced(lambda function: lambda *args: called.append(function)):
        torch.distributed.all_reduce(1)
        torch.distributed.barrier()
    assert called == [torch.distributed.all_reduce, torch.distributed.barrier]
    assert [getattr(torch.distributed, name) for name in BLOCKING_CALLS] == before
    assert Work.wait is wait


RESTARTED = """
import os, signal, time
import torch
import torch.distributed as dist
from recipekit.compat.torch import own_keys_per_restart

with own_keys_per_restart():
    dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"rank {os.environ['RANK']} joined after {restarts} restarts", flush=True)
if restarts != "2":
    time.sleep(0.2)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_starts_killed_ranks_again(tmp_path):
    (tmp_path / "restarted.py").write_text(RESTARTED)
    flags = ["--standalone", "--nproc_per_node=2", "--max-restarts=2"]
    words = [sys.executable, "-m", "torch.distributed.run", *flags, "restarted.py"]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Two ranks may write into the same line.
    joined = re.findall(r"rank \d joined after \d restarts", done.stdout)
    assert sorted(joined) == sorted(
        f"rank {rank} joined after {restarts} restarts" for rank in (0, 1) for restarts in (0, 1, 2)
    )
