"""What happens once before the first step: quiet libraries, compiled ops, the checkpoint to go on from, the facts of the run."""

import contextlib
import importlib
import json
import logging
import os
import platform
import resource
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import logger

from . import checkpoint, deterministic, expert_parallel
from .blueprint import Layout
from .build_facts import build_facts, versions
from .data import OtherData, Stream, open_stream
from .data.stream import changed_files, first_of, open_corpus
from .devices import DEVICES
from .dry_run import rank_plan
from .ds_config import check_device
from .failure import Peers
from .flops import CONVENTION, Flops, model_flops
from .groups import time_limit, waiting_group
from .host_checks import free_memory
from .memory import ACCELERATOR, HOST, NVME, gib, too_much
from .mesh import Mesh
from .model import Built, empty_model, enabled
from .ops import prepare_ops
from .plan import Plan, identity
from .recipe import Recipe
from .refusal import Problem, Refusal, refuse
from .torch_builds import gpus_in_use

DATA_FILES = "data_files.json"  # in the run folder: what was read, so that a resume can name a file that is another one now


def start(plan: Plan, peers: Peers | None = None) -> torch.device:
    """Compiles what is missing, joins the process group, watches the other ranks, seeds, and returns this rank's device (a collective)."""
    quiet()
    if plan.recipe.deterministic:
        deterministic.switch_on()
    device = torch.device("cuda", plan.command.local_rank) if gpus_in_use() else torch.device("cpu")
    if problems := check_device(plan.ds_config, device.type):
        raise Refusal(problems)
    prepare_ops(plan.ds_config, print if plan.command.local_rank == 0 else lambda _: None)
    do_without_shm_op()
    deepspeed.init_distributed(timeout=time_limit(plan.recipe.retry_s), verbose=False)
    if peers:
        peers.watch(waiting_group())
    lacking = None
    try:
        check_memory(plan, device)
    except Refusal as refusal:
        lacking = refusal
    problems = shared_problems(lacking)  # of one host, which the others would wait for
    if once := {(problem.where.partition(" = ")[0], problem.rule): problem for problem in problems}:  # each rank saw a little more or less free
        raise Refusal(list(once.values()))
    torch.manual_seed(plan.recipe.seed)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def do_without_shm_op() -> None:
    """Lets `init_distributed` do without an op that no run here calls.

    DeepSpeed 0.19.8 builds and opens it on every CPU (comm/torch.py, build_shm_op), for `inference_all_reduce` alone: half a minute of
    compiling, 66 MiB a rank in /dev/shm, where the rank ends with a SIGBUS if they are not there, and which is never given back
    (csrc/cpu/comm/shm.cpp). Without it `inference_all_reduce` is torch's `all_reduce`, as all other collectives are.
    """
    backend: Any = importlib.import_module("deepspeed.comm.torch")  # deepspeed.comm's own attribute `torch` is torch
    backend.build_shm_op = lambda: None


def undo_hidden_step(engine: Any) -> None:
    """Makes step 1 the first one that the optimizer takes.

    DeepSpeed 0.19.8 allocates the states of its ZeRO-0 mixed-precision optimizer by a step with zero gradients
    (unfused_optimizer.py, initialize_optimizer_states): it decays the weights once, and Adam's bias correction is one
    step ahead ever after, which makes the first update a quarter too small.
    """
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        engine.basic_optimizer.state.clear()
        with torch.no_grad():
            for masters, weights in zip(engine.optimizer.fp32_groups, engine.optimizer.fp16_groups, strict=True):
                for master, weight in zip(masters, weights, strict=True):
                    master.copy_(weight)


