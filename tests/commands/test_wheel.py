"""The wheel, installed in a new environment and used in an empty folder.

Every command must work, and no file may be read from the checkout.
"""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from pool import ROOT, environment, free_port
from recipekit.spec.shipped import recipes, strategies

pytestmark = pytest.mark.slow
SITE = Path("lib") / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
# This code runs whenever a Python of the new environment starts. It records each opened path of the
# checkout, except paths in .venv and .cache.
WATCH = """
import os, sys
def watch(event, arguments, root={root!r}):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], (str, bytes)):
        path = os.path.abspath(os.fsdecode(arguments[0]))
        if path.startswith(root + "/") and not path.startswith((root + "/.venv/", \
root + "/.cache/")):
            os.write(handle, (path + "\\n").encode())
handle = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
sys.addaudithook(watch)
"""


def build(folder: Path) -> Path:
    """Build the wheel in a copy of the checkout, because a build writes files; return the wheel."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(folder),
        str(folder / "source"),
    ]
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    return wheel


class Installed:
    """The wheel in a separate environment that shares the other packages of the tests."""

    def __init__(self, folder: Path) -> None:
        self.wheel, self.env, self.here, self.opened = (
            build(folder),
            folder / "env",
            folder / "empty",
            folder / "opened",
        )
        self.here.mkdir()
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(self.env)], check=True, timeout=120
        )
        self.python = self.env / "bin" / "python"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "--python",
                str(self.python),
                "install",
                "--no-deps",
                "--no-index",
                str(self.wheel),
            ],
            cwd=folder,
            check=True,
            capture_output=True,
            timeout=300,
        )
        # These paths come after recipekit's own folder on sys.path. .pth files in the shared folder
        # are not processed.
        lent = self.env / SITE / "lent.pth"
        lent.write_text(f"{sysconfig.get_path('purelib')}\nimport _watch\n")
        (self.env / SITE / "_watch.py").write_text(
            WATCH.format(root=str(ROOT), log=str(self.opened))
        )
        deepspeed = (Path(sys.executable).parent / "deepspeed").read_text().splitlines()
        (self.env / "bin" / "deepspeed").write_text(
            "\n".join([f"#!{self.python}", *deepspeed[1:]]) + "\n"
        )
        (self.env / "bin" / "deepspeed").chmod(0o755)

    def run(
        self, *words: str, seconds: float = 600, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        given = (
            environment()
            | {"PATH": f"{self.env / 'bin'}:/usr/bin:/bin", "HOME": str(self.here)}
            | variables
        )
        given.pop("PYTHONPATH")
        return subprocess.run(
            [str(self.env / "bin" / words[0]), *words[1:]],
            cwd=self.here,
            env=given,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_two_names_and_the_pins(installed: Installed) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {
        "recipekit",
        "launch",
        "recipekit-0.1.0.dist-info",
    }
    metadata = zipfile.ZipFile(installed.wheel).read("recipekit-0.1.0.dist-info/METADATA").decode()
    pins = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line]
    assert [
        line.removeprefix("Requires-Dist: ")
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ")
    ] == pins
    for name in ("LICENSE", "NOTICE"):
        assert (
            zipfile.ZipFile(installed.wheel).read(f"recipekit-0.1.0.dist-info/licenses/{name}")
            == (ROOT / name).read_bytes()
        )
    assert "License-Expression: Apache-2.0" in metadata.splitlines()
    shipped = {f"recipekit/recipes/{name}.py" for name in recipes()} | {
        f"recipekit/ds_configs/{name}" for name in strategies()
    }
    assert shipped <= set(names) and not [
        name for name in names if "test" in name or name.startswith("recipekit/tools")
    ]


def test_every_command_works_in_an_empty_folder(installed: Installed) -> None:
    """The commands are in the order of a user's first hour. Each is followed by its expected
    result.
    """
    run, here = installed.run, installed.here

    def works(*words: str, **variables: str) -> str:
        done = run(*words, **variables)
        assert done.returncode == 0 and "Traceback" not in done.stderr, (
            f"{words}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
        return done.stdout

    assert (
        len(works("recipekit", "ls").splitlines())
        == len(recipes())
        == len(works("python", "-m", "recipekit").splitlines())
    )
    works("recipekit", "cp", "llama_nano_zero2", "mine.py")
    works("recipekit", "cp", "zero2.json")
    assert (here / "mine.py").read_bytes() == recipes()["llama_nano_zero2"].read_bytes()
    assert works("recipekit", "lint", "zero2.json") == "zero2.json: clean\n"
    assert "zero3.json: clean" in works(
        "recipekit", "lint", "zero3.json", "--recipe", "llama3_1_8b_zero3", "--world", "8"
    )
    works(
        "deepspeed",
        "--num_gpus",
        "2",
        "--master_port",
        str(free_port()),
        "mine.py",
        "--tiny",
        "--steps",
        "4",
        "--eval_every",
        "0",
    )
    assert len((here / "runs" / "mine_tiny" / "metrics.jsonl").read_text().splitlines()) >= 4
    (here / "zero2.json").unlink()  # the JSON in the package is used
    works("recipekit", "run", "mine.py", "--tiny", "--steps", "2", "--out", "b")
    assert json.loads((here / "b" / "run.json").read_text())["recipe"]["ds_config"] == "zero2.json"
    works("recipekit", "run", "llama_nano_zero2", "--tiny", "--steps", "2", "--eval_every", "0")
    assert (here / "runs" / "llama_nano_zero2_tiny" / "hf" / "config.json").is_file()
    assert "compared with the checkpoint: equal" in works(
        "recipekit", "convert", "to-hf", "b", "b_hf", "--verify"
    )
    assert "ok: no problem found" in works(
        "recipekit", "doctor", "--quick", "--recipe", "mine.py", "--out", "c"
    )
    assert "ok: no problem found" in works("recipekit", "run", "--doctor", "--quick", "--out", "c")
    if (ROOT / "recipes" / "recipekit" / "commands" / "sample.py").is_file():
        assert works("recipekit", "sample", "runs/mine_tiny").strip()
    opened = installed.opened.read_text().splitlines()
    assert opened == [], f"read from the checkout: {sorted(set(opened))}"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["python", "llama_nano_zero9.py", "--dry_run"], "can't open file"),
        (["recipekit", "lint", "zero9.json"], "Did you mean zero3.json?"),
        (["recipekit", "lint", "--recipe", "llama_nano"], "Did you mean llama_nano_zero2?"),
        (["recipekit", "run", "llama_nan_zero2.py"], "Did you mean llama_nano_zero2?"),
        (["recipekit", "lint", "--table"], "requires a clone of the repository"),
    ],
)
def test_a_wrong_name_gets_the_near_one_of_the_package(
    words: list[str], told: str, installed: Installed
) -> None:
    done = installed.run(*words)
    assert (
        done.returncode in (1, 2)
        and told in done.stdout + done.stderr
        and "Traceback" not in done.stderr
    ), done


def test_a_missing_package_is_named_with_its_pin(installed: Installed) -> None:
    """The shared packages are missing, as after `pip install --no-deps`."""
    (installed.env / SITE / "lent.pth").rename(installed.env / "lent.pth")
    try:
        done = installed.run("recipekit", "lint", "zero2.json")
        assert (
            done.returncode == 1
            and "has no hjson. " in done.stderr
            and "hjson==3.1.0" in done.stderr
            and "make setup" not in done.stderr
        ), done.stderr
        assert installed.run("recipekit", "ls").returncode == 0
    finally:
        os.rename(installed.env / "lent.pth", installed.env / SITE / "lent.pth")
