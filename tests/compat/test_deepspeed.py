"""Attributes of DeepSpeed that we replace, tested on DeepSpeed's classes in one process."""

import importlib
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cpuinfo
import deepspeed
import pytest
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime import utils as deepspeed_utils
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.pipe import engine as pipe_engine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.schedule import OptimizerStep
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.utils import logger
from pool import FORKS
from recipekit.compat import deepspeed as compat
from side_streams import STEPS, WIDTH, freed_gradients
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import output_capturing


def bare(kind: Any, **attributes: Any) -> Any:
    """Return an object of a DeepSpeed module class with only these attributes."""
    made = object.__new__(kind)
    nn.Module.__init__(made)
    vars(made).update(attributes)
    return made


def test_a_step_is_wrapped() -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=0.25)
    asked: list[Any] = []

    def wrap(step: Any, *given: Any) -> Any:
        asked.append(given)
        return step(*given)

    compat.wrap_step(optimizer, wrap)
    optimizer.step(None)
    assert asked == [(None,)] and weight.item() == 0.75


def test_a_plain_optimizer_discards_a_step() -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer: Any = torch.optim.SGD([weight], lr=0.25)
    answers = [True, False]
    compat.discard_steps(optimizer, lambda: answers.pop(0))
    optimizer.step()
    assert optimizer.overflow is True and weight.item() == 1.0
    optimizer.step()
    assert optimizer.overflow is False and weight.item() == 0.75


# The head has `rows` x 128 elements, more than the bucket, and is reduced first. Rank 0 has no part
# of it, except where two ranks share the model and the head spans both partitions.
IN_FP32: dict[str, object] = {"communication_data_type": "fp32"}
WITHOUT_SCATTER: dict[str, object] = {"reduce_scatter": False}


@pytest.mark.parametrize(
    ("world", "rows", "zero", "more", "freed"),
    [
        pytest.param(4, 1125, {}, {}, True, id="4 ranks, two partitions"),
        pytest.param(4, 800, {}, {}, False, id="4 ranks, one partition"),
        pytest.param(4, 800, {}, IN_FP32, True, id="4 ranks, one partition, fp32"),
        pytest.param(2, 3000, {}, {}, False, id="2 ranks, two partitions"),
        pytest.param(2, 1000, {}, {}, False, id="2 ranks, one partition"),
        pytest.param(2, 1000, {}, IN_FP32, True, id="2 ranks, one partition, fp32"),
        pytest.param(2, 1000, WITHOUT_SCATTER, {}, True, id="2 ranks, without reduce_scatter"),
    ],
)
def test_a_gradient_is_not_freed_while_it_is_reduced(
    world: int, rows: int, zero: dict[str, object], more: dict[str, object], freed: bool
) -> None:
    with ProcessPoolExecutor(2, mp_context=FORKS, max_tasks_per_child=1) as processes:
        plain, repaired = (
            processes.submit(freed_gradients, world, rows, zero, more, repaired)
            for repaired in (False, True)
        )
        # A slice that is not copied is recorded by DeepSpeed itself.
        assert plain.result() == [(rows, WIDTH)] * (STEPS if freed else 0)
        assert repaired.result() == []


def test_the_class_shows_again_after_a_replaced_method() -> None:
    kind = pipe_engine.PipelineEngine
    engine, plain = bare(kind), dict(kind._INSTRUCTION_MAP)
    with compat.instructions_replaced(engine, {OptimizerStep: "step"}):
        assert plain | {OptimizerStep: "step"} == engine._INSTRUCTION_MAP
        assert plain == kind._INSTRUCTION_MAP
    assert "_INSTRUCTION_MAP" not in vars(engine) and plain == engine._INSTRUCTION_MAP

    engine = bare(DeepSpeedEngine)
    with compat.backward_replaced(engine, lambda loss: f"backward of {loss}"):
        assert engine.backward(3) == "backward of 3"
    assert engine.backward.__func__ is DeepSpeedEngine.backward


