"""Copy a shipped recipe or DeepSpeed JSON to a new file. An existing file is never overwritten.

    recipekit cp qwen3_0_6b_sft_zero2 mine.py
    recipekit cp zero2.json                      # into the current folder, under its own name

To list the recipes: recipekit ls.
"""

import argparse
import difflib
from pathlib import Path

from ..spec.errors import config_error
from ..spec.help_page import CommandFormatter
from ..spec.paths import path_argument
from ..spec.shadows import HIDEABLE
from ..spec.shipped import recipes, strategies


def find_shipped_file(name: str) -> Path:
    """Return the shipped file called `name`, which may omit the file's ending.

    Raises `ConfigError` with similar names if there is no such file.
    """
    files = {file.name: file for file in (*recipes().values(), *strategies().values())}
    for ending in ("", ".py", ".json"):
        if f"{name}{ending}" in files:
            return files[f"{name}{ending}"]
    names = [*recipes(), *strategies()]
    near = difflib.get_close_matches(
        Path(name).stem if name.endswith(".py") else Path(name).name, names, 2, 0.75
    )
    listed = f"a JSON is {', '.join(strategies())}, and recipekit ls lists the recipes"
    raise config_error(
        f"recipekit cp {name}",
        "no recipe or JSON has this name",
        f"did you mean {' or '.join(near)}?" if near else listed,
    )


def copy_shipped_file(name: str, target: Path | None) -> Path:
    """Copy a shipped file to `target`, a file or folder, and return the new file.

    Raises `ConfigError` if the new file cannot be written.
    """
    source = find_shipped_file(name)
    file = (
        Path(source.name) if target is None else target / source.name if target.is_dir() else target
    )
    where = f"recipekit cp {name} {file}"
    if file.suffix != source.suffix:
        raise config_error(
            where,
            f"a copy of {source.name} must end in {source.suffix}",
            f"write {file.with_suffix(source.suffix)}",
        )
    if file.suffix == ".py" and file.stem in HIDEABLE | {"recipekit", "launch"}:
        raise config_error(
            where,
            f"{file.name} would hide the library {file.stem} from Python",
            f"write my_{file.name}",
        )
    try:
        with file.open("xb") as stream:
            stream.write(source.read_bytes())
    except FileExistsError:
        raise config_error(
            where,
            f"{file} exists, and a copy never overwrites a file",
            "give another name, or remove that file",
        ) from None
    except FileNotFoundError:
        raise config_error(
            where, f"the folder {file.parent} does not exist", f"run: mkdir -p {file.parent}"
        ) from None
    except OSError as error:
        raise config_error(
            where, f"cannot be written: {error.strerror}", "choose a folder that you can write to"
        ) from None
    return file


def main(argv: list[str] | None = None) -> int:
    """Copy a file, and return the exit code."""
    parser = argparse.ArgumentParser(
        "recipekit cp", description=__doc__, formatter_class=CommandFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help="Name of a shipped recipe or JSON, with or without .py or .json.",
    )
    parser.add_argument(
        "file",
        nargs="?",
        type=path_argument,
        metavar="FILE",
        help=(
            "New file, or an existing folder for it. (default: the same name in the current folder)"
        ),
    )
    arguments = parser.parse_args(argv)
    file = copy_shipped_file(arguments.name, arguments.file)
    way = f"recipekit run {file} --tiny" if file.suffix == ".py" else f"recipekit lint {file}"
    print(f"wrote {file}. Try: {way}")
    return 0
