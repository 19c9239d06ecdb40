"""Eqn 7 and the softmax on one strip of keys: the stages of all kernels, forward and backward.

A stage has matrix products of a strip, and vector operations that need their results. The schedules `tile.over_strips`
and `interleaved.run_stage` issue the products of a strip ahead of its vector operations.

| stage | products of a strip | its vector operations |
|---|---|---|
| score | key-wise part of the pre-compose of x | y: composed and masked scores; backward, p: attention weights P |
| weight | P of y, and the key-wise part of their post-compose | w: composed weights |
| post | key-wise parts of the post-compose of p, and of the transposed post-compose of y = dW | w: W; dp: dP |
| logit | dl: gradients of the logits; key-wise part of the gradients of the scores | da: gradients of the scores |

The forward pass has the stages score and weight, with the statistics of the softmax between them; the backward pass has
score, post and logit. The products of post and logit include the gradients of the matrices
(`dcvit.dcmha.backends.tpu.mixing`). The references x, y, p, dp, dl, w and da are planes of a tile, (H, Bk, Bq); x and y
of the forward pass may be the same, and y and dl of the backward pass.

With a window of composition, a compose keeps the pairs outside of it. A tile without pairs inside has the same stages,
with composes that have no branches (`in_tile`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import jax.numpy as jnp
from jax.experimental import pallas as pl

from dcvit.dcmha.backends.tpu import mixing
from dcvit.dcmha.backends.tpu.call import ComposePair, ComposeRefs
from dcvit.dcmha.backends.tpu.config import LANES, ComposeLayout, Index, KernelConfig, Rows
from dcvit.dcmha.backends.tpu.tile import (
    StoredPlanes,
    Strip,
    Visible,
    all_pairs,
    dot,
    join,
    planes,
    query_parts,
    save,
    save_operand,
    split,
    stack,
    stacked_planes,
    strip_rows,
)
from dcvit.dcmha.numerics import LOG2_E, MASKED_SCORE, total
from dcvit.dcmha.shapes import Array, Ref, not_none

HiddenPlanes: TypeAlias = list[list[Array]]  # A·w_q1 of Eqn 7, by rank and group
AnyStages = TypeVar("AnyStages", bound="Stages")


class Compose(NamedTuple):
    """One compose in a kernel (Eqn 7). The VPU adds the query-wise branch to what the MXU has mixed.

    Query-wise weights come from `rows`, (1, Bq/128, columns, 128), where a load broadcasts a row of 128 lanes over
    sublanes at no cost. The MXU computes the sum of the other branches, a plane for each head.
    """

    config: KernelConfig
    layout: ComposeLayout
    rows: Ref | None
    refs: ComposeRefs[Ref]
    diagonal: Ref | None  # see `mixing.write_diagonal`
    g_hidden: Ref | None  # hidden planes of the transposed compose
    near: Visible = all_pairs  # the mask of the pairs that are composed, see `tile.near`

    def without_branches(self) -> Compose:
        """Return the compose that keeps all pairs."""
        return self._replace(layout=self.layout.without_branches(), near=all_pairs)

    def inside(self, a: Iterable[Array], strip: Strip) -> Iterable[Array]:
        """Return planes with zeros for the pairs that are not composed."""
        near = self.near(strip)
        return a if near is None else (jnp.where(near, x, 0.0) for x in a)

    def matrix(self, strip: Strip, *, transposed: bool = False) -> Array:
        """Return the matrix of a strip, which multiplies the `stack` of all planes; see `mixing.block`."""
        matrices, number = not_none(self.refs.transposed if transposed else self.refs.matrices), strip.number
        if self.config.family == "matrix":
            matrices, number = matrices.at[0], jnp.minimum(number, matrices.shape[1] - 1)
        return mixing.block(self.config, matrices, not_none(self.diagonal), number)

    def product(self, strip: Strip, stacked: Array, *, transposed: bool = False) -> Array:
        """Return the key-wise part of the compose, or of the transposed compose, of stacked planes."""
        return dot(self.matrix(strip, transposed=transposed), stacked, (1, 0))

    def save_matrix_gradient(self, strip: Strip, a: Array, g: Array) -> None:
        """Write the gradient of the matrix of a strip, from the stacked inputs `a` and output gradients `g`.

        In the family "matrix", it is added, because the matrix serves several query blocks.
        """
        out = not_none(self.refs.d_matrices).at[strip.number]
        mixing.diagonals(self.config, dot(g, a, (1, 1)), out, add=self.config.family == "matrix")

    def apply(self, a: Sequence[Array], mixed: Ref, strip: Strip, *, transposed: bool = False) -> Iterator[Array]:
        """Return an iterator over the composed planes of `a`, a plane for each head h:

            A'_h = A_h·gate_h + Σ_r (Σ_n A_n·w_q1[r, n])·w_q2[r, h] + Σ_n N[h, n]·A_n    (Eqn 7)

        The last sum is in the buffer `mixed`. A gate contains the skip connection. With `transposed`, w_q1 and w_q2
        change places: the result is the gradient of the compose's input from that of its output, `a`. Hidden planes,
        the inner sums, are saved if they have a buffer. Pairs that are not composed have the skip connection alone.
        """
        first, second = self.layout.query.down, self.layout.query.up
        out = self.refs.hidden
        if transposed:
            first, second, out = second, first, self.g_hidden
        hidden = self._hidden(a, strip, first)
        if out is not None:
            for n, plane in enumerate(self.inside((plane for by_group in hidden for plane in by_group), strip)):
                out[n, strip.rows, strip.queries] = join(plane)
        return self._composed(a, hidden, second, mixed, strip)

    def _hidden(self, a: Sequence[Array], strip: Strip, start: int | None) -> HiddenPlanes:
        """Return the hidden planes Σ_n a_n·w[r, n], sums over the heads n of each group."""
        heads, per_group = self.config.heads, self.config.heads // self.config.groups
        found: HiddenPlanes = [[] for _ in range(0 if start is None else self.layout.query_rank)]
        for n in range(heads):
            x = a[n]
            for r, by_group in enumerate(found):
                term = x * self._weight(strip, not_none(start) + r * heads + n)
                if n % per_group == 0:
                    by_group.append(term)
                else:
                    by_group[-1] = by_group[-1] + term
        return found

    def _composed(
        self, a: Sequence[Array], hidden: HiddenPlanes, start: int | None, mixed: Ref, strip: Strip
    ) -> Iterator[Array]:  # fmt: skip
        """Yield the planes of `apply`."""
        heads, per_group = self.config.heads, self.config.heads // self.config.groups
        gate, skip = self.layout.query.gate, self.layout.skip_factor
        mixed_planes, near = stacked_planes(self.config, mixed, strip.queries), self.near(strip)
        for h in range(heads):
            terms = [a[h] * self._weight(strip, gate + h) if gate is not None else a[h] if skip == 1 else a[h] * skip]
            if start is not None:
                group = h // per_group
                terms += [planes[group] * self._weight(strip, start + r * heads + h) for r, planes in enumerate(hidden)]
            if self.layout.mixes:
                terms.append(mixed_planes[h])
            yield total(terms) if near is None else jnp.where(near, total(terms), a[h] * skip)

    def _weight(self, strip: Strip, column: int) -> Array:
        """Return one of each query's packed weights, repeated over 8 sublanes: (1, 8, queries)."""
        registers = slice(strip.queries.start // LANES, strip.queries.stop // LANES)
        rows = not_none(self.rows).at[:, registers]
        parts = [jnp.broadcast_to(rows[0, n, column : column + 1, :], (8, LANES)) for n in range(rows.shape[1])]
        return jnp.concatenate(parts, axis=-1)[None]


def composes(
    config: KernelConfig, refs: ComposePair[Ref], rows: Sequence[Ref | None], diagonal: Ref | None,
    g_hidden: Ref | None = None, near: Visible = all_pairs,
) -> list[Compose | None]:  # fmt: skip
    """Return the pre-compose and the post-compose of a kernel, None for one that the call does not have."""
    return [
        None if layout is None else Compose(config, layout, one, some, diagonal, g_hidden, near)
        for layout, one, some in zip(config.layouts, rows, refs, strict=True)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """Stages that the forward and the backward kernels share.

    Fields:
      x: scores q·k.
      m: log-sum-exp of each query, repeated over eight sublanes, (H, 8, Bq); in the forward pass, first the maximum.
      is_plain: the composes have no branches.
    """

    config: KernelConfig
    visible: Visible
    pre: Compose | None
    post: Compose | None
    x: Ref
    m: Ref
    is_plain: bool = False

    def score_products(self, strip: Strip, out: Ref) -> None:
        """Write the key-wise part of the pre-compose of a strip to `out`."""
        if self.pre is not None and self.pre.layout.mixes:
            out[0] = self.pre.product(strip, stack(self.config, planes(self.config, self.x, strip)))

    def logits(self, strip: Strip, mixed: Ref) -> Iterable[Array]:
        """Return the composed and masked scores of a strip, in units of log 2, a plane for each head.

        The packed weights of the pre-compose include the factor scale·log2(e).
        """
        a, mask = planes(self.config, self.x, strip), self.visible(strip)
        if self.pre is None:
            out: Iterator[Array] = (x * (self.config.scale * LOG2_E) for x in a)
        else:
            out = self.pre.apply(a, mixed, strip)
        return out if mask is None else (jnp.where(mask, x, MASKED_SCORE) for x in out)

    def softmax(self, logits: Iterable[Array], strip: Strip) -> Iterator[Array]:
        """Return the attention weights P of a strip, one head after the other; `m` must contain the log-sum-exp."""
        return (jnp.exp2(x - self.m[h, :, strip.queries][None]) for h, x in enumerate(logits))


def in_tile(stages: AnyStages, i: Index, j: Index, attended: Array, compute: Callable[[AnyStages], None]) -> None:
    """Call `compute` for the tile of query block `i` and key block `j` if it is attended.

    It gets `stages`, or in a tile without composed pairs, those whose composes have no branches.
    """
    if stages.config.compose_window is None:
        pl.when(attended)(lambda: compute(stages))
        return
    pre, post = (compose and compose.without_branches() for compose in (stages.pre, stages.post))
    plain = dataclasses.replace(stages, pre=pre, post=post, is_plain=True)
    is_composed = stages.config.is_composed(i, j)
    pl.when(attended & is_composed)(lambda: compute(stages))
    pl.when(attended & ~is_composed)(lambda: compute(plain))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardStages(Stages):
    """Stages of the forward kernels. `sums` has the sum of each sublane, (H, 8, Bq)."""

    y: Ref
    w: Ref
    sums: Ref

    def score_vectors(self, strip: Strip, buffers: Sequence[Ref]) -> None:
        """Compute the composed and masked scores of a strip, and write them to `y`."""
        for part in query_parts(self.config, strip):
            save(self.logits(part, buffers[0]), self.y, part)

    def weight_products(self, strip: Strip, out: Ref) -> None:
        """Write the attention weights of a strip, and the key-wise part of their post-compose, to `out`."""
        if self.post is not None and self.post.layout.mixes:
            matrix = self.post.matrix(strip)
            for part in query_parts(self.config, strip):
                p = self.attention_weights(part)
                for h, x in enumerate(p):
                    out[1, strip_rows(self.config, h), part.queries] = join(x)
                out[0, :, part.queries] = dot(matrix, stack(self.config, p), (1, 0))

    def weight_vectors(self, strip: Strip, buffers: Sequence[Ref]) -> None:
        """Compute the composed attention weights of a strip, and write them to `w`."""
        for part in query_parts(self.config, strip):
            if self.post is None:
                save_operand(self.config, self.attention_weights(part), self.w, part)
                continue
            p: Sequence[Array] = (
                stacked_planes(self.config, buffers[1], part.queries)
                if self.post.layout.mixes
                else self.attention_weights(part)
            )
            save_operand(self.config, self.post.apply(p, buffers[0], part), self.w, part)

    def attention_weights(self, strip: Strip) -> list[Array]:
        """Return the attention weights P of all heads, from the scores in `y`."""
        return list(self.softmax(planes(self.config, self.y, strip), strip))

    def update_statistics(self, rows: Rows, *, is_first: bool = False, valid: Array | None = None) -> None:
        """Update the running maximum and sum of each sublane with the scores of the keys `rows`.

        `is_first` replaces the statistics instead of updating them. A traced `valid` of False leaves them unchanged.
        """
        for h in range(self.config.heads):
            y = split(self.y[h, rows, :])
            if is_first:
                self.m[h] = jnp.max(y, axis=0)
                self.sums[h] = jnp.sum(jnp.exp2(y - self.m[h][None]), axis=0)
                continue
            before, sums = self.m[h], self.sums[h]
            m = jnp.maximum(before, jnp.max(y, axis=0))
            found = sums * jnp.exp2(before - m) + jnp.sum(jnp.exp2(y - m[None]), axis=0)
            self.m[h] = m if valid is None else jnp.where(valid, m, before)
            self.sums[h] = found if valid is None else jnp.where(valid, found, sums)

    def finish_statistics(self, out: Ref, e: Index = 0) -> None:
        """Store the log-sum-exp over all eight sublanes in `m` and in `out[e]`; it is 0 for fully masked queries."""
        for h in range(self.config.heads):
            m = jnp.max(self.m[h], axis=0, keepdims=True)
            sums = jnp.sum(self.sums[h] * jnp.exp2(self.m[h] - m), axis=0, keepdims=True)
            lse = jnp.where(m > MASKED_SCORE / 2, m + jnp.log2(sums), 0.0)
            out[e, h : h + 1, :] = lse
            self.m[h] = jnp.broadcast_to(lse, (8, self.config.block_q))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaStages(Stages):
    """Stages of the kernel of delta = Σ_s P·dP.

    Fields:
      y: gradient of the composed weights.
      d: delta of each query, or parts of the sum in eight sublanes, (H, 8, Bq).
    """

    y: Ref
    d: Ref

    def attention_weights(self, strip: Strip, mixed: Ref) -> Iterator[Array]:
        """Return the attention weights P of a strip, one head after the other."""
        return self.softmax(self.logits(strip, mixed), strip)

    def delta_products(self, strip: Strip, out: Ref) -> None:
        """Compute the key-wise parts of the pre-compose and of the transposed post-compose of a strip."""
        self.score_products(strip, out)
        if self.post is not None and self.post.layout.mixes:
            stacked = stack(self.config, planes(self.config, self.y, strip))
            out[1] = self.post.product(strip, stacked, transposed=True)

    def add_delta(self, strip: Strip, buffers: Sequence[Ref]) -> None:
        """Add the products P·dP of a strip, summed over its keys in each sublane, to `d`."""
        for part in query_parts(self.config, strip):
            p = self.attention_weights(part, buffers[0])
            for h, (x, y) in enumerate(zip(p, self.weight_gradients(part, buffers[1]), strict=True)):
                self.d[h, :, part.queries] += jnp.sum(x * y, axis=0)

    def weight_gradients(self, strip: Strip, mixed: Ref) -> Iterable[Array]:
        """Return the gradients dP of the attention weights of a strip."""
        d_composed = planes(self.config, self.y, strip)
        return d_composed if self.post is None else self.post.apply(d_composed, mixed, strip, transposed=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientStages(DeltaStages):
    """Stages of the gradient kernels."""

    p: Ref
    dp: Ref
    dl: Ref
    w: Ref
    da: Ref

    def score_vectors(self, strip: Strip, buffers: Sequence[Ref]) -> None:
        """Compute the attention weights P of a strip, and write them to `p`."""
        for part in query_parts(self.config, strip):
            save(self.attention_weights(part, buffers[0]), self.p, part)

    def post_products(self, strip: Strip, out: Ref) -> None:
        """Compute a strip's key-wise parts of the post-compose and its transpose, and the gradient of its matrix."""
        if self.post is not None and self.post.layout.mixes:
            p = stack(self.config, self.post.inside(planes(self.config, self.p, strip), strip))
            g = stack(self.config, planes(self.config, self.y, strip))
            out[0] = self.post.product(strip, p)
            out[1] = self.post.product(strip, g, transposed=True)
            self.post.save_matrix_gradient(strip, p, g)

    def post_vectors(self, strip: Strip, buffers: Sequence[Ref]) -> None:
        """Compute the composed weights W of a strip, and the gradient dP of its attention weights P."""
        for part in query_parts(self.config, strip):
            p = planes(self.config, self.p, part)
            w = p if self.post is None else self.post.apply(p, buffers[0], part)
            save_operand(self.config, w, self.w, part)
            save(self.weight_gradients(part, buffers[-1]), self.dp, part)

    def logit_products(self, strip: Strip, out: Ref) -> None:
        """Compute a strip's gradients of logits, key-wise part of the gradients of scores, and that of its matrix."""
        if self.pre is not None and self.pre.layout.mixes:
            dl = list(self.logit_gradients(strip))
            save(dl, self.dl, strip)
            a = stack(self.config, self.pre.inside(planes(self.config, self.x, strip), strip))
            g = stack(self.config, dl)
            out[0] = self.pre.product(strip, g, transposed=True)
            self.pre.save_matrix_gradient(strip, a, g)

    def logit_vectors(self, strip: Strip, buffers: Sequence[Ref]) -> None:
        """Compute the gradients of the scores of a strip, and write them to `da`."""
        for part in query_parts(self.config, strip):
            if self.pre is None or not self.pre.layout.mixes:
                save(self.logit_gradients(part), self.dl, part)
            dl = planes(self.config, self.dl, part)
            da = dl if self.pre is None else self.pre.apply(dl, buffers[0], part, transposed=True)
            save_operand(self.config, da, self.da, part)

    def logit_gradients(self, strip: Strip) -> StoredPlanes:
        """Return the gradients P·(dP - delta) of the logits of a strip, a plane for each head."""
        p, dp = (planes(self.config, ref, strip) for ref in (self.p, self.dp))
        return StoredPlanes(lambda h: p[h] * (dp[h] - self.d[h, :, strip.queries][None]), self.config.heads)

    def query_weight_products(
        self, compose: Compose, h: int, keys: slice, queries: slice
    ) -> Iterator[tuple[int, Array]]:  # fmt: skip
        """Yield the products whose sums over keys are the gradients of head `h`'s query-wise weights of a compose.

        Each item is (packed column of the weight, product). The product is a_h times a hidden plane of the output's
        gradient g for a down projection, g_h times a hidden plane of the input a for an up projection, and a_h·g_h for
        a gate. Those of the post-compose are valid after the post stage, those of the pre-compose after logit.
        """
        config, (down, up, gate) = self.config, compose.layout.query
        a, g = (self.x, self.dl) if compose is self.pre else (self.p, self.y)
        x, y = a[h, keys, queries], g[h, keys, queries]
        group = h // (config.heads // config.groups)
        if down is not None and up is not None:
            for r in range(compose.layout.query_rank):
                plane = group + r * config.groups
                yield down + r * config.heads + h, x * not_none(compose.g_hidden)[plane, keys, queries]
                yield up + r * config.heads + h, y * not_none(compose.refs.hidden)[plane, keys, queries]
        if gate is not None:
            near = compose.near(Strip(keys.start, keys.stop - keys.start, False, queries))
            yield gate + h, x * y if near is None else join(jnp.where(near, split(x * y), 0.0))
