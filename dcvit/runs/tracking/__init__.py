"""Trackers of experiments: copies of the rows of metrics in TensorBoard, Weights & Biases, MLflow or Trackio.

The config key that enables a tracker is the name of a module here. Such a module has a class `Tracker`, and a function
`check` if the key holds options. This module holds the interface of these classes, and `Trackers`, which calls them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import logging
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from dcvit.errors import ConfigError, check_call, first_line_with_type, nearest
from dcvit.runs.files import Folder, replace

LOG = logging.getLogger(__name__)
NAMES = ("tensorboard", "wandb", "mlflow", "trackio")  # keys of a config, and modules

Options = Mapping[str, Any]  # arguments of a library's function that starts a run
Row = Mapping[str, Any]  # numbers by name


class TrackedRun(NamedTuple):
    """A training run that trackers record.

    Fields:
      workdir: the folder of the run.
      config: the config, which trackers show.
      resume_step: the step of the checkpoint that the run resumes from; 0 for a new run.
    """

    workdir: Folder
    config: Options
    resume_step: int

    def saved_id(self, name: str) -> str | None:
        """Return the id by which the tracker `name` knows a resumed run, from the workdir; None if it has none yet."""
        path = self.workdir / f"{name}.json"
        return str(json.loads(path.read_text())["id"]) if self.resume_step and path.is_file() else None

    def save_id(self, name: str, identifier: str) -> None:
        """Save the id by which the tracker `name` knows the run in the workdir, for runs that resume."""
        replace(self.workdir / f"{name}.json", json.dumps({"id": identifier}) + "\n")


class Tracker(Protocol):
    """Interface of a tracker. Its constructor starts a run of the tracker, or continues that of a resumed run.

    All methods may raise the errors of the tracker's library.
    """

    last_step: int  # the last step whose row the tracker has when it starts; -1: none

    def __init__(self, run: TrackedRun, options: Any):
        """Start; `options` is the value of the config key."""

    def write(self, step: int, row: Row) -> None:
        """Add the row of a step after `last_step`. Numbers may be NaN or infinite."""

    def close(self, *, failed: bool) -> None:
        """End the run of the tracker, as failed or completed, when all rows are sent."""


class Trackers:
    """The trackers of a run. An error of one is logged, and training continues without it."""

    def __init__(self, trackers: Mapping[str, object], run: TrackedRun, rows: Sequence[Row] = ()):
        """Start trackers, and send each the rows that it lacks.

        Args:
          trackers: names of modules, and the options of each.
          run: the run to track.
          rows: the rows, with `step`, of a resumed run up to its checkpoint; None is a number that was not finite.
        """
        self.active: dict[str, Tracker] = {}
        for name, options in trackers.items():
            self._attempt(name, functools.partial(self._start, name, options, run, rows))

    def write(self, step: int, row: Row) -> None:
        """Send the row of a step to all trackers; one that has it already, from before a run was killed, ignores it."""
        for name, tracker in list(self.active.items()):
            if step > tracker.last_step:
                self._attempt(name, functools.partial(tracker.write, step, row))

    def close(self, *, failed: bool) -> None:
        """End all runs of trackers, as failed or completed; this waits until their rows are sent."""
        for name, tracker in list(self.active.items()):
            self._attempt(name, functools.partial(tracker.close, failed=failed))
        self.active = {}

    def _start(self, name: str, options: object, run: TrackedRun, rows: Sequence[Row]) -> None:
        tracker = self.active[name] = _module(name).Tracker(run, options)
        for row in rows:
            if row["step"] > tracker.last_step:
                numbers = {key: math.nan if value is None else value for key, value in row.items() if key != "step"}
                tracker.write(row["step"], numbers)

    def _attempt(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as e:  # of any library
            if tracker := self.active.pop(name, None):
                with contextlib.suppress(Exception):  # otherwise the next run of this process would continue it
                    tracker.close(failed=True)
            LOG.warning("%s failed, and training continues without it: %s", name, first_line_with_type(e))


def check(trackers: Mapping[str, object]) -> None:
    """Check the options of trackers, by the names of their modules.

    Raises:
      ConfigError: a library is not installed, or an option is unknown or of the wrong type.
    """
    for name, options in trackers.items():
        if options is not True:
            _module(name).check(options)


def library(name: str) -> types.ModuleType:
    """Import the library of a tracker and return it.

    Raises:
      ConfigError: it is not installed, or fails to load.
    """
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as e:
        if (e.name or name).partition(".")[0] == name:
            raise _missing(name) from None
        raise ConfigError(f"config.{name}: {name} fails to load: {first_line_with_type(e)}") from None
    except Exception as e:  # a broken installation, or too little memory
        raise ConfigError(f"config.{name}: {name} fails to load: {first_line_with_type(e)}") from None
    if module.__file__ is None:  # a folder of the same name, such as that of W&B's files
        raise _missing(name)
    return module


def check_options(
    name: str, options: Options, function: Callable[..., object], own: Sequence[str], further: Iterable[str] = ()
) -> None:
    """Check options of a tracker that are arguments of a function of its library.

    Args:
      name: the name of the tracker.
      options: the options.
      function: the function, which starts a run of the tracker.
      own: names of arguments that the class `Tracker` sets.
      further: names of options that are not arguments of the function.

    Raises:
      ConfigError: an unknown option, a value of the wrong type, or an argument that is missing.
    """
    known = [argument for argument in inspect.signature(function).parameters if argument not in own]
    for option in options:
        if option not in (*known, *further):
            raise ConfigError(f"config.{name} has no option {option!r}; {nearest(option, [*known, *further])}")
    check_call(function, {key: value for key, value in options.items() if key in known}, f"config.{name}")


def _missing(name: str) -> ConfigError:
    return ConfigError(f'config.{name} needs {name}, which is not installed: pip install "dcvit[{name}]"')


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")
