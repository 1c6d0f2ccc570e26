"""From a command line to everything a run needs to know, with every mistake found before anything is started."""

import dataclasses
import hashlib
import json
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import ds_config
from .architecture import is_local, local_tokenizer, model_config, shrink
from .data_files import check_first_row, local_files
from .deterministic import check_environment
from .mesh import Mesh, fit_batch, fit_degrees, make_mesh
from .mixture import domains_of
from .recipe import Command, Recipe, check_recipe
from .refusal import Problem, Refusal
from .safetensors_files import open_folder

BYTE_VOCAB = 264  # of the byte-level tokenizer: 256 bytes and 8 special tokens (tokens.py)
TINY_SEQ_LEN = 128
POSITIONS = {  # by model_type: what bounds the length of its rows (transformers 5.22.2)
    **dict.fromkeys(("gpt2", "gpt_bigcode", "openai-gpt", "gptj", "codegen", "ctrl"), "n_positions"),
    **dict.fromkeys(("gpt_neo", "opt", "biogpt"), "max_position_embeddings"),
    "mpt": "max_seq_len",
}
AXES = ("tp", "pp", "sp", "ep")

# What a run is made of: a run folder is continued only if these are the same.
IDENTITY = (
    *("model", "init", "dataset", "subset", "split", "text_field", "messages_field", "task", "tokenizer", "seed", "seq_len", "global_batch"),
    *("steps", "lr", "min_lr", "warmup_steps", "schedule", "weight_decay", "beta1", "beta2", "eps", "gradient_clipping"),
)


@dataclass(frozen=True)
class Plan:
    """What is about to run. `ds_config` is resolved: numbers only. `model_config` is None until a hub model is fetched."""

    command: Command
    recipe: Recipe
    mesh: Mesh
    ds_config: dict[str, Any]
    ds_path: Path | None
    model_config: dict[str, Any] | None
    out: Path
    resume_from: Path | None  # run or step folder; None: a new run
    notes: tuple[str, ...]  # what was decided for the user, one line each

    @property
    def accumulation(self) -> int:
        """Micro-batches of one optimizer step on one data-parallel rank."""
        return self.recipe.global_batch // (self.mesh.dp * self.recipe.micro_batch)


