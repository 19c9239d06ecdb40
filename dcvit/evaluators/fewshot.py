"""Few-shot transfer: how well a linear classifier does that was fitted to a few examples of each class.

The protocol is big_vision's (`evaluators/fewshot_lsr.py`; Dosovitskiy et al., 2021, Section 4.1): features are frozen,
the classifier is ridge regression onto labels in {-1, 1}, and the accuracy is the mean over a few draws of the shots.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import input_pipeline
from dcvit.dcmha.shapes import Array, Float
from dcvit.errors import ConfigError, nearest
from dcvit.evaluators import IMAGE_COLUMNS, Timed, about_images, batches
from dcvit.models import pixels

BIAS = 100.0  # the value of the constant feature, so large that the intercept is hardly regularised
STD_EPSILON = 1e-5  # added to a feature's standard deviation


class Evaluator:
    """Fits to `shots` examples of each class of one source and counts what it gets right in the other.

    For each seed, the shots of class c are the first of `default_rng(seed).permutation(np.where(labels == c)[0])`,
    the classes drawn in order from one generator: fewer shots are a part of more, and the same whatever the model.
    A class that has fewer examples gives what it has.
    """

    target = ("label", 0)  # what the preprocessing yields beside the image, and its rank
    columns = IMAGE_COLUMNS
    example: jax.ShapeDtypeStruct  # set by `dcvit.training.setup`, which looks at the data

    def __init__(
        self,
        predict: Callable[..., Any],
        mesh: Mesh,
        *,
        data: dict,
        test_data: dict,
        pp: str,
        shots: Sequence[int] = (1, 5, 10, 25),
        l2_reg: float = 2.0**10,
        num_seeds: int = 3,
        representation: str = "pre_logits",
        batch_size: int = 256,
        corrupt: str = "fail",
        corrupt_max: int = 100,
    ):
        """
        Args:
          predict: (params, images) -> logits, and a dict of named intermediates.
          mesh: the devices that share a batch.
          data: arguments of `input_pipeline.open_source`, for the examples that are fitted to.
          test_data: the same, for those that are counted.
          pp: a preprocessing string that yields `image` and an integer `label`.
          shots: examples of each class.
          l2_reg: λ of the ridge regression.
          num_seeds: draws of the shots, with seeds 0, 1, …
          representation: the intermediate that serves as features, "a/b" for b inside a; what has more axes than
            B D is flattened.
          batch_size: rounded up to a multiple of the device count.
          corrupt, corrupt_max: what becomes of examples that cannot be read; see `input_pipeline.CorruptPolicy`.

        Raises:
          ConfigError: a number that is too small.
        """
        if not shots or min(shots) < 1 or num_seeds < 1 or not 0 < l2_reg < math.inf:
            raise ConfigError(f"few-shot: {shots=}, {num_seeds=}, {l2_reg=} should all be above 0")
        self.source = input_pipeline.open_source(**data)
        self.test_source = input_pipeline.open_source(**test_data)
        names = self.source.class_names, self.test_source.class_names
        if names[0] != names[1] and all(names):
            raise ConfigError("few-shot: data and test_data have other classes, or number them differently")
        self.pp, self.batch_size, self.mesh = pp, batch_size, mesh
        self.shots, self.l2_reg, self.num_seeds = tuple(dict.fromkeys(shots)), float(l2_reg), num_seeds
        self.corrupt = input_pipeline.CorruptPolicy(corrupt, corrupt_max)
        self.images_per_second = 0.0  # of the last run, compilation left out

        self.host_pp, to_numbers = pixels.split(pp)

        def represent(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
            images = to_numbers(batch["image"])
            features = intermediate(predict(params, images)[1], representation)
            return features.reshape(len(images), -1).astype(jnp.float32)

        self.represent = Timed(represent, mesh, batch_size, keep=("label",))

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of what `run` returns."""
        return (*(f"{k}shot" for k in self.shots), "n")

    def run(self, params: Any) -> dict[str, float]:
        """`1shot`, `5shot`, … (fractions of `n`, means over the seeds) and `n`, the number of test examples.

        Raises:
          ConfigError: the model has no such intermediate.
        """
        self.represent.restart()
        x, labels = self._features(self.source, params)
        x_test, labels_test = self._features(self.test_source, params)
        self.images_per_second = self.represent.examples / self.represent.seconds
        classes = len(self.source.class_names or ()) or int(labels.max()) + 1
        hits = dict.fromkeys(self.shots, 0)
        for seed in range(self.num_seeds):
            rng = np.random.default_rng(seed)
            drawn = [rng.permutation(np.where(labels == c)[0]) for c in range(classes)]
            for shots in hits:
                chosen = np.concatenate([indices[:shots] for indices in drawn])
                targets = np.where(labels[chosen, None] == np.arange(classes), np.float32(1), np.float32(-1))
                scores = linear_scores(*map(jnp.asarray, (x[chosen], targets, x_test)), self.l2_reg)
                hits[shots] += int((np.asarray(scores).argmax(axis=-1) == labels_test).sum())
        n = len(labels_test)
        return {f"{k}shot": count / (self.num_seeds * n) for k, count in hits.items()} | {"n": n}

    def rows(self, name: str, numbers: dict[str, float], net: Any) -> list[dict[str, Any]]:
        """A row for each number of shots, "name/5shot", with its accuracy as `top1`."""
        speed = {"images_per_second": round(self.images_per_second, 1)}
        about = {**about_images(net, self.example), "n": numbers["n"], **speed}
        return [{"evaluation": f"{name}/{k}shot", **about, "top1": numbers[f"{k}shot"]} for k in self.shots]

    def _features(self, source: input_pipeline.Source, params: Any) -> tuple[np.ndarray, np.ndarray]:
        """Features N D and labels N of all examples of a source."""
        features, labels = [], []
        for batch in batches(source, self.host_pp, self.batch_size, self.mesh, self.corrupt):
            found, kept = self.represent(params, batch)
            real = kept["_mask"] > 0
            features.append(found[real])
            labels.append(kept["label"][real])
        return np.concatenate(features), np.concatenate(labels)


