"""Segment ids of packed rows: a query attends only to keys with its own id.

Ids replace a mask of documents, which would have T×S elements. Implementations compare the ids of a block where they
need its mask, and use bounds of the ids to skip blocks of keys.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from dcvit.dcmha.shapes import Array, Bool, Int, Shaped

NO_ID = -(2**31)  # the id of keys that no query attends to, where tokens are split over devices


class Segments(NamedTuple):
    """Segment ids of the queries and of the keys; see the module."""

    queries: Int[Array, "*B T"]
    keys: Int[Array, "*B S"]


def make_segments(
    given: Shaped[Array, "..."] | tuple[Shaped[Array, "..."], Shaped[Array, "..."]] | None,
) -> Segments | None:
    """Return `Segments` from the argument of `dcvit.dcmha.attention`: ids of all tokens, or a pair (queries, keys)."""
    if given is None:
        return None
    return Segments(*given) if isinstance(given, tuple) else Segments(given, given)


def segment_mask(segments: Segments) -> Bool[Array, "B 1 T S"]:
    """Return the mask, as for `dcvit.dcmha.attention`, that is True where a query and a key have the same id."""
    return (segments.queries[:, :, None] == segments.keys[:, None, :])[:, None]


def blocks_in_common(segments: Segments, rows: int, columns: int) -> Bool[Array, "*B I J"]:
    """Return True for each pair of a query block and a key block whose ranges of ids (smallest to largest) overlap.

    Other pairs have no id in common. If ids never descend, few pairs that overlap have no id in common.

    Args:
      segments: ids, with any leading axes.
      rows: number of queries of each of the I blocks; the last one may have fewer.
      columns: number of keys of each of the J blocks.
    """
    (low, high), (low_k, high_k) = _bounds(segments.queries, rows), _bounds(segments.keys, columns)
    return (low_k[..., None, :] <= high[..., :, None]) & (low[..., :, None] <= high_k[..., None, :])


def first_and_last(needed: Bool[Array, "*B I J"]) -> tuple[Int[Array, "*B I"], Int[Array, "*B I"]]:
    """Return the first and the last j where `needed` is True, for each i; 1 and 0 if there is none."""
    count = needed.shape[-1]
    found = jnp.any(needed, axis=-1)
    first = jnp.argmax(needed, axis=-1).astype(jnp.int32)
    last = count - 1 - jnp.argmax(needed[..., ::-1], axis=-1).astype(jnp.int32)
    return jnp.where(found, first, 1), jnp.where(found, last, 0)


def pad_ids(ids: Int[Array, "*B N"], length: int) -> Int[Array, "*B length"]:
    """Return ids padded to `length` by the last one, which does not change the range of ids of its block."""
    widths = [(0, 0)] * (ids.ndim - 1) + [(0, length - ids.shape[-1])]
    return jnp.pad(ids, widths, mode="edge")


def _bounds(ids: Int[Array, "*B N"], size: int) -> tuple[Int[Array, "*B blocks"], Int[Array, "*B blocks"]]:
    """Return the smallest and the largest id of each block of `size` ids."""
    padded = pad_ids(ids, ids.shape[-1] + -ids.shape[-1] % size)
    blocks = padded.reshape(*ids.shape[:-1], -1, size)
    return jnp.min(blocks, axis=-1), jnp.max(blocks, axis=-1)
