"""The proof that a model's logits at a token ignore the tokens after it."""

from typing import Any

import torch

from ..architectures.families import tiny_copy
from ..architectures.lookup import OTHERS
from ..spec.refusal import Refusal, refuse
from .config_errors import WRONG_VALUE
from .empty import config_of, construct

CAUSAL_VOCABULARY = 264  # of the tiny copy that shows whether a model reads ahead
READS_AHEAD_FROM = 1e-5  # a change of an earlier logit, as a share of the largest one


def check_causal(model_config: dict[str, Any], attention: str = "sdpa", name: str = "") -> str:
    """Raises `Refusal` for a model whose logits depend on tokens that come later: it would learn to
    copy its labels.

    A tiny copy with random weights reads a row twice, the second time with another last token;
    before that token nothing may change. The same on every rank, and no collective. Returns "", or
    why this could not be looked at.
    """
    config = config_of(model_config, name)
    unknown = f"not known whether a {config.model_type} looks back only"
    # flash attention is for GPUs; varlen is compared with sdpa
    on_cpu = "eager" if attention in ("eager", "flash_attention_2") else "sdpa"
    try:
        tiny = tiny_copy(config, CAUSAL_VOCABULARY)
    except WRONG_VALUE as error:  # a Refusal of `shrink` is a ValueError
        if isinstance(error, Refusal):
            return f"{unknown}: {error.problems[0].rule}"
        return f"{unknown}: it cannot be made small ({type(error).__name__}: {error})"
    try:
        logits, changed = _two_readings(tiny, on_cpu, name)
    except WRONG_VALUE as error:
        if isinstance(error, Refusal):
            raise
        return f"{unknown}: no tiny copy of it runs ({type(error).__name__}: {str(error)[:200]})"
    before, last = (logits - changed).abs().split([len(logits) - 1, 1])
    if not logits.isfinite().all() or not last.any():
        return f"{unknown}: the logits of a tiny copy do not tell"
    if before.max() > READS_AHEAD_FROM * logits.abs().max():
        rule = (
            f"a {config.model_type} reads the tokens that it should predict: with another token at"
            " the end the logits before it change"
        )
        raise refuse(f"model = {name}", rule, f"{OTHERS}, with causal attention")
    return ""


def _two_readings(
    tiny: dict[str, Any], attention: str, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the logits, (T, V) fp32, of a model with random weights for a row, and for the same
    row with another last token.
    """
    if tiny.get("initializer_range"):
        # what is read must be seen, however small the weights of its real width begin
        tiny = tiny | {"initializer_range": 0.1}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        model = construct(config_of(tiny, name), attention, name).eval()
        ids = torch.randint(3, CAUSAL_VOCABULARY - 1, (1, 32))  # (B, T)
        other = ids.clone()
        other[0, -1] += 1
        logits = []
        for row in (ids, other):
            # Reformer draws its hashes anew in every forward
            torch.default_generator.manual_seed(0)
            logits.append(
                model(input_ids=row, position_ids=torch.arange(32).unsqueeze(0), use_cache=False)
                .logits[0]
                .float()
            )
    return logits[0], logits[1]
