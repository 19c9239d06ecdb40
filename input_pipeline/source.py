"""Data sources: the interface of every kind of data, and `open_source`, which opens one by its kind."""

import functools
import importlib
import logging
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from input_pipeline import memory
from input_pipeline.errors import InputError, check_arguments, nearest
from input_pipeline.files import OpenedFiles
from input_pipeline.folds import rows_of_fold
from input_pipeline.shuffle import Blocks

logger = logging.getLogger(__name__)

# An example maps names to arrays, scalars and encoded bytes. Any, because each kind of data has its own value types.
Example = dict[str, Any]

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


@runtime_checkable
class Source(Protocol):
    """Random access to the examples of a dataset split.

    A source that reads several examples together also has the attribute `blocks`; see `blocks_of`. A source of files
    has the attribute `opened`; see `files_of`. A source that knows its labels without reading images has the attribute
    `labels`; see `labels_of`. A source whose examples have names that do not depend on their order, such as relative
    paths, has the method `name(index)`.
    """

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the labels, or None if the data has no named labels."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def __getitem__(self, index: int) -> Example:
        """Return an example as it is stored; images stay encoded."""

    def describe(self, index: int) -> str:
        """Return the location of an example, such as its file, for error messages."""

    def nbytes(self) -> int:
        """Return the size in bytes of all examples as they are stored."""


@runtime_checkable
class TokenSource(Source, Protocol):
    """A source of token rows: `tokens`, int32 of shape (context + 1,), and `is_target`, bool of the same shape."""

    @property
    def context(self) -> int:
        """Number of tokens in a model input; a row has one token more."""

    @property
    def vocab_size(self) -> int | None:
        """Number of different tokens, or None if it is unknown."""

    @property
    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text of each token, int32 of shape (vocab_size,), or None if they are unknown."""

    @property
    def end_of_text(self) -> int | None:
        """The token that ends a document, or None if it is unknown."""


@runtime_checkable
class TaskSource(TokenSource, Protocol):
    """A source of token rows of in-context examples, whose targets are answers.

    A row also has `task`, int32, the number of its task, and `shots`, int32 of shape (context + 1,), the number of
    examples before the one that a token belongs to.
    """

    @property
    def task_names(self) -> tuple[str, ...]:
        """Names of the tasks, in the order of the numbers in `task`."""


def blocks_of(source: Source) -> Blocks | None:
    """Return the blocks of examples that a source reads together, or None; they determine the order of training."""
    return getattr(source, "blocks", None)


def files_of(source: Source) -> OpenedFiles | None:
    """Return the files of a source, which identify its data, or None if it reads none."""
    return getattr(source, "opened", None)


def labels_of(source: Source) -> np.ndarray | None:
    """Return the labels of all examples, or None if the source would have to read its images to know them.

    They are the class of each example, int32 of shape N, or int8 of shape N C, 1 for the classes of an example and 0
    for others. -1 is an unknown label.
    """
    labels: np.ndarray | None = getattr(source, "labels", None)
    return labels


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
        rows = _rows_of_fold(part, source, f"data of kind {kind!r}")
    elif part is not None:
        rows = _rows_of_part(part, source, f"data of kind {kind!r}")
    return _Selection(source, rows[:limit], cache) if cache or len(rows[:limit]) < len(source) else source


class _Selection:
    """A source of some examples of another source, with its attributes of `TokenSource` if it has them.

    `rows` are their increasing indices. With `cache`, every example stays in memory after it was read.
    """

    def __init__(self, source: Source, rows: range | np.ndarray, cache: bool = False):
        self.source, self.rows = source, rows
        self.class_names, self.opened = source.class_names, files_of(source)
        for name in ("context", "vocab_size", "token_bytes", "end_of_text", "task_names"):
            if hasattr(source, name):
                setattr(self, name, getattr(source, name))
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
    def blocks(self) -> Blocks | None:
        blocks = blocks_of(self.source)
        return None if blocks is None else blocks.part(self.rows)

    @functools.cached_property
    def labels(self) -> np.ndarray | None:
        labels = labels_of(self.source)
        return None if labels is None else labels[np.asarray(self.rows)]

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


def _rows_of_fold(part: str, source: Source, what: str) -> np.ndarray:
    """Return the indices of a fold of a source; see `rows_of_fold`. Raises InputError for text."""
    if isinstance(source, TokenSource):
        raise InputError(
            f"{what}: part={part!r} is for images, because rows of text have parts of the same documents; give two"
            " fractions"
        )
    name = getattr(source, "name", str)
    return rows_of_fold(part, [name(i) for i in range(len(source))], labels_of(source), what)


def _rows_of_part(part: Sequence[float], source: Source, what: str) -> range:
    """Return the indices between two fractions of the number of examples; adjacent parts do not overlap.

    Raises:
      InputError: these are not two fractions, there is no example between them, or the examples are sorted by class, so
        that some classes are not in this part.
    """
    examples, labels = len(source), labels_of(source)
    if len(part) != 2 or not 0 <= part[0] < part[1] <= 1:
        raise InputError(f"{what}: part={part} should be two increasing fractions from 0 to 1")
    rows = range(round(part[0] * examples), round(part[1] * examples))
    if not rows:
        raise InputError(
            f"{what}: part={tuple(part)} of {examples} example(s) is empty; give another fraction, or, for text, a"
            " shorter context"
        )
    if labels is not None and labels.ndim == 1 and (labels[:-1] <= labels[1:]).all():
        found, classes = len({*labels[rows].tolist()}), len({*labels.tolist()})
        if found < classes:
            raise InputError(
                f"{what}: part={tuple(part)} has {found} of {classes} classes, because the examples are sorted by"
                ' class; use a fold, such as part="all but fold 1 of 5"'
            )
    return rows
