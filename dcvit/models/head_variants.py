"""Cross-head attention of other papers that the composition cannot express: mixture-of-head, DIFF Transformer, ….

Each module takes the layer's tokens, the call of attention, and a function that computes attention, and returns the
outputs of H heads. `SharedMap` maps queries, keys and values before, and `in_rows` arranges those of paired heads. The
names are those of `dcvit.models.head_settings`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer, normal
from jax.typing import DTypeLike

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.inputs import Attend, Call, Composition, Inputs
from dcvit.dcmha.kv_cache import positions
from dcvit.dcmha.numerics import statistics_dtype
from dcvit.dcmha.segments import Segments
from dcvit.dcmha.shapes import Array, Float, Int
from dcvit.models import Params
from dcvit.models.layers import in_float32
from dcvit.models.projections import Projections
from dcvit.parallel.mesh import BATCH, constrain

BALANCE = 0.01  # weight of the load-balance loss of "moh_topk": β in the paper's experiments
LOSSES = "losses"  # the collection to which modules sow losses
DIFF_EPSILON = 1e-5  # of the norm of "diff", as released
NORM_EPSILON = 1e-12  # least squared length of a value that "xsa" divides by


class Tokens(NamedTuple):
    """The new tokens of one call of a layer: the layer's inputs x, and the values v computed from them."""

    x: Float[Array, "B T M"]  # the layer's input
    v: Float[Array, "B T K D"]  # their own values


class HeadVariant(nn.Module):
    """Base class of the modules of head variants, with the fields of all.

    Fields:
      num_heads: H.
      layer: number of the layer, from 0.
      kernel_init: initializer of projections.
      dtype: dtype of the computation.
    """

    num_heads: int
    layer: int = 0
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    dtype: DTypeLike | None = None

    def dense(self, features: int, name: str) -> nn.Dense:
        """Return a dense layer with `features` outputs, without bias."""
        return nn.Dense(features, use_bias=False, kernel_init=self.kernel_init, dtype=self.dtype, name=name)


class MixtureOfHeads(HeadVariant):
    """MoH (Jin et al., 2024): every token weights the outputs of its heads by the gates of a router.

    The first h_s heads are shared. Of the others, a token uses the K with the largest scores:

      gate of shared head i    α_1 · h_s · softmax(x·W_s)_i
      gate of routed head i    α_2 · K · softmax(x·W_r)_i / Σ softmax(x·W_r) of the chosen ones, or 0
      α_1, α_2                 2 · softmax(x·W_h)

    as in the released code: with uniform scores all gates are 1. Without shared heads, α_2 is 1. Unless all heads are
    chosen, the module sows the load-balance loss of that code, h_r · Σ_i P_i·f_i over the h_r routed heads, with the
    mean score P_i of head i and the fraction f_i of tokens that choose it. It is K if all heads are used equally.

    All heads are computed, also those that a token does not use.

    Fields:
      shared: h_s.
      chosen: K.
    """

    shared: int = 0
    chosen: int = 0

    @nn.compact
    def __call__(self, tokens: Tokens, call: Call, attend: Attend) -> Float[Array, "B T H D"]:
        """Return the outputs of all heads, times the gates of the router."""
        outputs = attend(call)
        gates = constrain(self._gates(tokens.x), BATCH, "context", "tensor").astype(outputs.dtype)
        return outputs * gates[..., None]

    def _gates(self, x: Float[Array, "B T M"]) -> Float[Array, "B T H"]:
        def scores(features: int, name: str) -> Array:
            return jax.nn.softmax(self.dense(features, name)(x).astype(statistics_dtype(x.dtype)))

        routed = self.num_heads - self.shared
        score = scores(routed, "routed")
        if self.chosen == routed:
            gates = routed * score
        else:
            places = jax.lax.top_k(score, self.chosen)[1]
            chosen = jnp.sum(jax.nn.one_hot(places, routed, dtype=score.dtype), axis=-2)
            self.sow(LOSSES, "balance", routed * jnp.sum(jnp.mean(score, (0, 1)) * jnp.mean(chosen, (0, 1))))
            gates = chosen * score
            gates = self.chosen * gates / jnp.sum(gates, axis=-1, keepdims=True)
        if not self.shared:
            return gates
        parts = 2 * scores(2, "parts")
        always = self.shared * scores(self.shared, "shared") if self.shared > 1 else jnp.ones_like(parts[..., :1])
        return jnp.concatenate([parts[..., :1] * always, parts[..., 1:] * gates], axis=-1)


