"""Images of their own aspect ratio as sequences of patches: the op `patches`.

NaViT (Dehghani et al., 2023) and NaFlex (SigLIP 2; Tschannen et al., 2025) resize an image to a grid of patches of its
own aspect ratio. Its tokens are the patches, row by row.
"""

import math

import numpy as np

from input_pipeline.errors import InputError, ReadingError
from input_pipeline.images import decode as decoding
from input_pipeline.preprocess.keys import Example, Op

SCALES = (1e-6, 100.0)  # bounds of the scale of an image
PRECISION = 1e-5  # of that scale, as in the released code of SigLIP 2


def patches(patch: int = 16, max_tokens: int = 256, upscale: bool = False) -> Op:
    """Resize `image`, with its aspect ratio, to at most `max_tokens` patches, and cut it into them.

    The size is that of the largest scale with at most `max_tokens` patches, by the rule of SigLIP 2: both sides are
    rounded up to multiples of `patch`. Interpolation is Pillow's antialiased bilinear filter. `image` becomes an array
    of shape (max_tokens, patch·patch, channels), padded with zeros after the patches, and `grid` the numbers of rows
    and columns of patches, int32 of shape (2,). Only `value_range`, `vgg_value_range` and ops on other keys may follow.

    Args:
      patch: height and width of a patch in pixels, as `patch_size` of the model.
      max_tokens: largest number of patches.
      upscale: also enlarge images, as SigLIP 2 does; otherwise a small image has fewer patches.
    """
    if patch < 1 or max_tokens < 1:
        raise InputError(f"patches({patch}, {max_tokens}): expected 1 or more of each")

    def op(example: Example, rng: np.random.Generator) -> Example:
        image = example["image"]
        if not isinstance(image, np.ndarray) or image.ndim != 3 or image.dtype.kind not in "uif":
            raise ReadingError(
                "patches: 'image' should be pixels of shape (height, width, channels); add decode before"
            )
        rows, columns = grid_of((image.shape[0], image.shape[1]), patch, max_tokens, upscale=upscale)
        image = decoding.resize_pillow(image, (rows * patch, columns * patch))
        cut = image.reshape(rows, patch, columns, patch, -1).swapaxes(1, 2).reshape(rows * columns, patch * patch, -1)
        padded = np.pad(cut, [(0, max_tokens - len(cut)), (0, 0), (0, 0)])
        return {**example, "image": padded, "grid": np.asarray((rows, columns), np.int32)}

    return op


def image_of_patches(patches: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Return the image (height, width, channels) whose patches the op `patches` has cut; `grid` is rows and columns."""
    rows, columns = map(int, grid)
    side = math.isqrt(patches.shape[1])
    cut = patches[: rows * columns].reshape(rows, columns, side, side, -1)
    return cut.swapaxes(1, 2).reshape(rows * side, columns * side, -1)


def grid_of(size: tuple[int, int], patch: int, max_tokens: int, *, upscale: bool = False) -> tuple[int, int]:
    """Return the rows and columns of patches of an image of `size`, height and width; see `patches`."""

    def grid(scale: float) -> tuple[int, int]:
        rows, columns = (max(1, math.ceil(side * scale / patch)) for side in size)
        return rows, columns

    if not upscale and math.prod(grid(1.0)) <= max_tokens:
        return grid(1.0)
    low, high = SCALES
    while high - low >= PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if math.prod(grid(middle)) <= max_tokens else (low, middle)
    return grid(low)
