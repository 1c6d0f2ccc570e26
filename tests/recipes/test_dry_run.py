"""Dry runs: config errors that need no torch, and the output."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dry_runs import planned, refused
from pool import ROOT, environment, import_path
from recipekit.architectures.safetensors_files import create_zero_file
from recipekit.spec import hub
from recipekit.spec.errors import ConfigError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 264,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
LAYER = {
    "input_layernorm.weight": (16,),
    "post_attention_layernorm.weight": (16,),
    "self_attn.q_proj.weight": (16, 16),
    "self_attn.k_proj.weight": (8, 16),
    "self_attn.v_proj.weight": (8, 16),
    "self_attn.o_proj.weight": (16, 16),
    "mlp.gate_proj.weight": (24, 16),
    "mlp.up_proj.weight": (24, 16),
    "mlp.down_proj.weight": (16, 24),
}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "base")
    (tmp_path / "docs.jsonl").write_text(json.dumps({"text": "a fox ran"}) + "\n")
    return tmp_path


def write_model(path: Path, **changes: Any) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    layers = {
        f"model.layers.{number}.{name}": shape
        for number in range(2)
        for name, shape in LAYER.items()
    }
    shapes = {"model.embed_tokens.weight": (264, 16), "model.norm.weight": (16,), **layers}
    create_zero_file(
        path, "model.safetensors", {name: ("F32", shape) for name, shape in shapes.items()}
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--model {0} --tokenizer {0}",
            "model = {0}: without weights and tokenizer. Use --init random --tokenizer bytes",
        ),
        ("--model {0}", "model = {0}: without weights. Use --init random"),
        (
            "--model {0} --init random --tokenizer {0}",
            "tokenizer = {0}: without tokenizer. Use --tokenizer bytes",
        ),
        ("--tokenizer {0}", "tokenizer = {0}: without tokenizer. Use --tokenizer bytes"),
    ],
)
def test_a_model_that_only_this_repository_has_is_refused_as_at_the_start(
    words: str, said: str
) -> None:
    """The model's name looks like a hub id, but there is nothing to download."""
    words, (where, _, rest) = (
        words.format("recipekit/llama-nano"),
        said.format("recipekit/llama-nano").partition(": "),
    )
    wanted = f"{where}: has only a config.json in this repository, {rest}"
    assert refused("--dry_run", *words.split()) == wanted
    assert refused(*words.split()) == wanted
    planned(
        "--dry_run", "--model", "recipekit/llama-nano", "--init", "random", "--tokenizer", "bytes"
    )
    planned("--dry_run", "--model", "recipekit/llama-nano", "--tiny")


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (
            {"hidden_size": 32},
            "model.embed_tokens.weight is [264, 16] in its files but [264, 32] in its config.json",
        ),
        (
            {"vocab_size": 300},
            "model.embed_tokens.weight is [264, 16] in its files but [300, 16] in its config.json",
        ),
        (
            {"intermediate_size": 32},
            (
                "model.layers.0.mlp.down_proj.weight is [16, 24] in its files but [16, 32] in its"
                " config.json"
            ),
        ),
        (
            {"num_key_value_heads": 2},
            (
                "model.layers.0.self_attn.k_proj.weight is [8, 16] in its files but [16, 16] in its"
                " config.json"
            ),
        ),
        (
            {"num_attention_heads": 4},
            (
                "model.layers.0.self_attn.q_proj.weight is [16, 16] in its files but [32, 16] in"
                " its config.json"
            ),
        ),
        (
            {"num_hidden_layers": 6},
            "its files contain 2 layers in model.layers, but its config.json specifies 6",
        ),
        (
            {"num_hidden_layers": 1},
            "its files contain 2 layers in model.layers, but its config.json specifies 1",
        ),
    ],
    ids=str,
)
def test_files_of_another_shape_are_refused_by_plan_and_start(
    folder: Path, changes: dict[str, int], rule: str
) -> None:
    write_model(folder / "m", **changes)
    found = refused("--dry_run", "--model", "./m")
    assert found.startswith(f"model = ./m: {rule}. ")
    assert refused("--model", "./m") == found
    assert refused("--model", "./m", "--tokenizer", "bytes", "--init", "pretrained") == found
    assert planned("--model", "./m", "--init", "random"), "whose files are not read"


def test_a_refused_question_takes_no_torch(folder: Path) -> None:
    """Wrong models, tokenizers and data are rejected in one process."""
    for name, changes in {
        "m_shape": {"hidden_size": 32},
        "m_layers": {"num_hidden_layers": 4},
    }.items():
        write_model(folder / name, **changes)
    write_model(folder / "m_tok")
    (folder / "m_tok" / "tokenizer.json").touch()
    (folder / "empty.txt").touch()
    (folder / "blank.jsonl").write_text('{"text": ""}\n')
    flags = [
        "--model ./m_shape",
        "--model ./m_layers",
        "--model ./m_tok --tokenizer ./m_tok",
        "--dataset empty.txt",
        "--dataset blank.jsonl",
        "--model ./gone",
    ]
    code = (
        "import sys\nfrom dry_runs import refused\nfor words in sys.argv[1:]:\n   "
        " print(refused('--dry_run', *words.split()))\n"
    )
    code += "assert not {'torch', 'transformers', 'datasets'} & sys.modules.keys()\n"
    more = {
        "PYTHONPATH": import_path(
            Path(__file__).parent, ROOT / "recipes", ROOT / "tests" / "support"
        )
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *flags],
        env=environment() | more,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
    )
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(flags), done.stderr


