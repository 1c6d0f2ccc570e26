"""Checks a DeepSpeed JSON: finds every mistake before anything starts.

schema.json (written by tools/make/make_ds_schema.py) has the keys that DeepSpeed reads, rules.py
what DeepSpeed cannot combine. Neither torch nor deepspeed is imported, so a refusal takes about a
second.
"""

from typing import Any

from ..spec.mesh import Mesh, make_mesh
from ..spec.recipe import Recipe, check_lacks
from ..spec.refusal import APPLIES, FAILS, Problem, Refusal
from ..spec.task_specs import PACKED
from .batch import check_batch, no_batch
from .divisions import check_dense_mask, check_divisions, check_pipeline
from .numbers import DEGREES, SHARED, degrees_in, literals, number_of
from .rules import RECIPE_HONOURS, RECIPE_RULES, RULES, STOCK_RULES, Facts
from .schema import (
    AUTO,
    FILLED_BY,
    at,
    meant_by_auto,
    optimizer_name,
    optimizer_params,
    resembled,
    takes_number,
    walk,
)
from .shapes import count_layers, divisible
from .values import shown

# While one of these keys, or a block around it, is at fault or misspelt, no rule about combinations
# can be applied.
PIVOTS = (
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
    "bf16.enabled",
    "fp16.enabled",
    "optimizer.type",
    "optimizer.params.torch_adam",
)


def check(
    config: dict[str, Any],
    *,
    world: int | None = None,
    mesh: Mesh | None = None,
    recipe: Recipe | None = None,
    model_config: dict[str, Any] | None = None,
    typed: frozenset[str] = frozenset(),
    json_only: bool = False,
    filled_by: str = "",
    layout: dict[str, int] | None = None,
    local: int = 0,
) -> list[Problem]:
    """Finds every mistake that shows without hardware; returns [] if there is none.

    An argument that is left out is not checked. `typed` names the recipe's fields that came from
    the command line. `json_only` is for a JSON that another script hands to DeepSpeed: keys that
    only a recipe ignores are then allowed, and a problem whose outcome is APPLIES is only advice.
    `filled_by` names who turns "auto" into numbers in such a script ("trainer", "accelerate", or
    nobody), `layout` the degrees of its mesh. `local` counts the ranks of this host, 0: not known.
    """
    found, clean = walk(config, FILLED_BY[filled_by] if json_only else AUTO, stock=json_only)
    if not json_only:
        for path, value in meant_by_auto(config).items():
            if at(config, path) == "auto":  # the rules judge the value that "auto" will become
                clean.setdefault(path.partition(".")[0], {})["enabled"] = value
        found = _schedule(
            found,
            config,
            clean,
            *(recipe.steps or None, recipe.min_lr) if recipe is not None else (None, 0.0),
        )
    degrees = {axis: getattr(recipe, axis, 1) for axis in DEGREES} | degrees_in(clean)
    if json_only:
        degrees |= {"pp": 1} | (layout or {})  # DeepSpeed ignores pipeline.stages
    if mesh is not None:
        degrees = {axis: getattr(mesh, axis) for axis in DEGREES}
    elif world is not None:
        try:
            mesh = make_mesh(world, **degrees)
        except Refusal as refusal:
            found += refusal.problems
    # smaller ones are refused above
    degrees = {axis: max(1, degree) for axis, degree in degrees.items()}
    if recipe is not None:
        found += check_lacks(recipe.facts, degrees)
        # what else is wrong with them is of no use
        degrees |= dict.fromkeys(recipe.facts.lacks.keys() & degrees.keys(), 1)
    facts = Facts(
        clean, optimizer_name(clean), degrees, mesh.world if mesh else world, local, stock=json_only
    )
    unknown = at(config, "zero_optimization.stage") == "auto" or any(
        _at_fault(pivot, config, clean) for pivot in PIVOTS
    )
    rules = () if unknown else RULES + (STOCK_RULES if json_only else RECIPE_RULES)
    for rule in rules:
        if (value := facts.get(rule.key)) is not None and rule.broken(facts):
            found.append(Problem(f"{rule.key} = {shown(value)}", rule.rule, rule.fix, rule.outcome))
    if json_only:
        found += no_batch(config, filled_by)
    else:
        found += _half_honoured(clean)
    if recipe is not None:
        found += _contradictions(clean, recipe, typed)
    total, micro = (number_of(clean, recipe, field) for field in ("global_batch", "micro_batch"))
    # micro-batches of a step
    least = (
        2 * degrees["pp"] if recipe is not None and recipe.pipeline_schedule == "dualpipev" else 1
    )
    found += check_batch(
        clean, total, micro, mesh, recipe.ramp if recipe is not None else None, least
    )
    found += check_divisions(
        degrees, facts, recipe.seq_len if recipe is not None else 0, model_config, mesh
    )
    found += check_pipeline(
        degrees["pp"],
        least > 1,
        total,
        micro,
        0 if recipe is not None and recipe.pp_plan else count_layers(model_config),
        mesh,
    )
    if (
        recipe is not None
        and recipe.facts.rows == PACKED
        and divisible(model_config, 0)["sp"]["attention heads"]
    ):
        found += check_dense_mask(
            recipe.attention, recipe.seq_len, micro or 1, 4 if facts.dtype == "fp32" else 2
        )
    return list(dict.fromkeys(found))


