"""Tests that need a GPU: `make test-gpu`.

Machines without a GPU do not run any of these tests.

A case runs in separate processes, which see the GPUs that pytest was started with. All other tests
hide the GPUs. Two ranks share one GPU over NCCL if its version is 2.30 or newer and
NCCL_MULTI_RANK_GPU_ENABLE=1 is set. The cases of two GPUs (`multi_gpu`) then run on one GPU. With
another NCCL, two ranks share a GPU over gloo, and the cases of two GPUs need two. Gloo cannot send
GPU tensors from rank to rank, as a pipeline does. With gloo, torch 2.11 crashes if a DTensor on a
GPU is gathered.
"""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from device_cases import (
    ADAPTED,
    QUICK,
    RECIPE,
    SLOW,
    check_adapter,
    check_training,
    copies_for_a_checkpoint,
    drawn_otherwise,
    mixture,
    rule_breakers,
    train_twice,
    wrong_weight,
)
from job import NANO, metrics
from packed_documents import computes_on_a_gpu
from parity import recipe_for
from pool import BEGAN_WITH, OF_A_GPU, ROOT, environment, free_port
from recipekit.spec.command import parse
from recipekit.spec.recipe import Recipe
from shipped_jsons import strategy
from tiny_models import save_tiny

pytestmark = pytest.mark.gpu
# Tolerance relative to the CPU's losses, norms and weights after two fp32 steps. CUDA adds in a
# different order.
WITHIN = 1e-4


def environment_of_gpus() -> dict[str, str]:
    """Return the tests' environment, with the GPUs that pytest was started with."""
    return {
        name: value for name, value in environment().items() if name not in OF_A_GPU
    } | json.loads(os.environ[BEGAN_WITH])


