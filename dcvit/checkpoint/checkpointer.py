"""A run's checkpoints: saved beside the training by Orbax, sealed with checksums, verified before they are loaded.

`<workdir>/checkpoints/<step>/` holds the items `params`, `ema` (if averaged), `rest` (step, optimiser state, counts)
and `about` (JSON: what the run was), so that evaluation reads no more than it needs, and the seal of
`dcvit.checkpoint.checksums`. A folder appears under its name when it is complete; what a kill leaves has another name.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from dcvit.checkpoint import checksums
from dcvit.checkpoint.files import Folder, absolute, remove
from dcvit.checkpoint.params import check_tree, read_npz, shapes_of
from dcvit.errors import CheckpointError, first_line
from dcvit.parallel import multihost

FOLDER = "checkpoints"
ITEMS = ("params", "ema", "rest")
UNFINISHED = ".orbax-checkpoint-tmp"  # part of the names of what Orbax has not finished
DAMAGED = ".damaged"  # the end of the names of what was set aside
FULL = ("No space left on device", "Disk quota exceeded", "File too large")
COMMITTED = "commit_success.txt"
LATE = (COMMITTED, "_CHECKPOINT_METADATA")
ASIDE = "DAMAGED"  # the object that sets a checkpoint in a store aside
SAVE_SECONDS = 6 * 3600  # until a save has failed: a store may be slow
MOST_NAMED = 4  # damaged files in a message


# Orbax logs errors with their traceback before it raises them; here they end in one line.
logging.getLogger("absl").addFilter(lambda record: record.levelno < logging.ERROR or "orbax" not in record.pathname)


class _Sealed(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """A folder of a local disk, which gets its seal just before it gets its name."""

    async def finalize(self) -> None:
        final: epath.Path = self.get_final()
        self._final_path = final.with_name(f"{final.name}{UNFINISHED}-sealing")
        shutil.rmtree(self._final_path, ignore_errors=True)
        await super().finalize()
        checksums.write(self._final_path)
        self._final_path.rename(final)
        self._final_path = final


class _SealedObjects(ocp.path.atomicity.CommitFileTemporaryPath):
    """The same on an object store, which cannot rename: there Orbax writes COMMITTED when all else is there, and its
    own notes about the step after the seal, so the seal knows neither."""

    async def finalize(self) -> None:
        checksums.write(self.get_final(), leave_out=LATE)
        await super().finalize()


class Checkpointer:
    """The checkpoints of one run, to which it alone writes. `save` returns once the arrays are copied; `wait` waits."""

    def __init__(self, workdir: Folder, *, keep: int = 1, keep_every: int | None = None):
        """Removes what a kill left unfinished.

        Args:
          workdir: of the run.
          keep: how many of the newest checkpoints stay, beside the best one.
          keep_every: those of steps divisible by it stay, too.
        """
        self.folder = workdir / FOLDER
        self.keep, self.keep_every = keep, keep_every
        self.lock = threading.RLock()  # a signal saves from a thread of its own
        self.finishing: threading.Thread | None = None
        self.failure: CheckpointError | None = None
        self.saved: int | None = None  # the step of the newest save, perhaps still under way
        processes = ocp.options.MultiprocessingOptions(active_processes=set(range(jax.process_count())))
        options = ocp.CompositeOptions(multiprocessing_options=processes)
        trees = {  # uncompressed: weights are noise, and compressing them takes the processor from the training
            name: ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=processes)
            for name in ITEMS
        }
        self.writer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                composite_options=options,
                about=ocp.JsonCheckpointHandler(multiprocessing_options=processes),
                **trees,
            ),
            async_options=ocp.AsyncOptions(timeout_secs=SAVE_SECONDS),
            multiprocessing_options=processes,  # names them: without names Orbax would meet by a device computation
            temporary_path_class=_Sealed if isinstance(self.folder, Path) else _SealedObjects,
        )
        self.reader = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(composite_options=options), multiprocessing_options=processes
        )
        if multihost.is_first():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clean()
        multihost.wait_for_all("unfinished checkpoints are removed")

    def steps(self) -> list[int]:
        """The steps that are there, in rising order, damaged ones included."""
        return _steps(self.folder)

    def latest(self, on_corrupt: str = "fail") -> int | None:
        """The step to go on from, whose files are verified; None where nothing was saved.

        Args:
          on_corrupt: what becomes of a damaged newest checkpoint: "fail", or "previous", which sets it aside, says so
            and takes the newest intact one.

        Raises:
          CheckpointError: the newest one is damaged and `on_corrupt` is "fail", or none is intact.
        """
        damaged: dict[int, str] = {}
        intact = None
        for step in reversed(self.steps()):
            found = self._problems(step)
            if not found:
                intact = step
                break
            damaged[step] = f"checkpoint {self.folder / str(step)} is damaged: {_some(found)}"
        if not damaged:
            return intact
        if intact is None:
            first = next(iter(damaged.values()))
            raise CheckpointError(f"{first}; no earlier one is intact, and the run does not begin anew by itself")
        if on_corrupt != "previous":
            raise CheckpointError(
                f"{next(iter(damaged.values()))}; the newest intact earlier one is {self.folder / str(intact)}; "
                "--config.on_corrupt=previous goes on from it"
            )
        for step, message in damaged.items():
            if multihost.is_first():
                print(f"{message}; set aside as {self._set_aside(step).name}", file=sys.stderr)
        multihost.wait_for_all("damaged checkpoints are set aside")
        return intact

    def save(self, step: int, items: Mapping[str, Any], about: Mapping[str, Any], best: int | None = None) -> None:
        """Begins to save trees of arrays by name, and what JSON can hold `about` them, once the last save has ended.
        When this one has, older ones are removed, but for that of step `best`.

        Raises:
          CheckpointError: the last save failed, or this one could not begin.
        """
        with self.lock:
            self.wait()
            args = {name: ocp.args.PyTreeSave(tree) for name, tree in items.items()}
            args["about"] = ocp.args.JsonSave({"step": step, **about})
            try:
                if not isinstance(self.folder, Path) and multihost.is_first():
                    remove(self.folder / str(step))  # one that was set aside
                self.writer.save(absolute(self.folder / str(step)), args=ocp.args.Composite(**args))
            except Exception as e:
                self._fail(step, e)
                self.check_for_errors()
            self.saved = step
            self.finishing = threading.Thread(target=self._finish, args=(step, best), name="checkpoint", daemon=True)
            self.finishing.start()

    def wait(self) -> None:
        """Returns once nothing is being saved. Raises CheckpointError where it failed."""
        with self.lock:
            if self.finishing:
                self.finishing.join()
                self.finishing = None
            self.check_for_errors()

    def finish(self) -> str:
        """`wait`, for a run that is stopped when it is over; says so."""
        self.wait()
        return "the last checkpoint is complete"

    def check_for_errors(self) -> None:
        """Raises CheckpointError where saving failed in the background."""
        if self.failure:
            raise self.failure

    def close(self) -> None:
        """Waits, see `wait`, and lets go of the threads."""
        try:
            self.wait()
        finally:
            self.writer.close()
            self.reader.close()

    def about(self, step: int) -> dict[str, Any]:
        """What was said about a step when it was saved."""
        return self._restore(step, {"about": ocp.args.JsonRestore()})["about"]

    def restore(self, step: int, items: Mapping[str, Any]) -> dict[str, Any]:
        """The items of a step, in the structure, dtypes and shardings of the given ones. The caller has verified it.

        Raises:
          CheckpointError: unreadable, or a tree or shape differs.
        """
        self.check_compatible(step, items)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, dict(items))
        return self._restore(step, {name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()})

    def check_compatible(self, step: int, items: Mapping[str, Any]) -> None:
        """Raises CheckpointError where a tree or shape of a step differs from the given ones."""
        path = self.folder / str(step)
        for name in items:
            if not (path / name).exists():
                raise CheckpointError(f"{path} has no {name}")
            check_tree(shapes_of(_metadata(path / name)), shapes_of(items[name]), str(path))

    def _restore(self, step: int, args: Mapping[str, Any]) -> dict[str, Any]:
        path = self.folder / str(step)
        try:
            return dict(self.reader.restore(absolute(path), args=ocp.args.Composite(**args)).items())
        except Exception as e:
            raise CheckpointError(f"cannot restore {path}: {first_line(e)}") from e

    def _problems(self, step: int) -> list[str]:
        """What is wrong with a step; all processes share the work, and all know what any of them found."""
        mine = _damage(self.folder / str(step), share=(jax.process_index(), jax.process_count()))
        return sorted({line for found in multihost.gather(f"verified/{step}", mine) for line in found})

    def _finish(self, step: int, best: int | None) -> None:
        """In a thread of its own: waits until a step is saved, then removes what is not to be kept."""
        try:
            self.writer.wait_until_finished()
            if multihost.is_first():
                for old in self._to_remove(best):
                    _retire(self.folder / str(old))
        except BaseException as e:
            self._fail(step, e)

    def _fail(self, step: int, error: BaseException) -> None:
        self.failure = CheckpointError(f"cannot save step {step} to {self.folder}: {_cause(error)}")
        if multihost.is_first():
            with contextlib.suppress(Exception):  # what cannot be removed now is at the next start
                self._clean()

    def _to_remove(self, best: int | None) -> list[int]:
        steps = self.steps()
        kept = {*steps[-self.keep :], best}
        return [s for s in steps if s not in kept and not (self.keep_every and s % self.keep_every == 0)]

    def _clean(self) -> None:
        """Removes what was not finished."""
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else []:
            begun = not isinstance(path, Path) and path.name.isdigit() and not (path / COMMITTED).exists()
            if UNFINISHED in path.name or begun:
                remove(path)

    def _set_aside(self, step: int) -> Folder:
        """Moves a damaged checkpoint out of the way; one in a store, which cannot move it, is marked."""
        path = self.folder / str(step)
        if not isinstance(path, Path):
            (path / ASIDE).write_text("set aside: its files are not what was saved\n")
            return path
        number = 1
        while (aside := path.with_name(f"{step}{DAMAGED}-{number}")).exists():
            number += 1
        path.rename(aside)
        return aside


def load_params(source: Folder | str, place: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """The parameters of a checkpoint as a nested dict of arrays: the averaged ones where there are any.

    Args:
      source: a workdir (its newest checkpoint), one checkpoint's folder, or a big_vision `.npz` file.
      place: from the tree of shapes to one of shardings; by default all on this process's first device.

    Raises:
      CheckpointError: missing, damaged or unreadable.
    """
    path = Path(source).expanduser() if isinstance(source, str) else source
    if path.is_file():
        loaded = read_npz(path)
        return jax.device_put(loaded, place(loaded)) if place else loaded
    folder = step_folder(path)
    name = "ema" if "ema" in checksums.items(folder) else "params"
    if found := _damage(folder, only=(name,)):
        raise CheckpointError(f"checkpoint {folder} is damaged: {_some(found)}{_offer(folder)}")
    item = folder / name
    shapes = _metadata(item)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = place(shapes) if place else jax.tree.map(lambda _: device, shapes)
    target = jax.tree.map(lambda m, p: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=p), shapes, places)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            params: dict[str, Any] = checkpointer.restore(absolute(item), target)
    except Exception as e:
        raise CheckpointError(f"cannot read {item}: {first_line(e)}") from e
    return params


def step_folder(path: Folder) -> Folder:
    """The folder of one checkpoint, given it or a workdir, of which the newest counts."""
    if (path / "params").is_dir() or (path / checksums.NAME).is_file():
        return path
    steps = _steps(path / FOLDER)
    if not steps:
        raise CheckpointError(f"no checkpoint in {path}")
    return path / FOLDER / str(max(steps))


def saved_steps(workdir: Folder) -> list[int]:
    """The steps that a run has completely saved."""
    return _steps(workdir / FOLDER)


def _steps(folder: Folder) -> list[int]:
    """The steps below a run's folder of checkpoints."""
    there = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(path.name) for path in there if path.name.isdigit() and _finished(path))


