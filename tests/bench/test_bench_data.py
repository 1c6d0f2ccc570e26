"""The data stream bench: its readers read the right data, and its page shows the results."""

import sys
from itertools import islice
from pathlib import Path

import pytest
from pool import ROOT

sys.path.insert(0, str(ROOT / "tools" / "bench"))
import bench_data


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    return bench_data.make_files(tmp_path_factory.mktemp("files"), 8 * 64)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("name", bench_data.READERS)
def test_every_reader_goes_on_beyond_the_end_of_the_files(
    files: dict[str, list[Path]], kind: str, name: str
) -> None:
    total, tokens = 8 * 64 * bench_data.SEQ_LEN, 0
    for count in islice(bench_data.READERS[name](kind, files[kind]), 2000):
        assert count % bench_data.SEQ_LEN == 0
        tokens += count
    assert tokens > total


def test_the_page_names_what_was_missed() -> None:
    rates = {name: [100e6] * 5 for name in bench_data.TITLES}
    throughput = {
        "arrow": rates | {"raw": [150e6] * 5, "hf rows": [1e6] * 5},
        "parquet": rates | {"raw": [1000e6] * 5},
    }
    waits = {"ready tokens": [0.0001] * 100, "text": [0.0001] * 90 + [0.02] * 10}
    found = {
        "throughput": throughput,
        "waits": waits,
        "tokenising": {"bytes": 1e6},
        "differential": {"ratio": 1.01, "interval": [0.99, 1.02], "kept": [0.1]},
    }
    facts = {
        "date": "today",
        "machine": "this",
        "versions": {"Python": "3"},
        "commit": "abc",
        "load_before": 0.1,
        "load_after": 0.2,
    }
    page = bench_data.page(found | facts | {"rounds": 5, "rows": 8, "steps": 100, "pairs": 3})
    assert (
        "- arrow: 0.67 x raw read" in page
        and "the target is 0.5: reached" in page
        and "- parquet: 0.10 x" in page
        and "0.6: **missed**" in page
    )
    assert "batches of 32; the target is 10: **missed** (the raw read itself is 1.5 x)" in page
    assert (
        "| ready tokens | 0.100 | 0.100 | 0.20% | reached |" in page
        and "| text |" in page
        and "40.00% | **missed**" in page
    )
    assert "A trial" not in page


@pytest.mark.parametrize(
    "words", [["--rounds", "0"], ["--rows", "10"], ["--steps", "x"], ["--pairs", "1"]]
)
def test_wrong_words_end_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_data.arguments_of(words)
    assert ended.value.code == 2
