"""`without_packages.sh COMMAND` hides the files of the packages in system_packages.sh, but only
from that command.
"""

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
    """Return the files under /usr of the installed packages."""
    packages = subprocess.run(
        ["bash", ROOT / "tests" / "system_packages.sh", "--list"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    listed = subprocess.run(
        ["dpkg", "-L", *packages], capture_output=True, text=True, check=False
    ).stdout.splitlines()
    files = [
        path
        for path in listed
        if path.startswith(("/usr/", "/bin/", "/sbin/", "/lib")) and Path(path).is_file()
    ]
    if not files:
        pytest.skip(
            f"needs one of Debian's {', '.join(packages)} to hide it (tests/system_packages.sh)"
        )
    return files


def test_what_is_installed_is_hidden_from_the_command(installed: list[str], tmp_path: Path) -> None:
    """If /usr cannot be overmounted, the command sees the files, after a warning."""
    over = f"lowerdir=/usr,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    overlay = in_mounts(
        f"mount -t tmpfs tmpfs {tmp_path}\nmkdir {tmp_path}/upper {tmp_path}/work\nmount -t overlay"
        f" overlay -o {over} /usr"
    )
    possible = subprocess.run([*overlay, "true"], check=False).returncode == 0
    seen = [
        "sh",
        "-c",
        'while read -r path; do if [ -e "$path" ]; then echo "$path"; fi; done; exit 7',
    ]
    visible = [*([] if possible else installed), "/usr/bin/env"]
    done = subprocess.run(
        [*in_mounts(""), *HIDING, *seen],
        input="\n".join([*installed, "/usr/bin/env", ""]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines(), "WARNING" in done.stderr) == (
        7,
        visible,
        not possible,
    ), done.stderr
    assert all(map(os.path.exists, installed))


@pytest.mark.usefixtures("installed")
def test_without_the_right_to_mount_the_command_runs_after_a_warning() -> None:
    if os.geteuid() == 0 and not shutil.which("setpriv"):
        pytest.skip("needs util-linux's setpriv to give up rights")
    user = ["setpriv", "--bounding-set=-sys_admin"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*user, *HIDING, "sh", "-c", "echo ran; exit 7"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "ran\n")
    assert "runs WITH the packages of tests/system_packages.sh: sh -c echo ran" in done.stderr
