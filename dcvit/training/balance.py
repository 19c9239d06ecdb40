"""Weights of classes in the loss of an image model: those of a config, or counted from the labels of its data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int8, Int32

from dcvit.errors import ConfigError
from input_pipeline import Source

BALANCED = "balanced"
Weights = tuple[float, ...]  # one for each class


def weights(key: str, value: str | Sequence[float], source: Source, classes: int) -> Weights:
    """Return the value of `config.class_weights` or `config.pos_weight`, which `key` names, as numbers.

    "balanced" class weights are n/(C·count_c), scikit-learn's rule, where count_c is the number of labels of class c,
    and n that of all labels. A "balanced" weight of the positive labels of class c is the number of its negative ones
    divided by that of its positive ones.

    Raises:
      ConfigError: there is not one number for each class, the source does not know its labels without reading images,
        or a class has no examples, so that its weight would not be finite.
    """
    if value != BALANCED:
        if len(value) != classes:
            raise ConfigError(f"config.{key} has {len(value)} number(s), but there are {classes} classes")
        return tuple(map(float, value))
    labels = source.labels
    if labels is None:
        raise ConfigError(
            f"config.{key}='balanced': this kind of data has to read its images to know their labels; give {classes} "
            "numbers"
        )
    positives, negatives = counts(labels, classes)
    missing = positives if not positives.all() else negatives
    empty = np.flatnonzero(missing == 0)
    if len(empty) and (missing is positives or key == "pos_weight"):
        names, kind = source.class_names or (), "positive" if missing is positives else "negative"
        name = repr(names[empty[0]]) if empty[0] < len(names) else f"number {empty[0]}"
        raise ConfigError(
            f"config.{key}='balanced': {len(empty)} of {classes} classes, such as {name}, have no {kind} label in the "
            f"training data, so that their weights are unknown; give {classes} numbers"
        )
    found = negatives / positives if key == "pos_weight" else positives.sum() / (classes * positives)
    return tuple(map(float, found))


def counts(
    labels: Int32[np.ndarray, " N"] | Int8[np.ndarray, "N C"], classes: int
) -> tuple[Float64[np.ndarray, " C"], Float64[np.ndarray, " C"]]:
    """Return the numbers of positive and negative labels of each class, of labels as `Source` describes them.

    Raises:
      ConfigError: a label is not one of the classes.
    """
    found = labels.shape[1] if labels.ndim > 1 else int(labels.max(initial=-1)) + 1
    if found > classes:
        raise ConfigError(f"the training data has labels of {found} classes, config.num_classes={classes}")
    if labels.ndim > 1:
        both = [(labels == value).sum(axis=0, dtype=np.float64) for value in (1, 0)]
        return tuple(np.pad(each, (0, classes - found)) for each in both)  # type: ignore[return-value]
    positives = np.bincount(labels[labels >= 0], minlength=classes).astype(np.float64)
    return positives, positives.sum() - positives
