"""From a command line to everything a run needs to know, with every mistake found before anything
is started.
"""

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
from .architectures.safetensors_files import open_folder
from .architectures.shrink import BYTE_VOCAB, ROBERTAS, shrink
from .architectures.small_files import check_generation_file
from .data.files import folder_classes, local_files, say_files
from .data.first_row import check_first_row
from .data.folders import targets
from .data.mixture import Domain, domains_of
from .data.request import request_of
from .data.revisions import check_offline, check_revisions, say_unused
from .dslint import baseline, check, divisions, json_file, outputs, resolve, shapes, swap
from .dslint.numbers import degrees, enabled, literals
from .kernels.deterministic import check_environment
from .spec.accelerate import check_accelerate, check_launcher
from .spec.command import Command
from .spec.hub import check_variables, is_offline
from .spec.mesh import Mesh, fit_batch, fit_degrees, make_mesh
from .spec.paths import check_cache, is_there, say_trial
from .spec.phases import check_epochs, scaled
from .spec.recipe import AXES, Recipe, check_kinds, check_recipe, check_values
from .spec.refusal import Problem, Refusal
from .spec.run_folder import check_out, check_writable, find_resume, pins
from .spec.task_specs import TASKS, Facts, own_fields

TINY_SEQ_LEN = 128
POSITIONS = {  # by model_type: what bounds the length of its rows (transformers 5.22.2)
    **dict.fromkeys(
        ("gpt2", "gpt_bigcode", "openai-gpt", "gptj", "codegen", "ctrl"), "n_positions"
    ),
    **dict.fromkeys(("gpt_neo", "opt", "biogpt"), "max_position_embeddings"),
    "mpt": "max_seq_len",
}
# encoders whose first place is the one behind that of the padding token
BEHIND_PADDING = (*ROBERTAS, "mpnet")
# the same of rows of masked_lm: max_position_embeddings
ENCODERS = ("albert", "bert", "distilbert", "electra", "ernie", *BEHIND_PADDING)


@dataclass(frozen=True)
class Plan:
    """What is about to run.

    `ds_config` is resolved: numbers only. `model_config` is None until a hub model is fetched.
    """

    command: Command
    recipe: Recipe
    mesh: Mesh
    ds_config: dict[str, Any]
    ds_path: Path | None
    model_config: dict[str, Any] | None
    out: Path
    resume_from: Path | None  # run or step folder; None: a new run
    notes: tuple[str, ...]  # what was decided for the user, one line each
    # ISO date of the run's first start, for chat templates; known when the ranks have met
    day: str = ""
    again: str = ""  # the command that continues the run; "" if it cannot be found

    @property
    def accumulation(self) -> int:
        """Micro-batches of one optimizer step on one data-parallel rank."""
        return self.recipe.global_batch // (self.mesh.dp * self.recipe.micro_batch)

    @property
    def precision(self) -> str:
        """What the model computes in: fp32, bf16 or fp16."""
        if self.recipe.engine != "deepspeed":
            return self.recipe.precision
        return next((name for name in ("bf16", "fp16") if enabled(self.ds_config, name)), "fp32")

    @property
    def last_step(self) -> int:
        """The step that this start ends after."""
        return self.recipe.stop_at or self.recipe.steps


@dataclass(frozen=True)
class LaidOut:
    """A recipe as it runs on some number of ranks.

    Where the degrees do not fit, the mesh is that of one rank.
    """

    recipe: Recipe
    mesh: Mesh
    notes: list[str]  # what was decided for the user
    problems: list[Problem]


@dataclass
class Draft:
    """A plan in the making, which each pass of `make_plan` reads and extends."""

    command: Command
    recipe: Recipe  # as the last pass left it
    resume: str  # the run to continue: a dry run looks for none unless it is asked to
    notes: list[str]  # what was decided for the user, one line each
    problems: list[Problem] = field(default_factory=list[Problem])
    config: dict[str, Any] = field(default_factory=dict[str, Any])  # the JSON, not yet resolved
    path: Path | None = None  # the file of the JSON
    written: frozenset[str] = frozenset()  # fields of the recipe that the JSON sets
    model_config: dict[str, Any] | None = None
    limits: dict[str, Any] | None = None  # the model's shapes that limit the degrees
    lay_out: Callable[[int], LaidOut] = field(init=False)  # number of ranks -> the recipe on them
    laid: LaidOut = field(init=False)  # the recipe on the ranks of the command
    resume_from: Path | None = None


