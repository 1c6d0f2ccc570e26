"""peft adapters: peft reads, computes and merges our exports, and other adapters are rejected."""

import contextlib
import dataclasses
import io
import json
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
from built_models import build_model
from peft import LoraConfig, PeftModel, get_peft_model
from peft_models import CASES, NUMBERS, Q, logits_of, recipe_with, refused, trained, wrapped
from recipekit.architectures import safetensors_files
from recipekit.commands.convert import main as convert
from recipekit.convert.hugging_face import to_hf
from recipekit.convert.merge import empty_adapted_model
from recipekit.convert.published import plan_published_files
from recipekit.data.processors import byte_tokenizer
from recipekit.model.adapter import AdapterRequest, adapter_config_of, apply_adapter
from recipekit.model.empty import empty_model
from recipekit.model.export import WeightFormat, export
from recipekit.model.small_files import collect_small_files, origin_of
from recipekit.parallel.blueprint import Blueprint
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import ADAPTER_KEY, RUN_JSON, check_adapter
from safetensors.torch import load_file
from shipped_jsons import strategy
from tiny_models import ds_config, save_tiny, tiny_config
from transformers import AutoModelForCausalLM


def export_cases(folder: str, names: list[str]) -> dict[str, Any]:
    """Export each case both as an adapter and as a merged model, on a rank of a pool.

    Return, for each case, its logits and its step folder's blueprint.
    """
    from recipekit.parallel.groups import ProcessGroups
    from recipekit.spec.mesh import make_mesh

    groups, found = ProcessGroups(make_mesh(1), "cpu"), {}
    for name in names:
        kind, fields = CASES[name]
        base = Path(folder, name, "base")
        plain = build_model(
            Recipe(model="none", init="random", seed=5),
            tiny_config(kind),
            None,
            ds_config(0),
            torch.device("cpu"),
        ).model
        plain.save_pretrained(base)
        recipe = recipe_with(fields, model=str(base), init="pretrained")
        config = json.loads((base / "config.json").read_text())
        built = build_model(recipe, config, groups, ds_config(0), torch.device("cpu"))
        engine: Any = SimpleNamespace(module=trained(built.model))
        small = collect_small_files(
            built,
            config,
            byte_tokenizer(),
            torch.float32,
            origin_of(str(base), "pretrained", "bytes", True),
            (),
        )
        for merge in (False, True):
            export(
                engine,
                built,
                groups,
                small,
                base.with_name("merged" if merge else "adapter"),
                WeightFormat(torch.float32, merge),
            )
        found[name] = (
            logits_of(built.model),
            built.blueprint.to_json(),
            adapter_config_of(built.model),
        )
    return found


# Cases that are also converted from step folders that lack Blueprint.adapter.
OLDER = ("every linear layer", "DoRA", "head saved")


