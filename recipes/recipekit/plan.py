"""A run's plan, created from its command line. All mistakes are found before the run starts."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from .architectures import lookup
from .architectures.headers import check_headers
from .architectures.positions import beyond_positions
from .architectures.safetensors_files import tensor_entries
from .architectures.shrink import BYTE_VOCAB, ROBERTAS, shrink
from .architectures.small_files import check_generation_file
from .data.files import describe_files, folder_classes, local_files
from .data.first_row import check_first_row
from .data.folders import link_targets
from .data.mixture import Domain, domains_of
from .data.request import request_from_recipe
from .data.revisions import check_offline, check_revisions, say_unused
from .dslint import baseline, check, divisibility, json_file, outputs, resolve, shapes, swap
from .dslint.numbers import is_block_enabled, read_degrees, read_literals
from .dslint.rewinding import check_rewinding
from .kernels.deterministic import check_environment
from .spec.accelerate import check_accelerate, check_launcher
from .spec.command import RunCommand
from .spec.errors import ConfigError, Problem
from .spec.hub import check_variables, is_offline
from .spec.mesh import Mesh, fit_batch, fit_degrees, make_mesh
from .spec.paths import check_cache, path_exists, say_trial
from .spec.recipe import AXES, Recipe, check_kinds, check_recipe, check_values
from .spec.run_folder import check_out_folder, check_writable, find_resume, pinned_revisions
from .spec.schedules import check_epochs, scale_ramp
from .spec.task_specs import TASKS, TaskSpec, task_fields

TINY_SEQ_LEN = 128
POSITION_KEYS = {  # model_type -> config.json key for its maximum row length (transformers 5.22.2)
    **dict.fromkeys(
        ("gpt2", "gpt_bigcode", "openai-gpt", "gptj", "codegen", "ctrl"), "n_positions"
    ),
    **dict.fromkeys(("gpt_neo", "opt", "biogpt"), "max_position_embeddings"),
    "mpt": "max_seq_len",
}
# Encoders whose first position is the one after the padding token's position.
PADDING_OFFSET_TYPES = (*ROBERTAS, "mpnet")
# Encoders for which max_position_embeddings limits the row length in masked_lm.
ENCODER_TYPES = ("albert", "bert", "distilbert", "electra", "ernie", *PADDING_OFFSET_TYPES)


@dataclass(frozen=True)
class RunPlan:
    """A complete plan for a run.

    `ds_config` is resolved: all its values are numbers, without "auto". `model_config` is None
    until a Hub model is downloaded.
    """

    command: RunCommand
    recipe: Recipe
    mesh: Mesh
    ds_config: dict[str, Any]
    ds_path: Path | None
    model_config: dict[str, Any] | None
    out: Path
    resume_from: Path | None  # run or step folder; None for a new run
    notes: tuple[str, ...]  # one line for each decision made on the user's behalf
    # ISO date of the run's first start, for chat templates. It is unknown until the ranks have met.
    day: str = ""
    resume_command: str = ""  # the command that resumes the run; "" if unknown

    @property
    def accumulation(self) -> int:
        """Return the number of micro-batches per optimizer step on one data-parallel rank."""
        return self.recipe.global_batch // (self.mesh.dp * self.recipe.micro_batch)

    @property
    def precision(self) -> str:
        """Return the model's compute precision: fp32, bf16 or fp16."""
        if self.recipe.engine != "deepspeed":
            return self.recipe.precision
        return next(
            (name for name in ("bf16", "fp16") if is_block_enabled(self.ds_config, name)), "fp32"
        )

    @property
    def last_step(self) -> int:
        """Return the step after which this start ends."""
        return self.recipe.stop_at or self.recipe.steps


@dataclass(frozen=True)
class RankLayout:
    """A recipe fitted to a given number of ranks.

    If the degrees do not fit, the mesh has only one rank.
    """

    recipe: Recipe
    mesh: Mesh
    notes: list[str]  # decisions made on the user's behalf
    problems: list[Problem]


