"""The Hugging Face Hub: its local cache, a reachability check and readable errors."""

import contextlib
import functools
import logging
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from .errors import ConfigError, Problem, config_error
from .paths import local_path

T = TypeVar("T")

# Number of connection attempts, made one second apart, and the timeout of each in seconds. If all
# attempts fail, the hub is considered unreachable.
HUB_ATTEMPTS, HUB_PATIENCE = 3, 5.0

# First bytes of a Git LFS pointer file, and its maximum size.
LFS_POINTER, MAX_POINTER_BYTES = b"version https://git-lfs.github.com/spec/v1", 1024


def check_lfs_pointer(file: Path, first_bytes: bytes) -> None:
    """Raise `ConfigError` if the first bytes of a file are a Git LFS pointer.

    A clone contains such a pointer instead of every file that was not fetched.
    """
    if first_bytes.startswith(LFS_POINTER):
        raise config_error(
            str(file), "is a Git LFS pointer, not the file itself", "fetch the file: git lfs pull"
        )


@functools.cache
def hub_is_unreachable(attempts: int = 0, patience: float = 0) -> bool:
    """Return True if a connection to the hub fails.

    The defaults are `HUB_ATTEMPTS` and `HUB_PATIENCE` seconds. Without this check, the hub's own
    client (huggingface_hub 2.4) needs a minute of retries per file to find out.
    """
    from urllib.request import getproxies  # a heavy import, which a dry run does not need

    from huggingface_hub import constants

    hub = urlsplit(constants.ENDPOINT)
    # Offline mode never connects. Behind a proxy, only the proxy can reach the hub.
    if constants.HF_HUB_OFFLINE or {hub.scheme, "all"} & getproxies().keys():
        return constants.HF_HUB_OFFLINE
    for attempt in range(attempts or HUB_ATTEMPTS):
        time.sleep(min(attempt, 1))
        with contextlib.suppress(OSError):
            socket.create_connection(
                (hub.hostname or "", hub.port or {"http": 80}.get(hub.scheme, 443)),
                patience or HUB_PATIENCE,
            ).close()
            return False
    return True


def shorten_retries() -> None:
    """Shorten huggingface_hub 2.4's retry log to one line per retry that names the hub.

    Without this filter, each retry prints two lines that do not name the program that prints them.
    """
    why = ""

    def shorten(record: logging.LogRecord) -> bool:
        nonlocal why
        text = record.getMessage()
        if " thrown while requesting " in text:
            why = text.partition(" thrown while requesting ")[0].strip("'\"")
            return False
        if found := re.fullmatch(r"(Rate limited)?.*?([\d.]+)s.*\[Retry (\d+)/(\d+)\]\.", text):
            reason = "asked too often" if found[1] else why or "it is busy"
            record.msg, record.args = (
                (
                    f"the hub does not answer ({reason}). huggingface_hub asks again in {found[2]}"
                    f" s, {found[3]} of {found[4]}"
                ),
                (),
            )
        return True

    logging.getLogger("huggingface_hub.utils._http").addFilter(shorten)


def hub_error(where: str, name: str, error: BaseException, kind: str = "") -> ConfigError:
    """Return a config error that explains why `name` cannot be read from the hub or a folder.

    `kind` is the prefix in the page's address, for example `datasets/`.
    """
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    page = f"https://huggingface.co/{kind}{name}"
    chain: list[BaseException] = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    text = " ".join(f"{error}".split("\n")[:2]).strip()
    names = {type(link).__name__ for link in chain}
    if Path(name).expanduser().exists() or not is_hub_id(name):
        exists = Path(name).expanduser().exists()
        return config_error(
            where,
            (
                text
                if exists
                else "the folder does not exist, and the name is not a hub id (ORG/NAME)"
            ),
            "check the path",
        )
    if any(isinstance(link, GatedRepoError) for link in chain) or "gated" in text:
        return config_error(
            where,
            "is gated, and this machine is not logged in with an account that may read it",
            f"ask for access at {page}, then run: hf auth login",
        )
    if (
        any(isinstance(link, RepositoryNotFoundError) for link in chain)
        or "DatasetNotFoundError" in names
    ):
        return config_error(
            where,
            f"does not exist at {page}, or is private or gated",
            "check the name. If it is right, run: hf auth login",
        )
    if names & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError"}:
        fix = (
            f"connect to the network and unset HF_HUB_OFFLINE, or give a local folder. If {page}"
            " asks for it, run: hf auth login"
        )
        return config_error(where, "is not in the local cache, and the hub cannot be reached", fix)
    return config_error(where, text, f"see {page}")


