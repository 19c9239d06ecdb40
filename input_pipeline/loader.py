"""From a source to batches of numpy arrays, prepared by threads ahead of time and handed out in order.

What a batch holds is a function of (source, preprocessing, seed, step): not of how many threads or hosts work on
it, nor of where the stream began.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from input_pipeline.errors import InputError, ReadingError, with_type
from input_pipeline.preprocess.builder import Preprocess
from input_pipeline.shuffle import example_at, example_rng
from input_pipeline.source import Source

Batch = dict[str, np.ndarray]


class Made(NamedTuple):
    """A batch while its rows are filled: its arrays, the examples skipped for each row, which rows hold an example."""

    arrays: Batch
    skipped: np.ndarray
    mask: np.ndarray


Place = tuple[int, int]  # epoch and example index
Load = Callable[[Place], tuple[Batch | None, int]]  # -> the example, and how many were skipped for it
PREFETCH = 2  # batches prepared beyond the one that is waited for
CHUNKS = 4  # pieces of a batch for each thread, so that all finish at about the same time

_reading: dict[int, tuple[str, Source, int, float]] = {}  # by thread: its name, source, example, and since when


class Corrupt:
    """What becomes of examples that cannot be read or preprocessed: "fail", or "skip" up to `most` of them.

    A `ReadingError`, for which the example is not to blame, is never skipped.
    """

    def __init__(self, policy: str = "fail", most: int = 100):
        if policy not in ("fail", "skip") or most < 0:
            raise InputError(f"corrupt={policy!r}, corrupt_max={most}: expected 'fail' or 'skip', and 0 or more")
        self.policy, self.most = policy, most
        self.found: dict[str, str] = {}
        self.lock = threading.Lock()

    def note(self, where: str, error: InputError) -> None:
        """Raises InputError, or tells of the example, once, on stderr."""
        if self.policy == "fail":
            raise InputError(f"{where}: {error}")
        with self.lock:
            if where not in self.found:
                self.found[where] = str(error)
                print(f"skipped {where}: {error}", file=sys.stderr)
            if len(self.found) > self.most:
                raise InputError(f"more than corrupt_max={self.most} examples are corrupt, the last {where}: {error}")


def train_batches(
    source: Source,
    pp: str,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    *,
    rows: Sequence[int] | None = None,
    corrupt: Corrupt | None = None,
    threads: int | None = None,
) -> Generator[Batch, None, None]:
    """The endless training stream from step `start_step` on, shuffled anew in every epoch.

    An epoch's last batch is filled up from the next epoch; no example is dropped. A skipped example is replaced by
    the next readable one of the source; the batch's `_skipped` counts, for each example, those passed over.

    Args:
      source: where examples come from.
      pp: preprocessing string.
      batch_size: examples in a batch, of all hosts together.
      seed: of the order and of every random choice.
      start_step: the first batch is this one; nothing before it is read.
      rows: which rows of the batch are made here, each host its own; by default all.
      corrupt: by default every corrupt example fails.
      threads: by default one for each CPU; 0 prepares batches in the caller's thread, when they are asked for.
    """
    preprocess, corrupt, size = Preprocess(pp), corrupt or Corrupt(), len(source)
    rows = _checked(rows, batch_size)

    def load(place: Place) -> tuple[Batch, int]:
        epoch, first = place
        for skipped in range(size):
            index = (first + skipped) % size
            try:
                return _example(source, preprocess, seed, (epoch, index)), skipped
            except ReadingError:
                raise
            except InputError as e:
                corrupt.note(source.describe(index), e)
        raise InputError(f"not one of {size} examples could be read")

    def plans() -> Iterator[list[Place]]:
        start = start_step * batch_size
        while True:
            yield [example_at(start + row, size, seed) for row in rows]
            start += batch_size

    for made in _prepare(plans(), load, len(rows), threads):
        yield {**made.arrays, "_skipped": made.skipped}


def eval_batches(
    source: Source,
    pp: str,
    batch_size: int,
    *,
    rows: Sequence[int] | None = None,
    corrupt: Corrupt | None = None,
    threads: int | None = None,
) -> Iterator[Batch]:
    """Every example once, in order; for the arguments see `train_batches`.

    The last batch is filled up with zeros, and so is the place of a skipped example; `_mask` is 1 for real ones.
    All hosts yield the same number of batches.
    """
    preprocess, corrupt, size = Preprocess(pp), corrupt or Corrupt(), len(source)
    rows = _checked(rows, batch_size)

    def load(place: Place) -> tuple[Batch | None, int]:
        try:
            return _example(source, preprocess, 0, place), 0
        except ReadingError:
            raise
        except InputError as e:
            corrupt.note(source.describe(place[1]), e)
            return None, 1

    plans = ([(0, start + row) for row in rows if start + row < size] for start in range(0, size, batch_size))
    for made in _prepare(plans, load, len(rows), threads, first=((0, i) for i in range(size))):
        yield {**made.arrays, "_mask": made.mask}


def batch_ids(source: Source, batch_size: int, seed: int, step: int) -> list[dict[str, Any]]:
    """Which examples the training batch of a step holds, all hosts' together, without reading any.

    The first step is 0, as in `train_batches`' `start_step`. Each row of the batch is a dict of `row`, `epoch`, `index`
    and `id`, where the source has the example. Where one was skipped, the row's `_skipped` counts on from its `index`.
    """
    if batch_size < 1 or step < 0:
        raise InputError(f"there is no step {step} of batches of {batch_size}")
    places = [example_at(step * batch_size + row, len(source), seed) for row in range(batch_size)]
    return [
        {"row": row, "epoch": epoch, "index": index, "id": source.describe(index)}
        for row, (epoch, index) in enumerate(places)
    ]


def working() -> list[str]:
    """What the threads that prepare this process's batches read at this moment, "input_0: cat/1.jpg (for 12 s)"."""
    now, reading = time.monotonic(), sorted(_reading.copy().values(), key=lambda entry: entry[0])
    return [f"{name}: {source.describe(index)} (for {now - since:.0f} s)" for name, source, index, since in reading]


def _example(source: Source, preprocess: Preprocess, seed: int, place: Place) -> Batch:
    """One example, preprocessed.

    Raises:
      ReadingError: anything that is not wrong with the data; it names the example.
      InputError: the rest; it does not.
    """
    epoch, index = place
    thread = threading.get_ident()
    _reading[thread] = threading.current_thread().name, source, index, time.monotonic()
    try:
        example = preprocess(source[index], example_rng(seed, epoch, index))
        return {key: np.asarray(value) for key, value in example.items()}
    except ReadingError as e:
        raise ReadingError(f"{source.describe(index)}: {e}") from e
    except InputError:
        raise
    except Exception as e:
        raise ReadingError(f"{source.describe(index)}: {with_type(e)}") from e
    finally:
        del _reading[thread]


def _checked(rows: Sequence[int] | None, batch_size: int) -> Sequence[int]:
    """The rows of a batch that are made here."""
    rows = range(batch_size) if rows is None else rows
    if batch_size < 1 or not rows or min(rows) < 0 or max(rows) >= batch_size or len(set(rows)) < len(rows):
        raise InputError(f"rows {list(rows)[:6]} are not rows of a batch of {batch_size}")
    return rows


def _prepare(
    plans: Iterable[Sequence[Place]], load: Load, rows: int, threads: int | None, first: Iterable[Place] | None = None
) -> Iterator[Made]:
    """The batch of each plan, in order, made ahead by threads.

    `first` are places to learn from what an example looks like; by default a plan's own.
    """
    if threads is None:
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    layout: Batch | None = None
    pending: deque[tuple[Made, list[Future]]] = deque()
    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="input") as pool:
        try:
            for plan in plans:
                if layout is None:
                    layout = _layout(load, plan if first is None else first)
                made = _empty(layout, rows, len(plan))
                if not threads:
                    _fill(made, plan, range(len(plan)), load)
                    yield made
                    continue
                step = -(-len(plan) // (CHUNKS * threads)) or 1
                pieces = [range(at, min(at + step, len(plan))) for at in range(0, len(plan), step)]
                pending.append((made, [pool.submit(_fill, made, plan, piece, load) for piece in pieces]))
                if len(pending) > PREFETCH:
                    yield _finished(*pending.popleft())
            while pending:
                yield _finished(*pending.popleft())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _empty(layout: Batch, rows: int, filled: int) -> Made:
    """A batch of examples like those of `layout`, whose first `filled` rows are still to be written."""
    arrays = {key: np.empty((rows, *like.shape), like.dtype) for key, like in layout.items()}
    for array in arrays.values():
        array[filled:] = 0
    return Made(arrays, np.zeros(rows, np.int32), np.zeros(rows, np.float32))


def _finished(made: Made, work: Sequence[Future]) -> Made:
    """A batch once all its rows are there; raises what went wrong with any."""
    for future in work:
        future.result()
    return made


def _layout(load: Load, places: Iterable[Place]) -> Batch:
    """The arrays of the first readable example, whose shapes and dtypes every other one shares."""
    example = next((found for found, _ in map(load, places) if found is not None), None)
    if example is None:
        raise InputError("not one example could be read")
    for key, value in example.items():
        if value.dtype.kind not in "biuf":
            raise InputError(f"{key!r} is {value.dtype.name}, which makes no batch of arrays; drop it with keep")
    return example


def _fill(made: Made, plan: Sequence[Place], piece: range, load: Load) -> None:
    """Loads the examples of some rows into their places."""
    for row in piece:
        example, made.skipped[row] = load(plan[row])
        if example is None:
            for array in made.arrays.values():
                array[row] = 0
            continue
        made.mask[row] = 1
        for key, array in made.arrays.items():
            value = example.get(key)
            if value is None or value.shape != array.shape[1:] or value.dtype != array.dtype:
                found = "nothing" if value is None else f"{value.dtype} of {value.shape}"
                raise InputError(
                    f"{key!r} is {array.dtype} of {array.shape[1:]} in one example and {found} in number "
                    f"{plan[row][1]} of the same source; resize it, or drop it with keep"
                )
            array[row] = value
