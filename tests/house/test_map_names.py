"""The names that the developer pages mention in backticks exist, in the file that a page names.

A rename in the code that forgets a page fails here.
"""

import ast
import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pool import ROOT
from project_files import project_files

KIT = ROOT / "recipes" / "recipekit"
PAGES = [
    KIT / "README.md",
    *(ROOT / name for name in ("CONTRIBUTING.md", "AGENTS.md", "launch/README.md")),
]
# Words of a page that stand for any name.
PLACEHOLDERS = {"CLASS", "COMMAND", "DIR", "FIX", "IMAGE", "JOB", "NAME", "PATH", "RULE", "WHERE"}
# Names of other programs that our code does not contain.
FOREIGN = {
    "AWS_ENDPOINT_URL",  # AWS
    "WANDB_BASE_URL",  # W&B
    "terminationGracePeriodSeconds",  # Kubernetes
    "KillWait",  # Slurm
    "assert",  # Python
    "bind_cores_to_rank",  # DeepSpeed
    "pyright",  # a command
}
ENDINGS = "cff|json|jsonl|log|md|png|py|pt|sbatch|sh|toml|txt|yaml"

NAME = r"`[A-Za-z_][\w.]*(?:\([^`]*\))?`"
NAMES = rf"{NAME}(?:(?:, and|, or|,| and| or) {NAME})*"
FILE = r"`[\w./-]+\.py`"
# "`a`, `b` in (or of) `x.py` and in `y.py`", "`a` (`x.py`)" and "`x.py`: `a`"
IN_FILE = re.compile(rf"({NAMES}),? (?:in|of) ({FILE}(?: and in {FILE})*)")
BEFORE_FILE = re.compile(rf"({NAMES}) \(({FILE})\)")
AFTER_FILE = re.compile(rf"({FILE}): ({NAMES})")


@dataclass
class Names:
    """The names of Python files."""

    used: set[str] = field(default_factory=set)  # identifiers, and strings that are one word
    # file -> functions, classes, fields, parameters and module variables; also Class.member
    defined: dict[Path, set[str]] = field(default_factory=lambda: defaultdict(set))

    @functools.cached_property
    def everywhere(self) -> set[str]:
        """Return the names that any file defines."""
        return set().union(*self.defined.values())


def collect(sources: Mapping[Path, str]) -> Names:
    """Return the names of Python sources and the keys of JSON files."""
    names = Names()
    for path, text in sources.items():
        if path.suffix == ".json":
            names.used |= set(re.findall(r'"(\w+)":', text))
            continue
        tree = ast.parse(text)
        names.defined[path] = {path.stem, *definitions(tree)}
        names.used |= {path.stem, *path.parts[:-1]}
        if path.parts[0] != "tests":  # a test may use any word as a value
            names.used |= {*words(tree)}
    return names


