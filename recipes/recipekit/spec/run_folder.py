"""Files in a run folder, and the checks that decide whether a command may resume the run."""

import contextlib
import hashlib
import json
import os
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .atomic_write import write_atomic
from .errors import ConfigError, Problem, config_error
from .recipe import Recipe
from .schedules import format_ramp
from .step_names import MANIFEST, newest_complete, step_folders, step_of
from .task_specs import task_fields

# Names in a run folder
RUN_JSON = "run.json"  # the full configuration and versions of the run (runtime/run_metadata.py)
EARLIER_VERSIONS = "earlier_versions"  # in run.json: package versions of starts before a change
STRATEGY = "ds_config.json"  # the resolved JSON, which `--deepspeed_config` accepts
METRICS = "metrics.jsonl"  # one line per step
ALERTS = "alerts.jsonl"  # one line per alert (watch/alerts.py)
REWINDS = "rewinds.json"  # the batches that rewinds have left out (runtime/rewind.py)
# Keys of a metrics line that are reproducible because they depend only on training.
REPRODUCIBLE_KEYS = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "samples",
    "global_batch",
    "eval_loss",
)
MODEL_PLAN = "model_plan"  # key of FACTS: decisions about the model (model/model_plan.py)
COMMITS_KEY = "commits"  # key of FACTS: commits of the Hub repositories that the run read
# Digests of the data files that the run read, so that a resume can name a changed file.
DATA_FILES = "data_files.json"
CHECKPOINTS = "checkpoints"  # a folder per saved step, and the LATEST file
# File in CHECKPOINTS that contains the name of the newest complete step folder, as stock DeepSpeed
# expects.
LATEST = "latest"
EXPORT = "hf"  # the trained model as Hugging Face files
MERGED = "hf_merged"  # EXPORT with the adapter merged, written by --merge after the run

ADAPTER_CONFIG = "adapter_config.json"  # exists only in the export of an adapter
MERGE = "recipekit convert to-hf --merge"