@dataclass
class Draft:
    """An incomplete plan that each pass of `resolve_run` reads and extends."""

    command: RunCommand
    recipe: Recipe  # result of the last pass
    resume: str  # run to resume; a dry run looks for one only if asked
    notes: list[str]  # one line for each decision made on the user's behalf
    problems: list[Problem] = field(default_factory=list[Problem])
    config: dict[str, Any] = field(default_factory=dict[str, Any])  # the JSON, not yet resolved
    path: Path | None = None  # file of the JSON
    json_fields: frozenset[str] = frozenset()  # recipe fields that the JSON sets
    model_config: dict[str, Any] | None = None
    limits: dict[str, Any] | None = None  # shapes in the model that limit the degrees
    layout_for: Callable[[int], RankLayout] = field(
        init=False
    )  # number of ranks -> the recipe fitted to these ranks
    layout: RankLayout = field(init=False)  # the recipe fitted to the command's ranks
    resume_from: Path | None = None


def resolve_run(command: RunCommand) -> RunPlan:
    """Resolve a command for its world size, or raise one `ConfigError` with all problems.

    This reads files but changes nothing. Values that make planning impossible are reported first,
    by themselves. Then these passes run in this order, and a problem in one pass does not stop the
    next:

        _start_draft           fit the steps, pin the revisions of the run to resume
        _check_flags           check the recipe's fields and the environment
        _read_json             read the DeepSpeed JSON and compare it with the engine
        _merge_json            let the JSON's numbers override the recipe's
        _read_model_config     find the model's config.json and shrink it for a trial
        _lay_out_ranks         lay the recipe out on the ranks
        _check_lengths         compare seq_len with the model's positions
        _check_data            check the first rows of local data
        _check_model_files     check the headers and names in the model's folder
        _check_names           check the names of model and tokenizer, and the token cache
        _check_hub             check the files that must come from the Hub
        _check_run_folder      check the run folder
        _find_resume           find the run to resume
        _check_layout          check the JSON and the degrees against the ranks

    The problems from all passes are raised together. Without a problem, `_resolve_plan` resolves
    the JSON.
    """
    if unusable := _check_usable(command):
        raise ConfigError(unusable)

    draft = _start_draft(command)
    _check_flags(draft)
    _read_json(draft)
    _merge_json(draft)
    _read_model_config(draft)
    _lay_out_ranks(draft)
    _check_lengths(draft)
    _check_data(draft)
    _check_model_files(draft)
    _check_names(draft)
    _check_hub(draft)
    _check_run_folder(draft)
    _find_resume(draft)
    _check_layout(draft)

    if draft.problems:
        # The JSON and the recipe may contain the same wrong degree.
        raise ConfigError(list(dict.fromkeys(draft.problems)))
    return _resolve_plan(draft)


def _check_usable(command: RunCommand) -> list[Problem]:
    """Return problems for values that make planning impossible.

    Examples are files without a name, searches that take hours, and a run folder named s3:.
    """
    problems = (
        check_kinds(vars(command.recipe))
        + check_values(vars(command.recipe))
        + check_variables(os.environ)
    )
    with collect_problems(problems):
        _ = command.out
    return problems


@contextlib.contextmanager
def collect_problems(problems: list[Problem]) -> Iterator[None]:
    """Collect the problems of a `ConfigError` in the `with` block in `problems`, and continue."""
    try:
        yield
    except ConfigError as error:
        problems.extend(error.problems)


def _start_draft(command: RunCommand) -> Draft:
    """Return a draft with the recipe fitted to its steps.

    The draft's revisions are pinned to those that the resumed run recorded.
    """
    recipe, notes = command.fitted()
    notes += say_unused(command.recipe.dataset, command.unused) + say_trial(command.out)
    asked = {"model": recipe.model, "dataset": recipe.dataset, **command.revisions}
    # A dry run must not take its result from an older run.
    before = "never" if command.dry_run and recipe.resume == "auto" else recipe.resume
    recipe = dataclasses.replace(recipe, **pinned_revisions(before, command.out, asked))
    return Draft(command, recipe, before, notes)


