"""`without_packages.sh COMMAND` hides what the packages of system_packages.sh installed, from that command alone."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from job import in_mounts
from pool import ROOT

HIDING = ["bash", str(ROOT / "tests" / "without_packages.sh")]


@pytest.fixture
def installed() -> list[str]:
    """The files under /usr of the packages that are there."""
    packages = subprocess.run(["bash", ROOT / "tests" / "system_packages.sh", "--list"], capture_output=True, text=True, check=True).stdout.split()
    listed = subprocess.run(["dpkg", "-L", *packages], capture_output=True, text=True, check=False).stdout.splitlines()
    files = [path for path in listed if path.startswith(("/usr/", "/bin/", "/sbin/", "/lib")) and Path(path).is_file()]
    if not files:
        pytest.skip(f"needs one of Debian's {', '.join(packages)} to hide it (tests/system_packages.sh)")
    return files


def test_what_is_installed_is_hidden_from_the_command(installed: list[str]) -> None:
    seen = ["sh", "-c", 'while read -r path; do if [ -e "$path" ]; then echo "$path"; fi; done; exit 7']
    done = subprocess.run([*in_mounts(""), *HIDING, *seen], input="\n".join([*installed, "/usr/bin/env", ""]), capture_output=True, text=True, check=False)
    if "WARNING" in done.stderr:
        pytest.skip("needs a kernel with overlayfs to hide packages")
    assert (done.returncode, done.stdout, done.stderr) == (7, "/usr/bin/env\n", "")
    assert all(map(os.path.exists, installed))


@pytest.mark.usefixtures("installed")
def test_without_the_right_to_mount_the_command_runs_after_a_warning() -> None:
    if os.geteuid() == 0 and not shutil.which("setpriv"):
        pytest.skip("needs util-linux's setpriv to give up rights")
    user = ["setpriv", "--bounding-set=-sys_admin"] if os.geteuid() == 0 else []
    done = subprocess.run([*user, *HIDING, "sh", "-c", "echo ran; exit 7"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "ran\n")
    assert "runs WITH the packages of tests/system_packages.sh: sh -c echo ran" in done.stderr
