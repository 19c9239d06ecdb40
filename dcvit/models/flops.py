"""Formulas for the number of floating point operations of a forward pass and of a training step.

A multiply-add counts as two operations. Matrix products count, and so do the gates of a composition, which are products
with a diagonal matrix. Products with the zeros of a block-diagonal matrix (`dcvit.dcmha.dynamic_weights`) do not count,
although programs compute them, nor do embedding lookups, rotary embeddings, biases, norms, LayerScale, softmax,
activations, pooling and residual additions.

Letters are those of the paper: T queries, S keys, M width, H heads, K key heads, D = M/H, R rank, G groups, L layers,
F the MLP's width, V the vocabulary, C classes. In addition, P is the number of visible query-key pairs, J = H/G that of
heads in a group, and I = 2·R·J the inner width of a group's dynamic projection.
"""

from __future__ import annotations

import flax.linen as nn
import jax

from dcvit.models.fields import TransformerFields
from dcvit.models.lm import LM, layer_windows
from dcvit.models.vit import ViT


def training_flops(net: nn.Module, example: jax.ShapeDtypeStruct) -> int | None:
    """Return the operations of a training step for one example; the backward pass counts as two forward passes.

    Recomputation by rematerialization does not count. Divided by the time of an example and by the peak rate of the
    chips, this is model FLOPs utilization (MFU; Chowdhery et al., 2022, Appendix B). Arguments and None are those of
    `forward_flops`.
    """
    forward = forward_flops(net, example)
    return forward and 3 * forward


def forward_flops(net: nn.Module, example: jax.ShapeDtypeStruct) -> int | None:
    """Return the operations from one example to its logits, or None if there is no formula for the model.

    The example is the shape of an image (1 height width channels) or of a row of tokens (1 T).
    """
    if isinstance(net, ViT):
        _, height, width, channels = example.shape
        return vit_flops(net, (height, width, channels))
    return lm_flops(net, example.shape[1]) if isinstance(net, LM) else None


def vit_flops(net: ViT, image_shape: tuple[int, int, int]) -> int:
    """Return the operations from one image (height, width, channels) to its logits.

    In multiply-adds, with T tokens (patches, class token and registers), which all attend to each other, and n matrices
    in an MLP (3 for SwiGLU, otherwise 2):

      patches · p_h·p_w·channels·M                           embedding
      L · (attention(T, T, T²) + compositions + n·T·M·F)     blocks, with 0, 1 or 2 compositions
      attention(1, patches, patches) + n·M·F                 attention pooling, plain
      M·rep + rep·C, once (for each patch if unpooled)       pre_logits and head; 2·M for M with two pools

    The intermediates of every patch, `pre_logits_2d` and `logits_2d`, do not count, because a compiled prediction does
    not compute them.
    """
    (height, width, channels), (p_h, p_w) = image_shape, net.patch_size
    patches = (height // p_h) * (width // p_w)
    tokens = patches + net.pool_type.startswith("tok") + net.registers
    mlp = (3 if net.mlp == "swiglu" else 2) * net.width * (net.mlp_dim or 4 * net.width)
    total = patches * p_h * p_w * channels * net.width
    block = _attention(net.width, _key_width(net), tokens, tokens, tokens**2)
    total += net.depth * (block + tokens * mlp)
    total += sum(_compositions(net, layer, tokens, tokens**2) for layer in range(net.depth))
    if net.pool_type == "map":
        total += _attention(net.width, net.width, 1, patches, patches) + mlp
    pooled = net.width * (2 if "+" in net.pool_type else 1)
    features = net.width if net.rep_size is True else net.rep_size or pooled
    head = (pooled * features if net.rep_size else 0) + features * (net.num_classes or 0)
    return 2 * (total + head * (patches if net.pool_type == "none" else 1))


def lm_flops(net: LM, length: int) -> int:
    """Return the operations from one row of `length` tokens, T, to the logits after each of them.

    In multiply-adds, summed over the layers:

      attention(T, T, P) + compositions + n·T·M·F      n = 3 matrices for SwiGLU, otherwise 2
      T·M·E                                            the gate of E groups of an MLP's hidden layer, if there is one
      T·M·V, once                                      the head, tied or not

    Computation for each query-key pair (q·k, weights·v and the compositions) counts for the P pairs that causality and
    the layer's window allow (`visible_pairs`), about half of all pairs; implementations may also compute masked pairs.
    Pairs of different documents count although `end_of_text` masks them, because their number depends on the data.
    """
    windows = layer_windows(net, length)
    matrices = 3 if net.mlp == "swiglu" else 2
    mlp = net.width * (matrices * (net.mlp_dim or 4 * net.width) + (net.mlp_groups or 0))
    total = length * (net.depth * mlp + net.width * net.vocab_size)
    for layer in range(net.depth):
        pairs = visible_pairs(length, windows[layer % len(windows)])
        total += _attention(net.width, _key_width(net), length, length, pairs)
        if net.compose_window is not None:
            pairs = min(pairs, visible_pairs(length, net.compose_window))
        total += _compositions(net, layer, length, pairs)
    return 2 * total


def visible_pairs(length: int, window: int | None) -> int:
    """Return the visible query-key pairs of a causal row: Σ min(i, window) for i = 1 … T, or T·(T+1)/2 if unlimited."""
    full = length if window is None else min(window, length)
    return full * (full + 1) // 2 + (length - full) * full


def _key_width(net: TransformerFields) -> int:
    """Return K·D, the width of the keys."""
    return (net.num_key_heads or net.num_heads) * (net.width // net.num_heads)


def _attention(width: int, key_width: int, queries: int, keys: int, pairs: int) -> int:
    """Return multiply-adds of plain attention: 2·T·M² (q, out), 2·S·M·K·D (k, v), 2·P·H·D (q·k, weights·v)."""
    return 2 * (queries * width + keys * key_width + pairs) * width


def _compositions(net: TransformerFields, layer: int, tokens: int, pairs: int) -> int:
    """Return multiply-adds of a layer's compositions (`Composition.multiply_adds`)."""
    composition, heads = net.composition_of(layer), net.num_heads
    if composition.compose is None:
        return 0
    return composition.multiply_adds(heads, net.num_key_heads or heads, net.width, tokens, pairs)
