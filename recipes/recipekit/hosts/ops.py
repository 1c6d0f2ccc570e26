"""DeepSpeed's C++ ops: which ones a run needs, which this host lacks, and how they are loaded.

Only loading imports torch.
"""

import ctypes
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..compat.deepspeed import cache_cpu_info, keep_op
from ..dslint.schema import value_at
from ..spec.errors import ConfigError, Problem, Say, config_error
from . import op_cache, torch_builds

if TYPE_CHECKING:
    from deepspeed.ops.op_builder.builder import OpBuilder

LIBAIO_FIX = "install libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora)"


class Op(NamedTuple):
    """A DeepSpeed op.

    `builder` is DeepSpeed's name for it. `parts` are the folders in which the op is compiled, each
    listed after the parts that it depends on.
    """

    builder: str
    title: str
    typical_time: str  # compile time on two cores
    parts: tuple[str, ...]
    cuda: bool = False  # compiled against CUDA if torch is (CUDAOpBuilder, DeepSpeed 0.19.8)


LIBAIO_NAMES = ("libaio.so.1", "libaio.so.1t64")  # Debian 13 and Ubuntu 24.04 use the second name
OPS = {
    "cpu_adam": Op("CPUAdamBuilder", "CPU Adam", "60 s", ("cpu_adam",)),
    "cpu_adagrad": Op("CPUAdagradBuilder", "CPU Adagrad", "60 s", ("cpu_adagrad",)),
    "cpu_lion": Op("CPULionBuilder", "CPU Lion", "60 s", ("cpu_lion",)),
    "fused_adam": Op("FusedAdamBuilder", "fused Adam", "60 s", ("fused_adam",), cuda=True),
    "fused_lion": Op("FusedLionBuilder", "fused Lion", "60 s", ("fused_lion",), cuda=True),
    "fused_lamb": Op("FusedLambBuilder", "fused LAMB", "60 s", ("fused_lamb",), cuda=True),
    "async_io": Op(
        "AsyncIOBuilder", "asynchronous I/O", "180 s", ("pin_memory", "async_io"), cuda=True
    ),
    "gds": Op("GDSBuilder", "GPU direct storage", "180 s", ("pin_memory", "gds"), cuda=True),
    "quantizer": Op("QuantizerBuilder", "quantizer", "180 s", ("quantizer",), cuda=True),
    "deepcompile": Op("DeepCompileBuilder", "DeepCompile", "180 s", ("dc",), cuda=True),
}


def required_ops(config: dict[str, Any], cuda: bool) -> list[Op]:
    """List the ops that a run with this JSON loads, on GPUs or on a CPU.

    See DeepSpeed 0.19.8: engine.py, _configure_basic_optimizer.
    """
    homes = [
        value_at(config, f"zero_optimization.{block}.device", "none")
        for block in ("offload_optimizer", "offload_param")
    ]
    offloaded, kind = homes[0] != "none", str(value_at(config, "optimizer.type", "AdamW")).lower()
    names = []
    if kind in ("adam", "adamw") and not value_at(config, "optimizer.params.torch_adam", False):
        names.append("cpu_adam" if offloaded else "fused_adam")
    elif kind == "muon" and offloaded:  # without offload, these optimizers need no op
        names.append("cpu_adam")
    elif kind in ("adagrad", "lion") and offloaded:  # without offload, our implementations are used
        names.append(f"cpu_{kind}")
    if "nvme" in homes:
        names.append("async_io")
    if cuda:
        names += ["gds"] if value_at(config, "aio.use_gds") else []
        names += (
            ["quantizer"]
            if any(
                value_at(config, f"zero_optimization.zero_quantized_{what}")
                for what in ("weights", "nontrainable_weights", "gradients")
            )
            else []
        )
        names += ["deepcompile"] if value_at(config, "compile.deepcompile") else []
    return [OPS[name] for name in names]


# Missing requirements on a host


def check_ops(config: dict[str, Any]) -> list[Problem]:
    """Find problems that would prevent a run with this JSON from loading its ops on this host.

    The result contains one problem per cause.
    """
    gpus = torch_builds.gpus_in_use()
    return check_op_requirements(
        required_ops(config, gpus), torch_builds.torch_platform_version("cuda") if gpus else None
    )


