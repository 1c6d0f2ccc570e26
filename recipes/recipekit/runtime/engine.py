"""The model of a run in its engine, at the weights that training goes on from."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoints import load
from ..checkpoints.state import State
from ..data.files import folder_classes
from ..data.mixture import domains_of
from ..data.request import request_of
from ..dslint.compiling import layers_whole
from ..engine import deepspeed_engine, torch_engine
from ..hosts.ops import check_torch_compile
from ..kernels import compiled
from ..model.adapter import AdapterRequest, adapted, config_of
from ..model.batch_norm import move_statistics, norms_of
from ..model.build import Built, build_model, check_weights
from ..model.card import card_of_run
from ..model.empty import empty_model
from ..model.export import Format, export, holds_adapter, save_small_files
from ..model.own_head import config_of_files
from ..model.small_files import SmallFiles
from ..model.weights import fetch_config, published_names, weights_folder
from ..parallel.blueprint import Blueprint, Layout
from ..parallel.groups import Groups, set_time_limit, time_limit, waiting_group
from ..plan import Plan
from ..spec.engine import Engine
from ..spec.refusal import Refusal, Say, refuse
from ..spec.run_folder import CHECKPOINTS, EXPORT, MERGED, check_adapter, commits_of_run
from ..spec.task import Task
from ..spec.task_specs import TASKS
from .agree import shared_problems
from .corpus import check_data
from .ending import way_to_sample
from .epochs import Epochs, measured
from .facts import export_dtype, layout_of, parameter_counts
from .small_files import small_files_of
from .sums import Sums


@dataclass(frozen=True)
class Loaded:
    """The model of a run in its engine, and what goes with it into checkpoints and Hugging Face
    files.
    """

    plan: Plan
    task: Task
    groups: Groups
    model_config: dict[str, Any]
    processor: Any
    small_files: SmallFiles
    built: Built
    engine: Engine
    layout: Layout
    state: State
    sums: Sums
    epochs: Epochs

    @property
    def blueprint(self) -> Blueprint:
        return self.built.blueprint

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the Hugging Face files."""
        return export_dtype(self.plan, self.model_config)

    @property
    def _small_files(self) -> SmallFiles:
        """The small files with the commits of what the run has read from the hub, if it has read
        any.
        """
        return self.small_files.with_commits(self.plan.recipe.model, commits_of_run(self.plan.out))

    def save_small_files(self, folder: Path) -> None:
        """Write config, tokenizer and the like into `folder`."""
        save_small_files(self.built, self._small_files, folder)

    def export(self, say: Say, name: str = EXPORT) -> None:
        """Write the model as Hugging Face files into a folder `name` of OUT (a collective)."""
        folder = self.plan.out / name
        say(f"writing Hugging Face files to {folder}")
        small, merge = self._small_files, self.plan.recipe.merge
        if self.plan.command.rank == 0:  # which writes these files
            small = small.with_card(card_of_run(self.plan.out, self.state["step"], merge))
        weights = Format(self.dtype, merge)
        export(self.engine, self.built, self.groups, small, folder, weights)
        merged = self.plan.out / MERGED
        if name == EXPORT and merged.is_dir():
            say(
                f"{merged}: holds the model of an earlier end of this run. Repeat this command with"
                " --merge to merge the new adapter."
            )

    def merge_finished(self, say: Say) -> bool:
        """Merge the adapter of a finished run into OUT/hf_merged, if `--merge` asks for it; return
        True if that was done.

        OUT/hf keeps the adapter. A collective.
        """
        recipe, out, step = self.plan.recipe, self.plan.out, self.state["step"]
        if not recipe.merge:
            return False
        if step < recipe.steps or not recipe.export:
            why = (
                f"step {step} of {recipe.steps} is not the last one"
                if step < recipe.steps
                else "--no-export is set"
            )
            say(
                f"--merge: nothing is exported, because {why}. Merge a checkpoint with recipekit"
                f" convert to-hf --merge {out} NEW_FOLDER"
            )
            return False
        if not holds_adapter(out / EXPORT):  # merged already, or not yet written
            return False
        self.export(say, MERGED)
        where = (
            f"{EXPORT}/ keeps the adapter, {MERGED}/ has the merged"
            f" model{way_to_sample(recipe.task, out / MERGED)}"
        )
        say(f"merged: the run in {out} has finished {step} of {recipe.steps} steps. {where}")
        return True


