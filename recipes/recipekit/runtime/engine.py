"""The model of a run in its engine, with the weights from which training starts or resumes."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ..checkpoints import load
from ..checkpoints.state import TrainState
from ..data.files import folder_classes
from ..data.mixture import domains_of
from ..data.request import request_from_recipe
from ..data.stream import Corpus
from ..dslint.schema import value_at
from ..engine import deepspeed_engine, torch_engine
from ..hosts.ops import check_torch_compile
from ..kernels import compiled
from ..model.adapter import AdapterRequest, adapter_config_of, apply_adapter
from ..model.batch_norm import norms_of, update_running_stats
from ..model.build import BuiltModel, build_model, check_weights, weights_target
from ..model.card import card_of_run
from ..model.empty import empty_model
from ..model.export import WeightFormat, export, is_adapter_export, save_small_files
from ..model.loss_path import LossPath
from ..model.model_plan import LAYERS, UNCOMPILED, ModelPlan
from ..model.probes import release_small_copies
from ..model.small_files import SmallFiles
from ..model.untied_head import config_of_files
from ..model.weights import fetch_config, published_names, weights_folder
from ..parallel.blueprint import Blueprint, Layout
from ..parallel.groups import (
    ProcessGroups,
    collective_timeout,
    long_wait_group,
    set_collective_timeout,
)
from ..plan import RunPlan
from ..spec.engine import Engine
from ..spec.errors import ConfigError, Say, config_error
from ..spec.run_folder import (
    CHECKPOINTS,
    EXPORT,
    MERGED,
    check_adapter,
    commits_of_run,
    leave_out_of_run,
    read_rewinds,
)
from ..spec.schedules import LeaveOut, format_ramp
from ..spec.task import Task
from ..spec.task_specs import TASKS
from .corpus import check_data
from .ending import sample_hint
from .epochs import Epochs, count_epochs
from .rank_consistency import shared_problems
from .resolution import log_changes, resolve_together
from .run_metadata import checkpoint_layout, export_dtype, parameter_counts
from .small_files import small_files_of
from .step_metrics import StepMetrics


@dataclass(frozen=True)
class TrainingModel:
    """A run's model in its engine, and everything else that checkpoints and exports need."""

    plan: RunPlan
    task: Task
    groups: ProcessGroups
    processor: Any
    small_files: SmallFiles
    built: BuiltModel
    engine: Engine
    layout: Layout
    state: TrainState
    step_metrics: StepMetrics
    epochs: Epochs
    opened: Corpus | None  # the data of a new run

    @property
    def model_plan(self) -> ModelPlan:
        return self.built.model_plan

    @property
    def model_config(self) -> dict[str, Any]:
        """Return the config.json from which the model is built."""
        return self.model_plan.model_config

    @property
    def blueprint(self) -> Blueprint:
        return self.built.blueprint

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which the Hugging Face files are written."""
        return export_dtype(self.plan, self.model_config)

    @property
    def _small_files(self) -> SmallFiles:
        """Return the small files, with the commits that the run has read from the hub, if any."""
        return self.small_files.with_commits(self.plan.recipe.model, commits_of_run(self.plan.out))

    def save_small_files(self, folder: Path) -> None:
        """Write config, tokenizer and similar files into `folder`."""
        save_small_files(self.built, self._small_files, folder)

    def export(self, say: Say, name: str = EXPORT) -> None:
        """Write the model as Hugging Face files into folder `name` of OUT (a collective)."""
        folder = self.plan.out / name
        say(f"writing Hugging Face files to {folder}")
        small, merge = self._small_files, self.plan.recipe.merge
        if self.plan.command.rank == 0:  # only rank 0 writes these files
            small = small.with_card(card_of_run(self.plan.out, self.state["step"], merge))
        weights = WeightFormat(self.dtype, merge)
        export(self.engine, self.built, self.groups, small, folder, weights)
        merged = self.plan.out / MERGED
        if name == EXPORT and merged.is_dir():
            say(
                f"{merged}: holds the model of an earlier end of this run. Repeat this command with"
                " --merge to merge the new adapter."
            )

    def merge_finished(self, say: Say) -> bool:
        """Merge a finished run's adapter into OUT/hf_merged if `--merge` is set (a collective).

        Return True if the adapter was merged. OUT/hf still contains the adapter.
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
        if not is_adapter_export(out / EXPORT):  # already merged, or not yet written
            return False
        self.export(say, MERGED)
        where = (
            f"{EXPORT}/ keeps the adapter, {MERGED}/ has the merged"
            f" model{sample_hint(recipe.task, out / MERGED)}"
        )
        say(f"merged: the run in {out} has finished {step} of {recipe.steps} steps. {where}")
        return True


