"""Operations of the TPU kernels on one tile of scores: H planes of Bk keys by Bq queries in VMEM.

Keys lie along sublanes and queries along lanes. With this layout a query-wise weight is a row, and a load broadcasts a
row over sublanes at no cost. Row statistics are sums of complete registers. Matrix products use the planes of a tile
without a transposition; tokens, which are far smaller than planes, are transposed instead. Only the key-wise weights
must be broadcast over lanes, unless the matrix unit mixes heads (`dcvit.dcmha.pallas_tpu.mixing`).

Vector operations run over strips of a few keys, so that the H planes of a strip stay close to the registers. A plane of
a strip has the shape (keys/8, 8, Bq). Loops over heads, ranks and groups are unrolled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dcvit.dcmha.numerics import LOG2_E, MASKED_SCORE
from dcvit.dcmha.pallas_tpu.call import Refs
from dcvit.dcmha.pallas_tpu.config import LANES, ComposeLayout, ComposeName, KernelConfig, Rows
from dcvit.dcmha.shapes import Array, Ref, not_none


class HiddenPlanes(NamedTuple):
    """Hidden planes of one compose, A·w_q1 and A·w_k1 of Eqn 7, each indexed by rank and group."""

    query: list[list[Array]]
    key: list[list[Array]]


def total(terms: Sequence[Array]) -> Array:
    """Return the sum of a non-empty sequence, added from left to right."""
    return functools.reduce(jnp.add, terms)


class StoredPlanes(Sequence[Array]):
    """Planes of all heads that are loaded where they are used, which takes fewer registers than keeping them."""

    def __init__(self, load: Callable[[int], Array], heads: int):
        self.load, self.heads = load, heads

    def __getitem__(self, h: int) -> Array:  # type: ignore[override]
        if h >= self.heads:
            raise IndexError
        return self.load(h)

    def __len__(self) -> int:
        return self.heads


class StripCompose:
    """One compose applied to one strip of keys.

    Query-wise weights come from `rows`, (1, Bq/128, columns, 128), where a load broadcasts a row of 128 lanes over
    sublanes at no cost. Key-wise weights come from `broadcast`, (words, strip, 128), where `broadcast_columns` has
    repeated them over lanes. Static weights come from `static_ref`, (H, H/G), in SMEM. `mixed`, (strips, H·strip, Bq),
    is what the matrix unit contributes, where `layout` has only the query-wise branch.
    """

    def __init__(
        self, config: KernelConfig, layout: ComposeLayout, rows: Ref | None, broadcast: Ref | None = None,
        static_ref: Ref | None = None, mixed: Ref | None = None,
    ):  # fmt: skip
        self.config, self.layout, self.rows, self.broadcast, self.static_ref, self.mixed = (
            config, layout, rows, broadcast, static_ref, mixed,
        )  # fmt: skip
        self.per_group = config.heads // config.groups

    def query_weight(self, start: int, index: int) -> Array:
        """Return packed row `start` + `index` of the query-wise weights, (1, 8, Bq)."""
        rows = not_none(self.rows)
        row = slice(start + index, start + index + 1)
        parts = [jnp.broadcast_to(rows[0, n, row, :], (8, LANES)) for n in range(rows.shape[1])]
        return jnp.concatenate(parts, axis=-1)[None]

    def key_weight(self, start: int, index: int) -> Array:
        """Return packed column `start` + `index` of the key-wise weights, (strip/8, 8, Bq)."""
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
        """Return the heads of a group."""
        return range(index * self.per_group, (index + 1) * self.per_group)

    def hidden(self, a: Sequence[Array], query_start: int | None, key_start: int | None) -> HiddenPlanes:
        """Return Σ_n a_n·w[r, n] over the heads n of each group, for the weights w that begin at the two offsets."""
        heads, layout = self.config.heads, self.layout

        sides = [(self.query_weight, query_start, layout.query_rank), (self.key_weight, key_start, layout.key_rank)]
        found: list[list[list[Array]]] = [[[] for _ in range(0 if start is None else rank)] for _, start, rank in sides]
        for n in range(heads):
            x = a[n]
            for (get, start, _), planes in zip(sides, found, strict=True):
                for r, by_group in enumerate(planes):
                    term = x * get(not_none(start) + r * heads, n)
                    if n % self.per_group == 0:
                        by_group.append(term)
                    else:
                        by_group[-1] = by_group[-1] + term
        return HiddenPlanes(*found)

    def gate(self, h: int) -> Array | None:
        """Return the sum of both gates of a head, or None if the compose has no gate."""
        terms = []
        if self.layout.query.gate is not None:
            terms.append(self.query_weight(self.layout.query.gate, h))
        if self.layout.key.gate is not None:
            terms.append(self.key_weight(self.layout.key.gate, h))
        return total(terms) if terms else None

    def compose_planes(
        self, a: Sequence[Array], hidden: HiddenPlanes, query_start: int | None, key_start: int | None,
        *, transposed: bool,
    ) -> Iterator[Array]:  # fmt: skip
        """Yield a_h·gate_h + Σ_r hidden_r·w[r, h] + Σ_n a_n·static[n, h] for each head h (Eqn 7).

        The dynamic projections w begin at the two offsets. `transposed` uses static[h, n].
        """
        heads = self.config.heads
        for h in range(heads):
            g, gate, skip = h // self.per_group, self.gate(h), self.layout.skip_factor
            # A gate contains the skip connection and its factor.
            terms = [a[h] * gate if gate is not None else a[h] if skip == 1 else a[h] * skip]
            if query_start is not None:
                terms += [x[g] * self.query_weight(query_start + r * heads, h) for r, x in enumerate(hidden.query)]
            if key_start is not None:
                terms += [x[g] * self.key_weight(key_start + r * heads, h) for r, x in enumerate(hidden.key)]
            if self.layout.has_static:
                terms += [
                    a[n] * (self.static_weight(h, n) if transposed else self.static_weight(n, h))
                    for n in self.group(g)
                ]  # fmt: skip
            if self.mixed is not None:
                terms.append(self.mixed[:, strip_rows(self.config, h), :])
            yield total(terms)

    def compose(self, a: Sequence[Array]) -> tuple[Iterator[Array], HiddenPlanes]:
        """Return the composition of the heads `a`, one after the other, and its hidden planes."""
        query, key = self.layout.query, self.layout.key
        hidden = self.hidden(a, query.down, key.down)
        return self.compose_planes(a, hidden, query.up, key.up, transposed=False), hidden

    def transposed(self, g: Sequence[Array]) -> tuple[Iterator[Array], HiddenPlanes]:
        """Return the gradient of the compose's input from the gradient `g` of its output, and its hidden planes."""
        query, key = self.layout.query, self.layout.key
        hidden = self.hidden(g, query.up, key.up)
        return self.compose_planes(g, hidden, query.down, key.down, transposed=True), hidden

    def save_hidden(self, hidden: HiddenPlanes, out: Ref | None, rows: Rows) -> None:
        """Write hidden planes to `out`, (planes, Bk, Bq), ordered by side, rank and group."""
        planes = [plane for side in hidden for by_group in side for plane in by_group]
        for n, plane in enumerate(planes):
            not_none(out)[n, rows, :] = join(plane)


