"""Factory for this package's optimizers.

They replace the optimizer that a JSON names if DeepSpeed implements a different algorithm, or only
an op that cannot run here.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch

from ..spec.optimizer_specs import OPTIMIZERS, canonical_name, optimizer_spec_of


def own_optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return `OPTIMIZER` from the file named in an optimizer's row of the table."""
    return import_module(f".{OPTIMIZERS[name].module}", __package__).OPTIMIZER


def optimizer_factory(
    ds_config: Mapping[str, Any],
) -> Callable[[Any], torch.optim.Optimizer] | None:
    """Return a factory for the optimizer in a resolved JSON, or None if it is not ours.

    The factory's argument is the list of parameter groups.
    """
    if not optimizer_spec_of(ds_config).is_own_class:
        return None
    kind, params = (
        own_optimizer_class(canonical_name(ds_config["optimizer"]["type"])),
        ds_config["optimizer"]["params"],
    )
    # The rules allow further parameters only with values that disable them.
    takes = inspect.signature(kind).parameters
    return partial(kind, **{name: value for name, value in params.items() if name in takes})
