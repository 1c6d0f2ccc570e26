"""The plot in README.md: its recorded data, and the sentence about it."""

import json
import re

from pool import ROOT

RECORD = json.loads((ROOT / "tests" / "support" / "layout_curves.json").read_text())


def test_the_losses_of_each_layout_are_those_of_plain_pytorch():
    plain, *layouts = RECORD["losses"].values()
    assert len(plain) == 20
    worst = max(
        abs(other / loss - 1)
        for losses in layouts
        for loss, other in zip(plain, losses, strict=True)
    )
    assert worst < 1e-5
    text = " ".join((ROOT / "README.md").read_text().split())
    told = re.search(
        r"fp32, ([\d-]+): the losses of \[(\d+) layouts\]\(tests/support/layout_curves.json\)"
        r" differ from plain PyTorch by at most (\S+) \(relative\)",
        text,
    )
    assert told and told.groups() == (
        RECORD["date"],
        str(len(layouts)),
        f"{worst:.1e}".replace("e-0", "e-"),
    )
