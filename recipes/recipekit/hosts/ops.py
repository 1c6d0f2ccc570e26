"""Finds the C++ ops of DeepSpeed that a run needs, what this host lacks to compile them, and loads
them.

Only loading imports torch.
"""

import ctypes
import functools
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
from typing import Any, NamedTuple

from ..dslint.schema import at
from ..spec.refusal import Problem, Refusal, Say, refuse
from . import op_cache, torch_builds

LIBAIO = "install libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora)"


class Op(NamedTuple):
    """Describes an op: `builder` is DeepSpeed's name, `parts` are the folders in which it is
    compiled, each after the parts it needs.
    """

    builder: str
    title: str
    typical: str  # time that a compile takes on two cores
    parts: tuple[str, ...]
    cuda: bool = False  # compiled against CUDA where torch is (a CUDAOpBuilder of DeepSpeed 0.19.8)


LIBAIO_NAMES = ("libaio.so.1", "libaio.so.1t64")  # the latter since Debian 13 and Ubuntu 24.04
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


def needed(config: dict[str, Any], cuda: bool) -> list[Op]:
    """Lists the ops that a run with this JSON loads, on GPUs or on a CPU (DeepSpeed 0.19.8:
    engine.py, _configure_basic_optimizer).
    """
    homes = [
        at(config, f"zero_optimization.{block}.device", "none")
        for block in ("offload_optimizer", "offload_param")
    ]
    offloaded, kind = homes[0] != "none", str(at(config, "optimizer.type", "AdamW")).lower()
    names = []
    if kind in ("adam", "adamw") and not at(config, "optimizer.params.torch_adam", False):
        names.append("cpu_adam" if offloaded else "fused_adam")
    elif kind == "muon" and offloaded:  # without offload muon needs no op
        names.append("cpu_adam")
    elif kind in ("adagrad", "lion") and offloaded:  # elsewhere they are ours
        names.append(f"cpu_{kind}")
    if "nvme" in homes:
        names.append("async_io")
    if cuda:
        names += ["gds"] if at(config, "aio.use_gds") else []
        names += (
            ["quantizer"]
            if any(
                at(config, f"zero_optimization.zero_quantized_{what}")
                for what in ("weights", "nontrainable_weights", "gradients")
            )
            else []
        )
        names += ["deepcompile"] if at(config, "compile.deepcompile") else []
    return [OPS[name] for name in names]


# What a host lacks


def check_ops(config: dict[str, Any]) -> list[Problem]:
    """Finds what keeps a run with this JSON from loading its ops on this host, one problem for each
    cause.
    """
    gpus = torch_builds.gpus_in_use()
    return check(needed(config, gpus), torch_builds.installed("cuda") if gpus else None)


def check(ops: list[Op], cuda: str | None) -> list[Problem]:
    """Finds what keeps `ops` from being loaded.

    `cuda` is the version that torch was built with, None on a CPU.
    """
    missing = [op for op in ops if not _usable(op)]
    problems = []
    if any("pin_memory" in op.parts for op in ops if op not in missing) and not any(
        map(_loads, LIBAIO_NAMES)
    ):
        problems.append(
            Problem(
                "libaio",
                "async_io, which NVMe offload requires, cannot be loaded without it",
                "install libaio1 or libaio1t64 (Debian, Ubuntu), or libaio (Fedora)",
            )
        )
    if missing:
        problems += op_cache.check(op_cache.folder(missing[0].parts))
        problems += check_tools(missing, cuda)
    return problems


def _usable(op: Op) -> bool:
    place = op_cache.folder(op.parts)
    return all(op_cache.usable(place, part) for part in op.parts)


def check_tools(ops: list[Op], cuda: str | None) -> list[Problem]:
    """Finds the tools that are missing to compile `ops`."""
    what, problems = f"to compile {', '.join(op.title for op in ops)}", []
    compiler, c_compiler = _compilers()
    found = [name for name in dict.fromkeys((compiler[0], c_compiler[0])) if not shutil.which(name)]
    if found:
        problems.append(
            Problem(
                f"compiler {' and '.join(found)}",
                f"not found {what}",
                "install one (Debian, Ubuntu: apt-get install g++), or set CXX and CC",
            )
        )
    if not shutil.which("ninja", path=_path()):
        problems.append(
            Problem(
                "ninja", f"not found {what}", f"{sys.executable} -m pip install -r requirements.txt"
            )
        )
    problems += _check_headers(what)
    if (
        any("async_io" in op.parts or "gds" in op.parts for op in ops)
        and not found
        and (why := _link(compiler, "io_setup(1, 0)", "libaio.h", ["-laio"]))
    ):
        problems.append(
            Problem(
                "libaio",
                f"async_io, which NVMe offload requires, cannot be compiled without it ({why})",
                LIBAIO,
            )
        )
    if cuda and (compiled_against := [op for op in ops if op.cuda]):
        problems += check_cuda(compiled_against, cuda, cuda_home(), [] if found else compiler)
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
    """Finds what torch.compile lacks on this host: on a GPU it makes kernels with Triton and a C
    compiler, on a CPU with g++ (or CC, CXX).
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


def check_cuda(ops: list[Op], cuda: str, home: Path | None, compiler: list[str]) -> list[Problem]:
    """Finds what is wrong with the CUDA toolkit in `home`, for a torch that was built with CUDA
    `cuda`.

    DeepSpeed 0.19.8 runs nvcc for each of these ops, be it only to ask for its version (builder.py,
    nvcc_args), and links async_io with the toolkit's libcudart and the driver's libcuda
    (async_io.py); without a toolkit DeepSpeed ends in a TypeError or MissingCUDAException.
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
                f"has no bin/nvcc that runs, to compile {what} ({_short(error)})",
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
        and (why := _link(compiler, "0", "stddef.h", linked))
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


