"""Run recipes with --tiny on the CPU, and write the date of each success to recipes/checked.json
and README.md's table.

    python tools/check_recipes.py                     # all recipes, about a minute each
    python tools/check_recipes.py llama_nano_zero2    # only the named recipes
    python tools/check_recipes.py --no-run            # only update the GPU figures and the table

Each recipe trains 3 steps with 2 processes, without GPU and network. If it ends with exit code 0,
its CPU date is today. If it fails, it keeps its date, and the tool ends with exit code 1. GPU
figures come from the `Measured:` line of the recipes' docstrings, as in `Measured: 2026-11-21, 8 x
H200, torch 2.13.0: 1,234 tokens/s.` "-" means not measured.
"""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

from recipekit.hosts.ports import free_port
from recipekit.spec import shipped
from recipekit.spec.atomic_write import write_atomic
from recipekit.spec.packages import require_packages

README = ROOT / "README.md"
# the same flags as in test_recipe_trains_tiny_by_its_command
TINY = ("--tiny", "--steps", "3", "--eval_every", "1")
ON_CPU = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "TOKENIZERS_PARALLELISM": "false",
}
MEASURED = re.compile(
    r"\bMeasured: (\d{4}-\d\d-\d\d), (\d+ x [A-Z][\w-]*)[^:]*: .*?([\d,.]+ (?:tokens|samples)/s)"
)
# A recipe's row in README.md; `checked` is the last of the 5 cells.
ROW = re.compile(r"^(\| `(\w+)` \|(?:[^|\n]+\|){3}) [^|\n]+ \|$", re.MULTILINE)
LIMIT = 480.0  # seconds per recipe; offload compiles its ops in the first run
LAST_LINES = 20  # number of characters of a failed recipe's output that are printed


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes to run (default: all)")
    parser.add_argument(
        "--no-run",
        "--no_run",
        action="store_true",
        help="run no recipe; only update the GPU figures and the table",
    )
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.names if name not in shipped.recipes()]:
        parser.error(f"{', '.join(unknown)}: not a recipe; recipekit ls lists the names")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the recipes, record each success, and return the exit code."""
    arguments = read_arguments(argv)
    if arguments.no_run:
        record({})
        return 0
    require_packages()
    failed = []
    for name in arguments.names or shipped.recipes():
        print(f"{name}: running", flush=True)
        if problem := run_tiny(shipped.recipes()[name]):
            failed.append(f"{name}: {problem}")
            print(failed[-1], flush=True)
        else:
            record({name: date.today().isoformat()})
            print(f"{name}: {cell(name)}", flush=True)
    if failed:
        print("These recipes keep their earlier date:", *failed, sep="\n", file=sys.stderr)
    return 1 if failed else 0


def command(recipe: Path, out: Path) -> list[str]:
    """Return the command that trains a recipe with --tiny."""
    deepspeed = shutil.which("deepspeed", path=str(Path(sys.executable).parent)) or "deepspeed"
    return [
        deepspeed,
        "--num_gpus",
        "2",
        "--master_port",
        str(free_port()),
        str(recipe),
        *TINY,
        "--out",
        str(out),
    ]


def run_tiny(recipe: Path, seconds: float = LIMIT) -> str:
    """Run a recipe with --tiny in a temporary folder; return the problem, or "" if it succeeds."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(prefix="check_") as folder:
        log = Path(folder) / "output.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(recipe, Path(folder) / "run"),
                cwd=folder,
                env=os.environ | ON_CPU | {"PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # The launcher and its ranks form one process group, which is ended at the time
                # limit.
                start_new_session=True,
            )
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if code:
            print(*log.read_text(errors="replace").splitlines()[-LAST_LINES:], sep="\n", flush=True)
    if code is None:
        return f"did not end within {seconds:g} s"
    return f"ended with exit code {code}" if code else ""


def record(dates: dict[str, str]) -> None:
    """Write the new CPU dates, all GPU figures and the table; remove entries of recipes that no
    longer exist.
    """
    known = json.loads(shipped.CHECK_RECORDS.read_text()) if shipped.CHECK_RECORDS.exists() else {}
    entries = {
        name: {
            "cpu": dates.get(name) or known.get(name, {}).get("cpu", shipped.NOT_CHECKED),
            "gpu": gpu_figure(file.read_text()),
        }
        for name, file in shipped.recipes().items()
    }
    write_atomic(shipped.CHECK_RECORDS, json.dumps(entries, indent=1) + "\n")
    write_atomic(README, with_column(README.read_text()))


def gpu_figure(program: str) -> str:
    """Return the card, speed and date of the measurement in a recipe's docstring, or "-"."""
    for paragraph in (ast.get_docstring(ast.parse(program)) or "").split("\n\n"):
        if found := MEASURED.search(" ".join(paragraph.split())):
            return f"{found[2]}: {found[3]} ({found[1]})"
    return shipped.NOT_CHECKED


def cell(name: str) -> str:
    """Return a recipe's cell in the column `checked`."""
    return "; ".join(shipped.last_check(name))


def with_column(page: str) -> str:
    """Return README.md's text with the current cells in the column `checked`."""
    return ROW.sub(lambda row: f"{row[1]} {cell(row[2])} |", page)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end as well
    sys.exit(main())
