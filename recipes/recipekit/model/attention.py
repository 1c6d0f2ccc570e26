"""The choice of a run's attention implementation, tested on a tiny copy of the run's model."""

from dataclasses import replace
from typing import Any

from ..dslint.divisibility import check_dense_mask
from ..kernels.attention import VARLEN
from ..spec.errors import ConfigError, config_error
from ..spec.recipe import FLASH_KERNELS
from ..spec.task_specs import PACKED, TaskSpec
from .bidirectional import choose_bidirectional
from .device import Activations, device_fallback_reason, flash_refusal
from .empty import class_of, config_of
from .probes import probe

USE_SHORTER_ROWS = "use a smaller --seq_len or --micro_batch, or another model"


def choose_attention(
    wanted: str,
    model_config: dict[str, Any],
    name: str,
    facts: TaskSpec,
    activations: Activations,
) -> tuple[str, str]:
    """Resolve the recipe's field `attention`.

    Return (name of the attention in transformers, log line). The line explains why `auto` did not
    choose varlen, or names other kernels than FlashAttention 2, or is "". The function uses no
    collective operation, and every rank computes the same result.

    Raise `ConfigError` if `varlen` is requested but not exact for the model, or if the device does
    not support the requested kernels. Raise it also if `auto` must choose sdpa but sdpa's mask
    would not fit into memory.
    """
    if refusal := flash_refusal(wanted, activations.device):
        raise config_error(f"attention = {wanted}", refusal, "use --attention varlen")
    if wanted in FLASH_KERNELS:
        attention, _ = choose_attention(VARLEN, model_config, name, facts, activations)
        return attention, f"attention varlen, with the kernels of FlashAttention {wanted[-1]}"
    if facts.bidirectional:
        return choose_bidirectional(wanted, model_config, name, facts.auto_class, activations)
    if wanted not in ("auto", VARLEN):
        return wanted, ""
    if facts.rows != PACKED:
        return _attention_of_unpacked(wanted, model_config, name, facts), ""

    reason = device_fallback_reason(model_config, activations.dtype, activations.device)
    reason = reason or probe(model_config, facts.auto_class, name).unfit_for_varlen
    if not reason:
        return VARLEN, ""
    if wanted == VARLEN:
        raise config_error(
            "attention = varlen",
            f"is not exact for this {model_config['model_type']}: {reason}",
            "leave out --attention, or use --attention sdpa",
        )
    _check_sdpa_mask(activations, reason)
    return "sdpa", f"attention sdpa with a mask of packed documents, not varlen: {reason}"


def _attention_of_unpacked(
    wanted: str, model_config: dict[str, Any], name: str, facts: TaskSpec
) -> str:
    """Return the attention for a task whose rows are not packed.

    Raise `ConfigError` if varlen is requested.
    """
    if wanted == VARLEN:
        raise config_error(
            "attention = varlen",
            "requires rows of packed documents, which this task does not have",
            "leave out --attention",
        )
    has_sdpa = class_of(config_of(model_config, name), facts.auto_class)._supports_sdpa
    return "sdpa" if has_sdpa else "eager"


def _check_sdpa_mask(activations: Activations, reason: str) -> None:
    """Raise `ConfigError` if sdpa's mask would not fit into memory.

    `reason` explains why varlen is not used.
    """
    batch, length = activations.rows
    if problems := check_dense_mask("sdpa", length, batch, activations.dtype.itemsize):
        raise ConfigError(
            [
                replace(
                    problem,
                    rule=f"{problem.rule}. It is not varlen, which makes none: {reason}",
                    fix=USE_SHORTER_ROWS,
                )
                for problem in problems
            ]
        )
