"""Images of different sizes packed into rows of patches (NaViT; Dehghani et al., 2023), an input of the ViT.

The patches of several images are the tokens of one row. A token attends to tokens of its own image only, by segment
ids. Positions are those of a patch in the grid of its own image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dcvit.dcmha.shapes import Array, Float, Int, Shaped
from dcvit.errors import ConfigError
from dcvit.models import layers
from input_pipeline.preprocess.packing import Packing

POOLS = ("gap", "map", "tok", "tok+gap", "tok+reg")  # the others take a patch by its position, or all patches
PLACES = "_places"  # key of a batch
EXACT = jax.lax.Precision.HIGHEST


class PackedImages(NamedTuple):
    """Groups of images, each packed into rows of its own, as the host's `input_pipeline.preprocess.packing.place` says.

    Fields:
      patches: the pixels of each token, patch by patch; P is the number of pixels of a patch.
      positions: row and column of each token in its image's grid; zeros for padding.
      segments: number of the token's image in its row, from 0; the number of images that a row can hold for padding.
      grids: rows and columns of patches of each image that a row can hold; ones where there is none.
      slots: place in `grids`, of all rows of the group in sequence, of each image of the group.
    """

    patches: Shaped[Array, "groups rows T P channels"]
    positions: Int[Array, "groups rows T 2"]
    segments: Int[Array, "groups rows T"]
    grids: Int[Array, "groups rows images_of_row 2"]
    slots: Int[Array, "groups images"]

    def in_rows(self) -> PackedImages:
        """Return the arrays with the rows of all groups as first axis, in place of two axes; `slots` stay as they are.

        This is the form in which the model computes.
        """
        flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in self._asdict().items() if name != "slots"}
        return self._replace(**flat)


class TokenPlaces(NamedTuple):
    """The places of the tokens of rows, for attention: the images to which they belong, and a rotary embedding.

    Fields:
      segments: see `PackedImages`; None: each row is one image.
      angles: those of `dcvit.models.layers.patch_angles` for the center of each patch in its image, and zeros for other
        tokens; None: no rotary embedding.
    """

    segments: Int[Array, "rows T"] | None
    angles: Float[Array, "#rows T _"] | None


def one_per_row(patches: Shaped[Array, "B T P channels"], grid: Int[Array, "B 2"]) -> PackedImages:
    """Return images as rows of their own, with padding after each; arguments as the op `patches` yields them."""
    token = jnp.broadcast_to(jnp.arange(patches.shape[1]), patches.shape[:2])
    columns = jnp.maximum(grid[:, 1:], 1)
    is_patch = token < jnp.prod(grid, axis=1, keepdims=True)
    positions = jnp.where(is_patch[..., None], jnp.stack([token // columns, token % columns], axis=-1), 0)
    segments = (~is_patch).astype(jnp.int32)
    slots = jnp.zeros((len(grid), 1), jnp.int32)
    return PackedImages(
        patches[:, None], positions[:, None], segments[:, None], jnp.maximum(grid, 1)[:, None, None], slots
    )


def pack(
    key: jax.Array,
    patches: Shaped[Array, "B T P channels"],
    grid: Int[Array, "B 2"],
    places: Int[Array, "B 4"],
    packing: Packing,
) -> PackedImages:
    """Return images packed into rows; an image that keeps fewer tokens than it has loses random ones.

    Args:
      key: random key of the choice of the tokens that are kept.
      patches, grid: as the op `patches` yields them.
      places: the place of each image, of `input_pipeline.preprocess.packing.place`.
      packing: the groups and their rows.
    """
    tokens, number = patches.shape[1], packing.images
    row, start, segment, kept = places.T
    count = jnp.prod(grid, axis=1, keepdims=True)
    token = jnp.arange(tokens)[None]
    scores = jnp.where(token < count, jax.random.uniform(key, (len(grid), tokens)), 2.0)
    rank = jnp.argsort(jnp.argsort(scores, axis=1), axis=1)
    is_kept = (rank < kept[:, None]) & (token < count)
    at = (row * packing.tokens + start)[:, None] + jnp.cumsum(is_kept, axis=1) - 1
    at = jnp.where(is_kept, at, packing.rows * packing.tokens)  # beyond the rows: not stored

    def pack_group(patches: Array, grid: Array, at: Array, row: Array, segment: Array) -> PackedImages:
        source = jnp.full(packing.rows * packing.tokens, number * tokens)  # of each token of the rows
        source = source.at[at.ravel()].set(jnp.arange(number * tokens), mode="drop")
        image, token = source // tokens, source % tokens
        slots = row * packing.most() + segment

        def of_image(values: Array, fill: int) -> Array:
            return values.at[image].get(mode="fill", fill_value=fill)

        columns = of_image(grid[:, 1], 1)
        positions = jnp.stack([token // columns, token % columns], axis=-1)
        found = PackedImages(
            patches.reshape(number * tokens, *patches.shape[2:]).at[source].get(mode="fill", fill_value=0),
            jnp.where((image < number)[:, None], positions, 0),
            of_image(segment, packing.most()),
            jnp.ones((packing.rows * packing.most(), 2), jnp.int32).at[slots].set(grid),
            slots,
        )
        arrays = found._asdict().items()
        return found._replace(**{k: x.reshape(packing.rows, -1, *x.shape[1:]) for k, x in arrays if k != "slots"})

    grouped = [x.reshape(-1, number, *x.shape[1:]) for x in (patches, grid, at, row, segment)]
    packed: PackedImages = jax.vmap(pack_group)(*grouped)
    return packed


def model_inputs(
    batch: Mapping[str, jax.Array],
    to_float: Callable[[jax.Array], jax.Array],
    packing: Packing | None = None,
    key: jax.Array | None = None,
) -> jax.Array | PackedImages:
    """Return the images of a batch as an input of the ViT; patches as rows of one image, or packed.

    Args:
      batch: arrays with a first axis of examples: `image`; with the op `patches` also `grid`; and with `packing` also
        `PLACES`, of `input_pipeline.preprocess.packing.place`.
      to_float: the part of the preprocessing that runs on the device, a function of each pixel.
      packing: the rows; None: one image in each row.
      key: random key of the choice of the tokens that are kept; needed with `packing`.
    """
    if "grid" not in batch:
        return to_float(batch["image"])
    if packing is None or key is None:
        packed = one_per_row(batch["image"], batch["grid"])
    else:
        packed = pack(key, batch["image"], batch["grid"], batch[PLACES], packing)
    return packed._replace(patches=to_float(packed.patches))


def token_counts(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return metrics of a packed batch: tokens of an image in its row, and the fraction of tokens that were dropped.

    Batches that are not packed have none.
    """
    if PLACES not in batch:
        return {}
    kept = jnp.sum(batch[PLACES][:, -1]).astype(jnp.float32)
    before = jnp.sum(jnp.prod(batch["grid"], axis=1)).astype(jnp.float32)
    return {"tokens_per_image": kept / len(batch["grid"]), "tokens_dropped": 1 - kept / before}