def cuda_home(standard: Path = Path("/usr/local/cuda")) -> Path | None:
    """Finds the CUDA toolkit where torch 2.13 looks for it (cpp_extension.py, _find_cuda_home)."""
    if told := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return Path(told)
    if nvcc := shutil.which("nvcc"):
        return Path(nvcc).parents[1]
    return standard if standard.exists() else None


def _compilers() -> tuple[list[str], list[str]]:
    """Returns the commands of the C++ compiler (torch compiles with it) and of the C compiler
    (DeepSpeed looks for libaio with it).
    """
    return shlex.split(os.environ.get("CXX") or "c++"), shlex.split(
        os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    )


def _path() -> str:
    """Returns PATH with this environment's programs first: a different ninja would compile every op
    again.
    """
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _link(compiler: list[str], expression: str, header: str, flags: list[str]) -> str:
    """Says why a program with `expression` cannot be compiled and linked with `flags`; "" if it
    can.
    """
    program = f"#include <{header}>\nint main() {{ return (long)({expression}) != 0; }}"
    command = [*compiler, "-x", "c++", "-", "-o", os.devnull, *flags]
    done = subprocess.run(
        command, input=program, capture_output=True, text=True, timeout=60, check=False
    )
    return _first_error(done.stderr) if done.returncode else ""


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _first_error(text: str) -> str:
    """Returns the first line of a compiler's or an exception's text that names an error, else the
    last line.
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


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# Loading


def prepare_ops(config: dict[str, Any], say: Say) -> None:
    """Loads the ops that a run with this JSON needs, compiling those that are missing.

    Raises `Refusal` with what is missing to compile them.
    """
    if problems := check_ops(config):
        raise Refusal(problems)
    for op in needed(config, torch_builds.gpus_in_use()):
        load_op(op, say)


def load_op(op: Op, say: Say) -> None:
    """Loads an op, and compiles a missing one first; one process of a host at a time.

    Raises `Refusal` if that cannot be done.
    """
    import cpuinfo
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.builder import CUDAMismatchException, MissingCUDAException

    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        # The call takes a second, and DeepSpeed 0.19.8 makes it twice for each of these ops and
        # once for each CPU Adam.
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    accelerator: Any = get_accelerator()
    builder, place = accelerator.create_op_builder(op.builder), op_cache.folder(op.parts)
    os.environ[op_cache.VARIABLE] = str(place)
    os.environ["PATH"] = _path()
    # an op is compiled for the GPUs of that time: ninja knows whether it fits those of now
    again = (
        op.cuda
        and torch_builds.gpus_in_use()
        and all(op_cache.ours(place, part) for part in op.parts)
    )
    try:
        if again or not all(op_cache.usable(place, part) for part in op.parts):
            with ExitStack() as held:
                for part in op.parts:
                    held.enter_context(op_cache.held(place, part, say))
                # another process may have compiled the op meanwhile
                if again or not all(op_cache.ready(place, part) for part in op.parts):
                    _compile(op, builder, place, say)
                    return
        _load_compiled(op, builder, place)
    except Refusal:
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
        raise _cannot(op, error) from None
    except (MissingCUDAException, CUDAMismatchException) as error:  # plain Exceptions
        raise _cannot(op, error) from None


def _cannot(op: Op, error: Exception) -> Refusal:
    rule = f"cannot be compiled or loaded ({type(error).__name__}): {_first_error(str(error))}"
    return refuse(
        f"DeepSpeed's {op.title}",
        rule,
        "install the missing packages. `ds_report` lists the requirements of each op",
    )


def _compile(op: Op, builder: Any, place: Path, say: Say) -> None:
    """Lets DeepSpeed compile what is missing or out of date, and load it; the caller holds the
    folders.
    """
    missing = not all((place / part / f"{part}.so").exists() for part in op.parts)
    begun = time.perf_counter()
    if missing:
        say(f"compiling DeepSpeed's {op.title} (once, about {op.typical} on two cores) ...")
    builder.load(verbose=False)
    for part in op.parts:
        op_cache.mark(place, part)
    if missing:
        say(f"compiled in {time.perf_counter() - begun:.0f} s")


def _load_compiled(op: Op, builder: Any, place: Path) -> None:
    """Loads a compiled op without torch's lock and look at its sources, which another user's folder
    does not allow.

    DeepSpeed 0.19.8 loads an op once and keeps it in `_loaded_ops`. pin_memory has to be global
    before async_io is loaded, which its builder's `load` does.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder

    for part in op.parts:
        if part not in OpBuilder._loaded_ops:
            spec = importlib.util.spec_from_file_location(part, place / part / f"{part}.so")
            assert spec and spec.loader
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            OpBuilder._loaded_ops[part] = module
        if part == "pin_memory":
            PinMemoryBuilder().load(verbose=False)
    builder.load(verbose=False)
