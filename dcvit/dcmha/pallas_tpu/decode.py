"""DCMHA of one query in one TPU kernel: keys, values and key-wise weights are read once, and nothing of H×S is written.

The grid goes over examples, and for each twice over blocks of keys. Phase 0 reads the keys, composes and masks their
scores and keeps those of all heads in VMEM, H×S in float32. Phase 1 begins with the softmax, reads the values and
composes the weights. Heads lie in sublanes and keys in lanes.

Both products are one for all heads: the queries stand in an H×(K·D) matrix that is zero outside of each head's own
lanes, and of weights·v a head's own lanes are kept. That is K times what is needed; in bfloat16 the compiler's schedule
is still shorter than the memory takes (docs/performance.md). Time on a TPU: not measured. All that a compose does by
the query alone is a product with an H×H matrix.

Keys and values are read as B S K·D, key-wise weights as B R·H S: so `dcvit.dcmha.kv_cache` keeps the former, and so a
TPU lays out B S R H by itself, whose heads are fewer than a register's 128 lanes. Keys that lie as B S K D are copied.

The gradient is that of `dcvit.dcmha.decode`, which also runs where the program is not lowered for a TPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha import decode
from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.pallas_tpu.api import refuses_all, vmem_limit
from dcvit.dcmha.pallas_tpu.tiling import UNSEEN, dot
from dcvit.dcmha.reference import visible
from dcvit.dcmha.shapes import Array, Bool, Float

BLOCKS = (512, 256, 128)  # keys
KEY_WISE = ("k1", "k2", "kg")


class OneQuery(NamedTuple):
    """What is static of one query's attention."""

    heads: int
    key_heads: int
    width: int
    keys: int
    groups: int
    block: int  # keys of a block
    scale: float
    vmem: int

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.keys, self.block)

    @property
    def sharing(self) -> int:
        """How many query heads share a key head."""
        return self.heads // self.key_heads

    def own(self, head: int) -> tuple[int, slice]:
        """Where a query head stands in queries and outputs (H/K)×(K·D): the row, and the lanes of its key head."""
        key_head, row = divmod(head, self.sharing)
        return row, slice(key_head * self.width, (key_head + 1) * self.width)


def plan(q: Any, k: Any, pre: Any, post: Any, *, groups: int, scale: float, vmem: int) -> OneQuery | None:
    """The case with the largest blocks of keys that fit into `vmem` bytes, or None where none does."""
    keys, key_heads, width = k.shape[1:]
    heads, size = q.shape[2], k.dtype.itemsize
    key_wise = [x for w in (pre, post) if w is not None for x in (w.k1, w.k2, w.kg) if x is not None]
    rows = sum(math.prod(x.shape[2:]) for x in key_wise)
    for block in BLOCKS:
        block = min(block, keys)
        case = OneQuery(heads, key_heads, width, keys, groups, block, scale, vmem)
        streamed = 2 * size * block * (2 * key_heads * width + rows)
        kept = 4 * heads * (case.blocks * block + 4 * key_heads * width)
        if streamed + kept + 8 * 2**20 <= vmem:  # the rest: what the compiler keeps of one block
            return case
    return None


def refuses(
    q: Any, k: Any, v: Any, pre: Any, post: Any, *, causal: Any, window: Any, mask: Any, groups: Any
) -> str | None:
    """One line why these arguments cannot be taken, or None. Only shapes and dtypes are read."""
    if reason := refuses_all():
        return reason
    if q.shape[1] != 1:
        return f"it takes one query, found {q.shape[1]}"
    if q.dtype not in (jnp.float32, jnp.bfloat16) or not q.dtype == k.dtype == v.dtype:
        return f"it takes float32 or bfloat16 throughout, found {q.dtype}, {k.dtype} and {v.dtype}"
    if plan(q, k, pre, post, groups=groups, scale=1.0, vmem=vmem_limit()) is None:
        return f"the scores of {k.shape[1]} keys for {q.shape[2]} heads do not fit into a TPU's VMEM"
    return None


