"""Capabilities of a model, tested on the CPU with a small, randomly initialised copy.

    question                                              answer              in words
    do its logits depend on later tokens?                 reads_ahead         check_causal
    does a masked model depend on them?                   reads_both_ways     check_bidirectional
    is varlen attention exact for it?                     unfit_for_varlen    choose_attention
    does an attention separate packed documents?          leak_reason         choose_bidirectional
    are its operations on its logits element-wise?        operations          operations_of
    which gradients must tensor parallelism sum?          partial_gradients   partial_gradient_names
    does the score of an answer read its last token?      score_fault         tasks/reward.py

The answers are the same on every rank, and no collective operation is needed.
"""

import contextlib
import copy
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from ..architectures.lookup import USE_CAUSAL_MODEL
from ..kernels.attention import VARLEN, VarlenUnsupportedError, bidirectional_name
from ..kernels.documents import as_attention_mask, cu_seqlens_of, document_starts
from ..parallel.partial import partial_gradients
from ..spec.errors import ConfigError, config_error
from ..spec.task_specs import TASKS, Plans, TaskSpec
from .chunked_loss import Operations, exact_operations
from .config_errors import CONSTRUCTOR_ERRORS
from .empty import CAUSAL_AUTO_CLASS, MASKED_AUTO_CLASS, config_of, empty_model, switch_attention
from .small import (
    PROBE_ROWS,
    PROBE_TOKENS,
    arguments_of,
    in_words,
    logits_of,
    seeded,
    small_config,
    small_copy,
    tokens,
)

LEAK_PROBE_LENGTHS = (
    45,
    1,
    19,
    63,
)  # lengths of the documents in a packed row; a small copy's window is 32
PADDING = 5  # number of padding tokens after an answer
# Maximum number of parameters of a copy that stays in memory. The copy of a model with an image
# tower is not small (ModernVBERT).
MOST_KEPT = 4_000_000
# Largest difference between logits that count as equal, relative to the largest logit.
SAME_DOCUMENTS, SAME_INPUTS = 1e-4, 1e-5


