"""Construction of a model from its config.json, with its parameters on the meta device."""

import inspect
import re
import sys
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from ..compat.torch import parameters_on_meta, set_forward
from ..compat.transformers import (
    change_attention,
    recompute_layers,
    set_attention,
    set_recomputed,
)
from ..parallel.plans import stage_block_lists
from ..spec.errors import config_error
from ..spec.task_specs import TASKS
from .batch_norm import replace_norms
from .config_errors import wrong_values

CAUSAL_AUTO_CLASS, MASKED_AUTO_CLASS = TASKS["pretrain"].auto_class, TASKS["masked_lm"].auto_class
BIDIRECTIONAL_AUTO_CLASSES = {facts.auto_class for facts in TASKS.values() if facts.bidirectional}
# Matches the error of transformers 5.22.2 if a model class or this machine does not support an
# attention implementation.
ATTENTION_ERROR = re.compile(
    r"attention implementation|attn_implementation|flash.?attention|sdpa", re.IGNORECASE
)
# Source text of transformers 5.22.2 classes (GIT, Falcon) that choose the attention once, when
# their layers are constructed.
CHOSEN_ONCE = "[config._attn_implementation]"


def leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the expert blocks whose weights ZeRO-3 must gather together.

    A block is a module that contains only the experts, or the parent of a list of experts. Suppose
    that the experts of such a block were gathered one by one. A rank on which an expert receives no
    tokens would then gather fewer experts than its peers, and all ranks would hang. In DBRX, the
    weights that every expert reads would be released after the first expert.
    """
    found = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts":
            own = [child for child in module.children() if any(True for _ in child.parameters())]
            if own and isinstance(module, nn.ModuleList):
                found.append(model.get_submodule(name.rpartition(".")[0]))
            elif len(own) == 1:
                found.append(module)
    return found


def empty_model(
    model_config: dict[str, Any],
    attention: str = "sdpa",
    name: str = "",
    recompute_every: int = 0,
    auto_class: str = CAUSAL_AUTO_CLASS,
    step_norms: bool = False,
) -> PreTrainedModel:
    """Construct the model described by a config.json, with its parameters on the meta device.

    The model's buffers are real and its embeddings are tied. `name`, a Hub id or folder, identifies
    the model in errors. Every `recompute_every`-th layer is recomputed in the backward pass. With
    `step_norms`, each BatchNorm is replaced by the implementation in batch_norm.py.

    The model's attribute `made` maps names of small parameters to the values from their
    constructors. These values are needed for the few parameters that no initialiser sets (Apertus'
    activation). The other parameters are uninitialised memory.

    Raise `ConfigError` for an attention implementation that the model does not support.
    """
    config = config_of(model_config, name)
    with (
        no_init_weights(),
        parameters_on_meta() as small,
        wrong_values(dict(model_config), f"model = {name}"),
    ):
        model = construct(config, attention, name, auto_class)
    made: Any = {
        f"{place}.{key}" if place else key: small[id(module), key]
        for place, module in model.named_modules()
        for key in module._parameters
        if (id(module), key) in small
    }
    model.made = made
    model.tie_weights()
    if step_norms:
        replace_norms(model)
    if recompute_every:
        enable_recompute(model, recompute_every)
    return model


def enable_recompute(model: PreTrainedModel, every: int) -> None:
    """Enable recomputation for every `every`-th layer of a model, in place.

    Such a layer stores only its input and is computed again in the backward pass. If transformers
    defines no recomputable layers for the model (ResNet), the elements of the model's module lists
    are used. Raise `ConfigError` for a model without either.
    """
    if model.supports_gradient_checkpointing:
        recompute_layers(model)
        for number, layer in enumerate(
            module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
        ):
            set_recomputed(layer, number % every == 0)
        return
    if not (blocks := layer_names(model)):
        rule = (
            f"transformers recomputes no layers of a {model.config.model_type}, and it has no list"
            " of layers"
        )
        raise config_error(
            f"recompute_every = {every}",
            rule,
            "leave out --recompute_every and --activation_checkpointing",
        )
    for name in blocks[::every]:
        block = model.get_submodule(name)
        set_forward(block, partial(checkpoint, block.forward, use_reentrant=False))


def layer_names(model: nn.Module) -> list[str]:
    """Return the names of a model's layers.

    The layers are the elements of each outermost module list. If such a list contains only lists,
    the layers are the elements of these inner lists.
    """
    modules = dict(model.named_modules())
    lists = [name for name, module in modules.items() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return [
        f"{inner}.{child}"
        for name in outermost
        for inner in stage_block_lists(name, modules) or [name]
        for child, _ in modules[inner].named_children()
    ]


def config_of(model_config: dict[str, Any], name: str = "") -> PreTrainedConfig:
    """Return a config as an instance of transformers' own class.

    Raise `ConfigError` for values that the class rejects.
    """
    values = {key: value for key, value in model_config.items() if key != "model_type"}
    with wrong_values(values, f"model = {name}"):
        return transformers.AutoConfig.for_model(model_config["model_type"], **values)


def class_of(config: PreTrainedConfig, auto_class: str) -> Any:
    """Return the model class that an Auto class in transformers selects for a config.

    If there are several classes (DeiT), return the first one listed in config.json, or else the
    first.
    """
    found: Any = getattr(transformers, auto_class)._model_mapping[type(config)]
    kinds = found if isinstance(found, tuple) else (found,)
    return next(
        (kind for name in config.architectures or () for kind in kinds if kind.__name__ == name),
        kinds[0],
    )


def construct(
    config: PreTrainedConfig, attention: str, name: str = "", auto_class: str = CAUSAL_AUTO_CLASS
) -> PreTrainedModel:
    """Construct the fp32 model for a config that an Auto class in transformers supports."""
    set_attention(config, attention)
    config.name_or_path = name  # the base model's name in an exported adapter's files
    if auto_class == CAUSAL_AUTO_CLASS:
        # With a cache, transformers ignores packed position_ids, and documents attend to each
        # other.
        config.use_cache = False
    # transformers 5.22.2 reads `architectures` if an Auto class has several classes for a model
    # type.
    if not config.architectures:
        config.architectures = [class_of(config, auto_class).__name__]
    try:
        model = getattr(transformers, auto_class).from_config(config, dtype=torch.float32)
    except (ValueError, ImportError) as error:
        # The model class or this machine may not support the attention implementation.
        if not ATTENTION_ERROR.search(str(error)):
            raise
        fix = "use --attention eager" if attention != "eager" else "use another model"
        raise config_error(
            f"attention = {attention}",
            f"a {config.model_type} cannot use it here: {str(error).split('.')[0]}",
            fix,
        ) from None
    if auto_class in BIDIRECTIONAL_AUTO_CLASSES:
        offset_positions(model)
    return model


def switch_attention(model: PreTrainedModel, attention: str) -> bool:
    """Switch a model to a different attention implementation, in place.

    Return False if the model's layers do not look up the attention in each forward, or if its class
    does not support the new one. The model must then be constructed again.
    """
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not all(part._can_set_attn_implementation() for part in parts):
        return False
    sources = (inspect.getsource(sys.modules[type(part).__module__]) for part in parts)
    if any(CHOSEN_ONCE in source for source in sources):
        return False
    try:
        change_attention(model, parts, attention)
    except (ValueError, ImportError):
        return False
    return True


def offset_positions(model: nn.Module) -> None:
    """Make a model whose positions start after the padding index accept positions from 0.

    RoBERTa and MPNet are such models.
    """

    def shifted(module: Any, args: object, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = kwargs.get("position_ids")
        return args, kwargs | (
            {}
            if given is None
            else {"position_ids": given + module.position_embeddings.padding_idx + 1}
        )

    for module in model.modules():
        positions = getattr(module, "position_embeddings", None)
        if isinstance(positions, nn.Embedding) and positions.padding_idx is not None:
            module.register_forward_pre_hook(shifted, with_kwargs=True)
