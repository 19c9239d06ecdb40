"""Eqn 4 to 8 of the paper as loops over query-key pairs in numpy: slow, simple, independent of the package."""

import itertools

import numpy as np

# The ablations of Table 9 and others. A string contains the branches that exist: q (query-wise), k (key-wise),
# p (projection), g (gate), s (static).
BRANCHES = ("qkpgs", "qkpg", "qpg", "kpg", "qkp", "qkg", "qp", "qg", "kp", "kg", "s", "qgs")


def random_weights(rng, branches, *, batch, queries, keys, heads, rank=2, groups=1):
    """Return the fields of ComposeWeights as numpy arrays, None for an absent branch."""
    fields = dict.fromkeys(("q1", "q2", "qg", "k1", "k2", "kg", "static"))
    for side, length in (("q", queries), ("k", keys)):
        if side in branches and "p" in branches:
            for name in (f"{side}1", f"{side}2"):
                fields[name] = rng.normal(size=(batch, length, rank, heads)) / 2
        if side in branches and "g" in branches:
            fields[f"{side}g"] = rng.normal(size=(batch, length, heads)) / 2
    if "s" in branches:
        fields["static"] = rng.normal(size=(groups, heads // groups, heads // groups)) / 2
    return fields


def compose(a, w, groups=1):
    """Compute Eqn 7 for each pair (i, j) and group: the new attention vector from the old one, both of H/G numbers."""
    batch, heads, queries, keys = a.shape
    size = heads // groups
    out = np.zeros_like(a)
    for b, i, j, g in itertools.product(range(batch), range(queries), range(keys), range(groups)):
        part = slice(g * size, (g + 1) * size)
        old = a[b, part, i, j]
        new = old.copy()
        if w["static"] is not None:
            new += old @ w["static"][g]
        for side, at in (("q", i), ("k", j)):
            if w[f"{side}1"] is not None:
                down, up = w[f"{side}1"][b, at][:, part].T, w[f"{side}2"][b, at][:, part]
                new += old @ down @ up
            if w[f"{side}g"] is not None:
                new += old * w[f"{side}g"][b, at, part]
        out[b, part, i, j] = new
    return out


def attention(
    q, k, v, pre, post, *, causal=False, window=None, mask=None, segments=None, groups=1, scale=None,
    compose_window=None,
):  # fmt: skip
    """Compute Eqn 4, one query at a time."""
    batch, queries, heads, width = q.shape
    keys, shared = k.shape[1], heads // k.shape[2]
    scale = 1 / np.sqrt(width) if scale is None else scale
    scores = np.zeros((batch, heads, queries, keys))
    for b, h, i, j in itertools.product(range(batch), range(heads), range(queries), range(keys)):
        scores[b, h, i, j] = scale * (q[b, i, h] @ k[b, j, h // shared])
    near = slice(None) if compose_window is None else np.subtract.outer(range(queries), range(keys)) < compose_window
    if pre is not None:
        scores[:, :, near] = compose(scores, pre, groups)[:, :, near]
    weights = np.zeros_like(scores)
    for b, h, i in itertools.product(range(batch), range(heads), range(queries)):
        visible = [j for j in range(keys) if attends(b, i, j, causal, window, mask, segments)]
        if visible:
            e = np.exp(scores[b, h, i, visible] - max(scores[b, h, i, visible]))
            weights[b, h, i, visible] = e / e.sum()
    if post is not None:
        weights[:, :, near] = compose(weights, post, groups)[:, :, near]
    out = np.zeros_like(q)
    for b, h, i in itertools.product(range(batch), range(heads), range(queries)):
        out[b, i, h] = sum(weights[b, h, i, j] * v[b, j, h // shared] for j in range(keys))
    return out


def attends(b, i, j, causal, window, mask, segments=None):
    """Return True if query i of example b attends to key j."""
    if (causal or window is not None) and j > i:
        return False
    if window is not None and j <= i - window:
        return False
    if segments is not None and segments[0][b, i] != segments[1][b, j]:
        return False
    if mask is None:
        return True
    return bool(mask[tuple(min(n, size - 1) for n, size in zip((b, 0, i, j), mask.shape, strict=True))])
