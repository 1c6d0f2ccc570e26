"""Judges of an audit: which rank computes or stores something else than its replicas.

Each rank reports about itself. All ranks judge the reports of all ranks, with the same result.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AuditReport:
    """The digests of one rank at an audit. A digest changes if any bit changes.

    Ranks with the same `place` store the same weights. If their `data_place` is the same too, they
    compute the same block outputs.
    """

    rank: int
    host: str
    place: tuple[int, ...]
    data_place: tuple[int, ...]
    weights_before: int | None  # at the end of the last step; None if no replica exists
    weights: int | None  # now
    states_kept: bool  # masters and moments are unchanged since the end of the last step
    outputs: Mapping[str, int] = field(default_factory=dict)  # by block, in forward order


@dataclass(frozen=True)
class AuditFinding:
    """A difference. `rank` and `host` are None if it is not known which rank is wrong."""

    text: str
    rank: int | None = None
    module: str | None = None
    host: str | None = None


def judge(reports: Sequence[AuditReport]) -> list[AuditFinding]:
    """Return the differences between the replicas, the most certain ones first."""
    return [
        *(
            AuditFinding(
                f"the master weights or optimizer states of rank {report.rank} have changed"
                " between two steps",
                report.rank,
            )
            for report in reports
            if not report.states_kept
        ),
        *_different_weights(reports),
        *_different_outputs(reports),
    ]


def _different_weights(reports: Sequence[AuditReport]) -> list[AuditFinding]:
    findings = []
    for replicas in _by_place([report for report in reports if report.weights is not None]):
        odd = odd_ranks({report.rank: report.weights for report in replicas})
        if odd is None:
            continue
        # Of two replicas, the one is wrong whose weights have changed since the step's end.
        wrong = odd or [r.rank for r in replicas if r.weights != r.weights_before]
        findings += _named("the weights of {} differ from those of the other replicas", wrong)
        if not wrong:
            ranks = tuple(report.rank for report in replicas)
            findings.append(AuditFinding(f"the weights of {_listed(ranks)} differ"))
    return findings


def _different_outputs(reports: Sequence[AuditReport]) -> list[AuditFinding]:
    findings = []
    for replicas in _by_place(reports, by_data=True):
        for name in replicas[0].outputs:
            odd = odd_ranks({report.rank: report.outputs.get(name) for report in replicas})
            if odd is None:
                continue
            what = f"computes another output of {name} than the other replicas"
            findings += _named(f"{{}} {what}", odd, name)
            if not odd:
                ranks = tuple(report.rank for report in replicas)
                text = f"{_listed(ranks)} compute different outputs of {name}"
                findings.append(AuditFinding(text, module=name))
            break  # the blocks after it differ as a consequence
    return findings


def odd_ranks(digests: Mapping[int, int | None]) -> list[int] | None:
    """Return the ranks whose digest is not the majority's, or None if all digests are equal.

    Without a majority, the result is empty.
    """
    counts = Counter(digests.values())
    if len(counts) <= 1:
        return None
    (digest, most), *_ = counts.most_common(1)
    if 2 * most <= len(digests):
        return []
    return [rank for rank, own in digests.items() if own != digest]


def _named(text: str, wrong: Sequence[int], module: str | None = None) -> list[AuditFinding]:
    return [AuditFinding(text.format(f"rank {rank}"), rank, module) for rank in wrong]


def _listed(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"


def _by_place(reports: Sequence[AuditReport], by_data: bool = False) -> list[list[AuditReport]]:
    groups: dict[tuple[int, ...], list[AuditReport]] = {}
    for report in reports:
        place = report.place + (report.data_place if by_data else ())
        groups.setdefault(place, []).append(report)
    return list(groups.values())
