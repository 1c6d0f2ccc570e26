"""The converter as users start it: the commands of the pages, exit codes, messages."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from job import metrics
from pool import ROOT, environment, free_port

sys.path.insert(0, str(ROOT / "tools"))

import convert_checkpoint as tool

TOOL = [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py")]


def start(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)


def page_commands() -> list[list[str]]:
    """The four commands of recipes/README.md."""
    text = (ROOT / "recipes" / "README.md").read_text().split("Four commands:")[1].split("The converter works")[0]
    commands = [shlex.split(line.strip()) for line in text.splitlines() if line.startswith("    ")]
    assert [command[0] for command in commands] == ["deepspeed", "deepspeed", "python", "python"]
    return commands


@pytest.fixture(scope="module")
def walked(ops, tmp_path_factory) -> Path:
    """A folder in which the four commands were run, word for word."""
    ops("comm")
    folder = tmp_path_factory.mktemp("walk")
    for name in ("recipes", "ds_configs", "tools"):
        (folder / name).symlink_to(ROOT / name)
    for command in page_commands():
        if command[0] == "deepspeed":
            command = [str(Path(sys.executable).parent / "deepspeed"), "--master_port", str(free_port()), *command[1:]]
        else:
            command = [sys.executable, *command[1:]]
        done = start(command, folder)
        assert done.returncode == 0, done.stdout + done.stderr
        (folder / "last").write_text(done.stdout)
    return folder


def test_the_four_commands_of_the_page(walked: Path) -> None:
    lines = metrics(walked / "runs" / "walk")
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[-1]["loss"] < 0.95 * lines[0]["loss"]  # 20 steps give 0.914 on the sources of Python 3.11.2
    assert "def " in (walked / "last").read_text()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(walked / "runs" / "walk_hf")
    tokenizer = AutoTokenizer.from_pretrained(walked / "runs" / "walk_hf")
    assert model.generate(**tokenizer("import ", return_tensors="pt"), max_new_tokens=4, min_new_tokens=4).shape[1] > 4
    exported = {path.name: path.read_bytes() for path in (walked / "runs" / "walk" / "hf").glob("*.safetensors")}
    assert exported.keys() == {path.name for path in (walked / "runs" / "walk_hf").glob("*.safetensors")}


def test_verify_and_inspect(walked: Path) -> None:
    step = walked / "runs" / "walk" / "checkpoints" / "step_00000020"
    done = start([*TOOL, "verify", str(step)], walked)
    assert done.returncode == 0 and "every file and every tensor is what was saved" in done.stdout
    shown = start([*TOOL, "inspect", str(step)], walked)
    assert shown.returncode == 0 and "dp2, ZeRO-3" in shown.stdout and "model.embed_tokens.weight  [264, " in shown.stdout
    file = next(step.glob("*optim_states.pt"))
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 16
    file.write_bytes(content)
    done = start([*TOOL, "verify", str(step)], walked)
    content[len(content) // 3] ^= 16
    file.write_bytes(content)
    assert done.returncode == 1 and file.name in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["to-hf", "runs/none", "out"], 1, "holds no complete checkpoint"),
        (["to-hf", "runs/walk", "runs/walk_hf"], 1, "already exists"),
        (["reshape", "runs/walk/checkpoints/step_00000020", "out", "--pp", "2"], 1, "use --zero 1, or --pp 1"),
        (["reshape", "runs/walk/checkpoints/step_00000020", "out", "--mem-limit", "3"], 2, "is too little to work in"),
        (["from-hf", "runs", "out"], 1, "has no config.json"),
        (["to-hf", "runs/walk"], 2, "required"),
        (["reshape", "runs/walk/checkpoints/step_00000020", "/proc/out", "--dp", "1"], 1, "/proc"),
    ],
)
def test_bad_input_gets_one_message(
    walked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], code: int, says: str
) -> None:
    monkeypatch.chdir(walked)
    try:
        got = tool.main(words)
    except SystemExit as usage:
        got = usage.code
    assert got == code and says in capsys.readouterr().err
    assert not (walked / "out").exists()


def test_a_dry_run_writes_nothing(walked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(walked)
    assert tool.main(["reshape", "runs/walk", "out", "--dp", "3", "--zero", "2", "--dry-run"]) == 0
    assert "to dp3, ZeRO-2" in capsys.readouterr().out and not list(walked.glob("*out*"))