def test_parameters_of_a_pipeline_have_the_models_names() -> None:
    net, weight = bare(PipelineModule), nn.Parameter(torch.ones(1))
    compat.set_named_parameters(net, lambda *_, **__: iter([("layers.0.weight", weight)]))
    assert dict(net.named_parameters()) == {"layers.0.weight": weight}
    assert list(net.parameters()) == [weight]


def test_a_pipeline_sums_the_gradients_that_it_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    net = bare(PipelineModule, tied_comms={})
    compat.set_tied_weights(net, lambda: [(weight, "group")])
    summed: list[Any] = []
    monkeypatch.setattr(
        pipe_engine.dist, "all_reduce", lambda grad, group: summed.append((grad, group))
    )
    engine = bare(
        pipe_engine.PipelineEngine,
        module=net,
        bfloat16_enabled=lambda: False,
        zero_optimization_stage=lambda: 0,
        using_bf16_optimizer=False,
    )
    engine._exec_reduce_tied_grads()
    assert [(grad is weight.grad, group) for grad, group in summed] == [(True, "group")]


def test_deepspeed_reads_the_marks_of_a_parameter() -> None:
    sharded, full, copied = (nn.Parameter(torch.ones(1)) for _ in range(3))
    compat.mark_shard(sharded, True)
    compat.mark_shard(full, False)
    compat.mark_copy(copied)
    assert deepspeed_utils.is_model_parallel_parameter(sharded)
    assert not deepspeed_utils.is_model_parallel_parameter(full)
    assert full.tensor_model_parallel is False  # type: ignore[attr-defined]
    assert getattr(copied, deepspeed_utils.PIPE_REPLICATED)


def test_a_parameter_without_dimension_is_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sent = bare(DeepSpeedEngine, dist_backend="gloo", seq_data_parallel_group=None), []
    engine.module = nn.Module()
    engine.module.logit_scale = nn.Parameter(torch.tensor(0.7))
    monkeypatch.setattr(deepspeed_engine.groups, "_get_broadcast_src_rank", lambda: 0)
    monkeypatch.setattr(
        deepspeed_engine.dist, "broadcast", lambda data, *_, **__: sent.append(tuple(data.shape))
    )
    with pytest.raises(RuntimeError, match="dim"):
        engine._broadcast_model()
    with compat.broadcasting_scalars():
        engine._broadcast_model()
    assert sent == [(4,)] and engine.module.logit_scale.shape == ()


