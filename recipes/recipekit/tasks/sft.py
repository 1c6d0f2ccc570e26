"""A causal language model learns the answers of chats; what differs from pretraining is which tokens have labels (data/encode.py)."""

from dataclasses import replace

from . import pretrain
from .facts import TASKS

TASK = replace(pretrain.TASK, facts=TASKS["sft"])
