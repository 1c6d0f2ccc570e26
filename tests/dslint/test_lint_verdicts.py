"""Lint compared with DeepSpeed, case by case and key by key.

record_lint_verdicts.py recorded DeepSpeed's behaviour by running it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from ds_json import Case
from lint_cases import CASES, NOT_SEEN, POSTED, is_seen
from recipekit.commands import lint
from recipekit.dslint.schema import schema, value_at
from recipekit.dslint.values import convert_value
from recipekit.spec.errors import APPLIES, FAILS, HANGS, IGNORES, REPLACES, WRONG, Problem
from record_lint_verdicts import RECORDED, record

VERDICTS = json.loads(RECORDED.read_text())
SAMPLE = [
    "the least",
    "misspelt clipping",
    "10 is not 3 * 3",
    "optimizer on a drive at stage 2",
    "pipeline with ZeRO-2",
]


def said(case: Case, folder: Path) -> list[Problem]:
    """Return the problems that lint reports for the case's file."""
    file = folder / "ds.json"
    file.write_text(case.text, newline="", encoding="utf-8")
    return lint.lint(
        str(file), world=case.world, json_only=True, layout={"pp": case.pp} if case.pp > 1 else {}
    )[0]


def path_of(problem: Problem) -> str:
    return problem.where.partition(" = ")[0].rpartition(" (")[2].rstrip(")")


def covers(told: str, path: str) -> bool:
    """Return True if a report about one path also covers the other.

    The path may be the same, a block that contains the other path, or the switch of that path's
    block.
    """
    switch, _, key = told.rpartition(".")
    return (
        path == told
        or path.startswith(f"{told}.")
        or told.startswith(f"{path}.")
        or (key in ("enabled", "type") and path.startswith(f"{switch}."))
    )


def is_default(path: str, value: Any) -> bool:
    node = schema()["config"]
    for key in path.split("."):
        node = node.get("keys", {}).get(key, {})
    return value in ({}, None) or (
        "default" in node
        and "type" in node
        and node["default"] in (value, convert_value(node, value))
    )


def test_every_case_was_recorded_with_the_deepspeed_of_today() -> None:
    assert len(POSTED) >= 200 and list(VERDICTS) == list(CASES)
    assert {verdict["deepspeed"] for verdict in VERDICTS.values()} == {schema()["deepspeed"]}
    counts = {
        name: sum(verdict["verdict"] == name for verdict in VERDICTS.values())
        for name in ("applies", "ignores", "fails")
    }
    assert min(counts.values()) >= 15, counts


@pytest.mark.parametrize("name", CASES)
def test_lint_says_what_deepspeed_did(name: str, tmp_path: Path) -> None:
    problems, seen = said(CASES[name], tmp_path), VERDICTS[name]
    silent = {path_of(problem) for problem in problems if problem.outcome in (IGNORES, REPLACES)}
    ignored = {*seen.get("ignored", []), *seen.get("replaced", {})}
    # It has no consequence if a default value or an empty block is ignored.
    lost = {
        path
        for path in ignored
        if is_seen(path) and not is_default(path, value_at(CASES[name].parsed, path))
    }
    verdict = (
        "applies" if seen["verdict"] == "ignores" and not lost and not silent else seen["verdict"]
    )
    # Wrong numbers are tested in test_wrong_numbers.py.
    seen_at_all = [problem for problem in problems if problem.outcome != WRONG]
    assert lint.verdict(seen_at_all) == verdict, (
        [lint.format_problem(problem) for problem in problems],
        seen,
    )
    if seen["verdict"] == "fails":
        failing = {path_of(problem) for problem in problems if problem.outcome in (FAILS, HANGS)}
        causes = seen["because_of"]
        # A file that cannot be read has no paths.
        if causes and not any("line " in path for path in failing):
            # A missing key belongs to the block of the key that requires it.
            assert {path.partition(".")[0] for path in failing} & {
                cause.partition(".")[0] for cause in causes
            }, (failing, causes)
    else:
        missed = {path for path in lost if not any(covers(told, path) for told in silent)}
        invented = {
            told
            for told in silent
            if is_seen(told) and not any(covers(told, path) for path in ignored)
        }
        assert not missed and not invented, f"missed {missed}, invented {invented}: {seen}"


@pytest.mark.parametrize("name", CASES)
def test_every_message_names_path_value_rule_and_fix(name: str, tmp_path: Path) -> None:
    for problem in said(CASES[name], tmp_path):
        path, equals, value = problem.where.partition(" = ")
        written = path and equals and value
        # For a file that cannot be read.
        place = "line " in problem.where and "column " in problem.where
        whole = problem.rule.endswith("not an object")  # a file without any block has neither
        assert (
            (written or place or whole)
            and len(problem.rule) > 10
            and len(problem.fix) > 3
            and problem.outcome
        ), problem
        assert (
            lint.format_problem(problem)
            == f"{problem} (DeepSpeed {schema()['deepspeed']} {problem.outcome})"
        )


def test_keys_that_cannot_be_seen_here_are_few_and_said() -> None:
    unseen = {path for verdict in VERDICTS.values() for path in verdict.get("unseen", [])}
    assert not any(map(is_seen, unseen)) and len(NOT_SEEN) < 15 and all(NOT_SEEN.values())


def test_what_works_but_is_old_is_an_advice(tmp_path: Path) -> None:
    """Old names and converted values give a note and exit code 0."""
    for name in (
        "old names of offload",
        "old name of bf16",
        "words for switches",
        "comments",
        "the old switch",
    ):
        file = tmp_path / "ds.json"
        file.write_text(CASES[name].text)
        problems, lines = lint.lint(str(file), json_only=True)
        assert problems == [] and any(
            line.startswith("note: ") and APPLIES in line for line in lines
        ), (name, lines)


def test_trainer_s_files_are_clean_where_trainer_fills_them(tmp_path: Path) -> None:
    """The configs in transformers' docs have no problem if the Trainer fills in their values.

    DeepSpeed ignores some of their keys, no matter which library fills in the other keys.
    """
    file = tmp_path / "ds.json"
    ignored = {
        "HF docs, ZeRO-2": {
            "zero_optimization.allgather_partitions",
            "zero_optimization.contiguous_gradients",
        },
        "HF docs, ZeRO-3": set(),
    }
    for name, expected in ignored.items():
        file.write_text(CASES[name].text)
        problems, _ = lint.lint(str(file), filled_by="trainer", json_only=True)
        assert {path_of(problem) for problem in problems} == expected
        # accelerate fills in no betas.
        assert (
            lint.verdict(lint.lint(str(file), filled_by="accelerate", json_only=True)[0]) == "fails"
        )


def test_the_support_table_is_the_rules() -> None:
    page = lint.README.read_text()
    assert (
        lint.support_table() in page
        and lint.optimizer_table() in page
        and lint.update_tables(page) == page
    )
    assert (
        page.count(" (fails): ") > 20
        and page.count(" (works): ") > 5
        and page.count(" (ignored): ") > 10
    )


@pytest.mark.slow
@pytest.mark.processes
def test_a_sample_is_recorded_again_as_it_was(ops) -> None:
    again = record(SAMPLE)
    for name in SAMPLE:
        assert {**again[name], "error": None} == {**VERDICTS[name], "error": None}
        assert (
            again[name].get("error", "").split(":")[0]
            == VERDICTS[name].get("error", "").split(":")[0]
        )
