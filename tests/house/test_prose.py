"""Pages, help texts, messages, docstrings and comments: plain English, working links, and figures
that the cited page contains.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import prose
import pytest
from pool import ROOT
from prose import CODE, COMMENT, DOCSTRING, PAGE, STRING, Block, Count

MOST = 1.5  # hits per 1,000 words of all blocks of a kind
MOST_OF_A_FILE = 3  # hits per 1,000 words
LONG_FILE = 300  # number of words above which a file has a separate limit
# Allowed hits. Lower a number after a rewrite, but never raise a number.
HITS = {PAGE: 2, STRING: 17, DOCSTRING: 0, COMMENT: 0}

BLOCKS = {
    path.relative_to(ROOT): prose.blocks_of(path)
    for path in prose.pages(ROOT) + prose.programs(ROOT)
}
COUNTS = {path: prose.count(blocks) for path, blocks in BLOCKS.items()}


def counts_of(kind: str) -> dict[str, Count]:
    return {
        str(path): prose.count([block for block in blocks if block.kind == kind])
        for path, blocks in BLOCKS.items()
    }


# Translated phrases and long sentences


@pytest.mark.parametrize("kind", HITS)
def test_few_phrases_are_translated_word_for_word(kind):
    faults = too_many(counts_of(kind), HITS[kind])
    assert not faults, "see python tests/support/prose.py --show FILE\n" + "\n".join(faults)


def test_no_file_has_many_translated_phrases():
    faults = [
        fault for path, count in COUNTS.items() for fault in too_many_of_a_file(str(path), count)
    ]
    assert not faults, f"more than {MOST_OF_A_FILE} per 1,000 words:\n" + "\n".join(faults)


def test_sentences_are_short():
    faults = [fault for path, count in COUNTS.items() for fault in too_long(str(path), count)]
    assert not faults, f"more than {prose.LONGEST} words:\n" + "\n".join(faults)


def too_many(counts: dict[str, Count], allowed: int) -> list[str]:
    """Return all hits of the files if there are more than allowed, or more than MOST per 1,000
    words.
    """
    hits = [
        f"{name}:{hit.line}: {hit.text}" for name, count in counts.items() for hit in count.hits
    ]
    words = sum(count.words for count in counts.values())
    return hits if len(hits) > allowed or 1000 * len(hits) > MOST * words else []


def too_many_of_a_file(name: str, count: Count) -> list[str]:
    if count.words <= LONG_FILE or count.rate <= MOST_OF_A_FILE:
        return []
    return [f"{name}:{hit.line}: {hit.text}" for hit in count.hits]


def too_long(name: str, count: Count) -> list[str]:
    return [f"{name}:{hit.line}: {hit.phrase}: {hit.text}" for hit in count.long]


PHRASES = {
    "The flag tells what a step keeps.": ["tells what", "what a"],
    "A line is told to the user.": ["is told"],
    "The losses are those of plain PyTorch.": ["those of"],
    "Three jobs, of which one failed, were killed.": ["of which"],
    "Names which file is missing.": ["Names which"],
    "The adapter is saved, too.": [", too"],
    "Nothing is written besides.": ["besides"],
    "A checkpoint is to be written.": ["is to be"],
    "Why is there so much memory?": ["so much"],
    "The model has none.": ["has none"],
    "Weights are drawn anew in place of zeros.": ["anew", "in place of"],
    "The run goes on.": ["goes on"],
    "The file lies beside it.": ["lies beside"],
    "A row has a folder of its own.": ["of its own"],
    "The page shows what\nthe run saved.": ["what the"],
    "| key | what it is |\n|---|---|\n| `lr` | the rate that is to be used |": [
        "what it",
        "is to be",
    ],
}


@pytest.mark.parametrize("text", PHRASES)
def test_finds_a_phrase(text):
    assert sorted(hit.phrase for hit in prose.count(prose.markdown(text)).hits) == sorted(
        PHRASES[text]
    )


@pytest.mark.parametrize(
    "text",
    [
        "What is a layout?",
        "Besides the loss, the log has `grad_norm`.",
        "Memory is so large that the run starts.",
        "`what the run keeps, too`",
        "    python goes on\n",
        "```\nThe run goes on.\n```\n",
        "<!-- The run goes on. -->",
        "- item\n\n      The run goes on.\n",
        "[a page](what-the-run-goes on.md)",
    ],
)
def test_finds_no_phrase(text):
    assert prose.count(prose.markdown(text)).hits == ()


def test_a_question_in_a_docstring_is_a_phrase_of_docstrings_only():
    text = "How the loss is computed."
    assert prose.count(prose.markdown(text)).hits == ()
    assert [hit.phrase for hit in prose.count(prose.docstrings(f'"""{text}"""')).hits] == ["How t"]


PROGRAM = '''
"""What the module computes is no text of a user."""
import re
from argparse import ArgumentParser

parser = ArgumentParser(description="The first words of a help text")
parser.add_argument("--a", help=f"rows of {1}, of which the last " + "is cut")
raise ValueError(f"{parser} goes on with this long message")
ROWS = ("a b c d e f".split(), re.compile("the run goes on here"), \
"SELECT what the FROM table of rows", "import os\\nprint(1)")
SHORT = "it goes on"
'''


def test_reads_help_texts_and_messages():
    found = prose.strings(PROGRAM)
    texts = [
        "The first words of a help text",
        "rows of X, of which the last is cut",
        "X goes on with this long message",
    ]
    assert [(block.lines[0], block.text) for block in found] == list(
        zip((6, 7, 8), texts, strict=True)
    )


def test_reads_docstrings_and_comments():
    program = '''
"""A module."""
# A comment of three short lines,
# the second of the three,
# the third.
class A:
    """A class."""

    def f(self):  # behind a line, with five words
        """Return one.

        python f.py
        """
        return 1  # noqa: F401 and some words more

x = 1  # (B, T) int64
'''
    found = [(block.lines[0], block.text) for block in prose.docstrings(program)]
    assert found == [(2, "A module."), (7, "A class."), (10, "Return one."), (12, "python f.py")]
    assert [(block.kind, block.lines[0], block.text) for block in prose.comments(program)] == [
        (COMMENT, 3, "A comment of three short lines, the second of the three, the third."),
        (COMMENT, 9, "behind a line, with five words"),
    ]


def test_reads_a_printed_docstring():
    assert [block.text for block in prose.strings('"""Convert a file."""\nprint(__doc__)')] == [
        "Convert a file."
    ]


def test_counts_words_of_sentences():
    text = (
        f"{'word ' * 28}here. Set `a b` in [the page](x.md), not e.g. in {'one ' * 3}two.\n-"
        f" {'word ' * 28}`x y`"
    )
    assert [(hit.line, hit.phrase) for hit in prose.count(prose.markdown(text)).long] == [
        (1, "29 words"),
        (2, "29 words"),
    ]
    lengths = [
        prose.length_of(sentence) for _, sentence in prose.sentences(prose.markdown(text)[0])
    ]
    assert lengths == [29, 12]


def test_a_list_of_names_is_one_word():
    assert (
        prose.length_of("Read by all of these: bert, electra, ernie, rembert, roc_bert and xlm.")
        == 6
    )
    assert prose.length_of(f"Set {CODE}, {CODE}, {CODE} and {CODE} first.") == 3
    assert prose.length_of("Save, stop, and start.") == 4


@pytest.mark.parametrize(
    "path",
    [path for path in COUNTS if path.suffix == ".md" and COUNTS[path].words > LONG_FILE],
    ids=str,
)
def test_a_translated_passage_fails_in_each_page(path, tmp_path):
    copy = tmp_path / path.name
    passage = (
        "What a run leaves lies in a folder of its own, and it goes on where it was stopped,"
        " too.\n\n"
    )
    copy.write_text((ROOT / path).read_text() + "\n\n" + passage * (COUNTS[path].words // 1000 + 1))
    assert too_many_of_a_file(path.name, prose.count_file(copy))


def test_one_translated_phrase_fails(tmp_path):
    copy = tmp_path / "README.md"
    copy.write_text((ROOT / "README.md").read_text() + "\n\nThe run goes on.\n")
    planted, before = prose.count_file(copy), COUNTS[Path("README.md")]
    assert (
        too_many({"README.md": planted}, len(before.hits))
        and len(planted.hits) == len(before.hits) + 1
    )


# Links and anchors


def test_links_and_anchors_resolve():
    lost = lost_links(ROOT)
    assert not lost, "\n".join(lost)


def lost_links(root: Path) -> list[str]:
    """Return the links from a repository's pages to missing files and missing headings."""
    lost = []
    for page in prose.pages(root):
        for number, target in links(page.read_text()):
            if not _resolves(page, target, root):
                lost.append(f"{page.relative_to(root)}:{number}: {target}")
    return lost


