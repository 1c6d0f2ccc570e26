"""Initial values with `init = random`, compared per parameter with transformers' `from_config`."""

import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from built_models import build_model
from pool import ROOT
from recipekit.architectures.families import tiny_config
from recipekit.model import initial_values
from recipekit.model.config_errors import CONSTRUCTOR_ERRORS
from recipekit.model.empty import config_of, empty_model
from recipekit.spec.recipe import Recipe
from recipekit.spec.task_specs import TASKS

sys.path.insert(0, str(ROOT / "tools" / "make"))
import support_matrix

# Bound for differences of means or variances, in standard errors of both samples. With about 40,000
# comparisons, the bound is exceeded by chance once in 10,000 runs. The seeds are fixed, so the
# result does not vary.
BOUND = 6.0
SEEDS = 3
MOST = 120e6  # parameters of the largest compared model
WHISPER = {
    "model_type": "whisper",
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 264,
    "max_source_positions": 40,
    "max_target_positions": 32,
    "num_mel_bins": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CLIP = {
    "model_type": "clip",
    "projection_dim": 48,
    "text_config": TOWER | {"vocab_size": 264, "max_position_embeddings": 32},
    "vision_config": TOWER | {"image_size": 32, "patch_size": 8},
}
SIZES = TOWER | {"vocab_size": 264, "pad_token_id": 0, "layer_types": ["full_attention"] * 2}
VBERT = {
    "model_type": "modernvbert",
    "image_token_id": 7,
    "text_config": SIZES,
    "vision_config": TOWER | {"image_size": 32, "patch_size": 8},
}
# Model types on the support pages for which no small random copy can be created, and the reason.
WITHOUT = {
    "pretrain": {
        "blt": "cannot shrink",
        "gemma4_assistant": "hidden_size_per_layer_input must be 0",
        "musicgen": "cannot shrink",
        "musicgen_melody": "cannot shrink",
        "openai-gpt": "has no initialiser for",
    },
    "masked_lm": {
        "ibert": "Cannot copy out of meta tensor",
        "neomme": "is not a multiple of 4",
        "reformer": "config.is_decoder=False",
        "perceiver": "M parameters",
    },
    "image_classification": {
        "bit": "must be divisible by num_groups",
        "dinat": "natten",
        "imagegpt": "has no initialiser for",
        "shieldgemma2": "M parameters",
        **dict.fromkeys(
            ("cvt", "efficientnet", "mobilenet_v1", "mobilenet_v2", "mobilevit", "mobilevitv2"),
            "cannot shrink",
        ),
        **dict.fromkeys(("perceiver", "pp_lcnet", "swiftformer", "timm_wrapper"), "cannot shrink"),
    },
}

Values = dict[str, torch.Tensor]


def drawn_here(config: dict[str, Any], auto_class: str, seed: int) -> Values:
    model, whole = (empty_model(config, "eager", "small", auto_class=auto_class) for _ in range(2))
    cpu = torch.device("cpu")
    zero: dict[str, Any] = {"zero_optimization": {"stage": 0}}
    values = initial_values.InitialValues(seed, full_model=whole)
    initial_values.fill_parameters(
        model, values, initial_values.Target(cpu, torch.float32, None, zero), {}
    )
    return {name: value.detach() for name, value in model.named_parameters()}


def drawn_by_transformers(config: dict[str, Any], auto_class: str, seed: int) -> Values:
    made: Any = config_of(config)
    made._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1000 + seed)
        model = getattr(transformers, auto_class).from_config(made, dtype=torch.float32)
    return {name: value.detach() for name, value in model.named_parameters()}


def differences(config: dict[str, Any], auto_class: str, seeds: int = SEEDS) -> list[str]:
    """List the parameters whose initial values do not have transformers' distribution.

    An element that transformers sets to the same value for every seed must have that value. For all
    other elements, mean and variance are compared. Both must be within BOUND standard errors, which
    are estimated from the samples' fourth moments.
    """
    ours = [drawn_here(config, auto_class, seed) for seed in range(seeds)]
    theirs = [drawn_by_transformers(config, auto_class, seed) for seed in range(seeds)]
    assert ours[0].keys() == theirs[0].keys() and len(ours[0]) > 3
    return [
        found
        for name in ours[0]
        for found in _differences(name, *(_stacked(name, drawn) for drawn in (ours, theirs)))
    ]


def _stacked(name: str, drawn: list[Values]) -> torch.Tensor:
    return torch.stack([values[name].flatten() for values in drawn]).double()  # (seeds, n)


def _differences(name: str, mine: torch.Tensor, theirs: torch.Tensor) -> Iterator[str]:
    fixed = (theirs == theirs[0]).all(0)
    if not torch.allclose(mine[:, fixed], theirs[:, fixed], rtol=1e-6, atol=1e-7):
        yield f"{name}: {int(fixed.sum())} values that do not depend on the seed differ"
    mine, theirs = mine[:, ~fixed], theirs[:, ~fixed]
    if (mine == mine[0]).all(0).any():
        yield f"{name}: values do not depend on the seed"
    if (count := mine.numel()) < 8:
        return
    variances = mine.var(), theirs.var()
    spread = sum(
        ((sample - sample.mean()) ** 4).mean() - sample.var() ** 2 for sample in (mine, theirs)
    )
    off = (mine.mean() - theirs.mean()).abs() / (sum(variances) / count) ** 0.5
    wide = (variances[0] - variances[1]).abs() / (spread.clamp(min=1e-60) / count) ** 0.5
    if off > BOUND or wide > BOUND:
        yield (
            f"{name}: mean {mine.mean():.3g} instead of {theirs.mean():.3g}, deviation"
            f" {variances[0] ** 0.5:.3g} instead of {variances[1] ** 0.5:.3g}"
        )


