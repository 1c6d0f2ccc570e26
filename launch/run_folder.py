"""A recipe's run folder, read from outside the run."""

import ast
import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

# These values are the same as in recipekit/spec/paths.py.
JOB_IDS = ("LAUNCH_JOB_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "JOB_ID")
ADDRESS = r".*://|[^/]*:/|[^/@\s]+@[^/:@\s]+:"
CONTINUES = ("--resume", "auto")  # words that continue a run
# Errors that a missing file raises. NotADirectoryError occurs if `runs` is a file.
NONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def out_of(words: tuple[str, ...]) -> Path:
    """Return the run folder for a recipe's command line.

    The folder is --out, the `out` that the recipe's file states as plain text, or runs/<recipe>.
    With --tiny, the default is runs/<recipe>_tiny.
    """
    default = "runs/" + Path(words[0]).stem + ("_tiny" if "--tiny" in words[1:] else "")
    return Path(_filled(stated_out(words) or "", default, dict(os.environ)) or default)


def stated_out(words: tuple[str, ...]) -> str | None:
    """Return the --out of a command line, or the `out` in the recipe's file.

    The result is "" if neither is set, and None if the file computes the value.
    """
    out = ""
    for index, word in enumerate(words):
        if word == "--out" and index + 1 < len(words):
            out = words[index + 1]
        elif word.startswith("--out="):
            out = word.removeprefix("--out=")
    return out or _out_in(Path(words[0]))


def is_address(text: str) -> bool:
    """Return True for s3://bucket, host:/folder and similar addresses."""
    return bool(re.match(ADDRESS, text))


def _filled(out: str, default: str, variables: dict[str, str]) -> str:
    """Return the run folder in the way that recipekit/spec/paths.py reads it.

    The result is "" for a string that recipekit rejects, so that rank 0 can report the error.
    """
    text = out or default
    if (sweep := variables.get("WANDB_SWEEP_ID")) and "{wandb_run_id}" not in text.lower():
        text = f"{out or f'{default}_sweep_{sweep}'}/{{wandb_run_id}}"
    values = {
        "job_id": next((variables[name] for name in JOB_IDS if variables.get(name)), ""),
        "wandb_run_id": variables.get("WANDB_RUN_ID", ""),
    }
    text = re.sub(
        r"(?<!\$)\{([^{}/]*)\}", lambda found: values.get(found[1].lower()) or found[0], text
    )
    text = re.sub(
        r"\$(?:(\w+)|\{(\w+)\})",
        lambda found: variables.get(found[1] or found[2]) or found[0],
        text,
    )
    text = os.path.expanduser(text)
    return "" if is_address(text) or re.search(r"\$\w|[{}]|(^|/)~", text) else text


def is_recipe(words: tuple[str, ...]) -> bool:
    """Return True for a script that uses recipekit.

    Such a script has a run folder with checkpoints.
    """
    try:
        return b"recipekit" in Path(words[0]).read_bytes()
    except OSError:
        return False


def _out_in(recipe: Path) -> str | None:
    """Read the `out` in `RECIPE = Recipe(...)` without running the file.

    The result is "" if the recipe does not set `out`, and None if the value is not plain text.
    """
    try:
        tree = ast.parse(recipe.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""  # the ranks will report the error in the file
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Recipe":
            for given in node.keywords:
                if given.arg == "out":
                    value = given.value.value if isinstance(given.value, ast.Constant) else None
                    return value if isinstance(value, str) else None
    return ""


def metrics(out: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl."""
    return _lines(out / "metrics.jsonl")


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSON file with one line for each step or alert.

    Lines that a crash has damaged are omitted. The next start removes them from metrics.jsonl.
    """
    try:
        content = path.read_bytes()
    except NONE:
        return []
    lines = []
    for line in content.splitlines(keepends=True):
        with contextlib.suppress(ValueError):
            found = json.loads(line) if line.endswith(b"\n") else None
            lines += [found] if isinstance(found, dict) and "step" in found else []
    return lines


# Advice for each kind of alert that ends a run.
WAYS_ON = {
    "spike": ". Continue with --on_spike alert, or with --resume OUT and a lower --lr",
    "nonfinite": ". Continue with --on_nonfinite skip, or with --resume OUT and a lower --lr",
}


def alerts(out: Path, since: float) -> list[dict[str, Any]]:
    """Return the complete lines of alerts.jsonl.

    Alerts from before `since` (seconds since 1970) are of an earlier job.
    """
    return [alert for alert in _lines(out / "alerts.jsonl") if alert.get("time", 0.0) >= since]


def own_stop(out: Path, since: float) -> str:
    """Return why the run stopped itself and how to continue it, or "" if it did not.

    A run stops itself by an alert with the answer "stop", which is then its last one.
    """
    for alert in alerts(out, since)[-1:]:
        if alert.get("answer") == "stop":
            return f"{alert.get('text', '')}{WAYS_ON.get(str(alert.get('kind')), '')}"
    return ""


def last_step(out: Path) -> int:
    """Return the last step in metrics.jsonl, or 0 if there is no step."""
    lines = metrics(out)
    return lines[-1]["step"] if lines else 0


def next_words(words: tuple[str, ...], out: Path, since: float) -> tuple[str, ...]:
    """Return the command line for a job's next start.

    The next start continues from the files that the job has written since `since` (seconds since
    1970). A typed `--resume never` would start from scratch again, and `--resume PATH` would return
    to PATH. Therefore `--resume PATH` is kept only until the job has written a checkpoint.
    """
    began_anew = _recipe(out).get("resume") == "never"
    saved = (
        _changed(out / "checkpoints" / newest_checkpoint(out) / "manifest.json")
        if newest_checkpoint(out)
        else 0.0
    )
    if saved >= since or (began_anew and written(out) >= since):
        return (*words, *CONTINUES)
    return words


def goal(out: Path) -> int | None:
    """Return the step at which the run in `out` ends, or None if no run has started there."""
    recipe = _recipe(out)
    return recipe.get("stop_at") or recipe.get("steps")


def _recipe(out: Path) -> dict[str, Any]:
    """Return the recipe recorded in run.json, or {} if the file is missing or damaged."""
    with contextlib.suppress(*NONE, ValueError, KeyError, TypeError):
        return dict(json.loads((out / "run.json").read_bytes())["recipe"])
    return {}


def newest_checkpoint(out: Path) -> str:
    """Return the name of the newest step folder with a manifest, or "" if there is no such folder.

    `latest` is not used, because it may be a link, or out of date after a full disk.
    """
    try:
        names = [name for name in os.listdir(out / "checkpoints") if step_of(name) is not None]
    except NONE:
        return ""
    complete = [name for name in names if (out / "checkpoints" / name / "manifest.json").is_file()]
    return max(complete, key=lambda name: step_of(name) or 0, default="")


def step_of(name: str) -> int | None:
    """Return the step number of the folder `name`, or None if it is not a step folder.

    The rule is the same as in recipekit/spec/step_names.py.
    """
    found = re.fullmatch(r"step_([0-9]{8,})", name)
    return int(found[1]) if found and f"step_{int(found[1]):08d}" == name else None


def written(out: Path) -> float:
    """Return the time of the last write to run.json (seconds since 1970), or 0 if it is missing."""
    return _changed(out / "run.json")


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except NONE:
        return 0.0