@pytest.mark.parametrize("name", ["models/llama", "llama", "meta-llama/Llama-9"])
@pytest.mark.parametrize("offline", ["", "1"])
def test_a_model_that_is_nowhere_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, offline: str
) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", bool(offline))
    # The discard port, on which nothing listens.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    hub.hub_is_unreachable.cache_clear()
    found = refused("--dry_run", "--model", name)
    why = "HF_HUB_OFFLINE prevents a download" if offline else "the hub cannot be reached"
    assert found.startswith(
        f"model = {name}: the folder does not exist, the model is not in the cache"
        f" {hub.cache_folder()}, and {why}. Check the path, or "
    )


def test_a_model_of_the_hub_is_planned_by_its_config_alone(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    from fake_hub import serve
    from huggingface_hub import constants

    with serve() as server:
        server.commit(
            "models/org/tiny",
            {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"never asked for"},
            "main",
        )
        monkeypatch.setenv("HF_HUB_OFFLINE", "")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        )
        hub.hub_is_unreachable.cache_clear()
        plan = planned("--dry_run", "--model", "org/tiny")
        assert plan.model_config == CONFIG
        rule = (
            "the folder does not exist, and https://huggingface.co/org/other does not exist or is"
            " private"
        )
        assert (
            refused("--dry_run", "--model", "org/other")
            == f"model = org/other: {rule}. Check the path or the name, or log in with: hf auth"
            " login"
        )
    assert not (folder / "cache").exists(), "the question changes nothing"


def write_run(out: Path, **numbers: Any) -> None:
    out.mkdir(parents=True)
    (out / "run.json").write_text(
        json.dumps({"identity": {"model": "./base"} | numbers, "recipe": {"tiny": False}})
    )


@pytest.mark.parametrize(
    "words", ["--lr 3e-4", "--seq_len 32", "--tiny --tp 1", "--dataset other.jsonl"]
)
def test_a_dry_run_ignores_an_older_run(folder: Path, words: str) -> None:
    (folder / "other.jsonl").write_text(json.dumps({"text": "another fox"}) + "\n")
    write_run(folder / "run", lr=1e-3)
    plan = planned("--dry_run", "--out", "run", *words.split())
    start = [
        note
        for note in plan.notes
        if note.startswith("a start will be refused while run holds this run: ")
    ]
    with pytest.raises(ConfigError) as refusal:
        planned("--out", "run", *words.split())
    assert plan.resume_from is None and start[0].endswith(str(refusal.value.problems[0]))
    assert not [
        note
        for note in planned("--dry_run", "--out", "other", *words.split()).notes
        if "a start will be refused" in note
    ]


def test_a_dry_run_ignores_damaged_runs(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "run.json").touch()
    assert "run/run.json: is damaged" in planned("--dry_run", "--out", "run").notes[-1]
    (folder / "odd" / "step_00000002").mkdir(parents=True)
    assert planned("--dry_run", "--out", "odd").resume_from is None


@pytest.mark.parametrize("out", ["/proc/x", "/proc/x/y", "/sys/x"])
def test_a_run_folder_that_cannot_be_written_is_refused(folder: Path, out: str) -> None:
    from recipekit.run import _lock_run_folder

    with pytest.raises(ConfigError) as start:
        _lock_run_folder(Path(out))
    assert refused("--dry_run", "--out", out) == str(
        start.value
    ) and f"out = {out}: cannot be written: " in str(start.value)
    before = sorted(folder.iterdir())
    planned("--dry_run", "--out", "new/run")
    assert sorted(folder.iterdir()) == before


def test_the_json_is_printed_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    from recipekit.planner.dry_run import print_dry_run

    print_dry_run(planned("--dry_run"))
    plain = capsys.readouterr().out
    assert (
        "{" not in plain
        and "JSON     " in plain
        and "zero2.json; --show json prints it as resolved\n" in plain
    )
    print_dry_run(planned("--dry_run", "--show", "json"))
    printed = capsys.readouterr().out
    text = printed[printed.index("{\n") : printed.rindex("\n}\n") + 2]
    assert json.loads(text)["train_batch_size"] == 4 and '"auto"' not in text
    print_dry_run(planned("--dry_run", "--engine", "ddp", "--show", "json"))
    assert '"train_batch_size": 4' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "epochs"),
    [("--steps 2", "this run is 0.80 epochs"), ("--epochs 2", "epochs: 2 = 5 steps")],
)
def test_a_dry_run_counts_local_data(
    folder: Path, capsys: pytest.CaptureFixture[str], words: str, epochs: str
) -> None:
    """Five documents have two rows each, so one epoch has 2.5 steps of four rows."""
    from recipekit.run import _dry_run

    text = "a" * 127  # with the end token these are two rows of 64
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(5)))
    _dry_run(planned("--dry_run", *words.split()))
    printed = capsys.readouterr().out
    assert (
        "5 documents, 640 tokens, 10 rows of 64, 0 rows skipped; one epoch is 2.5 steps" in printed
        and epochs in printed
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--show json", "requires --dry_run"),
        ("--dry_run --show yaml", "Use --show json"),
        ("--dry_run --show", "requires a value"),
    ],
)
def test_show_is_json_of_a_dry_run(words: str, says: str) -> None:
    assert says in refused(*words.split())
