"""The finder of hangs, which names the rank that the others wait for and can end the job.

A thread of each rank compares the time since the last step boundary with the rank's pace, twice a
second. When a step is overdue, every rank writes its evidence to OUT/hang: stacks, its latest
collectives, and the states of the processes on its host. One rank reads the evidence of all ranks
and raises the alert. The ranks use files, because a stopped rank 0 does not serve the store.

    OUT/hang/overdue           touched by each rank whose step is overdue
    OUT/hang/rank_N.txt        stacks of all threads
    OUT/hang/rank_N.json       the other evidence
    OUT/hang/excused           a rank does long work that no boundary announced, such as a compile
    OUT/hang/verdict_N.json    the cause; the rank that creates the file raises the alert
    OUT/hang/ending            a rank ends the job because of --hang_s
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .alerts import ERROR, Alert
from .pace import Pace
from .processes import STOPPED, kill_process, process_state
from .recorder import collectives_of, group_members, read_recorder
from .stacks import describe_threads, long_work, place_of_main_thread, place_of_thread
from .verdict import Evidence, Verdict, verdict_of

POLL = 0.5  # seconds between two looks at the clock
# Seconds after which rank 0 judges at the latest, and how much later the other ranks do. A rank
# that is neither stopped nor gone gets more time.
SETTLE, SECOND, PATIENCE = 1.5, 1.5, 5.0
REPORTED = 6.0  # seconds between an alert and the end of the job, at least
DATA_THREAD = "data"


@dataclass(frozen=True)
class Ranks:
    """The ranks of a job, as one of them sees them."""

    rank: int
    hosts: tuple[str, ...]  # of each rank
    processes: Mapping[int, tuple[int, str]]  # ranks of this host: (pid, start time)

    @property
    def states(self) -> dict[int, str]:
        """Return the states of the processes on this host; "" for a process that has ended."""
        now = {rank: process_state(pid) for rank, (pid, _) in self.processes.items()}
        return {
            rank: state if start == self.processes[rank][1] else ""
            for rank, (state, start) in now.items()
        }


class HangWatch:
    """Finds steps that are overdue, in a thread.

    `report` receives the alert on the rank that judges. If no step ends for `hang_s` seconds (0:
    never), `end` receives the reason and ends this rank. Other ranks of this host that cannot end
    themselves are killed. As long as steps end, a poll reads the clock and compares two numbers.
    """

    def __init__(
        self,
        ranks: Ranks,
        pace: Pace,
        out: Path,
        report: Callable[[Alert], None],
        end: Callable[[str], None],
        hang_s: float,
    ):
        self._ranks, self._pace, self._hang_s = ranks, pace, hang_s
        self._folder = out / "hang"
        self._report, self._end = report, end
        self._closed = threading.Event()
        self._inquiry: Inquiry | None = None
        self._thread = threading.Thread(target=self._work, name="hang watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch. A rank that closes must not wait for a thread that waits for a disk."""
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.wait(POLL):
            late = self._pace.late()
            if late < self._pace.margin / 2 or late < (limit := self._pace.limit()) / 2:
                self._inquiry = None
                continue
            # An inquiry reads and writes files, which may take forever. It has its own thread, so
            # that this thread can still end the job.
            if self._inquiry is None:
                self._inquiry = Inquiry(self._ranks, self._pace, self._folder, self._report)
            inquiry = self._inquiry
            over = self._hang_s and late > max(self._hang_s, limit + REPORTED)
            if over or inquiry.job_ends:
                self._end_job(inquiry, late)
                return

    def _end_job(self, inquiry: "Inquiry", late: float) -> None:
        touching = threading.Thread(target=inquiry.touch, args=("ending",), daemon=True)
        touching.start()
        touching.join(1.0)
        if self._closed.is_set():
            return
        for rank, state in self._ranks.states.items():
            if rank != self._ranks.rank and (state in STOPPED or rank in inquiry.silent):
                kill_process(*self._ranks.processes[rank])
        text = f"no step for {late:.0f} s after step {self._pace.last_step}"
        cause = f": {inquiry.verdict}" if inquiry.verdict else ""
        self._end(f"ended: {text} (--hang_s {self._hang_s:g}){cause}")


