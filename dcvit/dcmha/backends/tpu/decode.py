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

The gradient is that of `dcvit.dcmha.backends.xla.decode`, which also computes the forward pass on other platforms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dcvit.dcmha.backends.tpu.call import Blocked, KernelCall, Refs
from dcvit.dcmha.backends.tpu.config import ComposeName, Index, Interpret
from dcvit.dcmha.backends.tpu.tile import dot
from dcvit.dcmha.backends.tpu.tiling import check_device, check_dtypes, vmem_limit
from dcvit.dcmha.backends.xla import decode
from dcvit.dcmha.backends.xla.reference import visible
from dcvit.dcmha.derivatives import differentiable
from dcvit.dcmha.inputs import Call, Inputs, Options, UnsupportedError, reason_of
from dcvit.dcmha.numerics import MASKED_SCORE, cdiv
from dcvit.dcmha.shapes import Array, Float, Ref

BLOCKS = (512, 256, 128)  # keys of a block, in the order in which they are tried
RESERVED_BYTES = 8 * 2**20  # of VMEM, for values of one block that the compiler keeps

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
        """Return the row and the lanes of a query head in arrays of queries and outputs, (H/K, K·D)."""
        key_head, row = divmod(head, self.heads_per_key_head)
        return row, slice(key_head * self.head_dim, (key_head + 1) * self.head_dim)


def make_config(inputs: Inputs, options: Options, vmem_bytes: int) -> DecodeConfig:
    """Return the configuration with the largest key blocks that fit into `vmem_bytes`.

    Raises:
      UnsupportedError: no block size fits.
    """
    keys, key_heads, head_dim = inputs.k.shape[1:]
    heads, size = inputs.q.shape[2], inputs.k.dtype.itemsize
    key_wise = [x for w in (inputs.pre, inputs.post) if w is not None for x in (w.k1, w.k2, w.kg) if x is not None]
    rows = sum(math.prod(x.shape[2:]) for x in key_wise)
    for block in BLOCKS:
        block = min(block, keys)
        config = DecodeConfig(heads, key_heads, head_dim, keys, options.groups, block, options.scale, vmem_bytes)
        streamed = 2 * size * block * (2 * key_heads * head_dim + rows)
        kept = 4 * heads * (config.blocks * block + 4 * key_heads * head_dim)
        if streamed + kept + RESERVED_BYTES <= vmem_bytes:
            return config
    raise UnsupportedError(f"the scores of {keys} keys and {heads} heads do not fit into a TPU's VMEM")


def checked_config(call: Call) -> DecodeConfig:
    """Return the configuration of the kernel for a call, or raise UnsupportedError."""
    check_device()
    if (reason := decode.supports(call)) is not None:
        raise UnsupportedError(reason)
    check_dtypes(*call.inputs[:3])
    return make_config(call.inputs, call.options, vmem_limit())


def supports(call: Call) -> str | None:
    """Return the reason why a call is not supported, or None."""
    return reason_of(checked_config, call)


def run(call: Call, *, interpret: Interpret | None = None) -> Float[Array, "B T H D"]:
    """Compute the attention of one query (T = 1) that a `Call` describes, and return the outputs of the heads.

    `interpret` is the argument of `pallas_call`. None uses the kernel where the program is lowered for TPUs, also on a
    host without a TPU, and `dcvit.dcmha.backends.xla.decode` on all other platforms.

    Raises:
      UnsupportedError: T > 1, or the kernel does not support the device, the dtypes or the sizes.
    """
    config, inputs = checked_config(call), call.inputs
    attended = visible(1, inputs.k.shape[1], call.options, inputs.mask, inputs.segments)
    return _attention((config, interpret), inputs._replace(mask=attended, segments=None))


def _forward(static: Static, x: Inputs) -> tuple[Array, tuple[()]]:
    config, interpret = static
    fused = functools.partial(call_kernel, config, interpret=interpret or False)
    if interpret is not None:
        return fused(x), ()
    return jax.lax.platform_dependent(x, tpu=fused, default=functools.partial(call_xla, config)), ()


