"""peft adapters: the supported kinds, the keys in their files, and the merged weights.

peft's own functions produce the file names, file contents and merges, so peft can read and merge a
run's exports.
"""

import contextlib
import enum
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..compat.peft import checked_configs, copied, known_to_peft
from ..parallel.plans import embedding_and_head
from ..spec.errors import ConfigError, Problem

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel

# LoraConfig fields for which training, export and merge behave as in peft, for every value of the
# field (tests/model/test_adapters.py).
LORA_FIELDS = frozenset(
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
# Other initialisations change the base weights or need data.
LORA_INITS = (True, False, "gaussian", "orthogonal")
NOT_COMPARED = (
    "base_model_name_or_path",
    "revision",
    "peft_version",
    "auto_mapping",
    "inference_mode",
    "runtime_config",
)
USE_LORA_CONFIG = "use LoraConfig with its own fields"


@dataclass(frozen=True)
class AdapterRequest:
    """Recipe fields that decide whether the recipe's adapter can be trained and exported."""

    adapt: Callable[[Any], Any]
    model: str = "none"  # "": randomly initialised weights, which are not stored in any folder
    merge: bool = False
    tp: int = 1
    ep: int = 1
    revision: str = ""  # the model's commit on the Hub, unless it is a folder


def apply_adapter(
    model: "PreTrainedModel", request: AdapterRequest, ds_config: dict[str, Any]
) -> Any:
    """Return the result of the recipe's `adapt` function for `model`.

    The model's parameters may be on the meta device. Raise `ConfigError` for an adapter whose
    training, export or merge would differ from peft's.
    """
    base = dict(model.named_parameters())
    shapes = {name: _full_shape(parameter) for name, parameter in base.items()}
    zero3 = ds_config.get("zero_optimization", {}).get("stage") == 3

    def check(config: "PreTrainedConfig") -> None:
        if problems := _check_config(config) or _check_adapter_layout(config, request, zero3):
            raise ConfigError(problems)

    with (
        checked_configs(check),
        known_to_peft(ds_config) if zero3 else contextlib.nullcontext(),
    ):
        made = request.adapt(model)

    if problems := _check_wrapper(made):
        raise ConfigError(problems)
    if not hasattr(made, "peft_config"):
        return made
    (config,) = made.peft_config.values()
    problems = _check_scaling(made, config)
    now = {id(parameter): _full_shape(parameter) for parameter in made.parameters()}
    if changed := [
        name for name, parameter in base.items() if now.get(id(parameter)) != shapes[name]
    ]:
        fix = "save the changed model once with transformers, and give its folder with --model"
        problems.append(
            Problem("adapt", f"replaces weights of the model: {_first_names(changed)}", fix)
        )
    if problems:
        raise ConfigError(problems)

    is_folder = bool(request.model) and Path(request.model).is_dir()
    config.base_model_name_or_path = (
        str(Path(request.model).resolve()) if is_folder else request.model or None
    )
    config.revision = (
        request.revision if request.revision and request.model and not is_folder else None
    )
    if problems := _check_trained(made) + (check_merge(made) if request.merge else []):
        raise ConfigError(problems)
    return made


def adapter_config_of(model: "PreTrainedModel") -> dict[str, Any] | None:
    """Return the adapter's config as JSON, or None without an adapter.

    Entries that depend on the machine or the version are left out. Lists of names are sorted,
    because a resume compares the config.
    """
    for config in getattr(model, "peft_config", {}).values():
        return {
            name: _to_json_value(value)
            for name, value in config.to_dict().items()
            if name not in NOT_COMPARED
        }
    return None


def published_keys(model: "PreTrainedModel") -> dict[str, str]:
    """Return a mapping from each key of the adapter's file to a parameter or buffer.

    Return {} for a model without an adapter.
    """
    if not hasattr(model, "peft_config"):
        return {}
    from peft import get_peft_model_state_dict

    ((adapter, config),) = model.peft_config.items()
    named = {name: torch.empty(0) for name in model.state_dict()}
    names = {id(value): name for name, value in named.items()}

    # If peft knew the base model's name, it would request the model's vocabulary from the hub.
    # `apply_adapter` has already rejected a changed vocabulary.
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


def merged_weights(
    model: "PeftModel", gather: Gather, dtype: torch.dtype, writes: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield merged weights and buffers under the base model's names, one module at a time.

    This is a collective operation. `gather` returns full tensors on the CPU for named parameters.
    peft merges each module in fp32. A rank that does not write only takes part in gathering.
    """
    base = model.get_base_model()
    wrappers = _peft_modules(base)

    def owner(name: str) -> str:
        parts = name.split(".")
        around = (".".join(parts[:end]) for end in range(1, len(parts)))
        return next((module for module in around if module in wrappers), "")

    chosen = _unique_parameters(base, owner)
    for module, group in itertools.groupby(chosen, key=lambda item: owner(item[0])):
        if not module:
            yield from gather(group, dtype)
            continue
        tensors = dict(gather(group, torch.float32))
        if not writes:
            continue
        whole = _merge_module(copied(wrappers[module], tensors, f"{module}."))
        parameters = dict(whole.named_parameters())
        for name, value in whole.state_dict().items():
            yield f"{module}.{name}", value.detach().to(dtype) if name in parameters else value

    kept = base.state_dict().keys()
    for name, buffer in base.named_buffers():
        if writes and name in kept and not owner(name):
            yield name, buffer.cpu()


def merge_unties_head(model: Any) -> bool:
    """Return True if the merge unties the base model's embedding and head."""
    base = model.get_base_model()
    return _shares_weight(base, saved=False) and not _shares_weight(base, saved=True)


def _shares_weight(base: Any, saved: bool) -> bool:
    """Return True if the embedding and the head share a weight.

    If `saved`, check the trained model instead of the base model.
    """
    ends = [_unwrap_module(end, saved) for end in embedding_and_head(base) if end is not None]
    return len(ends) == 2 and getattr(ends[0], "weight", None) is getattr(ends[1], "weight", 0)


def _unwrap_module(module: Any, saved: bool) -> Any:
    """Return the module inside peft's wrappers.

    The result is the base model's module or, if `saved`, the trained copy in modules_to_save.
    """
    from peft.utils import ModulesToSaveWrapper

    if isinstance(module, ModulesToSaveWrapper):
        module = (
            module.modules_to_save[str(module.active_adapter)] if saved else module.original_module
        )
    if hasattr(module, "token_adapter"):
        module = module.token_adapter.base_layer
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def _peft_modules(base: nn.Module) -> dict[str, Any]:
    """Return the model's outermost peft modules."""
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


def _unique_parameters(
    base: nn.Module, owner: Callable[[str], str]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter under its first name.

    If the first name belongs to a replaced module, also yield the parameter under a later name.
    """
    first: dict[int, str] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        before = first.setdefault(id(parameter), name)
        if before == name or (".original_module." in before and not owner(name)):
            yield name, parameter


def _merge_module(module: Any) -> nn.Module:
    """Merge a copied module with peft's own method, and return the plain module."""
    if hasattr(module, "unload_and_optionally_merge_module"):
        return module.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
    module.merge()
    return module.get_base_layer()


# Checks
# --------------------------------------------------------------------------------------------------


def _check_wrapper(made: nn.Module) -> list[Problem]:
    """Return a problem for anything other than a single adapter in peft's wrapper."""
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
                f"gives the model several adapters: {_first_names(sorted(made.peft_config))}",
                fix,
            )
        ]
    return []


def _check_config(config: "PreTrainedConfig") -> list[Problem]:
    """Return problems for adapters other than LoRA and for fields outside LORA_FIELDS."""
    kind = type(config).__name__
    if config.peft_type != "LORA" or kind != "LoraConfig":
        name = getattr(config.peft_type, "value", config.peft_type)
        rule = f"{name} is not supported: only LoRA and its variants DoRA and rsLoRA are"
        return [Problem(f"adapt: {kind}", rule, USE_LORA_CONFIG)]
    defaults = type(config)()
    problems = [
        Problem(
            f"adapt: {name}",
            "is not supported: a run would not train, export or merge it like peft",
            "leave it out",
        )
        for name, value in vars(config).items()
        if name not in LORA_FIELDS
        and not name.startswith("_")
        and value != getattr(defaults, name, None)
    ]
    if config.init_lora_weights not in LORA_INITS:
        rule = (
            "changes the base weights or needs data, so the run would export an adapter for another"
            " base model"
        )
        fix = 'use True or "gaussian"'
        problems.append(
            Problem(f"adapt: init_lora_weights = {config.init_lora_weights}", rule, fix)
        )
    return problems


def _check_adapter_layout(
    config: "PreTrainedConfig", request: AdapterRequest, zero3: bool
) -> list[Problem]:
    """Return a problem for each layout that the adapter's layers do not support."""
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


def _check_scaling(made: Any, config: "PreTrainedConfig") -> list[Problem]:
    """Return a problem if the scaling does not follow from adapter_config.json."""
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


def _check_trained(made: "PreTrainedModel") -> list[Problem]:
    """Return a problem for trained parameters that the adapter's file would not contain."""
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
        rule = (
            f"trains weights that peft does not write into the adapter's file: {_first_names(lost)}"
        )
        return [Problem("adapt", rule, "name their modules in modules_to_save of LoraConfig")]
    return []


def check_merge(made: Any) -> list[Problem]:
    """Return a problem if LoRA would be merged into a tied embedding or head.

    Such a merge would change both the embedding and the head.
    """
    from peft.tuners.lora import LoraLayer

    base = made.get_base_model()
    if not any(
        isinstance(end, LoraLayer) for end in embedding_and_head(base)
    ) or not _shares_weight(base, saved=False):
        return []
    rule = "merging would change the head together with the embedding, since they share one weight"
    fix = "leave out --merge, or put the embedding into modules_to_save"
    return [Problem("--merge with LoRA on a tied embedding", rule, fix)]


def _full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _to_json_value(value: object) -> Any:
    """Return a config value as JSON: sets and name lists sorted, enums replaced by their values."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): _to_json_value(own) for key, own in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return (
            sorted(value)
            if all(isinstance(own, str) for own in value)
            else [_to_json_value(own) for own in value]
        )
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _first_names(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
