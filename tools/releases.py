"""Judge releases of transformers, torch and peft, and write a row for each into
recipes/VERSIONS.md. Tiny models train in each kind of layout and are compared with plain PyTorch.

    python tools/releases.py --transformers 5.22.2 5.24.0     # a minute or two for each release
    python tools/releases.py --torch 2.14.1                   # a download of up to 3 GB
    python tools/releases.py --check                          # the pin and the oldest; no page
    python tools/releases.py --transformers 5.25.0 --all      # also all model types: hours

A release is installed into a folder of .cache/releases, which only the cells' process has on its
path. The present environment does not change. With several packages, each combination is one
environment. tools/make/release_cells.py describes the cells.

Exit code 0: every cell agrees. Exit code 1: the last line names the worst cell.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

from recipekit.hosts.transformers_release import OLDEST_RELEASE, pinned_release
from recipekit.spec.atomic_write import write_atomic
from recipekit.spec.packages import require_packages

PAGE = ROOT / "recipes" / "VERSIONS.md"
CELLS = ROOT / "tools" / "make" / "release_cells.py"
CACHE = ROOT / ".cache" / "releases"
INSTALLING = threading.Lock()
CHOSEN = ("transformers", "torch", "peft")  # packages whose release may be chosen
COLUMNS = ("transformers", "torch", "deepspeed", "peft")
BEGIN = "<!-- written by python tools/releases.py -->\n"
END = "<!-- end of what is written -->\n"
HEAD = (
    "| transformers | torch | DeepSpeed | peft | date | result |\n"
    "| --- | --- | --- | --- | --- | --- |"
)
SUPPORT_PAGES = ("SUPPORT.md", "SUPPORT_MLM.md", "SUPPORT_IMAGES.md")
LIMIT = 900.0  # seconds for the cells of a release


@dataclass(frozen=True)
class Judged:
    """The result of a release. `worst` is empty if every cell agrees."""

    releases: dict[str, str]  # package -> version
    deviation: float  # largest relative deviation of a loss or a gradient norm
    worst: str  # the cell that deviates most, with its step, tensor and message
    num_wrong: int = 0
    seconds: float = 0.0

    @property
    def title(self) -> str:
        return ", ".join(f"{name} {self.releases[name]}" for name in CHOSEN)

    @property
    def result(self) -> str:
        more = f" (and {self.num_wrong - 1} more cells)" if self.num_wrong > 1 else ""
        return f"{self.worst}{more}" if self.worst else f"right to {self.deviation:.1e}"


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name in CHOSEN:
        parser.add_argument(
            f"--{name}", nargs="+", metavar="V", help=f"releases of {name} (default: installed)"
        )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="releases at a time")
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"judge the pinned transformers and {OLDEST_RELEASE}, and do not write the page",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="also run the support matrices and list each mark that differs from the pages (hours)",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="only write tools/make/release_cells.json, with the installed releases",
    )
    arguments = parser.parse_args(argv)
    named = [name for name in CHOSEN if getattr(arguments, name)]
    if named and (arguments.check or arguments.record):
        parser.error(f"--{named[0]} cannot be combined with --check or --record")
    if arguments.jobs < 1:
        parser.error("--jobs must be at least 1")
    if arguments.check:
        arguments.transformers = [OLDEST_RELEASE, pinned_release()]
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Judge the releases that a command line names, and return the exit code."""
    arguments = read_arguments(argv)
    require_packages()
    if arguments.record:
        return subprocess.run([sys.executable, CELLS, "--record"], check=False).returncode
    choices = [
        [(name, found) for found in getattr(arguments, name) or [installed_release(name)]]
        for name in CHOSEN
    ]
    pairs = [dict(pair) for pair in itertools.product(*choices)]

    judged: list[Judged] = []
    with ThreadPoolExecutor(arguments.jobs) as threads:
        for found in threads.map(judge_releases, pairs):
            print(f"{found.title}: {found.result} ({found.seconds:.0f} s)", flush=True)
            judged.append(found)
            if not arguments.check:
                write_atomic(PAGE, with_row(PAGE.read_text(), found))
    installed = [
        pair
        for pair, found in zip(pairs, judged, strict=True)
        if arguments.all and not found.result.startswith("pip:")
    ]
    changed = [line for pair in installed for line in run_matrices(pair)]
    print("\n".join(changed), end="\n" if changed else "")

    wrong = [found for found in judged if found.worst]
    if wrong:
        worst = max(wrong, key=lambda found: found.deviation)
        print(f"worst: {worst.title}: {worst.worst}")
    return int(bool(wrong))


# Environments
# --------------------------------------------------------------------------------------------------


def installed_release(name: str) -> str:
    return version(name).partition("+")[0]


