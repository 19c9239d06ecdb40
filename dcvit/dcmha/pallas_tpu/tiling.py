"""What the TPU kernels do with one tile of scores: H planes of Bk keys by Bq queries in VMEM.

Keys lie in sublanes and queries in lanes. Query-wise weights are then rows, which a load repeats over sublanes for
nothing, row statistics are sums of whole registers, and matrix products take planes as they lie where the tokens are
transposed, which are far smaller. Only key-wise weights have to be spread over lanes.

The vector work runs over strips of a few keys, so that H planes of a strip stay near the registers; a plane of a strip
has the shape (keys/8, 8, Bq). Heads, ranks and groups are unrolled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.pallas_tpu.case import Case, Form
from dcvit.dcmha.shapes import Array

CHUNK = 40  # keys that are read once for all sums of a head
UNSEEN = -1e30  # a score that weighs nothing and is still finite
LOG2_E = math.log2(math.e)


def total(terms: Sequence[Array]) -> Array:
    return functools.reduce(jnp.add, terms)


class Weights:
    """The weights of one compose as a strip sees them.

    Query-wise weights come from `rows`, (1, Bq/128, columns, 128): a load repeats a row of 128 lanes over sublanes for
    nothing. Key-wise ones come from `spread`, (words, strip, 128), repeated over lanes; see `spread_columns`.
    """

    def __init__(self, case: Case, form: Form, rows: Any, spread: Any, static: Any):
        self.case, self.form, self.rows, self.spread, self.static_ref = case, form, rows, spread, static
        self.per_group = case.heads // case.groups

    def q(self, start: int, index: int) -> Array:
        row = slice(start + index, start + index + 1)
        parts = [jnp.broadcast_to(self.rows[0, n, row, :], (8, 128)) for n in range(self.rows.shape[1])]
        return jnp.concatenate(parts, axis=-1)[None]

    def k(self, start: int, index: int) -> Array:
        column = start + index - self.form.first_column
        if self.case.packed:
            word = self.spread[column // 2]
            word = word << 16 if column % 2 == 0 else word & jnp.int32(-65536)
            x = jax.lax.bitcast_convert_type(word, jnp.float32)
        else:
            x = self.spread[column]
        return split(jnp.concatenate([x] * (self.case.block_q // 128), axis=-1))

    def static(self, n: int, h: int) -> Array:
        return self.static_ref[n, h % self.per_group]

    def group(self, index: int) -> range:
        return range(index * self.per_group, (index + 1) * self.per_group)

    def hidden(self, a: Sequence[Array], start_q: Any, start_k: Any) -> tuple[list, list]:
        """Σ_n a_n w[r, n] of both sides, by rank and group: hq_r and hk_r from `down`, gq_r and gk_r from `up`."""
        heads = self.case.heads
        out: tuple[list, list] = ([], [])
        for side, start, rank, get in (
            (0, start_q, self.form.rank_q, self.q),
            (1, start_k, self.form.rank_k, self.k),
        ):
            for r in range(rank if start is not None else 0):
                out[side].append(
                    [total([a[n] * get(start + r * heads, n) for n in self.group(g)]) for g in range(self.case.groups)]
                )
        return out

    def gate(self, h: int) -> Array | None:
        form, terms = self.form, []
        if form.q.gate is not None:
            terms.append(self.q(form.q.gate, h))
        if form.k.gate is not None:
            terms.append(self.k(form.k.gate, h))
        return total(terms) if terms else None

    def mix(
        self, a: Sequence[Array], hidden: tuple[list, list], start_q: Any, start_k: Any, transposed: bool
    ) -> list[Array]:
        """a_h·gate_h + Σ_r hidden_r w[r, h] + Σ_n a_n static[n, h]."""
        heads, out = self.case.heads, []
        for h in range(heads):
            g = h // self.per_group
            gate = self.gate(h)
            skip = self.form.skip  # in the gates where there are any
            terms = [a[h] * gate if gate is not None else a[h] if skip == 1 else a[h] * skip]
            terms += [hq[g] * self.q(start_q + r * heads, h) for r, hq in enumerate(hidden[0])]
            terms += [hk[g] * self.k(start_k + r * heads, h) for r, hk in enumerate(hidden[1])]
            if self.form.static:
                terms += [a[n] * (self.static(h, n) if transposed else self.static(n, h)) for n in self.group(g)]
            out.append(total(terms))
        return out

    def compose(self, a: Sequence[Array]) -> tuple[list[Array], tuple[list, list]]:
        """C(a), and its hidden planes."""
        hidden = self.hidden(a, self.form.q.down, self.form.k.down)
        return self.mix(a, hidden, self.form.q.up, self.form.k.up, False), hidden

    def transposed(self, g: Sequence[Array]) -> tuple[list[Array], tuple[list, list]]:
        """C^T(g), and its hidden planes."""
        hidden = self.hidden(g, self.form.q.up, self.form.k.up)
        return self.mix(g, hidden, self.form.q.down, self.form.k.down, True), hidden

    def keep(self, hidden: tuple[list, list], out: Any, rows: Any) -> None:
        """Writes hidden planes to `out`, (planes, Bk, Bq): by side, rank and group."""
        flat = [plane for side in hidden for of_rank in side for plane in of_rank]
        for n, plane in enumerate(flat):
            out[n, rows, :] = join(plane)


def weight_gradients(case: Case, form: Form, a: Any, g: Any, a_hidden: Any, refs: Any, static: Any) -> None:
    """Adds what a tile of a compose with input `a` and cotangent `g` gives to the gradients of its weights.

    Head by head, since a head's sums over all keys stay in registers: dw_1[r,h] = Σ a_h·gq_r and dw_2[r,h] = Σ g_h·hq_r
    over keys into the rows `refs.gq`, which the tile begins, and the same over queries into the columns `refs.gk`. The
    hidden planes of `a` lie in `a_hidden`, those of `g` in `refs.g_hidden`.
    """
    g_hidden = refs.g_hidden
    heads, per_group = case.heads, case.heads // case.groups
    sides = (form.q, form.rank_q, True), (form.k, form.rank_k, False)
    for h in range(heads):
        sums: dict[int, Array] = {}

        def add(column: int, product: Array, is_row: bool, rows: slice, sums: dict[int, Array] = sums) -> None:
            if is_row:
                part = jnp.sum(split(product), axis=0)
                sums[column] = sums[column] + part if column in sums else part
            elif case.single:
                refs.gk[rows, column : column + 1] = jnp.sum(product, axis=1, keepdims=True)
            else:
                refs.gk[rows, column : column + 1] += jnp.sum(product, axis=1, keepdims=True)

        for start in range(0, case.block_k, CHUNK):
            rows = slice(start, min(start + CHUNK, case.block_k))
            x, y, plane = a[h, rows], g[h, rows], h // per_group
            for side, rank, is_row in sides:
                for r in range(rank if side.down is not None else 0):
                    add(side.down + r * heads + h, x * g_hidden[plane, rows], is_row, rows)
                    add(side.up + r * heads + h, y * a_hidden[plane, rows], is_row, rows)
                    plane += case.groups
            if form.q.gate is not None or form.k.gate is not None:
                product = x * y
                for side, _, is_row in sides:
                    if side.gate is not None:
                        add(side.gate + h, product, is_row, rows)
        for column, part in sums.items():
            refs.gq[column] = part
        for n in range(h - h % per_group, h - h % per_group + per_group) if form.static else ():
            part = jnp.sum(split(a[n] * g[h]), axis=0)
            lanes = [part[:, c : c + 128] for c in range(0, case.block_q, 128)]
            static[n * per_group + h % per_group] += total(lanes)


def split(x: Array) -> Array:
    """(keys, Bq) as (keys/8, 8, Bq): the same registers."""
    return x.reshape(x.shape[0] // 8, 8, x.shape[1])


def join(x: Array) -> Array:
    return x.reshape(x.shape[0] * 8, x.shape[2])


def spread_columns(case: Case, form: Form | None, wk: Any, rows: Any, out: Any) -> None:
    """Repeats the key-wise weights of some keys over the lanes, for one compose."""
    if form is None or not form.columns:
        return
    each = 2 if case.packed else 1
    x = wk[0, rows, :]
    for n in range(form.columns // each):
        c = form.first_column // each + n
        out[n] = jnp.broadcast_to(x[:, c : c + 1], (x.shape[0], 128))


class Strip(NamedTuple):
    """Some keys of a tile."""

    start: Any
    size: int
    may_pad: bool  # whether there may be no key in some rows

    @property
    def rows(self) -> Any:
        return pl.ds(self.start, self.size)


def over_strips(
    case: Case,
    refs: Any,
    which: Sequence[str],
    body: Callable[..., None],
    meanwhile: Callable[[Any], None] | None = None,
) -> None:
    """Calls body(strip, *spread) for each strip of a tile, with the spread weights of the composes `which`.

    With few heads a strip is short and the latency of spreading would show, so one step of the loop takes several
    strips and spreads the weights of all of them first, each into a buffer of its own: the compiler would take a
    buffer chosen by an index for the one that is being read. `meanwhile`, given the step, comes while they are on their
    way, and before the strips: it must read nothing that the step writes.
    """
    strip, unroll = case.strip, case.unroll
    steps = case.block_k // strip // unroll
    refs_of = [getattr(refs, f"spread_{name}") for name in which]
    keys = case.keys - (case.blocks_k - 1) * case.block_k  # of the last block

    def step(i: Any, _: None) -> None:
        strips = []
        for n in range(unroll):
            start = pl.multiple_of((i * unroll + n) * strip, strip)
            strips.append(Strip(start, strip, ((steps - 1) * unroll + n + 1) * strip > keys))
        spread = [[ref if ref is None else ref.at[n] for ref in refs_of] for n in range(unroll)]
        for some, buffers in zip(strips, spread, strict=True):
            for name, buffer in zip(which, buffers, strict=True):
                spread_columns(case, getattr(case, name), refs.wk, some.rows, buffer)
        if meanwhile:
            meanwhile(i)
        for some, buffers in zip(strips, spread, strict=True):
            body(some, *buffers)

    jax.lax.fori_loop(0, steps, step, None)


def spread_scratch(case: Case) -> dict[str, Any]:
    """Buffers of spread weights: of the tile, or of a strip."""
    each, dtype = (2, jnp.int32) if case.packed else (1, jnp.float32)
    return {
        f"spread_{name}": pltpu.VMEM((case.unroll, form.columns // each, case.strip, 128), dtype)
        for name, form in (("pre", case.pre), ("post", case.post))
        if form is not None and form.columns
    }


def repeat_rows(rows: Any, out: Any, count: int, block: int) -> None:
    """Spreads each row of (count, block) over eight sublanes."""
    for c in range(count):
        out[c] = jnp.broadcast_to(rows[0, c : c + 1, :], (8, block))


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """A product summed in float32; float32 factors are not rounded on the way."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def scores(case: Case, k: Any, q: Any, out: Any) -> None:
    """out[h] = k_h·q_h^T; also dW^T = v_h·dO_h^T."""
    for h in range(case.heads):
        out[h] = dot(k[0, :, case.key_head(h)], q[0, :, case.query_head(h)], (1, 1))


