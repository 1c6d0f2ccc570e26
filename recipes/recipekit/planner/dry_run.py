"""Output of a dry run: layout, batch arithmetic, resolved JSON and memory.

If the device is known, a verdict on the memory follows.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from ..model.model_plan import ModelPlan
from ..model.weights import open_weights
from ..parallel.blueprint import describe_stages
from ..plan import RunPlan
from ..spec.devices import gib
from ..spec.memory_terms import (
    ACCELERATOR,
    BACKWARD,
    LOSS,
    REDUCE,
    STEP,
    STEP_MOMENTS,
    Term,
    memory_problems,
    total_bytes,
)
from ..spec.schedules import describe_schedule
from ..spec.task_specs import PACKED, TaskSpec
from ..tasks.find import load_task
from .libraries import library_terms
from .resolve import config_in_files, resolve_here, target_device
from .zero1_advice import zero1_advice

MOMENT_TEXTS = {
    LOSS: "while the loss is computed",
    BACKWARD: "while gradients arrive",
    REDUCE: "while they are summed over ranks",
    STEP: "in the step",
}


def print_dry_run(plan: RunPlan) -> None:
    """Print the plan. This needs no accelerator, no process group and no weights."""
    recipe, device = plan.recipe, target_device(plan.command)
    assert plan.model_config is not None, (
        "the plan of a dry run refuses a model without config.json"
    )

    # All checks come before the first line, so that an error is printed on its own.
    model_plan, model = resolve_here(plan)
    of_files = local_file_notes(plan, model)
    unknown = load_task(recipe.task).check(plan.model_config, recipe.attention, recipe.model)
    for note in (*plan.notes, *filter(None, [*of_files, *model_plan.notes, unknown])):
        print(note)

    show_run(plan)
    show_memory(model_plan)
    if device is not None:
        print_libraries(library_terms(plan.mesh, recipe.engine))
        print_verdict(model_plan.fullest, *device)
        if advice := zero1_advice(plan, model_plan, device[1]):
            print(f"advice   {advice}")


def show_run(plan: RunPlan) -> None:
    """Print the layout, the steps, the engine and the JSON."""
    recipe, mesh, shows_json = plan.recipe, plan.mesh, plan.command.show == "json"
    print(f"layout   {mesh.world} rank{'s' if mesh.world > 1 else ''}: {mesh}")
    for line in schedule_lines(plan):
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


def show_memory(model_plan: ModelPlan) -> None:
    """Print the stages of a pipeline and the memory of the rank that needs the most."""
    terms = model_plan.fullest
    if model_plan.split is not None:
        print(f"stages   {describe_stages(model_plan.blueprint, model_plan.layout.bounds)}")
    for place in dict.fromkeys(term.place for term in terms):
        print_place(terms, place)
    print_activations(model_plan.activations, terms)


def schedule_lines(plan: RunPlan) -> list[str]:
    """Return the lines about a step's batch, the batch ramp, and the whole schedule.

    The schedule line contains the steps, the rows and the learning rate.
    """
    recipe, mesh = plan.recipe, plan.mesh
    ranks, whole = (
        f"{mesh.dp} data-parallel x {recipe.micro_batch} micro_batch",
        batch_arithmetic(recipe.task_spec, recipe.ramp.total(recipe.steps), recipe.seq_len)[1],
    )
    lines = []
    for first, rows in recipe.ramp.table:
        step = batch_arithmetic(recipe.task_spec, rows, recipe.seq_len)[0]
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
        lines.append(f"lr       {describe_schedule(recipe.schedule, recipe.steps, *numbers)}")
    return lines


def batch_arithmetic(facts: TaskSpec, rows: int, seq_len: int) -> tuple[str, str]:
    """Return the size of `rows` rows in the task's unit, for one step and for all steps."""
    if facts.rows == PACKED:
        return (
            f"{rows} rows x {seq_len} tokens = {rows * seq_len:,} tokens",
            f"{rows * seq_len / 1e9:.3f} billion tokens",
        )
    return f"{rows:,} {facts.unit}", f"{rows / 1e6:.3f} million {facts.unit}"


def print_place(terms: Sequence[Term], place: str) -> None:
    """Print a place's peak on the fullest rank, and then the terms of that peak."""
    always = sum(
        term.reserved_bytes
        for term in terms
        if term.place == place and not term.moments and not term.bound
    )
    worst = max(STEP_MOMENTS, key=lambda moment: total_bytes(terms, place, moment))
    most = total_bytes(terms, place, worst)
    print(
        f"memory   {place}, each rank: {gib(always)} always"
        + (f", {gib(most)} {MOMENT_TEXTS[worst]}" if most > always else "")
    )
    for term in (term for term in terms if term.place == place):
        when = ", ".join(MOMENT_TEXTS[moment] for moment in term.moments)
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
        print(
            f"        {gib(term.reserved_bytes):>12}  {term.what}{f' ({notes})' if notes else ''}"
        )


def print_activations(activations: Sequence[Term], terms: Sequence[Term]) -> None:
    """Print the predicted activations, and their sum with the `terms` of the states.

    A prediction never causes an error.
    """
    if not activations:
        return
    both = total_bytes([*terms, *activations], ACCELERATOR, bounds=True)
    print(
        "memory   predicted activations of a micro-batch:"
        f" {gib(total_bytes(activations, ACCELERATOR))}, at most {gib(both)} with the states above"
    )
    for term in activations:
        when = MOMENT_TEXTS[term.moments[-1]] if term.moments else ""
        notes = "; ".join(filter(None, (when, "at most" if term.bound else "")))
        print(f"        {gib(term.size):>12}  {term.what}{f' ({notes})' if notes else ''}")


def print_libraries(libraries: Sequence[Term]) -> None:
    """Print the estimated memory of a GPU outside of PyTorch."""
    print(
        "memory   outside of PyTorch, each rank: about"
        f" {gib(total_bytes(libraries, ACCELERATOR, bounds=True))}, estimated and not measured"
    )
    for term in libraries:
        print(f"        {gib(term.size):>12}  {term.what}")


def print_verdict(terms: Sequence[Term], name: str, memory: int) -> None:
    """Print whether a rank's states and logits fit its device."""
    problems = memory_problems(terms, ACCELERATOR, memory, on=name)
    fits = (
        f"states fit, activations not counted: {gib(total_bytes(terms, ACCELERATOR))} of the"
        f" {gib(memory)} of {name}"
    )
    print(f"verdict  {f'does not fit: {problems[0]}' if problems else fits}")


def local_file_notes(plan: RunPlan, model: PreTrainedModel) -> list[str]:
    """Return the lines that a start would log about the model's local files.

    Raises `ConfigError` for files that do not fit the model.
    """
    recipe = plan.recipe
    if recipe.init != "pretrained" or not Path(recipe.model).is_dir():
        return []
    return [
        config_in_files(plan)[1],
        open_weights(recipe.model, model, new_head=recipe.labels > 0).note,
    ]