def make_plan(command: Command) -> Plan:
    """Resolves a command for its world size; raises one `Refusal` with every problem. Reads files, changes nothing."""
    recipe = command.recipe
    notes: list[str] = []
    if "steps" in command.typed and "warmup_steps" not in command.typed and recipe.warmup_steps >= recipe.steps > 0:
        notes.append(f"warmup_steps: {recipe.warmup_steps} of the recipe lowered to {recipe.steps // 10} for {recipe.steps} steps")
        recipe = _with(recipe, {"warmup_steps": recipe.steps // 10})
    problems = check_recipe(recipe) + check_launcher(os.environ)
    problems += check_environment(os.environ) if recipe.deterministic else []
    try:
        config, path = ds_config.load(command.recipe.ds_config, command.folder)
    except Refusal as refusal:
        config, path = {}, None
        problems += refusal.problems
    written = {name: value for name, value in {**ds_config.literals(config), **ds_config.degrees(config)}.items() if name not in command.typed}
    for name, value in written.items():
        if getattr(recipe, name) != value:
            notes.append(f"{name}: {value} of the JSON beats {getattr(recipe, name)} of the recipe")
    recipe = _with(recipe, written)

    architecture, told = None, False
    try:
        architecture = model_config(recipe)
    except Refusal as refusal:
        problems += refusal.problems
        told = True
    if (architecture or {}).get("auto_map"):
        notes.append("auto_map: code of the model's own is never run; its class in transformers is used")
    if command.tiny and not told:
        if architecture is None:
            problems.append(
                Problem(
                    f"--tiny with model = {recipe.model}",
                    "needs the model's config.json, which is neither shipped nor in the local cache",
                    "give its folder with --model, or put the file in recipes/recipekit/architectures/ORG--NAME.json",
                )
            )
        else:
            architecture = shrink(architecture, BYTE_VOCAB)
    elif architecture is not None and recipe.tokenizer == "bytes" and recipe.init == "random":
        architecture = architecture | {"vocab_size": BYTE_VOCAB}

    fixed = command.typed | written.keys()
    asked = recipe
    recipe, mesh, more, layout_problems = _lay_out(asked, command.world, architecture, fixed, command.tiny)
    notes += more
    problems += _check_positions(recipe, architecture) if architecture else []
    problems += _check_inputs(recipe, model_known=architecture is not None)

    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")  # as huggingface_hub reads it
    needed = recipe.init == "pretrained" or (architecture is None and not command.tiny)
    if offline and needed and recipe.model and not command.dry_run and not is_local(recipe):
        rule = "is not in the local cache, and HF_HUB_OFFLINE forbids to download it"
        problems.append(Problem(f"model = {recipe.model}", rule, f"download it where there is a network: hf download {recipe.model}"))

    out = command.out
    resume_from = None
    try:
        resume_from = find_resume(recipe, out, architecture, command.tiny, command.typed)
    except Refusal as refusal:
        problems += refusal.problems
    if config or not problems:
        problems += ds_config.check_swap(config, out)
        given: Any = {"model_config": architecture, "typed": command.typed}

        def check_on(world: int | None) -> list[Problem]:
            if world is None:
                return ds_config.check(config, recipe=recipe, **given)
            laid_out, mesh, _, found = _lay_out(asked, world, architecture, fixed, command.tiny)
            return found or ds_config.check(config, world=world, mesh=mesh, recipe=laid_out, **given)

        layout_problems += ds_config.check(config, world=command.world, mesh=mesh, recipe=recipe, **given)
        step = math.prod(max(1, getattr(recipe, axis)) for axis in AXES)
        layout_problems = ds_config.name_worlds(layout_problems, command.world, step, check_on)
    problems += layout_problems
    if problems:
        raise Refusal(problems)
    resolved, more = ds_config.resolve(config, recipe, mesh, architecture)
    notes += more
    for block in ("offload_optimizer", "offload_param"):
        if (offload := resolved["zero_optimization"].get(block, {})).get("device") == "nvme":
            offload["nvme_path"] = str((out / Path(offload["nvme_path"]).expanduser()).resolve())  # an absolute path stays
    return Plan(command, recipe, mesh, resolved, path, architecture, out, resume_from, tuple(notes))


def _check_positions(recipe: Recipe, architecture: dict[str, Any]) -> list[Problem]:
    """Rows longer than a model without rotary positions has places for: its forward pass ends in an IndexError."""
    kind = architecture.get("model_type", "")
    limit = architecture.get(key := POSITIONS.get(kind, ""))
    if not isinstance(limit, int) or recipe.seq_len <= limit:
        return []
    return [Problem(f"seq_len = {recipe.seq_len}", f"a {kind} has positions for {limit} tokens ({key} in its config.json)", f"use --seq_len {limit} or less")]


def _check_inputs(recipe: Recipe, model_known: bool) -> list[Problem]:
    """What is wrong with local data, the model's files and the tokenizer, as the first row, headers and names tell it; the hub is not asked."""
    problems = []
    try:
        domains = domains_of(recipe) if isinstance(recipe.dataset, str) else []  # of which `check_recipe` has told
    except Refusal as refusal:
        domains = []
        problems += refusal.problems
    for domain in domains:
        try:
            if domain.dataset != "builtin" and (files := local_files(domain.dataset)) is not None:
                check_first_row(files, domain.dataset, recipe)
        except Refusal as refusal:
            problems += refusal.problems
    try:
        if model_known and recipe.init == "pretrained" and Path(recipe.model).is_dir():
            open_folder(Path(recipe.model))
    except Refusal as refusal:
        problems += refusal.problems
    if recipe.token_cache not in ("auto", "off"):
        above = Path(recipe.token_cache).expanduser().absolute()
        there = next(folder for folder in (above, *above.parents) if folder.exists())
        if not there.is_dir() or (there != above and not os.access(there, os.W_OK)):  # one that is there may hold the tokens already
            rule = f"cannot be made: {there} is {'no folder' if not there.is_dir() else 'not yours to write to'}"
            problems.append(Problem(f"--token_cache {recipe.token_cache}", rule, "name a folder you may write to, or off"))
    try:
        if recipe.tokenizer or model_known:  # else the model is told of already, or is not here
            local_tokenizer(recipe)
    except Refusal as refusal:
        problems += refusal.problems
    return problems


def _lay_out(
    recipe: Recipe, world: int, architecture: dict[str, Any] | None, fixed: frozenset[str], tiny: bool
) -> tuple[Recipe, Mesh, list[str], list[Problem]]:
    """(the recipe as it runs on `world` ranks, their mesh, what was decided, what does not fit).

    Where the degrees do not fit, the mesh is that of one rank.
    """
    notes, problems, mesh = [], [], Mesh()
    if tiny:
        recipe, notes = _lower(_tiny(recipe, fixed), world, architecture, fixed)
    try:
        mesh = make_mesh(world, **{axis: getattr(recipe, axis) for axis in AXES})
    except Refusal as refusal:
        problems = refusal.problems
    if recipe.pp == 1 and ("pp" in fixed or tiny) and recipe.pipeline_schedule != "1f1b" and "pipeline_schedule" not in fixed:
        notes.append(f"pipeline_schedule: {recipe.pipeline_schedule} of the recipe has no pipeline to order with pp 1")
        recipe = _with(recipe, {"pipeline_schedule": "1f1b"})
    if tiny and recipe.micro_batch > 0:
        rows = 2 * mesh.dp * mesh.pp * recipe.micro_batch
        micro_batch, global_batch = fit_batch(mesh.dp, recipe.micro_batch, recipe.global_batch if "global_batch" in fixed else rows, fixed)
        recipe = _with(recipe, {"micro_batch": micro_batch, "global_batch": global_batch})
    return recipe, mesh, notes, problems


def _lower(recipe: Recipe, world: int, architecture: dict[str, Any] | None, fixed: frozenset[str]) -> tuple[Recipe, list[str]]:
    """The recipe with degrees that fit `world` ranks and the tiny model, and the line that says so."""
    degrees = {axis: getattr(recipe, axis) for axis in AXES}
    divisible = ds_config.divisible(architecture, recipe.seq_len)
    layers = ds_config.count_layers(architecture)
    most = max(1, layers // (2 if recipe.pipeline_schedule == "dualpipev" else 1)) if layers else degrees["pp"]
    capped = degrees if "pp" in fixed else degrees | {"pp": min(most, degrees["pp"])}
    fitted = fit_degrees(world, capped, fixed, {axis: tuple(numbers.values()) for axis, numbers in divisible.items()})
    if fitted == degrees:
        return recipe, []
    lowered = [axis for axis in degrees if fitted[axis] < degrees[axis]]
    limits = [f"{world} rank{'s' if world > 1 else ''}"]
    for axis in lowered:
        limits += [f"{number} {name}" for name, number in divisible.get(axis, {}).items() if number % degrees[axis]]
    limits += [f"{layers} layers"] if capped != degrees else []
    listed = ", ".join(f"{axis} {degrees[axis]} -> {fitted[axis]}" for axis in lowered)
    return dataclasses.replace(recipe, **fitted), [f"--tiny lowered {listed} to fit {', '.join(limits[:-1])}{' and ' if limits[1:] else ''}{limits[-1]}"]


def _tiny(recipe: Recipe, fixed: frozenset[str]) -> Recipe:
    """The same recipe small enough for a laptop, but for its layout; nothing in `fixed` is touched."""
    small = {
        "micro_batch": 2,
        "seq_len": min(recipe.seq_len, TINY_SEQ_LEN),
        "eval_rows": min(recipe.eval_rows, 8),
        "dataset": "builtin",
        "subset": "",
        "tokenizer": "bytes",
        "init": "random",
    }
    return _with(recipe, {name: value for name, value in small.items() if name not in fixed})


def _with(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    return dataclasses.replace(recipe, **changes)


def find_resume(recipe: Recipe, out: Path, architecture: dict[str, Any] | None, tiny: bool, typed: frozenset[str] = frozenset()) -> Path | None:
    """The folder to go on from, or None for a new run. Raises `Refusal` with every difference to the run in `out`."""
    if recipe.resume == "never":
        return None
    if recipe.resume != "auto":
        chosen = Path(recipe.resume)
        if not (chosen / "checkpoints").is_dir() and not (chosen / "manifest.json").is_file():
            raise Refusal(
                [
                    Problem(
                        f"resume = {recipe.resume}", "is neither a run folder nor a step folder of one", "give runs/NAME or runs/NAME/checkpoints/step_00000010"
                    )
                ]
            )
        inside = chosen.resolve() in (out.resolve(), *out.resolve().glob("checkpoints/step_*"))
        if not inside and (out / "run.json").exists() and not _same_beginning(recipe, out):
            raise Refusal([Problem(f"out = {out}", f"already holds a run, which is not {recipe.resume}", "choose a new folder with --out NEW")])
        before = _saved_identity(chosen if (chosen / "checkpoints").is_dir() else chosen.parent.parent)
        now = identity(recipe, architecture)
        same = "model_config" if "model_config" in now else "model"
        if before and before.get(same) != now[same]:
            rule = f"the checkpoint in {chosen} is of another model, {before.get('model')}"
            raise Refusal([Problem(f"model = {recipe.model}", rule, f"use --model {before.get('model')}, or start anew with --out NEW")])
        return chosen
    if (before := _saved_identity(out)) is None:
        return None
    now = identity(recipe, architecture)
    others = [name for name in now if before.get(name) != now[name]]
    others.sort(key=lambda name: name not in typed)  # first what the user may know of
    if "steps" in others and "warmup_steps" not in typed:  # it was lowered with them, and will be again
        others = [name for name in others if name != "warmup_steps"]
    shown = lambda value: "nothing" if value in ("", None) else value  # noqa: E731
    ways = f"start a new run with --out NEW, accept the differences with --resume {out}, or put the old run aside with --resume never"
    if others and tiny != _saved(out).get("recipe", {}).get("tiny", tiny):
        where, rule, other = ("--tiny", "was begun without it", "leave it out") if tiny else ("no --tiny", "is a trial with --tiny", "add --tiny")
        raise Refusal([Problem(where, f"the run in {out} {rule}", f"{other} to go on with that run, {ways}")])
    if others:
        flags = shlex.join(word for name in others if name in IDENTITY and before.get(name) not in (None, "") for word in (f"--{name}", str(before[name])))
        problems = [Problem(f"{name} = {shown(now[name])}", f"the run in {out} has {shown(before.get(name))}", "see the ways on above") for name in others]
        raise Refusal([dataclasses.replace(problems[0], fix=f"go on with {flags}, {ways}" if flags else ways), *problems[1:]])
    return out


def check_launcher(variables: Mapping[str, str]) -> list[Problem]:
    """`accelerate launch --num_processes 2` starts one process, without RANK, where it sees fewer than two GPUs (accelerate 1.15, simple_launcher).

    What tells of it is the MASTER_PORT that accelerate then sets for that process, and has not itself.
    """
    if "RANK" in variables or not {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} <= variables.keys():
        return []
    try:
        above = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
    if any(entry.startswith(b"MASTER_PORT=") for entry in above):
        return []
    fix = "write accelerate launch --multi_gpu --num_processes N (on a CPU, too), or deepspeed --num_gpus N"
    return [Problem("accelerate launch", "has started 1 of several processes, as it does where it sees fewer than two GPUs", fix)]


def way_on(recipe: Recipe, out: Path) -> str:
    """How a run that has ended before its time goes on, as the end of a line."""
    try:
        step = int((out / "checkpoints" / "latest").read_text().strip().removeprefix("step_"))
    except (OSError, ValueError):
        start = "begins anew" if recipe.resume in ("auto", "never") else f"starts again from {recipe.resume}"
        return f"no checkpoint is complete yet: the same command {start}"
    if recipe.resume == "auto":
        return f"the same command goes on from step {step}"
    return f"the same command with --resume auto goes on from step {step}"


def _same_beginning(recipe: Recipe, out: Path) -> bool:
    """True if this very command began the run in `out`, which ended before its first checkpoint: nothing is lost by beginning again."""
    try:
        resume = json.loads((out / "run.json").read_text())["recipe"]["resume"]
    except (ValueError, KeyError):
        return False
    return resume == recipe.resume and not any(out.glob("checkpoints/step_*"))


def _saved_identity(run: Path) -> dict[str, Any] | None:
    """What the run in a folder is made of; None if the folder holds no run.json. Raises `Refusal` if it cannot be read."""
    return _saved(run)["identity"] if (run / "run.json").exists() else None


def _saved(run: Path) -> dict[str, Any]:
    try:
        saved = json.loads((run / "run.json").read_text())
        return saved | {"identity": saved["identity"]}
    except (ValueError, KeyError):
        raise Refusal([Problem(f"{run}/run.json", "is damaged", "start a new run with --out NEW, or put this one aside with --resume never")]) from None


def identity(recipe: Recipe, architecture: dict[str, Any] | None) -> dict[str, Any]:
    """What a run is made of, as it is kept in run.json and compared on resume; with `model_config`, a hash, for a model in a folder.

    A hub id stands for itself: its config.json is the one we ship (or none) at the first start, and the hub's own once that has downloaded it.
    """
    found = {name: getattr(recipe, name) for name in IDENTITY}
    if Path(recipe.model).is_dir():
        found["model_config"] = hashlib.sha256(json.dumps(architecture, sort_keys=True).encode()).hexdigest()[:16]
    return found
