"""Step folders made from published files, and their tensors in other layouts."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job import metrics
from recipekit.checkpoints.retention import Retention
from recipekit.checkpoints.step_folder import LayoutChange, open_step, target_layout
from recipekit.convert.hugging_face import from_hf
from recipekit.model.describe import published_blueprint
from recipekit.parallel.blueprint import Layout, default_optimizer
from recipekit.spec.mesh import Mesh
from recipekit.spec.recipe import Recipe
from recipekit.storage import copying, manifest, step_files
from recipekit.storage.copying import Effort
from recipekit.storage.tensor_files import open_checkpoint
from safetensors.torch import load_file
from shipped_jsons import strategy
from short_runs import BASE, train

SMALL = Effort(workers=2, mem_limit=2**24)


def begin(folder: Path, out: Path, dtype: str, **degrees: int) -> None:
    """Write a step folder for step 7 from published files, with random moments."""
    blueprint = published_blueprint(folder)
    start = Layout(Mesh(), 0, default_optimizer(0, dtype), dtype)
    layout = target_layout(blueprint, start, LayoutChange(**degrees))
    from_hf(folder, out, blueprint, layout, SMALL)
    generator = np.random.default_rng(5)
    files = open_checkpoint(out, blueprint, layout, writable=True)
    for tensor in blueprint.tensors:
        for role in start.states if tensor.group is not None else ():
            # The values include NaN, infinities and denormals.
            files.write(
                tensor, role, 0, generator.integers(0, 2**32, tensor.numel, dtype=np.uint32)
            )
    files.close()
    everything = frozenset(path.name for path in out.glob("*.pt"))
    opened = open_checkpoint(out, blueprint, layout)
    digests = {
        key: [shape, own, f"{total:016x}"]
        for key, (shape, own, total) in copying.partial_digests(
            blueprint, opened, everything
        ).items()
    }
    opened.close()
    (out / "manifest.json").unlink()
    paths = [path for path in out.rglob("*") if path.is_file()]
    manifest.write_manifest(
        out, 0, {str(path.relative_to(out)): manifest.file_entry(path) for path in paths}, digests
    )


def tensors_of(step: Path) -> dict[str, list[Any]]:
    return manifest.read_manifest(step)["tensors"]


def assert_same_files(folder: Path, original: Path) -> None:
    """Check that each tensor has the same name, shape, dtype, bits and file."""
    ours, theirs = (
        sorted(path.name for path in where.glob("*.safetensors*")) for where in (folder, original)
    )
    assert ours == theirs
    for name in ours:
        if name.endswith(".json"):
            assert (
                json.loads((folder / name).read_text())["weight_map"]
                == json.loads((original / name).read_text())["weight_map"]
            )
            continue
        a, b = load_file(folder / name), load_file(original / name)
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]), key


def train_lora(recipe: Recipe, argv: list[str]) -> tuple[int | str, str]:
    from peft_models import add_lora

    return train(dataclasses.replace(recipe, adapt=add_lora), argv)


def load_and_save(recipe: Recipe, argv: list[str], lora: bool = False) -> tuple[int | str, str]:
    """Resume without training, and save the engine state of DeepSpeed."""
    import recipekit.train as loop

    def only_save(ready: Any) -> Any:
        from recipekit.data.stream_state import merge_states
        from recipekit.runtime.ending import Ending

        everyone: list[Any] = [None] * ready.plan.mesh.world
        torch.distributed.all_gather_object(everyone, ready.stream.state)
        ready.saver.retention = Retention(0)
        ready.saver.save(
            ready.state | {"data": merge_states(everyone), "step": ready.state["step"] + 90}
        )
        return Ending(1, "saved without training")

    real, loop.loop = loop.loop, only_save
    try:
        return train_lora(recipe, argv) if lora else train(recipe, argv)
    finally:
        loop.loop = real


def check_same_bits_in_another_layout(pools, ops, tmp_path, kind, changes, source, targets):
    ops("cpu_adam")
    if "zero3_nvme" in (source[1], *(file for _, file, _ in targets)):
        ops("async_io")

    def recipe(file: str, degrees: dict[str, Any]) -> Recipe:
        numbers = (
            changes
            | degrees
            | {"ds_config": f"{file}.json" if kind != "fp32" else strategy(file), "eval_every": 0}
        )
        return dataclasses.replace(BASE, **numbers, global_batch=12, micro_batch=1)

    run = train_lora if kind == "lora" else train
    world, file, degrees = source
    for name, stop in (("source", 3), ("whole", 5)):
        results = pools.run(
            world,
            run,
            recipe=recipe(file, degrees),
            argv=["--out", str(tmp_path / name), "--stop_at", str(stop)],
        )
        assert [code for code, _ in results] == [0] * world, results
    wanted = tensors_of(tmp_path / "source/checkpoints/step_00000003")
    before = hyper(tmp_path / "source/checkpoints/step_00000003")
    for number, (ranks, to, changed) in enumerate(targets):
        out = tmp_path / f"to{number}"
        shutil.copytree(tmp_path / "source", out)
        results = pools.run(
            ranks,
            load_and_save,
            recipe=recipe(to, changed),
            argv=["--out", str(out), "--stop_at", "5"],
            lora=kind == "lora",
        )
        assert [code for code, _ in results] == [1] * ranks, results
        saved = out / "checkpoints" / "step_00000093"
        got = tensors_of(saved)
        assert {key: got[key] for key in got if "|weight" not in key} == {
            key: wanted[key] for key in wanted if "|weight" not in key
        }
        assert {key: got[key][2] for key in got.keys() & wanted.keys()} == {
            key: wanted[key][2] for key in got.keys() & wanted.keys()
        }
        assert hyper(saved) == before
        shutil.rmtree(saved)
        results = pools.run(
            ranks, run, recipe=recipe(to, changed), argv=["--out", str(out), "--stop_at", "5"]
        )
        assert [code for code, _ in results] == [0] * ranks, results
        losses, expected = (
            [line["loss"] for line in metrics(folder)] for folder in (out, tmp_path / "whole")
        )
        assert losses == pytest.approx(expected, rel=1e-5 if kind == "fp32" else 1e-3)
        assert [line["tokens"] for line in metrics(out)] == [
            line["tokens"] for line in metrics(tmp_path / "whole")
        ]


def hyper(step: Path) -> tuple[float, dict[int, dict[str, Any]]]:
    """Return Adam's step count and each optimizer group's hyperparameters."""
    opened = open_step(step)
    carried = step_files.read_common_state(step, opened.blueprint, opened.layout)
    return carried.scalars, {
        group: {
            name: tuple(value) if name == "betas" else value
            for name, value in numbers.items()
            if name in ("betas", "eps", "weight_decay", "lr")
        }
        for group, numbers in carried.groups.items()
    }
