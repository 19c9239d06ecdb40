"""The part of a block whose pairs are composed, with a window of composition (`Options.compose_window`).

The t queries of a block and their windows together have t + w - 1 keys. The composes read and write the planes of these
keys alone, in which the pairs outside of the windows keep their values.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dcvit.dcmha.backends.xla import tile
from dcvit.dcmha.compose import ComposeWeights
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
        return _inside(self.inside, self.cut(x))

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


@tile.no_inline
def _inside(inside: Array, x: Array) -> Array:
    return jnp.where(inside, x, 0)


@tile.no_inline
def _chosen(inside: Array, x: Array, y: Array) -> Array:
    return jnp.where(inside, x, y)
