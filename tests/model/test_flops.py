"""Model FLOPs must equal torch's count, with documents and windows. `mfu` is computed from them."""

import json
import platform
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from job import metrics
from recipekit.architectures.lookup import SHIPPED
from recipekit.kernels.documents import with_document_starts, with_documents
from recipekit.model.empty import empty_model
from recipekit.model.flops import CONVENTION, NO_WINDOW, attended_keys, model_flops
from recipekit.spec.devices import DEVICES, Device, find_device
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from recipekit.spec.task_specs import TASKS
from short_runs import BASE, train
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

SEQ_LEN = 96


def published(model: str) -> dict[str, Any]:
    return json.loads((SHIPPED / f"{model.replace('/', '--')}.json").read_text())


@pytest.mark.parametrize(
    # Parameters that each token uses, and 12 * layers * heads * head_dim.
    ("model", "met", "per_key"),
    [
        ("openai-community/gpt2", 124_439_808, 12 * 12 * 12 * 64),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248 - 128_256 * 4096, 12 * 32 * 32 * 128),
        # heads * head_dim is twice the hidden_size, and the embedding is tied to the head.
        ("Qwen/Qwen3-0.6B", 596_049_920, 12 * 28 * 16 * 128),
        (
            "mistralai/Mixtral-8x7B-v0.1",
            46_702_792_704 - 32_000 * 4096 - 45_097_156_608 * 6 // 8,
            12 * 32 * 32 * 128,
        ),
        (
            "Qwen/Qwen3-30B-A3B",
            30_532_122_624 - 151_936 * 2048 - 28_991_029_248 * 120 // 128,
            12 * 48 * 32 * 128,
        ),
    ],
)
def test_flops_of_a_published_model(model: str, met: int, per_key: int) -> None:
    flops = model_flops(empty_model(published(model)))
    assert flops is not None and flops.per_unit == 6 * met and flops.per_key == {NO_WINDOW: per_key}


def test_flops_of_a_decoder_with_another_head_than_its_embedding() -> None:
    """A reward model's head computes one number for each token.

    All tokens use the head, and the embedding is only a lookup.
    """
    model = empty_model(
        published("Qwen/Qwen3-0.6B") | {"num_labels": 1}, auto_class=TASKS["reward"].auto_class
    )
    flops = model_flops(model)
    assert (
        flops is not None
        and flops.per_unit == 6 * (596_049_920 - 151_936 * 1024 + 1024)
        and flops.per_key == {NO_WINDOW: 12 * 28 * 16 * 128}
    )


def small(**shape: Any) -> Any:
    size: dict[str, Any] = {
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "vocab_size": 500,
    }
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**(size | shape), attn_implementation="eager")
    )


def counted(model: Any) -> int:
    """Return torch's FLOPs for a forward and backward pass of two rows with all pairs of tokens.

    Norms and similar operations are not counted, because they are not matrix products.
    """
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, SEQ_LEN, dtype=torch.int64)).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "shape",
    [
        {"model_type": "llama"},
        {"model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": True},
        {
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
        }
        | {"v_head_dim": 48, "first_k_dense_replace": 3},
    ],
    ids=lambda shape: shape["model_type"],
)
def test_flops_are_those_that_torch_counts(shape: dict[str, Any]) -> None:
    model = small(**shape)
    flops = model_flops(model)
    assert flops is not None and counted(model) == pytest.approx(
        flops.of_step(2 * SEQ_LEN, [2 * SEQ_LEN * SEQ_LEN]), rel=0.01
    )


