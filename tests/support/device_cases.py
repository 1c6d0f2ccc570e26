"""Cases for every device other than the CPU. test_second_device.py runs them without a GPU, and
test_gpu.py runs them on a GPU.

`run(case, **arguments)` runs a case on two ranks with the device, and returns each rank's result.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from job import metrics
from peft_models import add_lora
from pool import ROOT
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from reference import train_plain
from shipped_jsons import strategy
from tiny_models import ds_config, save_tiny, tiny_config
from torch import nn
from transformers import AutoModelForCausalLM

Run = Callable[..., list[Any]]
RECIPE = Recipe(
    tokenizer="bytes",
    seq_len=64,
    micro_batch=2,
    global_batch=4,
    lr=3e-4,
    eps=1e-6,
    steps=2,
    warmup_steps=1,
    eval_every=2,
    eval_rows=4,
    save_in_background=True,
    wandb=False,
)
ADAPTED = ("zero0", "zero1", "zero3")  # JSONs with which an adapter is trained
# name -> the model that is loaded from its files, the JSON, and the layout
QUICK: dict[str, tuple[str, str, dict[str, Any]]] = {
    "zero1 pp2": ("llama", "zero1", {"pp": 2}),
}
SLOW: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{
        f"zero{stage}": (
            "llama",
            f"zero{stage}",
            {"micro_batch": 1, "save_in_background": stage % 2 == 0},
        )
        for stage in range(4)
    },
    "zero1 tp2": ("llama", "zero1", {"tp": 2}),
    "zero1 gpt2": ("gpt2", "zero1", {}),
    "zero2 on the CPU": ("llama", "zero2_cpu", {}),
    "zero3 on the CPU": ("llama", "zero3_cpu", {}),
    "zero3 tp2, recomputed": ("llama", "zero3", {"tp": 2, "activation_checkpointing": True}),
    "zero1 tp2, experts": ("qwen3_moe", "zero1", {"tp": 2}),
    "zero1 tp2, experts and every matrix by itself": ("mixtral", "zero1", {"tp": 2}),
    "zero1 pp2, both ways": (
        "llama_tied",
        "zero1",
        {"pp": 2, "micro_batch": 1, "pipeline_schedule": "dualpipev"},
    ),
    "zero3 sp2": ("llama", "zero3", {"sp": 2}),
    "zero1 ep2": ("qwen3_moe", "zero1", {"ep": 2, "micro_batch": 1}),
}


def mixture(folder: Path) -> str:
    """Write two domains, so that losses are summed by domain."""
    folder.mkdir()
    for name in ("letters", "digits"):
        texts = [f"{name} {number} " * (5 + number % 50) for number in range(400)]
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
    return f"letters={folder}/letters.jsonl@70; digits={folder}/digits.jsonl@30"


def train_twice(recipe: Recipe, config: dict[str, Any], out: str, lora: bool = False) -> list[int]:
    """Train one step, stop, and resume on every rank; return the exit codes of both runs."""
    from recipekit.train import main

    sys.argv = ["device.py"]
    recipe = dataclasses.replace(
        recipe, ds_config=config, out=out, adapt=add_lora if lora else None
    )
    return [
        main(resolve_run(parse(recipe, Path("device.py"), stop)))
        for stop in (["--stop_at", "1"], [])
    ]


def check_training(run: Run, folder: Path, layout: str, within: float, export: bool = True) -> None:
    """Train in a layout, stop, resume, and compare the run with plain PyTorch on the CPU.

    Losses and norms are compared by relative difference, and exported weights by absolute
    difference. Without `export`, the converter reads the weights from the checkpoint.
    """
    from safetensors.torch import load_file

    model, file, degrees = (QUICK | SLOW)[layout]
    save_tiny(folder / "model", model)
    config = json.loads((folder / "model" / "config.json").read_text())
    # Dropout differs from device to device.
    config |= {key: 0.0 for key in config if key.endswith("pdrop")}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    plain = dataclasses.replace(
        RECIPE, model=str(folder / "model"), dataset=mixture(folder / "data")
    )
    recipe = dataclasses.replace(plain, **degrees, export=export)
    assert (
        run(train_twice, recipe=recipe, config=strategy(file), out=str(folder / "run"))
        == [[0, 0]] * 2
    )
    if not export:
        subprocess.run(
            [
                sys.executable,
                ROOT / "tools" / "convert_checkpoint.py",
                "to-hf",
                folder / "run",
                folder / "files",
            ],
            check=True,
        )
        # Name the tensors as published files do.
        whole = AutoModelForCausalLM.from_pretrained(folder / "files", dtype=torch.float32)
        whole.save_pretrained(folder / "run" / "hf", save_original_format=False)
    expected = train_plain(plain, config, plain.steps)
    lines = metrics(folder / "run")
    assert [line["loss"] for line in lines] == pytest.approx(expected.losses, rel=within)
    assert [line["grad_norm"] for line in lines] == pytest.approx(expected.grad_norms, rel=within)
    assert lines[-1]["eval_loss"] == pytest.approx(expected.eval_loss, rel=within)
    got = {
        name: value
        for path in (folder / "run" / "hf").glob("*.safetensors")
        for name, value in load_file(path).items()
    }
    assert got.keys() == expected.weights.keys()
    assert (
        max((got[name] - value).abs().max().item() for name, value in expected.weights.items())
        <= within
    )


def check_adapter(run: Run, folder: Path, file: str) -> None:
    """Train an adapter in bf16; its merged export must differ from the initial model."""
    from safetensors.torch import load_file

    before = dict(save_tiny(folder / "model", "llama").named_parameters())
    recipe = dataclasses.replace(RECIPE, model=str(folder / "model"), dataset="builtin", merge=True)
    assert (
        run(
            train_twice,
            recipe=recipe,
            config=strategy(file, bf16=True),
            out=str(folder / "run"),
            lora=True,
        )
        == [[0, 0]] * 2
    )
    got = load_file(folder / "run" / "hf" / "model.safetensors")
    assert got.keys() == before.keys() and any(
        not torch.equal(got[name], value) for name, value in before.items()
    )


def wrong_weight(folder: str, device: str) -> str:
    """Return the error for a sharded parameter that no longer equals its value in the file.

    Before the parameter is changed, all parameters must pass the check. The case needs two ranks.
    """
    from built_models import build_model
    from recipekit.model.build import check_weights
    from recipekit.parallel.groups import ProcessGroups
    from recipekit.spec.mesh import make_mesh

    place = torch.device(device, 0)
    groups = ProcessGroups(make_mesh(2, tp=2), place.type)
    config = json.loads((Path(folder) / "config.json").read_text())
    built = build_model(Recipe(model=folder, tp=2), config, groups, ds_config(1, 2, 2), place)
    assert (
        {parameter.device for parameter in built.model.parameters()}
        == {buffer.device for buffer in built.model.buffers()}
        == {place}
    )
    assert check_weights(None, built, groups, samples=1000) == len(built.names)
    name = next(name for name, cut in built.cuts.items() if cut.sharded)
    with torch.no_grad():
        built.model.get_parameter(name).view(-1)[0] += 1
    try:
        check_weights(None, built, groups, samples=1000)
    except ConfigError as error:
        return str(error)
    return ""


def drawn_otherwise(device: str, tp: int) -> list[str]:
    """Return the parameters whose random values on the device's two ranks differ from the CPU's
    values.

    The model is sharded by `tp` 2 or by ZeRO-3. Parameters on a wrong device are returned as well.
    """
    from built_models import build_model
    from recipekit.model.export import full_parameters
    from recipekit.parallel.groups import ProcessGroups
    from recipekit.spec.mesh import make_mesh

    recipe, config, place = (
        Recipe(model="none", init="random", seed=7),
        tiny_config("llama"),
        torch.device(device, int(os.environ["LOCAL_RANK"]) if device == "cuda" else 0),
    )
    expected = dict(
        build_model(
            recipe, config, None, ds_config(0), torch.device("cpu")
        ).model.named_parameters()
    )
    wrong = []
    for stage in (1, 3) if tp > 1 else (3,):
        groups = ProcessGroups(make_mesh(2, tp=tp), place.type)
        built = build_model(
            dataclasses.replace(recipe, tp=tp), config, groups, ds_config(stage, 2, tp), place
        )
        got = dict(full_parameters(built.model, built, groups, torch.float32))
        wrong += [
            f"ZeRO-{stage}, tp {tp}: {name}"
            for name, value in expected.items()
            if not torch.equal(got[name], value)
        ]
        wrong += [
            f"ZeRO-{stage}, tp {tp}: {name} lies on {value.device}"
            for name, value in built.model.named_parameters()
            if value.device != place
        ]
    return wrong


def copies_for_a_checkpoint(device: str) -> None:
    """Check the snapshots that a background save takes.

    They must hold the values of that moment in host memory. Tensors that share memory in the
    optimizer states must also share memory in the snapshot.
    """
    from recipekit.checkpoints.deepspeed_io import DeepSpeedFiles

    flat = torch.arange(12.0, device=device)
    states = {
        "flat": flat,
        "views": [flat[2:6], flat.view(3, 4).t()],
        "ordered": OrderedDict(weight=torch.ones(2, 2, dtype=torch.bfloat16, device=device)),
        "empty": torch.empty(0, device=device),
        "host": torch.arange(3),
        "numbers": (1, "two", torch.Size([3])),
    }
    files = DeepSpeedFiles()
    files.snapshots = True
    for turn in range(2):  # the second save reuses the memory of the first
        expected = [float(number + turn) for number in range(12)]
        work = torch.ones(1024, 1024, device=device)
        for _ in range(20 if device == "cuda" else 0):  # still running when the copy is requested
            work = work @ work / 1024
        flat.mul_(work[0, 0])
        files.save(states, "states.pt")
        ((kept, _),) = files.take()
        flat.add_(1)
        states["ordered"]["weight"].zero_()
        assert kept["flat"].tolist() == expected and kept["views"][0].tolist() == expected[2:6]
        assert kept["views"][1].t().flatten().tolist() == expected
        assert (
            kept["ordered"]["weight"].tolist() == [[1.0 - turn] * 2] * 2
            and kept["ordered"]["weight"].dtype == torch.bfloat16
        )
        assert (
            kept["host"].tolist() == [0, 1, 2]
            and kept["numbers"] == states["numbers"]
            and kept["empty"].numel() == 0
        )
        tensors = [
            kept["flat"],
            *kept["views"],
            kept["ordered"]["weight"],
            kept["empty"],
            kept["host"],
        ]
        assert {(type(tensor), tensor.device.type) for tensor in tensors} == {(torch.Tensor, "cpu")}
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors[:3]}) == 1


def rule_breakers(device: str) -> list[str]:
    """Return the operations on tensors of two devices that the device handles differently from
    CUDA.

    The device either accepts an operation that raises on CUDA, or rejects an operation that CUDA
    accepts.
    """
    there, here = torch.arange(6.0, device=device).view(2, 3), torch.arange(6.0).view(2, 3)
    number, index, linear = torch.tensor(2.0), torch.tensor([1]), nn.Linear(3, 2).to(device)
    refused: dict[str, Callable[[], Any]] = {
        "equal": lambda: torch.equal(there, here),
        "equal of the host": lambda: torch.equal(here, there),
        "sum": lambda: there + here,
        "sum on the host": lambda: here.add_(there),
        "sum into a number": lambda: number.clone().add_(there.sum()),
        "result": lambda: torch.add(there, there, out=torch.empty(2, 3)),
        "matmul": lambda: there @ here.t(),
        "linear": lambda: linear(here),
        "embedding": lambda: nn.functional.embedding(index, there),
        "loss": lambda: nn.functional.cross_entropy(there, torch.tensor([0, 1])),
        "index_add": lambda: there.clone().index_add_(0, index, there[:1]),
        "cat": lambda: torch.cat([there, here]),
        "the host's by an index of the device": lambda: here[index.to(device)],
        "mask": lambda: torch.where(here > 1, there, there),
        "numpy": lambda: there.numpy(),
        "generator": lambda: torch.rand(2, device=device, generator=torch.Generator()),
        "collective": lambda: torch.distributed.all_reduce(here),
    }
    wrong = []
    for name, act in refused.items():
        try:
            act()
            wrong.append(f"{name} is taken")
        except (RuntimeError, TypeError):
            pass
    taken: dict[str, tuple[Callable[[], Any], torch.Tensor]] = {
        "number": (lambda: there * number, here * number),
        "index": (lambda: there[index], here[index]),
        "copy to it": (lambda: here.to(device), here),
        "copy into it": (lambda: torch.empty_like(there).copy_(here), here),
        "made from a list": (lambda: torch.tensor([1, 2], device=device), torch.tensor([1, 2])),
        "made like it": (lambda: torch.zeros_like(there), torch.zeros(2, 3)),
        "in place": (lambda: there.clone().mul_(2).unsqueeze_(0), (here * 2).unsqueeze(0)),
        "data": (lambda: _moved(here.clone(), there), here),
        "integers counted": (lambda: torch.histc(there.int(), 2, 0, 5), torch.tensor([3, 3])),
    }
    for name, (act, value) in taken.items():
        result = act()
        if result.device != torch.device(device, 0) or result.tolist() != value.tolist():
            wrong.append(f"{name} gives {result}")
    loss = nn.functional.cross_entropy(linear(there), torch.tensor([0, 1], device=device))
    loss.backward()
    if loss.item() <= 0 or any(
        parameter.grad is None or parameter.grad.device != there.device
        for parameter in linear.parameters()
    ):
        wrong.append("backward")
    return wrong


def _moved(tensor: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    tensor.data = to
    return tensor


def trace_of_sums(device: str) -> list[str]:
    """Return the order of a step's collectives on one rank: launches and waits of the loop's sums.

    The forward and the backward pass launch a sum in another group of the same ranks, as tensor
    parallelism and ZeRO do.
    """
    import torch.distributed as dist
    from recipekit.runtime.step_metrics import StepCounters
    from recipekit.spec.mesh import Mesh
    from recipekit.train import train_step

    other, plain, trace = dist.new_group(), dist.all_reduce, list[str]()
    place = torch.device(device, 0) if device != "cpu" else torch.device("cpu")

    class Waited:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            trace.append("wait")
            self.work.wait()

    def traced(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        group = named.get("group")
        trace.append("other" if group is other else "launch" if named.get("async_op") else "sum")
        work = plain(tensor, *given, **named)
        return work and Waited(work)

    def sum_over_others(*_: object) -> None:
        dist.all_reduce(torch.ones(2, device=place), group=other)

    weight = torch.ones(3, device=place, requires_grad=True)

    def forward(_: object, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        sum_over_others()
        return batch["x"] * weight

    def backward(loss: torch.Tensor) -> None:
        sum_over_others()
        loss.backward()

    ignore = lambda *_: None  # noqa: E731
    engine = SimpleNamespace(
        device=place,
        optimizer=SimpleNamespace(param_groups=[]),
        accumulate=ignore,
        is_gradient_accumulation_boundary=lambda: True,
        backward=backward,
        step=ignore,
        get_global_grad_norm=lambda: 0.0,
    )
    task = SimpleNamespace(
        measures=(),
        reports_each_step=False,
        count=lambda batch: torch.tensor(3),
        before_step=ignore,
        after_step=ignore,
        forward=forward,
        loss=lambda output, batch, by_row: output.sum(),
    )
    dist.all_reduce = traced
    try:
        counters = StepCounters(Mesh(dp=dist.get_world_size()))
        result = train_step(engine, task, [{"x": torch.ones(3)}], 0.1, counters)  # type: ignore[arg-type]
    finally:
        dist.all_reduce = plain
    assert (result["loss"], result["tokens"]) == (1.0, 6)
    return trace