def make_plan(command: Command) -> Plan:
    """Resolve a command for its world size, or raise one `Refusal` with every problem.

    Read files, change nothing. Values that nothing can be planned with are refused first, alone.
    Then these passes run in this order, and a problem in one does not stop the next:

        _start_draft           fit the steps, pin the revisions of the run to continue
        _check_flags           check the recipe's fields and the environment
        _read_json             read the DeepSpeed JSON and compare it with the engine
        _merge_json            let the JSON's numbers override the recipe's
        _read_model_config     find the model's config.json and shrink it for a trial
        _lay_out_ranks         lay the recipe out on the ranks
        _check_lengths         compare seq_len with the model's positions
        _check_data            check the first rows of local data
        _check_model_files     check the headers and names in the model's folder
        _check_names           check the names of model and tokenizer, and the token cache
        _check_hub             check what must come from the hub
        _check_run_folder      check the run folder
        _find_resume           find the run to continue
        _check_layout          check the JSON and the degrees against the ranks

    The problems of all passes are raised together; without any, `_finish` resolves the JSON.
    """
    if unusable := _check_usable(command):
        raise Refusal(unusable)

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
        # The JSON may give a degree that the recipe has as well.
        raise Refusal(list(dict.fromkeys(draft.problems)))
    return _finish(draft)


def _check_usable(command: Command) -> list[Problem]:
    """Refuse values that cannot be planned with: files without a name, searches of hours, a run
    folder named s3:.
    """
    problems = (
        check_kinds(vars(command.recipe))
        + check_values(vars(command.recipe))
        + check_variables(os.environ)
    )
    with collecting(problems):
        _ = command.out
    return problems


@contextlib.contextmanager
def collecting(problems: list[Problem]) -> Iterator[None]:
    """Adds what is refused within the `with` to `problems`, and goes on after it."""
    try:
        yield
    except Refusal as refusal:
        problems.extend(refusal.problems)


def _start_draft(command: Command) -> Draft:
    """Fit the recipe to its steps, and pin it to the revisions of the run that it continues."""
    recipe, notes = command.fitted()
    notes += say_unused(command.recipe.dataset, command.unused) + say_trial(command.out)
    asked = {"model": recipe.model, "dataset": recipe.dataset, **command.revisions}
    # A question is not answered by an older run.
    before = "never" if command.dry_run and recipe.resume == "auto" else recipe.resume
    recipe = dataclasses.replace(recipe, **pins(before, command.out, asked))
    return Draft(command, recipe, before, notes)


def _check_flags(draft: Draft) -> None:
    """Check the recipe's fields, the environment, and the flags that the task or the engine does
    not read.
    """
    recipe, typed = draft.recipe, draft.command.typed
    draft.problems += check_recipe(recipe)
    draft.problems += check_launcher(os.environ) + check_accelerate(os.environ)

    # `check_recipe` has refused an unknown task. The passes behind it continue with the default.
    if recipe.task not in tuple(TASKS):
        recipe = draft.recipe = dataclasses.replace(recipe, task=Recipe.task)

    draft.problems += check_environment(os.environ) if recipe.deterministic else []
    draft.problems += _check_read(recipe, typed) + baseline.check_engine(recipe, typed)


