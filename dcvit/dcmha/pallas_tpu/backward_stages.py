"""Stages of the gradient kernel for blocks of examples: products and vector operations on a block of keys.

| stage | input | result |
|---|---|---|
| score | scores | attention weights P |
| post | P, gradient of W | W, gradient of P, and of the weights of the post-compose |
| logit | P, its gradient, delta | gradients of logits and scores, and of the weights of the pre-compose |
"""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp

from dcvit.dcmha.numerics import LOG2_E
from dcvit.dcmha.pallas_tpu.call import Refs
from dcvit.dcmha.pallas_tpu.config import SUBLANES, ComposeLayout, KernelConfig
from dcvit.dcmha.pallas_tpu.mixing_gradients import diagonals
from dcvit.dcmha.pallas_tpu.stages import (
    add_mixed,
    key_wise_product,
    keys_of,
    planes,
    queries_of,
    query_compose,
    save,
    save_operand,
    visible_keys,
)
from dcvit.dcmha.pallas_tpu.strips import stack
from dcvit.dcmha.pallas_tpu.tile import HiddenPlanes, StoredPlanes, StripCompose, dot, split
from dcvit.dcmha.shapes import Array, Ref, not_none


def complete(config: KernelConfig, ref: Ref, b: int) -> StoredPlanes:
    """Return the planes of all heads in a block of keys for all queries."""
    return planes(config, ref, b, slice(0, config.block_q))


def save_hidden(
    config: KernelConfig, compose: StripCompose, hidden: HiddenPlanes, out: Ref | None, b: int, queries: slice
) -> None:
    """Write the hidden planes of a block, if the compose has any."""
    if out is not None:
        compose.save_hidden(hidden, out.at[:, :, queries], keys_of(config, b))


def score_products(config: KernelConfig, refs: Refs, b: int) -> None:
    """Compute the key-wise part of the pre-compose."""
    key_wise_product(
        config,
        refs,
        refs.get("mix_pre"),
        complete(config, refs["x_next"], b),
        refs["mixed"],
        b,
        slice(0, config.block_q),
    )


def score_vectors(config: KernelConfig, refs: Refs, mask: Ref | None, b: int) -> None:
    """Compute the attention weights, and keep the scores."""
    for queries in queries_of(config):
        x = planes(config, refs["x_next"], b, queries)
        save(config, x, refs["x"], b, queries)
        pre = query_compose(config, refs, "pre", refs.get("wq_rows"), queries)
        if pre is None:
            out: Iterable[Array] = [plane * (config.scale * LOG2_E) for plane in x]
        else:
            out, hidden = pre.compose(x)
            save_hidden(config, pre, hidden, refs.get("pre_hidden"), b, queries)
        out = add_mixed(config, refs.get("mix_pre"), out, refs["mixed"], b, queries)
        p = [jnp.exp2(plane - refs["m"][h, :, queries][None]) for h, plane in enumerate(out)]
        seen = visible_keys(config, mask, b, queries)
        save(config, p if seen is None else [jnp.where(seen, plane, 0.0) for plane in p], refs["p"], b, queries)


def post_products(config: KernelConfig, refs: Refs, b: int) -> None:
    """Compute the key-wise parts of the post-compose and of its transpose, and the gradient of its matrix."""
    if "mix_post" not in refs:
        return
    p, g, queries = complete(config, refs["p"], b), complete(config, refs["y"], b), slice(0, config.block_q)
    key_wise_product(config, refs, refs.get("mix_post"), p, refs["mixed"], b, queries)
    key_wise_product(config, refs, refs.get("mix_post_back"), g, refs["mixed_back"], b, queries)
    diagonals(config, dot(stack(config, g), stack(config, p), (1, 1)), refs["dmix_post"].at[b])


def post_vectors(config: KernelConfig, refs: Refs, b: int) -> None:
    """Compute the composed weights W, and the gradient of P."""
    for queries in queries_of(config):
        post = query_compose(config, refs, "post", refs.get("wq_rows"), queries)
        p, g = planes(config, refs["p"], b, queries), planes(config, refs["y"], b, queries)
        out: Iterable[Array] = p
        if post is not None:
            out, hidden = post.compose(p)
            save_hidden(config, post, hidden, refs.get("post_hidden"), b, queries)
        save_operand(
            config, add_mixed(config, refs.get("mix_post"), out, refs["mixed"], b, queries), refs["w"], b, queries
        )
        out = g
        if post is not None:
            out, hidden = post.transposed(g)
            save_hidden(config, post, hidden, refs.get("g_hidden"), b, queries)
        save(
            config, add_mixed(config, refs.get("mix_post"), out, refs["mixed_back"], b, queries), refs["dp"], b, queries
        )