def _check_flags(draft: Draft) -> None:
    """Check the recipe's fields, the environment, and flags that the task or engine ignores."""
    recipe, typed = draft.recipe, draft.command.typed
    draft.problems += check_recipe(recipe)
    draft.problems += check_launcher(os.environ) + check_accelerate(os.environ)

    # `check_recipe` has already reported an unknown task. Later passes continue with the default
    # task.
    if recipe.task not in tuple(TASKS):
        recipe = draft.recipe = dataclasses.replace(recipe, task=Recipe.task)

    draft.problems += check_environment(os.environ) if recipe.deterministic else []
    draft.problems += _check_unread_flags(recipe, typed) + baseline.check_engine(recipe, typed)


def _check_unread_flags(recipe: Recipe, typed: frozenset[str]) -> list[Problem]:
    """Return a problem for each typed flag that the task does not read.

    `loss = chunked` in the recipe's file is also a problem if the recipe's task does not read it.
    The file may set other fields that are not used.
    """
    demanded = (
        {"loss"} if recipe.loss == "chunked" and not {"loss", "task"} & typed else frozenset[str]()
    )
    return [
        Problem(
            f"{f'--{name} ' if name in typed else f'{name} = '}{getattr(recipe, name)}",
            f"applies only to {', '.join(tasks)}, not to {recipe.task}",
            "leave it out",
        )
        for name, tasks in task_fields().items()
        if name in typed | demanded and recipe.task not in tasks
    ]


def _read_json(draft: Draft) -> None:
    """Read the DeepSpeed JSON and check its optimizer against the engine.

    A torch engine receives a config that contains only the optimizer's settings.
    """
    command, recipe = draft.command, draft.recipe
    if recipe.engine == "deepspeed" or "engine" in command.typed:
        with collect_problems(draft.problems):
            draft.config, draft.path = json_file.load_ds_config(recipe.ds_config, command.folder)
            draft.notes += json_file.describe_differences(draft.config, draft.path)

    optimizer = baseline.recipe_optimizer_block(draft.config)
    draft.notes += baseline.engine_notes(
        recipe.engine, recipe.precision, recipe.ds_config, command.typed, optimizer
    )
    draft.problems += baseline.check_optimizer(recipe.engine, recipe.precision, optimizer)
    if recipe.engine != "deepspeed":
        draft.config, draft.path = baseline.torch_engine_config(optimizer), None


def _merge_json(draft: Draft) -> None:
    """Override the recipe with the JSON's numbers, except where the user typed a flag."""
    config, recipe = draft.config, draft.recipe
    written = {
        name: value
        for name, value in {**read_literals(config), **read_degrees(config)}.items()
        if name not in draft.command.typed
    }
    for name, value in written.items():
        if getattr(recipe, name) != value:
            draft.notes.append(
                f"{name}: {value} of the JSON overrides {getattr(recipe, name)} of the recipe"
            )
    draft.recipe = dataclasses.replace(recipe, **written)
    draft.json_fields = frozenset(written)
    merged = draft.recipe
    draft.problems += check_rewinding(merged.rewinds_on, merged.task, merged.ep, config)


SHIP_CONFIG_FIX = "put the file in recipes/recipekit/architectures/ORG--NAME.json"


def _read_model_config(draft: Draft) -> None:
    """Find the model's config.json with the data's labels, and the shapes that limit degrees."""
    command, recipe = draft.command, draft.recipe
    model_config = _config_of_model(draft)
    if model_config is not None and (
        not command.tiny or recipe.task_spec.labels or "num_labels" in command.typed
    ):
        model_config = lookup.with_labels(
            model_config, recipe.labels, folder_classes(recipe.dataset, recipe.split, recipe.subset)
        )
    draft.model_config = model_config
    draft.limits = shapes.limiting_config(model_config, recipe.task_spec.rows)


