"""Check a DeepSpeed JSON, alone or for one recipe on a number of ranks. Nothing is started.

    recipekit lint zero3.json --recipe mine.py --world 16
    recipekit lint my_config.json --json-only --world 8    # another script passes it on
    recipekit lint my_config.json --filled-by trainer      # after Trainer has filled "auto"
    recipekit lint my_config.json --fix            # write my_config.fixed.json, list the changes
    recipekit lint --table                         # write the tables of ds_configs/README.md

Each problem is printed with its fix and with the result in DeepSpeed alone: DeepSpeed fails, hangs,
ignores the key, replaces the value, or trains with wrong numbers. Exit code 0: clean; 1: problems;
2: wrong command line. The rules are in dslint/rules.py, and the keys are in dslint/schema.json.
`python tools/lint.py` is the same command.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

import hjson

from ..architectures.lookup import model_config
from ..data.mixture import domains_of
from ..dslint import baseline, check, divisibility, fixes, json_file, numbers, resolve
from ..dslint import rules as ds_rules
from ..dslint.schema import schema
from ..hosts.transformers_release import check_transformers_release
from ..plan import check_mixture
from ..spec.command import recipe_of
from ..spec.errors import (
    APPLIES,
    FAILS,
    HANGS,
    IGNORES,
    REPLACES,
    WRONG,
    ConfigError,
    Problem,
    config_error,
    exit_with_error,
)
from ..spec.help_page import CommandFormatter
from ..spec.mesh import Mesh, make_mesh
from ..spec.optimizer_specs import ADAFACTOR_STATES, GRADIENT, OPTIMIZERS
from ..spec.optimizer_specs import OptimizerSpec as OptimizerFacts
from ..spec.paths import path_argument
from ..spec.recipe import Recipe, check_kinds, check_recipe
from ..spec.schedules import Ramp
from ..spec.shipped import IS_WHEEL, STRATEGIES, recipe_path
from ..spec.task_specs import TASKS

README = STRATEGIES / "README.md"
DEGREE_NAMES = {
    "tp": "Tensor-parallel",
    "pp": "Pipeline-parallel",
    "sp": "Sequence-parallel",
    "ep": "Expert-parallel",
}
TABLE_BEGIN, TABLE_END = (
    "<!-- {}: written by python tools/lint.py --table -->\n",
    "<!-- end of what is written -->\n",
)


def read_lenient_json(
    name: str | dict[str, Any], folder: Path, json_only: bool
) -> tuple[dict[str, Any], Path | None, list[Problem]]:
    """Read the JSON, and return it with its path and the problems in its text.

    DeepSpeed itself reads Hjson, which allows comments, missing quotes and extra commas. For a file
    that a script passes to DeepSpeed, these problems are therefore only advice.
    """
    try:
        return *json_file.load_ds_config(name, folder), []
    except ConfigError as error:
        found = (
            [replace(problem, outcome=FAILS) for problem in error.problems]
            if json_only
            else error.problems
        )
        try:
            config = hjson.loads(
                json_file.read_text(Path(str(name))), object_pairs_hook=reject_duplicate_keys
            )
        # hjson 3.1.0 raises IndexError for text that ends inside a ''' string.
        except (OSError, ValueError, RecursionError, IndexError):
            raise ConfigError(found) from None
        if not isinstance(config, dict):
            raise ConfigError(found) from None
        if json_only:
            found = [
                replace(
                    problem,
                    rule=f"{problem.rule}. Trainer and accelerate cannot read it",
                    outcome=APPLIES,
                )
                for problem in found
            ]
        return config, Path(str(name)), found


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is written twice")
    return dict(pairs)


def lint(
    name: str | dict[str, Any] | None,
    path: Path | None = None,
    world: int | None = None,
    json_only: bool = False,
    filled_by: str = "",
    layout: dict[str, int] | None = None,
) -> tuple[list[Problem], list[str]]:
    """Check a JSON. Return every problem, and one line for each decision or piece of advice."""
    recipe, shape, problems = None, None, list[Problem]()
    if path:
        try:
            recipe, shape, problems = _read_recipe(path)
        except ConfigError as error:
            return error.problems, []
    config, file, found = _config_of(name, path, recipe, json_only)
    problems += found
    if config is None:
        return problems, []

    script = check.OtherScript(filled_by, layout) if json_only else None
    given = check.LintInput(config, recipe=recipe, model_config=shape, script=script)

    def check_on(ranks: int | None) -> list[Problem]:
        return check.lint_config(replace(given, world=ranks))

    found = check_on(world)
    if recipe and world:
        found = divisibility.suggest_world_sizes(
            found, world, _divisor(_degrees(vars(recipe), config)), check_on
        )

    # Both the recipe and the JSON may set the degree that a problem is about.
    problems, notes = _split_advice(list(dict.fromkeys(problems + found)), json_only, filled_by)
    lines = [] if problems else [f"{file or 'the JSON of the recipe'}: clean"]
    lines += notes
    if recipe and shape is None:
        lines.append(
            f"{recipe.model} is not on this machine, so its attention heads and sizes were not"
            " checked"
        )
    if recipe and world and not problems:
        mesh = make_mesh(world, **_degrees(vars(recipe), config))
        lines += _describe_decisions(config, recipe, mesh, shape)
    return problems, lines


def _describe_decisions(
    config: dict[str, Any], recipe: Recipe, mesh: Mesh, shape: dict[str, Any] | None
) -> list[str]:
    """Return a line for each value that is derived from the recipe and the number of ranks."""
    resolved, notes = resolve.resolve_ds_config(config, recipe, mesh, shape)
    return [*notes, *describe_batch_sizes(mesh, resolved, recipe.ramp)]


def _split_advice(
    problems_and_advice: list[Problem], json_only: bool, filled_by: str
) -> tuple[list[Problem], list[str]]:
    """Split problems and advice into problems and notes.

    If a script other than a recipe reads the JSON, a setting that DeepSpeed applies is only advice.
    """
    advice = [
        problem for problem in problems_and_advice if json_only and problem.outcome == APPLIES
    ]
    problems = [problem for problem in problems_and_advice if problem not in advice]
    notes = [f"note: {format_problem(problem)}" for problem in advice]
    if json_only and not filled_by and any('= "auto"' in problem.where for problem in problems):
        notes.append(
            'note: Trainer and accelerate fill many "auto" values before DeepSpeed reads them: add'
            " --filled-by trainer or --filled-by accelerate"
        )
    return problems, notes


def _read_recipe(path: Path) -> tuple[Recipe | None, dict[str, Any] | None, list[Problem]]:
    """Return a recipe, its model's config.json and the recipe's problems.

    The config.json is None if it is not on this machine. Raises `ConfigError` for values of a wrong
    type, because nothing else can be checked with such values.
    """
    problems, shape = list[Problem](), None
    try:
        recipe = recipe_of(path)
    except ConfigError as error:
        return None, None, error.problems
    if wrong := check_kinds(vars(recipe)):
        raise ConfigError(wrong)
    try:
        problems += check_recipe(recipe)
        shape = model_config(
            recipe.model, recipe.task if recipe.task in tuple(TASKS) else Recipe.task
        )
        if isinstance(recipe.dataset, str):
            problems += check_mixture(recipe.task_spec, domains_of(recipe.dataset))
    except ConfigError as error:
        problems += error.problems
    return recipe, shape, problems


def _config_of(
    name: str | dict[str, Any] | None, path: Path | None, recipe: Recipe | None, json_only: bool
) -> tuple[dict[str, Any] | None, Path | None, list[Problem]]:
    """Return the JSON to check, its path, and the problems in its text and in the recipe's engine.

    A recipe that uses one of torch's engines has no JSON. Its settings are checked in DeepSpeed's
    terms.
    """
    problems: list[Problem] = []
    if not name and not recipe:
        return None, None, problems
    try:
        if recipe:
            problems += baseline.check_engine(
                replace(recipe, ds_config=name) if name else recipe,
                frozenset({"ds_config"}) if name else frozenset(),
            )
        if recipe and recipe.engine != "deepspeed":
            return baseline.torch_engine_config(), Path(recipe.engine), problems
        folder = path.resolve().parent if path else Path.cwd()
        config, file, found = read_lenient_json(
            name or getattr(recipe, "ds_config", ""), folder, json_only
        )
        return config, file, problems + found
    except ConfigError as error:
        return None, None, problems + error.problems


def _degrees(fields: dict[str, Any], config: dict[str, Any]) -> dict[str, int]:
    """Return the parallel degrees in a recipe's fields, replaced by any degrees in the JSON."""
    return {axis: fields[axis] for axis in DEGREE_NAMES} | numbers.read_degrees(config)


