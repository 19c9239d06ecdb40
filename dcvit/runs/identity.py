"""Identity of a run: its config, its data, and the software and devices that its bits depend on.

A workdir is resumed only with the config and the data that it was started with.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

import input_pipeline
from dcvit.config import values
from dcvit.errors import REMOVED, ConfigError, nearest
from dcvit.runs.files import Folder
from input_pipeline.errors import InputError, ReadingError

Record = dict[str, Any]  # a JSON object
Facts: TypeAlias = Mapping[str, Any]  # a JSON object that is read only
SAMPLES = 16  # examples whose content identifies the data
MAX_CHARACTERS = 60  # of a value in a message
# Keys that may change when a run is resumed, because the result of a step does not depend on them.
FREE_KEYS = (
    "mesh", "sharding_strategy", "evals", "pp_predict", "tensorboard", "profile", "on_corrupt", "nonfinite_skip",
    "watchdog_seconds", "early_stop", "wandb",
    "input.corrupt", "input.corrupt_max",  # damaged examples stop a run, or are replaced as from the start
    "require_fused", "kernels", "check_memory",
)  # fmt: skip
FREE_PREFIXES = ("log_", "ckpt_", "keep_ckpt_")
SOFTWARE = ("dcvit", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")


class Differences(NamedTuple):
    """Differences from a run's config and data: texts by "config.KEY" or "data.KEY", of accepted and refused ones."""

    accepted: dict[str, str]
    refused: dict[str, str]


def data_identity(source: input_pipeline.Source) -> Record:
    """Return what identifies a data source: number of examples, class names, hashes of blocks, examples and files."""
    digest = hashlib.sha256()
    if source.blocks is not None:
        digest.update(source.blocks.sizes.tobytes())
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
    found = {"examples": len(source), "class_names": names and list(names), "sample": digest.hexdigest()}
    return found if source.opened is None else {**found, "files": source.opened.digests()}


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
    """Raise ConfigError if a name of `--accept` is neither "data" nor a config key, nor a key inside one of them."""
    valid = ["data", *values.known_keys()]
    for name in accept:
        if name.partition(".")[0] not in valid:
            raise ConfigError(f"--accept {name}; {nearest(name, valid)}")


def check_same_run(
    folder: Folder, existing: Facts, config: Facts, data: Record, accept: Sequence[str] = ()
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
    accepted, refused = compare(existing, config, data, accept)
    if refused:
        kind = "on other data" if all(key.startswith("data") for key in refused) else "of another config"
        different = "; ".join(f"{key} ({values})" for key, values in refused.items())
        flags = " ".join(f"--accept {key.removeprefix('config.')}" for key in refused)
        raise ConfigError(f"{folder} holds a run {kind}: {different}. To resume it anyway: {flags}")
    return [f"{key} ({values})" for key, values in accepted.items()]


def compare(saved: Facts, config: Facts, data: Record | None, accept: Sequence[str]) -> Differences:
    """Return the differences of a config and data from the "config" and "data" of a run; see `check_same_run`."""
    found: dict[str, str] = {}
    if "config" in saved:
        before, config = (  # removed keys that were not set have no effect
            {key: value for key, value in each.items() if value or f"config.{key}" not in REMOVED}
            for each in (saved["config"], config)
        )
        defaults = json.loads(json.dumps(values.defaults()))  # of keys that an older version did not have
        for key in sorted(key for key in {*before, *config} if not is_free(key)):
            found |= differences(f"config.{key}", before.get(key, defaults.get(key)), config.get(key))
    if "data" in saved and data is not None:
        known = {key: value for key, value in data.items() if key in saved["data"]}  # older versions stored fewer
        found |= differences("data", {**saved["data"], "files": None}, {**known, "files": None})
        found |= _file_differences(saved["data"].get("files"), known.get("files"))
    names = tuple(f"{name}." for name in accept)
    refused = {key: text for key, text in found.items() if not f"{key.removeprefix('config.')}.".startswith(names)}
    return Differences({key: values for key, values in found.items() if key not in refused}, refused)


def _file_differences(saved: Mapping[str, str] | None, current: Mapping[str, str] | None) -> dict[str, str]:
    """Return a description by "data.files" if files differ, else {}; see `input_pipeline.files.OpenedFiles.digests`."""
    if saved is None or current is None:
        return {}
    different = sorted(name for name in {*saved, *current} if saved.get(name) != current.get(name))
    others = f" and {len(different) - 1} other(s)" if different[1:] else ""
    return {"data.files": f"{different[0]}{others} changed"} if different else {}


def is_free(key: str) -> bool:
    """Return True for a config key that does not change the result of a step, so that a resumed run may change it."""
    return key in FREE_KEYS or key.startswith(FREE_PREFIXES)


def resume_warnings(saved: Facts, current: Facts) -> list[str]:
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


def differences(name: str, saved: object, current: object) -> dict[str, str]:
    """Return a text for each difference of two values, by its dotted name: `name`, and the keys of nested dicts."""
    if isinstance(saved, dict) and isinstance(current, dict):
        found: dict[str, str] = {}
        for key in sorted({*saved, *current}):
            found |= differences(f"{name}.{key}", saved.get(key), current.get(key))
        return found
    return {} if saved == current else {name: f"saved: {_short(saved)}, now: {_short(current)}"}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
