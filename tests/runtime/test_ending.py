"""The end of a run: summary block, summary.md, loss.png and the command to continue.

Their contents are compared with metrics.jsonl and run.json.
"""

import dataclasses
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from disks import fill, small_disk
from job import NANO, Job, checkpoints, deepspeed, steps_done
from recipekit.runtime import continuation, ending
from recipekit.runtime.continuation import continue_command, launcher_command, replace_flags
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import unit_of_metrics
from recipekit.spec.step_names import newest_complete
from recipekit.track.loss_plot import envelope, plot_losses
from recipekit.track.metrics_file import MetricsFile
from recipekit.track.summary import loading_code, summary_block, summary_page, trained_model_note
from run_metadata import FACTS


def read(run: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ], json.loads((run / "run.json").read_text())


def table(page: str) -> dict[str, str]:
    """Return the rows of a summary."""
    return {
        name: value.replace("\\|", "|")
        for name, value in re.findall(r"^\| (\w+) \| (.*) \|$", page, re.MULTILINE)
    }


def numbers_in(text: str) -> list[float]:
    return [
        float(word.replace(",", "")) for word in re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?", text)
    ]


def seconds_in(text: str) -> list[int]:
    return [
        int(hours) * 3600 + int(minutes) * 60 + int(rest)
        for hours, minutes, rest in re.findall(r"(\d+):(\d\d):(\d\d)", text)
    ]


def check_summary(run: Path) -> dict[str, str]:
    """Compute each number in summary.md from metrics.jsonl and run.json, and return the rows."""
    lines, facts = read(run)
    rows, last = table((run / "summary.md").read_text()), lines[-1]
    assert numbers_in(rows["steps"]) == [
        last["step"],
        facts["recipe"]["steps"],
        *([round(last["epoch"], 2)] if "epoch" in last else []),
        last[unit_of_metrics(last)],
    ]
    for name in ("loss", "eval_loss"):
        found = [(line[name], line["step"]) for line in lines if name in line]
        assert (name in rows) == bool(found)
        for (value, step), part in zip(
            [found[0], found[-1], min(found)] if found else [],
            rows.get(name, "").split(", "),
            strict=True,
        ):
            assert numbers_in(part) == [round(value, 4), step], (name, rows[name])

    waiting, evaluation, saving = (
        sum(line.get(key, 0) for line in lines) for key in ("data_wait_s", "eval_s", "save_stall_s")
    )
    steps = sum(line["step_s"] for line in lines)
    parts = [steps - waiting, evaluation, saving, waiting]
    assert seconds_in(rows["time"]) == [round(sum(parts)), *map(round, parts)], rows["time"]
    assert [float(share) for share in re.findall(r"([\d.]+)%", rows["time"])] == [
        pytest.approx(100 * part / sum(parts), abs=0.051) for part in parts
    ]
    assert numbers_in(rows["speed"]) == [
        pytest.approx(last[unit_of_metrics(last)] / steps, abs=0.51)
    ]
    peak, planned = max(line["peak_mem_bytes"] for line in lines), facts["planned_memory"]["states"]
    mib = [
        float(value) * (1024 if unit == "GiB" else 1)
        for value, unit in re.findall(r"([\d.]+) ([GM]iB)", rows["memory"])
    ]
    assert mib[:2] == [
        pytest.approx(peak / 2**20, abs=6),
        pytest.approx(planned / 2**20, abs=6),
    ], rows["memory"]
    assert rows["checkpoint"] == str(newest_complete(run / "checkpoints"))
    assert rows["model"] == str(run / "hf") if (run / "hf").is_dir() else "to-hf" in rows["model"]
    return rows


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_one_summary_is_true_after_stop_at_and_resume(pools: Any, tmp_path: Path) -> None:
    from short_runs import (
        BASE,  # imports torch
        train,
    )

    recipe, run = dataclasses.replace(BASE, export=True), tmp_path / "run"
    argv = ["--out", str(run), "--save_every", "2"]
    results = pools.run(2, train, recipe=recipe, argv=[*argv, "--stop_at", "3"])
    assert [code for code, _ in results] == [0, 0] and "stopped at" not in results[1][1], results
    rows, printed = check_summary(run), results[0][1]
    assert (
        last_line(printed)
        == last_line((run / "summary.md").read_text())
        == "stopped at step 3 of 6. The same command resumes from step 3"
    )
    assert (
        all(f"{name:<11}{value}\n" in printed for name, value in rows.items())
        and "load" not in printed
    )
    assert ["save_stall_s" in line for line in read(run)[0]] == [False, True, True]

    assert [code for code, _ in pools.run(2, train, recipe=recipe, argv=argv)] == [0, 0]
    rows = check_summary(run)
    assert numbers_in(rows["steps"])[:2] == [6, 6]
    said = f"finished all 6 steps. The model is in {run}/hf. Sample it with: recipekit sample {run}"
    assert last_line((run / "summary.md").read_text()) == said
    assert [line["step"] for line in read(run)[0] if "save_stall_s" in line] == [2, 3, 4, 6]
    assert [line["step"] for line in read(run)[0] if "eval_s" in line] == [2, 4, 6]


