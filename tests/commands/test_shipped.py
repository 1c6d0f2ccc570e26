"""recipekit/spec/shipped.py, and `script` in launch: names of user files and shipped recipes."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from pool import ROOT
from recipekit.commands import doctor, lint
from recipekit.spec.packages import pinned_requirements
from recipekit.spec.shipped import recipe_path, recipes, strategies

from launch.__main__ import script

SHIPPED = ROOT / "recipes" / "llama_nano_zero2.py"


@pytest.mark.parametrize("find", [recipe_path, script])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("llama_nano_zero2", SHIPPED),
        ("llama_nano_zero2.py", SHIPPED),
        ("./sub/llama_nano_zero2.py", Path("sub/llama_nano_zero2.py")),
        ("smollm2_135m_zero1.py", Path("smollm2_135m_zero1.py")),
        ("qwen3_0_6b_zero2", Path("qwen3_0_6b_zero2")),
        ("absent.py", Path("absent.py")),
        (str(SHIPPED), SHIPPED),
    ],
)
def test_a_name(
    find: Callable[[str], object],
    text: str,
    found: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("smollm2_135m_zero1.py").touch()
    Path("qwen3_0_6b_zero2").mkdir()
    assert Path(str(find(text))) == found


@pytest.mark.parametrize("text", ["", "  ", "s3://bucket/mine.py", "$NOT_SET_HERE/mine.py"])
def test_what_is_no_path_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        recipe_path(text)


def test_the_shipped_files_are_those_of_the_two_folders() -> None:
    assert list(recipes().values()) == sorted((ROOT / "recipes").glob("*.py"))
    assert list(strategies().values()) == sorted((ROOT / "ds_configs").glob("*.json"))
    assert pinned_requirements() == [
        line for line in (ROOT / "requirements.txt").read_text().splitlines() if line
    ]


def test_lint_and_doctor_take_the_name_of_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert lint.main(["zero2.json", "--recipe", "llama_nano_zero2", "--world", "2"]) == 0
    assert capsys.readouterr().out.startswith(f"{ROOT}/ds_configs/zero2.json: clean\n")
    assert lint.main(["--recipe", "smollm_135m_zero1"]) == 1
    assert (
        f"Did you mean {os.path.relpath(ROOT / 'recipes' / 'smollm2_135m_zero1.py')}?"
        in capsys.readouterr().out
    )
    assert doctor.read_arguments(["--recipe", "llama_nano_zero2"], "x")[1].recipe == SHIPPED
