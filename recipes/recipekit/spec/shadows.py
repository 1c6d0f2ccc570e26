"""Files beside a recipe that Python imports instead of a library of the same name.

At its top it imports only modules that no file can hide: built-in and frozen ones.
"""

import os
import sys
from _imp import is_frozen

# Import names of requirements.txt and of what these packages import; a test compares them with a
# start.
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
# Modules of the standard library that no start imports: a file may have their names.
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
    """Return where, rule and fix of a problem for each file or package of a folder that hides a
    library.
    """
    try:
        names = sorted(os.listdir(folder or "."))
    except OSError:  # an entry of sys.path that is no folder
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
    """End the program with a refusal if a folder that Python searches before the standard library
    hides a library.

    Folders that PYTHONPATH names are left out: who names the folder of a library there, wants it.
    So do clusters, and developers with a clone of transformers.
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

    # printing the refusal imports modules that may be among the hidden ones
    del sys.path[: len(first)]
    for library in HIDEABLE & sys.modules.keys():
        if os.path.dirname(getattr(sys.modules[library], "__file__", None) or "") in first:
            del sys.modules[library]
    from .refusal import Problem, Refusal, exit_refused

    exit_refused(Refusal([Problem(*problem) for problem in found]))


def _module(path: str) -> str:
    """Return the name under which Python imports a file or folder; "" if it does not."""
    name = os.path.basename(path)
    if name.endswith((".py", ".pyc")):
        return name.rpartition(".")[0]
    if name.endswith(".so"):  # torch.so or torch.cpython-311-x86_64-linux-gnu.so
        return name.partition(".")[0]
    return name if os.path.exists(os.path.join(path, "__init__.py")) else ""
