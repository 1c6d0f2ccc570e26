"""Failure handling: the whole job ends within seconds after one rank fails.

A rank that raises must not destroy its process groups: with NCCL that call waits for the peers,
which wait for this rank. Instead the rank prints its traceback, writes a mark into the process
group's store, and exits. In every other rank, a thread polls for the mark and then ends the rank.
This also works while the main thread is blocked in a collective, because a collective releases the
GIL.

    the failed rank     prints its traceback; writes a mark; waits until every rank has seen it, at
                        most MARK_SEEN_TIMEOUT; sets "gone"; exits with 1
    any other rank      waits until the failed rank is gone, so that a launcher names that rank;
                        prints the reason; exits with 75 or 1
    a killed rank       writes no mark: the ranks on its host notice that its process is missing,
                        and the first rank to write the mark reports it
    rank 0, killed      took the store with it, which counts as a mark on the other hosts (torchrun
                        keeps the store in its agent)
    a job that hangs    every rank ends by itself, without a mark (watch/hang.py), with 75

A mark contains the exit code of the failed rank. If the code is 75 (START_AGAIN: a lost rank or
host, a failing disk), every other rank also exits with 75, otherwise with 1.
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
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..spec.errors import START_AGAIN, ConfigError, exit_with_error, sentences
from ..watch.hang import Ranks
from ..watch.processes import process_state
from .stopping import STOP_POLL_SECONDS, exit_process, ignore_stops, write_stderr

if TYPE_CHECKING:
    import torch.distributed as dist

MARK_SEEN_TIMEOUT = 2.0  # seconds in which the other ranks see the mark
LAST_RECORD_TIMEOUT = 5.0  # seconds for another rank's last record: the state of its W&B run
EXIT_TIMEOUT = (
    MARK_SEEN_TIMEOUT + LAST_RECORD_TIMEOUT + 1.0
)  # seconds after which a failed rank ends even if something is still pending
# Seconds that a rank waits after the failed rank has ended. Launchers poll their processes at least
# once per second.
EXIT_DELAY = 1.0
# parts of the errors that gloo, NCCL and the store raise when a different rank is gone
LOST_PEER_ERRORS = (
    "onnection",
    "remote process exited",
    "ncclRemoteError",
    "recvValue failed",
    "Broken pipe",
    "imed out waiting",
)
LOST_PEER_TIMEOUT = 3.0  # seconds in which a rank that lost its connection looks for the lost rank
# Seconds that rank 0, which runs the store, waits at a clean end for the other ranks to end.
CLEAN_EXIT_TIMEOUT = 600.0


class Peers:
    """Watcher of the job's other ranks.

    After an exception, `with peers:` ends this rank immediately, before any other cleanup. Before
    `watch`, and in a job of one rank, an exception propagates normally. When this rank or a
    different rank fails, a thread calls `last_words`. `resume_hint` returns a text that explains
    how to resume the run.
    """

    def __init__(self) -> None:
        self.last_words: Callable[[], None] = lambda: None
        self.resume_hint: Callable[[], str] = lambda: "the same command starts it again"
        # how this rank ends: its mark, or "" for a clean end
        self._end_marks: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._done = threading.Event()  # set when the thread has done its part of the end
        self._failed: dict[str, Any] = {}  # the mark of a different rank
        self._mark_known = threading.Event()  # set once it is known if a rank wrote a mark
        self._refused = False
        self._thread: threading.Thread | None = None
        self._hung = False  # True once this rank ends because of a hang
        self.ranks = Ranks(
            0, (platform.node(),), {0: (os.getpid(), process_start_time(os.getpid()))}
        )

    def watch(self, group: "dist.ProcessGroup | None") -> None:
        """Start to watch the other ranks.

        This is a collective of all ranks on `group`, which must be a CPU group.
        """
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        if dist.get_world_size() == 1:
            return
        met: Any = _get_default_store()
        own = met.clone()  # a second connection, because each one handles one call at a time
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        everyone: list[Any] = [None] * self._world
        dist.all_gather_object(
            everyone,
            (
                secrets.token_hex(8),
                platform.node(),
                os.getpid(),
                process_start_time(os.getpid()),
            ),
            group=group,
        )
        # ranks on this host, whose processes are visible here
        self._local_processes = {
            rank: (pid, at)
            for rank, (_, _, pid, at) in enumerate(everyone)
            if process_start_time(pid) == at
        }
        hosts = tuple(host for _, host, _, _ in everyone)
        self.ranks = Ranks(self._rank, hosts, dict(self._local_processes))
        # Without this barrier, a rank could be killed before the others know its process, and
        # nobody would notice.
        dist.barrier(group)
        # The key is new at each start, because an agent keeps its store across restarts, including
        # old marks.
        self._store = PrefixStore(f"failure/{everyone[0][0]}", own)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # keeps output if this rank is killed
        self._thread = threading.Thread(target=self._watch_ranks, name="peers", daemon=True)
        self._thread.start()

    def end_hung(self, text: str) -> None:
        """End this rank, which the launcher may start again, because the job hangs.

        The store is not asked, because it may be in a stopped rank 0.
        """
        self._hung = True
        # The timer ends the rank even if a disk or W&B does not answer.
        ending = threading.Timer(EXIT_TIMEOUT, os._exit, [START_AGAIN])
        ending.daemon = True
        ending.start()
        write_stderr(sentences(text, self.resume_hint()))
        self._say_last_words().join(LAST_RECORD_TIMEOUT)
        time.sleep(EXIT_DELAY)
        os._exit(START_AGAIN)

    def leave(self) -> None:
        """End the watch after a clean run.

        Rank 0 keeps the store until no other rank polls it.
        """
        if self._thread is not None:
            self._end_marks.put("")
            self._thread.join(CLEAN_EXIT_TIMEOUT + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._thread is not None:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """Print the error and end this rank after at most EXIT_TIMEOUT seconds."""
        ignore_stops()  # launchers send signals, and this rank is already ending
        if self._hung:
            time.sleep(EXIT_TIMEOUT)  # end_hung ends this rank, whose connections break
        code, what = 1, traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
        if isinstance(error, ConfigError):
            self._refused = True
            code, what = error.exit_code, f"refused: {error.problems[0]}"
            with contextlib.suppress(SystemExit):
                exit_with_error(error, 3.0)  # only this rank may have the problem
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error, RuntimeError) and any(word in str(error) for word in LOST_PEER_ERRORS):
            self._mark_known.wait(LOST_PEER_TIMEOUT)
            code = _exit_code_after(self._failed) if self._failed else START_AGAIN
        self._end_marks.put(
            json.dumps(
                {"rank": self._rank, "host": platform.node(), "what": what[:300], "code": code}
            )
        )
        self._mark_known.wait(1.0)
        if isinstance(error, SystemExit):
            pass
        elif "lost" in self._failed and any(word in str(error) for word in LOST_PEER_ERRORS):
            pass  # the error only shows that the connection to the lost rank broke
        elif not self._refused and self._failed:
            write_stderr(f"failed after rank {self._failed['rank']}: {what}")
        elif not self._refused:
            lines = "".join(traceback.format_exception(error)).splitlines()
            with contextlib.suppress(OSError):
                os.write(
                    2,
                    "".join(f"[rank{self._rank}]: {line}\n" for line in lines).encode(
                        errors="replace"
                    ),
                )
        self._done.wait(EXIT_TIMEOUT)
        os._exit(code)

    def _watch_ranks(self) -> None:
        """Watch the ranks, in the thread, until this rank ends or a different rank has failed."""
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    own = self._end_marks.get(timeout=STOP_POLL_SECONDS)
                    return self._leave_mark(own) if own else self._end_watch()
                # Check the processes before the store. If the store ended with rank 0, querying it
                # makes torch print a C++ stack trace.
                if self._exited_ranks():
                    # Ranks that end at the same time, each for a separate reason, do not report
                    # each other.
                    time.sleep(EXIT_DELAY)
                    if lost := self._killed_ranks():
                        return self._report_killed_ranks(lost)
                if self._store.check(["mark"]):
                    return self._exit_after(json.loads(self._store.get("mark")))
        except RuntimeError:  # the store and the process that held it are gone
            # If an agent holds the store, the launcher is gone, and stopping.py handles that.
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                time.sleep(0.3)  # a process closes its connections before it ends
                if gone := self._exited_ranks():
                    self._report_killed_ranks(gone)
                else:
                    self._exit_after(
                        {
                            "rank": 0,
                            "host": os.environ["MASTER_ADDR"],
                            "what": "it ended without a message",
                            "code": START_AGAIN,
                        }
                    )

    def _exited_ranks(self) -> list[int]:
        """Return the ranks on this host whose processes have ended."""
        return [
            rank
            for rank, (pid, at) in self._local_processes.items()
            if process_start_time(pid) != at
        ]

    def _killed_ranks(self) -> list[int]:
        """Return the ranks on this host that ended with neither a mark nor a clean end."""
        gone = self._exited_ranks()
        if self._store_is_alive(gone):
            if self._store.check(["mark"]):
                return []
            gone = [rank for rank in gone if not self._store.check([f"left/{rank}"])]
        self._local_processes = {
            rank: place
            for rank, place in self._local_processes.items()
            if rank in gone or process_start_time(place[0]) == place[1]
        }
        return gone

    @staticmethod
    def _store_is_alive(exited: list[int]) -> bool:
        """Return False if the store ended with rank 0.

        Any query of such a store would make torch print a C++ stack trace.
        """
        return 0 not in exited or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def _report_killed_ranks(self, lost: list[int]) -> None:
        """End this rank after other ranks on its host were killed.

        Only one rank prints the message: the rank that wrote the first mark or, without a store,
        the host's lowest remaining rank.
        """
        mark = {
            "rank": lost[0],
            "host": platform.node(),
            "what": "it ended without a message",
            "lost": len(lost),
            "teller": self._rank,
            "code": START_AGAIN,
        }
        if self._hung:
            return
        tells = self._rank == min(rank for rank in self._local_processes if rank not in lost)
        if self._store_is_alive(lost):
            with contextlib.suppress(RuntimeError):
                mark = json.loads(self._store.compare_set("mark", "", json.dumps(mark)))
                tells = mark.get("teller") == self._rank
        if tells:
            self._failed = mark
            self._mark_known.set()
            ranks = (
                f"rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))} on"
                f" {platform.node()}"
            )
            pids = ", ".join(str(self._local_processes[rank][0]) for rank in lost)
            cause = "killed by a user or by the kernel (out of memory: see dmesg), or crashed"
            write_stderr(sentences(f"lost {ranks} (pid {pids}: {cause})", self.resume_hint()))
            if self._store_is_alive(lost):
                with contextlib.suppress(RuntimeError):
                    self._store.set("gone", "")
        self._exit_after(mark)

    def _leave_mark(self, mark: str) -> None:
        first = json.loads(self._store.compare_set("mark", "", mark))
        if first["rank"] != self._rank:
            return self._exit_after(first)
        self._mark_known.set()
        saying = self._say_last_words()
        self._wait_for(lambda: self._store.add("seen", 0) == self._world - 1, MARK_SEEN_TIMEOUT)
        saying.join(LAST_RECORD_TIMEOUT)
        self._store.set("gone", "")
        if self._rank == 0:
            # All ranks have read the mark. If the store no longer answers a rank's call, torch
            # prints a C++ stack trace in that rank.
            time.sleep(0.3)
        return self._done.set()

    def _exit_after(self, mark: dict[str, Any]) -> None:
        """End this rank after a different rank has failed."""
        if self._hung:
            return
        self._failed = mark
        self._mark_known.set()
        # The timer ends the rank even if the store no longer answers.
        ending = threading.Timer(EXIT_TIMEOUT + 2 * EXIT_DELAY, os._exit, [_exit_code_after(mark)])
        ending.daemon = True
        ending.start()
        saying = self._say_last_words()
        if "lost" not in mark or self._store_is_alive([mark["rank"]]):
            with contextlib.suppress(RuntimeError):  # rank 0 and the store are gone
                self._store.add("seen", 1)
                others = self._world - mark.get("lost", 1)  # including this rank
                self._wait_for(
                    lambda: (
                        self._store.check(["gone"])
                        and (self._rank > 0 or self._store.add("seen", 0) >= others)
                    ),
                    EXIT_TIMEOUT,
                )
        saying.join(LAST_RECORD_TIMEOUT)
        time.sleep(EXIT_DELAY)
        # One rank has already reported the lost rank for its host. Under `python -m launch` every
        # rank reports the lost rank, because the launcher reads each rank's last line.
        told = (
            "lost" in mark and mark["host"] == platform.node() and "LAUNCH_LOGS" not in os.environ
        )
        # Most config errors occur on all ranks at once, and the host's first rank has already
        # printed them.
        if self._refused or told:
            os._exit(_exit_code_after(mark))
        exit_process(
            _exit_code_after(mark),
            f"ended, because rank {mark['rank']} on {mark['host']} failed: {mark['what']}",
        )

    def _end_watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 has stopped waiting
            self._store.set(f"left/{self._rank}", "")
            self._store.add("left", 1)
        if self._rank == 0:
            self._wait_for(
                lambda: self._store.add("left", 0) == self._world or self._store.check(["mark"]),
                CLEAN_EXIT_TIMEOUT,
            )
            if self._store.check(["mark"]):
                self._exit_after(json.loads(self._store.get("mark")))

    def _say_last_words(self) -> threading.Thread:
        saying = threading.Thread(target=self.last_words, name="last words", daemon=True)
        saying.start()
        return saying

    @staticmethod
    def _wait_for(condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(0.05)


def _exit_code_after(mark: dict[str, Any]) -> int:
    """Return the exit code of a rank that ends because of a different rank's mark."""
    return START_AGAIN if mark.get("code") == START_AGAIN else 1


def process_start_time(pid: int) -> str:
    """Return the start time of a process, or "" if it has ended.

    The start time distinguishes the process from a later process with the same pid.
    """
    return process_state(pid)[1]
