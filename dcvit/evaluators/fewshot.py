"""Few-shot transfer: accuracy of a linear classifier that is fitted to a few examples of each class.

The protocol is big_vision's (`evaluators/fewshot_lsr.py`; Dosovitskiy et al., 2021, Section 4.1): features are frozen,
the classifier is a ridge regression onto labels in {-1, 1}, and the accuracy is the mean over several random draws of
the fitted examples (the shots).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import input_pipeline
from dcvit.dcmha.shapes import Array, Float
from dcvit.errors import ConfigError
from dcvit.evaluators import IMAGE_COLUMNS, DeviceBatch, EvaluationData, Predict, Row, TimedFunction, batches, image_row
from dcvit.models import Params, pixels
from dcvit.models.packed_images import PackedImages, model_inputs
from dcvit.models.trees import intermediate

BIAS = 100.0  # the value of the constant feature, large enough that the intercept is hardly regularised
STD_EPSILON = 1e-5  # added to a feature's standard deviation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the evaluator in a config.

    Fields:
      data: arguments of `input_pipeline.open_source`, for the examples to fit.
      test_data: the same, for the examples on which accuracy is measured.
      pp: a preprocessing string that yields `image` and an integer `label`.
      shots: numbers of fitted examples of each class.
      l2_reg: λ of the ridge regression.
      num_seeds: number of draws of the shots, with seeds 0, 1, …
      representation: the intermediate that serves as features, "a/b" for b inside a. Axes after the first are
        flattened. Of images of different sizes (the op `patches`), it has to be one vector for each image.
      batch_size: rounded up to a multiple of the device count.

    Raises:
      ConfigError: a number is too small.
    """

    data: dict[str, Any]
    test_data: dict[str, Any]
    pp: str
    shots: Sequence[int] = (1, 5, 10, 25)
    l2_reg: float = 2.0**10
    num_seeds: int = 3
    representation: str = "pre_logits"
    batch_size: int = 256

    def __post_init__(self) -> None:
        shots, num_seeds, l2_reg = self.shots, self.num_seeds, self.l2_reg
        if not shots or min(shots) < 1 or num_seeds < 1 or not 0 < l2_reg < math.inf:
            raise ConfigError(f"few-shot: {shots=}, {num_seeds=}, {l2_reg=} should all be above 0")


