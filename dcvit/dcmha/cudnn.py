"""Plain attention by cuDNN's fused kernels, through `jax.nn.dot_product_attention`.

cuDNN computes plain attention of bfloat16 or float16 on NVIDIA GPUs with float32 statistics and without scores in
memory. JAX checks while it traces whether cuDNN is installed and supports the width of the heads. JAX's function has no
forward mode; here it is that of `reference`.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from dcvit.dcmha import reference
from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.derivatives import differentiable
from dcvit.dcmha.errors import UnsupportedError
from dcvit.dcmha.shapes import Array, Bool, Float

Inputs: TypeAlias = tuple[Array, Array, Array]  # q, k, v


class Static(NamedTuple):
    """Options of plain attention."""

    causal: bool
    window: int | None
    scale: float


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
    """Compute attention as `dcvit.dcmha.attention`, which checks the arguments.

    Raises:
      UnsupportedError: the case is not plain attention that cuDNN supports, or cuDNN is not installed.
    """
    if pre is not None or post is not None:
        raise UnsupportedError("cuDNN does not compose heads")
    if len({x.dtype for x in (q, k, v)}) > 1 or q.dtype not in (jnp.bfloat16, jnp.float16):
        dtypes = ", ".join(str(x.dtype) for x in (q, k, v))
        raise UnsupportedError(f"cuDNN supports q, k and v of bfloat16 or float16, found {dtypes}")
    if mask is not None:
        raise UnsupportedError("cuDNN adds a mask to the scores, and a query without keys would not have the output 0")
    is_causal = causal or window is not None
    if is_causal and q.shape[1] != k.shape[1]:
        raise UnsupportedError(f"causal attention of {q.shape[1]} queries to {k.shape[1]} keys")
    try:
        return _attention(Static(is_causal, window, scale), (q, k, v))
    except (NotImplementedError, RuntimeError) as error:  # the width of a head; no cuDNN
        raise UnsupportedError(f"cuDNN: {str(error).strip().splitlines()[0]}") from error


def _call(static: Static, x: Inputs) -> Array:
    local = None if static.window is None else (static.window - 1, 0)
    return jax.nn.dot_product_attention(
        *x, scale=static.scale, is_causal=static.causal, local_window_size=local, implementation="cudnn"
    )


def _forward(static: Static, x: Inputs) -> tuple[Array, list[Array]]:
    """Return the output and what JAX's gradient keeps."""
    out, gradient = jax.vjp(lambda *x: _call(static, x), *x)
    return out, jax.tree.leaves(gradient)


def _backward(static: Static, x: Inputs, results: tuple[Array, list[Array]], d_out: Array) -> Inputs:
    gradient = jax.eval_shape(lambda *x: jax.vjp(lambda *x: _call(static, x), *x)[1], *x)
    found: Inputs = jax.tree.unflatten(jax.tree.structure(gradient), results[1])(d_out)
    return found


def _forward_mode(static: Static, x: Inputs) -> Array:
    causal, window, scale = static
    return reference.attention(*x, None, None, causal=causal, window=window, mask=None, groups=1, scale=scale)


_attention = differentiable(_forward, _backward, _forward_mode)
