"""`tools/lint.py FILE --fix` writes NAME.fixed.json next to FILE and never ends in a traceback."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ds_json import Case
from fuzzed_files import fuzzed_files
from lint_cases import CASES
from lint_command import lint as command
from pool import Pools
from recipekit.commands import lint
from recipekit.dslint import fixes
from recipekit.spec.errors import FAILS, ConfigError, Problem
from record_lint_verdicts import Recorder

Check = Callable[[Any], list[Problem]]
BATCH = {"train_micro_batch_size_per_gpu": 2}


def check_of(case: Case, json_only: bool = True) -> Check:
    layout = {"pp": case.pp} if case.pp > 1 else {}
    return lambda config: lint.lint(config, world=case.world, json_only=json_only, layout=layout)[0]


def fix_file(file: Path, json_only: bool, check: Check) -> tuple[Path | None, list[str]]:
    return lint.write_fixed_json(str(file), file.parent, json_only, check)


@pytest.mark.parametrize("json_only", [True, False])
def test_a_fixed_file_has_no_problem_that_was_said_to_be_fixed(
    json_only: bool, tmp_path: Path
) -> None:
    """A fixed file has no new problem either, unless a key was renamed. FILE stays unchanged."""
    cleaned, cases = 0, list(CASES.items())
    for name, case in cases if json_only else cases[::4]:
        file, check = tmp_path / "ds.json", check_of(case, json_only)
        file.write_text(case.text, newline="")
        before = check(str(file))
        written, changes = fix_file(file, json_only, check)
        assert file.read_text() == case.text.replace("\r\n", "\n"), name
        if written is None:
            assert changes == [], name
            continue
        assert written == tmp_path / "ds.fixed.json" and json.loads(written.read_text()) is not None
        after = check(str(written))
        fixed = {line.partition(". ")[2] for line in changes[1:]}
        said = {
            problem
            for problem in before
            if any(
                text.startswith(f"{problem.where}: ") and f"({problem.rule}" in text
                for text in fixed
            )
        }
        assert not said & {*after}, (name, changes, list(map(str, after)))
        renamed = any(": renamed " in text or ": moved to " in text for text in fixed)
        assert renamed or {*after} <= {*before}, (name, changes, list(map(str, after)))
        cleaned += not after
        written.unlink()
    assert cleaned > (100 if json_only else 20), cleaned


ALONE = {  # JSON -> (fixed JSON, number of remaining problems)
    '{"gradient_acumulation_steps": 4}': ({"gradient_accumulation_steps": 4}, 0),
    '{"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1e9}}': (
        {"zero_optimization": {"stage": 2}},
        0,
    ),
    '{"zero_optimization": {"stage": 2, "cpu_offload": true}}': (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        0,
    ),
    '{"bf16": true}': ({"bf16": {"enabled": True}}, 0),
    '{"gradient_clipping": "1.0"}': ({"gradient_clipping": 1.0}, 0),
    '{"wall_clock_breakdown": "false"} // no': ({"wall_clock_breakdown": False}, 0),
    "{'bf16': {'enabled': true}}": ({"bf16": {"enabled": True}}, 0),
    '{"csv_monitor": {"output_path": "logs"}}': (
        {"csv_monitor": {"output_path": "logs", "enabled": True}},
        0,
    ),
    '{"optimizer": {"type": "AdmaW"}, "tensorboard": {"enabled": true}}': (
        {"optimizer": {"type": "AdamW"}, "tensorboard": {"enabled": False}},
        0,
    ),
    '{"zero_optimization": {"stage": 2, "allgather_bucket_size": 1000001}}': (
        {"zero_optimization": {"stage": 2, "allgather_bucket_size": 1000002}},
        0,
    ),
    # It contains no number.
    '{"elasticity": {}, "train_batch_size": "many"}': ({"train_batch_size": "many"}, 1),
    '{"scheduler": {"type": "LinearLR"}}': (None, 2),  # it is unclear which schedule is meant
}


@pytest.mark.parametrize("text", ALONE)
def test_what_is_written(text: str, tmp_path: Path) -> None:
    """A problem that --fix cannot solve remains a problem."""
    expected, left = ALONE[text]
    file = tmp_path / "my.json"
    file.write_text(text)
    written, changes = fix_file(file, False, lambda config: lint.lint(config)[0])
    assert file.read_text() == text and (written is None) == (expected is None)
    if written is not None:
        assert json.loads(written.read_text()) == expected and changes[0].startswith(
            f"wrote {written}: "
        ), changes
    assert len(lint.lint(str(written or file))[0]) == left


def test_each_change_is_said_with_its_rule(tmp_path: Path) -> None:
    (tmp_path / "my.json").write_text(
        '{"zero_optimization": {"stage": 2, "overlap_com": true}, "dump_sate": false}'
    )
    _, said = command("my.json", "--fix", cwd=tmp_path)
    lines = said.splitlines()
    assert lines == [
        "wrote my.fixed.json: 2 changes",
        (
            "  1. zero_optimization.overlap_com = true: renamed overlap_comm (DeepSpeed has no such"
            " key here)"
        ),
        "  2. dump_sate = false: renamed dump_state (DeepSpeed has no such key here)",
        "my.fixed.json: clean",
    ]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "my.json").write_text('{"dump_sate": false}')
    (tmp_path / "my.fixed.json").write_text("mine")
    code, said = command("my.json", "--fix", cwd=tmp_path)
    assert code == 1 and "--fix my.fixed.json: already exists. Delete it or rename it" in said, said
    assert (tmp_path / "my.fixed.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("a.b.json", "a.b.fixed.json"),
        ("ds_config", "ds_config.fixed.json"),
        ("x.JSON", "x.JSON.fixed.json"),
    ],
)
def test_the_name_of_the_fixed_file(name: str, target: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"dump_sate": false}')
    assert (
        fix_file(tmp_path / name, True, lambda config: lint.lint(config, json_only=True)[0])[0]
        == tmp_path / target
    )


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"bf16": {}, "bf16": {}}', "{\"a\": '''", "\x00", '{"dump_state": false}'],
)
def test_where_nothing_can_be_fixed_nothing_is_written(text: str, tmp_path: Path) -> None:
    (tmp_path / "my.json").write_text(text)
    assert fix_file(tmp_path / "my.json", False, lambda config: lint.lint(config)[0]) == (None, [])
    assert [path.name for path in tmp_path.iterdir()] == ["my.json"] and bool(
        lint.lint(str(tmp_path / "my.json"))[0]
    ) == ("dump" not in text)


def test_what_is_left_is_said_and_exits_1(tmp_path: Path) -> None:
    (tmp_path / "my.json").write_text('{"elasticity": {}, "train_batch_size": "many"}')
    code, said = command("my.json", "--fix", cwd=tmp_path)
    assert (
        code == 1
        and "wrote my.fixed.json: 1 change" in said
        and "1 problem in my.fixed.json" in said
    ), said


def test_fix_needs_a_file() -> None:
    assert command("--recipe", "recipes/llama_nano_zero2.py", "--fix")[0] == 2


def test_a_fix_that_brings_another_problem_is_dropped() -> None:
    wrong = {
        path: Problem(f'{path} = "x"', "must be a whole number", f"write {fix}", FAILS)
        for path, fix in (("a", "1"), ("b", "2"))
    }

    def check(config: dict[str, Any]) -> list[Problem]:
        found = [wrong[path] for path in ("a", "b") if config[path] == "x"]
        return (
            [*found, Problem("c = 1", "never beside a = 1", "write 2", FAILS)]
            if config["a"] == 1
            else found
        )

    config, changes = fixes.apply_fixes({"a": "x", "b": "x"}, check)
    assert config == {"a": "x", "b": 2} and [str(change) for change in changes] == [
        'b = "x": = 2 (must be a whole number)'
    ]


CHOICES = [
    "write 9 or 12",
    "write 4 or more",
    "write true or false",
    "write a whole number",
    "use --tp 1",
    "delete the block and use --wandb",
    "write [1] or [2]",
]


@pytest.mark.parametrize("fix", CHOICES)
def test_a_choice_is_left_to_a_person(fix: str) -> None:
    assert fixes.apply_fix(Problem("a = 3", "is wrong", fix, FAILS), {"a": 3}) is None


MODES: list[dict[str, Any]] = [
    {"json_only": True},
    {"json_only": True, "filled_by": "trainer", "world": 8},
    {"json_only": True, "layout": {"pp": 2}, "world": 2},
    {},
    {"world": 4},
]


@pytest.mark.parametrize("count", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_broken_files_end_without_a_traceback(count: int, tmp_path: Path) -> None:
    """Each file gets a list of problems. For every fifth file, --fix also runs without an error."""
    file, found = tmp_path / "ds.json", 0
    for number, content in enumerate(fuzzed_files(count)):
        file.write_bytes(content)
        mode = MODES[number % len(MODES)]
        problems, _ = lint.lint(str(file), **mode)
        found += bool(problems)
        assert all(
            problem.where and problem.rule and problem.fix and "\n" not in str(problem)
            for problem in problems
        ), content
        if number % 5 == 0:
            written, _ = fix_file(
                file, True, lambda config, mode=mode: lint.lint(config, **mode)[0]
            )
            if written is not None:
                lint.lint(str(written), **mode)
                written.unlink()
    assert found > count * 3 // 4, found


def test_some_of_them_through_the_command(tmp_path: Path) -> None:
    for number, content in enumerate(fuzzed_files(3, seed=7)):
        (tmp_path / "ds.json").write_bytes(content)
        (tmp_path / "ds.fixed.json").unlink(missing_ok=True)
        code, said = command(
            "ds.json", *(["--json-only"] if number % 2 else []), "--fix", cwd=tmp_path
        )
        assert code in (0, 1) and said, content


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('"\\ud800": 1', False),
        ('"zero_optimization": {"stage": 1, "a\\ud800b": "\\udc80"}', False),
        ('"wandb": {"enabled": false, "project": "a\\udfffb"}', True),
    ],
)
def test_half_a_surrogate_pair_is_printed_and_written_as_an_escape(
    text: str, kept: bool, tmp_path: Path
) -> None:
    """JSON may contain half a surrogate pair, but UTF-8 cannot."""
    (tmp_path / "ds.json").write_text(
        f'{{"train_micro_batch_size_per_gpu": 2, "cpu_offload": "true", {text}}}'
    )
    half = text[text.index("\\ud") :][:6]
    code, said = command("ds.json", "--json-only", cwd=tmp_path)
    assert code == 1 and (kept or half in said), said
    code, said = command("ds.json", "--json-only", "--fix", cwd=tmp_path)
    fixed = (tmp_path / "ds.fixed.json").read_text()
    assert code == 0 and half in (fixed if kept else said), (said, fixed)
    assert lint.read_lenient_json("ds.fixed.json", tmp_path, True)[0] == json.loads(fixed)


@pytest.mark.parametrize(
    "key",
    [
        "gradient_clipping",
        "steps_per_print",
        "zero_optimization.reduce_bucket_size",
        "optimizer.params.lr",
    ],
)
@pytest.mark.parametrize("mode", MODES[:4], ids=lambda mode: "-".join(mode) or "recipe")
def test_an_integer_may_be_too_large_for_a_float(
    key: str, mode: dict[str, Any], tmp_path: Path
) -> None:
    value: Any = 10**400
    for name in reversed(key.split(".")):
        value = {name: value}
    (tmp_path / "ds.json").write_text(json.dumps(BATCH | value))
    lint.lint(str(tmp_path / "ds.json"), **mode)


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        lint.read_lenient_json("absent.json", tmp_path, True)
    assert fix_file(tmp_path / "absent.json", True, lambda config: []) == (None, [])


@pytest.mark.slow
@pytest.mark.processes
def test_stock_deepspeed_trains_with_what_is_called_clean(
    ops: Callable[[str], None], tmp_path: Path
) -> None:
    """DeepSpeed itself trains with every case that --fix makes clean."""
    # If a worker is stopped during a compilation, its lock would remain.
    for name in ("cpu_adam", "async_io", "fused_adam"):
        ops(name)
    pools, trained, failed = Pools(), 0, {}
    try:
        for name, case in sorted(CASES.items(), key=lambda item: item[1].world):
            file, check = tmp_path / "ds.json", check_of(case)
            file.write_text(case.text, newline="")
            written, _ = fix_file(file, True, check)
            if written is None:
                continue
            if not check(str(written)):
                seen = Recorder(pools, case).run(written.read_text())
                trained += 1
                failed |= {name: (seen["error"], written.read_text())} if "error" in seen else {}
            written.unlink()
    finally:
        pools.close()
    assert not failed and trained > 100, (trained, failed)
