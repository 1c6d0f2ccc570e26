"""Failure of one rank: its traceback is printed at once, and every rank ends within seconds.

The message names the failed rank. The other ranks end even if they wait in a collective.
"""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from job import BIN, NANO, Job, checkpoints, command_line, contention, deepspeed, metrics
from pool import FOLDERS, FORKS, ROOT, environment, free_port
from recipekit.runtime import failure
from recipekit.runtime.failure import EXIT_TIMEOUT as LATEST
from recipekit.runtime.failure import Peers, process_start_time
from recipekit.spec.errors import START_AGAIN, ConfigError, Problem, config_error
from recipekit.spec.run_folder import continue_advice
from recipekit.storage.manifest import find_faults
from wandb_file import read_exit_codes

START = 600.0  # seconds that the ranks may take to start on busy cores
# Seconds after the exception until the traceback is on the terminal, and until all ranks have
# ended.
TOLD, GONE = 5.0, 15.0

# A recipe that fails on one rank as under NCCL. Leaving the group blocks, and a child process keeps
# the sockets open, so the other ranks do not notice a closed connection.
BREAKS = """
import os, time
from dataclasses import replace
from pathlib import Path

import torch
from llama_nano_zero2 import RECIPE
from recipekit import run
from recipekit.spec.errors import config_error

WHERE, RANK = os.environ["BREAKS_IN"], os.environ["RANK"]
torch.distributed.destroy_process_group = lambda *_: time.sleep(3600)
Path(f"pid_{RANK}").write_text(str(os.getpid()))

def fail(*_, **__):
    if os.fork() == 0:
        time.sleep(120)
        os._exit(0)
    Path("failed.tmp").write_text(str(time.time()))
    Path("failed.tmp").rename("failed")
    if WHERE == "refusal":
        raise config_error("what one rank meets", "is broken on purpose in the refusal", "mend it")
    raise ValueError(f"broken on purpose in the {WHERE}")

calls = 0

def hook(module, inputs, output):
    global calls
    calls += 1
    if WHERE == "backward":
        output.register_hook(fail)
    elif WHERE != "second step" or calls == 3:  # two micro-batches a step
        fail()

def adapt(model):
    if RANK == os.environ["BREAKS_ON"]:
        if WHERE == "save":
            torch.save = fail
        else:
            model.get_output_embeddings().register_forward_hook(hook)
    return model

if __name__ == "__main__":
    run(replace(RECIPE, adapt=adapt))
"""


def by_launch(recipe: Path, *flags: object, ranks: int) -> list[str]:
    spawn = "torchrun" if ranks == 2 else "deepspeed"  # torchrun is quicker, for the quick test
    return [
        sys.executable,
        "-m",
        "launch",
        "--spawn",
        spawn,
        "--gpus",
        str(ranks),
        str(recipe),
        *map(str, flags),
    ]


def by_torchrun(recipe: Path, *flags: object, ranks: int) -> list[str]:
    return [
        str(BIN / "torchrun"),
        "--nproc_per_node",
        str(ranks),
        "--master_port",
        str(free_port()),
        str(recipe),
        *map(str, flags),
    ]


