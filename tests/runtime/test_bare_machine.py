"""Machines without git or a UTF-8 locale, and W&B disabled by another program's variable."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from job import NANO
from pool import ROOT, environment
from recipekit.hosts.accounts import (
    check_wandb_disabled,
    check_wandb_installed,
    check_wandb_login,
    wandb_disabled,
)
from recipekit.hosts.findings import ReportRow
from recipekit.runtime.run_metadata import git_commit


def test_the_commit_of_a_recipe_is_not_known_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is not a repository, git is missing, or git cannot be run."""
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert git_commit(ROOT) == asked.stdout.strip()
    assert git_commit(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit(ROOT) is None
    (tmp_path / "git").write_text("")
    assert git_commit(ROOT) is None
    (tmp_path / "git").chmod(0o755)
    assert git_commit(ROOT) is None


@pytest.mark.parametrize("value", ["true", "1", "yes", "ON", "True"])
def test_w_and_b_is_off_by_the_variable_of_trainer(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 4 accepts these values in upper and lower case."""
    monkeypatch.setenv("WANDB_DISABLED", value)
    monkeypatch.setenv("WANDB_MODE", "online")
    assert wandb_disabled() and check_wandb_disabled(True, frozenset()) == []
    assert list(check_wandb_login(True)) == [ReportRow("W&B", "off")]
    assert check_wandb_installed(True, frozenset()) == []
    (problem,) = check_wandb_disabled(True, frozenset({"wandb"}))
    assert (
        str(problem)
        == f"--wandb with WANDB_DISABLED = {value}: cannot be combined. Leave out --wandb, or unset"
        " WANDB_DISABLED"
    )


def test_w_and_b_is_on_by_other_values_and_an_unclear_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value in ("", "false", "0", "No", "off"):
        monkeypatch.setenv("WANDB_DISABLED", value)
        assert not wandb_disabled() and check_wandb_disabled(True, frozenset({"wandb"})) == []
    for value in ("maybe", "y", "2"):
        monkeypatch.setenv("WANDB_DISABLED", value)
        (problem,) = check_wandb_disabled(True, frozenset())
        assert (
            problem.where == f"WANDB_DISABLED = {value}" and problem.rule == "must be true or false"
        )
        assert check_wandb_disabled(False, frozenset()) == []


PRINTS = """
import sys
from recipekit.spec.utf8 import use_utf8
lines = use_utf8()
print(sys.argv[1:], open(sys.argv[1]).read(), lines)
"""


def in_locale(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "prints.py").write_text(PRINTS)
    (folder / "text").write_text("für Zürich", encoding="utf-8")
    clean = {
        name: value
        for name, value in environment().items()
        if not name.startswith(("LC_", "LANG", "PYTHONUTF8"))
    }
    words = [sys.executable, "prints.py", "text", "straße"]
    return subprocess.run(
        words,
        cwd=folder,
        env=clean | variables,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    "variables", [{"LC_ALL": "C"}, {"LC_ALL": "C.UTF-8"}, {"LANG": "xx_YY.UTF-8"}, {}], ids=str
)
def test_text_is_utf_8_as_python_has_it(variables: dict[str, str], tmp_path: Path) -> None:
    assert in_locale(tmp_path, **variables).stdout == "['text', 'straße'] für Zürich []\n"


def test_a_locale_that_is_not_utf_8_starts_the_program_again(tmp_path: Path) -> None:
    """The locales are ASCII and ISO-8859-1.

    With ISO-8859-1, Python reads UTF-8 without an error, but decodes it to the wrong letters.
    """
    line = "['locale: its text is {}. This program reads and writes UTF-8 all the same']"
    told = in_locale(tmp_path, **ASCII)
    assert told.stdout == f"['text', 'straße'] für Zürich {line.format('ANSI_X3.4-1968')}\n", (
        told.stderr
    )
    made = ["localedef", "-i", "de_DE", "-f", "ISO-8859-1", str(tmp_path / "de_DE")]
    # Without the sources of the locales, localedef writes an unusable folder and exits with 1.
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run(made, check=False, capture_output=True).returncode == 0:
            told = in_locale(tmp_path, LC_ALL="de_DE", LOCPATH=str(tmp_path))
            assert told.stdout == f"['text', 'straße'] für Zürich {line.format('ISO-8859-1')}\n", (
                told.stderr
            )
            return
    pytest.skip("needs Debian's locales (tests/system_packages.sh)")


def test_a_program_that_cannot_be_started_again_is_refused(tmp_path: Path) -> None:
    """`python -X utf8=0` overrides PYTHONUTF8, and some programs do not come from a file."""
    clean = environment() | ASCII
    for words in (
        ["-X", "utf8=0", str(NANO), "--tiny"],
        ["-c", "from recipekit import Recipe, run; run(Recipe())"],
    ):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=clean,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        assert done.stderr.splitlines()[1].startswith(
            "  1. locale: its text encoding is ANSI_X3.4-1968, but it must be UTF-8. Set"
            " LC_ALL=C.UTF-8"
        )
    assert os.listdir(tmp_path) == []
