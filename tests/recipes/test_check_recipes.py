"""tools/check_recipes.py and recipes/checked.json: a date and a GPU figure for each recipe.

README.md has a column for these checks.
"""

import json
import re
import sys
import tomllib
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import psutil
import pytest
from pool import ROOT
from recipe_files import FILES, tiny_command
from recipekit.spec import shipped

sys.path.insert(0, str(ROOT / "tools"))
import check_recipes

ENTRIES = json.loads(shipped.CHECK_RECORDS.read_text())
# Today's date in the time zone that is ahead of all others.
TODAY = datetime.now(timezone(timedelta(hours=14))).date()
FAILS = "import sys\nprint('the last line')\nsys.exit(3)\n"
README = """# Front

| recipe | JSON | layout | least hardware | checked |
| --- | --- | --- | --- | --- |
| `one` | zero2.json | dp2 | 2 x 16 GB GPUs | 2026-01-02; - |
| `two` | zero3.json | dp2 | 2 x 16 GB GPUs | - |

| `one` | another | table |
"""


def test_every_recipe_has_a_date_and_a_figure() -> None:
    assert list(ENTRIES) == sorted(FILES)
    for name, entry in ENTRIES.items():
        assert entry.keys() == {"cpu", "gpu"} and date.fromisoformat(entry["cpu"]) <= TODAY, name
        assert entry["gpu"] == check_recipes.gpu_figure(FILES[name].read_text()), name


def test_the_column_is_the_file() -> None:
    page = (ROOT / "README.md").read_text()
    assert check_recipes.with_column(page) == page
    cells = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]+; [^|]+) \|$", page, re.MULTILINE))
    assert cells == {name: f"{entry['cpu']}; {entry['gpu']}" for name, entry in ENTRIES.items()}


def test_a_wheel_has_the_file() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    assert shipped.CHECK_RECORDS.name in data["recipekit.recipes"]


@pytest.mark.parametrize(
    ("measured", "figure"),
    [
        ("not measured.", "-"),
        ("2026-11-21, 2 busy CPU cores, torch 2.13.0: 120 steps in 230 s, 1,234 tokens/s.", "-"),
        (
            "2026-12-01, 8 x H200, torch 2.13.0, deepspeed\n0.19.8: 200 steps, 61,234\ntokens/s.",
            "8 x H200: 61,234 tokens/s (2026-12-01)",
        ),
        (
            "2026-12-01, 1 x H100-SXM: 1234.5 samples/s.",
            "1 x H100-SXM: 1234.5 samples/s (2026-12-01)",
        ),
        ("2026-12-01, 8 x H200: 200 steps.\n\nAnother paragraph: 9 tokens/s.", "-"),
    ],
)
def test_the_gpu_figure_is_read_from_the_docstring(measured: str, figure: str) -> None:
    assert (
        check_recipes.gpu_figure(
            f'"""A recipe.\n\nNeeds: 8 x 80 GB GPUs. Measured: {measured}\n"""'
        )
        == figure
    )


def test_a_recipe_is_started_as_the_slow_test_starts_it(tmp_path: Path) -> None:
    launcher, *words = check_recipes.command(FILES["llama_nano_zero2"], tmp_path)
    assert Path(launcher).name == "deepspeed" and words[:3] == ["--num_gpus", "2", "--master_port"]
    assert words[4:] == [
        str(FILES["llama_nano_zero2"]),
        *check_recipes.TINY,
        "--out",
        str(tmp_path),
    ]
    typed = tiny_command("llama_nano_zero2", tmp_path)
    assert launcher == typed[0] and words[:3] == typed[1:4] and words[4:] == typed[5:]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two recipes that plain Python runs: `one` has been checked, and `two` has not."""
    (tmp_path / "checked.json").write_text(
        json.dumps(
            {"gone": {"cpu": "2026-01-01", "gpu": "-"}, "one": {"cpu": "2026-01-02", "gpu": "-"}}
        )
    )
    (tmp_path / "README.md").write_text(README)
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(
            "import os, sys\nassert '--tiny' in sys.argv and os.environ['DS_ACCELERATOR'] =="
            " 'cpu'\n"
        )
    monkeypatch.setattr(shipped, "RECIPES", tmp_path)
    monkeypatch.setattr(shipped, "CHECK_RECORDS", tmp_path / "checked.json")
    monkeypatch.setattr(check_recipes, "README", tmp_path / "README.md")
    monkeypatch.setattr(
        check_recipes,
        "command",
        lambda recipe, out: [sys.executable, str(recipe), *check_recipes.TINY, "--out", str(out)],
    )
    return tmp_path


def dates(world: Path) -> dict[str, str]:
    return {
        name: entry["cpu"]
        for name, entry in json.loads((world / "checked.json").read_text()).items()
    }


def test_a_success_writes_its_date_to_the_file_and_the_table(world: Path) -> None:
    assert check_recipes.main(["two"]) == 0
    today = date.today().isoformat()
    assert dates(world) == {"one": "2026-01-02", "two": today}
    assert (world / "README.md").read_text() == README.replace("GPUs | - |", f"GPUs | {today}; - |")


def test_a_failure_keeps_its_date_and_is_named(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (world / "one.py").write_text(FAILS)
    assert check_recipes.main([]) == 1
    shown = capsys.readouterr()
    assert "the last line" in shown.out and shown.err.splitlines()[1:] == [
        "one: ended with exit code 3"
    ]
    assert dates(world) == {"one": "2026-01-02", "two": date.today().isoformat()}
    assert "| 2026-01-02; - |" in (world / "README.md").read_text()


def test_a_recipe_that_never_succeeded_has_no_date(world: Path) -> None:
    (world / "two.py").write_text(FAILS)
    assert check_recipes.main(["two"]) == 1
    assert check_recipes.main(["--no-run"]) == 0
    assert (
        dates(world) == {"one": "2026-01-02", "two": "-"}
        and "| -; - |" in (world / "README.md").read_text()
        and shipped.last_check("two") == ("-", "-")
    )


def test_a_recipe_that_does_not_end_fails_with_its_processes(world: Path) -> None:
    (world / "one.py").write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time;"
        " time.sleep(77.125)'])\n"
    )
    assert check_recipes.run_tiny(world / "one.py", 1.0) == "did not end within 1 s"
    left = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "time.sleep(77.125)" in str(process.info["cmdline"])
    ]
    assert not psutil.wait_procs(left, timeout=5)[1]


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check_recipes.main(["llama_nano"])
    assert (
        ended.value.code == 2
        and "llama_nano: not a recipe; recipekit ls lists the names" in capsys.readouterr().err
    )
