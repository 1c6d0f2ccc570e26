"""Digests of everything that a step changes: weights, master weights and optimizer states."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

# attributes of DeepSpeed's optimizers that hold master weights or weights
FLAT = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
    "fp32_groups",
    "bit16_groups_flat",
    "fp16_partitioned_groups_flat",
)


def digest_of(engine: Any) -> str:
    """Return the digest of the weights, masters and optimizer states that this rank holds."""
    total = hashlib.sha256()
    for tensor in state_tensors(engine):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        flat = local.detach().contiguous().reshape(-1)
        if flat.numel():
            total.update(flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def state_tensors(engine: Any) -> Iterator[Any]:
    """Yield the tensors of `digest_of`, some of them more than once."""
    # Under ZeRO-3, a rank keeps `ds_tensor`, and the parameter may be gathered or not.
    for parameter in engine.module.parameters():
        yield getattr(parameter, "ds_tensor", parameter)
    yield from engine.module.buffers()
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for group in inner.param_groups:
        yield from group["params"]
    for state in inner.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value))
    for name in FLAT:
        yield from tensors_in(getattr(engine.optimizer, name, None))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)
