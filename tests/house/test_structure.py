"""Allowed imports, pinned packages, forbidden content of files, and the maximum width of pages."""

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from pool import ROOT, environment
from project_files import project_files
from recipekit.hosts.transformers_release import check_transformers_release

KIT = ROOT / "recipes" / "recipekit"
KIT_MODULES = {
    path.relative_to(KIT).with_suffix("").as_posix().replace("/", "."): path
    for path in sorted(KIT.rglob("*.py"))
}
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
TOOLS = sorted((ROOT / "tools").rglob("*.py"))
LAUNCH = sorted((ROOT / "launch").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
WIDTH = 120  # columns of a page
THIRD_PARTY = importlib.metadata.packages_distributions()  # import name -> distributions


def imports(path: Path) -> set[str]:
    """Return the full names of a file's imports, including imports inside functions.

    A relative import begins with recipekit.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = (
                ("recipekit", *path.relative_to(KIT).parts[:-1])
                if path.is_relative_to(KIT)
                else (path.parent.name,)
            )
            assert node.level <= len(package), f"{path} imports from outside its package"
            base = (
                ".".join(filter(None, (*package[: len(package) - node.level + 1], node.module)))
                if node.level
                else node.module or ""
            )
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)} - {"__future__"}


def third_party(path: Path) -> set[str]:
    return {
        top for top in tops(path) if top not in sys.stdlib_module_names and top not in own_names()
    }


def own_names() -> set[str]:
    return {"recipekit", "launch", *(path.stem for path in [*RECIPES, *TOOLS, *TESTS])}


@pytest.mark.parametrize(
    "path",
    [*RECIPES, *KIT_MODULES.values(), *TOOLS, *LAUNCH],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_only_tests_import_a_recipe_launch_or_a_tool_of_another_folder(path):
    beside = (
        {other.stem for other in path.parent.glob("*.py")} if path in [*TOOLS, *LAUNCH] else set()
    )
    forbidden = own_names() - beside - ({"launch"} if path in LAUNCH else {"recipekit"})
    assert not tops(path) & forbidden, f"{path} imports {tops(path) & forbidden}"


def test_launch_needs_the_standard_library_only():
    assert not {path: third_party(path) for path in LAUNCH if third_party(path)}


def test_recipes_see_recipekit_by_its_front_door():
    for path in RECIPES:
        ours = {name for name in imports(path) if name.startswith("recipekit")}
        assert ours == {"recipekit.Recipe", "recipekit.run"}, path


# package or module -> the packages that it imports in addition to itself and spec.
# recipekit/README.md contains the same table.
MAY = {
    "spec": set(),
    "compat": set(),
    "architectures": set(),
    "dslint": {"architectures"},
    "kernels": {"compat"},
    "parallel": {"compat", "kernels"},
    "data": {"architectures", "compat", "kernels", "parallel"},
    "model": {"architectures", "compat", "dslint", "kernels", "parallel"},
    "tasks": {"data", "model"},
    "optim": {"compat", "parallel"},
    "storage": {"architectures", "parallel"},
    "checkpoints": {"architectures", "compat", "dslint", "parallel", "storage"},
    "engine": {"checkpoints", "compat", "kernels", "model", "optim", "parallel"},
    "plan": {"architectures", "dslint", "data", "kernels"},
    "planner": {"compat", "dslint", "kernels", "parallel", "model", "tasks", "plan"},
    "track": set(),
    "watch": set(),
    "hosts": {"compat", "dslint", "plan"},
    "runtime": {
        *("compat", "dslint", "kernels", "parallel", "data", "model", "tasks"),
        *("storage", "checkpoints", "engine", "track", "watch", "plan", "planner", "hosts"),
    },
    "train": {
        "kernels",
        "tasks",
        "parallel",
        "data",
        "checkpoints",
        "engine",
        "track",
        "watch",
        "plan",
        "runtime",
    },
    "refusal": set(),
    "run": {"plan", "planner", "hosts", "runtime", "train"},
    "convert": {"architectures", "compat", "storage", "checkpoints", "parallel", "model"},
    "doctor": {"architectures", "dslint", "hosts", "plan", "planner", "parallel"},
    "commands": {
        *("architectures", "dslint", "parallel", "data", "model", "storage", "checkpoints"),
        *("convert", "doctor", "plan", "hosts", "runtime", "run"),
    },
    "__main__": set(),  # it imports a subcommand by its name
}
LIGHT = (  # import neither torch nor transformers nor datasets
    *(name for name in KIT_MODULES if name.startswith(("spec.", "compat.", "dslint.", "watch."))),
    *(
        name
        for name in KIT_MODULES
        if name.startswith("architectures.") and name != "architectures.families"
    ),
    *(
        "run",
        "plan",
        "data.files",
        "data.mixture",
        "kernels.blocks",
        "kernels.deterministic",
        "parallel.blueprint",
        "model.flops",
    ),
    *(
        "checkpoints.step_folder",
        "checkpoints.reshape",
        "checkpoints.verify",
        "convert.hugging_face",
    ),
    *("hosts.checks", "runtime.stopping", "runtime.failure", "planner.memory"),
    *("__main__", "commands.ls", "commands.cp", "commands.run"),
)
NODES, PARAMETERS = 400, 6  # limits for a function; `self` and `cls` are not counted
WIDE = {  # a library calls these functions and passes their parameters by keyword
    "recipes/recipekit/kernels/attention.py: attend",
    "recipes/recipekit/optim/adafactor.py: __init__",
    "recipes/recipekit/optim/adagrad.py: __init__",
    "recipes/recipekit/optim/ademamix.py: __init__",
    "recipes/recipekit/optim/muon.py: __init__",
}
MOST_ANY = 130  # lines of recipekit that annotate a name with Any
# Functions that take a complete Recipe. The check for settings that an engine does not read takes a
# Recipe, because it reads eight of the fields.
MOST_RECIPES = 20


def module_of(name: str) -> str:
    """Return an imported name's module: recipekit.data.mixture.Domain -> data.mixture.

    A package's module is its __init__.
    """
    inner = name.removeprefix("recipekit.")
    candidates = [
        inner,
        inner.rpartition(".")[0],
        f"{inner}.__init__",
        f"{inner.rpartition('.')[0]}.__init__",
    ]
    return next((module for module in candidates if module in KIT_MODULES), "__init__")


GRAPH = {
    module: {module_of(name) for name in imports(path) if name.startswith("recipekit.")}
    for module, path in KIT_MODULES.items()
}


def package(module: str) -> str:
    return module.partition(".")[0]


def test_no_two_files_and_no_two_packages_import_each_other():
    """Imports inside functions count as well."""
    order = list(TopologicalSorter(GRAPH).static_order())  # raises CycleError
    assert [module for module in order if package(module) not in ("commands", "__main__")][
        -1
    ] == "__init__"
    packages: dict[str, set[str]] = {}
    for module, imported in GRAPH.items():
        packages.setdefault(package(module), set()).update(
            package(other) for other in imported if package(other) != package(module)
        )
    list(TopologicalSorter(packages).static_order())


def test_the_table_has_every_import_and_no_other():
    found = {name: set[str]() for name in MAY}
    for module in KIT_MODULES.keys() - {"__init__"}:
        found[package(module)] |= {package(other) for other in GRAPH[module]} - {
            package(module),
            "spec",
            "__init__",
        }
    assert found == MAY, "recipekit/README.md has the table"


def test_the_map_has_the_table():
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| ?([^|]*?) ?\|$", (KIT / "README.md").read_text(), re.MULTILINE
    )
    told: dict[str, set[str]] = {}
    for name, listed in (row for row in rows if row[0] in MAY):
        but = listed.removeprefix("all above except ")
        words = {word.strip() for word in but.split(",") if word.strip()}
        told[name] = told.keys() - {"spec"} - words if but != listed else words
    assert told == MAY


def test_the_face_of_a_package_is_its_docstring():
    for module, path in KIT_MODULES.items():
        if module.endswith(".__init__"):
            assert [type(node) for node in ast.parse(path.read_text()).body] == [ast.Expr], path


def test_light_modules_are_light():
    code = (
        "import importlib, sys\nfor name in sys.argv[1:]:"
        " importlib.import_module(f'recipekit.{name}'.removesuffix('.__init__'))\n"
    )
    code += "print(*({'torch', 'transformers', 'datasets', 'deepspeed'} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code, *LIGHT],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == []


def test_what_refuses_imports_nothing_heavy():
    """A config error takes about a second, so planning a run must not import torch or any other
    large package.
    """
    code = (
        "import sys, recipekit.plan, recipekit.runtime.stopping; print(*sorted(name for name in"
        " sys.modules if '.' not in name))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout.split()
    heavy = {name for name in loaded if name in THIRD_PARTY and not name.startswith("_")} - {
        "recipekit"
    }
    site = subprocess.run(
        [sys.executable, "-c", code.replace(", recipekit.plan, recipekit.runtime.stopping", "")],
        capture_output=True,
        text=True,
    )
    # modules that every interpreter in this environment loads when it starts
    assert heavy <= set(site.stdout.split()), heavy


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the name and the syntax tree of each function in recipekit, launch and tools."""
    for path in [*KIT_MODULES.values(), *LAUNCH, *TOOLS]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(ROOT)}: {node.name}", node


