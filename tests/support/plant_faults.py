"""Plant the faults of faults.json, one at a time, in a copy of this checkout, and run the quick
tests that must find each.

    # all that have no result yet; 2 to 5 minutes each
    python tests/support/plant_faults.py
    # the faults of a package; or name ids
    python tests/support/plant_faults.py --wing data
    # even if it has a result
    python tests/support/plant_faults.py --again wrong_weight
    # only whether each is still in its file, once
    python tests/support/plant_faults.py --check
    # correct the file of each fault whose code has moved
    python tests/support/plant_faults.py --mend
    # the named tests on the copy without a fault: all must pass
    python tests/support/plant_faults.py --unchanged
    # the results so far
    python tests/support/plant_faults.py --report

A fault has an `id`, a `wing` (a folder of tests/) and a `file` (below recipes/recipekit). The text
`old` occurs once in the file, and `new` replaces it. `tests` lists the files or single tests
that run first, the cheapest first. If they all pass, the other files of the folder run (not with
--named). fault_results.json stores the results. A result counts as long as `old` and `new` are
unchanged.
"""

import argparse
import ast
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTS, RESULTS = (
    ROOT / "tests" / "support" / "faults.json",
    ROOT / "tests" / "support" / "fault_results.json",
)
PACKAGE = Path("recipes") / "recipekit"
LINKED = (".venv", ".cache")  # ignored by git, and read by the tests
LIMIT = 900.0  # seconds for the tests of one fault
PRELOADED = (
    "torch",
    "transformers",
    "deepspeed",
    "datasets",
    "hypothesis",
    "safetensors.torch",
    "torch.distributed.tensor",
)


@dataclass(frozen=True)
class Fault:
    id: str
    wing: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def change(self) -> str:
        """Return a hash of the change, because a stored result is valid for one change only."""
        return hashlib.sha256(f"{self.old}\0{self.new}".encode()).hexdigest()[:12]


def read_faults() -> list[Fault]:
    return [
        Fault(**(entry | {"tests": tuple(entry["tests"])}))
        for entry in json.loads(FAULTS.read_text())
    ]


def write_faults(faults: list[Fault]) -> None:
    FAULTS.write_text(
        json.dumps([asdict(fault) for fault in faults], indent=1, ensure_ascii=False) + "\n"
    )


