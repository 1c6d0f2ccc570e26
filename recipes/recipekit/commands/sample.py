"""Generate text with the model of a run, in plain transformers (and peft for an adapter).

    recipekit sample runs/mine --prompt "Once upon a time"
    recipekit sample runs/mine/hf_merged --max_new_tokens 200

Give a run folder, or a folder of Hugging Face files. Decoding is greedy: the same command writes
the same text. A model that was trained on chats gets the prompt as a chat. Other models continue
the prompt.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..architectures.export_folder import Export, base_of, check_files, find_export
from ..hosts.transformers_release import print_release_notes
from ..spec.errors import ConfigError, config_error
from ..spec.help_page import CommandFormatter
from ..spec.hub import hub_error, hub_is_unreachable
from ..spec.paths import path_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_NEW_TOKENS = 100  # new tokens, unless stated
DEFAULT_CHAT_PROMPT, DEFAULT_TEXT_PROMPT = "Hello! Who are you?", "The"  # prompts, unless stated
REDOWNLOAD_FIX = "download it again, or write it again with recipekit convert to-hf RUN NEW_FOLDER"


@dataclass(frozen=True)
class Generator:
    """A transformers or peft model with its tokenizer."""

    model: Any
    tokenizer: Any
    about: str

    @property
    def stop_token_ids(self) -> list[int]:
        """Return the tokens at which the model stops.

        They come from its generation config, otherwise from its tokenizer.
        """
        from ..model.small_files import token_ids_in

        stated = token_ids_in(self.model.generation_config.eos_token_id)
        return stated or token_ids_in(self.tokenizer.eos_token_id)

    @property
    def max_positions(self) -> int | None:
        """Return the number of positions in the model's config.json, or None if not stated."""
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return most if isinstance(most, int) and most > 0 else None


@dataclass(frozen=True)
class Sample:
    """Generated text without special tokens and without trailing blanks.

    `stop_token` is the token that ended the text, or "".
    """

    text: str
    num_tokens: int
    stop_token: str
    stop_tokens: tuple[str, ...] = field(default=())

    @property
    def stop_message(self) -> str:
        """Return a line that states whether the stop token was reached."""
        if self.stop_token:
            return f"stop token: {self.stop_token} was reached after {self.num_tokens} new tokens"
        stops = (
            f"not reached ({' or '.join(self.stop_tokens)})"
            if self.stop_tokens
            else "the model has no stop token"
        )
        return f"stop token: {stops}. The text was cut off after {self.num_tokens} new tokens"


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code.

    The code is 0 if the command is done, 1 for an error in the input, and 2 for a wrong command
    line.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which is not used here, would warn
    arguments = make_sample_parser().parse_args(argv)
    try:
        check_generation_flags(arguments.prompt, arguments.max_new_tokens)
        print_release_notes()
        export = find_export(arguments.folder)
        generator = load_generator(export)
        chat = is_chat_prompt(export, generator.tokenizer, arguments.chat)
        prompt = arguments.prompt or (DEFAULT_CHAT_PROMPT if chat else DEFAULT_TEXT_PROMPT)
        ids = encode_prompt(generator, prompt, chat)
        length, lowered = fitting_length(generator, len(ids), arguments.max_new_tokens)
        for note in (generator.about, *export.notes, *lowered):
            print(note)
        how = (
            "a chat, by the tokenizer's template"
            if chat
            else "plain text, which the model continues"
        )
        if chat and not export.task and arguments.chat is None:
            print("The task of this model is unknown. For a model of plain text, use --no-chat")
        print(f"prompt ({how}; {len(ids)} tokens): {prompt}\n", flush=True)
        sample = generate_sample(generator, ids, length, chat)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{sample.text}\n\n{sample.stop_message}")
    return 0


def make_sample_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="recipekit sample",
        description=__doc__,
        formatter_class=CommandFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "folder",
        type=path_argument,
        metavar="RUN_OR_HF",
        help="Run folder, or a folder of Hugging Face files.",
    )
    about = (
        "Prompt that the model answers (chat) or continues (text). (default:"
        f' "{DEFAULT_CHAT_PROMPT}" for a chat, "{DEFAULT_TEXT_PROMPT}" for text)'
    )
    made.add_argument("--prompt", metavar="TEXT", help=about)
    about = (
        "Maximum number of tokens to generate. A stop token ends the text earlier. (default:"
        f" {DEFAULT_NEW_TOKENS})"
    )
    made.add_argument("--max_new_tokens", "--max-new-tokens", type=int, metavar="N", help=about)
    about = (
        "Format the prompt with the tokenizer's chat template. (default: yes if there is one,"
        " except after --task pretrain)"
    )
    made.add_argument("--chat", action=argparse.BooleanOptionalAction, help=about)
    return made


