"""Encoded bytes to pixels, and pixels to other sizes. JPEGs and resizing go through TensorFlow's kernels, so that
pixels are big_vision's bit for bit; every other format goes through Pillow. `docs/data.md` has the table of what
becomes of odd, damaged and hostile files.
"""

import contextlib
import functools
import io
import math
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from input_pipeline.errors import InputError, first_line, require

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")  # what `decode` reads; no format that runs a program
MAX_PIXELS = (1 << 29) // 3  # 178,956,970, three times ImageNet's largest: TensorFlow's limit, and Pillow's by default
METHODS = ("bilinear", "nearest", "bicubic", "area", "lanczos3", "lanczos5", "gaussian", "mitchellcubic")
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # JPEG markers that begin a frame
BARE = {0x01, *range(0xD0, 0xD8)}  # those that nothing belongs to, not even a length
ORIENTATION = 0x0112  # the EXIF tag
CROP_ATTEMPTS = 100

Window = tuple[int, int, int, int]  # top, left, height, width


@functools.cache
def tensorflow() -> Any:
    """TensorFlow, kept off the accelerators and to one thread a kernel: the parallelism is over examples.

    Raises:
      InputError: it is not installed.
    """
    tf = require("tensorflow")
    for kind in ("GPU", "TPU"):
        tf.config.set_visible_devices([], kind)
    with contextlib.suppress(RuntimeError):  # too late where another library has used TensorFlow already
        tf.config.threading.set_intra_op_parallelism_threads(1)
    return tf


def is_jpeg(data: bytes) -> bool:
    return data[:2] == b"\xff\xd8"


def decode(data: bytes, channels: int = 3, *, precise: bool = False, exif: bool = False) -> np.ndarray:
    """The pixels of an image file, uint8, height × width × channels.

    Raises:
      InputError: what cannot or must not be decoded.
    """
    if is_jpeg(data) and not precise:
        jpeg_size(data)
        return _upright(_jpeg(data, channels, None), _orientation(data) if exif else 1)
    with _readable(data) as image:
        if exif:
            image = ImageOps.exif_transpose(image)
        if image.mode in ("I", "F"):
            raise InputError("32 bits a channel; expected 8 or 16")
        if image.mode.startswith("I;16"):
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return pixels.reshape(*pixels.shape[:2], channels)


def decode_crop(data: bytes, window: Window, *, exif: bool = False) -> np.ndarray:
    """The RGB pixels of a window of a JPEG, of which no more is decoded than needed.

    With `exif` the window is one of the stored image, and what comes back stands upright.
    """
    return _upright(_jpeg(data, 3, window), _orientation(data) if exif else 1)


def jpeg_size(data: bytes) -> tuple[int, int]:
    """(height, width) in a JPEG's frame header (ITU-T T.81, B.2.2), found without copying the file as TensorFlow does.

    Raises:
      InputError: there is none, or it announces too many pixels.
    """
    at, (height, width) = 2, (0, 0)
    while data[at : at + 1] == b"\xff" and len(data) >= at + 9:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in FRAMES:
            height, width = (int.from_bytes(data[i : i + 2], "big") for i in (at + 5, at + 7))
            break
        at += 1 if marker == 0xFF else 2 + (0 if marker in BARE else length)  # 0xFF may fill the space before a marker
    if not height * width:
        raise InputError("broken image: no JPEG header")
    _check_pixels(width, height)
    return height, width


def resize(image: np.ndarray, size: tuple[int, int], method: str = "bilinear", antialias: bool = False) -> np.ndarray:
    """`tf.image.resize` to (height, width), with the result clipped and cut (not rounded) to the image's own dtype.

    Raises:
      InputError: the result would have more than MAX_PIXELS.
    """
    if size[0] * size[1] > MAX_PIXELS:
        raise InputError(
            f"resizing {image.shape[1]}x{image.shape[0]} to {size[1]}x{size[0]} exceeds {MAX_PIXELS} pixels"
        )
    tf = tensorflow()
    if method == "bilinear" and not antialias:  # the kernel itself: its wrapper takes a third of the time
        resized = tf.raw_ops.ResizeBilinear(images=image[None], size=_constant(size), half_pixel_centers=True)
        pixels = np.asarray(resized)[0]
    else:
        pixels = np.asarray(tf.image.resize(image, size, method=method, antialias=antialias))
    if image.dtype == np.uint8 and method not in ("bilinear", "nearest", "area"):  # others overshoot
        pixels = np.clip(pixels, 0, 255)
    return pixels.astype(image.dtype)


