"""A head in a model's files that differs from the embedding, to which config.json ties it."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..architectures import safetensors_files
from ..spec.refusal import refuse
from .empty import config_of, empty_model
from .file_keys import find_stored, tied_names, ties
from .small import once_a_config
from .weights import Weights, open_files, weights_folder


def config_of_files(
    model_config: dict[str, Any], name: str, auto_class: str, revision: str = ""
) -> tuple[dict[str, Any], str]:
    """Return (the config.json that matches a model's files, a line about its difference from
    `model_config`).

    If the files hold a head that differs from the embedding, the head is not tied. transformers
    5.22.2 loads such files the same way (`tie_weights`). Otherwise return (`model_config`, ""). The
    two tensors are read up to their first difference.
    """
    config = config_of(model_config, name)
    if not ties(config):
        return model_config, ""
    folder = weights_folder(name, revision)
    entries = safetensors_files.open_folder(folder)
    vocabulary = getattr(config.get_text_config(), "vocab_size", 0)
    if vocabulary and sum(entry.shape[:1] == (vocabulary,) for entry in entries.values()) < 2:
        return model_config, ""  # an embedding without a head
    stamps = (
        f"{file}:{(folder / file).stat().st_mtime_ns}"
        for file in sorted({entry.file for entry in entries.values()})
    )
    return _compared(model_config, name, auto_class, str(folder), *stamps)


@once_a_config
def _compared(
    model_config: dict[str, Any], name: str, auto_class: str, folder: str, *_: str
) -> tuple[dict[str, Any], str]:
    model = empty_model(model_config, "eager", name, auto_class=auto_class)
    weights = open_files(name, Path(folder))
    differing = _differing(model, weights)
    if not differing:
        return model_config, ""

    untied = {"tie_word_embeddings": False}
    nested = {
        key: value
        for key, value in model_config.items()
        if isinstance(value, dict) and untied.keys() <= value.keys()
    }
    changed = model_config | {key: value | untied for key, value in nested.items()} | untied
    alias, first = differing[0]
    if alias in tied_names(empty_model(changed, "eager", name, auto_class=auto_class)):
        rule = (
            f"{alias} and {first} differ in its files, and a {model_config['model_type']} always"
            " ties them"
        )
        raise refuse(f"model = {name}", rule, f"delete {alias} from its files")
    note = f"{alias} differs from {first} in its files, so the two are not tied, as in transformers"
    return changed, f'model = {name}: {note}. The run has "tie_word_embeddings": false'


def _differing(model: PreTrainedModel, weights: Weights) -> list[tuple[str, str]]:
    """Return the pairs of tied names under which the files store different values."""
    found = find_stored(model, list(weights.where))
    tied = [
        (alias, first)
        for alias, first in tied_names(model).items()
        if alias in found and first in found
    ]
    pairs = [(alias, first) for alias, first in tied if found[alias] != found[first]]
    # Tensors of different shapes are refused later.
    same_shape = [
        (alias, first)
        for alias, first in pairs
        if weights.shape_of(found[alias]) == weights.shape_of(found[first])
    ]
    return [
        (alias, first)
        for alias, first in same_shape
        if not weights.same(found[alias], found[first])
    ]
