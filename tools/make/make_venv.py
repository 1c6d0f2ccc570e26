"""Makes .venv with the Python that runs this program, unless a usable .venv is there.

`make setup` calls this program; any Python from 3.7 on reads it.

    python3 tools/make/make_venv.py             # makes it
    python3 tools/make/make_venv.py --look      # only says whether this Python can be used

Exit code 0: .venv is there; 1: this Python is too old, or cannot make environments, and nothing is
left behind.
"""

import shutil
import subprocess
import sys
from pathlib import Path

VENV = Path(__file__).resolve().parents[2] / ".venv"
PYTHON = VENV / "bin" / "python"
TELL = "import sys; sys.exit(sys.version_info < (3, 11))"


def main(look: bool) -> int:
    if look:
        return int(too_old())
    if PYTHON.exists() and subprocess.run([str(PYTHON), "-c", TELL], check=False).returncode == 0:
        return 0
    if too_old():
        return 1
    # without --clear .venv/bin/python stays the link of an earlier .venv to another Python
    done = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        shutil.rmtree(str(VENV), ignore_errors=True)
        why = done.stdout.strip().split("\n")[0] or "no message"
        return refuse(
            f"{sys.executable} -m venv .venv",
            why,
            f"On Debian and Ubuntu: apt-get install python3.{sys.version_info[1]}-venv",
        )
    return 0


def too_old() -> bool:
    """Returns True, and prints a refusal, if the Python that runs this program cannot run the
    recipes.
    """
    if sys.version_info >= (3, 11):  # noqa: UP036 (an older Python runs this line too)
        return False
    where = f"{sys.executable} is Python {'.'.join(map(str, sys.version_info[:3]))}"
    refuse(
        where,
        "the recipes need 3.11 or newer",
        "Install one, or name one that is there: make setup PYTHON3=python3.12",
    )
    return True


def refuse(where: str, rule: str, fix: str) -> int:
    print(f"refused: {where}: {rule}. {fix}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main("--look" in sys.argv))
