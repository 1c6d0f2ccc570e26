"""Runs that cannot go back to a checkpoint inside the running process."""

from typing import Any

from ..spec.errors import Problem
from .outputs import OFFLOAD_BLOCKS
from .schema import optimizer_name, value_at

INSTEAD = "use --on_spike stop, and resume with --leave_out"


def check_rewinding(on_spike: str, task: str, ep: int, config: dict[str, Any]) -> list[Problem]:
    """Report a recipe that asks for rewinds although its states cannot be restored in place.

    The first three arguments are the recipe's values.
    """
    if on_spike != "rewind":
        return []
    reasons = []
    if any(value_at(config, f"{block}.device") == "nvme" for block in OFFLOAD_BLOCKS):
        reasons.append("NVMe offload, whose states are in swap files while the run trains")
    if optimizer_name(config) == "OneBitAdam":
        reasons.append("1-bit Adam, whose compression errors are restored only at a start")
    if ep > 1:
        reasons.append(f"ep = {ep}, whose experts are restored only at a start")
    if task == "preference":
        reasons.append("DPO, whose reference log-probabilities are computed only at a start")
    return [
        Problem("on_spike = rewind", f"cannot be combined with {reason}", INSTEAD)
        for reason in reasons
    ]
