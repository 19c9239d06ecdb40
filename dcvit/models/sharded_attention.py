"""`dcvit.dcmha.attention` on a mesh of devices: each attends with the examples, and where it can the heads, it holds.

Blocks and kernels cannot be split by the compiler as `reference`'s einsums are, so they run under `jax.shard_map`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dcvit import dcmha
from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.shapes import Array, Bool, Float
from dcvit.parallel.mesh import BATCH, active_mesh, divisible_axes


def attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    mask: Bool[Array, "#B 1 #T #S"] | None = None,
    groups: int = 1,
    implementation: str | None = None,
    **options: Any,
) -> Float[Array, "B T H D"]:
    """As `dcvit.dcmha.attention`, on the mesh in force (`jax.set_mesh`); that itself where it places nothing.

    Examples are split over the batch axes, heads over "tensor". Heads that compose with heads of another device are
    left to the compiler and the reference implementation, which exchange the least, unless another one is asked for:
    then each device of a "tensor" axis attends with all heads.
    """
    mesh = active_mesh()
    options |= {"groups": groups, "implementation": implementation}
    if mesh is None or implementation == "reference":
        return dcmha.attention(q, k, v, pre, post, mask=mask, **options)
    tensor = mesh.shape.get("tensor", 1)
    apart = (pre is None and post is None) or groups % tensor == 0
    if tensor > 1 and not apart and implementation is None:
        return dcmha.attention(q, k, v, pre, post, mask=mask, **options | {"implementation": "reference"})
    if tensor > 1 and apart and q.shape[2] % tensor == 0 and k.shape[2] % tensor:
        times = math.lcm(k.shape[2], tensor) // k.shape[2]  # the fewest key heads that the axis divides
        k, v = (jnp.repeat(x, times, axis=2) for x in (k, v))
    heads = "tensor" if tensor > 1 and apart and q.shape[2] % tensor == 0 else None
    batch = divisible_axes(q.shape[:1], [BATCH], mesh)[0]
    if heads:
        options["groups"] = max(1, groups // tensor)

    def of(w: ComposeWeights | None) -> Any:
        if w is None:
            return None
        rank, gate = P(batch, None, None, heads), P(batch, None, heads)
        specs: list[Any] = [rank, rank, gate, rank, rank, gate, P(heads)]
        return ComposeWeights(*[None if x is None else spec for x, spec in zip(w, specs, strict=True)])

    whole = P(batch, None, heads, None)
    seen = None if mask is None else P(None if mask.shape[0] == 1 else batch)
    attend = jax.shard_map(
        lambda q, k, v, pre, post, mask: dcmha.attention(q, k, v, pre, post, mask=mask, **options),
        in_specs=(whole, whole, whole, of(pre), of(post), seen), out_specs=whole, check_vma=False,
    )  # fmt: skip
    out: Array = attend(q, k, v, pre, post, mask)
    return out
