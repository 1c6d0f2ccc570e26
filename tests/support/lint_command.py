"""The command tools/lint.py."""

import subprocess
import sys
from pathlib import Path

from pool import ROOT


def lint(*words: str, cwd: Path = ROOT) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "lint.py"), *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr
