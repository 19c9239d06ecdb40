"""Batches of numpy arrays from a source, prepared ahead of time by threads and yielded in order.

The content of a batch is a function of (source, preprocessing string, seed, step). It does not depend on the number of
threads or hosts, or on the step at which the stream started.
"""

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypedDict

import numpy as np

from input_pipeline.errors import InputError, MissingLibraryError, ReadingError, first_line_with_type
from input_pipeline.preprocess.builder import Preprocess
from input_pipeline.shuffle import example_at, example_rng
from input_pipeline.source import Source

logger = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]
PREFETCH = 2  # batches prepared beyond the one that is waited for
CHUNKS = 4  # pieces of a batch for each thread, so that all threads finish at about the same time


class ExampleKey(NamedTuple):
    """An example by its index in the source, and the epoch, with which the random choices of preprocessing change."""

    epoch: int
    example: int


class PartialBatch(NamedTuple):
    """A batch that is being written: its arrays, and for each row the skipped examples, and 1 if it has an example."""

    arrays: Batch
    skipped: np.ndarray
    mask: np.ndarray


class BatchRow(TypedDict):
    """The example in a row of a training batch: its epoch, its index in the source, and its location as `id`."""

    row: int
    epoch: int
    index: int
    id: str


# Returns a preprocessed example, or None if it is corrupt, and the number of examples skipped to find it.
LoadExample = Callable[[ExampleKey], tuple[Batch | None, int]]


class CorruptPolicy:
    """Policy for examples that cannot be read or preprocessed: they are errors, or they are skipped.

    A `ReadingError`, which is not the fault of an example, is never skipped.
    """

    def __init__(self, action: str = "fail", max_skipped: int = 100, hint: str = ""):
        """
        Args:
          action: "fail" or "skip".
          max_skipped: number of different examples that may be skipped before the run fails.
          hint: end of the message about an example that is not skipped.

        Raises:
          InputError: the action is unknown, or the number is negative.
        """
        if action not in ("fail", "skip") or max_skipped < 0:
            raise InputError(f"corrupt={action!r}, corrupt_max={max_skipped}: expected 'fail' or 'skip', and 0 or more")
        self.action, self.max_skipped, self.hint = action, max_skipped, hint
        self.skipped: dict[str, str] = {}  # location -> error
        self.lock = threading.Lock()

    def handle(self, location: str, error: InputError) -> None:
        """Handle a corrupt example: raise InputError, or log its location once and return so that it is skipped."""
        if self.action == "fail":
            raise InputError(f"{location}: {error}{self.hint}")
        with self.lock:
            if location not in self.skipped:
                self.skipped[location] = str(error)
                logger.warning("skipped %s: %s", location, error)
            if len(self.skipped) > self.max_skipped:
                raise InputError(
                    f"more than corrupt_max={self.max_skipped} examples are corrupt, the last is {location}: {error}"
                )


def train_batches(
    source: Source,
    pp: str,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    *,
    rows: Sequence[int] | None = None,
    corrupt: CorruptPolicy | None = None,
    threads: int | None = None,
) -> Generator[Batch, None, None]:
    """Yield the endless training stream from step `start_step`, with a new order in every epoch.

    Batches may contain the end of one epoch and the start of the next; no example is dropped. A skipped example is
    replaced by the next readable one of the source. `_skipped` is the number of examples skipped for each row.

    Args:
      source: the examples.
      pp: preprocessing string.
      batch_size: number of examples in a batch over all hosts.
      seed: seed of the order and of every random choice.
      start_step: step of the first batch; no example of earlier steps is read.
      rows: rows of the batch to prepare on this host; by default all rows.
      corrupt: by default every corrupt example is an error.
      threads: number of threads, by default one per CPU; 0 prepares each batch in the caller's thread on request.

    Raises:
      InputError: the preprocessing string or a row is invalid, or an example is corrupt and not skipped.
      ReadingError: an example could not be read for another reason.
    """
    preprocess, corrupt, size = Preprocess(pp), corrupt or CorruptPolicy(), len(source)
    rows = _checked_rows(rows, batch_size)

    def load(key: ExampleKey) -> tuple[Batch | None, int]:
        for skipped in range(size):
            found = ExampleKey(key.epoch, (key.example + skipped) % size)
            example = _read(source, preprocess, seed, found, corrupt)
            if example is not None:
                return example, skipped
        raise InputError(f"none of the {size} examples could be read")

    def plans() -> Iterator[list[ExampleKey]]:
        start = start_step * batch_size
        while True:
            yield [_training_key(source, start + row, seed) for row in rows]
            start += batch_size

    for batch in _prepare(plans(), load, len(rows), threads):
        yield {**batch.arrays, "_skipped": batch.skipped}


