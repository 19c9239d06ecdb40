"""Folds of k-fold cross-validation by name: "fold 2 of 5", and "all but fold 2 of 5", the other examples."""

import hashlib
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from input_pipeline.errors import InputError

FOLD = re.compile(r"(all but )?fold (\d{1,9}) of (\d{1,9})")


def rows_of_fold(part: str, names: Sequence[str], labels: np.ndarray | None, what: str) -> Int64[np.ndarray, " rows"]:
    """Return the increasing indices of the examples in a fold, or in all other folds.

    The folds are disjoint and complete, and their sizes differ by at most one, as do their numbers of examples of each
    class. The examples of each class are ordered by a hash of their names, the classes follow each other, and the folds
    take turns. A fold therefore depends on names and labels, and not on the order of the examples.

    Args:
      part: "fold I of K" or "all but fold I of K", with I from 1 to K.
      names: a name of each example.
      labels: the class of each example, N, or a row for each, N C, of which equal rows count as one class. None: all
        examples are of one class.
      what: the subject of error messages.

    Raises:
      InputError: `part` is not of this form, or there are fewer examples than folds.
    """
    match = FOLD.fullmatch(part)
    number, folds = (int(match[2]), int(match[3])) if match else (0, 0)
    if not 1 <= number <= folds or folds < 2:
        raise InputError(
            f'{what}: part={part!r} should be like "fold 2 of 5" or "all but fold 2 of 5", or two fractions'
        )
    if folds > len(names):
        raise InputError(
            f"{what}: part={part!r} of {len(names)} example(s): expected at most as many folds as examples"
        )
    classes = np.zeros(len(names), np.int64) if labels is None else labels
    if classes.ndim > 1:
        classes = np.unique(classes, axis=0, return_inverse=True)[1].reshape(-1)
    hashes = np.array([_hash(name) for name in names], np.uint64)
    fold = np.empty(len(names), np.int64)
    fold[np.lexsort((hashes, classes))] = np.arange(len(names)) % folds
    inside = fold == number - 1
    return np.flatnonzero(~inside if match and match[1] else inside)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest(), "big")
