"""Checkpoints of a run: saved by Orbax while training continues, with checksums that are verified before loading.

`<workdir>/checkpoints/<step>/` holds the items `params`, `ema` (if parameters are averaged), `rest` (step, optimizer
state, counters) and `about` (JSON: description of the run), so that evaluation reads only what it needs, and the
checksums of `dcvit.runs.checksums`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from jax.sharding import Mesh
from jaxtyping import PyTree

from dcvit import versions
from dcvit.errors import CheckpointError, first_line
from dcvit.models.trees import Tensor, check_tree, shapes_of
from dcvit.parallel import multihost
from dcvit.parallel.sharding import Strategy, with_shardings
from dcvit.runs import checksums, steps
from dcvit.runs.commit import CommittedObjects, RenamedFolder
from dcvit.runs.files import Folder, absolute, remove

ITEMS = ("params", "ema", "rest")
DISK_FULL = ("No space left on device", "Disk quota exceeded", "File too large")
SAVE_TIMEOUT = 6 * 3600  # seconds; a store may be slow

LOG = logging.getLogger(__name__)
# Orbax logs warnings, and errors with their traceback, before it raises them; the caller reports them in one line.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


class Checkpointer:
    """Saves and restores the checkpoints of one run, which no other process group writes to.

    Orbax's AsyncCheckpointer saves a step. Orbax's CheckpointManager, which also removes old steps, is not used: it
    deletes the files of a step one by one under the step's name, so a kill leaves a folder that looks like a complete
    checkpoint, and its list of steps, kept in memory, does not notice that damaged steps are set aside.
    """

    def __init__(self, workdir: Folder, *, keep: int = 1, keep_every: int | None = None):
        """Remove checkpoints that a killed run left incomplete.

        Args:
          workdir: the run's folder.
          keep: number of latest checkpoints to keep, in addition to the best one.
          keep_every: if set, also keep the checkpoints of steps that it divides.
        """
        self.folder = workdir / steps.FOLDER
        self.keep, self.keep_every = keep, keep_every
        self.lock = threading.RLock()  # the thread that handles a stop signal also saves
        self.finishing: threading.Thread | None = None
        self.failure: CheckpointError | None = None
        self.saved: int | None = None  # the step of the last save, which may be in progress
        processes = _processes()
        self.writer = _writer(processes, RenamedFolder if isinstance(self.folder, Path) else CommittedObjects)
        self.reader = _reader(processes)
        if multihost.is_first():
            self.folder.mkdir(parents=True, exist_ok=True)
            steps.remove_incomplete(self.folder)
        multihost.wait_for_all("incomplete checkpoints removed")

    def latest(self, on_corrupt: str = "fail") -> int | None:
        """Verify the latest checkpoint and return its step; None if there is no checkpoint.

        Args:
          on_corrupt: what to do if the latest checkpoint is damaged: "fail" raises an error; "previous" sets it aside,
            logs a warning, and uses the latest intact one.

        Raises:
          CheckpointError: the latest checkpoint is damaged and `on_corrupt` is "fail", or all checkpoints are damaged.
        """
        step, damaged = steps.latest_intact(self.folder, on_corrupt, self._problems)
        if damaged:
            if multihost.is_first():
                for number, message in damaged.items():
                    LOG.warning("%s; set aside as %s", message, steps.set_aside(self.folder / str(number)).name)
            multihost.wait_for_all("damaged checkpoints set aside")
        return step

    def save(self, step: int, items: Mapping[str, PyTree], about: Mapping[str, Any], best: int | None = None) -> None:
        """Start to save a step, after the last save has finished; return once the arrays are copied.

        After this save, checkpoints that are not to be kept are removed. That of step `best` is kept.

        Args:
          items: trees of arrays by name, of `ITEMS`.
          about: description of the run, serializable as JSON.

        Raises:
          CheckpointError: the last save failed, or this one could not start.
        """
        with self.lock:
            self.wait()
            args = {name: ocp.args.PyTreeSave(tree) for name, tree in items.items()}
            args["about"] = ocp.args.JsonSave({"step": step, **about})
            # Orbax's threads are daemons, as the one that starts them is: those of a failed save may wait for hours.
            _daemon(self._start, step, args).join()
            self.check_for_errors()
            self.saved = step
            self.finishing = _daemon(self._finish, step, best)

    def wait(self) -> None:
        """Wait until no save is in progress. Raise CheckpointError if the last one failed."""
        with self.lock:
            if self.finishing:
                self.finishing.join()
            self.check_for_errors()

    def check_for_errors(self) -> None:
        """Raise CheckpointError if a save failed in the background."""
        if self.failure:
            raise self.failure

    def close(self) -> None:
        """Wait like `wait`, and end Orbax's threads."""
        try:
            self.wait()
        finally:
            try:
                self.writer.close()
            except Exception:  # the thread of a failed save may not have started
                if not self.failure:
                    raise
            self.reader.close()

    def restore(self, step: int, items: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Restore items of a step that `latest` has verified, with the structure, dtypes and shardings of `items`.

        Raises:
          CheckpointError: the checkpoint is unreadable, or a tree or shape differs.
        """
        self.check_compatible(step, items)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, dict(items))
        args = {name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}
        path = absolute(self.folder / str(step))
        try:
            return dict(self.reader.restore(path, args=ocp.args.Composite(**args)).items())
        except Exception as e:
            raise CheckpointError(f"cannot restore {path}: {first_line(e)}") from e

    def check_compatible(self, step: int, items: Mapping[str, PyTree]) -> None:
        """Raise CheckpointError if a tree or shape of a step differs from the given ones."""
        path = self.folder / str(step)
        for name in items:
            if not (path / name).exists():
                raise CheckpointError(f"{path} has no {name}")
            check_tree(shapes_of(_metadata(path / name)), shapes_of(items[name]), str(path))

    def _problems(self, step: int) -> list[str]:
        """Return the damaged files of a step. Each process reads a part of the files and gets the result of all."""
        share = (jax.process_index(), jax.process_count())
        found = multihost.gather(f"verified/{step}", steps.problems(self.folder / str(step), share=share))
        return sorted({line for lines in found for line in lines})

    def _start(self, step: int, args: Mapping[str, ocp.args.CheckpointArgs]) -> None:
        """Start to save a step; return once the arrays are copied."""
        try:
            if not isinstance(self.folder, Path) and multihost.is_first():
                remove(self.folder / str(step))  # a checkpoint that was set aside
            self.writer.save(absolute(self.folder / str(step)), args=ocp.args.Composite(**args))
        except BaseException as e:
            self._fail(step, e)

    def _finish(self, step: int, best: int | None) -> None:
        """Wait until a step is saved, then remove checkpoints that are not to be kept."""
        try:
            self.writer.wait_until_finished()
            if multihost.is_first():
                for old in steps.steps_to_remove(steps.complete_steps(self.folder), self.keep, self.keep_every, best):
                    steps.remove_step(self.folder / str(old))
        except BaseException as e:
            self._fail(step, e)

    def _fail(self, step: int, error: BaseException) -> None:
        self.failure = CheckpointError(f"cannot save step {step} to {self.folder}: {_cause(error)}")
        if multihost.is_first():
            with contextlib.suppress(Exception):  # the next start tries again
                steps.remove_incomplete(self.folder)


def _daemon(function: Callable[..., None], *args: object) -> threading.Thread:
    """Start a thread that does not keep the process from ending."""
    thread = threading.Thread(target=function, args=args, name="checkpoint", daemon=True)
    thread.start()
    return thread


def _processes() -> ocp.options.MultiprocessingOptions:
    """Return options by which processes synchronize through the coordinator.

    If the processes are not named, Orbax uses a device computation, which must not run beside the training step.
    """
    return ocp.options.MultiprocessingOptions(active_processes=set(range(jax.process_count())))


def _writer(processes: ocp.options.MultiprocessingOptions, path_class: type[object]) -> ocp.AsyncCheckpointer:
    """Return the writer of checkpoints, which are completed by the given subclass of Orbax's temporary path."""
    versions.stop_leak_of_saves()
    versions.silence_failed_saves()
    # Not compressed: trained weights hardly shrink, and compression takes CPU time from the input pipeline.
    trees = {
        name: ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=processes) for name in ITEMS
    }
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=processes),
        about=ocp.JsonCheckpointHandler(multiprocessing_options=processes),
        **trees,
    )
    return ocp.AsyncCheckpointer(
        handler,
        async_options=ocp.AsyncOptions(timeout_secs=SAVE_TIMEOUT),
        multiprocessing_options=processes,
        temporary_path_class=path_class,
    )


