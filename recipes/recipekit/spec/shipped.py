"""Recipes and strategies shipped with this package, in a clone or an installed wheel."""

import json
from pathlib import Path

from .paths import path_argument

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
# pyproject.toml includes both folders in the wheel's package. In a clone they are outside the
# package.
IS_WHEEL = (PACKAGE_FOLDER / "ds_configs").is_dir()
RECIPES = PACKAGE_FOLDER / "recipes" if IS_WHEEL else PACKAGE_FOLDER.parent
STRATEGIES = PACKAGE_FOLDER / "ds_configs" if IS_WHEEL else PACKAGE_FOLDER.parents[1] / "ds_configs"
CHECK_RECORDS = RECIPES / "checked.json"  # written by tools/check_recipes.py
NOT_CHECKED = "-"


def recipes() -> dict[str, Path]:
    """Map each shipped recipe's name to its file."""
    return {file.stem: file for file in sorted(RECIPES.glob("*.py"))}


def strategies() -> dict[str, Path]:
    """Map each shipped strategy's file name, such as `zero2.json`, to its file."""
    return {file.name: file for file in sorted(STRATEGIES.glob("*.json"))}


def last_check(name: str) -> tuple[str, str]:
    """Return the date of a recipe's last --tiny run on a CPU, and the recipe's GPU figure.

    Both are "-" if no such run is recorded.
    """
    entry = json.loads(CHECK_RECORDS.read_text()).get(name, {})
    return entry.get("cpu", NOT_CHECKED), entry.get("gpu", NOT_CHECKED)


def recipe_path(text: str) -> Path:
    """Return a recipe's path. Usable as an argparse type.

    If `text` is the name of a shipped recipe rather than a file, return the shipped file.
    """
    path = path_argument(text)
    is_name = text == path.name and not path.exists()
    return recipes().get(path.name.removesuffix(".py"), path) if is_name else path
