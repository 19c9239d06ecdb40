"""Rows of tokens in TFRecord files: each record is a tf.train.Example with an int64 list `input_ids`."""

import bisect
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from input_pipeline.errors import InputError
from input_pipeline.optional import require, tensorflow
from input_pipeline.source import Example
from input_pipeline.text import packing
from input_pipeline.text.documents import find_files
from input_pipeline.text.tokenizer import vocabulary
from input_pipeline.tfrecord import TFRecordFile

KEY = "input_ids"


class Source:
    """Records of TFRecord files, one row each, in the order of the file names."""

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
          path: a file, a glob, or a folder whose files with "tfrecord" in their names are read.
          context: number of tokens in a model input; every record must have one token more.
          vocab_size: number of different tokens; by default the tokenizer's, or unknown and not checked.
          end_of_text: the token that ends a document; by default the tokenizer's, or unknown.
          tokenizer: path of the tokenizer.json that made the tokens, from which their bytes are known.

        Raises:
          MissingDataError: the files do not exist.
          InputError: a file is damaged, a record has another length, or a token is not in the vocabulary.
        """
        self.context = packing.check_context(context)
        self.vocab_size, self.end_of_text, self.token_bytes = vocabulary(tokenizer, vocab_size, end_of_text)
        with ThreadPoolExecutor(16) as threads:  # a file without index is read to find its records
            self.files = list(threads.map(TFRecordFile, map(str, find_files(path, contains="tfrecord").paths)))
        self.ends = list(itertools.accumulate(map(len, self.files)))
        if len(self):
            try:
                self[0]
            except InputError as e:
                raise InputError(f"{self.describe(0)}: {e}") from None

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Example:
        file, number = self._locate(index)
        tokens = read_input_ids(file.read(number))
        if len(tokens) != self.context + 1:
            raise InputError(
                f"a row of {len(tokens)} tokens, the config's context {self.context} needs {self.context + 1}"
            )
        return packing.padded_row(packing.check_tokens(tokens, self.vocab_size), self.context)

    def describe(self, index: int) -> str:
        """Return the file and record of a row."""
        file, number = self._locate(index)
        return f"{file.path}, record {number}"

    def nbytes(self) -> int:
        """Return the size of all records in bytes."""
        return sum(file.nbytes(0, len(file)) for file in self.files)

    def _locate(self, index: int) -> tuple[TFRecordFile, int]:
        """Return the file of a row and the number of its record. Raises IndexError if there are fewer rows."""
        part = bisect.bisect_right(self.ends, index)
        if part == len(self.files):
            raise IndexError(index)
        return self.files[part], index - (self.ends[part] - len(self.files[part]))


def read_input_ids(record: bytes) -> packing.Tokens:
    """Return the int64 list `input_ids` of a serialized tf.train.Example.

    Raises:
      InputError: the record is not a tf.train.Example, or `input_ids` is missing or has another type.
    """
    tf = tensorflow()
    try:
        features = tf.train.Example.FromString(record).features.feature
    except require("google.protobuf.message").DecodeError:
        raise InputError("the record is not a tf.train.Example") from None
    if KEY not in features:
        raise InputError(f"the record has no {KEY!r}, but {', '.join(sorted(features)) or 'nothing'}")
    kind = features[KEY].WhichOneof("kind")
    if kind not in (None, "int64_list"):  # None: TensorFlow's writer omits empty lists
        raise InputError(f"the record's {KEY!r} is a {kind}, expected an int64_list")
    return np.array(features[KEY].int64_list.value, np.int64)
