"""Files of tiny models, with a tied head and with an untied head."""

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from built_models import build_model
from recipekit.architectures import families
from recipekit.spec.recipe import Recipe
from safetensors.torch import load_file, save_file
from tiny_models import ds_config

FILE = "model.safetensors"
Tensors = dict[str, torch.Tensor]


@functools.cache
def published(kind: str, task: str) -> tuple[dict[str, Any], Tensors]:
    """Return the config.json and the tensors of a tiny random model, as transformers saves them."""
    config = families.tiny_config(kind, 264, task)
    model = build_model(
        Recipe(model="none", init="random", seed=5, task=task),
        config,
        None,
        ds_config(0),
        torch.device("cpu"),
    ).model
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = {name: value.clone() for name, value in load_file(Path(folder) / FILE).items()}
        return json.loads((Path(folder) / "config.json").read_text()), tensors


def save_model(
    folder: Path,
    kind: str,
    task: str = "pretrain",
    tensors: Callable[[Tensors], Tensors] = dict,
    **changes: Any,
) -> None:
    """Save a tiny model as transformers does.

    `tensors` changes the tensors in its file, and `changes` are keys of its config.json.
    """
    config, saved = published(kind, task)
    folder.mkdir(exist_ok=True)
    save_file(
        tensors({name: value.clone() for name, value in saved.items()}),
        folder / FILE,
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config | changes))


def with_head(name: str, embedding: str, own: bool = True, **more: torch.Tensor) -> Any:
    """Return a function that adds an LM head to the files of a tied model.

    The head equals the embedding. If `own` is set, one of its values is changed.
    """

    def add(tensors: Tensors) -> Tensors:
        head = tensors[embedding].clone()
        head[-1, -1] += 0.5 * own
        return tensors | {name: head} | more

    return add


def folder_of(
    path: Path, kind: str = "llama", task: str = "pretrain", own: bool = True, **changes: Any
) -> str:
    name, embedding = HEADS[kind]
    save_model(
        path,
        kind,
        task,
        lambda tensors: with_head(name, embedding, own)(
            {key: value for key, value in tensors.items() if key != name}
        ),
        **changes,
    )
    return str(path)


HEADS = {
    "llama": ("lm_head.weight", "model.embed_tokens.weight"),
    "mixtral": ("lm_head.weight", "model.embed_tokens.weight"),
    "gpt2": ("lm_head.weight", "transformer.wte.weight"),
    "bert": ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    "modernbert": ("decoder.weight", "model.embeddings.tok_embeddings.weight"),
}
TIED: dict[str, Any] = {"tie_word_embeddings": True}


def config_json(folder: str) -> dict[str, Any]:
    return json.loads((Path(folder) / "config.json").read_text())