def load_model(
    plan: Plan,
    task: Task,
    source: Path | None,
    device: torch.device,
    loss: Callable[..., torch.Tensor],
    say: Say,
) -> Loaded:
    """Build the model of a plan and put it into its engine, at the weights that the run starts from
    (a collective).

    `source` is the step folder to resume from, which `restore` loads. `loss(task, sums, output,
    target)` is the loss that the last stage of a pipeline computes.
    """
    begun = time.perf_counter()
    limit = time_limit(plan.recipe.retry_s)

    published_config, separate = fetched_config(plan, task)
    dist.barrier(waiting_group())  # a host may have to download them
    groups = Groups(plan.mesh, device.type, limit)
    inputs = open_inputs(plan, task, published_config, source, say)
    plan, model_config = inputs.plan, inputs.model_config

    divide = divider_of(plan, groups, device)
    built = build_model(plan.recipe, model_config, groups, plan.ds_config, device, divide)
    refuse_values(built)  # on every rank, if one of them has read a value that is not finite
    log_notes(separate, built, say)
    task = with_loss_path(task, built, say)
    sums = sums_of(plan, device)

    compile_model(plan, model_config["model_type"], built, device, say)
    engine = make_engine(plan, built, groups, device, partial(loss, task, sums), say)
    set_time_limit(limit)
    summary = check_and_count(engine, built, groups)
    say(f"model {plan.recipe.model}: {summary}; built in {time.perf_counter() - begun:.1f} s")

    layout = layout_of(plan, engine, built)
    if plan.recipe.engine == "deepspeed":
        deepspeed_engine.give_borders(engine, built.blueprint, layout, groups)
    return Loaded(
        plan=plan,
        task=task,
        groups=groups,
        model_config=model_config,
        processor=inputs.processor,
        small_files=small_files_of(plan, built, model_config, inputs.processor, say),
        built=built,
        engine=engine,
        layout=layout,
        state=state_before_training(plan, model_config),
        sums=sums,
        epochs=inputs.epochs,
    )


def state_before_training(plan: Plan, model_config: dict[str, Any]) -> State:
    """Return the state of a run that has taken no step."""
    dtype = str(export_dtype(plan, model_config)).removeprefix("torch.")
    return {"step": 0, "tokens": 0, "data": None, "export_dtype": dtype}


def check_and_count(engine: Engine, built: Built, groups: Groups) -> str:
    """Compare the weights with the files they were read from; return the numbers of parameters and
    compared tensors, in words (a collective).
    """
    compared = check_weights(engine, built, groups)
    counts = parameter_counts(engine, built.blueprint)
    return f"{counts}; {compared} tensors compared with the files" if compared else counts


def restore(loaded: Loaded, source: Path | None, say: Say) -> Loaded:
    """Load the states of the step folder `source`, if there is one, into the engine of a run (a
    collective).
    """
    if source is None:
        return loaded
    converted = loaded.plan.out / CHECKPOINTS / ".converted"
    state = load.load(loaded.engine, source, loaded.blueprint, loaded.layout, converted, say)
    say(f"resumed from {source}")
    state["export_dtype"] = loaded.state["export_dtype"]
    return replace(loaded, state=state)


@dataclass(frozen=True)
class ModelInputs:
    """The values that a model is built for: its config and processor, and the plan of its data."""

    plan: Plan  # with the steps of its epochs
    model_config: dict[str, Any]
    processor: Any
    epochs: Epochs


def open_inputs(
    plan: Plan, task: Task, published_config: dict[str, Any], source: Path | None, say: Say
) -> ModelInputs:
    """Make the processor, fit the model's config to it, and look at the data before anything large
    is made (a collective).
    """
    recipe = plan.recipe
    processor = task.processor(request_of(recipe), published_config)
    model_config = task.configured(published_config, processor)
    if source is None:
        # its thread is started later: under ZeRO-3 DeepSpeed replaces torch's constructors while a
        # model is built
        check_data(recipe, task, processor, say)
    plan, epochs = measured(plan, task, processor, source, say)
    if unknown := task.check(model_config, plan.recipe.attention, plan.recipe.model):
        say(unknown)
    return ModelInputs(plan, model_config, processor, epochs)


def divider_of(
    plan: Plan, groups: Groups, device: torch.device
) -> Callable[[nn.Module], Any] | None:
    """Return what shards a layer as it is built; None for engines that shard a built model."""
    if plan.recipe.engine != "fsdp2":
        return None
    return torch_engine.divider(groups, plan.recipe.precision, device.type)


def log_notes(separate: str, built: Built, say: Say) -> None:
    """Log the notes of a built model, and whether its head differs from its embedding."""
    for note in filter(None, (separate, built.weights.note if built.weights else "", built.note)):
        say(note)