def image_shape(example: Mapping[str, np.ndarray]) -> tuple[int, ...]:
    """Return the shape (height, width, channels) of a preprocessed example's image.

    With the op `patches`, whose images differ in size, it is that of the largest square image.
    """
    shape: tuple[int, ...] = example["image"].shape
    if "grid" not in example or len(shape) != 3:
        return shape
    side = math.isqrt(shape[0]) * math.isqrt(shape[1])
    return (side, side, shape[2])


class PatchDense(nn.Module):
    """Embedding of patches that are cut already, with the parameters of big_vision's convolution.

    Fields:
      width: M.
      patch: height and width of a patch.
      use_bias: add a bias.
      dtype: dtype of the computation.
    """

    width: int
    patch: tuple[int, int]
    use_bias: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(self, patches: Float[Array, "rows T P channels"]) -> Float[Array, "rows T M"]:
        shape = (*self.patch, patches.shape[-1], self.width)
        kernel = self.param("kernel", nn.linear.default_kernel_init, shape).astype(self.dtype)
        x = patches.reshape(*patches.shape[:2], -1) @ kernel.reshape(-1, self.width)
        if self.use_bias:
            x = x + self.param("bias", nn.initializers.zeros, (self.width,)).astype(self.dtype)[None, None]
        return x


def check_packed(net: nn.Module, pixels: int) -> None:
    """Raise ConfigError if a ViT does not take packed images with patches of `pixels` pixels."""
    if net.pool_type not in POOLS:
        raise ConfigError(
            f"config.model.pool_type={net.pool_type!r} is for images of one size; patches need {', '.join(POOLS)}"
        )
    if len(set(net.patch_size)) > 1 or math.prod(net.patch_size) != pixels:
        raise ConfigError(
            f"config.model.patch_size={tuple(net.patch_size)}, but the op patches yields patches of {pixels} pixels"
        )