def intermediate(out: dict[str, Any], name: str) -> Array:
    """The array that a model's dict of intermediates holds under `name`, "a/b" for b inside a.

    Raises:
      ConfigError: there is none; the message names the nearest.
    """
    known = {
        "/".join(str(part.key) for part in path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(out)[0]
    }
    if name not in known:
        raise ConfigError(f"few-shot: the model has no representation {name!r}; {nearest(name, known)}")
    return known[name]


@jax.jit
def linear_scores(
    x: Float[Array, "N D"], y: Float[Array, "N C"], x_test: Float[Array, "K D"], l2_reg: Float[Array, ""] | float
) -> Float[Array, "K C"]:
    """Scores of `x_test` by the ridge regression of `y` on `x`, both whitened by the mean and deviation of `x`.

    With z = (x - mean)/(std + 1e-5) and a constant feature b = 100 beside it, [z b]^T [z b] is block diagonal, since
    the columns of z sum to 0. So weights and intercept are found apart, and b² N, the largest eigenvalue by far,
    takes no digits from the rest:

      W = (z^T z + λ)^-1 z^T y = z^T (z z^T + λ)^-1 y,   intercept = b² Σ_n y_n / (b² N + λ).

    The smaller of the two matrices, D×D or N×N, is solved by Cholesky decomposition; its eigenvalues lie between λ
    and λ + N·D. Everything is float32, on every backend: some multiply matrices in less by default.
    """
    with jax.default_matmul_precision("highest"):
        number, width = x.shape
        mean = jnp.mean(x, axis=0, keepdims=True)
        rest = jnp.mean(x - mean, axis=0, keepdims=True)  # what rounding left of the mean
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
