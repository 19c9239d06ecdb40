"""Equality of the batches of two streams."""

import itertools

import numpy as np


def assert_same_batches(one, other, steps=None):
    """Check that two streams have the same batches with the same dtypes, in all or in the first `steps` steps."""
    pairs = list(itertools.islice(zip(one, other, strict=steps is None), steps))
    assert pairs
    for a, b in pairs:
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])
            assert a[key].dtype == b[key].dtype
