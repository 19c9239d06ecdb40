"""Safetensors files in Hugging Face's layout: one file, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from dcvit.errors import CheckpointError
from dcvit.weights.tensors import INDEX_SUFFIX

SHARD_BYTES = 1 << 29  # the library that writes a shard needs as much memory again
FORMAT = {"format": "pt"}  # the layout of the tensors; transformers refuses a file that does not name it


def write_shards(
    folder: Path,
    tensors: Iterator[tuple[str, np.ndarray]],
    *,
    max_shard_bytes: int = SHARD_BYTES,
    metadata: Mapping[str, str] = FORMAT,
) -> None:
    """Write tensors into `model.safetensors`, or into shards `model-0000i-of-0000N.safetensors` with their index.

    The tensors of one shard are in memory at a time; a larger tensor has a shard of its own. The shards have temporary
    names until all are complete. After an error, files may be left, which the caller removes.

    Raises:
      CheckpointError: two tensors have the same name.
      OSError, safetensors.SafetensorError: a file cannot be written.
    """
    places: dict[str, int] = {}  # the number of the shard of each tensor
    shard: dict[str, np.ndarray] = {}
    number = total = size = 0
    for name, array in tensors:
        if name in places:
            raise CheckpointError(f"two tensors have the name {name}")
        if shard and size + array.nbytes > max_shard_bytes:
            _save(shard, folder / f"{number}.tmp", metadata)
            number, size = number + 1, 0
            shard.clear()
        places[name], shard[name] = number, np.asarray(array, order="C")
        size, total = size + array.nbytes, total + array.nbytes
    _save(shard, folder / f"{number}.tmp", metadata)
    names = [f"model-{i + 1:05d}-of-{number + 1:05d}.safetensors" for i in range(number + 1)]
    if number == 0:
        names = ["model.safetensors"]
    else:
        files = {name: names[place] for name, place in sorted(places.items())}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / f"model.safetensors{INDEX_SUFFIX}").write_text(json.dumps(index, indent=2) + "\n")
    for i, name in enumerate(names):
        (folder / f"{i}.tmp").rename(folder / name)


def _save(shard: Mapping[str, np.ndarray], path: Path, metadata: Mapping[str, str]) -> None:
    import safetensors.numpy

    path.touch()
    mode = path.stat().st_mode
    safetensors.numpy.save_file(dict(shard), path, dict(metadata))
    path.chmod(mode)  # of any new file; the library's is readable by its owner only
