"""Check of a DeepSpeed JSON that finds every mistake before anything starts.

schema.json (written by tools/make/make_ds_schema.py) lists the keys that DeepSpeed reads. rules.py
lists the combinations that DeepSpeed does not support. The check imports neither torch nor
deepspeed, so an error appears within about a second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..spec.errors import APPLIES, FAILS, ConfigError, Problem
from ..spec.mesh import Mesh, make_mesh
from ..spec.recipe import Recipe, check_unsupported
from ..spec.task_specs import PACKED
from .batch import check_batch_sizes, check_has_batch_size
from .divisibility import check_dense_mask, check_divisibility, check_pipeline
from .numbers import (
    DEGREE_PATHS,
    SHARED_FIELD_PATHS,
    json_or_recipe_number,
    read_literals,
    valid_degrees,
)
from .rules import DEEPSPEED_RULES, RECIPE_HONOURS, RECIPE_RULES, STOCK_RULES, Rule, RuleContext
from .schema import (
    AUTO_KEYS,
    FILLED_BY,
    check_keys,
    optimizer_name,
    optimizer_params,
    precision_of_auto,
    resembles_any,
    takes_number,
    value_at,
)
from .shapes import count_layers, sharded_sizes
from .values import Node, format_json_value

# If one of these keys, or a block around it, is invalid or misspelt, no rule about combinations can
# be applied.
DECIDING_KEYS = (
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
    """A training script that passes its JSON to DeepSpeed itself, without a recipe."""

    filled_by: str = ""  # program that replaces "auto": "trainer", "accelerate" or "" (no program)
    layout: dict[str, int] | None = None  # degrees of the script's mesh


@dataclass(frozen=True)
class LintInput:
    """A DeepSpeed JSON with all known facts about its run. Unknown facts are not checked."""

    config: dict[str, Any]
    world: int | None = None
    mesh: Mesh | None = None
    recipe: Recipe | None = None
    model_config: dict[str, Any] | None = None
    typed: frozenset[str] = frozenset()  # fields of the recipe that came from the command line
    script: OtherScript | None = None  # the script that reads the JSON instead of a recipe
    local: int = 0  # ranks of this host, 0 if unknown


def lint_config(lint_input: LintInput) -> list[Problem]:
    """Return every mistake that can be found without hardware, or []."""
    if lint_input.script is not None:
        found = _check_for_script(lint_input, lint_input.script)
    elif lint_input.recipe is not None:
        found = _check_for_recipe(lint_input, lint_input.recipe)
    else:
        found = _check_for_any_recipe(lint_input)
    return list(dict.fromkeys(found))


def _check_for_script(lint_input: LintInput, script: OtherScript) -> list[Problem]:
    """Return the problems of a JSON that a script other than a recipe passes to DeepSpeed.

    Keys that only a recipe ignores are allowed. A problem with the outcome APPLIES is only advice.
    """
    found, clean = check_keys(lint_input.config, FILLED_BY[script.filled_by], stock=True)
    # DeepSpeed ignores pipeline.stages.
    wanted = (
        dict.fromkeys(DEGREE_PATHS, 1) | valid_degrees(clean) | {"pp": 1} | (script.layout or {})
    )
    refused, degrees, mesh = _resolve_mesh(lint_input, wanted)
    facts = _rule_context(lint_input, clean, degrees, mesh)
    total, micro = _batch_sizes(lint_input, clean)

    return [
        *found,
        *refused,
        *_check_rules(lint_input.config, facts, DEEPSPEED_RULES + STOCK_RULES),
        *check_has_batch_size(lint_input.config, script.filled_by),
        *check_batch_sizes(clean, total, micro, mesh),
        *check_divisibility(facts, 0, lint_input.model_config, mesh),
        *check_pipeline(
            degrees["pp"], False, total, micro, count_layers(lint_input.model_config), mesh
        ),
    ]


def _check_for_any_recipe(lint_input: LintInput) -> list[Problem]:
    """Return the problems that a JSON has regardless of the recipe."""
    found, clean = _walk_for_recipes(lint_input.config)
    refused, degrees, mesh = _resolve_mesh(
        lint_input, dict.fromkeys(DEGREE_PATHS, 1) | valid_degrees(clean)
    )
    facts = _rule_context(lint_input, clean, degrees, mesh)
    total, micro = _batch_sizes(lint_input, clean)

    return [
        *found,
        *refused,
        *_check_rules(lint_input.config, facts, DEEPSPEED_RULES + RECIPE_RULES),
        *_ignored_block_keys(clean),
        *check_batch_sizes(clean, total, micro, mesh),
        *check_divisibility(facts, 0, lint_input.model_config, mesh),
        *check_pipeline(
            degrees["pp"], False, total, micro, count_layers(lint_input.model_config), mesh
        ),
    ]


def _check_for_recipe(lint_input: LintInput, recipe: Recipe) -> list[Problem]:
    """Return the problems of a JSON in combination with the recipe that reads it."""
    found, clean = _walk_for_recipes(lint_input.config, recipe.steps, recipe.min_lr)
    wanted = {axis: getattr(recipe, axis) for axis in DEGREE_PATHS} | valid_degrees(clean)
    refused, degrees, mesh = _resolve_mesh(lint_input, wanted)

    # Further problems with a degree that the task does not support would be noise.
    lacking = check_unsupported(recipe.task_spec, degrees)
    degrees |= dict.fromkeys(recipe.task_spec.unsupported.keys() & degrees.keys(), 1)

    facts = _rule_context(lint_input, clean, degrees, mesh)
    total, micro = _batch_sizes(lint_input, clean)
    dualpipev = recipe.pipeline_schedule == "dualpipev"
    layers = 0 if recipe.pp_plan else count_layers(lint_input.model_config)
    heads = sharded_sizes(lint_input.model_config, 0)["sp"]["attention heads"]
    has_mask = recipe.task_spec.rows == PACKED and heads
    width = 4 if facts.dtype == "fp32" else 2  # bytes per number

    return [
        *found,
        *refused,
        *lacking,
        *_check_rules(lint_input.config, facts, DEEPSPEED_RULES + RECIPE_RULES),
        *_ignored_block_keys(clean),
        *_contradicting_flags(clean, recipe, lint_input.typed),
        *check_batch_sizes(
            clean,
            total,
            micro,
            mesh,
            recipe.ramp,
            min_micro_batches=2 * degrees["pp"] if dualpipev else 1,
        ),
        *check_divisibility(facts, recipe.seq_len, lint_input.model_config, mesh),
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
    """Return the mistakes in single keys, and the configuration that a recipe builds from the rest.

    `steps` is 0 if the length of the run is unknown.
    """
    found, clean = check_keys(config)

    # The rules check the value that will replace "auto".
    for path, value in precision_of_auto(
        value_at(config, "fp16.enabled"), value_at(config, "bf16.enabled")
    ).items():
        block = path.partition(".")[0]
        if value_at(config, path) == "auto":
            clean = clean | {block: clean.get(block, {}) | {"enabled": value}}

    autos = _auto_keys_of_schedule(config)
    if not autos:
        return [*found, *_check_total_steps(clean, steps)], clean

    # The fix deletes the block, so the block's other problems disappear as well.
    others = [problem for problem in found if not problem.where.startswith("scheduler.params.")]
    clean = {key: value for key, value in clean.items() if key != "scheduler"}
    return [*others, _auto_schedule(config, autos, min_lr)], clean


def _resolve_mesh(
    lint_input: LintInput, degrees: Mapping[str, int]
) -> tuple[list[Problem], dict[str, int], Mesh | None]:
    """Return the problems of the layout, the parallel degrees, and the mesh (None if unknown).

    If a mesh is given, its degrees replace `degrees`. Degrees below 1 are reported and then treated
    as 1.
    """
    refused: list[Problem] = []
    mesh = lint_input.mesh
    if mesh is not None:
        degrees = {axis: getattr(mesh, axis) for axis in DEGREE_PATHS}
    elif lint_input.world is not None:
        try:
            mesh = make_mesh(lint_input.world, **degrees)
        except ConfigError as error:
            refused = error.problems
    return refused, {axis: max(1, degree) for axis, degree in degrees.items()}, mesh


def _rule_context(
    lint_input: LintInput, clean: dict[str, Any], degrees: dict[str, int], mesh: Mesh | None
) -> RuleContext:
    world = mesh.world if mesh is not None else lint_input.world
    return RuleContext(
        clean,
        optimizer_name(clean),
        degrees,
        world,
        lint_input.local,
        stock=lint_input.script is not None,
    )


def _batch_sizes(lint_input: LintInput, clean: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the global batch and the micro-batch. An unknown number is None."""
    total = json_or_recipe_number(clean, lint_input.recipe, "global_batch")
    micro = json_or_recipe_number(clean, lint_input.recipe, "micro_batch")
    return total, micro