def _config_of_model(draft: Draft) -> dict[str, Any] | None:
    """Return the model's config.json, or None if it is not on this machine.

    For a --tiny run the config is shrunk. With the byte tokenizer and random weights, its
    vocabulary is reduced to bytes.
    """
    recipe, tiny = draft.recipe, draft.command.tiny
    # A dry run may read a config.json from the Hub if the file is not on this machine.
    asks = draft.command.dry_run and not is_offline(os.environ)
    bytes_only = recipe.tokenizer == "bytes" and recipe.init == "random"
    model_config = None
    try:
        model_config = lookup.model_config(recipe.model, recipe.task, recipe.model_revision)
        if model_config is None and asks and not tiny:
            model_config = lookup.config_on_hub(recipe.model, recipe.task, recipe.model_revision)
    except ConfigError as error:
        draft.problems += error.problems
        return None

    if (model_config or {}).get("auto_map"):
        draft.notes.append(
            "auto_map: the model's own code is never run, and transformers' class is used instead"
        )
    reads_text = "tokenizer" in recipe.task_spec.reads
    if model_config is None and tiny:
        draft.problems.append(_no_config_to_shrink(recipe.model, recipe.model_revision))
    elif model_config is not None and tiny:
        return shrink(model_config, BYTE_VOCAB if reads_text else 0, recipe.task_spec.tiny)
    elif model_config is not None and bytes_only and reads_text:
        return model_config | {"vocab_size": BYTE_VOCAB}
    return model_config


def _no_config_to_shrink(model: str, revision: str) -> Problem:
    rule = (
        f"requires the config.json of {revision or 'the model'}, which is"
        f" {'not' if revision else 'neither shipped nor'} in the local cache"
    )
    fix = (
        f"give {'a folder' if revision else 'its folder'} with --model, or"
        f" {'leave --model_revision out' if revision else SHIP_CONFIG_FIX}"
    )
    return Problem(f"--tiny with model = {model}", rule, fix)


def _lay_out_ranks(draft: Draft) -> None:
    """Lay the recipe out on the command's ranks."""
    command, recipe, written = draft.command, draft.recipe, draft.json_fields
    draft.layout_for = partial(
        _fit_to_ranks,
        recipe,
        model_config=draft.limits,
        fixed=command.typed | written,
        tiny=command.tiny,
    )
    draft.layout = draft.layout_for(command.world)
    draft.recipe = draft.layout.recipe
    draft.notes += draft.layout.notes


def _check_lengths(draft: Draft) -> None:
    """Check that rows fit the model's positions, and note lengths that exceed its training."""
    recipe, model_config = draft.recipe, draft.model_config
    if model_config and "seq_len" in recipe.task_spec.reads:
        bidirectional = recipe.task_spec.bidirectional
        draft.problems += _check_positions(recipe.seq_len, model_config, bidirectional)
        draft.notes += beyond_positions(model_config, recipe.seq_len)


def _check_positions(
    seq_len: int, model_config: dict[str, Any], bidirectional: bool
) -> list[Problem]:
    """Return a problem if rows are longer than the model's position table.

    Models without rotary positions have such a table. A longer row would raise an IndexError in the
    forward pass.
    """
    kind = model_config.get("model_type", "")
    key = (
        "max_position_embeddings"
        if bidirectional and kind in ENCODER_TYPES
        else POSITION_KEYS.get(kind, "")
    )
    limit = model_config.get(key)
    if bidirectional and isinstance(limit, int) and kind in PADDING_OFFSET_TYPES:
        padding = model_config.get("pad_token_id")
        limit -= (1 if padding is None else padding) + 1
    if not isinstance(limit, int) or seq_len <= limit:
        return []
    return [
        Problem(
            f"seq_len = {seq_len}",
            f"must not exceed the {limit} positions of a {kind} ({key} in its config.json)",
            f"use --seq_len {limit} or less",
        )
    ]