def strip_compose(
    config: KernelConfig, refs: Refs, compose_name: ComposeName, buffer: Ref | None, queries: slice
) -> StripCompose | None:
    """Return the compose of this name on one strip for some queries, or None if the attention does not have it.

    `buffer` has the key-wise weights, broadcast over lanes, or what the matrix unit has mixed.
    """
    if compose_name == "pre":
        layout, static_ref = config.pre, refs.get("static_pre")
    else:
        layout, static_ref = config.post, refs.get("static_post")
    if layout is None:
        return None
    registers = slice(queries.start // LANES, queries.stop // LANES)
    rows = refs["wq"].at[:, registers] if "wq" in refs else None
    if config.family != "vector":
        mixed = not_none(buffer).at[:, :, queries] if layout.mixes else None
        return StripCompose(config, layout.query_only(), rows, mixed=mixed)
    return StripCompose(config, layout, rows, buffer, static_ref)


def strip_rows(config: KernelConfig, h: int) -> slice:
    """Return the rows of head `h` in stacked planes of a strip."""
    return slice(h * config.strip, (h + 1) * config.strip)


def queries_together(config: KernelConfig) -> list[slice]:
    """Return the queries of a tile that one pass of vector operations processes: those of one register, if possible.

    Words of broadcast key-wise weights are unpacked for all queries at once.
    """
    size = LANES if config.family != "vector" else config.block_q
    return [slice(start, start + size) for start in range(0, config.block_q, size)]


def split(x: Array) -> Array:
    """Reshape (keys, Bq) to (keys/8, 8, Bq), which keeps the registers as they are."""
    return x.reshape(x.shape[0] // 8, 8, x.shape[1])


def join(x: Array) -> Array:
    """Reshape (keys/8, 8, Bq) to (keys, Bq), which keeps the registers as they are."""
    return x.reshape(x.shape[0] * 8, x.shape[2])


def broadcast_rows(rows: Ref, out: Ref, count: int, block: int) -> None:
    """Broadcast each row of (1, `count`, `block`) over eight sublanes of `out`."""
    for c in range(count):
        out[c] = jnp.broadcast_to(rows[0, c : c + 1, :], (8, block))


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Return the float32 product over axis `contract[0]` of `a` and `contract[1]` of `b`; float32 is not rounded."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def scores(config: KernelConfig, k: Ref, q: Ref, out: Ref) -> None:
    """Write k_h·q_hᵀ of each head h to out[h]; with v and dO it is the gradient of the composed weights."""
    for h in range(config.heads):
        out[h] = dot(k[0, : config.block_k, config.key_lanes(h)], q[0, config.query_lanes(h)], (1, 0))


def logits(
    config: KernelConfig, a: Sequence[Array], pre: StripCompose | None, mask: Array | None
) -> tuple[Iterable[Array], HiddenPlanes]:
    """Return composed and masked scores in units of log 2, and the hidden planes.

    The packed weights of the pre-compose include the factor scale·log2(e).
    """
    if pre is None:
        out: Iterator[Array] = (x * (config.scale * LOG2_E) for x in a)
        hidden = HiddenPlanes([], [])
    else:
        out, hidden = pre.compose(a)
    return out if mask is None else (jnp.where(mask, x, MASKED_SCORE) for x in out), hidden
