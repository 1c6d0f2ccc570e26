"""recipekit sample: the text that plain transformers and peft generate, or a one-line error."""

import contextlib
import fcntl
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from recipekit.architectures.export_folder import find_export
from recipekit.commands.sample import generate_sample, load_generator, main
from recipekit.data.processors import byte_tokenizer
from recipekit.spec.run_folder import RUN_JSON
from recipekit.spec.step_names import MANIFEST
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
)

END = byte_tokenizer().eos_token_id
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 264,
    "max_position_embeddings": 96,
}
SIZES |= {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16, "n_positions": 96}
SIZES |= {"bos_token_id": byte_tokenizer().bos_token_id, "eos_token_id": END, "pad_token_id": None}


def small(kind: str, auto_class: Any = AutoModelForCausalLM, **more: Any) -> Any:
    torch.manual_seed(3)
    model = auto_class.from_config(AutoConfig.for_model(kind, **(SIZES | more)))
    for parameter in model.parameters():
        # With other weights the model would repeat its first token.
        parameter.data.mul_(12 if parameter.dim() > 1 else 1)
    return model


def saved(
    folder: Path,
    kind: str = "llama",
    auto_class: Any = AutoModelForCausalLM,
    chat: bool = False,
    **more: Any,
) -> Path:
    small(kind, auto_class, **more).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    if not chat:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


def run_of(folder: Path, task: str = "pretrain") -> Path:
    """Write a run folder that contains only a run.json; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_JSON).write_text(json.dumps({"identity": {}, "recipe": {"task": task}}))
    return folder


def checkpoint_of(run: Path, step: int = 12) -> Path:
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run a command that succeeds; return the command's output."""
    assert main([str(word) for word in words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def generated(model: Any, prompt: str, length: int) -> str:
    """Return the greedy text of plain transformers."""
    tokenizer = byte_tokenizer()
    inputs = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=length, do_sample=False, pad_token_id=END)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_the_text_is_that_of_plain_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """The text is deterministic, even if the generation config requests sampling."""
    folder = saved(tmp_path / "hf", kind)
    GenerationConfig(do_sample=True, temperature=5.0, top_k=40, eos_token_id=END).save_pretrained(
        folder
    )
    wanted = generated(AutoModelForCausalLM.from_pretrained(folder), "def f", 20).rstrip()
    printed = [said(capsys, folder, "--prompt", "def f", "--max_new_tokens", 20) for _ in range(2)]
    assert printed[0] == printed[1]
    assert len(set(wanted)) > 3 and printed[0].split("\n\n", 1)[1].startswith(wanted), printed[0]


def adapter(folder: Path, base: Path, named: str, **more: Any) -> Path:
    """Write an adapter like the one that a run exports, with weights that change the text."""
    made = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM", **more),
    )
    torch.manual_seed(4)
    for parameter in made.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter) if parameter.requires_grad else 0
    made.peft_config["default"].base_model_name_or_path = named
    made.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_an_adapter_generates_with_its_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = saved(tmp_path / "base")
    folder = adapter(run_of(tmp_path / "run") / "hf", base, str(base))
    plain = generated(AutoModelForCausalLM.from_pretrained(base), "def f", 20)
    wanted = generated(
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder), "def f", 20
    )
    printed = said(capsys, tmp_path / "run", "--prompt", "def f", "--max_new_tokens", 20)
    assert wanted != plain and printed.split("\n\n", 1)[1].startswith(wanted.rstrip())
    assert f"an adapter of {base}: " in printed


def test_a_merged_model_is_taken_if_its_adapter_names_no_base(tmp_path: Path) -> None:
    """The adapter's base model was randomly initialised, so it exists nowhere else.

    If an adapter names its base model, the adapter itself is used.
    """
    run = run_of(tmp_path / "run")
    shutil.move(with_base(tmp_path, None), run / "hf")
    assert find_export(run).folder == run / "hf"
    saved(run / "hf_merged")
    assert find_export(run).folder == run / "hf_merged" and not find_export(run).is_adapter
    changed_json("adapter_config.json", base_model_name_or_path="org/base")(run / "hf")
    assert find_export(run).folder == run / "hf" and find_export(run).is_adapter


