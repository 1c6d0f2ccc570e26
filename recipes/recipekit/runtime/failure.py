"""Ends the job within seconds of the failure of one rank, wherever the other ranks are.

A rank that raises must not destroy its process groups: with NCCL that call waits for the peers,
which wait for this rank. So the rank prints its traceback, leaves a mark in the process group's
store, and ends. A thread of every other rank looks for the mark and then ends its rank, even while
the main thread is blocked in a collective (which frees the GIL).

    the failed rank     traceback; mark; waits until every rank has seen it, at most SEEN; "gone";
                        ends with 1
    any other rank      waits until the failed rank is gone, so that a launcher names that rank;
                        says why; ends with 75 or 1
    a killed rank       leaves no mark: the ranks of its host miss its process, and the first one to
                        leave the mark says so
    rank 0, killed      took the store with it, which counts as a mark on the other hosts (torchrun
                        keeps the store in its agent)

A mark holds the exit code of the failed rank. If it is 75 (START_AGAIN: a lost rank or host, a
failing disk), every other rank ends with 75, otherwise with 1.
"""

import contextlib
import io
import json
import os
import platform
import queue
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from ..spec.refusal import START_AGAIN, Refusal, exit_refused, sentences
from .stopping import POLL, ignore_stops, leave, tell

SEEN = 2.0  # seconds in which the other ranks see the mark
LAST_WORDS = 5.0  # seconds for the last record of a rank elsewhere: the state of its W&B run
GONE = SEEN + LAST_WORDS + 1.0  # seconds after which a failed rank ends whatever it still waits for
# seconds that a rank waits after the failed rank has ended: launchers look at their processes once
# a second or more often
AFTER = 1.0
# words in the errors that gloo, NCCL and the store raise where another rank has gone
CUT = (
    "onnection",
    "remote process exited",
    "ncclRemoteError",
    "recvValue failed",
    "Broken pipe",
    "imed out waiting",
)
MISSED = 3.0  # seconds in which a rank that has lost its connection learns which rank is gone
# seconds that rank 0, which holds the store, waits at a clean end until the other ranks have ended
LEAVING = 600.0


