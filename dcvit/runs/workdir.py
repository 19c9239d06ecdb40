"""Files of a workdir: its lock, what identifies its run, a table of the parameters, and thresholds of classes."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dcvit.config import values
from dcvit.errors import CheckpointError, ConfigError, first_line
from dcvit.runs import checksums
from dcvit.runs.files import Folder, absolute, file_identity, replace
from dcvit.runs.identity import Record, compare
from dcvit.runs.steps import ABOUT, FOLDER, about, problems, saved_steps

LOG = logging.getLogger(__name__)
LOCK = ".lock"
ACCEPTED = "accepted.json"  # names given to --accept, by which checkpoints may differ from config.json and data.json
PARAMETERS = "parameters.txt"
THRESHOLDS = "thresholds.json"
SHARED_SECONDS = 20  # a network file system shows the files of other processes with a delay


class WorkdirLock:
    """Context manager that holds the lock of a local workdir, to which at most one run at a time writes.

    The file `.lock`, which names the process, is locked with flock(2); the system releases the lock of a killed one.
    """

    def __init__(self, workdir: Path):
        """Acquire the lock.

        Raises:
          ConfigError: another process, which the message names, holds the lock, or the workdir cannot be written.
        """
        self.path = workdir / LOCK
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise ConfigError(f"{self.path} is not a regular file, and a run does not write to it; remove it")
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("a")
        except OSError as e:
            raise ConfigError(f"cannot write to workdir {workdir}: {e.strerror or e}") from None
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            self.file.close()
            if not isinstance(e, BlockingIOError):
                raise ConfigError(f"workdir {workdir} cannot be locked: {e.strerror or e}") from None
            owner = self.path.read_text().strip() or "another run"
            raise ConfigError(f"workdir {workdir} is in use by {owner}") from None
        with contextlib.suppress(OSError):  # on a full disk the file stays empty and the lock holds all the same
            self.path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')}\n")

    def check(self) -> None:
        """Raise ConfigError if the file `.lock` was removed or replaced, so that another run could lock the workdir."""
        if file_identity(self.path) != file_identity(self.file.fileno()):
            raise ConfigError(f"{self.path} was removed or replaced during the run: another run may use the workdir")

    def __enter__(self) -> WorkdirLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def find(path: Folder) -> Folder | None:
    """Return `path` if it is a workdir, its run's workdir if it is a checkpoint, and None if it is neither.

    Raises:
      CheckpointError: the path cannot be read.
    """
    try:
        if (path / FOLDER).is_dir():
            return path
        is_checkpoint = (path / ABOUT).is_dir() or (path / checksums.NAME).is_file()
        return absolute(path).parent.parent if is_checkpoint else None
    except Exception as e:  # such as a name that is too long; libraries for stores have error types of their own
        reason = e.strerror if isinstance(e, OSError) and e.strerror else first_line(e)
        raise CheckpointError(f"cannot read {path}: {reason}") from None


def existing(workdir: Folder) -> Record:
    """Return the "config" and the "data" of the run in a workdir; those of a missing file are omitted.

    Raises:
      ConfigError: a file is damaged.
    """
    found: Record = {}
    if (workdir / "config.json").is_file():
        found["config"] = values.read_json(workdir / "config.json").to_dict()
    if (workdir / "data.json").is_file():
        found["data"] = _read(workdir / "data.json")
    return found


def accepted(workdir: Folder) -> list[str]:
    """Return the names given to `--accept` since the run in a workdir was started.

    Raises:
      ConfigError: the file is damaged.
    """
    path = workdir / ACCEPTED
    names = _read(path).get("accept") if path.is_file() else []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"cannot read {path}: expected an object with the list `accept` of names")
    return names


def check_checkpoint(path: Folder) -> None:
    """Raise CheckpointError if `path` is a workdir whose latest checkpoint was saved by another run.

    A checkpoint whose description is damaged passes: verifying its checksums reports it with all damaged files.
    """
    saved = saved_steps(path)
    if not saved or not (path / "config.json").is_file():
        return
    checkpoint = path / FOLDER / str(saved[-1])
    try:
        description = about(checkpoint)
    except CheckpointError:
        return
    run = existing(path)
    found = compare(description, run["config"], run.get("data"), accepted(path)).refused
    refused = [f"{key} ({values})" for key, values in found.items()]
    if refused and not problems(checkpoint, only=(ABOUT,)):
        raise CheckpointError(f"{checkpoint} is not a checkpoint of the run in {path}: {'; '.join(refused)}")


def record(
    workdir: Folder, config: Mapping[str, Any], data: Record, accept: Sequence[str] = (), changes: Sequence[str] = ()
) -> None:
    """Write `config.json` and `data.json`, and the accepted names to `accepted.json` if there are any.

    `changes` are lines about accepted differences, with the step from which they hold; earlier ones are kept.
    """
    path = workdir / ACCEPTED
    before = _read(path).get("changes", []) if accept and path.is_file() else []
    known = {"accept": list(accept), "changes": list(dict.fromkeys([*before, *changes]))}
    files = {"data.json": data, "config.json": dict(config), ACCEPTED: known}
    for name, content in files.items():
        if name != ACCEPTED or accept:
            replace(workdir / name, json.dumps(content, indent=2 if name == "config.json" else None) + "\n")


def write_overview(workdir: Folder, params: Mapping[str, Any]) -> None:
    """Write name, shape, dtype and size of every parameter to `parameters.txt`; does nothing without the library clu.

    Args:
      workdir: the folder of the run.
      params: the parameters, or their shapes.
    """
    if importlib.util.find_spec("clu"):
        try:
            from clu import parameter_overview
        except Exception as e:  # of TensorFlow, which it imports
            LOG.warning("no %s: clu fails to load: %s", PARAMETERS, first_line(e))
            return
        table: str = parameter_overview.get_parameter_overview(params, include_stats=False)
        replace(workdir / PARAMETERS, table + "\n")


def check_shared(workdir: Folder) -> None:
    """Raise ConfigError if this process does not find the file that the first process has written to the workdir."""
    for _ in range(SHARED_SECONDS):
        if (workdir / "config.json").is_file():
            return
        time.sleep(1)
    raise ConfigError(f"workdir {workdir} is not on a file system that all processes share")


def _read(path: Folder) -> Record:
    try:
        found: Record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"cannot read {path}: {first_line(e)}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"cannot read {path}: expected a JSON object")
    return found


def read_class_names(workdir: Folder | None, num_classes: int) -> list[str]:
    """Return the class names in a workdir's data.json; the classes that it does not name have their numbers.

    Raises:
      ConfigError: data.json is damaged or names more classes.
    """
    path = workdir / "data.json" if workdir else None
    names = _read(path).get("class_names", 0) if path and path.is_file() else None
    if names is None or not num_classes:
        return numbered((), num_classes)
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"class_names in {path} should be a list of class names")
    if len(names) > num_classes:
        raise ConfigError(f"{path} names {len(names)} classes, the config has {num_classes}")
    return numbered(names, num_classes)


def numbered(names: Sequence[str], num_classes: int) -> list[str]:
    """Return a name for each class: the given ones, and the numbers of the classes after them."""
    return [*names, *map(str, range(len(names), num_classes))]


class Thresholds(NamedTuple):
    """Thresholds of all classes of a multi-label classifier: the probability from which each class is predicted.

    Fields:
      values: the thresholds.
      evaluation: the evaluation on whose data they were chosen.
      step: the step of the checkpoint.
    """

    values: tuple[float, ...]
    evaluation: str
    step: int | None

    @property
    def origin(self) -> str:
        """A sentence about where the thresholds were chosen."""
        at = "" if self.step is None else f" at step {self.step}"
        return f"The thresholds maximize F1 on {self.evaluation!r}{at}, where it is therefore optimistic."


def write_thresholds(workdir: Folder, found: Thresholds, class_names: Sequence[str]) -> None:
    """Write thresholds to the workdir, by the names of the classes; an existing file is replaced."""
    by_name = dict(zip(class_names, found.values, strict=True))
    content = {"evaluation": found.evaluation, "step": found.step, "thresholds": by_name}
    replace(workdir / THRESHOLDS, json.dumps(content, indent=2) + "\n")


def read_thresholds(workdir: Folder, class_names: Sequence[str]) -> Thresholds | None:
    """Return the thresholds in a workdir; None if it has none.

    Raises:
      ConfigError: the file is damaged, or of other classes.
    """
    path = workdir / THRESHOLDS
    if not path.is_file():
        return None
    content = _read(path)
    try:
        by_name, evaluation, step = content["thresholds"], content["evaluation"], content["step"]
        found = tuple(float(by_name[name]) for name in class_names)
        if len(by_name) != len(class_names) or not all(0 <= value <= 1 for value in found):
            raise ValueError(f"expected a number from 0 to 1 for each of the {len(class_names)} classes")
    except KeyError as e:
        raise ConfigError(
            f"{path}: no entry {e}; remove the file, and choose them again with dcvit evaluate --thresholds"
        ) from None
    except (ValueError, TypeError, OverflowError) as e:
        raise ConfigError(f"cannot read {path}: {first_line(e)}") from None
    return Thresholds(found, str(evaluation), step if isinstance(step, int) else None)
