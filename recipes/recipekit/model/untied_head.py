"""Detection of a head that differs from the embedding although config.json ties them."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..architectures import safetensors_files
from ..spec.errors import config_error
from .empty import config_of, empty_model
from .file_keys import find_stored, tied_names, ties_embeddings
from .small import once_per_config
from .weights import Weights, open_files, weights_folder


def config_of_files(
    model_config: dict[str, Any], name: str, auto_class: str, revision: str = ""
) -> tuple[dict[str, Any], str]:
    """Return (config.json that matches a model's files, line that reports any change).

    If the files contain a head that differs from the embedding, the returned config does not tie
    the head. transformers 5.22.2 loads such files in the same way (`tie_weights`). Otherwise return
    (`model_config`, ""). The two tensors are read only up to their first difference.
    """
    config = config_of(model_config, name)
    if not ties_embeddings(config):
        return model_config, ""
    folder = weights_folder(name, revision)
    entries = safetensors_files.tensor_entries(folder)
    vocabulary = getattr(config.get_text_config(), "vocab_size", 0)
    if vocabulary and sum(entry.shape[:1] == (vocabulary,) for entry in entries.values()) < 2:
        return model_config, ""  # an embedding without a head
    stamps = (
        f"{file}:{(folder / file).stat().st_mtime_ns}"
        for file in sorted({entry.file for entry in entries.values()})
    )
    return _untied_if_different(model_config, name, auto_class, str(folder), *stamps)


@once_per_config
def _untied_if_different(
    model_config: dict[str, Any], name: str, auto_class: str, folder: str, *_: str
) -> tuple[dict[str, Any], str]:
    model = empty_model(model_config, "eager", name, auto_class=auto_class)
    weights = open_files(name, Path(folder))
    differing = _differing_ties(model, weights)
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
        raise config_error(f"model = {name}", rule, f"delete {alias} from its files")
    note = f"{alias} differs from {first} in its files, so the two are not tied, as in transformers"
    return changed, f'model = {name}: {note}. The run has "tie_word_embeddings": false'


def _differing_ties(model: PreTrainedModel, weights: Weights) -> list[tuple[str, str]]:
    """Return the pairs of tied names for which the files store different values."""
    found = find_stored(model, list(weights.where))
    tied = [
        (alias, first)
        for alias, first in tied_names(model).items()
        if alias in found and first in found
    ]
    pairs = [(alias, first) for alias, first in tied if found[alias] != found[first]]
    # Tensors with different shapes are rejected later.
    same_shape = [
        (alias, first)
        for alias, first in pairs
        if weights.shape_of(found[alias]) == weights.shape_of(found[first])
    ]
    return [
        (alias, first)
        for alias, first in same_shape
        if not weights.same_values(found[alias], found[first])
    ]