class Differential(HeadVariant):
    """DIFF Transformer V1 (Ye et al., 2024, Section 2): H/2 heads that subtract two attention matrices.

    Heads 2i and 2i+1 are a pair, whose values of width 2D are those of both:

      (softmax(q_1·k_1/√D) - λ·softmax(q_2·k_2/√D))·[v_1, v_2]
      λ = exp(λ_q1·λ_k1) - exp(λ_q2·λ_k2) + λ_init,   λ_init = 0.8 - 0.6·exp(-0.3·layer)   (Eqn 2, layer from 0)

    followed by RMSNorm over the 2D numbers of a pair and the factor 1 - λ_init (Eqn 3). The difference is a static
    post-compose of groups of two heads, [a_1, a_2]·[[1, 1], [-λ, -λ]], so that every implementation of DCMHA computes
    it. Other flash attention needs values twice as wide as keys.
    """

    @nn.compact
    def __call__(self, tokens: Tokens, call: Call, attend: Attend) -> Float[Array, "B T H D"]:
        """Return the outputs of the pairs, two heads for each. `attend` composes H/2 groups."""
        k, v = call.inputs.k, call.inputs.v
        pairs, repeats, width = self.num_heads // 2, self.num_heads // k.shape[2], k.shape[-1]
        if repeats > 1:  # neighboring pairs share the values of a pair of key heads
            k = jnp.repeat(k, repeats, axis=2)
            v = jnp.repeat(v.reshape(*v.shape[:2], -1, 2 * width), repeats, axis=2).reshape(k.shape)
        first, second = (
            jnp.exp(jnp.sum(self._vector(f"lambda_q{i}", width) * self._vector(f"lambda_k{i}", width))) for i in (1, 2)
        )
        start = 0.8 - 0.6 * math.exp(-0.3 * self.layer)
        factor = first - second + start
        one = jnp.ones_like(factor)
        # The skip connection of a compose adds the identity.
        static = jnp.stack([jnp.stack([0 * one, one]), jnp.stack([-factor, -factor - one])])
        post = ComposeWeights(static=jnp.broadcast_to(static[None], (pairs, 2, 2)))
        composition = Composition("post", branches="", projection=False, gate=False, static=True, groups=pairs)
        inputs = call.inputs._replace(k=k, v=v, post=post)
        outputs = attend(dataclasses.replace(call, inputs=inputs, composition=composition))
        paired = outputs.reshape(*outputs.shape[:2], pairs, 2 * width)
        paired = in_float32(nn.RMSNorm(epsilon=DIFF_EPSILON, name="norm"), paired)
        return (paired * jnp.asarray(1 - start, paired.dtype)).astype(outputs.dtype).reshape(outputs.shape)

    def _vector(self, name: str, width: int) -> Float[Array, " D"]:
        vector: Array = self.param(name, normal(0.1), (width,))
        return vector


class DifferentialV2(HeadVariant):
    """DIFF Transformer V2 (Ye et al., 2026): every token subtracts the outputs of two heads with the same key head.

    The queries have 2H heads, of which 2i and 2i+1 are a pair: o_i = a_2i - σ(x·W_λ)_i·a_{2i+1}, without a norm. Any
    flash attention computes the outputs a.
    """

    @nn.compact
    def __call__(self, tokens: Tokens, call: Call, attend: Attend) -> Float[Array, "B T H D"]:
        """Return the differences o of the outputs of the H pairs of query heads."""
        outputs = attend(call)
        scores = self.dense(self.num_heads, "lambda")(tokens.x)
        factor = jax.nn.sigmoid(scores.astype(statistics_dtype(scores.dtype)))
        factor = constrain(factor, BATCH, "context", "tensor").astype(outputs.dtype)
        return outputs[:, :, 0::2] - factor[..., None] * outputs[:, :, 1::2]


