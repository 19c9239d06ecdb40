"""Fused TPU kernels of DCMHA, forward and backward. No array of size H×T×S is written to HBM.

A tile is H planes of Bk keys (along sublanes) by Bq queries (along lanes) in VMEM; `dcvit.dcmha.backends.tpu.tile`
contains the operations on a tile. The forward kernel visits the key blocks of a query block twice: phase 0 computes the
row statistics, phase 1 the output. Between the phases it keeps the scores in VMEM if they fit into two thirds of it;
otherwise it computes them again. Blocks that no query attends to, also by segment ids, are neither fetched nor
computed; masks skip none.

In all kernels, the MXU computes the key-wise branches and the static projection, by matrices that mix the heads
(`dcvit.dcmha.backends.tpu.mixing`). There are two families of kernels; the log says which one is used:

- "interleaved", where one tile holds all scores of an example, such as an image of up to 256 patches, and examples can
  be processed in blocks of eight with interleaved tokens (`dcvit.dcmha.backends.tpu.interleaved`). Both phases are one
  step, and matrix products of an example overlap with the vector operations of its neighbor (`forward_interleaved`,
  `backward_interleaved`). `dcvit.dcmha.backends.tpu.tiling.interleaved` has the rule. If the call has what the dynamic
  weights are computed from (`Inputs.hidden`), a kernel computes them (`second_layer`).
- "matrix" otherwise, with one example in tiles. The MXU mixes heads one step of a loop ahead of the vector operations.
  In each pass, a small kernel computes the matrices of all keys before
  (`dcvit.dcmha.backends.tpu.mixing.matrices`).

What they compute on a strip of keys exists once (`stages`; `stages.Compose.apply` is Eqn 7). Two schedules run it:
rolled loops over the strips of a tile (`tile.over_strips`) for "matrix", and unrolled strips (`interleaved.run_stage`).

With a window of composition (`Options.compose_window`), the family is "matrix", and there are two kinds of tiles. One
with a pair inside of the window is composed, and keeps the plain scores and weights of its pairs outside. All others
run the same stages with composes that have no branches, as plain attention (`stages.in_tile`).

The backward pass needs the inputs and the log-sum-exp. With tiles, it also needs delta = Σ_s P·dP of complete rows. A
first kernel computes it; without a post-compose, it is the product of the output and its gradient. The gradient kernel
iterates over key blocks, and for each of them over query blocks. The gradients of a key block accumulate in VMEM. The
gradients of all queries stay in VMEM for the complete loop, in 4·T·M bytes; if they do not fit, the queries are
processed in several passes.

Scores are in units of log 2, and the packed weights of the pre-compose include the factor scale·log2(e). Matrix
products have bfloat16 operands, also the matrices made of key-wise and static weights; all other values are float32.
For float32 inputs, operands are float32 too if the kernels are interpreted, or if JAX's precision of products
(`jax.default_matmul_precision`) is not its default, at which TPUs round the operands of all products.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from dcvit.dcmha.backends.tpu import backward_interleaved, forward_interleaved, second_layer, tiling
from dcvit.dcmha.backends.tpu.backward import backward
from dcvit.dcmha.backends.tpu.call import Blocked
from dcvit.dcmha.backends.tpu.config import Interpret, KernelConfig
from dcvit.dcmha.backends.tpu.forward import forward
from dcvit.dcmha.backends.tpu.packing import (
    deinterleave,
    from_query_array,
    from_token_array,
    pack,
    query_array,
    unpack,
    with_columns,
)
from dcvit.dcmha.gradients import with_backward
from dcvit.dcmha.inputs import Call, Inputs, reason_of
from dcvit.dcmha.shapes import Array, Float, not_none

LOG = logging.getLogger(__name__)

Static: TypeAlias = tuple[KernelConfig, Interpret | None]
Result = TypeVar("Result")


class Residuals(NamedTuple):
    """Results of the forward pass that the backward pass needs besides the outputs."""

    lse: Float[Array, "B H T"]  # log-sum-exp of the scores of each query, in units of log 2
    packed: Float[Array, "B N C"] | None  # dynamic weights, if their second layer is a kernel


def checked_config(call: Call) -> KernelConfig:
    """Return the configuration of the kernels for a call, or raise UnsupportedError."""
    tiling.check_device()
    tiling.check_dtypes(*call.inputs[:3])
    return tiling.make_config(call.inputs, call.options, tiling.vmem_limit())


def supports(call: Call) -> str | None:
    """Return the reason why a call is not supported, or None."""
    return reason_of(checked_config, call)


def run(call: Call, *, interpret: Interpret | None = None) -> Float[Array, "B T H D"]:
    """Compute the attention that a `Call` describes, and return the outputs of the heads.

    `interpret` is the argument of `pallas_call`. None compiles the kernels where the program is lowered for TPUs, also
    on a host without a TPU, and interprets them on all other platforms.

    Raises:
      UnsupportedError: the kernels do not support the device, the dtypes or the sizes.
    """
    q, k, _, _, _, mask, *_ = call.inputs
    config = checked_config(call)
    sizes = config.family, config.block_q, config.block_k
    LOG.info("attention: %s TPU kernels with tiles of %d queries and %d keys", *sizes)
    if mask is not None:  # keys along sublanes, as in a tile; strips of one-byte values would not be aligned
        mask = jnp.broadcast_to(mask[:, 0], (mask.shape[0], q.shape[1], k.shape[1])).swapaxes(1, 2)
    inputs = call.inputs.once() if config.has_hidden else call.inputs._replace(hidden=None)
    return _attention((config, interpret), inputs._replace(mask=mask))


# Compiled functions are traced and lowered once for equal shapes: twelve layers would take twelve times as long.
@functools.partial(jax.jit, static_argnums=0)
def _forward(static: Static, x: Inputs) -> tuple[Array, Residuals]:
    """Return the outputs of the heads (B T H D), and what the backward pass needs besides them."""

    def attend(config: KernelConfig, x: Inputs, interpret: Interpret) -> tuple[Array, Residuals]:
        packed = second_layer.weights(config, not_none(x.hidden), interpret) if config.has_hidden else None
        kernel = forward_interleaved.forward if config.family == "interleaved" else forward
        out, lse = kernel(config, pack(config, x, packed), interpret)
        return from_query_array(config, out, x[0]), Residuals(lse, packed)

    config, interpret = static
    out, (lse, packed) = by_platform(attend, config, x, interpret)
    # Without the barrier, XLA fuses the kernel with the copy of `lse` into the stack of a scan that keeps it. The
    # fusion loses the kernel's limit of VMEM and does not compile.
    return out, Residuals(jax.lax.optimization_barrier(lse), packed)


@functools.partial(jax.jit, static_argnums=0)
def _backward(static: Static, x: Inputs, results: tuple[Array, Residuals], d_out: Array) -> Inputs:
    def differentiate(
        config: KernelConfig, arguments: tuple[Inputs, tuple[Array, Residuals], Array], interpret: Interpret
    ) -> Inputs:
        x, (out, (lse, packed)), d_out = arguments
        q, k, v, pre, post, *_ = x
        inputs = pack(config, x, packed)
        d_output = query_array(config, d_out.astype(q.dtype))
        inputs = dataclasses.replace(inputs, d_out=d_output, lse=with_columns(config, lse))
        if config.post is None and config.family == "matrix":
            delta = _delta(config, query_array(config, out), d_output)
            inputs = dataclasses.replace(inputs, delta=with_columns(config, delta))
        gradients = backward_interleaved.gradients if config.family == "interleaved" else backward
        grads, hidden = gradients(config, inputs, interpret), None
        if config.has_hidden:
            packed = deinterleave(not_none(grads.weights))
            hidden = second_layer.gradients(config, not_none(x.hidden), packed, interpret)
            grads = dataclasses.replace(grads, weights=None)
        dq = from_query_array(config, grads.q, q)
        dk, dv = from_token_array(config, grads.k, k), from_token_array(config, grads.v, v)
        return Inputs(dq, dk, dv, *unpack(config, grads, pre, post), hidden=hidden)

    config, interpret = static
    return by_platform(differentiate, config, (x, results, d_out), interpret)


def _delta(config: KernelConfig, out: Blocked, d_out: Blocked) -> Array:
    """Return Σ_s P·dP = O·dO of each row, as `dcvit.dcmha.backends.tpu.backward.delta` does, without a post-compose.

    The arguments have a column for each query. XLA needs many more cycles for the sum over the dimensions of a head
    than for its product with a matrix of ones.
    """
    product = jnp.asarray(out.array).astype(jnp.float32) * jnp.asarray(d_out.array).astype(jnp.float32)
    ones = jnp.repeat(jnp.eye(config.heads, dtype=jnp.float32), config.head_dim, axis=1)
    return jnp.einsum("hc,bct->bht", ones, product, precision=jax.lax.Precision.HIGH)


_attention = with_backward(_forward, _backward)


def by_platform(
    kernel: Callable[..., Result], config: KernelConfig, inputs: object, interpret: Interpret | None
) -> Result:
    """Return the results of `kernel`, compiled where the program is lowered for TPUs, interpreted on other platforms.

    The products of compiled kernels round float32 as all others of the program do.
    """
    if interpret is not None:
        return kernel(config, inputs, interpret=interpret)
    result: Result = jax.lax.platform_dependent(
        inputs,
        tpu=functools.partial(kernel, config._replace(rounded=tiling.rounds(config.dtype)), interpret=False),
        default=functools.partial(kernel, config, interpret=True),
    )
    return result
