"""The GPU bench: its arithmetic, its stored rows and its page.

A slow test runs every row with tiny shapes on a CPU.
"""

import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from job import Job, command_line
from pool import ROOT, environment
from recipekit.plan import resolve_run
from recipekit.spec.command import parse

sys.path.insert(0, str(ROOT / "tools" / "bench"))

import bench_gpu

TOOL = ROOT / "tools" / "bench" / "bench_gpu.py"
KEY = {
    "device": "NVIDIA H200",
    "torch": "2.11.0",
    "deepspeed": "0.19.8",
    "code": "c0de",
    "tiny": False,
}
LINES = [[1, 4.0, 1.0], [2, 3.0, 0.5]]


def bench(*flags: object, limit: int = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, flags)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=limit)


def record(name: str, status: str = "pass", **changes: Any) -> dict[str, Any]:
    row = bench_gpu.BY_NAME[name]
    told = {
        "row": name,
        "part": row.part,
        "status": status,
        "seconds": 9.0,
        "measured": f"what {name} | found",
        "bars": "",
    }
    return told | {"date": "2030-01-02", "commit": "abc", "key": KEY, "figures": {}} | changes


def table(text: str) -> dict[str, list[str]]:
    """Return the other cells of each row, by the row's name."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    assert {len(line) for line in cells} == {4}
    return {line[0]: line[1:] for line in cells if line[0] in bench_gpu.BY_NAME}


def a_bench(tmp_path: Path, **kept: dict[str, Any]) -> bench_gpu.Bench:
    return bench_gpu.Bench(tmp_path, False, KEY, kept)


# Arithmetic
# --------------------------------------------------------------------------------------------------


def test_losses_are_compared_step_by_step():
    assert bench_gpu.furthest(LINES, LINES) == 0
    assert bench_gpu.furthest([[1, 4.0, 1.0], [2, 3.03, 9.0]], LINES) == pytest.approx(0.01)
    assert (
        bench_gpu.furthest([[1, 4.0, 1.0]], LINES) == bench_gpu.furthest([], []) == float("inf")
    ), "other steps are no match"


def test_the_same_bits_are_of_losses_and_norms():
    assert bench_gpu.other_bits(LINES, [list(line) for line in LINES]) == ""
    assert "from step 2 on" in bench_gpu.other_bits(
        [LINES[0], [2, 3.0, math.nextafter(0.5, 1)]], LINES
    )
    assert bench_gpu.other_bits(LINES[:1], LINES) == "1 steps, not 2"
    assert bench_gpu.other_bits([], []), "nothing is no proof"


def test_the_plan_is_read_from_what_dry_run_prints():
    one = (
        "memory   accelerator, each rank: 12.50 GiB = parameters 2.00 + gradients 4.00 + optimizer"
        " states 6.50\n"
    )
    two = (
        "memory   accelerator, each rank: 9.99 GiB always, 12.50 GiB while the loss is computed\n  "
        "          1.11 GiB  parameters, bf16\n"
    )
    host = "memory   host, each rank: 99.00 GiB = optimizer states\n"
    for printed in (
        one,
        host + two,
        f"{two}{host}verdict  states fit, activations not counted: 9.99 GiB of 139 GiB",
    ):
        assert bench_gpu.read_plan(printed) == {"bytes": 12.5 * 2**30, "activations": False}
    besides = (
        "memory   predicted activations of a micro-batch: 34.40 GiB, at most 57.34 GiB with the"
        " states above\n           34.15 GiB  all that 24 other layers keep\n"
    )
    assert bench_gpu.read_plan(f"{two}{besides}") == {"bytes": 57.34 * 2**30, "activations": True}
    assert bench_gpu.read_plan(host)["bytes"] is None


@pytest.mark.parametrize(
    ("activations", "peak", "applies", "reached"),
    [
        *((True, 10.4, True, True), (True, 10.6, True, False), (True, 9.4, True, False)),
        # States alone never exceed the peak.
        *((False, 17.0, True, True), (False, 9.6, True, True), (False, 9.4, True, False)),
        (True, 99.0, False, None),
    ],
)
def test_the_peak_is_judged_by_what_the_plan_counts(
    activations: bool, peak: float, applies: bool, reached: bool | None
):
    words, (_, found) = bench_gpu.beside_plan(
        {"bytes": 10 * 2**30, "activations": activations}, peak * 2**30, applies
    )
    assert found is reached
    assert f"peak {peak:.2f} GiB, planned 10.00" in words and ("without activations" in words) == (
        not activations
    )
    assert bench_gpu.beside_plan({"bytes": None, "activations": True}, 2**30, True)[1][1] is None
    assert (
        "planned 0.00"
        in bench_gpu.beside_plan({"bytes": 0.0, "activations": False}, 2**30, True)[0]
    ), "of a tiny model"


def test_speed_has_the_bar_of_its_model():
    judged = lambda model, tiny=False, **figures: bench_gpu.fast_enough(figures, model, tiny)[1]  # noqa: E731
    assert (
        judged("1b", mfu=0.38, tokens_per_s=1) is True
        and judged("1b", mfu=0.379, tokens_per_s=1e9) is False
    )
    assert judged("3b", mfu=0.39, tokens_per_s=1) is False
    assert judged("8b", tokens_per_s=13_001) is True and judged("8b", tokens_per_s=13_000) is False
    assert judged("1b", tokens_per_s=1) is None, "a device whose peak is not known has no MFU"
    assert judged("1b", tiny=True, mfu=0.0, tokens_per_s=1) is None


def test_a_missed_bar_is_named_and_one_that_does_not_apply_too():
    found = bench_gpu.Found("x", [("fast", True), ("MFU of 38%", False), ("near", None)])
    assert bench_gpu.verdict(found) == ("fail", "missed: MFU of 38%; no bar here: near")
    assert bench_gpu.verdict(bench_gpu.Found("x", [])) == ("pass", "")


def test_the_last_line_of_a_log_tells_why(tmp_path: Path):
    log = tmp_path / "x.log"
    log.write_text(
        "Traceback\nValueError: this\n\n[rank0]:[W1123 10:00:00 ProcessGroup.cpp:1] Warning:"
        " destroy\n  \n"
    )
    assert bench_gpu.last_line(log) == "ValueError: this"
    log.write_text("")
    assert "empty" in bench_gpu.last_line(log)


@pytest.mark.parametrize("left_out", ["", *bench_gpu.MEASURES])
def test_a_run_without_a_measure_differs_in_it_only(left_out: str, tmp_path: Path):
    """The row's command resolves as with `--dry_run`, and no other setting differs."""
    recipe = runpy.run_path(str(ROOT / bench_gpu.QWEN), run_name="a test")["RECIPE"]
    words = ["--tiny", "--dry_run", *bench_gpu.best_flags(tmp_path, left_out)]
    plan = resolve_run(parse(recipe, ROOT / bench_gpu.QWEN, words))
    assert plan.recipe.attention == ("sdpa" if left_out == "attention" else "varlen")
    assert plan.recipe.loss == ("whole" if left_out == "loss" else "chunked")
    assert plan.recipe.compile == ("off" if left_out == "compile" else "on")
    assert plan.ds_config["timers"]["throughput"]["enabled"] == (left_out == "timer")
    assert plan.ds_config["optimizer"]["params"]["fused"] == (left_out != "fused")
    zero = plan.ds_config["zero_optimization"]
    assert zero["stage"] == (2 if left_out in ("zero1", "overlap") else 1)
    written = json.loads(Path(words[words.index("--deepspeed_config") + 1]).read_text())
    on = {"zero1": False, "overlap": True}.get(left_out)
    assert written["zero_optimization"].get("overlap_comm") is on
    wrapper = bench_gpu.MEASURES[left_out].wrapper if left_out else ()
    assert wrapper == (("--without", left_out) if left_out in ("blocks", "sum") else ())


