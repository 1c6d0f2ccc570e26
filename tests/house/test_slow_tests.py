"""tests/support/slow_tests.py in a separate repository: test order, record, and failures."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pool import ROOT
from slow_tests import slow_tests

QUICK = "import pytest\n\n@pytest.mark.slow\ndef test_it():\n    assert True\n"
LONG = "import time\nimport pytest\n\n@pytest.mark.slow\ndef test_it():\n    time.sleep(600)\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Create two folders of tests; folder `a` has the newer commit."""
    (tmp_path / "tests" / "support").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "support" / "slow_tests.py", tmp_path / "tests" / "support")
    (tmp_path / "tests" / "slow_runs.json").write_text("{}")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.com"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    for number, (folder, text) in enumerate((("b", LONG), ("a", QUICK))):
        (tmp_path / "tests" / folder).mkdir()
        (tmp_path / "tests" / folder / f"test_{folder}.py").write_text(text)
        subprocess.run([*git, "add", "-A"], cwd=tmp_path, check=True)
        date = {"GIT_COMMITTER_DATE": f"2026-01-0{number + 1}T00:00:00Z"}
        subprocess.run(
            [*git, "commit", "-qm", folder],
            cwd=tmp_path,
            check=True,
            env={"PATH": "/usr/bin:/bin", **date},
        )
    return tmp_path


def run(repository: Path, minutes: float) -> tuple[int, str]:
    command = [sys.executable, "tests/support/slow_tests.py", "--minutes", str(minutes)]
    done = subprocess.run(
        command, cwd=repository, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout


def record(repository: Path) -> dict[str, dict[str, str]]:
    return json.loads((repository / "tests" / "slow_runs.json").read_text())


def test_what_changed_last_runs_first_and_what_is_missed_is_listed(repository: Path) -> None:
    code, text = run(repository, 0.2)
    assert (
        code == 1
        and "not reached: tests/b/test_b.py, last run not on record, and rewritten since" in text
    ), text
    assert record(repository).keys() == {"tests/a/test_a.py"}
    remembered = {
        "tests/b/test_b.py": {"date": "2026-01-01", "tests": slow_tests(LONG)},
        "tests/a/test_a.py": {"date": "2026-02-01", "tests": slow_tests(QUICK)},
    }
    (repository / "tests" / "slow_runs.json").write_text(json.dumps(remembered))
    code, text = run(repository, 0)
    assert (code, text.splitlines()) == (
        0,
        [
            "not reached: tests/a/test_a.py, last run 2026-02-01",
            "not reached: tests/b/test_b.py, last run 2026-01-01",
        ],
    )


def test_a_test_that_fails_twice_fails(repository: Path) -> None:
    (repository / "tests" / "a" / "test_a.py").write_text(QUICK.replace("True", "False"))
    (repository / "tests" / "b" / "test_b.py").unlink()
    code, text = run(repository, 1)
    assert code == 1 and "failed: tests/a/test_a.py" in text and not record(repository)


def test_only_the_slow_tests_themselves_make_a_file_another() -> None:
    assert (
        slow_tests(QUICK)
        == slow_tests("import os\n" + QUICK + "\ndef helper(): ...\n")
        == slow_tests(QUICK.replace("    assert", '    """Check it."""\n    assert'))
        != slow_tests(QUICK.replace("True", "1"))
    )
    short = QUICK.replace("@pytest.mark.slow", "slow = pytest.mark.slow\n\n@slow")
    assert slow_tests(short) != slow_tests(short.replace("True", "1"))