def post_sums(config: KernelConfig, refs: Refs, first: int, count: int) -> None:
    """Add the sums over the keys of some blocks: gradients of the query-wise weights, and delta."""
    keys = keys_of(config, first, count)
    if config.post is not None:
        query_weight_gradients(config, config.post, refs, refs["p"], refs["y"], refs.get("post_hidden"), keys)
    for queries in queries_of(config):
        for h in range(config.heads):
            part = jnp.sum(split(refs["p"][h, keys, queries]) * split(refs["dp"][h, keys, queries]), axis=0)
            refs["d"][h, :, queries] = part if first == 0 else refs["d"][h, :, queries] + part


def finish_delta(config: KernelConfig, refs: Refs) -> None:
    """Add the sublanes of delta, Σ_s P·dP."""
    for h in range(config.heads):
        refs["d"][h] = jnp.broadcast_to(jnp.sum(refs["d"][h], axis=0, keepdims=True), (SUBLANES, config.block_q))


def logit_products(config: KernelConfig, refs: Refs, b: int) -> None:
    """Compute the gradients of the logits, the key-wise part of those of the scores, and that of the matrix."""
    queries = slice(0, config.block_q)
    p, dp = complete(config, refs["p"], b), complete(config, refs["dp"], b)
    g = [p[h] * (dp[h] - refs["d"][h][None]) for h in range(config.heads)]
    save(config, g, refs["dl"], b, queries)
    if "mix_pre" in refs:
        key_wise_product(config, refs, refs.get("mix_pre_back"), g, refs["mixed"], b, queries)
        product = dot(stack(config, g), stack(config, complete(config, refs["x"], b)), (1, 1))
        diagonals(config, product, refs["dmix_pre"].at[b])


def logit_vectors(config: KernelConfig, refs: Refs, b: int) -> None:
    """Compute the gradients of the scores."""
    for queries in queries_of(config):
        pre = query_compose(config, refs, "pre", refs.get("wq_rows"), queries)
        g = planes(config, refs["dl"], b, queries)
        out: Iterable[Array] = g
        if pre is not None:
            out, hidden = pre.transposed(g)
            save_hidden(config, pre, hidden, refs.get("g_hidden"), b, queries)
        save_operand(
            config, add_mixed(config, refs.get("mix_pre"), out, refs["mixed"], b, queries), refs["da"], b, queries
        )


def logit_sums(config: KernelConfig, refs: Refs, first: int, count: int) -> None:
    """Add the gradients of the query-wise weights of the pre-compose from the keys of some blocks."""
    if config.pre is not None:
        keys = keys_of(config, first, count)
        query_weight_gradients(config, config.pre, refs, refs["x"], refs["dl"], refs.get("pre_hidden"), keys)


def query_weight_gradients(
    config: KernelConfig, layout: ComposeLayout, refs: Refs, a: Ref, g: Ref, a_hidden: Ref | None, keys: slice
) -> None:
    """Add the gradients of the query-wise weights of a compose, with input `a` and output gradient `g`, from some keys.

    They are sums over keys: of a_h times the hidden planes of `g` for a down projection, of g_h times those of `a` for
    an up projection, and of a_h·g_h for a gate.
    """
    query, heads, per_group = layout.query, config.heads, config.heads // config.groups
    for queries in queries_of(config):
        for h in range(heads):
            x, y = split(a[h, keys, queries]), split(g[h, keys, queries])
            products: dict[int, Array] = {}
            for r in range(layout.query_rank):
                plane = r * config.groups + h // per_group
                hidden, back = (split(not_none(ref)[plane, keys, queries]) for ref in (a_hidden, refs.get("g_hidden")))
                products[not_none(query.down) + r * heads + h] = x * back
                products[not_none(query.up) + r * heads + h] = y * hidden
            if query.gate is not None:
                products[query.gate + h] = x * y
            for column, product in products.items():
                part, gq = jnp.sum(product, axis=0), refs["gq"]
                gq[column, :, queries] = part if keys.start == 0 else gq[column, :, queries] + part
