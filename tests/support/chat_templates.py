"""Chat templates with the structure of published templates, rewritten by hand, and chats to render
with them.

Each template writes the same text around messages as its model's own template. That text includes
headers, ends of turns, and the positions of thoughts, tools and the system message. The tool
descriptions are shorter than the published ones.
"""

from typing import Any, NamedTuple

from recipekit.data.processors import byte_tokenizer
from transformers import AddedToken


class Published(NamedTuple):
    """A template with its models' tokens: special tokens, other tokens, and the tokens that begin
    and end a text.
    """

    source: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    bos: str = ""
    eos: str = ""
    trl: str = ""  # name of TRL's training template for the same models


CALLS = """{% for call in message.tool_calls %}{% if not loop.first or message.content %}{{ '\\n' }}{% endif -%}
<tool_call>{{ '\\n{"name": "' + call.function.name + '", "arguments": ' }}ARGUMENTS{{ '}\\n' }}</tool_call>{% endfor %}"""
CHATML_TOOLS = """
{%- if tools %}{{ '<|im_start|>system\\n' + first + '\\n# Tools' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif first %}{{ '<|im_start|>system\\n' + first + '<|im_end|>\\n' }}{% endif %}"""
CHATML_RESULT = """
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"""
CHATML_PROMPT = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

QWEN2 = (
    """{%- if messages[0].role == 'system' %}{% set first = messages[0].content %}{% else %}{% set first = 'You help.' %}{% endif %}"""
    + CHATML_TOOLS
    + """{%- for message in messages %}{% if message.role == 'user' or message.role == 'system' and not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + message.content }}{% if message.tool_calls %}"""
    + CALLS.replace("ARGUMENTS", "{{ call.function.arguments | tojson }}")
    + """{% endif %}{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}"""
    + CHATML_RESULT
    + "{% endif %}{% endfor %}"
    + CHATML_PROMPT
)

QWEN3 = (
    """{%- set first = messages[0].content if messages[0].role == 'system' else '' %}"""
    + CHATML_TOOLS
    + """{%- set asked = namespace(at=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set asked.at = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}{% if message.role == 'user' or message.role == 'system' and not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}{% set thought = message.reasoning_content or '' %}
{%- if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > asked.at and (loop.last or thought) %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- content }}{% if message.tool_calls %}"""
    + CALLS.replace(
        "ARGUMENTS",
        "{{ call.function.arguments if call.function.arguments is string else"
        " call.function.arguments | tojson }}",
    )
    + """{% endif %}{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}"""
    + CHATML_RESULT
    + "{% endif %}{% endfor %}"
    + CHATML_PROMPT
)

ALTERNATE = (
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must"
    " alternate') }}{% endif %}"
)

LLAMA2 = (
    """{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- for message in messages[1:] if system else messages %}""".replace(
        "messages[1:] if system else messages", "(messages[1:] if system else messages)"
    )
    + ALTERNATE
    + """{%- if message.role == 'user' %}
{{- bos_token + '[INST] ' + ('<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' if loop.first and system else '') + message.content | trim + ' [/INST]' }}
{%- else %}{{ ' ' + message.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"""
)

