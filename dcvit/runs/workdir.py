"""Identity of the run in a workdir: a workdir is resumed only with the config and the data that it was started with."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dcvit.config import load as configs
from dcvit.errors import CheckpointError, ConfigError, first_line, nearest
from dcvit.runs import checksums, metrics
from dcvit.runs.files import Folder, absolute, replace
from dcvit.runs.steps import ABOUT, FOLDER, about, problems, saved_steps
from input_pipeline import InputError, Source
from input_pipeline.errors import ReadingError

Record = dict[str, Any]  # a JSON object
ACCEPTED = "accepted.json"  # names given to --accept, by which checkpoints may differ from config.json and data.json
SHARED_SECONDS = 20  # a network file system shows the files of other processes with a delay
SAMPLES = 16  # examples whose content identifies the data
MAX_CHARACTERS, MAX_PATH = 60, 200  # of a value, and of a path that cannot be read, in a message
# Keys that may change when a run is resumed, because the result of a step does not depend on them.
FREE_KEYS = (
    "mesh", "sharding_strategy", "evals", "pp_predict", "tensorboard", "profile", "on_corrupt", "nonfinite_skip",
    "watchdog_seconds", "watchdog_exit", "early_stop", "wandb",
    "require_fused",
)  # fmt: skip
FREE_PREFIXES = ("log_", "ckpt_", "keep_ckpt_")
SOFTWARE = ("dcvit", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")


def find(path: Folder) -> Folder | None:
    """Return the workdir that a path is, or is a checkpoint of; None if it is neither.

    Raises:
      CheckpointError: the path cannot be read.
      ConfigError: the path is a checkpoint whose run has no config.json.
    """
    try:
        if (path / FOLDER).is_dir():
            return path
        if not (path / ABOUT).is_dir() and not (path / checksums.NAME).is_file():
            return None
        workdir = absolute(path).parent.parent
        if (workdir / "config.json").is_file():
            return workdir
    except Exception as e:  # such as a name that is too long; libraries for stores have error types of their own
        reason = e.strerror if isinstance(e, OSError) and e.strerror else first_line(e)
        raise CheckpointError(f"cannot read {str(path)[:MAX_PATH]}: {reason}") from None
    raise ConfigError(f"{path} is a checkpoint without the config.json of its run in {workdir}")


def data_identity(source: Source) -> Record:
    """Identify a data source by its size, its class names, and a hash of examples at regular distances."""
    digest = hashlib.sha256()
    for index in sorted({i * (len(source) - 1) // (SAMPLES - 1) for i in range(SAMPLES)}):
        try:
            example = source[index]
        except ReadingError:
            raise
        except InputError:  # a damaged example identifies the data as well as an intact one
            digest.update(b"damaged")
            continue
        for key in sorted(example):
            value = example[key]
            digest.update(key.encode())
            digest.update(value if isinstance(value, bytes) else np.asarray(value).tobytes())
    names = source.class_names
    return {"examples": len(source), "class_names": names and list(names), "sample": digest.hexdigest()}


def software() -> dict[str, str]:
    """Return the versions of the packages on which the bits of a result depend."""
    found = {"python": platform.python_version()}
    for name in SOFTWARE:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # not installed, but run from a checkout
            found[name] = "unknown"
    return found


def devices() -> Record:
    """Return the kind and number of the devices, and the number of processes."""
    return {"kind": jax.devices()[0].device_kind, "count": jax.device_count(), "processes": jax.process_count()}


def check_accepted(accept: Sequence[str]) -> None:
    """Raise ConfigError for a name that is neither "data" nor a config key, nor inside one of them."""
    valid = ["data", *configs.known_keys()]
    for name in accept:
        if name.partition(".")[0] not in valid:
            raise ConfigError(f"--accept {name}; {nearest(name, valid)}")


def has_started(workdir: Folder, saved: Sequence[int]) -> bool:
    """Return True if the run in a workdir has a checkpoint (of the steps `saved`) or metrics of a step after 0."""
    return bool(saved) or any(row["step"] for row in metrics.read(workdir / "metrics.jsonl"))


def existing(workdir: Folder) -> Record:
    """Read the "config" and the "data" of the run in a workdir; a missing file is omitted.

    Raises:
      ConfigError: a file is damaged.
    """
    found: Record = {}
    if (workdir / "config.json").is_file():
        found["config"] = configs.read_json(workdir / "config.json").to_dict()
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
    run, accept = existing(path), accepted(path)
    found = _run_differences(description, run["config"], run.get("data"))
    refused = [f"{key} ({values})" for key, values in found.items() if not _is_accepted(key, accept)]
    if refused and not problems(checkpoint, only=(ABOUT,)):
        raise CheckpointError(f"{checkpoint} is not a checkpoint of the run in {path}: {'; '.join(refused)}")


def check_same_run(
    folder: Folder, existing: Mapping[str, Any], config: Mapping[str, Any], data: Record, accept: Sequence[str] = ()
) -> list[str]:
    """Check that the config and the data equal those of the run in a workdir, or of a checkpoint.

    Args:
      folder: the workdir or the checkpoint, named in errors.
      existing: "config" and "data" of the workdir or the checkpoint; a missing entry is not compared.
      config: the config.
      data: see `data_identity`.
      accept: config keys, "data", or keys inside them, that may differ.

    Returns:
      A description of each accepted difference.

    Raises:
      ConfigError: there are other differences; the message lists them all.
    """
    found = _run_differences(existing, config, data)
    refused = {key: values for key, values in found.items() if not _is_accepted(key, accept)}
    if refused:
        kind = "on other data" if all(key.startswith("data") for key in refused) else "of another config"
        different = "; ".join(f"{key} ({values})" for key, values in refused.items())
        flags = " ".join(f"--accept {key.removeprefix('config.')}" for key in refused)
        raise ConfigError(f"{folder} holds a run {kind}: {different}. To resume it anyway: {flags}")
    return [f"{key} ({found[key]})" for key in found]


def _run_differences(saved: Mapping[str, Any], config: Mapping[str, Any], data: Record | None) -> dict[str, str]:
    """Return a description of each difference of the config and the data, by "config.KEY" or "data.KEY"."""
    found: dict[str, str] = {}
    if "config" in saved:
        before = saved["config"]
        defaults = json.loads(json.dumps(configs.defaults()))  # of keys that an older version did not have
        for key in sorted(key for key in {*before, *config} if not is_free(key)):
            found |= differences(f"config.{key}", before.get(key, defaults.get(key)), config.get(key))
    if "data" in saved and data is not None:
        found |= differences("data", saved["data"], data)
    return found


def is_free(key: str) -> bool:
    """Return True for a config key that does not change the result of a step, so that a resumed run may change it."""
    return key in FREE_KEYS or key.startswith(FREE_PREFIXES)


def _is_accepted(key: str, accept: Sequence[str]) -> bool:
    name = key.removeprefix("config.")
    return any(name == a or name.startswith(f"{a}.") for a in accept)


def record(workdir: Folder, config: Mapping[str, Any], data: Record, accept: Sequence[str] = ()) -> None:
    """Write `config.json` and `data.json`, and the accepted names to `accepted.json` if there are any."""
    files = {"data.json": data, "config.json": dict(config), ACCEPTED: {"accept": list(accept)}}
    for name, content in files.items():
        if name != ACCEPTED or accept:
            replace(workdir / name, json.dumps(content, indent=2 if name == "config.json" else None) + "\n")


def resume_warnings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return a line for each reason why the result of a resumed run will not be bitwise reproducible.

    Args:
      saved: the `about` of the checkpoint, with "software" and "devices".
      current: the same for this process.
    """
    lines = []
    for kind in ("software", "devices"):
        if found := differences(kind, saved.get(kind, current[kind]), current[kind]):
            different = "; ".join(f"{key} ({values})" for key, values in found.items())
            lines.append(f"resuming with other {kind}; the result is not bitwise reproducible: {different}")
    return lines


def check_shared(workdir: Folder) -> None:
    """Raise ConfigError if this process does not find the file that the first process has written to the workdir."""
    for _ in range(SHARED_SECONDS):
        if (workdir / "config.json").is_file():
            return
        time.sleep(1)
    raise ConfigError(f"workdir {workdir} is not on a file system that all processes share")


def differences(name: str, saved: object, current: object) -> dict[str, str]:
    """Return a description of each value that differs, by its dotted name."""
    if isinstance(saved, dict) and isinstance(current, dict):
        found: dict[str, str] = {}
        for key in sorted({*saved, *current}):
            found |= differences(f"{name}.{key}", saved.get(key), current.get(key))
        return found
    return {} if saved == current else {name: f"saved: {_short(saved)}, now: {_short(current)}"}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"


def _read(path: Folder) -> Record:
    try:
        found: Record = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"cannot read {path}: {first_line(e)}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"cannot read {path}: expected a JSON object")
    return found