def environment_of(pair: dict[str, str]) -> dict[str, str]:
    """Install the releases of a pair that are not installed, and return the variables of a process
    that imports them.

    Raises `subprocess.CalledProcessError` if pip fails.
    """
    folders = [
        str(install(name, wanted))
        for name, wanted in pair.items()
        if wanted not in (version(name), installed_release(name))
    ]
    present = filter(None, [os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": os.pathsep.join([*folders, *present])}


def install(name: str, wanted: str) -> Path:
    """Install a release into a folder of the cache, unless it is there, and return the folder.

    Only torch comes with its dependencies, because a release for GPUs needs its own libraries.
    """
    with INSTALLING:
        return _install(CACHE / f"{name}-{wanted}", name, wanted)


def _install(folder: Path, name: str, wanted: str) -> Path:
    if folder.exists():
        return folder
    partial = CACHE / f"{name}-{wanted}.{os.getpid()}"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    alone = [] if name == "torch" else ["--no-deps"]
    try:
        subprocess.run(
            [*pip, *alone, "--target", str(partial), f"{name}=={wanted}"],
            check=True,
            capture_output=True,
            text=True,
        )
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


# Judging
# --------------------------------------------------------------------------------------------------


def judge_releases(pair: dict[str, str]) -> Judged:
    """Run the cells with the releases of a pair: package -> version."""
    releases = pair | {"deepspeed": version("deepspeed")}
    title = "-".join(pair.values())
    results = CACHE / f"cells-{title}.json"
    CACHE.mkdir(parents=True, exist_ok=True)
    results.unlink(missing_ok=True)
    try:
        environment = environment_of(pair)
    except subprocess.CalledProcessError as error:
        return Judged(releases, 1.0, f"pip: {last_line(error.stderr)}", 1)
    try:
        done = subprocess.run(
            [sys.executable, CELLS, "--results", results],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Judged(releases, 1.0, f"cells: did not end within {LIMIT:.0f} s", 1)
    if not results.exists():
        return Judged(releases, 1.0, f"cells: {last_line(done.stderr)}", 1)
    return read_verdicts(json.loads(results.read_text()))


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")[:300]


def read_verdicts(written: dict[str, Any]) -> Judged:
    """Return the result of a release from the verdicts that release_cells.py wrote.

    The worst cell is the one that deviates most. If plain PyTorch differs from the record as well,
    it comes first, because a changed default explains the others.
    """
    cells: dict[str, dict[str, Any]] = written["cells"]
    wrong = {name: cell for name, cell in cells.items() if cell["message"]}
    deviation = max(cell["deviation"] for cell in cells.values())
    releases = {name: text.partition("+")[0] for name, text in written["versions"].items()}
    if not wrong:
        return Judged(releases, deviation, "", 0, written["seconds"])
    name = max(wrong, key=lambda name: (name.startswith("plain"), wrong[name]["deviation"]))
    cell = wrong[name]
    where = f"step {cell['step']}, {cell['tensor']}: " if cell["step"] else ""
    worst = f"{name}: {where}{cell['message']}"
    return Judged(releases, deviation, worst, len(wrong), written["seconds"])


# The page
# --------------------------------------------------------------------------------------------------


def with_row(page: str, judged: Judged) -> str:
    """Return the page with the row of a release, which replaces an older row for it."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    key = [judged.releases[name] for name in COLUMNS]
    rows = [row for row in map(cells_of, table.splitlines()) if row and row[: len(key)] != key]
    result = judged.result.replace("|", "\\|")
    rows.append([*key, time.strftime("%Y-%m-%d"), result])
    rows.sort(key=lambda row: [list(map(int, re.findall(r"\d+", cell))) for cell in row[:4]])
    lines = [HEAD, *(f"| {' | '.join(row)} |" for row in rows)]
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n\n{END}{after}"


def cells_of(line: str) -> list[str]:
    """Return the cells of a row of a table; [] for its head and for other lines."""
    if not line.startswith("| ") or line.startswith(("| ---", "| transformers", "| type")):
        return []
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


# The support matrices
# --------------------------------------------------------------------------------------------------


def run_matrices(pair: dict[str, str]) -> Iterator[str]:
    """Write the SUPPORT pages with the releases of a pair, in a copy of the project, and yield a
    line for each mark that differs.

    Finished cells are kept, so the same command continues after a stop.
    """
    folder = CACHE / f"matrices-{'-'.join(pair.values())}"
    for name in ("recipes", "tools", "ds_configs", "requirements.txt"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / name, folder / name)
    environment = environment_of(pair)
    path = os.pathsep.join([str(folder / "recipes"), environment["PYTHONPATH"]])
    subprocess.run(
        [
            sys.executable,
            folder / "tools" / "make" / "support_matrix.py",
            "--results",
            folder / "results.json",
        ],
        env=environment | {"PYTHONPATH": path},
        check=True,
    )
    for page in SUPPORT_PAGES:
        before = (ROOT / "recipes" / page).read_text()
        yield from changed_marks(page, before, (folder / "recipes" / page).read_text())


def changed_marks(page: str, before: str, after: str) -> list[str]:
    """Return a line for each model type whose marks differ between two texts of a page.

    The numbers of the deviations are not compared.
    """
    marks = [
        {
            row[0]: [re.sub(r" ?\d[\d.e-]*", "", cell) for cell in row[1:]]
            for row in map(cells_of, text.splitlines())
            if row
        }
        for text in (before, after)
    ]
    was, now = marks
    return [
        f"{page}: {name}: {' | '.join(was.get(name, ['no row']))} -> "
        f"{' | '.join(now.get(name, ['no row']))}"
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name)
    ]


if __name__ == "__main__":
    sys.exit(main())
