"""The page of all layouts, and the reports of layouts that differ from plain PyTorch."""

import pytest
from all_layouts import MODELS, cases, judged, page


def test_every_layout_of_four_ranks_is_a_case_once():
    found = list(cases(MODELS["BERT"]))
    assert len({case.name for case in found}) == len(found) == 4 * 2 * 5 + 2 * 2 * 3
    assert {case.world for case in found} == {1, 2, 4} and all(
        case.layout["pp"] == 1 or case.file in ("zero0", "zero1") for case in found
    )
    assert all(
        case.layout == {"tp": 1, "pp": case.layout["pp"]} and case.numbers["micro_batch"] in (2, 4)
        for case in cases(MODELS["ResNet"])
    )


def test_a_layout_that_differs_is_told_and_shown(monkeypatch: pytest.MonkeyPatch):
    def differs(*_: object, case: object) -> None:
        pytest.fail("a weight\nclassifier.weight differs by 0.5")

    monkeypatch.setattr("test_all_layouts.differs", differs, raising=False)
    monkeypatch.setattr("test_all_layouts.equals", lambda *_, case: None, raising=False)
    model = MODELS["ViT"]
    case = next(cases(model))
    wrong = judged(model._replace(test="test_all_layouts.differs"), None, case)
    assert (
        wrong == "Failed: classifier.weight differs by 0.5"
        and judged(model._replace(test="test_all_layouts.equals"), None, case) == "equal"
    )
    written = page(
        {"ViT": {"zero0 micro_batch 1 dp1": wrong, "zero0 micro_batch 1 dp2": "equal"}},
        {"ViT": "2026-11-26"},
        ["--page", "x.md"],
    )
    assert (
        "## ViT (`--task image_classification`): 1 of 2 equal\n\nIts last cell ran on 2026-11-26."
        in written
        and "| 0 | 1 | **no** | = |" in written
    )
    assert "- zero0 micro_batch 1 dp1: Failed: classifier.weight differs by 0.5" in written
