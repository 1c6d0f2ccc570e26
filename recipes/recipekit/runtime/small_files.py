"""The small files that a run's checkpoints and exports contain."""

import contextlib
from typing import Any

from ..data.encode import Encoder
from ..model.build import Built
from ..model.empty import CAUSAL
from ..model.small_files import SmallFiles, gather, origin_of
from ..plan import Plan
from ..spec.refusal import Refusal, Say
from ..spec.task_specs import TASKS
from .facts import export_dtype


def small_files_of(
    plan: Plan, built: Built, model_config: dict[str, Any], processor: Any, say: Say
) -> SmallFiles:
    """Read and make the small files at the start of a run, because the model's folder may be gone
    later.

    Log changes.
    """
    recipe, facts = plan.recipe, TASKS[plan.recipe.task]
    origin = origin_of(
        recipe.model,
        recipe.init,
        recipe.tokenizer,
        "tokenizer" in facts.reads,
        recipe.model_revision,
    )
    answers = facts.auto_class == CAUSAL and (facts.chats or facts.pairs)
    ends = end_tokens(getattr(processor, "tokenizer", processor), recipe.task) if answers else ()
    small = gather(built, model_config, processor, export_dtype(plan, model_config), origin, ends)
    for note in small.notes:
        say(note)
    return small


def end_tokens(tokenizer: Any, task: str = "sft") -> tuple[int, ...]:
    """Return the tokens that end an answer in training: the tokenizer's end token and the chat
    template's.
    """
    ends = [tokenizer.eos_token_id]
    # a template that cannot be used is refused where chats are read
    with contextlib.suppress(Refusal):
        ends += Encoder(tokenizer, task, seq_len=1).end_tokens
    return tuple(dict.fromkeys(number for number in ends if number is not None))
