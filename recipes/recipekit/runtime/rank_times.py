"""The times of the ranks: the own work of each, and its waiting in collectives."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..compat.torch import collectives_replaced
from ..parallel.groups import long_wait_group
from ..spec.mesh import Mesh
from ..watch.alerts import WARNING, Alert
from ..watch.stragglers import RankTimes, SlowRank, Stragglers

MICRO = 1e6  # the times travel as whole microseconds
# a fixed matrix product: (rows and columns, repetitions), about half a second on a CPU core
PRODUCT = {"cpu": (512, 60), "cuda": (8192, 30)}
OWN, WAITED, DATA = "own time", "waited", "data wait"  # names of extra counts


class WaitingClock:
    """Adds up the seconds in which the training thread is blocked in collectives.

    This is right for collectives on the host, such as gloo's. On an accelerator, a collective
    returns before it is done.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread = threading.get_ident()
        self._inside = False

    def around(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls a collective and counts the time until it returns."""

        def timed(*args: object, **named: object) -> object:
            if self._inside or threading.get_ident() != self._thread:
                return collective(*args, **named)
            self._inside = True
            begun = time.perf_counter()
            try:
                return collective(*args, **named)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - begun

        return timed

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class RankClock:
    """Times this rank's steps, and finds slow ranks from the times of all ranks.

    The times of a step are added to the sums of the next one, so they need no collective. `hosts`
    has the host of each rank, if it is known.
    """

    def __init__(self, mesh: Mesh, rank: int, hosts: tuple[str, ...], device: torch.device):
        self.mesh, self.rank, self.hosts, self.device = mesh, rank, hosts, device
        stages = [mesh.coords(other)["pp"] for other in range(mesh.world)]
        self.stragglers = Stragglers(
            [
                [other for other in range(mesh.world) if stages[other] == stage]
                for stage in range(mesh.pp)
            ]
        )
        self._waiting = WaitingClock()
        self._undo = contextlib.ExitStack()
        self._undo.enter_context(collectives_replaced(self._waiting.around))
        self._last: dict[str, float] = {}  # seconds of the last step, by name of the count

    def start_step(self) -> None:
        self._waiting.take()

    def end_step(self, seconds: float, data_wait: float) -> None:
        """Note the seconds of a step of this rank, and those in which it waited for data."""
        waited = self._waiting.take()
        own = max(0.0, seconds - waited - data_wait)
        self._last = {OWN: own, WAITED: waited, DATA: data_wait}

    def counts(self) -> dict[str, list[int]]:
        """Return the extra counts of this rank: one slot per rank for each of its times."""
        counts = {}
        for name in (OWN, WAITED, DATA):
            counts[name] = [0] * self.mesh.world
            counts[name][self.rank] = round(MICRO * self._last.get(name, 0.0))
        return counts

    def metrics(self, sums: dict[str, list[int]]) -> dict[str, float]:
        """Return the metrics of the step before, from the sums over the ranks."""
        own, waited = ([value / MICRO for value in sums[name]] for name in (OWN, WAITED))
        if not any(own):
            return {}  # the first step of a start
        return {"comm_s": sum(waited) / len(waited), "own_s_max": max(own)}

    def look(self, step: int, sums: dict[str, list[int]]) -> list[Alert]:
        """Return alerts about slow ranks, which are the same on every rank.

        If a rank is slow, all ranks compute a matrix product (a collective).
        """
        own, waited, data = (
            [value / MICRO for value in sums[name]] for name in (OWN, WAITED, DATA)
        )
        if not any(own):
            return []
        seconds = max(map(sum, zip(own, waited, data, strict=True)))
        slow = self.stragglers.look(RankTimes(seconds, own, data))
        stragglers = [found.rank for found in slow if found.kind == "straggler"]
        products = self._time_products() if stragglers else []
        return [self._alert(step, found, products) for found in slow]

    def _time_products(self) -> list[float]:
        """Return the seconds that each rank needs for the same product (a collective)."""
        size, times = PRODUCT.get(self.device.type, PRODUCT["cpu"])
        matrix = torch.ones(size, size, device=self.device)
        begun = time.perf_counter()
        product = matrix
        for _ in range(times):
            product = matrix @ matrix
        float(product[0, 0])  # waits for the device
        everyone: list[Any] = [None] * self.mesh.world
        seconds = time.perf_counter() - begun
        dist.all_gather_object(everyone, seconds, group=long_wait_group())
        return everyone

    def _alert(self, step: int, found: SlowRank, products: list[float]) -> Alert:
        text = found.text
        if found.kind == "straggler":
            others = sorted(products[: found.rank] + products[found.rank + 1 :])
            ratio = products[found.rank] / max(others[len(others) // 2], 1e-9)
            text += (
                f". A fixed matrix product takes {ratio:.1f} x as long there as on the other ranks,"
                + (
                    " so its device or host is slow"
                    if ratio > 1.2
                    else " so its device is not slow"
                )
            )
        return Alert(
            time.time(),
            step,
            found.kind,
            WARNING,
            text,
            rank=found.rank,
            host=self.hosts[found.rank] if self.hosts else None,
            device=str(self.device.type),
            value=found.value,
            limit=found.limit,
        )

    def close(self) -> None:
        self._undo.close()


class NoRankClock:
    """The clock of a run with --no-watch, on one rank, or on an accelerator."""

    def start_step(self) -> None: ...

    def end_step(self, seconds: float, data_wait: float) -> None: ...

    def counts(self) -> dict[str, list[int]]:
        return {}

    def metrics(self, sums: dict[str, list[int]]) -> dict[str, float]:
        return {}

    def look(self, step: int, sums: dict[str, list[int]]) -> list[Alert]:
        return []

    def close(self) -> None: ...
