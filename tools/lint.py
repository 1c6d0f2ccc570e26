"""Checks a DeepSpeed JSON, alone or for one recipe on a number of ranks, without starting anything.

    python tools/lint.py ds_configs/zero3.json --recipe recipes/NAME.py --world 16
    python tools/lint.py my_config.json --json-only        # a JSON of another script: keys that only the recipes ignore pass

Prints every problem with its fix. Exit code 0: clean; 1: problems; 2: wrong command line.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

from recipekit import ds_config  # noqa: E402
from recipekit.architecture import model_config  # noqa: E402
from recipekit.mesh import make_mesh  # noqa: E402
from recipekit.recipe import Recipe, check_recipe  # noqa: E402
from recipekit.refusal import Problem, Refusal, refuse  # noqa: E402


def recipe_of(path: Path) -> Recipe:
    """The `RECIPE` of a recipe's file, which starts nothing when it is imported. Raises `Refusal` if there is none."""
    if not path.is_file():
        raise refuse(f"--recipe {path}", "no such file", f"one of {', '.join(str(file) for file in sorted((ROOT / 'recipes').glob('*.py')))}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise refuse(f"--recipe {path}", "is no Python file", "give a file of recipes/")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError, TypeError, NameError, AttributeError, ValueError) as error:
        raise refuse(f"--recipe {path}", f"cannot be imported: {type(error).__name__}: {error}", "mend the file") from None
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise refuse(f"--recipe {path}", "sets no RECIPE = Recipe(...)", "give a file of recipes/")
    return recipe


def lint(name: str | None, path: Path | None, world: int | None, json_only: bool) -> tuple[list[Problem], list[str]]:
    """Every problem found, and what was decided, one line each."""
    problems: list[Problem] = []
    recipe = shape = config = file = None
    if path:
        try:
            recipe = recipe_of(path)
            problems += check_recipe(recipe)
            shape = model_config(recipe)
        except Refusal as refusal:
            problems += refusal.problems
    try:
        if name or recipe:
            config, file = ds_config.load(name or getattr(recipe, "ds_config", ""), path.resolve().parent if path else Path.cwd())
    except Refusal as refusal:
        problems += refusal.problems
    if config is None:
        return problems, []
    problems += ds_config.check(config, world=world, recipe=recipe, model_config=shape, json_only=json_only)
    lines = [f"{file or 'the JSON of the recipe'}: clean"]
    if recipe and shape is None:
        lines.append(f"{recipe.model} is not on this machine, so its heads and sizes were not checked")
    if recipe and world and not problems:
        degrees = {axis: getattr(recipe, axis) for axis in ("tp", "pp", "sp", "ep")} | ds_config.degrees(config)
        mesh = make_mesh(world, **degrees)
        resolved, notes = ds_config.resolve(config, recipe, mesh, shape)
        rows, micro, steps = (resolved[key] for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
        lines += [*notes, f"{mesh}: {rows} rows of a step = {mesh.dp} data-parallel * {micro} micro_batch * {steps} accumulation"]
    return problems, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="the JSON: a path, or a name of ds_configs/; left out: the recipe's own")
    parser.add_argument("--recipe", type=Path, help="the recipe's file: batch, model and schedule are checked with it")
    parser.add_argument("--world", type=int, help="number of ranks: layout and batch are checked for it")
    parser.add_argument("--json-only", "--json_only", action="store_true", help="let pass what has no effect in a recipe only")
    arguments = parser.parse_args()
    if arguments.config is None and arguments.recipe is None:
        parser.error("give a JSON, a --recipe, or both")
    if arguments.world is not None and arguments.world < 1:
        parser.error("--world is at least 1")
    problems, lines = lint(arguments.config, arguments.recipe, arguments.world, arguments.json_only)
    if problems:
        print(f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in {arguments.config or arguments.recipe}")
        print("\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1)))
        raise SystemExit(1)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
