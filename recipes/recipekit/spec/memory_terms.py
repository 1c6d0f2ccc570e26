"""A rank's memory in bytes: the settings that determine it, its terms, and their sums."""

from collections.abc import Sequence
from dataclasses import dataclass

from .devices import gib
from .errors import Problem

ACCELERATOR, HOST, NVME = "accelerator", "host", "NVMe"
# Moments of a step, for terms that exist only during some of them. First the loss and its gradient
# are computed (LOSS). Then gradients arrive (BACKWARD), all gradients are summed over the ranks
# (REDUCE), and the optimizer steps (STEP).
LOSS, BACKWARD, REDUCE, STEP = "loss", "backward", "reduce", "step"
STEP_MOMENTS = (LOSS, BACKWARD, REDUCE, STEP)


@dataclass(frozen=True)
class Term:
    """An item that a rank stores, with its size in bytes.

    `pinned` is the number of page-locked bytes that torch's allocator reserves for the term,
    including rounding. It is 0 for pageable memory.

    If `bound` is True, `size` is only an upper bound, so a run is never rejected because of this
    term. `moments` lists the moments at which the term exists. If the list is empty, the term
    always exists.
    """

    place: str
    what: str
    size: int
    moments: tuple[str, ...] = ()
    pinned: int = 0
    bound: bool = False

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes that nothing else can use while the term exists."""
        return max(self.size, self.pinned)


@dataclass(frozen=True)
class MemoryRequest:
    """The memory-related settings of a run, apart from its model and layout.

    `vocabulary` is the number of logits per position, or 0 if the model has no head.
    """

    micro_batch: int
    seq_len: int  # tokens per row on one rank; 1 if a row has logits at only one position
    accumulation: int
    vocabulary: int
    chunked: bool = False  # the loss is computed in chunks of logits
    background: bool = False  # a background save copies the states first
    # An adapter is trained. peft creates adapter weights in fp32, and ZeRO-3 does not convert them.
    adapted: bool = False
    engine: str = "deepspeed"  # or a torch engine: ddp, fsdp2
    half: bool = False  # a torch engine computes in a two-byte dtype
    # torch's pinned allocator rounds up only to ROUNDED_UP_TO, and does not retain larger blocks
    # after they are freed.
    exact_pins: bool = True
    full_layers: bool = False  # layers are compiled as a whole, and ZeRO-3 gathers full layers


def memory_problems(
    terms: Sequence[Term], place: str, free: int, ranks: int = 1, on: str = ""
) -> list[Problem]:
    """Return a problem if the terms certainly do not fit into `free` bytes, otherwise [].

    `ranks` equal ranks share these bytes. `on` is the device's name.
    """
    if (needed := ranks * total_bytes(terms, place)) <= free:
        return []
    largest = sorted(
        (term for term in terms if term.place == place and not term.bound),
        key=lambda term: -term.reserved_bytes,
    )[:3]
    listed = ", ".join(f"{term.what} {gib(ranks * term.reserved_bytes)}" for term in largest)
    who = f"{ranks} ranks need" if ranks > 1 else "a rank needs"
    rule = f"{who} at least {gib(needed)} of it, activations not counted ({listed}, ...)"
    fix = (
        "use more ranks, a smaller micro_batch or seq_len, or a strategy of less memory"
        " (ds_configs/README.md)"
    )
    return [Problem(f"{place} memory{f' of {on}' if on else ''} = {gib(free)}", rule, fix)]


def total_bytes(
    terms: Sequence[Term], place: str, moment: str | None = None, bounds: bool = False
) -> int:
    """Return the bytes used at a place, at a given moment or at the moment of highest use.

    If `bounds` is True, upper bounds are included.
    """
    counted = [term for term in terms if term.place == place and (bounds or not term.bound)]
    moments = STEP_MOMENTS if moment is None else (moment,)
    return max(
        sum(term.reserved_bytes for term in counted if not term.moments or when in term.moments)
        for when in moments
    )


def fullest(stages: Sequence[Sequence[Term]]) -> Sequence[Term]:
    """Return the terms of the pipeline stage with the highest accelerator memory use.

    `stages` contains the terms of one rank per stage.
    """
    return max(stages, key=lambda terms: total_bytes(terms, ACCELERATOR))
