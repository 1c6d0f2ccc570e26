from dataclasses import replace

from recipekit.watch.recorder import Collective, collectives_of
from recipekit.watch.verdict import Evidence, is_unusual, verdict_of

HOSTS = ("a", "a", "b", "b")
GROUPS = {"0": [0, 1, 2, 3], "3": [0, 1]}


def collective(number: int, group: str = "0", is_open: bool = False) -> Collective:
    return Collective(group, "", number, "all_reduce", f"[{group}]", is_open)


def history(*groups: str, is_open: bool = True) -> list[Collective]:
    """Return one collective after another in these groups. The last one may be open."""
    numbers = [groups[: index + 1].count(group) for index, group in enumerate(groups)]
    made = [collective(number, group) for number, group in zip(numbers, groups, strict=True)]
    return [*made[:-1], replace(made[-1], open=is_open)]


WAITS = Evidence(0, "a", "train.py:9 in step", "", True, "", history("0", "3", "0"), GROUPS)


def everyone(**others: Evidence) -> dict[int, Evidence]:
    ranks = {rank: replace(WAITS, rank=rank, host=HOSTS[rank]) for rank in range(4)}
    return ranks | {int(name[1:]): each for name, each in others.items()}


def test_the_rank_that_does_not_wait_is_the_cause():
    sleeps = replace(
        WAITS,
        waits=False,
        place="model.mlp (mine.py:3 in slow)",
        module="model.mlp",
        collectives=history("0", "3", is_open=False),
    )
    verdict = verdict_of(everyone(_2=sleeps), HOSTS)
    assert (verdict.rank, verdict.module) == (2, "model.mlp")
    assert verdict.text == (
        "rank 2 on b is in model.mlp (mine.py:3 in slow). It is missing from all_reduce 2 of group"
        " 0, in which rank 0, 1, 3 wait"
    )


def test_a_stopped_process_comes_before_everything_else():
    found = everyone(_1=replace(WAITS, states={0: "S", 1: "S", 3: "T"}))
    del found[3]
    verdict = verdict_of(found, HOSTS)
    assert verdict.rank == 3 and verdict.text.startswith("rank 3 on b is stopped (state T)")


def test_ranks_that_do_not_answer_or_have_ended():
    found = everyone()
    del found[2], found[3]
    assert verdict_of(found, HOSTS).text.startswith("ranks 2, 3 on b do not answer. It is")
    found[0] = replace(WAITS, states={0: "S", 3: ""})
    assert verdict_of(found, HOSTS).text.startswith("rank 3 on b ended without a message")


def test_a_rank_that_left_out_a_collective_is_named_although_all_wait():
    """Rank 1 waits in group 3 for rank 0, and all others wait in group 0 for rank 1."""
    past = ("0", "3", "0", "0", "3", "0", "0", "3", "0")
    waits = replace(WAITS, collectives=history(*past, "0"))
    left_out = replace(WAITS, rank=1, collectives=history(*past, "3"), place="x.py:1 in f")
    assert is_unusual(left_out) and not is_unusual(waits)
    ranks = {rank: replace(waits, rank=rank) for rank in range(4)}
    verdict = verdict_of(ranks | {1: left_out}, HOSTS)
    assert verdict.rank == 1
    assert verdict.text.startswith("rank 1 on a has gone on to x.py:1 in f. It is missing from")


def test_without_a_sign_no_rank_is_named():
    verdict = verdict_of(everyone(), HOSTS)
    assert verdict.rank is None and verdict.text.startswith("all ranks wait for each other: rank 0")
    busy = {rank: replace(WAITS, rank=rank, waits=False) for rank in range(4)}
    assert verdict_of(busy, HOSTS).text.startswith("no rank waits for another: rank 0 is in")
    alone = verdict_of({0: replace(WAITS, waits=False)}, ("a",))
    assert alone.rank == 0 and alone.text == "rank 0 on a is in train.py:9 in step"


def test_entries_of_torchs_recorder_are_read():
    entry = {
        "process_group": ["1", "dp group"],
        "collective_seq_id": 2,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[1000]],
        "retired": False,
        "state": "scheduled",
        "is_p2p": False,
    }
    (found,) = collectives_of([entry, entry | {"is_p2p": True}])
    assert found == Collective("1", "dp group", 2, "all_reduce", "[[1000]]", True)
    assert str(found) == "all_reduce 2 of dp group"
    (nccl,) = collectives_of([entry | {"state": "completed"}])
    assert not nccl.open
