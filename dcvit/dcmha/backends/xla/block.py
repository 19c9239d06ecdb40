"""Attention of one block of queries and its keys, and its gradients.

With a window of composition (`Options.compose_window`), the t queries of a block and their windows together have
t + w - 1 keys. The composes read and write the planes of these keys alone (`Near`), in which the pairs outside of the
windows keep their values.

The arrays have the axes that `dcvit.dcmha.backends.xla.blockwise` describes, without B.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dcvit.dcmha.backends.xla import tile
from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.inputs import Inputs, Options
from dcvit.dcmha.numerics import statistics_dtype
from dcvit.dcmha.shapes import Array, Bool, Float

KEY_WISE = ("k1", "k2", "kg")


class Near(NamedTuple):
    """The n keys of a block that are inside the window of some query.

    Fields:
      start: the first of them, from the first key of the block.
      inside: True for the pairs that are composed.
    """

    start: Array
    inside: Bool[Array, "t n"]

    @classmethod
    def of_block(cls, first_query: int | Array, rows: int, first_key: int | Array, keys: int, window: int) -> Near:
        """Return the near keys of a block with these positions of its first tokens and these numbers of tokens."""
        size = min(keys, window + rows - 1)
        start = jnp.clip(first_query - window + 1 - first_key, 0, keys - size)
        query = first_query + jnp.arange(rows)[:, None]
        return cls(start, first_key + start + jnp.arange(size)[None, :] > query - window)

    def cut(self, x: Float[Array, "*shape s"]) -> Float[Array, "*shape n"]:
        """Return the near keys of an array whose last axis has the keys of the block."""
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.inside.shape[1], x.ndim - 1)

    def cut_inside(self, x: Float[Array, "H t s"]) -> Float[Array, "H t n"]:
        """Return the near keys, with zeros for the pairs that are not composed."""
        return _chosen(self.inside, self.cut(x), 0)

    def cut_weights(self, w: ComposeWeights | None) -> ComposeWeights | None:
        """Return the weights of a compose for the near keys."""
        if w is None:
            return None
        return w._replace(**{name: self.cut(x) for name in KEY_WISE if (x := getattr(w, name)) is not None})

    def spread_weights(self, w: ComposeWeights, keys: int) -> ComposeWeights:
        """Return gradients of the weights `cut_weights` returned as those of the weights of all keys of the block."""
        spread = {
            name: jax.lax.dynamic_update_slice_in_dim(
                jnp.zeros((*x.shape[:-1], keys), x.dtype), x, self.start, x.ndim - 1
            )
            for name in KEY_WISE
            if (x := getattr(w, name)) is not None
        }
        return w._replace(**spread)

    def put(self, composed: Float[Array, "H t n"], x: Float[Array, "H t s"]) -> Float[Array, "H t s"]:
        """Return `x` with the pairs that are composed replaced by those of `composed`."""
        part = _chosen(self.inside, composed, self.cut(x))
        return jax.lax.dynamic_update_slice_in_dim(x, part, self.start, 2)


class Block(NamedTuple):
    """One block: its inputs, the mask of its scores (None: no key is masked), and the positions of its first tokens."""

    inputs: Inputs
    mask: Array | None
    start: dict[str, int | Array]
    near: Near | None  # None: all pairs are composed

    def cut(self, a: Array, *, inside: bool = False) -> Array:
        """Return the planes that the composes read; with `inside`, zeros for pairs that are not composed."""
        if self.near is None:
            return a
        return self.near.cut_inside(a) if inside else self.near.cut(a)

    def compose_weights(self) -> tuple[ComposeWeights | None, ComposeWeights | None]:
        """Return the weights of both composes for the keys of `cut`."""
        pre, post = self.inputs.pre, self.inputs.post
        return (pre, post) if self.near is None else (self.near.cut_weights(pre), self.near.cut_weights(post))

    def compose(
        self, a: Array, planes: tile.Hidden, w: ComposeWeights | None, groups: int, *, mask: Array | None = None
    ) -> Array:
        """Return the masked A' of Eqn 7 for all keys; `planes` and `w` are those of the keys of `cut`."""
        if self.near is None or w is None:
            return tile.compose_planes(a, planes, w, mask, groups=groups)
        found = self.near.put(tile.compose_planes(self.near.cut(a), planes, w, None, groups=groups), a)
        return found if mask is None else _chosen(mask, found, -jnp.inf)


