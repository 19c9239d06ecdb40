"""Limits on the time and memory that decoding one image takes, checked before and while it is decoded.

`docs/data.md` has a table of them. The largest images of these limits take about ten seconds on a CPU of 2024; a photo
takes milliseconds.
"""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from input_pipeline.errors import InputError
from input_pipeline.optional import Late

if TYPE_CHECKING:
    from PIL import TiffImagePlugin
else:
    TiffImagePlugin = Late("PIL.TiffImagePlugin")

# Of an image, and of the tiles of a TIFF, which may be larger than the image: 178,956,970, three times ImageNet's
# largest, and the limit of TensorFlow and Pillow. Decoding takes up to 23 bytes of memory per pixel, which is 4.1 GB.
MAX_PIXELS = (1 << 29) // 3
MAX_CHANNELS = 4096
MAX_VALUES = 3 * MAX_PIXELS  # pixels times channels, of images that are decoded without conversion
MAX_SIDE = 1 << 20  # width or height: decoders need memory for each row, and count the bits of a row in 32 bits
# Pixels of a JPEG, counted once per scan, since a scan of a few bytes takes the time of all pixels. These are twelve
# scans of MAX_PIXELS; progressive files have about ten.
MAX_SCANNED_PIXELS = 1 << 31
MAX_SEGMENTS = 1 << 16  # of a JPEG; each takes time
MAX_SECONDS = 10.0  # CPU time of Pillow: some files need time without any pixel, such as a PNG of many color profiles

# A JPEG marker with a meaning between segments: neither a stuffed byte, nor padding, nor a restart.
MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
FRAME_MARKERS = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # of frame headers
SEQUENTIAL_FRAMES = {0xC0, 0xC1, 0xC9}  # one scan may hold all components
SCAN, END = 0xDA, 0xD9
MARKERS_WITHOUT_LENGTH = {0x01, 0xD8}  # no length and no data follow
MCU_SIDE = 32  # pixels; a scan decodes an image in blocks of up to this side
TILE_WIDTH, TILE_LENGTH = 322, 323  # TIFF tags
BIG_TIFF = 43  # version
MAX_PAGES = 2 * MAX_CHANNELS  # of a TIFF
MAX_TAGS = 4096  # of a page of a TIFF
MAX_TAG_VALUES = 1 << 20  # of all tags of a TIFF, such as the positions of its strips; a reader makes objects of them


class TimedStream(io.BytesIO):
    """Bytes of a file that a decoder can read until it has used `MAX_SECONDS` of the thread's CPU time.

    Pillow's decoders read each chunk or block of a file separately, so that a limit checked at each read ends every
    loop over pieces of a file.
    """

    def __init__(self, data: bytes):
        super().__init__(data)
        self._deadline = time.thread_time() + MAX_SECONDS

    def read(self, size: int | None = -1, /) -> bytes:
        """Return up to `size` bytes, as `io.BytesIO.read`. Raises InputError after the deadline."""
        if time.thread_time() > self._deadline:
            raise InputError(f"decoding the image takes more than the limit of {MAX_SECONDS:g} s")
        return super().read(size)


def check_pixels(width: int, height: int) -> None:
    """Raise InputError if an image has more than MAX_PIXELS, or a side of more than MAX_SIDE."""
    if width * height > MAX_PIXELS:
        raise InputError(f"the image announces {width}x{height} pixels, which exceeds the limit of {MAX_PIXELS}")
    if max(width, height) > MAX_SIDE:
        raise InputError(
            f"the image announces {width}x{height} pixels, which exceeds the limit of {MAX_SIDE} for a side"
        )


