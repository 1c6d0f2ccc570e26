"""The choice of attention for a bidirectional model with packed documents.

The candidates are tested on a tiny copy of the model.
"""

from dataclasses import replace
from typing import Any

from ..dslint.divisibility import check_dense_mask
from ..kernels.attention import MASK_ATTENTIONS, VARLEN, bidirectional_name
from ..spec.errors import ConfigError, config_error
from .device import Activations, device_fallback_reason
from .empty import empty_model
from .probes import probe


def choose_bidirectional(
    wanted: str,
    model_config: dict[str, Any],
    name: str,
    auto_class: str,
    activations: Activations,
) -> tuple[str, str]:
    """Resolve the recipe's field `attention` for a bidirectional model.

    The result has the same format as in `model.attention.choose_attention`. Raise `ConfigError` if
    no requested attention separates the documents in a row, or if the attention's mask would not
    fit into memory.
    """
    if wanted not in ("auto", VARLEN, *MASK_ATTENTIONS):
        raise config_error(
            f"attention = {wanted}",
            "cannot separate packed documents in a bidirectional model",
            "use --attention varlen, which also uses FlashAttention",
        )
    dtype, rows = activations.dtype, activations.rows
    kind, tried = (
        model_config["model_type"],
        (VARLEN, *MASK_ATTENTIONS) if wanted == "auto" else (wanted,),
    )
    reasons: dict[str, str] = {}
    for attention in tried:
        here = (
            device_fallback_reason(model_config, dtype, activations.device)
            if attention == VARLEN
            else ""
        )
        if not (reason := here or probe(model_config, auto_class, name).leak_reason(attention)):
            break
        reasons[attention] = reason
    else:
        # This call raises an error if the cause is an invalid value in config.json.
        empty_model(model_config, "eager", name, auto_class=auto_class)
        others = "; ".join(f"{attention}: {reason}" for attention, reason in reasons.items())
        fix = (
            "use another encoder, such as BERT, RoBERTa or ModernBERT"
            if wanted == "auto"
            else "leave it out"
        )
        raise config_error(
            f"attention = {wanted}",
            f"does not keep the documents of a row apart in this {kind} ({others})",
            fix,
        )
    why = reasons.get(VARLEN, "")
    if why and (problems := check_dense_mask(attention, rows[1], rows[0], dtype.itemsize)):
        fix = "use a smaller --seq_len or --micro_batch, or another model"
        raise ConfigError(
            [
                replace(
                    problem,
                    rule=f"{problem.rule}. It is not varlen, which makes none: {why}",
                    fix=fix,
                )
                for problem in problems
            ]
        )
    return bidirectional_name(attention), (
        f"attention {attention} with a mask of packed documents, not varlen: {why}" if why else ""
    )
