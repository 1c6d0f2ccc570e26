"""Runs the slow tests for as long as there is time: those that changed, then the wings changed
last, then those that waited longest.

    # what .ci/run does
    python tests/support/slow_tests.py --minutes 45
    # only shows the order, with the date of each file's last run
    python tests/support/slow_tests.py --minutes 0

The failed tests of a file run once more, and fail only if they fail twice. tests/slow_runs.json
contains the date of each file's last run and a hash of its slow tests at that time. Commit it: the
next session starts with the files that were not reached. Exit code 1: a test failed or was skipped,
or a file was not reached although its slow tests have changed since the record.
"""

import argparse
import ast
import hashlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "slow_runs.json"
SELECTED = "slow and not gpu and not multi_gpu"
SOURCES = {  # folder of tests -> code that it tests in addition to the package of the same name
    "loop": (
        "train.py",
        "spec/task.py",
        "tasks",
        "optim",
        "parallel",
        "model",
        "engine",
        "runtime",
    ),
    "recipes": ("spec", "plan.py", "run.py", "dslint"),
    "runtime": ("train.py", "checkpoints", "engine"),
    "checkpoints": ("parallel", "storage"),
    "convert": ("parallel", "storage", "checkpoints"),
    "planner": ("model", "checkpoints"),
    "commands": ("__main__.py", "spec/shipped.py", "spec/completion.py"),
}


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def marks_slow(text: str) -> bool:
    """Return True if a file contains a slow test or a slow case.

    A file that only mentions the mark does not count.
    """
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "slow")
        or (isinstance(node, ast.keyword) and node.arg == "slow")
        for node in ast.walk(ast.parse(text))
    )


def slow_tests(text: str) -> str:
    """Hash the slow tests of a file: functions that carry the mark themselves or have a marked
    case.

    Imports, helpers, comments, docstrings and the layout of the code do not change the hash.
    """
    made = [
        ast.dump(without_docstring(node))
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and re.search("(attr|id)='slow'", "".join(map(ast.dump, node.decorator_list)))
    ]
    return hashlib.blake2b("\n".join(made).encode(), digest_size=8).hexdigest()


def without_docstring(function: ast.FunctionDef) -> ast.FunctionDef:
    """Remove a function's docstring in place and return the function; a function with no other code
    keeps it.
    """
    if ast.get_docstring(function, clean=False) and len(function.body) > 1:
        del function.body[0]
    return function


def newest_change(folder: str) -> int:
    """Return the time of the last commit that changed the code covered by a folder of tests.

    The time is in seconds since the epoch.
    """
    kit = [f"recipes/recipekit/{name}" for name in (folder, *SOURCES.get(folder, ()))]
    more = {
        "launch": ["launch"],
        "bench": ["tools/bench", "tools/drill"],
        "doctor": ["recipes/recipekit/commands/doctor.py"],
    }.get(folder, [])
    return int(git("log", "-1", "--format=%ct", "--", f"tests/{folder}", *more, *kit).strip() or 0)


def run(words: list[str], left: float) -> int | None:
    """Return the exit code of pytest; None if it did not end in time."""
    command = [sys.executable, "-m", "pytest", "-m", SELECTED, *words]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait(left)
    except subprocess.TimeoutExpired:
        process.send_signal(2)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, required=True)
    arguments = parser.parse_args()
    ends = time.monotonic() + 60 * arguments.minutes
    record: dict[str, dict[str, str]] = json.loads(RECORD.read_text())
    texts = {
        file.relative_to(ROOT).as_posix(): file.read_text()
        for file in (ROOT / "tests").glob("*/test_*.py")
    }
    hashes = {file: slow_tests(text) for file, text in texts.items() if marks_slow(text)}
    changes = {
        folder: newest_change(folder) for folder in {Path(file).parent.name for file in hashes}
    }
    rewritten = {file for file in hashes if record.get(file, {}).get("tests") != hashes[file]}
    date = lambda file: record.get(file, {}).get("date", "")  # noqa: E731
    order = sorted(
        hashes,
        key=lambda file: (
            file not in rewritten,
            "test_bench_" in file,
            -changes[Path(file).parent.name],
            date(file),
            file,
        ),
    )
    failed, missed = [], []
    for file in order:
        left = ends - time.monotonic()
        code = run([file], left) if left > 0 else None
        if code == 1:
            code = run(["--last-failed", file], max(60.0, ends - time.monotonic()))
        if code is None:
            missed.append(file)
        elif code:
            failed.append(file)
        else:
            record[file] = {"date": time.strftime("%Y-%m-%d"), "tests": hashes[file]}
            RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")
    for file in missed:
        changed = ", and rewritten since" if file in rewritten else ""
        print(f"not reached: {file}, last run {date(file) or 'not on record'}{changed}")
    for file in failed:
        print(f"failed: {file}")
    return 1 if failed or (arguments.minutes and rewritten & set(missed)) else 0


if __name__ == "__main__":
    sys.exit(main())