def links(text: str) -> Iterator[tuple[int, str]]:
    """Yield each relative target outside code with its line."""
    lines = "\n".join(prose.outside_code(text))
    spans = re.sub(
        r"(`+)(?!`).+?(?<!`)\1(?!`)",
        lambda span: re.sub(r"[^\n]", CODE, span[0]),
        lines,
        flags=re.DOTALL,
    )
    pattern = (
        r"\]\(\s*<?([^()\s<>]+(?:\([^()\s]*\))?)>?[^()]*\)"
        r"|^\s*\[[^\]]+\]:\s*(\S+)"
        r"|\b(?:href|src|srcset)=\"([^\"]+)\""
    )
    for found in re.finditer(pattern, spans, re.MULTILINE):
        target = found[1] or found[2] or found[3]
        if not re.match(r"[a-z][a-z0-9+.-]*:", target):
            yield spans.count("\n", 0, found.start()) + 1, target


def _resolves(page: Path, target: str, root: Path) -> bool:
    name, _, section = unquote(target).partition("#")
    there = (page.parent / name).resolve() if name else page
    if not there.exists() or not there.is_relative_to(root):
        return False
    if not section:
        return True
    if there.suffix == ".md":
        return section in anchors(there.read_text())
    line = re.fullmatch(r"L(\d+)(?:-L(\d+))?", section)
    return (
        line is not None
        and there.is_file()
        and int(line[2] or line[1]) <= len(there.read_text().splitlines())
    )


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub creates for a page's headings, and the anchors in the page's
    HTML.
    """
    lines = prose.outside_code(text)
    found: list[str] = []
    for heading in [line for line in lines if re.match(r"#{1,6}\s", line)]:
        plain = re.sub(prose.LINK, r"\1", heading.lstrip("#").rstrip(" #").strip())
        plain = re.sub(r"(?<!\w)_(\S.*?\S|\S)_(?!\w)|</?[a-zA-Z][^<>]*>", r"\1", plain)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.append(
            name
            if name not in found
            else next(f"{name}-{count}" for count in range(1, 99) if f"{name}-{count}" not in found)
        )
    return {*found, *re.findall(r"\b(?:id|name)=\"([^\"]+)\"", "\n".join(lines))}


PAGE_WITH_HEADINGS = """# `run.json`: one `dp_rank`, one [page](x.md) & more

