"""Sequence parallelism: split rows train like full rows, and packed documents stay separate."""

import dataclasses
import json
import random
from typing import Any

import pytest
import torch
from built_models import build_model
from parity import accumulating, compare, recipe_for, reference, train_in_layout
from recipekit.dslint import check as ds_config
from recipekit.dslint import resolve
from recipekit.model.empty import empty_model
from recipekit.parallel.sequence import check_sequence_parallel, local_sequence_chunk
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import make_mesh
from recipekit.spec.recipe import Recipe
from shipped_jsons import strategy
from tiny_models import ds_config as ds
from tiny_models import tiny_config


@pytest.fixture(scope="session")
def corpora(tmp_path_factory) -> dict[str, str]:
    """Write short documents, four in a row of 64 tokens, and documents longer than a row."""
    folder = tmp_path_factory.mktemp("corpora")
    words = random.Random(1)
    for name, count, length in (("packed", 4000, 15), ("long", 400, 2000)):
        texts = ["".join(words.choice("abcdefgh ") for _ in range(length)) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
    return {name: str(folder / f"{name}.jsonl") for name in ("packed", "long")}


CASES = [
    ("sp2 zero1, packed rows", "untied", 2, "zero1", {"sp": 2}, "packed"),
    ("sp2 zero1, one document a row", "untied", 2, "zero1", {"sp": 2}, "long"),
    (
        "sp2 zero3, one document a row, checkpointed activations",
        "qwen3",
        2,
        "zero3",
        {"sp": 2, "activation_checkpointing": True},
        "long",
    ),
    ("sp2 dp2 zero2, packed rows", "untied", 4, "zero2", {"sp": 2, "micro_batch": 2}, "packed"),
    ("sp2 dp2 zero3, packed rows", "untied", 4, "zero3", {"sp": 2}, "packed"),
    ("sp4 zero0, packed rows", "tied", 4, "zero0", {"sp": 4}, "packed"),
]


SLOW = (
    "sp2 zero1, packed rows",
    "sp2 zero1, one document a row",
    "sp2 zero3, one document a row, checkpointed activations",
    "sp2 dp2 zero2, packed rows",
    "sp2 dp2 zero3, packed rows",
    "sp4 zero0, packed rows",
)


@pytest.mark.parametrize(
    ("model", "world", "file", "layout", "corpus"),
    [
        pytest.param(*case[1:], id=case[0], marks=pytest.mark.slow if case[0] in SLOW else ())
        for case in CASES
    ],
)
def test_parts_of_rows_train_like_plain_pytorch(
    pools, tmp_path, corpora, model, world, file, layout, corpus
):
    recipe = recipe_for(model, **accumulating(world, **layout), dataset=corpora[corpus])
    codes = pools.run(
        world, train_in_layout, recipe=recipe, config=strategy(file), out=str(tmp_path / "run")
    )
    assert codes == [0] * world
    compare(tmp_path / "run", reference(model, dataset=corpora[corpus]))
    assert "sequence_parallel" not in (tmp_path / "run" / "hf" / "config.json").read_text()


# Lengths of the first row's documents. The boundary between two ranks is within the second
# document.
LENGTHS = (5, 9, 10)


def rows(change: bool = False) -> dict[str, torch.Tensor]:
    """Return a packed row and a row of one document.

    With `change`, the first row's second document has different tokens.
    """
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 256, (2, sum(LENGTHS)), generator=generator)
    if change:
        ids[0, LENGTHS[0] : LENGTHS[0] + LENGTHS[1]] = 7
    positions = torch.stack(
        [torch.cat([torch.arange(length) for length in LENGTHS]), torch.arange(sum(LENGTHS))]
    )
    labels = torch.randint(0, 256, ids.shape, generator=generator)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def config_of(kind: str) -> dict[str, Any]:
    if kind == "one key-value head":
        return tiny_config("llama") | {"num_key_value_heads": 1}
    if kind == "windows":  # every other layer sees 6 tokens
        kinds = ["sliding_attention", "full_attention"] * 2
        return tiny_config("qwen3") | {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": kinds,
            "max_window_layers": 0,
        }
    return tiny_config(kind)


def forward_and_backward(
    model: Any, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    from recipekit.tasks import pretrain

    output = model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        attention_mask=batch.get("document_starts"),
        use_cache=False,
    )
    model.zero_grad()
    pretrain.loss(output.logits, batch, by_row=False).backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return output.logits.detach(), gradients


def recipe_of(attention: str, sp: int) -> Recipe:
    return Recipe(model="none", init="random", attention=attention, sp=sp, seq_len=sum(LENGTHS))