BATCH_NORM_REASON = ", which its BatchNorm took its statistics of"
# Part of the identity only if the model has BatchNorm, because BatchNorm normalises the rows of a
# micro-batch together.
BATCH_NORM_FIELD = "micro_batch"
# Fields that identify a run. A run folder can be resumed only if all of them are equal.
IDENTITY = (
    *("model", "model_revision", "init", "dataset", "subset", "split", "dataset_revision"),
    *("text_field", "messages_field", "image_field", "label_field", "augment"),
    *("num_labels", "task", "tokenizer", "seed", "seq_len", "global_batch", "batch_ramp"),
    "leave_out",
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
ADAPTER_KEY = "adapter"  # key of a run's identity: its adapter's config, or None without an adapter
NO_VALUES: Mapping[str, str] = {}
# Values that nobody typed: `steps` in a run with epochs, and `epochs` in a run with steps.
_NOT_TYPED: Mapping[str, tuple[Any, ...]] = dict.fromkeys(("steps", "epochs"), (0, None))
# Fields that `Recipe.fit_to_steps` lowers if the user types fewer steps.
SHORTENED_FIELDS = ("warmup_steps", "decay_steps", "batch_ramp", "leave_out")
# Further identity fields, each used only for the tasks that read it.
TASK_IDENTITY = (
    "prompt_field",
    "chosen_field",
    "rejected_field",
    "beta",
    "mask_rate",
    "whole_words",
)


def has_random_base(export: Path) -> bool:
    """Return True if the export is an adapter on randomly initialised weights.

    The config of such an adapter names no base model.
    """
    # The export is not an adapter, or it is damaged. Code that reads the export raises an error for
    # a damaged one.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return (
            json.loads((export / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path", "")
            is None
        )
    return False


REPOSITORY_FOLDER = Path(__file__).resolve().parents[3]


def check_out_folder(out: Path, is_blank: bool, inputs: list[tuple[str, Path]]) -> list[Problem]:
    """Return problems for a run folder that cannot be created or overlaps other folders.

    `inputs` contains (description, resolved path) pairs. The run folder must not overlap these
    paths or the repository, because run files inside a data folder would become data at the next
    start. `--resume never` moves a run folder with everything in it. `is_blank` is True if the user
    typed an empty value.
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
    for what, path in [*inputs, ("the repository", REPOSITORY_FOLDER)]:
        inside = path.is_dir() and path != REPOSITORY_FOLDER and path in out.parents
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
    """Return a problem if the run folder is not writable. No file is left behind."""
    there = next(
        folder for folder in (out.absolute(), *out.absolute().parents) if os.path.exists(folder)
    )
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return [unwritable(out, error)]
    return []


def unwritable(out: Path, error: OSError) -> Problem:
    """Return the problem for a run folder that cannot be written."""
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
    """Return the folder to resume from, or None for a new run.

    `unused` contains the recipe file's split and subset if they belong to a different dataset.
    Older runs recorded these values, so a resume accepts them.

    Raise a `ConfigError` that lists every difference from the run in `out`.
    """
    if recipe.resume == "never":
        return None
    now = run_identity(recipe, model_config)
    if recipe.resume != "auto":
        return _resume_folder(
            recipe.resume, recipe.micro_batch, recipe.stop_at or recipe.steps, out, now
        )
    if is_damaged(out):
        raise _damaged_run(out)
    if (before := _saved_identity(out)) is None:
        _check_no_checkpoints(out)
        return None
    now |= _batch_norm_identity(recipe.micro_batch, before)
    others = [
        name for name in now if before.get(name) not in (now[name], unused.get(name, now[name]))
    ]
    others.sort(key=lambda name: name not in typed)  # the flags that the user typed come first
    # The start fits these fields to the steps again, so compare only those that the user typed.
    if "steps" in others or (recipe.epochs and not recipe.steps):
        others = [name for name in others if name in typed or name not in SHORTENED_FIELDS]
    if not others:
        _check_stopped_itself(recipe, out)
        return out

    accepts = "" if BATCH_NORM_FIELD in others else f"accept the differences with --resume {out}, "
    ways = f"start a new run with --out NEW, {accepts}or put the old run aside with --resume never"
    _check_tiny(tiny, out, ways)
    raise _different_run(out, {name: (now[name], before.get(name)) for name in others}, ways)


def _check_tiny(tiny: bool, out: Path, ways: str) -> None:
    """Raise `ConfigError` if only one of this command and the run in `out` uses --tiny."""
    if tiny == read_run_json(out).get("recipe", {}).get("tiny", tiny):
        return
    if tiny:
        where, rule, other = "--tiny", "was started without it", "omit it"
    else:
        where, rule, other = "no --tiny", "was started with --tiny", "add --tiny"
    raise config_error(where, f"the run in {out} {rule}", f"{other} to resume that run, {ways}")


def _different_run(
    out: Path, differences: Mapping[str, tuple[Any, Any]], fixes: str
) -> ConfigError:
    """Return the config error for a command that differs from the run in `out`.

    `differences` maps each field to a pair: its value in this command and its value in the run.
    """
    own = {*IDENTITY, *TASK_IDENTITY, BATCH_NORM_FIELD} - {"lr_scale"}  # fields that are flags
    flags = shlex.join(
        word
        for name, (_, before) in differences.items()
        if name in own and before not in _NOT_TYPED.get(name, (None, ""))
        for word in (f"--{name}", str(before))
    )
    first = f"resume with {flags}, {fixes}" if flags else fixes

    shown = lambda value: "nothing" if value in ("", None) else value  # noqa: E731
    taken = {BATCH_NORM_FIELD: BATCH_NORM_REASON}
    return ConfigError(
        [
            Problem(
                f"{name} = {shown(now)}",
                f"the run in {out} has {shown(before)}{taken.get(name, '')}",
                "see the first problem for the ways to continue" if number else first,
            )
            for number, (name, (now, before)) in enumerate(differences.items())
        ]
    )


# For each kind of alert that ends a run: the flag that decides, another value of it, its effect.
# launch/run_folder.py has the same flags.
OTHER_ANSWERS = {
    "spike": ("on_spike", "alert", "train through it"),
    "nonfinite": ("on_nonfinite", "skip", "pass over the step"),
}


def _check_stopped_itself(recipe: Recipe, out: Path) -> None:
    """Raise `ConfigError` if an alert ended the run in `out`, and this command would repeat it.

    A launcher may start the same command again, and would then spend all its restarts on one step.
    """
    alert = last_stop(out)
    if alert is None or alert.get("kind") not in OTHER_ANSWERS:
        return
    flag, value, effect = OTHER_ANSWERS[alert["kind"]]
    if getattr(recipe, flag) != read_run_json(out).get("recipe", {}).get(flag):
        return
    way = f"use --{flag} {value} to {effect}, " if getattr(recipe, flag) != value else "use "
    raise config_error(
        f"out = {out}",
        f"contains a run that stopped itself at step {alert['step']} ({alert.get('text', '')})",
        f"{way}--resume {out} to try it once more, a lower --lr or a --leave_out with that"
        " --resume, or a new --out",
    )


def last_stop(out: Path) -> dict[str, Any] | None:
    """Return the alert that ended the run's last start, or None if no alert ended it.

    The run has taken no later step.
    """
    try:
        lines = (out / ALERTS).read_bytes().splitlines(keepends=True)
    except OSError:
        return None
    alerts = [alert for alert in map(parsed_line, lines) if alert]
    if not alerts or alerts[-1].get("answer") != "stop":
        return None
    steps = read_metrics(out)
    return alerts[-1] if not steps or steps[-1]["step"] < alerts[-1]["step"] else None


def _check_no_checkpoints(out: Path) -> None:
    """Raise `ConfigError` if `out` contains checkpoints.

    Without run.json, nothing shows that this command wrote them.
    """
    folders = [out / CHECKPOINTS, out]  # detect a step folder in the wrong place as well
    if not (found := [step for folder in folders for step in step_folders(folder)]):
        return
    newest = next((step for folder in folders if (step := newest_complete(folder))), None)
    ways = "put them aside with --resume never, or choose another folder with --out"
    rule = f"has checkpoints, such as {(newest or found[-1]).name}, but no {RUN_JSON}"
    raise config_error(
        f"out = {out}", rule, f"continue with --resume {newest}, {ways}" if newest else ways
    )


def check_adapter(now: dict[str, Any] | None, resume: str, out: Path) -> None:
    """Raise `ConfigError` if the adapter config `now` differs from the one in `out`.

    The error lists every difference. Only `--resume auto` is checked. Run folders that predate this
    check contain no adapter config, so they are resumed unchecked. Missing and false values count
    as equal, because a peft version may lack a field.
    """
    if resume != "auto" or ADAPTER_KEY not in (saved := _saved_identity(out) or {}):
        return
    before, found = saved[ADAPTER_KEY], now
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
        raise config_error(
            f"adapt {'makes one' if found else 'makes no adapter of peft'}", rule, ways
        )
    # json preserves the order of the patterns, which matters because peft uses the first matching
    # pattern.
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
        raise ConfigError(problems)


def _batch_norm_identity(micro_batch: int, before: dict[str, Any]) -> dict[str, int]:
    """Return the micro-batch if the saved run's identity includes it, otherwise {}."""
    return {BATCH_NORM_FIELD: micro_batch} if BATCH_NORM_FIELD in before else {}


def _resume_folder(
    resume: str, micro_batch: int, last_step: int, out: Path, now: dict[str, Any]
) -> Path:
    """Return the run or step folder that `--resume PATH` names.

    Raise `ConfigError` if the saved run has a different model or, with BatchNorm, a different
    micro-batch. Raise it also if `out` contains a different run, or if PATH is a finished run of a
    different command.
    """
    chosen = Path(resume)
    is_run = (chosen / CHECKPOINTS).is_dir()
    if not is_run and not (chosen / MANIFEST).is_file():
        fix = f"set --resume to runs/NAME or runs/NAME/{CHECKPOINTS}/step_00000010"
        raise config_error(
            f"resume = {resume}", "must be a run folder or one of its step folders", fix
        )
    checkpoints = (out / CHECKPOINTS).resolve()  # links in this folder may point anywhere
    inside = chosen.resolve() == out.resolve() or checkpoints in (
        chosen.resolve().parent,
        chosen.absolute().parent.resolve(),
    )
    if not inside and (out / RUN_JSON).exists() and not _same_first_start(resume, out):
        raise config_error(
            f"out = {out}",
            f"already contains a different run than {resume}",
            "choose a new folder with --out NEW",
        )
    before = _saved_identity(chosen if is_run else chosen.parent.parent)
    same = "model_config" if "model_config" in now else "model"
    if before and before.get(same) != now[same]:
        rule = f"the checkpoint in {chosen} is from another model, {before.get('model')}"
        raise config_error(
            f"model = {now['model']}",
            rule,
            f"use --model {before.get('model')}, or start a new run with --out NEW",
        )
    if before and before.get(BATCH_NORM_FIELD, micro_batch) != micro_batch:
        rule = f"the checkpoint in {chosen} has {before[BATCH_NORM_FIELD]}{BATCH_NORM_REASON}"
        raise config_error(
            f"{BATCH_NORM_FIELD} = {micro_batch}",
            rule,
            f"resume with --{BATCH_NORM_FIELD} {before[BATCH_NORM_FIELD]}, or start a new run from"
            " its export with --out NEW",
        )
    if before:
        _check_not_finished(last_step, chosen, before, now)
    return chosen


def _check_not_finished(
    last: int, chosen: Path, before: dict[str, Any], now: dict[str, Any]
) -> None:
    """Raise `ConfigError` if a different command's checkpoint leaves no steps to train.

    Such a checkpoint has already reached this command's last step.
    """
    step = _newest_step(chosen)
    others = [
        name
        for name in now
        if name not in ("steps", "epochs", *SHORTENED_FIELDS) and before.get(name) != now[name]
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
    raise config_error(
        f"resume = {chosen}",
        rule,
        f"use --steps {step + 1} or more, or start from its weights with {weights}",
    )


def _newest_step(chosen: Path) -> int:
    """Return the number of the newest step in a run folder, or of a step folder with any name.

    Return 0 if the folder contains no step.
    """
    if (chosen / CHECKPOINTS).is_dir():
        return max(
            (step_of(folder.name) or 0 for folder in step_folders(chosen / CHECKPOINTS)), default=0
        )
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((chosen / MANIFEST).read_text())["step"])
    return step_of(chosen.name) or 0


def continue_advice(resume: str, out: Path) -> str:
    """Return advice, for the end of a line, on how to resume a run that ended early."""
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


def _same_first_start(resume: str, out: Path) -> bool:
    """Return True if this command started the run in `out` and the run has no checkpoint yet.

    Starting such a run again loses nothing.
    """
    before = read_run_json(out).get("recipe", {}).get("resume")
    return before == resume and not step_folders(out / CHECKPOINTS)


def _saved_identity(run: Path) -> dict[str, Any] | None:
    """Return the identity of the run in a folder, or None if run.json is missing or damaged.

    Fields that were added after the run started have their defaults.
    """
    defaults = {
        name: Recipe.__dataclass_fields__[name].default for name in (*IDENTITY, *TASK_IDENTITY)
    }
    found = read_run_json(run).get("identity")
    return defaults | found if found is not None else None


def read_run_json(run: Path) -> dict[str, Any]:
    """Return the content of run.json, or {} if the file is missing or damaged.

    Only the parts that a resume needs are checked.
    """
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((run / RUN_JSON).read_bytes())
        if isinstance(found, dict) and all(
            isinstance(found.get(key, {}), dict) for key in ("identity", "recipe", COMMITS_KEY)
        ):
            return found
    return {}


def is_damaged(run: Path) -> bool:
    """Return True if the run folder contains a run.json without an identity.

    For example, a power failure can leave an empty run.json.
    """
    return os.path.lexists(run / RUN_JSON) and "identity" not in read_run_json(run)


def _damaged_run(out: Path) -> ConfigError:
    """Return the config error for `--resume auto` in a run folder whose run.json is damaged.

    The checkpoints can still be resumed by path because they do not need run.json.
    """
    if (newest := newest_complete(out / CHECKPOINTS)) is None:
        fix = "start a new run with --out NEW, or put this one aside with --resume never"
        return config_error(
            f"{out / RUN_JSON}", "is damaged, and the run has no complete checkpoint", fix
        )
    rule = (
        "is damaged, so this command cannot be compared with the run. Its newest complete"
        f" checkpoint is {newest.name}"
    )
    return config_error(
        f"{out / RUN_JSON}",
        rule,
        f"if the command is the same, resume with --resume {shlex.quote(str(out))}",
    )


def run_identity(
    recipe: Recipe, model_config: dict[str, Any] | None, has_norms: bool = False
) -> dict[str, Any]:
    """Return the fields that identify a run, as run.json stores and a resume compares them.

    For a local model, the identity includes a hash of its `model_config`. For a model with
    BatchNorm (`has_norms`), it includes the micro-batch.

    For a Hub id, the identity contains no such hash, because the config.json changes. At the first
    start it is the shipped copy or missing. After the download it is the file from the Hub.
    """
    of_task = (name for name in TASK_IDENTITY if recipe.task in task_fields()[name])
    found = {
        name: getattr(recipe, name)
        for name in (*IDENTITY, *of_task, *([BATCH_NORM_FIELD] if has_norms else []))
    }
    if recipe.epochs:
        found["steps"] = 0  # the steps follow from the epochs and the data
    found["batch_ramp"] = format_ramp(recipe.ramp.table[1:])  # independent of spacing
    found["leave_out"] = format_ramp(recipe.left_out.table)
    if Path(recipe.model).is_dir():
        found["model_config"] = hashlib.sha256(
            json.dumps(model_config, sort_keys=True).encode()
        ).hexdigest()[:16]
    return found


def files_of_run(saved: Path | None) -> dict[str, dict[str, str]]:
    """Return the digests that the run in this folder recorded: domain -> file -> digest.

    `saved` is a run or step folder. Return {} if the run recorded no digests.
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
    """Return the date on which the run in this run or step folder was first started.

    Return "" if run.json has no date.
    """
    return str(
        next((facts["date"] for facts in _read_run_json_above(saved) if "date" in facts), "")
    )


def leave_out_of_run(saved: Path | None) -> str:
    """Return the --leave_out of the run in this run or step folder, as its identity has it.

    Return "" if run.json has no identity.
    """
    identities = (facts.get("identity", {}) for facts in _read_run_json_above(saved))
    return str(next((found["leave_out"] for found in identities if "leave_out" in found), ""))


def commits_of_run(saved: Path | None) -> dict[str, Any]:
    """Return the Hub commits that the run recorded for model, tokenizer and datasets.

    `saved` is a run or step folder. Return {} if the run recorded no commits.
    """
    return next(
        (facts[COMMITS_KEY] for facts in _read_run_json_above(saved) if COMMITS_KEY in facts), {}
    )


def model_plan_of_run(saved: Path | None) -> dict[str, Any]:
    """Return the decisions about the model that the run recorded.

    `saved` is a run or step folder. Return {} if the run recorded no decisions.
    """
    found = next(
        (facts[MODEL_PLAN] for facts in _read_run_json_above(saved) if MODEL_PLAN in facts), {}
    )
    return found if isinstance(found, dict) else {}


def _read_run_json_above(saved: Path | None) -> list[dict[str, Any]]:
    """Return the contents of run.json in `saved` and in the folder two levels up.

    The folder two levels up is the run folder if `saved` is a step folder.
    """
    return [read_run_json(run) for run in (saved, saved.parent.parent)] if saved else []


def pinned_revisions(resume: str, out: Path, asked: Mapping[str, str]) -> dict[str, str]:
    """Return the revisions to read: a resumed run's commits if its flags were the same.

    `asked` contains the model, the dataset and their revisions.
    """
    folder = out if resume == "auto" else Path(resume)
    commits = commits_of_run(folder)
    if resume == "never" or not commits:
        return {}
    facts = next(
        (facts["identity"] for facts in _read_run_json_above(folder) if "identity" in facts), {}
    )
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


def read_rewinds(out: Path) -> list[list[int]] | None:
    """Return [step, batches] for each rewind of the run in `out`, or None without a valid file."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return [
            [int(step), int(batches)] for step, batches in json.loads((out / REWINDS).read_bytes())
        ]
    return None


def write_rewinds(out: Path, left_out: list[list[int]]) -> None:
    """Write the batches that rewinds have left out, or remove the file of a run without any.

    A checkpoint from before a rewind does not contain them. Raises OSError.
    """
    if left_out:
        write_atomic(out / REWINDS, json.dumps(left_out))
    else:
        (out / REWINDS).unlink(missing_ok=True)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl, or [] if the file is missing.

    The last line may be incomplete while a job is still writing it.
    """
    try:
        content = (run / METRICS).read_bytes()
    except FileNotFoundError:
        return []
    return [line for line in map(parsed_line, content.splitlines(keepends=True)) if line]


def parsed_line(line: bytes) -> dict[str, Any]:
    """Return the content of a line of metrics.jsonl or alerts.jsonl.

    The result is {} if the line is incomplete or damaged.
    """
    with contextlib.suppress(ValueError):
        found = json.loads(line) if line.endswith(b"\n") else None
        if isinstance(found, dict) and isinstance(found.get("step"), int):
            return found
    return {}


def reproducible_values(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the values in metrics lines that depend only on training, not on clocks or machines.

    Identical runs have equal values.
    """
    return [
        {
            key: line[key]
            for key in REPRODUCIBLE_KEYS
            if key in line and (key != "tokens" or unit_of_metrics(line) == key)
        }
        for line in lines
    ]


def unit_of_metrics(line: Mapping[str, Any]) -> str:
    """Return the metrics.jsonl key that counts the trained data: "tokens" or "samples".

    Until November 2026, tasks with samples wrote both keys with the same value.
    """
    return "samples" if "samples" in line else "tokens"


def move_run_aside(out: Path) -> None:
    """Rename an existing run folder to the first free `<name>.N`.

    Nothing is overwritten. A folder that is not a run folder is not moved.
    """
    if not (out / RUN_JSON).exists() and not (out / CHECKPOINTS).is_dir():
        return
    number = 1
    while (aside := out.with_name(f"{out.name}.{number}")).exists():
        number += 1
    os.rename(out, aside)
    print(f"the run that was in {out} is now in {aside}")
