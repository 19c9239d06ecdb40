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
    shards: list[list[str]] = []  # the names of the tensors of each
    total = 0
    for shard in _shards(tensors, max_shard_bytes):
        _save(shard, folder / f"{STEM}-{len(shards)}.tmp", metadata)
        shards.append(list(shard))
        total += sum(array.nbytes for array in shard.values())
        shard.clear()  # before the next one is collected
    if not shards:
        raise CheckpointError(f"{folder}: no tensors to write")
    names = [f"{STEM}-{i:05d}-of-{len(shards):05d}{SUFFIX}" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [f"{STEM}{SUFFIX}"]
    else:
        places = {tensor: name for name, tensors_of in zip(names, shards, strict=True) for tensor in tensors_of}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / f"{STEM}{SUFFIX}{INDEX_SUFFIX}").write_text(json.dumps(index, indent=2) + "\n")
    for i, name in enumerate(names):
        (folder / f"{STEM}-{i}.tmp").rename(folder / name)


def _shards(tensors: Iterator[tuple[str, np.ndarray]], max_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield shards: consecutive tensors by name, together at most `max_bytes` unless a single one is larger."""
    shard: dict[str, np.ndarray] = {}
    size = 0
    seen: set[str] = set()
    for name, array in tensors:
        if name in seen:
            raise CheckpointError(f"two tensors have the name {name}")
        if shard and size + array.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        seen.add(name)
        shard[name] = np.asarray(array, order="C")
        size += array.nbytes
    if shard:
        yield shard


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
