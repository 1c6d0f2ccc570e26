"""A workaround for DeepSpeed 0.19.8 and parameters without dimension, such as CLIP's
logit_scale.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.zero import partition_parameters


@contextlib.contextmanager
def broadcasting_scalars() -> Iterator[None]:
    """Let DeepSpeed broadcast parameters of shape () within the `with`.

    DeepSpeed views each parameter as bytes when it makes an engine or partitions a parameter
    (engine.py, _broadcast_model; partition_parameters.py, _zero_init_param). torch refuses this
    view for a tensor without dimension, so such a parameter has shape (1,) during the broadcast.
    """
    engines: Any = deepspeed_engine.DeepSpeedEngine
    inits: Any = partition_parameters.Init
    plain, plain_init = engines._broadcast_model, inits._zero_init_param

    def broadcast(made: Any) -> None:
        scalars = [parameter for parameter in made.module.parameters() if parameter.dim() == 0]
        for parameter in scalars:
            parameter.data = parameter.data.view(1)
        plain(made)
        for parameter in scalars:
            parameter.data = parameter.data.view(())

    def init(zero: Any, parameter: Any) -> None:
        scalar = parameter.dim() == 0
        if scalar:
            parameter.data = parameter.data.view(1)
        plain_init(zero, parameter)
        if scalar:
            parameter.ds_shape = torch.Size()  # the shape of the gathered parameter

    engines._broadcast_model, inits._zero_init_param = broadcast, init
    try:
        yield
    finally:
        engines._broadcast_model, inits._zero_init_param = plain, plain_init