@cache
def found_gpus() -> tuple[int, bool]:
    """Return the number of GPUs that torch sees, and if several ranks can use NCCL on one GPU."""
    ask = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tools' / 'bench')!r})\n"
        "import torch, gpu_run\n"
        "print(torch.cuda.device_count() if torch.cuda.is_available() else 0,"
        " int(gpu_run.shares_gpu(gpu_run.loaded_nccl())))"
    )
    told = subprocess.run(
        [sys.executable, "-c", ask],
        env=environment_of_gpus(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    count, shared = map(int, told.split())
    return count, bool(shared)


@pytest.fixture(scope="session", autouse=True)
def gpus() -> int:
    """Return the number of GPUs that torch sees; skip the tests if it is 0."""
    count, _ = found_gpus()
    if count == 0:
        pytest.skip("needs a GPU that torch sees")
    return count


@pytest.fixture(scope="session")
def two_gpus(gpus: int) -> None:
    """Skip a test if two ranks cannot communicate over NCCL."""
    if gpus < 2 and not found_gpus()[1]:
        pytest.skip("needs two GPUs, or NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1")


def run(
    case: Callable[..., Any],
    world: int = 1,
    gloo: bool = False,
    one_gpu: bool = False,
    timeout: float = 300,
    **arguments: Any,
) -> list[Any]:
    """Run `case(**arguments)` on each rank and return the results.

    With `gloo` the ranks communicate over gloo instead of NCCL. With `one_gpu`, or if there are
    fewer GPUs than ranks, all ranks use the first GPU. If a rank fails, the output of all ranks is
    shown.
    """
    one_gpu = one_gpu or found_gpus()[0] < world
    folder = (
        Path(arguments.get("out") or arguments.get("folder") or "/tmp")
        / f"ranks_{time.monotonic_ns()}"
    )
    folder.mkdir(parents=True)
    (folder / "case").write_bytes(pickle.dumps((case.__module__, case.__name__, arguments, gloo)))
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in range(world):
        own = shared | {"RANK": str(rank), "LOCAL_RANK": "0" if one_gpu else str(rank)}
        with (folder / f"log{rank}").open("wb") as log:
            command = [
                sys.executable,
                "-c",
                "import sys, test_gpu; test_gpu.rank(sys.argv[1])",
                str(folder),
            ]
            ranks.append(
                subprocess.Popen(command, env=environment_of_gpus() | own, stdout=log, stderr=log)
            )
    deadline = time.monotonic() + timeout
    while (
        any(process.poll() is None for process in ranks)
        and not any(process.poll() for process in ranks)
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    for process in ranks:
        if process.poll() is None:
            process.kill()
        process.wait()
    logs = "\n".join((folder / f"log{rank}").read_text()[-3000:] for rank in range(world))
    assert [process.returncode for process in ranks] == [0] * world, logs
    return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world)]


def rank(folder: str) -> None:
    """Run one rank of `run`."""
    import importlib

    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from recipekit.compat.deepspeed import skip_shm_op_build
    from recipekit.runtime.start import quiet_library_logs

    module, name, arguments, gloo = pickle.loads((Path(folder) / "case").read_bytes())
    quiet_library_logs()
    if gloo:
        accelerator: Any = get_accelerator()
        accelerator._communication_backend_name = "gloo"
        skip_shm_op_build()
        # DeepSpeed would bind the group to the GPU. torch would then split the group in a way that
        # only NCCL supports.
        torch.distributed.init_process_group("gloo")
        deepspeed.init_distributed("gloo", verbose=False)
    result = getattr(importlib.import_module(module), name)(**arguments)
    (Path(folder) / f"result{os.environ['RANK']}").write_bytes(pickle.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def two_ranks_on_one_gpu(case: Callable[..., Any], **arguments: Any) -> list[Any]:
    """Run `case` on two ranks of one GPU, over NCCL if this NCCL can share a GPU, else gloo."""
    return run(case, world=2, gloo=not found_gpus()[1], one_gpu=True, **arguments)


@pytest.mark.parametrize("layout", [layout for layout in (*QUICK, *SLOW) if "pp2" not in layout])
def test_two_ranks_on_one_gpu_train_like_plain_pytorch(tmp_path: Path, layout: str) -> None:
    check_training(two_ranks_on_one_gpu, tmp_path, layout, WITHIN, export="tp2" not in layout)


@pytest.mark.parametrize("file", ADAPTED)
def test_an_adapter_in_bf16_is_trained_and_merged(tmp_path: Path, file: str) -> None:
    check_adapter(two_ranks_on_one_gpu, tmp_path, file)


@pytest.mark.parametrize("file", ["zero1", "zero3"])
def test_fp16_which_a_cpu_refuses_trains(tmp_path: Path, file: str) -> None:
    """The first steps may be skipped during the search for the loss scale, which starts at 2^16."""
    save_tiny(tmp_path / "model", "llama")
    recipe = dataclasses.replace(RECIPE, model=str(tmp_path / "model"), steps=20, eval_every=0)
    config = strategy(file) | {"fp16": {"enabled": True}}
    assert (
        two_ranks_on_one_gpu(train_twice, recipe=recipe, config=config, out=str(tmp_path / "run"))
        == [[0, 0]] * 2
    )
    losses = [line["loss"] for line in metrics(tmp_path / "run")]
    assert losses[-1] < losses[0]


def test_a_cut_weight_that_is_not_its_files_is_found(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    for told in two_ranks_on_one_gpu(joined, folder=str(tmp_path)):
        assert "differs from the model's files" in told


def joined(folder: str) -> str:
    torch.cuda.set_device(0)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl")
    return wrong_weight(folder, "cuda")


def test_drawn_weights_are_those_of_the_cpu() -> None:
    assert two_ranks_on_one_gpu(drawn_on_cuda, tp=1) == [[], []]


@pytest.mark.multi_gpu
@pytest.mark.usefixtures("two_gpus")
def test_drawn_weights_of_two_gpus_are_those_of_the_cpu() -> None:
    assert run(drawn_on_cuda, world=2, tp=2) == [[], []]


def drawn_on_cuda(tp: int) -> list[str]:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl")
    return drawn_otherwise("cuda", tp)


def test_cuda_takes_what_the_second_device_takes() -> None:
    """Assumptions in the tests with the second device must also hold for CUDA."""
    assert run(rule_breakers_over_nccl) == [[]]


def rule_breakers_over_nccl() -> list[str]:
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl")
    return rule_breakers("cuda")


def test_a_checkpoint_copies_what_lies_on_the_device() -> None:
    run(copies_for_a_checkpoint, device="cuda")


@pytest.mark.multi_gpu
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("layout", [*QUICK, *SLOW])
def test_two_gpus_train_like_plain_pytorch(tmp_path: Path, layout: str) -> None:
    check_training(partial(run, world=2), tmp_path, layout, WITHIN)
    assert (tmp_path / "run" / "schedule.png").exists() == ("pp2" in layout), (
        "the device is waited for around each part of a pipeline's step"
    )


def started(out: str) -> dict[str, Any]:
    """Return a rank's state after `start`, and its process groups' timeouts after training."""
    from recipekit import train
    from recipekit.plan import resolve_run
    from recipekit.runtime import prepare
    from torch.distributed import distributed_c10d as c10d

    found: dict[str, Any] = {}
    start = prepare.initialize_distributed

    def watching(*arguments: Any) -> torch.device:
        device = start(*arguments)
        draws = [torch.rand(4, device=device).tolist(), torch.rand(4).tolist()]
        torch.manual_seed(arguments[0].recipe.seed)
        again = [torch.rand(4, device=device).tolist(), torch.rand(4).tolist()]
        current, seeded = torch.device("cuda", torch.cuda.current_device()), draws == again
        found.update(
            device=str(device),
            current=str(current),
            backend=torch.distributed.get_backend(),
            seeded=seeded,
        )
        torch.manual_seed(arguments[0].recipe.seed)
        return device

    prepare.initialize_distributed = watching
    sys.argv = ["gpu.py"]
    recipe = dataclasses.replace(
        RECIPE,
        model="meta-llama/Llama-3.2-1B",
        init="random",
        ds_config="zero1.json",
        out=out,
        steps=2,
    )
    assert train.main(resolve_run(parse(recipe, Path("gpu.py"), ["--tiny"]))) == 0
    groups: dict[Any, Any] = dict(c10d._world.pg_map)
    found["limits"] = [
        group._get_backend(torch.device("cuda")).options._timeout
        for group, (kind, _) in groups.items()
        if "nccl" in kind
    ]
    return found


def test_a_rank_joins_over_nccl_on_its_own_gpu(tmp_path: Path) -> None:
    (found,) = run(started, out=str(tmp_path / "run"))
    limits = found.pop("limits")
    assert found == {"device": "cuda:0", "current": "cuda:0", "backend": "nccl", "seeded": True}
    assert limits and min(limits) >= timedelta(minutes=30), (
        "a peer that waits for data or a slow disk is waited for in every group"
    )


def test_a_recipe_on_a_gpu_tells_of_it(gpus: int, tmp_path: Path) -> None:
    """With plain `python`, run.json names the device, and the metrics contain peak memory and MFU.

    No code is compiled.
    """
    command = [
        sys.executable,
        str(NANO),
        "--tiny",
        "--steps",
        "3",
        "--out",
        str(tmp_path / "run"),
        "--no-wandb",
    ]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment_of_gpus(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "compiling" not in ran.stdout
    host = json.loads((tmp_path / "run" / "run.json").read_text())["host"]
    ask = (
        "import torch; print(torch.cuda.get_device_name(),"
        " torch.cuda.get_device_properties(0).total_memory, sep='\\n')"
    )
    told = subprocess.run(
        [sys.executable, "-c", ask],
        env=environment_of_gpus(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    name, total = told.splitlines()
    assert (host["devices"], host["device"]) == (gpus, name)
    lines = metrics(tmp_path / "run")
    assert all(10**6 < line["peak_mem_bytes"] < int(total) for line in lines)
    if any(kind in name for kind in ("A100", "H100", "H200")):  # devices with a known peak
        assert all(0 < line["mfu"] < 1 for line in lines)


def peaks() -> tuple[int, int]:
    """Return peak_memory before and after 256 MiB are allocated and freed."""
    from recipekit.runtime.run_metadata import peak_memory

    device = torch.device("cuda", 0)
    torch.ones(1, device=device)
    before = peak_memory(device)
    del_me = torch.empty(2**28, dtype=torch.uint8, device=device)
    del del_me
    return before, peak_memory(device)


def test_peak_memory_is_the_devices() -> None:
    ((before, after),) = run(peaks)
    assert 0 < before < 2**28 <= after - before + 2**21, (before, after)


def pinned_batches(dataset: str) -> dict[str, int]:
    """Copy batches to a busy device.

    Return the number of batches, and how many were pinned, copied late, or changed on arrival.
    """
    from recipekit.data.batching import DataRank
    from recipekit.data.processors import load_tokenizer
    from recipekit.data.request import request_from_recipe
    from recipekit.data.stream import open_stream
    from recipekit.train import to_device

    device = torch.device("cuda", 0)
    recipe = dataclasses.replace(
        RECIPE, model="none", dataset=dataset, seq_len=1024, micro_batch=8, global_batch=32
    )
    stream = open_stream(
        request_from_recipe(recipe),
        load_tokenizer(recipe.model, recipe.tokenizer),
        rank=DataRank(1, 0),
    )
    work = torch.ones(4096, 4096, device=device)
    found, moved, told = {"batches": 0, "pinned": 0, "changed": 0}, [], []
    try:
        for _ in range(40):
            # The data thread reuses the memory of these batches once they are deleted.
            for batch in next(stream)[0]:
                for _ in range(4):
                    # The copy waits for this work to finish, while this thread continues.
                    work = work @ work / 4096
                told.append({name: tensor.clone() for name, tensor in batch.items()})
                moved.append(to_device(batch, device))
                found["batches"] += 1
                found["pinned"] += all(tensor.is_pinned() for tensor in batch.values())
    finally:
        stream.close()
    for before, after in zip(told, moved, strict=True):
        same = all(
            torch.equal(before[name], tensor.cpu())
            and tensor.device == device
            and tensor.is_contiguous()
            for name, tensor in after.items()
        )
        found["changed"] += not same
    return found


def test_pinned_batches_arrive_as_they_were(tmp_path: Path) -> None:
    (found,) = run(pinned_batches, dataset=mixture(tmp_path / "data"), timeout=300)
    assert found == {"batches": 160, "pinned": 160, "changed": 0}


def drawn_again(folder: str) -> list[bool]:
    """Return (GPU, CPU). Each is True if random numbers repeat after their state is restored."""
    from recipekit.checkpoints.deepspeed_io import read_pickle
    from recipekit.checkpoints.load import restore_rng_states
    from recipekit.checkpoints.save import rng_states

    torch.cuda.set_device(0)
    torch.manual_seed(3)
    torch.save(rng_states(), f"{folder}/rng.pt")
    first = [torch.rand(8, device=place).tolist() for place in ("cuda", "cpu")]
    restore_rng_states(read_pickle(Path(folder) / "rng.pt"))
    second = [torch.rand(8, device=place).tolist() for place in ("cuda", "cpu")]
    return [one == other for one, other in zip(first, second, strict=True)]


def test_the_devices_random_state_is_in_a_checkpoint(tmp_path: Path) -> None:
    assert run(drawn_again, folder=str(tmp_path)) == [[True, True]]


def test_dropout_goes_on_after_a_resume(tmp_path: Path) -> None:
    """A stopped and resumed run uses the same dropout masks as the unbroken run.

    Different masks would change a step's loss by much more than rounding does.
    """
    recipe = Recipe(
        **vars(recipe_for("untied", steps=4, eval_every=0))
        | {
            "model": "openai-community/gpt2",
            "init": "random",
            "export": False,
        }
    )
    runs = []
    for name, stops in (("whole", [0]), ("parts", [2, 0])):
        for stop_at in stops:
            out = str(tmp_path / name)
            assert run(
                dropped_out,
                recipe=dataclasses.replace(recipe, stop_at=stop_at),
                config=strategy("zero1"),
                out=out,
            ) == [0]
        runs.append([line["loss"] for line in metrics(tmp_path / name)])
    assert runs[0] == pytest.approx(runs[1], rel=WITHIN)


def dropped_out(recipe: Recipe, config: dict[str, Any], out: str) -> int:
    from parity import train_in_layout

    return train_in_layout(recipe, config, out)


def measured() -> dict[str, Any]:
    from recipekit.doctor import speed

    speed.join_process_group()
    return speed.measure_speed(seconds=1.5)


def test_the_doctor_measures_a_gpu() -> None:
    (found,) = run(measured)
    assert found["cuda"] and found["complete"] and not found["wrong"] and 0 < found["work"] < 1, (
        found
    )


def test_the_doctor_names_cuda_and_the_gpus(gpus: int) -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "doctor.py")],
        env=environment_of_gpus(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert f"CUDA {torch.version.cuda}, {gpus} device" in ran.stdout, ran.stdout + ran.stderr


def test_two_ranks_of_which_each_sees_one_gpu(tmp_path: Path) -> None:
    """As under `srun --gpus-per-task=1`, the run must either train or be rejected with a fix.

    It must not fail with "invalid device ordinal".
    """
    visible = environment_of_gpus().get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "CUDA_VISIBLE_DEVICES": visible,
    }
    command = [
        sys.executable,
        str(NANO),
        "--tiny",
        "--steps",
        "1",
        "--out",
        str(tmp_path / "run"),
        "--no-wandb",
    ]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    of = [environment_of_gpus() | shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    ranks = [subprocess.Popen(command, cwd=tmp_path, env=own, **pipes) for own in of]
    said = "".join(process.communicate(timeout=300)[0] for process in ranks)
    codes = {process.returncode for process in ranks}
    assert (
        "Traceback" not in said and "invalid device ordinal" not in said and codes in ({0}, {1})
    ), said
    assert codes == {0} or "gpus-per-task" in said, said


def test_attention_of_packed_documents_is_the_softmax_of_each():
    run(computes_on_a_gpu)
