"""Decisions that depend on a GPU, tested on a machine without a GPU.

torch.cuda is replaced with fakes that answer like a GPU and record their calls.
"""

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recipekit.checkpoints import load, save
from recipekit.data.batching import RowDealer
from recipekit.data.request import Request
from recipekit.doctor import needs, speed
from recipekit.engine import torch_engine
from recipekit.hosts import build_info, gpus, ops, torch_builds
from recipekit.hosts.findings import ReportRow
from recipekit.hosts.gpus import Gpu
from recipekit.model.device import Activations
from recipekit.model.loss_path import CHUNKED_LOSS, FULL_LOGITS_LOSS
from recipekit.model.model_plan import PARTS, CompileChoice
from recipekit.parallel import timeline
from recipekit.planner import resolve
from recipekit.run import _single_process_defaults
from recipekit.runtime import engine, prepare, resolution, run_metadata, start
from recipekit.spec.errors import ConfigError, Problem, config_error
from recipekit.spec.memory_terms import ACCELERATOR, HOST, NVME, Term, total_bytes
from recipekit.spec.mesh import Mesh
from torch import nn

GPU, CPU = torch.device("cuda", 1), torch.device("cpu")
H100 = "NVIDIA H100 80GB HBM3"


class Asked(list[Any]):
    """A factory for functions that record their calls and return a fixed answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self._patch = monkeypatch

    def of(self, owner: Any, **answers: Any) -> "Asked":
        for name, answer in answers.items():
            self._patch.setattr(
                owner,
                name,
                lambda *given, _name=name, _answer=answer, **named: (
                    self.append((_name, *given, *named.values())) or _answer
                ),
            )
        return self


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


# The start of a rank
# ----------------------------------------------------------------------------------------------


def plan_of(**recipe: Any) -> Any:
    own = {
        "deterministic": False,
        "attention": "auto",
        "engine": "deepspeed",
        "precision": "bf16",
        "seed": 3,
        "retry_s": 0.0,
    } | recipe
    return SimpleNamespace(
        recipe=SimpleNamespace(**own),
        ds_config={"bf16": {"enabled": True}},
        command=SimpleNamespace(local_rank=1, rank=5, world=8),
    )


def quiet_start(asked: Asked, on_gpu: bool) -> None:
    asked.of(
        start,
        gpus_in_use=on_gpu,
        quiet_library_logs=None,
        prepare_ops=None,
        skip_shm_op_build=None,
        long_wait_group=None,
    )
    asked.of(start.deepspeed, init_distributed=None).of(start, collective_timeout=None)
    asked.of(torch, manual_seed=None).of(
        torch.cuda, set_device=None, is_bf16_supported=False, get_device_name="Tesla V100"
    )


def test_a_rank_takes_the_gpu_of_its_number_on_its_host(asked: Asked) -> None:
    quiet_start(asked, on_gpu=True)
    assert start.initialize_distributed(plan_of()) == GPU
    names = [call[0] for call in asked]
    assert (
        ("set_device", GPU) in asked
        and ("is_bf16_supported", False) in asked
        and ("get_device_name", GPU) in asked
    )
    assert ("manual_seed", 3) in asked
    assert names.index("init_distributed") < names.index("set_device")
    with pytest.raises(ConfigError, match="Tesla V100 does not support bf16"):
        start.initialize_distributed(plan_of(engine="ddp"))


def test_a_rank_without_a_gpu_asks_for_none(asked: Asked) -> None:
    quiet_start(asked, on_gpu=False)
    assert start.initialize_distributed(plan_of(engine="ddp")) == CPU
    assert not {"set_device", "is_bf16_supported", "get_device_name"} & {call[0] for call in asked}


TERMS = [
    Term(ACCELERATOR, "states", 1000),
    Term(ACCELERATOR, "reduce buckets", 300, pinned=512),
    Term(HOST, "pinned masters", 50, pinned=64),
    Term(HOST, "bound", 8, pinned=16, bound=True),
    Term(NVME, "swap", 10**6),
]


def memory_asked(
    asked: Asked,
    device: torch.device,
    rank: int,
    local: tuple[int, int],
    mesh: Mesh,
    stage: int = 0,
) -> list[tuple[Any, ...]]:
    """Return the arguments of each memory check.

    They are (place, bytes on a rank, free bytes, ranks, device). Only the pipeline stage `stage`
    needs memory.
    """
    questions: list[Any] = []
    command = SimpleNamespace(rank=rank, local_rank=local[0], local_ranks=local[1])
    plan: Any = SimpleNamespace(mesh=mesh, command=command)
    asked.of(resolution, free_memory=777).of(
        torch.cuda, mem_get_info=(555, 999), get_device_name=H100
    )
    terms_of_stages = [TERMS if number == stage else [] for number in range(mesh.pp)]

    def too_much(
        terms: list[Term], place: str, free: int, ranks: int = 1, on: str = ""
    ) -> list[Problem]:
        sizes = {
            term.what: (term.size, term.pinned, term.bound) for term in terms if term.place == place
        }
        questions.append((place, sizes, free, ranks, on.partition(" that is free")[0]))
        return []

    asked._patch.setattr(resolution, "memory_problems", too_much)
    resolution.check_memory(plan, terms_of_stages, device)
    return questions


def test_a_gpu_has_its_own_memory_and_the_host_what_is_pinned(
    asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = memory_asked(asked, GPU, 0, (0, 2), Mesh(dp=2))
    assert first == (
        ACCELERATOR,
        {"states": (1000, 0, False), "reduce buckets": (300, 512, False)},
        555,
        1,
        H100,
    )
    assert second[:4] == (HOST, {"pinned masters": (50, 64, False), "bound": (8, 16, True)}, 777, 2)
    assert ("mem_get_info", GPU) in asked
    # The value is 512 + 64 bytes, because upper bounds are not counted.
    assert "offload pins 0.00 MiB of host memory" in capsys.readouterr().out
    memory_asked(asked, GPU, 1, (1, 2), Mesh(dp=2))
    assert not capsys.readouterr().out, "one rank says it"


def test_on_a_cpu_all_but_nvme_lies_in_the_hosts_memory(asked: Asked) -> None:
    [only] = memory_asked(asked, CPU, 0, (0, 2), Mesh(dp=2))
    expected = {
        "states": (1000, 0, False),
        "reduce buckets": (300, 0, True),
        "pinned masters": (50, 0, False),
        "bound": (8, 0, True),
    }
    assert only[:4] == (HOST, expected, 777, 2)


@pytest.mark.parametrize(
    ("mesh", "rank", "local", "stage", "alike"),
    [
        (Mesh(dp=2, pp=4), 5, (1, 4), 2, 2),  # this host has ranks 4 to 7, of stages 2, 2, 3, 3
        (Mesh(dp=2, pp=4), 6, (2, 4), 3, 2),
        (Mesh(dp=4, pp=2), 1, (1, 8), 0, 4),
        (Mesh(dp=4, pp=2), 7, (3, 4), 1, 4),
        (Mesh(dp=1, pp=4), 3, (3, 4), 3, 1),
        (Mesh(dp=6), 5, (1, 2), 0, 2),
        (Mesh(dp=6), 5, (0, 0), 0, 1),  # a launcher that sets no local rank
    ],
    ids=str,
)
def test_ranks_of_one_stage_share_the_hosts_memory(
    asked: Asked, mesh: Mesh, rank: int, local: tuple[int, int], stage: int, alike: int
) -> None:
    """Every rank checks its stage's terms, multiplied by the number of ranks on its host."""
    [question] = memory_asked(asked, CPU, rank, local, mesh, stage)
    assert "states" in question[1] and question[3] == alike