def ask_for_model(
    name: str,
    revision: str,
    fetch: Callable[[bool], T],
    is_away: Callable[[], bool] = hub_is_unreachable,
) -> T:
    """Return `fetch(local_files_only)`, which reads a model's files from the hub or its cache.

    Raise `ConfigError` if the files cannot be read. A real run and a dry run show the same
    messages.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where, page = f"model = {name}", f"https://huggingface.co/{name}"
    away = is_away()
    try:
        return fetch(away)
    except GatedRepoError:
        raise config_error(
            where,
            f"is gated: you must accept its licence at {page}",
            "then log in with: hf auth login",
        ) from None
    except RevisionNotFoundError:
        raise config_error(
            f"--model_revision {revision}",
            f"{page} does not have this branch, tag or commit",
            f"see {page}/commits/main",
        ) from None
    except RepositoryNotFoundError:
        rule = f"the folder does not exist, and {page} does not exist or is private"
        raise config_error(
            where, rule, "check the path or the name, or log in with: hf auth login"
        ) from None
    except HFValidationError:
        raise config_error(
            where,
            "the folder does not exist, and the name is not a hub id (ORG/NAME)",
            "check the path",
        ) from None
    except (LocalEntryNotFoundError, OSError) as error:
        why = (
            "the hub cannot be reached"
            if away
            else f"the hub did not send it ({type(error).__name__})"
        )
        at = f" at {revision}" if revision else ""
        rule = (
            f"the folder does not exist, the model is not in the cache {cache_folder()}{at}, and"
            f" {why}"
        )
        raise config_error(
            where, rule, f"check the path, or {not_cached(name, revision)}"
        ) from None


def published_config(name: str, revision: str) -> bytes | None:
    """Download only a model's config.json, or return None if the model has no such file.

    The cache does not change. Raise the same `ConfigError` as `ask_for_model`.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    def fetch(away: bool) -> bytes | None:
        if away:
            raise LocalEntryNotFoundError("config.json")
        with tempfile.TemporaryDirectory(prefix="config_") as folder:
            try:
                return Path(
                    hf_hub_download(
                        name, "config.json", revision=revision or None, local_dir=folder
                    )
                ).read_bytes()
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:
                return None

    return ask_for_model(name, revision, fetch, partial(hub_is_unreachable, 1, 2.0))


def is_hub_id(name: str) -> bool:
    return (
        not name.endswith("/")
        and not name.startswith((".", "/", "~"))
        and name.count("/") <= 1
        and " " not in name
    )


# The cache
# --------------------------------------------------------------------------------------------------

MODELS, DATASETS = "models", "datasets"  # kinds of repositories, spelled as in the cache


# Variables that name folders to which programs write. These programs do not expand ~ or $.
UNEXPANDED = (
    "XDG_CACHE_HOME",
    "TORCH_EXTENSIONS_DIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "WANDB_CACHE_DIR",
    "WANDB_DATA_DIR",
)


def check_variables(environment: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each cache variable with an unusable value.

    A value is unusable if it is empty, an address, or a path that the libraries do not expand.
    Libraries interpret an empty value as the current folder, and s3://bucket as a folder named s3:.
    """
    names = ["HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE"]
    names += ["XDG_CACHE_HOME"] if "HF_HOME" not in environment else []
    empty = [name for name in names if name in environment and not environment[name].strip()]
    rule = "must not be empty or blank: the cache would be in the current folder"
    problems = [
        Problem(f"{name} = {environment[name]!r}", rule, f"unset {name}, or name a folder")
        for name in empty
    ]
    for name in dict.fromkeys((*names, *UNEXPANDED)):
        if not (value := environment.get(name, "").strip()):
            continue
        where = f"{name} = {value}"
        try:
            path = str(local_path(where, value))
        except ConfigError as error:
            problems += error.problems
            continue
        if name in UNEXPANDED and value.startswith(("~", "$")):
            problems.append(
                Problem(
                    where,
                    "must be a path without ~ and $, because programs would create a folder with"
                    " that literal name",
                    f"set it to {path}",
                )
            )
    return problems


def cache_folder() -> Path:
    """Return the hub's cache folder, by the rule of huggingface_hub 2.4 (`constants.py`).

    The rule is repeated here so that a dry run does not have to import that package.
    """
    default_home = os.path.join(os.path.expanduser("~"), ".cache")
    home = os.environ.get(
        "HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", default_home), "huggingface")
    )
    home = os.path.expandvars(os.path.expanduser(home))
    cache = os.environ.get(
        "HF_HUB_CACHE", os.environ.get("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub"))
    )
    return Path(os.path.expandvars(os.path.expanduser(cache)))


def repository(name: str, kind: str = MODELS) -> Path:
    """Return a repository's folder in the cache, whether or not it exists."""
    return cache_folder() / f"{kind}--{name.replace('/', '--')}"


def snapshot_of(name: str, revision: str = "", kind: str = MODELS) -> Path | None:
    """Return a repository's cached files at a branch, tag or commit ("" for main).

    Return None if the files are not cached. The name of the returned folder is the commit. The
    snapshot may be incomplete, because a download can select individual files.
    """
    folder, revision = repository(name, kind), revision or "main"
    if not is_hub_id(name):
        return None
    try:
        commit = (folder / "refs" / revision).read_text().strip()
    except (OSError, ValueError):
        commit = revision
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def commit_of(name: str, revision: str = "", kind: str = MODELS) -> str | None:
    """Return the commit of a repository's cached files.

    Return None if the files are not cached or if `name` is a folder.
    """
    found = None if Path(name).is_dir() else snapshot_of(name, revision, kind)
    return found.name if found else None


def is_offline(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if the user has disabled the hub, by huggingface_hub 2.4's rule."""
    value = environment.get("HF_HUB_OFFLINE") or environment.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def not_cached(name: str, revision: str = "", kind: str = MODELS) -> str:
    """Return the end of a message that a repository is not cached.

    The text names the commits that are cached and the command that downloads the repository.
    """
    others = sorted(path.name for path in repository(name, kind).glob("snapshots/*"))
    of_kind = "--repo-type dataset " if kind == DATASETS else ""
    fix = f"download it on a machine with network access: hf download {of_kind}{name}" + (
        f" --revision {revision}" if revision else ""
    )
    flag = "--dataset_revision" if kind == DATASETS else "--model_revision"
    return f"{fix}, or use the cached commit with {flag} {others[-1]}" if others else fix
