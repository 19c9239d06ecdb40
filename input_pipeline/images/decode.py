"""Decoding of image files to pixels, resizing, and random crop windows.

JPEGs are decoded by libjpeg-turbo with the options that TensorFlow uses, and images are resized by TensorFlow or with
its arithmetic, so that the pixels are bitwise equal to big_vision's. All other formats, and JPEGs of unusual
subsampling, are decoded by Pillow.
`docs/data.md` has a table of how unusual and damaged files are handled.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Num, UInt8

from input_pipeline.errors import InputError, first_line
from input_pipeline.images import kernels
from input_pipeline.optional import Late, tensorflow

if TYPE_CHECKING:
    import PIL
    import simplejpeg
    from PIL import Image, ImageOps
else:
    PIL, Image, ImageOps, simplejpeg = map(Late, ("PIL", "PIL.Image", "PIL.ImageOps", "simplejpeg"))

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")  # none of their decoders runs an external program
MAX_PIXELS = (1 << 29) // 3  # 178,956,970: three times ImageNet's largest, and the limit of TensorFlow and Pillow
METHODS = ("bilinear", "nearest", "bicubic", "area", "lanczos3", "lanczos5", "gaussian", "mitchellcubic")
ORIENTATION, SAMPLES = 0x0112, 0x0115  # the tags of EXIF and TIFF
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the first bytes of TIFF and BigTIFF files
CROP_ATTEMPTS = 100
# A JPEG marker with a meaning between segments: neither a stuffed byte, nor padding, nor a restart.
JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
FRAME_MARKERS = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # of frame headers
END_MARKER, MARKERS_WITHOUT_LENGTH = 0xD9, {0x01, 0xD8}
# Messages of libjpeg about damage after which TensorFlow uses the pixels all the same.
JPEG_WARNING = re.compile("Corrupt JPEG data|Inconsistent progression|Invalid SOS parameters")
JPEG_SCAN, JPEG_END = b"\xff\xda", b"\xff\xd9"  # markers: a scan starts, and the image ends
CMYK = ("CMYK", "YCCK")  # color spaces of JPEGs with four channels
DAMAGED_JPEG = "broken image: the JPEG is damaged or cut off"

Window = tuple[int, int, int, int]  # top, left, height, width
Pixels = UInt8[np.ndarray, "height width channels"]


def is_jpeg(data: bytes) -> bool:
    """Return True if the bytes start like a JPEG file."""
    return data[:2] == b"\xff\xd8"


def jpeg_size(data: bytes) -> tuple[int, int]:
    """Return (height, width) from a JPEG's frame header (ITU-T T.81, B.2.2).

    Of a file that announces more pixels than it has, the decoders would allocate all.

    Raises:
      InputError: the file has no frame header, or more than MAX_PIXELS.
    """
    marker, at = 0, 2
    while marker not in FRAME_MARKERS:
        found = JPEG_MARKER.search(data, at)
        if found is None or marker == END_MARKER:
            raise InputError("broken image: no JPEG header")
        marker, at = data[found.end() - 1], found.end()
        frame = data[at : at + 7]  # length (2 bytes), precision (1), height (2), width (2)
        at += 0 if marker in MARKERS_WITHOUT_LENGTH else int.from_bytes(frame[:2], "big")
    height, width = (int.from_bytes(frame[i : i + 2], "big") if len(frame) == 7 else 0 for i in (3, 5))
    if not height * width:
        raise InputError("broken image: no JPEG header")
    if height * width > MAX_PIXELS:
        raise InputError(f"the image announces {width}x{height} pixels, which exceeds the limit of {MAX_PIXELS}")
    return height, width


def decode(data: bytes, channels: int = 3, *, precise: bool = False, exif: bool = False) -> Pixels:
    """Return the pixels of an image file, uint8 of shape (height, width, channels).

    Args:
      data: the bytes of the file.
      channels: 1 for gray or 3 for RGB.
      precise: decode JPEGs with Pillow, whose cosine transform is more accurate and slower.
      exif: rotate and mirror the image as its EXIF orientation says.

    Raises:
      InputError: the file is not an image, is damaged, or has more than MAX_PIXELS.
    """
    pixels = _decode_jpeg(data, channels) if is_jpeg(data) and not precise else None
    if pixels is not None:
        return upright(pixels, _orientation(data) if exif else 1)
    with pillow_image(data) as image:
        if exif:
            image = ImageOps.exif_transpose(image)
        if image.mode in ("I", "F"):
            raise InputError(
                'the image has 32 bits a channel; expected 8 or 16, or decode(1, dtype="float32") for floats'
            )
        if image.mode.startswith("I;16"):
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return pixels.reshape(*pixels.shape[:2], channels)


def jpeg_warning(data: bytes) -> str | None:
    """Return the first message of libjpeg about damage in a JPEG that `decode` accepts; None for any other file."""
    if not is_jpeg(data):
        return None
    decode_jpeg = simplejpeg.decode_jpeg
    try:
        decode_jpeg(data, "CMYK" if _jpeg_colors(data) in CMYK else "GRAY", fastdct=True)
    except (ValueError, KeyError) as e:
        return str(e) if JPEG_WARNING.match(str(e)) else None
    return None


def _jpeg_colors(data: bytes) -> str | None:
    """Return the color space of a JPEG: "YCbCr", "RGB", "Gray", "CMYK" or "YCCK"; None if TurboJPEG does not read it.

    Raises:
      InputError: the file has no frame header, or more than MAX_PIXELS.
    """
    jpeg_size(data)
    read_header = simplejpeg.decode_jpeg_header  # outside of the block: a missing library is a ValueError, too
    try:
        return str(read_header(data, strict=False)[2])
    except (ValueError, KeyError):  # KeyError: of a subsampling without a name
        return None


def _decode_jpeg(data: bytes, channels: int) -> Pixels | None:
    """Return the pixels of a JPEG as TensorFlow decodes it: with the fast cosine transform and interpolated colors.

    None for JPEGs that TurboJPEG does not read, of unusual subsampling or with bytes between their headers, and for
    gray from CMYK.

    Raises:
      InputError: the file is damaged, or its end is missing.
    """
    colors = _jpeg_colors(data)
    if colors is None or (colors in CMYK and channels == 1):
        return None
    space = "CMYK" if colors in CMYK else "GRAY" if channels == 1 else "RGB"
    decode_jpeg = functools.partial(simplejpeg.decode_jpeg, data, space, fastdct=True)
    try:
        pixels: np.ndarray = decode_jpeg()
    except ValueError as e:
        has_end = data.rfind(JPEG_END) > data.rfind(JPEG_SCAN)
        if not JPEG_WARNING.match(str(e)) or not has_end:  # libjpeg reports the first of several kinds of damage
            raise InputError(DAMAGED_JPEG) from None
        try:
            pixels = decode_jpeg(strict=False)
        except ValueError:
            return None
    if space == "CMYK":
        with pillow_image(data) as image:
            pixels = pixels if "adobe" in image.info else 255 - pixels  # Adobe's programs store inverted values
        pixels = (pixels[..., :3].astype(np.uint16) * pixels[..., 3:] // 255).astype(np.uint8)
    return pixels


def decode_crop(data: bytes, window: Window, *, exif: bool = False) -> Pixels:
    """Return the RGB pixels of a window of a JPEG, without decoding parts of the file that the window does not need.

    With `exif`, the window refers to the stored image, and the result is rotated and mirrored afterwards.

    Raises:
      InputError: the file is damaged.
    """
    with _tensorflow() as tf:
        # the decoder would take 40 µs longer with Python's values
        pixels = np.asarray(tf.io.decode_and_crop_jpeg(tf.constant(data), tf.constant(window), channels=3))
    return upright(pixels, _orientation(data) if exif else 1)


def resize(
    image: Num[np.ndarray, "height width channels"],
    size: tuple[int, int],
    method: str = "bilinear",
    antialias: bool = False,
) -> Num[np.ndarray, "new_height new_width channels"]:
    """Return an image resized by `tf.image.resize`, clipped to its dtype and truncated, not rounded.

    Args:
      image: the pixels.
      size: height and width of the result.
      method: one of METHODS.
      antialias: see `tf.image.resize`.

    Raises:
      InputError: the result would have more than MAX_PIXELS.
    """
    if size[0] * size[1] > MAX_PIXELS:
        raise InputError(
            f"resizing {image.shape[1]}x{image.shape[0]} to {size[1]}x{size[0]} exceeds {MAX_PIXELS} pixels"
        )
    if method in kernels.RESIZE and not antialias and image.dtype == np.uint8 and image.shape[2] == 3:
        return kernels.RESIZE[method](image, size)
    if antialias and method in kernels.ANTIALIASED and image.dtype == np.uint8:
        pixels = kernels.resize_antialiased(image, size, method)
    else:
        pixels = np.asarray(tensorflow().image.resize(image, size, method=method, antialias=antialias))
    if image.dtype.kind in "ui" and method not in ("bilinear", "nearest", "area"):  # the other methods overshoot
        pixels = np.clip(pixels, np.iinfo(image.dtype).min, np.iinfo(image.dtype).max)
    return pixels.astype(image.dtype)


def resize_pillow(
    image: Num[np.ndarray, "height width channels"], size: tuple[int, int]
) -> Num[np.ndarray, "new_height new_width channels"]:
    """Return an image resized to (height, width) by Pillow's antialiased bilinear filter, in its dtype."""
    height, width = size
    pixels = image if image.dtype == np.uint8 else image.astype(np.float32)  # which hold 16 bits
    channels = [
        np.asarray(Image.fromarray(pixels[..., c]).resize((width, height), Image.Resampling.BILINEAR))
        for c in range(image.shape[-1])
    ]
    resized = np.stack(channels, axis=-1)
    return (np.rint(resized) if image.dtype.kind in "ui" else resized).astype(image.dtype, copy=False)


