"""TPU kernels that combine the query or output vectors of heads, for composition folded into plain attention.

For each token and each group of J heads, y_n = Σ_j W[j, n]·x_j with a J×J matrix W of the token (`dcvit.dcmha.folded`).
The kernels read and write arrays with a column for each token: vectors as (B, H·D, T), as the attention kernels read
queries and write outputs, so that nothing is moved between them, and weights as (B, G, J·J, T). An entry of W is then a
row of a register, broadcast over the dimensions of a head.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dcvit.dcmha.backends.tpu import tiling
from dcvit.dcmha.backends.tpu.call import Blocked, KernelCall, Memory
from dcvit.dcmha.backends.tpu.config import LANES, SUBLANES, Interpret, Rows
from dcvit.dcmha.inputs import UnsupportedError, reason_of
from dcvit.dcmha.numerics import cdiv, pad, round_up, total
from dcvit.dcmha.shapes import Array, Float, Ref, not_none

BLOCK = 2 * LANES  # tokens of a step of the grid
CHUNK = 2 * SUBLANES  # dimensions of a head that are processed at once: the rows of a register of bfloat16
MAX_GROUP = 8  # heads of a group; the J·J rows of weights of larger ones leave few registers

Inputs: TypeAlias = tuple[Array, Array]  # vectors of heads, and weights


class Static(NamedTuple):
    """Static sizes and options of the kernels."""

    groups: int
    per_group: int  # J
    head_dim: int
    interpret: Interpret

    def rows(self, group: Array, head: int, chunk: int) -> Rows:
        """Return the rows in (H·D, T) of `CHUNK` dimensions of a head of a group, from dimension `chunk`·`CHUNK` on."""
        start = (group * self.per_group + head) * self.head_dim + chunk * CHUNK
        return pl.ds(pl.multiple_of(start, CHUNK), CHUNK)

    def row(self, j: int, n: int) -> slice:
        """Return the row of W[j, n] in (J·J, T), the weights of a group."""
        return slice(j * self.per_group + n, j * self.per_group + n + 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Refs(Generic[Memory]):
    """References of a kernel; None for those that it does not have."""

    w: Memory
    x: Memory
    d_out: Memory | None = None
    out: Memory | None = None
    d_x: Memory | None = None
    d_w: Memory | None = None


def supports(x: Float[Array, "B T H D"], w: Float[Array, "#B #T G J J"]) -> str | None:
    """Return the reason why the kernels do not support the device, the dtype or the sizes, or None."""
    (_, length, _, head_dim), per_group = x.shape, w.shape[3]
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the TPU kernels support vectors of float32 or bfloat16, found {x.dtype}"
    if head_dim % CHUNK or per_group > MAX_GROUP or length <= BLOCK:
        sizes = f"{length} tokens and groups of {per_group} heads of {head_dim} dimensions"
        return f"the TPU kernels do not combine heads of {sizes}"
    return reason_of(tiling.check_device)


def combine_heads(
    x: Float[Array, "B T H D"], w: Float[Array, "#B #T G J J"], *, interpret: Interpret = False
) -> Float[Array, "B T H D"]:
    """Return `dcvit.dcmha.folded.combine_heads`(x, w) by a TPU kernel; `interpret` is the argument of `pallas_call`.

    Raises:
      UnsupportedError: the kernels do not support the device, the dtype or the sizes.
    """
    if (reason := supports(x, w)) is not None:
        raise UnsupportedError(reason)
    batch, length, _, head_dim = x.shape
    groups, per_group = w.shape[2:4]
    w = jnp.broadcast_to(w.astype(jnp.float32), (batch, length, *w.shape[2:]))
    return _combine(Static(groups, per_group, head_dim, interpret), (x, w))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(static: Static, inputs: Inputs) -> Array:
    x, w = _columns(inputs[0]), _columns(inputs[1], static.groups)
    found = _call(
        "dcmha_combine", static, Refs(_blocked(w), _blocked(x), out=_blocked(x).like(x.dtype)), _combine_kernel
    )
    return _tokens(not_none(found.out), inputs[0])


def _backward(static: Static, inputs: Inputs, d_out: Array) -> tuple[Inputs]:
    x, w = _columns(inputs[0]), _columns(inputs[1], static.groups)
    d_x, d_w = _blocked(x).like(x.dtype), _blocked(w).like(w.dtype)
    refs = Refs(_blocked(w), _blocked(x), _blocked(_columns(d_out)), d_x=d_x, d_w=d_w)
    found = _call("dcmha_combine_gradients", static, refs, _gradient_kernel)
    return ((_tokens(not_none(found.d_x), inputs[0]), _tokens(not_none(found.d_w), inputs[1])),)


_combine.defvjp(lambda static, inputs: (_combine(static, inputs), inputs), _backward)


def _columns(x: Float[Array, "B T ..."], *axes: int) -> Float[Array, "B ... columns"]:
    """Return (B T …) reshaped to (B, *axes, -1, T), with the tokens padded to blocks."""
    x = jnp.moveaxis(x, 1, -1).reshape(len(x), *axes, -1, x.shape[1])
    return pad(x, -1, round_up(x.shape[-1], BLOCK))


def _tokens(x: Float[Array, "B ... columns"], like: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
    """Return the array that `_columns` has reshaped to `x`, in the shape of `like`."""
    batch, length, *rest = like.shape
    return jnp.moveaxis(x[..., :length].reshape(batch, *rest, length), -1, 1)


def _blocked(x: Array) -> Blocked:
    """Return the declaration of an array with a column for each token, in blocks of `BLOCK` tokens."""
    return Blocked(x, (1, *x.shape[1:-1], BLOCK), f"B{'.' * (x.ndim - 2)}T")


def _call(name: str, static: Static, refs: Refs[Blocked], kernel: Callable[[Static, Refs[Ref]], None]) -> Refs[Array]:
    """Call a kernel for each block of tokens."""
    batch, *_, columns = refs.x.array.shape
    call = KernelCall(
        name=name,
        grid=(batch, cdiv(columns, BLOCK)),
        index_maps={"B": lambda b, t: b, "T": lambda b, t: t},
        refs=refs,
        vmem_bytes=tiling.vmem_limit(),
        parallel_axes=2,
    )
    found: Refs[Array] = call.run(functools.partial(kernel, static), static.interpret)
    return found


def _over_groups(static: Static, of_group: Callable[[Array, Rows], None]) -> None:
    """Call `of_group(group, lanes)` for each group and each slice of 128 tokens of a block."""

    def step(n: Array, _: None) -> None:
        lanes = pl.ds(pl.multiple_of(jax.lax.rem(n, BLOCK // LANES) * LANES, LANES), LANES)
        of_group(jax.lax.div(n, BLOCK // LANES), lanes)

    jax.lax.fori_loop(0, static.groups * (BLOCK // LANES), step, None)


def _combine_kernel(static: Static, refs: Refs[Ref]) -> None:
    heads, out = range(static.per_group), not_none(refs.out)

    def of_group(group: Array, lanes: Rows) -> None:
        w = [[refs.w[0, group, static.row(j, n), lanes] for n in heads] for j in heads]
        for chunk in range(static.head_dim // CHUNK):
            x = [refs.x[0, static.rows(group, j, chunk), lanes].astype(jnp.float32) for j in heads]
            for n in heads:
                y = total([w[j][n] * x[j] for j in heads])
                out[0, static.rows(group, n, chunk), lanes] = y.astype(out.dtype)

    _over_groups(static, of_group)


def _gradient_kernel(static: Static, refs: Refs[Ref]) -> None:
    heads = range(static.per_group)
    d_out_ref, d_x_ref, d_w_ref = not_none(refs.d_out), not_none(refs.d_x), not_none(refs.d_w)

    def of_group(group: Array, lanes: Rows) -> None:
        w = [[refs.w[0, group, static.row(j, n), lanes] for n in heads] for j in heads]
        d_w = [[jnp.zeros((SUBLANES, LANES), jnp.float32) for _ in heads] for _ in heads]
        for chunk in range(static.head_dim // CHUNK):
            x, d_out = (
                [ref[0, static.rows(group, j, chunk), lanes].astype(jnp.float32) for j in heads]
                for ref in (refs.x, d_out_ref)
            )
            for j in heads:
                d_x = total([w[j][n] * d_out[n] for n in heads])
                d_x_ref[0, static.rows(group, j, chunk), lanes] = d_x.astype(d_x_ref.dtype)
                for n in heads:
                    product = (x[j] * d_out[n]).reshape(CHUNK // SUBLANES, SUBLANES, LANES)
                    d_w[j][n] += jnp.sum(product, axis=0)
        for j in heads:
            for n in heads:
                d_w_ref[0, group, static.row(j, n), lanes] = jnp.sum(d_w[j][n], axis=0, keepdims=True)

    _over_groups(static, of_group)