class Peers:
    """Watches the other ranks of the job.

    `with peers:` ends this rank on an exception at once, before anything else is undone.

    Before `watch`, and in a job of one rank, an exception takes its usual way. `last_words` is
    called, in a thread, when this rank or another one has failed; `way_on` returns how to go on
    with the run.
    """

    def __init__(self) -> None:
        self.last_words: Callable[[], None] = lambda: None
        self.way_on: Callable[[], str] = lambda: "the same command starts it again"
        # how this rank ends: its mark, or "" for a clean end
        self._ends: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._done = threading.Event()  # the thread has done its part of the end
        self._failed: dict[str, Any] = {}  # the mark of another rank
        self._answered = threading.Event()  # it is known whether another rank has left a mark
        self._refused = False
        self._thread: threading.Thread | None = None

    def watch(self, group: Any) -> None:
        """Starts to look at the other ranks (a collective on `group`, of all ranks on the CPU)."""
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        if dist.get_world_size() == 1:
            return
        met: Any = _get_default_store()
        own = met.clone()  # a second connection: each answers one call at a time
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        everyone: list[Any] = [None] * self._world
        dist.all_gather_object(
            everyone, (secrets.token_hex(8), os.getpid(), began(os.getpid())), group=group
        )
        # ranks whose processes this host sees
        self._here = {
            rank: (pid, at) for rank, (_, pid, at) in enumerate(everyone) if began(pid) == at
        }
        # nobody would miss a rank that is killed before the others have looked for its process
        dist.barrier(group)
        # the key is new at each start: an agent keeps its store, with old marks, over restarts
        self._store = PrefixStore(f"failure/{everyone[0][0]}", own)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # nothing is lost when this rank is ended
        self._thread = threading.Thread(target=self._look, name="peers", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Ends the watch after a clean run: rank 0 keeps the store until no rank looks any more."""
        if self._thread is not None:
            self._ends.put("")
            self._thread.join(LEAVING + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self._thread is not None:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """Prints the error and ends this rank, within GONE seconds in any case."""
        ignore_stops()  # launchers send signals; this rank is ending already
        code, what = 1, traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
        if isinstance(error, Refusal):
            self._refused = True
            code, what = error.exit_code, f"refused: {error.problems[0]}"
            with contextlib.suppress(SystemExit):
                exit_refused(error, 3.0)  # the problem may be this rank's alone
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error, RuntimeError) and any(word in str(error) for word in CUT):
            self._answered.wait(MISSED)
            code = _code_after(self._failed) if self._failed else START_AGAIN
        self._ends.put(
            json.dumps(
                {"rank": self._rank, "host": platform.node(), "what": what[:300], "code": code}
            )
        )
        self._answered.wait(1.0)
        if isinstance(error, SystemExit):
            pass
        elif "lost" in self._failed and any(word in str(error) for word in CUT):
            pass  # the error only says that the connection to the lost rank broke
        elif not self._refused and self._failed:
            tell(f"failed after rank {self._failed['rank']}: {what}")
        elif not self._refused:
            lines = "".join(traceback.format_exception(error)).splitlines()
            with contextlib.suppress(OSError):
                os.write(
                    2,
                    "".join(f"[rank{self._rank}]: {line}\n" for line in lines).encode(
                        errors="replace"
                    ),
                )
        self._done.wait(GONE)
        os._exit(code)

    def _look(self) -> None:
        """Runs in the thread until this rank ends or another one has failed."""
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    own = self._ends.get(timeout=POLL)
                    return self._leave_mark(own) if own else self._stop_looking()
                # looked at before the store: if the store went with rank 0, torch prints a C++
                # stack
                if self._gone():
                    # ranks that end together, each for its own reason, do not report each other
                    time.sleep(AFTER)
                    if lost := self._lost():
                        return self._tell_lost(lost)
                if self._store.check(["mark"]):
                    return self._follow(json.loads(self._store.get("mark")))
        except RuntimeError:  # the store is gone, and so is the process that held it
            # an agent holds the store: then the launcher has gone, which stopping.py sees
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                time.sleep(0.3)  # a process that ends closes its connections first
                if gone := self._gone():
                    self._tell_lost(gone)
                else:
                    self._follow(
                        {
                            "rank": 0,
                            "host": os.environ["MASTER_ADDR"],
                            "what": "it ended without a message",
                            "code": START_AGAIN,
                        }
                    )

    def _gone(self) -> list[int]:
        """Lists the ranks of this host whose process has ended."""
        return [rank for rank, (pid, at) in self._here.items() if began(pid) != at]

    def _lost(self) -> list[int]:
        """Lists the ranks of this host that ended without a word: no mark, no clean end."""
        gone = self._gone()
        if self._store_lives(gone):
            if self._store.check(["mark"]):
                return []
            gone = [rank for rank in gone if not self._store.check([f"left/{rank}"])]
        self._here = {
            rank: place
            for rank, place in self._here.items()
            if rank in gone or began(place[0]) == place[1]
        }
        return gone

    @staticmethod
    def _store_lives(gone: list[int]) -> bool:
        """Returns False if the store went with rank 0; torch prints a C++ stack if that store is
        asked anything.
        """
        return 0 not in gone or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def _tell_lost(self, lost: list[int]) -> None:
        """Ends this rank after other ranks of its host were killed.

        One rank prints the message: the rank that left the first mark or, without a store, the
        first rank that is left.
        """
        mark = {
            "rank": lost[0],
            "host": platform.node(),
            "what": "it ended without a message",
            "lost": len(lost),
            "teller": self._rank,
            "code": START_AGAIN,
        }
        tells = self._rank == min(rank for rank in self._here if rank not in lost)
        if self._store_lives(lost):
            with contextlib.suppress(RuntimeError):
                mark = json.loads(self._store.compare_set("mark", "", json.dumps(mark)))
                tells = mark.get("teller") == self._rank
        if tells:
            self._failed = mark
            self._answered.set()
            ranks = (
                f"rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))} on"
                f" {platform.node()}"
            )
            pids = ", ".join(str(self._here[rank][0]) for rank in lost)
            cause = "killed by a user or by the kernel (out of memory: see dmesg), or crashed"
            tell(sentences(f"lost {ranks} (pid {pids}: {cause})", self.way_on()))
            if self._store_lives(lost):
                with contextlib.suppress(RuntimeError):
                    self._store.set("gone", "")
        self._follow(mark)

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
            # all ranks have read the mark; torch prints a C++ stack in a rank whose call the store
            # does not answer any more
            time.sleep(0.3)
        return self._done.set()

    def _follow(self, mark: dict[str, Any]) -> None:
        """Ends this rank after the rank that failed."""
        self._failed = mark
        self._answered.set()
        # a rank ends even if the store answers no more
        ending = threading.Timer(GONE + 2 * AFTER, os._exit, [_code_after(mark)])
        ending.daemon = True
        ending.start()
        saying = self._say_last_words()
        if "lost" not in mark or self._store_lives([mark["rank"]]):
            with contextlib.suppress(RuntimeError):  # rank 0 has gone, and the store with it
                self._store.add("seen", 1)
                others = self._world - mark.get("lost", 1)  # this rank included
                self._wait_for(
                    lambda: (
                        self._store.check(["gone"])
                        and (self._rank > 0 or self._store.add("seen", 0) >= others)
                    ),
                    GONE,
                )
        saying.join(LAST_WORDS)
        time.sleep(AFTER)
        # then one rank has printed it for its host; under `python -m launch` every rank does, which
        # reads the last line of each
        told = (
            "lost" in mark and mark["host"] == platform.node() and "LAUNCH_LOGS" not in os.environ
        )
        # all ranks meet most refusals at once, and the first rank of the host has printed it
        if self._refused or told:
            os._exit(_code_after(mark))
        leave(
            _code_after(mark),
            f"ended, because rank {mark['rank']} on {mark['host']} failed: {mark['what']}",
        )

    def _stop_looking(self) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 has waited long enough
            self._store.set(f"left/{self._rank}", "")
            self._store.add("left", 1)
        if self._rank == 0:
            self._wait_for(
                lambda: self._store.add("left", 0) == self._world or self._store.check(["mark"]),
                LEAVING,
            )
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


def _code_after(mark: dict[str, Any]) -> int:
    """Return the exit code of a rank that ends because of another rank's mark."""
    return START_AGAIN if mark.get("code") == START_AGAIN else 1


def began(pid: int) -> str:
    """Reads when a process began, which distinguishes it from a later process with the same number;
    "" if it has ended.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:  # the process has ended, or is another user's
        return ""
