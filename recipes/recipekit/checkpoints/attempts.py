"""Saves that fail: when the next one is tried, and when a run ends."""

from dataclasses import dataclass

from ..spec.refusal import START_AGAIN, Problem, Refusal

FIX = "the checkpoints before it are intact. Free space or choose another --out, then start again"


@dataclass
class Attempts:
    """The outcomes of a run's saves, the same on every rank.

    A failed save is tried again after 1, 2, 4, ... further steps, so that a disk that stays full
    slows training little. The run ends when a regular save and the next regular save have both
    failed.
    """

    saved: int = 0  # the newest step whose save is complete
    error: str = ""  # of the newest save; "" if it is complete
    _step: int = 0  # of the newest save
    _running: bool = False  # in the background
    _regular: bool = True
    _failed_before: int = 0  # the first regular step whose save failed since `saved`
    _pause: int = 1  # steps until the next try

    def begin(self, step: int, regular: bool) -> None:
        """Note the step of a save that begins."""
        self._step, self._regular, self._running = step, regular, True

    def due(self, step: int) -> bool:
        """Return True if a failed save should be tried again at this step."""
        return bool(self.error) and not self._running and step >= self._step + self._pause

    def succeed(self) -> str:
        """Note that the save is complete; return a line for the user if saves had failed before."""
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
        """Note that the save has failed; return a line for the user.

        Raises `Refusal` if the run should end.
        """
        again, self.error, self._running = bool(self.error), error, False
        if self._regular and self._failed_before:
            raise self.ending()
        self._pause = 2 * self._pause if again else 1
        if self._regular:
            self._failed_before = self._step
        return "" if again else f"{error}. The run continues and tries again at the next steps"

    def ending(self) -> Refusal:
        """Return what ends a run whose saves fail: a later start may find the disk well."""
        where, _, rule = self.error.partition(": ")
        if self._failed_before not in (0, self._step):
            rule = f"the saves of steps {self._failed_before} and {self._step} have failed: {rule}"
        return Refusal([Problem(where, rule, FIX)], START_AGAIN)