def _check_rules(
    config: dict[str, Any], context: RuleContext, rules: Sequence[Rule]
) -> list[Problem]:
    """Return a problem for each rule that the configuration breaks.

    If a key that many rules depend on is "auto" or invalid, no rule is applied.
    """
    unknown = value_at(config, "zero_optimization.stage") == "auto" or any(
        _is_key_at_fault(pivot, config, context.config) for pivot in DECIDING_KEYS
    )
    if unknown:
        return []

    found = []
    for rule in rules:
        value = context.get(rule.key)
        if value is not None and rule.is_broken(context):
            found.append(
                Problem(
                    f"{rule.key} = {format_json_value(value)}", rule.rule, rule.fix, rule.outcome
                )
            )
    return found


def _is_key_at_fault(pivot: str, config: dict[str, Any], clean: dict[str, Any]) -> bool:
    """Return True if the key check removed `pivot` or a block around it from `config`.

    The result is also True if the key is misspelt there.
    """
    for key in pivot.split("."):
        if key not in clean and resembles_any(key, config.keys() - clean.keys()):
            return True
        config, clean = (
            block if isinstance(block := of.get(key), dict) else {} for of in (config, clean)
        )
    return False


def check_device(config: dict[str, Any], device_type: str, has_fp16: bool = False) -> list[Problem]:
    """Return the problems that a JSON has with this process's accelerator.

    `device_type` is torch's name for the accelerator, for example cuda or cpu. `has_fp16` is True
    if DeepSpeed's accelerator can compute in fp16, which most CPUs cannot.
    """
    facts = RuleContext(check_keys(config)[1])
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


