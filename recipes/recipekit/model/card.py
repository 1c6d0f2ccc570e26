"""The model card of an export: a README.md that reports the run's recorded facts."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..architectures.lookup import folder_of
from ..architectures.small_files import CARD_FILE
from ..spec.run_folder import (
    ADAPTER_KEY,
    COMMITS_KEY,
    files_of_run,
    read_metrics,
    read_run_json,
    unit_of_metrics,
)
from ..spec.task_specs import TASKS

BASE_LICENSE = "base_license"  # run.json key for the licence in the base model's card
LICENSE_KEYS = ("license", "license_name", "license_link")  # licence keys in a card's header
CARD_MARK = re.compile(r"<!-- written by recipekit, (\w+) -->\n\Z")
MAX_LISTED_FILES = 10  # maximum number of data files that a card lists
VERSIONS = ("python", "torch", "deepspeed", "transformers", "datasets")
HUB = "https://huggingface.co"

RunMetadata = Mapping[str, Any]  # content of run.json
Metrics = Mapping[str, Any]  # a line of metrics.jsonl


@dataclass(frozen=True)
class Base:
    """The model from which a run started."""

    name: str  # a Hub id, or a folder name without its path; "" if unknown
    hub_id: str  # "" for local folders and random weights


def card_of_run(run: Path, step: int, merged: bool) -> str:
    """Return the card for a run's model after `step`, or "" if the folder has no run.json.

    `merged` is True if the run's adapter is merged into the weights. It has no effect without an
    adapter.
    """
    facts = read_run_json(run)
    if not facts:
        return ""
    lines = [line for line in read_metrics(run) if line["step"] <= step]
    return card_of(facts, lines, files_of_run(run), step, merged)


def card_of(
    facts: RunMetadata,
    lines: Sequence[Metrics],
    files: Mapping[str, Mapping[str, str]],
    step: int,
    merged: bool,
) -> str:
    """Return the card from run.json, metrics.jsonl up to `step`, and data_files.json.

    Missing facts are left out. The last line of the card contains a digest, which shows whether the
    card has been edited.
    """
    base, is_adapter = (
        _base_of(facts),
        not merged and bool(_json_object(_json_object(facts, "identity"), ADAPTER_KEY)),
    )
    rows = [
        *_base_rows(facts, base, merged),
        *_data_rows(facts, files),
        *_training_rows(facts, lines, step),
    ]
    blocks = [
        "\n".join(["---", *_header(facts, base, is_adapter), "---"]),
        f"# {_json_object(facts, 'recipe').get('name') or 'Model'}",
        _introduction(facts, base, is_adapter),
        _table(("fact", "value"), rows),
        *_evaluation_section(lines),
        *_strategy_section(facts),
    ]
    text = "\n\n".join(blocks) + "\n\n"
    return f"{text}<!-- written by recipekit, {_card_digest(text)} -->\n"


def is_unchanged(card: Path) -> bool:
    """Return True if nobody has edited a card since `card_of` wrote it.

    A new export may replace an unedited card.
    """
    text = card.read_text(encoding="utf-8", errors="replace")
    found = CARD_MARK.search(text)
    return found is not None and found[1] == _card_digest(text[: found.start()])


def license_of(model: str, revision: str = "") -> dict[str, str]:
    """Return the licence in a local base model's card, or {} without a licence.

    An unreadable header is treated as missing.
    """
    folder = folder_of(model, CARD_FILE, revision)
    if folder is None or not (folder / CARD_FILE).is_file():
        return {}
    from huggingface_hub import repocard

    cards: Any = repocard  # yaml is not a direct requirement of this package
    try:
        header = cards.metadata_load(folder / CARD_FILE) or {}
    except (OSError, ValueError, TypeError, cards.yaml.YAMLError):
        return {}
    return {key: header[key] for key in LICENSE_KEYS if isinstance(header.get(key), str)}


# Header and text


def _header(facts: RunMetadata, base: Base, is_adapter: bool) -> list[str]:
    """Return the YAML lines that the Hub reads."""
    found: dict[str, str | list[str]] = {}
    if base.hub_id:
        found |= {
            "base_model": base.hub_id,
            "base_model_relation": "adapter" if is_adapter else "finetune",
        }
    found["library_name"] = "peft" if is_adapter else "transformers"
    if datasets := _json_object(_json_object(facts, COMMITS_KEY), "datasets"):
        found["datasets"] = list(datasets)
    if base.hub_id:
        found |= _json_object(facts, BASE_LICENSE)
    return [line for key, value in found.items() for line in _yaml(key, value)]


def _yaml(key: str, value: str | list[str]) -> list[str]:
    if isinstance(value, list):
        return [f"{key}:", *(f"- {_scalar(item)}" for item in value)]
    return [f"{key}: {_scalar(value)}"]


def _scalar(value: str) -> str:
    """Return `value` as a YAML scalar.

    A JSON string is a valid scalar. A name needs no quotes if it begins with a letter and contains
    at most one slash.
    """
    plain = re.fullmatch(r"[A-Za-z][\w.-]*(/[\w.-]+)?", value) and value.lower() not in (
        "yes",
        "no",
        "on",
        "off",
        "true",
        "false",
        "null",
        "y",
        "n",
    )
    return value if plain else json.dumps(value, ensure_ascii=False)


def _introduction(facts: RunMetadata, base: Base, is_adapter: bool) -> str:
    """Return the first paragraph, which describes how the model was made."""
    recipe, name = _json_object(facts, "recipe"), base.name
    task = TASKS.get(str(recipe.get("task")))
    if recipe.get("init") == "random":
        made = (
            f"A model with the architecture of {name}, trained from random weights"
            if name
            else "A model trained from random weights"
        )
    elif is_adapter:
        made = f"An adapter for {name}" if name else "An adapter"
    else:
        made = f"{name}, trained further" if name and recipe.get("init") else "A trained model"
    tiny = (
        " `--tiny` has reduced its size: it is a trial, not a useful model."
        if recipe.get("tiny")
        else ""
    )
    about = f" (task `{recipe['task']}`: {task.about})" if task else ""
    return f"{made} with DeepSpeed recipes{about}.{tiny}"


def _base_of(facts: RunMetadata) -> Base:
    """Return the base model.

    If the model is a local folder, the run's identity includes a hash of its config.json.
    """
    recipe = _json_object(facts, "recipe")
    model = str(recipe.get("model") or "")
    if not model:
        return Base("", "")
    if (
        "model_config" in _json_object(facts, "identity")
        or model.startswith((".", "/", "~"))
        or model.count("/") > 1
    ):
        return Base(f"`{Path(model).name}`", "")
    return Base(f"[{model}]({HUB}/{model})", model if recipe.get("init") == "pretrained" else "")


# Tables


def _base_rows(facts: RunMetadata, base: Base, merged: bool) -> list[tuple[str, str]]:
    name, commit = base.name, _json_object(facts, COMMITS_KEY).get("model")
    licence = _json_object(facts, BASE_LICENSE)
    stated = licence.get("license_name") or licence.get("license")
    what = "architecture" if _json_object(facts, "recipe").get("init") == "random" else "base model"
    link = licence.get("license_link", "")
    return [
        *([(what, f"{name} at commit `{commit}`" if commit else name)] if name else []),
        *(
            [
                (
                    "licence of the base model",
                    f"{stated}, as its card says{f' ({link})' if link else ''}",
                )
            ]
            if stated
            else []
        ),
        *_adapter_rows(_json_object(_json_object(facts, "identity"), ADAPTER_KEY), merged),
    ]


def _adapter_rows(adapter: Mapping[str, Any], merged: bool) -> list[tuple[str, str]]:
    if not adapter.get("peft_type"):
        return []
    numbers = [
        f"{name} {adapter[key]}"
        for name, key in (("rank", "r"), ("alpha", "lora_alpha"))
        if adapter.get(key)
    ]
    return [
        (
            "adapter",
            ", ".join([str(adapter["peft_type"]), *numbers, *["merged into the weights"] * merged]),
        )
    ]


def _data_rows(facts: RunMetadata, files: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    recipe, datasets = (
        _json_object(facts, "recipe"),
        _json_object(_json_object(facts, COMMITS_KEY), "datasets"),
    )
    rows = [
        ("data set", f"[{name}]({HUB}/datasets/{name}) at commit `{commit}`")
        for name, commit in datasets.items()
    ]
    rows += [("data set", "built-in text")] if recipe.get("dataset") == "builtin" else []
    if len(datasets) == 1 and recipe.get("dataset") in datasets:
        rows += [(name, str(recipe[name])) for name in ("subset", "split") if recipe.get(name)]
    listed = [(file, digest) for of_domain in files.values() for file, digest in of_domain.items()]
    rows += [
        ("data file", f"`{Path(file).name}`, fingerprint `{digest}`")
        for file, digest in listed[:MAX_LISTED_FILES]
    ]
    more = len(listed) - MAX_LISTED_FILES
    return rows + (
        [("data files", f"{more} more; data_files.json of the run lists all")] if more > 0 else []
    )


def _training_rows(
    facts: RunMetadata, lines: Sequence[Metrics], step: int
) -> list[tuple[str, str]]:
    recipe, commit = _json_object(facts, "recipe"), facts.get("git_commit")
    last = lines[-1] if lines else {}
    unit = unit_of_metrics(last)
    strategy = recipe.get("ds_config") if recipe.get("engine") == "deepspeed" else None
    rows: list[tuple[str, Any]] = [
        (
            "recipe",
            f"{recipe['name']}, commit `{commit}`"
            if recipe.get("name") and commit
            else recipe.get("name"),
        ),
        (
            "steps",
            f"{step:,} of {recipe['steps']:,}"
            if isinstance(recipe.get("steps"), int) and recipe["steps"]
            else f"{step:,}",
        ),
        (
            "samples" if unit == "samples" else "tokens with a label",
            f"{last[unit]:,}" if isinstance(last.get(unit), int) else None,
        ),
        ("rows of a step", recipe.get("global_batch")),
        ("batch ramp", recipe.get("batch_ramp")),
        ("batches left out", recipe.get("leave_out")),
        ("tokens of a row", recipe.get("seq_len") if unit == "tokens" else None),
        ("peak learning rate", recipe.get("lr")),
        ("learning-rate schedule", recipe.get("schedule")),
        ("seed", recipe.get("seed")),
        ("strategy", Path(strategy).name if isinstance(strategy, str) else recipe.get("engine")),
        ("layout", _layout(facts)),
        ("versions", _versions(facts)),
        ("first start", facts.get("date")),
    ]
    return [
        (name, str(value))
        for name, value in rows
        if isinstance(value, (str, int, float)) and value != ""
    ]


def _layout(facts: RunMetadata) -> str:
    """Return the known facts about a run's mesh, number of ranks and device."""
    mesh, device = _json_object(facts, "mesh"), _json_object(facts, "host").get("device")
    world = mesh.get("world")
    ranks = f"{world} rank{'s' if world > 1 else ''}" if isinstance(world, int) else ""
    return ", ".join(str(part) for part in (mesh.get("name"), ranks, device) if part)


