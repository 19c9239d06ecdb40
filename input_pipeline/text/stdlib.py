"""The embedded text: the source code of the running Python's own standard library, as bytes."""

import bisect
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from input_pipeline.errors import InputError, nearest
from input_pipeline.text import packing
from input_pipeline.text.documents import held_out
from input_pipeline.text.tokenizer import BYTES, ByteTokenizer

SPLITS = ("train", "validation")
VALIDATION = 0.05  # share of the files, about
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}  # folders


class Source:
    """The library's `.py` files, one a document, in the order of their paths; see `input_pipeline.text.packing`.

    Which file is in which split follows from its path alone. Files that are empty or not UTF-8 are left out.
    """

    class_names = None
    end_of_text: int | None = BYTES
    vocab_size = ByteTokenizer.vocab_size

    def __init__(self, split: str = "train", context: int = 256):
        """
        Args:
          split: "train" or "validation".
          context: a row holds one token more.

        Raises:
          InputError: an unknown split, a context without sense, or a Python without its library's source.
        """
        if split not in SPLITS:
            raise InputError(f"stdlib has no split {split!r}; {nearest(split, SPLITS)}")
        self.context, self.token_bytes = packing.check_context(context), ByteTokenizer().token_bytes
        root = sysconfig.get_path("stdlib")
        text = bytearray()
        self.files: list[str] = []
        self.ends: list[int] = []
        for name in sorted(_python_files(root)):
            if held_out(name, VALIDATION) != (split == "validation"):
                continue
            data = _text(Path(root) / name)
            if data:
                text += data + b"\0"  # whose place the end of the document takes
                self.files.append(name)
                self.ends.append(len(text))
        if not self.files:
            raise InputError(f"{root} holds no .py files of Python's standard library")
        self.tokens = np.frombuffer(text, np.uint8).astype(np.uint16)
        self.tokens[np.array(self.ends) - 1] = BYTES

    def __len__(self) -> int:
        return packing.row_count(len(self.tokens), self.context)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return packing.row_at(self.tokens, index, self.context, self.vocab_size)

    def describe(self, index: int) -> str:
        """The file in which a row begins."""
        file = self.files[bisect.bisect_right(self.ends, index * (self.context + 1))]
        return f"Python's standard library, row {index}, {file}"

    def nbytes(self) -> int:
        """Bytes of all tokens."""
        return self.tokens.nbytes


def _python_files(root: str) -> Iterator[str]:
    """The paths of the library's `.py` files from `root` on, with slashes."""
    for folder, inside, files in os.walk(root):
        inside[:] = [name for name in inside if name not in LEFT_OUT]
        for file in files:
            if file.endswith(".py"):
                yield Path(os.path.relpath(os.path.join(folder, file), root)).as_posix()  # noqa: PTH118


def _text(path: Path) -> bytes:
    """The bytes of a file; none where it cannot be read, or is not UTF-8."""
    try:
        data = path.read_bytes()
        data.decode()
    except (OSError, UnicodeDecodeError):
        return b""
    return data
