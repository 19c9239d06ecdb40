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

    The tensors of one shard are in memory at a time. The files have temporary names until all are complete; after an
    error no file is left.

    Args:
      folder: an existing folder without such files.
      tensors: pairs of the name and the value of each tensor.
      max_shard_bytes: bytes of the tensors of a shard. A larger tensor has a shard of its own.
      metadata: texts for the header of each file.

    Raises:
      CheckpointError: the folder already holds weights, there is no tensor or one occurs twice, or a file cannot be
        written.
    """
    present = sorted([*folder.glob(f"{STEM}*{SUFFIX}"), *folder.glob(f"{STEM}*{INDEX_SUFFIX}")])
    if present:
        raise CheckpointError(f"{present[0]} exists; give a folder without weights")
    shards: list[list[str]] = []  # the names of the tensors of each
    sizes: list[int] = []
    written: list[Path] = []
    try:
        for shard in _shards(tensors, max_shard_bytes):
            written.append(folder / f"{STEM}-{len(shards)}.tmp")
            _save(shard, written[-1], metadata)
            shards.append(list(shard))
            sizes.append(sum(array.nbytes for array in shard.values()))
            shard.clear()  # before the next one is collected
        if not shards:
            raise CheckpointError(f"{folder}: no tensors to write")
        names = [f"{STEM}-{i:05d}-of-{len(shards):05d}{SUFFIX}" for i in range(1, len(shards) + 1)]
        if len(shards) == 1:
            names = [f"{STEM}{SUFFIX}"]
        else:
            places = {tensor: name for name, tensors_of in zip(names, shards, strict=True) for tensor in tensors_of}
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(places.items()))}
            written.append(folder / f"{STEM}-index.tmp")
            written[-1].write_text(json.dumps(index, indent=2) + "\n")
            names.append(f"{STEM}{SUFFIX}{INDEX_SUFFIX}")
        for i, name in enumerate(names):
            written[i] = written[i].rename(folder / name)
    except BaseException as e:
        for path in written:
            path.unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise CheckpointError(f"cannot write {folder}: {e.strerror or first_line(e)}") from None
        raise


def _shards(tensors: Iterator[tuple[str, np.ndarray]], max_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield consecutive tensors by name, together at most `max_bytes` unless a single one is larger."""
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
