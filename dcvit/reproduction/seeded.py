"""Runs of `dcvit train` with several seeds that a table compares, each in a workdir FOLDER/seedN.

A complete run is skipped and an interrupted one is resumed. A run of another config is an error, so that no table mixes
configs, and so is a run that diverged, because a table without it would look better than it is.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from dcvit.config import load as configs
from dcvit.errors import ConfigError, MetricsError
from dcvit.runs import identity, metrics
from dcvit.training.tasks import task_class

Train = Callable[[Sequence[str]], int]  # the command `dcvit train`, which returns its exit status
OF_A_SEED = ("seed", "model_init")  # keys in which the runs of one arm may differ


def run(train: Train, spec: str, path: Path, overrides: Sequence[str], metric: str) -> int:
    """Train with hidden output unless the run is complete, and return the exit status.

    Args:
      train: trains a model.
      spec: the config with its arguments.
      path: the workdir.
      overrides: "a.b=value" for the config.
      metric: name of the metric to print, "EVALUATOR/METRIC".

    Raises:
      ConfigError: the config is invalid, or the workdir holds a run of another config.
      MetricsError: the run diverged.
    """
    check_config(path, configs.load(spec, overrides))
    if final(path, metric) is not None:
        return 0
    started = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        status = train(["--config", spec, "--workdir", str(path), *(f"--config.{word}" for word in overrides)])
    if status == 0:
        print(f"{path}: {metric} {final(path, metric):.4f}, {time.monotonic() - started:.0f} s", flush=True)
    return status


def final(path: Path, metric: str) -> float | None:
    """Return a metric at the end of a run, None for a run that is not complete.

    Raises:
      MetricsError: the run is complete and the metric is not a finite number.
    """
    if not (path / "config.json").is_file():
        return None
    rows = metrics.read(path / "metrics.jsonl")
    if not rows or rows[-1]["step"] != configs.read_json(path / "config.json").get("total_steps"):
        return None
    if (value := rows[-1].get(metric)) is None:
        raise MetricsError(f"{path}: {metric} is not a number after the last step; the run has diverged")
    return float(value)


def finals(folders: Mapping[str, Path], seeds: Iterable[int], metric: str) -> dict[int, dict[str, float]]:
    """Return the final metric of each arm, given by its folder, for all seeds that are complete in every arm.

    Raises:
      ConfigError: the runs of an arm differ in more than their seed.
    """
    found = {seed: {arm: final(folder / f"seed{seed}", metric) for arm, folder in folders.items()} for seed in seeds}
    complete = {
        seed: {arm: value for arm, value in each.items() if value is not None}
        for seed, each in found.items()
        if None not in each.values()
    }
    for folder in folders.values():
        check_same_config([folder / f"seed{seed}" for seed in complete])
    return complete


def all_finals(
    runs: Path, folders: Mapping[str, Path], seeds: Sequence[int], metric: str
) -> dict[int, dict[str, float]]:
    """Return `finals` of all seeds; `runs` names the runs in errors.

    Raises:
      ConfigError: a run is not complete, or the runs of an arm differ in more than their seed.
    """
    values = finals(folders, seeds, metric)
    if missing := [seed for seed in seeds if seed not in values]:
        raise ConfigError(f"{runs}: the runs of seed {missing[0]} are not complete")
    return values


def check_config(path: Path, config: configs.ConfigDict) -> None:
    """Raise ConfigError if a workdir holds a run of another config than `config`; the data may complete a config."""
    if (path / "config.json").is_file():
        saved = configs.read_json(path / "config.json")
        completed = task_class(config).complete(config, saved)
        _check(path, json.loads(saved.to_json()), json.loads(completed.to_json()))


def check_same_config(paths: Sequence[Path]) -> None:
    """Raise ConfigError if the configs of runs differ in more than their seed, or the run that they start from."""
    records = [json.loads(configs.read_json(path / "config.json").to_json()) for path in paths]
    for path, record in zip(paths, records, strict=True):
        _check(path, record, {**records[0], **{key: record.get(key) for key in OF_A_SEED}})


def _check(path: Path, saved: Mapping[str, object], expected: Mapping[str, object]) -> None:
    compared = [key for key in sorted({*saved, *expected}) if key == "evals" or not identity.is_free(key)]
    found = identity.differences("config", *({key: each.get(key) for key in compared} for each in (saved, expected)))
    if found:
        different = "; ".join(f"{key} ({values})" for key, values in found.items())
        raise ConfigError(f"{path} holds a run of another config: {different}. Remove it, or give another --out")


def parameters(path: Path) -> int:
    """Return the number of parameters of a run."""
    count: int = metrics.read(path / "metrics.jsonl")[0]["num_params"]
    return count


def machine() -> str:
    """Return the machine in words."""
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"
