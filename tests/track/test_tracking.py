"""Tracking: `metrics.jsonl` reads like one unbroken run, and W&B receives the same numbers.

Neither W&B nor a terminal can cause a step to fail.
"""

import contextlib
import http.server
import json
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from disks import fill, small_disk
from parity import recipe_for, train_in_layout
from recipekit.spec.recipe import Recipe
from recipekit.track import tracking
from recipekit.track.metrics_file import MetricsFile, truncate_metrics
from shipped_jsons import strategy
from tracked_runs import CONFIG, of_run, open_tracker, read_metrics, step_metrics, wandb_core
from wandb_file import (
    read_artifacts,
    read_config,
    read_exit_codes,
    read_history,
    read_lowest,
    read_pictures,
    wandb_files,
)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


IMPORTS = """
import time
from pathlib import Path
from recipekit.track import tracking
from tracked_runs import open_tracker, step_metrics, wandb_core
"""


@contextlib.contextmanager
def start_script(body: str, *arguments: object, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """Run `body` in a separate process that can use this file's helpers.

    If a test fails within the `with` block, the process is ended.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}\n{IMPORTS}{body}"
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], text=True, **more
    ) as job:
        try:
            yield job
        except BaseException:
            job.kill()
            raise


def test_wandb_holds_the_numbers_of_metrics_jsonl_across_a_resume(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path)
    for step in range(1, 13):
        tracker.log(step_metrics(step))
    tracker.finish(143)
    tracker = open_tracker(tmp_path, start_step=7)
    for step in range(8, 16):
        tracker.log(step_metrics(step, job=1))
    tracker.finish(0)

    expected = [step_metrics(step, job=step > 7) for step in range(1, 16)]
    assert read_metrics(tmp_path) == expected
    assert read_history(tmp_path) == expected
    kept_id = (tmp_path / "wandb_id").read_text().split("\n")[0]
    assert [path.name for path in wandb_files(tmp_path)] == [f"run-{kept_id}.wandb"] * 2
    assert read_exit_codes(tmp_path) == [143, 0]
    assert CONFIG.items() <= read_config(tmp_path).items()


@pytest.mark.parametrize(
    "tail",
    [
        '{"step": 4, "lo',
        '{"step": 4, "loss": 1.0}',
        "\0\0\0\0\n\0\0",
        '{"step": 4, "loss": 1.0}\n{"step": 5, "loss": 1.0}\n',
        "",
    ],
)
def test_resume_cuts_what_lies_after_the_checkpoint(tmp_path: Path, tail: str) -> None:
    whole = "".join(json.dumps({"step": step, "loss": 1 / 3}) + "\n" for step in (1, 2, 3))
    (tmp_path / "metrics.jsonl").write_text(whole + tail)
    truncate_metrics(tmp_path / "metrics.jsonl", 3)
    assert (tmp_path / "metrics.jsonl").read_text() == whole
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_rewind_removes_later_lines_and_the_file_goes_on(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", pytest.fail)
    for step in (1, 2, 3):
        file.add(json.dumps({"step": step}))
    file.go_back(1)
    file.add(json.dumps({"step": 2, "again": True}))
    file.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 1}\n{"step": 2, "again": true}\n'


def test_a_last_line_without_its_newline_is_completed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    truncate_metrics(tmp_path / "metrics.jsonl", 2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize(
    "damage",
    ["\0" * 30 + "\n", '{"step": 2\n', "null\n", '{"step": 3, "loss": 0.5}\n{"step": 1}\n'],
)
def test_a_damaged_line_costs_no_other_line(tmp_path: Path, damage: str) -> None:
    """A repeated step is also handled. Steps whose lines are lost are reported."""
    lines = ['{"step": 1}\n', '{"step": 3, "loss": 0.5}\n', '{"step": 4}\n']
    (tmp_path / "metrics.jsonl").write_text(
        lines[0] + damage + "".join(lines[1:]) + '{"step": 6}\n'
    )
    said = truncate_metrics(tmp_path / "metrics.jsonl", 5)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines)
    assert "the lines of 2 steps (the first is step 2) are missing or damaged" in said
    assert (
        truncate_metrics(tmp_path / "metrics.jsonl", 1) == ""
        and (tmp_path / "metrics.jsonl").read_text() == lines[0]
    )


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[Path]:
    """Yield a disk of 16 pages."""
    with small_disk(tmp_path / "disk", "64k") as disk:
        yield disk


@pytest.mark.parametrize("length", [10, 1000, 5000])
@pytest.mark.parametrize("begun", [0, 3])
def test_lines_that_a_full_disk_does_not_take_are_written_later(
    pages: Path, length: int, begun: int
) -> None:
    """The disk becomes full in the middle of a line, at the end of a page."""
    said: list[str] = []
    file, lines = (
        MetricsFile(pages / "metrics.jsonl", said.append),
        [str(number) * length for number in range(9)],
    )
    for line in lines[:begun]:
        file.add(line)
    ballast = fill(pages)
    for line in [*lines[begun:], *["more" * 300] * 9]:
        file.add(line)
    with pytest.raises(OSError, match="No space left"):
        file.flush()
    assert (
        len(said) == 1
        and "cannot be written (No space left on device): its lines are kept" in said[0]
    )

    ballast.unlink()
    file.add("last")
    file.flush()
    file.close()
    assert (pages / "metrics.jsonl").read_text().splitlines() == [
        *lines,
        *["more" * 300] * 9,
        "last",
    ]
    assert len(said) == 2 and "is written again, and no line is lost" in said[1]


def test_lines_that_can_never_be_written_are_reported(pages: Path) -> None:
    said: list[str] = []
    file = MetricsFile(pages / "metrics.jsonl", said.append)
    for _ in range(70):
        file.add("x" * 1000)
    file.close()
    assert "lines are lost (No space left on device)" in said[-1]


def test_a_start_from_scratch_drops_an_older_record(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    open_tracker(tmp_path, recipe=Recipe(wandb=False)).finish(0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_sigkill_leaves_a_readable_record_and_no_process(tmp_path: Path) -> None:
    body = """
tracker = open_tracker(Path(sys.argv[1]))
for step in range(1, 10**9):
    tracker.log(step_metrics(step))
    time.sleep(0.0005)
"""
    with start_script(body, tmp_path, stderr=subprocess.DEVNULL) as job:
        core = wandb_core(tmp_path, psutil.Process(job.pid))
        time.sleep(1)
        job.kill()
    core.wait(10)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) > 50
    assert all(
        line.endswith("\n") and json.loads(line) == step_metrics(step)
        for step, line in enumerate(lines, 1)
    )
    held = read_history(tmp_path)
    assert held == [json.loads(line) for line in lines[: len(held)]]


@pytest.mark.parametrize("content", ["", "\n", "\0" * 8, "a/b", "x" * 200])
def test_a_damaged_wandb_id_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """W&B rejects such an id, so the run would have no W&B record."""
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    (tmp_path / "wandb_id").write_text(content)
    found = tracking._wandb_id(tmp_path / "wandb_id", print)
    assert (
        len(found) == 8
        and found
        == tracking._wandb_id(tmp_path / "wandb_id", print)
        == (tmp_path / "wandb_id").read_text().split("\n")[0]
    )


def ids(folder: Path, said: list[str]) -> str:
    return tracking._wandb_id(folder / "wandb_id", said.append)


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """Return a run folder with its id."""
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    (tmp_path / "a").mkdir()
    return tmp_path / "a", ids(tmp_path / "a", [])


@pytest.mark.parametrize("name", ["b", "b b", "deeper/b"])
def test_a_copied_run_folder_gets_a_wandb_id_of_its_own_once(
    first: tuple[Path, str], tmp_path: Path, name: str
) -> None:
    run, kept = first
    (tmp_path / name).parent.mkdir(exist_ok=True)
    copy, said = shutil.copytree(run, tmp_path / name), list[str]()
    own = ids(copy, said)
    assert said == [
        f"W&B run {own}, because this folder is a copy of {run}. To continue run {kept}, set"
        f" WANDB_RUN_ID={kept}"
    ]
    assert own != kept and ids(copy, said) == own and ids(run, said) == kept and len(said) == 1


def moved(run: Path) -> Path:
    return run.rename(run.with_name("moved"))


def linked(run: Path) -> Path:
    (run.parent / "link").symlink_to(run)
    return run.parent / "link"


def restored(run: Path) -> Path:
    """Restore a run folder from a backup at its old path."""
    shutil.copytree(run, run.with_name("backup"))
    # The new folder then cannot reuse the old folder's inode.
    (run.with_name("backup") / "inode").touch()
    run.rename(run.with_name("gone"))
    return run.with_name("backup").rename(run)


def of_an_older_version(run: Path) -> Path:
    (run / "wandb_id").write_text(ids(run, []))
    return run


@pytest.mark.parametrize("change", [moved, linked, restored, of_an_older_version])
def test_a_folder_that_is_no_copy_keeps_its_wandb_id(
    first: tuple[Path, str], change: Callable[[Path], Path]
) -> None:
    run, kept = first
    said: list[str] = []
    assert [ids(change(run), said), said] == [kept, []]


def test_a_later_wandb_run_id_is_used_and_reported(
    first: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, kept = first
    copy, said = shutil.copytree(run, tmp_path / "b"), list[str]()
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    line = f"W&B run mine, from WANDB_RUN_ID. Until now this folder was recorded in run {kept}"
    assert ids(run, said) == "mine" and said == [line]
    assert ids(run, said) == "mine" and said == [line]
    monkeypatch.delenv("WANDB_RUN_ID")
    assert ids(run, said) == "mine" and said == [line], "the same run at the next start"
    monkeypatch.setenv("WANDB_RUN_ID", kept)
    assert ids(copy, said) == kept and said == [line], "as the line for a copy says"


def test_other_ranks_track_nothing(tmp_path: Path) -> None:
    tracker = tracking.open_tracker(
        run_dir=tmp_path / "run", is_main=False, start_step=0, **of_run()
    )
    tracker.log(step_metrics(1))
    tracker.say("unseen")
    tracker.finish(0)
    assert list(tmp_path.iterdir()) == []


def test_without_wandb_there_is_no_trace_of_it(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path, recipe=Recipe(wandb=False, steps=1))
    tracker.log(step_metrics(1))
    tracker.finish(0)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_non_finite_numbers_are_valid_json(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path)
    tracker.log(step_metrics(1) | {"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})
    tracker.finish(1)
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (metrics["loss"], metrics["grad_norm"], metrics["lr"]) == (
        "NaN",
        "Infinity",
        "-Infinity",
    )
    [held] = read_history(tmp_path)
    assert math.isnan(held["loss"]) and held["grad_norm"] == math.inf


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_wandb_starts_again_and_loses_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    """`deepspeed.launcher.launch` sends SIGTERM to a rank's descendants, including wandb-core."""
    tracker = open_tracker(tmp_path)
    for step in range(1, 300):
        tracker.log(step_metrics(step))
        if step in (100, 299):
            wandb_core(tmp_path, start=1 + step // 200).send_signal(number)
        time.sleep(0.002)
    tracker.finish(143)
    assert (
        read_metrics(tmp_path)
        == read_history(tmp_path)
        == [step_metrics(step) for step in range(1, 300)]
    )
    assert read_exit_codes(tmp_path)[-1:] == [143]
    said = capfd.readouterr().err
    assert said.count("starting it again") == 2
    assert "Traceback" not in said


def test_a_wandb_killed_during_a_long_step_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "WANDB_REPEAT", 0.2)
    tracker = open_tracker(tmp_path)
    core = wandb_core(tmp_path)
    time.sleep(0.7)  # the thread has started
    for step in range(1, 6):
        tracker.log(step_metrics(step))
    time.sleep(0.05)
    core.kill()
    time.sleep(0.5)
    tracker.log(step_metrics(6))
    tracker.finish(0)
    assert read_history(tmp_path) == [step_metrics(step) for step in range(1, 7)]


def test_a_wandb_that_keeps_dying_is_given_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker = open_tracker(tmp_path)
    for step in range(1, 4):
        tracker.log(step_metrics(step))
        wandb_core(tmp_path, start=step).kill()
        time.sleep(0.2)
        tracker.log(step_metrics(step))
    began = time.monotonic()
    tracker.log(step_metrics(4))
    tracker.finish(0)
    assert time.monotonic() - began < 60
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 1, 2, 2, 3, 3, 4]
    said = capfd.readouterr().err
    assert said.count("given up, and metrics.jsonl continues") == 1
    assert "Traceback" not in said


