"""The files that a dataset flag names, their kind, their first row, and a fingerprint of their content."""

import codecs
import contextlib
import functools
import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Collection, Iterable
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

from ..refusal import Problem, Refusal, refuse
from ..tasks.facts import TASKS
from .chat_rows import TOOLS, form_of
from .folders import below, stamp
from .request import Request

KINDS = {
    ".txt": "text", ".md": "text", ".rst": "text", ".py": "text", ".yaml": "text",
    ".jsonl": "lines", ".ndjson": "lines", ".json": "lines",
    ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")  # of one kind, "pictures"
OTHER_KINDS = (".csv", ".tsv", ".xls", ".xlsx", ".xml", ".html", ".pdf", ".docx", ".zip", ".tar", ".tgz", ".bz2", ".xz", ".zst", ".db", ".pkl", ".npy")
ENDS = 64 * 1024  # bytes of each end of a file that its fingerprint covers
SAMPLED = 1024  # pictures of a folder whose bytes its fingerprint covers; of the others it covers name and size


def local_files(dataset: str, pictures: bool = False) -> list[Path] | None:
    """Finds the files that a dataset flag names (path, folder, glob, several by comma), sorted; None if it must be a hub id or an address.

    Of a folder with files of several kinds `pictures` says which are data: the pictures, or all others.
    """
    if "://" in dataset:
        return None
    parts = _parts(dataset)
    files: dict[Path, None] = {}  # in order, as each part has them: to sort what is sorted is fast
    problems = []
    for part in parts:
        path = Path(part).expanduser()
        if path.is_dir():
            found = _chosen(below(path), pictures)
        elif path.exists():
            found = [path]
        else:
            found = [file for match in glob(str(path), recursive=True) if (file := Path(match)).is_file()]
        is_path = len(parts) > 1 or part.startswith((".", "/", "~")) or part.count("/") > 1 or any(c in part for c in "*?[") or suffix(path) in KINDS
        if not found and not is_path and not path.exists():
            return None
        if not found and path.is_dir():
            known = f"{', '.join(KINDS)}{', or pictures in a folder for each class' if pictures else ''}"
            problems.append(Problem(f"--dataset {part}", f"holds no file of a known kind: {known}", "convert its files to one of these"))
        elif not found:
            problems.append(Problem(f"--dataset {part}", "there is no such file", "check the path; a hub id is ORG/NAME"))
        files.update(dict.fromkeys(found))
    if problems:
        raise Refusal(problems)
    return sorted(files)


def left_out(dataset: str) -> list[str]:
    """Says, in one line for each folder that a dataset flag names, which files are not read though they may hold data."""
    lines = []
    for part in _parts(dataset):
        names = sorted(file.name for file in below(Path(part).expanduser()) if suffix(file) in OTHER_KINDS)
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"--dataset {part}: {', '.join(names[:3])}{more} left out, as {', '.join(sorted({suffix(Path(name)) for name in names}))} is not read")
    return lines


def _parts(dataset: str) -> list[str]:
    return [dataset] if Path(dataset).expanduser().exists() else [part.strip() for part in dataset.split(",") if part.strip()]


@functools.lru_cache(maxsize=32)
def _chosen(files: tuple[Path, ...], pictures: bool) -> list[Path]:
    """Chooses the files of a known kind, without a README or LICENSE beside data of another kind."""
    found, shown = [file for file in files if suffix(file) in KINDS], [file for file in files if suffix(file) in PICTURES]
    if shown and (not found or (pictures and not {KINDS[suffix(file)] for file in found} & {"parquet", "arrow"})):
        return shown
    data = [file for file in found if KINDS[suffix(file)] != "text" or file.stem.upper() not in ("README", "LICENSE")]
    return found if all(KINDS[suffix(file)] == "text" for file in data) else data


def suffix(file: Path) -> str:
    return os.path.splitext(file.name.removesuffix(".gz"))[1].lower()