CASES: dict[str, tuple[str, Any]] = {
    "gpt2": ("pretrain", None),
    # The head is initialised first. It is tied to the embedding, which has a row for padding.
    "xlm-roberta": ("pretrain", None),
    "mamba2": ("pretrain", None),
    "camembert": ("masked_lm", None),
    "clip": ("image_classification", None),  # the outer model initialises the classifier
    "regnet": ("image_classification", None),
    # The encoder initialises its positions.
    "whisper": ("AutoModelForSpeechSeq2Seq", WHISPER),
    "clip with both towers": ("AutoModel", CLIP),
    # The model initialises its head with a truncated normal distribution.
    "modernvbert": ("AutoModelForMaskedLM", VBERT),
}


def config_and_class(case: str) -> tuple[dict[str, Any], str]:
    task, config = CASES[case]
    if config is None:
        return support_matrix.tiny_model_config(task, case), TASKS[task].auto_class
    return config, task


@pytest.mark.parametrize("case", CASES)
def test_a_family_starts_as_transformers_starts_it(case: str) -> None:
    config, auto_class = config_and_class(case)
    assert differences(config, auto_class) == []


@pytest.mark.parametrize(
    ("case", "found"),
    [
        (
            "whisper",
            [
                "model.encoder.embed_positions.weight: 2560 values that do not depend on the seed"
                " differ"
            ],
        ),
        (
            "xlm-roberta",
            ["lm_head.decoder.weight: 64 values that do not depend on the seed differ"],
        ),
        ("clip", ["classifier.weight: mean "]),
        ("modernvbert", ["lm_head.weight: mean "]),
        (
            "clip with both towers",
            ["visual_projection.weight: mean ", "text_projection.weight: mean "],
        ),
    ],
)
def test_values_that_another_module_sets_are_missed_without_its_initialiser(
    monkeypatch: pytest.MonkeyPatch, case: str, found: list[str]
) -> None:
    monkeypatch.setattr(initial_values, "initialised_from_outside", lambda whole: {})
    said = differences(*config_and_class(case))
    assert len(said) == len(found) and all(
        line.startswith(start) for line, start in zip(said, found, strict=True)
    ), said


def test_values_from_outside_depend_on_the_name_alone() -> None:
    """Two projections with one initialiser must get different values, not scaled copies.

    A different seed gives different values.
    """
    one, again, other = (drawn_here(CLIP, "AutoModel", seed) for seed in (3, 3, 4))
    first, second = (one[f"{name}_projection.weight"] for name in ("text", "visual"))
    assert torch.equal(first, again["text_projection.weight"]) and not torch.equal(
        first, other["text_projection.weight"]
    )
    assert abs(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]) < 0.1


def test_each_value_comes_from_the_seed_and_the_name() -> None:
    """The values are the same in every version.

    They come from a generator seeded with the seed and the parameter's name, with a standard
    deviation of 0.02.
    """
    digest = hashlib.blake2b(b"7:lm_head.weight", digest_size=8).digest()
    assert initial_values.seed_of(7, "lm_head.weight") == int.from_bytes(digest, "little") // 2
    drawn = drawn_here(tiny_config("llama", 264), "AutoModelForCausalLM", 7)
    for name in (
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.1.mlp.down_proj.weight",
    ):
        generator = torch.Generator().manual_seed(initial_values.seed_of(7, name))
        assert torch.equal(
            drawn[name], torch.empty_like(drawn[name]).normal_(0, 0.02, generator=generator)
        ), name


@pytest.mark.slow
@pytest.mark.parametrize("task", ["pretrain", "masked_lm", "image_classification"])
def test_every_family_of_the_support_pages_starts_as_transformers_starts_it(task: str) -> None:
    auto_class, found, not_made = TASKS[task].auto_class, dict[str, list[str]](), dict[str, str]()
    for kind in support_matrix.model_types(task):
        try:
            config = support_matrix.tiny_model_config(task, kind)
            size = sum(
                parameter.numel()
                for parameter in empty_model(
                    config, "eager", kind, auto_class=auto_class
                ).parameters()
            )
            if size > MOST:
                not_made[kind] = f"{size / 1e6:.0f} M parameters"
                continue
            if wrong := differences(config, auto_class):
                found[kind] = wrong
        except (*CONSTRUCTOR_ERRORS, ImportError) as error:
            not_made[kind] = str(error)
    assert found == {}
    assert not_made.keys() == WITHOUT[task].keys(), not_made
    assert all(why in not_made[kind] for kind, why in WITHOUT[task].items()), not_made


@pytest.mark.parametrize("kind", ["clip", "vit", "convnext"])
def test_a_new_head_on_files_is_drawn_as_transformers_draws_it(tmp_path, kind):
    """CLIP initialises its classifier in the initialiser of the full model."""
    config = tiny_config(kind, task="image_classification")
    auto: Any = transformers.AutoModelForImageClassification
    auto.from_config(config_of(config)).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    classes = {number: f"class {number}" for number in range(250)}
    wider = stored | {
        "id2label": classes,
        "label2id": {name: number for number, name in classes.items()},
    }
    recipe = Recipe(model=str(tmp_path), task="image_classification", num_labels=250)
    zero: dict[str, Any] = {"zero_optimization": {"stage": 0}}
    mine = build_model(recipe, wider, None, zero, torch.device("cpu")).model.get_parameter(
        "classifier.weight"
    )
    theirs = auto.from_pretrained(
        tmp_path, num_labels=250, ignore_mismatched_sizes=True
    ).classifier.weight
    assert mine.shape == theirs.shape and mine.std().item() == pytest.approx(
        theirs.std().item(), rel=0.1
    )
