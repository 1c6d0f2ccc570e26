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
from ..dslint import baseline, check, divisions, fixes, json_file, numbers, resolve
from ..dslint import rules as ds_rules
from ..dslint.schema import schema
from ..plan import check_mixture
from ..spec.command import recipe_of
from ..spec.help_page import CommandFormatter
from ..spec.mesh import Mesh, make_mesh
from ..spec.optimizer_specs import FACTORS, FACTS, GRADIENT
from ..spec.optimizer_specs import Facts as OptimizerFacts
from ..spec.paths import path_of
from ..spec.phases import Ramp
from ..spec.recipe import Recipe, check_kinds, check_recipe
from ..spec.refusal import (
    APPLIES,
    FAILS,
    HANGS,
    IGNORES,
    REPLACES,
    WRONG,
    Problem,
    Refusal,
    exit_refused,
    refuse,
)
from ..spec.shipped import IS_WHEEL, STRATEGIES, recipe_path
from ..spec.task_specs import TASKS

README = STRATEGIES / "README.md"
DEGREES = {
    "tp": "Tensor-parallel",
    "pp": "Pipeline-parallel",
    "sp": "Sequence-parallel",
    "ep": "Expert-parallel",
}
BEGIN, END = (
    "<!-- {}: written by python tools/lint.py --table -->\n",
    "<!-- end of what is written -->\n",
)


def read(
    name: str | dict[str, Any], folder: Path, json_only: bool
) -> tuple[dict[str, Any], Path | None, list[Problem]]:
    """Reads the JSON; returns it, its path, and what is wrong with its text.

    DeepSpeed itself reads Hjson: comments, no quotes, spare commas. So for a file that a script
    hands to DeepSpeed these faults are only advice.
    """
    try:
        return *json_file.load(name, folder), []
    except Refusal as refusal:
        found = (
            [replace(problem, outcome=FAILS) for problem in refusal.problems]
            if json_only
            else refusal.problems
        )
        try:
            config = hjson.loads(json_file.read_text(Path(str(name))), object_pairs_hook=once_each)
        # hjson 3.1.0 raises IndexError for text that ends within '''.
        except (OSError, ValueError, RecursionError, IndexError):
            raise Refusal(found) from None
        if not isinstance(config, dict):
            raise Refusal(found) from None
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


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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
    """Check a JSON; return every problem, and one line for each decision or piece of advice."""
    recipe, shape, problems = None, None, list[Problem]()
    if path:
        try:
            recipe, shape, problems = _read_recipe(path)
        except Refusal as refusal:
            return refusal.problems, []
    config, file, found = _config_of(name, path, recipe, json_only)
    problems += found
    if config is None:
        return problems, []

    script = check.OtherScript(filled_by, layout) if json_only else None
    given = check.LintInput(config, recipe=recipe, model_config=shape, script=script)

    def check_on(ranks: int | None) -> list[Problem]:
        return check.check(replace(given, world=ranks))

    found = check_on(world)
    if recipe and world:
        found = divisions.name_worlds(
            found, world, _divisor(_degrees(vars(recipe), config)), check_on
        )

    # The recipe and the JSON may both set the degree that a problem is about.
    problems, notes = _without_advice(list(dict.fromkeys(problems + found)), json_only, filled_by)
    lines = [] if problems else [f"{file or 'the JSON of the recipe'}: clean"]
    lines += notes
    if recipe and shape is None:
        lines.append(
            f"{recipe.model} is not on this machine, so its attention heads and sizes were not"
            " checked"
        )
    if recipe and world and not problems:
        mesh = make_mesh(world, **_degrees(vars(recipe), config))
        lines += _decisions(config, recipe, mesh, shape)
    return problems, lines


def _decisions(
    config: dict[str, Any], recipe: Recipe, mesh: Mesh, shape: dict[str, Any] | None
) -> list[str]:
    """Return a line for each value that the recipe and the ranks decide."""
    resolved, notes = resolve.resolve(config, recipe, mesh, shape)
    return [*notes, *batches(mesh, resolved, recipe.ramp)]


def _without_advice(
    found: list[Problem], json_only: bool, filled_by: str
) -> tuple[list[Problem], list[str]]:
    """Split what was found into problems and notes. A setting that DeepSpeed applies is only advice
    about the JSON of another script.
    """
    advice = [problem for problem in found if json_only and problem.outcome == APPLIES]
    problems = [problem for problem in found if problem not in advice]
    notes = [f"note: {told(problem)}" for problem in advice]
    if json_only and not filled_by and any('= "auto"' in problem.where for problem in problems):
        notes.append(
            'note: Trainer and accelerate fill many "auto" values before DeepSpeed reads them: add'
            " --filled-by trainer or --filled-by accelerate"
        )
    return problems, notes