def token_segments(packed: PackedImages, extra: Sequence[Float[Array, "1 _ M"]]) -> Int[Array, "rows T"]:
    """Return the image of each token of `in_rows`; every image of a row has the tokens `extra` before the patches."""
    rows, images = packed.grids.shape[:2]
    numbers = [jnp.repeat(jnp.arange(images), tokens.shape[1]) for tokens in extra]
    before = [jnp.broadcast_to(ids, (rows, len(ids))) for ids in numbers]
    return jnp.concatenate([*before, packed.segments], axis=1)


def patch_centers(packed: PackedImages) -> Float[Array, "rows T 2"]:
    """Return (y, x) of the center of each patch of `in_rows`, from -1 to 1 over its image."""
    sides = _of_token(packed, packed.grids).astype(jnp.float32)
    return (2 * packed.positions.astype(jnp.float32) + 1) / sides - 1


def resampled(packed: PackedImages, table: Float[Array, "1 S M"]) -> Float[Array, "rows T M"]:
    """Return learned position embeddings of a square grid, interpolated to each image's own grid.

    Linear and with aligned corners, as `dcvit.models.vit.resample_grid`. Products with one-hot weights, instead of
    indexing, make gradients deterministic on every device.

    Raises:
      ConfigError: the embeddings are not those of a square grid.
    """
    side = math.isqrt(table.shape[1])
    if side**2 != table.shape[1]:
        raise ConfigError(f"config.model: {table.shape[1]} position embeddings are no square grid, which patches need")
    last = jnp.maximum(_of_token(packed, packed.grids) - 1, 1).astype(jnp.float32)
    at = packed.positions.astype(jnp.float32) * (side - 1) / last
    weights = jnp.maximum(
        0, 1 - jnp.abs(at[..., None] - jnp.arange(side, dtype=jnp.float32)[None, None, None])
    )  # rows T 2 side
    both = weights[:, :, 0, :, None] * weights[:, :, 1, None, :]
    return jnp.matmul(both.reshape(*both.shape[:2], side**2), table[0], precision=EXACT)


def posemb_sincos_2d(packed: PackedImages, width: int) -> Float[Array, "rows T M"]:
    """Return `dcvit.models.vit.posemb_sincos_2d` at each token's position in its image."""
    table = jnp.asarray(layers.sincos(packed.patches.shape[1], width))  # no position is larger
    return jnp.concatenate([table[packed.positions[..., axis]] for axis in (1, 0)], axis=-1)


def pooled(
    x: Float[Array, "rows _ M"], patches: Float[Array, "rows T M"], packed: PackedImages, pool_type: str
) -> Float[Array, "rows images_of_row _"]:
    """Return one vector for each image: the mean of its patches, its class token or first register, or two of them.

    Args:
      x: all tokens: the class tokens of the images that a row can hold, then their registers, then the patches.
      patches: the patches.
      packed: the rows of `in_rows`.
      pool_type: see `dcvit.models.vit.ViT`.
    """
    number = packed.grids.shape[1]
    if pool_type == "tok":
        return x[:, :number]
    if pool_type == "tok+reg":
        registers = (x.shape[1] - patches.shape[1]) // number - 1
        return jnp.concatenate([x[:, :number], x[:, number::registers][:, :number]], axis=-1)
    belongs = packed.segments[:, None] == jnp.arange(number)[None, :, None]
    sums = jnp.einsum(
        "rkt,rtm->rkm", belongs.astype(patches.dtype), patches, precision=EXACT, preferred_element_type=jnp.float32
    )
    means = sums / jnp.maximum(jnp.sum(belongs, axis=-1, keepdims=True), 1).astype(jnp.float32)
    means = means.astype(patches.dtype)
    return means if pool_type == "gap" else jnp.concatenate([x[:, :number], means], axis=-1)


def in_batch_order(x: Float[Array, "rows images_of_row M"], slots: Int[Array, "groups images"]) -> Float[Array, "B M"]:
    """Return the vectors of the images in the order of the batch."""
    grouped = x.reshape(len(slots), -1, x.shape[-1])
    return jnp.take_along_axis(grouped, slots[..., None], axis=1).reshape(-1, x.shape[-1])


def _of_token(packed: PackedImages, values: Int[Array, "rows images_of_row 2"]) -> Int[Array, "rows T 2"]:
    """Return the values of each token's image; those of padding are ones."""
    padded = jnp.pad(values, [(0, 0), (0, 1), (0, 0)], constant_values=1)
    return jnp.take_along_axis(padded, packed.segments[..., None], axis=1)
