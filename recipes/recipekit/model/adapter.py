"""Adapters of peft: the supported kinds, the keys of their files, and the merged weights.

File names, file contents and merges come from peft's own functions, so peft reads and merges what a
run exports.
"""

import contextlib
import copy
import enum
import itertools
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..parallel.plans import ends_of
from ..spec.refusal import Problem, Refusal

# Fields of peft's LoraConfig that train, export and merge as in peft with every value
# (tests/model/test_adapters.py).
FIELDS = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *(
            "r",
            "lora_alpha",
            "lora_dropout",
            "rank_pattern",
            "alpha_pattern",
            "use_rslora",
            "use_dora",
        ),
        *(
            "target_modules",
            "exclude_modules",
            "target_parameters",
            "layers_to_transform",
            "layers_pattern",
        ),
        *("bias", "lora_bias", "modules_to_save", "trainable_token_indices", "ensure_weight_tying"),
        *("fan_in_fan_out", "init_lora_weights"),
    }
)
# other values change the base weights, or need data
INITS = (True, False, "gaussian", "orthogonal")
NOT_COMPARED = (
    "base_model_name_or_path",
    "revision",
    "peft_version",
    "auto_mapping",
    "inference_mode",
    "runtime_config",
)
USE = "use LoraConfig with its own fields"


@dataclass(frozen=True)
class AdapterRequest:
    """Fields of a recipe that decide whether its adapter can be trained and exported."""

    adapt: Callable[[Any], Any]
    model: str = "none"  # "": randomly initialised weights, which no folder holds
    merge: bool = False
    tp: int = 1
    ep: int = 1
    revision: str = ""  # commit of the model on the hub, if it is not a folder


def adapted(model: Any, request: AdapterRequest, ds_config: dict[str, Any]) -> Any:
    """Return the result of `adapt` for `model`, whose parameters may be on the meta device.

    Raises `Refusal` for an adapter that the run cannot train, export and merge with the same result
    as peft.
    """
    base = dict(model.named_parameters())
    shapes = {name: _shape(parameter) for name, parameter in base.items()}
    zero3 = ds_config.get("zero_optimization", {}).get("stage") == 3
    with (
        _checked_configs(request, zero3),
        _known_to_peft(ds_config) if zero3 else contextlib.nullcontext(),
    ):
        made = request.adapt(model)

    if problems := _check_wrapper(made):
        raise Refusal(problems)
    if not hasattr(made, "peft_config"):
        return made
    (config,) = made.peft_config.values()
    problems = _check_scaling(made, config)
    now = {id(parameter): _shape(parameter) for parameter in made.parameters()}
    if changed := [
        name for name, parameter in base.items() if now.get(id(parameter)) != shapes[name]
    ]:
        fix = "save the changed model once with transformers, and give its folder with --model"
        problems.append(Problem("adapt", f"replaces weights of the model: {_listed(changed)}", fix))
    if problems:
        raise Refusal(problems)

    is_folder = bool(request.model) and Path(request.model).is_dir()
    config.base_model_name_or_path = (
        str(Path(request.model).resolve()) if is_folder else request.model or None
    )
    config.revision = (
        request.revision if request.revision and request.model and not is_folder else None
    )
    if problems := _check_trained(made) + (check_merge(made) if request.merge else []):
        raise Refusal(problems)
    return made


def config_of(model: Any) -> dict[str, Any] | None:
    """Return the adapter's config as JSON, without machine and version; None for a model without an
    adapter of peft.

    A resume compares it, so lists of names are sorted.
    """
    for config in getattr(model, "peft_config", {}).values():
        return {
            name: _plain(value)
            for name, value in config.to_dict().items()
            if name not in NOT_COMPARED
        }
    return None


def published_keys(model: Any) -> dict[str, str]:
    """Map each key of the adapter's file to a parameter or buffer; {} for models without an
    adapter.
    """
    if not hasattr(model, "peft_config"):
        return {}
    from peft import get_peft_model_state_dict

    ((adapter, config),) = model.peft_config.items()
    named = {name: torch.empty(0) for name in model.state_dict()}
    names = {id(value): name for name, value in named.items()}

    # With the base model's name, peft would request its vocabulary from the hub. `adapted` has
    # refused a changed vocabulary.
    base, config.base_model_name_or_path = config.base_model_name_or_path, None
    try:
        with warnings.catch_warnings(action="ignore"):
            found = get_peft_model_state_dict(model, state_dict=named, adapter_name=adapter)
    finally:
        config.base_model_name_or_path = base
    return {key: names[id(value)] for key, value in found.items()}


# Merging
# --------------------------------------------------------------------------------------------------

Gather = Callable[
    [Iterable[tuple[str, nn.Parameter]], torch.dtype], Iterator[tuple[str, torch.Tensor]]
]