@pytest.fixture
def broken(
    tmp_path: Path, ops: Callable[[str], None], compiling: subprocess.Popen[bytes]
) -> Iterator[Callable[..., Job]]:
    """Return a function that runs a job in which one rank fails, until all ranks have ended.

    The function checks both time limits.
    """
    compiling.wait()  # the time limits assume an idle machine
    jobs: list[Job] = []

    def broken(
        command: Callable[..., list[str]], where: str, rank: int, ranks: int, *flags: object
    ) -> Job:
        (tmp_path / "breaks.py").write_text(BREAKS)
        words = command(
            Path("breaks.py"),
            "--tiny",
            "--steps",
            2,
            "--out",
            "run",
            "--eval_every",
            0,
            *flags,
            ranks=ranks,
        )
        path = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "recipes", *FOLDERS))
        job = Job(tmp_path, words, BREAKS_IN=where, BREAKS_ON=str(rank), PYTHONPATH=path)
        jobs.append(job)
        job.wait_for(
            lambda: (tmp_path / "failed").exists() or job.process.poll() is not None, START
        )
        assert (tmp_path / "failed").exists(), job.output[-8000:]
        began = float((tmp_path / "failed").read_text())
        assert (tmp_path / f"pid_{rank}").exists()
        pids = [int(path.read_text()) for path in tmp_path.glob("pid_*")]
        assert len(pids) == ranks
        told = gone = 0.0
        while not (told and gone) and time.time() < began + 120:
            told = told or ("broken on purpose in the" in job.output and time.time() - began)
            gone = gone or (not any(map(alive, pids)) and time.time() - began)
            time.sleep(0.05)
        busy = contention()
        print(
            f"told after {told:.1f} s, gone after {gone:.1f} s, contention"
            f" {busy:.1f}\n{job.output[-6000:]}"
        )
        assert 0 < told < TOLD * busy, "the traceback"
        assert 0 < gone < GONE * busy, "the ranks"
        return job

    yield broken
    for job in jobs:
        job.close()


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def named(job: Job, command: Any, where: str, rank: int, ranks: int) -> None:
    """Check that the traceback is complete and that every rank names the failed rank."""
    error = f"ValueError: broken on purpose in the {where}"
    assert (
        "Traceback (most recent call last):" in job.output
        and "in fail\n" in job.output
        and error in job.output
    )
    if command is by_launch:
        assert f"rank {rank} on localhost ended with 1: {error}" in job.output
    else:
        peers = [
            line for line in job.output.splitlines() if f"ended, because rank {rank} on " in line
        ]
        assert len(peers) == ranks - 1 and all(line.endswith(error) for line in peers), job.output
    if command is by_torchrun:
        assert f"(local_rank: {rank})" in job.output.partition("Root Cause")[2]
    # The other ranks print only one line each, and no traceback about a lost connection.
    assert job.output.count(error) <= 2 * ranks and "onnection closed" not in job.output


WAYS = [
    pytest.param(by_launch, "backward", 1, 2, id="launch", marks=pytest.mark.slow),
    *(
        pytest.param(
            command,
            where,
            rank,
            ranks,
            marks=pytest.mark.slow,
            id=f"{name}, {where}, rank {rank} of {ranks}",
        )
        for name, command, where, rank, ranks in [
            ("launch", by_launch, "forward", 0, 2),
            ("deepspeed", deepspeed, "forward", 1, 2),
            ("deepspeed", deepspeed, "backward", 0, 2),
            ("deepspeed", deepspeed, "save", 1, 2),
            ("torchrun", by_torchrun, "backward", 1, 2),
            ("torchrun", by_torchrun, "save", 0, 2),
            ("launch", by_launch, "forward", 5, 8),
            ("launch", by_launch, "save", 3, 8),
            ("deepspeed", deepspeed, "backward", 0, 8),
            ("torchrun", by_torchrun, "forward", 7, 8),
        ]
    ),
]