def definitions(tree: ast.AST, within: str = "") -> Iterator[str]:
    """Yield the names that a file defines, except local variables of functions."""
    for node in ast.iter_child_nodes(tree):
        found = list[str]()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found = [node.name]
            if not isinstance(node, ast.ClassDef):
                yield from (each.arg for each in ast.walk(node) if isinstance(each, ast.arg))
                if within:
                    found += attributes_of_self(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not isinstance(
            tree, ast.FunctionDef | ast.AsyncFunctionDef
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = [
                part.id
                for target in targets
                for part in ast.walk(target)
                if isinstance(part, ast.Name)
            ]
        yield from found
        if within:
            yield from (f"{within}.{name}" for name in found)
        yield from definitions(node, node.name if isinstance(node, ast.ClassDef) else "")


def attributes_of_self(function: ast.AST) -> list[str]:
    """Return the attributes that a method sets on its object."""
    return [
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ]


def words(tree: ast.AST) -> Iterator[str]:
    """Yield the identifiers of a file, and every string that is one identifier."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.isidentifier():
                yield node.value
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        else:
            for attribute in ("id", "arg", "name"):
                if isinstance(name := getattr(node, attribute, None), str):
                    yield name
            # A library's attribute such as `join` of a string says nothing about our names.
            if isinstance(node, ast.Attribute) and looks_like_code(node.attr):
                yield node.attr


@functools.cache
def names_of_project() -> Names:
    """Return the names of all Python and JSON files, without this test."""
    return collect(
        {
            path.relative_to(ROOT): path.read_text()
            for path in project_files()
            if path.suffix in (".py", ".json") and path != Path(__file__).resolve()
        }
    )


def blocks_of_page(page: str) -> list[str]:
    """Return the paragraphs, list items and table rows of a page, each as one line."""
    lines = [line for line in page.splitlines() if not re.match(r" {4}\S", line)]
    starts = "\n".join(re.sub(r"^ *([-|#]|\d+\.) ?", r"\n\1 ", line) for line in lines)
    return [" ".join(block.split()) for block in re.split(r"\n\s*\n", starts)]


def stale_names(page: str, names: Names, folder: Path = Path()) -> list[str]:
    """Return the faults of a page: names that no file defines, or not the file that it names.

    `folder` is the folder of the page.
    """
    found = []
    for block in blocks_of_page(page):
        # A link to a file counts as its name.
        block = re.sub(r"\[(?:[^\]]+)\]\(([\w./-]+\.py)\)", r"`\1`", block)
        pairs = [
            *IN_FILE.findall(block),
            *BEFORE_FILE.findall(block),
            *((listed, file) for file, listed in AFTER_FILE.findall(block)),
        ]
        for listed, files in pairs:
            for file in re.findall(FILE, files):
                for name in re.findall(NAME, listed):
                    found += fault_in_file(code_of(name), file.strip("`"), names, folder)
        for span in re.findall(r"`([^`]+)`", block):
            found += faults_of_span(span, names, folder)
    return sorted(set(found))


def code_of(span: str) -> str:
    """Return the name in a span such as `name(...)`."""
    return span.strip("`").partition("(")[0]


def files_named(file: str, names: Names, folder: Path) -> list[Path]:
    """Return the files that a page may mean by a path, the nearest ones first."""
    for place in (Path(), folder, KIT.relative_to(ROOT)):
        if place / file in names.defined:
            return [place / file]
    return [path for path in names.defined if f"/{path}".endswith(f"/{file}")]


def fault_in_file(name: str, file: str, names: Names, folder: Path) -> list[str]:
    """Return a fault unless the file defines the name."""
    if name.endswith((".py", ".json", ".md")) or is_placeholder(file):
        return []
    if not any(name in names.defined[path] for path in files_named(file, names, folder)):
        return [f"{file} does not define {name}"]
    return []


def faults_of_span(span: str, names: Names, folder: Path) -> list[str]:
    """Return the faults of code in backticks: a file, a Python expression or another text."""
    if re.fullmatch(r"[\w./-]+\.py", span):
        found = is_placeholder(span) or files_named(span, names, folder)
        return [] if found else [f"{span} does not exist"]
    # Flags, paths and file names are not code.
    if re.search(rf"^-|/|\.({ENDINGS})$", span):
        return []
    if is_member(code_of(span), names):
        return [] if code_of(span) in names.everywhere else [f"no class defines {code_of(span)}"]
    try:
        tree = ast.parse(span)
    except SyntaxError:
        return []
    known = names.used | names.everywhere | FOREIGN | PLACEHOLDERS
    return [
        f"{name} is not a name of the code"
        for name in words(tree)
        if name not in known and (name == span or looks_like_code(name))
    ]


def is_member(span: str, names: Names) -> bool:
    """Return True for Class.member of a class of this project."""
    head, dot, member = span.partition(".")
    return bool(dot) and member.isidentifier() and head[:1].isupper() and head in names.everywhere


def looks_like_code(name: str) -> bool:
    """Return True for snake_case with an underscore, CamelCase and constants."""
    return "_" in name or (name != name.lower() and name != name.capitalize())


def is_placeholder(file: str) -> bool:
    """Return True for a file name such as commands/NAME.py."""
    return re.search(r"[A-Z]{4,}", file) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_of_a_page_exists(page: Path):
    faults = stale_names(page.read_text(), names_of_project(), page.parent.relative_to(ROOT))
    assert not faults, "\n".join(faults)


def test_the_map_lists_the_modules_of_spec():
    text = (KIT / "README.md").read_text().partition("The modules of `spec`:")[2]
    table = text.partition("\n## ")[0]
    listed = [
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    ]
    modules = [path.stem for path in (KIT / "spec").glob("*.py") if path.stem != "__init__"]
    assert sorted(listed) == sorted(modules)


SOURCES = {
    Path("recipes/recipekit/data/fresh.py"): (
        "KINDS = 1\n"
        "class Reader:\n"
        "    size: int\n"
        "    def open_file(self, shard_fn):\n"
        "        self.handle = shard_fn\n"
        "        local_value = 1\n"
    ),
    Path("launch/rank.py"): "STOPS = 1\n",
    Path("a.json"): json.dumps({"json_key": 1}),
}


@pytest.mark.parametrize(
    ("page", "faults"),
    [
        ("`KINDS` and `shard_fn` in `data/fresh.py`, `Reader.handle`, `json_key`", []),
        ("see `Reader.open_file(path)` in `fresh.py`, and `Reader` (`data/fresh.py`)", []),
        ("| a | `STOPS`\n| `commands/NAME.py` |", []),
        ("`FIELDS`, `KINDS` in `data/fresh.py`", ["FIELDS is not", "data/fresh.py does not def"]),
        ("`KINDS` in\n`data/fresh.py` and in `launch/rank.py`", ["launch/rank.py does not define"]),
        ("[fresh.py](data/fresh.py): `STOPS` is here", ["data/fresh.py does not define STOPS"]),
        ("`local_value` in `data/fresh.py`", ["data/fresh.py does not define local_value"]),
        ("- `Reader.close`\n- `old_name(3)`", ["no class defines Reader.close", "old_name is not"]),
        ("`STOPS` in `launch/gone.py`", ["launch/gone.py does not define", "launch/gone.py does"]),
    ],
)
def test_a_stale_name_is_found(page: str, faults: list[str]):
    found = stale_names(page, collect(SOURCES))
    assert len(found) == len(faults), found
    assert all(any(fault in each for each in found) for fault in faults), found
