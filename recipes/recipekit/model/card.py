"""The model card of an export: README.md with the facts that a run has recorded."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..architectures.lookup import folder_of
from ..architectures.small_files import CARD
from ..spec.run_folder import ADAPTER, COMMITS, facts_of_run, files_of_run, read_metrics, unit_of
from ..spec.task_specs import TASKS

BASE_LICENSE = "base_license"  # key of run.json: the licence that the base model's card states
OF_LICENSE = ("license", "license_name", "license_link")  # its keys in the header of a card
MARK = re.compile(r"<!-- written by recipekit, (\w+) -->\n\Z")
MOST_FILES = 10  # data files that a card lists
VERSIONS = ("python", "torch", "deepspeed", "transformers", "datasets")
HUB = "https://huggingface.co"

Facts = Mapping[str, Any]  # of run.json
Metrics = Mapping[str, Any]  # a line of metrics.jsonl


@dataclass(frozen=True)
class Base:
    """The model that a run started from."""

    name: str  # a link to the hub, or the name of a folder without its path; "" if it is unknown
    hub_id: str  # "" for a local folder and for random weights


def card_of_run(run: Path, step: int, merged: bool) -> str:
    """Return the card of a run's model after `step`; "" for a folder without run.json.

    `merged`: the adapter of the run is merged into the weights, if the run has one.
    """
    facts = facts_of_run(run)
    if not facts:
        return ""
    lines = [line for line in read_metrics(run) if line["step"] <= step]
    return card_of(facts, lines, files_of_run(run), step, merged)


def card_of(
    facts: Facts,
    lines: Sequence[Metrics],
    files: Mapping[str, Mapping[str, str]],
    step: int,
    merged: bool,
) -> str:
    """Return the card from run.json, metrics.jsonl up to `step` and data_files.json.

    A fact that is missing is left out. The last line has a digest, which shows whether somebody has
    edited the card.
    """
    base, is_adapter = (
        _base_of(facts),
        not merged and bool(_part(_part(facts, "identity"), ADAPTER)),
    )
    rows = [
        *_base_rows(facts, base, merged),
        *_data_rows(facts, files),
        *_training_rows(facts, lines, step),
    ]
    blocks = [
        "\n".join(["---", *_header(facts, base, is_adapter), "---"]),
        f"# {_part(facts, 'recipe').get('name') or 'Model'}",
        _about(facts, base, is_adapter),
        _table(("fact", "value"), rows),
        *_held_out(lines),
        *_strategy(facts),
    ]
    text = "\n\n".join(blocks) + "\n\n"
    return f"{text}<!-- written by recipekit, {_digest(text)} -->\n"


def is_unchanged(card: Path) -> bool:
    """Return True if a card is as `card_of` made it, so that a new export may replace it."""
    text = card.read_text(encoding="utf-8", errors="replace")
    found = MARK.search(text)
    return found is not None and found[1] == _digest(text[: found.start()])


def license_of(model: str, revision: str = "") -> dict[str, str]:
    """Return what the card of a base model on this machine says about its licence; {} if it says
    nothing.

    A header that cannot be read counts as no header.
    """
    folder = folder_of(model, CARD, revision)
    if folder is None or not (folder / CARD).is_file():
        return {}
    from huggingface_hub import repocard

    cards: Any = repocard  # its yaml is no requirement of ours
    try:
        header = cards.metadata_load(folder / CARD) or {}
    except (OSError, ValueError, TypeError, cards.yaml.YAMLError):
        return {}
    return {key: header[key] for key in OF_LICENSE if isinstance(header.get(key), str)}


# Header and text


def _header(facts: Facts, base: Base, is_adapter: bool) -> list[str]:
    """Return the lines of YAML that the hub reads."""
    found: dict[str, str | list[str]] = {}
    if base.hub_id:
        found |= {
            "base_model": base.hub_id,
            "base_model_relation": "adapter" if is_adapter else "finetune",
        }
    found["library_name"] = "peft" if is_adapter else "transformers"
    if datasets := _part(_part(facts, COMMITS), "datasets"):
        found["datasets"] = list(datasets)
    if base.hub_id:
        found |= _part(facts, BASE_LICENSE)
    return [line for key, value in found.items() for line in _yaml(key, value)]


def _yaml(key: str, value: str | list[str]) -> list[str]:
    if isinstance(value, list):
        return [f"{key}:", *(f"- {_scalar(item)}" for item in value)]
    return [f"{key}: {_scalar(value)}"]


def _scalar(value: str) -> str:
    """Return a YAML scalar; a JSON string is one, and a name with a slash or a letter in it needs
    no quotes.
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


