"""peft: missing hooks for the creation and merging of layers."""

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


@contextlib.contextmanager
def checked_configs(check: Callable[[Any], None]) -> Iterator[None]:
    """Call `check` on each config within the `with` block before peft creates its layers.

    Why: Some kinds of adapters change the base model, or fail on a model without weights. A check
        of the finished model would be too late.
    Version: peft 0.21.2
    Test: tests/compat/test_peft.py::test_a_config_is_checked_before_peft_makes_layers
    Until: peft has a hook that runs before it creates layers.
    """
    from peft import PeftModel

    initialise = PeftModel.__init__

    def checked(
        self: Any, model: "nn.Module", peft_config: Any, *rest: Any, **options: Any
    ) -> None:
        check(peft_config)
        initialise(self, model, peft_config, *rest, **options)

    PeftModel.__init__ = checked
    try:
        yield
    finally:
        PeftModel.__init__ = initialise


@contextlib.contextmanager
def known_to_peft(ds_config: dict[str, Any]) -> Iterator[None]:
    """Let peft gather the partitioned weights that it reads while it creates layers (DoRA's norms).

    Why: peft asks transformers whether ZeRO-3 is enabled (utils/integrations.py), and transformers
        needs this object to answer.
    Version: peft 0.21.2
    Test: tests/compat/test_peft.py::test_peft_hears_of_zero3
    Until: peft checks the parameters instead, which have `ds_id` under ZeRO-3.
    """
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    held = HfDeepSpeedConfig(ds_config)  # transformers keeps a weak reference
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del held


def copied(module: "nn.Module", tensors: "dict[str, torch.Tensor]", prefix: str) -> Any:
    """Copy a module with full tensors as its parameters, without the hooks of an engine.

    Why: peft merges in place, and a deep copy would also copy the model's shards and the engine's
        hooks.
    Version: peft 0.21.2
    Test: tests/compat/test_peft.py::test_a_copied_layer_is_merged_and_the_model_stays
    Until: peft can merge a layer from given tensors.
    """
    from torch import empty, nn

    made: Any = copy.copy(module)
    made._parameters = {
        name: (
            None
            if parameter is None
            else nn.Parameter(tensors.get(prefix + name, empty(0)), requires_grad=False)
        )
        for name, parameter in module._parameters.items()
    }
    made._buffers = {
        name: None if buffer is None else buffer.detach().cpu()
        for name, buffer in module._buffers.items()
    }
    children = module._modules.items()
    made._modules = {
        name: None if child is None else copied(child, tensors, f"{prefix}{name}.")
        for name, child in children
    }
    made._forward_hooks, made._forward_pre_hooks = OrderedDict(), OrderedDict()
    if hasattr(module, "merged_adapters"):
        made.merged_adapters = []
    return made
