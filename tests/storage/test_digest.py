"""A tensor's digest is the sum of its parts' digests for any split, and any change alters the
digest.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recipekit.storage.digest import DIGEST_BLOCK_ELEMENTS, add_digests, digest

NUMEL = 3 * DIGEST_BLOCK_ELEMENTS + 17
BITS = np.random.default_rng(0).integers(1, 2**16, NUMEL, dtype=np.uint16)
WHOLE = digest(BITS)


@given(st.lists(st.integers(0, NUMEL), max_size=5))
def test_parts_add_up_wherever_they_begin(cuts):
    bounds = [0, *sorted(cuts), NUMEL]
    total = 0
    for start, stop in reversed(list(itertools.pairwise(bounds))):
        total = add_digests(total, digest(BITS[start:stop], start))
    assert total == WHOLE and 0 <= WHOLE < 2**64


@given(st.integers(0, NUMEL - 1), st.integers(0, 15))
def test_a_changed_bit_changes_it(place, bit):
    changed = BITS.copy()
    changed[place] ^= np.uint16(1 << bit)
    assert digest(changed) != WHOLE


@pytest.mark.parametrize("distance", [1, DIGEST_BLOCK_ELEMENTS, 2 * DIGEST_BLOCK_ELEMENTS])
def test_elements_that_change_places_change_it(distance):
    for place in (0, 5, DIGEST_BLOCK_ELEMENTS - 1):
        changed = BITS.copy()
        changed[[place, place + distance]] = changed[[place + distance, place]]
        assert BITS[place] != BITS[place + distance] and digest(changed) != WHOLE


def test_zeros_add_nothing_and_the_value_is_that_of_every_version():
    assert digest(np.zeros(DIGEST_BLOCK_ELEMENTS + 3, dtype=np.uint8), 7) == 0
    assert digest(np.arange(1, 6, dtype=np.uint32), DIGEST_BLOCK_ELEMENTS - 2) == 0x8EFCEB218A768C73
