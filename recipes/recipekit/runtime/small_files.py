"""The small files that a run's checkpoints and exports contain."""

import contextlib
from typing import Any

from ..data.encode import Encoder
from ..model.build import Built
from ..model.empty import CAUSAL
from ..model.small_files import SmallFiles, gather, origin_of
from ..plan import Plan
from ..refusal import Refusal, Say
from ..task import IGNORE
from ..tasks.facts import TASKS
from .facts import export_dtype


def small_files_of(plan: Plan, built: Built, model_config: dict[str, Any], processor: Any, say: Say) -> SmallFiles:
    """Read and make the small files at the start of a run: later the model's folder may be gone. Say what is changed."""
    recipe, facts = plan.recipe, TASKS[plan.recipe.task]
    origin = origin_of(recipe.model, recipe.init, recipe.tokenizer, "tokenizer" in facts.reads)
    answers = facts.auto_class == CAUSAL and (facts.chats or facts.pairs)
    ends = end_tokens(getattr(processor, "tokenizer", processor)) if answers else ()
    small = gather(built, model_config, processor, export_dtype(plan, model_config), origin, ends)
    for note in small.notes:
        say(note)
    return small


def end_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end an answer in training: the tokenizer's end token and the chat template's.

    The template's is the last token of an answer that was added to the vocabulary. A template that ends answers with
    ordinary tokens has no such token.
    """
    ends = [tokenizer.eos_token_id]
    if tokenizer.chat_template and tokenizer.is_fast:
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        with contextlib.suppress(Refusal):  # a template with other demands: its chats are refused where they are read
            (_, labels), *_ = Encoder(tokenizer, "sft", 1 << 20)([(chat, "")])
            added = [int(number) for number in labels if number != IGNORE and int(number) in tokenizer.added_tokens_decoder]
            ends += added[-1:]
    return tuple(dict.fromkeys(number for number in ends if number is not None))
