"""The monitor of a run: judges each step, raises alerts and decides whether the run stops."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .alerts import ERROR, WARNING, Alert, AlertLog, Level, NoAlerts
from .blame import BadValue
from .hang import HangWatch, NoHangWatch
from .machine import NoStorage, Storage
from .outliers import Divergence, Outliers
from .throughput import Goodput, Throughput, goodput_so_far

# Values of --on_spike and --on_nonfinite, and answers of an alert: the run ended, the step was
# passed over, or the run went back to a checkpoint.
STOP, SKIP, REWIND = "stop", "skip", "rewind"
RETRY = "retry"  # the answer of an alert about a step that was computed again
MOST_SKIPPED = 20  # skipped steps in a row that end the run
SPREADS = "spreads above the median of the last steps"


def norm_outliers() -> Outliers:
    """Return the finder of outliers among gradient norms, which compares their logarithms.

    A norm may vary by a factor of 2 (0.7 in natural logarithms) without being an outlier.
    """
    return Outliers(logarithm=True, margin=0.7)


@dataclass
class Monitor:
    """Judge of a run's steps. Every rank has one, and all come to the same result.

    `report` receives the alerts; on ranks other than rank 0 it does nothing. `on_spike` and
    `on_nonfinite` are the recipe's values. `clock` returns seconds since 1970.
    """

    on_spike: str
    report: Callable[[Alert], None]
    on_nonfinite: str = STOP
    clock: Callable[[], float] = time.time
    losses: Outliers = field(default_factory=Outliers)
    norms: Outliers = field(default_factory=norm_outliers)
    divergence: Divergence = field(default_factory=Divergence)
    throughput: Throughput = field(default_factory=Throughput)
    most_norm: float = math.inf  # limit of the present step
    skipped_in_row: int = 0  # steps that were passed over since the last one that was taken

    def limit_norm(self) -> float:
        """Return the largest gradient norm with which the next step is taken."""
        self.most_norm = self.norms.limit() if self.on_spike == SKIP else math.inf
        return self.most_norm

    def look(self, step: int, loss: float, grad_norm: float, units_per_s: float) -> Alert | None:
        """Judge a finished step. Return the alert that ends the run or rewinds it, or None.

        An alert that rewinds the run is not reported yet, because its text depends on the rewind.
        `loss` and `grad_norm` are the same on every rank. `units_per_s` is the throughput in tokens
        or samples per second, as this rank has measured it.
        """
        skipped = math.isfinite(grad_norm) and grad_norm > self.most_norm
        self.skipped_in_row = self.skipped_in_row + 1 if skipped else 0
        spikes = [self._spike(step, "loss", loss, self.losses)]
        if skipped:
            self.norms.look(grad_norm)
            spikes.append(self._skipped(step, grad_norm))
        else:
            spikes.append(self._spike(step, "grad_norm", grad_norm, self.norms))
        self._diverging(step, loss)
        self._slower(step, units_per_s)
        return next((alert for alert in spikes if alert and alert.answer in (STOP, REWIND)), None)

    def _slower(self, step: int, units_per_s: float) -> None:
        if slower := self.throughput.look(units_per_s):
            now, best = slower
            text = (
                f"the last {Throughput.WINDOW} steps ran at {now:,.0f} units a second, which is"
                f" {1 - now / best:.0%} below this start's best {best:,.0f}"
            )
            self._raise(step, "throughput", WARNING, text, value=now, limit=best)

    def _skipped(self, step: int, norm: float) -> Alert:
        """Report a step that was passed over because of its gradient norm."""
        stops = self.skipped_in_row >= MOST_SKIPPED
        text = f"grad_norm {norm:.4g} at step {step} is above the limit {self.most_norm:.4g}"
        text += f", {in_a_row(self.skipped_in_row)}" if stops else ": the step is passed over"
        return self._raise(
            step,
            "spike",
            ERROR if stops else WARNING,
            text,
            value=norm,
            limit=self.most_norm,
            answer=STOP if stops else SKIP,
        )

    def not_finite(
        self, step: int, loss: float, grad_norm: float, first: BadValue | None
    ) -> Alert | None:
        """Report a step whose loss or gradient norm is not finite, also when computed again.

        The answer of the alert is STOP, SKIP or REWIND. `first` is the first bad value, if a hook
        has seen one.
        """
        self.skipped_in_row += 1
        stops = self.on_nonfinite == SKIP and self.skipped_in_row >= MOST_SKIPPED
        text = f"step {step} has loss {loss} and grad_norm {grad_norm}"
        text += f". The first value that is not finite is {first}" if first else ""
        if self.on_nonfinite == SKIP:
            text += f". {in_a_row(self.skipped_in_row)}" if stops else ". The step is passed over"
        return self._raise(
            step,
            "nonfinite",
            ERROR,
            text,
            value=loss if not math.isfinite(loss) else grad_norm,
            answer=STOP if stops else self.on_nonfinite,
            **location_of(first),
        )

    def recovered(
        self, step: int, loss: float, grad_norm: float, ranks: Mapping[int, tuple[str, str]]
    ) -> None:
        """Report a step that was finite when it was computed again.

        `ranks` maps each rank whose own loss was not finite to its (host, device). A gradient names
        no rank, and with tensor parallelism a loss names several.
        """
        names = ", ".join(f"{rank} ({', '.join(place)})" for rank, place in ranks.items())
        which = f"only the loss of rank {names}" if len(ranks) == 1 else f"the losses of {names}"
        text = (
            f"transient: step {step} had loss {loss} and grad_norm {grad_norm}, and was finite when"
            " it was computed again, so the run continues without a change. "
        ) + (f"Not finite: {which}" if ranks else "The rank of a gradient is not known")
        place: dict[str, Any] = {}
        if len(ranks) == 1:
            ((rank, (host, device)),) = ranks.items()
            place = {"rank": rank, "host": host, "device": device}
        value = loss if not math.isfinite(loss) else grad_norm
        self._raise(step, "nonfinite", ERROR, text, value=value, answer=RETRY, **place)

    def _spike(self, step: int, name: str, value: float, finder: Outliers) -> Alert | None:
        judged = finder.look(value)
        if not judged.alarm:
            return None
        answer = self.on_spike if self.on_spike in (STOP, REWIND) else None
        text = (
            f"{name} {value:.4g} at step {step} is the second in a row above the limit"
            f" {judged.limit:.4g}, {judged.score:.1f} {SPREADS}"
        )
        return self._raise(
            step,
            "spike",
            ERROR if answer else WARNING,
            text,
            value=value,
            limit=judged.limit,
            answer=answer,
        )

    def _diverging(self, step: int, loss: float) -> None:
        begins, level, lowest = self.divergence.look(loss)
        if begins:
            text = (
                f"the median loss of the last {Divergence.WINDOW} steps is {level:.4g},"
                f" {level / lowest - 1:.0%} above its lowest value {lowest:.4g}"
            )
            self._raise(step, "divergence", WARNING, text, value=level, limit=lowest)

    def _raise(self, step: int, kind: str, level: Level, text: str, **more: Any) -> Alert:
        """Report an alert, and return it. An alert with the answer REWIND is not reported yet."""
        alert = Alert(self.clock(), step, kind, level, text, **more)
        if alert.answer != REWIND:
            self.report(alert)
        return alert

    def to_state(self) -> dict[str, Any]:
        """Return the windows of the finders, which a checkpoint stores."""
        return {
            "losses": self.losses.to_state(),
            "norms": self.norms.to_state(),
            "divergence": self.divergence.to_state(),
            "skipped_in_row": self.skipped_in_row,
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue with the windows of a checkpoint. An older checkpoint has empty windows."""
        self.losses, self.norms, self.divergence = Outliers(), norm_outliers(), Divergence()
        self.skipped_in_row = 0
        if state:
            self.losses.restore(state["losses"])
            self.norms.restore(state["norms"])
            self.divergence.restore(state["divergence"])
            self.skipped_in_row = state.get("skipped_in_row", 0)


def in_a_row(skipped: int) -> str:
    return f"{skipped} steps in a row were passed over, which ends the run"


def location_of(first: BadValue | None) -> dict[str, Any]:
    """Return the fields of an alert that say where a bad value was."""
    if first is None:
        return {}
    return {
        "rank": first.rank,
        "host": first.host,
        "device": first.device,
        "module": first.module,
    }


class NoMonitor:
    """The monitor of a run with --no-watch. It judges nothing."""

    def look(self, step: int, loss: float, grad_norm: float, units_per_s: float) -> Alert | None:
        return None

    def limit_norm(self) -> float:
        return math.inf

    def not_finite(
        self, step: int, loss: float, grad_norm: float, first: BadValue | None
    ) -> Alert | None:
        return None

    def recovered(
        self, step: int, loss: float, grad_norm: float, ranks: Mapping[int, tuple[str, str]]
    ) -> None: ...

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