# Compilation
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asks", "device", "hip", "on"),
    [
        ("auto", GPU, None, True),
        ("auto", GPU, "6.3", False),
        ("auto", CPU, None, False),
        ("on", CPU, None, True),
        ("on", GPU, "6.3", True),
        ("off", GPU, None, False),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_compiled_follows_from_the_device(
    asked: Asked,
    monkeypatch: pytest.MonkeyPatch,
    asks: str,
    device: torch.device,
    hip: Any,
    on: bool,
    whole: bool,
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    asked.of(engine, check_torch_compile=[], shared_problems=[])
    asked.of(resolve, compiles_full_layers=whole).of(
        engine.compiled, set_fusion=None, set_budget=None, compile_layers=(2, 1, 0)
    )
    recipe = SimpleNamespace(
        compile=asks,
        deterministic=True,
        adapt=None,
        tp=1,
        sp=2,
        ep=1,
        recompute=0,
        activation_budget=1.0,
        seq_len=8,
    )
    plan: Any = SimpleNamespace(recipe=recipe, ds_config={})
    said: list[str] = []

    def compile_model() -> None:
        target = resolution.target_here(device)
        choice = resolve.compile_choice(plan, "llama", target)
        model_plan = SimpleNamespace(compile=choice, loss_path=CHUNKED_LOSS, architecture="x")
        built: Any = SimpleNamespace(models=["m"], model_plan=model_plan)
        engine.compile_model(plan, built, device, said.append)

    compile_model()
    assert ("set_fusion", on, True, asks == "on") in asked
    assert [call for call in asked if call[0] == "check_torch_compile"] == (
        [("check_torch_compile", device.type == "cuda")] if on else []
    )
    assert [call for call in asked if call[0] == "compile_layers"] == (
        [("compile_layers", ["m"], whole)] if on else []
    )
    assert said == (
        ["compile: 2 layers as a whole, 1 norms outside of them, the loss in chunks, at first use"]
        if on
        else []
    )
    recipe.adapt = lambda model: model
    asked.clear()
    compile_model()
    assert [call for call in asked if call[0] == "compile_layers"] == (
        [("compile_layers", ["m"], whole)] if on else []
    ), "an adapter does not change the choice"


def test_what_cannot_be_compiled_ends_the_run_only_where_it_was_asked_for(asked: Asked) -> None:
    problem = Problem("triton", "is not there", "install it")
    asked.of(engine, check_torch_compile=[problem], shared_problems=[problem])
    asked.of(engine.compiled, set_fusion=None, compile_layers=(0, 0, 0))
    model_plan = SimpleNamespace(
        compile=CompileChoice(PARTS, ""), loss_path=FULL_LOGITS_LOSS, architecture="x"
    )
    built: Any = SimpleNamespace(models=[], model_plan=model_plan)
    recipe = SimpleNamespace(compile="auto", deterministic=False, activation_budget=1.0)
    said: list[str] = []
    plan: Any = SimpleNamespace(recipe=recipe, mesh=Mesh())
    engine.compile_model(plan, built, GPU, said.append)
    assert ("set_fusion", False, False, False) in asked and "nothing is compiled: triton" in said[0]
    recipe.compile = "on"
    with pytest.raises(ConfigError, match="triton"):
        engine.compile_model(plan, built, GPU, said.append)


@pytest.mark.parametrize(("capability", "found"), [((6, 1), 1), ((7, 0), 0), ((9, 0), 0)])
def test_triton_makes_kernels_from_a_capability_on(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], found: int
) -> None:
    asked.of(
        torch.cuda,
        is_available=True,
        get_device_capability=capability,
        get_device_name="Tesla P100",
    )
    monkeypatch.setattr(ops.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(ops, "_check_headers", lambda what: [])
    monkeypatch.setattr(ops.shutil, "which", lambda name: name)
    problems = ops.check_torch_compile(True)
    assert len(problems) == found and all(
        "Tesla P100 of compute capability 6.1" in problem.where for problem in problems
    )
    asked.clear()
    assert ops.check_torch_compile(False) == [] and not asked


def test_a_compiler_is_looked_for_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ops, "_check_headers", lambda what: [])
    monkeypatch.setattr(ops.shutil, "which", lambda name: None)
    monkeypatch.setattr(ops.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [problem.where for problem in ops.check_torch_compile(True)] == [
        "compiler gcc or clang",
        "triton",
    ]
    assert [problem.where for problem in ops.check_torch_compile(False)] == ["compiler g++"]
    monkeypatch.setenv("CC", "mycc -m64")
    monkeypatch.setenv("CXX", "mycxx")
    assert [
        next(problem.where for problem in ops.check_torch_compile(on)) for on in (True, False)
    ] == ["compiler mycc", "compiler mycxx"]


# PyTorch's engines
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [GPU, CPU])
def test_ddp_is_made_for_the_device_and_sums_everywhere_alike(
    asked: Asked, device: torch.device
) -> None:
    made = SimpleNamespace(
        register_comm_hook=lambda *given: asked.append(("hook", *given)),
        _set_ddp_sink_clone=lambda on: asked.append(("clone", on)),
    )
    named: dict[str, Any] = {}
    asked._patch.setattr(
        torch_engine, "DistributedDataParallel", lambda module, **given: named.update(given) or made
    )
    asked._patch.setattr(
        torch_engine,
        "_WithSpareParameter",
        lambda module, device: asked.append(("spare", device)) or module,
    )
    groups: Any = SimpleNamespace(dp_group="group")
    assert torch_engine._wrap_ddp(nn.Linear(2, 2), groups, device) is made
    assert named == {
        "device_ids": [device] if device == GPU else None,
        "process_group": "group",
        "forward_sync_buffers": False,
        "gradient_as_bucket_view": True,
        "find_unused_parameters": True,
    }
    assert asked == [
        ("spare", device),
        ("hook", "group", torch_engine.allreduce_hook),
        ("clone", False),
    ]


@pytest.mark.parametrize("device", [GPU, CPU])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_fsdp2_divides_its_sums_by_itself_only_where_the_backend_cannot(
    asked: Asked, device: torch.device, precision: str
) -> None:
    """NCCL supports a mean, but gloo does not.

    The loss is scaled only in fp16, with a scaler for the device.
    """
    model: Any = nn.Linear(2, 2)
    model.set_reduce_scatter_unused_params = lambda on: asked.append(("unused", on))
    model.set_force_sum_reduction_for_comms = lambda on: asked.append(("sum", on))
    scalers: list[Any] = []
    asked._patch.setattr(
        torch_engine.torch.amp, "GradScaler", lambda kind, enabled: scalers.append((kind, enabled))
    )
    asked.of(torch_engine, _torch_optimizer="optimizer", parameter_groups="groups")
    asked._patch.setattr(torch_engine, "TorchEngine", lambda **given: given)
    built: Any = SimpleNamespace(
        model=model, blueprint=SimpleNamespace(trained={}), fp32_parameters=[]
    )
    config = {"gradient_accumulation_steps": 3, "gradient_clipping": 0.5}
    groups: Any = SimpleNamespace(dp_group="group")
    made: Any = torch_engine.make_torch_engine(built, groups, "fsdp2", precision, config, device)
    assert [call for call in asked if call[0] in ("unused", "sum")] == [("unused", True)] + (
        [("sum", True)] if device == CPU else []
    )
    assert ("_torch_optimizer", "groups", config, "group", True) in asked
    assert scalers == [(device.type, precision == "fp16")]
    assert (
        made["autocast"],
        made["accumulation"],
        made["clipping"],
        made["group"],
        made["device"],
    ) == (None, 3, 0.5, "group", device)
    asked.of(torch_engine, _wrap_ddp="wrapped")
    made = torch_engine.make_torch_engine(built, groups, "ddp", precision, config, device)
    assert (made["forward_module"], made["autocast"]) == (
        "wrapped",
        torch_engine.compute_dtype(precision),
    ) and (
        "_torch_optimizer",
        "groups",
        config,
        "group",
        False,
    ) in asked


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", None)]
)
def test_fsdp2_sums_in_fp32_on_the_mesh_of_the_device(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, kind: str, precision: str, dtype: Any
) -> None:
    asked.of(torch_engine.DeviceMesh, from_group="mesh")
    groups: Any = SimpleNamespace(dp_group="group")
    divided: dict[str, Any] = {}
    monkeypatch.setattr(torch_engine, "fully_shard", lambda layer, **given: divided.update(given))
    torch_engine.fsdp2_sharder(groups, precision, kind)(torch.nn.Linear(2, 2))
    policy = divided["mp_policy"]
    assert divided["mesh"] == "mesh" and not divided["ignored_params"]
    assert (policy.param_dtype, policy.reduce_dtype) == (
        (None, None) if dtype is None else (dtype, torch.float32)
    )
    assert asked == [("from_group", "group", kind, ("dp",))]


