"""`dcvit.dcmha.attention` on a mesh of devices: each device computes its own examples and, if possible, its own heads.

The compiler splits the einsums of the reference implementation by itself. It cannot split blocks and kernels, so these
run under `jax.shard_map`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dcvit import dcmha
from dcvit.dcmha import dispatch, folded
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
    causal: bool = False,
    window: int | None = None,
    groups: int = 1,
    dropout: dcmha.Dropout | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H D"]:
    """Compute `dcvit.dcmha.attention` on the active mesh (`jax.set_mesh`), or directly if there is none.

    Examples are split over the batch axes, heads over "tensor". A composition that can be folded into queries and
    outputs (`dcvit.dcmha.folded`) is folded before the heads are split. If heads are composed with heads of another
    device, the compiler splits the reference implementation, which exchanges the least. If another implementation is
    named, each device of the "tensor" axis computes all heads instead. On a mesh with axes of other names, the
    compiler splits the examples as their inputs are.
    """
    mesh = active_mesh()
    attend = functools.partial(dcmha.attention, causal=causal, window=window)
    if mesh is None or implementation == "reference" or dropout is not None:
        return attend(q, k, v, pre, post, mask=mask, groups=groups, dropout=dropout, implementation=implementation)
    tensor = mesh.shape.get("tensor", 1)
    if (
        tensor > 1
        and implementation in (None, "folded")
        and not folded.why_not_foldable(pre, post, key_heads=k.shape[2], groups=groups)
    ):
        q = folded.compose_heads(q, pre, groups=groups, combine=dispatch.combine_heads)
        out = attention(q, k, v, None, None, mask=mask, causal=causal, window=window)
        return folded.compose_heads(out, post, groups=groups, combine=dispatch.combine_heads)
    independent = (pre is None and post is None) or groups % tensor == 0  # no composition across devices
    if tensor > 1 and not independent and implementation is None:
        return attend(q, k, v, pre, post, mask=mask, groups=groups, implementation="reference")
    if tensor > 1 and independent and q.shape[2] % tensor == 0 and k.shape[2] % tensor:
        times = math.lcm(k.shape[2], tensor) // k.shape[2]  # the smallest repetition that the axis divides
        k, v = (jnp.repeat(x, times, axis=2) for x in (k, v))
    heads = "tensor" if tensor > 1 and independent and q.shape[2] % tensor == 0 else None
    batch = divisible_axes(q.shape[:1], [BATCH], mesh)[0]
    local_groups = max(1, groups // tensor) if heads else groups

    head_spec = P(batch, None, heads, None)
    mask_spec = None if mask is None else P(None if mask.shape[0] == 1 else batch)
    local = functools.partial(attend, groups=local_groups, implementation=implementation)
    rank, gate = P(batch, None, None, heads), P(batch, None, heads)
    specs = (rank, rank, gate, rank, rank, gate, P(heads))  # in the order of the fields of ComposeWeights
    pre_specs, post_specs = (
        w and jax.tree.unflatten(jax.tree.structure(w), [s for x, s in zip(w, specs, strict=True) if x is not None])
        for w in (pre, post)
    )
    sharded: Callable[..., Array] = jax.shard_map(
        lambda q, k, v, pre, post, mask: local(q, k, v, pre, post, mask=mask),
        in_specs=(*[head_spec] * 3, pre_specs, post_specs, mask_spec), out_specs=head_spec, check_vma=False,
    )  # fmt: skip
    return sharded(q, k, v, pre, post, mask)
