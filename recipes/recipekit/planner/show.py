"""Prints a dry run: layout, batch arithmetic, resolved JSON and memory, with a verdict if the
device is known.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..dslint.compiling import layers_whole
from ..model.adapter import AdapterRequest, adapted
from ..model.attention import choose_attention
from ..model.describe import draft
from ..model.device import Activations
from ..model.empty import empty_model
from ..model.head import Kind, give_losses_where_exact
from ..model.own_head import config_of_files
from ..model.small import summed_gradients
from ..model.weights import open_weights
from ..parallel import expert, pipeline, sequence, tensor
from ..parallel.blueprint import Blueprint, Layout, describe, stage_bounds, stages_of
from ..parallel.param_groups import check_named
from ..parallel.plans import adapted_plans, plans_of
from ..plan import Plan
from ..spec.command import Command
from ..spec.devices import device_called, gib
from ..spec.mesh import Mesh
from ..spec.optimizer_specs import by_matrix
from ..spec.phases import rates
from ..spec.task_specs import PACKED, TASKS, Facts, Plans
from ..tasks.find import task_called
from .activations import activation_terms, shape_of
from .load import Load
from .memory import rank_terms
from .pinned import pins_exactly
from .terms import ACCELERATOR, BACKWARD, LOSS, MOMENTS, REDUCE, STEP, Term, too_much, total

WHEN = {
    LOSS: "while the loss is computed",
    BACKWARD: "while gradients arrive",
    REDUCE: "while they are summed over ranks",
    STEP: "in the step",
}


def show(plan: Plan) -> None:
    """Prints the plan; needs no accelerator, no process group and no weights."""
    recipe, mesh, device = plan.recipe, plan.mesh, seen_device(plan.command)
    shows_json = plan.command.show == "json"
    assert plan.model_config is not None, (
        "the plan of a dry run refuses a model without config.json"
    )

    # All checks come before the first line, so that a refusal is printed alone.
    made = empty_of(plan)
    of_files = notes_on_files(plan, made[0])
    other = attention_of(plan)[1]
    unknown = task_called(recipe.task).check(plan.model_config, recipe.attention, recipe.model)
    drawn = drawn_up(plan, made)
    terms = fullest(plan, *drawn)
    for note in (*plan.notes, *filter(None, [*of_files, other, unknown])):
        print(note)
    print(f"layout   {mesh.world} rank{'s' if mesh.world > 1 else ''}: {mesh}")
    for line in steps_of(plan):
        print(line)
    if recipe.engine != "deepspeed":
        print(f"engine   {recipe.engine}, {recipe.precision}; it reads no JSON")
    else:
        hint = "" if shows_json else "; --show json prints it as resolved"
        print(f"JSON     {plan.ds_path or 'from the recipe'}{hint}")
    if shows_json:
        if recipe.engine != "deepspeed":
            print("JSON     the same settings in DeepSpeed's words, without the precision:")
        print(json.dumps(plan.ds_config, indent=2))
    blueprint, layout, _ = drawn
    if mesh.pp > 1:
        print(f"stages   {describe(blueprint, layout.bounds)}")
    for place in dict.fromkeys(term.place for term in terms):
        show_place(terms, place)
    show_activations(activations_of(plan), terms)
    if device is not None:
        show_verdict(terms, *device)


def steps_of(plan: Plan) -> list[str]:
    """Says what a step takes, from which step on another number of rows, and what the whole
    schedule does: rows and learning rate.
    """
    recipe, mesh = plan.recipe, plan.mesh
    ranks, whole = (
        f"{mesh.dp} data-parallel x {recipe.micro_batch} micro_batch",
        arithmetic(recipe.facts, recipe.ramp.total(recipe.steps), recipe.seq_len)[1],
    )
    lines = []
    for first, rows in recipe.ramp.table:
        step = arithmetic(recipe.facts, rows, recipe.seq_len)[0]
        begins = "batch    " if first == 1 else f"ramp     from step {first} on "
        lines.append(
            f"{begins}{step} a step = {ranks} x {rows // (mesh.dp * recipe.micro_batch)}"
            " accumulation"
        )
    if not recipe.steps:
        return [
            *lines,
            (
                f"schedule {recipe.epochs:g} epochs; a run counts the data at its start and prints"
                " the number of steps"
            ),
        ]
    lines.append(f"schedule {recipe.steps} steps = {whole}")
    if "scheduler" not in plan.ds_config:
        numbers = recipe.lr, recipe.min_lr, recipe.warmup_steps, recipe.decay_steps
        lines.append(f"lr       {rates(recipe.schedule, recipe.steps, *numbers)}")
    return lines


def arithmetic(facts: Facts, rows: int, seq_len: int) -> tuple[str, str]:
    """Says what so many rows are, in what the task counts: those of a step, and those of all steps
    together.
    """
    if facts.rows == PACKED:
        return (
            f"{rows} rows x {seq_len} tokens = {rows * seq_len:,} tokens",
            f"{rows * seq_len / 1e9:.3f} billion tokens",
        )
    return f"{rows:,} {facts.unit}", f"{rows / 1e6:.3f} million {facts.unit}"


def show_place(terms: list[Term], place: str) -> None:
    """Prints what the fullest rank holds at a place, after the most that is there at one time."""
    always = sum(
        term.taken for term in terms if term.place == place and not term.when and not term.bound
    )
    worst = max(MOMENTS, key=lambda moment: total(terms, place, moment))
    most = total(terms, place, worst)
    print(
        f"memory   {place}, each rank: {gib(always)} always"
        + (f", {gib(most)} {WHEN[worst]}" if most > always else "")
    )
    for term in (term for term in terms if term.place == place):
        when = ", ".join(WHEN[moment] for moment in term.when)
        rounding = f" for {gib(term.size)}" if term.pinned > 1.001 * term.size else ""
        notes = "; ".join(
            note
            for note in (
                when,
                f"page-locked{rounding}" if term.pinned else "",
                "at most" if term.bound else "",
            )
            if note
        )
        print(f"        {gib(term.taken):>12}  {term.what}{f' ({notes})' if notes else ''}")


def show_activations(activations: list[Term], terms: list[Term]) -> None:
    """Prints what is predicted of activations; `terms` are those of the states, with which they are
    there.

    Nothing is refused for a prediction.
    """
    if not activations:
        return
    both = total([*terms, *activations], ACCELERATOR, bounds=True)
    print(
        f"memory   predicted activations of a micro-batch: {gib(total(activations, ACCELERATOR))},"
        f" at most {gib(both)} with the states above"
    )
    for term in activations:
        when = WHEN[term.when[-1]] if term.when else ""
        notes = "; ".join(filter(None, (when, "at most" if term.bound else "")))
        print(f"        {gib(term.size):>12}  {term.what}{f' ({notes})' if notes else ''}")


def activations_of(plan: Plan) -> list[Term]:
    """Predicts the activations of a rank; [] where no formula is known: of another layer, an
    adapter, a pipeline, another engine, or a dense mask.
    """
    recipe, mesh = plan.recipe, plan.mesh
    model_config = plan.model_config or {}
    compiled = ""
    if recipe.compile == "on" or (
        recipe.compile == "auto" and (seen_device(plan.command) or ("",))[0].startswith("NVIDIA")
    ):
        compiled = (
            "layers"
            if layers_whole(
                model_config.get("model_type", ""), plan.ds_config, mesh.tp, mesh.sp, mesh.ep
            )
            else "parts"
        )
    shape = (
        shape_of(model_config, mesh.tp, mesh.sp, compiled) if recipe.facts.rows == PACKED else None
    )
    if (
        shape is None
        or recipe.adapt is not None
        or mesh.pp > 1
        or recipe.engine != "deepspeed"
        or attention_of(plan)[0] not in ("varlen", "flash_attention_2")
    ):
        return []
    tokens = recipe.micro_batch * recipe.seq_len // mesh.sp
    return activation_terms(
        shape,
        tokens,
        4 if plan.precision == "fp32" else 2,
        model_config["num_hidden_layers"],
        recipe.recompute,
    )


def show_verdict(terms: list[Term], name: str, memory: int) -> None:
    """Prints whether the states and the logits of a rank fit its device."""
    problems = too_much(terms, ACCELERATOR, memory, on=name)
    fits = (
        f"states fit, activations not counted: {gib(total(terms, ACCELERATOR))} of the"
        f" {gib(memory)} of {name}"
    )
    print(f"verdict  {f'does not fit: {problems[0]}' if problems else fits}")


def seen_device(command: Command) -> tuple[str, int] | None:
    """Returns (name, bytes) of the device that the command names, else of the first one that torch
    sees.
    """
    if command.device:
        name, device = device_called(command.device)
        return name, device.memory
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), torch.cuda.get_device_properties().total_memory
    return None


def refuse_degrees(plan: Plan, model: PreTrainedModel, plans: Plans) -> None:
    """Raise `Refusal` for a degree that the model does not support, by the same checks as
    `build_model`.
    """
    recipe, mesh = plan.recipe, plan.mesh
    assert plan.model_config is not None
    if mesh.sp > 1:
        sequence.check(model, recipe.seq_len)
    if mesh.ep > 1:
        expert.check(model, mesh.ep)
    if mesh.tp > 1:
        tensor.check_plan(model, plans.tp)
        summed_gradients(plan.model_config, recipe.facts, plans, recipe.model)
    if mesh.pp > 1:
        pipeline.split(
            model, draft(model, plans), stages_in(mesh, recipe.pipeline_schedule), plans.pp
        )


def attention_of(plan: Plan) -> tuple[str, str]:
    """The attention of a plan on the device that it is shown for, and why it is not varlen, as
    `choose_attention` returns them.
    """
    recipe, precisions = plan.recipe, {"bf16": torch.bfloat16, "fp16": torch.float16}
    assert plan.model_config is not None
    dtype, device = (
        precisions.get(plan.precision, torch.float32),
        torch.device("cpu" if seen_device(plan.command) is None else "cuda"),
    )
    return choose_attention(
        recipe.attention,
        plan.model_config,
        recipe.model,
        recipe.facts,
        Activations(dtype, device, (recipe.micro_batch, recipe.seq_len)),
    )


def empty_of(plan: Plan) -> tuple[PreTrainedModel, Plans]:
    """The model of a plan without weights, before it is adapted, and the plans that it is cut
    by.
    """
    recipe, facts = plan.recipe, TASKS[plan.recipe.task]
    assert plan.model_config is not None
    config = config_in_files(plan)[0]
    model = empty_model(
        config, attention_of(plan)[0], recipe.model, recipe.recompute, facts.auto_class
    )
    return model, plans_of(
        model, recipe.plans, facts.plans, facts.matrices if by_matrix(plan.ds_config) else ()
    )


def config_in_files(plan: Plan) -> tuple[dict[str, Any], str]:
    """Return (the config.json that matches the model's local files, a line about its difference).

    Reads no other files.
    """
    assert plan.model_config is not None
    if plan.recipe.init != "pretrained" or not Path(plan.recipe.model).is_dir():
        return plan.model_config, ""
    return config_of_files(plan.model_config, plan.recipe.model, plan.recipe.facts.auto_class)


def notes_on_files(plan: Plan, model: PreTrainedModel) -> list[str]:
    """Return the lines of a start about the model's local files.

    Raises `Refusal` for files that do not fit the model.
    """
    recipe = plan.recipe
    if recipe.init != "pretrained" or not Path(recipe.model).is_dir():
        return []
    return [
        config_in_files(plan)[1],
        open_weights(recipe.model, model, new_head=recipe.labels > 0).note,
    ]


def drawn_up(
    plan: Plan, made: tuple[PreTrainedModel, Plans] | None = None
) -> tuple[Blueprint, Layout, Load]:
    """Describe the model (`made` by `empty_of`), its layout and its load, as `memory.rank_terms`
    takes them; needs no weights.

    A dry run and every start call this. Raises `Refusal` for a layout that the model cannot have.
    """
    recipe, mesh = plan.recipe, plan.mesh
    model, plans = made or empty_of(plan)
    refuse_degrees(plan, model, plans)
    whole = model
    if recipe.adapt is not None:
        model = adapted(
            model,
            AdapterRequest(recipe.adapt, recipe.model, recipe.merge, recipe.tp, recipe.ep),
            plan.ds_config,
        )
        plans = adapted_plans(model, plans)
    blueprint = draft(model, plans)
    check_named(blueprint.trained, plans, recipe.matrices)
    places, classes = outputs(model, recipe.facts, recipe.seq_len // mesh.sp)
    load = Load(
        micro_batch=recipe.micro_batch * recipe.facts.rows_each,
        seq_len=places,
        accumulation=recipe.ramp.most // (mesh.dp * recipe.micro_batch),
        vocabulary=classes,
        chunked=plan.model_config is not None
        and give_losses_where_exact(
            recipe.loss,
            whole,
            [],
            Kind(plan.model_config, recipe.task, recipe.model),
            (plans.tp, None),
        ).in_chunks,
        background=recipe.save_in_background,
        adapted=recipe.adapt is not None,
        engine=recipe.engine,
        half=recipe.engine != "deepspeed" and plan.precision != "fp32",
        exact_pins=pins_exactly(),
    )
    layout = layout_of(mesh, blueprint, recipe.pipeline_schedule)
    pipeline.check_stages(blueprint, layout.bounds)
    return blueprint, layout, load


def outputs(model: PreTrainedModel, facts: Facts, seq_len: int) -> tuple[int, int]:
    """Counts the logits that the loss is computed of: (places of a row, classes of each): tokens
    and the vocabulary, or 1 and the labels.
    """
    if (head := model.get_output_embeddings()) is not None:
        return seq_len, head.weight.shape[0]
    return 1, 0 if facts.rows == PACKED else model.config.num_labels or 0


def rank_plan(plan: Plan, pp_rank: int) -> list[Term]:
    """Returns the memory terms of the ranks of one pipeline stage."""
    blueprint, layout, load = drawn_up(plan)
    return rank_terms(blueprint, layout, plan.ds_config, load, pp_rank)


def fullest(plan: Plan, blueprint: Blueprint, layout: Layout, load: Load) -> list[Term]:
    """Returns the memory terms of the fullest rank: a rank of the pipeline stage that takes most of
    its accelerator.
    """
    return max(
        (rank_terms(blueprint, layout, plan.ds_config, load, rank) for rank in range(plan.mesh.pp)),
        key=lambda terms: total(terms, ACCELERATOR),
    )


def layout_of(mesh: Mesh, blueprint: Blueprint, pipeline_schedule: str) -> Layout:
    """Returns the layout that a recipe asks for, as far as counting needs it."""
    bounds = stage_bounds(blueprint, stages_in(mesh, pipeline_schedule)) if mesh.pp > 1 else ()
    return Layout(mesh, 0, "torch", "float32", bounds, pipeline_schedule)


def stages_in(mesh: Mesh, pipeline_schedule: str) -> int:
    """Count the stages of a pipeline."""
    return mesh.pp * len(stages_of(0, mesh.pp, pipeline_schedule))