class Dispatched(TorchDispatchMode):
    """The names of the operations that torch executes within the `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("sums", "gradient", "copies"),
    [
        (torch.float32, torch.bfloat16, False),
        (torch.float32, torch.float16, False),
        (torch.float32, torch.float32, False),
        (torch.bfloat16, torch.float32, True),  # rounded before the addition
    ],
    ids=str,
)
@pytest.mark.parametrize("clear", [False, True])
def test_a_gradient_is_added_without_a_copy(
    sums: torch.dtype, gradient: torch.dtype, copies: bool, clear: bool
) -> None:
    """The numbers span the exponents of bf16, so that additions round in many places."""
    torch.manual_seed(0)
    scale = 10.0 ** torch.randint(-20, 10, (4096,))
    start, grad = torch.randn(4096).to(sums), (torch.randn(4096) * scale).to(gradient)
    found = []
    for direct in (False, True):
        weight: Any = nn.Parameter(torch.zeros(64, 64, dtype=gradient))
        weight.grad = grad.clone().view(64, 64)
        optimizer: Any = object.__new__(bf16_optimizer.BF16_Optimizer)
        vars(optimizer).update(
            fp32_groups_gradients=[[start.clone()]],
            fp32_groups_has_gradients=[[False]],
            autoep_folding_tp_group=None,
        )
        if direct:
            compat.sum_gradients_without_copy(optimizer)
        with Dispatched() as seen:
            optimizer._update_hp_grad(weight, 0, 0, clear_lp_grads=clear)
        total = optimizer.fp32_groups_gradients[0][0]
        assert weight._hp_grad is total and optimizer.fp32_groups_has_gradients == [[True]]
        assert bool(weight.grad.any()) is not clear
        found.append((total, "_to_copy" in seen.names))
    (plain, made), (ours, made_by_us) = found
    assert torch.equal(plain, ours) and not torch.equal(ours, start)
    assert (made, made_by_us) == (sums != gradient, copies)


def test_a_weight_without_a_gradient_adds_nothing() -> None:
    optimizer: Any = object.__new__(bf16_optimizer.BF16_Optimizer)
    vars(optimizer).update(
        fp32_groups_gradients=[[torch.ones(2)]], fp32_groups_has_gradients=[[False]]
    )
    compat.sum_gradients_without_copy(optimizer)
    optimizer._update_hp_grad(nn.Parameter(torch.zeros(2)), 0, 0, False)
    assert optimizer.fp32_groups_has_gradients == [[False]]
    assert optimizer.fp32_groups_gradients[0][0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("sums", "gradient", "copies"),
    [(torch.float32, torch.bfloat16, False), (torch.bfloat16, torch.float32, True)],
    ids=str,
)
def test_a_partition_is_added_without_a_copy(
    sums: torch.dtype, gradient: torch.dtype, copies: bool
) -> None:
    torch.manual_seed(0)
    start, added = torch.randn(4096).to(sums), torch.randn(4096).to(gradient)
    found = []
    for direct in (False, True):
        optimizer: Any = object.__new__(stage_1_and_2.DeepSpeedZeroOptimizer)
        if direct:
            compat.sum_partition_without_copy(optimizer)
        total = start.clone()
        optimizer._add_to_grad_partition_buffer(None, added)  # the slice of another rank
        with Dispatched() as seen:
            optimizer._add_to_grad_partition_buffer(total, added)
        found.append((total, "_to_copy" in seen.names))
    (plain, made), (ours, made_by_us) = found
    assert torch.equal(plain, ours) and not torch.equal(ours, start)
    assert (made, made_by_us) == (True, copies)


def unexpected_call(*_: Any, **__: Any) -> Any:
    raise AssertionError("asked for")


def test_the_op_of_shared_memory_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = importlib.import_module("deepspeed.comm.torch")
    monkeypatch.setattr(backend, "build_shm_op", backend.build_shm_op)
    monkeypatch.setattr(backend, "get_accelerator", unexpected_call)
    compat.skip_shm_op_build()
    assert backend.build_shm_op() is None


def test_the_bf16_optimizer_prints_no_memory(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(bf16_optimizer, "see_memory_usage", deepspeed_utils.see_memory_usage)
    compat.silence_memory_logs()
    bf16_optimizer.see_memory_usage("before initializing group 0", force=True)
    assert capsys.readouterr().out == ""


def test_deepspeed_logs_nothing_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "callHandlers", lambda record: seen.append(record.getMessage()))
    monkeypatch.setattr(logger, "disabled", False)
    with compat.without_log():
        logger.error("within")
    logger.error("after")
    assert seen == ["after"]


def test_the_facts_of_the_cpu_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def get_cpu_info() -> dict[str, Any]:
        read.append(1)
        return {"arch": "X86_64"}

    monkeypatch.setattr(cpuinfo, "get_cpu_info", get_cpu_info)
    for _ in range(2):
        compat.cache_cpu_info()
        assert cpuinfo.get_cpu_info() == {"arch": "X86_64"}
    assert read == [1]


def test_an_op_that_is_loaded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    monkeypatch.setattr(OpBuilder, "jit_load", unexpected_call)
    compat.keep_op(CPUAdamBuilder.NAME, module := object())
    assert CPUAdamBuilder().load(verbose=False) is module


def saving(path: Path) -> Any:
    """Return an engine that can write its optimizer states."""
    return bare(
        DeepSpeedEngine,
        optimizer=SimpleNamespace(state_dict=lambda: {"step": 1}),
        _config=SimpleNamespace(_param_dict={}),
        global_rank=0,
        config={},
        _get_zero_ckpt_name=lambda *_: str(path),
        zero_optimization=lambda: True,
    )


def test_an_engine_writes_through_our_files(tmp_path: Path) -> None:
    engine = saving(tmp_path / "states")
    written: list[tuple[Any, str]] = []
    files = SimpleNamespace(save=lambda state, path: written.append((state, path)))
    compat.skip_recovery_script(engine)
    compat.set_checkpoint_engine(engine, files)
    engine._save_zero_checkpoint(str(tmp_path), "step")
    assert [(state["optimizer_state_dict"], path) for state, path in written] == [
        ({"step": 1}, str(tmp_path / "states"))
    ]


def test_a_save_copies_no_script(tmp_path: Path) -> None:
    engine = saving(tmp_path / "states")
    vars(engine)["checkpoint_engine"] = SimpleNamespace(save=lambda *_: None)
    compat.skip_recovery_script(engine)
    engine._save_zero_checkpoint(str(tmp_path), "step")
    assert list(tmp_path.iterdir()) == []


def test_a_copy_into_a_step_folder_fails_later(tmp_path: Path) -> None:
    kept: list[OSError] = []
    plain, missing = shutil.copytree, tmp_path / "missing"
    with compat.copies_kept(tmp_path / "step", kept.append):
        shutil.copytree(missing, tmp_path / "step" / "swap")
        with pytest.raises(FileNotFoundError):
            shutil.copytree(missing, tmp_path / "other")
    assert len(kept) == 1 and str(tmp_path / "step" / "swap") in str(kept[0])
    assert shutil.copytree is plain


def test_a_file_that_is_not_listed_is_not_found(tmp_path: Path) -> None:
    for name in ("mp_rank_00_model_states.pt", "mp_rank_99_model_states.pt"):
        (tmp_path / name).touch()
    engine = bare(
        DeepSpeedEngine,
        module=nn.Module(),
        load_universal_checkpoint=lambda: False,
        _get_ckpt_name=lambda *_, **__: str(tmp_path / "mp_rank_*_model_states.pt"),
    )
    compat.find_listed_files(engine, {"mp_rank_00_model_states.pt": {}})
    assert engine._get_all_ckpt_names("", "") == [str(tmp_path / "mp_rank_00_model_states.pt")]

    net = bare(PipelineModule, ckpt_prefix="", mpu=None)
    engine.module = net
    compat.find_listed_files(engine, {})
    assert "ckpt_layer_path_list" in vars(net)


def test_a_load_keeps_the_settings_of_this_start() -> None:
    own = DynamicLossScaler(1024.0, 2.0, 10, 1.0, 1)
    optimizer = SimpleNamespace(clip_grad=9.0, loss_scaler="saved", dynamic_loss_scale=False)
    compat.set_clipping(optimizer, 0.5)
    compat.set_scaler(optimizer, own)
    assert vars(optimizer) == {"clip_grad": 0.5, "loss_scaler": own, "dynamic_loss_scale": True}


def test_an_object_is_rebuilt_without_its_constructor() -> None:
    made = compat.rebuilt(DynamicLossScaler, {"cur_scale": 8.0, "dynamic": True})
    assert type(made) is DynamicLossScaler and deepspeed.__version__
    assert vars(made) == {"cur_scale": 8.0, "dynamic": True}


def test_auto_ep_reads_the_outputs_that_can_be_recorded() -> None:
    """AutoEP asks by the name of a class, transformers since 5.23 by the model."""
    compat.let_auto_ep_read_outputs()
    compat.let_auto_ep_read_outputs()
    registry: Any = output_capturing._CAN_RECORD_REGISTRY
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, num_attention_heads=2))
    key = str(type(model.model))
    assert registry.get(key, "none")["hidden_states"] is not None
    assert registry.get("another", "none") == "none"
    registry["another"] = {"a": 1}
    assert registry.pop("another", None) == {"a": 1} and registry.get("another", None) is None
    assert model(torch.zeros(1, 2, dtype=torch.long), output_hidden_states=True).hidden_states