def _backward(static: Static, x: Inputs, results: tuple[Array, tuple[()]], d_out: Array) -> Inputs:
    def attend(differentiated: Inputs) -> Array:
        return call_xla(static[0], differentiated._replace(mask=x.mask))

    gradients: Inputs = jax.vjp(attend, x._replace(mask=None))[1](d_out)[0]
    return gradients


def call_xla(config: DecodeConfig, inputs: Inputs) -> Array:
    """Return the result of the kernel, computed by `dcvit.dcmha.backends.xla.decode`."""
    return decode.attend(Options(groups=config.groups, scale=config.scale), inputs)


_attention = differentiable(_forward, _backward, forward_mode=lambda static, x: call_xla(static[0], x))


def compose(config: DecodeConfig, a: Array, refs: Refs, name: ComposeName) -> Array:
    """Return scores or weights `a`, (H, keys), composed by `name`, "pre" or "post"; unchanged without that compose."""
    if f"{name}_map" not in refs:
        return a
    out = dot(refs[f"{name}_map"][0], a, (1, 0))
    if f"{name}_k1" in refs:
        down, up = (refs[f"{name}_{field}"][0].astype(jnp.float32) for field in ("k1", "k2"))
        for start in range(0, down.shape[0], config.heads):
            rank = slice(start, start + config.heads)
            out = out + sum_over_groups(config, a * down[rank]) * up[rank]
    if f"{name}_kg" in refs:
        out = out + a * refs[f"{name}_kg"][0].astype(jnp.float32)
    return out


def sum_over_groups(config: DecodeConfig, a: Array) -> Array:
    """Return `a`, (H, keys), with each row replaced by the sum of its group's rows; (1, keys) if there is one group."""
    if config.groups == 1:
        return jnp.sum(a, axis=0, keepdims=True)
    size = config.heads // config.groups
    parts = [a[first : first + size] for first in range(0, config.heads, size)]
    return jnp.concatenate([jnp.broadcast_to(jnp.sum(x, axis=0, keepdims=True), x.shape) for x in parts], axis=0)


def zero_padding(config: DecodeConfig, j: Index, x: Array, axis: int) -> Array:
    """Return `x`, block number `j`, with zeros after the last key: its padding has arbitrary values."""
    if config.keys % config.block == 0:
        return x
    key = j * config.block + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where(key < config.keys, x, jnp.zeros_like(x))


def kernel(config: DecodeConfig, refs: Refs) -> None:
    """Process one key block at grid index (b, phase, j): scores in phase 0, output in phase 1."""
    phase, j = pl.program_id(1), pl.program_id(2)
    x, block_diagonal_q, matrix_q, acc = (refs[name] for name in ("x", "block_diagonal_q", "matrix_q", "acc"))

    @pl.when((phase == 0) & (j == 0))
    def _() -> None:
        block_diagonal_q[...] = jnp.zeros(block_diagonal_q.shape, jnp.float32)
        for head in range(config.heads):
            row, lanes = config.position(head)
            block_diagonal_q[head : head + 1, lanes] = refs["q"][0, row : row + 1, lanes]
        matrix_q[...] = block_diagonal_q[...].astype(matrix_q.dtype)

    @pl.when(phase == 0)
    def _() -> None:
        a = dot(matrix_q[...], refs["k"][0], (1, 1)) * config.scale
        a = compose(config, a, refs, "pre")
        mask = refs["mask"][0] if "mask" in refs else jnp.ones((1, config.block), jnp.float32)
        x[j] = jnp.where(zero_padding(config, j, mask, 1) > 0, a, MASKED_SCORE)

    @pl.when((phase == 1) & (j == 0))
    def _() -> None:
        softmax(x)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(phase == 1)
    def _() -> None:
        w = zero_padding(config, j, compose(config, x[j], refs, "post"), 1)
        v = zero_padding(config, j, refs["v"][0], 0)
        acc[...] += dot(w.astype(v.dtype), v, (1, 0))

    @pl.when((phase == 1) & (j == config.blocks - 1))
    def _() -> None:
        for head in range(config.heads):
            row, lanes = config.position(head)
            refs["o"][0, row : row + 1, lanes] = acc[head : head + 1, lanes]


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


