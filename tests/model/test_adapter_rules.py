"""Rules for adapters, tested in one process: fields, checks, names and merged weights."""

import copy
import dataclasses
import enum
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from built_models import build_model
from peft import LoraConfig, PeftModel, get_peft_model
from peft_models import CASES, Q, logits_of, recipe_with, refused, trained, wrapped
from recipekit.compat.peft import copied
from recipekit.model import adapter, build
from recipekit.model.adapter import (
    AdapterRequest,
    adapter_config_of,
    apply_adapter,
    merge_unties_head,
    merged_weights,
    published_keys,
)
from recipekit.model.empty import empty_model
from recipekit.model.export import _gather_parameters
from recipekit.planner import resolve
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from tiny_models import ds_config, tiny_config
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

# Fields of LoraConfig
# ------------------------------------------------------------------------------------------------

TRAINED = {
    *("r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
    *(
        "target_modules",
        "exclude_modules",
        "target_parameters",
        "layers_to_transform",
        "layers_pattern",
    ),
    *(
        "bias",
        "lora_bias",
        "modules_to_save",
        "trainable_token_indices",
        "ensure_weight_tying",
        "fan_in_fan_out",
    ),
}
DESCRIPTIONS = {"task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"}
OF_THE_MACHINE = {
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "runtime_config",
}
ALL = [
    field.name
    for field in dataclasses.fields(LoraConfig)
    if field.name not in ("peft_type", "init_lora_weights")
]


def changed(name: str) -> LoraConfig:
    config = LoraConfig()
    setattr(config, name, "another")
    return config


@pytest.mark.parametrize("name", ALL)
def test_a_field_is_allowed_or_refused_and_compared_or_not(name: str) -> None:
    problems = adapter._check_config(changed(name))
    allowed = name in TRAINED | DESCRIPTIONS
    assert [problem.where for problem in problems] == ([] if allowed else [f"adapt: {name}"])
    before, after = (
        adapter_config_of(SimpleNamespace(peft_config={"own": config}))
        for config in (LoraConfig(), changed(name))
    )
    assert before is not None and after is not None
    assert {key for key in {*before, *after} if before.get(key) != after.get(key)} == {
        name
    } - OF_THE_MACHINE
    assert not OF_THE_MACHINE & before.keys() and before.keys() >= TRAINED


def test_initialisers_that_keep_the_base_model_are_allowed() -> None:
    for init in (True, False, "gaussian", "orthogonal"):
        assert adapter._check_config(LoraConfig(init_lora_weights=init)) == []
    for init in ("eva", "pissa", "olora", "corda", "loftq", None, "Gaussian"):
        config = LoraConfig()
        config.init_lora_weights = init  # type: ignore[assignment]
        (problem,) = adapter._check_config(config)
        assert (
            problem.where == f"adapt: init_lora_weights = {init}"
            and "changes the base weights or needs data" in problem.rule
        )


def test_every_wrong_field_is_named_at_once() -> None:
    config = changed("use_qalora")
    config.init_lora_weights, config.kasa_config = "pissa", {}  # type: ignore[assignment]
    config._private = 3  # type: ignore[attr-defined]
    said = [problem.where for problem in adapter._check_config(config)]
    assert said == ["adapt: use_qalora", "adapt: kasa_config", "adapt: init_lora_weights = pissa"]
    subclass = type("MyConfig", (LoraConfig,), {})
    assert adapter._check_config(subclass())[0].where == "adapt: MyConfig"
    (problem,) = adapter._check_config(peft.VeraConfig())
    assert (problem.where, problem.rule) == (
        "adapt: VeraConfig",
        "VERA is not supported: only LoRA and its variants DoRA and rsLoRA are",
    )


def test_values_of_a_config_are_compared_as_json() -> None:
    kind = enum.Enum("kind", {"A": "a"})
    for value, wanted in (
        (kind.A, "a"),
        ({1: {"b", "a"}, "x": kind.A}, {"1": ["a", "b"], "x": "a"}),
        ({3, 1}, ["1", "3"]),
        (frozenset({"b", "a"}), ["a", "b"]),
        (["b", "a"], ["a", "b"]),
        (("b", "a"), ["a", "b"]),
        ((3, 1), [3, 1]),
        ([("b", 1), {"c"}], [["b", 1], ["c"]]),
        (("b", 1), ["b", 1]),
        *((same, same) for same in (None, True, 3, 0.5, "a")),
        (Path("a"), "a"),
    ):
        assert adapter._to_json_value(value) == wanted and type(
            adapter._to_json_value(value)
        ) is type(wanted)


def test_three_names_are_listed() -> None:
    assert [adapter._first_names(list(names)) for names in ("a", "abc", "abcd", "abcde")] == [
        "a",
        "a, b, c",
        "a, b, c and 1 more",
        "a, b, c and 2 more",
    ]


# Models that adapt returns
# --------------------------------------------------------------------------------------------------

LORA = {"target_modules": Q}


def empty(kind: str = "llama") -> Any:
    return empty_model(tiny_config(kind), "eager", "none")


def made_by(adapt: Any, kind: str = "llama", stage: int = 0, **more: Any) -> Any:
    with warnings.catch_warnings(action="ignore"):
        return apply_adapter(empty(kind), AdapterRequest(adapt, **more), ds_config(stage))


def mixed(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=Q), mixed=True)


