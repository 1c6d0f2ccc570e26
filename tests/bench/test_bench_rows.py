"""Saved activations of attention and loss: linear in the tokens, independent of the vocabulary."""

import sys

import pytest
from pool import ROOT

sys.path.insert(0, str(ROOT / "tools" / "bench"))

import bench_rows

SMALL = 4096  # vocabulary


def test_what_is_saved_grows_with_the_tokens():
    one, two = (bench_rows.measure(bench_rows.AFTER, tokens, SMALL) for tokens in (1024, 2048))
    assert two.saved == pytest.approx(2 * one.saved, rel=0.02)
    assert two.largest < 4 * 2048 * 1024, "no tensor of tokens x tokens, nor of tokens x vocabulary"
    more = bench_rows.measure(bench_rows.AFTER, 1024, 2 * SMALL)
    assert more.saved == one.saved, "the vocabulary is in no saved tensor"


def test_before_it_grew_with_the_square_and_the_vocabulary():
    """If the old implementation did not grow like this, the bench would be pointless."""
    one, two = (bench_rows.measure(bench_rows.BEFORE, tokens, SMALL) for tokens in (1024, 2048))
    assert two.saved > 2.2 * one.saved and one.largest >= 4 * 1024 * SMALL


def test_the_page_is_written_by_the_bench():
    text = (ROOT / "tools" / "bench" / "bench_rows.md").read_text()
    assert bench_rows.WORDS in text and "not measured" not in text
    assert "too much" in bench_rows.page([(8192, None, bench_rows.Kept(8192, 1, 1, 1.0))], 10.0)


def test_ten_gib_hold_rows_of_4096_the_old_way():
    assert [tokens for tokens in bench_rows.TOKENS if bench_rows.fits(tokens, 10.0)] == [2048, 4096]