def test_a_function_does_one_thing():
    large = [
        f"{name} has {count} nodes"
        for name, node in functions()
        if (count := sum(1 for _ in ast.walk(node))) > NODES
    ]
    assert not large, f"at most {NODES} nodes a function:\n" + "\n".join(large)


def test_a_function_has_few_parameters():
    wide = set()
    for name, node in functions():
        given = node.args
        names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        if len(names) - (names[:1] in (["self"], ["cls"])) > PARAMETERS:
            wide.add(name)
    assert wide == WIDE, f"at most {PARAMETERS} parameters a function"


# Top-level names that several modules define. Each name has the same role in each of its modules.
SHARED_NAMES = {
    "main": "runs a command",
    "LOG": "the logger of a module",
    "TASK": "the row of a task in its file",
    "OPTIMIZER": "the class of an optimizer in its file",
    **dict.fromkeys(("forward", "loss", "count", "measure", "collate"), "a field of `TASK`"),
}


# The same rule for tools/bench: code that two benches need is in harness.py.
SHARED_BY_BENCHES = {
    "main": "runs a command",
    "arguments_of": "the flags of a bench",
    "measure": "everything that a bench measures",
    "page": "the result as Markdown",
    "verdicts": "the targets of a page, with the result",
    "planned": "the plan that the ranks follow",
    **dict.fromkeys(("Setup", "set_up"), "what the ranks need before they measure"),
    **dict.fromkeys(("RECIPE", "VOCABULARY"), "the run that a bench measures"),
    **dict.fromkeys(("WAYS", "TITLES"), "the rows of a table"),
    "WORDS": "the text of a page",
    **dict.fromkeys(("ENOUGH_ROUNDS", "WARM_UP", "PREPARED", "SAME_LOSS"), "a number of a bench"),
}


