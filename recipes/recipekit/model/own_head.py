"""The head of a model whose config.json ties it to the embedding, and whose files hold another one."""

from pathlib import Path
from typing import Any

from ..architectures import safetensors_files
from ..refusal import refuse
from .empty import config_of, empty_model
from .file_keys import find_stored, tied_names, ties
from .small import once_a_config
from .weights import open_files, weights_folder


def config_of_files(model_config: dict[str, Any], name: str, auto_class: str) -> tuple[dict[str, Any], str]:
    """Returns the config.json of a model as its files hold the model, and the line that says what differs from `model_config`.

    Where the files hold a head that differs from the embedding, the head is not tied: transformers 5.22.2 loads such files
    the same way (`tie_weights`). Otherwise returns `model_config` itself and "". Reads the two tensors up to their first difference.
    """
    config = config_of(model_config, name)
    if not ties(config):
        return model_config, ""
    folder = weights_folder(name)
    entries = safetensors_files.open_folder(folder)
    vocabulary = getattr(config.get_text_config(), "vocab_size", 0)
    if vocabulary and sum(entry.shape[:1] == (vocabulary,) for entry in entries.values()) < 2:
        return model_config, ""  # an embedding without a head
    stamps = (f"{file}:{(folder / file).stat().st_mtime_ns}" for file in sorted({entry.file for entry in entries.values()}))
    return _compared(model_config, name, auto_class, str(folder), *stamps)


@once_a_config
def _compared(model_config: dict[str, Any], name: str, auto_class: str, folder: str, *_: str) -> tuple[dict[str, Any], str]:
    model = empty_model(model_config, "eager", name, auto_class=auto_class)
    weights = open_files(name, Path(folder))
    found = find_stored(model, list(weights.where))
    pairs = [(alias, first) for alias, first in tied_names(model).items() if alias in found and first in found and found[alias] != found[first]]
    same_shape = [(alias, first) for alias, first in pairs if weights.shape_of(found[alias]) == weights.shape_of(found[first])]  # others are refused later
    differing = [(alias, first) for alias, first in same_shape if not weights.same(found[alias], found[first])]
    if not differing:
        return model_config, ""
    apart = {key: value | {"tie_word_embeddings": False} for key, value in model_config.items() if isinstance(value, dict) and "tie_word_embeddings" in value}
    changed = model_config | apart | {"tie_word_embeddings": False}
    alias, first = differing[0]
    if alias in tied_names(empty_model(changed, "eager", name, auto_class=auto_class)):
        rule = f"{alias} and {first} differ in its files, and a {model_config['model_type']} always ties them"
        raise refuse(f"model = {name}", rule, f"delete {alias} from its files")
    ends = f"{alias} differs from {first} in its files"
    return changed, f'model = {name}: {ends}, so that the two are not tied, as in transformers; the run has "tie_word_embeddings": false'