def with_loss_path(task: Task, built: Built, say: Say) -> Task:
    """Return the task with the loss that fits the outputs of the built model: losses in chunks, or
    full logits, which the log then reports.
    """
    if built.loss_path.in_chunks:
        assert task.of_losses is not None, "a task that reads `loss` has both ways"
        return task.of_losses(task)
    if built.loss_path.why_full:
        say(f"loss: full logits, not in chunks: {built.loss_path.why_full}")
    return task


def sums_of(plan: Plan, device: torch.device) -> Sums:
    """Return the sums of a step, with a column for each corpus of a mixture."""
    domains = len(domains_of(plan.recipe.dataset))
    if domains <= 1:
        return Sums()
    return Sums(torch.zeros(2, domains, dtype=torch.float64, device=device))


def fetched_config(plan: Plan, task: Task) -> tuple[dict[str, Any], str]:
    """Return (the config.json that matches the model's files, a line about its difference, or "").

    Downloads missing files.
    """
    recipe = plan.recipe
    revision = recipe.model_revision
    classes = folder_classes(recipe.dataset, recipe.split, recipe.subset)
    model_config = plan.model_config or fetch_config(
        recipe.model, recipe.task, recipe.labels, classes, revision
    )
    check_resume(plan, model_config)
    if recipe.init != "pretrained":
        return model_config, ""
    weights_folder(recipe.model, revision)
    if "num_labels" in model_config and not recipe.labels:
        model_config = published_names(model_config, recipe.model, recipe.task, revision)
    return config_of_files(model_config, recipe.model, task.facts.auto_class, revision)


def refuse_values(built: Built) -> None:
    """Raise `Refusal` on every rank if one of them has read a NaN or an infinite value (a
    collective).
    """
    own = built.weights.not_finite if built.weights else []
    if problems := shared_problems(Refusal(own) if own else None):
        raise Refusal(problems)


def check_resume(plan: Plan, model_config: dict[str, Any]) -> None:
    """Compare the recipe's adapter with the adapter of the run to resume. Needs no weights."""
    if plan.resume_from is None:
        return
    recipe, adapter = plan.recipe, None
    if recipe.adapt is not None:
        model = empty_model(
            model_config, "eager", recipe.model, auto_class=TASKS[recipe.task].auto_class
        )
        request = AdapterRequest(recipe.adapt, recipe.model, recipe.merge, recipe.tp, recipe.ep)
        adapter = config_of(adapted(model, request, plan.ds_config))
    check_adapter(adapter, recipe.resume, plan.resume_from)


def compile_model(
    plan: Plan, model_type: str, built: Built, device: torch.device, say: Say
) -> None:
    """Compiles what the field `compile` of a recipe says: where all ranks can, since a rank that
    cannot would round otherwise (a collective).
    """
    recipe = plan.recipe
    on = recipe.compile == "on" or (
        recipe.compile == "auto" and device.type == "cuda" and torch.version.hip is None
    )
    problems = check_torch_compile(device.type == "cuda") if on else []
    problems = shared_problems(Refusal(problems) if problems else None) if on else []
    if problems and recipe.compile == "on":
        raise Refusal(problems)
    if problems:
        say(f"compile: nothing is compiled: {problems[0]}")
    compiled.switch(on and not problems, recipe.deterministic, recipe.compile == "on")
    if not on or problems:
        return
    whole = recipe.adapt is None and layers_whole(
        model_type, plan.ds_config, recipe.tp, recipe.sp, recipe.ep
    )
    layers, norms, rotary = compiled.compile_layers(built.models, whole)
    counts = (
        (layers, "layers as a whole"),
        (norms, "norms outside of them" if layers else "norms"),
        (rotary, "rotary embeddings"),
    )
    said = [f"{count} {what}" for count, what in counts if count] + ["the loss in chunks"] * (
        built.loss_path.in_chunks
    )
    if not said and recipe.compile == "on":
        raise refuse(
            "compile = on",
            f"{built.architecture} has no layers that it can compile",
            "leave it out",
        )
    say(f"compile: {', '.join(said) or 'nothing of this model'}, at first use")


def make_engine(
    plan: Plan,
    built: Built,
    groups: Groups,
    device: torch.device,
    loss: Callable[..., torch.Tensor],
    say: Say,
) -> Engine:
    """Makes the recipe's engine around the built model (a collective)."""
    recipe = plan.recipe
    if recipe.engine == "deepspeed":
        engine = deepspeed_engine.make(
            built, groups, plan.ds_config, loss, recipe.pipeline_schedule, say
        )
    else:
        engine = torch_engine.make(
            built, groups, recipe.engine, recipe.precision, plan.ds_config, device
        )
    if norms := norms_of(engine.module):
        engine.after_step(partial(move_statistics, norms, groups.dp_group))
    return engine
