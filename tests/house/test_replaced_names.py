"""Names of recipekit that tests, tools and code in their strings use exist.

A test replaces functions at run time, often in code that only a worker or a subprocess runs. If the
function is renamed, no type checker sees the old name.
"""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from pool import ROOT

FILES = [
    path
    for folder in ("tests", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name != Path(__file__).name  # contains wrong names
]
SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def codes(text: str) -> Iterator[tuple[int, ast.Module]]:
    """Yield a file, and each string in it that is code which imports recipekit, as (line, code)."""
    tree = ast.parse(text)
    yield 0, tree
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            code = textwrap.dedent(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
            code = textwrap.dedent("".join(map(str, parts)))
        else:
            continue
        if "recipekit" in code and "import" in code:
            try:
                yield node.lineno, ast.parse(code)
            except SyntaxError:
                continue


def own(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, but not the nodes of its functions."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, SCOPES):
            yield from own(node)


def found(name: str, attribute: str | None = None) -> object:
    """Return a module, or an attribute of it; None if it does not exist."""
    try:
        module = importlib.import_module(name)
        if attribute is None or hasattr(module, attribute):
            return module if attribute is None else getattr(module, attribute)
        return importlib.import_module(f"{name}.{attribute}")
    except ImportError:
        return None


def wrong_names(scope: ast.AST, outer: dict[str, object]) -> Iterator[str]:
    """Yield each import of recipekit and each attribute chain in a scope that leads nowhere.

    `outer` are the names of recipekit that the scope inherits, with the modules, functions and
    classes that they stand for.
    """
    known, nodes = dict(outer), list(own(scope))
    changed = {
        node.arg if isinstance(node, ast.arg) else node.id
        for node in nodes
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
    }
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            for alias in node.names:
                name = alias.asname or alias.name
                known.pop(name, None)
                if module.partition(".")[0] == "recipekit" and name != "*":
                    known[name] = found(module, alias.name)
                    if known[name] is None:
                        yield f"from {module} import {alias.name}"
    known = {name: value for name, value in known.items() if name not in changed}
    chains = [node for node in nodes if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in chains}
    for node in chains:
        if id(node) not in inner:
            yield from broken_chain(ast.unparse(node), known)
    for node in nodes:
        if isinstance(node, SCOPES):
            yield from wrong_names(node, known)


def broken_chain(chain: str, known: dict[str, object]) -> Iterator[str]:
    """Yield `chain` if one of its modules or classes of recipekit lacks the next attribute."""
    first, *attributes = chain.split(".")
    value = known.get(first)
    for attribute in attributes:
        ours = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
        if not (isinstance(value, ModuleType) or inspect.isclass(value)):
            return
        if not str(ours).startswith("recipekit") or not attribute.isidentifier():
            return
        if not hasattr(value, attribute):
            if not (isinstance(value, ModuleType) and found(value.__name__, attribute)):
                yield chain
            return
        value = getattr(value, attribute)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_name_of_recipekit_exists(path: Path) -> None:
    assert [
        f"{line}: {wrong}"
        for line, code in codes(path.read_text())
        for wrong in wrong_names(code, {})
    ] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("from recipekit.plan import nothing", "from recipekit.plan import nothing"),
        ("from recipekit.checkpoints import load\nload.nothing.x = 1", "load.nothing.x"),
        ("def case():\n    from recipekit import plan\n    plan.nothing()", "plan.nothing"),
        ("from recipekit.plan import RunPlan\nRunPlan.nothing", "RunPlan.nothing"),
        (
            "CODE = '''\nfrom recipekit.checkpoints.save import Saver\nSaver._nothing = 1\n'''",
            "Saver._nothing",
        ),
        ("from recipekit import plan\ndef case(plan):\n    plan.nothing", ""),
        ("from recipekit import plan\nplan = other()\nplan.nothing", ""),
        ("from recipekit.plan import resolve_run\nresolve_run.nothing", ""),
    ],
)
def test_a_name_that_does_not_exist_is_found(text: str, wrong: str) -> None:
    given = [wrong for _, code in codes(text) for wrong in wrong_names(code, {})]
    assert given == ([wrong] if wrong else [])