@dataclass(frozen=True, eq=False)
class Capabilities:
    """A model's capabilities, each tested on a small copy when the result is first needed.

    The copy is constructed once. Each test receives a duplicate with the attention that it needs,
    and may change this duplicate. If no small copy runs, the test raises `ConfigError` or the error
    from transformers. `made` maps an attention to its copy, and `leaking` maps an attention to the
    result of `leak_reason`.
    """

    config: dict[str, Any]  # the model's config.json
    facts: TaskSpec  # spec of a task that trains such a model
    name: str
    made: dict[str, PreTrainedModel] = field(default_factory=dict)
    leaking: dict[str, str] = field(default_factory=dict)

    def duplicate(self, attention: str = "eager") -> PreTrainedModel:
        """Return a new duplicate of the small copy with this attention.

        If the model's layers cannot change their attention, the copy is constructed again.
        """
        if attention in self.made:
            return copy.deepcopy(self.made[attention])
        if attention != "eager":  # every model has eager attention
            # Even if the eager copy cannot be constructed, a copy with this attention may still
            # work.
            with contextlib.suppress(*CONSTRUCTOR_ERRORS):
                model = self.duplicate()
                if switch_attention(model, attention):
                    return model
        with seeded(0):
            model = small_copy(self.config, self.facts, self.name, attention)
        if model.num_parameters() > MOST_KEPT:
            return model
        self.made[attention] = model
        return copy.deepcopy(model)

    def reads_ahead(self, attention: str) -> bool | None:
        """Return True if logits depend on later tokens, or None if that cannot be determined."""
        with seeded(1), torch.no_grad():
            model, ids = self.duplicate(attention).eval(), tokens(1, PROBE_TOKENS)
            arguments = {
                "position_ids": torch.arange(PROBE_TOKENS).unsqueeze(0),
                **self.facts.constants,
            }
            logits = _packed_logits(model, ids, **arguments)
            changed = _packed_logits(model, _other_ending(ids), **arguments)
        if not logits.isfinite().all() or torch.equal(logits[:, -1], changed[:, -1]):
            return None
        return not _same(changed[:, :-1], logits[:, :-1], SAME_INPUTS)

    @cached_property
    def reads_both_ways(self) -> bool:
        """Return True if a position's logits depend on later tokens."""
        with seeded(1), torch.no_grad():
            model, ids = self.duplicate().eval(), tokens(1, PROBE_TOKENS)
            logits, changed = _packed_logits(model, ids), _packed_logits(model, _other_ending(ids))
        return not torch.equal(logits[:, :-1], changed[:, :-1])

    @cached_property
    def unfit_for_varlen(self) -> str:
        """Return why varlen is not exact for a causal model, or "" if it is.

        varlen is exact if its logits for packed documents equal the logits of the separate
        documents, or sdpa's logits. If something other than attention carries information between
        documents, even sdpa differs from the separate documents. Both attentions then have the same
        effect.
        """
        try:
            with seeded(1), torch.no_grad():
                return self._difference_of_varlen()
        except CONSTRUCTOR_ERRORS as error:
            if not isinstance(error, VarlenUnsupportedError):
                # This call raises an error if the cause is an invalid value in config.json.
                empty_model(self.config, "eager", self.name, auto_class=self.facts.auto_class)
            return _why_unfit(error)

    def _difference_of_varlen(self) -> str:
        """Compare the logits from varlen and from sdpa. Return the difference, or ""."""
        model, ids, positions = (
            self.duplicate(VARLEN),
            tokens(1, sum(LEAK_PROBE_LENGTHS)),
            _positions(),
        )
        read = functools.partial(_packed_logits, position_ids=positions, **self.facts.constants)

        # Test packed documents in evaluation and in training. In training, dropout raises
        # `VarlenUnsupportedError`.
        documents = as_attention_mask(cu_seqlens_of(positions), ids.device)
        logits = read(model.eval(), ids, attention_mask=documents)
        read(model.train(), ids, attention_mask=documents)

        # Test the same tokens as one document, for which the logits must change.
        whole_row = torch.tensor([0, ids.numel()], dtype=torch.int32)
        one = read(model.eval(), ids, attention_mask=as_attention_mask(whole_row, ids.device))
        if not logits.isfinite().all() or _same(logits, one, SAME_DOCUMENTS):
            return "the attention of a tiny copy cannot be judged by its logits"

        # Test each document separately with sdpa, and all documents packed with sdpa.
        plain = self.duplicate("sdpa").eval()
        parts = zip(
            ids.split(LEAK_PROBE_LENGTHS, 1), positions.split(LEAK_PROBE_LENGTHS, 1), strict=True
        )
        alone = torch.cat([read(plain, part, position_ids=own) for part, own in parts], dim=1)
        if _same(logits, alone, SAME_DOCUMENTS) or _same(logits, read(plain, ids), SAME_DOCUMENTS):
            return ""
        return "a tiny copy of it computes something else with it"

    def leak_reason(self, attention: str) -> str:
        """Return why an attention does not separate a masked model's documents, or "".

        The attention separates them if the logits of packed documents equal the logits of each
        document alone. A single document is computed as in transformers: with eager attention, no
        mask and the model's own positions. The attention is also tested with dropout in training.
        """
        if attention not in self.leaking:
            try:
                with seeded(1), torch.no_grad():
                    self.leaking[attention] = self._difference_of_documents(attention)
            except CONSTRUCTOR_ERRORS as error:
                self.leaking[attention] = _why_unfit(error)
        return self.leaking[attention]

    def _difference_of_documents(self, attention: str) -> str:
        """Compare packed documents with each document alone. Return the difference, or ""."""
        model, plain = self.duplicate(bidirectional_name(attention)).eval(), self.duplicate().eval()
        ids, positions = tokens(1, sum(LEAK_PROBE_LENGTHS)), _positions()
        if attention == VARLEN:
            mask = as_attention_mask(cu_seqlens_of(positions), ids.device)
        else:
            mask = document_starts(positions)
        logits = _packed_logits(model, ids, position_ids=positions, attention_mask=mask)
        # This call raises `VarlenUnsupportedError` for dropout.
        _packed_logits(model.train(), ids, position_ids=positions, attention_mask=mask)

        alone = torch.cat(
            [_packed_logits(plain, part) for part in ids.split(LEAK_PROBE_LENGTHS, 1)], dim=1
        )
        if not logits.isfinite().all() or _same(alone, _packed_logits(plain, ids), SAME_DOCUMENTS):
            return "the attention of a tiny copy cannot be judged by its logits"
        if _same(logits, alone, SAME_DOCUMENTS):
            return ""
        return "the logits of a tiny copy's documents depend on their neighbours"

    @cached_property
    def operations(self) -> Operations:
        """Return the operations that the model applies to its logits after the head.

        Raise ValueError if any of them is not element-wise.
        """
        with seeded(1):
            model = self.duplicate()
            return exact_operations(model, arguments_of(model.config, self.facts))

    def partial_gradients(self, plan: Mapping[str, str]) -> frozenset[str]:
        """Return the unsharded parameters whose gradients a tensor-parallel plan must sum."""
        with seeded(1):
            model = self.duplicate()
            return partial_gradients(model, plan, lambda _: logits_of(model, self.facts))

    @cached_property
    def score_fault(self) -> str:
        """Return the fault in an answer's score, as the end of a sentence, or "".

        Models with bidirectional attention also read the padding after the answer, because they
        receive no padding mask. Other faulty models score the first position, which in a causal
        model has not seen any of the answer.
        """
        with seeded(1), torch.no_grad():
            model = self.duplicate().eval()
            ids = tokens(PROBE_ROWS, PROBE_TOKENS)
            padding = ids.new_full(
                (PROBE_ROWS, PADDING), model.config.get_text_config().pad_token_id
            )
            alone, behind, other = (
                _packed_logits(
                    model,
                    rows,
                    position_ids=torch.arange(rows.shape[1]).expand(PROBE_ROWS, -1),
                    **self.facts.constants,
                )
                for rows in (ids, torch.cat([ids, padding], 1), _other_ending(ids))
            )
        if alone.shape != (PROBE_ROWS, 1) or not _same(behind, alone, SAME_INPUTS):
            return "changes with the padding after it"
        return "does not depend on its last token" if torch.equal(alone, other) else ""


