"""DCMHA for NVIDIA Hopper GPUs: Pallas kernels (Mosaic GPU), forward and backward, without atomics.

Why Mosaic GPU: Pallas' Triton backend is deprecated from JAX 0.11 on and will be removed (Pallas changelog, 0.11.0).

Queries are cut into rectangles of rows (`_rectangles`): 512 or so of a causal layer against the keys before them, 256
of a windowed one against the 512 keys around them, all of a short sequence at once. For each rectangle the kernels of
`pallas_gpu_kernels` work tile by tile on all heads, and leave W = C_post(softmax(C_pre(scale·q·k))), and in the
backward also dS, in the inputs' dtype; the products W·v, Wᵀ·dO, dS·k and dSᵀ·q are XLA's. So a rectangle's H×rows×keys
tensors W and dS, at most `WORKSPACE` bytes each, are what is held, each written once and read once or twice; scores
and weights before them never leave the chip, and of the hidden planes 2R a compose go from one kernel to the next.

Saved for the backward: the inputs and the log-sum-exp, B·H·T float32. float32 inputs are taken as sums of two bfloat16,
three products for one, whose error is some 1e-5. On a backend without a GPU the kernels are interpreted, slowly.

Not measured yet: speed. What the compiler says for sm_90a at rank 2 (ptxas 13, head width 64): no or a few bytes of
spills; instructions a warp issues for each head and sweep, of 16 scores a thread 126 and 284 (statistics), 290 and 368
(weights), of 8 scores 91, 244 and 561 (post_grad), 290 and 560 (pre_grad). Knobs: the constants below.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.pallas_gpu.kernels import run
from dcvit.dcmha.pallas_gpu.tiling import INVISIBLE, QUERIES, Branch, Tiling
from dcvit.dcmha.shapes import Array, Bool, Float

KEYS_FORWARD, KEYS_BACKWARD = 32, 16  # keys of a warpgroup's tile: planes of hidden states fill its registers
HOPPER = "9.0"  # the compute capability of H100 and H200
WARPGROUPS = 2  # side by side along the keys, sharing the queries in shared memory
STAGES = 4  # heads in flight, fewer where shared memory is short
ROWS_CAUSAL, ROWS_WINDOW = 512, 256  # queries of a rectangle
WORKSPACE = 2**29  # bytes of one H×rows×keys tensor
SHARED_MEMORY = 220 * 1024  # bytes that the ring and the staging buffers may take
MAX_RANK, MAX_WIDTH, MAX_GROUP = 4, 256, 64

LOG2E = math.log2(math.e)


class _Static(NamedTuple):
    causal: bool
    window: int | None
    groups: int
    scale: float
    interpret: bool


class _Rectangle(NamedTuple):
    """Queries `rows` against keys `cols`, both [from, to); no query sees a key elsewhere."""

    rows: tuple[int, int]
    cols: tuple[int, int]


def refuses(
    q: Any, k: Any, v: Any, pre: ComposeWeights | None, post: ComposeWeights | None,
    *, causal: bool, window: int | None, mask: Any, groups: int,
) -> str | None:  # fmt: skip
    """One line on why these kernels cannot take such arguments, or None. Reads shapes and dtypes only."""
    del causal, window, mask
    capability = getattr(jax.devices()[0], "compute_capability", HOPPER)
    if capability != HOPPER:
        return f"the GPU kernels are for Hopper GPUs (compute capability {HOPPER}), found {capability}"
    if q.dtype not in (jnp.bfloat16, jnp.float32) or k.dtype != q.dtype or v.dtype != q.dtype:
        return (
            f"the GPU kernels take bfloat16 or float32 q, k and v of one dtype, found {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if q.shape[3] > MAX_WIDTH // (1 if q.dtype == jnp.bfloat16 else 2):
        return f"heads {q.shape[3]} wide do not fit in the shared memory of the GPU kernels in {q.dtype}"
    if q.shape[2] // groups > MAX_GROUP:
        return f"the GPU kernels compose at most {MAX_GROUP} heads, found {q.shape[2] // groups}"
    for weights in (pre, post):
        if weights is None:
            continue
        if weights.static is not None:
            return "the GPU kernels have no static projection"
        for x in (weights.q1, weights.k1):
            if x is not None and x.shape[2] > MAX_RANK:
                return f"the GPU kernels take ranks up to {MAX_RANK}, found {x.shape[2]}"
    return None


def attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    causal: bool,
    window: int | None,
    mask: Bool[Array, "#B 1 #T #S"] | None,
    groups: int,
    scale: float,
) -> Float[Array, "B T H D"]:
    """See `dcvit.dcmha.attention`, which checks the arguments. Scores and weights are float32, W·v is in q's dtype.

    Raises:
      ValueError: what `refuses` says.
    """
    why = refuses(q, k, v, pre, post, causal=causal, window=window, mask=mask, groups=groups)
    if why is not None:
        raise ValueError(why)
    static = _Static(causal or window is not None, window, groups, scale, jax.default_backend() != "gpu")
    return _attention(static, q, k, v, pre, post, mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, q: Array, k: Array, v: Array, pre: Any, post: Any, mask: Any) -> Array:
    return _forward(static, q, k, v, pre, post, mask)[0]


def _forward(static: _Static, q: Array, k: Array, v: Array, pre: Any, post: Any, mask: Any) -> tuple[Array, Any]:
    outs, sums = [], []
    for rectangle in _rectangles(q, k, static):
        if rectangle.cols[0] >= rectangle.cols[1]:  # these queries lie behind the last key that they could see
            shape = (q.shape[0], rectangle.rows[1] - rectangle.rows[0], *q.shape[2:])
            outs.append(jnp.zeros(shape, jnp.float32))
            sums.append(jnp.zeros((shape[0], shape[2], shape[1]), jnp.float32))
            continue
        problem = _Problem(static, rectangle, KEYS_FORWARD, (q, k), pre, post, mask)
        found = run("statistics", problem.tiling, [problem.pair(q, k)], *problem.weights(), problem.bias)
        lse = _log_sum_exp(found["row_sums"])
        weights = problem.weights(lse)
        saved = found.get("planes")
        w = run("weights", problem.tiling, [problem.pair(q, k)], *weights, problem.bias, saved)["tile"]
        outs.append(problem.rows_of(_product("bkgts,bskd->btkgd", problem.by_key_head(w), problem.keys_of(v))))
        sums.append(lse[:, :, : outs[-1].shape[1]])
    out = jnp.concatenate(outs, axis=1).astype(q.dtype)
    return out, (q, k, v, pre, post, mask, jnp.concatenate(sums, axis=2))


def _backward(static: _Static, residuals: Any, do: Array) -> tuple[Any, ...]:
    q, k, v, pre, post, mask, lse = residuals
    dq, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    grads = {name: _WeightGrads(weights, k.shape[1]) for name, weights in (("pre", pre), ("post", post))}
    for rectangle in _rectangles(q, k, static):
        if rectangle.cols[0] >= rectangle.cols[1]:
            rows = rectangle.rows[1] - rectangle.rows[0]
            dq.append(jnp.zeros((q.shape[0], rows, *q.shape[2:]), jnp.float32))
            for grad in grads.values():
                grad.add_nothing(rows)
            continue
        problem = _Problem(static, rectangle, KEYS_BACKWARD, (q, k), pre, post, mask, backward=True)
        pairs = [problem.pair(q, k), problem.pair(do, v)]
        sums = problem.pad(lse[:, :, slice(*rectangle.rows)], 2, problem.tiling.queries)
        found = run("post_grad", problem.tiling, pairs, *problem.weights(sums), problem.bias)
        dv = problem.add(dv, _product("bkgts,btkgd->bskd", problem.by_key_head(found["tile"]), problem.queries_of(do)))
        row_sums = jnp.sum(found["row_sums"], axis=2)
        grads["post"].add(problem, row_sums[:, :, :-1], jnp.sum(found["col_sums"], axis=2), 1.0, 1.0)
        weights = problem.weights(sums, row_sums[:, :, -1])
        found = run("pre_grad", problem.tiling, pairs, *weights, problem.bias, found.get("planes"))
        ds = problem.by_key_head(found["tile"])
        row_sums, col_sums = jnp.sum(found["row_sums"], axis=2), jnp.sum(found["col_sums"], axis=2)
        grads["pre"].add(problem, row_sums, col_sums, static.scale, 1 / LOG2E)
        dk = problem.add(dk, _product("bkgts,btkgd->bskd", ds, problem.queries_of(q)) / LOG2E)
        dq.append(problem.rows_of(_product("bkgts,bskd->btkgd", ds, problem.keys_of(k))) / LOG2E)
    return (
        jnp.concatenate(dq, axis=1).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype),
        grads["pre"].result(), grads["post"].result(), None,
    )  # fmt: skip


_attention.defvjp(_forward, _backward)


class _Problem:
    """One rectangle in the kernels' terms: what is sliced and padded of the whole, and how results go back."""

    def __init__(
        self, static: _Static, rectangle: _Rectangle, keys: int, like: tuple[Array, Array],
        pre: ComposeWeights | None, post: ComposeWeights | None, mask: Array | None, backward: bool = False,
    ) -> None:  # fmt: skip
        q, k = like
        self.rectangle, self.scale, self.pre, self.post = rectangle, static.scale, pre, post
        self.real = tuple(to - start for start, to in rectangle)
        branches = [_branch(pre), _branch(post)]
        if max(branch.planes for branch in branches) > 4:
            keys = 16
        warpgroups = _interpretable(WARPGROUPS) if static.interpret else WARPGROUPS
        tiling = Tiling(
            batch=q.shape[0], groups=static.groups, heads=q.shape[2] // static.groups,
            shared=q.shape[2] // k.shape[2], queries=_up(self.real[0], QUERIES), key_count=0,
            width=_up(q.shape[3], 16), parts=1 if q.dtype == jnp.bfloat16 else 2, pre=branches[0], post=branches[1],
            offset=rectangle.rows[0] - rectangle.cols[0], causal=static.causal, window=static.window,
            keys=keys, warpgroups=warpgroups, stages=2, dtype=q.dtype, interpret=static.interpret,
        )  # fmt: skip
        stages = _stages(tiling, 2 if backward else 1)
        if stages < 2:  # wide heads in float32
            tiling = dataclasses.replace(tiling, warpgroups=1)
            stages = _stages(tiling, 2 if backward else 1)
        key_count = _up(self.real[1], tiling.warpgroups * keys)
        self.tiling = dataclasses.replace(tiling, key_count=key_count, stages=min(stages, STAGES))
        self.bias = self._bias(mask)

    def _bias(self, mask: Array | None) -> Array:
        """(1 or B, T, S) float32, 0 where a query sees a key."""
        t = self.tiling
        query = self.rectangle.rows[0] + jnp.arange(t.queries)[:, None]
        key = self.rectangle.cols[0] + jnp.arange(t.key_count)[None]
        seen = (query < self.rectangle.rows[1]) & (key < self.rectangle.cols[1])
        if t.causal:
            seen &= key <= query
        if t.window is not None:
            seen &= key > query - t.window
        seen = seen[None]
        if mask is not None:
            part = mask[:, 0]
            part = part[:, slice(*self.rectangle.rows)] if part.shape[1] > 1 else part
            part = part[:, :, slice(*self.rectangle.cols)] if part.shape[2] > 1 else part
            part = jnp.broadcast_to(part, (part.shape[0], *self.real))
            seen &= self.pad(self.pad(part, 1, t.queries), 2, t.key_count)
        return jnp.where(seen, 0.0, INVISIBLE).astype(jnp.float32)

    def pad(self, x: Array, axis: int, size: int) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, size - x.shape[axis])
        return jnp.pad(x, widths)

    def queries_of(self, x: Array) -> Array:
        """(B T H D) of the whole to (B T K H/K D) of the rectangle, padded."""
        x = self.pad(x[:, slice(*self.rectangle.rows)], 1, self.tiling.queries)
        return x.reshape(*x.shape[:2], -1, self.tiling.shared, x.shape[3])

    def keys_of(self, x: Array) -> Array:
        return self.pad(x[:, slice(*self.rectangle.cols)], 1, self.tiling.key_count)

    def rows_of(self, x: Array) -> Array:
        """(B T K H/K D) of the rectangle to (B T H D) without padding."""
        return x[:, : self.real[0]].reshape(x.shape[0], self.real[0], -1, x.shape[4])

    def add(self, total: Array, x: Array) -> Array:
        """(B S K D) sums of the whole plus the rectangle's."""
        return total.at[:, slice(*self.rectangle.cols)].add(x[:, : self.real[1]])

    def by_key_head(self, x: Array) -> Array:
        """(B H T S) to (B K H/K T S)."""
        return x.reshape(x.shape[0], -1, self.tiling.shared, *x.shape[2:])

    def pair(self, left: Array, right: Array) -> tuple[list[Array], list[Array]]:
        """The operands of a product over D, each as its bfloat16 parts, padded."""
        t = self.tiling
        left = self.queries_of(left).reshape(t.batch, t.queries, -1, left.shape[3])
        sides = []
        for x in (left, self.keys_of(right)):
            x = self.pad(x, 3, t.width)
            if t.parts == 1:
                sides.append([x])
            else:
                high = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)  # unlike a cast, never optimised away
                sides.append([high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)])
        return sides[0], sides[1]

    def weights(self, *statistics: Array) -> tuple[Array, Array]:
        """`rows` and `cols` of the kernels, pre's gates and down projections in units that make scores log 2."""
        found = []
        for side, axis in (("q", 0), ("k", 1)):
            length, span = (self.tiling.queries, self.tiling.key_count)[axis], slice(*self.rectangle[axis])
            channels = []
            for weights, unit in ((self.pre, self.scale * LOG2E), (self.post, 1.0)):
                channels += _channels(weights, side, unit, (self.tiling.batch, self.real[axis], self.heads), span)
            whole = jnp.concatenate(channels, axis=2).astype(jnp.float32)  # B N C H
            found.append(self.pad(jnp.transpose(whole, (0, 3, 2, 1)), 3, length))
        return jnp.concatenate([found[0], *(x[:, :, None] for x in statistics)], axis=2), found[1]

    @property
    def heads(self) -> int:
        return self.tiling.groups * self.tiling.heads