def read_results() -> dict[str, dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def pattern(old: str) -> re.Pattern[str]:
    """Return a pattern that matches a piece of code in every layout.

    Line breaks may differ, a closing bracket may follow an additional comma, brackets may surround
    the code, and a long string may be split into two parts.
    """
    core = old.strip()
    found = ""
    for token in re.findall(r"\w+|\s+|[^\w\s]", core):
        if token.isspace():
            found += r'(?:"\s*f?")?\s+(?:"\s*f?")?' if re.search(r"\w$", found) else r"\s*"
        else:
            found += (r",?\s*" if token in ")]}" else "") + re.escape(token)
            found += r"\s*" if not re.fullmatch(r"\w+", token) else ""
    before, _, after = old.partition(core)
    return re.compile(re.escape(before) + found.removesuffix(r"\s*") + re.escape(after))


def holders(old: str, root: Path = ROOT) -> list[str]:
    """Return the files below recipekit that contain a text, once for each occurrence."""
    files = sorted((root / PACKAGE).rglob("*.py"))
    return [
        str(file.relative_to(root / PACKAGE))
        for file in files
        for _ in pattern(old).findall(file.read_text())
    ]


def planted(fault: Fault, text: str) -> str:
    """Return a file's text with the fault planted."""
    return pattern(fault.old).sub(lambda _: fault.new, text)


def wrong(faults: list[Fault], root: Path = ROOT) -> list[str]:
    """Return an error for each fault that can no longer be planted, with the file that now contains
    its text.
    """
    found = []
    for fault in faults:
        file = root / PACKAGE / fault.file
        text = file.read_text() if file.exists() else ""
        if (count := len(pattern(fault.old).findall(text))) != 1:
            there = (
                ", ".join(dict.fromkeys(holders(fault.old, root)))
                or "no file: write the fault anew for what took its place"
            )
            found.append(
                f"{fault.id}: {fault.old!r} occurs {count} times in {fault.file}, not once; it is"
                f" in {there}"
            )
        elif fault.old == fault.new:
            found.append(f"{fault.id}: changes nothing")
        else:
            try:
                ast.parse(planted(fault, text))
            except SyntaxError as error:
                found.append(f"{fault.id}: the changed {fault.file} is no Python: {error}")
        for test in fault.tests:
            name, _, function = test.partition("::")
            if not (root / name).is_file():
                found.append(f"{fault.id}: there is no {name}")
            elif function and f"def {function.partition('[')[0]}(" not in (root / name).read_text():
                found.append(f"{fault.id}: {name} has no {function.partition('[')[0]}")
    return found


def mend(faults: list[Fault]) -> list[Fault]:
    """Update each fault's file if exactly one file now contains the fault's text."""
    mended = []
    for fault in faults:
        there = holders(fault.old)
        mended.append(Fault(**(asdict(fault) | {"file": there[0]})) if len(there) == 1 else fault)
    return mended


@contextmanager
def checkout() -> Iterator[Path]:
    """Create a copy of the working tree without the files that git ignores."""
    with tempfile.TemporaryDirectory(prefix="faults_") as name:
        copy = Path(name) / "copy"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "-co", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for path in filter(None, listed.split("\0")):
            if (ROOT / path).is_file():
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, copy / path)
        for link in LINKED:
            if (ROOT / link).exists():
                (copy / link).symlink_to((ROOT / link).resolve())
        # Some tests ask git for the list of files.
        subprocess.run(["git", "init", "-q"], cwd=copy, check=True)
        subprocess.run(["git", "add", "-A"], cwd=copy, check=True)
        subprocess.run(
            [
                "git",
                "-c",
                "user.name=tests",
                "-c",
                "user.email=tests@localhost",
                "commit",
                "-qm",
                "copy",
            ],
            cwd=copy,
            check=True,
        )
        yield copy


def others(fault: Fault, root: Path = ROOT) -> list[str]:
    """Return the test files of the fault's area that the fault does not name in full, smallest
    first.
    """
    files = sorted(
        (root / "tests" / fault.wing).glob("test_*.py"), key=lambda file: file.stat().st_size
    )
    return [name for file in files if (name := str(file.relative_to(root))) not in fault.tests]


def preload(copy: Path) -> None:
    """Import the packages that the tests need and no fault changes, in the environment of the
    copy's tests.

    The imports then take time only once instead of once for each fault.
    """
    code = "import json, pool; print(json.dumps(pool.environment()))"
    paths = os.pathsep.join(map(str, [copy / "recipes", copy / "tests" / "support"]))
    asked = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    os.environ.update(json.loads(asked.stdout) | {"PYTHONDONTWRITEBYTECODE": "1"})
    for name in PRELOADED:
        importlib.import_module(name)
    assert "recipekit" not in sys.modules


def run_tests(copy: Path, tests: list[str], seconds: float) -> tuple[str, str, str]:
    """Return ("passed", "failed" or "timed out", the first failed test, the end of the output).

    Call `preload` first.
    """
    with tempfile.TemporaryFile("w+") as output:
        if (child := os.fork()) == 0:
            os.setsid()  # its ranks are in its session
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            os.chdir(copy)
            sys.path[:0] = [str(copy / "recipes"), str(copy)]
            sys.path[:] = [
                path
                for path in sys.path
                if not path.startswith(str(ROOT / "tests")) and path != str(ROOT / "recipes")
            ]
            code = 70
            try:
                code = int(
                    pytest.main(
                        [
                            "-q",
                            "-x",
                            "-p",
                            "no:cacheprovider",
                            "-m",
                            "not slow and not gpu and not multi_gpu",
                            *tests,
                        ]
                    )
                )
            finally:
                sys.stdout.flush()
                os._exit(code)
        end = time.monotonic() + max(1.0, seconds)
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
            time.sleep(0.1)
        if ended[0] == 0:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        output.seek(0)
        said = output.read()
    if ended[0] == 0:
        return "timed out", "", said[-3000:]
    code = os.waitstatus_to_exitcode(ended[1])
    broken = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
    if code == 0:
        return "passed", "", said[-3000:]
    if broken is None:
        raise RuntimeError(f"pytest ended with {code}:\n{said[-3000:]}")
    return "failed", broken[1], said[-3000:]


