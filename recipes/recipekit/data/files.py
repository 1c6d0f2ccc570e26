"""The files that a dataset flag names, their kind, their first row, and a fingerprint of their content."""

import codecs
import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from glob import glob
from pathlib import Path
from typing import Any

from ..refusal import Problem, Refusal, refuse
from .request import Request

KINDS = {
    ".txt": "text", ".md": "text", ".rst": "text", ".py": "text", ".yaml": "text",
    ".jsonl": "lines", ".ndjson": "lines", ".json": "lines",
    ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
OTHER_KINDS = (".csv", ".tsv", ".xls", ".xlsx", ".xml", ".html", ".pdf", ".docx", ".zip", ".tar", ".tgz", ".bz2", ".xz", ".zst", ".db", ".pkl", ".npy")
ENDS = 64 * 1024  # bytes of each end of a file that its fingerprint covers


def local_files(dataset: str) -> list[Path] | None:
    """Finds the files that a dataset flag names (path, folder, glob, several by comma), sorted; None if it must be a hub id or an address."""
    if "://" in dataset:
        return None
    parts = [dataset] if Path(dataset).expanduser().exists() else [part.strip() for part in dataset.split(",") if part.strip()]
    files: set[Path] = set()
    problems = []
    for part in parts:
        path = Path(part).expanduser()
        if path.is_dir():
            found = _chosen(_below(path))
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


def left_out(dataset: str) -> list[str]:
    """Says, in one line for each folder that a dataset flag names, which files are not read though they may hold data."""
    parts = [dataset] if Path(dataset).expanduser().exists() else [part.strip() for part in dataset.split(",") if part.strip()]
    lines = []
    for part in parts:
        names = sorted(file.name for file in _below(Path(part).expanduser()) if suffix(file) in OTHER_KINDS)
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"--dataset {part}: {', '.join(names[:3])}{more} left out, as {', '.join(sorted({suffix(Path(name)) for name in names}))} is not read")
    return lines


def _below(folder: Path) -> list[Path]:
    """Lists the files of a folder and of those below it, without hidden ones; empty if `folder` is none."""
    return [file for file in folder.rglob("*") if file.is_file() and not file.name.startswith((".", "_"))] if folder.is_dir() else []


def _chosen(files: list[Path]) -> list[Path]:
    """Chooses the files of a known kind, without a README or LICENSE beside data of another kind."""
    found = [file for file in files if suffix(file) in KINDS]
    data = [file for file in found if KINDS[suffix(file)] != "text" or file.stem.upper() not in ("README", "LICENSE")]
    return found if all(KINDS[suffix(file)] == "text" for file in data) else data


def suffix(file: Path) -> str:
    return Path(file.name.removesuffix(".gz")).suffix.lower()


def kind_of(files: list[Path], dataset: str) -> str:
    """Names the kind of the files: text, lines, parquet or arrow. Raises `Refusal` if the files are of several kinds, or of an unknown one."""
    kinds = {KINDS.get(suffix(file), "") for file in files}
    if "" in kinds:
        odd = next(file for file in files if suffix(file) not in KINDS)
        fix = f"convert it to one of {', '.join(KINDS)}"
        if suffix(odd) not in OTHER_KINDS:
            raise refuse(f"--dataset {odd}", "the ending does not say what is in it", f"{fix}, or rename it if it is one")
        raise refuse(f"--dataset {odd}", f"{suffix(odd)} is not read", fix)
    if len(kinds) > 1:
        raise refuse(f"--dataset {dataset}", f"holds files of several kinds: {', '.join(sorted(kinds))}", "name those of one kind, for example FOLDER/*.jsonl")
    return kinds.pop()


# The first row -----------------------------------------------------------------------------------------------------

FIRST_BYTES = 1 << 20  # of a file that are looked at before a run: a longer row is judged by its beginning
SKIP = "leave it out (--bad_rows skip)"


def check_first_row(files: list[Path], dataset: str, request: Request) -> None:
    """Raises `Refusal` for local files whose first row the task cannot read.

    Nothing is looked at where bad rows are to be left out.
    """
    kind = kind_of(files, dataset)
    if kind == "text" and request.chats:
        raise no_chats(dataset)
    if request.skip or not files:
        return
    column, place = request.column, f"{files[0]}, row 1"
    try:
        if kind == "text":
            codecs.getincrementaldecoder("utf-8")().decode(_head(files[0]))
            return
        if kind == "lines":
            number, row = _first_of_lines(files[0])
            names, value, place = list(row), row.get(column), f"{files[0]}, row {number}"
        else:
            names, value = _first_of_table(files[0], kind, column)
    except UnicodeDecodeError as error:
        raise not_utf8(place, error) from error
    except (OSError, ValueError, EOFError, NotImplementedError, zlib.error) as error:
        raise error if isinstance(error, Refusal) else unreadable(place, error) from error
    if names:
        check_columns((column,), names, place)
        check_value(value, request.chats, place, tokens=kind != "lines")


def _head(file: Path) -> bytes:
    with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as stream:
        return stream.read(FIRST_BYTES)


