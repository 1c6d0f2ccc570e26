"""The progress line: its fields at every width, in terminals under each launcher, and in files."""

import fcntl
import json
import math
import os
import pty
import re
import struct
import sys
import termios
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import pytest
from job import BIN, NANO
from pool import ROOT, environment, free_port
from progress_steps import of_step
from recipekit.track import progress
from recipekit.track.progress import (
    Progress,
    ProgressField,
    ProgressLine,
    fit_line,
    format_duration,
    format_end_time,
    format_short_duration,
    progress_fields,
)

NOON = time.mktime((2026, 11, 27, 12, 0, 0, 0, 0, -1))  # a Friday


def after(num_steps: int, last: int = 20000, first: int = 1200, **more: Any) -> Progress:
    """Return a start's progress after some steps of two seconds; the first two are slower."""
    made = Progress(last)
    for number in range(num_steps):
        made.step(of_step(first + number, **{"step_s": 60.0 if number < 2 else 2.0} | more), NOON)
    return made


def shown(made: Progress, columns: int, now: float = NOON) -> str:
    return fit_line(progress_fields(made, now), columns)


def test_every_field_stands_in_80_columns_and_in_100() -> None:
    made = after(10)
    words = (
        "step 1209/20000  6%  epoch 0.31  loss 2.3457  lr 3.00e-04  12,346 tokens/s  71.2 GiB  ETA"
        " 10:26:22  at 22:26"
    )
    assert "  ".join(part.text for part in progress_fields(made, NOON)) == words
    assert shown(made, 100) == words.replace("  ", " ") and len(shown(made, 100)) == 100
    assert (
        shown(made, 79)
        == "1209/20000 6% ep 0.31 loss 2.35 lr 3.0e-4 12.3k tok/s 71.2G ETA 10h26 22:26"
    )
    assert shown(made, 50) == "1209/20000 loss 2.35 12.3k tok/s 71.2G ETA 10h26"
    assert shown(made, 25) == "1209/20000  loss 2.35"
    assert shown(made, 8) == "1209/200"


@pytest.mark.parametrize(
    "more",
    [
        {
            "step": 99_999_999,
            "loss": 1e30,
            "lr": 1e-300,
            "tokens_per_s": 9e12,
            "peak_mem_bytes": 10**15,
            "epoch": 123456.789,
        },
        {"loss": math.nan, "lr": 0.0, "tokens_per_s": 0.0},
        # With "tokens", as in lines of image tasks until November 2026.
        {"loss": math.inf, "samples": 5, "samples_per_s": 0.123},
        {"loss": 0.0, "step_s": 1e7},
    ],
)
@pytest.mark.parametrize("columns", [1, 20, 40, 79, 99, 199])
def test_no_number_makes_the_line_wider(more: dict[str, Any], columns: int) -> None:
    made = Progress(100_000_000)
    for _ in range(5):
        made.step(of_step(7) | more, NOON)
    made.doing = "evaluating"
    assert 0 < len(shown(made, columns)) <= columns


def test_the_eta_ignores_the_first_steps_and_counts_pauses() -> None:
    assert [after(number, last=102, first=1).seconds_left(NOON) for number in range(5)] == [
        None,
        None,
        None,
        198.0,
        196.0,
    ]
    made = after(10, last=110, first=1)
    assert (
        made.seconds_left(NOON) == 200
        and made.seconds_left(NOON + 30) == 170
        and made.seconds_left(NOON + 900) == 0
    )
    made.paused = 10.0  # an evaluation of ten seconds every ten steps
    assert made.seconds_left(NOON) == 300


@pytest.mark.parametrize(
    ("seconds", "lasts", "short", "ends"),
    [
        (0, "0:00:00", "0:00", "12:00"),
        (65, "0:01:05", "1:05", "12:01"),
        (43200, "12:00:00", "12h00", "Sat 00:00"),
        (90000, "1d 1h", "1d1h", "Sat 13:00"),
        (8e6, "92d 14h", "92d14h", "2027-02-28"),
    ],
)
def test_durations_and_the_clock(seconds: float, lasts: str, short: str, ends: str) -> None:
    assert (
        format_duration(seconds),
        format_short_duration(seconds),
        format_end_time(NOON, seconds),
    ) == (
        lasts,
        short,
        ends,
    )


