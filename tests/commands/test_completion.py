"""recipekit/spec/completion.py: keys typed in an interactive bash, and the candidates that it
shows.
"""

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pool import environment
from recipekit.__main__ import COMMANDS, main
from recipekit.commands import lint
from recipekit.spec.completion import LINT, script
from recipekit.spec.shipped import recipes, strategies


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipekit.bash").write_text(script("bash", tuple(COMMANDS)))
    (tmp_path / "my run.py").touch()
    (tmp_path / "own.json").touch()
    return tmp_path


CANDIDATES = (
    'source recipekit.bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _recipekit; printf "%s\\n"'
    ' "${COMPREPLY[@]}"'
)


@pytest.mark.parametrize(
    ("words", "candidates"),
    [
        (["l"], {"ls", "lint"}),
        ([""], {*COMMANDS, "--help", "--completion"}),
        (["--completion", ""], {"bash", "zsh"}),
        (["cp", "llama_n"], {"llama_nano_zero2"}),
        (["cp", "zero3_"], {"zero3_cpu.json", "zero3_hosts.json", "zero3_nvme.json"}),
        (["cp", ""], {*recipes(), *strategies(), "my run.py", "own.json", "recipekit.bash"}),
        (["lint", "o"], {"own.json"}),
        (["lint", "own.json", "--f"], {"--fix", "--filled-by"}),
        (["lint", "own.json", "--recipe", "smol"], {"smollm2_135m_zero1", "smollm3_3b_zero2"}),
        (["run", "my"], {"my run.py"}),
        (["run", "my run.py", "--ti"], {"--tiny"}),
        (["run", "my run.py", "--learning"], {""}),
        (["convert", "to-hf", "own"], {"own.json"}),
    ],
)
def test_candidates_of_a_line(words: list[str], candidates: set[str], folder: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", CANDIDATES, "bash", "recipekit", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert {line for line in done.stdout.split("\n")} - {""} == candidates - {""}, done


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("recipekit do\t", "recipekit doctor "),
        ("recipekit cp llama_na\t", "recipekit cp llama_nano_zero2 "),
        ("recipekit run my\t", "recipekit run my\\ run.py "),
    ],
)
def test_tab_in_an_interactive_bash(typed: str, line: str, folder: Path) -> None:
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execve(
            shutil.which("bash") or "bash",
            ["bash", "--norc", "--noprofile", "-i"],
            {"PS1": "READY> ", "TERM": "dumb", "PATH": os.environ["PATH"]},
        )
    try:
        _until(terminal, b"READY> ")
        os.write(terminal, b"source recipekit.bash\n")
        _until(terminal, b"READY> ")
        os.write(terminal, typed.encode())
        assert line in _until(terminal, line.encode()).decode()
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


def _until(terminal: int, wanted: bytes, seconds: float = 20) -> bytes:
    """Read until the terminal shows `wanted`, or until the time limit."""
    shown, ends = b"", time.monotonic() + seconds
    while wanted not in shown and (left := ends - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            shown += os.read(terminal, 4096)
    return shown


def test_flags_of_lint_in_the_script_are_flags_of_lint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lint.main(["--help"])
    text = capsys.readouterr().out
    assert [
        flag
        for flag in LINT
        if f"{flag} " not in text and f"{flag}," not in text and f"{flag}]" not in text
    ] == []


def test_the_script_of_zsh_is_bash_s_behind_its_loader(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", "bash"]) == 0
    bash = capsys.readouterr().out
    assert main(["--completion", "zsh"]) == 0
    loader, _, rest = capsys.readouterr().out.partition("_recipekit()")
    assert "bashcompinit" in loader and f"_recipekit(){rest}" == bash


@pytest.mark.parametrize("words", [[], ["fish"], ["bash", "zsh"]])
def test_another_shell_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", *words]) == 2
    assert (
        capsys.readouterr().err
        == f"{' '.join(['--completion', *words])}: requires the name of a shell. Use one of bash,"
        " zsh\n"
    )


def test_the_printed_script_is_read_by_eval(tmp_path: Path) -> None:
    line = f'eval "$({sys.executable} -m recipekit --completion bash)" && complete -p recipekit'
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "complete -F _recipekit recipekit\n" and not done.stderr
