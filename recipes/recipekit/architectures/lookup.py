"""Search for a model's config.json and tokenizer, and a check that a task can train the model.

Only `config_on_hub` downloads anything.
"""

import ast
import functools
import json
import re
from collections.abc import Collection
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..spec.errors import ConfigError, Problem, config_error
from ..spec.hub import is_hub_id, published_config, snapshot_of
from ..spec.task_specs import TASKS, task_of_architectures
from .small_files import check_tokenizer_files

SHIPPED = Path(__file__).parent


def model_config(model: str, task: str = "pretrain", revision: str = "") -> dict[str, Any] | None:
    """Read a model's config.json. The model is a hub id or a folder.

    The file comes from the folder, the hub's cache, or the shipped architectures. If a `revision`
    is given, the shipped architectures are not used. The result is None if config.json is not
    found. Raises `ConfigError` for a folder without a readable config.json, and for a model that
    the task cannot train.
    """
    folder = Path(model)
    if folder.is_dir():
        return read_config(folder / "config.json", model, task)
    if not is_hub_id(model) or folder.is_file():
        raise config_error(
            f"model = {model}",
            "is not a folder on this machine",
            "set --model to a folder with a config.json, or to a hub id ORG/NAME",
        )
    if cached := folder_of(model, revision=revision):
        return read_config(cached / "config.json", model, task)
    shipped = SHIPPED / (model.replace("/", "--") + ".json")
    return read_config(shipped, model, task) if shipped.exists() and not revision else None


def folder_of(model: str, file: str = "config.json", revision: str = "") -> Path | None:
    """Return the folder that contains a model's `file`.

    This is a local folder or a snapshot in the hub's cache. The result is None if the file is not
    on this machine at that revision.
    """
    if Path(model).is_dir():
        return Path(model)
    cached = snapshot_of(model, revision)
    return cached if cached and (cached / file).exists() else None


# Families among transformers' causal language models that attend in both directions, with the key
# in config.json that restricts them to earlier tokens.
BIDIRECTIONAL_FAMILIES = {
    **dict.fromkeys(
        (
            *(
                "bert",
                "bert-generation",
                "big_bird",
                "camembert",
                "data2vec-text",
                "electra",
                "ernie",
                "megatron-bert",
                "reformer",
                "rembert",
            ),
            *(
                "roberta",
                "roberta-prelayernorm",
                "roc_bert",
                "roformer",
                "xlm-roberta",
                "xlm-roberta-xl",
                "xmod",
            ),
        ),
        "is_decoder",
    ),
    "xlm": "causal",
    "cpmant": "",
    "xlnet": "",
}
CAUSAL_LM_CLASS = TASKS["pretrain"].auto_class
MASKED_LM_CLASS = TASKS["masked_lm"].auto_class
SHIPPED_ORG = "recipekit/"  # prefix of models that no other program knows
NO_CONFIG = (
    "the folder contains no config.json",
    "set --model to the folder that save_pretrained wrote",
)
USE_CAUSAL_MODEL = "use a causal language model of recipes/SUPPORT.md"


