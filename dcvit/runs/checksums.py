"""Checksums of a checkpoint or of a converted model: one file, in the format of sha256sum(1), lists the other files.

They are verified before anything is loaded, because neither Orbax nor TensorStore nor safetensors notices when the
bytes of an array change on the disk.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dcvit.errors import CheckpointError, first_line
from dcvit.runs.files import Folder, sync_names

NAME = "SHA256SUMS"  # of a checkpoint, which it identifies
WEIGHTS = "checksums.sha256"  # of a folder of weights
CODE = ".py"  # suffix of files that are never read
THREADS = 4
MAX_NAMED = 4  # damaged files in a message


def write(folder: Folder, ignored: Sequence[str] = (), name: str = NAME) -> None:
    """Write the checksums of a folder, except those of top-level files in `ignored`, to its file `name`.

    All local files, and their names, are flushed to the disk before this returns.
    """
    names = [name for name in _files(folder) if name not in ignored]
    with ThreadPoolExecutor(THREADS) as pool:
        sums = list(pool.map(lambda name: _sha256(folder / name, sync=True), names))
    text = "".join(f"{found}  {name}\n" for found, name in zip(sums, names, strict=True))
    with (folder / name).open("w") as file:
        file.write(text)
        file.flush()
        _sync(file)
    if os.path.isdir(folder):  # noqa: PTH112 - a local folder, also by a path of etils
        for parent in {Path(folder), *(Path(folder, file).parent for file in names)}:
            sync_names(parent)


def files(folder: Path, name: str) -> list[str]:
    """Return the paths of the files in the folder's checksums `name`. Raise CheckpointError if these are damaged."""
    try:
        return list(_read(folder / name))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"cannot read {folder / name}: {first_line(e)}") from None


def items(folder: Folder) -> set[str]:
    """Return the names of the subfolders in a checkpoint's checksums; empty if these are missing or damaged."""
    try:
        return {name.partition("/")[0] for name in _read(folder / NAME) if "/" in name}
    except (OSError, ValueError):
        return set()


def problems(
    folder: Folder,
    only: Sequence[str] | None = None,
    share: tuple[int, int] = (0, 1),
    ignored: Sequence[str] = (),
    name: str = NAME,
) -> list[str]:
    """Verify a folder and return a message for each missing, foreign or damaged file.

    Args:
      folder: the folder.
      only: verify only the files of these subfolders and those at the top; None verifies all.
      share: (i, n) reads only every n-th file, starting with the i-th, so that n processes share the work.
      ignored: top-level files that may exist without a checksum.
      name: the file of the checksums. `WEIGHTS` may lack some files, and files of code, which are not read, may be
        absent, as in a download.
    """

    def is_selected(name: str) -> bool:
        return only is None or "/" not in name or name.split("/")[0] in only

    def check(name: str) -> str | None:
        try:
            return None if _sha256(folder / name) == sums[name] else f"{name} differs from what was saved"
        except OSError as e:
            return f"{name}: {first_line(e)}"

    try:
        sums = _read(folder / name)
        names = _files(folder)
    except (OSError, ValueError) as e:
        return [f"{name} {'is missing' if isinstance(e, FileNotFoundError) else first_line(e)}"]
    needed = [each for each in sums if is_selected(each) and not (name == WEIGHTS and each.endswith(CODE))]
    missing = [f"{each} is missing" for each in needed if each not in names]
    known = names if name == WEIGHTS else (*sums, *ignored)
    foreign = [f"{name} has no checksum" for name in names if name not in known and is_selected(name)]
    present = [name for name in names if name in sums and is_selected(name)][share[0] :: share[1]]
    with ThreadPoolExecutor(THREADS) as pool:
        return [*missing, *foreign, *filter(None, pool.map(check, present))]


def check_weights(path: Path) -> None:
    """Verify the folder of weights (for a file, its folder) if a conversion wrote its checksums.

    Raises:
      CheckpointError: a file is missing or damaged.
    """
    folder = path if path.is_dir() else path.parent
    if not (folder / WEIGHTS).exists():
        return
    files = ((folder / name).lstat() for name in [*_files(folder), WEIGHTS])
    if found := _weights_problems(folder, tuple((file.st_ino, file.st_ctime_ns) for file in files)):
        raise CheckpointError(f"{folder} is damaged: {listed(found)}; if the change is yours, remove its {WEIGHTS}")


@functools.lru_cache(maxsize=8)  # a command opens weights several times
def _weights_problems(folder: Path, state: tuple[tuple[int, int], ...]) -> list[str]:
    return problems(folder, name=WEIGHTS)


def listed(found: Sequence[str]) -> str:
    """Return the first MAX_NAMED messages of `problems` as one text for an error, and the number of the others."""
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return f"{', '.join(found[:MAX_NAMED])}{more}"


def _files(folder: Folder) -> list[str]:
    """Return the paths of all files in a folder and its subfolders, except those of checksums, sorted."""
    found: list[str] = []
    for path in folder.iterdir():
        inside = path.is_dir() and not (isinstance(path, Path) and path.is_symlink())
        found += [f"{path.name}/{name}" for name in _files(path)] if inside else [path.name]
    return sorted(name for name in found if name not in (NAME, WEIGHTS))


def _read(path: Folder) -> dict[str, str]:
    """Return the SHA-256 of each file that a file of checksums lists, by the file's path.

    Raises:
      OSError: the file is missing, or is not a regular file.
      ValueError: the file has a line that `write` does not write.
    """
    if path.exists() and not path.is_file():
        raise OSError("is not a regular file")
    sums: dict[str, str] = {}
    lines = path.read_bytes().decode().split("\n")
    if lines.pop() != "" or not lines:
        raise ValueError("is truncated")
    for number, line in enumerate(lines, start=1):
        match = re.fullmatch(r"([0-9a-f]{64})  ([^\0]+)", line)
        if not match or match[2] in sums:
            raise ValueError(f"line {number} is damaged")
        sums[match[2]] = match[1]
    return sums


def _sha256(path: Folder, *, sync: bool = False) -> str:
    """Return the SHA-256 of a regular file. Raise OSError for anything else, such as a pipe, which would block."""
    if not path.is_file():
        raise OSError("is not a regular file")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            _sync(file)
    return found


def _sync(file: Any) -> None:
    """Flush an open local file from the system's cache to the disk; an object in a store is complete once closed."""
    try:
        number = file.fileno()
    except (OSError, AttributeError):
        return
    os.fsync(number)
