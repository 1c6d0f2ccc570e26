"""Model folders of users.

Every command that takes a model rejects unsupported models by name, and accepts supported ones.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from built_models import build_model
from pool import ROOT, environment
from recipekit.architectures.families import tiny_config
from recipekit.architectures.lookup import (
    fitting_task,
    model_config,
    read_config,
)
from recipekit.architectures.safetensors_files import INDEX_FILE
from recipekit.commands import convert as tool
from recipekit.data.processors import byte_tokenizer
from recipekit.plan import resolve_run
from recipekit.planner.dry_run import print_dry_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from safetensors.torch import load_file, save_file
from short_runs import BASE, train

INSTALLED = f"transformers {version('transformers')}"

NANO = ROOT / "recipes" / "llama_nano_zero2.py"
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 264,
}
HEADS: dict[str, Any] = {
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
    "roberta": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SMALL)),
    "modernbert": lambda: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(**SMALL, pad_token_id=0, cls_token_id=1, sep_token_id=2)
    ),
    "bert_decoder": lambda: transformers.BertLMHeadModel(
        transformers.BertConfig(**SMALL, is_decoder=True)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=264
        )
    ),
    "bart": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            d_model=32, encoder_layers=2, decoder_layers=2, vocab_size=264, **HEADS
        )
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=32,
            patch_size=16,
        )
    ),
}


def rewrite(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def quantise(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Replace the first layer's query matrix with a quantiser's tensors."""
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj."
    del tensors[f"{name}weight"]
    save_file(
        tensors | {f"{name}{key}": value for key, value in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}}
BNB = {
    "quantization_config": {
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
    }
}
PACKED = {
    "qweight": torch.ones(4, 32, dtype=torch.int32),
    "qzeros": torch.ones(1, 4, dtype=torch.int32),
    "scales": torch.ones(1, 32),
}
NF4 = {
    "weight": torch.ones(512, 1, dtype=torch.uint8),
    "weight.absmax": torch.ones(16),
    "weight.quant_map": torch.ones(16),
}
CODE = {
    "AutoConfig": "configuration_mylm.MyConfig",
    "AutoModelForCausalLM": "modeling_mylm.MyModel",
}


def save_as_bin(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def cut_off(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) * 2 // 3])


def lose_a_shard(folder: Path, index: bool) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="30KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    if not index:
        (folder / INDEX_FILE).unlink()


def point(folder: Path) -> None:
    oid = "0" * 64
    (folder / "model.safetensors").write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 123456\n"
    )


def only_gguf(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "model.Q4_K_M.gguf").write_bytes(b"GGUF" + bytes(60))


