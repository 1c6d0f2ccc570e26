"""Runs that cannot go back to a checkpoint inside the running process."""

from collections.abc import Sequence
from typing import Any

from ..spec.errors import Problem
from .outputs import OFFLOAD_BLOCKS
from .schema import optimizer_name, value_at


def check_rewinding(
    flags: Sequence[str], task: str, ep: int, config: dict[str, Any]
) -> list[Problem]:
    """Report a recipe that asks for rewinds although its states cannot be restored in place.

    `flags` are the fields whose value is "rewind". `task` and `ep` are the recipe's values.
    """
    if not flags:
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
        Problem(
            f"{flag} = rewind",
            f"cannot be combined with {reason}",
            f"use --{flag} stop, and resume with --leave_out",
        )
        for flag in flags
        for reason in reasons
    ]
