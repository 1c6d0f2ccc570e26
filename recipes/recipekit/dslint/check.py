"""Checks a DeepSpeed JSON: finds every mistake before anything starts.

schema.json (written by tools/make/make_ds_schema.py) has the keys that DeepSpeed reads, rules.py
what DeepSpeed cannot combine. Neither torch nor deepspeed is imported, so a refusal takes about a
second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..spec.mesh import Mesh, make_mesh
from ..spec.recipe import Recipe, check_lacks
from ..spec.refusal import APPLIES, FAILS, Problem, Refusal
from ..spec.task_specs import PACKED
from .batch import check_batch, no_batch
from .divisions import check_dense_mask, check_divisions, check_pipeline
from .numbers import DEGREES, SHARED, degrees_in, literals, number_of
from .rules import RECIPE_HONOURS, RECIPE_RULES, RULES, STOCK_RULES, Facts, Rule
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


@dataclass(frozen=True)
class OtherScript:
    """A training script that hands its JSON to DeepSpeed itself, without a recipe."""

    filled_by: str = ""  # program that turns "auto" into numbers: "trainer", "accelerate" or nobody
    layout: dict[str, int] | None = None  # degrees of the script's mesh


@dataclass(frozen=True)
class LintInput:
    """A DeepSpeed JSON, and everything known about its run. What is unknown is not checked."""

    config: dict[str, Any]
    world: int | None = None
    mesh: Mesh | None = None
    recipe: Recipe | None = None
    model_config: dict[str, Any] | None = None
    typed: frozenset[str] = frozenset()  # fields of the recipe that came from the command line
    script: OtherScript | None = None  # reads the JSON instead of a recipe
    local: int = 0  # ranks of this host, 0 if not known


def check(given: LintInput) -> list[Problem]:
    """Return every mistake that shows without hardware; [] if there is none."""
    if given.script is not None:
        found = _check_for_script(given, given.script)
    elif given.recipe is not None:
        found = _check_for_recipe(given, given.recipe)
    else:
        found = _check_for_any_recipe(given)
    return list(dict.fromkeys(found))


def _check_for_script(given: LintInput, script: OtherScript) -> list[Problem]:
    """Return the problems of a JSON that another script hands to DeepSpeed.

    Keys that only a recipe ignores are allowed. A problem whose outcome is APPLIES is only advice.
    """
    found, clean = walk(given.config, FILLED_BY[script.filled_by], stock=True)
    # DeepSpeed ignores pipeline.stages.
    wanted = dict.fromkeys(DEGREES, 1) | degrees_in(clean) | {"pp": 1} | (script.layout or {})
    refused, degrees, mesh = _lay_out(given, wanted)
    facts = _facts(given, clean, degrees, mesh)
    total, micro = _batch_of(given, clean)

    return [
        *found,
        *refused,
        *_check_rules(given.config, facts, RULES + STOCK_RULES),
        *no_batch(given.config, script.filled_by),
        *check_batch(clean, total, micro, mesh),
        *check_divisions(facts, 0, given.model_config, mesh),
        *check_pipeline(degrees["pp"], False, total, micro, count_layers(given.model_config), mesh),
    ]


def _check_for_any_recipe(given: LintInput) -> list[Problem]:
    """Return the problems of a JSON that recipes read, whatever the recipe is."""
    found, clean = _walk_for_recipes(given.config)
    refused, degrees, mesh = _lay_out(given, dict.fromkeys(DEGREES, 1) | degrees_in(clean))
    facts = _facts(given, clean, degrees, mesh)
    total, micro = _batch_of(given, clean)

    return [
        *found,
        *refused,
        *_check_rules(given.config, facts, RULES + RECIPE_RULES),
        *_half_honoured(clean),
        *check_batch(clean, total, micro, mesh),
        *check_divisions(facts, 0, given.model_config, mesh),
        *check_pipeline(degrees["pp"], False, total, micro, count_layers(given.model_config), mesh),
    ]


def _check_for_recipe(given: LintInput, recipe: Recipe) -> list[Problem]:
    """Return the problems of a JSON together with the recipe that reads it."""
    found, clean = _walk_for_recipes(given.config, recipe.steps, recipe.min_lr)
    wanted = {axis: getattr(recipe, axis) for axis in DEGREES} | degrees_in(clean)
    refused, degrees, mesh = _lay_out(given, wanted)

    # Other problems of a degree that the task lacks are of no use.
    lacking = check_lacks(recipe.facts, degrees)
    degrees |= dict.fromkeys(recipe.facts.lacks.keys() & degrees.keys(), 1)

    facts = _facts(given, clean, degrees, mesh)
    total, micro = _batch_of(given, clean)
    dualpipev = recipe.pipeline_schedule == "dualpipev"
    layers = 0 if recipe.pp_plan else count_layers(given.model_config)
    heads = divisible(given.model_config, 0)["sp"]["attention heads"]
    has_mask = recipe.facts.rows == PACKED and heads
    width = 4 if facts.dtype == "fp32" else 2  # bytes of a number

    return [
        *found,
        *refused,
        *lacking,
        *_check_rules(given.config, facts, RULES + RECIPE_RULES),
        *_half_honoured(clean),
        *_contradictions(clean, recipe, given.typed),
        *check_batch(
            clean, total, micro, mesh, recipe.ramp, least=2 * degrees["pp"] if dualpipev else 1
        ),
        *check_divisions(facts, recipe.seq_len, given.model_config, mesh),
        *check_pipeline(degrees["pp"], dualpipev, total, micro, layers, mesh),
        *(
            check_dense_mask(recipe.attention, recipe.seq_len, micro or 1, width)
            if has_mask
            else []
        ),
    ]


def _walk_for_recipes(
    config: dict[str, Any], steps: int = 0, min_lr: float = 0.0
) -> tuple[list[Problem], dict[str, Any]]:
    """Return the mistakes of single keys, and the configuration that a recipe makes of the rest.

    `steps` is 0 if the length of the run is not known.
    """
    found, clean = walk(config)

    # The rules judge the value that "auto" will become.
    for path, value in meant_by_auto(
        at(config, "fp16.enabled"), at(config, "bf16.enabled")
    ).items():
        block = path.partition(".")[0]
        if at(config, path) == "auto":
            clean = clean | {block: clean.get(block, {}) | {"enabled": value}}

    autos = _auto_keys_of_schedule(config)
    if not autos:
        return [*found, *_check_total_steps(clean, steps)], clean

    # The fix is to delete the block, so its other problems go with it.
    others = [problem for problem in found if not problem.where.startswith("scheduler.params.")]
    clean = {key: value for key, value in clean.items() if key != "scheduler"}
    return [*others, _auto_schedule(config, autos, min_lr)], clean


def _lay_out(
    given: LintInput, degrees: Mapping[str, int]
) -> tuple[list[Problem], dict[str, int], Mesh | None]:
    """Return the problems of the layout, the parallel degrees and the mesh, None if not known.

    The degrees of a given mesh replace `degrees`. Degrees below 1 are refused, then count as 1.
    """
    refused: list[Problem] = []
    mesh = given.mesh
    if mesh is not None:
        degrees = {axis: getattr(mesh, axis) for axis in DEGREES}
    elif given.world is not None:
        try:
            mesh = make_mesh(given.world, **degrees)
        except Refusal as refusal:
            refused = refusal.problems
    return refused, {axis: max(1, degree) for axis, degree in degrees.items()}, mesh


def _facts(
    given: LintInput, clean: dict[str, Any], degrees: dict[str, int], mesh: Mesh | None
) -> Facts:
    world = mesh.world if mesh is not None else given.world
    return Facts(
        clean,
        optimizer_name(clean),
        degrees,
        world,
        given.local,
        stock=given.script is not None,
    )


def _batch_of(given: LintInput, clean: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the global batch and the micro-batch; None for a number that is not known."""
    total = number_of(clean, given.recipe, "global_batch")
    micro = number_of(clean, given.recipe, "micro_batch")
    return total, micro


