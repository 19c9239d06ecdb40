"""Data sources: the interface of every kind of data, `open_source`, and selection of examples, such as folds."""

import abc
import functools
import hashlib
import importlib
import logging
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from input_pipeline import memory
from input_pipeline.errors import InputError, check_arguments, nearest
from input_pipeline.files import OpenedFiles
from input_pipeline.preprocess import keys
from input_pipeline.shuffle import Blocks

logger = logging.getLogger(__name__)
Example = keys.Example
FOLD = re.compile(r"(all but )?fold (\d{1,9}) of (\d{1,9})")

# The module of each kind of data. It is imported when the kind is opened, because most need an optional library.
KINDS = {
    "answers": "input_pipeline.text.answers",
    "digits": "input_pipeline.images.digits",
    "folder": "input_pipeline.images.folder",
    "input_ids": "input_pipeline.text.tfrecord_tokens",
    "manifest": "input_pipeline.images.manifest",
    "megatron": "input_pipeline.text.megatron",
    "parquet": "input_pipeline.images.parquet",
    "scenes": "input_pipeline.images.scenes",
    "spans": "input_pipeline.text.targets",
    "stdlib": "input_pipeline.text.stdlib",
    "synthetic": "input_pipeline.text.synthetic",
    "text": "input_pipeline.text.files",
    "tfds": "input_pipeline.images.tfds",
}