def _reader(processes: ocp.options.MultiprocessingOptions) -> ocp.Checkpointer:
    """Return the reader of checkpoints."""
    options = ocp.CompositeOptions(multiprocessing_options=processes)
    handler = ocp.CompositeCheckpointHandler(composite_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=processes)


def _cause(error: BaseException) -> str:
    """Return why a save failed; of the long message about a full disk, which names many files, only the cause."""
    return next((cause for cause in DISK_FULL if cause in str(error)), first_line(error))


def is_checkpoint(path: Folder) -> bool:
    """Return True for a workdir with a checkpoint, or the folder of a checkpoint."""
    return (path / steps.ABOUT).is_dir() or bool(steps.saved_steps(path))


def load_params(source: Folder, mesh: Mesh | None = None, strategy: Strategy = "ddp") -> dict[str, Any]:
    """Load the parameters of a checkpoint as a nested dict of arrays: the averaged ones if there are any.

    Args:
      source: a workdir (its latest checkpoint), or the folder of one checkpoint.
      mesh, strategy: see `dcvit.parallel.sharding.with_shardings`.

    Raises:
      CheckpointError: the checkpoint is missing, damaged or unreadable.
    """
    source = steps.step_folder(source)
    shapes = _metadata(_verified_params(source))
    return restore_params(source, with_shardings(shapes, mesh, strategy))