def read_config(path: Path, model: str, task: str = "pretrain") -> dict[str, Any]:
    """Read a config.json. `model` is the user's name for the model, which messages show.

    An empty `task` selects the task that fits the model. Raises `ConfigError` if the file cannot be
    read, or if the task cannot train the model.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise _missing_config_error(path.parent, model) from None
    except OSError as error:
        raise config_error(
            str(path), f"cannot be read: {error.strerror}", "give this user permission to read it"
        ) from None
    return parse_config(content, str(path), model, task)


def config_on_hub(model: str, task: str, revision: str) -> dict[str, Any]:
    """Download a config.json that is not on this machine.

    Raises `ConfigError` in the same cases as `read_config`, or if the file is not on the hub.
    """
    if (content := published_config(model, revision)) is None:
        raise config_error(f"model = {model}", *NO_CONFIG)
    return parse_config(content, f"{model}/config.json", model, task)


def parse_config(content: bytes, path: str, model: str, task: str) -> dict[str, Any]:
    """Return the parsed content of a config.json. `path` is the file's name in messages.

    Raises `ConfigError` in the same cases as `read_config`.
    """
    try:
        config = json.loads(content)
    except ValueError as error:  # invalid JSON or UTF-8
        raise config_error(path, f"is not JSON: {error}", "download the model again") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise config_error(path, "has no model_type", "use the config.json of a transformers model")
    if not isinstance(config.get("architectures") or [], list):
        raise config_error(
            path,
            "its architectures must be a list of class names",
            'write it as in "architectures": ["LlamaForCausalLM"], or delete the line',
        )
    if problems := _trainability_problems(config, task or fitting_task(config), f"model = {model}"):
        raise ConfigError(problems)
    return config


def with_labels(
    config: dict[str, Any], num_labels: int, names: list[str] | None = None
) -> dict[str, Any]:
    """Set the number of labels in a config.json. If it is 0, the file's labels do not change.

    `names` are used if their number is `num_labels`. Without `names`, the same holds for the label
    names of the file.
    """
    own = config.get("id2label") or {}
    if not num_labels or (not names and len(own) == num_labels):
        return config
    found = {"num_labels": num_labels}
    if names and len(names) == num_labels:
        found = {
            "id2label": {str(number): name for number, name in enumerate(names)},
            "label2id": {name: number for number, name in enumerate(names)},
        }
    return {
        key: value
        for key, value in config.items()
        if key not in ("num_labels", "id2label", "label2id")
    } | found


def fitting_task(config: dict[str, Any]) -> str:
    """Return the task that trains the model described by a config.json.

    This is the task of the model's architectures. If there is no such task, it is the first task
    that accepts the model's type, otherwise "pretrain".
    """
    named = task_of_architectures(config.get("architectures"))
    return next((task for task in (named, *TASKS) if task_mismatch(config, task) is None), named)


def _missing_config_error(folder: Path, model: str) -> ConfigError:
    if not folder.is_dir():
        return config_error(
            f"model = {model}",
            "is not a folder on this machine",
            "set --model to a folder with a config.json",
        )
    if gguf := sorted(folder.glob("*.gguf")):
        rule = f"the folder contains {gguf[0].name}, a format for inference, but no config.json"
        return config_error(
            f"model = {model}",
            rule,
            "use the safetensors files of the model that it was converted from",
        )
    if (folder / "adapter_config.json").exists():
        return config_error(
            f"model = {model}",
            "the folder contains an adapter but no config.json",
            "set --model to the base model, or to a folder with the adapter merged into it",
        )
    return config_error(f"model = {model}", *NO_CONFIG)


def _trainability_problems(config: dict[str, Any], task: str, where: str) -> list[Problem]:
    """Return the reasons, as far as config.json shows them, why a task cannot train a model."""
    problems = []
    if problem := task_mismatch(config, task):
        rule, fix = problem
        fitting = [name for name in TASKS if task_mismatch(config, name) is None]
        problems.append(
            Problem(where, rule, f"use --task {' or '.join(fitting)}" if fitting else fix)
        )
    text = config.get("text_config")
    for block in (config, text if isinstance(text, dict) else {}):
        if quantised := block.get("quantization_config") or block.get("compression_config"):
            # early bitsandbytes configs had no quant_method
            method = (
                (quantised.get("quant_method") or "bitsandbytes")
                if isinstance(quantised, dict)
                else quantised
            )
            fix = (
                "use the unquantised model. If its files contain unquantised weights, delete the"
                " block"
            )
            problems.append(
                Problem(
                    where,
                    f"is quantised: its config.json has a quantization_config of {method}",
                    fix,
                )
            )
    return problems


def task_mismatch(config: dict[str, Any], task: str) -> tuple[str, str] | None:
    """Return (rule, fix) if a task does not train this kind of model, or None if it does."""
    kind, facts = config["model_type"], TASKS[task]
    types, causal = model_types_of(facts.auto_class), facts.auto_class == CAUSAL_LM_CLASS
    noun = _model_phrase(facts.auto_class)
    others = USE_CAUSAL_MODEL if causal else f"use {noun} of transformers"

    def is_decoder() -> bool:
        return kind in model_types_of(CAUSAL_LM_CLASS) and not task_mismatch(config, "pretrain")

    if facts.pairs and not causal and kind in types and not is_decoder():
        rule = f"a {kind} is not a decoder, so its output for a row would change with the padding"
        return f"{rule} after it", USE_CAUSAL_MODEL
    if own := _custom_class(config, facts.auto_class):
        rule = f"its auto_map requires the model's own code ({own}), which recipes never run"
        return rule, f"{others}, whose class is in transformers itself"
    if causal and (problem := _causal_mismatch(config, others)):
        return problem
    if facts.bidirectional and (problem := _masked_mismatch(config, types, others)):
        return problem
    if kind not in types:
        rule = f"transformers {version('transformers')} does not support a {kind} as {noun}"
        return rule, others
    return None


def _custom_class(config: dict[str, Any], auto_class: str) -> str:
    """Return the class in a model's own code that transformers does not have, or ""."""
    kind, types = config["model_type"], model_types_of(auto_class)
    auto_map = config["auto_map"] if isinstance(config.get("auto_map"), dict) else {}
    own = str(auto_map.get(auto_class) or next(iter(auto_map.values()), ""))
    if kind not in types:
        return own

    # transformers may have adopted the class since
    names = [name.lower() for name in types[kind]]
    same = auto_map.get(auto_class) is None or own.rpartition(".")[2].lower() in names
    return "" if same else own


def _causal_mismatch(config: dict[str, Any], others: str) -> tuple[str, str] | None:
    """Return (rule, fix) if a model is not a decoder that predicts the next token, or None."""
    kind = config["model_type"]
    if config.get("is_encoder_decoder"):
        return f"a {kind} is an encoder-decoder, but recipes train only decoders", others

    architectures = config.get("architectures") or ()
    masked = any(str(name).endswith("ForMaskedLM") for name in architectures)
    switch = BIDIRECTIONAL_FAMILIES.get(kind)
    reads_ahead = switch is not None and not config.get(switch)
    if not reads_ahead and not (masked and kind not in model_types_of(CAUSAL_LM_CLASS)):
        return None
    example = f'The config.json of a causal {kind} has "{switch}": true'
    fix = f"{others}. {example}" if switch else others
    return f"a {kind} reads the tokens that it should predict", fix


