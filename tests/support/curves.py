"""Losses of recorded runs of this repository, numbers only."""

import json
from pathlib import Path


def recorded_curves() -> dict[str, list[float]]:
    """Return the loss of each step, by run. The file names the command of each run."""
    found = json.loads(Path(__file__).with_name("recorded_curves.json").read_text())
    return {name: run["loss"] for name, run in found.items()}
