"""Projections of an attention layer: queries, keys, values and output, with QK-norm and rotary embedding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import PrecisionLike
from jax.nn.initializers import Initializer
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from dcvit.dcmha.shapes import Array, Float, Int
from dcvit.models.fields import AttentionFields, check_attention
from dcvit.models.layers import in_float32
from dcvit.parallel.mesh import BATCH, constrain, constrain_to


class Projections(AttentionFields):
    """Projections as those of flax's `MultiHeadDotProductAttention`. It also has the fields of `AttentionFields`.

    Fields:
      num_heads: H; divides the width of queries, keys and values.
      num_key_heads: K, for grouped-query attention; None means H.
      qkv_features: width H·D of the queries; None means M.
      out_features: width of the output; None means M.
      rotary: number of a head's D numbers that carry a rotary position embedding, in queries and keys.
      rotary_base: base of the frequencies of that embedding.
      rotary_scaling: see `scaled`; None means no scaling.
      rotary_grid: rows and columns of the patches (the last tokens), for a rotary embedding in two dimensions
        (`rotate_patches`); None means one dimension, the positions of the tokens.
      use_bias: the four projections have biases.
      qkv_bias: initials of the projections among query, key and value that have a bias; None: as `use_bias` says.
      kernel_init: initializer of the four projections.
      out_init: initializer of the output projection; None means `kernel_init`.
      bias_init: initializer of the biases.
      out_bias_init: initializer of the bias of the output projection; None means `bias_init`.
      norm_names: names of the norms of queries and keys in the parameter tree.
      dtype: dtype of the computation; None means that of inputs and parameters.
      param_dtype: dtype of the parameters of the projections.
      precision: precision of the products with parameters, see `jax.lax.Precision`.
      qkv_sharding: sharding of queries, keys and values (*B, T, H, D) on a mesh with axes of any names; None means
        heads over "tensor", if there is this axis.
    """

    num_heads: int
    num_key_heads: int | None = None
    qkv_features: int | None = None
    out_features: int | None = None
    rotary: int = 0
    rotary_base: float = 10_000.0
    rotary_scaling: Sequence[float] | None = None
    rotary_grid: tuple[int, int] | None = None
    use_bias: bool = True
    qkv_bias: str | None = None
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    out_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros_init()
    out_bias_init: Initializer | None = None
    norm_names: tuple[str, str] = ("query_norm", "key_norm")
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: PrecisionLike = None
    qkv_sharding: P | None = None

    def head_dim(self, width: int) -> int:
        """Return D for inputs of M = `width`.

        Raises:
          ValueError: the fields are invalid or do not fit the width.
        """
        check_attention(self, self.num_heads)
        inner = width if self.qkv_features is None else self.qkv_features
        if inner % self.num_heads:
            name = "width" if self.qkv_features is None else "qkv_features"
            raise ValueError(f"num_heads={self.num_heads} does not divide {name}={inner}")
        head_dim = inner // self.num_heads
        if self.rotary % 2 or not 0 <= self.rotary <= head_dim:
            raise ValueError(f"rotary={self.rotary} should be even and at most {head_dim}, a head's width")
        if self.rotary_grid and (self.rotary % 4 or not self.rotary):
            raise ValueError(f"rotary={self.rotary} in two dimensions should be a positive multiple of 4")
        if self.num_key_heads is not None and (self.num_key_heads < 1 or self.num_heads % self.num_key_heads):
            raise ValueError(f"num_key_heads={self.num_key_heads} does not divide num_heads={self.num_heads}")
        return head_dim

    def project(self, x_q: Array, x_k: Array, x_v: Array, positions: Array | None) -> tuple[Array, Array, Array]:
        """Return queries B T H D, keys and values B S K D of the inputs, after any QK-norm and rotary embedding."""
        head_dim = self.head_dim(x_q.shape[-1])
        biases = "qkv" * self.use_bias if self.qkv_bias is None else self.qkv_bias

        def project(name: str, x: Array, heads: int) -> Array:
            dense = HeadDense(
                heads, head_dim, use_bias=name[0] in biases, kernel_init=self.kernel_init,
                bias_init=self.bias_init, dtype=self.dtype, param_dtype=self.param_dtype,
                precision=self.precision, name=name,
            )  # fmt: skip
            out: Array = dense(x)
            if self.qkv_sharding is None:
                return constrain(out, BATCH, "context", "tensor", None)
            return constrain_to(out, self.qkv_sharding)

        key_heads = self.num_key_heads or self.num_heads
        q = project("query", x_q, self.num_heads)
        k = project("key", x_k, key_heads)
        v = project("value", x_v, key_heads)
        if self.qk_norm:
            norm: Callable[..., nn.Module] = (
                nn.RMSNorm if self.qk_norm == "rmsnorm" else functools.partial(nn.LayerNorm, use_bias=False)
            )
            q, k = (
                in_float32(norm(epsilon=self.qk_norm_epsilon, param_dtype=self.param_dtype, name=name), x)
                for name, x in zip(self.norm_names, (q, k), strict=True)
            )
        if self.rotary and positions is not None and positions.ndim == 3:
            q, k = (rotate_at(x, positions, width=self.rotary, base=self.rotary_base) for x in (q, k))
        elif self.rotary_grid:
            if positions is not None:
                raise ValueError(f"rotary_grid={self.rotary_grid} gives the positions: pass none")
            q, k = (rotate_patches(x, self.rotary_grid, width=self.rotary, base=self.rotary_base) for x in (q, k))
        elif self.rotary:
            if positions is None:
                positions = jnp.arange(x_q.shape[1])[None]
            q, k = (
                rotate(x, positions, width=self.rotary, base=self.rotary_base, scaling=self.rotary_scaling)
                for x in (q, k)
            )
        return q, k, v

    def output(self, x: Float[Array, "B T H D"], width: int) -> Float[Array, "B T _"]:
        """Return the output projection of all heads; its width is `out_features`, or `width` if that is None."""
        kernel_init, bias_init = self.out_init or self.kernel_init, self.out_bias_init or self.bias_init
        dense = nn.DenseGeneral(
            self.out_features or width, axis=(-2, -1), use_bias=self.use_bias, kernel_init=kernel_init,
            bias_init=bias_init, dtype=self.dtype, param_dtype=self.param_dtype, precision=self.precision,
            dot_general=flat_product, name="out",
        )  # fmt: skip
        out: Array = dense(x)
        return out


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
        out = jnp.matmul(x, as_matrix(kernel, width), precision=self.precision)
        if bias is not None:
            out = out + bias.reshape(*[1] * (out.ndim - 1), -1)
        return out.reshape(*x.shape[:-1], *shape)


def _flat_init(init: Initializer) -> Callable[..., Array | nn.meta.AxisMetadata[Array]]:
    """Return an initializer that draws the last two axes (H, D) as one, as `nn.DenseGeneral` does.

    If `init` returns an array boxed with metadata (`nn.meta.AxisMetadata`), so does the initializer.
    """

    def initialize(key: Array, shape: Sequence[int], dtype: DTypeLike) -> Array | nn.meta.AxisMetadata[Array]:
        flat = init(key, (*shape[:-2], shape[-2] * shape[-1]), dtype)
        found: Array | nn.meta.AxisMetadata[Array] = jax.tree.map(lambda x: jnp.reshape(x, shape), flat)
        return found

    return initialize


def flat_product(
    x: Array, kernel: Array, dimensions: jax.lax.DotDimensionNumbers, precision: PrecisionLike = None
) -> Array:
    """Return the product of (..., H, D) and (H, D, M) over H and D, computed with H·D as one axis."""
    if dimensions != (((x.ndim - 2, x.ndim - 1), (0, 1)), ((), ())):
        raise ValueError(f"expected a product over heads and their numbers, found {dimensions}")
    flat = x.reshape(*x.shape[:-2], -1)
    return jnp.matmul(flat, as_matrix(kernel, flat.shape[-1]), precision=precision)


def as_matrix(kernel: Array, rows: int) -> Array:
    """Reshape a kernel to a matrix with `rows` rows.

    The barrier keeps XLA from computing the kernel's gradient in the original shape, for which it copies activations.
    """
    matrix: Array = jax.lax.optimization_barrier(kernel.reshape(rows, -1))
    return matrix


def rotate(
    x: Float[Array, "B T H D"],
    positions: Int[Array, "#B T"],
    *,
    width: int,
    base: float,
    scaling: Sequence[float] | None = None,
) -> Float[Array, "B T H D"]:
    """Apply a rotary position embedding (Su et al., 2021) to the first `width` of D numbers, in float32.

    Number i of the first half and number i of the second half form a pair, which is rotated by the angle
    position · base^(-2i/width): the layout of GPT-NeoX and LLaMA. `scaling` changes these frequencies; see `scaled`.
    """
    frequencies = base ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    return _rotate_by(x, positions.astype(jnp.float32)[..., None] * scaled(frequencies, scaling)[None, None])


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


def rotate_patches(x: Float[Array, "B T H D"], grid: tuple[int, int], *, width: int, base: float) -> Array:
    """Apply a rotary embedding in two dimensions, as DINOv3 (Siméoni et al., 2025), to the patches.

    The patches of a grid (rows, columns) are the last tokens; those before them are not rotated. The centers of the
    patches have coordinates in [-1, 1] on both axes, so that the embedding fits any grid. Of the width/2 pairs (see
    `rotate`), the first half is rotated by the angles 2π·y·base^(-4i/width), the second half by those of x.

    Raises:
      ValueError: there are fewer tokens than patches.
    """
    before = x.shape[1] - grid[0] * grid[1]
    if before < 0:
        raise ValueError(f"rotary_grid={grid} has more patches than there are tokens, {x.shape[1]}")
    y_x = np.meshgrid(*((2 * np.arange(n) + 1) / n - 1 for n in grid), indexing="ij")
    frequencies = 2 * np.pi * base ** (-np.arange(0, width, 4) / width)
    angles = np.concatenate([coordinates.reshape(-1, 1) * frequencies for coordinates in y_x], axis=1)
    return _rotate_by(x, jnp.asarray(np.pad(angles, [(before, 0), (0, 0)])[None], jnp.float32))


def rotate_at(x: Float[Array, "B T H D"], centers: Float[Array, "B T 2"], *, width: int, base: float) -> Array:
    """Apply the rotary embedding of `rotate_patches` to tokens at coordinates (y, x); those at 0 do not rotate."""
    frequencies = jnp.asarray(2 * np.pi * base ** (-np.arange(0, width, 4) / width), jnp.float32)
    angles = [centers[..., axis, None] * frequencies[None, None] for axis in (0, 1)]
    return _rotate_by(x, jnp.concatenate(angles, axis=-1))


def _rotate_by(x: Float[Array, "B T H D"], angles: Float[Array, "#B T _"]) -> Float[Array, "B T H D"]:
    """Rotate the first pairs of each head's numbers, by one angle for each pair."""
    width = 2 * angles.shape[-1]
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    a, b = jnp.split(x[..., :width].astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([rotated, x[..., width:]], axis=-1)
