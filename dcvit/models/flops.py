"""How many floating point operations a pass takes, by formula: what a table of results gives beside accuracy.

A multiply-add counts as two operations. Matrix products count, and so do the gates of a compose, which are products
with a diagonal matrix. Embedding lookups, rotary embeddings, biases, norms, softmax, activations, pooling and residual
additions do not.

Letters as in the paper: T queries, S keys, M width, H heads, K key heads, D = M/H, R rank, G groups, L layers, F the
MLP's width, V the vocabulary, C classes; and here P query-key pairs of which the query sees the key, J = H/G heads in
a group, I = 2·R·J the inner width of a group's dynamic projection.
"""

from __future__ import annotations

from typing import Any

import jax

from dcvit.models.lm import LM, layer_windows
from dcvit.models.vit import ViT


def training_flops(net: Any, example: jax.ShapeDtypeStruct) -> int | None:
    """Operations that learning from one example needs: a backward pass counts as two forward ones.

    What rematerialisation computes again is not counted. Divided by the seconds that an example takes and by the peak
    of the chips, this is model FLOPs utilisation (MFU; Chowdhery et al., 2022, Appendix B). None where there is no
    formula for the model.
    """
    forward = forward_flops(net, example)
    return forward and 3 * forward


def forward_flops(net: Any, example: jax.ShapeDtypeStruct) -> int | None:
    """Operations from one example, an image (1 height width channels) or a row of tokens (1 T), to its logits.

    None where there is no formula for the model.
    """
    if isinstance(net, ViT):
        _, height, width, channels = example.shape
        return vit_flops(net, (height, width, channels))
    return lm_flops(net, example.shape[1]) if isinstance(net, LM) else None


def vit_flops(net: ViT, image_shape: tuple[int, int, int]) -> int:
    """Operations from one image (height, width, channels) to its logits.

    In multiply-adds, with T tokens (one more than patches for `pool_type="tok"`), which all see each other:

      patches · p_h·p_w·channels·M                           embedding
      L · (attention(T, T, T²) + composes + 2·T·M·F)         blocks, with 0, 1 or 2 composes
      attention(1, T, T) + 2·M·F                             attention pooling, never composed
      M·rep + rep·C, once (T times unpooled)                 pre_logits and head

    The intermediates for every patch, `pre_logits_2d` and `logits_2d`, are left out: a compiled prediction does not
    compute them.
    """
    (height, width, channels), (p_h, p_w) = image_shape, net.patch_size
    patches = (height // p_h) * (width // p_w)
    tokens = patches + (net.pool_type == "tok")
    mlp = 2 * net.width * (net.mlp_dim or 4 * net.width)
    total = patches * p_h * p_w * channels * net.width
    block = _attention(net.width, net.width, tokens, tokens, tokens**2) + _composes(net, tokens, tokens**2)
    total += net.depth * (block + tokens * mlp)
    if net.pool_type == "map":
        total += _attention(net.width, net.width, 1, tokens, tokens) + mlp
    features = net.width if net.rep_size is True else net.rep_size or net.width
    head = (net.width * features if net.rep_size else 0) + features * (net.num_classes or 0)
    return 2 * (total + head * (tokens if net.pool_type == "none" else 1))


def lm_flops(net: LM, length: int) -> int:
    """Operations from one row of `length` tokens, T, to the logits after each of them.

    In multiply-adds, summed over the layers:

      attention(T, T, P) + composes + n·T·M·F      n = 3 matrices for SwiGLU, 2 for the others
      T·M·V, once                                  the head, tied or not

    Whatever is computed for each query-key pair, q·k, weights·v and the composes, counts for the P pairs that causality
    and the layer's window let a query see (`visible_pairs`), about half of all; an implementation that computes the
    others, too, does more. Pairs of different documents count although `end_of_text` hides them: how many there are
    depends on the data.
    """
    windows = layer_windows(net)
    key_width = (net.num_key_heads or net.num_heads) * (net.width // net.num_heads)
    matrices = 3 if net.mlp == "swiglu" else 2
    mlp = matrices * net.width * (net.mlp_dim or 4 * net.width)
    total = length * (net.depth * mlp + net.width * net.vocab_size)
    for layer in range(net.depth):
        pairs = visible_pairs(length, windows[layer % len(windows)])
        total += _attention(net.width, key_width, length, length, pairs) + _composes(net, length, pairs)
    return 2 * total


def visible_pairs(length: int, window: int | None) -> int:
    """How many keys all queries of a causal row see: Σ min(i, window) for i = 1 … length, so T·(T+1)/2 without one."""
    full = length if window is None else min(window, length)
    return full * (full + 1) // 2 + (length - full) * full


def _attention(width: int, key_width: int, queries: int, keys: int, pairs: int) -> int:
    """Multiply-adds of plain attention: 2·T·M² for q and out, 2·S·M·K·D for k and v, 2·P·H·D for q·k and weights·v."""
    return 2 * (queries * width + keys * key_width + pairs) * width


def _composes(net: ViT | LM, tokens: int, pairs: int) -> int:
    """Multiply-adds of a layer's 0, 1 or 2 composes: their dynamic weights, then Eqn 7 on every query-key pair.

      each side of T tokens:    T·(M·G·I + G·I²) for w_1 and w_2,   T·M·H for the gate
      each of P pairs:          2·R·H (down H→R, up R→H) and H (gate) for each side,   H·J for the static W_b

    With G = 1 the weights are the paper's T·(M·2RH + (2RH)² + M·H).
    """
    if net.compose is None:
        return 0
    heads, rank, per_group = net.num_heads, net.rank, net.num_heads // net.groups
    inner = 2 * rank * per_group
    to_weights = net.projection * net.groups * inner * (net.width + inner) + net.gate * net.width * heads
    each_pair = net.projection * 2 * rank * heads + net.gate * heads
    sides = len(net.branches)
    one = tokens * sides * to_weights + pairs * (sides * each_pair + net.static * heads * per_group)
    return (2 if net.compose == "both" else 1) * one