def _check_rules(config: dict[str, Any], facts: Facts, rules: Sequence[Rule]) -> list[Problem]:
    """Return a problem for each rule that the configuration breaks.

    No rule is applied while a key that decides about many of them is "auto" or at fault.
    """
    unknown = at(config, "zero_optimization.stage") == "auto" or any(
        _at_fault(pivot, config, facts.config) for pivot in PIVOTS
    )
    if unknown:
        return []

    found = []
    for rule in rules:
        value = facts.get(rule.key)
        if value is not None and rule.broken(facts):
            found.append(Problem(f"{rule.key} = {shown(value)}", rule.rule, rule.fix, rule.outcome))
    return found


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


def _auto_keys_of_schedule(config: dict[str, Any]) -> list[str]:
    """Return the numbers of a scheduler, which the recipes have too, that are left to Trainer."""
    params, name = at(config, "scheduler.params"), at(config, "scheduler.type")
    if not isinstance(params, dict) or not isinstance(name, str) or name not in SCHEDULES:
        return []
    return [key for key, value in params.items() if value == "auto"]


def _auto_schedule(config: dict[str, Any], autos: list[str], min_lr: float) -> Problem:
    """Return the problem of a scheduler whose `autos` nobody fills; its fix has the same flags."""
    schedule, params = SCHEDULES[config["scheduler"]["type"]], config["scheduler"]["params"]

    numbers: dict[str, Any] = {"schedule": schedule}
    if schedule == "constant" and min_lr:
        numbers["min_lr"] = "0"
    for field, key in (("warmup_steps", "warmup_num_steps"), ("lr", "warmup_max_lr")):
        value = params.get(key)
        if isinstance(value, (int, float)):
            numbers[field] = value
    flags = " ".join(f"--{field} {value}" for field, value in numbers.items())

    return Problem(
        f"scheduler = {shown(config['scheduler'])}",
        f'a recipe does not fill "auto" in {", ".join(autos)}, because it has its own schedule',
        f"delete the block and use {flags}",
        FAILS,
    )