class ExclusiveSelf(HeadVariant):
    """Exclusive self-attention (arXiv 2603.09078): an output has no part along its token's own value.

      z = y - (y·v)·v/‖v‖²

    with the output y of a head and the value v of the same token in that head, or in its key head.
    """

    @nn.compact
    def __call__(self, tokens: Tokens, call: Call, attend: Attend) -> Float[Array, "B T H D"]:
        """Return the parts z of the outputs. Every query needs its own token's value in `tokens.v`."""
        outputs = attend(call)
        wide = statistics_dtype(outputs.dtype)
        own = tokens.v.astype(wide)
        length = jnp.sum(jnp.square(own), axis=-1, keepdims=True)
        unit = own * jax.lax.rsqrt(jnp.maximum(length, jnp.asarray(NORM_EPSILON, wide)))
        unit = jnp.repeat(unit, self.num_heads // own.shape[2], axis=2)
        along = jnp.sum(outputs.astype(wide) * unit, axis=-1, keepdims=True)
        return (outputs.astype(wide) - along * unit).astype(outputs.dtype)


class ElementwiseGates(HeadVariant):
    """Gated attention with a gate for each number of a head's output (Qiu et al., 2025, arXiv 2505.06708).

    O' = O ⊙ σ(x·W), W: M×(H·D). The gates start near 1/2.
    """

    @nn.compact
    def __call__(self, tokens: Tokens, call: Call, attend: Attend) -> Float[Array, "B T H D"]:
        """Return the outputs of all heads, times their gates."""
        outputs = attend(call)
        scores = self.dense(outputs.shape[-2] * outputs.shape[-1], "gate")(tokens.x)
        gates = jax.nn.sigmoid(scores.astype(statistics_dtype(scores.dtype))).astype(outputs.dtype)
        return outputs * constrain(gates.reshape(outputs.shape), BATCH, "context", "tensor", None)


class SharedMap(nn.Module):
    """A D×D map that all heads share, for "knocking" (arXiv 2510.23052): the identity at the start.

    Fields:
      dtype: dtype of the computation; None means that of the input.
    """

    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "B T H D"]) -> Float[Array, "B T H D"]:
        """Return x times the D×D map, for every head."""
        size = x.shape[-1]
        matrix = self.param("map", lambda _: jnp.eye(size))
        x, matrix = nn.dtypes.promote_dtype(x, matrix, dtype=self.dtype)
        return jnp.einsum("bthd,de->bthe", x, matrix)


