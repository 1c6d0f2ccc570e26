"""Ranks as threads of one process. Collectives are implemented in Python, so tests see the results
of all ranks within milliseconds.

This tests the arithmetic around a collective, not the collective itself; pool.py runs real ranks. A
group is a tuple of ranks, and None means all ranks.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

ADD = {
    dist.ReduceOp.SUM: lambda values: values.sum(0),
    dist.ReduceOp.MAX: lambda values: values.amax(0),
    dist.ReduceOp.MIN: lambda values: values.amin(0),
}
SECONDS = 20.0  # timeout of a rank that waits alone


class Ranks:
    """A runner for cases on several threads at a time.

    `sizes` records the number of elements in each all-reduce on rank 0.
    """

    def __init__(self, world: int, monkeypatch: pytest.MonkeyPatch):
        self.world, self.sizes = world, list[int]()
        self._own, self._lock = threading.local(), threading.Lock()
        self._meetings: dict[tuple[int, ...], tuple[threading.Barrier, dict[int, Any]]] = {}
        for name in ("all_reduce", "all_gather", "all_to_all_single", "get_rank", "get_world_size"):
            monkeypatch.setattr(dist, name, getattr(self, f"_{name}"))

    def run(self, case: Callable[[int], Any]) -> list[Any]:
        """Return the result of `case(rank)` on every rank, or raise the first exception of a
        rank.
        """
        found: list[Any] = [None] * self.world
        failed: list[BaseException] = []

        def work(rank: int) -> None:
            self._own.rank = rank
            try:
                found[rank] = case(rank)
            except BaseException as error:
                failed.append(error)
                for barrier, _ in list(self._meetings.values()):
                    barrier.abort()

        threads = [
            threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.world)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise next(
                (error for error in failed if not isinstance(error, threading.BrokenBarrierError)),
                failed[0],
            )
        return found

    def _exchange(self, group: Any, value: Any) -> list[Any]:
        """Return the values of all ranks of a group, in the order of the ranks."""
        ranks = tuple(range(self.world)) if group is None else group
        with self._lock:
            barrier, given = self._meetings.setdefault(ranks, (threading.Barrier(len(ranks)), {}))
        given[self._own.rank] = value
        barrier.wait(SECONDS)
        found = [given[rank] for rank in ranks]
        barrier.wait(SECONDS)
        return found

    def _all_reduce(
        self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None
    ) -> None:
        if self._own.rank == 0:
            self.sizes.append(tensor.numel())
        tensor.copy_(ADD[op](torch.stack(self._exchange(group, tensor.detach().clone()))))

    def _all_gather(
        self, tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None
    ) -> None:
        for into, value in zip(
            tensors, self._exchange(group, tensor.detach().clone()), strict=True
        ):
            into.copy_(value)

    def _all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, group: Any = None
    ) -> None:
        place = self._get_rank(group)
        output.copy_(
            torch.cat(
                [
                    value.chunk(self._get_world_size(group))[place]
                    for value in self._exchange(group, tensor.clone())
                ]
            )
        )

    def _get_rank(self, group: Any = None) -> int:
        return self._own.rank if group is None else group.index(self._own.rank)

    def _get_world_size(self, group: Any = None) -> int:
        return self.world if group is None else len(group)
