"""Local paths that a flag, a recipe or a JSON names."""

import os
import re
import stat
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from .errors import config_error

# Matches s3://bucket and file:///data, dbfs:/data and worker-1:/data, and user@worker-1:data.
ADDRESS_PATTERN = re.compile(r".*://|[^/]*:/|[^/@\s]+@[^/:@\s]+:", re.DOTALL)
VARIABLE_PATTERN = re.compile(r"\$(?:(\w+)|\{(\w*)\}|(\{))")
PLACEHOLDER_PATTERN = re.compile(r"\{([^{}/]*)\}")
# Set by Slurm, PBS, LSF, Flux and Grid Engine. launch/k8s.yaml sets LAUNCH_JOB_ID.
JOB_IDS = ("LAUNCH_JOB_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "JOB_ID")
RUN_ID, SWEEP_ID = "WANDB_RUN_ID", "WANDB_SWEEP_ID"
FOLDER_NAME_PATTERN = re.compile(r"[\w@+=,\[\]-][\w@+=,.\[\]-]*")


def local_path(where: str, text: str) -> Path:
    """Return the path that `text` names on this machine, with `~` and `$VAR` expanded.

    `where` is the flag or key with its value, for the message. Raise `ConfigError` for an address,
    an unset variable, an unknown user or blank text. Each of these would otherwise be interpreted
    as a folder with that name, or as the current folder.
    """

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if not name:
            raise config_error(
                where, f"{text[found.start() :]} is not a valid variable", "write $NAME or ${NAME}"
            )
        if not os.environ.get(name, "").strip():
            state = "is empty" if name in os.environ else "is not set"
            raise config_error(
                where, f"the variable {name} {state}", f"export {name}, or write the path itself"
            )
        return os.environ[name]

    if not text.strip():
        raise config_error(where, "must not be empty or blank", "check the variables of your shell")
    expanded = VARIABLE_PATTERN.sub(value, text)
    if ADDRESS_PATTERN.match(expanded):
        rule = "must be a path on this machine, not an address"
        raise config_error(
            where, rule, "use a local or mounted folder, and copy to or from the address yourself"
        )
    path = Path(expanded)
    if expanded.startswith("~"):
        try:
            path = path.expanduser()
        except RuntimeError:
            raise config_error(
                where,
                f"the user {path.parts[0][1:]} does not exist",
                "write the full path of the folder",
            ) from None
    if "~" in path.parts:
        raise config_error(
            where, "~ is expanded only at the start of a path", "write the full path of the folder"
        )
    return path


def path_exists(text: str) -> bool:
    """Return True if `text` names a file or folder.

    Return False for a list of files whose text is longer than a file name can be.
    """
    return os.path.exists(os.path.expanduser(text))


def write_with_umask(file: Path, write: Callable[[Path], object]) -> None:
    """Call `write` to write `file`, then set the file's mode according to the umask.

    safetensors 0.8's save_file ignores the umask and creates a file that only its owner can read.
    """
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    write(file)
    file.chmod(mode)


def check_cache(where: str, text: str) -> None:
    """Raise `ConfigError` if the folder named by `text` cannot be created or is a file.

    An existing folder need not be writable, because it may already contain every file.
    """
    folder = local_path(where, text).absolute()
    there = next(above for above in (folder, *folder.parents) if above.exists())
    if not there.is_dir():
        raise config_error(
            where,
            f"cannot be created: {there} is not a folder",
            "name a folder that you can write to, or use off",
        )
    if there != folder and not os.access(there, os.W_OK):
        raise config_error(
            where,
            f"cannot be created: {there} is not writable for this user",
            "name a folder that you can write to, or use off",
        )


def path_argument(text: str) -> Path:
    """Return the `local_path` of an argument. Usable as an argparse type.

    argparse puts the argument's name before the message.
    """
    try:
        return local_path(text, text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def run_folder(text: str, default: str, is_dry_run: bool = False) -> Path:
    """Return the run folder for the `--out` value, or for `default` if the value is empty.

    Fill in `{job_id}` and `{wandb_run_id}`. A dry run keeps placeholders whose values are known
    only inside the job. In a W&B sweep, each trial has a separate folder named after its W&B run.
    Raise `ConfigError` if the text is not a valid path, or if a placeholder has no value.
    """
    text = text if text.strip() else default
    where = f"out = {text}"

    def value(found: re.Match[str]) -> str:
        names = {"job_id": JOB_IDS, "wandb_run_id": (RUN_ID,)}.get(found[1].lower())
        if names is None:
            raise config_error(
                where, f"{found[0]} is not a known placeholder", "use {job_id} or {wandb_run_id}"
            )
        number = next((os.environ[name] for name in names if os.environ.get(name)), "")
        if not number and is_dry_run:
            return found[0]
        if not number:
            needs = (
                "a job of a scheduler"
                if names is JOB_IDS
                else f"{RUN_ID}, as `wandb agent` sets it"
            )
            raise config_error(
                where,
                f"{found[0]} requires {needs}",
                "write a folder name instead, or start the run there",
            )
        return _folder_name(where, number)

    sweep = os.environ.get(SWEEP_ID, "")
    is_own = any(found[1].lower() == "wandb_run_id" for found in PLACEHOLDER_PATTERN.finditer(text))
    if sweep and not is_own:
        if not os.environ.get(RUN_ID) and not is_dry_run:
            rule = f"{RUN_ID} is not set, so this trial has no separate folder"
            raise config_error(
                f"{SWEEP_ID} = {sweep}",
                rule,
                f"set both variables, as `wandb agent` does, or unset {SWEEP_ID}",
            )
        base = f"{text}_sweep_{_folder_name(where, sweep)}" if text == default else text
        text = f"{base}/{{wandb_run_id}}"
    # ${NAME} is a variable, not a placeholder.
    filled = re.sub(rf"(?<!\$){PLACEHOLDER_PATTERN.pattern}", value, text)
    return local_path(where, filled)


def say_trial(out: Path) -> list[str]:
    """Return the line about a trial's run folder, or [] outside a W&B sweep."""
    sweep = os.environ.get(SWEEP_ID)
    return [f"out: {out}, the folder of this trial of W&B sweep {sweep}"] if sweep else []


def _folder_name(where: str, text: str) -> str:
    if not FOLDER_NAME_PATTERN.fullmatch(text):
        raise config_error(
            where, f"{text!r} is not a valid folder name", "use letters, digits, - and _ in the id"
        )
    return text