def check_generation_flags(prompt: str | None, length: int | None) -> None:
    """Raise `ConfigError` for a value that no model could accept."""
    if prompt is not None and not prompt.strip():
        fix = "write --prompt TEXT, or leave it out. Check the variables of your shell"
        raise config_error(f"--prompt {prompt!r}", "must not be empty or blank", fix)
    if prompt is not None and not prompt.isascii():
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise config_error(
                "--prompt", "must be UTF-8", "set the locale of your terminal to UTF-8"
            ) from None
    if length is not None and length < 1:
        raise config_error(
            f"--max_new_tokens {length}",
            "must be at least 1",
            f"use --max_new_tokens {DEFAULT_NEW_TOKENS}",
        )


# Loading
# --------------------------------------------------------------------------------------------------


def load_generator(export: Export, device: str = "") -> Generator:
    """Load a model and its tokenizer as users of transformers do.

    No code in the model's folder is run. `device` defaults to a GPU if there is one, otherwise to
    the CPU. Raises `ConfigError` for files that do not form a complete model.
    """
    base, revision = str(export.folder), ""
    if export.is_adapter:
        base, revision = base_of(export.folder)
    where = Path(base)
    if where.is_dir():
        check_files(where)
    tokenizer = _tokenizer(export.folder, base, revision)

    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    options: dict[str, Any] = {
        "dtype": "auto",
        "trust_remote_code": False,
        "output_loading_info": True,
    }
    if not where.is_dir():
        options |= {"revision": revision or "main", "local_files_only": hub_is_unreachable()}
    with _refuse_load_errors(base, "out of memory" if device == "cpu" else "the GPU is full"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(base, **options)
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            rule = f"lacks {len(missing)} tensors of the model, such as {missing[0]}"
            raise config_error(base, rule, REDOWNLOAD_FIX)
        if export.is_adapter:
            model = _load_peft_adapter(model, export.folder)
        model = model.eval().to(device)
    size = sum(parameter.numel() for parameter in model.parameters())
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    of = f", an adapter of {base}" if export.is_adapter else ""
    return Generator(
        model,
        tokenizer,
        f"model {export.folder}{of}: {size / 1e6:,.1f} M parameters, {dtype}, on the {device}",
    )


def _tokenizer(folder: Path, base: str, revision: str) -> Any:
    """Load a folder's tokenizer, otherwise the tokenizer of the adapter's base model."""
    from ..data.processors import load_tokenizer

    own = (
        any(folder.glob("tokenizer*")) or any(folder.glob("*.model")) or any(folder.glob("vocab.*"))
    )
    return load_tokenizer(str(folder)) if own else load_tokenizer(base, revision=revision)


def _load_peft_adapter(model: "PreTrainedModel", folder: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder)


@contextlib.contextmanager
def _refuse_load_errors(where: str, full: str) -> Iterator[None]:
    """Raise a one-line `ConfigError` for files that transformers or peft cannot load."""
    import torch
    from safetensors import SafetensorError

    from ..model.config_errors import CONSTRUCTOR_ERRORS

    try:
        yield
    except ConfigError:
        raise
    except (torch.OutOfMemoryError, MemoryError):
        raise config_error(
            where,
            f"is too large: {full}",
            "set CUDA_VISIBLE_DEVICES= (empty) to load it on the CPU",
        ) from None
    except (OSError, ImportError) as error:
        if Path(where).is_dir():
            raise config_error(
                where, f"cannot be loaded: {_first_line(error)}", REDOWNLOAD_FIX
            ) from None
        raise hub_error(where, where, error) from None
    except (SafetensorError, *CONSTRUCTOR_ERRORS) as error:
        raise config_error(
            where, f"cannot be loaded: {_first_line(error)}", REDOWNLOAD_FIX
        ) from None


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:300]}"


# Generation
# --------------------------------------------------------------------------------------------------