class _WeightGrads:
    """Gradients of one compose's weights, gathered from rectangles."""

    def __init__(self, weights: ComposeWeights | None, keys: int) -> None:
        self.weights, self.keys = weights, keys
        self.rows: list[Array] = []
        self.cols: Any = 0.0

    def add(self, problem: _Problem, rows: Array, cols: Array, gate_and_down: float, up: float) -> None:
        """rows (B H channels T) and cols (B G 64 [tiles channels keys]) of the rectangle; the rest scales channels."""
        if self.weights is None:
            return
        t, branch = problem.tiling, _branch(self.weights)
        cols = cols[:, :, : t.heads].reshape(t.batch, problem.heads, t.columns, -1, t.keys)
        cols = jnp.swapaxes(cols, 2, 3).reshape(t.batch, problem.heads, -1, t.key_count)
        units = [jnp.asarray([gate_and_down] * (1 + r) + [up] * r, jnp.float32) for r in (branch.q, branch.k)]
        units = [x[None, None, :, None] for x in units]
        self.rows.append((rows * units[0])[..., : problem.real[0]])
        start, stop = problem.rectangle.cols
        self.cols += jnp.pad((cols * units[1])[..., : problem.real[1]], [(0, 0)] * 3 + [(start, self.keys - stop)])

    def add_nothing(self, rows: int) -> None:
        if self.weights is not None:
            batch, heads, channels = self._shape()
            self.rows.append(jnp.zeros((batch, heads, channels, rows), jnp.float32))

    def _shape(self) -> tuple[int, int, int]:
        assert self.weights is not None
        some = next(x for x in self.weights if x is not None)
        return some.shape[0], some.shape[-1], 1 + 2 * _branch(self.weights).q

    def result(self) -> ComposeWeights | None:
        if self.weights is None:
            return None
        fields: dict[str, Any] = {}
        for side, total in (("q", jnp.concatenate(self.rows, axis=3)), ("k", self.cols)):
            rank = getattr(_branch(self.weights), side)
            if isinstance(total, float):  # no query saw a key
                like = [getattr(self.weights, side + part) for part in ("g", "1", "2")]
                parts: list[Any] = [None if x is None else jnp.zeros_like(x) for x in like]
            else:
                total = jnp.transpose(total, (0, 3, 2, 1))  # B N C H
                parts = [total[:, :, 0], total[:, :, 1 : 1 + rank], total[:, :, 1 + rank :]]
            for name, x in zip(("g", "1", "2"), parts, strict=True):
                weight = getattr(self.weights, side + name)
                fields[side + name] = None if weight is None else x.astype(weight.dtype)
        return ComposeWeights(**fields)


