"""tools/releases.py and tools/make/release_cells.py: a wrong release of transformers is named, and
the page has one row for each release.

A planted release is a folder of links to the installed transformers, in which one file differs.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pool import ROOT, environment

sys.path.insert(0, str(ROOT / "tools"))
import releases

CELLS = ROOT / "tools" / "make" / "release_cells.py"
SUM = "            top_k_weights = _AllReduceBackward.apply(top_k_weights, tp_group)\n"
CHECKPOINT = "self._gradient_checkpointing_func(partial(forward, self, **kwargs), *args)"
OTHER_DROPOUT = """\
self._gradient_checkpointing_func(
                    partial(forward, self, **kwargs),
                    *args,
                    preserve_rng_state=self.self_attn.layer_idx != 1,
                )"""


def planted(folder: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """Link the installed transformers into `folder`, with a text replaced in some files."""
    info = Path(str(importlib.metadata.distribution("transformers").locate_file("")))
    package = Path(str(importlib.util.find_spec("transformers").origin)).parent
    shutil.copytree(
        package,
        folder / "transformers",
        copy_function=os.symlink,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    metadata = next(info.glob("transformers-*.dist-info"))
    (folder / metadata.name).symlink_to(metadata)
    for name, (before, after) in changes.items():
        file = folder / "transformers" / name
        text = file.read_text()
        assert before in text, name
        file.unlink()
        file.write_text(text.replace(before, after))
    return folder


def judged(folder: Path, release: Path, *cells: str) -> releases.Judged:
    """Run cells with a planted release, by the command that tools/releases.py runs."""
    results = folder / "results.json"
    path = os.pathsep.join([str(release), environment()["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, str(CELLS), "--results", str(results), "--cells", *cells],
        env=environment() | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert results.exists(), done.stdout + done.stderr
    found = releases.read_verdicts(json.loads(results.read_text()))
    assert done.returncode == bool(found.worst)
    return found


PLANTED = {
    "a style's sum": (
        {"distributed/tensor_parallel.py": (SUM, "")},
        ["experts pp2", "experts tp2"],
        r"experts tp2: step 1, model\.layers\.\d\.mlp\.\S+: grad_norm ",
    ),
    "a renamed function": (
        {
            f"distributed/{name}.py": ("_get_parameter_plan", "_find_parameter_plan")
            for name in ("parallel_utils", "mixin")
        },
        ["dense pp2"],
        r"dense pp2: AttributeError: module \S+ has no attribute '_get_parameter_plan'",
    ),
    "a changed default": (
        {
            "models/qwen3_moe/configuration_qwen3_moe.py": (
                "norm_topk_prob: bool = False",
                "norm_topk_prob: bool = True",
            )
        },
        ["experts zero3"],
        r"plain experts: step 1, model\.\S+weight: a default has changed: loss ",
    ),
    "a layer with other dropout": (
        {"modeling_layers.py": (CHECKPOINT, OTHER_DROPOUT)},
        ["dense zero3", "dense zero3, recomputed"],
        r"dense zero3, recomputed: step 1, model\.layers\.\S+weight: loss ",
    ),
}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_release_is_named_by_its_cell_and_tensor(tmp_path: Path, name: str) -> None:
    changes, cells, said = PLANTED[name]
    found = judged(tmp_path, planted(tmp_path / "release", changes), *cells)
    print(found.worst)
    assert found.num_wrong == 1
    assert re.match(said, found.worst), found.worst


@pytest.mark.slow
@pytest.mark.processes
def test_the_installed_release_is_right(tmp_path: Path) -> None:
    found = judged(tmp_path, planted(tmp_path / "release", {}), "tied tp2", "experts ep2")
    assert not found.worst and 0 < found.deviation < 1e-5


RELEASES = {"transformers": "5.23.0", "torch": "2.13.0", "deepspeed": "0.19.8", "peft": "0.21.2"}


def test_a_release_has_one_row_and_rows_are_in_order() -> None:
    page = f"before\n{releases.BEGIN}{releases.END}after\n"
    for release, worst in (("5.23.0", "dense tp2: a | b"), ("5.9.1", ""), ("5.23.0", "")):
        found = releases.Judged(RELEASES | {"transformers": release}, 2e-7, worst, bool(worst))
        page = releases.with_row(page, found)
        assert worst.replace("|", "\\|") in page
    rows = [line for line in page.splitlines() if line.startswith("| 5")]
    assert [line.split(" | ")[0] for line in rows] == ["| 5.9.1", "| 5.23.0"]
    assert all(line.endswith(" | right to 2.0e-07 |") for line in rows)
    assert page.startswith("before\n") and page.endswith("after\n")


def test_a_changed_mark_is_listed_and_a_changed_number_is_not() -> None:
    head = "| type | zero3 | tp2 |\n| --- | --- | --- |\n"
    before = f"{head}| llama | ✓ 3e-07 | ✓ 2e-07 |\n| bamba | ✓ 1e-06 | no plan |\n"
    after = f"{head}| llama | ✓ 1e-07 | ✓ 2e-06 |\n| bamba | ✓ 1e-06 | ✓ 4e-07 |\n| jev | ✗ | ✗ |\n"
    assert releases.changed_marks("SUPPORT.md", before, after) == [
        "SUPPORT.md: bamba: ✓ | no plan -> ✓ | ✓",
        "SUPPORT.md: jev: no row -> ✗ | ✗",
    ]
