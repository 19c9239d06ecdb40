"""Embedded text: the source code of the running Python's standard library and packages, as bytes."""

import bisect
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from input_pipeline.errors import InputError, check_split
from input_pipeline.files import OpenedFiles
from input_pipeline.text import packing
from input_pipeline.text.documents import in_validation
from input_pipeline.text.tokenizer import BYTE_END_OF_TEXT, ByteTokenizer

SPLITS = ("train", "validation")
VALIDATION_FRACTION = 0.05  # approximate fraction of the files, and of the packages
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Source(packing.StreamSource):
    """The `.py` files of Python's standard library, packed into rows as `input_pipeline.text.packing` describes.

    A file is one document. Files are in the order of their paths, and the split of a file follows from its path. With
    `packages`, those of the installed packages follow; the split of a package follows from its name, so that it is in
    one split as a whole. Files that are empty or not UTF-8 are skipped.
    """

    end_of_text = BYTE_END_OF_TEXT
    vocab_size = ByteTokenizer.vocab_size

    def __init__(self, split: str = "train", context: int = 256, packages: bool = False):
        """
        Args:
          split: "train" or "validation".
          context: number of tokens in a model input; a row has one token more.
          packages: also read the installed packages.

        Raises:
          InputError: the split is unknown, the context is not positive, or this Python has no source code of its
            library.
        """
        check_split("stdlib", split, SPLITS)
        self.context, self.token_bytes = packing.check_context(context), ByteTokenizer().token_bytes
        root = sysconfig.get_path("stdlib")
        documents = [(name, f"{root}/{name}", name) for name in sorted(_python_files(root))]
        if not documents:
            raise InputError(f"{root} has no .py files of Python's standard library")
        if packages:
            folder = sysconfig.get_path("purelib")
            names = sorted(_python_files(folder))
            documents += [(name.partition("/")[0], f"{folder}/{name}", f"packages/{name}") for name in names]
        text = bytearray()
        self.files: list[str] = []
        self.ends: list[int] = []
        paths: list[str] = []
        for key, path, name in documents:
            if in_validation(key, VALIDATION_FRACTION) != (split == "validation"):
                continue
            data = _read_text(Path(path))
            if data:
                text += data + b"\0"  # replaced by the end of text below
                self.files.append(name)
                self.ends.append(len(text))
                paths.append(path)
        self.opened = OpenedFiles(paths, root)
        self.tokens = np.frombuffer(text, np.uint8).astype(np.uint16)
        self.tokens[np.array(self.ends) - 1] = BYTE_END_OF_TEXT

    def describe(self, index: int) -> str:
        """Return the number of a row and the file in which it starts."""
        file = self.files[bisect.bisect_right(self.ends, index * (self.context + 1))]
        return f"Python's standard library, row {index}, {file}"


def _python_files(root: str) -> Iterator[str]:
    """Yield the paths of the library's `.py` files relative to `root`, with slashes."""
    for folder, inside, files in os.walk(root):
        inside[:] = [name for name in inside if name not in EXCLUDED_FOLDERS]
        for file in files:
            if file.endswith(".py"):
                yield Path(os.path.relpath(os.path.join(folder, file), root)).as_posix()  # noqa: PTH118


def _read_text(path: Path) -> bytes:
    """Return the bytes of a file, or no bytes if it is not readable or not UTF-8."""
    try:
        data = path.read_bytes()
        data.decode()
    except (OSError, UnicodeDecodeError):
        return b""
    return data
