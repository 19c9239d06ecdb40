"""Saving of checkpoints by Orbax while training continues, with checksums that are verified before loading.

`<workdir>/checkpoints/<step>/` holds the items `params`, `ema` (if parameters are averaged), `rest` (step, optimizer
state, counters) and `about` (JSON: description of the run), so that evaluation reads only what it needs, and the
checksums of `dcvit.runs.checksums`.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import PyTree

from dcvit.errors import CheckpointError, first_line
from dcvit.parallel import multihost
from dcvit.runs import checksums, steps
from dcvit.runs.files import Folder, absolute, rename
from dcvit.runs.restoring import process_options

ITEMS = ("params", "ema", "rest")
DISK_FULL = ("No space left on device", "Disk quota exceeded", "File too large")
SAVE_TIMEOUT = 6 * 3600  # seconds; a store may be slow


class RenamedFolder(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """A temporary folder on a disk, whose checksums are written before it is renamed to its final name."""

    async def finalize(self) -> None:
        """Rename the folder twice: Orbax completes it under another temporary name, and then it gets its checksums."""
        final: epath.Path = self.get_final()
        self._final_path = final.with_name(f"{final.name}{steps.TEMPORARY}-checksums")
        shutil.rmtree(self._final_path, ignore_errors=True)
        await super().finalize()
        checksums.write(self._final_path)
        rename(Path(self._final_path), Path(final))
        self._final_path = final


class CommittedObjects(ocp.path.atomicity.CommitFileTemporaryPath):
    """A folder in an object store, whose checksums are written before the object that marks it as complete."""

    async def finalize(self) -> None:
        """Write the checksums, which do not include the objects that Orbax writes after them."""
        checksums.write(self.get_final(), ignored=steps.WRITTEN_LAST)
        await super().finalize()


class Checkpointer:
    """Saves the checkpoints of one run, to whose folder no other run writes, and removes old ones.

    Orbax's AsyncCheckpointer saves a step. Orbax's CheckpointManager, which also removes old steps, is not used: it
    deletes the files of a step one by one under the step's name, so a kill leaves a folder that looks like a complete
    checkpoint, and its list of steps, kept in memory, does not notice that a user removes a damaged step.
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
        self.finishing: threading.Thread | None = None
        self.failure: CheckpointError | None = None
        self.saved: int | None = None  # the step of the last save, which may be in progress
        atomicity = ocp.path.atomicity
        self.writer = (
            _writer(RenamedFolder, atomicity.AtomicRenameTemporaryPath)
            if isinstance(self.folder, Path)
            else _writer(CommittedObjects, atomicity.CommitFileTemporaryPath)
        )
        if multihost.is_first():
            self.folder.mkdir(parents=True, exist_ok=True)
            steps.remove_incomplete(self.folder)
        multihost.wait_for_all("incomplete checkpoints removed")

    def save(self, step: int, items: Mapping[str, PyTree], about: Mapping[str, Any], best: int | None = None) -> None:
        """Start to save a step, after the last save has finished; return once the arrays are copied.

        After this save, checkpoints that are not to be kept are removed. That of step `best` is kept.

        Args:
          items: trees of arrays by name, of `ITEMS`.
          about: description of the run, serializable as JSON.

        Raises:
          CheckpointError: the last save failed, or this one could not start.
        """
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

    def _start(self, step: int, args: Mapping[str, ocp.args.CheckpointArgs]) -> None:
        """Start to save a step; return once the arrays are copied."""
        try:
            self.writer.save(absolute(self.folder / str(step)), args=ocp.args.Composite(**args))
        except BaseException as e:
            self._fail(step, e)

    def _finish(self, step: int, best: int | None) -> None:
        """Wait until a step is saved, then remove the checkpoints that `steps.steps_to_remove` selects."""
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
    """Start a thread for a function, which does not keep the process from ending, and return the thread."""
    thread = threading.Thread(target=function, args=args, name="checkpoint", daemon=True)
    thread.start()
    return thread


def _writer(path_class: type[object], item_class: type[object]) -> ocp.AsyncCheckpointer:
    """Return the writer of checkpoints, which the given classes of temporary paths complete, as a whole and by item."""
    processes = process_options()
    # Not compressed: trained weights hardly shrink, and compression takes CPU time from the input pipeline.
    trees = {
        name: ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=processes) for name in ITEMS
    }
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=processes, temporary_path_class=item_class),
        about=ocp.JsonCheckpointHandler(multiprocessing_options=processes),
        **trees,
    )
    return ocp.AsyncCheckpointer(
        handler,
        async_options=ocp.AsyncOptions(timeout_secs=SAVE_TIMEOUT),
        multiprocessing_options=processes,
        temporary_path_class=path_class,
    )


def _cause(error: BaseException) -> str:
    """Return the text of why a save failed: the cause only, if the disk is full and the message names many files."""
    return next((cause for cause in DISK_FULL if cause in str(error)), first_line(error))