def _check_read(recipe: Recipe, typed: frozenset[str]) -> list[Problem]:
    """Refuses flags that the task does not read, and a loss in chunks that the recipe's file
    demands of its own task; else a file may say more.
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
        for name, tasks in own_fields().items()
        if name in typed | demanded and recipe.task not in tasks
    ]


def _read_json(draft: Draft) -> None:
    """Read the DeepSpeed JSON, and check its optimizer against the engine. An engine of torch gets
    a config with the optimizer's settings only.
    """
    command, recipe = draft.command, draft.recipe
    if recipe.engine == "deepspeed" or "engine" in command.typed:
        with collecting(draft.problems):
            draft.config, draft.path = json_file.load(recipe.ds_config, command.folder)
            draft.notes += json_file.differences(draft.config, draft.path)

    optimizer = baseline.own_optimizer(draft.config)
    draft.notes += baseline.say_engine(
        recipe.engine, recipe.precision, recipe.ds_config, command.typed, optimizer
    )
    draft.problems += baseline.check_optimizer(recipe.engine, recipe.precision, optimizer)
    if recipe.engine != "deepspeed":
        draft.config, draft.path = baseline.own_config(optimizer), None


def _merge_json(draft: Draft) -> None:
    """Let the numbers of the JSON override the recipe's, except where the user typed a flag."""
    config, recipe = draft.config, draft.recipe
    written = {
        name: value
        for name, value in {**literals(config), **degrees(config)}.items()
        if name not in draft.command.typed
    }
    for name, value in written.items():
        if getattr(recipe, name) != value:
            draft.notes.append(
                f"{name}: {value} of the JSON overrides {getattr(recipe, name)} of the recipe"
            )
    draft.recipe = dataclasses.replace(recipe, **written)
    draft.written = frozenset(written)


SHIP = "put the file in recipes/recipekit/architectures/ORG--NAME.json"


def _read_model_config(draft: Draft) -> None:
    """Find the model's config.json with the labels of the data, and the shapes in it that limit the
    degrees.
    """
    command, recipe = draft.command, draft.recipe
    model_config = _config_of_model(draft)
    if model_config is not None and (
        not command.tiny or recipe.facts.labels or "num_labels" in command.typed
    ):
        model_config = lookup.with_labels(
            model_config, recipe.labels, folder_classes(recipe.dataset, recipe.split, recipe.subset)
        )
    draft.model_config = model_config
    draft.limits = shapes.limiting(model_config, recipe.facts.rows)


def _config_of_model(draft: Draft) -> dict[str, Any] | None:
    """Return the model's config.json, shrunk for a trial or to a vocabulary of bytes; None if it is
    not on this machine.
    """
    recipe, tiny = draft.recipe, draft.command.tiny
    # A dry run may ask the hub for a config.json that is not on this machine.
    asks = draft.command.dry_run and not is_offline(os.environ)
    bytes_only = recipe.tokenizer == "bytes" and recipe.init == "random"
    model_config = None
    try:
        model_config = lookup.model_config(recipe.model, recipe.task, recipe.model_revision)
        if model_config is None and asks and not tiny:
            model_config = lookup.config_on_hub(recipe.model, recipe.task, recipe.model_revision)
    except Refusal as refusal:
        draft.problems += refusal.problems
        return None

    if (model_config or {}).get("auto_map"):
        draft.notes.append(
            "auto_map: the model's own code is never run, and transformers' class is used instead"
        )
    reads_text = "tokenizer" in recipe.facts.reads
    if model_config is None and tiny:
        draft.problems.append(_no_config_to_shrink(recipe.model, recipe.model_revision))
    elif model_config is not None and tiny:
        return shrink(model_config, BYTE_VOCAB if reads_text else 0, recipe.facts.tiny)
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
        f" {'leave --model_revision out' if revision else SHIP}"
    )
    return Problem(f"--tiny with model = {model}", rule, fix)


def _lay_out_ranks(draft: Draft) -> None:
    """Lay the recipe out on the ranks of the command."""
    command, recipe, written = draft.command, draft.recipe, draft.written
    draft.lay_out = partial(
        _lay_out,
        recipe,
        model_config=draft.limits,
        fixed=command.typed | written,
        tiny=command.tiny,
    )
    draft.laid = draft.lay_out(command.world)
    draft.recipe = draft.laid.recipe
    draft.notes += draft.laid.notes


def _check_lengths(draft: Draft) -> None:
    """Refuse rows longer than the model's positions, and note what lies beyond its training."""
    recipe, model_config = draft.recipe, draft.model_config
    if model_config and "seq_len" in recipe.facts.reads:
        draft.problems += _check_positions(recipe.seq_len, model_config, recipe.facts.masked)
        draft.notes += beyond_positions(model_config, recipe.seq_len)


