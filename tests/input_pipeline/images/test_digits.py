"""The embedded digits: the same images as scikit-learn's, in a fixed split."""

import numpy as np

import input_pipeline as ip


def test_splits_are_a_partition_of_scikit_learns_digits():
    from sklearn.datasets import load_digits

    train, test = (ip.open_source("digits", split=s) for s in ("train", "test"))
    images = np.concatenate([train.images, test.images])[..., 0]
    expected = np.rint(load_digits().images * 255 / 16).astype(np.uint8)
    assert sorted(x.tobytes() for x in images) == sorted(x.tobytes() for x in expected)
    assert np.bincount(test.labels).min() >= 20
    assert train.class_names == tuple("0123456789")
