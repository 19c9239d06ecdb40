"""Builders of hostile files: small files that announce sizes which they do not have."""

import json
import struct
import zlib

import corpora
import image_datasets
import pytest
from PIL import Image

from input_pipeline import tfrecord

SIDE = 60_000  # pixels; an image of this side has 3.6 gigapixels


def riff(kind, content):
    """A WebP file of one chunk."""
    chunk = kind + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def gif(screen, frame):
    """A GIF file of three pixels that announces a screen and one frame of these sides."""
    picture = b"," + struct.pack("<HHHH", 0, 0, frame, frame) + b"\0\2\2\x4c\1\0;"
    return b"GIF89a" + struct.pack("<HH", screen, screen) + b"\x80\0\0" + bytes(6) + picture


def tiff(side, tile=None):
    """A TIFF file of one deflated strip, or of tiles whose width and length differ from the image's side."""
    place = (322, 323, 324, 325) if tile else (None, 278, 273, 279)
    tags = {256: side, 257: side, 258: 8, 259: 8, 262: 1, 277: 1}
    tags |= dict(zip(place, (*(tile or (None, side)), 200, 64), strict=True))
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted((t, v) for t, v in tags.items() if t)]
    head = b"II*\0" + struct.pack("<IH", 8, len(entries)) + b"".join(entries) + bytes(4)
    return head.ljust(200, b"\0") + zlib.compress(bytes(1000)).ljust(64, b"\0")


def avif(side):
    """An AVIF file of 16×16 pixels that announces a side."""
    file = image_datasets.encoded(Image.new("RGB", (16, 16)), "AVIF")
    at = file.index(b"ispe") + 8  # after the name, version and flags
    return file[:at] + struct.pack(">II", side, side) + file[at + 8 :]


def masked_jpeg():
    """A JPEG file of gigapixels with a second frame header that announces 8×8 pixels.

    The marker FF 01 has no length. A reader that expects one takes the following marker for the length, skips that many
    bytes and finds the second frame header.
    """
    masked = bytearray((b"\xff\xd8\xff\x01" + image_datasets.bomb_jpeg(65_000)[2:]).ljust(70_000, b"\0"))
    offset = 4 + int.from_bytes(masked[4:6], "big")
    masked[offset : offset + 19] = b"\xff\xc0\0\x11\x08\0\x08\0\x08\x03" + bytes(9)
    return bytes(masked)


def scans_jpeg(side, scans, between=b""):
    """A progressive JPEG that announces a side, and repeats its last scan after some bytes."""
    file = image_datasets.jpeg(0, progressive=True)
    frame, last = file.index(b"\xff\xc2") + 5, file.rindex(b"\xff\xda")
    head = file[:frame] + struct.pack(">HH", side, side) + file[frame + 4 : last]
    return head + (between + file[last:-2]) * (scans - file.count(b"\xff\xda") + 1) + b"\xff\xd9"


BOMBS = {
    "png": image_datasets.bomb_png(SIDE, SIDE),
    "png of one row": image_datasets.bomb_png(89_478_479, 1),
    "jpeg": image_datasets.bomb_jpeg(65_000),
    "masked jpeg": masked_jpeg(),
    "gif": gif(SIDE, SIDE),
    "gif of a larger frame": gif(8, SIDE),
    "bmp": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, SIDE, SIDE, 1, 24, 0, 0, 0, 0, 0, 0) + bytes(50),
    "tiff": tiff(SIDE),
    "tiff of a larger tile": tiff(8, (SIDE, SIDE)),
    "tiff of long tiles": tiff(12_000, (16, 20_000)),
    "avif": avif(SIDE),
    "avif of many pixels": avif(16_000),
    "webp": riff(b"VP8 ", b"\x10\0\0\x9d\x01\x2a" + struct.pack("<HH", 16383, 16383) + bytes(20)),
    "lossless webp": riff(b"VP8L", b"\x2f" + struct.pack("<I", 16383 << 14 | 16383) + bytes(20)),
    "extended webp": riff(b"VP8X", bytes(4) + (SIDE - 1).to_bytes(3, "little") * 2),
}


def zstd_frame(content, times=1, window_log=None):
    """A zstd frame that repeats some bytes and does not announce its length."""
    zstandard = pytest.importorskip("zstandard")
    options = {"window_log": window_log} if window_log else {}
    parameters = zstandard.ZstdCompressionParameters.from_level(1, **options)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return b"".join(compressor.compress(content) for _ in range(times)) + compressor.flush()


def write_tfrecord(path, length, content=b""):
    """Write a TFRecord file whose only record announces a length, with a valid checksum of that length."""
    head = struct.pack("<Q", length)
    path.write_bytes(head + tfrecord._checksum(head) + content)
    return path


def split_at(pattern):
    """A pre-tokenizer of a tokenizer.json that splits a text at a regular expression."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replacements(key, *factors):
    """A sequence of parts of a tokenizer.json that each repeat the letter a, under a key such as "decoders"."""
    parts = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * factor} for factor in factors]
    return {"type": "Sequence", key: parts}


def tokenizer_file(path, **parts):
    """Train a tokenizer of bytes, write its tokenizer.json with some parts replaced, and return the path."""
    pytest.importorskip("tokenizers")
    content = json.loads(corpora.train_tokenizer(path).read_text())
    path.write_text(json.dumps(content | parts))
    return path