# Recorded facts and their output
# ----------------------------------------------------------------------------------


def test_peak_memory_is_what_the_devices_allocator_took(asked: Asked) -> None:
    asked.of(torch.cuda, max_memory_reserved=123, max_memory_allocated=99)
    assert run_metadata.peak_memory(GPU) == 123 and asked == [("max_memory_reserved", GPU)]
    assert run_metadata.peak_memory(CPU) > 10**7 and len(asked) == 1


def test_a_device_has_its_name(asked: Asked) -> None:
    asked.of(torch.cuda, is_available=True, get_device_name=H100)
    assert run_metadata.device_name() == H100
    asked.of(torch.cuda, is_available=False)
    assert run_metadata.device_name() == run_metadata.platform.machine() != H100


@pytest.mark.parametrize(
    ("name", "device", "says"),
    [("Strange", GPU, "peak unknown: Strange"), ("x86_64", CPU, ""), (H100, GPU, "")],
)
def test_an_unknown_peak_is_told_of_a_gpu(
    asked: Asked, name: str, device: torch.device, says: str
) -> None:
    loaded: Any = SimpleNamespace(
        engine=SimpleNamespace(device=device),
        model_plan=SimpleNamespace(flops="flops" if name == H100 else None),
    )
    said: list[str] = []
    flops, peak = prepare.speed_limits(loaded, name, said.append)
    assert (flops, peak) == (
        ("flops", prepare.DEVICES[H100].flops) if name == H100 else (None, None)
    )
    assert len(said) == bool(says) and all(says in line for line in said)


