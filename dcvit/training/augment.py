"""Augmentation of batches on the device: random erasing, mixup and cutmix.

Every random choice follows from one key, so that a batch is a function of the seed and the step.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from dcvit.dcmha.shapes import Array, Bool, Float, Int
from dcvit.errors import ConfigError

REMODES = ("pixel", "const")
SWITCH_PROB = 0.5
ERASED_AREA = (0.02, 1 / 3)  # part of the image
ERASED_ASPECT = (0.3, 1 / 0.3)  # height ÷ width
ATTEMPTS = 10  # sizes of a rectangle that are drawn until one fits into the image


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """Augmentation of a batch; each field is a key of a config, with timm's name; see `dcvit.config.keys.KEYS`."""

    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_switch_prob: float = SWITCH_PROB
    reprob: float = 0.0
    remode: str = REMODES[0]

    def check(self) -> None:
        """Raise ConfigError if an option has no effect without another one, which is off."""
        if self.mixup_switch_prob != SWITCH_PROB and not (self.mixup and self.cutmix):
            raise ConfigError(
                f"config.mixup_switch_prob={self.mixup_switch_prob} chooses between mixup and cutmix: set config.mixup "
                "and config.cutmix"
            )
        if self.remode != REMODES[0] and not self.reprob:
            raise ConfigError(f"config.remode={self.remode!r} has no effect: set config.reprob")

    def __call__(
        self, key: jax.Array, images: Float[Array, "B h w c"], labels: Float[Array, "B C"]
    ) -> tuple[Float[Array, "B h w c"], Float[Array, "B C"]]:
        """Return images and labels after random erasing and then mixup or cutmix, as far as they are on."""
        # `mixup` and `cutmix` draw from the keys that they split off `key`, which are fold_in(key, 0), 1 and 2.
        of_erasing, of_switch = jax.random.split(jax.random.fold_in(key, 3))
        if self.reprob:
            images = erase(of_erasing, images, self.reprob, self.remode)
        if not self.cutmix:
            return mixup(key, images, labels, self.mixup) if self.mixup else (images, labels)
        cut = functools.partial(cutmix, alpha=self.cutmix)
        if not self.mixup:
            return cut(key, images, labels)
        mix = functools.partial(mixup, alpha=self.mixup)
        switch = jax.random.uniform(of_switch) < self.mixup_switch_prob
        mixed: tuple[Array, Array] = jax.lax.cond(switch, cut, mix, key, images, labels)
        return mixed


def mixup(
    key: jax.Array, images: Float[Array, "B *image"], labels: Float[Array, "B C"], alpha: float
) -> tuple[Float[Array, "B *image"], Float[Array, "B C"]]:
    """Return images and labels, each mixed with its neighbor in the batch (Zhang et al., 2018).

    One λ is drawn from Beta(alpha, alpha) for the whole batch. Each example gets the weight max(λ, 1-λ), which is at
    least 1/2, and its neighbor the rest.
    """
    drawn = jax.random.beta(key, alpha, alpha)
    share = jnp.maximum(drawn, 1 - drawn)
    return images * share + jnp.roll(images, 1, axis=0) * (1 - share), mix_labels(labels, share)


def cutmix(
    key: jax.Array, images: Float[Array, "B h w c"], labels: Float[Array, "B C"], alpha: float
) -> tuple[Float[Array, "B h w c"], Float[Array, "B C"]]:
    """Return images with a box of each replaced by its neighbor's in the batch, and labels (Yun et al., 2019).

    One λ is drawn from Beta(alpha, alpha) for the whole batch, and one box of the size ⌊h·√(1-λ)⌋ × ⌊w·√(1-λ)⌋ whose
    center is any pixel. The labels of the neighbor get the fraction of the image that the box, cut at the image's
    edges, covers.
    """
    height, width = images.shape[1:3]
    of_size, of_row, of_column = jax.random.split(key, 3)
    side = jnp.sqrt(1 - jax.random.beta(of_size, alpha, alpha))
    sides = [jnp.floor(length * side).astype(jnp.int32) for length in (height, width)]
    middles = [jax.random.randint(k, (), 0, n) for k, n in ((of_row, height), (of_column, width))]
    starts = [middle - side // 2 for middle, side in zip(middles, sides, strict=True)]
    box = rectangle(height, width, starts, sides)
    share = jnp.mean(box, dtype=images.dtype)
    mixed_images = jnp.where(box[None, :, :, None], jnp.roll(images, 1, axis=0), images)
    return mixed_images, mix_labels(labels, 1 - share)


def mix_labels(labels: Float[Array, "B C"], share: Float[Array, ""]) -> Float[Array, "B C"]:
    """Return labels·share + (1 - share)·labels of the neighbors, and -1, unknown, where a part of it is below 0."""
    others = jnp.roll(labels, 1, axis=0)
    unknown = (labels < 0) | ((others < 0) & (share < 1))
    return jnp.where(unknown, -1, labels * share + others * (1 - share))


def erase(key: jax.Array, images: Float[Array, "B h w c"], prob: float, mode: str) -> Float[Array, "B h w c"]:
    """Return the images with a random rectangle erased in each with probability `prob` (Zhong et al., 2020).

    Its area is uniform in 2 % to 1/3 of the image, and its aspect ratio log-uniform in 0.3 to 1/0.3. Ten sizes are
    drawn, and the first that is smaller than the image is used; without one, nothing is erased.

    Args:
      key: random key; each image has its own.
      images: the images.
      prob: the probability.
      mode: "const", zeros, or "pixel", standard normal noise.
    """
    height, width = images.shape[1:3]
    of_masks, of_noise = jax.random.split(key)
    masks = jax.vmap(lambda k: _erased(k, height, width, prob))(jax.random.split(of_masks, len(images)))
    noise = jax.random.normal(of_noise, images.shape, images.dtype) if mode == "pixel" else jnp.zeros_like(images)
    return jnp.where(masks[..., None], noise, images)


def _erased(key: jax.Array, height: int, width: int, prob: float) -> Bool[Array, "h w"]:
    """Return a random mask of one image, True for the pixels to erase; all False with probability 1 - `prob`."""
    of_choice, of_area, of_aspect, of_row, of_column = jax.random.split(key, 5)
    area = height * width * jax.random.uniform(of_area, (ATTEMPTS,), minval=ERASED_AREA[0], maxval=ERASED_AREA[1])
    low, high = map(math.log, ERASED_ASPECT)
    aspect = jnp.exp(jax.random.uniform(of_aspect, (ATTEMPTS,), minval=low, maxval=high))
    rows, columns = (jnp.round(jnp.sqrt(x)).astype(jnp.int32) for x in (area * aspect, area / aspect))
    fits = (rows < height) & (columns < width)
    first = jnp.argmax(fits)
    sides = [rows[first], columns[first]]
    starts = [
        jax.random.randint(k, (), 0, jnp.maximum(length - side, 0) + 1)
        for k, length, side in zip((of_row, of_column), (height, width), sides, strict=True)
    ]
    chosen = jnp.any(fits) & (jax.random.uniform(of_choice) < prob)
    return rectangle(height, width, starts, sides) & chosen


def rectangle(height: int, width: int, starts: list[Int[Array, ""]], sides: list[Int[Array, ""]]) -> Bool[Array, "h w"]:
    """Return a mask, True inside a rectangle, cut at the image's edges: first row and column `starts`, size `sides`."""
    rows, columns = (
        (at >= start) & (at < start + side)
        for at, start, side in zip((jnp.arange(height), jnp.arange(width)), starts, sides, strict=True)
    )
    return rows[:, None] & columns[None]
