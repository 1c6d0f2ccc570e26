"""The monitor of a run: judges each step, raises alerts and decides whether the run stops."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .alerts import ERROR, WARNING, Alert, AlertLog, Level, NoAlerts
from .hang import HangWatch, NoHangWatch
from .machine import NoStorage, Storage
from .outliers import Divergence, Outliers
from .throughput import Goodput, Throughput, goodput_so_far

STOP = "stop"  # a value of --on_spike, and the answer of an alert that ended the run
REWIND = "rewind"  # the same for a run that went back to a checkpoint
SPREADS = "spreads above the median of the last steps"


def norm_outliers() -> Outliers:
    """Return the finder of outliers among gradient norms, which compares their logarithms.

    A norm may vary by a factor of 2 (0.7 in natural logarithms) without being an outlier.
    """
    return Outliers(logarithm=True, margin=0.7)


@dataclass
class Monitor:
    """Judge of a run's steps. Every rank has one, and all come to the same result.

    `report` receives the alerts; on ranks other than rank 0 it does nothing. `on_spike` is the
    recipe's value. `clock` returns seconds since 1970.
    """

    on_spike: str
    report: Callable[[Alert], None]
    clock: Callable[[], float] = time.time
    losses: Outliers = field(default_factory=Outliers)
    norms: Outliers = field(default_factory=norm_outliers)
    divergence: Divergence = field(default_factory=Divergence)
    throughput: Throughput = field(default_factory=Throughput)

    def look(self, step: int, loss: float, grad_norm: float, units_per_s: float) -> Alert | None:
        """Judge a finished step. Return the alert that ends the run or rewinds it, or None.

        An alert that rewinds the run is not reported yet, because its text depends on the rewind.
        `loss` and `grad_norm` are the same on every rank. `units_per_s` is the throughput in tokens
        or samples per second, as this rank has measured it.
        """
        spikes = [
            self._spike(step, name, value, finder)
            for name, value, finder in (
                ("loss", loss, self.losses),
                ("grad_norm", grad_norm, self.norms),
            )
        ]
        self._diverging(step, loss)
        self._slower(step, units_per_s)
        return next((alert for alert in spikes if alert and alert.answer), None)

    def _slower(self, step: int, units_per_s: float) -> None:
        if slower := self.throughput.look(units_per_s):
            now, best = slower
            text = (
                f"the last {Throughput.WINDOW} steps ran at {now:,.0f} units a second, which is"
                f" {1 - now / best:.0%} below this start's best {best:,.0f}"
            )
            self._raise(step, "throughput", WARNING, text, value=now, limit=best)

    def not_finite(self, step: int, loss: float, grad_norm: float, rank: int | None) -> None:
        """Report a step whose loss or gradient norm is not finite, and which ends the run.

        `rank` is the first rank whose own loss is not finite, if it is known.
        """
        where = "" if rank is None else f". Rank {rank} is the first whose own loss is not finite"
        text = f"step {step} has loss {loss} and grad_norm {grad_norm}{where}"
        value = loss if not math.isfinite(loss) else grad_norm
        self._raise(step, "nonfinite", ERROR, text, value=value, answer=STOP, rank=rank)

    def _spike(self, step: int, name: str, value: float, finder: Outliers) -> Alert | None:
        judged = finder.look(value)
        if not judged.alarm:
            return None
        answer = self.on_spike if self.on_spike in (STOP, REWIND) else None
        text = (
            f"{name} {value:.4g} at step {step} is the second in a row above the limit"
            f" {judged.limit:.4g}, {judged.score:.1f} {SPREADS}"
        )
        alert = Alert(
            self.clock(),
            step,
            "spike",
            ERROR if answer else WARNING,
            text,
            value=value,
            limit=judged.limit,
            answer=answer,
        )
        if answer != REWIND:
            self.report(alert)
        return alert

    def _diverging(self, step: int, loss: float) -> None:
        begins, level, lowest = self.divergence.look(loss)
        if begins:
            text = (
                f"the median loss of the last {Divergence.WINDOW} steps is {level:.4g},"
                f" {level / lowest - 1:.0%} above its lowest value {lowest:.4g}"
            )
            self._raise(step, "divergence", WARNING, text, value=level, limit=lowest)

    def _raise(self, step: int, kind: str, level: Level, text: str, **more: Any) -> None:
        self.report(Alert(self.clock(), step, kind, level, text, **more))

    def to_state(self) -> dict[str, Any]:
        """Return the windows of the finders, which a checkpoint stores."""
        return {
            "losses": self.losses.to_state(),
            "norms": self.norms.to_state(),
            "divergence": self.divergence.to_state(),
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue with the windows of a checkpoint. An older checkpoint has empty windows."""
        self.losses, self.norms, self.divergence = Outliers(), norm_outliers(), Divergence()
        if state:
            self.losses.restore(state["losses"])
            self.norms.restore(state["norms"])
            self.divergence.restore(state["divergence"])


class NoMonitor:
    """The monitor of a run with --no-watch. It judges nothing."""

    def look(self, step: int, loss: float, grad_norm: float, units_per_s: float) -> Alert | None:
        return None

    def not_finite(self, step: int, loss: float, grad_norm: float, rank: int | None) -> None: ...

    def to_state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any] | None) -> None: ...


@dataclass
class Watch:
    """The finders of this rank, its destination of alerts, and the run's goodput."""

    monitor: Monitor | NoMonitor
    alerts: AlertLog | NoAlerts
    goodput: Goodput
    storage: Storage | NoStorage = field(default_factory=NoStorage)
    hang: HangWatch | NoHangWatch = field(default_factory=NoHangWatch)

    def go_back(
        self, windows: Mapping[str, Any] | None, lines: Sequence[Mapping[str, Any]]
    ) -> None:
        """Continue from a checkpoint with these windows and these lines of metrics.jsonl."""
        self.monitor.restore(windows)
        self.goodput = goodput_so_far(lines, time.time())

    def close(self) -> None:
        self.hang.close()
        self.storage.close()
        self.alerts.close()
