"""Checkpoints: saving and restoring a run with Orbax, and reading parameters to start from or to evaluate.

A run keeps them in `<workdir>/checkpoints/<step>/`, with the items `params`, `ema` (if averaged) and
`rest` (step and optimiser state), so that evaluation reads no more than it needs.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import numpy as np
import orbax.checkpoint as ocp

from dcvit.config import check_regex
from input_pipeline.errors import first_line

FOLDER = "checkpoints"


class CheckpointError(ValueError):
    """A checkpoint that is missing, unreadable or of another model; the message names it."""


class Checkpoints:
    """The checkpoints of one run. Saving is asynchronous and atomic; `close` waits for what is under way."""

    def __init__(self, workdir: Path, *, keep: int = 1):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self.folder = workdir / FOLDER
        self.manager = ocp.CheckpointManager(self.folder.absolute(), options=options)

    def latest(self) -> int | None:
        """The newest step that was saved completely, or None."""
        return self.manager.latest_step()

    def save(self, step: int, items: Mapping[str, Any]) -> None:
        """Saves trees of arrays by name, unless this step is there already."""
        if step != self.latest():
            self.manager.save(step, args=ocp.args.Composite(**{k: ocp.args.StandardSave(v) for k, v in items.items()}))

    def restore(self, step: int, items: Mapping[str, Any]) -> dict[str, Any]:
        """The items of a step, in the structure, dtypes and shardings of the given ones.

        Raises:
          CheckpointError: unreadable, or a tree or shape differs.
        """
        path = self.folder / str(step)
        for name in ("params", "ema"):
            if name in items:
                check_tree(shapes_of(_metadata(path / name)), shapes_of(items[name]), str(path))
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, dict(items))
        args = ocp.args.Composite(**{k: ocp.args.StandardRestore(v) for k, v in abstract.items()})
        try:
            return dict(self.manager.restore(step, args=args).items())
        except Exception as e:
            raise CheckpointError(f"cannot restore {path}: {first_line(e)}") from e

    def close(self) -> None:
        self.manager.wait_until_finished()
        self.manager.close()


def load_params(source: str | Path, place: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """The parameters of a checkpoint as a nested dict of arrays: the averaged ones where there are any.

    Args:
      source: a workdir (its newest checkpoint), one checkpoint's folder, or a big_vision `.npz` file.
      place: from the tree of shapes to one of shardings; by default all on this process's first device.

    Raises:
      CheckpointError: missing or unreadable.
    """
    path = Path(source).expanduser()
    if path.is_file():
        loaded = _load_npz(path)
        return jax.device_put(loaded, place(loaded)) if place else loaded
    path = step_folder(path)
    item = next((path / name for name in ("ema", "params") if (path / name).is_dir()), path / "params")
    found = _metadata(item)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = place(found) if place else jax.tree.map(lambda _: device, found)
    target = jax.tree.map(lambda m, p: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=p), found, places)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            params: dict[str, Any] = checkpointer.restore(item.absolute(), target)
    except Exception as e:
        raise CheckpointError(f"cannot read {item}: {first_line(e)}") from e
    return params


def step_folder(path: Path) -> Path:
    """The folder of one checkpoint, given it or a workdir, of which the newest counts."""
    if (path / "params").is_dir():
        return path
    steps = saved_steps(path)
    if not steps:
        raise CheckpointError(f"no checkpoint in {path}")
    return path / FOLDER / str(max(steps))


def saved_steps(workdir: Path) -> list[int]:
    """The steps that a run has completely saved."""
    folder = workdir / FOLDER
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []


def merge_params(loaded: Mapping[str, Any], inited: Mapping[str, Any], dont_load: Sequence[str] = ()) -> dict[str, Any]:
    """`inited` with all values of `loaded`, but for parameters whose whole name matches a regex of `dont_load`.

    Raises:
      CheckpointError: a name or shape stands on one side only; both sides are listed.
      ConfigError: a pattern of `dont_load` is no regular expression.
    """
    old, new = (flax.traverse_util.flatten_dict(dict(tree), sep="/") for tree in (loaded, inited))
    for pattern in dont_load:
        check_regex(pattern, "dont_load")

    def wanted(name: str) -> bool:
        return not any(re.fullmatch(pattern, name) for pattern in dont_load)

    old = {name: value for name, value in old.items() if wanted(name)}
    kept = {name: value for name, value in new.items() if not wanted(name)}
    check_tree(shapes_of(old), {n: s for n, s in shapes_of(new).items() if n not in kept}, "checkpoint")
    merged = {name: jax.numpy.asarray(value, new[name].dtype) for name, value in old.items()}
    tree: dict[str, Any] = flax.traverse_util.unflatten_dict(merged | kept, sep="/")
    return tree


def check_tree(found: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    """Raises CheckpointError, listing both sides, where two maps from names to shapes differ."""
    sides = (
        ("only in the checkpoint", [n for n in found if n not in expected]),
        ("only in the model", [n for n in expected if n not in found]),
        (
            "of another shape",
            [
                f"{n} (checkpoint {found[n]}, model {expected[n]})"
                for n in found
                if n in expected and found[n] != expected[n]
            ],
        ),
    )
    parts = [f"{len(names)} {title}: {_some(names)}" for title, names in sides if names]
    if parts:
        raise CheckpointError(f"{what} does not fit the model; {'; '.join(parts)}")


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def shapes_of(tree: Any) -> dict[str, tuple[int, ...]]:
    """Each array of a nested dict by its path, as a shape."""
    return {name: tuple(leaf.shape) for name, leaf in flax.traverse_util.flatten_dict(dict(tree), sep="/").items()}


def _metadata(item: Path) -> Any:
    """The tree of shapes and dtypes of a saved item."""
    try:
        return ocp.StandardCheckpointHandler().metadata(item.absolute()).tree
    except Exception as e:
        raise CheckpointError(f"cannot read {item}: {first_line(e)}") from e


def _load_npz(path: Path) -> dict[str, Any]:
    """big_vision's format: arrays named by their path in the tree, at times below `params`. Never unpickles."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            flat = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as e:
        raise CheckpointError(f"cannot read {path} as .npz: {first_line(e)}") from e
    tree: dict[str, Any] = flax.traverse_util.unflatten_dict(flat, sep="/")
    params: dict[str, Any] = tree.get("params", tree)
    return params
