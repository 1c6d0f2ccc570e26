"""List the parameters that pass unread through more than three functions of recipekit.

    python tests/support/threaded.py
    python tests/support/threaded.py --root OTHER_CHECKOUT --most 2

A function passes a parameter on unread if it only uses it as an unchanged argument of calls into
recipekit. Such calls are functions, methods of a known class, classes (which store the value), and
any of these in partial(...). A path also continues through functions that read the value, but they
are neither counted nor shown. Calls through a variable, a field or a table are not found.

The list is empty. Through more than two functions it had 14 entries at commit 521c804.
"""

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "recipekit"
# Number of functions that may pass a value on without reading it before the value is listed.
MOST = 3
Function = ast.FunctionDef | ast.AsyncFunctionDef
Tree = ast.Module | ast.ClassDef | Function
# A function's full name, such as recipekit.data.batching.Domains.deal, and one of its parameters.
Place = tuple[str, str]


@dataclass(frozen=True)
class Code:
    """A package's definitions and imports, by full name."""

    modules: set[str]
    classes: set[str]
    functions: dict[str, Function]
    stored: dict[str, set[str]]  # function -> the names that it assigns
    imported: dict[str, str]
    # (module, or "" for all; variable, parameter or attribute) -> the classes of its values
    values: dict[tuple[str, str], set[str]]


@dataclass(frozen=True)
class Thread:
    """The path of a value: its first name, the functions that supply it, and the functions that
    pass it on without reading it.
    """

    name: str
    givers: tuple[str, ...]
    functions: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.name}, from {', '.join(self.givers) or 'callers that are not seen'}:"
            f" {' > '.join(self.functions)}".replace(f"{PACKAGE}.", "")
        )


def read_code(package: Path) -> Code:
    code = Code(set(), set(), {}, {}, {}, defaultdict(set))
    trees: dict[str, ast.Module] = {}
    for path in sorted(package.rglob("*.py")):
        parts = (PACKAGE, *path.relative_to(package).with_suffix("").parts)
        module = ".".join(parts).removesuffix(".__init__")
        code.modules.add(module)
        trees[module] = ast.parse(path.read_text())
        _define(code, trees[module], module, parts[:-1])
    for module, tree in trees.items():
        for node in ast.walk(tree):
            match node:
                case (
                    ast.arg(arg=name, annotation=ast.expr() as kind)
                    | ast.AnnAssign(
                        target=ast.Name(id=name) | ast.Attribute(attr=name), annotation=kind
                    )
                    | ast.Assign(
                        targets=[ast.Name(id=name) | ast.Attribute(attr=name)],
                        value=ast.Call(func=kind),
                    )
                    | ast.withitem(
                        optional_vars=ast.Name(id=name), context_expr=ast.Call(func=kind)
                    )
                ):
                    made = code.functions.get(_meant(code, module, kind) or "")
                    kinds = ast.walk(made.returns) if made and made.returns else ast.walk(kind)
                    held = {
                        found
                        for each in kinds
                        if (found := _meant(code, module, each)) in code.classes
                    }
                    code.values[module, name] |= held
                    code.values["", name] |= held
    return code


