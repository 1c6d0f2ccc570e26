"""Every command in pages and docstrings can be typed: its files exist, and its program accepts its
flags.
"""

import ast
import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pool import ROOT, environment
from project_files import project_files
from recipe_files import FILES, load
from recipekit.__main__ import COMMANDS
from recipekit.spec.command import parse
from recipekit.spec.recipe import Recipe

PROGRAM = re.compile(
    r"^(?:[A-Z_]+=\S* )*(?:deepspeed|torchrun|accelerate launch|python -m"
    r" launch|recipekit|python|bash|make|sbatch) "
)
CONTRACT = """
python tools/lint.py ds_configs/zero3.json --recipe recipes/NAME.py --world 16
python tools/convert_checkpoint.py to-hf RUN_OR_STEP_DIR OUT_DIR --dtype bf16 --verify
python tools/convert_checkpoint.py from-hf HF_DIR OUT_DIR --zero 1 --tp 2 --pp 2 --dp 1
python tools/convert_checkpoint.py reshape STEP_DIR OUT_DIR --tp 1 --pp 4 --dp 2 --zero 1
python tools/convert_checkpoint.py verify STEP_DIR
python -m launch --where local --spawn deepspeed --dry-run recipes/NAME.py --steps 20
deepspeed --num_gpus 2 recipes/NAME.py --deepspeed_config ds_configs/zero3.json --steps 20 --lr \
3e-4 --pp 2 --tp 2 --micro_batch 2 --global_batch 16 --seq_len 256
deepspeed recipes/NAME.py --tiny --stop_at 3 --save_every 2 --keep 2 --seed 1 --out DIR --resume \
auto
python recipes/NAME.py --dry_run --world 8
"""
PLACES = {
    "recipes/NAME.py": "recipes/llama_nano_zero2.py",
    "mine.py": "recipes/qwen3_0_6b_zero2.py",
    "my_run.py": "recipes/qwen3_0_6b_zero2.py",
    "MY.json": "ds_configs/zero3.json",
}


def commands() -> list[str]:
    """Return each command once, from indented blocks and code spans of pages, and from
    docstrings.
    """
    found = CONTRACT.strip().splitlines()
    for path in project_files():
        if path.suffix == ".md":
            text = path.read_text().replace("\\\n", " ")
            found += re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE) + [
                " ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)
            ]
        elif (
            path.suffix == ".py"
            and path.parent.name != "support"
            and not path.name.startswith("test_")
        ):
            text = (ast.get_docstring(ast.parse(path.read_text()), clean=True) or "").replace(
                "\\\n", " "
            )
            found += re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE)
    commands = (
        re.split(
            r"\s#\s|\s#$| && | > | \|| {3,}| FLAGS", command.replace("[", "").replace("]", "")
        )[0].strip()
        for command in found
    )
    return sorted(
        {
            command
            for command in commands
            if PROGRAM.match(f"{command} ")
            and "..." not in command
            and " -c " not in command
            and not command.endswith(("--help", "--help all"))
        }
    )


