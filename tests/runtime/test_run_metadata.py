"""Package versions of earlier starts, which a resume keeps in run.json."""

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from convert_command import convert
from job import metrics
from pool import ROOT, environment, free_port, import_path
from recipekit.hosts.transformers_release import OLDEST_RELEASE
from recipekit.runtime.run_metadata import changed_versions, earlier_versions
from recipekit.spec.run_folder import CHECKPOINTS, EARLIER_VERSIONS, LATEST, METRICS, RUN_JSON
from recipekit.spec.step_names import step_name

OLD, NEW = (
    {"transformers": "5.22.2", "torch": "2.13.0"},
    {"transformers": "5.24.0", "torch": "2.13.0"},
)


def start(out: Path, step: int, versions: dict[str, str]) -> list[dict[str, object]]:
    """Write run.json as a start does, and return its entries."""
    entries = earlier_versions(out, step, versions)
    (out / RUN_JSON).write_text(json.dumps({"versions": versions, "earlier_versions": entries}))
    return entries


def test_a_resume_keeps_the_versions_of_earlier_starts(tmp_path: Path) -> None:
    assert start(tmp_path, 0, OLD) == []
    assert start(tmp_path, 3, OLD) == []
    changed = start(tmp_path, 5, NEW)
    assert changed == [{"until_step": 5, "versions": OLD}]
    assert start(tmp_path, 6, NEW) == changed
    assert start(tmp_path, 7, OLD) == [*changed, {"until_step": 7, "versions": NEW}]


def test_a_start_says_which_versions_changed(tmp_path: Path) -> None:
    start(tmp_path, 0, OLD)
    entries = start(tmp_path, 5, NEW)
    assert changed_versions(entries, NEW, 5) == (
        "note: transformers 5.22.2 until step 5, 5.24.0 from now on"
    )
    assert changed_versions(start(tmp_path, 6, NEW), NEW, 6) == ""
    assert changed_versions([], NEW, 0) == ""


def test_a_damaged_or_new_run_folder_has_no_earlier_versions(tmp_path: Path) -> None:
    assert earlier_versions(tmp_path / "none", 3, NEW) == []
    (tmp_path / RUN_JSON).write_text("{")
    assert earlier_versions(tmp_path, 3, NEW) == []


# tools/releases.py --check installs the oldest release there.
OLDEST = ROOT / ".cache" / "releases" / f"transformers-{OLDEST_RELEASE}"
INSTALLED = version("transformers")
RUNS = {
    "zero2 dp2": ["llama_nano_zero2.py"],
    "zero1 tp2": ["llama_nano_zero2.py", "--deepspeed_config", "zero1.json", "--tp", 2],
    "zero1 pp2": ["llama_nano_zero2.py", "--deepspeed_config", "zero1.json", "--pp", 2],
}
STEPS = 4
SAVED = 2  # the step of the checkpoint that the other release resumes


@pytest.fixture
def oldest() -> Path:
    """Return the folder of the oldest supported transformers."""
    if not OLDEST.exists():
        pytest.skip(f"needs transformers {OLDEST_RELEASE}: run python tools/releases.py --check")
    if INSTALLED == OLDEST_RELEASE:
        pytest.skip(f"needs another transformers than {OLDEST_RELEASE} in this session")
    return OLDEST


def train(out: Path, name: str, *flags: str, packages: tuple[Path, ...] = ()) -> None:
    """Train on two ranks, or resume the run in `out`, with `packages` before the installed ones."""
    recipe, *more = RUNS[name]
    numbers = ["--steps", STEPS, "--warmup_steps", 1, "--save_every", SAVED, "--keep", STEPS]
    rest = ["--eval_every", 0, "--no-wandb", "--no-export", "--out", out]
    words = [ROOT / "recipes" / recipe, *more, "--tiny", *numbers, *rest, *flags]
    env = environment() | {
        "PYTHONPATH": import_path(*packages),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=out.parent,
            env=env | {"RANK": number, "LOCAL_RANK": number},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in ("0", "1")
    ]
    try:
        texts = [rank.communicate(timeout=900)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], texts[0][-4000:]


def cut_after_save(run: Path) -> None:
    """Bring a finished run to its state after the step SAVED."""
    shutil.rmtree(run / CHECKPOINTS / step_name(STEPS))
    (run / CHECKPOINTS / LATEST).write_text(step_name(SAVED))
    lines = (run / METRICS).read_text().splitlines(keepends=True)
    (run / METRICS).write_text("".join(lines[:SAVED]))


def releases_of(run: Path) -> list[tuple[int, str]]:
    """Return (last step, release of transformers) of each start with another release."""
    written: dict[str, Any] = json.loads((run / RUN_JSON).read_text())
    earlier = [
        (entry["until_step"], entry["versions"]["transformers"])
        for entry in written.get(EARLIER_VERSIONS, [])
    ]
    return [*earlier, (STEPS, written["versions"]["transformers"])]


def curve(run: Path) -> list[float]:
    """Return the loss and the gradient norm of each step."""
    lines = metrics(run)
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    return [line[key] for line in lines for key in ("loss", "grad_norm")]


def forbid_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands find a transformers that cannot be imported."""
    (folder / "broken" / "transformers").mkdir(parents=True)
    (folder / "broken" / "transformers" / "__init__.py").write_text("raise ImportError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(folder / "broken"))


def check_conversions(run: Path, made: Path) -> None:
    """Inspect and convert the checkpoints of a run that two releases of transformers saved."""
    for step in (SAVED, STEPS):
        shown = convert("inspect", run / CHECKPOINTS / step_name(step))
        assert shown.startswith(f"step     {step},"), shown
    convert("to-hf", run, made / "hf", "--verify")
    degrees = ["--tp", 1, "--pp", 1, "--dp", 1]
    convert("reshape", run / CHECKPOINTS / step_name(SAVED), made / "reshaped", *degrees)
    convert("verify", made / "reshaped")
    assert (made / "hf" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes_under_another_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oldest: Path, name: str
) -> None:
    """The oldest and the installed transformers resume each other's checkpoints.

    The losses equal the losses of a run with one release. The converter needs neither release.
    """
    whole, up, down = (tmp_path / folder for folder in ("whole", "up", "down"))
    train(whole, name)
    shutil.copytree(whole, down)
    cut_after_save(down)
    train(down, name, packages=(oldest,))
    train(up, name, "--stop_at", str(SAVED), packages=(oldest,))
    train(up, name)

    assert releases_of(whole) == [(STEPS, INSTALLED)]
    assert releases_of(down) == [(SAVED, INSTALLED), (STEPS, OLDEST_RELEASE)]
    assert releases_of(up) == [(SAVED, OLDEST_RELEASE), (STEPS, INSTALLED)]
    deviations = [
        max(abs(now / was - 1) for now, was in zip(curve(run), curve(whole), strict=True))
        for run in (up, down)
    ]
    print(f"{name}: largest relative deviations {deviations}")
    assert max(deviations) <= 1e-6
    forbid_transformers(tmp_path, monkeypatch)
    for run in (up, down):
        check_conversions(run, tmp_path / f"{run.name}_converted")
