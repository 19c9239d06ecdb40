"""Ops that change one value of an example, and those on its labels and its keys."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from input_pipeline.errors import InputError, ReadingError

# An example maps names to arrays, scalars and encoded bytes. Any, because each kind of data has its own value types.
Example = dict[str, Any]
Op = Callable[[Example, np.random.Generator], Example]


@dataclasses.dataclass(frozen=True)
class Change:
    """An op that applies `function(value, rng)` to the value of `inkey`, stores it as `outkey`, and keeps other keys.

    A preprocessing string gives the keys as additional arguments: `resize(8, inkey="image", outkey="small")`, or
    `key="mask"` for both.
    """

    function: Callable[..., np.ndarray]
    inkey: str = "image"
    outkey: str = "image"
    name: str = "op"  # in messages
    encoded: bool = False  # the value is the bytes of an image file instead of pixels
    keeps_size: bool = False  # the result has the height and width of the value

    def __call__(self, example: Example, rng: np.random.Generator) -> Example:
        """Apply the op. Raises ReadingError if the value is not an image: the preprocessing string is wrong."""
        value = example[self.inkey]
        is_pixels = isinstance(value, np.ndarray) and value.ndim == 3 and value.dtype.kind in "uifb"
        if not (isinstance(value, bytes) if self.encoded else is_pixels):
            expected = "the bytes of an image file" if self.encoded else "pixels of shape (height, width, channels)"
            shape = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
            raise ReadingError(f"{self.name}: {self.inkey!r} should be {expected}, found {shape}")
        return {**example, self.outkey: self.function(value, rng)}


def onehot(
    depth: int,
    key: str = "label",
    key_result: str | None = "labels",
    multi: bool = True,
    on: float = 1.0,
    off: float = 0.0,
    ignore: int | None = None,
) -> Op:
    """Convert one or several integer labels to a float32 vector with `on` at each label and `off` elsewhere.

    A label out of range is an error, as in TensorFlow on a CPU if several labels are merged. For single labels,
    `tf.one_hot`, and therefore big_vision, yields `off` everywhere: a model would silently train on targets without a
    class.

    Args:
      depth: length of the vector, the number of classes.
      key: key of the label or labels.
      key_result: key of the result; None: `key`.
      multi: merge several labels into one vector; otherwise labels of any shape get one vector each.
      on: value at a label.
      off: value elsewhere.
      ignore: a single label of this value is unknown: its vector is -1 everywhere, so that the example counts neither
        in the loss nor in metrics. None: such a label is out of range like others.
    """
    if depth < 1:
        raise InputError(f"onehot({depth}): expected 1 class or more")

    def op(example: Example, rng: np.random.Generator) -> Example:
        labels = np.asarray(example[key])
        shown = f"{labels.dtype} of shape {labels.shape}"
        merged = multi or not labels.ndim
        if labels.size and ((merged and labels.ndim > 1) or labels.dtype.kind not in "iu"):
            raise InputError(f"onehot({depth}): {key!r} should be an integer or several, found {shown}")
        if ignore is not None and not labels.ndim and labels == ignore:
            return {**example, key_result or key: np.full(depth, -1, np.float32)}
        if labels.size and (labels.min() < 0 or labels.max() >= depth):
            hint = "; ignore=-1 ignores examples without a label" * (not labels.ndim and bool(labels == -1))
            raise InputError(f"onehot({depth}): {key}={str(example[key])[:40]} is out of range{hint}")
        hot = np.full((depth,) if merged else (*labels.shape, depth), off, np.float32)
        positions = labels.astype(np.int64)
        if merged:
            hot[positions] = on
        else:
            np.put_along_axis(hot, positions[..., None], on, axis=-1)
        return {**example, key_result or key: hot}

    return op


def keep(*keys: str) -> Op:
    """Drop all keys except the given ones.

    Args:
      *keys: the keys to keep.
    """

    def op(example: Example, rng: np.random.Generator) -> Example:
        return {key: example[key] for key in keys}

    return op


def drop(*keys: str) -> Op:
    """Drop the given keys; a key that the example does not have is ignored.

    Args:
      *keys: the keys to drop.
    """

    def op(example: Example, rng: np.random.Generator) -> Example:
        return {key: value for key, value in example.items() if key not in keys}

    return op


def copy(inkey: str, outkey: str) -> Op:
    """Store a value under another key, too.

    Args:
      inkey: key of the value.
      outkey: the other key; its value is replaced if there is one.
    """

    def op(example: Example, rng: np.random.Generator) -> Example:
        return {**example, outkey: example[inkey]}

    return op
