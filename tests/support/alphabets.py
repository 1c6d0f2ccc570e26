"""Tokenizers whose alphabets lack most letters: for DNA, molecules, music and proteins.

Each tokenizer comes with one row of its data and the tokens of that row.
"""

from typing import NamedTuple

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHAT = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{%"
    " endif %}{% endfor %}"
)
SPECIAL = ("[PAD]", "[BOS]", "[EOS]", "[MASK]")


class Alphabet(NamedTuple):
    tokenizer: PreTrainedTokenizerFast
    row: str
    tokens: list[str]  # of the row


def fast(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """Create a tokenizer that adds [BOS] and [EOS] around a text, with all special tokens and a
    chat template.
    """
    begin, end = ((token, backend.token_to_id(token)) for token in ("[BOS]", "[EOS]"))
    backend.post_processor = processors.TemplateProcessing(
        single="[BOS] $A [EOS]", special_tokens=[begin, end]
    )
    named = {
        "pad_token": "[PAD]",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "mask_token": "[MASK]",
    }
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT, **named)


def numbered(tokens: tuple[str, ...]) -> dict[str, int]:
    return {token: number for number, token in enumerate((*SPECIAL, *tokens))}


def dna() -> Alphabet:
    """Return a BPE tokenizer without an unknown token; it drops other letters."""
    backend = Tokenizer(
        models.BPE(
            vocab=numbered(("A", "C", "G", "T", "AC", "GT")), merges=[("A", "C"), ("G", "T")]
        )
    )
    return Alphabet(fast(backend), "ACGTTA", ["AC", "GT", "T", "A"])


def molecules() -> Alphabet:
    """Return a SMILES tokenizer that splits words with a regular expression.

    The library raises an error for a word without a token.
    """
    backend = Tokenizer(
        models.WordLevel(numbered(("Cl", "C", "O", "N", "=", "(", ")", "1")), unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"Cl|."), "isolated")
    return Alphabet(fast(backend), "CC(=O)NCl", ["C", "C", "(", "=", "O", ")", "N", "Cl"])


def music() -> Alphabet:
    """Return a tokenizer for events that contain a hyphen, which no other text contains.

    The first tokens of the vocabulary decode to texts that have no tokens themselves.
    """
    backend = Tokenizer(
        models.WordLevel(numbered(("\t", " ", "Note-60", "Note-64", "Rest-4")), unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Alphabet(fast(backend), "Note-60 Rest-4 Note-64 ", ["Note-60", "Rest-4", "Note-64"])


def proteins() -> Alphabet:
    """Return a Unigram tokenizer of upper-case letters.

    The tokenizer normalises its input, so it also reads lower-case letters.
    """
    pieces = [
        (token, -float(number + 1))
        for number, token in enumerate((*SPECIAL, "M", "K", "V", "MK", "L"))
    ]
    backend = Tokenizer(models.Unigram(pieces))
    backend.normalizer = normalizers.Replace(Regex(r"\s+"), "")
    return Alphabet(fast(backend), "MKVLM", ["MK", "V", "L", "M"])


ALPHABETS = {"dna": dna, "molecules": molecules, "music": music, "proteins": proteins}
