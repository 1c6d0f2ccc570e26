"""Files that come with this package: recipes and strategies, in a clone or in an installed wheel."""

from pathlib import Path

from .paths import path_of

KIT = Path(__file__).resolve().parent
IS_WHEEL = (KIT / "ds_configs").is_dir()  # pyproject.toml puts both folders into the package; a clone has them outside
RECIPES = KIT / "recipes" if IS_WHEEL else KIT.parent
STRATEGIES = KIT / "ds_configs" if IS_WHEEL else KIT.parents[1] / "ds_configs"


def recipes() -> dict[str, Path]:
    """Map the name of each recipe to its file."""
    return {file.stem: file for file in sorted(RECIPES.glob("*.py"))}


def strategies() -> dict[str, Path]:
    """Map the file name of each strategy, as in `zero2.json`, to its file."""
    return {file.name: file for file in sorted(STRATEGIES.glob("*.json"))}


def recipe_path(text: str) -> Path:
    """Return the path of a recipe for argparse: as typed, or the shipped recipe if `text` is its name and no file."""
    path = path_of(text)
    is_name = text == path.name and not path.exists()
    return recipes().get(path.name.removesuffix(".py"), path) if is_name else path
