"""Arguments of `Recipe(...)`: their names, and the types of those that are no flags."""

import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from .other_names import COMMAND_ONLY, advice, as_fields, nearest
from .refusal import Problem

# Fields that are no flags -> (their types, in words, for example)
OBJECTS = {
    "ds_config": ((str, dict, os.PathLike), "a file name or a dict", 'ds_config="zero2.json"'),
    "adapt": (
        (Callable, NoneType),
        "a function from model to model",
        "adapt(model) of recipes/qwen3_0_6b_lora_zero3.py",
    ),
    "pp_plan": ((Mapping, NoneType), "a dict", 'pp_plan={"model.layers": "split"}'),
    "tp_plan": ((Mapping, NoneType), "a dict", 'tp_plan={"*.mlp.up_proj": "colwise"}'),
    "tp_local": ((Mapping, NoneType), "a dict", 'tp_local={"MyAttention": ("num_heads",)}'),
    "lr_scale": ((Mapping, NoneType), "a dict", 'lr_scale={"*.embed_tokens.*": 0.5}'),
    "no_decay": ((tuple, list), "a tuple", 'no_decay=("*.bias",)'),
    "matrices": ((tuple, list), "a tuple", 'matrices=("*.q_proj.weight",)'),
}


def wrong_names(
    values: Collection[Any], fields: Mapping[str, Any], names: Collection[str]
) -> list[Problem]:
    """Return a problem for each argument that is no field of `names`, with the line of the file
    that has it.

    It is called by `Recipe.__new__`, whose caller is that file.
    """
    if not values and fields.keys() <= set(names):
        return []

    frame = sys._getframe(2)
    # of dataclasses.replace
    while frame.f_back and frame.f_globals["__name__"] == dataclasses.__name__:
        frame = frame.f_back
    place = f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}: Recipe"

    problems = [
        Problem(
            f"{place}({_short(value)})",
            "every value requires the name of its field",
            "write NAME=VALUE",
        )
        for value in values
    ]
    for name in [name for name in fields if name not in names]:
        fix = as_fields(advice(name)) or "recipes/recipekit/spec/recipe.py lists the fields"
        if name in COMMAND_ONLY:
            fix = f"omit it, and write --{name} on the command line"
        elif not advice(name) and (near := nearest(name, names)):
            fix = f"did you mean {near}?"
        problems.append(
            Problem(f"{place}({name}={_short(fields[name])})", "the field does not exist", fix)
        )
    return problems


def wrong_objects(values: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each field of another type than it needs, of those fields that are no
    flags.
    """
    found = []
    for name, (kinds, words, example) in OBJECTS.items():
        value = values[name]
        if not isinstance(value, kinds) or isinstance(value, type):
            found.append(
                Problem(
                    f"{name} = {_short(value)}",
                    f"must be {words}, not {type(value).__name__}",
                    f"for example {example}",
                )
            )
    return found


def _short(value: Any) -> str:
    return text if len(text := repr(value)) <= 40 else "..."
