"""Decoder-only language models with plain or dynamically composed attention: the paper's models and their baselines.

Three architectures share one set of fields: GPT-3's (Transformer), LLaMA's (Transformer++) and Pythia's. With composed
attention they are the paper's DCFormer, DCFormer++ and DCPythia (Section 4).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import normal

from dcvit.dcmha.kv_cache import Cache, empty
from dcvit.dcmha.numerics import product
from dcvit.dcmha.shapes import Array, Float, Int
from dcvit.models import Outputs, Params, head_settings
from dcvit.models.attention import Attention
from dcvit.models.decoder import Decoder, DecoderBlock, TokenContext, token_context
from dcvit.models.fields import (
    QKV_BIASES,
    WINDOW_PATTERNS,
    AttentionFields,
    TransformerFields,
    check_choices,
    check_not_negative,
    check_positive,
    check_transformer,
    rematerialized,
    values_of,
)
from dcvit.models.layers import ACTIVATIONS, MlpBlock, rotary_angles
from dcvit.models.presets import decode_preset
from dcvit.parallel.mesh import BATCH, constrain

POSITIONS = ("rotary", "learned")
NORMS = ("layernorm", "rmsnorm")
MLP_NAMES = ("in", "gate", "out")  # in the parameter tree
MAX_TOKENS = 2**31 - 1  # of caches without global layers: the lengths are int32


class LM(TransformerFields):
    """The language model. Build it with `Model`, which also knows the paper's models by name.

    It also has the fields of `TransformerFields`.

    Fields:
      vocab_size: V.
      context: T of training rows, and the number of learned positions.
      position: "rotary" or "learned" position embeddings.
      rotary_fraction: part of a head's width that carries the rotary embedding.
      rotary_base: base of the frequencies of the rotary embedding.
      rotary_scaling: scaling of these frequencies for longer contexts: (factor,), or (factor, low, high, context) of
        LLaMA 3; see `dcvit.models.layers.scaled`. None means no scaling.
      norm: "layernorm" or "rmsnorm".
      norm_epsilon: epsilon of the norms.
      mlp: activation of the MLPs: "gelu", "gelu_tanh" (GPT's approximation) or "swiglu".
      mlp_groups: see `groups` of `dcvit.models.layers.MlpBlock`.
      use_bias: attention and MLPs have biases.
      qkv_bias: initials of the projections among query, key and value that have a bias, "qkv" for Qwen2; None means as
        `use_bias` says.
      parallel: attention and MLP of a layer read the same input (GPT-NeoX).
      tied: the head is the embedding.
      window_pattern: "none", "1:0", "1:1", "3:1" or "7:1" local to global layers.
      window: number of tokens that a local layer attends to.
      prefill_window: the same for rows and prompts (T > 1), if it differs from generation token by token, as in the
        authors' PyTorch models; None means `window`.
      end_of_text: token that ends a document. Tokens attend to their own document only, in which positions restart;
        the next document starts with the token. None: attention across documents, as in the paper.
      init_std: standard deviation of the initial kernels and embeddings.
      out_init_std: standard deviation in layers that write to the residual stream; None means `init_std`.
    """

    vocab_size: int
    context: int = 2048
    position: str = "rotary"
    rotary_fraction: float = 1.0
    rotary_base: float = 10_000.0
    rotary_scaling: Sequence[float] | None = None
    norm: str = "rmsnorm"
    norm_epsilon: float = 1e-6
    mlp: str = "swiglu"
    mlp_groups: int | None = None
    use_bias: bool = False
    qkv_bias: str | None = None
    parallel: bool = False
    tied: bool = False
    window_pattern: str = "none"
    window: int = 256
    prefill_window: int | None = None
    end_of_text: int | None = None
    init_std: float = 0.006
    out_init_std: float | None = None

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        train: bool = False,
        cache: dict[str, Any] | None = None,
        count: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T V"], Outputs]:
        """Return the float32 logits of each next token, and a dict of all named intermediates.

        Args:
          tokens: integers below `vocab_size`.
          train: unused, because the models have no dropout.
          cache: returned by `init_cache`, for decoding. Several tokens may fill an empty cache; after that, give one
            token at a time. The extended cache is `out["cache"]`. Errors cannot be raised while tracing; instead, the
            logits are NaN for several tokens after others, for more tokens than the cache is for, and for positions
            beyond the learned ones.
          count: with `cache`, number of real tokens of each example; the rest at its end is padding.

        Raises:
          ValueError: a field is invalid or does not fit the others.
        """
        check_fields(self, tokens.shape[1])
        dtype = jnp.dtype(self.dtype_mm)
        out: Outputs = {}
        embed = nn.Embed(self.vocab_size, self.width, embedding_init=normal(self.init_std), name="embedding")
        x = out["stem"] = embed(tokens).astype(dtype)
        start, first = (cache["length"], cache["first"]) if cache is not None else (None, None)
        context = self.token_context(tokens, start, first, count)
        if update := context.update:
            out["cache"] = {"length": update.start + update.added, "first": update.oldest_visible}
        if self.position == "learned":
            table = self.param("pos_embedding", normal(self.init_std), (self.context, self.width))
            x = out["with_posemb"] = x + jnp.take(table, context.positions, axis=0, mode="clip").astype(dtype)
        x = constrain(x, BATCH, "context", None)
        decoder = self.decoder(dtype, tokens.shape[1])
        x, out["decoder"], caches = decoder(x, context, cache and cache["layers"])
        if update:
            out["cache"]["layers"] = caches
        out["pre_logits"] = x
        kernel = embed.embedding.T if self.tied else _Head(self.vocab_size, self.init_std, name="head")(self.width)
        out["logits"] = unembed(x, kernel)
        if cache is not None and update:
            fits = update.start + update.added <= _capacity(self, cache["layers"])
            fits &= (update.start == 0) | (tokens.shape[1] == 1)
            if self.position == "learned":
                fits &= jnp.all(context.positions < self.context, axis=1)
            out["logits"] = jnp.where(fits[:, None, None], out["logits"], jnp.nan)
        return out["logits"], out

    @nn.nowrap
    def token_context(
        self,
        tokens: Int[Array, "B T"],
        start: Int[Array, " B"] | None = None,
        first: Int[Array, " B"] | None = None,
        count: Int[Array, " B"] | None = None,
    ) -> TokenContext:
        """Return what all layers share, see `dcvit.models.decoder.token_context`, with the rotary embedding."""
        context = token_context(tokens, self.end_of_text, start, first, count)
        width = round(self.rotary_fraction * (self.width // self.num_heads))
        if self.position != "rotary" or not width:
            return context
        angles = rotary_angles(context.positions, width=width, base=self.rotary_base, scaling=self.rotary_scaling)
        return context._replace(angles=angles)

    @nn.nowrap
    def decoder(self, dtype: jnp.dtype, length: int) -> Decoder:
        """Return the module of all layers for `length` tokens; it can also be built outside, to apply single layers."""
        init, out_init = normal(self.init_std), normal(self.out_init_std or self.init_std)
        attention = functools.partial(
            Attention, self.num_heads, num_key_heads=self.num_key_heads, causal=True, use_bias=self.use_bias,
            qkv_bias=self.qkv_bias, kernel_init=init, out_init=out_init, dtype=dtype,
            remat=self.remat == "attention", **values_of(self, AttentionFields),
        )  # fmt: skip
        mlp = functools.partial(
            MlpBlock, self.mlp_dim, activation=self.mlp, groups=self.mlp_groups, use_bias=self.use_bias,
            kernel_init=init, out_init=out_init, bias_init=nn.initializers.zeros, dtype=dtype, names=MLP_NAMES,
        )  # fmt: skip
        norm_class: Callable[..., nn.Module] = nn.RMSNorm if self.norm == "rmsnorm" else nn.LayerNorm
        norm = functools.partial(norm_class, epsilon=self.norm_epsilon)

        def layer(scanned: bool) -> Callable[..., DecoderBlock]:
            block_class = rematerialized(DecoderBlock, self.remat, scanned=scanned)
            return functools.partial(block_class, self.in_layers(attention), mlp, norm, self.parallel)

        windows = layer_windows(self, length)
        layout = self.scan_layout(len(windows))
        return Decoder(self.depth, windows, layer(False), norm, layer(True), layout, name="Transformer")


def check_fields(net: LM, length: int) -> None:
    """Raise ValueError if the fields of a model are invalid or do not fit rows of `length` tokens."""
    check_choices(net, position=POSITIONS, norm=NORMS, mlp=ACTIVATIONS, window_pattern=WINDOW_PATTERNS)
    check_choices(net, qkv_bias=(*QKV_BIASES, None))
    check_transformer(net)
    check_positive(net, "vocab_size", "context", "window")
    check_not_negative(net, "out_init_std", "mlp_groups", "prefill_window")
    if net.prefill_window and net.window_pattern == "none":
        raise ValueError(f"prefill_window={net.prefill_window} has no effect with window_pattern='none'")
    if net.mlp_groups and (net.mlp_dim or 4 * net.width) % net.mlp_groups:
        raise ValueError(f"mlp_groups={net.mlp_groups} does not divide mlp_dim={net.mlp_dim or 4 * net.width}")
    if not 0 < net.rotary_fraction <= 1 or net.rotary_base <= 0 or net.norm_epsilon <= 0 or net.init_std <= 0:
        raise ValueError("rotary_fraction should be in (0, 1], rotary_base, norm_epsilon and init_std above 0")
    if net.rotary_scaling is not None:
        check_scaling(net.rotary_scaling)
    if net.position == "learned" and length > net.context:
        raise ValueError(f"{length} tokens are more than the model's context of {net.context}")
    if net.end_of_text is not None and not 0 <= net.end_of_text < net.vocab_size:
        raise ValueError(f"end_of_text={net.end_of_text} should be 0 or more, below vocab_size={net.vocab_size}")


def check_scaling(scaling: Sequence[float]) -> None:
    """Raise ValueError if a `rotary_scaling` is invalid."""
    if len(scaling) not in (1, 4) or min(scaling) <= 0 or (len(scaling) == 4 and scaling[1] >= scaling[2]):
        raise ValueError(
            f"rotary_scaling={tuple(scaling)} should be (factor,) or (factor, low, high, context), above 0, low < high"
        )


class _Head(nn.Module):
    """Module that returns the head's `kernel`, M×V; `unembed` multiplies by it, for a chunked loss in parts."""

    vocab_size: int
    init_std: float

    @nn.compact
    def __call__(self, width: int) -> Float[Array, "M V"]:
        kernel: Array = self.param("kernel", normal(self.init_std), (width, self.vocab_size))
        return kernel


def unembed(hidden: Float[Array, "*B M"], kernel: Float[Array, "M V"]) -> Float[Array, "*B V"]:
    """Return the logits of hidden states, in float32.

    The factors are multiplied in the dtype of the hidden states. Their gradients are float32.
    """
    wide = jnp.float32 if hidden.dtype == jnp.bfloat16 else hidden.dtype  # strict mode forbids promote_types
    return product(hidden, kernel.astype(hidden.dtype), dtype=wide)


def head_kernel(params: Params) -> Float[Array, "M V"]:
    """Return the head's kernel from a model's parameters; a tied head is the transposed embedding."""
    kernel: Array = params["head"]["kernel"] if "head" in params else params["embedding"]["embedding"].T
    return kernel


def layer_windows(net: LM, length: int) -> tuple[int | None, ...]:
    """Return the window of each layer of the repeated pattern for `length` tokens; None for a global layer."""
    window = net.prefill_window or net.window if length > 1 else net.window
    return tuple(window if kind == "L" else None for kind in WINDOW_PATTERNS[net.window_pattern])


def init_cache(net: LM, batch: int, length: int) -> dict[str, Any]:
    """Return an empty cache for decoding `batch` examples of up to `length` tokens; see `LM.__call__`.

    A local layer has a ring of `window` slots, a global layer `length` slots.

    Raises:
      ValueError: `length` is above the number of learned positions.
    """
    if net.position == "learned" and length > net.context:
        raise ValueError(f"a cache of {length} tokens is longer than the {net.context} learned positions")
    slots = [min(window or length, length) for window in layer_windows(net, 1)]
    period, repeats = net.scan_layout(len(slots))
    key_width = (net.num_key_heads or net.num_heads) * (net.width // net.num_heads)

    def cache(layer: int) -> Cache:
        leading = batch, slots[layer % len(slots)]
        return empty(net.composition_of(layer), leading, net.num_heads, key_width, jnp.dtype(net.dtype_mm))

    layers: dict[str, Any] = {f"decoderblock_{i}": cache(i) for i in range(repeats * period, net.depth)}
    if repeats:
        group = [cache(i) for i in range(period)]
        layers["group"] = jax.tree.map(lambda x: jnp.zeros((repeats, *x.shape), x.dtype), group)
    zeros = jnp.zeros(batch, jnp.int32)
    return {"length": zeros, "first": zeros, "layers": layers}


def _capacity(net: LM, layers: object) -> int:
    """Return how many tokens the caches in the tree `layers` can hold; `MAX_TOKENS` if no layer is global."""
    if None not in layer_windows(net, 1)[: net.depth]:
        return MAX_TOKENS
    caches = jax.tree.leaves(layers, is_leaf=lambda x: isinstance(x, Cache))
    return max(int(cache.k.shape[-2]) for cache in caches)  # global layers have the most slots


def Model(  # noqa: N802
    vocab_size: int, *, preset: str | None = None, heads: str | None = None, **fields: Any
) -> LM:
    """Build the model, such as `Model(50257, preset="DCFormer++-405M")`; `fields` override the preset's.

    `heads` is a name of `dcvit.models.head_settings`, cross-head attention of another paper, instead of the fields of
    the composition.

    Raises:
      ValueError: the preset is unknown, with the nearest ones in the message; or `heads` is unknown or contradicts a
        field.
    """
    return LM(vocab_size, **head_settings.resolve(heads, decode_preset(preset), fields, LM.num_heads))


def load(
    init_params: Params,
    init_file: object,
    model_cfg: object,
    dont_load: Sequence[str] = (),
    upcycle: bool = False,
) -> dict[str, Any]:
    """Return `init_params` with the values of a checkpoint or of weights of another library, scanned or unrolled.

    The arguments and the errors are those of `dcvit.models.vit.load`.
    """
    from dcvit.hub.source import load_params_into  # late: the models import where Orbax is not installed

    return load_params_into(init_params, init_file, dont_load, lambda tensors: tensors, upcycle)