def flash_by_definition(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Compute FlashAttention for one row of documents that are separated by their positions."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    assert query.shape[0] == 1 and attention_mask is None
    documents = (kwargs.pop("position_ids") == 0).cumsum(-1)[0]
    place = torch.arange(query.shape[2])
    distance = place[:, None] - place[None, :]
    mask = (
        (documents[:, None] == documents[None, :])
        & (distance >= 0)
        & (distance < (kwargs.pop("sliding_window", None) or 10**9))
    )
    return sdpa_attention_forward(module, query, key, value, mask[None, None], **kwargs)


def part_of(kind: str, attention: str) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Return this rank's logits and gradients for the rows, and for the changed rows."""
    import torch.distributed as dist
    from recipekit.parallel import sequence
    from recipekit.parallel.groups import ProcessGroups
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sp, rank = dist.get_world_size(), dist.get_rank()
    groups = ProcessGroups(make_mesh(sp, sp=sp), "cpu")
    flash = attention == "flash_attention_2"
    model = build_model(
        recipe_of("sdpa" if flash else attention, sp),
        config_of(kind),
        groups,
        ds(0, sp),
        torch.device("cpu"),
    ).model.eval()
    if flash:  # not installed here, so its mathematical definition replaces it
        sequence.apply_sequence_parallel(model, attention, recipe_of(attention, sp).seq_len, groups)
    theirs = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    type(ALL_ATTENTION_FUNCTIONS).register("flash_attention_2", flash_by_definition)
    try:
        return [
            forward_and_backward(model, local_sequence_chunk(rows(change), sp, rank))
            for change in (False, True)
        ]
    finally:
        type(ALL_ATTENTION_FUNCTIONS).register("flash_attention_2", theirs)


# auto: varlen, or sdpa for gpt2.
@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize("kind", ["llama", "one key-value head", "windows", "gpt2"])
def test_documents_of_a_packed_row_do_not_see_each_other(pools, kind, attention):
    """The logits and gradients on two ranks equal the results for full rows.

    A document's logits do not change if a different document changes.
    """
    parts = pools.run(2, part_of, kind=kind, attention=attention)
    whole = build_model(
        recipe_of("eager" if attention == "eager" else "sdpa", 1),
        config_of(kind),
        None,
        ds(0),
        torch.device("cpu"),
    ).model.eval()
    found = []
    for number in (0, 1):
        logits, gradients = forward_and_backward(whole, rows(change=bool(number)))
        found.append(torch.cat([part[number][0] for part in parts], dim=1))
        torch.testing.assert_close(found[-1], logits, rtol=1e-5, atol=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                sum(part[number][1][name] for part in parts),
                gradient,
                rtol=1e-4,
                atol=1e-4,
                msg=name,
            )
    second = slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1])
    moved = (found[0] != found[1]).any(-1)  # (B, T)
    assert moved[0, second].all() and not moved[1].any()
    assert moved.sum() == LENGTHS[1]


def test_a_part_knows_where_documents_start_in_the_whole_row():
    batch = rows()
    parts = [local_sequence_chunk(batch, 3, rank) for rank in range(3)]
    for name in batch:
        assert torch.equal(torch.cat([part[name] for part in parts], dim=1), batch[name])
    for part in parts:
        assert part["input_ids"].shape == (2, 8)
        assert part["document_starts"].nonzero().tolist() == [[0, 0], [0, 5], [0, 14], [1, 0]]
    assert local_sequence_chunk(batch, 1, 0) is batch


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {
                "model_type": "qwen3_next",
                "num_experts": 4,
                "layer_types": ["linear_attention", "full_attention"],
            },
            "outside of attention",
        ),
        (
            {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "hidden_size": 64},
            "outside of attention",
        ),
        (
            {
                "model_type": "gpt_oss",
                "num_local_experts": 4,
                "layer_types": ["full_attention"] * 2,
            },
            "one number for each head",
        ),
        ({"model_type": "bloom", "n_layer": 2, "hidden_size": 64}, "AttentionInterface"),
        (
            {
                "model_type": "llama",
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                "max_position_embeddings": 16,
            },
            "--seq_len 16",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_models_that_cut_rows_would_change_are_refused(config, says):
    config = {"num_hidden_layers": 2, "vocab_size": 64} | config
    recipe = dataclasses.replace(recipe_of("sdpa", 2), attention="eager")
    with pytest.raises(ConfigError, match=says):
        check_sequence_parallel(empty_model(config, "eager"), recipe.seq_len)


SHAPE = {
    "hidden_size": 64,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 261,
    "intermediate_size": 128,
}


@pytest.mark.parametrize(
    ("world", "changes", "text"),
    [
        (8, {"sp": 8}, "sp = 8: does not divide the model's 12 attention heads. Use --sp 4"),
        (
            10,
            {"sp": 5},
            "sp = 5: does not divide the model's 12 attention heads and seq_len = 64. Use --sp 2",
        ),
        (6, {"sp": 3}, "sp = 3: does not divide seq_len = 64. Use --sp 2"),
        (
            4,
            {"sp": 2, "tp": 2},
            (
                "sp = 2 with tp = 2: sequence parallelism can be combined only with data"
                " parallelism and ZeRO. Use --sp 1, or --tp 1"
            ),
        ),
        (
            4,
            {"sp": 2, "pp": 2},
            (
                "sp = 2 with pp = 2: sequence parallelism can be combined only with data"
                " parallelism and ZeRO. Use --sp 1, or --pp 1"
            ),
        ),
        (4, {"sp": 4}, None),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_the_nearest(world, changes, text):
    recipe = Recipe(model="org/model", seq_len=64, global_batch=world, **changes)
    problems = [
        str(problem)
        for problem in ds_config.lint_config(
            ds_config.LintInput(strategy("zero1"), world=world, recipe=recipe, model_config=SHAPE)
        )
    ]
    assert problems == ([text] if text else [])


def test_the_json_s_degree_is_honoured_and_its_batch_counts_rows_once():
    recipe = Recipe(model="org/model", seq_len=64, global_batch=4, sp=2)
    mesh = make_mesh(4, sp=2)
    config = strategy("zero3") | {"sequence_parallel_size": 2}
    assert (
        ds_config.lint_config(
            ds_config.LintInput(config, mesh=mesh, recipe=recipe, model_config=SHAPE)
        )
        == []
    )
    resolved, _ = resolve.resolve_ds_config(config, recipe, mesh, SHAPE)
    numbers = [
        resolved[key]
        for key in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "sequence_parallel_size",
        )
    ]
    assert numbers == [4, 1, 2, 2]
