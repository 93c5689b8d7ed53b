"""The largest of a row, exactly so many, of equal ones the first: beside numpy's sort."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axonn_jax.inference.select import compacted, largest

NUMBERS = st.sampled_from([-np.inf, -3e38, -1.5, -1e-40, 0.0, 1e-40, 0.5, 0.75, 3e38, np.inf])


@pytest.mark.parametrize("n", [1, 7, 40])
def test_the_largest_of_a_row_and_their_places_are_numpys(n):
    size = -(-n // 2)
    found_of = jax.jit(lambda scores, k: (chosen := largest(scores, k), compacted(chosen, size)))
    rows = st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=3, max_size=3)

    @settings(max_examples=60, deadline=None)
    @given(rows=rows, k=st.lists(st.integers(1, n), min_size=3, max_size=3))
    def compare(rows, k):
        scores = np.array(rows, np.float32)
        chosen, (places, counts) = jax.device_get(found_of(scores, np.array(k, np.int32)))
        for row in range(3):
            wanted = np.sort(np.argsort(-scores[row], kind="stable")[: k[row]])
            np.testing.assert_array_equal(np.flatnonzero(chosen[row]), wanted)
            np.testing.assert_array_equal(places[row][counts[row]], wanted[:size])
            assert (places[row] < n).all()

    compare()
