"""Where a model's config.json and tokenizer lie, and whether recipes can train the model; nothing is downloaded."""

import functools
import json
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..hub import in_hub_cache, is_hub_id
from ..refusal import Problem, Refusal, refuse

SHIPPED = Path(__file__).parent


def model_config(model: str) -> dict[str, Any] | None:
    """Reads the config.json of a model, a hub id or a folder: from the folder, the local hub cache, or the shipped architectures; None if none has it.

    Raises `Refusal` for a folder without a readable config.json, and for a model that recipes cannot train.
    """
    folder = Path(model)
    if folder.is_dir():
        return read_config(folder / "config.json", model)
    if model.startswith((".", "/", "~")):
        raise refuse(f"model = {model}", "is no folder on this machine", "give a folder that holds config.json, or a hub id ORG/NAME")
    cached = sorted(in_hub_cache(model).glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime)
    if cached:
        return read_config(cached[-1], model)
    shipped = SHIPPED / (model.replace("/", "--") + ".json")
    return read_config(shipped, model) if shipped.exists() else None


# Families among the causal language models of transformers that attend both ways, and the key of config.json with which they look back only.
READS_AHEAD = {
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "reformer", "rembert"),
            *("roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
        ),
        "is_decoder",
    ),
    "xlm": "causal",
    "cpmant": "",
    "xlnet": "",
}
OTHERS = "use a causal language model of recipes/SUPPORT.md"


def read_config(path: Path, model: str) -> dict[str, Any]:
    """Reads a config.json; `model` is the user's name of it in messages. Raises `Refusal` if it cannot be read, or if recipes cannot train the model."""
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _no_config(path.parent, model) from None
    except OSError as error:
        raise refuse(str(path), f"cannot be read: {error.strerror}", "make it readable for this user") from None
    except ValueError as error:  # of JSON, or of UTF-8
        raise refuse(str(path), f"is not JSON: {error}", "download the model again") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise refuse(str(path), "names no model_type", "give the config.json of a transformers model")
    if problems := _untrainable(config, f"model = {model}"):
        raise Refusal(problems)
    return config


def _no_config(folder: Path, model: str) -> Refusal:
    if not folder.is_dir():
        return refuse(f"model = {model}", "is no folder on this machine", "give a folder that holds config.json")
    if gguf := sorted(folder.glob("*.gguf")):
        rule = f"the folder holds {gguf[0].name}, and GGUF is a format for inference, and no config.json"
        return refuse(f"model = {model}", rule, "use the safetensors files of the model that it was made from")
    if (folder / "adapter_config.json").exists():
        return refuse(f"model = {model}", "the folder holds an adapter, and no config.json", "give the base model, or merge the adapter into it and save that")
    return refuse(f"model = {model}", "the folder holds no config.json", "give the folder that save_pretrained wrote")


def _untrainable(config: dict[str, Any], where: str) -> list[Problem]:
    """Lists why recipes cannot train a model, as far as its config.json shows."""
    kind, problems, types = config["model_type"], [], causal_types()
    auto_map = config["auto_map"] if isinstance(config.get("auto_map"), dict) else {}
    own = str(auto_map.get("AutoModelForCausalLM") or next(iter(auto_map.values()), ""))  # the class that replaces one of transformers
    same = auto_map.get("AutoModelForCausalLM") is None or own.rpartition(".")[2].lower() == types.get(kind, "").lower()
    masked = any(str(name).endswith("ForMaskedLM") for name in config.get("architectures") or ())
    switch = READS_AHEAD.get(kind)
    if own and (kind not in types or not same):
        rule = f"its auto_map names code of the model's own ({own}), which recipes never run"
        problems.append(Problem(where, rule, f"{OTHERS}, whose class is in transformers itself"))
    elif config.get("is_encoder_decoder"):
        problems.append(Problem(where, f"a {kind} is an encoder-decoder, and recipes train decoders alone", OTHERS))
    elif (kind not in types and masked) or (switch is not None and not config.get(switch)):
        fix = f'{OTHERS}; a {kind} that looks back only says "{switch}": true in its config.json' if switch else OTHERS
        problems.append(Problem(where, f"a {kind} reads the tokens that it should predict", fix))
    elif kind not in types:
        problems.append(Problem(where, f"a {kind} is no causal language model that transformers {version('transformers')} knows", OTHERS))
    text = config.get("text_config")
    for block in (config, text if isinstance(text, dict) else {}):
        if quantised := block.get("quantization_config") or block.get("compression_config"):
            method = (quantised.get("quant_method") or "bitsandbytes") if isinstance(quantised, dict) else quantised  # that one left its name out at first
            fix = "use the unquantised model; if the weights in its files are whole, delete the block"
            problems.append(Problem(where, f"is quantised: its config.json has a quantization_config of {method}", fix))
    return problems


@functools.cache
def causal_types() -> dict[str, str]:
    """Lists the causal language models of the installed transformers, model_type -> class, from its source: importing it takes seconds."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None, "make setup installs transformers"
    source = (Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py").read_text()
    table = re.search(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict\((.*?)^\)", source, re.DOTALL | re.MULTILINE)
    assert table is not None, "transformers 5.22.2 has it"
    return dict(re.findall(r'\(\s*"([^"]+)",\s*"([^"]+)",?\s*\)', table[1]))


def is_local(model: str) -> bool:
    """Finds out whether the model's files lie on this machine: in a folder, or in the local hub cache."""
    return Path(model).is_dir() or any(in_hub_cache(model).glob("snapshots/*/config.json"))


def local_tokenizer(model: str, tokenizer: str = "") -> Path | None:
    """Finds the folder, or the .gguf file, of the `tokenizer`, or of the model's own if that is empty; None where it is made in code or comes from the hub.

    Raises `Refusal` for a folder that does not exist or holds none.
    """
    flag, name = ("--tokenizer", tokenizer) if tokenizer else ("--model", model)
    folder = Path(name).expanduser()
    if name == "bytes":
        return None
    if not folder.exists() and not is_hub_id(name):
        raise refuse(f"{flag} {name}", "there is no such folder, and it is not a hub id (ORG/NAME)", "check the path")
    if not folder.is_dir():
        return None
    if any(file for pattern in ("tokenizer*", "*.model", "vocab.*") for file in folder.glob(pattern)):
        return folder
    if gguf := sorted(folder.glob("*.gguf")):
        return gguf[0]
    raise refuse(f"{flag} {folder}", "the folder holds no tokenizer (tokenizer.json, ...)", "use --tokenizer with a hub id, a folder, or bytes")
