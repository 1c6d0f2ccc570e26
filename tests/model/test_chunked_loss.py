"""Models return token losses instead of logits, whatever operations follow the LM head."""

import contextlib
from dataclasses import replace

import pytest
import torch
from built_models import build_model
from peft import LoraConfig, get_peft_model
from recipekit.architectures.families import tiny_config
from recipekit.model.chunked_loss import (
    LOGITS_ARG,
    Operation,
    enable_chunked_loss,
    record_operations,
)
from recipekit.model.empty import CAUSAL_AUTO_CLASS
from recipekit.model.loss_path import CHUNKED_LOSS, FULL_LOGITS_LOSS, LossPath
from recipekit.model.probes import operations_of, probe
from recipekit.model.small import logits_of, small_copy
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from recipekit.spec.task import IGNORE
from recipekit.spec.task_specs import TASKS
from recipekit.tasks import pretrain

OF_LOSSES = pretrain.with_chunked_causal_loss(pretrain.TASK)
FACTS = TASKS["pretrain"]
CAP = ["div(the logits, 30.0)", "tanh(the logits)", "mul(the logits, 30.0)"]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", []),
        ("gpt2", []),
        ("gemma2", CAP),
        ("cohere", ["mul(the logits, 0.0625)"]),
        ("opt", ["contiguous(the logits)"]),
        ("mamba", ["float(the logits)"]),
    ],
)
def test_what_a_model_does_after_its_head_is_found(kind, expected):
    """Chunked losses and gradients must equal those from full logits, or `operations_of` must
    raise.
    """
    assert [
        str(operation) for operation in operations_of(tiny_config(kind, 264), "pretrain")
    ] == expected


def built(kind: str, loss: str, **changes: object):
    config = tiny_config(kind, 264) | changes
    return build_model(
        Recipe(model="none", init="random", attention="eager", loss=loss, seed=5),
        config,
        None,
        {"zero_optimization": {"stage": 0}},
        CPU,
    )


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 260, (2, 48), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    labels[0, 20:] = IGNORE
    return {
        "input_ids": ids,
        "position_ids": torch.arange(48).remainder(20).expand(2, -1),
        "labels": labels,
    }


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("gemma2", {"final_logit_softcapping": 0.5}),
        ("cohere", {}),
        ("gpt2", {}),
    ],
)
def test_rows_and_gradients_are_those_of_whole_logits(kind, changes):
    """Losses and gradients agree in training and in evaluation.

    A tied head's weights receive both gradients.
    """
    found = {}
    for loss, compute in (("chunked", OF_LOSSES.forward), ("whole", pretrain.forward)):
        torch.manual_seed(0)  # seeds dropout
        model = built(kind, loss, **changes).model
        output = compute(model, batch())
        rows = pretrain.loss(output, batch(), by_row=True)
        assert output.shape == ((2, 48) if loss == "chunked" else (2, 48, 264))
        assert pretrain.loss(output, batch(), by_row=False).item() == pytest.approx(
            rows.sum().item(), rel=1e-6
        )
        gradients = torch.autograd.grad(rows @ torch.tensor([1.0, 3.0]), list(model.parameters()))
        with torch.no_grad():
            evaluated = pretrain.loss(compute(model.eval(), batch()), batch(), by_row=True)
        found[loss] = [rows.detach(), evaluated, *gradients]
    largest = max(float(gradient.abs().max()) for gradient in found["whole"][2:])
    for number, (mine, theirs) in enumerate(zip(found["chunked"], found["whole"], strict=True)):
        assert float((mine - theirs).abs().max()) <= 1e-5 * (
            largest if number > 1 else float(theirs.abs().max())
        )


def test_without_labels_a_model_gives_logits_bit_for_bit():
    logits = [
        pretrain.forward(built("gemma2", loss).model.eval(), batch()) for loss in ("auto", "whole")
    ]
    assert logits[0].shape == (2, 48, 264) and torch.equal(*logits)


def test_what_cannot_be_is_told_or_refused():
    config = tiny_config("prophetnet", 264)
    assert built("llama", "auto").model_plan.loss_path == CHUNKED_LOSS
    assert built("llama", "whole").model_plan.loss_path == FULL_LOGITS_LOSS
    with pytest.raises(ValueError, match="its logits are not the output of its head"):
        operations_of(config, "pretrain")
    with pytest.raises(
        ConfigError,
        match=(
            r"loss = chunked: is not exact for this prophetnet: its logits are not the output of"
            r" its head\. Use --loss auto or --loss whole"
        ),
    ):
        built("prophetnet", "chunked")
    why = "its logits are not the output of its head"
    assert built("prophetnet", "auto").model_plan.loss_path == LossPath(False, why)