def kind_of(files: list[Path], dataset: str) -> str:
    """Names the kind of the files: text, lines, parquet, arrow or pictures. Raises `Refusal` if the files are of several kinds, or of an unknown one."""
    kinds = {KINDS.get(ending, "pictures" if ending in PICTURES else "") for ending in {suffix(file) for file in files}}
    if "" in kinds:
        odd = next(file for file in files if suffix(file) not in (*KINDS, *PICTURES))
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

    No row is looked at where bad rows are to be left out.
    """
    files = ("image" in request.names and local_files(dataset, pictures=True)) or files
    kind = kind_of(files, dataset)
    check_kind(kind, files, dataset, request)
    if request.skip or not files:
        return
    columns, place = request.columns, f"{files[0]}, row 1"
    try:
        if kind == "text":
            codecs.getincrementaldecoder("utf-8")().decode(_head(files[0]))
            return
        if kind == "pictures":
            names, values, place = list(columns), {columns[0]: files[0]}, str(files[0])
        elif kind == "lines":
            number, values = _first_of_lines(files[0])
            names, place = list(values), f"{files[0]}, row {number}"
        else:
            names, values = _first_of_table(files[0], kind, partial(columns_read, request.task, columns))
    except UnicodeDecodeError as error:
        raise refuse(place, *not_utf8(error)) from error
    except (OSError, ValueError, EOFError, NotImplementedError, zlib.error) as error:
        raise error if isinstance(error, Refusal) else unreadable(place, error) from error
    if names:
        if absent := absent_column(request.task, columns, names):
            raise refuse(place, *absent)
        if request.as_rows:
            _check_sample({name: values[column] for name, column in zip(request.names, columns, strict=True) if column in values}, place)
        elif request.chats and (form := form_of(names, columns[0])):
            if values:
                form.content(values, place, padded=kind != "lines")
        else:
            check_value(values.get(columns[0]), request.chats, place, tokens=kind != "lines")


def check_kind(kind: str, files: list[Path], dataset: str, request: Request) -> None:
    """Raises `Refusal` if the task cannot take files of this kind, or pictures that lie otherwise than in a folder for each class."""
    where = f"--dataset {dataset}"
    if kind == "text" and request.chats:
        raise no_chats(dataset)
    if kind == "text" and request.as_rows:
        raise no_table(dataset, request)
    if kind == "pictures" and request.names != ("image", "label"):
        fixing = [task for task, facts in TASKS.items() if facts.columns == ("image_field", "label_field")]
        raise refuse(where, f"holds pictures, which task {request.task} does not take", f"use --task {' or '.join(fixing)}, or give other data")
    if kind == "pictures":
        picture_classes(files, dataset)


def no_table(dataset: str, request: Request) -> Refusal:
    rule = f"is text, and task {request.task} needs rows with the columns {', '.join(request.columns)}"
    return refuse(f"--dataset {dataset}", rule, f"give Parquet, Arrow or JSON lines{', or pictures in a folder for each class' * ('image' in request.names)}")


def folder_classes(dataset: str) -> list[str]:
    """Lists the classes of a folder of pictures; none of other data, and of a folder that cannot be opened: who opens it says why."""
    with contextlib.suppress(Refusal):
        files = local_files(dataset, pictures=True) if dataset != "builtin" else None
        if files and kind_of(files, dataset) == "pictures":
            return picture_classes(files, dataset)
    return []


def picture_classes(files: list[Path], dataset: str) -> list[str]:
    """Lists the classes of pictures, which are the names of their folders, sorted.

    Raises `Refusal` unless every folder that `dataset` names holds nothing but a folder for each class.
    """
    folders = _folders_of(files)
    fix = "put the pictures into a folder for each class, FOLDER/CLASS/PICTURE.png, and name FOLDER"
    for root in (path for part in _parts(dataset) if (path := Path(part).expanduser()).is_dir()):
        inside = [folder for folder in folders if folder.is_relative_to(root)]
        if root in inside:
            raise refuse(f"--dataset {root}", "holds pictures that lie in no folder of a class", fix)
        if deep := [folder for folder in inside if folder.parent != root]:
            rule = f"its pictures lie deeper than a folder for each class: {deep[0].relative_to(root)}"
            raise refuse(f"--dataset {root}", rule, f"name the folder above the classes, for example {deep[0].parent}")
        children = {child for child in root.iterdir() if child.is_dir() and not child.name.startswith((".", "_"))}
        if empty := sorted(children.difference(inside)):
            raise refuse(f"--dataset {root}", f"the folder of the class {empty[0].name} holds no picture", "fill it, or delete it")
    classes = sorted({folder.name for folder in folders})
    if len(classes) == 1:
        raise refuse(f"--dataset {dataset}", f"all its pictures are of one class, {classes[0]}", fix)
    return classes


def _folders_of(files: list[Path]) -> list[Path]:
    return sorted(map(Path, {os.path.dirname(file) for file in files}))  # ten times as fast as file.parent


def _check_sample(row: dict[str, Any], place: str) -> None:
    """Raises `Refusal` for a picture that cannot be decoded and for a class that is no number."""
    from .pictures import class_number, opened  # which nothing but a sample needs

    for name, check in (("image", opened), ("label", class_number)):
        try:
            if name in row:
                check(row[name])
        except (TypeError, ValueError) as error:
            raise refuse(place, f"its {name} {error}", f"name another column with --{name}_field, mend the row, or {SKIP}") from error


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


def _first_of_table(file: Path, kind: str, wanted: Callable[[list[str]], tuple[str, ...]]) -> tuple[list[str], dict[str, Any]]:
    """Return the names of all columns, and the first value of each `wanted` column.

    There are no values if a wanted column is missing, or if there is no row.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with contextlib.ExitStack() as closing:
        if kind == "parquet":
            table = closing.enter_context(pq.ParquetFile(file))
            names = table.schema_arrow.names
            columns = wanted(names)
            batches = table.iter_batches(1, columns=list(columns), use_threads=False) if {*columns} <= {*names} else iter(())
        else:
            opened = closing.enter_context(pa.memory_map(str(file)))
            try:
                table = pa.ipc.open_stream(opened)
                batches = iter(table)
            except pa.ArrowInvalid:
                table = pa.ipc.open_file(opened)
                batches = map(table.get_batch, range(table.num_record_batches))
            names = table.schema.names
            columns = wanted(names)
        first = next((batch for batch in batches if {*columns} <= {*names} and batch.num_rows), None)
        return names, {} if first is None else {column: first.column(column)[0].as_py() for column in columns}


