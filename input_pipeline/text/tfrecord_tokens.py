"""Rows of tokens in TFRecord files: a tf.train.Example each, with an int64 list `input_ids`."""

import bisect
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from input_pipeline.errors import InputError
from input_pipeline.text import packing
from input_pipeline.text.documents import find_files
from input_pipeline.text.tokenizer import vocabulary
from input_pipeline.tfrecord import TFRecordFile

KEY = b"input_ids"
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # protobuf's wire types


class Source:
    """The records of all files, in the order of their names; see `input_pipeline.text.packing`."""

    class_names = None

    def __init__(
        self,
        path: str,
        context: int,
        vocab_size: int | None = None,
        end_of_text: int | None = None,
        tokenizer: str | None = None,
    ):
        """
        Args:
          path: a file, a folder, whose files with "tfrecord" in their names are read, or a glob.
          context: a record has to hold one token more.
          vocab_size: all tokens are less than this; by default the tokenizer's, or else unknown and not checked.
          end_of_text: the token that ends a document; by default the tokenizer's, or else unknown.
          tokenizer: the tokenizer.json the tokens come from, for their bytes.

        Raises:
          MissingDataError: no such files.
          InputError: a damaged file, records of another length, or a token that is not in the vocabulary.
        """
        self.context = packing.check_context(context)
        self.vocab_size, self.end_of_text, self.token_bytes = vocabulary(tokenizer, vocab_size, end_of_text)
        with ThreadPoolExecutor(16) as threads:  # a new file's offsets are found by reading it
            self.files = list(threads.map(TFRecordFile, map(str, find_files(path, contains="tfrecord").paths)))
        self.ends = list(itertools.accumulate(map(len, self.files)))
        if len(self):
            try:
                self[0]
            except InputError as e:
                raise InputError(f"{self.describe(0)}: {e}") from None

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, number = self._place(index)
        tokens = read_input_ids(file.read(number))
        if len(tokens) != self.context + 1:
            raise InputError(
                f"a row of {len(tokens)} tokens, the config's context {self.context} needs {self.context + 1}"
            )
        return packing.filled_row(packing.checked(tokens, self.vocab_size), self.context)

    def describe(self, index: int) -> str:
        """The file and record of a row."""
        file, number = self._place(index)
        return f"{file.path}, record {number}"

    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(file.nbytes(0, len(file)) for file in self.files)

    def _place(self, index: int) -> tuple[TFRecordFile, int]:
        part = bisect.bisect_right(self.ends, index)
        if part == len(self.files):
            raise IndexError(index)
        return self.files[part], index - (self.ends[part] - len(self.files[part]))


def read_input_ids(record: bytes) -> np.ndarray:
    """The int64 list `input_ids` of a serialised tf.train.Example.

    Example, Features and the map's entries are nested messages, each the first field of the one before; an entry is a
    key (1) and a Feature (2), whose third field is the list of int64. Raises InputError for anything else.
    """
    names = []
    for features in _inside(record, 1):
        for entry in _inside(features, 1):
            name = b"".join(_inside(entry, 1))
            if name == KEY:
                lists = [found for feature in _inside(entry, 2) for found in _inside(feature, 3)]
                return np.concatenate(
                    [np.zeros(0, np.int64), *(_varints(v) for found in lists for v in _values(found))]
                )
            names.append(name.decode(errors="replace"))
    raise InputError(f"the record has no {KEY.decode()!r}, but {', '.join(names) or 'nothing'}")


def _inside(message: bytes, field: int) -> Iterator[bytes]:
    """The contents of a field of strings or messages, however often it occurs."""
    return (content for number, kind, content in _fields(message) if (number, kind) == (field, BYTES))


def _values(message: bytes) -> Iterator[bytes]:
    """The encoded integers of an Int64List: packed, as writers do it, or each a field of its own."""
    return (content for number, kind, content in _fields(message) if number == 1 and kind in (VARINT, BYTES))


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(number, wire type, content) of each field of a protobuf message. Raises InputError where it is none."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind, start = tag & 7, at
        if kind == BYTES:
            length, start = _varint(message, at)
            at = start + length
        elif kind == VARINT:
            _, at = _varint(message, at)
        else:
            at += {FIXED64: 8, FIXED32: 4}.get(kind, len(message) + 1)
        if at > len(message):
            raise InputError("the record is no tf.train.Example")
        yield tag >> 3, kind, message[start:at]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """An integer at a place, seven bits a byte, and where it ends."""
    value = shift = 0
    while at < len(message) and shift < 70:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
    raise InputError("the record is no tf.train.Example")


def _varints(data: bytes) -> np.ndarray:
    """All integers of a packed list, int64: of each, the bytes up to the first below 128 hold seven bits each."""
    encoded = np.frombuffer(data, np.uint8)
    last = np.flatnonzero(encoded < 128)
    if len(encoded) and (not len(last) or last[-1] != len(encoded) - 1):
        raise InputError("the record's input_ids end inside a number")
    if not len(last):
        return np.zeros(0, np.int64)
    first = np.concatenate([[0], last[:-1] + 1])
    place = np.arange(len(encoded)) - np.repeat(first, last - first + 1)
    if place.max() > 9:
        raise InputError("the record's input_ids hold a number of more than 64 bits")
    bits = (encoded & 127).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.add.reduceat(bits, first).view(np.int64)
