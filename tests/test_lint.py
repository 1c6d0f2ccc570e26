"""tools/lint.py: the exit code and what is printed. The mistakes themselves are in test_ds_config.py."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def lint(*words: str, cwd: Path = ROOT) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "lint.py"), *words], cwd=cwd, capture_output=True, text=True, timeout=10, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def test_a_clean_file_exits_0_and_shows_the_batch() -> None:
    code, text = lint("ds_configs/zero3.json", "--recipe", "recipes/llama_nano_zero2.py", "--world", "2")
    assert code == 0 and "zero3.json: clean" in text and "dp2: 16 rows of a step = 2 data-parallel * 4 micro_batch * 2 accumulation" in text


def test_the_recipe_s_own_file_is_checked_when_none_is_named() -> None:
    code, text = lint("--recipe", "recipes/llama_nano_zero2.py", "--world", "3")
    assert code == 1 and "1 problem in recipes/llama_nano_zero2.py" in text and "use global_batch 12 or 24" in text


def test_problems_of_the_json_and_the_recipe_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text('from recipekit import Recipe\nRECIPE = Recipe(model="org/model", steps=0)\n')
    (tmp_path / "config.json").write_text('{"gradient_cliping": 1.0}')
    code, text = lint("config.json", "--recipe", "recipe.py", cwd=tmp_path)
    assert code == 1 and "2 problems" in text and "steps = 0" in text and "gradient_cliping" in text


def test_a_recipe_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("RECIPE = (")
    (tmp_path / "empty.py").write_text("")
    for name, says in (("absent.py", "no such file"), ("broken.py", "cannot be imported: SyntaxError"), ("empty.py", "sets no RECIPE")):
        code, text = lint("--recipe", name, cwd=tmp_path)
        assert code == 1 and says in text


def test_a_wrong_command_line_exits_2() -> None:
    assert lint()[0] == 2 and lint("zero3.json", "--world", "0")[0] == 2
