"""Names what lies in a run folder, decides whether a command may go on with it, and puts one
aside.
"""

import contextlib
import hashlib
import json
import os
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .phases import written
from .recipe import Recipe
from .refusal import Problem, Refusal, refuse
from .step_names import MANIFEST, newest_complete, step_folders, step_of
from .task_specs import own_fields

# Names in a run folder.
FACTS = "run.json"  # everything that made the run (runtime/facts.py)
STRATEGY = "ds_config.json"  # the resolved JSON, which `--deepspeed_config` accepts
METRICS = "metrics.jsonl"  # a line for each step
# keys of such a line that training decides
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens", "samples", "global_batch", "eval_loss")
COMMITS = "commits"  # a key of FACTS: what was read from the hub, at which commits
# digests of what was read, so that a resume can name a file that has changed
DATA_FILES = "data_files.json"
CHECKPOINTS = "checkpoints"  # a folder for each kept step, and LATEST
# in CHECKPOINTS: the name of the newest complete step folder, as stock DeepSpeed reads it
LATEST = "latest"
EXPORT = "hf"  # the trained model as Hugging Face files
MERGED = "hf_merged"  # the same with its adapter merged, written by --merge after the run

ADAPTER_CONFIG = "adapter_config.json"  # in an export: it is an adapter
MERGE = "recipekit convert to-hf --merge"

OF_NORMS = ", which its BatchNorm took its statistics of"
# is part of a run whose model has BatchNorm: its rows are normalised together
STATISTICS = "micro_batch"
# What a run is made of: a run folder is continued only if these are the same.
IDENTITY = (
    *("model", "model_revision", "init", "dataset", "subset", "split", "dataset_revision"),
    *("text_field", "messages_field", "image_field", "label_field", "augment"),
    *("num_labels", "task", "tokenizer", "seed", "seq_len", "global_batch", "batch_ramp"),
    *(
        "steps",
        "epochs",
        "lr",
        "min_lr",
        "lr_scale",
        "layer_decay",
        "warmup_steps",
        "decay_steps",
        "schedule",
    ),
    *("weight_decay", "beta1", "beta2", "eps", "gradient_clipping"),
)
ADAPTER = "adapter"  # in a run's identity: the config of its adapter; None without one
NO_VALUES: Mapping[str, str] = {}
# values of a run that has the other one
_NOT_TYPED: Mapping[str, tuple[Any, ...]] = dict.fromkeys(("steps", "epochs"), (0, None))
# where fewer steps are typed (`Recipe.shortened`)
LOWERED = ("warmup_steps", "decay_steps", "batch_ramp")
# and of these where its task reads them
OF_TASKS = ("prompt_field", "chosen_field", "rejected_field", "beta", "mask_rate", "whole_words")