@pytest.mark.parametrize(("command", "where", "rank", "ranks"), WAYS)
def test_an_exception_on_one_rank_ends_all(
    broken: Callable[..., Job], command: Any, where: str, rank: int, ranks: int
) -> None:
    job = broken(command, where, rank, ranks, "--no-wandb", "--grace", 3600)
    assert job.wait(60) == 1
    named(job, command, where, rank, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("command", [by_launch, deepspeed])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_refusal_of_one_rank_ends_all(
    broken: Callable[..., Job], command: Any, rank: int
) -> None:
    job = broken(command, "refusal", rank, 2, "--no-wandb", "--grace", 3600)
    assert job.wait(60) == 1
    assert "Traceback" not in job.output
    assert f"refused{' by local rank 1' if rank else ''}: 1 problem" in job.output
    assert "1. what one rank meets: is broken on purpose in the refusal. Mend it" in job.output


@pytest.mark.slow
def test_what_a_failed_run_leaves_is_whole(broken: Callable[..., Job], tmp_path: Path) -> None:
    """Rank 1 fails in step 2, while a background save of step 1 runs and W&B records."""
    job = broken(deepspeed, "second step", 1, 2, "--save_every", 1, "--save_in_background")
    assert job.wait(60) == 1
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1]
    assert read_exit_codes(tmp_path / "run") == [1]
    for step in checkpoints(tmp_path / "run"):
        assert find_faults(tmp_path / "run" / "checkpoints" / f"step_{step:08d}") == []
    job.close()
    again = Job(
        tmp_path,
        deepspeed(Path("breaks.py"), "--tiny", "--steps", 2, "--out", "run", "--eval_every", 0),
        BREAKS_IN="",
        BREAKS_ON="none",
    )
    try:
        again.wait_for(
            lambda: len(metrics(tmp_path / "run")) == 2 or again.process.poll() is not None, START
        )
        assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2], again.output[-8000:]
    finally:
        again.close()


