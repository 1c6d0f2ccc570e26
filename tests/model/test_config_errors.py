"""The error for a config.json names the values that caused a constructor's exception."""

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import transformers
from cases import rows
from huggingface_hub.errors import StrictDataclassError
from recipekit.architectures.families import tiny_config
from recipekit.model import probes
from recipekit.model.config_errors import suspects_of, wrong_values
from recipekit.model.empty import construct
from recipekit.spec.errors import ConfigError, config_error
from recipekit.tasks import image_classification

ERRORS = [
    ArithmeticError,
    ZeroDivisionError,
    AssertionError,
    AttributeError,
    LookupError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
    StrictDataclassError,
]


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_a_constructor_is_refused_with_its_text(
    kind: Callable[[str], Exception],
) -> None:
    long = "x " * 300
    with (
        pytest.raises(ConfigError) as caught,
        wrong_values({"b": {"act": "gelo"}, "act": "gelu"}, "model = M"),
    ):
        raise kind(f"no `gelo`\n  in {long}")
    (problem,) = caught.value.problems
    text = str(kind(f"no `gelo`\n  in {long}")).replace("\n  ", " ")[:400]
    name = "" if kind is StrictDataclassError else f"{kind.__name__}: "  # type: ignore[attr-defined]
    if kind is not KeyError:  # a KeyError's text is a repr
        assert (
            problem.rule
            == f"transformers {transformers.__version__} does not take its config.json:"
            f" {name}{text} (probably b.act = gelo)"
        )
    assert (problem.where, problem.fix) == (
        "model = M",
        "correct the value in config.json",
    ) and name in problem.rule


def test_other_errors_and_refusals_are_not_changed() -> None:
    with pytest.raises(ConfigError) as bare, wrong_values({"a": "b"}, "model = M"):
        raise TypeError("x")
    assert bare.value.problems[0].rule.endswith("does not take its config.json: TypeError: x")
    for error in (
        OSError("a"),
        ImportError("a"),
        KeyboardInterrupt(),
        config_error("A", "is b", "use c"),
    ):
        with pytest.raises(type(error)) as caught, wrong_values({"a": 0}, "model = M"):
            raise error
        assert caught.value is error


def raised(error: Exception, *statements: str) -> Exception:
    """Raise `error` inside nested functions, and return it with its traceback.

    Each function is a statement in a file of transformers. The innermost function raises.
    """
    call: Callable[[], Any] = lambda: _raise(error)  # noqa: E731
    for number, statement in reversed(list(enumerate(statements))):
        file = f"/site/transformers/models/own/modeling_{number}.py"
        source = f"def run():\n    return call(\n        *{statement!r}[:0])\n"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        space: dict[str, Any] = {"call": call}
        exec(compile(source, file, "exec"), space)
        call = space["run"]
    try:
        call()
    except type(error) as found:
        return found
    raise AssertionError


def _raise(error: Exception) -> None:
    hidden_size = error  # names in this file must not count as model code
    raise hidden_size


NOT_IN_TRANSFORMERS = [
    ArithmeticError,
    RuntimeError,
    NotImplementedError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
]


