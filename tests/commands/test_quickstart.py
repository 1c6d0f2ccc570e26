"""The sample that tools/quickstart.py prints: a held-out document's excerpt, continued by the
model.
"""

import sys

import pytest
import torch
from pool import ROOT
from recipekit.data.processors import byte_tokenizer

sys.path.insert(0, str(ROOT / "tools"))

from quickstart import CONTINUATION, PROMPT, excerpt, side_by_side

TOKENIZER = byte_tokenizer()
CODE = "    return 1\n\n" + "".join(
    f"def function_{number}(value):\n    return value + {number}\n\n" for number in range(40)
)


def rows_of(*documents: str) -> list[dict[str, torch.Tensor]]:
    """Return one packed row of 640 tokens."""
    ids, positions = [], []
    for document in documents:
        own = [*TOKENIZER(document)["input_ids"], TOKENIZER.eos_token_id]
        ids, positions = ids + own, positions + list(range(len(own)))
    return [
        {"input_ids": torch.tensor([ids[:640]]), "position_ids": torch.tensor([positions[:640]])}
    ]


@pytest.mark.parametrize("before", [[], ["short"], ["a" * 100, "b" * 100], ["x\n" * 30]])
def test_the_excerpt_is_of_one_document_and_begins_a_line(before: list[str]) -> None:
    prompt, truth = excerpt(rows_of(*before, CODE), TOKENIZER)
    assert (len(prompt), len(truth)) == (PROMPT, CONTINUATION)
    text = TOKENIZER.decode([*prompt, *truth])
    start = CODE.index(text)
    # The first line of CODE ends at its tenth token.
    assert CODE[start - 1] == "\n" and text.startswith("\n")


def test_without_a_long_document_the_first_row_is_cut_in_half() -> None:
    rows = rows_of(*["abc"] * 160)
    prompt, truth = excerpt(rows, TOKENIZER)
    assert [*prompt, *truth] == rows[0]["input_ids"][0].tolist() and len(prompt) == 320


def test_two_texts_are_shown_beside_each_other_without_trailing_blanks() -> None:
    shown = side_by_side(("one", "ab\n\ncdefghij"), ("other", "x\ty\nz"), width=6)
    assert shown.split("\n") == [
        "one    | other",
        "---    | -----",
        "ab     | x   y",
        "       | z",
        "cdefgh |",
        "ij     |",
    ]