def plant(fault: Fault, copy: Path, named_only: bool, seconds: float, show: bool) -> dict[str, Any]:
    """Plant one fault, return the result, and restore the copy.

    The result is "found" with the test that failed, "survived", or "timed out".
    """
    file, begun = copy / PACKAGE / fault.file, time.monotonic()
    text = file.read_text()
    file.write_text(planted(fault, text))
    try:
        state, by, output = run_tests(copy, list(fault.tests), seconds)
        if state == "passed" and not named_only and (rest := others(fault, copy)):
            state, by, output = run_tests(copy, rest, seconds - (time.monotonic() - begun))
    finally:
        file.write_text(text)
    if show:
        print(output)
    result = {"failed": "found", "passed": "survived", "timed out": "timed out"}[state]
    by = "" if not by else by.replace(f"{copy}/", "")
    return {
        "result": result,
        "by": by,
        "tests": "named" if named_only else "wing",
        "seconds": round(time.monotonic() - begun),
        "change": fault.change,
    }


def current(faults: list[Fault], results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the results whose fault has not changed since."""
    return {
        fault.id: results[fault.id]
        for fault in faults
        if results.get(fault.id, {}).get("change") == fault.change
    }


def report(faults: list[Fault]) -> int:
    results = current(faults, read_results())
    for fault in faults:
        told = results.get(fault.id, {"result": "not run", "by": ""})
        print(f"{told['result']:10} {fault.wing:12} {fault.id:45} {told['by']}")
    counts = {
        kind: sum(result["result"] == kind for result in results.values())
        for kind in ("found", "survived", "timed out")
    }
    print(
        f"{len(faults)} faults: "
        + ", ".join(f"{count} {kind}" for kind, count in counts.items())
        + f", {len(faults) - len(results)} not run"
    )
    return int(counts["found"] < len(results))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ids", nargs="*", help="faults by id; all if none is named")
    parser.add_argument("--wing", help="only the faults of this folder of tests/")
    parser.add_argument("--again", action="store_true", help="run those that have a result, too")
    parser.add_argument(
        "--named",
        action="store_true",
        help="run only the tests that the fault names, not the rest of its wing",
    )
    parser.add_argument(
        "--seconds", type=float, default=LIMIT, help="time limit for the tests of one fault"
    )
    parser.add_argument("--show", action="store_true", help="print the end of what pytest says")
    for name in ("check", "mend", "unchanged", "report"):
        parser.add_argument(f"--{name}", action="store_true")
    chosen = parser.parse_args()
    faults = read_faults()
    if unknown := set(chosen.ids) - {fault.id for fault in faults}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    if chosen.mend:
        write_faults(faults := mend(faults))
    todo = [
        fault
        for fault in faults
        if (not chosen.ids or fault.id in chosen.ids) and chosen.wing in (None, fault.wing)
    ]
    if chosen.report:
        return report(todo)
    if problems := wrong(todo):
        print("\n".join(problems))
        return 1
    if chosen.check or chosen.mend:
        return 0
    with checkout() as copy:
        preload(copy)
        if chosen.unchanged:
            state, by, output = run_tests(
                copy,
                list(dict.fromkeys(test for fault in todo for test in fault.tests)),
                chosen.seconds * len(todo),
            )
            print(output if state != "passed" else "", f"{state} {by}")
            return int(state != "passed")
        for fault in todo:
            if fault.id in current(faults, read_results()) and not chosen.again:
                continue
            result = plant(fault, copy, chosen.named, chosen.seconds, chosen.show)
            print(
                f"{result['result']:10} {fault.id} ({result['seconds']} s) {result['by']}",
                flush=True,
            )
            RESULTS.write_text(
                json.dumps(dict(sorted((read_results() | {fault.id: result}).items())), indent=1)
                + "\n"
            )
    return report(todo)


if __name__ == "__main__":
    raise SystemExit(main())