def test_what_runs_between_steps_is_named() -> None:
    made = after(10)
    made.doing, made.since = "saving", NOON - 12
    assert (
        shown(made, 79)
        == "1209/20000 6% saving 0:00:12 loss 2.35 lr 3.0e-4 12.3k tok/s 71.2G ETA 10h26"
    )
    assert shown(Progress(10, since=NOON - 5), 79) == "first step 0:00:05"


def test_fields_that_matter_least_go_first() -> None:
    parts = [
        ProgressField("aaaa", "aa", 0),
        ProgressField("bbbb", "bb", 2),
        ProgressField("cccc", "cc", 1),
    ]
    assert [fit_line(parts, columns) for columns in (16, 14, 10, 8, 5, 2, 1)] == [
        "aaaa  bbbb  cccc",
        "aaaa bbbb cccc",
        "aa  bb  cc",
        "aa bb cc",
        "aa cc",
        "aa",
        "a",
    ]


def test_plain_lines_where_stderr_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines appear only for certain events.

    These are the first step, evaluations, a long phase, a step every PLAIN_EVERY seconds, and the
    last step.
    """
    monkeypatch.setattr(progress, "PLAIN_EVERY", 0.4)
    monkeypatch.setattr(progress.PlainScreen, "every", 0.05)
    line = ProgressLine(40)
    line.show(of_step(1))
    line.show(of_step(2) | {"eval_loss": 1 / 3, "eval_s": 2.0})
    with line.doing("saving"):
        time.sleep(0.6)
    line.say("[bold]said as it is[/bold]")
    line.show(of_step(3))
    line.show(of_step(4))
    line.close()
    line.close()
    first, evaluated, saving, said, last = capsys.readouterr().err.splitlines()
    assert first == "step 1/40  2%  epoch 0.31  loss 2.3457  lr 3.00e-04  12,346 tokens/s  71.2 GiB"
    assert evaluated == "step 2/40  eval_loss 0.3333" and said == "[bold]said as it is[/bold]"
    assert saving.startswith("step 2/40  5%  saving 0:00:0") and last.startswith(
        f"{first.replace('1/40  2%', '4/40  10%')}  ETA 0:01:1"
    )


BODY = """
import time
from progress_steps import of_step
from recipekit.track.progress import ProgressLine
line = ProgressLine(2)
line.show(of_step(1))
time.sleep(0.6)
line.say("[a] word " + "w" * 150)
line.show(of_step(2))
line.close()
print("below", flush=True)
"""


def on_a_terminal(
    argv: list[str], columns: int, folder: Path, **variables: str
) -> tuple[int | None, str]:
    """Run a command on a pseudo-terminal; return its exit code and its output without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    place = environment() | {"TERM": "xterm"} | variables
    with Popen(
        argv,
        cwd=folder,
        env=place,
        stdin=DEVNULL,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as job:
        os.close(theirs)
        seen = b""
        try:
            while chunk := os.read(ours, 4096):
                seen += chunk
        except OSError:
            pass  # a terminal whose other end is closed raises an error
        job.wait(60)
    os.close(ours)
    return job.returncode, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())


def frames(seen: str) -> list[str]:
    """Return every state of the progress line."""
    return [part for part in re.split(r"[\r\n]+", seen) if re.match(r"(step )?\d+/\d+ +\d+%", part)]


