"""Lays out the ranks of a job: its data, tensor, pipeline, sequence and expert parallel degrees."""

from collections.abc import Callable
from dataclasses import dataclass

from .refusal import Problem, Refusal


@dataclass(frozen=True)
class Mesh:
    """Holds the degrees of a job.

    `world = pp * dp * sp * tp`; ep ranks are taken out of the dp ranks.

    Ranks are laid out as DeepSpeed's `PipeModelDataParallelTopology` does: pipeline slowest, then
    data, then sequence, tensor fastest, so that tensor peers are neighbours on one host.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.sp * self.tp

    def __str__(self) -> str:
        """Names the run, for example `dp2_tp2`; degrees of 1 are left out, except dp."""
        parts = [f"dp{self.dp}"]
        parts += [
            f"{axis}{degree}"
            for axis in ("tp", "pp", "sp", "ep")
            if (degree := getattr(self, axis)) > 1
        ]
        return "_".join(parts)

    def coords(self, rank: int) -> dict[str, int]:
        """Returns the coordinate of `rank` on each axis: {"pp", "dp", "sp", "tp"}."""
        rest, tp_rank = divmod(rank, self.tp)
        rest, sp_rank = divmod(rest, self.sp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return {"pp": pp_rank, "dp": dp_rank, "sp": sp_rank, "tp": tp_rank}

    def groups(self, *axes: str) -> list[list[int]]:
        """Lists the groups of ranks that differ only on `axes`, each sorted; every rank is in
        exactly one group.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            fixed = tuple(value for axis, value in self.coords(rank).items() if axis not in axes)
            groups.setdefault(fixed, []).append(rank)
        return list(groups.values())


def make_mesh(world: int, tp: int = 1, pp: int = 1, sp: int = 1, ep: int = 1) -> Mesh:
    """Makes the mesh of `world` ranks with the given degrees; dp takes what is left.

    Raises `Refusal` if the degrees do not fit.
    """
    problems = [
        Problem(f"{name} = {degree}", "must be at least 1", f"use --{name} 1")
        for name, degree in (("tp", tp), ("pp", pp), ("sp", sp), ("ep", ep))
        if degree < 1
    ]
    if problems:
        raise Refusal(problems)
    used = tp * pp * sp
    if world % used:
        product = " * ".join(
            f"{name}({degree})"
            for name, degree in (("pp", pp), ("sp", sp), ("tp", tp))
            if degree > 1
        )
        fits = [str(degree) for degree in range(1, world + 1) if world % degree == 0]
        rule = f"does not divide the {world} rank{'s' if world > 1 else ''}"
        fix = (
            f"choose degrees whose product is {' or '.join(fits)}, or start a multiple of {used}"
            " ranks"
        )
        raise Refusal([Problem(f"{product} = {used}", rule, fix)])
    dp = world // used
    if dp % ep:
        fits = [str(degree) for degree in range(1, dp + 1) if dp % degree == 0]
        raise Refusal(
            [
                Problem(
                    f"ep = {ep}",
                    f"does not divide the {dp} data-parallel ranks",
                    f"use --ep {' or '.join(fits)}",
                )
            ]
        )
    return Mesh(dp=dp, tp=tp, pp=pp, sp=sp, ep=ep)


def fit_degrees(
    world: int,
    degrees: dict[str, int],
    typed: frozenset[str],
    whole: dict[str, tuple[int, ...]] | None = None,
) -> dict[str, int]:
    """Lowers degrees until they fit `world`: sp gives way first, then ep, pp and tp, each to the
    largest that fits.

    `whole`: axis -> further numbers that its degree has to divide (0 stands for an unknown number,
    which every degree divides). A degree in `typed` is never changed. `--tiny` uses this;
    `make_mesh` refuses degrees that still do not fit.
    """
    kept = {axis for axis, degree in degrees.items() if axis in typed or degree < 1}
    fitted = {axis: max(1, degree) if axis in kept else 1 for axis, degree in degrees.items()}
    for axis in ("tp", "pp", "ep", "sp"):  # in reverse order of giving way
        for degree in range(degrees[axis], 0, -1) if axis not in kept else ():
            trial = fitted | {axis: degree}
            dp, left = divmod(world, trial["tp"] * trial["pp"] * trial["sp"])
            if (
                not left
                and dp % trial["ep"] == 0
                and all(number % degree == 0 for number in (whole or {}).get(axis, ()))
            ):
                fitted = trial
                break
    return fitted | {axis: degrees[axis] for axis in kept}


def fit_batch(
    dp: int, micro_batch: int, global_batch: int, typed: frozenset[str]
) -> tuple[int, int]:
    """Returns (micro_batch, global_batch) such that `dp` ranks share the global batch evenly; a
    field in `typed` never changes.

    The global batch is raised to the next number that fits. A global batch that was typed stays,
    and the micro-batch is lowered to the largest that fits. Numbers that still do not fit are
    refused later.
    """
    if micro_batch < 1:
        return micro_batch, global_batch
    if "global_batch" not in typed:
        return micro_batch, -(-global_batch // (dp * micro_batch)) * dp * micro_batch
    if "micro_batch" not in typed:
        micro_batch = next(
            (rows for rows in range(micro_batch, 0, -1) if global_batch % (dp * rows) == 0),
            micro_batch,
        )
    return micro_batch, global_batch


def nearest_worlds(world: int, step: int, works: Callable[[int], bool]) -> list[int]:
    """Find the nearest numbers of ranks below and above `world` for which `works` is true.

    Only multiples of `step`, the product of the degrees, can work. It also bounds the search above.
    """
    below = next(
        (ranks for ranks in range((world - 1) // step * step, 0, -step) if works(ranks)), None
    )
    above = next(
        (
            ranks
            for ranks in range((world // step + 1) * step, max(64, 2 * (world + step)) + 1, step)
            if works(ranks)
        ),
        None,
    )
    return [ranks for ranks in (below, above) if ranks is not None]
