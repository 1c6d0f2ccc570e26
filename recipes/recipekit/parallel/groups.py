"""The process groups of a mesh, under the names that DeepSpeed asks a model-parallel unit for."""

import contextlib
import fcntl
import os
import socket
import struct
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from ..spec.mesh import Mesh

WAITING = "long work"  # the description of the group that waits for it
LONGEST_WAIT = timedelta(days=7)  # gloo keeps milliseconds in 32 bits


def time_limit(retry_s: float) -> timedelta:
    """What a collective may take: a large save on a slow disk, or a rank that waits for a server as
    the recipe allows.

    DeepSpeed 0.19 lowered its own default to 10 minutes, which is also what NCCL gives a group that
    is made without a limit.
    """
    return timedelta(minutes=30, seconds=retry_s)


def set_time_limit(limit: timedelta) -> None:
    """Gives every group of this rank the limit, those of DeepSpeed too, but for the one that waits
    for long work.
    """
    for group in list(c10d._world.pg_map):
        if group.group_desc != WAITING:
            c10d._set_pg_timeout(limit, group)


def waiting_group() -> Any:
    """The group on which ranks wait for work that a few of them do for hours: of gloo, with
    LONGEST_WAIT (a collective at first).

    None, which stands for the whole world, where there is one rank. Under NCCL a wait on the device
    would end with its limit.
    """
    if dist.get_world_size() == 1:
        return None
    for group in c10d._world.pg_map:
        if group.group_desc == WAITING:
            return group
    address = os.environ.get("MASTER_ADDR", "")
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_to(address)):
        # else gloo takes the address that this host's name has in its own /etc/hosts, often
        # 127.0.1.1, where no other host finds it
        os.environ["GLOO_SOCKET_IFNAME"] = name
    made: Any = dist.new_group(backend="gloo", group_desc=WAITING)
    c10d._set_pg_timeout(LONGEST_WAIT, made)  # not before: it would be that of meeting, too
    return made


def interface_to(address: str) -> str:
    """Return the network interface through which this host reaches another; "" for the host itself,
    or if it is not known.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            own = probe.getsockname()[0].partition("%")[0].removeprefix("::ffff:")
    except OSError:
        return ""
    if own.startswith("127.") or own == "::1":
        return ""
    for _, name in socket.if_nameindex():
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            packed = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            if socket.inet_ntoa(packed[20:24]) == own:
                return name
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            packed, *_, name = line.split()
            if socket.inet_ntop(socket.AF_INET6, bytes.fromhex(packed)) == own:
                return name
    return ""


class Groups:
    """The data, sequence, tensor and pipeline parallel groups of this rank.

    Made by every rank at the same time (a collective).

    The group of an axis of degree 1 is None and was never made: under NCCL each group of the world
    costs every rank a split of the communicator, 64 of them for an axis that leaves each of 64
    ranks alone.

    `mpu` is what `deepspeed.initialize` takes: None without tensor parallelism, where DeepSpeed's
    own groups are right, and under a pipeline, whose module brings its own. Sequence ranks hold the
    same weights, so to DeepSpeed they are further data ranks; told of them, its ZeRO-3 divides
    their gradients once more than its other stages do (0.19.8: `__avg_scatter_grads` of stage3.py
    leaves sequence_parallel_size out).
    """

    def __init__(self, mesh: Mesh, device_type: str, limit: timedelta | None = None):
        self.mesh, self.limit = mesh, limit
        self.rank = dist.get_rank()
        self.coords = mesh.coords(self.rank)
        self.dp_group, self.dp_ranks = self._group("dp")
        self.sp_group, self.sp_ranks = self._group("sp")
        self.tp_group, self.tp_ranks = self._group("tp")
        self.pp_group, self.pp_ranks = self._group("pp")
        self.tp_mesh = (
            DeviceMesh.from_group(self.tp_group, device_type, mesh_dim_names=("tp",))
            if mesh.tp > 1
            else None
        )
        self.mpu = self if mesh.tp > 1 and mesh.pp == 1 else None
        if self.mpu and self.dp_group is None:  # DeepSpeed takes None of an mpu for the world
            # each rank makes its own, no other
            self.dp_group = dist.new_group(self.dp_ranks, limit, use_local_synchronization=True)

    def _group(self, axis: str) -> tuple[Any, list[int]]:
        if getattr(self.mesh, axis) == 1:
            return None, [self.rank]
        mine: tuple[Any, list[int]] | None = None
        for ranks in self.mesh.groups(axis):
            # every rank makes every group, in the same order
            group = dist.new_group(ranks, self.limit)
            if self.rank in ranks:
                mine = group, ranks
        assert mine is not None
        return mine

    def get_data_parallel_group(self) -> Any:
        return self.dp_group

    def get_data_parallel_rank(self) -> int:
        return self.coords["dp"]

    def get_data_parallel_world_size(self) -> int:
        return self.mesh.dp

    def get_model_parallel_group(self) -> Any:
        return self.tp_group

    def get_model_parallel_rank(self) -> int:
        return self.coords["tp"]

    def get_model_parallel_world_size(self) -> int:
        return self.mesh.tp

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