@pytest.mark.parametrize(
    ("columns", "variables"),
    [(80, {"COLUMNS": "300"}), (200, {}), (0, {"COLUMNS": "80"}), (0, {"COLUMNS": "wide"})],
)
def test_a_live_line_on_a_terminal(tmp_path: Path, columns: int, variables: dict[str, str]) -> None:
    code, seen = on_a_terminal([sys.executable, "-c", BODY], columns, tmp_path, **variables)
    found = frames(seen)
    assert code == 0 and {re.match(r"(?:step )?(\d+)/2", frame).group(1) for frame in found} == {
        "1",
        "2",
    }  # type: ignore[union-attr]
    assert max(map(len, found)) <= (100 if columns == 200 else 79), found
    for part in ("epoch 0.31", "loss 2.3457", "lr 3.00e-04", "12,346 tokens/s", "71.2 GiB"):
        assert all(part in frame for frame in found), found
    assert "[a] word " + "w" * 150 in seen, "a line that is said is not cut"
    assert seen.rstrip().splitlines()[-1] == "below" and seen.index("below") > seen.rindex(
        found[-1]
    )


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"TERM": "unknown"}])
def test_a_terminal_that_cannot_redraw_gets_plain_lines(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    code, seen = on_a_terminal([sys.executable, "-c", BODY], 80, tmp_path, **variables)
    assert code == 0 and len(frames(seen)) == 2 and "71.2 GiB" in frames(seen)[0]


def test_a_redirected_stdout_stays_where_it_is(tmp_path: Path) -> None:
    """rich would redirect a program's output to the terminal that shows the line."""
    body = BODY.replace("time.sleep(0.6)", "print('beside', flush=True)")
    shell = f'"{sys.executable}" -c "$BODY" > "{tmp_path}/out"'
    code, seen = on_a_terminal(["bash", "-c", shell], 80, tmp_path, BODY=body)
    assert (
        code == 0 and (tmp_path / "out").read_text() == "beside\nbelow\n" and "beside" not in seen
    )


TRACKED = """
import sys
from pathlib import Path
from recipekit.track.tracking import open_tracker
from progress_steps import of_step
tracker = open_tracker(
    run_dir=Path(sys.argv[1]), is_main=True, start_step=0, last_step=2, wandb=None
)
sys.stdin.read()  # until the reader of stderr has gone
tracker.log(of_step(1))
tracker.say("to nobody")
tracker.log(of_step(2))
tracker.finish(0)
print("done")
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_a_lost_terminal_does_not_fail_the_run(tmp_path: Path, terminal: bool) -> None:
    ours, theirs = pty.openpty() if terminal else os.pipe()
    place = environment() | {"TERM": "xterm"}
    with Popen(
        [sys.executable, "-c", TRACKED, tmp_path],
        stdin=PIPE,
        stdout=PIPE,
        stderr=theirs,
        text=True,
        env=place,
    ) as job:
        os.close(theirs)
        time.sleep(1.5 if terminal else 0)
        os.close(ours)
        said = job.communicate(timeout=60)[0]
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert (said, steps, job.returncode) == ("done\n", [1, 2], 0)


STARTERS = {
    "python": [sys.executable],
    "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port"],
    "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-port"],
    "launch": [sys.executable, "-m", "launch", "--gpus", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("starter", "columns"),
    [("python", 200), ("deepspeed", 80), ("torchrun", 200), ("launch", 80), ("launch", 200)],
)
def test_the_line_under_each_starter(tmp_path: Path, starter: str, columns: int) -> None:
    argv = STARTERS[starter]
    argv = [*argv, str(free_port())] if argv[-1].endswith("port") else argv
    flags = [
        "--tiny",
        "--no-wandb",
        "--steps",
        "40",
        "--eval_every",
        "20",
        "--save_every",
        "20",
        "--out",
        str(tmp_path / "run"),
    ]
    code, seen = on_a_terminal(
        [*argv, str(NANO), *flags], columns, ROOT if starter == "launch" else tmp_path
    )
    found = frames(seen)
    assert code == 0 and len(found) > 3, seen[-3000:]
    assert max(map(len, found)) <= min(100, columns - 1), found
    with_eta = [frame for frame in found if "ETA" in frame]
    assert with_eta and all(word in with_eta[-1] for word in ("loss ", "lr ", "%", "G")), found
    assert "step 20/40  eval_loss " in seen and "step 40/40  eval_loss " in seen
    assert re.search(r"(evaluating|saving|exporting) 0:00:0", seen)