def _at_fault(pivot: str, config: dict[str, Any], clean: dict[str, Any]) -> bool:
    """Returns True if the walk took a key or a block of `pivot` out of `config`, under its own name
    or a name that resembles it.
    """
    for key in pivot.split("."):
        if key not in clean and resembled(key, config.keys() - clean.keys()):
            return True
        config, clean = (
            block if isinstance(block := of.get(key), dict) else {} for of in (config, clean)
        )
    return False


def check_device(config: dict[str, Any], device_type: str, has_fp16: bool = False) -> list[Problem]:
    """Return problems of a JSON with the accelerator of this process.

    `device_type` is torch's name of the accelerator, such as cuda or cpu. `has_fp16`: DeepSpeed's
    accelerator computes in fp16, which most CPUs do not.
    """
    facts = Facts(walk(config)[1])
    found = []
    if device_type == "cpu" and facts.dtype == "fp16" and not has_fp16:
        found.append(
            Problem(
                "fp16.enabled = true",
                "DeepSpeed cannot train in fp16 on this CPU",
                'set "fp16": {"enabled": false}, "bf16": {"enabled": true}',
            )
        )
    if device_type == "cpu" and facts.get("optimizer.params.capturable"):
        found.append(
            Problem(
                "optimizer.params.capturable = true",
                "requires an optimizer step on a GPU",
                "delete it",
            )
        )
    if device_type != "cuda" and facts.get("aio.use_gds"):
        found.append(
            Problem("aio.use_gds = true", "GPU direct storage requires CUDA", "set it to false")
        )
    if device_type != "cuda" and facts.get("zero_optimization.offload_optimizer.super_offload"):
        found.append(
            Problem(
                "zero_optimization.offload_optimizer.super_offload = true",
                "requires CUDA",
                "set it to false",
            )
        )
    return found


