"""`peak_mem_bytes` is the maximum over all ranks, although only rank 0 writes it."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from job import metrics
from recipekit.spec.recipe import Recipe
from short_runs import BASE, train

MORE = 200 * 2**20


def train_and_remember(recipe: Recipe, argv: list[str]) -> tuple[Any, list[int]]:
    """Train on a rank of a pool; in the second step rank 1 allocates enough memory to raise its
    peak.

    Also return the peaks that each rank measured, in order.
    """
    from recipekit import train as loop
    from recipekit.runtime import metrics as line
    from recipekit.runtime import run_metadata

    told: list[int] = []
    kept: list[torch.Tensor] = []
    step = loop.train_step

    def remembered(device: torch.device) -> int:
        told.append(run_metadata.peak_memory(device))
        return told[-1]

    def hoarding(engine: Any, *arguments: Any, **more: Any) -> Any:
        if torch.distributed.get_rank() == 1 and engine.global_steps == 1:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
            kept.append(
                torch.ones(
                    run_metadata.peak_memory(engine.device) - resident + MORE, dtype=torch.uint8
                )
            )
        return step(engine, *arguments, **more)

    with (
        mock.patch.object(line, "peak_memory", remembered),
        mock.patch.object(loop, "train_step", hoarding),
    ):
        result = train(recipe, argv)
    return result, told


def test_the_largest_rank_is_told(pools: Any, tmp_path: Path) -> None:
    recipe = replace(BASE, eval_every=0, warmup_steps=0)
    first, second = pools.run(
        2, train_and_remember, recipe=recipe, argv=["--out", str(tmp_path / "run"), "--steps", "3"]
    )
    assert first[0][0] == second[0][0] == 0, (first, second)
    # It is measured before a step whose all-reduce includes the value, and after that step.
    own, other = (list(zip(told[1][::2], told[1][1::2], strict=True)) for told in (first, second))
    peaks = [line["peak_mem_bytes"] for line in metrics(tmp_path / "run")]
    assert other[1][1] > other[1][0] + MORE // 2
    assert peaks[:2] == [
        max(*mine, theirs[0]) for mine, theirs in zip(own[:2], other[:2], strict=True)
    ]
    assert peaks[2] == max(own[2][1], other[2][1])  # the last line covers all ranks up to now
    assert peaks == sorted(peaks)