@pytest.mark.parametrize(
    ("target", "why"),
    [("q_proj", None), ("lm_head", "its head is a peft.tuners.lora.layer.Linear")],
)
def test_a_head_with_an_adapter_gives_logits(target, why):
    """An adapter on other layers has no effect here. The frozen head receives no gradient."""

    def adapt(model):
        return get_peft_model(
            model, LoraConfig(r=4, target_modules=[target], task_type="CAUSAL_LM")
        )

    recipe = Recipe(model="none", init="random", attention="eager", adapt=adapt)
    made = build_model(
        recipe, tiny_config("llama", 264), None, {"zero_optimization": {"stage": 0}}, CPU
    )
    assert made.model_plan.loss_path == (LossPath(False, why) if why else CHUNKED_LOSS)
    task = pretrain.TASK if why else OF_LOSSES
    rows = pretrain.loss(task.forward(made.model, batch()), batch(), by_row=True)
    rows.sum().backward()
    expected = pretrain.loss(pretrain.forward(made.model, batch()), batch(), by_row=True)
    assert rows.tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert {
        name.rsplit(".", 3)[-3]
        for name, parameter in made.model.named_parameters()
        if parameter.grad is not None
    } == {"lora_A", "lora_B"}
    with pytest.raises(ConfigError, match="loss = chunked") if why else contextlib.nullcontext():
        build_model(
            replace(recipe, loss="chunked"),
            tiny_config("llama", 264),
            None,
            {"zero_optimization": {"stage": 0}},
            CPU,
        )


def test_an_operation_that_mixes_or_overwrites_logits_is_none_of_each_logit_by_itself():
    for spoil, told in (
        (lambda logits: logits.softmax(-1), None),  # `operations_of` detects it by its numbers
        (lambda logits: logits[..., :7], "its logits are not the output of its head"),
        (lambda logits: logits[..., :300], "__getitem__"),
        (lambda logits: logits.mul_(2.0), "mul_"),
        (lambda logits: logits + torch.ones(264), r"add\(the logits, the logits\)"),
        (lambda logits: logits.masked_fill(torch.ones(264, dtype=torch.bool), -1.0), "masked_fill"),
    ):
        model = small_copy(tiny_config("llama", 264), FACTS)
        run = lambda model=model, spoil=spoil: spoil(logits_of(model, FACTS))  # noqa: E731
        if told is None:
            assert [str(operation) for operation in record_operations(model, run)[0]] == [
                "softmax(the logits, -1)"
            ]
            continue
        with pytest.raises(ValueError, match=told):
            record_operations(model, run)


def test_a_forward_that_does_something_else_than_its_small_copy_is_refused():
    """An additional operation, a missing operation, and a different constant are rejected.

    Otherwise the loss would be computed from different logits.
    """
    scaled = Operation(torch.Tensor.mul, (LOGITS_ARG, 2.0), ())
    for kind, operations, told in (
        (
            "llama",
            (scaled,),
            (
                r"a llama does not do mul\(the logits, 2.0\) after its head, and its small copy"
                r" does not"
            ),
        ),
        ("cohere", (), r"a cohere does mul\(the logits, 0.0625\) to its logits after its head"),
        ("cohere", (scaled,), r"a cohere does mul\(the logits, 0.0625\) to its logits"),
    ):
        model = small_copy(tiny_config(kind, 264), FACTS)
        enable_chunked_loss(model, operations)
        with pytest.raises(ConfigError, match=told):
            OF_LOSSES.forward(model, batch())


def test_looking_at_a_small_copy_seeds_no_other_device(monkeypatch):
    """Seeding a GPU would make its dropout independent of the recipe's seed."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    # A config that has not been probed before.
    config = tiny_config("llama", 264) | {"rms_norm_eps": 1e-4}
    build_model(
        Recipe(model="none", init="random", seed=5),
        config,
        None,
        {"zero_optimization": {"stage": 0}},
        CPU,
    )
    given = len(seeded)
    operations_of(config | {"rms_norm_eps": 1e-3}, "pretrain")
    assert probe(config | {"rms_norm_eps": 1e-3}, CAUSAL_AUTO_CLASS).unfit_for_varlen == ""
    assert given and len(seeded) == given and 0 not in seeded


def test_an_adapt_that_changes_an_attention_which_reads_documents_is_refused():
    def changed(model):
        model.set_attn_implementation("sdpa")
        return model

    recipe = Recipe(model="none", init="random", adapt=changed)
    config = tiny_config("llama", 264)
    with pytest.raises(ConfigError, match=r"sets the attention to sdpa.*Use --attention sdpa"):
        build_model(recipe, config, None, {"zero_optimization": {"stage": 0}}, CPU)
    build_model(
        replace(recipe, attention="sdpa"), config, None, {"zero_optimization": {"stage": 0}}, CPU
    )
