"""Count translated phrases and long sentences in pages, help texts, messages, docstrings and
comments.

    # one line a file: words, hits, hits per 1,000 words, long sentences
    python tests/support/prose.py
    # the same for these files
    python tests/support/prose.py FILE...
    # each hit and each long sentence with its line
    python tests/support/prose.py --show FILE...

The count reads Markdown outside code. In Python it reads docstrings, comments of five words or
more, and strings of five words or more that a user can read: none of recipes and tests.
"""

import argparse
import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

LONGEST = 28  # words per sentence
FEWEST = 5  # minimum words of a string or comment that counts as prose
FEWEST_OF_CELL = 3  # minimum words of a table cell that counts as prose
CODE = "\u25a1"  # replaces a code span, which counts as one word of a sentence
FIELD = "X"  # replaces a field of an f-string

# Phrases that sound like word-for-word translations. Each pattern is matched within one block of
# text.
ANYWHERE = (
    r"\b(told|tells?) (of|by|what|how|that|it|in|at|where)\b",
    r"\b(is|are) told\b",
    r"\b(that|those) of\b",
    r"\bof (which|whom)\b",
    r"(?-i:\b(Says|Tells|Knows|Names) (what|whether|why|how|which)\b)",
    r", too\b",
    r"\bbesides\b(?! (the|a|its|that|those)\b)",
    r"\b(is|are) to (be|come|go|have|take|read|learn)\b",
    r"\bso (many|much|few|long|wide|large|often)\b(?! that)",
    r"\b(is|are|has) (?-i:none)\b",
    r"\banew\b|\bbegun\b|\bin place of\b|\bbut for\b|\bfor want of\b|\bmend(s|ed)?\b",
    r"\bgo(es)? on\b",
    (
        r"\b(stands?|lies?|lie|lay)"
        r" (in|on|beside|there|above|below|around|behind|before|where|here|one)\b"
    ),
    r"\bof (ours|its own|their own|our own)\b",
)
NOT_IN_QUESTIONS = (
    r"\b(what|whatever) (a|an|the|it|they|is|are|was|has|this|each|one|other|its)\b",
)
IN_DOCSTRINGS = (r"(?-i:^(What|Which|Where|How|Whether) [a-z])",)

FOLDERS = ("recipes", "ds_configs", "launch", "tools", "tests")
NOT_READ = ("runs", "__pycache__", "node_modules")
ABBREVIATIONS = r"\b(e\.g|i\.e|vs|cf|etc|approx)\."
PAGE, STRING, DOCSTRING, COMMENT = "page", "string", "docstring", "comment"
DIRECTIVES = ("noqa", "!", "type:", "pyright:", "fmt:", "ruff:")  # comments for programs


@dataclass(frozen=True)
class Block:
    """A paragraph, a heading, a list item or a table cell, without its markup."""

    text: str
    lines: tuple[int, ...]  # line of each character
    kind: str


@dataclass(frozen=True)
class Hit:
    line: int
    phrase: str
    text: str


@dataclass(frozen=True)
class Count:
    """The prose of one file."""

    words: int
    hits: tuple[Hit, ...]
    long: tuple[Hit, ...]

    @property
    def rate(self) -> float:
        """Return the hits per 1,000 words."""
        return 1000 * len(self.hits) / self.words if self.words else 0.0


# Files


def root_of(path: Path) -> Path:
    """Return the repository of a file or folder; raise ValueError if there is no repository."""
    for folder in (path.resolve(), *path.resolve().parents):
        if (folder / "recipes" / "recipekit").is_dir():
            return folder
    raise ValueError(f"{path}: no folder above it has recipes/recipekit")


def pages(root: Path) -> list[Path]:
    """Return the Markdown files of a repository."""
    found = [
        *root.glob("*.md"),
        *(page for folder in FOLDERS for page in (root / folder).rglob("*.md")),
    ]
    return sorted(path for path in found if _is_read(path.relative_to(root)))


def programs(root: Path) -> list[Path]:
    """Return the Python files of a repository."""
    folders = (root / name for name in ("recipes", "launch", "tools", "tests"))
    found = [path for folder in folders for path in folder.rglob("*.py")]
    return sorted(path for path in found if _is_read(path.relative_to(root)))


