"""A digest of a tensor that does not depend on how the tensor is split into files and ranks.

The digest is the sum, mod 2^64, of bits(i) * m(i) over the row-major index i. bits(i) is the
element as an unsigned integer, and m(i) is a pseudo-random odd number. So the digest can be summed
from parts in any order, and zero elements contribute nothing. Because m is odd, every single
changed bit changes the digest.
"""

from typing import Any

import numpy as np

DIGEST_BLOCK_ELEMENTS = 65536
_ALL = 2**64 - 1


def _splitmix64(seed: Any) -> Any:
    """Return the output of SplitMix64 for an int or an array of ints, made odd.

    See Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014.
    """
    word = ((seed + 1) * 0x9E3779B97F4A7C15) & _ALL
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _ALL
    return (word ^ (word >> 31)) | 1


BLOCK_MULTIPLIERS: np.ndarray = _splitmix64(np.arange(DIGEST_BLOCK_ELEMENTS, dtype=np.uint64))


def digest(bits: np.ndarray, start: int = 0) -> int:
    """Return the contribution of some elements to their tensor's digest.

    `bits` contains the elements from index `start` on (1-D, unsigned integers).
    """
    total, wide, done = 0, np.empty(min(DIGEST_BLOCK_ELEMENTS, len(bits)), dtype=np.uint64), 0
    while done < len(bits):
        block, inside = divmod(start + done, DIGEST_BLOCK_ELEMENTS)
        count = min(DIGEST_BLOCK_ELEMENTS - inside, len(bits) - done)
        np.copyto(wide[:count], bits[done : done + count])
        total += int(
            np.dot(wide[:count], BLOCK_MULTIPLIERS[inside : inside + count])
        ) * _splitmix64(block + DIGEST_BLOCK_ELEMENTS)
        done += count
    return total & _ALL


def add_digests(left: int, right: int) -> int:
    return (left + right) & _ALL
