"""Plain attention by cuDNN's fused kernels, through `jax.nn.dot_product_attention`.

cuDNN computes plain attention of bfloat16 or float16 on NVIDIA GPUs with float32 statistics and without scores in
memory. While JAX traces the function, it checks that cuDNN is installed and supports the head dimension.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dcvit.dcmha.gradients import with_backward
from dcvit.dcmha.inputs import Call, Inputs, Options, UnsupportedError
from dcvit.dcmha.shapes import Array, Float


def run(call: Call) -> Float[Array, "B T H D"]:
    """Compute the attention that a `Call` describes, and return the outputs of the heads.

    Raises:
      UnsupportedError: the case is not plain attention that cuDNN supports, or cuDNN is not installed.
    """
    if (reason := supports(call)) is not None:
        raise UnsupportedError(reason)
    return _attention(call.options, call.inputs)


def supports(call: Call) -> str | None:
    """Return the reason why cuDNN cannot compute a call, such as that it is not installed, or None if it can."""
    (q, k, v, _, _, mask, segments, *_), options = call.inputs, call.options
    if not call.is_plain:
        return "cuDNN does not compose heads"
    if len({x.dtype for x in (q, k, v)}) > 1 or q.dtype not in (jnp.bfloat16, jnp.float16):
        dtypes = ", ".join(str(x.dtype) for x in (q, k, v))
        return f"cuDNN supports q, k and v of bfloat16 or float16, found {dtypes}"
    if segments is not None:
        return "segments: jax.nn.dot_product_attention has none for cuDNN"
    if mask is not None:
        return "cuDNN adds a mask to the scores, and a query without keys would not have the output 0"
    if options.first_query:
        return "cuDNN needs all queries, found a part of them (mesh axis context)"
    if (options.causal or options.window is not None) and q.shape[1] != k.shape[1]:
        return f"causal attention of {q.shape[1]} queries to {k.shape[1]} keys"
    try:
        jax.eval_shape(functools.partial(_call, options), call.inputs)
    except (NotImplementedError, RuntimeError) as error:  # the width of a head; no cuDNN
        return f"cuDNN: {str(error).strip().splitlines()[0]}"
    return None


def _call(options: Options, inputs: Inputs) -> Array:
    local = None if options.window is None else (options.window - 1, 0)
    causal = options.causal or local is not None
    return jax.nn.dot_product_attention(
        *inputs[:3], scale=options.scale, is_causal=causal, local_window_size=local, implementation="cudnn"
    )


def _forward(options: Options, inputs: Inputs) -> tuple[Array, Any]:
    """Return the output, and the function from its gradient to those of the inputs: a tree of arrays."""
    return jax.vjp(functools.partial(_call, options), inputs)


def _backward(options: Options, inputs: Inputs, results: tuple[Array, Any], d_out: Array) -> Inputs:
    found: tuple[Inputs] = results[1](d_out)
    return found[0]


# JAX's own backward pass would give no name to the output and statistics of cuDNN, by which to keep them.
_attention = with_backward(_forward, _backward)
