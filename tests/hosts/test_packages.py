"""The Python and the environment of the commands: make_venv.py, packages.py, `import recipekit`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from job import NANO, in_mounts
from make_setup import make_environment, project
from pool import ROOT, environment

STUB = """#!/bin/sh
# an older Python, which runs what any Python from 3.7 on can run
exec {python} -c '
import runpy, sys
sys.version_info = (3, 9, 18, "final", 0)
sys.argv = sys.argv[1:]
if sys.argv[0] == "-c":
    exec(sys.argv[1])
else:
    sys.path.insert(0, sys.argv[0].rpartition("/")[0])
    runpy.run_path(sys.argv[0], run_name="__main__")' "$@"
"""


def older(folder: Path) -> Path:
    """Write a python3 that reports version 3.9; return its path."""
    folder.mkdir()
    path = folder / "python3"
    path.write_text(STUB.format(python=sys.executable))
    path.chmod(0o755)
    return path


def run(words: list[object], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env=make_environment() | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def listing(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if "bin" not in path.relative_to(folder).parts[:1]
    )


@pytest.mark.parametrize("flags", [[], ["TORCH=cu126"]])
def test_make_with_an_older_python_says_so_and_leaves_nothing(
    tmp_path: Path, flags: list[str]
) -> None:
    project(tmp_path)
    before = listing(tmp_path)
    older(tmp_path / "bin")
    done = run(["make", "setup", *flags], tmp_path, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    told = (
        "is Python 3.9.18: the recipes need 3.11 or newer. Install one, or name one that is there:"
        " make setup PYTHON3=python3.12"
    )
    assert (
        done.returncode
        and done.stderr.startswith("refused: ")
        and told in done.stderr.splitlines()[0]
    ), done.stderr
    assert listing(tmp_path) == before


def test_an_environment_of_an_older_python_is_made_anew(tmp_path: Path) -> None:
    """`python -m venv` alone would keep its .venv/bin/python."""
    project(tmp_path)
    stub = older(tmp_path / "bin")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "python3"):
        (tmp_path / ".venv" / "bin" / name).symlink_to(stub)
    make = [sys.executable, tmp_path / "tools" / "make" / "make_venv.py"]
    assert run(make, tmp_path).returncode == 0
    ask = [tmp_path / ".venv" / "bin" / "python", "-c", "import sys; print(sys.version_info[:2])"]
    assert run(ask, tmp_path).stdout.strip() == str(sys.version_info[:2])
    (tmp_path / ".venv" / "mine").touch()
    assert run(make, tmp_path).returncode == 0 and (tmp_path / ".venv" / "mine").exists(), (
        "one that can be used stays"
    )


def test_a_python_that_cannot_make_environments_says_what_to_install(tmp_path: Path) -> None:
    """Debian's Python lacks venv without the package python3-venv. Here venv itself is broken."""
    project(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "venv.py").write_text(
        "print('The virtual environment was not created successfully because ensurepip is not"
        " available.')\nraise SystemExit(1)\n"
    )
    done = run(
        [sys.executable, tmp_path / "tools" / "make" / "make_venv.py"],
        tmp_path,
        PYTHONPATH=str(tmp_path / "broken"),
    )
    assert (
        done.returncode == 1
        and "ensurepip is not available" in done.stderr
        and "-venv" in done.stderr.partition("apt-get install")[2]
    )
    assert not (tmp_path / ".venv").exists()


TOOLS = (
    "tools/lint.py ds_configs/zero3.json",
    "tools/convert_checkpoint.py inspect x",
    "tools/quickstart.py",
    "tools/doctor.py --quick",
)


@pytest.mark.parametrize("command", [f"{NANO} --tiny --dry_run", *TOOLS])
def test_outside_the_environment_a_command_says_how_to_activate_it(
    tmp_path: Path, command: str
) -> None:
    """One Python has the same version but no packages, like the system's Python.

    A second Python is older.
    """
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")],
        check=True,
        timeout=60,
    )
    words = [
        word if word.startswith("/") or "/" not in word else ROOT / word for word in command.split()
    ]
    done = run([tmp_path / "env" / "bin" / "python", *words], tmp_path, PYTHONPATH="")
    assert (
        done.returncode == 1
        and "Activate the environment first: " in done.stderr
        and "hjson" in done.stderr
    ), done.stderr
    done = run([older(tmp_path / "bin"), *words], tmp_path)
    assert (
        done.returncode == 1
        and "is Python 3.9.18: the recipes need 3.11 or newer. Activate the environment: ."
        " .venv/bin/activate"
        in done.stderr
    )
    assert "--help" not in done.stderr


def test_help_needs_no_package(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")],
        check=True,
        timeout=60,
    )
    done = run([tmp_path / "env" / "bin" / "python", NANO, "--help"], tmp_path, PYTHONPATH="")
    assert done.returncode == 0 and "--tiny" in done.stdout


def test_a_package_that_has_gone_is_named(tmp_path: Path) -> None:
    import pyarrow

    prefix = in_mounts(f"mount -t tmpfs tmpfs {Path(pyarrow.__file__).parent}")
    done = subprocess.run(
        [*prefix, sys.executable, str(NANO), "--tiny", "--dry_run"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr and "pyarrow" in done.stderr, (
        done.stdout + done.stderr
    )
