"""Which rank does what: data, tensor, pipeline, sequence and expert parallel degrees of one job."""

from dataclasses import dataclass

from .refusal import Problem, Refusal


@dataclass(frozen=True)
class Mesh:
    """The degrees of a job. `world = pp * dp * sp * tp`; ep ranks are taken out of the dp ranks.

    Ranks are laid out as DeepSpeed's `PipeModelDataParallelTopology` does: pipeline slowest, then data, then sequence,
    tensor fastest, so that tensor peers are neighbours on one host.
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
        parts += [f"{axis}{degree}" for axis in ("tp", "pp", "sp", "ep") if (degree := getattr(self, axis)) > 1]
        return "_".join(parts)

    def coords(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` on each axis: {"pp", "dp", "sp", "tp"}."""
        rest, tp_rank = divmod(rank, self.tp)
        rest, sp_rank = divmod(rest, self.sp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return {"pp": pp_rank, "dp": dp_rank, "sp": sp_rank, "tp": tp_rank}

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups of ranks that differ only on `axes`, each sorted; every rank is in exactly one."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            fixed = tuple(value for axis, value in self.coords(rank).items() if axis not in axes)
            groups.setdefault(fixed, []).append(rank)
        return list(groups.values())


def make_mesh(world: int, tp: int = 1, pp: int = 1, sp: int = 1, ep: int = 1) -> Mesh:
    """The mesh of `world` ranks with the given degrees; dp takes what is left. Raises `Refusal` if it does not fit."""
    problems = [
        Problem(f"{name} = {degree}", "a degree is at least 1", f"use --{name} 1")
        for name, degree in (("tp", tp), ("pp", pp), ("sp", sp), ("ep", ep))
        if degree < 1
    ]
    if problems:
        raise Refusal(problems)
    used = tp * pp * sp
    if world % used:
        product = " * ".join(f"{name}({degree})" for name, degree in (("pp", pp), ("sp", sp), ("tp", tp)) if degree > 1)
        fits = [str(degree) for degree in range(1, world + 1) if world % degree == 0]
        rule = f"does not divide the {world} rank{'s' if world > 1 else ''}"
        fix = f"choose degrees whose product is {' or '.join(fits)}, or start a multiple of {used} ranks"
        raise Refusal([Problem(f"{product} = {used}", rule, fix)])
    dp = world // used
    if dp % ep:
        fits = [str(degree) for degree in range(1, dp + 1) if dp % degree == 0]
        raise Refusal([Problem(f"ep = {ep}", f"does not divide the {dp} data-parallel ranks", f"use --ep {' or '.join(fits)}")])
    return Mesh(dp=dp, tp=tp, pp=pp, sp=sp, ep=ep)


def fit_degrees(world: int, degrees: dict[str, int], typed: frozenset[str]) -> dict[str, int]:
    """Lowers degrees that do not fit `world`, in the order sp, ep, pp, tp, each to the largest that fits.

    A degree in `typed` is never changed. Used by `--tiny`; what cannot be made to fit is left for `make_mesh` to refuse.
    """
    degrees = dict(degrees)
    for axis in ("sp", "ep", "pp", "tp"):
        if axis in typed:
            continue
        others = 1
        for other in ("sp", "pp", "tp"):
            others *= degrees[other] if other != axis else 1
        for degree in range(degrees[axis], 0, -1):
            if axis == "ep":
                fits = world % others == 0 and (world // others) % degree == 0
            else:
                fits = world % (others * degree) == 0
            if fits:
                degrees[axis] = degree
                break
        else:
            degrees[axis] = 1
    return degrees
