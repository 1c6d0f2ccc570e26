"""A run with faults of disks, signals and users must end like an unbroken run.

The faults are in `tests/support/disk_faults.py`.
"""

import subprocess
import sys

import pytest
from disk_faults import FAULTS
from pool import ROOT, environment

TIMES = 1  # per fault; for more, run python tests/support/disk_faults.py --faults 200


@pytest.mark.slow
def test_a_run_survives_faults_at_random_steps() -> None:
    """The seed is printed; the same seed gives the same faults."""
    words = [sys.executable, "tests/support/disk_faults.py", "--faults", str(TIMES * len(FAULTS))]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    print(done.stdout)
    assert (
        done.returncode == 0
        and f"{TIMES * len(FAULTS)} of {TIMES * len(FAULTS)} faults passed" in done.stdout
    ), done.stdout + done.stderr