def _first_of_lines(file: Path) -> tuple[int, dict[str, Any]]:
    """Reads the first row that is not blank: (number, content). The content is empty if the row is longer than `FIRST_BYTES`."""
    head = _head(file)
    if not head:
        raise refuse(str(file), "is empty", f"fetch it again, or {SKIP}")
    lines = head.split(b"\n")
    if len(head) == FIRST_BYTES:
        lines.pop()  # it goes on
    return next(((number, row_of(line, f"{file}, row {number}")) for number, line in enumerate(lines, 1) if line.strip()), (1, {}))


def _first_of_table(file: Path, kind: str, column: str) -> tuple[list[str], Any]:
    """Reads the names of the columns, and the first value of one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with ExitStack() as closing:
        if kind == "parquet":
            table = closing.enter_context(pq.ParquetFile(file))
            names = table.schema_arrow.names
            batches = table.iter_batches(1, columns=[column], use_threads=False) if column in names else iter(())
        else:
            opened = closing.enter_context(pa.memory_map(str(file)))
            try:
                table = pa.ipc.open_stream(opened)
                batches = iter(table)
            except pa.ArrowInvalid:
                table = pa.ipc.open_file(opened)
                batches = map(table.get_batch, range(table.num_record_batches))
            names = table.schema.names
        first = next((batch for batch in batches if column in names and batch.num_rows), None)
        return names, None if first is None else first.column(column)[0].as_py()


def no_chats(dataset: str) -> Refusal:
    return refuse(f"--dataset {dataset}", "task sft needs chats, these are text files", "give JSONL or Parquet with --messages_field")


def decoded(value: bytes, place: str, errors: str = "strict") -> str:
    try:
        return value.decode("utf-8", errors).removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise not_utf8(place, error) from error


def not_utf8(place: str, error: UnicodeDecodeError) -> Refusal:
    if error.object[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return refuse(place, "is UTF-16, not UTF-8", f"convert the file (iconv -f utf-16 -t utf-8), or {SKIP}")
    rule = f"is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}"
    return refuse(place, rule, f"convert the file (iconv -f latin1 -t utf-8), or {SKIP}")


def row_of(line: bytes, place: str) -> dict[str, Any]:
    """Parses a line of JSON. Raises `Refusal` if it is no object."""
    text = decoded(line, place)
    try:
        row = json.loads(text)
        if "\\ud" in text.lower():  # half of a surrogate pair is legal JSON but cannot be encoded
            row = json.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:  # ValueError of its own for a number of more than 4300 digits
        what = "is not JSON" if isinstance(error, json.JSONDecodeError) else "cannot be read as JSON"
        raise refuse(place, f"{what}: {error}", f"write one JSON object per line, or {SKIP}") from error
    if not isinstance(row, dict):
        raise refuse(place, f"is not a JSON object but a {type(row).__name__}", f"write one JSON object per line, or {SKIP}")
    return row


def check_columns(columns: tuple[str, ...], names: Iterable[str], place: str) -> None:
    """Raises `Refusal` if a column is not among `names`."""
    for column in columns:
        if column not in names:
            fix = f"name the column with --text_field (task sft: --messages_field); a single odd row: mend it, or {SKIP}"
            raise refuse(place, f"has no column {column!r}, only {', '.join(map(repr, names))}", fix)


def check_value(value: Any, chats: bool, place: str, tokens: bool = False) -> None:
    """Raises `Refusal` for a value that is no text or, where `chats` are wanted, no list of messages. With `tokens` it may be ready tokens."""
    if not chats and isinstance(value, list) and value and all(type(token) is int for token in value):
        if tokens:
            return
        rule = "holds token ids, which are read from Parquet and Arrow files only"
        raise refuse(place, rule, "make such a file: datasets.load_dataset('json', data_files=FILE, split='train').to_parquet('tokens.parquet')")
    if value is not None and not isinstance(value, list if chats else str):
        expected = "a list of messages (--messages_field)" if chats else "text (--text_field)"
        rule = f"holds {type(value).__name__} {str(value)[:40]!r} where {expected} should be"
        raise refuse(place, rule, f"name another column, mend the row, or {SKIP}")


def unreadable(place: str, error: Exception) -> Refusal:
    return refuse(place, f"cannot be read: {(str(error).strip() or type(error).__name__).splitlines()[0]}", "replace the file, or leave it out")


def standard_library(*without: str) -> list[Path]:
    """Lists the Python sources of the running interpreter's standard library, sorted, but for folders and files named in `without`."""
    skipped = {"site-packages", "dist-packages", *without}
    files = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = [name for name in folders if name not in skipped]  # not walked into: site-packages may hold 100,000 files
        files += [Path(folder, name) for name in names if name.endswith(".py") and name not in skipped]
    return sorted(files)


def digests(files: list[Path]) -> dict[str, str]:
    """Hashes each file: name below the common folder -> a hash of the file's size and its first and last 64 KB."""
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
    """Makes one hash of the files' digests and of `more`, what else decides the content."""
    return hashlib.blake2b(repr((sorted(of_files.items()), more)).encode(), digest_size=16).hexdigest()
