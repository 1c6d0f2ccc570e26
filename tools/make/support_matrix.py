"""Run each model family in each layout and write recipes/SUPPORT.md, SUPPORT_MLM.md and
SUPPORT_IMAGES.md.

    # all types of the installed transformers (hours on 2 cores)
    python tools/make/support_matrix.py
    # only these: print their marks, write no page
    python tools/make/support_matrix.py --types llama gemma2
    python tools/make/support_matrix.py --task image_classification --types vit swin
    # a few types into a file, then their rows into the page; all other rows stay
    python tools/make/support_matrix.py --types llama gemma2 --results cells.jsonl
    python tools/make/support_matrix.py --results cells.jsonl --merge

Causal language models (task pretrain), masked language models and image classifiers have one table
each. For every model type the tool makes a tiny model from the type's config class. In each layout
real processes train it for 3 optimizer steps (fp32, AdamW, clipping; packed documents or random
images). The tool compares the result with plain PyTorch in one process: every loss and grad_norm
within 1e-5 relative, every updated weight within 1e-5 absolute. If a cell slightly exceeds these
tolerances, the tool trains it and its reference again in fp64, to tell rounding from a mistake. If
a cell fails or exceeds its time limit, its mark gives the reason, and the tool starts a new group
of processes.
"""

import argparse
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, dict[str, Any]]  # layout or "reference" -> {"ok", deviations or "reason"}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {  # name -> (ranks, ZeRO stage, degrees)
    "zero3": (2, 3, {}),
    "tp2": (2, 1, {"tp": 2}),
    "pp2": (2, 1, {"pp": 2}),
    "pp2 x tp2": (4, 1, {"pp": 2, "tp": 2}),
    "ep2": (2, 1, {"ep": 2}),  # only types with experts
}
TEXT, MASKED, IMAGES = "pretrain", "masked_lm", "image_classification"  # tasks, with one table each
STEPS, BATCHES, SEQ_LEN, VOCABULARY = 3, 4, 64, 264
MICRO_BATCH = {TEXT: 1, MASKED: 1, IMAGES: 2}  # samples in each of the BATCHES
# Micro-batch of a model type with BatchNorm. For a tiny image, the last feature maps have one
# pixel. If BatchNorm normalises over 2 values, plain PyTorch's fp32 gradient is 3 times its fp64
# gradient (ResNet). The gradient also changes by 8e-4 with the order of the samples, but only by
# 2e-6 over 16 values. `smooth` removes the remaining difference.
NORMED = 16
LOSS, WEIGHT = 1e-5, 1e-5  # tolerances: relative, absolute
# (prefix of a type, part of a layout, part of the message) -> the reason, found by hand
WHY = {
    ("reformer", "", "differs"): "LSHSelfAttention samples new hashes in every forward pass",
    ("phi4_multimodal", "", "no gradient reaches"): (
        "a text run does not use the image and audio towers. `get_all_grad_tensors` of DeepSpeed"
        " 0.19.8 (zero/stage_1_and_2.py:2708; for ZeRO-3 stage3.py:1425) gives such a parameter a"
        " zero gradient, and AdamW decays it"
    ),
    ("hrm_text", "pp2", "must name modules"): (
        "`base_model_pp_plan` of transformers 5.24.0 (configuration_hrm_text.py:67) names `layers`"
        " and `norm`, which HrmTextModel lacks. Its forward (modeling_hrm_text.py:493) runs the"
        " stacks `L_module` and `H_module` several times in a loop"
    ),
}
# Tolerance for a cell in fp64, and for its gradients: relative, and absolute for weights. It is not
# zero because some operations of a model compute in fp32 for weights of any dtype.
ROUNDED = 1e-6
# The largest fp32 deviations that rounding can explain. A weight changes by at most the learning
# rate in a step.
NEAR = {"loss": 1e-3, "grad_norm": 1e-3, "weight": 1e-4}
# words of a config error -> mark
ABSENT = {"this model publishes no": "no plan", "none is made for this type": "no preset"}
# words of the config error for a model that is not causal
AHEAD = "reads the tokens that it should predict"
# headings below the tables
MASKS, REASONS = "## Why attention needs a mask", "## Why a cell fails or deviates"
# the heading of the section that bf16_distance.py writes at the end of SUPPORT.md
BF16_SECTION = "## bf16, where transformers keeps parameters in fp32"
FP64 = "fp64"  # folder of the weights in fp64, in the folder of the weights in fp32
CELL_S = 60.0  # time limit of a cell in seconds
CONFIG: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "steps_per_print": None,
    "optimizer": {
        "type": "AdamW",
        "params": {
            "lr": 3e-4,
            "betas": [0.9, 0.95],
            "eps": 1e-6,
            "weight_decay": 0.1,
            "torch_adam": True,
        },
    },
}


def model_types(task: str = TEXT) -> list[str]:
    """List every model type that a task's Auto class supports."""
    from recipekit.architectures.lookup import model_types_of
    from recipekit.spec.task_specs import TASKS

    return sorted(model_types_of(TASKS[task].auto_class))


def layouts_of(task: str) -> list[str]:
    """List the layouts that a task supports."""
    from recipekit.spec.task_specs import TASKS

    return [
        name
        for name, (_, _, degrees) in LAYOUTS.items()
        if not degrees.keys() & TASKS[task].unsupported.keys()
    ]


def tiny_model_config(task: str, model_type: str) -> dict[str, Any]:
    """Return a type's tiny config with dropout disabled, because runs with dropout cannot be
    compared.
    """
    from recipekit.architectures.families import tiny_config

    def without_dropout(config: dict[str, Any]) -> dict[str, Any]:
        return {
            key: (
                without_dropout(value)
                if isinstance(value, dict)
                else (
                    0.0
                    if isinstance(value, float)
                    and (
                        "dropout" in key
                        or key.endswith(("_pdrop", "layerdrop", "jitter_noise", "drop_path_rate"))
                    )
                    else value
                )
            )
            for key, value in config.items()
        }

    return without_dropout(tiny_config(model_type, 0 if task == IMAGES else VOCABULARY, task))


def recipe_of(task: str, model_type: str, **degrees: Any) -> Any:
    from recipekit import Recipe
    from recipekit.model.empty import empty_model
    from recipekit.spec.errors import ConfigError
    from torch.nn.modules.batchnorm import _BatchNorm

    rows = MICRO_BATCH[task]
    recipe = Recipe(
        model=model_type,
        task=task,
        init="random",
        seed=3,
        micro_batch=rows,
        global_batch=BATCHES * rows,
        seq_len=SEQ_LEN,
        **degrees,
    )
    if task == MASKED:
        return recipe  # its attention is chosen from the implementations that keep documents apart
    make = partial(
        empty_model,
        tiny_model_config(task, model_type),
        name=model_type,
        auto_class=recipe.task_spec.auto_class,
    )
    try:
        model = make()
    except ConfigError:  # its class has no sdpa
        recipe, model = replace(recipe, attention="eager"), make(attention="eager")
    # With the default config's dropout, auto would choose sdpa.
    if task == TEXT and recipe.attention == "auto" and why_not_varlen(model_type):
        recipe = replace(recipe, attention="sdpa")
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        recipe = replace(recipe, micro_batch=NORMED, global_batch=BATCHES * NORMED)
    return recipe