def test_a_killed_wandb_leaves_no_traceback_at_exit(tmp_path: Path) -> None:
    body = """
tracker = open_tracker(Path(sys.argv[1]))
core = wandb_core(Path(sys.argv[1]))
core.kill()
tracker.log(step_metrics(1))
tracker.finish(0)
"""
    with start_script(body, tmp_path, stderr=subprocess.PIPE) as job:
        said = job.communicate(timeout=60)[1]
    assert job.returncode == 0
    assert "Traceback" not in said and "W&B stopped recording" in said


def test_a_hung_wandb_does_not_delay_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking, "WANDB_FINISH", 1.0)
    tracker = open_tracker(tmp_path)
    core = wandb_core(tmp_path)
    core.suspend()
    try:
        # Several times the size of the socket buffer, which is never read. A step that waited for
        # the buffer would never end.
        for step in range(1, 5001):
            tracker.log(step_metrics(step))
        began = time.monotonic()
        tracker.finish(0)
        assert time.monotonic() - began < 60
    finally:
        core.resume()
    assert len(read_metrics(tmp_path)) == 5000
    assert "metrics.jsonl is complete" in capfd.readouterr().err
    core.wait(20)
    assert len(read_history(tmp_path)) == 5000


def test_not_logged_in_records_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    tracker = open_tracker(tmp_path / "run")
    tracker.log(step_metrics(1))
    tracker.finish(0)
    assert [
        path.parent.name.startswith("offline-run-") for path in wandb_files(tmp_path / "run")
    ] == [True]


