"""transformers_release.py, by the commands of a user: the installed release is another one by its
metadata.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from job import NANO
from pool import ROOT, environment
from recipekit.hosts.transformers_release import (
    OLDEST_RELEASE,
    pinned_release,
    release_numbers,
)

KIT = [sys.executable, "-P", "-m", "recipekit"]
START = [*KIT, "run", str(NANO), "--tiny", "--dry_run"]
LINT = [*KIT, "lint", "zero2.json", "--recipe", str(NANO)]
DOCTOR = [*KIT, "doctor", "--quick", "--ranks", "1"]
CONVERT, SAMPLE = [*KIT, "convert", "from-hf", ".", "out"], [*KIT, "sample", "."]
COMMANDS = {
    "start": START,
    "lint": LINT,
    "doctor": DOCTOR,
    "convert": CONVERT,
    "sample": SAMPLE,
}


def run(
    command: list[str], folder: Path, release: str, kit: Path = ROOT / "recipes"
) -> subprocess.CompletedProcess[str]:
    """Run a command in an environment whose transformers has the metadata of `release`.

    `kit` is the folder of recipekit.
    """
    info = folder / "site" / f"transformers-{release}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformers\nVersion: {release}\n"
    )
    (info / "top_level.txt").write_text("transformers\n")
    path = os.pathsep.join([f"{folder / 'site'}", str(kit), environment()["PYTHONPATH"]])
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment() | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stdout, done.stdout
    return done


def lines_about(text: str) -> list[str]:
    return [line for line in text.splitlines() if "transformers" in line]


@pytest.mark.parametrize(
    ("release", "numbers"),
    [
        ("5.24.0", (5, 24, 0)),
        ("5.24.0.dev0", (5, 24, 0)),
        ("5.25.0.dev0+g1234", (5, 25, 0)),
        ("5.22.3rc1", (5, 22, 3)),
        ("5.23rc1", (5, 23)),
        ("6.0.0rc0", (6, 0, 0)),
    ],
)
def test_a_release_is_read_without_its_suffix(release: str, numbers: tuple[int, ...]) -> None:
    assert release_numbers(release) == numbers


@pytest.mark.parametrize("name", COMMANDS)
def test_an_older_release_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    done = run(COMMANDS[name], tmp_path, "5.20.0")
    assert done.returncode == 1, done.stdout
    (line,) = lines_about(done.stdout)
    assert line.removeprefix("  1. ") == (
        f"transformers 5.20.0: must be {OLDEST_RELEASE} or newer. Run: pip install"
        f" transformers=={pinned_release()}"
    )


@pytest.mark.parametrize("name", [pytest.param("start", marks=pytest.mark.slow), "lint", "doctor"])
def test_a_newer_release_is_said_in_one_line(tmp_path: Path, name: str) -> None:
    done = run(COMMANDS[name], tmp_path, "5.25.0")
    assert done.returncode == 0, done.stdout
    (line,) = lines_about(done.stdout)
    assert (
        f"transformers 5.25.0 is newer than the tested releases, {OLDEST_RELEASE} to"
        f" {pinned_release()}: not tested" in line
    )


@pytest.mark.parametrize("name", ["convert", "sample"])
def test_a_newer_release_is_said_before_the_model_is_read(tmp_path: Path, name: str) -> None:
    done = run(COMMANDS[name], tmp_path, "5.25.0")
    assert done.returncode == 1 and "config.json" in done.stdout, done.stdout
    (line,) = lines_about(done.stdout)
    assert line.startswith("transformers 5.25.0 is newer than the tested releases")


@pytest.mark.parametrize("release", ["5.20.0", "5.25.0"])
def test_a_copy_of_the_recipes_has_no_pin(tmp_path: Path, release: str) -> None:
    """Without requirements.txt only the oldest supported release is known."""
    kit = tmp_path / "recipes"
    shutil.copytree(ROOT / "recipes", kit, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "ds_configs", tmp_path / "ds_configs")
    done = run([*LINT[:-1], str(kit / NANO.name)], tmp_path, release, kit)
    assert done.returncode == (release == "5.20.0"), done.stdout
    rule = f"must be {OLDEST_RELEASE} or newer. Run: pip install transformers=={OLDEST_RELEASE}"
    expected = [f"  1. transformers 5.20.0: {rule}"] if release == "5.20.0" else []
    assert lines_about(done.stdout) == expected


@pytest.mark.parametrize("release", [OLDEST_RELEASE, "5.24.3"])
def test_a_release_between_the_two_is_accepted_silently(tmp_path: Path, release: str) -> None:
    done = run(LINT, tmp_path, release)
    assert done.returncode == 0 and not lines_about(done.stdout), done.stdout


def test_the_doctor_counts_a_supported_release(tmp_path: Path) -> None:
    done = run(DOCTOR, tmp_path, "5.23.0")
    assert done.returncode == 0, done.stdout
    assert "transformers  5.23.0, a supported release" in done.stdout


def test_the_readme_names_both_releases() -> None:
    text = (ROOT / "README.md").read_text()
    assert OLDEST_RELEASE in text and pinned_release() in text
