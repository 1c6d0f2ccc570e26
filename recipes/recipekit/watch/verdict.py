"""The verdict about a hang: which rank is the cause, from the evidence of all ranks.

A rank whose main thread waits in a collective is a victim. The rank that does not wait is the
cause, and torch's flight recorder says in which collective the others wait for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .processes import STOPPED
from .recorder import Collective

SHOWN = 3  # ranks that a verdict names


@dataclass(frozen=True)
class Evidence:
    """Report of one rank about itself and the processes of its host during a hang."""

    rank: int
    host: str
    place: str  # where the main thread is
    module: str  # of the model, or ""
    waits: bool  # for other ranks
    long_work: str  # such as "compiles", or ""
    collectives: list[Collective]  # the latest, in order
    groups: dict[str, list[int]]  # ranks of each process group, by torch's name
    states: dict[int, str] = field(default_factory=dict)  # of the ranks' processes on this host


@dataclass(frozen=True)
class Verdict:
    """The result: the rank that is the cause (None if unknown), its module, and one sentence."""

    rank: int | None
    module: str
    text: str


def verdict_of(evidence: Mapping[int, Evidence], hosts: Sequence[str]) -> Verdict:
    """Return which rank the others wait for. `hosts` contains the host of each rank."""
    missing = missing_ranks(evidence)
    ranks, what = ranks_without_answer(evidence, len(hosts))
    if not ranks:
        ranks = [rank for rank, each in sorted(evidence.items()) if not each.waits]
        # Either all ranks wait, or none does as far as the stacks show.
        if not ranks or len(ranks) == len(hosts) > 1:
            ranks = deserting_ranks(evidence, missing)
            what = f"has gone on to {evidence[ranks[0]].place}" if ranks else ""
            if not ranks:
                return unknown_cause(evidence)
        else:
            what = f"is in {evidence[ranks[0]].place}"
    return _about(ranks, what, missing, evidence, hosts)


def ranks_without_answer(evidence: Mapping[int, Evidence], world: int) -> tuple[list[int], str]:
    """Return the ranks that cannot answer, and why: stopped, ended, or unknown."""
    states = {rank: state for each in evidence.values() for rank, state in each.states.items()}
    stopped = [rank for rank, state in sorted(states.items()) if state and state in STOPPED]
    if stopped:
        return stopped, "are stopped (state T)" if len(stopped) > 1 else "is stopped (state T)"
    if gone := [rank for rank, state in sorted(states.items()) if not state]:
        return gone, "ended without a message"
    silent = [rank for rank in range(world) if rank not in evidence]
    return silent, "do not answer" if len(silent) > 1 else "does not answer"


def unknown_cause(evidence: Mapping[int, Evidence]) -> Verdict:
    """Return the verdict that names no rank, but the places of the first ones."""
    places = [f"rank {rank} is in {each.place}" for rank, each in sorted(evidence.items())]
    more = f", and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    all_wait = all(each.waits for each in evidence.values())
    rule = "all ranks wait for each other" if all_wait else "no rank waits for another"
    return Verdict(None, "", f"{rule}: {'; '.join(places[:SHOWN])}{more}")


def missing_ranks(evidence: Mapping[int, Evidence]) -> list[tuple[int, Collective, list[int]]]:
    """Return (missing rank, collective, waiting ranks) for each collective that ranks wait in.

    A member of the group is missing if its newest collective of the group has a smaller number.
    """
    open_now: dict[tuple[str, int], tuple[Collective, list[int]]] = {}
    for rank, each in sorted(evidence.items()):
        for collective in each.collectives:
            if collective.open:
                key = collective.group, collective.number
                open_now.setdefault(key, (collective, []))[1].append(rank)
    found = []
    for collective, waiting in open_now.values():
        for rank in evidence[waiting[0]].groups.get(collective.group, range(0)):
            newest = newest_number(evidence.get(rank), collective.group)
            if newest is None or newest < collective.number:
                found.append((rank, collective, waiting))
    return found


def newest_number(evidence: Evidence | None, group: str) -> int | None:
    """Return the number of a rank's newest collective in a group, or None if it is unknown."""
    of_group = (
        [each.number for each in evidence.collectives if each.group == group] if evidence else []
    )
    return max(of_group, default=None)


def deserting_ranks(
    evidence: Mapping[int, Evidence], missing: Sequence[tuple[int, Collective, list[int]]]
) -> list[int]:
    """Return the ranks that left out a collective which the others wait in.

    Two ranks may be missing from each other's collectives. The rank whose order of collectives is
    new then left one out.
    """
    ranks = sorted({rank for rank, _, _ in missing})
    unusual = [rank for rank in ranks if rank in evidence and is_unusual(evidence[rank])]
    return unusual or (ranks if len(ranks) < len(evidence) else [])


def is_unusual(evidence: Evidence, context: int = 3) -> bool:
    """Return True if the newest collective has never followed the `context` ones before it."""
    done = [(each.group, each.name, each.sizes) for each in evidence.collectives]
    *_, newest = done or [None]
    before = done[-context - 1 : -1]
    followed = [
        done[index + context]
        for index in range(len(done) - context - 1)
        if done[index : index + context] == before
    ]
    return bool(followed) and newest not in followed


def _about(
    ranks: Sequence[int],
    what: str,
    missing: Sequence[tuple[int, Collective, list[int]]],
    evidence: Mapping[int, Evidence],
    hosts: Sequence[str],
) -> Verdict:
    """Return the verdict that these ranks are the cause."""
    first = ranks[0]
    numbers = ", ".join(map(str, ranks[:SHOWN]))
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    text = f"rank{'s' if len(ranks) > 1 else ''} {numbers}{more} on {hosts[first]} {what}"
    waits = next(((each, waiting) for rank, each, waiting in missing if rank == first), None)
    if waits:
        collective, waiting = waits
        shown = ", ".join(map(str, waiting[:SHOWN])) + (", ..." if len(waiting) > SHOWN else "")
        verb = "waits" if len(waiting) == 1 else "wait"
        text += f". It is missing from {collective}, in which rank {shown} {verb}"
    module = evidence[first].module if first in evidence else ""
    return Verdict(first, module, text)
