"""One compose on a strip of keys of a tile: the VPU adds the query-wise branch to what the MXU has mixed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

import jax.numpy as jnp

from dcvit.dcmha.backends.tpu import mixing
from dcvit.dcmha.backends.tpu.call import Refs
from dcvit.dcmha.backends.tpu.config import LANES, SUBLANES, ComposeLayout, ComposeName, KernelConfig
from dcvit.dcmha.backends.tpu.tile import StoredPlanes, Strip, join, split, strip_rows
from dcvit.dcmha.numerics import LOG2_E, MASKED_SCORE, total
from dcvit.dcmha.shapes import Array, Ref, not_none

Projection: TypeAlias = Literal["down", "up"]
HiddenPlanes: TypeAlias = list[list[Array]]  # A·w_q1 of Eqn 7, by rank and group


class StripCompose:
    """One compose applied to one strip of keys.

    Query-wise weights come from `rows`, (1, Bq/128, columns, 128), where a load broadcasts a row of 128 lanes over
    sublanes at no cost. `mixed` has the sum of the other branches, computed by the MXU: a plane for each head.
    """

    def __init__(
        self, config: KernelConfig, layout: ComposeLayout, rows: Ref | None, mixed: Sequence[Array] | None
    ):  # fmt: skip
        self.config, self.layout, self.rows, self.mixed = config, layout, rows, mixed
        self.per_group = config.heads // config.groups

    def weight(self, start: int, index: int) -> Array:
        """Return number `start` + `index` of each query's packed weights, repeated over 8 sublanes: (1, 8, Bq)."""
        rows = not_none(self.rows)
        row = slice(start + index, start + index + 1)
        parts = [jnp.broadcast_to(rows[0, n, row, :], (8, LANES)) for n in range(rows.shape[1])]
        return jnp.concatenate(parts, axis=-1)[None]

    def start(self, projection: Projection) -> int | None:
        """Return the first packed column of a projection's weights, or None without a query-wise projection."""
        return self.layout.query.down if projection == "down" else self.layout.query.up

    def hidden(self, a: Sequence[Array], projection: Projection) -> HiddenPlanes:
        """Return the hidden planes Σ_n a_n·w[r, n], sums over the heads n of each group; w belongs to `projection`."""
        start, heads = self.start(projection), self.config.heads
        found: HiddenPlanes = [[] for _ in range(0 if start is None else self.layout.query_rank)]
        for n in range(heads):
            x = a[n]
            for r, by_group in enumerate(found):
                term = x * self.weight(not_none(start) + r * heads, n)
                if n % self.per_group == 0:
                    by_group.append(term)
                else:
                    by_group[-1] = by_group[-1] + term
        return found

    def compose_planes(self, a: Sequence[Array], hidden: HiddenPlanes, projection: Projection) -> Iterator[Array]:
        """Yield a_h·gate_h + Σ_r hidden_r·w[r, h] for each head h (Eqn 7), plus the plane of `mixed`.

        w are the weights of `projection`: "up" for the compose, "down" for the transposed compose.
        """
        heads, gate, skip, start = (
            self.config.heads,
            self.layout.query.gate,
            self.layout.skip_factor,
            self.start(projection),
        )
        for h in range(heads):
            # A gate contains the skip connection and its factor.
            terms = [a[h] * self.weight(gate, h) if gate is not None else a[h] if skip == 1 else a[h] * skip]
            if start is not None:
                group = h // self.per_group
                terms += [planes[group] * self.weight(start + r * heads, h) for r, planes in enumerate(hidden)]
            if self.mixed is not None:
                terms.append(self.mixed[h])
            yield total(terms)

    def compose(self, a: Sequence[Array]) -> tuple[Iterator[Array], HiddenPlanes]:
        """Return an iterator over the composed planes of `a`, one per head, and the hidden planes; see `hidden`."""
        hidden = self.hidden(a, "down")
        return self.compose_planes(a, hidden, "up"), hidden

    def transposed(self, g: Sequence[Array]) -> tuple[Iterator[Array], HiddenPlanes]:
        """Return the gradients of the compose's input from those of its output, `g`, and the hidden planes of `g`."""
        hidden = self.hidden(g, "up")
        return self.compose_planes(g, hidden, "down"), hidden


def save_hidden(hidden: HiddenPlanes, out: Ref | None, strip: Strip, queries: slice) -> None:
    """Write hidden planes of a strip to `out`, (planes, Bk, Bq), by rank and group; do nothing if it is None."""
    if out is not None:
        for n, plane in enumerate(plane for by_group in hidden for plane in by_group):
            out[n, strip.rows, queries] = join(plane)


def strip_compose(
    config: KernelConfig, refs: Refs, compose_name: ComposeName, buffer: Ref, queries: slice
) -> StripCompose | None:
    """Return a compose of the call, applied to one strip and a slice of queries; None if the call does not have it.

    `buffer` has the planes that the MXU has mixed.
    """
    layout = config.pre if compose_name == "pre" else config.post
    if layout is None:
        return None
    registers = slice(queries.start // LANES, queries.stop // LANES)
    rows = refs["wq"].at[:, registers] if "wq" in refs else None
    return StripCompose(config, layout, rows, stacked_planes(config, buffer, queries) if layout.mixes else None)


def stacked_planes(config: KernelConfig, buffer: Ref, queries: slice) -> StoredPlanes:
    """Return the planes of all heads from a buffer of stacked planes, (H·strip, Bq) or (strips, H·strip, Bq)."""
    if len(buffer.shape) == 2:
        return StoredPlanes(lambda h: split(buffer[strip_rows(config, h), queries]), config.heads)

    def load(h: int) -> Array:
        x = buffer[:, strip_rows(config, h), queries]
        return x.reshape(-1, SUBLANES, x.shape[2])

    return StoredPlanes(load, config.heads)


def key_wise_matrix(config: KernelConfig, refs: Refs, name: str, strip: Strip) -> Array:
    """Return the matrix `name` of a strip, which multiplies the `stack` of all planes; see `mixing.block`."""
    matrices, number = refs[name], strip.number
    if config.family == "matrix":
        matrices, number = matrices.at[0], jnp.minimum(number, matrices.shape[1] - 1)
    return mixing.block(config, matrices, refs["diagonal"], number)


def logits(
    config: KernelConfig, a: Sequence[Array], pre: StripCompose | None, mask: Array | None
) -> tuple[Iterable[Array], HiddenPlanes]:
    """Return the scores `a`, composed and masked, in units of log 2, a plane for each head, and the hidden planes.

    The packed weights of the pre-compose include the factor scale·log2(e).
    """
    if pre is None:
        out: Iterator[Array] = (x * (config.scale * LOG2_E) for x in a)
        hidden: HiddenPlanes = []
    else:
        out, hidden = pre.compose(a)
    return out if mask is None else (jnp.where(mask, x, MASKED_SCORE) for x in out), hidden
