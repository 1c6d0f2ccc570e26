"""A thread that prepares the next steps while one is trained."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..spec.task import MicroBatch
from .sameness import StreamState

PREFETCH = 3  # steps prepared ahead, at least
# seconds that the thread sleeps at first and at most while its steps wait to be taken: each waking
# costs the trainer
LULL = 0.005, 0.1


class Stream:
    """Iterates over (micro-batches of one optimizer step on one data-parallel rank, state after
    it), prepared ahead by one thread.

    `state` is the state after the batch handed out last, at first the one that the stream was
    opened with. An error in the thread is raised by `next`, and shown one step before by
    `error_ahead`. `close` ends the thread. `files` names what is read: domain -> file -> digest.
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
        self._closed = closed or threading.Event()  # ends what the thread waits for
        self._ahead: Any = None  # taken from the queue, not yet handed out
        self._thread = threading.Thread(target=self._read, args=(steps,), name="data", daemon=True)
        self._thread.start()

    def _read(self, steps: Iterator[tuple[list[MicroBatch], StreamState]]) -> None:
        try:
            for step in steps:
                self._wait_for_room()
                self._queue.put(step)
                if self._closed.is_set():
                    return
        except BaseException as error:  # whatever it is, it belongs to the thread that calls next
            if not self._closed.is_set():
                self._queue.put(error)

    def _wait_for_room(self) -> None:
        """Waits until a step has been taken and some time has gone by since.

        If the thread that takes a step woke this one, both would want the interpreter at the moment
        when training goes on.
        """
        pause, longest = LULL
        while self._queue.full() and not self._closed.is_set():
            time.sleep(pause)
            pause = min(2 * pause, longest)
        if pause > LULL[0]:
            time.sleep(LULL[0])

    def __iter__(self) -> "Stream":
        return self

    def error_ahead(self, leave: Callable[[], object] = lambda: False) -> BaseException | None:
        """Finds the error that the next `next` will raise, or None; waits until that is known, or
        `leave()` is true.
        """
        while self._ahead is None and not leave():
            alive = self._thread.is_alive()  # asked first: what it put last is found below
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
        """Return the micro-batches that the next `next` will return; [] if it will raise an
        error.
        """
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
        # an error in it would keep its frames, and the files that they have open
        self._queue.queue.clear()
