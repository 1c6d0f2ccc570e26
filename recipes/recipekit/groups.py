"""The process groups of a mesh, under the names that DeepSpeed asks a model-parallel unit for."""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .mesh import Mesh


class Groups:
    """The data, sequence, tensor and pipeline parallel groups of this rank. Made by every rank at the same time (a collective).

    `mpu` is what `deepspeed.initialize` takes: None without tensor parallelism, where DeepSpeed's own groups are right,
    and under a pipeline, whose module brings its own. Sequence ranks hold the same weights, so to DeepSpeed they are
    further data ranks; told of them, its ZeRO-3 divides their gradients once more than its other stages do
    (0.19.8: `__avg_scatter_grads` of stage3.py leaves sequence_parallel_size out).
    """

    def __init__(self, mesh: Mesh, device_type: str):
        self.mesh = mesh
        self.rank = dist.get_rank()
        self.coords = mesh.coords(self.rank)
        self.dp_group, self.dp_ranks = self._group("dp")
        self.sp_group, self.sp_ranks = self._group("sp")
        self.tp_group, self.tp_ranks = self._group("tp")
        self.pp_group, self.pp_ranks = self._group("pp")
        self.tp_mesh = DeviceMesh.from_group(self.tp_group, device_type, mesh_dim_names=("tp",)) if mesh.tp > 1 else None
        self.mpu = self if mesh.tp > 1 and mesh.pp == 1 else None

    def _group(self, axis: str) -> tuple[Any, list[int]]:
        mine: tuple[Any, list[int]] | None = None
        for ranks in self.mesh.groups(axis):
            group = dist.new_group(ranks)  # every rank makes every group, in the same order
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
