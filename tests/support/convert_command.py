"""The command tools/convert_checkpoint.py."""

import subprocess
import sys
from typing import Any

from pool import ROOT, environment


def convert(*words: Any) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py"), *map(str, words)],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
