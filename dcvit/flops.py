"""How many floating point operations a forward pass takes, by formula: what a table of results gives beside accuracy.

A multiply-add counts as two operations. Matrix products count, and so do the gates of a compose, which are products
with a diagonal matrix. Biases, norms, softmax, activations, pooling and residual additions do not.

Letters as in the paper: T queries, S keys, M width, H heads, D = M/H, R rank, G groups, and here J = H/G heads in a
group, I = 2·R·J the inner width of a group's dynamic projection, F the MLP's width.
"""

from __future__ import annotations

from dcvit.models.vit import ViT


def vit_flops(net: ViT, image_shape: tuple[int, int, int]) -> int:
    """Operations from one image (height, width, channels) to its logits.

    In multiply-adds, with T tokens (one more than patches for `pool_type="tok"`):

      patches · p_h·p_w·channels·M                 embedding
      L · (attention(T, T) + composes + 2·T·M·F)   blocks, with 0, 1 or 2 composes
      attention(1, T) + 2·M·F                      attention pooling, never composed
      M·rep + rep·C, once (T times unpooled)       pre_logits and head

    The intermediates for every patch, `pre_logits_2d` and `logits_2d`, are left out: a compiled prediction does not
    compute them.
    """
    (height, width, channels), (p_h, p_w) = image_shape, net.patch_size
    patches = (height // p_h) * (width // p_w)
    tokens = patches + (net.pool_type == "tok")
    mlp = 2 * net.width * (net.mlp_dim or 4 * net.width)
    composes = {None: 0, "pre": 1, "post": 1, "both": 2}[net.compose]
    composed = composes and composes * _compose(net, tokens, tokens)
    total = patches * p_h * p_w * channels * net.width
    total += net.depth * (_attention(net.width, tokens, tokens) + composed + tokens * mlp)
    if net.pool_type == "map":
        total += _attention(net.width, 1, tokens) + mlp
    features = net.width if net.rep_size is True else net.rep_size or net.width
    head = (net.width * features if net.rep_size else 0) + features * (net.num_classes or 0)
    return 2 * (total + head * (tokens if net.pool_type == "none" else 1))


def _attention(width: int, queries: int, keys: int) -> int:
    """Multiply-adds of plain attention: 2·T·M² for q and out, 2·S·M² for k and v, 2·T·S·H·D for q·k and weights·v."""
    return 2 * (queries + keys) * width**2 + 2 * queries * keys * width


def _compose(net: ViT, queries: int, keys: int) -> int:
    """Multiply-adds of one compose: its dynamic weights from the inputs, then Eqn 7 on every query-key pair.

      each side, N = T or S:    N·(M·G·I + G·I²) for w_1 and w_2,   N·M·H for the gate
      each pair of T·S:         2·R·H (down H→R, up R→H) and H (gate) for each side,   H·J for the static W_b

    With G = 1 the weights are the paper's N·(M·2RH + (2RH)² + M·H).
    """
    heads, rank, per_group = net.num_heads, net.rank, net.num_heads // net.groups
    inner = 2 * rank * per_group
    to_weights = net.projection * net.groups * inner * (net.width + inner) + net.gate * net.width * heads
    each_pair = net.projection * 2 * rank * heads + net.gate * heads
    tokens = queries * ("q" in net.branches) + keys * ("k" in net.branches)
    pairs = queries * keys * (len(net.branches) * each_pair + net.static * heads * per_group)
    return tokens * to_weights + pairs
