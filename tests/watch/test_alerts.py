"""Alerts: the file, the terminal, W&B and the command of --on_alert."""

import json
import math
import os
import sys
import time
from pathlib import Path

import pytest
from recipekit.spec.recipe import Recipe, check_recipe
from recipekit.watch import alerts
from recipekit.watch.alerts import ERROR, QUIET, WARNING, Alert, AlertLog
from tracked_runs import open_tracker, step_metrics
from wandb_file import read_records, wandb_files

TEXT = "loss is 'nan' $(touch spoiled) \"`id`\" é"


class Sent(list[tuple[str, str, str]]):
    """The alerts that W&B would receive."""

    def __call__(self, title: str, text: str, level: str) -> None:
        self.append((title, text, level))


def alert(kind: str = "spike", level: str = WARNING, at: float = 1.0) -> Alert:
    return Alert(at, 7, kind, level, TEXT, rank=1, value=math.nan)  # type: ignore[arg-type]


def lines_of(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "alerts.jsonl").read_text().splitlines()]


def script(tmp_path: Path, code: str) -> str:
    """Write a program that gets an alert on its standard input, and return its command."""
    path = tmp_path / "an alert's command.py"
    path.write_text(f"#!{sys.executable}\nimport sys, time\n{code}\n")
    path.chmod(0o755)
    return f'"{path}" "two words"'


def test_an_alert_reaches_the_file_the_terminal_and_wandb(tmp_path):
    said, sent = [], Sent()
    log = AlertLog(tmp_path, said.append, sent)
    log.report(alert())
    assert lines_of(tmp_path) == [
        {
            "time": 1.0,
            "step": 7,
            "kind": "spike",
            "level": "warning",
            "text": TEXT,
            "rank": 1,
            "value": "nan",
        }
    ]
    assert said == [f"alert (spike): {TEXT}"]
    assert sent == [("spike at step 7", TEXT, "warning")]


def test_one_warning_of_a_kind_in_ten_minutes_and_every_error(tmp_path):
    log = AlertLog(tmp_path, lambda _: None, Sent())
    for kind, level, at in (
        ("spike", WARNING, 0.0),
        ("spike", WARNING, QUIET - 1),  # dropped
        ("divergence", WARNING, QUIET - 1),
        ("spike", ERROR, QUIET - 1),
        ("spike", ERROR, QUIET - 1),
        ("spike", WARNING, QUIET),
    ):
        log.report(alert(kind, level, at))
    assert [line["kind"] for line in lines_of(tmp_path)] == [
        "spike",
        "divergence",
        "spike",
        "spike",
        "spike",
    ]


def test_a_second_start_appends(tmp_path):
    for _ in range(2):
        AlertLog(tmp_path, lambda _: None, Sent()).report(alert())
    assert len(lines_of(tmp_path)) == 2


def test_a_file_that_cannot_be_written_is_printed(tmp_path):
    (tmp_path / "alerts.jsonl").mkdir()
    said: list[str] = []
    AlertLog(tmp_path, said.append, Sent()).report(alert())
    assert "alerts.jsonl: cannot be written (Is a directory)" in said[0] and len(said) == 2


def test_the_command_gets_the_json_and_no_shell_reads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    got = tmp_path / "got.json"
    code = f"open({str(got)!r}, 'a').write(sys.stdin.read() + sys.argv[1])"
    log = AlertLog(tmp_path, lambda text: None, Sent(), script(tmp_path, code))
    log.report(alert())
    log.close()
    text, _, words = got.read_text().rpartition("}")
    assert json.loads(text + "}") == lines_of(tmp_path)[0] and words == "two words"
    assert not (tmp_path / "spoiled").exists()


def test_a_command_that_hangs_delays_nobody_and_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(alerts, "COMMAND_LIMIT", 1.0)
    said: list[str] = []
    log = AlertLog(tmp_path, said.append, Sent(), script(tmp_path, "time.sleep(600)"))
    begun = time.monotonic()
    log.report(alert())
    assert time.monotonic() - begun < 0.5
    log.close()
    assert time.monotonic() - begun < 10
    assert [text for text in said if text.endswith("ended after 1 s")]


@pytest.mark.parametrize(
    ("code", "problem"),
    [("sys.exit('no mail server')", "exit code 1 (no mail server)"), ("", None)],
)
def test_a_command_that_fails_is_printed(tmp_path, code, problem):
    said: list[str] = []
    log = AlertLog(tmp_path, said.append, Sent(), script(tmp_path, code))
    log.report(alert())
    log.close()
    assert said[1:] == ([] if problem is None else [said[-1]])
    assert problem is None or said[-1].endswith(problem)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"on_alert": "no-such-program --now"}, "no-such-program is not found"),
        ({"on_alert": "sh 'open"}, "has a quotation mark that is not closed"),
        ({"watch": False, "on_spike": "stop"}, "requires the watch"),
        ({"watch": False, "on_nonfinite": "skip"}, "requires the watch"),
        ({"watch": False, "on_alert": "sh"}, "requires the watch"),
        ({"watch": False, "hang_s": 5.0}, "requires the watch"),
        ({"watch": False, "audit_every": 100}, "requires the watch"),
        ({"audit_every": -1}, "must not be negative"),
        ({"hang_s": -1.0}, "must not be negative"),
    ],
)
def test_what_the_flags_refuse(fields, rule):
    (problem,) = check_recipe(Recipe(model="a/b", **fields))
    assert rule in str(problem)


def test_a_command_of_this_machine_is_accepted():
    assert check_recipe(Recipe(model="a/b", on_alert="sh -c 'cat > /dev/null'")) == []


def test_the_offline_file_of_wandb_has_the_alerts(tmp_path):
    tracker = open_tracker(tmp_path)
    tracker.log(step_metrics(1))
    tracker.alert("a long title " * 20, TEXT, "error")
    tracker.finish(0)
    (path,) = wandb_files(tmp_path)
    (record,) = [
        record.alert for record in read_records(path) if record.WhichOneof("record_type") == "alert"
    ]
    assert record.text == TEXT and record.level == "ERROR" and len(record.title) < 64
    assert os.listdir(tmp_path)
