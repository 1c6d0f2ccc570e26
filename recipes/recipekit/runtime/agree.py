"""Checks what all ranks have to agree on, and names the ranks that differ."""

import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..data.prefetch import Stream
from ..data.sameness import changed_files, first_of
from ..parallel.groups import waiting_group
from ..spec.mesh import Mesh
from ..spec.refusal import Problem, Refusal, refuse


def check_same_data(stream: Stream) -> None:
    """Proves that all ranks read the same data, before the first step (a collective).

    Raises, on all ranks, a `Refusal` that names each host with other data.
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
    if own[1] != first and everyone.index(own) == rank:  # the first rank of a host speaks for it
        changed = changed_files(files[0], stream.files)
        keys = ", ".join(key for key in first if own[1].get(key) != first[key])
        rule = (
            f"differ from those of rank 0 on {first_host} in"
            f" {keys}{f': {first_of(changed)}' if changed else ''}"
        )
        refusal = refuse(
            f"the data of rank {rank} on {own[0]}",
            rule,
            "give every host the same files, or a folder that all share",
        )
    raise Refusal(shared_problems(refusal))


def check_same_out(out: Path) -> None:
    """Raise `Refusal` on all ranks if a rank has another run folder, as by a variable that differs
    between hosts (a collective).
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
        raise Refusal(list(dict.fromkeys(problems)))


def shared_problems(error: BaseException | None) -> list[Problem]:
    """Collects the problems of all ranks, the same list on each (a collective).

    A rank raises its own error if that is no refusal.
    """
    if error is not None and not isinstance(error, Refusal):
        raise error
    everyone: list[Any] = [None] * dist.get_world_size()
    # a rank may wait for a slow disk
    dist.all_gather_object(everyone, error.problems if error else [], group=waiting_group())
    return list(dict.fromkeys(problem for problems in everyone for problem in problems))


def check_peers(mesh: Mesh, seen: int, step: int, device: torch.device) -> None:
    """Proves that all ranks of one data-parallel coordinate were given the same tokens up to `step`
    (a collective).

    `seen`: the hash of those tokens, by `data.roll`. Raises RuntimeError with the ranks that
    differ.
    """
    if mesh.dp == mesh.world:
        return
    own = torch.tensor([seen - (1 << 64) if seen >> 63 else seen], dtype=torch.int64, device=device)
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