def load_model(
    plan: RunPlan,
    task: Task,
    source: Path | None,
    device: torch.device,
    loss: Callable[..., torch.Tensor],
    say: Say,
) -> TrainingModel:
    """Build a plan's model and its engine, with the run's start weights (a collective).

    `source` is the step folder to resume from, which `restore_checkpoint` loads later. `loss(task,
    sums, output, target)` is the loss that a pipeline's last stage computes.
    """
    begun = time.perf_counter()
    limit = collective_timeout(plan.recipe.retry_s)

    published_config, separate = fetched_config(plan, task)
    dist.barrier(long_wait_group())  # a host may have to download the files
    groups = ProcessGroups(plan.mesh, device.type, limit)
    inputs = open_inputs(plan, task, published_config, source, device, say)
    plan = inputs.plan

    built = build(inputs, groups, device)
    log_notes(separate, built, say)
    task = select_loss_path(task, built.model_plan.loss_path, say)
    sums = make_step_metrics(plan, device)

    compile_model(plan, built, device, say)
    engine = make_engine(plan, built, groups, device, partial(loss, task, sums), say)
    set_collective_timeout(limit)
    summary = check_and_count(engine, built, groups)
    say(f"model {plan.recipe.model}: {summary}; built in {time.perf_counter() - begun:.1f} s")

    layout = checkpoint_layout(plan, engine, built)
    if plan.recipe.engine == "deepspeed":
        deepspeed_engine.set_param_spans(engine, built.blueprint, layout, groups)
    return TrainingModel(
        plan=plan,
        task=task,
        groups=groups,
        processor=inputs.processor,
        small_files=small_files_of(plan, built, inputs.processor, say),
        built=built,
        engine=engine,
        layout=layout,
        state=state_before_training(plan, built.model_plan.model_config),
        step_metrics=sums,
        epochs=inputs.epochs,
        opened=inputs.opened,
    )


def state_before_training(plan: RunPlan, model_config: dict[str, Any]) -> TrainState:
    """Return a run's state before its first step."""
    dtype = str(export_dtype(plan, model_config)).removeprefix("torch.")
    return {"step": 0, "tokens": 0, "data": None, "export_dtype": dtype}


def check_and_count(engine: Engine, built: BuiltModel, groups: ProcessGroups) -> str:
    """Compare the weights with the files that they were read from (a collective).

    Return a text with the number of parameters and the number of compared tensors.
    """
    compared = check_weights(engine, built, groups)
    counts = parameter_counts(engine, built.blueprint)
    return f"{counts}; {compared} tensors compared with the files" if compared else counts


def restore_checkpoint(loaded: TrainingModel, source: Path | None, say: Say) -> TrainingModel:
    """Load the states of the step folder `source`, if any, into the run's engine (a collective)."""
    if source is None:
        return loaded
    converted = loaded.plan.out / CHECKPOINTS / ".converted"
    state = load.load_checkpoint(
        loaded.engine, source, loaded.blueprint, loaded.layout, converted, say
    )
    say(f"resumed from {source}")
    state["export_dtype"] = loaded.state["export_dtype"]
    left_out = batches_left_out(loaded.plan, state)
    state.pop("left_out", None)
    if left_out:
        state["left_out"] = left_out
        table = LeaveOut().with_entries(left_out).table
        say(f"rewinds have left out, as by --leave_out: {format_ramp(table)}")
    return replace(loaded, state=state)