def clear(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


# folder -> (its model, a change to the folder, a part of every error message).
REFUSED: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "bert": ("bert", lambda folder: None, "a bert reads the tokens that it should predict"),
    "roberta": (
        "roberta",
        lambda folder: None,
        "a roberta reads the tokens that it should predict",
    ),
    "modernbert": (
        "modernbert",
        lambda folder: None,
        "a modernbert reads the tokens that it should predict",
    ),
    "t5": ("t5", lambda folder: None, "a t5 is an encoder-decoder"),
    "bart": ("bart", lambda folder: None, "a bart is an encoder-decoder"),
    "vit": ("vit", lambda folder: None, "does not support a vit as a causal language model"),
    "auto_map": (
        "llama",
        lambda folder: rewrite(folder, model_type="mylm", auto_map=CODE),
        "the model's own code (modeling_mylm.MyModel)",
    ),
    "auto_map of a known type": (
        "llama",
        lambda folder: rewrite(folder, auto_map=CODE),
        "the model's own code (modeling_mylm.MyModel)",
    ),
    "gguf": (
        "llama",
        only_gguf,
        "the folder contains model.Q4_K_M.gguf, a format for inference, but no config.json",
    ),
    "gptq, weights whole": (
        "llama",
        lambda folder: rewrite(folder, **GPTQ),
        "is quantised: its config.json has a quantization_config of gptq",
    ),
    "gptq": (
        "llama",
        lambda folder: (rewrite(folder, **GPTQ), quantise(folder, PACKED)),
        "a quantization_config of gptq",
    ),
    "gptq, block deleted": (
        "llama",
        lambda folder: quantise(folder, PACKED),
        "q_proj.qweight: is I32 of a quantised model. Use the unquantised model",
    ),
    "bnb, weights whole": (
        "llama",
        lambda folder: rewrite(folder, **BNB),
        "a quantization_config of bitsandbytes. Use the unquantised model. If its files contain",
    ),
    "bnb": (
        "llama",
        lambda folder: (rewrite(folder, **BNB), quantise(folder, NF4)),
        "a quantization_config of bitsandbytes",
    ),
    "bnb, block deleted": (
        "llama",
        lambda folder: quantise(folder, NF4),
        "weight.absmax: is F32 of a quantised model",
    ),
    "bin only": (
        "llama",
        save_as_bin,
        "contains pytorch_model.bin, which is not supported, but no .safetensors file",
    ),
    "truncated": ("llama", cut_off, "model.safetensors: has "),
    "git lfs": (
        "llama",
        point,
        (
            "model.safetensors: is a Git LFS pointer, not the file itself. Fetch the file: git lfs"
            " pull"
        ),
    ),
    "shard missing": ("llama", lambda folder: lose_a_shard(folder, True), "model-00002-of-00"),
    "shard and index missing": (
        "llama",
        lambda folder: lose_a_shard(folder, False),
        "lacks part 2 of ",
    ),
    "no weights": (
        "llama",
        lambda folder: (folder / "model.safetensors").unlink(),
        "contains no .safetensors file. Download its .safetensors files",
    ),
    "empty": ("llama", clear, "the folder contains no config.json"),
    "config.json broken": (
        "llama",
        lambda folder: (folder / "config.json").write_text('{"model_type": "lla'),
        "config.json: is not JSON",
    ),
}
# Models for which a name in config.json does not decide, so the model itself must be probed.
# --dry_run, from-hf and the ranks of a start probe the model.
LOOKED_AT: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "llama both ways": (
        "llama",
        lambda folder: rewrite(folder, is_causal=False),
        "a llama reads the tokens that it should predict",
    ),
    "a wrong value": (
        "llama",
        lambda folder: rewrite(folder, hidden_size="many"),
        "does not take its config.json: ",
    ),
    "a typing error": (
        "llama",
        lambda folder: rewrite(folder, hidden_act="gelo"),
        "KeyError: 'gelo' (probably hidden_act = gelo). Correct",
    ),
    "an unknown rope": (
        "llama",
        lambda folder: rewrite(folder, rope_parameters={"rope_type": "yarm", "factor": 2.0}),
        "KeyError: 'yarm' (probably rope_parameters.rope_type = yarm)",
    ),
    "a rope without its factor": (
        "llama",
        lambda folder: rewrite(folder, rope_parameters={"rope_type": "linear"}),
        "{'factor'}\" (probably rope_parameters.rope_type = linear)",
    ),
    "no heads": (
        "llama",
        lambda folder: rewrite(folder, num_key_value_heads=0),
        "by zero (probably num_key_value_heads = 0)",
    ),
    "a negative width": (
        "llama",
        lambda folder: rewrite(folder, intermediate_size=-3),
        "(probably intermediate_size = -3)",
    ),
    "an unknown dtype": (
        "llama",
        lambda folder: rewrite(folder, dtype="bfloat17"),
        "AttributeError: module 'torch' has no attribute 'bfloat17'",
    ),
    "padding outside": (
        "llama",
        lambda folder: rewrite(folder, pad_token_id=9999),
        "AssertionError: Padding_idx must be within num_embeddings",
    ),
    "labels as a number": (
        "llama",
        lambda folder: rewrite(folder, id2label=3),
        "AttributeError: 'int' object has no attribute 'items'",
    ),
}
TAKEN: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "llama": ("llama", lambda folder: None, ""),
    "auto_map of the same class": (
        "llama",
        lambda folder: rewrite(
            folder, auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}
        ),
        "",
    ),
    "bert that looks back only": ("bert_decoder", lambda folder: None, ""),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the folder of one of MODELS, with a tokenizer.

    The folder is saved by transformers. Copy it before changing it.
    """
    base = tmp_path_factory.mktemp("models")

    def saved(name: str) -> Path:
        if not (base / name).exists():
            MODELS[name]().save_pretrained(base / name)
            byte_tokenizer().save_pretrained(base / name)
        return base / name

    return saved


def made(
    saved: Callable[[str], Path], folder: Path, row: tuple[str, Callable[[Path], Any], str]
) -> Path:
    shutil.copytree(saved(row[0]), folder)
    row[1](folder)
    return folder


def words(folder: Path, *more: str) -> list[str]:
    numbers = [
        "--init",
        "pretrained",
        "--seq_len",
        "64",
        "--global_batch",
        "2",
        "--micro_batch",
        "1",
        "--steps",
        "1",
        "--warmup_steps",
        "0",
    ]
    return [
        "--model",
        str(folder),
        "--tokenizer",
        "",
        *numbers,
        "--out",
        str(folder.parent / "run"),
        *more,
    ]


def dry_run(folder: Path, *more: str) -> None:
    print_dry_run(resolve_run(parse(Recipe(), NANO, words(folder, "--dry_run", *more))))


def from_hf(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the command's error output, or "" if the command succeeds."""
    capsys.readouterr()
    code = tool.main(["from-hf", str(folder), str(folder.parent / "step"), "--dtype", "fp32"])
    told = capsys.readouterr().err
    assert code == (1 if told else 0) and (folder.parent / "step").exists() == (code == 0)
    return told.strip()


