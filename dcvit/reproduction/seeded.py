"""Training runs with several seeds for the tables, each in a workdir FOLDER/seedN.

A complete run is skipped, and an interrupted one is resumed. A workdir with another config is an error, so that no
table mixes configs; so is a run that diverged, because a table without it would look better than it is. Results that
take long are computed once, and stored as JSON beside the runs.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import platform
import re
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from dcvit.config import load as configs
from dcvit.config import values
from dcvit.errors import ConfigError, MetricsError, first_line
from dcvit.hub.kinds import kind_of
from dcvit.runs import identity, metrics
from dcvit.runs.files import replace
from dcvit.runs.seeds import workdir_of

Train = Callable[[Sequence[str]], int]  # the command `dcvit train`, which returns its exit status
Value = TypeVar("Value", bound=object)
OF_A_SEED = ("seed", "model_init")  # keys in which the runs of one arm may differ


class Run(NamedTuple):
    """A config that is trained with several seeds.

    Fields:
      folder: the folder of the workdirs, one per seed.
      spec: the config with its arguments.
      overrides: values that replace those of the config, by key.
      metric: the metric after the last step that tables compare, as "EVALUATOR/METRIC".
      first_seed: added to the seed of a workdir, to train with seeds that another comparison does not use.
    """

    folder: Path
    spec: str
    overrides: Mapping[str, object]
    metric: str
    first_seed: int = 0

    def words(self, seed: int) -> list[str]:
        """Return overrides "KEY=VALUE" of a seed's run; its evaluator runs before the first step and at the end."""
        evaluator = self.metric.partition("/")[0]
        last = {"seed": self.first_seed + seed, "tensorboard": False, f"evals.{evaluator}.log_percent": 100}
        return [f"{key}={value}" for key, value in {**self.overrides, **last}.items()]

    def parameters(self, seed: int) -> int:
        """Return the model's number of parameters, which the training run of `seed` wrote to its metrics.jsonl."""
        count: int = metrics.read(workdir_of(self.folder, seed) / "metrics.jsonl")[0]["num_params"]
        return count


def of_model(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the config overrides that set fields of the model: "model.NAME" for each name."""
    return {f"model.{key}": value for key, value in fields.items()}


def folder_of(folder: Path, name: str) -> Path:
    """Return the folder below `folder` for the runs of `name`; characters unfit for file names are replaced."""
    return folder / re.sub(r"[^A-Za-z0-9.=+-]+", "_", name).strip("_")


def train_all(runs: Iterable[Run], seeds: Iterable[int], train: Train) -> int:
    """Train all runs that are not complete, seed by seed; return the exit status of the first that fails, or 0."""
    chosen = [*runs]
    for seed in seeds:
        for run in chosen:
            if status := train_run(run, seed, train):
                return status
    return 0


def train_run(run: Run, seed: int, train: Train) -> int:
    """Train a seed's run, unless it is complete, without showing the output; return the exit status.

    Raises:
      ConfigError: the config is invalid, or the workdir holds a run of another config.
      MetricsError: the run diverged.
    """
    path, words = workdir_of(run.folder, seed), run.words(seed)
    check_config(path, configs.load(run.spec, words))
    if final(path, run.metric) is not None:
        return 0
    started = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        status = train(["--config", run.spec, "--workdir", str(path), *(f"--config.{word}" for word in words)])
    if status == 0:
        print(f"{path}: {run.metric} {final(path, run.metric):.4f}, {time.monotonic() - started:.0f} s", flush=True)
    return status


def final(path: Path, metric: str) -> float | None:
    """Return a metric after the last step of the run in the workdir `path`; None if the run is not complete.

    Raises:
      MetricsError: the run is complete and the metric is not a finite number.
    """
    if not (path / "config.json").is_file():
        return None
    rows = metrics.read(path / "metrics.jsonl")
    if not rows or rows[-1]["step"] != values.read_json(path / "config.json").get("total_steps"):
        return None
    if (value := rows[-1].get(metric)) is None:
        raise MetricsError(f"{path}: {metric} is not a number after the last step; the run has diverged")
    return float(value)


def all_finals(runs: Mapping[str, Run], seeds: Sequence[int]) -> dict[int, dict[str, float]]:
    """Return the metric after the last step of each run, by seed and then by key of `runs`.

    Raises:
      ConfigError: a run is not complete, or the runs of a name differ in more than their seed.
    """
    values: dict[int, dict[str, float]] = {seed: {} for seed in seeds}
    for seed, (name, run) in itertools.product(seeds, runs.items()):
        if (value := final(workdir_of(run.folder, seed), run.metric)) is None:
            raise ConfigError(f"{run.folder.parent}: the runs of seed {seed} are not complete")
        values[seed][name] = value
    for run in runs.values():
        check_same_config([workdir_of(run.folder, seed) for seed in seeds])
    return values


def check_config(path: Path, config: configs.ConfigDict) -> None:
    """Raise ConfigError if a workdir's config differs from `config`, except in values that follow from the data."""
    if (path / "config.json").is_file():
        saved = values.read_json(path / "config.json")
        completed = kind_of(config).complete(config, saved)
        _check(path, json.loads(saved.to_json()), json.loads(completed.to_json()))


def check_same_config(paths: Sequence[Path]) -> None:
    """Raise ConfigError if the configs in workdirs differ in more than the seed and the run that they start from."""
    records = [json.loads(values.read_json(path / "config.json").to_json()) for path in paths]
    for path, record in zip(paths, records, strict=True):
        _check(path, record, {**records[0], **{key: record.get(key) for key in OF_A_SEED}})


def _check(path: Path, saved: Mapping[str, object], expected: Mapping[str, object]) -> None:
    compared = [key for key in sorted({*saved, *expected}) if key == "evals" or not identity.is_free(key)]
    found = identity.differences("config", *({key: each.get(key) for key in compared} for each in (saved, expected)))
    if found:
        different = "; ".join(f"{key} ({values})" for key, values in found.items())
        raise ConfigError(f"{path} holds a run of another config: {different}. Remove it, or give another --out")


def stored(path: Path, source: object, compute: Callable[[], Value]) -> Value:
    """Return the value in a file, or compute it and write the file.

    Args:
      path: the file. It also holds `source`, and a checksum of both.
      source: what the value is computed from, as JSON: configs, or the checksum of a run.
      compute: function that returns the value, as JSON.

    Raises:
      ConfigError: the file is damaged, was changed, or its value was computed from something else.
    """
    if not path.is_file():
        found = {"source": source, "value": compute()}
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, json.dumps({**found, "crc32": checksum(found)}, indent=1, allow_nan=False) + "\n")
    try:
        content = json.loads(path.read_text())
        if content.pop("crc32", None) != checksum(content):
            raise ValueError("its checksum is missing or differs: it was changed")
        value: Value = content["value"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ConfigError(f"cannot read {path}: {first_line(e)}; remove it to compute it again") from None
    if content["source"] != json.loads(json.dumps(source)):
        raise ConfigError(f"{path} was computed from other configs or another run; remove it to compute it again")
    return value


def checksum(content: object) -> str:
    """Return the CRC-32 of JSON as 8 hexadecimal digits."""
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def run_checksum(path: Path) -> str:
    """Return the CRC-32 of a run's metrics, which identifies the run, as 8 hexadecimal digits."""
    return f"{zlib.crc32((path / 'metrics.jsonl').read_bytes()):08x}"


def machine() -> str:
    """Return a text that names the machine."""
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"
