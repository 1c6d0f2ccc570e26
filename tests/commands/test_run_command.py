"""recipekit/commands/run.py: the same as `python -m launch`, with its words, output and exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pool import ROOT, environment
from recipekit.commands import run
from recipekit.refusal import Refusal


def start(module: str, words: list[str], folder: Path) -> tuple[int, str, str]:
    found = environment() | {"PYTHONPATH": os.pathsep.join([str(ROOT / "recipes"), str(ROOT)])}
    done = subprocess.run([sys.executable, "-P", "-m", *module.split(), *words], cwd=folder, env=found, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--dry-run", "llama_nano_zero2", "--tiny", "--lr", "-1e-3"], 0, f"{ROOT}/recipes/llama_nano_zero2.py --tiny --lr -1e-3"),
        (["--dry-run", "--gpus", "3", "mine.py"], 0, "1 host, 3 ranks"),
        (["lama_nano_zero2.py"], 1, "Did you mean llama_nano_zero2?"),
        (["--nods", "2", "mine.py"], 2, "Did you mean --nodes?"),
    ],
)
def test_it_is_launch_with_the_same_words(words: list[str], code: int, told: str, tmp_path: Path) -> None:
    """A file launch.py of the user hides nothing."""
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "launch.py").write_text("raise SystemExit('mine')")
    found = start("recipekit run", words, tmp_path)
    assert found == start("launch", words, tmp_path) and found[0] == code and told in found[1] + found[2], found


def test_without_the_package_launch_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "launch", None)
    with pytest.raises(Refusal, match=r"has no package launch\. Install this one again: make setup, or pip install"):
        run.main(["mine.py"])
