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
    found = []
    for test in (ROOT / "tests").glob("test_*.py"):
        own = test.stem in names or test.stem.removeprefix("test_") in names
        if "pytest.mark.slow" in test.read_text() and (everything or own):
            # The benches' tests take longest and prove least: last. Time may not be enough for all: what changed itself comes first.
            found.append((test.stem.startswith("test_bench_"), not own, test.relative_to(ROOT)))
    print(*(test for _, _, test in sorted(found)), sep="\n")


if __name__ == "__main__":
    main()