def without_base(export: Path) -> bool:
    """Return True if exported files are an adapter of randomly initialised weights: a run then
    names no base model.
    """
    # no adapter, or a damaged one, which its readers refuse
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return (
            json.loads((export / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path", "")
            is None
        )
    return False


REPOSITORY = Path(__file__).resolve().parents[3]


def check_out(out: Path, is_blank: bool, read: list[tuple[str, Path]]) -> list[Problem]:
    """Refuse a run folder that cannot be made, or that would mix with `read`, (what, resolved
    path), or with the repository.

    Files of a run inside a folder of data are data for the next start, and `--resume never` moves a
    run folder with all that it contains. `is_blank`: an empty value was typed.
    """
    where, fix = f"out = {out}", "set --out to a separate folder"
    if is_blank:
        return [
            Problem(
                "out = ''",
                "must not be empty or blank",
                f"{fix}. Check the variables of your shell",
            )
        ]
    there = next(
        folder for folder in (out.absolute(), *out.absolute().parents) if os.path.exists(folder)
    )
    if not there.is_dir():
        rule = (
            f"cannot be written: Not a directory{f': {there}' if there != out.absolute() else ''}"
        )
        return [Problem(where, rule, "set --out to a folder that you can write to")]
    problems, out = [], out.resolve()
    for what, path in [*read, ("the repository", REPOSITORY)]:
        inside = path.is_dir() and path != REPOSITORY and path in out.parents
        if relation := (
            "is"
            if out == path
            else "contains"
            if out in path.parents
            else "is inside"
            if inside
            else ""
        ):
            problems.append(Problem(where, f"{relation} {what}", fix))
    return problems


def check_writable(out: Path) -> list[Problem]:
    """Refuse a run folder that the start could not write; leaves no file behind."""
    there = next(
        folder for folder in (out.absolute(), *out.absolute().parents) if os.path.exists(folder)
    )
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return [unwritable(out, error)]
    return []


def unwritable(out: Path, error: OSError) -> Problem:
    """Return the problem of a run folder that cannot be written."""
    return Problem(
        f"out = {out}",
        f"cannot be written: {error.strerror}",
        "set --out to a folder that you can write to",
    )


def find_resume(
    recipe: Recipe,
    out: Path,
    model_config: dict[str, Any] | None,
    tiny: bool,
    typed: frozenset[str] = frozenset(),
    unused: Mapping[str, str] = NO_VALUES,
) -> Path | None:
    """Returns the folder to go on from, or None for a new run.

    Raises `Refusal` with every difference to the run in `out`.

    Older runs recorded the `unused` split and subset of the recipe's file, which belong to another
    data set.
    """
    if recipe.resume == "never":
        return None
    now = identity(recipe, model_config)
    if recipe.resume != "auto":
        return _chosen(recipe.resume, recipe.micro_batch, recipe.stop_at or recipe.steps, out, now)
    if is_damaged(out):
        raise _damaged(out)
    if (before := _saved_identity(out)) is None:
        _check_no_checkpoints(out)
        return None
    now |= _statistics(recipe.micro_batch, before)
    others = [
        name for name in now if before.get(name) not in (now[name], unused.get(name, now[name]))
    ]
    others.sort(key=lambda name: name not in typed)  # the flags that the user typed come first
    # what was lowered with steps will be again
    if "steps" in others or (recipe.epochs and not recipe.steps):
        others = [name for name in others if name in typed or name not in LOWERED]
    if not others:
        return out

    accepts = "" if STATISTICS in others else f"accept the differences with --resume {out}, "
    ways = f"start a new run with --out NEW, {accepts}or put the old run aside with --resume never"
    _check_tiny(tiny, out, ways)
    raise _other_run(out, {name: (now[name], before.get(name)) for name in others}, ways)


def _check_tiny(tiny: bool, out: Path, ways: str) -> None:
    """Raise `Refusal` if only one of this command and the run in `out` has --tiny."""
    if tiny == facts_of_run(out).get("recipe", {}).get("tiny", tiny):
        return
    if tiny:
        where, rule, other = "--tiny", "was started without it", "omit it"
    else:
        where, rule, other = "no --tiny", "was started with --tiny", "add --tiny"
    raise refuse(where, f"the run in {out} {rule}", f"{other} to resume that run, {ways}")


def _other_run(out: Path, differences: Mapping[str, tuple[Any, Any]], ways: str) -> Refusal:
    """Return the refusal to resume a run that is another one.

    `differences`: field -> its value in this command, and in the run in `out`.
    """
    own = {*IDENTITY, *OF_TASKS, STATISTICS} - {"lr_scale"}  # fields that are flags
    flags = shlex.join(
        word
        for name, (_, before) in differences.items()
        if name in own and before not in _NOT_TYPED.get(name, (None, ""))
        for word in (f"--{name}", str(before))
    )
    first = f"resume with {flags}, {ways}" if flags else ways

    shown = lambda value: "nothing" if value in ("", None) else value  # noqa: E731
    taken = {STATISTICS: OF_NORMS}
    return Refusal(
        [
            Problem(
                f"{name} = {shown(now)}",
                f"the run in {out} has {shown(before)}{taken.get(name, '')}",
                "see the first problem for the ways to continue" if number else first,
            )
            for number, (name, (now, before)) in enumerate(differences.items())
        ]
    )


def _check_no_checkpoints(out: Path) -> None:
    """Raise `Refusal` if `out` has checkpoints: without run.json nothing shows that they are of
    this command.
    """
    folders = [out / CHECKPOINTS, out]  # also a step folder that was copied to the wrong place
    if not (found := [step for folder in folders for step in step_folders(folder)]):
        return
    newest = next((step for folder in folders if (step := newest_complete(folder))), None)
    ways = "put them aside with --resume never, or choose another folder with --out"
    rule = f"has checkpoints, such as {(newest or found[-1]).name}, but no {FACTS}"
    raise refuse(
        f"out = {out}", rule, f"continue with --resume {newest}, {ways}" if newest else ways
    )


def check_adapter(now: dict[str, Any] | None, resume: str, out: Path) -> None:
    """Raise `Refusal` with every difference between an adapter's config and the config in `out`,
    the run to resume.

    Only `--resume auto` is checked. A run folder older than this check states no adapter, and the
    run continues. A field that one of two versions of peft lacks counts as off.
    """
    if resume != "auto" or ADAPTER not in (saved := _saved_identity(out) or {}):
        return
    before, found = saved[ADAPTER], now
    accept = (
        f"accept the difference with --resume {out}, or put the old run aside with --resume never"
    )
    ways = f"restore it, start a new run with --out NEW, {accept}"
    if before is None and found is None:
        return
    if before is None or found is None:
        rule = (
            f"the run in {out} {'has an adapter of peft' if before else 'has no adapter of peft'}"
        )
        raise refuse(f"adapt {'makes one' if found else 'makes no adapter of peft'}", rule, ways)
    # json keeps the order of patterns: peft takes the first one that matches a module
    stated = lambda config, name: json.dumps(config.get(name) or None)  # noqa: E731
    names = [name for name in {**found, **before} if stated(found, name) != stated(before, name)]
    problems = [
        Problem(
            f"adapt: {name} = {found.get(name)}",
            f"the run in {out} has {before.get(name)}",
            ways if number == 0 else "see the first problem for the ways to continue",
        )
        for number, name in enumerate(names)
    ]
    if problems:
        raise Refusal(problems)


def _statistics(micro_batch: int, before: dict[str, Any]) -> dict[str, int]:
    """Returns what a run is made of besides, if the one before it was made of its micro-batch,
    too.
    """
    return {STATISTICS: micro_batch} if STATISTICS in before else {}


def _chosen(resume: str, micro_batch: int, last_step: int, out: Path, now: dict[str, Any]) -> Path:
    """Return the run or step folder that `--resume PATH` names.

    Raises `Refusal` if its model or, with BatchNorm, its micro-batch is another one, if `out` holds
    another run, or if it is the finished run of another command.
    """
    chosen = Path(resume)
    is_run = (chosen / CHECKPOINTS).is_dir()
    if not is_run and not (chosen / MANIFEST).is_file():
        fix = f"set --resume to runs/NAME or runs/NAME/{CHECKPOINTS}/step_00000010"
        raise refuse(f"resume = {resume}", "must be a run folder or one of its step folders", fix)
    checkpoints = (out / CHECKPOINTS).resolve()  # a link in there may lead anywhere
    inside = chosen.resolve() == out.resolve() or checkpoints in (
        chosen.resolve().parent,
        chosen.absolute().parent.resolve(),
    )
    if not inside and (out / FACTS).exists() and not _same_beginning(resume, out):
        raise refuse(
            f"out = {out}",
            f"already contains a different run than {resume}",
            "choose a new folder with --out NEW",
        )
    before = _saved_identity(chosen if is_run else chosen.parent.parent)
    same = "model_config" if "model_config" in now else "model"
    if before and before.get(same) != now[same]:
        rule = f"the checkpoint in {chosen} is from another model, {before.get('model')}"
        raise refuse(
            f"model = {now['model']}",
            rule,
            f"use --model {before.get('model')}, or start a new run with --out NEW",
        )
    if before and before.get(STATISTICS, micro_batch) != micro_batch:
        rule = f"the checkpoint in {chosen} has {before[STATISTICS]}{OF_NORMS}"
        raise refuse(
            f"{STATISTICS} = {micro_batch}",
            rule,
            f"resume with --{STATISTICS} {before[STATISTICS]}, or start a new run from its export"
            " with --out NEW",
        )
    if before:
        _check_not_finished(last_step, chosen, before, now)
    return chosen


def _check_not_finished(
    last: int, chosen: Path, before: dict[str, Any], now: dict[str, Any]
) -> None:
    """Raise `Refusal` if the checkpoint of another run leaves no step to train: its steps are not
    the steps of this command.
    """
    step = _newest_step(chosen)
    others = [
        name
        for name in now
        if name not in ("steps", "epochs", *LOWERED) and before.get(name) != now[name]
    ]
    if not last or step < last or not others:
        return
    name = others[0]
    rule = (
        f"the checkpoint is at step {step}, but this command ends at step {last}. The run has"
        f" {name} = {before.get(name)}, and this command has {now[name]}"
    )
    run = chosen if (chosen / CHECKPOINTS).is_dir() else chosen.parent.parent
    weights = f"--model {run / EXPORT}"
    if not (run / EXPORT).is_dir():
        weights = f"--model NEW_FOLDER after recipekit convert to-hf {run} NEW_FOLDER"
    raise refuse(
        f"resume = {chosen}",
        rule,
        f"use --steps {step + 1} or more, or start from its weights with {weights}",
    )


def _newest_step(chosen: Path) -> int:
    """Return the number of the newest step folder of a run folder, or of a step folder under any
    name; 0 without one.
    """
    if (chosen / CHECKPOINTS).is_dir():
        return max(
            (step_of(folder.name) or 0 for folder in step_folders(chosen / CHECKPOINTS)), default=0
        )
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((chosen / MANIFEST).read_text())["step"])
    return step_of(chosen.name) or 0


def way_on(resume: str, out: Path) -> str:
    """Says how to go on with a run that ended early, as the end of a line."""
    if (newest := newest_complete(out / CHECKPOINTS)) is None:
        start = (
            "starts from the beginning"
            if resume in ("auto", "never")
            else f"starts again from {resume}"
        )
        return f"no checkpoint is complete yet: the same command {start}"
    step = step_of(newest.name)
    if resume == "auto":
        return f"the same command resumes from step {step}"
    return f"the same command with --resume auto resumes from step {step}"


def _same_beginning(resume: str, out: Path) -> bool:
    """Returns True if this very command began the run in `out` and that run ended before its first
    checkpoint: beginning again loses nothing.
    """
    before = facts_of_run(out).get("recipe", {}).get("resume")
    return before == resume and not step_folders(out / CHECKPOINTS)


def _saved_identity(run: Path) -> dict[str, Any] | None:
    """Return the identity of the run in a folder; None if its run.json is missing or damaged.

    A field that is younger than the run had its default.
    """
    defaults = {name: Recipe.__dataclass_fields__[name].default for name in (*IDENTITY, *OF_TASKS)}
    found = facts_of_run(run).get("identity")
    return defaults | found if found is not None else None


def facts_of_run(run: Path) -> dict[str, Any]:
    """Return the content of run.json; {} if the file is missing, or damaged in any part that a
    resume reads.
    """
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((run / FACTS).read_bytes())
        if isinstance(found, dict) and all(
            isinstance(found.get(key, {}), dict) for key in ("identity", "recipe", COMMITS)
        ):
            return found
    return {}


def is_damaged(run: Path) -> bool:
    """Return True if the run folder has a run.json that states no identity, such as an empty one
    after a loss of power.
    """
    return os.path.lexists(run / FACTS) and "identity" not in facts_of_run(run)


def _damaged(out: Path) -> Refusal:
    """Return the refusal to resume a run by itself whose run.json is damaged.

    Its checkpoints need no run.json.
    """
    if (newest := newest_complete(out / CHECKPOINTS)) is None:
        fix = "start a new run with --out NEW, or put this one aside with --resume never"
        return refuse(f"{out / FACTS}", "is damaged, and the run has no complete checkpoint", fix)
    rule = (
        "is damaged, so this command cannot be compared with the run. Its newest complete"
        f" checkpoint is {newest.name}"
    )
    return refuse(
        f"{out / FACTS}",
        rule,
        f"if the command is the same, resume with --resume {shlex.quote(str(out))}",
    )


def identity(
    recipe: Recipe, model_config: dict[str, Any] | None, has_norms: bool = False
) -> dict[str, Any]:
    """Lists what a run is made of, as run.json keeps it and a resume compares it; a model in a
    folder adds a hash of its `model_config`, one with BatchNorm its micro-batch.

    A hub id has no such hash: its config.json is the one we ship (or none) at the first start, and
    the hub's own once it is downloaded.
    """
    of_task = (name for name in OF_TASKS if recipe.task in own_fields()[name])
    found = {
        name: getattr(recipe, name)
        for name in (*IDENTITY, *of_task, *([STATISTICS] if has_norms else []))
    }
    if recipe.epochs:
        found["steps"] = 0  # they follow from the epochs and the data
    found["batch_ramp"] = written(recipe.ramp.table[1:])  # however its words are spaced
    if Path(recipe.model).is_dir():
        found["model_config"] = hashlib.sha256(
            json.dumps(model_config, sort_keys=True).encode()
        ).hexdigest()[:16]
    return found


def files_of_run(saved: Path | None) -> dict[str, dict[str, str]]:
    """Reads the digests that the run in this run or step folder recorded: domain -> file -> digest;
    {} if it recorded none.
    """
    for run in [saved, saved.parent.parent] if saved else []:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((run / DATA_FILES).read_bytes())
            return (
                found
                if isinstance(found, dict)
                and all(isinstance(files, dict) for files in found.values())
                else {}
            )
    return {}


def day_of_run(saved: Path | None) -> str:
    """Return the date of the first start of the run in this run or step folder; "" if run.json has
    no date.
    """
    return str(next((facts["date"] for facts in _facts_above(saved) if "date" in facts), ""))


def commits_of_run(saved: Path | None) -> dict[str, Any]:
    """Return the commits that the run in this run or step folder has read from the hub: model,
    tokenizer, datasets; {} if it has recorded none.
    """
    return next((facts[COMMITS] for facts in _facts_above(saved) if COMMITS in facts), {})


def _facts_above(saved: Path | None) -> list[dict[str, Any]]:
    """Return the contents of run.json of a run folder, or of the run that a step folder belongs
    to.
    """
    return [facts_of_run(run) for run in (saved, saved.parent.parent)] if saved else []


def pins(resume: str, out: Path, asked: Mapping[str, str]) -> dict[str, str]:
    """Return the revisions to read: commits of the run to resume, if it was begun with the same
    flags.

    `asked` are the model, the data set and their revisions.
    """
    folder = out if resume == "auto" else Path(resume)
    commits = commits_of_run(folder)
    if resume == "never" or not commits:
        return {}
    facts = next((facts["identity"] for facts in _facts_above(folder) if "identity" in facts), {})
    same = lambda *names: all(facts.get(name) == asked[name] for name in names)  # noqa: E731
    changes = {}
    if commits.get("model") and same("model", "model_revision"):
        changes["model_revision"] = commits["model"]
    if (
        asked["dataset_revision"]
        and len(commits.get("datasets", {})) == 1
        and same("dataset", "dataset_revision")
    ):
        (changes["dataset_revision"],) = commits["datasets"].values()
    return changes


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl, [] without the file.

    A running job may be writing the last line.
    """
    try:
        content = (run / METRICS).read_bytes()
    except FileNotFoundError:
        return []
    return [line for line in map(parsed_line, content.splitlines(keepends=True)) if line]


def parsed_line(line: bytes) -> dict[str, Any]:
    """Return the metrics of a line of metrics.jsonl; {} if the line is incomplete, or damaged as by
    a loss of power.
    """
    with contextlib.suppress(ValueError):
        found = json.loads(line) if line.endswith(b"\n") else None
        if isinstance(found, dict) and isinstance(found.get("step"), int):
            return found
    return {}


def numbers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the values of metrics.jsonl's lines that training decides, without clocks and
    machines: equal runs have equal numbers.
    """
    return [
        {
            key: line[key]
            for key in NUMBERS
            if key in line and (key != "tokens" or unit_of(line) == key)
        }
        for line in lines
    ]


def unit_of(line: Mapping[str, Any]) -> str:
    """Return the key of metrics.jsonl that counts what a run has trained on: "tokens" or "samples".

    Tasks of samples wrote both keys, with the same value, until November 2026.
    """
    return "samples" if "samples" in line else "tokens"


def put_aside(out: Path) -> None:
    """Move an existing run folder to the first free `<name>.N`.

    Nothing is overwritten, and a folder that is no run stays.
    """
    if not (out / FACTS).exists() and not (out / CHECKPOINTS).is_dir():
        return
    number = 1
    while (aside := out.with_name(f"{out.name}.{number}")).exists():
        number += 1
    os.rename(out, aside)
    print(f"the run that was in {out} is now in {aside}")
