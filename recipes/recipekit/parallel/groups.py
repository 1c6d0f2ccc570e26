"""The process groups of a mesh, with the method names that DeepSpeed expects of an mpu."""

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

LONG_WAIT_DESC = "long work"  # description of the group for long waits
GLOO_TIMEOUT = timedelta(days=7)  # gloo stores milliseconds in 32 bits


def collective_timeout(retry_s: float) -> timedelta:
    """Return the time limit of a collective.

    The limit allows for a large save on a slow disk. It also allows for a rank that waits `retry_s`
    for a server, as the recipe permits. DeepSpeed 0.19 lowered its own default to 10 minutes. NCCL
    also uses 10 minutes for a group without a limit.
    """
    return timedelta(minutes=30, seconds=retry_s)


def set_collective_timeout(limit: timedelta) -> None:
    """Set the time limit of every group on this rank, including DeepSpeed's groups.

    The only exception is the group for long waits.
    """
    for group in list(c10d._world.pg_map):
        if group.group_desc != LONG_WAIT_DESC:
            c10d._set_pg_timeout(limit, group)


def long_wait_group() -> Any:
    """Return the gloo group on which ranks wait while a few of them work for hours.

    The first call is a collective. The group's time limit is GLOO_TIMEOUT. With only one rank, the
    result is None (the whole world). A gloo group is needed because under NCCL a wait on the device
    would end at NCCL's limit.
    """
    if dist.get_world_size() == 1:
        return None
    for group in c10d._world.pg_map:
        if group.group_desc == LONG_WAIT_DESC:
            return group
    address = os.environ.get("MASTER_ADDR", "")
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_to(address)):
        # Without this setting, gloo uses the address of this host's name in /etc/hosts. This
        # address is often 127.0.1.1, which other hosts cannot reach.
        os.environ["GLOO_SOCKET_IFNAME"] = name
    made: Any = dist.new_group(backend="gloo", group_desc=LONG_WAIT_DESC)
    c10d._set_pg_timeout(GLOO_TIMEOUT, made)  # only now: it would limit the rendezvous
    return made


def interface_to(address: str) -> str:
    """Return the network interface through which this host reaches a different host.

    The result is "" if `address` is this host itself, or if the interface is unknown.
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


class ProcessGroups:
    """The data, sequence, tensor and pipeline parallel groups of this rank.

    Every rank creates the groups at the same time (a collective). If an axis has degree 1, its
    group is None and is never created. Under NCCL, each group of the world costs every rank a split
    of the communicator, so an axis of degree 1 on 64 ranks would cost 64 splits.

    `mpu` is the argument for `deepspeed.initialize`. It is None without tensor parallelism, where
    DeepSpeed's own groups are right. It is also None under a pipeline, whose module has its own
    groups.

    Sequence-parallel ranks store the same weights, so DeepSpeed sees them as further data-parallel
    ranks. If DeepSpeed knew about them, its ZeRO-3 would divide their gradients once more than its
    other stages do (0.19.8: `__avg_scatter_grads` of stage3.py omits sequence_parallel_size).
    """

    def __init__(self, mesh: Mesh, device_type: str, limit: timedelta | None = None):
        self.mesh, self.timeout = mesh, limit
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
        if self.mpu and self.dp_group is None:  # DeepSpeed reads an mpu's None as the whole world
            # Each rank creates only its own group.
            self.dp_group = dist.new_group(
                self.dp_ranks, limit, use_local_synchronization=True, group_desc="dp group"
            )

    def _group(self, axis: str) -> tuple[Any, list[int]]:
        if getattr(self.mesh, axis) == 1:
            return None, [self.rank]
        mine: tuple[Any, list[int]] | None = None
        for ranks in self.mesh.groups(axis):
            # every rank must create every group, in the same order
            group = dist.new_group(ranks, self.timeout, group_desc=f"{axis} group")
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
