"""Checkpoints of big_vision: `.npz` files and `.bv` folders of TensorStore, of all its releases, or a subtree of one.

https://github.com/google-research/big_vision. Arrays are named by their path in the tree, below `params` or
`opt/target`, or from the root. A `.bv` checkpoint has a folder of the zarr format for each array, with "~" for "/", and
a pointer `NAME-LAST` to the folder of the last step. `FILE:img` names a subtree, such as the image tower of SigLIP.

Names of earlier releases are converted to today's names: `Transformer/posembed_input`, the numbers of modules before
flax linen, and the inlined pooling head. The row of position embeddings for the class token is added to that token.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dcvit.errors import CheckpointError, first_line
from dcvit.parallel.trees import Tensor
from dcvit.weights import npz
from input_pipeline.optional import require

ROOTS = ("params/", "opt/target/")
POINTER = "-LAST"
METADATA = ".zarray"  # of an array in a .bv folder
BEFORE_LINEN = {"MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0", "LayerNorm_2": "LayerNorm_1",
                "MlpBlock_3": "MlpBlock_0"}  # fmt: skip
INLINED_HEAD = ("probe", "MlpBlock_0", "MultiHeadDotProductAttention_0", "LayerNorm_0")
OLD_POSITIONS = ("Transformer/posembed_input/pos_embedding", "Transformer/pos_embedding")
# Names that big_vision's configs may give instead of a path: https://github.com/google-research/big_vision#pretrained-models
RELEASED = re.compile(r"howto-i21k-\w+/\d+|i1k-s16-\d+ep|deit3_\w+")


class Source(NamedTuple):
    """A checkpoint of big_vision: a file or folder, and the subtree to read, "" for all."""

    path: Path
    subtree: str


def locate(path: Path) -> Source | None:
    """Return the checkpoint that a path names, or None if there is neither a file nor a `.bv` folder."""
    pointer = path.with_name(path.name + POINTER) if path.name else path
    if path.is_file() or (path.is_dir() and next(_array_folders(path), None)):
        return Source(path, "")
    if pointer.is_file():
        return Source(_last_step(pointer), "")
    found = re.fullmatch(r"(.+):([\w/]+)", str(path))
    if found and not path.exists():
        whole = locate(Path(found[1]))
        return whole and whole._replace(subtree=found[2].strip("/"))
    return None


def check_named(name: str) -> None:
    """Raise CheckpointError if a path is not a file but one of the names that big_vision has for released files."""
    if RELEASED.fullmatch(name):
        raise CheckpointError(
            f"{name!r} is big_vision's name of a released file: download that of VANITY_NAMES in its "
            "models/vit.py from https://storage.googleapis.com, and give its path"
        )


def open_arrays(source: Source) -> dict[str, Tensor]:
    """Return the arrays of a checkpoint by today's names, below its root or subtree; an array is read on demand.

    Raises:
      CheckpointError: the file or folder is damaged or unsafe (see `dcvit.weights.npz.open_arrays`), has no such
        subtree, or has an array under an old and a new name.
    """
    arrays = _open_folder(source.path) if source.path.is_dir() else npz.open_arrays(source.path)
    root = next((root for root in ROOTS if any(name.startswith(root) for name in arrays)), "")
    below = f"{root}{source.subtree}/" if source.subtree else root
    found = {name.removeprefix(below): array for name, array in arrays.items() if name.startswith(below)}
    if not found:
        names = sorted({name.removeprefix(root).split("/")[0] for name in arrays if name.startswith(root)})
        raise CheckpointError(f"{source.path} has no subtree {source.subtree!r}; it has {', '.join(names) or 'none'}")
    return _with_new_names(found, source.path)


def _last_step(pointer: Path) -> Path:
    """Return the folder of the last step, which the file `pointer` names."""
    try:
        step = pointer.read_bytes().decode().strip()
    except (OSError, ValueError) as e:
        raise CheckpointError(f"cannot read {pointer}: {first_line(e)}") from None
    name = f"{pointer.name.removesuffix(POINTER)}-{step}"
    if not re.fullmatch(r"[\w-]+", step) or not pointer.with_name(name).is_dir():
        raise CheckpointError(f"{pointer} names step {step[:50]!r}, but there is no folder {name[:100]!r}")
    return pointer.with_name(name)


def _array_folders(path: Path) -> Iterator[Path]:
    """Return the folders of the arrays below `params` in a .bv folder; the optimizer's arrays are large and skipped."""
    children = sorted(path.glob(f"{ROOTS[0].replace('/', '~')}*"))
    return (child for child in children if (child / METADATA).is_file())


def _open_folder(path: Path) -> dict[str, Tensor]:
    """Return the arrays of a .bv folder by name; an array is read on demand."""
    found = {}
    for folder in _array_folders(path):
        try:
            metadata = json.loads((folder / METADATA).read_bytes())
            shape = tuple(map(int, metadata["shape"]))
            fill = metadata.get("fill_value") is not None
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as e:
            raise CheckpointError(f"cannot read {folder / METADATA}: {first_line(e)}") from None
        read = functools.partial(_read_zarr, folder, fill)
        found[folder.name.replace("~", "/")] = Tensor(shape, read)
    return found


def _read_zarr(folder: Path, fill: bool) -> np.ndarray:
    """Read a zarr array; missing chunks have the fill value if `fill` is True, and are an error otherwise."""
    kvstore = {"driver": "file", "path": str(folder)}
    spec = {"driver": "zarr", "kvstore": kvstore, "fill_missing_data_reads": fill}
    tensorstore = require("tensorstore")
    try:
        array: np.ndarray = np.asarray(tensorstore.open(spec, read=True, open=True).result().read().result())
    except Exception as e:  # its errors are ValueErrors, but their types are not documented
        raise CheckpointError(f"{folder} is damaged: {first_line(e)[:200]}") from None
    return array


def _with_new_names(arrays: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return the arrays with today's names, and with the class token's position embedding added to that token.

    Raises:
      CheckpointError: two arrays of the file `path` get the same name.
    """
    names = {name: _new_name(name) for name in arrays}
    if "probe" in names:
        names = {
            old: f"MAPHead_0/{name}" if name.split("/")[0] in INLINED_HEAD else name for old, name in names.items()
        }
    new = dict[str, Tensor]()
    for old, name in names.items():
        if name in new:
            raise CheckpointError(f"{path}: {old} is another array of {name}")
        new[name] = arrays[old]
    cls, positions = new.get("cls"), new.get("pos_embedding")
    if cls and positions and len(positions.shape) == 3 and positions.shape[0] == 1:
        rows = positions.shape[1]
        if rows > 1 and math.isqrt(rows) ** 2 != rows and math.isqrt(rows - 1) ** 2 == rows - 1:
            new["cls"] = Tensor(cls.shape, lambda: _float32(cls.read()) + _float32(positions.read())[:, :1])
            new["pos_embedding"] = Tensor((1, rows - 1, positions.shape[2]), lambda: positions.read()[:, 1:])
    return new


def _new_name(name: str) -> str:
    if name in OLD_POSITIONS:
        return "pos_embedding"
    parts = name.split("/")
    if len(parts) > 3 and parts[0] == "Transformer" and parts[1].startswith("encoderblock"):
        parts[2] = BEFORE_LINEN.get(parts[2], parts[2])
    return "/".join(parts)


def _float32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32)