def _branch(weights: ComposeWeights | None) -> Branch:
    if weights is None:
        return Branch()
    return Branch(*(0 if x is None else x.shape[2] for x in (weights.q1, weights.k1)))


def _channels(
    weights: ComposeWeights | None, side: str, unit: float, shape: tuple[int, int, int], span: slice
) -> list[Array]:
    """Gate, down and up weights of one side, each (B N channels H); the query-wise gate holds the skip connection."""
    skip = 1.0 if side == "q" else 0.0
    gate, down, up = (None if weights is None else getattr(weights, side + name) for name in ("g", "1", "2"))
    batch, length, heads = shape
    whole = jnp.full((batch, length, heads), skip, jnp.float32)
    if gate is not None:
        whole += gate[:, span].astype(jnp.float32)
    found = [whole[:, :, None] * unit]
    if down is not None and up is not None:
        found += [down[:, span].astype(jnp.float32) * unit, up[:, span].astype(jnp.float32)]
    return found


def _log_sum_exp(parts: Array) -> Array:
    """(B H T) base-2 log-sum-exp of whole rows from (B H tiles 2 T) maxima and sums of tiles; 0 for empty rows."""
    largest, total = parts[:, :, :, 0], parts[:, :, :, 1]
    whole = jnp.max(largest, axis=2)
    total = jnp.sum(total * jnp.exp2(largest - whole[:, :, None]), axis=2)
    return jnp.where(total > 0, whole + jnp.log2(jnp.where(total > 0, total, 1)), 0)


