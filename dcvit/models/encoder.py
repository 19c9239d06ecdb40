"""Blocks of the Vision Transformer: the encoder, and the pooling head of `pool_type="map"`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dcvit.dcmha.shapes import Array, Float
from dcvit.models import Outputs
from dcvit.models.attention import Attention
from dcvit.models.fields import REMAT_POLICIES
from dcvit.models.layers import MlpBlock, in_float32
from dcvit.parallel.mesh import BATCH, constrain


class Encoder1DBlock(nn.Module):
    """Attention and MLP, each after a LayerNorm and inside a residual connection.

    Fields:
      attention: constructor of the attention module.
      mlp_dim: F; None means 4·M.
      dropout: dropout rate inside the MLP and on both residual branches.
      dtype: dtype of the computation.
      deterministic: disable dropout and stochastic depth.
    """

    attention: Callable[..., Attention]
    mlp_dim: int | None = None
    dropout: float = 0.0
    dtype: DTypeLike | None = None
    deterministic: bool = True

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T M"], drop_rate: Float[Array, ""]
    ) -> tuple[Float[Array, "B T M"], dict[str, Array]]:
        """Return the output and the intermediates.

        Args:
          x: the input.
          drop_rate: probability that stochastic depth skips a residual branch of an example.
        """
        out = {}
        y = in_float32(nn.LayerNorm(), x)
        y = out["sa"] = self.attention(name="MultiHeadDotProductAttention_0")(y)
        x = out["+sa"] = constrain(x + self._residual(y, drop_rate), BATCH, None, None)
        y = in_float32(nn.LayerNorm(), x)
        y = out["mlp"] = MlpBlock(self.mlp_dim, dropout=self.dropout, dtype=self.dtype)(y, self.deterministic)
        x = out["+mlp"] = constrain(x + self._residual(y, drop_rate), BATCH, None, None)
        return x, out

    def _residual(self, y: Array, drop_rate: Array) -> Array:
        """Apply dropout, then stochastic depth (Huang et al., 2016), which drops examples and rescales the others."""
        y = nn.Dropout(self.dropout)(y, self.deterministic)
        if self.deterministic:
            return y
        keep = 1 - drop_rate
        kept = jax.random.bernoulli(self.make_rng("dropout"), keep, (y.shape[0], 1, 1))
        return jnp.where(kept, y / keep.astype(y.dtype), jnp.zeros_like(y))


class Encoder(nn.Module):
    """`depth` blocks, unrolled or as one scanned block with parameters stacked over layers, then a LayerNorm.

    Fields:
      depth: L.
      attention, mlp_dim, dropout, dtype: see `Encoder1DBlock`.
      stochastic_depth, scan, remat: see `ViT` and `TransformerFields`.
    """

    depth: int
    attention: Callable[..., Attention]
    mlp_dim: int | None = None
    dropout: float = 0.0
    stochastic_depth: float = 0.0
    scan: bool = False
    remat: str = "none"
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"], deterministic: bool = True) -> tuple[Float[Array, "B T M"], Outputs]:
        """Return the normalized output, and the intermediates by block."""
        out: Outputs = {}
        block = Encoder1DBlock
        if self.remat in REMAT_POLICIES:
            # A scan's body is safe from common-subexpression elimination, which would undo the recomputation.
            block = nn.remat(block, policy=REMAT_POLICIES[self.remat], prevent_cse=not self.scan)
        fields: dict[str, Any] = {
            "attention": self.attention, "mlp_dim": self.mlp_dim, "dropout": self.dropout,
            "dtype": self.dtype, "deterministic": deterministic,
        }  # fmt: skip
        rates = jnp.linspace(0, self.stochastic_depth, self.depth, dtype=jnp.float32)
        if self.scan:
            scanned = nn.scan(
                block, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=self.depth
            )
            x, stacked = scanned(**fields, name="encoderblock")(x, rates)
            for layer in range(self.depth):
                out[f"block{layer:02d}"] = jax.tree.map(lambda o, i=layer: o[i], stacked)
        else:
            for layer in range(self.depth):
                x, out[f"block{layer:02d}"] = block(**fields, name=f"encoderblock_{layer}")(x, rates[layer])
        out["pre_ln"] = x
        return in_float32(nn.LayerNorm(name="encoder_norm"), x), out


class MAPHead(nn.Module):
    """Multi-head attention pooling: a learned probe attends to all tokens (Zhai et al., 2022).

    Fields:
      num_heads: H.
      mlp_dim: F; None means 4·M.
      dtype: dtype of the computation.
      implementation: see `dcvit.dcmha.attention`.
    """

    num_heads: int
    mlp_dim: int | None = None
    dtype: DTypeLike | None = None
    implementation: str | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B M"]:
        """Return one vector for each example."""
        batch, _, width = x.shape
        probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, width)).astype(x.dtype)
        probe = jnp.tile(probe, (batch, 1, 1))
        attention = Attention(
            self.num_heads, dtype=self.dtype, implementation=self.implementation, name="MultiHeadDotProductAttention_0"
        )
        x = attention(probe, x)
        y = in_float32(nn.LayerNorm(), x)
        return (x + MlpBlock(self.mlp_dim, dtype=self.dtype)(y))[:, 0]
