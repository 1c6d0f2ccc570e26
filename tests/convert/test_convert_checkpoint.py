"""The converter's command line: the documented commands, the exit codes and the messages."""

import errno
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job import metrics
from pool import ROOT, environment, free_port
from recipekit.commands import convert as tool
from recipekit.storage import journal
from short_runs import BASE, train

TOOL = [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py")]


def start(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300
    )


def page_commands() -> list[list[str]]:
    """Return the four commands of recipes/CHECKPOINTS.md."""
    text = (
        (ROOT / "recipes" / "CHECKPOINTS.md")
        .read_text()
        .split("These four commands")[1]
        .split("The first two commands")[0]
        .replace("\\\n", "")
    )
    commands = [shlex.split(line.strip()) for line in text.splitlines() if line.startswith("    ")]
    assert [command[0] for command in commands] == ["deepspeed", "deepspeed", "python", "python"]
    return commands


@pytest.fixture(scope="module")
def trained(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of two steps in runs/walk, and an existing runs/walk_hf."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = replace(
        BASE, ds_config="zero3.json", steps=2, warmup_steps=0, eval_every=0, save_every=0
    )
    results = pools.run(2, train, recipe=recipe, argv=["--out", str(folder / "runs" / "walk")])
    assert [result for result, _ in results] == [0, 0], results
    (folder / "runs" / "walk_hf").mkdir()
    return folder


@pytest.mark.slow
def test_the_four_commands_of_the_page(ops: Any, tmp_path: Path) -> None:
    """The commands are run word for word, and their results must agree with the page."""
    for name in ("recipes", "ds_configs", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    for command in page_commands():
        if command[0] == "deepspeed":
            command = [
                str(Path(sys.executable).parent / "deepspeed"),
                "--master_port",
                str(free_port()),
                *command[1:],
            ]
        else:
            command = [sys.executable, *command[1:]]
        done = start(command, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    lines = metrics(tmp_path / "runs" / "walk")
    assert [line["step"] for line in lines] == list(range(1, 21))
    # 20 steps give a ratio of 0.914 on the sources of Python 3.11.2.
    assert lines[-1]["loss"] < 0.95 * lines[0]["loss"]
    assert "def " in done.stdout
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "walk_hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "runs" / "walk_hf")
    assert (
        model.generate(
            **tokenizer("import ", return_tensors="pt"), max_new_tokens=4, min_new_tokens=4
        ).shape[1]
        > 4
    )
    exported = {
        path.name: path.read_bytes()
        for path in (tmp_path / "runs" / "walk" / "hf").glob("*.safetensors")
    }
    assert exported.keys() == {
        path.name for path in (tmp_path / "runs" / "walk_hf").glob("*.safetensors")
    }


def test_verify_and_inspect(trained: Path) -> None:
    step = trained / "runs" / "walk" / "checkpoints" / "step_00000002"
    done = start([*TOOL, "verify", str(step)], trained)
    assert (
        done.returncode == 0
        and "every file and every tensor matches the manifest of the save" in done.stdout
    )
    shown = start([*TOOL, "inspect", str(step)], trained)
    assert (
        shown.returncode == 0
        and "dp2, ZeRO-3" in shown.stdout
        and "model.embed_tokens.weight  [264, " in shown.stdout
    )
    file = next(step.glob("*optim_states.pt"))
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 16
    file.write_bytes(content)
    done = start([*TOOL, "verify", str(step)], trained)
    content[len(content) // 3] ^= 16
    file.write_bytes(content)
    assert done.returncode == 1 and file.name in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (
            ["to-hf", "runs/none", "out"],
            1,
            "runs/none: the folder does not exist. Name a run folder",
        ),
        (["to-hf", "runs/walk", "runs/walk_hf"], 1, "already exists"),
        (
            ["reshape", "runs/walk/checkpoints/step_00000002", "out", "--pp", "2"],
            1,
            "Use --zero 1, or --pp 1",
        ),
        (
            ["reshape", "runs/walk/checkpoints/step_00000002", "out", "--mem-limit", "3"],
            2,
            "is too small",
        ),
        (["to-hf", "runs", "out"], 1, "contains no complete checkpoint"),
        (["from-hf", "runs", "out"], 1, "the folder contains no config.json"),
        (["to-hf", "runs/walk"], 2, "required"),
        (["reshape", "runs/walk/checkpoints/step_00000002", "/proc/out", "--dp", "1"], 1, "/proc"),
    ],
)
def test_bad_input_gets_one_message(
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(trained)
    try:
        got = tool.main(words)
    except SystemExit as usage:
        got = usage.code
    assert got == code and says in capsys.readouterr().err
    assert not (trained / "out").exists()


@pytest.mark.parametrize("when", ["writing", "at the end"])
def test_a_disk_with_an_error(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    when: str,
) -> None:
    """Finished work may be trusted after a failed write, but not after a failed fsync.

    After a failed fsync the kernel drops the data, and the next fsync reports no error.
    """
    words = ["to-hf", str(trained / "runs" / "walk"), str(tmp_path / "out")]
    broken = "pwrite" if when == "writing" else "fsync"

    def failing(*values: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, broken, failing)
        assert tool.main(words) == 1
    (told,) = capsys.readouterr().err.splitlines()
    kept = "Run the same command again to continue. Finished work is kept"
    assert (
        f"{tmp_path}/.out.part/model.safetensors: Input/output error. " in told
        and told.endswith(kept if when == "writing" else "free. Run the same command again")
    )
    assert not (tmp_path / "out").exists() and journal.journal_file(tmp_path / "out").exists() == (
        when == "writing"
    )
    assert (
        tool.main([*words, "--verify"]) == 0 and (tmp_path / "out" / "model.safetensors").exists()
    )


def test_a_tensor_parallel_degree_divides_the_heads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step folder with an invalid degree would be rejected by every recipe."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    assert tool.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "step")]) == 0
    for command, source in (("from-hf", "hf"), ("reshape", "step")):
        words = [command, str(tmp_path / source), str(tmp_path / "out"), "--dry-run", "--tp"]
        assert tool.main([*words, "3"]) == 0
        capsys.readouterr()
        assert tool.main([*words, "4"]) == 1
        told = (
            "tp = 4: does not divide the model's 6 attention heads, 6 key-value heads. Use --tp 1"
            " or 2 or 3\n"
        )
        assert capsys.readouterr().err == told, command


def test_a_dry_run_writes_nothing(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained)
    assert tool.main(["reshape", "runs/walk", "out", "--dp", "3", "--zero", "2", "--dry-run"]) == 0
    assert "to dp3, ZeRO-2" in capsys.readouterr().out and not list(trained.glob("*out*"))


EXTRAS = {
    "rotary frequencies": [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.1.self_attn.rotary_emb.inv_freq",
    ],
    "attention masks": ["model.layers.0.self_attn.bias", "model.layers.0.self_attn.masked_bias"],
    "a value head": ["v_head.summary.weight", "v_head.summary.bias"],
    "a pooler": ["pooler.dense.weight"],
}


@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
def test_tensors_that_the_model_does_not_have_are_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str]
) -> None:
    """from-hf and to-hf keep all of the model's tensors, small files and template folder."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    own = load_file(tmp_path / "hf" / "model.safetensors")
    save_file(
        own | {key: torch.ones(3) for key in extra},
        tmp_path / "hf" / "model.safetensors",
        metadata={"format": "pt"},
    )
    (tmp_path / "hf" / "generation_config.json").write_text(
        '{"eos_token_id": [3, 4], "of_a_server": 1}'
    )
    (tmp_path / "hf" / "additional_chat_templates").mkdir()
    (tmp_path / "hf" / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    assert tool.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "step")]) == 0
    assert (
        tool.main(
            ["reshape", str(tmp_path / "step"), str(tmp_path / "wide"), "--dp", "2", "--zero", "1"]
        )
        == 0
    )
    assert tool.main(["verify", str(tmp_path / "wide")]) == 0
    capsys.readouterr()
    assert tool.main(["to-hf", str(tmp_path / "wide"), str(tmp_path / "back"), "--verify"]) == 0
    assert capsys.readouterr().out.count(f"not written: {len(extra)} tensor") == 1
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == own.keys() and all(torch.equal(found[key], own[key]) for key in own)
    for name in ("generation_config.json", "config.json", "additional_chat_templates/rag.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
