"""Program that installs the torch build for this host's driver into .venv: `make setup
TORCH=cu126`.

    python3 tools/make/torch_build.py cu126

Without TORCH, pip decides: on Linux with an x86-64 processor it installs the build for CUDA 13.0,
which requires driver 580 or newer. The project configures no package index. pip searches its own
configured addresses and TORCH_INDEX. TORCH_INDEX is the address of PyTorch's wheels for that build,
or of a mirror. https://pytorch.org/get-started/locally/ shows the address.

Exit code 0: the build is installed. Exit code 1: the installation failed. If the name is wrong,
nothing is changed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

from recipekit.hosts.torch_builds import DISCONTINUED_BUILDS, TORCH_BUILDS

PYTHON = ROOT / ".venv" / "bin" / "python"


def main(argv: list[str]) -> int:
    name, *more = argv or [""]
    drivers = [f"{build.name} (driver {build.min_driver} or newer)" for build in TORCH_BUILDS]
    if more or name not in {build.name for build in TORCH_BUILDS} | {"cpu"}:
        return config_error(
            f"TORCH={' '.join(argv)}",
            DISCONTINUED_BUILDS.get(name, "there is no such build of this torch"),
            f"Use TORCH={', '.join(drivers)} or cpu",
        )
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "requirements.txt").read_text(), re.M)
    assert pinned
    version = f"{pinned[1]}+{name}"
    if subprocess.run(
        [sys.executable, ROOT / "tools" / "make" / "make_venv.py"], check=False
    ).returncode:
        return 1
    told = subprocess.run(
        [PYTHON, "-c", "import importlib.metadata as m; print(m.version('torch'))"],
        capture_output=True,
        text=True,
        check=False,
    )
    if told.stdout.strip() == version:
        return 0
    print(f"installing torch {version}", flush=True)
    places = " ".join(
        filter(None, (os.environ.get("PIP_EXTRA_INDEX_URL"), os.environ.get("TORCH_INDEX")))
    )
    command = [
        PYTHON,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        f"torch=={version}",
    ]
    if subprocess.run(
        command, env=os.environ | ({"PIP_EXTRA_INDEX_URL": places} if places else {}), check=False
    ).returncode:
        where = (
            "Set TORCH_INDEX to the address of PyTorch's wheels for it"
            " (https://pytorch.org/get-started/locally/ shows it), or to your mirror's"
        )
        return config_error(
            f"TORCH={name}", f"pip cannot install torch {version} from where it looks", where
        )
    return 0


def config_error(where: str, rule: str, fix: str) -> int:
    print(f"refused: {where}: {rule}. {fix}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