def lines_of(*losses: float, **more: Any) -> list[dict[str, Any]]:
    same = {
        "lr": 1.0,
        "grad_norm": 1.0,
        "step_s": 2.0,
        "data_wait_s": 0.5,
        "tokens_per_s": 5.0,
        "peak_mem_bytes": 2**30,
    }
    return [
        {"step": step, "loss": loss, "tokens": 10 * step, **same, **more}
        for step, loss in enumerate(losses, 1)
    ]


@pytest.mark.parametrize(
    ("lines", "row"),
    [
        (
            lines_of(3.0, 1.0, 2.0),
            "loss       first 3.0000 (step 1), last 2.0000 (step 3), best 1.0000 (step 2)",
        ),
        (
            lines_of(3.0, eval_loss="NaN"),
            "eval_loss  first nan (step 1), last nan (step 1), best nan (step 1)",
        ),
        (lines_of(3.0, epoch=1.25), "steps      1 of 9, 1.25 epochs, 10 tokens"),
        (lines_of(3.0, samples=10, samples_per_s=7.0), "speed      7 samples/s"),
        (
            lines_of(3.0, 2.0, eval_s=3.0, save_stall_s=1.0),
            (
                "time       0:00:12: training 0:00:03 (25.0%), evaluation 0:00:06 (50.0%), saving"
                " 0:00:02 (16.7%), "
            ),
        ),
        (
            lines_of(1e6, 2e9),
            "loss       first 1.000e+06 (step 1), last 2.000e+09 (step 2), best 1.000e+06 (step 1)",
        ),
    ],
)
def test_rows_of_the_block(tmp_path: Path, lines: list[dict[str, Any]], row: str) -> None:
    block = summary_block(lines, FACTS, tmp_path, "the end")
    assert any(line.startswith(row) for line in block.splitlines()), block
    assert (
        last_line(block) == "the end" == last_line(summary_page(lines, FACTS, tmp_path, "the end"))
    )


@pytest.mark.parametrize(
    ("task", "adapter", "merge", "words"),
    [
        (
            "pretrain",
            None,
            False,
            (
                "from transformers import AutoModelForCausalLM, AutoTokenizer",
                "AutoTokenizer.from_pretrained(",
            ),
        ),
        (
            "sft",
            {"r": 8},
            False,
            (
                "from peft import AutoPeftModelForCausalLM",
                "AutoPeftModelForCausalLM.from_pretrained(",
            ),
        ),
        ("sft", {"r": 8}, True, ("from transformers import AutoModelForCausalLM, AutoTokenizer",)),
        (
            "image_classification",
            None,
            False,
            ("AutoModelForImageClassification, AutoImageProcessor",),
        ),
        (
            "masked_lm",
            {"r": 8},
            False,
            (
                "from peft import PeftModel; from transformers import AutoModelForMaskedLM",
                'from_pretrained("org/base")',
            ),
        ),
    ],
)
def test_two_lines_load_the_model(
    tmp_path: Path, task: str, adapter: dict | None, merge: bool, words: tuple[str, ...]
) -> None:
    facts = FACTS | {
        "recipe": FACTS["recipe"] | {"task": task, "merge": merge},
        "identity": {"adapter": adapter},
    }
    assert loading_code(facts, tmp_path) == []
    (tmp_path / "it's a \"hf").mkdir()
    (tmp_path / "it's a \"hf" / "hf").mkdir()
    code = loading_code(facts, tmp_path / "it's a \"hf")
    assert len(code) == 2 and all(word in "\n".join(code) for word in words), code
    compile("\n".join(code), "code", "exec")