def untrained(model: Any) -> Any:
    return wrapped(model, LORA).requires_grad_(False)


def scaled_and_resized(model: Any) -> Any:
    model.resize_token_embeddings(300, mean_resizing=False)
    made = wrapped(model, LORA | {"use_rslora": True})
    # The scale that the adapter would have without use_rslora.
    made.base_model.model.model.layers[3].self_attn.q_proj.set_scale("default", 16 / 4)
    return made


@pytest.mark.parametrize(
    ("adapt", "said"),
    [
        (mixed, ["adapt: mixes adapters of several kinds (PeftMixedModel)"]),
        (untrained, ["adapt: leaves no weights to train"]),
        (
            scaled_and_resized,
            [
                (
                    "adapt: sets the scaling of base_model.model.model.layers.3.self_attn.q_proj to"
                    " 32.0, which adapter_config.json cannot state"
                ),
                "adapt: replaces weights of the model: model.embed_tokens.weight, lm_head.weight",
            ],
        ),
    ],
)
def test_every_problem_of_an_adapter_is_said(adapt: Any, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        made_by(adapt)
    assert [
        f"{problem.where}: {problem.rule}"[: len(start)]
        for problem, start in zip(caught.value.problems, said, strict=True)
    ] == said


def test_a_model_without_an_adapter_is_returned_as_it_is() -> None:
    def first_layers(model: Any) -> Any:
        return model.requires_grad_(False)

    made = made_by(first_layers, merge=True)
    assert (
        type(made).__name__ == "LlamaForCausalLM"
        and published_keys(made) == {}
        and adapter_config_of(made) is None
    )


def test_the_base_model_is_named_as_others_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    real = str(tmp_path / "real")
    cases = [
        ("real", real, None),
        ("./real", real, None),
        ("link", real, None),
        ("org/name", "org/name", "abc"),
        ("none", "none", "abc"),
        ("", None, None),
    ]
    for model, name, revision in cases:
        config = made_by(partial(wrapped, fields=LORA), model=model, revision="abc").peft_config[
            "default"
        ]
        assert (config.base_model_name_or_path, config.revision) == (name, revision)
    assert (
        made_by(partial(wrapped, fields=LORA), model="org/name").peft_config["default"].revision
        is None
    )


def test_peft_knows_of_zero3_while_it_makes_layers_only() -> None:
    seen = []

    def adapt(model: Any) -> Any:
        seen.append(is_deepspeed_zero3_enabled())
        if len(seen) > 2:
            raise KeyError("own error")
        return model

    initialise = PeftModel.__init__
    for stage in (3, 2):
        made_by(adapt, stage=stage)
    with pytest.raises(KeyError):
        made_by(adapt, stage=3)
    assert (
        seen == [True, False, True]
        and not is_deepspeed_zero3_enabled()
        and PeftModel.__init__ is initialise
    )


def test_a_layout_is_refused_by_its_axis() -> None:
    tokens = {"trainable_token_indices": [1], "target_modules": Q}
    cases: list[tuple[dict[str, Any], int, dict[str, Any], list[str]]] = [
        (
            LORA,
            0,
            {"tp": 2, "ep": 4},
            [
                "ep > 1: peft's adapters do not support experts on other ranks. Use --ep 1",
                "tp > 1: peft's adapters do not support tensor-",
            ],
        ),
        (LORA, 3, {"ep": 2}, ["ep > 1: peft's"]),
        (
            tokens,
            3,
            {"tp": 2},
            ["tp > 1: peft's adapters", "adapt: trainable_token_indices with ZeRO-3: "],
        ),
    ]
    for fields, stage, more, starts in cases:
        lines = refused(partial(wrapped, fields=fields), stage=stage, **more).splitlines()
        assert len(lines) == len(starts) and all(
            start in line for line, start in zip(lines, starts, strict=True)
        ), lines
    for stage in (0, 1, 2):
        made_by(partial(wrapped, fields=tokens), stage=stage)
    made_by(partial(wrapped, fields=LORA), tp=1, ep=1)


def test_a_merge_is_refused_only_where_it_would_change_two_weights() -> None:
    for kind, target in (("qwen3", "embed_tokens"), ("qwen3", "lm_head")):
        assert "--merge with LoRA on a tied embedding" in refused(
            partial(wrapped, fields={"target_modules": [target]}), kind=kind, merge=True
        )
    made_by(partial(wrapped, fields={"target_modules": ["embed_tokens"]}), kind="llama", merge=True)
    made_by(
        partial(wrapped, fields=LORA | {"modules_to_save": ["lm_head"]}), kind="qwen3", merge=True
    )
    made_by(partial(wrapped, fields={"target_modules": ["lm_head"]}), kind="qwen3")


def test_a_trained_weight_may_be_written_under_any_of_its_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in "abc"})
    model["b"].weight = model["a"].weight
    for written, lost in (
        ("abc", ""),
        ("bc", ""),
        ("ac", ""),
        ("c", "a.weight"),
        ("b", "c.weight"),
        ("", "a.weight, c.weight"),
    ):
        monkeypatch.setattr(
            adapter,
            "published_keys",
            lambda model, written=written: {name: f"{name}.weight" for name in written},
        )
        problems = adapter._check_trained(model)
        assert [problem.rule.rpartition(": ")[2] for problem in problems] == (
            [lost] if lost else []
        )
    assert model["c"].requires_grad_(False) and len(adapter._check_trained(model)) == 1