def _read_recipe(path: Path) -> tuple[Recipe | None, dict[str, Any] | None, list[Problem]]:
    """Return a recipe, its model's config.json if it is on this machine, and the recipe's own
    problems.

    Raise `Refusal` for values of a wrong type, with which nothing else can be checked.
    """
    problems, shape = list[Problem](), None
    try:
        recipe = recipe_of(path)
    except Refusal as refusal:
        return None, None, refusal.problems
    if wrong := check_kinds(vars(recipe)):
        raise Refusal(wrong)
    try:
        problems += check_recipe(recipe)
        shape = model_config(
            recipe.model, recipe.task if recipe.task in tuple(TASKS) else Recipe.task
        )
        if isinstance(recipe.dataset, str):
            problems += check_mixture(recipe.facts, domains_of(recipe.dataset))
    except Refusal as refusal:
        problems += refusal.problems
    return recipe, shape, problems


def _config_of(
    name: str | dict[str, Any] | None, path: Path | None, recipe: Recipe | None, json_only: bool
) -> tuple[dict[str, Any] | None, Path | None, list[Problem]]:
    """Return the JSON to check, its path, and the problems of its text and of the recipe's engine.

    A recipe of an engine of torch has no JSON: its settings in DeepSpeed's words are checked.
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
            return baseline.own_config(), Path(recipe.engine), problems
        folder = path.resolve().parent if path else Path.cwd()
        config, file, found = read(name or getattr(recipe, "ds_config", ""), folder, json_only)
        return config, file, problems + found
    except Refusal as refusal:
        return None, None, problems + refusal.problems


def _degrees(fields: dict[str, Any], config: dict[str, Any]) -> dict[str, int]:
    """Return the parallel degrees of a recipe's fields, replaced by those that the JSON sets."""
    return {axis: fields[axis] for axis in DEGREES} | numbers.degrees(config)


def _divisor(degrees: dict[str, int]) -> int:
    """Return the number that divides every world size that fits the parallel degrees."""
    return math.prod(max(1, degree) for degree in degrees.values())