def check_op_requirements(ops: list[Op], cuda: str | None) -> list[Problem]:
    """Find problems that would prevent `ops` from being loaded.

    `cuda` is the CUDA version that torch was built with, or None on a CPU.
    """
    missing = [op for op in ops if not _is_op_loadable(op)]
    problems = []
    if any("pin_memory" in op.parts for op in ops if op not in missing) and not any(
        map(_can_load_library, LIBAIO_NAMES)
    ):
        problems.append(
            Problem(
                "libaio",
                "async_io, which NVMe offload requires, cannot be loaded without it",
                "install libaio1 or libaio1t64 (Debian, Ubuntu), or libaio (Fedora)",
            )
        )
    if missing:
        problems += op_cache.check_op_folder(op_cache.find_op_folder(missing[0].parts))
        problems += check_build_tools(missing, cuda)
    return problems


def _is_op_loadable(op: Op) -> bool:
    place = op_cache.find_op_folder(op.parts)
    return all(op_cache.is_loadable(place, part) for part in op.parts)


def check_build_tools(ops: list[Op], cuda: str | None) -> list[Problem]:
    """Find build tools that are required to compile `ops` but missing."""
    what, problems = f"to compile {', '.join(op.title for op in ops)}", []
    compiler, c_compiler = _compiler_commands()
    found = [name for name in dict.fromkeys((compiler[0], c_compiler[0])) if not shutil.which(name)]
    if found:
        problems.append(
            Problem(
                f"compiler {' and '.join(found)}",
                f"not found {what}",
                "install one (Debian, Ubuntu: apt-get install g++), or set CXX and CC",
            )
        )
    if not shutil.which("ninja", path=_path_with_env_first()):
        problems.append(
            Problem(
                "ninja", f"not found {what}", f"{sys.executable} -m pip install -r requirements.txt"
            )
        )
    problems += _check_headers(what)
    if (
        any("async_io" in op.parts or "gds" in op.parts for op in ops)
        and not found
        and (why := _link_error(compiler, "io_setup(1, 0)", "libaio.h", ["-laio"]))
    ):
        problems.append(
            Problem(
                "libaio",
                f"async_io, which NVMe offload requires, cannot be compiled without it ({why})",
                LIBAIO_FIX,
            )
        )
    if cuda and (compiled_against := [op for op in ops if op.cuda]):
        problems += check_cuda_toolkit(
            compiled_against, cuda, find_cuda_home(), [] if found else compiler
        )
    return problems


def _check_headers(what: str) -> list[Problem]:
    if (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return []
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return [
        Problem(
            "Python.h",
            f"not found {what}",
            f"install {python}-dev (Debian, Ubuntu) or {python}-devel (Fedora)",
        )
    ]


def check_torch_compile(cuda: bool) -> list[Problem]:
    """Find requirements of torch.compile that this host does not meet.

    On a GPU, torch.compile builds kernels with Triton and a C compiler. On a CPU it uses g++ (or
    CC, CXX).
    """
    what, problems = "for torch.compile", _check_headers("for torch.compile")
    named = shlex.split(os.environ.get("CC" if cuda else "CXX", ""))[:1] or (
        ["gcc", "clang"] if cuda else ["g++"]
    )
    if not any(map(shutil.which, named)):
        problems.insert(
            0,
            Problem(
                f"compiler {' or '.join(named)}",
                f"not found {what}",
                f"install one, or set {'CC' if cuda else 'CXX'}",
            ),
        )
    if cuda and importlib.util.find_spec("triton") is None:
        problems.append(
            Problem(
                "triton",
                f"not found {what} on a GPU",
                "install the Triton version that torch's CUDA wheel requires",
            )
        )
    if cuda:
        import torch

        if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability()) < (
            7,
            0,
        ):
            card = (
                f"{torch.cuda.get_device_name()} of compute capability"
                f" {capability[0]}.{capability[1]}"
            )
            problems.append(
                Problem(
                    card, "is older than 7.0, the oldest that Triton supports", "use another GPU"
                )
            )
    return [replace(problem, fix=f"{problem.fix}, or use --compile off") for problem in problems]


