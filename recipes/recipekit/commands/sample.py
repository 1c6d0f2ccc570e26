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
from typing import Any

from ..architectures.export_folder import Export, base_of, check_files, find_export
from ..spec.help_page import CommandFormatter
from ..spec.hub import hub_is_away, hub_refusal
from ..spec.paths import path_of
from ..spec.refusal import Refusal, refuse

LENGTH = 100  # new tokens, unless stated
OF_CHAT, OF_TEXT = "Hello! Who are you?", "The"  # prompts, unless stated
AGAIN = "download it again, or write it again with recipekit convert to-hf RUN NEW_FOLDER"


@dataclass(frozen=True)
class Generator:
    """A model of transformers or peft with its tokenizer."""

    model: Any
    tokenizer: Any
    about: str

    @property
    def ends(self) -> list[int]:
        """The tokens at which the model stops, by its generation config, or else by its
        tokenizer.
        """
        from ..model.small_files import ids_of

        stated = ids_of(self.model.generation_config.eos_token_id)
        return stated or ids_of(self.tokenizer.eos_token_id)

    @property
    def positions(self) -> int | None:
        """The tokens that the model's config.json has positions for; None if it states no such
        number.
        """
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return most if isinstance(most, int) and most > 0 else None


@dataclass(frozen=True)
class Sample:
    """Generated text without special tokens and trailing blanks; `stop` is the token that ended it,
    "" without one.
    """

    text: str
    num_tokens: int
    stop: str
    ends: tuple[str, ...] = field(default=())

    @property
    def end(self) -> str:
        """A line that says whether the stop token was reached."""
        if self.stop:
            return f"stop token: {self.stop} was reached after {self.num_tokens} new tokens"
        stops = (
            f"not reached ({' or '.join(self.ends)})"
            if self.ends
            else "the model has no stop token"
        )
        return f"stop token: {stops}. The text was cut off after {self.num_tokens} new tokens"


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0 done, 1 the input is at fault, 2 usage."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which nothing here uses, would warn
    arguments = parser().parse_args(argv)
    try:
        check(arguments.prompt, arguments.max_new_tokens)
        export = find_export(arguments.folder)
        generator = load(export)
        chat = as_chat(export, generator.tokenizer, arguments.chat)
        prompt = arguments.prompt or (OF_CHAT if chat else OF_TEXT)
        ids = encoded(generator, prompt, chat)
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
        sample = write(generator, ids, length, chat)
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return refusal.exit_code
    print(f"{sample.text}\n\n{sample.end}")
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="recipekit sample",
        description=__doc__,
        formatter_class=CommandFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "folder",
        type=path_of,
        metavar="RUN_OR_HF",
        help="Run folder, or a folder of Hugging Face files.",
    )
    about = (
        f'Prompt that the model answers (chat) or continues (text). (default: "{OF_CHAT}" for a'
        f' chat, "{OF_TEXT}" for text)'
    )
    made.add_argument("--prompt", metavar="TEXT", help=about)
    about = (
        "Maximum number of tokens to generate. A stop token ends the text earlier. (default:"
        f" {LENGTH})"
    )
    made.add_argument("--max_new_tokens", "--max-new-tokens", type=int, metavar="N", help=about)
    about = (
        "Format the prompt with the tokenizer's chat template. (default: yes if there is one,"
        " except after --task pretrain)"
    )
    made.add_argument("--chat", action=argparse.BooleanOptionalAction, help=about)
    return made


def check(prompt: str | None, length: int | None) -> None:
    """Raise `Refusal` for a value that no model could use."""
    if prompt is not None and not prompt.strip():
        fix = "write --prompt TEXT, or leave it out. Check the variables of your shell"
        raise refuse(f"--prompt {prompt!r}", "must not be empty or blank", fix)
    if prompt is not None and not prompt.isascii():
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise refuse(
                "--prompt", "must be UTF-8", "set the locale of your terminal to UTF-8"
            ) from None
    if length is not None and length < 1:
        raise refuse(
            f"--max_new_tokens {length}", "must be at least 1", f"use --max_new_tokens {LENGTH}"
        )


# Loading
# --------------------------------------------------------------------------------------------------


def load(export: Export, device: str = "") -> Generator:
    """Load a model and its tokenizer as users of transformers do; code in a model's folder is never
    run.

    `device` is a GPU if there is one, otherwise the CPU. Raise `Refusal` for files that do not give
    a whole model.
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
        options |= {"revision": revision or "main", "local_files_only": hub_is_away()}
    with _refused(base, "out of memory" if device == "cpu" else "the GPU is full"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(base, **options)
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            rule = f"lacks {len(missing)} tensors of the model, such as {missing[0]}"
            raise refuse(base, rule, AGAIN)
        if export.is_adapter:
            model = _with_adapter(model, export.folder)
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
    """Load the tokenizer of a folder, or else of the adapter's base model."""
    from ..data.processors import load_tokenizer

    own = (
        any(folder.glob("tokenizer*")) or any(folder.glob("*.model")) or any(folder.glob("vocab.*"))
    )
    return load_tokenizer(str(folder)) if own else load_tokenizer(base, revision=revision)


