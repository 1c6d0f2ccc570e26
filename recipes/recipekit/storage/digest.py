"""Computes a fingerprint of a tensor that does not depend on how the tensor is laid out over files
and ranks.

The digest is the sum, mod 2^64, of bits(i) * m(i) over the row-major index i, where bits(i) is the
element as an unsigned integer and m(i) a pseudo-random odd number. So the digest can be added up
from parts in any order, zero elements add nothing, and, m being odd, every single changed bit
changes the digest.
"""

from typing import Any

import numpy as np

BLOCK = 65536
_ALL = 2**64 - 1


def _mix(seed: Any) -> Any:
    """Computes the output function of SplitMix64, made odd, of an int or an array of ints.

    (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)
    """
    word = ((seed + 1) * 0x9E3779B97F4A7C15) & _ALL
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _ALL
    return (word ^ (word >> 31)) | 1


INSIDE: np.ndarray = _mix(np.arange(BLOCK, dtype=np.uint64))


def digest(bits: np.ndarray, start: int = 0) -> int:
    """Computes what the elements `bits` (1-D, unsigned integers) from index `start` on add to their
    tensor's digest.
    """
    total, wide, done = 0, np.empty(min(BLOCK, len(bits)), dtype=np.uint64), 0
    while done < len(bits):
        block, inside = divmod(start + done, BLOCK)
        count = min(BLOCK - inside, len(bits) - done)
        np.copyto(wide[:count], bits[done : done + count])
        total += int(np.dot(wide[:count], INSIDE[inside : inside + count])) * _mix(block + BLOCK)
        done += count
    return total & _ALL


def add(left: int, right: int) -> int:
    return (left + right) & _ALL
