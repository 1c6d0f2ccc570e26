"""Folders as people have them: what recipes cannot train is refused by name in every command that
takes a model, and what they can train is taken.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pool import ROOT, environment
from recipekit.architectures.families import default_config, tiny_config
from recipekit.architectures.lookup import (
    CAUSAL,
    READS_AHEAD,
    fitting_task,
    folder_of,
    model_config,
    read_config,
    types_of,
)
from recipekit.architectures.safetensors_files import INDEX
from recipekit.commands import convert as tool
from recipekit.data.processors import byte_tokenizer
from recipekit.model.build import build_model
from recipekit.model.causal import check_causal
from recipekit.model.empty import config_of, construct
from recipekit.plan import BEHIND_PADDING, ENCODERS, POSITIONS, make_plan
from recipekit.planner.show import show
from recipekit.spec.command import parse
from recipekit.spec.recipe import Recipe
from recipekit.spec.refusal import Refusal
from safetensors.torch import load_file, save_file
from test_resume import BASE, train
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)

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
    """In place of the first layer's query matrix, what a quantiser stores."""
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
        (folder / INDEX).unlink()


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


# folder -> (the model in it, what is done to it, what every refusal says of it)
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
# What config.json does not tell by a name, so that the model is looked at: by --dry_run, from-hf
# and the ranks of a start.
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
    """The folder of one of MODELS as transformers saves it, with a tokenizer; copy it, do not
    change it.
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
    show(make_plan(parse(Recipe(), NANO, words(folder, "--dry_run", *more))))


def from_hf(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says; "" if it did its work."""
    capsys.readouterr()
    code = tool.main(["from-hf", str(folder), str(folder.parent / "step"), "--dtype", "fp32"])
    told = capsys.readouterr().err
    assert code == (1 if told else 0) and (folder.parent / "step").exists() == (code == 0)
    return told.strip()


@pytest.mark.parametrize("name", REFUSED)
def test_start_dry_run_and_from_hf_refuse_in_one_line(saved, tmp_path, capsys, name):
    folder, says = made(saved, tmp_path / "model", REFUSED[name]), REFUSED[name][2]
    with pytest.raises(Refusal) as start:
        make_plan(parse(Recipe(), NANO, words(folder)))
    with pytest.raises(Refusal) as planned:
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
    with pytest.raises(Refusal) as planned:
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
        Refusal, match=r"contains no tokenizer.*\. Set --tokenizer to a hub id, a folder or bytes"
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
    show(make_plan(parse(recipe, NANO, ["--dry_run", "--out", str(tmp_path / "run")])))
    assert "memory   accelerator" in capsys.readouterr().out
    built = build_model(
        recipe,
        read_config(folder / "config.json", str(folder), task),
        None,
        {},
        torch.device("cpu"),
    )
    assert built.architecture == made
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
        Refusal,
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