def _about(facts: Facts, base: Base, is_adapter: bool) -> str:
    """Return the first paragraph: how the model was made."""
    recipe, name = _part(facts, "recipe"), base.name
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


def _base_of(facts: Facts) -> Base:
    """Return the base model.

    The identity of a run whose model is a folder has a hash of its config.json.
    """
    recipe = _part(facts, "recipe")
    model = str(recipe.get("model") or "")
    if not model:
        return Base("", "")
    if (
        "model_config" in _part(facts, "identity")
        or model.startswith((".", "/", "~"))
        or model.count("/") > 1
    ):
        return Base(f"`{Path(model).name}`", "")
    return Base(f"[{model}]({HUB}/{model})", model if recipe.get("init") == "pretrained" else "")


# Tables


def _base_rows(facts: Facts, base: Base, merged: bool) -> list[tuple[str, str]]:
    name, commit = base.name, _part(facts, COMMITS).get("model")
    licence = _part(facts, BASE_LICENSE)
    stated = licence.get("license_name") or licence.get("license")
    what = "architecture" if _part(facts, "recipe").get("init") == "random" else "base model"
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
        *_adapter_rows(_part(_part(facts, "identity"), ADAPTER), merged),
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


def _data_rows(facts: Facts, files: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    recipe, datasets = _part(facts, "recipe"), _part(_part(facts, COMMITS), "datasets")
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
        for file, digest in listed[:MOST_FILES]
    ]
    more = len(listed) - MOST_FILES
    return rows + (
        [("data files", f"{more} more; data_files.json of the run lists all")] if more > 0 else []
    )


def _training_rows(facts: Facts, lines: Sequence[Metrics], step: int) -> list[tuple[str, str]]:
    recipe, commit = _part(facts, "recipe"), facts.get("git_commit")
    last = lines[-1] if lines else {}
    unit = unit_of(last)
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


def _layout(facts: Facts) -> str:
    """Return the mesh, the number of ranks and the device of a run, as far as they are known."""
    mesh, device = _part(facts, "mesh"), _part(facts, "host").get("device")
    world = mesh.get("world")
    ranks = f"{world} rank{'s' if world > 1 else ''}" if isinstance(world, int) else ""
    return ", ".join(str(part) for part in (mesh.get("name"), ranks, device) if part)


def _versions(facts: Facts) -> str:
    versions = _part(facts, "versions")
    return ", ".join(f"{name} {versions[name]}" for name in VERSIONS if versions.get(name))


def _held_out(lines: Sequence[Metrics]) -> list[str]:
    """Return the section of the newest evaluation; [] without one."""
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


def _strategy(facts: Facts) -> list[str]:
    """Return the section with the DeepSpeed JSON as the run has resolved it, without folders of its
    machine; [] for other engines.
    """
    config = _part(facts, "ds_config")
    if not config or _part(facts, "recipe").get("engine", "deepspeed") != "deepspeed":
        return []
    return ["## DeepSpeed JSON", f"```json\n{json.dumps(_published(config), indent=2)}\n```"]


def _published(value: Any) -> Any:
    """Return a value of the JSON in which a path of the machine is only the name of its last folder
    or file.
    """
    if isinstance(value, dict):
        return {key: _published(inner) for key, inner in value.items()}
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    escaped = [(name, value.replace("|", "\\|")) for name, value in rows]
    return "\n".join(f"| {name} | {value} |" for name, value in (head, ("---", "---"), *escaped))


def _part(facts: Facts, key: str) -> dict[str, Any]:
    """Return an object of run.json; {} if it is missing or something else."""
    found = facts.get(key)
    return found if isinstance(found, dict) else {}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
