"""Who may import whom, what is pinned, what no file may hold, and how wide a page may be."""

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
    """Full names of everything a file imports, inside functions too; a relative import begins with
    recipekit.
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


# package or module -> packages that it imports besides itself and spec; recipekit/README.md has the
# same table
MAY = {
    "spec": set(),
    "architectures": set(),
    "dslint": {"architectures"},
    "kernels": set(),
    "parallel": {"kernels"},
    "data": {"architectures", "kernels", "parallel"},
    "model": {"architectures", "dslint", "kernels", "parallel"},
    "tasks": {"data", "model"},
    "optim": {"parallel"},
    "storage": {"architectures", "parallel"},
    "checkpoints": {"architectures", "dslint", "parallel", "storage"},
    "engine": {"checkpoints", "model", "optim", "parallel"},
    "plan": {"architectures", "dslint", "data", "kernels"},
    "planner": {"dslint", "kernels", "parallel", "model", "tasks", "plan"},
    "track": set(),
    "hosts": {"dslint", "plan"},
    "runtime": {
        *("dslint", "kernels", "parallel", "data", "model", "tasks"),
        *("storage", "checkpoints", "engine", "track", "plan", "planner", "hosts"),
    },
    "train": {
        "kernels",
        "tasks",
        "parallel",
        "data",
        "checkpoints",
        "engine",
        "track",
        "plan",
        "runtime",
    },
    "refusal": set(),
    "run": {"plan", "planner", "hosts", "runtime", "train"},
    "convert": {"architectures", "storage", "checkpoints", "parallel", "model"},
    "doctor": {"architectures", "dslint", "hosts", "plan", "planner", "parallel"},
    "commands": {
        *("architectures", "dslint", "parallel", "data", "model", "storage", "checkpoints"),
        *("convert", "doctor", "plan", "hosts", "runtime", "run"),
    },
    "__main__": set(),  # it imports a subcommand by its name
}
LIGHT = (  # import neither torch nor transformers nor datasets
    *(name for name in KIT_MODULES if name.startswith(("spec.", "dslint."))),
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
NODES, PARAMETERS = 400, 6  # limits of a function; `self` and `cls` are not counted
WIDE = {  # a library calls these and passes their parameters by keyword
    "recipes/recipekit/kernels/attention.py: attend",
    "recipes/recipekit/optim/adafactor.py: __init__",
    "recipes/recipekit/optim/adagrad.py: __init__",
    "recipes/recipekit/optim/muon.py: __init__",
}
# functions that take a whole one; what an engine does not read are eight fields, so its check is
# one of them
MOST_RECIPES = 20


def module_of(name: str) -> str:
    """The module that an imported name lies in: recipekit.data.mixture.Domain -> data.mixture; a
    package is its __init__.
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
    """Imports inside functions included."""
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
    """A refusal takes about a second: planning a run needs neither torch nor anything else of
    size.
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
    # what every interpreter of this environment has loaded at its start
    assert heavy <= set(site.stdout.split()), heavy


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the name and the syntax tree of each function of recipekit, launch and tools."""
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


def test_few_functions_take_a_whole_recipe():
    """A leaf takes the values that it reads; who needs a recipe has to be given one."""
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


def pins(file: str) -> dict[str, str]:
    """distribution -> version; every line is an exact pin."""
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
    # what they measure ours against is no part of a run
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
        assert importlib.metadata.version(name).split("+")[0] == version


def project_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [path for name in listed.splitlines() if (path := ROOT / name).is_file()]


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
    """Prose, tables and commands, also of the pages that a tool writes.

    A word that cannot be broken, such as an address, may stand alone.
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
    """pyproject.toml names them one by one, because two folders become data inside recipekit."""
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
    """What a link names the headings of a page by: their small letters, digits and hyphens."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_json_parses_strictly():
    from recipekit.dslint.json_file import load

    strategies = sorted((ROOT / "ds_configs").glob("*.json"))
    assert strategies
    for path in strategies:
        config, found = load(path.name, Path("/nowhere"))
        assert found == path and config
    for path in project_files():
        if path.suffix == ".json":
            json.loads(path.read_text())
