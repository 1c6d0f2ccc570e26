"""Failed saves: when a save is retried, and when the run ends."""

from dataclasses import dataclass

from ..spec.errors import START_AGAIN, ConfigError, Problem

FAILED_SAVE_FIX = (
    "the checkpoints before it are intact. Free space or choose another --out, then start again"
)


@dataclass
class SaveAttempts:
    """The outcomes of a run's saves, which are the same on every rank.

    A failed save is retried after 1, 2, 4, ... further steps, so that a full disk slows training
    only slightly. The run ends when two consecutive regular saves have failed.
    """

    saved: int = 0  # the newest step whose save is complete
    error: str = ""  # error of the newest save; "" if that save is complete
    _step: int = 0  # step of the newest save
    _running: bool = False  # True while the newest save runs in the background
    _regular: bool = True
    _failed_before: int = 0  # first regular step after `saved` whose save failed
    _pause: int = 1  # steps until the next try

    def start(self, step: int, regular: bool) -> None:
        """Record that a save of this step begins."""
        self._step, self._regular, self._running = step, regular, True

    def due(self, step: int) -> bool:
        """Return True if a failed save should be retried at this step."""
        return bool(self.error) and not self._running and step >= self._step + self._pause

    def succeed(self) -> str:
        """Record that the save is complete.

        After earlier failures, return a line for the user.
        """
        line = (
            f"the checkpoint of step {self._step} is complete: saving works again"
            if self.error
            else ""
        )
        self.saved, self.error, self._running, self._failed_before, self._pause = (
            self._step,
            "",
            False,
            0,
            1,
        )
        return line

    def fail(self, error: str) -> str:
        """Record that the save has failed; return a line for the user.

        Raise `ConfigError` if the run must end.
        """
        again, self.error, self._running = bool(self.error), error, False
        if self._regular and self._failed_before:
            raise self.final_error()
        self._pause = 2 * self._pause if again else 1
        if self._regular:
            self._failed_before = self._step
        return "" if again else f"{error}. The run continues and tries again at the next steps"

    def final_error(self) -> ConfigError:
        """Return the error that ends a run whose saves fail; a later restart may succeed."""
        where, _, rule = self.error.partition(": ")
        if self._failed_before not in (0, self._step):
            rule = f"the saves of steps {self._failed_before} and {self._step} have failed: {rule}"
        return ConfigError([Problem(where, rule, FAILED_SAVE_FIX)], START_AGAIN)
