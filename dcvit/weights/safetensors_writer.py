"""Safetensors files in Hugging Face's layout: one file, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from dcvit.errors import CheckpointError, first_line
from dcvit.weights.tensors import INDEX_SUFFIX

STEM, SUFFIX = "model", ".safetensors"
MAX_SHARD_BYTES = 2 << 30
FORMAT = {"format": "pt"}  # the layout of the tensors; transformers refuses a file that does not name it


def write_shards(
    folder: Path,
    tensors: Iterator[tuple[str, np.ndarray]],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    metadata: Mapping[str, str] = FORMAT,
) -> None:
    """Write tensors into `model.safetensors`, or into shards `model-0000i-of-0000N.safetensors` with their index.

    The tensors of one shard are in memory at a time. The shards have temporary names until all are complete. After an
    error, files may be left, which the caller removes.

    Args:
      folder: an existing folder without such files.
      tensors: pairs of the name and the value of each tensor.
      max_shard_bytes: bytes of the tensors of a shard. A larger tensor has a shard of its own.
      metadata: texts for the header of each file.

    Raises:
      CheckpointError: there is no tensor or one occurs twice, or the library cannot write a tensor.
      OSError: a file cannot be written.
    """
    places: dict[str, int] = {}  # the number of the shard of each tensor
    shard: dict[str, np.ndarray] = {}
    number = total = size = 0
    for name, array in tensors:
        if name in places:
            raise CheckpointError(f"two tensors have the name {name}")
        if shard and size + array.nbytes > max_shard_bytes:
            _save(shard, folder / _temporary(number), metadata)
            number, size = number + 1, 0
            shard.clear()
        places[name], shard[name] = number, np.asarray(array, order="C")
        size, total = size + array.nbytes, total + array.nbytes
    if not shard:
        raise CheckpointError(f"{folder}: no tensors to write")
    _save(shard, folder / _temporary(number), metadata)
    names = [f"{STEM}-{i + 1:05d}-of-{number + 1:05d}{SUFFIX}" for i in range(number + 1)]
    if number == 0:
        names = [f"{STEM}{SUFFIX}"]
    else:
        files = {name: names[place] for name, place in sorted(places.items())}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / f"{STEM}{SUFFIX}{INDEX_SUFFIX}").write_text(json.dumps(index, indent=2) + "\n")
    for i, name in enumerate(names):
        (folder / _temporary(i)).rename(folder / name)


def _temporary(number: int) -> str:
    return f"{STEM}-{number}.tmp"


def _save(shard: Mapping[str, np.ndarray], path: Path, metadata: Mapping[str, str]) -> None:
    import safetensors
    import safetensors.numpy

    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.numpy.save_file(dict(shard), path, dict(metadata))
        path.chmod(mode)  # of any new file; the library's is readable by its owner only
    except safetensors.SafetensorError as e:
        raise CheckpointError(f"cannot write {path}: {first_line(e)}") from None