def _finished(path: Folder) -> bool:
    """Whether a checkpoint was completely written, and not set aside: on a disk it has its name then."""
    return isinstance(path, Path) or ((path / COMMITTED).exists() and not (path / ASIDE).exists())


def _retire(path: Folder) -> None:
    """Removes a checkpoint such that a kill in the middle leaves nothing that looks like one."""
    if isinstance(path, Path):
        path = path.rename(path.with_name(f"{path.name}{UNFINISHED}-removed"))
    else:
        (path / COMMITTED).unlink()
    remove(path)


def _damage(folder: Folder, **options: Any) -> list[str]:
    """`manifest.problems` of a checkpoint."""
    return checksums.problems(folder, left_out=() if isinstance(folder, Path) else (*LATE, ASIDE), **options)


def _offer(folder: Folder) -> str:
    """The end of a message about a damaged checkpoint: the newest intact one before it in the same run."""
    if not folder.name.isdigit():
        return ""
    for step in reversed([s for s in _steps(folder.parent) if s < int(folder.name)]):
        if not _damage(folder.parent / str(step)):
            return f"; intact is --checkpoint {folder.parent / str(step)}"
    return "; no earlier one is intact"


def _some(lines: Sequence[str]) -> str:
    more = f" and {len(lines) - MOST_NAMED} more" if len(lines) > MOST_NAMED else ""
    return ", ".join(lines[:MOST_NAMED]) + more


def _metadata(item: Folder) -> Any:
    """The tree of shapes and dtypes of a saved item."""
    try:
        return ocp.StandardCheckpointHandler().metadata(epath.Path(absolute(item))).tree
    except Exception as e:
        raise CheckpointError(f"cannot read {item}: {first_line(e)}") from e


def _cause(error: BaseException) -> str:
    """What went wrong, without the many names that a full disk's message has."""
    return next((cause for cause in FULL if cause in str(error)), first_line(error))