def test_every_measure_has_a_row_beside_the_fastest_run():
    rows = [row for row in bench_gpu.ROWS if row.part == "E"]
    assert [row.name for row in rows] == ["best", *(f"no_{name}" for name in bench_gpu.MEASURES)]
    assert [row.needs for row in rows] == [(), *[("best",)] * len(bench_gpu.MEASURES)]


@pytest.mark.parametrize(
    ("key", "ranks", "recipe", "words"),
    [
        ({}, 1, "recipes/x.py", ["recipes/x.py"]),
        ({"two_ranks": "NCCL"}, 2, "recipes/x.py", ["recipes/x.py"]),
        ({"two_ranks": "gloo"}, 2, "x.py", ["tools/bench/gpu_run.py", "--gloo", "x.py"]),
        ({}, 1, ("--without", "sum", "x"), ["tools/bench/gpu_run.py", "--without", "sum", "x"]),
    ],
)
def test_ranks_of_one_gpu_use_nccl_if_it_can_share_the_gpu(
    key: dict[str, str],
    ranks: int,
    recipe: str | tuple[str, ...],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    started: list[list[str]] = []
    monkeypatch.setattr(
        bench_gpu.Bench, "run", lambda self, name, argv, *more, **named: started.append(argv)
    )
    made = bench_gpu.Bench(tmp_path, True, key, {})
    made.train(bench_gpu.BY_NAME["two_zero1"], recipe, [], ranks)
    assert [word.removeprefix(f"{ROOT}/") for word in started[0][: len(words)]] == words


def test_rows_of_two_ranks_have_every_layout():
    two = {name: row for name, row in bench_gpu.BY_NAME.items() if name.startswith("two_")}
    layouts = "tp2 zero1 zero2 zero3 sp2 zero3_sp2 pp2 ddp fsdp2 ep2 onebit"
    assert {f"two_{layout}" for layout in layouts.split()} <= set(two)
    for row in two.values():
        layout = row.measure.keywords["layout"]  # type: ignore[attr-defined]
        assert layout.ranks == 2 and row.needs == (layout.reference,)


def test_a_pipeline_on_a_gpu_needs_nccl(tmp_path: Path):
    """Gloo cannot send tensors of a GPU."""
    key = KEY | {"cuda": "13.0", "two_ranks": "gloo"}
    made = bench_gpu.Bench(tmp_path, False, key, {"cpu": record("cpu")})
    found = bench_gpu.run_row(made, bench_gpu.BY_NAME["two_pp2"])
    assert found["status"] == "broke" and "gloo cannot send" in found["measured"]


# Stored rows
# --------------------------------------------------------------------------------------------------


def test_rows_of_another_device_or_code_are_not_mixed(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    assert bench_gpu.kept_rows(file, KEY) == {}
    bench_gpu.keep(file, record("cpu"))
    bench_gpu.keep(file, record("zero0", "broke"))
    for name, value in (
        ("device", "NVIDIA A100"),
        ("torch", "2.13.0"),
        ("deepspeed", "1"),
        ("code", "other"),
        ("tiny", True),
    ):
        bench_gpu.keep(file, record("zero1", key=KEY | {name: value}))
    with file.open("a") as stream:
        stream.write('{"row": "zero2", "st')  # truncated by a kill
    bench_gpu.keep(file, record("zero3"))
    bench_gpu.keep(file, record("cpu", measured="newer"))
    kept = bench_gpu.kept_rows(file, KEY)
    assert list(kept) == ["cpu", "zero0", "zero3"] and kept["cpu"]["measured"] == "newer"
    assert bench_gpu.done(kept["cpu"]) and not bench_gpu.done(kept["zero0"]), (
        "one that broke is run again"
    )
    assert bench_gpu.done(record("1b", "fail")), "one that missed its bar has its figures"


def test_the_code_of_the_rows_has_one_digest():
    assert re.fullmatch("[0-9a-f]{12}", bench_gpu.code_digest()), "it reads files of tools/ by name"


def test_a_row_brings_those_it_is_compared_with():
    names = lambda rows: [row.name for row in rows]  # noqa: E731
    assert names(bench_gpu.chosen(["D"], [], {})) == ["loop", "checkpoint"]
    assert names(bench_gpu.chosen([], ["resume"], {})) == ["cpu", "zero2", "resume"]
    assert names(
        bench_gpu.chosen([], ["resume"], {"cpu": record("cpu"), "zero2": record("zero2", "broke")})
    ) == ["zero2", "resume"]
    assert names(bench_gpu.chosen(list(bench_gpu.PARTS), [], {})) == list(bench_gpu.BY_NAME)


def test_a_row_that_breaks_has_a_record(tmp_path: Path):
    """A row is recorded as broken if its run or its reference row has no metrics."""
    broken = bench_gpu.run_row(a_bench(tmp_path), bench_gpu.BY_NAME["zero0"])
    assert (
        broken["status"] == "broke" and broken["measured"] == "needs row cpu, which has no figures"
    )
    empty = bench_gpu.Row(
        "A",
        "cpu",
        60,
        "",
        "",
        lambda bench, row: bench_gpu.Found("", [], {"lines": bench_gpu.read_metrics(tmp_path)[0]}),
    )
    assert "IndexError" in bench_gpu.run_row(a_bench(tmp_path), empty)["measured"]


def test_a_job_ends_at_its_limit_and_with_its_first_rank(tmp_path: Path):
    made = a_bench(tmp_path)
    (tmp_path / "say.py").write_text(
        "import os, sys, time\nprint('rank', os.environ['RANK'], flush=True)\ntime.sleep(60 *"
        " (os.environ['RANK'] != sys.argv[1]))\nsys.exit(3)"
    )
    began = time.monotonic()
    made.deadline = began + 20
    with pytest.raises(bench_gpu.RowFailed, match="exit code 3: rank 1"):
        made.run("two", [str(tmp_path / "say.py"), "1"], ranks=2)
    made.deadline = time.monotonic() + 1
    with pytest.raises(bench_gpu.RowFailed, match="not done in time"):
        made.run("late", [str(tmp_path / "say.py"), "none"])
    assert time.monotonic() - began < 20, "the other rank was not waited for"
    assert not [
        child
        for child in psutil.Process().children()
        if str(tmp_path) in " ".join(command_line(child))
    ]


# The page and the command
# -----------------------------------------------------------------------------------------


def test_the_page_tells_every_row():
    kept = {
        "cpu": record("cpu"),
        "zero1": record("zero1", "broke"),
        "1b": record("1b", "fail", bars="missed: MFU of 38%", date="2030-01-04"),
    }
    kept["loop"] = record("loop", "broke", measured=f"exit code 1: {'a long line ' * 20}")
    text = bench_gpu.page(kept)
    rows = table(text)
    assert list(rows) == list(bench_gpu.BY_NAME)
    assert [rows[name][2] for name in ("cpu", "1b", "zero1", "zero2")] == [
        "pass",
        "fail",
        "broke",
        "not measured",
    ]
    assert (
        "\n- cpu: what cpu | found\n" in text
        and "\n- 1b: what 1b | found (missed: MFU of 38%)\n" in text
    )
    assert max(map(len, text.splitlines())) <= 120
    assert (
        "on 2030-01-02 and 2030-01-04: NVIDIA H200" in text
        and "torch 2.11.0" in text
        and "commit abc" in text
    )
    assert f"2 of {len(bench_gpu.ROWS)} rows measured, 1 pass" in text and "Tiny" not in text
    assert "Tiny shapes" in bench_gpu.page({"cpu": record("cpu", key=KEY | {"tiny": True})})


def test_the_page_has_the_table_of_a_profile():
    table = [["kind", "ms", "of the step", "longest kernel"], ["idle", "3.0", "1.0%", "no kernel"]]
    text = bench_gpu.page({"profile_1b": record("profile_1b", figures={"table": table})})
    assert (
        "- profile_1b: what profile_1b | found\n\n"
        "| kind | ms | of the step | longest kernel |\n|---|---|---|---|\n"
        "| idle | 3.0 | 1.0% | no kernel |\n"
    ) in text


def test_the_order_of_a_gpu_run_has_the_pins_and_the_rows_of_today():
    text = (ROOT / "tools" / "bench" / "gpu_run.md").read_text()
    wheels = dict(re.findall(r"([\w-]+)==([\d.]+)", text))
    pins = dict(re.findall(r"([\w-]+)==([\d.]+)", (ROOT / "requirements.txt").read_text()))
    shared = wheels.keys() & pins.keys()
    assert {name: wheels[name] for name in shared} == {name: pins[name] for name in shared}
    assert "transformers" in shared and f"deepspeed-{pins['deepspeed']}.dist-info" in text
    joined = text.replace("\\\n", "")
    commands = re.findall(r"^ +python tools/bench/bench_gpu.py (.+)$", joined, re.MULTILINE)
    for command in commands:
        arguments = bench_gpu.arguments_of(command.split())
        assert arguments.no_run or arguments.rows
    seconds = [int(number) for number in re.findall(r"^ +# (\d+): ", text, re.MULTILINE)]
    assert len(seconds) == len(commands) == 6 and sum(seconds) + 60 <= 900


def test_the_written_page_has_the_rows_of_this_tool():
    text = (ROOT / "tools" / "bench" / "bench_gpu.md").read_text()
    rows = {line.split(" | ")[0].removeprefix("| ") for line in text.splitlines()}
    assert set(bench_gpu.BY_NAME) <= rows
    assert bench_gpu.WORDS in text


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (
            ["--minutes", 0, "--page", "no/such/folder/x.md", "--no-run"],
            1,
            ["--minutes 0: must be", "its folder does not exist"],
        ),
        (["--rows", "cpu", "zero9"], 2, ["zero9"]),
        (["--parts", "G"], 2, ["'G'"]),
        (["--rows", "1b"], 1, ["torch sees no GPU here. Use --tiny"]),
    ],
)
def test_bad_input_is_refused(flags: list[object], code: int, says: list[str], tmp_path: Path):
    ended = bench(*flags, "--out", tmp_path / "out")
    assert ended.returncode == code and not ended.stdout and "Traceback" not in ended.stderr
    for words in says:
        assert words in ended.stderr
    assert not (tmp_path / "out" / "rows.jsonl").exists()