@functools.lru_cache(maxsize=64)
def _constant(values: tuple[int, int]) -> Any:
    """A tensor, made once: making one for each image takes as long as a tenth of resizing it."""
    return tensorflow().constant(values)


def sample_window(
    size: tuple[int, int], area: tuple[float, float], ratio: tuple[float, float], rng: np.random.Generator
) -> Window:
    """An Inception-style crop (Szegedy et al., 2015), distributed as `tf.image.sample_distorted_bounding_box`'s.

    Args:
      size: height and width of the image.
      area: least and greatest share of the image's pixels.
      ratio: least and greatest width / height.
      rng: draws the ratio uniformly, then the height uniformly among those that keep to the area, then the place.

    Returns:
      The window; the whole image where 100 draws found none that fits.
    """
    rows, columns = size
    least, most = (share * rows * columns for share in area)
    for _ in range(CROP_ATTEMPTS):
        aspect = ratio[0] + rng.random() * (ratio[1] - ratio[0])
        low, high = (round(math.sqrt(pixels / aspect)) for pixels in (least, most))
        high = min(high, rows, int((columns + 0.5 - 1e-7) / aspect))
        height = low + int(rng.random() * (high - low + 1)) if low < high else high
        width = round(height * aspect)
        if width * height < least:
            height += 1
        elif width * height > most:
            height -= 1
        width = round(height * aspect)
        if least <= width * height <= most and 0 < width <= columns and 0 < height <= rows:
            top, left = (int(rng.random() * (room + 1)) for room in (rows - height, columns - width))
            return top, left, height, width
    return 0, 0, rows, columns


def _jpeg(data: bytes, channels: int, window: Window | None) -> np.ndarray:
    """TensorFlow's decoder, with its error in one line."""
    tf = tensorflow()
    try:
        if window is None:
            return np.asarray(tf.io.decode_jpeg(data, channels=channels))
        return np.asarray(tf.io.decode_and_crop_jpeg(data, window, channels=channels))
    except tf.errors.ResourceExhaustedError as e:
        raise MemoryError(first_line(e)) from None
    except tf.errors.OpError:
        raise InputError("broken image: the JPEG is damaged or cut off") from None


@contextlib.contextmanager
def _readable(data: bytes) -> Any:
    """The opened Pillow image, none of it decoded yet; whatever a decoder raises inside becomes an InputError."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_pixels(*image.size)  # Pillow's own check is gone where another library took its limit away
            yield image
    except (InputError, MemoryError):
        raise
    except Image.DecompressionBombError as e:
        raise InputError(str(e)) from None
    except Exception as e:  # decoders raise anything for a damaged file
        reason = "not an image" if isinstance(e, Image.UnidentifiedImageError) else f"broken image: {e}"
        raise InputError(reason) from None


def _check_pixels(width: int, height: int) -> None:
    """Raises InputError for more pixels than are decoded."""
    if width * height > MAX_PIXELS:
        raise InputError(f"the image announces {width}x{height} pixels, which exceeds limit of {MAX_PIXELS}")


def _orientation(data: bytes) -> int:
    """The EXIF orientation, 1 (upright) to 8; 1 where there is none."""
    if b"Exif\0" not in data[:65536]:
        return 1
    with _readable(data) as image:
        return int(image.getexif().get(ORIENTATION, 1))


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Turns and mirrors an image to what its EXIF orientation says."""
    if orientation in (2, 4, 5, 7):
        pixels = pixels[:, ::-1]
    quarter_turns = {3: 2, 4: 2, 5: 1, 6: 3, 7: 3, 8: 1}.get(orientation, 0)  # counterclockwise
    return np.ascontiguousarray(np.rot90(pixels, quarter_turns))
