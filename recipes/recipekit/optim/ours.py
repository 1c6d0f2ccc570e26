"""Makes the optimizers that are ours: those that a JSON names, where DeepSpeed's own is another
algorithm, or an op that does not run.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..spec.optimizer_specs import facts_of, spelled
from .adafactor import Adafactor
from .adagrad import Adagrad
from .lamb import Lamb
from .lion import Lion
from .muon import NewtonSchulz
from .one_bit import OneBitAdam

OURS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adafactor": Adafactor,
    "Adagrad": Adagrad,
    "Lamb": Lamb,
    "Lion": Lion,
    "Muon": NewtonSchulz,
    "OneBitAdam": OneBitAdam,
}


def maker(ds_config: Mapping[str, Any]) -> Callable[[Any], torch.optim.Optimizer] | None:
    """Returns what makes the optimizer of parameter groups that a resolved JSON names; None where
    it is not ours.
    """
    if not facts_of(ds_config).ours:
        return None
    kind, params = OURS[spelled(ds_config["optimizer"]["type"])], ds_config["optimizer"]["params"]
    # the rules let others pass where they are switched off
    takes = inspect.signature(kind).parameters
    return partial(kind, **{name: value for name, value in params.items() if name in takes})