def _is_read(path: Path) -> bool:
    return not any(part.startswith(".") or part in NOT_READ for part in path.parts)


def count_file(path: Path) -> Count:
    return count(blocks_of(path))


def blocks_of(path: Path) -> list[Block]:
    """Return the prose of a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return markdown(text)
    return [
        *(strings(text) if _has_messages(path) else []),
        *docstrings(text),
        *comments(text),
    ]


def _has_messages(path: Path) -> bool:
    """Return False for recipes and tests, because their strings are values and programs."""
    in_tests = path.name.startswith("test_") or "tests" in path.parts[-3:-1]
    return path.resolve().parent.name != "recipes" and not in_tests


def count(blocks: list[Block]) -> Count:
    words = sum(len(words_of(block.text)) for block in blocks)
    hits = [hit for block in blocks for hit in hits_of(block)]
    long = [hit for block in blocks for hit in long_sentences(block)]
    return Count(words, tuple(hits), tuple(long))


# Patterns and sentences


def words_of(text: str) -> list[str]:
    """Return the words of two or more letters, except code, names with digits, and fields."""
    return re.findall(r"(?<![\w/.-])(?:a|I|[A-Za-z][a-z'’-]*[a-z]|[A-Z]{2,})(?![\w/])", text)


def hits_of(block: Block) -> Iterator[Hit]:
    """Yield each translated phrase."""
    patterns = [*ANYWHERE, *NOT_IN_QUESTIONS, *(IN_DOCSTRINGS if block.kind == DOCSTRING else ())]
    for pattern in patterns:
        for found in re.finditer(pattern, block.text, re.IGNORECASE):
            if pattern in NOT_IN_QUESTIONS and _is_question(block.text, found.start()):
                continue
            near = block.text[max(0, found.start() - 40) : found.end() + 40]
            yield Hit(block.lines[found.start()], found[0], near.strip())


def _is_question(text: str, place: int) -> bool:
    end = re.search(r"[.!?](\s|$)", text[place:])
    return end is not None and end[0].startswith("?")


def long_sentences(block: Block) -> Iterator[Hit]:
    for start, sentence in sentences(block):
        length = length_of(sentence)
        if length > LONGEST:
            yield Hit(block.lines[start], f"{length} words", sentence)


def sentences(block: Block) -> Iterator[tuple[int, str]]:
    """Yield each sentence with its offset; in help texts and messages, a semicolon also ends a
    sentence.
    """
    text = re.sub(ABBREVIATIONS, lambda found: found[0][:-1] + "\0", block.text)
    ends = r"(?<!\.\.)[.!?][)\"”]*(?=\s|$)" + (r"|;(?=\s)" if block.kind == STRING else "")
    start = 0
    for end in [*(found.end() for found in re.finditer(ends, text)), len(text)]:
        sentence = text[start:end]
        if sentence.strip():
            place = start + len(sentence) - len(sentence.lstrip())
            yield place, " ".join(sentence.replace("\0", ".").split())
        start = end


def length_of(sentence: str) -> int:
    """Return the number of words; a plain list of four or more short items counts as one word."""
    item = r"[^\s,;:()]+(?: [^\s,;:()]+)?"
    text = re.sub(
        rf"(?<=[:(] ){item}(?:, {item}){{2,}}(?:,? (?:and|or) {item}|, {item}|, \.\.\.)",
        CODE,
        sentence,
    )
    text = re.sub(rf"{CODE}+(?:(?:,|,? and|,? or) {CODE}+){{2,}}", CODE, text)
    return len([word for word in text.split() if re.search(rf"\w|{CODE}", word)])


# Markdown

Marked = list[tuple[int, str]]  # lines of a block with their numbers
ITEM = r"\s*([-*+]|\d+[.)])\s+(?=\S)"  # start of a list item
SPAN = r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)"  # code within a line or paragraph

LINK = r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\](?:\(([^()\s]*(?:\([^()]*\))?)[^()]*\)|\[[^\]]*\])"


def markdown(text: str, kind: str = PAGE, first: int = 1) -> list[Block]:
    """Return the blocks of a Markdown text outside code; `first` is the number of the first
    line.
    """
    found: list[Block] = []
    open_block: Marked = []

    def close() -> None:
        if open_block:
            found.append(_plain(open_block, kind))
            open_block.clear()

    for number, line in enumerate(outside_code(text, kind), first):
        stripped = line.strip()
        if not stripped:
            close()
        elif item := re.match(ITEM, line):
            close()
            open_block.append((number, line[item.end() :]))
        elif stripped.startswith("|"):
            close()
            found += _cells(number, stripped, kind)
        elif stripped.startswith("#") or re.fullmatch(r"[-*_]{3,}", stripped):
            close()
            open_block.append((number, stripped.lstrip("#").rstrip("#-*_ ")))
            close()
        else:
            open_block.append((number, re.sub(r"^(> ?)+", "", stripped)))
    close()
    return [block for block in found if block.text]


def outside_code(text: str, kind: str = PAGE) -> list[str]:
    """Return a Markdown text's lines, with empty lines instead of comments and fenced or indented
    code.

    In strings and docstrings, indented lines are code even without an empty line before them.
    """
    comment = r"<!--.*?-->"
    text = re.sub(comment, lambda found: re.sub(r"[^\n]", "", found[0]), text, flags=re.DOTALL)
    lines: list[str] = []
    fence, code, blank, indent = "", False, True, 0
    for line in text.split("\n"):
        stripped, depth = line.strip(), len(line) - len(line.lstrip())
        opening = re.match(r"(`{3,}|~{3,})[^`]*$", stripped)
        if fence or opening:
            closes = stripped.startswith(fence) and not stripped.strip(fence[:1])
            fence = opening[1] if not fence and opening else "" if closes else fence
            lines.append("")
            blank = True
            continue
        code = depth >= indent + 4 and (blank or code or kind != PAGE) if stripped else code
        if item := re.match(ITEM, line) if not code else None:
            indent = item.end()
        elif stripped and blank and not depth:
            indent = 0
        lines.append("" if code else line)
        blank = not stripped
    return lines


def _cells(number: int, row: str, kind: str) -> list[Block]:
    if re.fullmatch(r"[|:\s-]+", row):
        return []
    cells = re.split(r"(?<!\\)\|", re.sub(SPAN, CODE, row))
    found = [_plain([(number, cell.replace("\\|", "|").strip())], kind) for cell in cells]
    return [block for block in found if len(words_of(block.text)) >= FEWEST_OF_CELL]


def _plain(marked: Marked, kind: str) -> Block:
    """Return a block without code spans, links, emphasis and tags; each character keeps its line
    number.
    """
    text = " ".join(line.strip() for _, line in marked)
    lines = [number for number, line in marked for _ in range(len(line.strip()) + 1)][: len(text)]
    for pattern, replaced in (
        (SPAN, lambda span: CODE),
        (LINK, lambda link: link[1]),
        (LINK, lambda link: link[1]),  # an image inside a link
        (r"<?https?://[^\s<>]+?(?:>|(?=[.,;:)]*(?:\s|$)))", lambda address: CODE),
        (r"</?[a-zA-Z][^<>]*>", lambda tag: ""),
        (r"\*\*|(?<!\w)[*_](?=\S)|(?<=\S)[*_](?!\w)", lambda emphasis: ""),
    ):
        text, lines = _replace(pattern, replaced, text, lines)
    return Block(text, tuple(lines), kind)


def _replace(
    pattern: str, replaced: Callable[[re.Match[str]], str], text: str, lines: list[int]
) -> tuple[str, list[int]]:
    out, numbers, place = "", [], 0
    for found in re.finditer(pattern, text):
        new = replaced(found)
        out += text[place : found.start()] + new
        numbers += lines[place : found.start()] + [lines[found.start()]] * len(new)
        place = found.end()
    return out + text[place:], numbers + lines[place:]


# Python


def docstrings(source: str) -> list[Block]:
    """Return the blocks of all docstrings, without their indented commands."""
    documented = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [
        block
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented)
        for block in _doc(node, DOCSTRING)
    ]


def comments(source: str) -> list[Block]:
    """Return the comments of five words or more; a paragraph's lines form one comment."""
    found: list[list[tuple[int, str]]] = []
    above = (-1, -1)  # line and column of the previous comment
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        text = token.string.lstrip("#").strip()
        if text.startswith(DIRECTIVES):
            continue
        alone = not token.line[:column].strip()
        if alone and above == (line - 1, column):
            found[-1].append((line, text))
        else:
            found.append([(line, text)])
        above = (line, column) if alone else (-1, -1)
    return [
        block
        for comment in found
        if len(words_of("\n".join(text for _, text in comment))) >= FEWEST
        for block in markdown("\n".join(text for _, text in comment), COMMENT, comment[0][0])
    ]