def _check_data(draft: Draft) -> None:
    """Check each local dataset's first row, and note which files are read and left out.

    The check does not contact the Hub.
    """
    recipe, problems = draft.recipe, draft.problems
    domains, streamed = list[Domain](), list[str]()
    with collect_problems(problems):
        # `check_recipe` has already reported values of a different type.
        domains = (
            domains_of(recipe.dataset, recipe.subset) if isinstance(recipe.dataset, str) else []
        )
    problems += check_mixture(recipe.task_spec, domains)

    for domain in domains:
        with collect_problems(problems):
            if domain.dataset == "builtin":
                continue
            request = dataclasses.replace(
                request_from_recipe(recipe), dataset=domain.dataset, subset=domain.subset
            )
            which = "image" in request.names, request.split, request.subset
            if (files := local_files(domain.dataset, *which)) is not None:
                check_first_row(files, domain.dataset, request)
                draft.notes += describe_files(domain.dataset, *which)
            else:
                streamed.append(domain.dataset)
    problems += check_epochs(recipe.epochs, len(domains), streamed)


def check_mixture(task_spec: TaskSpec, domains: list[Domain]) -> list[Problem]:
    """Return a problem for several corpora if the task supports only one."""
    if len(domains) < 2 or "mixture" not in task_spec.unsupported:
        return []
    return [
        Problem(
            f"--dataset of {len(domains)} corpora",
            task_spec.unsupported["mixture"],
            "set --dataset to a single data set",
        )
    ]


def _check_model_files(draft: Draft) -> None:
    """Check the weight headers in the model's folder, and its generation_config.json."""
    recipe, folder = draft.recipe, Path(draft.recipe.model)
    with collect_problems(draft.problems):
        if draft.model_config is not None and recipe.init == "pretrained" and folder.is_dir():
            entries = tensor_entries(folder)
            if not draft.command.tiny:
                check_headers(draft.model_config, entries, recipe.model)
    with collect_problems(draft.problems):
        if draft.model_config is not None and folder.is_dir():
            check_generation_file(folder)


def _check_names(draft: Draft) -> None:
    """Check the names of model and tokenizer, the token cache, and the tokenizer's files."""
    recipe, reads = draft.recipe, draft.recipe.task_spec.reads
    draft.problems += lookup.check_config_only_model(
        recipe.model, recipe.init, recipe.tokenizer if "tokenizer" in reads else None
    )
    with collect_problems(draft.problems):
        if "token_cache" in reads and recipe.token_cache not in ("auto", "off"):
            check_cache(f"--token_cache {recipe.token_cache}", recipe.token_cache)
    with collect_problems(draft.problems):
        # A model without a config.json has already been reported, or is not on this machine.
        if "tokenizer" in reads and (recipe.tokenizer or draft.model_config is not None):
            lookup.local_tokenizer(recipe.model, recipe.tokenizer)


def _check_hub(draft: Draft) -> None:
    """Check that an offline run's files are cached, and reject revisions for local files."""
    command, recipe = draft.command, draft.recipe
    needs_weights = recipe.init == "pretrained" and not command.dry_run
    draft.problems += check_offline(
        recipe.model,
        recipe.model_revision,
        needs_weights or not (draft.model_config or command.tiny),
    )
    draft.problems += check_revisions(
        recipe.model,
        recipe.model_revision,
        recipe.dataset,
        recipe.dataset_revision,
        recipe.split,
        recipe.subset,
    )


def _check_run_folder(draft: Draft) -> None:
    """Check that the run folder does not overlap any local inputs.

    A dry run also checks that a start would be able to create the folder.
    """
    command, recipe = draft.command, draft.recipe
    with collect_problems(draft.problems):
        is_blank = "out" in command.typed and not command.recipe.out.strip()
        paths = _read_paths(recipe.dataset, model=recipe.model, tokenizer=recipe.tokenizer)
        problems = check_out_folder(command.out, is_blank, paths)
        draft.problems += problems or (check_writable(command.out) if command.dry_run else [])


