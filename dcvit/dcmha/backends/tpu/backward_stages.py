"""Stages of the backward kernels on one strip of keys; both families of kernels share them.

| stage | products of a strip | its vector operations |
|---|---|---|
| score | key-wise part of the pre-compose of x | p: attention weights P |
| post | key-wise parts of the post-compose of p, and of the transposed post-compose of y = dW | w: W; dp: dP |
| logit | dl: gradients of the logits; key-wise part of the gradients of the scores | da: gradients of the scores |

Products of the post and logit stages include the gradients of the matrices (`dcvit.dcmha.backends.tpu.mixing`). The
references x, y, p, dp, dl, w and da are planes of a tile, (H, Bk, Bq); y and dl may be the same. The stages also write
the hidden planes that `ComposeTensors` needs, for the gradients of query-wise weights.
`dcvit.dcmha.backends.tpu.strips` runs the stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from dcvit.dcmha.backends.tpu.call import Refs
from dcvit.dcmha.backends.tpu.compose import key_wise_matrix, logits, save_hidden, strip_compose
from dcvit.dcmha.backends.tpu.config import ComposeLayout, ComposeName, KernelConfig
from dcvit.dcmha.backends.tpu.mixing_gradients import diagonals
from dcvit.dcmha.backends.tpu.tile import (
    StoredPlanes,
    Strip,
    Visible,
    dot,
    planes,
    planes_of_all_queries,
    query_slices,
    save,
    save_operand,
    stack,
)
from dcvit.dcmha.shapes import Array, Ref, not_none


def attention_weights(
    config: KernelConfig, refs: Refs, visible: Visible, strip: Strip, buffer: Ref, queries: slice
) -> Iterator[Array]:
    """Return the attention weights P of a strip, one head after the other.

    The hidden planes of the pre-compose are stored if they have a buffer.
    """
    pre = strip_compose(config, refs, "pre", buffer, queries)
    out, hidden = logits(config, planes(config, refs["x"], strip, queries), pre, visible(strip, queries))
    save_hidden(hidden, refs.get("pre_hidden"), strip, queries)
    return (jnp.exp2(x - refs["m"][h, :, queries][None]) for h, x in enumerate(out))


def score_vectors(config: KernelConfig, refs: Refs, visible: Visible, strip: Strip, buffers: Sequence[Ref]) -> None:
    """Compute the attention weights P of a strip, and write them to `p`."""
    for queries in query_slices(config):
        save(attention_weights(config, refs, visible, strip, buffers[0], queries), refs["p"], strip, queries)


def post_products(config: KernelConfig, refs: Refs, strip: Strip, out: Ref) -> None:
    """Compute a strip's key-wise parts of the post-compose and its transpose, and the gradient of its matrix."""
    if "mix_post" in refs:
        p, g = (stack(config, planes_of_all_queries(config, refs[name], strip)) for name in ("p", "y"))
        out[0] = dot(key_wise_matrix(config, refs, "mix_post", strip), p, (1, 0))
        out[1] = dot(key_wise_matrix(config, refs, "mix_post_back", strip), g, (1, 0))
        save_matrix_gradient(config, refs["dmix_post"], p, g, strip)


def post_vectors(config: KernelConfig, refs: Refs, strip: Strip, buffers: Sequence[Ref]) -> None:
    """Compute the composed weights W of a strip, and the gradient dP of its attention weights P."""
    for queries in query_slices(config):
        w: Iterable[Array] = planes(config, refs["p"], strip, queries)
        post = strip_compose(config, refs, "post", buffers[0], queries)
        if post is not None:
            w, hidden = post.compose(planes(config, refs["p"], strip, queries))
            save_hidden(hidden, refs.get("post_hidden"), strip, queries)
        save_operand(config, w, refs["w"], strip, queries)
        dp: Iterable[Array] = planes(config, refs["y"], strip, queries)
        back = strip_compose(config, refs, "post", buffers[-1], queries)
        if back is not None:
            dp, hidden = back.transposed(planes(config, refs["y"], strip, queries))
            save_hidden(hidden, refs.get("g_hidden"), strip, queries)
        save(dp, refs["dp"], strip, queries)


