"""The layout of a job's ranks: data, tensor, pipeline, sequence and expert parallel degrees."""

from collections.abc import Callable
from dataclasses import dataclass

from .errors import ConfigError, Problem


@dataclass(frozen=True)
class Mesh:
    """The parallel degrees of a job.

    `world = pp * dp * sp * tp`. The ep ranks are a subset of the dp ranks.

    The axes have the same order as in DeepSpeed's `PipeModelDataParallelTopology`: pipeline varies
    slowest, then data, then sequence, and tensor varies fastest. Tensor-parallel peers are
    therefore neighbours on one host.
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
        """Return a short name, for example `dp2_tp2`. Degrees of 1 are omitted, except dp."""
        parts = [f"dp{self.dp}"]
        parts += [
            f"{axis}{degree}"
            for axis in ("tp", "pp", "sp", "ep")
            if (degree := getattr(self, axis)) > 1
        ]
        return "_".join(parts)

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank` on each axis: {"pp", "dp", "sp", "tp"}."""
        rest, tp_rank = divmod(rank, self.tp)
        rest, sp_rank = divmod(rest, self.sp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return {"pp": pp_rank, "dp": dp_rank, "sp": sp_rank, "tp": tp_rank}

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ only on `axes`, each sorted.

        Every rank is in exactly one group.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            fixed = tuple(value for axis, value in self.coords(rank).items() if axis not in axes)
            groups.setdefault(fixed, []).append(rank)
        return list(groups.values())


def make_mesh(world: int, tp: int = 1, pp: int = 1, sp: int = 1, ep: int = 1) -> Mesh:
    """Return the mesh for `world` ranks with the given degrees; the remaining factor becomes dp.

    Raise `ConfigError` if the degrees do not fit `world`.
    """
    problems = [
        Problem(f"{name} = {degree}", "must be at least 1", f"use --{name} 1")
        for name, degree in (("tp", tp), ("pp", pp), ("sp", sp), ("ep", ep))
        if degree < 1
    ]
    if problems:
        raise ConfigError(problems)
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
        raise ConfigError([Problem(f"{product} = {used}", rule, fix)])
    dp = world // used
    if dp % ep:
        fits = [str(degree) for degree in range(1, dp + 1) if dp % degree == 0]
        raise ConfigError(
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
    divisible: dict[str, tuple[int, ...]] | None = None,
) -> dict[str, int]:
    """Lower the degrees just enough to fit `world`: sp first, then ep, pp and tp.

    `divisible` maps an axis to further numbers that its degree must divide. The number 0 means
    unknown and accepts every degree. A degree in `typed` is never changed. `--tiny` uses this
    function. If the degrees still do not fit, `make_mesh` raises an error.
    """
    kept = {axis for axis, degree in degrees.items() if axis in typed or degree < 1}
    fitted = {axis: max(1, degree) if axis in kept else 1 for axis, degree in degrees.items()}
    for axis in ("tp", "pp", "ep", "sp"):  # the axis lowered last comes first
        for degree in range(degrees[axis], 0, -1) if axis not in kept else ():
            trial = fitted | {axis: degree}
            dp, left = divmod(world, trial["tp"] * trial["pp"] * trial["sp"])
            if (
                not left
                and dp % trial["ep"] == 0
                and all(number % degree == 0 for number in (divisible or {}).get(axis, ()))
            ):
                fitted = trial
                break
    return fitted | {axis: degrees[axis] for axis in kept}


def fit_batch(
    dp: int, micro_batch: int, global_batch: int, typed: frozenset[str]
) -> tuple[int, int]:
    """Return (micro_batch, global_batch) such that `dp` ranks can share the global batch evenly.

    Fields in `typed` are never changed. The global batch is raised to the next number that fits. If
    the global batch was typed, the micro-batch is instead lowered to the largest number that fits.
    Numbers that still do not fit raise an error later.
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


def nearest_worlds(world: int, step: int, is_valid: Callable[[int], bool]) -> list[int]:
    """Return the rank counts nearest to `world`, below and above, for which `is_valid` is true.

    Only multiples of `step`, the product of the degrees, can be valid. `step` also limits the
    upward search.
    """
    below = next(
        (ranks for ranks in range((world - 1) // step * step, 0, -step) if is_valid(ranks)), None
    )
    above = next(
        (
            ranks
            for ranks in range((world // step + 1) * step, max(64, 2 * (world + step)) + 1, step)
            if is_valid(ranks)
        ),
        None,
    )
    return [ranks for ranks in (below, above) if ranks is not None]
