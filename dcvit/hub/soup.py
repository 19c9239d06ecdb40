"""Model soups: averages of the parameters of models that were fine-tuned from the same one.

Wortsman et al., 2022, arXiv 2203.05482.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Callable, Sequence

import numpy as np

from dcvit.errors import NOT_FINITE, CheckpointError, ConfigError, nearest
from dcvit.hub.model import open_trained
from dcvit.models.trees import param_shapes
from dcvit.parallel.sharding import with_shardings
from dcvit.parallel.trees import Tensor, check_tree, flattened
from dcvit.weights.families import Weights
from dcvit.weights.family import defaults
from dcvit.weights.placement import place_params
from dcvit.weights.tensors import tokenizer_of

LOG = logging.getLogger(__name__)
BEST = {"max": 1.0, "min": -1.0}  # signs, after which larger is better


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
        name: Tensor(tensor.shape, functools.partial(_mean, [model.params[name] for model in models]))
        for name, tensor in first.params.items()
    }
    paths = tuple(model.path for model in models)
    return first._replace(family="dcvit", params=params, averaged=paths)


def _mean(tensors: Sequence[Tensor]) -> np.ndarray:
    total = np.zeros(tensors[0].shape)
    for tensor in tensors:
        total += tensor.read().astype(np.float64)
    return (total / len(tensors)).astype(np.float32)


def greedy(models: Sequence[Weights], metric: str, best: str) -> Weights:
    """Return the greedy soup: the average of the best model and those others that do not make the average worse.

    The others are tried from the best to the worst. Each decision is logged.

    Args:
      models: the models; the first is that of a run, whose config has the evaluator.
      metric: "NAME/METRIC" of an evaluator on data that did not train the models.
      best: "max" if larger values are better, or "min".

    Raises:
      ConfigError: the first model is not a run, or its evaluators do not yield the metric.
      CheckpointError: the models differ in more than the values of their parameters, or a metric is not finite.
    """
    score, sign = _scorer(models[0], metric), BEST[best]
    for other in models[1:]:
        _check_same(models[0], other)
    values = [score(model) for model in models]
    order = sorted(range(len(models)), key=lambda i: -sign * values[i])  # of equal ones, the first comes first
    soup, value = [models[order[0]]], values[order[0]]
    LOG.info("%s: %s %.6g, the best", soup[0].path, metric, value)
    for i in order[1:]:
        found = score(average([*soup, models[i]]))
        added = sign * found >= sign * value
        decision = f"added, {metric}" if added else f"left out, with it {metric}"
        LOG.info("%s: %s %.6g, %s %.6g -> %.6g", models[i].path, metric, values[i], decision, value, found)
        if added:
            soup, value = [*soup, models[i]], found
    LOG.info("soup of %d of %d models: %s %.6g", len(soup), len(models), metric, value)
    return average(soup)


def _scorer(first: Weights, metric: str) -> Callable[[Weights], float]:
    """Return the function from weights to their metric "NAME/METRIC", by the evaluator of the run `first`."""
    if not first.workdir:
        raise ConfigError(f"{first.path} is not a run, whose config has evaluators for {metric}: give a run first")
    trained = open_trained(first.workdir)
    mesh, strategy, evaluators = trained.evaluators(stored_thresholds=False)
    known = [f"{name}/{found}" for name, evaluator in evaluators.items() for found in evaluator.metrics]
    if metric not in known:
        raise ConfigError(f"no evaluation of {first.workdir} yields {metric!r}; {nearest(metric, known)}")
    name = next(name for name in evaluators if metric.startswith(f"{name}/"))
    evaluator = evaluators[name]
    like = with_shardings(param_shapes(trained.model, evaluator.example), mesh, strategy)

    def score(weights: Weights) -> float:
        metrics = evaluator.run(place_params(weights.params, like, str(weights.path)))
        if (key := metric.removeprefix(f"{name}/")) not in metrics:
            raise ConfigError(f"the data of {name} yields no {key}; it yields {', '.join(metrics)}")
        if not math.isfinite(metrics[key]):
            raise CheckpointError(f"{weights.path}: {metric} is {NOT_FINITE}")
        return float(metrics[key])

    return score


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
