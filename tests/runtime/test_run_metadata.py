"""Package versions of earlier starts, which a resume keeps in run.json."""

import json
from pathlib import Path

from recipekit.runtime.run_metadata import changed_versions, earlier_versions
from recipekit.spec.run_folder import RUN_JSON

OLD, NEW = (
    {"transformers": "5.22.2", "torch": "2.13.0"},
    {"transformers": "5.24.0", "torch": "2.13.0"},
)


def start(out: Path, step: int, versions: dict[str, str]) -> list[dict[str, object]]:
    """Write run.json as a start does, and return its entries."""
    entries = earlier_versions(out, step, versions)
    (out / RUN_JSON).write_text(json.dumps({"versions": versions, "earlier_versions": entries}))
    return entries


def test_a_resume_keeps_the_versions_of_earlier_starts(tmp_path: Path) -> None:
    assert start(tmp_path, 0, OLD) == []
    assert start(tmp_path, 3, OLD) == []
    changed = start(tmp_path, 5, NEW)
    assert changed == [{"until_step": 5, "versions": OLD}]
    assert start(tmp_path, 6, NEW) == changed
    assert start(tmp_path, 7, OLD) == [*changed, {"until_step": 7, "versions": NEW}]


def test_a_start_says_which_versions_changed(tmp_path: Path) -> None:
    start(tmp_path, 0, OLD)
    entries = start(tmp_path, 5, NEW)
    assert changed_versions(entries, NEW, 5) == (
        "note: transformers 5.22.2 until step 5, 5.24.0 from now on"
    )
    assert changed_versions(start(tmp_path, 6, NEW), NEW, 6) == ""
    assert changed_versions([], NEW, 0) == ""


def test_a_damaged_or_new_run_folder_has_no_earlier_versions(tmp_path: Path) -> None:
    assert earlier_versions(tmp_path / "none", 3, NEW) == []
    (tmp_path / RUN_JSON).write_text("{")
    assert earlier_versions(tmp_path, 3, NEW) == []
