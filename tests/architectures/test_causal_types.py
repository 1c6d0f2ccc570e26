"""Tests, for each model type, of whether it reads the tokens that it should predict."""

from typing import Any

import pytest
from recipekit.architectures.families import default_config
from recipekit.architectures.lookup import (
    BIDIRECTIONAL_FAMILIES,
    CAUSAL_LM_CLASS,
    model_types_of,
)
from recipekit.model.probes import check_causal
from recipekit.spec.errors import ConfigError

# The other types are slow tests. They have no key, run no tiny copy, or behave like these types.
QUICK = {
    *list(BIDIRECTIONAL_FAMILIES)[::3],
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
# The reasons are in tests/architectures/test_architecture.py.
CANNOT = {"blt", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"}
every_type = pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in model_types_of(CAUSAL_LM_CLASS)
        if name not in CANNOT
    ],
)


def looked_at(model_type: str, **changes: Any) -> str:
    """Return "" for a causal type, and the error message otherwise."""
    config = default_config(model_type).to_dict() | changes
    for attention in ("sdpa", "eager"):
        try:
            assert check_causal(config, attention, model_type) == "", "it could be looked at"
            return ""
        except ConfigError as error:
            if "attention =" not in str(error):  # the class does not support this attention
                return str(error)
    raise AssertionError(model_type)


@every_type
def test_a_type_reads_ahead_if_the_table_says_so(model_type):
    """The table lets a plan reject types by name, so it must agree with the models."""
    switch = BIDIRECTIONAL_FAMILIES.get(model_type)
    if model_type == "reformer":  # its class accepts no other value
        assert looked_at(model_type, is_decoder=True) == ""
    elif switch is None:
        assert looked_at(model_type) == ""
    else:
        assert f"a {model_type} reads the tokens that it should predict" in looked_at(model_type)
    if switch:
        # BigBird's sparse blocks are masked as in an encoder.
        more = {"attention_type": "original_full"} if model_type == "big_bird" else {}
        assert looked_at(model_type, **{switch: True}, **more) == ""


def test_a_copy_that_does_not_run_is_said():
    told = check_causal(default_config("blt").to_dict(), name="blt")
    assert told.startswith("not known whether a blt looks back only: cannot shrink a blt")