def test_unreachable_server_falls_back_to_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(tracking, "WANDB_INIT", 4.0)
    tracker = open_tracker(tmp_path)
    began = time.monotonic()
    tracker.log(step_metrics(1))
    assert time.monotonic() - began < 3  # it must not wait for the four seconds
    tracker.finish(0)
    assert "W&B cannot be reached" in capfd.readouterr().err
    assert read_history(tmp_path) == [step_metrics(1)]


@pytest.fixture
def refusing() -> Iterator[str]:
    """Yield the address of a server that answers as W&B's server does for an unknown key."""

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answer = json.dumps(
                {
                    "errors": [
                        {
                            "message": "user is not logged in",
                            "extensions": {"code": "PERMISSION_ERROR"},
                        }
                    ],
                    "data": {"viewer": None},
                }
            )
            self.send_response(401)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


KEYED = """
if sys.argv[2] == "silent":
    tracking.WANDB_INIT, tracking.WANDB_FINISH = 8.0, 0.5  # the end comes before W&B is given up
tracker = open_tracker(Path(sys.argv[1]))
for step in range(1, 4):
    tracker.log(step_metrics(step))
if sys.argv[2] == "refused":
    deadline = time.monotonic() + 60
    while not any(path.name.startswith("offline-run-") for path in \
Path(sys.argv[1]).glob("wandb/*")) and time.monotonic() < deadline:
        time.sleep(0.1)
tracker.finish(0)
"""


