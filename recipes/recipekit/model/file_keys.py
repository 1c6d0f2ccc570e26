"""The keys in a model's files: the parameters' keys, and keys that no parameter uses."""

import json
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..architectures.headers import NEXT_TOKEN_LAYERS, too_many_layers_error
from ..parallel.blueprint import PublishedTensor
from ..spec.errors import ConfigError, config_error

# Buffers that older versions of transformers saved and that every model now computes itself.
COMPUTED_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|position_ids|(attn|attention|self_attn)\.masked_bias)$"
)
# A buffer with shape (1, 1, positions, positions).
CAUSAL_MASK = re.compile(r"(^|\.)(attn|attention|self_attn)\.bias$")
WRAPPER_NAMES = (
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
    "module",
)
MAX_PREFIX_PARTS = 6  # maximum number of parts in a prefix


def find_stored(model: PreTrainedModel, keys: list[str]) -> dict[str, PublishedTensor]:
    """Map each parameter to its location in files with these `keys`.

    The mapping follows the conversions that transformers publishes for the model. For example, many
    MoE models have one tensor for all experts, while their files contain a separate matrix for each
    expert.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    state = model.state_dict()
    found: dict[str, PublishedTensor] = {}
    joined: dict[str, dict[str, list[str]]] = {}  # parameter -> source pattern -> keys
    for key in keys:
        name, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, state
        )
        if key in state or pattern is None:
            found[key if key in state else name] = PublishedTensor(((key,),))
        else:
            joined.setdefault(name, {}).setdefault(pattern, []).append(key)
    for name, patterns in joined.items():
        converter = by_pattern[next(iter(patterns))]
        dim = _concat_dim(model, name, converter.operations)
        sources = [pattern for pattern in converter.source_patterns if pattern in patterns]
        parts = tuple(tuple(sorted(patterns[pattern], key=_expert_index)) for pattern in sources)
        found[name] = PublishedTensor(parts, stacked=True, dim=dim)
    return found


def _concat_dim(model: PreTrainedModel, name: str, operations: list[Any]) -> int:
    """Return the dimension along which stacked tensors are concatenated, or 0 without one.

    Raise `ConfigError` for other operations.
    """
    kinds = [type(operation).__name__ for operation in operations]
    known = kinds in (["MergeModulelist"], ["MergeModulelist", "Concatenate"])
    if not known or operations[0].dim != 0:
        rule = f"its files hold {name} in a form that needs {', '.join(kinds)}"
        fix = (
            "load and save it once with transformers' save_pretrained(...,"
            " save_original_format=False)"
        )
        raise config_error(f"model = {model.config._name_or_path}", rule, fix)
    return operations[1].dim if len(kinds) > 1 else 0


def _expert_index(key: str) -> list[int]:
    return [int(number) for number in re.findall(r"\.(\d+)(?=\.)", key)]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map each further name of a tied parameter to the parameter's first name."""
    named = dict(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in reversed(named.items())}
    return {
        name: first[id(parameter)]
        for name, parameter in named.items()
        if first[id(parameter)] != name
    }


def untied_names(model: PreTrainedModel, config: Path) -> dict[str, str]:
    """Return the parameters that the file `config` ties but this model does not.

    Each is mapped to the parameter to which the file ties it.
    """
    disk = (
        type(model.config).from_dict(json.loads(config.read_bytes())) if config.is_file() else None
    )
    if not ties_embeddings(disk) or ties_embeddings(model.config):
        return {}
    return dict(model._tied_weights_keys or {})


def ties_embeddings(config: PreTrainedConfig | None) -> bool:
    """Return True if a config, or the config of a model part, ties embeddings."""
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    return any(getattr(part, "tie_word_embeddings", False) for part in parts)


def unused_keys(
    model: PreTrainedModel,
    keys: list[str],
    found: Mapping[str, PublishedTensor],
    unread: set[str],
    shape: Callable[[str], list[int]],
) -> list[str]:
    """Return the keys that no parameter uses, except those that can be ignored.

    A key can be ignored if transformers ignores it or if it belongs to a computed buffer. `found`
    is the result of `find_stored`. The parameters in `unread` are not read from the files. `shape`
    returns the shape of a key. Raise `ConfigError` for layers that the model does not have.
    """
    state = model.state_dict().keys() - unread
    name_of = {key: name for name, stored in found.items() for part in stored.parts for key in part}
    left = {key: name_of.get(key, key) for key in keys if name_of.get(key) not in state}
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    buffers = {name for name, _ in model.named_buffers()}

    def ignorable(key: str, name: str) -> bool:
        if (
            any(pattern.search(name) for pattern in ignored)
            or name in buffers
            or COMPUTED_BUFFERS.search(name)
        ):
            return True
        return bool(CAUSAL_MASK.search(name)) and shape(key)[:2] == [1, 1]

    unused = {key: name for key, name in left.items() if not ignorable(key, name)}
    _check_extra_layers(model, unused)
    return list(unused)


