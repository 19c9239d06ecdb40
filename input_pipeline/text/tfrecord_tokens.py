"""Rows of tokens in TFRecord files: each record is a tf.train.Example with an int64 list `input_ids`."""

import numpy as np

from input_pipeline.errors import InputError
from input_pipeline.optional import require, tensorflow
from input_pipeline.source import Example, TokenSource
from input_pipeline.text import packing
from input_pipeline.text.documents import find_files
from input_pipeline.text.tokenizer import vocabulary
from input_pipeline.tfrecord import Records, Shard, open_files

KEY = "input_ids"


class Source(Records, TokenSource):
    """Records of TFRecord files, one row each, in the order of the file names."""

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
        found = find_files(path, contains="tfrecord")
        files = open_files(map(str, found.paths))
        super().__init__([Shard(file, 0, len(file)) for file in files], found.root)
        if len(self):
            packing.check_first_row(self)

    def __getitem__(self, index: int) -> Example:
        tokens = read_input_ids(self.read(index))
        if len(tokens) != self.context + 1:
            raise InputError(
                f"a row of {len(tokens)} tokens, the config's context {self.context} needs {self.context + 1}"
            )
        return packing.padded_row(packing.check_tokens(tokens, self.vocab_size), self.context)


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