def _with_adapter(model: Any, folder: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder)


@contextlib.contextmanager
def _refused(where: str, full: str) -> Iterator[None]:
    """Refuse files that transformers or peft cannot load, in one line."""
    import torch
    from safetensors import SafetensorError

    from ..model.config_errors import WRONG_VALUE

    try:
        yield
    except Refusal:
        raise
    except (torch.OutOfMemoryError, MemoryError):
        raise refuse(
            where,
            f"is too large: {full}",
            "set CUDA_VISIBLE_DEVICES= (empty) to load it on the CPU",
        ) from None
    except (OSError, ImportError) as error:
        if Path(where).is_dir():
            raise refuse(where, f"cannot be loaded: {_first_line(error)}", AGAIN) from None
        raise hub_refusal(where, where, error) from None
    except (SafetensorError, *WRONG_VALUE) as error:
        raise refuse(where, f"cannot be loaded: {_first_line(error)}", AGAIN) from None


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:300]}"


# Generation
# --------------------------------------------------------------------------------------------------


def as_chat(export: Export, tokenizer: Any, wanted: bool | None) -> bool:
    """Return True if the prompt is a message of a chat: by the flag, or else by the run's task and
    the tokenizer.
    """
    has_template = bool(tokenizer.chat_template)
    if wanted and not has_template:
        rule = f"the tokenizer in {export.folder} has no chat template"
        raise refuse("--chat", rule, "leave out --chat. The model then continues the prompt")
    if wanted is not None:
        return wanted
    return has_template and export.task != "pretrain"


def encoded(generator: Generator, prompt: str, chat: bool) -> list[int]:
    """Return the tokens of a prompt, as training wrote them.

    Raise `Refusal` for a prompt that the model cannot read.
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
            raise refuse(
                "--prompt", rule, "use --no-chat. The model then continues the prompt"
            ) from None
    else:
        begin = (
            [tokenizer.bos_token_id] if edges(tokenizer)[0][:1] == [tokenizer.bos_token_id] else []
        )
        try:
            own = encode(tokenizer, [prompt])["input_ids"][0]
        except Refusal:
            own = []
        ids = [*begin, *own] if own else []
    if not ids:
        rule = "the tokenizer cannot encode part of it and has no token for unknown text"
        raise refuse("--prompt", rule, "use another --prompt")
    most = generator.model.get_input_embeddings().weight.shape[0]
    if (largest := max(ids)) >= most:
        word = tokenizer.convert_ids_to_tokens(largest)
        rule = f"has token {largest} ({word!r}), and the model has embeddings for 0 to {most - 1}"
        raise refuse("--prompt", rule, "use another --prompt, or use the model's own tokenizer")
    return list(ids)


def fitting_length(
    generator: Generator, num_prompt: int, wanted: int | None
) -> tuple[int, list[str]]:
    """Return the number of tokens to generate, and a line if the model's positions lower the
    default.
    """
    if (most := generator.positions) is None:
        return wanted or LENGTH, []
    room = most - num_prompt
    if room < 1:
        rule = (
            f"has {num_prompt} tokens, but the model has {most} positions for the prompt and the"
            " answer"
        )
        raise refuse("--prompt", rule, "use a shorter prompt")
    if (wanted or LENGTH) <= room:
        return wanted or LENGTH, []
    rule = (
        f"after a prompt of {num_prompt} tokens the model has {room} of its {most} positions left"
    )
    if wanted is not None:
        raise refuse(
            f"--max_new_tokens {wanted}", rule, f"use --max_new_tokens {room}, or a shorter prompt"
        )
    return room, [f"max_new_tokens: {LENGTH} lowered to {room}: {rule}"]


def write(generator: Generator, ids: list[int], length: int, chat: bool = False) -> Sample:
    """Generate up to `length` tokens after the prompt `ids`, always the most probable one."""
    import torch

    from ..data.encode import Encoder

    tokenizer, ends = generator.tokenizer, generator.ends
    if chat:  # the generation config of an adapter's base model may not know the end of an answer
        with contextlib.suppress(Refusal):
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
    """Remove blanks at the end of each line, and blank lines at the end of a text."""
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip()


if __name__ == "__main__":
    sys.exit(main())
