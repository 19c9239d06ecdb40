"""Vision Transformer (Dosovitskiy et al., 2021) with plain or dynamically composed attention.

The plain model's parameter tree is that of big_vision, name for name, so big_vision's checkpoints load. DCViT replaces
the attention of every block (Section 4.5 of the DCMHA paper). The pooling head of `pool_type="map"` keeps plain
attention.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dcvit.dcmha.shapes import Array, Float, not_none
from dcvit.errors import CheckpointError, matches
from dcvit.models import Outputs, Params, head_settings, packed_images
from dcvit.models.attention import Attention
from dcvit.models.encoder import Encoder, MAPHead
from dcvit.models.fields import (
    QKV_BIASES,
    AttentionFields,
    TransformerFields,
    check_choices,
    check_not_negative,
    check_transformer,
    values_of,
)
from dcvit.models.input_channels import KERNEL, differs_in_channels, with_channels
from dcvit.models.layers import ACTIVATIONS, MlpBlock, grid_centers, in_float32, patch_angles, sincos
from dcvit.models.packed_images import PackedImages, TokenPlaces
from dcvit.parallel.mesh import BATCH, constrain
from dcvit.parallel.trees import Tensors

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
    "g-opt": (1536, 40, 6144, 16),  # this and the next: big_vision's
    "G": (1664, 48, 8192, 16),
    "G-opt": (1536, 48, 8192, 16),
    "e": (1792, 56, 15360, 16),  # Chen et al., 2023 (arXiv 2209.06794)
}
# Sizes in timm's and transformers' names of models, such as vit_small_patch16_224 and google/vit-base-patch16-224.
TIMM_SIZES = {
    "tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H", "giant": "g", "gigantic": "G",
}  # fmt: skip
POOLS = ("gap", "map", "tok", "tok+gap", "tok+reg", "0", "none")
POSEMBS = ("learn", "sincos2d", "rotary2d")
ROTARY_BASE = 100.0  # of DINOv3


class ViT(TransformerFields):
    """The Vision Transformer. Build it with `Model`, which also knows the variants by name.

    It also has the fields of `TransformerFields`.

    Fields:
      num_classes: C; None or 0 omits the head.
      patch_size: height and width of a patch in pixels.
      posemb: "learn", "sincos2d" (MoCo v3's fixed embedding), or "rotary2d" (DINOv3's rotation of queries and keys by
        the place of their patch).
      pool_type: "gap" (mean of the patches), "map" (attention pooling), "tok" (class token), "tok+gap" (both
        concatenated, as in DINOv2's classifier), "tok+reg" (class token and first register concatenated, which stand
        for the two averaged classifiers of a distilled DeiT), "0" (first patch), "none".
      registers: number of learned tokens that precede the patches and are not pooled (Darcet et al., 2024).
      rep_size: width of a tanh `pre_logits` layer before the head; True means `width`, False omits the layer.
      mlp: activation of the MLPs: "gelu", "gelu_tanh" (big_vision's approximation) or "swiglu".
      qkv_bias: initials of the projections among query, key and value that have a bias: "qkv", "qv" or "" (DINOv3).
      norm_epsilon: epsilon of the LayerNorms.
      pre_norm: another LayerNorm precedes the first layer, and the embedding of the patches has no bias (CLIP).
      pool_norm: the last LayerNorm follows the pooling instead of preceding it.
      layer_scale: initial value of LayerScale, a factor for each number of both residual branches (Touvron et al.,
        2021); None omits it.
      head_zeroinit: initialize the head's kernel to zero.
      head_bias_init: initial value of the head's bias, such as -log(C) for a sigmoid loss.
      dropout: dropout rate after the position embedding, inside the MLPs and on both residual branches.
      stochastic_depth: drop rate of the last block; it grows linearly from 0 at the first (a single block has 0).
    """

    num_classes: int | None = None
    patch_size: Sequence[int] = (16, 16)
    posemb: str = "learn"
    pool_type: str = "gap"
    registers: int = 0
    rep_size: int | bool = False
    mlp: str = "gelu_tanh"
    qkv_bias: str = "qkv"
    norm_epsilon: float = 1e-6
    pre_norm: bool = False
    pool_norm: bool = False
    layer_scale: float | None = None
    head_zeroinit: bool = True
    head_bias_init: float = 0.0
    dropout: float = 0.0
    stochastic_depth: float = 0.0

    @nn.compact
    def __call__(
        self, image: Float[Array, "B height width channels"] | PackedImages, *, train: bool = False
    ) -> tuple[Float[Array, "..."], Outputs]:
        """Return the logits B C, and a dict of all named intermediates, in float32 from `pre_logits` on.

        Without a head, the first result is the pooled features; with `pool_type="none"`, it has an axis of patches.

        Args:
          image: a batch of images, or images of different sizes in packed rows. Results of the latter equal those of
            each image alone. Their intermediates before the pooling have rows in place of images, and those of every
            patch, `pre_logits_2d` and `logits_2d`, are missing.
          train: enable dropout and stochastic depth, which need an rng "dropout".

        Raises:
          ValueError: a field is invalid, the patch size does not divide the image, or the heads do not divide the
            width.
          ConfigError: see `dcvit.models.packed_images.check_packed`.
        """
        check_fields(self, self.patch_size if isinstance(image, PackedImages) else image.shape[1:3])
        dtype, out = jnp.dtype(self.dtype_mm), Outputs()
        packed, grid = None, None
        if isinstance(image, PackedImages):
            packed = image.in_rows()
            x = _embedded_rows(self, packed, dtype, out)
        else:
            x, grid = _embedded(self, image, dtype, out)
        (batch, patch_count, width), images_of_row = x.shape, 1 if packed is None else packed.grids.shape[1]
        extra = self._extra_tokens(width)
        x = jnp.concatenate([*(jnp.tile(t.astype(dtype), (batch, images_of_row, 1)) for t in extra), x], axis=1)
        x = constrain(nn.Dropout(self.dropout)(x, not train), BATCH, None, None)

        attention = functools.partial(
            Attention, self.num_heads, num_key_heads=self.num_key_heads, dtype=dtype, qkv_bias=self.qkv_bias,
            remat=self.remat == "attention", **values_of(self, AttentionFields),
        )  # fmt: skip
        places = self._places(packed, grid, extra)
        mlp = functools.partial(MlpBlock, self.mlp_dim, activation=self.mlp, dtype=dtype)
        norm = functools.partial(nn.LayerNorm, epsilon=self.norm_epsilon)
        x = in_float32(norm(name="pre_norm"), x) if self.pre_norm else x
        x, out["encoder"] = Encoder(
            self.depth, self.in_layers(attention), functools.partial(mlp, dropout=self.dropout), norm,
            self.layer_scale, self.dropout, self.stochastic_depth, self.scan_layout(), self.remat,
            not self.pool_norm, name="Transformer",
        )(x, places, deterministic=not train)  # fmt: skip
        out["encoded"] = x
        patches = x[:, x.shape[1] - patch_count :]
        if self.pool_type == "map":
            pool = MAPHead(self.num_heads, mlp, norm, dtype, self.implementation, name="MAPHead_0")
            x = pool(patches, None if packed is None else packed.segments, images_of_row)
        elif packed is None:
            x = _pool(x, patches, self.pool_type)
        else:
            x = packed_images.pooled(x, patches, packed, self.pool_type)
        if packed is not None:
            x = packed_images.in_batch_order(x, packed.slots)
        elif "+" in self.pool_type:
            first = jnp.broadcast_to(out["encoded"][:, :1], patches.shape) if self.pool_type == "tok+gap" else patches
            patches = jnp.concatenate([first, patches], axis=-1)
        x = out["head_input"] = x.astype(jnp.float32)
        return self._head(x, grid and patches.reshape(batch, *grid, -1).astype(jnp.float32), out)

    def _extra_tokens(self, width: int) -> list[Array]:
        """Return the parameters of the tokens before the patches: the class token and the registers."""
        tokens = []
        if self.pool_type.startswith("tok"):
            tokens.append(self.param("cls", nn.initializers.zeros, (1, 1, width)))
        if self.registers:
            init = nn.initializers.normal(0.02)  # equal ones would stay equal
            tokens.append(self.param("registers", init, (1, self.registers, width)))
        return tokens

    def _places(self, packed: PackedImages | None, grid: tuple[int, int] | None, extra: Sequence[Array]) -> TokenPlaces:
        """Return the images and the rotary embedding of all tokens; `grid` is that of images that are not packed."""
        segments = None if packed is None else packed_images.token_segments(packed, extra)
        if self.posemb != "rotary2d":
            return TokenPlaces(segments, None)
        centers = packed_images.patch_centers(packed) if packed is not None else grid_centers(*not_none(grid))
        angles = patch_angles(centers, width=self.width // self.num_heads, base=ROTARY_BASE)
        before = sum(tokens.shape[1] for tokens in extra) * (1 if packed is None else packed.grids.shape[1])
        return TokenPlaces(segments, jnp.pad(angles, [(0, 0), (before, 0), (0, 0)]))

    def _head(self, x: Array, x_2d: Array | None, out: Outputs) -> tuple[Array, Outputs]:
        """Apply `pool_norm`, `pre_logits` and `head` to the pooled x, and to patches x_2d if they are given.

        Return x's result, and `out`.
        """
        both = [x] if x_2d is None else [x, x_2d]
        if self.pool_norm:
            both = [*map(nn.LayerNorm(epsilon=self.norm_epsilon, name="pool_norm"), both)]
        if self.rep_size:
            hidden = nn.Dense(self.width if self.rep_size is True else self.rep_size, name="pre_logits")
            both = [nn.tanh(hidden(each)) for each in both]
        out |= dict(zip(("pre_logits", "pre_logits_2d"), both, strict=False))
        if self.num_classes:
            init = nn.initializers.zeros if self.head_zeroinit else nn.linear.default_kernel_init
            bias_init = nn.initializers.constant(self.head_bias_init)
            head = nn.Dense(self.num_classes, kernel_init=init, bias_init=bias_init, name="head")
            both = [head(each) for each in both]
            out |= dict(zip(("logits", "logits_2d"), both, strict=False))
        return both[0], out


def _embedded(net: ViT, image: Array, dtype: DTypeLike, out: Outputs) -> tuple[Array, tuple[int, int]]:
    """Return the embedded patches (B T M) of images, with positions, and the rows and columns of patches."""
    patch = tuple(net.patch_size)
    x = out["stem"] = nn.Conv(
        net.width, patch, strides=patch, padding="VALID", use_bias=not net.pre_norm, dtype=dtype, name="embedding"
    )(image.astype(dtype))  # fmt: skip
    batch, rows, columns, width = x.shape
    x = x.reshape(batch, rows * columns, width)
    if net.posemb == "sincos2d":
        x = x + posemb_sincos_2d(rows, columns, width).astype(dtype)
    elif net.posemb == "learn":
        init = nn.initializers.normal(1 / np.sqrt(width))
        x = x + net.param("pos_embedding", init, (1, rows * columns, width)).astype(dtype)
    out["with_posemb"] = x
    return x, (rows, columns)


def _embedded_rows(net: ViT, packed: PackedImages, dtype: DTypeLike, out: Outputs) -> Array:
    """Return the embedded patches of packed rows, with positions."""
    packed_images.check_packed(net, packed.patches.shape[2])
    patch = (net.patch_size[0], net.patch_size[1])
    embed = packed_images.PatchDense(net.width, patch, not net.pre_norm, dtype, name="embedding")
    x = out["stem"] = embed(packed.patches.astype(dtype))
    if net.posemb == "sincos2d":
        x = x + packed_images.posemb_sincos_2d(packed, net.width).astype(dtype)
    elif net.posemb == "learn":
        table: Array | None = net.get_variable("params", "pos_embedding")
        if table is None:
            raise ValueError("posemb='learn': initialize the model by an image, whose grid the embeddings get")
        x = x + packed_images.resampled(packed, table).astype(dtype)
    out["with_posemb"] = x
    return x


def _pool(x: Array, patches: Array, pool_type: str) -> Array:
    """Return one vector for each image, from all tokens `x` or the patches; with `pool_type="none"`, the patches."""
    if pool_type == "none":
        return patches
    if pool_type in ("tok", "0"):
        return x[:, 0] if pool_type == "tok" else patches[:, 0]
    last = x[:, 1] if pool_type == "tok+reg" else jnp.mean(patches, axis=1)
    return last if pool_type == "gap" else jnp.concatenate([x[:, 0], last], axis=-1)


def check_fields(net: ViT, sides: Sequence[int]) -> None:
    """Raise ValueError if a model's fields are invalid or do not fit images with `sides`, height and width."""
    check_choices(net, pool_type=POOLS, posemb=POSEMBS, mlp=ACTIVATIONS, qkv_bias=QKV_BIASES)
    check_not_negative(net, "rep_size", "registers", "layer_scale")
    if net.pool_type == "tok+reg" and not net.registers:
        raise ValueError("pool_type='tok+reg' needs a register, found registers=0")
    if net.pool_norm and "+" in net.pool_type:
        raise ValueError(f"pool_norm=True needs one pooled vector, found pool_type={net.pool_type!r}")
    if net.norm_epsilon <= 0:
        raise ValueError(f"norm_epsilon={net.norm_epsilon} should be above 0")
    for name in ("dropout", "stochastic_depth"):
        if not 0 <= getattr(net, name) < 1:
            raise ValueError(f"{name}={getattr(net, name)} should be in [0, 1)")
    check_transformer(net)
    if len(net.patch_size) != 2 or any(p < 1 or size % p for p, size in zip(net.patch_size, sides, strict=True)):
        raise ValueError(f"patch_size={tuple(net.patch_size)} does not divide the image, {sides[0]}x{sides[1]}")
    if net.posemb == "rotary2d" and net.width // net.num_heads % 4:
        raise ValueError(
            f"posemb='rotary2d' needs heads whose width is a multiple of 4, found {net.width // net.num_heads}"
        )
    if net.posemb == "sincos2d" and (net.width % 4 or net.width < 8):
        raise ValueError(f"posemb='sincos2d' needs a width of at least 8 that is a multiple of 4, found {net.width}")


def Model(  # noqa: N802
    num_classes: int | None = None,
    *,
    variant: str | None = None,
    heads: str | None = None,
    remat_policy: str | None = None,
    **fields: Any,
) -> ViT:
    """Build the model, such as `Model(1000, variant="DCViT-S/16", rep_size=True)`; `fields` override the variant's.

    `heads` is a name of `dcvit.models.head_settings`, cross-head attention of another paper, instead of the fields of
    the composition. `remat_policy` is big_vision's name for the field `remat`, with the same values; here it also
    applies to layers that are not scanned.

    Raises:
      ValueError: the variant is unknown, with the nearest ones in the message; `heads` is unknown or contradicts a
        field; or both `remat` and `remat_policy` are given.
    """
    if remat_policy is not None:
        if "remat" in fields:
            raise ValueError(f"{remat_policy=} and remat={fields['remat']!r} are the same field; give one of them")
        fields["remat"] = remat_policy
    return ViT(num_classes, **head_settings.resolve(heads, decode_variant(variant), fields, ViT.num_heads))


def decode_variant(variant: str | None) -> dict[str, Any]:
    """Return the fields of a variant: "S", "S/16", "ViT-S/16", or "DCViT-S/16" for composed attention.

    Raises:
      ValueError: the variant is unknown; the message names the nearest ones.
    """
    if variant is None:
        return {}
    size, slash, patch = variant.partition("/")
    composed = size.startswith("DCViT-")
    size = size.removeprefix("DCViT-").removeprefix("ViT-")
    if size not in VARIANTS or (slash and not (patch.isascii() and patch.isdigit() and int(patch) > 0)):
        hint = f"sizes: {', '.join(VARIANTS)}"
        if near := difflib.get_close_matches(size, VARIANTS, n=3, cutoff=0.3):
            hint = f"nearest sizes: {', '.join(near)}"
        if timm := re.fullmatch(rf"(?:.*/)?(?:vit|deit3?)[_-]({'|'.join(TIMM_SIZES)})[_-]patch([0-9]+).*", variant):
            hint = f"did you mean 'ViT-{TIMM_SIZES[timm[1]]}/{timm[2]}'?"
        raise ValueError(f"unknown variant {variant!r}; expected [DC][ViT-]SIZE[/PATCH], e.g. 'DCViT-S/16'; {hint}")
    fields: dict[str, Any] = dict(zip(("width", "depth", "mlp_dim", "num_heads"), VARIANTS[size], strict=True))
    if slash:
        fields["patch_size"] = (int(patch), int(patch))
    if composed:
        fields["compose"] = "both"
    return fields


def posemb_sincos_2d(rows: int, columns: int, width: int) -> Float[Array, "1 T M"]:
    """Return MoCo v3's fixed embedding of a grid: `sincos` of the column of each patch, then of its row."""
    y, x = (grid.ravel() for grid in np.mgrid[:rows, :columns])
    return jnp.asarray(np.concatenate([sincos(columns, width)[x], sincos(rows, width)[y]], axis=1)[None])


def resample_grid(old: Float[Array, "1 S M"], grid: tuple[int, int], new: tuple[int, int]) -> Float[Array, "1 T M"]:
    """Interpolate position embeddings from a grid (rows, columns) to another, linearly and with aligned corners."""
    table = np.asarray(old).reshape(*grid, -1)
    for axis, (before, after) in enumerate(zip(grid, new, strict=True)):
        at = np.linspace(0, before - 1, after)
        low = np.floor(at).astype(int)
        part = np.expand_dims(at - low, (1 - axis, 2))
        high = np.minimum(low + 1, before - 1)
        table = table.take(low, axis) * (1 - part) + table.take(high, axis) * part
    return jnp.asarray(table.reshape(1, new[0] * new[1], -1), old.dtype)


def with_grid(tensors: Tensors, grid: tuple[int, int], new: tuple[int, int]) -> Tensors:
    """Return parameters by path, with learned position embeddings (if any) interpolated to another grid of patches."""
    old = tensors.get("pos_embedding")
    if old is None or grid == new:
        return tensors

    def read() -> np.ndarray:
        return np.asarray(resample_grid(jnp.asarray(old.read()), grid, new))

    return {**tensors, "pos_embedding": old._replace(shape=(1, new[0] * new[1], old.shape[2]), read=read)}


def _grid_sizes(*tokens: int) -> list[int]:
    """Return the side of a square grid for each number in `tokens`. Raise CheckpointError if one is not a square."""
    sizes = [math.isqrt(n) for n in tokens]
    if any(size * size != n for size, n in zip(sizes, tokens, strict=True)):
        raise CheckpointError(
            f"cannot resample position embeddings from {tokens[0]} to {tokens[1]} positions: expected square grids; "
            "to start them from their initial values: --config.model_load.dont_load=\"['pos_embedding']\""
        )
    return sizes


def load(
    init_params: Params,
    init_file: object,
    model_cfg: object,
    dont_load: Sequence[str] = (),
    upcycle: bool = False,
    channels: str | None = None,
) -> dict[str, Any]:
    """Return `init_params` with the values of a checkpoint or of weights of another library, scanned or unrolled.

    Learned position embeddings are resampled to the model's grid.

    Args:
      init_params: parameters of the model.
      init_file: the name of a workdir, a checkpoint or weights of any format, or what `dcvit.hub.source.find` found.
      model_cfg: unused; big_vision's trainer passes it.
      dont_load: regexes; parameters whose name matches one keep their initial value.
      upcycle: start compositions that the checkpoint lacks as the identity, so that the model computes the function
        of the checkpoint's model; see `dcvit.models.upcycling`.
      channels: "repeat" or "mean": adapt the embedding of patches to images of another number of channels; see
        `dcvit.models.input_channels`. By default another number is an error.

    Raises:
      dcvit.errors.CheckpointError: the file is unreadable, names or shapes differ (both sides are listed), or the model
        cannot be upcycled.
      dcvit.errors.ConfigError: `channels` is unknown or has no effect.
    """
    from dcvit.hub.source import load_params_into  # late: the models import where Orbax is not installed

    hints: list[str] = []

    def convert(loaded: Tensors) -> Tensors:
        shape = tuple(init_params["embedding"]["kernel"].shape)
        if channels is not None:
            loaded = with_channels(loaded, shape[2], channels, dont_load)
        elif differs_in_channels(loaded, shape):
            hints.append("; to adapt it to the other number of channels: --config.model_load.channels=repeat")
        old, new = loaded.get("pos_embedding"), init_params.get("pos_embedding")
        if old is None or new is None or len(old.shape) != 3 or old.shape[1] == new.shape[1]:
            return loaded
        if any(matches(pattern, ["pos_embedding"], "dont_load") for pattern in dont_load):
            return loaded
        before, after = _grid_sizes(old.shape[1], new.shape[1])
        return with_grid(loaded, (before, before), (after, after))

    try:
        return load_params_into(init_params, init_file, dont_load, convert, upcycle)
    except CheckpointError as e:
        raise CheckpointError(f"{e}{''.join(hints) if KERNEL in str(e) else ''}") from None
