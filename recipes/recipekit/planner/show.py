"""Prints a dry run: layout, batch arithmetic, resolved JSON and memory, with a verdict if the device is known."""

import json

import torch
from transformers import PreTrainedModel

from ..command import Command
from ..mesh import Mesh
from ..model.describe import draft
from ..model.empty import empty_model
from ..parallel import expert, pipeline, tensor
from ..parallel.blueprint import Blueprint, Layout, describe, stage_bounds
from ..plan import Plan
from ..tasks.facts import TASKS
from ..tasks.find import task_called
from .devices import device_called
from .memory import Load, rank_terms
from .pinned import pins_exactly
from .terms import ACCELERATOR, BACKWARD, LOSS, MOMENTS, REDUCE, STEP, Term, gib, too_much, total

WHEN = {LOSS: "while the loss is computed", BACKWARD: "while gradients arrive", REDUCE: "while they are summed over ranks", STEP: "in the step"}


def show(plan: Plan) -> None:
    """Prints the plan; needs no accelerator, no process group and no weights."""
    recipe, mesh, device = plan.recipe, plan.mesh, seen_device(plan.command)
    unknown, drawn, terms = "", None, []
    if plan.model_config is not None:  # first, so that a refusal stands alone
        refuse_degrees(
            empty_model(plan.model_config, recipe.attention, recipe.model, recipe.recompute_every, TASKS[recipe.task].auto_class), recipe.pp_plan, mesh
        )
        unknown = task_called(recipe.task).check(plan.model_config, recipe.attention, recipe.model)
        drawn = drawn_up(plan)
        terms = fullest(plan, *drawn)
    for note in (*plan.notes, *filter(None, [unknown])):
        print(note)
    print(f"layout   {mesh.world} rank{'s' if mesh.world > 1 else ''}: {mesh}")
    print(
        f"batch    {recipe.global_batch} rows x {recipe.seq_len} tokens = {recipe.global_batch * recipe.seq_len:,} tokens a step"
        f" = {mesh.dp} data-parallel x {recipe.micro_batch} micro_batch x {plan.accumulation} accumulation"
    )
    print(f"schedule {recipe.steps} steps = {recipe.steps * recipe.global_batch * recipe.seq_len / 1e9:.3f} billion tokens")
    print(f"JSON     {plan.ds_path or 'from the recipe'}, resolved:")
    print(json.dumps(plan.ds_config, indent=2))
    if drawn is None:
        print(f"memory   not known: {recipe.model} is neither shipped in recipes/recipekit/architectures/ nor on this machine")
        return
    blueprint, layout, _ = drawn
    if mesh.pp > 1:
        print(f"stages   {describe(blueprint, layout.bounds)}")
    for place in dict.fromkeys(term.place for term in terms):
        show_place(terms, place)
    if device is not None:
        show_verdict(terms, *device)


def show_place(terms: list[Term], place: str) -> None:
    """Prints what the fullest rank holds at a place, after the most that is there at one time."""
    always = sum(term.taken for term in terms if term.place == place and not term.when and not term.bound)
    worst = max(MOMENTS, key=lambda moment: total(terms, place, moment))
    most = total(terms, place, worst)
    print(f"memory   {place}, each rank: {gib(always)} always" + (f", {gib(most)} {WHEN[worst]}" if most > always else ""))
    for term in (term for term in terms if term.place == place):
        when = ", ".join(WHEN[moment] for moment in term.when)
        rounding = f" for {gib(term.size)}" if term.pinned > 1.001 * term.size else ""
        notes = "; ".join(note for note in (when, f"page-locked{rounding}" if term.pinned else "", "at most" if term.bound else "") if note)
        print(f"        {gib(term.taken):>12}  {term.what}{f' ({notes})' if notes else ''}")


def show_verdict(terms: list[Term], name: str, memory: int) -> None:
    """Prints whether the states and the logits of a rank fit its device."""
    problems = too_much(terms, ACCELERATOR, memory, on=name)
    fits = f"states fit, activations not counted: {gib(total(terms, ACCELERATOR))} of the {gib(memory)} of {name}"
    print(f"verdict  {f'does not fit: {problems[0]}' if problems else fits}")


def seen_device(command: Command) -> tuple[str, int] | None:
    """Returns (name, bytes) of the device that the command names, else of the first one that torch sees."""
    if command.device:
        name, device = device_called(command.device)
        return name, device.memory
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), torch.cuda.get_device_properties().total_memory
    return None


def refuse_degrees(model: PreTrainedModel, pp_plan: dict[str, str] | None, mesh: Mesh) -> None:
    """Raises `Refusal` for a degree without a published plan of the model, or one that does not divide its experts."""
    if mesh.pp > 1:
        pipeline.plan_of(model, pp_plan)
    if mesh.tp > 1:
        tensor.plan_of(model)
    if mesh.ep > 1:
        expert.check(model, mesh.ep)


def drawn_up(plan: Plan) -> tuple[Blueprint, Layout, Load]:
    """Describes the model, its layout and its load, as `memory.rank_terms` takes them; needs no weights."""
    recipe, mesh = plan.recipe, plan.mesh
    assert plan.model_config is not None
    model = empty_model(plan.model_config, recipe.attention, recipe.model, recipe.recompute_every, TASKS[recipe.task].auto_class)
    model = recipe.adapt(model) if recipe.adapt is not None else model
    blueprint = draft(model, recipe.pp_plan)
    head = model.get_output_embeddings()
    load = Load(
        micro_batch=recipe.micro_batch,
        seq_len=recipe.seq_len // mesh.sp,
        accumulation=plan.accumulation,
        vocabulary=head.weight.shape[0] if head is not None else 0,
        background=recipe.save_in_background,
        adapted=recipe.adapt is not None,
        exact_pins=pins_exactly(),
    )
    return blueprint, layout_of(mesh, blueprint, recipe.pipeline_schedule), load


def rank_plan(plan: Plan, pp_rank: int) -> list[Term]:
    """Returns the memory terms of the ranks of one pipeline stage."""
    blueprint, layout, load = drawn_up(plan)
    return rank_terms(blueprint, layout, plan.ds_config, load, pp_rank)


def fullest(plan: Plan, blueprint: Blueprint, layout: Layout, load: Load) -> list[Term]:
    """Returns the memory terms of the fullest rank: a rank of the pipeline stage that takes most of its accelerator."""
    return max((rank_terms(blueprint, layout, plan.ds_config, load, rank) for rank in range(plan.mesh.pp)), key=lambda terms: total(terms, ACCELERATOR))


def layout_of(mesh: Mesh, blueprint: Blueprint, pipeline_schedule: str) -> Layout:
    """Returns the layout that a recipe asks for, as far as counting needs it."""
    stages = mesh.pp * (2 if pipeline_schedule == "dualpipev" else 1)
    return Layout(mesh, 0, "torch", "float32", stage_bounds(blueprint, stages) if mesh.pp > 1 else (), pipeline_schedule)
