"""Test files: no test file imports another one, and no test file is too long."""

import ast
import re
from pathlib import Path

import pytest
from pool import ROOT

FILES = sorted((ROOT / "tests").rglob("*.py"))
TEST_FILES = [path for path in FILES if path.name.startswith("test_")]
MOST_LINES = 900  # of a test file


def imported(text: str) -> set[str]:
    """Return the modules that a file imports, including imports in the text of a program for a
    different process.
    """
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"^ *(?:from|import) (\w+)", node.value, re.MULTILINE))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_imports_a_test_file(path: Path) -> None:
    wrong = imported(path.read_text()) & {test.stem for test in TEST_FILES}
    assert not wrong, f"{path}: move what it needs of {sorted(wrong)} to tests/support"


def test_an_import_is_found_wherever_it_stands() -> None:
    program = 'CODE = """\nimport test_a\n"""\n\n\ndef f():\n    from test_b import x\n'
    assert imported(program) == {"test_a", "test_b"}


def test_every_test_file_has_a_name_of_its_own() -> None:
    names = [path.name for path in TEST_FILES]
    assert sorted(set(names)) == sorted(names)


def test_no_test_file_is_too_long() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in TEST_FILES
        if (count := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert not long, f"at most {MOST_LINES} lines: split it by the module that it tests"