class Evaluator:
    """Fit a linear classifier to a few examples of each class of one source, and measure its accuracy on another.

    For each seed, the shots of class c are the first of `default_rng(seed).permutation(np.where(labels == c)[0])`,
    where one generator draws all classes in order. Fewer shots are therefore a subset of more shots, and every model
    gets the same shots. A class with fewer examples contributes all of them.
    """

    model_name = "vit"
    target = ("label", 0)  # key of the preprocessed label, and its rank
    columns = IMAGE_COLUMNS
    lower_is_better = ()

    def __init__(self, predict: Predict, data: EvaluationData, options: Options):
        """Open the test data; the arguments are those of `dcvit.evaluators.Evaluator`.

        Raises:
          ConfigError: the class names of the two sources differ.
        """
        self.data, self.options = data, options
        self.test_data = dataclasses.replace(data, source=input_pipeline.open_source(**options.test_data))
        names = data.source.class_names, self.test_data.source.class_names
        if names[0] != names[1] and all(names):
            raise ConfigError("few-shot: data and test_data have different classes or number them differently")
        self.shots = tuple(dict.fromkeys(options.shots))
        self.host_pp, to_numbers = pixels.split(options.pp)

        def represent(params: Params, batch: DeviceBatch) -> jax.Array:
            images = model_inputs(batch, to_numbers)
            features = intermediate(predict(params, images)[1], options.representation, "few-shot representation")
            if isinstance(images, PackedImages) and features.ndim > 2:
                raise ConfigError(
                    f"few-shot representation {options.representation!r} is of each token, with padding of the op "
                    "patches: choose one of each image, head_input, pre_logits or logits"
                )
            return features.reshape(len(batch["image"]), -1).astype(jnp.float32)

        self.represent = TimedFunction(represent, data.mesh, options.batch_size, keep=("label",))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that `run` returns."""
        return (*(f"{k}shot" for k in self.shots), "n")

    def run(self, params: Params) -> dict[str, float]:
        """Return `1shot`, `5shot`, … (fractions of `n`, means over the seeds) and `n`, the number of test examples.

        The fractions are NaN if a feature is not finite.

        Raises:
          ConfigError: the model has no intermediate called `representation`, or it is of tokens and padding.
        """
        self.represent.reset_timer()
        x, labels = self._features(self.data, params)
        x_test, labels_test = self._features(self.test_data, params)
        if not (np.isfinite(x).all() and np.isfinite(x_test).all()):
            return dict.fromkeys((f"{k}shot" for k in self.shots), math.nan) | {"n": len(labels_test)}
        classes = len(self.data.source.class_names or ()) or int(labels.max()) + 1
        hits = dict.fromkeys(self.shots, 0)
        for seed in range(self.options.num_seeds):
            rng = np.random.default_rng(seed)
            drawn = [rng.permutation(np.where(labels == c)[0]) for c in range(classes)]
            for shots in hits:
                chosen = np.concatenate([indices[:shots] for indices in drawn])
                targets = np.where(labels[chosen, None] == np.arange(classes), np.float32(1), np.float32(-1))
                scores = linear_scores(*map(jnp.asarray, (x[chosen], targets, x_test)), float(self.options.l2_reg))
                hits[shots] += int((np.asarray(scores).argmax(axis=-1) == labels_test).sum())
        n = len(labels_test)
        return {f"{k}shot": count / (self.options.num_seeds * n) for k, count in hits.items()} | {"n": n}

    def rows(self, name: str, metrics: Mapping[str, float], net: nn.Module) -> list[Row]:
        """Return one row of results for each number of shots, called "NAME/5shot", with the accuracy as `top1`."""
        return [
            image_row(f"{name}/{k}shot", net, self.data.example, self.represent)
            | {"top1": metrics[f"{k}shot"], "n": metrics["n"]}
            for k in self.shots
        ]

    def _features(self, data: EvaluationData, params: Params) -> tuple[np.ndarray, np.ndarray]:
        """Return the features N D and labels N of all examples of a source."""
        features, labels = [], []
        for batch in batches(data, self.host_pp, self.options.batch_size):
            found, kept = self.represent(params, batch)
            real = (kept["_mask"] > 0) & (kept["label"] >= 0)  # the others are padding, or have no known label
            features.append(found[real])
            labels.append(kept["label"][real])
        if not sum(map(len, labels)):
            raise ConfigError("few-shot evaluation: no image of the data has a known label")
        return np.concatenate(features), np.concatenate(labels)


@jax.jit
def linear_scores(
    x: Float[Array, "N D"], y: Float[Array, "N C"], x_test: Float[Array, "K D"], l2_reg: Float[Array, ""] | float
) -> Float[Array, "K C"]:
    """Return the class scores of `x_test` by a ridge regression of `y` on `x`; inputs are standardized as `x` is.

    With z = (x - mean)/(std + 1e-5) and an additional constant feature b = 100, the matrix [z b]^T [z b] is block
    diagonal, because the columns of z sum to 0. Weights and intercept are therefore solved separately, so that b² N,
    by far the largest eigenvalue, does not reduce the precision of the weights:

      W = (z^T z + λ)^-1 z^T y = z^T (z z^T + λ)^-1 y,   intercept = b² Σ_n y_n / (b² N + λ).

    The smaller of the two matrices, D×D or N×N, is solved by Cholesky decomposition; its eigenvalues lie between λ
    and λ + N·D. Everything is float32 on every backend; some backends multiply matrices in lower precision by default.
    """
    with jax.default_matmul_precision("highest"):
        number, width = x.shape
        mean = jnp.mean(x, axis=0, keepdims=True)
        rest = jnp.mean(x - mean, axis=0, keepdims=True)  # the mean that is left after rounding
        z, z_test = x - mean - rest, x_test - mean - rest
        std = jnp.sqrt(jnp.mean(jnp.square(z), axis=0, keepdims=True)) + STD_EPSILON
        z, z_test = z / std, z_test / std
        solve = functools.partial(jax.scipy.linalg.solve, assume_a="pos")
        if number >= width:
            weights = solve(z.T @ z + l2_reg * jnp.eye(width), z.T @ y)
        else:
            weights = z.T @ solve(z @ z.T + l2_reg * jnp.eye(number), y)
        intercept = BIAS**2 * jnp.sum(y, axis=0, keepdims=True) / (BIAS**2 * number + l2_reg)
        return z_test @ weights + intercept