# DeepSpeed's scheduler -> the recipe's schedule that does the same.
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _schedule(
    found: list[Problem],
    config: dict[str, Any],
    clean: dict[str, Any],
    steps: int | None,
    min_lr: float,
) -> list[Problem]:
    """Returns `found` with one problem about the scheduler: its numbers are left to Trainer, or its
    length is not the run's.

    In the first case that problem replaces the scheduler's others, and the block is taken out of
    `clean`, as the fix is to delete it.
    """
    params, name, where = (
        at(config, "scheduler.params"),
        at(config, "scheduler.type"),
        "scheduler.params.",
    )
    autos = (
        [key for key, value in params.items() if value == "auto"]
        if isinstance(params, dict) and isinstance(name, str) and name in SCHEDULES
        else []
    )
    if not autos:
        total = at(clean, f"{where}total_num_steps")
        if steps is None or total in (None, steps):
            return found
        fix = f"set it to {steps}, or delete the scheduler block and use --schedule"
        return [
            *found,
            Problem(
                f"{where}total_num_steps = {total}",
                f"must equal the {steps} steps of the run",
                fix,
                APPLIES,
            ),
        ]
    clean.pop("scheduler", None)
    numbers: dict[str, Any] = {"schedule": SCHEDULES[name]}
    if SCHEDULES[name] == "constant" and min_lr:
        numbers["min_lr"] = "0"
    for field, key in (("warmup_steps", "warmup_num_steps"), ("lr", "warmup_max_lr")):
        if isinstance(value := params.get(key), (int, float)):
            numbers[field] = value
    rule = f'a recipe does not fill "auto" in {", ".join(autos)}, because it has its own schedule'
    flags = " ".join(f"--{field} {value}" for field, value in numbers.items())
    others = [problem for problem in found if not problem.where.startswith(where)]
    return [
        *others,
        Problem(
            f"scheduler = {shown(config['scheduler'])}",
            rule,
            f"delete the block and use {flags}",
            FAILS,
        ),
    ]


def _half_honoured(clean: dict[str, Any]) -> list[Problem]:
    """Refuses keys of blocks from which a recipe reads only the degree."""
    return [
        Problem(
            f"{block}.{key} = {shown(value)}",
            f"a recipe reads only {' and '.join(sorted(honoured))} of this block",
            "delete it",
        )
        for block, honoured in RECIPE_HONOURS.items()
        for key, value in clean.get(block, {}).items()
        if key not in honoured
    ]


def _contradictions(clean: dict[str, Any], recipe: Recipe, typed: frozenset[str]) -> list[Problem]:
    """Refuses typed flags that a literal of the JSON contradicts, or that nothing would read."""
    found = []
    for field, value in (literals(clean) | degrees_in(clean)).items():
        if field in typed and value != getattr(recipe, field):
            path = (SHARED | DEGREES)[field]
            fix = (
                'leave out the flag, or write "auto" in the JSON'
                if path in AUTO
                else "leave out the flag, or delete the key from the JSON"
            )
            found.append(
                Problem(
                    f"--{field} {getattr(recipe, field)}",
                    f"contradicts {path.removesuffix('.0').removesuffix('.1')} = {value} in the"
                    " JSON",
                    fix,
                )
            )
    if "scheduler" in clean:
        fields = ("warmup_steps", "decay_steps", "schedule", "min_lr") + (
            ("lr",)
            if {"warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr"}
            & set(clean["scheduler"].get("params", {}))
            else ()
        )
        found += [
            Problem(
                f"--{field} {getattr(recipe, field)}",
                "contradicts the scheduler block of the JSON, which sets the learning rate",
                "leave out the flag, or delete the block",
            )
            for field in fields
            if field in typed
        ]
    for field, nothing in (("lr_scale", None), ("layer_decay", 1.0)):
        if "scheduler" in clean and (value := getattr(recipe, field) or nothing) != nothing:
            rule = (
                "scales the rate of the recipe's schedule, but the JSON's scheduler block sets the"
                " rates"
            )
            found.append(Problem(f"{field} = {value}", rule, "leave it out, or delete the block"))
    name = optimizer_name(clean)
    if name:
        takes = optimizer_params(clean, name)
        for field, key in (
            ("weight_decay", "weight_decay"),
            ("beta1", "betas"),
            ("beta2", "betas"),
            ("eps", "eps"),
        ):
            if field in typed and not takes_number(takes, key):
                rule = (
                    f"{name} takes {'a pair as' if key in takes else 'no'} {key}, so the flag would"
                    " be ignored"
                )
                found.append(
                    Problem(
                        f"--{field} {getattr(recipe, field)}",
                        rule,
                        "leave out the flag, or use AdamW",
                    )
                )
    return found