def sample_window(
    size: tuple[int, int], area: tuple[float, float], ratio: tuple[float, float], rng: np.random.Generator
) -> Window:
    """Draw the window (top, left, height, width) of an Inception-style crop (Szegedy et al., 2015).

    `tf.image.sample_distorted_bounding_box` has the same distribution. The aspect ratio is drawn uniformly, then
    the height uniformly among those with a valid area, then the position.

    Args:
      size: height and width of the image.
      area: minimum and maximum fraction of the image's pixels.
      ratio: minimum and maximum width / height.
      rng: random number generator.

    Returns:
      The window; the whole image if 100 draws found no valid window.
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
            top, left = (_offset(room, rng.random()) for room in (rows - height, columns - width))
            return top, left, height, width
    return 0, 0, rows, columns


def _offset(room: int, drawn: float) -> int:
    """Return a uniform integer in [0, room), or 0 if `room` is 0, from a number drawn from [0, 1).

    There are `room` + 1 possible offsets, but TensorFlow never draws the last one. Here, draws that would give it are
    distributed over the other offsets; all other draws give the same window as with `room` + 1 offsets.
    """
    position = drawn * (room + 1)
    return int(position) if position < room else int((position - room) * room)


@contextlib.contextmanager
def _tensorflow() -> Iterator[types.ModuleType]:
    """Yield TensorFlow for the context, and convert its errors about a JPEG to an InputError of one line."""
    tf = tensorflow()
    try:
        yield tf
    except tf.errors.ResourceExhaustedError as e:
        raise MemoryError(first_line(e)) from None
    except tf.errors.OpError:
        raise InputError(DAMAGED_JPEG) from None


@contextlib.contextmanager
def pillow_image(data: bytes) -> Iterator[Image.Image]:
    """Open an image with Pillow without decoding it; every error of a decoder in the block becomes an InputError."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image
    except (InputError, MemoryError):
        raise
    except Image.DecompressionBombError as e:
        raise InputError(str(e)) from None
    except Exception as e:  # decoders raise any type of exception for damaged files
        reason = "not an image" if isinstance(e, PIL.UnidentifiedImageError) else f"broken image: {e}"
        if data[:4] in TIFF_STARTS:
            reason += ', or one of channels that are not converted: see decode(channels, dtype="uint16")'
        raise InputError(reason) from None


def loses_channels(data: bytes) -> bool:
    """Return True for a TIFF with more channels than Pillow returns: of several gray ones, it reads the first plane."""
    if data[:4] not in TIFF_STARTS:
        return False
    with pillow_image(data) as image:
        tags: Mapping[int, int] = getattr(image, "tag_v2", {})
        return tags.get(SAMPLES, 1) > len(image.getbands())


def _orientation(data: bytes) -> int:
    """Return the EXIF orientation, 1 (upright) to 8, or 1 if the file has none."""
    if b"Exif\0" not in data[:65536]:
        return 1
    with pillow_image(data) as image:
        return int(image.getexif().get(ORIENTATION, 1))


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Return an image rotated and mirrored according to its EXIF orientation, 1 to 8."""
    if orientation in (2, 4, 5, 7):
        pixels = pixels[:, ::-1]
    quarter_turns = {3: 2, 4: 2, 5: 1, 6: 3, 7: 3, 8: 1}.get(orientation, 0)  # counterclockwise
    return np.ascontiguousarray(np.rot90(pixels, quarter_turns))
