"""Attention on a mesh of devices: each device computes its own examples and, if possible, its own heads.

The compiler splits the einsums of the reference implementation by itself. It cannot split blocks and kernels, so these
run under `jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dcvit.dcmha import Dropout, device, folded, plan
from dcvit.dcmha.inputs import Call, Inputs
from dcvit.dcmha.segments import Segments
from dcvit.dcmha.shapes import Array, Float
from dcvit.models import context_attention
from dcvit.parallel.mesh import BATCH, Axis, active_mesh, divisible_axes


class Placement(NamedTuple):
    """Placement of a call of attention on the active mesh.

    Fields:
      implementation: the implementation that each device, or the compiler, runs; None lets each device choose.
      is_mapped: the devices compute their parts under `jax.shard_map`; otherwise the compiler splits the arrays.
      key_repeats: number of copies of each key head, so that the axis "tensor" divides their number.
      batch, heads: mesh axes of examples and heads.
      tokens: mesh axes of tokens; see `dcvit.models.context_attention`.
      groups: number of groups of heads on each device.
    """

    implementation: str | None
    is_mapped: bool = False
    key_repeats: int = 1
    batch: Axis = None
    heads: Axis = None
    tokens: tuple[str, ...] = ()
    groups: int = 1


def attention(
    call: Call, *, implementation: str | None = None, dropout: Dropout | None = None
) -> Float[Array, "B T H D"]:
    """Compute `dcvit.dcmha.attention` on the active mesh (`jax.set_mesh`), or directly if there is none.

    The arguments are those of `dcvit.dcmha.plan.attention`. A composition that is folded into queries and outputs is
    folded before the heads are split over devices.
    """
    mesh = active_mesh()
    if mesh is not None and mesh.shape.get("tensor", 1) > 1 and plan.folds(call, implementation, dropout):
        return folded.run(call, attend=attention, combine=plan.combine_heads)
    placement = place(call, implementation=implementation, dropout=dropout)
    attend = functools.partial(plan.attention, implementation=placement.implementation)
    if not placement.is_mapped:
        return attend(call, dropout=dropout)
    inputs = call.inputs
    if placement.key_repeats > 1:
        k, v = (jnp.repeat(x, placement.key_repeats, axis=2) for x in (inputs.k, inputs.v))
        inputs = inputs._replace(k=k, v=v)
    local, split = call.in_groups(placement.groups), split_of(placement, inputs)

    def compute(inputs: Inputs) -> Array:
        own = dataclasses.replace(local, inputs=inputs)
        return context_attention.attention(attend, own, placement.tokens) if placement.tokens else attend(own)

    sharded: Callable[[Inputs], Array] = jax.shard_map(
        compute, in_specs=(split,), out_specs=split.q, check_vma=False
    )  # fmt: skip
    return sharded(inputs)


def place(call: Call, *, implementation: str | None, dropout: Dropout | None) -> Placement:
    """Return how a call is computed on the active mesh.

    Examples are split over the batch axes, heads over "tensor", and tokens over "context". If heads are composed with
    heads of another device, tokens are split over "tensor" too, instead of the heads.

    If tokens cannot be split and heads are composed with heads of another device, the compiler splits "reference",
    which communicates the least. If an implementation is named, or rows are long and the devices are GPUs, each device
    of the "tensor" axis computes all heads instead. On a mesh with axes of other names, examples stay split as the
    inputs are.
    """
    mesh = active_mesh()
    if mesh is None or dropout is not None:
        return Placement(implementation)
    inputs, groups, tensor = call.inputs, call.options.groups, mesh.shape.get("tensor", 1)
    heads, key_heads = inputs.q.shape[2], inputs.k.shape[2]
    is_independent = call.is_plain or groups % tensor == 0  # no composition across devices
    tokens = context_attention.token_axes(call, mesh, with_tensor=not is_independent)
    if implementation == "reference" and not tokens:
        return Placement(implementation)
    holds_scores = device.platform() != "gpu" or not plan.is_long(inputs)  # no automatic choice does for long rows
    if tensor > 1 and implementation is None and not is_independent and not tokens and holds_scores:
        return Placement("reference")
    # Heads with masks of their own are examples of one head (`dcvit.models.dcmha.heads_as_examples`).
    spread = (*BATCH, "tensor") if heads == 1 and is_independent else BATCH
    choices = [divisible_axes(inputs.q.shape[:1], [axes], mesh)[0] for axes in (spread, BATCH)]
    batch = choices[0] or choices[1]
    if tensor == 1 or not is_independent or heads % tensor:
        return Placement(implementation, is_mapped=True, batch=batch, tokens=tokens, groups=groups)
    repeats = math.lcm(key_heads, tensor) // key_heads  # the smallest repetition that the axis divides
    return Placement(
        implementation, is_mapped=True, key_repeats=repeats, batch=batch, tokens=tokens, heads="tensor",
        groups=max(1, groups // tensor),
    )  # fmt: skip


def split_of(placement: Placement, inputs: Inputs) -> Inputs:
    """Return the partition spec of each array of the inputs."""
    tokens = placement.tokens or None
    by_head, by_token = P(placement.batch, tokens, placement.heads), P(placement.batch, tokens, None, placement.heads)
    specs = {
        **dict.fromkeys(("q", "k", "v", "qg", "kg"), by_head),
        **dict.fromkeys(("q1", "q2", "k1", "k2"), by_token),
        "static": P(placement.heads),
        **dict.fromkeys(Segments._fields, P(placement.batch, tokens)),
        "mask": P(None if inputs.mask is None or inputs.mask.shape[0] == 1 else placement.batch),
    }
    split: Inputs = jax.tree_util.tree_map_with_path(lambda path, x: specs[path[-1].name], inputs)
    return split