def test_keys_are_those_of_an_adapter_of_any_name() -> None:
    def adapt(model: Any) -> Any:
        return get_peft_model(
            model, LoraConfig(target_modules=Q, modules_to_save=["norm"]), adapter_name="own"
        )

    made = made_by(adapt, model="org/name")
    keys = published_keys(made)
    place = "base_model.model.model.layers.3.self_attn.q_proj.lora_B"
    assert (
        keys[f"{place}.weight"] == f"{place}.own.weight"
        and keys["base_model.model.model.norm.weight"]
        == "base_model.model.model.norm.modules_to_save.own.weight"
    )
    assert len(keys) == 2 * 8 + 1 and made.peft_config["own"].base_model_name_or_path == "org/name"


def test_a_recipe_gives_its_layout_and_seed_to_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, own = [], adapter.apply_adapter

    def recorded(model: Any, request: AdapterRequest, config: Any) -> Any:
        asked.append(request)
        return planned(model, request, config)

    def planned(model: Any, request: AdapterRequest, config: Any) -> Any:
        return own(model, dataclasses.replace(request, tp=1, ep=1), config)

    monkeypatch.setattr(build, "apply_adapter", recorded)
    monkeypatch.setattr(resolve, "apply_adapter", planned)
    recipe = recipe_with(LORA, merge=True, tp=2, ep=4)
    values = []
    for seed in (3, 3, 4):
        torch.manual_seed(99 + len(values))
        made = build_model(
            dataclasses.replace(recipe, seed=seed),
            two_layers("llama"),
            None,
            ds_config(0),
            torch.device("cpu"),
        )
        values.append(
            dict(made.model.named_parameters())[
                "base_model.model.model.layers.1.self_attn.q_proj.lora_A.default.weight"
            ]
        )
    assert asked == [AdapterRequest(recipe.adapt, "", True, 2, 4)] * 3  # type: ignore[arg-type]
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])


# Merged weights
# --------------------------------------------------------------------------------------------------


def two_layers(kind: str) -> dict[str, Any]:
    config = tiny_config(kind)
    layers = {key: 2 for key in ("num_hidden_layers", "n_layer") if key in config}
    return config | layers | {key: config[key][:2] for key in ("layer_types",) if config.get(key)}