def _check_extra_layers(model: PreTrainedModel, unused: Mapping[str, str]) -> None:
    """Raise `ConfigError` if unused keys belong to additional layers of a layer list.

    Layers that predict further tokens are allowed.
    """
    config: dict[str, Any] = model.config.to_dict()
    blocks = [config, *(block for block in config.values() if isinstance(block, dict))]
    stated = [
        (str(key), value) for block in blocks for key, value in block.items() if type(value) is int
    ]
    further = max((value for key, value in stated if NEXT_TOKEN_LAYERS.fullmatch(key)), default=0)
    lengths = _layer_list_lengths(model)
    beyond = Counter[str]()  # layer list -> number of its layers in the files
    for place, number in _numbered_places(unused.values(), f"{model.base_model_prefix}.", lengths):
        if number >= lengths[place] + further:
            beyond[place] = max(beyond[place], number + 1)
    if not beyond:
        return
    place, held = next(iter(beyond.items()))
    count = lengths[place]
    keys = [key for key, value in stated if value == count and "layer" in key]
    raise too_many_layers_error(
        model.config._name_or_path, place, held, count, keys[0] if keys else ""
    )


def _layer_list_lengths(model: PreTrainedModel) -> dict[str, int]:
    """Return the length of each layer list, by the list's name."""
    return {
        place: len(module)
        for place, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and all(child.isdecimal() for child, _ in module.named_children())
    }


def _numbered_places(
    names: Iterable[str], base: str, lists: Container[str]
) -> Iterator[tuple[str, int]]:
    """Yield (layer list, layer number) for each name inside a layer list.

    A name may include or omit the base model's prefix `base`.
    """
    for name in names:
        parts = name.split(".")
        for end, number in enumerate(parts):
            around = ".".join(parts[:end])
            places = (around, base + around, around.removeprefix(base))
            place = next((place for place in places if place in lists), None)
            if number.isdecimal() and place is not None:
                yield place, int(number)


@dataclass(frozen=True)
class Affix:
    """Extra text in a file's tensor names: a leading `prefix`, and wrapper names inside."""

    prefix: str = ""
    wrappers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " and ".join(filter(None, (self.prefix, *(f"{word}." for word in self.wrappers))))

    def without(self, key: str) -> str:
        key = key.removeprefix(self.prefix)
        for word in self.wrappers:
            key = re.sub(rf"(^|\.)({word}\.)+", r"\1", key)
        return key


def foreign_affix(model: PreTrainedModel, keys: list[str], wanted: list[str]) -> Affix | None:
    """Return the extra text in the file's tensor names, or None if there is no such text.

    When this text is removed, most of the `wanted` parameters are found. A wrapper such as
    torch.compile's adds a word in front of all names, or in front of the names in each layer.
    """
    state = model.state_dict().keys()

    def found(affix: Affix) -> tuple[int, int]:
        """Return (number of parameters found, number found by their full names).

        The two numbers can differ, because transformers also adds or removes the base model's
        prefix.
        """
        renamed = [affix.without(key) for key in keys]
        try:
            return len(find_stored(model, renamed).keys() & set(wanted)), len(state & set(renamed))
        except ConfigError:
            return 0, 0

    leading = Counter(prefix for key in keys for prefix in _prefixes(key))
    words = tuple(word for word in WRAPPER_NAMES if any(f".{word}." in f".{key}" for key in keys))
    tried = [Affix(prefix) for prefix, count in leading.items() if 2 * count >= len(keys)]
    tried += [Affix(wrappers=(word,)) for word in words] + [Affix(wrappers=words)]
    best = max(tried, key=found)
    return best if found(best)[0] > max(found(Affix())[0], len(wanted) // 2) else None


def _prefixes(key: str) -> Iterator[str]:
    parts = key.split(".")
    for end in range(1, min(MAX_PREFIX_PARTS, len(parts) - 1) + 1):
        yield "".join(f"{part}." for part in parts[:end])


def refuse_affix(model: PreTrainedModel, keys: list[str], affix: Affix) -> ConfigError:
    """Return the config error for tensor names that contain an `affix`.

    The error includes the code that renames the tensors.
    """
    having, kind = sum(affix.without(key) != key for key in keys), model.config.model_type
    names = f"{having} of the {len(keys)} names of tensors in its files have {affix} in them"
    rule = f"{names}, which the names of a {kind}'s parameters do not"
    if any(".lora_" in key for key in keys):
        fix = "merge the adapter with peft's merge_and_unload(), and save that with save_pretrained"
    else:
        replaced = "".join(f".replace('{word}.', '')" for word in affix.wrappers)
        new = f"key.removeprefix({affix.prefix!r})" if affix.prefix else f"key{replaced}"
        renamed = f"{{{new}: value for key, value in load_file(FILE).items()}}"
        fix = (
            f"rename them in each file with safetensors.torch: save_file({renamed}, FILE,"
            " {'format': 'pt'})"
        )
    return config_error(f"model = {model.config._name_or_path}", rule, fix)
