"""recipekit/__main__.py: subcommands, the modules that they import, and unknown words."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from pool import ROOT, environment
from recipekit import __main__ as command
from recipekit.spec.errors import config_error

MODULES = {path.stem for path in (ROOT / "recipes" / "recipekit" / "commands").glob("*.py")} - {
    "__init__"
}


def test_every_subcommand_has_its_module_and_no_module_is_left_over() -> None:
    assert command.COMMANDS.keys() - ({"sample"} - MODULES) == MODULES


@pytest.mark.parametrize("name", sorted(MODULES - {"run"}))
def test_the_help_of_a_subcommand_shows_its_name_and_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    text = capsys.readouterr().out
    assert (
        not ended.value.code
        and text.startswith(f"usage: recipekit {name} ")
        and f"\n    recipekit {name}" in text
    )


def test_the_help_lists_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-h", "--help"):
        assert command.main([flag]) == 0
        text = capsys.readouterr().out
        assert [
            name
            for name in command.COMMANDS
            if f"\n  {name:<9} {command.COMMANDS[name].about}" not in text
        ] == []


def test_without_a_word_the_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    listed = capsys.readouterr().out
    assert command.main(["ls"]) == 0 and capsys.readouterr().out == listed and listed


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("list", "Did you mean lint or ls?"),
        ("doctr", "Did you mean doctor?"),
        ("covnert", "Did you mean convert?"),
        ("mine.py", "Did you mean recipekit run mine.py?"),
        ("train", "Use one of ls, cp, run, lint, doctor, convert, sample"),
        ("--tiny", "Use one of ls, cp, run, lint, doctor, convert, sample"),
    ],
)
def test_a_word_that_is_no_subcommand_gets_one_line_and_exit_code_2(
    word: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([word, "x"]) == 2
    assert capsys.readouterr() == ("", f"recipekit {word}: is not a subcommand. {fix}\n")


def test_a_refusal_of_a_subcommand_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(words: list[str]) -> int:
        raise config_error("this", "is wrong", "write that")

    monkeypatch.setattr(importlib.import_module("recipekit.commands.ls"), "main", main)
    assert command.main(["ls"]) == 1 and capsys.readouterr() == ("", "this: is wrong. Write that\n")


def test_a_subcommand_imports_no_other_and_ls_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from recipekit.__main__ import main; main(sys.argv[1:]);"
        " print(*sorted(sys.modules))"
    )
    for words in (["ls"], ["cp", "zero2.json"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        loaded = done.stdout.splitlines()[-1].split()
        assert [name for name in loaded if name.startswith("recipekit.commands.")] == [
            f"recipekit.commands.{words[0]}"
        ]
        assert not {
            "torch",
            "transformers",
            "datasets",
            "deepspeed",
            "numpy",
            "hjson",
            "launch",
        } & set(loaded)


def test_a_reader_that_has_enough_ends_the_list_quietly() -> None:
    """`recipekit ls | head -1` closes the pipe early."""
    listed = subprocess.Popen(
        [sys.executable, "-u", "-m", "recipekit", "ls"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert listed.stdout and listed.stderr
    listed.stdout.close()
    assert (listed.stderr.read(), listed.wait(60)) == (b"", 0)
