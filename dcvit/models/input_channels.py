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
from dcvit.errors import CheckpointError, ConfigError, matches, nearest
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


def with_channels(tensors: Tensors, shape: tuple[int, ...], rule: str | None, dont_load: Sequence[str]) -> Tensors:
    """Return the parameters of a ViT by path, with the embedding of patches for the number of channels of a model.

    Args:
      tensors: the parameters of the checkpoint.
      shape: shape of the model's embedding: rows, columns, channels and width.
      rule: see RULES; None adapts nothing.
      dont_load: regexes of the names of parameters that are not loaded.

    Raises:
      CheckpointError: only the number of channels differs, and there is no rule.
      ConfigError: the rule is unknown, the number is the same, or `dont_load` names the embedding.
    """
    check_rule(rule)
    kernel, channels = tensors.get(KERNEL), shape[2]
    if kernel is None or len(kernel.shape) != 4:
        return tensors  # no ViT, which the check of names reports
    is_left_out = any(matches(pattern, [KERNEL], "dont_load") for pattern in dont_load)
    adapted_shape = (*kernel.shape[:2], channels, kernel.shape[3])
    if rule is None:
        if kernel.shape[2] != channels and adapted_shape == shape and not is_left_out:
            raise CheckpointError(
                f"{KERNEL} (checkpoint {kernel.shape}, model {shape}) has another number of channels; to adapt it: "
                "--config.model_load.channels=repeat"
            )
        return tensors
    if kernel.shape[2] == channels:
        raise ConfigError(f"config.model_load.channels={rule!r} has no effect: both have {channels} channels; omit it")
    if is_left_out:
        raise ConfigError(f"config.model_load.channels={rule!r} has no effect: dont_load names {KERNEL}; omit one")

    def read() -> np.ndarray:
        return adapted(np.asarray(kernel.read(), np.float32), channels, rule)

    return {**tensors, KERNEL: kernel._replace(shape=adapted_shape, read=read)}
