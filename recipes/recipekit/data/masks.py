"""Which tokens of packed documents are hidden, and what stands in their place: a pure function of
the tokens and a key.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..spec.task import IGNORE
from .packing import hashes
from .processors import num_embeddings
from .request import Request

# shares of the hidden tokens: by the mask token, by any token; the others stay (Devlin et al.,
# NAACL 2019, section 3.1)
REPLACED, RANDOM = 0.8, 0.1


@dataclass(frozen=True)
class Masks:
    """Hides tokens. Tables are of the vocabulary, (V,) bool."""

    rate: float
    mask: int  # the token that stands for a hidden one
    special: np.ndarray  # never hidden, and never put in the place of one
    # tokens that begin a word, and those behind which one begins; None: each token is drawn by
    # itself
    words: tuple[np.ndarray, np.ndarray] | None

    def __call__(self, ids: np.ndarray, *key: object) -> tuple[np.ndarray, np.ndarray]:
        """Returns (the tokens that the model sees, what it learns: the hidden tokens, IGNORE
        elsewhere), each (n,) int32.

        `ids`, (n,) int32, are documents one behind the other. What is drawn for a token depends on
        `key` and its place alone, so not on the rows, ranks or micro-batches that it comes to lie
        in.
        """
        of_word = (
            np.arange(len(ids), dtype=np.int64) if self.words is None else self._first_of_words(ids)
        )
        hidden = np.flatnonzero(
            (hashes(of_word, "hidden", *key) < _share(self.rate)) & ~self.special[ids]
        )
        seen, labels = ids.copy(), np.full(len(ids), IGNORE, np.int32)
        labels[hidden] = ids[hidden]
        how = hashes(hidden, "how", *key)
        seen[hidden[how < _share(REPLACED)]] = self.mask
        other = hidden[(how >= _share(REPLACED)) & (how < _share(REPLACED + RANDOM))]
        plain = np.flatnonzero(~self.special)
        seen[other] = plain[hashes(other, "other", *key) % np.uint64(len(plain))]
        return seen, labels

    def _first_of_words(self, ids: np.ndarray) -> np.ndarray:
        """Finds the place of the first token of each token's word, (n,) int64."""
        assert self.words is not None
        begins, ends = self.words
        first = begins[ids]
        first[0] = True
        first[1:] |= ends[ids[:-1]]
        return np.maximum.accumulate(np.where(first, np.arange(len(ids)), 0))


def _share(part: float) -> np.uint64:
    """Returns the number below which that part of all 64-bit numbers lies."""
    return np.uint64(int(part * 2**64))


def masks_of(request: Request, tokenizer: Any) -> Masks | None:
    """Makes the masks of a run; None for a task that hides nothing."""
    if not request.masked:
        return None
    special = np.zeros(len(tokenizer), dtype=bool)
    special[
        [
            *tokenizer.all_special_ids,
            *(number for number, token in tokenizer.added_tokens_decoder.items() if token.special),
        ]
    ] = True
    special[num_embeddings(tokenizer) :] = True
    return Masks(
        request.mask_rate,
        tokenizer.mask_token_id,
        special,
        borders_of_words(tokenizer, special) if request.whole_words else None,
    )


def borders_of_words(tokenizer: Any, special: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tells from each token alone whether a word begins with it, and whether one begins behind it,
    (V,) bool each.

    WordPiece marks the tokens that go on with a word (##), the other kinds those that begin one, by
    what stands for a space. A character that is of no word, such as a bracket, is one by itself.
    """
    # None: a number that is no token
    tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
    if any(token.startswith(GOES_ON) and len(token) > len(GOES_ON) for token in tokens):
        return np.array([not token.startswith(GOES_ON) for token in tokens]) | special, special
    of_bytes = any("Ġ" in token for token in tokens)

    def of_word(character: str) -> bool:
        # of a letter of several bytes, or a byte that has no sign of its own
        if of_bytes and character > "\x7f":
            return character not in WHITE
        return character.isalnum() or character == "_"

    begins = np.array([not token or not of_word(token[0]) for token in tokens])
    ends = np.array(
        [not token or (token[-1] not in SPACES and not of_word(token[-1])) for token in tokens]
    )
    return begins | special, ends | special


GOES_ON = "##"  # of WordPiece
SPACES = "Ġ▁"  # what stands for a space: in byte-level BPE, in SentencePiece
WHITE = f"{SPACES}Ċĉč"  # and in the former for the ends of lines and tabs