@pytest.mark.parametrize(
    ("base", "said"),
    [
        (None, "convert to-hf --merge"),
        ("org/base", "recipekit sample"),
        ("./base", "recipekit sample"),
    ],
)
def test_an_adapter_of_random_weights_is_not_offered_as_a_model(
    tmp_path: Path, base: str | None, said: str
) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": base})
    )
    plan: Any = SimpleNamespace(recipe=Recipe(steps=3), out=tmp_path, resume_command="")
    assert said in ending.finished(plan, 3).text and (
        "randomly initialised" in ending.finished(plan, 3).text
    ) == (base is None)
    facts = FACTS | {"recipe": FACTS["recipe"] | {"task": "sft"}, "identity": {"adapter": {"r": 8}}}
    assert len(loading_code(facts, tmp_path)) == (2 if base else 0)
    assert ("randomly initialised" in trained_model_note(tmp_path)) == (
        base is None
    ) and "convert to-hf --merge" in trained_model_note(tmp_path)


@pytest.mark.parametrize(
    ("words", "changes", "now"),
    [
        ("python a.py --stop_at 3 --lr 1", {"stop_at": None}, "python a.py --lr 1"),
        ("python a.py --lr 1 --stop-at=3", {"stop_at": None}, "python a.py --lr 1"),
        (
            "deepspeed a.py --resume runs/x --stop_at 2",
            {"stop_at": None, "resume": None},
            "deepspeed a.py",
        ),
        (
            "python a.py --lr 1",
            {"resume": "auto", "stop_at": "0"},
            "python a.py --lr 1 --resume auto --stop_at 0",
        ),
        ("python a.py --out runs/{job_id}", {"out": "runs/7"}, "python a.py --out runs/7"),
        ("python a.py --stop_at", {"stop_at": None}, "python a.py"),
    ],
)
def test_flags_that_ended_the_run_are_not_typed_again(
    words: str, changes: dict[str, str | None], now: str
) -> None:
    assert replace_flags(words.split(), changes) == now.split()


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (
            ["/v/bin/python", "/v/bin/deepspeed", "--num_gpus", "2", "a.py"],
            ["deepspeed", "--num_gpus", "2", "a.py"],
        ),
        (["/v/bin/python3.11", "/v/bin/torchrun", "a.py"], ["torchrun", "a.py"]),
        (
            ["python", "-m", "torch.distributed.run", "a.py"],
            ["python", "-m", "torch.distributed.run", "a.py"],
        ),
        (["accelerate", "launch", "a.py"], ["accelerate", "launch", "a.py"]),
        # `deepspeed` starts it.
        (["python", "-u", "-m", "deepspeed.launcher.launch", "a.py"], []),
        (["bash", "-c", "deepspeed a.py"], []),
        (["slurmstepd: [1.0]"], []),
    ],
)
def test_a_launcher_is_known_by_its_command_line(words: list[str], typed: list[str]) -> None:
    assert launcher_command(words) == typed