@pytest.mark.parametrize("mode", ["online", ""], ids=["online", "as logged in"])
def test_a_refused_key_is_told_with_the_way_to_another(
    tmp_path: Path, refusing: str, mode: str
) -> None:
    place = os.environ | {
        "WANDB_API_KEY": "0123456789" * 4,
        "WANDB_BASE_URL": refusing,
        "WANDB_MODE": mode,
    }
    with start_script(
        KEYED,
        tmp_path,
        "refused",
        stderr=subprocess.PIPE,
        env={key: value for key, value in place.items() if value},
    ) as job:
        said = job.communicate(timeout=120)[1]
    assert job.returncode == 0 and "Traceback" not in said
    told = (
        f"W&B refuses the key ({refusing}, error 401): give a valid WANDB_API_KEY, for the next"
        " start. The run continues without W&B"
    )
    assert (
        told in said.splitlines()
        and "W&B records offline" in said
        and "Failed to export" not in said
    )
    assert [line["step"] for line in read_history(tmp_path)] == [1, 2, 3]


@pytest.mark.slow
def test_a_key_that_is_missing_is_no_server_that_cannot_be_reached(
    tmp_path: Path, refusing: str
) -> None:
    """WANDB_MODE is online without a login. HOME is empty, so no key on this machine is found."""
    place = {
        name: value for name, value in os.environ.items() if name not in ("WANDB_API_KEY", "NETRC")
    }
    place |= {"WANDB_BASE_URL": refusing, "WANDB_MODE": "online", "HOME": str(tmp_path)}
    with start_script(KEYED, tmp_path, "keyless", stderr=subprocess.PIPE, env=place) as job:
        said = job.communicate(timeout=120)[1]
    told = (
        "W&B has no key to log in with: run wandb login, or set WANDB_API_KEY, for the next start."
        " The run continues without W&B"
    )
    assert (
        job.returncode == 0
        and told in said.splitlines()
        and "W&B records offline" in said
        and "cannot be reached" not in said
    ), said