def test_the_stop_token_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The stop token is reached, not reached, or missing. The model always generates token 0."""
    folder = saved(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(folder)
    for ends, line in (
        (0, "stop token: ! was reached after 1 new tokens"),
        ([END, 0], "stop token: ! was reached after 1 new tokens"),
        (END, "stop token: not reached (<|endoftext|>). The text was cut off after 7 new tokens"),
    ):
        GenerationConfig(eos_token_id=ends).save_pretrained(folder)
        assert said(capsys, folder, "--prompt", "a", "--max_new_tokens", 7).splitlines()[-1] == line
    tokenizer = byte_tokenizer()
    tokenizer.eos_token, tokenizer.chat_template = None, None
    tokenizer.save_pretrained(folder)
    GenerationConfig().save_pretrained(folder)
    line = "stop token: the model has no stop token. The text was cut off after 7 new tokens"
    assert said(capsys, folder, "--prompt", "a", "--max_new_tokens", 7).splitlines()[-1] == line


def test_a_chat_ends_with_the_answer_though_the_base_model_does_not_know_its_end(
    tmp_path: Path,
) -> None:
    """An adapter's export has no generation config.

    The adapter's chat template ends an answer with <|im_end|>.
    """
    generator = load_generator(find_export(saved(tmp_path / "hf", chat=True)))
    end = generator.tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids, head = [1, 2, 3], generator.model.lm_head.weight
    with torch.no_grad():
        hidden = generator.model.model(input_ids=torch.tensor([ids])).last_hidden_state  # (1, T, H)
        head.zero_()
        head[end] = hidden[0, -1]
    as_chat, as_text = (generate_sample(generator, ids, 5, chat) for chat in (True, False))
    assert (as_chat.stop_token, as_chat.num_tokens) == ("<|im_end|>", 1)
    assert (as_text.stop_token, as_text.num_tokens) == ("", 5)


@pytest.mark.parametrize(
    ("task", "flags", "chat"),
    [
        ("sft", [], True),
        ("preference", [], True),
        ("pretrain", [], False),
        ("", [], True),
        ("sft", ["--no-chat"], False),
        ("pretrain", ["--chat"], True),
    ],
)
def test_the_prompt_is_a_chat_where_the_run_has_learned_chats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, flags: list[str], chat: bool
) -> None:
    run = run_of(tmp_path / "run", task) if task else tmp_path / "run"
    saved(run / "hf", chat=True)
    printed = said(
        capsys, run / "hf" if not task else run, "--prompt", "hi", "--max_new_tokens", 2, *flags
    )
    tokens = (
        len("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
        - len("<|im_start|>" * 2 + "<|im_end|>")
        + 3
    )
    how = (
        f"a chat, by the tokenizer's template; {tokens} tokens"
        if chat
        else "plain text, which the model continues; 2 tokens"
    )
    assert f"prompt ({how}): hi\n" in printed
    assert ("For a model of plain text, use --no-chat\n" in printed) == (not task)


def test_a_run_that_trains_on_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such a run's export comes from earlier steps."""
    run = run_of(tmp_path / "run")
    saved(run / "hf")
    assert "newer" not in said(capsys, run, "--prompt", "a", "--max_new_tokens", 1)
    step = checkpoint_of(run)
    os.utime(step / MANIFEST, (2e9, 2e9))
    note = f"checkpoint {step.name} is newer. Write it with recipekit convert to-hf {run} NEW\n"
    assert f"{run / 'hf'}: {note}" in said(capsys, run, "--prompt", "a", "--max_new_tokens", 1)
    with open(tmp_path / ".run.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert f"{run / 'hf'}: the run is training, and {note}" in said(
            capsys, run, "--prompt", "a", "--max_new_tokens", 1
        )


# Config errors
# --------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run a command that is rejected; return the only line of the error."""
    assert main([str(word) for word in words]) == 1
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1, (out, err)
    return err.rstrip()


def without_export(folder: Path) -> Path:
    return checkpoint_of(run_of(folder)).parent.parent


