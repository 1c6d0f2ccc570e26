"""The benches' harness: its order, its statistics, and the text of a page."""

import sys
from textwrap import dedent

import pytest
from pool import ROOT

sys.path.insert(0, str(ROOT / "tools" / "bench"))

import harness


def test_a_line_is_joined_with_the_indented_lines_below_it():
    words = " ".join(["word"] * 40)
    source = f"""
        # A title

        Written by `a very long command`: {words}.
        A sentence
            that continues.
        - **An item:** {words}
          and its end.
        1. **Another:**
          {words}.

        | a | b
            | c |
        |---|---|---|
        """
    folded = harness.fold(dedent(source)).split("\n")
    assert folded[3] == f"Written by `a very long command`: {words}.", "a single line stays"
    assert folded[4] == "A sentence that continues."
    assert folded[5].startswith("- **An item:** word") and folded[6].startswith("  word")
    assert folded[7].startswith("1. **Another:** word") and folded[8].startswith("   word")
    assert folded[9:] == ["", "| a | b | c |", "|---|---|---|", ""], "a row stays one line"
    assert max(map(len, folded[4:])) <= harness.COLUMNS
    assert harness.fold("\n".join(folded)) == "\n".join(folded), "folded once or twice"


def test_every_round_has_each_name_in_an_order_that_repeats():
    rounds = list(harness.shuffled(["a", "b", "c"], 20))
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len({tuple(order) for order in rounds}) == 6
    assert rounds == list(harness.shuffled(["a", "b", "c"], 20))


def test_the_interval_of_a_median_is_two_of_its_values():
    values = [float(number) for number in range(101)]
    # For 101 values, the order statistics 41 and 61 bound the median with 95 % confidence.
    assert harness.median_interval(values) == (50.0, 40.0, 60.0)
    assert harness.median_interval([2.0, 1.0, 4.0]) == (2.0, 1.0, 4.0)


def test_a_ratio_is_how_many_times_as_fast_ours_is():
    assert harness.ratios([1.0, 2.0], [2.0, 1.0]) == [2.0, 0.5]
    with pytest.raises(ValueError, match="longer"):
        harness.ratios([1.0], [1.0, 2.0])


def test_a_page_names_the_command_without_paths_of_output(monkeypatch: pytest.MonkeyPatch):
    words = ["x", "--local_rank=1", "--json", "out.json", "--pairs", "2", "--folder", "there"]
    monkeypatch.setattr(sys, "argv", words)
    found = harness.own_command("bench_loop.py", "--folder", "--json")
    assert found == "tools/bench/bench_loop.py --pairs 2"


def test_a_failed_command_ends_the_bench_with_its_log(tmp_path):
    (tmp_path / "log").write_text("the reason\n")
    with pytest.raises(SystemExit, match="deepspeed 2\nended with exit code 3:\nthe reason"):
        harness.exit_with_log(["deepspeed", 2], 3, tmp_path / "log")
