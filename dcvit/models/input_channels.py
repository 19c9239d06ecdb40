"""Embedding of patches for images of another number of channels than a checkpoint's, such as 13 instead of RGB.

Two rules adapt a kernel of K channels to C, where x mod K is the remainder:

  repeat   channel c is channel c mod K, times K / C; a single channel is the sum (`adapt_input_conv` of timm)
  mean     every channel is the mean, times K / C

By "repeat", the embedding of an image whose channels are repeated C / K times is that of the image. By both, the
embedding of an image whose channels are all equal does not depend on their number, if K divides C.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcvit.dcmha.shapes import Float
from dcvit.errors import ConfigError, matches, nearest
from dcvit.parallel.trees import Tensors

RULES = ("repeat", "mean")
KERNEL = "embedding/kernel"


def check_rule(rule: str | None) -> None:
    """Raise ConfigError if `rule` is neither None nor one of RULES."""
    if rule not in (None, *RULES):
        raise ConfigError(f"config.model_load.channels={rule!r}; {nearest(str(rule), RULES)}")


def adapted(kernel: Float[np.ndarray, "rows columns K M"], channels: int, rule: str) -> np.ndarray:
    """Return the kernel for another number of channels, of shape (rows, columns, channels, M); see RULES."""
    old = kernel.shape[2]
    if rule == "mean" or channels == 1:
        return np.repeat(kernel.sum(axis=2, keepdims=True) / channels, channels, axis=2)
    return np.asarray(kernel[:, :, np.arange(channels) % old] * (old / channels))


def differs_in_channels(tensors: Tensors, shape: tuple[int, ...]) -> bool:
    """Return True if the embedding of patches differs from `shape`, of four axes, in channels only."""
    kernel = tensors.get(KERNEL)
    if kernel is None or len(kernel.shape) != len(shape):
        return False
    return [i for i in range(len(shape)) if kernel.shape[i] != shape[i]] == [2]


def with_channels(tensors: Tensors, channels: int, rule: str, dont_load: Sequence[str]) -> Tensors:
    """Return the parameters of a ViT by path, with the embedding of patches for another number of channels.

    Raises:
      ConfigError: the rule is unknown, the number is the same, or `dont_load` names the embedding.
    """
    check_rule(rule)
    kernel = tensors.get(KERNEL)
    if kernel is None or len(kernel.shape) != 4:
        return tensors  # no ViT, which the check of names reports
    if kernel.shape[2] == channels:
        raise ConfigError(f"config.model_load.channels={rule!r} has no effect: both have {channels} channels; omit it")
    if any(matches(pattern, [KERNEL], "dont_load") for pattern in dont_load):
        raise ConfigError(f"config.model_load.channels={rule!r} has no effect: dont_load names {KERNEL}; omit one")
    shape = (*kernel.shape[:2], channels, kernel.shape[3])

    def read() -> np.ndarray:
        return adapted(np.asarray(kernel.read(), np.float32), channels, rule)

    return {**tensors, KERNEL: kernel._replace(shape=shape, read=read)}