def merged(
    model: Any, gather: Gather, dtype: torch.dtype, writes: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the merged weights and the buffers under the base model's names, one module at a time
    (a collective).

    `gather` turns named parameters into full tensors on the CPU. peft merges each module in fp32. A
    rank that does not write takes part in the gathering only.
    """
    base = model.get_base_model()
    wrappers = _outermost(base)

    def owner(name: str) -> str:
        parts = name.split(".")
        around = (".".join(parts[:end]) for end in range(1, len(parts)))
        return next((module for module in around if module in wrappers), "")

    chosen = _once(base, owner)
    for module, group in itertools.groupby(chosen, key=lambda item: owner(item[0])):
        if not module:
            yield from gather(group, dtype)
            continue
        tensors = dict(gather(group, torch.float32))
        if not writes:
            continue
        whole = _merge(_copied(wrappers[module], tensors, f"{module}."))
        parameters = dict(whole.named_parameters())
        for name, value in whole.state_dict().items():
            yield f"{module}.{name}", value.detach().to(dtype) if name in parameters else value

    kept = base.state_dict().keys()
    for name, buffer in base.named_buffers():
        if writes and name in kept and not owner(name):
            yield name, buffer.cpu()


def unties(model: Any) -> bool:
    """Return True if the embedding and the head are tied in the base model, but not in the merged
    model.
    """
    base = model.get_base_model()
    return _share_a_weight(base, saved=False) and not _share_a_weight(base, saved=True)


def _share_a_weight(base: Any, saved: bool) -> bool:
    """Return True if embedding and head share a weight in the base model or, with `saved`, in the
    trained model.
    """
    ends = [_inside(end, saved) for end in ends_of(base) if end is not None]
    return len(ends) == 2 and getattr(ends[0], "weight", None) is getattr(ends[1], "weight", 0)


def _inside(module: Any, saved: bool) -> Any:
    """Return the module inside peft's wrappers: the base model's or, with `saved`, the trained copy
    in modules_to_save.
    """
    from peft.utils import ModulesToSaveWrapper

    if isinstance(module, ModulesToSaveWrapper):
        module = (
            module.modules_to_save[str(module.active_adapter)] if saved else module.original_module
        )
    if hasattr(module, "token_adapter"):
        module = module.token_adapter.base_layer
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def _outermost(base: nn.Module) -> dict[str, Any]:
    """Return the modules of peft in the model, except modules inside another one of them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found: dict[str, Any] = {}
    for name, module in base.named_modules():
        inside = any(name.startswith(f"{wrapper}.") for wrapper in found)
        if not inside and (
            isinstance(module, BaseTunerLayer)
            or hasattr(module, "unload_and_optionally_merge_module")
        ):
            found[name] = module
    return found


def _once(base: nn.Module, owner: Callable[[str], str]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter under its first name, and also under a later name if the first one is in
    a replaced module.
    """
    first: dict[int, str] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        before = first.setdefault(id(parameter), name)
        if before == name or (".original_module." in before and not owner(name)):
            yield name, parameter


def _copied(module: nn.Module, tensors: dict[str, torch.Tensor], prefix: str) -> Any:
    """Copy a module with full tensors as its parameters, and without the hooks of an engine."""
    made: Any = copy.copy(module)
    made._parameters = {
        name: (
            None
            if parameter is None
            else nn.Parameter(tensors.get(prefix + name, torch.empty(0)), requires_grad=False)
        )
        for name, parameter in module._parameters.items()
    }
    made._buffers = {
        name: None if buffer is None else buffer.detach().cpu()
        for name, buffer in module._buffers.items()
    }
    children = module._modules.items()
    made._modules = {
        name: None if child is None else _copied(child, tensors, f"{prefix}{name}.")
        for name, child in children
    }
    made._forward_hooks, made._forward_pre_hooks = OrderedDict(), OrderedDict()
    if hasattr(module, "merged_adapters"):
        made.merged_adapters = []
    return made


def _merge(module: Any) -> nn.Module:
    """Merge a copied module with peft's own method, and return the plain module."""
    if hasattr(module, "unload_and_optionally_merge_module"):
        return module.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
    module.merge()
    return module.get_base_layer()


# Checks
# --------------------------------------------------------------------------------------------------


def _check_wrapper(made: Any) -> list[Problem]:
    """Refuse everything except a single adapter in peft's wrapper."""
    from peft import PeftMixedModel, PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    fix = "return get_peft_model(model, config) from adapt"
    if isinstance(made, PeftMixedModel):
        return [Problem("adapt", "mixes adapters of several kinds (PeftMixedModel)", fix)]
    if not isinstance(made, PeftModel):
        if any(isinstance(module, BaseTunerLayer) for module in made.modules()):
            return [
                Problem("adapt", "puts layers of peft into the model without peft's wrapper", fix)
            ]
        return []
    if len(made.peft_config) != 1:
        return [
            Problem(
                "adapt",
                f"gives the model several adapters: {_listed(sorted(made.peft_config))}",
                fix,
            )
        ]
    return []


def _check_config(config: Any) -> list[Problem]:
    """Refuse kinds of adapters other than LoRA, and fields of LoRA that are not in FIELDS."""
    kind = type(config).__name__
    if config.peft_type != "LORA" or kind != "LoraConfig":
        name = getattr(config.peft_type, "value", config.peft_type)
        rule = f"{name} is not supported: only LoRA and its variants DoRA and rsLoRA are"
        return [Problem(f"adapt: {kind}", rule, USE)]
    defaults = type(config)()
    problems = [
        Problem(
            f"adapt: {name}",
            "is not supported: a run would not train, export or merge it like peft",
            "leave it out",
        )
        for name, value in vars(config).items()
        if name not in FIELDS
        and not name.startswith("_")
        and value != getattr(defaults, name, None)
    ]
    if config.init_lora_weights not in INITS:
        rule = (
            "changes the base weights or needs data, so the run would export an adapter for another"
            " base model"
        )
        fix = 'use True or "gaussian"'
        problems.append(
            Problem(f"adapt: init_lora_weights = {config.init_lora_weights}", rule, fix)
        )
    return problems


def _check_layout(config: Any, request: AdapterRequest, zero3: bool) -> list[Problem]:
    """Refuse layouts that the adapter's layers do not support."""
    problems = []
    for axis, rule in (("ep", "experts on other ranks"), ("tp", "tensor-parallel shards")):
        if getattr(request, axis) > 1:
            fix = f"use --{axis} 1. ZeRO-3 also shards the frozen weights"
            problems.append(Problem(f"{axis} > 1", f"peft's adapters do not support {rule}", fix))
    if zero3 and config.trainable_token_indices is not None:
        rule = "reads rows of the embedding outside of its module, where ZeRO-3 has sharded them"
        problems.append(
            Problem("adapt: trainable_token_indices with ZeRO-3", rule, "use zero2.json")
        )
    return problems


def _check_scaling(made: Any, config: Any) -> list[Problem]:
    """Refuse a scaling that does not follow from adapter_config.json."""
    for name, module in made.named_modules():
        for adapter, scaling in (
            getattr(module, "scaling", {}).items() if hasattr(module, "lora_alpha") else ()
        ):
            rank = module.r[adapter]
            divisor = math.sqrt(rank) if config.use_rslora else rank
            if not math.isclose(scaling, module.lora_alpha[adapter] / divisor):
                rule = (
                    f"sets the scaling of {name} to {scaling}, which adapter_config.json cannot"
                    " state"
                )
                return [Problem("adapt", rule, "set lora_alpha or alpha_pattern in LoraConfig")]
    return []


def _check_trained(made: Any) -> list[Problem]:
    """Refuse trained parameters that would be missing in the adapter's file."""
    held = set(published_keys(made).values())
    aliases: dict[int, bool] = {}
    for name, parameter in made.named_parameters(remove_duplicate=False):
        aliases[id(parameter)] = aliases.get(id(parameter), False) or name in held
    trained = [
        (name, parameter) for name, parameter in made.named_parameters() if parameter.requires_grad
    ]
    if not trained:
        return [
            Problem("adapt", "leaves no weights to train", "set inference_mode=False in LoraConfig")
        ]
    if lost := [name for name, parameter in trained if not aliases[id(parameter)]]:
        rule = f"trains weights that peft does not write into the adapter's file: {_listed(lost)}"
        return [Problem("adapt", rule, "name their modules in modules_to_save of LoraConfig")]
    return []


def check_merge(made: Any) -> list[Problem]:
    """Refuse to merge LoRA into a tied embedding or head, because the merge would change both."""
    from peft.tuners.lora import LoraLayer

    base = made.get_base_model()
    if not any(isinstance(end, LoraLayer) for end in ends_of(base)) or not _share_a_weight(
        base, saved=False
    ):
        return []
    rule = "merging would change the head together with the embedding, since they share one weight"
    fix = "leave out --merge, or put the embedding into modules_to_save"
    return [Problem("--merge with LoRA on a tied embedding", rule, fix)]


@contextlib.contextmanager
def _checked_configs(request: AdapterRequest, zero3: bool) -> Iterator[None]:
    """Check each config that peft (0.21.2) receives, before peft makes layers of it.

    Some kinds change the base model, or fail on a model without weights. A check of the finished
    model would be too late.
    """
    from peft import PeftModel

    initialise = PeftModel.__init__

    def checked(self: Any, model: Any, peft_config: Any, *rest: Any, **options: Any) -> None:
        if problems := _check_config(peft_config) or _check_layout(peft_config, request, zero3):
            raise Refusal(problems)
        initialise(self, model, peft_config, *rest, **options)

    PeftModel.__init__ = checked
    try:
        yield
    finally:
        PeftModel.__init__ = initialise


@contextlib.contextmanager
def _known_to_peft(ds_config: dict[str, Any]) -> Iterator[None]:
    """Let peft gather the partitioned weights that it reads while it makes layers (the norms of
    DoRA).

    peft 0.21.2 asks transformers whether ZeRO-3 is on (utils/integrations.py), and transformers
    needs this object to know.
    """
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    held = HfDeepSpeedConfig(ds_config)  # transformers keeps a weak reference
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del held


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _plain(value: Any) -> Any:
    """Return a value of a config as JSON: sets and lists of names sorted, enums as their values."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): _plain(own) for key, own in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return (
            sorted(value)
            if all(isinstance(own, str) for own in value)
            else [_plain(own) for own in value]
        )
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