def random_model(kind: str) -> Any:
    model = build_model(
        Recipe(model="none", init="random", seed=5, attention="eager"),
        two_layers(kind),
        None,
        ds_config(0),
        torch.device("cpu"),
    ).model
    # Buffers outside the adapter's layers.
    for number, name in enumerate(("stored", "computed")):
        (
            model.model.register_buffer(
                name, torch.tensor([1.5, number]).double(), persistent=number == 0
            )
            if hasattr(model, "model")
            else None
        )
    return model


def merged_of(
    model: Any, dtype: torch.dtype, writes: bool = True
) -> tuple[dict[str, torch.Tensor], list[tuple[str, torch.dtype]]]:
    asked, built = [], SimpleNamespace(cuts={}, names={})

    def gather(group: Any, dtype: torch.dtype) -> Any:
        for name, parameter in group:
            asked.append((name, dtype))
            yield from _gather_parameters([(name, parameter)], dtype, built, None)  # type: ignore[arg-type]

    return dict(merged_weights(model, gather, dtype, writes)), asked


IN_FP16 = (
    "DoRA of Conv1D",
    "all biases",
    "norms saved",
    "some tokens",
    "tied, head saved",
    "experts",
)
# Cases with a tied model. A saved copy of the embedding or of the head is no longer tied to the
# other.
UNTIED = {"tied, embedding saved", "tied, head saved", "tied, both saved"}


QUICK = {
    *(
        "every linear layer",
        "DoRA of Conv1D",
        "own ranks and alphas",
        "all biases",
        "a bias of B",
        "norms saved",
        "both ends",
    ),
    *(
        "some tokens",
        "tied, head saved",
        "tied, both saved",
        "tied, saved as one",
        "tied, some tokens",
        "experts",
    ),
}


@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_merged_weights_are_those_of_peft(case: str) -> None:
    """Merging must not change the model itself.

    A rank that writes no file still takes part in every gather.
    """
    kind, fields = CASES[case]
    base = random_model(kind)
    keys = base.state_dict().keys()
    with warnings.catch_warnings(action="ignore"):
        model = trained(
            apply_adapter(base, AdapterRequest(partial(wrapped, fields=fields)), ds_config(0))
        )
        theirs = copy.deepcopy(model).merge_and_unload()
    wanted, logits = theirs.state_dict(), logits_of(model)
    ours, asked = merged_of(model, torch.float32)
    assert wanted.keys() == keys and ours.keys() <= keys
    assert all((ours[name] - wanted[name]).abs().max() <= 1e-6 for name in ours)
    first = {value.data_ptr(): name for name, value in wanted.items() if name in ours}
    assert all(value.data_ptr() in first for value in wanted.values()), (
        "what is not written is tied to what is"
    )
    assert (logits_of(model) - logits).abs().max() <= 1e-5 and merge_unties_head(model) == (
        case in UNTIED
    )
    assert merged_of(model, torch.float32, writes=False)[1] == asked

    if case not in IN_FP16:
        return
    halves, asked = merged_of(model, torch.float16)
    around = {name for name, dtype in asked if dtype == torch.float32}
    assert {dtype for _, dtype in asked} <= {torch.float32, torch.float16} and all(
        "lora_" not in name or name in around for name, _ in asked
    )
    for name, value in halves.items():
        assert torch.equal(value, ours[name] if name.endswith(".stored") else ours[name].half()), (
            name
        )


def test_a_copy_of_a_module_has_full_tensors_and_no_hooks() -> None:
    inner = torch.nn.Linear(2, 2)
    module: Any = torch.nn.Module()
    module.register_parameter("none", None)
    module.register_buffer("empty", None)
    module.register_buffer("mean", torch.ones(2))
    module.inner, module.nothing, module.merged_adapters = inner, None, ["own"]
    for one in (module, inner):
        one.register_forward_hook(lambda *_: pytest.fail("a hook was called"))
        one.register_forward_pre_hook(lambda *_: pytest.fail("a hook was called"))
    made = copied(module, {"p.inner.weight": torch.full((2, 2), 3.0)}, "p.")
    assert (
        made.inner.weight.tolist() == [[3, 3], [3, 3]]
        and made.inner.bias.shape == (0,)
        and not made.inner.weight.requires_grad
    )
    assert (
        made.none is None
        and made.empty is None
        and made.nothing is None
        and made.mean.tolist() == [1, 1]
    )
    assert (
        made.merged_adapters == []
        and module.merged_adapters == ["own"]
        and inner.weight.tolist() != [[3, 3], [3, 3]]
    )
    made.inner.bias = None
    assert made.inner(torch.ones(2)).tolist() == [6, 6]
