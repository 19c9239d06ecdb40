"""The attention module of the models: projections, optional QK-norm, then `dcvit.dcmha.attention`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer

from dcvit.dcmha.compose import (
    ComposeWeights,
    dynamic_gates,
    dynamic_projections,
    gate_init,
    hidden_init,
    projection_init,
    static_init,
)
from dcvit.dcmha.kv_cache import Cache, extend, key_wise, visible, with_keys
from dcvit.dcmha.shapes import Array, Bool, Float, Int
from dcvit.models import sharded_attention
from dcvit.parallel.mesh import BATCH, constrain

COMPOSE = ("both", "pre", "post", None)
BRANCHES = ("qk", "q", "k")
QK_NORMS = ("layernorm", "rmsnorm", None)


def in_float32(norm: nn.Module, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Applies a normalisation in float32, whatever the dtype of `x`, and returns to that dtype."""
    return norm(x.astype(jnp.float32)).astype(x.dtype)


class Progress(NamedTuple):
    """How far each example of a batch has been decoded; see `dcvit.dcmha.kv_cache`."""

    before: Int[Array, " B"]  # tokens in the cache before this call
    added: Int[Array, " B"]  # how many of this call's tokens are real; those after them are padding
    first: Int[Array, " B"]  # the oldest token that may be seen


def rotate(x: Float[Array, "B T H D"], positions: Int[Array, "#B T"], *, width: int, base: float) -> Array:
    """Rotary position embedding (Su et al., 2021) on the first `width` of D numbers, in float32.

    Number i of the first half and number i of the second make a pair, turned by position · base^(-2i/width): the
    layout of GPT-NeoX and LLaMA.
    """
    frequencies = base ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = positions.astype(jnp.float32)[..., None] * frequencies[None, None]
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    a, b = jnp.split(x[..., :width].astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, x[..., width:]], axis=-1)


class Compose(nn.Module):
    """The parameters of one compose, θ = {W_q1, W_q2, W_qg, W_k1, W_k2, W_kg, W_b} (Section 3, Eqn 5-6)."""

    heads: int
    branches: str = "qk"
    projection: bool = True
    gate: bool = True
    static: bool = False
    rank: int = 2
    groups: int = 1

    @nn.compact
    def __call__(self, width: int) -> dict[str, Array]:
        """Those that exist, by name, for inputs of a width."""
        per_group = self.heads // self.groups
        inner = 2 * self.rank * per_group
        params: dict[str, Array] = {}
        for side in [side for side in "qk" if side in self.branches]:
            if self.projection:
                one, two = hidden_init(width, inner), projection_init(self.rank, per_group)
                params[f"{side}1"] = self.param(f"w_{side}1", one, (width, self.groups, inner))
                params[f"{side}2"] = self.param(f"w_{side}2", two, (self.groups, inner, inner))
            if self.gate:
                params[f"{side}g"] = self.param(f"w_{side}g", gate_init(width, per_group), (width, self.heads))
        if self.static:
            shape = (self.groups, per_group, per_group)
            params["static"] = self.param("w_b", static_init(per_group), shape)
        return params


