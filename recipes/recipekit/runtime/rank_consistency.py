"""Checks that all ranks agree. Their errors name the ranks that differ."""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..data.prefetch import Stream
from ..data.stream_state import changed_files, join_first_changes
from ..kernels.compiled import (
    COMPILER_FIX,
    CompilerCounts,
    compiler_counts,
    failed_ranks,
    fusion_enabled,
)
from ..parallel.groups import long_wait_group
from ..spec.errors import ConfigError, Problem, Say, config_error
from ..spec.mesh import Mesh


def check_same_data(stream: Stream) -> None:
    """Check before the first step that all ranks read the same data (a collective).

    Raises, on all ranks, a `ConfigError` that names each host with different data.
    """
    own = (platform.node(), stream.state["identity"])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    (first_host, first), rank = everyone[0], dist.get_rank()
    if all(identity == first for _, identity in everyone):
        return
    files: list[Any] = [stream.files]
    dist.broadcast_object_list(files)
    refusal = None
    if own[1] != first and everyone.index(own) == rank:  # one rank reports for each host
        changed = changed_files(files[0], stream.files)
        keys = ", ".join(key for key in first if own[1].get(key) != first[key])
        rule = (
            f"differ from the data of rank 0 on {first_host} in"
            f" {keys}{f': {join_first_changes(changed)}' if changed else ''}"
        )
        refusal = config_error(
            f"the data of rank {rank} on {own[0]}",
            rule,
            "give every host the same files, or a folder that all share",
        )
    raise ConfigError(shared_problems(refusal))


def check_same_run_folder(out: Path) -> None:
    """Raise `ConfigError` on all ranks if their run folders differ (a collective).

    One cause is an environment variable that differs between hosts.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (platform.node(), str(out)))
    first_host, first = everyone[0]
    fix = "write a path without variables, or give all hosts the same values"
    problems = [
        Problem(f"out = {other} on {host}", f"rank 0 on {first_host} has {first}", fix)
        for host, other in everyone
        if other != first
    ]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def shared_problems(error: BaseException | None) -> list[Problem]:
    """Return the problems of all ranks (a collective). Every rank returns the same list.

    If a rank's own error is not a `ConfigError`, that rank raises the error.
    """
    if error is not None and not isinstance(error, ConfigError):
        raise error
    everyone: list[Any] = [None] * dist.get_world_size()
    # a rank may be waiting for a slow disk
    dist.all_gather_object(everyone, error.problems if error else [], group=long_wait_group())
    return list(dict.fromkeys(problem for problems in everyone for problem in problems))


def check_same_compilation(mesh: Mesh, say: Say) -> None:
    """Compare the compiled code of all ranks after the first step of a start (a collective).

    A rank whose compiler fails during a run continues without compiled code, so it rounds
    differently. Raises `ConfigError` on all ranks if the ranks of one model differ (tp, sp, pp):
    copies of a weight would drift apart. If data-parallel ranks differ, a line is logged.
    """
    if mesh.world == 1 or not fusion_enabled():
        return
    everyone: list[Any] = [None] * mesh.world
    dist.all_gather_object(everyone, compiler_counts(), group=long_wait_group())
    if problems := compilation_problems(mesh, everyone):
        raise ConfigError(problems)
    if others := failed_ranks(everyone):
        say(
            f"warning: {_ranks(others)}: torch.compile failed there ({everyone[others[0]]}), so its"
            f" results are rounded differently. {COMPILER_FIX.capitalize()}"
        )


def compilation_problems(mesh: Mesh, everyone: Sequence[CompilerCounts]) -> list[Problem]:
    """Return at most one problem, about the ranks of one model whose compiled code differs.

    `everyone` contains the counts of each rank. Tensor-parallel ranks run the same code. Pipeline
    stages have other layers, and sequence-parallel ranks other document lengths, so only their
    failures are compared. Data-parallel ranks are not compared.
    """
    groups = [(group, False) for group in mesh.groups("pp", "sp", "tp")]
    groups += [(group, True) for group in mesh.groups("tp")]
    for group, same_code in groups:
        best = min(group, key=lambda rank: (everyone[rank].failed, everyone[rank].breaks))
        wrong = [
            rank
            for rank in group
            if everyone[rank].failed != everyone[best].failed
            or (same_code and everyone[rank] != everyone[best])
        ]
        if wrong:
            rule = (
                f"has compiled other code than rank {best} of the same model: {everyone[wrong[0]]}"
                f" instead of {everyone[best]}"
            )
            return [Problem(f"torch.compile on {_ranks(wrong)}", rule, COMPILER_FIX)]
    return []


def _ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "rank 3 (and 4 more)" for several ranks."""
    return f"rank {ranks[0]}" + (f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else "")


def check_same_tokens(mesh: Mesh, token_hash: int, step: int, device: torch.device) -> None:
    """Check that ranks with the same data-parallel rank received the same tokens (a collective).

    `token_hash` is the hash of the tokens up to `step`, from `data.roll_batch_hash`. Raises a
    RuntimeError that names the ranks that differ.
    """
    if mesh.dp == mesh.world:
        return
    own = torch.tensor(
        [token_hash - (1 << 64) if token_hash >> 63 else token_hash],
        dtype=torch.int64,
        device=device,
    )
    everyone = [torch.empty_like(own) for _ in range(mesh.world)]
    dist.all_gather(everyone, own)
    first: dict[int, int] = {}
    for rank, hashed in enumerate(everyone):
        dp_rank = mesh.coords(rank)["dp"]
        if not torch.equal(hashed, everyone[first.setdefault(dp_rank, rank)]):
            raise RuntimeError(
                f"ranks {first[dp_rank]} and {rank} share data-parallel rank {dp_rank}, but were"
                f" given other tokens up to step {step}"
            )
