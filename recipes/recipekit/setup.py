"""What happens once before the first step: quiet libraries, compiled ops, the checkpoint to go on from, the facts of the run."""

import contextlib
import fcntl
import functools
import json
import logging
import os
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cpuinfo
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import logger

from . import checkpoint, expert_parallel
from .blueprint import Layout
from .data import OtherData, Stream, open_stream
from .data.stream import changed_files, first_of, open_corpus
from .ds_config import check_device
from .mesh import Mesh
from .model import Built, empty_model, enabled
from .plan import Plan, identity
from .recipe import Recipe
from .refusal import Problem, Refusal, refuse

# Dense bf16 FLOP/s by the name of the device, from NVIDIA's data sheets (those with sparsity are twice as high).
PEAK_FLOPS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 4090": 165e12,
}
DATA_FILES = "data_files.json"  # in the run folder: what was read, so that a resume can name a file that is another one now


def start(plan: Plan) -> torch.device:
    """Compiles what is missing, joins the process group, seeds, and returns this rank's device (a collective)."""
    quiet()
    device = torch.device("cuda", plan.command.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if problems := check_device(plan.ds_config, device.type):
        raise Refusal(problems)
    prepare_ops(plan)
    # DeepSpeed 0.19 lowered its own default to 10 minutes, which a large save on a slow disk outlasts; and all wait while rank 0 asks a server
    deepspeed.init_distributed(timeout=timedelta(minutes=30, seconds=plan.recipe.retry_s), verbose=False)
    unlink_shared_memory()
    torch.manual_seed(plan.recipe.seed)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def unlink_shared_memory() -> None:
    """Removes the names of the shared memory that DeepSpeed's CPU collectives have opened (a collective).

    DeepSpeed 0.19.8 leaves 66 MiB a rank in /dev/shm after every run on a CPU (csrc/cpu/comm/shm.cpp never calls its
    destroy), named by port. Once every rank has opened them the names are not needed, and then the memory goes with its
    processes, however they end.
    """
    dist.barrier()
    for name in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_*"):
        name.unlink(missing_ok=True)


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
    """What is wrong with the data of any rank, the same on all (a collective). An error that is no refusal is raised where it is."""
    if error is not None and not isinstance(error, Refusal):
        raise error
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, error.problems if error else [])
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


def peak_memory(device: torch.device) -> int:
    """Bytes: the device's peak of allocated memory, or on a CPU the peak resident size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
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


def ideal_step_seconds(recipe: Recipe, model_config: dict[str, Any], mesh: Mesh, device_name: str) -> float | None:
    """Seconds of an optimizer step on devices at their peak; None for one that is not known, and under an adapter, whose frozen weights cost less."""
    peak = PEAK_FLOPS.get(device_name)
    flops = flops_per_token(empty_model(recipe, model_config), recipe.seq_len) if peak and recipe.adapt is None else None
    return flops * recipe.global_batch * recipe.seq_len / (peak * mesh.world) if peak and flops else None


def flops_per_token(model: Any, seq_len: int) -> float | None:
    """Forward and backward of a whole model: 6 N + 12 * layers * heads * head_dim * seq_len (PaLM, arXiv 2204.02311, appendix B).

    N leaves out an embedding that is only looked up, and the experts that a token does not meet. None where the
    config says that a layer attends otherwise, or lacks a number.
    """
    config, embedding = model.config.get_text_config(), model.get_input_embeddings().weight
    layers, heads, hidden = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    other = hasattr(config, "kv_lora_rank") or set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    experts = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    chosen, held = (getattr(config, name, None) for name in ("num_experts_per_tok", "num_local_experts")) if experts else (1, 1)
    if not (layers and heads and hidden and chosen and held) or other:
        return None
    met = sum(parameter.numel() for parameter in model.parameters()) - experts * (1 - chosen / held)
    met -= 0 if embedding is model.get_output_embeddings().weight else embedding.numel()
    return 6 * met + 12 * layers * heads * (getattr(config, "head_dim", None) or hidden // heads) * seq_len


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
        "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers", "datasets", "accelerate", "wandb")}
        | {"python": platform.python_version()},
        "git_commit": commit or None,
        "host": {
            "name": platform.node(),
            "cpus": os.cpu_count(),
            "devices": torch.cuda.device_count(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        },
        "argv": sys.argv,
    }


def write_facts(plan: Plan, facts: dict[str, Any], files: dict[str, dict[str, str]]) -> None:
    """Writes run.json; the resolved JSON by itself, which anyone's `--deepspeed_config` accepts; and the files that are read."""
    plan.out.mkdir(parents=True, exist_ok=True)
    written = {"ds_config.json": json.dumps(plan.ds_config, indent=2), DATA_FILES: json.dumps(files, indent=0), "run.json": json.dumps(facts, indent=1)}
    for name, content in written.items():
        (plan.out / f"{name}.tmp").write_text(content)
        os.replace(plan.out / f"{name}.tmp", plan.out / name)  # a kill leaves the old file or the new one


