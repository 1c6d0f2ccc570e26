"""Sums what a rank holds at the worst moment, and refuses what does not fit."""

from dataclasses import dataclass

from ..spec.devices import gib
from ..spec.refusal import Problem

ACCELERATOR, HOST, NVME = "accelerator", "host", "NVMe"
# The moments of a step, for terms that are not always there: while the loss and its gradient are
# computed, while gradients arrive, while all of them are summed over the ranks, during the
# optimizer's step.
LOSS, BACKWARD, REDUCE, STEP = "loss", "backward", "reduce", "step"
MOMENTS = (LOSS, BACKWARD, REDUCE, STEP)


@dataclass(frozen=True)
class Term:
    """Names something that a rank holds, and counts its bytes.

    `pinned`: the page-locked bytes that torch's allocator takes for the term, rounding included (0:
    pageable).

    `bound`: `size` is an upper bound, so no run is refused for it. `when`: the moments at which the
    term is there; empty: always.
    """

    place: str
    what: str
    size: int
    when: tuple[str, ...] = ()
    pinned: int = 0
    bound: bool = False

    @property
    def taken(self) -> int:
        """Returns the bytes that nothing else can use while the term is there."""
        return max(self.size, self.pinned)


def too_much(
    terms: list[Term], place: str, free: int, ranks: int = 1, on: str = ""
) -> list[Problem]:
    """Refuses terms that certainly do not fit into `free` bytes, which `ranks` equal ranks share;
    returns [] if the terms may fit.

    `on` names the device.
    """
    if (needed := ranks * total(terms, place)) <= free:
        return []
    largest = sorted(
        (term for term in terms if term.place == place and not term.bound),
        key=lambda term: -term.taken,
    )[:3]
    listed = ", ".join(f"{term.what} {gib(ranks * term.taken)}" for term in largest)
    who = f"{ranks} ranks need" if ranks > 1 else "a rank needs"
    rule = f"{who} at least {gib(needed)} of it, activations not counted ({listed}, ...)"
    fix = (
        "use more ranks, a smaller micro_batch or seq_len, or a strategy of less memory"
        " (ds_configs/README.md)"
    )
    return [Problem(f"{place} memory{f' of {on}' if on else ''} = {gib(free)}", rule, fix)]


def total(terms: list[Term], place: str, moment: str | None = None, bounds: bool = False) -> int:
    """Sums the bytes taken at a place, at one moment or at the worst one; `bounds`: upper bounds
    count too.
    """
    counted = [term for term in terms if term.place == place and (bounds or not term.bound)]
    moments = MOMENTS if moment is None else (moment,)
    return max(
        sum(term.taken for term in counted if not term.when or when in term.when)
        for when in moments
    )