def keep_grad_norm(engine: Any) -> None:
    """Lets `engine.get_global_grad_norm()` tell the norm where DeepSpeed keeps none, and clips by it.

    DeepSpeed 0.19.8 has no norm with a plain optimizer (fp32, ZeRO-0); and under a pipeline its clipping counts, of the
    stages behind the first, only what tensor parallelism cut (runtime/utils.py, clip_grad_norm_).
    """
    if not isinstance(engine.optimizer, torch.optim.Optimizer):
        return
    take_step = engine._take_model_step

    def clip_and_step(*args: Any) -> None:
        norm = grad_norm(engine)
        if (most := engine.gradient_clipping()) > 0:
            scale = torch.clamp(most / (norm + 1e-6), max=1.0)
            for parameter in engine.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        engine._global_grad_norm = norm
        take_step(*args)

    engine._take_model_step = clip_and_step
    engine.clip_fp32_gradients = lambda: None


def grad_norm(engine: Any) -> torch.Tensor:
    """The norm of all gradients, each parameter counted once over the tensor, pipeline and expert ranks (a collective)."""
    first = engine.mpu is None or engine.mpu.get_tensor_model_parallel_rank() == 0
    squares = torch.zeros((), dtype=torch.float64, device=engine.device)
    for parameter in engine.module.parameters():
        counted = (first or getattr(parameter, "model_parallel", False)) and not getattr(parameter, "ds_pipe_replicated", False)
        if parameter.grad is not None and counted:
            square = parameter.grad.detach().double().square().sum()
            if (holders := expert_parallel.group_of(parameter)) is not None:
                dist.all_reduce(square, group=holders)
            squares += square
    if engine.mpu is not None:
        dist.all_reduce(squares, group=engine.mpu.get_model_parallel_group())
    return squares.sqrt()


def find_checkpoint(plan: Plan, say: Any) -> Path | None:
    """The step folder to go on from, the same on every rank, which share the verification (a collective)."""
    found: list[Any] = [None, False]
    if plan.resume_from is not None:
        found = [checkpoint.newest(plan.resume_from, say), any(plan.resume_from.glob("checkpoints/step_*"))]  # none: it was stopped before its first save
        dist.broadcast_object_list(found)
        if found[0] is None and (found[1] or plan.recipe.resume != "auto"):
            raise refuse(f"resume from {plan.resume_from}", "holds no complete checkpoint", "give another folder, or --resume never to start anew")
    return found[0]


def check_data(recipe: Recipe, tokenizer: Any, say: Any) -> None:
    """Opens the data once, before anything large is made (a collective). Raises `Refusal`, on all ranks, with what any of them cannot open."""
    refusal = None
    try:
        open_corpus(recipe, tokenizer, say)
    except Refusal as error:
        refusal = error
    if problems := shared_problems(refusal):
        raise Refusal(problems)


def open_data(plan: Plan, tokenizer: Any, dp_rank: int, state: dict | None, say: Any) -> Stream:
    """The training data from `state` on; from its beginning if it is other data, which `--resume PATH` accepts."""
    layout = {"dp": plan.mesh.dp, "dp_rank": dp_rank, "say": say}
    try:
        return open_stream(plan.recipe, tokenizer, state=state, files=files_of_run(plan.resume_from), **layout)
    except OtherData as refusal:
        if plan.recipe.resume == "auto":
            raise
        stream = open_stream(plan.recipe, tokenizer, **layout)
        say(f"other data than the checkpoint's, read from its beginning: {'; '.join(problem.where for problem in refusal.problems)}")
        return stream


def check_same_data(stream: Stream) -> None:
    """Proves that all ranks read the same data, before the first step (a collective). Raises `Refusal`, on all ranks, that names each host that holds others."""
    own = (platform.node(), stream.state["identity"])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    (first_host, first), rank = everyone[0], dist.get_rank()
    if all(identity == first for _, identity in everyone):
        return
    files: list[Any] = [stream.files]
    dist.broadcast_object_list(files)
    refusal = None
    if own[1] != first and everyone.index(own) == rank:  # the first rank of its host tells
        changed = changed_files(files[0], stream.files)
        keys = ", ".join(key for key in first if own[1].get(key) != first[key])
        rule = f"differ from those of rank 0 on {first_host} in {keys}{f': {first_of(changed)}' if changed else ''}"
        refusal = refuse(f"the data of rank {rank} on {own[0]}", rule, "give every host the same files, or a folder that all share")
    raise Refusal(shared_problems(refusal))