def _divisor(degrees: dict[str, int]) -> int:
    """Return a number that divides every world size that is valid for the parallel degrees."""
    return math.prod(max(1, degree) for degree in degrees.values())


def write_fixed_json(
    name: str, folder: Path, json_only: bool, check_on: Callable[[dict[str, Any]], list[Problem]]
) -> tuple[Path | None, list[str]]:
    """Write the JSON with all possible fixes to NAME.fixed.json in the same folder.

    Return the new path and one line for each change. The path is None if nothing can be fixed.
    Raises `ConfigError` if the file already exists or cannot be written.
    """
    try:
        config, file, faults = read_lenient_json(name, folder, json_only)
    except ConfigError:  # not JSON at all; the list of problems reports this
        return None, []
    assert file is not None
    if not config:  # nobody meant to write an empty file as JSON
        return None, []
    fixed, changes = fixes.apply_fixes(config, check_on)
    if not changes and (json_only or not faults):
        return None, []
    lines = [
        *(f"{problem.where}: rewritten ({problem.rule.partition('. ')[0]})" for problem in faults),
        *map(str, changes),
    ]
    target = file.with_name(f"{file.name.removesuffix('.json')}.fixed.json")
    try:
        # Write half of a surrogate pair in its original form: \ud800
        with target.open("x", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(json.dumps(fixed, indent=2, ensure_ascii=False) + "\n")
    except FileExistsError:
        raise config_error(f"--fix {target}", "already exists", "delete it or rename it") from None
    except OSError as error:
        raise config_error(
            f"--fix {target}",
            f"cannot be written: {error.strerror}",
            "copy the JSON to a folder that you can write to",
        ) from None
    return target, [
        f"wrote {target}: {len(lines)} change{'s' if len(lines) > 1 else ''}",
        *(f"  {number}. {line}" for number, line in enumerate(lines, 1)),
    ]


def describe_batch_sizes(mesh: Mesh, resolved: dict[str, Any], ramp: Ramp) -> list[str]:
    """Return the size of a step's batch, and the steps at which this size changes."""
    micro, steps = (
        resolved["train_micro_batch_size_per_gpu"],
        resolved["gradient_accumulation_steps"],
    )
    each = f"rows of a step = {mesh.dp} data-parallel * {micro} micro_batch *"
    changes = [
        f"from step {first} on: {rows} {each} {rows // (mesh.dp * micro)} accumulation"
        for first, rows in ramp.table[1:]
    ]
    return [f"{mesh}: {resolved['train_batch_size']} {each} {steps} accumulation", *changes]


def format_problem(problem: Problem) -> str:
    """Return the printed form of a problem, including the outcome in DeepSpeed alone."""
    return (
        f"{problem} (DeepSpeed {schema()['deepspeed']} {problem.outcome})"
        if problem.outcome
        else str(problem)
    )


def verdict(problems: list[Problem]) -> str:
    """Return the outcome in DeepSpeed alone for a file with these problems.

    "fails" includes hangs and wrong numbers, "ignores" means that some settings have no effect, and
    "applies" means that everything works as written.
    """
    outcomes = {problem.outcome for problem in problems}
    return (
        "fails"
        if outcomes & {FAILS, HANGS, WRONG}
        else "ignores"
        if outcomes & {IGNORES, REPLACES}
        else "applies"
    )


# The support table


def support_table() -> str:
    """Return a Markdown list of the rules for combined settings.

    The list also contains the keys that work only in some configurations. A table would not fit on
    a screen.
    """
    lines = [
        (
            f"Each entry names a combination, the result in DeepSpeed {schema()['deepspeed']}, the"
            " rule and the fix. A source is a file below"
        ),
        (
            '`deepspeed/runtime`; "run" means that a run showed the result. `lint` reports every'
            " entry that a JSON or a layout"
        ),
        "shows. The other entries depend on the script or the model.",
        "",
    ]
    for rule in ds_rules.DEEPSPEED_RULES:
        if rule.combination:
            lines += table_entry(f"**{rule.combination}**", rule)
    lines += ["", "### Keys that work only in some configurations", ""]
    alone = [
        rule
        for rule in ds_rules.DEEPSPEED_RULES + ds_rules.STOCK_RULES
        if not rule.combination and rule.source
    ]
    same = lambda rule: (rule.key.rpartition(".")[0], *rule[2:6])  # noqa: E731
    for (block, *_), group in groupby(
        sorted(alone, key=lambda rule: [rule_position(alone, same(rule)), alone.index(rule)]),
        key=same,
    ):
        rules = list(group)
        keys = ", ".join(f"`{rule.key.rpartition('.')[2]}`" for rule in rules)
        lines += table_entry(f"`{block}`: {keys}" if block else keys, rules[0])
    return "\n".join(lines) + "\n"


def table_entry(title: str, rule: ds_rules.Rule) -> list[str]:
    mark = {
        APPLIES: "works",
        FAILS: "fails",
        IGNORES: "ignored",
        REPLACES: "replaced",
        HANGS: "hangs",
        WRONG: "wrong numbers",
    }[rule.outcome]
    fix = f" Fix: {rule.fix}." if rule.fix else ""
    text = f"- {title} ({mark}): {rule.rule}.{fix} Source: {rule.source}"
    return wrap(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def rule_position(rules: list[ds_rules.Rule], like: tuple[str, ...]) -> int:
    return next(
        index
        for index, rule in enumerate(rules)
        if (rule.key.rpartition(".")[0], *rule[2:6]) == like
    )


def optimizer_table() -> str:
    """Return a Markdown list of the optimizers that a recipe's JSON may name.

    The list shows each optimizer's states and explains why other optimizers are rejected.
    """
    lines = []
    for name, facts in OPTIMIZERS.items():
        text = (
            f"- `{name}`: refused: {facts.unsupported_reason}"
            if facts.unsupported_reason
            else f"- `{name}`: {_describe_support(facts)}. States: {_describe_states(facts)}"
        )
        lines += wrap(
            text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines) + "\n"


def _describe_support(spec: OptimizerFacts) -> str:
    if spec.acts_on == GRADIENT:
        return "ZeRO-0 and torch's DDP (implemented in recipekit/optim)"
    stages = "ZeRO-0, -1, -2 and -3"
    return (
        f"{stages}, torch's DDP and FSDP2 (implemented in recipekit/optim)"
        if spec.is_own_class
        else stages
    )


def _describe_states(spec: OptimizerFacts) -> str:
    """Describe an optimizer's states. Each state needs 4 bytes per weight."""
    more = [
        f"with {option} also {' and '.join(map(_as_code, names))}"
        for option, names in spec.optional_states.items()
    ]
    if spec.host is not None and spec.host.states != spec.states:
        more.append(
            f"with offload (computed by DeepSpeed) {' and '.join(map(_as_code, spec.host.states))}"
        )
    if spec.matrix_states is not None:
        more.append(f"for a matrix {' and '.join(map(_as_code, spec.matrix_states))}")
    if spec.states == ADAFACTOR_STATES:
        rows, columns, elements = map(_as_code, ADAFACTOR_STATES)
        return (
            f"{elements} for a vector; {rows} and {columns}, with one number for each row and"
            " column, for other weights"
        )
    if spec.acts_on == GRADIENT:
        more.append("and the unsent remainder of each rank")
    states = [*map(_as_code, spec.states)]
    listed = " and ".join(filter(None, [", ".join(states[:-1]), *states[-1:]]))  # "a, b and c"
    return ", ".join([listed or "none", *more])


def _as_code(name: str) -> str:
    return f"`{name}`"


def update_tables(page: str) -> str:
    """Return the page with the current lists between their markers."""
    for name, written in (("optimizers", optimizer_table()), ("combinations", support_table())):
        before, mark, rest = page.partition(TABLE_BEGIN.format(name))
        _, _, after = rest.partition(TABLE_END)
        page = f"{before}{mark}{written}{TABLE_END}{after}"
    return page


def make_lint_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=CommandFormatter)
    parser.add_argument(
        "config",
        nargs="?",
        type=lambda text: str(path_argument(text)),
        help=(
            "DeepSpeed JSON to check: a path, or a name in ds_configs/. (default: the recipe's"
            " JSON)"
        ),
    )
    parser.add_argument(
        "--recipe",
        type=recipe_path,
        metavar="FILE",
        help="Recipe file that uses the JSON. Its batch, model and schedule are checked as well.",
    )
    parser.add_argument(
        "--world",
        type=int,
        metavar="N",
        help="Number of ranks of the run. The layout and the batch are checked as well.",
    )
    parser.add_argument(
        "--json-only",
        "--json_only",
        action="store_true",
        help="Check a JSON that a script other than a recipe passes to DeepSpeed.",
    )
    parser.add_argument(
        "--filled-by",
        "--filled_by",
        choices=("trainer", "accelerate"),
        default="",
        help=(
            'Program that fills "auto" values before DeepSpeed reads the JSON. Implies --json-only.'
            " (default: none)"
        ),
    )
    for axis in DEGREE_NAMES:
        default = "1" if axis == "pp" else "the JSON's, or 1"
        parser.add_argument(
            f"--{axis}",
            type=int,
            metavar="N",
            help=f"{DEGREE_NAMES[axis]} degree in the script of --json-only. (default: {default})",
        )
    parser.add_argument(
        "--fix",
        action="store_true",
        help=(
            "Write NAME.fixed.json next to the JSON, with every unambiguous fix applied, and list"
            " the changes."
        ),
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help=(
            "Write the tables of rules and optimizers into ds_configs/README.md. Needs a clone of"
            " the repository."
        ),
    )
    return parser


def main(argv: list[str] | None = None, prog: str = "recipekit lint") -> int:
    """Check the JSON that a command line names, and return the exit code."""
    parser = make_lint_parser(prog)
    given = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args(given)
    if arguments.table:
        _write_tables(parser, given)
        return 0

    layout = {
        axis: degree for axis in DEGREE_NAMES if (degree := getattr(arguments, axis)) is not None
    }
    json_only = bool(arguments.json_only or arguments.filled_by or layout)
    _check_arguments(parser, arguments, layout, json_only)

    def linted(config: str | dict[str, Any] | None) -> tuple[list[Problem], list[str]]:
        return lint(
            config, arguments.recipe, arguments.world, json_only, arguments.filled_by, layout
        )

    too_old, untested = ([], []) if json_only else check_transformers_release()
    name, (problems, lines) = arguments.config, linted(arguments.config)
    if arguments.fix and name is not None and problems:
        folder = arguments.recipe.resolve().parent if arguments.recipe else Path.cwd()
        try:
            written, changes = write_fixed_json(
                name, folder, json_only, lambda config: linted(config)[0]
            )
        except ConfigError as error:
            exit_with_error(error)
        if written is not None:
            print("\n".join(changes))
            name, (problems, lines) = written, linted(str(written))
    problems = too_old + problems
    print_problems(name or arguments.recipe, problems, lines + untested)
    return 1 if problems else 0


def _write_tables(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """Write the tables in ds_configs/README.md, or exit with the parser's error."""
    if len(argv) > 1:
        parser.error("--table cannot be combined with other arguments")
    if IS_WHEEL:
        parser.error(
            "--table requires a clone of the repository, because an installed package has no"
            " ds_configs/README.md"
        )
    README.write_text(update_tables(README.read_text()))
    print(f"wrote the tables of rules and optimizers into {README.relative_to(README.parents[1])}")


def _check_arguments(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    layout: dict[str, int],
    json_only: bool,
) -> None:
    """Exit with the parser's error if the arguments cannot be combined."""
    if arguments.config is None and arguments.recipe is None:
        parser.error("give a JSON, or --recipe, or both")
    if arguments.recipe and json_only:
        parser.error(
            "--recipe cannot be combined with --json-only, --filled-by and degrees, which are for"
            " other scripts"
        )
    if any(degree < 1 for degree in layout.values()):
        parser.error("a degree must be at least 1")
    if arguments.world is not None and arguments.world < 1:
        parser.error("--world must be at least 1")
    if arguments.fix and arguments.config is None:
        parser.error("--fix requires the path of a JSON")


def print_problems(name: str | Path, problems: list[Problem], lines: list[str]) -> None:
    if problems:
        print(f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in {name}")
        print(
            "\n".join(
                f"  {number}. {format_problem(problem)}"
                for number, problem in enumerate(problems, 1)
            )
        )
    print("\n".join(lines), end="\n" if lines else "")