@pytest.mark.parametrize("kind", NOT_IN_TRANSFORMERS)
def test_a_small_copy_that_fails_shows_nothing_about_its_head(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail(*_: Any) -> None:
        raise kind("x" * 300)

    monkeypatch.setattr(probes, "small_copy", fail)
    with pytest.raises(
        ValueError,
        match=rf"^no small copy of it runs, which would show it \({kind.__name__}: x{{200}}\)$",
    ):
        probes.operations_of({"model_type": "llama", "of": kind.__name__}, "pretrain")


def test_the_refusal_of_a_small_copy_is_the_reason_that_its_head_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise config_error("A", "is b", "use c")

    monkeypatch.setattr(probes, "small_copy", fail)
    with pytest.raises(
        ValueError, match=r"^no small copy of it runs, which would show it \(is b\)$"
    ):
        probes.operations_of({"model_type": "llama", "of": "refusal"}, "pretrain")


ATTENTIONS = [
    "M does not support an Attention Implementation through x. More",
    "the attn_implementation is wrong. More",
    *(
        f"no {word} here. More"
        for word in ("flash attention", "flash_attention_2", "FlashAttention2", "SDPA")
    ),
]


@pytest.mark.parametrize("kind", [ValueError, ImportError])
@pytest.mark.parametrize(
    "said", [*ATTENTIONS, "attention heads must be divisible. More", "flash and attention"]
)
def test_only_an_attention_that_a_class_lacks_is_refused_as_one(
    monkeypatch: pytest.MonkeyPatch, said: str, kind: type[Exception]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise kind(said)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", fail)
    for attention, fix in (("sdpa", "Use --attention eager"), ("eager", "Use another model")):
        with pytest.raises((ConfigError, kind)) as caught:
            construct(transformers.LlamaConfig(), attention)
        expected = (
            f"attention = {attention}: a llama cannot use it here: {said.removesuffix('. More')}."
            f" {fix}"
            if said in ATTENTIONS
            else said
        )
        assert str(caught.value) == expected


@pytest.mark.parametrize(
    "kind", [*NOT_IN_TRANSFORMERS, ValueError, ImportError, StrictDataclassError]
)
def test_an_image_model_whose_small_copy_fails_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail(*_: Any) -> None:
        raise kind("y" * 300)

    monkeypatch.setattr(image_classification, "small_copy", fail)
    config = tiny_config("vit", task="image_classification")
    rule = (
        rf"^model = M: no small copy of a vit runs on pictures alone \({kind.__name__}: y{{200}}\)."
        r" Use another image classifier"
    )
    with pytest.raises(ConfigError, match=rule):
        image_classification.check_image_model(config, "eager", "M")
    monkeypatch.setattr(
        image_classification,
        "small_copy",
        lambda *_: (_ for _ in ()).throw(config_error("A", "is b", "use c")),
    )
    assert (
        image_classification.check_image_model(config, "eager", "M")
        == "not known whether a vit takes pictures: is b"
    )


ZERO = {"hidden_size": 0, "dropout": 0.0, "bos": -1, "num_heads": 4}


@dataclass(frozen=True)
class Suspects:
    """An error, the statements around it, a config, and the values that the message should name."""

    error: Exception
    statements: tuple[str, ...]
    values: dict[str, Any]
    found: list[str]


@pytest.mark.parametrize(
    ("error", "statements", "values", "found"),
    rows(
        # Quoted values.
        Suspects(
            error=ValueError("no 'a' or \"b\" or `c` or d"),
            statements=(),
            values=dict(zip("stuvw", "abcd3", strict=True)),
            found=["s = a", "t = b", "u = c"],
        ),
        Suspects(
            error=ValueError("'3' and 'e'"),
            statements=(),
            values={"model_type": "e", "n": 3},
            found=[],
        ),
        Suspects(
            error=ValueError("'a' of hidden_size"),
            statements=(),
            values={"hidden_size": 0, "act": "a"},
            found=["act = a"],
        ),
        Suspects(
            error=StrictDataclassError("'a' of hidden_size"),
            statements=(),
            values={"hidden_size": 0, "act": "a"},
            found=["act = a"],
        ),
        Suspects(
            error=StrictDataclassError("hidden_size"),
            statements=(),
            values={"hidden_size": 0},
            found=[],
        ),
        # Numbers of zero or less that are named in the message or in the code.
        Suspects(
            error=TypeError("hidden_size, dropout, bos, num_heads"),
            statements=(),
            values=ZERO,
            found=["hidden_size = 0", "bos = -1"],
        ),
        Suspects(error=TypeError("num_heads"), statements=(), values=ZERO, found=["num_heads = 4"]),
        Suspects(
            error=TypeError("of dropout and num_heads"),
            statements=(),
            values=ZERO,
            found=["dropout = 0.0", "num_heads = 4"],
        ),
        Suspects(
            error=TypeError("x"),
            statements=("a.hidden_size",),
            values=ZERO,
            found=["hidden_size = 0"],
        ),
        Suspects(
            error=TypeError("bos"), statements=("a.hidden_size",), values=ZERO, found=["bos = -1"]
        ),
        Suspects(
            error=TypeError("x"),
            statements=("a.bos", "a.hidden_size", "a.num_heads"),
            values=ZERO,
            found=["hidden_size = 0"],
        ),
        Suspects(
            error=TypeError("num_heads"),
            statements=("a.bos", "dropout"),
            values=ZERO,
            found=["bos = -1"],
        ),
        Suspects(
            error=TypeError("x"),
            statements=("num_heads", "dropout"),
            values=ZERO,
            found=["dropout = 0.0"],
        ),
        Suspects(error=TypeError("x"), statements=(), values=ZERO, found=[]),
        # Divisions.
        Suspects(
            error=ZeroDivisionError("by zero"),
            statements=(),
            values=ZERO,
            found=["hidden_size = 0", "bos = -1"],
        ),
        Suspects(
            error=ZeroDivisionError("by zero"),
            statements=("a.dropout",),
            values=ZERO,
            found=["hidden_size = 0", "bos = -1"],
        ),
        Suspects(
            error=ZeroDivisionError("by zero"),
            statements=("a.bos",),
            values=ZERO,
            found=["bos = -1"],
        ),
        Suspects(
            error=ZeroDivisionError("by zero"),
            statements=("a.num_heads",),
            values={"num_heads": 4, "dropout": 0.0},
            found=["num_heads = 4"],
        ),
        # Words.
        Suspects(
            error=AssertionError("Padding_idx must be"),
            statements=(),
            values={"pad_token_id": 99, "padding": -1},
            found=["pad_token_id = 99"],
        ),
        Suspects(
            error=TypeError("dtype, torch_dtype, model_type"),
            statements=(),
            values={"dtype": "a", "torch_dtype": "b", "model_type": "c"},
            found=[],
        ),
        Suspects(
            error=TypeError("hidden_sizes, my_hidden_size and hidden"),
            statements=(),
            values=ZERO,
            found=[],
        ),
        Suspects(
            error=TypeError("hidden_size"),
            statements=(),
            values={"text.hidden_size": 0, "hidden_size.text": 0, "a.b.hidden_size": -2},
            found=["text.hidden_size = 0", "a.b.hidden_size = -2"],
        ),
        Suspects(
            error=TypeError("a b c d e"),
            statements=(),
            values=dict.fromkeys("abcde", 1),
            found=["a = 1", "b = 1", "c = 1"],
        ),
        Suspects(
            error=TypeError("a_size b_size"),
            statements=(),
            values={"a_size": False, "b_size": 7},
            found=["a_size = False", "b_size = 7"],
        ),
        Suspects(
            error=TypeError("a_size b_size"),
            statements=(),
            values={"b_size": 7, "a_size": None},
            found=["b_size = 7", "a_size = None"],
        ),
    ),
)
def test_the_first_kind_of_suspects_that_exists_is_named(
    error: Exception, statements: tuple[str, ...], values: dict[str, Any], found: list[str]
) -> None:
    assert suspects_of(raised(error, *statements), values) == found


COUNTS = (
    "size",
    "patch_sizes",
    "n_head",
    "num_heads",
    "head_dim",
    "n_embd",
    "d_model",
    "n_layer",
    "num_layers",
    "depths",
    "experts",
    "rope.factor",
    "scalar",
    "channels",
)


@pytest.mark.parametrize("key", COUNTS)
def test_a_zero_is_suspected_in_counts_only(key: str) -> None:
    for zero in (0, 0.0):
        assert suspects_of(
            ZeroDivisionError("x"), {"attention_dropout": zero, key: zero, f"{key}_drop": zero}
        ) == [f"{key} = {zero}"]
    assert suspects_of(ZeroDivisionError("x"), {key: 1, "drop": -0.5}) == ["drop = -0.5"]


def test_values_are_named_by_their_place() -> None:
    with (
        pytest.raises(ConfigError, match=r"\(probably a\.b\.n_head = 0 or n_layer = -1\)"),
        wrong_values({"a": {"b": {"n_head": 0}, "c": 1}, "n_layer": -1}, "M"),
    ):
        raise ZeroDivisionError("x")
