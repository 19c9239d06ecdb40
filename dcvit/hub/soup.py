"""Model soups: averages of the parameters of models that were fine-tuned from the same one.

Wortsman et al., 2022, arXiv 2203.05482.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.parallel.trees import Tensor, check_tree, flattened
from dcvit.weights.families import Weights
from dcvit.weights.family import defaults
from dcvit.weights.tensors import tokenizer_of


def average(models: Sequence[Weights]) -> Weights:
    """Return the model whose parameters are the means of those of `models`, otherwise described as the first one.

    A mean is computed in float64 when it is read, from one parameter of one model at a time, and is float32.

    Raises:
      CheckpointError: the models differ in more than the values of their parameters.
    """
    first, *others = models
    for other in others:
        _check_same(first, other)
    params = {
        name: Tensor(tensor.shape, functools.partial(_mean, name, models)) for name, tensor in first.params.items()
    }
    paths = tuple(model.path for model in models)
    return first._replace(family="dcvit", params=params, averaged=paths)


def _mean(name: str, models: Sequence[Weights]) -> np.ndarray:
    """Return the mean of a parameter. Raise CheckpointError, which names the model, if one has numbers not finite."""
    total = np.zeros(models[0].params[name].shape)
    for model in models:
        value = model.params[name].read().astype(np.float64)
        if not np.isfinite(value).all():
            raise CheckpointError(f"{model.path}: {name} has numbers that are not finite")
        total += value
    return (total / len(models)).astype(np.float32)


def _check_same(first: Weights, other: Weights) -> None:
    """Raise CheckpointError, with the differences, if two models differ in more than the values of parameters."""
    what = f"{other.path} cannot be averaged with {first.path}: it"
    ours, theirs = (flattened(_properties(weights)) for weights in (first, other))
    for key in dict.fromkeys([*ours, *theirs]):
        if ours.get(key) != theirs.get(key):
            raise CheckpointError(f"{what} has {key}={theirs.get(key)!r:.80}, not {ours.get(key)!r:.80}")
    found, expected = ({name: x.shape for name, x in weights.params.items()} for weights in (other, first))
    check_tree(found, expected, what)


def _properties(weights: Weights) -> dict[str, object]:
    """Return the fields of a model, and the other properties on which the meaning of its parameters depends."""
    about, file = weights.description, tokenizer_of(weights.workdir or weights.path)
    fields = {**defaults(about.model_name), **about.fields}
    return {
        **about._asdict(), "tokenizer": file and hashlib.sha256(file.read_bytes()).hexdigest(),
        "fields": {name: list(x) if isinstance(x, tuple) else x for name, x in fields.items()},
    }  # fmt: skip
