"""Where a model's config.json and tokenizer lie, and whether a task can train the model; nothing is
downloaded.
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

from ..spec.hub import is_hub_id, published_config, snapshot_of
from ..spec.refusal import Problem, Refusal, refuse
from ..spec.task_specs import TASKS, task_of
from .small_files import check_tokenizer_files

SHIPPED = Path(__file__).parent


def model_config(model: str, task: str = "pretrain", revision: str = "") -> dict[str, Any] | None:
    """Read the config.json of a model, a hub id or a folder: from the folder, the hub's cache, or
    the shipped architectures.

    None if none of these has it. The shipped ones are no stated `revision`. Raises `Refusal` for a
    folder without a readable config.json, and for a model that the task cannot train.
    """
    folder = Path(model)
    if folder.is_dir():
        return read_config(folder / "config.json", model, task)
    if not is_hub_id(model) or folder.is_file():
        raise refuse(
            f"model = {model}",
            "is not a folder on this machine",
            "set --model to a folder with a config.json, or to a hub id ORG/NAME",
        )
    if cached := folder_of(model, revision=revision):
        return read_config(cached / "config.json", model, task)
    shipped = SHIPPED / (model.replace("/", "--") + ".json")
    return read_config(shipped, model, task) if shipped.exists() and not revision else None


def folder_of(model: str, file: str = "config.json", revision: str = "") -> Path | None:
    """Return the folder with a model's `file`: a local folder, or a snapshot in the hub's cache.

    None if the file is not on this machine at that revision.
    """
    if Path(model).is_dir():
        return Path(model)
    cached = snapshot_of(model, revision)
    return cached if cached and (cached / file).exists() else None


# Families among the causal language models of transformers that attend both ways, and the key of
# config.json with which they look back only.
READS_AHEAD = {
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
CAUSAL = TASKS["pretrain"].auto_class
OURS = "recipekit/"  # a model that no other program knows
NO_CONFIG = (
    "the folder contains no config.json",
    "set --model to the folder that save_pretrained wrote",
)
OTHERS = "use a causal language model of recipes/SUPPORT.md"


def read_config(path: Path, model: str, task: str = "pretrain") -> dict[str, Any]:
    """Reads a config.json; `model` is the user's name of it in messages.

    An empty `task` stands for the one that fits the model.

    Raises `Refusal` if the file cannot be read, or if the task cannot train the model.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise _no_config(path.parent, model) from None
    except OSError as error:
        raise refuse(
            str(path), f"cannot be read: {error.strerror}", "give this user permission to read it"
        ) from None
    return parse_config(content, str(path), model, task)


def config_on_hub(model: str, task: str, revision: str) -> dict[str, Any]:
    """Download a config.json that is not on this machine.

    Raises `Refusal` as `read_config` does, or if the hub does not have it.
    """
    if (content := published_config(model, revision)) is None:
        raise refuse(f"model = {model}", *NO_CONFIG)
    return parse_config(content, f"{model}/config.json", model, task)


def parse_config(content: bytes, path: str, model: str, task: str) -> dict[str, Any]:
    """Return the content of a config.json; `path` is its name in messages.

    Raises `Refusal` as `read_config` does.
    """
    try:
        config = json.loads(content)
    except ValueError as error:  # of JSON, or of UTF-8
        raise refuse(path, f"is not JSON: {error}", "download the model again") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise refuse(path, "has no model_type", "use the config.json of a transformers model")
    if not isinstance(config.get("architectures") or [], list):
        raise refuse(
            path,
            "its architectures must be a list of class names",
            'write it as in "architectures": ["LlamaForCausalLM"], or delete the line',
        )
    if problems := _untrainable(config, task or fitting_task(config), f"model = {model}"):
        raise Refusal(problems)
    return config


def with_labels(
    config: dict[str, Any], num_labels: int, names: list[str] | None = None
) -> dict[str, Any]:
    """Gives a config.json another number of labels, with `names` if there are so many; 0 leaves
    those that it has.
    """
    if not num_labels:
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
    """Names the task that trains the model of a config.json: that of its architectures, or else the
    first one that takes its type; "pretrain" if none does.
    """
    named = task_of(config.get("architectures"))
    return next((task for task in (named, *TASKS) if unfit(config, task) is None), named)


def _no_config(folder: Path, model: str) -> Refusal:
    if not folder.is_dir():
        return refuse(
            f"model = {model}",
            "is not a folder on this machine",
            "set --model to a folder with a config.json",
        )
    if gguf := sorted(folder.glob("*.gguf")):
        rule = f"the folder contains {gguf[0].name}, a format for inference, but no config.json"
        return refuse(
            f"model = {model}",
            rule,
            "use the safetensors files of the model that it was converted from",
        )
    if (folder / "adapter_config.json").exists():
        return refuse(
            f"model = {model}",
            "the folder contains an adapter but no config.json",
            "set --model to the base model, or to a folder with the adapter merged into it",
        )
    return refuse(f"model = {model}", *NO_CONFIG)


def _untrainable(config: dict[str, Any], task: str, where: str) -> list[Problem]:
    """Lists why a task cannot train a model, as far as its config.json shows."""
    problems = []
    if problem := unfit(config, task):
        rule, fix = problem
        fitting = [name for name in TASKS if unfit(config, name) is None]
        problems.append(
            Problem(where, rule, f"use --task {' or '.join(fitting)}" if fitting else fix)
        )
    text = config.get("text_config")
    for block in (config, text if isinstance(text, dict) else {}):
        if quantised := block.get("quantization_config") or block.get("compression_config"):
            # that one left its name out at first
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