def files_of_run(saved: Path | None) -> dict[str, dict[str, str]]:
    """domain -> file -> digest, as the run of a run or step folder read them; empty where that is not known."""
    for run in [saved, saved.parent.parent] if saved else []:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((run / DATA_FILES).read_text())
    return {}


def shared_problems(error: BaseException | None) -> list[Problem]:
    """What is wrong on any rank, the same on all (a collective). An error that is no refusal is raised where it is."""
    if error is not None and not isinstance(error, Refusal):
        raise error
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, error.problems if error else [], group=waiting_group())  # one of them may read a slow disk
    return list(dict.fromkeys(problem for problems in everyone for problem in problems))


def check_peers(mesh: Mesh, seen: int, step: int, device: torch.device) -> None:
    """Proves that all ranks of one data-parallel coordinate were given the same tokens up to `step` (a collective).

    `seen` is what `data.roll` makes of them. Raises RuntimeError with the ranks that differ.
    """
    if mesh.dp == mesh.world:
        return
    own = torch.tensor([seen - (1 << 64) if seen >> 63 else seen], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(own) for _ in range(mesh.world)]
    dist.all_gather(everyone, own)
    first: dict[int, int] = {}
    for rank, hashed in enumerate(everyone):
        dp_rank = mesh.coords(rank)["dp"]
        if not torch.equal(hashed, everyone[first.setdefault(dp_rank, rank)]):
            raise RuntimeError(f"ranks {first[dp_rank]} and {rank} share data-parallel rank {dp_rank}, but were given other tokens up to step {step}")


def put_aside(out: Path) -> None:
    """Moves an existing run folder to the first free `<name>.N`; nothing is overwritten."""
    number = 1
    while (aside := out.with_name(f"{out.name}.{number}")).exists():
        number += 1
    os.rename(out, aside)
    print(f"the run that was in {out} is now in {aside}")


def check_memory(plan: Plan, device: torch.device) -> None:
    """Raises `Refusal` where the states of this rank, or those of all ranks of its host, certainly exceed what is free; before anything large is made."""
    if plan.model_config is None:
        return
    stage, rank = plan.mesh.coords(plan.command.rank)["pp"], plan.command.rank
    terms, problems = rank_plan(plan, stage), []
    first, ranks = rank - plan.command.local_rank, int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    alike = sum(plan.mesh.coords(other)["pp"] == stage for other in range(max(0, first), min(first + ranks, plan.mesh.world)))
    if device.type == "cuda":
        if plan.command.rank == 0 and (pinned := sum(term.pinned for term in terms if not term.bound)):
            print(f"offload pins {gib(pinned)} of host memory on each rank, rounding included")
        problems += too_much(terms, ACCELERATOR, torch.cuda.mem_get_info(device)[0], on=f"{torch.cuda.get_device_name(device)} that is free")
    else:
        # of a bucket, the kernel gives only the pages that are written
        terms = [replace(term, place=HOST, pinned=0, bound=term.bound or "bucket" in term.what) for term in terms if term.place != NVME]
    if (free := free_memory()) is not None:
        problems += too_much(terms, HOST, free, max(1, alike), on=f"{platform.node()} that is free")
    if problems:
        raise Refusal(problems)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that the device's allocator has reserved for this rank, by which it runs out; on a CPU the peak resident size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def layout_of(plan: Plan, engine: Any, built: Built) -> Layout:
    """How this job holds the model, as its checkpoints describe it."""
    zero, optimizer = plan.ds_config["zero_optimization"], engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    swapper = getattr(optimizer, "optimizer_swapper", None)
    swap = (
        {"swap_bytes": swapper.min_aio_bytes, "swap_align": swapper.aligned_bytes, "swap_first": min(p.ds_id for p in engine.module.parameters())}
        if swapper
        else {}
    )
    return Layout(
        mesh=plan.mesh,
        zero_stage=zero["stage"],
        optimizer="torch" if isinstance(optimizer, torch.optim.Optimizer) else type(optimizer).__name__,
        dtype="bfloat16" if enabled(plan.ds_config, "bf16") else "float16" if enabled(plan.ds_config, "fp16") else "float32",
        bounds=built.split.bounds if built.split else (),
        schedule=plan.recipe.pipeline_schedule if built.split else "1f1b",
        sub_group_size=int(zero.get("sub_group_size", 1_000_000_000)),
        int_step=type(inner).__module__.startswith("deepspeed"),
        swapped=swapper is not None,
        **swap,
    )


