"""Named arrays in an Orbax checkpoint of any tree, each read only when it is asked for.

Orbax stores each array in the Zarr format below its path with dots, as files or in an OCDBT database. TensorStore reads
both, without the program that wrote them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dcvit.errors import CheckpointError, first_line
from dcvit.weights.big_vision_files import check_memory
from dcvit.weights.tensors import Tensor, Tensors

ITEMS = ("", "state", "default", "items", "default/items")  # of a checkpoint manager, inside the folder of a step
DATABASE, ARRAY = "manifest.ocdbt", "/.zarray"


def find(path: Path) -> Path | None:
    """Return the folder of the arrays of a checkpoint, which may be inside the folder of a step; None for another."""
    for item in ITEMS:
        folder = path / item
        if (folder / DATABASE).is_file() or next(folder.glob(f"*{ARRAY}"), None):
            return folder
    return None


def open_arrays(folder: Path) -> Tensors:
    """Open the arrays of a folder that `find` returned; their names are paths with dots.

    Raises:
      CheckpointError: the folder is damaged.
    """
    import tensorstore

    base = f"{folder.resolve()}/"
    database = {"driver": "ocdbt", "base": {"driver": "file", "path": base}}
    store: dict[str, Any] = database if (folder / DATABASE).is_file() else {"driver": "file", "path": base}
    try:
        keys = [key.decode() for key in tensorstore.KvStore.open(store).result().list().result()]
        names = sorted(key.removesuffix(ARRAY) for key in keys if key.endswith(ARRAY))
        return {name: _open(store, name, folder) for name in names}
    except (ValueError, UnicodeDecodeError) as e:  # TensorStore's errors
        raise CheckpointError(f"{folder} is damaged: {first_line(e)}") from None


def _open(store: dict[str, Any], name: str, folder: Path) -> Tensor:
    import tensorstore

    spec = {
        "driver": "zarr",
        "kvstore": {**store, "path": f"{store.get('path', '')}{name}/"},
        "fill_missing_data_reads": False,  # a missing file is an error, not zeros
    }
    array = tensorstore.open(spec, read=True).result()

    def read() -> np.ndarray:
        chunks = array.chunk_layout.read_chunk.shape or ()
        check_memory(f"{folder}: {name}", array.shape, tuple(size or 0 for size in chunks))
        try:
            return np.asarray(array.read().result())
        except ValueError as e:
            raise CheckpointError(f"{folder}: cannot read {name}: {first_line(e)}") from None

    return Tensor(tuple(array.shape), read)