def batches_left_out(plan: RunPlan, state: TrainState) -> list[list[int]]:
    """Return the batches that rewinds of the resumed run have left out (a collective).

    A checkpoint from before a rewind does not contain them, so a run that continues in its folder
    reads the file of its rewinds. A run that begins elsewhere continues with the `state` only. If
    the user types another --leave_out than before, it contains all batches.
    """
    source, typed = plan.resume_from, format_ramp(plan.recipe.left_out.table)
    found: list[Any] = [state.get("left_out", [])]
    if source is not None and source.resolve() == plan.out.resolve():
        found = [read_rewinds(plan.out) or found[0]]
    if typed != leave_out_of_run(source):
        found = [[]]
    dist.broadcast_object_list(found)
    return found[0]


@dataclass(frozen=True)
class ModelInputs:
    """The inputs that are needed to build a model, including its processor and its data's plan."""

    plan: RunPlan  # the number of steps includes the epochs
    model_plan: ModelPlan
    whole: PreTrainedModel  # the model on the meta device
    processor: object
    epochs: Epochs
    opened: Corpus | None  # the data of a new run


def open_inputs(
    plan: RunPlan,
    task: Task,
    published_config: dict[str, Any],
    source: Path | None,
    device: torch.device,
    say: Say,
) -> ModelInputs:
    """Create the processor, resolve the model and open the data (a collective).

    The model's config is fitted to the processor. All of this happens before anything large is
    allocated.
    """
    processor = task.processor(request_from_recipe(plan.recipe), published_config)
    model_config = task.fit_config(published_config, processor)
    model_plan, whole = resolve_together(plan, model_config, device)
    opened = None
    if source is not None:
        log_changes(model_plan, plan.resume_from, say)
    else:
        # The stream's thread starts later, because under ZeRO-3 DeepSpeed replaces torch's
        # constructors while a model is built.
        opened = check_data(plan, task, processor, say)
    plan, epochs = count_epochs(plan, task, processor, source, opened, say)
    if unknown := task.check(model_config, plan.recipe.attention, plan.recipe.model):
        say(unknown)
    release_small_copies()
    return ModelInputs(plan, model_plan, whole, processor, epochs, opened)


def build(inputs: ModelInputs, groups: ProcessGroups, device: torch.device) -> BuiltModel:
    """Build this rank's part of the model (a collective).

    Raises `ConfigError` on every rank if any rank has read a non-finite value.
    """
    plan = inputs.plan
    target = weights_target(plan.ds_config, groups, device)
    kept = partial(_parameters_of_names, inputs.whole, inputs.model_plan.fp32.names)
    divide = layer_sharder_of(plan, groups, device, kept)
    built = build_model(plan.recipe, inputs.model_plan, inputs.whole, target, divide)
    check_finite_weights(built)
    return built


def layer_sharder_of(
    plan: RunPlan,
    groups: ProcessGroups,
    device: torch.device,
    fp32: Callable[[], list[nn.Parameter]],
) -> Callable[[nn.Module], Any] | None:
    """Return the function that shards each layer as soon as it is built.

    `fp32` returns the model's parameters that stay in fp32. The result is None for engines that
    shard a complete model.
    """
    if plan.recipe.engine != "fsdp2":
        return None
    return torch_engine.fsdp2_sharder(groups, plan.recipe.precision, device.type, fp32)


def _parameters_of_names(model: nn.Module, names: frozenset[str]) -> list[nn.Parameter]:
    """Return the model's current parameters with these names."""
    return [parameter for name, parameter in model.named_parameters() if name in names]


def log_notes(separate: str, built: BuiltModel, say: Say) -> None:
    """Log the notes about a built model, including whether its head differs from its embedding."""
    of_files = built.weights.note if built.weights else ""
    for note in filter(None, (separate, of_files, *built.model_plan.notes)):
        say(note)


def select_loss_path(task: Task, loss_path: LossPath, say: Say) -> Task:
    """Return the task with the loss that fits the built model, chunked or from full logits.

    The log explains why full logits are used.
    """
    if loss_path.chunked:
        assert task.with_chunked_loss is not None, "a task that reads `loss` has both ways"
        return task.with_chunked_loss(task)
    if loss_path.fallback_reason:
        say(f"loss: full logits, not in chunks: {loss_path.fallback_reason}")
    return task


def make_step_metrics(plan: RunPlan, device: torch.device) -> StepMetrics:
    """Return empty sums for a step, with one column for each corpus of a mixture."""
    domains = len(domains_of(plan.recipe.dataset))
    if domains <= 1:
        return StepMetrics()
    return StepMetrics(torch.zeros(2, domains, dtype=torch.float64, device=device))


