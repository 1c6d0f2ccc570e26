"""What `--dry_run` prints: layout, batch arithmetic, resolved JSON and the memory of the model's states."""

import json
from math import prod
from typing import Any

from . import expert_parallel, pipeline, tensor_parallel
from .blueprint import Blueprint, Layout, describe, held, local_shape, stage_bounds
from .mesh import Mesh
from .model import draft, empty_model, enabled
from .plan import Plan
from .recipe import Recipe


def show(plan: Plan) -> None:
    """Prints the plan; needs no accelerator, no process group and no weights."""
    recipe, mesh = plan.recipe, plan.mesh
    for note in plan.notes:
        print(note)
    print(f"layout   {mesh.world} rank{'s' if mesh.world > 1 else ''}: {mesh}")
    print(
        f"batch    {recipe.global_batch} rows x {recipe.seq_len} tokens = {recipe.global_batch * recipe.seq_len:,} tokens a step"
        f" = {mesh.dp} data-parallel x {recipe.micro_batch} micro_batch x {plan.accumulation} accumulation"
    )
    print(f"schedule {recipe.steps} steps = {recipe.steps * recipe.global_batch * recipe.seq_len / 1e9:.3f} billion tokens")
    print(f"JSON     {plan.ds_path or 'from the recipe'}, resolved:")
    print(json.dumps(plan.ds_config, indent=2))
    if plan.model_config is None:
        print(f"memory   not known: {recipe.model} is neither shipped in recipes/recipekit/architectures/ nor on this machine")
        return
    model = empty_model(recipe, plan.model_config)
    refuse_degrees(model, recipe, mesh)
    if mesh.pp > 1:
        blueprint = draft(model, recipe.pp_plan)
        print(f"stages   {describe(blueprint, layout_of(recipe, mesh, blueprint).bounds)}")
    for place, parts in state_bytes(plan, *count_parameters(recipe, plan.model_config, mesh)).items():
        listed = " + ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
        print(f"memory   {place}, each rank: {sum(parts.values()) / 2**30:.2f} GiB = {listed}")
    print("         activations, buckets and the allocator's reserve come on top")


def refuse_degrees(model: Any, recipe: Recipe, mesh: Mesh) -> None:
    """Raises `Refusal` for a degree for which the model publishes no plan, or whose experts cannot be divided."""
    if mesh.pp > 1:
        pipeline.plan_of(model, recipe.pp_plan)
    if mesh.tp > 1:
        tensor_parallel.plan_of(model)
    if mesh.ep > 1:
        expert_parallel.check(model, mesh.ep)


def count_parameters(recipe: Recipe, model_config: dict[str, Any], mesh: Mesh) -> tuple[int, int, int]:
    """(parameters the fullest rank holds, those of them that are trained, those whose states its data-parallel ranks share).

    Before ZeRO divides them; tied weights count once. An expert is on dp / ep ranks, which share its states, so together
    the data-parallel ranks share those of all experts.
    """
    model = empty_model(recipe, model_config)
    if recipe.adapt is not None:
        model = recipe.adapt(model)
    blueprint = draft(model, recipe.pp_plan)
    layout = layout_of(recipe, mesh, blueprint)
    ranks = [[tensor for tensor in held(blueprint, layout, rank) if not tensor.buffer] for rank in range(mesh.pp)]
    sizes = {tensor.name: prod(local_shape(tensor, mesh.tp, 0)) for tensor in blueprint.tensors}
    fullest = max(ranks, key=lambda tensors: sum(sizes[tensor.name] for tensor in tensors))
    trained = [tensor.name for tensor in fullest if tensor.group is not None]
    own = {tensor.name: sizes[tensor.name] // (mesh.ep if ".experts." in tensor.name else 1) for tensor in fullest}
    return sum(own.values()), sum(own[name] for name in trained), sum(sizes[name] for name in trained)


def layout_of(recipe: Recipe, mesh: Mesh, blueprint: Blueprint) -> Layout:
    """The layout that a recipe asks for, as far as it is needed to count."""
    stages = mesh.pp * (2 if recipe.pipeline_schedule == "dualpipev" else 1)
    return Layout(mesh, 0, "torch", "float32", stage_bounds(blueprint, stages) if mesh.pp > 1 else (), recipe.pipeline_schedule)


def state_bytes(plan: Plan, parameters: int, trained: int, optimized: int) -> dict[str, dict[str, int]]:
    """place -> what -> bytes on each rank, padding left out.

    Mixed precision keeps 2 bytes a weight, an fp32 master copy and two fp32 Adam moments (ZeRO, arXiv 1910.02054,
    section 3.1); gradients are kept in data_types.grad_accum_dtype.
    """
    zero = plan.ds_config["zero_optimization"]
    stage, dp = zero["stage"], plan.mesh.dp * plan.mesh.sp
    mixed = enabled(plan.ds_config, "bf16") or enabled(plan.ds_config, "fp16")
    width = 2 if mixed else 4
    gradient = 4 if plan.ds_config.get("data_types", {}).get("grad_accum_dtype") in ("fp32", "float32") else width
    master = 4 if mixed or stage > 0 else 0
    share = lambda size, since: -(-size // dp) if stage >= since else size  # noqa: E731
    device = "accelerator"
    homes = {
        "parameters": {"none": device, "cpu": "host", "nvme": "NVMe"}[zero.get("offload_param", {}).get("device", "none")],
        "optimizer": {"none": device, "cpu": "host", "nvme": "NVMe"}[zero.get("offload_optimizer", {}).get("device", "none")],
    }
    places: dict[str, dict[str, int]] = {}
    for what, home, size in (
        ("parameters", homes["parameters"], share(parameters * width, 3)),
        ("gradients", "host" if homes["optimizer"] != device else device, share(trained * gradient, 2)),
        ("optimizer states", homes["optimizer"], share((optimized if stage else trained) * (master + 8), 1)),
    ):
        places.setdefault(home, {})[what] = size
    return places
