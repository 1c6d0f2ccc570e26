"""recipekit/commands/run.py: the arguments, output and exit code of `python -m launch`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pool import ROOT, environment, import_path
from recipekit.commands import run
from recipekit.spec.errors import ConfigError


def start(module: str, words: list[str], folder: Path) -> tuple[int, str, str]:
    found = environment() | {"PYTHONPATH": import_path(ROOT / "recipes", ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", *module.split(), *words],
        cwd=folder,
        env=found,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (
            ["--dry-run", "llama_nano_zero2", "--tiny", "--lr", "-1e-3"],
            0,
            f"{ROOT}/recipes/llama_nano_zero2.py --tiny --lr -1e-3",
        ),
        (["--dry-run", "--gpus", "3", "mine.py"], 0, "1 host, 3 ranks"),
        (["lama_nano_zero2.py"], 1, "Did you mean llama_nano_zero2?"),
        (["--nods", "2", "mine.py"], 2, "Did you mean --nodes?"),
    ],
)
def test_it_is_launch_with_the_same_words(
    words: list[str], code: int, told: str, tmp_path: Path
) -> None:
    """A user's file launch.py shadows nothing."""
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "launch.py").write_text("raise SystemExit('mine')")
    found = start("recipekit run", words, tmp_path)
    code_of_launch, out, err = start("launch", words, tmp_path)
    assert found == (
        code_of_launch,
        out.replace("python -m launch --gpus", "recipekit run --gpus"),
        err,
    )
    assert found[0] == code and told in found[1] + found[2], found


def test_the_command_that_continues_is_the_typed_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import json, os, sys\nprint(os.environ['LAUNCH_COMMAND'])\nsys.exit(3)\n"
    )
    code, out, err = start("recipekit run", ["--gpus", "1", "mine.py", "--lr", "a b"], tmp_path)
    assert (
        code == 1
        and json.dumps(["recipekit", "run", "--gpus", "1", "mine.py", "--lr", "a b"]) in out
    ), out + err


def test_without_the_package_launch_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "launch", None)
    with pytest.raises(
        ConfigError,
        match=r"has no package launch\. Install this one again: make setup, or pip install",
    ):
        run.main(["mine.py"])