def test_the_types_are_those_of_transformers():
    for auto_class, table in (
        (CAUSAL, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("AutoModelForImageClassification", MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    ):
        assert types_of(auto_class) == {
            kind: (names,) if isinstance(names, str) else names for kind, names in table.items()
        }
    assert len(types_of("AutoModelForImageClassification")["deit"]) == 2
    assert READS_AHEAD.keys() <= types_of(CAUSAL).keys()


# (model, what its config.json says beside it, task) -> the end of the refusal; "" if it is taken.
TASKS_OF_MODELS: dict[tuple[str, str, str], str] = {
    (
        "vit",
        "{}",
        "pretrain",
    ): (
        "transformers 5.22.2 does not support a vit as a causal language model. Use --task"
        " image_classification"
    ),
    (
        "vit",
        "{}",
        "sft",
    ): (
        "transformers 5.22.2 does not support a vit as a causal language model. Use --task"
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
        "transformers 5.22.2 does not support a llama as an image classification model. Use --task"
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
        " Use --task masked_lm"
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
        "transformers 5.22.2 does not support a vit as a sequence classification model. Use --task"
        " image_classification"
    ),
    (
        "bert",
        "{}",
        "image_classification",
    ): (
        "transformers 5.22.2 does not support a bert as an image classification model. Use --task"
        " masked_lm"
    ),
    (
        "bert",
        "{}",
        "pretrain",
    ): "a bert reads the tokens that it should predict. Use --task masked_lm",
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
        "transformers 5.22.2 does not support a llama as a masked language model. Use --task"
        " pretrain or sft or preference or reward"
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
    with pytest.raises(Refusal) as refusal:
        model_config(str(folder), task)
    (problem,) = refusal.value.problems
    assert str(problem).startswith(f"model = {folder}: ") and str(problem).endswith(told)


def test_of_two_tasks_that_take_a_type_the_class_decides():
    assert (
        fitting_task({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]})
        == "reward"
    )
    assert fitting_task({"model_type": "llama", "architectures": ["LlamaModel"]}) == "pretrain"


def test_the_task_of_a_folder_is_that_of_its_class_or_else_of_its_type(saved, tmp_path):
    """As a converter asks, to whom nobody names a task."""
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
    with pytest.raises(Refusal, match="a t5 is an encoder-decoder"):
        read_config(saved("t5") / "config.json", "x", "")


# The others are a slow test; they have no key, run no tiny copy, or read as these do.
QUICK = {
    *list(READS_AHEAD)[::3],
    "cpmant",
    "xlm",
    "xlnet",
    "llama",
    "gpt2",
    "flex_olmo",
    "mamba2",
    "bart",
    "gemma3",
    "rwkv",
    "minimax_m2",
    "reformer",
}
# tests/architectures/test_architecture.py says why
CANNOT = {"blt", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"}
every_type = pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in types_of(CAUSAL)
        if name not in CANNOT
    ],
)


def looked_at(model_type: str, **changes: Any) -> str:
    """ "" for a type that looks back only, else why it is refused."""
    config = default_config(model_type).to_dict() | changes
    for attention in ("sdpa", "eager"):
        try:
            assert check_causal(config, attention, model_type) == "", "it could be looked at"
            return ""
        except Refusal as refusal:
            if "attention =" not in str(refusal):  # its class has no sdpa
                return str(refusal)
    raise AssertionError(model_type)


@every_type
def test_a_type_reads_ahead_if_the_table_says_so(model_type):
    """The table, of which a plan refuses by name, beside what the models do."""
    switch = READS_AHEAD.get(model_type)
    if model_type == "reformer":  # its class takes no other
        assert looked_at(model_type, is_decoder=True) == ""
    elif switch is None:
        assert looked_at(model_type) == ""
    else:
        assert f"a {model_type} reads the tokens that it should predict" in looked_at(model_type)
    if switch:
        # its blocks are masked as an encoder's
        more = {"attention_type": "original_full"} if model_type == "big_bird" else {}
        assert looked_at(model_type, **{switch: True}, **more) == ""


def test_a_copy_that_does_not_run_is_said():
    told = check_causal(default_config("blt").to_dict(), name="blt")
    assert told.startswith("not known whether a blt looks back only: cannot shrink a blt")


LIMITED: dict[str, dict[str, Any]] = {
    **{
        key: {"n_embd": 16, "n_layer": 1, "n_head": 2}
        for key in ("gpt2", "gpt_bigcode", "openai-gpt")
    },
    **{
        key: {"n_embd": 16, "n_layer": 1, "n_head": 4, "rotary_dim": 4}
        for key in ("gptj", "codegen")
    },
    "ctrl": {"n_embd": 16, "n_layer": 1, "n_head": 2, "dff": 16},
    "gpt_neo": {
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "attention_types": [[["global"], 1]],
    },
    "opt": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "ffn_dim": 16,
        "word_embed_proj_dim": 16,
    },
    "biogpt": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    },
    "mpt": {"d_model": 16, "n_layers": 1, "n_heads": 2},
}


