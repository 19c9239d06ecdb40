"""Blocks of eight interleaved examples for the TPU kernels whose tile holds all scores of an example.

XLA keeps the activations of a Vision Transformer with the batch along sublanes, because the number of patches is
rarely a multiple of eight. These kernels read and write arrays in this layout, (T, B, H·D), without padding: other
layouts would cost a copy of every array, in which XLA moves rows of one token. In VMEM, a transposition of eight tokens
of eight examples costs little. Its results are tiles that begin with the tokens of an example and end in zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.numerics import round_up
from dcvit.dcmha.pallas_tpu.config import LANES, KernelConfig
from dcvit.dcmha.pallas_tpu.tile import TileRefs
from dcvit.dcmha.pallas_tpu.weights import prepare
from dcvit.dcmha.shapes import Array, Ref

Refs = TypeVar("Refs", bound=TileRefs)
# Tokens and their weights that the kernels read and write
READ, WRITTEN = ("q", "k", "v", "do", "wq", "wk"), ("o", "dq", "dk", "dv", "dwq", "dwk")
CHUNK = 16  # tokens that are transposed at once; complete registers of bfloat16
BY_EXAMPLE = ("mask", "lse", "dstatic_pre", "dstatic_post")  # arrays with the examples as their first axis


def example_scratch(config: KernelConfig, inputs: dict[str, Array], names: Sequence[str]) -> dict[str, pl.MemoryRef]:
    """Return the buffers by name for the inputs and outputs `names`; none if examples are not interleaved."""
    if config.examples == 1:
        return {}
    found: dict[str, pl.MemoryRef] = {}
    for name in names:
        source = {"o": "q", "do": "q"}.get(name, name.removeprefix("d"))
        if source not in inputs:
            continue
        rows, wide = config.block_q if source in ("q", "wq") else config.block_k, inputs[source].shape[2]
        narrow = name in READ and "w" not in name and config.rounded
        shape, dtype = (config.examples, round_up(rows, CHUNK), wide), jnp.bfloat16 if narrow else jnp.float32
        found[f"{name}_tile"] = pltpu.VMEM(shape, dtype)
        if name == "wq":
            found["wq_rows"] = pltpu.VMEM((1, rows // LANES, wide, LANES), jnp.float32)
        if name == "wk":
            found["wk_ready"] = pltpu.VMEM((1, rows, wide), jnp.int32 if config.rounded else jnp.float32)
        if name == "dwq":
            found["dwq_rows"] = pltpu.VMEM((1, wide, rows), jnp.float32)
    return found


def over_examples(config: KernelConfig, refs: Refs, body: Callable[[Refs], None]) -> None:
    """Call body(refs) for each example of a block; the references of a call are those of one example."""
    if config.examples == 1:
        body(refs)
        return
    found = {field.name: getattr(refs, field.name) for field in dataclasses.fields(refs)}
    found = {name: ref for name, ref in found.items() if ref is not None}
    tiles = {name: found[f"{name}_tile"] for name in (*READ, *WRITTEN) if f"{name}_tile" in found}
    for name in READ:
        if name in tiles:
            read(found[name], tiles[name])

    def step(e: Array, _: None) -> None:
        views = {name: found[name] for name in BY_EXAMPLE if name in found and found[name].shape[0] > 1}
        views = {name: ref.at[pl.ds(e, 1)] for name, ref in (views | tiles).items()}
        dwq = views.get("dwq")
        prepare(config, views.get("wq"), views.get("wk"), refs.wq_rows, refs.wk_ready)
        views |= {"wq": refs.wq_rows, "wk": refs.wk_ready} | ({"dwq": found["dwq_rows"]} if dwq is not None else {})
        body(dataclasses.replace(refs, **views))
        if dwq is not None:
            dwq[0] = found["dwq_rows"][0].T

    jax.lax.fori_loop(0, config.examples, step, None)
    for name in WRITTEN:
        if name in tiles:
            write(tiles[name], found[name])


def read(ref: Ref, tiles: Ref) -> None:
    """Copy the tokens of a block, (T, 8, columns), to tiles (8, rows, columns) that end in zeros."""
    tokens, examples, wide = ref.shape
    for start in range(0, tokens, CHUNK):
        x = ref[start : min(start + CHUNK, tokens)]
        if len(x) < CHUNK:
            x = jnp.concatenate([x, jnp.zeros((CHUNK - len(x), examples, wide), x.dtype)])
        tiles[:, start : start + CHUNK] = x.swapaxes(0, 1).astype(tiles.dtype)
    if round_up(tokens, CHUNK) < tiles.shape[1]:
        rest = tiles.shape[1] - round_up(tokens, CHUNK)
        tiles[:, round_up(tokens, CHUNK) :] = jnp.zeros((examples, rest, wide), tiles.dtype)


def write(tiles: Ref, ref: Ref) -> None:
    """Copy the tokens of tiles to a block."""
    tokens = ref.shape[0]
    for start in range(0, tokens, CHUNK):
        stop = min(start + CHUNK, tokens)
        ref[start:stop] = tiles[:, start : start + CHUNK].swapaxes(0, 1)[: stop - start]
