"""A run's key numbers from metrics.jsonl and run.json, for the terminal and for OUT/summary.md."""

import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..spec.devices import gib
from ..spec.run_folder import (
    ADAPTER_CONFIG,
    ADAPTER_KEY,
    CHECKPOINTS,
    EXPORT,
    MERGE,
    has_random_base,
    unit_of_metrics,
)
from ..spec.step_names import newest_complete
from ..spec.task_specs import TASKS
from .progress import format_duration, format_loss

SUMMARY = "summary.md"  # in a run folder
PLANNED_MEMORY = "planned_memory"  # in run.json: bytes for the rank that needs the most memory
# classes in peft 0.21.2 that load an adapter together with its base model
PEFT_AUTO_CLASSES = (
    "CausalLM",
    "Seq2SeqLM",
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
)

MetricsLines = Sequence[Mapping[str, Any]]  # of metrics.jsonl


def seconds_by_activity(lines: MetricsLines) -> dict[str, float]:
    """Return the seconds that the run's recorded steps spent on each activity."""
    waiting = sum(line["data_wait_s"] for line in lines)
    return {
        "training": sum(line["step_s"] for line in lines) - waiting,
        "evaluation": sum(line.get("eval_s", 0.0) for line in lines),
        "saving": sum(line.get("save_stall_s", 0.0) for line in lines),
        "waiting for data": waiting,
    }


def mean_throughput(lines: MetricsLines) -> tuple[float, str]:
    """Return the mean throughput over all steps, in tokens or samples per second, and its unit."""
    unit = unit_of_metrics(lines[-1])
    counted = sum(line[f"{unit}_per_s"] * line["step_s"] for line in lines)
    return counted / (sum(line["step_s"] for line in lines) or math.inf), unit


def first_last_best(lines: MetricsLines, key: str) -> str:
    """Return a loss's first, last and lowest value with their steps, or "" if no line has it."""
    found = [(line["step"], float(line[key])) for line in lines if key in line]
    if not found:
        return ""
    finite = [(value, step) for step, value in found if math.isfinite(value)]
    best, at = min(finite, default=(math.nan, found[0][0]))
    (first_step, first), (last_step, last) = found[0], found[-1]
    return (
        f"first {format_loss(first)} (step {first_step}), last {format_loss(last)} (step"
        f" {last_step}), best {format_loss(best)} (step {at})"
    )


def summary_rows(lines: MetricsLines, facts: Mapping[str, Any], out: Path) -> list[tuple[str, str]]:
    """Return the (name, value) rows of the summary.

    They come from the lines and facts of the run in `out`.
    """
    recipe, last = facts["recipe"], lines[-1]
    seconds, (rate, unit) = seconds_by_activity(lines), mean_throughput(lines)
    all_seconds = sum(seconds.values())
    epochs = f", {last['epoch']:.2f} epochs" if "epoch" in last else ""
    on_cpu = "" if facts.get("host", {}).get("devices") else ", Python and its libraries included"
    share = ", ".join(
        f"{what} {format_duration(part)} ({part / (all_seconds or math.inf):.1%})"
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
        ("time", f"{format_duration(all_seconds)}: {share}"),
        ("speed", f"{rate:,.0f} {unit}/s"),
        (
            "memory",
            (
                f"peak {gib(max(line['peak_mem_bytes'] for line in lines))} of a"
                f" rank{on_cpu}{planned_memory_note(facts)}"
            ),
        ),
    ]
    newest = newest_complete(out / CHECKPOINTS)
    rows += [
        ("checkpoint", str(newest) if newest else "no checkpoint is complete"),
        ("model", trained_model_note(out)),
    ]
    return [(name, value) for name, value in rows if value]


def planned_memory_note(facts: Mapping[str, Any]) -> str:
    """Return the memory that the planner expected, as a note that follows the peak.

    The result is "" for an unknown model.
    """
    if not (found := facts.get(PLANNED_MEMORY)):
        return ""
    more = (
        f", {gib(found['with_activations'])} with activations"
        if found.get("with_activations")
        else ", activations not counted"
    )
    return f"; planned {gib(found['states'])}{more}"


def trained_model_note(out: Path) -> str:
    """Return the trained model's folder of Hugging Face files, or how to create the folder."""
    run = shlex.quote(str(out))
    if has_random_base(out / EXPORT):
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


def loading_code(facts: Mapping[str, Any], out: Path) -> list[str]:
    """Return two lines of Python that load the exported model in plain transformers or peft.

    The result is [] if there is no such model.
    """
    if not (out / EXPORT).is_dir() or has_random_base(out / EXPORT):
        return []
    recipe, folder = facts["recipe"], json.dumps(os.path.abspath(out / EXPORT), ensure_ascii=False)
    task = TASKS[recipe["task"]]
    reader = "AutoTokenizer" if task.reads_tokens else "AutoImageProcessor"
    if facts["identity"].get(ADAPTER_KEY) is None or recipe.get("merge"):
        return [
            f"from transformers import {task.auto_class}, {reader}",
            (
                f"model, {'tokenizer' if task.reads_tokens else 'processor'} ="
                f" {task.auto_class}.from_pretrained({folder}), {reader}.from_pretrained({folder})"
            ),
        ]
    if (heads := task.class_suffix.removeprefix("For")) in PEFT_AUTO_CLASSES:
        return [
            f"from peft import AutoPeftModelFor{heads}",
            f"model = AutoPeftModelFor{heads}.from_pretrained({folder})",
        ]
    base = json.dumps(recipe["model"])
    return [
        f"from peft import PeftModel; from transformers import {task.auto_class}",
        f"model = PeftModel.from_pretrained({task.auto_class}.from_pretrained({base}), {folder})",
    ]


def summary_page(lines: MetricsLines, facts: Mapping[str, Any], out: Path, ending: str) -> str:
    """Return the content of OUT/summary.md. `ending` is the last line."""
    rows, code = summary_rows(lines, facts, out), loading_code(facts, out)
    table = [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows]
    blocks = [f"# {facts['recipe']['name']}", "\n".join(["| | |", "| --- | --- |", *table])]
    blocks += ["\n".join(["```python", *code, "```"])] if code else []
    return "\n\n".join([*blocks, ending]) + "\n"


def summary_block(lines: MetricsLines, facts: Mapping[str, Any], out: Path, ending: str) -> str:
    """Return the content of the summary as lines for the terminal."""
    rows = [
        *summary_rows(lines, facts, out),
        *zip(("load", ""), loading_code(facts, out), strict=False),
    ]
    return "\n".join([*(f"{name:<11}{value}" for name, value in rows), ending])
