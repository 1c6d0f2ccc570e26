"""How the failure of one rank ends the job in seconds, wherever the other ranks are.

A rank that raises must not leave its process groups: with NCCL that waits for the peers, which wait for this rank. It
prints its traceback, leaves a mark in the store that the process group met in, and ends. A thread of every other rank
looks for that mark, and ends its rank although the main thread is blocked in a collective, which lets go of the GIL.

    the failed rank     traceback; mark; waits until every rank has seen it, at most SEEN; "gone"; ends with 1
    any other rank      waits until the failed one is gone, so that a launcher names that one; says why; ends with 1
    rank 0, killed      took the store with it, which counts as a mark (torchrun keeps the store in its agent)
"""

import contextlib
import io
import json
import os
import platform
import queue
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Self

from .refusal import Refusal, exit_refused
from .stopping import POLL, leave, tell

SEEN = 2.0  # seconds in which the other ranks see the mark
LAST_WORDS = 5.0  # seconds for what a rank still has to write down elsewhere, the state of its W&B run
GONE = SEEN + LAST_WORDS + 1.0  # seconds after which a failed rank ends whatever it still waits for
AFTER = 1.0  # seconds that a rank ends later than the one that failed: launchers look at most once in these
LEAVING = 600.0  # seconds that rank 0, which holds the store, waits at a clean end for the others to come to theirs


class Peers:
    """The other ranks of the job. `with peers:` ends this rank on an exception at once, before anything else is undone.

    Nothing happens before `watch`, and nothing where there is one rank: there an exception takes its usual way.
    `last_words` is called, in a thread, when this rank or another one has failed.
    """

    def __init__(self) -> None:
        self.last_words: Callable[[], None] = lambda: None
        self._ends: queue.SimpleQueue[str] = queue.SimpleQueue()  # how this rank ends: its mark, or "" for a clean end
        self._done = threading.Event()  # what the thread had to do for that is done
        self._failed: dict[str, Any] = {}  # the mark of another rank
        self._answered = threading.Event()  # whether there is one is known
        self._refused = False
        self._thread: threading.Thread | None = None

    def watch(self, group: Any) -> None:
        """Starts to look at the other ranks (a collective on `group`, of all ranks on the CPU)."""
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        if dist.get_world_size() == 1:
            return
        met: Any = _get_default_store()
        own = met.clone()  # a connection of its own: each answers one call at a time
        start = [secrets.token_hex(8)]  # an agent keeps its store over restarts, with the marks of earlier ones
        dist.broadcast_object_list(start, group=group)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._store = PrefixStore(f"failure/{start[0]}", own)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # nothing is lost when this rank is ended
        self._thread = threading.Thread(target=self._look, name="peers", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """A clean end: rank 0, and the store with it, stays until no rank looks any more."""
        if self._thread is not None:
            self._ends.put("")
            self._thread.join(LEAVING + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self._thread is not None:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """Tells what has happened and ends this rank, in GONE seconds whatever it meets."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # launchers send them; this rank is on its way out
        code, what = 1, traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
        if isinstance(error, Refusal):
            self._refused = True
            code, what = error.exit_code, f"refused: {error.problems[0]}"
            with contextlib.suppress(SystemExit):
                exit_refused(error, 3.0)  # it can be this rank's alone
        self._ends.put(json.dumps({"rank": self._rank, "host": platform.node(), "what": what[:300]}))
        self._answered.wait(1.0)
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif not self._refused and self._failed:
            tell(f"failed after rank {self._failed['rank']}: {what}")
        elif not self._refused:
            lines = "".join(traceback.format_exception(error)).splitlines()
            with contextlib.suppress(OSError):
                os.write(2, "".join(f"[rank{self._rank}]: {line}\n" for line in lines).encode(errors="replace"))
        self._done.wait(GONE)
        os._exit(code)

    def _look(self) -> None:
        """The thread: until this rank ends, or another one has failed."""
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    own = self._ends.get(timeout=POLL)
                    return self._leave_mark(own) if own else self._stop_looking()
                if self._store.check(["mark"]):
                    return self._follow(json.loads(self._store.get("mark")))
        except RuntimeError:  # the store is gone, and with it what hosts it
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # else the launcher has gone, which stopping.py sees
                self._follow({"rank": 0, "host": os.environ["MASTER_ADDR"], "what": "it is gone without a word"})

    def _leave_mark(self, own: str) -> None:
        first = json.loads(self._store.compare_set("mark", "", own))
        if first["rank"] != self._rank:
            return self._follow(first)
        self._answered.set()
        saying = self._say_last_words()
        self._wait_for(lambda: self._store.add("seen", 0) == self._world - 1, SEEN)
        saying.join(LAST_WORDS)
        self._store.set("gone", "")
        if self._rank == 0:
            time.sleep(0.3)  # all have read it: torch prints a C++ stack where a store goes away under a question
        return self._done.set()

    def _follow(self, mark: dict[str, Any]) -> None:
        """Ends this rank after the one that failed."""
        self._failed = mark
        self._answered.set()
        ending = threading.Timer(GONE + 2 * AFTER, os._exit, [1])  # a store that answers no more keeps no rank
        ending.daemon = True
        ending.start()
        saying = self._say_last_words()
        with contextlib.suppress(RuntimeError):  # rank 0 has gone, and the store with it
            self._store.add("seen", 1)
            self._wait_for(lambda: self._store.check(["gone"]) and (self._rank > 0 or self._store.add("seen", 0) == self._world - 1), GONE)
        saying.join(LAST_WORDS)
        time.sleep(AFTER)
        if self._refused:  # all ranks meet most refusals at once, and the first rank of the host has told
            os._exit(1)
        leave(1, f"ended, because rank {mark['rank']} on {mark['host']} failed: {mark['what']}")

    def _stop_looking(self) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 has waited long enough
            self._store.add("left", 1)
        if self._rank == 0:
            self._wait_for(lambda: self._store.add("left", 0) == self._world or self._store.check(["mark"]), LEAVING)
            if self._store.check(["mark"]):
                self._follow(json.loads(self._store.get("mark")))

    def _say_last_words(self) -> threading.Thread:
        saying = threading.Thread(target=self.last_words, name="last words", daemon=True)
        saying.start()
        return saying

    @staticmethod
    def _wait_for(true: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not true() and time.monotonic() < end:
            time.sleep(0.05)
