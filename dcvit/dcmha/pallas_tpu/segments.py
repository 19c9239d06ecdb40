"""Segment ids in the TPU kernels: their arrays, the mask of a strip, and the blocks that are skipped.

The ids of queries are a row, those of keys are repeated over the lanes of a register, so that both are compared without
a broadcast over lanes. A kernel also gets, for each block of one side, the first and the last block of the other side
that may have an id in common with it. It neither fetches nor computes the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from dcvit.dcmha.pallas_tpu import tile
from dcvit.dcmha.pallas_tpu.call import Blocked, Refs
from dcvit.dcmha.pallas_tpu.config import LANES, Index, KernelConfig
from dcvit.dcmha.pallas_tpu.forward_stages import Visible
from dcvit.dcmha.pallas_tpu.tile import Strip
from dcvit.dcmha.segments import Segments, blocks_in_common, first_and_last
from dcvit.dcmha.shapes import Array, Ref

NEEDED = "needed"  # the name of the numbers of `needed_blocks`


def needed_blocks(config: KernelConfig, inputs: Mapping[str, Blocked], *, of_keys: bool = False) -> dict[str, Array]:
    """Return the first and the last key block that each block of queries needs, for all examples one after the other.

    `of_keys` returns those of queries that each block of keys needs. Without segments, the result is empty.
    """
    if "ids_q" not in inputs:
        return {}
    ids = Segments(jnp.asarray(inputs["ids_q"].array)[:, 0], jnp.asarray(inputs["ids_k"].array)[:, :, 0])
    needed = blocks_in_common(ids, config.block_q, config.block_k)
    found = first_and_last(needed.swapaxes(1, 2) if of_keys else needed)
    return {NEEDED: jnp.stack(found, axis=-1).ravel()}


def nearest_needed(needed: Sequence[Ref], place: Index, block: Index) -> Index:
    """Return a block, or the nearest one that is needed, so that no other one is fetched.

    Args:
      needed: the reference to `needed_blocks`, or nothing without segments.
      place: number of the block of the other side, counted through all examples.
      block: number of the block.
    """
    return jnp.clip(block, needed[0][2 * place], needed[0][2 * place + 1]) if needed else block


def is_needed(refs: Refs, place: Index, block: Index) -> Array | bool:
    """Return whether a block is needed, with the arguments of `nearest_needed`; True without segments."""
    if NEEDED not in refs:
        return True
    needed = refs[NEEDED]
    return (needed[2 * place] <= block) & (block <= needed[2 * place + 1])


def visible(config: KernelConfig, refs: Refs, i: Index, j: Index) -> Visible:
    """Return the function of a strip and of queries that says which keys they attend to, as `tile.visible`."""

    def of_strip(strip: Strip, queries: slice) -> Array | None:
        found = tile.visible(config, i, j, refs.get("mask"), strip, queries)
        if "ids_q" not in refs:
            return found
        same = have_same_ids(refs, strip, queries)
        return same if found is None else found & same

    return of_strip


def have_same_ids(refs: Refs, strip: Strip, queries: slice) -> Array:
    """Return which keys of a strip have the ids of some queries, (keys/8, 8, queries)."""
    width = queries.stop - queries.start
    row = jnp.broadcast_to(refs["ids_q"][0, 0:1, queries], (8, width))[None]
    keys = refs["ids_k"][0, strip.rows, :]
    return tile.split(jnp.concatenate([keys] * (width // LANES), axis=-1)) == row
