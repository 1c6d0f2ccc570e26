"""The list of planted faults must be correct: each fault's text must occur exactly once in its
file, and its tests must exist.
"""

from collections import Counter
from pathlib import Path

from plant_faults import PACKAGE, ROOT, Fault, read_faults, wrong

PACKAGES = (
    "train.py",
    "spec",
    "optim",
    "model",
    "parallel",
    "data",
    "checkpoints",
    "storage",
    "dslint",
    "engine",
    "runtime",
)


def test_every_fault_can_be_planted_where_the_list_says() -> None:
    assert wrong(read_faults()) == []


def test_there_are_sixty_faults_over_the_packages() -> None:
    faults = read_faults()
    assert len(faults) >= 60 and len({fault.id for fault in faults}) == len(faults)
    counts = Counter(Path(fault.file).parts[0] for fault in faults)
    assert all(counts[package] >= 6 for package in PACKAGES), counts
    assert all((ROOT / "tests" / fault.wing).is_dir() and fault.tests for fault in faults)


def test_a_text_that_has_moved_is_told_with_its_new_file(tmp_path: Path) -> None:
    (tmp_path / PACKAGE / "data").mkdir(parents=True)
    (tmp_path / PACKAGE / "here.py").write_text("a = 1\nb = 2\nb = 2\n")
    (tmp_path / PACKAGE / "data" / "there.py").write_text("c = 3\n")
    told = wrong(
        [
            Fault(old, "house", "here.py", old, new, ())
            for old, new in (
                ("a = 1", "a = 2"),
                ("b = 2", ""),
                ("c = 3", ""),
                ("a =", "a ="),
                ("a", "("),
            )
        ],
        tmp_path,
    )
    assert [text.partition(":")[0] for text in told] == ["b = 2", "c = 3", "a =", "a"]
    assert (
        "occurs 2 times in here.py" in told[0]
        and "it is in data/there.py" in told[1]
        and "changes nothing" in told[2]
        and "no Python" in told[3]
    )