class Source(abc.ABC):
    """Random access to the examples of a dataset split; base class of every kind of data.

    Fields:
      class_names: names of the labels, or None if the data has no named labels.
      opened: the files of the source, which identify its data, or None if it reads none.
      blocks: blocks of examples that are read together, which determine the order of training, or None.
      labels: the class of each example, int32 of shape N, or int8 of shape N C, 1 for the classes of an example and 0
        for others; -1 is an unknown label. None if the source would have to read its images to know them.
    """

    class_names: tuple[str, ...] | None = None
    opened: OpenedFiles | None = None
    blocks: Blocks | None = None
    labels: np.ndarray | None = None

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of examples."""

    @abc.abstractmethod
    def __getitem__(self, index: int) -> Example:
        """Return an example as it is stored; images stay encoded."""

    @abc.abstractmethod
    def describe(self, index: int) -> str:
        """Return the location of an example, such as its file, for error messages."""

    def nbytes(self) -> int:
        """Return the size in bytes of all examples as they are stored, by default that of the files."""
        return 0 if self.opened is None else self.opened.nbytes()

    def name(self, index: int) -> str:
        """Return a name of an example, by which it is assigned to a fold; files have their relative paths."""
        return str(index)


class TokenSource(Source):
    """A source of token rows: `tokens`, int32 of shape (context + 1,), and `is_target`, bool of the same shape.

    A source of in-context examples, whose targets are answers, also has `task`, int32, the number of a row's task, and
    `shots`, int32 of shape (context + 1,), the number of examples before the one that a token belongs to.

    Fields:
      context: number of tokens in a model input; a row has one token more.
      vocab_size: number of different tokens, or None if it is unknown.
      end_of_text: the token that ends a document, or None if it is unknown.
      token_bytes: bytes of text of each token, int32 of shape (vocab_size,), or None if they are unknown.
      task_names: names of the tasks, in the order of the numbers in `task`; empty for other text.
    """

    context: int
    vocab_size: int | None = None
    end_of_text: int | None = None
    token_bytes: np.ndarray | None = None
    task_names: tuple[str, ...] = ()


def open_source(
    kind: str,
    *,
    part: str | Sequence[float] | None = None,
    limit: int | None = None,
    cache: bool = False,
    **options: object,
) -> Source:
    """Open a data source.

    Args:
      kind: one of KINDS. "folder" is "parquet" if the folder holds Parquet files and no folders of images.
      part: use only the examples between two fractions, such as (0, 0.9) for the first nine tenths; or only a fold,
        "fold 2 of 5", or the others, "all but fold 2 of 5". Folds do not depend on the order of image files, and are
        stratified by class if the labels are known without reading images.
      limit: use only this many examples, the first ones. The examples of a folder are sorted by class.
      cache: keep every example in memory after it was read, as it is stored. The required memory is logged.
      **options: arguments of the `Source` class of the kind.

    Raises:
      MissingDataError: the data does not exist.
      InputError: the kind or an option is unknown, the data is invalid, or `cache` needs more memory than is
        available.
    """
    if kind not in KINDS:
        raise InputError(f"unknown kind of data {kind!r}; {nearest(kind, KINDS)}")
    if kind == "folder" and (found := importlib.import_module(KINDS["parquet"]).options_of_folder(options)):
        kind, options = "parquet", found
    module = importlib.import_module(KINDS[kind])
    check_arguments(module.Source, (), options, f"data of kind {kind!r}", also=("part", "limit", "cache"))
    source: Source = module.Source(**options)
    if limit is not None and limit < 1:
        raise InputError(f"data of kind {kind!r}: limit={limit} should be 1 or more")
    if not len(source):
        raise InputError(f"data of kind {kind!r} with {options} holds no examples")
    rows: range | np.ndarray = range(len(source))
    if isinstance(part, str):
        if isinstance(source, TokenSource):
            reason = "rows of text have parts of the same documents; give two fractions"
            raise InputError(f"data of kind {kind!r}: part={part!r} is for images, because {reason}")
        if options.get("val_fraction") is not None:
            reason = "folds cover all images: omit val_fraction and set split=None, or train with --folds"
            raise InputError(f"data of kind {kind!r}: part={part!r} and val_fraction hold out images twice; {reason}")
        names = [source.name(i) for i in range(len(source))]
        rows = rows_of_fold(part, names, source.labels, f"data of kind {kind!r}")
    elif part is not None:
        rows = _rows_of_part(part, source, f"data of kind {kind!r}")
    if not cache and len(rows[:limit]) == len(source):
        return source
    if isinstance(source, TokenSource):
        return _TokenSelection(source, rows[:limit], cache)
    return _Selection(source, rows[:limit], cache)


class _Selection(Source):
    """A source of some examples of another source; `rows` are their increasing indices.

    With `cache`, every example stays in memory after it was read.
    """

    def __init__(self, source: Source, rows: range | np.ndarray, cache: bool = False):
        self.source, self.rows = source, rows
        self.class_names, self.opened = source.class_names, source.opened
        self.examples: dict[int, Example] | None = None
        if cache:
            size, available = f"{self.nbytes() / 1e9:.1f} GB of stored examples", memory.available()
            if available is not None and self.nbytes() > available:
                raise InputError(
                    f"cache=True would keep {size} in memory, but only {available / 1e9:.1f} GB are available"
                )
            logger.info("keeping %s in memory as they are read", size)
            self.examples = {}

    @functools.cached_property
    def blocks(self) -> Blocks | None:  # type: ignore[override]  # of the whole source, which may warn, when it trains
        return None if self.source.blocks is None else self.source.blocks.part(self.rows)

    @functools.cached_property
    def labels(self) -> np.ndarray | None:  # type: ignore[override]
        return None if self.source.labels is None else self.source.labels[np.asarray(self.rows)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        row = int(self.rows[index])
        if self.examples is None:
            return self.source[row]
        if row not in self.examples:
            self.examples[row] = self.source[row]
        return self.examples[row]

    def describe(self, index: int) -> str:
        return self.source.describe(int(self.rows[index]))

    def nbytes(self) -> int:
        return self.source.nbytes() * len(self.rows) // len(self.source)


class _TokenSelection(_Selection, TokenSource):
    """Some rows of a source of tokens, with its properties."""

    def __init__(self, source: TokenSource, rows: range | np.ndarray, cache: bool = False):
        super().__init__(source, rows, cache)
        self.context, self.vocab_size = source.context, source.vocab_size
        self.end_of_text, self.token_bytes = source.end_of_text, source.token_bytes
        self.task_names = source.task_names


def rows_of_fold(part: str, names: Sequence[str], labels: np.ndarray | None, what: str) -> Int64[np.ndarray, " rows"]:
    """Return the increasing indices of the examples in a fold, or in all other folds.

    The folds are disjoint and complete, and their sizes differ by at most one, as do their numbers of examples of each
    class. The examples of each class are ordered by a hash of their names, the classes follow each other, and the folds
    take turns. A fold therefore depends on names and labels, and not on the order of the examples.

    Args:
      part: "fold I of K" or "all but fold I of K", with I from 1 to K.
      names: a name of each example.
      labels: the class of each example, N, or a row for each, N C, of which equal rows count as one class. None: all
        examples are of one class.
      what: the subject of error messages.

    Raises:
      InputError: `part` is not of this form, or there are fewer examples than folds.
    """
    match = FOLD.fullmatch(part)
    number, folds = (int(match[2]), int(match[3])) if match else (0, 0)
    if not 1 <= number <= folds or folds < 2:
        raise InputError(
            f'{what}: part={part!r} should be like "fold 2 of 5" or "all but fold 2 of 5", or two fractions'
        )
    if folds > len(names):
        raise InputError(
            f"{what}: part={part!r} of {len(names)} example(s): expected at most as many folds as examples"
        )
    classes = np.zeros(len(names), np.int64) if labels is None else labels
    if classes.ndim > 1:
        classes = np.unique(classes, axis=0, return_inverse=True)[1].reshape(-1)
    hashes = [hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest() for name in names]
    order = np.lexsort((np.frombuffer(b"".join(hashes), ">u8").astype(np.uint64), classes))
    fold = np.empty(len(names), np.int64)
    fold[order] = np.arange(len(names)) % folds
    inside = fold == number - 1
    return np.flatnonzero(~inside if match and match[1] else inside)


def _rows_of_part(part: Sequence[float], source: Source, what: str) -> range:
    """Return the indices between two fractions of the number of examples; adjacent parts do not overlap.

    Raises InputError if the part is empty, or has no example of some classes because the examples are sorted by class.
    """
    examples, labels = len(source), source.labels
    if len(part) != 2 or not 0 <= part[0] < part[1] <= 1:
        raise InputError(f"{what}: part={part} should be two increasing fractions from 0 to 1")
    rows = range(round(part[0] * examples), round(part[1] * examples))
    if not rows:
        raise InputError(
            f"{what}: part={tuple(part)} of {examples} example(s) is empty; give another fraction, or, for text, a"
            " shorter context"
        )
    if labels is not None and labels.ndim == 1 and _is_sorted(labels):
        found, classes = len(np.unique(labels[rows])), len(np.unique(labels))
        if found < classes:
            raise InputError(
                f"{what}: part={tuple(part)} has {found} of {classes} classes, because the examples are sorted by"
                ' class; use a fold, such as part="all but fold 1 of 5"'
            )
    return rows


def _is_sorted(labels: np.ndarray) -> bool:
    """Return True if examples of a class are together, in each file, in any order of the classes.

    Neighbors then differ in less than half as many places as n examples in random order, n · (1 - Σ_c p_c²).
    """
    shares = np.unique(labels, return_counts=True)[1] / len(labels)
    changes = np.count_nonzero(labels[1:] != labels[:-1])
    return bool((labels[:-1] <= labels[1:]).all() or changes <= len(labels) * (1 - np.sum(shares**2)) / 2)
