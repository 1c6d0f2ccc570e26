"""The small files that a run's checkpoints and exports include."""

import contextlib
from typing import Any

from ..data.encode import Encoder
from ..model.build import BuiltModel
from ..model.empty import CAUSAL_AUTO_CLASS
from ..model.small_files import SmallFiles, collect_small_files, origin_of
from ..plan import RunPlan
from ..spec.errors import ConfigError, Say
from ..spec.task_specs import TASKS
from .run_metadata import export_dtype


def small_files_of(plan: RunPlan, built: BuiltModel, processor: object, say: Say) -> SmallFiles:
    """Collect the small files at the start of a run, because the model's folder may be gone later.

    Changes to these files are logged.
    """
    recipe, facts = plan.recipe, TASKS[plan.recipe.task]
    model_config = built.model_plan.model_config
    origin = origin_of(
        recipe.model,
        recipe.init,
        recipe.tokenizer,
        "tokenizer" in facts.reads,
        recipe.model_revision,
    )
    answers = facts.auto_class == CAUSAL_AUTO_CLASS and (facts.chats or facts.pairs)
    ends = end_tokens(getattr(processor, "tokenizer", processor), recipe.task) if answers else ()
    small = collect_small_files(
        built, model_config, processor, export_dtype(plan, model_config), origin, ends
    )
    for note in small.notes:
        say(note)
    return small


def end_tokens(tokenizer: Any, task: str = "sft") -> tuple[int, ...]:
    """Return the tokens that end an answer in training.

    They are the tokenizer's end token and the chat template's end tokens.
    """
    ends = [tokenizer.eos_token_id]
    # A template that cannot be used is rejected where chats are read.
    with contextlib.suppress(ConfigError):
        ends += Encoder(tokenizer, task, seq_len=1).end_tokens
    return tuple(dict.fromkeys(number for number in ends if number is not None))
