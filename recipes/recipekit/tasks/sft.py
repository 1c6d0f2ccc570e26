"""Supervised fine-tuning: a causal language model learns the answers in chats.

The only difference from pretraining is which tokens have labels (data/encode.py).
"""

from dataclasses import replace

from ..spec.task_specs import TASKS
from . import pretrain

TASK = replace(pretrain.TASK, spec=TASKS["sft"])
