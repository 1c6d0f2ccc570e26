"""Files next to a recipe that Python would import instead of a library with the same name.

This module's top-level imports must be built-in or frozen modules, because no file can hide them.
"""

import os
import sys
from _imp import is_frozen

# Import names of the packages in requirements.txt and of the packages that they import. A test
# compares the names with the modules that a start imports.
LIBRARIES = frozenset(
    {
        *(
            "PIL",
            "accelerate",
            "aiohttp",
            "annotated_doc",
            "annotated_types",
            "anyio",
            "certifi",
            "charset_normalizer",
            "click",
            "cloudpickle",
        ),
        *(
            "contourpy",
            "cpuinfo",
            "cuda",
            "cycler",
            "datasets",
            "dateutil",
            "deepspeed",
            "dill",
            "distro",
            "einops",
            "filelock",
        ),
        *(
            "flash_attn",
            "fontTools",
            "fsspec",
            "functorch",
            "git",
            "google",
            "h11",
            "hf_xet",
            "hjson",
            "httpcore",
            "httpcore2",
            "httpx",
            "httpx2",
            "huggingface_hub",
        ),
        *(
            "idna",
            "jinja2",
            "kiwisolver",
            "markdown_it",
            "markupsafe",
            "matplotlib",
            "mdurl",
            "mpi4py",
            "mpl_toolkits",
            "mpmath",
        ),
        *(
            "msgpack",
            "multiprocess",
            "networkx",
            "ninja",
            "numpy",
            "nvidia",
            "opentelemetry",
            "packaging",
            "pandas",
            "peft",
        ),
        *(
            "platformdirs",
            "psutil",
            "pyarrow",
            "pydantic",
            "pydantic_core",
            "pygments",
            "pyparsing",
            "regex",
            "requests",
            "rich",
        ),
        *(
            "safetensors",
            "scipy",
            "sentencepiece",
            "sentry_sdk",
            "setuptools",
            "shellingham",
            "six",
            "sklearn",
            "sniffio",
            "sympy",
            "tiktoken",
            "tokenizers",
        ),
        *(
            "torch",
            "torchgen",
            "torchvision",
            "tqdm",
            "transformers",
            "triton",
            "truststore",
            "typer",
            "typing_extensions",
        ),
        *("typing_inspection", "urllib3", "wandb", "xxhash", "yaml"),
    }
)
# Standard-library modules that no start imports, so a file may have one of these names.
UNUSED = frozenset(
    {
        *(
            "aifc",
            "antigravity",
            "asynchat",
            "asyncore",
            "cgi",
            "cgitb",
            "chunk",
            "compileall",
            "crypt",
        ),
        *(
            "ensurepip",
            "ftplib",
            "idlelib",
            "imaplib",
            "imghdr",
            "imp",
            "lib2to3",
            "mailbox",
            "mailcap",
            "msilib",
        ),
        *(
            "nis",
            "nntplib",
            "ossaudiodev",
            "pipes",
            "poplib",
            "sched",
            "smtpd",
            "smtplib",
            "sndhdr",
            "spwd",
            "sunau",
        ),
        *(
            "tabnanny",
            "telnetlib",
            "this",
            "tkinter",
            "trace",
            "turtle",
            "turtledemo",
            "uu",
            "venv",
            "wave",
            "webbrowser",
        ),
        *("winreg", "winsound", "wsgiref", "xdrlib", "zipapp"),
    }
)
HIDEABLE = (sys.stdlib_module_names | LIBRARIES) - UNUSED - {*sys.builtin_module_names}


def shadows(folder: str) -> list[tuple[str, str, str]]:
    """Return a problem as (where, rule, fix) for each file or package that hides a library."""
    try:
        names = sorted(os.listdir(folder or "."))
    except OSError:  # an entry of sys.path that is not a folder
        return []
    where = os.path.relpath(folder or ".")
    return [
        (
            os.path.normpath(os.path.join(where, name)),
            f"hides {library}: Python searches this folder first",
            "rename it",
        )
        for name in names
        if (library := _module(os.path.join(folder, name))) in HIDEABLE and not is_frozen(library)
    ]


def refuse_shadows() -> None:
    """Exit with a config error if a folder that Python searches first hides a library.

    The check covers folders that precede the standard library in sys.path, except those in
    PYTHONPATH. A user who adds a folder with such a library to PYTHONPATH wants that library.
    Clusters do so, and so do developers with a clone of transformers.
    """
    standard = os.path.dirname(os.__file__)
    first = sys.path[: sys.path.index(standard)] if standard in sys.path else []
    wanted = {
        os.path.abspath(folder)
        for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if folder
    }
    looked_at = [
        folder
        for number, folder in enumerate(first)
        if (number == 0 and not sys.flags.safe_path) or os.path.abspath(folder) not in wanted
    ]
    found = [problem for folder in dict.fromkeys(looked_at) for problem in shadows(folder)]
    if not found:
        return

    # Printing the error imports modules that may be among the hidden libraries.
    del sys.path[: len(first)]
    for library in HIDEABLE & sys.modules.keys():
        if os.path.dirname(getattr(sys.modules[library], "__file__", None) or "") in first:
            del sys.modules[library]
    from .errors import ConfigError, Problem, exit_with_error

    exit_with_error(ConfigError([Problem(*problem) for problem in found]))


def _module(path: str) -> str:
    """Return the name under which Python imports a file or folder, or "" if it cannot."""
    name = os.path.basename(path)
    if name.endswith((".py", ".pyc")):
        return name.rpartition(".")[0]
    if name.endswith(".so"):  # torch.so or torch.cpython-311-x86_64-linux-gnu.so
        return name.partition(".")[0]
    return name if os.path.exists(os.path.join(path, "__init__.py")) else ""