def test_a_page_of_what_is_kept_runs_nothing(tmp_path: Path):
    bench_gpu.keep(tmp_path / "rows.jsonl", record("cpu", key=KEY | {"device": "older"}))
    bench_gpu.keep(tmp_path / "rows.jsonl", record("zero0"))
    ended = bench("--no-run", "--out", tmp_path, "--page", tmp_path / "page.md")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "page.md").read_text() == bench_gpu.page({"zero0": record("zero0")}), (
        "of the device measured last"
    )


# Complete runs
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_row_in_tiny_shapes(tmp_path: Path, ops: Callable[[str], None]):
    ops("cpu_adam")
    flags = ["--tiny", "--minutes", 60, "--out", tmp_path / "out", "--page", tmp_path / "page.md"]
    ended = bench(*flags, limit=1800)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert (
        ended.stdout.splitlines()[-1] == f"{len(bench_gpu.ROWS)} of {len(bench_gpu.ROWS)} rows pass"
    )
    file = tmp_path / "out" / "rows.jsonl"
    before = file.read_bytes()
    kept = {found["row"]: found for found in bench_gpu.records(file)}
    assert list(kept) == list(bench_gpu.BY_NAME)
    assert (tmp_path / "page.md").read_text() == bench_gpu.page(kept)
    assert all(
        len(kept[name]["figures"]["lines"]) == 8
        for name, row in bench_gpu.BY_NAME.items()
        if row.part == "A" and name != "export"
    )
    assert kept["export"]["figures"]["tensors"] == 21
    for name in ("1b", "1b_zero1", "1b_zero3", "8b_lora", "3b_4096", "3b_8192"):
        figures = kept[name]["figures"]
        assert figures["planned"]["bytes"] is not None, "what --dry_run prints is understood"
        assert (
            0 <= figures["data_wait_s"] < figures["step_s"] < 60 and figures["peak_bytes"] > 2**28
        )
        assert "no bar here" in kept[name]["bars"], "speed on a CPU is no pass"
        assert not list((tmp_path / "out" / "runs" / name / "checkpoints").glob("step_*")), (
            "ended before it saved"
        )
    assert (
        kept["1b_trainer"]["figures"]["report"]["seconds"].keys() == {"ours", "trainer"}
        and kept["1b_trainer"]["figures"]["ratio"] > 0
    )
    assert kept["loop"]["figures"]["report"]["seconds"].keys() == {"ours", "bare"}
    assert min(kept["checkpoint"]["figures"]["report"]["kinds"]["background"]["stall"]) > 0

    again = bench(*flags)
    assert again.returncode == 0 and file.read_bytes() == before, "nothing is run twice"
    assert len(re.findall(r"^\w \w+ +pass +kept ", again.stdout, re.MULTILINE)) == len(
        bench_gpu.ROWS
    )