def logit_products(config: KernelConfig, refs: Refs, strip: Strip, out: Ref) -> None:
    """Compute a strip's gradients of logits, key-wise part of the gradients of scores, and gradient of its matrix."""
    if "mix_pre" in refs:
        all_queries = slice(0, config.block_q)
        dl = list(logit_gradients(config, refs, strip, all_queries))
        save(dl, refs["dl"], strip, all_queries)
        a, g = stack(config, planes_of_all_queries(config, refs["x"], strip)), stack(config, dl)
        out[0] = dot(key_wise_matrix(config, refs, "mix_pre_back", strip), g, (1, 0))
        save_matrix_gradient(config, refs["dmix_pre"], a, g, strip)


def logit_vectors(config: KernelConfig, refs: Refs, strip: Strip, buffers: Sequence[Ref]) -> None:
    """Compute the gradients of the scores of a strip, and write them to `da`."""
    for queries in query_slices(config):
        pre = strip_compose(config, refs, "pre", buffers[0], queries)
        if "mix_pre" not in refs:
            save(logit_gradients(config, refs, strip, queries), refs["dl"], strip, queries)
        dl = planes(config, refs["dl"], strip, queries)
        da: Iterable[Array] = dl
        if pre is not None:
            da, hidden = pre.transposed(dl)
            save_hidden(hidden, refs.get("g_hidden"), strip, queries)
        save_operand(config, da, refs["da"], strip, queries)


def logit_gradients(config: KernelConfig, refs: Refs, strip: Strip, queries: slice) -> StoredPlanes:
    """Return the gradients P·(dP - delta) of the logits of a strip, a plane for each head."""
    p, dp = planes(config, refs["p"], strip, queries), planes(config, refs["dp"], strip, queries)
    return StoredPlanes(lambda h: p[h] * (dp[h] - refs["d"][h, :, queries][None]), config.heads)


def save_matrix_gradient(config: KernelConfig, out: Ref, a: Array, g: Array, strip: Strip) -> None:
    """Write the gradient of the matrix of a strip, from the stacked inputs `a` and output gradients `g` of a compose.

    In the family "matrix", it is added, because the matrix serves several query blocks.
    """
    diagonals(config, dot(g, a, (1, 1)), out.at[strip.number], add=config.family == "matrix")


class ComposeTensors(NamedTuple):
    """References (planes, Bk, Bq) from which the gradients of one compose's query-wise weights are computed."""

    layout: ComposeLayout
    a: Ref  # input
    g: Ref  # gradient of the output
    a_hidden: Ref | None  # hidden planes of the compose
    g_hidden: Ref | None  # hidden planes of the transposed compose


def compose_tensors(config: KernelConfig, refs: Refs, compose_name: ComposeName) -> ComposeTensors | None:
    """Return the tensors of a compose, valid after the post stage (or for "pre" the logit stage); None without it."""
    layout = config.pre if compose_name == "pre" else config.post
    if layout is None:
        return None
    a, g = ("x", "dl") if compose_name == "pre" else ("p", "y")
    return ComposeTensors(layout, refs[a], refs[g], refs.get(f"{compose_name}_hidden"), refs.get("g_hidden"))


def weight_products(
    config: KernelConfig, tensors: ComposeTensors, h: int, keys: slice, queries: slice
) -> Iterator[tuple[int, Array]]:
    """Yield the products whose sums over keys are the gradients of head `h`'s query-wise weights.

    Each item is (packed column of the weight, product). The product is a_h times a hidden plane of `g` for a down
    projection, g_h times a hidden plane of `a` for an up projection, and a_h·g_h for a gate.
    """
    down, up, gate = tensors.layout.query
    x, y = tensors.a[h, keys, queries], tensors.g[h, keys, queries]
    group = h // (config.heads // config.groups)
    if down is not None and up is not None:
        for r in range(tensors.layout.query_rank):
            plane = group + r * config.groups
            yield down + r * config.heads + h, x * not_none(tensors.g_hidden)[plane, keys, queries]
            yield up + r * config.heads + h, y * not_none(tensors.a_hidden)[plane, keys, queries]
    if gate is not None:
        yield gate + h, x * y
