"""ZeRO-2 on a device that claims to have streams, to find gradients that are freed too early.

The device is the CPU, and the process group is torch's fake one, so one process can be any rank of
any world. Nothing runs in parallel here. The fake streams only note which work was queued on the
reduction stream since the compute stream last waited for it. On a GPU, such work may still read its
tensors. A gradient that is cleared then must have been recorded on the reduction stream, because
otherwise its memory is free for the next kernels of the backward pass.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from recipekit.engine.deepspeed_engine import apply_workarounds
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

COMPUTE, REDUCTION = "compute", "reduction"
WIDTH = 128
BUCKET = 100_000  # elements, fewer than a large head has
STEPS = 2


class Streams:
    """The queues of a device with two streams."""

    def __init__(self) -> None:
        self.current = [COMPUTE]
        self.pending: set[int] = set()  # storages that queued reductions may still read
        # Storages that outlive the reductions. A tensor keeps each one's address from being reused.
        self.recorded: dict[int, torch.Tensor] = {}


class Stream:
    def __init__(self, streams: Streams, name: str = REDUCTION) -> None:
        self.streams, self.name = streams, name

    def wait_stream(self, other: "Stream") -> None:
        if (self.name, other.name) == (COMPUTE, REDUCTION):
            self.streams.pending.clear()

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None:
        self.streams.pending.clear()


def claim_streams(streams: Streams) -> None:
    """Make DeepSpeed's accelerator claim the two streams. This changes the whole process."""
    kind: Any = type(get_accelerator())

    @contextlib.contextmanager
    def using(_: object, stream: Stream) -> Iterator[None]:
        streams.current.append(stream.name)
        try:
            yield
        finally:
            streams.current.pop()

    def current(*_: object) -> Stream:
        return Stream(streams, streams.current[-1])

    kind.is_synchronized_device = kind.resolves_data_dependency = lambda _: False
    kind.use_host_timers = lambda _: True
    kind.Stream = property(lambda _: lambda: Stream(streams))
    kind.stream, kind.current_stream = using, current
    kind.default_stream = lambda *_: Stream(streams, COMPUTE)
    kind.synchronize = lambda *_: streams.pending.clear()
    tensors: Any = torch.Tensor
    tensors.record_stream = lambda tensor, _: streams.recorded.setdefault(
        storage_of(tensor), tensor.detach()
    )


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def watch_gradients(streams: Streams) -> list[tuple[int, ...]]:
    """Return a list that receives the shape of each gradient that is freed while it is read."""
    kind: Any = DeepSpeedZeroOptimizer
    reduce, clear = kind.average_tensor, kind.clear_grad_attribute
    freed: list[tuple[int, ...]] = []

    def reduced(self: Any, tensor: torch.Tensor, *more: object) -> None:
        reduce(self, tensor, *more)
        streams.pending.add(storage_of(tensor))

    def cleared(self: Any, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        storage = storage_of(parameter.grad)
        # The buckets outlive the backward pass.
        buckets = (buffer for bucket in self.ipg_buckets.values() for buffer in bucket.buffer)
        if storage in streams.pending - streams.recorded.keys() - {*map(storage_of, buckets)}:
            freed.append(tuple(parameter.shape))
        clear(self, parameter)
        streams.pending.discard(storage)  # another gradient may get the same address

    kind.average_tensor, kind.clear_grad_attribute = reduced, cleared
    return freed


def freed_gradients(
    world: int, rows: int, zero: dict[str, object], more: dict[str, object], repaired: bool
) -> list[tuple[int, ...]]:
    """Return the shapes of the gradients that rank 0 frees too early in `STEPS` steps.

    The model's last matrix has shape (rows, WIDTH) and the first gradient of a backward pass. With
    `repaired`, the engine has our workarounds. Call this function in a new process.
    """
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    streams = Streams()
    claim_streams(streams)
    freed = watch_gradients(streams)

    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(20)]
    model = nn.Sequential(nn.Embedding(64, WIDTH), *layers, nn.Linear(WIDTH, rows, bias=False))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            **zero,
        },
        **more,
    }
    engine: Any = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )[0]
    if repaired:
        apply_workarounds(engine)
    for _ in range(STEPS):
        engine.backward(engine(torch.arange(8)[None]).float().pow(2).mean())
        engine.step()
    return freed