def _check_positions(seq_len: int, model_config: dict[str, Any], masked: bool) -> list[Problem]:
    """Refuses rows longer than a model without rotary positions has places for: its forward pass
    ends in an IndexError.
    """
    kind = model_config.get("model_type", "")
    key = "max_position_embeddings" if masked and kind in ENCODERS else POSITIONS.get(kind, "")
    limit = model_config.get(key)
    if masked and isinstance(limit, int) and kind in BEHIND_PADDING:
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
    """Check the first row of each local data set, and note which files are read and which are left
    out. The hub is not asked.
    """
    recipe, problems = draft.recipe, draft.problems
    domains, streamed = list[Domain](), list[str]()
    with collecting(problems):
        # `check_recipe` has refused another type.
        domains = (
            domains_of(recipe.dataset, recipe.subset) if isinstance(recipe.dataset, str) else []
        )
    problems += check_mixture(recipe.facts, domains)

    for domain in domains:
        with collecting(problems):
            if domain.dataset == "builtin":
                continue
            request = dataclasses.replace(
                request_of(recipe), dataset=domain.dataset, subset=domain.subset
            )
            which = "image" in request.names, request.split, request.subset
            if (files := local_files(domain.dataset, *which)) is not None:
                check_first_row(files, domain.dataset, request)
                draft.notes += say_files(domain.dataset, *which)
            else:
                streamed.append(domain.dataset)
    problems += check_epochs(recipe.epochs, len(domains), streamed)


def check_mixture(facts: Facts, domains: list[Domain]) -> list[Problem]:
    """Refuses several corpora where a task takes one."""
    if len(domains) < 2 or "mixture" not in facts.lacks:
        return []
    return [
        Problem(
            f"--dataset of {len(domains)} corpora",
            facts.lacks["mixture"],
            "set --dataset to a single data set",
        )
    ]


def _check_model_files(draft: Draft) -> None:
    """Check the headers of the weights in the model's folder, and its generation_config.json."""
    recipe, folder = draft.recipe, Path(draft.recipe.model)
    with collecting(draft.problems):
        if draft.model_config is not None and recipe.init == "pretrained" and folder.is_dir():
            entries = open_folder(folder)
            if not draft.command.tiny:
                check_headers(draft.model_config, entries, recipe.model)
    with collecting(draft.problems):
        if draft.model_config is not None and folder.is_dir():
            check_generation_file(folder)


def _check_names(draft: Draft) -> None:
    """Check the names of model and tokenizer, the token cache, and the tokenizer's files."""
    recipe, reads = draft.recipe, draft.recipe.facts.reads
    draft.problems += lookup.check_own_names(
        recipe.model, recipe.init, recipe.tokenizer if "tokenizer" in reads else None
    )
    with collecting(draft.problems):
        if "token_cache" in reads and recipe.token_cache not in ("auto", "off"):
            check_cache(f"--token_cache {recipe.token_cache}", recipe.token_cache)
    with collecting(draft.problems):
        # Without a config.json the model has been refused already, or is not on this machine.
        if "tokenizer" in reads and (recipe.tokenizer or draft.model_config is not None):
            lookup.local_tokenizer(recipe.model, recipe.tokenizer)


def _check_hub(draft: Draft) -> None:
    """Refuse a run without network whose files are not cached, and revisions of local files."""
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
    """Refuse a run folder that would mix with local inputs or that, in a dry run, a start could not
    create.
    """
    command, recipe = draft.command, draft.recipe
    with collecting(draft.problems):
        is_blank = "out" in command.typed and not command.recipe.out.strip()
        paths = _read_paths(recipe.dataset, model=recipe.model, tokenizer=recipe.tokenizer)
        problems = check_out(command.out, is_blank, paths)
        draft.problems += problems or (check_writable(command.out) if command.dry_run else [])


