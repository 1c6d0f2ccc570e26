"""A causal language model learns the answers of chats; what differs from pretraining is which
tokens have labels (data/encode.py).
"""

from dataclasses import replace

from ..spec.task_specs import TASKS
from . import pretrain

TASK = replace(pretrain.TASK, facts=TASKS["sft"])