def with_text(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def changed(folder: Path, change: Callable[[Path], object]) -> Path:
    change(saved(folder))
    return folder


def changed_json(file: str, **values: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(
        json.dumps(json.loads((folder / file).read_text()) | values)
    )


def without_a_layer(folder: Path) -> None:
    changed_json("config.json", num_hidden_layers=3)(folder)


def cut(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def with_base(folder: Path, base: str | None, **more: Any) -> Path:
    (folder / "own").mkdir(parents=True)
    config = {"peft_type": "LORA", "base_model_name_or_path": base, "task_type": "CAUSAL_LM"} | more
    (folder / "own" / "adapter_config.json").write_text(json.dumps(config))
    return folder / "own"


WAY = "Write the files with recipekit convert to-hf"
GENERATES_NONE = "cannot generate text. Give a run of the task pretrain or sft or preference"
FOLDERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing": (lambda path: path / "none", "the folder does not exist. Give a run folder"),
    "a hub id": (
        lambda path: Path("org/name"),
        "the folder does not exist. Give a run folder, .* hf download org/name --local-dir FOLDER",
    ),
    "a file": (lambda path: with_text(path / "x.txt", "x"), "is a file, not a folder"),
    "empty": (
        lambda path: path,
        "contains no config.json, adapter_config.json or run.json. Give a run folder",
    ),
    "runs": (
        lambda path: run_of(path / "one").parent,
        "contains no config.json.*. Give one of its folders, such as .*one",
    ),
    "no export": (
        without_export,
        f"has no hf/: the run has not written one. Its newest checkpoint is step_00000012. {WAY} ",
    ),
    "no checkpoint": (
        run_of,
        (
            "has no hf/ and no complete checkpoint: the run has not written one. Wait for its first"
            " checkpoint"
        ),
    ),
    "a random base": (
        lambda path: with_base(path, None),
        r"names no base model, .* recipekit convert to-hf --merge RUN",
    ),
    "a checkpoint": (
        lambda path: checkpoint_of(run_of(path)),
        f"is a checkpoint, which .*. {WAY} ",
    ),
    "all checkpoints": (
        lambda path: without_export(path) / "checkpoints",
        f"has no hf/: .*. {WAY} ",
    ),
    **{
        f"a {task} run": (
            lambda path, task=task: saved(run_of(path, task) / "hf").parent,
            f"a model of the task {task} {GENERATES_NONE}",
        )
        for task in ("masked_lm", "reward", "image_classification")
    },
    "a masked model": (
        lambda path: saved(path, "bert", AutoModelForMaskedLM),
        f"a model of the task masked_lm {GENERATES_NONE}",
    ),
    "a reward model": (
        lambda path: saved(path, "llama", AutoModelForSequenceClassification, num_labels=1),
        f"a model of the task reward {GENERATES_NONE}",
    ),
    "pictures": (
        lambda path: saved(path, "vit", AutoModelForImageClassification),
        f"a model of the task image_classification {GENERATES_NONE}",
    ),
    "an encoder-decoder": (
        lambda path: saved(path, "t5", AutoModelForSeq2SeqLM, d_model=32, d_kv=16, d_ff=32),
        "is an encoder-decoder",
    ),
    "code": (
        lambda path: changed(
            path,
            changed_json(
                "config.json", model_type="mine", auto_map={"AutoModelForCausalLM": "code.Mine"}
            ),
        ),
        r"its auto_map requires the model's own code \(code.Mine\), which recipes never run",
    ),
    "code of a tokenizer": (
        lambda path: changed(
            path,
            changed_json(
                "tokenizer_config.json",
                tokenizer_class="Mine",
                auto_map={"AutoTokenizer": ["code.Mine", None]},
            ),
        ),
        "cannot be read",
    ),
    "cut weights": (lambda path: changed(path, cut), "model.safetensors"),
    "no weights": (
        lambda path: changed(path, lambda folder: (folder / "model.safetensors").unlink()),
        "contains no .safetensors file",
    ),
    "missing tensors": (
        lambda path: changed(path, without_a_layer),
        r"lacks 9 tensors of the model, such as model.layers.2.input_layernorm.weight",
    ),
    "other shapes": (
        lambda path: changed(path, changed_json("config.json", intermediate_size=64)),
        "cannot be loaded: RuntimeError: ",
    ),
    "an empty tokenizer": (
        lambda path: changed(path, lambda folder: (folder / "tokenizer.json").write_text("")),
        r"tokenizer.json: is empty",
    ),
    "no tokenizer": (
        lambda path: changed(
            path, lambda folder: [file.unlink() for file in folder.glob("tokenizer*")]
        ),
        "contains no tokenizer",
    ),
    "an empty config": (
        lambda path: with_text(path / "config.json", "").parent,
        "config.json: is empty",
    ),
    "a base that is gone": (
        lambda path: with_base(path, "/nowhere/base"),
        "the base model /nowhere/base does not exist on this machine. Copy it there, or write its ",
    ),
    "a base of another folder": (
        lambda path: with_base(path, "./base"),
        "the base model ./base does not exist on this machine",
    ),
    "a base not in the cache": (
        lambda path: with_base(path, "org/base", revision="v2"),
        "the base model org/base is not in the cache.*--revision v2 ",
    ),
    "no base": (lambda path: with_base(path, ""), "names no base model"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_generates_nothing_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make, line = FOLDERS[name]
    with contextlib.redirect_stderr(io.StringIO()):  # hides the progress bars of save_pretrained
        folder = make(tmp_path / "it")
        if name == "empty":
            folder.mkdir()
    capsys.readouterr()
    text = refused(capsys, folder)
    assert re.search(line, text), text


def test_a_run_that_is_still_training_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run")
    with open(tmp_path / ".run.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "no complete checkpoint: the run is still training. Wait for its first" in refused(
            capsys, run
        )
        checkpoint_of(run)
        way = f"recipekit convert to-hf {run} {run}_hf, then recipekit sample {run}_hf"
        assert refused(capsys, run).endswith(
            "the run is still training. Its newest checkpoint is step_00000012. Write the files"
            f" with {way}"
        )


VALUES = {
    "empty": (["--prompt", ""], "--prompt '': must not be empty or blank. Write --prompt TEXT"),
    "blank": (["--prompt", " \n"], "must not be empty or blank"),
    "not UTF-8": (["--prompt", "a\udcff"], "--prompt: must be UTF-8"),
    "long": (
        ["--prompt", "x" * 96],
        (
            "--prompt: has 96 tokens, but the model has 96 positions for the prompt and the answer."
            " Use a shorter prompt"
        ),
    ),
    "longer": (
        ["--prompt", "x" * 5000, "--max_new_tokens", "1"],
        "--prompt: has 5000 tokens, but the model has 96 positions",
    ),
    "no room": (
        ["--prompt", "x" * 90, "--max_new_tokens", "7"],
        "6 of its 96 positions left. Use --max_new_tokens 6, or a shorter prompt",
    ),
    "none": (["--max_new_tokens", "0"], "--max_new_tokens 0: must be at least 1"),
    "no template": (["--chat"], "--chat: the tokenizer in .* has no chat template"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("plain") / "hf")


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_cannot_be_used_is_refused(
    plain: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words, line = VALUES[name]
    assert re.search(line, refused(capsys, plain, *words))


def test_the_default_length_is_lowered_to_the_positions(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = said(capsys, plain, "--prompt", "x" * 94)
    assert (
        "max_new_tokens: 100 lowered to 2: after a prompt of 94 tokens the model has 2 of its 96"
        " positions left\n" in printed
    )


def test_a_token_without_an_embedding_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "hf", vocab_size=100, bos_token_id=0, eos_token_id=1)
    assert re.search(
        r"--prompt: has token \d+ \(.*\), and the model has embeddings for 0 to 99\. ",
        refused(capsys, folder, "--prompt", "ÿ"),
    )


@pytest.mark.parametrize(
    "word",
    ["s3://bucket/run", "https://huggingface.co/org/name", "worker-1:/runs/mine", "$NOT_SET/run"],
)
def test_an_address_is_refused(capsys: pytest.CaptureFixture[str], word: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word])
    assert ended.value.code == 2 and word.split("/")[0] in capsys.readouterr().err


def test_code_beside_a_known_model_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three files could contain remote code, and each file would leave a trace if its code ran."""
    folder = saved(tmp_path / "hf")
    code = f"open({str(tmp_path / 'ran')!r}, 'w').write('x')\n"
    for name in ("modeling_llama.py", "tokenization.py", "custom_generate/generate.py"):
        with_text(folder / name, code)
    changed_json(
        "config.json", auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}
    )(folder)
    said(capsys, folder, "--prompt", "a", "--max_new_tokens", 2)
    assert not (tmp_path / "ran").exists()


def test_a_copied_run_is_the_same(
    tmp_path: Path, plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run")
    shutil.copytree(plain, run / "hf")
    own, copy = (
        said(capsys, folder, "--prompt", "def", "--max_new_tokens", 9).splitlines()[1:]
        for folder in (plain, run)
    )
    assert own == copy
