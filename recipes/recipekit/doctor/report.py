"""The doctor's report: a table of the findings on all hosts, then every problem with its fix."""

import itertools
import statistics
from collections import Counter
from collections.abc import Set
from pathlib import Path
from typing import Any

from ..hosts import findings
from ..hosts.findings import ReportRow, format_bytes
from ..spec.errors import Problem
from . import fabric

MAX_CLOCK_SKEW_SECONDS = 1.0  # allowed clock difference, plus the network's uncertainty
SLOW_RANK_RATIO = 3.0  # a rank is slow if its time exceeds the other ranks' by this factor
SLOW_LINK_RATIO = 10.0  # a link is slow if it is slower than the median of its kind by this factor


class Report:
    """The facts about all hosts: rows and problems, each with the hosts on which it was found.

    `seen` maps each rank to its report.
    """

    def __init__(self, local_world: int, seen: dict[int, dict[str, Any]]):
        self.local_world, self.seen = local_world, seen
        self.rows: list[tuple[ReportRow, list[int]]] = []
        self.problems: list[tuple[Problem, list[int]]] = []
        self.connected = True
        self.nodes = sorted(rank for rank, told in seen.items() if "findings" in told)
        for node in self.nodes:
            for item in findings.from_json(seen[node]["findings"]):
                self.add(item, [node])

    def add(self, item: ReportRow | Problem, nodes: list[int]) -> None:
        """Add a row or a problem. Equal items from several hosts are merged into one."""
        known: list[Any] = self.rows if isinstance(item, ReportRow) else self.problems
        for other, where in known:
            if other == item:
                where += [node for node in nodes if node not in where]
                return
        known.append((item, list(nodes)))

    def host_name(self, node: int) -> str:
        """Return the name of a host.

        If two hosts have the same name, the result includes the host's first rank.
        """
        name = next(told["name"] for told in self.seen.values() if told["node"] == node)
        twins = [other for other in self.nodes if self.seen[other]["name"] == name]
        return name if len(twins) < 2 else f"{name} (rank {node})"

    def rank_name(self, rank: int) -> str:
        if rank in self.seen:
            return f"rank {rank} on {self.host_name(self.seen[rank]['node'])}"
        return f"rank {rank}"

    def add_clocks(self, clocks: dict[int, tuple[float, float]]) -> None:
        """Compare the hosts' clocks with the median clock."""
        ahead = {
            node: clocks.get(node, (0.0, 0.0)) for node in self.nodes if node in clocks or node == 0
        }
        middle = statistics.median_low(offset for offset, _ in ahead.values())
        reference = next(node for node, (offset, _) in ahead.items() if offset == middle)
        offsets = {node: offset - middle for node, (offset, _) in ahead.items()}
        if len(offsets) > 1:
            self.add(ReportRow("clocks", f"within {max(map(abs, offsets.values())):.3f} s"), [0])
        for node, offset in offsets.items():
            if abs(offset) > MAX_CLOCK_SKEW_SECONDS + ahead[node][1] / 2 + ahead[reference][1] / 2:
                rule = (
                    f"{abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'}"
                    f" {self.host_name(reference)}. More than {MAX_CLOCK_SKEW_SECONDS:.0f} s breaks"
                    " logins and file times"
                )
                self.add(
                    Problem(
                        "clock",
                        rule,
                        "synchronise the clock with a time service: timedatectl set-ntp true",
                    ),
                    [node],
                )

    def add_connections(self, replies: dict[int, dict[Any, Any]]) -> None:
        """Add the pairs of ranks that cannot reach each other."""
        trips = {
            (rank, int(peer)): value
            for rank, found in replies.items()
            for peer, value in found.items()
        }
        times = [value for value in trips.values() if isinstance(value, float)]
        if times:
            worst = max((value, pair) for pair, value in trips.items() if isinstance(value, float))
            slowest = f"rank {worst[1][0]} to rank {worst[1][1]}"
            self.add(
                ReportRow(
                    "connections",
                    f"{len(times)} of {len(trips)} work, {statistics.median(times) * 1e3:.2f} ms,"
                    f" longest {worst[0] * 1e3:.2f} ms ({slowest})",
                ),
                [0],
            )
        failed = {pair: str(value) for pair, value in trips.items() if not isinstance(value, float)}
        self.connected = not failed
        for where, why in self._group_links(failed):
            fix = (
                "let the hosts connect to each other on all ports (firewall, routes, the interface"
                " that the address belongs to)"
            )
            self.add(Problem(where, f"cannot be reached: {why}", fix), [])

    def _group_links(self, pairs: dict[tuple[int, int], str]) -> list[tuple[str, str]]:
        """Return (name, text) for faulty links.

        If several faulty links share a rank, the rank is named instead of each link.
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
                (
                    (
                        self.rank_name(rank)
                        if several
                        else f"{self.rank_name(other)} from {self.rank_name(one)}"
                    ),
                    text,
                )
            )
            for pair in own:
                del left[pair]
        return named

    def add_preparation(self, replies: dict[int, dict[str, Any]], out: Path) -> None:
        """Add the findings of the torch processes.

        These are ops that could not be compiled, and a lack of memory or disk space.
        """
        for rank, found in replies.items():
            node = self.seen[rank]["node"]
            if "error" in found:
                fix = "fix the installation: pip install -r requirements.txt"
                self.add(Problem(self.rank_name(rank), f"torch {found['error']}", fix), [])
                continue
            for item in findings.from_json(found["findings"]):
                self.add(item, [node])
        if needs := replies[0].get("needs"):
            self._add_memory(needs)
            self._add_disk(needs, out)

    def _add_memory(self, needs: dict[str, int]) -> None:
        """Add the hosts whose memory or NVMe folder is too small for the run's states."""
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
                        f"{ranks} ranks of this run need {format_bytes(needs[place] * ranks)} for"
                        " their states"
                    )
                    self.add(
                        Problem(f"{what}: {format_bytes(free[place])} free", rule, fix), [node]
                    )

    def _add_disk(self, needs: dict[str, int], out: Path) -> None:
        """Add the files that the run writes. Report a problem if the disk is too small."""
        free, size, count = self.seen[0]["room"]["out"], needs["checkpoint"], needs["checkpoints"]
        total = size * count + needs["export"]
        files = (
            f" and Hugging Face files of {format_bytes(needs['export'])}" if needs["export"] else ""
        )
        made = f"{count} checkpoint{'s' if count > 1 else ''} of {format_bytes(size)}{files}"
        self.add(ReportRow("disk", f"{made}, {format_bytes(free)} free"), [0])
        if total > free:
            where, rule = (
                f"out = {out}: {format_bytes(free)} free",
                f"the run writes {format_bytes(total)}",
            )
            fix = (
                "free space, keep fewer with --keep, leave out --export, or set --out to a folder"
                " on another disk"
            )
            self.add(Problem(where, f"{rule}: {made}", fix), [])

    def add_measurements(
        self, replies: dict[int, dict[str, Any]], joined: dict[int, dict[str, Any]]
    ) -> None:
        """Add the measured speeds, and the ranks and links for which the other ranks would wait.

        `joined` maps each rank to its report after it joined the process group.
        """
        failed = {rank: found["error"] for rank, found in replies.items() if "error" in found}
        for rank, why in failed.items():
            fix = (
                "for NCCL start again with NCCL_DEBUG=INFO, and choose the interface with"
                " NCCL_SOCKET_IFNAME (gloo: GLOO_SOCKET_IFNAME)"
            )
            self.add(Problem(self.rank_name(rank), f"the all-reduce failed: {why}", fix), [])
        if failed or not replies:
            return

        slow = self.find_slow_ranks(replies)
        self._add_ranks(replies, slow)
        links = {
            (int(source), rank): speed
            for rank, found in replies.items()
            for source, speed in found["links"].items()
        }
        if links:
            self._add_speeds(replies, links)
        self._add_slow_links(links, slow.keys())
        if all(found["cuda"] for found in replies.values()):
            self.add_links_below_expected(links, joined)

    def _add_ranks(
        self, replies: dict[int, dict[str, Any]], slow: dict[int, tuple[float, float]]
    ) -> None:
        """Add the ranks that are slow or that compute wrong sums."""
        for rank, (seconds, others) in slow.items():
            rule = (
                f"is slow: it needs {seconds * 1e3:.1f} ms where other ranks need"
                f" {others * 1e3:.1f} ms, and in a run all ranks wait for it"
            )
            fix = "check its host for other jobs, a throttled clock or failing hardware"
            self.add(Problem(self.rank_name(rank), rule, fix), [])
        for rank in (rank for rank, found in replies.items() if found["wrong"]):
            fix = "do not train on this host. Test its memory and devices"
            self.add(Problem(self.rank_name(rank), "the all-reduce gave a wrong sum", fix), [])

    def _add_speeds(
        self, replies: dict[int, dict[str, Any]], links: dict[tuple[int, int], float]
    ) -> None:
        """Add the speeds of the all-reduce and of the point-to-point messages."""
        bus = statistics.median(found["bus"] for found in replies.values())
        all_reduce = statistics.median(found["all_reduce"] for found in replies.values())
        self.add(ReportRow("all-reduce", f"{all_reduce * 1e3:.1f} ms, {bus:.2f} GB/s"), [0])
        complete = (
            ""
            if all(found["complete"] for found in replies.values())
            else ", as many as two seconds allow"
        )
        speeds = f"{min(links.values()):.2f} to {max(links.values()):.2f} GB/s"
        self.add(ReportRow("messages", f"{len(links)} links{complete}: {speeds}"), [0])

    def _add_slow_links(self, links: dict[tuple[int, int], float], slow: Set[int]) -> None:
        """Add links that are much slower than other links of their kind.

        The kinds are links inside a host and links between hosts. The links of the `slow` ranks
        are omitted.
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
                if speed * SLOW_LINK_RATIO < usual and not slow & set(pair)
            }
            for where, text in self._group_links(bad):
                fix = "check the cable, the switch port and the interface in use"
                self.add(Problem(where, f"the link is slow: {text}", fix), [])

    def add_links_below_expected(
        self, links: dict[tuple[int, int], float], joined: dict[int, dict[str, Any]]
    ) -> None:
        """Add links between GPUs that do not reach the expected speed for their kind."""
        facts = {node: self.seen[node]["fabric"] for node in self.nodes}
        networks = {rank: found["network"] for rank, found in joined.items()}
        if len(self.nodes) > 1:
            for problem in fabric.check_nccl_network(
                networks,
                [fabric.RdmaPort(*port) for told in facts.values() for port in told["ports"]],
            ):
                self.add(problem, [])
        firsts = {
            node: min(rank for rank, seen in self.seen.items() if seen["node"] == node)
            for node in self.nodes
        }
        places = {
            rank: fabric.RankLocation(seen["node"], rank - firsts[seen["node"]])
            for rank, seen in self.seen.items()
        }
        for where, text in self._group_links(
            fabric.links_below_expected(
                links, fabric.expected_speeds(places, facts, networks.get(0, ""))
            )
        ):
            fix = (
                "check nvidia-smi topo -m, nvidia-smi nvlink -s, ibstat, and what NCCL chooses with"
                " NCCL_DEBUG=INFO"
            )
            self.add(Problem(where, f"the link is slow: {text}", fix), [])

    def find_slow_ranks(
        self, replies: dict[int, dict[str, Any]], ratio: float = SLOW_RANK_RATIO
    ) -> dict[int, tuple[float, float]]:
        """Find the ranks that make all other ranks wait.

        Return rank -> (its seconds for a piece of work, the other ranks' seconds).

        On a host without GPUs, the ranks share the cores, and the scheduler decides how. Therefore
        only the fastest rank on such a host is compared.
        """
        own = {rank: found["work"] for rank, found in replies.items() if "work" in found}
        if not all(found.get("cuda") for found in replies.values()):
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
            if seconds > ratio * others[rank]
        }

    def add_missing_ranks(self, lost: dict[int, str]) -> None:
        """Add the ranks that never connected or that are gone."""
        by_reason: dict[str, list[int]] = {}
        for rank, why in sorted(lost.items()):
            by_reason.setdefault(why, []).append(rank)
        for why, ranks in by_reason.items():
            names = ", ".join(self.rank_name(rank) for rank in ranks)
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
        width = max(len(row.label) for row, _ in self.rows)
        lines = [
            f"{len(self.seen)} rank{'s' if len(self.seen) > 1 else ''} on {count}"
            f" host{'s' if count > 1 else ''}"
        ]
        for row, nodes in sorted(
            self.rows, key=lambda item: [other.label for other, _ in self.rows].index(item[0].label)
        ):
            shared = len(nodes) == count or row.label in (
                "clocks",
                "connections",
                "all-reduce",
                "messages",
                "disk",
                "W&B",
                "master port",
            )
            where = "" if shared else f"  [{', '.join(self.host_name(node) for node in nodes)}]"
            lines.append(f"  {row.label:{width}}  {row.value}{where}")
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
                    else ", ".join(self.host_name(node) for node in nodes) + ": "
                )
            )
            lines.append(f"  {number}. {hosts}{problem}")
        return "\n".join(lines)