def whole(x: Array) -> Blocked:
    """Return the declaration of an input whose block is all data of one example."""
    return Blocked(x, (1, *x.shape[1:]), "B..")


def kernel_inputs(config: DecodeConfig, inputs: Inputs) -> dict[str, Blocked]:
    """Return the inputs of the kernel by name, arranged from the arguments of attention.

    In `Blocked.axes`, key blocks have the letter K in inputs that phase 0 reads, and V in those that phase 1 reads.
    """
    q, k, v, pre, post, mask, _ = inputs
    batch, shared, flat = q.shape[0], config.heads_per_key_head, config.key_heads * config.head_dim
    rows = q.reshape(batch, config.key_heads, shared, config.head_dim).swapaxes(1, 2).reshape(batch, shared, flat)
    found = {"q": whole(rows.astype(jnp.float32))}
    found["k"] = Blocked(k.reshape(batch, config.keys, flat), (1, config.block, flat), "BK.")
    found["v"] = Blocked(v.reshape(batch, config.keys, flat), (1, config.block, flat), "BV.")
    if mask is not None:
        x = mask[:, 0].astype(jnp.float32)
        found["mask"] = Blocked(x, (1, x.shape[1], config.block), "B.K" if len(x) > 1 else "..K")
    for letter, name, w in (("K", "pre", pre), ("V", "post", post)):
        if w is None:
            continue
        query_map = decode.map_of_heads(w, batch, config.heads, config.groups, jnp.float32)
        found[f"{name}_map"] = whole(query_map.swapaxes(1, 2))
        for field, weights in (("k1", w.k1), ("k2", w.k2), ("kg", w.kg)):
            if weights is not None:
                x = weights.reshape(batch, config.keys, -1).swapaxes(1, 2)
                found[f"{name}_{field}"] = Blocked(x, (1, x.shape[1], config.block), f"B.{letter}")
    return found


def call_kernel(config: DecodeConfig, inputs: Inputs, *, interpret: Interpret) -> Array:
    """Return the result of the kernel; arguments and result have the shapes of `dcvit.dcmha.attention`."""
    q = inputs.q
    batch, shared, flat = q.shape[0], config.heads_per_key_head, config.key_heads * config.head_dim
    last = config.blocks - 1
    call = KernelCall(
        name="dcmha_decode",
        grid=(batch, 2, config.blocks),
        index_maps={  # keys are read in one phase
            "B": lambda b, *_: b,
            "K": lambda b, phase, j: jnp.where(phase == 0, j, last),
            "V": lambda b, phase, j: jnp.where(phase == 0, 0, j),
        },
        inputs=kernel_inputs(config, inputs),
        outputs={"o": Blocked(jax.ShapeDtypeStruct((batch, shared, flat), jnp.float32), (1, shared, flat), "B..")},
        scratch={
            "x": pltpu.VMEM((config.blocks, config.heads, config.block), jnp.float32),  # scores, later weights
            "block_diagonal_q": pltpu.VMEM((config.heads, flat), jnp.float32),  # zero outside a head's own key head
            "matrix_q": pltpu.VMEM((config.heads, flat), q.dtype),  # the same in the dtype of the matrix product
            "acc": pltpu.VMEM((config.heads, flat), jnp.float32),  # weights·v
        },
        vmem_bytes=config.vmem_bytes,
    )
    out = call.run(functools.partial(kernel, config), interpret)["o"]
    out = out.reshape(batch, shared, config.key_heads, config.head_dim).swapaxes(1, 2)
    return out.reshape(q.shape).astype(q.dtype)
