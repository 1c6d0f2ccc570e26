"""Prints the test files whose sources (or selves) changed in the last day's commits, for the slow tests of CI."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    log = subprocess.run(["git", "log", "--since=24 hours ago", "--name-only", "--format="], cwd=ROOT, capture_output=True, text=True, check=True)
    changed = {Path(line) for line in log.stdout.split()}
    names = {path.stem for path in changed}
    # A change to what the loop is made of can slow or break any part.
    everything = any(path.parts[:2] == ("recipes", "recipekit") or path.parts[0] == "launch" or path.name.startswith("requirements") for path in changed)
    # the benches' own tests take longest and prove least: last
    for test in sorted((ROOT / "tests").glob("test_*.py"), key=lambda path: (path.stem.startswith("test_bench_"), path)):
        slow = "pytest.mark.slow" in test.read_text()
        if slow and (everything or test.stem in names or test.stem.removeprefix("test_") in names):
            print(test.relative_to(ROOT))


if __name__ == "__main__":
    main()
