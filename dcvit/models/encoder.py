"""Blocks of the Vision Transformer: the encoder, and the pooling head of `pool_type="map"`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dcvit.dcmha.shapes import Array, Float, Int
from dcvit.models import Outputs
from dcvit.models.attention import Attention
from dcvit.models.fields import rematerialized
from dcvit.models.layers import LayerGroup, MlpBlock, in_float32
from dcvit.models.packed_images import TokenPlaces
from dcvit.parallel.mesh import BATCH, constrain


class Encoder1DBlock(nn.Module):
    """Attention and MLP, each with a LayerNorm before it and a residual connection around it.

    Fields:
      attention, mlp, norm: constructors of the submodules.
      layer_scale: initial value of LayerScale, a factor for each number of both residual branches (Touvron et al.,
        2021); None omits it.
      dropout: dropout rate of both residual branches.
      deterministic: disable dropout and stochastic depth.
      index: index of the block, from 0; in a scan, its index in the scan's body.
    """

    attention: Callable[..., Attention]
    mlp: Callable[..., MlpBlock]
    norm: Callable[..., nn.LayerNorm]
    layer_scale: float | None = None
    dropout: float = 0.0
    deterministic: bool = True
    index: int = 0

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T M"], places: TokenPlaces | None, drop_rate: Float[Array, ""] | None
    ) -> tuple[Float[Array, "B T M"], dict[str, Array]]:
        """Return the output, and the intermediates by name.

        Args:
          x: the input.
          places: the places of the tokens; None: each row is one image, without a rotary embedding.
          drop_rate: probability that stochastic depth skips an example's residual branch; None: no stochastic depth.
        """
        attention = self.attention(layer=self.index, name="MultiHeadDotProductAttention_0")
        out = {}
        y = in_float32(self.norm(), x)
        segments, angles = (None, None) if places is None else places
        y = out["sa"] = self._scale("layer_scale_0", attention(y, angles=angles, segments=segments))
        x = out["+sa"] = constrain(x + self._residual(y, segments, drop_rate), BATCH, None, None)
        y = in_float32(self.norm(), x)
        y = out["mlp"] = self._scale("layer_scale_1", self.mlp()(y, self.deterministic))
        x = out["+mlp"] = constrain(x + self._residual(y, segments, drop_rate), BATCH, None, None)
        return x, out

    def _scale(self, name: str, y: Array) -> Array:
        """Multiply the output `y` of a residual branch by LayerScale's parameter, if there is LayerScale."""
        if self.layer_scale is None:
            return y
        scale = self.param(name, nn.initializers.constant(self.layer_scale), y.shape[-1:])
        return y * scale.astype(y.dtype)[None, None]

    def _residual(self, y: Array, segments: Array | None, drop_rate: Array | None) -> Array:
        """Apply dropout, then stochastic depth (Huang et al., 2016), which drops images and rescales the others."""
        y = nn.Dropout(self.dropout)(y, self.deterministic)
        if self.deterministic or drop_rate is None:
            return y
        keep = 1 - drop_rate
        images = 1 if segments is None else segments.shape[1] + 1  # no id of a row is larger than its length
        kept = jax.random.bernoulli(self.make_rng("dropout"), keep, (y.shape[0], images, 1))
        kept = kept if segments is None else jnp.take_along_axis(kept, segments[..., None], axis=1)
        return jnp.where(kept, y / keep.astype(y.dtype), jnp.zeros_like(y))