@pytest.mark.parametrize("kind", POSITIONS)
def test_a_row_longer_than_the_positions_of_a_model_is_refused(tmp_path: Path, kind: str) -> None:
    """The last one that fits runs in the model itself, one more does not."""
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=264, **{POSITIONS[kind]: 32}, **LIMITED[kind]
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    row = torch.randint(0, 264, (1, 33))  # (B, T)
    with torch.no_grad():
        model(input_ids=row[:, :32], position_ids=torch.arange(32)[None])
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=row, position_ids=torch.arange(33)[None])
    config.save_pretrained(tmp_path / "model")
    recipe = Recipe(
        model=str(tmp_path / "model"),
        init="random",
        tokenizer="bytes",
        dataset="builtin",
        ds_config="zero1.json",
    )

    def plan(seq_len: int) -> None:
        flags = [
            "--dry_run",
            "--seq_len",
            str(seq_len),
            "--global_batch",
            "4",
            "--micro_batch",
            "1",
            "--out",
            str(tmp_path / "run"),
        ]
        make_plan(parse(recipe, ROOT / "recipes" / "x.py", flags))

    plan(32)
    with pytest.raises(Refusal) as refusal:
        plan(33)
    assert [str(problem) for problem in refusal.value.problems] == [
        f"seq_len = 33: must not exceed the 32 positions of a {kind} ({POSITIONS[kind]} in its"
        " config.json). Use --seq_len 32 or less"
    ]


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_row_longer_than_the_positions_of_an_encoder_is_refused(
    tmp_path: Path, kind: str
) -> None:
    """Where its positions begin behind those of its padding token, fewer are left."""
    before = 2 if kind in BEHIND_PADDING else 0
    config = tiny_config(kind, 264, "masked_lm") | {"max_position_embeddings": 32 + before}
    model = construct(config_of(config), "eager", "", "AutoModelForMaskedLM").eval()
    row = torch.randint(3, 264, (1, 33))  # (B, T)
    with torch.no_grad():
        model(input_ids=row[:, :32], position_ids=torch.arange(32)[None])
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=row, position_ids=torch.arange(33)[None])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    recipe = Recipe(
        model=str(tmp_path / "model"),
        task="masked_lm",
        init="random",
        tokenizer="bytes",
        dataset="builtin",
        ds_config="zero1.json",
    )

    def plan(seq_len: int) -> None:
        flags = [
            "--dry_run",
            "--seq_len",
            str(seq_len),
            "--global_batch",
            "4",
            "--micro_batch",
            "1",
            "--out",
            str(tmp_path / "run"),
        ]
        make_plan(parse(recipe, ROOT / "recipes" / "x.py", flags))

    plan(32)
    with pytest.raises(
        Refusal,
        match=(
            rf"seq_len = 33: must not exceed the 32 positions of a {kind} .max_position_embeddings"
            r" in its config.json.\. Use --seq_len 32 or less"
        ),
    ):
        plan(33)


def test_a_file_of_the_hub_cache_is_looked_up_in_the_commit_of_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was written last. A snapshot without the file does not count."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--nobody--model"
    snapshots = repository / "snapshots"
    for name, file, time in (
        ("b", "config.json", 200),
        ("a", "config.json", 300),
        ("d", "config.json", 100),
        ("c", "tokenizer_config.json", 400),
    ):
        (snapshots / name).mkdir(parents=True)
        (snapshots / name / file).write_text("{}")
        os.utime(snapshots / name / file, (time, time))
    assert folder_of("nobody/model") is None
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("b")
    assert (
        folder_of("nobody/model") == snapshots / "b"
        and folder_of("nobody/model", revision="d") == snapshots / "d"
    )
    assert folder_of("nobody/model", "tokenizer_config.json") is None
    assert (
        folder_of("nobody/model", "generation_config.json") is None
        and folder_of("nobody/other") is None
    )
    assert folder_of(str(tmp_path), "generation_config.json") == tmp_path
