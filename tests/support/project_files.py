"""The files of this project."""

import subprocess
from pathlib import Path

from pool import ROOT


def project_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [path for name in listed.splitlines() if (path := ROOT / name).is_file()]
