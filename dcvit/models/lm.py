"""Decoder-only language models with plain or dynamically composed attention: the paper's and their baselines.

Three architectures behind one set of fields: GPT-3's (Transformer), LLaMA's (Transformer++) and Pythia's. With
composed attention they are the paper's DCFormer, DCFormer++ and DCPythia (Section 4).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer, normal

from dcvit.dcmha.compose import ComposeWeights
from dcvit.dcmha.kv_cache import Cache
from dcvit.dcmha.shapes import Array, Bool, Float, Int
from dcvit.models.attention import Attention, Progress, in_float32
from dcvit.models.presets import decode_preset
from dcvit.models.vit import REMAT, REMATS
from dcvit.parallel.mesh import BATCH, constrain

# Which layers of a repeating group see only a window (L) and which all (G): Section 4, Table 10, as released.
WINDOW_PATTERNS = {"none": "G", "1:1": "LG", "3:1": "LGLL", "7:1": "LGLLLLLL"}
POSITIONS = ("rotary", "learned")
NORMS = ("layernorm", "rmsnorm")
MLPS: dict[str, Callable[..., Array]] = {
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_tanh": nn.gelu,
    "swiglu": nn.silu,
}


class Sight(NamedTuple):
    """What the layers share: where each token stands and which others it may see."""

    positions: Int[Array, "#B T"]  # for rotary embeddings
    mask: Bool[Array, "B 1 T T"] | None  # besides causality and windows
    progress: Progress | None  # of decoding


class MlpBlock(nn.Module):
    """Two dense layers with an activation between; SwiGLU gates what it activates with a third (Shazeer, 2020)."""

    mlp_dim: int
    kind: str
    use_bias: bool
    kernel_init: Initializer
    out_init: Initializer
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        dense = functools.partial(nn.Dense, use_bias=self.use_bias, dtype=self.dtype)
        hidden = MLPS[self.kind](dense(self.mlp_dim, kernel_init=self.kernel_init, name="in")(x))
        if self.kind == "swiglu":
            hidden = hidden * dense(self.mlp_dim, kernel_init=self.kernel_init, name="gate")(x)
        return dense(x.shape[-1], kernel_init=self.out_init, name="out")(constrain(hidden, BATCH, None, "tensor"))


class DecoderBlock(nn.Module):
    """Attention and MLP, each after a norm: one after the other, or both from the same input (`parallel`)."""

    attention: Callable[..., Attention]
    mlp: Callable[..., MlpBlock]
    norm: Callable[..., nn.Module]
    parallel: bool
    window: int | None

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T M"], sight: Sight, cache: Cache | None
    ) -> tuple[Float[Array, "B T M"], tuple[dict[str, Array], Cache | None]]:
        attention = self.attention(window=self.window, name="MultiHeadDotProductAttention_0")
        out = {}
        y = in_float32(self.norm(name="attention_norm"), x)
        y = attention(y, mask=sight.mask, positions=sight.positions, cache=cache, progress=sight.progress)
        if cache is not None:
            y, cache = y
        out["sa"] = y
        after = out["+sa"] = x + y if self.parallel else constrain(x + y, BATCH, None, None)
        y = in_float32(self.norm(name="mlp_norm"), x if self.parallel else after)
        y = out["mlp"] = self.mlp(name="MlpBlock_0")(y)
        x = out["+mlp"] = constrain(after + y, BATCH, None, None)
        return x, (out, cache)


class Group(nn.Module):
    """The layers of one window pattern, one after the other: what a scan repeats."""

    layer: Callable[..., DecoderBlock]
    windows: Sequence[int | None]

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"], sight: Sight, caches: Any) -> tuple[Array, tuple[Any, Any]]:
        outs, kept = [], []
        for i, window in enumerate(self.windows):
            x, (out, cache) = self.layer(window=window, name=f"layer_{i}")(x, sight, caches and caches[i])
            outs.append(out)
            kept.append(cache)
        return x, (outs, kept if caches else None)


class Decoder(nn.Module):
    """`depth` layers whose windows follow a pattern; unrolled, or a scan over whole patterns and an unrolled rest."""

    depth: int
    windows: Sequence[int | None]
    layer: Callable[..., DecoderBlock]
    norm: Callable[..., nn.Module]
    scanned: Callable[..., DecoderBlock] | None  # the layers inside the scan, where there is one

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T M"], sight: Sight, caches: dict[str, Any] | None
    ) -> tuple[Array, dict[str, Any], dict[str, Any] | None]:
        """The normalised output, intermediates for each layer, and the caches with these tokens."""
        period, out = len(self.windows), {}
        repeats = self.depth // period if self.scanned is not None else 0
        kept: dict[str, Any] = {}
        if self.scanned is not None and repeats:
            scanned = nn.scan(
                Group, variable_axes={"params": 0}, split_rngs={"params": True}, length=repeats,
                in_axes=(nn.broadcast, 0),
            )(self.scanned, self.windows, name="group")  # fmt: skip
            x, (stacked, kept["group"]) = scanned(x, sight, caches and caches["group"])
            for layer in range(repeats * period):
                at = layer // period, layer % period
                out[f"block{layer:02d}"] = jax.tree.map(lambda o, i=at[0]: o[i], stacked[at[1]])
        for layer in range(repeats * period, self.depth):
            name = f"decoderblock_{layer}"
            block = self.layer(window=self.windows[layer % period], name=name)
            x, (out[f"block{layer:02d}"], kept[name]) = block(x, sight, caches[name] if caches else None)
        out["pre_ln"] = x
        return in_float32(self.norm(name="decoder_norm"), x), out, kept if caches else None


class LM(nn.Module):
    """The language model; build it with `Model`, which also knows the paper's models by name.

    Fields:
      vocab_size: V.
      context: T of training rows, and the number of learned positions.
      width, depth, mlp_dim, num_heads, num_key_heads: the architecture; `mlp_dim` is 4·M by default.
      position: "rotary" on the `rotary_fraction` of a head's width, with `rotary_base`; or "learned".
      norm: "layernorm" or "rmsnorm", with `norm_epsilon`.
      mlp: "gelu", "gelu_tanh" (GPT's approximation) or "swiglu".
      use_bias: biases in attention and MLP.
      parallel: attention and MLP of a layer read the same input (GPT-NeoX).
      tied: the head is the embedding.
      window_pattern: "none", "1:1", "3:1" or "7:1" local to global layers; local ones see `window` tokens.
      end_of_text: with the token that ends a document, tokens see their own document only, itself included at the
        start of the next one, and positions begin anew there. None: attention across documents, as in the paper.
      init_std: of all kernels and embeddings; `out_init_std` of the layers that write to the residual stream.
      scan: one scanned group of layers, a window pattern, instead of `depth` unrolled ones.
      remat: "none", "attention" (recompute what is as large as T×T), "dots" (keep matrix products) or "full" (every
        layer), in the backward pass.
      dtype_mm: dtype of the computation, "float32" or "bfloat16"; parameters and logits are float32.
      compose … implementation: see `dcvit.models.attention.Attention`.
    """

    vocab_size: int
    context: int = 2048
    width: int = 768
    depth: int = 12
    mlp_dim: int | None = None
    num_heads: int = 12
    num_key_heads: int | None = None
    position: str = "rotary"
    rotary_fraction: float = 1.0
    rotary_base: float = 10_000.0
    norm: str = "rmsnorm"
    norm_epsilon: float = 1e-6
    mlp: str = "swiglu"
    use_bias: bool = False
    parallel: bool = False
    tied: bool = False
    window_pattern: str = "none"
    window: int = 256
    end_of_text: int | None = None
    init_std: float = 0.006
    out_init_std: float | None = None
    scan: bool = False
    remat: str = "none"
    dtype_mm: str = "float32"
    compose: str | None = None
    branches: str = "qk"
    projection: bool = True
    gate: bool = True
    static: bool = False
    rank: int = 2
    groups: int = 1
    qk_norm: str | None = None
    implementation: str | None = None

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        train: bool = False,
        cache: dict[str, Any] | None = None,
        count: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T V"], dict[str, Any]]:
        """Logits of each next token, float32, and a dict of every named intermediate.

        Args:
          tokens: below `vocab_size`.
          train: nothing depends on it; the models have no dropout.
          cache: as `init_cache` makes it, for decoding: several tokens fill an empty one, then one at a time. What
            it becomes is `out["cache"]`.
          count: with `cache`, how many tokens of each example are real; the rest, at its end, is padding.

        Raises:
          ValueError: a field's value is unknown or does not fit the others.
        """
        self._check(tokens.shape[1])
        dtype = jnp.dtype(self.dtype_mm)
        out: dict[str, Any] = {}
        embed = nn.Embed(self.vocab_size, self.width, embedding_init=normal(self.init_std), name="embedding")
        x = out["stem"] = embed(tokens).astype(dtype)
        sight, state = self._sight(tokens, cache, count)
        if self.position == "learned":
            table = self.param("pos_embedding", normal(self.init_std), (self.context, self.width))
            x = out["with_posemb"] = x + jnp.take(table, sight.positions, axis=0, mode="clip").astype(dtype)
        x = constrain(x, BATCH, None, None)
        x, out["decoder"], caches = self._decoder(dtype)(x, sight, cache and cache["layers"])
        if cache is not None:
            out["cache"] = {**state, "layers": caches}
        out["pre_logits"] = x
        kernel = embed.embedding.T if self.tied else _Kernel(self.vocab_size, self.init_std, name="head")(self.width)
        out["logits"] = unembed(x, kernel)
        return out["logits"], out

    def _sight(
        self, tokens: Array, cache: dict[str, Any] | None, count: Array | None
    ) -> tuple[Sight, dict[str, Array]]:
        """Positions, the mask between documents, and with a cache how far each example then is."""
        batch, length = tokens.shape
        before = jnp.zeros(batch, jnp.int32) if cache is None else cache["length"]
        at = before[:, None] + jnp.arange(length)[None]
        first, mask = jnp.zeros_like(at), None  # of each token, the oldest one that it may see
        if self.end_of_text is not None:
            begins = jnp.where(tokens == self.end_of_text, at, 0)
            if cache is not None:
                begins = begins.at[:, 0].max(cache["first"])
            first = jax.lax.cummax(begins, axis=1)
            if length > 1:
                mask = (at[:, None, :] >= first[:, :, None])[:, None]
        if cache is None:
            return Sight(at - first, mask, None), {}
        count = jnp.full(batch, length, jnp.int32) if count is None else count
        newest = jnp.take_along_axis(first, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        sight = Sight(at - first, mask, Progress(before, count, newest))
        return sight, {"length": before + count, "first": newest}

    def _decoder(self, dtype: Any) -> Decoder:
        """The layers as the fields describe them."""
        init, out_init = normal(self.init_std), normal(self.out_init_std or self.init_std)
        rotary = round(self.rotary_fraction * (self.width // self.num_heads)) if self.position == "rotary" else 0
        attention = functools.partial(
            Attention, self.num_heads, num_key_heads=self.num_key_heads, compose=self.compose, branches=self.branches,
            projection=self.projection, gate=self.gate, static=self.static, rank=self.rank, groups=self.groups,
            qk_norm=self.qk_norm, rotary=rotary, rotary_base=self.rotary_base, causal=True, use_bias=self.use_bias,
            kernel_init=init, out_init=out_init, dtype=dtype, implementation=self.implementation,
            remat=self.remat == "attention",
        )  # fmt: skip
        mlp = functools.partial(
            MlpBlock, self.mlp_dim or 4 * self.width, self.mlp, self.use_bias, init, out_init, dtype
        )
        norm: Any = nn.RMSNorm if self.norm == "rmsnorm" else nn.LayerNorm
        norm = functools.partial(norm, epsilon=self.norm_epsilon)

        def layer(scanned: bool) -> Callable[..., DecoderBlock]:
            block: Any = DecoderBlock
            if self.remat in REMAT:
                block = nn.remat(block, policy=REMAT[self.remat], prevent_cse=not scanned)
            return functools.partial(block, attention, mlp, norm, self.parallel)

        scanned = layer(True) if self.scan else None
        return Decoder(self.depth, layer_windows(self), layer(False), norm, scanned, name="Transformer")

    def _check(self, length: int) -> None:
        """Raises ValueError for fields that are unknown or do not fit `length` tokens."""
        known = {
            "position": POSITIONS, "norm": NORMS, "mlp": tuple(MLPS), "remat": REMATS,
            "window_pattern": tuple(WINDOW_PATTERNS), "dtype_mm": ("float32", "bfloat16"),
        }  # fmt: skip
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r}; known: {', '.join(map(repr, values))}")
        for name in ("vocab_size", "context", "width", "num_heads", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} should be 1 or more")
        for name in ("depth", "mlp_dim", "num_key_heads", "out_init_std"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name}={getattr(self, name)} should not be negative")
        if not 0 < self.rotary_fraction <= 1 or self.rotary_base <= 0 or self.norm_epsilon <= 0 or self.init_std <= 0:
            raise ValueError("rotary_fraction should be in (0, 1], rotary_base, norm_epsilon and init_std above 0")
        if self.position == "learned" and length > self.context:
            raise ValueError(f"{length} tokens are more than the model's context of {self.context}")
        if self.width % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} does not divide width={self.width}")
        if self.end_of_text is not None and not 0 <= self.end_of_text < self.vocab_size:
            raise ValueError(f"end_of_text={self.end_of_text} is none of {self.vocab_size} tokens")


class _Kernel(nn.Module):
    """A parameter `kernel`, M×V: the head, which is applied in pieces by a chunked loss."""

    vocab_size: int
    init_std: float

    @nn.compact
    def __call__(self, width: int) -> Float[Array, "M V"]:
        kernel: Array = self.param("kernel", normal(self.init_std), (width, self.vocab_size))
        return kernel


def unembed(hidden: Float[Array, "*B M"], kernel: Float[Array, "M V"]) -> Float[Array, "*B V"]:
    """Logits in float32 from the last hidden states, in whose dtype the factors are multiplied. What comes back to
    them in a backward pass is float32."""
    wide = jnp.float32 if hidden.dtype == jnp.bfloat16 else hidden.dtype  # promote_types refuses where it is strict
    return jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=wide)


def head_kernel(params: Mapping[str, Any]) -> Float[Array, "M V"]:
    """The head of a model's parameters, tied or not."""
    kernel: Array = params["head"]["kernel"] if "head" in params else params["embedding"]["embedding"].T
    return kernel


def layer_windows(net: LM) -> tuple[int | None, ...]:
    """The window of each layer of the repeating pattern, None for all tokens."""
    return tuple(net.window if kind == "L" else None for kind in WINDOW_PATTERNS[net.window_pattern])


def init_cache(net: LM, batch: int, length: int) -> dict[str, Any]:
    """An empty cache for decoding `batch` examples of up to `length` tokens; see `LM.__call__`.

    Local layers keep a window, in a ring; the others `length` tokens.
    """
    windows, dtype = layer_windows(net), jnp.dtype(net.dtype_mm)
    key_heads, key_wise = net.num_key_heads or net.num_heads, net.compose and "k" in net.branches

    def layer(window: int | None) -> Cache:
        def slots(*per_token: int) -> Array:
            return jnp.zeros((batch, min(window or length, length), *per_token), dtype)

        def composed(where: str) -> ComposeWeights | None:
            if not key_wise or net.compose not in (where, "both") or not (net.projection or net.gate):
                return None
            factors = [slots(net.rank, net.num_heads) if net.projection else None for _ in range(2)]
            return ComposeWeights(k1=factors[0], k2=factors[1], kg=slots(net.num_heads) if net.gate else None)

        keys, values = (slots(key_heads * (net.width // net.num_heads)) for _ in range(2))
        return Cache(keys, values, composed("pre"), composed("post"))

    caches = [layer(window) for window in windows]
    repeats = net.depth // len(windows) if net.scan else 0
    layers: dict[str, Any] = {
        f"decoderblock_{i}": caches[i % len(windows)] for i in range(repeats * len(windows), net.depth)
    }
    if repeats:
        layers["group"] = jax.tree.map(lambda x: jnp.zeros((repeats, *x.shape), x.dtype), caches)
    zeros = jnp.zeros(batch, jnp.int32)
    return {"length": zeros, "first": zeros, "layers": layers}


def Model(vocab_size: int, *, preset: str | None = None, **fields: Any) -> LM:  # noqa: N802
    """Builds the module, e.g. `Model(50257, preset="DCFormer++-405M")`; `fields` override the preset's.

    Raises:
      ValueError: an unknown preset; the message names the nearest ones.
    """
    return LM(vocab_size, **{**decode_preset(preset), **fields})


def stack_blocks(params: Mapping[str, Any], period: int) -> dict[str, Any]:
    """Parameters of the unrolled decoder as those of the scanned one, whose groups have `period` layers."""
    transformer = dict(params["Transformer"])
    names = [f"decoderblock_{i}" for i in range(len(transformer)) if f"decoderblock_{i}" in transformer]
    repeats = 0 if "group" in transformer else len(names) // period
    if repeats:
        blocks = [transformer.pop(name) for name in names[: repeats * period]]
        transformer["group"] = {
            f"layer_{i}": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks[i::period]) for i in range(period)
        }
    return {**params, "Transformer": transformer}


def unstack_blocks(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the scanned decoder as those of the unrolled one; already unrolled ones stay as they are."""
    transformer = dict(params["Transformer"])
    group = transformer.pop("group", {})
    for i in range(len(group)):
        layers = group[f"layer_{i}"]
        for repeat in range(len(jax.tree.leaves(layers)[0])):
            name = f"decoderblock_{repeat * len(group) + i}"
            transformer[name] = jax.tree.map(lambda leaf, repeat=repeat: leaf[repeat], layers)
    return {**params, "Transformer": transformer}


def load(
    init_params: Mapping[str, Any], init_file: str, model_cfg: Mapping[str, Any], dont_load: Sequence[str] = ()
) -> dict[str, Any]:
    """`init_params` with the values of a checkpoint of this project; scanned and unrolled trees convert.

    Parameters whose name matches a regex of `dont_load` keep their initial value.

    Raises:
      dcvit.errors.CheckpointError: unreadable file, or trees or shapes that differ (both sides listed).
    """
    from dcvit.checkpoint.checkpointer import load_params
    from dcvit.checkpoint.params import merge_params

    loaded = load_params(init_file)
    if "Transformer" in loaded:
        loaded = unstack_blocks(loaded)
        group = init_params["Transformer"].get("group")
        if group is not None:
            loaded = stack_blocks(loaded, len(group))
    return merge_params(loaded, init_params, dont_load)