def keys_of(folder: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", framework="pt") as opened:
        return {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118


def check_case(folder: Path, name: str, logits: torch.Tensor, blueprint: dict[str, Any]) -> None:
    """Compare an export with the results of peft, which reads, saves and merges the export."""
    base, own = folder / name / "base", folder / name / "adapter"
    with warnings.catch_warnings(action="ignore"):
        theirs: Any = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager"), own
        )
        assert (logits_of(theirs) - logits).abs().max() <= 1e-6, name
        assert (
            logits
            - logits_of(AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager"))
        ).abs().max() > 1e-3, "nothing was learned"
        theirs.save_pretrained(folder / name / "theirs")
        saved = keys_of(own)
        assert saved == keys_of(folder / name / "theirs"), name
        config = json.loads((own / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(base)

        merged = theirs.merge_and_unload()
        ours: Any = AutoModelForCausalLM.from_pretrained(
            folder / name / "merged", attn_implementation="eager"
        )
    assert ours.config.tie_word_embeddings == merged.config.tie_word_embeddings, name
    wanted, got = merged.state_dict(), ours.state_dict()
    assert wanted.keys() == got.keys(), name
    assert max((wanted[key] - got[key]).abs().max().item() for key in wanted) <= 1e-6, name
    assert (logits_of(ours) - logits).abs().max() <= 1e-4 * logits.abs().max(), name

    step: Any = SimpleNamespace(
        blueprint=Blueprint.from_json(json.loads(json.dumps(blueprint))),
        state={"export_dtype": "float32"},
    )
    stated, contents = plan_published_files(step, None)
    assert contents == {"adapter_model.safetensors": dict.fromkeys(saved, "F32")}, name
    if name in OLDER:
        step.blueprint = dataclasses.replace(step.blueprint, adapter={})
        assert plan_published_files(step, None)[1] == contents, name
    shapes = {
        key: tensor.shape
        for tensor in stated.tensors
        for key in stated.published[tensor.name].parts[0]
    }
    assert {key: shape for key, shape in saved.items() if key in shapes} == shapes, name


def export_in_bf16(folder: str) -> None:
    """Export an adapter and its merged model in bf16, on a rank of a pool.

    If the weights are split into files, each file contains one tensor.
    """
    from recipekit.parallel.groups import ProcessGroups
    from recipekit.spec.mesh import make_mesh

    groups, base = ProcessGroups(make_mesh(1), "cpu"), Path(folder, "base")
    plain = build_model(
        Recipe(model="none", init="random", seed=5),
        tiny_config("llama"),
        None,
        ds_config(0),
        torch.device("cpu"),
    ).model
    plain.save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    recipe = recipe_with(CASES["every linear layer"][1], model=str(base), init="pretrained")
    built = build_model(recipe, config, groups, ds_config(0), torch.device("cpu"))
    engine: Any = SimpleNamespace(module=trained(built.model))
    small = collect_small_files(
        built,
        config,
        byte_tokenizer(),
        torch.bfloat16,
        origin_of(str(base), "pretrained", "bytes", True),
        (),
    )
    export(
        engine, built, groups, small, base.with_name("merged"), WeightFormat(torch.bfloat16, True)
    )
    export(engine, built, groups, small, base.with_name("adapter"), WeightFormat(torch.float32))
    with patch.object(safetensors_files, "SHARD_BYTES", 1):
        export(engine, built, groups, small, base.with_name("cut"), WeightFormat(torch.float32))
        step: Any = SimpleNamespace(blueprint=built.blueprint, state={"export_dtype": "float32"})
        assert list(plan_published_files(step, None)[1]) == ["adapter_model.safetensors"]


def test_a_merged_model_in_bf16_is_merged_in_fp32_and_rounded_once(
    pools: Any, tmp_path: Path
) -> None:
    """The merged model has the base model's tensors and no additional buffer.

    An adapter's file is never split, because peft reads only one file.
    """
    pools.run(1, export_in_bf16, timeout=120, folder=str(tmp_path))
    base, got = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    assert base.keys() == got.keys() and keys_of(tmp_path / "adapter") == keys_of(tmp_path / "cut")
    with warnings.catch_warnings(action="ignore"):
        theirs: Any = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
        )
    wanted = theirs.merge_and_unload().state_dict()
    differing = sum((got[key] != wanted[key].bfloat16()).sum().item() for key in got)
    assert differing < 1e-3 * sum(value.numel() for value in got.values())
    assert any((wanted[key] != base[key]).any() for key in base)


QUICK = [
    *("every linear layer", "DoRA", "Conv1D", "all biases", "head saved", "embedding"),
    *("some tokens", "tied, embedding saved", "tied, saved as one", "experts"),
]


@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param([name for name in CASES if name not in QUICK], marks=pytest.mark.slow)],
    ids=["quick", "others"],
)
def test_stock_peft_reads_and_merges_an_export_as_the_run_does(
    pools: Any, tmp_path: Path, names: list[str]
) -> None:
    for name, (logits, blueprint, _) in pools.run(
        1, export_cases, timeout=300, folder=str(tmp_path), names=names
    )[0].items():
        check_case(tmp_path, name, logits, blueprint)


def run_adapter(recipe: Recipe, fields: dict[str, Any]) -> int:
    """Train on a rank of a pool."""
    from recipekit.train import main

    recipe = dataclasses.replace(recipe, adapt=partial(wrapped, fields=fields))
    return main(resolve_run(parse(recipe, Path("adapters.py"), [])))


RANKS = [
    pytest.param(
        {
            "target_modules": ["q_proj", "down_proj"],
            "use_dora": True,
            "modules_to_save": ["lm_head"],
        },
        id="DoRA, head saved",
    ),
    pytest.param(
        {"target_modules": ["embed_tokens", "v_proj"], "modules_to_save": ["norm"]},
        id="embedding, norm saved",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        {"target_modules": "all-linear", "use_rslora": True},
        id="rank-stabilised",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("fields", RANKS)
def test_ranks_of_zero2_and_zero3_train_and_export_one_adapter(
    pools: Any, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """ZeRO-2 writes the adapter. ZeRO-3 with fully sharded weights writes the merged model.

    peft merges the adapter into a model that equals the merged one.
    """
    save_tiny(tmp_path / "base")
    for file, merge in (("zero2", False), ("zero3", True)):
        config = strategy(file)
        if file == "zero3":
            config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        recipe = Recipe(
            model=str(tmp_path / "base"),
            ds_config=config,
            merge=merge,
            out=str(tmp_path / file),
            **NUMBERS | {"steps": 2, "lr": 1e-2},
        )
        assert pools.run(2, run_adapter, recipe=recipe, fields=fields) == [0, 0]

    with warnings.catch_warnings(action="ignore"):
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        before = {name: value.clone() for name, value in base.state_dict().items()}
        theirs = (
            PeftModel.from_pretrained(base, tmp_path / "zero2" / "hf")
            .merge_and_unload()
            .state_dict()
        )
        ours = AutoModelForCausalLM.from_pretrained(
            tmp_path / "zero3" / "hf", dtype=torch.float32
        ).state_dict()
    assert max((theirs[name] - value).abs().max().item() for name, value in ours.items()) <= 5e-5
    assert max((theirs[name] - value).abs().max().item() for name, value in before.items()) > 1e-3

    for run in ("zero2", "zero3"):
        to_hf(tmp_path / run, tmp_path / f"{run}_step")
    step, end = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (tmp_path / "zero2_step", tmp_path / "zero2" / "hf")
    )
    assert step.keys() == end.keys() and all(
        torch.equal(step[key], value) for key, value in end.items()
    )
    divided = load_file(tmp_path / "zero3_step" / "adapter_model.safetensors")
    assert {key: value.shape for key, value in divided.items()} == {
        key: value.shape for key, value in end.items()
    }
    assert max((divided[key] - value).abs().max().item() for key, value in end.items()) <= 5e-5
    assert json.loads((tmp_path / "zero2_step" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(tmp_path / "base")

    assert (
        convert(["to-hf", str(tmp_path / "zero3"), str(tmp_path / "zero3_merged"), "--merge"]) == 0
    )
    check_same_files(tmp_path / "zero3_merged", tmp_path / "zero3" / "hf")


def check_same_files(one: Path, other: Path) -> None:
    names = [
        {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        for folder in (one, other)
    ]
    assert (
        names[0] == names[1]
        and Path("config.json") in names[0]
        and Path("adapter_config.json") not in names[0]
    )
    assert [
        name
        for name in sorted(names[0])
        if (one / name).read_bytes() != (other / name).read_bytes()
    ] == []


def run_again(recipe: Recipe, fields: dict[str, Any]) -> tuple[int, str]:
    """Train, or find that the run is finished, on a rank of a pool.

    Return the exit code and the output.
    """
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        code = run_adapter(recipe, fields)
    return code, printed.getvalue()


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear"},
        pytest.param(
            {"target_modules": ["embed_tokens"], "use_rslora": True}, marks=pytest.mark.slow
        ),
    ],
)
def test_the_adapter_of_a_finished_run_is_merged_beside_it(
    pools: Any, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """The merged model equals the results of the converter and of peft.

    hf/ keeps the adapter, whose config contains the base model's absolute path.
    """
    save_tiny(tmp_path / "base", tie_word_embeddings="embed_tokens" not in fields["target_modules"])
    out = tmp_path / "run"
    recipe = Recipe(
        model=os.path.relpath(tmp_path / "base"),
        ds_config=strategy("zero2"),
        out=str(out),
        **NUMBERS | {"steps": 2, "lr": 1e-2},
    )
    again = partial(pools.run, 1, run_again, fields=fields)

    ((code, said),) = again(recipe=dataclasses.replace(recipe, stop_at=1, merge=True))
    assert code == 0 and not (out / "hf").exists()
    ((code, said),) = again(recipe=dataclasses.replace(recipe, stop_at=1, merge=True))
    way = (
        "step 1 of 2 is not the last one. Merge a checkpoint with recipekit convert to-hf --merge"
        f" {out} NEW_FOLDER\n"
    )
    assert (
        code == 0
        and f"--merge: nothing is exported, because {way}" in said
        and "nothing to do: " in said
    ), said

    assert again(recipe=recipe)[0][0] == 0
    adapter = (out / "hf" / "adapter_model.safetensors").read_bytes()
    assert json.loads((out / "hf" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(tmp_path / "base")
    ((code, said),) = again(recipe=dataclasses.replace(recipe, merge=True))
    assert (
        code == 0
        and f"merged: the run in {out} has finished 2 of 2 steps" in said
        and "nothing to do" not in said
    ), said
    assert f"recipekit sample {out}/hf_merged" in said
    assert (out / "hf" / "adapter_model.safetensors").read_bytes() == adapter
    assert convert(["to-hf", str(out), str(tmp_path / "converted"), "--merge"]) == 0
    check_same_files(tmp_path / "converted", out / "hf_merged")
    assert convert(["to-hf", str(out), str(tmp_path / "unmerged")]) == 0
    assert (tmp_path / "unmerged" / "adapter_model.safetensors").read_bytes() == adapter

    with warnings.catch_warnings(action="ignore"):
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        theirs = PeftModel.from_pretrained(plain, out / "hf").merge_and_unload().state_dict()
    ours = load_file(out / "hf_merged" / "model.safetensors")
    assert (
        max((theirs[name] - value.float()).abs().max().item() for name, value in ours.items())
        <= 5e-5
    )

    ((code, said),) = again(recipe=dataclasses.replace(recipe, steps=3, resume=str(out)))
    assert (
        code == 0
        and f"{out}/hf_merged: holds the model of an earlier end of this run. Repeat this"
        " command with --merge"
        in said
    ), said


def test_a_checkpoint_without_an_adapter_is_not_merged(tmp_path: Path) -> None:
    for files, said in (
        ({}, "no adapter_config.json, so it is not a checkpoint of an adapter"),
        ({"adapter_config.json": tmp_path / "x"}, "no readable config.json"),
    ):
        step: Any = SimpleNamespace(folder=tmp_path, small_files=files, model_config=None)
        with pytest.raises(ConfigError, match=rf"contains {said}.*\. Leave out --merge"):
            empty_adapted_model(step)


# Config errors
# --------------------------------------------------------------------------------------------------


OTHERS = {  # kinds of peft adapters that are not trained and exported in any test
    "IA3Config": {"target_modules": Q, "feedforward_modules": []},
    "VeraConfig": {"target_modules": Q},
    "LoHaConfig": {"target_modules": Q},
    "LoKrConfig": {"target_modules": Q},
    "OFTConfig": {"target_modules": Q},
    "BOFTConfig": {"target_modules": Q},
    "AdaLoraConfig": {"target_modules": Q, "total_step": 10},
    "HRAConfig": {"target_modules": Q},
    "LNTuningConfig": {},
    "TrainableTokensConfig": {"token_indices": [1]},
    "PromptTuningConfig": {"num_virtual_tokens": 4},
    "PrefixTuningConfig": {"num_virtual_tokens": 4},
    "PromptEncoderConfig": {"num_virtual_tokens": 4, "encoder_hidden_size": 8},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_kind_than_lora_is_refused_by_name(kind: str) -> None:
    config = getattr(peft, kind)(**OTHERS[kind], task_type="CAUSAL_LM")
    said = refused(lambda model: get_peft_model(model, config))
    assert said.startswith(f"adapt: {kind}: {config.peft_type.value} is not supported"), said


FIELDS = [
    ({"init_lora_weights": "pissa"}, "init_lora_weights = pissa"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = pissa_niter_4"),
    ({"init_lora_weights": "olora"}, "init_lora_weights = olora"),
    (
        {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}},
        "loftq_config: is not supported",
    ),
    ({"layer_replication": [(0, 2), (1, 2)]}, "layer_replication: is not supported"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens: is not supported"),
]


@pytest.mark.parametrize(("fields", "said"), FIELDS, ids=[said for _, said in FIELDS])
def test_a_field_that_changes_the_base_or_the_layers_is_refused(
    fields: dict[str, Any], said: str
) -> None:
    assert f"adapt: {said}" in refused(partial(wrapped, fields={"target_modules": Q} | fields))


def two(model: Any) -> Any:
    made = wrapped(model, {"target_modules": Q})
    made.add_adapter("second", LoraConfig(target_modules=["v_proj"]))
    return made


def without_wrapper(model: Any) -> Any:
    return peft.inject_adapter_in_model(LoraConfig(target_modules=Q), model)


def scaled(model: Any) -> Any:
    made = wrapped(model, {"target_modules": Q})
    made.base_model.model.model.layers[0].self_attn.q_proj.set_scale("default", 3.0)
    return made


def a_norm_too(model: Any) -> Any:
    made = wrapped(model, {"target_modules": Q})
    made.base_model.model.model.norm.weight.requires_grad_(True)
    return made


def resized(model: Any) -> Any:
    model.resize_token_embeddings(300, mean_resizing=False)
    return wrapped(model, {"target_modules": Q})


def frozen(model: Any) -> Any:
    return wrapped(model, {"target_modules": Q, "inference_mode": True})


WAYS = [
    (two, "several adapters: default, second"),
    (without_wrapper, "without peft's wrapper"),
    (scaled, "sets the scaling of base_model.model.model.layers.0.self_attn.q_proj to 12.0"),
    (a_norm_too, "does not write into the adapter's file: base_model.model.model.norm.weight"),
    (resized, "replaces weights of the model: model.embed_tokens.weight"),
    (frozen, "inference_mode: is not supported"),
]


@pytest.mark.parametrize(("adapt", "said"), WAYS, ids=[adapt.__name__ for adapt, _ in WAYS])
def test_an_adapter_whose_file_would_lack_something_is_refused(
    adapt: Callable[[Any], Any], said: str
) -> None:
    assert said in refused(adapt)


def test_layouts_and_merges_that_are_not_exact_are_refused() -> None:
    lora = partial(wrapped, fields={"target_modules": ["embed_tokens"]})
    assert "tp > 1: peft's adapters do not support" in refused(lora, tp=2)
    assert "--merge with LoRA on a tied embedding" in refused(lora, kind="qwen3", merge=True)
    assert "trainable_token_indices with ZeRO-3" in refused(
        partial(wrapped, fields={"target_modules": Q, "trainable_token_indices": [1]}), stage=3
    )


# Resuming
# --------------------------------------------------------------------------------------------------

BEFORE = {"target_modules": ["v_proj", "q_proj"], "lora_dropout": 0.1}
CHANGES = [
    ({"lora_alpha": 64}, "adapt: lora_alpha = 64: the run in RUN has 16"),
    ({"lora_dropout": 0.0}, "adapt: lora_dropout = 0.0: the run in RUN has 0.1"),
    (
        {"init_lora_weights": "gaussian"},
        "adapt: init_lora_weights = gaussian: the run in RUN has True",
    ),
    (
        {"target_modules": ["q_proj", "k_proj"]},
        "adapt: target_modules = ['k_proj', 'q_proj']: the run in RUN has ['q_proj', 'v_proj']",
    ),
    (
        {"modules_to_save": ["lm_head"]},
        "adapt: modules_to_save = ['lm_head']: the run in RUN has None",
    ),
    ({"bias": "all"}, "adapt: bias = all: the run in RUN has none"),
    ({"use_rslora": True}, "adapt: use_rslora = True: the run in RUN has False"),
    ({"use_dora": True}, "adapt: use_dora = True: the run in RUN has False"),
]


def config_with(fields: dict[str, Any]) -> dict[str, Any] | None:
    made = adapter_config_of(
        apply_adapter(
            empty_model(tiny_config("llama"), "eager", "none"),
            AdapterRequest(partial(wrapped, fields=fields)),
            ds_config(0),
        )
    )
    return json.loads(json.dumps(made))


def write_run(folder: Path, **identity: Any) -> None:
    (folder / RUN_JSON).write_text(json.dumps({"identity": identity}))


@pytest.mark.parametrize(
    ("changes", "said"), CHANGES, ids=["_".join(changes) for changes, _ in CHANGES]
)
def test_a_resume_with_another_adapter_is_refused_with_the_difference(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    write_run(tmp_path, **{ADAPTER_KEY: config_with(BEFORE)})
    with pytest.raises(ConfigError) as caught:
        check_adapter(config_with(BEFORE | changes), "auto", tmp_path)
    assert len(caught.value.problems) == 1
    assert str(caught.value).replace(str(tmp_path), "RUN").startswith(said)
    # With an explicit --resume path the difference is accepted.
    check_adapter(config_with(BEFORE | changes), str(tmp_path), tmp_path)


def test_the_order_of_patterns_is_part_of_an_adapter(tmp_path: Path) -> None:
    """peft uses the first pattern that matches a module."""
    patterns = {"q_proj": 4, ".*_proj": 8}
    for name in ("alpha_pattern", "rank_pattern"):
        write_run(tmp_path, **{ADAPTER_KEY: config_with(BEFORE | {name: patterns})})
        check_adapter(config_with(BEFORE | {name: patterns}), "auto", tmp_path)
        with pytest.raises(ConfigError, match=f"adapt: {name} = "):
            check_adapter(
                config_with(BEFORE | {name: dict(reversed(patterns.items()))}), "auto", tmp_path
            )


def test_the_same_adapter_is_continued_however_its_names_are_ordered(tmp_path: Path) -> None:
    write_run(tmp_path, **{ADAPTER_KEY: config_with(BEFORE)})
    check_adapter(config_with(BEFORE | {"target_modules": ["q_proj", "v_proj"]}), "auto", tmp_path)
    write_run(tmp_path)  # a run folder older than this check
    check_adapter(config_with(BEFORE), "auto", tmp_path)
    write_run(tmp_path, **{ADAPTER_KEY: None})
    with pytest.raises(ConfigError, match=r"adapt makes one: the run in .* has no adapter of peft"):
        check_adapter(config_with(BEFORE), "auto", tmp_path)