def check_tiles(image: TiffImagePlugin.TiffImageFile) -> None:
    """Raise InputError if the tiles of a TIFF have more than MAX_PIXELS; the image itself may have few pixels."""
    tiles = (image.tag_v2.get(tag, side) for tag, side in zip((TILE_WIDTH, TILE_LENGTH), image.size, strict=True))
    width, height = (-(-side // tile) * tile for tile, side in zip(tiles, image.size, strict=True))
    if width * height > MAX_PIXELS:
        raise InputError(f"the image's tiles have {width}x{height} pixels, which exceeds the limit of {MAX_PIXELS}")


def check_values(height: int, width: int, channels: int) -> None:
    """Raise InputError for an image without pixels, or one that exceeds `check_pixels`, MAX_CHANNELS or MAX_VALUES."""
    if min(height, width, channels) < 1:
        raise InputError(f"the image announces {width}x{height} pixels of {channels} channels; expected 1 or more")
    check_pixels(width, height)
    if channels > MAX_CHANNELS or height * width * channels > MAX_VALUES:
        raise InputError(
            f"the image announces {width}x{height} pixels of {channels} channels, which exceeds the limit of "
            f"{MAX_CHANNELS} channels or {MAX_VALUES} values"
        )


def check_directories(data: bytes) -> None:
    """Raise InputError if the directories of a TIFF, one for each page, are damaged or exceed a limit (TIFF 6.0, 2).

    A BigTIFF has numbers of 8 instead of 4 bytes.
    """
    order: Literal["little", "big"] = "little" if data[:2] == b"II" else "big"

    def number(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], order)

    word, entry, head = (8, 20, 8) if number(2, 2) == BIG_TIFF else (4, 12, 2)
    at, values, pages = number(word, word), 0, set[int]()
    while at:
        if at in pages or len(pages) == MAX_PAGES:
            raise InputError(f"the TIFF has more than {MAX_PAGES:,} pages, or they form a circle")
        pages.add(at)
        tags, first = number(at, head), at + head
        if not 0 < tags <= MAX_TAGS or first + tags * entry > len(data):
            raise InputError("broken image: a directory of the TIFF is damaged or cut off")
        values += sum(number(first + i * entry + 4, word) for i in range(tags))
        if values > MAX_TAG_VALUES:
            raise InputError(f"the TIFF announces more than {MAX_TAG_VALUES:,} values in its tags")
        at = number(first + tags * entry, word)


def jpeg_size(data: bytes) -> tuple[int, int]:
    """Return (height, width) from a JPEG's frame header (ITU-T T.81, B.2.2), and check the number of its scans.

    The header is parsed here because TensorFlow's function for it copies the whole file.

    Raises:
      InputError: the file has no frame header, or exceeds a limit.
    """
    segments = _segments(data)
    frame, at = next((found for found in segments if found[0] in FRAME_MARKERS), (0, len(data)))
    height, width = (int.from_bytes(data[i : i + 2], "big") if len(data) >= i + 2 else 0 for i in (at + 5, at + 7))
    if not height * width:
        raise InputError("broken image: no JPEG header")
    check_pixels(width, height)
    components = data[at + 9 : at + 10]
    _, at = next((found for found in segments if found[0] == SCAN), (0, len(data)))
    if frame in SEQUENTIAL_FRAMES and data[at + 4 : at + 5] == components:
        return height, width  # one scan of all components is the only one
    scans = 1 + sum(marker == SCAN for marker, _ in segments)
    pixels = scans * math.prod(-(-side // MCU_SIDE) * MCU_SIDE for side in (height, width))
    if pixels > MAX_SCANNED_PIXELS:
        raise InputError(f"the image has {width}x{height} pixels in {scans} scans, which exceeds the limit of time")
    return height, width


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield (marker, position of the marker) of the segments of a JPEG until its end, as libjpeg finds them.

    Raises:
      InputError: the file has more than MAX_SEGMENTS.
    """
    at = 2
    for _ in range(MAX_SEGMENTS):
        found = MARKER.search(data, at)
        if found is None:
            return
        marker, at = data[found.end() - 1], found.start()
        yield marker, at
        if marker == END:
            return
        at += 2 + (0 if marker in MARKERS_WITHOUT_LENGTH else int.from_bytes(data[at + 2 : at + 4], "big"))
    raise InputError(f"broken image: a JPEG of more than {MAX_SEGMENTS:,} segments")
