"""Checks of `Recipe(...)`'s arguments: their names, and the types of non-flag fields."""

import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from .errors import Problem
from .foreign_flags import COMMAND_ONLY, as_fields, foreign_flag_advice, nearest_name

# Fields that are not flags: (accepted types, the types in words, an example).
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
    """Return a problem for each argument that is not a field in `names`, with its file and line.

    `Recipe.__new__` calls this function. The file that called Recipe is two frames up.
    """
    if not values and fields.keys() <= set(names):
        return []

    frame = sys._getframe(2)
    # Skip the frames of dataclasses.replace.
    while frame.f_back and frame.f_globals["__name__"] == dataclasses.__name__:
        frame = frame.f_back
    place = f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}: Recipe"

    problems = [
        Problem(
            f"{place}({_short_repr(value)})",
            "every value requires the name of its field",
            "write NAME=VALUE",
        )
        for value in values
    ]
    for name in [name for name in fields if name not in names]:
        fix = (
            as_fields(foreign_flag_advice(name))
            or "recipes/recipekit/spec/recipe.py lists the fields"
        )
        if name in COMMAND_ONLY:
            fix = f"omit it, and write --{name} on the command line"
        elif not foreign_flag_advice(name) and (near := nearest_name(name, names)):
            fix = f"did you mean {near}?"
        problems.append(
            Problem(f"{place}({name}={_short_repr(fields[name])})", "the field does not exist", fix)
        )
    return problems


def wrong_objects(values: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each non-flag field that has the wrong type."""
    found = []
    for name, (kinds, words, example) in OBJECTS.items():
        value = values[name]
        if not isinstance(value, kinds) or isinstance(value, type):
            found.append(
                Problem(
                    f"{name} = {_short_repr(value)}",
                    f"must be {words}, not {type(value).__name__}",
                    f"for example {example}",
                )
            )
    return found


def _short_repr(value: object) -> str:
    return text if len(text := repr(value)) <= 40 else "..."