def _check_total_steps(clean: dict[str, Any], steps: int) -> list[Problem]:
    """Refuse a scheduler that is longer or shorter than the run; `steps` is 0 if not known."""
    total = at(clean, "scheduler.params.total_num_steps")
    if not steps or total in (None, steps):
        return []
    return [
        Problem(
            f"scheduler.params.total_num_steps = {total}",
            f"must equal the {steps} steps of the run",
            f"set it to {steps}, or delete the scheduler block and use --schedule",
            APPLIES,
        )
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
    flags = {field: value for field, value in vars(recipe).items() if field in typed}
    return [
        *_against_literals(literals(clean) | degrees_in(clean), flags),
        *_against_scheduler(clean, flags),
        *_unread_factors(clean, recipe.lr_scale, recipe.layer_decay),
        *_unread_by_optimizer(clean, flags),
    ]


def _against_literals(stated: dict[str, Any], flags: Mapping[str, Any]) -> list[Problem]:
    """Refuse typed numbers that differ from a number that the JSON states."""
    found = []
    for field, value in stated.items():
        if field not in flags or value == flags[field]:
            continue
        path = (SHARED | DEGREES)[field]
        key = path.removesuffix(".0").removesuffix(".1")
        fix = (
            'leave out the flag, or write "auto" in the JSON'
            if path in AUTO
            else "leave out the flag, or delete the key from the JSON"
        )
        found.append(
            Problem(
                f"--{field} {flags[field]}",
                f"contradicts {key} = {value} in the JSON",
                fix,
            )
        )
    return found


# Keys with which a scheduler of DeepSpeed sets the learning rate itself.
PEAKS = {"warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr"}


def _against_scheduler(clean: dict[str, Any], flags: Mapping[str, Any]) -> list[Problem]:
    """Refuse typed flags of the recipe's schedule beside a scheduler of the JSON."""
    if "scheduler" not in clean:
        return []
    fields = ["warmup_steps", "decay_steps", "schedule", "min_lr"]
    if PEAKS & set(clean["scheduler"].get("params", {})):
        fields.append("lr")
    return [
        Problem(
            f"--{field} {flags[field]}",
            "contradicts the scheduler block of the JSON, which sets the learning rate",
            "leave out the flag, or delete the block",
        )
        for field in fields
        if field in flags
    ]


def _unread_factors(
    clean: dict[str, Any], lr_scale: dict[str, float] | None, layer_decay: float
) -> list[Problem]:
    """Refuse factors of the recipe's learning rate beside a scheduler of the JSON."""
    if "scheduler" not in clean:
        return []
    rule = "scales the rate of the recipe's schedule, but the JSON's scheduler block sets the rates"
    found, fix = [], "leave it out, or delete the block"
    if lr_scale:
        found.append(Problem(f"lr_scale = {lr_scale}", rule, fix))
    if layer_decay and layer_decay != 1:
        found.append(Problem(f"layer_decay = {layer_decay}", rule, fix))
    return found


def _unread_by_optimizer(clean: dict[str, Any], flags: Mapping[str, Any]) -> list[Problem]:
    """Refuse typed numbers that the JSON's optimizer does not take."""
    name = optimizer_name(clean)
    if not name:
        return []
    takes = optimizer_params(clean, name)
    keys = {"weight_decay": "weight_decay", "beta1": "betas", "beta2": "betas", "eps": "eps"}
    return [
        Problem(
            f"--{field} {flags[field]}",
            f"{name} takes {'a pair as' if key in takes else 'no'} {key}, so the flag would be"
            " ignored",
            "leave out the flag, or use AdamW",
        )
        for field, key in keys.items()
        if field in flags and not takes_number(takes, key)
    ]