def fetched_config(plan: RunPlan, task: Task) -> tuple[dict[str, Any], str]:
    """Return (the config.json that matches the model's files, a log line about a difference or "").

    Missing files are downloaded.
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
    return config_of_files(model_config, recipe.model, task.spec.auto_class, revision)


def check_finite_weights(built: BuiltModel) -> None:
    """Raise `ConfigError` on every rank if any rank has read a non-finite value.

    This is a collective, so every rank must call it.
    """
    own = built.weights.not_finite if built.weights else []
    if problems := shared_problems(ConfigError(own) if own else None):
        raise ConfigError(problems)


def check_resume(plan: RunPlan, model_config: dict[str, Any]) -> None:
    """Compare the recipe's adapter with the adapter of the run to resume.

    The comparison needs no weights.
    """
    if plan.resume_from is None:
        return
    recipe, adapter = plan.recipe, None
    if recipe.adapt is not None:
        model = empty_model(
            model_config, "eager", recipe.model, auto_class=TASKS[recipe.task].auto_class
        )
        request = AdapterRequest(recipe.adapt, recipe.model, recipe.merge, recipe.tp, recipe.ep)
        adapter = adapter_config_of(apply_adapter(model, request, plan.ds_config))
    check_adapter(adapter, recipe.resume, plan.resume_from)


def compile_model(plan: RunPlan, built: BuiltModel, device: torch.device, say: Say) -> None:
    """Compile the parts that the model plan selects, if all ranks can compile (a collective).

    If one rank could not compile, its results would be rounded differently from the other ranks.
    Tensor-parallel ranks also update their own copies of some weights, so no kernel is selected by
    measured speed there, and neither under sequence parallelism.
    """
    recipe, model_plan = plan.recipe, built.model_plan
    scope = model_plan.compile.scope
    on = scope != UNCOMPILED
    problems = check_torch_compile(device.type == "cuda") if on else []
    problems = shared_problems(ConfigError(problems) if problems else None) if on else []
    # Without a compiler, the layers would keep more than the budget.
    asked = recipe.compile == "on" or recipe.activation_budget < 1
    if problems and asked:
        raise ConfigError(problems)
    if problems:
        say(f"compile: nothing is compiled: {problems[0]}")
    deterministic = recipe.deterministic or plan.mesh.tp * plan.mesh.sp > 1
    compiled.set_fusion(on and not problems, deterministic, asked)
    if not on or problems:
        return
    compiled.set_budget(recipe.activation_budget, recipe.seq_len)
    layers, norms, rotary = compiled.compile_layers(built.models, scope == LAYERS)
    if layers and value_at(plan.ds_config, "zero_optimization.stage", 0) == 3:
        deepspeed_engine.gather_full_layers(built.models)
    counts = (
        (layers, "layers as a whole"),
        (norms, "norms outside of them" if layers else "norms"),
        (rotary, "rotary embeddings"),
    )
    said = [f"{count} {what}" for count, what in counts if count] + ["the loss in chunks"] * (
        model_plan.loss_path.chunked
    )
    if not said and recipe.compile == "on":
        raise config_error(
            "compile = on",
            f"{model_plan.architecture} has no layers that it can compile",
            "leave it out",
        )
    say(f"compile: {', '.join(said) or 'nothing of this model'}, at first use")


def make_engine(
    plan: RunPlan,
    built: BuiltModel,
    groups: ProcessGroups,
    device: torch.device,
    loss: Callable[..., torch.Tensor],
    say: Say,
) -> Engine:
    """Create the recipe's engine around the built model (a collective)."""
    recipe = plan.recipe
    if recipe.engine == "deepspeed":
        engine = deepspeed_engine.make_deepspeed_engine(
            built, groups, plan.ds_config, loss, recipe.pipeline_schedule, say
        )
    else:
        engine = torch_engine.make_torch_engine(
            built, groups, recipe.engine, recipe.precision, plan.ds_config, device
        )
    if norms := norms_of(engine.module):
        engine.after_step(partial(update_running_stats, norms, groups.dp_group))
    return engine