def prepare_ops(plan: Plan) -> None:
    """Compiles the DeepSpeed ops this run needs, saying so; once per machine and TORCH_EXTENSIONS_DIR."""

    zero = plan.ds_config["zero_optimization"]
    homes = {zero.get(block, {}).get("device", "none") for block in ("offload_optimizer", "offload_param")}
    offloaded = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    wanted = [("shared-memory communication", "30 s", "ShareMemCommBuilder")] if not torch.cuda.is_available() else []
    if offloaded and not plan.ds_config["optimizer"].get("params", {}).get("torch_adam", False):
        wanted.append(("CPU Adam", "60 s", "CPUAdamBuilder"))
    if "nvme" in homes:
        wanted.append(("asynchronous I/O", "180 s", "AsyncIOBuilder"))
    for title, typical, name in wanted:
        load_op(name, f"{title} (once, about {typical} on two cores)", print if plan.command.local_rank == 0 else lambda _: None)


def load_op(name: str, title: str, say: Callable[[str], None]) -> None:
    """Loads one of DeepSpeed's C++ ops, compiling it first where it is missing; one process of a host at a time.

    torch 2.13 marks a compile with a plain file (FileBaton); a process that is killed meanwhile leaves it, and every later
    one waits for ever. The kernel drops our lock with its process, so whoever holds it may remove such a file.
    """
    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        # It takes a second, and DeepSpeed 0.19.8 asks it twice for each of these ops and once for each CPU Adam.
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    if name != "ShareMemCommBuilder":
        cpuinfo.get_cpu_info()  # now: below, the ranks of a host come one by one
    accelerator: Any = get_accelerator()
    builder = accelerator.create_op_builder(name)
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    cache.mkdir(parents=True, exist_ok=True)
    # another version of ninja than the one that compiled it rebuilds everything: always take this environment's
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with (cache / f"{builder.name}.flock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not any(cache.glob(f"**/{builder.name}.so")):
                say(f"waiting for another process that compiles DeepSpeed's {title}")
            fcntl.flock(file, fcntl.LOCK_EX)
        for left_over in cache.glob(f"**/{builder.name}/lock"):
            left_over.unlink()
        missing = not any(cache.glob(f"**/{builder.name}.so"))
        begun = time.perf_counter()
        if missing:
            say(f"compiling DeepSpeed's {title} ...")
        builder.load(verbose=False)
        if missing:
            say(f"compiled in {time.perf_counter() - begun:.0f} s")


def quiet() -> None:
    """Leaves warnings and errors of the libraries visible, not their information lines."""
    logger.setLevel(logging.WARNING)
    # DeepSpeed 0.19.8 calls collectives by the names that torch 2.13 renames; the warning repeats for each
    warnings.filterwarnings("ignore", message=r".*is deprecated\. Please use `torch\.distributed", category=FutureWarning)