class Encoder(nn.Module):
    """`depth` blocks, all unrolled, or a scan over groups of blocks, then the rest; a LayerNorm at the end.

    In the parameter tree, a group of one block is "encoderblock", as in big_vision. A longer group is "encodergroup".

    Fields:
      depth: L.
      attention, mlp, norm, layer_scale, dropout: see `Encoder1DBlock`.
      stochastic_depth, remat: see `ViT` and `TransformerFields`.
      layout: see `TransformerFields.scan_layout`.
      last_norm: apply the LayerNorm.
    """

    depth: int
    attention: Callable[..., Attention]
    mlp: Callable[..., MlpBlock]
    norm: Callable[..., nn.LayerNorm]
    layer_scale: float | None = None
    dropout: float = 0.0
    stochastic_depth: float = 0.0
    layout: tuple[int, int] = (1, 0)
    remat: str = "none"
    last_norm: bool = True

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T M"], places: TokenPlaces | None = None, deterministic: bool = True
    ) -> tuple[Float[Array, "B T M"], Outputs]:
        """Return the output, and the intermediates by block; see `Encoder1DBlock`."""
        out: Outputs = {}
        fields: dict[str, object] = {
            "attention": self.attention, "mlp": self.mlp, "norm": self.norm, "layer_scale": self.layer_scale,
            "dropout": self.dropout, "deterministic": deterministic,
        }  # fmt: skip
        period, repeats = self.layout
        rates = np.linspace(0, self.stochastic_depth, self.depth, dtype=np.float32)
        if repeats:
            x, stacked = self._scan(x, places, fields, rates[: repeats * period].reshape(repeats, period))
            for layer in range(repeats * period):
                repeat, place = divmod(layer, period)
                out[f"block{layer:02d}"] = jax.tree.map(lambda o, i=repeat: o[i], stacked[place])
        block_class = rematerialized(Encoder1DBlock, self.remat, scanned=False)
        for layer in range(repeats * period, self.depth):
            rate = jnp.asarray(rates[layer]) if rates[layer] else None
            x, out[f"block{layer:02d}"] = block_class(**fields, index=layer, name=f"encoderblock_{layer}")(
                x, places, rate
            )
        out["pre_ln"] = x
        return in_float32(self.norm(name="encoder_norm"), x) if self.last_norm else x, out

    def _scan(
        self, x: Array, places: TokenPlaces | None, fields: dict[str, object], rates: np.ndarray
    ) -> tuple[Array, list[dict[str, Array]]]:
        """Apply scanned blocks with drop `rates` (group, block); return the output, and each block's intermediates."""
        repeats, period = rates.shape
        block_class = rematerialized(Encoder1DBlock, self.remat, scanned=True)
        drop_rates = [jnp.asarray(own) if rates.any() else None for own in rates.T]
        scan = functools.partial(
            nn.scan, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True},
            length=repeats, in_axes=(nn.broadcast, 0),
        )  # fmt: skip
        if period == 1:
            x, out = scan(block_class)(**fields, name="encoderblock")(x, places, drop_rates[0])
            return x, [out]
        blocks = [functools.partial(block_class, **fields, index=i) for i in range(period)]
        return scan(LayerGroup)(blocks, name="encodergroup")(x, (places,), drop_rates)


class MAPHead(nn.Module):
    """Multi-head attention pooling: a learned probe attends to all tokens (Zhai et al., 2022).

    Fields:
      num_heads: H.
      mlp, norm: constructors of the submodules.
      dtype: dtype of the computation of attention.
      implementation: see `dcvit.dcmha.attention`.
    """

    num_heads: int
    mlp: Callable[..., MlpBlock]
    norm: Callable[..., nn.LayerNorm]
    dtype: DTypeLike | None = None
    implementation: str | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T M"], segments: Int[Array, "B T"] | None = None, images: int = 1
    ) -> Float[Array, "B M"] | Float[Array, "B images M"]:
        """Return the output of the probe, one vector for each example; with segments, one for each image of a row.

        Args:
          x: the tokens.
          segments: the number of each token's image in its row; other numbers, from `images` on, are padding.
          images: the number of images of a row.
        """
        batch, _, width = x.shape
        probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, width)).astype(x.dtype)
        probe = jnp.tile(probe, (batch, images, 1))
        pair = None if segments is None else (jnp.tile(jnp.arange(images), (batch, 1)), segments)
        attention = Attention(
            self.num_heads, dtype=self.dtype, implementation=self.implementation, name="MultiHeadDotProductAttention_0"
        )
        x = attention(probe, x, segments=pair)
        y = in_float32(self.norm(), x)
        x = x + self.mlp()(y)
        return x[:, 0] if segments is None else x