def restore_params(source: Folder, like: PyTree) -> dict[str, Any]:
    """Return the parameters of a checkpoint with the dtypes and shardings of `like`, without checking its checksums.

    Args:
      source: the folder of one checkpoint, which `open_params` has verified.
      like: arrays or shapes with shardings.

    Raises:
      CheckpointError: they cannot be read.
    """
    item = _params(source)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            params: dict[str, Any] = checkpointer.restore(absolute(item), like)
    except Exception as e:
        raise CheckpointError(f"cannot read {item}: {first_line(e)}") from e
    return params


def open_params(source: Folder) -> dict[str, ts.TensorStore]:
    """Open the parameters of a checkpoint by their paths, such as "head/kernel", without reading their values.

    Args:
      source: a workdir (its latest checkpoint), or the folder of one checkpoint.

    Raises:
      CheckpointError: the checkpoint is missing, damaged or unreadable.
    """
    item = _verified_params(source)
    base, context = absolute(item), ts.Context()
    scheme = "file://" if isinstance(base, Path) else ""
    opened = {}
    for name in shapes_of(_metadata(item)):
        kvstore = {"driver": "ocdbt", "base": f"{scheme}{base}", "path": name.replace("/", ".")}
        opened[name] = ts.open({"driver": "zarr", "kvstore": kvstore}, open=True, read=True, context=context)
    try:
        return {name: future.result() for name, future in opened.items()}
    except Exception as e:
        raise CheckpointError(f"cannot read {item}: {first_line(e)}") from e


def as_tensor(array: ts.TensorStore, path: str) -> Tensor:
    """Return an array of `open_params`, or a part of one, to be read later; `path` names it in an error."""

    def read() -> np.ndarray:
        try:
            return np.asarray(array.read().result())
        except Exception as e:  # its errors are ValueErrors, but their types are not documented
            raise CheckpointError(f"cannot read {path}: {first_line(e)}") from None

    return Tensor(tuple(array.shape), read)


def _params(folder: Folder) -> Folder:
    """Return the item with the parameters of a checkpoint, the averaged ones if there are any."""
    return folder / ("ema" if "ema" in checksums.items(folder) else "params")


def _verified_params(source: Folder) -> Folder:
    """Return the item with the parameters of a checkpoint after checking its checksums."""
    item = _params(folder := steps.step_folder(source))
    if found := steps.problems(folder, only=(item.name,)):
        raise CheckpointError(f"{steps.damage_message(folder, found)}{steps.earlier_checkpoint_hint(folder)}")
    return item


def _metadata(item: Folder) -> PyTree:
    """Return the tree of shapes and dtypes of a saved item."""
    try:
        return ocp.StandardCheckpointHandler().metadata(epath.Path(absolute(item))).tree
    except Exception as e:
        raise CheckpointError(f"cannot read {item}: {first_line(e)}") from e