def no_chats(dataset: str) -> Refusal:
    return refuse(f"--dataset {dataset}", "task sft needs chats, these are text files", "give JSONL or Parquet with --messages_field")


def decoded(value: bytes, errors: str = "strict") -> str:
    """Decodes text of a file. Raises UnicodeDecodeError, which `not_utf8` puts into words."""
    return value.decode("utf-8", errors).removeprefix("\ufeff").replace("\r\n", "\n")


def not_utf8(error: UnicodeDecodeError) -> tuple[str, str]:
    """Says what is wrong with text of another encoding: rule and fix of a refusal."""
    if error.object[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "is UTF-16, not UTF-8", f"convert the file (iconv -f utf-16 -t utf-8), or {SKIP}"
    rule = f"is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}"
    return rule, f"convert the file (iconv -f latin1 -t utf-8), or {SKIP}"


def row_of(line: bytes, place: str) -> dict[str, Any]:
    """Parses a line of JSON. Raises `Refusal` if it is no object."""
    try:
        text = decoded(line)
    except UnicodeDecodeError as error:
        raise refuse(place, *not_utf8(error)) from error
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


def columns_read(task: str, columns: tuple[str, ...], names: Collection[str]) -> tuple[str, ...]:
    """List the columns that a task reads of rows with columns of these names: chats have several forms, and pairs may have tools."""
    if TASKS[task].pairs and TOOLS in names and TOOLS not in columns:
        return (*columns, TOOLS)
    form = form_of(names, columns[0]) if TASKS[task].chats else None
    return tuple(form.present(names)) if form else columns


def absent_column(task: str, columns: tuple[str, ...], names: Iterable[str]) -> tuple[str, str] | None:
    """Finds a column of the task that is not among `names`: rule and fix of a refusal; None if all are there."""
    facts, names = TASKS[task], list(names)
    if facts.chats and form_of(names, columns[0]):
        return None
    for flag, column in zip(facts.columns[len(facts.columns) - len(columns) :], columns, strict=True):
        if column not in names:
            without = f", or --{flag} '' where both answers begin with it" if flag == facts.optional else ""
            fix = f"name the column with --{flag}{without}; a single odd row: mend it, or {SKIP}"
            if "text_field" in facts.columns and (form := form_of(names)):
                fix = f"use --task sft, which reads such rows ({form.name}), or name a column of text with --{flag}"
            return f"has no column {column!r}, only {', '.join(map(repr, names))}", fix
    return None


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


def digests_of_classes(files: list[Path]) -> dict[str, str]:
    """Hashes the pictures of each class: class -> a hash of their names and sizes, and of the ends of up to `SAMPLED` in all.

    In a process they are hashed again only if files came, went or were renamed in their folders.
    """
    return dict(_digests_of_classes(tuple(files), tuple(map(stamp, _folders_of(files)))))


@functools.lru_cache(maxsize=32)
def _digests_of_classes(files: tuple[Path, ...], stamps: tuple[tuple[int, int, int], ...]) -> dict[str, str]:
    every = -(-len(files) // SAMPLED)
    found: dict[str, Any] = {}
    for number, file in enumerate(files):
        digest = found.setdefault(file.parent.name, hashlib.blake2b(digest_size=8))
        ends = digests([file])[file.name] if number % every == 0 else ""
        digest.update(f"{file.name}\0{file.stat().st_size}\0{ends}\0".encode("utf-8", "surrogateescape"))
    return {name: digest.hexdigest() for name, digest in found.items()}


def fingerprint(of_files: dict[str, str], *more: str) -> str:
    """Makes one hash of the files' digests and of `more`, what else decides the content."""
    return hashlib.blake2b(repr((sorted(of_files.items()), more)).encode(), digest_size=16).hexdigest()