def _packed_logits(model: PreTrainedModel, ids: torch.Tensor, **arguments: object) -> torch.Tensor:
    """Return the logits for the tokens, (B, T, V) fp32."""
    torch.default_generator.manual_seed(0)  # Reformer samples new hashes in every forward pass
    return model(input_ids=ids, **arguments).logits.float()


def _other_ending(ids: torch.Tensor) -> torch.Tensor:
    """Return rows that differ in their last token."""
    return torch.cat([ids[:, :-1], ids[:, -1:] + 1], dim=1)


def _same(logits: torch.Tensor, expected: torch.Tensor, within: float) -> bool:
    return bool((logits - expected).abs().max() <= within * expected.abs().max())


def _positions() -> torch.Tensor:
    """Return the positions in packed documents, (1, T). They restart in each document."""
    return torch.cat([torch.arange(length) for length in LEAK_PROBE_LENGTHS]).unsqueeze(0)


def _why_unfit(error: Exception) -> str:
    if isinstance(error, VarlenUnsupportedError):
        return f"it has {error}"
    return f"a tiny copy of it does not run with it ({in_words(error, one_line=True)})"


# Capabilities that this process has created, by config.json and Auto class.
_CAPABILITIES: dict[tuple[str, ...], Capabilities] = {}


def probe(model_config: dict[str, Any], auto_class: str, name: str = "") -> Capabilities:
    """Return the capabilities of a model under an Auto class. All its tasks share one object.

    `name` identifies the model in errors.
    """
    key = json.dumps(model_config, sort_keys=True), auto_class, name
    if key not in _CAPABILITIES:
        facts = next(facts for facts in TASKS.values() if facts.auto_class == auto_class)
        _CAPABILITIES[key] = Capabilities(model_config, facts, name)
    return _CAPABILITIES[key]


