"""Layers that both models use: normalization in float32, the MLP block, and groups of layers for a scan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from dcvit.dcmha.shapes import Array, Float
from dcvit.parallel.mesh import BATCH, constrain

ACTIVATIONS: dict[str, Callable[..., Array]] = {
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_tanh": nn.gelu,
    "swiglu": nn.silu,
}


def in_float32(norm: nn.Module, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Apply a normalization layer in float32 and return the result in the dtype of `x`."""
    normalized: Array = norm(x.astype(jnp.float32))
    return normalized.astype(x.dtype)


class MlpBlock(nn.Module):
    """Two dense layers with an activation between them; SwiGLU has a third one as a gate (Shazeer, 2020).

    Fields:
      mlp_dim: F, the hidden width; None means 4·M.
      activation: "gelu", "gelu_tanh" (GPT's approximation) or "swiglu".
      groups: number of equal groups of the hidden layer, which are multiplied by a softmax over groups of a dense layer
        (without bias) of the input; None means no such gate.
      dropout: dropout rate of the hidden layer.
      use_bias: the dense layers have biases.
      kernel_init: initializer of the kernels.
      out_init: initializer of the last kernel; None means `kernel_init`.
      bias_init: initializer of the biases.
      dtype: dtype of the computation; parameters are float32.
      names: names of the first layer, the gate and the last layer in the parameter tree; big_vision's by default.
    """

    mlp_dim: int | None = None
    activation: str = "gelu_tanh"
    groups: int | None = None
    dropout: float = 0.0
    use_bias: bool = True
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    out_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.normal(1e-6)
    dtype: DTypeLike | None = None
    names: tuple[str, str, str] = ("Dense_0", "gate", "Dense_1")

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"], deterministic: bool = True) -> Float[Array, "B T M"]:
        dense = functools.partial(nn.Dense, use_bias=self.use_bias, bias_init=self.bias_init, dtype=self.dtype)
        first, gate, last = self.names
        width = x.shape[-1]
        mlp_dim = self.mlp_dim or 4 * width
        hidden = ACTIVATIONS[self.activation](dense(mlp_dim, kernel_init=self.kernel_init, name=first)(x))
        if self.activation == "swiglu":
            hidden = hidden * dense(mlp_dim, kernel_init=self.kernel_init, name=gate)(x)
        if self.groups:
            scores = nn.Dense(
                self.groups, use_bias=False, kernel_init=self.kernel_init, dtype=self.dtype, name="group_gate"
            )(x)
            scores = nn.softmax(scores.astype(jnp.float32)).astype(hidden.dtype)
            grouped = hidden.reshape(*hidden.shape[:-1], self.groups, mlp_dim // self.groups)
            hidden = (grouped * scores[..., None]).reshape(hidden.shape)
        hidden = nn.Dropout(self.dropout)(constrain(hidden, BATCH, "context", "tensor"), deterministic)
        out: Array = dense(width, kernel_init=self.out_init or self.kernel_init, name=last)(hidden)
        return out


def sincos(length: int, width: int) -> Float[np.ndarray, "length _"]:
    """Return MoCo v3's fixed embedding of the positions 0 … length - 1 on one axis: width/4 sines, then cosines.

    The frequencies are a geometric sequence from 1 to 1/10,000.
    """
    frequencies = 1 / 10_000 ** (np.arange(width // 4) / (width // 4 - 1))
    angles = np.arange(length)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


class LayerGroup(nn.Module):
    """Layers in sequence: the body of a scan.

    Fields:
      layers: constructor of each layer.
    """

    layers: Sequence[Callable[..., nn.Module]]

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T M"], shared: tuple[object, ...], own: Sequence[object] | None
    ) -> tuple[Float[Array, "B T M"], list[Any]]:
        """Return the output of the last layer, and the second result of each layer.

        Args:
          x: the input of the first layer.
          shared: further arguments, the same for all layers.
          own: the last argument of each layer; None stands for None for all layers.
        """
        results = []
        for i, layer in enumerate(self.layers):
            x, result = layer(name=f"layer_{i}")(x, *shared, own[i] if own else None)
            results.append(result)
        return x, results
