"""Layers that both models use: norms, projections, MLPs, position embeddings, and groups of layers for a scan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import PrecisionLike
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from dcvit.dcmha import device
from dcvit.dcmha.numerics import product, statistics_dtype
from dcvit.dcmha.shapes import Array, Float, Int
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
        dense = functools.partial(
            nn.Dense, use_bias=self.use_bias, bias_init=self.bias_init, dtype=self.dtype, dot_general=dense_product
        )
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


class HeadDense(nn.Module):
    """Projection to H heads of D numbers, with the parameters of `nn.DenseGeneral`.

    TPUs lay out the product (..., H, D) of `nn.DenseGeneral` differently from (..., H·D), and then copy it before the
    kernels read it. Here the product and the bias have the shape (..., H·D).

    Fields:
      heads, head_dim: H and D.
      use_bias, kernel_init, bias_init, dtype, param_dtype, precision: see `nn.DenseGeneral`.
    """

    heads: int
    head_dim: int
    use_bias: bool = True
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    bias_init: Initializer = nn.initializers.zeros_init()
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: PrecisionLike = None

    @nn.compact
    def __call__(self, x: Float[Array, "*B M"]) -> Float[Array, "*B H D"]:
        width, shape = x.shape[-1], (self.heads, self.head_dim)
        kernel = self.param("kernel", _flat_init(self.kernel_init), (width, *shape), self.param_dtype)
        bias = self.param("bias", _flat_init(self.bias_init), shape, self.param_dtype) if self.use_bias else None
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        out = product(x, as_matrix(kernel, width), precision=self.precision)
        if bias is not None:
            add = add_bias if device.platform() == "tpu" else jnp.add
            out = add(out, bias.reshape(*[1] * (out.ndim - 1), -1))
        return out.reshape(*x.shape[:-1], *shape)


@jax.custom_vjp
def add_bias(x: Float[Array, "*B N"], bias: Float[Array, "*#B N"]) -> Float[Array, "*B N"]:
    """Return x + bias. The gradient of the bias, a sum over tokens, is a product with ones, accumulated in float32.

    For a layer of ViT-S/16 on v5e, it takes 0.2 of the 0.35 million cycles of a sum (the TPU compiler's estimate).
    """
    return x + bias


def _bias_gradient(bias: Array, d: Array) -> tuple[Array, Array]:
    axes = tuple(range(d.ndim - 1))
    ones = jax.lax.optimization_barrier(jnp.ones(d.shape[:-1], d.dtype))  # XLA would turn the product into a sum
    total = jax.lax.dot_general(ones, d, ((axes, axes), ((), ())), preferred_element_type=jnp.float32)
    return d, total.astype(bias.dtype).reshape(bias.shape)


add_bias.defvjp(lambda x, bias: (add_bias(x, bias), bias), _bias_gradient)


def _flat_init(init: Initializer) -> Callable[..., Array | nn.meta.AxisMetadata[Array]]:
    """Return an initializer that draws the last two axes (H, D) as one, as `nn.DenseGeneral` does.

    If `init` returns an array boxed with metadata (`nn.meta.AxisMetadata`), so does the initializer.
    """

    def initialize(key: Array, shape: Sequence[int], dtype: DTypeLike) -> Array | nn.meta.AxisMetadata[Array]:
        flat = init(key, (*shape[:-2], shape[-2] * shape[-1]), dtype)
        found: Array | nn.meta.AxisMetadata[Array] = jax.tree.map(lambda x: jnp.reshape(x, shape), flat)
        return found

    return initialize


def dense_product(
    x: Array, kernel: Array, dimensions: jax.lax.DotDimensionNumbers, precision: PrecisionLike = None
) -> Array:
    """Return the product of (..., M) and (M, N) for `nn.Dense`; see `dcvit.dcmha.numerics.product`."""
    return product(x, kernel, precision=precision)


def flat_product(
    x: Array, kernel: Array, dimensions: jax.lax.DotDimensionNumbers, precision: PrecisionLike = None
) -> Array:
    """Return the product of (..., H, D) and (H, D, M) over H and D, computed with H·D as one axis."""
    if dimensions != (((x.ndim - 2, x.ndim - 1), (0, 1)), ((), ())):
        raise ValueError(f"expected a product over heads and their numbers, found {dimensions}")
    flat = x.reshape(*x.shape[:-2], -1)
    return product(flat, as_matrix(kernel, flat.shape[-1]), precision=precision)


def as_matrix(kernel: Array, rows: int) -> Array:
    """Reshape a kernel to a matrix with `rows` rows.

    The barrier keeps XLA from computing the kernel's gradient in the original shape, for which it copies activations.
    """
    matrix: Array = jax.lax.optimization_barrier(kernel.reshape(rows, -1))
    return matrix


def rotary_angles(
    positions: Int[Array, "#B T"], *, width: int, base: float, scaling: Sequence[float] | None = None
) -> Float[Array, "#B T _"]:
    """Return the angles of a rotary position embedding (Su et al., 2021) of the first `width` of D numbers.

    Pair i is rotated by the angle position · base^(-2i/width). `scaling` changes these frequencies; see `scaled`.

    Raises:
      ValueError: the width is odd.
    """
    if width % 2:
        raise ValueError(f"a rotary embedding of {width} numbers: expected an even number")
    frequencies = base ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    return positions.astype(jnp.float32)[..., None] * scaled(frequencies, scaling)[None, None]


def scaled(frequencies: Float[Array, " D"], scaling: Sequence[float] | None) -> Float[Array, " D"]:
    """Return the frequencies of a rotary embedding for a context that is longer than that of earlier training.

    (factor,) divides all by the factor. (factor, low, high, context), of LLaMA 3, keeps frequencies with more than
    `high` periods in the earlier context, divides those with fewer than `low`, and interpolates between.
    """
    factor, *ramp = scaling or (1.0,)
    if not ramp:
        return frequencies / factor
    low, high, context = ramp
    kept = jnp.clip((context * frequencies / (2 * np.pi) - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def grid_centers(rows: int, columns: int) -> Float[np.ndarray, "1 T 2"]:
    """Return (y, x) of the center of each patch of a grid, from -1 to 1 over the image."""
    y_x = np.meshgrid(*((2 * np.arange(n) + 1) / n - 1 for n in (rows, columns)), indexing="ij")
    return np.stack(y_x, axis=-1).reshape(1, -1, 2)


def patch_angles(
    centers: Float[Array, "B T 2"] | Float[np.ndarray, "B T 2"], *, width: int, base: float
) -> Float[Array, "B T _"]:
    """Return the angles of a rotary embedding in two dimensions, as DINOv3 (Siméoni et al., 2025).

    Of the width/2 pairs, the first half is rotated by the angles 2π·y·base^(-4i/width), the second half by those of x.
    With the coordinates of `grid_centers`, the embedding fits any grid. A token at (0, 0) is not rotated.

    Raises:
      ValueError: the width is no multiple of 4.
    """
    if width % 4:
        raise ValueError(f"a rotary embedding of {width} numbers in two dimensions: expected a multiple of 4")
    frequencies = (2 * np.pi * base ** (-np.arange(0, width, 4) / width)).astype(centers.dtype)
    angles = (centers[..., axis, None] * frequencies[None, None] for axis in (0, 1))
    return jnp.concatenate([jnp.asarray(x, jnp.float32) for x in angles], axis=-1)


def rotate(x: Float[Array, "B T H D"], angles: Float[Array, "#B T _"]) -> Float[Array, "B T H D"]:
    """Rotate pairs of each head's numbers, one by each angle, in float32; numbers after the pairs stay as they are.

    Number i of the first half and number i of the second half form a pair: the layout of GPT-NeoX and LLaMA. Angles
    get no gradient.

    Raises:
      ValueError: a head has fewer numbers.
    """
    width = 2 * angles.shape[-1]
    if width > x.shape[-1]:
        raise ValueError(f"a rotary embedding of {width} numbers is wider than a head, {x.shape[-1]}")
    cos, sin = (f(jax.lax.stop_gradient(angles))[:, :, None] for f in (jnp.cos, jnp.sin))
    rotated = (_rotated_by_product if device.platform() == "tpu" else _rotated_halves)(x[..., :width], cos, sin)
    return jnp.concatenate([rotated, x[..., width:]], axis=-1)


def _rotated_halves(x: Array, cos: Array, sin: Array) -> Array:
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@jax.custom_vjp
def _rotated_by_product(x: Array, cos: Array, sin: Array) -> Array:
    """Return x·cos + (-b, a)·sin for the halves (a, b) of x; a product with a matrix of 0 and ±1 swaps them, exactly.

    XLA would concatenate halves on TPUs as the maximum of two padded arrays, in passes of their own. The gradient is
    the rotation by the opposite angle.
    """
    wide = statistics_dtype(x.dtype)
    turn = jnp.asarray(np.kron([[0, 1], [-1, 0]], np.eye(cos.shape[-1])), x.dtype)
    turned = jnp.matmul(x, turn, precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide)
    return (x.astype(wide) * jnp.tile(cos, 2) + turned * jnp.tile(sin, 2)).astype(x.dtype)


_rotated_by_product.defvjp(
    lambda x, cos, sin: (_rotated_by_product(x, cos, sin), (cos, sin)),
    lambda saved, d: (_rotated_by_product(d, saved[0], -saved[1]), None, None),
)


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
