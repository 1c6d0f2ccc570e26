"""Tokenizers whose alphabets lack most letters: DNA, molecules, music, proteins.

Each with a row of its data and the row's tokens.
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
    """Make a tokenizer that puts [BOS] and [EOS] around a text, with all special tokens and a chat
    template.
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
    """BPE without an unknown token drops other letters."""
    backend = Tokenizer(
        models.BPE(
            vocab=numbered(("A", "C", "G", "T", "AC", "GT")), merges=[("A", "C"), ("G", "T")]
        )
    )
    return Alphabet(fast(backend), "ACGTTA", ["AC", "GT", "T", "A"])


def molecules() -> Alphabet:
    """SMILES in words of a regular expression; a word without a token is an error of the
    library.
    """
    backend = Tokenizer(
        models.WordLevel(numbered(("Cl", "C", "O", "N", "=", "(", ")", "1")), unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"Cl|."), "isolated")
    return Alphabet(fast(backend), "CC(=O)NCl", ["C", "C", "(", "=", "O", ")", "N", "Cl"])


def music() -> Alphabet:
    """Events with a hyphen, which no text but their own gives; the first tokens of the vocabulary
    decode to texts without tokens.
    """
    backend = Tokenizer(
        models.WordLevel(numbered(("\t", " ", "Note-60", "Note-64", "Rest-4")), unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Alphabet(fast(backend), "Note-60 Rest-4 Note-64 ", ["Note-60", "Rest-4", "Note-64"])


def proteins() -> Alphabet:
    """Unigram pieces of upper-case letters; text is normalised, so lower-case letters are read,
    too.
    """
    pieces = [
        (token, -float(number + 1))
        for number, token in enumerate((*SPECIAL, "M", "K", "V", "MK", "L"))
    ]
    backend = Tokenizer(models.Unigram(pieces))
    backend.normalizer = normalizers.Replace(Regex(r"\s+"), "")
    return Alphabet(fast(backend), "MKVLM", ["MK", "V", "L", "M"])


ALPHABETS = {"dna": dna, "molecules": molecules, "music": music, "proteins": proteins}
