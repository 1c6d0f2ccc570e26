"""The recipes in recipes/, loaded, planned and started."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

from pool import ROOT, environment, free_port
from recipekit.plan import RunPlan, resolve_run
from recipekit.spec.command import parse

FILES = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.py"))}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", FILES[name])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plan(name: str, *argv: str) -> RunPlan:
    return resolve_run(parse(load(name).RECIPE, FILES[name], ["--dry_run", *argv]))


def tiny_command(name: str, out: Path) -> list[str]:
    """Return the command that trains a recipe's tiny form for three steps on two ranks."""
    launcher = shutil.which("deepspeed", path=environment()["PATH"])
    assert launcher
    argv = [launcher, "--num_gpus", "2", "--master_port", str(free_port()), str(FILES[name])]
    return [*argv, "--tiny", "--steps", "3", "--eval_every", "1", "--out", str(out)]
