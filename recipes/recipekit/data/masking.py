"""Token masking in packed documents, computed only from the tokens and a key."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..spec.task import IGNORE
from .packing import keyed_hashes
from .processors import num_embeddings
from .request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Shares of the masked tokens that are replaced by the mask token and by a random token. The
# remaining masked tokens are not replaced (Devlin et al., NAACL 2019, section 3.1).
MASK_TOKEN_SHARE, RANDOM_TOKEN_SHARE = 0.8, 0.1


@dataclass(frozen=True)
class TokenMasker:
    """A rule that masks tokens; tables over the vocabulary are (V,) bool."""

    rate: float
    mask: int  # the mask token
    special: np.ndarray  # tokens that are never masked and never used as replacements
    # tables of the tokens that begin a word, and of the tokens after which a word begins; None if
    # each token is masked independently
    boundaries: tuple[np.ndarray, np.ndarray] | None

    def __call__(self, ids: np.ndarray, *key: object) -> tuple[np.ndarray, np.ndarray]:
        """Return (input tokens with masking, masked tokens or IGNORE elsewhere), each (n,) int32.

        `ids`, (n,) int32, contains consecutive documents. Whether and how a token is masked depends
        only on `key` and the token's index. So the masking does not depend on the rows, ranks or
        micro-batches to which the token is later assigned.
        """
        of_word = (
            np.arange(len(ids), dtype=np.int64)
            if self.boundaries is None
            else self._word_starts(ids)
        )
        hidden = np.flatnonzero(
            (keyed_hashes(of_word, "hidden", *key) < _hash_threshold(self.rate))
            & ~self.special[ids]
        )
        seen, labels = ids.copy(), np.full(len(ids), IGNORE, np.int32)
        labels[hidden] = ids[hidden]
        how = keyed_hashes(hidden, "how", *key)
        seen[hidden[how < _hash_threshold(MASK_TOKEN_SHARE)]] = self.mask
        other = hidden[
            (how >= _hash_threshold(MASK_TOKEN_SHARE))
            & (how < _hash_threshold(MASK_TOKEN_SHARE + RANDOM_TOKEN_SHARE))
        ]
        plain = np.flatnonzero(~self.special)
        seen[other] = plain[keyed_hashes(other, "other", *key) % np.uint64(len(plain))]
        return seen, labels

    def _word_starts(self, ids: np.ndarray) -> np.ndarray:
        """Return, for each token, the index of the first token of its word, (n,) int64."""
        assert self.boundaries is not None
        begins, ends = self.boundaries
        first = begins[ids]
        first[0] = True
        first[1:] |= ends[ids[:-1]]
        return np.maximum.accumulate(np.where(first, np.arange(len(ids)), 0))


def _hash_threshold(share: float) -> np.uint64:
    """Return the 64-bit threshold below which a share `share` of all 64-bit numbers falls."""
    return np.uint64(int(share * 2**64))


def make_token_masker(request: Request, tokenizer: Any) -> TokenMasker | None:
    """Return a run's token masker, or None for a task without masked tokens."""
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
    return TokenMasker(
        request.mask_rate,
        tokenizer.mask_token_id,
        special,
        word_boundaries(tokenizer, special) if request.whole_words else None,
    )


def word_boundaries(
    tokenizer: "PreTrainedTokenizerBase", special: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return masks of (tokens that begin a word, tokens that end a word), each (V,) bool.

    A token ends a word if a word begins after this token. WordPiece marks the tokens that
    continue a word (##). All other tokenizers mark the tokens that begin a word with a space
    marker. A character that is not part of a word, such as a bracket, counts as a separate word.
    """
    # None: a number without a token
    tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
    if any(
        token.startswith(CONTINUATION_PREFIX) and len(token) > len(CONTINUATION_PREFIX)
        for token in tokens
    ):
        return np.array(
            [not token.startswith(CONTINUATION_PREFIX) for token in tokens]
        ) | special, special
    of_bytes = any("Ġ" in token for token in tokens)

    def of_word(character: str) -> bool:
        # a byte of a multi-byte letter, or a byte without a printable character
        if of_bytes and character > "\x7f":
            return character not in WHITESPACE_MARKERS
        return character.isalnum() or character == "_"

    begins = np.array([not token or not of_word(token[0]) for token in tokens])
    ends = np.array(
        [
            not token or (token[-1] not in SPACE_MARKERS and not of_word(token[-1]))
            for token in tokens
        ]
    )
    return begins | special, ends | special


CONTINUATION_PREFIX = "##"  # in WordPiece
SPACE_MARKERS = "Ġ▁"  # space markers of byte-level BPE and SentencePiece
WHITESPACE_MARKERS = f"{SPACE_MARKERS}Ċĉč"  # with byte-level BPE's markers for line ends and tabs
