"""The support matrix: cells are run, failures are told and survived, and recipes/SUPPORT.md says what a rerun says."""

import re
import sys

import pytest
from pool import ROOT, environment
from recipekit.architectures.lookup import READS_AHEAD

sys.path.insert(0, str(ROOT / "tools" / "make"))
import support_matrix

SUPPORT = ROOT / "recipes" / "SUPPORT.md"
SAMPLE = ["gpt_oss", "gemma3n_text"]  # a mixture with sinks that trains everywhere, and one that shares keys between stages


def written() -> dict[str, dict[str, str]]:
    """type -> layout -> mark, as SUPPORT.md has them."""
    rows: dict[str, dict[str, str]] = {}
    for line in SUPPORT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(support_matrix.LAYOUTS) + 2 and cells[1][:1] in ("✓", "✗"):
            rows[cells[0]] = dict(zip(support_matrix.LAYOUTS, (cell[0] for cell in cells[1:]), strict=False))
    return rows


@pytest.mark.slow
def test_a_sample_of_the_written_marks_is_what_a_rerun_gives(ops, tmp_path):
    """A failed cell ends its group of processes, and the cells after it run all the same."""
    done = support_matrix.run_matrix(SAMPLE, ["tp2", "pp2"], tmp_path / "results.jsonl", say=print)
    marks = {name: {layout: "✓" if done[name][layout]["ok"] else "✗" for layout in ("tp2", "pp2")} for name in SAMPLE}
    assert marks == {name: {layout: written()[name][layout] for layout in ("tp2", "pp2")} for name in SAMPLE}
    assert marks == {"gpt_oss": {"tp2": "✓", "pp2": "✓"}, "gemma3n_text": {"tp2": "✗", "pp2": "✗"}}
    assert "modeling_gemma3n" in done["gemma3n_text"]["pp2"]["reason"], "the module that fails is named"
    again = support_matrix.run_matrix(SAMPLE, ["tp2", "pp2"], tmp_path / "results.jsonl", say=pytest.fail)
    assert again == done, "finished cells are not run again"


def test_every_type_has_a_row_and_enough_of_them_pass():
    rows = written()
    types = support_matrix.model_types()
    planned = [name for name in types if support_matrix.publishes_pipeline_plan(name)]
    assert len(planned) == 88 and set(planned) <= rows.keys()
    without_model = set(re.findall(r"^- ([a-z0-9_-]+), reference: ", SUPPORT.read_text(), re.MULTILINE))
    assert rows.keys() | without_model == set(types) and not rows.keys() & without_model
    assert not rows.keys() & (READS_AHEAD.keys() - {"reformer"}), "they read ahead; Reformer's default config here is that of a decoder"
    assert sum(row["zero3"] == "✓" for row in rows.values()) >= 152
    assert {name for name, row in rows.items() if row["ep2"] == "✓"} >= {"mixtral", "qwen3_moe", "deepseek_v3"}
    assert sum(rows[name]["pp2"] == "✓" for name in planned) >= 84
    assert sum(rows[name]["pp2 x tp2"] == "✓" for name in planned) >= 78


def test_every_failure_has_its_reason():
    reasons = re.findall(r"^- ([a-z0-9_-]+), ([a-z0-9 ]+): (.+)$", SUPPORT.read_text(), re.MULTILINE)
    told = {(name, layout) for name, layout, _ in reasons}
    assert told >= {(name, layout) for name, marks in written().items() for layout, mark in marks.items() if mark == "✗"}


def test_an_unknown_type_is_refused():
    import subprocess

    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "make" / "support_matrix.py", "--types", "llamma"], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "not known to transformers: llamma" in done.stderr