def _read_paths(dataset: object, **folders: str) -> list[tuple[str, Path]]:
    """Return the local files and folders that a run reads, as (description, path) pairs.

    A glob is represented by the folder in front of its first wildcard.
    """
    found = [
        (f"the folder of --{name} {value}", Path(value).expanduser())
        for name, value in folders.items()
        if value
    ]
    for domain in domains_of(dataset) if isinstance(dataset, str) else []:
        entries = [domain.dataset] if path_exists(domain.dataset) else domain.dataset.split(",")
        for part in map(str.strip, entries):
            path = Path(part).expanduser()
            wild = next(
                (number for number, name in enumerate(path.parts) if set(name) & set("*?[")), None
            )
            found.append(
                (
                    f"the data of --dataset {part}",
                    path if path.exists() or wild is None else Path(*path.parts[:wild]),
                )
            )
            found += [
                (f"the data of --dataset {part}, to which a link leads", target)
                for target in link_targets(path)
            ]
    return [(what, path.resolve()) for what, path in found if path.exists()]


def _find_resume(draft: Draft) -> None:
    """Find the run to resume.

    If a dry run was not asked to resume, a problem with the run only adds a note.
    """
    command, recipe = draft.command, draft.recipe
    older = list[Problem]()
    with collect_problems(older if draft.resume != recipe.resume else draft.problems):
        draft.resume_from = find_resume(
            dataclasses.replace(recipe, **command.revisions),
            command.out,
            draft.model_config,
            command.tiny,
            command.typed,
            command.unused,
        )
    if older:
        draft.notes.append(
            f"a start will be refused while {command.out} holds this run: {older[0]}"
        )


def _check_layout(draft: Draft) -> None:
    """Check the JSON and the degrees against the ranks; without a JSON, only the degrees."""
    if not draft.config and draft.problems:
        draft.problems += draft.layout.problems
        return
    draft.problems += outputs.check_outputs(draft.config)
    draft.problems += swap.check_swap(draft.config, draft.command.out)
    draft.problems += _check_strategy(draft)


def _check_strategy(draft: Draft) -> list[Problem]:
    """Return problems with the JSON and the degrees on these ranks.

    The problems suggest numbers of ranks that fit.
    """
    command, lay_out = draft.command, draft.layout_for
    given = check.LintInput(
        draft.config,
        model_config=draft.limits,
        typed=command.typed,
        local=0 if command.dry_run else command.local_ranks,
    )
    here = lay_out(command.world)

    def check_laid(world: int, laid: "RankLayout") -> list[Problem]:
        return check.lint_config(
            dataclasses.replace(given, world=world, mesh=laid.mesh, recipe=laid.recipe)
        )

    def check_on(world: int | None) -> list[Problem]:
        if world is None:
            return check.lint_config(dataclasses.replace(given, recipe=here.recipe))
        laid = lay_out(world)
        return laid.problems or check_laid(world, laid)

    problems = here.problems + check_laid(command.world, here)
    step = math.prod(max(1, getattr(here.recipe, axis)) for axis in AXES)
    return divisibility.suggest_world_sizes(problems, command.world, step, check_on)


def _resolve_plan(draft: Draft) -> RunPlan:
    """Resolve the JSON to numbers, and return the plan."""
    command, mesh = draft.command, draft.layout.mesh
    resolved, more = resolve.resolve_ds_config(draft.config, draft.recipe, mesh, draft.limits)
    if draft.recipe.engine == "deepspeed":
        more += resolve.fit_overlap(resolved, mesh, json_file.is_shipped(draft.path))
    outputs.expand_outputs(resolved, command.out)
    return RunPlan(
        command,
        draft.recipe,
        mesh,
        resolved,
        draft.path,
        draft.model_config,
        command.out,
        draft.resume_from,
        tuple(draft.notes + more),
    )


