"""Opening data: what every kind of source offers, and how one is found by its kind."""

import importlib
import sys
from typing import Any, Protocol, runtime_checkable

from input_pipeline import memory
from input_pipeline.errors import InputError, check_arguments, nearest

# The module of each kind of data, imported when it is opened: most need a library of an extra.
KINDS = {
    "digits": "input_pipeline.images.digits",
    "folder": "input_pipeline.images.folder",
    "input_ids": "input_pipeline.text.tfrecord_tokens",
    "megatron": "input_pipeline.text.megatron",
    "spans": "input_pipeline.text.targets",
    "stdlib": "input_pipeline.text.stdlib",
    "text": "input_pipeline.text.files",
    "tfds": "input_pipeline.images.tfds",
}


@runtime_checkable
class Source(Protocol):
    """What every kind of data offers: random access to examples, each a dict of arrays and encoded images.

    `class_names` are the names of the labels, `nbytes()` is the size of all examples as they are stored. What a kind
    offers beyond that, such as the `context` of tokens, is there with `limit` and `cache` as well.
    """

    @property
    def class_names(self) -> tuple[str, ...] | None: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def describe(self, index: int) -> str: ...

    def nbytes(self) -> int: ...


def open_source(kind: str, *, limit: int | None = None, cache: bool = False, **options: Any) -> Source:
    """Opens a source of data.

    Args:
      kind: one of KINDS.
      limit: take only the first so many examples; of a folder, those of its first classes.
      cache: keep every example, as stored, in memory once it was read. The size is said beforehand, and refused
        where the machine has less memory to spare.
      **options: arguments of the kind's own `Source`.

    Raises:
      MissingDataError: the data is not there.
      InputError: an unknown kind or option, or data that is unusable.
    """
    if kind not in KINDS:
        raise InputError(f"unknown kind of data {kind!r}; {nearest(kind, KINDS)}")
    module = importlib.import_module(KINDS[kind])
    check_arguments(module.Source, (), options, f"data of kind {kind!r}", also=("limit", "cache"))
    opened: Source = module.Source(**options)
    if limit is not None and limit < 1:
        raise InputError(f"data of kind {kind!r}: limit={limit} should be 1 or more")
    if not len(opened):
        raise InputError(f"data of kind {kind!r} with {options} holds no examples")
    if limit is not None and limit < len(opened):
        opened = _First(opened, limit)
    return _Cached(opened) if cache else opened


class _First:
    """The first examples of a source."""

    def __init__(self, source: Source, limit: int):
        self.source, self.limit = source, limit
        self.class_names = source.class_names

    def __getattr__(self, name: str) -> Any:
        return _inner(self, name)

    def __len__(self) -> int:
        return self.limit

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.source[index]

    def describe(self, index: int) -> str:
        return self.source.describe(index)

    def nbytes(self) -> int:
        return self.source.nbytes() * self.limit // len(self.source)


class _Cached:
    """A source whose examples stay in memory once read."""

    def __init__(self, source: Source):
        self.source, self.class_names = source, source.class_names
        available, nbytes = memory.available(), source.nbytes()
        size = f"{nbytes / 1e9:.1f} GB of stored examples"
        if available is not None and nbytes > available:
            raise InputError(f"cache=True would keep {size} in memory, of which {available / 1e9:.1f} GB are left")
        print(f"keeping {size} in memory, as they are read", file=sys.stderr)
        self.examples: dict[int, dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return _inner(self, name)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.examples.get(index)
        if example is None:
            example = self.examples[index] = self.source[index]
        return example

    def describe(self, index: int) -> str:
        return self.source.describe(index)

    def nbytes(self) -> int:
        return self.source.nbytes()


def _inner(wrapper: Any, name: str) -> Any:
    """An attribute of the source inside a wrapper, which has none of that name itself."""
    if name == "source":  # while a wrapper is unpickled, it has no source yet
        raise AttributeError(name)
    return getattr(wrapper.source, name)
