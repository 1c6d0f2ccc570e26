"""Metrics of a step for the progress line."""

from typing import Any


def of_step(step: int, **more: Any) -> dict[str, Any]:
    numbers = {
        "loss": 2.34567,
        "lr": 3e-4,
        "tokens": 10**9,
        "step_s": 2.0,
        "tokens_per_s": 12345.6,
        "peak_mem_bytes": int(71.2 * 2**30),
    }
    return {"step": step, "epoch": 0.31, **numbers, **more}