## Twice
## Twice
<a id="Here"></a>

```
# No heading
```
"""


def test_anchors_are_those_of_github():
    assert anchors(PAGE_WITH_HEADINGS) == {
        "runjson-one-dp_rank-one-page--more",
        "twice",
        "twice-1",
        "Here",
    }


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "recipes" / "recipekit").mkdir(parents=True)
    (tmp_path / "recipes" / "PAGE.md").write_text(
        "# The page\n\nThe recipe takes 1,016.5 s, 42 % of 1e-05, on 2026-11-25.\n"
    )
    return tmp_path


DEAD = {
    "[a](recipes/NO.md)": False,
    "[a](recipes/PAGE.md#the-pages)": False,
    "[a](#another)": False,
    "![a](picture.png)": False,
    '<img src="picture.png">': False,
    "[a]: recipes/NO.md": False,
    "[a](../outside.md)": False,
    "[![a](picture.png)](recipes/PAGE.md)": False,
    "[a](recipes/PAGE.md)": True,
    "[a\nb](recipes/PAGE.md#the-page)": True,
    "[a](#front)": True,
    "[a](https://example.com/no#thing)": True,
    "`[a](recipes/NO.md)`": True,
    "    [a](recipes/NO.md)": True,
}


@pytest.mark.parametrize("link", DEAD)
def test_finds_a_dead_link(link, repository):
    (repository / "README.md").write_text(f"# Front\n\n{link}\n")
    assert (lost_links(repository) == []) is DEAD[link]


@pytest.mark.parametrize("page", prose.pages(ROOT), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_planted_dead_link_fails_in_each_page(page):
    found = list(links(page.read_text() + "\n\n[planted](planted.md) and [planted](#planted)\n"))
    assert [target for _, target in found if not _resolves(page, target, ROOT)][-2:] == [
        "planted.md",
        "#planted",
    ]


# Figures of the front page


def test_figures_of_the_front_page_are_on_the_pages_that_it_cites():
    found = wrong_figures((ROOT / "README.md").read_text(), ROOT)
    wrong = [
        f"README.md:{line}: {figure} is not in {' or '.join(cited)}"
        for line, figure, cited in found
    ]
    assert not wrong, "\n".join(wrong)


FIGURE = (
    r"(?<![\w.,/-])"
    r"(?:\d{4}-\d\d-\d\d|(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)*(?:e[+-]?\d+)?)"
    r"(?!\w|[-.,]\d)"
)


def wrong_figures(text: str, folder: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Yield each figure that is missing on all pages linked from the figure's sentence or table
    row.

    `folder` contains the page that the text belongs to.
    """
    for line, part, cited in citations(text):
        pages = [folder / name for name in cited]
        known = {value for path in pages if path.is_file() for value in figures(path.read_text())}
        for figure in re.findall(FIGURE, part):
            if value_of(figure) not in known:
                yield line, figure, cited


