"""Who may import whom, what is pinned, what no file may hold, and how wide a page may be."""

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from pool import ROOT, environment

KIT = ROOT / "recipes" / "recipekit"
KIT_MODULES = {path.relative_to(KIT).with_suffix("").as_posix().replace("/", "."): path for path in sorted(KIT.rglob("*.py"))}
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
TOOLS = sorted((ROOT / "tools").glob("*.py"))
LAUNCH = sorted((ROOT / "launch").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
WIDTH = 120  # columns of a page
THIRD_PARTY = importlib.metadata.packages_distributions()  # import name -> distributions


def imports(path: Path) -> set[str]:
    """Full names of everything a file imports, inside functions too; a relative import begins with recipekit."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ("recipekit", *path.relative_to(KIT).parts[:-1]) if path.is_relative_to(KIT) else (path.parent.name,)
            assert node.level <= len(package), f"{path} imports from outside its package"
            base = ".".join(filter(None, (*package[: len(package) - node.level + 1], node.module))) if node.level else node.module or ""
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)} - {"__future__"}


def third_party(path: Path) -> set[str]:
    return {top for top in tops(path) if top not in sys.stdlib_module_names and top not in own_names()}


def own_names() -> set[str]:
    return {"recipekit", "launch", *(path.stem for path in [*RECIPES, *TOOLS, *TESTS])}


@pytest.mark.parametrize("path", [*RECIPES, *KIT_MODULES.values(), *TOOLS, *LAUNCH], ids=lambda path: str(path.relative_to(ROOT)))
def test_only_tests_import_a_recipe_a_tool_or_launch(path):
    mine = {path.stem for path in LAUNCH} | {"launch"} if path in LAUNCH else {"recipekit"}
    forbidden = own_names() - mine
    assert not tops(path) & forbidden, f"{path} imports {tops(path) & forbidden}"


def test_launch_needs_the_standard_library_only():
    assert not {path: third_party(path) for path in LAUNCH if third_party(path)}


def test_recipes_see_recipekit_by_its_front_door():
    for path in RECIPES:
        ours = {name for name in imports(path) if name.startswith("recipekit")}
        assert ours == {"recipekit.Recipe", "recipekit.run"}, path


def test_recipekit_has_layers_without_a_cycle():
    def module_of(name: str) -> str:
        """The module that an imported name lies in: recipekit.data.mixture.Domain -> data.mixture; a package is its __init__."""
        inner = name.removeprefix("recipekit.")
        candidates = [inner, inner.rpartition(".")[0], f"{inner}.__init__", f"{inner.rpartition('.')[0]}.__init__"]
        return next((module for module in candidates if module in KIT_MODULES), "__init__")

    graph = {module: {module_of(name) for name in imports(path) if name.startswith("recipekit.")} for module, path in KIT_MODULES.items()}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert order[-1] == "__init__" and order.index("refusal") < order.index("plan") < order.index("train") < order.index("run")


def test_what_refuses_imports_nothing_heavy():
    """A refusal takes about a second: planning a run needs neither torch nor anything else of size."""
    code = "import sys, recipekit.plan, recipekit.stopping; print(*sorted(name for name in sys.modules if '.' not in name))"
    loaded = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True, timeout=30).stdout.split()
    heavy = {name for name in loaded if name in THIRD_PARTY and not name.startswith("_")} - {"recipekit"}
    site = subprocess.run([sys.executable, "-c", code.replace("import sys, recipekit.plan, recipekit.stopping", "import sys")], capture_output=True, text=True)
    assert heavy <= set(site.stdout.split()), heavy  # what every interpreter of this environment has loaded at its start


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
    benches = [path for path in TOOLS if path.stem.startswith("bench_")]  # what they measure ours against is no part of a run
    tools = [path for path in TOOLS if path not in benches]
    missing = {
        f"{top} ({path.relative_to(ROOT)})"
        for paths, pinned in (([*RECIPES, *KIT_MODULES.values(), *tools, *LAUNCH], run), ([*TESTS, *benches], run | dev))
        for path in paths
        for top in third_party(path)
        if not {canonical(name) for name in THIRD_PARTY.get(top, [])} & pinned.keys()
    }
    assert not missing
    for name, version in (run | dev).items():
        assert importlib.metadata.version(name).split("+")[0] == version


def project_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.splitlines() if (path := ROOT / name).is_file()]


FORBIDDEN = {
    "a path of one machine": r"(?<![\w.])/(?:root|work|home/\w+|Users/\w+)/\w",
    "a package registry": r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|registry\.npmjs|(?i:artifactory|nexus)\.|--(?:extra-)?index-url|--find-links",
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
    """Prose, tables and commands, also of the pages that a tool writes. A word that cannot be broken, such as an address, may stand alone."""
    wide = [
        f"{path.relative_to(ROOT)}:{number}: {len(line)} columns: {line.strip()[:60]}"
        for path in pages()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > WIDTH and len(line.strip(" -*>").split()) > 1
    ]
    assert not wide, f"at most {WIDTH} columns, in a file that a tool writes by a change of the tool:\n" + "\n".join(wide)


def test_every_link_of_a_page_leads_somewhere():
    lost = []
    for path in pages():
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            name, _, section = target.partition("#")
            there = path.parent / name if name else path
            if "://" not in target and (not there.exists() or (section and section not in sections(there))):
                lost.append(f"{path.relative_to(ROOT)}: {target}")
    assert not lost


def sections(page: Path) -> set[str]:
    """What a link names the headings of a page by: their small letters, digits and hyphens."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_json_parses_strictly():
    from recipekit.ds_config import load

    strategies = sorted((ROOT / "ds_configs").glob("*.json"))
    assert strategies
    for path in strategies:
        config, found = load(path.name, Path("/nowhere"))
        assert found == path and config
    for path in project_files():
        if path.suffix == ".json":
            json.loads(path.read_text())