def eval_batches(
    source: Source,
    pp: str,
    batch_size: int,
    *,
    rows: Sequence[int] | None = None,
    corrupt: CorruptPolicy | None = None,
    threads: int | None = None,
) -> Iterator[Batch]:
    """Yield every example once, in the order of the source. The arguments are those of `train_batches`.

    The last batch is padded with zeros, and the row of a skipped example is zero. `_mask` is 1 for real examples and 0
    for the others. The number of batches is the same on every host.
    """
    preprocess, corrupt, size = Preprocess(pp), corrupt or CorruptPolicy(), len(source)
    rows = _checked_rows(rows, batch_size)

    def load(key: ExampleKey) -> tuple[Batch | None, int]:
        example = _read(source, preprocess, 0, key, corrupt)
        return example, int(example is None)

    plans = ([ExampleKey(0, start + r) for r in rows if start + r < size] for start in range(0, size, batch_size))
    for batch in _prepare(plans, load, len(rows), threads, layout_from=(ExampleKey(0, i) for i in range(size))):
        yield {**batch.arrays, "_mask": batch.mask}


def batch_ids(source: Source, batch_size: int, seed: int, step: int) -> list[BatchRow]:
    """Return the examples in the training batch of a step over all hosts, without reading them.

    `step` counts from 0, as `start_step` of `train_batches` does. `id` is the location of the example in the source.
    If the loader skips n examples for a row, the row contains the example n places after `index` instead.
    """
    if batch_size < 1 or step < 0:
        raise InputError(f"no batch at step {step} of size {batch_size}: expected a step from 0 and a size from 1")
    keys = [(row, _training_key(source, step * batch_size + row, seed)) for row in range(batch_size)]
    return [{"row": row, "epoch": epoch, "index": index, "id": source.describe(index)} for row, (epoch, index) in keys]


def _training_key(source: Source, position: int, seed: int) -> ExampleKey:
    """Return the epoch and the index of the example at a position of the endless training stream."""
    return ExampleKey(*example_at(position, len(source), seed, source.blocks))


def _read(source: Source, preprocess: Preprocess, seed: int, key: ExampleKey, corrupt: CorruptPolicy) -> Batch | None:
    """Return one example, read and preprocessed; None if it is corrupt and skipped.

    Raises:
      MissingLibraryError: as `require` raises it, without the example.
      ReadingError: the failure is not the fault of the data; the message names the example.
      InputError: the example is corrupt and not skipped.
    """
    try:
        example = preprocess(source[key.example], example_rng(seed, key.epoch, key.example))
        return {name: np.asarray(value) for name, value in example.items()}
    except MissingLibraryError:
        raise
    except ReadingError as e:
        raise ReadingError(f"{source.describe(key.example)}: {e}") from e
    except InputError as e:
        corrupt.handle(source.describe(key.example), e)
        return None
    except Exception as e:
        raise ReadingError(f"{source.describe(key.example)}: {first_line_with_type(e)}") from e