def fix(
    name: str, folder: Path, json_only: bool, check_on: Callable[[dict[str, Any]], list[Problem]]
) -> tuple[Path | None, list[str]]:
    """Write what can be fixed beside the JSON, as NAME.fixed.json; return its path, and one line
    for each change.

    The path is None if nothing can be fixed. Raises `Refusal` if the file is there already or
    cannot be written.
    """
    try:
        config, file, faults = read(name, folder, json_only)
    except Refusal:  # not JSON at all, which the list of problems says
        return None, []
    assert file is not None
    if not config:  # an empty file is no JSON that somebody wrote
        return None, []
    fixed, changes = fixes.fix(config, check_on)
    if not changes and (json_only or not faults):
        return None, []
    lines = [
        *(f"{problem.where}: rewritten ({problem.rule.partition('. ')[0]})" for problem in faults),
        *map(str, changes),
    ]
    target = file.with_name(f"{file.name.removesuffix('.json')}.fixed.json")
    try:
        # half a surrogate pair as it was: \ud800
        with target.open("x", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(json.dumps(fixed, indent=2, ensure_ascii=False) + "\n")
    except FileExistsError:
        raise refuse(f"--fix {target}", "already exists", "delete it or rename it") from None
    except OSError as error:
        raise refuse(
            f"--fix {target}",
            f"cannot be written: {error.strerror}",
            "copy the JSON to a folder that you can write to",
        ) from None
    return target, [
        f"wrote {target}: {len(lines)} change{'s' if len(lines) > 1 else ''}",
        *(f"  {number}. {line}" for number, line in enumerate(lines, 1)),
    ]


def batches(mesh: Mesh, resolved: dict[str, Any], ramp: Ramp) -> list[str]:
    """Says what a step takes, and from which step on another number of rows."""
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


def told(problem: Problem) -> str:
    """Return a problem as it is printed, with the outcome under DeepSpeed alone."""
    return (
        f"{problem} (DeepSpeed {schema()['deepspeed']} {problem.outcome})"
        if problem.outcome
        else str(problem)
    )


def verdict(problems: list[Problem]) -> str:
    """Returns the outcome under DeepSpeed of a file with these problems: "fails" or trains wrongly,
    "ignores" a part, or "applies" all as written.
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
    """Writes the rules of combinations, and the keys that are read in some places only, as a
    Markdown list: no table of them fits a screen.
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
    for rule in ds_rules.RULES:
        if rule.together:
            lines += entry(f"**{rule.together}**", rule)
    lines += ["", "### Keys that work only in some configurations", ""]
    alone = [
        rule for rule in ds_rules.RULES + ds_rules.STOCK_RULES if not rule.together and rule.source
    ]
    same = lambda rule: (rule.key.rpartition(".")[0], *rule[2:6])  # noqa: E731
    for (block, *_), group in groupby(
        sorted(alone, key=lambda rule: [order(alone, same(rule)), alone.index(rule)]), key=same
    ):
        rules = list(group)
        keys = ", ".join(f"`{rule.key.rpartition('.')[2]}`" for rule in rules)
        lines += entry(f"`{block}`: {keys}" if block else keys, rules[0])
    return "\n".join(lines) + "\n"


def entry(of: str, rule: ds_rules.Rule) -> list[str]:
    mark = {
        APPLIES: "works",
        FAILS: "fails",
        IGNORES: "ignored",
        REPLACES: "replaced",
        HANGS: "hangs",
        WRONG: "wrong numbers",
    }[rule.outcome]
    fix = f" Fix: {rule.fix}." if rule.fix else ""
    text = f"- {of} ({mark}): {rule.rule}.{fix} Source: {rule.source}"
    return wrap(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def order(rules: list[ds_rules.Rule], like: tuple[str, ...]) -> int:
    return next(
        index
        for index, rule in enumerate(rules)
        if (rule.key.rpartition(".")[0], *rule[2:6]) == like
    )


def optimizer_table() -> str:
    """Writes the optimizers that a recipe's JSON may name, what each keeps, and why the others are
    refused, as a Markdown list.
    """
    lines = []
    for name, facts in FACTS.items():
        text = (
            f"- `{name}`: refused: {facts.lacks}"
            if facts.lacks
            else f"- `{name}`: {_where(facts)}. States: {_kept(facts)}"
        )
        lines += wrap(
            text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines) + "\n"


def _where(facts: OptimizerFacts) -> str:
    if facts.acts_on == GRADIENT:
        return "ZeRO-0 and torch's DDP (implemented in recipekit/optim)"
    stages = "ZeRO-0, -1, -2 and -3"
    return (
        f"{stages}, torch's DDP and FSDP2 (implemented in recipekit/optim)"
        if facts.ours
        else stages
    )


def _kept(facts: OptimizerFacts) -> str:
    """Names the states, for a weight of which each takes 4 bytes."""
    more = [
        f"with {option} also {' and '.join(map(_code, names))}"
        for option, names in facts.added.items()
    ]
    if facts.host is not None and facts.host.states != facts.states:
        more.append(
            f"with offload (computed by DeepSpeed) {' and '.join(map(_code, facts.host.states))}"
        )
    if facts.matrices is not None:
        more.append(f"for a matrix {' and '.join(map(_code, facts.matrices))}")
    if facts.states == FACTORS:
        rows, columns, elements = map(_code, FACTORS)
        return (
            f"{elements} for a vector; {rows} and {columns}, with one number for each row and"
            " column, for other weights"
        )
    if facts.acts_on == GRADIENT:
        more.append("and the unsent remainder of each rank")
    return ", ".join([" and ".join(map(_code, facts.states)) or "none", *more])


def _code(name: str) -> str:
    return f"`{name}`"


def with_table(page: str) -> str:
    """Returns the page with today's lists between their marks."""
    for name, written in (("optimizers", optimizer_table()), ("combinations", support_table())):
        before, mark, rest = page.partition(BEGIN.format(name))
        _, _, after = rest.partition(END)
        page = f"{before}{mark}{written}{END}{after}"
    return page


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=CommandFormatter)
    parser.add_argument(
        "config",
        nargs="?",
        type=lambda text: str(path_of(text)),
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
    for axis in DEGREES:
        default = "1" if axis == "pp" else "the JSON's, or 1"
        parser.add_argument(
            f"--{axis}",
            type=int,
            metavar="N",
            help=f"{DEGREES[axis]} degree in the script of --json-only. (default: {default})",
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
    """Check the JSON of a command line; return the exit code."""
    parser = make_parser(prog)
    given = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args(given)
    if arguments.table:
        _write_table(parser, given)
        return 0

    layout = {axis: degree for axis in DEGREES if (degree := getattr(arguments, axis)) is not None}
    json_only = bool(arguments.json_only or arguments.filled_by or layout)
    _check_arguments(parser, arguments, layout, json_only)

    def linted(config: str | dict[str, Any] | None) -> tuple[list[Problem], list[str]]:
        return lint(
            config, arguments.recipe, arguments.world, json_only, arguments.filled_by, layout
        )

    name, (problems, lines) = arguments.config, linted(arguments.config)
    if arguments.fix and name is not None and problems:
        folder = arguments.recipe.resolve().parent if arguments.recipe else Path.cwd()
        try:
            written, changes = fix(name, folder, json_only, lambda config: linted(config)[0])
        except Refusal as refusal:
            exit_refused(refusal)
        if written is not None:
            print("\n".join(changes))
            name, (problems, lines) = written, linted(str(written))
    say(name or arguments.recipe, problems, lines)
    return 1 if problems else 0


def _write_table(parser: argparse.ArgumentParser, given: list[str]) -> None:
    """Write the tables of ds_configs/README.md, or end with the parser's error."""
    if len(given) > 1:
        parser.error("--table cannot be combined with other arguments")
    if IS_WHEEL:
        parser.error(
            "--table requires a clone of the repository, because an installed package has no"
            " ds_configs/README.md"
        )
    README.write_text(with_table(README.read_text()))
    print(f"wrote the tables of rules and optimizers into {README.relative_to(README.parents[1])}")


def _check_arguments(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    layout: dict[str, int],
    json_only: bool,
) -> None:
    """End with the parser's error if the arguments do not fit together."""
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


def say(name: str | Path, problems: list[Problem], lines: list[str]) -> None:
    if problems:
        print(f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in {name}")
        print(
            "\n".join(f"  {number}. {told(problem)}" for number, problem in enumerate(problems, 1))
        )
    print("\n".join(lines), end="\n" if lines else "")
