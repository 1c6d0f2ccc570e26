"""Which attention a run computes with, found by running a tiny copy of its model."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..architectures.families import tiny_copy
from ..dslint.divisions import check_dense_mask
from ..kernels.attention import VARLEN, Unfit
from ..kernels.documents import documents_of, for_layers
from ..spec.refusal import Refusal, refuse
from ..spec.task_specs import PACKED, Facts
from .both_ways import choose_both_ways
from .config_errors import WRONG_VALUE
from .device import Activations, unfit_here
from .empty import class_of, config_of, construct, empty_model
from .small import once_a_config

VOCABULARY = 264  # of the tiny copy
LENGTHS = (45, 1, 19, 63)  # of its documents, in one row; a tiny window is 32
SHORTER = "use a smaller --seq_len or --micro_batch, or another model"
EQUAL = 1e-4  # a difference of logits, as a share of the largest one


def choose_attention(
    wanted: str,
    model_config: dict[str, Any],
    name: str,
    facts: Facts,
    activations: Activations,
) -> tuple[str, str]:
    """Resolve the field `attention` of a recipe: (a name that transformers knows, the line that
    says why `auto` is not varlen, or "").

    No collective, and the same on every rank. Raises `Refusal` for `varlen` where it is not right,
    and for `auto` where sdpa's mask would leave no room.
    """
    if facts.masked:
        return choose_both_ways(wanted, model_config, name, activations)
    if wanted not in ("auto", VARLEN):
        return wanted, ""
    if facts.rows != PACKED:
        return _of_separate_rows(wanted, model_config, name, facts), ""

    reason = unfit_here(model_config, activations.dtype, activations.device) or unfit(
        model_config, name
    )
    if not reason:
        return VARLEN, ""
    if wanted == VARLEN:
        raise refuse(
            "attention = varlen",
            f"is not exact for this {model_config['model_type']}: {reason}",
            "leave out --attention, or use --attention sdpa",
        )
    _check_mask_of_sdpa(activations, reason)
    return "sdpa", f"attention sdpa with a mask of packed documents, not varlen: {reason}"


def _of_separate_rows(wanted: str, model_config: dict[str, Any], name: str, facts: Facts) -> str:
    """Return the attention of a task whose rows are not packed. Raises `Refusal` for varlen."""
    if wanted == VARLEN:
        raise refuse(
            "attention = varlen",
            "requires rows of packed documents, which this task does not have",
            "leave out --attention",
        )
    has_sdpa = class_of(config_of(model_config, name), facts.auto_class)._supports_sdpa
    return "sdpa" if has_sdpa else "eager"


def _check_mask_of_sdpa(activations: Activations, reason: str) -> None:
    """Raise `Refusal` if sdpa's mask would leave no room; `reason` is why it is not varlen."""
    batch, length = activations.rows
    if problems := check_dense_mask("sdpa", length, batch, activations.dtype.itemsize):
        raise Refusal(
            [
                replace(
                    problem,
                    rule=f"{problem.rule}. It is not varlen, which makes none: {reason}",
                    fix=SHORTER,
                )
                for problem in problems
            ]
        )


@once_a_config
def unfit(model_config: dict[str, Any], name: str = "") -> str:
    """Return why a model's attention is not varlen, or "" if it is: if its logits of packed
    documents are the logits of the separate documents, or sdpa's.

    A tiny copy with random weights reads them, in fp32 on the CPU. sdpa's own logits may differ
    from the logits of the separate documents if something else than attention carries information
    from one to the next; that is then the same with both. Dropout of attention in training is as in
    the config.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            tiny = tiny_copy(config_of(model_config, name), VOCABULARY)
            if tiny.get("initializer_range"):
                # Initial weights must be large enough for the difference to be seen.
                tiny = tiny | {"initializer_range": 0.1}
            return _difference(partial(_drawn, tiny, name))
    except Unfit as found:
        return f"it has {found}"
    except WRONG_VALUE as error:
        # Raises if the cause is a wrong value in its config.json.
        empty_model(model_config, "eager", name)
        said = (
            error.problems[0].rule
            if isinstance(error, Refusal)
            else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        )
        return f"a tiny copy of it does not run with it ({said})"


def _difference(draw: Callable[[str], nn.Module]) -> str:
    """Compare a tiny model's logits with varlen and with sdpa; return the difference, or "".

    Raises `Unfit` if its attention asks for something that varlen does not compute.
    """
    model = draw(VARLEN)
    ids = torch.randint(3, VOCABULARY - 1, (1, sum(LENGTHS)))
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)

    # Packed documents, in evaluation and in training, where `Unfit` is raised for dropout.
    logits = _read(model, ids, positions, for_layers(documents_of(positions), ids.device))
    model.train()
    _read(model, ids, positions, for_layers(documents_of(positions), ids.device))

    # The same tokens as one document: the logits must change.
    whole_row = torch.tensor([0, ids.numel()], dtype=torch.int32)
    one = _read(model.eval(), ids, positions, for_layers(whole_row, ids.device))
    if not logits.isfinite().all() or _equal(logits, one):
        return "the logits of a tiny copy do not tell what its attention reads"

    # Each document by itself with sdpa, and packed as sdpa reads it.
    plain = draw("sdpa")
    documents = zip(ids.split(LENGTHS, 1), positions.split(LENGTHS, 1), strict=True)
    alone = torch.cat([_read(plain, *document) for document in documents], dim=1)
    if _equal(logits, alone) or _equal(logits, _read(plain, ids, positions)):
        return ""
    return "a tiny copy of it computes something else with it"


def _drawn(tiny: dict[str, Any], name: str, attention: str) -> nn.Module:
    torch.default_generator.manual_seed(0)
    return construct(config_of(tiny, name), attention, name).eval()


def _read(
    model: nn.Module,
    ids: torch.Tensor,
    positions: torch.Tensor,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    torch.default_generator.manual_seed(0)  # Reformer draws its hashes anew in every forward
    return model(
        input_ids=ids, position_ids=positions, attention_mask=documents, use_cache=False
    ).logits.float()


def _equal(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((logits - expected).abs().max() <= EQUAL * expected.abs().max())