class Attention(nn.Module):
    """Multi-head attention with optional dynamic composition: flax's parameter tree plus `pre` and `post`.

    Fields:
      num_heads: H; divides the model width M.
      num_key_heads: K, for grouped-query attention; H by default.
      compose: which attention matrices are composed: "both", "pre" (scores), "post" (weights) or None.
      branches: "qk", "q" or "k": composition driven by queries, keys or both (Table 9).
      projection, gate, static: which of the paper's branches exist (Table 9).
      rank: R of the dynamic projections.
      groups: heads compose inside each of this many groups (Section 3.2).
      qk_norm: "layernorm" or "rmsnorm" over D on queries and keys (with scale, without bias), or None.
      rotary: how many of the D numbers of queries and keys carry a rotary position embedding; `rotary_base` is
        that of its frequencies.
      causal, window: see `dcvit.dcmha.attention`.
      use_bias: biases on the four projections.
      kernel_init: of the four projections; `out_init` of the last, where it differs.
      dtype: of the computation; parameters are float32.
      implementation: see `dcvit.dcmha.attention`; those of one query do not train or read a model's texts.
      remat: compute what attention makes of queries, keys and values, all that is as large as T×S, again in the
        backward pass.
    """

    num_heads: int
    num_key_heads: int | None = None
    compose: str | None = None
    branches: str = "qk"
    projection: bool = True
    gate: bool = True
    static: bool = False
    rank: int = 2
    groups: int = 1
    qk_norm: str | None = None
    rotary: int = 0
    rotary_base: float = 10_000.0
    causal: bool = False
    window: int | None = None
    use_bias: bool = True
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    out_init: Initializer | None = None
    dtype: Any = None
    implementation: str | None = None
    remat: bool = False

    @nn.compact
    def __call__(
        self,
        x_q: Float[Array, "B T M"],
        x_kv: Float[Array, "B S M"] | None = None,
        mask: Bool[Array, "#B 1 #T #S"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
        cache: Cache | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Attends from `x_q` to `x_kv`, or to `x_q` itself.

        Args:
          x_q, x_kv: the inputs of queries, and of keys and values.
          mask: see `dcvit.dcmha.attention`; of one token and a cache, S are its slots.
          positions: of the tokens, for a rotary embedding; 0 … T-1 by default.
          cache: what is known of the tokens before; `progress` says of how many. Several tokens at once go into an
            empty cache only.

        Returns:
          The output B T M; with `cache`, a pair of it and the cache with these tokens.

        Raises:
          ValueError: a field's value is not one of those listed above, heads, key heads, groups and width do not
            divide as they must, or the arguments do not go together.
        """
        x_kv = x_q if x_kv is None else x_kv
        width = x_q.shape[-1]
        self._check(width)
        if (cache is None) != (progress is None):
            raise ValueError("a cache needs progress, and progress a cache")
        if self.rotary and x_kv is not x_q:
            raise ValueError("a rotary embedding needs queries and keys of the same tokens")
        # What flows back from the dynamic projections of all heads is whole on every device; what flows back from a
        # device's own heads is a part of a sum. A copy, taken first, keeps them apart: one exchange sums the parts.
        inputs = {"qk": x_q} if x_q is x_kv else {"q": x_q, "k": x_kv}
        whole = {side: constrain(x, BATCH, None, None) if self.groups == 1 else x for side, x in inputs.items()}
        q, k, v = self._project(x_q, x_kv, positions)
        pre, post = self._composes(width, inputs, whole)
        causal, window = self.causal, self.window
        if cache is not None and progress is not None:
            flat_k, flat_v = (x.reshape(*x.shape[:2], -1) for x in (k, v))
            new = Cache(flat_k, flat_v, key_wise(pre), key_wise(post))
            cache = extend(cache, new, progress.before, progress.added)
            if x_q.shape[1] == 1:
                length = progress.before + progress.added
                seen = visible(cache.k.shape[1], length, window=window, first=progress.first)
                mask = seen if mask is None else seen & mask
                k, v = (x.reshape(*x.shape[:2], *k.shape[2:]) for x in (cache.k, cache.v))
                causal, window = False, None
                pre, post = with_keys(pre, cache.pre), with_keys(post, cache.post)
        attend: Callable[..., Array] = functools.partial(
            sharded_attention.attention, causal=causal, window=window,
            groups=self.groups if self.compose else 1, implementation=self.implementation,
        )  # fmt: skip
        if self.remat:
            attend = jax.checkpoint(attend, policy=jax.checkpoint_policies.nothing_saveable)
        out = constrain(attend(q, k, v, pre, post, mask=mask), BATCH, None, "tensor", None)
        out = nn.DenseGeneral(
            width, axis=(-2, -1), use_bias=self.use_bias, kernel_init=self.out_init or self.kernel_init,
            dtype=self.dtype, name="out",
        )(out)  # fmt: skip
        return out if cache is None else (out, cache)

    def _project(self, x_q: Array, x_kv: Array, positions: Array | None) -> tuple[Array, Array, Array]:
        """Queries B T H D, keys and values B S K D, normalised and rotated as the fields say."""
        head_width = x_q.shape[-1] // self.num_heads

        def project(name: str, x: Array, heads: int) -> Array:
            dense = nn.DenseGeneral(
                (heads, head_width), use_bias=self.use_bias, kernel_init=self.kernel_init, dtype=self.dtype, name=name
            )
            return constrain(dense(x), BATCH, None, "tensor", None)

        key_heads = self.num_key_heads or self.num_heads
        q = project("query", x_q, self.num_heads)
        k = project("key", x_kv, key_heads)
        v = project("value", x_kv, key_heads)
        if self.qk_norm:
            norm: Any = nn.RMSNorm if self.qk_norm == "rmsnorm" else functools.partial(nn.LayerNorm, use_bias=False)
            q = in_float32(norm(name="query_norm"), q)
            k = in_float32(norm(name="key_norm"), k)
        if self.rotary:
            if positions is None:
                positions = jnp.arange(x_q.shape[1])[None]
            q, k = (rotate(x, positions, width=self.rotary, base=self.rotary_base) for x in (q, k))
        return q, k, v

    def _composes(
        self, width: int, inputs: dict[str, Array], whole: dict[str, Array]
    ) -> tuple[ComposeWeights | None, ComposeWeights | None]:
        """The weights of the composes before and after the softmax, None where there is none, from inputs by side."""
        params = {
            where: Compose(
                heads=self.num_heads, branches=self.branches, projection=self.projection, gate=self.gate,
                static=self.static, rank=self.rank, groups=self.groups, name=where,
            )(width)
            for where in ("pre", "post") if self.compose in (where, "both")
        }  # fmt: skip
        weights = {(where, "static"): some["static"] for where, some in params.items() if self.static}
        for sides, x in inputs.items():
            wanted = [(where, side) for where in params for side in sides if side in self.branches]
            if wanted:
                weights |= self._dynamic(x, whole[sides], wanted, params)

        def of(where: str) -> ComposeWeights | None:
            return ComposeWeights(**{n: w for (c, n), w in weights.items() if c == where}) if where in params else None

        return of("pre"), of("post")

    def _dynamic(
        self, x: Array, whole: Array, wanted: list[tuple[str, str]], params: dict[str, dict[str, Array]]
    ) -> dict[tuple[str, str], Array]:
        """Dynamic weights, by compose and name, from one input, which one product reads for all (compose, side)."""
        weights: dict[tuple[str, str], Array] = {}
        x, whole = (copy.astype(self.dtype or copy.dtype) for copy in (x, whole))

        def of(kind: str) -> list[Array]:
            return [params[where][f"{side}{kind}"].astype(x.dtype) for where, side in wanted]

        if self.projection:
            # Groups live where their heads do. One group has all heads, and each device has all of these small weights.
            axis = "tensor" if self.groups > 1 else None
            pairs = dynamic_projections(whole, of("1"), of("2"), heads=self.num_heads)
            for (where, side), pair in zip(wanted, pairs, strict=True):
                for i, w in enumerate(pair, start=1):
                    weights[where, f"{side}{i}"] = constrain(w, BATCH, None, None, axis)
        if self.gate:
            for (where, side), gate in zip(wanted, dynamic_gates(x, of("g")), strict=True):
                weights[where, f"{side}g"] = constrain(gate, BATCH, None, "tensor")
        return weights

    def _check(self, width: int) -> None:
        """Raises ValueError for fields that do not go together."""
        for name, known in (("compose", COMPOSE), ("branches", BRANCHES), ("qk_norm", QK_NORMS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}; known: {', '.join(map(repr, known))}")
        if width % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} does not divide width={width}")
        if self.rotary % 2 or not 0 <= self.rotary <= width // self.num_heads:
            raise ValueError(
                f"rotary={self.rotary} should be even and at most {width // self.num_heads}, a head's width"
            )
        if self.num_key_heads is not None and (self.num_key_heads < 1 or self.num_heads % self.num_key_heads):
            raise ValueError(f"num_key_heads={self.num_key_heads} does not divide num_heads={self.num_heads}")
        if self.compose and (self.groups < 1 or self.num_heads % self.groups):
            raise ValueError(f"groups={self.groups} does not divide num_heads={self.num_heads}")
        if self.compose and self.rank < 1:
            raise ValueError(f"rank={self.rank}: the dynamic projections need at least rank 1")
        if self.compose and not (self.projection or self.gate or self.static):
            raise ValueError("compose without projection, gate or static composes nothing; use compose=None")