def test_a_frozen_weight_costs_no_gradient_of_its_own() -> None:
    """torch counts the same under LoRA, whose gradients pass through every frozen weight."""
    from peft import LoraConfig, get_peft_model

    model = small(model_type="llama")
    flops = model_flops(model)
    adapted: Any = get_peft_model(
        model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    lora = model_flops(adapted)
    assert (
        lora is not None
        and flops is not None
        and 4 * 0.95 < lora.per_unit / (flops.per_unit / 6) < 5
    )
    # The first layer's inputs need no gradient, so q, k and v of layer 0 cost 2 instead of 4.
    first = adapted.get_base_model().model.layers[0].self_attn
    spared = (
        sum(
            2 * linear.base_layer.weight.numel()
            for linear in (first.q_proj, first.k_proj, first.v_proj)
        )
        * 2
        * SEQ_LEN
    )
    assert counted(adapted) == pytest.approx(
        lora.of_step(2 * SEQ_LEN, [2 * SEQ_LEN * SEQ_LEN]) - spared, rel=0.01
    )


PICTURES = TASKS["image_classification"]


def classifier(**shape: Any) -> Any:
    size: dict[str, Any] = {
        "hidden_size": 192,
        "intermediate_size": 700,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
    if shape["model_type"] in ("clip", "siglip"):
        size = {"vision_config": size | {"model_type": f"{shape['model_type']}_vision_model"}}
    return AutoModelForImageClassification.from_config(
        AutoConfig.for_model(**(size | shape), attn_implementation="eager")
    )


def counted_of_pictures(model: Any, height: int = 32, width: int = 32) -> int:
    """Return torch's FLOPs for a forward and backward pass over two images."""
    with FlopCounterMode(display=False) as counter:
        model(pixel_values=torch.zeros(2, 3, height, width)).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "shape",
    [
        {"model_type": "vit", "num_labels": 1000},
        {"model_type": "vit", "patch_size": 6},  # drops a border of two pixels
        {"model_type": "deit", "architectures": ["DeiTForImageClassification"]},
        {"model_type": "beit"},
        {"model_type": "dinov2"},
        {"model_type": "dinov2_with_registers", "num_register_tokens": 4},
        {"model_type": "clip"},
    ],
    ids=lambda shape: " ".join(map(str, [shape["model_type"], *list(shape.values())[1:2]])),
)
def test_flops_of_a_picture_are_those_that_torch_counts(shape: dict[str, Any]) -> None:
    model = classifier(**shape)
    flops = model_flops(model, PICTURES.rows)
    assert (
        flops is not None
        and flops.per_key == {}
        and counted_of_pictures(model) == pytest.approx(flops.of_step(2), rel=0.01)
    )


def test_flops_of_a_picture_that_is_no_square() -> None:
    model = classifier(model_type="vit", image_size=[32, 64])
    flops = model_flops(model, PICTURES.rows)
    assert flops is not None and counted_of_pictures(model, 32, 64) == pytest.approx(
        flops.of_step(2), rel=0.01
    )


def test_frozen_layers_of_a_picture_cost_no_gradient_of_their_own() -> None:
    """Only the last layer is frozen, so gradients pass through all layers.

    A model's first layers would be an exception if frozen, because no gradient would pass through
    them.
    """
    model = classifier(model_type="vit")
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".layers.2." not in name
    flops = model_flops(model, PICTURES.rows)
    assert flops is not None and counted_of_pictures(model) == pytest.approx(
        flops.of_step(2), rel=0.01
    )


def test_flops_of_a_published_vit() -> None:
    """ViT-L/16 has 24 layers of 12 * 1024**2 weights (and 13 * 1024 biases and norms).

    The layers process 196 patches and the class token.
    """
    shape = {
        "model_type": "vit",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_labels": 1000,
    }
    flops = model_flops(empty_model(shape, auto_class=PICTURES.auto_class), PICTURES.rows)
    layers, attention = 6 * 24 * (12 * 1024**2 + 13 * 1024) * 197, 12 * 24 * 1024 * 197**2
    ends = 4 * 3 * 16**2 * 1024 * 196 + 6 * (1025 * 1000 + 3 * 1024)
    # 61.6 GMACs (DeiT III, table 1).
    assert flops is not None and flops.per_unit == layers + attention + ends == pytest.approx(
        3 * 123.2e9, rel=0.01
    )


@pytest.mark.parametrize("kind", ["resnet", "convnext", "swin", "siglip", "perceiver"])
def test_of_a_model_that_mixes_otherwise_nothing_is_said(kind: str) -> None:
    from recipekit.architectures.families import default_config

    with torch.device("meta"):
        assert (
            model_flops(
                AutoModelForImageClassification.from_config(
                    default_config(kind, "image_classification")
                ),
                PICTURES.rows,
            )
            is None
        )


def test_samples_have_no_keys_to_count() -> None:
    assert attended_keys([{"pixel_values": torch.zeros(2, 3, 4, 4)}], {}) == []


def test_keys_are_counted_as_the_mask_allows_them() -> None:
    """The reference is transformers' mask for packed rows, with and without a window."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    positions = torch.tensor([[*range(5), *range(7), *range(12)], [*range(24)]])
    config = AutoConfig.for_model(
        "mistral", hidden_size=16, num_attention_heads=2, sliding_window=4
    )
    config._attn_implementation = "eager"
    common: dict[str, Any] = dict(
        config=config,
        inputs_embeds=torch.zeros(2, 24, 16),
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
    )
    seen = [
        int((make(**common) == 0).sum())
        for make in (create_causal_mask, create_sliding_window_causal_mask)
    ]
    assert attended_keys([{"position_ids": positions}], [NO_WINDOW, 4]) == seen
    # Under sequence parallelism a rank counts its local tokens.
    halves = [{"position_ids": half} for half in positions.split(12, dim=1)]
    assert attended_keys(halves, [NO_WINDOW, 4]) == seen


def test_keys_on_both_sides_are_counted_as_the_mask_allows_them() -> None:
    """Keys are counted either from a micro-batch's documents or from the document starts.

    With a window of 3, a token attends to three tokens on either side.
    """
    batch = {
        "position_ids": torch.stack(
            [torch.cat([torch.arange(length) for length in row]) for row in ([9, 1, 14], [24])]
        )
    }
    place = torch.arange(24)
    apart = (batch["position_ids"] == 0).cumsum(-1)
    same = apart[:, :, None] == apart[:, None, :]  # (B, T, T)
    seen = [int(same.sum()), int((same & ((place[:, None] - place[None, :]).abs() <= 3)).sum())]
    for add in (with_documents, with_document_starts):
        assert attended_keys([add(batch)], [NO_WINDOW, 3], bidirectional=True) == seen


def test_windows_are_those_of_the_layers() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    flops = model_flops(
        small(
            model_type="qwen3",
            head_dim=32,
            layer_types=kinds,
            sliding_window=16,
            use_sliding_window=True,
            max_window_layers=0,
        )
    )
    assert flops is not None and flops.per_key == {NO_WINDOW: 12 * 4 * 32, 16: 2 * 12 * 4 * 32}
    windowed = model_flops(small(model_type="mistral", sliding_window=8))
    assert windowed is not None and list(windowed.per_key) == [8]
    assert model_flops(small(model_type="mamba", state_size=16)) is None  # it has no attention


def test_a_device_is_found_by_what_people_call_it() -> None:
    called = {
        "H200": "NVIDIA H200",
        "H100-SXM-80GB": "NVIDIA H100 80GB HBM3",
        "a100 80gb pcie": "NVIDIA A100 80GB PCIe",
        "4090": "NVIDIA GeForce RTX 4090",
    }
    called |= {
        "RTX4090": called["4090"],
        "rtx_4090": called["4090"],
        "A100-PCIe-40 GB": "NVIDIA A100-PCIE-40GB",
        "H10080GBHBM3": called["H100-SXM-80GB"],
    }
    assert {name: find_device(name)[0] for name in called} == called
    for name, why in (
        ("H100", r"may be any of NVIDIA H100 80GB HBM3 \(80 GiB\), NVIDIA H100 NVL \(94 GiB\)"),
        ("H-100", "may be any of NVIDIA H100 80GB"),
        ("A1004", "is not a known device"),
        ("TPU", "is not a known device"),
    ):
        with pytest.raises(ConfigError, match=why):
            find_device(name)
    assert all(find_device(name) == (name, device) for name, device in DEVICES.items())


def train_on_known(recipe: Recipe, argv: list[str], peak: float) -> tuple[int | str, str]:
    """Run on a rank of a pool as if its device's peak FLOPs were known."""
    with mock.patch.dict(DEVICES, {platform.machine(): Device(peak, 2**40, 1e12)}):
        return train(recipe, argv)


def test_mfu_is_what_documents_allow_over_the_peak(pools: Any, tmp_path: Path) -> None:
    """The attended keys in all ranks' rows are summed.

    The sum must equal the count of a single process that reads the same rows.
    """
    from recipekit.data.batching import DataRank
    from recipekit.data.processors import load_tokenizer
    from recipekit.data.request import request_from_recipe
    from recipekit.data.stream import open_stream
    from recipekit.plan import resolve_run
    from recipekit.spec.command import parse

    recipe = replace(BASE, eval_every=0, warmup_steps=0)
    argv = ["--out", str(tmp_path / "known"), "--steps", "2"]
    assert [
        code for code, _ in pools.run(2, train_on_known, recipe=recipe, argv=argv, peak=1e12)
    ] == [0, 0]
    saved = json.loads((tmp_path / "known" / "run.json").read_text())
    assert saved["mfu"] == {"convention": CONVENTION, "peak": 1e12}
    words = [
        "--tiny",
        *(
            word
            for name in ("micro_batch", "global_batch", "seq_len")
            for word in (f"--{name}", str(getattr(recipe, name)))
        ),
    ]
    plan = resolve_run(parse(recipe, Path("resume.py"), [*words, "--resume", "never"]))
    flops = model_flops(empty_model(saved["model_config"]))
    assert flops is not None
    stream = open_stream(
        request_from_recipe(plan.recipe),
        load_tokenizer(plan.recipe.model, plan.recipe.tokenizer),
        rank=DataRank(1, 0),
    )
    try:
        for line in metrics(tmp_path / "known"):
            batches, _ = next(stream)
            done = flops.of_step(
                recipe.global_batch * recipe.seq_len, attended_keys(batches, flops.per_key)
            )
            assert line["mfu"] == pytest.approx(done / (2 * 1e12 * line["step_s"]), rel=1e-12)
            full = flops.of_step(
                recipe.global_batch * recipe.seq_len, [recipe.global_batch * recipe.seq_len**2]
            )
            # At least the causal mask must be respected.
            assert (
                done
                < full - 0.4 * flops.per_key[NO_WINDOW] * recipe.global_batch * recipe.seq_len**2
            )
    finally:
        stream.close()


@pytest.mark.parametrize("name", ["H100", "A100", "gh200", "H-100", "NVIDIA A100"])
def test_a_name_of_several_devices_is_refused_with_a_name_of_each(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_device(name)
    (problem,) = refused.value.problems
    written = re.findall(r'--device (?:"([^"]+)"|(\S+))', problem.fix)
    found = [find_device(quoted or word)[0] for quoted, word in written]
    assert len(found) >= 2 and len({*found}) == len(found), problem.fix
    assert all(f"{known} ({DEVICES[known].memory >> 30} GiB)" in problem.rule for known in found)