def step_flops(recipe: Recipe, model_config: dict[str, Any]) -> Flops | None:
    """What a step has to compute; None for a model of which it is not known."""
    model = empty_model(recipe, model_config)
    return model_flops(recipe.adapt(model) if recipe.adapt is not None else model)


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def export_dtype(plan: Plan, model_config: dict[str, Any]) -> torch.dtype:
    """The source model's dtype, or the training dtype for a model trained from scratch."""
    if plan.recipe.init == "random":
        return torch.bfloat16 if enabled(plan.ds_config, "bf16") else torch.float32
    return getattr(torch, model_config.get("dtype") or model_config.get("torch_dtype") or "float32")


def run_facts(plan: Plan, model_config: dict[str, Any]) -> dict[str, Any]:
    """What run.json holds: everything that made this run."""
    recipe = {name: value for name, value in vars(plan.recipe).items() if isinstance(value, (str, int, float, bool))}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=plan.command.folder, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "recipe": recipe | {"name": plan.command.name, "tiny": plan.command.tiny},
        "identity": identity(plan.recipe, plan.model_config),
        "mesh": vars(plan.mesh) | {"world": plan.mesh.world, "name": str(plan.mesh)},
        "ds_config": plan.ds_config,
        "model_config": model_config,
        "versions": versions(),
        "build": build_facts(),
        "git_commit": commit or None,
        "host": {
            "name": platform.node(),
            "cpus": os.cpu_count(),
            "devices": torch.cuda.device_count(),
            "device": device_name(),
        },
        "deterministic": deterministic.check_in_force() if plan.recipe.deterministic else None,
        "mfu": {"convention": CONVENTION, "peak": DEVICES[device_name()].flops} if device_name() in DEVICES else None,
        "argv": sys.argv,
    }


def write_facts(plan: Plan, facts: dict[str, Any], files: dict[str, dict[str, str]]) -> None:
    """Writes run.json; the resolved JSON by itself, which anyone's `--deepspeed_config` accepts; and the files that are read."""
    plan.out.mkdir(parents=True, exist_ok=True)
    written = {"ds_config.json": json.dumps(plan.ds_config, indent=2), DATA_FILES: json.dumps(files, indent=0), "run.json": json.dumps(facts, indent=1)}
    for name, content in written.items():
        (plan.out / f"{name}.tmp").write_text(content)
        os.replace(plan.out / f"{name}.tmp", plan.out / name)  # a kill leaves the old file or the new one


def quiet() -> None:
    """Leaves warnings and errors of the libraries visible, not their information lines."""
    logger.setLevel(logging.WARNING)
    # DeepSpeed 0.19.8 prints six lines for each group (bf16_optimizer.py, see_memory_usage with force), and resets the peak of the device's memory with them
    bf16_optimizer.see_memory_usage = lambda *_, **__: None
    # DeepSpeed 0.19.8 calls collectives by the names that torch 2.13 renames; the warning repeats for each
    warnings.filterwarnings("ignore", message=r".*is deprecated\. Please use `torch\.distributed", category=FutureWarning)
