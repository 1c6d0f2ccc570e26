"""recipekit/hosts/ops.py and op_cache.py: missing tools for compiling an op, and the op cache.

A missing tool must be reported as one config error with its fix.
"""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from job import NANO, in_mounts
from pool import ROOT, environment
from recipekit.dslint.swap import file_system_type
from recipekit.hosts import op_cache
from recipekit.hosts.ops import (
    OPS,
    check_cuda_toolkit,
    check_op_requirements,
    find_cuda_home,
    required_ops,
)
from recipekit.spec.errors import ConfigError

SITE = Path(sysconfig.get_paths()["purelib"])
NVME = ("--deepspeed_config", "zero3_nvme.json")
OFFLOAD = ("--deepspeed_config", "zero2_cpu.json")


def start(
    folder: Path,
    *flags: str,
    prefix: list[str] | None = None,
    python: list[str] | None = None,
    **variables: str | None,
) -> tuple[int, str]:
    """Start one rank of the nano recipe with a separate op folder; return its exit code and output.

    Variables with the value None are unset.
    """
    env = environment() | {"TORCH_EXTENSIONS_DIR": str(folder / "ops")} | variables
    words = [
        *(prefix or []),
        *(python or [sys.executable, str(NANO)]),
        "--tiny",
        "--out",
        "run",
        "--steps",
        "1",
        "--eval_every",
        "0",
        "--no-export",
        *flags,
    ]
    done = subprocess.run(
        words,
        cwd=folder,
        env={name: value for name, value in env.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stdout, done.stdout
    return done.returncode, done.stdout


def refusal(told: tuple[int, str]) -> str:
    """Return the only problem in a start's config error."""
    code, text = told
    assert code == 1 and "refused: 1 problem\n" in text, text
    (problem,) = re.findall(r"^  1\. (.*)$", text, re.M)
    assert len(problem.split(". ")) >= 2, f"value: rule. Fix: {problem}"
    return problem


def programs(folder: Path, *names: str) -> str:
    """Return a PATH with only these programs."""
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(str(shutil.which(name)))
    return str(folder)


# Missing tools


def test_without_a_compiler(tmp_path: Path) -> None:
    told = refusal(
        start(tmp_path, *OFFLOAD, PATH=programs(tmp_path / "bin", "git"), CXX=None, CC=None)
    )
    assert (
        told.startswith("compiler c++ and ")
        and "not found to compile CPU Adam" in told
        and "apt-get install g++" in told
    )


@pytest.mark.slow
def test_what_needs_no_op_needs_no_compiler(tmp_path: Path, ops: Callable[[str], None]) -> None:
    """A run without ops needs no compiler, ninja, op folder, shared memory or home folder.

    The run must reach its end. DeepSpeed's own start on a CPU would need a compiler, ninja, the op
    folder and shared memory.
    """
    for name in ("ops", "home"):
        (tmp_path / name).mkdir()
    hidden = (
        "".join(f"mount -t tmpfs -o ro tmpfs {tmp_path / name}\n" for name in ("ops", "home"))
        + "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    )
    code, text = start(
        tmp_path,
        prefix=in_mounts(hidden),
        PATH=programs(tmp_path / "bin", "git"),
        HOME=str(tmp_path / "home"),
        CXX=None,
        CC=None,
    )
    assert code == 0 and "compil" not in text, text


def test_without_ninja(tmp_path: Path) -> None:
    """ninja is not next to this environment's Python, as if its package were not installed."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")],
        check=True,
        timeout=60,
    )
    path = os.pathsep.join([environment()["PYTHONPATH"], str(SITE)])
    python = [str(tmp_path / "env" / "bin" / "python"), str(NANO)]
    told = refusal(
        start(
            tmp_path,
            *OFFLOAD,
            python=python,
            PYTHONPATH=path,
            PATH=programs(tmp_path / "bin", "c++", "gcc"),
            CC="gcc",
            CXX=None,
        )
    )
    assert (
        told.startswith("ninja: not found to compile CPU Adam")
        and "-m pip install -r requirements.txt" in told
    )


def test_without_libaio(tmp_path: Path) -> None:
    hidden = (
        "mount --bind /dev/null /usr/include/libaio.h"
        if Path("/usr/include/libaio.h").exists()
        else ""
    )
    told = refusal(start(tmp_path, *NVME, prefix=in_mounts(hidden)))
    assert (
        told.startswith(
            "libaio: async_io, which NVMe offload requires, cannot be compiled without it ("
        )
        and "Install libaio-dev" in told
    )


CLAIM = """
import runpy, sys
import torch
from recipekit.hosts import torch_builds
torch_builds.torch_platform_version = lambda platform="cuda": "13.0" if platform == "cuda" else None
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_without_a_cuda_toolkit_where_a_gpu_is_claimed(tmp_path: Path) -> None:
    """torch claims to be a build with CUDA on a machine with a GPU.

    nvcc is not on PATH, and its usual folder is empty if it exists.
    """
    if not Path("/usr/include/libaio.h").exists():
        pytest.skip(
            "needs Debian's libaio-dev for the toolkit to be all that is missing"
            " (tests/system_packages.sh)"
        )
    hidden = "mount -t tmpfs tmpfs /usr/local/cuda/" if Path("/usr/local/cuda").exists() else ""
    variables = {
        "CUDA_HOME": None,
        "CUDA_PATH": None,
        "DS_ACCELERATOR": None,
        "CC": "gcc",
        "CXX": None,
        "PATH": programs(tmp_path / "bin", "c++", "gcc", "as", "ld"),
    }
    python = [sys.executable, "-c", CLAIM, str(NANO)]
    told = refusal(start(tmp_path, *NVME, prefix=in_mounts(hidden), python=python, **variables))
    assert (
        re.match(r"CUDA_HOME( is not|:| = /usr/local/cuda: has no bin/nvcc that runs)", told)
        and "cuda-toolkit-13-0" in told
    ), told


def test_the_toolkit_is_of_the_cuda_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    nvcc.chmod(0o755)
    wanted = [OPS["fused_adam"]]
    assert check_cuda_toolkit(wanted, "12.6", tmp_path, []) == []  # the same major version
    (problem,) = check_cuda_toolkit(wanted, "13.0", tmp_path, [])
    assert (
        "has CUDA 12.4, but torch was built for CUDA 13.0" in problem.rule
        and "cuda-toolkit-13-0" in problem.fix
    )
    monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "1")
    assert check_cuda_toolkit(wanted, "13.0", tmp_path, []) == []
    (problem,) = check_cuda_toolkit([OPS["async_io"]], "12.4", tmp_path, ["c++"])
    # The folder has no libcudart.
    assert (
        "does not link with the libraries of CUDA" in problem.rule and "LIBRARY_PATH" in problem.fix
    )


def test_the_toolkit_is_found_as_torch_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.touch(0o755)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(nvcc.parent))
    assert find_cuda_home() == tmp_path
    monkeypatch.setenv("PATH", "/nowhere")
    assert (find_cuda_home(tmp_path), find_cuda_home(tmp_path / "none")) == (tmp_path, None)
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    assert find_cuda_home(tmp_path) == Path("/opt/cuda")


# The folder of compiled ops


def test_an_op_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    told = refusal(
        start(
            tmp_path, *OFFLOAD, prefix=in_mounts(f"mount -t tmpfs -o ro tmpfs {tmp_path / 'ops'}")
        )
    )
    assert (
        told
        == f"the folder of compiled ops {tmp_path / 'ops'}: cannot be written: {tmp_path / 'ops'}"
        " belongs to another user. Set TORCH_EXTENSIONS_DIR to a folder that you can write to"
        " and that has free space"
    )


NO_LOCKS = """
import errno, fcntl, os, runpy, sys
real = fcntl.flock
def flock(file, how):
    if sys.argv[1] in os.readlink(f"/proc/self/fd/{file.fileno()}"):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    return real(file, how)
fcntl.flock = flock
where, sys.argv = sys.argv[1], sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
""".replace("sys.argv[1] in os", "where in os")


@pytest.mark.parametrize(
    ("folder", "where", "fix"),
    [
        ("ops", "the folder of compiled ops ", "set TORCH_EXTENSIONS_DIR"),
        (".run.lock", "out = run", "--out"),
    ],
)
def test_a_file_system_without_locks(tmp_path: Path, folder: str, where: str, fix: str) -> None:
    """NFS without lockd answers flock in this way. The error must precede any compilation or
    output.
    """
    (tmp_path / "ops").mkdir()
    told = refusal(
        start(
            tmp_path,
            *OFFLOAD,
            python=[sys.executable, "-c", NO_LOCKS, str(tmp_path / folder), str(NANO)],
        )
    )
    assert (
        told.startswith(where)
        and "its file system has no file locks (No locks available). Mount it with file locks"
        " (Lustre: -o flock, NFS: with lockd)"
        in told
    )
    assert (
        fix in told and list((tmp_path / "ops").iterdir()) == [] and not (tmp_path / "run").exists()
    )


USE = """
import fcntl, sys
def flock(*_):
    raise AssertionError("locked")
fcntl.flock = flock
from recipekit.hosts.ops import OPS, check_op_requirements, load_op
assert check_op_requirements([OPS["cpu_adam"]], None) == []
load_op(OPS["cpu_adam"], print)
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
weight = torch.nn.Parameter(torch.ones(8))
weight.grad = torch.ones(8)
DeepSpeedCPUAdam([weight], lr=0.5).step()
print("weights", [round(value, 3) for value in weight.tolist()])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "signed",
    [pytest.param(True, id="by a host of this kind"), pytest.param(False, id="by plain DeepSpeed")],
)
def test_an_op_in_a_folder_that_is_not_ours_is_used_and_not_locked(
    tmp_path: Path, ops: Callable[[str], None], signed: bool
) -> None:
    """The disk is read-only, and there is no compiler, no ninja and no lock."""
    ops("cpu_adam")
    (tmp_path / "ops").mkdir()
    shutil.copytree(op_cache.find_op_folder() / "cpu_adam", tmp_path / "theirs" / "cpu_adam")
    if not signed:
        (tmp_path / "theirs" / "cpu_adam" / "kind").unlink()
        log = tmp_path / "theirs" / "cpu_adam" / ".ninja_log"
        log.write_text("# ninja log v7\n0\t1\t2\tcpu_adam.so\tff\n")
    (tmp_path / "theirs" / "cpu_adam" / "lock").touch()  # left over from a killed compilation
    prefix = in_mounts(
        f"mount --bind {tmp_path / 'theirs'} {tmp_path / 'ops'}\nmount -o remount,ro,bind"
        f" {tmp_path / 'ops'}"
    )
    env = environment() | {
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops"),
        "PATH": programs(tmp_path / "bin", "git"),
    }
    done = subprocess.run(
        [*prefix, sys.executable, "-c", USE],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and "weights [0.5, " in done.stdout, done.stdout + done.stderr
    assert "compil" not in done.stdout


def test_what_a_killed_link_has_left_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incomplete op file must not be used, even in a folder that is not writable."""
    monkeypatch.setattr(op_cache, "is_writable", lambda place: False)
    op = tmp_path / "cpu_adam"
    op.mkdir()
    (op / "cpu_adam.so").write_bytes(b"\x7fELF")
    (op / ".ninja_log").write_text(
        "# ninja log v7\n0\t48919\t1795432007177691539\tcpu_adam.o\td9e0687ddd6475ee\n"
    )
    assert not op_cache.is_compiled(tmp_path, "cpu_adam") and not op_cache.is_loadable(
        tmp_path, "cpu_adam"
    )
    with (op / ".ninja_log").open("a") as log:
        log.write("51991\t52900\t1795432007177691539\tcpu_adam.so\td9e0687ddd6475ee\n")
    assert op_cache.is_loadable(tmp_path, "cpu_adam")


def test_each_kind_of_host_has_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {}
    for name, text in {
        "old": "processor\t: 0\nflags\t\t: fpu sse2 avx avx2\nbugs\t\t: spectre_v1\n",
        "same": "processor\t: 0\nflags\t\t: avx2 fpu avx sse2\nbugs\t\t: none\n",
        "new": "processor\t: 0\nflags\t\t: fpu sse2 avx avx2 avx512f\n",
        "arm": "processor\t: 0\nFeatures\t: fp asimd sve\n",
    }.items():
        (tmp_path / name).write_text(text)
        kinds[name] = op_cache.host_kind(tmp_path / name)
    assert kinds["old"] == kinds["same"] and len(set(kinds.values())) == 3
    assert f"_torch{metadata.version('torch')}_" in op_cache.host_kind()
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert op_cache.find_op_folder() == ROOT / ".cache" / "torch_extensions" / op_cache.host_kind()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/scratch/ops")  # the user's choice takes precedence
    assert op_cache.find_op_folder() == Path("/scratch/ops")


def test_a_checkout_that_cannot_be_written_leaves_the_users_cache(tmp_path: Path) -> None:
    code = "from recipekit.hosts import op_cache; print(op_cache.find_op_folder())"
    env = {
        name: value
        for name, value in environment().items()
        if name not in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME")
    } | {"HOME": str(tmp_path)}
    (ROOT / ".cache").mkdir(exist_ok=True)  # a mount point
    prefix = in_mounts(f"mount -t tmpfs -o ro tmpfs {(ROOT / '.cache').resolve()}")
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == str(
        tmp_path / ".cache" / "torch_extensions" / op_cache.host_kind()
    )


HOLD = """
import sys, time
from pathlib import Path
from recipekit.hosts import op_cache
with op_cache.lock_op_folder(Path(sys.argv[1]), "cpu_adam", print):
    (Path(sys.argv[1]) / "cpu_adam").mkdir()
    (Path(sys.argv[1]) / "cpu_adam" / "lock").touch()
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_killed_compile_is_cleared_away_and_a_living_one_waited_for(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout and process.stdout.readline() == "held\n"
        said: list[str] = []
        taken = threading.Event()

        def take() -> None:
            with op_cache.lock_op_folder(tmp_path, "cpu_adam", said.append):
                taken.set()

        waiting = threading.Thread(target=take)
        waiting.start()
        assert not taken.wait(0.5) and said == [
            "waiting for another process that compiles DeepSpeed's cpu_adam"
        ]
        process.send_signal(signal.SIGKILL)
        assert taken.wait(30)
        waiting.join()
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "cpu_adam" / "lock").exists()


def of_another_host(place: Path, owner: str) -> Path:
    """Write a lock for a compilation that `owner` started; return the lock."""
    (place / "cpu_adam").mkdir()
    (place / "cpu_adam.flock").write_text(owner)
    (place / "cpu_adam" / "lock").touch()
    return place / "cpu_adam" / "lock"


def test_the_compile_of_another_host_is_waited_for_and_never_unlinked(tmp_path: Path) -> None:
    left = of_another_host(tmp_path, "worker-2 11111111-2222-3333-4444-555555555555")
    said: list[str] = []
    threading.Timer(0.5, left.unlink, kwargs={"missing_ok": True}).start()
    begun = time.monotonic()
    with op_cache.lock_op_folder(tmp_path, "cpu_adam", said.append):
        assert time.monotonic() - begun >= 0.4
    assert said == ["waiting for worker-2, which compiles DeepSpeed's cpu_adam"]
    assert not list(op_cache.leftover_locks(tmp_path))


def test_a_dead_compile_of_another_host_is_told(tmp_path: Path) -> None:
    left = of_another_host(tmp_path, "worker-2 11111111-2222-3333-4444-555555555555")
    assert not list(op_cache.leftover_locks(tmp_path))  # the compilation may still run
    for path in (left, left.parent):
        os.utime(path, (time.time() - 3600,) * 2)
    assert list(op_cache.leftover_locks(tmp_path)) == [(left, "worker-2")]
    with pytest.raises(ConfigError) as caught, op_cache.lock_op_folder(tmp_path, "cpu_adam", print):
        pass
    assert (
        "is left over from a compile on worker-2, and nothing has changed beside it for 60 min."
        " Run: rm -f"
        in str(caught.value)
        and left.exists()
    )


def test_an_unsigned_mark_is_of_this_host_unless_others_write_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = of_another_host(tmp_path, "")
    os.utime(left, (time.time() - 3600,) * 2)
    os.utime(left.parent, (time.time() - 3600,) * 2)
    with monkeypatch.context() as shared:
        shared.setattr(op_cache, "NETWORK_FILE_SYSTEMS", {file_system_type(tmp_path)})
        with (
            pytest.raises(ConfigError, match="on another host"),
            op_cache.lock_op_folder(tmp_path, "cpu_adam", print),
        ):
            pass
    assert left.exists()
    with op_cache.lock_op_folder(tmp_path, "cpu_adam", print):
        assert not left.exists()


def test_what_other_processors_compiled_is_not_loaded(tmp_path: Path) -> None:
    """The user chose one folder for different hosts."""
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    (tmp_path / "cpu_adam" / "kind").write_text(
        f"x86_64_00000000_{op_cache.host_kind().partition('_py')[2]}"
    )
    assert not op_cache.is_loadable(tmp_path, "cpu_adam")
    with (
        pytest.raises(
            ConfigError,
            match=(
                r"was compiled for a different processor than this host's\. Unset"
                r" TORCH_EXTENSIONS_DIR"
            ),
        ),
        op_cache.lock_op_folder(tmp_path, "cpu_adam", print),
    ):
        pass


@pytest.mark.slow
def test_a_compile_that_fails_is_a_refusal_with_the_first_error(tmp_path: Path) -> None:
    """The compiler exists and prints its version, but it cannot compile."""
    broken = tmp_path / "c++"
    error = "echo 'stuff.h:1:10: fatal error: immintrin.h: No such file or directory' >&2; exit 1"
    broken.write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*) {error} ;; esac\nexec {shutil.which("c++")} "$@"\n'
    )
    broken.chmod(0o755)
    told = refusal(start(tmp_path, *OFFLOAD, CXX=str(broken)))
    assert told.startswith(
        "DeepSpeed's CPU Adam: cannot be compiled or loaded (RuntimeError): stuff.h:1:10: fatal"
        " error: immintrin.h"
    ), told


# Ops that a JSON needs


def names(config: dict[str, Any], cuda: bool) -> list[str]:
    return [
        next(name for name, other in OPS.items() if other is op)
        for op in required_ops(config, cuda)
    ]


def test_the_ops_of_the_strategies() -> None:
    offloading = {
        "zero2_cpu": ["cpu_adam"],
        "zero3_cpu": ["cpu_adam"],
        "zero3_nvme": ["cpu_adam", "async_io"],
    }
    strategies = sorted((ROOT / "ds_configs").glob("*.json"))
    assert {path.stem for path in strategies} >= offloading.keys()
    for path in strategies:
        config, expected = json.loads(path.read_text()), offloading.get(path.stem, [])
        assert (names(config, False), names(config, True)) == (expected, expected), path.stem


@pytest.mark.parametrize(
    ("config", "cuda", "expected"),
    [
        ({"optimizer": {"type": "AdamW"}}, True, ["fused_adam"]),
        ({"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, True, []),
        ({"optimizer": {"type": "Lion"}}, True, []),  # this project's Lion
        (
            {
                "optimizer": {"type": "Lion"},
                "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
            },
            True,
            ["cpu_lion"],
        ),
        ({"optimizer": {"type": "Lamb"}}, True, []),
        (
            {
                "optimizer": {"type": "SGD"},
                "zero_optimization": {"offload_param": {"device": "nvme"}},
                "aio": {"use_gds": True},
            },
            True,
            ["async_io", "gds"],
        ),
        (
            {
                "optimizer": {"type": "SGD"},
                "zero_optimization": {"zero_quantized_weights": True},
                "compile": {"deepcompile": True},
            },
            True,
            ["quantizer", "deepcompile"],
        ),
        # Another check reports this value.
        ({"zero_optimization": ["wrong"], "optimizer": {"type": "SGD"}}, False, []),
    ],
)
def test_the_ops_of_a_json(config: dict[str, Any], cuda: bool, expected: list[str]) -> None:
    assert names(config, cuda) == expected


@pytest.mark.parametrize("name", OPS)
def test_the_table_says_what_deepspeed_does(name: str) -> None:
    """The table lists the names of DeepSpeed's builders on GPUs, and which of them need CUDA to
    compile.
    """
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    op = OPS[name]
    cpu = "cpu." if not op.cuda else ""
    module = importlib.import_module(
        f"deepspeed.ops.op_builder.{cpu}{'dc' if name == 'deepcompile' else name}"
    )
    builder = getattr(module, op.builder)
    assert (builder.NAME, issubclass(builder, CUDAOpBuilder)) == (op.parts[-1], op.cuda)


def test_what_is_compiled_needs_no_tools(
    tmp_path: Path, ops: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ops("cpu_adam")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_op_requirements([OPS["cpu_adam"]], None) == []
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert check_op_requirements([OPS["cpu_adam"]], None) != []


# Missing W&B


def without_wandb(folder: Path) -> list[str]:
    """Return the command for a Python that has this environment's packages except wandb."""
    site = folder / "site"
    site.mkdir()
    for entry in SITE.iterdir():
        if not entry.name.startswith("wandb"):
            (site / entry.name).symlink_to(entry)
    code = (
        f"import sys, runpy; sys.path.append({str(site)!r}); sys.argv = sys.argv[1:];"
        " runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    return [sys.executable, "-S", "-c", code, str(NANO)]


@pytest.mark.slow
def test_a_wish_for_wandb_without_its_package(tmp_path: Path, ops: Callable[[str], None]) -> None:
    """An explicit --wandb is rejected.

    If wandb is only the recipe's default, one line reports this, and the run completes.
    """
    python, cache = without_wandb(tmp_path), str(op_cache.find_op_folder())
    told = refusal(start(tmp_path, "--wandb", python=python, TORCH_EXTENSIONS_DIR=cache))
    assert told.startswith("--wandb: the package wandb is not installed. Run: pip install")
    code, text = start(tmp_path, python=python, TORCH_EXTENSIONS_DIR=cache)
    assert (
        code == 0 and text.count("the package wandb is not installed, so there is no W&B run") == 1
    ), text
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (
        facts["versions"]["wandb"] is None
        and facts["versions"]["torch"]
        and facts["build"]["torch_git"]
    )
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