def _define(code: Code, tree: Tree, scope: str, package: tuple[str, ...]) -> None:
    """Add the definitions and imports inside a definition, including nested definitions."""
    for node in _own(tree):
        if isinstance(node, Function):
            code.functions[f"{scope}.{node.name}"] = node
            code.stored[f"{scope}.{node.name}"] = {
                each.id
                for each in _own(node)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
            _define(code, node, f"{scope}.{node.name}", package)
        elif isinstance(node, ast.ClassDef):
            code.classes.add(f"{scope}.{node.name}")
            _define(code, node, f"{scope}.{node.name}", package)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            code.imported.update(
                {
                    f"{scope}.{alias.asname or alias.name}": ".".join(
                        filter(None, [*base, node.module, alias.name])
                    )
                    for alias in node.names
                }
            )


def _own(tree: Tree) -> Iterator[ast.AST]:
    """Yield the nodes of a body, except those inside nested definitions."""
    rest: list[ast.AST] = [*tree.body]
    while rest:
        yield (node := rest.pop())
        if isinstance(node, Function):
            rest += [
                *node.decorator_list,
                *node.args.defaults,
                *filter(None, node.args.kw_defaults),
            ]
        elif not isinstance(node, ast.ClassDef):
            rest += ast.iter_child_nodes(node)


def _parameters(code: Code, function: str) -> tuple[list[str], list[str]]:
    """Return the positional parameters without `self`, and all parameters."""
    given = code.functions[function].args
    placed = [each.arg for each in (*given.posonlyargs, *given.args)]
    placed = placed[placed[:1] in (["self"], ["cls"]) :]
    return placed, placed + [each.arg for each in given.kwonlyargs]


def _scopes(code: Code, scope: str) -> Iterator[str]:
    """Yield a function, its enclosing functions, and its module."""
    while scope not in code.modules:
        if scope in code.functions:
            yield scope
        scope = scope.rpartition(".")[0]
    yield scope


def _owner(code: Code, scope: str, name: str) -> str | None:
    """Return the function that has this name as a parameter or a variable."""
    for each in _scopes(code, scope):
        if each in code.functions and (
            name in _parameters(code, each)[1] or name in code.stored[each]
        ):
            return each
    return None


def _parameter(code: Code, scope: str, node: ast.AST) -> Place | None:
    """Return the parameter if an expression consists only of a parameter; otherwise None."""
    if (
        isinstance(node, ast.Name)
        and (owner := _owner(code, scope, node.id))
        and node.id in _parameters(code, owner)[1]
    ):
        return owner, node.id
    return None


def _meant(code: Code, scope: str, node: ast.AST) -> str | None:
    """Return the module, class or function that an expression refers to.

    A method is found if exactly one possible class of its receiver defines the method.
    """
    names: list[str] = []
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        node = ast.Name(node.value)
    if isinstance(node, ast.Name):
        names = (
            []
            if _owner(code, scope, node.id)
            else [f"{each}.{node.id}" for each in _scopes(code, scope)]
        )
    elif isinstance(node, ast.Attribute) and (base := _meant(code, scope, node.value)):
        names = [f"{base}.{node.attr}"]
    elif isinstance(node, ast.Attribute):
        receiver = (
            node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
        )
        *around, module = _scopes(code, scope)
        owners = (
            [each.rpartition(".")[0] for each in around]
            if receiver == "self"
            else code.values[module, receiver] or code.values["", receiver]
        )
        names = [name for owner in owners if (name := f"{owner}.{node.attr}") in code.functions]
        names = names if len(names) == 1 else []
    known = code.functions.keys() | code.classes | code.modules
    for name in names:
        while name not in known and name in code.imported:
            name = code.imported[name]
        if name in known:
            return name
    return None


def _handed(code: Code, scope: str, call: ast.Call) -> Iterator[tuple[ast.expr, Place | None]]:
    """Yield each argument of a call to recipekit (or to partial(...) of such a call), with its
    parameter.
    """
    args, called = call.args, _meant(code, scope, call.func)
    if args and (getattr(call.func, "id", None) or getattr(call.func, "attr", None)) in (
        "partial",
        "submit",
    ):
        called, args = _meant(code, scope, args[0]), args[1:]
    if called in code.classes:
        called = f"{called}.__init__"  # also a parameter of a dataclass, which stores the value
    elif called not in code.functions:
        return
    placed, known = _parameters(code, called) if called in code.functions else ([], [])
    starred = next(
        (index for index, each in enumerate(args) if isinstance(each, ast.Starred)), len(args)
    )
    for index, value in enumerate(args[:starred]):
        yield value, (called, placed[index]) if index < len(placed) else None
    for keyword in call.keywords:
        if keyword.arg:
            yield keyword.value, (called, keyword.arg) if keyword.arg in known else None


def threads(package: Path, most: int = MOST) -> list[Thread]:
    """Return the longest path of each value that more than `most` functions pass on without reading
    it.

    Paths inside a longer path are left out.
    """
    code = read_code(package)
    ways: dict[Place, set[Place]] = defaultdict(set)
    givers: dict[Place, set[str]] = defaultdict(set)
    read: set[Place] = set()
    for scope, function in code.functions.items():
        handed = set()
        for call in _own(function):
            for value, place in _handed(code, scope, call) if isinstance(call, ast.Call) else ():
                if source := _parameter(code, scope, value):
                    handed.add(id(value))
                    ways[source] |= {place} if place else set()
                elif place:
                    givers[place].add(scope)
        read |= {
            source
            for node in _own(function)
            if id(node) not in handed and (source := _parameter(code, scope, node))
        }

    def longest(place: Place, before: tuple[str, ...] = ()) -> tuple[str, ...]:
        here = () if place in read or place not in ways else place[:1]
        after = [
            longest(each, (*before, place[0]))
            for each in ways.get(place, ())
            if each[0] not in (*before, place[0])
        ]
        return here + max(sorted(after), key=len, default=())

    inner = set().union(*ways.values())
    found: dict[tuple[str, ...], Thread] = {}
    for place in sorted(place for place in ways if place in givers or place not in inner):
        functions = longest(place)
        same = found.get(functions)
        found[functions] = Thread(
            same.name if same else place[1],
            tuple(sorted({*givers.get(place, ()), *(same.givers if same else ())})),
            functions,
        )
    return [
        thread
        for key, thread in found.items()
        if len(key) > most and not any(set(key) < set(other) for other in found)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout")
    parser.add_argument(
        "--most", type=int, default=MOST, help="functions that may hand a value on unread"
    )
    args = parser.parse_args()
    found = threads(args.root / "recipes" / PACKAGE, args.most)
    print(
        *found,
        f"{len(found)} parameters pass through more than {args.most} functions that do not read"
        " them",
        sep="\n",
    )


if __name__ == "__main__":
    main()
