"""The files that a dataset flag names, their kind, and a fingerprint of their content."""

import hashlib
import os
import sysconfig
from glob import glob
from pathlib import Path

from .refusal import Problem, Refusal, refuse

KINDS = {
    ".txt": "text", ".md": "text", ".rst": "text", ".py": "text", ".yaml": "text",
    ".jsonl": "lines", ".ndjson": "lines", ".json": "lines",
    ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
ENDS = 64 * 1024  # bytes of each end of a file that its fingerprint covers


def local_files(dataset: str) -> list[Path] | None:
    """The files that the text names (path, folder, glob, several by comma), sorted; None if it must be a hub id or an address."""
    if "://" in dataset:
        return None
    parts = [dataset] if Path(dataset).expanduser().exists() else [part.strip() for part in dataset.split(",") if part.strip()]
    files: set[Path] = set()
    problems = []
    for part in parts:
        path = Path(part).expanduser()
        if path.is_dir():
            found = [file for file in path.rglob("*") if file.is_file() and suffix(file) in KINDS and not file.name.startswith((".", "_"))]
        elif path.exists():
            found = [path]
        else:
            found = [file for match in glob(str(path), recursive=True) if (file := Path(match)).is_file()]
        is_path = len(parts) > 1 or part.startswith((".", "/", "~")) or part.count("/") > 1 or any(c in part for c in "*?[") or suffix(path) in KINDS
        if not found and not is_path and not path.exists():
            return None
        if not found and path.is_dir():
            problems.append(Problem(f"--dataset {part}", f"holds no file of a known kind: {', '.join(KINDS)}", "convert its files to one of these"))
        elif not found:
            problems.append(Problem(f"--dataset {part}", "there is no such file", "check the path; a hub id is ORG/NAME"))
        files.update(found)
    if problems:
        raise Refusal(problems)
    return sorted(files)


def suffix(file: Path) -> str:
    return Path(file.name.removesuffix(".gz")).suffix.lower()


def kind_of(files: list[Path], dataset: str) -> str:
    """text, lines, parquet or arrow. Raises `Refusal` if the files are of several kinds, or of an unknown one."""
    kinds = {KINDS.get(suffix(file), "") for file in files}
    if "" in kinds:
        odd = next(file for file in files if suffix(file) not in KINDS)
        raise refuse(f"--dataset {odd}", "the ending does not say what is in it", f"rename it to one of {', '.join(KINDS)}")
    if len(kinds) > 1:
        raise refuse(f"--dataset {dataset}", f"holds files of several kinds: {', '.join(sorted(kinds))}", "name those of one kind, for example FOLDER/*.jsonl")
    return kinds.pop()


def standard_library(*without: str) -> list[Path]:
    """The Python sources of the running interpreter's standard library, sorted, but for folders and files named in `without`."""
    skipped = {"site-packages", "dist-packages", *without}
    files = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = [name for name in folders if name not in skipped]  # not walked into: site-packages may hold 100,000 files
        files += [Path(folder, name) for name in names if name.endswith(".py") and name not in skipped]
    return sorted(files)


def digests(files: list[Path]) -> dict[str, str]:
    """name below the common folder -> a hash of the file's size and its first and last 64 KB."""
    base = os.path.commonpath([file.parent for file in files])
    found = {}
    for file in files:
        size = file.stat().st_size
        digest = hashlib.blake2b(f"{size}\0".encode(), digest_size=8)
        with file.open("rb") as stream:
            digest.update(stream.read(ENDS))
            if size > ENDS:
                stream.seek(max(ENDS, size - ENDS))
                digest.update(stream.read())
        found[file.relative_to(base).as_posix()] = digest.hexdigest()
    return found


def fingerprint(of_files: dict[str, str], *more: str) -> str:
    """One hash of what `digests` returns and of what else makes the content."""
    return hashlib.blake2b(repr((sorted(of_files.items()), more)).encode(), digest_size=16).hexdigest()