# DeepSpeed's scheduler -> the recipe's equivalent schedule
RECIPE_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _auto_keys_of_schedule(config: dict[str, Any]) -> list[str]:
    """Return the scheduler numbers that are left to Trainer and that recipes also have."""
    params, name = value_at(config, "scheduler.params"), value_at(config, "scheduler.type")
    if not isinstance(params, dict) or not isinstance(name, str) or name not in RECIPE_SCHEDULES:
        return []
    return [key for key, value in params.items() if value == "auto"]


def _auto_schedule(config: dict[str, Any], autos: list[str], min_lr: float) -> Problem:
    """Return the problem of a scheduler whose `autos` nothing fills, with the flags as its fix."""
    schedule, params = RECIPE_SCHEDULES[config["scheduler"]["type"]], config["scheduler"]["params"]

    numbers: dict[str, Any] = {"schedule": schedule}
    if schedule == "constant" and min_lr:
        numbers["min_lr"] = "0"
    for field, key in (("warmup_steps", "warmup_num_steps"), ("lr", "warmup_max_lr")):
        value = params.get(key)
        if isinstance(value, (int, float)):
            numbers[field] = value
    flags = " ".join(f"--{field} {value}" for field, value in numbers.items())

    return Problem(
        f"scheduler = {format_json_value(config['scheduler'])}",
        f'a recipe does not fill "auto" in {", ".join(autos)}, because it has its own schedule',
        f"delete the block and use {flags}",
        FAILS,
    )


def _check_total_steps(clean: dict[str, Any], steps: int) -> list[Problem]:
    """Report a scheduler that is longer or shorter than the run. `steps` is 0 if unknown."""
    total = value_at(clean, "scheduler.params.total_num_steps")
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


def _ignored_block_keys(clean: dict[str, Any]) -> list[Problem]:
    """Report keys other than the degree in blocks from which a recipe reads only the degree."""
    return [
        Problem(
            f"{block}.{key} = {format_json_value(value)}",
            f"a recipe reads only {' and '.join(sorted(honoured))} of this block",
            "delete it",
        )
        for block, honoured in RECIPE_HONOURS.items()
        for key, value in clean.get(block, {}).items()
        if key not in honoured
    ]


def _contradicting_flags(
    clean: dict[str, Any], recipe: Recipe, typed: frozenset[str]
) -> list[Problem]:
    """Report command-line flags that are not read or that contradict a number in the JSON."""
    flags = {field: value for field, value in vars(recipe).items() if field in typed}
    return [
        *_against_literals(read_literals(clean) | valid_degrees(clean), flags),
        *_against_scheduler(clean, flags),
        *_unread_factors(clean, recipe.lr_scale, recipe.layer_decay),
        *_unread_by_optimizer(clean, flags),
    ]


def _against_literals(stated: dict[str, Any], flags: Mapping[str, Any]) -> list[Problem]:
    """Report command-line numbers that differ from a number in the JSON."""
    found = []
    for field, value in stated.items():
        if field not in flags or value == flags[field]:
            continue
        path = (SHARED_FIELD_PATHS | DEGREE_PATHS)[field]
        key = path.removesuffix(".0").removesuffix(".1")
        fix = (
            'leave out the flag, or write "auto" in the JSON'
            if path in AUTO_KEYS
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


# keys with which a DeepSpeed scheduler sets the learning rate itself
SCHEDULER_LR_KEYS = {"warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr"}


def _against_scheduler(clean: dict[str, Any], flags: Mapping[str, Any]) -> list[Problem]:
    """Report flags that set the recipe's schedule if the JSON has a scheduler."""
    if "scheduler" not in clean:
        return []
    fields = ["warmup_steps", "decay_steps", "schedule", "min_lr"]
    if SCHEDULER_LR_KEYS & set(clean["scheduler"].get("params", {})):
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
    """Report the recipe's learning-rate factors if the JSON has a scheduler, which ignores them."""
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
    """Report command-line numbers that the JSON's optimizer does not accept."""
    name = optimizer_name(clean)
    if not name:
        return []
    takes = optimizer_params(clean, name)
    keys = {"weight_decay": "weight_decay", "beta1": "betas", "beta2": "betas", "eps": "eps"}
    return [
        Problem(
            f"--{field} {flags[field]}",
            f"{name} takes {_count_phrase(takes.get(key))} {key}, so the flag would be ignored",
            "leave out the flag, or use AdamW",
        )
        for field, key in keys.items()
        if field in flags and not takes_number(takes, key)
    ]


def _count_phrase(node: Node | None) -> str:
    """Return a phrase that describes the numbers that a key of optimizer.params accepts."""
    if node is None:
        return "no"
    return "a pair as" if node["length"] == 2 else f"{node['length']} numbers as"
