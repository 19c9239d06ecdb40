"""MLflow: a run with the config as parameters, on a tracking server or in a database."""

from __future__ import annotations

import re
import urllib.parse

from dcvit.errors import ConfigError
from dcvit.parallel.trees import flattened
from dcvit.runs.tracking import Options, Row, TrackedRun, check_options, library

OWN = ("run_id", "nested", "experiment_id")  # arguments of mlflow.start_run that `Tracker` sets
FURTHER = ("tracking_uri", "experiment")
SYSTEM = "system/"  # prefix of the metrics that MLflow itself adds, with steps of their own


def check(options: Options) -> None:
    """Raise ConfigError if `config.mlflow` is invalid or MLflow is not installed."""
    check_options("mlflow", options, library("mlflow").start_run, OWN, FURTHER)
    for name in FURTHER:
        if name in options and not (isinstance(options[name], str) and options[name]):
            raise ConfigError(f"config.mlflow.{name}={options[name]!r} should be a string")
    if "@" in urllib.parse.urlsplit(str(options.get("tracking_uri", ""))).netloc:
        raise ConfigError(
            "config.mlflow.tracking_uri has a user or password, which config.json would store: set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )


class Tracker:
    """A run of MLflow, in the experiment `experiment` of the store or server `tracking_uri`."""

    def __init__(self, run: TrackedRun, options: Options):
        """Start or continue; see `dcvit.runs.tracking.Tracker`. Other `options` are arguments of `mlflow.start_run`."""
        self.mlflow, saved = library("mlflow"), run.saved_id("mlflow")
        if "tracking_uri" in options:
            self.mlflow.set_tracking_uri(options["tracking_uri"])
        if "experiment" in options and not saved:
            self.mlflow.set_experiment(options["experiment"])
        arguments = {"run_name": run.workdir.name} | {k: v for k, v in options.items() if k not in FURTHER}
        self.run_id: str = self.mlflow.start_run(run_id=saved, **arguments).info.run_id
        self.last_step = self._last_step() if saved else -1
        if not saved:
            run.save_id("mlflow", self.run_id)
            self.mlflow.log_params({_valid(name): value for name, value in flattened(run.config).items()})

    def write(self, step: int, row: Row) -> None:
        """Send a row."""
        self.mlflow.log_metrics({_valid(name): value for name, value in row.items()}, step=step, run_id=self.run_id)

    def close(self, *, failed: bool) -> None:
        """End the run as FAILED or FINISHED."""
        self.mlflow.end_run("FAILED" if failed else "FINISHED")

    def _last_step(self) -> int:
        client = self.mlflow.MlflowClient()
        names = [name for name in client.get_run(self.run_id).data.metrics if not name.startswith(SYSTEM)]
        return max((m.step for name in names for m in client.get_metric_history(self.run_id, name)), default=-1)


def _valid(name: str) -> str:
    """Return a name with the characters that MLflow allows."""
    return re.sub(r"[^\w.\-/ :]", "_", name)