def _checked_rows(rows: Sequence[int] | None, batch_size: int) -> Sequence[int]:
    """Return the rows to prepare on this host. Raises InputError if they are not distinct rows of a batch."""
    rows = range(batch_size) if rows is None else rows
    if batch_size < 1 or not rows or min(rows) < 0 or max(rows) >= batch_size or len(set(rows)) < len(rows):
        raise InputError(f"rows {list(rows)[:6]} are not rows of a batch of {batch_size}")
    return rows


def _prepare(
    plans: Iterable[Sequence[ExampleKey]],
    load: LoadExample,
    rows: int,
    threads: int | None,
    layout_from: Iterable[ExampleKey] | None = None,
) -> Iterator[PartialBatch]:
    """Yield a batch for each plan, in order, prepared ahead of time by threads; a plan has the example of each row.

    The shapes and dtypes are those of the first readable example of `layout_from`, by default of the first plan.
    """
    if threads is None:
        threads = thread_count()
    layout: Batch | None = None
    pending: deque[tuple[PartialBatch, list[Future[None]]]] = deque()
    pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="input")
    is_finalizing = sys.is_finalizing  # when the interpreter ends, modules lose their names before open streams close
    try:
        for plan in plans:
            if layout is None:
                layout = _layout(load, plan if layout_from is None else layout_from)
            batch = _empty_batch(layout, rows, len(plan))
            if not threads:
                _fill(batch, plan, range(len(plan)), load)
                yield batch
                continue
            step = -(-len(plan) // (CHUNKS * threads)) or 1
            pieces = [range(at, min(at + step, len(plan))) for at in range(0, len(plan), step)]
            pending.append((batch, [pool.submit(_fill, batch, plan, piece, load) for piece in pieces]))
            if len(pending) > PREFETCH:
                yield _completed(*pending.popleft())
        while pending:
            yield _completed(*pending.popleft())
    finally:
        if not is_finalizing():
            pool.shutdown(cancel_futures=True)


def thread_count() -> int:
    """Return the number of threads that read by default: one per CPU that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _empty_batch(layout: Batch, rows: int, examples: int) -> PartialBatch:
    """Return a batch with the shapes and dtypes of `layout`; rows after the first `examples` are zero, others unset."""
    arrays = {key: np.empty((rows, *like.shape), like.dtype) for key, like in layout.items()}
    for array in arrays.values():
        array[examples:] = 0
    return PartialBatch(arrays, np.zeros(rows, np.int32), np.zeros(rows, np.float32))


def _completed(batch: PartialBatch, work: Sequence[Future[None]]) -> PartialBatch:
    """Wait until `work` has written all rows of a batch, and return the batch; raise the first error of any row."""
    for future in work:
        future.result()
    return batch


def _layout(load: LoadExample, keys: Iterable[ExampleKey]) -> Batch:
    """Return the first readable example, whose shapes and dtypes all other examples must have."""
    example = next((arrays for arrays, _ in map(load, keys) if arrays is not None), None)
    if example is None:
        raise InputError("none of the examples could be read")
    for key, value in example.items():
        if value.dtype.kind not in "biuf":
            raise InputError(f"{key!r} has dtype {value.dtype.name}, which cannot be batched; drop it with keep")
    return example


def _fill(batch: PartialBatch, plan: Sequence[ExampleKey], piece: range, load: LoadExample) -> None:
    """Load the examples that `plan` gives for the rows `piece`, and write them into the batch."""
    for row in piece:
        example, batch.skipped[row] = load(plan[row])
        if example is None:
            for array in batch.arrays.values():
                array[row] = 0
            continue
        batch.mask[row] = 1
        for key, array in batch.arrays.items():
            value = example.get(key)
            if value is None or value.shape != array.shape[1:] or value.dtype != array.dtype:
                found = "missing" if value is None else f"{value.dtype} of shape {value.shape}"
                raise InputError(
                    f"{key!r} is {array.dtype} of shape {array.shape[1:]} in one example and {found} in example "
                    f"{plan[row].example} of the same source; resize it, or drop it with keep"
                )
            array[row] = value
