"""Timeouts of process groups: every group has the recipe's timeout.

Ranks wait without a timeout for long work that only a few ranks do.
"""

import socket
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from recipekit.parallel.blueprint import Layout
from recipekit.parallel.groups import (
    GLOO_TIMEOUT,
    LONG_WAIT_DESC,
    collective_timeout,
    interface_to,
    set_collective_timeout,
)
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import Mesh
from recipekit.spec.recipe import Recipe
from short_runs import BASE, train

slow = pytest.mark.slow


def limits_after_training(
    recipe: Recipe, argv: list[str]
) -> tuple[Any, list[tuple[str, str, float]]]:
    """Return (result, (description, backend, seconds) of each group that contains this rank)."""
    import torch
    from torch.distributed import distributed_c10d as c10d

    ended, printed = train(recipe, argv)
    groups: list[Any] = list(c10d._world.pg_map)
    backends = [(group.group_desc, group._get_backend(torch.device("cpu"))) for group in groups]
    return (ended, printed), [
        (desc, backend.name(), backend.options._timeout.total_seconds())
        for desc, backend in backends
    ]


@pytest.mark.parametrize(
    ("world", "file", "degrees"),
    [
        (2, "zero1.json", {"pp": 2}),
        pytest.param(2, "zero3.json", {}, marks=slow),
        pytest.param(2, "zero1.json", {"tp": 2}, marks=slow),
        pytest.param(2, "zero3.json", {"sp": 2}, marks=slow),
        pytest.param(8, "zero1.json", {"pp": 2, "tp": 2}, marks=slow),
    ],
    ids=str,
)
def test_every_group_has_the_limit_of_the_recipe(
    pools: Any, tmp_path: Path, world: int, file: str, degrees: dict[str, int]
) -> None:
    recipe = replace(BASE, ds_config=file, eval_every=0, **degrees)
    argv = ["--out", str(tmp_path / "run"), "--steps", "1", "--retry_s", "1200"]
    for ended, groups in pools.run(world, limits_after_training, recipe=recipe, argv=argv):
        assert ended[0] == 0, ended
        waiting = [group for group in groups if group[0] == LONG_WAIT_DESC]
        assert waiting == [(LONG_WAIT_DESC, "gloo", GLOO_TIMEOUT.total_seconds())]
        others = [group for group in groups if group not in waiting]
        assert len(others) > 1 and {seconds for *_, seconds in others} == {
            collective_timeout(1200).total_seconds()
        } == {3000.0}


def wait_longer_than_the_limit(folder: str, seconds: float) -> list[Any]:
    """Return the ranks' results after rank 0 has worked longer than every other group's timeout."""
    import torch.distributed as dist
    from recipekit.checkpoints import load, save
    from recipekit.data.remote import from_rank_0
    from recipekit.runtime import rank_consistency

    def work() -> str:
        time.sleep(2.5 * seconds)
        return "made"

    def reshape(*_: Any) -> None:
        work()
        raise OSError("no room")

    rank, found = dist.get_rank(), []
    layout = Layout(
        mesh=Mesh(dp=dist.get_world_size()), zero_stage=1, optimizer="Adam", dtype="float32"
    )
    dist.barrier()
    set_collective_timeout(timedelta(seconds=seconds))
    before = (
        load.check_resumable,
        load.reshape,
        save.manifest.find_faults,
        save.manifest.read_manifest,
    )
    load.check_resumable = lambda *_: ({"layout": layout.to_json()}, False)
    load.reshape = reshape
    save.manifest.read_manifest = lambda _: {"files": {}}
    save.manifest.find_faults = lambda *_: [work()] if rank == 0 else []
    try:
        found.append(from_rank_0(work))
        load.newest_verified(Path(folder) / "step_00000001", found.append)
        try:
            load.load_checkpoint(
                None, Path(folder), layout, layout, Path(folder) / "scratch", lambda _: None
            )  # type: ignore[arg-type]
        except ConfigError as error:
            found.append(str(error))
        if rank == 0:
            work()
        found.append(rank_consistency.shared_problems(None))
    finally:
        (
            load.check_resumable,
            load.reshape,
            save.manifest.find_faults,
            save.manifest.read_manifest,
        ) = before
        set_collective_timeout(timedelta(minutes=30))
    return found


@pytest.mark.slow
def test_long_work_of_rank_0_outlasts_the_limit(pools: Any, tmp_path: Path) -> None:
    """The work is a query to a server, a check or a conversion of a checkpoint, or the opening of
    data.
    """
    for made, damaged, refused, problems in pools.run(
        2, wait_longer_than_the_limit, folder=str(tmp_path), seconds=0.3
    ):
        assert (made, problems) == ("made", [])
        assert damaged == f"checkpoint {tmp_path}/step_00000001 is damaged, passed over: made"
        assert "cannot be converted in" in refused and "no room" in refused


def test_the_interface_to_another_host_is_named_and_loopback_is_not() -> None:
    assert (
        interface_to("127.0.0.1")
        == interface_to("")
        == interface_to("no such name")
        == interface_to("::1")
        == ""
    )
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if (
                address.family in (socket.AF_INET, socket.AF_INET6)
                and not address.address.startswith("127.")
                and address.address != "::1"
            ):
                assert interface_to(address.address) == name


def groups_made(meshes: list[Mesh]) -> list[tuple[int, list[int]]]:
    """Return, for each mesh, (calls of new_group, sums of ones over its groups).

    The groups are the data, sequence, tensor and pipeline groups; 0 means no group.
    """
    import torch
    import torch.distributed as dist
    from recipekit.parallel.groups import ProcessGroups

    found, new_group = [], dist.new_group
    for mesh in meshes:
        made: list[Any] = []
        with mock.patch.object(
            dist,
            "new_group",
            lambda *args, made=made, **more: made.append(new_group(*args, **more)) or made[-1],
        ):
            groups = ProcessGroups(mesh, "cpu")
        sums = []
        for group in (groups.dp_group, groups.sp_group, groups.tp_group, groups.pp_group):
            ones = torch.ones(())
            if group is not None:
                dist.all_reduce(ones, group=group)
            sums.append(int(ones) if group is not None else 0)
        found.append((len(made), sums))
    return found


def test_an_axis_of_degree_1_has_no_group(pools: Any) -> None:
    """An mpu requires a data-parallel group, even for one rank.

    Each rank creates that group for itself, not for all ranks.
    """
    meshes = {
        Mesh(dp=4): (1, [4, 0, 0, 0]),
        Mesh(dp=2, tp=2): (4, [2, 0, 2, 0]),
        Mesh(tp=4): (2, [1, 0, 4, 0]),
        Mesh(pp=4): (1, [0, 0, 0, 4]),
        Mesh(pp=2, tp=2): (4, [0, 0, 2, 2]),
        Mesh(dp=2, sp=2): (4, [2, 2, 0, 0]),
    }
    assert pools.run(4, groups_made, meshes=list(meshes)) == [list(meshes.values())] * 4