def strings(source: str) -> list[Block]:
    """Return the blocks of all strings of five words or more that a user can read.

    Docstrings are left out, except for a module's docstring that is printed as `__doc__`. Patterns,
    paths and programs are left out as well.
    """
    tree = ast.parse(source)
    printed = any(isinstance(node, ast.Name) and node.id == "__doc__" for node in ast.walk(tree))
    found = _doc(tree, STRING) if printed else []
    for line, text in _texts(tree):
        if len(words_of(text.replace(FIELD, ""))) >= FEWEST and not _is_code(text):
            found += markdown(text, STRING, line)
    return found


def _doc(
    node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, kind: str
) -> list[Block]:
    text = ast.get_docstring(node, clean=False) or ""
    first = node.body[0].lineno if node.body else 1
    return markdown(inspect.cleandoc(text), kind, first) if text else []


def _texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the outermost strings below a node with their lines; concatenated strings count as one
    string.
    """
    if isinstance(node, ast.expr) and (text := _text(node)) is not None:
        yield node.lineno, text
        return
    for child in ast.iter_child_nodes(node):
        if not _is_silent(child):
            yield from _texts(child)


def _text(node: ast.expr) -> str | None:
    """Return the string that an expression evaluates to, with a word for each field; otherwise
    None.
    """
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else FIELD for part in node.values]
        return "".join(str(part) for part in parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return None if left is None or right is None else left + right
    return None


def _is_silent(node: ast.AST) -> bool:
    """Return True for expressions whose strings nobody reads: docstrings, patterns, lists of
    names.
    """
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    of_re = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
    return of_re or (node.func.attr == "split" and isinstance(node.func.value, ast.Constant))


def _is_code(text: str) -> bool:
    signs = r"\{%|\\[bdswDSW.()\[\]]|\(\?[:P=!<]|\[\^|\.[*+](?=[^*]|$)|#!/|\$\("
    program = r"^\s*(import [\w., ]+$|from [\w.]+ import|def \w+\(|class \w+[(:]|print\(|set -e)"
    query = r"\b(SELECT|INSERT|UPDATE|DELETE|CREATE)\b.*\b(FROM|INTO|SET|TABLE)\b"
    if (
        re.search(signs, text)
        or re.search(program, text, re.MULTILINE)
        or re.search(query, text, re.DOTALL)
    ):
        return True
    tokens = [token for token in text.split() if re.search(r"\w", token) and token != FIELD]
    return len(words_of(text)) < len(tokens) / 2


# The command


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="Markdown or Python files"
    )
    parser.add_argument(
        "--show", action="store_true", help="print each hit and each long sentence with its line"
    )
    given = parser.parse_args(arguments)
    root = root_of(Path.cwd()) if not given.files else None
    paths = given.files or (pages(root) + programs(root) if root else [])

    counts = {path: count_file(path) for path in paths}
    for path, found in counts.items():
        if not found.words:
            continue
        name = path.relative_to(root) if root else path
        print(_row(str(name), found))
        if given.show:
            for hit in sorted([*found.hits, *found.long], key=lambda hit: hit.line):
                print(f"    {hit.line}: {hit.phrase}: {hit.text}")
    if len(counts) > 1:
        print(_row("all", _sum(list(counts.values()))))
    return 0


def _sum(counts: list[Count]) -> Count:
    hits = tuple(hit for one in counts for hit in one.hits)
    return Count(
        sum(one.words for one in counts), hits, tuple(hit for one in counts for hit in one.long)
    )


def _row(name: str, found: Count) -> str:
    return (
        f"{found.words:7} words {len(found.hits):4} hits {found.rate:5.1f} per 1,000"
        f" {len(found.long):4} long  {name}"
    )


if __name__ == "__main__":
    sys.exit(main())
