"""Which attention a run computes with, found by running a tiny copy of its model."""

from dataclasses import replace
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
from .device import unfit_here
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
    dtype: torch.dtype,
    device: torch.device,
    rows: tuple[int, int] = (1, 1),
) -> tuple[str, str]:
    """Resolves the field `attention` of a recipe: (a name that transformers knows, a line that says
    why `auto` is not varlen, or "").

    `dtype` is what the layers compute in, `rows` (B, T) of a micro-batch. No collective, and the
    same on every rank. Raises `Refusal` for `varlen` where it is not right, and for `auto` where
    sdpa's mask would leave no room.
    """
    if facts.masked:
        return choose_both_ways(wanted, model_config, name, dtype, device, rows)
    if wanted not in ("auto", VARLEN):
        return wanted, ""
    if facts.rows != PACKED:
        if wanted == VARLEN:
            raise refuse(
                "attention = varlen",
                "requires rows of packed documents, which this task does not have",
                "leave out --attention",
            )
        return (
            "sdpa"
            if class_of(config_of(model_config, name), facts.auto_class)._supports_sdpa
            else "eager"
        ), ""
    reason = unfit_here(model_config, dtype, device) or unfit(model_config, name)
    if not reason:
        return VARLEN, ""
    if wanted == VARLEN:
        raise refuse(
            "attention = varlen",
            f"is not exact for this {model_config['model_type']}: {reason}",
            "leave out --attention, or use --attention sdpa",
        )
    if problems := check_dense_mask("sdpa", rows[1], rows[0], dtype.itemsize):
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
    return "sdpa", f"attention sdpa with a mask of packed documents, not varlen: {reason}"


@once_a_config
def unfit(model_config: dict[str, Any], name: str = "") -> str:
    """Says why a model's attention is not varlen, or "" if it is: its logits of packed documents
    are those of the documents alone, or sdpa's.

    A tiny copy with random weights reads them, in fp32 on the CPU. sdpa's own may differ from those
    of the documents alone, where something else than attention carries information from one to the
    next; that is then the same with both. What attention drops in training is taken from the config
    as it is.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            tiny = tiny_copy(config_of(model_config, name), VOCABULARY)
            if tiny.get("initializer_range"):
                # what is read must be seen, however small the weights of its real width begin
                tiny = tiny | {"initializer_range": 0.1}
            model = _drawn(tiny, VARLEN, name)
            ids = torch.randint(3, VOCABULARY - 1, (1, sum(LENGTHS)))
            positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
            logits = _read(model, ids, positions, for_layers(documents_of(positions), ids.device))
            model.train()
            # raises `Unfit` if it drops
            _read(model, ids, positions, for_layers(documents_of(positions), ids.device))
            one = _read(
                model.eval(),
                ids,
                positions,
                for_layers(torch.tensor([0, ids.numel()], dtype=torch.int32), ids.device),
            )
            if not logits.isfinite().all() or _equal(logits, one):
                return "the logits of a tiny copy do not tell what its attention reads"
            plain = _drawn(tiny, "sdpa", name)
            alone = torch.cat(
                [
                    _read(plain, *part)
                    for part in zip(ids.split(LENGTHS, 1), positions.split(LENGTHS, 1), strict=True)
                ],
                dim=1,
            )
            if _equal(logits, alone) or _equal(logits, _read(plain, ids, positions)):
                return ""
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
    return "a tiny copy of it computes something else with it"


def _drawn(tiny: dict[str, Any], attention: str, name: str) -> nn.Module:
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
