"""Checkpoint folders of a run: listing of complete ones, removal, and messages about damaged ones.

On a disk a checkpoint is complete once it has its name, the number of its step. An object store cannot rename a folder;
there a checkpoint is complete once the object `commit_success.txt` exists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dcvit.errors import CheckpointError, first_line
from dcvit.runs import checksums
from dcvit.runs.files import Folder, remove, rename

FOLDER = "checkpoints"
TEMPORARY = ".orbax-checkpoint-tmp"  # part of the name of a folder that Orbax has not completed
ABOUT = "about"  # item with the description of the run
ABOUT_TYPES: dict[str, type] = {
    "step": int, "config": dict, "data": dict, "software": dict, "devices": dict, "row": dict, "seconds": float,
}  # fmt: skip
COMMITTED = "commit_success.txt"
WRITTEN_LAST = (COMMITTED, "_CHECKPOINT_METADATA")  # in a store: objects that Orbax writes after the checksums
CONVERTED = 0  # the step of a converted model, which no run saves: it has the parameters only


def saved_steps(workdir: Folder) -> list[int]:
    """Return the steps of the complete checkpoints of a run, in ascending order, including damaged ones."""
    return complete_steps(workdir / FOLDER)


def step_folder(path: Folder) -> Folder:
    """Return the folder of one checkpoint, given that folder or a workdir, whose latest checkpoint is used.

    Raises:
      CheckpointError: the workdir has no checkpoint.
    """
    if (path / "params").is_dir() or (path / checksums.NAME).is_file():
        return path
    steps = saved_steps(path)
    if not steps:
        raise CheckpointError(f"no checkpoint in {path}")
    return path / FOLDER / str(max(steps))


def complete_steps(folder: Folder) -> list[int]:
    """Return the steps of the checkpoints in a folder that are complete, in ascending order."""
    paths = [path for path in folder.iterdir() if is_step(path.name)] if folder.is_dir() else []
    if not isinstance(folder, Path):
        paths = [path for path in paths if (path / COMMITTED).exists()]
    return sorted(int(path.name) for path in paths)


def is_step(name: str) -> bool:
    """Return True if a folder has the name of a step: ASCII digits without leading zeros."""
    return re.fullmatch("0|[1-9][0-9]*", name) is not None


def about(path: Folder) -> dict[str, Any]:
    """Return the description of the run that a checkpoint was saved with, `step` included.

    Raises:
      CheckpointError: the description is missing or damaged.
    """
    file = path / ABOUT / "metadata"
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"cannot read {file}: {first_line(e)}") from None
    if not isinstance(found, dict) or "step" not in found:
        raise CheckpointError(f"cannot read {file}: expected a JSON object with a step")
    for name, kind in ABOUT_TYPES.items():
        if name in found and not isinstance(found[name], kind):
            raise CheckpointError(f"cannot read {file}: {name!r} is of type {type(found[name]).__name__}")
    return found


def steps_to_remove(steps: Sequence[int], keep: int, keep_every: int | None, best: int | None) -> list[int]:
    """Return all `steps` but the `keep` latest ones, `best`, the multiples of `keep_every`, and `CONVERTED`."""
    kept = {*steps[-keep:], best, CONVERTED}
    return [step for step in steps if step not in kept and not (keep_every and step % keep_every == 0)]


def remove_step(path: Folder) -> None:
    """Remove a checkpoint. A kill during the removal leaves no folder that looks like a complete checkpoint."""
    if isinstance(path, Path):
        removed = path.with_name(f"{path.name}{TEMPORARY}-removed")
        rename(path, removed)
        path = removed
    else:
        (path / COMMITTED).unlink()
    remove(path)


def remove_incomplete(folder: Folder) -> None:
    """Remove checkpoints that were not completed, or not completely removed."""
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        uncommitted = not isinstance(path, Path) and is_step(path.name) and not (path / COMMITTED).exists()
        if TEMPORARY in path.name or uncommitted:
            remove(path)


def problems(path: Folder, only: Sequence[str] | None = None, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Return a message for each problem of a checkpoint, see `checksums.problems`, and for a name of another step.

    With such a name, the folder was renamed, exchanged with another one, or linked.
    """
    ignored = () if isinstance(path, Path) else WRITTEN_LAST
    found = checksums.problems(path, only=only and (*only, ABOUT), share=share, ignored=ignored)
    if not found and is_step(path.name) and (step := about(path)["step"]) != int(path.name):
        found = [f"{ABOUT}/metadata belongs to step {step}"]
    return found


def damage_message(path: Folder, found: Sequence[str]) -> str:
    """Return the beginning of a message about a damaged checkpoint: its path and its first damaged files."""
    return f"checkpoint {path} is damaged: {checksums.listed(found)}"


def intact_before(path: Folder) -> Folder | None:
    """Return the latest intact checkpoint before the one at `path`; None if there is none."""
    found = complete_steps(path.parent) if is_step(path.name) else []
    earlier = (path.parent / str(step) for step in reversed(found) if step < int(path.name))
    return next((checkpoint for checkpoint in earlier if not problems(checkpoint)), None)
