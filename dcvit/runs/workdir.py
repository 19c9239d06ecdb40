"""Files of a workdir that identify its run: config.json, data.json, accepted.json and a table of the parameters."""

from __future__ import annotations

import importlib.util
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dcvit.config import values
from dcvit.errors import CheckpointError, ConfigError, first_line, first_line_with_type
from dcvit.runs import checksums
from dcvit.runs.files import Folder, absolute, replace
from dcvit.runs.identity import Record, compare
from dcvit.runs.steps import ABOUT, FOLDER, about, problems, saved_steps

LOG = logging.getLogger(__name__)
ACCEPTED = "accepted.json"  # names given to --accept, by which checkpoints may differ from config.json and data.json
PARAMETERS = "parameters.txt"
SHARED_SECONDS = 20  # a network file system shows the files of other processes with a delay
MAX_PATH = 200  # characters of a path that cannot be read, in a message


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
        raise CheckpointError(f"cannot read {str(path)[:MAX_PATH]}: {reason}") from None


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


def record(workdir: Folder, config: Mapping[str, Any], data: Record, accept: Sequence[str] = ()) -> None:
    """Write `config.json` and `data.json`, and the accepted names to `accepted.json` if there are any."""
    files = {"data.json": data, "config.json": dict(config), ACCEPTED: {"accept": list(accept)}}
    for name, content in files.items():
        if name != ACCEPTED or accept:
            replace(workdir / name, json.dumps(content, indent=2 if name == "config.json" else None) + "\n")


def write_overview(workdir: Folder, params: Mapping[str, Any]) -> None:
    """Write name, shape, dtype and size of every parameter to `parameters.txt`; does nothing without the library clu.

    Args:
      workdir: the folder of the run.
      params: the parameters, or their shapes.
    """
    if importlib.util.find_spec("clu") is None:
        return
    try:
        from clu import parameter_overview
    except Exception as e:  # a broken installation, or too little memory
        LOG.warning("no %s: clu fails to load: %s", PARAMETERS, first_line_with_type(e))
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
        found: Record = json.loads(path.read_text())
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
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["class_names"] if path and path.is_file() else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as e:
        raise ConfigError(f"cannot read class_names of {path}: {e}") from None
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
