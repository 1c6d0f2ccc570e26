"""Which attention of a model that looks both ways keeps packed documents apart, found by running a
tiny copy of it.
"""

from dataclasses import replace
from typing import Any

import torch

from ..architectures.families import tiny_copy
from ..dslint.divisions import check_dense_mask
from ..kernels.attention import MASKING, VARLEN, Unfit, both_ways
from ..kernels.documents import document_starts, documents_of, for_layers
from ..spec.refusal import Refusal, refuse
from .config_errors import WRONG_VALUE
from .device import Activations, unfit_here
from .empty import MASKED, config_of, construct, empty_model
from .small import once_a_config

VOCABULARY = 264  # of the tiny copy
LENGTHS = (45, 1, 19, 63)  # of its documents, in one row; a tiny window is 32
EQUAL = 1e-4  # a difference of logits, as a share of the largest one


def choose_both_ways(
    wanted: str,
    model_config: dict[str, Any],
    name: str,
    activations: Activations,
) -> tuple[str, str]:
    """Resolves the field `attention` of a recipe like `model.attention.choose_attention`, for a
    model that looks both ways.

    Raises `Refusal` where none that is wanted keeps the documents of a row apart, or its mask would
    leave no room.
    """
    if wanted not in ("auto", VARLEN, *MASKING):
        raise refuse(
            f"attention = {wanted}",
            "cannot separate packed documents in a bidirectional model",
            "use --attention varlen, which also uses FlashAttention",
        )
    dtype, rows = activations.dtype, activations.rows
    kind, tried = model_config["model_type"], (VARLEN, *MASKING) if wanted == "auto" else (wanted,)
    reasons: dict[str, str] = {}
    for attention in tried:
        here = unfit_here(model_config, dtype, activations.device) if attention == VARLEN else ""
        if not (reason := here or leaks(model_config, attention, name)):
            break
        reasons[attention] = reason
    else:
        # Raises if the cause is a wrong value in its config.json.
        empty_model(model_config, "eager", name, auto_class=MASKED)
        others = "; ".join(f"{attention}: {reason}" for attention, reason in reasons.items())
        fix = (
            "use another encoder, such as BERT, RoBERTa or ModernBERT"
            if wanted == "auto"
            else "leave it out"
        )
        raise refuse(
            f"attention = {wanted}",
            f"does not keep the documents of a row apart in this {kind} ({others})",
            fix,
        )
    why = reasons.get(VARLEN, "")
    if why and (problems := check_dense_mask(attention, rows[1], rows[0], dtype.itemsize)):
        fix = "use a smaller --seq_len or --micro_batch, or another model"
        raise Refusal(
            [
                replace(
                    problem,
                    rule=f"{problem.rule}. It is not varlen, which makes none: {why}",
                    fix=fix,
                )
                for problem in problems
            ]
        )
    return both_ways(attention), (
        f"attention {attention} with a mask of packed documents, not varlen: {why}" if why else ""
    )


@once_a_config
def leaks(model_config: dict[str, Any], attention: str, name: str = "") -> str:
    """Says why an attention does not keep documents apart, or "" if it does: a tiny copy's logits
    of packed documents are those of each alone.

    Alone it reads them as transformers has it: with eager attention, no mask and the model's own
    positions. Attention that drops in training is tried, too. In fp32 on the CPU, the same on every
    rank.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            tiny = _tiny_of(config_of(model_config, name))
            model, plain = _drawn(tiny, both_ways(attention)), _drawn(tiny, "eager")
            ids = torch.randint(3, VOCABULARY - 1, (1, sum(LENGTHS)))
            positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
            mask = (
                for_layers(documents_of(positions), ids.device)
                if attention == VARLEN
                else document_starts(positions)
            )
            inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
            logits = model(**inputs).logits
            model.train()(**inputs)  # raises `Unfit` if it drops
            alone = torch.cat(
                [plain(input_ids=part).logits for part in ids.split(LENGTHS, 1)], dim=1
            )
            if not logits.isfinite().all() or _equal(alone, plain(input_ids=ids).logits):
                return "the logits of a tiny copy do not tell what its attention reads"
            if _equal(logits, alone):
                return ""
    except Unfit as found:
        return f"it has {found}"
    except WRONG_VALUE as error:
        said = (
            error.problems[0].rule
            if isinstance(error, Refusal)
            else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        )
        return f"a tiny copy of it does not run with it ({said})"
    return "the logits of a tiny copy's documents are not those of each alone"


def check_both_ways(model_config: dict[str, Any], attention: str = "auto", name: str = "") -> str:
    """Raises `Refusal` for a model whose logits do not depend on the tokens behind them: it would
    guess hidden tokens from what is before them alone.

    Returns "", or why this could not be looked at. The same on every rank, and no collective.
    """
    kind = model_config["model_type"]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            model = _drawn(_tiny_of(config_of(model_config, name)), "eager")
            ids = torch.randint(3, VOCABULARY - 1, (1, 32))
            other = ids.clone()
            other[0, -1] += 1
            logits, changed = (model(input_ids=row).logits[0] for row in (ids, other))
    except WRONG_VALUE as error:
        said = (
            error.problems[0].rule
            if isinstance(error, Refusal)
            else f"{type(error).__name__}: {str(error)[:200]}"
        )
        return (
            f"it could not be tested whether a {kind} is bidirectional: no tiny copy of it runs"
            f" ({said})"
        )
    if not (logits - changed)[:-1].any():
        rule = (
            f"the logits of this {kind} do not depend on the tokens behind them, and a hidden token"
            " is told by these, too"
        )
        raise refuse(f"model = {name}", rule, "use --task pretrain, or an encoder")
    return ""


def _tiny_of(config: Any) -> dict[str, Any]:
    tiny = tiny_copy(config, VOCABULARY)
    if tiny.get("initializer_range"):
        # what is read must be seen, however small the weights of its real width begin
        tiny = tiny | {"initializer_range": 0.1}
    return tiny


def _drawn(tiny: dict[str, Any], attention: str) -> Any:
    torch.default_generator.manual_seed(0)
    return construct(config_of(tiny), attention, auto_class=MASKED).eval()


def _equal(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((logits - expected).abs().max() <= EQUAL * expected.abs().max())
