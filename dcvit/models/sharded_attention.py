"""Attention on a mesh of devices: each device computes its own examples and, if possible, its own heads.

The compiler splits the einsums of the reference implementation by itself. It cannot split blocks and kernels, so these
run under `jax.shard_map`.

The mesh axis "context" splits the tokens of causal rows: each of n devices has T/n neighboring tokens, and returns
their outputs. A compose needs the weights of one query and one key at a time, so that query-wise weights stay with the
queries, and key-wise weights are sent with keys and values.

In a layer with a window of at most T/n tokens, each device receives the last tokens of the previous device.

Other layers gather all keys, and balance the work: later queries attend to more keys. The tokens are 2n blocks. Device
i holds blocks 2i and 2i+1, but computes the queries of blocks i and 2n-1-i, which attend to 2n+1 blocks of keys in all;
queries and outputs are exchanged. The keys are rotated so that they end with the block of the queries
(`Options.first_query` is then the same on all devices). Later tokens come first, with a segment id that no query has,
so that no implementation computes them. The backward pass gathers the keys again, and sums gradients over devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from dcvit.dcmha import Dropout, device, folded, plan
from dcvit.dcmha.gradients import RESULTS
from dcvit.dcmha.inputs import Attend, Call, Inputs
from dcvit.dcmha.segments import NO_ID, Segments
from dcvit.dcmha.shapes import Array, Float, not_none
from dcvit.parallel.mesh import BATCH, Axis, active_mesh, axis_size, divisible_axes

BY_QUERY = ("q", "q1", "q2", "qg", "queries")  # the fields of `Inputs` with a query axis, which is axis 1
BY_KEY = ("k", "v", "k1", "k2", "kg", "keys")


class Placement(NamedTuple):
    """Placement of a call of attention on the active mesh.

    Fields:
      implementation: the implementation that each device, or the compiler, runs; None lets each device choose.
      is_mapped: the devices compute their parts under `jax.shard_map`; otherwise the compiler splits the arrays.
      key_repeats: number of copies of each key head, so that the axis "tensor" divides their number.
      batch, heads: mesh axes of examples and heads.
      tokens: mesh axes of tokens; see `context_attention`.
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
    if placement.tokens or placement.heads:
        inputs = inputs._replace(hidden=None)
    if placement.key_repeats > 1:
        k, v = (jnp.repeat(x, placement.key_repeats, axis=2) for x in (inputs.k, inputs.v))
        inputs = inputs._replace(k=k, v=v)
    local, split = call.in_groups(placement.groups), split_of(placement, inputs)

    def compute(inputs: Inputs) -> Array:
        own = dataclasses.replace(local, inputs=inputs)
        return context_attention(attend, own, placement.tokens) if placement.tokens else attend(own)

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
    tokens = token_axes(call, mesh, with_tensor=not is_independent)
    if implementation == "reference" and not tokens:
        return Placement(implementation)
    holds_scores = device.platform() != "gpu" or not plan.is_long(inputs)  # no automatic choice does for long rows
    if tensor > 1 and implementation is None and not is_independent and not tokens and holds_scores:
        return Placement("reference")
    # Heads with masks of their own are examples of one head (`dcvit.models.attention.heads_as_examples`).
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
        "before": P(placement.batch),
        "second": P(),
        **dict.fromkeys(Segments._fields, P(placement.batch, tokens)),
        "mask": P(None if inputs.mask is None or inputs.mask.shape[0] == 1 else placement.batch),
        "composed": P(placement.batch),
    }
    split: Inputs = jax.tree_util.tree_map_with_path(lambda path, x: specs[path[-1].name], inputs)
    return split


def token_axes(call: Call, mesh: AbstractMesh, *, with_tensor: bool) -> tuple[str, ...]:
    """Return the axes of the mesh that split the tokens of a call.

    They are "context", and with `with_tensor` also "tensor". There are none if "context" has one device, if the call is
    not causal self-attention of complete rows (as in decoding), or if the length is not a multiple of twice the number
    of devices: then each device computes the complete rows.
    """
    inputs, options = call.inputs, call.options
    tokens = inputs.q.shape[1]
    axes = tuple(axis for axis in ("context", "tensor")[: 1 + with_tensor] if mesh.shape.get(axis, 1) > 1)
    is_causal = (options.causal or options.window is not None) and inputs.mask is None
    fits = inputs.k.shape[1] == tokens and tokens % (2 * axis_size(mesh, axes)) == 0
    return axes if "context" in axes and is_causal and fits else ()


