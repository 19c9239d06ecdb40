"""The folder of a run: who may write to it, and whether what is started there is the run that it holds."""

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

from dcvit import config as configs
from dcvit.checkpoint.files import Folder, replace
from dcvit.errors import ConfigError, first_line, nearest
from dcvit.runs import metrics
from input_pipeline import InputError, Source
from input_pipeline.errors import ReadingError

SHARED_SECONDS = 20  # until what one process wrote is seen by all
SAMPLES = 16  # examples whose content identifies the data
# What may change between the stretches of one run: it does not touch what a step computes.
FREE_KEYS = (
    "mesh", "sharding_strategy", "evals", "pp_predict", "tensorboard", "profile", "on_corrupt", "nonfinite_skip",
    "watchdog_seconds", "watchdog_exit",
)  # fmt: skip
FREE_PREFIXES = ("log_", "ckpt_", "keep_ckpt_")
SOFTWARE = ("dcvit", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")


def data_identity(source: Source) -> dict[str, Any]:
    """What a source of data is known by: size, class names, and the content of examples spread over all of it."""
    digest = hashlib.sha256()
    for index in sorted({i * (len(source) - 1) // (SAMPLES - 1) for i in range(SAMPLES)}):
        try:
            example = source[index]
        except ReadingError:
            raise
        except InputError:  # a damaged one is as good a mark as any
            digest.update(b"damaged")
            continue
        for key in sorted(example):
            value = example[key]
            digest.update(key.encode())
            digest.update(value if isinstance(value, bytes) else np.asarray(value).tobytes())
    names = source.class_names
    return {"examples": len(source), "class_names": names and list(names), "sample": digest.hexdigest()}


def software() -> dict[str, str]:
    """The versions that the bits of a result depend on."""
    found = {"python": platform.python_version()}
    for name in SOFTWARE:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from a checkout
            found[name] = "unknown"
    return found


def devices() -> dict[str, Any]:
    """What a run computes on."""
    return {"kind": jax.devices()[0].device_kind, "count": jax.device_count(), "processes": jax.process_count()}


def check_accepted(accept: Sequence[str]) -> None:
    """Raises ConfigError for a name that is neither "data" nor a key of configs, or one inside it."""
    known = ["data", *configs.known_keys()]
    for name in accept:
        if name.partition(".")[0] not in known:
            raise ConfigError(f"--accept {name}; {nearest(name, known)}")


def has_started(workdir: Folder, saved: Sequence[int]) -> bool:
    """Whether a workdir holds a run that has got somewhere: a checkpoint, or a row of metrics after step 0."""
    return bool(saved) or any(row["step"] for row in metrics.read(workdir / "metrics.jsonl"))


def existing(workdir: Folder) -> dict[str, Any]:
    """What a workdir says of its run: "config" and "data", as far as it says so.

    Raises:
      ConfigError: it says so in files that are damaged.
    """
    found: dict[str, Any] = {}
    if (workdir / "config.json").is_file():
        found["config"] = configs.read_json(workdir / "config.json").to_dict()
    if (workdir / "data.json").is_file():
        found["data"] = _read(workdir / "data.json")
    return found


def check_same_run(
    workdir: Folder,
    theirs: Mapping[str, Any],
    config: Mapping[str, Any],
    data: Mapping[str, Any],
    accept: Sequence[str] = (),
) -> list[str]:
    """The differences between this run and the one of `existing`, or of a checkpoint's `about`, that `accept` names.

    Raises:
      ConfigError: there are others; all are listed.
    """
    differing: dict[str, str] = {}
    if "config" in theirs:
        mine = config
        free = {key for key in {*theirs["config"], *mine} if key in FREE_KEYS or key.startswith(FREE_PREFIXES)}
        for key in sorted({*theirs["config"], *mine} - free):
            differing |= _differences(f"config.{key}", theirs["config"].get(key), mine.get(key))
    if "data" in theirs:
        differing |= _differences("data", theirs["data"], dict(data))
    names = {what: what.removeprefix("config.") for what in differing}
    allowed = [w for w, name in names.items() if any(name == a or name.startswith(f"{a}.") for a in accept)]
    refused = [f"{what} ({differing[what]})" for what in differing if what not in allowed]
    if refused:
        flags = " ".join(f"--accept {names[what]}" for what in differing if what not in allowed)
        kind = "on other data" if all(what.startswith("data") for what in refused) else "of another config"
        raise ConfigError(f"{workdir} holds a run {kind}: {'; '.join(refused)}. To go on knowingly: {flags}")
    return [f"{what} ({differing[what]})" for what in allowed]


def record(workdir: Folder, config: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Writes `config.json` and `data.json`."""
    for name, content in (("data.json", dict(data)), ("config.json", dict(config))):
        replace(workdir / name, json.dumps(content, indent=2 if name == "config.json" else None) + "\n")


def resume_warnings(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Why a run will not go on to the same bits, a line each: what was said `about` its checkpoint, and is so here."""
    lines = []
    for kind in ("software", "devices"):
        differing = _differences(kind, there.get(kind, here[kind]), here[kind])
        if differing:
            what = "; ".join(f"{name} ({values})" for name, values in differing.items())
            lines.append(f"going on with other {kind}, so no longer bit for bit: {what}")
    return lines


def check_shared(workdir: Folder) -> None:
    """Raises ConfigError where this process does not see what the first one has written to the workdir."""
    for _ in range(SHARED_SECONDS):  # file systems of a network may remember for a while that there was nothing
        if (workdir / "config.json").is_file():
            return
        time.sleep(1)
    raise ConfigError(f"workdir {workdir} is not on a file system that all processes share")


def _differences(what: str, there: Any, here: Any) -> dict[str, str]:
    """Each value that differs, by its name with dots."""
    if isinstance(there, dict) and isinstance(here, dict):
        found: dict[str, str] = {}
        for key in sorted({*there, *here}):
            found |= _differences(f"{what}.{key}", there.get(key), here.get(key))
        return found
    return {} if there == here else {what: f"there {_short(there)}, here {_short(here)}"}


def _short(value: Any, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else text[: most - 1] + "…"


def _read(path: Folder) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"cannot read {path}: {first_line(e)}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"cannot read {path}: expected a JSON object")
    return found