def test_the_command_to_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands are for plain python, for launch, and for one of srun's several ranks."""
    monkeypatch.setattr(sys, "argv", ["a.py", "--out", "b c", "--stop_at", "2"])
    monkeypatch.setattr(sys, "orig_argv", ["python", *sys.argv])
    monkeypatch.setenv("WORLD_SIZE", "1")
    typed, out = frozenset({"out", "stop_at"}), Path("b c")
    assert continue_command(2, "auto", "b c", typed, out) == "python a.py --out 'b c'"
    assert (
        continue_command(2, "never", "b c", typed, out) == "python a.py --out 'b c' --resume auto"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert continue_command(0, "auto", "", frozenset(), out) == ""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("WANDB_SWEEP_ID", "x")
    assert continue_command(0, "auto", "", frozenset(), out) == "", "its agent decides the folder"
    monkeypatch.delenv("WANDB_SWEEP_ID")
    monkeypatch.setenv(
        continuation.TYPED_COMMAND_VARIABLE,
        json.dumps(["python", "-m", "launch", "a.py", "--out", "x$y"]),
    )
    assert continue_command(0, "auto", "", frozenset(), out) == "python -m launch a.py --out 'x$y'"


def test_numbers_that_are_known_later_join_the_line_of_their_step(tmp_path: Path) -> None:
    """Late numbers also join a line that is still in memory because the disk is full."""
    said: list[str] = []
    with small_disk(tmp_path / "disk", "64k") as disk:
        file = MetricsFile(disk / "metrics.jsonl", said.append)
        file.add('{"step": 1}')
        file.amend('"save_stall_s": 1.5')
        ballast = fill(disk)
        for step in (2, 3):
            file.add(json.dumps({"step": step, "more": "x" * 5000}))
        file.amend('"save_stall_s": 2.5')
        ballast.unlink()
        file.flush()
        file.amend('"save": 1')
        file.close()
        lines = [json.loads(line) for line in (disk / "metrics.jsonl").read_text().splitlines()]
    assert [{key: value for key, value in line.items() if key != "more"} for line in lines] == [
        {"step": 1, "save_stall_s": 1.5},
        {"step": 2},
        {"step": 3, "save_stall_s": 2.5, "save": 1},
    ]
    MetricsFile(tmp_path / "nothing", said.append).amend('"save": 1')
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("length", [6, 2000, 2001, 100_000])
def test_a_thinned_curve_keeps_the_extremes(length: int) -> None:
    values = np.random.default_rng(length).normal(size=length)
    values[length // 3], values[length // 2] = 99.0, -99.0
    (steps, drawn), (middle, means) = envelope(np.arange(1, length + 1, dtype=np.float64), values)
    assert (
        len(drawn) <= 2000
        and (drawn.max(), drawn.min()) == (99.0, -99.0)
        and np.all(np.diff(steps) >= 0)
    )
    assert abs(steps[drawn.argmax()] - length / 3) <= length / 1000 + 1 and len(middle) == len(
        means
    )


def test_100_000_steps_are_drawn_in_three_seconds_with_their_spike(tmp_path: Path) -> None:
    from PIL import Image

    noise = np.random.default_rng(0).normal(size=100_000)
    lines = [
        {
            "step": step + 1,
            "loss": 2 + math.exp(-step / 3e4) + 0.02 * noise[step],
            "lr": 1e-3,
            "grad_norm": 1.0,
            **({"eval_loss": 2.5} if step % 500 == 0 else {}),
        }
        for step in range(100_000)
    ]
    lines[56_788]["loss"] = 9.0
    plot_losses(lines[:10], "warm", tmp_path / "loss.png")
    began = time.process_time()  # CPU time, because the machine may be busy
    plot_losses(lines, "title", tmp_path / "loss.png")
    assert time.process_time() - began < 3
    pixels = np.asarray(Image.open(tmp_path / "loss.png").convert("RGB")).astype(int)
    left, right = (int(pixels.shape[1] * edge) for edge in (0.09, 0.985))
    # The region above every other step, next to the legend.
    panel = pixels[60 : pixels.shape[0] // 4, left + 5 : int(0.8 * right)]
    blue = (panel[:, :, 2] - panel[:, :, 0] > 40).any(axis=0)
    at = (np.flatnonzero(blue) + 5) / (right - left)
    assert len(at) and np.all(abs(at - (0.05 + 56_788 / 100_000) / 1.1) < 0.01), at
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


@pytest.mark.parametrize("fault", ["a folder", "no matplotlib", "no room", "not a number"])
def test_a_picture_that_cannot_be_drawn_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    said: list[str] = []
    lines = lines_of(3.0, 2.0, **({"grad_norm": "broken"} if fault == "not a number" else {}))
    with small_disk(tmp_path / "out", "8k" if fault == "no room" else "8m") as out:
        if fault == "a folder":
            (out / "loss.png").mkdir()
        if fault == "no matplotlib":
            monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        ending.draw_loss_plot(out, lines, FACTS, said.append)
        assert not list(out.glob("*.tmp"))
    assert (
        len(said) == 1
        and said[0].startswith(f"{out}/loss.png: cannot be drawn (")
        and said[0].endswith("The run is complete without it.")
    ), said


@pytest.mark.slow
def test_a_killed_run_has_one_summary_after_its_resume(
    tmp_path: Path, ops: Callable[[str], None]
) -> None:
    """The run is killed with SIGKILL, resumed with --stop_at, and resumed again to the end.

    Only rank 0 writes the plot, and the last line contains the command.
    """
    run = tmp_path / "run"
    flags = [
        "--tiny",
        "--no-wandb",
        "--steps",
        "400",
        "--save_every",
        "5",
        "--eval_every",
        "10",
        "--out",
        str(run),
    ]
    job = Job(tmp_path, deepspeed(NANO, *flags))
    try:
        job.wait_for(lambda: steps_done(run) > 7 and checkpoints(run), 300)
        job.rank(0).send_signal(signal.SIGKILL)
        job.wait_gone(60)
    finally:
        job.close()
    assert not (run / "summary.md").exists() and not (run / "loss.png").exists()
    stop = steps_done(run) + 7
    job = Job(tmp_path, command := deepspeed(NANO, *flags, "--stop_at", stop))
    assert job.wait(300) == 0, job.output
    job.close()
    check_summary(run)
    now = ["deepspeed", *(str(word) for word in command[1:-2])]
    assert (
        f"stopped at step {stop} of 400. Continue with: {' '.join(now)}" in job.output.splitlines()
    )
    first = (run / "loss.png").stat().st_mtime_ns
    job = Job(
        tmp_path,
        [
            str(sys.executable),
            str(NANO),
            *flags[:3],
            "400",
            *flags[4:],
            "--stop_at",
            str(stop + 5),
            "--resume",
            str(run),
        ],
    )
    assert job.wait(300) == 0, job.output
    job.close()
    assert (
        numbers_in(check_summary(run)["steps"])[0] == stop + 5
        and (run / "loss.png").stat().st_mtime_ns > first
    )
    assert last_line(job.output).startswith(
        f"stopped at step {stop + 5} of 400. Continue with: {sys.executable} {NANO} --tiny"
    ), job.output
    assert "--stop_at" not in last_line(job.output) and "--resume" not in last_line(job.output)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_refusal_after_the_first_step_closes_with_the_block(
    tmp_path: Path, ops: Callable[[str], None], ranks: int
) -> None:
    """The shell's limit on file sizes makes the first checkpoint fail."""
    run = tmp_path / "run"
    flags = [
        str(NANO),
        "--tiny",
        "--no-wandb",
        "--steps",
        "9",
        "--stop_at",
        "4",
        "--eval_every",
        "0",
        "--out",
        str(run),
    ]
    argv = [sys.executable, *flags] if ranks == 1 else deepspeed(Path(flags[0]), *flags[1:])
    job = Job(tmp_path, ["bash", "-c", 'ulimit -f 1000; exec "$@"', "bash", *argv])
    code = job.wait(300)
    job.close()
    said = [line.strip() for line in job.output.splitlines()]
    refused = said.index("refused: 1 problem")
    block = [
        line
        for line in said[refused:]
        if re.match(r"(steps|loss|time|speed|memory|refused after)\b", line)
    ]
    assert code == 1 and [line.split()[0] for line in block] == [
        "steps",
        "loss",
        "time",
        "speed",
        "memory",
        "refused",
    ], job.output
    assert block[-1].startswith(
        "refused after step 4 of 9, as said above. No checkpoint is complete yet"
    ), block
    assert table((run / "summary.md").read_text())["steps"].startswith("4 of 9")
    assert os.path.exists(run / "metrics.jsonl")