def _masked_mismatch(
    config: dict[str, Any], types: Collection[str], others: str
) -> tuple[str, str] | None:
    """Return (rule, fix) if a model is not an encoder, or None."""
    kind = config["model_type"]
    if config.get("is_encoder_decoder"):
        return f"a {kind} is an encoder-decoder, but this task trains only encoders", others
    switch = BIDIRECTIONAL_FAMILIES.get(kind)
    if kind in types and switch and config.get(switch):
        rule = f'a {kind} whose config.json says "{switch}": true is causal'
        return rule, f"{others}, or delete that line"
    decoders = model_types_of(CAUSAL_LM_CLASS).keys() - model_types_of(MASKED_LM_CLASS).keys()
    if kind in types and kind in decoders and not switch:
        return f"a {kind} is causal: a token does not depend on the tokens after it", others
    return None


def _model_phrase(auto_class: str) -> str:
    """Return a phrase that describes the models of an Auto class.

    Example: "an image classification model" for AutoModelForImageClassification.
    """
    if auto_class == CAUSAL_LM_CLASS:
        return "a causal language model"
    words = [
        word.lower()
        for word in re.findall(r"[A-Z][a-z]+|[A-Z]+", auto_class.removeprefix("AutoModelFor"))
    ]
    article = "an" if words[0][0] in "aeiou" else "a"
    return f"{article} {' '.join('language' if word == 'lm' else word for word in words)} model"


@functools.cache
def model_types_of(auto_class: str) -> dict[str, tuple[str, ...]]:
    """Return the models of an Auto class in the installed transformers: model_type -> classes.

    They are read from the source code of transformers, because importing it takes seconds.
    """
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None, "make setup installs transformers"
    source = (Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py").read_text()
    mapping = re.search(
        rf"^class {auto_class}\(.*?_model_mapping = (\w+)", source, re.DOTALL | re.MULTILINE
    )
    assert mapping is not None, f"transformers 5.22.2 has {auto_class}"
    table = re.search(
        rf"^{mapping[1]}_NAMES = OrderedDict\((.*?)^\)", source, re.DOTALL | re.MULTILINE
    )
    assert table is not None, f"transformers 5.22.2 has {mapping[1]}_NAMES"
    return {
        kind: (names,) if isinstance(names, str) else tuple(names)
        for kind, names in ast.literal_eval(table[1].strip())
    }


def check_config_only_model(model: str, init: str, tokenizer: str | None) -> list[Problem]:
    """Report missing weights or a missing tokenizer for a shipped config.json.

    This repository does not contain either of them. `tokenizer` is "" for the model's own
    tokenizer, or None for a task without a tokenizer.
    """
    ways = {"weights": "--init random"} if is_config_only(model) and init == "pretrained" else {}
    if tokenizer is not None and is_config_only(tokenizer or model):
        ways["tokenizer"] = "--tokenizer bytes"
    if not ways:
        return []
    name = f"model = {model}" if "weights" in ways or not tokenizer else f"tokenizer = {tokenizer}"
    return [
        Problem(
            name,
            f"has only a config.json in this repository, without {' and '.join(ways)}",
            f"use {' '.join(ways.values())}",
        )
    ]


def is_config_only(name: str) -> bool:
    """Return True for a model that exists only as a config.json in this repository."""
    return (
        name.startswith(SHIPPED_ORG)
        and (SHIPPED / (name.replace("/", "--") + ".json")).exists()
        and not is_local(name)
    )


def is_local(model: str, revision: str = "") -> bool:
    """Return True if the model's files are on this machine, in a folder or in the hub's cache."""
    return folder_of(model, revision=revision) is not None


def local_tokenizer(model: str, tokenizer: str = "") -> Path | None:
    """Return the folder, or the .gguf file, of the `tokenizer`. "" means the model's own tokenizer.

    The result is None if the tokenizer is built in code or comes from the hub. Raises `ConfigError`
    for a folder that does not exist or contains no tokenizer.
    """
    flag, name = ("--tokenizer", tokenizer) if tokenizer else ("--model", model)
    folder = Path(name).expanduser()
    if name == "bytes":
        return None
    if not folder.exists() and not is_hub_id(name):
        raise config_error(
            f"{flag} {name}",
            "the folder does not exist, and the name is not a hub id (ORG/NAME)",
            "check the path",
        )
    if not folder.is_dir():
        return None
    if any(
        file for pattern in ("tokenizer*", "*.model", "vocab.*") for file in folder.glob(pattern)
    ):
        check_tokenizer_files(folder)
        return folder
    if gguf := sorted(folder.glob("*.gguf")):
        return gguf[0]
    raise config_error(
        f"{flag} {folder}",
        "the folder contains no tokenizer (tokenizer.json, ...)",
        "set --tokenizer to a hub id, a folder or bytes",
    )