def citations(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """Yield the line, text and linked pages of each sentence and table row that links to a page."""
    targets: list[str] = []

    def mark(link: re.Match[str]) -> str:
        name = (link[2] or "").partition("#")[0]
        if not name.endswith(".md") or "://" in name:
            return link[1]
        targets.append(name)
        return f"{link[1]}{chr(0xE000 + len(targets) - 1)}"  # one character, which no page contains

    marked = re.sub(prose.LINK, mark, "\n".join(prose.outside_code(text)))
    parts = [
        (number, re.sub(prose.SPAN, CODE, row))
        for number, row in enumerate(marked.split("\n"), 1)
        if row.startswith("|")
    ]
    for block in prose.markdown(
        "\n".join("" if row.startswith("|") else row for row in marked.split("\n"))
    ):
        parts += [
            (block.lines[place], sentence)
            for place, sentence in prose.sentences(Block(block.text, block.lines, PAGE))
        ]
    for line, part in parts:
        if marks := re.findall(r"[\ue000-\uf8ff]", part):
            yield (
                line,
                re.sub(r"[\ue000-\uf8ff]", "", part),
                [targets[ord(mark) - 0xE000] for mark in marks],
            )


def figures(text: str) -> set[float | str]:
    return {value_of(figure) for figure in re.findall(FIGURE, text)}


def value_of(figure: str) -> float | str:
    """Convert a text to a number, so that 1e-5 equals 1e-05; a date or version stays text."""
    try:
        return float(figure.replace(",", ""))
    except ValueError:
        return figure


FIGURES = {
    "It takes 1016.5 s ([page](recipes/PAGE.md)), 42% of 1e-5.": [],
    "It takes 1,017 s ([page](recipes/PAGE.md#the-page)).": ["1,017"],
    "It takes 7 s. Then [page](recipes/PAGE.md) says more.": [],
    "[Page](recipes/PAGE.md), on 2026-11-26, with ZeRO-3, bf16 and `--tp 4`.": ["2026-11-26"],
    "Rows [take\n43 %](recipes/PAGE.md)\nof it.": ["43"],
    "| recipe | 44 % | [page](recipes/PAGE.md) |": ["44"],
    "| recipe | 44 % | [page](https://example.com/PAGE.md) |": [],
}


@pytest.mark.parametrize("text", FIGURES)
def test_finds_a_figure_that_its_page_does_not_have(text, repository):
    assert [
        figure for _, figure, _ in wrong_figures(f"# Front\n\n{text}\n", repository)
    ] == FIGURES[text]


def test_a_planted_figure_fails_at_each_place_of_the_front_page():
    """Replace each figure that has a source with a number that no page contains."""
    text = (ROOT / "README.md").read_text()
    quoted = {figure for _, part, _ in citations(text) for figure in re.findall(FIGURE, part)}
    assert quoted
    for figure in quoted:
        planted = re.sub(rf"(?<![\w.,/-]){re.escape(figure)}(?!\w|[-.,]\d)", "8675309", text)
        assert "8675309" in [found for _, found, _ in wrong_figures(planted, ROOT)], figure
