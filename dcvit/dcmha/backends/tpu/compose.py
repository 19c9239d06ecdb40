"""One compose on a strip of keys of a tile, computed by the VPU; the MXU may have computed some branches before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from dcvit.dcmha.backends.tpu import mixing
from dcvit.dcmha.backends.tpu.call import Refs
from dcvit.dcmha.backends.tpu.config import LANES, BranchOffsets, ComposeLayout, ComposeName, KernelConfig
from dcvit.dcmha.backends.tpu.tile import StoredPlanes, Strip, join, split, strip_rows
from dcvit.dcmha.numerics import LOG2_E, MASKED_SCORE, total
from dcvit.dcmha.shapes import Array, Ref, not_none

Projection: TypeAlias = Literal["down", "up"]
HiddenPlanes: TypeAlias = list[list[list[Array]]]  # A·w_q1 and A·w_k1 of Eqn 7, by side, rank and group


class Side(NamedTuple):
    """The query-wise or the key-wise side of a compose."""

    weight: Callable[[int, int], Array]  # `query_weight` or `key_weight` of `StripCompose`
    offsets: BranchOffsets
    rank: int

    def start(self, projection: Projection) -> int | None:
        """Return the first packed column of a projection's weights, or None if the side has no projection."""
        return self.offsets.down if projection == "down" else self.offsets.up


class StripCompose:
    """One compose applied to one strip of keys.

    Query-wise weights come from `rows`, (1, Bq/128, columns, 128), where a load broadcasts a row of 128 lanes over
    sublanes at no cost. Key-wise weights come from `broadcast`, (words, strip, 128), where `broadcast_columns` has
    repeated them over lanes. Static weights come from `static_ref`, (H, H/G), in SMEM. If `layout` has the query-wise
    branch only, `mixed` has the sum of the other branches, computed by the MXU: a plane for each head.
    """

    def __init__(
        self, config: KernelConfig, layout: ComposeLayout, rows: Ref | None, broadcast: Ref | None = None,
        static_ref: Ref | None = None, mixed: Sequence[Array] | None = None,
    ):  # fmt: skip
        self.config, self.layout, self.rows, self.broadcast, self.static_ref, self.mixed = (
            config, layout, rows, broadcast, static_ref, mixed,
        )  # fmt: skip
        self.per_group = config.heads // config.groups
        self.sides = (
            Side(self.query_weight, layout.query, layout.query_rank), Side(self.key_weight, layout.key, layout.key_rank)
        )  # fmt: skip

    def query_weight(self, start: int, index: int) -> Array:
        """Return number `start` + `index` of each query's packed weights, repeated over 8 sublanes: (1, 8, Bq)."""
        rows = not_none(self.rows)
        row = slice(start + index, start + index + 1)
        parts = [jnp.broadcast_to(rows[0, n, row, :], (8, LANES)) for n in range(rows.shape[1])]
        return jnp.concatenate(parts, axis=-1)[None]

    def key_weight(self, start: int, index: int) -> Array:
        """Return number `start` + `index` of each key's packed weights, repeated over lanes: (strip/8, 8, Bq)."""
        broadcast = not_none(self.broadcast)
        if self.config.rounded:
            n, is_upper = self.layout.key_word(start + index)
            word = broadcast[n] & jnp.int32(-65536) if is_upper else broadcast[n] << 16
            x = jax.lax.bitcast_convert_type(word, jnp.float32)
        else:
            x = broadcast[self.layout.key_columns(rounded=False).index(start + index)]
        return split(jnp.concatenate([x] * (self.config.block_q // LANES), axis=-1))

    def static_weight(self, n: int, h: int) -> Array:
        """Return the weight of W_b from head `n` to head `h` of the same group."""
        return not_none(self.static_ref)[n, h % self.per_group]

    def group(self, index: int) -> range:
        """Return the numbers of the heads of group number `index`."""
        return range(index * self.per_group, (index + 1) * self.per_group)

    def hidden(self, a: Sequence[Array], projection: Projection) -> HiddenPlanes:
        """Return the hidden planes Σ_n a_n·w[r, n], sums over the heads n of each group; w belongs to `projection`."""
        starts = [side.start(projection) for side in self.sides]
        found: HiddenPlanes = [
            [[] for _ in range(0 if start is None else side.rank)]
            for side, start in zip(self.sides, starts, strict=True)
        ]
        for n in range(self.config.heads):
            x = a[n]
            for side, start, planes in zip(self.sides, starts, found, strict=True):
                for r, by_group in enumerate(planes):
                    term = x * side.weight(not_none(start) + r * self.config.heads, n)
                    if n % self.per_group == 0:
                        by_group.append(term)
                    else:
                        by_group[-1] = by_group[-1] + term
        return found

    def gate(self, h: int) -> Array | None:
        """Return the sum of both gates of a head, or None if the compose has no gate."""
        terms = [side.weight(side.offsets.gate, h) for side in self.sides if side.offsets.gate is not None]
        return total(terms) if terms else None

    def compose_planes(self, a: Sequence[Array], hidden: HiddenPlanes, projection: Projection) -> Iterator[Array]:
        """Yield a_h·gate_h + Σ_r hidden_r·w[r, h] + Σ_n a_n·static[n, h] for each head h (Eqn 7).

        w are the weights of `projection`: "up" for the compose, "down" for the transposed compose.
        """
        heads = self.config.heads
        for h in range(heads):
            g, gate, skip = h // self.per_group, self.gate(h), self.layout.skip_factor
            # A gate contains the skip connection and its factor.
            terms = [a[h] * gate if gate is not None else a[h] if skip == 1 else a[h] * skip]
            for side, planes in zip(self.sides, hidden, strict=True):
                start = side.start(projection)
                if start is not None:
                    terms += [x[g] * side.weight(start + r * heads, h) for r, x in enumerate(planes)]
            if self.layout.has_static:
                terms += [
                    a[n] * (self.static_weight(h, n) if projection == "down" else self.static_weight(n, h))
                    for n in self.group(g)
                ]  # fmt: skip
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
    """Write hidden planes of a strip to `out`, (planes, Bk, Bq), by side, rank and group; do nothing if it is None."""
    if out is not None:
        for n, plane in enumerate(plane for side in hidden for by_group in side for plane in by_group):
            out[n, strip.rows, queries] = join(plane)


def strip_compose(
    config: KernelConfig, refs: Refs, compose_name: ComposeName, buffer: Ref | None, queries: slice
) -> StripCompose | None:
    """Return a compose of the call, applied to one strip and a slice of queries; None if the call does not have it.

    `buffer` has the broadcast key-wise weights in the family "vector", or else the planes that the MXU has mixed.
    """
    layout = config.pre if compose_name == "pre" else config.post
    if layout is None:
        return None
    registers = slice(queries.start // LANES, queries.stop // LANES)
    rows = refs["wq"].at[:, registers] if "wq" in refs else None
    if config.family == "vector":
        return StripCompose(config, layout, rows, buffer, refs.get(f"static_{compose_name}"))
    mixed = stacked_planes(config, not_none(buffer), queries) if layout.mixes else None
    return StripCompose(config, layout.query_only(), rows, mixed=mixed)


def stacked_planes(config: KernelConfig, buffer: Ref, queries: slice) -> StoredPlanes:
    """Return the planes of all heads from a buffer of stacked planes, (H·strip, Bq) or (strips, H·strip, Bq)."""
    if len(buffer.shape) == 2:
        return StoredPlanes(lambda h: split(buffer[strip_rows(config, h), queries]), config.heads)
    return StoredPlanes(lambda h: buffer[:, strip_rows(config, h), queries], config.heads)


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
