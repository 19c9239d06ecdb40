"""Training of a byte-level BPE tokenizer on text files."""

from input_pipeline.errors import InputError
from input_pipeline.optional import require
from input_pipeline.text.documents import find_files, read_documents
from input_pipeline.text.files import check_size
from input_pipeline.text.tokenizer import END_OF_TEXT

FEWEST_TOKENS = 257  # the 256 bytes and the end of text


def train_tokenizer(path: str, vocab_size: int, key: str = "text") -> str:
    """Return the tokenizer.json of a BPE tokenizer of bytes, as GPT-2's, trained on text files.

    The result is a function of the files and the arguments.

    Args:
      path: a file, folder or glob, as of data of kind "text".
      vocab_size: the number of tokens, `END_OF_TEXT` included; fewer if the text has too few pairs to merge.
      key: key of the text in the JSON object of a line.

    Raises:
      MissingDataError: the files do not exist.
      InputError: a file is invalid, the files are too large, or `vocab_size` is too small.
    """
    if vocab_size < FEWEST_TOKENS:
        raise InputError(f"a tokenizer of {vocab_size} tokens: expected {FEWEST_TOKENS}, for all bytes, or more")
    files = find_files(path)
    check_size(files, path)
    tokenizers = require("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator((document.texts[0] for document in read_documents(files, (key,))), trainer)
    content: str = tokenizer.to_str()
    return content