def batches_of(task: str, config: dict[str, Any], rows: int) -> list[dict[str, Any]]:
    """Create one optimizer step's BATCHES micro-batches.

    They contain packed documents of random tokens, or `rows` random images each.
    """
    import torch

    generator = torch.Generator().manual_seed(1)
    if task == IMAGES:
        tower = config.get("vision_config") or config
        size = (
            tower["image_size"]
            if isinstance(tower["image_size"], list | tuple)
            else (tower["image_size"],) * 2
        )
        shape = (rows, tower.get("num_channels", 3), *size)  # (B, C, H, W)
        labels = torch.randint(config["num_labels"], (BATCHES, rows), generator=generator)
        return [
            {"pixel_values": torch.randn(shape, generator=generator), "labels": own}
            for own in labels
        ]
    batches = []
    for row in range(BATCHES):
        ids = torch.randint(3, VOCABULARY, (1, SEQ_LEN), generator=generator)
        edge = 20 + 9 * row  # the first document ends here
        positions = torch.cat([torch.arange(edge), torch.arange(SEQ_LEN - edge)]).unsqueeze(0)
        labels = ids.roll(-1, 1)
        labels[:, [edge - 1, -1]] = -100
        if task == MASKED:
            hidden = torch.rand(ids.shape, generator=generator) < 0.3
            ids, labels = ids.masked_fill(hidden, 1), ids.masked_fill(~hidden, -100)
        batches.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    return batches


def told_of_documents(
    batches: list[dict[str, Any]], task: str, attention: str
) -> list[dict[str, Any]]:
    """Add the document boundaries that an attention needs to micro-batches, as a run's data stream
    does.
    """
    from recipekit.kernels.documents import with_document_starts, with_documents

    return (
        [
            (with_documents if "varlen" in attention else with_document_starts)(batch)
            for batch in batches
        ]
        if task == MASKED or attention == "varlen"
        else batches
    )


def spread(model: Any) -> None:
    """Change parameters and saved buffers that start as a constant (norms, gates, biases).

    With only zeros and ones, a wrong layout could pass unnoticed, and top-k would meet ties. Doge's
    top-k takes the exponential of an exponent near 0, which fp32 rounds to ties. Its factor `A`
    becomes larger.
    """
    import torch

    generator = torch.Generator().manual_seed(2)
    kept = [
        buffer
        for name, buffer in model.named_buffers()
        if name in model.state_dict() and buffer.is_floating_point()
    ]
    with torch.no_grad():
        wide = [value for name, value in model.named_parameters() if name.endswith("self_attn.A")]
        for tensor in [*model.parameters(), *kept]:
            if tensor.numel() > 1 and tensor.min() == tensor.max():
                scale = 1.0 if any(tensor is value for value in wide) else 0.02
                tensor += scale * torch.randn(tensor.shape, generator=generator)


def smooth(model: Any) -> None:
    """Replace ReLU by SiLU in a model with BatchNorm.

    The gradient of ReLU jumps at zero, and rounding decides on which side a value falls. One of a
    channel's 16 values is enough to change the gradient. With convolutions from a different
    library, the gradient of a tiny RegNet differs by 2e-2, but only by 4e-6 with SiLU.
    """
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm

    for module in (
        [*model.modules()]
        if any(isinstance(module, _BatchNorm) for module in model.modules())
        else []
    ):
        for name, child in module.named_children():
            if type(child) is nn.ReLU:
                setattr(module, name, nn.SiLU())


def save(model: Any, folder: Path) -> None:
    """Save the weights under the model's own names, so that every rank can read them.

    `folder` has the weights in fp32, and its folder FP64 has the same weights in fp64.
    """
    import torch
    from safetensors.torch import save_file

    parameters = dict(model.named_parameters())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    tensors = {name: value.detach().contiguous() for name, value in (parameters | buffers).items()}
    double = {
        name: value.double() if value.dtype == torch.float32 else value
        for name, value in tensors.items()
    }
    for place, saved in ((folder, tensors), (folder / FP64, double)):
        place.mkdir(exist_ok=True)
        save_file(saved, place / "model.safetensors")


def train_plain(task: str, model_type: str, folder: Path) -> dict[str, Any]:
    """Train STEPS steps in plain PyTorch, from random weights that are saved in `folder`.

    Return the losses, the norms, the weights, whether the model has experts, and a text model's
    leak. The leak is the effect that one document has on a different document's logits in the same
    row.
    """
    from recipekit.tasks.find import load_task

    config = tiny_model_config(task, model_type)
    recipe = plain_recipe(task, model_type, config)
    load_task(task).check(config, recipe.attention, recipe.model)

    built = built_of(recipe, config, None, {})
    model = built.model
    spread(model)
    smooth(model)
    save(model, folder)
    batches = plain_batches(recipe, config, built)
    return {
        "leak": leak_of(model, batches[0]) if task == TEXT else None,
        "experts": any(".experts." in name for name, _ in model.named_parameters()),
        **train_in_one_process(recipe, built, batches),
    }


def train_in_fp64(task: str, model_type: str, folder: str) -> dict[str, Any]:
    """Train STEPS steps in plain PyTorch from the fp64 weights in `folder`."""
    config = tiny_model_config(task, model_type)
    recipe = plain_recipe(task, model_type, config)
    built = built_of(replace(recipe, model=folder, init="pretrained"), config, None, {})
    smooth(built.model)
    return train_in_one_process(recipe, built, plain_batches(recipe, config, built))


def plain_batches(recipe: Any, config: dict[str, Any], built: Any) -> list[dict[str, Any]]:
    """Create one optimizer step's micro-batches for the model of one process."""
    batches = batches_of(recipe.task, config, recipe.micro_batch)
    return told_of_documents(batches, recipe.task, built.model_plan.attention)


