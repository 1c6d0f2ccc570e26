"""Training on a device other than the CPU, on a machine without such a device (second_device.py).

A tensor on the wrong device raises an error. The real loop runs there in every layout. Weights are
read, sharded, checked, trained, evaluated, saved, resumed and exported. The losses equal those from
plain PyTorch on the CPU. The following cannot be tested there, so test_gpu.py tests it on a GPU:

- streams, events and `non_blocking`: an operation on this device has ended when it returns;
- pinned memory: torch pins memory for real devices only;
- queries of CUDA by name (ordinals, peak and free memory, CUDA's random state, the device's name):
  torch's CPU build does not have them;
- NCCL, its timeouts and its groups: the ranks use gloo. The tests check that no collective receives
  a host tensor, which NCCL rejects;
- CUDA kernels, their rounding and their nondeterminism (FlashAttention, fused Adam, grouped
  matmul): the CPU's kernels run;
- `map_location`: saved tensors are always read back as host tensors.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from device_cases import (
    ADAPTED,
    QUICK,
    RECIPE,
    SLOW,
    check_adapter,
    check_training,
    copies_for_a_checkpoint,
    drawn_otherwise,
    rule_breakers,
    trace_of_sums,
    wrong_weight,
)
from pool import Pool
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.recipe import Recipe
from shipped_jsons import strategy
from tiny_models import save_tiny


@pytest.fixture(scope="module")
def run(ops: Callable[[str], None]) -> Iterator[Callable[..., list[Any]]]:
    """Yield a function that runs a case on two ranks with the device, in a separate pool.

    The pool is separate because `install` cannot be undone.
    """
    made: list[Pool] = []

    def run(case: Callable[..., Any], **arguments: Any) -> list[Any]:
        if not made or not made[-1].alive:
            made.append(Pool(2))
            made[-1].run(install)
        return made[-1].run(case, **arguments)

    yield run
    if made:
        made[-1].close()


def install() -> None:
    """Let this process's training loop use the second device."""
    import second_device
    from recipekit.runtime import prepare

    device, start = second_device.install(), prepare.initialize_distributed
    prepare.initialize_distributed = lambda *arguments: (start(*arguments), device)[1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*QUICK, *SLOW])
def test_a_run_is_that_of_the_cpu(
    run: Callable[..., list[Any]], ops: Callable[[str], None], tmp_path: Path, layout: str
) -> None:
    if "on the CPU" in layout:
        ops("cpu_adam")
    check_training(run, tmp_path, layout, within=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("file", ADAPTED)
def test_an_adapter_in_bf16_is_trained_and_merged(
    run: Callable[..., list[Any]], tmp_path: Path, file: str
) -> None:
    check_adapter(run, tmp_path, file)


def test_a_cut_weight_that_is_not_its_files_is_found(
    run: Callable[..., list[Any]], tmp_path: Path
) -> None:
    save_tiny(tmp_path, "llama")
    for told in run(wrong_weight, folder=str(tmp_path), device="second"):
        assert "differs from the model's files" in told


def test_drawn_weights_are_those_of_the_cpu(run: Callable[..., list[Any]]) -> None:
    for tp in (1, 2):
        assert run(drawn_otherwise, device="second", tp=tp) == [[], []]


def test_a_checkpoint_copies_what_lies_on_the_device(run: Callable[..., list[Any]]) -> None:
    run(copies_for_a_checkpoint, device="second")


def test_the_device_takes_what_cuda_takes(run: Callable[..., list[Any]]) -> None:
    assert run(rule_breakers, device="second") == [[], []]


def test_a_steps_sums_are_never_in_flight_with_those_of_another_group(
    run: Callable[..., list[Any]], pools: Any
) -> None:
    """Two NCCL communicators of the same ranks may deadlock. On a CPU, the sums may overlap."""
    for trace in run(trace_of_sums, device="second"):
        assert trace == ["launch", "wait", "other", "wait", "launch", "wait", "other", "wait"]
    for trace in pools.run(2, trace_of_sums, device="cpu"):
        assert trace == ["launch", "other", "wait", "launch", "other", "wait"]


def pipeline_inputs(device: str) -> tuple[set[str], list[str]]:
    """Return the devices of all inputs in a pipeline's schedule, and the devices that labels were
    copied to.

    The copies are counted after the schedule requests its first micro-batch.
    """
    import torch
    from recipekit.tasks.find import load_task
    from recipekit.train import pipeline_batches

    batches = [
        {
            "input_ids": torch.ones(1, 4),
            "position_ids": torch.ones(1, 4),
            "labels": torch.ones(1, 4),
            "domain": torch.zeros(1),
        }
        for _ in range(3)
    ]
    moved: list[str] = []
    for batch in batches:
        batch["labels"].__dict__["to"] = lambda *args, own=batch["labels"], **kwargs: (
            moved.append(device),
            torch.Tensor.to(own, *args, **kwargs),
        )[1]
    given = pipeline_batches(
        load_task("pretrain"), batches, torch.ones((), device=device), torch.device(device, 0)
    )
    first = next(given)
    asked = list(moved)
    return {
        tensor.device.type for inputs, targets in (first, *given) for tensor in (*inputs, *targets)
    }, asked


def test_a_pipeline_is_given_what_lies_on_the_device(run: Callable[..., list[Any]]) -> None:
    """Micro-batches are moved to the device one at a time.

    DeepSpeed copies no tensor from the host, and waiting micro-batches do not use the device's
    memory.
    """
    assert run(pipeline_inputs, device="second") == [({"second"}, ["second"])] * 2


def train_with_other_steps(recipe: Recipe, config: dict[str, Any], out: str) -> list[Any]:
    """Return the exit codes of three runs, with torch's plain, fused and again plain optimizer
    step.

    Each run resumes from the previous run's checkpoint.
    """
    from recipekit.train import main

    sys.argv, codes = ["device.py"], []
    for number, fused in enumerate((False, True, False), 1):
        config["optimizer"]["params"]["fused"] = fused
        where = dataclasses.replace(recipe, ds_config=config, out=f"{out}{number}", steps=3)
        before = ["--resume", f"{out}{number - 1}"] if number > 1 else []
        codes.append(
            main(resolve_run(parse(where, Path("device.py"), ["--stop_at", str(number), *before])))
        )
    return codes


@pytest.mark.slow
def test_the_count_of_steps_is_where_the_optimizer_looks_for_it(
    run: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Fused and plain optimizers keep their step count on different devices.

    In a checkpoint that the other kind wrote, the count is on the wrong device.
    """
    save_tiny(tmp_path / "model", "llama")
    recipe = dataclasses.replace(
        RECIPE,
        model=str(tmp_path / "model"),
        dataset="builtin",
        eval_every=0,
        save_in_background=False,
        export=False,
    )
    assert (
        run(
            train_with_other_steps,
            recipe=recipe,
            config=strategy("zero1", bf16=True),
            out=str(tmp_path / "run"),
        )
        == [[0, 0, 0]] * 2
    )
