"""Attention over packed documents without a mask.

It must equal the definition of softmax, separate documents, and allocate no quadratic memory.
"""

import json
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from built_models import build_model
from packed_documents import LENGTHS, WAYS, WINDOWS, by_definition, drawn
from recipekit.architectures.families import default_config
from recipekit.architectures.lookup import SHIPPED
from recipekit.architectures.shrink import shrink
from recipekit.kernels import varlen as varlen_module
from recipekit.kernels.attention import VARLEN, VarlenUnsupportedError, attend
from recipekit.kernels.documents import (
    as_attention_mask,
    cu_seqlens_of,
    document_starts,
    with_documents,
)
from recipekit.kernels.varlen import (
    Scoring,
    activate_kernels,
    attention_by_document,
    varlen,
)
from recipekit.model.attention import choose_attention, device_fallback_reason
from recipekit.model.device import Activations, flash_refusal
from recipekit.model.empty import CAUSAL_AUTO_CLASS
from recipekit.model.probes import Capabilities, probe
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from recipekit.spec.task_specs import TASKS
from recipekit.tasks import pretrain
from recipekit.train import to_device
from torch.nn.attention import _registry, register_flash_attention_impl
from torch.profiler import ProfilerActivity, profile

CPU = torch.device("cpu")
VOCABULARY = 96


@pytest.mark.parametrize("causal", WAYS, ids=["causal", "both ways"])
@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: f"window {window}")
@pytest.mark.parametrize(
    ("heads", "dtype", "most"),
    [((4, 4), torch.float32, 1e-5), ((4, 2), torch.float32, 1e-5), ((4, 1), torch.bfloat16, 0.05)],
)
def test_it_is_the_softmax_of_each_document(heads, dtype, most, window, causal):
    check(LENGTHS, heads, dtype, most, window, causal)


def check(
    lengths: list[int],
    heads: tuple[int, int],
    dtype: torch.dtype,
    most: float,
    window: int,
    causal: bool = True,
) -> None:
    """Check outputs and gradients against the definition.

    `most` is the tolerance, relative to the largest value.
    """
    inputs, documents = drawn(lengths, heads, dtype)
    output = varlen(*inputs, documents, max(lengths), Scoring(0.3, window, causal))
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = by_definition(*exact, lengths, 0.3, window, causal)
    towards = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    output.backward(towards)
    expected.backward(towards.double())
    assert output.dtype == dtype
    for found, wanted in [
        (output, expected),
        *((tensor.grad, other.grad) for tensor, other in zip(inputs, exact, strict=True)),
    ]:
        assert (found.double() - wanted).abs().max() <= most * wanted.abs().max()