def visible(case: Case, i: Any, j: Any, strip: Strip, mask: Any) -> Array | None:
    """Which keys of a strip of key block `j` the queries of block `i` see; None where they see all."""
    shape = (case.strip // 8, 8, case.block_q)
    conditions = []
    key: Any = None
    if case.ordered or strip.may_pad:
        sub = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * 8 + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        key = sub + (j * case.block_k + strip.start)
    if case.ordered:
        query = jax.lax.broadcasted_iota(jnp.int32, shape, 2) + (i * case.block_q + case.first_query)
        conditions.append(key <= query)
        if case.window is not None:
            conditions.append(key > query - case.window)
    if strip.may_pad:
        conditions.append(key < case.keys)
    if mask is not None:
        conditions.append(split(mask[0, strip.rows, :].astype(jnp.float32)) > 0.5)
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def logits(
    case: Case, a: Sequence[Array], weights: Weights | None, seen: Array | None
) -> tuple[list[Array], tuple[list, list]]:
    """Composed scores in units of log 2 and the hidden planes; packed weights bring the factor scale·log2(e) along."""
    out, hidden = ([x * (case.scale * LOG2_E) for x in a], ([], [])) if weights is None else weights.compose(a)
    return out if seen is None else [jnp.where(seen, x, UNSEEN) for x in out], hidden


class Refs:
    """The references of a kernel by name; those that a case has not are None."""

    def __init__(self, names: Sequence[str], arguments: Sequence[Any]):
        self.__dict__.update(zip(names, arguments, strict=True))

    def __getattr__(self, name: str) -> Any:  # only where the attribute is missing
        return None


def weights_of(case: Case, refs: Any, which: str, spread: Any) -> Weights | None:
    """The weights of the compose `which`, "pre" or "post", on a strip."""
    form = getattr(case, which)
    return form and Weights(case, form, refs.wq, spread, getattr(refs, f"static_{which}"))