def _product(equation: str, a: Array, b: Array) -> Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)


def _interpretable(warpgroups: int) -> int:
    """How many can be interpreted: each takes a thread of XLA's pool, as the copying one does, and waits in it."""
    return max(1, min(warpgroups, max(os.cpu_count() or 1, jax.local_device_count("cpu")) - 1))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _stages(t: Tiling, pairs: int) -> int:
    """How many slots shared memory holds beside the staging buffers."""
    wide, item = t.warpgroups * t.keys, jnp.dtype(t.dtype).itemsize
    rows, cols = (2 + sum(1 + 2 * getattr(branch, side) for branch in (t.pre, t.post)) for side in ("q", "k"))
    slot = pairs * t.parts * (QUERIES + wide) * t.width * 2 + 4 * (rows * QUERIES + cols * wide)
    staging = wide * QUERIES * item + t.warpgroups * rows * QUERIES * 4
    if pairs > 1:
        channels = 1 + 2 * max(t.pre.k, t.post.k)
        staging += t.warpgroups * QUERIES * (t.parts * channels * t.keys + QUERIES) * 2
    return (SHARED_MEMORY - staging) // slot


def _rectangles(q: Array, k: Array, static: _Static) -> Sequence[_Rectangle]:
    """Rows of queries, each with the keys that any of them may see, so that H×rows×keys fits in `WORKSPACE`."""
    batch, queries, heads = q.shape[:3]
    keys, item = k.shape[1], q.dtype.itemsize
    most = ROWS_WINDOW if static.window is not None else ROWS_CAUSAL if static.causal else queries
    width = min(keys, static.window + most) if static.window is not None else keys
    fitting = max(QUERIES, WORKSPACE // (batch * heads * width * item) // QUERIES * QUERIES)
    rows = min(most, fitting)
    found = []
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        last = min(keys, stop) if static.causal else keys
        first = 0 if static.window is None else max(0, start - static.window + 1) // QUERIES * QUERIES
        found.append(_Rectangle((start, stop), (first, last)))
    return found
