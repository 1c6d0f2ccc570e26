"""The limits of the Slurm job in which launch runs.

They are the job's time limit, and the time between the warning signal and the kill.
"""

import re
from dataclasses import dataclass

from .errors import LaunchError
from .hosts import scontrol

# Environment variable with the seconds between the scheduler's signal and its kill.
# recipekit/runtime/stopping.py reads it.
GRACE = "LAUNCH_GRACE"
SIGNAL = re.compile(r"(?:[BR]+:)?\w+(?:@(\d+))?")  # value of sbatch's --signal
DEFAULT_WARNING = 60.0  # seconds for a --signal without @SECONDS, from sbatch's manual


@dataclass(frozen=True)
class Allocation:
    """A running Slurm job.

    Times are in seconds. `limit` is None if there is no limit. Either time is None if it is
    unknown.
    """

    state: str
    batch: bool  # True if submitted with sbatch, so that Slurm can start it again
    limit: float | None
    warning: float | None
    excluded: str = ""  # the list of nodes that the job must not use


def allocation(job: str) -> Allocation:
    """Query a job's limits from Slurm. Raises `LaunchError` if the query fails."""
    told = dict(
        word.split("=", 1)
        for word in scontrol("show", "job", "--oneliner", job).split()
        if "=" in word
    )
    batch = told.get("BatchFlag", "1") != "0"
    try:
        script = scontrol("write", "batch_script", job, "-") if batch else ""
    except LaunchError:  # only the owner and operators may read it
        script = ""
    excluded = told.get("ExcNodeList", "")
    return Allocation(
        state=told.get("JobState", ""),
        batch=batch,
        limit=seconds(told.get("TimeLimit", "")),
        warning=warning_in(script),
        excluded="" if excluded == "(null)" else excluded,
    )


def warning_in(script: str) -> float | None:
    """Return the seconds in a batch script's `#SBATCH --signal`, or None without this directive."""
    found = None
    for line in script.splitlines():
        if line.strip() and not line.startswith("#"):
            break  # sbatch ignores directives after the first command
        if directive := re.match(r"#SBATCH\s+(.*)", line):
            found = warning_of(directive[1].split()) or found
    return found


def warning_of(flags: list[str]) -> float | None:
    """Return the seconds of `--signal` among sbatch's flags, or None if the flag is missing."""
    value = _value(flags, "--signal")
    signal = SIGNAL.fullmatch(value) if value else None
    return (float(signal[1]) if signal[1] else DEFAULT_WARNING) if signal else None


def limit_of(flags: list[str]) -> float | None:
    """Return the seconds of `--time` or `-t` among sbatch's flags, or None without the flag."""
    short = next((flag[2:].lstrip("=") for flag in flags if re.match(r"-t=?\d", flag)), "")
    return seconds(_value(flags, "--time") or _value(flags, "-t") or short)


def seconds_in(text: str) -> float | None:
    """Return the seconds in LAUNCH_GRACE, or None if its text is not a positive number."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII) and float(text) > 0 else None


def _value(flags: list[str], name: str) -> str:
    """Return the last value of a flag, written as `--NAME=VALUE` or as two words.

    The result is "" if the flag is missing.
    """
    found = ""
    for flag, following in zip(flags, [*flags[1:], ""], strict=False):
        if flag == name:
            found = following
        elif flag.startswith(f"{name}="):
            found = flag.partition("=")[2]
    return found


def seconds(text: str) -> float | None:
    """Return the seconds of a time in Slurm's format, or None for UNLIMITED and other words.

    The formats are MIN, MIN:SEC, H:MIN:SEC, DAYS-H, DAYS-H:MIN and DAYS-H:MIN:SEC.
    """
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:
        units = (3600, 60, 1)
    else:
        units = (3600, 60, 1) if len(numbers) == 3 else (60, 1)
    return 86400.0 * int(days or 0) + sum(
        number * unit for number, unit in zip(numbers, units, strict=False)
    )


def short_limit(limit: float | None, warning: float | None) -> str:
    """Return a warning if a time limit allows little training before the warning signal.

    Otherwise the result is "".
    """
    if limit is None or warning is None or limit >= 2 * warning:
        return ""
    left = f"{limit - warning:.0f} s" if limit > warning else "no time"
    return (
        f"time limit {limit / 60:g} min: is shorter than twice the warning time of {warning:.0f} s,"
        f" which leaves {left} for the start and for training. Ask for a longer --time, or for a"
        " shorter warning with --signal=B:TERM@SECONDS"
    )