def is_chat_prompt(
    export: Export, tokenizer: "PreTrainedTokenizerBase", requested: bool | None
) -> bool:
    """Return True if the prompt is a chat message.

    The flag decides. Without the flag, the run's task and the tokenizer decide.
    """
    has_template = bool(tokenizer.chat_template)
    if requested and not has_template:
        rule = f"the tokenizer in {export.folder} has no chat template"
        raise config_error("--chat", rule, "leave out --chat. The model then continues the prompt")
    if requested is not None:
        return requested
    return has_template and export.task != "pretrain"


def encode_prompt(generator: Generator, prompt: str, chat: bool) -> list[int]:
    """Return the tokens of a prompt in the format that was used in training.

    Raises `ConfigError` for a prompt that the model cannot read.
    """
    from jinja2 import TemplateError

    from ..data.processors import edges, encode

    tokenizer = generator.tokenizer
    if chat:
        messages = [{"role": "user", "content": prompt}]
        try:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        except (TemplateError, TypeError) as error:
            rule = f"the chat template refuses a message of a user: {_first_line(error)}"
            raise config_error(
                "--prompt", rule, "use --no-chat. The model then continues the prompt"
            ) from None
    else:
        begin = (
            [tokenizer.bos_token_id] if edges(tokenizer)[0][:1] == [tokenizer.bos_token_id] else []
        )
        try:
            own = encode(tokenizer, [prompt])["input_ids"][0]
        except ConfigError:
            own = []
        ids = [*begin, *own] if own else []
    if not ids:
        rule = "the tokenizer cannot encode part of it and has no token for unknown text"
        raise config_error("--prompt", rule, "use another --prompt")
    most = generator.model.get_input_embeddings().weight.shape[0]
    if (largest := max(ids)) >= most:
        word = tokenizer.convert_ids_to_tokens(largest)
        rule = f"has token {largest} ({word!r}), and the model has embeddings for 0 to {most - 1}"
        raise config_error(
            "--prompt", rule, "use another --prompt, or use the model's own tokenizer"
        )
    return list(ids)


def fitting_length(
    generator: Generator, num_prompt_tokens: int, requested: int | None
) -> tuple[int, list[str]]:
    """Return the number of tokens to generate, and a note.

    The note explains if the model's positions lower the default number.
    """
    if (most := generator.max_positions) is None:
        return requested or DEFAULT_NEW_TOKENS, []
    room = most - num_prompt_tokens
    if room < 1:
        rule = (
            f"has {num_prompt_tokens} tokens, but the model has {most} positions for the prompt and"
            " the answer"
        )
        raise config_error("--prompt", rule, "use a shorter prompt")
    if (requested or DEFAULT_NEW_TOKENS) <= room:
        return requested or DEFAULT_NEW_TOKENS, []
    rule = (
        f"after a prompt of {num_prompt_tokens} tokens the model has {room} of its {most} positions"
        " left"
    )
    if requested is not None:
        raise config_error(
            f"--max_new_tokens {requested}",
            rule,
            f"use --max_new_tokens {room}, or a shorter prompt",
        )
    return room, [f"max_new_tokens: {DEFAULT_NEW_TOKENS} lowered to {room}: {rule}"]


def generate_sample(
    generator: Generator, ids: list[int], length: int, chat: bool = False
) -> Sample:
    """Generate up to `length` tokens after the prompt `ids`, always the most probable token."""
    import torch

    from ..data.encode import Encoder

    tokenizer, ends = generator.tokenizer, generator.stop_token_ids
    if chat:  # the generation config of an adapter's base model may lack the end of an answer
        with contextlib.suppress(ConfigError):
            ends = list(dict.fromkeys([*ends, *Encoder(tokenizer, "sft", seq_len=1).end_tokens]))
    prompt = torch.tensor([ids], device=generator.model.device)  # (1, T) int64
    greedy = {"do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(ends), 0)
    with torch.no_grad():
        out = generator.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=length,
            eos_token_id=ends or None,
            pad_token_id=pad,
            tokenizer=tokenizer,
            **greedy,
        )
    new = out[0, len(ids) :].tolist()
    stop = tokenizer.convert_ids_to_tokens(new[-1]) if new and new[-1] in ends else ""
    text = tokenizer.decode(new, skip_special_tokens=True)
    names = [name for name in tokenizer.convert_ids_to_tokens(ends) if name]
    return Sample(without_trailing_blanks(text), len(new), stop, tuple(names))


def without_trailing_blanks(text: str) -> str:
    """Remove blanks at the end of each line, and blank lines at the end of a string."""
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip()


if __name__ == "__main__":
    sys.exit(main())