def _read_paths(dataset: Any, **folders: str) -> list[tuple[str, Path]]:
    """List the local files and folders that a run reads: (description, path).

    A glob stands for its folder without wildcards.
    """
    found = [
        (f"the folder of --{name} {value}", Path(value).expanduser())
        for name, value in folders.items()
        if value
    ]
    for domain in domains_of(dataset) if isinstance(dataset, str) else []:
        entries = [domain.dataset] if is_there(domain.dataset) else domain.dataset.split(",")
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
                for target in targets(path)
            ]
    return [(what, path.resolve()) for what, path in found if path.exists()]


def _find_resume(draft: Draft) -> None:
    """Find the run to continue. What refuses a run that a dry run only looks at is a note."""
    command, recipe = draft.command, draft.recipe
    older = list[Problem]()
    with collecting(older if draft.resume != recipe.resume else draft.problems):
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
    """Check the JSON and the degrees against the ranks; without a JSON, the degrees alone."""
    if not draft.config and draft.problems:
        draft.problems += draft.laid.problems
        return
    draft.problems += outputs.check_outputs(draft.config)
    draft.problems += swap.check_swap(draft.config, draft.command.out)
    draft.problems += _check_strategy(draft)


def _check_strategy(draft: Draft) -> list[Problem]:
    """Return what of the JSON and the degrees does not fit the ranks, with numbers of ranks that
    fit.
    """
    command, lay_out = draft.command, draft.lay_out
    given = check.LintInput(
        draft.config,
        model_config=draft.limits,
        typed=command.typed,
        local=0 if command.dry_run else command.local_ranks,
    )
    here = lay_out(command.world)

    def check_laid(world: int, laid: "LaidOut") -> list[Problem]:
        return check.check(
            dataclasses.replace(given, world=world, mesh=laid.mesh, recipe=laid.recipe)
        )

    def check_on(world: int | None) -> list[Problem]:
        if world is None:
            return check.check(dataclasses.replace(given, recipe=here.recipe))
        laid = lay_out(world)
        return laid.problems or check_laid(world, laid)

    problems = here.problems + check_laid(command.world, here)
    step = math.prod(max(1, getattr(here.recipe, axis)) for axis in AXES)
    return divisions.name_worlds(problems, command.world, step, check_on)


def _finish(draft: Draft) -> Plan:
    """Resolve the JSON to numbers, and return the plan."""
    command, mesh = draft.command, draft.laid.mesh
    resolved, more = resolve.resolve(draft.config, draft.recipe, mesh, draft.limits)
    outputs.expand_outputs(resolved, command.out)
    return Plan(
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


def _lay_out(
    recipe: Recipe,
    world: int,
    model_config: dict[str, Any] | None,
    fixed: frozenset[str],
    tiny: bool,
) -> LaidOut:
    """Fits a recipe to `world` ranks; nothing in `fixed` is changed."""
    notes, problems, mesh = [], [], Mesh()
    if tiny:
        recipe, notes = _lower(_tiny(recipe, fixed), world, model_config, fixed)
    try:
        mesh = make_mesh(world, **{axis: getattr(recipe, axis) for axis in AXES})
    except Refusal as refusal:
        problems = refusal.problems
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
            else scaled(recipe.batch_ramp, recipe.global_batch, global_batch)
        )
        recipe = dataclasses.replace(
            recipe, micro_batch=micro_batch, global_batch=global_batch, batch_ramp=ramp
        )
    return LaidOut(recipe, mesh, notes, problems)


def _lower(
    recipe: Recipe, world: int, model_config: dict[str, Any] | None, fixed: frozenset[str]
) -> tuple[Recipe, list[str]]:
    """Lowers the degrees until they fit `world` ranks and the tiny model; returns the recipe and
    the line that says so.
    """
    degrees = {axis: getattr(recipe, axis) for axis in AXES}
    divisible = shapes.divisible(model_config, recipe.seq_len)
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


def _tiny(recipe: Recipe, fixed: frozenset[str]) -> Recipe:
    """Shrinks everything but the layout to what a laptop can hold; nothing in `fixed` is
    touched.
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
    unread = {name for name, tasks in own_fields().items() if recipe.task not in tasks}
    return dataclasses.replace(
        recipe, **{name: value for name, value in small.items() if name not in fixed | unread}
    )
