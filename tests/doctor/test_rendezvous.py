"""recipekit/doctor/rendezvous.py over real sockets: no wait may exceed its limit.

Missing ranks must be named.
"""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from pool import free_port
from recipekit.doctor.rendezvous import (
    Coordinator,
    Member,
    candidate_ports,
    join_rendezvous,
    measure_round_trips,
    start_echo_server,
)
from recipekit.spec.errors import ConfigError


def together(
    world: int,
    member: Callable[[Member, int], None],
    chair: Callable[[Coordinator], Any],
    patience: float = 10.0,
    absent: frozenset[int] = frozenset(),
) -> Any:
    """Return the result of `chair`; the other ranks, unless absent, run `member` in threads."""
    port = free_port()

    def run(rank: int) -> None:
        met = join_rendezvous(rank, world, "127.0.0.1", port, patience)
        assert isinstance(met, Member)
        member(met, rank)
        met.close()

    threads = [
        threading.Thread(target=run, args=(rank,)) for rank in range(1, world) if rank not in absent
    ]
    for thread in threads:
        thread.start()
    met = join_rendezvous(0, world, "127.0.0.1", port, patience)
    assert isinstance(met, Coordinator)
    result = chair(met)
    met.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return result


def test_all_are_heard_and_told() -> None:
    told = {}

    def member(met: Member, rank: int) -> None:
        met.gather({"rank": rank, "text": "ä" * 100_000})
        told[rank] = met.receive(10)

    def chair(met: Coordinator) -> Any:
        found = met.gather("mine", 10, "anything")
        clocks = met.measure_clocks()
        met.broadcast([1, "two"])
        return found, clocks, met.lost

    found, clocks, lost = together(4, member, chair)
    assert (
        found == {0: "mine"} | {rank: {"rank": rank, "text": "ä" * 100_000} for rank in (1, 2, 3)}
        and lost == {}
    )
    assert told == {rank: [1, "two"] for rank in (1, 2, 3)}
    assert all(abs(ahead) <= trip < 5 for ahead, trip in clocks.values()) and clocks.keys() == {
        1,
        2,
        3,
    }, "one clock, read over a way of length `trip`"


def test_a_silent_rank_and_one_that_leaves_are_named_in_time() -> None:
    over = threading.Event()

    def member(met: Member, rank: int) -> None:
        if rank == 1:
            over.wait(20)
        if rank == 3:
            met.gather("here")

    def chair(met: Coordinator) -> Any:
        began = time.monotonic()
        found = met.gather("mine", 1.0, "its name")
        over.set()
        return found, time.monotonic() - began, met.lost

    found, seconds, lost = together(4, member, chair)
    assert found == {0: "mine", 3: "here"} and seconds < 15
    assert lost == {
        1: "did not report its name within 1 s",
        2: "ended while it was asked for its name (it closed the connection)",
    }


def test_a_rank_that_never_comes_is_named_in_time() -> None:
    began = time.monotonic()
    lost = together(
        3, lambda met, rank: None, lambda met: met.lost, patience=5.0, absent=frozenset({2})
    )
    assert lost == {2: "did not come within 5 s"} and time.monotonic() - began < 60


def test_other_programs_on_the_ports_do_no_harm() -> None:
    """One program uses the first port and is silent.

    Others connect and send either no data or nonsense.
    """
    port = free_port()
    with socket.create_server(("", port + 1)) as silent:
        met: dict[int, Any] = {}
        threads = [
            threading.Thread(
                target=lambda rank=rank: met.update(
                    {rank: join_rendezvous(rank, 2, "127.0.0.1", port, 20)}
                )
            )
            for rank in (0, 1)
        ]
        threads[0].start()
        time.sleep(0.3)
        strangers = [socket.create_connection(("127.0.0.1", port + 2)) for _ in range(2)]
        strangers[1].sendall(b'["no greeting"]\n\xff\n')
        threads[1].start()
        for thread in threads:
            thread.join(30)
        met[0].broadcast("hello")
        assert met[1].receive(5) == "hello" and met[0].lost == {}
        for end in (*strangers, *met.values()):
            end.close()
        assert silent.fileno() > 0


def test_a_rank_that_greeted_while_rank_0_was_busy_is_not_lost() -> None:
    """Two silent strangers keep rank 0 busy for 4 s.

    The members give up after 2 s, and greet again when rank 0 reads their first greeting.
    """
    port = free_port()
    met: dict[int, Any] = {}
    threads = [
        threading.Thread(
            target=lambda rank=rank: met.update(
                {rank: join_rendezvous(rank, 3, "127.0.0.1", port, 30)}
            )
        )
        for rank in (0, 1, 2)
    ]
    threads[0].start()
    strangers: list[socket.socket] = []
    until = time.monotonic() + 20
    for near in itertools.cycle(candidate_ports(port)):  # another program may have the first port
        assert len(strangers) < 2 and time.monotonic() < until
        with contextlib.suppress(OSError):
            strangers += [socket.create_connection(("127.0.0.1", near)) for _ in range(2)]
            break
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert met.keys() == {0, 1, 2} and met[0].lost == {}
    met[0].broadcast("hello")
    assert [met[rank].receive(5) for rank in (1, 2)] == ["hello", "hello"] and met[0].lost == {}
    for end in (*strangers, *met.values()):
        end.close()


def test_a_member_without_a_chair_says_where_it_looked() -> None:
    port = free_port()
    with pytest.raises(
        ConfigError,
        match=(
            rf"rank 0 at 127.0.0.1, ports {port + 1} to {port + 8}: cannot be reached from rank 1"
            r" on .* \(Connection refused\)"
        ),
    ):
        join_rendezvous(1, 2, "127.0.0.1", port, 0.5)
    member = None
    chairs: list[Coordinator] = []
    thread = threading.Thread(
        target=lambda: chairs.append(join_rendezvous(0, 2, "127.0.0.1", port, 10))
    )  # type: ignore[arg-type]
    thread.start()
    member = join_rendezvous(1, 2, "127.0.0.1", port, 10)
    thread.join()
    chairs[0].close()
    assert isinstance(member, Member)
    with pytest.raises(
        ConfigError,
        match=r"stopped answering \(it closed the connection\)\. Check the output of rank 0",
    ):
        member.receive(5)
    member.close()


def test_ports_stay_below_the_last_one() -> None:
    assert candidate_ports(29500) == range(29501, 29509) and candidate_ports(65530) == range(
        65522, 65530
    )


def test_reach_tells_the_round_trip_or_why_not() -> None:
    with start_echo_server() as listener:
        port = listener.getsockname()[1]
        found = measure_round_trips({1: ("127.0.0.1", port), 2: ("127.0.0.1", free_port())}, 2)
    assert isinstance(found[1], float) and 0 < found[1] < 2 and found[2] == "Connection refused"
