"""The rank that is reported as the cause of a failed start.

It must be the first rank that failed, not a rank that lost its connection. The messages come from
gloo, torch, NCCL and this project.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pool import ROOT

sys.path.insert(0, str(ROOT))

from launch.connection import Connection
from launch.errors import LaunchError
from launch.host import TAIL, TRACEBACK, last_lines, named_error
from launch.hosts import Host
from launch.job import SETTLE, SETTLE_LOST, Job, Start

MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total"
    " capacity of 79.10 GiB of which 1.20 GiB is free."
)
OWN = [
    "Traceback (most recent call last):",
    '  File "train.py", line 84, in train_step',
    "    engine.backward(loss * weight)",
    MEMORY,
]
# How a rank ends after losing a different rank: (exit code, last lines of its output).
GLOO = [
    "Traceback (most recent call last):",
    '  File "x.py", line 1, in <module>',
    "RuntimeError: [gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.2]:9",
]
STORE = [
    "Traceback (most recent call last):",
    '  File "x.py", line 1, in <module>',
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
]
REMOTE = [
    "[rank0]: Traceback (most recent call last):",
    '[rank0]:   File "x.py", line 1, in <module>',
    (
        "[rank0]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356,"
        " remote process exited or there was a network error, NCCL version 2.29.7"
    ),
    (
        "[rank0]: ncclRemoteError: A call failed possibly due to a network error or a remote"
        " process exiting prematurely."
    ),
    "[rank0]: Last error:",
    "[rank0]: socketProgress: Connection closed by remote peer worker-2<50412>",
]
WATCHDOG = [
    (
        "[rank0]:[E1123 20:27:21.4 ProcessGroupNCCL.cpp:683] [Rank 0] Watchdog caught collective"
        " operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=131072, NumelOut=131072,"
        " Timeout(ms)=2400000) ran for 2400081 milliseconds before timing out."
    ),
    (
        "[rank0]:[E1123 20:27:21.5 ProcessGroupNCCL.cpp:2241] To avoid data inconsistency, we are"
        " taking the entire process down."
    ),
    "terminate called after throwing an instance of 'c10::DistBackendError'",
    (
        "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated"
        " with exception: collective operation timeout"
    ),
    *(f"frame #{number}: c10d::ProcessGroupNCCL::Watchdog::run() + 0x978" for number in range(10)),
    "Fatal Python error: Aborted",
    "",
    *(
        f'  File "torch/autograd/graph.py", line {number} in _engine_run_backward'
        for number in range(4)
    ),
]
FOLLOWED = [f"rank 0: ended, because rank 1 on worker-2 failed: {MEMORY}"]
AFTER_IT = ["rank 0: failed after rank 1: RuntimeError: something else", *FOLLOWED]
LOST = [
    "rank 0: lost rank 1 on worker-2 (pid 5: killed by a user or by the kernel (out of memory: see"
    " dmesg), or crashed). The same command goes on"
]
PEERS = {
    "gloo": (1, GLOO),
    "store": (1, STORE),
    "NCCL": (1, REMOTE),
    "watchdog": (-6, WATCHDOG),
    "mark": (1, FOLLOWED),
    "mark and more": (1, AFTER_IT),
    "killed": (1, LOST),
}


def ended(folder: Path, rank: int, code: int, said: list[str]) -> dict[str, Any]:
    """Return an agent's report on an ended rank, from the rank's log file."""
    log = folder / f"rank_{rank}.log"
    log.write_text("\n".join(["loaded 8 B parameters", *said, ""]))
    return json.loads(
        json.dumps(
            {
                "rank": rank,
                "code": code,
                "tail": last_lines(log),
                "error": named_error(log),
                "log": str(log),
            }
        )
    )


def start(folder: Path, said: list[str]) -> Start:
    hosts = (Host("worker-1", 1), Host("worker-2", 1))
    return Start(
        Job(hosts, "torchrun", ("x.py",), sys.executable, str(folder), {}), folder, said.append
    )


@pytest.mark.parametrize(
    "first", [0, 1], ids=["the peer is seen first", "the culprit is seen first"]
)
@pytest.mark.parametrize("peer", PEERS)
def test_the_rank_that_failed_is_named_and_not_its_peer(
    tmp_path: Path, peer: str, first: int
) -> None:
    said: list[str] = []
    job = start(tmp_path, said)
    ends = [(0, *PEERS[peer]), (1, 1, OWN)]
    for node, code, lines in ends if first == 0 else reversed(ends):
        job.rank_ended(node, **ended(tmp_path, node, code, lines))
    outcome = job.outcome()
    assert (outcome.kind, outcome.code, outcome.text) == (
        "failed",
        1,
        "",
    ), "it was told when it was heard"
    assert (
        len(said) == 1
        and f" s rank 1 on worker-2 ended with 1: {MEMORY}. The last lines of " in said[0]
    )
    assert all(f"    {line}" in said[0] for line in OWN)


@pytest.mark.parametrize(
    ("rank", "spawn", "shown"), [(0, "torchrun", True), (1, "torchrun", False), (1, "once", True)]
)
def test_a_refusal_that_the_console_has_is_not_printed_again(
    tmp_path: Path, rank: int, spawn: str, shown: bool
) -> None:
    """The console shows rank 0's output or, without ranks, the output of each host's script."""
    said: list[str] = []
    job = start(tmp_path, said)
    job.job = dataclasses.replace(job.job, spawn=spawn)
    job.rank_ended(
        rank,
        **ended(
            tmp_path,
            rank,
            1,
            ["refused: 1 problem", "  1. --lr -1: must be positive. Use --lr 1e-4"],
        ),
    )
    outcome = job.outcome()
    assert (outcome.kind, outcome.code, outcome.text) == ("refused", 1, "")
    assert (
        len(said) == 1 and ("--lr -1" in said[0]) == (not shown) and f"rank_{rank}.log" in said[0]
    ), said
    assert ("Its message is above, and in " in said[0]) == shown


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_alone_is_named_at_the_end_with_what_it_lost(tmp_path: Path, peer: str) -> None:
    said: list[str] = []
    job = start(tmp_path, said)
    code, lines = PEERS[peer]
    job.rank_ended(0, **ended(tmp_path, 0, code, lines))
    assert said == [] and job.kill_at is not None
    assert SETTLE_LOST - 1 < job.kill_at - time.monotonic() <= SETTLE_LOST, (
        "the one that failed first may still be about to tell"
    )
    assert "rank 0 on worker-1 " in job.outcome().text
    if peer == "watchdog":
        assert (
            "was ended by SIGABRT: [rank0]:[E1123 20:27:21.4 ProcessGroupNCCL.cpp:683] [Rank 0]"
            " Watchdog caught collective operation timeout" in job.outcome().text
        )
    job.rank_ended(1, **ended(tmp_path, 1, 1, OWN))
    assert job.kill_at - time.monotonic() <= SETTLE


def test_an_end_by_a_signal_is_told_besides_what_was_told_before(tmp_path: Path) -> None:
    """A crash is more informative than an unknown exception on a different rank."""
    said: list[str] = []
    job = start(tmp_path, said)
    job.rank_ended(
        0, **ended(tmp_path, 0, 1, ["Traceback (most recent call last):", "OSError: no answer"])
    )
    job.rank_ended(1, **ended(tmp_path, 1, -11, ["Fatal Python error: Segmentation fault", ""]))
    assert "rank 0 on worker-1 ended with 1: OSError: no answer" in said[0]
    assert (
        "rank 1 on worker-2 was ended by SIGSEGV: Fatal Python error: Segmentation fault"
        in job.outcome().text
    )


def test_a_cuda_error_that_the_watchdog_meets_is_the_ranks_own(tmp_path: Path) -> None:
    said: list[str] = []
    met = (
        "[Rank 1] Process group watchdog thread terminated with exception: CUDA error: an illegal"
        " memory access was encountered"
    )
    job = start(tmp_path, said)
    job.rank_ended(0, **ended(tmp_path, 0, *PEERS["watchdog"]))
    job.rank_ended(
        1,
        **ended(
            tmp_path,
            1,
            -6,
            [
                "terminate called after throwing",
                f"  what():  {met}",
                "Fatal Python error: Aborted",
                "",
            ],
        ),
    )
    assert (
        len(said) == 1
        and "rank 1 on worker-2 was ended by SIGABRT" in said[0]
        and f"    {met}" in said[0].replace("  what():  ", "")
    )


@pytest.mark.parametrize("frames", [1, 30, 300])
def test_the_last_lines_hold_the_whole_last_traceback(tmp_path: Path, frames: int) -> None:
    before = [f"step {number}" for number in range(100)]
    first = ["Traceback (most recent call last):", "ValueError: it was caught", *before]
    last = [
        "[rank3]: Traceback (most recent call last):",
        *(f'[rank3]:   File "x.py", line {number}, in f' for number in range(frames)),
        "[rank3]: ValueError: broken",
    ]
    log = tmp_path / "rank_3.log"
    log.write_text("\n".join([*first, *last]))
    lines = last_lines(log)
    assert lines == [*first, *last][-min(TRACEBACK, max(TAIL, len(last))) :]
    assert named_error(log) == "ValueError: broken"


@pytest.mark.parametrize(
    ("gpus", "named"),
    [((8, 0), "worker-2"), ((0, 2), "worker-1"), ((8, 8), ""), ((0, 0), ""), ((4, 8), "")],
)
def test_a_host_without_gpus_beside_hosts_with_gpus_is_refused(
    tmp_path: Path, gpus: tuple[int, int], named: str
) -> None:
    """The ranks on a host without GPUs would train on the CPU."""
    job = start(tmp_path, [])
    for node, found in enumerate(gpus):
        job.events.put(
            (node, {"hello": {"problems": [], "address": "10.0.0.1", "port": 1, "gpus": found}})
        )
    if not named:
        assert list(job.greet()) == [0, 1]
        return
    with pytest.raises(
        LaunchError,
        match=rf"{named}: no GPU is visible, but worker-. has {max(gpus)}\. Load its driver",
    ):
        job.greet()


@pytest.mark.parametrize(
    "line", ["srun: Requested nodes are busy", "Warning: Permanently added 'worker-1'", ""]
)
def test_a_host_that_does_not_answer_is_named_with_its_last_words(
    tmp_path: Path, line: str
) -> None:
    """For example, srun waits forever until a different step of the job frees a core."""
    silent = start(tmp_path, [])
    silent.nodes, silent.patience = [0], 0.5
    silent.connections[0] = Connection(
        0, ["sh", "-c", f'echo "{line}" >&2; exec sleep 60'], silent.events
    )
    try:
        with pytest.raises(LaunchError) as refused:
            silent.greet()
    finally:
        silent.connections[0].process.kill()
    assert f"worker-1{f' ({line})' if line else ''}: no answer in 0.5 s. Try by hand: " in str(
        refused.value
    )
