"""Files that come with this package: recipes and strategies, in a clone or in an installed
wheel.
"""

import json
from pathlib import Path

from .paths import path_of

KIT = Path(__file__).resolve().parents[1]
# pyproject.toml puts both folders into the package; a clone has them outside
IS_WHEEL = (KIT / "ds_configs").is_dir()
RECIPES = KIT / "recipes" if IS_WHEEL else KIT.parent
STRATEGIES = KIT / "ds_configs" if IS_WHEEL else KIT.parents[1] / "ds_configs"
CHECKED = RECIPES / "checked.json"  # tools/check_recipes.py writes it
NOT_CHECKED = "-"


def recipes() -> dict[str, Path]:
    """Map the name of each recipe to its file."""
    return {file.stem: file for file in sorted(RECIPES.glob("*.py"))}


def strategies() -> dict[str, Path]:
    """Map the file name of each strategy, as in `zero2.json`, to its file."""
    return {file.name: file for file in sorted(STRATEGIES.glob("*.json"))}


def last_check(name: str) -> tuple[str, str]:
    """Return the date of a recipe's last run with --tiny on the CPU, and its GPU figure; "-" if
    there is no such run.
    """
    entry = json.loads(CHECKED.read_text()).get(name, {})
    return entry.get("cpu", NOT_CHECKED), entry.get("gpu", NOT_CHECKED)


def recipe_path(text: str) -> Path:
    """Return the path of a recipe for argparse: as typed, or the shipped recipe if `text` is its
    name and no file.
    """
    path = path_of(text)
    is_name = text == path.name and not path.exists()
    return recipes().get(path.name.removesuffix(".py"), path) if is_name else path