def train_in_one_process(recipe: Any, built: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Train STEPS steps in plain PyTorch, and return the losses, the norms and the weights.

    `idle` lists the parameters that no gradient reaches.
    """
    import torch
    from recipekit.tasks.find import load_task

    of_task, model = load_task(recipe.task), built.model
    optimizer = plain_adamw(model, built.blueprint.trained)
    counted = sum(int(of_task.count(batch).sum()) for batch in batches)

    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(run_micro_batches(model, of_task, batches, counted))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG["gradient_clipping"])
        norms.append(norm.item())
        optimizer.step()

    parameters = dict(model.named_parameters())
    return {
        "idle": [name for name, parameter in parameters.items() if parameter.grad is None],
        "losses": losses,
        "norms": norms,
        "weights": {name: parameter.detach() for name, parameter in parameters.items()},
    }


def plain_recipe(task: str, model_type: str, config: dict[str, Any]) -> Any:
    """Return a type's recipe with transformers' own attention, as the reference for each cell."""
    from recipekit.model.empty import MASKED_AUTO_CLASS as ENCODER
    from recipekit.model.probes import probe

    recipe = recipe_of(task, model_type)
    if recipe.attention != "auto":
        return recipe
    leaky = task == MASKED and probe(config, ENCODER, model_type).leak_reason("sdpa")
    return replace(recipe, attention="eager" if leaky else "sdpa")


def run_micro_batches(model: Any, task: Any, batches: list[dict[str, Any]], counted: int) -> float:
    """Run the forward and backward passes of the micro-batches, and return the step's mean loss."""
    total = 0.0
    for batch in batches:
        loss = task.loss(task.forward(model, batch), batch, False) / counted
        loss.backward()
        total += loss.item()
    return total


def plain_adamw(model: Any, trained: Any) -> Any:
    """Create torch's AdamW with the hyperparameters in the cells' JSON."""
    import torch
    from recipekit.optim.groups import parameter_groups

    numbers = CONFIG["optimizer"]["params"]
    groups: Any = parameter_groups(model, trained)
    return torch.optim.AdamW(
        groups,
        lr=numbers["lr"],
        betas=tuple(numbers["betas"]),
        eps=numbers["eps"],
        weight_decay=numbers["weight_decay"],
    )


def leak_of(model: Any, batch: dict[str, Any]) -> float:
    """Return the largest change of a logit in a row's second document when only the first
    document's tokens change.
    """
    import torch

    edge = int((batch["position_ids"][0, 1:] == 0).nonzero()[0]) + 1
    other = batch["input_ids"].clone()
    other[:, :edge] = other[:, :edge].flip(1)
    with torch.no_grad():
        logits = [
            model(input_ids=ids, position_ids=batch["position_ids"], use_cache=False).logits[
                :, edge:
            ]
            for ids in (batch["input_ids"], other)
        ]
    return (logits[0] - logits[1]).abs().max().item()


class Differs(Exception):
    """Raised if a cell ran but did not train like plain PyTorch."""


def hold_cell(
    task: str, model_type: str, layout: str, folder: str, reference: dict[str, Any]
) -> dict[str, Any]:
    """Train one cell, and find out whether a difference from the reference is rounding.

    The reference uses sdpa. If varlen results differ, the cell is trained with sdpa. If these also
    differ, the cell and the reference are trained in fp64. This is a collective operation.
    """
    cell = (task, model_type, layout, folder)
    worst, differs = train_cell(cell, reference)
    if not differs:
        return worst

    with_sdpa = ""
    if task == TEXT and recipe_of(task, model_type).attention == "auto":
        other, with_sdpa = train_cell(cell, reference, "sdpa")
        if not with_sdpa:
            return other | {"varlen": differs}

    reason = with_sdpa or differs
    if near(worst):
        double = os.path.join(folder, FP64)
        with fp64_for_fp32():
            expected = train_in_fp64(task, model_type, double)
            exact, _ = train_cell((task, model_type, layout, double), expected)
        if is_rounding(worst, exact):
            return exact | {"fp32": differs}
        reason += f"; in fp64 {deviations(exact)}"
    raise Differs(reason)


def near(worst: dict[str, float]) -> bool:
    """Return True if rounding can explain a cell's deviations in fp32."""
    return all(worst[name] <= limit for name, limit in NEAR.items())


def is_rounding(worst: dict[str, float], exact: dict[str, float]) -> bool:
    """Return True if a cell's fp32 deviations `worst` are rounding.

    They are rounding only if they are small and the same cell agrees with the same reference in
    fp64 (deviations `exact`). A mistake changes the results in every dtype.
    """
    return near(worst) and all(exact[name] <= ROUNDED for name in NEAR)


@contextlib.contextmanager
def fp64_for_fp32() -> Iterator[None]:
    """Compute in fp64 where models, DeepSpeed and recipekit ask for fp32.

    torch's names of fp32 mean fp64 here. A cell then takes the same path as in fp32, including its
    ZeRO stage and casts. Files must contain fp64 weights: safetensors also uses torch's name.
    """
    import torch

    places: list[tuple[Any, str, Any]] = [
        (torch, "float32", torch.float64),
        (torch, "float", torch.float64),
        (torch.Tensor, "float", torch.Tensor.double),
        (torch.nn.Module, "float", torch.nn.Module.double),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    default = torch.get_default_dtype()
    for owner, name, double in places:
        setattr(owner, name, double)
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        for owner, name, single in kept:
            setattr(owner, name, single)
        torch.set_default_dtype(default)


def train_cell(
    of_cell: tuple[str, str, str, str], reference: dict[str, Any], attention: str = ""
) -> tuple[dict[str, float], str]:
    """Train one cell (task, type, layout, folder of its weights) on this group of ranks.

    Return the largest deviations, and a message that explains them if they exceed the tolerance.
    Both are equal on all ranks. This is a collective operation.
    """
    import torch
    from recipekit.model.export import full_parameters
    from recipekit.runtime.step_metrics import StepCounters
    from recipekit.tasks.find import load_task
    from recipekit.train import train_step

    cell = cell_of(*of_cell, attention)
    mesh, groups = cell.mesh, cell.groups
    built = built_of(cell.recipe, cell.model_config, groups, cell.config)
    for part in built.models:
        smooth(part)
    of_task = load_task(cell.recipe.task)
    if built.model_plan.loss_path.chunked and of_task.with_chunked_loss:
        of_task = of_task.with_chunked_loss(of_task)
    model = pipelined(built, of_task, groups) if mesh.pp > 1 else built.model
    engine = initialize(model, built, cell.config, groups)

    batches = told_of_documents(cell.batches(), of_cell[0], built.model_plan.attention)
    results = [train_step(engine, of_task, batches, None, StepCounters(mesh)) for _ in range(STEPS)]

    weights = full_parameters(model, built, groups, torch.float32)
    worst, where = largest_deviations(results, weights, reference)
    engine.destroy()
    if worst["loss"] <= LOSS and worst["grad_norm"] <= LOSS and worst["weight"] <= WEIGHT:
        return worst, ""
    return worst, explain(cell, worst, where, where in reference["idle"])


def largest_deviations(
    results: list[Any], weights: Iterable[tuple[str, Any]], reference: dict[str, Any]
) -> tuple[dict[str, float], str]:
    """Return the largest deviations over all ranks, and the parameter that differs most.

    This is a collective operation.
    """
    import torch.distributed as dist

    weight, where = largest_difference(weights, reference["weights"])
    own = {
        "loss": largest_ratio(results, "loss", reference["losses"]),
        "grad_norm": largest_ratio(results, "grad_norm", reference["norms"]),
        "weight": weight,
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (own, where))
    worst = {name: max(rank[name] for rank, _ in everyone) for name in own}
    return worst, max(everyone, key=lambda rank: rank[0]["weight"])[1]


def deviations(worst: dict[str, float]) -> str:
    """Return a cell's largest deviations as text."""
    return ", ".join(f"{name} {worst[name]:.1e}" for name in NEAR)


def explain(cell: "Cell", worst: dict[str, float], where: str, idle: bool) -> str:
    """Describe a cell's deviations; `idle` means that no gradient reaches the parameter `where`.

    This is a collective operation.
    """
    cause = exact = ""
    if idle:
        cause = ", which no gradient reaches: DeepSpeed decays it, torch does not"
    elif cell.mesh.pp == 1:
        exact = f"; {gradients_in_fp64(cell.model_config, cell.recipe, cell.groups)}"
    return f"differs: {deviations(worst)} ({where}{cause}){exact}"


@dataclass(frozen=True)
class Cell:
    """A tiny model in a layout."""

    recipe: Any
    mesh: Any
    groups: Any
    config: dict[str, Any]  # DeepSpeed's JSON
    model_config: dict[str, Any]

    def batches(self) -> list[dict[str, Any]]:
        """Create this rank's micro-batches of a step."""
        accumulation = self.config["gradient_accumulation_steps"]
        first = self.groups.coords["dp"] * accumulation
        batches = batches_of(self.recipe.task, self.model_config, self.recipe.micro_batch)
        return batches[first : first + accumulation]


def cell_of(task: str, model_type: str, layout: str, folder: str, attention: str) -> Cell:
    """Create a cell's process groups; if `attention` is "", the recipe's own attention is used.

    This is a collective operation.
    """
    from recipekit.parallel.groups import ProcessGroups
    from recipekit.spec.mesh import make_mesh

    world, stage, degrees = LAYOUTS[layout]
    recipe = replace(recipe_of(task, model_type, **degrees), model=folder, init="pretrained")
    recipe = replace(recipe, attention=attention or recipe.attention)
    mesh = make_mesh(world, **degrees)
    config = config_of(recipe, mesh, stage)
    return Cell(
        recipe, mesh, ProcessGroups(mesh, "cpu"), config, tiny_model_config(task, model_type)
    )


def config_of(recipe: Any, mesh: Any, stage: int) -> dict[str, Any]:
    """Return the DeepSpeed JSON of a cell."""
    batch = {
        "train_batch_size": recipe.global_batch,
        "train_micro_batch_size_per_gpu": recipe.micro_batch,
        "gradient_accumulation_steps": BATCHES // mesh.dp,
    }
    config = CONFIG | batch | {"zero_optimization": {"stage": stage}}
    if mesh.ep > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": mesh.ep}
    return config


def built_of(recipe: Any, model_config: dict[str, Any], groups: Any, config: dict[str, Any]) -> Any:
    """Resolve and build a recipe's model on this group of ranks, or on one process without groups.

    This is a collective operation under ZeRO-3.
    """
    import torch
    from recipekit.model.build import build_model, weights_target
    from recipekit.plan import RunPlan
    from recipekit.planner.resolve import TargetDevice, resolve_model
    from recipekit.spec.command import RunCommand
    from recipekit.spec.mesh import Mesh

    command, mesh = RunCommand(recipe, "support", Path(), frozenset()), Mesh()
    if groups is not None:
        mesh = groups.mesh
    plan = RunPlan(command, recipe, mesh, config, None, model_config, Path("support"), None, ())
    cpu = TargetDevice(torch.device("cpu"), "", compiles=False)
    model_plan, whole = resolve_model(plan, model_config, cpu, own_norms=groups is not None)
    return build_model(recipe, model_plan, whole, weights_target(config, groups, cpu.device))


def pipelined(built: Any, task: Any, groups: Any) -> Any:
    """Assemble this rank's pipeline stage. This is a collective operation."""
    from recipekit.parallel import pipeline
    from recipekit.runtime.step_metrics import StepMetrics
    from recipekit.train import pipeline_loss

    split = built.model_plan.split
    assert split is not None
    loss = partial(pipeline_loss, task, StepMetrics())
    model = pipeline.build_pipeline_module(built.models, groups, loss, "1f1b", split.num_stages)
    pipeline.tie_shared_params(model, groups)
    return model


def initialize(model: Any, built: Any, config: dict[str, Any], groups: Any) -> Any:
    """Create a cell's engine. This is a collective operation."""
    import deepspeed
    from recipekit.engine.deepspeed_engine import apply_workarounds
    from recipekit.optim.groups import parameter_groups
    from recipekit.parallel.pipeline import partition_settings

    trained: Any = parameter_groups(model, built.blueprint.trained)
    config = config | partition_settings(built.models[0], groups.mesh)
    engine: Any = deepspeed.initialize(
        model=model,
        model_parameters=trained,
        config=config,
        mpu=groups.mpu,
        dist_init_required=False,
    )[0]
    apply_workarounds(engine)
    return engine


def largest_difference(
    weights: Iterable[tuple[str, Any]], expected: dict[str, Any]
) -> tuple[float, str]:
    """Return a weight's largest absolute difference, and the name of its parameter."""
    largest, where = 0.0, ""
    for name, value in weights:
        difference = size_of((value - expected[name]).abs().max().item()) if value.numel() else 0.0
        if difference > largest:
            largest, where = difference, name
    return largest, where


def largest_ratio(results: list[Any], key: str, expected: list[float]) -> float:
    """Return a result's largest relative deviation over the steps."""
    return max(
        size_of(result[key] / wanted - 1) for result, wanted in zip(results, expected, strict=True)
    )


def size_of(deviation: float) -> float:
    """Return the absolute value of a deviation, and infinity if it is not a number.

    A comparison with NaN is False, so `max` could ignore it.
    """
    return math.inf if math.isnan(deviation) else abs(deviation)


def gradients_in_fp64(config: dict[str, Any], recipe: Any, groups: Any) -> str:
    """Compare one step's fp64 gradients with plain PyTorch's gradients.

    This is a collective operation. If the gradients agree, the difference in fp32 is rounding.
    Otherwise name the parameter that differs most.
    """
    import torch
    import torch.distributed as dist
    from recipekit.tasks.find import load_task
    from recipekit.train import to_device

    of_task, cpu = load_task(recipe.task), torch.device("cpu")
    recipe = replace(recipe, attention="sdpa") if recipe.task == MASKED else recipe

    # The plain model uses transformers' own attention.
    own = replace(
        recipe, tp=1, attention="sdpa" if recipe.attention == "auto" else recipe.attention
    )
    plain = built_of(own, config, None, {}).model.double()
    built = built_of(recipe, config, groups, CONFIG | {"zero_optimization": {"stage": 0}})

    models = ((plain, "sdpa"), (built.model.double(), built.model_plan.attention))
    for model, attention in models:
        batches = batches_of(recipe.task, config, recipe.micro_batch)
        for batch in told_of_documents(batches, recipe.task, attention):
            batch = to_device(batch, cpu)
            of_task.loss(of_task.forward(model, batch), batch, False).backward()

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, worst_gradient(plain, built, groups))
    worst, where = max(everyone)
    return (
        f"in fp64 all gradients of a step agree to {worst:.0e}"
        if worst < ROUNDED
        else f"in fp64 the gradient of {where} differs by {worst:.0e}"
    )


def worst_gradient(plain: Any, built: Any, groups: Any) -> tuple[float, str]:
    """Return the largest relative difference of a gradient on this rank, and its parameter."""
    from recipekit.parallel import tensor as tensor_parallel

    worst, where = 0.0, ""
    whole = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in built.model.named_parameters():
        expected = whole[name]
        if expected is None or parameter.grad is None:
            continue
        size = expected.norm().item()
        if not size:
            continue

        if name in built.cuts:
            assert groups.tp_mesh is not None
            expected = tensor_parallel.shard_tensor(expected, built.cuts[name], groups.tp_mesh)
        worst, where = max((worst, where), ((parameter.grad - expected).norm().item() / size, name))
    return worst, where


# Groups of processes
# -----------------------------------------------------------------------------------------------


def serve(folder: Path) -> None:
    """Serve as one rank of a group: read cells as lines of JSON from stdin, train them, and write
    the answers to files.
    """
    import deepspeed
    import torch
    import torch.distributed as dist
    from recipekit.compat.deepspeed import skip_shm_op_build
    from recipekit.runtime.start import quiet_library_logs
    from recipekit.spec.errors import ConfigError

    torch.set_num_threads(1)
    quiet_library_logs()
    skip_shm_op_build()
    deepspeed.init_distributed("gloo", verbose=False)
    linear = torch.nn.functional.linear
    for line in sys.stdin:
        cell = json.loads(line)
        try:
            answer = {"ok": True} | hold_cell(
                cell["task"],
                cell["type"],
                cell["layout"],
                cell["weights"],
                torch.load(cell["reference"], weights_only=True),
            )
        except BaseException as error:
            answer = {
                "ok": False,
                "reason": reason_of(error),
                "refused": isinstance(error, ConfigError),
            }
        _forget(linear)
        written = folder / f"{cell['number']}_{dist.get_rank()}.json"
        written.with_suffix(".tmp").write_text(json.dumps(answer))
        os.rename(written.with_suffix(".tmp"), written)


def _forget(linear: Any) -> None:
    """Reset the state that DeepSpeed keeps in module globals, so that one cell cannot affect the
    next.
    """
    import gc

    import torch
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.utils import groups

    groups._release_process_group_references()
    torch.nn.functional.linear = linear  # zero.Init replaces it permanently (DeepSpeed 0.19.8)
    partition_parameters.Init.apply_param_persistence = False
    partition_parameters.Init.num_persisted_parameters = (
        partition_parameters.Init.num_persisted_elements
    ) = 0
    gc.collect()


def reason_of(error: BaseException) -> str:
    """Return the error and the module of the model that raised it, in one line.

    If no such module raised it, name the module of recipekit.
    """
    import traceback

    from recipekit.spec.errors import ConfigError

    frames = traceback.extract_tb(error.__traceback__)
    places = [
        f"{Path(frame.filename).stem}.{frame.name}"
        for frame in frames
        if "/models/" in frame.filename
    ]
    places = places or [
        f"{Path(frame.filename).stem}.{frame.name}"
        for frame in frames
        if "recipekit" in frame.filename
    ]
    said = str(error).strip().splitlines()
    if isinstance(error, ConfigError):
        return f"refused: {error.problems[0].where}: {error.problems[0].rule}"
    if isinstance(error, Differs):
        return said[0]
    told = said[0] if said else frames[-1].line
    return f"{type(error).__name__}: {told}"[:200] + (f" (in {places[-1]})" if places else "")


class Group:
    """The running ranks for one layout size. They stay warm from cell to cell."""

    def __init__(self, world: int, folder: Path, cell_seconds: float):
        from recipekit.hosts.ports import free_port

        self.world, self.folder, self.cell_seconds, self.cells = world, folder, cell_seconds, 0
        port = str(free_port())
        own = {
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.ranks = []
        for rank in range(world):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            log = (folder / f"group{world}_{rank}.log").open("a")
            command = [sys.executable, __file__, "--serve", str(folder)]
            self.ranks.append(
                subprocess.Popen(
                    command,
                    env=os.environ | own | place,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    text=True,
                )
            )

    def run(
        self, number: int, task: str, model_type: str, layout: str, reference: Path
    ) -> dict[str, Any]:
        """Return the combined answer of all ranks: the first failure, or the largest deviations.

        If the cell failed, close the group, unless all ranks raised a config error.
        """
        self.cells += 1
        cell = {
            "number": number,
            "task": task,
            "type": model_type,
            "layout": layout,
            "reference": str(reference),
        }
        line = json.dumps(cell | {"weights": str(reference.parent / "weights")}) + "\n"
        for rank in self.ranks:
            assert rank.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.write(line)
                rank.stdin.flush()

        answers = self._wait_for_answers(number)
        failed = [answer for answer in answers if not answer["ok"]]
        if failed or len(answers) < self.world:
            reason = (
                failed[0]["reason"]
                if failed
                else f"no answer within {self.cell_seconds:.0f} s"
                if self.alive
                else "a process died"
            )
            # Every rank raises a config error before its first collective.
            if sum(answer["refused"] for answer in failed) < self.world:
                self.close()
            return {"ok": False, "reason": reason}

        worst = {
            key: max(answer[key] for answer in answers) for key in ("loss", "grad_norm", "weight")
        }
        notes = {key: answers[0][key] for key in ("varlen", "fp32") if key in answers[0]}
        return {"ok": True} | worst | notes

    def _wait_for_answers(self, number: int) -> list[dict[str, Any]]:
        """Return the answers that arrive in time; these are all answers unless a rank failed or
        died.
        """
        files = [self.folder / f"{number}_{rank}.json" for rank in range(self.world)]

        # The first cell waits for the imports.
        deadline = time.monotonic() + self.cell_seconds + (60 if self.cells == 1 else 0)
        while not all(file.exists() for file in files) and time.monotonic() < deadline:
            answers = [json.loads(file.read_text()) for file in files if file.exists()]
            if failed := [answer for answer in answers if not answer["ok"]]:
                # A failed rank's peers fail soon, or wait forever. After a config error, each rank
                # can run the next cell, so wait longer for the slowest rank.
                refused = all(answer["refused"] for answer in failed)
                wait = self.cell_seconds / 20 if refused else 2
                deadline = min(deadline, time.monotonic() + wait)
            if any(rank.poll() is not None for rank in self.ranks):
                break
            time.sleep(0.02)
        return [json.loads(file.read_text()) for file in files if file.exists()]

    @property
    def alive(self) -> bool:
        return all(rank.poll() is None for rank in self.ranks)

    def close(self) -> None:
        for rank in self.ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()


def run_matrix(
    types: list[str],
    layouts: list[str],
    results: Path | None,
    say: Any = print,
    task: str = TEXT,
    cell_seconds: float = CELL_S,
) -> dict[str, Row]:
    """Run a task's cells, each in at most `cell_seconds`, and return type -> row.

    Cells of the installed releases that `results` already contains are not run again.
    """
    import torch

    torch.set_num_threads(1)
    cells = Cells(task, [results] if results else [], releases())
    with (
        tempfile.TemporaryDirectory() as temporary,
        WarmGroups(Path(temporary), cell_seconds) as groups,
    ):
        for index, model_type in enumerate(types, 1):
            if not cells.missing(model_type, layouts):
                continue
            place = f"{index}/{len(types)} {model_type}"
            plain = run_reference(model_type, cells, groups.folder)
            if plain is None:
                say(f"{place}: reference: {cells.done[model_type]['reference']['reason']}")
                continue

            wanted = [
                layout
                for layout in cells.missing(model_type, layouts)
                if layout != "ep2" or plain["experts"]
            ]
            for layout in wanted:
                cells.record(model_type, layout, groups.run(task, model_type, layout))

            marks = ", ".join(
                f"{layout} {cells.done[model_type][layout].get('reason', 'ok')}"
                for layout in wanted
            )
            say(f"{place}: {marks} [{time.monotonic() - groups.began:.0f} s]")
    return cells.done


class Cells:
    """A task's finished cells, in memory and in the files `results`.

    A row contains only cells of the same releases; the last line of the last file counts. If
    `wanted` names releases, cells of others are ignored.
    """

    def __init__(self, task: str, results: list[Path], wanted: str = ""):
        self.task, self.results = task, results
        self.done: dict[str, Row] = {}
        self.made: dict[str, Made] = {}
        for path in results:
            for line in path.read_text().splitlines() if path.exists() else []:
                cell = json.loads(line)
                if cell["task"] == task and wanted in ("", cell["releases"]):
                    self._add(cell)

    def _add(self, cell: dict[str, Any]) -> None:
        name, made = cell["type"], Made(cell["releases"], cell["date"])
        if name in self.made and self.made[name].releases != made.releases:
            del self.done[name]
        self.made[name] = made
        self.done.setdefault(name, {})[cell["layout"]] = cell["result"]

    def missing(self, model_type: str, layouts: list[str]) -> list[str]:
        """List the layouts that a type still has to run; [] if its reference failed."""
        row = self.done.get(model_type, {})
        wanted = [layout for layout in layouts if layout not in row]
        known = row.get("reference", {})
        if not known.get("ok", True) or (wanted == ["ep2"] and not known.get("experts", True)):
            return []
        return wanted

    def record(self, model_type: str, layout: str, result: dict[str, Any]) -> None:
        cell = {"task": self.task, "type": model_type, "layout": layout, "result": result}
        cell |= {"releases": releases(), "date": today()}
        self._add(cell)
        if self.results:
            with self.results[-1].open("a") as file:
                file.write(json.dumps(cell) + "\n")


def run_reference(model_type: str, cells: Cells, folder: Path) -> dict[str, Any] | None:
    """Train a type in plain PyTorch, and store the result; return None if training fails."""
    import torch

    task = cells.task
    try:
        plain = train_plain(task, model_type, folder / "weights")
        torch.save(plain, folder / "reference.pt")
        varlen = {} if task == IMAGES else {"varlen": why_not_varlen(model_type, task)}
        found = {"ok": True, "leak": plain["leak"], "experts": plain["experts"]}
        cells.record(model_type, "reference", found | varlen)
    # Any error in a model family becomes the reason in its row.
    except Exception as error:
        cells.record(model_type, "reference", {"ok": False, "reason": reason_of(error)})
        return None
    return plain


class WarmGroups:
    """The running process groups, one for each number of ranks; leaving the context closes them."""

    def __init__(self, folder: Path, cell_seconds: float):
        self.folder, self.cell_seconds, self.began = folder, cell_seconds, time.monotonic()
        self._groups: dict[int, Group] = {}
        self._number = 0

    def run(self, task: str, model_type: str, layout: str) -> dict[str, Any]:
        """Run one cell; start a new group if the old group has ended or has run 40 cells."""
        self._number += 1
        groups, world = self._groups, LAYOUTS[layout][0]
        if world in groups and (not groups[world].alive or groups[world].cells >= 40):
            groups.pop(world).close()
        if world not in groups:
            groups[world] = Group(world, self.folder, self.cell_seconds)
        reference = self.folder / "reference.pt"
        return groups[world].run(self._number, task, model_type, layout, reference)

    def __enter__(self) -> "WarmGroups":
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._groups.values():
            group.close()


def why_not_varlen(model_type: str, task: str = TEXT) -> str:
    """Return the reason why the attention of a type's default config is not varlen; "" if it is."""
    from recipekit.architectures.families import default_config
    from recipekit.model.empty import CAUSAL_AUTO_CLASS
    from recipekit.model.empty import MASKED_AUTO_CLASS as ENCODER
    from recipekit.model.probes import probe

    try:
        config = default_config(model_type, task).to_dict()
        if task == MASKED:
            return probe(config, ENCODER, model_type).leak_reason("varlen")
        return probe(config, CAUSAL_AUTO_CLASS, model_type).unfit_for_varlen
    except Exception as error:  # any error in a model family is the reason
        return reason_of(error)


# The pages
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """The releases that a row was run with, and the date (YYYY-MM-DD)."""

    releases: str
    date: str


@dataclass(frozen=True)
class PageRow:
    """A model type on a page: its row in the table, and its entries below the table."""

    cells: tuple[str, ...]  # the row without its first column; () if the type has no row
    mask: str  # why its attention needs a mask, or ""
    reasons: dict[str, str]  # layout or "reference" -> why it fails or deviates
    made: Made


def publishes_pipeline_plan(model_type: str) -> bool:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]
    return any(
        getattr(kind, "base_model_pp_plan", None)
        for kind in (config, *getattr(config, "sub_configs", {}).values())
    )


def decoders_alone(types: list[str]) -> list[str]:
    """List the encoder-decoder types, because AutoModelForCausalLM builds only their decoder."""
    from recipekit.architectures.families import default_config

    return [name for name in types if default_config(name).is_encoder_decoder]


def releases() -> str:
    """Return the installed releases."""
    from importlib.metadata import version

    return ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers"))


def today() -> str:
    return time.strftime("%Y-%m-%d")


def versions() -> str:
    """Return the date and the installed releases as a sentence."""
    return f"{releases()}, {today()}."


def versions_of(rows: dict[str, PageRow]) -> list[str]:
    """Return the paragraph that gives the releases of each row of a page.

    The largest group of rows with the same releases comes last, without a list of its types.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(rows):
        groups.setdefault(rows[name].made.releases, []).append(name)

    sentences = []
    for found in sorted(groups, key=lambda found: len(groups[found])):
        names = groups[found]
        date = max(rows[name].made.date for name in names)
        sentences.append(f"{found}, {date}, for these types: {', '.join(names)}.")
    last, _, _ = sentences[-1].partition(", for these types")
    sentences[-1] = f"{last}, for all others." if len(sentences) > 1 else f"{last}."
    return paragraph(" ".join(sentences))


VERSIONS = re.compile(
    r"(torch \S+, deepspeed \S+, transformers \S+), (\d{4}-\d\d-\d\d)"
    r"(?:, for (?:all others|these types: (.*?)))?\.(?= torch |$)"
)


def read_page(text: str) -> dict[str, PageRow]:
    """Return the rows of a page that this tool wrote: type -> row."""
    text = text.partition(BF16_SECTION)[0].replace("\n  ", " ")
    told = next(part for part in text.split("\n\n") if part.startswith("torch "))
    made, others = dict[str, Made](), None
    for found, date, names in VERSIONS.findall(told.replace("\n", " ")):
        own = Made(found, date)
        made |= dict.fromkeys(names.split(", "), own)
        others = others if names else own
    assert others is not None, told

    _, _, below = text.partition(f"\n{REASONS}\n")
    reasons: dict[str, dict[str, str]] = {}
    for name, layout, reason in re.findall(r"^- (\S+), ([^:]+): (.+)$", below, re.MULTILINE):
        reasons.setdefault(name, {})[layout] = reason
    _, _, below = text.partition(f"\n{MASKS}\n")
    masks = dict(re.findall(r"^- (\S+): (.+)$", below.partition("\n## ")[0], re.MULTILINE))
    lines = re.findall(r"^\| (?!type )(\S+) \| (.+) \|$", text, re.MULTILINE)
    cells = {name: tuple(marks.split(" | ")) for name, marks in lines}
    return {
        name: PageRow(
            cells.get(name, ()),
            masks.get(name, ""),
            reasons.get(name, {}),
            made.get(name, others),
        )
        for name in cells.keys() | reasons.keys()
    }


def page_rows(task: str, done: dict[str, Row], made: dict[str, Made]) -> dict[str, PageRow]:
    """Return the page's rows for the results of a task: type -> row."""
    rows = {}
    for name, row in done.items():
        varlen = row["reference"].get("varlen")
        more = {
            TEXT: (_packed(row), _varlen(row)),
            MASKED: (_varlen(row),),
            IMAGES: (),
        }
        marks = (*(_mark(row, layout) for layout in layouts_of(task)), *more[task])
        ran = row["reference"]["ok"]
        rows[name] = PageRow(
            marks if ran else (),
            quoted(varlen) if ran and varlen else "",
            reasons_of(name, row),
            made[name],
        )
    return rows


def reasons_of(name: str, row: Row) -> dict[str, str]:
    """Return why the cells of a row fail or deviate: layout or "reference" -> text.

    A cell without a plan or a preset has no entry.
    """
    reasons = {}
    for layout in ("reference", *LAYOUTS):
        result = row.get(layout, {"ok": True})
        if result.get("fp32"):
            reasons[layout] = f"equal in fp64; in fp32: {quoted(result['fp32'])}"
        elif result["ok"] and layout in LAYOUTS and result.get("varlen"):
            reasons[layout] = f"equal with sdpa; with varlen: {quoted(result['varlen'])}"
        elif not result["ok"] and not _absent(result):
            reasons[layout] = quoted(result["reason"])
    return reasons


def introduction(task: str, model: str, rows: str) -> str:
    """Return a page's paragraphs on how cells are run and on the meaning of the marks."""
    of_task = "" if task == TEXT else f" --task {task}"
    return (
        f"Written by `python tools/make/support_matrix.py{of_task}`, which runs every cell. Do not"
        f" edit this page. A tiny model of each type ({model}) trains {STEPS} steps on {rows} in"
        " real processes (CPU, fp32). ✓ means that the run agrees with plain PyTorch in one"
        f" process: every loss and grad_norm within {LOSS:.0e} relative, every updated weight"
        f" within {WEIGHT:.0e}. The number is the largest deviation. ✗ means that the cell fails."
    )


EXACT = (
    "fp64: rounding in fp32 exceeds the tolerance. The same cell and the same reference in fp64"
    f" agree within {ROUNDED:.0e}: all losses, norms and weights. The fp32 deviation, at most"
    f" {NEAR['loss']:.0e}, is below."
)


def page(rows: dict[str, PageRow]) -> str:
    """Return the text of recipes/SUPPORT.md, for causal language models."""
    ran = sorted(name for name in rows if rows[name].cells)
    planned = [name for name in ran if publishes_pipeline_plan(name)]

    lines = causal_intro(rows, ran)
    for place, layout in enumerate(LAYOUTS):
        lines.append(
            f"- {layout}: {passed(rows, planned, place)} of the {len(planned)} types that publish a"
            f" pipeline plan, {passed(rows, ran, place)} of all {len(rows)}"
        )
    columns = [*LAYOUTS, "packed rows", "varlen"]
    for title, names in (
        ("Types that publish a pipeline plan", planned),
        ("Other types", [name for name in ran if name not in planned]),
    ):
        if names:
            lines += ["", f"## {title}", "", *table(columns, rows, names)]
    return "\n".join([*lines, *masks(rows), *reasons(rows)]) + "\n"


def passed(rows: dict[str, PageRow], names: list[str], place: int) -> int:
    """Return the number of types whose column `place` has a ✓."""
    return sum(rows[name].cells[place].startswith("✓") for name in names)


def table(columns: list[str], rows: dict[str, PageRow], names: list[str]) -> list[str]:
    """Return a table with one row for each type."""
    return [
        f"| type | {' | '.join(columns)} |",
        "|---|" + "---|" * len(columns),
        *(f"| {name} | {' | '.join(rows[name].cells)} |" for name in names),
    ]


def causal_intro(rows: dict[str, PageRow], ran: list[str]) -> list[str]:
    """Return the page up to its counts: how cells are run, and the meaning of the marks."""
    from recipekit.compat.transformers import TP_CORRECTIONS

    ahead = [name for name in rows if AHEAD in rows[name].reasons.get("reference", "")]
    return [
        "# Which families train in which layout",
        "",
        *paragraph(
            introduction(TEXT, "its config class, with every kind of layer", "packed documents")
        ),
        "",
        *versions_of(rows),
        "",
        *paragraph(
            "No family has its own code: the stages and shards come from the plans that the model"
            " publishes. The tensor-parallel plans of these types are corrected:"
            f" {', '.join(sorted(TP_CORRECTIONS))}."
        ),
        "",
        *paragraph(
            "- packed rows: `isolated` means that a document's logits do not depend on other"
            " documents in its row. `leak` means that they do, in transformers itself. Then put one"
            " document in each row, or accept the leak."
        ),
        *paragraph(
            "- varlen: ✓ means that `--attention auto` computes packed rows without a mask. For ✗"
            " the reason is below, and a mask is used."
        ),
        *paragraph(
            "- sdpa: with varlen the rounding differences of the cell exceed the tolerance. With"
            " sdpa, the attention of plain PyTorch here, they do not. The differences are listed"
            " below."
        ),
        *paragraph(f"- {EXACT}"),
        *paragraph(
            "- no plan: the family publishes no plan for that degree. A recipe can set its own plan"
            " for pp (`gpt2_xl_zero1_pp4.py`)."
        ),
        (
            "- no preset: DeepSpeed's AutoEP has no preset for its experts. no experts: there are"
            " no experts to shard."
        ),
        "",
        *paragraph(
            "Refused, because they read the tokens that they should predict:"
            f" {', '.join(sorted(ahead))}."
        ),
        "",
        *paragraph(
            "Encoder-decoders are also refused. For the following types the rows below describe"
            " only the decoder, whose config.json says "
            f'`"is_encoder_decoder": false`: {", ".join(sorted(decoders_alone(ran)))}.'
        ),
        "",
    ]


def masked_page(rows: dict[str, PageRow]) -> str:
    """Return the text of recipes/SUPPORT_MLM.md, for masked language models."""
    layouts = layouts_of(MASKED)
    ran = sorted(name for name in rows if rows[name].cells)
    lines = [
        "# Which masked language models train in which layout",
        "",
        *paragraph(
            introduction(
                MASKED,
                "its config class, without dropout",
                "packed documents with 30 % masked tokens",
            )
        ),
        "",
        *versions_of(rows),
        "",
        *paragraph(
            "The table lists each type whose attention keeps packed documents apart. In"
            " transformers, the logits of packed documents from a tiny copy then equal the logits"
            " of each document alone."
        ),
        "",
        *paragraph(
            "- varlen: ✓ means that the default config runs without a mask. For ✗ the reason is"
            " below, and a mask is used."
        ),
        *paragraph(f"- {EXACT}"),
        *paragraph(
            "- no plan: the type publishes no plan, and the task's plan"
            " (recipekit/spec/task_specs.py) names other modules. A recipe can set its own plan"
            " (`pp_plan`, `tp_plan`)."
        ),
        "",
        *counts(rows, ran, layouts),
        "",
        *table([*layouts, "varlen"], rows, ran),
        *masks(rows),
        *reasons(rows),
    ]
    return "\n".join(lines) + "\n"


def counts(rows: dict[str, PageRow], ran: list[str], layouts: list[str]) -> list[str]:
    """Return a line for each layout: how many types pass."""
    return [
        f"- {layout}: {passed(rows, ran, place)} of all {len(rows)}"
        for place, layout in enumerate(layouts)
    ]


def image_page(rows: dict[str, PageRow]) -> str:
    """Return the text of recipes/SUPPORT_IMAGES.md, for image classifiers."""
    layouts = layouts_of(IMAGES)
    ran = sorted(name for name in rows if rows[name].cells)
    lines = [
        "# Which image classifiers train in which layout",
        "",
        *paragraph(
            introduction(
                IMAGES, "its config class", f"micro-batches of {MICRO_BATCH[IMAGES]} random images"
            )
        ),
        "",
        (
            f"Types with BatchNorm train on micro-batches of {NORMED} images, with SiLU instead of"
            " ReLU."
        ),
        "",
        *versions_of(rows),
        "",
        *paragraph(
            "If a type publishes no plan, the task's plan (recipekit/spec/task_specs.py) is used."
            " no plan: the modules of the type have other names. A recipe can set its own plan"
            " (`pp_plan`, `tp_plan`)."
        ),
        "",
        *paragraph(EXACT),
        "",
        *counts(rows, ran, layouts),
        "",
        *table(layouts, rows, ran),
        *reasons(rows),
    ]
    return "\n".join(lines) + "\n"


def masks(rows: dict[str, PageRow]) -> list[str]:
    """Return the section on attention that needs a mask."""
    lines = [
        line
        for name in sorted(rows)
        if rows[name].mask
        for line in paragraph(f"- {name}: {rows[name].mask}")
    ]
    return ["", MASKS, "", *lines]


def reasons(rows: dict[str, PageRow]) -> list[str]:
    """Return the section with the message of each cell that fails or deviates."""
    lines = [
        line
        for name in sorted(rows)
        for layout, reason in rows[name].reasons.items()
        for line in paragraph(f"- {name}, {layout}: {with_cause(name, layout, reason)}")
    ]
    return ["", REASONS, "", *lines]


def with_cause(name: str, layout: str, reason: str) -> str:
    """Return a reason with the cause in WHY. A row of an earlier page may already contain it."""
    for (start, part, message), cause in WHY.items():
        if name.startswith(start) and part in layout and message in reason:
            return reason if cause in reason else f"{reason}; {cause}"
    return reason


def quoted(message: str) -> str:
    """Return a recorded message as Markdown code, with its backticks replaced by single quotes."""
    return "`" + message.replace("`", "'") + "`"


def paragraph(text: str) -> list[str]:
    return wrap(
        text,
        120,
        subsequent_indent="  " if text.startswith("- ") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _packed(row: Row) -> str:
    leak = row["reference"].get("leak")
    # a leak below 1e-6 is rounding
    return "" if leak is None else "isolated" if leak < 1e-6 else f"leak {leak:.0e}"


def _varlen(row: dict[str, dict[str, Any]]) -> str:
    reason = row["reference"].get("varlen")
    return "not run" if reason is None else "✗" if reason else "✓"


def _mark(row: dict[str, dict[str, Any]], layout: str) -> str:
    result = row.get(layout)
    if result is None:
        return (
            "no experts"
            if layout == "ep2" and not row["reference"].get("experts", True)
            else "not run"
        )
    if result["ok"]:
        worst = max(result["loss"], result["grad_norm"], result["weight"])
        exact, sdpa = "fp64 " * ("fp32" in result), ", sdpa" * ("varlen" in result)
        return f"✓ {exact}{worst:.0e}{sdpa}"
    return _absent(result) or "✗"


def _absent(result: dict[str, Any]) -> str:
    """Return the mark for a feature that a family lacks; "" for any other failure."""
    return next((mark for said, mark in ABSENT.items() if said in result["reason"]), "")


def make_parser() -> argparse.ArgumentParser:
    from recipekit.spec.paths import path_argument

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--task",
        choices=(TEXT, MASKED, IMAGES),
        help=f"Task whose models to run. (default: all tasks, or {TEXT} with --types)",
    )
    parser.add_argument(
        "--types",
        nargs="+",
        help="Model types to run, for example llama. No page is written. (default: all types)",
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=list(LAYOUTS),
        default=list(LAYOUTS),
        help="Layouts to run. (default: all)",
    )
    parser.add_argument(
        "--results",
        type=path_argument,
        nargs="+",
        default=[],
        help=(
            "File of finished cells. Cells of the installed releases are not run again, and new"
            " cells are added. With --merge, several files are possible. (default: none)"
        ),
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help=(
            "Run no cell. Write the finished rows of --results into the pages, or into the page of"
            " --task. All other rows stay, and each page gives the releases of each row."
        ),
    )
    parser.add_argument(
        "--cell_seconds",
        "--cell-seconds",
        type=float,
        default=CELL_S,
        help=f"Time limit of a cell. Set it higher on a busy machine. (default: {CELL_S:.0f})",
    )
    parser.add_argument(
        "--varlen",
        action="store_true",
        help="Only print for each type whether it uses varlen attention. This takes a minute.",
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    parser = make_parser()
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if arguments.serve:
        serve(arguments.serve)
        return

    chosen = arguments.task or (TEXT if arguments.types else None)
    if unknown := sorted(set(arguments.types or ()) - set(model_types(chosen or TEXT))):
        parser.error(f"not known to transformers: {', '.join(unknown)}")
    if arguments.varlen:
        for name in arguments.types or model_types(TEXT):
            print(f"{name}: {why_not_varlen(name) or 'varlen'}", flush=True)
        return

    tasks = [chosen] if chosen else [TEXT, MASKED, IMAGES]
    if arguments.merge:
        for task in tasks:
            merge(task, arguments.results)
        return
    if len(arguments.results) > 1:
        parser.error("--results has several files. Use one file, or add --merge")
    run_tasks(tasks, arguments)


def run_tasks(tasks: list[str], arguments: argparse.Namespace) -> None:
    """Run the cells of tasks, and write their pages.

    If the arguments name types, write no page, and exit with 1 if a cell fails.
    """
    done: dict[str, dict[str, Row]] = {}
    for task in tasks:
        types = sorted(
            arguments.types or model_types(task),
            key=lambda name: (not publishes_pipeline_plan(name), name),
        )
        layouts = [layout for layout in arguments.layouts if layout in layouts_of(task)]
        results = next(iter(arguments.results), None)
        done[task] = run_matrix(
            types, layouts, results, task=task, cell_seconds=arguments.cell_seconds
        )

    if not arguments.types:
        for task, of_task in done.items():
            made = dict.fromkeys(of_task, Made(releases(), today()))
            write_page(task, page_rows(task, of_task, made))
    elif not all_ok(done):
        raise SystemExit(1)


def page_of(task: str) -> Path:
    """Return the path of a task's page."""
    name = {TEXT: "SUPPORT.md", MASKED: "SUPPORT_MLM.md", IMAGES: "SUPPORT_IMAGES.md"}[task]
    return ROOT / "recipes" / name


def merge(task: str, results: list[Path]) -> None:
    """Write the rows of a task that `results` contains in full into the task's page.

    All other rows of the page stay, except rows of types that the installed transformers lacks.
    """
    cells = Cells(task, results)
    full = {}
    for name, row in cells.done.items():
        if missing := cells.missing(name, layouts_of(task)):
            print(f"{name}: not merged: {', '.join(missing)} have no results")
        else:
            full[name] = row

    rows = read_page(page_of(task).read_text()) | page_rows(task, full, cells.made)
    types = model_types(task)
    write_page(task, {name: row for name, row in rows.items() if name in types})


def write_page(task: str, rows: dict[str, PageRow]) -> None:
    """Write the page of a task."""
    write = {TEXT: page, MASKED: masked_page, IMAGES: image_page}[task]
    path = page_of(task)
    path.write_text(write(rows) + bf16_section(path))
    print(f"wrote recipes/{path.name}")


def bf16_section(path: Path) -> str:
    """Return the section of a page that tools/make/bf16_distance.py wrote, or ""."""
    _, title, rows = path.read_text().partition(BF16_SECTION)
    return f"\n{title}{rows}" if title else ""


def all_ok(done: dict[str, dict[str, Row]]) -> bool:
    """Return True if every cell of every task agrees with plain PyTorch."""
    rows = [row for of_task in done.values() for row in of_task.values()]
    return all(result["ok"] for row in rows for result in row.values())


if __name__ == "__main__":
    main()