def check_cuda_toolkit(
    ops: list[Op], cuda: str, home: Path | None, compiler: list[str]
) -> list[Problem]:
    """Find problems with the CUDA toolkit in `home` if torch was built with CUDA `cuda`.

    DeepSpeed 0.19.8 runs nvcc for each of these ops, even if only to read nvcc's version
    (builder.py, nvcc_args). It links async_io with the toolkit's libcudart and the driver's libcuda
    (async_io.py). Without a toolkit, DeepSpeed raises a TypeError or MissingCUDAException.
    """
    major = cuda.partition(".")[0]
    what, fix = (
        ", ".join(op.title for op in ops),
        (
            f"install NVIDIA's CUDA toolkit {cuda} (Debian, Ubuntu:"
            f" cuda-toolkit-{cuda.replace('.', '-')}) and set CUDA_HOME to it"
        ),
    )
    if home is None:
        return [
            Problem(
                "CUDA_HOME",
                f"is not set, and neither nvcc nor /usr/local/cuda is there to compile {what}",
                fix,
            )
        ]
    try:
        said = subprocess.run(
            [home / "bin" / "nvcc", "-V"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        release = re.search(r"release (\d+)\.(\d+)", said)
        assert release, said
    except (OSError, subprocess.SubprocessError, AssertionError) as error:
        return [
            Problem(
                f"CUDA_HOME = {home}",
                f"has no bin/nvcc that runs, to compile {what} ({_shorten_error(error)})",
                fix,
            )
        ]
    if release[1] != major and os.environ.get("DS_SKIP_CUDA_CHECK") != "1":
        rule = (
            f"has CUDA {release[1]}.{release[2]}, but torch was built for CUDA {cuda}, and {what}"
            " would need a different libcudart than torch ships"
        )
        return [
            Problem(
                f"CUDA_HOME = {home}",
                rule,
                f"{fix}, or set DS_SKIP_CUDA_CHECK=1 if you know that both versions work together",
            )
        ]
    linked = [f"-L{home}", f"-L{home / 'lib64'}", "-lcuda", "-lcudart"]
    if (
        compiler
        and any("pin_memory" in op.parts for op in ops)
        and (why := _link_error(compiler, "0", "stddef.h", linked))
    ):
        rule = f"asynchronous I/O does not link with the libraries of CUDA ({why})"
        return [
            Problem(
                f"CUDA_HOME = {home}",
                rule,
                f"{fix}. The driver's libcuda.so is also in {home}/lib64/stubs: add that folder to"
                " LIBRARY_PATH",
            )
        ]
    return []


def find_cuda_home(standard: Path = Path("/usr/local/cuda")) -> Path | None:
    """Find the CUDA toolkit in the same way as torch 2.13 (cpp_extension.py, _find_cuda_home)."""
    if told := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return Path(told)
    if nvcc := shutil.which("nvcc"):
        return Path(nvcc).parents[1]
    return standard if standard.exists() else None


def _compiler_commands() -> tuple[list[str], list[str]]:
    """Return the commands for the C++ compiler and the C compiler.

    torch compiles with the C++ compiler, while DeepSpeed looks for libaio with the C compiler.
    """
    return shlex.split(os.environ.get("CXX") or "c++"), shlex.split(
        os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    )


def _path_with_env_first() -> str:
    """Return PATH with this environment's programs first.

    This order is necessary because a different ninja would compile every op again.
    """
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _link_error(compiler: list[str], expression: str, header: str, flags: list[str]) -> str:
    """Return why a program with `expression` cannot be compiled and linked with `flags`.

    Return "" if compiling and linking succeed.
    """
    program = f"#include <{header}>\nint main() {{ return (long)({expression}) != 0; }}"
    command = [*compiler, "-x", "c++", "-", "-o", os.devnull, *flags]
    done = subprocess.run(
        command, input=program, capture_output=True, text=True, timeout=60, check=False
    )
    return _first_error(done.stderr) if done.returncode else ""


def _can_load_library(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _first_error(text: str) -> str:
    """Return the first line that reports an error in the text of a compiler or exception.

    If no line does, return the last line.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    named = [
        line
        for line in lines
        if re.search(
            r"\berror:|cannot find|No space left|undefined|not being installed|not found",
            line,
            re.I,
        )
    ]
    return (named or lines[-1:])[0][:300]


def _shorten_error(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# Loading


def prepare_ops(config: dict[str, Any], say: Say) -> None:
    """Load the ops that a run with this JSON needs, after compiling the missing ones.

    Raise a `ConfigError` that lists the missing requirements for compiling the ops.
    """
    if problems := check_ops(config):
        raise ConfigError(problems)
    for op in required_ops(config, torch_builds.gpus_in_use()):
        load_op(op, say)


def load_op(op: Op, say: Say) -> None:
    """Load an op, after compiling it if necessary.

    Only one process on a host compiles at a time. Raise `ConfigError` if compiling or loading
    fails.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.builder import CUDAMismatchException, MissingCUDAException

    cache_cpu_info()
    accelerator: Any = get_accelerator()
    builder, place = accelerator.create_op_builder(op.builder), op_cache.find_op_folder(op.parts)
    os.environ[op_cache.EXTENSIONS_DIR_VARIABLE] = str(place)
    os.environ["PATH"] = _path_with_env_first()
    # An op is compiled for the GPUs that were present at that time. ninja checks whether it suits
    # the current GPUs.
    again = (
        op.cuda
        and torch_builds.gpus_in_use()
        and all(op_cache.can_compile_in(place, part) for part in op.parts)
    )
    try:
        if again or not all(op_cache.is_loadable(place, part) for part in op.parts):
            with ExitStack() as held:
                for part in op.parts:
                    held.enter_context(op_cache.lock_op_folder(place, part, say))
                # A different process may have compiled the op in the meantime.
                if again or not all(op_cache.is_compiled(place, part) for part in op.parts):
                    _compile_and_load(op, builder, place, say)
                    return
        _load_compiled(op, builder, place)
    except ConfigError:
        raise
    except (
        RuntimeError,
        OSError,
        ImportError,
        TypeError,
        ValueError,
        AssertionError,
        subprocess.SubprocessError,
    ) as error:
        raise _load_failure(op, error) from None
    except (MissingCUDAException, CUDAMismatchException) as error:  # not subclasses of RuntimeError
        raise _load_failure(op, error) from None


def _load_failure(op: Op, error: Exception) -> ConfigError:
    rule = f"cannot be compiled or loaded ({type(error).__name__}): {_first_error(str(error))}"
    return config_error(
        f"DeepSpeed's {op.title}",
        rule,
        "install the missing packages. `ds_report` lists the requirements of each op",
    )


def _compile_and_load(op: Op, builder: "OpBuilder", place: Path, say: Say) -> None:
    """Let DeepSpeed compile an op's missing or outdated parts, and load the op.

    The caller must own the folders' locks.
    """
    missing = not all((place / part / f"{part}.so").exists() for part in op.parts)
    begun = time.perf_counter()
    if missing:
        say(f"compiling DeepSpeed's {op.title} (once, about {op.typical_time} on two cores) ...")
    builder.load(verbose=False)
    for part in op.parts:
        op_cache.mark_compiled(place, part)
    if missing:
        say(f"compiled in {time.perf_counter() - begun:.0f} s")


def _load_compiled(op: Op, builder: "OpBuilder", place: Path) -> None:
    """Load a compiled op without torch's lock and without reading the op's sources.

    In a different user's folder, neither is permitted. DeepSpeed 0.19.8 loads an op once and stores
    it in `_loaded_ops`. pin_memory must be loaded globally before async_io, which the `load` method
    of its builder does.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder

    for part in op.parts:
        if part not in OpBuilder._loaded_ops:
            spec = importlib.util.spec_from_file_location(part, place / part / f"{part}.so")
            assert spec and spec.loader
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            keep_op(part, module)
        if part == "pin_memory":
            PinMemoryBuilder().load(verbose=False)
    builder.load(verbose=False)