def test_a_build_has_the_facts_of_its_cards(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cards = [
        SimpleNamespace(major=9, minor=0, total_memory=80),
        SimpleNamespace(major=8, minor=9, total_memory=24),
        SimpleNamespace(major=9, minor=0, total_memory=80),
    ]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    asked.of(torch.backends.cudnn, version=92000).of(torch.cuda, get_arch_list=["sm_90"])
    found = build_info.collect_build_info(tmp_path / "none")
    assert (found["capabilities"], found["device_memory"], found["cudnn"], found["archs"]) == (
        ["8.9", "9.0"],
        [80, 24, 80],
        "9.20.0",
        ["sm_90"],
    )
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    found = build_info.collect_build_info(tmp_path / "none")
    assert (found["capabilities"], found["device_memory"], found["cudnn"]) == (None, None, None)


# Random generators, pinned memory, clocks
# -------------------------------------------------------------------------


def test_the_devices_generator_is_saved_and_restored(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked.of(torch.cuda, is_available=True, get_rng_state="device state", set_rng_state=None)
    states = save.rng_states()
    assert states["cuda"] == "device state" and states.keys() == {
        "torch",
        "python",
        "numpy",
        "cuda",
    }
    drawn = torch.rand(3).tolist(), random.random(), np.random.rand()
    load.restore_rng_states(states)
    assert (
        asked[-1] == ("set_rng_state", "device state")
        and (torch.rand(3).tolist(), random.random(), np.random.rand()) == drawn
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked.clear()
    load.restore_rng_states(save.rng_states())
    assert not asked


@pytest.mark.parametrize(
    ("group", "there"),
    [
        ({"fused": True}, True),
        ({"capturable": True}, True),
        ({"fused": None, "capturable": False}, False),
        ({}, False),
    ],
)
def test_a_count_lies_where_the_step_looks_for_it(group: dict[str, Any], there: bool) -> None:
    """The meta device represents a device other than the host."""
    weight = torch.empty(2, device="meta")
    counts = {weight: {"step": torch.tensor(3.0)}}
    optimizer = SimpleNamespace(param_groups=[{}, group], state=counts)
    load.place_step_counts(optimizer)
    assert counts[weight]["step"].device.type == ("meta" if there else "cpu")


@pytest.mark.parametrize("available", [True, False])
def test_batches_are_pinned_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, available: bool
) -> None:
    from recipekit.data import batching

    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    domains: Any = SimpleNamespace(step=0, domains=["one"], deal=lambda rows: [], state=dict)
    made = {"input_ids": torch.zeros(1), "labels": torch.ones(1)}
    batches, _ = next(
        batching.iter_steps(
            domains,
            lambda mine: [made, made],
            Request(dataset="x", global_batch=4),
            {},
            batching.DataRank(2, 0),
        )
    )
    assert (
        len(pinned) == (4 if available else 0)
        and len(batches) == 2
        and batches[0].keys() == made.keys()
    )
    assert RowDealer is batching.RowDealer


def test_a_timed_instruction_waits_for_the_device_before_and_after(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 11.0, 13.0, 14.0, 17.0])
    monkeypatch.setattr(timeline.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(
        timeline,
        "get_accelerator",
        lambda: SimpleNamespace(synchronize=lambda: asked.append("wait")),
    )
    asked.of(timeline.dist, barrier=None)

    class Engine:
        _INSTRUCTION_MAP = dict.fromkeys(
            timeline.INSTRUCTION_KINDS, lambda engine, **given: asked.append("work")
        )

    engine: Any = Engine()
    forward = next(kind for kind, name in timeline.INSTRUCTION_KINDS.items() if name == "forward")
    with timeline.record_schedule(engine, enabled=True) as spans:
        for phase in (0, 1):
            engine._INSTRUCTION_MAP[forward](engine, phase=phase)
    assert [call for call in asked if isinstance(call, str)] == ["wait", "work", "wait"] * 2
    assert spans == [
        timeline.InstructionSpan("forward", 0, 0, 1.0, 3.0),
        timeline.InstructionSpan("forward", 1, 0, 4.0, 7.0),
    ]
    assert engine._INSTRUCTION_MAP is Engine._INSTRUCTION_MAP


# Plans and hosts
# --------------------------------------------------------------------------------------------------


def test_a_dry_run_is_for_the_device_that_is_named_else_seen(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    command: Any = SimpleNamespace(device="")
    asked.of(
        torch.cuda,
        is_available=True,
        get_device_name="seen",
        get_device_properties=SimpleNamespace(total_memory=7),
    )
    assert resolve.target_device(command) == ("seen", 7)
    assert resolve.target_device(SimpleNamespace(device="H100-SXM"))[0] == H100  # type: ignore[index, arg-type]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve.target_device(command) is None
    asked.of(resolve, config_in_files=({}, ""), resolve_model=None)
    for device, target in (
        ("", resolve.TargetDevice(CPU, "", compiles=False)),
        ("H100-SXM", resolve.TargetDevice(torch.device("cuda"), H100, compiles=True)),
        (
            "MI300X",
            resolve.TargetDevice(torch.device("cuda"), "AMD Instinct MI300X", compiles=False),
        ),
    ):
        plan: Any = SimpleNamespace(command=SimpleNamespace(device=device))
        resolve.resolve_here(plan)
        assert ("resolve_model", plan, {}, target) in asked


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)],
)
@pytest.mark.parametrize("device", [CPU, GPU])
def test_the_attention_is_chosen_for_precision_and_device(
    monkeypatch: pytest.MonkeyPatch, precision: str, dtype: torch.dtype, device: torch.device
) -> None:
    chosen: list[Any] = []

    def choose_attention(*given: Any) -> tuple[str, str]:
        chosen.append(given)
        raise config_error("attention", "is chosen", "look")

    monkeypatch.setattr(resolve, "choose_attention", choose_attention)
    recipe = SimpleNamespace(attention="auto", model="m", task_spec=None, micro_batch=2, seq_len=9)
    plan: Any = SimpleNamespace(recipe=recipe, mesh=Mesh(), precision=precision)
    with pytest.raises(ConfigError, match="is chosen"):
        resolve.resolve_model(plan, {}, resolve.TargetDevice(device, "", compiles=False))
    assert chosen == [("auto", {}, "m", None, Activations(dtype, device, (2, 9)))]