def in_rows(x: Float[Array, "B T H D"]) -> Float[Array, "B 2*T H/2 D"]:
    """Arrange H heads of T tokens as H/2 heads of 2T rows: head s·H/2 + j of token t is row 2t + s of head j.

    Attention of these rows is that of paired heads (modded-nanogpt, pull request 191): both heads of a pair attend to
    the keys of both in one softmax. With a causal mask, a token's first head does not attend to its second head's key.
    The axes stay in their order, so that nothing is copied.
    """
    return x.reshape(x.shape[0], 2 * x.shape[1], x.shape[2] // 2, x.shape[3])


def row_numbers(tokens: Int[Array, "B T"]) -> Int[Array, "B 2*T"]:
    """Return the positions of the rows of `in_rows`, for a rotary embedding: 2p and 2p + 1 for a token's position p."""
    return jnp.stack([2 * tokens, 2 * tokens + 1], axis=-1).reshape(tokens.shape[0], -1)


def paired(inputs: Inputs) -> Inputs:
    """Return the inputs of attention for "paired": queries, keys and values as `in_rows`, mask and ids for 2T rows."""
    mask, segments = inputs.mask, inputs.segments
    if mask is not None:
        for axis in (2, 3):
            mask = mask if mask.shape[axis] == 1 else jnp.repeat(mask, 2, axis)  # 1 stands for any number
    if segments is not None:
        segments = Segments(*(jnp.repeat(ids, 2, axis=-1) for ids in segments))
    return inputs._replace(q=in_rows(inputs.q), k=in_rows(inputs.k), v=in_rows(inputs.v), mask=mask, segments=segments)


def paired_in_cache(inputs: Inputs, length: Int[Array, " B"], window: int | None) -> Inputs:
    """Return `paired` inputs of one new token, with a mask for its two rows and the rows of the cache.

    Args:
      inputs: the query of the token, and the cached keys, values and mask.
      length: the number of tokens, with the new one.
      window: the number of rows that a row attends to.
    """
    rows = row_numbers(length[:, None] - 1)[:, None, :, None]
    keys = row_numbers(positions(inputs.k.shape[1], length))[:, None, None]
    seen = keys <= rows if window is None else (keys <= rows) & (keys > rows - window)
    arranged = paired(inputs)
    return arranged._replace(mask=seen if arranged.mask is None else seen & arranged.mask)


MODULES: dict[str, type[HeadVariant]] = {
    "moh": MixtureOfHeads, "moh_topk": MixtureOfHeads, "diff": Differential, "diff2": DifferentialV2,
    "xsa": ExclusiveSelf, "gated_elementwise": ElementwiseGates,
}  # fmt: skip


def shared_and_chosen(head_variant: str, num_heads: int) -> tuple[int, int]:
    """Return h_s and K of a mixture of heads: (0, H) for "moh"; for "moh_topk" a quarter shared and half chosen.

    The paper's models use 50 to 90 % of their heads; "moh_topk" uses 75 %.
    """
    return (0, num_heads) if head_variant == "moh" else (num_heads // 4, num_heads // 2)


def composition_of(head_variant: str | None, num_heads: int) -> Composition:
    """Return the `Composition` of a head variant's attention: no compose, and groups of two heads for "diff"."""
    return Composition(groups=num_heads // 2 if head_variant == "diff" else 1)


def with_balance(loss: Float[Array, ""], sown: Params) -> Float[Array, ""]:
    """Return a loss plus `BALANCE` times the mean over layers of the load-balance losses, if there are any.

    Args:
      loss: the loss of the task.
      sown: the collection `LOSSES`, into which the modules sow; `apply(..., mutable=[LOSSES])` returns it.
    """
    found = [x.ravel() for x in jax.tree.leaves(sown)]
    return loss + BALANCE * jnp.mean(jnp.concatenate(found)) if found else loss


class VariantProjections(Projections):
    """Projections of a layer that may have a head variant. It also has the fields of `Projections`.

    Fields:
      heads: a variant of `dcvit.models.head_settings` instead of a composition, or None.
      layer: number of the layer, from 0; some variants depend on it.
    """

    heads: str | None = None
    layer: int = 0

    def variant_module(self, name: str) -> HeadVariant:
        """Build the module of a variant; `name` is a key of `MODULES`, and the module's name."""
        module: Callable[..., HeadVariant] = MODULES[name]
        if module is MixtureOfHeads:
            shared, chosen = shared_and_chosen(name, self.num_heads)
            module = functools.partial(module, shared=shared, chosen=chosen)
        return module(self.num_heads, layer=self.layer, kernel_init=self.kernel_init, dtype=self.dtype, name=name)

    def mapped(self, name: str, x: Float[Array, "B T H D"]) -> Float[Array, "B T H D"]:
        """Return queries, keys or values (by `name`), for the variant "knocking" after a `SharedMap`."""
        if self.heads != "knocking":
            return x
        mapped: Array = SharedMap(self.dtype, name=f"knocking_{name}")(x)
        return mapped

    def rotated(self, x: Float[Array, "B T H D"], positions: Int[Array, "#B T"]) -> Float[Array, "B T H D"]:
        """Return queries or keys with their rotary embedding; the two heads of a pair have different positions."""
        if self.heads != "paired":
            return super().rotated(x, positions)
        return super().rotated(in_rows(x), row_numbers(positions)).reshape(x.shape)

    def arranged(self, inputs: Inputs, length: Int[Array, " B"] | None = None, window: int | None = None) -> Inputs:
        """Return the inputs, for the variant "paired" arranged by `paired` or, with `length`, by `paired_in_cache`."""
        if self.heads != "paired":
            return inputs
        return paired(inputs) if length is None else paired_in_cache(inputs, length, window)

    def query_heads(self) -> int:
        """Return the number of heads of the queries: 2H for the variant "diff2", otherwise H."""
        return 2 * self.num_heads if self.heads == "diff2" else self.num_heads
