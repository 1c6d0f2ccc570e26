"""The releases of transformers with which the project is tested, and the check of the installed
release. Only this file compares releases: `compat` distinguishes them by a feature.
"""

import re
from importlib.metadata import PackageNotFoundError, version

from ..spec.errors import ConfigError, Problem
from ..spec.packages import pinned_requirements

OLDEST_RELEASE = "5.22.2"  # the newest tested release is the pin in requirements.txt


def pinned_release() -> str:
    """Return the release of transformers that requirements.txt pins.

    Without requirements.txt, as in a copy of recipes/ alone, the result is "".
    """
    pins = dict(line.split("==") for line in pinned_requirements() if "==" in line)
    return pins.get("transformers", "")


def check_transformers_release() -> tuple[list[Problem], list[str]]:
    """Check the installed transformers, by its metadata and without importing it.

    Return a problem if the release is older than the oldest supported one. Return a line if it is
    newer than the pinned one, except in its last number. Both lists are empty between the two, and
    if transformers is not installed. Without a pin no release is newer.
    """
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return [], []
    pinned = pinned_release()
    if release_numbers(found) < release_numbers(OLDEST_RELEASE):
        rule = f"must be {OLDEST_RELEASE} or newer"
        fix = f"run: pip install transformers=={pinned or OLDEST_RELEASE}"
        return [Problem(f"transformers {found}", rule, fix)], []
    if pinned and release_numbers(found)[:2] > release_numbers(pinned)[:2]:
        return [], [
            f"transformers {found} is newer than the tested releases, {OLDEST_RELEASE} to {pinned}:"
            f" not tested. recipes/VERSIONS.md has the command that tests it"
        ]
    return [], []


def require_supported_release() -> list[str]:
    """Return the line about a newer transformers, if any. Raise `ConfigError` for an older one."""
    too_old, untested = check_transformers_release()
    if too_old:
        raise ConfigError(too_old)
    return untested


def print_release_notes() -> None:
    """Print the line about a newer transformers, if any. Raise `ConfigError` for an older one."""
    for note in require_supported_release():
        print(note)


def release_numbers(release: str) -> tuple[int, ...]:
    """Return the numbers of a release, as (5, 24, 0), without a suffix such as rc1 or .dev0."""
    numbers = re.match(r"\d+(\.\d+)*", release)
    return tuple(map(int, numbers[0].split(".")[:3])) if numbers else ()
