"""Random augmentations of the colors and the geometry of 8-bit RGB images, each with the definition of its paper.

Colors are changed by Pillow, as in torchvision's transforms of Pillow images. The ops of RandAugment and AugMix are in
`input_pipeline.preprocess.randaug`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from input_pipeline.errors import InputError
from input_pipeline.optional import Late
from input_pipeline.preprocess import randaug as ops
from input_pipeline.preprocess.keys import Change

if TYPE_CHECKING:
    from PIL import Image, ImageEnhance, ImageFilter, ImageOps
else:
    Image, ImageEnhance, ImageFilter, ImageOps = (
        Late(f"PIL.{name}") for name in ("Image", "ImageEnhance", "ImageFilter", "ImageOps")
    )

MAX_LAYERS = 100  # of randaug
MAX_CHAINS, MAX_DEPTH = 20, 20  # of augmix


def randaug(num_layers: int = 2, magnitude: float = 10) -> Change:
    """Apply RandAugment (Cubuk et al., 2019): a sequence of random ops.

    Args:
      num_layers: number of ops, each drawn uniformly from the 16 ops of `input_pipeline.preprocess.randaug`.
      magnitude: strength of each op, 0 to 30.
    """
    if not 0 <= num_layers <= MAX_LAYERS or not 0 <= magnitude <= 30:
        raise InputError(f"randaug({num_layers}, {magnitude}): expected 0 to {MAX_LAYERS} layers of magnitude 0 to 30")
    return Change(lambda image, rng: ops.randaug(image, rng, num_layers, magnitude), keeps_size=True)


def color_jitter(brightness: float = 0, contrast: float = 0, saturation: float = 0, hue: float = 0) -> Change:
    """Change brightness, contrast, saturation and hue by random amounts, in random order, as torchvision's ColorJitter.

    A factor of the first three is drawn uniformly from [max(0, 1 - x), 1 + x], where x is the argument: 0 is black, the
    mean gray or the gray image, 1 is the image. Hues are turned by a part of the circle drawn from [-hue, hue].

    Args:
      brightness: x of brightness; 0: unchanged.
      contrast: x of contrast.
      saturation: x of saturation.
      hue: largest turn, at most 0.5.
    """
    sizes = (brightness, contrast, saturation, hue)
    if not (all(0 <= size <= 100 for size in sizes) and hue <= 0.5 and any(sizes)):
        raise InputError(f"color_jitter{sizes}: expected numbers of 0 or more, one above 0, and a hue of at most 0.5")
    changes = tuple(COLORS.values())

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        pillow = Image.fromarray(ops.rgb(image, "color_jitter"))
        for i in rng.permutation(4):
            low, high = (-hue, hue) if i == 3 else (max(0.0, 1 - sizes[i]), 1 + sizes[i])
            if sizes[i]:
                pillow = changes[i](pillow, float(rng.uniform(low, high)))
        return np.asarray(pillow)

    return Change(change, keeps_size=True)


def change_hue(image: Image.Image, turn: float) -> Image.Image:
    """Turn the hues of an RGB image by a part of the circle, in [-0.5, 0.5], in steps of 1/256."""
    h, s, v = image.convert("HSV").split()
    turned = (np.asarray(h, np.int32) + int(turn * 255)) % 256
    return Image.merge("HSV", (Image.fromarray(turned.astype(np.uint8)), s, v)).convert("RGB")


# Changes of colors: by a factor, which interpolates from black, the mean gray or the gray image, or by a turn.
COLORS: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "brightness": lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    "contrast": lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    "saturation": lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    "hue": change_hue,
}


def three_augment() -> Change:
    """Apply one of grayscale, solarization and Gaussian blur, each with probability 1/3 (3-Augment of DeiT III).

    Values of 128 or more are inverted by the solarization; the standard deviation of the blur is uniform in [0.1, 2]
    pixels. The recipe (Touvron et al., 2022, arXiv 2204.07118) also has flips and `color_jitter(0.3, 0.3, 0.3)`.
    """
    choices: Sequence[Callable[[Image.Image, np.random.Generator], Image.Image]] = (
        lambda image, rng: image.convert("L").convert("RGB"),
        lambda image, rng: ImageOps.solarize(image),
        lambda image, rng: image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.1, 2)))),
    )

    def change(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        pillow = Image.fromarray(ops.rgb(image, "three_augment"))
        return np.asarray(choices[int(rng.integers(len(choices)))](pillow, rng))

    return Change(change, keeps_size=True)


def augmix(severity: float = 3, width: int = 3, depth: int = -1, alpha: float = 1.0) -> Change:
    """Mix an image with chains of random ops of it: AugMix (Hendrycks et al., 2020, arXiv 1912.02781, Algorithm 1).

    The result is m · image + (1 - m) · Σ_i w_i · chain_i(image), with w from a Dirichlet and m from a Beta distribution
    of parameter `alpha`. The ops of a chain are those of the authors' code, at random levels up to `severity`; moved-in
    pixels are gray, as in `randaug`. The consistency loss of the paper is not part of it.

    Args:
      severity: highest level of an op, 0.1 to 10.
      width: number of chains.
      depth: number of ops in a chain; -1: drawn from 1, 2 and 3 for each chain.
      alpha: parameter of both distributions.
    """
    if not (0.1 <= severity <= 10 and 1 <= width <= MAX_CHAINS and 0 < alpha <= 1000):
        raise InputError(
            f"augmix({severity}, {width}, {depth}, {alpha}): expected a severity of 0.1 to 10, 1 to {MAX_CHAINS} "
            "chains and an alpha above 0"
        )
    if depth != -1 and not 1 <= depth <= MAX_DEPTH:
        raise InputError(f"augmix(depth={depth}): expected 1 to {MAX_DEPTH} ops in a chain, or -1")
    mix = functools.partial(_augmix, severity=severity, width=width, depth=depth, alpha=alpha)
    return Change(mix, keeps_size=True)


def _augmix(
    image: np.ndarray, rng: np.random.Generator, severity: float, width: int, depth: int, alpha: float
) -> np.ndarray:
    ops.rgb(image, "augmix")
    weights, share = rng.dirichlet([alpha] * width), rng.beta(alpha, alpha)
    mixed = np.float32(share) * image.astype(np.float32)
    for weight in weights:
        chain = image
        for _ in range(depth if depth > 0 else rng.integers(1, 4)):
            op = AUGMIX_OPS[rng.integers(len(AUGMIX_OPS))]
            chain = op(chain, rng.uniform(0.1, severity) / 10, rng)
        mixed += np.float32((1 - share) * weight) * chain
    result: np.ndarray = np.clip(np.rint(mixed), 0, 255).astype(np.uint8)
    return result


# Functions of an image, a level in [0, 1] and the generator.
AUGMIX_OPS: tuple[Callable[[np.ndarray, float, np.random.Generator], np.ndarray], ...] = (
    lambda image, level, rng: ops.autocontrast(image),
    lambda image, level, rng: ops.equalize(image),
    lambda image, level, rng: ops.posterize(image, 4 - int(level * 4)),
    lambda image, level, rng: ops.rotate(image, ops.signed(int(level * 30), rng)),
    lambda image, level, rng: ops.solarize(image, 256 - int(level * 256)),
    lambda image, level, rng: ops.shear_x(image, ops.signed(level * 0.3, rng)),
    lambda image, level, rng: ops.shear_y(image, ops.signed(level * 0.3, rng)),
    lambda image, level, rng: ops.translate_x(image, ops.signed(int(level * image.shape[1] / 3), rng)),
    lambda image, level, rng: ops.translate_y(image, ops.signed(int(level * image.shape[0] / 3), rng)),
)
