"""A model from its config.json, its parameters on the meta device."""

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from ..parallel.plans import lists_of_stages
from ..spec.refusal import refuse
from ..spec.task_specs import TASKS
from .batch_norm import replace_norms
from .config_errors import wrong_values

CAUSAL, MASKED = TASKS["pretrain"].auto_class, TASKS["masked_lm"].auto_class
# How transformers 5.22.2 names an attention implementation that a class, or this machine, does not
# have.
NO_ATTENTION = re.compile(
    r"attention implementation|attn_implementation|flash.?attention|sdpa", re.IGNORECASE
)


def leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Finds the blocks of experts that ZeRO-3 must gather as one: experts in a module of their own,
    or in a list of such.

    Else a rank on which an expert gets no tokens gathers less than its peers, and all wait for
    ever; or, in DBRX, the weights that every expert reads are gone after the first.
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
    auto_class: str = CAUSAL,
    own_norms: bool = False,
) -> PreTrainedModel:
    """Makes the model of a config.json with its parameters on the meta device, its buffers real,
    its embeddings tied.

    `name`, a hub id or folder, is what a refusal calls the model. Every `recompute_every`-th layer
    is recomputed in the backward pass. `own_norms`: its BatchNorm is that of batch_norm.py. The
    attribute `made` of the model holds the constructors' values of small parameters, by name:
    needed for the few that no initialiser sets (Apertus' activation), the rest is uninitialised
    memory. Raises `Refusal` for an attention implementation that the model does not have.
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
    if own_norms:
        replace_norms(model)
    if recompute_every:
        recompute(model, recompute_every)
    return model


def recompute(model: PreTrainedModel, every: int) -> None:
    """Makes every so manyth layer of a model keep its input only, and compute the rest again in the
    backward pass.

    Where transformers has no such layers (ResNet), they are the elements of the model's lists.
    Raises `Refusal` for a model without either.
    """
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for number, layer in enumerate(
            module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
        ):
            layer.gradient_checkpointing = number % every == 0
        return
    if not (blocks := blocks_of(model)):
        rule = (
            f"transformers recomputes no layers of a {model.config.model_type}, and it has no list"
            " of layers"
        )
        raise refuse(
            f"recompute_every = {every}",
            rule,
            "leave out --recompute_every and --activation_checkpointing",
        )
    for name in blocks[::every]:
        block = model.get_submodule(name)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def blocks_of(model: nn.Module) -> list[str]:
    """Names the layers of a model: the elements of each of its outermost lists, or of the lists
    that these hold and nothing else.
    """
    modules = dict(model.named_modules())
    lists = [name for name, module in modules.items() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return [
        f"{inner}.{child}"
        for name in outermost
        for inner in lists_of_stages(name, modules) or [name]
        for child, _ in modules[inner].named_children()
    ]


def config_of(model_config: dict[str, Any], name: str = "") -> PreTrainedConfig:
    """Makes a config of transformers' own class.

    Raises `Refusal` for values that the class does not take.
    """
    values = {key: value for key, value in model_config.items() if key != "model_type"}
    with wrong_values(values, f"model = {name}"):
        return transformers.AutoConfig.for_model(model_config["model_type"], **values)


def class_of(config: PreTrainedConfig, auto_class: str) -> Any:
    """Finds the class of the model that an Auto class of transformers makes of a config: of several
    (DeiT) the first that config.json names, else the first.
    """
    found: Any = getattr(transformers, auto_class)._model_mapping[type(config)]
    kinds = found if isinstance(found, tuple) else (found,)
    return next(
        (kind for name in config.architectures or () for kind in kinds if kind.__name__ == name),
        kinds[0],
    )


def construct(
    config: PreTrainedConfig, attention: str, name: str = "", auto_class: str = CAUSAL
) -> PreTrainedModel:
    """Makes the model of a config that an Auto class of transformers knows, in fp32."""
    config._attn_implementation = attention
    config._name_or_path = name  # what an exported adapter names as its base
    if auto_class == CAUSAL:
        # with a cache transformers ignores packed position_ids, and documents leak into each other
        config.use_cache = False
    # transformers 5.22.2 looks for them where an Auto class has several for a type
    if not config.architectures:
        config.architectures = [class_of(config, auto_class).__name__]
    try:
        model = getattr(transformers, auto_class).from_config(config, dtype=torch.float32)
    except (ValueError, ImportError) as error:
        # The class, or this machine, may lack the attention.
        if not NO_ATTENTION.search(str(error)):
            raise
        fix = "use --attention eager" if attention != "eager" else "use another model"
        raise refuse(
            f"attention = {attention}",
            f"a {config.model_type} cannot use it here: {str(error).split('.')[0]}",
            fix,
        ) from None
    if auto_class == MASKED:
        count_behind_padding(model)
    return model


def count_behind_padding(model: nn.Module) -> None:
    """Lets the embeddings of a model whose first position is the one behind the padding token's
    (RoBERTa, MPNet) take positions that begin at 0.
    """

    def shifted(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
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


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[dict[tuple[int, str], torch.Tensor]]:
    """Puts every new parameter on the meta device; yields copies of the small ones, by (id of the
    module, key).
    """
    small: dict[tuple[int, str], torch.Tensor] = {}
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            if parameter.numel() <= 4096:
                small[id(module), name] = parameter.detach().clone()
            module._parameters[name] = nn.Parameter(
                parameter.detach().to("meta"), requires_grad=parameter.requires_grad
            )

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield small
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