@pytest.mark.parametrize(
    ("modules", "shared"),
    [
        (KIT_MODULES, SHARED_NAMES),
        ({path.stem: path for path in TOOLS if path.parent.name == "bench"}, SHARED_BY_BENCHES),
    ],
    ids=["recipekit", "tools/bench"],
)
def test_a_top_level_name_has_one_meaning(modules: dict[str, Path], shared: dict[str, str]):
    """No two modules may define the same function, class or value, except the names above."""
    places: dict[str, list[str]] = {}
    for module, path in modules.items():
        for name in top_level_names(ast.parse(path.read_text())):
            places.setdefault(name, []).append(module)
    several = {name: found for name, found in places.items() if len(found) > 1}
    several.pop("__all__", None)
    assert set(several) == set(shared), {
        name: several.get(name) for name in set(several) ^ set(shared)
    }


def top_level_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                part.id
                for target in targets
                for part in ast.walk(target)
                if isinstance(part, ast.Name)
            }
    return names


def test_few_functions_take_a_whole_recipe():
    """A leaf function takes the values that it reads. A function that needs a recipe must be given
    one.
    """
    takers = [
        f"{module}.{node.name}"
        for module, path in KIT_MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        if any(
            argument.annotation is not None
            and "Recipe" in ast.unparse(argument.annotation).split(" | ")
            for argument in node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        )
    ]
    assert len(takers) <= MOST_RECIPES, "\n".join(takers)


def test_engine_model_and_state_have_types():
    untyped = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in KIT_MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None
        if (
            node.arg
            if isinstance(node, ast.arg)
            else ast.unparse(node.target).removeprefix("self.")
        )
        in ("engine", "built", "models", "state")
        if ast.unparse(node.annotation) in ("Any", "list[Any]", "dict", "dict[str, Any]")
    ]
    assert not untyped, "\n".join(untyped)


def test_few_names_have_the_type_any():
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in KIT_MODULES.values()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if ": Any" in line
    ]
    assert len(lines) <= MOST_ANY, f"{len(lines)} lines, at most {MOST_ANY}:\n" + "\n".join(lines)