def unfit(config: dict[str, Any], task: str) -> tuple[str, str] | None:
    """Says why a model is of no kind that a task trains, and what to use instead (rule, fix); None
    if it is of one.
    """
    kind, facts = config["model_type"], TASKS[task]
    types, causal = types_of(facts.auto_class), facts.auto_class == CAUSAL
    noun = _noun(facts.auto_class)
    others = OTHERS if causal else f"use {noun} of transformers"

    is_decoder = lambda: kind in types_of(CAUSAL) and not unfit(config, "pretrain")  # noqa: E731
    if facts.pairs and not causal and kind in types and not is_decoder():
        rule = f"a {kind} is not a decoder, so its output for a row would change with the padding"
        return f"{rule} after it", OTHERS
    if own := _own_class(config, facts.auto_class):
        rule = f"its auto_map requires the model's own code ({own}), which recipes never run"
        return rule, f"{others}, whose class is in transformers itself"
    if causal and (problem := _not_causal(config, others)):
        return problem
    if facts.masked and (problem := _not_masked(config, types, others)):
        return problem
    if kind not in types:
        rule = f"transformers {version('transformers')} does not support a {kind} as {noun}"
        return rule, others
    return None


def _own_class(config: dict[str, Any], auto_class: str) -> str:
    """Return the class of a model's own code that transformers does not have; "" without one."""
    kind, types = config["model_type"], types_of(auto_class)
    auto_map = config["auto_map"] if isinstance(config.get("auto_map"), dict) else {}
    own = str(auto_map.get(auto_class) or next(iter(auto_map.values()), ""))
    if kind not in types:
        return own

    # The class may be the one that transformers has taken over.
    names = [name.lower() for name in types[kind]]
    same = auto_map.get(auto_class) is None or own.rpartition(".")[2].lower() in names
    return "" if same else own


def _not_causal(config: dict[str, Any], others: str) -> tuple[str, str] | None:
    """Return why a model is no decoder that predicts the next token, and the fix."""
    kind = config["model_type"]
    if config.get("is_encoder_decoder"):
        return f"a {kind} is an encoder-decoder, but recipes train only decoders", others

    architectures = config.get("architectures") or ()
    masked = any(str(name).endswith("ForMaskedLM") for name in architectures)
    switch = READS_AHEAD.get(kind)
    reads_ahead = switch is not None and not config.get(switch)
    if not reads_ahead and not (masked and kind not in types_of(CAUSAL)):
        return None
    example = f'The config.json of a causal {kind} has "{switch}": true'
    fix = f"{others}. {example}" if switch else others
    return f"a {kind} reads the tokens that it should predict", fix


def _not_masked(
    config: dict[str, Any], types: Collection[str], others: str
) -> tuple[str, str] | None:
    """Return why a model is no encoder that predicts masked tokens, and the fix."""
    kind = config["model_type"]
    if config.get("is_encoder_decoder"):
        return f"a {kind} is an encoder-decoder, but this task trains only encoders", others
    switch = READS_AHEAD.get(kind)
    if kind in types and switch and config.get(switch):
        rule = f'a {kind} whose config.json says "{switch}": true is causal'
        return rule, f"{others}, or delete that line"
    return None


def _noun(auto_class: str) -> str:
    """Return a phrase for the models of an Auto class: "an image classification model" for
    AutoModelForImageClassification.
    """
    if auto_class == CAUSAL:
        return "a causal language model"
    words = [
        word.lower()
        for word in re.findall(r"[A-Z][a-z]+|[A-Z]+", auto_class.removeprefix("AutoModelFor"))
    ]
    article = "an" if words[0][0] in "aeiou" else "a"
    return f"{article} {' '.join('language' if word == 'lm' else word for word in words)} model"


@functools.cache
def types_of(auto_class: str) -> dict[str, tuple[str, ...]]:
    """Lists the models that an Auto class of the installed transformers makes, model_type ->
    classes, from its source: importing it takes seconds.
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


def check_own_names(model: str, init: str, tokenizer: str | None) -> list[Problem]:
    """Refuse to read weights or a tokenizer of a model that exists only as a config.json of this
    repository.

    `tokenizer` is "" for the model's own, None for a task without one.
    """
    ways = {"weights": "--init random"} if is_ours(model) and init == "pretrained" else {}
    if tokenizer is not None and is_ours(tokenizer or model):
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


def is_ours(name: str) -> bool:
    """Return True for a model that exists only as a config.json of this repository."""
    return (
        name.startswith(OURS)
        and (SHIPPED / (name.replace("/", "--") + ".json")).exists()
        and not is_local(name)
    )


def is_local(model: str, revision: str = "") -> bool:
    """Return True if the model's files are on this machine: in a folder, or in the hub's cache."""
    return folder_of(model, revision=revision) is not None


def local_tokenizer(model: str, tokenizer: str = "") -> Path | None:
    """Finds the folder, or the .gguf file, of the `tokenizer`, or of the model's own if that is
    empty; None where it is made in code or comes from the hub.

    Raises `Refusal` for a folder that does not exist or holds none.
    """
    flag, name = ("--tokenizer", tokenizer) if tokenizer else ("--model", model)
    folder = Path(name).expanduser()
    if name == "bytes":
        return None
    if not folder.exists() and not is_hub_id(name):
        raise refuse(
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
    raise refuse(
        f"{flag} {folder}",
        "the folder contains no tokenizer (tokenizer.json, ...)",
        "set --tokenizer to a hub id, a folder or bytes",
    )
