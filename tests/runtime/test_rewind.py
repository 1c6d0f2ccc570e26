"""Rewinds: the run equals one that was started with --leave_out, also if it is killed meanwhile."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from job import metrics, reproducible_values
from recipekit.plan import resolve_run
from recipekit.runtime.rewind import entries_after
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from short_runs import BASE, train

slow = pytest.mark.slow
STEPS = 16
# The batches 12 and 13 are bad. The checkpoint of step 12 is from the middle of the spike, so the
# run goes back to step 8. It leaves out the batches of steps 9 to 16.
BAD = (12, 13)
SHORT = replace(
    BASE, steps=STEPS, eval_every=0, global_batch=2, lr=1e-4, save_every=4, on_spike="rewind"
)
MIXTURE = {"global_batch": 2, "batch_ramp": "7:4, 14:6"}


def train_on_bad_batches(
    recipe: Recipe, bad: tuple[int, ...], killed_at: str = "", factor: float = 10
) -> tuple[int | str, str]:
    """Train on a rank of a pool, with `factor` times the loss on some batches of the plain stream.

    `bad` contains the number of rows that the stream has dealt at the end of each bad batch. The
    finders judge after 6 steps. `killed_at` is the call in which a rewind ends the process.
    """
    from recipekit import train as loop
    from recipekit.runtime import rewind
    from recipekit.spec.errors import config_error
    from recipekit.tasks.find import load_task
    from recipekit.track.tracking import Tracker
    from recipekit.watch.outliers import Outliers

    dealt = [0]
    read = loop.read_step_data

    def read_and_count(run: Any, step: int) -> Any:
        data = read(run, step)
        domains: Any = data.state["domains"].values()
        dealt[0] = sum(places["given"]["rows"] for places in domains)
        return data

    def load(name: str) -> Any:
        task = load_task(name)

        def loss(output: Any, batch: Any, by_row: bool) -> Any:
            return (factor if dealt[0] in bad else 1) * task.loss(output, batch, by_row)

        return replace(task, loss=loss)

    def kill(*args: object) -> None:
        raise config_error("killed", f"in {killed_at}", "start again")

    replaced: list[tuple[Any, str, Any]] = [
        (loop, "load_task", load),
        (loop, "read_step_data", read_and_count),
        (Outliers, "LEAST", 6),
    ]
    if killed_at == "go_back":
        replaced.append((Tracker, killed_at, kill))
    elif hasattr(rewind, killed_at):
        replaced.append((rewind, killed_at, kill))
    # The start of a run calls the same functions of these modules.
    for name in ("save", "load"):
        module = getattr(rewind, name)
        if hasattr(module, killed_at):
            functions = SimpleNamespace(**{**vars(module), killed_at: kill})
            replaced.append((rewind, name, functions))
    assert len(replaced) == (4 if killed_at else 3)
    before = [(place, name, getattr(place, name)) for place, name, _ in replaced]
    for place, name, value in replaced:
        setattr(place, name, value)
    try:
        return train(recipe, [])
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def end_of(out: Path) -> tuple[Any, Any]:
    """Return the digests of the last checkpoint's tensors, and the state of its stream."""
    step = out / "checkpoints" / f"step_{STEPS:08d}"
    manifest, state = (json.loads((step / name).read_text()) for name in NAMES)
    return manifest["tensors"], state["data"]


NAMES = ("manifest.json", "state.json")


