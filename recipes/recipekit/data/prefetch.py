"""A thread that prepares the next steps while the current step is trained."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..spec.task import MicroBatch
from .stream_state import StreamState

PREFETCH = 3  # minimum number of steps prepared ahead
# Shortest and longest sleep in seconds while the queue of prepared steps is full. Each wake-up
# takes time from the training thread.
POLL_SLEEP_RANGE = 0.005, 0.1


class Stream:
    """An iterator over (one step's micro-batches for one data-parallel rank, state after the step).

    A thread prepares the steps ahead. `state` is the state after the last returned step. Before the
    first step, it is the state with which the stream was opened. If the thread fails, `next` raises
    the error, and `error_ahead` returns the error one step earlier. `close` ends the thread.
    `files` contains the stream's files: domain -> file -> digest.
    """

    def __init__(
        self,
        steps: Iterator[tuple[list[MicroBatch], StreamState]],
        state: StreamState,
        prefetch: int = PREFETCH,
        closed: threading.Event | None = None,
        files: dict[str, dict[str, str]] | None = None,
    ):
        self.state, self.files = state, files or {}
        self._queue: queue.Queue = queue.Queue(prefetch)
        self._closed = closed or threading.Event()  # ends every wait of the thread
        self._ahead: Any = None  # removed from the queue, but not yet returned
        self._thread = threading.Thread(target=self._read, args=(steps,), name="data", daemon=True)
        self._thread.start()

    def _read(self, steps: Iterator[tuple[list[MicroBatch], StreamState]]) -> None:
        try:
            for step in steps:
                self._wait_for_room()
                self._queue.put(step)
                if self._closed.is_set():
                    return
        except BaseException as error:  # the thread that calls next raises it
            if not self._closed.is_set():
                self._queue.put(error)

    def _wait_for_room(self) -> None:
        """Wait until a step has been taken from the queue, and then sleep briefly.

        If taking a step woke this thread directly, this thread would compete for the interpreter
        with the training thread just as training continues.
        """
        pause, longest = POLL_SLEEP_RANGE
        while self._queue.full() and not self._closed.is_set():
            time.sleep(pause)
            pause = min(2 * pause, longest)
        if pause > POLL_SLEEP_RANGE[0]:
            time.sleep(POLL_SLEEP_RANGE[0])

    def __iter__(self) -> "Stream":
        return self

    def error_ahead(
        self, should_stop: Callable[[], object] = lambda: False
    ) -> BaseException | None:
        """Return the error that the following `next` call will raise, or None.

        Wait until the result is known or until `should_stop()` is true.
        """
        while self._ahead is None and not should_stop():
            alive = self._thread.is_alive()  # read before the queue, to find the last item
            try:
                self._ahead = (
                    RuntimeError("the stream is closed")
                    if self._closed.is_set()
                    else self._queue.get(timeout=1)
                )
            except queue.Empty:
                if not alive:
                    self._ahead = RuntimeError("the data thread died without an error")
        return self._ahead if isinstance(self._ahead, BaseException) else None

    def first_ahead(self) -> list[MicroBatch]:
        """Return the micro-batches that the next `next` call will return; [] before an error."""
        return [] if self.error_ahead() else self._ahead[0]

    def __next__(self) -> tuple[list[MicroBatch], StreamState]:
        if error := self.error_ahead():
            raise error
        step, self._ahead = self._ahead, None
        self.state = step[1]
        return step

    def close(self) -> None:
        self._closed.set()
        self._ahead = (
            RuntimeError("the stream is closed")
            if not isinstance(self._ahead, BaseException)
            else self._ahead
        )
        while self._thread.is_alive():
            while not self._queue.empty():
                self._queue.get()
            self._thread.join(0.01)
        # an error in the queue would keep its frames alive, and with them their open files
        self._queue.queue.clear()