def attention(
    q: Float[Array, "B 1 H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    causal: bool,
    window: int | None,
    mask: Bool[Array, "#B 1 1 #S"] | None,
    groups: int,
    scale: float,
    interpret: Any = None,
) -> Float[Array, "B 1 H D"]:
    """See `dcvit.dcmha.attention`, which checks the arguments.

    `interpret` is that of `pallas_call`; None is the kernel where the program is lowered for TPUs, also on a host
    without one, and `dcvit.dcmha.decode` elsewhere.

    Raises:
      ValueError: what `refuses` says.
    """
    if reason := refuses(q, k, v, pre, post, causal=causal, window=window, mask=mask, groups=groups):
        raise ValueError(reason)
    case = plan(q, k, pre, post, groups=groups, scale=float(scale), vmem=vmem_limit())
    seen = visible(1, k.shape[1], causal=causal, window=window, mask=mask)
    out: Array = _attention(case, interpret, q, k, v, pre, post, seen)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(case: OneQuery, interpret: Any, *arguments: Any) -> Array:
    fused = functools.partial(step, case, interpret=interpret or False)
    if interpret is not None:
        return fused(*arguments)
    out: Array = jax.lax.platform_dependent(*arguments, tpu=fused, default=functools.partial(elsewhere, case))
    return out


def _forward(case: OneQuery, interpret: Any, *arguments: Any) -> tuple[Array, Any]:
    return _attention(case, interpret, *arguments), arguments


def _backward(case: OneQuery, interpret: Any, arguments: Any, cotangent: Array) -> tuple[Any, ...]:
    *differentiated, seen = arguments
    return *jax.vjp(functools.partial(elsewhere, case, seen=seen), *differentiated)[1](cotangent), None


_attention.defvjp(_forward, _backward)


def elsewhere(case: OneQuery, q: Array, k: Array, v: Array, pre: Any, post: Any, seen: Array | None) -> Array:
    """The same by XLA."""
    out: Array = decode.attention(
        q, k, v, pre, post, causal=False, window=None, mask=seen, groups=case.groups, scale=case.scale
    )
    return out


def compose(case: OneQuery, a: Array, refs: dict[str, Any], name: str) -> Array:
    """C(a) of H×keys; of the compose `name`, "pre" or "post"."""
    if f"{name}_map" not in refs:
        return a
    out = dot(refs[f"{name}_map"][0], a, (1, 0))
    k1, k2, kg = (refs.get(f"{name}_{field}") for field in KEY_WISE)
    if k1 is not None and k2 is not None:
        down, up = k1[0].astype(jnp.float32), k2[0].astype(jnp.float32)
        for start in range(0, down.shape[0], case.heads):
            rank = slice(start, start + case.heads)
            out = out + over_groups(case, a * down[rank]) * up[rank]
    if kg is not None:
        out = out + a * kg[0].astype(jnp.float32)
    return out


def over_groups(case: OneQuery, a: Array) -> Array:
    """The sum of H×keys over the heads of each group, for each of these heads."""
    if case.groups == 1:
        return jnp.sum(a, axis=0, keepdims=True)
    size = case.heads // case.groups
    parts = [a[first : first + size] for first in range(0, case.heads, size)]
    return jnp.concatenate([jnp.broadcast_to(jnp.sum(x, axis=0, keepdims=True), x.shape) for x in parts], axis=0)


def inside(case: OneQuery, j: Any, x: Array, axis: int) -> Array:
    """Zero behind the last key, where the last block holds whatever is there."""
    if case.keys % case.block == 0:
        return x
    key = j * case.block + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where(key < case.keys, x, jnp.zeros_like(x))


def kernel(case: OneQuery, names: tuple[str, ...], *arguments: Any) -> None:
    """A step (b, phase, j) takes a block of keys: in phase 0 to scores, in phase 1 to the output."""
    refs = dict(zip(names, arguments, strict=True))
    phase, j = pl.program_id(1), pl.program_id(2)
    x = refs["x"]

    @pl.when((phase == 0) & (j == 0))
    def _() -> None:
        apart = refs["apart"]
        apart[...] = jnp.zeros(apart.shape, jnp.float32)
        for head in range(case.heads):
            row, lanes = case.own(head)
            apart[head : head + 1, lanes] = refs["q"][0, row : row + 1, lanes]
        refs["all_q"][...] = apart[...].astype(refs["all_q"].dtype)

    @pl.when(phase == 0)
    def _() -> None:
        a = dot(refs["all_q"][...], refs["k"][0], (1, 1)) * case.scale
        a = compose(case, a, refs, "pre")
        seen = refs["seen"][0] if "seen" in refs else jnp.ones((1, case.block), jnp.float32)
        x[j] = jnp.where(inside(case, j, seen, 1) > 0, a, UNSEEN)

    @pl.when((phase == 1) & (j == 0))
    def _() -> None:
        softmax(x)
        refs["acc"][...] = jnp.zeros(refs["acc"].shape, jnp.float32)

    @pl.when(phase == 1)
    def _() -> None:
        w = inside(case, j, compose(case, x[j], refs, "post"), 1)
        v = inside(case, j, refs["v"][0], 0)
        refs["acc"][...] += dot(w.astype(v.dtype), v, (1, 0))

    @pl.when((phase == 1) & (j == case.blocks - 1))
    def _() -> None:
        for head in range(case.heads):
            row, lanes = case.own(head)
            refs["o"][0, row : row + 1, lanes] = refs["acc"][head : head + 1, lanes]


def softmax(x: Any) -> None:
    """Of scores (blocks, H, keys) in VMEM, in place, over all keys; unseen ones weigh 0."""
    blocks, heads, _ = x.shape

    def reduced(function: Any, combine: Any, start: float) -> Array:
        rows = lambda j, y: combine(y, function(x[j], axis=1, keepdims=True))  # noqa: E731
        out: Array = jax.lax.fori_loop(0, blocks, rows, jnp.full((heads, 1), start, jnp.float32))
        return out

    def weigh(j: Any, _: None) -> None:
        x[j] = jnp.where(x[j] <= UNSEEN / 2, 0.0, jnp.exp(x[j] - largest))  # what is no number stays so

    def divide(j: Any, _: None) -> None:
        x[j] = x[j] * inverse

    largest = reduced(jnp.max, jnp.maximum, UNSEEN)
    jax.lax.fori_loop(0, blocks, weigh, None)
    total = reduced(jnp.sum, jnp.add, 0.0)
    inverse = 1 / jnp.where(total == 0, 1.0, total)
    jax.lax.fori_loop(0, blocks, divide, None)


def step(
    case: OneQuery, q: Array, k: Array, v: Array, pre: Any, post: Any, seen: Array | None, *, interpret: Any
) -> Array:
    """The kernel's call: see `attention`."""
    batch, last = q.shape[0], case.blocks - 1
    flat = case.key_heads * case.width
    blocks = {"pre": lambda p, j: jnp.where(p == 0, j, last), "post": lambda p, j: jnp.where(p == 0, 0, j)}
    inputs: dict[str, Array] = {}
    specs: dict[str, Any] = {}

    def whole(name: str, x: Array) -> None:
        """An input of which a step sees all that belongs to its example."""
        inputs[name], specs[name] = x, pl.BlockSpec((1, *x.shape[1:]), lambda b, p, j: (b, 0, 0))

    def streamed(name: str, when: str, x: Array, axis: int) -> None:
        """An input whose keys, along `axis`, come block by block in the phase of `when`."""
        shape = [1, *x.shape[1:]]
        shape[axis] = case.block
        one = x.shape[0] == 1  # for all examples

        def index(b: Any, p: Any, j: Any) -> tuple[Any, ...]:
            block = blocks[when](p, j)
            return (0 if one else b, *((block, 0) if axis == 1 else (0, block)))

        inputs[name], specs[name] = x, pl.BlockSpec(tuple(shape), index)

    rows = q.reshape(batch, case.key_heads, case.sharing, case.width).swapaxes(1, 2).reshape(batch, case.sharing, flat)
    whole("q", rows.astype(jnp.float32))
    streamed("k", "pre", k.reshape(batch, case.keys, flat), 1)
    streamed("v", "post", v.reshape(batch, case.keys, flat), 1)
    if seen is not None:
        streamed("seen", "pre", seen[:, 0].astype(jnp.float32), 2)
    for name, w in (("pre", pre), ("post", post)):
        if w is None:
            continue
        whole(f"{name}_map", decode.query_map(w, batch, case.heads, case.groups, jnp.float32).swapaxes(1, 2))
        for field in KEY_WISE:
            if (x := getattr(w, field)) is not None:
                streamed(f"{name}_{field}", name, x.reshape(batch, case.keys, -1).swapaxes(1, 2), 2)
    scratch = {
        "x": pltpu.VMEM((case.blocks, case.heads, case.block), jnp.float32),
        "apart": pltpu.VMEM((case.heads, flat), jnp.float32),
        "all_q": pltpu.VMEM((case.heads, flat), q.dtype),
        "acc": pltpu.VMEM((case.heads, flat), jnp.float32),
    }
    out = pl.pallas_call(
        functools.partial(kernel, case, (*inputs, "o", *scratch)),
        grid=(batch, 2, case.blocks),
        in_specs=list(specs.values()),
        out_specs=pl.BlockSpec((1, case.sharing, flat), lambda b, p, j: (b, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, case.sharing, flat), jnp.float32),
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=case.vmem
        ),
        interpret=interpret,
        name="dcmha_decode",
    )(*inputs.values())
    out = out.reshape(batch, case.sharing, case.key_heads, case.width).swapaxes(1, 2)
    return out.reshape(q.shape).astype(q.dtype)