@pytest.mark.parametrize("name", REFUSED)
def test_start_dry_run_and_from_hf_refuse_in_one_line(saved, tmp_path, capsys, name):
    folder, says = made(saved, tmp_path / "model", REFUSED[name]), REFUSED[name][2]
    with pytest.raises(ConfigError) as start:
        resolve_run(parse(Recipe(), NANO, words(folder)))
    with pytest.raises(ConfigError) as planned:
        dry_run(folder)
    others = ("vit", "bert", "roberta", "modernbert")
    for told in (
        str(start.value),
        str(planned.value),
        *([from_hf(folder, capsys)] if name not in others else []),
    ):
        assert says in told and len(told.splitlines()) == 1, told
    assert name not in others or from_hf(folder, capsys) == "", (
        "the converter takes the model of any task"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", LOOKED_AT)
def test_dry_run_and_from_hf_look_at_the_model_itself(saved, tmp_path, capsys, name):
    folder, says = made(saved, tmp_path / "model", LOOKED_AT[name]), LOOKED_AT[name][2]
    with pytest.raises(ConfigError) as planned:
        dry_run(folder)
    assert capsys.readouterr().out == "", "what is refused stands alone"
    for told in (str(planned.value), from_hf(folder, capsys)):
        assert says in told and len(told.splitlines()) == 1, told


@pytest.mark.parametrize("name", TAKEN)
def test_what_can_be_trained_is_taken(saved, tmp_path, capsys, name):
    folder = made(saved, tmp_path / "model", TAKEN[name])
    dry_run(folder)
    assert "memory   accelerator" in capsys.readouterr().out
    assert from_hf(folder, capsys) == ""


def test_without_a_tokenizer_another_one_is_named(saved, tmp_path, capsys):
    folder = made(saved, tmp_path / "model", TAKEN["llama"])
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(
        ConfigError,
        match=r"contains no tokenizer.*\. Set --tokenizer to a hub id, a folder or bytes",
    ):
        dry_run(folder)
    dry_run(folder, "--tokenizer", str(saved("llama")))
    assert from_hf(folder, capsys) == ""


@pytest.mark.parametrize("name", ["bert", "truncated"])
def test_a_start_ends_with_the_refusal_alone(saved, tmp_path, name):
    folder, says = made(saved, tmp_path / "model", REFUSED[name]), REFUSED[name][2]
    done = subprocess.run(
        [sys.executable, NANO, *words(folder)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    head, line = done.stderr.splitlines()
    assert (
        done.returncode == 1 and head == "refused: 1 problem" and says in line and done.stdout == ""
    )


@pytest.mark.parametrize(
    ("task", "kind", "made"),
    [
        ("image_classification", "deit", "DeiTForImageClassification"),
        ("image_classification", "vit", "ViTForImageClassification"),
        ("masked_lm", "bert", "BertForMaskedLM"),
        ("reward", "llama", "LlamaForSequenceClassification"),
        ("sft", "llama", "LlamaForCausalLM"),
    ],
)
def test_a_config_without_architectures_trains_and_the_export_names_the_class(
    tmp_path, capsys, task, kind, made
):
    config = tiny_config(kind, 0 if task == "image_classification" else 264, task)
    config.pop("architectures", None)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    recipe = Recipe(
        model=str(folder),
        task=task,
        init="random",
        tokenizer="" if task == "image_classification" else "bytes",
        seq_len=64,
    )
    print_dry_run(resolve_run(parse(recipe, NANO, ["--dry_run", "--out", str(tmp_path / "run")])))
    assert "memory   accelerator" in capsys.readouterr().out
    built = build_model(
        recipe,
        read_config(folder / "config.json", str(folder), task),
        None,
        {},
        torch.device("cpu"),
    )
    assert built.model_plan.architecture == made
    built.model.save_pretrained(tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == [made]


@pytest.mark.parametrize("wrong", [3, "LlamaForCausalLM", {"a": 1}])
def test_architectures_that_are_no_list_are_refused(saved, tmp_path, wrong):
    folder = made(
        saved,
        tmp_path / "model",
        ("llama", lambda folder: rewrite(folder, architectures=wrong), ""),
    )
    with pytest.raises(
        ConfigError,
        match=r"config\.json: its architectures must be a list of class names\. Write it as in",
    ):
        dry_run(folder)


@pytest.mark.slow
def test_the_ranks_of_a_start_refuse_a_model_that_reads_ahead(pools, saved, tmp_path):
    folder, says = (
        made(saved, tmp_path / "model", LOOKED_AT["llama both ways"]),
        LOOKED_AT["llama both ways"][2],
    )
    results = pools.run(
        2, train, recipe=BASE, argv=["--out", str(tmp_path / "run"), "--model", str(folder)]
    )
    assert len({told for told, _ in results}) == 1 and says in results[0][0], results


# (model, changes of its config.json, task) -> end of the error message, or "" if the model is
# accepted.
TASKS_OF_MODELS: dict[tuple[str, str, str], str] = {
    (
        "vit",
        "{}",
        "pretrain",
    ): (
        f"{INSTALLED} does not support a vit as a causal language model. Use --task"
        " image_classification"
    ),
    (
        "vit",
        "{}",
        "sft",
    ): (
        f"{INSTALLED} does not support a vit as a causal language model. Use --task"
        " image_classification"
    ),
    ("vit", "{}", "image_classification"): "",
    ("vit", '{"architectures": ["ViTModel"]}', "image_classification"): "",
    (
        "vit",
        '{"quantization_config": {"quant_method": "gptq"}}',
        "image_classification",
    ): (
        "has a quantization_config of gptq. Use the unquantised model. "
        "If its files contain unquantised weights, delete the block"
    ),
    (
        "vit",
        '{"auto_map": {"AutoModelForImageClassification": "modeling_my.MyViT"}}',
        "image_classification",
    ): (
        "(modeling_my.MyViT), which recipes never run. "
        "Use an image classification model of transformers, whose class is in transformers itself"
    ),
    (
        "vit",
        (
            '{"auto_map": {"AutoModelForImageClassification":'
            ' "modeling_vit.ViTForImageClassification"}}'
        ),
        "image_classification",
    ): "",
    ("llama", "{}", "pretrain"): "",
    (
        "llama",
        "{}",
        "image_classification",
    ): (
        f"{INSTALLED} does not support a llama as an image classification model. Use --task"
        " pretrain or sft or preference or reward"
    ),
    ("llama", "{}", "preference"): "",
    ("llama", "{}", "reward"): "",
    (
        "llama",
        (
            '{"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "good", "1":'
            ' "bad"}}'
        ),
        "reward",
    ): "",
    (
        "bert",
        "{}",
        "reward",
    ): (
        "a bert is not a decoder, so its output for a row would change with the padding after it."
        " Use --task masked_lm or token_classification"
    ),
    (
        "t5",
        "{}",
        "reward",
    ): (
        "a t5 is not a decoder, so its output for a row would change with the padding after it. "
        "Use a causal language model of recipes/SUPPORT.md"
    ),
    (
        "vit",
        "{}",
        "reward",
    ): (
        f"{INSTALLED} does not support a vit as a sequence classification model. Use --task"
        " image_classification"
    ),
    (
        "bert",
        "{}",
        "image_classification",
    ): (
        f"{INSTALLED} does not support a bert as an image classification model. Use --task"
        " masked_lm or token_classification"
    ),
    (
        "bert",
        "{}",
        "pretrain",
    ): (
        "a bert reads the tokens that it should predict. Use --task masked_lm or"
        " token_classification"
    ),
    ("bert", "{}", "masked_lm"): "",
    (
        "bert_decoder",
        "{}",
        "masked_lm",
    ): (
        'a bert whose config.json says "is_decoder": true is causal. Use --task pretrain or sft or'
        " preference or reward"
    ),
    (
        "llama",
        "{}",
        "masked_lm",
    ): (
        f"{INSTALLED} does not support a llama as a masked language model. Use --task"
        " pretrain or sft or preference or reward"
    ),
    (
        "llama",
        "{}",
        "token_classification",
    ): (
        "a llama is causal: a token does not depend on the tokens after it. Use --task pretrain or"
        " sft or preference or reward"
    ),
    (
        "t5",
        "{}",
        "masked_lm",
    ): (
        "a t5 is an encoder-decoder, but this task trains only encoders. Use a masked language"
        " model of transformers"
    ),
}


@pytest.mark.parametrize(("model", "says", "task"), TASKS_OF_MODELS)
def test_a_model_of_another_task_is_refused_with_the_task_that_fits(
    saved, tmp_path, model, says, task
):
    folder, told = tmp_path / "model", TASKS_OF_MODELS[model, says, task]
    shutil.copytree(saved(model), folder)
    rewrite(folder, **json.loads(says))
    if not told:
        assert (
            model_config(str(folder), task)
            == read_config(folder / "config.json", "x", task)
            == json.loads((folder / "config.json").read_text())
        )
        return
    with pytest.raises(ConfigError) as refusal:
        model_config(str(folder), task)
    (problem,) = refusal.value.problems
    assert str(problem).startswith(f"model = {folder}: ") and str(problem).endswith(told)


def test_the_task_of_a_folder_is_that_of_its_class_or_else_of_its_type(saved, tmp_path):
    """A converter uses this rule, because it is given no task."""
    assert {
        name: fitting_task(read_config(saved(name) / "config.json", "x", ""))
        for name in ("llama", "vit")
    } == {
        "llama": "pretrain",
        "vit": "image_classification",
    }
    assert (
        fitting_task({"model_type": "vit", "architectures": ["ViTModel"]}) == "image_classification"
    )
    assert fitting_task({"model_type": "nothing"}) == "pretrain"
    with pytest.raises(ConfigError, match="a t5 is an encoder-decoder"):
        read_config(saved("t5") / "config.json", "x", "")