def pins(file: str) -> dict[str, str]:
    """Return distribution -> version; every line must be an exact pin."""
    found = {}
    for line in (ROOT / file).read_text().splitlines():
        if line and not line.startswith(("#", "-r ")):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([\w.]+)", line)
            assert match, f"{file}: {line} is no exact pin"
            found[canonical(match[1])] = match[2]
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_requirements_pin_what_is_imported():
    run, dev = pins("requirements.txt"), pins("requirements-dev.txt")
    assert not run.keys() & dev.keys()
    # Packages that benches compare with are not part of a run.
    benches = [path for path in TOOLS if path.stem.startswith("bench_")]
    tools = [path for path in TOOLS if path not in benches]
    missing = {
        f"{top} ({path.relative_to(ROOT)})"
        for paths, pinned in (
            ([*RECIPES, *KIT_MODULES.values(), *tools, *LAUNCH], run),
            ([*TESTS, *benches], run | dev),
        )
        for path in paths
        for top in third_party(path)
        if not {canonical(name) for name in THIRD_PARTY.get(top, [])} & pinned.keys()
    }
    assert not missing
    for name, version in (run | dev).items():
        if name == "transformers":  # several releases are supported
            assert check_transformers_release() == ([], [])
        else:
            assert importlib.metadata.version(name).split("+")[0] == version


TOP_LEVEL = {
    *(
        "README.md",
        "LICENSE",
        "NOTICE",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "SECURITY.md",
        "AGENTS.md",
    ),
    *("recipes", "ds_configs", "launch", "tools", "tests"),
    *(
        "requirements.txt",
        "requirements-dev.txt",
        "pyproject.toml",
        "Makefile",
        ".ci",
        ".gitignore",
        ".git-blame-ignore-revs",
    ),
}


def test_the_top_level_has_these_names_only():
    assert {path.relative_to(ROOT).parts[0] for path in project_files()} == TOP_LEVEL


def test_the_notice_names_each_shipped_config():
    configs = sorted(path.name for path in (KIT / "architectures").glob("*.json"))
    notice = (ROOT / "NOTICE").read_text()
    assert f"{len(configs)} files" in notice
    listed = re.findall(r"^  (\S+\.json) +(\S+) ", notice, re.MULTILINE)
    assert sorted(name for name, _ in listed) == [
        name for name in configs if name != "recipekit--llama-nano.json"
    ]
    assert [name for name, _ in listed] == [
        f"{model.replace('/', '--')}.json" for _, model in listed
    ]


def test_the_citation_has_the_version_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(rf'^version: "?{re.escape(project["version"])}"?$', citation, re.MULTILINE)
    assert (
        f"license: {project['license']}" in citation
        and f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()
    )


def test_agents_read_sixty_lines_at_most():
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 60


FORBIDDEN = {
    "a path of one machine": r"(?<![\w.])/(?:root|work|home/\w+|Users/\w+)/\w",
    "a package registry": (
        r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|registry\.npmjs|(?i:artifactory|nexus)\.|--(?:extra-)?index-url|--find-links"
    ),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what):
    found = []
    for path in project_files():
        if path != Path(__file__).resolve():
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if re.search(FORBIDDEN[what], line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, f"{what}:\n" + "\n".join(found)


def pages() -> list[Path]:
    return [path for path in project_files() if path.suffix == ".md"]


def test_no_line_of_a_page_is_wider_than_a_screen():
    """Prose, tables and commands are checked, including those on generated pages.

    A word that cannot be split, such as an address, may be alone on a line.
    """
    wide = [
        f"{path.relative_to(ROOT)}:{number}: {len(line)} columns: {line.strip()[:60]}"
        for path in pages()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > WIDTH and len(line.strip(" -*>").split()) > 1
    ]
    assert not wide, (
        f"at most {WIDTH} columns, in a file that a tool writes by a change of the tool:\n"
        + "\n".join(wide)
    )


def test_the_wheel_has_every_package():
    """pyproject.toml lists the packages one by one, because two folders become data inside
    recipekit.
    """
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    packages = {
        ".".join(("recipekit", *path.parent.relative_to(KIT).parts))
        for path in KIT.rglob("__init__.py")
    }
    assert sorted(listed) == sorted(
        {*packages, "launch", "recipekit.recipes", "recipekit.ds_configs"}
    )


def test_every_link_of_a_page_leads_somewhere():
    lost = []
    for path in pages():
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            name, _, section = target.partition("#")
            there = path.parent / name if name else path
            if "://" not in target and (
                not there.exists() or (section and section not in sections(there))
            ):
                lost.append(f"{path.relative_to(ROOT)}: {target}")
    assert not lost


def sections(page: Path) -> set[str]:
    """Return the anchors of a page's headings: their lower-case letters, digits and hyphens."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_json_parses_strictly():
    from recipekit.dslint.json_file import load_ds_config

    strategies = sorted((ROOT / "ds_configs").glob("*.json"))
    assert strategies
    for path in strategies:
        config, found = load_ds_config(path.name, Path("/nowhere"))
        assert found == path and config
    for path in project_files():
        if path.suffix == ".json":
            json.loads(path.read_text())
