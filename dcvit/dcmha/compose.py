"""Compose function of DCMHA (Xiao et al., ICML 2024, Section 3, Eqn 5-8) on plain arrays.

Letters: B batch, T query length, S key length, M model width (the paper's D_m), H heads, R rank of the dynamic
projections, G groups of heads (a compose combines heads of the same group only), I = 2·R·H/G.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer, normal
from jax.typing import DTypeLike

from dcvit.dcmha.numerics import is_float, statistics_dtype
from dcvit.dcmha.shapes import Array, Float, Shaped

RMS_EPSILON = 1e-6


class ComposeWeights(NamedTuple):
    """Weights of one compose: the function `compose`, which mixes attention scores or weights across the H heads.

    Branches are added to the skip connection; None is an absent one. `q…` belong to the T queries, `k…` to the S keys:
    `q1` and `q2`, `k1` and `k2` project down to rank R and up (give both or neither), `qg` and `kg` are gates. `static`
    is a J×J matrix for each of G groups of J = H/G heads.
    """

    q1: Float[Array, "B T R H"] | None = None  # query-wise dynamic projection, down (RMS-normed over H)
    q2: Float[Array, "B T R H"] | None = None  # query-wise dynamic projection, up
    qg: Float[Array, "B T H"] | None = None  # query-wise dynamic gate, after tanh
    k1: Float[Array, "B S R H"] | None = None  # key-wise, as above
    k2: Float[Array, "B S R H"] | None = None
    kg: Float[Array, "B S H"] | None = None
    static: Float[Array, "G J J"] | None = None  # static projection W_b, J = H/G


def dynamic_projection(
    x: Float[Array, "B N M"],
    w_1: Float[Array, "M G I"],
    w_2: Float[Array, "G I I"],
    *,
    heads: int,
    gelu: str = "tanh",
) -> tuple[Float[Array, "B N R H"], Float[Array, "B N R H"]]:
    """Return the dynamic projection weights of Eqn 5 for the inputs `x`.

    Args:
      x: inputs of N tokens.
      w_1: the paper's W_q1 or W_k1, one block for each group.
      w_2: the paper's W_q2 or W_k2, one block for each group.
      heads: the number of heads H.
      gelu: the activation between the two layers: "tanh", GELU's approximation, or "exact".

    Returns:
      The down projection, RMS-normed over the heads of each group, and the up projection.
    """
    hidden = jax.nn.gelu(jnp.einsum("bnm,mgi->bngi", x, w_1), approximate=gelu == "tanh")
    return _down_and_up(hidden, w_2, heads)


def _down_and_up(hidden: Float[Array, "B N G I"], w_2: Float[Array, "G I I"], heads: int) -> tuple[Array, Array]:
    """Return the down projection, normed, and the up projection, which the second layer `w_2` makes from `hidden`."""
    batch, length, groups, inner = hidden.shape
    per_group = heads // groups
    rank = inner // (2 * per_group)
    both = jnp.einsum("bngi,gio->bngo", hidden, w_2)
    both = both.reshape(batch, length, groups, 2, rank, per_group)
    down, up = (jnp.swapaxes(both[:, :, :, half], 2, 3) for half in (0, 1))  # B N R G H/G
    square = jnp.square(down.astype(statistics_dtype(down.dtype)))
    scale = jax.lax.rsqrt(jnp.mean(square, axis=-1, keepdims=True) + RMS_EPSILON)
    down = down * scale.astype(down.dtype)
    shape = (batch, length, rank, heads)
    return down.reshape(shape), up.reshape(shape)


def dynamic_gate(x: Float[Array, "B N M"], w_g: Float[Array, "M H"]) -> Float[Array, "B N H"]:
    """Return the dynamic gate weights tanh(x·W_g) of Eqn 6."""
    return jnp.tanh(jnp.einsum("bnm,mh->bnh", x, w_g))


def dynamic_projections(
    x: Float[Array, "B N M"],
    w_1: Sequence[Float[Array, "M G I"]],
    w_2: Sequence[Float[Array, "G I I"]],
    *,
    heads: int,
    gelu: str = "tanh",
) -> list[tuple[Float[Array, "B N R H"], Float[Array, "B N R H"]]]:
    """Return the results of `dynamic_projection` for each pair of `w_1` and `w_2`; a single product reads `x`.

    Groups and pairs have axes of their own, so that the compiler can split the heads of groups over devices. Where it
    does not, `dcvit.dcmha.packed_weights` computes the same faster.
    """
    hidden = jax.nn.gelu(jnp.einsum("bnm,mcgi->bncgi", x, jnp.stack(w_1, axis=1)), approximate=gelu == "tanh")
    return [_down_and_up(hidden[:, :, c], second, heads) for c, second in enumerate(w_2)]


def dynamic_gates(x: Float[Array, "B N M"], w_g: Sequence[Float[Array, "M H"]]) -> list[Float[Array, "B N H"]]:
    """Return the results of `dynamic_gate` for each of `w_g`; one product reads `x`, as in `dynamic_projections`."""
    gates = jnp.tanh(jnp.einsum("bnm,mch->bnch", x, jnp.stack(w_g, axis=1)))
    return [gates[:, :, c] for c in range(len(w_g))]


def compose(a: Float[Array, "B H T S"], w: ComposeWeights, *, groups: int = 1) -> Float[Array, "B H T S"]:
    """Compose attention scores or weights across heads (Eqn 7).

    For all query-key pairs, A' = A + A·W_b + A·w_q1·w_q2 + A⊗w_qg + A·w_k1·w_k2 + A⊗w_kg.

    Args:
      a: attention scores or weights A of H heads.
      w: weights of the compose.
      groups: the number of equal groups of heads; each group is composed separately (Section 3.2).

    Returns:
      A' in the dtype of `a`.

    Raises:
      ValueError: `groups` does not divide the heads, or a weight's shape does not fit `a`.
    """
    batch, heads, queries, keys = a.shape
    check_weights(w, batch=batch, heads=heads, queries=queries, keys=keys, groups=groups)
    grouped = a.reshape(batch, groups, heads // groups, queries, keys)

    def split(x: Array) -> Array:  # (…, H) -> (…, G, H/G), in a's dtype
        return x.astype(a.dtype).reshape(*x.shape[:-1], groups, heads // groups)

    out = grouped
    if w.static is not None:
        out = out + jnp.einsum("bghts,ghn->bgnts", grouped, w.static.astype(a.dtype))
    if w.q1 is not None and w.q2 is not None:
        hidden = jnp.einsum("bghts,btrgh->bgrts", grouped, split(w.q1))
        out = out + jnp.einsum("bgrts,btrgh->bghts", hidden, split(w.q2))
    if w.k1 is not None and w.k2 is not None:
        hidden = jnp.einsum("bghts,bsrgh->bgrts", grouped, split(w.k1))
        out = out + jnp.einsum("bgrts,bsrgh->bghts", hidden, split(w.k2))
    if w.qg is not None:
        out = out + grouped * jnp.einsum("btgh->bght", split(w.qg))[..., None]
    if w.kg is not None:
        out = out + grouped * jnp.einsum("bsgh->bghs", split(w.kg))[..., None, :]
    return out.reshape(a.shape)


def query_map(
    w: ComposeWeights, *, batch: int, length: int, heads: int, groups: int, dtype: DTypeLike
) -> Float[Array, "#B #T G J J"]:
    """Return I + W_b + w_q1·w_q2 + diag(w_qg) for each query and group, J = H/G.

    A compose without its key-wise branches multiplies the scores or weights of the heads of a group, as a row vector,
    by this matrix. The axes B and T have length 1 if no branch is dynamic.
    """
    per_group = heads // groups
    one = jnp.eye(per_group, dtype=dtype)[None, None, None]
    out = jnp.broadcast_to(one, (1, 1, groups, per_group, per_group))
    if w.static is not None:
        out = out + w.static.astype(dtype)[None, None]
    if w.q1 is not None and w.q2 is not None:
        down, up = (x.astype(dtype).reshape(batch, length, -1, groups, per_group) for x in (w.q1, w.q2))
        for rank in range(down.shape[2]):
            out = out + down[:, :, rank, :, :, None] * up[:, :, rank, :, None]
    if w.qg is not None:
        out = out + one * w.qg.astype(dtype).reshape(batch, length, groups, 1, per_group)
    return out


def check_floating(arrays: Mapping[str, Shaped[Array, "..."] | None]) -> None:
    """Raise ValueError with the name of an array that does not have floating-point numbers."""
    for name, x in arrays.items():
        if x is not None and not is_float(x):
            raise ValueError(f"{name} has dtype {x.dtype}, expected floating-point numbers")


def check_weights(w: ComposeWeights, *, batch: int, heads: int, queries: int, keys: int, groups: int) -> None:
    """Raise ValueError with the name of the weight if `w` does not fit attention of the given sizes."""
    if groups < 1 or heads % groups:
        raise ValueError(f"groups={groups} does not divide {heads} heads")
    for side, length, down, up, gate in (("q", queries, w.q1, w.q2, w.qg), ("k", keys, w.k1, w.k2, w.kg)):
        if (down is None) != (up is None):
            raise ValueError(f"{side}1 and {side}2 must be given together: give both or neither")
        for name, x in ((f"{side}1", down), (f"{side}2", up)):
            if x is not None and (
                x.ndim != 4 or (*x.shape[:2], x.shape[3]) != (batch, length, heads) or not x.shape[2]
            ):
                raise ValueError(f"{name} has shape {x.shape}, expected ({batch}, {length}, rank, {heads})")
        if down is not None and up is not None and down.shape != up.shape:
            raise ValueError(f"{side}1 and {side}2 must have the same shape, found {down.shape} and {up.shape}")
        if gate is not None and gate.shape != (batch, length, heads):
            raise ValueError(f"{side}g has shape {gate.shape}, expected {(batch, length, heads)}")
    check_floating(w._asdict())
    per_group = heads // groups
    if w.static is not None and w.static.shape != (groups, per_group, per_group):
        raise ValueError(f"static has shape {w.static.shape}, expected {(groups, per_group, per_group)}")


def hidden_init(width: int, inner: int) -> Initializer:
    """Return the Xavier normal initializer of W_q1 and W_k1: standard deviation sqrt(2/(`width` + `inner`))."""
    return normal(math.sqrt(2 / (width + inner)))


def projection_init(rank: int, heads_per_group: int) -> Initializer:
    """Return the normal initializer of W_q2 and W_k2 (Section 4 of the paper).

    The standard deviation is 0.02/(sqrt(2HR)·(H+R)), where H is the number of heads of one group.
    """
    return normal(0.02 / (math.sqrt(2 * heads_per_group * rank) * (heads_per_group + rank)))


def gate_init(width: int, heads_per_group: int) -> Initializer:
    """Return the normal initializer of W_qg and W_kg (Section 4 of the paper).

    The standard deviation is 0.05·sqrt(2/(M+H)), where M is `width` and H is the number of heads of one group.
    """
    return normal(0.05 * math.sqrt(2 / (width + heads_per_group)))


def static_init(heads_per_group: int) -> Initializer:
    """Return the normal initializer of W_b, which is added to the skip connection.

    The standard deviation is 0.1·sqrt(1/H), as in the authors' code, where H is the number of heads of one group.
    """
    return normal(0.1 * math.sqrt(1 / heads_per_group))