@pytest.mark.parametrize("lengths", [[40], [33, 33, 33], [300, 300]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_documents_of_one_length_are_computed_where_they_lie(lengths, dtype):
    """Documents of equal length form one batch of all tokens, which is neither gathered nor copied.

    The operation's results still have separate memory.
    """
    check(lengths, (4, 2), dtype, 1e-5 if dtype == torch.float32 else 0.05, 0)
    inputs, documents = drawn(lengths, (4, 2), torch.float32)
    torch.library.opcheck(
        attention_by_document,
        (*inputs, documents, 0.5, 0),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("window", [0, 3])
def test_its_gradient_is_the_derivative(window, causal):
    inputs, documents = drawn([4, 1, 6, 4], (2, 1), torch.float64, d=4)
    assert torch.autograd.gradcheck(
        lambda *three: varlen(*three, documents, 6, Scoring(0.5, window, causal)), inputs
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 16])
def test_as_an_operation_for_compilers_it_gives_the_same_bits(window, dtype):
    found = []
    for attention in (
        lambda *given: varlen(*given, Scoring(0.5, window)),
        lambda *given: attention_by_document(*given[:4], 0.5, window)[0],
    ):
        inputs, documents = drawn(LENGTHS, (4, 2), dtype)
        output = attention(*inputs, documents, max(LENGTHS))
        found.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("window", [0, 4])
def test_a_compiler_may_look_at_it_as_one_operation(window):
    inputs, documents = drawn([5, 9, 2], (2, 2), torch.float32, d=8)
    torch.library.opcheck(
        attention_by_document,
        (*inputs, documents, 0.5, window),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("window", [0, 16])
def test_not_a_bit_of_a_document_reaches_another(window, causal):
    """The third document is filled with NaN, and not even NaN reaches a different document."""
    found = []
    touched = slice(sum(LENGTHS[:2]), sum(LENGTHS[:3]))
    for spoilt in (False, True):
        inputs, documents = drawn(LENGTHS, (4, 2), torch.float32)
        for tensor in inputs if spoilt else []:
            tensor.data[touched] = math.nan
        output = varlen(*inputs, documents, max(LENGTHS), Scoring(0.3, window, causal))
        output.sum().backward()
        found.append([output.detach(), *(tensor.grad for tensor in inputs)])
    for clean, spoilt in zip(*found, strict=True):
        assert spoilt[touched].isnan().any() and not torch.equal(clean[touched], spoilt[touched])
        for rest in (slice(0, touched.start), slice(touched.stop, None)):
            assert torch.equal(clean[rest], spoilt[rest])


def llama(**changes: Any) -> dict[str, Any]:
    return (
        shrink(json.loads((SHIPPED / "meta-llama--Llama-3.1-8B.json").read_text()), VOCABULARY)
        | changes
    )


def built(attention: str, config: dict[str, Any], **changes: Any) -> Any:
    return build_model(
        Recipe(model="tiny", init="random", attention=attention, **changes), config, None, {}, CPU
    ).model


def packed(*rows: list[int]) -> dict[str, torch.Tensor]:
    """Return a micro-batch whose rows contain documents of these lengths."""
    generator = torch.Generator().manual_seed(3)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    ids, labels = (
        torch.randint(0, VOCABULARY, positions.shape, generator=generator) for _ in range(2)
    )
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def test_documents_begin_with_rows_and_where_positions_begin_anew():
    batch = packed([3, 2, 1], [6])
    assert cu_seqlens_of(batch["position_ids"]).tolist() == [0, 3, 5, 6, 12]
    assert document_starts(batch["position_ids"]).nonzero().tolist() == [
        [0, 0],
        [0, 3],
        [0, 5],
        [1, 0],
    ]
    handed = to_device(with_documents(batch), CPU)["documents"]
    assert handed.shape == (1, 1, 6, 5) and handed.dtype == torch.int32
    assert handed.untyped_storage().nbytes() == 5 * 4, (
        "the longest document is in the shape, not in memory"
    )


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_a_model_learns_the_same_as_with_a_mask(recomputed):
    """The loss and every gradient agree for three ways to separate documents.

    The documents are given, derived by the model from the positions, or separated by sdpa's mask.
    """
    batch = packed([40, 24], [64], [1, 63])
    found = []
    for attention, given in (
        ("sdpa", batch),
        ("auto", to_device(with_documents(batch), CPU)),
        ("varlen", batch),
    ):
        model = built(attention, llama(), activation_checkpointing=recomputed)
        loss = pretrain.loss(pretrain.forward(model, given), given, False)
        loss.backward()
        found.append((loss.detach(), [parameter.grad for parameter in model.parameters()]))
    for loss, gradients in found[1:]:
        torch.testing.assert_close(loss, found[0][0], rtol=1e-6, atol=0)
        torch.testing.assert_close(gradients, found[0][1], rtol=1e-4, atol=1e-4)
    assert torch.equal(found[1][0], found[2][0]) and all(map(torch.equal, found[1][1], found[2][1]))


def test_a_model_computes_its_own_loss_with_it():
    """transformers passes the arguments of its loss to every layer.

    Users' training loops, Trainer and accelerate call models in this way.
    """
    batch = packed([40, 24], [64])
    labels = {
        "labels": batch["labels"],
        "shift_labels": batch["labels"],
        "num_items_in_batch": (batch["labels"] != -100).sum(),
    }
    losses = [built(attention, llama())(**batch | labels).loss for attention in ("sdpa", "varlen")]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)


def test_a_document_changes_no_logit_and_no_gradient_of_another():
    model, found = built("auto", llama()), []
    for changed in (False, True):
        batch = to_device(with_documents(packed([20, 30, 14], [64])), CPU)
        batch["input_ids"][0, 20:50] = 7 if changed else 5
        batch["labels"][0, 20:50] = -100
        logits = pretrain.forward(model, batch)
        model.zero_grad()
        pretrain.loss(logits, batch, False).backward()
        gradients = [
            parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if "embed" not in name
        ]
        found.append((logits.detach(), gradients))
    (before, gradients), (after, others) = found
    moved = (before != after).any(-1)  # (B, T)
    assert moved[0, 20:50].all() and moved.sum() == 30
    assert all(map(torch.equal, gradients, others)), "the changed document has no labels"


def memory_of(length: int, attention: str = "auto") -> tuple[int, int]:
    """Return the memory of a forward and backward pass for a row of `length` tokens.

    The result is (bytes of the largest allocation, bytes that autograd saves).
    """
    model = built(attention, llama(num_hidden_layers=2, layer_types=None))
    batch = packed([length // 2, length // 4, *[length // 32] * 8])
    batch = to_device(with_documents(batch), CPU) if attention == "auto" else batch
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = pretrain.loss(pretrain.forward(model, batch), batch, False)
        loss.backward()
    assert watched.profiler is not None
    allocated = [
        event.nbytes()
        for event in watched.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    return max(allocated), sum(saved.values())


def test_nothing_grows_with_the_square_of_a_row():
    """Every allocation is recorded, including those inside torch's operations.

    sdpa's mask shows that a quadratic allocation would be detected.
    """
    assert memory_of(2048, "sdpa")[0] >= 2048**2
    largest, saved = {}, {}
    for length in (2048, 4096, 8192):
        largest[length], saved[length] = memory_of(length)
        assert largest[length] < length**2, "the bytes of a mask of bools"
    assert largest[8192] == 2 * largest[4096] == 4 * largest[2048]
    assert saved[8192] - saved[4096] == pytest.approx(2 * (saved[4096] - saved[2048]), rel=0.01)


# Full attention, windows, both, experts, narrow values, a hybrid.
FITTING = ["llama", "mistral", "gemma3_text", "qwen3_moe", "deepseek_v3", "qwen3_next"]
OTHERS = {
    "gemma2": "a soft cap",
    "gpt_oss": "s_aux of its own",
    "gpt2": "attention dropout of 0.1",
    "llama4_text": "computes something else",  # chunked attention
    "bloom": "does not run",  # ALiBi
    "reformer": "does not run",  # its attention does not use transformers' attention interface
    "mamba": "does not run",
}


def unfit(config: dict[str, Any]) -> str:
    return probe(config, CAUSAL_AUTO_CLASS).unfit_for_varlen


@pytest.mark.parametrize("family", FITTING)
def test_a_family_that_fits_is_found_by_running_it(family):
    assert unfit(default_config(family).to_dict()) == ""


@pytest.mark.parametrize("family", OTHERS)
def test_a_family_that_does_not_fit_keeps_sdpa_and_the_run_says_why(family):
    config = default_config(family).to_dict()
    name, note = choose_attention(
        "auto", config, "m", TASKS["pretrain"], Activations(torch.float32, CPU)
    )
    assert name == "sdpa" and OTHERS[family] in note and "not varlen" in note
    with pytest.raises(ConfigError, match=OTHERS[family]):
        choose_attention("varlen", config, "m", TASKS["pretrain"], Activations(torch.float32, CPU))


def test_other_flash_kernels_are_varlen_on_a_gpu(monkeypatch):
    """torch sees no GPU here, as in a dry run that names a device."""
    config, facts = default_config("llama").to_dict(), TASKS["pretrain"]
    gpu = Activations(torch.bfloat16, torch.device("cuda"))
    note = "attention varlen, with the kernels of FlashAttention"
    assert choose_attention("flash3", config, "m", facts, gpu) == ("varlen", f"{note} 3")
    assert choose_attention("flash4", config, "m", facts, gpu) == ("varlen", f"{note} 4")

    with pytest.raises(ConfigError, match=r"attention = flash4: .* 9.0 or 10.0, .* uses a cpu"):
        choose_attention("flash4", config, "m", facts, Activations(torch.bfloat16, CPU))
    with pytest.raises(ConfigError, match="rows of packed documents"):
        choose_attention("flash4", config, "m", TASKS["preference"], gpu)
    with pytest.raises(ConfigError, match="bf16 or fp16"):
        choose_attention(
            "flash4", config, "m", facts, Activations(torch.float32, torch.device("cuda"))
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert flash_refusal("flash4", torch.device("cuda")) == ""
    assert flash_refusal("flash3", torch.device("cuda")) == (
        "requires an NVIDIA GPU of compute capability 9.0, and this GPU has 10.0"
    )
    assert flash_refusal("auto", CPU) == flash_refusal("varlen", CPU) == ""


def test_torchs_registry_activates_the_kernels():
    """Without the packages, torch's own registration fails, and the run names the reason."""
    registered = dict(_registry._FLASH_ATTENTION_IMPLS)
    activated: list[str] = []
    activate_kernels("varlen")
    for attention, name, module in (
        ("flash3", "FA3", "flash_attn_interface"),
        ("flash4", "FA4", "flash_attn"),
    ):
        with pytest.raises(ConfigError, match=rf"attention = {attention}: cannot .*{module}"):
            activate_kernels(attention)
        register_flash_attention_impl(name, register_fn=partial(activated.append, name))
    try:
        activate_kernels("flash4")
        activate_kernels("flash3")
    finally:
        for name, function in registered.items():
            register_flash_attention_impl(name, register_fn=function)
    assert activated == ["FA4", "FA3"]


def test_a_window_that_a_layer_does_not_hand_over_is_found(monkeypatch):
    """This Mistral's window is only in the mask, so ignoring the mask would give wrong results."""
    attention = transformers.models.mistral.modeling_mistral.MistralAttention
    whole = attention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        theirs, self.config.sliding_window = self.config.sliding_window, None
        try:
            return whole(self, *args, **kwargs)
        finally:
            self.config.sliding_window = theirs

    monkeypatch.setattr(attention, "forward", forward)
    # Without an earlier cached result.
    seen = Capabilities(default_config("mistral").to_dict(), TASKS["pretrain"], "")
    assert "computes something else" in seen.unfit_for_varlen


def test_dropout_is_taken_from_the_config_as_it_is():
    config = default_config("gpt2").to_dict()
    assert unfit(config | {"attn_pdrop": 0.0}) == ""
    assert "attention dropout of 0.25" in unfit(
        default_config("llama").to_dict() | {"attention_dropout": 0.25}
    )


@pytest.mark.parametrize(
    ("changes", "dtype", "says"),
    [
        ({}, torch.bfloat16, ""),
        ({}, torch.float32, "not in float32"),
        ({"head_dim": 512}, torch.float16, "heads of 512 numbers"),
    ],
)
def test_a_gpu_takes_half_precision_and_heads_up_to_256(changes, dtype, says):
    reason = device_fallback_reason(llama() | changes, dtype, torch.device("cuda"))
    assert says in reason if says else reason == ""


def test_the_size_of_a_head_is_found_under_other_names():
    config = default_config("gpt2").to_dict() | {"n_embd": 1024, "n_head": 2}
    assert "heads of 512 numbers" in device_fallback_reason(
        config, torch.bfloat16, torch.device("cuda")
    )


@pytest.mark.parametrize(
    ("task", "kind", "expected"),
    [
        ("image_classification", "vit", "sdpa"),
        ("image_classification", "deit", "sdpa"),  # has two classes
        ("image_classification", "resnet", "eager"),  # has no attention
        ("preference", "llama", "sdpa"),
        ("reward", "bloom", "eager"),  # the class does not support sdpa
    ],
)
def test_a_task_without_packed_rows_keeps_sdpa_where_the_class_has_it(task, kind, expected):
    config, facts = {"model_type": kind}, TASKS[task]
    assert choose_attention("auto", config, "m", facts, Activations(torch.float32, CPU)) == (
        expected,
        "",
    )
    with pytest.raises(ConfigError, match="rows of packed documents"):
        choose_attention("varlen", config, "m", facts, Activations(torch.float32, CPU))


def test_a_row_is_refused_where_auto_needs_a_mask_after_all():
    config = default_config("gpt2").to_dict()
    with pytest.raises(
        ConfigError,
        match=(
            r"dense mask .* takes 51\.5 GB .* It is not varlen, which makes none: it has attention"
            r" dropout of 0\.1"
        ),
    ):
        choose_attention(
            "auto", config, "m", TASKS["pretrain"], Activations(torch.bfloat16, CPU, (1, 131072))
        )
    assert choose_attention(
        "auto", llama(), "m", TASKS["pretrain"], Activations(torch.bfloat16, CPU, (1, 131072))
    ) == (VARLEN, "")


@pytest.mark.parametrize(
    "given",
    [
        {"dropout": 0.1},
        {"softcap": 50.0},
        {"s_aux": torch.zeros(4)},
        {"is_causal": False},
        {"attention_mask": torch.ones(1, 1, 8, 8)},
        {"attention_mask": None},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_it_does_not_compute_it_refuses(given):
    heads = torch.randn(1, 4, 8, 16)
    documents = as_attention_mask(torch.tensor([0, 8], dtype=torch.int32), CPU)
    attend(torch.nn.Module(), heads, heads, heads, documents)
    with pytest.raises(VarlenUnsupportedError):
        attend(torch.nn.Module(), heads, heads, heads, **{"attention_mask": documents} | given)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize(
    ("name", "size"),
    [("WINDOW_BLOCK_QUERIES", 7), ("MAX_PADDED_TOKENS", 3), ("MAX_FP32_TOKENS", 2)],
)
def test_pieces_of_another_size_change_nothing(monkeypatch, name, size, causal):
    """The sizes apply to query blocks, jointly padded documents, and fp32 documents."""
    lengths = [5, 1, 7, 3, 3, 12, 31, 2]
    varlen_module._batches.cache_clear()
    monkeypatch.setattr(varlen_module, name, size)
    try:
        for window in (0, 4):
            inputs, documents = drawn(lengths, (4, 2), torch.float32)
            output = varlen(*inputs, documents, max(lengths), Scoring(0.3, window, causal))
            exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
            expected = by_definition(*exact, lengths, 0.3, window, causal)
            weights = torch.linspace(0.5, 2.0, output.numel()).view_as(output)
            (output * weights).sum().backward()
            (expected * weights).sum().backward()
            assert (output - expected).abs().max() < 1e-5
            for mine, theirs in zip(inputs, exact, strict=True):
                assert (mine.grad - theirs.grad).abs().max() <= 1e-5 * max(
                    1.0, float(theirs.grad.abs().max())
                )
    finally:
        varlen_module._batches.cache_clear()


def test_documents_are_sorted_by_their_lengths_and_the_window(monkeypatch):
    """Short documents are batched, and so are documents of equal length.

    Documents longer than the window are computed separately.
    """
    monkeypatch.setattr(varlen_module, "MAX_PADDED_TOKENS", 3)
    varlen_module._batches.cache_clear()
    bounds = (0, 2, 5, 9, 13, 14, 24, 28)
    found = [
        (batch.first, batch.num_documents, batch.length, batch.tokens is None, batch.padded is None)
        for batch in varlen_module._batches(bounds, 0)
    ]
    assert found == [(0, 3, 3, False, False), (5, 3, 4, False, True), (14, 1, 10, True, True)]
    found = [
        (batch.first, batch.num_documents, batch.length)
        for batch in varlen_module._batches(bounds, 4)
    ]
    assert found == [(0, 3, 3), (5, 3, 4), (14, 1, 10)]
    found = [
        (batch.first, batch.num_documents, batch.length)
        for batch in varlen_module._batches(bounds, 3)
    ]
    assert found == [
        (0, 3, 3),
        (5, 1, 4),
        (9, 1, 4),
        (14, 1, 10),
        (24, 1, 4),
    ], "the same documents with another window"
    varlen_module._batches.cache_clear()


# Calls on a GPU
# ------------------------------------------------------------------------------------------

ON_A_GPU = [
    (
        causal,
        window,
        heads,
        (window - 1 if window else -1, 0 if causal else window - 1 if window else -1),
        heads != 4,
    )
    for causal in (True, False)
    for window in (0, 5)
    for heads in (4, 2)
]


@pytest.mark.parametrize(("causal", "window", "heads", "sides", "grouped"), ON_A_GPU)
def test_a_gpu_is_asked_for_the_same(monkeypatch, causal, window, heads, sides, grouped):
    """A window that is as long as the longest document is dropped.

    FlashAttention counts the keys on each side without the query's own key.
    """
    asked = []
    monkeypatch.setattr(
        varlen_module,
        "varlen_attn",
        lambda *given, **named: asked.append((given, named)) or "computed",
    )
    query, key = (SimpleNamespace(is_cuda=True, shape=(28, count, 16)) for count in (4, heads))
    documents = torch.tensor([0, 10, 28], dtype=torch.int32)
    for longest, expected in ((18, sides), (5, (-1, 0 if causal else -1))):
        assert (
            varlen(query, key, "value", documents, longest, Scoring(0.25, window, causal))
            == "computed"
        )
        given, named = asked.pop()
        assert (
            given[0] is query
            and given[1] is key
            and given[2] == "value"
            and given[3] is documents
            and given[4] is documents
        )
        assert given[5:] == (longest, longest)
        assert named == {"scale": 0.25, "window_size": expected, "enable_gqa": grouped}


@pytest.mark.parametrize(
    ("available", "hip", "capability", "says"),
    [
        (True, None, (8, 0), ""),
        (True, None, (9, 0), ""),
        (True, None, (7, 5), "compute capability 8.0 and above"),
        (True, "6.3", (9, 4), "compute capability 8.0 and above"),
        (False, None, None, ""),  # a dry run for another machine
    ],
)
def test_an_old_or_another_card_does_without(monkeypatch, available, hip, capability, says):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.version, "hip", hip)
    asked = []
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: asked.append(device) or capability
    )
    reason = device_fallback_reason(llama(), torch.bfloat16, torch.device("cuda", 1))
    assert says in reason if says else reason == ""
    assert asked == ([torch.device("cuda", 1)] if available and hip is None else [])
    assert device_fallback_reason(
        llama(), torch.float64, CPU
    ) == "" and "device of type xpu" in device_fallback_reason(
        llama(), torch.bfloat16, torch.device("xpu")
    )
