"""TPU kernel for DCMHA of one query. It reads keys, values and key-wise weights once and writes nothing of size H×S.

The grid iterates over examples, and twice over the key blocks of each. Phase 0 reads the keys, composes and masks their
scores, and keeps the scores of all heads in VMEM, H×S in float32. Phase 1 starts with the softmax, then reads the
values and composes the weights. Heads lie along sublanes and keys along lanes.

Each of the two matrix products handles all heads at once. The query of each head is a row of an H×(K·D) matrix that is
zero outside the lanes of the head's own key head; of weights·v, only the lanes of the own key head are kept. The
products compute K times the required values, but in bfloat16 the compiler's schedule is still shorter than the memory
transfers (docs/performance_notes.md). The speed on a TPU has not been measured. The query-wise part of a compose is a
product with an H×H matrix.

Keys and values have the layout (B S K·D), key-wise weights (B R·H S). `dcvit.dcmha.kv_cache` stores keys and values in
this layout, and TPUs lay out (B S R H) in this way by default, because its H heads are fewer than the 128 lanes of a
register. Keys in the layout (B S K D) are copied.

The gradient is that of `dcvit.dcmha.decode`, which also computes the forward pass on other platforms.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha import decode
from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.derivatives import differentiable
from dcvit.dcmha.errors import UnsupportedError
from dcvit.dcmha.inputs import Inputs, Options
from dcvit.dcmha.numerics import MASKED_SCORE, cdiv
from dcvit.dcmha.pallas_tpu.config import Index, Interpret
from dcvit.dcmha.pallas_tpu.tile import dot
from dcvit.dcmha.pallas_tpu.tiling import check_device, check_dtypes, vmem_limit
from dcvit.dcmha.reference import visible
from dcvit.dcmha.shapes import Array, Float, Ref

BLOCKS = (512, 256, 128)  # keys of a block, in the order in which they are tried
RESERVED_BYTES = 8 * 2**20  # of VMEM, for values of one block that the compiler keeps

Arguments: TypeAlias = tuple[Array, Array, Array, ComposeWeights | None, ComposeWeights | None, Array | None]
Static: TypeAlias = tuple["DecodeConfig", Interpret | None]


class DecodeConfig(NamedTuple):
    """All static properties of the attention of one query."""

    heads: int
    key_heads: int
    head_dim: int
    keys: int
    groups: int
    block: int  # keys of a block
    scale: float
    vmem_bytes: int

    @property
    def blocks(self) -> int:
        return cdiv(self.keys, self.block)

    @property
    def heads_per_key_head(self) -> int:
        return self.heads // self.key_heads

    def position(self, head: int) -> tuple[int, slice]:
        """Return the row and the lanes of a query head in queries and outputs of shape (H/K)×(K·D)."""
        key_head, row = divmod(head, self.heads_per_key_head)
        return row, slice(key_head * self.head_dim, (key_head + 1) * self.head_dim)


class ComposeRefs(NamedTuple):
    """References to the weights of one compose; a reference is None where the branch is absent."""

    query_map: Ref | None = None  # the query-wise part, (1, H, H); None without this compose
    k1: Ref | None = None  # key-wise weights, (1, R·H, keys of a block)
    k2: Ref | None = None
    kg: Ref | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeRefs:
    """References of the decode kernel by name."""

    q: Ref
    k: Ref
    v: Ref
    o: Ref
    x: Ref  # scores, later weights of all keys, (blocks, H, keys of a block)
    separate_q: Ref  # queries as H×(K·D) in float32
    matrix_q: Ref  # the same in the dtype of the matrix product
    acc: Ref  # weights·v, H×(K·D)
    mask: Ref | None = None
    pre_map: Ref | None = None
    pre_k1: Ref | None = None
    pre_k2: Ref | None = None
    pre_kg: Ref | None = None
    post_map: Ref | None = None
    post_k1: Ref | None = None
    post_k2: Ref | None = None
    post_kg: Ref | None = None

    @property
    def pre(self) -> ComposeRefs:
        return ComposeRefs(self.pre_map, self.pre_k1, self.pre_k2, self.pre_kg)

    @property
    def post(self) -> ComposeRefs:
        return ComposeRefs(self.post_map, self.post_k1, self.post_k2, self.post_kg)


def make_config(
    q: Array, k: Array, pre: ComposeWeights | None, post: ComposeWeights | None, *, groups: int, scale: float,
    vmem_bytes: int,
) -> DecodeConfig:  # fmt: skip
    """Return the configuration with the largest key blocks that fit into `vmem_bytes`.

    Raises:
      UnsupportedError: no block size fits.
    """
    keys, key_heads, head_dim = k.shape[1:]
    heads, size = q.shape[2], k.dtype.itemsize
    key_wise = [x for w in (pre, post) if w is not None for x in (w.k1, w.k2, w.kg) if x is not None]
    rows = sum(math.prod(x.shape[2:]) for x in key_wise)
    for block in BLOCKS:
        block = min(block, keys)
        config = DecodeConfig(heads, key_heads, head_dim, keys, groups, block, scale, vmem_bytes)
        streamed = 2 * size * block * (2 * key_heads * head_dim + rows)
        kept = 4 * heads * (config.blocks * block + 4 * key_heads * head_dim)
        if streamed + kept + RESERVED_BYTES <= vmem_bytes:
            return config
    raise UnsupportedError(f"the scores of {keys} keys and {heads} heads do not fit into a TPU's VMEM")


def attention(inputs: Inputs, options: Options, *, interpret: Interpret | None = None) -> Float[Array, "B T H D"]:
    """Compute attention of one query (T = 1) as `dcvit.dcmha.attention`, which checks the arguments.

    `interpret` is the argument of `pallas_call`. None uses the kernel where the program is lowered for TPUs, also on a
    host without a TPU, and `dcvit.dcmha.decode` on all other platforms.

    Raises:
      UnsupportedError: there are several queries, or the kernel does not support the device, the dtypes or the sizes.
    """
    q, k, v, pre, post, mask = inputs
    check_device()
    decode.check_one_query(q)
    check_dtypes(q, k, v)
    config = make_config(q, k, pre, post, groups=options.groups, scale=options.scale, vmem_bytes=vmem_limit())
    attended = visible(1, k.shape[1], causal=options.causal, window=options.window, mask=mask)
    return _attention((config, interpret), (q, k, v, pre, post, attended))


def _forward(static: Static, x: Arguments) -> tuple[Array, tuple[()]]:
    config, interpret = static
    fused = functools.partial(call_kernel, config, interpret=interpret or False)
    if interpret is not None:
        return fused(*x), ()
    return jax.lax.platform_dependent(*x, tpu=fused, default=functools.partial(call_xla, config)), ()


def _backward(static: Static, x: Arguments, results: tuple[Array, tuple[()]], cotangent: Array) -> Arguments:
    *differentiated, mask = x
    dq, dk, dv, dpre, dpost = jax.vjp(functools.partial(call_xla, static[0], mask=mask), *differentiated)[1](cotangent)
    return dq, dk, dv, dpre, dpost, None


def call_xla(
    config: DecodeConfig, q: Array, k: Array, v: Array, pre: ComposeWeights | None, post: ComposeWeights | None,
    mask: Array | None,
) -> Array:  # fmt: skip
    """Compute the same attention with `dcvit.dcmha.decode`."""
    options = Options(groups=config.groups, scale=config.scale)
    return decode.attention(Inputs(q, k, v, pre, post, mask), options)


_attention = differentiable(_forward, _backward, forward_mode=lambda static, x: call_xla(static[0], *x))


def compose(config: DecodeConfig, a: Array, refs: ComposeRefs) -> Array:
    """Return the composition of `a`, H×keys."""
    if refs.query_map is None:
        return a
    out = dot(refs.query_map[0], a, (1, 0))
    if refs.k1 is not None and refs.k2 is not None:
        down, up = refs.k1[0].astype(jnp.float32), refs.k2[0].astype(jnp.float32)
        for start in range(0, down.shape[0], config.heads):
            rank = slice(start, start + config.heads)
            out = out + sum_over_groups(config, a * down[rank]) * up[rank]
    if refs.kg is not None:
        out = out + a * refs.kg[0].astype(jnp.float32)
    return out


def sum_over_groups(config: DecodeConfig, a: Array) -> Array:
    """Sum H×keys over the heads of each group and repeat the sum for each of these heads."""
    if config.groups == 1:
        return jnp.sum(a, axis=0, keepdims=True)
    size = config.heads // config.groups
    parts = [a[first : first + size] for first in range(0, config.heads, size)]
    return jnp.concatenate([jnp.broadcast_to(jnp.sum(x, axis=0, keepdims=True), x.shape) for x in parts], axis=0)


def zero_padding(config: DecodeConfig, j: Index, x: Array, axis: int) -> Array:
    """Set the values after the last key to zero; there, the last block contains arbitrary values."""
    if config.keys % config.block == 0:
        return x
    key = j * config.block + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where(key < config.keys, x, jnp.zeros_like(x))


def kernel(config: DecodeConfig, names: tuple[str, ...], *arguments: Ref) -> None:
    """Process one key block at grid index (b, phase, j): scores in phase 0, output in phase 1."""
    refs = DecodeRefs(**dict(zip(names, arguments, strict=True)))
    phase, j = pl.program_id(1), pl.program_id(2)

    @pl.when((phase == 0) & (j == 0))
    def _() -> None:
        refs.separate_q[...] = jnp.zeros(refs.separate_q.shape, jnp.float32)
        for head in range(config.heads):
            row, lanes = config.position(head)
            refs.separate_q[head : head + 1, lanes] = refs.q[0, row : row + 1, lanes]
        refs.matrix_q[...] = refs.separate_q[...].astype(refs.matrix_q.dtype)

    @pl.when(phase == 0)
    def _() -> None:
        a = dot(refs.matrix_q[...], refs.k[0], (1, 1)) * config.scale
        a = compose(config, a, refs.pre)
        mask = jnp.ones((1, config.block), jnp.float32) if refs.mask is None else refs.mask[0]
        refs.x[j] = jnp.where(zero_padding(config, j, mask, 1) > 0, a, MASKED_SCORE)

    @pl.when((phase == 1) & (j == 0))
    def _() -> None:
        softmax(refs.x)
        refs.acc[...] = jnp.zeros(refs.acc.shape, jnp.float32)

    @pl.when(phase == 1)
    def _() -> None:
        w = zero_padding(config, j, compose(config, refs.x[j], refs.post), 1)
        v = zero_padding(config, j, refs.v[0], 0)
        refs.acc[...] += dot(w.astype(v.dtype), v, (1, 0))

    @pl.when((phase == 1) & (j == config.blocks - 1))
    def _() -> None:
        for head in range(config.heads):
            row, lanes = config.position(head)
            refs.o[0, row : row + 1, lanes] = refs.acc[head : head + 1, lanes]


def softmax(x: Ref) -> None:
    """Replace scores (blocks, H, keys) by their softmax over all keys; masked keys get the weight 0."""
    blocks, heads, _ = x.shape

    def reduced(function: Callable[..., Array], combine: Callable[[Array, Array], Array], start: float) -> Array:
        def add_block(j: Array, y: Array) -> Array:
            return combine(y, function(x[j], axis=1, keepdims=True))

        out: Array = jax.lax.fori_loop(0, blocks, add_block, jnp.full((heads, 1), start, jnp.float32))
        return out

    def exponentiate(j: Array, _: None) -> None:
        x[j] = jnp.where(x[j] <= MASKED_SCORE / 2, 0.0, jnp.exp(x[j] - largest))  # a NaN stays a NaN

    def divide(j: Array, _: None) -> None:
        x[j] = x[j] * inverse

    largest = reduced(jnp.max, jnp.maximum, MASKED_SCORE)
    jax.lax.fori_loop(0, blocks, exponentiate, None)
    total = reduced(jnp.sum, jnp.add, 0.0)
    inverse = 1 / jnp.where(total == 0, 1.0, total)
    jax.lax.fori_loop(0, blocks, divide, None)


class KernelInputs:
    """Inputs of the kernel and their block specifications by name."""

    def __init__(self, config: DecodeConfig) -> None:
        self.config = config
        self.arrays: dict[str, Array] = {}
        self.specs: dict[str, pl.BlockSpec] = {}

    def add_whole(self, name: str, x: Array) -> None:
        """Add an input of which each step reads everything that belongs to its example."""
        self.arrays[name], self.specs[name] = x, pl.BlockSpec((1, *x.shape[1:]), lambda b, p, j: (b, 0, 0))

    def add_blocks(self, name: str, phase: int, x: Array, key_axis: int) -> None:
        """Add an input that is read in blocks of keys along `key_axis` in one phase, and not in the other one."""
        shape = [1, *x.shape[1:]]
        shape[key_axis] = self.config.block
        shared = x.shape[0] == 1  # by all examples
        last = self.config.blocks - 1

        def index(b: Index, p: Index, j: Index) -> tuple[Index, Index, Index]:
            block = jnp.where(p == 0, j, last) if phase == 0 else jnp.where(p == 0, 0, j)
            return (0 if shared else b, *((block, 0) if key_axis == 1 else (0, block)))

        self.arrays[name], self.specs[name] = x, pl.BlockSpec(tuple(shape), index)


def kernel_inputs(
    config: DecodeConfig, q: Array, k: Array, v: Array, pre: ComposeWeights | None, post: ComposeWeights | None,
    mask: Array | None,
) -> KernelInputs:  # fmt: skip
    """Arrange the arguments of attention as inputs of the kernel."""
    batch, shared, flat = q.shape[0], config.heads_per_key_head, config.key_heads * config.head_dim
    inputs = KernelInputs(config)
    rows = q.reshape(batch, config.key_heads, shared, config.head_dim).swapaxes(1, 2).reshape(batch, shared, flat)
    inputs.add_whole("q", rows.astype(jnp.float32))
    inputs.add_blocks("k", 0, k.reshape(batch, config.keys, flat), 1)
    inputs.add_blocks("v", 1, v.reshape(batch, config.keys, flat), 1)
    if mask is not None:
        inputs.add_blocks("mask", 0, mask[:, 0].astype(jnp.float32), 2)
    for phase, (name, w) in enumerate((("pre", pre), ("post", post))):
        if w is None:
            continue
        query_map = decode.map_of_heads(w, batch, config.heads, config.groups, jnp.float32)
        inputs.add_whole(f"{name}_map", query_map.swapaxes(1, 2))
        for field, x in (("k1", w.k1), ("k2", w.k2), ("kg", w.kg)):
            if x is not None:
                inputs.add_blocks(f"{name}_{field}", phase, x.reshape(batch, config.keys, -1).swapaxes(1, 2), 2)
    return inputs


def call_kernel(
    config: DecodeConfig, q: Array, k: Array, v: Array, pre: ComposeWeights | None, post: ComposeWeights | None,
    mask: Array | None, *, interpret: Interpret,
) -> Array:  # fmt: skip
    """Run the kernel; shapes are those of `attention`."""
    batch, shared, flat = q.shape[0], config.heads_per_key_head, config.key_heads * config.head_dim
    inputs = kernel_inputs(config, q, k, v, pre, post, mask)
    scratch = {
        "x": pltpu.VMEM((config.blocks, config.heads, config.block), jnp.float32),
        "separate_q": pltpu.VMEM((config.heads, flat), jnp.float32),
        "matrix_q": pltpu.VMEM((config.heads, flat), q.dtype),
        "acc": pltpu.VMEM((config.heads, flat), jnp.float32),
    }
    out: Array = pl.pallas_call(
        functools.partial(kernel, config, (*inputs.arrays, "o", *scratch)),
        grid=(batch, 2, config.blocks),
        in_specs=list(inputs.specs.values()),
        out_specs=pl.BlockSpec((1, shared, flat), lambda b, p, j: (b, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, shared, flat), jnp.float32),
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=config.vmem_bytes
        ),
        interpret=interpret,
        name="dcmha_decode",
    )(*inputs.arrays.values())
    out = out.reshape(batch, shared, config.key_heads, config.head_dim).swapaxes(1, 2)
    return out.reshape(q.shape).astype(q.dtype)
