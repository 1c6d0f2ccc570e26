"""Comparison of chat labels with TRL's assistant-only mode and its bundled chat templates.

Some of TRL's templates (Qwen3, GLM 4.5) render a different text in training than the model's own
template does. These templates are excluded, because labels of two different texts cannot be
compared.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from chat_templates import TOOLS, assistant, template_tokenizer, tool, user
from recipekit.data.chat_spans import ChatTemplate
from recipekit.data.encode import encode_chats_with_counts
from recipekit.spec.task import IGNORE

BUNDLED = Path(*find_spec("trl").submodule_search_locations) / "chat_templates"
TOKENS = re.compile(r"<\|[^|<>' ]{1,30}\|>|<｜[^<>' ]{1,30}｜>|</?[a-z_]{3,30}>|\[/?[A-Z_]+\]")
PAIR = [user("q1"), assistant("a1"), user("q2"), assistant("a2")]
CALLING = [user("q1"), assistant("", {"x": "y"}), tool("12"), assistant("a1")]

# The part of the generation prompt that TRL labels before each answer. A model never generates this
# text, because inference provides it.
EQUAL = [""]
HEADER = ["<|start|>assistant"]  # TRL's markers enclose the header of the turn
LINE_END = ["\n"]  # TRL's marker follows the role, so the header's line end is labelled
THINK = ["<think>"]  # the generation prompt opens the thoughts
NO_THOUGHT = ["<think>\n\n</think>\n\n"]  # the generation prompt ends with empty thoughts
THINK_LINE = ["<think>\n"]  # the generation prompt opens the thoughts and ends the line
# TRL's markers enclose the speaker and the end of the results.
AFTER_TOOL = ["<｜Assistant｜>", "<｜tool▁outputs▁end｜>"]

OF_PARTS = ("idefics3",)  # templates that write a content only if it is a list of parts

COMPARED = [
    *(
        (name, PAIR, None, EQUAL)
        for name in ("cohere", "gemma", "gemma3", "idefics3", "diffusion_gemma")
    ),
    *(
        (name, CALLING, TOOLS, EQUAL)
        for name in ("lfm2", "llama3", "phi3_5", "qwen2_5_vl", "qwen3_instruct_2507")
    ),
    *((name, CALLING, TOOLS, HEADER) for name in ("gptoss", "muse_glimmer")),
    ("qwen2_5", CALLING, TOOLS, LINE_END),
    ("nemotron_3_nano", CALLING, TOOLS, THINK),
    ("qwen3_8", CALLING, TOOLS, THINK_LINE),
    ("qwen3_5_nothink", CALLING, TOOLS, NO_THOUGHT),
    ("deepseekv3", CALLING, TOOLS, AFTER_TOOL),
]


@pytest.mark.parametrize(
    "name, chat, tools, prompts", COMPARED, ids=[name for name, *_ in COMPARED]
)
def test_labels_are_those_of_trl(name, chat, tools, prompts):
    source, training = ((BUNDLED / f"{name}{kind}.jinja").read_text() for kind in ("", "_training"))
    tokenizer = template_tokenizer(
        source, tuple(sorted(set(TOKENS.findall(source)))), (), "<s>", "<|endoftext|>"
    )
    given = (
        [message | {"content": [{"type": "text", "text": message["content"]}]} for message in chat]
        if name in OF_PARTS
        else chat
    )
    theirs = tokenizer.apply_chat_template(
        given,
        tools=tools,
        chat_template=training,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )

    ((ids, labels),), _ = encode_chats_with_counts(
        ChatTemplate(tokenizer), [{"messages": chat, "tools": tools}], ["row 1"], 4096
    )
    learned = np.concatenate([[False], labels[:-1] != IGNORE])
    starts = np.flatnonzero(learned & ~np.roll(learned, 1))
    assert ids.tolist() == theirs["input_ids"] and len(starts) == 2
    for number, start in enumerate(starts):
        prompt = tokenizer(prompts[number % len(prompts)], add_special_tokens=False)["input_ids"]
        assert ids[start - len(prompt) : start].tolist() == prompt
        learned[start - len(prompt) : start] = True
    assert learned.astype(int).tolist() == theirs["assistant_masks"]