def mixture(folder: Path) -> str:
    """Return a mixture of two corpora, whose weights change while batches are left out."""
    for name in ("one", "two"):
        rows = [json.dumps({"text": f"{name} {number} " * 9}) for number in range(400)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return f"one={folder / 'one.jsonl'}@60|11:20; two={folder / 'two.jsonl'}@40"


CASES = [
    pytest.param({"ds_config": "zero3.json"}, id="zero3", marks=slow),
    pytest.param({"ds_config": "zero1.json", **MIXTURE}, id="zero1 mixture ramp"),
    pytest.param({"ds_config": "zero1.json", "pp": 2}, id="zero1 pp2", marks=slow),
    pytest.param(
        {"ds_config": "zero2.json", "save_in_background": True},
        id="zero2, saves in the background",
        marks=slow,
    ),
    pytest.param({"ds_config": "zero2_cpu.json"}, id="zero2 optimizer on the CPU", marks=slow),
    pytest.param({"engine": "ddp", "ds_config": {}, "precision": "bf16"}, id="ddp", marks=slow),
    pytest.param({"engine": "fsdp2", "ds_config": {}, "precision": "bf16"}, id="fsdp2", marks=slow),
]


@pytest.mark.parametrize("layout", CASES)
def test_a_rewound_run_is_the_run_that_leaves_the_batches_out(
    pools: Any, ops: Callable[[str], None], tmp_path: Path, layout: dict[str, Any]
) -> None:
    if layout.get("ds_config") == "zero2_cpu.json":
        ops("cpu_adam")
    recipe = replace(SHORT, **layout)
    if layout.get("batch_ramp"):
        recipe = replace(recipe, dataset=mixture(tmp_path))
    bad = tuple(recipe.ramp.total(batch) for batch in BAD)

    out = tmp_path / "rewound"
    rewinding = replace(recipe, out=str(out))
    results = pools.run(2, train_on_bad_batches, recipe=rewinding, bad=bad)
    assert [code for code, _ in results] == [0, 0], results
    (alert,) = map(json.loads, (out / "alerts.jsonl").read_text().splitlines())
    assert (alert["step"], alert["kind"], alert["answer"]) == (13, "spike", "rewind")
    assert alert["leave_out"] == "9:8" and "goes back to step 8" in alert["text"]
    assert [line["step"] for line in metrics(out)] == [*range(1, STEPS + 1)]

    plain = tmp_path / "plain"
    leaving = replace(recipe, out=str(plain), leave_out="9:8", on_spike="stop")
    results = pools.run(2, train_on_bad_batches, recipe=leaving, bad=bad)
    assert [code for code, _ in results] == [0, 0], results
    assert reproducible_values(metrics(out)) == reproducible_values(metrics(plain))
    assert end_of(out) == end_of(plain)
    assert end_of(out)[1]["identity"]["leave_out"] == [[9, 8]]


@pytest.fixture(scope="module")
def unbroken(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that was started with the batches in --leave_out."""
    out = tmp_path_factory.mktemp("rewind") / "unbroken"
    recipe = replace(SHORT, out=str(out), leave_out="9:8")
    results = pools.run(2, train_on_bad_batches, recipe=recipe, bad=())
    assert [code for code, _ in results] == [0, 0], results
    return out


@slow
def test_a_run_that_is_killed_in_its_rewind_ends_alike(
    pools: Any, tmp_path: Path, unbroken: Path
) -> None:
    """The same command is started again after each kill. Each start meets the spike, if needed."""
    out = tmp_path / "run"
    recipe, bad = replace(SHORT, out=str(out)), tuple(2 * batch for batch in BAD)
    for killed_at, resumed in (
        ("set_aside_later_steps", 12),
        ("write_rewinds", 8),
        ("go_back", 8),
        ("load_checkpoint", 8),
    ):
        # The next start no longer meets the spike once the file of the rewinds is written.
        results = pools.run(2, train_on_bad_batches, recipe=recipe, bad=bad, killed_at=killed_at)
        assert all(f"killed: in {killed_at}" in str(code) for code, _ in results), results
        steps = sorted(path.name for path in (out / "checkpoints").glob("step_*[0-9]"))
        assert steps[-1] == f"step_{resumed:08d}"
        if killed_at in ("go_back", "load_checkpoint"):
            (out / "rewinds.json").unlink()
    results = pools.run(
        2, train_on_bad_batches, recipe=recipe, bad=bad, killed_at="open_stream_at_state"
    )
    assert all("killed: in open_stream_at_state" in str(code) for code, _ in results), results
    results = pools.run(2, train_on_bad_batches, recipe=recipe, bad=bad)
    assert [code for code, _ in results] == [0, 0], results
    assert "rewinds have left out, as by --leave_out: 9:8" in results[0][1]
    assert reproducible_values(metrics(out)) == reproducible_values(metrics(unbroken))
    assert end_of(out) == end_of(unbroken)

    # A typed table contains all batches, so no batch is left out twice.
    other = tmp_path / "other"
    step = out / "checkpoints" / "step_00000012"
    typed = replace(recipe, out=str(other), resume=str(step), leave_out="9:8")
    results = pools.run(2, train_on_bad_batches, recipe=typed, bad=bad)
    assert [code for code, _ in results] == [0, 0], results
    assert reproducible_values(metrics(other)) == reproducible_values(metrics(unbroken))[12:]
    assert end_of(other) == end_of(unbroken)


def test_three_rewinds_to_a_checkpoint_end_the_run(pools: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    recipe, bad = replace(SHORT, out=str(out)), tuple(range(24, 1000, 2))
    results = pools.run(2, train_on_bad_batches, recipe=recipe, bad=bad)
    assert [code for code, _ in results] == [1, 1], results
    assert "3 rewinds to step 8 did not help" in results[0][1]
    alerts = [json.loads(line) for line in (out / "alerts.jsonl").read_text().splitlines()]
    assert [alert["answer"] for alert in alerts] == ["rewind"] * 3 + ["stop"]
    assert alerts[2]["leave_out"] == "9:8, 9:8, 9:8"
    assert [alert["step"] for alert in alerts] == [13, 10, 10, 10]
    again = pools.run(2, train_on_bad_batches, recipe=recipe, bad=bad)
    assert "stopped itself at step 10" in str(again[0][0])


def test_a_spike_before_the_first_checkpoint_ends_the_run(pools: Any, tmp_path: Path) -> None:
    recipe = replace(SHORT, out=str(tmp_path / "run"), save_every=14)
    results = pools.run(2, train_on_bad_batches, recipe=recipe, bad=(24, 26))
    assert results[0][0] == 1, results
    assert "There is no complete checkpoint before step 12" in results[0][1]


def test_a_loss_that_is_not_finite_rewinds_the_run(pools: Any, tmp_path: Path) -> None:
    recipe = replace(SHORT, on_spike="alert", on_nonfinite="rewind", ds_config="zero2.json")
    rewinding = replace(recipe, out=str(tmp_path / "rewound"))
    nan = float("nan")
    results = pools.run(2, train_on_bad_batches, recipe=rewinding, bad=(24,), factor=nan)
    assert [code for code, _ in results] == [0, 0], results
    lines = (tmp_path / "rewound" / "alerts.jsonl").read_text().splitlines()
    (alert,) = map(json.loads, lines)
    assert (alert["kind"], alert["answer"], alert["leave_out"]) == ("nonfinite", "rewind", "9:8")

    plain = replace(recipe, leave_out=alert["leave_out"], out=str(tmp_path / "plain"))
    results = pools.run(2, train_on_bad_batches, recipe=plain, bad=(24,), factor=nan)
    assert [code for code, _ in results] == [0, 0], results
    assert reproducible_values(metrics(tmp_path / "rewound")) == reproducible_values(
        metrics(tmp_path / "plain")
    )


def entries(typed: str, before: list[list[int]], spike: int, position: int = 40) -> list[list[int]]:
    plan: Any = SimpleNamespace(recipe=replace(BASE, leave_out=typed, steps=1000))
    now: Any = {"left_out": before}
    saved: Any = {"step": 40, "data": {"step": position}}
    return entries_after(plan, now, saved, spike)


def test_the_batches_that_a_rewind_leaves_out() -> None:
    # From step 41 to 50 steps past the spike in step 45
    assert entries("", [], 45) == [[41, 55]]
    # No step after the end of the run takes a batch.
    assert entries("", [], 980) == [[41, 960]]
    # The stream of other data began at another step than the run.
    assert entries("", [], 45, position=7) == [[8, 55]]
    # Entries of step 41 still apply before the new one. The batches that were passed over later
    # are left out with those around them.
    assert entries("41:3, 60:4, 200:9", [[20, 2], [41, 5], [70, 6]], 45) == [
        [20, 2],
        [41, 5],
        [41, 55 + 4 + 6],
    ]


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"save_every": 0}, "on_spike = rewind with save_every = 0: requires checkpoints"),
        ({"keep": 1}, "on_spike = rewind with keep = 1: the only checkpoint that is kept"),
        ({"ds_config": "zero3_nvme.json"}, "cannot be combined with NVMe offload"),
        ({"task": "preference"}, "cannot be combined with DPO"),
        ({"ep": 2, "model": "Qwen/Qwen3-30B-A3B"}, "cannot be combined with ep = 2"),
        ({"watch": False}, "requires the watch"),
    ],
)
def test_runs_that_cannot_go_back_are_refused(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], rule: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    recipe = replace(BASE, **{"save_every": 4, "on_spike": "rewind", **fields})
    with pytest.raises(ConfigError, match=rule):
        resolve_run(parse(recipe, Path("rewind.py"), ["--tiny"]))
