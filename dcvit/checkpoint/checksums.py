"""The seal of a checkpoint: `SHA256SUMS`, in the format of sha256sum(1), names every other file of its folder.

It is checked before anything is loaded: neither Orbax nor what lies below it notices when the bytes of an array change
on the disk.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dcvit.checkpoint.files import Folder
from dcvit.errors import first_line

NAME = "SHA256SUMS"
THREADS = 4


def write(folder: Folder, leave_out: Sequence[str] = ()) -> None:
    """Seals a folder, but for the files of some names at its top, which are written later.

    Local files are on the disk, not only in the system's memory, when this returns.
    """
    names = [name for name in _files(folder) if name not in leave_out]
    with ThreadPoolExecutor(THREADS) as pool:
        sums = list(pool.map(lambda name: _sha256(folder / name, sync=True), names))
    text = "".join(f"{found}  {name}\n" for found, name in zip(sums, names, strict=True))
    with (folder / NAME).open("w") as file:
        file.write(text)
        file.flush()
        _sync(file)


def items(folder: Folder) -> set[str]:
    """The folders inside a folder that its seal names; none where it has no seal that can be read."""
    try:
        return {name.partition("/")[0] for name in _parse((folder / NAME).read_bytes()) if "/" in name}
    except (OSError, ValueError):
        return set()


def problems(
    folder: Folder, only: Sequence[str] | None = None, share: tuple[int, int] = (0, 1), left_out: Sequence[str] = ()
) -> list[str]:
    """What is wrong with a sealed folder, a line for each damaged file, none where all is well.

    Args:
      folder: the folder.
      only: these folders inside it, and the files beside them; None: all.
      left_out: what `write` left out may be there.
      share: (i, n) reads only every n-th file, from the i-th on: n processes share the work.
    """
    try:
        sums = _parse((folder / NAME).read_bytes())
        names = _files(folder)
    except (OSError, ValueError) as e:
        return [f"{NAME} {'is missing' if isinstance(e, FileNotFoundError) else first_line(e)}"]
    wanted: Callable[[str], bool] = lambda name: only is None or "/" not in name or name.split("/")[0] in only  # noqa: E731
    missing = [f"{name} is missing" for name in sums if name not in names and wanted(name)]
    foreign = [f"{name} does not belong there" for name in names if name not in (*sums, *left_out) and wanted(name)]
    present = [name for name in names if name in sums and wanted(name)][share[0] :: share[1]]

    def check(name: str) -> str | None:
        try:
            return None if _sha256(folder / name) == sums[name] else f"{name} is not what was saved"
        except OSError as e:
            return f"{name}: {first_line(e)}"

    with ThreadPoolExecutor(THREADS) as pool:
        return [*missing, *foreign, *filter(None, pool.map(check, present))]


def _files(folder: Folder) -> list[str]:
    """The names of all files in a folder and below, but for the seal itself, sorted."""
    found: list[str] = []
    for path in folder.iterdir():
        inside = path.is_dir() and not (isinstance(path, Path) and path.is_symlink())
        found += [f"{path.name}/{name}" for name in _files(path)] if inside else [path.name]
    return sorted(name for name in found if name != NAME)


def _parse(text: bytes) -> dict[str, str]:
    """From name to SHA-256. Raises ValueError for any line that `write` would not have written."""
    sums: dict[str, str] = {}
    lines = text.decode().split("\n")
    if lines.pop() != "" or not lines:
        raise ValueError("is cut short")
    for number, line in enumerate(lines, start=1):
        match = re.fullmatch(r"([0-9a-f]{64})  ([^\0]+)", line)
        if not match or match[2] in sums:
            raise ValueError(f"line {number} is damaged")
        sums[match[2]] = match[1]
    return sums


def _sha256(path: Folder, *, sync: bool = False) -> str:
    """A regular file's sum; what is none, such as a pipe, raises OSError instead of being waited for."""
    if not path.is_file():
        raise OSError("is no regular file")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            _sync(file)
    return found


def _sync(file: Any) -> None:
    """Sends an open file's content to the disk, where it lies on one."""
    try:
        number = file.fileno()
    except (OSError, AttributeError):  # an object of a store, which is there once it is closed
        return
    os.fsync(number)
