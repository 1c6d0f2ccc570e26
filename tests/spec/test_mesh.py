"""The layout of the ranks: a partition of the world like DeepSpeed's, rejected if it cannot fit."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import Mesh, fit_batch, fit_degrees, make_mesh, nearest_worlds

degree = st.integers(1, 4)
AXES = ("pp", "dp", "sp", "tp")


def test_ranks_lie_as_deepspeeds_topology_lays_them():
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(num_pp=3, num_mp=2, num_dp=4)
    mesh = make_mesh(24, pp=3, tp=2)
    for rank in range(24):
        theirs = topology.get_coord(rank)
        assert mesh.coords(rank) == {
            "pp": theirs.pipe,
            "dp": theirs.data,
            "sp": 0,
            "tp": theirs.model,
        }
    assert sorted(mesh.groups("tp")) == sorted(topology.get_axis_comm_lists("model"))
    assert sorted(mesh.groups("dp")) == sorted(topology.get_axis_comm_lists("data"))
    assert sorted(mesh.groups("pp")) == sorted(topology.get_axis_comm_lists("pipe"))


def test_groups_of_dp2_tp2():
    mesh = make_mesh(4, tp=2)
    assert mesh == Mesh(dp=2, tp=2)
    assert mesh.groups("tp") == [[0, 1], [2, 3]]  # tensor-parallel ranks are neighbours
    assert mesh.groups("dp") == [[0, 2], [1, 3]]
    assert mesh.groups("pp") == [[0], [1], [2], [3]]
    assert mesh.groups("dp", "tp") == [[0, 1, 2, 3]]


@given(degree, degree, degree, degree, st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_world(dp, tp, pp, sp, axes):
    mesh = Mesh(dp=dp, tp=tp, pp=pp, sp=sp)
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
    size = 1
    for axis in axes:
        size *= getattr(mesh, axis)
    for group in groups:
        assert len(group) == size and group == sorted(group)
        assert (
            len(
                {
                    tuple(mesh.coords(rank)[axis] for axis in AXES if axis not in axes)
                    for rank in group
                }
            )
            == 1
        )


@given(degree, degree, degree, degree)
def test_coords_are_unique_and_within_the_degrees(dp, tp, pp, sp):
    mesh = Mesh(dp=dp, tp=tp, pp=pp, sp=sp)
    coords = [mesh.coords(rank) for rank in range(mesh.world)]
    assert len({tuple(coord.values()) for coord in coords}) == mesh.world
    assert all(0 <= coord[axis] < getattr(mesh, axis) for coord in coords for axis in AXES)


@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        (Mesh(), "dp1"),
        (Mesh(dp=2, tp=2), "dp2_tp2"),
        (Mesh(dp=1, tp=2, pp=4), "dp1_tp2_pp4"),
        (Mesh(dp=4, sp=2, ep=2), "dp4_sp2_ep2"),
    ],
)
def test_text_names_the_run(mesh, name):
    assert str(mesh) == name


@given(
    st.integers(1, 64),
    st.integers(-1, 8),
    st.integers(-1, 8),
    st.integers(-1, 8),
    st.integers(-1, 8),
)
def test_mesh_fits_or_is_refused(world, tp, pp, sp, ep):
    fits = (
        min(tp, pp, sp, ep) >= 1
        and world % (tp * pp * sp) == 0
        and (world // (tp * pp * sp)) % ep == 0
    )
    if fits:
        mesh = make_mesh(world, tp=tp, pp=pp, sp=sp, ep=ep)
        assert mesh.world == world and (mesh.tp, mesh.pp, mesh.sp, mesh.ep) == (tp, pp, sp, ep)
    else:
        with pytest.raises(ConfigError):
            make_mesh(world, tp=tp, pp=pp, sp=sp, ep=ep)


@pytest.mark.parametrize(
    ("world", "degrees", "text"),
    [
        (
            12,
            {"pp": 4, "tp": 2},
            (
                "pp(4) * tp(2) = 8: does not divide the 12 ranks. Choose degrees whose product is 1"
                " or 2 or 3 or 4 or 6 or 12, or start a multiple of 8 ranks"
            ),
        ),
        (
            1,
            {"tp": 2},
            (
                "tp(2) = 2: does not divide the 1 rank. Choose degrees whose product is 1, or start"
                " a multiple of 2 ranks"
            ),
        ),
        (
            8,
            {"tp": 2, "ep": 3},
            "ep = 3: does not divide the 4 data-parallel ranks. Use --ep 1 or 2 or 4",
        ),
        (
            2,
            {"tp": 0, "ep": -1},
            "tp = 0: must be at least 1. Use --tp 1\nep = -1: must be at least 1. Use --ep 1",
        ),
    ],
)
def test_refusals_name_the_rule_and_the_fix(world, degrees, text):
    with pytest.raises(ConfigError) as refused:
        make_mesh(world, **degrees)
    assert str(refused.value) == text and refused.value.exit_code == 1


@pytest.mark.parametrize(
    ("world", "wanted", "fitted"),
    [
        (8, dict(tp=4, pp=1, sp=1, ep=1), dict(tp=4, pp=1, sp=1, ep=1)),
        (2, dict(tp=4, pp=1, sp=1, ep=1), dict(tp=2, pp=1, sp=1, ep=1)),
        (1, dict(tp=4, pp=2, sp=2, ep=8), dict(tp=1, pp=1, sp=1, ep=1)),
        # sp is lowered before pp and tp.
        (4, dict(tp=2, pp=2, sp=2, ep=1), dict(tp=2, pp=2, sp=1, ep=1)),
        (4, dict(tp=4, pp=4, sp=1, ep=1), dict(tp=4, pp=1, sp=1, ep=1)),  # pp is lowered before tp
        # ep ranks are part of dp.
        (4, dict(tp=2, pp=1, sp=1, ep=8), dict(tp=2, pp=1, sp=1, ep=2)),
        (2, dict(tp=2, pp=2, sp=1, ep=2), dict(tp=2, pp=1, sp=1, ep=1)),
        (6, dict(tp=4, pp=1, sp=1, ep=1), dict(tp=3, pp=1, sp=1, ep=1)),
    ],
)
def test_degrees_are_lowered_in_order(world, wanted, fitted):
    assert fit_degrees(world, wanted, frozenset()) == fitted


@given(
    st.integers(1, 32),
    st.fixed_dictionaries({axis: st.integers(1, 8) for axis in ("tp", "pp", "sp", "ep")}),
    st.sets(st.sampled_from(("tp", "pp", "sp", "ep"))),
)
def test_typed_degrees_never_change_and_the_others_fit(world, wanted, typed):
    fitted = fit_degrees(world, wanted, frozenset(typed))
    assert all(1 <= fitted[axis] <= wanted[axis] for axis in wanted)
    assert all(fitted[axis] == wanted[axis] for axis in typed)
    used = [wanted[axis] if axis in typed else 1 for axis in ("tp", "pp", "sp")]
    possible = world % (used[0] * used[1] * used[2]) == 0
    if possible and "ep" not in typed:
        assert make_mesh(world, **fitted).world == world


@pytest.mark.parametrize(
    ("world", "wanted", "whole", "fitted"),
    [
        # 3 divides the ranks, but it does not divide the heads.
        (6, dict(tp=4, pp=1, sp=1, ep=1), {"tp": (32, 4)}, dict(tp=2, pp=1, sp=1, ep=1)),
        # pp gets the ranks that tp leaves.
        (8, dict(tp=8, pp=4, sp=1, ep=1), {"tp": (32, 4)}, dict(tp=4, pp=2, sp=1, ep=1)),
        (9, dict(tp=1, pp=1, sp=1, ep=4), {"ep": (4,)}, dict(tp=1, pp=1, sp=1, ep=1)),
        (6, dict(tp=1, pp=1, sp=8, ep=1), {"sp": (16, 128)}, dict(tp=1, pp=1, sp=2, ep=1)),
        # Unknown numbers are divisible by everything.
        (6, dict(tp=1, pp=1, sp=8, ep=1), {"sp": (0, 0)}, dict(tp=1, pp=1, sp=6, ep=1)),
        (6, dict(tp=4, pp=4, sp=1, ep=1), {}, dict(tp=3, pp=2, sp=1, ep=1)),
    ],
)
def test_degrees_divide_what_they_cut(world, wanted, whole, fitted):
    assert fit_degrees(world, wanted, frozenset(), whole) == fitted


@given(
    st.integers(1, 24),
    st.fixed_dictionaries({axis: st.integers(1, 6) for axis in ("tp", "pp", "sp", "ep")}),
    st.sets(st.sampled_from(("tp", "pp", "sp", "ep"))),
    st.dictionaries(st.sampled_from(("tp", "sp", "ep")), st.tuples(st.integers(0, 24))),
)
def test_lowered_degrees_are_the_largest_that_fit_in_this_order(world, wanted, typed, whole):
    """The reference tries all degrees that fit.

    tp is the largest of all, pp the largest with that tp, followed by ep and then sp.
    """

    def fits(tp, pp, ep, sp):
        cut = {"tp": tp, "pp": pp, "ep": ep, "sp": sp}
        divides = all(
            number % cut[axis] == 0
            for axis, numbers in whole.items()
            if axis not in typed
            for number in numbers
        )
        return divides and world % (tp * pp * sp) == 0 and world // (tp * pp * sp) % ep == 0

    choices = [
        [wanted[axis]] if axis in typed else range(1, wanted[axis] + 1)
        for axis in ("tp", "pp", "ep", "sp")
    ]
    possible = [chosen for chosen in product(*choices) if fits(*chosen)]
    if possible:
        assert fit_degrees(world, wanted, frozenset(typed), whole) == dict(
            zip(("tp", "pp", "ep", "sp"), max(possible), strict=True)
        )


@pytest.mark.parametrize(
    ("dp", "micro_batch", "global_batch", "typed", "fitted"),
    [
        (8, 4, 16, (), (4, 32)),
        (4, 4, 16, (), (4, 16)),
        (5, 4, 16, (), (4, 20)),
        (3, 4, 16, ("micro_batch",), (4, 24)),
        (3, 4, 6, ("global_batch",), (2, 6)),
        (3, 4, 7, ("global_batch",), (4, 7)),  # rejected later
        (3, 4, 6, ("global_batch", "micro_batch"), (4, 6)),  # rejected later
    ],
)
def test_a_batch_is_shared_evenly(dp, micro_batch, global_batch, typed, fitted):
    assert fit_batch(dp, micro_batch, global_batch, frozenset(typed)) == fitted


def test_the_nearest_worlds_lie_on_both_sides():
    assert nearest_worlds(9, 4, lambda ranks: ranks % 4 == 0) == [8, 12]
    assert nearest_worlds(3, 128, lambda ranks: ranks % 128 == 0) == [128]
    assert nearest_worlds(70, 1, lambda ranks: ranks in (16, 139, 143)) == [16, 139]
    assert nearest_worlds(3, 1, lambda ranks: False) == []