LLAMA3 = """{{- bos_token }}DATE
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string + '\\n\\n' }}
{%- set rest = messages %}{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set rest = messages[1:] %}{% endif %}
{{- '<|eot_id|>' }}
{%- for message in rest %}{% if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}{% for tool in tools %}{{ tool | tojson }}{{ '\\n\\n' }}{% endfor %}{% endif %}
{{- message.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
FIXED_DATE = "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
TODAY = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
)

MISTRAL1 = (
    "{{- bos_token }}{% for message in messages %}"
    + ALTERNATE
    + "{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}{% else %}{{"
    " message.content + eos_token }}{% endif %}{% endfor %}"
)

MISTRAL3 = """{{- bos_token }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set last = namespace(at=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}{% if message.role == 'user' %}
{%- if loop.index0 == last.at %}{% if tools %}{{ '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + (system + '\\n\\n' if system else '') + message.content + '[/INST]' }}
{%- else %}{{ '[INST] ' + message.content + '[/INST]' }}{% endif %}
{%- elif message.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('an id has nine characters') }}{% endif %}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}{{ ', ' if not loop.last else ']' + eos_token }}{% endfor %}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}
{%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + message.content + '}[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"""

GEMMA = (
    """{{- bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}
{%- for message in messages %}"""
    + ALTERNATE
    + """{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
)

GEMMA3 = (
    """{{- bos_token }}{% set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for message in (messages[1:] if system else messages) %}"""
    + ALTERNATE
    + """{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' + (system if loop.first else '') }}
{%- if message.content is string %}{{ message.content | trim }}
{%- else %}{% for part in message.content %}{{ part.text | trim }}{% endfor %}{% endif %}{{ '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
)

PHI3 = """{%- for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

DEEPSEEK = """{%- set seen = namespace(tool=false, system='') %}
{%- for message in messages %}{% if message.role == 'system' %}{% set seen.system = message.content %}{% endif %}{% endfor %}
{{- bos_token + seen.system }}
{%- for message in messages %}{% if message.role == 'user' %}{{ '<User>' + message.content }}{% set seen.tool = false %}
{%- elif message.role == 'assistant' and message.content is none %}{% set seen.tool = false %}{{ '<Assistant><tool_calls_begin>' }}
{%- for call in message.tool_calls %}
{{- '<tool_call_begin>' + call.type + '<tool_sep>' + call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```<tool_call_end>' }}{% endfor %}
{{- '<tool_calls_end>' + eos_token }}
{%- elif message.role == 'assistant' %}
{{- ('<outputs_end>' if seen.tool else '<Assistant>') + message.content.split('</think>')[-1] + eos_token }}{% set seen.tool = false %}
{%- elif message.role == 'tool' %}{{ ('' if seen.tool else '<outputs_begin>') + '<output>' + message.content }}{% set seen.tool = true %}{% endif %}{% endfor %}
{%- if seen.tool %}{{ '<outputs_end>' }}{% elif add_generation_prompt %}{{ '<Assistant><think>\\n' }}{% endif %}"""

GRANITE = """{%- set system = messages[0].content if messages[0].role == 'system' else 'Today is ' + strftime_now('%B %d, %Y') + '.' %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}
{%- if tools %}{{ '<|start_of_role|>tools<|end_of_role|>' }}{{ tools | tojson(indent=4) }}{{ '<|end_of_text|>\\n' }}{% endif %}
{%- for message in messages %}{% if message.role == 'assistant' and message.tool_calls %}
{{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' }}{{ message.tool_calls | tojson }}{{ '<|end_of_text|>\\n' }}
{%- elif message.role == 'tool' %}{{ '<|start_of_role|>tool_response<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""

SMOLLM3 = """{{- '<|im_start|>system\\nToday: ' + strftime_now('%d %B %Y') + '\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}{{ '<|im_end|>\\n' }}
{%- for message in messages %}{% if message.role in ['user', 'tool'] %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- generation %}{{ '<|im_start|>assistant\\n' + ('' if '<think>' in message.content else '<think>\\n\\n</think>\\n') + message.content + '<|im_end|>\\n' }}
{%- endgeneration %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

ZEPHYR = """{%- for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' }}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{% endfor %}"""

COMMAND_R = """{{- bos_token }}{% for message in messages %}
{{- '<|START|>' + {'system': '<|SYSTEM|>', 'user': '<|USER|>', 'assistant': '<|CHATBOT|>'}[message.role] + message.content.strip() + '<|END|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|START|><|CHATBOT|>' }}{% endif %}"""

# Image models accept a list of parts as content, but not a string.
SMOLVLM = """<|im_start|>{% for message in messages %}{{ message.role.capitalize() + (':' if message.content[0].type == 'image' else ': ') }}
{%- for part in message.content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}{{ '<end_of_utterance>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

LLAVA = """{%- for message in messages %}{{ message.role.upper() + ': ' if message.role != 'system' }}
{%- for part in message.content | selectattr('type', 'equalto', 'text') %}
{%- if message.role == 'assistant' %}{% generation %}{{ part.text + ' ' }}{% endgeneration %}{% else %}{{ part.text + ' ' }}{% endif %}
{%- endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

VICUNA = """{%- for message in messages %}{% if message.role == 'user' %}{{ 'USER: ' + message.content }}
{%- elif message.role == 'assistant' %}{{ ' ASSISTANT: ' + message.content + eos_token }}{% else %}{{ message.content + ' ' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"""

_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_HEADERS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
)
_TURNS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_INST = (
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
_CALLS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
_R1 = (
    "<think>",
    "</think>",
    "<tool_calls_begin>",
    "<tool_call_begin>",
    "<tool_sep>",
    "<tool_call_end>",
    "<tool_calls_end>",
    "<outputs_begin>",
    "<outputs_end>",
)

PUBLISHED = {
    "Qwen2.5": Published(QWEN2, _IM, _CALLS[2:], eos="<|im_end|>", trl="qwen2_5"),
    "Qwen3": Published(QWEN3, _IM, _CALLS, eos="<|im_end|>", trl="qwen3"),
    "Llama 2": Published(LLAMA2, ("<s>", "</s>"), bos="<s>", eos="</s>"),
    "Llama 3.1": Published(
        LLAMA3.replace("DATE", FIXED_DATE), _HEADERS, bos="<|begin_of_text|>", eos="<|eot_id|>"
    ),
    "Llama 3.2": Published(
        LLAMA3.replace("DATE", TODAY), _HEADERS, bos="<|begin_of_text|>", eos="<|eot_id|>"
    ),
    "Mistral v1": Published(MISTRAL1, ("<s>", "</s>"), bos="<s>", eos="</s>"),
    "Mistral v3": Published(MISTRAL3, ("<s>", "</s>", *_INST), bos="<s>", eos="</s>"),
    "Gemma": Published(GEMMA, _TURNS, bos="<bos>", eos="<eos>", trl="gemma"),
    "Gemma 3": Published(GEMMA3, _TURNS, bos="<bos>", eos="<eos>", trl="gemma3"),
    "Phi-3": Published(
        PHI3,
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        eos="<|endoftext|>",
        trl="phi3",
    ),
    "DeepSeek-R1": Published(
        DEEPSEEK, ("<bos>", "<end>"), (*_R1, "<User>", "<Assistant>"), bos="<bos>", eos="<end>"
    ),
    "Granite": Published(
        GRANITE,
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
        eos="<|end_of_text|>",
    ),
    "SmolLM3": Published(SMOLLM3, _IM, _CALLS, eos="<|im_end|>"),
    "Zephyr": Published(ZEPHYR, ("<s>", "</s>"), eos="</s>"),
    "Command-R": Published(
        COMMAND_R,
        ("<bos>", "<|START|>", "<|END|>", "<|SYSTEM|>", "<|USER|>", "<|CHATBOT|>"),
        bos="<bos>",
        eos="<|END|>",
        trl="cohere",
    ),
    "SmolVLM": Published(
        SMOLVLM,
        ("<|im_start|>", "<end_of_utterance>"),
        bos="<|im_start|>",
        eos="<end_of_utterance>",
    ),
    "LLaVA": Published(LLAVA, ("<s>", "</s>"), eos="</s>"),
    "Vicuna": Published(VICUNA, ("<s>", "</s>"), eos="</s>"),
}


def published_tokenizer(name: str) -> Any:
    """Create a tokenizer of bytes and these models' tokens, with their template."""
    return template_tokenizer(*PUBLISHED[name][:5])


def template_tokenizer(
    source: str,
    special: tuple[str, ...] = (),
    plain: tuple[str, ...] = (),
    bos: str = "",
    eos: str = "",
) -> Any:
    tokenizer: Any = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    tokenizer.bos_token, tokenizer.eos_token = bos or None, eos or tokenizer.eos_token
    tokenizer.chat_template = source
    return tokenizer


# Chats
# --------------------------------------------------------------------------------------------------


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, *calls: Any, **more: Any) -> dict[str, Any]:
    """Return an assistant message; each item of `calls` contains the arguments for a call of `f`."""
    made = [
        {"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for arguments in calls
    ]
    return {"role": "assistant", "content": content} | ({"tool_calls": made} if made else {}) | more


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": "abcdef123"}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "Does f.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