def _versions(facts: RunMetadata) -> str:
    versions = _json_object(facts, "versions")
    return ", ".join(f"{name} {versions[name]}" for name in VERSIONS if versions.get(name))


def _evaluation_section(lines: Sequence[Metrics]) -> list[str]:
    """Return the section about the newest evaluation, or [] without an evaluation."""
    measured = [line for line in lines if "eval_loss" in line]
    if not measured:
        return []
    last = measured[-1]
    values = {
        key: value for key, value in last.items() if key.startswith("eval_") and key != "eval_s"
    }
    rows = [
        (f"`{key}`", f"{value:.6g}" if isinstance(value, float) else str(value))
        for key, value in values.items()
    ]
    return [f"## Held-out metrics at step {last['step']:,}", _table(("metric", "value"), rows)]


def _strategy_section(facts: RunMetadata) -> list[str]:
    """Return the section with the resolved DeepSpeed JSON, or [] for other engines.

    Paths on this machine are removed.
    """
    config = _json_object(facts, "ds_config")
    if not config or _json_object(facts, "recipe").get("engine", "deepspeed") != "deepspeed":
        return []
    return ["## DeepSpeed JSON", f"```json\n{json.dumps(_without_paths(config), indent=2)}\n```"]


def _without_paths(value: object) -> Any:
    """Return a JSON value with each local path reduced to its last component."""
    if isinstance(value, dict):
        return {key: _without_paths(inner) for key, inner in value.items()}
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    escaped = [(name, value.replace("|", "\\|")) for name, value in rows]
    return "\n".join(f"| {name} | {value} |" for name, value in (head, ("---", "---"), *escaped))


def _json_object(facts: RunMetadata, key: str) -> dict[str, Any]:
    """Return an object in run.json, or {} if it is missing or not an object."""
    found = facts.get(key)
    return found if isinstance(found, dict) else {}


def _card_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
