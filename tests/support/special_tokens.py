"""Special tokens of the byte tokenizer and their ids."""

from recipekit.data.processors import byte_tokenizer

END, BEGIN, PAD, TURN = "<|endoftext|>", "<|begin|>", "<|pad|>", "<|im_end|>"


def number(token: str) -> int:
    found = byte_tokenizer().convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found
