"""The stacks of this process's threads, read by another thread while the main thread is blocked.

A thread that is blocked in C++ has released the interpreter, so its Python frames can be read. The
module that a thread computes is found in the frames of torch.nn, without importing torch.
"""

import linecache
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

# A thread whose innermost frame is in one of these files waits for other ranks.
COLLECTIVES = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/deepspeed/comm/",
    "/deepspeed/runtime/pipe/p2p.py",
)
# Frames between a caller and C++, which are skipped.
WRAPPERS = ("/torch/_ops.py", "/torch/utils/_contextlib.py")
AUTOGRAD = "/torch/autograd/graph.py"  # the backward pass runs in C++ below this file
# Work that may take long, and that no boundary can announce: end of a file's path, name of a
# function or "", and the reason to print.
LONG_WORK = (
    ("/torch/_dynamo/convert_frame.py", "", "compiles"),
    ("/torch/_inductor/graph.py", "", "compiles"),
    ("/torch/_inductor/codecache.py", "", "compiles"),
    ("/torch/_inductor/async_compile.py", "", "compiles"),
    ("/triton/compiler/compiler.py", "", "compiles"),
    ("/torch/utils/cpp_extension.py", "", "compiles"),
    ("/recipekit/data/remote.py", "__call__", "waits for a server (--retry_s)"),
)
STANDARD_LIBRARY = str(Path(threading.__file__).parent)


@dataclass(frozen=True)
class Place:
    """The module of the model that a thread computes ("" if unknown), and its line of code."""

    module: str
    line: str  # "file.py:12 in function"
    in_collective: bool  # waits in torch.distributed, as far as the frames show
    in_backward: bool  # C++ computes the backward pass, or waits there

    def __str__(self) -> str:
        return f"{self.module} ({self.line})" if self.module else self.line


def thread_frames() -> dict[int, tuple[str, FrameType]]:
    """Return the name and the innermost frame of every thread of this process, by its id."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    return {ident: (names.get(ident, "unknown"), frame) for ident, frame in frames.items()}


def describe_threads() -> str:
    """Return the stacks of all threads, each with its innermost frame first."""
    lines = []
    for ident, (name, frame) in thread_frames().items():
        lines.append(f"Thread {ident:#x} {name} (most recent call first):")
        lines += [
            f'  File "{each.f_code.co_filename}", line {each.f_lineno} in {each.f_code.co_name}'
            for each in callers(frame)
        ]
        lines.append("")
    return "\n".join(lines)


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def long_work() -> str:
    """Return which long work a thread of this process does, or ""."""
    for _, frame in thread_frames().values():
        for each in callers(frame):
            for end, function, reason in LONG_WORK:
                code = each.f_code
                if code.co_filename.endswith(end) and function in ("", code.co_name):
                    return reason
    return ""


def place_of_main_thread() -> Place:
    """Return where the main thread of this process is."""
    return place_of(thread_frames()[threading.main_thread().ident or 0][1])


def place_of_thread(name: str) -> Place | None:
    """Return where the thread with this name is, or None if there is no such thread."""
    found = (frame for other, frame in thread_frames().values() if other == name)
    return next(map(place_of, found), None)


def place_of(frame: FrameType) -> Place:
    """Return the place of the thread with this innermost frame."""
    files = [each for each in callers(frame) if not _path(each).endswith(WRAPPERS)] or [frame]
    inner = files[0]
    waiting = any(part in _path(inner) for part in COLLECTIVES) or _waits_for_work(inner)
    # A lock or a queue of the standard library is less telling than its caller.
    shown = next((each for each in files if not _is_standard(_path(each))), inner)
    return Place(
        module=module_of(frame),
        line=(
            f"{'/'.join(Path(_path(shown)).parts[-2:])}:{shown.f_lineno} in {shown.f_code.co_name}"
        ),
        in_collective=waiting,
        in_backward=_path(inner).endswith(AUTOGRAD),
    )


def _path(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _is_standard(path: str) -> bool:
    return path.startswith((STANDARD_LIBRARY, "<")) and "site-packages" not in path


def _waits_for_work(frame: FrameType) -> bool:
    """Return True for a line such as `work.wait()`, which waits in C++ for a collective."""
    line = linecache.getline(_path(frame), frame.f_lineno)
    return ".wait(" in line and not _is_standard(_path(frame))


def module_of(frame: FrameType) -> str:
    """Return the name of the innermost module of the model that a thread computes, or ""."""
    computed = [
        each.f_locals.get("self")
        for each in callers(frame)
        if _path(each).endswith("/torch/nn/modules/module.py")
    ]
    modules = [each for each in computed if each is not None and hasattr(each, "named_modules")]
    if not modules:
        return ""
    found = (name for name, module in modules[-1].named_modules() if module is modules[0])
    name = next(found, "")
    while name.startswith("module."):  # the engine wraps the model
        name = name.removeprefix("module.")
    return name if name not in ("", "module") else type(modules[0]).__name__
