"""The numbers of a run, from metrics.jsonl and run.json, as lines for the terminal and as
OUT/summary.md.
"""

import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..spec.devices import gib
from ..spec.run_folder import (
    ADAPTER,
    ADAPTER_CONFIG,
    CHECKPOINTS,
    EXPORT,
    MERGE,
    unit_of,
    without_base,
)
from ..spec.step_names import newest_complete
from ..spec.task_specs import TASKS
from .progress import duration, number

SUMMARY = "summary.md"  # in a run folder
PLANNED = "planned_memory"  # in run.json: bytes of the fullest rank
# classes of peft 0.21.2 that load an adapter together with its base model
LOADS_ADAPTERS = (
    "CausalLM",
    "Seq2SeqLM",
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
)

Lines = Sequence[Mapping[str, Any]]  # of metrics.jsonl


def spent(lines: Lines) -> dict[str, float]:
    """Return the seconds of the steps that the run has kept, by what they went into."""
    waiting = sum(line["data_wait_s"] for line in lines)
    return {
        "training": sum(line["step_s"] for line in lines) - waiting,
        "evaluation": sum(line.get("eval_s", 0.0) for line in lines),
        "saving": sum(line.get("save_stall_s", 0.0) for line in lines),
        "waiting for data": waiting,
    }


def pace(lines: Lines) -> tuple[float, str]:
    """Return tokens or samples a second over all steps, and the unit."""
    unit = unit_of(lines[-1])
    counted = sum(line[f"{unit}_per_s"] * line["step_s"] for line in lines)
    return counted / (sum(line["step_s"] for line in lines) or math.inf), unit


def first_last_best(lines: Lines, key: str) -> str:
    """Return the first, the last and the lowest value of a loss with their steps; "" if no line has
    it.
    """
    found = [(line["step"], float(line[key])) for line in lines if key in line]
    if not found:
        return ""
    finite = [(value, step) for step, value in found if math.isfinite(value)]
    best, at = min(finite, default=(math.nan, found[0][0]))
    (first_step, first), (last_step, last) = found[0], found[-1]
    return (
        f"first {number(first)} (step {first_step}), last {number(last)} (step {last_step}), best"
        f" {number(best)} (step {at})"
    )


def rows_of(lines: Lines, facts: Mapping[str, Any], out: Path) -> list[tuple[str, str]]:
    """Return (name, value) of all that the summary holds, `lines` and `facts` being those of the
    run in `out`.
    """
    recipe, last = facts["recipe"], lines[-1]
    seconds, (rate, unit) = spent(lines), pace(lines)
    all_seconds = sum(seconds.values())
    epochs = f", {last['epoch']:.2f} epochs" if "epoch" in last else ""
    on_cpu = "" if facts.get("host", {}).get("devices") else ", Python and its libraries included"
    share = ", ".join(
        f"{what} {duration(part)} ({part / (all_seconds or math.inf):.1%})"
        for what, part in seconds.items()
    )
    rows = [
        (
            "run",
            (
                f"{recipe['name']} on {facts['mesh']['world']}"
                f" rank{'s' if facts['mesh']['world'] > 1 else ''} ({facts['mesh']['name']})"
            ),
        ),
        ("steps", f"{last['step']} of {recipe['steps']}{epochs}, {last[unit]:,} {unit}"),
        ("loss", first_last_best(lines, "loss")),
        ("eval_loss", first_last_best(lines, "eval_loss")),
        ("time", f"{duration(all_seconds)}: {share}"),
        ("speed", f"{rate:,.0f} {unit}/s"),
        (
            "memory",
            (
                f"peak {gib(max(line['peak_mem_bytes'] for line in lines))} of a"
                f" rank{on_cpu}{planned(facts)}"
            ),
        ),
    ]
    newest = newest_complete(out / CHECKPOINTS)
    rows += [
        ("checkpoint", str(newest) if newest else "no checkpoint is complete"),
        ("model", model_in(out)),
    ]
    return [(name, value) for name, value in rows if value]


def planned(facts: Mapping[str, Any]) -> str:
    """Return what the planner expected beside the peak; "" for a model that it does not know."""
    if not (found := facts.get(PLANNED)):
        return ""
    more = (
        f", {gib(found['with_activations'])} with activations"
        if found.get("with_activations")
        else ", activations not counted"
    )
    return f"; planned {gib(found['states'])}{more}"


def model_in(out: Path) -> str:
    """Return where the trained model is as Hugging Face files, or how to make them."""
    run = shlex.quote(str(out))
    if without_base(out / EXPORT):
        return (
            f"{out / EXPORT}, an adapter whose randomly initialised base model is not saved. Write"
            f" the merged model with {MERGE} {run} NEW_FOLDER"
        )
    if (out / EXPORT / ADAPTER_CONFIG).is_file():
        return (
            f"{out / EXPORT}, an adapter. Merge it into its base model with {MERGE} {run}"
            " NEW_FOLDER"
        )
    if (out / EXPORT).is_dir():
        return str(out / EXPORT)
    return f"not exported. Write Hugging Face files with recipekit convert to-hf {run} NEW_FOLDER"


def loading(facts: Mapping[str, Any], out: Path) -> list[str]:
    """Return two lines of Python that load the exported model in plain transformers or peft, [] if
    there is none.
    """
    if not (out / EXPORT).is_dir() or without_base(out / EXPORT):
        return []
    recipe, folder = facts["recipe"], json.dumps(os.path.abspath(out / EXPORT), ensure_ascii=False)
    task = TASKS[recipe["task"]]
    reader = "AutoTokenizer" if task.of_tokens else "AutoImageProcessor"
    if facts["identity"].get(ADAPTER) is None or recipe.get("merge"):
        return [
            f"from transformers import {task.auto_class}, {reader}",
            (
                f"model, {'tokenizer' if task.of_tokens else 'processor'} ="
                f" {task.auto_class}.from_pretrained({folder}), {reader}.from_pretrained({folder})"
            ),
        ]
    if (heads := task.heads.removeprefix("For")) in LOADS_ADAPTERS:
        return [
            f"from peft import AutoPeftModelFor{heads}",
            f"model = AutoPeftModelFor{heads}.from_pretrained({folder})",
        ]
    base = json.dumps(recipe["model"])
    return [
        f"from peft import PeftModel; from transformers import {task.auto_class}",
        f"model = PeftModel.from_pretrained({task.auto_class}.from_pretrained({base}), {folder})",
    ]


def page_of(lines: Lines, facts: Mapping[str, Any], out: Path, ending: str) -> str:
    """Return the content of OUT/summary.md; `ending` is its last line."""
    rows, code = rows_of(lines, facts, out), loading(facts, out)
    table = [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows]
    blocks = [f"# {facts['recipe']['name']}", "\n".join(["| | |", "| --- | --- |", *table])]
    blocks += ["\n".join(["```python", *code, "```"])] if code else []
    return "\n\n".join([*blocks, ending]) + "\n"


def block_of(lines: Lines, facts: Mapping[str, Any], out: Path, ending: str) -> str:
    """Return the same as lines for the terminal."""
    rows = [*rows_of(lines, facts, out), *zip(("load", ""), loading(facts, out), strict=False)]
    return "\n".join([*(f"{name:<11}{value}" for name, value in rows), ending])
