"""Vision Transformer (Dosovitskiy et al., 2021) with plain or dynamically composed attention.

The plain model's parameter tree is big_vision's, name for name, so its checkpoints load. DCViT replaces
the attention of every block (Section 4.5 of the DCMHA paper); the pooling head of `pool_type="map"`
stays plain attention.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dcvit.dcmha.shapes import Array, Float
from dcvit.models.attention import Attention, in_float32
from dcvit.parallel.mesh import BATCH, constrain

# width, depth, MLP width, heads: Table 2 of Zhai et al., 2022 (arXiv 2106.04560); M: Table 7 of the DCMHA paper.
VARIANTS = {
    "mu": (32, 1, 128, 2),
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "M": (512, 12, 2048, 8),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "So400m": (1152, 27, 4304, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
}
REMAT = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
REMATS = ("none", "attention", *REMAT)
POOLS = ("gap", "map", "tok", "0", "none")
POSEMBS = ("learn", "sincos2d")


class MlpBlock(nn.Module):
    """Two dense layers with GELU between; `mlp_dim` is 4·M by default."""

    mlp_dim: int | None = None
    dropout: float = 0.0
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"], deterministic: bool = True) -> Float[Array, "B T M"]:
        dense = functools.partial(
            nn.Dense,
            kernel_init=nn.initializers.xavier_uniform(),
            bias_init=nn.initializers.normal(1e-6),
            dtype=self.dtype,
        )
        width = x.shape[-1]
        x = constrain(nn.gelu(dense(self.mlp_dim or 4 * width)(x)), BATCH, None, "tensor")
        x = nn.Dropout(self.dropout)(x, deterministic)
        return dense(width)(x)


class Encoder1DBlock(nn.Module):
    """Attention and MLP, each after a LayerNorm and inside a residual connection."""

    attention: Callable[..., Attention]
    mlp_dim: int | None = None
    dropout: float = 0.0
    dtype: Any = None
    deterministic: bool = True

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T M"], drop_rate: Float[Array, ""]
    ) -> tuple[Float[Array, "B T M"], dict[str, Array]]:
        """`drop_rate` is the probability that stochastic depth skips a residual branch of an example."""
        out = {}
        y = in_float32(nn.LayerNorm(), x)
        y = out["sa"] = self.attention(name="MultiHeadDotProductAttention_0")(y)
        x = out["+sa"] = constrain(x + self._residual(y, drop_rate), BATCH, None, None)
        y = in_float32(nn.LayerNorm(), x)
        y = out["mlp"] = MlpBlock(self.mlp_dim, self.dropout, self.dtype)(y, self.deterministic)
        x = out["+mlp"] = constrain(x + self._residual(y, drop_rate), BATCH, None, None)
        return x, out

    def _residual(self, y: Array, drop_rate: Array) -> Array:
        """Dropout, then stochastic depth (Huang et al., 2016): whole examples dropped, the rest rescaled."""
        y = nn.Dropout(self.dropout)(y, self.deterministic)
        if self.deterministic:
            return y
        keep = 1 - drop_rate
        kept = jax.random.bernoulli(self.make_rng("dropout"), keep, (y.shape[0], 1, 1))
        return jnp.where(kept, y / keep.astype(y.dtype), jnp.zeros_like(y))


class Encoder(nn.Module):
    """`depth` blocks, unrolled or as one scanned block with parameters stacked over layers, then a LayerNorm."""

    depth: int
    attention: Callable[..., Attention]
    mlp_dim: int | None = None
    dropout: float = 0.0
    stochastic_depth: float = 0.0
    scan: bool = False
    remat: str = "none"
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"], deterministic: bool = True) -> tuple[Array, dict[str, Any]]:
        out: dict[str, Any] = {}
        block: Any = Encoder1DBlock
        if self.remat in REMAT:
            block = nn.remat(block, policy=REMAT[self.remat], prevent_cse=not self.scan)
        fields = {
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
    """Multi-head attention pooling: a learned probe attends to all tokens (Zhai et al., 2022)."""

    num_heads: int
    mlp_dim: int | None = None
    dtype: Any = None
    implementation: str | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B M"]:
        batch, _, width = x.shape
        probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, width)).astype(x.dtype)
        probe = jnp.tile(probe, (batch, 1, 1))
        attention = Attention(
            self.num_heads, dtype=self.dtype, implementation=self.implementation, name="MultiHeadDotProductAttention_0"
        )
        x = attention(probe, x)
        y = in_float32(nn.LayerNorm(), x)
        return (x + MlpBlock(self.mlp_dim, dtype=self.dtype)(y))[:, 0]


class ViT(nn.Module):
    """The Vision Transformer; build it with `Model`, which also knows the variants by name.

    Fields:
      num_classes: C; None or 0 leaves the head away.
      patch_size, width, depth, mlp_dim, num_heads: the architecture.
      posemb: "learn" or "sincos2d" (MoCo v3's fixed embedding).
      pool_type: "gap" (mean), "map" (attention pooling), "tok" (class token), "0" (first token), "none".
      rep_size: width of a tanh `pre_logits` layer before the head; True means `width`; False, none.
      head_zeroinit: the head's kernel starts at zero.
      dropout: rate after the position embedding, inside the MLP and on both residual branches.
      stochastic_depth: rate of the last block; grows linearly from 0 at the first (so a single block has 0).
      scan: one scanned block instead of `depth` unrolled ones: compiles faster, same result.
      remat: "none", "attention" (recompute what is as large as T×T), "dots" (keep matrix products) or "full" (every
        block), in the backward pass.
      dtype_mm: dtype of the computation, "float32" or "bfloat16"; parameters and logits are float32.
      compose … implementation: see `dcvit.models.attention.Attention`.
    """

    num_classes: int | None = None
    patch_size: Sequence[int] = (16, 16)
    width: int = 768
    depth: int = 12
    mlp_dim: int | None = None
    num_heads: int = 12
    posemb: str = "learn"
    pool_type: str = "gap"
    rep_size: int | bool = False
    head_zeroinit: bool = True
    dropout: float = 0.0
    stochastic_depth: float = 0.0
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
        self, image: Float[Array, "B height width channels"], *, train: bool = False
    ) -> tuple[Float[Array, "..."], dict[str, Any]]:
        """Logits (B C), and a dict of every named intermediate, in float32 from `pre_logits` on.

        Raises:
          ValueError: a field's value is unknown, the patch does not divide the image, or the heads do not
            divide the width.
        """
        self._check(image.shape)
        dtype = jnp.dtype(self.dtype_mm)
        out: dict[str, Any] = {}
        patch = tuple(self.patch_size)
        x = out["stem"] = nn.Conv(
            self.width, patch, strides=patch, padding="VALID", dtype=dtype, name="embedding"
        )(image.astype(dtype))  # fmt: skip
        batch, rows, columns, width = x.shape
        x = x.reshape(batch, rows * columns, width)
        x = out["with_posemb"] = x + self._posemb(rows, columns).astype(dtype)
        if self.pool_type == "tok":
            cls = self.param("cls", nn.initializers.zeros, (1, 1, width)).astype(dtype)
            x = jnp.concatenate([jnp.tile(cls, (batch, 1, 1)), x], axis=1)
        x = constrain(nn.Dropout(self.dropout)(x, not train), BATCH, None, None)

        attention = functools.partial(
            Attention, self.num_heads, compose=self.compose, branches=self.branches, projection=self.projection,
            gate=self.gate, static=self.static, rank=self.rank, groups=self.groups, qk_norm=self.qk_norm,
            dtype=dtype, implementation=self.implementation, remat=self.remat == "attention",
        )  # fmt: skip
        x, out["encoder"] = Encoder(
            self.depth, attention, self.mlp_dim, self.dropout, self.stochastic_depth,
            self.scan, self.remat, dtype, name="Transformer",
        )(x, deterministic=not train)  # fmt: skip
        out["encoded"] = x
        tokens = x[:, 1:] if self.pool_type == "tok" else x
        x_2d = tokens.reshape(batch, rows, columns, width).astype(jnp.float32)
        x = out["head_input"] = self._pool(x, dtype).astype(jnp.float32)
        return self._head(x, x_2d, out)

    def _pool(self, x: Array, dtype: Any) -> Array:
        """One vector for each image, or all tokens with `pool_type="none"`."""
        if self.pool_type == "map":
            return MAPHead(self.num_heads, self.mlp_dim, dtype, self.implementation, name="MAPHead_0")(x)
        if self.pool_type == "gap":
            return jnp.mean(x, axis=1)
        return x if self.pool_type == "none" else x[:, 0]

    def _head(self, x: Array, x_2d: Array, out: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
        """Applies `pre_logits` and `head` to the pooled vector and to every patch alike."""
        if self.rep_size:
            hidden = nn.Dense(self.width if self.rep_size is True else self.rep_size, name="pre_logits")
            x, x_2d = nn.tanh(hidden(x)), nn.tanh(hidden(x_2d))
        out["pre_logits"], out["pre_logits_2d"] = x, x_2d
        if self.num_classes:
            init = nn.initializers.zeros if self.head_zeroinit else nn.linear.default_kernel_init
            head = nn.Dense(self.num_classes, kernel_init=init, name="head")
            out["logits_2d"] = head(x_2d)
            x = out["logits"] = head(x)
        return x, out

    def _posemb(self, rows: int, columns: int) -> Array:
        if self.posemb == "sincos2d":
            return posemb_sincos_2d(rows, columns, self.width)
        init = nn.initializers.normal(1 / np.sqrt(self.width))
        return self.param("pos_embedding", init, (1, rows * columns, self.width))

    def _check(self, shape: Sequence[int]) -> None:
        """Raises ValueError for fields that are unknown or do not fit an image batch of `shape`."""
        for name, known in (("pool_type", POOLS), ("posemb", POSEMBS), ("remat", REMATS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}; known: {', '.join(map(repr, known))}")
        for name in ("width", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} should be 1 or more")
        for name in ("depth", "rep_size", "mlp_dim"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name}={getattr(self, name)} should not be negative")
        for name in ("dropout", "stochastic_depth"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} should be in [0, 1)")
        if self.dtype_mm not in ("float32", "bfloat16"):
            raise ValueError(f"dtype_mm={self.dtype_mm!r}; known: 'float32', 'bfloat16'")
        if len(self.patch_size) != 2 or any(
            p < 1 or size % p for p, size in zip(self.patch_size, shape[1:3], strict=True)
        ):
            raise ValueError(f"patch_size={tuple(self.patch_size)} does not divide the image, {shape[1]}x{shape[2]}")
        if self.width % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} does not divide width={self.width}")
        if self.posemb == "sincos2d" and (self.width % 4 or self.width < 8):
            raise ValueError(f"posemb='sincos2d' needs a width that is a multiple of 4 from 8 on, found {self.width}")


def Model(num_classes: int | None = None, *, variant: str | None = None, **fields: Any) -> ViT:  # noqa: N802
    """Builds the module, e.g. `Model(1000, variant="DCViT-S/16", rep_size=True)`; `fields` override the variant's.

    Raises:
      ValueError: an unknown variant; the message names the nearest ones.
    """
    return ViT(num_classes, **{**decode_variant(variant), **fields})


def decode_variant(variant: str | None) -> dict[str, Any]:
    """Fields of a variant name: "S", "S/16", "ViT-S/16", or "DCViT-S/16" for composed attention."""
    if variant is None:
        return {}
    size, slash, patch = variant.partition("/")
    composed = size.startswith("DCViT-")
    size = size.removeprefix("DCViT-").removeprefix("ViT-")
    if size not in VARIANTS or (slash and not (patch.isascii() and patch.isdigit() and int(patch) > 0)):
        near = difflib.get_close_matches(size, VARIANTS, n=3, cutoff=0.3) or list(VARIANTS)
        raise ValueError(
            f"unknown variant {variant!r}; expected [DC][ViT-]SIZE[/PATCH], e.g. 'DCViT-S/16'; "
            f"nearest sizes: {', '.join(near)} of {', '.join(VARIANTS)}"
        )
    fields: dict[str, Any] = dict(zip(("width", "depth", "mlp_dim", "num_heads"), VARIANTS[size], strict=True))
    if slash:
        fields["patch_size"] = (int(patch), int(patch))
    if composed:
        fields["compose"] = "both"
    return fields


def posemb_sincos_2d(rows: int, columns: int, width: int) -> Float[Array, "1 T M"]:
    """MoCo v3's fixed embedding: sin and cos of x, then of y, at width/4 frequencies from 1 down to 1/10,000."""
    y, x = (grid.reshape(-1, 1) for grid in np.mgrid[:rows, :columns])
    frequencies = 1 / 10_000 ** (np.arange(width // 4) / (width // 4 - 1))
    table = [f(position * frequencies) for position in (x, y) for f in (np.sin, np.cos)]
    return jnp.asarray(np.concatenate(table, axis=1)[None], jnp.float32)


def resample_posemb(old: Float[Array, "1 S M"], tokens: int) -> Float[Array, "1 T M"]:
    """Position embeddings of a square grid, interpolated linearly (corners aligned) to `tokens` positions."""
    sizes = [round(n**0.5) for n in (old.shape[1], tokens)]
    if [n * n for n in sizes] != [old.shape[1], tokens]:
        raise ValueError(f"cannot resample position embeddings from {old.shape[1]} to {tokens}: not square grids")
    grid = np.asarray(old).reshape(sizes[0], sizes[0], -1)
    at = np.linspace(0, sizes[0] - 1, sizes[1])
    low = np.floor(at).astype(int)
    high, part = np.minimum(low + 1, sizes[0] - 1), (at - low)
    rows = grid[low] * (1 - part)[:, None, None] + grid[high] * part[:, None, None]
    both = rows[:, low] * (1 - part)[None, :, None] + rows[:, high] * part[None, :, None]
    return jnp.asarray(both.reshape(1, tokens, -1), old.dtype)


def stack_blocks(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the unrolled encoder as those of the scanned one; already scanned ones stay as they are."""
    transformer = dict(params["Transformer"])
    names = [f"encoderblock_{i}" for i in range(len(transformer)) if f"encoderblock_{i}" in transformer]
    if names:
        blocks = [transformer.pop(name) for name in names]
        transformer["encoderblock"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    return {**params, "Transformer": transformer}


def unstack_blocks(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the scanned encoder as those of the unrolled one; already unrolled ones stay as they are."""
    transformer = dict(params["Transformer"])
    stacked = transformer.pop("encoderblock", None)
    if stacked is not None:
        for i in range(len(jax.tree.leaves(stacked)[0])):
            transformer[f"encoderblock_{i}"] = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
    return {**params, "Transformer": transformer}


def load(
    init_params: Mapping[str, Any], init_file: str, model_cfg: Mapping[str, Any], dont_load: Sequence[str] = ()
) -> dict[str, Any]:
    """`init_params` with the values of a checkpoint: big_vision's `.npz`, or one of this project.

    Position embeddings are resampled to the model's grid; scanned and unrolled trees convert into each
    other. Parameters whose name matches a regex of `dont_load` keep their initial value.

    Raises:
      dcvit.errors.CheckpointError: unreadable file, or trees or shapes that differ (both sides listed).
    """
    from dcvit.checkpoint.checkpointer import load_params
    from dcvit.checkpoint.params import merge_params

    loaded = load_params(init_file)
    if "Transformer" in loaded:
        loaded = (stack_blocks if model_cfg.get("scan") else unstack_blocks)(loaded)
    if "pos_embedding" in loaded and "pos_embedding" in init_params:
        loaded["pos_embedding"] = resample_posemb(
            jnp.asarray(loaded["pos_embedding"]), init_params["pos_embedding"].shape[1]
        )
    return merge_params(loaded, init_params, dont_load)
