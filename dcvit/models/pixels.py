"""Device side of preprocessing: images are sent as bytes, and `value_range` converts them on the device."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

import input_pipeline


def split(pp: str) -> tuple[str, Callable[[jax.Array], jax.Array]]:
    """Split a preprocessing string into the string for the host and a function of images B H W C for the device.

    If the string ends with `value_range` (see `input_pipeline.defer_value_range`), the function applies it; results may
    differ from the host's by float32 rounding. Otherwise the function returns its input.
    """
    host, found = input_pipeline.defer_value_range(pp)
    if found is None:
        return pp, lambda images: images
    vmin, vmax, in_min, in_max = map(float, found)

    def to_range(images: jax.Array) -> jax.Array:
        return vmin + (images.astype(jnp.float32) - in_min) / (in_max - in_min) * (vmax - vmin)

    return host, to_range
