"""Plain attention by cuDNN's fused kernels, through `jax.nn.dot_product_attention`.

cuDNN computes plain attention of bfloat16 or float16 on NVIDIA GPUs with float32 statistics and without scores in
memory. JAX checks while it traces whether cuDNN is installed and supports the width of the heads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.errors import UnsupportedError
from dcvit.dcmha.shapes import Array, Bool, Float


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
    local = None if window is None else (window - 1, 0)
    try:
        return jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=is_causal, local_window_size=local, implementation="cudnn"
        )
    except (NotImplementedError, RuntimeError) as error:  # the width of a head; no cuDNN
        raise UnsupportedError(f"cuDNN: {str(error).strip().splitlines()[0]}") from error