@pytest.mark.slow
def test_a_killed_bench_goes_on_and_a_broken_row_stops_no_other(
    tmp_path: Path, ops: Callable[[str], None]
):
    out = tmp_path / "out"
    flags = ["--tiny", "--out", str(out), "--rows"]
    job = Job(tmp_path / "job", [sys.executable, str(TOOL), *flags, "zero2", "again"])
    try:
        # The row cpu is done, and zero2 runs.
        job.wait_for(
            lambda: (out / "logs" / "zero2.log").exists() and (out / "rows.jsonl").exists(), 300
        )
        os.kill(job.process.pid, signal.SIGKILL)
        job.wait_gone(60)
    finally:
        job.close()
    (first,) = bench_gpu.records(out / "rows.jsonl")
    assert (first["row"], first["status"]) == ("cpu", "pass")
    ended = bench(*flags, "zero2", "again", limit=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = bench_gpu.records(out / "rows.jsonl")
    assert found[0] == first and [record["row"] for record in found] == ["cpu", "zero2", "again"]

    config = out / "inputs_tiny" / "small" / "config.json"
    sound = config.read_text()
    config.write_text(sound.replace('"hidden_size": 64', '"hidden_size": 66'))
    ended = bench(*flags, "zero0", "loop", limit=300)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    said = {
        line.split()[1]: line for line in ended.stdout.splitlines() if line.startswith(("A ", "D "))
    }
    assert re.match(r"A zero0 +broke .* exit code 1: \S", said["zero0"]) and re.match(
        r"D loop +pass ", said["loop"]
    )
    assert ended.stdout.endswith("1 of 2 rows pass; not: zero0\n")

    config.write_text(sound.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1.0'))
    ended = bench(*flags, "zero0", limit=300)
    assert ended.returncode == 1 and re.search(
        r"^A zero0 +fail .*missed: at most 0.005", ended.stdout, re.MULTILINE
    ), ended.stdout


def test_the_written_page_is_of_this_bench():
    text = (ROOT / "tools" / "bench" / "bench_gpu.md").read_text()
    rows = table(text)
    assert [(name, *cells[:2]) for name, cells in rows.items()] == [
        (row.name, row.runs, row.bar) for row in bench_gpu.ROWS
    ]
    assert re.search(r"on 20\d\d-\d\d-\d\d", text), "dated"
