"""Signatures of torch 2.11.0 that differ from the pinned torch in arguments that we pass.

They are copied from torch 2.11.0's nn/attention/varlen.py and nn/parallel/distributed.py.
"""

from typing import Any


def varlen_attn(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    """Return the arguments that were given."""
    given = (query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    return given, {"scale": scale, "window_size": window_size}


class DistributedDataParallel:
    """The constructor of torch 2.11's DDP, which keeps the arguments that it was given."""

    def __init__(
        self,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: Any = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Any = None,
    ) -> None:
        self.module, self.broadcast_buffers = module, broadcast_buffers
        self.find_unused_parameters = find_unused_parameters

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Accept a hook."""

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Accept the setting."""
