"""A process's usable cores: cgroups of both versions as Linux files, and a real cgroup."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from pool import ROOT
from recipekit.spec import cores as of_recipes

sys.path.insert(0, str(ROOT))

from launch import cores as of_launch

NO_LIMIT = float("inf")
GROUPS = {  # lines of /proc/self/cgroup, files below /sys/fs/cgroup, cores
    "a container, version 2": ("0::/", {"cpu.max": "150000 100000"}, 1.5),
    "no limit, version 2": (
        "0::/user.slice",
        {"cpu.max": "max 100000", "user.slice/cpu.max": "max 100000"},
        NO_LIMIT,
    ),
    "the parent's limit": (
        "0::/kubepods/pod1/ranks",
        {"kubepods/pod1/cpu.max": "200000 100000", "kubepods/pod1/ranks/cpu.max": "max 100000"},
        2.0,
    ),
    "the lowest of two": (
        "0::/a/b",
        {"a/cpu.max": "50000 10000", "a/b/cpu.max": "800000 100000"},
        5.0,
    ),
    "another group's limit": (
        "0::/a/b",
        {"a/c/cpu.max": "10000 100000", "c/cpu.max": "10000 100000"},
        NO_LIMIT,
    ),
    "version 2 beside version 1": (
        "1:memory:/x\n0::/x",
        {"unified/x/cpu.max": "300000 100000"},
        3.0,
    ),
    "Docker, version 1": (
        "4:cpu,cpuacct:/docker/1f\n0::/",
        {"cpu,cpuacct/cpu.cfs_quota_us": "250000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
        2.5,
    ),
    "a link of version 1": (
        "4:cpuacct,cpu:/a",
        {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"},
        0.5,
    ),
    "no limit, version 1": (
        "4:cpu:/a",
        {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"},
        NO_LIMIT,
    ),
    "cpuset is another controller": (
        "4:cpuset:/a",
        {"cpuset/a/cpu.cfs_quota_us": "100000", "cpuset/a/cpu.cfs_period_us": "100000"},
        NO_LIMIT,
    ),
    "a group outside the container": ("0::/../other", {"cpu.max": "400000 100000"}, 4.0),
}


@pytest.mark.parametrize("module", [of_recipes, of_launch], ids=["recipekit", "launch"])
@pytest.mark.parametrize("case", GROUPS)
def test_the_limit_of_every_group_above_a_process_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, module: ModuleType
) -> None:
    lines, files, limit = GROUPS[case]
    for name, text in {
        "proc/self/cgroup": lines,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert module.cpu_limit(tmp_path) == limit
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert module.usable_cores(tmp_path) == {5.0: 4, 2.5: 2, 1.5: 1, 0.5: 1, NO_LIMIT: 4}.get(
        limit, limit
    )


@pytest.mark.parametrize("module", [of_recipes, of_launch], ids=["recipekit", "launch"])
def test_without_groups_the_affinity_decides(tmp_path: Path, module: ModuleType) -> None:
    assert module.cpu_limit(tmp_path) == NO_LIMIT and module.usable_cores(tmp_path) == len(
        os.sched_getaffinity(0)
    )


@pytest.fixture
def group() -> Iterator[Path]:
    """Yield a real version 1 cgroup below a cgroup that allows 1.5 cores."""
    above = Path(f"/sys/fs/cgroup/cpu/test_cores_{os.getpid()}")
    try:
        (above / "inner").mkdir(parents=True)
        (above / "cpu.cfs_quota_us").write_text("150000")
    except OSError as error:
        pytest.skip(f"needs the right to make groups of version 1: {error}")
    yield above / "inner"
    (above / "inner").rmdir()
    above.rmdir()


def test_a_process_in_a_real_group_sees_its_limit(group: Path) -> None:
    show = (
        "from recipekit.spec.cores import *; from launch import cores; print(cpu_limit(),"
        " cores.cpu_limit(), usable_cores())"
    )
    words = [
        "sh",
        "-c",
        'echo $$ > "$0/cgroup.procs"; exec "$1" -c "$2"',
        str(group),
        sys.executable,
        show,
    ]
    path = os.pathsep.join([str(ROOT), str(ROOT / "recipes")])
    done = subprocess.run(
        words,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["1.5", "1.5", "1"]