def forward_block(block: Block, options: Options) -> Float[Array, "H t D"]:
    """Return the output of attention (Eqn 4) for the queries of one block."""
    x, groups = block.inputs, options.groups

    def compose(a: Array, w: ComposeWeights | None, mask: Array | None = None) -> Array:
        return block.compose(a, tile.hidden(block.cut(a), w, groups=groups), w, groups, mask=mask)

    pre, post = block.compose_weights()
    scores = compose(_matmul("htd,hsd->hts", x.q, x.k), pre, block.mask)
    weights = compose(tile.softmax(scores), post)
    return _matmul("hts,hsd->htd", weights.astype(x.v.dtype), x.v).astype(x.q.dtype)


def backward_block(block: Block, d_out: Array, options: Options) -> Inputs:
    """Return the gradients of one block's inputs; gradients of arrays with a key axis are sums over its queries."""
    x, groups = block.inputs, options.groups
    scores = _matmul("htd,hsd->hts", x.q, x.k)
    w_pre, w_post = block.compose_weights()
    a = block.cut(scores)
    pre = tile.hidden(a, w_pre, groups=groups)
    weights = tile.softmax(block.compose(scores, pre, w_pre, groups, mask=block.mask))

    d_final = _matmul("htd,hsd->hts", d_out, x.v)
    back = tile.transposed(w_post)
    p, g = block.cut(weights), d_final if w_post is None else block.cut(d_final, inside=True)
    post = tile.hidden(p, w_post, groups=groups), tile.hidden(g, back, groups=groups)
    final = block.compose(weights, post[0], w_post, groups)
    dv = _over_queries(final.astype(d_out.dtype), d_out, len(x.v))
    d_post = w_post and tile.weight_gradients(p, g, *post, w_post, groups=groups)
    if block.near is None:
        d_composed = tile.softmax_gradient(weights, d_final, post[1], back, groups)
    else:
        d_weights = block.compose(d_final, post[1], back, groups)
        d_composed = tile.softmax_gradient(weights, d_weights, tile.Hidden(None, None), None, groups)

    back = tile.transposed(w_pre)
    g = d_composed if w_pre is None else block.cut(d_composed, inside=True)
    d_hidden = tile.hidden(g, back, groups=groups)
    d_pre = w_pre and tile.weight_gradients(a, g, pre, d_hidden, w_pre, groups=groups)
    d_scores = block.compose(d_composed, d_hidden, back, groups).astype(x.q.dtype)
    dq = _matmul("hts,hsd->htd", d_scores, x.k)
    dk = _over_queries(d_scores, x.q, len(x.k))
    if (near := block.near) is not None:
        d_pre, d_post = (d and near.spread_weights(d, x.k.shape[1]) for d in (d_pre, d_post))
    return Inputs(dq, dk, dv, d_pre, d_post)


def _matmul(equation: str, a: Array, b: Array) -> Array:
    """Return the einsum of each head with sums in at least float32.

    Neighboring heads of `a` may share a head of `b`; their queries are then rows of one product, and nothing is copied.
    """
    rows = a.reshape(len(b), -1, a.shape[-1])
    out = jnp.einsum(equation, rows, b, preferred_element_type=statistics_dtype(a.dtype))
    return out.reshape(*a.shape[:-1], out.shape[-1])


def _over_queries(a: Float[Array, "H t s"], b: Float[Array, "H t D"], heads: int) -> Float[Array, "K s D"]:
    """Return the sum of a·b over the queries of all heads that share one of the `heads` K key heads."""
    a, b = (x.reshape(heads, -1, x.shape[-1]) for x in (a, b))
    return jnp.einsum("kts,ktd->ksd", a, b, preferred_element_type=statistics_dtype(a.dtype))


@tile.no_inline
def _chosen(where: Bool[Array, "#t #n"], x: Float[Array, "H t n"], y: Array | float) -> Float[Array, "H t n"]:
    return jnp.where(where, x, y)