@pytest.mark.parametrize(
    ("command", "rank"),
    [
        pytest.param(deepspeed, 1, id="deepspeed, rank 1", marks=pytest.mark.slow),
        pytest.param(deepspeed, 0, id="deepspeed, rank 0", marks=pytest.mark.slow),
        pytest.param(by_torchrun, 1, id="torchrun, rank 1", marks=pytest.mark.slow),
        pytest.param(by_torchrun, 0, id="torchrun, rank 0", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_named_with_the_way_on(
    tmp_path: Path, ops: Callable[[str], None], command: Any, rank: int
) -> None:
    """Under a plain launcher, kill -9 and the kernel's out-of-memory killer cause this output."""
    flags = (
        "--tiny",
        "--steps",
        10**6,
        "--save_every",
        20,
        "--eval_every",
        0,
        "--no-wandb",
        "--out",
        tmp_path / "run",
    )
    job = Job(tmp_path, command(NANO, *flags, ranks=2))
    try:
        job.wait_for(lambda: checkpoints(tmp_path / "run") or job.process.poll() is not None, START)
        ranks = {
            process.environ()["RANK"]: process
            for process in job.processes()
            if str(NANO) in command_line(process) and "RANK" in process.environ()
        }
        ranks[str(rank)].kill()
        assert job.wait(START) != 0
    finally:
        job.close()
    step = int((tmp_path / "run" / "checkpoints" / "latest").read_text().removeprefix("step_"))
    (line,) = [line for line in job.output.splitlines() if "lost rank" in line]
    assert line.startswith(f"rank {1 - rank}: lost rank {rank} on ") and line.endswith(
        f". The same command resumes from step {step}"
    ), line
    assert "onnection" not in job.output


def test_the_way_on_is_told_as_it_is(tmp_path: Path) -> None:
    assert (
        continue_advice("auto", tmp_path)
        == "no checkpoint is complete yet: the same command starts from the beginning"
    )
    step = tmp_path / "checkpoints" / "step_00000012"
    step.mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest").write_text("step_00000012")
    assert (
        continue_advice("auto", tmp_path)
        == "no checkpoint is complete yet: the same command starts from the beginning"
    )
    (step / "manifest.json").write_text(json.dumps({"step": 12}))
    assert continue_advice("auto", tmp_path) == "the same command resumes from step 12"
    assert (
        continue_advice("never", tmp_path)
        == "the same command with --resume auto resumes from step 12"
    )


# Ranks that only watch each other
# ------------------------------------------------------------------------


def watch(
    own: dict[str, str], log: str, body: Callable[[Peers], None], before: Callable[[], None] | None
) -> None:
    """Run one forked rank: it meets the other ranks, runs `body`, and leaves.

    `before` runs first.
    """
    os.environ.clear()
    os.environ.update(own)
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    for target in (1, 2):
        os.dup2(output, target)
    import torch.distributed as dist
    from recipekit.parallel.groups import long_wait_group

    if before is not None:
        before()
    dist.init_process_group("gloo")
    peers = Peers()
    peers.watch(long_wait_group())
    with peers:
        body(peers)
    peers.leave()
    dist.destroy_process_group()
    os._exit(7)  # a code that nothing else exits with


@pytest.fixture
def ranks(tmp_path: Path, pools: Any) -> Callable[..., list[tuple[int | None, str]]]:
    """Return a function that runs three such ranks and returns (exit code, output) for each rank.

    The function does not wait for ranks in `stuck`.
    """

    def ranks(
        body: Callable[[Peers], None],
        stuck: tuple[int, ...] = (),
        world: int = 3,
        before: Callable[[], None] | None = None,
    ) -> list[tuple[int | None, str]]:
        place = environment() | {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        logs = [tmp_path / f"rank_{rank}" for rank in range(world)]
        started = [
            FORKS.Process(
                target=watch,
                args=(place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, str(log), body, before),
            )
            for rank, log in enumerate(logs)
        ]
        for process in started:
            process.start()
        try:
            for rank, process in enumerate(started):
                process.join(0 if rank in stuck else 60)
            return [
                (process.exitcode, log.read_text())
                for process, log in zip(started, logs, strict=True)
            ]
        finally:
            for process in started:
                process.kill()

    return ranks


def blocked() -> None:
    """Wait in a collective that rank 2 never enters, although rank 2's connections stay open."""
    import torch.distributed as dist

    dist.barrier()


def rank_2_raises(peers: Peers) -> None:
    if os.environ["RANK"] != "2":
        blocked()
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    raise MemoryError("no room\nfor more")


def test_blocked_ranks_follow_the_one_that_failed(ranks: Callable[..., Any]) -> None:
    *others, (code, said) = ranks(rank_2_raises)
    lines = said.splitlines()
    assert (
        code == 1
        and lines[0] == "[rank2]: Traceback (most recent call last):"
        and lines[-2:] == ["[rank2]: MemoryError: no room", "[rank2]: for more"]
    )
    for rank, (code, said) in enumerate(others):
        assert code == 1
        assert (
            said
            == f"rank {rank}: ended, because rank 2 on {os.uname().nodename} failed: MemoryError:"
            " no room\n"
        )


def rank_0_raises(peers: Peers) -> None:
    def say() -> None:
        os.write(2, f"last words of {os.environ['RANK']}\n".encode())

    peers.last_words = say
    if os.environ["RANK"] == "0":
        raise MemoryError("no room")
    blocked()


@pytest.mark.slow
def test_rank_0_holds_the_store_until_all_have_seen_its_mark(ranks: Callable[..., Any]) -> None:
    (code, said), *others = ranks(rank_0_raises)
    assert code == 1 and "last words of 0" in said
    for rank, (code, said) in enumerate(others, 1):
        assert code == 1
        assert said.startswith(f"last words of {rank}\n")
        assert said.endswith(
            f"rank {rank}: ended, because rank 0 on {os.uname().nodename} failed: MemoryError: no"
            " room\n"
        )


def rank_2_is_killed_on_another_host(peers: Peers) -> None:
    host = "one" if os.environ["RANK"] == "0" else "two"
    platform.node = lambda: host
    peers._local_processes = {
        rank: place
        for rank, place in peers._local_processes.items()
        if (rank == 0) == (host == "one")
    }
    if os.environ["RANK"] == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_every_host_is_told_of_a_killed_rank(ranks: Callable[..., Any]) -> None:
    """The full message must appear only on the killed rank's host."""
    (code, said), (other_code, told), _ = ranks(rank_2_is_killed_on_another_host)
    assert (code, other_code) == (75, 75)
    assert said == "rank 0: ended, because rank 2 on two failed: it ended without a message\n"
    assert told.startswith("rank 1: lost rank 2 on two (pid ") and told.count("\n") == 1


def rank_1_looks_late() -> None:
    """Let rank 1 determine its host's processes some time after the other ranks."""
    if os.environ["RANK"] == "1":
        own = os.getpid()

        def late(pid: int) -> str:
            if pid != own:
                time.sleep(1)
            return process_start_time(pid)

        failure.process_start_time = late


def test_a_rank_that_is_killed_before_another_has_looked_is_missed(
    ranks: Callable[..., Any],
) -> None:
    (code, said), (other_code, told), _ = ranks(
        rank_2_is_killed_on_another_host, before=rank_1_looks_late
    )
    assert (code, other_code) == (75, 75), said + told


def rank_1_is_killed_after_rank_0_has_done(peers: Peers) -> None:
    if os.environ["RANK"] == "1":
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60 * (os.environ["RANK"] == "2"))


@pytest.mark.slow
def test_a_rank_that_is_done_leaves_the_telling_to_another(ranks: Callable[..., Any]) -> None:
    (code, said), _, (other_code, told) = ranks(rank_1_is_killed_after_rank_0_has_done)
    assert (code, said, other_code) == (75, "", 75) and told.startswith(
        "rank 2: lost rank 1 on "
    ), said + told


def rank_0_is_killed(peers: Peers) -> None:
    """Kill rank 0 while the others wait in a collective; as under NCCL, connections stay open."""
    peers.resume_hint = lambda: "this is the way on"
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def rank_1_is_killed(peers: Peers) -> None:
    peers.resume_hint = lambda: "this is the way on"
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def rank_2_is_killed_in_a_collective(peers: Peers) -> None:
    """Kill rank 2 while the others are in a collective, which then raises a gloo exception."""
    peers.resume_hint = lambda: "this is the way on"
    if os.environ["RANK"] == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    blocked()


@pytest.mark.parametrize(
    ("body", "lost"),
    [
        pytest.param(rank_0_is_killed, 0, id="rank 0", marks=pytest.mark.slow),
        pytest.param(rank_1_is_killed, 1, id="rank 1", marks=pytest.mark.slow),
        pytest.param(rank_2_is_killed_in_a_collective, 2, id="rank 2, in a collective"),
    ],
)
def test_a_killed_rank_is_named_once(
    ranks: Callable[..., Any], body: Callable[[Peers], None], lost: int
) -> None:
    results = ranks(body)
    assert results[lost] == (-signal.SIGKILL, "")
    others = [result for rank, result in enumerate(results) if rank != lost]
    assert [code for code, _ in others] == [75, 75]
    silent, told = sorted(said for _, said in others)
    assert re.match(
        rf"rank [012]: lost rank {lost} on {os.uname().nodename} \(pid ", told
    ) and told.endswith(". This is the way on\n"), told
    assert told.count("\n") == 1 and silent == ""


def two_are_killed(peers: Peers) -> None:
    if os.environ["RANK"] in "12":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.slow
def test_two_killed_ranks_are_named_in_one_line(ranks: Callable[..., Any]) -> None:
    (code, said), *_ = ranks(two_are_killed)
    assert (
        code == 75
        and f"lost ranks 1, 2 on {os.uname().nodename} (pid " in said
        and said.count("\n") == 1
    )


def a_disk_fails(peers: Peers) -> None:
    if os.environ["RANK"] == "1":
        raise ConfigError(
            [Problem("checkpoint", "cannot be written", "free some room")], START_AGAIN
        )
    blocked()


def a_connection_breaks(peers: Peers) -> None:
    """Fail on rank 1 as if a different host had disappeared, so that no rank leaves a mark."""
    if os.environ["RANK"] == "1":
        raise RuntimeError(
            "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:5521"
        )
    time.sleep(60)


def nobody_answers(peers: Peers) -> None:
    if os.environ["RANK"] == "1":
        raise RuntimeError(
            "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"
            " operation to complete"
        )
    time.sleep(60)


@pytest.mark.parametrize(
    "body",
    [
        a_connection_breaks,
        pytest.param(a_disk_fails, marks=pytest.mark.slow),
        pytest.param(nobody_answers, marks=pytest.mark.slow),
    ],
)
def test_a_fault_from_outside_ends_all_ranks_with_75(
    ranks: Callable[..., Any], body: Callable[[Peers], None]
) -> None:
    assert [code for code, _ in ranks(body)] == [75] * 3


def all_raise(peers: Peers) -> None:
    raise MemoryError(f"no room on {os.environ['RANK']}")


@pytest.mark.slow
def test_ranks_that_fail_together_tell_what_they_met(ranks: Callable[..., Any]) -> None:
    for rank, (code, said) in enumerate(ranks(all_raise)):
        assert code == 1 and f"MemoryError: no room on {rank}\n" in said


def all_refuse(peers: Peers) -> None:
    time.sleep(float(os.environ["RANK"]) / 2)
    raise config_error("all ranks", "meet it", "mend it")


def test_a_refusal_of_all_ranks_is_told_once(ranks: Callable[..., Any]) -> None:
    told, *others = ranks(all_refuse)
    assert told == (1, "refused: 1 problem\n  1. all ranks: meet it. Mend it\n")
    assert others == [(1, "")] * 2


def one_exits(peers: Peers) -> None:
    if os.environ["RANK"] == "1":
        sys.exit(5)
    blocked()


@pytest.mark.slow
def test_a_rank_that_exits_alone_keeps_its_code(ranks: Callable[..., Any]) -> None:
    first, second, third = ranks(one_exits)
    assert second == (5, "")
    assert first[0] == third[0] == 1 and "because rank 1 on" in first[1]


def hung(peers: Peers) -> None:
    """Stop rank 0, which has the store, and block rank 1's last messages."""
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGSTOP)
    peers.last_words = lambda: time.sleep(60)
    time.sleep(1)
    if os.environ["RANK"] == "1":
        raise MemoryError("no room")
    time.sleep(60)


@pytest.mark.slow
def test_a_failed_rank_ends_though_the_store_hangs(
    ranks: Callable[..., Any], tmp_path: Path
) -> None:
    began = time.monotonic()
    (code, _), (failed, said), _ = ranks(hung, stuck=(0, 2))
    assert code is None and failed == 1 and "MemoryError" in said
    assert time.monotonic() - began < (LATEST + 10) * contention()


def one_is_late(peers: Peers) -> None:
    time.sleep(3 * (os.environ["RANK"] == "2"))


@pytest.mark.slow
def test_a_clean_end_waits_for_the_last_rank(ranks: Callable[..., Any]) -> None:
    """Rank 0 has the store, but the end of rank 0 must not count as a failure."""
    assert ranks(one_is_late) == [(7, "")] * 3


def two_starts(peers: Peers) -> None:
    """Start twice, as after an agent's restart: the store still has the first start's mark."""
    import torch.distributed as dist
    from recipekit.parallel.groups import long_wait_group

    peers.leave()
    dist.barrier()
    peers._store.set("mark", '{"rank": 1, "host": "here", "what": "it was long ago"}')
    again = Peers()
    again.watch(long_wait_group())
    time.sleep(1.5)
    again.leave()


@pytest.mark.slow
def test_the_mark_of_an_earlier_start_is_not_seen(ranks: Callable[..., Any]) -> None:
    assert ranks(two_starts) == [(7, "")] * 3


def test_a_process_that_has_ended_has_no_beginning() -> None:
    """An ended process has no start time, even before its exit code has been read."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process_start_time(process.pid) and process_start_time(
        process.pid
    ) != process_start_time(os.getpid())
    process.stdin.close()  # type: ignore[union-attr]
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_start_time(process.pid) == ""
    process.wait()
    assert process_start_time(process.pid) == ""
