"""The judge of an audit names the rank that differs from its replicas, if that can be known."""

from dataclasses import replace

from recipekit.watch.replicas import AuditReport, judge, odd_ranks


def report(rank: int, **changed: object) -> AuditReport:
    """Return the report of a data-parallel rank that has found nothing."""
    clean = AuditReport(
        rank=rank,
        host=f"node{rank}",
        place=(0, 0),
        data_place=(0,),
        weights_before=7,
        weights=7,
        states_kept=True,
        outputs={"embed": 1, "layers.0": 2, "layers.1": 3},
    )
    return replace(clean, **changed)


def test_equal_replicas_have_no_finding():
    assert judge([report(rank) for rank in range(4)]) == []


def test_changed_states_name_their_rank():
    (found,) = judge([report(0), report(1, states_kept=False)])
    assert found.rank == 1
    assert found.text.startswith("the master weights or optimizer states of rank 1 have changed")


def test_of_three_replicas_the_odd_one_is_named():
    (found,) = judge([report(0), report(1, weights=8, weights_before=8), report(2)])
    assert found.rank == 1


def test_of_two_replicas_the_one_whose_weights_have_changed_is_named():
    (found,) = judge([report(0, weights=8), report(1)])
    assert found.rank == 0


def test_two_replicas_that_differed_at_the_end_of_the_step_are_both_named():
    (found,) = judge([report(0), report(1, weights=8, weights_before=8)])
    assert found.rank is None
    assert found.text == "the weights of ranks 0, 1 differ"


def test_the_first_block_that_differs_is_named():
    wrong = {"embed": 1, "layers.0": 9, "layers.1": 9}
    found, *rest = judge([report(0), report(1), report(2, outputs=wrong)])
    assert (found.rank, found.module, rest) == (2, "layers.0", [])
    (found,) = judge([report(0), report(1, outputs=wrong)])
    assert (found.rank, found.module) == (None, "layers.0")
    assert found.text.startswith("ranks 0, 1 compute different outputs of layers.0")


def test_ranks_with_other_parts_of_the_model_are_not_compared():
    other = {"weights": 8, "weights_before": 8, "outputs": {"layers.2": 5}}
    assert judge([report(0), report(1), *(report(r, place=(0, 1), **other) for r in (2, 3))]) == []
    sequence = {"data_place": (1,), "outputs": {"layers.0": 9}}
    assert judge([report(0), report(1), *(report(r, **sequence) for r in (2, 3))]) == []


def test_divided_weights_are_not_compared():
    divided = {"weights": None, "weights_before": None}
    assert judge([report(0, **divided), report(1, **divided)]) == []


def test_a_majority_is_more_than_half():
    assert odd_ranks({0: 1, 1: 1}) is None
    assert odd_ranks({0: 1, 1: 2}) == []
    assert odd_ranks({0: 1, 1: 1, 2: 2, 3: 2}) == []
    assert odd_ranks({0: 1, 1: 1, 2: 1, 3: 2}) == [3]