def context_attention(attend: Attend, call: Call, axis: tuple[str, ...]) -> Float[Array, "B T H D"]:
    """Return the outputs of attention for the tokens of this device.

    Args:
      attend: attention on one device.
      call: the call with the arrays of the tokens of this device.
      axis: the mesh axes of `token_axes`, which are manual.
    """
    inputs, window = call.inputs, call.options.window
    if inputs.segments is None:
        ids = jnp.zeros(inputs.q.shape[:2], jnp.int32)
        inputs = inputs._replace(segments=Segments(ids, ids))
    else:  # no token has NO_ID, also where the ids are not known when the program is traced
        ids, ids_k = (jnp.maximum(ids, NO_ID + 1) for ids in inputs.segments)
        inputs = inputs._replace(segments=Segments(ids, ids_k))
    compute = _in_window if window is not None and window <= inputs.q.shape[1] else _balanced
    policy = jax.checkpoint_policies.save_only_these_names(RESULTS)  # do not keep the keys of other devices
    out: Array = jax.checkpoint(lambda call: compute(attend, call, axis), policy=policy)(
        dataclasses.replace(call, inputs=inputs)
    )
    return out


def _in_window(attend: Attend, call: Call, axis: tuple[str, ...]) -> Array:
    """Return this device's outputs for attention with a window; the previous device sends the keys before its own."""
    n, window = jax.lax.axis_size(axis), not_none(call.options.window)

    def with_earlier(x: Array) -> Array:
        earlier = jax.lax.ppermute(x[:, -window:], axis, [(i, i + 1) for i in range(n - 1)])
        return jnp.concatenate([earlier, x], axis=1)

    extended = _map(with_earlier, call.inputs, BY_KEY)
    first = jax.lax.axis_index(axis) == 0  # which has received zeros
    ids = not_none(extended.segments).keys
    ids = jnp.where(first & (jnp.arange(ids.shape[1]) < window)[None], jnp.int32(NO_ID), ids)
    return attend(_part(call, extended, ids, window))


def _balanced(attend: Attend, call: Call, axis: tuple[str, ...]) -> Array:
    """Return this device's outputs for attention to all keys, computed for all even blocks of queries, then all odd."""
    gathered = _map(lambda x: jax.lax.all_gather(x, axis, axis=1, tiled=True), call.inputs, BY_KEY)
    call = dataclasses.replace(call, inputs=gathered)
    return jnp.concatenate([_of_blocks(attend, call, axis, parity) for parity in (0, 1)], axis=1)


def _of_blocks(attend: Attend, call: Call, axis: tuple[str, ...], parity: int) -> Array:
    """Return the outputs of this device's even (`parity` 0) or odd block; another device may compute them."""
    n, here, inputs = jax.lax.axis_size(axis), jax.lax.axis_index(axis), call.inputs
    size = inputs.q.shape[1] // 2
    computed_by = [min(block, 2 * n - 1 - block) for block in range(parity, 2 * n, 2)]
    block = jnp.where(here % 2 == parity, here, 2 * n - 1 - here)  # which this device computes
    order = (block + 1 + jnp.arange(2 * n)) % (2 * n)  # of blocks of keys; the queries' own is the last

    def send(x: Array) -> Array:
        sent: Array = jax.lax.ppermute(x[:, parity * size : (parity + 1) * size], axis, list(enumerate(computed_by)))
        return sent

    def ordered(x: Array) -> Array:
        blocks = x.reshape(x.shape[0], 2 * n, size, *x.shape[2:])
        return blocks.at[:, order].get(unique_indices=True, mode="promise_in_bounds").reshape(x.shape)

    part = _map(ordered, _map(send, inputs, BY_QUERY), BY_KEY)
    is_later = jnp.repeat(order > block, size)[None]
    ids = jnp.where(is_later, jnp.int32(NO_ID), not_none(part.segments).keys)
    out = attend(_part(call, part, ids, (2 * n - 1) * size))
    back: Array = jax.lax.ppermute(out, axis, [(device, owner) for owner, device in enumerate(computed_by)])
    return back


def _map(f: Callable[[Array], Array], inputs: Inputs, names: tuple[str, ...]) -> Inputs:
    """Return the inputs with f(array) in place of each array of the fields `names`."""
    mapped: Inputs = jax.tree_util.tree_map_with_path(lambda path, x: f(x) if path[-1].name in names else x, inputs)
    return mapped


def _part(call: Call, inputs: Inputs, ids: Array, first_query: int) -> Call:
    """Return the call with `inputs` of a part of the queries, segment ids `ids` of the keys, and `first_query`."""
    inputs = inputs._replace(segments=not_none(inputs.segments)._replace(keys=ids))
    options = dataclasses.replace(call.options, first_query=first_query)
    return dataclasses.replace(call, inputs=inputs, options=options)
