"""Stages of the forward kernels on one strip of keys; both families of kernels share them.

| stage | products of a strip | its vector operations |
|---|---|---|
| score | key-wise part of the pre-compose of x | y: composed and masked scores |
| weight | attention weights P of y, and the key-wise part of their post-compose | w: composed weights |

Between the stages are the statistics of the softmax. The references x, y and w are planes of a tile, (H, Bk, Bq); x and
y may be the same. `dcvit.dcmha.backends.tpu.strips` runs the stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from dcvit.dcmha.backends.tpu.call import Refs
from dcvit.dcmha.backends.tpu.compose import key_wise_matrix, logits, stacked_planes, strip_compose
from dcvit.dcmha.backends.tpu.config import Index, KernelConfig, Rows
from dcvit.dcmha.backends.tpu.tile import (
    Strip,
    Visible,
    dot,
    join,
    planes,
    planes_of_all_queries,
    query_slices,
    save,
    save_operand,
    split,
    stack,
    strip_rows,
)
from dcvit.dcmha.numerics import MASKED_SCORE
from dcvit.dcmha.shapes import Array, Ref


def score_products(config: KernelConfig, refs: Refs, strip: Strip, out: Ref) -> None:
    """Write the key-wise part of the pre-compose of a strip to `out`."""
    if "mix_pre" in refs:
        operand = stack(config, planes_of_all_queries(config, refs["x"], strip))
        out[0] = dot(key_wise_matrix(config, refs, "mix_pre", strip), operand, (1, 0))


def score_vectors(config: KernelConfig, refs: Refs, visible: Visible, strip: Strip, buffers: Sequence[Ref]) -> None:
    """Compute the composed and masked scores of a strip, and write them to `y`."""
    for queries in query_slices(config):
        pre = strip_compose(config, refs, "pre", buffers[0], queries)
        out, _ = logits(config, planes(config, refs["x"], strip, queries), pre, visible(strip, queries))
        save(out, refs["y"], strip, queries)


def weight_products(config: KernelConfig, refs: Refs, strip: Strip, out: Ref) -> None:
    """Write the attention weights of a strip, and the key-wise part of their post-compose, to `out`."""
    if "mix_post" in refs:
        matrix = key_wise_matrix(config, refs, "mix_post", strip)
        for queries in query_slices(config):
            p = attention_weights(config, refs, strip, queries)
            for h, x in enumerate(p):
                out[1, strip_rows(config, h), queries] = join(x)
            out[0, :, queries] = dot(matrix, stack(config, p), (1, 0))


def weight_vectors(config: KernelConfig, refs: Refs, strip: Strip, buffers: Sequence[Ref]) -> None:
    """Compute the composed attention weights of a strip, and write them to `w`."""
    for queries in query_slices(config):
        post = strip_compose(config, refs, "post", buffers[0], queries)
        p: Sequence[Array] = (
            stacked_planes(config, buffers[1], queries)
            if "mix_post" in refs
            else attention_weights(config, refs, strip, queries)
        )
        save_operand(config, p if post is None else post.compose(p)[0], refs["w"], strip, queries)


def attention_weights(config: KernelConfig, refs: Refs, strip: Strip, queries: slice) -> list[Array]:
    """Return the attention weights P of all heads, (keys/8, 8, queries) each; `m` must contain the log-sum-exp."""
    y = planes(config, refs["y"], strip, queries)
    return [jnp.exp2(x - refs["m"][h, :, queries][None]) for h, x in enumerate(y)]


def update_statistics(
    config: KernelConfig, refs: Refs, rows: Rows, *, is_first: bool = False, valid: Array | None = None
) -> None:
    """Update the running maximum and sum of each sublane with the scores of the keys `rows`.

    `is_first` replaces the statistics instead of updating them. A traced `valid` of False leaves them unchanged.
    """
    for h in range(config.heads):
        y = split(refs["y"][h, rows, :])
        if is_first:
            refs["m"][h] = jnp.max(y, axis=0)
            refs["sums"][h] = jnp.sum(jnp.exp2(y - refs["m"][h][None]), axis=0)
            continue
        before, sums = refs["m"][h], refs["sums"][h]
        m = jnp.maximum(before, jnp.max(y, axis=0))
        found = sums * jnp.exp2(before - m) + jnp.sum(jnp.exp2(y - m[None]), axis=0)
        refs["m"][h] = m if valid is None else jnp.where(valid, m, before)
        refs["sums"][h] = found if valid is None else jnp.where(valid, found, sums)


def finish_statistics(config: KernelConfig, refs: Refs, e: Index = 0) -> None:
    """Store the log-sum-exp over all eight sublanes in `m` and in `lse[e]`; it is 0 for fully masked queries."""
    for h in range(config.heads):
        m = jnp.max(refs["m"][h], axis=0, keepdims=True)
        sums = jnp.sum(refs["sums"][h] * jnp.exp2(refs["m"][h] - m), axis=0, keepdims=True)
        lse = jnp.where(m > MASKED_SCORE / 2, m + jnp.log2(sums), 0.0)
        refs["lse"][e, h : h + 1, :] = lse
        refs["m"][h] = jnp.broadcast_to(lse, (8, config.block_q))