def test_a_refused_login_is_mended_by_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert "wandb login --relogin --host https://a.b takes another" in tracking._wandb_problem(
        "returned error 401: user is not logged in", "https://a.b"
    )


def test_a_server_that_never_answers_leaves_no_traceback_at_exit(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = os.environ | {
            "WANDB_API_KEY": "0123456789" * 4,
            "WANDB_BASE_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "WANDB_MODE": "online",
        }
        with start_script(KEYED, tmp_path, "silent", stderr=subprocess.PIPE, env=place) as job:
            said = job.communicate(timeout=120)[1]
    assert job.returncode == 0
    assert (
        "metrics.jsonl is complete" in said
        and "Traceback" not in said
        and "stopped recording" not in said
    )


def test_a_wandb_that_a_launcher_ends_with_the_run_is_started_again_silently(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker = tracking.open_tracker(
        run_dir=tmp_path, is_main=True, start_step=0, **of_run(stopping=lambda: True)
    )
    tracker.log(step_metrics(1))
    wandb_core(tmp_path).terminate()
    time.sleep(0.5)
    tracker.log(step_metrics(2))
    tracker.finish(130)
    assert read_history(tmp_path) == [step_metrics(1), step_metrics(2)] and read_exit_codes(
        tmp_path
    )[-1:] == [130]
    assert "stopped recording" not in capfd.readouterr().err


def test_without_a_home_wandb_core_tells_nothing(tmp_path: Path) -> None:
    """wandb-core normally writes its log below HOME.

    Without HOME it used to print the log to the terminal.
    """
    body = (
        "tracker ="
        " open_tracker(Path(sys.argv[1]))\ntracker.log(step_metrics(1))\ntracker.finish(0)\n"
    )
    place = {
        key: value
        for key, value in os.environ.items()
        if key not in ("WANDB_CACHE_DIR", "XDG_CACHE_HOME")
    } | {"HOME": "/proc/nowhere"}
    with start_script(body, tmp_path / "run", stderr=subprocess.PIPE, env=place) as job:
        said = job.communicate(timeout=120)[1]
    assert (
        job.returncode == 0
        and "connection: closing" not in said
        and " INFO " not in said
        and " ERROR " not in said
    )
    assert read_history(tmp_path / "run") == [step_metrics(1)]


def test_the_command_that_uploads_can_be_pasted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker = open_tracker(tmp_path / "it's é folder")
    tracker.log(step_metrics(1))
    tracker.finish(0)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "wandb sync" in line]
    command, folder = (
        shlex.split(line.partition("Upload with: ")[2])[:2],
        Path(shlex.split(line)[-1]),
    )
    assert (
        command == ["wandb", "sync"]
        and folder.parent == tmp_path / "it's é folder" / "wandb"
        and folder.is_dir()
    )


def test_the_end_of_a_run_in_wandb(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """W&B receives the lowest eval_loss, the plot, the export as an artifact, and late metrics."""
    from PIL import Image

    (tmp_path / "hf" / "more").mkdir(parents=True)
    for name in ("config.json", "more/model.safetensors"):
        (tmp_path / "hf" / name).write_text(name)
    Image.new("RGB", (3, 2)).save(tmp_path / "loss.png")
    tracker = tracking.open_tracker(
        run_dir=tmp_path,
        is_main=True,
        start_step=0,
        **of_run(artifact=True, name="a recipe_dp2"),
    )
    for step in (1, 2):
        tracker.log(step_metrics(step))
        tracker.amend({"save_stall_s": step / 7})
    tracker.finish(0, tmp_path / "loss.png", tmp_path / "hf")
    assert (
        read_history(tmp_path)
        == read_metrics(tmp_path)
        == [step_metrics(step) | {"save_stall_s": step / 7} for step in (1, 2)]
    )
    assert read_lowest(tmp_path) == {"eval_loss"} and read_pictures(tmp_path) == {"loss.png"}
    name = f"a-recipe_dp2-{(tmp_path / 'wandb_id').read_text().split()[0]}"
    assert read_artifacts(tmp_path) == [("model", name, ["config.json", "more/model.safetensors"])]
    assert "wandb: " not in capfd.readouterr().err


def test_no_secret_and_no_code_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        name: f"secret-{name}-value"
        for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY")
    } | {"WANDB_API_KEY": "5ec2e7" * 7}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    tracker = open_tracker(tmp_path)
    tracker.log(step_metrics(1))
    tracker.finish(0)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in files:
        content = path.read_bytes()
        assert not [name for name, value in secrets.items() if value.encode() in content], path
    assert not [path for path in files if path.suffix in {".py", ".patch"}]


def fail_in_the_second_step(out: str) -> list[str]:
    """Run on a pool's only rank; return the rank's threads after the failure."""
    passes = []

    def fail(*_: object) -> None:
        passes.append(len(passes))
        if len(passes) > recipe.global_batch:  # one row at a time
            raise ValueError("broken on purpose")

    def broken(model: Any) -> Any:
        model.register_forward_hook(fail)
        return model

    recipe = recipe_for("llama", wandb=True, adapt=broken)
    with pytest.raises(ValueError, match="broken on purpose"):
        train_in_layout(recipe, strategy("zero0"), out)
    return [thread.name for thread in threading.enumerate()]


def test_the_record_of_a_job_of_one_rank_that_fails_is_closed(pools: Any, tmp_path: Path) -> None:
    """The W&B run is marked as failed, and no thread remains that would cause Python to abort."""
    threads = pools.run(1, fail_in_the_second_step, out=str(tmp_path / "run"))[0]
    assert not {"wandb copy", "data"} & set(threads), threads
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1]
    assert read_exit_codes(tmp_path / "run") == [1]