class Inquiry:
    """The inquiry into one overdue step, in a thread, until the step ends."""

    def __init__(self, ranks: Ranks, pace: Pace, folder: Path, report: Callable[[Alert], None]):
        self._ranks, self._pace, self._folder, self._report = ranks, pace, folder, report
        self._expected = pace.expected  # differs as soon as the step has ended
        self._since = time.time() - pace.late()  # seconds since 1970
        self.verdict = ""  # the cause in words, once a rank has found it
        self.silent: list[int] = []  # ranks without evidence
        self.job_ends = False  # another rank ends the job
        threading.Thread(target=self._work, name="hang inquiry", daemon=True).start()

    def touch(self, name: str) -> None:
        """Tell the other ranks something."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            (self._folder / name).touch()

    def _is_new(self, path: Path) -> bool:
        """Return True if a file was written since the last boundary."""
        with contextlib.suppress(OSError):
            return path.stat().st_mtime > self._since
        return False

    def _work(self) -> None:
        begun = 0.0  # time.monotonic() when this rank wrote its evidence
        while self._pace.expected == self._expected:
            late = self._pace.late()
            if not begun and (late > self._pace.limit() or self._is_new(self._folder / "overdue")):
                self._write_evidence(late)
                begun = time.monotonic()
            if begun and not self.verdict and self._find_verdict(time.monotonic() - begun, late):
                return
            self.job_ends = self._is_new(self._folder / "ending")
            time.sleep(POLL / 2)

    def _write_evidence(self, late: float) -> None:
        """Write this rank's evidence. Processes are read first, because the rest may block."""
        states, rank = self._ranks.states, self._ranks.rank
        main, entries = place_of_main_thread(), read_recorder()
        collectives = collectives_of(entries)
        place = str(main)
        data = place_of_thread(DATA_THREAD)
        if "data/prefetch.py" in place and data:
            place += f", which waits for the data thread in {data}"
        waits = main.in_collective or (
            main.in_backward and any(collective.open for collective in collectives)
        )
        evidence = {
            "rank": rank,
            "host": self._ranks.hosts[rank],
            "pid": os.getpid(),
            "time": time.time(),
            "step": self._pace.last_step,
            "late_s": late,
            "place": place,
            "module": main.module,
            "waits": waits,
            "long_work": long_work(),
            "states": states,
            "groups": group_members(),
            "flight_recorder": entries,
        }
        self.touch("overdue")
        with contextlib.suppress(OSError):
            (self._folder / f"rank_{rank}.txt").write_text(describe_threads())
            written = self._folder / f"rank_{rank}.json.tmp"
            written.write_text(json.dumps(evidence))
            written.rename(self._folder / f"rank_{rank}.json")

    def _read_evidence(self) -> dict[int, Evidence]:
        """Return the evidence of all ranks about this hang, by rank."""
        found = {}
        for rank in range(len(self._ranks.hosts)):
            path = self._folder / f"rank_{rank}.json"
            if self._is_new(path):
                with contextlib.suppress(OSError, ValueError):
                    found[rank] = evidence_of(json.loads(path.read_text()))
        return found

    def _find_verdict(self, waited: float, late: float) -> bool:
        """Judge, or learn what another rank has judged. Return True if the hang is excused."""
        if self._is_new(self._folder / "excused") and self._pace.excuse():
            return True
        if known := self._known_verdict():
            self.verdict = known
            return False
        if waited < (SECOND + SETTLE if self._ranks.rank else 0.0):
            return False
        evidence = self._read_evidence()
        self.silent = [rank for rank in range(len(self._ranks.hosts)) if rank not in evidence]
        states = self._ranks.states
        alive = [rank for rank in self.silent if states.get(rank, "S") not in ("", *STOPPED)]
        if waited < (PATIENCE if alive else SETTLE if self.silent else 0.0):
            return False
        if any(each.long_work for each in evidence.values()) and self._pace.excuse():
            self.touch("excused")
            return True
        self._tell(verdict_of(evidence, self._ranks.hosts), late)
        return False

    def _known_verdict(self) -> str:
        """Return the cause of this hang in words if a rank has found it, or ""."""
        for path in self._folder.glob("verdict_*.json"):
            if self._is_new(path):
                with contextlib.suppress(OSError, ValueError):
                    return str(json.loads(path.read_text())["cause"])
                return "another rank writes the verdict"
        return ""

    def _tell(self, verdict: Verdict, late: float) -> None:
        """Raise the alert, unless another rank is faster."""
        step, rank = self._pace.last_step, verdict.rank
        number = len(list(self._folder.glob("verdict_*.json"))) + 1
        self.verdict = verdict.text
        host = None if rank is None else self._ranks.hosts[rank]
        alert = Alert(
            time.time(),
            step,
            "hang",
            ERROR,
            f"no step for {late:.0f} s after step {step}: {verdict.text}. Stacks and collectives of"
            f" the ranks are in {self._folder}",
            rank=rank,
            host=host,
            module=verdict.module or None,
            value=round(late, 1),
            limit=round(self._pace.limit(), 1),
        )
        try:
            with (self._folder / f"verdict_{number}.json").open("x") as file:
                file.write(json.dumps({"cause": verdict.text, "step": step, "rank": rank}))
        except FileExistsError:
            return
        except OSError:
            pass  # a full disk: better two alerts than none
        self._report(alert)


def evidence_of(values: Mapping[str, Any]) -> Evidence:
    """Return the evidence in a rank's file."""
    names = ("rank", "host", "place", "module", "waits", "long_work", "groups")
    states = {int(rank): state for rank, state in values["states"].items()}
    return Evidence(
        **{name: values[name] for name in names},
        collectives=collectives_of(values["flight_recorder"]),
        states=states,
    )


class NoHangWatch:
    """The finder of a run with --no-watch, and of a run without other processes to watch."""

    def close(self) -> None: ...
