"""The last step of preprocessing, taken on the device: bytes travel there, and become numbers where they are used."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

import input_pipeline


def split(pp: str) -> tuple[str, Callable[[jax.Array], jax.Array]]:
    """What of a preprocessing string is left to the host, and the function of images B H W C for the device.

    The function is `value_range` where the string ends with it (see `input_pipeline.defer_value_range`), equal to
    the host's but for how a compiler rounds float32; otherwise it changes nothing.
    """
    host, found = input_pipeline.defer_value_range(pp)
    if found is None:
        return pp, lambda images: images
    vmin, vmax, in_min, in_max = map(float, found)

    def to_range(images: jax.Array) -> jax.Array:
        return vmin + (images.astype(jnp.float32) - in_min) / (in_max - in_min) * (vmax - vmin)

    return host, to_range