def _fit_to_ranks(
    recipe: Recipe,
    world: int,
    model_config: dict[str, Any] | None,
    fixed: frozenset[str],
    tiny: bool,
) -> RankLayout:
    """Return a recipe fitted to `world` ranks. Fields in `fixed` are never changed."""
    notes, problems, mesh = [], [], Mesh()
    if tiny:
        recipe, notes = _lower_degrees(_shrink_recipe(recipe, fixed), world, model_config, fixed)
    try:
        mesh = make_mesh(world, **{axis: getattr(recipe, axis) for axis in AXES})
    except ConfigError as error:
        problems = error.problems
    if (
        recipe.pp == 1
        and ("pp" in fixed or tiny)
        and recipe.pipeline_schedule != "1f1b"
        and "pipeline_schedule" not in fixed
    ):
        notes.append(
            f"pipeline_schedule: {recipe.pipeline_schedule} of the recipe is ignored, because pp"
            " is 1"
        )
        recipe = dataclasses.replace(recipe, pipeline_schedule="1f1b")
    if tiny and recipe.micro_batch > 0:
        rows = 2 * mesh.dp * mesh.pp * recipe.micro_batch
        micro_batch, global_batch = fit_batch(
            mesh.dp,
            recipe.micro_batch,
            recipe.global_batch if "global_batch" in fixed else rows,
            fixed,
        )
        ramp = (
            recipe.batch_ramp
            if "batch_ramp" in fixed
            else scale_ramp(recipe.batch_ramp, recipe.global_batch, global_batch)
        )
        recipe = dataclasses.replace(
            recipe, micro_batch=micro_batch, global_batch=global_batch, batch_ramp=ramp
        )
    return RankLayout(recipe, mesh, notes, problems)


def _lower_degrees(
    recipe: Recipe, world: int, model_config: dict[str, Any] | None, fixed: frozenset[str]
) -> tuple[Recipe, list[str]]:
    """Lower the degrees until they fit `world` ranks and the tiny model.

    Return the recipe, and a line that reports the change.
    """
    degrees = {axis: getattr(recipe, axis) for axis in AXES}
    divisible = shapes.sharded_sizes(model_config, recipe.seq_len)
    layers = shapes.count_layers(model_config)
    most = (
        max(1, layers // (2 if recipe.pipeline_schedule == "dualpipev" else 1))
        if layers
        else degrees["pp"]
    )
    capped = degrees if "pp" in fixed else degrees | {"pp": min(most, degrees["pp"])}
    fitted = fit_degrees(
        world, capped, fixed, {axis: tuple(numbers.values()) for axis, numbers in divisible.items()}
    )
    if fitted == degrees:
        return recipe, []
    lowered = [axis for axis in degrees if fitted[axis] < degrees[axis]]
    limits = [f"{world} rank{'s' if world > 1 else ''}"]
    for axis in lowered:
        limits += [
            f"{number} {name}"
            for name, number in divisible.get(axis, {}).items()
            if number % degrees[axis]
        ]
    limits += [f"{layers} layers"] if capped != degrees else []
    listed = ", ".join(f"{axis} {degrees[axis]} -> {fitted[axis]}" for axis in lowered)
    return dataclasses.replace(recipe, **fitted), [
        f"--tiny lowered {listed} to fit"
        f" {', '.join(limits[:-1])}{' and ' if limits[1:] else ''}{limits[-1]}"
    ]


def _shrink_recipe(recipe: Recipe, fixed: frozenset[str]) -> Recipe:
    """Shrink everything in the recipe except its layout to laptop size.

    Fields in `fixed` are never changed.
    """
    small: dict[str, Any] = {
        "micro_batch": 2,
        "seq_len": min(recipe.seq_len, TINY_SEQ_LEN),
        "eval_rows": min(recipe.eval_rows, 8),
        "dataset": "builtin",
        "subset": "",
        "dataset_revision": "",
        "tokenizer": "bytes",
        "init": "random",
    }
    unread = {name for name, tasks in task_fields().items() if recipe.task not in tasks}
    return dataclasses.replace(
        recipe, **{name: value for name, value in small.items() if name not in fixed | unread}
    )
