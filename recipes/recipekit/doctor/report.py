"""Writes the doctor's report: a table of what is there on all hosts, then every problem with its
fix.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Set
from pathlib import Path
from typing import Any

from ..hosts import findings
from ..hosts.findings import Row, amount
from ..spec.refusal import Problem
from . import fabric

SKEW = 1.0  # seconds that clocks may differ, besides the uncertainty of the network
SLOW = 3.0  # a rank is slow that takes so many times the other ranks' seconds
SLOW_LINK = 10.0  # a link is slow that is so many times slower than the median of its kind


class Report:
    """Gathers what is known of all hosts: rows and problems, each with the hosts on which it was
    found.

    `seen`: rank -> its own report.
    """

    def __init__(self, local_world: int, seen: dict[int, dict[str, Any]]):
        self.local_world, self.seen = local_world, seen
        self.rows: list[tuple[Row, list[int]]] = []
        self.problems: list[tuple[Problem, list[int]]] = []
        self.connected = True
        self.nodes = sorted(rank for rank, told in seen.items() if "findings" in told)
        for node in self.nodes:
            for item in findings.from_json(seen[node]["findings"]):
                self.add(item, [node])

    def add(self, item: Row | Problem, nodes: list[int]) -> None:
        """Notes a row or a problem; equal ones of several hosts become one."""
        known: list[Any] = self.rows if isinstance(item, Row) else self.problems
        for other, where in known:
            if other == item:
                where += [node for node in nodes if node not in where]
                return
        known.append((item, list(nodes)))

    def host(self, node: int) -> str:
        """Returns the name of a host, with its first rank if two hosts have the same name."""
        name = next(told["name"] for told in self.seen.values() if told["node"] == node)
        twins = [other for other in self.nodes if self.seen[other]["name"] == name]
        return name if len(twins) < 2 else f"{name} (rank {node})"

    def rank(self, rank: int) -> str:
        if rank in self.seen:
            return f"rank {rank} on {self.host(self.seen[rank]['node'])}"
        return f"rank {rank}"

    def clocks(self, clocks: dict[int, tuple[float, float]]) -> None:
        """Compares the hosts' clocks with the one in the middle."""
        ahead = {
            node: clocks.get(node, (0.0, 0.0)) for node in self.nodes if node in clocks or node == 0
        }
        middle = statistics.median_low(offset for offset, _ in ahead.values())
        reference = next(node for node, (offset, _) in ahead.items() if offset == middle)
        offsets = {node: offset - middle for node, (offset, _) in ahead.items()}
        if len(offsets) > 1:
            self.add(Row("clocks", f"within {max(map(abs, offsets.values())):.3f} s"), [0])
        for node, offset in offsets.items():
            if abs(offset) > SKEW + ahead[node][1] / 2 + ahead[reference][1] / 2:
                rule = (
                    f"{abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'}"
                    f" {self.host(reference)}. More than {SKEW:.0f} s breaks logins and file times"
                )
                self.add(
                    Problem(
                        "clock",
                        rule,
                        "synchronise the clock with a time service: timedatectl set-ntp true",
                    ),
                    [node],
                )

    def reached(self, told: dict[int, dict[Any, Any]]) -> None:
        """Notes which ranks do not reach each other."""
        trips = {
            (rank, int(peer)): value
            for rank, found in told.items()
            for peer, value in found.items()
        }
        times = [value for value in trips.values() if isinstance(value, float)]
        if times:
            worst = max((value, pair) for pair, value in trips.items() if isinstance(value, float))
            slowest = f"rank {worst[1][0]} to rank {worst[1][1]}"
            self.add(
                Row(
                    "connections",
                    f"{len(times)} of {len(trips)} work, {statistics.median(times) * 1e3:.2f} ms,"
                    f" longest {worst[0] * 1e3:.2f} ms ({slowest})",
                ),
                [0],
            )
        failed = {pair: str(value) for pair, value in trips.items() if not isinstance(value, float)}
        self.connected = not failed
        for where, why in self._name(failed):
            fix = (
                "let the hosts connect to each other on all ports (firewall, routes, the interface"
                " that the address belongs to)"
            )
            self.add(Problem(where, f"cannot be reached: {why}", fix), [])

    def _name(self, pairs: dict[tuple[int, int], str]) -> list[tuple[str, str]]:
        """Returns (who, what) for links at fault: a rank that several links have in common is named
        instead of each link.
        """
        left, named = dict(pairs), []
        while left:
            rank, count = Counter(itertools.chain.from_iterable(left)).most_common(1)[0]
            own = [pair for pair in left if rank in pair]
            one, other = own[0]
            text = (
                f"{left[own[0]]} (rank {one} to rank"
                f" {other}{f', and {count - 1} links more' if count > 1 else ''})"
            )
            several = len({peer for pair in own for peer in pair}) > 2
            named.append(
                (self.rank(rank) if several else f"{self.rank(other)} from {self.rank(one)}", text)
            )
            for pair in own:
                del left[pair]
        return named

    def prepared(self, told: dict[int, dict[str, Any]], out: Path) -> None:
        """Note what torch sees, which ops could not be compiled, and whether memory and disks have
        the room that the run needs.
        """
        for rank, found in told.items():
            node = self.seen[rank]["node"]
            if "error" in found:
                fix = "fix the installation: pip install -r requirements.txt"
                self.add(Problem(self.rank(rank), f"torch {found['error']}", fix), [])
                continue
            for item in findings.from_json(found["findings"]):
                self.add(item, [node])
        if needs := told[0].get("needs"):
            self._add_memory(needs)
            self._add_disk(needs, out)

    def _add_memory(self, needs: dict[str, int]) -> None:
        """Note the hosts whose memory or NVMe folder is too small for the run's states."""
        for node in self.nodes:
            ranks, free = self.seen[node]["ranks"], self.seen[node]["room"]
            for place, what, fix in (
                (
                    "host",
                    "host memory",
                    "use more hosts, or a strategy of less memory (ds_configs/README.md)",
                ),
                (
                    "NVMe",
                    "the NVMe folder",
                    "free space, or set nvme_path to a folder on a larger drive",
                ),
            ):
                if place in free and needs[place] * ranks > free[place]:
                    rule = (
                        f"{ranks} ranks of this run need {amount(needs[place] * ranks)} for their"
                        " states"
                    )
                    self.add(Problem(f"{what}: {amount(free[place])} free", rule, fix), [node])

    def _add_disk(self, needs: dict[str, int], out: Path) -> None:
        """Note the files that the run writes, and whether the disk of the run folder has room."""
        free, size, count = self.seen[0]["room"]["out"], needs["checkpoint"], needs["checkpoints"]
        total = size * count + needs["export"]
        files = f" and Hugging Face files of {amount(needs['export'])}" if needs["export"] else ""
        made = f"{count} checkpoint{'s' if count > 1 else ''} of {amount(size)}{files}"
        self.add(Row("disk", f"{made}, {amount(free)} free"), [0])
        if total > free:
            where, rule = f"out = {out}: {amount(free)} free", f"the run writes {amount(total)}"
            fix = (
                "free space, keep fewer with --keep, leave out --export, or set --out to a folder"
                " on another disk"
            )
            self.add(Problem(where, f"{rule}: {made}", fix), [])

    def measured(self, told: dict[int, dict[str, Any]], joined: dict[int, dict[str, Any]]) -> None:
        """Note the speeds, and the ranks and links that the others would wait for; `joined`: each
        rank's report after it had joined the others.
        """
        failed = {rank: found["error"] for rank, found in told.items() if "error" in found}
        for rank, why in failed.items():
            fix = (
                "for NCCL start again with NCCL_DEBUG=INFO, and choose the interface with"
                " NCCL_SOCKET_IFNAME (gloo: GLOO_SOCKET_IFNAME)"
            )
            self.add(Problem(self.rank(rank), f"the all-reduce failed: {why}", fix), [])
        if failed or not told:
            return

        slow = self.slow(told)
        self._add_ranks(told, slow)
        links = {
            (int(source), rank): speed
            for rank, found in told.items()
            for source, speed in found["links"].items()
        }
        if links:
            self._add_speeds(told, links)
        self._add_slow_links(links, slow.keys())
        if all(found["cuda"] for found in told.values()):
            self.too_slow(links, joined)

    def _add_ranks(
        self, told: dict[int, dict[str, Any]], slow: dict[int, tuple[float, float]]
    ) -> None:
        """Note the ranks that are slow or sum wrongly."""
        for rank, (seconds, others) in slow.items():
            rule = (
                f"is slow: it needs {seconds * 1e3:.1f} ms where other ranks need"
                f" {others * 1e3:.1f} ms, and in a run all ranks wait for it"
            )
            fix = "check its host for other jobs, a throttled clock or failing hardware"
            self.add(Problem(self.rank(rank), rule, fix), [])
        for rank in (rank for rank, found in told.items() if found["wrong"]):
            fix = "do not train on this host. Test its memory and devices"
            self.add(Problem(self.rank(rank), "the all-reduce gave a wrong sum", fix), [])

    def _add_speeds(
        self, told: dict[int, dict[str, Any]], links: dict[tuple[int, int], float]
    ) -> None:
        """Note the speeds of the all-reduce and of the messages."""
        bus = statistics.median(found["bus"] for found in told.values())
        all_reduce = statistics.median(found["all_reduce"] for found in told.values())
        self.add(Row("all-reduce", f"{all_reduce * 1e3:.1f} ms, {bus:.2f} GB/s"), [0])
        complete = (
            ""
            if all(found["complete"] for found in told.values())
            else ", as many as two seconds allow"
        )
        speeds = f"{min(links.values()):.2f} to {max(links.values()):.2f} GB/s"
        self.add(Row("messages", f"{len(links)} links{complete}: {speeds}"), [0])

    def _add_slow_links(self, links: dict[tuple[int, int], float], slow: Set[int]) -> None:
        """Note the links that are much slower than others of their kind, inside a host or between
        hosts. The links of the `slow` ranks are left out.
        """
        for inside in (True, False):
            kind = {
                pair: speed
                for pair, speed in links.items()
                if (self.seen[pair[0]]["node"] == self.seen[pair[1]]["node"]) == inside
            }
            usual = statistics.median(kind.values()) if kind else 0.0
            bad = {
                pair: f"{speed:.3f} GB/s instead of {usual:.2f}"
                for pair, speed in kind.items()
                if speed * SLOW_LINK < usual and not slow & set(pair)
            }
            for where, text in self._name(bad):
                fix = "check the cable, the switch port and the interface in use"
                self.add(Problem(where, f"the link is slow: {text}", fix), [])

    def too_slow(
        self, links: dict[tuple[int, int], float], joined: dict[int, dict[str, Any]]
    ) -> None:
        """Names links between GPUs that do not reach the speed of their kind."""
        facts = {node: self.seen[node]["fabric"] for node in self.nodes}
        networks = {rank: found["network"] for rank, found in joined.items()}
        if len(self.nodes) > 1:
            for problem in fabric.over_sockets(
                networks, [fabric.Port(*port) for told in facts.values() for port in told["ports"]]
            ):
                self.add(problem, [])
        firsts = {
            node: min(rank for rank, seen in self.seen.items() if seen["node"] == node)
            for node in self.nodes
        }
        places = {
            rank: fabric.Place(seen["node"], rank - firsts[seen["node"]])
            for rank, seen in self.seen.items()
        }
        for where, text in self._name(
            fabric.below(links, fabric.floors(places, facts, networks.get(0, "")))
        ):
            fix = (
                "check nvidia-smi topo -m, nvidia-smi nvlink -s, ibstat, and what NCCL chooses with"
                " NCCL_DEBUG=INFO"
            )
            self.add(Problem(where, f"the link is slow: {text}", fix), [])

    def slow(
        self, told: dict[int, dict[str, Any]], times: float = SLOW
    ) -> dict[int, tuple[float, float]]:
        """Finds the ranks that all others wait for: rank -> (its seconds for a piece of work, those
        of others).

        The ranks of a host without GPUs share its cores as the scheduler likes, so there the
        fastest one stands for its host.
        """
        own = {rank: found["work"] for rank, found in told.items() if "work" in found}
        if not all(found.get("cuda") for found in told.values()):
            node = {rank: self.seen[rank]["node"] for rank in own}
            own = {
                rank: seconds
                for rank, seconds in own.items()
                if (seconds, rank)
                == min((own[other], other) for other in own if node[other] == node[rank])
            }
        others = {
            rank: statistics.median_low(
                [value for other, value in own.items() if other != rank] or [own[rank]]
            )
            for rank in own
        }
        return {
            rank: (seconds, others[rank])
            for rank, seconds in own.items()
            if seconds > times * others[rank]
        }

    def absent(self, lost: dict[int, str]) -> None:
        """Names ranks that did not come or have gone."""
        by_reason: dict[str, list[int]] = {}
        for rank, why in sorted(lost.items()):
            by_reason.setdefault(why, []).append(rank)
        for why, ranks in by_reason.items():
            names = ", ".join(self.rank(rank) for rank in ranks)
            hosts = sorted({rank // self.local_world for rank in ranks})
            place = (
                f" (host {', '.join(map(str, hosts))} of the job, counted from 0)"
                if "come" in why
                else ""
            )
            fix = (
                "check its own output: it must have started and must reach rank 0"
                if "come" in why
                else "check its output"
            )
            self.add(Problem(f"{names}{place}", why, fix), [])

    def __str__(self) -> str:
        count = len(self.nodes)
        width = max(len(row.check) for row, _ in self.rows)
        lines = [
            f"{len(self.seen)} rank{'s' if len(self.seen) > 1 else ''} on {count}"
            f" host{'s' if count > 1 else ''}"
        ]
        for row, nodes in sorted(
            self.rows, key=lambda item: [other.check for other, _ in self.rows].index(item[0].check)
        ):
            shared = len(nodes) == count or row.check in (
                "clocks",
                "connections",
                "all-reduce",
                "messages",
                "disk",
                "W&B",
                "master port",
            )
            where = "" if shared else f"  [{', '.join(self.host(node) for node in nodes)}]"
            lines.append(f"  {row.check:{width}}  {row.value}{where}")
        if not self.problems:
            return "\n".join([*lines, "ok: no problem found"])
        lines.append(f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}")
        for number, (problem, nodes) in enumerate(self.problems, 1):
            hosts = (
                ""
                if count == 1 or not nodes
                else (
                    "all hosts: "
                    if len(nodes) == count
                    else ", ".join(self.host(node) for node in nodes) + ": "
                )
            )
            lines.append(f"  {number}. {hosts}{problem}")
        return "\n".join(lines)