def release_small_copies() -> None:
    """Free the memory of all small copies. Their test results are kept."""
    for capabilities in _CAPABILITIES.values():
        capabilities.made.clear()


# The answers in words
# --------------------------------------------------------------------------------------------------


def check_causal(model_config: dict[str, Any], attention: str = "sdpa", name: str = "") -> str:
    """Raise `ConfigError` for a model whose logits depend on later tokens.

    Such a model would learn to copy its labels. Return "", or the reason why it could not be
    tested.
    """
    kind = config_of(model_config, name).model_type
    unknown = f"not known whether a {kind} looks back only"
    seen = probe(model_config, CAUSAL_AUTO_CLASS, name)
    try:
        small_config(model_config, seen.facts, name)
    except ConfigError as refusal:
        return f"{unknown}: {in_words(refusal)}"
    except CONSTRUCTOR_ERRORS as error:
        return f"{unknown}: it cannot be made small ({in_words(error)})"
    # FlashAttention requires a GPU, and varlen is compared with sdpa.
    on_cpu = "eager" if attention in ("eager", "flash_attention_2") else "sdpa"
    try:
        reads_ahead = seen.reads_ahead(on_cpu)
    except ConfigError:
        raise
    except CONSTRUCTOR_ERRORS as error:
        return f"{unknown}: no tiny copy of it runs ({in_words(error)})"
    if reads_ahead is None:
        return f"{unknown}: the logits of a tiny copy do not tell"
    if reads_ahead:
        rule = (
            f"a {kind} reads the tokens that it should predict: with another token at"
            " the end the logits before it change"
        )
        raise config_error(f"model = {name}", rule, f"{USE_CAUSAL_MODEL}, with causal attention")
    return ""


def check_bidirectional(
    model_config: dict[str, Any], attention: str = "auto", name: str = ""
) -> str:
    """Raise `ConfigError` for a model whose logits do not depend on later tokens.

    Such a model would predict masked tokens from the preceding tokens only. Return "", or the
    reason why it could not be tested.
    """
    kind = model_config["model_type"]
    try:
        reads_both_ways = probe(model_config, MASKED_AUTO_CLASS, name).reads_both_ways
    except CONSTRUCTOR_ERRORS as error:
        return (
            f"it could not be tested whether a {kind} is bidirectional: no tiny copy of it runs"
            f" ({in_words(error)})"
        )
    if not reads_both_ways:
        rule = (
            f"the logits of this {kind} do not depend on the tokens behind them, but these are"
            " needed to predict a masked token"
        )
        raise config_error(f"model = {name}", rule, "use --task pretrain, or an encoder")
    return ""


def operations_of(model_config: dict[str, Any], task: str, name: str = "") -> Operations:
    """Return the operations that a model applies to its logits after the head.

    Raise ValueError if the losses cannot be computed in blocks, or if no small copy runs.
    """
    try:
        return probe(model_config, TASKS[task].auto_class, name).operations
    except CONSTRUCTOR_ERRORS as error:
        if isinstance(error, ValueError) and not isinstance(error, ConfigError):
            raise
        why = f"no small copy of it runs, which would show it ({in_words(error)})"
        raise ValueError(why) from error


def partial_gradient_names(
    model_config: dict[str, Any], facts: TaskSpec, plans: Plans, name: str = ""
) -> frozenset[str]:
    """Return the unsharded parameters whose gradients tensor parallelism must sum.

    See `parallel.partial`. Raise `ConfigError` if the parameters cannot be determined.
    """
    try:
        return probe(model_config, facts.auto_class, name).partial_gradients(plans.tp)
    except ConfigError:
        raise
    except CONSTRUCTOR_ERRORS as error:
        rule = (
            f"no small copy of a {model_config['model_type']} runs, which shows what tensor"
            " parallelism has to sum"
        )
        why = f"{rule} ({in_words(error)})"
        raise config_error(f"tp > 1 with {name}", why, "use --tp 1") from error