def test_the_states_of_a_cpu_rank_lie_in_the_hosts_memory(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipekit.plan import resolve_run
    from recipekit.spec.command import parse
    from recipekit.spec.recipe import Recipe

    plan = resolve_run(
        parse(
            Recipe(model="meta-llama/Llama-3.2-1B", ds_config="zero2_cpu.json"),
            Path("needs.py"),
            ["--tiny"],
        )
    )
    terms = resolve.resolve_here(plan)[0].fullest
    accelerator, host = (total_bytes(terms, place) for place in (ACCELERATOR, HOST))
    assert accelerator > 0 and host > 0
    asked.of(
        torch.cuda,
        get_device_properties=SimpleNamespace(total_memory=accelerator),
        get_device_name=H100,
    )
    assert (
        needs.count_required_bytes(plan, on_gpu=False)["host"] == host + accelerator and not asked
    )
    assert needs.count_required_bytes(plan, on_gpu=True)["host"] == host
    asked.of(torch.cuda, get_device_properties=SimpleNamespace(total_memory=accelerator - 1))
    with pytest.raises(ConfigError, match=f"accelerator memory of {H100}"):
        needs.count_required_bytes(plan, on_gpu=True)


def card(number: int, used: int = 0) -> Gpu:
    return Gpu(number, f"GPU-{number}", "L4", 24 << 30, used, "580.1")


@pytest.mark.parametrize(
    ("ranks", "rules"),
    [
        (1, []),
        (2, ["holds 12.0 GiB"]),
        (3, ["holds 12.0 GiB"]),
        (4, ["this host has 3 GPUs", "holds 12.0 GiB"]),
    ],
)
def test_gpus_of_other_ranks_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch, ranks: int, rules: list[str]
) -> None:
    """The second of three GPUs is in use, but a single rank does not use that GPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(
        gpus, "visible_gpus", lambda: [card(0, 2 << 30), card(1, 12 << 30), card(2)]
    )
    monkeypatch.setattr(
        gpus, "check_shared_memory", lambda folder: [ReportRow("shared memory", str(folder))]
    )
    found = list(gpus.check_devices(ranks))
    problems = [problem for problem in found if isinstance(problem, Problem)]
    assert len(problems) == len(rules) and all(
        rule in problem.rule for rule, problem in zip(rules, problems, strict=True)
    )
    assert ReportRow("shared memory", "/dev/shm") in found and "3 x L4 24.0 GiB" in found[0][1]


def test_gpus_are_in_use_where_torch_was_built_for_them_and_sees_one(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    for built, accelerator, sees, expected in (
        ("13.0", None, True, True),
        ("13.0", "cuda", True, True),
        ("13.0", "cpu", True, False),
        ("13.0", None, False, False),
    ):
        monkeypatch.setattr(
            torch_builds,
            "torch_platform_version",
            lambda platform="cuda", built=built: built if platform == "cuda" else None,
        )
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        if accelerator:
            monkeypatch.setenv("DS_ACCELERATOR", accelerator)
        asked.of(torch.cuda, is_available=sees)
        assert torch_builds.gpus_in_use() is expected
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    asked.of(torch.cuda, is_available=True)
    monkeypatch.setattr(
        torch_builds,
        "torch_platform_version",
        lambda platform="cuda": "6.3" if platform == "hip" else None,
    )
    assert torch_builds.gpus_in_use()
    monkeypatch.setattr(torch_builds, "torch_platform_version", lambda platform="cuda": None)
    assert not torch_builds.gpus_in_use()


@pytest.mark.parametrize(
    ("on_gpu", "told"), [(True, {}), (True, {"NCCL_DEBUG": "WARN"}), (False, {})]
)
def test_ranks_meet_over_nccl_where_there_are_gpus(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, on_gpu: bool, told: dict[str, str]
) -> None:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "1")
    asked.of(speed, gpus_in_use=on_gpu).of(torch.cuda, set_device=None, synchronize=None).of(
        torch, set_num_threads=None, zeros="message"
    )
    asked.of(speed.dist, init_process_group=None, all_reduce=None).of(
        speed.dist.distributed_c10d, _set_pg_timeout=None
    )
    assert speed.join_process_group() == {"network": ""}
    device = GPU if on_gpu else CPU
    calls = [call for call in asked if call[0] != "gpus_in_use"]
    assert (
        "init_process_group",
        "nccl" if on_gpu else "gloo",
        speed.JOIN_TIMEOUT if on_gpu else speed.COLLECTIVE_TIMEOUT,
    ) in calls
    assert ("zeros", 1, device) in calls and (("set_device", GPU) in calls) == (
        ("synchronize", GPU) in calls
    ) == on_gpu
    assert ("_set_pg_timeout", speed.COLLECTIVE_TIMEOUT) in calls
    assert ("NCCL_DEBUG_FILE" in os.environ) == (on_gpu and not told)


@pytest.mark.parametrize("sees", [True, False])
def test_deepspeed_is_told_of_the_cpu_where_there_is_nothing_else(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, sees: bool
) -> None:
    for name in ("DS_ACCELERATOR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "x")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_PORT", "77")
    asked.of(torch.accelerator, is_available=sees)
    _single_process_defaults()
    assert os.environ.get("DS_ACCELERATOR") == (None if sees else "cpu")
    assert [
        os.environ[name]
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    ] == ["0", "0", "1", "127.0.0.1", "77"]