@functools.cache
def shown(*program: str) -> str:
    """Return the help of a program and its subcommands."""
    done = subprocess.run(
        [sys.executable, *program, "--help"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{program}: {done.stderr[-1000:]}"
    return done.stdout


def check_flags(flags: list[str], text: str) -> None:
    known = set(re.findall(r"--[\w-]+", text))
    for flag in flags:
        if flag.startswith("--"):
            name = flag.partition("=")[0]
            assert {
                name,
                name.replace("--no-", "--"),
                name.replace("-", "_"),
                name.replace("_", "-"),
            } & known, f"{name} is not known"


def check_recipe_flags(recipe: str, flags: list[str]) -> None:
    """Parse the flags as a recipe's command line does; an unknown flag raises an error."""
    name = PLACES.get(recipe, recipe)
    assert Path(name).stem in FILES, f"{recipe} is no recipe"
    parse(load(Path(name).stem).RECIPE, ROOT / name, flags)


def check_subcommand(name: str = "ls", *words: str) -> None:
    """Check a `recipekit` command.

    After `run` comes a recipe's file or a shipped recipe's name, followed by the recipe's flags.
    """
    assert name in COMMANDS or name == "COMMAND", f"{name} is not a subcommand"
    if name == "run":
        at = next(
            (number for number, word in enumerate(words) if word.endswith(".py") or word in FILES),
            None,
        )
        if at is None:  # a sentence that names only the subcommand
            return
        check_flags(list(words[:at]), shown("-m", "launch"))
        check_recipe_flags(
            f"recipes/{words[at]}.py" if words[at] in FILES else words[at], list(words[at + 1 :])
        )
    elif name != "COMMAND":
        check_flags(
            list(words), shown("-m", "recipekit", name, *(words[:1] if name == "convert" else ()))
        )


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_docs_can_be_typed(command: str) -> None:
    words = shlex.split(command)
    while re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    program, *rest = words
    if program == "python" and rest[:2] == ["-m", "launch"]:
        words = rest[2:]
        at = next(
            (
                number
                for number, word in enumerate(words)
                if word.startswith(("recipes/", "SCRIPT"))
            ),
            len(words),
        )
        check_flags(
            words[: words.index("--doctor")] if "--doctor" in words else words[:at],
            shown("-m", "launch"),
        )
        if at < len(words) and "--doctor" not in words and words[at] != "SCRIPT":
            check_recipe_flags(words[at], words[at + 1 :])
    elif program == "recipekit":
        check_subcommand(*rest)
    elif program in ("deepspeed", "torchrun", "accelerate", "python", "sbatch"):
        script = next((word for word in rest if word.endswith((".py", ".sbatch"))), None)
        if script is None:  # python -c, python -m
            return
        after = rest[rest.index(script) + 1 :]
        if script.endswith(".sbatch"):
            assert (ROOT / script).is_file()
        elif script in PLACES or script.startswith("recipes/"):
            check_recipe_flags(script, after)
        else:
            assert (ROOT / script).is_file(), f"{script} is not there"
            commands = [
                word
                for word in after[:1]
                if script == "tools/convert_checkpoint.py" and not word.startswith("-")
            ]
            if "--recipe" in after and script == "tools/doctor.py":
                after = after[: after.index("--recipe") + 1]
            # Benches pass these flags on.
            fields = (
                " ".join(f"--{field}" for field in Recipe.__dataclass_fields__)
                if script.startswith("tools/bench/")
                else ""
            )
            check_flags(after, shown(script, *commands) + fields)
    elif program == "bash":
        assert (ROOT / rest[0]).is_file()
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert next(word for word in rest if "=" not in word) in targets


def one_spelling(program: str) -> list[str]:
    """Return the flags that a program passes to `add_argument` only with `-` or only with `_`."""
    calls = [
        node
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument")
    ]
    flags = [
        {
            word.value
            for word in call.args
            if isinstance(word, ast.Constant) and word.value.startswith("--")
        }
        for call in calls
    ]
    return sorted(
        name
        for names in flags
        for name in names
        if not {f"--{name[2:].replace(*signs)}" for signs in ("-_", "_-")} <= names
    )


def test_every_flag_may_be_written_with_either_sign() -> None:
    """Recipes accept both spellings through `command.py`. Other programs pass both to argparse."""
    assert one_spelling(
        'parser.add_argument("--a_b")\nparser.add_argument("--c-d",'
        ' "--c_d")\nparser.add_argument("--e")'
    ) == ["--a_b"]
    programs = [
        path
        for folder in ("tools", "launch", "recipes/recipekit/commands", "tests/support")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert not [
        f"{path.relative_to(ROOT)}: {name}"
        for path in programs
        for name in one_spelling(path.read_text())
    ]
