"""Program that creates .venv with the Python that runs it, unless a usable .venv exists.

`make setup` calls this program. It runs on Python 3.7 or newer.

    python3 tools/make/make_venv.py             # create .venv
    python3 tools/make/make_venv.py --look      # only check whether this Python is recent enough

Exit code 0: .venv exists. Exit code 1: this Python is too old or cannot create environments, and no
partial .venv remains.
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
    # Without --clear, .venv/bin/python would remain a link from an earlier .venv to a different
    # Python.
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
        return config_error(
            f"{sys.executable} -m venv .venv",
            why,
            f"On Debian and Ubuntu: apt-get install python3.{sys.version_info[1]}-venv",
        )
    return 0


def too_old() -> bool:
    """Return True and print an error if the current Python version cannot run the recipes."""
    if sys.version_info >= (3, 11):  # noqa: UP036 (an older Python runs this line too)
        return False
    where = f"{sys.executable} is Python {'.'.join(map(str, sys.version_info[:3]))}"
    config_error(
        where,
        "the recipes need 3.11 or newer",
        "Install one, or name one that is there: make setup PYTHON3=python3.12",
    )
    return True


def config_error(where: str, rule: str, fix: str) -> int:
    print(f"refused: {where}: {rule}. {fix}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main("--look" in sys.argv))
